# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-arena
"""Memory of an engine: aligned arrays, and the arena that they are taken from."""

from math import prod
from mmap import mmap

import numpy as np

from nanoeuler.model.weights import ALIGNMENT


def aligned(*shape: int) -> np.ndarray:
    """A float32 array of unspecified contents, whose address is a multiple of ALIGNMENT."""
    raw = np.empty(4 * prod(shape) + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + 4 * prod(shape)].view(np.float32).reshape(shape)


def mapped(*shape: int) -> np.ndarray:
    """float32 zeros straight from the operating system, which gets them back when dropped."""
    size = prod(shape)
    return np.frombuffer(mmap(-1, max(1, 4 * size)), np.float32, size).reshape(shape)


class Arena:
    """Memory handed out by moving an offset. The first pass measures, later ones replay.

    Arrays stay valid until `begin`. What does not fit into the slab is mapped, and the next `begin`
    makes a slab that would have held it: passes like the first do not allocate again.
    """

    def __init__(self):
        self.slab, self.used, self.needed = aligned(0), 0, 0

    def begin(self) -> None:
        """Take back all memory."""
        if self.needed > self.slab.size:
            self.slab = aligned(self.needed)
        self.used = 0

    def take(self, *shape: int) -> np.ndarray:
        """A float32 array of unspecified contents."""
        start, size = self.used, prod(shape)
        self.used += -(-size // 16) * 16  # the next array starts on a cache line too
        self.needed = max(self.needed, self.used)
        if self.used > self.slab.size:
            return mapped(*shape)
        return self.slab[start : start + size].reshape(shape)
