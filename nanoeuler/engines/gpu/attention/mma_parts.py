# Made from book/l-attention-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-mma-parts
"""Parts that the mma.sync kernels of attention share: tiles in shared memory, copies, fragments.

A tile is rows x D in bf16, D = 32, 64 or 128, its 16-byte chunks swapped within a row (`swizzle`).
Addresses in shared memory, rows and counts are int32, addresses in global memory int64. Left out:
the kernels themselves, in mma_forward.py and mma_backward.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention import layout
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, int8, int32, int64
from nanoeuler.engines.gpu.tile.layout import chunk_at, lane_column, lane_row, squares_down

EVERY_CARD = 8, 0  # the compute capability that has all these instructions


def own_thread() -> int:
    """This thread's number in its block.

    What hangs on it is computed anew wherever it is needed: a few instructions, where kept
    registers would push out sums (`again` forbids the compiler to keep them).
    """
    return ptx.again(int32(cuda.threadIdx.x))


def own_lane() -> int:
    """This thread's number in its warp."""
    return int32(own_thread() & 31)


def own_warp() -> int:
    """This thread's warp. `uniform` tells the compiler that a warp agrees on its number."""
    return ptx.uniform(int32(int32(cuda.threadIdx.x) >> 5))


def own_row() -> int:
    """The first of a lane's two rows of 16; the other is 8 below."""
    return lane_row(own_lane())


def own_column() -> int:
    """The first of a lane's columns: this one and the next, then every 8."""
    return lane_column(own_lane())


class Strided(NamedTuple):
    """An array in memory: its address, and bytes from sequence to sequence, head to head, row to
    row.
    """

    start: int
    batch: int
    head: int
    row: int


def head_of(array: Strided, batch: int, head: int) -> layout.Head:
    """The head `head` of sequence `batch`."""
    return layout.Head(int64(array.start + batch * array.batch + head * array.head), array.row)


class QueryBlock(NamedTuple):
    """Queries that a block owns, from row `first` of a head on. head and kv, its key head, count
    within the sequence `batch`, `number` through the whole batch.
    """

    number: int
    batch: int
    head: int
    kv: int
    first: int


def query_block(sizes: layout.Sizes, rows: int) -> QueryBlock:
    """This block's queries: the last tile first, because it has the most keys to see."""
    number = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
    batch = ptx.divide(number, sizes.heads)
    head = int32(number - batch * sizes.heads)
    first = int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * rows)
    return QueryBlock(number, batch, head, ptx.divide(head, sizes.sharing), first)


def shared_base() -> int:
    """The address of dynamic shared memory: behind the KiB that the system keeps for itself."""
    return ptx.shared_address(cuda.shared.array(0, int8))


class Share(NamedTuple):
    """A thread's share of a copy of rows: 16 bytes of every so many rows, from `row` on.

    to: the bytes from a tile's start to the first of them.
    """

    row: int
    chunk: int
    to: int


def share(D: int) -> Share:
    """This thread's share, of a copy of rows of D columns."""
    thread, chunks = own_thread(), D // 8  # chunks: a power of two
    row, chunk = int32(thread // chunks), int32(thread & (chunks - 1))
    return Share(row, chunk, chunk_at(row, chunk, D))


def make_copy(D: int, rows: int, threads: int) -> Callable:
    """copy(tile, head, first, limit, of, whole): start copying `rows` rows of a head to a tile."""
    apart = threads // (D // 8)

    def copy(tile: int, head: layout.Head, first: int, limit: int, of: Share, whole: bool) -> None:
        """Rows `first` on; zeros from row `limit` on. All threads of the block call it.

        whole: all rows are there, which spares the comparison.
        """
        source = int64(head.start + int64(first + of.row) * head.step + 16 * of.chunk)
        for i in range(rows // apart):
            to = int32(tile + of.to + i * apart * 2 * D)
            if whole:
                ptx.copy_async(to, source)
            else:
                size = int32(16) if first + of.row + i * apart < limit else int32(0)
                ptx.copy_async_part(to, source, size)
            source += apart * head.step

    return copy


def left(D: int) -> int:
    """Bytes from a tile's start to the row of 8 that this lane tells `ldmatrix`, for A of a tile's
    first 16 rows and columns, or for B of a product with its columns. 16 rows are 32 D bytes.
    """
    row, chunk = squares_down(own_lane())
    return chunk_at(row, chunk, D)


def right(D: int) -> int:
    """The same for B of a product with a tile's rows."""
    lane = own_lane()
    return chunk_at(int32((lane & 7) + (lane >> 4 << 3)), int32(lane >> 3 & 1), D)


def beside(address: int, i: int) -> int:
    """The same row 16 i columns further: chunks are swapped, so that is an exclusive or."""
    return int32(address ^ i << 5)


def load_left(a: Any, i: int, address: int) -> None:
    """A of 16 x 16 into a[i .. i + 3]."""
    a[i], a[i + 1], a[i + 2], a[i + 3] = ptx.ldmatrix4(address)


def load_rows(b: Any, address: int, rows: int, D: int) -> None:
    """B of a product with rows of a tile, for 16 columns; address: of the first rows (`right`)."""
    for n in range(rows // 16):
        j, here = 4 * n, int32(address + n * 32 * D)
        b[j], b[j + 1], b[j + 2], b[j + 3] = ptx.ldmatrix4(here)


def forbid_later(s: Any, keys: int, distance: int) -> None:
    """Forbid the keys of a 16 x keys tile of scores that come after their query.

    distance: from this lane's first key to the last one that its upper query sees.
    """
    layout.forbid_right(s, keys, distance, int32(distance + 8))


class Limits(NamedTuple):
    """The limits of the rows of one sequence of a batch."""

    limit: layout.Limit
    batch: int


def steps_from(end: int, first: int, limits: Limits, keys: int) -> int:
    """Steps of queries from `first` on: of `end` tiles of keys up to the diagonal, those down to
    the earliest key that is seen.
    """
    if limits.limit.on:
        return int32(end - layout.limit_of(limits.limit, limits.batch, first) // keys)
    return end


def own_limits(limits: Limits, row: int, first: int) -> tuple[int, int]:
    """Those of this lane's two rows, of 16 from `row` on, counted from its own first column of a
    tile, `first` on.
    """
    here, column = int32(row + own_row()), int32(first + own_column())
    above = layout.limit_of(limits.limit, limits.batch, here)
    below = layout.limit_of(limits.limit, limits.batch, int32(here + 8))
    return int32(above - column), int32(below - column)


def forbid_others(s: Any, keys: int, first: int, row: int, limits: Limits) -> None:
    """Forbid keys, from `first` on, of documents before their query's; 16 queries, `row` on.

    The last of them has the strictest limit: a tile that it does not touch needs no mask.
    """
    if limits.limit.on and first < layout.limit_of(limits.limit, limits.batch, int32(row + 15)):
        above, below = own_limits(limits, row, first)
        layout.forbid_left(s, keys, above, below)


def forbid_foreign(s: Any, queries: int, first: int, row: int, limits: Limits) -> None:
    """The same on a transposed tile: queries of documents after their key's; the first of 16 keys
    has the strictest limit.
    """
    if limits.limit.on and first + queries - 1 > layout.limit_of(limits.limit, limits.batch, row):
        above, below = own_limits(limits, row, first)
        layout.forbid_right(s, queries, above, below)


def stage_rows(acc: Any, above: float, below: float, tile: int, D: int) -> None:
    """16 rows of sums times `above` and `below`, as bf16, to rows of a tile that are this warp's.
    """
    row, pair = own_row(), int32(2 * own_column())
    for n in range(D // 8):
        j = 4 * n
        to = int32(tile + chunk_at(row, n, D) + pair)
        ptx.store_shared_int(to, ptx.pack_bf16(acc[j] * above, acc[j + 1] * above))
        ptx.store_shared_int(
            int32(to + 16 * D), ptx.pack_bf16(acc[j + 2] * below, acc[j + 3] * below)
        )


def put_rows(tile: int, head: layout.Head, first: int, T: int, D: int) -> None:
    """A warp's 16 rows from its tile to memory, rows `first` on, 16 bytes a lane; none past T."""
    cuda.syncwarp()  # lanes read what others have stored
    chunks, apart = D // 8, 256 // D
    lane = own_lane()
    row, chunk = int32(lane // chunks), int32(lane & (chunks - 1))
    for i in range(16 // apart):
        here = int32(row + i * apart)
        if first + here < T:
            x0, x1, x2, x3 = ptx.load_shared_int4(int32(tile + chunk_at(here, chunk, D)))
            to = int64(head.start + int64(first + here) * head.step + 16 * chunk)
            ptx.store_int4(to, x0, x1, x2, x3)
