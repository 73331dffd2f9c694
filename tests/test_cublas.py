"""cuBLAS through its door: a stand-in that multiplies as the manual says, on real memory."""

import ctypes
import importlib.util
import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from lazy_driver import Driver

from nanoeuler import measurements
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.gemm import cublas
from nanoeuler.engines.gpu.gemm.cublas import Gemm
from nanoeuler.engines.gpu.host import device
from nanoeuler.engines.gpu.step import backends
from nanoeuler.engines.gpu.step.matmul import Multiplier
from nanoeuler.errors import UserError

TYPES = {0: np.float32, 14: np.uint16}  # CUDA_R_32F, CUDA_R_16BF
COMPUTE = {"COMPUTE_32F": 68, "COMPUTE_32F_FAST_TF32": 77}
WAYS = list(itertools.product(("NT", "NN", "TN"), ("bf16", "tf32", "float32"), (False, True)))


def tf32(values):
    """float32 cut to the 10 bits of mantissa that tensor cores read of it."""
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


class Binding:
    """Stands in for nvmath.bindings.cublas, on the lazy driver's list of work."""

    ComputeType, GemmAlgo = SimpleNamespace(**COMPUTE), SimpleNamespace(DFALT=-1)
    Math = SimpleNamespace(DISALLOW_REDUCED_PRECISION_REDUCTION=16)

    def __init__(self, driver):
        self.driver, self.calls, self.stream, self.space = driver, [], None, None

    def create(self):
        assert self.driver.captured is None
        return 0xB1A5

    def destroy(self, handle):
        self.calls.append("destroy")

    def set_math_mode(self, handle, mode):
        assert handle == 0xB1A5
        self.calls.append(mode)

    def set_stream(self, handle, stream_id):
        self.stream, self.space = stream_id, None  # the manual: cublasSetStream forgets it

    def set_workspace(self, handle, workspace, workspace_size_in_bytes):
        assert self.driver.taken[workspace].size == workspace_size_in_bytes
        self.space = workspace

    def gemm_ex(
        self, handle, transa, transb, m, n, k, alpha, a, atype, lda, b, btype, ldb, beta, c, ctype,
        ldc, compute_type, algo,
    ):  # fmt: skip
        assert self.space is not None, "it would ask for memory in a capture"
        rows_a, rows_b = k if transa else m, n if transb else k
        assert (lda, ldb, ldc) >= (rows_a, rows_b, m)
        alpha, beta = (ctypes.c_float.from_address(x).value for x in (alpha, beta))
        self.calls.append((self.stream, compute_type, algo))

        def columns(address, kind, rows, count, distance):
            size = distance * (count - 1) + rows
            there = (ctypes.c_uint8 * (size * TYPES[kind]().itemsize)).from_address(address)
            flat = np.frombuffer(there, TYPES[kind])
            steps = flat.itemsize, distance * flat.itemsize
            return np.lib.stride_tricks.as_strided(flat, (rows, count), steps)

        def read(matrix):
            values = from_bf16(matrix) if matrix.dtype == np.uint16 else matrix
            return (tf32(values.copy()) if compute_type == 77 else values).astype(np.float64)

        def act():
            A = read(columns(a, atype, rows_a, m if transa else k, lda))
            B = read(columns(b, btype, rows_b, k if transb else n, ldb))
            C = columns(c, ctype, m, n, ldc)
            total = alpha * (A.T if transa else A) @ (B.T if transb else B)
            total += beta * read(C) if beta else 0
            C[...] = to_bf16(total.astype(np.float32)) if ctype == 14 else total

        self.driver.put(act)


@pytest.fixture
def gpu(monkeypatch):
    driver = Driver(room=1 << 26)
    made = Binding(driver)
    monkeypatch.setattr(device.libraries, "driver", lambda: driver)
    monkeypatch.setattr(cublas.libraries, "products", lambda: made)
    opened = device.Device()
    opened.binding = made
    return opened


def there(gpu, values, gap):
    """A matrix on the device with `gap` elements of rubbish behind each row."""
    rows, columns = values.shape
    whole = np.full((rows, columns + gap), 99, values.dtype)
    whole[:, :columns] = values
    base = gpu.array(whole)
    return gpu.part(base, 0, values.shape, values.dtype, base.strides)


def setting(gpu, layout, compute, out, m=5, n=7, k=3):
    """a, b, c on the device, each with rows further apart than they are long; and in float64."""
    rng = np.random.default_rng(3)
    shapes = (m, k) if layout[0] == "N" else (k, m), (n, k) if layout[1] == "T" else (k, n), (m, n)
    exact, arrays = [], []
    for shape, kind, gap in zip(shapes, (compute, compute, out), (1, 2, 5), strict=True):
        values = rng.standard_normal(shape).astype(np.float32)
        values = to_bf16(values) if kind == "bf16" else values
        arrays.append(there(gpu, values, gap))
        exact.append((from_bf16(values) if kind == "bf16" else values).astype(np.float64))
    return arrays, exact


def expected(layout, exact, add):
    """The product in float64, and the same of absolute values, by which errors are measured."""

    def whole(a, b, c):
        return (a.T if layout[0] == "T" else a) @ (b.T if layout[1] == "T" else b) + c

    a, b, c = exact
    return whole(a, b, c * add), whole(abs(a), abs(b), abs(c))


@pytest.mark.parametrize(("layout", "compute", "add"), WAYS)
@pytest.mark.parametrize("out", ["float32", "bf16"])
def test_what_the_library_is_told_describes_the_product(gpu, layout, compute, add, out):
    (a, b, c), exact = setting(gpu, layout, compute, out)
    if out == "bf16" and compute != "bf16":
        with pytest.raises(UserError, match="not so"):
            Gemm(layout, (a, b, c), compute, add)
        return
    start = Gemm(layout, (a, b, c), compute, add).prepare(gpu)
    start(3)
    found = gpu.host(c)
    found = (from_bf16(found) if out == "bf16" else found).astype(np.float64)
    whole, size = expected(layout, exact, add)
    # An operand of tf32 is off by 2^-10 of itself, the result by its own rounding.
    rounding = 2.0**-8 if out == "bf16" else 2.0**-24
    bound = (rounding + (2.1 * 2.0**-10 if compute == "tf32" else 0)) * size
    assert (abs(found - whole) <= bound).all()
    whole = gpu.host(c.owner)  # and nothing behind the rows was touched
    assert (whole[:, 7:] == 99).all()
    assert gpu.binding.calls[0] == 16
    assert gpu.binding.calls[1] == (3, 77 if compute == "tf32" else 68, -1)


def test_a_product_is_captured_and_played_again(gpu):
    (a, b, c), exact = setting(gpu, "TN", "float32", "float32")
    start = Gemm("TN", (a, b, c), "float32", add=True).prepare(gpu)
    before = gpu.memory_used()
    graph = gpu.capture([start])
    assert gpu.memory_used() == before and (gpu.host(c) == exact[2].astype(np.float32)).all()
    for _ in range(3):
        graph.launch()
    whole = expected("TN", exact, 0)[0] * 3 + exact[2]
    assert np.allclose(gpu.host(c), whole, rtol=1e-6, atol=1e-6)
    assert gpu.binding.calls[1][0] == gpu.stream


def test_one_library_serves_all_products_of_a_device(gpu):
    (a, b, c), _ = setting(gpu, "NN", "bf16", "float32")
    spaces = {}
    for _ in range(2):
        Gemm("NN", (a, b, c)).prepare(gpu)(0)
        spaces[gpu.binding.space] = True
    assert len(spaces) == 1 and gpu.binding.calls.count(16) == 1


def array(shape, kind=np.float32, strides=None):
    kind = np.dtype(kind)
    return device.DeviceArray(
        4096, shape, kind, strides or (shape[1] * kind.itemsize, kind.itemsize)
    )


@pytest.mark.parametrize(
    ("words", "made"),
    {
        "no product TT": lambda: Gemm("TT", (array((2, 2)),) * 3, "float32"),
        "no product NN in half": lambda: Gemm("NN", (array((2, 2)),) * 3, "half"),
        "NT: (2, 3) by (4, 2) does not give (2, 4)": lambda: Gemm(
            "NT", (array((2, 3)), array((4, 2)), array((2, 4))), "float32"),
        "does not give (4, 2)": lambda: Gemm(
            "NT", (array((2, 3)), array((4, 3)), array((4, 2))), "float32"),
        "bf16: A, B and C are float32, float32, float32": lambda: Gemm(
            "NN", (array((2, 2)),) * 3),
        "rows of B dense": lambda: Gemm(
            "NN", (array((2, 2)), array((2, 2), strides=(4, 8)), array((2, 2))), "float32"),
        "rows of C dense": lambda: Gemm(
            "NN", (array((2, 2)), array((2, 2)), array((2, 2), strides=(4, 4))), "float32"),
    }.items(),
)  # fmt: skip
def test_what_is_no_product_is_refused(words, made):
    with pytest.raises(UserError, match=re.escape(words)):
        made()


def test_without_the_library_one_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="extra gpu-vendor"):
        cublas.libraries.products()


def test_who_multiplies_is_as_one_wishes(monkeypatch):
    monkeypatch.delenv("NANOEULER_PRODUCTS", raising=False)
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert backends.multiplier() is Multiplier
    monkeypatch.setenv("NANOEULER_PRODUCTS", "cublas")
    with pytest.raises(UserError, match="there is no cuBLAS here"):
        backends.multiplier()
    monkeypatch.setattr(backends, "find_spec", lambda name: name)
    found = {}
    for wish in "cublas", "ours", "fastest", "":
        monkeypatch.setenv("NANOEULER_PRODUCTS", wish)
        found[wish] = backends.multiplier().__name__
    assert found == {"cublas": "Library", "ours": "Multiplier", "fastest": "Fastest", "": "Fastest"}
    monkeypatch.setenv("NANOEULER_PRODUCTS", "torch")
    with pytest.raises(UserError, match="one of ours, fastest, cublas, and not 'torch'"):
        backends.multiplier()


def test_the_choice_is_what_was_measured():
    """On an H200, sizes of the presets' steps: ends that the library has, and those that it won."""
    best = {}
    for row in measurements.load("kernels"):
        plain = row["what"].startswith("step ") and "in turn" not in row["what"]
        if plain and row["unit"] == "ms" and row["peer"] == "cuBLAS":
            end = "add" if "added" in row["what"] else "store"
            key = end, row["what"], row["case"]
            best[key] = min(best.get(key, 9.0), row["value"] / row["peer_value"])
    mean = {}
    for end in "store", "add":
        ratios = [x for key, x in best.items() if key[0] == end and "gelu" not in key[1]]
        ratios = [x for x in ratios if x > 0.75]  # those below end in GELU or SwiGLU, after all
        mean[end] = float(np.exp(np.mean(np.log(ratios))))
    assert len(best) > 40 and mean["store"] > 1.02 and mean["add"] < 0.98, mean
    assert backends.Fastest.ends == ("store",)


@pytest.mark.skipif(
    importlib.util.find_spec("nvmath") is None,
    reason="nvmath is not installed (extra: gpu-vendor)",
)
def test_the_stand_in_takes_the_arguments_that_the_binding_takes():
    binding = cublas.libraries.products()
    for name in "create destroy set_math_mode set_stream set_workspace gemm_ex".split():
        said = getattr(binding, name).__doc__.split("\n")[0]
        words = said[said.index("(") + 1 : said.index(")")].split(",")
        theirs = [word.split()[-1] for word in words if word.strip()]
        code = getattr(Binding, name).__code__
        assert theirs == [*code.co_varnames[1 : code.co_argcount]], said
    for kind in "ComputeType", "GemmAlgo", "Math":
        for name, value in vars(getattr(Binding, kind)).items():
            assert int(getattr(getattr(binding, kind), name)) == value
