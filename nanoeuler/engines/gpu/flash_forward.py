# Made from book/08b-flash-on-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-tensor-forward
"""Causal attention, forward, on Hopper's tensor cores: bf16, head width 64 or 128, any T.

Left out: launching (flash_plan.py), widths other than 64 and 128, masks other than causal.

T positions, D head width. s scores, p probabilities not yet divided by their sum, o output.
"""

from typing import Any, NamedTuple

from nanoeuler.engines.gpu.flash_layout import LOWEST, PAD, PAST_END, clear, quad_sum, round_up
from nanoeuler.engines.gpu.flash_parts import (
    BOX,
    Heads,
    Place,
    QueryBlock,
    Ring,
    advance,
    by_columns,
    by_rows,
    fetch,
    forbid_later,
    full_of,
    hand_over,
    key_row,
    leave,
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
from nanoeuler.engines.gpu.hopper import (
    add_product,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    product_done,
    product_of_rows,
    set_registers,
)
from nanoeuler.engines.gpu.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.kernel import Kernel
from nanoeuler.engines.gpu.ptx import (
    barrier,
    barrier_arrive,
    exp2,
    larger,
    log2,
    pack_bf16,
    reciprocal,
    shuffle_xor,
    store_float,
)

QUERIES = 128  # of a block, 64 to each of two warpgroups
KEYS = 128     # of a step
HALF = KEYS // 2
ARGUMENTS = "l l l l l r r r f"  # maps of q, k, v, o; lse; T, heads, sharing; scale


class Rows(NamedTuple):
    """A thread's part of two queries: output so far; for each row its running maximum, its
    sum of exponentials over this lane's keys, and the factor of the last correction.
    """

    o: Any
    m: Any
    total: Any
    alpha: Any


def start_rows(rows: Rows, D: int) -> None:
    """Nothing has been seen."""
    clear(rows.o, D // 2)
    clear(rows.total, 2)
    for h in range(2):
        rows.m[h] = float32(LOWEST)


def raise_maxima(s: Any, keys: int, rows: Rows, scale: float) -> None:
    """m becomes the largest score so far, `total` follows, alpha is what o still has to follow.

    Two chains of comparisons for each row, then the three other lanes that share it.
    """
    m, alpha = rows.m, rows.alpha
    a0, a1, b0, b1 = m[0], m[1], float32(LOWEST), float32(LOWEST)
    for i in range(0, keys // 2, 8):
        a0 = larger(a0, larger(s[i], s[i + 1]))
        a1 = larger(a1, larger(s[i + 2], s[i + 3]))
        b0 = larger(b0, larger(s[i + 4], s[i + 5]))
        b1 = larger(b1, larger(s[i + 6], s[i + 7]))
    a0, a1 = larger(a0, b0), larger(a1, b1)
    a0, a1 = larger(a0, shuffle_xor(a0, int32(1))), larger(a1, shuffle_xor(a1, int32(1)))
    a0, a1 = larger(a0, shuffle_xor(a0, int32(2))), larger(a1, shuffle_xor(a1, int32(2)))
    alpha[0], alpha[1] = exp2((m[0] - a0) * scale), exp2((m[1] - a1) * scale)
    m[0], m[1] = a0, a1
    rows.total[0] *= alpha[0]
    rows.total[1] *= alpha[1]


def exponentials(s: Any, first: int, last: int, rows: Rows, scale: float) -> None:
    """The scores of keys first .. last - 1 become exp2((s - m) scale), summed into `total`."""
    z0, z1 = rows.m[0] * scale, rows.m[1] * scale
    sum0, sum1 = float32(0), float32(0)
    for i in range(first // 2, last // 2, 4):
        s[i], s[i + 1] = exp2(s[i] * scale - z0), exp2(s[i + 1] * scale - z0)
        s[i + 2], s[i + 3] = exp2(s[i + 2] * scale - z1), exp2(s[i + 3] * scale - z1)
        sum0 += s[i] + s[i + 1]
        sum1 += s[i + 2] + s[i + 3]
    rows.total[0] += sum0
    rows.total[1] += sum1


def pack_keys(s: Any, first: int, last: int, p: Any) -> None:
    """Keys first .. last - 1 of an accumulator in pairs: p, the left operand of a product."""
    for i in range((last - first) // 4):
        p[i] = pack_bf16(s[first // 2 + 2 * i], s[first // 2 + 2 * i + 1])


def correct(rows: Rows, D: int) -> None:
    """o under the old maximum becomes o under the new one."""
    o, alpha = rows.o, rows.alpha
    for i in range(0, D // 2, 4):
        o[i] *= alpha[0]
        o[i + 1] *= alpha[0]
        o[i + 2] *= alpha[1]
        o[i + 3] *= alpha[1]


def save_lse(lse: int, number: int, T: int, row: int, rows: Rows, scale: float, at: Place) -> None:
    """`total` over all lanes, and lse = m scale + log2(total) of this warpgroup's 64 rows."""
    for h in range(2):
        rows.total[h] = quad_sum(rows.total[h])
        if at.lane & 3 == 0:
            t = int32(row + own_row(at) + 8 * h)
            value = float32(PAST_END)
            if t < T:
                value = rows.m[h] * scale + log2(rows.total[h])
            store_float(lse + 4 * (int64(number) * round_up(T, PAD) + t), value)


def save_output(rows: Rows, to: Heads, row: int, tile: int, D: int, at: Place) -> None:
    """o divided by `total`, through this warpgroup's tile of queries to memory."""
    above, below = reciprocal(rows.total[0]), reciprocal(rows.total[1])
    warpgroup_sync(at)  # every warp has read the queries that are overwritten now
    stage_out(rows.o, above, below, tile, D, at)
    hand_over(at)
    if at.thread & 127 == 0:
        put(to, row, tile, D)
        put_done()


class Shared(NamedTuple):
    """A block's shared memory: tiles of queries, their mbarrier, rings of keys and of values."""

    q: int
    q_full: int
    k: Ring
    v: Ring


def shared_memory(D: int, stages: int) -> Shared:
    """Queries, keys, values, then the barriers; `shared_bytes` of it."""
    q = shared_base()
    size, bars = int32(KEYS * D * 2), int32(q + (QUERIES + 2 * stages * KEYS) * D * 2)
    k = Ring(int32(q + QUERIES * D * 2), size, int32(bars + 8), int32(bars + 8 + 16 * stages))
    v_tiles = int32(k.tiles + stages * size)
    v = Ring(v_tiles, size, int32(k.full + 8 * stages), int32(k.left + 8 * stages))
    return Shared(q, bars, k, v)


def shared_bytes(D: int, stages: int) -> int:
    """The bytes of `shared_memory`: tiles, a barrier for the queries, two words for each stage."""
    return (QUERIES + 2 * stages * KEYS) * D * 2 + 8 + 32 * stages


def fill(ring: Ring, stage: int, heads: Heads, row: int, D: int) -> None:
    """One thread: start filling a stage with KEYS keys or values from `row` on."""
    mbarrier_expect(full_of(ring, stage), ring.size)
    fetch(heads, row, tile_of(ring, stage), KEYS, D, full_of(ring, stage))


def fetch_queries(heads: Heads, first: int, shared: Shared, D: int) -> None:
    """One thread: start filling the two tiles of queries, one to a warpgroup."""
    mbarrier_expect(shared.q_full, int32(QUERIES * D * 2))
    for group in range(2):
        tile = int32(shared.q + group * 64 * D * 2)
        fetch(heads, int32(first + 64 * group), tile, 64, D, shared.q_full)


# %% sec-flash-tensor-narrow
STAGES = 3               # of keys and of values: two blocks fill an SM's shared memory
WARPS = 8                # of a block, which all leave a stage before it is filled again

# q k^T of a step's keys, and its end
scores, scores_done = product_of_rows(KEYS, 64), product_done(KEYS)
# the same for half of the keys
half_scores, half_scores_done = product_of_rows(HALF, 64), product_done(HALF)
# o += p v over half of the keys, and the end of all that adds to o
add_half, narrow_done = add_product(64, HALF), product_done(64)


def weigh_first(s: Any, p: Any, rows: Rows, v: int, scale: float) -> None:
    """The first half of the keys: exponentials, and o += p v on its way."""
    exponentials(s, 0, HALF, rows, scale)
    pack_keys(s, 0, HALF, p)
    add_half(rows.o, p, by_columns(v, KEYS))


def weigh_second(s: Any, p: Any, rows: Rows, v: int, scale: float) -> None:
    """The second half: its exponentials beside the first half's product; then o is there."""
    exponentials(s, HALF, KEYS, rows, scale)
    pack_keys(s, HALF, KEYS, p)
    add_half(rows.o, p, by_columns(int32(v + HALF * 128), KEYS))
    narrow_done(rows.o)


class Scores(NamedTuple):
    """Registers of a thread for one tile: scores, and both halves packed as operands."""

    s: Any
    p: Any
    p2: Any


def diagonal(
    tile: Scores, rows: Rows, q: int, shared: Shared, row: int, key: int, scale: float, at: Place
) -> int:
    """The tile on the diagonal, the only one with a mask. Returns what `leave` says of its keys.

    The second half of its keys comes after all rows of the first warpgroup, which leaves it out.
    """
    s, k, v = tile.s, shared.k, shared.v
    left = int32(0)
    if at.group == 0:
        half_scores(s, by_rows(q), by_rows(k.tiles))
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


def earlier(
    tile: Scores, rows: Rows, q: int, shared: Shared, k_of: Heads, v_of: Heads, block: QueryBlock,
    scale: float,
) -> None:  # fmt: skip
    """The tiles before the diagonal, where every query sees every key, the latest first.

    A stage that the last warp has left is filled for three steps later. The thread learns early
    that it is its turn, and copies late, when waiting for the atomic costs nothing.
    """
    s, k, v, last = tile.s, shared.k, shared.v, WARPS - 1
    left_v = leave(v, 0, WARPS)
    before, stage, phase = int32(0), int32(1), int32(0)
    for step in range(1, block.steps):
        mbarrier_wait(full_of(k, stage), phase)
        scores(s, by_rows(q), by_rows(tile_of(k, stage)))
        if left_v == last and step - 1 + STAGES < block.steps:
            fill(v, before, v_of, key_row(block, step - 1 + STAGES, KEYS), 64)
        scores_done(s)
        left_k = leave(k, stage, WARPS)
        raise_maxima(s, KEYS, rows, scale)
        if left_k == last and step + STAGES < block.steps:
            fill(k, stage, k_of, key_row(block, step + STAGES, KEYS), 64)
        correct(rows, 64)
        mbarrier_wait(full_of(v, stage), phase)
        weigh_first(s, tile.p, rows, tile_of(v, stage), scale)
        weigh_second(s, tile.p2, rows, tile_of(v, stage), scale)
        left_v = leave(v, stage, WARPS)
        before = stage
        stage, phase = advance(stage, phase, STAGES)


def start(shared: Shared, block: QueryBlock, q: Heads, k: Heads, v: Heads, at: Place) -> None:
    """Barriers, then the queries and the first stages on their way."""
    if at.thread == 0:
        mbarrier_init(shared.q_full, int32(1))
        start_ring(shared.k, STAGES)
        start_ring(shared.v, STAGES)
        mbarrier_init_fence()
    cuda.syncthreads()  # nobody waits at a barrier that is not there yet
    if at.thread == 0:
        fetch_queries(q, block.first, shared, 64)
        for i in range(min(int32(STAGES), block.steps)):
            fill(shared.k, int32(i), k, key_row(block, i, KEYS), 64)
            fill(shared.v, int32(i), v, key_row(block, i, KEYS), 64)


def narrow_registers() -> tuple[Scores, Rows]:
    """The arrays of a thread that live in registers."""
    s = cuda.local.array(64, float32)
    p, p2 = cuda.local.array(16, int32), cuda.local.array(16, int32)
    o, m = cuda.local.array(32, float32), cuda.local.array(2, float32)
    total, alpha = cuda.local.array(2, float32), cuda.local.array(2, float32)
    return Scores(s, p, p2), Rows(o, m, total, alpha)


def narrow_forward(map_q, map_k, map_v, map_o, lse, T, heads, sharing, scale):
    """o and lse for D = 64."""
    prefetch_maps(map_q, map_k, map_v, map_o)
    at, block = place(), query_block(T, heads, sharing, QUERIES, KEYS)
    q, o = Heads(map_q, block.batch, block.head), Heads(map_o, block.batch, block.head)
    k, v = Heads(map_k, block.batch, block.kv), Heads(map_v, block.batch, block.kv)
    shared = shared_memory(64, STAGES)
    row, q_tile = int32(block.first + at.group * 64), int32(shared.q + at.group * BOX)
    # 1. Start the copies.
    start(shared, block, q, k, v, at)
    tile, rows = narrow_registers()
    start_rows(rows, 64)
    mbarrier_wait(shared.q_full, int32(0))
    mbarrier_wait(shared.k.full, int32(0))
    # 2. The tile on the diagonal.
    left = diagonal(tile, rows, q_tile, shared, row, key_row(block, 0, KEYS), scale, at)
    if left == WARPS - 1 and STAGES < block.steps:
        fill(shared.k, int32(0), k, key_row(block, STAGES, KEYS), 64)
    # 3. The tiles before it.
    earlier(tile, rows, q_tile, shared, k, v, block, scale)
    # 4. Out.
    save_lse(lse, block.number, T, row, rows, scale, at)
    save_output(rows, o, row, q_tile, 64, at)


# Two blocks on an SM leave each thread 128 registers, and no KiB for rounding `shared_base` up: a
# kernel without static shared memory, as a test holds it to be, has its dynamic memory at a
# multiple of 1024, behind the KiB that the system keeps for itself.
NARROW = Kernel(narrow_forward, ARGUMENTS, 256, shared_bytes(64, STAGES), resident=2)


# %% sec-flash-tensor-wide
WIDE_STAGES = 2          # of keys and of values
PRODUCER = 2             # the warpgroup that copies, after the two that multiply
FIRST_TURN = 3           # named barriers 3 and 4: whose turn it is to issue products

# q k^T of a step's keys, and its end
wide_scores, wide_scores_done = product_of_rows(KEYS, 128), product_done(KEYS)
# o += p v
wide_add, wide_done = add_product(128, KEYS), product_done(128)
scores_first = product_done(KEYS, 1)  # the scores are there, o += p v may still be in flight
fewer_registers, more_registers = set_registers(24, False), set_registers(240, True)


def produce(shared: Shared, block: QueryBlock, q: Heads, k: Heads, v: Heads) -> None:
    """One thread of the producer: every tile, as soon as all 8 warps have left its stage."""
    fetch_queries(q, block.first, shared, 128)
    stage, phase = int32(0), int32(0)
    for step in range(block.steps):
        row = key_row(block, step, KEYS)
        mbarrier_wait(int32(shared.k.left + 8 * stage), int32(phase ^ 1))
        fill(shared.k, stage, k, row, 128)
        mbarrier_wait(int32(shared.v.left + 8 * stage), int32(phase ^ 1))
        fill(shared.v, stage, v, row, 128)
        stage, phase = advance(stage, phase, WIDE_STAGES)


def hand_back(ring: Ring, stage: int, at: Place) -> None:
    """This warp has left a stage: one of 8 arrivals that the producer waits for."""
    if at.lane == 0:
        mbarrier_arrive(int32(ring.left + 8 * stage))


def take_turns(
    tile: Scores, rows: Rows, q: int, shared: Shared, block: QueryBlock, scale: float, at: Place
) -> None:
    """All tiles after the first one's scores, and its own last product.

    In every step one warpgroup issues the next tile's scores and this tile's product, passes the
    turn on, and computes exponentials while the other one issues.
    """
    s, p, k, v = tile.s, tile.p, shared.k, shared.v
    stage, phase = int32(0), int32(0)
    for _ in range(1, block.steps):
        v_stage, v_phase = stage, phase
        stage, phase = advance(stage, phase, WIDE_STAGES)
        mbarrier_wait(full_of(k, stage), phase)
        barrier(int32(FIRST_TURN + at.group), int32(256))
        wide_scores(s, by_rows(q), by_rows(tile_of(k, stage)))
        mbarrier_wait(full_of(v, v_stage), v_phase)
        wide_add(rows.o, p, by_columns(tile_of(v, v_stage), KEYS))
        barrier_arrive(int32(FIRST_TURN + 1 - at.group), int32(256))
        scores_first(s)
        hand_back(k, stage, at)
        raise_maxima(s, KEYS, rows, scale)
        exponentials(s, 0, KEYS, rows, scale)
        wide_done(rows.o)  # only now may o be corrected, and p be written
        hand_back(v, v_stage, at)
        correct(rows, 128)
        pack_keys(s, 0, KEYS, p)
    mbarrier_wait(full_of(v, stage), phase)
    wide_add(rows.o, p, by_columns(tile_of(v, stage), KEYS))
    wide_done(rows.o)


def wide_start(shared: Shared, at: Place) -> None:
    """Barriers: one arrival fills a stage, one of each of 8 warps hands it back."""
    if at.thread == 0:
        mbarrier_init(shared.q_full, int32(1))
        for i in range(WIDE_STAGES):
            mbarrier_init(full_of(shared.k, i), int32(1))
            mbarrier_init(full_of(shared.v, i), int32(1))
            mbarrier_init(int32(shared.k.left + 8 * i), int32(WARPS))
            mbarrier_init(int32(shared.v.left + 8 * i), int32(WARPS))
        mbarrier_init_fence()
    cuda.syncthreads()  # nobody waits at a barrier that is not there yet


def wide_registers() -> tuple[Scores, Rows]:
    """The arrays of a thread that live in registers; there is one p."""
    s, p = cuda.local.array(64, float32), cuda.local.array(32, int32)
    o, m = cuda.local.array(64, float32), cuda.local.array(2, float32)
    total, alpha = cuda.local.array(2, float32), cuda.local.array(2, float32)
    return Scores(s, p, p), Rows(o, m, total, alpha)


def first_tile(
    tile: Scores, rows: Rows, q: int, shared: Shared, row: int, key: int, scale: float, at: Place
) -> None:
    """Probabilities of the tile on the diagonal."""
    mbarrier_wait(shared.q_full, int32(0))
    if at.group == 1:
        barrier_arrive(int32(FIRST_TURN), int32(256))  # the first turn is warpgroup 0's
    mbarrier_wait(shared.k.full, int32(0))
    wide_scores(tile.s, by_rows(q), by_rows(shared.k.tiles))
    wide_scores_done(tile.s)
    hand_back(shared.k, 0, at)
    forbid_later(tile.s, KEYS, key, row, at)
    raise_maxima(tile.s, KEYS, rows, scale)
    exponentials(tile.s, 0, KEYS, rows, scale)
    pack_keys(tile.s, 0, KEYS, tile.p)


def wide_forward(map_q, map_k, map_v, map_o, lse, T, heads, sharing, scale):
    """o and lse for D = 128."""
    prefetch_maps(map_q, map_k, map_v, map_o)
    at, block = place(), query_block(T, heads, sharing, QUERIES, KEYS)
    q, o = Heads(map_q, block.batch, block.head), Heads(map_o, block.batch, block.head)
    k, v = Heads(map_k, block.batch, block.kv), Heads(map_v, block.batch, block.kv)
    shared = shared_memory(128, WIDE_STAGES)
    wide_start(shared, at)
    if at.group == PRODUCER:
        fewer_registers()
        if at.thread == PRODUCER * 128:
            produce(shared, block, q, k, v)
    else:
        more_registers()
        row, q_tile = int32(block.first + at.group * 64), int32(shared.q + at.group * 2 * BOX)
        tile, rows = wide_registers()
        start_rows(rows, 128)
        first_tile(tile, rows, q_tile, shared, row, key_row(block, 0, KEYS), scale, at)
        take_turns(tile, rows, q_tile, shared, block, scale, at)
        save_lse(lse, block.number, T, row, rows, scale, at)
        save_output(rows, o, row, q_tile, 128, at)


# The producer's registers go to the others: 168 for each thread become 24, 240 and 240.
WIDE = Kernel(wide_forward, ARGUMENTS, 384, shared_bytes(128, WIDE_STAGES) + 1024)
