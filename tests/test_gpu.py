"""The one door to the GPU: when it simulates, that it opens for few, and that counts count."""

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nanoeuler.engines.gpu import door
from nanoeuler.engines.gpu.door import cuda

ROOT = Path(__file__).parents[1]


class Driver:
    """Stands in for libcuda: `started` is what cuInit returns, `found` how many GPUs it reports."""

    def __init__(self, started, found):
        self.cuInit = lambda flags: started
        self.found = found

    def cuDeviceGetCount(self, count):
        count._obj.value = self.found
        return 0


def no_driver(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    "asked, driver, compiler, reason",
    [
        ("1", Driver(0, 1), True, "asks for the simulator"),
        ("0", no_driver, True, "no CUDA driver"),
        ("0", Driver(100, 1), True, "no GPU"),  # 100 is CUDA_ERROR_NO_DEVICE
        ("0", Driver(0, 0), True, "no GPU"),
        ("0", Driver(0, 1), False, "numba-cuda is missing"),
        ("0", Driver(0, 1), True, ""),
    ],
)
def test_reason_to_simulate(monkeypatch, asked, driver, compiler, reason):
    monkeypatch.setattr(door.config, "ENABLE_CUDASIM", 0)
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", asked)
    library = driver if callable(driver) else lambda name: driver
    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: compiler or None)
    found = door.reason_to_simulate()
    assert reason in found and bool(reason) == bool(found)


def test_detection_does_not_import_the_cuda_target_and_njit_survives_it():
    script = """
import ctypes, sys
from numba import njit

def no_driver(name, *rest, **more):
    if name != "libcuda.so.1" or asked:
        return library(name, *rest, **more)
    assert "numba.cuda" not in sys.modules, "imported before the decision"
    asked.append(name)
    raise OSError

before = njit(lambda x: x + 1)
assert before(1) == 2
asked, library, ctypes.CDLL = [], ctypes.CDLL, no_driver
from nanoeuler.engines.gpu import door
assert not asked, "importing the door asks for no driver"
assert door.SIMULATED == "there is no CUDA driver on this machine" and asked
ctypes.CDLL = library
assert before(2) == 3 and before(2.5) == 3.5 and njit(lambda x: x * 2)(4) == 8
"""
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_no_driver_is_asked_for_by_importing_what_does_not_need_one():
    """The door asks on import, so those who need it import it when they do."""
    files = [path.relative_to(ROOT) for path in (ROOT / "nanoeuler").rglob("*.py")]
    names = [".".join(file.with_suffix("").parts) for file in files if file.stem[:2] != "__"]
    users = "nanoeuler.planning.doctor", "nanoeuler.book"  # it says what the door says; it is slow
    names = [name for name in names if ".gpu." not in name and name not in users]
    names += ["nanoeuler.engines.gpu", "nanoeuler.engines.gpu.flash_tiles"]
    script = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print([m for m in sys.modules if m.startswith(("numba.cuda", "nanoeuler.engines.gpu."))])
"""
    done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True)
    assert done.stdout.strip() == "['nanoeuler.engines.gpu.flash_tiles']", done.stderr


def test_blocks_cover_and_no_more():
    for n in range(1, 20):
        for size in range(1, 8):
            assert (door.blocks(n, size) - 1) * size < n <= door.blocks(n, size) * size


def test_counted_counts_elements_and_slices():
    array = door.Counted(np.arange(12.0).reshape(3, 4))
    assert array[1, 2] == 6 and array[2].sum() == 38 and array[:, 2].tolist() == [2, 6, 10]
    array[0, 0] = 5
    assert array.array[0, 0] == 5 and array.shape == (3, 4) and array.dtype == float
    assert array.reads.tolist() == [[0, 0, 1, 0], [0, 0, 2, 0], [1, 1, 2, 1]]
    assert array.writes.sum() == array.writes[0, 0] == 1


@pytest.mark.parametrize("index", [(-1, 0), (0, -1), (3, 0), (0, 4)])
def test_counted_refuses_what_lies_outside(index):
    array = door.Counted(np.zeros((3, 4)))
    with pytest.raises(IndexError, match="outside"):
        array[index]
    with pytest.raises(IndexError, match="outside"):
        array[index] = 1.0
    assert array.reads.sum() == array.writes.sum() == 0


@pytest.mark.skipif(not door.SIMULATED, reason="only a simulated kernel can take a Counted array")
def test_no_count_is_lost_between_threads():
    @cuda.jit
    def everybody_reads(x, out):
        for _ in range(50):
            out[cuda.threadIdx.x] += x[0]

    x, out = door.Counted(np.ones(1)), door.Counted(np.zeros(8))
    everybody_reads[3, 8](x, out)
    assert x.reads.sum() == out.reads.sum() == out.writes.sum() == 3 * 8 * 50
    assert (out.array == 150).all()
