# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-traffic
"""Memory traffic of a warp: sectors of global memory, wavefronts of shared memory's banks.

The lanes of a warp execute a load together, but here they run one after another. So accesses are
put together by order: a warp's n-th load is made of its lanes' n-th loads since they last met.
Where lanes took different ways this is a guess.
"""

import functools

import numpy as np

from nanoeuler.emulator.machine import WARP

SECTOR = 32  # bytes that global memory moves at least: CUDA C++ Best Practices Guide, 10.2.1
BANKS, BANK = 32, 4  # banks of shared memory, and the bytes that one gives at a time: ibid., 10.2.3


def by_warp(threads: np.ndarray, addresses: np.ndarray) -> np.ndarray:
    """Accesses as warps make them: addresses by (instruction, lane), -1 where a lane has none.

    threads, addresses (n,) int: who accesses what, each thread's in their order.
    """
    order = np.argsort(threads, kind="stable")
    threads = threads[order]
    counts = np.bincount(threads)
    most = int(counts.max(initial=0))
    turn = np.arange(len(threads)) - (np.cumsum(counts) - counts)[threads]
    table = np.full((-(-len(counts) // WARP) * most, WARP), -1, np.int64)
    table[threads // WARP * most + turn, threads % WARP] = addresses[order]
    return table[(table >= 0).any(axis=1)]


def distinct(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different numbers in each row of a table, -1 left out: (row, number) of each."""
    table = np.sort(table, axis=1)
    new = table >= 0
    new[:, 1:] &= table[:, 1:] != table[:, :-1]
    return np.nonzero(new)[0], table[new]


def sectors(table: np.ndarray, size: int) -> int:
    """The sectors that loads or stores of `size` bytes, by (instruction, lane), move."""
    steps = range(0, size, min(size, 4))
    parts = [np.where(table < 0, -1, (table + step) // SECTOR) for step in steps]
    return len(distinct(np.concatenate(parts, axis=1))[0])


def wavefronts(table: np.ndarray, size: int) -> int:
    """The rounds of shared memory for accesses of `size` bytes, by (instruction, lane).

    A bank gives one word a round; lanes that want the same word share it. Accesses of 8 bytes go
    half a warp at a time, of 16 bytes a quarter.
    """
    return _wavefronts(table.astype(np.int32).tobytes(), max(1, size // BANK))


@functools.lru_cache(64)  # blocks do alike, and so do the steps of a loop
def _wavefronts(addresses: bytes, words: int) -> int:
    lanes = np.frombuffer(addresses, np.int32).reshape(-1, WARP // words, 1)
    each = np.where(lanes < 0, -1, lanes // BANK + np.arange(words)).reshape(-1, WARP)
    rows, numbers = distinct(each)
    load = np.bincount(rows * BANKS + numbers % BANKS, minlength=len(each) * BANKS)
    return int(load.reshape(-1, BANKS).max(axis=1).sum()) if len(each) else 0
