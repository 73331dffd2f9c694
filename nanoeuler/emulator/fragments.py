# Made from book/h-ptx-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ptx-copies
"""Fragments, the elements that each thread holds: the maps that tensor-core instructions share.

PTX ISA, "Matrix fragments" (mma, wgmma) and "Shared memory matrix layout" (the swizzle).
"""

import functools

import numpy as np


def accumulator(n: int, threads: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of register i of thread t, for a product of n columns: arrays [threads, n/2].

    Warp w holds rows 16 w to 16 w + 15. Four neighbouring lanes hold 8 columns of a row, two each.
    Registers come in fours: (row, c), (row, c + 1), (row + 8, c), (row + 8, c + 1); the next four
    are 8 columns on.
    """
    t, i = np.arange(threads)[:, None], np.arange(n // 2)[None, :]
    row = t // 32 * 16 + t % 32 // 4 + i % 4 // 2 * 8
    column = i // 4 * 8 + t % 4 * 2 + i % 2
    return row, column


def operand(threads: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """(row, k) of half h of register i of thread t, for A and a step of 16: arrays [threads, 4, 2].

    The same squares of 8 x 8 as in the accumulator: so an accumulator, packed in pairs, is an A.
    """
    t, i = np.arange(threads)[:, None, None], np.arange(4)[None, :, None]
    h = np.arange(2)[None, None, :]
    row = t // 32 * 16 + t % 32 // 4 + i % 2 * 8 + 0 * h
    return row, i // 2 * 8 + t % 4 * 2 + h


def swizzle(address: int | np.ndarray) -> int | np.ndarray:
    """128-byte swizzle: 16-byte chunk (bits 4 to 6) xor the row in its group of 8 (bits 7 to 9)."""
    return address ^ ((address >> 7 & 7) << 4)


@functools.cache
def box(size: int) -> np.ndarray:
    """Byte i of a box of the copy engine is at byte box(size)[i] from a multiple of 1024."""
    return swizzle(np.arange(size))


@functools.cache
def matrix(start: int, leading: int, stride: int, rows: int, mn_major: bool) -> tuple:
    """Where a descriptor's operand (rows, 16) lies: its halves, by (row, k), and its words.

    Counted from the KiB that byte `start` is in. K-major: rows of 128 bytes, groups of 8 rows
    `stride` apart. MN-major: 64 rows side by side in 128 bytes, k goes down, groups of 8 k are
    `stride` and blocks of 64 rows `leading` apart.
    """
    r, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    if mn_major:
        at = r // 64 * leading + r % 64 * 2 + k // 8 * stride + k % 8 * 128
    else:
        at = r // 8 * stride + r % 8 * 128 + k * 2
    at = swizzle(at + start) // 2
    return at, np.unique(at // 2)
