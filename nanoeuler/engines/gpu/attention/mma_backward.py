# Made from book/l-attention-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-mma-backward
"""Causal attention, backward, on the tensor cores of every card since 8.0: mma.sync, any T.

Two kernels, `dq_kernel` first, because it leaves delta for `dkdv_kernel`. Nothing is added in
global memory, so that the same inputs give the same bits. A warp owns 16 queries, or 16 keys.

D = 32, 64 or 128. Left out: launching (mma_launch.py), other masks.
T positions, D head width. s scores, p probabilities, o output; dx the gradient of x.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention import layout, softmax
from nanoeuler.engines.gpu.attention import mma_parts as mma
from nanoeuler.engines.gpu.attention.mma_forward import Keys, Where, make_key_loop
from nanoeuler.engines.gpu.attention.operands import Form
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.engines.gpu.lang.ptx import divide


class QueryParts(NamedTuple):
    """A thread's part of a step of dq: scores, then probabilities, then ds; dp; operands; dq so
    far; lse and delta of its two queries.
    """

    s: Any
    dp: Any
    by: Any
    dq: Any
    lse: Any
    delta: Any


def over_keys(form: Form) -> Callable:
    """A step of `dq_kernel`: one tile of keys."""
    D, keys, size, own = form.D, form.step, form.size, form.own
    rows_times = form.operands.rows_product(form)

    def gradients(x: tuple, of: softmax.Span) -> None:
        softmax.row_gradients(x[0], x[1], of, x[2])

    add_columns = form.operands.columns_product(form, gradients)

    def query_step(parts: QueryParts, q: int, k: int, where: Where, scale: float) -> None:
        """dq += ds k. q: address of A, do follows; k: of the tile of keys, values follow."""
        s, dp, ahead = parts.s, parts.dp, where.ahead
        rows_times(s, parts.by, q, int32(k + mma.right(D)))
        if ahead < keys:
            mma.forbid_later(s, keys, int32(ahead + mma.own_row() - mma.own_column()))
        mma.forbid_others(s, keys, int32(where.row - ahead), where.row, where.limits)
        softmax.row_probabilities(s, keys, parts.lse, scale)
        rows_times(dp, parts.by, int32(q + own), int32(k + size + mma.right(D)))
        k = int32(k + mma.left(D))
        add_columns(parts.dq, parts.by, s, k, (s, dp, parts.delta))  # the scale comes at the end

    return query_step


class Given(NamedTuple):
    """What both kernels take besides their arrays: addresses of lse and delta, and the fields of
    `layout.Sizes`. limit: the address of an int32 for each row, read if the form is `limited`: of
    queries the first key that each sees, of keys the last query that sees each.
    """

    lse: int
    delta: int
    T: int
    heads: int
    sharing: int
    scale: float
    root: float
    limit: int


def sizes_of(given: Given, limited: bool) -> layout.Sizes:
    """The sizes of a launch."""
    limit = layout.Limit(limited, given.limit, given.T)
    return layout.Sizes(given.T, given.heads, given.sharing, given.scale, given.root, limit)


# Six arrays with their steps, lse and delta; T, heads, sharing; scale, root; a line of limits.
ARGUMENTS = " ".join(["l"] * 26 + ["r"] * 3 + ["f"] * 2 + ["l"])


def kernel_of(function: Callable, form: Form, shared: int) -> Kernel:
    """A kernel of six `mma.Strided` and a `Given`."""
    threads, rest = 32 * form.warps, {"resident": form.resident, "target": mma.EVERY_CARD}
    return Kernel(function, ARGUMENTS, threads, shared, **rest)


def dq_block(form: Form) -> Callable:
    """The work of a block of `dq_kernel`."""
    D, keys, own, kind = form.D, form.step, form.own, form.operands
    rows, threads, wide, half = 16 * form.warps, 32 * form.warps, D // 2, form.step // 2
    (_, load_pair), save, fragments = kind.loads(form, rows), kind.save(form), kind.fragments(form)
    loop, limited = make_key_loop(form, over_keys(form)), form.limited
    take_deltas = softmax.make_take_deltas(D, kind.size, kind.dot)

    def block_of_queries(arrays: tuple, given: Given) -> None:
        q, k, v, o, do, dq = arrays
        sizes, lse, delta = sizes_of(given, limited), given.lse, given.delta
        T, at, base = sizes.T, mma.query_block(sizes, rows), mma.shared_base()
        # 2. Queries and their do; delta.
        of_do = mma.head_of(do, at.batch, at.head)
        load_pair(base, mma.head_of(q, at.batch, at.head), of_do, at.first, T)
        line = 4 * (int64(at.number) * layout.round_up(T, layout.PAD))
        parts = QueryParts(
            cuda.local.array(half, float32), cuda.local.array(half, float32), fragments(),
            cuda.local.array(wide, float32), cuda.local.array(2, float32),
            cuda.local.array(2, float32),
        )  # fmt: skip
        y, row = mma.head_of(o, at.batch, at.head), int32(at.first + mma.own_warp() * 16)
        of = softmax.Outputs(y, of_do, lse + line, delta + line)
        take_deltas(parts.lse, parts.delta, of, int32(row + mma.own_row()), mma.own_lane(), T)
        after = int32(at.first + rows)
        softmax.pad_line(delta + line, after, T, float32(0), mma.own_thread(), threads)
        # 3. All tiles of keys.
        of_k, of_v = mma.head_of(k, at.batch, at.kv), mma.head_of(v, at.batch, at.kv)
        end = int32((min(T, after) + keys - 1) // keys)
        layout.clear(parts.dq, wide)
        work = Keys(of_k, of_v, T, end, at.first, mma.Limits(sizes.limit, at.batch))
        loop(parts, base, int32(base + 2 * own), work, sizes.scale)
        # 4. Out.
        mine, to = int32(base + mma.own_warp() * 32 * D), mma.head_of(dq, at.batch, at.head)
        save(parts.dq, sizes.root, sizes.root, mine, to, row, T)

    return block_of_queries


@functools.cache
def dq_kernel(form: Form) -> Kernel:
    """dq and delta. Grid: (heads at a time, tiles of queries, rounds), the last tile first."""
    block = dq_block(form)

    def flash_mma_dq(
        q: mma.Strided, k: mma.Strided, v: mma.Strided, o: mma.Strided, do: mma.Strided,
        dq: mma.Strided, given: Given,
    ):  # fmt: skip
        block((q, k, v, o, do, dq), given)

    return kernel_of(flash_mma_dq, form, 2 * (form.own + form.stages * form.size))


class KeyParts(NamedTuple):
    """A thread's part of a step of dk and dv, on transposed tiles: s, then p, then ds, and dp, 16
    keys x queries; operands; dk and dv so far.
    """

    s: Any
    dp: Any
    by: Any
    dk: Any
    dv: Any


def forbid_earlier(s: Any, queries: int, distance: int) -> None:
    """Forbid the queries that come before their key, on a transposed tile.

    distance: from this lane's first query to its upper key.
    """
    layout.forbid_left(s, queries, distance, int32(distance + 8))


def over_queries(form: Form) -> Callable:
    """A step of `dkdv_kernel`: one tile of queries."""
    D, queries, size, own = form.D, form.step, form.size, form.own
    rows_times = form.operands.rows_product(form)

    def probabilities(x: tuple, of: softmax.Span) -> None:
        softmax.column_probabilities(x[0], of, x[1], x[2])

    def gradients(x: tuple, of: softmax.Span) -> None:
        softmax.column_gradients(x[0], x[1], of, x[2])

    add_to_dv = form.operands.columns_product(form, probabilities)
    add_to_dk = form.operands.columns_product(form, gradients)

    def key_step(
        parts: KeyParts, k: int, q: int, line: int, where: Where, scale: float
    ) -> None:
        """dv += p^T do, dk += ds^T q. k: address of A, values follow; q: of the tile of queries, do
        follows; line: of the tile's lse.
        """
        s, dp, by, ahead = parts.s, parts.dp, parts.by, where.ahead
        line, turned = int32(line + 4 * mma.own_column()), int32(q + mma.left(D))
        rows_times(s, by, k, int32(q + mma.right(D)))
        if ahead > -16:
            forbid_earlier(s, queries, int32(ahead + mma.own_row() - mma.own_column()))
        mma.forbid_foreign(s, queries, int32(where.row - ahead), where.row, where.limits)
        add_to_dv(parts.dv, by, s, int32(turned + size), (s, line, scale))
        rows_times(dp, by, int32(k + own), int32(q + size + mma.right(D)))
        delta = int32(line + 4 * queries)
        add_to_dk(parts.dk, by, s, turned, (s, dp, delta))  # the scale comes at the end

    return key_step


class Group(NamedTuple):
    """The queries of a block of keys: tiles `first` to `first` + tiles - 1 of each query head that
    shares the keys. q, do: of the group's first head; steps in bytes from head to head; lse and
    delta: addresses of that head's lines, and bytes from line to line.
    """

    q: layout.Head
    q_head: int
    do: layout.Head
    do_head: int
    lse: int
    delta: int
    line: int
    first: int
    tiles: int
    limits: mma.Limits


def make_fill(form: Form) -> Callable:
    """fill(tiles, group, step, T): load q, do, lse and delta of a step to its stage."""
    queries, stages, size, load_line = form.step, form.stages, 2 * form.size, form.operands.line
    _, load_pair = form.operands.loads(form, queries)

    def fill(tiles: int, group: Group, step: int, T: int) -> None:
        """tiles: the stages, which their lines follow, of each lse and delta."""
        head = divide(step, group.tiles)
        row = int32((group.first + step - head * group.tiles) * queries)
        q = layout.Head(int64(group.q.start + head * group.q_head), group.q.step)
        do = layout.Head(int64(group.do.start + head * group.do_head), group.do.step)
        stage = int32(step % stages)
        load_pair(int32(tiles + stage * size), q, do, row, T)
        if mma.own_thread() < queries // 2:  # 4 values of lse, or of delta
            line, n = group.lse, mma.own_thread()
            if mma.own_thread() >= queries // 4:
                line, n = group.delta, int32(mma.own_thread() - queries // 4)
            lines = int32(tiles + stages * size + stage * (8 * queries))
            to = int32(lines + 16 * mma.own_thread())
            load_line(to, int64(line + head * group.line + 4 * row + 16 * n))

    return fill


def make_query_loop(form: Form) -> Callable:
    """All steps of a block of `dkdv_kernel`."""
    D, queries, stages, size = form.D, form.step, form.stages, 2 * form.size
    here, commit = form.operands.wait(stages), form.operands.commit
    own, fill, step = 2 * form.own, make_fill(form), over_queries(form)

    def loop(
        parts: KeyParts, keys: int, group: Group, first: int, steps: int, T: int, scale: float
    ) -> None:
        """Heads one after the other, each from the diagonal on. The first group of copies is not
        committed yet. keys: the tile of the block's own, from `first` on; values, the stages of
        queries and the lines follow it.
        """
        k = int32(keys + mma.own_warp() * 32 * D + mma.left(D))
        key = int32(first + mma.own_warp() * 16)
        tiles, tile = int32(keys + own), group.first
        lines = int32(tiles + stages * size)
        for i in range(stages - 1):
            if i < steps:
                fill(tiles, group, int32(i), T)
            commit()
        for i in range(steps):
            here()  # this thread's copies of this step
            cuda.syncthreads()  # everybody's; and all have left the stage that is filled next
            if stages == 1 or i + stages - 1 < steps:
                fill(tiles, group, int32(i + stages - 1), T)
            commit()
            ahead = int32(key - tile * queries)
            if ahead < queries:  # or else all its queries come before all keys of this warp
                q = int32(tiles + i % stages * size)
                line = int32(lines + i % stages * (8 * queries))
                step(parts, k, q, line, Where(ahead, key, group.limits), scale)
            tile = int32(tile + 1)
            if tile == group.first + group.tiles:
                tile = group.first

    return loop


def tiles_to(T: int, queries: int, last: int, limits: mma.Limits) -> int:
    """The end of the tiles of queries that see any of a block's keys, of which `last` is the last.
    """
    if limits.limit.on:
        return layout.limit_of(limits.limit, limits.batch, last) // queries + 1
    return (T + queries - 1) // queries


def dkdv_block(form: Form) -> Callable:
    """The work of a block of `dkdv_kernel`."""
    D, queries, own, kind = form.D, form.step, form.own, form.operands
    rows, wide, half = 16 * form.warps, D // 2, form.step // 2
    (_, load_pair), save, fragments = kind.loads(form, rows), kind.save(form), kind.fragments(form)
    loop, limited = make_query_loop(form), form.limited

    def block_of_keys(arrays: tuple, given: Given) -> None:
        (q, k, v, do, dk, dv), sizes = arrays, sizes_of(given, limited)
        T, number = sizes.T, int32(cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x)
        kv_heads = divide(sizes.heads, sizes.sharing)
        batch = divide(number, kv_heads)
        kv, first = int32(number - batch * kv_heads), int32(cuda.blockIdx.y * rows)
        head, limits = int32(kv * sizes.sharing), mma.Limits(sizes.limit, batch)
        # 2. Keys and values.
        load_pair(mma.shared_base(), mma.head_of(k, batch, kv), mma.head_of(v, batch, kv), first, T)
        # 3. All tiles of queries from the diagonal on, of all heads of the group.
        line, tile = 4 * int64(layout.round_up(T, layout.PAD)), int32(first // queries)
        of_line = (int64(batch) * sizes.heads + head) * line
        group = Group(
            mma.head_of(q, batch, head), q.head, mma.head_of(do, batch, head), do.head,
            given.lse + of_line, given.delta + of_line, line, tile,
            int32(tiles_to(T, queries, int32(first + rows - 1), limits) - tile), limits,
        )  # fmt: skip
        parts = KeyParts(
            cuda.local.array(half, float32), cuda.local.array(half, float32), fragments(),
            cuda.local.array(wide, float32), cuda.local.array(wide, float32),
        )  # fmt: skip
        layout.clear(parts.dk, wide)
        layout.clear(parts.dv, wide)
        steps = int32(group.tiles * sizes.sharing)
        # The address is asked for anew: kept, it pushes out sums of width 128.
        loop(parts, mma.shared_base(), group, first, steps, T, sizes.scale)
        # 4. Out, through this warp's own rows of keys and of values.
        warp = mma.own_warp()
        row, mine = int32(first + warp * 16), int32(mma.shared_base() + warp * 32 * D)
        save(parts.dk, sizes.root, sizes.root, mine, mma.head_of(dk, batch, kv), row, T)
        one, mine = float32(1), int32(mine + own)
        save(parts.dv, one, one, mine, mma.head_of(dv, batch, kv), row, T)

    return block_of_keys


@functools.cache
def dkdv_kernel(form: Form) -> Kernel:
    """dk and dv. Grid: (key heads at a time, tiles of keys, rounds), the first tile first."""
    block = dkdv_block(form)

    def flash_mma_dkdv(
        q: mma.Strided, k: mma.Strided, v: mma.Strided, do: mma.Strided, dk: mma.Strided,
        dv: mma.Strided, given: Given,
    ):  # fmt: skip
        block((q, k, v, do, dk, dv), given)

    shared = 2 * (form.own + form.stages * form.size) + form.stages * 8 * form.step
    return kernel_of(flash_mma_dkdv, form, shared)
