# Made from book/12c-attention-in-pieces.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-pieces-forward
"""Causal attention of float32 arrays, forward, by mma.sync (8.0 on) on pieces of bf16, any T.

D is 32, 64 or 128; pieces: 2 (to 2^-15) or 3 (as float32). Left out: launches, other masks.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from nanoeuler.engines.gpu.attention.float32_parts import (
    Form,
    Fragments,
    columns_product,
    cutter,
    fetcher,
    pad_line,
    put_sums,
    rows_product,
)
from nanoeuler.engines.gpu.attention.layout import PAD, PAST_END, Limit, round_up
from nanoeuler.engines.gpu.attention.mma_forward import (
    Half,
    correct,
    new_half,
    raise_maximum,
    save_lines,
)
from nanoeuler.engines.gpu.attention.mma_parts import (
    EVERY_CARD,
    Head,
    Limits,
    Strided,
    forbid_later,
    forbid_others,
    head_of,
    left,
    own_column,
    own_row,
    own_warp,
    right,
    shared_base,
    steps_from,
)
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.engines.gpu.lang.ptx import divide, exp2, reciprocal


def exponentials(half: Half, keys: int, scale: float) -> None:
    """Scores become exp2(s scale - m), and are summed."""
    s, total, above, below = half.s, half.total, half.m[0], half.m[1]
    for i in range(0, keys // 2, 4):
        s[i], s[i + 1] = exp2(s[i] * scale - above), exp2(s[i + 1] * scale - above)
        s[i + 2], s[i + 3] = exp2(s[i + 2] * scale - below), exp2(s[i + 3] * scale - below)
        total[0] += s[i] + s[i + 1]
        total[1] += s[i + 2] + s[i + 3]


def over_keys(form: Form) -> Callable:
    """A step of the forward kernel: one tile of keys and values."""
    D, keys, values = form.D, form.step, form.size * form.pieces
    rows_times, add_columns = rows_product(form), columns_product(form)

    def step(
        half: Half, by: Fragments, q: int, tile: int, ahead: int, row: int, limits: Limits,
        scale: float,
    ) -> None:  # fmt: skip
        """o += p v. q: address of A; tile: of keys, values follow.

        ahead: from the tile's first key to this warp's first query, which is `row`.
        """
        rows_times(half.s, by, q, int32(tile + right(D)))
        if ahead < keys:
            forbid_later(half.s, keys, int32(ahead + own_row() - own_column()))
        forbid_others(half.s, keys, int32(row - ahead), row, limits)
        raise_maximum(half, scale, keys)
        correct(half, D)
        exponentials(half, keys, scale)
        add_columns(half.o, by, half.s, int32(tile + values + left(D)))

    return step


class Work(NamedTuple):
    """What a block works on: keys and values of T rows; its first query, and what limits it."""

    k: Head
    v: Head
    T: int
    first: int
    limits: Limits


def loop_of(form: Form) -> Callable:
    """All steps of a block."""
    D, keys, own = form.D, form.step, form.own * form.pieces
    cut, step = cutter(form, keys), over_keys(form)

    def loop(half: Half, by: Fragments, queries: int, work: Work, scale: float) -> None:
        """From the diagonal down. queries: the address of their tile; a step's tiles follow it."""
        tile = int32(queries + own)
        row = int32(work.first + own_warp() * 16)
        q = int32(queries + own_warp() * 32 * D + left(D))
        end = int32((min(work.T, int32(work.first + 16 * form.warps)) + keys - 1) // keys)
        for i in range(steps_from(end, work.first, work.limits, keys)):
            key = int32((end - 1 - i) * keys)
            cuda.syncthreads()  # all have left the tiles
            cut(tile, work.k, work.v, key, work.T)
            cuda.syncthreads()  # all pieces are there
            if row - key > -16:  # or else all its keys come after all queries of this warp
                step(half, by, q, tile, int32(row - key), row, work.limits, scale)

    return loop


# Four arrays with their steps, lse; T, heads, sharing; scale; the first keys seen.
ARGUMENTS = " ".join(["l"] * 17 + ["r"] * 3 + ["f", "l"])


def forward_block(form: Form) -> Callable:
    """What a block of `forward_kernel` does."""
    D, rows, loop, most = form.D, 16 * form.warps, loop_of(form), max(form.columns, form.step) // 4
    half, wide, part = form.step // 2, D // 2, form.columns // 2
    fetch, settle, each, parts = fetcher(form, rows)
    held = 8 * each

    def block(
        q: Strided, k: Strided, v: Strided, o: Strided, lse: int, T: int, heads: int,
        sharing: int, scale: float, limit: Limit,
    ) -> None:  # fmt: skip
        number = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        batch = divide(number, heads)
        head = int32(number - batch * heads)
        kv, first = divide(head, sharing), int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * rows)
        # 2. Queries.
        tile, values = shared_base(), cuda.local.array(held, float32)
        of_q = head_of(q, batch, head)
        for i in range(parts):
            fetch(values, i, of_q, first, T)
            settle(values, i, tile)
        # 3. All steps.
        x = Half(
            cuda.local.array(half, float32), cuda.local.array(4, int32),
            cuda.local.array(wide, float32), cuda.local.array(2, float32),
            cuda.local.array(2, float32), cuda.local.array(2, float32),
        )  # fmt: skip
        by = Fragments(
            cuda.local.array(4, int32), cuda.local.array(4, int32), cuda.local.array(4, int32),
            cuda.local.array(most, int32), cuda.local.array(part, float32),
        )  # fmt: skip
        new_half(x, D)
        of_k, of_v = head_of(k, batch, kv), head_of(v, batch, kv)
        loop(x, by, tile, Work(of_k, of_v, T, first, Limits(limit, batch)), scale)
        # 4. Out.
        row = int32(first + own_warp() * 16)
        line = lse + 4 * (int64(number) * round_up(T, PAD))
        save_lines(x, line, row, T)
        pad_line(line, int32(first + rows), T, float32(PAST_END), 2 * rows)
        to, above, below = head_of(o, batch, head), reciprocal(x.total[0]), reciprocal(x.total[1])
        put_sums(x.o, 0, above, below, to, row, T, D)

    return block


@functools.cache
def forward_kernel(form: Form) -> Kernel:
    """o and lse. Grid: (heads at a time, tiles of queries, rounds), the last tile first.

    first: an int32 for each query, read if the form is `limited`.
    """
    block, threads, limited = forward_block(form), 32 * form.warps, form.limited

    def flash_pieces(
        q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row,
        o, o_batch, o_head, o_row, lse, T, heads, sharing, scale, first,
    ):  # fmt: skip
        of_q, of_k = Strided(q, q_batch, q_head, q_row), Strided(k, k_batch, k_head, k_row)
        of_v, of_o = Strided(v, v_batch, v_head, v_row), Strided(o, o_batch, o_head, o_row)
        limit = Limit(limited, first, T)
        block(of_q, of_k, of_v, of_o, lse, T, heads, sharing, scale, limit)

    shared = (form.own + 2 * form.size) * form.pieces
    rest = {"resident": form.resident, "target": EVERY_CARD}
    return Kernel(flash_pieces, ARGUMENTS, threads, shared, **rest)
