"""`python first_parts.py train ...`: a command of nanoeuler that says what its start is spent on.

Each line, on stderr: seconds since the process began, when a part had ended; how long it took; its
name. Parts may hold others.
"""

import sys
import time
from functools import wraps
from importlib import import_module

GPU = "nanoeuler.engines.gpu"
PARTS = [
    ("nanoeuler.data.dataset", "Prepared.__init__"), ("nanoeuler.training.run", "initialise"),
    ("nanoeuler.planning.gpu_memory", "parts_for"), ("nanoeuler.training.loop", "rewind"),
    (f"{GPU}.host.device", "Device.__init__"), (f"{GPU}.host.device", "compiled"),
    (f"{GPU}.host.device", "Device.load_all"), (f"{GPU}.host.device", "Device.capture"),
    (f"{GPU}.gemm.cublas", "Library.__init__"), (f"{GPU}.step.recording", "in_halves"),
    (f"{GPU}.step.recording", "ProgramBuilder.build_step"),
    (f"{GPU}.step.stepper", "CudaStepper.push"), (f"{GPU}.step.stepper", "CudaStepper.load"),
    (f"{GPU}.step.stepper", "CudaStepper.step"),
]  # fmt: skip


def tell(seconds, name):
    """A line about a part that has just ended."""
    from nanoeuler.training.clock import Clock

    print(f"{Clock(0.0)():7.2f} {seconds:7.2f}  {name}", file=sys.__stderr__, flush=True)


def watch(module, path):
    """Have a function, or a method of a class, say how long each call took."""
    *owner, name = path.split(".")
    holder = import_module(module)
    for each in owner:
        holder = getattr(holder, each)
    function = getattr(holder, name)

    @wraps(function)
    def timed(*args, **kwargs):
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            tell(time.perf_counter() - began, path)

    setattr(holder, name, timed)


if __name__ == "__main__":
    began = time.perf_counter()
    from nanoeuler.engines.registry import warm_up

    warm_up("cuda")
    from nanoeuler import api  # noqa: F401
    from nanoeuler.__main__ import main

    for part in PARTS:
        watch(*part)
    tell(time.perf_counter() - began, "imports")
    sys.exit(main())
