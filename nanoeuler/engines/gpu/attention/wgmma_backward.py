# Made from book/12a-flash-on-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-tensor-dq
"""Causal attention, backward, on Hopper's tensor cores: bf16, head width 64 or 128, any T.

Two kernels, `dq_kernel` first, because it leaves delta for `dkdv_kernel`. Nothing is added in
global memory, so that the same inputs give the same bits.

Besides the diagonal, documents or a window may limit what a query sees. Left out: launching
(wgmma_launch.py), widths other than 64 and 128, all other masks.

T positions, D head width. s scores, p probabilities, o output; dx the gradient of x.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention import layout, softmax
from nanoeuler.engines.gpu.attention import wgmma_parts as wg
from nanoeuler.engines.gpu.lang.hopper import (
    add_product,
    load_bytes,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    product_done,
    product_of_rows,
)
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.engines.gpu.tile.ring import advance
from nanoeuler.engines.gpu.tile.rope import take_angles, turn

KEYS = 64  # of a step of dq


class Form(NamedTuple):
    """A form of a backward kernel: head width; warpgroups of a block; whether RoPE is undone in the
    gradients; whether more than the diagonal limits what is seen.
    """

    D: int
    groups: int
    turned: bool = False
    limited: bool = False


class QueryParts(NamedTuple):
    """A thread's part of a step of dq: scores, then probabilities; dp; ds packed; dq so far; lse
    and delta of its two queries.
    """

    s: Any
    dp: Any
    ds: Any
    dq: Any
    lse: Any
    delta: Any


def fill_pair(ring: wg.Ring, stage: int, of: wg.Pair, row: int, rows: int, D: int) -> None:
    """One thread: start filling a stage with two tiles, rows x D from `row` on."""
    full, tile = wg.full_of(ring, stage), wg.tile_of(ring, stage)
    mbarrier_expect(full, ring.size)
    wg.fetch(of.x, row, tile, rows, D, full)
    wg.fetch(of.y, row, int32(tile + rows * D * 2), rows, D, full)


def over_keys(D: int, warps: int, stages: int) -> Callable:
    """The loop of `dq_kernel`, in a block of `warps` warps."""
    apart = 16 * warps * D * 2  # bytes from queries to their do
    rows_times, rows_done = product_of_rows(KEYS, D), product_done(KEYS)
    first_done = product_done(KEYS, 1)  # the scores are there, dp need not be
    add, dq_before, dq_done = add_product(D, KEYS), product_done(D, 1), product_done(D)

    def loop(
        parts: QueryParts, own: wg.Own, ring: wg.Ring, source: wg.Pair, block: wg.QueryBlock,
        skip: int, scale: float,
    ) -> None:  # fmt: skip
        """dq += ds k, over key tiles from the diagonal down, without the first `skip` of them."""
        s, dp, ds, dq = parts.s, parts.dp, parts.ds, parts.dq
        at, row, q, do = own.at, own.row, own.tile, int32(own.tile + apart)
        before, stage, phase = int32(0), skip, int32(0)
        for step in range(skip, block.steps):
            tile, key = wg.tile_of(ring, stage), wg.key_row(block, step, KEYS)
            mbarrier_wait(wg.full_of(ring, stage), phase)
            rows_times(s, wg.by_rows(q), wg.by_rows(tile))
            dq_before(dq)  # the step before has read its ds and its keys
            rows_times(dp, wg.by_rows(do), wg.by_rows(int32(tile + KEYS * D * 2)))
            left = int32(-1)
            if step > skip:
                left = wg.leave(ring, before, warps)
            first_done(s)
            if key + KEYS - 1 > row:
                wg.forbid_later(s, KEYS, key, row, at)
            wg.forbid_others(s, KEYS, key, own.limits, at)
            softmax.row_probabilities(s, KEYS, parts.lse, scale)
            if left == warps - 1 and step - 1 + stages < block.steps:
                fill_pair(ring, before, source, wg.key_row(block, step - 1 + stages, KEYS), KEYS, D)
            rows_done(dp)
            softmax.row_gradients(s, dp, softmax.Span(0, KEYS), parts.delta)  # scaled at the end
            softmax.pack(s, softmax.Span(0, KEYS), ds)
            add(dq, ds, wg.by_columns(tile, KEYS))
            before = stage
            stage, phase = advance(stage, phase, stages)
        dq_done(dq)

    return loop


class QueryShared(NamedTuple):
    """Shared memory of `dq_kernel`: tiles of q and do, their mbarrier, a ring of (k, v)."""

    q: int
    do: int
    full: int
    ring: wg.Ring


def query_shared(D: int, rows: int, stages: int) -> QueryShared:
    """Addresses of rows x D of q and of do, the ring, the barriers: `query_bytes` in all."""
    q = wg.shared_base()
    tiles = int32(q + 2 * rows * D * 2)
    full = int32(tiles + stages * 2 * KEYS * D * 2)
    ring = wg.Ring(tiles, int32(2 * KEYS * D * 2), int32(full + 8), int32(full + 8 + 8 * stages))
    return QueryShared(q, int32(q + rows * D * 2), full, ring)


def query_bytes(D: int, rows: int, stages: int) -> int:
    """The bytes of `query_shared`, with room to begin at a multiple of 1024."""
    return 2 * rows * D * 2 + stages * 2 * KEYS * D * 2 + 8 + 16 * stages + 1024


def fetch_rows(of: wg.Pair, first: int, to: int, groups: int, D: int, full: int) -> None:
    """One thread: start fetching both arrays, from row `first` on, 64 rows for each warpgroup."""
    size = 64 * D * 2
    mbarrier_expect(full, int32(2 * groups * size))
    for group in range(groups):
        row = int32(first + 64 * group)
        wg.fetch(of.x, row, int32(to + group * size), 64, D, full)
        wg.fetch(of.y, row, int32(to + (groups + group) * size), 64, D, full)


def make_query_start(D: int, groups: int, stages: int) -> tuple[Callable, Callable]:
    """start(shared, block, queries, keys, at), and skip_keys(ring, block, keys, row, T)."""
    warps = 4 * groups

    def start(
        shared: QueryShared, block: wg.QueryBlock, queries: wg.Pair, keys: wg.Pair, at: wg.Place
    ) -> None:
        """Set up barriers; start fetching queries and the first stages."""
        if at.thread == 0:
            mbarrier_init(shared.full, int32(1))
            wg.start_ring(shared.ring, stages)
            mbarrier_init_fence()
            fetch_rows(queries, block.first, shared.q, groups, D, shared.full)
            for i in range(min(int32(stages), block.steps)):
                fill_pair(shared.ring, int32(i), keys, wg.key_row(block, i, KEYS), KEYS, D)
        cuda.syncthreads()  # nobody waits at a barrier that is not there yet

    def skip_keys(ring: wg.Ring, block: wg.QueryBlock, keys: wg.Pair, row: int, T: int) -> int:
        """Leave the tiles that come after all of this warpgroup's queries; return how many."""
        own_steps = int32((min(T, int32(row + 64)) + KEYS - 1) // KEYS)
        skip = int32(block.end - own_steps)
        for step in range(skip):  # fewer than there are stages
            if wg.leave(ring, int32(step), warps) == warps - 1 and step + stages < block.steps:
                row_k = wg.key_row(block, step + stages, KEYS)
                fill_pair(ring, int32(step), keys, row_k, KEYS, D)
        return skip

    return start, skip_keys


def save_rows(
    acc: Any, factor: float, to: wg.Heads, row: int, tile: int, D: int, at: wg.Place
) -> None:
    """Store acc times factor, by way of a tile that this warpgroup no longer needs."""
    wg.warpgroup_sync(at)  # every warp has read the tile that is overwritten now
    wg.stage_out(acc, factor, factor, tile, D, at)
    wg.hand_over(at)
    if at.thread & 127 == 0:
        wg.put(to, row, tile, D)
        wg.put_done()


class Angles(NamedTuple):
    """Addresses of RoPE's tables of cosines and sines, as in `rope.Turning`."""

    cos: int
    sin: int


def make_turn_back(D: int, turned: bool) -> Callable:
    """turn_back(acc, by, row, T, at): undo RoPE in acc, if `turned`."""
    size = D // 2 if turned else 1

    def turn_back(acc: Any, by: Angles, row: int, T: int, at: wg.Place) -> None:
        angles = cuda.local.array(size, float32)
        if turned:
            first, last = int32(row + wg.own_row(at)), int32(T - 1)
            above, below = min(first, last), min(int32(first + 8), last)
            take_angles(angles, by.cos, by.sin, above, below, D, at.lane)
            turn(acc, 0, angles, float32(-1), D)

    return turn_back


class OutputArrays(NamedTuple):
    """o and do in memory, [batch, heads, T, D] laid out alike: addresses, steps in bytes."""

    o: int
    do: int
    batch_step: int
    head_step: int
    row_step: int


class Inputs(NamedTuple):
    """Maps of what both kernels read, [batch, heads, T, D]."""

    q: int
    k: int
    v: int
    do: int


class Lines(NamedTuple):
    """Addresses of a float32 for each row of each head: lse, and delta, which `dq` writes."""

    lse: int
    delta: int


class Numbers(NamedTuple):
    """Those fields of `layout.Sizes` that are arguments of a launch."""

    T: int
    heads: int
    sharing: int
    scale: float  # log2(e) / sqrt(D)
    root: float   # 1 / sqrt(D)


class Arguments(NamedTuple):
    """What both kernels are given."""

    maps: Inputs
    lines: Lines
    sizes: layout.Sizes
    angles: Angles


def sizes_of(given: Numbers, limited: bool, line: int) -> layout.Sizes:
    """The sizes of a launch. line: the address of each row's limit, used if `limited`."""
    limit = layout.Limit(limited, line, given.T)
    return layout.Sizes(given.T, given.heads, given.sharing, given.scale, given.root, limit)


def outputs_of(x: Arguments, y: OutputArrays, block: wg.QueryBlock) -> softmax.Outputs:
    """Addresses of o, do, lse and delta of a block's head."""
    head = block.batch * y.batch_step + block.head * y.head_step
    line = 4 * (int64(block.number) * layout.round_up(x.sizes.T, layout.PAD))
    o, do = layout.Head(y.o + head, y.row_step), layout.Head(y.do + head, y.row_step)
    return softmax.Outputs(o, do, x.lines.lse + line, x.lines.delta + line)


def dq_body(form: Form) -> Callable:
    """What a block of `dq_kernel` does."""
    D, groups, stages = form.D, form.groups, 4 if form.D == 64 else 3
    rows, warps, threads = 64 * groups, 4 * groups, 128 * groups
    half, tile_half, quarter = D // 2, KEYS // 2, KEYS // 4
    turn_back, loop = make_turn_back(D, form.turned), over_keys(D, warps, stages)
    start, skip_keys = make_query_start(D, groups, stages)
    take_deltas = softmax.make_take_deltas(D, 2, layout.quarter_dot)  # 2 bytes an element

    def block_of_queries(x: Arguments, map_dq: int, arrays: OutputArrays) -> None:
        wg.prefetch_maps(x.maps.q, x.maps.k, x.maps.v, x.maps.do)
        T, at, block = x.sizes.T, wg.place(), wg.query_block(x.sizes, rows, KEYS)
        batch, head, kv = block.batch, block.head, block.kv
        queries = wg.Pair(wg.Heads(x.maps.q, batch, head), wg.Heads(x.maps.do, batch, head))
        keys = wg.Pair(wg.Heads(x.maps.k, batch, kv), wg.Heads(x.maps.v, batch, kv))
        shared = query_shared(D, rows, stages)
        start(shared, block, queries, keys, at)
        parts = QueryParts(
            cuda.local.array(tile_half, float32), cuda.local.array(tile_half, float32),
            cuda.local.array(quarter, int32), cuda.local.array(half, float32),
            cuda.local.array(2, float32), cuda.local.array(2, float32),
        )  # fmt: skip
        layout.clear(parts.dq, half)
        row, tile = int32(block.first + at.group * 64), int32(shared.q + at.group * 64 * D * 2)
        y = outputs_of(x, arrays, block)
        take_deltas(parts.lse, parts.delta, y, int32(row + wg.own_row(at)), at.lane, T)
        softmax.pad_line(y.delta, int32(block.first + rows), T, float32(0), at.thread, threads)
        own = wg.Own(at, tile, row, wg.limits_of(x.sizes.limit, batch, row, int32(row + 63)))
        skip = skip_keys(shared.ring, block, keys, row, T)
        mbarrier_wait(shared.full, int32(0))
        loop(parts, own, shared.ring, keys, block, skip, x.sizes.scale)
        turn_back(parts.dq, x.angles, row, T, at)
        save_rows(parts.dq, x.sizes.root, wg.Heads(map_dq, batch, head), row, tile, D, at)

    return block_of_queries


@functools.cache
def dq_kernel(form: Form) -> Kernel:
    """dq and delta. first: an int32 for each query, read if the form is `limited`."""
    body, limited, threads = dq_body(form), form.limited, 128 * form.groups

    def dq(
        maps: Inputs, map_dq, arrays: OutputArrays, lines: Lines, given: Numbers, angles: Angles,
        first,
    ):  # fmt: skip
        x = Arguments(maps, lines, sizes_of(given, limited, first), angles)
        body(x, map_dq, arrays)

    stages, resident = (4, 2) if form.D == 64 else (3, 1)
    shared = query_bytes(form.D, 64 * form.groups, stages)
    args = "l l l l l l l l l l l l r r r f f l l l"
    return Kernel(dq, args, threads, shared, resident=resident)


# %% sec-flash-tensor-dkdv
class KeyParts(NamedTuple):
    """A thread's part of a step of dk and dv, on transposed tiles: s, then p, and dp, 64 keys x
    queries; p or ds packed, in two halves (or in one, `low`); dk and dv so far.
    """

    s: Any
    dp: Any
    low: Any
    high: Any
    dk: Any
    dv: Any


def in_halves(D: int, queries: int) -> tuple[Callable, Callable]:
    """dv += p^T do and dk += ds^T q, in halves: one is prepared during the other's product."""
    half, skip = queries // 2, queries // 2 * 128  # bytes of half a panel
    first, second, add = softmax.Span(0, half), softmax.Span(half, half), add_product(D, half)
    dp_done, dv_done = product_done(queries, 1), product_done(D, 1)

    def to_values(parts: KeyParts, do: int, lse: int, scale: float) -> None:
        softmax.column_probabilities(parts.s, first, lse, scale)
        softmax.pack(parts.s, first, parts.low)
        add(parts.dv, parts.low, wg.by_columns(do, queries))
        softmax.column_probabilities(parts.s, second, lse, scale)
        softmax.pack(parts.s, second, parts.high)
        add(parts.dv, parts.high, wg.by_columns(int32(do + skip), queries))

    def to_keys(parts: KeyParts, q: int, delta: int) -> None:
        dp_done(parts.dp)  # and the first half of dv, so that `low` is free
        softmax.column_gradients(parts.s, parts.dp, first, delta)
        softmax.pack(parts.s, first, parts.low)
        add(parts.dk, parts.low, wg.by_columns(q, queries))
        dv_done(parts.dv)  # the second half
        softmax.column_gradients(parts.s, parts.dp, second, delta)
        softmax.pack(parts.s, second, parts.high)
        add(parts.dk, parts.high, wg.by_columns(int32(q + skip), queries))

    return to_values, to_keys


def at_once(D: int, queries: int) -> tuple[Callable, Callable]:
    """dv += p^T do and dk += ds^T q in one product each, which takes fewer registers."""
    whole, add, dp_done = softmax.Span(0, queries), add_product(D, queries), product_done(queries)

    def to_values(parts: KeyParts, do: int, lse: int, scale: float) -> None:
        softmax.column_probabilities(parts.s, whole, lse, scale)
        softmax.pack(parts.s, whole, parts.low)
        add(parts.dv, parts.low, wg.by_columns(do, queries))

    def to_keys(parts: KeyParts, q: int, delta: int) -> None:
        dp_done(parts.dp)  # and dv, so that `low` is free
        softmax.column_gradients(parts.s, parts.dp, whole, delta)
        softmax.pack(parts.s, whole, parts.low)
        add(parts.dk, parts.low, wg.by_columns(q, queries))

    return to_values, to_keys


class Cursor(NamedTuple):
    """A tile of queries: `dkdv_kernel` goes through all tiles of a group's heads, head by head."""

    head: int
    tile: int


class Queries(NamedTuple):
    """Where a key block's queries come from: maps of q and do, addresses of lse and delta.

    Tiles number `first` to `end` - 1, from the diagonal on, of each head.
    """

    q: int
    do: int
    lse: int
    delta: int
    batch: int
    number: int  # of the sequence's first query head, through the whole batch
    line: int    # values of lse for each head
    first: int
    end: int


def fill_queries(
    ring: wg.Ring, lines: int, stage: int, source: Queries, now: Cursor, queries: int, D: int
) -> None:
    """One thread: start filling a stage with q, do, lse and delta of a tile of queries."""
    full, to, row = wg.full_of(ring, stage), wg.tile_of(ring, stage), int32(now.tile * queries)
    mbarrier_expect(full, int32(ring.size + 8 * queries))
    wg.fetch(wg.Heads(source.q, source.batch, now.head), row, to, queries, D, full)
    do_to = int32(to + queries * D * 2)
    wg.fetch(wg.Heads(source.do, source.batch, now.head), row, do_to, queries, D, full)
    here = 4 * (int64(source.number + now.head) * source.line + row)
    line = int32(lines + stage * 8 * queries)
    load_bytes(line, source.lse + here, int32(4 * queries), full)
    load_bytes(int32(line + 4 * queries), source.delta + here, int32(4 * queries), full)


def next_of(source: Queries, now: Cursor) -> Cursor:
    """The tile after this one: of the same head, or the first of the next head."""
    tile = int32(now.tile + 1)
    if tile == source.end:
        return Cursor(int32(now.head + 1), source.first)
    return Cursor(now.head, tile)


class KeyShared(NamedTuple):
    """Shared memory of `dkdv_kernel`: tiles of k and v, their mbarrier, a ring of (q, do), and
    for each stage a line of lse and one of delta.
    """

    k: int
    v: int
    full: int
    ring: wg.Ring
    lines: int


def key_shared(D: int, rows: int, queries: int, stages: int) -> KeyShared:
    """Addresses of rows x D of k, of v, the ring, the lines, the barriers; `key_bytes` of it."""
    k = wg.shared_base()
    tiles, size = int32(k + 2 * rows * D * 2), 2 * queries * D * 2
    lines = int32(tiles + stages * size)
    full = int32(lines + stages * 8 * queries)
    ring = wg.Ring(tiles, int32(size), int32(full + 8), int32(full + 8 + 8 * stages))
    return KeyShared(k, int32(k + rows * D * 2), full, ring, lines)


def key_bytes(D: int, rows: int, queries: int, stages: int) -> int:
    """The bytes of `key_shared`, with room to begin at a multiple of 1024."""
    stage = 2 * queries * D * 2 + 8 * queries + 16
    return 2 * rows * D * 2 + stages * stage + 8 + 1024


class Step(NamedTuple):
    """A step of `dkdv_kernel`: its stage, and which tile of queries is there. Then the stage of the
    step before (-1 in the first step), the tile to fill it with, and whether there is one.
    """

    stage: int
    tile: int
    before: int
    later: Cursor
    refill: bool


def over_tile(D: int, warps: int, queries: int, first: int) -> Callable:
    """A step of `dkdv_kernel` that leaves out the first `first` queries of its tile."""
    apart = 16 * warps * D * 2  # bytes from keys to values
    count, skip = queries - first, first * 128
    # Told to take 64 of 128 queries, at_once gives by_columns 64 rows instead of 128. That's
    # harmless: they only locate the next panel, and at D = 64 there's only one.
    to_values, to_keys = in_halves(D, queries) if count == 128 else at_once(D, count)
    rows_times, s_done = product_of_rows(count, D), product_done(count, 1)
    dk_before = product_done(D, 1)

    def multiply(
        parts: KeyParts, own: wg.Own, shared: KeyShared, source: Queries, of: Step, scale: float
    ) -> None:
        """dv += p^T do, dk += ds^T q. Leave stage `before`; its last warp fills it with `later`."""
        at, key, stage, before = own.at, own.row, of.stage, of.before
        q, row = int32(wg.tile_of(shared.ring, stage) + skip), int32(of.tile * queries + first)
        k, v, do = own.tile, int32(own.tile + apart), int32(q + queries * D * 2)
        line = int32(shared.lines + stage * 8 * queries + 4 * (first + wg.own_column(at)))
        rows_times(parts.s, wg.by_rows(k), wg.by_rows(q))
        dk_before(parts.dk)  # the step before has read its operands
        rows_times(parts.dp, wg.by_rows(v), wg.by_rows(do))
        left = int32(-1)
        if before >= 0:
            left = wg.leave(shared.ring, before, warps)
        s_done(parts.s)
        if row < key + 63:
            wg.forbid_earlier(parts.s, count, row, key, at)
        wg.forbid_foreign(parts.s, count, row, own.limits, at)
        to_values(parts, do, line, scale)
        if left == warps - 1 and of.refill:
            fill_queries(shared.ring, shared.lines, before, source, of.later, queries, D)
        to_keys(parts, q, int32(line + 4 * queries))

    return multiply


def over_nothing(D: int, warps: int, queries: int) -> Callable:
    """A step with a tile whose queries all come before this warpgroup's keys."""
    all_done = product_done(D)

    def skip(
        parts: KeyParts, own: wg.Own, shared: KeyShared, source: Queries, of: Step, scale: float
    ) -> None:
        """Leave stage `before`; its last warp fills it with tile `later`."""
        all_done(parts.dk)
        if of.before >= 0 and wg.leave(shared.ring, of.before, warps) == warps - 1 and of.refill:
            fill_queries(shared.ring, shared.lines, of.before, source, of.later, queries, D)

    return skip


def over_queries(D: int, warps: int, queries: int, stages: int) -> Callable:
    """The loop of `dkdv_kernel`, in a block of `warps` warps, `queries` a step."""
    whole, dk_done = over_tile(D, warps, queries, 0), product_done(D)
    early = over_tile(D, warps, queries, 64) if queries > 64 else over_nothing(D, warps, queries)

    def loop(
        parts: KeyParts, own: wg.Own, shared: KeyShared, source: Queries, head: int, steps: int,
        scale: float,
    ) -> None:  # fmt: skip
        """dv += p^T do, dk += ds^T q. head: the group's first."""
        now, later = Cursor(head, source.first), ahead(source, head, stages)
        step, before, stage, phase = int32(0), int32(-1), int32(0), int32(0)
        while True:  # at least once
            mbarrier_wait(wg.full_of(shared.ring, stage), phase)
            of = Step(stage, now.tile, before, later, step - 1 + stages < steps)
            if own.row - now.tile * queries >= 64:  # its first 64 queries come before all keys
                early(parts, own, shared, source, of, scale)
            else:
                whole(parts, own, shared, source, of, scale)
            if step > 0:
                later = next_of(source, later)
            now = next_of(source, now)
            before, step = stage, int32(step + 1)
            stage, phase = advance(stage, phase, stages)
            if step == steps:
                break
        dk_done(parts.dk)
        dk_done(parts.dv)

    return loop


def ahead(source: Queries, head: int, steps: int) -> Cursor:
    """The tile that comes `steps` steps after the first one of `head`."""
    tiles = int32(source.end - source.first)
    heads = wg.divide(steps, tiles)
    return Cursor(int32(head + heads), int32(source.first + steps - heads * tiles))


def make_key_start(D: int, groups: int, queries: int, stages: int) -> Callable:
    """start(shared, source, keys, key, head, steps, at)."""

    def start(
        shared: KeyShared,
        source: Queries,
        keys: wg.Pair,
        key: int,
        head: int,
        steps: int,
        at: wg.Place,
    ) -> None:
        """Set up barriers; start fetching keys, values and the first stages."""
        if at.thread == 0:
            mbarrier_init(shared.full, int32(1))
            wg.start_ring(shared.ring, stages)
            mbarrier_init_fence()
            fetch_rows(keys, key, shared.k, groups, D, shared.full)
            now = Cursor(head, source.first)
            for i in range(min(int32(stages), steps)):
                fill_queries(shared.ring, shared.lines, int32(i), source, now, queries, D)
                now = next_of(source, now)
        cuda.syncthreads()  # nobody waits at a barrier that is not there yet

    return start


STAGES = 3  # of `dkdv_kernel`: queries, do, lse and delta


def step_queries(D: int) -> int:
    """How many queries a step of `dkdv_kernel` has."""
    return 128 if D == 64 else 64


def last_tile(T: int, queries: int, rows: int, key: int, batch: int, limit: layout.Limit) -> int:
    """One past the last tile of queries that sees the block of keys from `key` on."""
    end = int32((T + queries - 1) // queries)
    if limit.on:  # then limit_of gives the last query that sees the block's last key
        end = int32(layout.limit_of(limit, batch, int32(key + rows - 1)) // queries + 1)
    return end


def dkdv_body(form: Form) -> Callable:
    """What a block of `dkdv_kernel` does."""
    D, groups, queries, stages = form.D, form.groups, step_queries(form.D), STAGES
    rows, warps, half, tile_half = 64 * groups, 4 * groups, D // 2, queries // 2
    packed = queries // 8 if D == 64 else queries // 4
    loop, turn_back = over_queries(D, warps, queries, stages), make_turn_back(D, form.turned)
    begin = make_key_start(D, groups, queries, stages)

    def block_of_keys(x: Arguments, map_dk: int, map_dv: int) -> None:
        maps, lines = x.maps, x.lines
        wg.prefetch_maps(maps.q, maps.k, maps.v, maps.do)
        sizes, at, number, key = x.sizes, wg.place(), wg.block_head(), int32(cuda.blockIdx.y * rows)
        kv_heads = wg.divide(sizes.heads, sizes.sharing)
        batch = wg.divide(number, kv_heads)
        kv = int32(number - batch * kv_heads)
        end = last_tile(sizes.T, queries, rows, key, batch, sizes.limit)
        first, head = int32(key // queries), int32(kv * sizes.sharing)
        steps = int32((end - first) * sizes.sharing)
        start, line = int32(batch * sizes.heads), layout.round_up(sizes.T, layout.PAD)
        source = Queries(maps.q, maps.do, lines.lse, lines.delta, batch, start, line, first, end)
        shared = key_shared(D, rows, queries, stages)
        keys = wg.Pair(wg.Heads(maps.k, batch, kv), wg.Heads(maps.v, batch, kv))
        begin(shared, source, keys, key, head, steps, at)
        parts = KeyParts(
            cuda.local.array(tile_half, float32), cuda.local.array(tile_half, float32),
            cuda.local.array(packed, int32), cuda.local.array(packed, int32),
            cuda.local.array(half, float32), cuda.local.array(half, float32),
        )  # fmt: skip
        layout.clear(parts.dk, half)
        layout.clear(parts.dv, half)
        row, size = int32(key + at.group * 64), 64 * D * 2
        k, v = int32(shared.k + at.group * size), int32(shared.v + at.group * size)
        own = wg.Own(at, k, row, wg.limits_of(sizes.limit, batch, row, row))
        mbarrier_wait(shared.full, int32(0))
        loop(parts, own, shared, source, head, steps, sizes.scale)
        turn_back(parts.dk, x.angles, row, sizes.T, at)
        save_rows(parts.dk, sizes.root, wg.Heads(map_dk, batch, kv), row, k, D, at)
        save_rows(parts.dv, float32(1), wg.Heads(map_dv, batch, kv), row, v, D, at)

    return block_of_keys


@functools.cache
def dkdv_kernel(form: Form) -> Kernel:
    """dk and dv. last: an int32 for each key, read if the form is `limited`."""
    body, limited, threads = dkdv_body(form), form.limited, 128 * form.groups

    def dkdv(
        maps: Inputs, map_dk, map_dv, lines: Lines, given: Numbers, angles: Angles, last
    ):
        body(Arguments(maps, lines, sizes_of(given, limited, last), angles), map_dk, map_dv)

    shared = key_bytes(form.D, 64 * form.groups, step_queries(form.D), STAGES)
    return Kernel(dkdv, "l l l l l l l l r r r f f l l l", threads, shared)
