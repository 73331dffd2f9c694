# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-mma-columns
"""Sums of C's columns, without atomics: a line of sums of each warp's rows, and lines in order."""

from functools import cache

from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel

HEADER = 128  # bytes before lines, and before pieces: the word that a grid waits at


def halve(sums, count, bit, lane):
    """Of 2 count sums, the upper half where the lane has `bit`, else the lower: of both lanes."""
    for i in range(count):
        low, high = sums[i], sums[count + i]
        keep, give = (high, low) if lane & bit else (low, high)
        sums[i] = keep + ptx.shuffle_xor(give, bit)


def strip_columns(acc, i, lines, column, line, n, lane):
    """Sums over a warp's 16 rows of a strip, registers from i on, to a line of lines (., n)."""
    sums = cuda.local.array(16, float32)
    for j in range(16):
        at = i + j // 2 * 4 + j % 2
        sums[j] = acc[at] + acc[at + 2]
    halve(sums, 8, 16, lane)
    halve(sums, 4, 8, lane)
    halve(sums, 2, 4, lane)
    at = int32(column + lane * 2)
    if at < n:
        ptx.store_float2(lines + (int64(line) * n + at) * 4, sums[0], sums[1])


WIDE = 32  # columns of a block: 8 lanes with 16 bytes each
DEEP = 32  # warps of a block, each with 4 lines at a time


@cache
def columns_kernel(add: bool) -> Kernel:
    """The kernel that adds lines in order: space with lines (count, n), count, n, sums (n,).

    blockIdx.x: 32 columns. Lane l of warp w: columns 4 (l % 8) on, lines 4 w + l / 8 + 128 i.
    """

    def gemm_columns(space, count, n, out):
        parts = cuda.shared.array((DEEP, WIDE), float32)
        t = int32(cuda.threadIdx.x)
        column = int32(cuda.blockIdx.x * WIDE + (t & 7) * 4)
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        limit = count if column < n else 0
        for line in range(t >> 3, limit, 4 * DEEP):
            at = space + HEADER + (int64(line) * n + column) * 4
            e, f, g, h = ptx.load_float4_if_below(at, line, limit)
            a, b, c, d = a + e, b + f, c + g, d + h
        for bit in (8, 16):
            a, b = a + ptx.shuffle_xor(a, bit), b + ptx.shuffle_xor(b, bit)
            c, d = c + ptx.shuffle_xor(c, bit), d + ptx.shuffle_xor(d, bit)
        if t & 24 == 0:
            w, i = t >> 5, (t & 7) * 4
            parts[w, i], parts[w, i + 1], parts[w, i + 2], parts[w, i + 3] = a, b, c, d
        cuda.syncthreads()
        own = int32(cuda.blockIdx.x * WIDE + t)
        if t < WIDE and own < n:
            total = float32(0)
            for w in range(DEEP):
                total += parts[w, t]
            place = out + int64(own) * 4
            ptx.store_float(place, total + ptx.load_own_float(place) if add else total)

    return Kernel(gemm_columns, "l r r l", DEEP * 32, target=(8, 0))
