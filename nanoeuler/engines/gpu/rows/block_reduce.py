# Made from book/11c-loss-and-update.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-update-tools
"""What the threads of a block find together: their largest value, their sum.

A warp exchanges by shuffles, warps by shared memory. Every thread gets the same bits, and the order
of additions is fixed.
"""

from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32
from nanoeuler.engines.gpu.lang.ptx import larger, shuffle_xor
from nanoeuler.engines.gpu.lang.vectors import warp_sum

WARPS = 32  # of a block at most: 1024 threads


def warp_max(x):
    """The largest x of a warp, on all its lanes."""
    for i in range(5):
        x = larger(x, shuffle_xor(x, int32(16 >> i)))
    return x


def block_max(x, least, warps):
    """The largest x of a block of `warps` warps; `least` is no larger than any."""
    place = cuda.shared.array(WARPS, float32)
    t = int32(cuda.threadIdx.x)
    x = warp_max(x)
    if t & 31 == 0:
        place[t >> 5] = x
    cuda.syncthreads()  # the warps' values are there
    lane = t & 31
    return warp_max(place[lane] if lane < warps else least)


def block_sum(x, warps):
    """The sum of x over a block of `warps` warps."""
    place = cuda.shared.array(WARPS, float32)
    t = int32(cuda.threadIdx.x)
    x = warp_sum(x)
    if t & 31 == 0:
        place[t >> 5] = x
    cuda.syncthreads()  # the warps' sums are there
    lane = t & 31
    return warp_sum(place[lane] if lane < warps else float32(0))
