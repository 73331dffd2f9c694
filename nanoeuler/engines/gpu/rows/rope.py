# Made from book/j-row-kernels.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-rows-rotary
"""RoPE on the queries and keys inside the products' output, in place, forward and backward.

heads (rows, N * D), "bf16" or "float32": N heads of width D a row, of which the first n are turned.
Row i is position start + i % T of its sequence. cos, sin (context, D / 2) float32. D is a multiple
of 16 for bf16, of 8 for float32. Equation eq-layers-rope.
"""

import functools
from typing import Any

from nanoeuler.engines.gpu.lang import vectors
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, cover
from nanoeuler.engines.gpu.lang.ptx import divide
from nanoeuler.errors import UserError

ROWS = 4  # of a block, a warp each


@functools.cache
def rope_kernel(kind: str, n: int, N: int, D: int) -> Kernel:
    """Turns the first n of N heads by sign times each position's angles; see `rope_launch`.

    Lane l of a row's warp has pieces l, l + 32, ... of the n * D / 2 pairs (i, i + D / 2).
    """
    width, size, half = vectors.piece(kind), vectors.SIZES[kind], D // 2
    pieces = half // width  # of a head
    load, store = vectors.make_load(kind, width, own=True), vectors.make_store(kind, width)
    load_turn = vectors.make_load("float32", width)

    def turn(a, b, cos, sin, sign):
        for k in range(width):
            left, right, sine = a[k], b[k], sign * sin[k]
            a[k] = left * cos[k] - right * sine
            b[k] = left * sine + right * cos[k]

    def rope(heads, cos_table, sin_table, sign, rows, T, start):
        row = int32(cuda.blockIdx.x * ROWS + cuda.threadIdx.x // vectors.LANES)
        a, b = cuda.local.array(width, float32), cuda.local.array(width, float32)
        cos, sin = cuda.local.array(width, float32), cuda.local.array(width, float32)
        if row < rows:
            position = int32(start + row - T * divide(row, T))
            for i in range(int32(cuda.threadIdx.x % vectors.LANES), n * pieces, vectors.LANES):
                head = divide(i, pieces)
                column = int32(i - head * pieces) * width
                at = vectors.place(heads, row, N * D, size) + int64(head * D + column) * size
                load(a, 0, at)
                load(b, 0, at + half * size)
                angle = vectors.place(0, position, half, 4) + int64(column) * 4
                load_turn(cos, 0, cos_table + angle)
                load_turn(sin, 0, sin_table + angle)
                turn(a, b, cos, sin, sign)
                store(a, 0, at)
                store(b, 0, at + half * size)

    return Kernel(rope, "l l l f r r r", vectors.LANES * ROWS, target=(8, 0))


def rope_launch(
    heads: Any, cos: Any, sin: Any, n: int, T: int, *, start: int = 0, back: bool = False
) -> Launch:
    """Turn the first n heads of each row, in place; back: by the opposite angles, the gradient.

    heads (rows, N * D), rows a multiple of T: positions start to start + T - 1 of each sequence.
    """
    (rows, width), (context, half) = heads.shape, cos.shape
    kind, D = vectors.kind_of(heads), 2 * half
    if D % (2 * vectors.piece(kind)) or D < 1 or width % D or not 0 <= n <= width // D:
        raise UserError(
            f"{n} heads of width {D}, {2 * vectors.piece(kind)} at a time, are not in {width}"
        )
    if T < 1 or rows % T or start < 0 or start + T > context:
        raise UserError(f"{rows} rows are no sequences of {T} positions from {start} to {context}")
    vectors.expect("heads", heads, (rows, width), kind)
    for name, table in (("cos", cos), ("sin", sin)):
        vectors.expect(name, table, (context, half), "float32")
    args = heads, cos, sin, -1.0 if back else 1.0, rows, T, start
    return Launch(rope_kernel(kind, n, width // D, D), (cover(rows, ROWS),), args)
