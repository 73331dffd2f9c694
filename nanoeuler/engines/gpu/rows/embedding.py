# Made from book/j-row-kernels.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-rows-embedding
"""Rows of the embedding into the stream, and the stream's gradient back into them.

tokens int32 (rows,), rows = B T in the order of sequences; table (V, C) and positions (context, C)
of one kind, the stream (rows, C) of any; gradients float32. A token's row is the sum of the rows
of dx at its places, in their order; `scatter_plan`, made on the host, says where these are.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.lang import vectors
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, cover
from nanoeuler.engines.gpu.lang.ptx import divide, load_int, load_int4
from nanoeuler.errors import UserError

CHUNK = 32   # rows of dx that one warp adds up; a token with more has several chunks
AHEAD = 4    # rows that it loads before it adds one
WARPS = 4    # of a block
BLOCKS = 8   # of a multiprocessor


def make_look(columns: int, kind: str, stream: str, learned: bool) -> Any:
    """look(table, token, positions, at, x, row): a token's row of the table, and of positions."""
    width, size, size_x = vectors.piece(kind, stream), vectors.SIZES[kind], vectors.SIZES[stream]
    load, store = vectors.make_load(kind, width), vectors.make_store(stream, width)

    def look(table, token, positions, at, x, row):
        values, others = cuda.local.array(width, float32), cuda.local.array(width, float32)
        for column in range(
            int32(cuda.threadIdx.x % vectors.LANES) * width, columns, vectors.LANES * width
        ):
            load(values, 0, vectors.place(table, token, columns, size) + column * size)
            if learned:
                load(others, 0, vectors.place(positions, at, columns, size) + column * size)
                for k in range(width):
                    values[k] += others[k]
            store(values, 0, vectors.place(x, row, columns, size_x) + column * size_x)

    return look


@functools.cache
def embed_kernel(columns: int, kind: str, stream: str, learned: bool) -> Kernel:
    """Rows of the table, plus rows of positions; see `embed_launch`. A warp has a row."""
    look = make_look(columns, kind, stream, learned)

    def embed(tokens, table, positions, x, rows, T, start):
        row = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // vectors.LANES)
        if row < rows:
            token = load_int(tokens + int64(row) * 4)
            at = int32(start + row - T * divide(row, T))
            look(table, token, positions, at, x, row)

    return Kernel(embed, "l l l l r r r", vectors.LANES * WARPS, target=(8, 0))


@functools.cache
def embed_places_kernel(columns: int, kind: str, stream: str) -> Kernel:
    """The same where places say which row of positions each row gets."""
    look = make_look(columns, kind, stream, True)

    def embed_places(tokens, table, positions, x, rows, places):
        row = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // vectors.LANES)
        if row < rows:
            token, at = load_int(tokens + int64(row) * 4), load_int(places + int64(row) * 4)
            look(table, token, positions, at, x, row)

    return Kernel(embed_places, "l l l l r l", vectors.LANES * WARPS, target=(8, 0))


def embed_launch(
    tokens: Any, table: Any, x: Any, T: int, *, positions: Any = None, start: int = 0,
    places: Any = None,
) -> Launch:  # fmt: skip
    """x (rows, C) = the rows of table (V, C) that tokens int32 (rows,) name, all of them below V.

    positions (context, C) of the table's kind: row start + i % T is added to row i, or, where
    places int32 (rows,) are given, row places[i].
    """
    (rows,), (V, columns) = tokens.shape, table.shape
    kind, stream = vectors.kind_of(table), vectors.kind_of(x)
    vectors.expect("tokens", tokens, (rows,), "int32")
    vectors.expect("the table", table, (V, columns), kind)
    vectors.expect("x", x, (rows, columns), stream)
    _fit(columns, rows, T)
    if positions is not None:
        context = positions.shape[0]
        vectors.expect("positions", positions, (context, columns), kind)
        if start < 0 or start + T > context:
            raise UserError(f"positions {start} to {start + T} are not among {context}")
    if positions is not None and places is not None:
        vectors.expect("places", places, (rows,), "int32")
        kernel = embed_places_kernel(columns, kind, stream)
        return Launch(kernel, (cover(rows, WARPS),), (tokens, table, positions, x, rows, places))
    kernel = embed_kernel(columns, kind, stream, positions is not None)
    args = tokens, table, vectors.given(positions), x, rows, T, start
    return Launch(kernel, (cover(rows, WARPS),), args)


def _fit(columns: int, rows: int, T: int) -> None:
    if columns % vectors.STEP or T < 1 or rows < 1 or rows % T:
        raise UserError(
            f"rows of {vectors.STEP} columns or a multiple, in sequences of T: "
            f"not {columns} columns, {rows} rows, T = {T}"
        )


def plan_sizes(rows: int, V: int) -> tuple[int, int, int]:
    """The most chunks, tokens with several of them, and chunks of such tokens, in any batch.

    A token at c places has c / CHUNK chunks, rounded up: at most c / CHUNK + 1, and, where it has
    several, at most 2 c / CHUNK.
    """
    chunks = min(rows, min(rows, V) + rows // CHUNK)
    return chunks, rows // (CHUNK + 1), 2 * rows // CHUNK


def plan_length(rows: int, V: int) -> int:
    """The int32 words of `scatter_plan`."""
    chunks, several, _ = plan_sizes(rows, V)
    return 4 * (1 + chunks + several) + rows


def scatter_plan(tokens: np.ndarray, V: int) -> np.ndarray:
    """The places of each token, for the embedding's backward: int32 (plan_length,).

    Rows of four: (chunks, tokens with several, 0, 0); of each chunk (token, first, end, slot), slot
    -1 where it is the token's only one; of each token with several (token, first slot, end, 0).
    Then the places, by token and in their order; first and end are numbers of these.
    """
    tokens = np.asarray(tokens).reshape(-1)
    if tokens.size == 0 or not 0 <= tokens.min() <= tokens.max() < V:
        raise UserError(f"tokens are one or more numbers in [0, {V})")
    order = np.argsort(tokens, kind="stable")
    names, starts, counts = np.unique(tokens[order], return_index=True, return_counts=True)
    chunks = -(-counts // CHUNK)
    of = np.repeat(np.arange(len(names)), chunks)  # the token's number of each chunk
    within = np.arange(len(of)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    first = starts[of] + within * CHUNK
    end = np.minimum(first + CHUNK, (starts + counts)[of])
    several = chunks[of] > 1
    slot = np.where(several, np.cumsum(several) - 1, -1)
    tops = np.flatnonzero(several & (within == 0))
    room, most, _ = plan_sizes(tokens.size, V)
    rows = np.zeros((1 + room + most, 4), np.int32)
    rows[0, :2] = len(of), len(tops)
    rows[1 : 1 + len(of)] = np.stack([names[of], first, end, slot], axis=1)
    last = slot[tops] + chunks[of[tops]]
    rows[1 + room : 1 + room + len(tops), :3] = np.stack([names[of[tops]], slot[tops], last], 1)
    return np.concatenate([rows.reshape(-1), order.astype(np.int32)])


class Rows(NamedTuple):
    """Rows of a matrix, from the first to before the end: the i-th is order[i], order the address
    of a list, or where there is no list base + i * step."""

    order: int
    first: int
    end: int
    step: int
    base: int


def make_pile(kind: str, width: int, listed: bool) -> Any:
    """pile(sums, matrix, rows, columns): adds `Rows` of a matrix to sums, in order.

    matrix: the address of this thread's columns in row 0. listed: whether rows are in a list.
    """
    load, size = vectors.make_load(kind, width), vectors.SIZES[kind]
    ahead = AHEAD * width

    def row_of(rows, i):
        return load_int(rows.order + int64(i) * 4) if listed else int32(rows.base + i * rows.step)

    def pile(sums, matrix, rows, columns):
        values = cuda.local.array(ahead, float32)
        for k in range(width):
            sums[k] = float32(0)
        i = rows.first
        while i + AHEAD <= rows.end:
            for k in range(AHEAD):
                row = row_of(rows, i + k)
                load(values, k * width, vectors.place(matrix, row, columns, size))
            for k in range(AHEAD):
                for c in range(width):
                    sums[c] += values[k * width + c]
            i += AHEAD
        while i < rows.end:
            load(values, 0, vectors.place(matrix, row_of(rows, i), columns, size))
            for c in range(width):
                sums[c] += values[c]
            i += 1

    return pile


def make_put(width: int) -> Any:
    """put(sums, address, add): float32 sums to memory, or added to what is there."""
    load, store = vectors.make_load("float32", 4, own=True), vectors.make_store("float32", 4)

    def put(sums, address, add):
        old = cuda.local.array(4, float32)
        for k in range(0, width, 4):
            if add:
                load(old, 0, address + k * 4)
                for c in range(4):
                    old[c] += sums[k + c]
                store(old, 0, address + k * 4)
            else:
                store(sums, k, address + k * 4)

    return put


@functools.cache
def scatter_kernel(columns: int, kind: str) -> Kernel:
    """Adds up the rows of dx of each chunk: into the token's row, or into the chunk's slot.

    A warp has a chunk's strip of 32 pieces; of W warps, warp w has strips w, w + W, ...
    """
    width, size = vectors.piece(kind), vectors.SIZES[kind]
    strips = cover(columns, vectors.LANES * width)
    pile, put = make_pile(kind, width, listed=True), make_put(width)

    def scatter(dx, plan, offset, dtable, slots):
        order = plan + offset  # where the places begin
        sums, lane = cuda.local.array(width, float32), int32(cuda.threadIdx.x % vectors.LANES)
        item = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // vectors.LANES)
        count, _, _, _ = load_int4(plan)
        while item < count * strips:
            chunk = item // strips
            column = int32((item - chunk * strips) * vectors.LANES + lane) * width
            token, first, end, slot = load_int4(plan + int64(1 + chunk) * 16)
            if column < columns:
                pile(sums, dx + column * size, Rows(order, first, end, 0, 0), columns)
                if slot < 0:
                    put(sums, vectors.place(dtable, token, columns, 4) + column * 4, True)
                else:
                    put(sums, vectors.place(slots, slot, columns, 4) + column * 4, False)
            item += int32(cuda.gridDim.x * WARPS)

    return Kernel(scatter, "l l l l l", vectors.LANES * WARPS, target=(8, 0))


@functools.cache
def several_kernel(columns: int) -> Kernel:
    """Adds up the slots of each token with several chunks, into its row; as `scatter_kernel`."""
    width = vectors.piece("float32")
    strips = cover(columns, vectors.LANES * width)
    pile, put = make_pile("float32", width, listed=False), make_put(width)

    def several(plan, room, dtable, slots):
        sums, lane = cuda.local.array(width, float32), int32(cuda.threadIdx.x % vectors.LANES)
        item = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // vectors.LANES)
        _, count, _, _ = load_int4(plan)
        while item < count * strips:
            which = item // strips
            column = int32((item - which * strips) * vectors.LANES + lane) * width
            token, first, end, _ = load_int4(plan + int64(1 + room + which) * 16)
            if column < columns:
                pile(sums, slots + column * 4, Rows(slots, first, end, 1, 0), columns)
                put(sums, vectors.place(dtable, token, columns, 4) + column * 4, True)
            item += int32(cuda.gridDim.x * WARPS)

    return Kernel(several, "l r l l", vectors.LANES * WARPS, target=(8, 0))


@functools.cache
def positions_kernel(columns: int, kind: str) -> Kernel:
    """Adds row t of every sequence, in their order, to row t of dpositions; as `scatter_kernel`."""
    width, size = vectors.piece(kind), vectors.SIZES[kind]
    strips = cover(columns, vectors.LANES * width)
    pile, put = make_pile(kind, width, listed=False), make_put(width)

    def add_positions(dx, dpositions, B, T):
        sums, lane = cuda.local.array(width, float32), int32(cuda.threadIdx.x % vectors.LANES)
        item = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // vectors.LANES)
        t = item // strips
        column = int32((item - t * strips) * vectors.LANES + lane) * width
        if t < T and column < columns:
            pile(sums, dx + column * size, Rows(dx, 0, B, T, t), columns)
            put(sums, vectors.place(dpositions, t, columns, 4) + column * 4, True)

    return Kernel(add_positions, "l l r r", vectors.LANES * WARPS, target=(8, 0))


def slots_shape(rows: int, V: int, columns: int) -> tuple[int, int]:
    """The shape of the working memory of `embed_backward_launches`, float32."""
    return max(1, plan_sizes(rows, V)[2]), columns


def embed_backward_launches(
    dx: Any, plan: Any, dtable: Any, slots: Any, *, T: int = 1, dpositions: Any = None,
    multiprocessors: int = MULTIPROCESSORS,
) -> list[Launch]:  # fmt: skip
    """Adds to dtable (V, C) float32, and to rows 0 to T - 1 of dpositions (context, C).

    dx (rows, C); plan: `scatter_plan` of the tokens, on the device; slots: `slots_shape`.
    """
    (rows, columns), V, kind = dx.shape, dtable.shape[0], vectors.kind_of(dx)
    room, several, _ = plan_sizes(rows, V)
    _fit(columns, rows, T)
    vectors.expect("dx", dx, (rows, columns), kind)
    vectors.expect("the table's gradient", dtable, (V, columns), "float32")
    vectors.expect("the plan", plan, (plan_length(rows, V),), "int32")
    vectors.expect("slots", slots, slots_shape(rows, V, columns), "float32")

    def grid(items: int) -> tuple[int]:
        return (min(cover(items, WARPS), multiprocessors * BLOCKS),)

    strips = cover(columns, vectors.LANES * vectors.piece(kind))
    narrow = cover(columns, vectors.LANES * 4)
    args = dx, plan, 16 * (1 + room + several), dtable, slots
    made = [Launch(scatter_kernel(columns, kind), grid(room * strips), args)]
    if several:
        args = plan, room, dtable, slots
        made.append(Launch(several_kernel(columns), grid(several * narrow), args))
    if dpositions is not None:
        vectors.expect(
            "the positions' gradient", dpositions, (dpositions.shape[0], columns), "float32"
        )
        if T > dpositions.shape[0]:
            raise UserError(f"sequences of {T} positions are longer than {dpositions.shape[0]}")
        args = dx, dpositions, rows // T, T
        made.append(Launch(positions_kernel(columns, kind), (cover(T * strips, WARPS),), args))
    return made
