# Made from book/11-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gpu-door
"""The one door to the GPU: the only module that imports CUDA, when it is asked to.

Left out: memory and launches (`device`), and which of several GPUs a process takes (`stepper.gpu`).
"""

import ctypes
import importlib
import importlib.util
import os
import platform
import sys
from contextlib import suppress
from functools import cache
from threading import Thread
from typing import Any

from nanoeuler.errors import UserError

NUMBER = "NANOEULER_GPU"  # the variable that says which GPU of this machine is this process's
# What to do where the compiler is missing.
MISSING = "numba-cuda is missing: pip install 'numba-cuda[cu13]'"
# The driver's library by operating system; macOS has none.
DRIVERS = {"linux": "libcuda.so.1", "win32": "nvcuda.dll"}
# Our compilers' version of CUDA, as cuDriverGetVersion counts it (13.0 is 13000), and the oldest
# driver that runs their code: CUDA Toolkit release notes, table of drivers.
OLDEST, OLDEST_DRIVER = 13000, "580"
# Errors of cuInit that we can explain: CUDA driver API, CUresult.
ANSWERS = {
    100: "the CUDA driver finds no GPU",
    803: "the CUDA driver is not the one that this system has loaded (it was updated, so restart)",
}


def no_gpu() -> str:
    """Why no GPU can be used, in words; "" if one can. Imports nothing of CUDA."""
    try:
        library = ctypes.CDLL(DRIVERS.get(sys.platform, "libcuda"))
    except OSError:
        if "microsoft" in platform.release().lower():
            return "WSL2 has no CUDA driver (install NVIDIA's on Windows, and none in here)"
        return "there is no CUDA driver on this machine"
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    if answer := library.cuInit(0):
        other = f"the CUDA driver does not start (error {answer}; see nvidia-smi)"
        return ANSWERS.get(answer, other)
    if library.cuDriverGetVersion(ctypes.byref(version)) or version.value < OLDEST:
        has = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return (f"its driver is too old, of CUDA {has} where {OLDEST // 1000}.0 is needed (install "
                f"driver {OLDEST_DRIVER} or newer)")  # fmt: skip
    if library.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return ANSWERS[100]
    return "" if importlib.util.find_spec("numba_cuda") else MISSING


@cache
def start() -> None:
    """Begin to start the driver and this process's GPU, on a thread; what fails is found later."""

    def begin() -> None:
        with suppress(OSError, ValueError):
            library = ctypes.CDLL(DRIVERS.get(sys.platform, "libcuda"))
            number = int(os.environ.get(NUMBER) or 0)
            handle, context = ctypes.c_int(0), ctypes.c_void_p()
            if not library.cuInit(0) and not library.cuDeviceGet(ctypes.byref(handle), number):
                library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)

    Thread(target=begin).start()


def compiler() -> Any:
    """numba's CUDA target, which compiles without a GPU too; no driver is started."""
    if importlib.util.find_spec("numba_cuda") is None:
        raise UserError(f"no compiler for GPUs here: {MISSING}")
    simulates = importlib.import_module("numba").config.ENABLE_CUDASIM
    if simulates or os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0":
        raise UserError("this process simulates a GPU and cannot compile for one: use another")
    target = importlib.import_module("numba.cuda")
    importlib.import_module("numba.cuda.extending")
    return target


def driver() -> Any:
    """NVIDIA's driver, as Python calls it (cuda.bindings.driver)."""
    if importlib.util.find_spec("cuda") is None:
        raise UserError(f"no way to call the driver here: {MISSING}")
    return importlib.import_module("cuda.bindings.driver")


def products() -> Any:
    """NVIDIA's matrix products, as Python calls them (nvmath.bindings.cublas).

    Importing the packages `nvmath` and `nvmath.bindings` would load six libraries, of which we need
    one. So empty modules stand in for these two while the one is imported.
    """
    if importlib.util.find_spec("nvmath") is None:
        what = "pip install 'nvmath-python[cu13]' (the extra gpu-vendor)"
        raise UserError(f"no cuBLAS here: {what}, or let our own kernels multiply")
    passed = [name for name in ("nvmath", "nvmath.bindings") if name not in sys.modules]
    for name in passed:
        sys.modules[name] = importlib.util.module_from_spec(importlib.util.find_spec(name))
    try:
        return importlib.import_module("nvmath.bindings.cublas")
    finally:
        for name in passed:
            del sys.modules[name]


def exchanges() -> Any:
    """NVIDIA's NCCL, as Python calls it (cupy.cuda.nccl)."""
    if importlib.util.find_spec("cupy") is None:
        what = "pip install cupy-cuda13x nvidia-nccl-cu13 (the extra gpu-ranks)"
        raise UserError(f"no NCCL here, which several GPUs need: {what}, or use one GPU")
    return importlib.import_module("cupy.cuda.nccl")
