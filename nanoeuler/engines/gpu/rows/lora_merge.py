# Made from book/19d-lora.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-lora-gpu-merge
"""Merged weights on a GPU: the bf16 copy becomes W + s A B wherever there is an adapter.

One launch for all matrices of a model. W, A and B are float32, and nobody writes them meanwhile.
Left out: rows and columns that are no multiple of 4.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.engines.gpu.lang.vectors import expect
from nanoeuler.errors import UserError

THREADS = 256     # of a block
LANE = 4          # columns of a thread, and rows of A that it reads at once: 16 bytes of float32
WIDE = 64 * LANE  # columns of a tile: a warp reads 512 bytes of a row
ROWS = 8          # rows that a thread merges at a time, each with the same columns of B
STRIDE = THREADS * LANE // WIDE * ROWS  # rows of a block at a time
DEEP = 4 * STRIDE   # rows of a tile
HELD = ROWS * LANE  # weights of a thread at a time


class Place(NamedTuple):
    """Where an adapter is: elements of the flat buffers, and from one row to the next."""

    w: int
    w_pitch: int
    rows: int     # I, of W and A
    columns: int  # of W and B
    a: int
    a_pitch: int
    b: int
    b_pitch: int


def load_rows(values, address, pitch, rows):
    """values (HELD,): LANE float32 of each of ROWS rows, zeros behind the first `rows`."""
    for i in range(ROWS):
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        if i < rows:
            a, b, c, d = ptx.load_float4(address + 4 * int64(i * pitch))
        at = i * LANE
        values[at], values[at + 1], values[at + 2], values[at + 3] = a, b, c, d


def add_products(sums, a, b, rows):
    """sums (HELD,) += a column of A, of ROWS rows, times LANE columns of a row of B: addresses."""
    p, q, r, s = ptx.load_float4(b)
    of_a = cuda.local.array(LANE, float32)
    for i in range(0, ROWS, LANE):
        if i < rows:
            of_a[0], of_a[1], of_a[2], of_a[3] = ptx.load_float4(a + 4 * i)
            for k in range(LANE):
                at = (i + k) * LANE
                sums[at] = ptx.fma(of_a[k], p, sums[at])
                sums[at + 1] = ptx.fma(of_a[k], q, sums[at + 1])
                sums[at + 2] = ptx.fma(of_a[k], r, sums[at + 2])
                sums[at + 3] = ptx.fma(of_a[k], s, sums[at + 3])


def store_merged(base, sums, scale, address, pitch, rows):
    """bf16 of base + scale sums, of the first `rows` of ROWS rows."""
    for i in range(ROWS):
        if i < rows:
            for j in range(i * LANE, (i + 1) * LANE):
                base[j] = ptx.fma(scale, sums[j], base[j])
            low = ptx.pack_bf16(base[i * LANE], base[i * LANE + 1])
            high = ptx.pack_bf16(base[i * LANE + 2], base[i * LANE + 3])
            ptx.store_int2(address + 2 * int64(i * pitch), low, high)


def merge(tiles, weights, adapters, copies, scale, rank):
    """A block merges a tile: copies = bf16(weights + scale A B). Eq. eq-lora-merge.

    tiles int32 (blocks, 8), as `Place`; weights and adapters float32, copies bf16, all flat. Index
    table: thread -> LANE columns, t % 64 of the tile's, of ROWS rows, from (t / 64) ROWS on, STRIDE
    apart. Bytes of a weight: 4 read, 2 written; A and B come from the caches. 2 rank FLOPs.
    """
    t, tile = int32(cuda.threadIdx.x), tiles + 32 * int64(cuda.blockIdx.x)
    w, w_pitch, rows, columns = ptx.load_int4(tile)
    a, a_pitch, b, b_pitch = ptx.load_int4(tile + 16)
    column = int32((t & 63) * LANE)
    base, sums = cuda.local.array(HELD, float32), cuda.local.array(HELD, float32)
    if column < columns:
        for first in range(int32((t >> 6) * ROWS), rows, STRIDE):
            left, at = int32(rows - first), int64(w + first * w_pitch + column)
            load_rows(base, weights + 4 * at, w_pitch, left)
            for i in range(HELD):
                sums[i] = float32(0)
            for k in range(rank):
                of_a = adapters + 4 * int64(a + k * a_pitch + first)
                of_b = adapters + 4 * int64(b + k * b_pitch + column)
                add_products(sums, of_a, of_b, left)
            store_merged(base, sums, scale, copies + 2 * at, w_pitch, left)


# As many blocks as there are tiles.
MERGE = Kernel(merge, "l l l l f r", THREADS, target=(8, 0), resident=2)


def merge_tiles(
    places: Sequence[Place], rank: int, weights: int, adapters: int
) -> np.ndarray:
    """The tiles of adapters in buffers of so many elements, int32 (blocks, 8), for `merge_launch`.

    UserError where one lies outside, or not at multiples of 4 elements.
    """
    made = []
    for place in places:
        w, w_pitch, rows, columns, a, a_pitch, b, b_pitch = place
        if any(each % LANE for each in place):
            raise UserError(f"what is merged comes in multiples of {LANE} elements: {place}")
        end_a, end_b = a + (rank - 1) * a_pitch + rows, b + (rank - 1) * b_pitch + columns
        end = w + (rows - 1) * w_pitch + columns
        if min(place) < 0 or end > weights or max(end_a, end_b) > adapters:
            raise UserError(f"an adapter lies outside of {weights} weights, {adapters}: {place}")
        for row in range(0, rows, DEEP):
            for column in range(0, columns, WIDE):
                size = min(DEEP, rows - row), min(WIDE, columns - column)
                made.append((w + row * w_pitch + column, w_pitch, *size,
                             a + row, a_pitch, b + column, b_pitch))  # fmt: skip
    if max(weights, adapters) >= 1 << 31:
        raise UserError(f"a flat buffer has less than 2^31 elements, not {weights} or {adapters}")
    return np.array(made, np.int32).reshape(-1, 8)


def merge_launch(
    table: Any, weights: Any, adapters: Any, copies: Any, scale: float, rank: int
) -> Launch:
    """Merge the tiles that a table of `merge_tiles`, in device memory, names.

    weights (N,) and adapters float32, copies (N,) bf16: what has no tile stays as it is.
    """
    expect("the table", table, (table.shape[0], 8), "int32")
    expect("weights", weights, tuple(weights.shape), "float32")
    expect("adapters", adapters, tuple(adapters.shape), "float32")
    expect("copies", copies, tuple(weights.shape), "bf16")
    if rank < 1:
        raise UserError(f"a rank is 1 or more, not {rank}")
    args = table, weights, adapters, copies, float(scale), int(rank)
    return Launch(MERGE, (table.shape[0],), args)
