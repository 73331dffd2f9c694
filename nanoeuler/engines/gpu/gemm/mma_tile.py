# Made from book/11c-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-mma-tile
"""A k-block of one operand: copied into the ring by a block's threads, read out by its warps.

An operand is *dense* where k runs along its rows in memory (A of NT and NN, B of NT). Its k-block
is `extent` rows of 64 k; else it is 64 rows, one for each k, of `extent` elements. In both cases
chunk c of 16 bytes of row r stands where chunk c ^ (r & 7) would: eight rows of one column of
chunks are in different banks.
"""

from typing import Any

from nanoeuler.engines.gpu.gemm.mma_form import DEPTH, SIDE, MmaForm
from nanoeuler.engines.gpu.lang.instruction import int32, int64
from nanoeuler.engines.gpu.lang.ptx import copy_async_part, ldmatrix_across, ldmatrix_down

PARTS = 3  # a k-block is fetched in so many parts, beside the first three of its four steps


def make_begin(form: MmaForm, dense: bool, extent: int) -> tuple[Any, Any]:
    """begin(address, pitch, corner, size, first, k, t): the source of thread t's copies; place(t).

    A source is the address of the thread's first chunk of a k-block, the elements from there to the
    end of the row, and the rows to the last. The place is that chunk's in a stage.
    """
    chunks = (DEPTH if dense else extent) // 8

    def begin(address, pitch, corner, size, first, k, t):
        row, chunk = int32(t // chunks), int32(t % chunks)
        if dense:
            down, across = int32(corner + row), int32(first * DEPTH + chunk * 8)
            rest, below = int32(k - across), int32(size - down)
        else:
            down, across = int32(first * DEPTH + row), int32(corner + chunk * 8)
            rest, below = int32(size - across), int32(k - down)
        return address + (int64(down) * pitch + across) * 2, rest, below

    def place(t):
        row, chunk = int32(t // chunks), int32(t % chunks)
        return int32(row * (chunks * 16) + ((chunk ^ (row & 7)) << 4))

    return begin, place


def make_fetch(form: MmaForm, dense: bool, extent: int) -> Any:
    """fetch(part, to, source, pitch): one part of a thread's copies of a k-block into a stage.

    What lies behind the end of a row, or below the last, becomes zeros.
    """
    chunks = (DEPTH if dense else extent) // 8
    passes = (extent if dense else DEPTH) * chunks // form.threads
    step = form.threads // chunks  # rows, a power of 2

    def fetch(part, to, source, pitch):
        address, rest, below = source
        size = int32(min(max(rest * 2, 0), 16))
        for j in range(passes):
            if j * PARTS // passes == part:
                place = int32((to + j * (step * chunks * 16)) ^ ((j * step & 7) << 4))
                here = address + int64(j * step * 2) * pitch
                copy_async_part(place, here, size if j * step < below else int32(0))

    return fetch


def make_forward(dense: bool) -> Any:
    """forward(source, pitch): the source of the next k-block."""

    def forward(source, pitch):
        address, rest, below = source
        if dense:
            return address + DEPTH * 2, int32(rest - DEPTH), below
        return address + int64(DEPTH * 2) * pitch, rest, int32(below - DEPTH)

    return forward


def make_load(dense: bool, extent: int, of_a: bool) -> tuple[Any, Any]:
    """find(lane, side) -> a lane's place in a stage; load(fragments, at, step): 64 rows x 16 k.

    side: the warp's first row of A, or column of B. The four 8 x 8 matrices of an ldmatrix are two
    by two; of A those below each other come first, of B those side by side in k.
    """
    squares = SIDE // 16
    row_bytes = extent * 2
    down = ldmatrix_down(squares, 16 * DEPTH * 2)
    across = ldmatrix_across(squares)
    tall = dense == of_a  # lanes 8 to 15 hold addresses of the rows below, or of the next chunk

    def find(lane, side):
        row = int32(lane & 15) if tall else int32((lane & 7) + ((lane >> 4) << 3))
        chunk = int32(lane >> 4) if tall else int32((lane >> 3) & 1)
        if dense:
            return int32((side + row) * (DEPTH * 2) + ((chunk ^ (row & 7)) << 4))
        return int32(row * row_bytes + (((side >> 3) + (chunk ^ (row & 7))) << 4))

    def load(fragments, at, step):
        if dense:
            down(fragments, at ^ (step << 5))
        else:
            across(fragments, at + step * (16 * row_bytes))

    return find, load
