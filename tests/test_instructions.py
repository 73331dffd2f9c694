"""The kernels compiled for AVX-512, for AVX2 and for plain x86-64: right, and with its registers.

Each in a process of its own, because numba reads its processor once: this file, run as a script.
The older two run test_cpu.py's tests of products, operations and whole models again.
"""

import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from llvmlite import binding

from nanoeuler.engines.cpu import elementwise, gemm, norms

# Unit -> NUMBA_CPU_NAME and NUMBA_CPU_FEATURES (none: this processor itself), lanes of float32, and
# what its machine code must not name: other units' registers, and a prefix of other instructions.
UNITS = {
    "AVX-512": (None, 16, None),
    "AVX2": (("haswell", "+avx,+avx2,+fma"), 8, r"%zmm|%[xy]mm(1[6-9]|[23]\d)|%k[0-7]"),
    "plain x86-64": (("x86-64", "+sse2"), 4, r"%[yz]mm|%xmm(1[6-9]|[23]\d)|%k[0-7]|^\s+v[a-z]"),
}
REGISTERS = {16: "%zmm", 8: "%ymm", 4: "%xmm"}
NEEDS = {"AVX-512": "avx512f", "AVX2": "avx2", "plain x86-64": "sse2"}


@pytest.mark.long
@pytest.mark.parametrize("unit", UNITS)
def test_instructions(unit, tmp_path):
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("needs an x86-64 processor: the instructions are its own")
    if not binding.get_host_cpu_features().get(NEEDS[unit]):
        pytest.skip(f"this processor has no {unit}")
    processor, lanes, foreign = UNITS[unit]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_CPU")}
    environment["NUMBA_CACHE_DIR"] = str(tmp_path)  # numba shows no machine code from a cache
    tests = Path(__file__).resolve().parent
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (tests.parent, tests / "helpers")))
    if processor:
        environment |= dict(zip(("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"), processor, strict=True))
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled_for, kernels = json.loads(done.stdout)
    assert compiled_for == lanes
    assert {"multiply", "multiply_heads", "rmsnorm", "cross_entropy", "_adamw"} <= kernels.keys()
    for name, code in kernels.items():
        # The products fill the widest registers there are; of other loops the compiler decides.
        assert not name.startswith("multiply") or REGISTERS[lanes] in code, name
        if foreign:
            line = re.search(foreign, code, re.MULTILINE)
            assert not line, f"{name}: {line}"


def parts():
    """Products of drawn sizes and every operation on odd ones: they end within a vector."""
    import test_cpu

    test_cpu.test_products()
    test_cpu.test_triangles()
    test_cpu.test_operations(test_cpu.CpuEngine, test_cpu.SIZES["odd"])


def whole_steps():
    """Compare loss and gradients with the reference's, for every architecture."""
    from test_cpu import MODELS, RAGGED, SETTINGS, compare

    from nanoeuler.engines.cpu.engine import CpuEngine

    engine = CpuEngine()
    for config, batch, positions in MODELS.values():
        compare(config, batch, positions, engine)
    for setting in SETTINGS:
        compare(replace(RAGGED, **setting, n_predict=1), 2, 37, engine)
    for integrator, h in (("heun", 0.7), ("rk4", 1.5)):
        shared = replace(RAGGED, n_layers=4, repeat=2, integrator=integrator, step_size=h)
        compare(shared, 2, 37, engine)


def training_steps():
    """A step downhill of two models, which between them use every kernel."""
    from test_cpu import GPT2, RAGGED, Descent, problem

    from nanoeuler.engines.registry import make_stepper
    from nanoeuler.training import optim

    for config in (RAGGED, GPT2):
        w, tokens, targets, _ = problem(config, 30, 37)
        stepper = make_stepper("cpu", w, Descent(limit=1), threads=2)
        (taken,) = stepper.step(tokens, targets, lr=0.1, number=1)
        assert stepper.sums(tokens, targets)[0] < taken.sums[0]
        optim.AdamW(w).update(w, stepper.gradients, 1e-3, 1)  # compiles it, to be looked at


def machine_code():
    """Name -> assembly of every kernel that has been compiled, all its signatures together."""
    from numba.core.dispatcher import Dispatcher

    from nanoeuler.training import optim

    named = vars(elementwise) | vars(norms) | vars(gemm) | vars(optim)
    named = {name: getattr(x, "dispatcher", x) for name, x in named.items()}
    kernels = {name: x for name, x in named.items() if isinstance(x, Dispatcher) and x.signatures}
    return {name: "\n".join(x.inspect_asm().values()) for name, x in kernels.items()}


if __name__ == "__main__":
    from nanoeuler.engines.cpu.llvm import LANES

    training_steps()
    if "NUMBA_CPU_NAME" in os.environ:  # this processor itself is what test_cpu.py is about
        parts()
        whole_steps()
    print(json.dumps([LANES, machine_code()]))
