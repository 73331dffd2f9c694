# Made from book/h-ptx-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ptx-copies
"""PTX instructions that copy while threads go on: cp.async, and the copy engine with its boxes.

PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy, Tensor copy". What runs late
on the machine runs late here: the engine's copy is done when all threads wait, or at a random
moment, cp.async's when its thread waits.
"""

import collections
import math

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.lib.stride_tricks import as_strided

from nanoeuler.emulator.fragments import box
from nanoeuler.emulator.machine import Block, Thread, fault
from nanoeuler.emulator.machine import getcurrent as current
from nanoeuler.emulator.memory import CLUSTER_BIT, UNFENCED, Global, shared
from nanoeuler.emulator.ptx_memory import Loads, place
from nanoeuler.emulator.ptx_parser import op
from nanoeuler.emulator.ptx_sync import Mbarriers, mbarrier
from nanoeuler.emulator.vector_clocks import acquire, clock
from nanoeuler.engines.gpu.lang.kernel import MAP_ALIGN, Map

LOW = (1 << CLUSTER_BIT) - 1  # of a shared address, the byte in its block


def cut(tile_map: Map, corner: tuple) -> tuple[tuple, tuple]:
    """Of the box at `corner`: the part of the array that it covers, and that part of the box."""
    inside, part = [], []
    for at, extent, size in zip(corner, tile_map.box, tile_map.array.shape, strict=True):
        first, last = min(max(at, 0), size), max(min(at + extent, size), 0)
        inside.append(slice(first, max(first, last)))
        part.append(slice(first - at, max(first, last) - at))
    return tuple(inside), tuple(part)


def size_of(tile_map: Map) -> int:
    """The bytes of a box, whose rows have 128."""
    rows = math.prod(tile_map.box[:-1])
    if tile_map.box[-1] * tile_map.array.dtype.itemsize != 128:
        fault("misuse", f"a box of {tile_map.box}: rows of 128 bytes are what the emulator knows")
    return rows * 128


def box_of(rank: str, address: int, corner: tuple, start: int) -> tuple[Map, tuple]:
    """The map at an address and the corner in the order of its axes, checked."""
    tile_map = current().block.machine.memory.map(address)
    if int(rank) != len(tile_map.box) or len(corner) != int(rank):
        fault("misuse", f"{rank} coordinates for a map of {len(tile_map.box)} axes")
    if start % 1024:
        fault("misuse", f"a swizzled box at shared byte {start}, which is no multiple of 1024")
    return tile_map, corner[::-1]


@op(r"prefetch\.tensormap|fence\.proxy\.tensormap::generic\.acquire\.(?:cta|cluster|gpu|sys)")
def prefetch(address: int, *size: int) -> None:
    """A map is there, or this is a fault."""
    current().block.machine.memory.map(address)


def bring(block: Block, start: int, where: np.ndarray, data: np.ndarray, bar: int) -> None:
    """Data on its way to the bytes `where` of a block's shared memory, counted by an mbarrier."""
    if bar & LOW in block.of(Mbarriers).bare:
        fault("misuse", "an mbarrier with no fence.mbarrier_init, given to the copy engine")
    barrier = mbarrier(block.rank << CLUSTER_BIT | bar & LOW)
    memory, machine = shared(block.rank << CLUSTER_BIT)[0], block.machine
    words = np.arange(start // 4, (start + data.size) // 4)
    memory.expect(words, "a copy", current().warp.known, barrier.actor, barrier.phase + 1)
    span = machine.span("copy in", block, start, start + data.size)

    def arrive() -> None:
        memory.land(words, where, data)
        barrier.bytes -= data.size
        barrier.update()
        span.end = machine.tick

    machine.effects.append(arrive)
    machine.counts["copies in"] += 1
    machine.counts["copies in bytes"] += data.size


# The mnemonic up to what differs.
LOAD = r"cp\.async\.bulk\.tensor\.([2-5])d\.shared::cluster\.global(?:\.tile)?"


@op(LOAD + r"\.mbarrier::complete_tx::bytes(\.multicast::cluster)?")
def load(rank: str, multicast: str | None, to: int, address: int, *rest: int) -> None:
    """A box of a map to shared memory, of this block or of all in a mask."""
    thread, n = current(), int(rank)
    corner, bar, mask = rest[:n], rest[n], rest[n + 1 :]
    start = to & LOW
    if len(mask) != bool(multicast):
        fault("misuse", "a mask of blocks is for .multicast, and .multicast needs one")
    tile_map, corner = box_of(rank, address, corner, start)
    inside, part = cut(tile_map, corner)
    fresh = thread.block.machine.memory.fresh.get(id(tile_map.array))
    if fresh is not None and fresh.reshape(tile_map.array.shape)[inside].any():
        fault("unwritten", "a copy from global memory that nobody wrote")
    data = np.zeros(tile_map.box, tile_map.array.dtype)  # outside of the array: zeros
    data[part] = tile_map.array[inside]
    data = data.reshape(-1).view(np.uint8)
    ranks = 1 << (to >> CLUSTER_BIT) if not mask else mask[0]
    if ranks >> len(thread.block.cluster):
        fault("bounds", f"a copy to blocks {ranks:#b} of a cluster of {len(thread.block.cluster)}")
    for block in thread.block.cluster:
        if ranks >> block.rank & 1:
            bring(block, start, start + box(size_of(tile_map)), data, bar)


@op(r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes")
def load_bulk(to: int, address: int, size: int, bar: int) -> None:
    """Bytes in a row to shared memory."""
    if (to | address | size) % 16:
        fault("misuse", f"a bulk copy of {size} bytes: all has to be in multiples of 16")
    memory, start = shared(to)
    data = memory.block.machine.memory.read(address, size)
    bring(memory.block, start, np.arange(start, start + size), data, bar)


class Group:
    """Outgoing copies of one commit: `stage` 0 under way, 1 has read its source, 2 complete."""

    def __init__(self, epoch: int, copies: list):
        self.epoch, self.copies, self.waiting = epoch, copies, []
        self.stage = 0 if copies else 2


class Outgoing:
    """A thread's copies to global memory."""

    def __init__(self, thread: Thread):
        self.thread, self.actor, self.epoch = thread, -1, 1
        self.copies: list = []  # not yet committed
        self.groups: collections.deque[Group] = collections.deque()

    def reader(self) -> int:
        """The actor that reads shared memory for these copies."""
        if self.actor < 0:
            thread = self.thread
            name = f"the outgoing copies of thread {thread.number} of block {thread.block.index}"
            self.actor = clock(thread.block).reader(name)
        return self.actor

    def wait(self, most: int, stage: int) -> None:
        """Wait until all groups but the newest `most` have reached a stage."""
        last = self.epoch - 1 - most  # the newest that has to
        for group in list(self.groups):
            while group.epoch <= last and group.stage < stage:
                group.waiting.append(self.thread)
                self.thread.pause("copy", lambda: "a copy to global memory")
        if self.actor >= 0:
            known = np.zeros_like(self.thread.warp.known)
            known[self.actor] = max(0, last)  # others may have read by now, but nobody promised
            acquire(self.thread.warp, known)
        while self.groups and self.groups[0].stage == 2:
            self.groups.popleft()

    def close(self) -> None:
        """The thread ends: its shared memory goes, so nothing may still read it."""
        if self.copies or any(group.stage < 1 for group in self.groups):
            fault("flight", "a thread ends while a copy still reads its block's shared memory")


# ... and of the way out.
STORE = r"cp\.(reduce\.)?async\.bulk\.tensor\.([2-5])d\.global\.shared::cta"


@op(STORE + r"(\.add)?(?:\.tile)?\.bulk_group")
def store(reduce: str | None, rank: str, add: str | None, address: int, *rest: int) -> None:
    """A box from shared memory to its place in the map's array, or added to it."""
    if bool(reduce) != bool(add):
        fault("misuse", "cp.reduce is known with .add only, and .add with cp.reduce only")
    thread = current()
    tile_map, corner = box_of(rank, address, rest[:-1], rest[-1] & LOW)
    memory, start = shared(rest[-1])
    size = size_of(tile_map)
    words, outgoing = np.arange(start // 4, (start + size) // 4), thread.of(Outgoing)
    known = thread.warp.known
    memory.lend(words, "a copy", known, [outgoing.reader()], outgoing.epoch)
    span = thread.block.machine.span("copy out", thread.block, start, start + size)
    outgoing.copies.append((tile_map, corner, memory, start + box(size), words, bool(add), span))
    thread.block.machine.counts["copies out"] += 1
    thread.block.machine.counts["copies out bytes"] += size


@op(r"cp\.async\.bulk\.commit_group")
def commit() -> None:
    """The copies since the last commit are a group."""
    thread = current()
    outgoing, machine = thread.of(Outgoing), thread.block.machine
    group = Group(outgoing.epoch, outgoing.copies)
    outgoing.copies = []
    outgoing.epoch += 1
    outgoing.groups.append(group)

    def read() -> None:
        group.data = [memory.bytes[where].copy() for _, _, memory, where, *_ in group.copies]
        for _, _, memory, _, words, _, span in group.copies:
            memory.give_back(words)
            span.end = machine.tick
        step(1)
        machine.effects.append(write)

    def write() -> None:
        for (tile_map, corner, *_, add, _), data in zip(group.copies, group.data, strict=True):
            put(machine.memory, tile_map, corner, data, add)
        machine.wake()
        step(2)

    def step(stage: int) -> None:
        group.stage = stage
        machine.queue.extend(group.waiting)
        group.waiting.clear()

    if group.copies:
        machine.effects.append(read)


def whole_chunks(array: np.ndarray) -> np.ndarray:
    """An array whose rows go on to a multiple of 16 bytes, as a store of whole rows writes them."""
    more = -array.shape[-1] * array.itemsize % MAP_ALIGN // array.itemsize
    if not more:
        return array
    base = owner = array
    while base is not None:  # among the views of a memory are some of as_strided's, no arrays
        owner = base if isinstance(base, np.ndarray) else owner
        base = getattr(base, "base", None)
    if byte_bounds(array)[1] + more * array.itemsize > byte_bounds(owner)[1]:
        fault("bounds", f"{more} elements behind the last row, of 16 bytes that are stored as one")
    return as_strided(array, (*array.shape[:-1], array.shape[-1] + more), array.strides)


def put(memory: Global, tile_map: Map, corner: tuple, data: np.ndarray, add: bool) -> None:
    """Write a box's bytes into the array of its map; beyond whole 16 bytes of a row, none."""
    wide = Map(whole_chunks(tile_map.array), tile_map.box)
    inside, part = cut(wide, corner)
    data = data.view(wide.array.dtype).reshape(wide.box)[part]
    wide.array[inside] = wide.array[inside] + data if add else data
    fresh = memory.fresh.get(id(tile_map.array))
    if fresh is not None:
        fresh.reshape(tile_map.array.shape)[inside] = False


@op(r"cp\.async\.bulk\.wait_group(\.read)?")
def wait_bulk(reading: str | None, most: int) -> None:
    """Wait until at most `most` groups are incomplete, or have still to read their source."""
    current().of(Outgoing).wait(most, 1 if reading else 2)


class Pieces:
    """A thread's cp.async copies: not committed, and groups."""

    def __init__(self, thread: Thread):
        self.open: list = []
        self.groups: collections.deque = collections.deque()

    def close(self) -> None:
        """The thread ends."""
        if self.open or any(self.groups):
            fault("flight", "a thread ends with a cp.async that it never waited for")


SIZES = {"a": (4, 8, 16), "g": (16,)}  # bytes, by cp.async.ca and .cg (PTX ISA)


@op(r"cp\.async\.c([ag])\.shared(?:::cta)?\.global")
def copy(cached: str, to: int, address: int, size: int, source: int | None = None) -> None:
    """Some bytes to shared memory, while the thread goes on; zeros behind `source` bytes."""
    source = size if source is None else source
    if size not in SIZES[cached] or (to | address) % size or not 0 <= source <= size:
        fault("misuse", f"cp.async of {source} of {size} bytes from {address:#x} to {to & LOW}")
    thread = current()
    memory, start = shared(to)
    words = np.arange(start // 4, (start + size) // 4)
    warp = thread.warp
    memory.expect(words, "cp.async", warp.known, warp.actor, warp.known[warp.actor])
    data = np.zeros(size, np.uint8)
    loads, site = thread.block.of(Loads), place()
    loads.note("shared stores", site, start, size)
    if source:
        loads.note("global loads", site, address, source)
        data[:source] = thread.block.machine.memory.read(address, source)
    thread.of(Pieces).open.append((memory, words, np.arange(start, start + size), data))


@op(r"cp\.async\.commit_group")
def copy_commit() -> None:
    """The copies since the last commit are a group."""
    pieces = current().of(Pieces)
    pieces.groups.append(pieces.open)
    pieces.open = []


@op(r"cp\.async\.wait_group")
def copy_wait(most: int) -> None:
    """Wait until at most `most` groups are under way. Only this thread may then see the others."""
    thread = current()
    groups = thread.of(Pieces).groups
    while len(groups) > most:
        for memory, words, where, data in groups.popleft():
            memory.land(words, where, data)
            memory.flags[words] |= UNFENCED  # threads' own way to memory, not the copy engine's
            thread.unfenced.append((memory, words))
