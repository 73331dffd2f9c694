# Made from book/06c-batches.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-batches-shuffle
"""A shuffled order of any length as a function of a place in it: nothing is stored.

Leaves out secrecy: a cipher is built like this, but with more rounds and another hash.
"""

import numpy as np
from numba import njit

ROUNDS = 12  # of the network: measured, the figure of the rounds


@njit(cache=True, nogil=True)
def _mixed(x):
    """A hash of the 64 bits of x in which every bit depends on all (MurmurHash3's last steps)."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


@njit(cache=True, nogil=True)
def shuffled(places, n, keys):
    """The numbers at `places` (m,) int64 of a random order of 0 ... n - 1, int64.

    keys (rounds,) uint64 choose the order. A Feistel network on the smallest square of a power of
    two that has room for n, walked until it comes back below n.
    """
    half = 1
    while (1 << (2 * half)) < n:
        half += 1
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    found = np.empty_like(places)
    for i in range(places.size):
        x = np.int64(places[i])
        while True:
            left, right = np.uint64(x) >> width, np.uint64(x) & mask
            for key in keys:
                left, right = right, left ^ (_mixed(right + key) & mask)
            x = np.int64(left << width | right)
            if x < n:
                break
        found[i] = x
    return found
