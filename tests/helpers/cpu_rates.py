"""The rates of this machine that bench/cpu.py reports: products, copies, exponentials."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

RUNGS = (32, 64, 128, 256, 384)  # of them those that the ladder's plain products are timed on
SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 344, 384, 512, 768)  # square products


def best(function, repeats=200, budget=0.2):
    """Seconds of the fastest call: what the machine can do when nobody disturbs it."""
    function()
    fastest, end = float("inf"), time.perf_counter() + budget
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        fastest = min(fastest, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return fastest


def machine(cores):
    """Print the machine's rates, as [case, value, unit]: one core, and more where it says so."""
    import numpy as np
    from numba import njit

    from nanoeuler.engines.cpu import elementwise, ladder
    from nanoeuler.engines.cpu.gemm import WORK, multiply
    from nanoeuler.engines.cpu.memory import aligned

    @njit
    def exponentials(x, y):
        for i in range(x.size):
            y[i] = elementwise.exp(x[i])

    def operands(n):
        a, b, c = aligned(n, n), aligned(n, n), aligned(n, n)
        a[...], b[...] = 0.5, 0.25
        return a, b, c, False, aligned(WORK)

    out, pool = [], ThreadPoolExecutor(cores)
    threads = os.environ["OPENBLAS_NUM_THREADS"]
    for n in SIZES if threads == "1" else SIZES[-3:]:
        a, b, c, *_ = first = operands(n)
        flops, case = 2e-9 * n**3, f"{n} x {n} x {n}"
        numpy = flops / best(lambda: np.matmul(a, b, out=c))  # noqa: B023 called before it changes
        out.append([f"numpy, {threads} threads: {case}", numpy, "GFLOP/s"])
        if threads == "1":
            ours = flops / best(lambda: multiply(*first))  # noqa: B023
            out.append([f"multiply: {case}", ours, "GFLOP/s"])
            for rung in ("three loops", "tile") if n in RUNGS else ():
                plain = getattr(ladder, rung.replace(" ", "_"))
                rate = flops / best(lambda: plain(a, b, c))  # noqa: B023
                out.append([f"{rung}: {case}", rate, "GFLOP/s"])
        if threads == "1" and n in SIZES[-3:]:  # each thread its own product, all at once
            sets = [operands(n) for _ in range(cores)]
            both = best(lambda: list(pool.map(lambda x: multiply(*x), sets)))  # noqa: B023
            out.append([f"multiply, {cores} threads: {case}", cores * flops / both, "GFLOP/s"])
    if threads == "1":
        x, y = aligned(1 << 24), aligned(1 << 24)
        x[...], y[...] = 0.5, 0
        out.append(["copy", 2e-9 * x.nbytes / best(lambda: np.copyto(y, x)), "GB/s"])
        x, y = x[: 1 << 12], y[: 1 << 12]
        out.append(["np.exp", 1e9 / x.size * best(lambda: np.exp(x, out=y)), "ns"])
        out.append(["loops.exp", 1e9 / x.size * best(lambda: exponentials(x, y)), "ns"])
    print(json.dumps(out))


def torch_products(threads):
    """Print the rate of PyTorch's products on so many threads, as `machine` does."""
    import torch

    torch.set_num_threads(threads)
    out = []
    for n in SIZES[-3:]:
        a, b, c = torch.ones(n, n), torch.ones(n, n), torch.empty(n, n)
        rate = 2e-9 * n**3 / best(lambda: torch.matmul(a, b, out=c))  # noqa: B023 called at once
        out.append([f"torch, {threads} threads: {n} x {n} x {n}", rate, "GFLOP/s"])
    print(json.dumps(out))
