# Made from book/07c-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-device
"""A GPU: memory on it, kernels loaded into it, launches run by it. Nothing here starts on import.

NVIDIA's driver comes from the door. Left out: streams and graphs, whose handles are handed in.
"""

import ctypes
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanoeuler.engines.gpu import door
from nanoeuler.engines.gpu.compile import Code, assemble, entry, machine, to_ptx
from nanoeuler.engines.gpu.instruction import Operand
from nanoeuler.engines.gpu.kernel import Kernel, Launch, Map

MAP_BYTES = 128  # of an encoded tensor map; CUDA driver API, CUtensorMap
# ctypes of a kernel's arguments, by the letter of their type.
CTYPES = {"r": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}


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
    """What a call of the driver returned, after its error code; RuntimeError if that is not 0."""
    error, *values = outcome
    if int(error):
        raise RuntimeError(f"the GPU's driver: {error.name}")
    return values[0] if len(values) == 1 else values


def number_of(driver: Any, handle: Any, name: str) -> int:
    """One of the numbers that the driver knows of a GPU."""
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return check(driver.cuDeviceGetAttribute(attribute, handle))


class Memory:
    """One GPU and what it stores.

    capability: of its architecture, as (9, 0); multiprocessors: how many it has.
    """

    def __init__(self, number: int = 0):
        self.driver = driver = door.driver()
        check(driver.cuInit(0))
        self.handle = check(driver.cuDeviceGet(number))
        context = check(driver.cuDevicePrimaryCtxRetain(self.handle))  # the one that others use
        check(driver.cuCtxSetCurrent(context))
        self.name = check(driver.cuDeviceGetName(64, self.handle)).split(b"\0")[0].decode()
        parts = "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR"
        self.capability = tuple(number_of(driver, self.handle, part) for part in parts)
        self.multiprocessors = number_of(driver, self.handle, "MULTIPROCESSOR_COUNT")

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """Memory for an array in C order, as it is; freed when the array is forgotten."""
        kind = np.dtype(dtype)
        steps = [math.prod(shape[i + 1 :]) * kind.itemsize for i in range(len(shape))]
        size = math.prod(shape) * kind.itemsize
        address = int(check(self.driver.cuMemAlloc(max(1, size))))
        made = DeviceArray(address, tuple(shape), kind, tuple(steps))
        weakref.finalize(made, self.driver.cuMemFree, address).atexit = False
        return made

    def array(self, values: np.ndarray) -> DeviceArray:
        """A copy on the GPU of a NumPy array, in C order."""
        values = np.ascontiguousarray(values)
        made = self.empty(values.shape, values.dtype)
        check(self.driver.cuMemcpyHtoD(made.address, values.ctypes.data, values.nbytes))
        return made

    def host(self, array: DeviceArray) -> np.ndarray:
        """A copy as a NumPy array of an array in C order; waits for what was launched before."""
        values = np.empty(array.shape, array.dtype)
        check(self.driver.cuCtxSynchronize())
        check(self.driver.cuMemcpyDtoH(values.ctypes.data, array.address, values.nbytes))
        return values


def encode(memory: Memory, view: Map) -> DeviceArray:
    """A tensor map in the GPU's memory (cuTensorMapEncodeTiled: innermost axes first)."""
    driver, array = memory.driver, view.array
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
    return memory.array(np.frombuffer(words, np.uint8))


def attributes(driver: Any, kernel: Kernel) -> list[Any]:
    """What a launch says of a kernel's clusters, and of blocks that wait for each other."""
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
    return made


def configuration(driver: Any, launch: Launch) -> Any:
    """A launch as the driver wants to be told of it, without its stream."""
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


class Device(Memory):
    """One GPU that runs launches."""

    def __init__(self, number: int = 0):
        super().__init__(number)
        self.functions: dict[Kernel, Any] = {}

    def load(self, kernel: Kernel, code: Code | None = None) -> Any:
        """The kernel's handle; compiled here, or before (`compile.build_all`) and handed in."""
        if kernel in self.functions:
            return self.functions[kernel]
        target, driver = machine(kernel, self.capability), self.driver
        code = code or assemble(to_ptx(kernel), target)
        if code.image and code.target != target:  # machine code of another machine
            code = assemble(code.text, target)
        module = check(driver.cuModuleLoadData(code.image or code.text.encode() + b"\0"))
        function = check(driver.cuModuleGetFunction(module, entry(code.text).encode()))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, limit, kernel.shared))
        return self.functions.setdefault(kernel, function)

    def prepare(self, launch: Launch) -> Callable[[int], None]:
        """A function of a stream's handle that puts the launch on that stream, again and again.

        Maps are encoded once, here; the launch's arrays live as long as the function.
        """
        kernel, function = launch.kernel, self.load(launch.kernel)
        encoded = [encode(self, arg) if isinstance(arg, Map) else arg for arg in launch.args]
        pairs = [
            pair
            for operand, arg in zip(kernel.parameters, encoded, strict=True)
            for pair in parameters(operand, arg)
        ]
        values, types = zip(*pairs, strict=True)
        config = configuration(self.driver, launch)

        def start(stream: int = 0, _alive: Any = (launch, encoded)) -> None:
            config.hStream = stream
            check(self.driver.cuLaunchKernelEx(config, function, (values, types), 0))

        return start

    def run(self, launch: Launch, stream: int = 0) -> None:
        """Put a launch on a stream; it runs when its turn comes."""
        self.prepare(launch)(stream)
