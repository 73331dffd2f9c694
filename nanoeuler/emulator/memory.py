# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-memory
"""Memory that knows its state: a block's shared words, and global arrays by their addresses.

Each 4-byte word of shared memory knows whether it is anybody's, was written, has a copy on its way
into it, or holds a plain store that the copy engine and the tensor cores may not see yet; who wrote
it last, and when each actor last read it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from nanoeuler.emulator.machine import MOST_THREADS, Block, fault
from nanoeuler.emulator.machine import getcurrent as current
from nanoeuler.emulator.vector_clocks import clock
from nanoeuler.engines.gpu.lang.kernel import Map
from nanoeuler.errors import UserError

WINDOW = 1024  # shared addresses start here: the first KiB of a block's window is the system's
CLUSTER_BIT = 24  # from here up a shared address carries the block's rank in its cluster
MOST = 227 * 1024  # bytes of a block: CUDA C++ Programming Guide, compute capability 9.0
STATIC = 48 * 1024  # of those, for arrays of fixed size: ibid.
# Bytes: allocated memory begins at a multiple (CUDA C++ Programming Guide, device memory).
ALLOCATION = 256

USED, WRITTEN, ARRIVING, UNFENCED = 1, 2, 4, 8  # flags of a word
WHY = {
    USED: ("bounds", "which lies outside of the block's shared memory"),
    ARRIVING: ("race", "into which a copy is still on its way"),
    WRITTEN: ("unwritten", "which nobody wrote"),
    UNFENCED: ("proxy", "stored by threads, with no proxy fence since"),
}


class Shared:
    """One block's shared memory: its bytes, and the state of each word."""

    def __init__(self, block: Block):
        self.block, self.machine, self.clock = block, block.machine, clock(block)
        self.end = WINDOW + block.machine.shared
        size = -(-(self.end + STATIC + 1024) // 1024) * 1024
        self.bytes = np.full(size, 0xCD, np.uint8)
        self.halves, self.words = self.bytes.view(np.uint16), self.bytes.view(np.uint32)
        self.flags = np.zeros(size // 4, np.uint8)
        self.flags[WINDOW // 4 : -(-self.end // 4)] = USED
        self.users = np.zeros(size // 4, np.uint8)  # asynchronous reads under way, for pictures
        self.writer = np.zeros(size // 4, np.uint16)
        self.written = np.zeros(size // 4, np.uint32)
        self.seen = np.zeros((self.clock.readers, size // 4), np.uint32)
        self.stores: list[tuple] = []  # (threads, words) of stores to arrays, not yet fenced
        self.mark = np.zeros(size // 4, np.int32)  # to find words that are named twice
        # The last thread in lockstep that read a word, that wrote it, and since which meeting.
        self.last = np.full((2, size // 4), -1)
        self.since = np.zeros((2, size // 4), np.int64)

    def place(self, size: int) -> int:
        """Room for an array of `size` bytes behind what there is; its address."""
        start = -(-self.end // 128) * 128 + 128  # a gap, so that an overrun does not go unseen
        self.end = start + size
        if self.end > WINDOW + MOST or 4 * len(self.flags) < self.end:
            fault("misuse", f"more than {MOST} bytes of shared memory, or {STATIC} of fixed size")
        self.flags[start // 4 : -(-self.end // 4)] = USED
        return start

    def check(self, words: np.ndarray, action: str, needs: int, lacks: int = 0) -> None:
        """Fault unless all `words` have the flags `needs` and none of `lacks`."""
        if words.size and words.view(np.uint64).max() >= len(self.flags):  # or below 0
            fault("bounds", f"{action} shared byte {4 * int(words.max())}, {WHY[USED][1]}")
        flags = self.flags[words]
        if not np.count_nonzero(flags & (needs | lacks) != needs):
            return
        for flag, (kind, why) in WHY.items():
            wrong = flags & flag == 0 if needs & flag else flags & lacks & flag != 0
            if wrong.any():
                fault(kind, f"{action} shared byte {4 * int(words[wrong].min())}, {why}")

    def note(self) -> None:
        """For a picture: keep the state that the watched bytes of block 0 have now."""
        watch = self.machine.watch
        if watch and not self.block.number:
            words = slice(watch[0] // 4, watch[1] // 4)
            flags = self.flags[words]
            conditions = self.users[words], flags & ARRIVING, flags & UNFENCED, flags & WRITTEN
            state = np.select([c > 0 for c in conditions], (4, 1, 3, 2), 0)
            self.machine.history.append((self.machine.tick, state.astype(np.uint8)))

    def late(self, words: np.ndarray, known: np.ndarray, writes: bool) -> tuple[int, str] | None:
        """A word, and the actor whose access to it `known` lacks: a write or, to write, a read."""
        late = self.written[words] > known[self.writer[words]]
        if np.count_nonzero(late):
            word = int(words[late].flat[0])
            return word, f"the write by {self.clock.names[self.writer[word]]}"
        if writes:
            words = words.reshape(-1)
            n = self.clock.free
            late = self.seen[:n, words] > known[:n, None]
            if late.any():
                actor, at = np.argwhere(late)[0]
                return int(words[at]), f"the read by {self.clock.names[actor]}"
        return None

    def order(self, words: np.ndarray, known: np.ndarray, action: str, writes: bool) -> None:
        """Fault if `late` finds something."""
        late = self.late(words, known, writes)
        if late:
            fault("race", f"{action} shared byte {4 * late[0]}, not ordered after {late[1]}")

    def _actors(
        self, words: np.ndarray, rows: np.ndarray | None, who: tuple, writes: bool
    ) -> tuple:
        """Who accesses, in which epoch, once all is in order: the current thread's warp, or many.

        Of many, words (n, ...): what each thread has; rows (n,): its warp's in the clock. who: the
        threads and the last meetings of their warps, where they are not at one place for certain.
        """
        if rows is None:
            warp = current().warp
            self.order(words, warp.known, "writes" if writes else "reads", writes)
            return warp.actor, warp.known[warp.actor]
        rows = rows.reshape(-1, *[1] * (words.ndim - 1))
        known, actors = self.clock.known, self.clock.own[rows]
        late = (self.written[words] > known[rows, self.writer[words]]).any()
        if writes:
            n, flat = self.clock.free, words.reshape(-1)
            mine = np.broadcast_to(rows, words.shape).reshape(-1)
            late |= (self.seen[:n, flat] > known[mine, :n].T).any()
            self.mark[flat] = np.arange(len(flat))
            late |= (self.mark[flat] != np.arange(len(flat))).any()
        if who:
            threads, since = (part.reshape(rows.shape) for part in who)
            for kind in (0, 1) if writes else (1,):
                late |= ((self.since[kind][words] == since)
                         & (self.last[kind][words] != threads)).any()  # fmt: skip
            again = not writes and (
                (self.since[0][words] == since) & (self.last[0][words] != threads)
            )
            self.last[int(writes)][words] = np.where(again, -1, threads)
            self.since[int(writes)][words] = since
        if late:
            fault("race", "accesses that nothing orders")
        return actors, known[rows, actors]

    def read(
        self, words: np.ndarray, rows: np.ndarray | None = None, who: tuple = ()
    ) -> np.ndarray:
        """The uint32 values of `words`, for a plain read; rows, who: as of `_actors`."""
        self.block.settle()
        self.check(words, "reads", USED | WRITTEN, ARRIVING)
        actors, epochs = self._actors(words, rows, who, writes=False)
        self.seen[actors, words] = epochs
        return self.words[words]

    def write(
        self, words: np.ndarray, values: np.ndarray, rows: np.ndarray | None = None, who: tuple = ()
    ) -> None:
        """A plain write; unseen by copies until a proxy fence."""
        self.block.settle()
        self.check(words, "writes", USED, ARRIVING)
        self.writer[words], self.written[words] = self._actors(words, rows, who, writes=True)
        self.words[words] = values
        self.flags[words] |= WRITTEN | UNFENCED
        self.note()

    def expect_by(self, words: np.ndarray, rows: np.ndarray, who: tuple) -> None:
        """Copies of threads (cp.async) begin."""
        self.block.settle()
        self.check(words, "writes", USED, ARRIVING)
        self.writer[words], self.written[words] = self._actors(words, rows, who, writes=True)
        self.flags[words] |= ARRIVING

    def lend(
        self, words: np.ndarray, who: str, known: np.ndarray, actors: list, epoch: int
    ) -> None:
        """An asynchronous read begins, with what `known` knows; `give_back` ends it."""
        self.block.settle()
        self.check(words, f"{who} reads", USED | WRITTEN, ARRIVING | UNFENCED)
        self.order(words, known, f"{who} reads", writes=False)
        for actor in actors:
            self.seen[actor][words] = epoch
        self.users[words] += 1
        self.note()

    def give_back(self, words: np.ndarray) -> None:
        """An asynchronous read has ended."""
        self.users[words] -= 1
        self.note()

    def expect(
        self, words: np.ndarray, who: str, known: np.ndarray, actor: int, epoch: int
    ) -> None:
        """An asynchronous write begins; `land` ends it."""
        self.block.settle()
        self.check(words, f"{who} writes", USED, ARRIVING)
        self.order(words, known, f"{who} writes", writes=True)
        self.writer[words], self.written[words] = actor, epoch
        self.flags[words] |= ARRIVING
        self.note()

    def land(self, words: np.ndarray, where: np.ndarray, data: np.ndarray) -> None:
        """The bytes of an asynchronous write arrive at the byte addresses `where`."""
        self.bytes[where] = data
        self.flags[words] = USED | WRITTEN
        self.note()


# %% sec-paper-memory
def shared(address: int) -> tuple[Shared, int]:
    """The memory and the byte in it that a shared address of the current thread's cluster means."""
    rank = address >> CLUSTER_BIT
    cluster = current().block.cluster
    if not 0 <= rank < len(cluster):
        fault("bounds", f"shared address {address:#x}: no block {rank} among {len(cluster)}")
    return cluster[rank].of(Shared), address & (1 << CLUSTER_BIT) - 1


def extent(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All bytes from a strided array's first element to its last, and which element is where.

    The second has a number for each place of an element: its number in the array, -1 in a gap.
    """
    size, steps = array.dtype.itemsize, array.strides
    axes = [(n, step) for n, step in zip(array.shape, steps, strict=True) if n > 1]
    count = sum((n - 1) * step for n, step in axes) // size + 1
    number = np.full(max(1, count), -1)
    if all(step > 0 and step % size == 0 for _, step in axes):
        places = as_strided(number, array.shape, [8 * step // size for step in steps])
        places[...] = np.arange(array.size).reshape(array.shape)
    if (number >= 0).sum() != array.size:
        raise UserError(f"elements with strides {steps} lie on each other, or backwards")
    return as_strided(array, (count,), (size,)).view(np.uint8), number


class Region:
    """An array in global memory.

    fresh: None, or for each element whether nobody wrote it yet; number: None where the array is
    dense, else as `extent` says.
    """

    def __init__(self, start: int, array: np.ndarray, fresh: np.ndarray | None):
        self.start, self.fresh, self.size = start, fresh, array.dtype.itemsize
        self.moves: tuple[list, list] = [], []  # reads and writes in lockstep since a barrier
        if array.flags.c_contiguous:
            self.bytes, self.number = array.reshape(-1).view(np.uint8), None
        else:
            self.bytes, self.number = extent(array)

    def elements(self, at: Any, size: int) -> Any:
        """An index of the elements that have some of the `size` bytes from byte `at`.

        For many places (n,) it is a table by place and element.
        """
        if isinstance(at, int):
            places: Any = slice(at // self.size, -(-(at + size) // self.size))
        else:
            places = at[:, None] // self.size + np.arange(-(-size // self.size))
        if self.number is None:
            return places
        if (self.number[places] < 0).any():
            fault("bounds", f"{size} bytes that lie between the elements of an array")
        return self.number[places]

    def check_moves(self) -> None:
        """Fault if two threads of a block touched an element, and one of them wrote it."""
        last = np.full(self.bytes.size // self.size + 1, -1)
        written, writers = flat(self.moves[1])
        last[written] = writers
        for elements, threads in (written, writers), flat(self.moves[0]):
            other = last[elements]
            if ((other // MOST_THREADS == threads // MOST_THREADS) & (other != threads)).any():
                fault("race", "accesses to global memory that nothing orders")


# %% sec-paper-memory
def flat(moves: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    """Elements (n, ...) of threads (n,), or (1, ...) of all of them, in one row."""
    if not moves:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    pairs = [np.broadcast_arrays(elements, threads[:, None]) for elements, threads in moves]
    elements, threads = zip(*pairs, strict=True)
    return tuple(
        np.concatenate([part.reshape(-1) for part in side]) for side in (elements, threads)
    )


class Global:
    """Global memory: a launch's arrays and tensor maps, far apart, so that overruns hit nothing.

    By the id of an array: fresh, for each of its elements, whether nobody wrote it yet; past, how
    many bytes behind a multiple of ALLOCATION it begins.
    """

    START, APART = 1 << 40, 1 << 20

    def __init__(self, fresh: dict[int, np.ndarray], past: Mapping[int, int]):
        self.next, self.regions, self.maps = self.START, [], {}
        self.fresh, self.past = fresh, past

    def address(self, array: np.ndarray) -> int:
        """Where this array is, from the launch on."""
        address = self.next + self.past.get(id(array), 0)
        self.regions.append(Region(address, array, self.fresh.get(id(array))))
        self.next = (address + self.regions[-1].bytes.size + self.APART) & -ALLOCATION
        return address

    def map_address(self, tile_map: Map) -> int:
        """Where this tensor map is."""
        address, self.next = self.next, self.next + self.APART
        self.maps[address] = tile_map
        return address

    def _part(self, address: int, size: int) -> tuple[Region, int]:
        """The array that has these bytes, and the first of them in it."""
        for region in self.regions:
            at = address - region.start
            if 0 <= at and at + size <= region.bytes.size:
                return region, at
        fault("bounds", f"{size} bytes at global address {address:#x}, which are in no array")

    def map(self, address: int) -> Map:
        """The tensor map at an address."""
        return self.maps.get(address) or fault("bounds", f"no tensor map is at {address:#x}")

    def _parts(self, addresses: np.ndarray, size: int) -> Iterator[tuple]:
        """Which of these places of `size` bytes are in an array, the array, their bytes in it."""
        left = np.ones(len(addresses), bool)
        while left.any():
            region, _ = self._part(int(addresses[left.argmax()]), size)
            at = addresses - region.start
            mine = left & (at >= 0) & (at + size <= region.bytes.size)
            yield (slice(None), region, at) if mine.all() else (mine, region, at[mine])
            left &= ~mine

    def settle(self) -> None:
        """At a barrier: fault if two threads in lockstep touched an element, and one wrote it."""
        for region in self.regions:
            if region.moves[1]:
                region.check_moves()
            for moves in region.moves:
                moves.clear()

    def read_all(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> np.ndarray:
        """The bytes (n, size) at addresses (n,), of these threads (n,) or of several at one."""
        data = np.empty((len(addresses), size), np.uint8)
        for mine, region, at in self._parts(addresses, size):
            elements = region.elements(at, size)
            region.moves[0].append((elements, threads if len(data) == 1 else threads[mine]))
            if region.fresh is not None and region.fresh[elements].any():
                fault("unwritten", "bytes that nobody wrote")
            data[mine] = region.bytes[at[:, None] + np.arange(size)]
        return data

    def write_all(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        """Put (n, bytes) at addresses (n,), of these threads (n,)."""
        for mine, region, at in self._parts(addresses, data.shape[1]):
            elements = region.elements(at, data.shape[1])
            region.moves[1].append((elements, threads[mine]))
            region.bytes[at[:, None] + np.arange(data.shape[1])] = data[mine]
            if region.fresh is not None:
                region.fresh[elements] = False

    def read(self, address: int, size: int) -> np.ndarray:
        """The bytes at an address."""
        region, at = self._part(address, size)
        elements = region.elements(at, size)
        if region.fresh is not None and region.fresh[elements].any():
            fault("unwritten", f"{size} bytes at global address {address:#x}, which nobody wrote")
        return region.bytes[at : at + size].copy()

    def write(self, address: int, data: np.ndarray) -> None:
        """Put bytes at an address."""
        region, at = self._part(address, data.size)
        elements = region.elements(at, data.size)
        region.bytes[at : at + data.size] = data
        if region.fresh is not None:
            region.fresh[elements] = False
