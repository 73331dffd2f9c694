# Made from book/k-float32-products.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-pieces-fill
"""Small kernels over whole arrays: zero segments, add a row to all rows.

Each reads and writes its bytes once. Left out: columns that are no multiple of 8.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.lang import vectors
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, cover
from nanoeuler.engines.gpu.lang.ptx import divide, load_int4, store_float4
from nanoeuler.engines.gpu.rows.adamw import LANE, THREADS, Segment, tiles
from nanoeuler.errors import UserError

ROUNDS = 4  # stores of a thread that clears: none waits for another, so few blocks will do


def clear(table, flat):
    """Block b zeroes tile b: first, count of its four int32. Bytes of an element: 4 written."""
    t = int32(cuda.threadIdx.x)
    first, count, to, decays = load_int4(table + 16 * int64(cuda.blockIdx.x))
    nothing = float32(0)
    for i in range(ROUNDS):
        at = int32((i * THREADS + t) * LANE)
        if at < count:
            store_float4(flat + 4 * int64(first + at), nothing, nothing, nothing, nothing)


# A block for each tile.
CLEAR = Kernel(clear, "l l", THREADS, target=(8, 0))


def clear_table(spans: Sequence[tuple[int, int]], length: int) -> np.ndarray:
    """The tiles of spans (start, count) of a buffer of so many elements, int32 (blocks, 4).

    Starts and counts are multiples of 4, as tensors lie in a model's flat buffer.
    """
    for start, count in spans:
        if start < 0 or count < 1 or start + count > length:
            raise UserError(f"{count} elements from {start} on are not in a buffer of {length}")
    return tiles([Segment(start, count, False) for start, count in spans], ROUNDS)


def clear_launch(table: Any, flat: Any) -> Launch:
    """Zero the spans of flat (N,) float32 that a `clear_table` in device memory names."""
    vectors.expect("the buffer", flat, tuple(flat.shape), "float32")
    vectors.expect("the table", table, (table.shape[0], 4), "int32")
    return Launch(CLEAR, (table.shape[0],), (table, flat))


@functools.cache
def add_row_kernel(kind: str) -> Kernel:
    """y += row, of `pieces` pieces in all and `across` a row; thread i of the grid has piece i."""
    width, size = vectors.piece(kind), vectors.SIZES[kind]
    load, load_row = vectors.make_load(kind, width, own=True), vectors.make_load("float32", width)
    store = vectors.make_store(kind, width)

    def add_row(y, row, pieces, across):
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        values, others = cuda.local.array(width, float32), cuda.local.array(width, float32)
        if i < pieces:
            column = int32(i - across * divide(i, across)) * width
            at = y + int64(i) * (width * size)
            load(values, 0, at)
            load_row(others, 0, row + int64(column) * 4)
            for k in range(width):
                values[k] += others[k]
            store(values, 0, at)

    return Kernel(add_row, "l l r r", THREADS, target=(8, 0))


def add_row_launch(y: Any, row: Any) -> Launch:
    """y (rows, columns), bf16 or float32, plus row (columns,) float32, in place; columns in eights.

    Bytes of an element: read and written once; the row comes from the caches.
    """
    (rows, columns), kind = y.shape, vectors.kind_of(y)
    if columns % vectors.STEP:
        raise UserError(f"columns that a row is added to come in eights, not {columns}")
    vectors.expect("y", y, (rows, columns), kind)
    vectors.expect("the row", row, (columns,), "float32")
    across = columns // vectors.piece(kind)
    pieces = counted(rows * across)
    return Launch(add_row_kernel(kind), (cover(pieces, THREADS),), (y, row, pieces, across))


def counted(threads: int) -> int:
    """A number of threads; UserError where an int32 does not hold it, or there are none."""
    if not 0 < threads < 1 << 31:
        raise UserError(f"a launch of {threads} threads is none or too many")
    return threads
