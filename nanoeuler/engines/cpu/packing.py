# Made from book/p-token-on-a-cpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-token-panels
"""Matrices laid out for products with few rows: panels of PANEL columns, one after the other.

In float32, in the 16 bits that a file holds, or in int8 with a scale for each column. Leaves out
the products: decode.py.

I rows of a matrix (the depth of a sum), O columns, F MLP width. Distances are bytes.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from nanoeuler.engines.cpu.llvm import LANES
from nanoeuler.engines.cpu.memory import aligned
from nanoeuler.model.stored import AT_ONCE, Stored, narrowed
from nanoeuler.model.weights import ALIGNMENT

# Registers of sums for a row. Four additions in flight keep one vector unit busy, since a sum waits
# four cycles for itself; four rows at a time take 16 of the 32 registers (of AVX2's 16, two rows).
VECTORS = 4
PANEL = VECTORS * LANES  # columns


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

    def columns(self, first: int, last: int) -> np.ndarray:
        """Columns [first, last), float32 (I, last - first)."""


class Held(NamedTuple):
    """A matrix (I, O) in memory."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """(I, O)."""
        return self.array.shape

    def columns(self, first: int, last: int) -> np.ndarray:
        """Columns [first, last)."""
        return self.array[:, first:last]


class Turned(NamedTuple):
    """The transpose of a matrix in a file: a tied embedding as the output matrix."""

    stored: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        """(I, O)."""
        return self.stored.shape[::-1]

    def columns(self, first: int, last: int) -> np.ndarray:
        """Columns [first, last), float32."""
        return self.stored.rows(first, last).T


class GateUp(NamedTuple):
    """SwiGLU's matrix (I, 2F) in panels' order: see `interleaved`."""

    both: Matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """(I, O), O a multiple of PANEL."""
        return self.both.shape[0], padded(self.both.shape[1])

    def columns(self, first: int, last: int) -> np.ndarray:
        """Columns [first, last), both multiples of PANEL."""
        F = self.both.shape[1] // 2
        low, high = first // 2, min(last // 2, F)
        halves = [self.both.columns(start + low, start + high) for start in (0, F)]
        return interleaved(np.concatenate(halves, axis=1))


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


Matrices = Float32 | Bfloat16 | Float16 | Int8  # what the compiled pass gets
Form = type[Float32] | type[Bfloat16] | type[Float16] | type[Int8]  # and their classes
WEIGHT = {Float32: 4, Bfloat16: 2, Float16: 2, Int8: 1}  # bytes of a weight
KEPT = {"BF16": Bfloat16, "F16": Float16}  # and the forms of what files hold; all else is float32


def form_of(kinds: set[str]) -> Form:
    """The form in which matrices of these kinds lose nothing."""
    return KEPT.get(*kinds, Float32) if len(kinds) == 1 else Float32


class Panels:
    """Matrices (I, O) in one buffer; `matrices` says where each lies, and in which form.

    Columns beyond O are zeros. Addresses are good while this object lives. A few columns at a time
    are read as float32, so no second copy of a matrix is made.
    """

    def __init__(self, matrices: Sequence[Matrix], form: Form = Float32):
        widths = [padded(matrix.shape[1]) for matrix in matrices]
        sizes = [WEIGHT[form] * m.shape[0] * n for m, n in zip(matrices, widths, strict=True)]
        ends = np.cumsum([-(-n // ALIGNMENT) * ALIGNMENT for n in sizes])
        columns = np.cumsum([0, *widths])
        self.buffer = aligned(int(ends[-1]) // 4).view(np.uint8)
        self.scales = aligned(int(columns[-1]) if form is Int8 else 0)
        places = np.zeros((len(matrices), 4), np.int64)
        # The largest first: what reading it takes beside the panels is least when there are few.
        for i in np.argsort(sizes)[::-1]:
            matrix, start = matrices[i], int(ends[i]) - -(-sizes[i] // ALIGNMENT) * ALIGNMENT
            shape = -1, matrix.shape[0], PANEL * WEIGHT[form]
            room = self.buffer[start : start + sizes[i]].reshape(shape)
            steps = self.scales[columns[i] : columns[i + 1]] if form is Int8 else self.scales
            _lay(matrix, room, steps, form)
            scale = steps.ctypes.data if form is Int8 else 0
            places[i] = room.ctypes.data, len(room), matrix.shape[0], scale
        self.matrices = form(places)


def _lay(matrix, room, steps, form):
    # Fill the panels `room` (n, I, bytes) of one matrix, some at a time, and its scales.
    depth, columns = matrix.shape
    at_once = max(1, AT_ONCE // (depth * PANEL))
    for first in range(0, len(room), at_once):
        last = min(first + at_once, len(room))
        wide = np.zeros((depth, (last - first) * PANEL), np.float32)
        end = min(last * PANEL, columns)
        wide[:, : end - first * PANEL] = matrix.columns(first * PANEL, end)
        if form is Int8:
            wide, steps[first * PANEL : last * PANEL] = rounded(wide)
        elif form is not Float32:
            wide = narrowed(wide, "BF16" if form is Bfloat16 else "F16")
        panels = wide.reshape(depth, -1, PANEL).swapaxes(0, 1)
        room[first:last].view(wide.dtype)[...] = panels


def rounded(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q (I, O) int8 and s (O,) of equation eq-token-int8, so that matrix is about q s."""
    steps = np.abs(matrix).max(axis=0) / 127
    steps[steps == 0] = 1  # a column of zeros has any scale
    return np.rint(matrix / steps).astype(np.int8), steps
