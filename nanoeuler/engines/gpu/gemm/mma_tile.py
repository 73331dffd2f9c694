# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-mma-tile
"""A k-block of one operand: copied into the ring by a block's threads, read out by its warps.

An operand is *dense* where k runs along its rows in memory (A of NT and NN, B of NT). Its k-block
is `extent` rows of 64 k; else it is 64 rows, one for each k, of `extent` elements. Both are
swizzled. Of float32 it is 32 k in place of 64.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.gemm.mma_form import DEPTH, HALF, PITCH, SIDE, MmaForm
from nanoeuler.engines.gpu.lang.instruction import int32, int64
from nanoeuler.engines.gpu.lang.ptx import copy_async_part, ldmatrix_across, ldmatrix_down
from nanoeuler.engines.gpu.tile import layout
from nanoeuler.engines.gpu.tile.layout import chunk_at, squares_across, squares_down

PARTS = 3  # a k-block is fetched in so many parts, beside the first three of its four steps


class Matrix(NamedTuple):
    """A matrix in memory: its address, elements from row to row, rows and columns."""

    start: int
    pitch: int
    rows: int
    columns: int


class Source(NamedTuple):
    """What a thread copies of a k-block: the address of its first chunk, elements from there to the
    end of the row, rows to the last, elements from row to row; and where the chunk goes in a stage.
    """

    start: int
    rest: int
    below: int
    pitch: int
    to: int


def swizzle(row, dense):
    """What the chunks of a row of 128 bytes or more are moved by."""
    return layout.swizzle(row, layout.PANEL)


def make_column(form: MmaForm, gated: bool) -> Callable:
    """column(corner, chunk, columns): the first column of a chunk, in a matrix of so many, of a
    tile that begins at `corner`. gated: of SwiGLU's B, where each 64 columns of a tile are 32 of
    gates and the same 32 of ups."""
    each = PITCH // form.size
    half = HALF // each  # chunks

    def column(corner, chunk, columns):
        if gated:
            place = chunk // (2 * half) * HALF + chunk % half * each
            return int32(corner + place + chunk // half % 2 * (columns >> 1))
        return int32(corner + chunk * each)

    return column


def make_copies(
    form: MmaForm, dense: bool, extent: int, gated: bool = False, swizzle: Callable = swizzle,
    parts: int = PARTS,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """begin(x, corner, first, stage, t): thread t's source for k-block `first` of a Matrix;
    fetch(part, ahead, source): one part of its copies, `ahead` bytes on; forward(source): the next.

    corner: the tile's first row of A, or column of B. What lies behind the end of a row, or below
    the last, becomes zeros. gated: see `make_column`. swizzle(row, dense): by what a row's chunks
    are moved, bits of the row, so that two rows without a common bit, added, are moved by both.
    """
    depth, size, each = form.depth, form.size, PITCH // form.size  # each: elements of a chunk
    wide, rows = (depth, extent) if dense else (extent, depth)
    chunks = wide // each
    passes, step = rows * chunks // form.threads, form.threads // chunks
    column = make_column(form, gated)

    def begin(x, corner, first, stage, t):
        row, chunk = int32(t // chunks), int32(t % chunks)
        down, across = int32(corner + row), int32(first * depth + chunk * each)
        if not dense:
            down, across = int32(first * depth + row), column(corner, chunk, x.columns)
        start = x.start + (int64(down) * x.pitch + across) * size
        place = int32(row * (chunks * 16) + ((chunk ^ swizzle(row, dense)) << 4))
        rest, below = int32(x.columns - across), int32(x.rows - down)
        return Source(start, rest, below, x.pitch, int32(stage + place))

    def fetch(part, ahead, source):
        count = int32(min(max(source.rest * size, 0), 16))
        for j in range(passes):
            if j * parts // passes == part:  # rows go on by `step`, a power of 2
                to = int32(
                    (source.to + ahead + j * (step * chunks * 16)) ^ (swizzle(j * step, dense) << 4)
                )
                here = source.start + int64(j * step * size) * source.pitch
                copy_async_part(to, here, count if j * step < source.below else int32(0))

    def forward(source):
        start, rest, below, pitch, to = source
        if dense:
            return Source(start + depth * size, int32(rest - depth), below, pitch, to)
        return Source(start + int64(depth * size) * pitch, rest, int32(below - depth), pitch, to)

    return begin, fetch, forward


def make_load(dense: bool, extent: int, of_a: bool) -> tuple[Any, Any]:
    """find(lane, side) -> a lane's place in a stage; load(fragments, at, step): 64 rows x 16 k.

    side: the warp's first row of A, or column of B.
    """
    squares, row_bytes = SIDE // 16, extent * 2
    down, across = ldmatrix_down(squares, 16 * DEPTH * 2), ldmatrix_across(squares)
    named = squares_down if dense == of_a else squares_across

    def find(lane, side):
        row, chunk = named(lane)
        if dense:
            return int32(chunk_at(row, chunk, DEPTH) + side * (DEPTH * 2))
        return int32(chunk_at(row, chunk, extent) + side * 2)

    def load(fragments, at, step):
        if dense:
            down(fragments, at ^ (step << 5))
        else:
            across(fragments, at + step * (16 * row_bytes))

    return find, load
