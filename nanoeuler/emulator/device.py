# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-device
"""An emulated device: arrays that only the device gives out, launches, graphs of launches.

Its methods are those of `engines.gpu.host.device.Device`. Left out: `keep`, time, and streams, all
of which are one.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nanoeuler.emulator.machine import Fault
from nanoeuler.emulator.memory import ALLOCATION
from nanoeuler.emulator.runner import Report, run
from nanoeuler.engines.gpu.lang.card import TYPICAL, Card, pretended, require_fit
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, Map, require_aligned
from nanoeuler.engines.gpu.lang.views import dense, part_of, require_dense
from nanoeuler.errors import UserError

UNWRITTEN = 0xFF  # of every byte that nobody wrote: NaN as float32 and as bf16, -1 as an integer


class Bytes:
    """Memory of one allocation: its bytes, and which of them somebody has written."""

    def __init__(self, size: int):
        self.bytes = np.full(max(1, size), UNWRITTEN, np.uint8)
        self.written = np.zeros(self.bytes.size, bool)


class Sheet:
    """An array in the device's memory: shape, dtype and strides as NumPy's, without its numbers.

    It begins `offset` bytes into its memory.
    """

    def __init__(
        self, memory: Bytes, offset: int, shape: tuple[int, ...], dtype: np.dtype,
        strides: tuple[int, ...],
    ):  # fmt: skip
        self.shape, self.dtype, self.strides = shape, dtype, strides
        self._memory, self._offset = memory, offset

    @property
    def _values(self) -> np.ndarray:
        """The numbers, in the memory itself."""
        memory = self._memory.bytes
        return np.ndarray(self.shape, self.dtype, memory, self._offset, self.strides)

    @property
    def _written(self) -> np.ndarray:
        """(*shape, bytes of an element) bool, a view of the memory's record of written bytes."""
        shape, strides = (*self.shape, self.dtype.itemsize), (*self.strides, 1)
        return np.ndarray(shape, bool, self._memory.written, self._offset, strides)

    @property
    def _place(self) -> tuple:
        """A key that two names of the same elements share."""
        return id(self._memory), self._offset, self.shape, self.dtype, self.strides


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
    """Run a launch whose arrays are the device's, and note what it has written."""
    arrays = {array._place: (array, array._values) for array in sheets(launch)}

    def plain(arg: Any) -> Any:
        if isinstance(arg, Map):
            return Map(plain(arg.array), arg.box)
        return arrays[arg._place][1] if isinstance(arg, Sheet) else arg

    blank, past = {}, {}
    for array, values in arrays.values():
        past[id(values)] = array._offset % ALLOCATION
        if not array._written.all():
            blank[id(values)] = ~array._written.all(axis=-1).reshape(-1)
    before = {key: mask.copy() for key, mask in blank.items()}
    report = run(replace(launch, args=tuple(map(plain, launch.args))), seed, blank, past=past)
    for array, values in arrays.values():
        if id(values) in blank:
            new = before[id(values)] & ~blank[id(values)]
            array._written[new.reshape(array.shape)] = True
    return report


@dataclass(eq=False)
class Transit:
    """A copy of a page that nobody has waited for yet. numbers: the page's contents at the end."""

    page: np.ndarray
    numbers: np.ndarray
    sent: bool  # to the device; else fetched from there

    def end(self) -> None:
        """Somebody has waited for it."""
        if self.sent and (self.page != self.numbers).any():
            raise Fault("race", "a page was written before anybody waited for its copy")
        self.page[...] = self.numbers


class Device:
    """An emulated GPU. seed: the order of blocks, warps and copies, as in `run`.

    capability, multiprocessors: of the card that it stands for, and which has to run and hold its
    kernels. Without a capability it's the card of NANOEULER_CAPABILITY, or (9, 0).
    captured: the launches that a capture has written down so far; None where there is none.
    """

    name = "emulator"

    def __init__(
        self, seed: int | None = None, capability: tuple[int, int] | None = None,
        multiprocessors: int | None = None,
    ):  # fmt: skip
        given = pretended() if capability is None else None
        card = given or TYPICAL.get(capability or (9, 0), Card(capability, 2, 1 << 20))
        count = given.multiprocessors if given else 2  # few blocks, which take less time
        self.seed = seed
        self.captured: list[Launch] | None = None
        self.card = self.real = card._replace(multiprocessors=multiprocessors or count)
        self.capability, self.multiprocessors, _ = self.card
        self.alive: weakref.WeakSet[Bytes] = weakref.WeakSet()
        self.under_way: list[Transit] = []
        self.loaded: set[Kernel] = set()

    def others(self) -> dict[int, str]:
        """The names of other GPUs next to it: there are none."""
        return {}

    def array(self, values: np.ndarray) -> Sheet:
        """A copy of a NumPy array, in C order."""
        values = np.asarray(values)
        made = self.empty(values.shape, values.dtype)
        self.fill(made, values)
        return made

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Sheet:
        """Memory for an array in C order, all of it zero."""
        return self.array(np.zeros(shape, dtype))

    def refuse(self, what: str) -> None:
        """Fault if a graph is being captured."""
        if self.captured is not None:
            raise Fault("capture", f"{what} while launches are captured: it would not be replayed")

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Sheet:
        """Memory for an array in C order, which nobody has written."""
        self.refuse("memory is allocated")
        kind, shape = np.dtype(dtype), tuple(shape)
        strides = dense(shape, kind.itemsize)
        memory = Bytes(kind.itemsize * int(np.prod(shape, dtype=np.int64)))
        self.alive.add(memory)
        return Sheet(memory, 0, shape, kind, strides)

    def memory_used(self) -> int:
        """The bytes of all arrays that live."""
        return sum(memory.bytes.size for memory in self.alive)

    def part(
        self, array: Sheet, offset: int, shape: tuple[int, ...], dtype: Any,
        strides: tuple[int, ...] | None = None,
    ) -> Sheet:  # fmt: skip
        """A part of an array that begins `offset` bytes into it; the same memory, kept alive."""
        made = part_of(array, offset, shape, dtype, strides)
        return Sheet(array._memory, array._offset + offset, *made)

    def host(self, array: Sheet) -> np.ndarray:
        """A copy as a NumPy array; waits for what was launched before."""
        self.refuse("the host reads an array")
        if not array._written.all():
            raise Fault("unwritten", f"the host reads an array {array.shape} that nobody wrote")
        return array._values.copy()

    def fill(self, array: Sheet, values: Any) -> None:
        """Put numbers of the host into an array in C order."""
        self.refuse("the host writes an array")
        require_dense(array)
        array._values[...] = values
        array._written[...] = True

    def page(self, size: int) -> np.ndarray:
        """`size` bytes of the host's memory that `send` and `fetch` take."""
        self.refuse("memory is allocated")
        return np.full(size, UNWRITTEN, np.uint8)

    def _begin(self, copy: Transit) -> None:
        """A copy is under way; its page may not be a part of another's."""
        if any(np.shares_memory(copy.page, other.page) for other in self.under_way):
            raise Fault("race", "a page is copied again before anybody waited for its last copy")
        self.under_way.append(copy)

    def send(self, array: Sheet, page: np.ndarray) -> None:
        """Copy a page into an array (bytes,) uint8, after what was launched before."""
        self.refuse("a page is copied")
        self._begin(Transit(page, page.copy(), sent=True))
        self.fill(array, page)

    def fetch(self, page: np.ndarray, array: Sheet) -> None:
        """Copy an array (bytes,) uint8 to a page, after what was launched before."""
        require_dense(array)
        self._begin(Transit(page, self.host(array), sent=False))
        page[...] = UNWRITTEN

    def mark(self) -> Callable[[], None]:
        """A function that waits until everything that was begun before `mark` is done."""
        self.refuse("a mark is set")
        begun = list(self.under_way)

        def wait() -> None:
            self.refuse("the host waits")
            for copy in [copy for copy in begun if copy in self.under_way]:  # perhaps not the first
                self.under_way.remove(copy)
                copy.end()
            begun.clear()

        return wait

    def synchronize(self) -> None:
        """Wait for everything that was begun."""
        self.refuse("the host waits")
        self.mark()()

    def load(self, kernel: Kernel) -> None:
        """Compile a kernel, once."""
        if kernel not in self.loaded:
            require_fit(kernel, self.capability)
            self.refuse(f"{kernel.function.__name__} is compiled")
            self.loaded.add(kernel)

    def load_all(self, kernels: Iterable[Kernel]) -> None:
        """Compile kernels, those that are new."""
        for kernel in kernels:
            self.load(kernel)

    def prepare(self, launch: Launch) -> Callable[..., Report | None]:
        """A function of a stream that runs the launch, or has it captured; it keeps the arrays."""
        sheets(launch)
        self.load(launch.kernel)
        for arg in launch.args:
            if isinstance(arg, Map):
                self.refuse("a map is encoded")
                require_aligned(arg.array._offset)

        def start(stream: Any = 0) -> Report | None:
            if self.captured is None:
                return play(launch, self.seed)
            self.captured.append(launch)
            return None

        return start

    def run(self, launch: Launch, stream: Any = 0) -> Report | None:
        """Run a launch, or have it captured."""
        return self.prepare(launch)(stream)

    def capture(self, starts: Iterable[Callable]) -> "Graph":
        """A graph of what these functions of a stream launch; nothing runs, and nothing may wait.

        The graph keeps the functions, and by them all arrays.
        """
        self.refuse("a capture begins")
        starts, self.captured = list(starts), []
        try:
            for start in starts:
                start(0)
            return Graph(self, self.captured, starts)
        finally:
            self.captured = None


# %% sec-paper-device
class Graph:
    """Launches that were captured. starts: what launched them, which keeps their arrays."""

    def __init__(self, device: Device, launches: list[Launch], starts: list[Callable]):
        self.device, self.launches, self.starts = device, launches, starts

    def launch(self) -> list[Report]:
        """Run all launches, in order, on what their arrays hold now; a report of each."""
        self.device.refuse("a graph is started")
        return [play(launch, self.device.seed) for launch in self.launches]
