# Made from book/12a-flash-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-mma-backward
"""Causal attention, backward, on the tensor cores of every card since 8.0: mma.sync, any T.

Two kernels, `dq_kernel` first, because it leaves delta for `dkdv_kernel`. Nothing is added in
global memory, so that the same inputs give the same bits. A warp owns 16 queries, or 16 keys.

bf16, D = 32, 64 or 128. Left out: launching (flash_mma_plan.py), other masks.
T positions, D head width. s scores, p probabilities, o output; dx the gradient of x.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention.layout import (
    PAD,
    Limit,
    clear,
    forbid_left,
    limit_of,
    quad_sum,
    quarter_dot,
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
    forbid_foreign,
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
    own_warp,
    put_rows,
    right,
    shared_base,
    stage_rows,
    steps_from,
)

# isort: split


from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.engines.gpu.lang.ptx import (
    again,
    copy_async,
    copy_commit,
    copy_wait,
    divide,
    exp2,
    ldmatrix_across,
    load_float,
    load_shared_float2,
    mma_tile,
    pack_bf16,
    store_float,
    zeros,
)


class BackForm(NamedTuple):
    """A form of a backward kernel: head width; warps of a block, with 16 rows each; rows of a step;
    stages in shared memory; blocks of a multiprocessor that registers must suffice for; whether
    more than the diagonal limits what is seen.
    """

    D: int
    warps: int
    step: int
    stages: int
    resident: int
    limited: bool = False


class Fragments(NamedTuple):
    """Registers that operands of products pass through: A of 16 x 16, B of 16 x 16 or more."""

    a: Any
    b: Any


def products(form: BackForm) -> tuple[Callable, Callable]:
    """The two products of the backward, each for the 16 rows of a warp."""
    D, columns = form.D, form.step
    row_mma, column_mma = mma_tile(16, columns), mma_tile(16, D)
    zero, across = zeros(columns // 2), ldmatrix_across(D // 16)

    def rows_times(acc: Any, by: Fragments, left_tile: int, right_tile: int) -> None:
        """acc = A B^T: 16 rows of a tile by all rows of a step's tile, over D."""
        zero(acc)
        left_tile = again(left_tile)  # or else all addresses of A would stay in registers
        for i in range(D // 16):
            load_left(by.a, 0, beside(left_tile, i))
            load_rows(by.b, beside(right_tile, i), columns, D)
            row_mma(acc, by.a, by.b)

    def add_columns(acc: Any, by: Fragments, tile: int, k: int) -> None:
        """acc += A B: A is there, 16 x 16; B are rows 16 k to 16 k + 15 of a step's tile."""
        across(by.b, int32(tile + k * 32 * D))
        column_mma(acc, by.a, by.b)

    return rows_times, add_columns


class QueryParts(NamedTuple):
    """A thread's part of a step of dq: scores, then probabilities; dp; operands; dq so far; lse
    and delta of its two queries.
    """

    s: Any
    dp: Any
    by: Fragments
    dq: Any
    lse: Any
    delta: Any


class QueryTiles(NamedTuple):
    """Shared memory of `dq_kernel`, as addresses: queries, their do, stages of keys and values."""

    q: int
    do: int
    stages: int


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
            part = (own_lane() & 3) * (D // 2)  # bytes: four lanes share a row
            x, y = o.start + int64(t) * o.step + part, do.start + int64(t) * do.step + part
            dot = quarter_dot(x, y, D)
            parts.lse[h] = load_float(lse + 4 * int64(t))
        parts.delta[h] = quad_sum(dot)
        if own_lane() & 3 == 0 and t < round_up(T, PAD):
            store_float(delta + 4 * int64(t), parts.delta[h])


def pad_deltas(delta: int, after: int, T: int) -> None:
    """The last block also zeroes the rows `after` its own, which the next kernel may read."""
    t = int32(after + own_thread())
    if after >= T and t < round_up(T, PAD):
        store_float(delta + 4 * int64(t), float32(0))


def over_keys(form: BackForm) -> Callable:
    """A step of `dq_kernel`: one tile of keys."""
    D, keys = form.D, form.step
    size = keys * D * 2
    rows_times, add_columns = products(form)

    def query_step(
        parts: QueryParts, q: int, do: int, k: int, ahead: int, row: int, limits: Limits,
        scale: float,
    ) -> None:  # fmt: skip
        """dq += ds k. q, do: addresses of A; k: of the tile of keys, values follow.

        ahead: from the tile's first key to this warp's first query, which is `row`.
        """
        s, dp, by, lse, delta = parts.s, parts.dp, parts.by, parts.lse, parts.delta
        rows_times(s, by, q, int32(k + right(D)))
        if ahead < keys:
            forbid_later(s, keys, int32(ahead + own_row() - own_column()))
        forbid_others(s, keys, int32(row - ahead), row, limits)
        for i in range(0, keys // 2, 4):
            s[i], s[i + 1] = exp2(s[i] * scale - lse[0]), exp2(s[i + 1] * scale - lse[0])
            s[i + 2], s[i + 3] = exp2(s[i + 2] * scale - lse[1]), exp2(s[i + 3] * scale - lse[1])
        rows_times(dp, by, do, int32(k + size + right(D)))
        turned = int32(k + left(D))
        for j in range(keys // 16):
            for i in range(4):
                n, h = 8 * j + 2 * i, i % 2
                x, y = s[n] * (dp[n] - delta[h]), s[n + 1] * (dp[n + 1] - delta[h])
                by.a[i] = pack_bf16(x, y)  # the scale comes at the end
            add_columns(parts.dq, by, turned, j)

    return query_step


class Keys(NamedTuple):
    """What a block of `dq_kernel` goes through: keys and values of T rows, `end` tiles of them up
    to the diagonal; its first query, and what limits it.
    """

    k: Head
    v: Head
    T: int
    end: int
    first: int
    limits: Limits


def dq_loop(form: BackForm) -> Callable:
    """All steps of a block of `dq_kernel`."""
    D, keys, stages, threads = form.D, form.step, form.stages, 32 * form.warps
    size = 2 * keys * D * 2
    here, step = copy_wait(stages - 2), over_keys(form)

    def fill(tiles: QueryTiles, work: Keys, step: int, steps: int) -> None:
        """Start copying a step's keys and values to its stage, if there is such a step: a group."""
        if step < steps:
            row = int32((work.end - 1 - step) * keys)
            to = int32(tiles.stages + step % stages * size)
            copy_pair(to, work.k, work.v, row, keys, work.T, D, threads, False)
        copy_commit()

    def loop(
        parts: QueryParts, tiles: QueryTiles, work: Keys, steps: int, scale: float
    ) -> None:
        """From the diagonal down. The first group of copies is not committed yet."""
        row = int32(work.first + own_warp() * 16)
        own = int32(own_warp() * 16 * 2 * D + left(D))
        q, do = int32(tiles.q + own), int32(tiles.do + own)
        for i in range(stages - 1):
            fill(tiles, work, int32(i), steps)
        for i in range(steps):
            here()  # this thread's copies of this step
            cuda.syncthreads()  # everybody's; and all have left the stage that is filled next
            fill(tiles, work, int32(i + stages - 1), steps)
            ahead = int32(row - (work.end - 1 - i) * keys)
            if ahead > -16:  # or else all its keys come after all queries of this warp
                tile = int32(tiles.stages + i % stages * size)
                step(parts, q, do, tile, ahead, row, work.limits, scale)

    return loop


# Six arrays with their steps, lse and delta; T, heads, sharing; scale, root; a line of limits.
DQ_ARGUMENTS = " ".join(["l"] * 26 + ["r"] * 3 + ["f"] * 2 + ["l"])


def dq_block(form: BackForm) -> Callable:
    """What a block of `dq_kernel` does."""
    D, rows, threads, half = form.D, 16 * form.warps, 32 * form.warps, form.step // 2
    wide, most, loop = D // 2, max(D, form.step) // 4, dq_loop(form)

    def block_of_queries(
        q: Strided, k: Strided, v: Strided, o: Strided, do: Strided, dq: Strided, lse: int,
        delta: int, T: int, heads: int, sharing: int, scale: float, root: float, limit: Limit,
    ) -> None:  # fmt: skip
        number = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        batch = divide(number, heads)
        head = int32(number - batch * heads)
        kv, first = divide(head, sharing), int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * rows)
        # 2. Start the copies of queries and their do.
        base, size = shared_base(), 2 * rows * D
        tiles = QueryTiles(base, int32(base + size), int32(base + 2 * size))
        of_q, of_do = head_of(q, batch, head), head_of(do, batch, head)
        copy_pair(tiles.q, of_q, of_do, first, rows, T, D, threads, False)
        # 2. delta.
        line = 4 * (int64(number) * round_up(T, PAD))
        parts = QueryParts(
            cuda.local.array(half, float32), cuda.local.array(half, float32),
            Fragments(cuda.local.array(4, int32), cuda.local.array(most, int32)),
            cuda.local.array(wide, float32), cuda.local.array(2, float32),
            cuda.local.array(2, float32),
        )  # fmt: skip
        of_o, row = head_of(o, batch, head), int32(first + own_warp() * 16)
        take_deltas(parts, of_o, of_do, lse + line, delta + line, row, T, D)
        pad_deltas(delta + line, int32(first + rows), T)
        # 4. All tiles of keys.
        of_k, of_v, limits = head_of(k, batch, kv), head_of(v, batch, kv), Limits(limit, batch)
        end = int32((min(T, int32(first + rows)) + form.step - 1) // form.step)
        clear(parts.dq, wide)
        steps = steps_from(end, first, limits, form.step)
        loop(parts, tiles, Keys(of_k, of_v, T, end, first, limits), steps, scale)
        # 5. Out.
        own = int32(tiles.q + own_warp() * 32 * D)
        stage_rows(parts.dq, root, root, own, D)
        put_rows(own, head_of(dq, batch, head), row, T, D)

    return block_of_queries


@functools.cache
def dq_kernel(form: BackForm) -> Kernel:
    """dq and delta. Grid: (heads at a time, tiles of queries, rounds), the last tile first.

    first: an int32 for each query, read if the form is `limited`.
    """
    block, limited, rows = dq_block(form), form.limited, 32 * form.warps
    shared = (rows + 2 * form.stages * form.step) * form.D * 2

    def flash_mma_dq(
        q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row,
        o, o_batch, o_head, o_row, do, do_batch, do_head, do_row, dq, dq_batch, dq_head, dq_row,
        lse, delta, T, heads, sharing, scale, root, first,
    ):  # fmt: skip
        of_q, of_k = Strided(q, q_batch, q_head, q_row), Strided(k, k_batch, k_head, k_row)
        of_v, of_o = Strided(v, v_batch, v_head, v_row), Strided(o, o_batch, o_head, o_row)
        x, y = Strided(do, do_batch, do_head, do_row), Strided(dq, dq_batch, dq_head, dq_row)
        limit = Limit(limited, first, T)
        block(of_q, of_k, of_v, of_o, x, y, lse, delta, T, heads, sharing, scale, root, limit)

    threads, rest = 32 * form.warps, {"resident": form.resident, "target": EVERY_CARD}
    return Kernel(flash_mma_dq, DQ_ARGUMENTS, threads, shared, **rest)


class KeyParts(NamedTuple):
    """A thread's part of a step of dk and dv, on transposed tiles: s, then p, and dp, 16 keys x
    queries; operands; dk and dv so far.
    """

    s: Any
    dp: Any
    by: Fragments
    dk: Any
    dv: Any


class KeyTiles(NamedTuple):
    """Shared memory of `dkdv_kernel`, as addresses: keys, values, stages of q and do, and of lines:
    lse of a step's queries, then delta.
    """

    k: int
    v: int
    stages: int
    lines: int


def forbid_earlier(s: Any, queries: int, distance: int) -> None:
    """Forbid the queries that come before their key, on a transposed tile.

    distance: from this lane's first query to its upper key.
    """
    forbid_left(s, queries, distance, int32(distance + 8))


def key_probabilities(s: Any, k: int, a: Any, line: int, scale: float) -> None:
    """Queries 16 k to 16 k + 15: scores become probabilities, also packed into a.

    line: the address of lse of this lane's first query of the tile.
    """
    for j in range(2):
        i = 8 * k + 4 * j
        x, y = load_shared_float2(int32(line + 64 * k + 32 * j))
        s[i], s[i + 1] = exp2(s[i] * scale - x), exp2(s[i + 1] * scale - y)
        s[i + 2], s[i + 3] = exp2(s[i + 2] * scale - x), exp2(s[i + 3] * scale - y)
        a[2 * j], a[2 * j + 1] = pack_bf16(s[i], s[i + 1]), pack_bf16(s[i + 2], s[i + 3])


def key_gradients(p: Any, dp: Any, k: int, a: Any, line: int) -> None:
    """Queries 16 k to 16 k + 15: ds = p (dp - delta), packed. line: the address of delta."""
    for j in range(2):
        i = 8 * k + 4 * j
        x, y = load_shared_float2(int32(line + 64 * k + 32 * j))
        a[2 * j] = pack_bf16(p[i] * (dp[i] - x), p[i + 1] * (dp[i + 1] - y))
        a[2 * j + 1] = pack_bf16(p[i + 2] * (dp[i + 2] - x), p[i + 3] * (dp[i + 3] - y))


def over_queries(form: BackForm) -> Callable:
    """A step of `dkdv_kernel`: one tile of queries."""
    D, queries = form.D, form.step
    size = queries * D * 2
    rows_times, add_columns = products(form)

    def key_step(
        parts: KeyParts, k: int, v: int, q: int, line: int, ahead: int, key: int, limits: Limits,
        scale: float,
    ) -> None:  # fmt: skip
        """dv += p^T do, dk += ds^T q. k, v: addresses of A; q: of the tile of queries, do follows.

        line: the address of the tile's lse; ahead: from its first query to this warp's first key,
        which is `key`.
        """
        s, dp, by = parts.s, parts.dp, parts.by
        line, turned = int32(line + 4 * own_column()), int32(q + left(D))
        rows_times(s, by, k, int32(q + right(D)))
        if ahead > -16:
            forbid_earlier(s, queries, int32(ahead + own_row() - own_column()))
        forbid_foreign(s, queries, int32(key - ahead), key, limits)
        for j in range(queries // 16):
            key_probabilities(s, j, by.a, line, scale)
            add_columns(parts.dv, by, int32(turned + size), j)
        rows_times(dp, by, v, int32(q + size + right(D)))
        for j in range(queries // 16):
            key_gradients(s, dp, j, by.a, int32(line + 4 * queries))  # the scale comes at the end
            add_columns(parts.dk, by, turned, j)

    return key_step


class Group(NamedTuple):
    """The queries of a block of keys: tiles `first` to `first` + tiles - 1 of each query head that
    shares the keys. q, do: of the group's first head; steps in bytes from head to head; lse and
    delta: addresses of that head's lines, and bytes from line to line.
    """

    q: Head
    q_head: int
    do: Head
    do_head: int
    lse: int
    delta: int
    line: int
    first: int
    tiles: int
    limits: Limits


def fill_queries(
    tiles: KeyTiles, group: Group, step: int, T: int, form: BackForm
) -> None:
    """Start copying q, do, lse and delta of a step to its stage."""
    D, queries = form.D, form.step
    size = 2 * queries * D * 2
    head = divide(step, group.tiles)
    row = int32((group.first + step - head * group.tiles) * queries)
    stage = int32(step % form.stages)
    q = Head(int64(group.q.start + head * group.q_head), group.q.step)
    do = Head(int64(group.do.start + head * group.do_head), group.do.step)
    to = int32(tiles.stages + stage * size)
    copy_pair(to, q, do, row, queries, T, D, 32 * form.warps, False)
    if own_thread() < queries // 2:  # 4 values of lse, or of delta
        line, n = group.lse, own_thread()
        if own_thread() >= queries // 4:
            line, n = group.delta, int32(own_thread() - queries // 4)
        to = int32(tiles.lines + stage * (8 * queries) + 16 * own_thread())
        copy_async(to, int64(line + head * group.line + 4 * row + 16 * n))


def dkdv_loop(form: BackForm) -> Callable:
    """All steps of a block of `dkdv_kernel`."""
    D, queries, stages = form.D, form.step, form.stages
    size = 2 * queries * D * 2
    here, step = copy_wait(stages - 2), over_queries(form)

    def loop(
        parts: KeyParts, tiles: KeyTiles, group: Group, first: int, steps: int, T: int,
        scale: float,
    ) -> None:  # fmt: skip
        """Heads one after the other, each from the diagonal on. The first group of copies is not
        committed yet. first: the block's first key.
        """
        own = int32(own_warp() * 16 * 2 * D + left(D))
        k, v, key = int32(tiles.k + own), int32(tiles.v + own), int32(first + own_warp() * 16)
        tile = group.first
        for i in range(stages - 1):
            if i < steps:
                fill_queries(tiles, group, int32(i), T, form)
            copy_commit()
        for i in range(steps):
            here()  # this thread's copies of this step
            cuda.syncthreads()  # everybody's; and all have left the stage that is filled next
            if i + stages - 1 < steps:
                fill_queries(tiles, group, int32(i + stages - 1), T, form)
            copy_commit()
            ahead = int32(key - tile * queries)
            if ahead < queries:  # or else all its queries come before all keys of this warp
                q = int32(tiles.stages + i % stages * size)
                line = int32(tiles.lines + i % stages * (8 * queries))
                step(parts, k, v, q, line, ahead, key, group.limits, scale)
            tile = int32(tile + 1)
            if tile == group.first + group.tiles:
                tile = group.first

    return loop


DKDV_ARGUMENTS = DQ_ARGUMENTS  # six arrays again


def tiles_to(T: int, queries: int, last: int, limits: Limits) -> int:
    """The end of the tiles of queries that see any of a block's keys, of which `last` is the last.
    """
    if limits.limit.on:
        return limit_of(limits.limit, limits.batch, last) // queries + 1
    return (T + queries - 1) // queries


def dkdv_block(form: BackForm) -> Callable:
    """What a block of `dkdv_kernel` does."""
    D, rows, threads, half = form.D, 16 * form.warps, 32 * form.warps, form.step // 2
    queries, stages = form.step, form.stages
    wide, most, loop = D // 2, max(D, queries) // 4, dkdv_loop(form)

    def block_of_keys(
        q: Strided, k: Strided, v: Strided, do: Strided, dk: Strided, dv: Strided, lse: int,
        delta: int, T: int, heads: int, sharing: int, scale: float, root: float, limit: Limit,
    ) -> None:  # fmt: skip
        number = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        kv_heads = divide(heads, sharing)
        batch = divide(number, kv_heads)
        kv, first = int32(number - batch * kv_heads), int32(cuda.blockIdx.y * rows)
        head, limits = int32(kv * sharing), Limits(limit, batch)
        # 2. Start the copies of keys and values.
        base, size = shared_base(), 2 * rows * D
        stage = int32(base + 2 * size)
        tiles = KeyTiles(base, int32(base + size), stage, int32(stage + stages * 4 * queries * D))
        of_k, of_v = head_of(k, batch, kv), head_of(v, batch, kv)
        copy_pair(tiles.k, of_k, of_v, first, rows, T, D, threads, False)
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
            Fragments(cuda.local.array(4, int32), cuda.local.array(most, int32)),
            cuda.local.array(wide, float32), cuda.local.array(wide, float32),
        )  # fmt: skip
        clear(parts.dk, wide)
        clear(parts.dv, wide)
        loop(parts, tiles, group, first, int32(group.tiles * sharing), T, scale)
        # 4. Out, through this warp's own rows of keys and of values.
        row, own = int32(first + own_warp() * 16), int32(own_warp() * 32 * D)
        stage_rows(parts.dk, root, root, int32(tiles.k + own), D)
        put_rows(int32(tiles.k + own), head_of(dk, batch, kv), row, T, D)
        stage_rows(parts.dv, float32(1), float32(1), int32(tiles.v + own), D)
        put_rows(int32(tiles.v + own), head_of(dv, batch, kv), row, T, D)

    return block_of_keys


@functools.cache
def dkdv_kernel(form: BackForm) -> Kernel:
    """dk and dv. Grid: (key heads at a time, tiles of keys, rounds), the first tile first.

    last: an int32 for each key, read if the form is `limited`.
    """
    block, D, queries, stages = dkdv_block(form), form.D, form.step, form.stages
    limited = form.limited

    def flash_mma_dkdv(
        q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row,
        do, do_batch, do_head, do_row, dk, dk_batch, dk_head, dk_row, dv, dv_batch, dv_head, dv_row,
        lse, delta, T, heads, sharing, scale, root, last,
    ):  # fmt: skip
        of_q, of_k = Strided(q, q_batch, q_head, q_row), Strided(k, k_batch, k_head, k_row)
        of_v, of_do = Strided(v, v_batch, v_head, v_row), Strided(do, do_batch, do_head, do_row)
        x, y = Strided(dk, dk_batch, dk_head, dk_row), Strided(dv, dv_batch, dv_head, dv_row)
        limit = Limit(limited, last, T)
        block(of_q, of_k, of_v, of_do, x, y, lse, delta, T, heads, sharing, scale, root, limit)

    shared = (32 * form.warps + 2 * stages * queries) * D * 2 + stages * 8 * queries
    threads, rest = 32 * form.warps, {"resident": form.resident, "target": EVERY_CARD}
    return Kernel(flash_mma_dkdv, DKDV_ARGUMENTS, threads, shared, **rest)
