# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-device
"""A GPU: memory on it, kernels loaded into it, launches run by it. Nothing here starts on import.

NVIDIA's driver comes from `libraries`. The methods are those of `emulator.device`.
"""

import ctypes
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.host import libraries
from nanoeuler.engines.gpu.host.cache import compiled
from nanoeuler.engines.gpu.host.compile import Code, assemble, entry, machine
from nanoeuler.engines.gpu.lang.card import Card, require_fit, stand_in
from nanoeuler.engines.gpu.lang.instruction import Operand
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, Map, require_aligned
from nanoeuler.engines.gpu.lang.views import dense, part_of, reach, require_dense
from nanoeuler.errors import UserError

MAP_BYTES = 128  # of an encoded tensor map; CUDA driver API, CUtensorMap
# ctypes of a kernel's arguments, by the letter of their type.
CTYPES = {"r": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}
# What an error of the driver means here, by what its name contains.
MEANINGS = {
    "ILLEGAL_ADDRESS": "an earlier launch accessed memory outside its arrays; start the process "
    "again",
    "MISALIGNED_ADDRESS": "an earlier launch read or wrote at a misaligned address; start the "
    "process again",
    "LAUNCH_FAILED": "an earlier launch failed; start the process again",
    "LAUNCH_OUT_OF_RESOURCES": "a block of this kernel needs more registers than the GPU has",
    "STREAM_CAPTURE": "an operation that a graph can't record ran while launches were captured",
}


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """An array in the GPU's memory: its address, and shape, dtype and strides as NumPy's.

    owner: what must live for the memory to be there; none for memory of ours.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...]
    owner: Any = None


def check(outcome: tuple) -> Any:
    """What a call of the driver returned, after its error code.

    If that is not 0: MemoryError where there isn't enough memory, RuntimeError otherwise.
    """
    error, *values = outcome
    if int(error):
        means = [text for part, text in MEANINGS.items() if part in error.name]
        text = ": ".join(["the GPU's driver", error.name, *means])
        raise MemoryError(text) if "OUT_OF_MEMORY" in error.name else RuntimeError(text)
    return values[0] if len(values) == 1 else values


def number_of(driver: Any, handle: Any, name: str) -> int:
    """One of the numbers that the driver knows of a GPU."""
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return check(driver.cuDeviceGetAttribute(attribute, handle))


def name_of(driver: Any, handle: Any) -> str:
    """A GPU's name."""
    return check(driver.cuDeviceGetName(64, handle)).split(b"\0")[0].decode()


def one_of_them(driver: Any, number: int) -> Any:
    """The handle of GPU `number` of this machine; UserError where it has no such GPU."""
    count = check(driver.cuDeviceGetCount())
    if not 0 <= number < count:
        most = f"0 to {count - 1}" if count > 1 else "0 alone"
        raise UserError(f"expected the number of a GPU of this machine, {most}, got {number}")
    return check(driver.cuDeviceGet(number))


class Device:
    """One GPU: its memory, kernels loaded into it, and launches that it runs, alone or as a graph.

    real: its own numbers. card, capability, multiprocessors: those for which launches are chosen,
    of the card that it pretends to be (`lang.card`), and otherwise its own.
    """

    def __init__(self, number: int = 0):
        self.driver = driver = libraries.driver()
        check(driver.cuInit(0))
        self.handle = one_of_them(driver, number)
        context = check(driver.cuDevicePrimaryCtxRetain(self.handle))  # the one that others use
        check(driver.cuCtxSetCurrent(context))
        self.number, self.name = number, name_of(driver, self.handle)
        names = "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT"
        *capability, count, l2 = (
            number_of(driver, self.handle, name) for name in (*names, "L2_CACHE_SIZE")
        )
        self.real = Card(tuple(capability), count, l2)
        self.card = stand_in(self.real)
        self.capability, self.multiprocessors, _ = self.card
        self.capturing = False
        self.later: list[tuple[Callable, Any]] = []
        self.functions: dict[Kernel, Any] = {}

    def others(self) -> dict[int, str]:
        """The names of this machine's other GPUs, by their numbers."""
        count = check(self.driver.cuDeviceGetCount())
        handles = {n: check(self.driver.cuDeviceGet(n)) for n in range(count) if n != self.number}
        return {n: name_of(self.driver, handle) for n, handle in handles.items()}

    def memory_used(self) -> int:
        """The bytes of the GPU's memory that are in use, by this process or any other."""
        free, whole = check(self.driver.cuMemGetInfo())
        return whole - free

    def keep(self, thing: Any, free: Callable, handle: Any) -> None:
        """Have the driver's `free` called with a handle once `thing` is forgotten."""
        weakref.finalize(thing, self._forget, free, handle).atexit = False

    def _forget(self, free: Callable, handle: Any) -> None:
        """Give back, after the capture if there is one: Python forgets things at any time."""
        if self.capturing:
            self.later.append((free, handle))
        else:
            free(handle)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """Memory for an array in C order, as it is; freed when array and parts are forgotten.

        MemoryError, with how much there is, where it does not fit.
        """
        kind, shape = np.dtype(dtype), tuple(shape)
        size = math.prod(shape) * kind.itemsize
        try:
            address = int(check(self.driver.cuMemAlloc(max(1, size))))
        except MemoryError:
            free, whole = check(self.driver.cuMemGetInfo())
            there = f"{self.name} has {free / 1e9:.2f} of its {whole / 1e9:.2f} GB free"
            wanted = f"an array {shape} of {kind} takes {size / 1e9:.2f} GB"
            raise MemoryError(f"{wanted}, and {there}") from None
        made = DeviceArray(address, shape, kind, dense(shape, kind.itemsize))
        self.keep(made, self.driver.cuMemFree, address)
        return made

    def part(
        self, array: DeviceArray, offset: int, shape: tuple[int, ...], dtype: Any,
        strides: tuple[int, ...] | None = None,
    ) -> DeviceArray:  # fmt: skip
        """A part of an array that begins `offset` bytes into it; the same memory, kept alive."""
        made = part_of(array, offset, shape, dtype, strides)
        return DeviceArray(array.address + offset, *made, owner=array)

    def array(self, values: np.ndarray) -> DeviceArray:
        """A copy on the GPU of a NumPy array, in C order."""
        values = np.asarray(values)
        made = self.empty(values.shape, values.dtype)
        self.fill(made, values)
        return made

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """Memory for an array in C order, all of it zero; the host sends nothing."""
        made = self.empty(shape, dtype)
        if size := math.prod(made.shape) * made.dtype.itemsize:
            check(self.driver.cuMemsetD8(made.address, 0, size))
        return made

    def fill(self, array: DeviceArray, values: Any) -> None:
        """Put numbers of the host into an array in C order."""
        require_dense(array)
        numbers = np.asarray(np.broadcast_to(values, array.shape), array.dtype, order="C")
        if numbers.nbytes:
            address = numbers.ctypes.data
            check(self.driver.cuMemcpyHtoD(array.address, address, numbers.nbytes))

    def host(self, array: DeviceArray) -> np.ndarray:
        """A copy as a NumPy array; waits for what was launched before."""
        size = reach(array.shape, array.strides, array.dtype.itemsize)
        there = np.empty(max(1, size), np.uint8)
        self.synchronize()
        if size:
            check(self.driver.cuMemcpyDtoH(there.ctypes.data, array.address, size))
        values = np.ndarray(array.shape, array.dtype, there, 0, array.strides)
        return np.asarray(values, order="C")

    def synchronize(self) -> None:
        """Wait for everything that was begun."""
        check(self.driver.cuCtxSynchronize())

    @cached_property
    def stream(self) -> int:
        """The handle of the stream of graphs and of copies; in order with the default stream."""
        made = check(self.driver.cuStreamCreate(int(self.driver.CUstream_flags.CU_STREAM_DEFAULT)))
        return int(made)

    def page(self, size: int) -> np.ndarray:
        """`size` bytes of the host's memory, kept where they are, that `send` and `fetch` take."""
        address = int(check(self.driver.cuMemHostAlloc(size, 0)))
        bytes_there = (ctypes.c_uint8 * size).from_address(address)
        self.keep(bytes_there, self.driver.cuMemFreeHost, address)
        return np.frombuffer(bytes_there, np.uint8)

    def send(self, array: DeviceArray, page: np.ndarray) -> None:
        """Copy a page into an array (bytes,) uint8, after what was launched before."""
        there, here = array.address, page.ctypes.data
        check(self.driver.cuMemcpyHtoDAsync(there, here, page.nbytes, self.stream))

    def fetch(self, page: np.ndarray, array: DeviceArray) -> None:
        """Copy an array (bytes,) uint8 to a page, after what was launched before."""
        there, here = array.address, page.ctypes.data
        check(self.driver.cuMemcpyDtoHAsync(here, there, page.nbytes, self.stream))

    def mark(self) -> Callable[[], None]:
        """A function that waits until everything that was begun before `mark` is done."""
        kinds = self.driver.CUevent_flags  # the host sleeps while it waits, and takes no time
        flags = int(kinds.CU_EVENT_DISABLE_TIMING) | int(kinds.CU_EVENT_BLOCKING_SYNC)
        event = check(self.driver.cuEventCreate(flags))
        check(self.driver.cuEventRecord(event, self.stream))

        def wait() -> None:
            check(self.driver.cuEventSynchronize(event))

        self.keep(wait, self.driver.cuEventDestroy, event)
        return wait

    def load(self, kernel: Kernel, code: Code | None = None) -> Any:
        """The kernel's handle; compiled here, or before (`compile.build_all`) and handed in."""
        if kernel in self.functions:
            return self.functions[kernel]
        require_fit(kernel, self.capability)
        target, driver = machine(kernel, self.real.capability), self.driver
        code = code or compiled([kernel], self.real.capability)[0]
        if code.image and code.target != target:  # machine code of another machine
            code = assemble(code.text, target)
        module = check(driver.cuModuleLoadData(code.image or code.text.encode() + b"\0"))
        function = check(driver.cuModuleGetFunction(module, entry(code.text).encode()))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, limit, kernel.shared))
        return self.functions.setdefault(kernel, function)

    def load_all(self, kernels: Iterable[Kernel]) -> None:
        """Load kernels. Those that aren't kept on disk either are compiled in parallel."""
        missing = [kernel for kernel in dict.fromkeys(kernels) if kernel not in self.functions]
        for kernel, code in zip(missing, compiled(missing, self.real.capability), strict=True):
            self.load(kernel, code)

    def prepare(self, launch: Launch) -> Callable[..., None]:
        """A function of a stream's handle that puts the launch on that stream, again and again."""
        kernel, function = launch.kernel, self.load(launch.kernel)
        encoded = [encode(self, arg) if isinstance(arg, Map) else arg for arg in launch.args]
        pairs = [pair for operand, arg in zip(kernel.parameters, encoded, strict=True)
                 for pair in parameters(operand, arg)]  # fmt: skip
        values, types = zip(*pairs, strict=True)
        config = configuration(self.driver, launch)

        def start(stream: int = 0, _alive: Any = (launch, encoded)) -> None:
            config.hStream = stream
            check(self.driver.cuLaunchKernelEx(config, function, (values, types), 0))

        return start

    def run(self, launch: Launch, stream: int = 0) -> None:
        """Put a launch on a stream; it runs when its turn comes."""
        self.prepare(launch)(stream)

    def capture(self, starts: Iterable[Callable]) -> "Graph":
        """A graph of what these functions of a stream launch; none runs, and nothing may wait."""
        starts, driver = list(starts), self.driver
        # Libraries load their kernels when these are first used; that is no part of the graph.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        check(driver.cuStreamBeginCapture(self.stream, mode))
        self.capturing = True
        try:
            for start in starts:
                start(self.stream)
        finally:  # a capture that was begun is ended, whatever happened in it
            outcome = driver.cuStreamEndCapture(self.stream)
            self.capturing = False
            while self.later:
                free, handle = self.later.pop()
                free(handle)
        return Graph(self, check(outcome), starts)


# %% sec-gemm-device
def encode(device: Device, view: Map) -> DeviceArray:
    """A tensor map in the GPU's memory (cuTensorMapEncodeTiled: innermost axes first)."""
    driver, array = device.driver, view.array
    require_aligned(array.address)
    kinds = driver.CUtensorMapDataType
    kind = {
        "uint16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float32": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }[str(array.dtype)]
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    encoded = check(
        driver.cuTensorMapEncodeTiled(
            kind, len(view.box), array.address,
            [wide(extent) for extent in reversed(array.shape)],
            [wide(step) for step in reversed(array.strides[:-1])],
            [narrow(extent) for extent in reversed(view.box)],
            [narrow(1)] * len(view.box),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip
    words = ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)
    return device.array(np.frombuffer(words, np.uint8))


def attributes(driver: Any, kernel: Kernel) -> list[Any]:
    """The launch's attributes: its clusters, blocks that wait for each other, an early start."""
    made, kinds = [], driver.CUlaunchAttributeID
    if kernel.cluster > 1:
        made.append(driver.CUlaunchAttribute())
        made[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = made[-1].value.clusterDim
        size.x, size.y, size.z = kernel.cluster, 1, 1
    if kernel.together:
        made.append(driver.CUlaunchAttribute())
        made[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        made[-1].value.cooperative = 1
    if kernel.early:
        made.append(driver.CUlaunchAttribute())
        made[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        made[-1].value.programmaticStreamSerializationAllowed = 1
    return made


def configuration(driver: Any, launch: Launch) -> Any:
    """A launch in the form that the driver needs, without its stream."""
    config, kernel = driver.CUlaunchConfig(), launch.kernel
    config.gridDimX, config.gridDimY, config.gridDimZ = (*launch.grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = (*kernel.block, 1, 1)[:3]
    config.sharedMemBytes = kernel.shared
    config.attrs = attributes(driver, kernel)
    config.numAttrs = len(config.attrs)
    return config


def parameters(operand: Operand, arg: Any) -> list[tuple[Any, Any]]:
    """An argument as machine code takes it: (value, ctypes type) of each number that it is.

    Of an array that the kernel indexes numba's code wants an owner and its parent, which no kernel
    looks at, then its size, the bytes of an element, its address, its shape and its strides.
    """
    if not operand.axes:
        return [(getattr(arg, "address", arg), CTYPES[operand.letter])]
    size, item = math.prod(arg.shape), arg.dtype.itemsize
    words = 0, 0, size, item, arg.address, *arg.shape, *arg.strides
    return [(word, ctypes.c_int64) for word in words]


class Graph:
    """Launches that were captured. starts: what launched them, which keeps their arrays."""

    def __init__(self, device: Device, graph: Any, starts: list[Callable]):
        self.device, self.starts, driver = device, starts, device.driver
        self.executable = check(driver.cuGraphInstantiate(graph, 0))
        device.keep(self, driver.cuGraphExecDestroy, self.executable)
        check(driver.cuGraphDestroy(graph))

    def launch(self) -> None:
        """Put all launches on the device's stream, to run on what their arrays hold then."""
        check(self.device.driver.cuGraphLaunch(self.executable, self.device.stream))
