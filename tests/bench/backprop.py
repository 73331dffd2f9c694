"""Time the reference engine on the small preset: `python tests/bench/backprop.py`.

Every round times the forward, the cross-entropy and the backward of one batch in turn, and within
the two passes linear layers and attention. Medians over the rounds, row by row.
"""

import time
from statistics import median

import numpy as np

from nanoeuler import measurements
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model.config import PRESETS
from nanoeuler.model.transformer import backward, head_weights, loss_scale, stream
from nanoeuler.model.weights import initialise

BATCH, REPEATS = 16, 15


def timed(function, what, seconds):
    """`function`, which also adds the seconds that each call takes to seconds[what]."""

    def run(*arguments):
        start = time.perf_counter()
        result = function(*arguments)
        seconds[what] += time.perf_counter() - start
        return result

    return run


def one_round(config, w, dw, tokens, targets, scale):
    """The seconds of each pass, and of its products and the rest of it: a dict."""
    passes, products = ("forward", "backward"), ("linear", "attention")
    names = [*passes, "cross-entropy", *(f"{p}, {kind}" for p in passes for kind in products)]
    seconds, engine = dict.fromkeys(names, 0.0), ReferenceEngine()
    for kind in products:
        for name, p in ((kind, "forward"), (f"{kind}_backward", "backward")):
            setattr(engine, name, timed(getattr(engine, name), f"{p}, {kind}", seconds))

    def forward():
        n, saved = stream(engine, config, w, tokens)
        return n, saved, engine.linear(n, w["output"])

    def back(n, saved, dlogits):
        dlogits = dlogits.reshape(*tokens.shape, -1)
        dn = engine.linear_backward(dlogits, n, w["output"], dw["output"])
        backward(engine, config, w, saved, dn, dw)

    n, saved, logits = timed(forward, "forward", seconds)()
    logits = logits.reshape(*targets.shape, -1)
    _, dlogits = timed(engine.cross_entropy, "cross-entropy", seconds)(logits, targets, scale)
    timed(back, "backward", seconds)(n, saved, dlogits)
    for p in passes:
        seconds[f"{p}, the rest"] = seconds[p] - sum(seconds[f"{p}, {kind}"] for kind in products)
    return seconds


if __name__ == "__main__":
    config, rng = PRESETS["small"], np.random.default_rng(0)
    w = initialise(config, seed=0)
    tokens = rng.integers(config.vocab_size, size=(BATCH, config.context))
    targets = rng.integers(config.vocab_size, size=(*tokens.shape, config.n_predict))
    scale = loss_scale(targets, head_weights(config.n_predict))
    problem = config, w, w.zeros_like(), tokens, targets, scale

    one_round(*problem)  # warms up, and is dropped
    rounds = [one_round(*problem) for _ in range(REPEATS)]
    case = f"small, {BATCH} x {config.context} tokens"
    rows = [
        measurements.row(what, case, "reference", round(median(r[what] for r in rounds), 4), "s")
        for what in rounds[0]
    ]
    measurements.save("backprop", rows)
