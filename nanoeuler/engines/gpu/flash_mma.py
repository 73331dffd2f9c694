# Made from book/08a-flash-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


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

from nanoeuler.engines.gpu.flash_layout import (
    LOWEST,
    PAD,
    PAST_END,
    clear,
    quad_sum,
    round_up,
)
from nanoeuler.engines.gpu.flash_mma_parts import (
    EVERY_CARD,
    Head,
    Lanes,
    Place,
    Share,
    beside,
    copy_rows,
    forbid_later,
    head_of,
    lanes,
    load_left,
    multiply,
    own_column,
    own_row,
    place,
    put_rows,
    share,
    shared_base,
    source_of,
    stage_rows,
)
from nanoeuler.engines.gpu.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.kernel import Kernel
from nanoeuler.engines.gpu.ptx import (
    again,
    copy_commit,
    copy_wait,
    exp2,
    larger,
    ldmatrix4,
    ldmatrix4_turned,
    log2,
    pack_bf16,
    reciprocal,
    shuffle_xor,
    store_float,
)

WARPS = 4
THREADS = 32 * WARPS
HALF = 16 * WARPS  # queries of each half of a block, 16 to each warp
QUERIES = 2 * HALF
KEYS = 64          # of a step


class Rows(NamedTuple):
    """A thread's part of four queries, two in each half of the block: output so far; for each
    row its running maximum, its sum of exponentials over this lane's keys, and the factor of the
    last correction. Row 2 h + 1 is 8 below row 2 h.
    """

    o: Any
    m: Any
    total: Any
    alpha: Any


def raise_maximum(s: Any, h: int, first: int, count: int, rows: Rows, scale: float) -> None:
    """Of half h: m becomes the largest score so far, `total` follows, alpha is for o to follow.

    s[first .. first + count - 1] are its scores. Two chains of comparisons for each row, then the
    three other lanes that share it.
    """
    m, alpha = rows.m, rows.alpha
    a0, a1, b0, b1 = m[2 * h], m[2 * h + 1], float32(LOWEST), float32(LOWEST)
    for i in range(first, first + count, 8):
        a0 = larger(a0, larger(s[i], s[i + 1]))
        a1 = larger(a1, larger(s[i + 2], s[i + 3]))
        b0 = larger(b0, larger(s[i + 4], s[i + 5]))
        b1 = larger(b1, larger(s[i + 6], s[i + 7]))
    a0, a1 = larger(a0, b0), larger(a1, b1)
    a0, a1 = larger(a0, shuffle_xor(a0, int32(1))), larger(a1, shuffle_xor(a1, int32(1)))
    a0, a1 = larger(a0, shuffle_xor(a0, int32(2))), larger(a1, shuffle_xor(a1, int32(2)))
    alpha[2 * h] = exp2((m[2 * h] - a0) * scale)
    alpha[2 * h + 1] = exp2((m[2 * h + 1] - a1) * scale)
    m[2 * h], m[2 * h + 1] = a0, a1
    rows.total[2 * h] *= alpha[2 * h]
    rows.total[2 * h + 1] *= alpha[2 * h + 1]


def exponentials(s: Any, h: int, first: int, count: int, rows: Rows, scale: float) -> None:
    """Scores of half h become exp2((s - m) scale), summed into `total`."""
    z0, z1 = rows.m[2 * h] * scale, rows.m[2 * h + 1] * scale
    sum0, sum1 = float32(0), float32(0)
    for i in range(first, first + count, 4):
        s[i], s[i + 1] = exp2(s[i] * scale - z0), exp2(s[i + 1] * scale - z0)
        s[i + 2], s[i + 3] = exp2(s[i + 2] * scale - z1), exp2(s[i + 3] * scale - z1)
        sum0 += s[i] + s[i + 1]
        sum1 += s[i + 2] + s[i + 3]
    rows.total[2 * h] += sum0
    rows.total[2 * h + 1] += sum1


def correct(rows: Rows, h: int, D: int) -> None:
    """o of half h under the old maximum becomes o under the new one."""
    o, above, below = rows.o, rows.alpha[2 * h], rows.alpha[2 * h + 1]
    for i in range(h * (D // 2), (h + 1) * (D // 2), 4):
        o[i] *= above
        o[i + 1] *= above
        o[i + 2] *= below
        o[i + 3] *= below


class Form(NamedTuple):
    """A form of the forward kernel: head width; stages of keys and values in shared memory; blocks
    of a multiprocessor that registers must suffice for; whether queries stay in registers.
    """

    D: int
    stages: int
    resident: int
    hold: bool


def products(form: Form) -> tuple[Callable, Callable]:
    """s = q k^T and o += p v of a step, for halves `low` to 1 of a block's queries."""
    D, hold = form.D, form.hold
    part, wide = KEYS // 2, D // 2  # registers of a half's scores, of its output

    def scores(s: Any, q: Any, low: int, q_tile: int, k_tile: int, at: Lanes) -> None:
        """s = q k^T; q: registers that hold queries, or pass them."""
        for i in range(low * part, 2 * part):
            s[i] = float32(0)
        q_at, k_at = again(int32(q_tile + at.left)), int32(k_tile + at.right)
        for i in range(D // 16):
            a = i * 8 if hold else 0
            if not hold:
                for h in range(low, 2):
                    load_left(q, 4 * h, int32(beside(q_at, i) + h * HALF * 2 * D))
            for n in range(KEYS // 16):
                b0, b1, b2, b3 = ldmatrix4(int32(beside(k_at, i) + n * 32 * D))
                for h in range(low, 2):
                    multiply(s, h * part + 8 * n, q, a + 4 * h, b0, b1)
                    multiply(s, h * part + 8 * n + 4, q, a + 4 * h, b2, b3)

    def weigh(s: Any, p: Any, low: int, rows: Rows, v_tile: int, scale: float, at: Lanes) -> None:
        """Scores become probabilities, 16 keys at a time, and o += p v."""
        v_at = int32(v_tile + at.left)
        for k in range(KEYS // 16):
            for h in range(low, 2):
                i = h * part + 8 * k
                exponentials(s, h, i, 8, rows, scale)
                for j in range(4):
                    p[4 * h + j] = pack_bf16(s[i + 2 * j], s[i + 2 * j + 1])
            for n in range(D // 16):
                b0, b1, b2, b3 = ldmatrix4_turned(int32(beside(v_at, n) + k * 32 * D))
                for h in range(low, 2):
                    multiply(rows.o, h * wide + 8 * n, p, 4 * h, b0, b1)
                    multiply(rows.o, h * wide + 8 * n + 4, p, 4 * h, b2, b3)

    return scores, weigh


class Tiles(NamedTuple):
    """A block's shared memory, as addresses: queries, and stages of keys and then values."""

    q: int
    stages: int


def shared_bytes(form: Form) -> int:
    """The bytes of `Tiles`, with room to begin at a multiple of 256."""
    return (QUERIES + 2 * form.stages * KEYS) * form.D * 2


class Keys(NamedTuple):
    """A block's keys and values on their way: what each step copies. k, v: this thread's share of
    the first step's; steps in bytes from row to row; first: the first key of the first step; T.
    """

    k: int
    k_step: int
    v: int
    v_step: int
    first: int
    T: int


def fills(form: Form) -> tuple[Callable, Callable]:
    """Copies of one step's keys, and of its values."""
    D, stages = form.D, form.stages
    size = KEYS * D * 2

    def fill_keys(tiles: Tiles, keys: Keys, step: int, whole: bool, of: Share) -> None:
        """Start copying a step's keys."""
        to = int32(tiles.stages + step % stages * (2 * size))
        left = int32(keys.T - keys.first + step * KEYS)
        source = int64(keys.k - int64(step) * (KEYS * keys.k_step))
        copy_rows(to, source, keys.k_step, KEYS, left, D, THREADS, whole, of)

    def fill_values(tiles: Tiles, keys: Keys, step: int, whole: bool, of: Share) -> None:
        """Start copying a step's values."""
        to = int32(tiles.stages + step % stages * (2 * size) + size)
        left = int32(keys.T - keys.first + step * KEYS)
        source = int64(keys.v - int64(step) * (KEYS * keys.v_step))
        copy_rows(to, source, keys.v_step, KEYS, left, D, THREADS, whole, of)

    return fill_keys, fill_values


def step_of(form: Form) -> Callable:
    """A step of the forward kernel on the tile of one step."""
    D = form.D
    part = KEYS // 2
    scores, weigh = products(form)
    values_there = copy_wait(form.stages - 1)

    def step(
        s: Any, q: Any, p: Any, rows: Rows, low: int, masked: int, tiles: Tiles, stage: int,
        late: bool, scale: float, of: Lanes, at: Place,
    ) -> None:  # fmt: skip
        """o += p v over one tile of keys, which is there, for halves `low` to 1.

        masked: the half on the diagonal, or -1. late: whether the values are still to be waited
        for.
        """
        k_tile = int32(tiles.stages + stage)
        scores(s, q, low, int32(tiles.q + at.warp * 16 * 2 * D), k_tile, of)
        if masked >= 0:
            own = int32(at.warp * 16 + own_row(at) - own_column(at))
            forbid_later(s, masked * part, KEYS, own)
        for h in range(low, 2):
            raise_maximum(s, h, h * part, part, rows, scale)
            correct(rows, h, D)
        if late:
            values_there()
            cuda.syncthreads()
        weigh(s, p, low, rows, int32(k_tile + KEYS * D * 2), scale, of)

    return step


def save_lines(
    lse: int, line: int, first: int, T: int, rows: Rows, scale: float, at: Place
) -> None:
    """`total` over all lanes, and lse = m scale + log2(total) of a block's rows.

    line: the number of values before this head's. Rows past T get what hides them.
    """
    for h in range(2):
        for j in range(2):
            i = 2 * h + j
            rows.total[i] = quad_sum(rows.total[i])
            if at.lane & 3 == 0:
                t = int32(first + h * HALF + at.warp * 16 + own_row(at) + 8 * j)
                value = float32(PAST_END)
                if t < T:
                    value = rows.m[i] * scale + log2(rows.total[i])
                store_float(lse + 4 * (int64(line) + t), value)


def loop_of(form: Form) -> Callable:
    """All steps of a block: two on the diagonal, one for each half, then those before it."""
    D, stages = form.D, form.stages
    size = 2 * KEYS * D * 2
    fill_keys, fill_values = fills(form)
    step = step_of(form)
    first_keys, here = copy_wait(stages - 1), copy_wait(stages - 2)

    def refill(tiles: Tiles, keys: Keys, step: int, steps: int, whole: bool, of: Share) -> None:
        """Start copying a step's keys and values, if there is such a step: a group."""
        if step < steps:
            fill_keys(tiles, keys, step, whole, of)
            fill_values(tiles, keys, step, whole, of)
        copy_commit()

    def loop(
        s: Any, q: Any, p: Any, rows: Rows, tiles: Tiles, queries: Head, keys: Keys, steps: int,
        scale: float, at: Place,
    ) -> None:  # fmt: skip
        """From the diagonal down; the copies run ahead."""
        of, mine = lanes(D, at), share(D, at, THREADS)
        row = int32(keys.first - HALF)
        left = int32(keys.T - row)
        source = source_of(queries, row, mine)
        copy_rows(tiles.q, source, queries.step, QUERIES, left, D, THREADS, False, mine)
        fill_keys(tiles, keys, int32(0), False, mine)
        copy_commit()
        fill_values(tiles, keys, int32(0), False, mine)
        copy_commit()
        for i in range(1, stages - 1):
            refill(tiles, keys, int32(i), steps, False, mine)
        first_keys()
        cuda.syncthreads()
        refill(tiles, keys, int32(stages - 1), steps, False, mine)
        hold_queries(q, tiles.q, form, of, at)
        step(s, q, p, rows, 1, 1, tiles, int32(0), True, scale, of, at)
        here()
        cuda.syncthreads()
        refill(tiles, keys, int32(stages), steps, True, mine)
        step(s, q, p, rows, 0, 0, tiles, int32(size), False, scale, of, at)
        for i in range(2, steps):
            here()  # this thread's copies of this step
            cuda.syncthreads()  # everybody's; and all have left the stage that is filled next
            refill(tiles, keys, int32(i + stages - 1), steps, True, mine)
            step(s, q, p, rows, 0, -1, tiles, int32(i % stages * size), False, scale, of, at)

    return loop


def hold_queries(q: Any, tile: int, form: Form, of: Lanes, at: Place) -> None:
    """All queries of this warp into registers, where the form keeps them there."""
    if form.hold:
        for i in range(form.D // 16):
            for h in range(2):
                row = int32(tile + (h * HALF + at.warp * 16) * 2 * form.D)
                load_left(q, i * 8 + 4 * h, beside(int32(row + of.left), i))


ARGUMENTS = "l l l l l l l l l l l l l l l l l r r r f"


@functools.cache
def forward_kernel(form: Form) -> Kernel:
    """o and lse. Grid: (heads at a time, tiles of queries, rounds)."""
    D = form.D
    kept = form.D // 16 * 8 if form.hold else 8
    wide = D
    loop = loop_of(form)

    def flash_mma(
        q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row,
        o, o_batch, o_head, o_row, lse, T, heads, sharing, scale,
    ):  # fmt: skip
        at = place()
        number = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        batch = int32(number // heads)
        head = int32(number - batch * heads)
        first = int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * QUERIES)
        kv = int32(head // sharing)
        queries = head_of(q, (q_batch, q_head, q_row), batch, head)
        keys = head_of(k, (k_batch, k_head, k_row), batch, kv)
        values = head_of(v, (v_batch, v_head, v_row), batch, kv)
        mine, last = share(D, at, THREADS), int32(first + HALF)
        stream = Keys(
            source_of(keys, last, mine), keys.step, source_of(values, last, mine), values.step,
            last, T,
        )  # fmt: skip
        steps = int32((first + QUERIES) // KEYS)
        q_tile = shared_base()
        tiles = Tiles(q_tile, int32(q_tile + QUERIES * D * 2))
        s, held, p = (
            cuda.local.array(KEYS, float32), cuda.local.array(kept, int32),
            cuda.local.array(8, int32),
        )  # fmt: skip
        rows = Rows(
            cuda.local.array(wide, float32), cuda.local.array(4, float32),
            cuda.local.array(4, float32), cuda.local.array(4, float32),
        )  # fmt: skip
        clear(rows.o, wide)
        clear(rows.total, 4)
        for i in range(4):
            rows.m[i] = float32(LOWEST)
        loop(s, held, p, rows, tiles, queries, stream, steps, scale, at)
        save_lines(lse, int32(number * round_up(T, PAD)), first, T, rows, scale, at)
        out = head_of(o, (o_batch, o_head, o_row), batch, head)
        save_output(rows, out, q_tile, first, T, D, at)

    return Kernel(
        flash_mma, ARGUMENTS, THREADS, shared_bytes(form), resident=form.resident, target=EVERY_CARD
    )


def save_output(rows: Rows, out: Head, tile: int, first: int, T: int, D: int, at: Place) -> None:
    """o divided by `total`, through this warp's own tiles of queries to memory."""
    for h in range(2):
        row = int32(h * HALF + at.warp * 16)
        own = int32(tile + row * 2 * D)
        above, below = reciprocal(rows.total[2 * h]), reciprocal(rows.total[2 * h + 1])
        stage_rows(rows.o, h * (D // 2), above, below, own, D, at)
        put_rows(own, out, int32(first + row), T, D, at)
