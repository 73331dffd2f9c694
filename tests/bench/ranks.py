"""A training step on two GPUs beside the same on one: `python tests/bench/ranks.py [PART ...]`.

Parts, all if none is named, on a machine with two GPUs (about five minutes):
    check     two ranks beside one GPU with the whole batch; again, in every bit; a nan on one rank
    time      tokens a second of each GPU, and its memory: 2 GPUs (gradients beside attention's
              backward, at once, after the backward pass, never) and 1 GPU, each GPU alone with a
              model of its own, at the same time
    timeline  when launches and exchanges of a step run
    memory    what a rank takes of a GPU, without times
    muon      check and time of steps with Muon, at full load
Presets after --preset and patterns that a job's name must match after --only leave out the rest.
Two processes do the work, one for each GPU, with a watch-dog. What is known is saved at once: rows
of data/measurements/ranks.json, and in the folder $OUT. NCCL reads its own variables, as
NCCL_MAX_CTAS; --label says what to call rows that were measured with one of them, in place of
"cuda". --dry does all of it on paper, on models so small that nothing can be said of their speed.
--one-card has both ranks use one GPU, for checks and memory alone: to NCCL they are two machines
then, and copies go from one process's memory to the other's as between GPUs.
"""

import argparse
import gc
import json
import os
import re
import shutil
import sys
import time
import traceback
from functools import cache, cached_property
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace

import numpy as np

from nanoeuler import measurements
from nanoeuler.engines.gpu.ranks.exchange import AFTER, ATTENTION, ONCE
from nanoeuler.engines.gpu.ranks.nccl import bytes_of
from nanoeuler.engines.gpu.ranks.peer_copies import LEAST_COPIED
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESETS
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.training.muon import Muon, matrix_rate
from nanoeuler.training.optim import AdamW

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]  # as pytest and `nanoeuler bench` have it

import step_sides  # noqa: E402
from bench.gpu import circumstances  # noqa: E402
from bench.step import DRY_SILENCE, name_of_card, row  # noqa: E402
from pair import pair  # noqa: E402
from step_inside import TOY  # noqa: E402
from watched import serve, watch  # noqa: E402

OURS, ALONE, BOTH = "cuda", "1 GPU", "2 GPUs"
SILENT = "2 GPUs, exchanging nothing"  # each trains alone: what is left is waiting and rates
COPIES = "2 GPUs, by copies"  # gradients by copy engines, and added by who gets them
HOST = "NCCL_HOSTID"  # by which NCCL tells machines apart; it refuses two ranks on one's GPU
OTHERS = {"2 GPUs, exchanged at once": ONCE, "2 GPUs, exchanged after": AFTER,
          SILENT: ATTENTION, COPIES: ATTENTION}  # fmt: skip
CASES = [("euler-116m", 16), ("gpt2-124m", 16), ("euler-116m", 64), ("gpt2-124m", 64)]
CHECKS = "toy", "gpt2-124m", "euler-116m"
PARTS = "check", "time", "timeline", "memory", "muon"
WARM, WINDOWS = 5, 5
STEPS = {16: 30, 64: 12}  # of a window, by sequences of a GPU: a second or more
CHECKED, BROKEN, RATE = 20, 3, 1e-3  # steps of the toy; the one with a nan; its learning rate
SILENCE = 120  # seconds without a line after which it hangs; compiling takes a minute
FILE = "ranks"  # of data/measurements


def jobs_of(parts):
    """Names of jobs, "part: case: who"."""
    cases = [f"{preset} {batch}x{PRESETS[preset].context} bf16" for preset, batch in CASES]
    times = [f"time: {case}: {who}" for case in cases for who in (ALONE, BOTH, *OTHERS)]
    lines = [f"timeline: {case}: {who}" for case in cases[:3] for who in (BOTH, COPIES)]
    checks = [f"check: {what}: {who}" for what in CHECKS for who in (BOTH, COPIES)]
    rooms = [f"memory: {case}: {who}" for case in cases for who in (ALONE, BOTH)]
    muon = [f"muon: toy: {who}" for who in (BOTH, COPIES)]
    muon += [f"muon: {cases[-1]}: {who}" for who in (ALONE, BOTH, COPIES)]
    made = [*checks[:1], *times, *lines, *checks[1:], *rooms, *muon]  # what is most wanted first
    return [job for job in made if job.split(": ")[0] in parts]


# ---- Both ranks: device, link, steppers


class Mute:
    """A link that carries nothing: sums stay a rank's own, and weights of the others' what they
    were. In place of the few numbers that steps are decided by, losses and norms, each rank has its
    own for everybody's: otherwise what memory held before would do as well, and a step whose norm
    is no number is not taken.
    """

    copies = False

    def __init__(self, device, group):
        self.device, self.rank, self.size = device, group.rank, group.size

    def exchange(self, work):
        pairs = work.pairs() if work.kind == "all-gather" else []
        few = [pair for pair in pairs if bytes_of(pair[0]) < LEAST_COPIED]

        def start(stream=0):
            for given, to in few:
                self.repeat(given, to, stream)

        return start

    def repeat(self, given, to, stream):
        """Put a rank's own numbers in every rank's place."""
        if not hasattr(self.device, "driver"):
            self.device.fill(to, np.tile(self.device.host(given), self.size))
            return
        from nanoeuler.engines.gpu.host.device import check

        copy, size = self.device.driver.cuMemcpyDtoDAsync, bytes_of(given)
        for rank in range(self.size):
            if rank != self.rank:
                check(copy(to.address + size * rank, given.address, size, stream))

    def join(self):
        return lambda stream=0: None


class Rank:
    """This process: its device and link; who trains, by name; muon: whether with Muon."""

    muon = False

    def __init__(self, group, dry, shared=False):
        self.group, self.dry, self.shared = group, dry, shared
        if dry:
            import recorded

            from nanoeuler.emulator.collectives import EmulatedLink, RankDevice

            recorded.by_numpy(SimpleNamespace(setattr=setattr))
            self.device = RankDevice()
            self.link = EmulatedLink(self.device, group)
        else:
            from nanoeuler.engines.gpu.ranks.nccl import Nccl
            from nanoeuler.engines.gpu.step.stepper import NUMBER, gpu

            os.environ[NUMBER] = "0" if shared else str(group.rank)
            if shared:
                os.environ[HOST] = f"rank {group.rank}"
            self.device = gpu()
            self.link = Nccl(self.device, group)

    @cached_property
    def copies(self):
        """The link by copy engines; both ranks ask for it at the same time."""
        if self.dry:
            from nanoeuler.emulator.collectives import EmulatedLink

            return EmulatedLink(self.device, self.group, copies=True)
        from nanoeuler.engines.gpu.ranks.peer_copies import Peers

        return Peers(self.device, self.group)

    def stepper(self, who, w, device=None, link=None, pieces=1):
        """What trains these weights."""
        from nanoeuler.engines.gpu.ranks.stepper import CudaRankStepper
        from nanoeuler.engines.gpu.step.muon import MuonStepper
        from nanoeuler.engines.gpu.step.stepper import CudaStepper

        _, multiplier = step_sides.ways_of("bf16", OURS)
        how, device = {"multiplier": multiplier, "pieces": pieces}, device or self.device
        alone, optimizer = (MuonStepper, Muon) if self.muon else (CudaStepper, AdamW)
        if who == ALONE:
            return alone(w, optimizer(w), device, **how)
        how |= {"when": OTHERS.get(who, ATTENTION)} | ({"least": 1 << 14} if self.dry else {})
        others = {SILENT: lambda: Mute(self.device, self.group), COPIES: lambda: self.copies}
        link = link or others.get(who, lambda: self.link)()
        return CudaRankStepper(w, optimizer(w), device, link, self.group, **how)

    def shape(self, preset, batch):
        """The configuration, sequences of a rank, positions."""
        config = step_sides.config_of(preset, self.dry)
        return config, 1 if self.dry else batch, 8 if self.dry else config.context

    def bytes(self):
        """What the card has lent."""
        gc.collect()
        return self.device.memory_used()

    def do(self, job):
        """An outcome; both ranks do the same job at the same time."""
        part, case, who = job.split(": ")
        self.muon = part == "muon"
        if part == "check" or case == "toy":
            return check_toy(self, who) if case == "toy" else check_sums(self, case, who)
        preset, size = case.split()[:2]
        batch = int(size.split("x")[0])
        what = {"time": time_steps, "timeline": timeline, "memory": count_bytes,
                "muon": time_steps}[part]  # fmt: skip
        return what(self, preset, batch, who)


def follow(group, *how):
    """The other process: every job that rank 0 names."""
    rank = Rank(group, *how)
    while job := group.broadcast():
        attempt(rank, job)


def attempt(rank, job):
    """The outcomes of both ranks; ValueError with what went wrong on either."""
    try:
        mine = rank.do(job)
    except RuntimeError:  # the driver's or NCCL's: this process is of no more use
        raise
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        mine = {"failed": f"{type(error).__name__}: {error}"}
    try:
        both = rank.group.share(mine)
    except (EOFError, OSError):
        raise RuntimeError(f"rank {1 - rank.group.rank} has ended") from None
    for number, outcome in enumerate(both):
        if "failed" in outcome and rank.group.rank == 0:
            raise ValueError(f"rank {number}: {outcome['failed']}")
    return both


def child(*how):
    """Rank 0: hand the watch-dog's jobs on, and do them."""
    group = pair(follow, *how)
    rank = Rank(group, *how)

    def do(job):
        group.broadcast(job)
        both = attempt(rank, job)
        return {"ranks": both} if not job.startswith("timeline") else both[0]

    serve(do)
    group.broadcast("")


@cache
def first(config):
    """Weights to begin with."""
    return initialise(config, seed=0)


def copied(config):
    """A copy of them."""
    return Weights(config, flat=first(config).flat.copy())


# ---- Checks


def hashed(arrays):
    """A number that stands for all bits of arrays."""
    import hashlib

    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


def train_toy(rank, who, steps, pieces=1, broken=0):
    """(sums and norms of all steps, bits of the state, weights) of the toy."""
    from nanoeuler.engines.ranks import scatter

    toy = step_sides.config_of("gpt2-124m", True) if rank.dry else TOY
    w, true, taken = copied(toy), scatter.loss_scale, []
    this = rank.stepper(who, w, pieces=pieces)
    give = step_sides.batches(toy, 2 if rank.dry else 16, 8 if rank.dry else toy.context)
    for number in range(1, steps + 1):
        bad = number == broken and rank.group.rank == 1
        scatter.loss_scale = (lambda *a: true(*a) * np.nan) if bad else true  # of this rank alone
        taken += this.step(*give(number), RATE, number)
    scatter.loss_scale = true
    taken += this.finish()
    this.pull()
    told = np.array([[*each.sums, each.norm] for each in taken])
    copies = rank.device.host(this.memories["copies"])[: w.flat.size]
    state = [w.flat, this.optimizer.m.flat, this.optimizer.v.flat, copies]
    return told, hashed([*state, told[np.isfinite(told).all(1)]]), w.flat


def check_toy(rank, two):
    """Two ranks beside one GPU, again, and with a nan; the largest differences."""
    steps = 2 if rank.dry else CHECKED
    told, bits, flat = train_toy(rank, two, steps)
    again, after = (train_toy(rank, who, steps)[1] for who in (two, [*OTHERS][1]))
    alone, _, other = train_toy(rank, ALONE, steps, pieces=2)
    if len({*rank.group.share(bits), again, after}) > 1:
        raise ValueError(f"bits differ: {bits[:8]}, again {again[:8]}, after {after[:8]}")
    first, last = (np.abs(told[i] / alone[i] - 1).max() for i in (0, -1))
    moved, rate = np.abs(flat - other), RATE
    if rank.muon:  # no number of a direction is larger than its singular values, at most 1.3
        rate = 1.5 * matrix_rate(RATE, TOY.dim) * (TOY.hidden / TOY.dim) ** 0.5
    # The first step adds the same numbers in another order; later ones see bf16 round otherwise.
    if not (first < 1e-5 and last < 2e-2 and moved.max() <= 2.1 * rate * steps):
        raise ValueError(f"two ranks are not one GPU: {first:.1e}, {last:.1e}, {moved.max():.1e}")
    number = min(BROKEN, steps)
    broken, _, after = train_toy(rank, two, number, broken=number)
    _, _, before = train_toy(rank, two, number - 1)
    finite = [bool(x) for x in np.isfinite(broken).all(1)]
    if finite != [True] * (number - 1) + [False] or (after != before).any():
        raise ValueError(f"a nan on rank 1 was not skipped by rank {rank.group.rank}: {finite}")
    return {"first step": float(first), "last step": float(last),
            "weights": float(moved.max()), "weights, middle": float(np.median(moved))}  # fmt: skip


def check_sums(rank, preset, two):
    """Summed gradients of two sequences each, beside those of one GPU, in full size."""
    from nanoeuler.engines.gpu.step.recording import GRADIENTS

    config, batch, T = rank.shape(preset, 2)
    give, found = step_sides.batches(config, 2 * batch, T), []
    for who in two, ALONE:
        w = copied(config)
        this = rank.stepper(who, w, pieces=2 if who == ALONE else 1)
        this.step(*give(1), 0.0, 1)
        this.finish()
        if who == two:
            graph = this.gathering(GRADIENTS)
            graph.launch()
            there = rank.device.host(this.memories[GRADIENTS])
        else:
            (shared,) = (program.shared for program in this.programs.values())
            there = rank.device.host(shared[GRADIENTS]).reshape(-1).view(np.float32)
        found.append(Weights(config, flat=there[: w.flat.size].copy()))
    ours, theirs = found
    errors = {name: float(np.linalg.norm(ours[name] - theirs[name])
                          / max(np.linalg.norm(theirs[name]), 1e-30)) for name in ours}  # fmt: skip
    equal = sum(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    worst = max(errors, key=errors.get)
    # Sums of the same numbers in another order: some units of 2^-24, and more where they cancel.
    if not errors[worst] < 1e-5:
        raise ValueError(f"summed gradients are off by {errors[worst]:.1e} ({worst})")
    return {"largest error": errors[worst], "tensors": len(errors), "equal in bits": equal}


# ---- Times


def time_steps(rank, preset, batch, who):
    """Milliseconds of a step, the least and the most of a window, bytes of memory."""
    config, each, T = rank.shape(preset, batch)
    before = rank.bytes()
    this = rank.stepper(who, copied(config))
    count = 1 if rank.dry else STEPS[batch]
    give = step_sides.batches(config, each * (1 if who == ALONE else 2), T)
    made = [give(step) for step in range(1, 1 + min(count, 8))]
    number, taken, seconds = 0, [], []
    for steps in [1 if rank.dry else WARM, *[count] * (1 if rank.dry else WINDOWS)]:
        rank.group.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            taken += this.step(*made[number % len(made)], 1e-4, number + 1)
            number += 1
        taken += this.finish()
        rank.device.synchronize()
        seconds.append((time.perf_counter() - started) / steps)
    if not all(step.finite for step in taken):
        raise ValueError("a loss or a norm is not finite: steps were not taken")
    seconds = seconds[1:]
    return {"ms": 1e3 * median(seconds), "least": 1e3 * min(seconds), "most": 1e3 * max(seconds),
            "memory": rank.bytes() - before, "tokens": each * T}  # fmt: skip


def count_bytes(rank, preset, batch, who):
    """Bytes that a stepper takes of the card, with the list of one step."""
    config, each, T = rank.shape(preset, batch)
    give, taken = step_sides.batches(config, each * (1 if who == ALONE else 2), T), 0
    for _ in "ab":  # the first loads kernels, which stay
        rank.group.barrier()
        before = rank.bytes()
        rank.group.barrier()  # nobody takes before all have seen
        this = rank.stepper(who, copied(config))
        this.step(*give(1), 1e-4, 1)
        this.finish()
        rank.group.barrier()
        taken = (rank.bytes() - before) / (2 if rank.shared else 1)
        rank.group.barrier()
        del this
    return {"memory": taken}


# ---- A timeline


class Clock:
    """Events on two streams of a real device; on paper, turns."""

    def __init__(self, device, link):
        self.device, self.link, self.seen, self.turn = device, link, [], 0

    def now(self, beside):
        """A point in time on one of the streams."""
        self.turn += 1
        if not hasattr(self.device, "driver"):
            return self.turn
        from nanoeuler.engines.gpu.host.device import check

        event = check(self.device.driver.cuEventCreate(0))
        stream = self.link.side if beside else self.device.stream
        check(self.device.driver.cuEventRecord(event, stream))
        return event

    def spans(self):
        """(beside, milliseconds from the first point, to) of all that was seen."""
        if not hasattr(self.device, "driver"):
            return [(beside, a * 1e-3, b * 1e-3) for beside, a, b in self.seen]
        from nanoeuler.engines.gpu.host.device import check

        self.device.synchronize()
        first, between = self.seen[0][1], self.device.driver.cuEventElapsedTime
        return [(beside, *(float(check(between(first, x))) for x in ends))
                for beside, *ends in self.seen]  # fmt: skip


class Timed:
    """A device whose graphs are lists of starts with a point in time after each, once `on`."""

    def __init__(self, device, clock):
        self.device, self.clock, self.on = device, clock, False

    def __getattr__(self, name):
        return getattr(self.device, name)

    def capture(self, starts):
        self.starts = list(starts)
        return self

    def launch(self):
        stream, clock = getattr(self.device, "stream", 0), self.clock
        last = clock.now(False) if self.on else None
        for start in self.starts:
            start(stream)
            if self.on:
                now = clock.now(False)
                clock.seen.append((False, last, now))
                last = now


def timed(link, clock, timing):
    """The link, with points in time around each exchange."""
    carry = type(link).carry

    class Marked(type(link)):
        def carry(self, work):
            if not timing.on:
                return carry(self, work)
            begin = clock.now(True)
            carry(self, work)
            clock.seen.append((True, begin, clock.now(True)))

    made = object.__new__(Marked)
    made.__dict__.update(link.__dict__)
    return made


def timeline(rank, preset, batch, who):
    """[name, beside, from, to] in milliseconds of a step, launches of a kind in a row as one."""
    from nanoeuler.planning.step import RULES

    config, each, T = rank.shape(preset, batch)
    link = rank.copies if who == COPIES else rank.link
    clock = Clock(rank.device, link)
    device = Timed(rank.device, clock)
    link = timed(link, clock, device)
    this = rank.stepper(who, copied(config), device, link)
    give = step_sides.batches(config, 2 * each, T)
    for number in range(1, 2 if rank.dry else 5):
        this.step(*give(number), 1e-4, number)
    this.finish()
    rank.device.synchronize()
    rank.group.barrier()
    device.on = True
    this.step(*give(9), 1e-4, 9)
    this.finish()
    device.on = False
    steps = this.builder("step").build_step(each, T, RULES).program.steps
    return {"spans": shown([step.name for step in steps], clock.spans())}


def shown(names, spans):
    """Spans with names, those of forward and backward as one from exchange to exchange."""
    main = [span for span in spans if not span[0]]
    beside = [span for span in spans if span[0]]
    kinds = [name for name in names if name.startswith(("reduce", "gather", "spread"))]
    made = [[name, True, *span[1:]] for name, span in zip(kinds, beside, strict=True)]
    turn, phase = names.index("logits"), "forward"
    for i, (name, (_, begin, end)) in enumerate(zip(names, main, strict=True)):
        if i == turn:
            phase = "loss and backward"
        if name == "join":
            phase = "update"
        kind = "wait" if name == "join" else phase
        if name in kinds:
            continue
        if made and not made[-1][1] and made[-1][0] == kind:
            made[-1][3] = end
        else:
            made.append([kind, False, begin, end])
    return made


# ---- What it says, and the rows


def rows_of(outcomes, job, label, shared=False):
    """(what, case, engine, value, unit, peer, peer_value) that an outcome makes known."""
    part, case, who = job.split(": ")
    label += ", Muon" * (part == "muon")
    seen, engine = outcomes[job], label + who.removeprefix(BOTH).removeprefix(ALONE)
    if part == "check" or case == "toy":
        for name in seen["ranks"][0]:
            value = max(outcome[name] for outcome in seen["ranks"])
            where = f"{case}, {'2 ranks on one GPU' if shared else BOTH}"
            yield f"check, {name}", where, engine, value, "relative", None, None
    elif part == "memory":
        alone = outcomes.get(f"memory: {case}: {ALONE}", {})
        theirs = room(alone["ranks"]) if "ranks" in alone and who != ALONE else None
        many = "two alone" if who == ALONE else "2 ranks"
        where = f"{case}, {many} on one GPU" if shared else f"{case}, {who}"
        value, peer = room(seen["ranks"]), ALONE if theirs else None
        yield "memory of a rank", where, engine, value, "GiB", peer, theirs
    elif part == "timeline":
        for i, (name, beside, begin, end) in enumerate(seen["spans"]):
            stream = "exchanges" if beside else "launches"
            yield f"timeline {i:03}, {stream}", case, f"{engine}: {name}", end, "ms", "begin", begin
    else:
        alone = outcomes.get(f"{part}: {case}: {ALONE}", {})
        peer = (ALONE, alone["ranks"]) if "ranks" in alone and who != ALONE else (None, None)
        where = f"{case}, {who.split(', ')[0]}"
        for what, unit, use in (
            ("tokens per second a GPU", "tokens/s", rate), ("training step", "ms", took),
            ("memory a GPU", "GiB", room),
        ):  # fmt: skip
            theirs = use(peer[1]) if peer[1] else None
            yield what, where, engine, use(seen["ranks"]), unit, peer[0], theirs


def rate(ranks):
    """Tokens a second, the mean of the GPUs."""
    return mean(1e3 * outcome["tokens"] / outcome["ms"] for outcome in ranks)


def took(ranks):
    """Milliseconds, the mean of the GPUs."""
    return mean(outcome["ms"] for outcome in ranks)


def room(ranks):
    """GiB, the most of the GPUs."""
    return max(outcome["memory"] for outcome in ranks) / 2**30


class Journal:
    """All outcomes so far; each is told, and saved with what it makes known."""

    def __init__(self, where, dry, label, shared=False):
        self.where, self.dry, self.label, self.shared = where, dry, label, shared
        self.outcomes, self.rows = {}, []

    def tell(self, job, seen):
        """Print an outcome, and save rows and files."""
        self.outcomes[job] = seen
        if "failed" in seen:
            print(f"{job}: FAILED, {seen['failed']}", flush=True)
            return
        new = list(rows_of(self.outcomes, job, self.label, self.shared))
        if job.startswith("timeline"):
            print(f"{job}: {len(new)} spans, {max(each[3] for each in new):.3f} ms", flush=True)
        else:
            print(f"{job}: {json.dumps(seen['ranks'])}", flush=True)
            for what, _, _, value, unit, peer, other in new:
                beside = f", {value / other:.4f} of {peer}" if other else ""
                print(f"    {what}: {value:.6g} {unit}{beside}", flush=True)
        self.rows += [row(self.where, *each) for each in new]
        if os.environ.get("OUT"):
            out = Path(os.environ["OUT"])
            (out / f"{FILE}.json").write_text(json.dumps(self.rows, indent=0))
            (out / "outcomes.json").write_text(json.dumps(self.outcomes, indent=0))
        if not self.dry:
            try:
                measurements.update(FILE, self.rows[-len(new) :])
            except UserError as error:  # a copy without the book has no place for them
                print(error)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--dry", action="store_true", help="tiny models, on paper")
    parser.add_argument("--preset", nargs="+", default=[], help="only these")
    parser.add_argument("--only", nargs="+", default=[], help="patterns that a job's name matches")
    parser.add_argument("--label", default=OURS, help="what rows are called")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot say it")
    parser.add_argument("--one-card", action="store_true", help="the checks, of two ranks on it")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if strange := {*options.what} - {*PARTS}:
        parser.error(f"parts are {', '.join(PARTS)}, before --only, not {', '.join(strange)}")
    if options.child:
        return child(options.dry, options.one_card)
    card = name_of_card()
    if not card and not options.dry:
        print("there is no NVIDIA GPU here: nothing was measured; --dry rehearses")
        return 0
    commit = options.commit or (measurements.commit() if shutil.which("git") else "")
    where = {} if options.dry else circumstances(card, commit)  # which names PyTorch's version
    journal = Journal(where, options.dry, options.label, options.one_card)
    parts = ("check", "memory") if options.one_card else options.what or PARTS
    jobs = [job for job in jobs_of(parts)
            if all(re.search(part, job) for part in options.only)
            and any(word in job for word in options.preset or [""])]  # fmt: skip
    command = [sys.executable, __file__, "--child"] + ["--dry"] * options.dry
    command += ["--one-card"] * options.one_card
    watch(command, jobs, journal.tell, DRY_SILENCE if options.dry else SILENCE)
    failed = [job for job, seen in journal.outcomes.items() if "failed" in seen]
    print(*(f"FAILED {job}" for job in failed), sep="\n", end="\n" if failed else "")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
