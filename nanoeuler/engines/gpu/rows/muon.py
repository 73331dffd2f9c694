# Made from book/13b-muon-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-muon-gpu-rows
"""What Muon does before and behind its products: momentum, the norm of each matrix, the step.

Matrices lie in the flat buffers as rows of `pitch` float32. The products take them in batches,
bf16 (1, count, r, c) with r <= c: one that is taller lies there transposed. A block moves a tile of
64 x 64. Where the step's decision says no (`gradient_norm.decide`), nothing in the flat buffers is
written, and the batches are zeros.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, cover
from nanoeuler.engines.gpu.lang.vectors import expect, kind_of
from nanoeuler.engines.gpu.rows import adamw
from nanoeuler.engines.gpu.rows.block_reduce import block_sum
from nanoeuler.errors import UserError

THREADS = 256  # of a block: 16 by 16 of them have four columns each of a row, and four rows
SIDE = 64  # rows and columns of a tile
APART = SIDE + 1  # float32 from row to row of a tile in shared memory: columns in other banks
LANE = 4  # columns that a thread moves at once: 16 bytes of float32, 8 of bf16
ROUNDS = SIDE * SIDE // (THREADS * LANE)  # rows of a thread, 16 apart
LEAST = 1.2e-38  # of float32: below it numbers are subnormal, and an inverse root is infinite


class Matrix(NamedTuple):
    """A matrix in the flat buffers: where it begins, elements from row to row, its extents, and
    what its step is multiplied by."""

    start: int
    pitch: int
    rows: int
    columns: int
    scale: float


class MuonRules(NamedTuple):
    """What Muon does: the matrices; their rate over AdamW's; the momentum; the steps of
    Newton-Schulz and the coefficients of its polynomial a x + b x^3 + c x^5."""

    matrices: tuple[Matrix, ...]
    ratio: float
    momentum: float
    steps: int
    coefficients: tuple[float, float, float]


def shapes(matrices: Sequence[Matrix]) -> dict[tuple[int, int], list[Matrix]]:
    """(r, c), r <= c -> the matrices that have these extents, in one order or the other."""
    found: dict[tuple[int, int], list[Matrix]] = {}
    for one in matrices:
        r, c = sorted((one.rows, one.columns))
        if one.rows % 8 or one.columns % 8 or one.start % LANE or one.pitch % LANE:
            raise UserError(
                f"expected matrices of multiples of 8 for Muon on a GPU, got {one.rows} by "
                f"{one.columns}: choose a width and heads that give them, or the engine cpu"
            )
        found.setdefault((r, c), []).append(one)
    return found


def matrix_tiles(matrices: Sequence[Matrix]) -> np.ndarray:
    """The tiles of a batch's matrices, matrix after matrix, int32 (tiles, 8).

    The first element in the flat buffers, the pitch there; rows and columns; the first element in
    the batch; whether it lies there transposed; the scale's bits; and a 0.
    """
    made = []
    for i, (start, pitch, rows, columns, scale) in enumerate(matrices):
        width, turned = max(rows, columns), rows > columns
        (bits,) = np.float32([1.0 * scale]).view(np.int32).tolist()
        for y in range(0, rows, SIDE):
            for x in range(0, columns, SIDE):
                to = i * rows * columns + (x * width + y if turned else y * width + x)
                down, across = min(SIDE, rows - y), min(SIDE, columns - x)
                made.append((start + y * pitch + x, pitch, down, across, to, turned, bits, 0))
    ends = [one.start + one.rows * one.pitch for one in matrices]
    if max(*ends, len(matrices) * rows * columns) >= 1 << 31:
        raise UserError("a flat buffer and a batch of matrices have less than 2^31 elements each")
    return np.array(made, np.int32)


def matrix_parts(matrices: Sequence[Matrix]) -> np.ndarray:
    """Where the tiles of each matrix begin and end, int32 (count, 2)."""
    counts = [cover(one.rows, SIDE) * cover(one.columns, SIDE) for one in matrices]
    ends = np.cumsum(counts)
    return np.stack([ends - counts, ends], 1).astype(np.int32)


class Corner(NamedTuple):
    """A tile: as `matrix_tiles` says, and which four columns and which rows are this thread's."""

    first: int
    pitch: int
    rows: int
    columns: int
    to: int
    turned: int
    scale: float
    row: int
    column: int


def read_corner(table):
    """This block's tile."""
    t, at = int32(cuda.threadIdx.x), table + 32 * int64(cuda.blockIdx.x)
    first, pitch, rows, columns = ptx.load_int4(at)
    to, turned, scale, _ = ptx.load_int4(at + 16)
    scale = ptx.float_of(scale)
    row, column = int32(t // 16), int32(t % 16 * LANE)
    return Corner(first, pitch, rows, columns, to, turned, scale, row, column)


def mixed(m, g, keep, rest):
    """The new m, and the direction: eq-muon-momentum."""
    m = float32(keep * m + rest * g)
    return m, float32(keep * m + rest * g)


def direct(u, gradients, m, clip, go, keep, rest):
    """LANE momenta at an address become new, and u their directions; or u 0, if nothing goes."""
    for j in range(LANE):
        u[j] = float32(0)
    if go != float32(0):
        g0, g1, g2, g3 = ptx.load_float4(gradients)
        a, b, c, d = ptx.load_own_float4(m)
        a, u[0] = mixed(a, float32(g0 * clip), keep, rest)
        b, u[1] = mixed(b, float32(g1 * clip), keep, rest)
        c, u[2] = mixed(c, float32(g2 * clip), keep, rest)
        d, u[3] = mixed(d, float32(g3 * clip), keep, rest)
        ptx.store_float4(m, a, b, c, d)


def put_four(u, batch, to, on):
    """LANE directions to a batch, as bf16."""
    at = batch + 2 * (int64(to) + on)
    ptx.store_int2(at, ptx.pack_bf16(u[0], u[1]), ptx.pack_bf16(u[2], u[3]))


def fetch_four(u, batch, to, on):
    """LANE directions of a batch."""
    low, high = ptx.load_int2(batch + 2 * (int64(to) + on))
    u[0], u[1] = ptx.low_bf16(low), ptx.high_bf16(low)
    u[2], u[3] = ptx.low_bf16(high), ptx.high_bf16(high)


class Directions(NamedTuple):
    """Where directions go: a batch with rows of `width`; sums (tiles,): of each tile's squares."""

    batch: int
    sums: int
    width: int


def leave_row(u, place, tile, row, out, total):
    """LANE directions of a row to the batch, or to shared memory; total, with their squares."""
    for j in range(LANE):
        total = float32(total + u[j] * u[j])
        if tile.turned:
            place[row, tile.column + j] = u[j]
    if not tile.turned:
        put_four(u, out.batch, tile.to, int32(row * out.width + tile.column))
    return total


def put_turned(place, u, batch, tile, width):
    """A tile's directions from shared memory to a batch, where columns are rows."""
    for i in range(ROUNDS):
        row, column = int32(tile.row + 16 * i), tile.column
        if row < tile.columns and column < tile.rows:
            for j in range(LANE):
                u[j] = place[column + j, row]
            put_four(u, batch, tile.to, int32(row * width + column))


def leave_tile(u, place, tile, out, total):
    """After its rows: a transposed tile to the batch, and the sum of the block's squares."""
    if tile.turned:
        cuda.syncthreads()
        put_turned(place, u, out.batch, tile, out.width)
    total = block_sum(total, THREADS // 32)
    if cuda.threadIdx.x == 0:
        ptx.store_float(out.sums + 4 * int64(cuda.blockIdx.x), total)


def momentum(table, decision, gradients, m, out: Directions, keep, rest):
    """m = keep m + rest g and the direction keep m + rest g of the new m, to the batch in bf16.

    g: the gradient, clipped. Where the decision says no, m stays, and directions and sums are 0.
    """
    clip, _, go, _ = ptx.load_float4(decision + 16)
    tile = read_corner(table)
    place, total = cuda.shared.array((SIDE, APART), float32), float32(0)
    u = cuda.local.array(LANE, float32)
    for i in range(ROUNDS):
        row, column = int32(tile.row + 16 * i), tile.column
        if row < tile.rows and column < tile.columns:
            at = 4 * (tile.first + int64(row) * tile.pitch + column)
            direct(u, gradients + at, m + at, clip, go, keep, rest)
            total = leave_row(u, place, tile, row, out, total)
    leave_tile(u, place, tile, out, total)


# As many blocks as the table has tiles.
MOMENTUM = Kernel(momentum, "l l l l l l r f f", THREADS, target=(8, 0))


def norms(parts, sums, scales, width):
    """scales (2, width): 1 / norm^2 and 1 / norm of each matrix, of a matrix of zeros 0; one block
    each."""
    t, i = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
    first, end = ptx.load_int2(parts + 8 * int64(i))
    total = float32(0)
    for k in range(first + t, end, THREADS):
        total = float32(total + ptx.load_float(sums + 4 * int64(k)))
    total = block_sum(total, THREADS // 32)
    if t == 0:
        scale = ptx.inverse_root(total) if total >= float32(LEAST) else float32(0)
        ptx.store_float(scales + 4 * int64(i), float32(scale * scale))
        ptx.store_float(scales + 4 * int64(width + i), scale)


# A block for each matrix.
NORMS = Kernel(norms, "l l l r", THREADS, target=(8, 0))


class Take(NamedTuple):
    """Where memory comes from. place(array): known numbers, where the target can read them.
    scratch(shape, dtype): an array that nobody has written."""

    place: Callable[[np.ndarray], Any]
    scratch: Callable[[tuple[int, ...], Any], Any]


def scales_shape(count: int) -> tuple[int, int]:
    """Two rows for so many matrices, each of whole 16 bytes."""
    return 2, cover(count, LANE) * LANE


def batch_launches(
    kernel: Kernel, matrices: Sequence[Matrix], first: tuple, batch: Any, scales: Any, take: Take,
    last: tuple = (),
) -> list[Launch]:  # fmt: skip
    """A kernel that leaves a batch's directions, and their norms; the kernel's arguments are its
    table, `first`, `Directions` and `last`."""
    count, table = len(matrices), matrix_tiles(matrices)
    expect("batch", batch, (1, count, min(matrices[0][2:4]), max(matrices[0][2:4])), "bf16")
    expect("scales", scales, scales_shape(count), "float32")
    out = Directions(batch, take.scratch((len(table),), np.float32), batch.shape[-1])
    args = take.place(table), *first, *out, *last
    of_norms = take.place(matrix_parts(matrices)), out.sums, scales, scales.shape[1]
    return [Launch(kernel, (len(table),), args), Launch(NORMS, (count,), of_norms)]


def momentum_launches(
    rules: MuonRules, matrices: Sequence[Matrix], buffers: adamw.Buffers, decision: Any, batch: Any,
    scales: Any, take: Take,
) -> list[Launch]:  # fmt: skip
    """Momentum of one batch, uint16 (1, count, r, c), and its `scales_shape`, float32."""
    first = decision, buffers.gradients, buffers.m
    constants = float(rules.momentum), float(1 - rules.momentum)
    return batch_launches(MOMENTUM, matrices, first, batch, scales, take, constants)


def moved(w, o, tile, rate, decay):
    """A parameter after its step: eq-muon-step."""
    return float32(w - rate * (float32(tile.scale * o) + decay * w))


def fetch_turned(place, batch, tile, width):
    """A tile of a batch whose rows are columns, to shared memory."""
    for i in range(ROUNDS):
        row, column = int32(tile.row + 16 * i), tile.column
        if row < tile.columns and column < tile.rows:
            at = batch + 2 * (int64(tile.to) + int32(row * width + column))
            low, high = ptx.load_int2(at)
            place[column, row], place[column + 1, row] = ptx.low_bf16(low), ptx.high_bf16(low)
            place[column + 2, row], place[column + 3, row] = ptx.low_bf16(high), ptx.high_bf16(high)


def make_masters(halves: bool, copied: bool) -> tuple[Callable, Callable]:
    """bring(w, weights, copy, at), keep(w, weights, copy, at): LANE parameters and their copy."""

    def bring(w, weights, copy, at):
        if halves:
            a, b = ptx.load_own_int2(copy + 2 * at)
            c, d = ptx.load_own_int2(weights + 2 * at)
            w[0], w[1] = adamw.join_lower(a, c), adamw.join_upper(a, c)
            w[2], w[3] = adamw.join_lower(b, d), adamw.join_upper(b, d)
        else:
            w[0], w[1], w[2], w[3] = ptx.load_own_float4(weights + 4 * at)

    def keep(w, weights, copy, at):
        if halves:
            adamw.put_halves(w, 0, copy, weights, at)
        else:
            adamw.put(w, 0, weights, at)
            if copied:
                adamw.put_copy(w, 0, copy, at)

    return bring, keep


@cache
def move_kernel(halves: bool, copied: bool) -> Kernel:
    """The kernel of the step of a batch's matrices; as many blocks as the table has tiles.

    Bytes of a parameter: 4 and 2 read, 4 written, and 2 more where masters in float32 have a copy.
    """
    bring, keep = make_masters(halves, copied)

    def move(table, decision, weights, copy, batch, width, ratio):
        lr, _, _, decay = ptx.load_float4(decision)
        _, _, go, _ = ptx.load_float4(decision + 16)
        tile = read_corner(table)
        place = cuda.shared.array((SIDE, APART), float32)
        w, o = cuda.local.array(LANE, float32), cuda.local.array(LANE, float32)
        if go == float32(0):
            return
        rate = float32(ratio * lr)
        if tile.turned:
            fetch_turned(place, batch, tile, width)
            cuda.syncthreads()
        for i in range(ROUNDS):
            row, column = int32(tile.row + 16 * i), tile.column
            if row < tile.rows and column < tile.columns:
                at = tile.first + int64(row) * tile.pitch + column
                bring(w, weights, copy, at)
                if tile.turned:
                    for j in range(LANE):
                        o[j] = place[row, column + j]
                else:
                    fetch_four(o, batch, int64(tile.to) + row * width, column)
                for j in range(LANE):
                    w[j] = moved(w[j], o[j], tile, rate, decay)
                keep(w, weights, copy, at)

    return Kernel(move, "l l l l l r f", THREADS, target=(8, 0))


def move_launch(
    rules: MuonRules, matrices: Sequence[Matrix], buffers: adamw.Buffers, decision: Any, batch: Any,
    take: Take,
) -> Launch:  # fmt: skip
    """The step of a batch's matrices, whose new directions are in `batch`, uint16 (1, count, r, c).

    buffers: as `adamw_launch` has them; there are copies if they are as long as the masters.
    """
    weights, copy = buffers.weights, buffers.copy
    halves = kind_of(weights) == "bf16"
    copied = halves or tuple(copy.shape) == tuple(weights.shape)
    table = matrix_tiles(matrices)
    args = take.place(table), decision, weights, copy, batch, batch.shape[-1], float(rules.ratio)
    return Launch(move_kernel(halves, copied), (len(table),), args)


# %% sec-muon-gpu-others
def normalise(batch, scales, fours):
    """batch (count, 4 fours) in bf16 times scales (count,): block (x, i), thread -> four numbers of
    matrix i."""
    four, i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), int32(cuda.blockIdx.y)
    if four < fours:
        at, scale = batch + 8 * (int64(i) * fours + four), ptx.load_float(scales + 4 * int64(i))
        low, high = ptx.load_own_int2(at)
        ptx.store_int2(
            at,
            ptx.pack_bf16(ptx.low_bf16(low) * scale, ptx.high_bf16(low) * scale),
            ptx.pack_bf16(ptx.low_bf16(high) * scale, ptx.high_bf16(high) * scale),
        )


# Blocks for the numbers of a matrix, by matrices.
NORMALISE = Kernel(normalise, "l l r", THREADS, target=(8, 0))


class Coefficients(NamedTuple):
    """Of a polynomial: what I, A and A^2 are multiplied by."""

    one: float
    two: float
    three: float


def polynomial(squares, grams, out, width, fours, by: Coefficients):
    """out = one I + two A + three S of matrices `width` wide: S float32, A and out bf16; a thread
    has four numbers of all `fours`."""
    four = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    if four < fours:
        line = ptx.divide(4 * four, width)
        column = int32(4 * four - line * width)
        row = int32(line - ptx.divide(line, width) * width)
        at = int64(four) * 4
        u = cuda.local.array(LANE, float32)
        u[0], u[1], u[2], u[3] = ptx.load_float4(squares + 4 * at)
        low, high = ptx.load_int2(grams + 2 * at)
        u[0] = float32(by.three * u[0] + by.two * ptx.low_bf16(low))
        u[1] = float32(by.three * u[1] + by.two * ptx.high_bf16(low))
        u[2] = float32(by.three * u[2] + by.two * ptx.low_bf16(high))
        u[3] = float32(by.three * u[3] + by.two * ptx.high_bf16(high))
        for j in range(LANE):
            if row == column + j:
                u[j] = float32(u[j] + by.one)
        put_four(u, out, int32(0), at)


# As many threads as there are fours.
POLYNOMIAL = Kernel(polynomial, "l l l r r f f f", THREADS, target=(8, 0))


# %% sec-muon-gpu-lines
Stretch = tuple[int, int, float]  # of the flat buffers: first, end, and what steps are times


def stretches(matrices: Sequence[Matrix]) -> list[Stretch]:
    """What matrices have of the flat buffers, in order; neighbours of one scale are one stretch."""
    firsts = np.concatenate([one.start + one.pitch * np.arange(one.rows) for one in matrices])
    widths, scales = (np.repeat([one[i] for one in matrices], [one.rows for one in matrices])
                      for i in (3, 4))  # fmt: skip
    order = np.argsort(firsts)
    firsts, ends, scales = firsts[order], (firsts + widths)[order], scales[order]
    apart = (firsts[1:] != ends[:-1]) | (scales[1:] != scales[:-1])
    heads = np.flatnonzero(np.concatenate([[True], apart]))
    tails = np.append(heads[1:], len(firsts)) - 1
    parts = firsts[heads], ends[tails], scales[heads]
    return list(zip(*(part.tolist() for part in parts), strict=True))


def within(found: Sequence[Stretch], start: int, stop: int) -> list[Stretch]:
    """What stretches have of the elements from start to stop."""
    return [(max(first, start), min(end, stop), scale) for first, end, scale in found
            if first < stop and start < end]  # fmt: skip


def line_tiles(found: Sequence[Stretch], start: int) -> np.ndarray:
    """The tiles of stretches in lines of SIDE, int32 (tiles, 8), as `matrix_tiles` has them.

    All places are counted from `start`, in the flat buffers and in that of directions.
    """
    made = []
    for first, end, scale in found:
        (bits,) = np.float32([1.0 * scale]).view(np.int32).tolist()
        for at in range(first - start, end - start, SIDE * SIDE):
            down, rest = divmod(min(SIDE * SIDE, end - start - at), SIDE)
            if down:
                made.append((at, SIDE, down, SIDE, at, 0, bits, 0))
            if rest:
                at += down * SIDE
                made.append((at, SIDE, 1, rest, at, 0, bits, 0))
    return np.array(made, np.int32).reshape(-1, 8)


def collect(table, flat, out: Directions):
    """Matrices from flat directions to a batch, both bf16."""
    tile = read_corner(table)
    place, total = cuda.shared.array((SIDE, APART), float32), float32(0)
    u = cuda.local.array(LANE, float32)
    for i in range(ROUNDS):
        row, column = int32(tile.row + 16 * i), tile.column
        if row < tile.rows and column < tile.columns:
            fetch_four(u, flat, tile.first, int64(row) * tile.pitch + column)
            total = leave_row(u, place, tile, row, out, total)
    leave_tile(u, place, tile, out, total)


# As many blocks as the table has tiles. Bytes of a direction: 2 read, 2 written.
COLLECT = Kernel(collect, "l l l l r", THREADS, target=(8, 0))


def deliver(table, batch, flat, width):
    """Matrices from a batch back to flat directions, both bf16."""
    tile = read_corner(table)
    place = cuda.shared.array((SIDE, APART), float32)
    o = cuda.local.array(LANE, float32)
    if tile.turned:
        fetch_turned(place, batch, tile, width)
        cuda.syncthreads()
    for i in range(ROUNDS):
        row, column = int32(tile.row + 16 * i), tile.column
        if row < tile.rows and column < tile.columns:
            if tile.turned:
                for j in range(LANE):
                    o[j] = place[row, column + j]
            else:
                fetch_four(o, batch, tile.to, int32(row * width + column))
            put_four(o, flat, tile.first, int64(row) * tile.pitch + column)


# The same.
DELIVER = Kernel(deliver, "l l l r", THREADS, target=(8, 0))


def line_momentum_launch(
    rules: MuonRules, tiles: np.ndarray, buffers: adamw.Buffers, decision: Any, flat: Any,
    take: Take,
) -> Launch:  # fmt: skip
    """Momentum of `line_tiles`; flat: where the directions go, uint16 as long as the gradients."""
    expect("directions", flat, tuple(buffers.gradients.shape), "bf16")
    sums = take.scratch((len(tiles),), np.float32)  # which nobody reads
    constants = float(rules.momentum), float(1 - rules.momentum)
    args = take.place(tiles), decision, buffers.gradients, buffers.m, flat, sums, SIDE, *constants
    return Launch(MOMENTUM, (len(tiles),), args)


def line_move_launch(
    rules: MuonRules, tiles: np.ndarray, buffers: adamw.Buffers, decision: Any, flat: Any,
    take: Take,
) -> Launch:  # fmt: skip
    """The step of `line_tiles`, with flat directions; buffers as for `move_launch`."""
    weights, copy = buffers.weights, buffers.copy
    expect("directions", flat, tuple(weights.shape), "bf16")
    copied = tuple(copy.shape) == tuple(weights.shape)
    args = take.place(tiles), decision, weights, copy, flat, SIDE, float(rules.ratio)
    return Launch(move_kernel(False, copied), (len(tiles),), args)


def collect_launches(
    matrices: Sequence[Matrix], flat: Any, batch: Any, scales: Any, take: Take
) -> list[Launch]:
    """Matrices from flat directions to a batch, and its scales, as `momentum_launches` has them."""
    return batch_launches(COLLECT, matrices, (flat,), batch, scales, take)


def deliver_launch(matrices: Sequence[Matrix], batch: Any, flat: Any, take: Take) -> Launch:
    """A batch's matrices to flat directions, which may be fewer than the batch has."""
    table = matrix_tiles(matrices)
    return Launch(DELIVER, (len(table),), (take.place(table), batch, flat, batch.shape[-1]))
