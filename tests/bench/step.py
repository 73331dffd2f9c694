"""A training step of ours beside PyTorch's, on a GPU: `python tests/bench/step.py [PART ...]`.

Parts, all if none is named:
    correct   loss and every gradient against float64, ours beside PyTorch's in the same precision
    time      milliseconds of a step (forward, backward, clipping, AdamW, copies), and the memory
    memory    that alone, after few steps
    lora      both of a step in which adapters alone learn: PyTorch's are PEFT's
    lora kernels   the kernels of that one
    muon      both of a step at full load with AdamW and with Muon
    muon kernels   the kernels of these two
    recompute   both of a step with each block run again in the backward pass, and without
    cards     milliseconds of a step with the kernels that another card would get, spread over all
              multiprocessors of this one (NANOEULER_CAPABILITY), products by our own kernels
    curve     the loss over 500 steps from the same weights and batches
    kernels   microseconds of each kind of kernel in a step, ours beside what the plan predicted
    replay    a small model's step as a graph, 1,000 times, against its launches one by one
    products  cuBLAS by our door against float64, and beside PyTorch; what a launch costs the host
Names of presets after --preset, sides after --sides, and patterns that a job's name must match
after --only, leave out the rest. Each side works in a process of its own, with a watch-dog, and
what is known is saved at once: rows of data/measurements/gpu.json (of cards: cards.json), and in
the folder $OUT, where
curves and errors of all tensors are left too. --dry does all of it without a GPU, on models so
small that nothing can be said of their speed.

Tokens are those of the file $NANOEULER_TOKENS (uint16, .npy; PRESET in its name stands for the
preset's), which
    python tests/bench/step.py tokens FOLDER FILE.npy [GPT2-RANKS]
makes of the texts of a folder: by a tokenizer of 4,096 that it learns, or by GPT-2's of that file
of ranks. Without it they are the bytes of the text that comes with the package, over and over.
"""

import argparse
import gc
import json
import os
import re
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from nanoeuler import measurements
from nanoeuler.engines.gpu.lang.card import PRETENDED
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESETS
from nanoeuler.training.optim import learning_rate

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]  # as pytest and `nanoeuler bench` have it

from bench.gpu import circumstances  # noqa: E402
from step_inside import REPLAYS, kernels, replay, tell  # noqa: E402
from step_sides import AGAIN as RECOMPUTED  # noqa: E402
from step_sides import (  # noqa: E402
    OTHERS,
    OURS,
    PRODUCTS,
    STRETCHES,
    WITH_MUON,
    card,
    launch,
    make_tokens,
    products,
    side,
)  # fmt: skip
from watched import serve, watch  # noqa: E402

CASES = [  # preset, batch, context, precision
    ("gpt2-124m", 16, 1024, "bf16"),
    ("euler-116m", 16, 512, "bf16"),
    ("euler-116m", 64, 512, "bf16"),
    ("euler-116m", 16, 512, "TF32"),
    ("euler-116m", 16, 512, "float32"),
    ("smollm2-135m", 8, 2048, "bf16"),
    ("llama-1b", 4, 2048, "bf16"),
]
CURVES = [*CASES[:2], CASES[3]]
LORA = [("llama-1b", 4, 2048, "bf16")]
MUON = [("gpt2-124m", 64, 1024, "bf16")]
CARDS = [*CASES[:2], CASES[3]]
RECOMPUTE = [*CASES[:3], CASES[-1]]
OTHER_CARD = "8.9"  # whose kernels the part "cards" takes: an RTX 40, an L4
RANK = 16  # of adapters; alpha is twice that
CORRECT = [
    (preset, 2, PRESETS[preset].context, precision)
    for preset in ("gpt2-124m", "euler-116m") for precision in ("bf16", "TF32", "float32")
]  # fmt: skip
PEERS = "torch compile", "torch eager", "torch compile, padded"  # padded: words in sixty-fours
AGAIN = "torch compile, again"  # the same once more: how far two curves of one program come apart
PARTS = (
    "correct", "time", "memory", "lora", "lora kernels", "muon", "muon kernels", "recompute",
    "cards", "curve", "kernels", "replay", "products",
)  # fmt: skip
# What the rows of a part are called.
STEPS_OF = {
    "time": "training step", "lora": "LoRA step", "muon": "training step",
    "recompute": "training step", "cards": "training step"
}  # fmt: skip
WARM, WINDOWS, STEPS = 8, 4, 25  # steps before, and windows of so many steps, each timed as one
PEAK_RATE, CURVE_STEPS, LAST = 6e-4, 500, 20  # GPT-3's rate for 125M; LAST: steps of a mean
SILENCE = 560  # seconds without a line after which a side hangs; compiling takes minutes
DRY_SILENCE = 3600  # on paper a step takes minutes
FILES = {"cards": "cards"}  # of data/measurements, by part; all others are in gpu.json


# ---- Jobs: "part: preset BxT precision: who"; of adapters "part: preset BxT precision rank R: who"
# and of another card "cards: preset BxT precision, kernels of 8.9: who"


def spell(part, case, who):
    """The name of a job."""
    preset, batch, context, precision = case
    more = f" rank {RANK}" * part.startswith("lora")
    more += f", kernels of {OTHER_CARD}" * (part == "cards")
    return f"{part}: {preset} {batch}x{context} {precision}{more}: {who}"


def read(job):
    """part, preset, batch, context, precision, who of a job's name."""
    part, case, who = job.split(": ")
    preset, size, precision, *_ = case.split()
    return part, preset, *map(int, size.split("x")), precision.rstrip(","), who


def rank_of(job):
    """The rank of the adapters that learn in a job; 0: all weights do."""
    case = job.split(": ")[1].split()
    return int(case[-1]) if "rank" in case else 0


def pretend(job, dry):
    """Have our device be the card whose kernels a job names, with this one's multiprocessors."""
    os.environ.pop(PRETENDED, None)
    if job.startswith("cards") and job.endswith(f": {OURS}"):
        os.environ[PRETENDED] = f"{OTHER_CARD}x{card(dry).real.multiprocessors}"


def sides(parts):
    """The jobs of float64, which PyTorch does, then ours, then PyTorch's."""
    exact, ours, torch = [], [], []
    for part in parts:
        cases = {"correct": CORRECT, "curve": CURVES, "products": [], "replay": []}
        cases |= {"lora": LORA, "lora kernels": LORA, "muon": MUON, "muon kernels": MUON}
        cases |= {"cards": CARDS, "recompute": RECOMPUTE}
        cases = cases.get(part, CASES)
        if part == "memory" and "time" in parts:
            continue  # which says it as well
        for case in cases:
            names = {"correct": ("exact", "torch eager"), "curve": (PEERS[0], AGAIN),
                     "kernels": PEERS[:1], "cards": PEERS[:1],
                     "lora": PEERS[:1], "lora kernels": (),
                     "muon": (), "muon kernels": (), "recompute": ()}  # fmt: skip
            names = names.get(part, PEERS)
            if case[0] != "gpt2-124m":
                names = [name for name in names if "padded" not in name]
            for name in names:
                (exact if name == "exact" else torch).append(spell(part, case, name))
            others = {"bf16": [*OTHERS], "float32": ["cuda, own products", *STRETCHES]}
            few = {"curve": [], "lora": ["cuda, own products"], "lora kernels": [],
                   "muon": [WITH_MUON], "muon kernels": [WITH_MUON], "cards": [],
                   "recompute": [RECOMPUTED]}  # fmt: skip
            others = few.get(part, others.get(case[-1], ["cuda, own products"]))
            ours += [spell(part, case, who) for who in (OURS, *others)]
    if "replay" in parts:
        ours.append(f"replay: {REPLAYS}: {OURS}")
    if "products" in parts:
        ours += [f"launch: of 1,000: {OURS}"] + [f"products: {name}: {OURS}" for name in PRODUCTS]
    return exact, ours, torch


# ---- What a job does


def time_steps(job, dry, windows):
    """Milliseconds of a step, clock and power, bytes of memory."""
    pretend(job, dry)
    this, batch = side(*read(job)[1:], dry, rank_of(job))
    each, warm = (1, 1) if dry else (STEPS, WARM)
    made = [batch(step) for step in range(1, 1 + each)]
    count, seconds = 0, []

    def run(steps, look=lambda: None):
        nonlocal count
        for i in range(steps):
            count += 1
            this.step(*made[i % each], 1e-4, count)
        look()
        this.wait()

    begin = time.perf_counter()
    run(warm)
    first = time.perf_counter() - begin
    for _ in range(windows):
        begin = time.perf_counter()
        run(each)
        seconds.append((time.perf_counter() - begin) / each)
    state = []
    run(each, lambda: state.extend((0.0, 0.0) if dry else sensor()()))  # while it works
    if not np.isfinite(this.sums()).all():
        raise ValueError("a loss is not finite")
    return {"ms": 1e3 * median(seconds), "least": 1e3 * min(seconds), "most": 1e3 * max(seconds),
            "first": first, "MHz": state[0], "W": state[1]} | this.memory()  # fmt: skip


@cache
def sensor():
    """A function that returns the card's clock in MHz and its power in W."""
    from gpu_times import make_sensor

    return make_sensor()


def correct(job, dry, folder):
    """Relative errors of the loss's sums and of each gradient; of the exact one, where it is."""
    part, preset, batch, context, _, who = read(job)
    exact = Path(folder) / f"{preset}.npz"
    if who == "exact" and exact.exists():
        return {"exact": True}
    this, batch = side(*read(job)[1:], dry)
    sums, gradients = this.gradients(*batch(1))
    if who == "exact":
        np.savez(exact, sums=sums, **gradients)
        return {"exact": True}
    if not exact.exists():
        raise ValueError("PyTorch has left no gradients in float64")
    with np.load(exact) as file:
        found = {"sums": sums, **gradients}
        return {"errors": {name: relative(found[name], file[name]) for name in file.files}}


def relative(values, exact):
    """The length of the difference over the length."""
    difference = np.asarray(values, np.float64) - exact
    return float(np.linalg.norm(difference.ravel()) / max(np.linalg.norm(exact.ravel()), 1e-300))


def curve(job, dry, steps, rate):
    """The mean loss in nats of the next token, of each step."""
    this, batch = side(*read(job)[1:], dry)
    counts = []
    for number in range(1, steps + 1):
        words, targets = batch(number)
        counts.append(int((targets[..., 0] >= 0).sum()))
        this.step(words, targets, learning_rate(number, steps, rate), number)
        if number % 100 == 0:
            print(f"  {job}: step {number}", flush=True)
    this.wait()
    return {"losses": (this.sums()[:, 0] / counts).tolist()}


def child(folder, dry, steps, rate):
    """Do the jobs that the watch-dog hands in."""

    def do(job):
        part = job.split(": ")[0]
        if part == "correct":
            return correct(job, dry, folder)
        if part == "curve":
            return curve(job, dry, steps, rate)
        if part.endswith("kernels"):
            return {"table": kernels(*read(job)[1:], dry, rank_of(job))}
        if part == "replay":
            return replay(dry)
        if part in ("launch", "products"):
            return launch(dry) if part == "launch" else products(job.split(": ")[1])
        outcome = time_steps(job, dry, WINDOWS if part in STEPS_OF else 1)
        gc.collect()  # before the next is measured
        return outcome

    serve(do)


# ---- What it says, and the rows


def row(where, what, case, engine, value, unit, peer=None, peer_value=None):
    return where | {"what": what, "case": case, "engine": engine, "value": value, "unit": unit,
                    "peer": peer, "peer_value": peer_value}  # fmt: skip


def step_rows(step, case, engine, seen, peer=None, other=None):
    """(what, case, engine, value, unit, peer, peer_value) of the outcome of a step, so called."""
    other = other or {}
    tokens = int(case.split()[1].split("x")[0]) * int(case.split()[1].split("x")[1])
    yield step, case, engine, seen["ms"], "ms", peer, other.get("ms")
    for name, key in ("peak memory", "arrays"), ("peak memory, card", "card"):
        theirs = other[key] / 2**30 if other else None
        yield name, case, engine, seen[key] / 2**30, "GiB", peer, theirs
    if peer is None:
        yield "tokens a second", case, engine, 1e3 * tokens / seen["ms"], "tokens/s", None, None
        yield f"{step}, clock", case, engine, seen["MHz"], "MHz", None, None
        yield f"{step}, power", case, engine, seen["W"], "W", None, None
        for name in "least", "most":  # of the windows, whose middle one is the step's time
            yield f"{step}, {name}", case, engine, seen[name], "ms", None, None


def pair_rows(part, case, ours, peer, theirs):
    """What can be said of ours beside a peer's outcome, as `step_rows`."""
    if part in ("memory", *STEPS_OF):
        who = {"muon": WITH_MUON, "recompute": RECOMPUTED}.get(part, OURS)
        for what, *rest in step_rows(STEPS_OF.get(part, ""), case, who, ours, peer, theirs):
            if part in STEPS_OF or "memory" in what:
                yield what, *rest
    elif part == "curve":
        last = [float(np.mean(seen["losses"][-LAST:])) for seen in (ours, theirs)]
        steps = len(ours["losses"])
        yield f"loss after {steps} steps", case, OURS, last[0], "nats", peer, last[1]
        yield "loss curves, largest distance", case, OURS, apart(ours, theirs), "nats", peer, None
        for end in range(LAST, steps + 1, LAST):
            means = [float(np.mean(seen["losses"][end - LAST : end])) for seen in (ours, theirs)]
            yield f"loss at step {end}", case, OURS, means[0], "nats", peer, means[1]
    elif part == "correct":
        mine, other = ours["errors"], theirs["errors"]
        worst = max(mine, key=lambda name: mine[name] / max(other[name], 1e-300))
        yield "gradient error, largest", case, OURS, max(mine.values()), "relative", peer, max(
            other.values())  # fmt: skip
        yield "gradient error, worst beside", case, OURS, mine[worst], worst, peer, other[worst]


def apart(ours, theirs):
    """The largest distance of two curves, each a mean over LAST steps."""
    count = min(LAST, len(ours["losses"]))
    smooth = [np.convolve(x["losses"], np.ones(count) / count, "valid") for x in (ours, theirs)]
    return float(np.abs(smooth[0] - smooth[1]).max())


def own_rows(job, seen):
    """What is said of one outcome alone."""
    part, case, who = job.split(": ")
    if part in STEPS_OF:
        yield from step_rows(STEPS_OF[part], case, who, seen)
    elif part == "products":
        yield ("check", f"cuBLAS: {case}", OURS, seen["error"], "relative to float64", "torch",
               seen["peer error"])  # fmt: skip
        yield "matmul, cuBLAS by our door", case, OURS, seen["ms"], "ms", "torch", seen["peer ms"]
    elif part.endswith("kernels"):
        for name, (_, took, predicted, _) in seen["table"].items():
            if predicted or who == OURS:
                peer = ("predicted", predicted) if predicted else (None, None)
                yield f"in a step, {name}", case, who, took, "us", *peer
    elif part == "replay":
        for name, value in seen.items():
            yield f"a small model, {name}", f"{case} steps", who, value, "numbers", None, None
    elif part == "launch":
        for name, value in seen.items():
            yield f"launch, {name}", case, OURS, value, "us", None, None


class Journal:
    """All outcomes so far; each new one is told, and saved with what it makes known."""

    def __init__(self, where, dry, rate=PEAK_RATE):
        self.where, self.dry, self.rate, self.outcomes, self.rows = where, dry, rate, {}, []

    def tell(self, job, seen):
        """Print an outcome, and save rows and files."""
        self.outcomes[job] = seen
        if "failed" in seen:
            print(f"{job}: FAILED, {seen['failed']}", flush=True)
            return
        part, case, who = job.split(": ")
        print(f"{job}: {short(seen)}", flush=True)
        tell(seen.get("table", {}))
        new = list(own_rows(job, seen))
        known_pairs = *((OURS, peer) for peer in (*PEERS, AGAIN)), (PEERS[0], AGAIN)
        for mine, peer in *known_pairs, (WITH_MUON, OURS), (RECOMPUTED, OURS):
            pair = [self.outcomes.get(f"{part}: {case}: {name}", {}) for name in (mine, peer)]
            known = all(outcome and "failed" not in outcome for outcome in pair)
            if known and who in (mine, peer):
                made = pair_rows(part, case, pair[0], peer, pair[1])
                new += [(what, at, mine, *rest) for what, at, _, *rest in made]
        for each in new:
            if each[5] and each[6]:
                print(f"    {each[0]}: {each[3] / each[6]:.3f} of {each[5]}", flush=True)
        if part == "curve" and self.rate != PEAK_RATE:
            new = [(f"{what}, rate {self.rate:g}", *rest) for what, *rest in new]
        self.save([row(self.where, *each) for each in new], FILES.get(part, "gpu"))

    def save(self, new, file):
        """Put rows where they belong; and all of them, curves and errors, where $OUT says."""
        self.rows += new
        if os.environ.get("OUT"):
            out = Path(os.environ["OUT"])
            (out / "step.json").write_text(json.dumps(self.rows, indent=0))
            for name, key in ("curves", "losses"), ("gradients", "errors"), ("kernels", "table"):
                whole = {job: x[key] for job, x in self.outcomes.items() if key in x}
                if whole:  # an empty one could hide what another bench left under that name
                    (out / f"{name}.json").write_text(json.dumps(whole))
        try:
            measurements.update(file, new) if new and not self.dry else None
        except UserError as error:  # a copy without the book has no place for them
            print(error)


def short(seen):
    """An outcome in a few words."""
    if "losses" in seen:
        return f"{seen['losses'][0]:.4f} to {np.mean(seen['losses'][-LAST:]):.4f}"
    if "table" in seen:
        whole = seen["table"]["all"]
        return f"{whole[0]:.0f} kernels, {whole[1] / 1e3:.3f} ms, predicted {whole[2] / 1e3:.3f}"
    if "errors" in seen:
        worst = max(seen["errors"], key=seen["errors"].get)
        return f"largest error {seen['errors'][worst]:.2e} ({worst})"
    return ", ".join(f"{name} {value:.5g}" for name, value in seen.items())


def run(options):
    """Do what is asked for; returns whether anything failed."""
    commit = options.commit or (measurements.commit() if shutil.which("git") else "")
    where = {} if options.dry else circumstances(options.device, commit)  # PyTorch's version too
    journal = Journal(where, options.dry, options.rate)
    with tempfile.TemporaryDirectory() as folder:
        for jobs in sides(options.what):
            jobs = [job for job in jobs if all(re.search(part, job) for part in options.only)
                    and any(word in job for word in options.preset or [""])
                    and job.split(": ")[2] in (options.sides or [job.split(": ")[2]])]  # fmt: skip
            command = [sys.executable, __file__, "--child", folder, "--steps", str(options.steps),
                       "--rate", str(options.rate)]  # fmt: skip
            watch(command + ["--dry"] * options.dry, jobs, journal.tell,
                  DRY_SILENCE if options.dry else SILENCE)  # fmt: skip
    failed = [job for job, seen in journal.outcomes.items() if "failed" in seen]
    print(*(f"FAILED {job}" for job in failed), sep="\n", end="\n" if failed else "")
    return bool(failed)


def name_of_card():
    """What the card is called; "" without one."""
    try:
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    except ImportError:
        return ""


def main():
    if sys.argv[1:2] == ["tokens"]:
        return make_tokens(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--dry", action="store_true", help="tiny models, without a GPU")
    parser.add_argument("--preset", nargs="+", default=[], help="only these")
    parser.add_argument("--only", nargs="+", default=[], help="patterns that a job's name matches")
    parser.add_argument("--sides", nargs="+", default=[], help="only these, as cuda, torch compile")
    parser.add_argument("--steps", type=int, default=CURVE_STEPS, help="of a curve")
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="of a curve, the highest")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot say it")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if strange := {*options.what} - {*PARTS}:
        parser.error(f"parts are {', '.join(PARTS)}, before --only, not {', '.join(strange)}")
    if options.child:
        return child(options.child, options.dry, options.steps, options.rate)
    options.what, options.device = options.what or list(PARTS), name_of_card()
    if not options.device and not options.dry:
        print("there is no NVIDIA GPU here: nothing was measured; --dry rehearses")
        return 0
    return int(run(options))


if __name__ == "__main__":
    sys.exit(main())
