# Made from book/11-fine-tuning-and-chat.md by nanoeuler.book: edit the chapter, not this file.


# %% book/11-fine-tuning-and-chat.md:1397
"""What this machine offers to training, and what may slow it down. Measures and changes nothing."""

import os
import platform
from importlib import metadata

from llvmlite import binding

from nanoeuler.gpu import SIMULATED
from nanoeuler.measurements import device
from nanoeuler.parallel import SHARDS, cores

# Environment variables that make NumPy's BLAS or numba slow, or pin them to a part of the machine.
PINNING = (
    "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "MKL_DEBUG_CPU_TYPE", "NPY_DISABLE_CPU_FEATURES", "NUMBA_DISABLE_JIT", "NUMBA_CPU_NAME",
    "NUMBA_CPU_FEATURES", "NUMBA_OPT",
)  # fmt: skip
VECTORS = ("avx512f", "avx2", "fma", "sve", "neon")  # instructions that our kernels profit from


def report():
    """The findings, as lines of text."""
    known = binding.get_host_cpu_features()
    vectors = [name for name in VECTORS if known.get(name)]
    packages = ("nanoeuler", "numpy", "numba", "llvmlite")
    pinned = [f"{name}={os.environ[name]}" for name in PINNING if name in os.environ]
    lines = [
        f"system     Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        f"packages   {', '.join(f'{name} {metadata.version(name)}' for name in packages)}",
        f"processor  {device()}; vector instructions: {' '.join(vectors) or 'none known'}",
        f"training   on {min(cores(), SHARDS)} threads",
        f"GPU        {SIMULATED or 'found; this version trains on the CPU all the same'}",
        f"variables  {', '.join(pinned) or 'none that slows anything down'}",
    ]
    if pinned:
        names = " ".join(pair.split("=")[0] for pair in pinned)
        lines.append(f"           if training is slow: unset {names}")
    return "\n".join(lines)


__all__ = [
    "PINNING",
    "VECTORS",
    "report",
]
