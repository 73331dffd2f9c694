"""Float32 products by mma.sync that split their operands in registers, against PyTorch's TF32.

Beside them: the same with pieces in memory, which a kernel of its own splits.
"""

from dataclasses import replace
from functools import partial

import numpy as np
from bench.card import Contest, ghost, pieces

from nanoeuler.engines.gpu.gemm.mma_floats import (
    FloatForm,
    choose_floats,
    floats_kernel,
    floats_product,
)
from nanoeuler.engines.gpu.gemm.mma_kernel import sum_kernel

ADA = 8, 9  # whose kernels are checked and timed: tiles for 99 KiB
LAYOUTS = "NT", "NN", "TN"
# Of a step of euler-116m, 16 x 512, besides ragged ones.
STEP = ("NN", 8192, 4096, 768), ("NT", 8192, 768, 4096), ("TN", 768, 4096, 8192)
CHECKED = *pieces.RAGGED, ("NN", 8, 8, 8), pieces.LONG, *STEP
SETS = 3  # of operands: together more than the L2 cache


def forms():
    """All forms: of cards of 99 KiB, and of those with more."""
    wide = [FloatForm(layout, columns=256) for layout in LAYOUTS]
    chosen = [choose_floats(layout, capability=ADA) for layout in LAYOUTS]
    return [replace(form, epilogue=way) for form in wide + chosen for way in ("store", "add")]


def kernels():
    """Name -> maker of each kernel."""
    made = {
        f"{form.layout} {form.epilogue} {form.rows}x{form.columns}": partial(floats_kernel, form)
        for form in forms()
    }
    return made | {f"sums {add=}": partial(sum_kernel, add) for add in (False, True)}


def call(bench, of, epilogue="store"):
    """A function that puts the product of a `pieces.Product` on torch's stream."""
    arrays = [pieces.Parts(*vars(bench.view(x)).values()) for x in (of.a, of.b, of.c)]
    place = lambda need: bench.device.empty((need,), np.uint8)  # noqa: E731
    form = choose_floats(of.layout, epilogue, ADA)
    return bench.call(floats_product(form, *arrays, place=place))


def check(bench, epilogue, shape):
    """The relative error of one product beside PyTorch's TF32."""
    of = pieces.operands(bench, 2, *shape)
    exact, peer = of.torch(bench, double=True), of.torch(bench, tf32=True)
    error = bench.error(peer, exact)
    if epilogue == "add":
        exact += of.c.normal_()
    c = bench.repeat(call(bench, of, epilogue), {"C": of.c}, 4)["C"]
    return {"error": bench.error(c, exact), "peer": error, "least": pieces.least(*shape, 2)}


def checks(bench):
    """Name -> check."""
    return {
        f"split in registers, {layout} {'x'.join(map(str, size))} {way}": partial(
            check, bench, way, (layout, *size)
        )
        for layout, *size in CHECKED
        for way in ("store", "add")
    }


def plans():
    """Name -> launches of every check and contest, without arrays."""
    made = {}
    for layout, m, n, k in CHECKED:
        a, b = (ghost(shape, np.float32) for shape in pieces.stored(layout, m, n, k))
        place = lambda need: ghost((need,), np.uint8)  # noqa: E731
        c = ghost((m, n), np.float32)
        made[f"{layout} {m}x{n}x{k}"] = floats_product(
            choose_floats(layout, capability=ADA), a, b, c, place=place)  # fmt: skip
    return made


def entrants(bench, shape):
    """Name -> calls, one for each set of operands."""
    sets = [pieces.operands(bench, 2, *shape) for _ in range(SETS)]
    return {
        "torch TF32": [partial(of.torch, bench, tf32=True) for of in sets],
        "pieces in memory": [of.call(bench, ADA) for of in sets],
        "split in registers": [call(bench, of) for of in sets],
    }


def contests(bench):
    """What is timed."""
    return [
        Contest(
            "matmul, TF32, mma.sync", f"{layout} {'x'.join(map(str, size))} float32",
            partial(entrants, bench, (layout, *size)), "split in registers", "torch TF32",
        )
        for layout, *size in STEP
    ]  # fmt: skip
