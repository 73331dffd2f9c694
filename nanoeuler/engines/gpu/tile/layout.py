# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tile
"""Where a tile's elements are: in shared memory, and in the registers of a warp's lanes.

Columns are counted in bf16. In shared memory a row is *chunks* of 16 bytes, and chunk c of row r
is at place c ^ (r & 7) of its row (the 128-byte swizzle; of 32 columns see `swizzle`), so that the
same chunk of eight rows is in different banks. In registers 4 j to 4 j + 3 of an accumulator a lane
has two neighbouring columns, 8 j + `lane_column` on, of row `lane_row` and then of the row 8 below.
"""

from nanoeuler.engines.gpu.lang.instruction import int32

PANEL = 64  # columns of 128 bytes: once through all 32 banks


def swizzle(row, columns):
    """What the chunks of a row of so many columns (32, or a multiple of 64) are moved by."""
    return int32(row & 7) if columns >= PANEL else int32(row >> 1 & 3)


def chunk_at(row, chunk, columns):
    """The byte of a tile of so many columns where a row's chunk of 8 of them begins."""
    return int32(row * (2 * columns) + ((chunk ^ swizzle(row, columns)) << 4))


def lane_row(lane):
    """The first of a lane's two rows of 16; the other is 8 below."""
    return int32(lane >> 2)


def lane_column(lane):
    """The first of a lane's two neighbouring columns of 8; the others are multiples of 8 on."""
    return int32((lane & 3) * 2)


def pair_at(lane):
    """The byte of a panel where a lane's first pair of bf16 is: 8 j columns on, ^ (j << 4)."""
    return int32(chunk_at(lane_row(lane), 0, PANEL) + 2 * lane_column(lane))


def squares_down(lane):
    """The row and the chunk that a lane names where squares below each other come first."""
    return int32(lane & 15), int32(lane >> 4)


def squares_across(lane):
    """The same where squares beside each other come first."""
    return int32((lane & 7) + (lane >> 4 << 3)), int32(lane >> 3 & 1)


def squares_at(t, j):
    """The byte of a panel of 64 rows that thread t of a warpgroup names, for columns 16 j on."""
    row, chunk = squares_down(int32(t & 31))
    return chunk_at(int32((t >> 5) * 16 + row), int32(2 * j + chunk), PANEL)
