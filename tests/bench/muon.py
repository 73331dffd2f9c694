"""Muon beside AdamW on the small preset and the embedded corpus: `python tests/bench/muon.py PART`.

Parts, the first three if none is named:
    share      milliseconds of either update, and of a step without it (half a minute)
    minutes    bits per byte after five minutes: the preset `small-modern` with its recipe, the
               same with ReLU² in place of SwiGLU (relu2), and `small` with either optimizer and
               everything else at its default; twenty minutes
    steps      bits per byte after --steps (2,780: what AdamW takes in five minutes on two cores)
    sweep      the same with one setting changed at a time, as many runs with either (an hour)

`--only recipe`, `relu2`, `muon` or `adamw` does one of them, `--seed` another seed than 0. Rows go
to data/measurements/muon.json, and what the recipe reaches in five minutes to faster.json, which is
the row that others are to beat. Those of runs also go to $OUT, if set, a file for each name and
seed, so that several can race at once. `share` and `minutes` ask for idle cores, and a row of
`minutes` says how many; `steps` doesn't. --commit, --device: what rows say where git cannot, or
where that is another machine.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np

import nanoeuler as ne
from nanoeuler import measurements
from nanoeuler.engines.registry import make_stepper
from nanoeuler.model.config import PRESETS
from nanoeuler.model.weights import initialise
from nanoeuler.training import muon
from nanoeuler.training.folder import read_metrics
from nanoeuler.training.run import OPTIMIZERS
from nanoeuler.training.train import RECIPES

PARTS = "share", "minutes", "steps", "sweep"
STEPS, MINUTES, TIMES = 2780, 5, 30
PRESET, RECIPE = "small", "small-modern"
CORES = f"{measurements.cores()} cores"
FORMS = {"recipe": {}, "relu2": {"mlp": "relu2", "hidden": 512}}  # of RECIPE; as many weights
NAMES = *OPTIMIZERS, *FORMS
SWEEP = {  # matrices: their rate in parts of lr; the rest are fields of Settings
    "adamw": [{"lr": 0.002}, {"lr": 0.008}, {"weight_decay": 0.1}, {"weight_decay": 1.0},
              {"beta2": 0.95}, {"warmup": 200}],
    "muon": [{"lr": 0.004}, {"matrices": 1.25}, {"weight_decay": 0.1}, {"weight_decay": 0.03},
             {"momentum": 0.9}, {"lr": 0.004, "weight_decay": 0.1}],
}  # fmt: skip


def milliseconds(call):
    """The median processor time of this thread in a call, once it is warm."""
    taken = []
    for _ in range(TIMES + 1):
        began = time.thread_time()
        call()
        taken.append(time.thread_time() - began)
    return 1e3 * statistics.median(taken[1:])


def share(names):
    """Rows: what an update takes on one thread, and a step with it."""
    config, rng = PRESETS[PRESET], np.random.default_rng(0)
    shape = 16, config.context
    tokens = rng.integers(config.vocab_size, size=shape)
    targets = rng.integers(config.vocab_size, size=(*shape, config.n_predict))
    for name in names:
        weights = initialise(config, 0)
        optimizer = OPTIMIZERS[name](weights)
        stepper = make_stepper("cpu", weights, optimizer, threads=1)
        drawn = rng.standard_normal(weights.flat.size).astype(np.float32)

        def update(stepper=stepper, optimizer=optimizer, weights=weights, drawn=drawn):
            stepper.gradients.flat[...] = drawn
            optimizer.update(weights, stepper.gradients, 1e-9, 1)

        began, taken = time.process_time(), []
        for number in range(1, TIMES + 2):
            began = time.process_time()
            stepper.step(tokens, targets, 1e-9, number)
            taken.append(time.process_time() - began)
        for what, value in (("update", milliseconds(update)),
                            ("step", 1e3 * statistics.median(taken[1:]))):  # fmt: skip
            print(f"{name:6} {what:6} {value:.1f} ms")
            yield measurements.row(what, f"{PRESET}, batch 16, 1 thread, {name}", "cpu",
                                   round(value, 2), "ms")  # fmt: skip


def trained(name, seed, how, changes):
    """Rows of a run on the embedded corpus: where it ends, and after how many steps."""
    own, changes = changes, dict(changes)
    ratio = changes.pop("matrices", muon.MUON_RATIO)
    preset = RECIPE if name in FORMS else PRESET
    config = dataclasses.replace(PRESETS[preset], **FORMS.get(name, {}))
    base = RECIPES[RECIPE] if name in FORMS else ne.Settings(optimizer=name)
    settings = dataclasses.replace(base, seed=seed, **how, **changes)
    with (tempfile.TemporaryDirectory() as folder, mock.patch.object(muon, "MUON_RATIO", ratio)):
        out, began = Path(folder) / "run", time.perf_counter()
        ne.train(out=out, config=config, settings=settings, engine="cpu")
        took, lines = time.perf_counter() - began, read_metrics(out)
    (kind, count), = how.items()
    form = f"{name}, {config.mlp}" if name == "recipe" else name
    cores = f", {CORES}" if kind == "minutes" else ""  # which the numbers of steps don't depend on
    case = f"docs, {preset}, {count:g} {kind}, {form}{cores}, seed {seed}"
    case += "".join(f", {each} {value:g}" for each, value in own.items())
    bits = lines[-1]["bits_per_byte"]
    print(f"{case}: {bits:.4f} bits per byte, {len(lines)} steps, {took:.0f} s", flush=True)
    yield measurements.row("bits per byte", case, "cpu", round(bits, 4), "bits/byte")
    yield measurements.row("steps", case, "cpu", len(lines), "steps")
    yield measurements.row("seconds", case, "cpu", round(took, 1), "s")
    for line in lines:
        if line.get("bits_per_byte") is not None:
            where = f"{case}, after {line['step']} steps"
            yield measurements.row("held out", where, "cpu", round(line["bits_per_byte"], 4),
                                   "bits/byte")  # fmt: skip


def keep(rows, name, seed):
    """Put the rows of a run where they belong, and where $OUT says."""
    measurements.update("muon", rows)
    if os.environ.get("OUT"):
        path = Path(os.environ["OUT"]) / f"muon-{name}-{seed}.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        path.write_text(json.dumps(before + rows, indent=0), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description="Muon beside AdamW")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--only", choices=NAMES, help="one of them alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    commit = measurements.commit() if shutil.which("git") else ""
    parser.add_argument("--commit", default=commit)
    parser.add_argument("--device", default=measurements.device())
    options = parser.parse_args()
    where = {"commit": options.commit, "device": options.device}
    with mock.patch.multiple(measurements, **{k: lambda v=v: v for k, v in where.items()}):
        measured(options)


def measured(options):
    """Measure the parts that were asked for, and keep each run's rows as soon as they are there."""
    for part in options.parts or PARTS[:3]:
        names = NAMES if part in ("minutes", "steps") else OPTIMIZERS
        names = [name for name in names if options.only in (None, name)]
        if part == "share":
            measurements.update("muon", share(names))
            continue
        for name in names:
            how = {"minutes": MINUTES} if part == "minutes" else {"steps": options.steps}
            for changes in SWEEP[name] if part == "sweep" else [{}]:
                rows = [*trained(name, options.seed, how, changes)]
                keep(rows, name, options.seed)
                if part == "minutes" and name == "recipe" and options.seed == 0:
                    case = f"{RECIPE}, docs, {CORES}"  # the row that others are to beat
                    best = measurements.row("bits per byte after five minutes", case, "cpu",
                                            rows[0]["value"], "bits/byte")  # fmt: skip
                    measurements.update("faster", [best])


if __name__ == "__main__":
    main()
