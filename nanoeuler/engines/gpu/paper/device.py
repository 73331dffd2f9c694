# Made from book/07b-the-paper.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-device
"""A device on paper: arrays that are reached by asking for them, launches, and graphs of launches.

Its methods are those of `engines.gpu.device.Device`, as far as they mean something here. Left out:
streams, which all are one; time.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.kernel import Kernel, Launch, Map
from nanoeuler.engines.gpu.paper.machine import Fault
from nanoeuler.engines.gpu.paper.runner import Report, run
from nanoeuler.errors import UserError


class Sheet:
    """An array in the device's memory: shape, dtype and strides as NumPy's, without its numbers.

    blank: whether nobody has written it yet.
    """

    def __init__(self, values: np.ndarray, blank: bool):
        self.shape, self.dtype, self.strides = values.shape, values.dtype, values.strides
        self._values, self.blank = values, blank


def sheets(launch: Launch) -> list[Sheet]:
    """The arrays of a launch, those of its maps too; UserError for one that is not the device's."""
    arrays = [a.array if isinstance(a, Map) else a for a in launch.args]
    arrays = [array for array in arrays if hasattr(array, "strides")]
    for array in arrays:
        if not isinstance(array, Sheet):
            name = launch.kernel.function.__name__
            raise UserError(f"{name} is given an array of the host: put it on the device (array)")
    return arrays


def play(launch: Launch, seed: int | None) -> Report:
    """Run a launch whose arrays are the device's."""
    arrays = sheets(launch)

    def plain(arg: Any) -> Any:
        if isinstance(arg, Map):
            return Map(arg.array._values, arg.box)
        return arg._values if isinstance(arg, Sheet) else arg

    blank = [array._values for array in arrays if array.blank]
    report = run(replace(launch, args=tuple(map(plain, launch.args))), seed, blank)
    for array in arrays:
        array.blank = False
    return report


@dataclass(frozen=True)
class Weak:
    """A captured argument: an array, or the array of a map with this box, as long as it lives."""

    array: Callable[[], Sheet | None]
    box: tuple[int, ...] | None = None


class Graph:
    """Launches that were captured; `replay` plays them on whatever their arrays hold then."""

    def __init__(self) -> None:
        self.launches: list[tuple[Kernel, tuple[int, ...], list[Any]]] = []

    def add(self, launch: Launch) -> None:
        """Write a launch down."""
        args = [
            Weak(weakref.ref(arg.array), arg.box) if isinstance(arg, Map)
            else Weak(weakref.ref(arg)) if isinstance(arg, Sheet) else arg
            for arg in launch.args
        ]  # fmt: skip
        self.launches.append((launch.kernel, launch.grid, args))

    def replay(self, seed: int | None = None) -> list[Report]:
        """Run all launches, in order; a report of each."""
        reports = []
        for kernel, grid, args in self.launches:
            whole = tuple(alive(kernel, n, arg) for n, arg in enumerate(args))
            reports.append(play(Launch(kernel, grid, whole), seed))
        return reports


def alive(kernel: Kernel, number: int, arg: Any) -> Any:
    """A captured argument as it was; Fault if its array is gone."""
    if not isinstance(arg, Weak):
        return arg
    array = arg.array()
    if array is None:
        name = kernel.function.__name__
        raise Fault("dead", f"argument {number} of {name} was freed after it was captured: keep it")
    return array if arg.box is None else Map(array, arg.box)


class Memory:
    """What a device stores, and how the host gets there. graph: that is being captured, or None."""

    def __init__(self) -> None:
        self.graph: Graph | None = None

    def _refuse(self, what: str) -> None:
        if self.graph is not None:
            raise Fault("capture", f"{what} while launches are captured: it would not be replayed")

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Sheet:
        """Memory for an array in C order, which nobody has written."""
        self._refuse("memory is asked for")
        return Sheet(np.empty(shape, dtype), blank=True)

    def array(self, values: np.ndarray) -> Sheet:
        """A copy of a NumPy array, in C order."""
        self._refuse("memory is asked for")
        return Sheet(np.array(values, order="C"), blank=False)

    def host(self, array: Sheet) -> np.ndarray:
        """A copy as a NumPy array; waits for what was launched before."""
        self._refuse("the host reads an array")
        if array.blank:
            raise Fault("unwritten", f"the host reads an array {array.shape} that nobody wrote")
        return array._values.copy()

    def fill(self, array: Sheet, values: Any) -> None:
        """Put numbers of the host into an array."""
        self._refuse("the host writes an array")
        array._values[...] = values
        array.blank = False

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        self._refuse("the host waits")


class Device(Memory):
    """A GPU on paper. seed: the order of blocks, warps and copies, as in `run`."""

    def __init__(self, seed: int | None = None):
        super().__init__()
        self.seed = seed
        self.loaded: set[Kernel] = set()

    def load(self, kernel: Kernel) -> None:
        """Compile a kernel, once."""
        if kernel not in self.loaded:
            self._refuse(f"{kernel.function.__name__} is compiled")
            self.loaded.add(kernel)

    def prepare(self, launch: Launch) -> Callable[[int], None]:
        """A function of a stream that runs the launch, or has it captured; it keeps the arrays."""
        sheets(launch)
        self.load(launch.kernel)
        if any(isinstance(arg, Map) for arg in launch.args):
            self._refuse("a map is encoded")

        def start(stream: int = 0) -> None:
            if self.graph is not None:
                self.graph.add(launch)
            else:
                play(launch, self.seed)

        return start

    def run(self, launch: Launch, stream: int = 0) -> None:
        """Run a launch, or have it captured."""
        self.prepare(launch)(stream)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """with device.capture() as graph: launches are written down instead of run."""
        self._refuse("a capture begins")
        self.graph = graph = Graph()
        try:
            yield graph
        finally:
            self.graph = None
