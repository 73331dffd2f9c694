# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-cuda
"""The emulated `cuda` module of a kernel."""

import linecache
import operator
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from nanoeuler.emulator import dtypes
from nanoeuler.emulator.arrays import Array
from nanoeuler.emulator.barriers import meet, sync_threads, sync_warp
from nanoeuler.emulator.machine import WARP, Block, fault
from nanoeuler.emulator.machine import getcurrent as current
from nanoeuler.emulator.memory import CLUSTER_BIT, WINDOW, Shared
from nanoeuler.emulator.shadow import SharedState


class Local(np.ndarray):
    """cuda.local.array: registers of one thread."""

    lent = 0  # wgmmas under way that own them

    def lend(self) -> None:
        """A wgmma under way owns them."""
        self.__class__, self.lent = Lent, self.lent + 1

    def give_back(self) -> None:
        """It is done."""
        self.lent -= 1
        if not self.lent:
            self.__class__ = Local

    def feed(self) -> None:
        """A wgmma under way reads them."""
        self.__class__ = Feeding

    def fed(self) -> None:
        """It has read them."""
        self.__class__ = Local

    def part(self, first: int, count: int) -> np.ndarray:
        """Some registers, (1, count): a row for each thread."""
        return np.asarray(self.base[first : first + count])[None]

    def put(self, first: int, rows: np.ndarray) -> None:
        """Put (1, count) into registers."""
        self.base[first : first + rows.shape[1]] = rows[0]


class Lent(Local):
    """Registers that a wgmma under way owns: nobody else may touch them."""

    def __getitem__(self, index):
        fault("flight", "registers of a wgmma under way: a wgmma wait is missing")

    def __setitem__(self, index, value):
        self[index]


class Feeding(Local):
    """Registers that a wgmma under way reads: nobody may write them."""

    def __setitem__(self, index, value):
        fault("flight", "registers that a wgmma under way still reads are overwritten")


class LocalIntegers(Local):
    """Registers with integers: read as plain ints, without a width; stores wrap."""

    def __getitem__(self, index):
        return int(super().__getitem__(index))

    def __setitem__(self, index, value):
        try:
            super().__setitem__(index, value)
        except OverflowError:  # of a plain int; arrays wrap by themselves
            super().__setitem__(index, np.array(value).astype(self.dtype))


def local_array(shape: int | tuple, dtype: Any) -> Local:
    """Registers, filled with nan or 0x5A5A5A5A, so that reading them too early shows."""
    values = np.empty(shape, dtypes.dtype(dtype))
    values.fill(np.nan if values.dtype.kind == "f" else 0x5A5A5A5A)
    return values.view(Local if values.dtype.kind == "f" else LocalIntegers)


def shared_array(shape: int | tuple, dtype: Any) -> Array:
    """The block's array that is made at this place in the kernel; shape 0: the dynamic memory."""
    frame, block = sys._getframe(1), current().block
    arrays = block.parts.setdefault("shared arrays", {})
    site = frame.f_code, frame.f_lasti
    if site not in arrays:
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        name = re.match(r"\s*(\w+)\s*=", text)
        arrays[site] = new_array(block, shape, dtypes.dtype(dtype), name)
    return arrays[site]


def new_array(block: Block, shape: int | tuple, dtype: np.dtype, name: re.Match | None) -> Array:
    """An array in a block's shared memory."""
    memory = block.of(Shared)
    start = WINDOW
    if shape == 0:
        shape = (block.machine.shared // dtype.itemsize,)
    else:
        shape = shape if isinstance(shape, tuple) else (shape,)
        start = memory.place(int(np.prod(shape)) * dtype.itemsize)
    size = int(np.prod(shape)) * dtype.itemsize
    values = memory.bytes[start : start + size].view(dtype).reshape(shape)
    array = block.log.array(values, name[1] if name else "shared")
    array.state = SharedState(block, start, array)
    array.address = start | block.rank << CLUSTER_BIT
    return array


# The lane that a lane reads from, of its own number and an operand; by PTX's mode of a shuffle.
SOURCE = {
    "idx": lambda own, lane: lane, "bfly": operator.xor, "up": operator.sub, "down": operator.add,
}  # fmt: skip


def shuffle(mask: int, mode: str, value: Any, by: int) -> Any:
    """Each lane gives a value and gets that of another, its own where there is none."""

    def together(values: list) -> list:
        by_lane = {own: value for own, value, _ in values}
        return [by_lane.get(SOURCE[mode](own, by), value) for own, value, by in values]

    return meet(mask, f"shfl.{mode}", (current().lane, value, by), together)


def vote(mask: int, key: str, value: Any, count: Callable) -> Any:
    """Each lane gives a value; all get `count(lanes, whether each one's is true)`, of arrays."""

    def together(values: list) -> list:
        lanes, given = zip(*values, strict=True)
        return [count(np.array(lanes), np.array(given, bool)).item()] * len(values)

    return meet(mask, key, (current().lane, value), together)


class Atomic:
    """cuda.atomic: a thread reads an element and writes another value, undisturbed; gives the old.
    """

    def _change(self, array: Array, index: Any, change: Callable) -> Any:
        old = array.values[index]
        array.log.write(array.at[index], sys._getframe(2), plain=False)
        array.values[index] = change(old)
        return old.item() if array.dtype.kind in "iu" else old

    def add(self, array: Array, index: Any, value: Any) -> Any:
        """array[index] += value."""
        return self._change(array, index, lambda old: old + array.dtype.type(value))

    def max(self, array: Array, index: Any, value: Any) -> Any:
        """array[index] = max(array[index], value)."""
        return self._change(array, index, lambda old: max(old, array.dtype.type(value)))

    def min(self, array: Array, index: Any, value: Any) -> Any:
        """array[index] = min(array[index], value)."""
        return self._change(array, index, lambda old: min(old, array.dtype.type(value)))

    def exch(self, array: Array, index: Any, value: Any) -> Any:
        """array[index] = value."""
        return self._change(array, index, lambda old: array.dtype.type(value))


class Cuda:
    """The emulated numba.cuda; its names are numba's."""

    local = SimpleNamespace(array=local_array)
    shared = SimpleNamespace(array=shared_array)
    atomic = Atomic()
    syncthreads = staticmethod(sync_threads)
    syncwarp = staticmethod(sync_warp)
    _shuffle, _vote = staticmethod(shuffle), staticmethod(vote)
    warpsize = WARP
    threadIdx = property(lambda self: current().threadIdx)
    blockIdx = property(lambda self: current().block.blockIdx)
    blockDim = property(lambda self: current().block.machine.blockDim)
    gridDim = property(lambda self: current().block.machine.gridDim)
    laneid = property(lambda self: current().lane)

    def grid(self, axes: int) -> int | tuple:
        """The thread's place in the whole grid."""
        thread, size = self.threadIdx, self.blockDim
        at = tuple(b * n + t for b, n, t in zip(self.blockIdx, size, thread, strict=True))
        return at[0] if axes == 1 else at[:axes]

    @staticmethod
    def selp(condition: Any, yes: Any, no: Any) -> Any:
        """One of two values, both computed, so threads that choose differently don't diverge."""
        return yes if condition else no

    def shfl_sync(self, mask: int, value: Any, lane: int) -> Any:
        """The value of one lane."""
        return self._shuffle(mask, "idx", value, lane)

    def shfl_xor_sync(self, mask: int, value: Any, bits: int) -> Any:
        """The value of the lane whose number differs in `bits`."""
        return self._shuffle(mask, "bfly", value, bits)

    def shfl_up_sync(self, mask: int, value: Any, delta: int) -> Any:
        """The value of the lane `delta` below."""
        return self._shuffle(mask, "up", value, delta)

    def shfl_down_sync(self, mask: int, value: Any, delta: int) -> Any:
        """The value of the lane `delta` above."""
        return self._shuffle(mask, "down", value, delta)

    def ballot_sync(self, mask: int, value: Any) -> int:
        """A bit for each lane whose value is true."""
        bits = lambda lanes, yes: (yes.astype(np.int64) << lanes).sum(axis=-1)  # noqa: E731
        return self._vote(mask, "ballot_sync", value, bits)

    def any_sync(self, mask: int, value: Any) -> bool:
        """Whether any lane's value is true."""
        return self._vote(mask, "any_sync", value, lambda lanes, yes: yes.any(axis=-1))

    def all_sync(self, mask: int, value: Any) -> bool:
        """Whether all lanes' values are true."""
        return self._vote(mask, "all_sync", value, lambda lanes, yes: yes.all(axis=-1))
