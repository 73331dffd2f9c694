# Made from book/p-token-on-a-cpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-token-panels
"""Matrices laid out for products with few rows: panels of PANEL columns, one after the other.

In float32, or in int8 with a scale for each column. Leaves out the products: decode.py.

I rows of a matrix (the depth of a sum), O columns, F MLP width. Distances are bytes.
"""

from collections.abc import Sequence

import numpy as np

from nanoeuler.engines.cpu.llvm import LANES
from nanoeuler.engines.cpu.memory import aligned
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


class Panels:
    """Matrices (I, O) float32 in one buffer. `places` (n, 5) int64 says where each lies.

    A place: address, number of panels, depth I, address of the scales (0 in float32), and bytes of
    a weight, 4 or 1. Columns beyond O are zeros. Addresses are good while this object lives.
    """

    def __init__(self, matrices: Sequence[np.ndarray], int8: bool = False):
        size = 1 if int8 else 4
        widths = [padded(matrix.shape[1]) for matrix in matrices]
        sizes = [size * len(m) * width for m, width in zip(matrices, widths, strict=True)]
        ends = np.cumsum([-(-n // ALIGNMENT) * ALIGNMENT for n in sizes])
        self.buffer, self.scales = aligned(int(ends[-1]) // 4).view(np.uint8), aligned(sum(widths))
        self.places, column = np.zeros((len(matrices), 5), np.int64), 0
        for i, (matrix, width, end) in enumerate(zip(matrices, widths, ends, strict=True)):
            wide = np.zeros((len(matrix), width), np.float32)
            wide[:, : matrix.shape[1]] = matrix
            start, scale = int(end) - -(-sizes[i] // ALIGNMENT) * ALIGNMENT, 0
            if int8:
                steps = self.scales[column : column + width]
                wide, steps[...] = rounded(wide)
                scale, column = steps.ctypes.data, column + width
            panels = wide.reshape(len(matrix), -1, PANEL).swapaxes(0, 1)
            room = self.buffer[start : start + sizes[i]].view(wide.dtype).reshape(panels.shape)
            room[...] = panels
            self.places[i] = room.ctypes.data, len(panels), len(matrix), scale, size


def rounded(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q (I, O) int8 and s (O,) of equation eq-token-int8, so that matrix is about q s."""
    steps = np.abs(matrix).max(axis=0) / 127
    steps[steps == 0] = 1  # a column of zeros has any scale
    return np.rint(matrix / steps).astype(np.int8), steps
