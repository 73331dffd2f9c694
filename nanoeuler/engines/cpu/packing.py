# Made from book/p-token-on-a-cpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-token-panels
"""Matrices laid out for products with few rows: panels of PANEL columns, one after the other.

In float32, in a file's 16 bits or blocks, in int8 with a scale for each column, or in four bits.
Leaves out the products: decode.py.

I rows of a matrix (the depth of a sum), O columns, F MLP width. Distances are bytes.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np

from nanoeuler.engines.cpu import laying
from nanoeuler.engines.cpu.llvm import LANES
from nanoeuler.engines.cpu.memory import aligned
from nanoeuler.measurements import cores
from nanoeuler.model.stored import Stored, narrowed
from nanoeuler.model.weights import ALIGNMENT

# Registers of sums for a row. Four additions in flight keep one vector unit busy, since a sum waits
# four cycles for itself; four rows at a time take 16 of the 32 registers (of AVX2's 16, two rows).
VECTORS = 4
PANEL = VECTORS * LANES  # columns
SHARE = 1 << 18  # numbers that a core lays out in one go: a megabyte of float32


def padded(width: int) -> int:
    """The next multiple of PANEL."""
    return -(-width // PANEL) * PANEL


def interleaved(gate_up: np.ndarray) -> np.ndarray:
    """SwiGLU's matrix (I, 2F) in panels' order: half a panel of gate, the same half of up, ..."""
    (depth, columns), half = gate_up.shape, PANEL // 2
    F = columns // 2
    wide = np.zeros((depth, 2, -(-F // half) * half), gate_up.dtype)
    wide[:, 0, :F], wide[:, 1, :F] = gate_up[:, :F], gate_up[:, F:]
    return wide.reshape(depth, 2, -1, half).swapaxes(1, 2).reshape(depth, -1)


class Matrix(Protocol):
    """What panels are made of: a matrix (I, O) that gives its columns as float32."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(I, O)."""

    @property
    def kind(self) -> str:
        """What its numbers are in a file; F32 in memory."""

    def columns(self, first: int, last: int) -> np.ndarray:
        """Columns [first, last), float32 (I, last - first)."""

    def blocks(self, first: int, last: int) -> np.ndarray | None:
        """Their bytes in a file, in blocks along the depth (last - first, size), or None."""


class Held(NamedTuple):
    """A matrix (I, O) in memory."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """(I, O)."""
        return self.array.shape

    @property
    def kind(self) -> str:
        """F32."""
        return "F32"

    def columns(self, first: int, last: int) -> np.ndarray:
        """Columns [first, last)."""
        return self.array[:, first:last]

    def blocks(self, first: int, last: int) -> None:
        """There are none."""


class Turned(NamedTuple):
    """The transpose of a matrix in a file: a tied embedding as the output matrix."""

    stored: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        """(I, O)."""
        return self.stored.shape[::-1]

    @property
    def kind(self) -> str:
        """What its numbers are."""
        return self.stored.kind

    def columns(self, first: int, last: int) -> np.ndarray:
        """Columns [first, last), float32."""
        return self.stored.rows(first, last).T

    def blocks(self, first: int, last: int) -> np.ndarray | None:
        """Their bytes in a file, in blocks along the depth, or None."""
        return self.stored.row_blocks(first, last)


class GateUp(NamedTuple):
    """SwiGLU's matrix (I, 2F) in panels' order: see `interleaved`."""

    both: Matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """(I, O), O a multiple of PANEL."""
        return self.both.shape[0], padded(self.both.shape[1])

    @property
    def kind(self) -> str:
        """What its numbers are."""
        return self.both.kind

    def columns(self, first: int, last: int) -> np.ndarray:
        """Columns [first, last), both multiples of PANEL."""
        F = self.both.shape[1] // 2
        low, high = first // 2, min(last // 2, F)
        halves = [self.both.columns(start + low, start + high) for start in (0, F)]
        return interleaved(np.concatenate(halves, axis=1))

    def blocks(self, first: int, last: int) -> np.ndarray | None:
        """The same of blocks; columns that aren't there are zeros."""
        F = self.both.shape[1] // 2
        low, high = first // 2, min(last // 2, F)
        halves = [self.both.blocks(start + low, start + high) for start in (0, F)]
        if halves[0] is None or halves[1] is None:
            return None
        return interleaved(np.concatenate(halves).T).T


class Float32(NamedTuple):
    """Where matrices lie, and by its class in which form: here, float32."""

    places: np.ndarray  # (n, 4) int64: address, number of panels, depth I, address of the scales


class Bfloat16(NamedTuple):
    """The same of matrices in bf16."""

    places: np.ndarray


class Float16(NamedTuple):
    """The same of matrices in float16."""

    places: np.ndarray


class Int8(NamedTuple):
    """The same of matrices in int8, with a float32 scale for each column."""

    places: np.ndarray


class Int4(NamedTuple):
    """The same of matrices in four bits, in blocks with a scale and a minimum."""

    places: np.ndarray


class Kept4(NamedTuple):
    """The same of blocks of four bits that a file has, which become their float32 when needed."""

    places: np.ndarray


class Kept8(NamedTuple):
    """The same of a file's blocks of eight bits."""

    places: np.ndarray


Matrices = Float32 | Bfloat16 | Float16 | Int8 | Int4 | Kept4 | Kept8  # what the pass gets
Form = (type[Float32] | type[Bfloat16] | type[Float16] | type[Int8] | type[Int4] | type[Kept4]
        | type[Kept8])  # fmt: skip
WEIGHT = {Float32: 4, Bfloat16: 2, Float16: 2, Int8: 1}  # bytes of a weight
BLOCK, BLOCK_BYTES = 32, 20  # numbers of a column that share a scale, and their bytes: ggml's Q4_1
IN_BLOCKS = {Int4: BLOCK_BYTES, Kept4: BLOCK_BYTES, Kept8: 34}  # and the bytes of a block
# The forms of what files hold; all else is float32.
KEPT = {"BF16": Bfloat16, "F16": Float16, "Q4_1": Kept4, "Q8_0": Kept8}


def form_of(matrices: Sequence[Matrix]) -> Form:
    """The form in which these matrices lose nothing."""
    kinds = {matrix.kind for matrix in matrices}
    form = KEPT.get(*kinds, Float32) if len(kinds) == 1 else Float32
    if form not in (Kept4, Kept8):
        return form
    some = [matrix.blocks(0, min(PANEL, matrix.shape[1])) for matrix in matrices]
    return Float32 if any(each is None for each in some) else form


def panel_bytes(form: Form, depth: int) -> int:
    """The bytes of a panel."""
    if form in IN_BLOCKS:
        return -(-depth // BLOCK) * IN_BLOCKS[form] * PANEL
    return WEIGHT[form] * depth * PANEL


class Panels:
    """Matrices (I, O) in one buffer; `matrices` says where each lies, and in which form.

    Columns beyond O are zeros. Addresses are good while this object lives. Each core reads a few
    columns at a time, so no second copy of a matrix is made.
    """

    def __init__(self, matrices: Sequence[Matrix], form: Form = Float32):
        widths = [padded(matrix.shape[1]) for matrix in matrices]
        sizes = [n // PANEL * panel_bytes(form, m.shape[0])
                 for m, n in zip(matrices, widths, strict=True)]  # fmt: skip
        ends = np.cumsum([-(-n // ALIGNMENT) * ALIGNMENT for n in sizes])
        columns = np.cumsum([0, *widths])
        self.buffer = aligned(int(ends[-1]) // 4).view(np.uint8)
        self.scales = aligned(int(columns[-1]) if form is Int8 else 0)
        places, shares = np.zeros((len(matrices), 4), np.int64), []
        # The largest first: what reading it takes beside the panels is least when there are few.
        for i in np.argsort(sizes)[::-1]:
            matrix, start = matrices[i], int(ends[i]) - -(-sizes[i] // ALIGNMENT) * ALIGNMENT
            shape = -1, panel_bytes(form, matrix.shape[0])
            room = self.buffer[start : start + sizes[i]].reshape(shape)
            steps = self.scales[columns[i] : columns[i + 1]] if form is Int8 else self.scales
            shares += _shares(matrix, room, steps)
            scale = steps.ctypes.data if form is Int8 else 0
            places[i] = room.ctypes.data, len(room), matrix.shape[0], scale
        with ThreadPoolExecutor(min(8, cores()) if len(shares) > 8 else 1) as pool:
            for _ in pool.map(lambda share: _lay(*share, form), shares):
                pass
        self.matrices = form(places)


def _shares(matrix, room, steps):
    # The parts of the panels `room` (n, bytes) of one matrix: [(matrix, panels, scales, first)].
    at_once = max(1, SHARE // (matrix.shape[0] * PANEL))
    return [(matrix, room[i : i + at_once], steps[i * PANEL : (i + at_once) * PANEL], i * PANEL)
            for i in range(0, len(room), at_once)]  # fmt: skip


def _lay(matrix, room, steps, first, form):
    # Fill some panels (n, bytes), whose first column is `first`, and their scales.
    depth, columns = matrix.shape
    n, last = len(room), min(first + len(room) * PANEL, columns)
    if form is Kept8:
        raw = matrix.blocks(first, last)
        laying.sorted_bytes(raw.reshape(len(raw), -1, 34), room.reshape(n, -1, 34 * PANEL))
        return
    if form in (Int4, Kept4):
        room[...] = _four_bits(matrix, first, last)
        return
    if form is Float32:
        _spread(matrix, first, last, room.view(np.float32).reshape(n, depth, PANEL))
        return
    wide = np.empty((n, depth, PANEL), np.float32)
    _spread(matrix, first, last, wide)
    if form is Int8:
        laying.shrunk(wide, room.view(np.int8).reshape(wide.shape), steps.reshape(n, PANEL))
    else:
        bits = narrowed(wide, "BF16" if form is Bfloat16 else "F16")
        room[...] = bits.view(np.uint8).reshape(n, -1)


def _spread(matrix, first, last, panels):
    # panels float32 (n, depth, PANEL) = columns [first, last) of a matrix, and zeros.
    raw = matrix.blocks(first, last) if matrix.kind in laying.SPREAD else None
    if raw is not None:
        size = laying.SPREAD[matrix.kind]
        laying.spread(raw.reshape(len(raw), -1, size), _HALVES, panels)
        return
    wide = matrix.columns(first, last)
    depth, whole = len(wide), (last - first) // PANEL
    even = wide[:, : whole * PANEL].reshape(depth, whole, PANEL)
    panels[:whole] = even.swapaxes(0, 1)
    if whole < len(panels):
        panels[whole] = 0
        panels[whole, :, : last - first - whole * PANEL] = wide[:, whole * PANEL :]


_HALVES = laying.halves()


def in_blocks(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """d, m (O, blocks) float16 and q (O, blocks, 32) uint8 of equation eq-token-int4.

    columns (I, O) float32. OverflowError for numbers beyond float16.
    """
    depth, n = columns.shape
    x = np.zeros((n, -(-depth // BLOCK) * BLOCK), np.float32)
    x[:, :depth] = columns.T
    x = x.reshape(n, -1, BLOCK)
    least, most = x.min(axis=2), x.max(axis=2)
    with np.errstate(over="ignore"):
        d, m = ((most - least) / 15).astype(np.float16), least.astype(np.float16)
    if not (np.isfinite(d).all() and np.isfinite(m).all()):
        raise OverflowError(f"a weight of {np.abs(x).max():.3g} is more than a block of four bits "
                            "can hold: leave out quantize")  # fmt: skip
    step = np.where(d == 0, np.float32(np.inf), d.astype(np.float32))  # all of its q are 0
    q = np.rint((x - m.astype(np.float32)[..., None]) / step[..., None])
    return d, m, np.clip(q, 0, 15).astype(np.uint8)


def _four_bits(matrix, first, last):
    # Panels (n, bytes) uint8 of columns [first, last) of a matrix.
    raw = matrix.blocks(first, last) if matrix.kind == "Q4_1" else None
    if raw is not None:
        out = np.zeros((-(-len(raw) // PANEL), raw.size // len(raw) * PANEL), np.uint8)
        blocks = raw.reshape(len(raw), -1, BLOCK_BYTES)
        laying.sorted_blocks(blocks, out.reshape(len(out), -1, BLOCK_BYTES * PANEL), LANES)
        return out
    d, m, q = in_blocks(matrix.columns(first, last))
    more, n = -len(d) % PANEL, -(-len(d) // PANEL)
    d, m = (np.pad(each, ((0, more), (0, 0))).reshape(n, PANEL, -1) for each in (d, m))
    q = np.pad(q, ((0, more), (0, 0), (0, 0))).reshape(n, VECTORS, LANES, -1, 4, 2, 4)
    q = (q[..., 0, :] | q[..., 1, :] << 4).transpose(0, 3, 1, 4, 2, 5)
    heads = [np.ascontiguousarray(each.swapaxes(1, 2)).view(np.uint8) for each in (d, m)]
    return np.concatenate([*heads, q.reshape(n, q.shape[1], -1)], axis=2).reshape(n, -1)
