# Made from book/n-cublas.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-vendor-rows
"""Matrix products by NVIDIA's library cuBLAS, for a step in place of our own kernels.

C (m, n) = op(A) op(B) in the layouts of `wgmma_form`: NT, NN, TN. Left out: epilogues, batches.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.gemm.mma_form import sizes_of
from nanoeuler.engines.gpu.host import libraries
from nanoeuler.errors import UserError

# cuBLAS's names of what it computes with (cublasComputeType_t), by ours, and the dtype of A and B.
COMPUTE = {
    "bf16": ("COMPUTE_32F", "uint16"),
    "tf32": ("COMPUTE_32F_FAST_TF32", "float32"),
    "float32": ("COMPUTE_32F", "float32"),
}
TYPES = {"uint16": 14, "float32": 0}  # CUDA_R_16BF and CUDA_R_32F of cudaDataType, library_types.h
# Bytes that the library works in: cuBLAS's manual asks for 32 MiB on Hopper (cublasSetWorkspace).
WORKSPACE = 32 << 20
ZERO_ONE = np.array([0, 1], np.float32)  # what alpha and beta are read from, by their addresses


def pitch(array: Any, name: str) -> int:
    """Elements from one row to the next; UserError if the rows of a matrix are not dense."""
    rows, columns = array.shape
    step, size = array.strides[0], array.dtype.itemsize
    if array.strides[1] != size or step % size or step < columns * size:
        raise UserError(f"cuBLAS wants the rows of {name} dense, strides are {array.strides}")
    return step // size


def check_product(layout: str, compute: str, args: tuple[Any, Any, Any]) -> None:
    """UserError unless A and B of these shapes and dtypes can be multiplied to give C."""
    if layout not in ("NT", "NN", "TN") or compute not in COMPUTE:
        raise UserError(f"no product {layout} in {compute}")
    sizes_of(layout, *args)
    kind = COMPUTE[compute][1]
    kinds = [str(array.dtype) for array in args]
    if kinds[:2] != [kind, kind] or kinds[2] not in {kind, "float32"}:
        raise UserError(f"{compute}: A, B and C are {', '.join(kinds)}; not so")


@dataclass(frozen=True, eq=False)
class Gemm:
    """C = op(A) op(B), or C + op(A) op(B) where `add` is set; sums in float32.

    args: A, B and C. A and B are matrices as the layout has them, rows at any distance: uint16
    (bf16's bits) where compute is bf16, float32 where it is tf32 or float32. C: (m, n) float32, or
    uint16 where A and B are.
    """

    layout: str
    args: tuple[Any, Any, Any]
    compute: str = "bf16"
    add: bool = False

    def __post_init__(self) -> None:
        check_product(self.layout, self.compute, self.args)
        self.description()

    def description(self) -> tuple[int, ...]:
        """transa, transb, m, n, k, lda, ldb, ldc of the library's own product: B^T A^T.

        It reads our rows as columns. Equation eq-vendor-transpose.
        """
        (m, n), k = self.args[2].shape, self.args[0].shape[self.layout[0] == "N"]
        first, second = self.layout[1] == "T", self.layout[0] == "T"
        of_a, of_b, of_c = (pitch(x, name) for x, name in zip(self.args, "ABC", strict=True))
        return int(first), int(second), n, m, k, of_b, of_a, of_c

    def prepare(self, device: Any) -> Callable[..., None]:
        """A function of a stream's handle that puts the product on that stream; see `Library`."""
        return Library.of(device).prepare(self)


# %% sec-vendor-library
class Library:
    """cuBLAS on one device: its handle, and the memory that it works in."""

    known: "weakref.WeakKeyDictionary[Any, Library]" = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, device: Any) -> "Library":
        """The library on this device, opened once; UserError where it is not installed."""
        if device not in cls.known:
            cls.known[device] = cls(device)
        return cls.known[device]

    def __init__(self, device: Any):
        self.cublas = cublas = libraries.products()
        self.space = device.empty((WORKSPACE,), np.uint8)
        self.handle = cublas.create()
        weakref.finalize(self, cublas.destroy, self.handle).atexit = False
        cublas.set_math_mode(self.handle, int(cublas.Math.DISALLOW_REDUCED_PRECISION_REDUCTION))

    def prepare(self, gemm: Gemm) -> Callable[..., None]:
        """A function of a stream's handle that starts the product; it keeps the arrays."""
        cublas, handle = self.cublas, self.handle
        transa, transb, *sizes, lda, ldb, ldc = gemm.description()
        zero, one = (ZERO_ONE.ctypes.data + 4 * i for i in range(2))
        beta = one if gemm.add else zero
        a, b, c = gemm.args
        kind = TYPES[str(a.dtype)]
        first, second = (b.address, kind, lda), (a.address, kind, ldb)
        result = c.address, TYPES[str(c.dtype)], ldc
        how = int(getattr(cublas.ComputeType, COMPUTE[gemm.compute][0]))
        way = int(cublas.GemmAlgo.DFALT)
        args = transa, transb, *sizes, one, *first, *second, beta, *result, how, way

        def start(stream: int = 0, _alive: Any = (self, gemm)) -> None:
            cublas.set_stream(handle, stream)
            cublas.set_workspace(handle, self.space.address, WORKSPACE)
            cublas.gemm_ex(handle, *args)

        return start
