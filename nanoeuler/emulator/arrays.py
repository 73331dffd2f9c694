# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-arrays
"""Arrays that a kernel indexes: each access is logged, and all are checked when threads meet.

Between two places where threads wait for each other nothing says who goes first. So if two threads
touch an element in between, and one of them writes, that is a race, in whatever order they ran.
"""

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from nanoeuler.emulator.counters import by_warp
from nanoeuler.emulator.dtypes import Integer
from nanoeuler.emulator.machine import Block, Fault, fault, text_of
from nanoeuler.emulator.machine import getcurrent as current


class Flat(dict):
    """Index -> number of the element, counted from `base`; a wrong index is a Fault."""

    def __init__(self, shape: tuple, base: int):
        super().__init__()
        self.shape, self.base = shape, base

    def __missing__(self, index: Any) -> int:
        place = index if isinstance(index, tuple) else (index,)
        if len(place) != len(self.shape) or not all(isinstance(i, int | np.integer) for i in place):
            fault("misuse", f"an index of {index} into an array of shape {self.shape}")
        if not all(0 <= i < n for i, n in zip(place, self.shape, strict=True)):
            fault("bounds", f"index {index} is outside of an array of shape {self.shape}")
        self[index] = self.base + int(np.ravel_multi_index(place, self.shape))
        return self[index]


flat = functools.lru_cache(64)(Flat)  # blocks have the same arrays: they share the index tables


class Array:
    """An array as a kernel sees it: shape, dtype, and elements one at a time."""

    def __init__(self, log: "Log", values: np.ndarray, name: str, base: int):
        self.log, self.values, self.name, self.base = log, values, name, base
        self.shape, self.dtype, self.size = values.shape, values.dtype, values.size
        self.ndim = values.ndim
        self.at = flat(values.shape, base)
        kind = values.dtype
        self.wrap = Integer(kind.name, 8 * kind.itemsize, kind.kind == "i")
        self.state: Any = None  # what is known of its elements: SharedState or GlobalState

    def __getitem__(self, index: Any) -> Any:
        self.log.read(self.at[index], sys._getframe(1))
        return self.values[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.log.write(self.at[index], sys._getframe(1))
        self.values[index] = value

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator:
        return map(self.__getitem__, range(len(self)))

    def element(self, number: int) -> str:
        """Element `number` of the array, as a kernel would write it."""
        index = np.unravel_index(int(number), self.shape)
        return f"{self.name}[{', '.join(str(i) for i in index)}]"


class Integers(Array):
    """An array of integers: what is read has no width, as in numba, and what is stored wraps."""

    def __getitem__(self, index: Any) -> int:
        self.log.read(self.at[index], sys._getframe(1))
        return int(self.values[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.log.write(self.at[index], sys._getframe(1))
        self.values[index] = self.wrap(value)


class Log:
    """The log of a block's accesses to arrays since its threads last met.

    Elements are numbered through all arrays of the block. before: how many reads there were at each
    write; plain: whether it is no atomic. lines: the place of each read and each write in the code.
    marks: (thread, reads so far, writes so far) at the end of each turn.
    """

    clocks = True  # whether accesses are also checked against clocks

    def __init__(self, block: Block):
        self.block = block
        self.arrays: list[Array] = []
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.before: list[int] = []
        self.plain: list[bool] = []
        self.lines: tuple[list, list] = [], []
        self.marks: list[tuple[int, int, int]] = []

    def read(self, element: int, frame: FrameType) -> None:
        """The current thread reads an element, in this frame."""
        self.reads.append(element)
        self.lines[0].append((frame.f_code, frame.f_lineno))

    def write(self, element: int, frame: FrameType, plain: bool = True) -> None:
        """The current thread writes an element, in this frame."""
        self.writes.append(element)
        self.before.append(len(self.reads))
        self.plain.append(plain)
        self.lines[1].append((frame.f_code, frame.f_lineno))

    def array(self, values: np.ndarray, name: str) -> Array:
        """These values as an array of the kernel."""
        base = self.arrays[-1].base + self.arrays[-1].size if self.arrays else 0
        kind = Integers if values.dtype.kind in "iu" else Array
        self.arrays.append(kind(self, values, name, base))
        return self.arrays[-1]

    def mark(self, thread: int) -> None:
        """This thread's turn ends here."""
        if self.reads or self.writes:
            self.marks.append((thread, len(self.reads), len(self.writes)))

    def settle(self) -> None:
        """Check and count the logged accesses, and begin a new log."""
        if not (self.reads or self.writes):
            return
        self.mark(getattr(current(), "number", 0))
        marks = np.array(self.marks)
        sides = []
        for n, elements in (1, self.reads), (2, self.writes):
            threads = np.repeat(marks[:, 0], np.diff(marks[:, n], prepend=0))
            sides.append(Side(np.array(elements, np.int64), threads, np.arange(len(elements))))
        for array in self.arrays:
            reads, writes = (side.within(array) for side in sides)
            if len(reads.at) + len(writes.at):
                array.state.settle(self, array, reads, writes)
        for entries in (self.reads, self.writes, self.before, self.plain, self.marks, *self.lines):
            entries.clear()


# %% sec-paper-arrays
@dataclass
class Side:
    """The reads of one array since the last meeting, or the writes: elements, threads, and `at`,
    their places in the log."""

    elements: np.ndarray
    threads: np.ndarray
    at: np.ndarray

    def within(self, array: Array) -> "Side":
        """Those of one array, its elements counted from 0."""
        elements = self.elements - array.base
        mine = np.flatnonzero((elements >= 0) & (elements < array.size))
        return Side(elements[mine], self.threads[mine], self.at[mine])

    def table(self, start: int, size: int) -> np.ndarray:
        """Byte addresses by (instruction, lane), for elements of `size` bytes from `start` on."""
        return by_warp(self.threads, start + self.elements * size)


def accuse(log: Log, kind: str, text: str, *acts: tuple[str, Side, int]) -> None:
    """Raise the Fault that `text` says of the acts: ("reads" or "writes", side, which of it)."""
    lines = []
    for verb, side, n in acts:
        lines_of = log.lines[verb == "writes"]
        place = f" at {text_of(*lines_of[side.at[n]])}" if lines_of else ""
        lines.append(f"\n  thread {side.threads[n]} {verb} it{place}")
    raise Fault(kind, f"block {log.block.index}: {text}" + "".join(lines))


def check_races(log: Log, array: Array, last: np.ndarray, reads: Side, writes: Side) -> None:
    """Fault if two threads touch an element, one of them writes, and nothing orders them.

    last: a table of -1 for each element, to work in; left as it came.
    """
    if not len(writes.at):
        return
    last[writes.elements] = np.arange(len(writes.at))
    after, other = last[writes.elements], last[reads.elements]  # the last write of each element
    last[writes.elements] = -1
    clash = writes.threads[after] != writes.threads
    if clash.any():
        clash &= np.array(log.plain, bool)[writes.at] | np.array(log.plain, bool)[writes.at[after]]
    for verb, side, wrong, write in (
        ("writes", writes, clash, after),
        ("reads", reads, (other >= 0) & (writes.threads[other] != reads.threads), other),
    ):
        if wrong.any():
            n = int(np.flatnonzero(wrong)[0])
            text = f"race on {array.element(side.elements[n])}, nothing orders two accesses"
            accuse(log, "race", text, ("writes", writes, write[n]), (verb, side, n))


def check_written(log: Log, array: Array, fresh: np.ndarray, reads: Side, writes: Side) -> None:
    """Fault if an element is read that nobody wrote; `fresh` says so for each read."""
    if fresh.any():
        own: dict = {}
        for thread, element, at in zip(writes.threads, writes.elements, writes.at, strict=True):
            own.setdefault((thread, element), log.before[at])
        for n in np.flatnonzero(fresh):
            before = own.get((reads.threads[n], reads.elements[n]))
            if before is None or before > reads.at[n]:
                name = array.element(reads.elements[n])
                accuse(log, "unwritten", f"nobody wrote {name}", ("reads", reads, int(n)))
