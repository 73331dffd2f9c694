# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-mma
"""The form of a product that every card since 8.0 can do, and what fits it.

C (m, n) = op(A) op(B), where the layout names how A and B are stored:

    NT   forward  Y = X W^T    A (m, k)   B (n, k)
    NN   dX = dY W             A (m, k)   B (k, n)
    TN   dW = dY^T X           A (k, m)   B (k, n)
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nanoeuler.engines.gpu.gemm.epilogue import EPILOGUES as WAYS
from nanoeuler.engines.gpu.gemm.epilogue import Way
from nanoeuler.errors import UserError

SIDE = 64      # of a warp's tile, both ways
HALF = SIDE // 2  # of its columns: gates, and as many ups
SUMS = SIDE * SIDE // 32    # float32 sums in a lane's registers: 128
FRAGMENTS = SIDE * 16 // 64  # registers of a lane for 64 x 16 of an operand: 16
ALIGN = 128    # bytes: the period of the banks, and a row of a k-block
DEPTH = ALIGN // 2  # bf16 of k in a stage
BOX = 8192     # bytes: a warp's tile in bf16, on its way out
PITCH = 16     # bytes: rows are a multiple of this apart, as 16-byte copies want it
# A bias is added, then an activation function is taken.
CURVED = "bias and gelu", "bias and gelu_exact", "bias and relu2"
# Sums are multiplied by a function's slopes at another (m, n).
SLOPED = "gelu backward", "gelu_exact backward", "relu2 backward"
# Gates and ups: what they make, and its slopes by both.
GATES = "swiglu", "swiglu backward"
# What is done with the sums of a tile: nothing; a bias is added; another (m, n) is added; C is
# added to; or one of the above. `epilogue.EPILOGUES` says what may come with each.
EPILOGUES = ("store", "bias", *CURVED, "residual", *SLOPED, *GATES, "rope 64", "add")


@dataclass(frozen=True)
class MmaForm:
    """Compile-time parameters of a kernel. Float32 can store or add; bf16 all except add."""

    operands: ClassVar[str] = "uint16"  # the dtype of A and B
    longest: ClassVar[int] = 0  # so many k-blocks at most are one sum's; 0: any number

    layout: str = "NT"  # NT, NN or TN
    epilogue: str = "store"  # one of EPILOGUES; gelu is the tanh form
    out: str = "bf16"  # or float32, of C
    second: bool = False  # whether S + bias is stored beside its curve, the curve beside S slope,
    # (gate, up) beside what they make, their gradients beside that (always)
    sums: str = "no"  # of C's columns, where that is bf16: "store" or "add"
    rows: int = 128  # of a block's tile, one warp for each 64 x 64
    columns: int = 256
    stages: int = 3  # of the ring
    resident: int = 1  # blocks that share a multiprocessor
    group: int = 16  # rows of tiles that blocks fill together

    def __post_init__(self) -> None:
        wide = self.out == "float32"
        if self.layout not in ("NT", "NN", "TN") or self.sums not in ("no", "store", "add"):
            raise UserError(f"layouts are NT, NN, TN, sums no, store or add, not {self}")
        if self.epilogue not in EPILOGUES or self.out not in ("bf16", "float32"):
            raise UserError(f"epilogues are {', '.join(EPILOGUES)}, to bf16 or float32: {self}")
        if wide != (self.epilogue == "add") and (not wide or self.epilogue != "store"):
            raise UserError(f"float32 is stored or added to, and only float32 is added to: {self}")
        if self.second and not self.way.second:
            raise UserError(f"{self.epilogue!r} has no second array to store")
        if self.way.aux == "tiles" and not self.second:
            raise UserError(f"{self.epilogue!r} stores two arrays: {self}")
        if self.sums != "no" and (wide or not self.way.sums):
            raise UserError(f"columns of {self.epilogue!r} to {self.out} are not summed")
        if self.rows not in (64, 128, 256) or self.columns not in (64, 128, 256):
            raise UserError(f"a tile is 64, 128 or 256 either way, not {self.rows, self.columns}")
        if self.gated and self.layout[1] == "T":
            raise UserError(f"gates and ups are columns of B (NN, TN), not rows: {self}")
        if self.stages < 2 or self.group < 1 or self.resident < 1:
            raise UserError(f"a ring has two stages or more, and a group a row of tiles: {self}")

    @property
    def size(self) -> int:
        """Bytes of an element of A and B."""
        return np.dtype(self.operands).itemsize

    @property
    def depth(self) -> int:
        """Elements of k in a stage: 128 bytes of them."""
        return ALIGN // self.size

    @property
    def way(self) -> Way:
        """What the epilogue allows and reads, on Hopper as here."""
        return WAYS[self.epilogue]

    @property
    def gated(self) -> bool:
        """Whether B has two columns, of gates and n further on of ups, for one of C."""
        return self.epilogue == "swiglu"

    @property
    def of_c(self) -> int:
        """Columns of C that a block's tile becomes."""
        return self.columns // 2 if self.gated else self.columns

    @property
    def boxes(self) -> int:
        """Boxes of a warp: for gates and for ups where sums meet both."""
        return 2 if self.way.aux == "tiles" else 1

    @property
    def sloped(self) -> bool:
        """Whether sums meet the slopes of an activation function."""
        return self.epilogue in SLOPED

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows * self.columns // (SIDE * SIDE) * 32

    @property
    def stage(self) -> int:
        """Bytes of a stage of the ring: a k-block of A and one of B."""
        return (self.rows + self.columns) * ALIGN

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return ALIGN + max(self.stages * self.stage, self.threads // 32 * self.boxes * BOX)


# %% sec-mma
def pitch(array: Any) -> int:
    """Elements from one row of a 2-d array to the next; UserError if 16-byte copies cannot go."""
    size, address = array.dtype.itemsize, getattr(array, "address", 0)
    if array.strides[1] != size or array.strides[0] % PITCH or address % PITCH:
        raise UserError(
            f"rows are dense and a multiple of {PITCH} bytes apart, from an address that is one, "
            f"not {tuple(array.strides)} from {address}: pad the rows"
        )
    return array.strides[0] // size


def halves_pitch(array: Any) -> int:
    """Elements from row to row of gates and ups (1, 2, m, n); UserError unless these are the halves
    of rows of 2 n, n columns in eights."""
    (_, _, _, n), (_, apart, step, size) = array.shape, array.strides
    address = getattr(array, "address", 0)
    if size != array.dtype.itemsize or apart != n * size or (n * size | step | address) % PITCH:
        raise UserError(
            f"gates and ups are rows of one array, side by side, each a multiple of {PITCH} bytes, "
            f"not {tuple(array.strides)} apart from {address}: choose a hidden width in eights"
        )
    return step // size


def require(name: str, array: Any, shape: tuple[int, ...] | None, kind: str) -> None:
    """UserError unless the array has this shape and dtype, or is None where shape is.

    Of one axis it is dense as well, for it is read by its address alone; of two as `pitch` says.
    """
    there = None if array is None else (tuple(array.shape), str(array.dtype))
    wanted = None if shape is None else (shape, kind)
    if there != wanted:
        raise UserError(f"{name} is {wanted or 'nothing'}, not {there}")
    if shape and len(shape) == 1 and array.strides[0] != array.dtype.itemsize:
        raise UserError(f"{name} is dense, not {array.strides[0]} bytes apart: copy it")
    if shape and len(shape) == 2:
        pitch(array)


def sizes_of(layout: str, a: Any, b: Any, c: Any, parts: int = 1) -> tuple[int, int, int]:
    """m, n and k of a product C (m, n) of 2-d arrays; UserError where their shapes do not fit.

    parts: B has so many times the columns of C.
    """
    m, k = a.shape if layout[0] == "N" else a.shape[::-1]
    of_b = b.shape if layout[1] == "N" else b.shape[::-1]
    n = of_b[1] // parts
    if tuple(of_b) != (k, n * parts) or tuple(c.shape) != (m, n) or not min(m, n, k):
        raise UserError(f"{layout}: {a.shape} by {b.shape} does not give {c.shape}")
    return m, n, k


def extents(form: Any, a: Any, b: Any, c: Any, parts: int = 1) -> tuple[int, int, int]:
    """The same, and UserError where dtypes or rows do not fit; form: has layout and out."""
    m, n, k = sizes_of(form.layout, a, b, c, parts)
    kinds, given = [str(array.dtype) for array in (a, b, c)], getattr(form, "operands", "uint16")
    wanted = [given, given, "float32" if form.out == "float32" else "uint16"]
    if kinds != wanted:
        raise UserError(f"A, B and C are {', '.join(kinds)}; expected {', '.join(wanted)}")
    for array in (a, b, c):
        pitch(array)
    return m, n, k


def require_space(space: Any, need: int, sizes: tuple[int, ...]) -> None:
    """UserError unless `space`, an array or None, has the bytes that a product needs."""
    room = 0 if space is None else math.prod(space.shape) * space.dtype.itemsize
    if room < need:
        m, n, k = sizes
        raise UserError(
            f"a product of {m} x {n} x {k} needs {need} bytes of space, not {room}: make it larger"
        )


def fit(form: MmaForm, a: Any, b: Any, c: Any, aux: Any = None) -> tuple[int, int, int]:
    """m, n and k of a product by mma.sync; UserError where something does not fit."""
    m, n, k = extents(form, a, b, c, 2 if form.gated else 1)
    shape = {"tile": (m, n), "bias": (n,), "tiles": (1, 2, m, n)}.get(form.way.aux)
    require(f"aux of {form.epilogue!r}", aux, shape, "uint16")
    if form.way.aux == "bias" and n % 2:
        raise UserError(f"columns with a bias come in pairs, not {n}: pad W by a row of zeros")
    if form.gated and n % 8:
        raise UserError(f"gates come in eights, not {n}: choose a hidden width of eights")
    return m, n, k


def fit_more(form: MmaForm, m: int, n: int, second: Any = None, sums: Any = None) -> None:
    """UserError where the second array (m, n) or the columns' sums (n,) don't fit."""
    shape = (m, 2 * n if form.gated else n) if form.second else None
    shape = (1, 2, m, n) if form.way.aux == "tiles" else shape
    require(f"the second array of {form.epilogue!r}", second, shape, "uint16")
    require("sums of columns", sums, None if form.sums == "no" else (n,), "float32")
    if form.sums != "no" and n % 4:
        raise UserError(f"columns that are summed come in fours, not {n}: pad W by zeros")
