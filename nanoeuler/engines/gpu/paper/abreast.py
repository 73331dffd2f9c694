# Made from book/11a-the-paper.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-abreast
"""All threads of a block abreast: a value is an array with an entry for each thread.

A kernel without races gives the same result in every order of its threads. So we may take the order
that NumPy does best, all at once, as long as they agree at every `if`. What was read and written is
checked as ever; if anything is wrong, or threads disagree (`Apart`), the launch is run again thread
by thread.
"""

import functools
import math
import operator
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.paper import numbers
from nanoeuler.engines.gpu.paper.arrays import Array, Log, Side
from nanoeuler.engines.gpu.paper.cuda import array_at
from nanoeuler.engines.gpu.paper.machine import WARP, Block, Place


class Apart(Exception):
    """The threads disagree, or do what has no form abreast."""


class Lanes(np.ndarray):
    """A value of each thread. As a condition or a bound of a loop it must be the same for all."""

    def same(self) -> Any:
        """The value that all threads have."""
        first = self.flat[0]
        if (np.asarray(self) != first).any():
            raise Apart
        return first

    def __bool__(self) -> bool:
        return bool(self.same())

    def __index__(self) -> int:
        return int(self.same())

    __int__ = __index__

    def __float__(self) -> float:
        raise Apart


def anew(name: str) -> Callable[[Any, Any], Any]:
    """`a += b` as `a = a + b`: a number cannot change under another name, and an array can."""
    return lambda a, b: getattr(operator, name)(a, b)


# All of Python's that an array has in place.
for _name in "add sub mul truediv floordiv mod pow lshift rshift and_ or_ xor".split():
    setattr(Lanes, f"__i{_name.strip('_')}__", anew(_name))


class Registers:
    """A cuda.local.array of every thread."""

    def __init__(self, values: np.ndarray):
        self.values = values

    def __getitem__(self, index: Any) -> Lanes:
        return self.values[self._place(index)].copy().view(Lanes)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[self._place(index)] = value

    @staticmethod
    def _place(index: Any) -> tuple:
        return tuple(map(operator.index, index if isinstance(index, tuple) else (index,)))


def float32(value: Any) -> Any:
    """A conversion, of one value or of all threads' values."""
    return value.astype(np.float32) if isinstance(value, np.ndarray) else np.float32(value)


class Integer(numbers.Integer):
    """A conversion, of one value or of all threads' values."""

    def __call__(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.astype(self.dtype).astype(np.int64)
        return super().__call__(value)


# By the names of `engines.gpu.instruction`.
TYPES = {
    name: Integer(name, bits) for name, bits in (("int8", 8), ("int32", 32), ("int64", 64))
} | {"float32": float32}


def of_all(function: Callable) -> Callable:
    """A function of NumPy's with float64 inside, as `math` has it."""
    return lambda value: function(np.asarray(value, np.float64)).view(Lanes)


# Stands in for the module `math`, which takes one number at a time.
MATH = SimpleNamespace(
    **vars(math) | {name: of_all(getattr(np, name)) for name in ("exp", "log", "sqrt")}
)


@functools.lru_cache(1 << 14)  # the places of a tile: each is read by every step of a loop
def alike(place: tuple, shape: tuple, threads: int) -> np.ndarray:
    """The element at a place, for each of the threads that name it."""
    return np.full(threads, np.ravel_multi_index(place, shape))


class Rows(Array):
    """An array that all threads index at once; it keeps a row of elements for each instruction."""

    def __init__(self, log: "RowLog", values: np.ndarray, name: str):
        super().__init__(log, values, name, base=0)
        self.flat = values.reshape(-1)
        self.reads: list[np.ndarray] = []
        self.writes: list[np.ndarray] = []
        self.before: list[int] = []

    def _elements(self, index: Any) -> np.ndarray:
        place = index if type(index) is tuple else (index,)
        try:
            if all(type(i) is int for i in place):
                return alike(place, self.shape, self.log.threads)
            elements = np.ravel_multi_index(place, self.shape)
        except (ValueError, TypeError) as error:  # outside, or no index at all
            raise Apart from error
        return elements if elements.ndim else np.full(self.log.threads, elements)

    def __getitem__(self, index: Any) -> Lanes:
        elements = self._elements(index)
        self.reads.append(elements)
        values = self.flat[elements]
        return (values.astype(np.int64) if self.dtype.kind in "iu" else values).view(Lanes)

    def __setitem__(self, index: Any, value: Any) -> None:
        elements = self._elements(index)
        self.writes.append(elements)
        self.before.append(len(self.reads))
        self.flat[elements] = value


class Whole(Side):
    """A side whose entries stand in order: by instruction, then by thread."""

    def __init__(self, rows: list[np.ndarray], threads: int):
        self.count = threads
        self.elements = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        self.threads, self.at = order(len(rows), threads)

    def table(self, start: int, size: int) -> np.ndarray:
        """As of Side: here the rows are the instructions already."""
        rows = (start + self.elements * size).reshape(-1, self.count)
        if self.count % WARP:
            rows = np.pad(rows, ((0, 0), (0, -self.count % WARP)), constant_values=-1)
        return rows.reshape(-1, WARP)


@functools.lru_cache(256)
def order(rows: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """The thread and the instruction of each entry of a Whole."""
    return np.tile(np.arange(threads), rows), np.repeat(np.arange(rows), threads)


class RowLog(Log):
    """What all threads did to arrays since the last barrier."""

    clocks = False  # barriers alone order things here, and each ends a batch

    def __init__(self, block: Block, threads: int):
        super().__init__(block)
        self.threads = threads

    def array(self, values: np.ndarray, name: str) -> Rows:
        """These values as an array of the kernel."""
        self.arrays.append(Rows(self, values, name))
        return self.arrays[-1]

    def settle(self) -> None:
        """Check and count what was done, and begin anew."""
        for array in self.arrays:
            if array.reads or array.writes:
                self.plain, self.before = [True] * len(array.writes), array.before
                reads, writes = (Whole(rows, self.threads) for rows in (array.reads, array.writes))
                array.state.settle(self, array, reads, writes)
                array.reads.clear()
                array.writes.clear()
                array.before.clear()


class Cuda:
    """Stands in for numba.cuda, for all threads of one block."""

    warpsize = WARP

    def __init__(self, block: Block, threads: list[Place]):
        self.block = block
        self.threadIdx = Place(*(np.array(axis).view(Lanes) for axis in zip(*threads, strict=True)))
        self.blockIdx = block.blockIdx
        self.blockDim, self.gridDim = block.machine.blockDim, block.machine.gridDim
        self.laneid = (np.arange(len(threads)) % WARP).view(Lanes)
        self.shared = SimpleNamespace(array=self._shared)
        self.local = SimpleNamespace(array=self._local)

    def grid(self, axes: int) -> Any:
        """The threads' places in the whole grid."""
        at = tuple(
            b * n + t for b, n, t in zip(self.blockIdx, self.blockDim, self.threadIdx, strict=True)
        )
        return at[0] if axes == 1 else at[:axes]

    def syncthreads(self) -> None:
        """All threads are here already."""
        self.block.settle()
        self.block.machine.counts["barriers"] += 1

    @staticmethod
    def selp(condition: Any, yes: Any, no: Any) -> Lanes:
        """One of two values for each thread."""
        return np.where(condition, yes, no).view(Lanes)

    def _shared(self, shape: Any, dtype: Any) -> Array:
        return array_at(sys._getframe(1), self.block, shape, dtype)

    def _local(self, shape: Any, dtype: Any) -> Registers:
        shape = shape if isinstance(shape, tuple) else (shape,)
        kind = numbers.dtype(dtype)
        kind = np.dtype(np.int64) if kind.kind in "iu" else kind
        fill = np.nan if kind.kind == "f" else 0x5A5A5A5A
        return Registers(np.full((*shape, len(self.laneid)), fill, kind))
