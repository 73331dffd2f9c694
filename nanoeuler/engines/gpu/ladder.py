# Made from book/11-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gpu-coalescing
"""The ladder: kernels on float32 arrays, from a copy to a product of matrices, rung by rung.

Each rung has a kernel (`copy_kernel()`), a launch (`copy(x, y)`), which a GPU and the emulator run
alike, and a prediction (`copy_counts(n)`) of what the emulator will count, by its names, for sizes
that are multiples of its tiles. Left out: tensor cores, which are in the room `gemm`.

Arrays are float32 in C order, on the GPU or NumPy's. M, N rows and columns of a product, K the axis
that is summed over.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

from nanoeuler.engines.gpu.lang.instruction import cuda, float32, ptx
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.errors import UserError

Counts = dict[str, int]  # what the emulator counts, by its names

CARD = 8, 0  # compute capability of the oldest GPU that these kernels are compiled for
THREADS = 256  # of a block: eight warps
WARP = 32  # lanes
WARPS = THREADS // WARP
ALL = 0xFFFFFFFF  # the mask of a warp's lanes
BANKS = 32  # of shared memory, each 4 bytes wide


def blocks(n: int, size: int) -> int:
    """How many blocks of `size` cover n elements: n / size, rounded up."""
    return -(-n // size)


def expect(what: str, fits: bool) -> None:
    """Raise a UserError that names the expected `what`, unless it `fits`."""
    if not fits:
        raise UserError(f"expected {what}")


def expect_float32(*arrays: Any) -> None:
    """UserError unless all arrays are float32."""
    expect("float32 arrays", all(str(array.dtype) == "float32" for array in arrays))


def _copy(x, y):
    step = THREADS * cuda.gridDim.x
    i = cuda.grid(1)
    while i < x.shape[0]:
        y[i] = x[i]
        i += step


@functools.cache
def copy_kernel() -> Kernel:
    """The kernel of `copy`."""
    return Kernel(_copy, "f[1] f[1]", THREADS, target=CARD)


def copy(x: Any, y: Any, grid: int = 0) -> Launch:
    """y = x, a number at a time: x, y (n,).

    | index       | is     | covers                                        |
    |-------------|--------|-----------------------------------------------|
    | grid(1)     | i      | x[i], y[i]: neighbours read neighbours        |
    | loop        | step   | i + step, ... where `grid` blocks are too few |
    """
    expect(f"y of shape {x.shape}, not {y.shape}", x.shape == y.shape)
    expect_float32(x, y)
    return Launch(copy_kernel(), (grid or blocks(x.shape[0], THREADS),), (x, y))


def copy_counts(n: int) -> Counts:
    """What `copy` moves: 4 bytes in and out for each number, 8 numbers to a sector."""
    return both_ways(4 * n, n // 8)


def both_ways(size: int, sectors: int) -> Counts:
    """Counts of `size` bytes that are read and as many that are written."""
    ways = "global loads", "global stores"
    return {f"{way} bytes": size for way in ways} | {f"{way} sectors": sectors for way in ways}


def _copy_apart(x, y):
    line = cuda.grid(1)
    if line < x.shape[0]:
        y[line, cuda.blockIdx.y] = x[line, cuda.blockIdx.y]


@functools.cache
def copy_apart_kernel() -> Kernel:
    """The kernel of `copy_apart`."""
    return Kernel(_copy_apart, "f[2] f[2]", THREADS, target=CARD)


def copy_apart(x: Any, y: Any) -> Launch:
    """y = x, where neighbouring threads take numbers of neighbouring rows: x, y (lines, columns).

    | index      | is     | covers                                       |
    |------------|--------|----------------------------------------------|
    | grid(1)    | line   | x[line, column]: neighbours are a row apart  |
    | blockIdx.y | column | the whole column                             |
    """
    expect(f"y of shape {x.shape}, not {y.shape}", x.shape == y.shape)
    expect_float32(x, y)
    return Launch(copy_apart_kernel(), (blocks(x.shape[0], THREADS), x.shape[1]), (x, y))


def copy_apart_counts(lines: int, columns: int) -> Counts:
    """What `copy_apart` moves: a sector for each number, if a row has at least 8."""
    return both_ways(4 * lines * columns, lines * columns)


# %% sec-gpu-flight
# address, index, limit -> the 4 float32 there, or zeros where index >= limit. The load is
# .nc: nothing may write this memory during the launch
load4 = ptx(
    "{ .reg .pred p; setp.lt.s32 p, $5, $6;"
    " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    " @p ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4]; }",
    "l r r", "f f f f",
)  # fmt: skip
# address, index, limit, 4 float32: store them unless index >= limit
store4 = ptx(
    "{ .reg .pred p; setp.lt.s32 p, $1, $2; @p st.global.v4.f32 [$0], {$3, $4, $5, $6}; }",
    "l r r f f f f",
)


@functools.cache
def copy_wide_kernel(loads: int) -> Kernel:
    """The kernel of `copy_wide`."""
    kept = 4 * loads

    def copy_wide(x, y, n):
        held = cuda.local.array(kept, float32)
        start = cuda.blockIdx.x * kept * THREADS + 4 * cuda.threadIdx.x
        while start < n:
            # 2. Ask for everything.
            for j in range(loads):
                at = start + 4 * THREADS * j
                held[4 * j], held[4 * j + 1], held[4 * j + 2], held[4 * j + 3] = load4(
                    x + 4 * at, at, n
                )
            # 3. Store each as it arrives.
            for j in range(loads):
                at = start + 4 * THREADS * j
                store4(
                    y + 4 * at, at, n,
                    held[4 * j], held[4 * j + 1], held[4 * j + 2], held[4 * j + 3],
                )  # fmt: skip
            start += cuda.gridDim.x * kept * THREADS

    return Kernel(copy_wide, "l l r", THREADS, target=CARD)


def copy_wide(x: Any, y: Any, loads: int = 4, grid: int = 0) -> Launch:
    """y = x, 16 bytes at a time and `loads` of them on their way: x, y (n,), n a multiple of 4.

    | index       | is    | covers                                                     |
    |-------------|-------|------------------------------------------------------------|
    | blockIdx.x  | chunk | 4 * loads * THREADS numbers                                |
    | j, thread   | at    | 4 numbers of it: neighbours read neighbours, `loads` times |
    | loop        | start | later chunks, where `grid` blocks are too few              |
    """
    n = x.shape[0]
    expect(f"y of shape {x.shape}, not {y.shape}", x.shape == y.shape)
    expect(f"a multiple of 4 below 2^31 numbers, not {n}", n % 4 == 0 and 0 < n < 2**31)
    expect_float32(x, y)
    grid = grid or blocks(n, 4 * loads * THREADS)
    return Launch(copy_wide_kernel(loads), (grid,), (x, y, n))


def copy_wide_counts(n: int) -> Counts:
    """What `copy_wide` moves: as `copy`, in a quarter of the instructions."""
    return copy_counts(n) | {"global loads": n // (4 * WARP), "global stores": n // (4 * WARP)}


# %% sec-gpu-transpose
TILE, LINES = 32, 8  # a tile's side, and the rows of threads that share it
STEPS = TILE // LINES


def _transpose_plain(x, y):
    column = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    row = cuda.blockIdx.y * TILE + cuda.threadIdx.y
    for k in range(0, TILE, LINES):
        if row + k < x.shape[0] and column < x.shape[1]:
            y[column, row + k] = x[row + k, column]


@functools.cache
def transpose_plain_kernel() -> Kernel:
    """The kernel of `transpose_plain`."""
    return Kernel(_transpose_plain, "f[2] f[2]", (TILE, LINES), target=CARD)


def transpose_plain(x: Any, y: Any) -> Launch:
    """y = x.T, straight through: x (rows, columns), y (columns, rows).

    | index           | is         | covers                                      |
    |-----------------|------------|---------------------------------------------|
    | blockIdx.y, x   | tile       | 32 x 32 of x                                |
    | threadIdx.x     | column     | x[:, column], and row `column` of y         |
    | threadIdx.y, k  | row        | rows threadIdx.y, + 8, + 16, + 24 of a tile |
    """
    return _transpose(transpose_plain_kernel(), x, y)


def _transpose(kernel: Kernel, x: Any, y: Any) -> Launch:
    rows, columns = x.shape
    expect(f"y of shape {columns, rows}, not {y.shape}", y.shape == (columns, rows))
    expect_float32(x, y)
    return Launch(kernel, (blocks(columns, TILE), blocks(rows, TILE)), (x, y))


def transpose_plain_counts(rows: int, columns: int) -> Counts:
    """What `transpose_plain` moves: it reads in whole sectors and writes a sector a number."""
    n = rows * columns
    return both_ways(4 * n, n // 8) | {"global stores sectors": n}


@functools.cache
def transpose_kernel(pitch: int) -> Kernel:
    """The kernel of `transpose`."""

    def transpose(x, y):
        tile = cuda.shared.array((TILE, pitch), float32)
        column, row = cuda.blockIdx.x * TILE, cuda.blockIdx.y * TILE
        along, down = cuda.threadIdx.x, cuda.threadIdx.y
        held = cuda.local.array(STEPS, float32)
        # 2. Ask for a tile of x, row by row, then put it down.
        for k in range(0, TILE, LINES):
            held[k // LINES] = float32(0)
            if row + down + k < x.shape[0] and column + along < x.shape[1]:
                held[k // LINES] = x[row + down + k, column + along]
        for k in range(0, TILE, LINES):
            tile[down + k, along] = held[k // LINES]
        cuda.syncthreads()  # no thread reads the tile before all have filled it
        # 3. The same tile, column by column, into rows of y.
        for k in range(0, TILE, LINES):
            if column + down + k < x.shape[1] and row + along < x.shape[0]:
                y[column + down + k, row + along] = tile[along, down + k]

    return Kernel(transpose, "f[2] f[2]", (TILE, LINES), target=CARD)


def transpose(x: Any, y: Any, pitch: int = TILE + 1) -> Launch:
    """y = x.T by way of a tile in shared memory: x (rows, columns), y (columns, rows).

    pitch: from one row of the tile to the next, in numbers; 32 at least. With 32 all of a column
    is in one bank, with 33 in 32 banks.

    | index          | is          | covers                                           |
    |----------------|-------------|--------------------------------------------------|
    | blockIdx.y, x  | row, column | where the 32 x 32 tile of x begins               |
    | threadIdx.x    | along       | neighbours in a row of x, then in a row of y     |
    | threadIdx.y, k | down        | rows of the tile of x, then rows of that of y    |
    """
    return _transpose(transpose_kernel(pitch), x, y)


def transpose_counts(rows: int, columns: int, pitch: int = TILE + 1) -> Counts:
    """What `transpose` moves, and the rounds that shared memory takes for it.

    A warp reads numbers `pitch` apart: gcd(pitch, 32) of them are in the same bank.
    """
    n = rows * columns
    return both_ways(4 * n, n // 8) | {
        "shared stores wavefronts": n // WARP,
        "shared loads wavefronts": n // WARP * math.gcd(pitch, BANKS),
        "barriers": n // TILE**2,
    }


# %% sec-gpu-sums
def _tree(combine: Callable) -> Callable:
    """A helper of kernels: combines one value of each thread of a block in a binary tree."""

    def tree(share, thread, value):
        share[thread] = value
        cuda.syncthreads()  # no share is read before it is written
        stride = THREADS // 2
        while stride > 0:
            if thread < stride:
                share[thread] = combine(share[thread], share[thread + stride])
            cuda.syncthreads()  # no thread reads the next level before this one is complete
            stride //= 2
        result = share[0]
        cuda.syncthreads()  # no thread writes its next share before all have the result
        return result

    return tree


# (share, thread, value) -> what the block's values combine to, in every thread. share: (THREADS,)
# in shared memory.
tree_sum, tree_max = _tree(operator.add), _tree(max)
TREE_BARRIERS = 2 + int(math.log2(THREADS))  # one before the rounds, one after each, one at the end


def _sum_tree(x, parts):
    share = cuda.shared.array(THREADS, float32)
    thread = cuda.threadIdx.x
    value = float32(0)
    i = cuda.grid(1)
    while i < x.shape[0]:
        value += x[i]
        i += THREADS * cuda.gridDim.x
    total = tree_sum(share, thread, value)
    if thread == 0:
        parts[cuda.blockIdx.x] = total


def _shuffle(combine: Callable) -> Callable:
    """A helper of kernels: combines one value of each lane of a warp, in registers."""

    def shuffle(value):
        bits = WARP // 2
        while bits > 0:
            value = combine(value, cuda.shfl_xor_sync(ALL, value, bits))
            bits //= 2
        return value

    return shuffle


# value -> the sum or maximum of the warp's values, in every lane.
warp_sum, warp_max = _shuffle(operator.add), _shuffle(max)


def _sum_wide(x, parts, n):
    share = cuda.shared.array(WARPS, float32)
    thread = cuda.threadIdx.x
    start = 4 * (cuda.blockIdx.x * THREADS + thread)
    step = 4 * THREADS * cuda.gridDim.x
    value = float32(0)
    while start < n:
        # Four loads on their way; a load past the end gives zeros.
        a, b, c, d = load4(x + 4 * start, start, n)
        e, f, g, h = load4(x + 4 * (start + step), start + step, n)
        i, j, k, l = load4(x + 4 * (start + 2 * step), start + 2 * step, n)  # noqa: E741
        o, p, q, r = load4(x + 4 * (start + 3 * step), start + 3 * step, n)
        value += ((a + b) + (c + d)) + ((e + f) + (g + h))
        value += ((i + j) + (k + l)) + ((o + p) + (q + r))
        start += 4 * step
    value = warp_sum(value)
    if thread % WARP == 0:
        share[thread // WARP] = value
    cuda.syncthreads()  # no thread reads a share before it is written
    if thread == 0:
        total = float32(0)
        for warp in range(WARPS):
            total += share[warp]
        parts[cuda.blockIdx.x] = total


@functools.cache
def sum_kernel(wide: bool) -> Kernel:
    """The kernels of `sums`."""
    if wide:
        return Kernel(_sum_wide, "l f[1] r", THREADS, target=CARD)
    return Kernel(_sum_tree, "f[1] f[1]", THREADS, target=CARD)


PARTS = 1024  # most blocks of the first launch: about 8 on each multiprocessor of an H200


def sums(x: Any, parts: Any, total: Any, wide: bool = True) -> tuple[Launch, Launch]:
    """total = sum(x), in two launches: x (n,), n a multiple of 4; parts (p,), total (1,).

    parts: work space, a number for each block of the first launch; p a multiple of 4, as
    `parts_size` says. wide: 16 bytes a load, four on their way, and shuffles; else 4 bytes, one on
    its way, and a tree in shared memory. The order of additions is fixed by n and p.

    | index      | is   | covers                                                     |
    |------------|------|------------------------------------------------------------|
    | blockIdx.x | part | parts[part]                                                |
    | grid(1)    | i    | x[i], x[i + 256 p], ...; if wide, groups of four likewise  |
    """
    n, p = x.shape[0], parts.shape[0]
    expect(f"a multiple of 4 below 2^31 numbers, not {n}", n % 4 == 0 and 0 < n < 2**31)
    expect(f"a multiple of 4 parts, not {p}", p % 4 == 0 and p > 0)
    expect(f"a total of shape (1,), not {total.shape}", total.shape == (1,))
    expect_float32(x, parts, total)
    kernel = sum_kernel(wide)
    pairs = (x, parts, n), (parts, total, p)
    first, last = (pair if wide else pair[:2] for pair in pairs)
    return Launch(kernel, (p,), first), Launch(kernel, (1,), last)


def parts_size(n: int) -> int:
    """Numbers in the work space of `sums`, one for each block: a multiple of 4 blocks, enough that
    each thread has one load of 16 bytes; PARTS at most, and then a thread has more.
    """
    return min(PARTS, 4 * blocks(n, 16 * THREADS))


def sums_counts(n: int, parts: int, wide: bool = True) -> Counts:
    """What the first launch of `sums` moves: every number once, and a part for each block."""
    return {
        "global loads bytes": 4 * n, "global loads sectors": n // 8,
        "global stores bytes": 4 * parts, "barriers": parts * (1 if wide else TREE_BARRIERS),
    }  # fmt: skip


# %% sec-gpu-rows
def _softmax_tree(x, y):
    share = cuda.shared.array(THREADS, float32)
    row, thread, columns = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1]
    # 2. The row's maximum; 0 in its place where the whole row is masked.
    largest = float32(-math.inf)
    for column in range(thread, columns, THREADS):
        largest = max(largest, x[row, column])
    largest = tree_max(share, thread, largest)
    if largest == -math.inf:
        largest = float32(0)
    # 3. The sum of the exponentials; 0 where the whole row is masked.
    total = float32(0)
    for column in range(thread, columns, THREADS):
        total += math.exp(x[row, column] - largest)
    total = tree_sum(share, thread, total)
    inverse = float32(1) / total if total > 0 else float32(0)
    # 4. Write.
    for column in range(thread, columns, THREADS):
        y[row, column] = math.exp(x[row, column] - largest) * inverse


@functools.cache
def softmax_tree_kernel() -> Kernel:
    """The kernel of `softmax_tree`."""
    return Kernel(_softmax_tree, "f[2] f[2]", THREADS, target=CARD)


def softmax_tree(x: Any, y: Any) -> Launch:
    """y = softmax of each row of x, read three times: x, y (rows, columns). eq-gpu-softmax.

    | index       | is     | covers                                           |
    |-------------|--------|--------------------------------------------------|
    | blockIdx.x  | row    | x[row, :], y[row, :]                             |
    | threadIdx.x | thread | columns thread, thread + 256, ...: neighbours    |

    Numerics: -inf gives 0, a row of nothing but -inf gives zeros; the same in every run.
    """
    expect(f"y of shape {x.shape}, not {y.shape}", x.shape == y.shape)
    expect_float32(x, y)
    return Launch(softmax_tree_kernel(), (x.shape[0],), (x, y))


def softmax_tree_counts(rows: int, columns: int) -> Counts:
    """What `softmax_tree` moves: each x three times, each y once; two trees a row."""
    n = rows * columns
    return both_ways(4 * n, n // 8) | {
        "global loads bytes": 12 * n, "global loads sectors": 3 * n // 8,
        "barriers": 2 * TREE_BARRIERS * rows,
    }  # fmt: skip


def _load_row(held, x, columns, limit):
    """A lane's part of the row at x, all of it on its way at once; -inf from `limit` on."""
    lane = cuda.threadIdx.x % WARP
    for j in range(blocks(columns, 4 * WARP)):
        at = 4 * (WARP * j + lane)
        held[4 * j], held[4 * j + 1], held[4 * j + 2], held[4 * j + 3] = load4(
            x + 4 * at, at, limit
        )
        if at >= limit:
            for i in range(4):
                held[4 * j + i] = float32(-math.inf)


def _store_row(held, y, columns, limit, factor):
    """Write a lane's part, times a factor, to the row at y."""
    lane = cuda.threadIdx.x % WARP
    for j in range(blocks(columns, 4 * WARP)):
        at = 4 * (WARP * j + lane)
        store4(
            y + 4 * at, at, limit, held[4 * j] * factor, held[4 * j + 1] * factor,
            held[4 * j + 2] * factor, held[4 * j + 3] * factor,
        )  # fmt: skip


@functools.cache
def softmax_kernel(columns: int) -> Kernel:
    """The kernel of `softmax` for rows of this length."""
    numbers = 4 * blocks(columns, 4 * WARP)

    def softmax(x, y, rows):
        row = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // WARP
        limit = columns if row < rows else 0
        held = cuda.local.array(numbers, float32)
        # 2. The row, once.
        _load_row(held, x + 4 * columns * row, columns, limit)
        # 3. Its maximum; 0 in its place where the whole row is masked.
        largest = held[0]
        for i in range(1, numbers):
            largest = max(largest, held[i])
        largest = warp_max(largest)
        if largest == -math.inf:
            largest = float32(0)
        # 4. The exponentials and their sum; 0 where the whole row is masked.
        total = float32(0)
        for i in range(numbers):
            held[i] = math.exp(held[i] - largest)
            total += held[i]
        total = warp_sum(total)
        inverse = float32(1) / total if total > 0 else float32(0)
        # 5. Write.
        _store_row(held, y + 4 * columns * row, columns, limit, inverse)

    return Kernel(softmax, "l l r", THREADS, target=CARD)


ROW = 2048  # the longest row that a warp keeps: 64 registers of each lane


def softmax(x: Any, y: Any) -> Launch:
    """y = softmax of each row of x, read once and kept in registers. Equation eq-gpu-softmax.

    x, y (rows, columns), columns a multiple of 4 and at most ROW.

    | index            | is   | covers                                                |
    |------------------|------|-------------------------------------------------------|
    | blockIdx.x, warp | row  | x[row, :], y[row, :]                                  |
    | lane, j          | at   | four columns from 4 lane + 128 j on, kept in `held`   |

    Numerics: -inf gives 0, a row of nothing but -inf gives zeros; the same in every run.
    """
    rows, columns = x.shape
    expect(f"y of shape {x.shape}, not {y.shape}", x.shape == y.shape)
    expect(f"a multiple of 4 columns, {ROW} at most, not {columns}",
           columns % 4 == 0 and 0 < columns <= ROW)  # fmt: skip
    expect_float32(x, y)
    return Launch(softmax_kernel(columns), (blocks(rows, WARPS),), (x, y, rows))


def softmax_counts(rows: int, columns: int) -> Counts:
    """What `softmax` moves: each x once, each y once, and no barrier."""
    return both_ways(4 * rows * columns, rows * columns // 8) | {"barriers": 0}


# %% sec-gpu-products
def _dot(a, b, row, column):
    """The product of a row of a with a column of b."""
    total = float32(0)
    for k in range(a.shape[1]):
        total += a[row, k] * b[k, column]
    return total


def _matmul_naive(a, b, c):
    row, column = cuda.grid(2)
    if row < c.shape[0] and column < c.shape[1]:
        c[row, column] = _dot(a, b, row, column)


def _matmul_coalesced(a, b, c):
    column, row = cuda.grid(2)
    if row < c.shape[0] and column < c.shape[1]:
        c[row, column] = _dot(a, b, row, column)


@functools.cache
def matmul_plain_kernel(coalesced: bool) -> Kernel:
    """The kernels of `matmul_plain`."""
    function = _matmul_coalesced if coalesced else _matmul_naive
    return Kernel(function, "f[2] f[2] f[2]", (TILE, LINES), target=CARD)


def matmul_plain(a: Any, b: Any, c: Any, coalesced: bool = True) -> Launch:
    """c = a b, one thread for each element of c: a (M, K), b (K, N), c (M, N).

    | index           | is, if coalesced | is, if not | covers                   |
    |-----------------|------------------|------------|--------------------------|
    | grid(2), first  | column           | row        | 32 neighbours for a warp |
    | grid(2), second | row              | column     | one for a warp           |
    | loop            | k                | k          | a[row, k], b[k, column]  |
    """
    M, N, _ = _sizes(a, b, c)
    grid = (N, M) if coalesced else (M, N)
    grid = blocks(grid[0], TILE), blocks(grid[1], LINES)
    return Launch(matmul_plain_kernel(coalesced), grid, (a, b, c))


def _sizes(a: Any, b: Any, c: Any) -> tuple[int, int, int]:
    """M, N, K of a product; UserError where the shapes do not fit."""
    (M, K), N = a.shape, b.shape[1]
    fits = b.shape == (K, N) and c.shape == (M, N)
    expect(f"c (M, N) for a (M, K) and b (K, N), not {c.shape}, {a.shape} and {b.shape}", fits)
    expect_float32(a, b, c)
    return M, N, K


def matmul_plain_counts(M: int, N: int, K: int, coalesced: bool = True) -> Counts:
    """What `matmul_plain` moves: two numbers for two operations.

    For each k a warp reads one number of one matrix, a single sector, and 32 numbers of the other:
    four neighbouring sectors if coalesced, else 32.
    """
    warps, sectors = M * N // WARP, 4 if coalesced else 32
    return {
        "global loads bytes": 8 * M * N * K, "global loads sectors": warps * K * (1 + sectors),
        "global stores bytes": 4 * M * N, "global stores sectors": warps * sectors,
    }  # fmt: skip


def matmul_flops(M: int, N: int, K: int) -> int:
    """Operations of every product: a multiplication and an addition for each term."""
    return 2 * M * N * K


# %% sec-gpu-tiles
@functools.cache
def matmul_tiles_kernel(tile: int) -> Kernel:
    """The kernel of `matmul_tiles`. Equation eq-gpu-tiles."""

    def matmul_tiles(a, b, c):
        a_tile = cuda.shared.array((tile, tile), float32)
        b_tile = cuda.shared.array((tile, tile), float32)
        along, down = cuda.threadIdx.x, cuda.threadIdx.y
        row, column = cuda.blockIdx.y * tile + down, cuda.blockIdx.x * tile + along
        M, K = a.shape
        N = b.shape[1]
        total = float32(0)
        for start in range(0, K, tile):
            # 2. Fetch one element of each tile; zero where the tile hangs over an edge.
            a_value, b_value = float32(0), float32(0)
            if row < M and start + along < K:
                a_value = a[row, start + along]
            if column < N and start + down < K:
                b_value = b[start + down, column]
            a_tile[down, along] = a_value
            b_tile[down, along] = b_value
            cuda.syncthreads()  # no thread reads a tile before all have filled it
            # 3. Add this piece of the sum, out of shared memory.
            for k in range(tile):
                total += a_tile[down, k] * b_tile[k, along]
            cuda.syncthreads()  # no thread fills the next tile while another reads this one
        # 4. Write.
        if row < M and column < N:
            c[row, column] = total

    return Kernel(matmul_tiles, "f[2] f[2] f[2]", (tile, tile), target=CARD)


def matmul_tiles(a: Any, b: Any, c: Any, tile: int = TILE) -> Launch:
    """c = a b by tiles in shared memory: a (M, K), b (K, N), c (M, N). Equation eq-gpu-tiles.

    tile: its side, 32 at most, since a block has at most 1024 threads.

    | index         | is                  | covers                                   |
    |---------------|---------------------|------------------------------------------|
    | blockIdx.y, x | tile of c           | rows and columns of c, edges ragged      |
    | threadIdx.y   | down: row           | a[row, :], c[row, column]                |
    | threadIdx.x   | along: column       | b[:, column], coalesced                  |
    | loop          | start               | K in steps of tile                       |

    Numerics: float32 sums in order of k, the same in every run.
    """
    M, N, _ = _sizes(a, b, c)
    expect(f"a tile of 1 to 32, not {tile}", 1 <= tile <= 32)
    grid = blocks(N, tile), blocks(M, tile)
    return Launch(matmul_tiles_kernel(tile), grid, (a, b, c))


def matmul_tiles_counts(M: int, N: int, K: int, tile: int = TILE) -> Counts:
    """What `matmul_tiles` moves, for tiles of 8, 16 or 32. Equation eq-gpu-reads."""
    size = 4 * M * N * 2 * K // tile
    return {
        "global loads bytes": size, "global loads sectors": size // 32,
        "global stores bytes": 4 * M * N, "global stores sectors": M * N // 8,
        "shared loads wavefronts": 2 * M * N * K // WARP,
        "barriers": 2 * (M * N // tile**2) * (K // tile),
    }  # fmt: skip


# %% sec-gpu-registers
# address in shared memory -> the 4 float32 there
load_shared4 = ptx("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "r", "f f f f")
# address in shared memory, 4 float32
store_shared4 = ptx("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "r f f f f")
# pointer of a shared array -> its offset in the block's shared memory
shared_address = ptx(
    "{ .reg .u64 p; cvta.to.shared.u64 p, $1; cvt.u32.u64 $0, p; }", "p", "r", pure=True
)
SIDE, DEPTH = 128, 8  # side of a block's tile of c; how much of K a piece has
PITCH = SIDE + 4  # of a's tile, which is transposed: the 4 avoid bank conflicts of its stores
HALF = SIDE // 2  # rows and columns from a thread's first four to its other four
STAGE = 4 * DEPTH * SIDE  # bytes from the first of b's two tiles to the second
FETCH = DEPTH * SIDE // (4 * THREADS)  # loads of 16 bytes by a thread for each tile: one
HELD = 4 * FETCH  # numbers that a thread fetches of one matrix
BOTH = 2 * HELD


def _multiply(sums, left, right, a_at, b_at):
    """Add the products of 8 numbers of a column of a and 8 of a row of b."""
    left[0], left[1], left[2], left[3] = load_shared4(a_at)
    left[4], left[5], left[6], left[7] = load_shared4(a_at + 4 * HALF)
    right[0], right[1], right[2], right[3] = load_shared4(b_at)
    right[4], right[5], right[6], right[7] = load_shared4(b_at + 4 * HALF)
    for i in range(8):
        value = left[i]
        for j in range(8):
            sums[8 * i + j] += value * right[j]


def _write(sums, c, row, column, M, N):
    """Store a thread's sums: 4 of a row at a time."""
    for i in range(8):
        at = row + i % 4 + i // 4 * HALF
        limit = N if at < M else 0
        for half in range(2):
            first, n = column + half * HALF, 8 * i + 4 * half
            store4(
                c + 4 * (at * N + first), first, limit,
                sums[n], sums[n + 1], sums[n + 2], sums[n + 3],
            )  # fmt: skip


def _put(held, a_tile, b_to, stage):
    """Store a thread's numbers (of `_fetch`, below) into pair `stage` of tiles; a's transposed."""
    a_row, a_k = cuda.threadIdx.x // 2, cuda.threadIdx.x % 2 * 4
    for j in range(FETCH):
        for i in range(4):
            a_tile[stage, 8 * j + a_k + i, a_row] = held[4 * j + i]
        n = HELD + 4 * j
        to = b_to + STAGE * stage + 32 * SIDE * j
        store_shared4(to, held[n], held[n + 1], held[n + 2], held[n + 3])


def _fetch(held, a_from, b_from, k, a_limit, b_limit, N):
    """Ask for a thread's part of the piece from k on: zeros where an index along K has reached
    its limit, which is K, or 0 for a row of a or a column of b that is not there.
    """
    a_k, b_k = cuda.threadIdx.x % 2 * 4, cuda.threadIdx.x // 32
    for j in range(FETCH):
        n, at = 4 * j, k + 8 * j
        held[n], held[n + 1], held[n + 2], held[n + 3] = load4(
            a_from + 4 * at, at + a_k, a_limit
        )
        n += HELD
        held[n], held[n + 1], held[n + 2], held[n + 3] = load4(
            b_from + 4 * at * N, at + b_k, b_limit
        )


def _matmul_registers(a, b, c, M, N, K):
    a_tile = cuda.shared.array((2, DEPTH, PITCH), float32)
    b_tile = cuda.shared.array((2, DEPTH, SIDE), float32)
    sums, held = cuda.local.array(64, float32), cuda.local.array(BOTH, float32)
    left, right = cuda.local.array(8, float32), cuda.local.array(8, float32)
    for i in range(64):
        sums[i] = float32(0)
    thread = cuda.threadIdx.x
    row, column = cuda.blockIdx.y * SIDE, cuda.blockIdx.x * SIDE
    # What this thread fetches of each piece: four of a row of a, four of a row of b.
    a_row, b_k, b_column = row + thread // 2, thread // 32, column + thread % 32 * 4
    a_from, b_from = a + 4 * (a_row * K + thread % 2 * 4), b + 4 * (b_k * N + b_column)
    a_limit, b_limit = K if a_row < M else 0, K if b_column < N else 0
    b_to = shared_address(b_tile) + 4 * (thread // 32 * SIDE + thread % 32 * 4)
    # What it sums: four rows from 4 (thread // 16) on, and the four that are 64 further down.
    # Columns likewise, from 4 (thread % 16) on.
    a_at = shared_address(a_tile) + 4 * (thread // 16 * 4)
    b_at = shared_address(b_tile) + 4 * (thread % 16 * 4)
    _fetch(held, a_from, b_from, 0, a_limit, b_limit, N)
    _put(held, a_tile, b_to, 0)
    stage = 0
    for start in range(DEPTH, K + DEPTH, DEPTH):  # the last fetch is past K: zeros, never put down
        cuda.syncthreads()  # this stage is full, and nobody reads the other one any more
        _fetch(held, a_from, b_from, start, a_limit, b_limit, N)
        for k in range(DEPTH):
            line = DEPTH * stage + k
            _multiply(sums, left, right, a_at + 4 * PITCH * line, b_at + 4 * SIDE * line)
        stage = 1 - stage
        if start < K:
            _put(held, a_tile, b_to, stage)
    _write(sums, c, row + thread // 16 * 4, column + thread % 16 * 4, M, N)


@functools.cache
def matmul_registers_kernel() -> Kernel:
    """The kernel of `matmul_registers`."""
    return Kernel(_matmul_registers, "l l l r r r", THREADS, resident=2, target=CARD)


def matmul_registers(a: Any, b: Any, c: Any) -> Launch:
    """c = a b, 64 elements a thread: a (M, K), b (K, N), c (M, N), K and N multiples of 4.

    | index         | is            | covers                                                  |
    |---------------|---------------|---------------------------------------------------------|
    | blockIdx.y, x | row, column   | where the block's 128 x 128 of c begins, edges ragged   |
    | thread        | down, along   | 4 rows from down on, 4 from down + 64; columns alike    |
    | thread        | a_row, a_k    | where the four numbers of a begin that it fetches       |
    | thread        | b_k, b_column | the same of b                                           |
    | loop          | start         | K in pieces of 8, the next one on its way               |

    Numerics: float32 sums in order of k, the same in every run.
    """
    M, N, K = _sizes(a, b, c)
    expect(f"K and N that are multiples of 4, not {K} and {N}", K % 4 == N % 4 == 0 and K > 0)
    grid = blocks(N, SIDE), blocks(M, SIDE)
    return Launch(matmul_registers_kernel(), grid, (a, b, c, M, N, K))


def matmul_registers_counts(M: int, N: int, K: int) -> Counts:
    """What `matmul_registers` moves, for multiples of its tiles.

    A warp takes 4 loads of 16 bytes from shared memory for each k, of 4 rounds each.
    """
    size = 4 * M * N * 2 * K // SIDE
    warps = M * N // SIDE**2 * WARPS
    return {
        "global loads bytes": size, "global loads sectors": size // 32,
        "global stores bytes": 4 * M * N, "global stores sectors": M * N // 8,
        "shared loads wavefronts": 16 * warps * K,
        "barriers": M * N // SIDE**2 * (K // DEPTH),
    }  # fmt: skip
