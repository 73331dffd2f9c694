# Made from book/08a-flash-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


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

from nanoeuler.engines.gpu.flash_layout import (
    FORBIDDEN,
    PAD,
    clear,
    quad_sum,
    quarter_dot,
    round_up,
)
from nanoeuler.engines.gpu.flash_mma_parts import (
    EVERY_CARD,
    Head,
    Lanes,
    Place,
    Share,
    add_columns,
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
    copy_async,
    copy_commit,
    copy_wait,
    divide,
    exp2,
    ldmatrix4,
    load_float,
    load_shared_float2,
    pack_bf16,
    store_float,
)


class BackForm(NamedTuple):
    """A form of a backward kernel: head width; warps of a block, with 16 rows each; rows of a step;
    stages in shared memory; blocks of a multiprocessor that registers must suffice for.
    """

    D: int
    warps: int
    step: int
    stages: int
    resident: int


def rows_times(acc: Any, a: Any, left: int, right: int, columns: int, D: int) -> None:
    """acc = A B^T: this warp's 16 rows of a tile by `columns` rows of another, over D.

    left, right: the tiles' addresses for this lane (`Lanes`); a: registers for A to pass through.
    """
    clear(acc, columns // 2)
    left = again(left)  # or else all addresses of A would stay in registers
    for i in range(D // 16):
        load_left(a, 0, beside(left, i))
        for n in range(columns // 16):
            b0, b1, b2, b3 = ldmatrix4(int32(beside(right, i) + n * 32 * D))
            multiply(acc, 8 * n, a, 0, b0, b1)
            multiply(acc, 8 * n + 4, a, 0, b2, b3)


class QueryParts(NamedTuple):
    """A thread's part of a step of dq: scores, then probabilities; dp; an operand; dq so far; lse
    and delta of its two queries.
    """

    s: Any
    dp: Any
    a: Any
    dq: Any
    lse: Any
    delta: Any


class QueryTiles(NamedTuple):
    """Shared memory of `dq_kernel`, as addresses: queries, their do, stages of keys and values."""

    q: int
    do: int
    stages: int


def take_deltas(
    parts: QueryParts, o: Head, do: Head, lse: int, delta: int, row: int, T: int, D: int, at: Place
) -> None:
    """delta = do . o of this thread's queries, kept and saved; lse. Equation eq-flash-delta.

    row: of the head's first in this warp; lse, delta: addresses of the head's lines.
    """
    for h in range(2):
        t = int32(row + own_row(at) + 8 * h)
        dot = float32(0)
        parts.lse[h] = float32(0)
        if t < T:
            part = (at.lane & 3) * (D // 2)  # bytes: four lanes share a row
            x, y = o.start + int64(t) * o.step + part, do.start + int64(t) * do.step + part
            dot = quarter_dot(x, y, D)
            parts.lse[h] = load_float(lse + 4 * int64(t))
        parts.delta[h] = quad_sum(dot)
        if at.lane & 3 == 0 and t < round_up(T, PAD):
            store_float(delta + 4 * int64(t), parts.delta[h])


def pad_deltas(delta: int, after: int, T: int, threads: int, at: Place) -> None:
    """The last block also zeroes the rows `after` its own, which the next kernel may read."""
    t = int32(after + at.thread)
    if after >= T and t < round_up(T, PAD):
        store_float(delta + 4 * int64(t), float32(0))


def over_keys(form: BackForm) -> Callable:
    """A step of `dq_kernel`: one tile of keys."""
    D, keys = form.D, form.step
    size = keys * D * 2

    def step(
        parts: QueryParts, q: int, do: int, k: int, ahead: int, scale: float, of: Lanes, at: Place
    ) -> None:
        """dq += ds k. q, do: addresses of A; k: of the tile of keys, values follow.

        ahead: from the tile's first key to this warp's first query.
        """
        s, dp, a, lse, delta = parts.s, parts.dp, parts.a, parts.lse, parts.delta
        rows_times(s, a, q, int32(k + of.right), keys, D)
        if ahead < keys:
            forbid_later(s, 0, keys, int32(ahead + own_row(at) - own_column(at)))
        for i in range(0, keys // 2, 4):
            s[i], s[i + 1] = exp2(s[i] * scale - lse[0]), exp2(s[i + 1] * scale - lse[0])
            s[i + 2], s[i + 3] = exp2(s[i + 2] * scale - lse[1]), exp2(s[i + 3] * scale - lse[1])
        rows_times(dp, a, do, int32(k + size + of.right), keys, D)
        for j in range(keys // 16):
            for i in range(4):
                n, h = 8 * j + 2 * i, i % 2
                x, y = s[n] * (dp[n] - delta[h]), s[n + 1] * (dp[n + 1] - delta[h])
                a[i] = pack_bf16(x, y)  # the scale comes at the end
            add_columns(parts.dq, 0, a, int32(k + of.left), j, D)

    return step


class Stream(NamedTuple):
    """Two arrays' rows on their way to stages: this thread's sources in the first step, and the
    bytes from row to row; rows from that step's first on that there are.
    """

    x: int
    x_step: int
    y: int
    y_step: int
    left: int


def fill_pair(
    stages: int, stream: Stream, step: int, back: int, form: BackForm, whole: bool, of: Share
) -> None:
    """Start copying two tiles to a stage: those `back` rows before the first step's."""
    D, size, threads = form.D, form.step * form.D * 2, 32 * form.warps
    to, left = int32(stages + step % form.stages * (2 * size)), int32(stream.left + back)
    x, y = stream.x - int64(back) * stream.x_step, stream.y - int64(back) * stream.y_step
    copy_rows(to, int64(x), stream.x_step, form.step, left, D, threads, whole, of)
    copy_rows(int32(to + size), int64(y), stream.y_step, form.step, left, D, threads, whole, of)


def dq_loop(form: BackForm) -> Callable:
    """All steps of a block of `dq_kernel`."""
    D, keys, stages, rows = form.D, form.step, form.stages, 16 * form.warps
    size = 2 * keys * D * 2
    here, step = copy_wait(stages - 2), over_keys(form)

    def loop(
        parts: QueryParts, tiles: QueryTiles, stream: Stream, first: int, steps: int, scale: float,
        at: Place,
    ) -> None:  # fmt: skip
        """From the diagonal down to key 0. The first group of copies is not committed yet."""
        of, mine = lanes(D, at), share(D, at, 32 * form.warps)
        own = int32(at.warp * 16 * 2 * D + of.left)
        q, do, row = int32(tiles.q + own), int32(tiles.do + own), int32(first + at.warp * 16)
        for i in range(stages - 1):
            if i < steps:
                fill_pair(tiles.stages, stream, int32(i), int32(i * keys), form, False, mine)
            copy_commit()
        for i in range(steps):
            here()  # this thread's copies of this step
            cuda.syncthreads()  # everybody's; and all have left the stage that is filled next
            later = int32(i + stages - 1)
            if later < steps:
                fill_pair(tiles.stages, stream, later, int32(later * keys), form, False, mine)
            copy_commit()
            key = int32((steps - 1 - i) * keys)
            if key < row + 16:  # or else all its keys come after all queries of this warp
                k = int32(tiles.stages + i % stages * size)
                step(parts, q, do, k, int32(row - key), scale, of, at)

    return loop


DQ_ARGUMENTS = " ".join(["l"] * 26 + ["r"] * 3 + ["f"] * 2)


@functools.cache
def dq_kernel(form: BackForm) -> Kernel:
    """dq and delta. Grid: (heads at a time, tiles of queries, rounds), the last tile first."""
    D, rows, threads, half = form.D, 16 * form.warps, 32 * form.warps, form.step // 2
    wide, loop = D // 2, dq_loop(form)

    def flash_mma_dq(
        q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row,
        o, o_batch, o_head, o_row, do, do_batch, do_head, do_row, dq, dq_batch, dq_head, dq_row,
        lse, delta, T, heads, sharing, scale, root,
    ):  # fmt: skip
        at = place()
        number = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        batch = int32(number // heads)
        head = int32(number - batch * heads)
        kv, first = int32(head // sharing), int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * rows)
        # 1. Start the copies of queries and their do.
        base, size = shared_base(), 2 * rows * D
        tiles = QueryTiles(base, int32(base + size), int32(base + 2 * size))
        mine, left = share(D, at, threads), int32(T - first)
        of_q = head_of(q, (q_batch, q_head, q_row), batch, head)
        of_do = head_of(do, (do_batch, do_head, do_row), batch, head)
        source = source_of(of_q, first, mine)
        copy_rows(tiles.q, source, of_q.step, rows, left, D, threads, False, mine)
        source = source_of(of_do, first, mine)
        copy_rows(tiles.do, source, of_do.step, rows, left, D, threads, False, mine)
        # 2. delta.
        line = 4 * (int64(number) * round_up(T, PAD))
        parts = QueryParts(
            cuda.local.array(half, float32), cuda.local.array(half, float32),
            cuda.local.array(4, int32), cuda.local.array(wide, float32),
            cuda.local.array(2, float32), cuda.local.array(2, float32),
        )  # fmt: skip
        of_o, row = head_of(o, (o_batch, o_head, o_row), batch, head), int32(first + at.warp * 16)
        take_deltas(parts, of_o, of_do, lse + line, delta + line, row, T, D, at)
        pad_deltas(delta + line, int32(first + rows), T, threads, at)
        # 3. All tiles of keys.
        of_k = head_of(k, (k_batch, k_head, k_row), batch, kv)
        of_v = head_of(v, (v_batch, v_head, v_row), batch, kv)
        steps = int32((min(T, int32(first + rows)) + form.step - 1) // form.step)
        last = int32((steps - 1) * form.step)
        stream = Stream(
            source_of(of_k, last, mine), of_k.step, source_of(of_v, last, mine), of_v.step,
            int32(T - last),
        )  # fmt: skip
        clear(parts.dq, wide)
        loop(parts, tiles, stream, first, steps, scale, at)
        # 4. Out.
        own = int32(tiles.q + at.warp * 32 * D)
        stage_rows(parts.dq, 0, root, root, own, D, at)
        put_rows(own, head_of(dq, (dq_batch, dq_head, dq_row), batch, head), row, T, D, at)

    shared = (2 * rows + 2 * form.stages * form.step) * D * 2
    return Kernel(
        flash_mma_dq, DQ_ARGUMENTS, threads, shared, resident=form.resident, target=EVERY_CARD
    )


class KeyParts(NamedTuple):
    """A thread's part of a step of dk and dv, on transposed tiles: s, then p, and dp, 16 keys x
    queries; an operand; dk and dv so far.
    """

    s: Any
    dp: Any
    a: Any
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
    below = int32(distance + 8)
    for n in range(queries // 8):
        i = 4 * n
        if 8 * n < distance:
            s[i] = float32(FORBIDDEN)
        if 8 * n + 1 < distance:
            s[i + 1] = float32(FORBIDDEN)
        if 8 * n < below:
            s[i + 2] = float32(FORBIDDEN)
        if 8 * n + 1 < below:
            s[i + 3] = float32(FORBIDDEN)


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

    def step(
        parts: KeyParts, k: int, v: int, q: int, line: int, ahead: int, scale: float, of: Lanes,
        at: Place,
    ) -> None:  # fmt: skip
        """dv += p^T do, dk += ds^T q. k, v: addresses of A; q: of the tile of queries, do follows.

        line: the address of the tile's lse; ahead: from its first query to this warp's first key.
        """
        s, dp, a = parts.s, parts.dp, parts.a
        line = int32(line + 4 * own_column(at))
        rows_times(s, a, k, int32(q + of.right), queries, D)
        if ahead > -16:
            forbid_earlier(s, queries, int32(ahead + own_row(at) - own_column(at)))
        for j in range(queries // 16):
            key_probabilities(s, j, a, line, scale)
            add_columns(parts.dv, 0, a, int32(q + size + of.left), j, D)
        rows_times(dp, a, v, int32(q + size + of.right), queries, D)
        for j in range(queries // 16):
            key_gradients(s, dp, j, a, int32(line + 4 * queries))  # the scale comes at the end
            add_columns(parts.dk, 0, a, int32(q + of.left), j, D)

    return step


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


def fill_queries(
    tiles: KeyTiles, group: Group, step: int, T: int, form: BackForm, of: Share, at: Place
) -> None:
    """Start copying q, do, lse and delta of a step to its stage."""
    D, queries, threads = form.D, form.step, 32 * form.warps
    size = queries * D * 2
    head = divide(step, group.tiles)
    row = int32((group.first + step - head * group.tiles) * queries)
    stage, left = int32(step % form.stages), int32(T - row)
    to = int32(tiles.stages + stage * (2 * size))
    q = Head(int64(group.q.start + head * group.q_head), group.q.step)
    do = Head(int64(group.do.start + head * group.do_head), group.do.step)
    source = source_of(q, row, of)
    copy_rows(to, source, q.step, queries, left, D, threads, False, of)
    source = source_of(do, row, of)
    copy_rows(int32(to + size), source, do.step, queries, left, D, threads, False, of)
    n = int32(at.thread & (queries // 4 - 1))  # 4 values of a line
    if at.thread < queries // 2:
        lines = group.lse if at.thread < queries // 4 else group.delta
        place = int32(tiles.lines + stage * (8 * queries) + 16 * at.thread)
        copy_async(place, int64(lines + head * group.line + 4 * row + 16 * n))


def dkdv_loop(form: BackForm) -> Callable:
    """All steps of a block of `dkdv_kernel`."""
    D, queries, stages = form.D, form.step, form.stages
    size = 2 * queries * D * 2
    here, step = copy_wait(stages - 2), over_queries(form)

    def loop(
        parts: KeyParts, tiles: KeyTiles, group: Group, first: int, steps: int, T: int,
        scale: float, at: Place,
    ) -> None:  # fmt: skip
        """Heads one after the other, each from the diagonal on. The first group of copies is not
        committed yet. first: the block's first key.
        """
        of, mine = lanes(D, at), share(D, at, 32 * form.warps)
        own = int32(at.warp * 16 * 2 * D + of.left)
        k, v, key = int32(tiles.k + own), int32(tiles.v + own), int32(first + at.warp * 16)
        tile = group.first
        for i in range(stages - 1):
            if i < steps:
                fill_queries(tiles, group, int32(i), T, form, mine, at)
            copy_commit()
        for i in range(steps):
            here()  # this thread's copies of this step
            cuda.syncthreads()  # everybody's; and all have left the stage that is filled next
            if i + stages - 1 < steps:
                fill_queries(tiles, group, int32(i + stages - 1), T, form, mine, at)
            copy_commit()
            ahead = int32(key - tile * queries)
            if ahead < queries:  # or else all its queries come before all keys of this warp
                stage = int32(i % stages)
                q, line = int32(tiles.stages + stage * size), int32(tiles.lines + stage * 8 * queries)
                step(parts, k, v, q, line, ahead, scale, of, at)
            tile = int32(tile + 1)
            if tile == group.first + group.tiles:
                tile = group.first

    return loop


DKDV_ARGUMENTS = " ".join(["l"] * 26 + ["r"] * 3 + ["f"] * 2)


@functools.cache
def dkdv_kernel(form: BackForm) -> Kernel:
    """dk and dv. Grid: (key heads at a time, tiles of keys, rounds), the first tile first."""
    D, rows, threads, half = form.D, 16 * form.warps, 32 * form.warps, form.step // 2
    queries, stages = form.step, form.stages
    wide, loop = D // 2, dkdv_loop(form)

    def flash_mma_dkdv(
        q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row,
        do, do_batch, do_head, do_row, dk, dk_batch, dk_head, dk_row, dv, dv_batch, dv_head, dv_row,
        lse, delta, T, heads, sharing, scale, root,
    ):  # fmt: skip
        at, mine = place(), share(D, place(), threads)
        number, kv_heads = int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x), heads // sharing
        batch = int32(number // kv_heads)
        kv, first = int32(number - batch * kv_heads), int32(cuda.blockIdx.y * rows)
        head, left = int32(kv * sharing), int32(T - first)
        # 1. Start the copies of keys and values.
        base, size = shared_base(), 2 * rows * D
        stage = int32(base + 2 * size)
        tiles = KeyTiles(base, int32(base + size), stage, int32(stage + stages * 4 * queries * D))
        of_k = head_of(k, (k_batch, k_head, k_row), batch, kv)
        of_v = head_of(v, (v_batch, v_head, v_row), batch, kv)
        source = source_of(of_k, first, mine)
        copy_rows(tiles.k, source, of_k.step, rows, left, D, threads, False, mine)
        source = source_of(of_v, first, mine)
        copy_rows(tiles.v, source, of_v.step, rows, left, D, threads, False, mine)
        # 2. All tiles of queries from the diagonal on, of all heads of the group.
        line, tile = 4 * int64(round_up(T, PAD)), int32(first // queries)
        of_line = (int64(batch) * heads + head) * line
        group = Group(
            head_of(q, (q_batch, q_head, q_row), batch, head), q_head,
            head_of(do, (do_batch, do_head, do_row), batch, head), do_head,
            lse + of_line, delta + of_line, line, tile,
            int32((T + queries - 1) // queries - tile),
        )  # fmt: skip
        parts = KeyParts(
            cuda.local.array(half, float32), cuda.local.array(half, float32),
            cuda.local.array(4, int32), cuda.local.array(wide, float32),
            cuda.local.array(wide, float32),
        )  # fmt: skip
        clear(parts.dk, wide)
        clear(parts.dv, wide)
        loop(parts, tiles, group, first, int32(group.tiles * sharing), T, scale, at)
        # 3. Out, through this warp's own rows of keys and of values.
        row, own = int32(first + at.warp * 16), int32(at.warp * 32 * D)
        stage_rows(parts.dk, 0, root, root, int32(tiles.k + own), D, at)
        to = head_of(dk, (dk_batch, dk_head, dk_row), batch, kv)
        put_rows(int32(tiles.k + own), to, row, T, D, at)
        stage_rows(parts.dv, 0, float32(1), float32(1), int32(tiles.v + own), D, at)
        to = head_of(dv, (dv_batch, dv_head, dv_row), batch, kv)
        put_rows(int32(tiles.v + own), to, row, T, D, at)

    shared = (2 * rows + 2 * stages * queries) * D * 2 + stages * 8 * queries
    return Kernel(
        flash_mma_dkdv, DKDV_ARGUMENTS, threads, shared, resident=form.resident, target=EVERY_CARD
    )
