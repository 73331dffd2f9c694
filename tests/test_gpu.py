"""The one door to the GPU: what it says, that it opens for few; and arrays on their way through."""

import ctypes
import functools
import importlib.util
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from nanoeuler.engines.gpu.host import compile, libraries
from nanoeuler.engines.gpu.host.device import DeviceArray, parameters
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, operands
from nanoeuler.engines.gpu.lang.kernel import Kernel

ROOT = Path(__file__).parents[1]


class Library:
    """Stands in for libcuda: `started` is what cuInit returns, `found` how many GPUs it reports."""

    def __init__(self, started, found, version=13000):
        self.cuInit = lambda flags: started
        self.found, self.version = found, version

    def cuDriverGetVersion(self, version):
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = self.found
        return 0


def no_library(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    "library, compiler, reason",
    [
        (no_library, True, "no CUDA driver"),
        (Library(100, 1), True, "no GPU"),  # 100 is CUDA_ERROR_NO_DEVICE
        (Library(0, 0), True, "no GPU"),
        (Library(803, 1), True, "it was updated, so restart"),
        (Library(999, 1), True, "does not start (error 999; see nvidia-smi)"),
        (Library(0, 1, 12040), True, "of CUDA 12.4 where 13.0 is needed (install driver 580"),
        (Library(0, 1), False, "numba-cuda is missing"),
        (Library(0, 1), True, ""),
    ],
)
def test_why_there_is_no_gpu(monkeypatch, library, compiler, reason):
    monkeypatch.setattr(ctypes, "CDLL", library if callable(library) else lambda name: library)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: compiler or None)
    said = libraries.no_gpu()
    assert reason in said and bool(reason) == bool(said) and "\n" not in said


def test_linux_on_windows_needs_the_driver_of_windows(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setattr(libraries.platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    assert libraries.no_gpu() == (
        "WSL2 has no CUDA driver (install NVIDIA's on Windows, and none in here)"
    )


def test_the_door_imports_nothing_of_cuda_until_it_is_asked_to():
    """Neither on import nor to say whether there is a GPU; nor does whoever uses a GPU's modules.

    The paper, the ladder and the doctor do without; so no driver starts, and none has to be there.
    """
    script = """
import ctypes, sys
asked, library = [], ctypes.CDLL

def no_driver(name, *rest, **more):
    if name != "libcuda.so.1":
        return library(name, *rest, **more)
    asked.append(name)
    raise OSError

ctypes.CDLL = no_driver
from nanoeuler import emulator
from nanoeuler.engines.gpu import ladder
from nanoeuler.engines.gpu.host import libraries
from nanoeuler.planning import doctor
assert not asked, "importing asks for no driver"
assert libraries.no_gpu() == "there is no CUDA driver on this machine" and asked
print([m for m in sys.modules if m.startswith(("numba.cuda", "numba_cuda", "cuda"))])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_of_nvmath_nothing_is_run_but_what_multiplies(tmp_path, monkeypatch):
    """Its packages load libraries that nobody needs, here: they raise."""
    room = tmp_path / "nvmath" / "bindings"
    room.mkdir(parents=True)
    for package in room, room.parent:
        (package / "__init__.py").write_text("raise RuntimeError")
    (room / "cublas.py").write_text("from nvmath.bindings import other\nname = other.name\n")
    (room / "other.py").write_text("name = 'cuBLAS'\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "nvmath"]:
        monkeypatch.delitem(sys.modules, name)
    assert libraries.products().name == "cuBLAS"
    assert libraries.products() is sys.modules.pop("nvmath.bindings.cublas")
    del sys.modules["nvmath.bindings.other"]
    assert not [name for name in sys.modules if name.split(".")[0] == "nvmath"]


@pytest.mark.parametrize("number", ["", "1", "x"])
def test_the_driver_is_started_once_and_says_nothing(number, monkeypatch):
    calls, done = [], threading.Event()

    def retain(context, handle):
        calls.append("retain")
        done.set()

    def device(handle, at):
        calls.append(at)

    library = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGet=device,
                              cuDevicePrimaryCtxRetain=retain)  # fmt: skip
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setenv(libraries.NUMBER, number)
    libraries.start.cache_clear()
    for _ in range(2):
        libraries.start()
    assert done.wait(10 if number != "x" else 0.1) == (number != "x")
    assert calls == ([int(number or 0), "retain"] if number != "x" else [])
    libraries.start.cache_clear()


def test_only_those_who_need_the_door_import_it():
    files = [path.relative_to(ROOT) for path in (ROOT / "nanoeuler").rglob("*.py")]
    users = {
        file.as_posix()
        for file in files
        if re.search(
            r"(?m)^from nanoeuler.engines.gpu.host(.libraries)? import .*\b(libraries|no_gpu)\b",
            (ROOT / file).read_text(),
        )
    }  # fmt: skip
    needy = "host/compile", "host/device", "gemm/cublas", "ranks/nccl"
    gpu = {f"nanoeuler/engines/gpu/{name}.py" for name in needy}
    assert users == gpu | {"nanoeuler/planning/doctor.py"}


# ---- Arrays that a kernel indexes


def test_an_array_is_its_owner_size_address_shape_and_strides():
    array = DeviceArray(4096, (3, 5), np.dtype(np.float32), (20, 4))
    operand, number = operands("f[2] r")
    words, kinds = zip(*parameters(operand, array), strict=True)
    assert words == (0, 0, 15, 4, 4096, 3, 5, 20, 4) and {*kinds} == {ctypes.c_int64}
    assert parameters(number, 7) == [(7, ctypes.c_int32)]


@pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason=f"no compiler here: {libraries.MISSING}"
)
def test_machine_code_takes_as_many_words_as_a_launch_hands_it():
    """And a block's threads are limited by all of its axes."""

    def fill(x, row, value):
        x[row, cuda.threadIdx.y * 8 + cuda.threadIdx.x] = value

    kernel = Kernel(fill, "f[2] r f", (8, 4), target=(8, 0))
    text = compile.to_ptx(kernel)
    kinds = re.findall(r"\.param \.(\w+) ", text)
    arrays = DeviceArray(0, (2, 32), np.dtype(np.float32), (128, 4))
    values = zip(kernel.parameters, (arrays, 1, 1.0), strict=True)
    words = [word for operand, arg in values for word in parameters(operand, arg)]
    sizes = {"u64": 8, "b64": 8, "u32": 4, "b32": 4, "f32": 4}
    assert [sizes[kind] for kind in kinds] == [ctypes.sizeof(kind) for _, kind in words]
    assert re.search(r"\.maxntid\s+32\b", text)


class Pair(NamedTuple):
    """Where to, and what."""

    to: int
    value: float


@pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason=f"no compiler here: {libraries.MISSING}"
)
def test_arguments_in_a_tuple_are_the_same_machine_code():
    """Up to the kernel's name, in which numba writes its arguments' types."""

    def grouped(n, pair: Pair):
        if cuda.threadIdx.x < n:
            ptx.store_float(pair.to + 4 * cuda.threadIdx.x, pair.value)

    def apart(n, to, value):
        if cuda.threadIdx.x < n:
            ptx.store_float(to + 4 * cuda.threadIdx.x, value)

    texts = [compile.to_ptx(Kernel(each, "r l f", 32, target=(8, 0))) for each in (grouped, apart)]
    bare = [re.sub(r".*NumbaEnv.*", "", text.replace(compile.entry(text), "")) for text in texts]
    assert bare[0] == bare[1] and "st.global" in bare[0]


@pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason=f"no compiler here: {libraries.MISSING}"
)
def test_line_numbers_are_those_of_the_kernel_itself_and_reach_the_machine_code(monkeypatch):
    """What appendix I says of a profiler: asked for lines, numba names file and lines in the PTX.

    A helper's instructions bear the line of the kernel's def. ptxas keeps lines and text unasked.
    """

    def halved(x):
        return x / float32(2)

    def fill(x, value):
        i = cuda.grid(1)
        if i < x.shape[0]:
            x[i] = halved(value)

    kernel = Kernel(fill, "f[1] f", 32, target=(8, 0))
    target = libraries.compiler()
    asked = functools.partial(target.compile_ptx, lineinfo=True)
    monkeypatch.setattr(target, "compile_ptx", asked)
    text = compile.to_ptx(kernel)
    assert re.findall(r'\.file\s+\d+ "(.+)"', text) == [__file__]
    first = fill.__code__.co_firstlineno
    lines = {int(line) for line in re.findall(r"\.loc\s+\d+ (\d+)", text)} - {0}
    assert lines == set(range(first, first + 4)), lines
    last = [re.findall(r"\.loc\s+\d+ (\d+)", before)[-1] for before in text.split("mul.f32")[:1]]
    assert last == [str(first)], "the helper's multiplication"
    if compile.assembler() is None:
        pytest.skip("no ptxas here: pip install 'nvidia-cuda-nvcc'")
    image = compile.assemble(text, (8, 0)).image
    for section in b".debug_line", b".nv_debug_line_sass", b".nv_debug_ptx_txt":
        assert section in image, section
