# Made from book/12c-attention-in-pieces.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-pieces-backward
"""Causal attention of float32 arrays, backward, by mma.sync on pieces of bf16, any T.

Two kernels, `dq_kernel` first, because it leaves delta for `dkdv_kernel`. Nothing is added in
global memory, so that the same inputs give the same bits. A warp owns 16 queries, or 16 keys.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention.layout import PAD, Limit, clear, quad_sum, round_up
from nanoeuler.engines.gpu.attention.mma_backward import (
    DKDV_ARGUMENTS,
    DQ_ARGUMENTS,
    Group,
    forbid_earlier,
    tiles_to,
)

# isort: split


from nanoeuler.engines.gpu.attention.mma_parts import (
    EVERY_CARD,
    Head,
    Limits,
    Strided,
    forbid_foreign,
    forbid_later,
    forbid_others,
    head_of,
    left,
    own_column,
    own_lane,
    own_row,
    own_thread,
    own_warp,
    right,
    shared_base,
    steps_from,
)

# isort: split


from nanoeuler.engines.gpu.attention.float32_parts import (
    Form,
    Fragments,
    columns_product,
    cutter,
    pad_line,
    put_sums,
    rows_product,
)
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.engines.gpu.lang.ptx import (
    divide,
    exp2,
    load_float,
    load_float4,
    load_shared_float2,
    store_float,
    store_shared_float4,
)


class QueryParts(NamedTuple):
    """A thread's part of a step of dq: scores, then probabilities, then ds; dp; operands; dq so
    far; lse and delta of its two queries.
    """

    s: Any
    dp: Any
    by: Fragments
    dq: Any
    lse: Any
    delta: Any


def quarter_dot(x: int, y: int, D: int) -> float:
    """The dot product of D / 4 float32 at each of two addresses: what a lane has of a row."""
    total = float32(0)
    for i in range(D // 16):
        x0, x1, x2, x3 = load_float4(x + 16 * i)
        y0, y1, y2, y3 = load_float4(y + 16 * i)
        total += (x0 * y0 + x1 * y1) + (x2 * y2 + x3 * y3)
    return total


def take_deltas(
    parts: QueryParts, o: Head, do: Head, lse: int, delta: int, row: int, T: int, D: int
) -> None:
    """delta = do . o of this thread's queries, kept and saved; lse. Equation eq-flash-delta.

    row: of the head's first in this warp; lse, delta: addresses of the head's lines.
    """
    for h in range(2):
        t = int32(row + own_row() + 8 * h)
        dot = float32(0)
        parts.lse[h] = float32(0)
        if t < T:
            part = (own_lane() & 3) * D  # bytes: four lanes share a row
            x, y = o.start + int64(t) * o.step + part, do.start + int64(t) * do.step + part
            dot = quarter_dot(x, y, D)
            parts.lse[h] = load_float(lse + 4 * int64(t))
        parts.delta[h] = quad_sum(dot)
        if own_lane() & 3 == 0 and t < round_up(T, PAD):
            store_float(delta + 4 * int64(t), parts.delta[h])


def over_keys(form: Form) -> Callable:
    """A step of `dq_kernel`: one tile of keys."""
    D, keys, values = form.D, form.step, form.size * form.pieces
    rows_times, add_columns = rows_product(form), columns_product(form)

    def query_step(
        parts: QueryParts, q: int, do: int, k: int, ahead: int, row: int, limits: Limits,
        scale: float,
    ) -> None:  # fmt: skip
        """dq += ds k. q, do: addresses of A; k: of the tile of keys, values follow.

        ahead: from the tile's first key to this warp's first query, which is `row`.
        """
        s, dp, lse, delta = parts.s, parts.dp, parts.lse, parts.delta
        rows_times(s, parts.by, q, int32(k + right(D)))
        if ahead < keys:
            forbid_later(s, keys, int32(ahead + own_row() - own_column()))
        forbid_others(s, keys, int32(row - ahead), row, limits)
        rows_times(dp, parts.by, do, int32(k + values + right(D)))
        for n in range(keys // 8):  # the scale comes at the end
            i = 4 * n
            s[i] = exp2(s[i] * scale - lse[0]) * (dp[i] - delta[0])
            s[i + 1] = exp2(s[i + 1] * scale - lse[0]) * (dp[i + 1] - delta[0])
            s[i + 2] = exp2(s[i + 2] * scale - lse[1]) * (dp[i + 2] - delta[1])
            s[i + 3] = exp2(s[i + 3] * scale - lse[1]) * (dp[i + 3] - delta[1])
        add_columns(parts.dq, parts.by, s, int32(k + left(D)))

    return query_step


class Keys(NamedTuple):
    """What a block of `dq_kernel` goes through: keys and values of T rows; its first query, what
    limits it.
    """

    k: Head
    v: Head
    T: int
    first: int
    limits: Limits


def dq_loop(form: Form) -> Callable:
    """All steps of a block of `dq_kernel`."""
    D, keys, own = form.D, form.step, form.own * form.pieces
    cut, step = cutter(form, keys), over_keys(form)

    def loop(parts: QueryParts, tiles: int, work: Keys, scale: float) -> None:
        """From the diagonal down to key 0. tiles: queries, their do, a step's keys, values."""
        row = int32(work.first + own_warp() * 16)
        q = int32(tiles + own_warp() * 32 * D + left(D))
        tile = int32(tiles + 2 * own)
        end = int32((min(work.T, int32(work.first + 16 * form.warps)) + keys - 1) // keys)
        for i in range(steps_from(end, work.first, work.limits, keys)):
            key = int32((end - 1 - i) * keys)
            cuda.syncthreads()  # all have left the tiles
            cut(tile, work.k, work.v, key, work.T)
            cuda.syncthreads()  # all pieces are there
            if row - key > -16:  # or else all its keys come after all queries of this warp
                step(parts, q, int32(q + own), tile, int32(row - key), row, work.limits, scale)

    return loop


def dq_block(form: Form) -> Callable:
    """What a block of `dq_kernel` does."""
    D, rows, half = form.D, 16 * form.warps, form.step // 2
    wide, part, most = D // 2, form.columns // 2, max(form.columns, form.step) // 4
    loop, cut = dq_loop(form), cutter(form, rows)

    def block_of_queries(
        q: Strided, k: Strided, v: Strided, o: Strided, do: Strided, dq: Strided, lse: int,
        delta: int, T: int, heads: int, sharing: int, scale: float, root: float, limit: Limit,
    ) -> None:  # fmt: skip
        number = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        batch = divide(number, heads)
        head = int32(number - batch * heads)
        kv, first = divide(head, sharing), int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * rows)
        # 2. Queries and their do.
        of_q, of_do = head_of(q, batch, head), head_of(do, batch, head)
        cut(shared_base(), of_q, of_do, first, T)
        # 2. delta.
        line = 4 * (int64(number) * round_up(T, PAD))
        parts = QueryParts(
            cuda.local.array(half, float32), cuda.local.array(half, float32),
            Fragments(
                cuda.local.array(4, int32), cuda.local.array(4, int32), cuda.local.array(4, int32),
                cuda.local.array(most, int32), cuda.local.array(part, float32),
            ),
            cuda.local.array(wide, float32), cuda.local.array(2, float32),
            cuda.local.array(2, float32),
        )  # fmt: skip
        of_o, row = head_of(o, batch, head), int32(first + own_warp() * 16)
        take_deltas(parts, of_o, of_do, lse + line, delta + line, row, T, D)
        pad_line(delta + line, int32(first + rows), T, float32(0), 2 * rows)
        # 4. All tiles of keys.
        of_k, of_v = head_of(k, batch, kv), head_of(v, batch, kv)
        clear(parts.dq, wide)
        loop(parts, shared_base(), Keys(of_k, of_v, T, first, Limits(limit, batch)), scale)
        # 5. Out.
        put_sums(parts.dq, 0, root, root, head_of(dq, batch, head), row, T, D)

    return block_of_queries


@functools.cache
def dq_kernel(form: Form) -> Kernel:
    """dq and delta. Grid: (heads at a time, tiles of queries, rounds), the last tile first.

    first: an int32 for each query, read if the form is `limited`.
    """
    block, threads, limited = dq_block(form), 32 * form.warps, form.limited

    def flash_pieces_dq(
        q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row,
        o, o_batch, o_head, o_row, do, do_batch, do_head, do_row, dq, dq_batch, dq_head, dq_row,
        lse, delta, T, heads, sharing, scale, root, first,
    ):  # fmt: skip
        of_q, of_k = Strided(q, q_batch, q_head, q_row), Strided(k, k_batch, k_head, k_row)
        of_v, of_o = Strided(v, v_batch, v_head, v_row), Strided(o, o_batch, o_head, o_row)
        x, y = Strided(do, do_batch, do_head, do_row), Strided(dq, dq_batch, dq_head, dq_row)
        limit = Limit(limited, first, T)
        block(of_q, of_k, of_v, of_o, x, y, lse, delta, T, heads, sharing, scale, root, limit)

    shared = 2 * (form.own + form.size) * form.pieces
    rest = {"resident": form.resident, "target": EVERY_CARD}
    return Kernel(flash_pieces_dq, DQ_ARGUMENTS, threads, shared, **rest)


class KeyParts(NamedTuple):
    """A thread's part of a step of dk and dv, on transposed tiles: s, then p, then ds, and dp, 16
    keys x queries; operands; dk and dv so far.
    """

    s: Any
    dp: Any
    by: Fragments
    dk: Any
    dv: Any


def key_probabilities(s: Any, queries: int, line: int, scale: float) -> None:
    """Scores become probabilities. line: the address of lse of this lane's first query."""
    for n in range(queries // 8):
        i = 4 * n
        x, y = load_shared_float2(int32(line + 32 * n))
        s[i], s[i + 1] = exp2(s[i] * scale - x), exp2(s[i + 1] * scale - y)
        s[i + 2], s[i + 3] = exp2(s[i + 2] * scale - x), exp2(s[i + 3] * scale - y)


def key_gradients(s: Any, dp: Any, queries: int, line: int) -> None:
    """p becomes ds = p (dp - delta). line: the address of delta of this lane's first query."""
    for n in range(queries // 8):
        i = 4 * n
        x, y = load_shared_float2(int32(line + 32 * n))
        s[i], s[i + 1] = s[i] * (dp[i] - x), s[i + 1] * (dp[i + 1] - y)
        s[i + 2], s[i + 3] = s[i + 2] * (dp[i + 2] - x), s[i + 3] * (dp[i + 3] - y)


def over_queries(form: Form) -> Callable:
    """A step of `dkdv_kernel`: one tile of queries."""
    D, queries, size, own = form.D, form.step, form.size * form.pieces, form.own * form.pieces
    rows_times, add_columns = rows_product(form), columns_product(form)

    def key_step(
        parts: KeyParts, k: int, q: int, line: int, ahead: int, key: int, limits: Limits,
        scale: float,
    ) -> None:  # fmt: skip
        """dv += p^T do, dk += ds^T q. k: address of A, values follow; q: of the tile of queries, do
        follows. line: of the tile's lse; ahead: from its first query to this warp's first key,
        which is `key`.
        """
        s, dp, by = parts.s, parts.dp, parts.by
        line, turned = int32(line + 4 * own_column()), int32(q + left(D))
        rows_times(s, by, k, int32(q + right(D)))
        if ahead > -16:
            forbid_earlier(s, queries, int32(ahead + own_row() - own_column()))
        forbid_foreign(s, queries, int32(key - ahead), key, limits)
        key_probabilities(s, queries, line, scale)
        add_columns(parts.dv, by, s, int32(turned + size))
        rows_times(dp, by, int32(k + own), int32(q + size + right(D)))
        key_gradients(s, dp, queries, int32(line + 4 * queries))  # the scale comes at the end
        add_columns(parts.dk, by, s, turned)

    return key_step


def filler(form: Form) -> Callable:
    """fill(tile, group, step, T): q, do, then lse and delta of a step's queries."""
    queries, cut = form.step, cutter(form, form.step)
    lines = 2 * form.size * form.pieces

    def fill(tile: int, group: Group, step: int, T: int) -> None:
        head = divide(step, group.tiles)
        row = int32((group.first + step - head * group.tiles) * queries)
        q = Head(int64(group.q.start + head * group.q_head), group.q.step)
        do = Head(int64(group.do.start + head * group.do_head), group.do.step)
        cut(tile, q, do, row, T)
        if own_thread() < queries // 2:  # 4 values of lse, or of delta
            line, n = group.lse, own_thread()
            if own_thread() >= queries // 4:
                line, n = group.delta, int32(own_thread() - queries // 4)
            a, b, c, d = load_float4(int64(line + head * group.line + 4 * row + 16 * n))
            store_shared_float4(int32(tile + lines + 16 * own_thread()), a, b, c, d)

    return fill


def dkdv_loop(form: Form) -> Callable:
    """All steps of a block of `dkdv_kernel`."""
    D, queries, own = form.D, form.step, form.own * form.pieces
    lines, fill, step = 2 * form.size * form.pieces, filler(form), over_queries(form)

    def loop(parts: KeyParts, tiles: int, group: Group, first: int, of: tuple) -> None:
        """Heads one after the other, each from the diagonal on. tiles: keys, values, then a step's;
        first: the block's first key; of: steps, T, scale.
        """
        steps, T, scale = of
        k, key = int32(tiles + own_warp() * 32 * D + left(D)), int32(first + own_warp() * 16)
        q, tile = int32(tiles + 2 * own), group.first
        for i in range(steps):
            cuda.syncthreads()  # all have left the tiles
            fill(q, group, int32(i), T)
            cuda.syncthreads()  # all pieces are there
            ahead = int32(key - tile * queries)
            if ahead < queries:  # or else all its queries come before all keys of this warp
                step(parts, k, q, int32(q + lines), ahead, key, group.limits, scale)
            tile = int32(tile + 1)
            if tile == group.first + group.tiles:
                tile = group.first

    return loop


def dkdv_block(form: Form) -> Callable:
    """What a block of `dkdv_kernel` does."""
    D, rows, half, queries = form.D, 16 * form.warps, form.step // 2, form.step
    wide, part, most = D // 2, form.columns // 2, max(form.columns, form.step) // 4
    loop, cut = dkdv_loop(form), cutter(form, rows)

    def block_of_keys(
        q: Strided, k: Strided, v: Strided, do: Strided, dk: Strided, dv: Strided, lse: int,
        delta: int, T: int, heads: int, sharing: int, scale: float, root: float, limit: Limit,
    ) -> None:  # fmt: skip
        number = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        kv_heads = divide(heads, sharing)
        batch = divide(number, kv_heads)
        kv, first = int32(number - batch * kv_heads), int32(cuda.blockIdx.y * rows)
        head, limits = int32(kv * sharing), Limits(limit, batch)
        # 2. Keys and values.
        of_k, of_v = head_of(k, batch, kv), head_of(v, batch, kv)
        cut(shared_base(), of_k, of_v, first, T)
        # 3. All tiles of queries from the diagonal on, of all heads of the group.
        line, tile = 4 * int64(round_up(T, PAD)), int32(first // queries)
        of_line = (int64(batch) * heads + head) * line
        group = Group(
            head_of(q, batch, head), q.head, head_of(do, batch, head), do.head,
            lse + of_line, delta + of_line, line, tile,
            int32(tiles_to(T, queries, int32(first + rows - 1), limits) - tile), limits,
        )  # fmt: skip
        parts = KeyParts(
            cuda.local.array(half, float32), cuda.local.array(half, float32),
            Fragments(
                cuda.local.array(4, int32), cuda.local.array(4, int32), cuda.local.array(4, int32),
                cuda.local.array(most, int32), cuda.local.array(part, float32),
            ),
            cuda.local.array(wide, float32), cuda.local.array(wide, float32),
        )  # fmt: skip
        clear(parts.dk, wide)
        clear(parts.dv, wide)
        loop(parts, shared_base(), group, first, (int32(group.tiles * sharing), T, scale))
        # 4. Out.
        row = int32(first + own_warp() * 16)
        put_sums(parts.dk, 0, root, root, head_of(dk, batch, kv), row, T, D)
        put_sums(parts.dv, 0, float32(1), float32(1), head_of(dv, batch, kv), row, T, D)

    return block_of_keys


@functools.cache
def dkdv_kernel(form: Form) -> Kernel:
    """dk and dv. Grid: (key heads at a time, tiles of keys, rounds), the first tile first.

    last: an int32 for each key, read if the form is `limited`.
    """
    block, threads, limited = dkdv_block(form), 32 * form.warps, form.limited

    def flash_pieces_dkdv(
        q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row,
        do, do_batch, do_head, do_row, dk, dk_batch, dk_head, dk_row, dv, dv_batch, dv_head, dv_row,
        lse, delta, T, heads, sharing, scale, root, last,
    ):  # fmt: skip
        of_q, of_k = Strided(q, q_batch, q_head, q_row), Strided(k, k_batch, k_head, k_row)
        of_v, of_do = Strided(v, v_batch, v_head, v_row), Strided(do, do_batch, do_head, do_row)
        x, y = Strided(dk, dk_batch, dk_head, dk_row), Strided(dv, dv_batch, dv_head, dv_row)
        limit = Limit(limited, last, T)
        block(of_q, of_k, of_v, of_do, x, y, lse, delta, T, heads, sharing, scale, root, limit)

    shared = 2 * (form.own + form.size) * form.pieces + 8 * form.step
    rest = {"resident": form.resident, "target": EVERY_CARD}
    return Kernel(flash_pieces_dkdv, DKDV_ARGUMENTS, threads, shared, **rest)
