# Made from book/07g-float32-in-pieces.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-pieces-fill
"""Small kernels over whole arrays: zero segments, add a row to all rows, give rows another pitch.

Each reads and writes its bytes once. Left out: columns that are no multiple of 8, but where a
pitch is changed, which is for them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.gemm_plan import cover
from nanoeuler.engines.gpu.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.kernel import Kernel, Launch
from nanoeuler.engines.gpu.ptx import (
    divide,
    float_of,
    load_if_below,
    load_int4,
    load_own_float,
    store_float,
    store_float4,
)
from nanoeuler.engines.gpu.update import LANE, THREADS, Segment, tiles
from nanoeuler.engines.gpu.vectors import (
    SIZES,
    STEP,
    expect,
    kind_of,
    make_load,
    make_store,
    piece,
)
from nanoeuler.errors import UserError

ROUNDS = 4  # stores of a thread that clears: nothing is waited for, so blocks may be few



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
    expect("the buffer", flat, tuple(flat.shape), "float32")
    expect("the table", table, (table.shape[0], 4), "int32")
    return Launch(CLEAR, (table.shape[0],), (table, flat))


@functools.cache
def add_row_kernel(kind: str) -> Kernel:
    """y += row, of `pieces` pieces in all and `across` a row; thread i of the grid has piece i."""
    width, size = piece(kind), SIZES[kind]
    load, load_row = make_load(kind, width, own=True), make_load("float32", width)
    store = make_store(kind, width)

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
    (rows, columns), kind = y.shape, kind_of(y)
    if columns % STEP:
        raise UserError(f"columns that a row is added to come in eights, not {columns}")
    expect("y", y, (rows, columns), kind)
    expect("the row", row, (columns,), "float32")
    across = columns // piece(kind)
    pieces = counted(rows * across)
    return Launch(add_row_kernel(kind), (cover(pieces, THREADS),), (y, row, pieces, across))


def counted(threads: int) -> int:
    """A number of threads; UserError where an int32 does not hold it, or there are none."""
    if not 0 < threads < 1 << 31:
        raise UserError(f"a launch of {threads} threads is none or too many")
    return threads


@functools.cache
def widen_kernel(kind: str) -> Kernel:
    """Lines of V float32 to lines of P numbers of this kind, 0 behind the V-th.

    pieces: of 16 bytes of out, in all; across: of a line. Thread i of the grid has piece i.
    """
    width, size, store = piece(kind), SIZES[kind], make_store(kind, piece(kind))

    def widen(x, out, pieces, across, V, P):
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        values = cuda.local.array(width, float32)
        if i < pieces:
            line = divide(i, across)
            column = int32(i - line * across) * width
            at = x + (int64(line) * V + column) * 4
            for k in range(width):
                values[k] = float_of(load_if_below(at + 4 * k, int32(column + k), V))
            store(values, 0, out + (int64(line) * P + column) * size)

    return Kernel(widen, "l l r r r r", THREADS, target=(8, 0))


@functools.cache
def narrow_kernel(add: bool) -> Kernel:
    """The way back, float32: lines of V are, or get added, the first V of lines of P."""
    load, width = make_load("float32", 4), 4

    def narrow(x, out, pieces, across, V, P):
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        values = cuda.local.array(width, float32)
        if i < pieces:
            line = divide(i, across)
            column = int32(i - line * across) * width
            load(values, 0, x + (int64(line) * P + column) * 4)
            for k in range(width):
                at = out + (int64(line) * V + column + k) * 4
                if column + k < V:
                    if add:
                        values[k] += load_own_float(at)
                    store_float(at, values[k])

    return Kernel(narrow, "l l r r r r", THREADS, target=(8, 0))


def heads_of(narrow: Any, wide: Any, columns: int) -> tuple[int, int]:
    """Lines in all, and the pitch P; UserError where (rows, K V) and (rows, K P) do not fit."""
    rows, width = narrow.shape
    heads = width // columns if columns > 0 and width % columns == 0 else 0
    pitch = wide.shape[1] // max(heads, 1)
    if tuple(wide.shape) != (rows, heads * pitch) or pitch < columns or pitch % STEP:
        came = f"{tuple(narrow.shape)} and {tuple(wide.shape)}"
        raise UserError(f"heads of {columns} columns and of a pitch in eights are not in {came}")
    return rows * heads, pitch


def widen_launch(x: Any, out: Any, columns: int) -> Launch:
    """out (rows, K P), bf16 or float32, from x (rows, K * columns) float32, zeros in the padding.

    columns: V, of each of K heads, any number; P at least V, a multiple of 8.
    """
    (lines, pitch), kind = heads_of(x, out, columns), kind_of(out)
    expect("x", x, tuple(x.shape), "float32")
    expect("the wide rows", out, tuple(out.shape), kind)
    across = pitch // piece(kind)
    pieces = counted(lines * across)
    args = x, out, pieces, across, columns, pitch
    return Launch(widen_kernel(kind), (cover(pieces, THREADS),), args)


def narrow_launch(x: Any, out: Any, columns: int, add: bool = False) -> Launch:
    """out (rows, K * columns) float32 is, or gets added, x (rows, K P) without its padding."""
    lines, pitch = heads_of(out, x, columns)
    expect("x", x, tuple(x.shape), "float32")
    expect("the narrow rows", out, tuple(out.shape), "float32")
    pieces = counted(lines * (pitch // 4))
    args = x, out, pieces, pitch // 4, columns, pitch
    return Launch(narrow_kernel(add), (cover(pieces, THREADS),), args)
