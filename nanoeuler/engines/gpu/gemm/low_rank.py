# Made from book/19d-lora.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-lora-gpu-narrow
"""Products with a matrix of few rows, on a GPU: all that adapters need beside the merge.

With W (P, K), X (N, K), Y (P, N) and G (P, K), where P is at most 48 and much less than K and N:

    across   Y = W X^T             (x A)^T and (dy B^T)^T
    down     G = Y X, or G += Y X  dA^T and dB

W, X and Y are bf16, G is float32. X is by far the largest, and is read once. The 16 rows of
mma.sync's A are those of W or Y. Sums are added in one order, always.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from nanoeuler.engines.gpu.gemm.float32 import eights
from nanoeuler.engines.gpu.gemm.mma_form import pitch
from nanoeuler.engines.gpu.gemm.mma_kernel import SUM_THREADS, sum_kernel
from nanoeuler.engines.gpu.gemm.mma_tile import Matrix
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, cover
from nanoeuler.errors import UserError

MOST = 48     # rows P: three times those of A in mma.sync.m16n8k16, whose sums are in registers
SIDE = 16     # those rows, and the instruction's k
WARPS = 8     # of a block; they share the k of a product
EIGHT = 8     # bf16 in 16 bytes, what a lane loads at once; and columns of the instruction's B
ACROSS = 32   # rows of X in a block of `across`
STEP = 32     # columns of X in a warp's step there: 16 bytes of each of four lanes
DOWN = 64     # columns of X in a block of `down`: 16 bytes of each of eight lanes
WIDE = 68     # floats from row to row of their sums in shared memory: rows begin at other banks
LEAST = 4 * WARPS * SIDE  # rows of X in a piece of `down`, at least: four steps of each warp


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


@cache
def across_kernel(tall: int) -> Kernel:
    """Y = W X^T, of 16 `tall` rows of W at most.

    blockIdx.x -> 32 rows of X; warp -> every eighth 32 columns. Zeros follow each row of Y, to
    `padded` numbers. Bytes: X from memory once, W from the caches by each block.
    """
    step, end, count = make_across_step(tall), make_across_end(tall), tall * ACROSS // 2

    def across(w, x, y, rows, lines, padded, columns, w_pitch, x_pitch, y_pitch):
        t, first = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x * ACROSS)
        sums = cuda.local.array(count, float32)
        for i in range(count):
            sums[i] = float32(0)
        here, left = x + int64(first) * x_pitch * 2, int32(lines - first)
        for k in range(int32((t >> 5) * STEP), columns, WARPS * STEP):
            of_w = Matrix(w + int64(k) * 2, w_pitch, rows, int32(columns - k))
            of_x = Matrix(here + int64(k) * 2, x_pitch, left, int32(columns - k))
            step(sums, of_w, of_x, int32(t & 31))
        end(sums, Matrix(y + int64(first) * 2, y_pitch, rows, int32(padded - first)), t)

    return Kernel(across, "l l l r r r r r r r", 32 * WARPS, target=(8, 0), resident=2)


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


@cache
def down_kernel(tall: int, add: bool) -> Kernel:
    """G = Y X, or G += Y X, of 16 `tall` rows of Y at most.

    blockIdx.x -> 64 columns of X; blockIdx.y -> a piece of `share` rows, and the G of that piece;
    warp -> every eighth 16 rows. Bytes: X from memory once, Y from the caches by each block.
    """
    step, end, count = make_down_step(tall), make_down_end(tall, add), 4 * tall * EIGHT

    def down(y, x, g, rows, lines, columns, y_pitch, x_pitch, g_pitch, share):
        t, first = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x * DOWN)
        piece, rest = int32(cuda.blockIdx.y), int32(columns - first)
        sums = cuda.local.array(count, float32)
        for i in range(count):
            sums[i] = float32(0)
        last = int32(min(lines, (piece + 1) * share))
        for n in range(int32(piece * share + (t >> 5) * SIDE), last, WARPS * SIDE):
            of_y = Matrix(y + int64(n) * 2, y_pitch, rows, int32(last - n))
            at = x + (int64(n) * x_pitch + first) * 2
            step(sums, of_y, Matrix(at, x_pitch, int32(last - n), rest), int32(t & 31))
        at = g + (int64(piece) * rows * g_pitch + first) * 4
        end(sums, Matrix(at, g_pitch, rows, rest), t)

    resident = 2 if tall < 3 else 1
    return Kernel(down, "l l l r r r r r r r", 32 * WARPS, target=(8, 0), resident=resident)


def sizes_of(narrow: Any, x: Any, names: str) -> tuple[int, int]:
    """P and how many times 16 that is; UserError where matrices don't fit or P is too large."""
    rows, columns = narrow.shape[0], x.shape[1]
    kinds = {str(array.dtype) for array in (narrow, x)}
    if kinds != {"uint16"} or not 1 <= rows <= MOST or columns % EIGHT:
        raise UserError(
            f"{names} are bf16, of 1 to {MOST} rows and a multiple of {EIGHT} columns, not "
            f"{', '.join(sorted(kinds))}, {rows} rows and {columns} columns"
        )
    return rows, cover(rows, SIDE)


def across_launch(w: Any, x: Any, y: Any) -> Launch:
    """Y (P, N) = W (P, K) X (N, K)^T, all bf16; of Y zeros follow, to a multiple of eight."""
    rows, tall = sizes_of(w, x, "W and X")
    lines, columns = x.shape
    shapes, wanted = (tuple(w.shape), tuple(y.shape)), ((rows, columns), (rows, eights(lines)))
    if shapes != wanted or str(y.dtype) != "uint16":
        raise UserError(f"W and Y of X {tuple(x.shape)} are {wanted}, not {shapes} of {y.dtype}")
    args = w, x, y, rows, lines, eights(lines), columns, pitch(w), pitch(x), pitch(y)
    return Launch(across_kernel(tall), (cover(lines, ACROSS),), args)


def share_of(lines: int, columns: int, multiprocessors: int) -> int:
    """The rows of X in a piece: as many pieces as give each multiprocessor two blocks."""
    pieces = 2 * multiprocessors // cover(columns, DOWN)
    pieces = max(1, min(pieces, lines // LEAST))
    return cover(cover(lines, pieces), WARPS * SIDE) * WARPS * SIDE


def space_of(rows: int, lines: int, columns: int, multiprocessors: int) -> tuple[int, int]:
    """The shape of the float32 that pieces of `down` wait in; (0, columns): there is but one."""
    pieces = cover(lines, share_of(lines, columns, multiprocessors))
    return (pieces * rows if pieces > 1 else 0), columns


def down_launches(
    y: Any, x: Any, g: Any, space: Any, multiprocessors: int, add: bool
) -> list[Launch]:
    """G (P, K) = Y (P, N) X (N, K), or that is added; Y, X bf16, G float32.

    space: float32 of `space_of`, or None where there is one piece.
    """
    rows, tall = sizes_of(y, x, "Y and X")
    lines, columns = x.shape
    shapes, wanted = (tuple(y.shape), tuple(g.shape)), ((rows, eights(lines)), (rows, columns))
    if shapes != wanted or str(g.dtype) != "float32":
        raise UserError(f"Y and G of X {tuple(x.shape)} are {wanted}, not {shapes} of {g.dtype}")
    share = share_of(lines, columns, multiprocessors)
    pieces, strips = cover(lines, share), cover(columns, DOWN)
    sizes = rows, lines, columns, pitch(y), pitch(x)
    if pieces == 1:
        args = y, x, g, *sizes, pitch(g), share
        return [Launch(down_kernel(tall, add), (strips, 1), args)]
    need = space_of(rows, lines, columns, multiprocessors)
    if space is None or tuple(space.shape) != need or str(space.dtype) != "float32":
        raise UserError(f"pieces need float32 {need}, not {getattr(space, 'shape', None)}")
    args = y, x, space, *sizes, pitch(space), share
    both = space, g, rows, columns, pitch(space), pitch(g), pieces
    grid = rows, cover(columns, 4 * SUM_THREADS)
    return [Launch(down_kernel(tall, False), (strips, pieces), args),
            Launch(sum_kernel(add), grid, both)]  # fmt: skip
