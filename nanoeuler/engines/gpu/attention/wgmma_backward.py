# Made from book/12b-flash-on-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-tensor-dq
"""Causal attention, backward, on Hopper's tensor cores: bf16, head width 64 or 128, any T.

Two kernels, `dq_kernel` first, because it leaves delta for `dkdv_kernel`. Nothing is added in
global memory, so that the same inputs give the same bits.

Left out: launching (flash_plan.py), widths other than 64 and 128, masks other than causal and
documents.

T positions, D head width. s scores, p probabilities, o output; dx the gradient of x.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention.layout import (
    PAD,
    Limit,
    clear,
    limit_of,
    quad_sum,
    quarter_dot,
    round_up,
)

# isort: split


from nanoeuler.engines.gpu.attention.wgmma_parts import (
    Heads,
    Limits,
    Place,
    QueryBlock,
    Ring,
    advance,
    block_head,
    by_columns,
    by_rows,
    divide,
    fetch,
    forbid_earlier,
    forbid_foreign,
    forbid_later,
    forbid_others,
    full_of,
    hand_over,
    key_row,
    leave,
    limits_of,
    own_column,
    own_row,
    place,
    prefetch_maps,
    put,
    put_done,
    query_block,
    shared_base,
    stage_out,
    start_ring,
    tile_of,
    warpgroup_sync,
)

# isort: split


from nanoeuler.engines.gpu.gemm.wgmma_rope import take_angles, turn
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
from nanoeuler.engines.gpu.lang.ptx import (
    exp2,
    load_float,
    load_shared_float2,
    pack_bf16,
    store_float,
)

KEYS = 64  # of a step of dq


class Form(NamedTuple):
    """A form of a backward kernel: head width; warpgroups of a block; whether gradients are turned
    back; whether more than the diagonal limits what is seen.
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


class Outputs(NamedTuple):
    """o and do in memory, [batch, heads, T, D] laid out alike: addresses, steps in bytes."""

    o: int
    do: int
    batch_step: int
    head_step: int
    row_step: int


def take_deltas(
    parts: QueryParts, y: Outputs, lse: int, delta: int, block: QueryBlock, row: int, T: int,
    D: int, at: Place,
) -> None:  # fmt: skip
    """delta = do . o of this thread's queries, kept and saved; lse. Equation eq-flash-delta."""
    line = int64(block.number) * round_up(T, PAD)
    head = block.batch * y.batch_step + block.head * y.head_step
    for h in range(2):
        t = int32(row + own_row(at) + 8 * h)
        dot = float32(0)
        parts.lse[h] = float32(0)
        if t < T:
            here = head + t * y.row_step + (at.lane & 3) * (D // 2)  # four lanes share a row
            dot = quarter_dot(y.o + here, y.do + here, D)
            parts.lse[h] = load_float(lse + 4 * (line + t))
        parts.delta[h] = quad_sum(dot)
        if at.lane & 3 == 0 and t < round_up(T, PAD):
            store_float(delta + 4 * (line + t), parts.delta[h])


def pad_deltas(delta: int, block: QueryBlock, rows: int, T: int, at: Place) -> None:
    """The last block also zeroes what follows its rows: `dkdv_kernel` reads up to a multiple."""
    t = int32(block.first + rows + at.thread)
    if block.first + rows >= T and t < round_up(T, PAD):
        store_float(delta + 4 * (int64(block.number) * round_up(T, PAD) + t), float32(0))


def fill_pair(ring: Ring, stage: int, x: Heads, y: Heads, row: int, rows: int, D: int) -> None:
    """One thread: start filling a stage with two tiles, rows x D from `row` on."""
    full, tile = full_of(ring, stage), tile_of(ring, stage)
    mbarrier_expect(full, ring.size)
    fetch(x, row, tile, rows, D, full)
    fetch(y, row, int32(tile + rows * D * 2), rows, D, full)


def query_probabilities(s: Any, keys: int, lse: Any, scale: float) -> None:
    """Scores become probabilities, rows being queries."""
    for i in range(0, keys // 2, 4):
        s[i] = exp2(s[i] * scale - lse[0])
        s[i + 1] = exp2(s[i + 1] * scale - lse[0])
        s[i + 2] = exp2(s[i + 2] * scale - lse[1])
        s[i + 3] = exp2(s[i + 3] * scale - lse[1])


def query_gradients(p: Any, dp: Any, keys: int, delta: Any, ds: Any) -> None:
    """ds = p (dp - delta), packed; the scale comes at the end. Equation eq-flash-backward (3)."""
    for i in range(keys // 8):
        j = 4 * i
        ds[2 * i] = pack_bf16(p[j] * (dp[j] - delta[0]), p[j + 1] * (dp[j + 1] - delta[0]))
        j += 2
        ds[2 * i + 1] = pack_bf16(p[j] * (dp[j] - delta[1]), p[j + 1] * (dp[j + 1] - delta[1]))


def over_keys(D: int, warps: int, stages: int) -> Callable:
    """The loop of `dq_kernel`, in a block of `warps` warps."""
    rows_times, rows_done = product_of_rows(KEYS, D), product_done(KEYS)
    first_done = product_done(KEYS, 1)  # the scores are there, dp need not be
    add, dq_before, dq_done = add_product(D, KEYS), product_done(D, 1), product_done(D)

    def loop(
        parts: QueryParts, q: int, do: int, ring: Ring, k_of: Heads, v_of: Heads,
        block: QueryBlock, skip: int, row: int, limits: Limits, scale: float, at: Place,
    ) -> None:  # fmt: skip
        """dq += ds k, over key tiles from the diagonal down. q, do: this warpgroup's tiles."""
        s, dp, ds, dq = parts.s, parts.dp, parts.ds, parts.dq
        before, stage, phase = int32(0), skip, int32(0)
        for step in range(skip, block.steps):
            tile, key = tile_of(ring, stage), key_row(block, step, KEYS)
            mbarrier_wait(full_of(ring, stage), phase)
            rows_times(s, by_rows(q), by_rows(tile))
            dq_before(dq)  # the step before has read its ds and its keys
            rows_times(dp, by_rows(do), by_rows(int32(tile + KEYS * D * 2)))
            left = int32(-1)
            if step > skip:
                left = leave(ring, before, warps)
            first_done(s)
            if key + KEYS - 1 > row:
                forbid_later(s, KEYS, key, row, at)
            forbid_others(s, KEYS, key, limits, at)
            query_probabilities(s, KEYS, parts.lse, scale)
            if left == warps - 1 and step - 1 + stages < block.steps:
                row_k = key_row(block, step - 1 + stages, KEYS)
                fill_pair(ring, before, k_of, v_of, row_k, KEYS, D)
            rows_done(dp)
            query_gradients(s, dp, KEYS, parts.delta, ds)
            add(dq, ds, by_columns(tile, KEYS))
            before = stage
            stage, phase = advance(stage, phase, stages)
        dq_done(dq)

    return loop


class QueryShared(NamedTuple):
    """Shared memory of `dq_kernel`: tiles of q and do, their mbarrier, a ring of (k, v)."""

    q: int
    do: int
    full: int
    ring: Ring


def query_shared(D: int, rows: int, stages: int) -> QueryShared:
    """Addresses of rows x D of q, of do, the ring, then the barriers; `query_bytes` of it."""
    q = shared_base()
    tiles = int32(q + 2 * rows * D * 2)
    full = int32(tiles + stages * 2 * KEYS * D * 2)
    ring = Ring(tiles, int32(2 * KEYS * D * 2), int32(full + 8), int32(full + 8 + 8 * stages))
    return QueryShared(q, int32(q + rows * D * 2), full, ring)


def query_bytes(D: int, rows: int, stages: int) -> int:
    """The bytes of `query_shared`, with room to begin at a multiple of 1024."""
    return 2 * rows * D * 2 + stages * 2 * KEYS * D * 2 + 8 + 16 * stages + 1024


def fetch_rows(x: Heads, y: Heads, first: int, to: int, groups: int, D: int, full: int) -> None:
    """One thread: start fetching x, then y, from row `first` on, 64 rows for each warpgroup."""
    size = 64 * D * 2
    mbarrier_expect(full, int32(2 * groups * size))
    for group in range(groups):
        row = int32(first + 64 * group)
        fetch(x, row, int32(to + group * size), 64, D, full)
        fetch(y, row, int32(to + (groups + group) * size), 64, D, full)


def query_start(
    shared: QueryShared, block: QueryBlock, q: Heads, do: Heads, k: Heads, v: Heads, groups: int,
    stages: int, D: int, at: Place,
) -> None:  # fmt: skip
    """Barriers; queries and the first stages on their way."""
    if at.thread == 0:
        mbarrier_init(shared.full, int32(1))
        start_ring(shared.ring, stages)
        mbarrier_init_fence()
        fetch_rows(q, do, block.first, shared.q, groups, D, shared.full)
        for i in range(min(int32(stages), block.steps)):
            fill_pair(shared.ring, int32(i), k, v, key_row(block, i, KEYS), KEYS, D)
    cuda.syncthreads()  # nobody waits at a barrier that is not there yet


def skip_keys(
    shared: QueryShared, block: QueryBlock, k: Heads, v: Heads, row: int, T: int, warps: int,
    stages: int, D: int,
) -> int:  # fmt: skip
    """Leave the tiles that come after all of this warpgroup's queries; return how many."""
    own_steps = int32((min(T, int32(row + 64)) + KEYS - 1) // KEYS)
    skip = int32(block.end - own_steps)
    for step in range(skip):  # fewer than there are stages
        if leave(shared.ring, int32(step), warps) == warps - 1 and step + stages < block.steps:
            row_k = key_row(block, step + stages, KEYS)
            fill_pair(shared.ring, int32(step), k, v, row_k, KEYS, D)
    return skip


def save_rows(acc: Any, factor: float, to: Heads, row: int, tile: int, D: int, at: Place) -> None:
    """acc times factor, through a tile of this warpgroup that it needs no more, to memory."""
    warpgroup_sync(at)  # every warp has read the tile that is overwritten now
    stage_out(acc, factor, factor, tile, D, at)
    hand_over(at)
    if at.thread & 127 == 0:
        put(to, row, tile, D)
        put_done()


def make_turn_back(D: int, turned: bool) -> Callable:
    """turn_back(acc, cos, sin, row, T, at): where heads are turned, acc by the opposite angles."""
    size = D // 2 if turned else 1

    def turn_back(acc: Any, cos: int, sin: int, row: int, T: int, at: Place) -> None:
        angles = cuda.local.array(size, float32)
        if turned:
            first, last = int32(row + own_row(at)), int32(T - 1)
            above, below = min(first, last), min(int32(first + 8), last)
            take_angles(angles, cos, sin, above, below, D, at.lane)
            turn(acc, 0, angles, float32(-1), D)

    return turn_back


class QueryArguments(NamedTuple):
    """Arguments of `dq_kernel`: maps, memory, numbers, tables of angles, first keys."""

    map_q: int
    map_k: int
    map_v: int
    map_do: int
    map_dq: int
    outputs: Outputs
    lse: int
    delta: int
    T: int
    heads: int
    sharing: int
    scale: float
    root: float
    cos: int
    sin: int
    limit: Limit


def dq_body(form: Form) -> Callable:
    """What a block of `dq_kernel` does."""
    D, groups = form.D, form.groups
    stages, rows, warps = 4 if D == 64 else 3, 64 * groups, 4 * groups
    half, tile_half, quarter = D // 2, KEYS // 2, KEYS // 4
    turn_back, loop = make_turn_back(D, form.turned), over_keys(D, warps, stages)

    def block_of_queries(x: QueryArguments) -> None:
        prefetch_maps(x.map_q, x.map_k, x.map_v, x.map_do)
        at, block = place(), query_block(x.T, x.heads, x.sharing, rows, KEYS, x.limit)
        of_q, of_do = (
            Heads(x.map_q, block.batch, block.head), Heads(x.map_do, block.batch, block.head)
        )  # fmt: skip
        of_k, of_v = Heads(x.map_k, block.batch, block.kv), Heads(x.map_v, block.batch, block.kv)
        shared = query_shared(D, rows, stages)
        query_start(shared, block, of_q, of_do, of_k, of_v, groups, stages, D, at)
        parts = QueryParts(
            cuda.local.array(tile_half, float32), cuda.local.array(tile_half, float32),
            cuda.local.array(quarter, int32), cuda.local.array(half, float32),
            cuda.local.array(2, float32), cuda.local.array(2, float32),
        )  # fmt: skip
        clear(parts.dq, half)
        row, tile = int32(block.first + at.group * 64), int32(shared.q + at.group * 64 * D * 2)
        do_tile = int32(shared.do + at.group * 64 * D * 2)
        take_deltas(parts, x.outputs, x.lse, x.delta, block, row, x.T, D, at)
        pad_deltas(x.delta, block, rows, x.T, at)
        limits = limits_of(x.limit, block.batch, row, int32(row + 63))
        skip = skip_keys(shared, block, of_k, of_v, row, x.T, warps, stages, D)
        mbarrier_wait(shared.full, int32(0))
        loop(
            parts, tile, do_tile, shared.ring, of_k, of_v, block, skip, row, limits, x.scale, at
        )
        turn_back(parts.dq, x.cos, x.sin, row, x.T, at)
        save_rows(parts.dq, x.root, Heads(x.map_dq, block.batch, block.head), row, tile, D, at)

    return block_of_queries


@functools.cache
def dq_kernel(form: Form) -> Kernel:
    """dq and delta. first: an int32 for each query, read if the form is `limited`."""
    body, limited, threads = dq_body(form), form.limited, 128 * form.groups

    def dq(
        map_q, map_k, map_v, map_do, map_dq, o, do, batch_step, head_step, row_step, lse, delta,
        T, heads, sharing, scale, root, cos, sin, first,
    ):  # fmt: skip
        outputs = Outputs(o, do, batch_step, head_step, row_step)
        x = QueryArguments(
            map_q, map_k, map_v, map_do, map_dq, outputs, lse, delta, T, heads, sharing, scale,
            root, cos, sin, Limit(limited, first, T),
        )  # fmt: skip
        body(x)

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


def key_probabilities(s: Any, first: int, last: int, p: Any, line: int, scale: float) -> None:
    """Queries first .. last - 1: scores become probabilities, also packed into p.

    Columns are queries here; `line`: address of lse of this thread's first one.
    """
    for n in range(first // 8, last // 8):
        i, j = 4 * n, 2 * (n - first // 8)
        x, y = load_shared_float2(int32(line + 32 * n))
        s[i], s[i + 1] = exp2(s[i] * scale - x), exp2(s[i + 1] * scale - y)
        s[i + 2], s[i + 3] = exp2(s[i + 2] * scale - x), exp2(s[i + 3] * scale - y)
        p[j], p[j + 1] = pack_bf16(s[i], s[i + 1]), pack_bf16(s[i + 2], s[i + 3])


def key_gradients(p: Any, dp: Any, first: int, last: int, ds: Any, line: int) -> None:
    """Queries first .. last - 1: ds = p (dp - delta), packed. `line`: address of delta."""
    for n in range(first // 8, last // 8):
        i, j = 4 * n, 2 * (n - first // 8)
        x, y = load_shared_float2(int32(line + 32 * n))
        ds[j] = pack_bf16(p[i] * (dp[i] - x), p[i + 1] * (dp[i + 1] - y))
        ds[j + 1] = pack_bf16(p[i + 2] * (dp[i + 2] - x), p[i + 3] * (dp[i + 3] - y))


def in_halves(D: int, queries: int) -> tuple[Callable, Callable]:
    """dv += p^T do and dk += ds^T q, a half of the queries beside the other half's product."""
    half, skip = queries // 2, queries // 2 * 128  # bytes of half a panel
    add = add_product(D, half)
    dp_done, dv_done = product_done(queries, 1), product_done(D, 1)

    def to_values(parts: KeyParts, do: int, lse: int, scale: float) -> None:
        key_probabilities(parts.s, 0, half, parts.low, lse, scale)
        add(parts.dv, parts.low, by_columns(do, queries))
        key_probabilities(parts.s, half, queries, parts.high, lse, scale)
        add(parts.dv, parts.high, by_columns(int32(do + skip), queries))

    def to_keys(parts: KeyParts, q: int, delta: int) -> None:
        dp_done(parts.dp)  # and the first half of dv, so that `low` is free
        key_gradients(parts.s, parts.dp, 0, half, parts.low, delta)
        add(parts.dk, parts.low, by_columns(q, queries))
        dv_done(parts.dv)  # the second half
        key_gradients(parts.s, parts.dp, half, queries, parts.high, delta)
        add(parts.dk, parts.high, by_columns(int32(q + skip), queries))

    return to_values, to_keys


def at_once(D: int, queries: int) -> tuple[Callable, Callable]:
    """The same in one product each, which takes fewer registers."""
    add, dp_done = add_product(D, queries), product_done(queries)

    def to_values(parts: KeyParts, do: int, lse: int, scale: float) -> None:
        key_probabilities(parts.s, 0, queries, parts.low, lse, scale)
        add(parts.dv, parts.low, by_columns(do, queries))

    def to_keys(parts: KeyParts, q: int, delta: int) -> None:
        dp_done(parts.dp)  # and dv, so that `low` is free
        key_gradients(parts.s, parts.dp, 0, queries, parts.low, delta)
        add(parts.dk, parts.low, by_columns(q, queries))

    return to_values, to_keys


class Cursor(NamedTuple):
    """A tile of queries on the way of `dkdv_kernel` through the heads of a group."""

    head: int
    tile: int


class Queries(NamedTuple):
    """Where a key block's queries come from: maps, lse and delta, its query heads.

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
    ring: Ring, lines: int, stage: int, source: Queries, at: Cursor, queries: int, D: int
) -> None:
    """One thread: start filling a stage with q, do, lse and delta of one tile of queries."""
    full, to, row = full_of(ring, stage), tile_of(ring, stage), int32(at.tile * queries)
    mbarrier_expect(full, int32(ring.size + 8 * queries))
    fetch(Heads(source.q, source.batch, at.head), row, to, queries, D, full)
    do_to = int32(to + queries * D * 2)
    fetch(Heads(source.do, source.batch, at.head), row, do_to, queries, D, full)
    here = 4 * (int64(source.number + at.head) * source.line + row)
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
    ring: Ring
    lines: int


def key_shared(D: int, rows: int, queries: int, stages: int) -> KeyShared:
    """Addresses of rows x D of k, of v, the ring, the lines, the barriers; `key_bytes` of it."""
    k = shared_base()
    tiles, size = int32(k + 2 * rows * D * 2), 2 * queries * D * 2
    lines = int32(tiles + stages * size)
    full = int32(lines + stages * 8 * queries)
    ring = Ring(tiles, int32(size), int32(full + 8), int32(full + 8 + 8 * stages))
    return KeyShared(k, int32(k + rows * D * 2), full, ring, lines)


def key_bytes(D: int, rows: int, queries: int, stages: int) -> int:
    """The bytes of `key_shared`, with room to begin at a multiple of 1024."""
    stage = 2 * queries * D * 2 + 8 * queries + 16
    return 2 * rows * D * 2 + stages * stage + 8 + 1024


def over_tile(D: int, warps: int, queries: int, first: int) -> Callable:
    """A step of the loop of `dkdv_kernel`, with the queries of a tile from its `first` on."""
    count, skip = queries - first, first * 128
    to_values, to_keys = in_halves(D, queries) if count == 128 else at_once(D, count)
    rows_times, s_done = product_of_rows(count, D), product_done(count, 1)
    dk_before = product_done(D, 1)

    def multiply(
        parts: KeyParts, k: int, v: int, shared: KeyShared, source: Queries, stage: int,
        tile: int, before: int, later: Cursor, refill: bool, key: int, limits: Limits,
        scale: float, at: Place,
    ) -> None:  # fmt: skip
        """dv += p^T do, dk += ds^T q; then stage `before` is left, and gets tile `later`."""
        q, row = int32(tile_of(shared.ring, stage) + skip), int32(tile * queries + first)
        do = int32(q + queries * D * 2)
        line = int32(shared.lines + stage * 8 * queries + 4 * (first + own_column(at)))
        rows_times(parts.s, by_rows(k), by_rows(q))
        dk_before(parts.dk)  # the step before has read its operands
        rows_times(parts.dp, by_rows(v), by_rows(do))
        left = int32(-1)
        if before >= 0:
            left = leave(shared.ring, before, warps)
        s_done(parts.s)
        if row < key + 63:
            forbid_earlier(parts.s, count, row, key, at)
        forbid_foreign(parts.s, count, row, limits, at)
        to_values(parts, do, line, scale)
        if left == warps - 1 and refill:
            fill_queries(shared.ring, shared.lines, before, source, later, queries, D)
        to_keys(parts, q, int32(line + 4 * queries))

    return multiply


def over_nothing(D: int, warps: int, queries: int) -> Callable:
    """A step with a tile whose queries all come before this warpgroup's keys."""
    all_done = product_done(D)

    def skip(
        parts: KeyParts, k: int, v: int, shared: KeyShared, source: Queries, stage: int,
        tile: int, before: int, later: Cursor, refill: bool, key: int, limits: Limits,
        scale: float, at: Place,
    ) -> None:  # fmt: skip
        """Stage `before` is left, and gets tile `later`."""
        all_done(parts.dk)
        if before >= 0 and leave(shared.ring, before, warps) == warps - 1 and refill:
            fill_queries(shared.ring, shared.lines, before, source, later, queries, D)

    return skip


def over_queries(D: int, warps: int, queries: int, stages: int) -> Callable:
    """The loop of `dkdv_kernel`, in a block of `warps` warps, `queries` a step."""
    whole, dk_done = over_tile(D, warps, queries, 0), product_done(D)
    early = over_tile(D, warps, queries, 64) if queries > 64 else over_nothing(D, warps, queries)

    def loop(
        parts: KeyParts, k: int, v: int, shared: KeyShared, source: Queries, head: int,
        steps: int, key: int, limits: Limits, scale: float, at: Place,
    ) -> None:  # fmt: skip
        """dv += p^T do, dk += ds^T q. k, v: this warpgroup's tiles; head: the group's first."""
        now, later = Cursor(head, source.first), ahead(source, head, stages)
        step, before, stage, phase = int32(0), int32(-1), int32(0), int32(0)
        while True:  # at least once, and the compiler must know it
            mbarrier_wait(full_of(shared.ring, stage), phase)
            more, t = step - 1 + stages < steps, now.tile
            if key - t * queries >= 64:  # its first 64 queries come before all keys
                early(
                    parts, k, v, shared, source, stage, t, before, later, more, key, limits,
                    scale, at,
                )  # fmt: skip
            else:
                whole(
                    parts, k, v, shared, source, stage, t, before, later, more, key, limits,
                    scale, at,
                )  # fmt: skip
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
    heads = divide(steps, tiles)
    return Cursor(int32(head + heads), int32(source.first + steps - heads * tiles))


def key_start(
    shared: KeyShared, source: Queries, k: Heads, v: Heads, key: int, head: int, steps: int,
    groups: int, queries: int, stages: int, D: int, at: Place,
) -> None:  # fmt: skip
    """Barriers; keys, values and the first stages on their way."""
    if at.thread == 0:
        mbarrier_init(shared.full, int32(1))
        start_ring(shared.ring, stages)
        mbarrier_init_fence()
        fetch_rows(k, v, key, shared.k, groups, D, shared.full)
        now = Cursor(head, source.first)
        for i in range(min(int32(stages), steps)):
            fill_queries(shared.ring, shared.lines, int32(i), source, now, queries, D)
            now = next_of(source, now)
    cuda.syncthreads()  # nobody waits at a barrier that is not there yet


STAGES = 3  # of queries and what belongs to them, in `dkdv_kernel`


def step_queries(D: int) -> int:
    """How many queries a step of `dkdv_kernel` has."""
    return 128 if D == 64 else 64


class KeyArguments(NamedTuple):
    """Arguments of `dkdv_kernel`: maps, memory, numbers, tables of angles, last queries."""

    map_q: int
    map_k: int
    map_v: int
    map_do: int
    map_dk: int
    map_dv: int
    lse: int
    delta: int
    T: int
    heads: int
    sharing: int
    scale: float
    root: float
    cos: int
    sin: int
    limit: Limit


def last_tile(T: int, queries: int, rows: int, key: int, batch: int, limit: Limit) -> int:
    """The end of the tiles of queries that a block of keys, `key` on, goes through."""
    end = int32((T + queries - 1) // queries)
    if limit.on:
        end = int32(limit_of(limit, batch, int32(key + rows - 1)) // queries + 1)
    return end


def dkdv_body(form: Form) -> Callable:
    """What a block of `dkdv_kernel` does."""
    D, groups, queries, stages = form.D, form.groups, step_queries(form.D), STAGES
    rows, warps, half, tile_half = 64 * groups, 4 * groups, D // 2, queries // 2
    packed = queries // 8 if D == 64 else queries // 4
    loop, turn_back = over_queries(D, warps, queries, stages), make_turn_back(D, form.turned)

    def block_of_keys(x: KeyArguments) -> None:
        prefetch_maps(x.map_q, x.map_k, x.map_v, x.map_do)
        at, number, key = place(), block_head(), int32(cuda.blockIdx.y * rows)
        kv_heads = divide(x.heads, x.sharing)
        batch = divide(number, kv_heads)
        kv = int32(number - batch * kv_heads)
        first, end = int32(key // queries), last_tile(x.T, queries, rows, key, batch, x.limit)
        steps, head = int32((end - first) * x.sharing), int32(kv * x.sharing)
        start, line = int32(batch * x.heads), round_up(x.T, PAD)
        source = Queries(x.map_q, x.map_do, x.lse, x.delta, batch, start, line, first, end)
        shared = key_shared(D, rows, queries, stages)
        k_of, v_of = Heads(x.map_k, batch, kv), Heads(x.map_v, batch, kv)
        key_start(shared, source, k_of, v_of, key, head, steps, groups, queries, stages, D, at)
        parts = KeyParts(
            cuda.local.array(tile_half, float32), cuda.local.array(tile_half, float32),
            cuda.local.array(packed, int32), cuda.local.array(packed, int32),
            cuda.local.array(half, float32), cuda.local.array(half, float32),
        )  # fmt: skip
        clear(parts.dk, half)
        clear(parts.dv, half)
        row, size = int32(key + at.group * 64), 64 * D * 2
        k, v = int32(shared.k + at.group * size), int32(shared.v + at.group * size)
        limits = limits_of(x.limit, batch, row, row)
        mbarrier_wait(shared.full, int32(0))
        loop(parts, k, v, shared, source, head, steps, row, limits, x.scale, at)
        turn_back(parts.dk, x.cos, x.sin, row, x.T, at)
        save_rows(parts.dk, x.root, Heads(x.map_dk, batch, kv), row, k, D, at)
        save_rows(parts.dv, float32(1), Heads(x.map_dv, batch, kv), row, v, D, at)

    return block_of_keys


@functools.cache
def dkdv_kernel(form: Form) -> Kernel:
    """dk and dv. last: an int32 for each key, read if the form is `limited`."""
    body, limited, threads = dkdv_body(form), form.limited, 128 * form.groups

    def dkdv(
        map_q, map_k, map_v, map_do, map_dk, map_dv, lse, delta, T, heads, sharing, scale, root,
        cos, sin, last,
    ):  # fmt: skip
        x = KeyArguments(
            map_q, map_k, map_v, map_do, map_dk, map_dv, lse, delta, T, heads, sharing, scale,
            root, cos, sin, Limit(limited, last, T),
        )  # fmt: skip
        body(x)

    shared = key_bytes(form.D, 64 * form.groups, step_queries(form.D), STAGES)
    return Kernel(dkdv, "l l l l l l l l r r r f f l l l", threads, shared)
