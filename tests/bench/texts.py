"""Rows of several texts on a GPU: `python tests/bench/texts.py [--commit C] [--dry]`, two minutes.

Packed rows beside the same texts in rows of their own: sums of losses and every gradient, of both
presets in bf16 and in float32. Then the milliseconds of a training step whose rows hold texts of
about 128 tokens, beside one text a row. Rows go to data/measurements/gpu.json, and to $OUT.
--dry does it on paper, with models of nearly nothing.
"""

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

from nanoeuler import measurements
from nanoeuler.engines.gpu.step.precision import PRECISIONS
from nanoeuler.engines.gpu.step.recording import GRADIENTS
from nanoeuler.engines.gpu.step.stepper import CudaStepper
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.training.optim import AdamW

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]

import step_sides  # noqa: E402
from bench.gpu import circumstances  # noqa: E402
from bench.step import name_of_card  # noqa: E402

PRESETS = "euler-116m", "gpt2-124m"
ENGINES = {"bf16": "cuda", "float32": "cuda-float32"}
SHORT, LONG = 64, 192  # tokens of a text, about 128 on average
TIMED = [("euler-116m", 64), ("gpt2-124m", 16)]
WARM, WINDOWS, STEPS = 5, 5, 20
# Sums of the same products in another order, through 12 to 16 layers; bf16 rounds each of them.
ALLOWED = {"bf16": 3e-2, "float32": 2e-5}


def cuts_of(rng, T, least, most):
    """Where texts of a row of T tokens begin, and T."""
    made = [0]
    while T - made[-1] > most:
        made.append(made[-1] + int(rng.integers(least, most + 1)))
    return [*made, T]


def packed(config, B, T, rng):
    """tokens (B, T), targets (B, T, K), first (B, T); and the same texts in rows of their own."""
    K = config.n_predict
    least, most = (SHORT, LONG) if T > LONG else (T // 4, T // 2)
    tokens = rng.integers(0, config.vocab_size, (B, T)).astype(np.int32)
    targets, first = np.full((B, T, K), IGNORE, np.int32), np.zeros((B, T), np.int32)
    alone = []
    for row in range(B):
        cuts = cuts_of(rng, T, least, most)
        for a, b in zip(cuts, cuts[1:], strict=False):
            first[row, a:b] = a
            for k in range(K):
                targets[row, a : b - 1 - k, k] = tokens[row, a + 1 + k : b]
            own = np.zeros(T, np.int32), np.full((T, K), IGNORE, np.int32)
            own[0][: b - a], own[1][: b - a] = tokens[row, a:b], targets[row, a:b]
            alone.append(own)
    return (tokens, targets, first), tuple(np.stack(each) for each in zip(*alone, strict=True))


class Bench:
    """The device, and what became known."""

    def __init__(self, dry, where):
        self.dry, self.where, self.rows = dry, where, []
        if dry:
            from types import SimpleNamespace

            import recorded

            from nanoeuler.emulator.collectives import RankDevice

            recorded.by_numpy(SimpleNamespace(setattr=setattr), attention=False)
            self.device = RankDevice()
        else:
            from nanoeuler.engines.gpu.step.stepper import gpu

            self.device = gpu()

    def stepper(self, config, kind):
        w = Weights(config, flat=initialise(config, 0).flat.copy())
        _, multiplier = step_sides.ways_of("bf16", "cuda")
        kind = PRECISIONS[ENGINES[kind]]
        return CudaStepper(w, AdamW(w), self.device, precision=kind, multiplier=multiplier)

    def tell(self, what, case, value, unit, peer=None, peer_value=None):
        row = {"what": what, "case": case, "engine": "cuda", "value": value, "unit": unit,
               "peer": peer, "peer_value": peer_value}  # fmt: skip
        beside = f", {value / peer_value:.3f} of {peer}" if peer_value else ""
        print(f"{what}, {case}: {value:.6g} {unit}{beside}", flush=True)
        self.rows.append(self.where | row)
        if os.environ.get("OUT"):
            Path(os.environ["OUT"], "texts.json").write_text(json.dumps(self.rows))

    def gradients(self, config, kind, batch):
        """Sums of losses, and gradients, of one step that moves nothing."""
        this = self.stepper(config, kind)
        taken = this.step(*batch[:2], 0.0, 1, *batch[2:]) + this.finish()
        (shared,) = (program.shared for program in this.programs.values())
        there = self.device.host(shared[GRADIENTS]).reshape(-1).view(np.float32)
        w = this.weights
        return taken[0].sums, Weights(config, flat=there[: w.flat.size].copy())

    def correct(self, preset, kind):
        """The largest relative difference of packed rows from rows of their own."""
        config = step_sides.config_of(preset, self.dry)
        T = 16 if self.dry else config.context
        rows, alone = packed(config, 2, T, np.random.default_rng(3))
        (sums, ours), (own, theirs) = (self.gradients(config, kind, x) for x in (rows, alone))
        off = {name: np.linalg.norm(ours[name] - theirs[name])
               / max(np.linalg.norm(theirs[name]), 1e-30) for name in ours}  # fmt: skip
        worst = max(off, key=off.get)
        case = f"{preset} 2x{T} {kind}"
        apart = float(np.abs(sums / own - 1).max())
        self.tell("several texts, gradients apart", case, float(off[worst]), "relative")
        self.tell("several texts, sums apart", case, apart, "relative")
        if off[worst] > ALLOWED[kind]:
            raise ValueError(f"{case}: {worst} is off by {off[worst]:.1e}")

    def time(self, preset, B):
        """Milliseconds of a step with and without several texts in a row, in turn."""
        config = step_sides.config_of(preset, self.dry)
        B, T = (1, 16) if self.dry else (B, config.context)
        (tokens, targets, first), _ = packed(config, B, T, np.random.default_rng(5))
        warm, windows, steps = (1, 1, 1) if self.dry else (WARM, WINDOWS, STEPS)
        found = {}
        for name, more in ("several", [first]), ("one", []):
            this, number, seconds = self.stepper(config, "bf16"), 0, []
            for count in [warm] + [steps] * windows:
                began = time.perf_counter()
                for _ in range(count):
                    number += 1
                    this.step(tokens, targets, 1e-4, number, *more)
                this.finish()
                seconds.append((time.perf_counter() - began) / count)
            found[name] = 1e3 * median(seconds[1:])
            del this
            gc.collect()
        self.tell("training step, texts of about 128", f"{preset} {B}x{T} bf16", found["several"],
                  "ms", "one text a row", found["one"])  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="small models, on paper")
    parser.add_argument("--commit", help="what is measured, where git cannot say it")
    options = parser.parse_args()
    commit = options.commit or measurements.commit()
    where = {} if options.dry else circumstances(name_of_card(), commit)
    bench, failed = Bench(options.dry, where), []
    jobs = [lambda p=p, k=k: bench.correct(p, k) for k in ENGINES for p in PRESETS]
    jobs += [lambda p=p, b=b: bench.time(p, b) for p, b in TIMED]
    for job in jobs:
        try:
            job()
        except (ValueError, UserError, MemoryError) as error:
            failed.append(str(error))
            print("FAILED", error, flush=True)
        gc.collect()
    if not options.dry:
        try:
            measurements.update("gpu", bench.rows)
        except UserError as error:  # a copy without the book has no place for them
            print(error)
    sys.exit(len(failed))
