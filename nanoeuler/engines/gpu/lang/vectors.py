# Made from book/j-row-kernels.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-rows-vectors
"""How a warp holds a row of a matrix: pieces of 16 bytes, as float32 in registers.

A kind is "bf16" (stored as uint16) or "float32". All matrices are (rows, columns) in C order, their
columns a multiple of 8. Left out: the kernels (engines.gpu.rows).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int64
from nanoeuler.engines.gpu.lang.kernel import cover
from nanoeuler.errors import UserError

SIZES = {"bf16": 2, "float32": 4}  # bytes of an element
STORED = {"bf16": "uint16", "float32": "float32"}  # the dtype in which a kind is stored
ACCESS = 16  # bytes that a thread moves at once, at most
STEP = 8  # columns come in multiples of it: 16 bytes of bf16
LANES = 32  # threads of a warp
WARPS = 4  # of a block, when a warp has a row to itself
LIMIT = 32 * 32 * LANES  # columns: a block has at most 32 warps, a lane 32 of them in registers


def piece(*kinds: str) -> int:
    """The columns that a thread takes at a time: 16 bytes of the widest of these kinds."""
    for kind in kinds:
        if kind not in SIZES:
            raise UserError(f"numbers are bf16 or float32, not {kind!r}")
    return ACCESS // max(SIZES[kind] for kind in kinds)


def make_load(kind: str, width: int, own: bool = False) -> Callable:
    """load(values, i, address): values[i : i + width] = the numbers there.

    own: other threads do not write them, but this one may; otherwise nobody does.
    """
    floats = ptx.load_own_float4 if own else ptx.load_float4
    pairs, fours = (ptx.load_own_int2, ptx.load_own_int4) if own else (ptx.load_int2, ptx.load_int4)

    def load_floats(values, i, address):
        values[i], values[i + 1], values[i + 2], values[i + 3] = floats(address)

    def load_four(values, i, address):
        a, b = pairs(address)
        values[i], values[i + 1] = ptx.low_bf16(a), ptx.high_bf16(a)
        values[i + 2], values[i + 3] = ptx.low_bf16(b), ptx.high_bf16(b)

    def load_eight(values, i, address):
        a, b, c, d = fours(address)
        values[i], values[i + 1] = ptx.low_bf16(a), ptx.high_bf16(a)
        values[i + 2], values[i + 3] = ptx.low_bf16(b), ptx.high_bf16(b)
        values[i + 4], values[i + 5] = ptx.low_bf16(c), ptx.high_bf16(c)
        values[i + 6], values[i + 7] = ptx.low_bf16(d), ptx.high_bf16(d)

    def load_twice(values, i, address):
        load_floats(values, i, address)
        load_floats(values, i + 4, address + 16)

    known = {
        ("float32", 4): load_floats, ("float32", 8): load_twice,
        ("bf16", 4): load_four, ("bf16", 8): load_eight,
    }  # fmt: skip
    return known[kind, width]


def make_store(kind: str, width: int) -> Callable:
    """store(values, i, address): the numbers there = values[i : i + width], rounded to `kind`."""

    def store_floats(values, i, address):
        ptx.store_float4(address, values[i], values[i + 1], values[i + 2], values[i + 3])

    def pair(values, i):
        return ptx.pack_bf16(values[i], values[i + 1])

    def store_four(values, i, address):
        ptx.store_int2(address, pair(values, i), pair(values, i + 2))

    def store_eight(values, i, address):
        ptx.store_int4(
            address, pair(values, i), pair(values, i + 2), pair(values, i + 4), pair(values, i + 6)
        )

    known = {
        ("float32", 4): store_floats, ("bf16", 4): store_four, ("bf16", 8): store_eight
    }  # fmt: skip
    return known[kind, width]


@dataclass(frozen=True)
class Layout:
    """Which lane holds which columns of a row: lane l of its warps, in piece j, has `width` of them
    from (j * lanes + l) * width on. most: columns a lane should hold, where they divide evenly.
    """

    columns: int
    width: int
    most: int

    def __post_init__(self) -> None:
        if self.columns % STEP or not 0 < self.columns <= LIMIT:
            raise UserError(
                f"rows have a multiple of {STEP} columns, at most {LIMIT}, not {self.columns}"
            )

    @property
    def lanes(self) -> int:
        """Threads of a row: one warp, or as many as hold its columns, at most 32."""
        return LANES * min(32, cover(self.columns, LANES * self.most))

    @property
    def rows(self) -> int:
        """Rows that a block holds at a time."""
        return WARPS if self.lanes == LANES else 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.rows

    @property
    def pieces(self) -> int:
        """Pieces of a lane; where the columns do not divide evenly, the last may lie outside."""
        return cover(self.columns, self.lanes * self.width)

    @property
    def whole(self) -> bool:
        """Whether no piece lies outside."""
        return self.columns == self.pieces * self.lanes * self.width


def make_load_row(layout: Layout, kind: str, own: bool = False) -> Callable:
    """load_row(values, address, lane): this lane's pieces of the row at `address`; 0 outside."""
    load, size = make_load(kind, layout.width, own), SIZES[kind]
    columns, width, lanes, whole = layout.columns, layout.width, layout.lanes, layout.whole
    pieces = layout.pieces

    def load_row(values, address, lane):
        for j in range(pieces):
            column = (j * lanes + lane) * width
            if whole or column < columns:
                load(values, j * width, address + column * size)
            else:
                for k in range(j * width, (j + 1) * width):
                    values[k] = float32(0)

    return load_row


def make_round_row(layout: Layout, kind: str) -> Callable:
    """settle(values): this lane's pieces of a row, rounded as if stored as `kind` and loaded."""
    own, rounds = layout.pieces * layout.width, kind == "bf16"

    def settle(values):
        if rounds:
            for k in range(0, own, 2):
                both = ptx.pack_bf16(values[k], values[k + 1])
                values[k], values[k + 1] = ptx.low_bf16(both), ptx.high_bf16(both)

    return settle


def make_store_row(layout: Layout, kind: str) -> Callable:
    """store_row(values, address, lane): this lane's pieces of the row at `address`."""
    store, size = make_store(kind, layout.width), SIZES[kind]
    columns, width, lanes, whole = layout.columns, layout.width, layout.lanes, layout.whole
    pieces = layout.pieces

    def store_row(values, address, lane):
        for j in range(pieces):
            column = (j * lanes + lane) * width
            if whole or column < columns:
                store(values, j * width, address + column * size)

    return store_row


def warp_sum(value):
    """The sum over a warp's lanes, the same bits in each: by halves, as a + b is b + a."""
    for step in range(5):
        value += ptx.shuffle_xor(value, 16 >> step)
    return value


def make_row_sum(layout: Layout) -> Callable:
    """row_sum(value): the sum over all lanes of a row, the same bits in each."""
    warps = layout.lanes // LANES

    def over_warps(value):
        parts = cuda.shared.array(warps, float32)
        warp, value = cuda.threadIdx.x // LANES, warp_sum(value)
        if cuda.threadIdx.x % LANES == 0:
            parts[warp] = value
        cuda.syncthreads()  # all parts are there
        value = parts[0]
        for other in range(1, warps):
            value += parts[other]
        cuda.syncthreads()  # all have read them: the next sum may write
        return value

    return warp_sum if warps == 1 else over_warps


def place(address: int, row: int, columns: int, size: int) -> int:
    """The address of a row."""
    return address + int64(row) * (columns * size)


# %% sec-rows-stream
def expect(name: str, array: Any, shape: tuple[int, ...], kind: str) -> None:
    """UserError unless `array` is of this kind and shape, in C order, aligned to 16 bytes."""
    dtype = STORED.get(kind, kind)
    steps = tuple(prod(shape[i + 1 :]) * array.dtype.itemsize for i in range(len(shape)))
    if tuple(array.shape) != shape or str(array.dtype) != dtype:
        came = f"{array.dtype} {tuple(array.shape)}"
        raise UserError(f"{name} is {dtype} {shape}, not {came}")
    if tuple(array.strides) != steps:
        raise UserError(f"{name} is in C order, not of strides {tuple(array.strides)}")
    if getattr(array, "address", 0) % ACCESS:
        raise UserError(f"{name} begins at a multiple of {ACCESS} bytes, not at {array.address}")


def kind_of(array: Any) -> str:
    """The kind of number that an array stores."""
    for kind, dtype in STORED.items():
        if str(array.dtype) == dtype:
            return kind
    raise UserError(f"rows are of bf16 (uint16) or float32, not {array.dtype}")


def given(array: Any) -> Any:
    """An array, or the address 0 for none."""
    return 0 if array is None else array
