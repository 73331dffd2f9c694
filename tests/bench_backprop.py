"""Time the reference engine on the small preset: `python tests/bench_backprop.py`."""

import time
from statistics import median
from types import SimpleNamespace

import numpy as np

from nanoeuler import measurements, reference
from nanoeuler.config import PRESETS
from nanoeuler.model import head_weights, initialise, loss_and_gradients, loss_scale, loss_sums

BATCH, REPEATS = 16, 9


def timed(function, kind, spent):
    """`function`, which also adds the seconds that each call takes to spent[kind]."""

    def run(*arguments):
        start = time.perf_counter()
        result = function(*arguments)
        spent[kind] += time.perf_counter() - start
        return result

    return run


if __name__ == "__main__":
    config, rng = PRESETS["small"], np.random.default_rng(0)
    w = initialise(config, seed=0)
    dw = w.zeros_like()
    tokens = rng.integers(config.vocab_size, size=(BATCH, config.context))
    targets = rng.integers(config.vocab_size, size=(*tokens.shape, config.n_predict))
    scale = loss_scale(targets, head_weights(config.n_predict))
    engine, spent = SimpleNamespace(**vars(reference)), {}
    for name in ("linear", "linear_backward", "attention", "attention_backward"):
        setattr(engine, name, timed(vars(reference)[name], name.split("_")[0], spent))

    rounds = []
    for _ in range(1 + REPEATS):  # the first round warms up, and is dropped below
        start = time.perf_counter()
        loss_sums(reference, config, w, tokens, targets)
        middle = time.perf_counter()
        spent.update(linear=0.0, attention=0.0)
        loss_and_gradients(engine, config, w, tokens, targets, scale, dw)
        both = time.perf_counter() - middle
        rounds.append(
            {
                "forward": middle - start,
                "forward and backward": both,
                "of which linear layers": spent["linear"],
                "of which attention": spent["attention"],
                "of which the rest": both - sum(spent.values()),
            }
        )
    case = f"small, {BATCH} x {config.context} tokens"
    measurements.save(
        "backprop",
        [
            measurements.row(
                what, case, "reference", round(median(r[what] for r in rounds[1:]), 4), "s"
            )
            for what in rounds[0]
        ],
    )
