"""What goes on inside of a training step on a GPU, for bench/step.py: its kernels, its replays."""

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import step_sides
from step_sides import OneByOne

from nanoeuler.engines.gpu.rows import adamw
from nanoeuler.engines.gpu.step import stepper
from nanoeuler.engines.gpu.step.lora import LoraBuilder
from nanoeuler.engines.gpu.step.muon import muon_builder, rules_of
from nanoeuler.engines.gpu.step.recording import Machine, ProgramBuilder
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.lora import Lora
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.planning.step import H200, RULES, seconds
from nanoeuler.training.muon import Muon
from nanoeuler.training.optim import AdamW

STEPS = 3  # that are watched
TOY = ModelConfig(
    vocab_size=192, dim=256, n_layers=2, n_heads=4, n_kv_heads=2, hidden=704, context=128,
    n_predict=2,
)  # fmt: skip
REPLAYS, BATCH = 1000, 8
MOVED = {"momentum": 14, "move": 10, "adamw": 28}  # bytes of a parameter, by the kernel's name
TILE = adamw.THREADS * adamw.LANE * adamw.ROUNDS  # parameters of a block
BROKEN = 2, 501, 733  # steps whose gradients are nan


# ---- The kernels of a step


def watched(act):
    """(name, microseconds) of all kernels that act() has the card run, in order."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        act()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    kernels.sort(key=lambda event: event["ts"])
    return together((event["name"], event["dur"]) for event in kernels), span(kernels)


def together(kernels):
    """(name, microseconds) with what adds up the pieces of a library's product counted to it."""
    made = []
    for name, took in kernels:
        if "splitkreduce" in name.lower() and made:
            made[-1] = made[-1][0], made[-1][1] + took
        else:
            made.append((name, took))
    return made


def span(kernels):
    """Microseconds from the first one's beginning to the last one's end."""
    return kernels[-1]["ts"] + kernels[-1]["dur"] - kernels[0]["ts"] if kernels else 0.0


def predicted(config, batch, context, ways, rank=0, muon=False):
    """[(what a launch is for, its microseconds by the plan, FLOPs)] of a step's list.

    ways: a Precision and what records products.
    """
    numbers, multiplier = ways
    given = config, Machine((9, 0), 132, multiplier), numbers
    builder = LoraBuilder(Lora(rank).settled(config), *given) if rank else ProgramBuilder(*given)
    if muon:
        builder = muon_builder(*given, rules_of(Muon, Weights(config)))
    program = builder.build_step(batch, context, RULES).program
    took = [1e6 * predicted_seconds(step, numbers.pieces, muon) for step in program.steps]
    return [(step.name, us, step.flops) for step, us in zip(program.steps, took, strict=True)]


def predicted_seconds(step, pieces, muon):
    """What the plan says of a launch; of those of a step with Muon that are given whole buffers and
    move a part, by the bytes of that."""
    function = getattr(getattr(step.launch, "kernel", None), "function", None)
    name = getattr(function, "__name__", "")
    if not muon or name not in MOVED:
        return seconds(step, H200, pieces)
    args = step.launch.args
    parameters = args[0].shape[0] * TILE if name == "adamw" else args[4].nbytes / 2
    return MOVED[name] * parameters / H200.bytes + H200.launch


def kernels(preset, batch, context, precision, who, dry, rank=0):
    """name -> [launches, microseconds, predicted ones, FLOPs] of a step, and of all from the
    first kernel to the last one. rank: of adapters, which alone learn then."""
    if dry:
        return {"all": [0, 0.0, 0.0, 0]}
    this, give = step_sides.side(preset, batch, context, precision, who, dry, rank)
    made = [give(step) for step in range(1, 1 + STEPS)]
    for i in range(2 * STEPS):
        this.step(*made[i % STEPS], 1e-4, i + 1)
    this.wait()

    def act():
        for i in range(STEPS):
            this.step(*made[i], 1e-4, 2 * STEPS + 1 + i)
        this.wait()

    seen, whole = watched(act)
    names = [(name[:90], 0.0, 0) for name, _ in seen]
    if who.startswith(step_sides.OURS):
        ways = step_sides.ways_of(precision, who)
        config = step_sides.config_of(preset, dry)
        listed = predicted(config, batch, context, ways, rank, who == step_sides.WITH_MUON)
        if len(seen) != STEPS * len(listed):
            names = sorted({name[:60] for name, _ in seen})
            raise ValueError(f"{len(seen)} kernels ran, the list has {len(listed)}: {names}")
        names = listed * STEPS
    table = {}
    for (_, took), (name, expected, flops) in zip(seen, names, strict=True):
        line = table.setdefault(name.split(".")[-1] if expected else name, [0, 0.0, 0.0, 0])
        for i, value in enumerate((1, took, expected, flops)):
            line[i] += value / STEPS
    table = dict(sorted(table.items(), key=lambda item: -item[1][1]))
    total = [sum(line[i] for line in table.values()) for i in range(4)]
    return {"all": total, "from first to last": [1, whole / STEPS, 0.0, 0]} | table


def tell(table):
    """The table's lines."""
    for name, (count, took, expected, flops) in table.items():
        rate = f"{flops / took / 1e6:6.0f} TFLOP/s" if flops and took else ""
        print(f"    {name:60} {count:6.0f} {took:10.1f} us {expected:10.1f} {rate}")


# ---- A toy's step as a graph, again and again, beside the same launches one by one


@contextmanager
def broken(number):
    """Steps of these numbers are told a scale of the loss that is nan."""
    true = stepper.loss_scale

    def scale(*args):
        return true(*args) * (np.nan if number in BROKEN else 1.0)

    stepper.loss_scale = scale
    try:
        yield
    finally:
        stepper.loss_scale = true


def train(device, steps):
    """(sums and norms of all steps, weights, moments and copies) of the toy."""
    w = initialise(TOY, seed=0)
    optimizer = AdamW(w)
    this, taken = stepper.CudaStepper(w, optimizer, device), []
    give = step_sides.batches(TOY, BATCH, TOY.context)
    for number in range(1, steps + 1):
        with broken(number):
            rate = 1e-3 * (1 + np.sin(number / 7))
            taken += this.step(*give(number), rate, number)
    taken += this.finish()
    this.pull()
    copies = device.host(this.memories["copies"])
    told = np.array([[*each.sums, each.norm] for each in taken])
    return {"told": told, "weights": w.flat.copy(), "m": optimizer.m.flat.copy(),
            "v": optimizer.v.flat.copy(), "copies": copies}  # fmt: skip


def replay(dry):
    """How many numbers differ between graphs, launches one by one, and graphs once more."""
    device, steps = step_sides.card(dry), 2 if dry else REPLAYS
    graphs, again = train(device, steps), train(device, steps)
    singly = train(OneByOne(device), steps)
    told, count = graphs["told"], BATCH * TOY.context
    outcome = {"first loss": told[0, 0] / count, "last loss": told[-1, 0] / count}
    bad = {i + 1 for i in np.flatnonzero(~np.isfinite(told[:, -1]))}
    outcome["steps that were not finite"] = len(bad)
    for name, values in graphs.items():
        for other, run in (("one by one", singly), ("again", again)):
            same = values.tobytes() == run[name].tobytes()
            outcome[f"{name} {other}"] = 0 if same else int((values != run[name]).sum()) or -1
    if bad != {number for number in BROKEN if number <= steps}:
        raise ValueError(f"steps {sorted(bad)} were not finite: {outcome}")
    if not all(np.isfinite(graphs[name]).all() for name in ("weights", "m", "v")):
        raise ValueError("a step with a nan has changed the model")
    if any(outcome[name] for name in outcome if name.endswith(("one by one", "again"))):
        raise ValueError(f"bits differ: {outcome}")
    return {name: float(value) for name, value in outcome.items()}
