# Made from book/n-cublas.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-vendor-choice
"""The GEMM backend of a recorded step: cuBLAS or our kernels, the faster one or the one you name.

The variable NANOEULER_PRODUCTS says which: "fastest" (where nothing is said, and the library is
installed), "ours", or "cublas", which takes the library's wherever it can do the same.
"""

import os
from importlib.util import find_spec

from nanoeuler.engines.gpu.gemm.cublas import Gemm
from nanoeuler.engines.gpu.lang.card import pretended
from nanoeuler.engines.gpu.step.matmul import Epilogue, Multiplier
from nanoeuler.engines.gpu.step.program import Array, Work
from nanoeuler.errors import UserError

EIGHTS = 8  # of which sizes are multiples: cuBLAS's manual, on Tensor Core usage with bf16
COMPUTE = {1: "bf16", 2: "tf32", 3: "float32"}  # the library's way, by ours: pieces of an operand


class Fastest(Multiplier):
    """The library's products that are stored, in which it was the faster one."""

    words = "cuBLAS multiplies where that pays, our kernels elsewhere"
    ends: tuple[str, ...] = ("store",)  # of products that it does
    pieces_of: tuple[int, ...] = (1, 2)  # float32 without tensor cores is slower than in pieces

    def work(self, layout: str, a: Array, b: Array, c: Array, end: Epilogue) -> list[Work]:
        sizes = *c.shape, a.shape[layout[0] == "N"]
        able = self.pieces in self.pieces_of and not any(n % EIGHTS for n in sizes)
        if able and end.name in self.ends and end == Epilogue(end.name):
            return [Gemm(layout, (a, b, c), COMPUTE[self.pieces], end.name == "add")]
        return super().work(layout, a, b, c, end)


class Library(Fastest):
    """The library's products wherever it has one."""

    words = "cuBLAS multiplies wherever it can"
    ends = ("store", "add")
    pieces_of = (1, 2, 3)


def multiplier() -> type[Multiplier]:
    """The GEMM backend of this process; UserError if its name is unknown, or cuBLAS is missing."""
    wish = os.environ.get("NANOEULER_PRODUCTS") or "fastest"
    known = {"ours": Multiplier, "fastest": Fastest, "cublas": Library}
    if wish not in known:
        raise UserError(f"NANOEULER_PRODUCTS is one of {', '.join(known)}, and not {wish!r}")
    there = find_spec("nvmath") is not None
    if pretended() and wish == "fastest":  # the library can't pretend to be on another card
        return Multiplier
    if wish == "cublas" and not there:
        raise UserError(
            "NANOEULER_PRODUCTS is cublas, and there is no cuBLAS here: pip install "
            "'nvmath-python[cu13]' (the extra gpu-vendor), or say ours"
        )
    return known[wish] if there else Multiplier
