# Made from book/12a-flash-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-mma-forward
"""Causal attention, forward, on the tensor cores of every card since 8.0: mma.sync, any T.

bf16, head width D = 32, 64 or 128. Left out: launching (flash_mma_plan.py), other masks.

A block has four warps and 128 queries: rows 16 w to 16 w + 15 of each half are warp w's, so that
all warps have the same work on the diagonal. Keys come 64 at a step, the latest first.
T positions, D head width. s scores, p probabilities not yet divided by their sum, o output.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention.layout import (
    LOWEST,
    PAD,
    PAST_END,
    Limit,
    clear,
    quad_sum,
    round_up,
)

# isort: split


from nanoeuler.engines.gpu.attention.mma_parts import (
    EVERY_CARD,
    Head,
    Limits,
    Strided,
    beside,
    copy_pair,
    copy_rows,
    forbid_later,
    forbid_others,
    head_of,
    left,
    load_left,
    load_rows,
    own_column,
    own_lane,
    own_row,
    own_thread,
    put_rows,
    right,
    share,
    shared_base,
    stage_rows,
    steps_from,
)

# isort: split


from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.engines.gpu.lang.ptx import (
    again,
    copy_commit,
    copy_wait,
    divide,
    exp2,
    larger,
    ldmatrix_across,
    load_shared_float2,
    log2,
    mma_tile,
    pack_bf16,
    reciprocal,
    shuffle_xor,
    store_float,
    store_shared_float2,
    zeros,
)

WARPS = 4          # of a block: two blocks of 255 registers a thread fill the register file
THREADS = 32 * WARPS  # of a block
HALF = 16 * WARPS  # queries of each half of a block, 16 to each warp
QUERIES = 2 * HALF
KEYS = 64          # of a step


class Half(NamedTuple):
    """A thread's part of two queries of one half of a block, 8 rows apart: scores of a step, then
    probabilities; an operand; output so far; for each row its running maximum, scaled, its sum of
    exponentials over this lane's keys, and the factor of the last correction.
    """

    s: Any
    a: Any
    o: Any
    m: Any
    total: Any
    alpha: Any


def raise_maximum(half: Half, scale: float, keys: int = KEYS) -> None:
    """m becomes the largest score so far, `total` follows, alpha is what o still has to follow.

    Two chains of comparisons for each row, then the three other lanes that share it.
    """
    lowest, s, m, alpha = float32(LOWEST), half.s, half.m, half.alpha
    a0, a1, b0, b1 = lowest, lowest, lowest, lowest
    for i in range(0, keys // 2, 8):
        a0 = larger(a0, larger(s[i], s[i + 1]))
        a1 = larger(a1, larger(s[i + 2], s[i + 3]))
        b0 = larger(b0, larger(s[i + 4], s[i + 5]))
        b1 = larger(b1, larger(s[i + 6], s[i + 7]))
    a0, a1 = larger(a0, b0), larger(a1, b1)
    a0, a1 = larger(a0, shuffle_xor(a0, int32(1))), larger(a1, shuffle_xor(a1, int32(1)))
    a0, a1 = larger(a0, shuffle_xor(a0, int32(2))), larger(a1, shuffle_xor(a1, int32(2)))
    a0, a1 = larger(m[0], a0 * scale), larger(m[1], a1 * scale)
    alpha[0], alpha[1] = exp2(m[0] - a0), exp2(m[1] - a1)
    m[0], m[1] = a0, a1
    half.total[0] *= alpha[0]
    half.total[1] *= alpha[1]


def correct(half: Half, D: int) -> None:
    """o under the old maximum becomes o under the new one."""
    o, alpha = half.o, half.alpha
    for i in range(0, D // 2, 4):
        o[i] *= alpha[0]
        o[i + 1] *= alpha[0]
        o[i + 2] *= alpha[1]
        o[i + 3] *= alpha[1]


def exponentials(half: Half, k: int, scale: float) -> None:
    """Scores of keys 16 k to 16 k + 15 become exp2(s scale - m), summed, and packed into a."""
    s, a, total = half.s, half.a, half.total
    above, below = half.m[0], half.m[1]
    for j in range(2):
        i = 8 * k + 4 * j
        s[i], s[i + 1] = exp2(s[i] * scale - above), exp2(s[i + 1] * scale - above)
        s[i + 2], s[i + 3] = exp2(s[i + 2] * scale - below), exp2(s[i + 3] * scale - below)
        total[0] += s[i] + s[i + 1]
        total[1] += s[i + 2] + s[i + 3]
        a[2 * j], a[2 * j + 1] = pack_bf16(s[i], s[i + 1]), pack_bf16(s[i + 2], s[i + 3])


class Form(NamedTuple):
    """A form of the forward kernel: head width; stages of keys and values in shared memory; blocks
    of a multiprocessor that registers must suffice for; whether sums wait in shared memory from
    step to step, because registers do not suffice; whether more than the diagonal limits what is
    seen.
    """

    D: int
    stages: int
    resident: int
    park: bool = False
    limited: bool = False


class Registers(NamedTuple):
    """A thread's registers: both halves, and B of a product."""

    low: Half
    high: Half
    b: Any


def scores(form: Form) -> Callable:
    """s = q k^T of a step, for both halves or for the second."""
    D = form.D
    multiply, part = mma_tile(16, KEYS), KEYS // 2
    clear = zeros(part)

    def both(x: Registers, q_tile: int, k_tile: int) -> None:
        clear(x.low.s)
        clear(x.high.s)
        q_tile = again(q_tile)  # or else all addresses of A would stay in registers
        for i in range(D // 16):
            load_left(x.low.a, 0, beside(q_tile, i))
            load_left(x.high.a, 0, int32(beside(q_tile, i) + HALF * 2 * D))
            load_rows(x.b, beside(k_tile, i), KEYS, D)
            multiply(x.low.s, x.low.a, x.b)
            multiply(x.high.s, x.high.a, x.b)

    def second(x: Registers, q_tile: int, k_tile: int) -> None:
        clear(x.high.s)
        for i in range(D // 16):
            load_left(x.high.a, 0, int32(beside(q_tile, i) + HALF * 2 * D))
            load_rows(x.b, beside(k_tile, i), KEYS, D)
            multiply(x.high.s, x.high.a, x.b)

    return both, second


def park(x: Registers, lot: int) -> None:
    """Leave both halves' sums, and maxima of one, in this thread's places of a lot."""
    to = int32(lot + 8 * own_thread())
    store_shared_float2(to, x.low.total[0], x.low.total[1])
    store_shared_float2(int32(to + 8 * THREADS), x.high.total[0], x.high.total[1])
    store_shared_float2(int32(to + 16 * THREADS), x.low.m[0], x.low.m[1])


def unpark(x: Registers, lot: int) -> None:
    """They are needed again."""
    here = int32(lot + 8 * own_thread())
    x.low.total[0], x.low.total[1] = load_shared_float2(here)
    x.high.total[0], x.high.total[1] = load_shared_float2(int32(here + 8 * THREADS))
    x.low.m[0], x.low.m[1] = load_shared_float2(int32(here + 16 * THREADS))


def own_distance() -> int:
    """On the diagonal: from this lane's first key to the last that its upper query sees."""
    return int32((own_thread() >> 5) * 16 + own_row() - own_column())


class Work(NamedTuple):
    """What a block works on: keys and values of T rows, `end` tiles of them up to the diagonal; its
    first query, and what limits it.
    """

    k: Head
    v: Head
    T: int
    end: int
    first: int
    limits: Limits


def steps_of(form: Form) -> tuple[Callable, Callable]:
    """A step of the forward kernel on one tile of keys and values, which are there."""
    D = form.D
    both, second = scores(form)
    multiply, load = mma_tile(16, D), ldmatrix_across(D // 16)

    def whole(
        x: Registers, queries: int, k_tile: int, lot: int, masked: bool, work: Work, key: int,
        scale: float,
    ) -> None:  # fmt: skip
        """o += p v for both halves. masked: whether the first half is on the diagonal."""
        q_tile = int32(queries + (own_thread() >> 5) * 32 * D + left(D))
        both(x, q_tile, int32(k_tile + right(D)))
        if masked:
            forbid_later(x.low.s, KEYS, own_distance())
        if work.limits.limit.on:
            row = int32(work.first + (own_thread() >> 5) * 16)
            forbid_others(x.low.s, KEYS, key, row, work.limits)
            forbid_others(x.high.s, KEYS, key, int32(row + HALF), work.limits)
        if form.park:
            unpark(x, lot)
        raise_maximum(x.low, scale)
        correct(x.low, D)
        raise_maximum(x.high, scale)
        correct(x.high, D)
        v_tile = int32(k_tile + KEYS * D * 2 + left(D))
        for k in range(KEYS // 16):
            exponentials(x.low, k, scale)
            exponentials(x.high, k, scale)
            load(x.b, int32(v_tile + k * 32 * D))
            multiply(x.low.o, x.low.a, x.b)
            multiply(x.high.o, x.high.a, x.b)
        if form.park:
            park(x, lot)

    def diagonal(
        x: Registers, queries: int, k_tile: int, work: Work, key: int, scale: float
    ) -> None:
        """o += p v for the second half, whose first step it is, on the diagonal."""
        q_tile = int32(queries + (own_thread() >> 5) * 32 * D + left(D))
        second(x, q_tile, int32(k_tile + right(D)))
        forbid_later(x.high.s, KEYS, own_distance())
        if work.limits.limit.on:
            row = int32(work.first + HALF + (own_thread() >> 5) * 16)
            forbid_others(x.high.s, KEYS, key, row, work.limits)
        raise_maximum(x.high, scale)
        v_tile = int32(k_tile + KEYS * D * 2 + left(D))
        for k in range(KEYS // 16):
            exponentials(x.high, k, scale)
            load(x.b, int32(v_tile + k * 32 * D))
            multiply(x.high.o, x.high.a, x.b)

    return whole, diagonal


def loop_of(form: Form) -> Callable:
    """All steps of a block."""
    D, stages = form.D, form.stages
    size = 2 * KEYS * D * 2
    whole, diagonal = steps_of(form)
    here = copy_wait(stages - 2)

    def fill(tiles: int, work: Work, step: int, steps: int, whole: bool) -> None:
        """Start copying a step's keys and values to its stage, if there is such a step: a group."""
        if step < steps:
            row = int32((work.end - 1 - step) * KEYS)
            to = int32(tiles + step % stages * size)
            copy_pair(to, work.k, work.v, row, KEYS, work.T, D, THREADS, whole)
        copy_commit()

    def loop(x: Registers, queries: int, work: Work, steps: int, scale: float) -> None:
        """From the diagonal down. queries: their tile; the stages follow it.

        The first group of copies is not committed yet.
        """
        tiles = int32(queries + QUERIES * D * 2)
        lot = int32(tiles + stages * size)
        for i in range(stages - 1):
            fill(tiles, work, int32(i), steps, False)
        here()
        cuda.syncthreads()
        fill(tiles, work, int32(stages - 1), steps, False)
        diagonal(x, queries, tiles, work, int32((work.end - 1) * KEYS), scale)
        if form.park:
            park(x, lot)
        for i in range(1, steps):
            here()  # this thread's copies of this step
            cuda.syncthreads()  # everybody's; and all have left the stage that is filled next
            fill(tiles, work, int32(i + stages - 1), steps, True)
            tile, key = int32(tiles + i % stages * size), int32((work.end - 1 - i) * KEYS)
            whole(x, queries, tile, lot, i == 1, work, key, scale)

    return loop


def save_lines(half: Half, line: int, row: int, T: int) -> None:
    """`total` over all lanes, and lse = m + log2(total) of 16 rows, `row` on.

    line: the address of the head's. Rows past T get what hides them.
    """
    for j in range(2):
        half.total[j] = quad_sum(half.total[j])
        if own_lane() & 3 == 0:
            t = int32(row + own_row() + 8 * j)
            value = float32(PAST_END)
            if t < T:
                value = half.m[j] + log2(half.total[j])
            store_float(line + 4 * int64(t), value)


def save_output(half: Half, out: Head, tile: int, row: int, T: int, D: int) -> None:
    """o divided by `total`, through 16 rows of queries that are this warp's, to memory."""
    stage_rows(half.o, reciprocal(half.total[0]), reciprocal(half.total[1]), tile, D)
    put_rows(tile, out, row, T, D)


def save(
    x: Registers, lse: int, o: Strided, of: tuple, tile: int, first: int, T: int, D: int
) -> None:
    """lse and o of a block's queries, `first` on. of: the head, its sequence, its number there."""
    number, batch, head = of
    warp = int32(own_thread() >> 5)
    own, row = int32(tile + warp * 32 * D), int32(first + 16 * warp)
    line, to = lse + 4 * (int64(number) * round_up(T, PAD)), head_of(o, batch, head)
    save_lines(x.low, line, row, T)
    save_lines(x.high, line, int32(row + HALF), T)
    save_output(x.low, to, own, row, T, D)
    save_output(x.high, to, int32(own + HALF * 2 * D), int32(row + HALF), T, D)


def new_half(half: Half, D: int) -> None:
    """Nothing has been seen."""
    clear(half.o, D // 2)
    clear(half.total, 2)
    half.m[0] = half.m[1] = float32(LOWEST)


# Four arrays with their steps, lse; T, heads, sharing; scale; the first keys seen.
ARGUMENTS = " ".join(["l"] * 17 + ["r"] * 3 + ["f", "l"])


def shared_bytes(form: Form) -> int:
    """Queries, then stages of keys and of values, then room to park."""
    return (QUERIES + 2 * form.stages * KEYS) * form.D * 2 + 24 * THREADS * form.park


def forward_block(form: Form) -> Callable:
    """What a block of `forward_kernel` does."""
    D, loop = form.D, loop_of(form)
    wide, part, most = D // 2, KEYS // 2, max(D, KEYS) // 4

    def block(
        q: Strided, k: Strided, v: Strided, o: Strided, lse: int, T: int, heads: int,
        sharing: int, scale: float, limit: Limit,
    ) -> None:  # fmt: skip
        number = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        batch = divide(number, heads)
        head = int32(number - batch * heads)
        first = int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * QUERIES)
        kv, last = divide(head, sharing), int32(first + HALF)
        # 2. Start the copies: queries here, keys and values in the loop.
        of_q, tile = head_of(q, batch, head), shared_base()
        copy_rows(tile, of_q, first, QUERIES, T, D, THREADS, False, share(D))
        of_k, of_v = head_of(k, batch, kv), head_of(v, batch, kv)
        # 3. All steps.
        x = Registers(
            Half(
                cuda.local.array(part, float32), cuda.local.array(4, int32),
                cuda.local.array(wide, float32), cuda.local.array(2, float32),
                cuda.local.array(2, float32), cuda.local.array(2, float32),
            ),
            Half(
                cuda.local.array(part, float32), cuda.local.array(4, int32),
                cuda.local.array(wide, float32), cuda.local.array(2, float32),
                cuda.local.array(2, float32), cuda.local.array(2, float32),
            ),
            cuda.local.array(most, int32),
        )  # fmt: skip
        new_half(x.low, D)
        new_half(x.high, D)
        end = int32(last // KEYS + 1)
        work = Work(of_k, of_v, T, end, first, Limits(limit, batch))
        loop(x, tile, work, steps_from(end, first, work.limits, KEYS), scale)
        # 4. Out.
        save(x, lse, o, (number, batch, head), tile, first, T, D)

    return block


@functools.cache
def forward_kernel(form: Form) -> Kernel:
    """o and lse. Grid: (heads at a time, tiles of queries, rounds), the last tile first.

    first: an int32 for each query, read if the form is `limited`.
    """
    block, shared, limited = forward_block(form), shared_bytes(form), form.limited

    def flash_mma(
        q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row,
        o, o_batch, o_head, o_row, lse, T, heads, sharing, scale, first,
    ):  # fmt: skip
        of_q, of_k = Strided(q, q_batch, q_head, q_row), Strided(k, k_batch, k_head, k_row)
        of_v, of_o = Strided(v, v_batch, v_head, v_row), Strided(o, o_batch, o_head, o_row)
        limit = Limit(limited, first, T)
        block(of_q, of_k, of_v, of_o, lse, T, heads, sharing, scale, limit)

    rest = {"resident": form.resident, "target": EVERY_CARD}
    return Kernel(flash_mma, ARGUMENTS, THREADS, shared, **rest)
