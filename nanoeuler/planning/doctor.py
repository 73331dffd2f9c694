# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli-doctor
"""What this machine offers for training, and what may slow it down. Changes nothing."""

import importlib.util
import os
import platform
import re
import shutil
from importlib import metadata
from pathlib import Path

from llvmlite import binding
from rich.filesize import decimal

from nanoeuler import __version__
from nanoeuler.engines.cpu import llvm, norms
from nanoeuler.engines.cpu.stepper import SHARDS, cores
from nanoeuler.engines.gpu.host.libraries import no_gpu
from nanoeuler.engines.ranks.launch import found
from nanoeuler.measurements import device
from nanoeuler.planning import cards
from nanoeuler.planning.memory import limit
from nanoeuler.planning.plan import product_rate

# Environment variables that make NumPy's BLAS or numba slow, or pin them to a part of the machine.
PINNING = (
    "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "MKL_DEBUG_CPU_TYPE", "NPY_DISABLE_CPU_FEATURES", "NUMBA_DISABLE_JIT", "NUMBA_CPU_NAME",
    "NUMBA_CPU_FEATURES", "NUMBA_OPT",
)  # fmt: skip
# The vector units that llvm.vector_unit knows: (float32 lanes, registers) -> name.
UNITS = {(16, 32): "AVX-512", (8, 16): "AVX2", (4, 32): "NEON", (4, 16): "plain"}


def vector_units() -> str:
    """The vector unit that LLVM finds in this processor, and what our kernels are compiled for."""
    features = binding.get_host_cpu_features().flatten()
    here, used = llvm.vector_unit(features), (llvm.LANES, llvm.REGISTERS)
    text = f"{UNITS[here]} in this processor; the kernels are compiled for {UNITS[used]}"
    text += f", {used[1]} registers of {used[0]} float32"
    return text if used == here else f"{text}: something holds numba back"


def memory() -> str:
    """The free and total memory of this machine, as far as known, in words."""
    table = Path("/proc/meminfo")  # Linux alone
    free = re.search(r"MemAvailable: *(\d+) kB", table.read_text()) if table.exists() else None
    total = decimal(int(limit())) if limit() < float("inf") else "an unknown size"
    return (f"{decimal(int(free[1]) * 1024)} free of " if free else "") + total


def cached_kernels() -> str:
    """The folder in which compiled kernels are kept, and whether it can be written."""
    folder = Path(norms.rmsnorm._cache.cache_path)  # of numba's dispatcher: no public way
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(above, os.W_OK):
        return f"kept in {folder}"
    return f"compiled at each start: {folder} cannot be written; set NUMBA_CACHE_DIR to a folder"


def gpu() -> str:
    """The GPU of this machine, or why none can be used."""
    if reason := no_gpu():
        return reason
    from nanoeuler.planning import gpu_memory  # and with it all of the GPU's modules

    return gpu_memory.found()


def products_rate(threads: int) -> str:
    """The rate of the engine's matrix products on one core and on `threads` threads, in words."""
    one, together = (product_rate(n) / 1e9 for n in (1, threads))
    return f"{one:.0f} GFLOP/s on one core, {together:.0f} on {threads} threads"


def report() -> str:
    """The findings, as lines of text."""
    versions = [f"{name} {metadata.version(name)}" for name in ("numpy", "numba", "llvmlite")]
    pinned = [f"{name}={os.environ[name]}" for name in PINNING if name in os.environ]
    duckdb, threads = importlib.util.find_spec("duckdb"), min(cores(), SHARDS)
    lines = [
        f"system     Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        f"packages   nanoeuler {__version__}, {', '.join(versions)}",
        f"processor  {device()}",
        f"vectors    {vector_units()}",
        f"products   {products_rate(threads)}",
        f"kernels    {cached_kernels()}",
        f"training   on {threads} of {os.cpu_count()} cores; --threads takes fewer",
        f"memory     {memory()}",
        f"disk       {decimal(shutil.disk_usage('.').free)} free in this folder",
        f"parquet    {'duckdb is here' if duckdb else 'no duckdb: pip install -e .[data]'}",
        f"ranks      {found()}",
        f"GPU        {gpu()}",
        f"variables  {', '.join(pinned) or 'none that slows anything down'}",
    ]
    if pinned:
        names = " ".join(pair.split("=")[0] for pair in pinned)
        lines.append(f"           if training is slow: unset {names}")
    title = "GPUs that people own, and whether we have measured training on them"
    return "\n".join([*lines, "", title, cards.table()])
