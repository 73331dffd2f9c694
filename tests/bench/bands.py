"""How far seeds alone move the loss: `python tests/bench/bands.py [SEEDS STEPS]`.

Trains the tiny model of chapter 8 on data/river.txt under 99 seeds, and the small preset on
tinyshakespeare under 19 (about six minutes on two quiet cores); writes data/measurements/bands.json
with the loss of each run, as means over STRETCH steps. SEEDS and STEPS make the runs of the small
preset fewer and shorter, to try the program. The text is tinyshakespeare.txt in the folder named by
the environment variable NANOEULER_DATA (default: ../shared/data beside the project).
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from nanoeuler import measurements
from nanoeuler.data.prepare import prepare_text
from nanoeuler.files import project_root
from nanoeuler.model.config import PRESETS, ModelConfig
from nanoeuler.training.folder import read_metrics
from nanoeuler.training.run import Settings
from nanoeuler.training.train import train

STRETCH = 25  # steps whose mean is one number: short beside a run, long beside a batch's noise
TINY = ModelConfig(
    vocab_size=320, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden=88, context=32, n_predict=2
)
TINY_SETTINGS = {"steps": 200, "batch_size": 8, "lr": 0.005}
SMALL_SETTINGS = {"steps": 300}  # and what `nanoeuler train --preset small` has
TINY_SEEDS = 99  # a new run lies outside their lowest and highest with a chance of 2 in 100
SMALL_SEEDS = 19  # 2 in 20


def curve(config, prepared, seed, threads=None, **settings):
    """Train on the folder `prepared`: the mean losses of each STRETCH steps, and bits per byte."""
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stderr(io.StringIO()):
        train(prepared, out, config=config, settings=Settings(seed=seed, **settings), engine="cpu",
              threads=threads)  # fmt: skip
        lines = read_metrics(out)
    losses = np.array([line["loss"] for line in lines])
    return losses.reshape(-1, STRETCH).mean(axis=1), lines[-1]["bits_per_byte"]


def tiny_curve(prepared, seed):
    """`curve` of the tiny model. One thread: its batches are too small to share."""
    return curve(TINY, prepared, seed, threads=1, **TINY_SETTINGS)


def rows(model, settings, seeds, run):
    """Rows of one model: for each seed the curve and the held-out bits that `run(seed)` returns."""
    for seed in seeds:
        losses, bits = run(seed)
        case = json.dumps({"model": model, "seed": seed, **settings})
        print(f"{losses[-1]:.4f} nats, {bits:.4f} bits/byte: {case}", flush=True)
        unit = f"nats per token, mean of each {STRETCH} steps"
        yield measurements.row("loss", case, "cpu", losses.round(5).tolist(), unit)
        yield measurements.row("held-out text", case, "cpu", round(bits, 5), "bits/byte")


def main(small_seeds, steps):
    """Measure both models and write the file. Seeds count from 1: 0, the default, is a reader's."""
    texts = Path(os.environ.get("NANOEULER_DATA") or project_root() / ".." / "shared" / "data")
    small, settings = PRESETS["small"], {**SMALL_SETTINGS, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        river, plays = Path(folder) / "river", Path(folder) / "plays"
        prepare_text(project_root() / "data" / "river.txt", river, vocab_size=TINY.vocab_size)
        prepare_text(texts / "tinyshakespeare.txt", plays, vocab_size=small.vocab_size)
        found = [
            *rows("tiny", TINY_SETTINGS, range(1, TINY_SEEDS + 1), lambda s: tiny_curve(river, s)),
            *rows("small", settings, range(1, small_seeds + 1),
                  lambda s: curve(small, plays, s, **settings)),
        ]  # fmt: skip
    measurements.save("bands", found)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or (SMALL_SEEDS, SMALL_SETTINGS["steps"])))
