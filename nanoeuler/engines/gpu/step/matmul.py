# Made from book/13a-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-products
"""Matrix products as a recording wants them: C = A B of any two views, whatever the card and kind.

A matrix is (rows, columns) with dense rows, or the transpose of such. What the card multiplies is
bf16, or float32 in pieces. Left out: two transposed operands, which no gradient needs.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.gemm import mma_form
from nanoeuler.engines.gpu.gemm.choice import HOPPER, product_on, space_on
from nanoeuler.engines.gpu.gemm.epilogue import EPILOGUES
from nanoeuler.engines.gpu.gemm.float32 import eights, pieces_product, split_shapes
from nanoeuler.engines.gpu.gemm.mma_floats import choose_floats, floats_product, in_registers
from nanoeuler.engines.gpu.lang.kernel import Launch
from nanoeuler.engines.gpu.step.program import Array, Recording, Work

# Workspace of split products. Blocks that wait for each other count in its first word how many have
# come, so that is zero before the first step.
SPACE = "space"


class Epilogue(NamedTuple):
    """What a product ends in, a name of `epilogue.EPILOGUES`, and what that needs.

    aux: an array that it reads; second: one that it writes beside C; sums: where column sums are
    added; rope: the tables, for an epilogue that ends in RoPE.
    """

    name: str = "store"
    aux: Any = None
    second: Any = None
    sums: Any = None
    rope: Any = None


STORE = Epilogue()  # what most products end in: C is stored, and nothing else


def is_transposed(a: Array) -> bool:
    """Whether a matrix is the transpose of one in C order."""
    return a.strides[0] == a.dtype.itemsize and a.strides[1] != a.dtype.itemsize


def untransposed(a: Array) -> Array:
    """The matrix with dense rows that `a` is, or is the transpose of."""
    return a.T if is_transposed(a) else a


class Multiplier:
    """Records products. Partial sums wait in one workspace, which all products share.

    words: which GEMM backend this is, for a line of a run's plan. fused: whether a product can end
    in an activation function or its backward, in a second array, in column sums. turned: the widths
    of heads with which it can end in RoPE.
    """

    words = "our kernels multiply"

    def __init__(
        self, recording: Recording, capability: tuple, multiprocessors: int, pieces: int
    ) -> None:
        self.recording, self.capability = recording, tuple(capability)
        self.multiprocessors, self.pieces = multiprocessors, pieces
        self.fused = pieces == 1
        names = EPILOGUES if self.capability == HOPPER else mma_form.EPILOGUES
        self.turned = {EPILOGUES[name].turn for name in names if self.fused} - {0}

    def bf16(self, layout: str, a: Array, b: Array, c: Array, end: Epilogue) -> list[Launch]:
        """The launches of `product_on`; sums are added to."""
        (m, n), k = c.shape, a.shape[layout[0] == "N"]
        out = "float32" if c.dtype == np.float32 else "bf16"
        need = space_on(
            self.capability, layout, m, n, k, epilogue=end.name, out=out,
            second=end.second is not None, summed=end.sums is not None,
            blocks=self.multiprocessors,
        )  # fmt: skip
        return product_on(
            self.capability, layout, a, b, c, end.aux, epilogue=end.name, second=end.second,
            sums=end.sums, turn=end.rope, add_sums=True, blocks=self.multiprocessors,
            place=self.recording.constant,
            space=self.recording.whole(SPACE, (need,), np.uint8) if need else None,
        )  # fmt: skip

    def float32(self, layout: str, a: Array, b: Array, c: Array, epilogue: str) -> list[Launch]:
        """Split both operands, then multiply all pairs of pieces that matter (appendix K).

        With two pieces, and without wgmma, a product does both.
        """
        (m, n), k = c.shape, a.shape[layout[0] == "N"]
        if in_registers(self.capability, self.pieces):
            return floats_product(
                choose_floats(layout, epilogue, self.capability), a, b, c,
                place=lambda need: self.recording.whole(SPACE, (need,), np.uint8),
                blocks=self.multiprocessors,
            )  # fmt: skip
        if layout[0] == "T" and m % 8:  # up to 7 columns of what follows in memory, not multiplied
            a = replace(a, shape=(k, eights(m)))
        shapes = split_shapes(layout, m, n, k, self.pieces, blocks=self.multiprocessors)
        cut = [self.recording.take(shape, np.uint16) for shape in shapes]

        def product(capability, layout, a, b, c, *, epilogue, **_):
            return self.bf16(layout, a, b, c, Epilogue(epilogue))

        return pieces_product(
            self.capability, layout, a, b, c, *cut, pieces=self.pieces, epilogue=epilogue,
            blocks=self.multiprocessors, product=product,
        )  # fmt: skip

    def __call__(self, name: str, a: Array, b: Array, c: Array, end: Epilogue = STORE) -> None:
        """Record C = A B with an epilogue: a (m, k), b (k, n), c (m, n), or its transpose."""
        if is_transposed(c):
            a, b, c = b.T, a.T, c.T
        layout = "NT"[is_transposed(a)] + "NT"[is_transposed(b)]
        work = self.work(layout, untransposed(a), untransposed(b), c, end)
        self.recording.add(name, work, 2 * a.shape[0] * a.shape[1] * b.shape[1])

    def work(self, layout: str, a: Array, b: Array, c: Array, end: Epilogue) -> list[Work]:
        """What multiplies matrices with dense rows."""
        if self.pieces == 1:
            return self.bf16(layout, a, b, c, end)
        return self.float32(layout, a, b, c, end.name)
