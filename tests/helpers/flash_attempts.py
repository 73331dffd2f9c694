"""Other ways to the forward pass of attention, for bench/card/flash_tries.py: head width 64.

Each is built of the parts of engines/gpu/flash_forward.py, and computes what its kernel does.
"""

import functools
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.flash_forward import (
    HALF,
    KEYS,
    QUERIES,
    STAGES,
    WARPS,
    Rows,
    Scores,
    Shared,
    correct,
    earlier,
    fetch_queries,
    fill,
    half_scores,
    half_scores_done,
    narrow_done,
    narrow_registers,
    raise_maxima,
    save_lse,
    save_output,
    scores,
    scores_done,
    shared_bytes,
    shared_memory,
    start_rows,
    weigh_first,
    weigh_second,
)
from nanoeuler.engines.gpu.flash_parts import (
    BOX,
    Heads,
    Place,
    QueryBlock,
    Ring,
    advance,
    block_head,
    by_rows,
    fetch,
    forbid_later,
    full_of,
    hand_over,
    key_row,
    leave,
    place,
    prefetch_maps,
    put,
    shared_base,
    stage_out,
    start_ring,
    tile_of,
    warpgroup_sync,
)
from nanoeuler.engines.gpu.hopper import (
    bulk_commit,
    bulk_wait_read_all,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
)
from nanoeuler.engines.gpu.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.kernel import Kernel
from nanoeuler.engines.gpu.ptx import exp2, larger, reciprocal, shuffle_xor, store_shared_int

# How far scaled scores may rise above the maximum that p is relative to: p stays below 2^8, as in
# FlashAttention-4; float32 and bf16 are as exact there as below 1.
LEAP = 8.0


# ---- Lazy: o is corrected when it must be


def raise_lazily(s: Any, rows: Rows, scale: float) -> None:
    """Where a score of this warp is far above its row's m, m becomes the maximum, o follows."""
    m, alpha = rows.m, rows.alpha
    a0, a1, b0, b1 = m[0], m[1], m[0], m[1]
    for i in range(0, KEYS // 2, 8):
        a0 = larger(a0, larger(s[i], s[i + 1]))
        a1 = larger(a1, larger(s[i + 2], s[i + 3]))
        b0 = larger(b0, larger(s[i + 4], s[i + 5]))
        b1 = larger(b1, larger(s[i + 6], s[i + 7]))
    a0, a1 = larger(a0, b0), larger(a1, b1)
    if cuda.any_sync(-1, larger(a0 - m[0], a1 - m[1]) * scale > float32(LEAP)):
        a0, a1 = larger(a0, shuffle_xor(a0, int32(1))), larger(a1, shuffle_xor(a1, int32(1)))
        a0, a1 = larger(a0, shuffle_xor(a0, int32(2))), larger(a1, shuffle_xor(a1, int32(2)))
        alpha[0], alpha[1] = exp2((m[0] - a0) * scale), exp2((m[1] - a1) * scale)
        m[0], m[1] = a0, a1
        rows.total[0] *= alpha[0]
        rows.total[1] *= alpha[1]
        correct(rows, 64)


# ---- Early: the first copies before anything else


def reciprocal_of(n: int) -> int:
    """What `quotient` takes instead of n: exact for numerators below 2^32 / n."""
    return -(-(1 << 32) // n)


def quotient(x: int, per: int) -> int:
    """x divided by the n of `reciprocal_of`: a product instead of a division of 64 bits."""
    return int32(int64(x) * per >> 32)


def early_block(T: int, heads: int, per_heads: int, per_sharing: int) -> QueryBlock:
    """`query_block` without a division."""
    number = block_head()
    batch = quotient(number, per_heads)
    head = int32(number - batch * heads)
    first = int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * QUERIES)
    steps = int32((min(T, int32(first + QUERIES)) + KEYS - 1) // KEYS)
    return QueryBlock(first, steps, number, batch, head, quotient(head, per_sharing))


def early_start(
    shared: Shared, block: QueryBlock, q: Heads, k: Heads, v: Heads, at: Place
) -> None:  # fmt: skip
    """Barriers; the queries and the first tiles on their way, before the others hear of them."""
    if at.thread == 0:
        mbarrier_init(shared.q_full, int32(1))
        start_ring(shared.k, STAGES)
        start_ring(shared.v, STAGES)
        mbarrier_init_fence()
        fetch_queries(q, block.first, shared, 64)
        fill(shared.k, int32(0), k, key_row(block, 0, KEYS), 64)
        fill(shared.v, int32(0), v, key_row(block, 0, KEYS), 64)
    cuda.syncthreads()  # nobody waits at a barrier that is not there yet


def other_stages(shared: Shared, block: QueryBlock, k: Heads, v: Heads, at: Place) -> None:
    """The other stages, once the first product is under way."""
    if at.thread == 0:
        for i in range(1, min(int32(STAGES), block.steps)):
            fill(shared.k, int32(i), k, key_row(block, i, KEYS), 64)
            fill(shared.v, int32(i), v, key_row(block, i, KEYS), 64)


def early_diagonal(
    tile: Scores, rows: Rows, q: int, shared: Shared, k_of: Heads, v_of: Heads, block: QueryBlock,
    row: int, scale: float, at: Place,
) -> int:  # fmt: skip
    """`flash_forward.diagonal`, with `other_stages` behind the first product."""
    s, k, v, key = tile.s, shared.k, shared.v, key_row(block, 0, KEYS)
    left = int32(0)
    if at.group == 0:
        half_scores(s, by_rows(q), by_rows(k.tiles))
        other_stages(shared, block, k_of, v_of, at)
        half_scores_done(s)
        left = leave(k, 0, WARPS)
        forbid_later(s, HALF, key, row, at)
        raise_maxima(s, HALF, rows, scale)
        mbarrier_wait(v.full, int32(0))
        weigh_first(s, tile.p, rows, v.tiles, scale)
        narrow_done(rows.o)
    else:
        scores(s, by_rows(q), by_rows(k.tiles))
        scores_done(s)
        left = leave(k, 0, WARPS)
        forbid_later(s, KEYS, key, row, at)
        raise_maxima(s, KEYS, rows, scale)
        mbarrier_wait(v.full, int32(0))
        weigh_first(s, tile.p, rows, v.tiles, scale)
        weigh_second(s, tile.p2, rows, v.tiles, scale)
    return left


@functools.cache
def early_kernel() -> Kernel:
    """The kernel as it is, but early."""

    def early(map_q, map_k, map_v, map_o, lse, T, heads, scale, per_heads, per_sharing):
        prefetch_maps(map_q, map_k, map_v, map_o)
        at, block = place(), early_block(T, heads, per_heads, per_sharing)
        q, o = Heads(map_q, block.batch, block.head), Heads(map_o, block.batch, block.head)
        k, v = Heads(map_k, block.batch, block.kv), Heads(map_v, block.batch, block.kv)
        shared = shared_memory(64, STAGES)
        row, q_tile = int32(block.first + at.group * 64), int32(shared.q + at.group * BOX)
        early_start(shared, block, q, k, v, at)
        tile, rows = narrow_registers()
        start_rows(rows, 64)
        mbarrier_wait(shared.q_full, int32(0))
        mbarrier_wait(shared.k.full, int32(0))
        left = early_diagonal(tile, rows, q_tile, shared, k, v, block, row, scale, at)
        if left == WARPS - 1 and STAGES < block.steps:
            fill(shared.k, int32(0), k, key_row(block, STAGES, KEYS), 64)
        earlier(tile, rows, q_tile, shared, k, v, block, scale)
        save_lse(lse, block.number, T, row, rows, scale, at)
        save_output(rows, o, row, q_tile, 64, at)

    return Kernel(early, "l l l l l r r f l l", 256, shared_bytes(64, STAGES), resident=2)


# ---- Chains: a block owns pairs of tiles of queries, and the ring goes on from one to the next

LINKS = 2  # stages of a ring whose keys and values are left, and filled, together


def raise_at_once(s: Any, rows: Rows, scale: float) -> None:
    """m becomes the maximum, and o follows, in every step."""
    raise_maxima(s, KEYS, rows, scale)
    correct(rows, 64)


class Grid(NamedTuple):
    """What says which work is whose: heads of a sequence, tiles of a head, pairs in all; what
    `quotient` takes for pairs of a head, heads, query heads that share a key head.
    """

    heads: int
    tiles: int
    pairs: int
    per_tiles: int
    per_heads: int
    per_sharing: int


class Pair(NamedTuple):
    """The i-th tile of queries of a head from the end, of `long` steps, and from the start; `steps`
    of both. The one in the middle is alone.
    """

    number: int
    batch: int
    head: int
    kv: int
    long: int
    steps: int


def pair_of(n: int, grid: Grid) -> Pair:
    """The n-th pair: head by head, so that what runs together shares keys and values."""
    number = quotient(n, grid.per_tiles)
    i = int32(n - number * int32(int32(grid.tiles + 1) >> 1))
    batch = quotient(number, grid.per_heads)
    head = int32(number - batch * grid.heads)
    long, short = int32(grid.tiles - i), int32(i + 1)
    steps = int32(long + short)
    if long == short:
        steps = long
    return Pair(number, batch, head, quotient(head, grid.per_sharing), long, steps)


class Cursor(NamedTuple):
    """The tile of keys and values that comes into the ring next: pair, step in it; its head."""

    pair: int
    step: int
    long: int
    steps: int
    batch: int
    kv: int


def cursor_at(n: int, grid: Grid) -> Cursor:
    """The first tile of a pair."""
    pair = pair_of(n, grid)
    return Cursor(n, int32(0), pair.long, pair.steps, pair.batch, pair.kv)


def move_on(now: Cursor, grid: Grid) -> Cursor:
    """The tile after this one: of the same pair, or of the block's next."""
    step = int32(now.step + 1)
    if step < now.steps:
        return Cursor(now.pair, step, now.long, now.steps, now.batch, now.kv)
    return cursor_at(int32(now.pair + cuda.gridDim.x), grid)


def cursor_row(now: Cursor) -> int:
    """The first key of the tile: from the diagonal down to 0, twice."""
    end = now.steps
    if now.step < now.long:
        end = now.long
    return int32((end - 1 - now.step) * KEYS)


class Links(NamedTuple):
    """Shared memory: two tiles of queries for each warpgroup with a barrier each, and the rings."""

    q: int
    q_full: int
    k: Ring
    v: Ring


def chain_memory() -> Links:
    """Queries, keys, values, barriers; `chain_bytes` of it. One ticket for keys and values."""
    q, size = shared_base(), int32(KEYS * 128)
    k = int32(q + 4 * BOX)
    v = int32(k + LINKS * size)
    q_full = int32(v + LINKS * size)
    k_full = int32(q_full + 32)
    v_full = int32(k_full + 8 * LINKS)
    left = int32(v_full + 8 * LINKS)
    return Links(q, q_full, Ring(k, size, k_full, left), Ring(v, size, v_full, left))


def chain_bytes() -> int:
    """The bytes of `chain_memory`, with room to begin at a multiple of 1024."""
    return 4 * BOX + 2 * LINKS * KEYS * 128 + 32 + 24 * LINKS + 1024


def q_tile_of(links: Links, item: int, at: Place) -> int:
    """Where this warpgroup has the queries of an item."""
    return int32(links.q + (2 * (item & 1) + at.group) * BOX)


def q_full_of(links: Links, item: int, at: Place) -> int:
    """The barrier of the same."""
    return int32(links.q_full + 8 * (2 * (item & 1) + at.group))


def fetch_item(links: Links, item: int, heads: Heads, first: int, at: Place) -> None:
    """One thread of a warpgroup: start filling its tile of queries."""
    full = q_full_of(links, item, at)
    mbarrier_expect(full, int32(BOX))
    fetch(heads, int32(first + 64 * at.group), q_tile_of(links, item, at), 64, 64, full)


def chain_start(
    links: Links, now: Cursor, head: int, map_q: int, k: int, v: int, at: Place
) -> None:  # fmt: skip
    """Barriers; the first queries and the first tile on their way."""
    if at.thread == 0:
        for i in range(4):
            mbarrier_init(int32(links.q_full + 8 * i), int32(1))
        for i in range(LINKS):
            mbarrier_init(full_of(links.k, i), int32(1))
            mbarrier_init(full_of(links.v, i), int32(1))
            store_shared_int(int32(links.k.left + 8 * i), int32(0))
        mbarrier_init_fence()
        fill(links.k, int32(0), Heads(k, now.batch, now.kv), cursor_row(now), 64)
        fill(links.v, int32(0), Heads(v, now.batch, now.kv), cursor_row(now), 64)
    cuda.syncthreads()  # nobody waits at a barrier that is not there yet
    if at.thread & 127 == 0:
        first = int32((now.long - 1) * QUERIES)
        fetch_item(links, int32(0), Heads(map_q, now.batch, head), first, at)


def refill(links: Links, stage: int, now: Cursor, k: int, v: int) -> None:
    """One thread: keys and values of the cursor's tile into a stage."""
    row = cursor_row(now)
    fill(links.k, stage, Heads(k, now.batch, now.kv), row, 64)
    fill(links.v, stage, Heads(v, now.batch, now.kv), row, 64)


def fetch_next(
    links: Links, item: int, n: int, part: int, pair: Pair, grid: Grid, map_q: int, at: Place
) -> None:  # fmt: skip
    """One thread of each warpgroup fetches the queries of the item after `item`, if there is one.

    They come to where the output of the item before stood, which has gone.
    """
    if at.thread & 127 == 0:
        bulk_wait_read_all()
        if part == 0 and pair.steps > pair.long:
            first = int32((pair.steps - pair.long - 1) * QUERIES)
            fetch_item(links, int32(item + 1), Heads(map_q, pair.batch, pair.head), first, at)
        elif n + cuda.gridDim.x < grid.pairs:
            then = pair_of(int32(n + cuda.gridDim.x), grid)
            first = int32((then.long - 1) * QUERIES)
            fetch_item(links, int32(item + 1), Heads(map_q, then.batch, then.head), first, at)


def save_item(rows: Rows, to: Heads, row: int, tile: int, at: Place) -> None:
    """`save_output`, without waiting until the copy engine has read it."""
    above, below = reciprocal(rows.total[0]), reciprocal(rows.total[1])
    warpgroup_sync(at)  # every warp has read the queries that are overwritten now
    stage_out(rows.o, above, below, tile, 64, at)
    hand_over(at)
    if at.thread & 127 == 0:
        put(to, row, tile, 64)
        bulk_commit()


@functools.cache
def chain_kernel(lazy: bool) -> Kernel:
    """Pairs of tiles, one after the other. Grid: as many blocks as there are chains."""
    follow, last = raise_lazily if lazy else raise_at_once, WARPS - 1

    def chain(
        map_q, map_k, map_v, map_o, lse, T, heads, tiles, pairs, scale, per_tiles, per_heads,
        per_sharing,
    ):  # fmt: skip
        prefetch_maps(map_q, map_k, map_v, map_o)
        grid = Grid(heads, tiles, pairs, per_tiles, per_heads, per_sharing)
        at, links, n = place(), chain_memory(), int32(cuda.blockIdx.x)
        now, k, v = cursor_at(n, grid), links.k, links.v
        chain_start(links, now, pair_of(n, grid).head, map_q, map_k, map_v, at)
        now = move_on(now, grid)
        tile, rows = narrow_registers()
        s = tile.s
        left = int32(-1)  # who fills the second stage: the thread that filled the first
        if at.thread == 0:
            left = int32(last)
        before, stage, phase, item = int32(1), int32(0), int32(0), int32(0)
        while n < grid.pairs:
            pair = pair_of(n, grid)
            parts = int32(1)
            if pair.steps > pair.long:
                parts = int32(2)
            for part in range(parts):
                steps = pair.long
                if part == 1:
                    steps = int32(pair.steps - pair.long)
                row = int32((steps - 1) * QUERIES + at.group * 64)
                q = q_tile_of(links, item, at)
                start_rows(rows, 64)
                mbarrier_wait(q_full_of(links, item, at), int32(item >> 1 & 1))
                mbarrier_wait(full_of(k, stage), phase)
                if at.group == 0:
                    half_scores(s, by_rows(q), by_rows(tile_of(k, stage)))
                    if left == last and now.pair < grid.pairs:
                        refill(links, before, now, map_k, map_v)
                    fetch_next(links, item, n, part, pair, grid, map_q, at)
                    half_scores_done(s)
                    forbid_later(s, HALF, int32((steps - 1) * KEYS), row, at)
                    raise_maxima(s, HALF, rows, scale)
                    mbarrier_wait(full_of(v, stage), phase)
                    weigh_first(s, tile.p, rows, tile_of(v, stage), scale)
                    narrow_done(rows.o)
                else:
                    scores(s, by_rows(q), by_rows(tile_of(k, stage)))
                    if left == last and now.pair < grid.pairs:
                        refill(links, before, now, map_k, map_v)
                    fetch_next(links, item, n, part, pair, grid, map_q, at)
                    scores_done(s)
                    forbid_later(s, KEYS, int32((steps - 1) * KEYS), row, at)
                    raise_maxima(s, KEYS, rows, scale)
                    mbarrier_wait(full_of(v, stage), phase)
                    weigh_first(s, tile.p, rows, tile_of(v, stage), scale)
                    weigh_second(s, tile.p2, rows, tile_of(v, stage), scale)
                left = leave(k, stage, WARPS)
                now, before = move_on(now, grid), stage
                stage, phase = advance(stage, phase, LINKS)
                for _ in range(1, steps):
                    mbarrier_wait(full_of(k, stage), phase)
                    scores(s, by_rows(q), by_rows(tile_of(k, stage)))
                    if left == last and now.pair < grid.pairs:
                        refill(links, before, now, map_k, map_v)
                    scores_done(s)
                    follow(s, rows, scale)
                    mbarrier_wait(full_of(v, stage), phase)
                    weigh_first(s, tile.p, rows, tile_of(v, stage), scale)
                    weigh_second(s, tile.p2, rows, tile_of(v, stage), scale)
                    left = leave(k, stage, WARPS)
                    now, before = move_on(now, grid), stage
                    stage, phase = advance(stage, phase, LINKS)
                save_lse(lse, pair.number, T, row, rows, scale, at)
                save_item(rows, Heads(map_o, pair.batch, pair.head), row, q, at)
                item = int32(item + 1)
            n = int32(n + cuda.gridDim.x)
        if at.thread & 127 == 0:
            bulk_wait_read_all()

    types = "l l l l l r r r r f l l l"
    return Kernel(chain, types, 256, chain_bytes(), resident=2)
