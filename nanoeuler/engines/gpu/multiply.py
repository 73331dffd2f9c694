# Made from book/09b-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-products
"""Matrix products as a recording wants them: C = A B of any two views, whatever the card and kind.

A matrix is (rows, columns) with dense rows, or the transpose of such. What the card multiplies is
bf16, or float32 in pieces. Left out: two transposed operands, which no gradient needs.
"""

from typing import Any

import numpy as np

from nanoeuler.engines.gpu import gemm
from nanoeuler.engines.gpu.gemm_mma_plan import choose_mma, mma_product
from nanoeuler.engines.gpu.gemm_mma_plan import space_for as mma_space
from nanoeuler.engines.gpu.kernel import Launch
from nanoeuler.engines.gpu.products import HOPPER
from nanoeuler.engines.gpu.program import Array, Recording

SPACE = "space"  # the memory in which pieces of products wait; zero before the first step


def turned(a: Array) -> bool:
    """Whether a matrix is the transpose of one in C order."""
    return a.strides[0] == a.dtype.itemsize and a.strides[1] != a.dtype.itemsize


def stored(a: Array) -> Array:
    """The matrix with dense rows that `a` is, or is the transpose of."""
    return a.T if turned(a) else a


class Multiplier:
    """What records products. hopper: whether the kernels for wgmma are used.

    fused: whether a product can end in GELU's backward, SwiGLU, a second array, column sums.
    """

    def __init__(self, recording: Recording, capability: tuple, multiprocessors: int):
        self.recording, self.capability = recording, tuple(capability)
        self.hopper, self.multiprocessors = self.capability == HOPPER, multiprocessors

    @property
    def fused(self) -> bool:
        """Whether the ways out of Hopper's products are there."""
        return self.hopper

    def __call__(
        self, name: str, a: Array, b: Array, c: Array, *, epilogue: str = "store",
        aux: Any = None, second: Any = None, sums: Any = None,
    ) -> None:  # fmt: skip
        """Record C = A B with an epilogue: a (m, k), b (k, n), c (m, n), or its transpose."""
        if turned(c):
            a, b, c = b.T, a.T, c.T
        layout = "NT"[turned(a)] + "NT"[turned(b)]
        (m, k), n = a.shape, b.shape[1]
        operands = stored(a), stored(b), c, aux
        launches = (
            self._wgmma(layout, m, n, k, operands, epilogue, second, sums) if self.hopper
            else self._mma(layout, m, n, k, operands, epilogue)
        )  # fmt: skip
        self.recording.add(name, launches, 2 * m * n * k)

    def _wgmma(self, layout, m, n, k, operands, epilogue, second, sums) -> list[Launch]:
        out = "float32" if operands[2].dtype == np.float32 else "bf16"
        adds = "no" if sums is None else "add"
        form = gemm.choose(layout, m, n, k, epilogue, out, second is not None, adds)
        space = None
        if (form.pieces, form.sums) != ("no", "no"):
            who = gemm.plan(form, m, n, k, self.multiprocessors)
            space = self._space(gemm.space_for(form, m, n, who))
        return gemm.product(
            form, *operands, second=second, sums=sums, place=self.recording.constant,
            space=space, blocks=self.multiprocessors,
        )  # fmt: skip

    def _mma(self, layout, m, n, k, operands, epilogue) -> list[Launch]:
        out = "float32" if operands[2].dtype == np.float32 else "bf16"
        form = choose_mma(layout, m, n, k, epilogue, out, self.capability)
        blocks = self.multiprocessors * form.resident
        need = mma_space(form, m, n, k, blocks)
        space = self._space(need) if need else None
        return mma_product(form, *operands, space=space, blocks=blocks)

    def _space(self, size: int) -> Array:
        return self.recording.whole(SPACE, (size,), np.uint8)
