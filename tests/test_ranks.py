"""Many ranks do what one process does, to the last bit, and end together."""

import os
import pickle
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
import tiers
from test_cpu import GPT2, RAGGED, problem

from nanoeuler.cli.main import main
from nanoeuler.engines.cpu.stepper import CpuStepper
from nanoeuler.engines.ranks import launch, watchdog
from nanoeuler.engines.ranks import stepper as rank_stepper
from nanoeuler.engines.ranks.controller import follow, leading
from nanoeuler.engines.ranks.group import MOST_RANKS, Alone, added, check_size, own
from nanoeuler.engines.ranks.mpi import Mpi
from nanoeuler.engines.ranks.stepper import RankStepper
from nanoeuler.engines.ranks.threads import Threads, together
from nanoeuler.engines.registry import engine_factory, make_stepper
from nanoeuler.engines.sharding import HALVINGS, additions, halved
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESETS, count_parameters
from nanoeuler.model.weights import Weights, flat_size, initialise
from nanoeuler.planning import ranks as planned
from nanoeuler.training.checkpoint import load
from nanoeuler.training.folder import checkpoints, locked, read_metrics
from nanoeuler.training.optim import PARTS, AdamW

HELPER = Path(__file__).parent / "helpers" / "failing_rank.py"
RANKS = (1, 2, 4)


# The order of the sums.


def bracketed(names, halvings):
    """The sum of names as `additions` has it, in brackets."""
    waiting = []
    for name, count in zip(names, additions(len(names), halvings), strict=True):
        waiting.append(name)
        for _ in range(count):
            newest = waiting.pop()
            waiting[-1] = f"({waiting[-1]}+{newest})"
    (total,) = waiting
    return total


def in_halves(names, halvings):
    """The same from the definition: of halves, then one by one."""
    if len(names) == 1:
        return names[0]
    if halvings:
        first, second = names[: len(names) // 2], names[len(names) // 2 :]
        return f"({in_halves(first, halvings - 1)}+{in_halves(second, halvings - 1)})"
    total = names[0]
    for name in names[1:]:
        total = f"({total}+{name})"
    return total


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 16, 17, 31, 40, 64])
def test_parts_of_the_ranks_make_the_sum_of_one(count):
    names = [str(i) for i in range(count)]
    whole = bracketed(names, HALVINGS)
    assert whole == in_halves(names, HALVINGS)
    for ranks in (1, 2, 4, 8, 16):
        if ranks > count:
            continue
        parts = halved(names, ranks.bit_length() - 1)
        left = HALVINGS - (ranks.bit_length() - 1)
        sums = [bracketed(part, left) for part in parts]
        while len(sums) > 1:
            sums = [f"({a}+{b})" for a, b in zip(sums[0::2], sums[1::2], strict=True)]
        assert sums == [whole]


def test_three_ranks_are_refused():
    for size in (0, 3, 5, 6, 2 * MOST_RANKS):
        with pytest.raises(UserError, match="expected 1, 2, 4, 8 or 16 ranks"):
            check_size(size)
    assert PARTS == MOST_RANKS == 2**HALVINGS


# What ranks ask of each other.


def conversation(group):
    """What a rank hears and holds after each kind of message; floats whose sum is inexact."""
    flat = np.random.default_rng(group.rank).standard_normal(48).astype(np.float32)
    mine, held = own(48, group.rank, group.size), {}
    for name in ("reduce_scatter", "all_gather", "gather", "scatter", "spread"):
        held[name] = flat.copy()
        getattr(group, name)(held[name])
    heard = group.share([group.rank]), group.broadcast({"of": group.rank})
    group.barrier()
    return group.rank, flat, mine, held, heard


def check_conversation(said):
    flats = np.stack([flat for _, flat, *_ in said])
    total, size = added(flats), len(said)
    own_parts = np.concatenate([flat[mine] for _, flat, mine, *_ in said])
    for rank, flat, mine, held, (shared, first) in said:
        assert np.array_equal(held["reduce_scatter"][mine], total[mine])
        assert np.array_equal(held["all_gather"], own_parts)
        assert np.array_equal(held["gather"], flat if rank else own_parts)
        scattered = flat.copy()
        scattered[mine] = flats[0][mine]
        assert np.array_equal(held["scatter"], scattered)
        assert np.array_equal(held["spread"], flats[0])
        assert shared == [[r] for r in range(size)] and first == {"of": 0}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_as_threads(size):
    check_conversation(together(size, conversation))


def test_what_is_dealt_is_each_ranks_own_copy():
    """Among threads, too: what a follower changes, rank 0 and the others do not see."""
    dealt = [np.full(3, rank) for rank in range(4)]

    def function(group):
        mine = group.scatter_objects(dealt if group.rank == 0 else None)
        known = mine.tolist()
        group.barrier()
        mine += 10
        everywhere = group.broadcast([0])
        everywhere.append(group.rank)
        group.barrier()
        return known, everywhere

    assert together(4, function) == [([rank] * 3, [0, rank]) for rank in range(4)]
    assert [each.tolist() for each in dealt] == [[rank] * 3 for rank in range(4)]


def test_a_process_waits_until_all_have_what_it_deals():
    """A message that nobody waits for may be lost with its buffer; small ones never show it."""
    notes = []

    class Request:
        def __init__(self, to):
            self.to = to

        def wait(self):
            notes.append(("waited", self.to))

    class Comm:
        def isend(self, value, dest):
            notes.append(("sent", dest, value))
            return Request(dest)

    group = Mpi.__new__(Mpi)
    group.comm, group.rank, group.size = Comm(), 0, 4
    assert group.scatter_objects(["a", "b", "c", "d"]) == "a"
    assert notes[:3] == [("sent", 1, "b"), ("sent", 2, "c"), ("sent", 3, "d")]  # all, then waits
    assert sorted(notes[3:]) == [("waited", rank) for rank in (1, 2, 3)]


def test_alone():
    check_conversation([conversation(Alone())])
    with pytest.raises(UserError, match="why"):
        Alone().abort("why")


def test_a_rank_that_fails_ends_those_that_wait_for_it():
    def function(group):
        if group.rank == 2:
            raise ZeroDivisionError
        group.barrier()

    with pytest.raises(ZeroDivisionError):
        together(4, function)


# Steps.


def moves(config, batches, halt=None):
    """What a rank does: a function of its group; returns what is to be the same for all groups.

    halt: (step, ranks): then the moments are gathered, and a group of so many ranks goes on.
    """
    def start(group, weights, optimizer, pieces):
        inner = CpuStepper(engine_factory("cpu"), weights, optimizer, threads=1, pieces=pieces)
        return RankStepper(group, inner)

    def go(group, numbers, state=None, pieces=1):
        weights = initialise(config, seed=3 + group.rank)  # rank 0's count
        optimizer = AdamW(weights, clip_norm=0.1)
        if state and group.rank == 0:
            for each, flat in zip((weights, optimizer.m, optimizer.v), state, strict=True):
                each.flat[...] = flat
        stepper, known = start(group, weights, optimizer, pieces), []
        for number in numbers:
            (taken,) = stepper.step(*batches[number - 1], 0.01, number)
            known.append((taken.number, taken.sums.tobytes(), taken.norm, taken.finite))
        known.append(stepper.sums(*batches[0]).tobytes())
        moments = optimizer.m.flat.copy(), optimizer.v.flat.copy()
        stepper.pull()
        state = weights.flat.copy(), optimizer.m.flat.copy(), optimizer.v.flat.copy()
        return known, state, moments, stepper.own

    return go


def drawn(config, batch, steps=4, T=37):
    """A batch for each step."""
    return [problem(config, batch, T, seed)[1:3] for seed in range(steps)]


def as_bytes(said):
    known, state, *_ = said
    return known, [flat.tobytes() for flat in state]


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("config", [RAGGED, GPT2], ids=["default", "like GPT-2"])
def test_the_bits_are_those_of_one_process(config, pieces):
    batches = drawn(config, 33)
    go = moves(config, batches)
    weights = initialise(config, seed=3)
    optimizer, known = AdamW(weights, clip_norm=0.1), []
    plain = make_stepper("cpu", weights, optimizer, threads=2, pieces=pieces)
    for number, batch in enumerate(batches, 1):
        (taken,) = plain.step(*batch, 0.01, number)
        assert taken.norm > 0.1  # or nothing is clipped
        known.append((number, taken.sums.tobytes(), taken.norm, taken.finite))
    known.append(plain.sums(*batches[0]).tobytes())
    one = known, [each.flat.tobytes() for each in (weights, optimizer.m, optimizer.v)]
    for ranks in RANKS:
        said = together(ranks, lambda group: go(group, range(1, 5), pieces=pieces))
        assert as_bytes(said[0]) == one
        for others in said[1:]:
            assert others[0] == known and others[1][0].tobytes() == one[1][0]


def test_each_rank_has_moments_of_its_own_part_alone():
    batches = drawn(RAGGED, 33)
    for _, _, moments, mine in together(4, lambda g: moves(RAGGED, batches)(g, [1])):
        for flat in moments:
            assert flat[mine].any()
            assert not flat[: mine.start].any() and not flat[mine.stop :].any()


@pytest.mark.parametrize(("first", "then"), [(1, 4), (4, 2), (2, 1)])
def test_another_number_of_ranks_goes_on_with_the_same_bits(first, then):
    go = moves(RAGGED, drawn(RAGGED, 33))
    straight = together(1, lambda group: go(group, [1, 2, 3, 4]))[0]
    state = together(first, lambda group: go(group, [1, 2]))[0][1]
    known, state, *_ = together(then, lambda group: go(group, [3, 4], state))[0]
    assert known == straight[0][2:]
    assert [x.tobytes() for x in state] == [x.tobytes() for x in straight[1]]


def test_a_step_that_is_not_finite_changes_nothing_anywhere():
    def function(group):
        weights = initialise(RAGGED, seed=3)
        weights["output"][3, 5] = np.nan if group.rank == 0 else 0
        inner = CpuStepper(engine_factory("cpu"), weights, AdamW(weights), threads=1)
        stepper = RankStepper(group, inner)
        before = weights.flat.tobytes()
        (taken,) = stepper.step(*drawn(RAGGED, 33)[0], 0.01, 1)
        return taken.finite, before == weights.flat.tobytes(), inner.optimizer.m.flat.any()

    assert together(2, function) == [(False, True, False)] * 2


def test_the_comparison_sees_sums_in_another_order(monkeypatch):
    go = moves(RAGGED, drawn(RAGGED, 33))
    one = as_bytes(together(1, lambda group: go(group, [1, 2]))[0])
    monkeypatch.setattr(rank_stepper, "HALVINGS", 1)  # too few are left to a rank
    assert as_bytes(together(2, lambda group: go(group, [1, 2]))[0]) != one


def test_the_comparison_sees_a_norm_of_the_own_part(monkeypatch):
    go = moves(RAGGED, drawn(RAGGED, 33))
    one = as_bytes(together(1, lambda group: go(group, [1]))[0])
    limit = AdamW.limit
    monkeypatch.setattr(AdamW, "limit", lambda self, flat, squares: limit(self, flat, squares[:8]))
    assert as_bytes(together(2, lambda group: go(group, [1]))[0]) != one


# Who leads.


def test_followers_do_what_rank_0_is_asked(monkeypatch):
    """And errors that all find alike are rank 0's to tell."""
    w, tokens, targets, _ = problem(RAGGED, 33, 37)
    locked = Weights(RAGGED, flat=w.flat.copy())
    (expected,) = make_stepper("cpu", locked, AdamW(locked)).step(tokens, targets, 0.01, 1)

    def function(group):
        if group.rank:
            return follow(group)
        with leading(group):
            for _ in range(2):  # as a run measures its pace first
                weights = Weights(RAGGED, flat=w.flat.copy())
                stepper = make_stepper("cpu", weights, AdamW(weights), threads=1)
                with pytest.raises(UserError, match="2 sequences of 37 tokens are 1: choose"):
                    stepper.step(tokens[:2], targets[:2], 0.01, 1)
                (taken,) = stepper.step(tokens, targets, 0.01, 1)
                assert taken.norm == expected.norm and stepper.finish() == []
                assert stepper.sums(tokens[:2], targets[:2]).shape == (RAGGED.n_predict,)
                stepper.pull()
                stepper.push()
        assert type(make_stepper("cpu", weights, AdamW(weights))) is CpuStepper
        return weights.flat.tobytes()

    assert together(4, function)[0] == locked.flat.tobytes()


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_is_dealt_its_own_sequences_alone(size, monkeypatch):
    """What rank 0 sends in a step and in a judgement is R - 1 parts of the batch, and a little."""
    w, tokens, targets, _ = problem(RAGGED, 168, 37)  # 24 shards of 7
    first, sent, deal = np.zeros_like(tokens), [], Threads.scatter_objects
    part = (tokens.nbytes + targets.nbytes + first.nbytes) / size

    def counted(self, values=None):
        if values:
            sent.append([len(pickle.dumps(value)) for value in values[1:]])
        return deal(self, values)

    monkeypatch.setattr(Threads, "scatter_objects", counted)

    def function(group):
        if group.rank:
            return follow(group)
        with leading(group):
            weights = Weights(RAGGED, flat=w.flat.copy())
            stepper = make_stepper("cpu", weights, AdamW(weights), threads=1)
            sent.clear()
            stepper.step(tokens, targets, 0.01, 1, first)
            stepper.sums(tokens, targets, first)
        return weights.flat.tobytes()

    locked = Weights(RAGGED, flat=w.flat.copy())
    make_stepper("cpu", locked, AdamW(locked)).step(tokens, targets, 0.01, 1, first)
    assert together(size, function)[0] == locked.flat.tobytes()
    assert len(sent) == 3  # the step, the judgement, the end
    for each in sent[:2]:
        assert all(part <= x < part + 1200 for x in each), (part, each)


@pytest.mark.parametrize("led", [False, True])
def test_ranks_judge_several_texts_as_one_process(led):
    """Where the texts of a row begin goes with the row, in a judgement as in a step."""
    w, tokens, targets, _ = problem(RAGGED, 33, 37)
    drawn_first = np.sort(np.random.default_rng(0).integers(37, size=tokens.shape, dtype=np.int32))
    first = np.minimum(drawn_first, np.arange(37, dtype=np.int32))

    def plain():
        weights = Weights(RAGGED, flat=w.flat.copy())
        return make_stepper("cpu", weights, AdamW(weights), threads=1)

    def use(stepper):
        judged = stepper.sums(tokens, targets, first), stepper.sums(tokens[:1], targets[:1],
                                                                    first[:1])  # fmt: skip
        (taken,) = stepper.step(tokens, targets, 0.01, 1, first)
        return [x.tobytes() for x in (*judged, taken.sums)], taken.norm

    def function(group):
        weights = Weights(RAGGED, flat=w.flat.copy())
        if not led:
            inner = CpuStepper(engine_factory("cpu"), weights, AdamW(weights), threads=1)
            return use(RankStepper(group, inner))
        if group.rank:
            return follow(group)
        with leading(group):
            return use(plain())

    one = use(plain())
    assert one[0][0] != plain().sums(tokens, targets).tobytes(), "texts make no difference"
    for said in together(4, function)[: 1 if led else 4]:
        assert said == one


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [MemoryError, ZeroDivisionError])
def test_a_failure_in_the_middle_of_a_step_ends_all(monkeypatch, failing, error):
    w, tokens, targets, _ = problem(RAGGED, 33, 37)

    def function(group):
        if group.rank:
            return follow(group)
        with leading(group):
            stepper = make_stepper("cpu", w, AdamW(w), threads=1)
            if failing == 0:
                stepper.stepper.inner.shard_gradients = fail
            return stepper.step(tokens, targets, 0.01, 1)

    def fail(*arguments):
        raise error("in the middle")

    if failing:
        made = rank_stepper.RankStepper.__init__

        def init(self, group, inner):
            made(self, group, inner)
            if group.rank == failing:
                inner.shard_gradients = fail

        monkeypatch.setattr(rank_stepper.RankStepper, "__init__", init)
    with pytest.raises((UserError, error), match="in the middle|rank 1 of 2: .*memory"):
        together(2, function)


# Who starts them.


@pytest.fixture
def plain(monkeypatch):
    for name in (*launch.RANKS, *launch.SIZES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_a_launcher_there_is_one_rank(plain):
    assert launch.launched() is None and type(launch.world()) is Alone


def test_what_is_missing_is_said(plain, capsys):
    plain.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--ranks needs mpi4py .*distributed"):
        launch.start(2, [])
    plain.setenv("PMI_RANK", "1")
    with pytest.raises(UserError, match="there is no mpi4py: pip install"):
        launch.world()
    plain.delenv("PMI_RANK")
    assert main(["train", "--ranks", "3"]) == 2
    assert "expected 1, 2, 4, 8 or 16 ranks, got 3" in capsys.readouterr().err


def test_the_doctor_says_what_there_is(plain):
    plain.setattr(launch, "find_spec", lambda name: None)
    assert launch.found() == f"one alone: {launch.CURE}"


# On paper.


@pytest.mark.parametrize("name", ["gpt2-124m", "euler-116m"])
def test_what_cards_would_send_and_hold(name):
    config = PRESETS[name]
    n, parts = flat_size(config), planned.buckets(config)
    tables = 4 * (flat_size(config) - sum(elements for _, elements, _ in parts[:-1]))
    assert sum(elements for _, elements, _ in parts) == count_parameters(config) <= n
    assert [parts[0][0], parts[-1][0]] == ["head", "embedding"]
    locked = planned.estimate(config, 16, 1)
    assert (locked.exposed_s, locked.sent_bytes, locked.efficiency) == (0, 0, 1)
    assert locked.state_bytes == 18 * n
    for ranks in (2, 8, 64):
        found = planned.estimate(config, 16, ranks)
        assert np.isclose(found.sent_bytes, (ranks - 1) / ranks * (4 * n + 2 * n + tables))
        assert np.isclose(found.state_bytes, 6 * n + tables + 12 * n / ranks)
        sent, step = planned.timeline(config, 16, ranks)
        assert np.isclose(sent[-1].ready, step)
        assert all(each.ready <= each.begins < each.ends for each in sent)
        assert all(a.ends <= b.begins and a.ready <= b.ready for a, b in pairwise(sent))
        gathering = planned.half_seconds(2 * n + tables, ranks)
        assert np.isclose(found.exposed_s, sent[-1].ends - step + gathering)
    way = planned.NVLINK  # within a machine: equation eq-ranks-ring
    ring = 3 * (1e9 / 4 / way.bytes_per_s + way.latency_s)
    assert np.isclose(planned.half_seconds(1e9, 4), ring)
    assert "8 ranks, an H200 each, with 2 of the 16" in planned.report(config, 16, 8)


# The command line over MPI.

here = pytest.mark.skipif(
    find_spec("mpi4py") is None or launch.launcher() is None,
    reason="needs mpi4py and a launcher: pip install -e '.[distributed]'",
)
SIZES = "--preset small --dim 16 --layers 1 --heads 2 --kv-heads 1 --context 32 --vocab-size 270"
RUN = f"--steps 12 --batch-size 32 {SIZES} --engine cpu --save-every 4 --keep 9 --lr 0.01"
WORDS = ["river", "stone", "the", "old", "boat", "went", "slowly", "under", "bridge", "lamp"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path, random = tmp_path_factory.mktemp("text") / "words.txt", Random(0)
    lines = (" ".join(random.choices(WORDS, k=9)) for _ in range(400))
    path.write_text(".\n".join(lines))
    return path


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    """The run of one process."""
    out = tmp_path_factory.mktemp("straight") / "run"
    assert main(f"train --data {text} --out {out} {RUN}".split()) == 0
    return out


def told(command, **how):
    """Run a command to its end, in seconds: (exit status, what it printed)."""
    command = [str(each) for each in command]
    clean = {name: value for name, value in os.environ.items()
             if name not in (*launch.RANKS, *launch.SIZES)}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=60, env=clean | how)  # fmt: skip
    return done.returncode, done.stdout


def check_same(out, straight):
    """The same saves, and the same metrics but for the seconds."""
    ours, theirs = checkpoints(out), checkpoints(straight)
    assert [step for step, _ in ours] == [step for step, _ in theirs] == [4, 8, 12]
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        assert (ours[-1][1] / name).read_bytes() == (theirs[-1][1] / name).read_bytes(), name
    pair = ([{**line, "seconds": 0} for line in read_metrics(each)] for each in (out, straight))
    assert next(pair) == next(pair)


@here
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.long)])
def test_a_killed_rank_loses_no_step_and_other_ranks_go_on(ranks, text, straight, tmp_path):
    """mpirun -n 2, SIGKILL of rank 1 in step 7; then one rank, or --ranks 4."""
    out = tmp_path / "run"
    mpirun = [launch.launcher(), "-n", 2, sys.executable, HELPER, "kill", 7]
    began = time.perf_counter()
    status, said = told([*mpirun, "train", "--data", text, "--out", out, *RUN.split()])
    assert status not in (0, 2) and "saved in" not in said
    assert [step for step, _ in checkpoints(out)] == [4] and load(out).step == 4
    assert time.perf_counter() - began < 30
    nanoeuler = [sys.executable, "-m", "nanoeuler"]
    further = f"--resume --ranks {ranks} --save-every 4 --keep 9 --engine cpu".split()
    status, said = told([*nanoeuler, "train", "--out", out, *further])
    assert status == 0, said
    assert said.count("saved in") == 1
    check_same(out, straight)


@here
@pytest.mark.parametrize(
    ("how", "words"),
    tiers.kept(
        [("memory1", "rank 1 of 2: this needs more memory"),
         ("error1", "rank 1 of 2: RuntimeError"),
         ("memory0", "a batch of 32 windows of 32 tokens does not fit")],
        ("memory1", "rank 1 of 2: this needs more memory"),
    ),
)  # fmt: skip
def test_a_rank_that_fails_ends_the_run_with_a_line(how, words, text, tmp_path):
    out = tmp_path / "run"
    mpirun = [launch.launcher(), "-n", 2, sys.executable, HELPER, how, 6]
    status, said = told([*mpirun, "train", "--data", text, "--out", out, *RUN.split()])
    assert status == 2, said
    assert said.count(words) == 1 and "Traceback" not in said, said
    assert load(out).step == 4


@here
def test_the_starter_says_that_a_rank_was_killed(text, tmp_path, plain, capfd):
    python, out = tmp_path / "python", tmp_path / "run"
    python.write_text(f"#!/bin/sh\nshift 2\nexec {sys.executable} {HELPER} kill 6 $*\n")
    python.chmod(0o755)
    plain.setenv("PATH", f"{Path(launch.launcher()).parent}:{os.environ['PATH']}")
    plain.setattr(sys, "executable", str(python))
    arguments = f"train --data {text} --out {out} --ranks 2 {RUN}".split()
    assert main(arguments) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("nanoeuler: a rank or its launcher ended before its time")
    assert "--resume" in last
    assert load(out).step == 4


@here
@pytest.mark.parametrize("number", tiers.kept([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_signal_saves_once_and_ends_all(number, text, tmp_path):
    out = tmp_path / "run"
    long = RUN.replace("steps 12", "steps 100000").replace("every 4", "every 99999")
    command = [sys.executable, "-m", "nanoeuler", "train", "--data", text, "--out", out, "--ranks",
               2, *long.split()]
    if number == signal.SIGINT:  # to a launcher of the user's own
        command = [launch.launcher(), "-n", 2, *command[:-len(long.split()) - 2], *long.split()]
    process = subprocess.Popen([str(x) for x in command], stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    while len(read_metrics(out)) < 15 if out.exists() else True:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=20)
    assert said.count("one of 2 ranks takes") == 1
    assert said.count(f"{number.name}: step") == 1 and "continue with --resume" in said, said
    assert process.returncode in (0, 2)
    assert len(checkpoints(out)) == 2 and load(out).step == read_metrics(out)[-1]["step"]


def children(pid):
    """The processes that this one has started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(each) for each in found.stdout.split()]


def is_there(pid):
    """Whether a process is there, and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@here
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
# The launcher of MPI takes its ranks with it; who is above it and below needs our watchdog.
@pytest.mark.parametrize(
    "who", tiers.kept(["starter", "launcher", "proxy"], "starter", "proxy")
)  # fmt: skip
def test_ranks_end_with_those_above_them(who, text, tmp_path):
    """SIGKILL, of which nobody is told: all end soon, and leave neither lock nor memory behind."""
    out = tmp_path / "run"
    long = RUN.replace("steps 12", "steps 100000").replace("every 4", "every 99999")
    command = [sys.executable, "-m", "nanoeuler", "train", "--data", text, "--out", out, "--ranks",
               2, *long.split()]  # fmt: skip
    process = subprocess.Popen([str(x) for x in command], stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    while len(read_metrics(out)) < 5 if out.exists() else True:
        assert process.poll() is None
        time.sleep(0.05)
    (mpiexec,) = children(process.pid)
    (proxy,) = children(mpiexec)
    ranks = children(proxy)
    shared = {name for rank in ranks
              for name in watchdog.SHARED.findall(
                  Path(f"/proc/{rank}/maps").read_text())}  # fmt: skip
    assert len(ranks) == 2 and shared and all(map(os.path.exists, shared))
    os.kill({"starter": process.pid, "launcher": mpiexec, "proxy": proxy}[who], signal.SIGKILL)
    until = time.monotonic() + 3 * (watchdog.GRACE + watchdog.NOTICE)  # of a machine that is busy
    while any(map(is_there, [process.pid, mpiexec, proxy, *ranks])):
        assert time.monotonic() < until, "somebody lives on"
        process.poll()
        time.sleep(0.1)
    said, _ = process.communicate()
    if who != "starter":
        assert process.returncode == 2 and "nanoeuler: a rank or its launcher ended" in said
    if who != "launcher":  # which takes its ranks with it at once
        assert load(out).step == read_metrics(out)[-1]["step"] > 0
    assert not any(map(os.path.exists, shared))
    with locked(out):
        pass


@here
def test_a_rank_killed_before_the_first_save_promises_none(text, tmp_path, plain, capfd):
    python, out = tmp_path / "python", tmp_path / "run"
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    plain.setenv("PATH", f"{Path(launch.launcher()).parent}:{os.environ['PATH']}")
    plain.setattr(sys, "executable", str(python))
    assert main(f"train --data {text} --out {out} --ranks 2 {RUN}".split()) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert "if something was saved, it is whole" in last and "if not, begin again" in last
    assert not out.exists()


@here
@pytest.mark.parametrize(
    ("arguments", "words"),
    tiers.kept(
        [("--data none.txt", "but none.txt is none"), ("--bogus", "bogus"),
         ("--ranks 4", "expected --ranks 2, as many as the launcher has started, got 4")],
        ("--ranks 4", "expected --ranks 2, as many as the launcher has started, got 4"),
    ),
)  # fmt: skip
def test_only_rank_0_says_what_is_wrong(arguments, words):
    mpirun = [launch.launcher(), "-n", 2, sys.executable, "-m", "nanoeuler", "train"]
    status, said = told([*mpirun, *arguments.split()])
    assert status == 2 and said.count("nanoeuler: ") == 1, said
    assert words in said, said
