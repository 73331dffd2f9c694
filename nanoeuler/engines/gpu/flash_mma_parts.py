# Made from book/08a-flash-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-mma-parts
"""What the kernels of attention by mma.sync share: tiles in shared memory, copies, fragments.

A tile is rows x D in bf16, D = 32, 64 or 128, its 16-byte chunks swapped within a row (`turn`).
Addresses in shared memory, rows and counts are int32, addresses in global memory int64. Left out:
the kernels themselves, in flash_mma.py and flash_mma_backward.py.
"""

from typing import Any, NamedTuple

from nanoeuler.engines.gpu.flash_layout import FORBIDDEN
from nanoeuler.engines.gpu.instruction import cuda, float32, int8, int32, int64
from nanoeuler.engines.gpu.ptx import (
    copy_async,
    copy_async_part,
    ldmatrix4,
    ldmatrix4_turned,
    load_shared_int4,
    mma,
    pack_bf16,
    shared_address,
    store_int4,
    store_shared_int,
    uniform,
)

EVERY_CARD = 8, 0  # the compute capability that has all these instructions


class Place(NamedTuple):
    """Where a thread stands: in its block, in its warp; its warp."""

    thread: int
    lane: int
    warp: int


def place() -> Place:
    """This thread's place. `uniform` tells the compiler that a warp agrees on its number."""
    t = int32(cuda.threadIdx.x)
    return Place(t, int32(t & 31), uniform(int32(t >> 5)))


def own_row(at: Place) -> int:
    """The first of a lane's two rows of 16; the other is 8 below."""
    return int32(at.lane >> 2)


def own_column(at: Place) -> int:
    """The first of a lane's columns: this one and the next, then every 8."""
    return int32((at.lane & 3) * 2)


class Head(NamedTuple):
    """One head of an array in memory: the address of its row 0, and bytes from row to row."""

    start: int
    step: int


def head_of(array: int, steps: tuple, batch: int, head: int) -> Head:
    """The head `head` of sequence `batch`; steps: bytes from batch to batch, head, row."""
    return Head(int64(array + batch * steps[0] + head * steps[1]), steps[2])


def turn(row: int, D: int) -> int:
    """What a row's chunks are swapped by: any 8 rows in a row then lie in different banks."""
    return int32(row & 7) if D >= 64 else int32(row >> 1 & 3)


def chunk_at(row: int, chunk: int, D: int) -> int:
    """The byte of a tile where a row's chunk of 8 columns lies."""
    return int32(row * (2 * D) + ((chunk ^ turn(row, D)) << 4))


def shared_base() -> int:
    """The address of dynamic shared memory: behind the KiB that the system keeps for itself."""
    return shared_address(cuda.shared.array(0, int8))


class Share(NamedTuple):
    """A thread's share of a copy of rows: 16 bytes of each `apart`-th row, from `row` on.

    to: the bytes from a tile's start to the first of them.
    """

    row: int
    chunk: int
    to: int


def share(D: int, at: Place, threads: int) -> Share:
    """This thread's share, in a block of so many threads."""
    row, chunk = int32(at.thread // (D // 8)), int32(at.thread % (D // 8))
    return Share(row, chunk, chunk_at(row, chunk, D))


def source_of(head: Head, first: int, of: Share) -> int:
    """Where this thread's share of the rows of a head from `first` on begins."""
    return int64(head.start + int64(first + of.row) * head.step + 16 * of.chunk)


def copy_rows(
    tile: int, source: int, step: int, rows: int, left: int, D: int, threads: int, whole: bool,
    of: Share,
) -> None:  # fmt: skip
    """Start copying `rows` rows, `step` bytes apart, to a tile; zeros after the first `left`.

    All threads of the block call it with their own `source`. whole: all rows are there, which
    spares the comparison.
    """
    apart = threads // (D // 8)
    for i in range(rows // apart):
        to = int32(tile + of.to + i * apart * 2 * D)
        if whole:
            copy_async(to, source)
        else:
            size = int32(16) if of.row + i * apart < left else int32(0)
            copy_async_part(to, source, size)
        source += apart * step


class Lanes(NamedTuple):
    """Bytes from a tile's start to the row that this lane tells `ldmatrix`.

    left: for A, or for B of a product with a tile's columns; right: for B of one with its rows.
    """

    left: int
    right: int


def lanes(D: int, at: Place) -> Lanes:
    """For the first 16 rows and columns of a tile; 16 rows further they are 32 D bytes more."""
    lane = at.lane
    left = chunk_at(int32(lane & 15), int32(lane >> 4), D)
    right = chunk_at(int32((lane & 7) + (lane >> 4 << 3)), int32(lane >> 3 & 1), D)
    return Lanes(left, right)


def beside(address: int, i: int) -> int:
    """The same row 16 i columns further: chunks are swapped, so that is an exclusive or."""
    return int32(address ^ i << 5)


def load_left(a: Any, i: int, address: int) -> None:
    """A of 16 x 16 into a[i .. i + 3]."""
    a[i], a[i + 1], a[i + 2], a[i + 3] = ldmatrix4(address)


def multiply(acc: Any, at: int, a: Any, i: int, b0: int, b1: int) -> None:
    """acc[at .. at + 3] += A B, 16 x 8 sums; A in a[i .. i + 3]."""
    acc[at], acc[at + 1], acc[at + 2], acc[at + 3] = mma(
        a[i], a[i + 1], a[i + 2], a[i + 3], b0, b1, acc[at], acc[at + 1], acc[at + 2], acc[at + 3]
    )


def add_columns(acc: Any, first: int, a: Any, tile: int, k: int, D: int) -> None:
    """acc[first ..] += A B: 16 x D sums; B: rows 16 k to 16 k + 15 of a tile, `Lanes.left` on."""
    for n in range(D // 16):
        b0, b1, b2, b3 = ldmatrix4_turned(int32(beside(tile, n) + k * 32 * D))
        multiply(acc, first + 8 * n, a, 0, b0, b1)
        multiply(acc, first + 8 * n + 4, a, 0, b2, b3)


def forbid_later(s: Any, first: int, keys: int, distance: int) -> None:
    """Forbid, in s[first ..], the keys that come after their query.

    distance: from this lane's first key to the last one that its upper query sees.
    """
    below = int32(distance + 8)
    for n in range(keys // 8):
        i = first + 4 * n
        if 8 * n > distance:
            s[i] = float32(FORBIDDEN)
        if 8 * n + 1 > distance:
            s[i + 1] = float32(FORBIDDEN)
        if 8 * n > below:
            s[i + 2] = float32(FORBIDDEN)
        if 8 * n + 1 > below:
            s[i + 3] = float32(FORBIDDEN)


def stage_rows(acc: Any, i: int, above: float, below: float, tile: int, D: int, at: Place) -> None:
    """16 rows of sums, acc[i ..] times `above` and `below`, as bf16 to a tile of this warp."""
    row, pair = own_row(at), int32(2 * own_column(at))
    for n in range(D // 8):
        j = i + 4 * n
        to = int32(tile + chunk_at(row, n, D) + pair)
        store_shared_int(to, pack_bf16(acc[j] * above, acc[j + 1] * above))
        store_shared_int(int32(to + 16 * D), pack_bf16(acc[j + 2] * below, acc[j + 3] * below))


def put_rows(tile: int, head: Head, first: int, T: int, D: int, at: Place) -> None:
    """A warp's 16 rows from its tile to memory, rows `first` on, 16 bytes a lane; none past T."""
    cuda.syncwarp()  # lanes read what others have stored
    chunks, apart = D // 8, 256 // D
    row, chunk = int32(at.lane // chunks), int32(at.lane % chunks)
    for i in range(16 // apart):
        here = int32(row + i * apart)
        if first + here < T:
            x0, x1, x2, x3 = load_shared_int4(int32(tile + chunk_at(here, chunk, D)))
            to = int64(head.start + int64(first + here) * head.step + 16 * chunk)
            store_int4(to, x0, x1, x2, x3)
