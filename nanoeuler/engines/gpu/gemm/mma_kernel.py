# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-mma-kernel
"""Products by mma.sync: the kernels and their launches. bf16 in, float32 sums; capability 8.0 on.

    blockIdx.x -> a tile of C, in groups of rows; blockIdx.y -> a piece of its k-blocks
    warp       -> 64 x 64 of the tile: those below each other first
    step       -> 16 of a k-block's 64

Equal operands give equal bits on equal cards. Left out: batches, and pieces of a bf16 C.
"""

from functools import cache
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.gemm.column_sums import HEADER
from nanoeuler.engines.gpu.gemm.mma_epilogue import Tile, epilogue, wait_all
from nanoeuler.engines.gpu.gemm.mma_form import ALIGN, BOX, FRAGMENTS, HALF, SIDE, SUMS, MmaForm
from nanoeuler.engines.gpu.gemm.mma_tile import PARTS, Matrix, make_copies, make_load
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int8, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.engines.gpu.tile.accumulator import in_order
from nanoeuler.engines.gpu.tile.rope import Turning

SUM_THREADS = 128  # of a block that sums pieces: 512 columns of a row


def make_corner(form: MmaForm) -> Any:
    """corner(block, m, n): the first row and column of a block's tile.

    Tiles go in groups of rows, down first: blocks that run at once share what they read.
    """
    rows, columns, group = form.rows, form.of_c, form.group

    def corner(block, m, n):
        down, across = ptx.divide(m + (rows - 1), rows), ptx.divide(n + (columns - 1), columns)
        first = int32(ptx.divide(block, across * group) * group)
        rest = int32(block - first * across)
        height = int32(min(group, down - first))
        y = ptx.divide(rest, height)
        return int32((first + rest - y * height) * rows), int32(y * columns)

    return corner


def make_sources(form: MmaForm, *how: Any) -> tuple[Any, Any, Any]:
    """begin, fetch, forward: what copies k-blocks of A and B into the ring; how: the last arguments
    of `make_copies`, if they are others than its own.

    begin(a, b, row, column, first, base, t) -> the sources of A and B, from k-block `first` on;
    fetch(part, ahead, sources): a part of the copies into the stage at byte `ahead`;
    forward(sources) -> the same for the next k-block.
    """
    middle = form.rows * ALIGN  # a row of 128 bytes, or as many bytes in other rows
    begin_a, fetch_a, forward_a = make_copies(form, form.layout[0] == "N", form.rows, False, *how)
    begin_b, fetch_b, forward_b = make_copies(
        form, form.layout[1] == "T", form.columns, form.gated, *how
    )

    def begin(a, b, row, column, first, base, t):
        return begin_a(a, row, first, base, t), begin_b(b, column, first, base + middle, t)

    def fetch(part, ahead, sources):
        fetch_a(part, ahead, sources[0])
        fetch_b(part, ahead, sources[1])

    def forward(sources):
        return forward_a(sources[0]), forward_b(sources[1])

    return begin, fetch, forward


def make_find(form: MmaForm, find_a: Any, find_b: Any) -> Any:
    """find(base, warp, lane) -> where a lane reads of A and of B in stage 0."""
    middle, upright = form.rows * ALIGN, form.rows // SIDE

    def find(base, warp, lane):
        of_a = find_a(lane, int32(warp % upright * SIDE))
        of_b = find_b(lane, int32(warp // upright * SIDE))
        return int32(base + of_a), int32(base + middle + of_b)

    return find


def make_fragments(form: MmaForm) -> tuple[Any, Any]:
    """find, as above, and load(a, b, at, slot, step): a step's fragments."""
    find_a, load_a = make_load(form.layout[0] == "N", form.rows, True)
    find_b, load_b = make_load(form.layout[1] == "T", form.columns, False)

    def load(a, b, at, slot, step):
        load_a(a, at[0] + slot, step)
        load_b(b, at[1] + slot, step)

    return make_find(form, find_a, find_b), load


def make_multiply(form: MmaForm) -> Any:
    """multiply(acc, base, sources, count, warp, lane): acc += A B, over `count` k-blocks."""
    stages, stage = form.stages, form.stage
    _, fetch, forward = make_sources(form)
    find, load = make_fragments(form)
    mma, wait = ptx.mma_tile(SIDE, SIDE), ptx.copy_wait(stages - 2)
    last = (stages - 1) * stage

    def multiply(acc, base, sources, count, warp, lane):
        a0, b0 = cuda.local.array(FRAGMENTS, int32), cuda.local.array(FRAGMENTS, int32)
        a1, b1 = cuda.local.array(FRAGMENTS, int32), cuda.local.array(FRAGMENTS, int32)
        for s in range(stages - 1):  # (1) the ring fills, except for one stage
            for part in range(PARTS):
                fetch(part, s * stage, sources)
            ptx.copy_commit()
            sources = forward(sources)
        wait()
        cuda.syncthreads()
        at, slot, ahead = find(base, warp, lane), int32(0), int32(last)
        load(a0, b0, at, slot, 0)
        for i in range(count):
            load(a1, b1, at, slot, 1)  # (2) fragments of the next step, and a part of a k-block
            fetch(0, ahead, sources)
            mma(acc, a0, b0)
            load(a0, b0, at, slot, 2)
            fetch(1, ahead, sources)
            mma(acc, a1, b1)
            load(a1, b1, at, slot, 3)
            fetch(2, ahead, sources)
            ptx.copy_commit()
            mma(acc, a0, b0)
            wait()  # (3) my copies of the next k-block have come
            cuda.syncthreads()  # so have all others'; and this one is read by all
            sources = forward(sources)
            ahead = slot
            slot = int32(slot + stage) if slot < last else int32(0)
            load(a0, b0, at, slot if i + 1 < count else ahead, 0)
            mma(acc, a1, b1)

    return multiply


class Arrays(NamedTuple):
    """Addresses of A, B, C; of a bias or the matrix that sums meet; of the second array; and of the
    space in which lines of sums wait, behind a header."""

    a: int
    b: int
    c: int
    aux: int
    second: int
    space: int


class Pitches(NamedTuple):
    """Elements from row to row of the arrays."""

    a: int
    b: int
    c: int
    aux: int
    second: int


def make_kernel(form: MmaForm, begin: Any, multiply: Any) -> Kernel:
    """The kernel: arrays; m, n, k; elements from row to row of each array; RoPE's angles.

    begin, multiply: as `make_sources` and `make_multiply` give them. With pieces, blockIdx.y has a
    range of the k-blocks each, and C is `pieces` of float32 (m, n).
    """
    corner, finish, depth = make_corner(form), in_order(epilogue(form)), form.depth
    upright, clear, boxes = form.rows // SIDE, ptx.zeros(SUMS), form.boxes * BOX
    parts, wide = (2, HALF) if form.gated else (1, SIDE)  # of B's columns, and of a warp's of C
    dense_a, dense_b = form.layout[0] == "N", form.layout[1] == "T"

    def gemm_mma(to: Arrays, m, n, k, of: Pitches, by: Turning):
        shared = cuda.shared.array(0, int8)
        base = int32((ptx.shared_address(shared) + (ALIGN - 1)) & ~(ALIGN - 1))
        t = int32(cuda.threadIdx.x)
        warp, lane = int32(t >> 5), int32(t & 31)
        row, column = corner(int32(cuda.blockIdx.x), m, n)
        piece, pieces = int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
        blocks = ptx.divide(k + (depth - 1), depth)
        first = ptx.divide(blocks * piece, pieces)
        last = ptx.divide(blocks * (piece + 1), pieces)
        acc = cuda.local.array(SUMS, float32)
        clear(acc)
        end = int32(min(k, last * depth))
        left = Matrix(to.a, of.a, m, end) if dense_a else Matrix(to.a, of.a, end, m)
        right = Matrix(to.b, of.b, n, end) if dense_b else Matrix(to.b, of.b, end, n * parts)
        sources = begin(left, right, row, column, first, base, t)
        multiply(acc, base, sources, int32(last - first), warp, lane)
        wait_all()
        cuda.syncthreads()  # the ring is free: warps' boxes are there now
        row = int32(row + warp % upright * SIDE)
        column = int32(column + warp // upright * wide)
        c = Matrix(to.c + int64(piece) * m * of.c * 4, of.c, m, n)
        aux, second = Matrix(to.aux, of.aux, m, n), Matrix(to.second, of.second, m, n)
        box = int32(base + warp * boxes)
        finish(acc, Tile(c, aux, second, to.space + HEADER, row, column, box, lane, by))

    args, resident = "l l l l l l r r r r r r r r l l r r", form.resident
    return Kernel(gemm_mma, args, form.threads, form.shared, resident=resident, target=(8, 0))


@cache
def mma_kernel(form: MmaForm) -> Kernel:
    """The kernel for operands in bf16."""
    return make_kernel(form, make_sources(form)[0], make_multiply(form))


# %% sec-mma-host
@cache
def sum_kernel(add: bool) -> Kernel:
    """The kernel that sums pieces in their order: pieces, C, columns, elements from row to row.

    blockIdx.x -> row of C; blockIdx.y and thread -> four of its columns.
    """

    def gemm_mma_sum(space, c, m, n, of_space, of_c, pieces):
        row = int32(cuda.blockIdx.x)
        column = int32((cuda.blockIdx.y * SUM_THREADS + cuda.threadIdx.x) * 4)
        if column < n:
            x, y, z, w = float32(0), float32(0), float32(0), float32(0)
            at = space + (int64(row) * of_space + column) * 4
            for _ in range(pieces):
                more = ptx.load_float4(at)
                x += more[0]
                y += more[1]
                z += more[2]
                w += more[3]
                at += int64(m) * of_space * 4
            to = c + (int64(row) * of_c + column) * 4
            if add:
                old_x, old_y = ptx.load_float2_if(to, n - column)
                old_z, old_w = ptx.load_float2_if(to + 8, n - column - 2)
                x, y, z, w = old_x + x, old_y + y, old_z + z, old_w + w
            ptx.store_float2_if(to, x, y, n - column)
            ptx.store_float2_if(to + 8, z, w, n - column - 2)

    return Kernel(gemm_mma_sum, "l l r r r r r", SUM_THREADS, target=(8, 0))
