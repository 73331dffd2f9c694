# Made from book/h-ptx-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ptx-plain
"""PTX instructions that load, store and exchange: global and shared memory, atomics, shuffles.

PTX ISA, "Data Movement and Conversion Instructions", "atom".
"""

import sys
from collections.abc import Iterator, Sequence

import numpy as np

from nanoeuler.emulator import cuda
from nanoeuler.emulator.counters import by_warp, sectors, wavefronts
from nanoeuler.emulator.dtypes import Register, bits, int32, uint32
from nanoeuler.emulator.machine import HERE, Block, fault
from nanoeuler.emulator.machine import getcurrent as current
from nanoeuler.emulator.memory import shared
from nanoeuler.emulator.ptx_parser import op
from nanoeuler.emulator.vector_clocks import acquire, clock, release


def count(vector: str | None) -> int:
    """The numbers that .v2 or .v4 moves."""
    return int(vector or 1)


def registers(data: np.ndarray, kind: str) -> Register | list[Register]:
    """Bytes as values of registers: float32 for f32, else int32."""
    values = list(data.view(np.float32)) if kind == "f32" else data.view(np.int32).tolist()
    return values if len(values) > 1 else values[0]


def memory_bytes(values: Sequence[Register], kind: str) -> np.ndarray:
    """Values of registers as bytes."""
    if kind == "f32":
        return np.array(values, np.float32).view(np.uint8)
    words = [bits(v) if isinstance(v, np.floating) else int32(v) for v in values]
    return np.array(words, np.int32).view(np.uint8)


def place() -> tuple:
    """The kernel's current line and call, to tell one instruction from another."""
    frame = sys._getframe(2)
    while frame.f_globals["__name__"].startswith(HERE):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


class Loads:
    """Global memory traffic of a block's threads by instructions, to be counted."""

    def __init__(self, block: Block):
        self.block, self.moves, self.rows = block, {}, {}

    def note(self, what: str, site: object, address: int, size: int) -> None:
        """The current thread moves so many bytes."""
        self.moves.setdefault((what, site, size), []).append((current().number, address))

    def note_all(
        self, what: str, site: object, size: int, threads: np.ndarray, addresses: np.ndarray
    ) -> None:
        """Many threads move so many bytes each."""
        self.rows.setdefault((what, site, size), []).append((threads, addresses))

    def all(self) -> Iterator[tuple]:
        """Bytes that were moved, with thread and address (2, n), for each place in the kernel."""
        for key, moves in self.moves.items():
            yield key, np.array(moves).T
        for key, rows in self.rows.items():
            yield key, np.concatenate(rows, axis=1)

    def close(self) -> None:
        """Count them by warp, for each place in the kernel."""
        counts = self.block.machine.counts
        for (what, _, size), moves in self.all():
            table = by_warp(*moves)
            counts[what] += len(table)
            if what.startswith("shared"):
                counts[f"{what} wavefronts"] += wavefronts(table, size)
            else:
                counts[f"{what} sectors"] += sectors(table, size)
                counts[f"{what} bytes"] += moves.shape[1] * size


@op(r"ld\.global(?:\.nc|\.cg|\.ca)?(?:\.v([24]))?\.(b32|u32|s32|f32)", lambda v, kind: count(v))
def load(vector: str | None, kind: str, address: int) -> Register | list[Register]:
    """Global memory to registers."""
    return registers(read(address, 4 * count(vector)), kind)


@op(r"ld\.acquire\.gpu\.global\.(u32|s32|b32)", 1)
def load_acquire(kind: str, address: int) -> Register:
    """A load that acquires: it sees all stores before the release of the value it finds."""
    return registers(read(address, 4), kind)


@op(r"st\.global(?:\.v([24]))?\.(b32|u32|s32|f32)")
def store(vector: str | None, kind: str, address: int, *values: Register) -> None:
    """Registers to global memory."""
    whole(vector, values)
    write(address, memory_bytes(values, kind))


@op(r"st\.global\.b16")
def store_half(address: int, value: int) -> None:
    """Two bytes to global memory."""
    write(address, np.array([value & 0xFFFF], np.uint16).view(np.uint8))


@op(r"st\.release\.gpu\.global\.(u32|s32|b32)")
def store_release(kind: str, address: int, value: Register) -> None:
    """A store that releases: whoever acquires it sees all earlier stores of this thread."""
    write(address, memory_bytes([value], kind))


def read(address: int, size: int) -> np.ndarray:
    """Bytes of global memory, for the current thread."""
    thread = current()
    aligned(address, size)
    thread.block.of(Loads).note("global loads", place(), address, size)
    return thread.block.machine.memory.read(address, size)


def write(address: int, data: np.ndarray) -> None:
    """The current thread stores bytes in global memory."""
    thread = current()
    aligned(address, data.size)
    thread.block.of(Loads).note("global stores", place(), address, data.size)
    thread.block.machine.memory.write(address, data)
    thread.block.machine.wake()


def whole(vector: str | None, values: Sequence[Register]) -> None:
    """Fault unless a store has as many values as it says."""
    if len(values) != count(vector):
        fault("misuse", f"a store of {len(values)} values with .v{count(vector)}")


def aligned(address: int, size: int) -> None:
    """Fault unless an access of `size` bytes is aligned to a multiple of it."""
    if address % size:
        fault("misuse", f"{size} bytes at {address:#x}, which is no multiple of {size}")


@op(r"red\.(?:relaxed\.gpu\.)?global\.add\.(u32|s32|f32)")
def reduce(kind: str, address: int, value: Register) -> None:
    """Add to a word of global memory."""
    atomic_add(kind, address, value)


@op(r"atom\.(?:relaxed|acquire|release|acq_rel)\.gpu\.global\.add\.(u32|s32|f32)", 1)
@op(r"atom\.add\.(?:relaxed|acquire|release|acq_rel)\.gpu\.global\.(u32|s32|f32)", 1)
def atomic_add(kind: str, address: int, value: Register) -> Register:
    """Add to a word of global memory; gives its old value."""
    aligned(address, 4)
    machine = current().block.machine
    old = registers(machine.memory.read(address, 4), kind)
    machine.memory.write(address, memory_bytes([old + value], kind))
    machine.wake()
    return old


@op(r"fence\.(?:acq_rel|sc)\.(?:cta|cluster|gpu|sys)|membar\.(?:cta|gl|sys)")
def fence_memory() -> None:
    """Nothing to do: in the emulator all threads see a store at once."""


@op(r"griddepcontrol\.(?:wait|launch_dependents)")
def depend() -> None:
    """Nothing to do: in the emulator a launch ends before the next begins."""


@op(r"ld\.shared(?:::cta)?(?:\.v([24]))?\.(b32|u32|s32|f32)", lambda v, kind: count(v))
def load_shared(vector: str | None, kind: str, address: int) -> Register | list[Register]:
    """Shared memory to registers."""
    size = 4 * count(vector)
    aligned(address, size)
    memory, start = shared(address)
    current().block.of(Loads).note("shared loads", place(), start, size)
    return registers(memory.read(np.arange(start // 4, (start + size) // 4)), kind)


@op(r"st\.shared(?:::cta)?(?:\.v([24]))?\.(b32|u32|s32|f32)")
def store_shared(vector: str | None, kind: str, address: int, *values: Register) -> None:
    """Registers to shared memory."""
    size = 4 * count(vector)
    whole(vector, values)
    aligned(address, size)
    memory, start = shared(address)
    current().block.of(Loads).note("shared stores", place(), start, size)
    words = np.arange(start // 4, (start + size) // 4)
    memory.write(words, memory_bytes(values, kind).view(np.uint32))
    current().unfenced.append((memory, words))


@op(r"atom\.relaxed\.cta\.shared::cta\.(inc|add)\.u32", 1)
def atomic_shared(what: str, address: int, value: int) -> int:
    """Count a word of shared memory: add, or add 1 and begin again after `value`; gives the old."""
    memory, start = shared(address)
    warp, words = current().warp, np.array([start // 4])
    known = memory.block.of(Atomics).known(start)
    acquire(warp, known)
    old = int(memory.read(words)[0])
    count = old + 1 if old < uint32(value) else 0
    memory.write(words, old + value & 0xFFFFFFFF if what == "add" else count)
    release(warp, known)
    return int32(old)


class Atomics:
    """The vector clock that the next thread to count acquires, for each counter of a block."""

    def __init__(self, block: Block):
        self.clock, self.clocks = clock(block), {}

    def known(self, start: int) -> np.ndarray:
        """The vector clock of one counter. We let counting acquire and release, which is more than
        PTX promises."""
        if start not in self.clocks:
            self.clocks[start] = self.clock.new()
        return self.clocks[start]


@op(r"shfl\.sync\.(bfly|idx|up|down)\.b32", 1)
def shuffle(mode: str, value: Register, lane: int, limits: int, mask: int) -> Register:
    """Each lane gets the value of another; of a lane that is none, its own."""
    if limits != (0 if mode == "up" else 31):
        fault("misuse", f"shuffles with limits {limits:#x}: only whole warps are known here")
    return cuda.shuffle(uint32(mask), mode, value, lane)
