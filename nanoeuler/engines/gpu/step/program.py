# Made from book/13a-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-arrays
"""A step as a list: launches, and the memory they work on, laid out before any of it exists.

Whoever records a step asks for arrays and writes launches down. An array here is a place in a named
memory; the memory called "arena" lends places, and lends them again when nobody holds the array any
more. `bind` turns the list into launches on memory that exists. Left out: running them.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np

from nanoeuler.engines.gpu.lang.kernel import Map
from nanoeuler.engines.gpu.lang.views import dense

ALIGN = 256  # bytes: what cudaMalloc aligns to (CUDA C++ Programming Guide, device memory accesses)
ARENA, CONSTANTS = "arena", "constants"  # memories that every program has
Part = Callable[[str, int, tuple, np.dtype, tuple], Any]
Work = Any  # a Launch, or another dataclass with such args that has prepare(device)


def round_up(size: int) -> int:
    """Bytes that an array occupies: up to where the next may begin."""
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True, eq=False)
class Array:
    """A place in a memory: shape, dtype and strides as NumPy's.

    address: bytes from the beginning of the memory, which is aligned. lease: what has to live for
    the place to be ours; views share it.
    """

    memory: str
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...]
    lease: Any = None

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def T(self) -> Self:
        """Its axes in reverse order, of the same memory."""
        return replace(self, shape=self.shape[::-1], strides=self.strides[::-1])

    def swapaxes(self, i: int, j: int) -> Self:
        """Two axes exchanged."""
        order = list(range(len(self.shape)))
        order[i], order[j] = j, i
        shape, strides = ([part[k] for k in order] for part in (self.shape, self.strides))
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def reshape(self, *extents: Any) -> Self:
        """The same elements in C order under another shape; -1 stands for what is left."""
        shape = extents[0] if isinstance(extents[0], tuple) else extents
        if -1 in shape:
            rest = math.prod(self.shape) // -math.prod(shape)
            shape = tuple(rest if extent == -1 else extent for extent in shape)
        assert math.prod(shape) == math.prod(self.shape), f"{self.shape} is not {shape}"
        assert self.strides == dense(self.shape, self.dtype.itemsize), "it is not in C order"
        return replace(self, shape=shape, strides=dense(shape, self.dtype.itemsize))

    def __getitem__(self, key: slice | int | tuple) -> Self:
        """A view, by slices of step 1 and by numbers, of leading axes."""
        keys = key if isinstance(key, tuple) else (key,)
        address, shape, strides = self.address, list(self.shape), list(self.strides)
        for i, part in enumerate(keys):
            if isinstance(part, slice):
                start, stop, step = part.indices(self.shape[i])
                assert step == 1, "a view takes every element"
                shape[i] = max(0, stop - start)
            else:
                start = range(self.shape[i])[part]
                shape[i] = -1  # the axis goes
            address += start * self.strides[i]
        kept = [i for i, extent in enumerate(shape) if extent >= 0]
        of_kept = tuple(shape[i] for i in kept), tuple(strides[i] for i in kept)
        return replace(self, address=address, shape=of_kept[0], strides=of_kept[1])


# %% sec-step-arrays
class Arena:
    """Which bytes of one memory are lent. size: what the memory must have, the most ever lent."""

    def __init__(self) -> None:
        self.size = 0
        self.holes: list[tuple[int, int]] = []  # (start, end) of what is free below size, in order

    def fit(self, size: int) -> int | None:
        """Where `size` bytes begin, from now on lent: in the smallest hole with room, if any."""
        fitting = [hole for hole in self.holes if hole[1] - hole[0] >= size]
        if not fitting:
            return None
        start, end = min(fitting, key=lambda hole: (hole[1] - hole[0], hole[0]))
        self.holes.remove((start, end))
        if end - start > size:
            self._insert(start + size, end)
        return start

    def take(self, size: int) -> int:
        """As `fit`, else the end."""
        start = self.fit(size)
        if start is None:
            start = self.size
            if self.holes and self.holes[-1][1] == self.size:  # the last hole grows
                start = self.holes.pop()[0]
            self.size = start + size
        return start

    def _insert(self, start: int, end: int) -> None:
        self.holes = sorted([*self.holes, (start, end)])

    def give(self, start: int, size: int) -> None:
        """Take them back; neighbouring holes become one."""
        end = start + size
        for hole in [hole for hole in self.holes if start in hole or end in hole]:
            self.holes.remove(hole)
            start, end = min(start, hole[0]), max(end, hole[1])
        self._insert(start, end)

    def close(self, start: int, end: int) -> None:
        """Lend them no more; an error if some of them have not come back."""
        inside = [hole for hole in self.holes if hole[0] <= start and end <= hole[1]]
        if not inside:
            raise RuntimeError(f"not all bytes from {start} to {end} have come back")
        self.holes.remove(inside[0])
        for part in (inside[0][0], start), (end, inside[0][1]):
            if part[0] < part[1]:
                self._insert(*part)


# %% sec-step-recording
class Step(NamedTuple):
    """A launch of a list. name: what it is for; flops: of the products in it, 0 for others."""

    name: str
    launch: Work
    flops: int

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays that it works on, each counted once."""
        arrays = [arg.array if isinstance(arg, Map) else arg for arg in self.launch.args]
        places = {(a.memory, a.address): a.nbytes for a in arrays if isinstance(a, Array)}
        return sum(places.values())


@dataclass
class Program:
    """A recorded step: its list, the bytes of each memory, and the numbers of the constant one.

    loans: (start, bytes, first, last) of each piece of the arena: between which steps it was lent.
    borrowed: the same by the name of a memory that lends some of its bytes for a while.
    """

    steps: list[Step] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    constants: list[np.ndarray] = field(default_factory=list)
    loans: list[tuple[int, int, int, int]] = field(default_factory=list)
    borrowed: dict[str, list[tuple[int, int, int, int]]] = field(default_factory=dict)


class Lease:
    """That bytes of the arena are lent: until the last array that holds this is forgotten."""


class Recording:
    """A program while it is written, and its memories.

    lending: whether arrays that are taken now may lie in the memory that lends. See `lend`.
    """

    def __init__(self) -> None:
        self.program, self.arena = Program(sizes={CONSTANTS: 0}), Arena()
        self._constants: dict[tuple, Array] = {}
        self.lending, self.lender, self.spare = False, "", Arena()
        self.spans: dict[int, int] = {}  # what is lent: bytes, by where they begin

    def whole(self, memory: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """The whole memory of this name as one array; the largest that is asked for is its size."""
        kind = np.dtype(dtype)
        made = Array(memory, 0, tuple(shape), kind, dense(shape, kind.itemsize))
        self.program.sizes[memory] = max(self.program.sizes.get(memory, 0), made.nbytes)
        return made

    def place(self, memory: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of its own behind what the memory of this name has so far."""
        kind, start = np.dtype(dtype), self.program.sizes.get(memory, 0)
        made = Array(memory, start, tuple(shape), kind, dense(shape, kind.itemsize))
        self.program.sizes[memory] = start + round_up(made.nbytes)
        return made

    def take(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array in the arena, in C order, whose elements nobody has written."""
        kind, lease = np.dtype(dtype), Lease()
        size = round_up(max(1, math.prod(shape) * kind.itemsize))
        memory, start = self.lender, self.spare.fit(size) if self.lending else None
        if start is None:
            memory, start = ARENA, self.arena.take(size)
        now = len(self.program.steps)
        weakref.finalize(lease, self._give, memory, start, size, now).atexit = False
        return Array(memory, start, tuple(shape), kind, dense(shape, kind.itemsize), lease)

    def _give(self, memory: str, start: int, size: int, first: int) -> None:
        arena, loans = self.arena, self.program.loans
        if memory != ARENA:
            arena, loans = self.spare, self.program.borrowed.setdefault(memory, [])
        arena.give(start, size)
        loans.append((start, size, first, len(self.program.steps)))

    def constant(self, values: np.ndarray) -> Array:
        """An array of numbers that are known now; equal ones are stored once."""
        values = np.ascontiguousarray(values)
        key = values.shape, values.dtype.str, values.tobytes()
        if key not in self._constants:
            self._constants[key] = self.place(CONSTANTS, values.shape, values.dtype)
            self.program.constants.append(values)
        return self._constants[key]

    def add(self, name: str, launches: Work | Sequence[Work], flops: int = 0) -> None:
        """Write launches down; the list holds none of their arrays' leases."""
        for launch in launches if isinstance(launches, Sequence) else [launches]:
            args = tuple(_without_lease(arg) for arg in launch.args)
            self.program.steps.append(Step(name, replace(launch, args=args), flops))
            flops = 0  # a product's second launch adds up what the first has multiplied

    def lend(self, memory: str, start: int, size: int) -> None:
        """Have bytes of another memory lent, too, wherever `lending` is on; until `reclaim`."""
        self.lender, self.spans[start] = memory, size
        self.spare.give(start, size)

    def reclaim(self, start: int) -> None:
        """Lend no more what was lent from `start` on. Whoever had it must have given it back."""
        if size := self.spans.pop(start, 0):
            self.spare.close(start, start + size)

    def end(self) -> Program:
        """The program. Arrays that are still held stay where they are."""
        self.program.sizes[ARENA] = self.arena.size
        return self.program


# %% sec-step-recording
NOWHERE = "nowhere"  # the memory of what has no place


class Excerpt:
    """A flat buffer (N,) of which only some spans have a place: one behind the other in `kept`.

    Slices are as of the whole, so that `Weights` can lay its names over it. What has no place is
    NOWHERE, at the address that it would have.
    """

    def __init__(self, length: int, kept: Array, spans: list[tuple[int, int]]) -> None:
        self.shape, self.dtype = (length,), kept.dtype
        self.kept, self.spans = kept, spans
        self.nowhere = replace(kept, memory=NOWHERE, shape=self.shape)

    def __getitem__(self, part: slice) -> Array:
        """The elements from start to stop."""
        end = self.kept.shape[0]
        for start, stop in reversed(self.spans):  # spans may overlap: the last that holds it
            end -= stop - start
            if start <= part.start and part.stop <= stop:
                return self.kept[end + part.start - start : end + part.stop - start]
        return self.nowhere[part]


def _without_lease(arg: Any) -> Any:
    if isinstance(arg, Map):
        return replace(arg, array=_without_lease(arg.array))
    return replace(arg, lease=None) if isinstance(arg, Array) else arg


def bind(program: Program, part: Part) -> list[Work]:
    """The program's launches on memory that exists.

    part(memory, address, shape, dtype, strides): the array that lies there. It is asked once for
    each, so that arrays which are one in the list are one object.
    """
    made: dict[tuple, Any] = {}

    def real(arg: Any) -> Any:
        if isinstance(arg, Map):
            return replace(arg, array=real(arg.array))
        if not isinstance(arg, Array):
            return arg
        key = arg.memory, arg.address, arg.shape, arg.dtype, arg.strides
        if key not in made:
            made[key] = part(*key)
        return made[key]

    return [replace(step.launch, args=tuple(map(real, step.launch.args))) for step in program.steps]


def constants(program: Program) -> np.ndarray:
    """The constant memory's bytes."""
    memory, start = np.zeros(program.sizes[CONSTANTS], np.uint8), 0
    for values in program.constants:
        memory[start : start + values.nbytes] = values.reshape(-1).view(np.uint8)
        start += round_up(values.nbytes)
    return memory
