# Made from book/19d-lora.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-lora-gpu-narrow
"""Products with matrices of few rows, on a GPU: what small adapters need beside the merge.

With W (P, K), X (N, K), Y (P, N) and G (P, K), where P is at most 48 and much less than K and N:

    across   Y = W X^T             (x A)^T and (dy B^T)^T
    down     G = Y X, or G += Y X  dA^T and dB

W, X and Y are bf16, G is float32. X is by far the largest, and is read once. The 16 rows of
mma.sync's A are those of W or Y. Sums are added in one order, always.

A launch makes the products of all adapters of a matrix, by a table of `Part`s. X is columns of x
(N, I) or of dy (N, O); W and G are places in flat arrays of one size, and Y is rows of H.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.gemm.float32 import eights
from nanoeuler.engines.gpu.gemm.mma_form import pitch
from nanoeuler.engines.gpu.gemm.mma_kernel import SUM_THREADS, sum_kernel
from nanoeuler.engines.gpu.gemm.mma_tile import Matrix
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, cover
from nanoeuler.engines.gpu.lang.vectors import expect
from nanoeuler.errors import UserError

MOST = 48     # rows P: three times those of A in mma.sync.m16n8k16, whose sums are in registers
SIDE = 16     # those rows, and the instruction's k
WARPS = 8     # of a block; they share the k of a product
EIGHT = 8     # bf16 in 16 bytes, what a lane loads at once; and columns of the instruction's B
ACROSS = 32   # rows of X in a block of `across`
STEP = 32     # columns of X in a warp's step there: 16 bytes of each of four lanes
DOWN = 64     # columns of X in a block of `down`: 16 bytes of each of eight lanes
WIDE = 68     # floats from row to row of their sums in shared memory: rows begin at other banks
LEAST = 4 * WARPS * SIDE  # rows of X in a piece of `down` but the last: at least 4 steps a warp


class Part(NamedTuple):
    """One product across and one down, with the same W's and G's place and the same X."""

    wide: int     # X is of x: 0, of dy: 1
    column: int   # where it begins there
    columns: int  # K
    start: int    # of W, and of G, in their flat arrays
    pitch: int    # elements from one of their rows to the next
    rows: int     # P
    own: int      # the row of H at which the Y begins that `across` makes
    other: int    # and the Y that `down` reads


def load_if(values, i, address, there):
    """values[i : i + 4] = the 16 bytes at an address, or zeros."""
    a, b, c, d = int32(0), int32(0), int32(0), int32(0)
    if there:
        a, b, c, d = ptx.load_int4(address)
    values[i], values[i + 1], values[i + 2], values[i + 3] = a, b, c, d


def make_across_step(tall: int) -> Callable:
    """step(sums, w, x, lane): 32 columns of two Matrices, W and X."""
    many = ACROSS // EIGHT
    own_x, own_w = 4 * many, 8 * tall

    def step(sums, w, x, lane):
        row, column = int32(lane >> 2), int32((lane & 3) * EIGHT)
        of_x, of_w = cuda.local.array(own_x, int32), cuda.local.array(own_w, int32)
        for j in range(many):
            n = int32(8 * j + row)
            at = x.start + (int64(n) * x.pitch + column) * 2
            load_if(of_x, 4 * j, at, n < x.rows and column < x.columns)
        for i in range(2 * tall):
            p = int32(8 * i + row)
            at = w.start + (int64(p) * w.pitch + column) * 2
            load_if(of_w, 4 * i, at, p < w.rows and column < w.columns)
        for i in range(tall):
            for j in range(many):
                for k in range(0, 4, 2):
                    at, low, high = 4 * (i * many + j), 8 * i + k, 8 * i + 4 + k
                    sums[at], sums[at + 1], sums[at + 2], sums[at + 3] = ptx.mma(
                        of_w[low], of_w[high], of_w[low + 1], of_w[high + 1],
                        of_x[4 * j + k], of_x[4 * j + k + 1],
                        sums[at], sums[at + 1], sums[at + 2], sums[at + 3])  # fmt: skip

    return step


def make_across_end(tall: int) -> Callable:
    """end(sums, y, t): the warps' sums, added in their order, to a Matrix of bf16."""
    many, slab = ACROSS // EIGHT, SIDE * ACROSS
    every = WARPS * slab

    def end(sums, y, t):
        pile = cuda.shared.array(every, float32)
        lane, row, n = int32(t & 31), int32(t >> 4), int32((t & 15) * 2)
        for i in range(tall):
            for j in range(many):
                at = 4 * (i * many + j)
                to = int32((t >> 5) * slab + (lane >> 2) * ACROSS + 8 * j + (lane & 3) * 2)
                pile[to], pile[to + 1] = sums[at], sums[at + 1]
                to = int32(to + 8 * ACROSS)
                pile[to], pile[to + 1] = sums[at + 2], sums[at + 3]
            cuda.syncthreads()
            p, a, b = int32(SIDE * i + row), float32(0), float32(0)
            for other in range(WARPS):
                at = int32(other * slab + row * ACROSS + n)
                a, b = float32(a + pile[at]), float32(b + pile[at + 1])
            if p < y.rows and n < y.columns:
                ptx.store_int(y.start + (int64(p) * y.pitch + n) * 2, ptx.pack_bf16(a, b))
            cuda.syncthreads()

    return end


class Wide(NamedTuple):
    """Addresses of the wide arrays."""

    x: int
    dy: int


class Pitches(NamedTuple):
    """Elements from row to row."""

    x: int
    dy: int
    h: int


@cache
def across_kernel(tall: int) -> Kernel:
    """Y = W X^T of each Part, of 16 `tall` rows of W at most.

    blockIdx.x -> 32 rows of X, blockIdx.y -> Part, warp -> every eighth 32 columns. Zeros follow
    each row of Y, to `padded` numbers. Bytes: X from memory once, W from the caches by each block.
    """
    step, end, count = make_across_step(tall), make_across_end(tall), tall * ACROSS // 2

    def across(parts, w, arrays: Wide, h, lines, padded, pitches: Pitches):
        t, first = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x * ACROSS)
        wide, column, columns, start = ptx.load_int4(parts + 32 * int64(cuda.blockIdx.y))
        w_pitch, rows, own, _ = ptx.load_int4(parts + 32 * int64(cuda.blockIdx.y) + 16)
        sums = cuda.local.array(count, float32)
        for i in range(count):
            sums[i] = float32(0)
        base, pitch = arrays.x, pitches.x
        if wide:
            base, pitch = arrays.dy, pitches.dy
        base, left = base + (int64(first) * pitch + column) * 2, int32(lines - first)
        for k in range(int32((t >> 5) * STEP), columns, WARPS * STEP):
            of_w = Matrix(w + (int64(start) + k) * 2, w_pitch, rows, int32(columns - k))
            of_x = Matrix(base + int64(k) * 2, pitch, left, int32(columns - k))
            step(sums, of_w, of_x, int32(t & 31))
        at = h + (int64(own) * pitches.h + first) * 2
        end(sums, Matrix(at, pitches.h, rows, int32(padded - first)), t)

    return Kernel(across, "l l l l l r r r r r", 32 * WARPS, target=(8, 0), resident=2)


def load_pairs(values, i, address, left):
    """values[i : i + 2] = 4 bf16, zeros behind the first `left` of them."""
    a, b = int32(0), int32(0)
    if left > 0:
        a, b = ptx.load_int2(address)
    values[i] = a if left > 1 else int32(a & 0xFFFF)
    values[i + 1] = b if left > 3 else int32(b & 0xFFFF) if left > 2 else int32(0)


def make_down_step(tall: int) -> Callable:
    """step(sums, y, x, lane): 16 rows of two Matrices, Y turned and X, of this 64 columns."""
    own_y = 4 * tall

    def step(sums, y, x, lane):
        of_x, of_y = cuda.local.array(16, int32), cuda.local.array(own_y, int32)
        row, column = int32((lane & 3) * 4), int32((lane >> 2) * EIGHT)
        for i in range(4):
            n = int32(row + i)
            at = x.start + (int64(n) * x.pitch + column) * 2
            load_if(of_x, 4 * i, at, n < x.rows and column < x.columns)
        for i in range(2 * tall):
            p = int32(8 * i + (lane >> 2))
            at, left = y.start + (int64(p) * y.pitch + row) * 2, int32(y.columns - row)
            load_pairs(of_y, 2 * i, at, left if p < y.rows else int32(0))
        for j in range(EIGHT):
            q = j >> 1
            if j & 1:
                low = int32((of_x[q] >> 16) & 0xFFFF | of_x[4 + q] & ~0xFFFF)
                high = int32((of_x[8 + q] >> 16) & 0xFFFF | of_x[12 + q] & ~0xFFFF)
            else:
                low = int32(of_x[q] & 0xFFFF | of_x[4 + q] << 16)
                high = int32(of_x[8 + q] & 0xFFFF | of_x[12 + q] << 16)
            for i in range(tall):
                at, k = 4 * (i * EIGHT + j), 4 * i
                sums[at], sums[at + 1], sums[at + 2], sums[at + 3] = ptx.mma(
                    of_y[k], of_y[k + 2], of_y[k + 1], of_y[k + 3], low, high,
                    sums[at], sums[at + 1], sums[at + 2], sums[at + 3])  # fmt: skip

    return step


def make_down_end(tall: int, add: bool) -> Callable:
    """end(sums, g, t): the warps' sums, added in their order, to a Matrix of float32."""
    slab = SIDE * WIDE
    every = WARPS * slab

    def put(pile, to, sums, at):
        pile[to], pile[to + 8] = sums[at], sums[at + 1]
        pile[to + 8 * WIDE], pile[to + 8 * WIDE + 8] = sums[at + 2], sums[at + 3]

    def end(sums, g, t):
        pile = cuda.shared.array(every, float32)
        lane, row, column = int32(t & 31), int32(t >> 4), int32((t & 15) * 4)
        for i in range(tall):
            for j in range(EIGHT):
                to = int32((t >> 5) * slab + (lane >> 2) * WIDE + (lane & 3) * 16 + j)
                put(pile, to, sums, 4 * (i * EIGHT + j))
            cuda.syncthreads()
            p = int32(SIDE * i + row)
            if p < g.rows and column < g.columns:
                to = g.start + (int64(p) * g.pitch + column) * 4
                a, b, c, d = float32(0), float32(0), float32(0), float32(0)
                if add:
                    a, b, c, d = ptx.load_own_float4(to)
                for other in range(WARPS):
                    at = int32(other * slab + row * WIDE + column)
                    a, b = float32(a + pile[at]), float32(b + pile[at + 1])
                    c, d = float32(c + pile[at + 2]), float32(d + pile[at + 3])
                ptx.store_float4(to, a, b, c, d)
            cuda.syncthreads()

    return end


class Counts(NamedTuple):
    """Rows of X, and elements of all G: those of a piece follow those of the piece before."""

    lines: int
    size: int


@cache
def down_kernel(tall: int, add: bool) -> Kernel:
    """G = Y X, or G += Y X, of each Part, of 16 `tall` rows of Y at most.

    blockIdx.x -> 64 columns of X, a Part in `strips`; blockIdx.y -> a piece of `share` rows; warp
    -> every eighth 16 rows. Bytes: X from memory once, Y from the caches by each block.
    """
    step, end, count = make_down_step(tall), make_down_end(tall, add), 4 * tall * EIGHT

    def down(strips, h, arrays: Wide, g, counts: Counts, pitches: Pitches, share):
        t, piece = int32(cuda.threadIdx.x), int32(cuda.blockIdx.y)
        wide, column, columns, start = ptx.load_int4(strips + 32 * int64(cuda.blockIdx.x))
        g_pitch, rows, _, other = ptx.load_int4(strips + 32 * int64(cuda.blockIdx.x) + 16)
        sums = cuda.local.array(count, float32)
        for i in range(count):
            sums[i] = float32(0)
        base, pitch = arrays.x, pitches.x
        if wide:
            base, pitch = arrays.dy, pitches.dy
        last = int32(min(counts.lines, (piece + 1) * share))
        for n in range(int32(piece * share + (t >> 5) * SIDE), last, WARPS * SIDE):
            at = h + (int64(other) * pitches.h + n) * 2
            of_y = Matrix(at, pitches.h, rows, int32(last - n))
            at = base + (int64(n) * pitch + column) * 2
            step(sums, of_y, Matrix(at, pitch, int32(last - n), columns), int32(t & 31))
        at = g + (int64(piece) * counts.size + start) * 4
        end(sums, Matrix(at, g_pitch, rows, columns), t)

    resident = 2 if tall < 3 else 1
    return Kernel(down, "l l l l l r r r r r r", 32 * WARPS, target=(8, 0), resident=resident)


class Narrow(NamedTuple):
    """The products of the adapters of a matrix: see `plan_narrow`."""

    parts: Any               # int32 (parts, 8), each a Part: for `across`
    strips: Any              # the same, cut into 64 columns: for `down`
    tall: int                # P / 16 of the tallest, rounded up
    size: int                # elements of the flat array of all W, and of that of all G
    widths: tuple[int, int]  # columns of x and of dy, I and O
    rows: int                # of H


def plan_narrow(parts: Sequence[Part], size: int, widths: tuple[int, int]) -> Narrow:
    """The tables of a launch. UserError for a Part that lies outside, or where something is left.

    `across` has to write all rows of H, and `down` all of the `size` elements of G.
    """
    expect_parts(parts, size, widths)
    strips = [
        part._replace(column=part.column + at, columns=min(DOWN, part.columns - at),
                      start=part.start + at)
        for part in parts for at in range(0, part.columns, DOWN)
    ]  # fmt: skip
    # The longest first, so that no block begins late that takes long.
    longest = sorted(parts, key=lambda part: -part.columns)
    tables = (np.array(table, np.int32) for table in (longest, strips))
    tall = cover(max(part.rows for part in parts), SIDE)
    return Narrow(*tables, tall, size, widths, sum(part.rows for part in parts))


def expect_parts(parts: Sequence[Part], size: int, widths: tuple[int, int]) -> None:
    """UserError unless these are products that fit: see `plan_narrow`."""
    rows = sum(part.rows for part in parts)
    written, filled = [], []  # (first, behind the last): rows of H, and elements of G
    for part in parts:
        wide, column, columns, start, pitch, count, own, other = part
        at = column, columns, start, pitch
        if wide not in (0, 1) or not 1 <= count <= MOST or any(each % EIGHT for each in at):
            raise UserError(
                f"a part is of x or dy (0, 1), of 1 to {MOST} rows, and columns and places are "
                f"multiples of {EIGHT}: {part}"
            )
        ends = column + columns <= widths[wide] and other + count <= rows
        if min(part) < 0 or columns < 1 or columns != pitch or not ends:
            raise UserError(f"a part lies outside of {widths} columns, {rows} rows: {part}")
        written.append((own, own + count))
        filled.append((start, start + count * pitch))
    for spans, end in ((written, rows), (filled, size)):
        borders = [0, *(border for span in sorted(spans) for border in span), end]
        if borders[::2] != borders[1::2] or end >= 1 << 31:
            raise UserError(f"parts leave nothing out of {end}, and overlap nowhere: {spans}")


def expect_arrays(how: Narrow, flat: Any, kind: str, wide: tuple[Any, Any], h: Any) -> int:
    """N. UserError where arrays don't fit a plan; flat: all W, or all G; wide: x and dy."""
    lines = wide[0].shape[0]
    expect("W or G", flat, (how.size,), kind)
    expect("H", h, (how.rows, eights(lines)), "bf16")
    for name, array, columns in zip(("x", "dy"), wide, how.widths, strict=True):
        if tuple(array.shape) != (lines, columns) or str(array.dtype) != "uint16":
            came = f"{array.dtype} {tuple(array.shape)}"
            raise UserError(f"{name} is bf16 {(lines, columns)}, not {came}")
    return lines


def across_launch(how: Narrow, w: Any, wide: tuple[Any, Any], h: Any) -> Launch:
    """H = W X^T of all parts, by bf16; zeros follow its rows, to a multiple of eight.

    w (size,), wide: x (N, I) and dy (N, O) -> h (rows, N padded).
    """
    lines = expect_arrays(how, w, "bf16", wide, h)
    grid = cover(lines, ACROSS), how.parts.shape[0]
    sizes = lines, eights(lines), *map(pitch, (*wide, h))
    return Launch(across_kernel(how.tall), grid, (how.parts, w, *wide, h, *sizes))


def share_of(lines: int, strips: int, multiprocessors: int) -> int:
    """The rows of X in a piece.

    It counts two blocks on a multiprocessor; of 48 rows only one fits. A launch takes as long as
    its rounds of them, and each piece writes and reads its G besides: 8 bytes for each of SIDE
    rows, of `lines` times 2.
    """
    slots = 2 * multiprocessors

    def cost(pieces: int) -> float:
        more = strips / slots * (8 * SIDE * pieces) / (2 * lines)
        return cover(strips * pieces, slots) / pieces + (more if pieces > 1 else 0)

    pieces = min(range(1, max(1, lines // LEAST) + 1), key=cost)
    return cover(cover(lines, pieces), WARPS * SIDE) * WARPS * SIDE


def space_of(how: Narrow, lines: int, multiprocessors: int) -> tuple[int, int]:
    """The shape of the float32 that pieces of `down` wait in; (0, size): there is but one."""
    pieces = cover(lines, share_of(lines, how.strips.shape[0], multiprocessors))
    return (pieces if pieces > 1 else 0), how.size


def down_launches(
    how: Narrow, h: Any, wide: tuple[Any, Any], g: Any, space: Any, multiprocessors: int, add: bool
) -> list[Launch]:
    """G = H X of all parts, or that is added.

    h (rows, N padded), wide: x (N, I) and dy (N, O), bf16 -> g (size,), float32. space: float32 of
    `space_of`, or None where there is one piece.
    """
    lines = expect_arrays(how, g, "float32", wide, h)
    strips = how.strips.shape[0]
    share = share_of(lines, strips, multiprocessors)
    pieces = cover(lines, share)
    sizes = lines, how.size, *map(pitch, (*wide, h)), share
    if pieces == 1:
        args = how.strips, h, *wide, g, *sizes
        return [Launch(down_kernel(how.tall, add), (strips, 1), args)]
    need = space_of(how, lines, multiprocessors)
    if space is None or tuple(space.shape) != need or str(space.dtype) != "float32":
        raise UserError(f"pieces need float32 {need}, not {getattr(space, 'shape', None)}")
    args = how.strips, h, *wide, space, *sizes
    both = space, g, 1, how.size, how.size, how.size, pieces
    return [Launch(down_kernel(how.tall, False), (strips, pieces), args),
            Launch(sum_kernel(add), (1, cover(how.size, 4 * SUM_THREADS)), both)]  # fmt: skip
