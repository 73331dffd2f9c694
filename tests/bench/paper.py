"""Time the paper against numba's simulator: `python tests/bench/paper.py`.

One kernel, the product of two 64 x 64 matrices with tiles of 16, by both in one process, in turn.
The simulator writes down nothing and checks nothing; the paper does both, as it always does.
"""

import os
import sys
import time
from pathlib import Path
from statistics import median

if __name__ == "__main__":  # before anything imports numba, and in no process that compiles
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numpy as np  # noqa: E402
from numba import cuda as simulator  # noqa: E402

from nanoeuler import (
    emulator,  # noqa: E402
    measurements,  # noqa: E402
)
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, rebind  # noqa: E402
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch  # noqa: E402

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "helpers")]  # as pytest has it
from tiled_product import make_product  # noqa: E402

N, TILE, ROUNDS = 64, 16, 5


def in_numba(value):
    """What a place-holder means to numba."""
    return simulator if value is cuda else np.float32 if value is float32 else value


def seconds(act, *arrays):
    """How long a product takes; it has to be right."""
    a, b, c = arrays
    c[...] = np.nan
    start = time.perf_counter()
    act(a, b, c)
    time_taken = time.perf_counter() - start
    assert np.abs(c - a.astype(float) @ b).max() < 1e-4
    return time_taken


if __name__ == "__main__":
    blocks, product = N // TILE, make_product(TILE)
    kernel = Kernel(product, "f[2] f[2] f[2]", (TILE, TILE))
    simulated = simulator.jit(rebind(product, in_numba))
    ways = {
        "paper": lambda a, b, c: emulator.run(Launch(kernel, (blocks, blocks), (a, b, c))),
        "numba simulator": lambda a, b, c: simulated[(blocks, blocks), (TILE, TILE)](a, b, c),
    }
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((N, N)).astype(np.float32) for _ in range(2))
    times = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, act in ways.items():
            times[name].append(seconds(act, a, b, np.zeros_like(a)))
    ours, peer = (round(median(times[name]), 4) for name in ways)
    rows = [
        measurements.row(
            "emulator", f"matmul {N}x{N}, tiles of {TILE}", "paper", ours, "s",
            "numba simulator", peer,
        )
    ]  # fmt: skip
    measurements.update("kernels", rows)
    print(f"paper {ours} s, numba's simulator {peer} s: {ours / peer:.4f}")
