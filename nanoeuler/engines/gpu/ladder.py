# Made from book/07-a-gpu-on-paper.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gpu-tiles
"""CUDA kernels for a matrix product, RMSNorm and softmax: shared-memory tiles and tree reductions.

Each kernel comes from a function that fixes its sizes (`matmul_kernel(tile)`), and is launched by
the function of its plain name (`matmul`), on float32 arrays in C order: arrays on the GPU, or NumPy
arrays, which numba copies there and back. Left out: tensor cores, and more than one output element
a thread, so none of these is fast.

M, N rows and columns of a product, K the axis summed over; rows x columns for the others.
"""

import functools
import math
import operator

import numpy as np

from nanoeuler.engines.gpu.door import Array, Kernel, blocks, cuda
from nanoeuler.model.layers import RMSNORM_EPS


@functools.cache
def matmul_kernel(tile: int) -> Kernel:
    """The kernel of c = a b with tile x tile threads a block. Equation eq-gpu-tiles.

    Contract: a (M, K), b (K, N), c (M, N) float32, C order, any sizes; every c is written.

    | index         | is                  | covers                    |
    |---------------|---------------------|---------------------------|
    | blockIdx.y, x | tile of rows, of columns of c | c, edges ragged |
    | threadIdx.y   | row in the tile     | a[row, :], c[row, column] |
    | threadIdx.x   | column in the tile  | b[:, column], coalesced   |
    | loop          | start               | K in steps of tile        |

    Budget: each a is read blocks(N, tile) times, each b blocks(M, tile) times, each c written
    once; 8 tile^2 bytes shared; 2 K operations and one register of sum for each c.
    Numerics: float32 sums in order of k, the same in every run; no atomics.
    """

    @cuda.jit
    def kernel(a, b, c):
        row_in_tile, column_in_tile = cuda.threadIdx.y, cuda.threadIdx.x
        row = cuda.blockIdx.y * tile + row_in_tile
        column = cuda.blockIdx.x * tile + column_in_tile
        M, K = a.shape
        N = b.shape[1]
        a_tile = cuda.shared.array((tile, tile), np.float32)
        b_tile = cuda.shared.array((tile, tile), np.float32)
        total = np.float32(0)
        for start in range(0, K, tile):
            # 1. Fetch one element of each tile; zero where the tile hangs over an edge.
            a_value, b_value = np.float32(0), np.float32(0)
            if row < M and start + column_in_tile < K:
                a_value = a[row, start + column_in_tile]
            if column < N and start + row_in_tile < K:
                b_value = b[start + row_in_tile, column]
            a_tile[row_in_tile, column_in_tile] = a_value
            b_tile[row_in_tile, column_in_tile] = b_value
            cuda.syncthreads()  # no thread reads a tile before all have filled it
            # 2. Add this piece of the sum, out of shared memory.
            for k in range(tile):
                total += a_tile[row_in_tile, k] * b_tile[k, column_in_tile]
            cuda.syncthreads()  # no thread fills the next tile while another reads this one
        # 3. Write.
        if row < M and column < N:
            c[row, column] = total

    return kernel


def matmul(a: Array, b: Array, c: Array, tile: int = 16) -> None:
    """c = a b by `matmul_kernel`: a (M, K), b (K, N), c (M, N) float32, any sizes.

    tile x tile threads a block: 32 at most, since a block has at most 1024 threads.
    """
    (M, K), N = a.shape, b.shape[1]
    assert b.shape == (K, N) and c.shape == (M, N), f"{a.shape} by {b.shape} is not {c.shape}"
    assert a.dtype == b.dtype == c.dtype == np.float32 and 1 <= tile <= 32
    matmul_kernel(tile)[(blocks(N, tile), blocks(M, tile)), (tile, tile)](a, b, c)


# %% sec-gpu-rows
def _block_reduction(combine):
    """A device function that combines one value of each thread of a block, in a binary tree."""

    @cuda.jit(device=True)
    def reduce(share, thread, threads, value):
        share[thread] = value
        cuda.syncthreads()  # no share is read before it is written
        stride = threads // 2
        while stride > 0:
            if thread < stride:
                share[thread] = combine(share[thread], share[thread + stride])
            cuda.syncthreads()  # no thread reads the next level before this one is complete
            stride //= 2
        result = share[0]
        cuda.syncthreads()  # no thread writes its next share before all have the result
        return result

    return reduce


# The sum and the maximum of `value` over the block, for every thread of it. `share` is shared
# memory for one value a thread; the number of threads is a power of two; all threads must call.
block_sum, block_max = _block_reduction(operator.add), _block_reduction(max)


@functools.cache
def rmsnorm_kernel(threads: int) -> Kernel:
    """The kernel of y = gain x / r, r the root mean square of a row. Equation eq-layers-rmsnorm.

    Contract: x, y (rows, columns), gain (columns,), r (rows, 1) float32, C order, any sizes; every
    y and r is written. `threads` is a power of two.

    | index       | is      | covers                                          |
    |-------------|---------|-------------------------------------------------|
    | blockIdx.x  | row     | x[row, :], y[row, :], r[row, 0]                 |
    | threadIdx.x | thread  | columns thread, thread + threads, ...: coalesced |

    Budget: each x is read twice, each gain once a row, y and r written once; 4 threads bytes
    shared; about 4 operations an element.
    Numerics: float32; shares in order of columns, then a tree; the same in every run.
    """

    @cuda.jit
    def kernel(x, gain, y, r, eps):
        row, thread = cuda.blockIdx.x, cuda.threadIdx.x
        columns = x.shape[1]
        share = cuda.shared.array(threads, np.float32)
        # 1. This thread's share of the sum of squares.
        squares = np.float32(0)
        for column in range(thread, columns, threads):
            value = x[row, column]
            squares += value * value
        # 2. The row's root mean square, known to every thread.
        mean = block_sum(share, thread, threads, squares) / np.float32(columns)
        root = np.float32(math.sqrt(mean + eps))
        # 3. Write.
        for column in range(thread, columns, threads):
            y[row, column] = gain[column] * (x[row, column] / root)
        if thread == 0:
            r[row, 0] = root

    return kernel


def rmsnorm(
    x: Array, gain: Array, y: Array, r: Array, eps: float = RMSNORM_EPS, threads: int = 256
) -> None:
    """y, r = layers.rmsnorm(x, gain) by `rmsnorm_kernel`: x, y (rows, columns), r (rows, 1)."""
    rows, columns = x.shape
    assert y.shape == x.shape and gain.shape == (columns,) and r.shape == (rows, 1)
    assert x.dtype == gain.dtype == y.dtype == r.dtype == np.float32
    assert threads.bit_count() == 1, f"{threads} threads is not a power of two"
    rmsnorm_kernel(threads)[rows, threads](x, gain, y, r, np.float32(eps))


@functools.cache
def softmax_kernel(threads: int) -> Kernel:
    """The kernel of y = softmax(x) along rows. Equation eq-gpu-softmax.

    Contract: x, y (rows, columns) float32, C order, any sizes; every y is written. `threads` is a
    power of two.

    | index       | is      | covers                                          |
    |-------------|---------|-------------------------------------------------|
    | blockIdx.x  | row     | x[row, :], y[row, :]                            |
    | threadIdx.x | thread  | columns thread, thread + threads, ...: coalesced |

    Budget: each x is read three times, each y written once; 4 threads bytes shared; about 6
    operations an element, two exponentials among them.
    Numerics: float32; the row's maximum is subtracted before exp, so exp is at most 1; -inf gives
    0, and a row of nothing but -inf gives zeros; the same in every run.
    """

    @cuda.jit
    def kernel(x, y):
        row, thread = cuda.blockIdx.x, cuda.threadIdx.x
        columns = x.shape[1]
        share = cuda.shared.array(threads, np.float32)
        # 1. The row's maximum; 0 in its place where the whole row is masked.
        largest = np.float32(-math.inf)
        for column in range(thread, columns, threads):
            largest = max(largest, x[row, column])
        largest = block_max(share, thread, threads, largest)
        if largest == -math.inf:
            largest = np.float32(0)
        # 2. The sum of the exponentials; 0 where the whole row is masked.
        total = np.float32(0)
        for column in range(thread, columns, threads):
            total += math.exp(x[row, column] - largest)
        total = block_sum(share, thread, threads, total)
        # 3. Write.
        for column in range(thread, columns, threads):
            value = math.exp(x[row, column] - largest)
            y[row, column] = value / total if total > 0 else np.float32(0)

    return kernel


def softmax(x: Array, y: Array, threads: int = 256) -> None:
    """y = softmax of each row of x by `softmax_kernel`: x, y (rows, columns) float32."""
    assert x.shape == y.shape and x.dtype == y.dtype == np.float32
    assert threads.bit_count() == 1, f"{threads} threads is not a power of two"
    softmax_kernel(threads)[x.shape[0], threads](x, y)
