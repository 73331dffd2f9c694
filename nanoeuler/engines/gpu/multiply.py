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
from nanoeuler.engines.gpu.pieces import pieces_product, split_shapes
from nanoeuler.engines.gpu.products import HOPPER
from nanoeuler.engines.gpu.program import Array, Recording

SPACE = "space"  # the memory in which pieces of products wait; zero before the first step


def turned(a: Array) -> bool:
    """Whether a matrix is the transpose of one in C order."""
    return a.strides[0] == a.dtype.itemsize and a.strides[1] != a.dtype.itemsize


def stored(a: Array) -> Array:
    """The matrix with dense rows that `a` is, or is the transpose of."""
    return a.T if turned(a) else a


class TensorCores:
    """Products of bf16 as launches. hopper: whether the kernels for wgmma are used."""

    def __init__(self, recording: Recording, capability: tuple, multiprocessors: int):
        self.recording, self.capability = recording, tuple(capability)
        self.multiprocessors, self.hopper = multiprocessors, self.capability == HOPPER

    def bf16(self, layout, a, b, c, aux, epilogue, second, sums) -> list[Launch]:
        """The launches of a product of bf16, by the kernels for this card."""
        m, n = c.shape
        k = a.shape[1] if layout[0] == "N" else a.shape[0]
        out = "float32" if c.dtype == np.float32 else "bf16"
        if self.hopper:
            adds = "no" if sums is None else "add"
            form = gemm.choose(layout, m, n, k, epilogue, out, second is not None, adds)
            who = gemm.plan(form, m, n, k, self.multiprocessors)
            parted = (form.pieces, form.sums) != ("no", "no")
            return gemm.product(
                form, a, b, c, aux, second=second, sums=sums, place=self.recording.constant,
                space=self._space(gemm.space_for(form, m, n, who)) if parted else None,
                blocks=self.multiprocessors,
            )  # fmt: skip
        form = choose_mma(layout, m, n, k, epilogue, out, self.capability)
        blocks = self.multiprocessors * form.resident
        need = mma_space(form, m, n, k, blocks)
        space = self._space(need) if need else None
        return mma_product(form, a, b, c, aux, space=space, blocks=blocks)

    def _space(self, size: int) -> Array:
        return self.recording.whole(SPACE, (size,), np.uint8)


class Multiplier(TensorCores):
    """What records products, of bf16, or of float32 in so many pieces.

    fused: whether a product can end in GELU's backward, in a second array, in column sums.
    """

    def __init__(
        self, recording: Recording, capability: tuple, multiprocessors: int, pieces: int
    ) -> None:
        super().__init__(recording, capability, multiprocessors)
        self.pieces, self.fused = pieces, self.hopper and pieces == 1

    def __call__(
        self, name: str, a: Array, b: Array, c: Array, *, epilogue: str = "store",
        aux: Any = None, second: Any = None, sums: Any = None,
    ) -> None:  # fmt: skip
        """Record C = A B with an epilogue: a (m, k), b (k, n), c (m, n), or its transpose."""
        if turned(c):
            a, b, c = b.T, a.T, c.T
        layout = "NT"[turned(a)] + "NT"[turned(b)]
        (m, k), n, arrays = a.shape, b.shape[1], (stored(a), stored(b), c)
        if self.pieces == 1:
            launches = self.bf16(layout, *arrays, aux, epilogue, second, sums)
        else:
            launches = self.float32(layout, m, n, k, *arrays, epilogue)
        self.recording.add(name, launches, 2 * m * n * k)

    def float32(self, layout, m, n, k, a, b, c, epilogue) -> list[Launch]:
        """Cut both operands, then multiply all pairs of pieces that matter (chapter 7g)."""
        shapes = split_shapes(layout, m, n, k, self.pieces, blocks=self.multiprocessors)
        cut = [self.recording.take(shape, np.uint16) for shape in shapes]

        def product(capability, layout, a, b, c, *, epilogue, **_):
            return self.bf16(layout, a, b, c, None, epilogue, None, None)

        return pieces_product(
            self.capability, layout, a, b, c, *cut, pieces=self.pieces, epilogue=epilogue,
            blocks=self.multiprocessors, product=product,
        )  # fmt: skip
