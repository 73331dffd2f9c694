"""PTX instructions on the GPU against their twins on paper, on random input (helpers/twins.py)."""

from functools import partial

import numpy as np
from twins import TWINS, compare

from nanoeuler.engines.gpu import paper

SEEDS = 3  # inputs of each twin
UNITS = {"bits": "words that differ from the paper's", "absolute": "absolute, from the paper's",
         "relative": "relative, to the paper's"}  # fmt: skip


def kernels():
    """Name -> maker of each kernel."""
    return {name: twin.make for name, twin in TWINS.items()}


def on_card(bench, twin, arrays):
    """The arrays after the launch on the GPU."""
    placed = {name: bench.device.array(array) for name, array in arrays.items()}
    bench.device.run(twin.launch(placed))
    return {name: bench.device.host(array) for name, array in placed.items()}


def check(bench, name):
    """By instruction, how far the GPU is from the paper at most."""
    twin, worst = TWINS[name], {}
    for seed in range(SEEDS):
        arrays = twin.inputs(np.random.default_rng(seed))
        before = {what: array.copy() for what, array in arrays.items()}
        paper.run(twin.launch(arrays))
        first, again = (on_card(bench, twin, before) for _ in range(2))
        for what in before:
            if (first[what] != again[what]).any():
                raise ValueError(f"two runs differ in {what}")
        for what, seen in compare(twin, first, before, arrays).items():
            if what not in worst or seen.distance > worst[what]["error"]:
                worst[what] = {
                    "error": seen.distance, "least": seen.bound.size / 2,
                    "unit": UNITS[seen.bound.kind],
                }  # fmt: skip
    return worst


def checks(bench):
    """Name -> check."""
    return {name: partial(check, bench, name) for name in TWINS}


def contests(bench):
    """Nothing is timed."""
    return []


def plans():
    """Name -> launch."""
    made = {name: twin.inputs(np.random.default_rng(0)) for name, twin in TWINS.items()}
    return {name: [twin.launch(made[name])] for name, twin in TWINS.items()}
