# Made from book/12a-flash-on-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-tensor-forward
"""Causal attention, forward, on Hopper's tensor cores: bf16, head width 64 or 128, any T.

Besides the diagonal, documents or a window may limit what a query sees. Left out: launching
(wgmma_launch.py), widths other than 64 and 128, all other masks.

T positions, D head width. s scores, p probabilities not yet divided by their sum, o output.
"""

import functools
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention import layout
from nanoeuler.engines.gpu.attention import wgmma_parts as wg
from nanoeuler.engines.gpu.attention.softmax import (
    Rows,
    Span,
    correct,
    exponentials,
    follow,
    lane_maxima,
    pack,
    raise_maxima,
    save_lse,
    start_rows,
)
from nanoeuler.engines.gpu.lang import hopper, ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.engines.gpu.tile.ring import advance
from nanoeuler.errors import UserError

QUERIES = 128  # of a tile, 64 to each of two warpgroups
KEYS = 128     # of a step
HALF = KEYS // 2


def weigh(s: Any, of: Span, rows: Rows, scale: float) -> None:
    """Replace the scores of some keys by their exponentials, and add these to the rows' sums."""
    maxima = rows.m[0] * scale, rows.m[1] * scale
    above, below = exponentials(s, of, maxima, (float32(0), float32(0)), scale)
    rows.total[0] += above
    rows.total[1] += below


class Output(NamedTuple):
    """Where a head's results go."""

    lse: int         # address, of all heads
    number: int      # of the head, through the whole batch
    heads: wg.Heads  # of o
    D: int


def save(rows: Rows, of: Output, own: wg.Own, T: int, scale: float) -> None:
    """Store lse; stage this warpgroup's output in its tile of queries, and start copying it out."""
    at, D = own.at, of.D
    line = of.lse + 4 * (int64(of.number) * layout.round_up(T, layout.PAD))
    save_lse(rows, line, int32(own.row + wg.own_row(at)), at.lane, T, scale)
    above, below = ptx.reciprocal(rows.total[0]), ptx.reciprocal(rows.total[1])
    wg.warpgroup_sync(at)  # every warp has read the queries that are overwritten now
    wg.stage_out(rows.o, above, below, own.tile, D, at)
    wg.hand_over(at)
    if at.thread & 127 == 0:  # in Python & binds before ==, unlike in C
        wg.put(of.heads, own.row, own.tile, D)
        hopper.bulk_commit()


def outputs_read(at: wg.Place) -> None:
    """Before a block ends: wait until the copies of `save` have read its shared memory."""
    if at.thread & 127 == 0:
        hopper.bulk_wait_read_all()


class Maps(NamedTuple):
    """Where tiles come from and go to: maps of [batch, heads, T, D]."""

    q: int
    k: int
    v: int
    o: int


class Shared(NamedTuple):
    """A block's shared memory: tiles of queries, their first mbarrier, rings of keys and values."""

    q: int
    q_full: int
    k: wg.Ring
    v: wg.Ring


def fill(ring: wg.Ring, stage: int, heads: wg.Heads, row: int, D: int) -> None:
    """One thread: start filling a stage with KEYS keys or values from `row` on."""
    hopper.mbarrier_expect(wg.full_of(ring, stage), ring.size)
    wg.fetch(heads, row, wg.tile_of(ring, stage), KEYS, D, wg.full_of(ring, stage))


# %% sec-flash-tensor-narrow
WARPS = 8  # that multiply, in a block; all have to leave a stage before it is filled again

# q k^T of a step's keys, and its end
scores, scores_done = hopper.product_of_rows(KEYS, 64), hopper.product_done(KEYS)
# the same for half of the keys
half_scores, half_scores_done = hopper.product_of_rows(HALF, 64), hopper.product_done(HALF)
# o += p v over half of the keys, and the end of all that adds to o
add_half, narrow_done = hopper.add_product(64, HALF), hopper.product_done(64)


def weigh_first(s: Any, p: Any, rows: Rows, v: int, scale: float) -> None:
    """The first half of the keys: take the exponentials, then start o += p v."""
    weigh(s, Span(0, HALF), rows, scale)
    pack(s, Span(0, HALF), p)
    add_half(rows.o, p, wg.by_columns(v, KEYS))


def weigh_second(s: Any, p: Any, rows: Rows, v: int, scale: float) -> None:
    """The second half, during the first half's product; at the end, wait for both to be in o."""
    weigh(s, Span(HALF, HALF), rows, scale)
    pack(s, Span(HALF, HALF), p)
    add_half(rows.o, p, wg.by_columns(int32(v + HALF * 128), KEYS))
    narrow_done(rows.o)


# %% sec-flash-tensor-lazy
# How far scaled scores may rise above m before o is corrected: p is at most 2^8. That is the
# threshold of FlashAttention-4; what bounds it is in sec-flash-tensor-lazy.
LEAP = 8.0


def raise_lazily(s: Any, rows: Rows, scale: float) -> None:
    """In rows where a score is more than LEAP above m, m becomes the maximum, and o follows.

    A warp does so together, or not at all; a row that has no such score is multiplied by 1.
    """
    m = rows.m
    above, below = lane_maxima(s, KEYS, m[0], m[1])
    if cuda.any_sync(-1, ptx.larger(above - m[0], below - m[1]) * scale > float32(LEAP)):
        above, below = layout.quad_maxima(above, below)
        if (above - m[0]) * scale <= float32(LEAP):
            above = m[0]
        if (below - m[1]) * scale <= float32(LEAP):
            below = m[1]
        follow(rows, above, below, scale)
        correct(rows, 64)


# %% sec-flash-tensor-chains
def reciprocal_of(n: int, most: int) -> int:
    """The reciprocal by which `quotient` divides by n, exact for numerators up to `most`.

    Raises UserError where it cannot be.
    """
    if n * most >= 1 << 32:  # x e < 2^32 has to hold, and e < n
        what = f"attention of {most} pairs of query tiles"
        raise UserError(f"{what} is too much for one launch: split the batch")
    return -(-(1 << 32) // n)


def quotient(x: int, per: int) -> int:
    """x // n, where `per` is `reciprocal_of` n: a product instead of a division of 64 bits."""
    return int32(int64(x) * per >> 32)


class Cut(NamedTuple):
    """How the work is cut: query heads of a sequence; tiles and links of a head; all links."""

    heads: int
    tiles: int
    of_head: int
    count: int


class Divisors(NamedTuple):
    """Reciprocals, for `quotient`, of: links of a head; query heads; query heads to a key head."""

    per_link: int
    per_head: int
    per_sharing: int


class Links(NamedTuple):
    """How the work is cut, its reciprocals, and what limits queries besides the diagonal."""

    cut: Cut
    by: Divisors
    limit: layout.Limit


class Link(NamedTuple):
    """The n-th link: one or two tiles of a head's queries. The long tile has `long` steps, and both
    together have `steps`.

    head and kv count within the sequence `batch`, `number` through the whole batch.
    """

    n: int
    number: int
    batch: int
    head: int
    kv: int
    long: int
    steps: int


def place_in(n: int, links: Links) -> tuple[int, int]:
    """The head of the n-th link, through the whole batch, and the link's place in it."""
    number = quotient(n, links.by.per_link)
    return number, int32(n - number * links.cut.of_head)


def steps_left(limit: layout.Limit, batch: int, long: int, steps: int) -> tuple[int, int]:
    """`long` and `steps` of a link under documents: a tile ends at the first key that it sees."""
    short = int32(steps - long)
    left = int32(long - layout.limit_of(limit, batch, int32((long - 1) * QUERIES)) // KEYS)
    count = left
    if short > 0:
        below = layout.limit_of(limit, batch, int32((short - 1) * QUERIES)) // KEYS
        count = int32(left + short - below)
    return left, count


def link_of(n: int, links: Links) -> Link:
    """Head by head; in a head the last tile with the first, the last but one with the second."""
    number, i = place_in(n, links)
    batch = quotient(number, links.by.per_head)
    head = int32(number - batch * links.cut.heads)
    long = int32(links.cut.tiles - i)
    steps = long
    if links.cut.of_head < links.cut.tiles and i + 1 < long:  # the one in the middle is alone
        steps = int32(long + i + 1)
    if links.limit.on and n < links.cut.count:
        long, steps = steps_left(links.limit, batch, long, steps)
    return Link(n, number, batch, head, quotient(head, links.by.per_sharing), long, steps)


def long_row(link: Link, links: Links) -> int:
    """The first query of a link's long tile."""
    if links.limit.on:
        return int32((links.cut.tiles - 1 - link.n + link.number * links.cut.of_head) * QUERIES)
    return int32((link.long - 1) * QUERIES)


def short_row(link: Link, links: Links) -> int:
    """The first query of a link's short tile."""
    if links.limit.on:
        return int32((link.n - link.number * links.cut.of_head) * QUERIES)
    return int32((link.steps - link.long - 1) * QUERIES)


class Cursor(NamedTuple):
    """The tile of keys and values that a block fetches next: its link, and the step in it."""

    link: int
    step: int
    long: int
    steps: int
    batch: int
    kv: int


def cursor_at(link: Link) -> Cursor:
    """The first tile of a link."""
    return Cursor(link.n, int32(0), link.long, link.steps, link.batch, link.kv)


def next_of(now: Cursor, links: Links) -> Cursor:
    """The tile after this one: of the same link, or of the block's next."""
    step = int32(now.step + 1)
    if step < now.steps:
        return Cursor(now.link, step, now.long, now.steps, now.batch, now.kv)
    return cursor_at(link_of(int32(now.link + cuda.gridDim.x), links))


def cursor_key(now: Cursor, links: Links) -> int:
    """The first key of the tile: from the diagonal down, for the long tile, then for the short."""
    long, end = now.long, now.steps
    if links.limit.on:  # the diagonals are where they would be without documents
        _, i = place_in(now.link, links)
        long, end = int32(links.cut.tiles - i), int32(now.long + i + 1)
    if now.step < now.long:
        end = long
    return int32((end - 1 - now.step) * KEYS)


STAGES = 2    # of keys and values, which are left, and filled again, together
RESIDENT = 2  # blocks of a multiprocessor, four warpgroups
# Queries, keys and values, barriers, and room to begin at a multiple of 1024.
NARROW_BYTES = 4 * wg.BOX + 2 * STAGES * KEYS * 128 + 32 + 24 * STAGES + 1024


def narrow_memory() -> Shared:
    """Two tiles of queries for each warpgroup, then keys, values and barriers. Keys and values of a
    stage share one count of the warps that left it.
    """
    q, size = wg.shared_base(), int32(KEYS * 128)
    k = int32(q + 4 * wg.BOX)
    v = int32(k + STAGES * size)
    q_full = int32(v + STAGES * size)
    k_full = int32(q_full + 32)
    v_full = int32(k_full + 8 * STAGES)
    left = int32(v_full + 8 * STAGES)
    return Shared(q, q_full, wg.Ring(k, size, k_full, left), wg.Ring(v, size, v_full, left))


def query_tile(shared: Shared, item: int, at: wg.Place) -> int:
    """Where this warpgroup has its queries of tile number `item` of the block's chain."""
    return int32(shared.q + (2 * (item & 1) + at.group) * wg.BOX)


def query_full(shared: Shared, item: int, at: wg.Place) -> int:
    """The mbarrier of these queries; its parity is that of `item` // 2."""
    return int32(shared.q_full + 8 * (2 * (item & 1) + at.group))


class Chain(NamedTuple):
    """What does not change: shared memory, the cut, maps, a thread's place."""

    shared: Shared
    links: Links
    maps: Maps
    at: wg.Place


def fetch_item(chain: Chain, item: int, link: Link, first: int) -> None:
    """One thread of a warpgroup: start filling its tile of queries."""
    full, row = query_full(chain.shared, item, chain.at), int32(first + 64 * chain.at.group)
    hopper.mbarrier_expect(full, int32(wg.BOX))
    heads = wg.Heads(chain.maps.q, link.batch, link.head)
    to = query_tile(chain.shared, item, chain.at)
    wg.fetch(heads, row, to, 64, 64, full)


def fetch_next(chain: Chain, item: int, link: Link, part: int) -> None:
    """One thread of each warpgroup fetches the queries of the tile after `item`, if there is one.

    They overwrite the output of the tile before `item`, so its copy to memory must have read it.
    """
    if chain.at.thread & 127 == 0:
        hopper.bulk_wait_read_all()
        if part == 0 and link.steps > link.long:
            fetch_item(chain, int32(item + 1), link, short_row(link, chain.links))
        elif link.n + cuda.gridDim.x < chain.links.cut.count:
            then = link_of(int32(link.n + cuda.gridDim.x), chain.links)
            fetch_item(chain, int32(item + 1), then, long_row(then, chain.links))


def fill_both(chain: Chain, stage: int, now: Cursor) -> None:
    """One thread: keys and values of the cursor's tile into a stage."""
    key = cursor_key(now, chain.links)
    fill(chain.shared.k, stage, wg.Heads(chain.maps.k, now.batch, now.kv), key, 64)
    fill(chain.shared.v, stage, wg.Heads(chain.maps.v, now.batch, now.kv), key, 64)


class Stand(NamedTuple):
    """A warp's place in the ring: this step's stage and parity; the stage of the step before, the
    ticket that this warp drew when it left that, and the tile to fill it with.
    """

    stage: int
    phase: int
    before: int
    left: int
    later: Cursor


def narrow_start(chain: Chain, link: Link) -> Stand:
    """Set up barriers; fetch the first queries, and keys and values for stage 0.

    Thread 0 gets the last ticket of stage 1, so that it fills that in its first step.
    """
    shared, at, now, left = chain.shared, chain.at, cursor_at(link), int32(-1)
    if at.thread == 0:
        for i in range(4 + 2 * STAGES):  # those of queries, of keys, of values
            hopper.mbarrier_init(int32(shared.q_full + 8 * i), int32(1))
        for i in range(STAGES):
            ptx.store_shared_int(int32(shared.k.left + 8 * i), int32(0))
        hopper.mbarrier_init_fence()
        fill_both(chain, int32(0), now)
        left = int32(WARPS - 1)
    cuda.syncthreads()  # nobody waits at a barrier that is not there yet
    if at.thread & 127 == 0:
        fetch_item(chain, int32(0), link, long_row(link, chain.links))
    return Stand(int32(0), int32(0), int32(1), left, next_of(now, chain.links))


def refill(chain: Chain, stand: Stand) -> None:
    """Fill the stage of the step before, if this thread drew its last ticket and a tile is left."""
    if stand.left == WARPS - 1 and stand.later.link < chain.links.cut.count:
        fill_both(chain, stand.before, stand.later)


def go_on(chain: Chain, stand: Stand) -> Stand:
    """Leave this step's stage, and go on to the next."""
    left = wg.leave(chain.shared.k, stand.stage, WARPS)
    stage, phase = advance(stand.stage, stand.phase, STAGES)
    return Stand(stage, phase, stand.stage, left, next_of(stand.later, chain.links))


class Item(NamedTuple):
    """The queries that a warpgroup works on: the number of their tile in the block's chain, its
    link and place in it (0 the long tile, 1 the short one), and the rows.
    """

    number: int
    link: Link
    part: int
    own: wg.Own


class Scores(NamedTuple):
    """Registers of a thread for one tile: scores, and both halves packed as operands."""

    s: Any
    p: Any
    p2: Any


def narrow_registers() -> tuple[Scores, Rows]:
    """The arrays of a thread that live in registers."""
    s = cuda.local.array(64, float32)
    p, p2 = cuda.local.array(16, int32), cuda.local.array(16, int32)
    o, m = cuda.local.array(32, float32), cuda.local.array(2, float32)
    total, alpha = cuda.local.array(2, float32), cuda.local.array(2, float32)
    return Scores(s, p, p2), Rows(o, m, total, alpha)


def diagonal(
    tile: Scores, rows: Rows, chain: Chain, stand: Stand, item: Item, scale: float
) -> None:
    """The tile on the diagonal, the only one with a causal mask; meanwhile, fetch the next queries.

    The second half of its keys comes after all queries of warpgroup 0, which leaves it out.
    """
    s, at, q = tile.s, chain.at, wg.by_rows(query_tile(chain.shared, item.number, chain.at))
    k, v = wg.tile_of(chain.shared.k, stand.stage), wg.tile_of(chain.shared.v, stand.stage)
    row, limits = item.own.row, item.own.limits
    key = int32(row - at.group * 64)
    hopper.mbarrier_wait(query_full(chain.shared, item.number, at), int32(item.number >> 1 & 1))
    hopper.mbarrier_wait(wg.full_of(chain.shared.k, stand.stage), stand.phase)
    if at.group == 0:
        half_scores(s, q, wg.by_rows(k))
        refill(chain, stand)
        fetch_next(chain, item.number, item.link, item.part)
        half_scores_done(s)
        wg.forbid_later(s, HALF, key, row, at)
        wg.forbid_others(s, HALF, key, limits, at)
        raise_maxima(s, HALF, rows, scale)
        hopper.mbarrier_wait(wg.full_of(chain.shared.v, stand.stage), stand.phase)
        weigh_first(s, tile.p, rows, v, scale)
        narrow_done(rows.o)
    else:
        scores(s, q, wg.by_rows(k))
        refill(chain, stand)
        fetch_next(chain, item.number, item.link, item.part)
        scores_done(s)
        wg.forbid_later(s, KEYS, key, row, at)
        wg.forbid_others(s, KEYS, key, limits, at)
        raise_maxima(s, KEYS, rows, scale)
        hopper.mbarrier_wait(wg.full_of(chain.shared.v, stand.stage), stand.phase)
        weigh_first(s, tile.p, rows, v, scale)
        weigh_second(s, tile.p2, rows, v, scale)


def earlier(
    tile: Scores, rows: Rows, chain: Chain, stand: Stand, steps: int, own: wg.Own, scale: float
) -> Stand:
    """The tiles before the diagonal, from the latest to key 0. Only a query's limit
    may forbid keys in them. steps: how many tiles, the one on the diagonal included.
    """
    k, v, limits = chain.shared.k, chain.shared.v, own.limits
    for i in range(1, steps):
        hopper.mbarrier_wait(wg.full_of(k, stand.stage), stand.phase)
        scores(tile.s, wg.by_rows(own.tile), wg.by_rows(wg.tile_of(k, stand.stage)))
        refill(chain, stand)
        scores_done(tile.s)
        # The tile's first key: limits.row, rounded down to the tile of queries, less i tiles.
        # (Without limits limits.row is 0, and nobody looks at the key.)
        wg.forbid_others(tile.s, KEYS, int32((limits.row & -QUERIES) - i * KEYS), limits, chain.at)
        raise_lazily(tile.s, rows, scale)
        hopper.mbarrier_wait(wg.full_of(v, stand.stage), stand.phase)
        weigh_first(tile.s, tile.p, rows, wg.tile_of(v, stand.stage), scale)
        weigh_second(tile.s, tile.p2, rows, wg.tile_of(v, stand.stage), scale)
        stand = go_on(chain, stand)
    return stand


def limits_of_tile(link: Link, part: int, links: Links, at: wg.Place) -> wg.Limits:
    """The limits of this warpgroup's rows, in a link's long tile (part 0) or its short one (1)."""
    row = long_row(link, links) if part == 0 else short_row(link, links)
    row = int32(row + at.group * 64)
    return wg.limits_of(links.limit, link.batch, row, int32(row + 63))


def narrow(maps: Maps, lse: int, T: int, links: Links, scale: float) -> None:
    """o and lse for D = 64."""
    wg.prefetch_maps(maps.q, maps.k, maps.v, maps.o)
    at = wg.place()
    chain = Chain(narrow_memory(), links, maps, at)
    link, number = link_of(int32(cuda.blockIdx.x), links), int32(0)
    stand = narrow_start(chain, link)
    tile, rows = narrow_registers()
    while link.n < links.cut.count:
        for part in range(1 + (link.steps > link.long)):
            steps = link.long if part == 0 else int32(link.steps - link.long)
            row = int32((steps - 1) * QUERIES + at.group * 64)
            limits = limits_of_tile(link, part, links, at)
            if links.limit.on:  # then steps don't say where the diagonal is
                row = limits.row
            own = wg.Own(at, query_tile(chain.shared, number, at), row, limits)
            start_rows(rows, 64)
            # The tile on the diagonal.
            diagonal(tile, rows, chain, stand, Item(number, link, part, own), scale)
            stand = go_on(chain, stand)
            # The tiles before it.
            stand = earlier(tile, rows, chain, stand, steps, own, scale)
            # Out, while the next tile's queries come.
            heads = wg.Heads(maps.o, link.batch, link.head)
            save(rows, Output(lse, link.number, heads, 64), own, T, scale)
            number = int32(number + 1)
        link = link_of(int32(link.n + cuda.gridDim.x), links)
    outputs_read(at)


@functools.cache
def narrow_kernel(limited: bool) -> Kernel:
    """o and lse for D = 64. limited: whether more than the diagonal limits what is seen."""

    def narrow_forward(maps: Maps, lse, T, cut: Cut, scale, by: Divisors, first):
        narrow(maps, lse, T, Links(cut, by, layout.Limit(limited, first, T)), scale)

    args = "l l l l l r r r r r f l l l l"
    return Kernel(narrow_forward, args, 256, NARROW_BYTES, resident=RESIDENT)


# %% sec-flash-tensor-wide
WIDE_STAGES = 2          # of keys and of values
PRODUCER = 2             # the warpgroup that copies, after the two that multiply
# Named barriers 3 and 4: whose turn it is to issue products. (The producer, to which 3 would
# belong, never uses it.)
FIRST_TURN = 3

# q k^T of a step's keys, and its end
wide_scores, wide_scores_done = hopper.product_of_rows(KEYS, 128), hopper.product_done(KEYS)
# o += p v
wide_add, wide_done = hopper.add_product(128, KEYS), hopper.product_done(128)
scores_first = hopper.product_done(KEYS, 1)  # the scores are there, o += p v may still be in flight
fewer_registers, more_registers = hopper.set_registers(24, False), hopper.set_registers(240, True)


def wide_memory() -> Shared:
    """Addresses of queries, keys, values, then the barriers: WIDE_BYTES in all."""
    q, stages = wg.shared_base(), WIDE_STAGES
    size, bars = int32(KEYS * 256), int32(q + (QUERIES + 2 * stages * KEYS) * 256)
    k = wg.Ring(int32(q + QUERIES * 256), size, int32(bars + 8), int32(bars + 8 + 16 * stages))
    v_tiles = int32(k.tiles + stages * size)
    v = wg.Ring(v_tiles, size, int32(k.full + 8 * stages), int32(k.left + 8 * stages))
    return Shared(q, bars, k, v)


# Tiles, a barrier for the queries, two for each stage, and room to begin at a multiple of 1024.
WIDE_BYTES = (QUERIES + 2 * WIDE_STAGES * KEYS) * 256 + 8 + 32 * WIDE_STAGES + 1024


def fetch_queries(heads: wg.Heads, first: int, shared: Shared) -> None:
    """One thread: start filling the two tiles of queries, one to a warpgroup."""
    hopper.mbarrier_expect(shared.q_full, int32(QUERIES * 256))
    for group in range(2):
        tile = int32(shared.q + group * 2 * wg.BOX)
        wg.fetch(heads, int32(first + 64 * group), tile, 64, 128, shared.q_full)


def produce(shared: Shared, block: wg.QueryBlock, maps: Maps) -> None:
    """One thread of the producer: fetch every tile, as soon as all 8 warps have left its stage."""
    q = wg.Heads(maps.q, block.batch, block.head)
    k, v = wg.Heads(maps.k, block.batch, block.kv), wg.Heads(maps.v, block.batch, block.kv)
    fetch_queries(q, block.first, shared)
    stage, phase = int32(0), int32(0)
    for step in range(block.steps):
        row = wg.key_row(block, step, KEYS)
        hopper.mbarrier_wait(int32(shared.k.left + 8 * stage), int32(phase ^ 1))
        fill(shared.k, stage, k, row, 128)
        hopper.mbarrier_wait(int32(shared.v.left + 8 * stage), int32(phase ^ 1))
        fill(shared.v, stage, v, row, 128)
        stage, phase = advance(stage, phase, WIDE_STAGES)


def hand_back(ring: wg.Ring, stage: int, at: wg.Place) -> None:
    """This warp has left a stage: one of 8 arrivals that the producer waits for."""
    if at.lane == 0:
        hopper.mbarrier_arrive(int32(ring.left + 8 * stage))


def take_turns(
    tile: Scores, rows: Rows, shared: Shared, block: wg.QueryBlock, own: wg.Own, scale: float
) -> None:
    """All that follows the first tile's probabilities, up to the last tile's product.

    In every step one warpgroup issues the next tile's scores and this tile's product, passes the
    turn on, and computes exponentials while the other one issues.
    """
    s, p, k, v, at = tile.s, tile.p, shared.k, shared.v, own.at
    stage, phase = int32(0), int32(0)
    for step in range(1, block.steps):
        v_stage, v_phase = stage, phase
        stage, phase = advance(stage, phase, WIDE_STAGES)
        hopper.mbarrier_wait(wg.full_of(k, stage), phase)
        ptx.barrier(int32(FIRST_TURN + at.group), int32(256))
        wide_scores(s, wg.by_rows(own.tile), wg.by_rows(wg.tile_of(k, stage)))
        hopper.mbarrier_wait(wg.full_of(v, v_stage), v_phase)
        wide_add(rows.o, p, wg.by_columns(wg.tile_of(v, v_stage), KEYS))
        ptx.barrier_arrive(int32(FIRST_TURN + 1 - at.group), int32(256))
        scores_first(s)
        hand_back(k, stage, at)
        wg.forbid_others(s, KEYS, wg.key_row(block, step, KEYS), own.limits, at)
        raise_maxima(s, KEYS, rows, scale)
        weigh(s, Span(0, KEYS), rows, scale)
        wide_done(rows.o)  # only now may o be corrected, and p be written
        hand_back(v, v_stage, at)
        correct(rows, 128)
        pack(s, Span(0, KEYS), p)
    hopper.mbarrier_wait(wg.full_of(v, stage), phase)
    wide_add(rows.o, p, wg.by_columns(wg.tile_of(v, stage), KEYS))
    wide_done(rows.o)


def wide_start(shared: Shared, at: wg.Place) -> None:
    """Set up barriers: one arrival for a full stage, one of each of 8 warps for an empty one."""
    if at.thread == 0:
        hopper.mbarrier_init(shared.q_full, int32(1))
        for i in range(WIDE_STAGES):
            hopper.mbarrier_init(wg.full_of(shared.k, i), int32(1))
            hopper.mbarrier_init(wg.full_of(shared.v, i), int32(1))
            hopper.mbarrier_init(int32(shared.k.left + 8 * i), int32(WARPS))
            hopper.mbarrier_init(int32(shared.v.left + 8 * i), int32(WARPS))
        hopper.mbarrier_init_fence()
    cuda.syncthreads()  # nobody waits at a barrier that is not there yet


def wide_registers() -> tuple[Scores, Rows]:
    """The arrays of a thread that live in registers. One p holds all keys, so p2 is p again."""
    s, p = cuda.local.array(64, float32), cuda.local.array(32, int32)
    o, m = cuda.local.array(64, float32), cuda.local.array(2, float32)
    total, alpha = cuda.local.array(2, float32), cuda.local.array(2, float32)
    return Scores(s, p, p), Rows(o, m, total, alpha)


def first_tile(
    tile: Scores, rows: Rows, shared: Shared, block: wg.QueryBlock, own: wg.Own, scale: float
) -> None:
    """Probabilities of the tile on the diagonal."""
    at, key = own.at, wg.key_row(block, 0, KEYS)
    hopper.mbarrier_wait(shared.q_full, int32(0))
    if at.group == 1:
        ptx.barrier_arrive(int32(FIRST_TURN), int32(256))  # the first turn is warpgroup 0's
    hopper.mbarrier_wait(shared.k.full, int32(0))
    wide_scores(tile.s, wg.by_rows(own.tile), wg.by_rows(shared.k.tiles))
    wide_scores_done(tile.s)
    hand_back(shared.k, 0, at)
    wg.forbid_later(tile.s, KEYS, key, own.row, at)
    wg.forbid_others(tile.s, KEYS, key, own.limits, at)
    raise_maxima(tile.s, KEYS, rows, scale)
    weigh(tile.s, Span(0, KEYS), rows, scale)
    pack(tile.s, Span(0, KEYS), tile.p)


def wide(maps: Maps, lse: int, sizes: layout.Sizes) -> None:
    """o and lse for D = 128."""
    wg.prefetch_maps(maps.q, maps.k, maps.v, maps.o)
    at, block = wg.place(), wg.query_block(sizes, QUERIES, KEYS)
    shared = wide_memory()
    wide_start(shared, at)
    if at.group == PRODUCER:
        fewer_registers()
        if at.thread == PRODUCER * 128:
            produce(shared, block, maps)
    else:
        more_registers()
        row, q_tile = int32(block.first + at.group * 64), int32(shared.q + at.group * 2 * wg.BOX)
        own = wg.Own(at, q_tile, row, wg.limits_of(sizes.limit, block.batch, row, int32(row + 63)))
        tile, rows = wide_registers()
        start_rows(rows, 128)
        first_tile(tile, rows, shared, block, own, sizes.scale)
        take_turns(tile, rows, shared, block, own, sizes.scale)
        heads = wg.Heads(maps.o, block.batch, block.head)
        save(rows, Output(lse, block.number, heads, 128), own, sizes.T, sizes.scale)
        outputs_read(at)


@functools.cache
def wide_kernel(limited: bool) -> Kernel:
    """o and lse for D = 128. limited: as in `narrow_kernel`."""

    def wide_forward(maps: Maps, lse, T, heads, sharing, scale, first):
        sizes = layout.Sizes(T, heads, sharing, scale, scale, layout.Limit(limited, first, T))
        wide(maps, lse, sizes)

    # The producer's registers go to the others: 168 for each thread become 24, 240 and 240.
    return Kernel(wide_forward, "l l l l l r r r f l", 384, WIDE_BYTES)
