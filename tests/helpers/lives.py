"""Lives of a trainer, for the test that kills it.

A fork server imports `warm_lives`, which does once all that is slow; each life is a fork of that,
which trains, and leaves marks in a pipe that say where it is: text, first save, steps, metrics,
saves, end. The disk is made a little slower, so that a save takes longer than the parent needs to
kill.
"""

import io
import os
import sys
import time
from pathlib import Path

from matplotlib.figure import Figure

from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import initialise
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import loop
from nanoeuler.training.display import draw
from nanoeuler.training.folder import is_begun
from nanoeuler.training.optim import AdamW
from nanoeuler.training.run import Settings
from nanoeuler.training.train import train

RIVER = Path(__file__).parents[2] / "data" / "river.txt"
CONFIG = ModelConfig(
    vocab_size=280, dim=8, n_layers=2, n_heads=2, n_kv_heads=1, hidden=8, context=32, n_predict=2
)
STEPS, SAVE_EVERY = 40, 2


def _slower(name):
    call = getattr(os, name)

    def slow(*arguments, **named):
        time.sleep(0.002)
        return call(*arguments, **named)

    setattr(os, name, slow)


def live(out, marks, said):
    """Train in `out` to the end, or to death; marks go to the Connection, stderr to a file."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr = open(2, "w", closefd=False)

    def mark(letter):
        os.write(marks.fileno(), letter.encode())

    def marked(name, letter, wait=0.0, then=0.0):
        call = getattr(loop, name)

        def marking(*arguments):
            mark(letter)
            time.sleep(wait)
            result = call(*arguments)
            mark("t")
            time.sleep(then)
            return result

        setattr(loop, name, marking)

    for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
        _slower(name)
    marked("rewind", "f"), marked("add_metrics", "m", 0.002), marked("save", "s")
    marked("plot", "e", then=0.2)  # as long as the parent may wait before it kills
    mark("p")
    train(RIVER, out, config=CONFIG, settings=Settings(steps=STEPS, batch_size=8, seed=5),
          engine="reference", threads=1, save_every=SAVE_EVERY, resume=is_begun(out))  # fmt: skip


def warm():
    """Do before the forks what a process does once and slowly: load code, draw a picture."""
    weights = initialise(CONFIG, 0)
    optimizer = AdamW(weights)
    optimizer.clip(weights.zeros_like())
    optimizer.update(weights, weights.zeros_like(), 0.0, 1)
    Tokenizer.train(RIVER.read_bytes(), CONFIG.vocab_size).encode(RIVER.read_bytes())
    figure = Figure()
    draw(figure.subplots(), [{"step": 1, "loss": 1.0}], 1.0, {"unigram": 1.0})
    figure.savefig(io.BytesIO(), format="png")
