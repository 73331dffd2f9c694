# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-clocks
"""Vector clocks, which say what happened before what, and find races in any order of the run.

An actor is whoever touches memory: a warp, the products that a warp has started (wgmma), a thread's
outgoing copies, or the copies that one mbarrier counts. Its epochs count up, and an access is an
(actor, epoch). A warp knows, for each actor, the last epoch that it has waited for, directly or
through others. It's a race to touch a word without knowing its last write, or to write it
without knowing a read.

Warps, not threads: of lanes that nobody synchronised, only those between two waits are compared
(`arrays`).
"""

import numpy as np

from nanoeuler.emulator.machine import Block, Meeting, fault

COPIERS = 8  # threads of a block that may send copies out
BARRIERS = 96  # mbarriers of a block


class Clock:
    """The actors of one cluster of blocks, and what each of its warps knows of them.

    Actors below `readers` read and write (theirs is a row in each memory's table of reads); the
    others, copies that come in, only write.
    """

    def __init__(self, block: Block):
        warps = [warp for other in block.cluster for warp in other.warps]
        self.readers = 2 * len(warps) + COPIERS * len(block.cluster)
        actors = self.readers + BARRIERS * len(block.cluster)
        self.known = np.zeros((len(warps), actors), np.uint32)
        self.names = ["nobody"] * actors
        self.free, self.copies = 0, self.readers
        for row, warp in enumerate(warps):
            warp.row, warp.known = row, self.known[row]
            warp.actor = self.reader(f"{warp.name} of block {warp.block.index}")
            warp.products = self.reader(f"a wgmma of {warp.name} of block {warp.block.index}")
            warp.known[warp.actor] = 1
        self.own = np.array([warp.actor for warp in warps])  # by row

    def reader(self, name: str) -> int:
        """A new actor that reads."""
        if self.free == self.readers:
            fault("misuse", f"more than {COPIERS} threads of a block send copies")
        self.names[self.free] = name
        self.free += 1
        return self.free - 1

    def writer(self, name: str) -> int:
        """A new actor that only writes."""
        if self.copies == len(self.names):
            fault("misuse", f"more than {BARRIERS} mbarriers in a block")
        self.names[self.copies] = name
        self.copies += 1
        return self.copies - 1

    def new(self) -> np.ndarray:
        """A vector clock that knows nothing."""
        return np.zeros(len(self.names), np.uint32)


def clock(block: Block) -> Clock:
    """The clock that a block shares with its cluster."""
    return block.cluster[0].of(Clock)


def release(warp: Meeting, into: np.ndarray) -> None:
    """Release: merge this warp's vector clock into `into`, and begin a new epoch."""
    warp.block.settle()
    np.maximum(into, warp.known, out=into)
    warp.known[warp.actor] += 1


def acquire(warp: Meeting, other: np.ndarray) -> None:
    """Acquire: merge `other`, a vector clock, into this warp's."""
    warp.block.settle()
    np.maximum(warp.known, other, out=warp.known)


def join(block: Block) -> None:
    """All warps of a block have met: each gets the merged vector clock of all."""
    block.settle()
    known = clock(block).known[block.warps[0].row : block.warps[-1].row + 1]
    known[:] = known.max(axis=0)
    for warp in block.warps:
        warp.known[warp.actor] += 1
