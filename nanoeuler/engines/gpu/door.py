# Made from book/07-a-gpu-on-paper.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gpu-kernel
"""The one door to the GPU: numba's CUDA target where a GPU can be used, else numba's simulator.

Kernels are written against `cuda` from here and nothing else of numba's CUDA target is imported
anywhere. `SIMULATED` says which it is, and why; `Counted` counts what simulated kernels read.
Left out: choosing among several GPUs (CUDA_VISIBLE_DEVICES does that), and speed (the simulator
gives each CUDA thread a Python thread; it is for small arrays).
"""

import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from typing import Any

import numpy as np
from numba import config

from nanoeuler.errors import UserError

Kernel = Any  # what `cuda.jit` makes: kernel[blocks, threads](arrays) launches it
Array = Any  # float32 in C order, NumPy or on the GPU: numba copies NumPy there and back

# What to do where the compiler is missing.
MISSING = "numba-cuda is missing: pip install 'numba-cuda[cu13]'"
# The driver's library by operating system; macOS has none.
DRIVERS = {"linux": "libcuda.so.1", "win32": "nvcuda.dll"}


def reason_to_simulate() -> str:
    """Why no real GPU can be used, in words; "" if one can. Does not import the CUDA target."""
    if config.ENABLE_CUDASIM or os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0":
        return "NUMBA_ENABLE_CUDASIM asks for the simulator"
    try:
        driver = ctypes.CDLL(DRIVERS.get(sys.platform, "libcuda"))
    except OSError:
        return "there is no CUDA driver on this machine"
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the CUDA driver finds no GPU"
    if importlib.util.find_spec("numba_cuda") is None:
        return MISSING
    return ""


def _cuda_target(simulated: bool) -> Any:
    """Import numba's CUDA target, as the simulator if asked to; return the module."""
    if simulated:
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
        config.ENABLE_CUDASIM = 1
        sys.setswitchinterval(1e-4)  # seconds; Python's 5e-3 makes every barrier wait
    for name in ("CUDA_LOW_OCCUPANCY_WARNINGS", "CUDA_WARN_ON_IMPLICIT_COPY"):
        os.environ["NUMBA_" + name] = "0"
        setattr(config, name, 0)
    return importlib.import_module("numba.cuda")


def __getattr__(name: str) -> Any:
    """`cuda` and `SIMULATED`, settled at the first use, for as long as the process lives.

    SIMULATED: "" where kernels run on a real GPU, else the reason why they are simulated.
    cuda: what kernels use: jit, grid, threadIdx, blockIdx, shared, local, syncthreads.
    """
    if name not in ("cuda", "SIMULATED"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reason = reason_to_simulate()
    globals().update(SIMULATED=reason, cuda=_cuda_target(bool(reason)))
    return globals()[name]


def compiler() -> Any:
    """numba's CUDA target as it is, which compiles without a GPU too; no driver is started."""
    if importlib.util.find_spec("numba_cuda") is None:
        raise UserError(f"no compiler for GPUs here: {MISSING}")
    if config.ENABLE_CUDASIM or os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0":
        raise UserError("this process simulates a GPU and cannot compile for one: use another")
    target = _cuda_target(False)
    importlib.import_module("numba.cuda.extending")
    return target


def driver() -> Any:
    """NVIDIA's driver, as Python calls it (cuda.bindings.driver)."""
    if importlib.util.find_spec("cuda") is None:
        raise UserError(f"no way to call the driver here: {MISSING}")
    return importlib.import_module("cuda.bindings.driver")


def blocks(n: int, size: int) -> int:
    """How many blocks of `size` cover n elements: n / size, rounded up."""
    return -(-n // size)


# %% sec-gpu-counting
class Counted:
    """A NumPy array that counts, for each element, its reads and writes. For the simulator.

    .reads and .writes are integer arrays of the array's shape. An index has a number or a slice
    for each axis, or for the first few; a number outside raises IndexError, a negative one too.
    """

    def __init__(self, array: np.ndarray):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.reads, self.writes = np.zeros(array.shape, int), np.zeros(array.shape, int)
        self._lock = threading.Lock()

    def _count(self, counts, index):
        at = index if isinstance(index, tuple) else (index,)
        for i, n in zip(at, self.shape, strict=False):  # axes not named are whole
            if not isinstance(i, slice) and not 0 <= i < n:
                raise IndexError(f"index {index} is outside of shape {self.shape}")
        with self._lock:
            counts[index] += 1

    def __getitem__(self, index):
        self._count(self.reads, index)
        return self.array[index]

    def __setitem__(self, index, value):
        self._count(self.writes, index)
        self.array[index] = value
