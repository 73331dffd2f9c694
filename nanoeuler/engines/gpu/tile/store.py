# Made from book/11a-a-ladder-on-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-wgmma-tma
"""Sums of a warpgroup on their way out: as bf16 into a box that the copy engine takes."""

from nanoeuler.engines.gpu.lang.hopper import stmatrix4
from nanoeuler.engines.gpu.lang.instruction import float32, int32
from nanoeuler.engines.gpu.lang.ptx import pack_bf16
from nanoeuler.engines.gpu.tile.layout import squares_at


def put_scaled(acc, i, box, t, above, below):
    """Sums i to i + 31 of thread t of a warpgroup, 64 rows by 64 columns, to a box of bf16.

    The box is swizzled. above, below: factors of the thread's upper and lower row, for attention.
    """
    for j in range(4):
        k = i + 8 * j
        stmatrix4(
            int32(box + squares_at(t, j)),
            pack_bf16(acc[k] * above, acc[k + 1] * above),
            pack_bf16(acc[k + 2] * below, acc[k + 3] * below),
            pack_bf16(acc[k + 4] * above, acc[k + 5] * above),
            pack_bf16(acc[k + 6] * below, acc[k + 7] * below),
        )


def put_bf16(acc, i, box, t):
    """The same, but unscaled."""
    put_scaled(acc, i, box, t, float32(1), float32(1))
