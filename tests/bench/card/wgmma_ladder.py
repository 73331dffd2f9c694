"""The ladder on tensor cores, a rung beside the next and cuBLAS: C = A B^T in bf16.

Every rung is checked on ragged sizes, on a depth that the ring goes round many times, and on what
is timed. Contests show all rungs of one shape together; "multicast" is "ours".
"""

from collections.abc import Callable
from functools import partial

from bench.card import Bench, Contest, ghost

from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.engines.gpu.wgmma_ladder import RUNGS, product, rung_kernel

RAGGED = [(1, 8, 8), (136, 264, 200), (1000, 776, 72), (40, 4104, 4096)]  # m, n, k
TIMED = [(8192, 8192, 8192), (4096, 4096, 4096), (8192, 8192, 256)]
LEAST = 2.0**-9  # a rounding to bf16, whose mean is below half of its largest
OURS = "multicast"  # which should be the fastest at the depths of the first two
REPEATS = 4  # of a check, for equal bits


def case(m: int, n: int, k: int) -> str:
    """A shape as rows name it."""
    return f"NT {m}x{n}x{k} bf16"


def kernels() -> dict[str, Callable[[], Kernel]]:
    """All rungs."""
    return {name: partial(rung_kernel, name) for name in RUNGS}


def plans() -> dict[str, tuple[Launch, ...]]:
    """The launches of all checks and contests, on stand-ins."""
    return {
        f"{name} {case(m, n, k)}": (product(name, ghost((m, k)), ghost((n, k)), ghost((m, n))),)
        for name in RUNGS
        for m, n, k in (*RAGGED, *TIMED)
    }


def check(bench: Bench, name: str, shape: tuple[int, int, int]) -> dict[str, float]:
    """Errors of one rung and of cuBLAS."""
    m, n, k = shape
    a, b, c = bench.random(m, k), bench.random(n, k), bench.output(m, n)
    call = bench.call(launch(bench, name, a, b, c))
    ours = bench.repeat(call, {"c": c}, REPEATS)["c"]
    exact = a.double() @ b.double().T
    return {"error": bench.error(ours, exact), "peer": bench.error(a @ b.T, exact), "least": LEAST}


def launch(bench: Bench, name: str, a, b, c) -> Launch:
    """A rung on tensors."""
    return product(name, *(bench.view(x) for x in (a, b, c)), bench.device.multiprocessors)


def checks(bench: Bench) -> dict[str, Callable[[], dict]]:
    """Every rung on every shape."""
    return {
        f"{name}: {case(*shape)}": partial(check, bench, name, shape)
        for name in RUNGS
        for shape in (*RAGGED, *TIMED)
    }


def entrants(bench: Bench, shape: tuple[int, int, int]) -> dict[str, list[Callable[[], None]]]:
    """All rungs and cuBLAS on the same operands, which overflow the L2 cache."""
    m, n, k = shape
    a, b, c = bench.random(m, k), bench.random(n, k), bench.output(m, n)
    made = {name: [bench.call(launch(bench, name, a, b, c))] for name in RUNGS}
    return made | {"cuBLAS": [partial(bench.torch.mm, a, b.T, out=c)]}


def contests(bench: Bench) -> list[Contest]:
    """A contest for each shape that is timed."""
    return [
        Contest("wgmma ladder", case(*shape), partial(entrants, bench, shape), OURS, "cuBLAS")
        for shape in TIMED
    ]
