# Made from book/12a-flash-on-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-tensor-parts
"""What the tensor-core attention kernels have in common: places, tiles, rings, masks, epilogue.

A tile is a row of panels of 64 columns: 128 bytes a row, swizzled by the copy engine. Descriptors
and global addresses are int64, all else int32. T positions, D head width. Left out: the kernels.
"""

from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention import layout
from nanoeuler.engines.gpu.lang import hopper, ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int8, int32, int64
from nanoeuler.engines.gpu.tile.layout import PANEL, lane_column, lane_row
from nanoeuler.engines.gpu.tile.ring import aligned
from nanoeuler.engines.gpu.tile.store import put_scaled

BOX = 64 * 128     # bytes of a panel of 64 rows
STRIDE = 1024      # bytes from 8 rows of a panel to the next 8: the swizzle repeats after them


class Place(NamedTuple):
    """A thread's index in its block, its lane, its warp and its warpgroup."""

    thread: int
    lane: int
    warp: int   # of its warpgroup, 0 to 3
    group: int  # of the block


def place() -> Place:
    """This thread's place. `uniform` tells the compiler that a whole warp has the same `group`."""
    t = int32(cuda.threadIdx.x)
    return Place(t, int32(t & 31), int32(t >> 5 & 3), ptx.uniform(int32(t >> 7)))


def own_row(at: Place) -> int:
    """The first of a thread's two rows in an accumulator of 64 rows; the other is 8 below."""
    return int32(at.warp * 16 + lane_row(at.lane))


def own_column(at: Place) -> int:
    """The first of a thread's columns in an accumulator: this one and the next, then every 8."""
    return lane_column(at.lane)


def shared_base() -> int:
    """The address of dynamic shared memory, rounded up to what the swizzle repeats after."""
    return aligned(ptx.shared_address(cuda.shared.array(0, int8)))


class Heads(NamedTuple):
    """Where a tile is copied from or to: a map of [batch, heads, T, D], and one head in it."""

    map: int
    batch: int
    head: int


def fetch(heads: Heads, row: int, to: int, rows: int, D: int, full: int) -> None:
    """One thread: start copying rows x D, from `row` on, to a tile; `full` gets the bytes."""
    for c in range(D // PANEL):
        panel = int32(to + c * rows * 128)
        hopper.load_tile(panel, heads.map, int32(c * PANEL), row, heads.head, heads.batch, full)


def put(heads: Heads, row: int, tile: int, D: int) -> None:
    """One thread: start copying a tile of 64 x D to `row` on; rows past T are left out."""
    for c in range(D // PANEL):
        panel = int32(tile + c * BOX)
        hopper.store_tile(heads.map, int32(c * PANEL), row, heads.head, heads.batch, panel)


def prefetch_maps(first: int, second: int, third: int, fourth: int) -> None:
    """Prefetch the tensor maps, before the first copies need them."""
    if cuda.threadIdx.x == 0:
        hopper.prefetch_map(first)
        hopper.prefetch_map(second)
        hopper.prefetch_map(third)
        hopper.prefetch_map(fourth)


def put_done() -> None:
    """One thread: wait until its copies have read shared memory, before the block may end."""
    hopper.bulk_commit()
    hopper.bulk_wait_read_all()


# Descriptors without an address, which `by_rows` and `by_columns` add.
BY_ROWS, BY_COLUMNS = hopper.descriptor(16, STRIDE), hopper.descriptor(0, STRIDE)


def by_rows(tile: int) -> int:
    """The descriptor of a tile that a product sums over columns, as k in q k^T."""
    return int64(BY_ROWS) | int64((tile & 0x3FFFF) >> 4)


def by_columns(tile: int, rows: int) -> int:
    """The descriptor of a tile that a product sums over its `rows` rows, as v in p v."""
    return int64(BY_COLUMNS | rows * 128 >> 4 << 16) | int64((tile & 0x3FFFF) >> 4)


class Ring(NamedTuple):
    """Stages in shared memory that are filled and left in turn, as addresses.

    Stage i: tile at tiles + i size, mbarrier at full + 8 i, warps that left it at left + 8 i.
    """

    tiles: int
    size: int
    full: int
    left: int


def start_ring(ring: Ring, stages: int) -> None:
    """One thread: each mbarrier waits for one arrival, the fetching thread's; no warp has left."""
    for i in range(stages):
        hopper.mbarrier_init(int32(ring.full + 8 * i), int32(1))
        ptx.store_shared_int(int32(ring.left + 8 * i), int32(0))


def tile_of(ring: Ring, stage: int) -> int:
    """The address of a stage's tile."""
    return int32(ring.tiles + stage * ring.size)


def full_of(ring: Ring, stage: int) -> int:
    """The address of a stage's mbarrier, which says that the tile is there."""
    return int32(ring.full + 8 * stage)


def leave(ring: Ring, stage: int, warps: int) -> int:
    """Leave a stage: how many of `warps` left it before this one, on lane 0; -1 on other lanes.

    To be called after the wait for the last product that reads the stage: a product that was only
    issued may not have read it yet. Lane 0 of the last warp gets warps - 1, and has to refill the
    stage. The answer takes a while, so look at it as late as possible.
    """
    return ptx.ticket(int32(ring.left + 8 * stage), int32(warps - 1))


MOST = 1 << 22  # what `divide` takes: above, its float32 could be off by more than one


def divide(x: int, n: int) -> int:
    """x // n of 0 <= x < MOST and n > 0: a quotient in float32, put right."""
    q = int32(float32(x) * ptx.reciprocal(float32(n)))
    rest = int32(x - q * n)
    if rest < 0:
        q = int32(q - 1)
    if rest >= n:
        q = int32(q + 1)
    return q


class Pair(NamedTuple):
    """Two arrays of which the same rows are fetched together: q and do, or k and v."""

    x: Heads
    y: Heads


class QueryBlock(NamedTuple):
    """Queries that a block owns: from row `first` of a head on. Of the `end` tiles of keys up to
    the diagonal it takes `steps`, the latest first: all, or those that documents leave.

    head and kv count within the sequence `batch`, `number` through the whole batch.
    """

    first: int
    end: int
    steps: int
    number: int
    batch: int
    head: int
    kv: int


def block_head() -> int:
    """The number of this block's head. Grid: (heads at a time, tiles, rounds)."""
    return int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)


def query_block(sizes: layout.Sizes, rows: int, keys: int) -> QueryBlock:
    """This block's queries: the last tile first, because it has the most keys to see."""
    number = block_head()
    batch = divide(number, sizes.heads)
    head = int32(number - batch * sizes.heads)
    first = int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * rows)
    end = int32((min(sizes.T, int32(first + rows)) + keys - 1) // keys)
    steps = end
    if sizes.limit.on:
        steps = int32(end - layout.limit_of(sizes.limit, batch, first) // keys)
    return QueryBlock(first, end, steps, number, batch, head, divide(head, sizes.sharing))


def key_row(block: QueryBlock, step: int, keys: int) -> int:
    """The first key of a step: from the diagonal down."""
    return int32((block.end - 1 - step) * keys)


def forbid_later(s: Any, keys: int, first: int, row: int, at: Place) -> None:
    """Forbid keys that come after their query: keys from `first` on, 64 queries from `row` on."""
    above = int32(row + own_row(at) - first - own_column(at))
    layout.forbid_right(s, keys, above, int32(above + 8))


def forbid_earlier(s: Any, queries: int, first: int, key: int, at: Place) -> None:
    """The same on a transposed tile: forbid queries, from `first` on, that precede their key."""
    above = int32(key + own_row(at) - first - own_column(at))
    layout.forbid_left(s, queries, above, int32(above + 8))


# %% sec-flash-tensor-documents
class Limits(NamedTuple):
    """The limits of 64 rows of a sequence, from `row` on, and the strictest: a tile within that
    needs no second mask.
    """

    limit: layout.Limit
    batch: int
    row: int
    strictest: int


def limits_of(limit: layout.Limit, batch: int, row: int, strictest: int) -> Limits:
    """The limits of 64 rows from `row` on. strictest: which row's limit is the strictest."""
    if limit.on:
        return Limits(limit, batch, row, layout.limit_of(limit, batch, strictest))
    return Limits(limit, int32(0), int32(0), int32(0))


class Own(NamedTuple):
    """64 rows that a warpgroup owns: its thread's place, the address of their tile, the first of
    them, and what limits them.
    """

    at: Place
    tile: int
    row: int
    limits: Limits


def own_limits(limits: Limits, first: int, at: Place) -> tuple[int, int]:
    """The limits of this thread's two rows, as numbers of columns from the thread's first column.

    first: the tile's first column. They are loaded at each use: keeping them takes registers.
    """
    row, column = int32(limits.row + own_row(at)), int32(first + own_column(at))
    above = layout.limit_of(limits.limit, limits.batch, row)
    below = layout.limit_of(limits.limit, limits.batch, int32(row + 8))
    return int32(above - column), int32(below - column)


def forbid_others(s: Any, keys: int, first: int, limits: Limits, at: Place) -> None:
    """Forbid keys before the first one that their query sees. first: the tile's first key."""
    if limits.limit.on and first < limits.strictest:
        above, below = own_limits(limits, first, at)
        layout.forbid_left(s, keys, above, below)


def forbid_foreign(s: Any, queries: int, first: int, limits: Limits, at: Place) -> None:
    """The same on a transposed tile: forbid queries after the last one that sees their key."""
    if limits.limit.on and first + queries - 1 > limits.strictest:
        above, below = own_limits(limits, first, at)
        layout.forbid_right(s, queries, above, below)


def warpgroup_sync(at: Place) -> None:
    """Wait for this warpgroup's other threads, at the named barrier 1, 2 or 3 that is its own."""
    ptx.barrier(int32(1 + at.group), int32(128))


def stage_out(acc: Any, above: float, below: float, tile: int, D: int, at: Place) -> None:
    """acc, 64 x D, its two rows times `above` and `below`, as bf16 into a swizzled tile."""
    for c in range(D // PANEL):
        put_scaled(acc, 32 * c, int32(tile + c * BOX), int32(at.thread & 127), above, below)


def hand_over(at: Place) -> None:
    """After `stage_out`: the warpgroup's plain stores become visible to the copy engine."""
    hopper.proxy_fence()
    warpgroup_sync(at)
