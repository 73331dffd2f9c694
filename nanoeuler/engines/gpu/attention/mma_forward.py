# Made from book/l-attention-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-mma-forward
"""Causal attention, forward, on the tensor cores of every card since 8.0: mma.sync, any T.

Head width D = 32, 64 or 128. Left out: launching (mma_launch.py), other masks.

A block has four warps. Of bf16 it has 128 queries: rows 16 w to 16 w + 15 of each half are warp
w's, so that all warps have the same work on the diagonal. Of other operands it has the first half.
T positions. s scores, p probabilities not yet divided by their sum, o output.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention import mma_parts as mma
from nanoeuler.engines.gpu.attention import softmax
from nanoeuler.engines.gpu.attention.layout import (
    LOWEST,
    PAD,
    PAST_END,
    Head,
    Limit,
    Sizes,
    quad_maxima,
    round_up,
)
from nanoeuler.engines.gpu.attention.operands import Form
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel

WARPS = 4          # of a block: two blocks of 255 registers a thread fill the register file
THREADS = 32 * WARPS  # of a block
HALF = 16 * WARPS  # queries of each half of a block, 16 to each warp
QUERIES = 2 * HALF
KEYS = 64          # of a step


class Half(NamedTuple):
    """A thread's part of two queries of one half of a block, 8 rows apart: scores of a step, then
    probabilities; an operand; the softmax, its maxima scaled.
    """

    s: Any
    a: Any
    rows: softmax.Rows


def make_half(keys: int, D: int) -> Callable:
    """new_half(): registers of a half that has seen nothing."""
    part, wide = keys // 2, D // 2

    def new_half() -> Half:
        rows = softmax.Rows(
            cuda.local.array(wide, float32), cuda.local.array(2, float32),
            cuda.local.array(2, float32), cuda.local.array(2, float32),
        )  # fmt: skip
        softmax.start_rows(rows, D)
        return Half(cuda.local.array(part, float32), cuda.local.array(4, int32), rows)

    return new_half


def raise_maximum(half: Half, scale: float, keys: int) -> None:
    """m becomes the largest score so far; o has to follow by alpha."""
    lowest, m = float32(LOWEST), half.rows.m
    above, below = softmax.lane_maxima(half.s, keys, lowest, lowest)
    above, below = quad_maxima(above, below)
    above, below = ptx.larger(m[0], above * scale), ptx.larger(m[1], below * scale)
    softmax.follow(half.rows, above, below, float32(1))


def weigh(half: Half, of: softmax.Span, scale: float) -> None:
    """Scores of some keys become exponentials, and are summed."""
    m, total = half.rows.m, half.rows.total
    sums = softmax.exponentials(half.s, of, (m[0], m[1]), (total[0], total[1]), scale)
    total[0], total[1] = sums


def weigh_operand(half: Half, k: int, scale: float) -> None:
    """The same of keys 16 k to 16 k + 15, and packed."""
    weigh(half, softmax.Span(16 * k, 16), scale)
    softmax.pack(half.s, softmax.Span(16 * k, 16), half.a)


class Registers(NamedTuple):
    """A thread's registers: both halves, and B of a product."""

    low: Half
    high: Half
    b: Any


def scores(form: Form) -> Callable:
    """s = q k^T of a step, for both halves or for the second."""
    D = form.D
    multiply, part = ptx.mma_tile(16, KEYS), KEYS // 2
    clear = ptx.zeros(part)

    def both(x: Registers, q_tile: int, k_tile: int) -> None:
        clear(x.low.s)
        clear(x.high.s)
        q_tile = ptx.again(q_tile)  # or else all addresses of A would stay in registers
        for i in range(D // 16):
            mma.load_left(x.low.a, 0, mma.beside(q_tile, i))
            mma.load_left(x.high.a, 0, int32(mma.beside(q_tile, i) + HALF * 2 * D))
            mma.load_rows(x.b, mma.beside(k_tile, i), KEYS, D)
            multiply(x.low.s, x.low.a, x.b)
            multiply(x.high.s, x.high.a, x.b)

    def second(x: Registers, q_tile: int, k_tile: int) -> None:
        clear(x.high.s)
        for i in range(D // 16):
            mma.load_left(x.high.a, 0, int32(mma.beside(q_tile, i) + HALF * 2 * D))
            mma.load_rows(x.b, mma.beside(k_tile, i), KEYS, D)
            multiply(x.high.s, x.high.a, x.b)

    return both, second


def park(x: Registers, lot: int) -> None:
    """Leave both halves' sums, and maxima of one, in this thread's places of a lot."""
    to, low, high = int32(lot + 8 * mma.own_thread()), x.low.rows, x.high.rows
    ptx.store_shared_float2(to, low.total[0], low.total[1])
    ptx.store_shared_float2(int32(to + 8 * THREADS), high.total[0], high.total[1])
    ptx.store_shared_float2(int32(to + 16 * THREADS), low.m[0], low.m[1])


def unpark(x: Registers, lot: int) -> None:
    """They are needed again."""
    here, low, high = int32(lot + 8 * mma.own_thread()), x.low.rows, x.high.rows
    low.total[0], low.total[1] = ptx.load_shared_float2(here)
    high.total[0], high.total[1] = ptx.load_shared_float2(int32(here + 8 * THREADS))
    low.m[0], low.m[1] = ptx.load_shared_float2(int32(here + 16 * THREADS))


def own_distance() -> int:
    """On the diagonal: from this lane's first key to the last that its upper query sees."""
    return int32((mma.own_thread() >> 5) * 16 + mma.own_row() - mma.own_column())


class Keys(NamedTuple):
    """The keys and values that a block loops over: T rows, `end` tiles of them up to the diagonal;
    its first query, and what limits it.
    """

    k: Head
    v: Head
    T: int
    end: int
    first: int
    limits: mma.Limits


class Tiles(NamedTuple):
    """Addresses of a step in shared memory: queries, keys with values behind them, and what
    is parked.
    """

    queries: int
    keys: int
    lot: int


def steps_of(form: Form) -> tuple[Callable, Callable]:
    """A step of both halves on one tile of keys and values, which are there; and the first step."""
    D, parked = form.D, form.park
    both, second = scores(form)
    multiply, load = ptx.mma_tile(16, D), ptx.ldmatrix_across(D // 16)

    def whole(
        x: Registers, at: Tiles, masked: bool, work: Keys, key: int, scale: float
    ) -> None:
        """o += p v for both halves. masked: whether the first half is on the diagonal."""
        q_tile = int32(at.queries + (mma.own_thread() >> 5) * 32 * D + mma.left(D))
        both(x, q_tile, int32(at.keys + mma.right(D)))
        if masked:
            mma.forbid_later(x.low.s, KEYS, own_distance())
        if work.limits.limit.on:
            row = int32(work.first + (mma.own_thread() >> 5) * 16)
            mma.forbid_others(x.low.s, KEYS, key, row, work.limits)
            mma.forbid_others(x.high.s, KEYS, key, int32(row + HALF), work.limits)
        if parked:
            unpark(x, at.lot)
        raise_maximum(x.low, scale, KEYS)
        softmax.correct(x.low.rows, D)
        raise_maximum(x.high, scale, KEYS)
        softmax.correct(x.high.rows, D)
        v_tile = int32(at.keys + KEYS * D * 2 + mma.left(D))
        for k in range(KEYS // 16):
            weigh_operand(x.low, k, scale)
            weigh_operand(x.high, k, scale)
            load(x.b, int32(v_tile + k * 32 * D))
            multiply(x.low.rows.o, x.low.a, x.b)
            multiply(x.high.rows.o, x.high.a, x.b)
        if parked:
            park(x, at.lot)

    def diagonal(x: Registers, at: Tiles, work: Keys, key: int, scale: float) -> None:
        """o += p v for the second half, whose first step it is, on the diagonal."""
        q_tile = int32(at.queries + (mma.own_thread() >> 5) * 32 * D + mma.left(D))
        second(x, q_tile, int32(at.keys + mma.right(D)))
        mma.forbid_later(x.high.s, KEYS, own_distance())
        if work.limits.limit.on:
            row = int32(work.first + HALF + (mma.own_thread() >> 5) * 16)
            mma.forbid_others(x.high.s, KEYS, key, row, work.limits)
        raise_maximum(x.high, scale, KEYS)
        v_tile = int32(at.keys + KEYS * D * 2 + mma.left(D))
        for k in range(KEYS // 16):
            weigh_operand(x.high, k, scale)
            load(x.b, int32(v_tile + k * 32 * D))
            multiply(x.high.rows.o, x.high.a, x.b)

    return whole, diagonal


def make_halves_loop(form: Form) -> Callable:
    """All steps of a block."""
    D, stages, size, parked = form.D, form.stages, 2 * form.size, form.park
    whole, diagonal = steps_of(form)
    here, copy = ptx.copy_wait(stages - 2), mma.make_copy(D, KEYS, THREADS)

    def fill(tiles: int, work: Keys, step: int, steps: int, there: bool) -> None:
        """Start copying a step's keys and values to its stage, if there is such a step: a group."""
        if step < steps:
            row, of = int32((work.end - 1 - step) * KEYS), mma.share(D)
            to = int32(tiles + step % stages * size)
            copy(to, work.k, row, work.T, of, there)
            copy(int32(to + size // 2), work.v, row, work.T, of, there)
        ptx.copy_commit()

    def loop(x: Registers, queries: int, work: Keys, steps: int, scale: float) -> None:
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
        diagonal(x, Tiles(queries, tiles, lot), work, int32((work.end - 1) * KEYS), scale)
        if parked:
            park(x, lot)
        for i in range(1, steps):
            here()  # this thread's copies of this step
            cuda.syncthreads()  # everybody's; and all have left the stage that is filled next
            fill(tiles, work, int32(i + stages - 1), steps, True)
            at = Tiles(queries, int32(tiles + i % stages * size), lot)
            whole(x, at, i == 1, work, int32((work.end - 1 - i) * KEYS), scale)

    return loop


def make_save_half(form: Form) -> Callable:
    """save_half(half, line, to, tile, row, T): lse and o of 16 rows."""
    save = form.operands.save(form)

    def save_half(half: Half, line: int, to: Head, tile: int, row: int, T: int) -> None:
        """Rows `row` on, o divided by `total`. line: the head's lse; tile: rows of this warp's."""
        rows = half.rows
        softmax.save_lse(rows, line, int32(row + mma.own_row()), mma.own_lane(), T, float32(1))
        save(rows.o, ptx.reciprocal(rows.total[0]), ptx.reciprocal(rows.total[1]), tile, to, row, T)

    return save_half


def halves_block(form: Form) -> Callable:
    """The work of a block of `forward_kernel`, if a warp has two halves."""
    D, loop, save_half = form.D, make_halves_loop(form), make_save_half(form)
    copy, most = mma.make_copy(D, QUERIES, THREADS), max(D, KEYS) // 4
    new_half = make_half(KEYS, D)

    def block(arrays: tuple, lse: int, sizes: Sizes) -> None:
        q, k, v, o = arrays
        T, at = sizes.T, mma.query_block(sizes, QUERIES)
        tile, first, last = mma.shared_base(), at.first, int32(at.first + HALF)
        # 2. Start the copies: queries here, keys and values in the loop.
        copy(tile, mma.head_of(q, at.batch, at.head), first, T, mma.share(D), False)
        of_k, of_v = mma.head_of(k, at.batch, at.kv), mma.head_of(v, at.batch, at.kv)
        # 3. All steps.
        x = Registers(new_half(), new_half(), cuda.local.array(most, int32))
        end, limits = int32(last // KEYS + 1), mma.Limits(sizes.limit, at.batch)
        steps = mma.steps_from(end, first, limits, KEYS)
        loop(x, tile, Keys(of_k, of_v, T, end, first, limits), steps, sizes.scale)
        # 4. Out.
        line = lse + 4 * (int64(at.number) * round_up(T, PAD))
        to = mma.head_of(o, at.batch, at.head)
        warp = int32(mma.own_thread() >> 5)
        own, row = int32(tile + warp * 32 * D), int32(first + 16 * warp)
        save_half(x.low, line, to, own, row, T)
        save_half(x.high, line, to, int32(own + HALF * 2 * D), int32(row + HALF), T)

    return block


class Where(NamedTuple):
    """Where a step's tile lies beside a warp: how far its first column is before the warp's first
    row, which is `row`; and what limits that and the next 15.
    """

    ahead: int
    row: int
    limits: mma.Limits


def make_key_loop(form: Form, step: Callable) -> Callable:
    """All steps of a block of queries, 16 to a warp; step(parts, own, tile, where, scale) is one.
    """
    D, keys, stages, size = form.D, form.step, form.stages, 2 * form.size
    _, load_pair = form.operands.loads(form, keys)
    here, commit = form.operands.wait(stages), form.operands.commit

    def fill(tiles: int, work: Keys, step: int, steps: int) -> None:
        """Load a step's keys and values to its stage, if there is such a step: a group."""
        if step < steps:
            row = int32((work.end - 1 - step) * keys)
            load_pair(int32(tiles + step % stages * size), work.k, work.v, row, work.T)
        commit()

    def loop(parts: Any, queries: int, tiles: int, work: Keys, scale: float) -> None:
        """From the diagonal down. queries: the tile of the block's own; tiles: the stages. The
        first group of copies is not committed yet.
        """
        row = int32(work.first + mma.own_warp() * 16)
        own = int32(queries + mma.own_warp() * 32 * D + mma.left(D))
        steps = mma.steps_from(work.end, work.first, work.limits, keys)
        for i in range(stages - 1):
            fill(tiles, work, int32(i), steps)
        for i in range(steps):
            here()  # this thread's copies of this step
            cuda.syncthreads()  # everybody's; and all have left the stage that is filled next
            fill(tiles, work, int32(i + stages - 1), steps)
            ahead = int32(row - (work.end - 1 - i) * keys)
            if ahead > -16:  # or else all its keys come after all queries of this warp
                where = Where(ahead, row, work.limits)
                step(parts, own, int32(tiles + i % stages * size), where, scale)

    return loop


class Single(NamedTuple):
    """A thread's registers, if a warp has 16 queries: its half, and operands."""

    half: Half
    by: Any


def over_keys(form: Form) -> Callable:
    """A step of one half: one tile of keys and values."""
    D, keys, size = form.D, form.step, form.size
    rows_times = form.operands.rows_product(form)

    def weighed(x: tuple, of: softmax.Span) -> None:
        weigh(x[0], of, x[1])

    add_columns = form.operands.columns_product(form, weighed)

    def step(x: Single, q: int, tile: int, where: Where, scale: float) -> None:
        """o += p v. q: address of A; tile: of keys, values follow."""
        half, ahead = x.half, where.ahead
        rows_times(half.s, x.by, q, int32(tile + mma.right(D)))
        if ahead < keys:
            mma.forbid_later(half.s, keys, int32(ahead + mma.own_row() - mma.own_column()))
        mma.forbid_others(half.s, keys, int32(where.row - ahead), where.row, where.limits)
        raise_maximum(half, scale, keys)
        softmax.correct(half.rows, D)
        add_columns(half.rows.o, x.by, half.s, int32(tile + size + mma.left(D)), (half, scale))

    return step


def single_block(form: Form) -> Callable:
    """The work of a block of `forward_kernel`, if a warp has 16 queries."""
    D, rows, keys, own, threads = form.D, 16 * form.warps, form.step, form.own, 32 * form.warps
    load, _ = form.operands.loads(form, rows)
    fragments, loop = form.operands.fragments(form), make_key_loop(form, over_keys(form))
    save_half, new_half = make_save_half(form), make_half(form.step, D)

    def block(arrays: tuple, lse: int, sizes: Sizes) -> None:
        q, k, v, o = arrays
        T, at, tile = sizes.T, mma.query_block(sizes, rows), mma.shared_base()
        # 2. Queries.
        load(tile, mma.head_of(q, at.batch, at.head), at.first, T)
        # 3. All steps.
        x = Single(new_half(), fragments())
        of_k, of_v = mma.head_of(k, at.batch, at.kv), mma.head_of(v, at.batch, at.kv)
        end = int32((min(T, int32(at.first + rows)) + keys - 1) // keys)
        work = Keys(of_k, of_v, T, end, at.first, mma.Limits(sizes.limit, at.batch))
        loop(x, tile, int32(tile + own), work, sizes.scale)
        # 4. Out.
        row, line = int32(at.first + mma.own_warp() * 16), 4 * (int64(at.number) * round_up(T, PAD))
        to, mine = mma.head_of(o, at.batch, at.head), int32(tile + mma.own_warp() * 32 * D)
        save_half(x.half, lse + line, to, mine, row, T)
        after = int32(at.first + rows)
        softmax.pad_line(lse + line, after, T, float32(PAST_END), mma.own_thread(), threads)

    return block


# Four arrays with their steps, lse; T, heads, sharing; scale; the first keys seen.
ARGUMENTS = " ".join(["l"] * 17 + ["r"] * 3 + ["f", "l"])


def queries_of(form: Form) -> int:
    """Queries of a block, forward."""
    return 16 * form.warps * form.operands.halves


class Numbers(NamedTuple):
    """Those fields of `Sizes` that are arguments of a forward launch."""

    T: int
    heads: int
    sharing: int
    scale: float


@functools.cache
def forward_kernel(form: Form) -> Kernel:
    """o and lse. Grid: (heads at a time, tiles of queries, rounds), the last tile first.

    first: the address of an int32 for each query, read if the form is `limited`.
    """
    block = halves_block(form) if form.operands.halves == 2 else single_block(form)
    threads, limited = 32 * form.warps, form.limited

    def flash_mma(
        q: mma.Strided, k: mma.Strided, v: mma.Strided, o: mma.Strided, lse, given: Numbers, first
    ):
        T, heads, sharing, scale = given
        sizes = Sizes(T, heads, sharing, scale, scale, Limit(limited, first, T))
        block((q, k, v, o), lse, sizes)

    shared = form.own * form.operands.halves + 2 * form.stages * form.size
    shared += 24 * threads * form.park  # what waits there
    return Kernel(
        flash_mma, ARGUMENTS, threads, shared, resident=form.resident, target=mma.EVERY_CARD
    )
