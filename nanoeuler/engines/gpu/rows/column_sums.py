# Made from book/j-row-kernels.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-rows-columns
"""Sums down the columns of a matrix, float32, equal bits in every run: partial sums, then theirs.

A slab of rows is summed by one block, in the order of rows; slabs are summed in a fixed order.
`Walk` says which thread has which columns and rows; activations use it, too. Partial sums (slabs,
columns) float32 are the caller's working memory.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanoeuler.engines.gpu.lang import ptx, vectors
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, cover
from nanoeuler.engines.gpu.lang.vectors import LANES  # by name, as the shape of an array must be
from nanoeuler.errors import UserError

SUM_WARPS, SUM_AHEAD = 16, 8  # of a block that sums partial sums; loads of a thread under way
AHEAD = 4  # rows that a thread of other blocks loads before it uses one
STRIP = 128  # threads of a block at most
# Threads of all blocks that a multiprocessor gets. A kernel that sums has few, since each leaves
# partial sums, and begins several loads at a time; one that does not sum has four times as many.
SUMMING, FREE = 512, 2048


@dataclass(frozen=True)
class Walk:
    """A grid-stride loop over a matrix: each thread keeps its columns and goes down the rows.

    Block (s, b) has strip s, a piece of `width` columns a thread, and rows b, b + slabs, ...
    room: threads of all blocks on a multiprocessor.
    """

    rows: int
    columns: int
    width: int
    room: int
    multiprocessors: int = MULTIPROCESSORS

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1 or self.columns % vectors.STEP:
            came = f"{self.rows} x {self.columns}"
            raise UserError(f"expected rows and a multiple of {vectors.STEP} columns, not {came}")

    @property
    def strips(self) -> int:
        """Strips that the columns are cut into."""
        return cover(self.columns // self.width, STRIP)

    @property
    def threads(self) -> int:
        """Threads of a block: whole warps."""
        return LANES * cover(cover(self.columns // self.width, self.strips), LANES)

    @property
    def slabs(self) -> int:
        """Blocks of a strip, each with every slabs-th row."""
        room = self.multiprocessors * (self.room // self.threads) // self.strips
        return min(self.rows, max(1, room))

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks."""
        return self.strips, self.slabs


def partials_shape(rows: int, columns: int, width: int, multiprocessors: int) -> tuple[int, int]:
    """The shape of the partial sums of a matrix."""
    return Walk(rows, columns, width, SUMMING, multiprocessors).slabs, columns


def make_zero(width: int) -> Callable:
    """zero(values): values[:width] = 0."""

    def zero(values):
        for k in range(width):
            values[k] = float32(0)

    return zero


def make_put(width: int) -> Callable:
    """put(sums, address): float32 sums[:width] to memory."""
    store = vectors.make_store("float32", 4)

    def put(sums, address):
        for k in range(0, width, 4):
            store(sums, k, address + k * 4)

    return put


@functools.cache
def columns_kernel(kind: str, threads: int) -> Kernel:
    """Partial sums of a matrix of this kind; `Walk` says which thread has what."""
    width, ahead, size = vectors.piece(kind), AHEAD * vectors.piece(kind), vectors.SIZES[kind]
    load, zero, put = vectors.make_load(kind, width), make_zero(width), make_put(width)

    def slab_sums(matrix, partials, rows, columns):
        column = int32(cuda.blockIdx.x * threads + cuda.threadIdx.x) * width
        slab, slabs = int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
        sums, values = cuda.local.array(width, float32), cuda.local.array(ahead, float32)
        zero(sums)
        if column < columns:
            row, start = slab, matrix + int64(column) * size
            while row + (AHEAD - 1) * slabs < rows:
                for i in range(AHEAD):
                    load(values, i * width, vectors.place(start, row + i * slabs, columns, size))
                for i in range(AHEAD):
                    for k in range(width):
                        sums[k] += values[i * width + k]
                row += AHEAD * slabs
            while row < rows:
                load(values, 0, vectors.place(start, row, columns, size))
                for k in range(width):
                    sums[k] += values[k]
                row += slabs
            put(sums, vectors.place(partials, slab, columns, 4) + int64(column) * 4)

    return Kernel(slab_sums, "l l r r", threads, resident=SUMMING // threads, target=(8, 0))


def total_of(partials, count, pitch, column, inside, lane, warp):
    """The sum of `count` rows, `pitch` apart, in a column, if that is inside: in the first warp.

    Warp w sums rows w, w + 16, ... in order, then the first warp sums the warps' sums in order.
    """
    sums = cuda.shared.array((SUM_WARPS, LANES), float32)
    total = float32(0)
    if inside:
        for start in range(warp, count, SUM_WARPS * SUM_AHEAD):
            for k in range(SUM_AHEAD):
                row = start + k * SUM_WARPS
                here = min(row, count - 1)  # always a row that exists
                value = ptx.load_float(partials + (int64(here) * pitch + column) * 4)
                total += value if row < count else float32(0)
    sums[warp, lane] = total
    cuda.syncthreads()  # all sums are there
    for other in range(1, SUM_WARPS):
        total += sums[other, lane]
    return total


@functools.cache
def sum_kernel(add: bool) -> Kernel:
    """Rows of partial sums (count, width) to one, in three parts; see `sum_launch`.

    Block b has columns 32 b to 32 b + 31, a lane each.
    """

    def add_up(partials, count, width, part, first, second, third):
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        column = int32(cuda.blockIdx.x * LANES + lane)
        total = total_of(partials, count, width, column, column < width, lane, warp)
        if warp == 0 and column < width:
            which = ptx.divide(column, part)
            out = first if which == 0 else second if which == 1 else third
            if out != 0:
                out += int64(column - which * part) * 4
                if add:
                    total += ptx.load_own_float(out)
                ptx.store_float(out, total)

    return Kernel(add_up, "l r r r l l l", LANES * SUM_WARPS, target=(8, 0))


def sum_launch(partials: Any, outs: tuple[Any, ...], add: bool) -> Launch:
    """Each of one to three `outs` (columns,) is, or gets added, the sum of its partial sums.

    partials (count, len(outs) * columns) float32; an out that is None is left out.
    """
    count, width = partials.shape
    columns = width // len(outs)
    for out in outs:
        if out is not None:
            vectors.expect("a sum over rows", out, (columns,), "float32")
    vectors.expect("partial sums", partials, (count, columns * len(outs)), "float32")
    places = [vectors.given(out) for out in outs] + [0] * (3 - len(outs))
    args = partials, count, width, columns, *places
    return Launch(sum_kernel(add), (cover(width, LANES),), args)


COUNTED = 8  # bits of a line's second number that say how many columns there are, and, the last
STORED = 1 << COUNTED - 1  # of them, that sums are stored and not added


def sum_lines(
    first: int, count: int, pitch: int, out: int, columns: int, store: bool = False
) -> list[tuple[int, int, int, int]]:
    """The lines of a table for `sum_table_launch`, one for each 32 columns.

    Partial sums: `count` rows, `pitch` floats from one to the next, the first begins at number
    `first`; they are added to `columns` floats from number `out` on, or stored there.
    """
    how = count << COUNTED | STORED * store
    return [
        (first + c, how | min(LANES, columns - c), pitch, out + c)
        for c in range(0, columns, LANES)
    ]


def add_up_lines(table, partials, outs):
    """Block b has line b of the table, a lane each column."""
    lane, warp = int32(cuda.threadIdx.x % LANES), int32(cuda.threadIdx.x // LANES)
    first, sizes, pitch, out = ptx.load_int4(table + 16 * int64(cuda.blockIdx.x))
    inside = lane < (sizes & (STORED - 1))
    start = partials + int64(first) * 4
    total = total_of(start, sizes >> COUNTED, pitch, lane, inside, lane, warp)
    if warp == 0 and inside:
        place_of = outs + int64(out + lane) * 4
        before = ptx.load_own_float(place_of) if sizes & STORED == 0 else float32(0)
        ptx.store_float(place_of, total + before)


# A block for each line; as many warps as where all do the same.
SUM_TABLE = Kernel(add_up_lines, "l l l", LANES * SUM_WARPS, target=(8, 0))


def sum_table_launch(table: Any, partials: Any, outs: Any) -> Launch:
    """Partial sums to outs, both flat float32, as the lines (n, 4) int32 of a table say.

    No place of outs may be in two lines.
    """
    vectors.expect("the table of sums", table, (table.shape[0], 4), "int32")
    vectors.expect("partial sums", partials, tuple(partials.shape), "float32")
    vectors.expect("what sums are added to", outs, tuple(outs.shape), "float32")
    return Launch(SUM_TABLE, (table.shape[0],), (table, partials, outs))


def columns_launches(
    matrix: Any, out: Any, partials: Any, add: bool = True, multiprocessors: int = MULTIPROCESSORS
) -> tuple[Launch, Launch]:
    """out (columns,) float32 is, or gets added, the sum of the rows of `matrix`.

    partials: float32 of `partials_shape(*matrix.shape, piece(kind), multiprocessors)`.
    """
    rows, columns = matrix.shape
    kind = vectors.kind_of(matrix)
    walk = Walk(rows, columns, vectors.piece(kind), SUMMING, multiprocessors)
    vectors.expect("the matrix", matrix, (rows, columns), kind)
    vectors.expect("partial sums", partials, (walk.slabs, columns), "float32")
    kernel = columns_kernel(kind, walk.threads)
    first = Launch(kernel, walk.grid, (matrix, partials, rows, columns))
    return first, sum_launch(partials, (out,), add)
