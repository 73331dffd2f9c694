# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-arrays
"""The state of an array's elements between meetings: in shared memory, in global memory."""

import numpy as np

from nanoeuler.emulator.arrays import Array, Log, Side, accuse, check_races, check_written
from nanoeuler.emulator.counters import sectors, wavefronts
from nanoeuler.emulator.machine import WARP, Block
from nanoeuler.emulator.memory import UNFENCED, WRITTEN, Shared
from nanoeuler.emulator.vector_clocks import clock


class SharedState:
    """An array in a block's shared memory, from byte `start` on."""

    def __init__(self, block: Block, start: int, array: Array):
        self.block, self.memory, self.start = block, block.of(Shared), start
        self.last = np.full(array.size, -1)
        self.clock = clock(block)
        self.span = slice(start // 4, (start + array.size * array.dtype.itemsize + 3) // 4)
        self.whole = False  # whether every word has been written

    def settle(self, log: Log, array: Array, reads: Side, writes: Side) -> None:
        """Check and count a batch of accesses."""
        memory, counts, size = self.memory, self.block.machine.counts, array.dtype.itemsize
        check_races(log, array, self.last, reads, writes)
        if not self.whole:
            fresh = memory.flags[self._words(reads, size)] & WRITTEN == 0
            check_written(log, array, fresh, reads, writes)
        for name, side in ("loads", reads), ("stores", writes):
            table = side.table(self.start, size)
            counts[f"shared {name}"] += len(table)
            counts[f"shared {name} wavefronts"] += wavefronts(table, size)
        words = self._words(writes, size)
        if log.clocks:
            order(self, log, array, reads, self._words(reads, size), "reads")
            order(self, log, array, writes, words, "writes")
            memory.stores.append((writes.threads, words))
        memory.flags[words] |= WRITTEN | UNFENCED
        self.whole = self.whole or bool((memory.flags[self.span] & WRITTEN).all())

    def _words(self, side: Side, size: int) -> np.ndarray:
        return (self.start + side.elements * size) // 4


def order(
    state: SharedState, log: Log, array: Array, side: Side, words: np.ndarray, verb: str
) -> None:
    """Check a batch against what happened before it, and note it."""
    if not len(words):
        return
    memory, warps, writing = state.memory, state.block.warps, verb == "writes"
    low = int(words.min())
    touched = np.zeros((len(warps), int(words.max()) - low + 1), bool)
    touched[side.threads // WARP, words - low] = True
    rows = state.clock.known[warps[0].row : warps[-1].row + 1]
    if memory.late(low + np.flatnonzero(touched.any(axis=0)), rows.min(axis=0), writing):
        for warp, mine in zip(warps, touched, strict=True):  # not known to all: to this one?
            late = memory.late(low + np.flatnonzero(mine), warp.known, writing)
            if late:
                own = side.threads // WARP == warp.row - warps[0].row
                n = int(np.flatnonzero(own & (words == late[0]))[0])
                text = f"race on {array.element(side.elements[n])}: not ordered after {late[1]}"
                accuse(log, "race", text, (verb, side, n))
    at, words = np.nonzero(touched)
    words += low
    actors = np.array([warp.actor for warp in warps])[at]
    epochs = rows[at, actors]
    if writing:
        memory.writer[words], memory.written[words] = actors, epochs
    else:
        memory.seen[actors, words] = epochs


class GlobalState:
    """An array in global memory. Blocks have no order: no two may touch what one of them writes.

    start: the address that sectors are counted by. fresh: True where nobody wrote yet.
    """

    def __init__(self, start: int, array: Array, fresh: np.ndarray | None, together: bool):
        self.start, self.fresh, self.together = start, fresh, together
        self.last = np.full(array.size, -1)
        self.writer = np.full(array.size, -1)  # the block that wrote it; -1: none, -2: several
        self.reader = np.full(array.size, -1)  # that read it
        self.plain = np.zeros(array.size, bool)  # written without atomics

    def settle(self, log: Log, array: Array, reads: Side, writes: Side) -> None:
        """Check and count a batch of accesses."""
        block = log.block
        check_races(log, array, self.last, reads, writes)
        if self.fresh is not None:
            check_written(log, array, self.fresh[reads.elements], reads, writes)
            self.fresh[writes.elements] = False
        if not self.together:
            check_blocks(self, log, array, reads, writes)
        for name, side in ("loads", reads), ("stores", writes):
            size = array.dtype.itemsize
            table = side.table(self.start, size)
            block.machine.counts[f"global {name}"] += len(table)
            block.machine.counts[f"global {name} sectors"] += sectors(table, size)
            block.machine.counts[f"global {name} bytes"] += len(side.at) * size


def check_blocks(state: GlobalState, log: Log, array: Array, reads: Side, writes: Side) -> None:
    """Check that no other block wrote what this one touches, or read what it writes."""
    number, plain = log.block.number, np.array(log.plain, bool)
    for verb, side, owners in (
        ("reads", reads, (state.writer,)),
        ("writes", writes, (state.writer, state.reader)),
    ):
        for owner in owners:
            other = owner[side.elements]
            clash = (other != -1) & (other != number)
            if verb == "writes" and owner is state.writer:
                clash &= plain[side.at] | state.plain[side.elements]
            if clash.any():
                n = int(np.flatnonzero(clash)[0])
                name = array.element(side.elements[n])
                act = "written" if owner is state.writer else "read"
                text = f"race on {name}: another block has {act} it"
                accuse(log, "race", text, (verb, side, n))
    state.plain[writes.elements[plain[writes.at]]] = True
    for owner, side in (state.writer, writes), (state.reader, reads):
        seen = owner[side.elements]
        owner[side.elements] = np.where((seen == -1) | (seen == number), number, -2)
