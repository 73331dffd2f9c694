# Made from book/p-token-on-a-cpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-token-panels
"""What lays out weights, compiled: blocks of files become float32 or blocks of panels.

A panel has PANEL columns; of a file, blocks along the depth of a column, so column by column.
Leaves out where they go: packing.py.
"""

import numpy as np

from nanoeuler.engines.cpu.options import F32
from nanoeuler.jit import njit

BLOCK = 32  # numbers of a block
SPREAD = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # the kinds that `spread` knows, and their bytes
# No sum here may change its order, nor a quotient become a product.
_EXACT = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract"}}


def halves() -> np.ndarray:
    """The float32 of each float16, by its bits: (65536,)."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


@njit(**_EXACT)
def _block(raw, half, numbers):
    # numbers (32,) of the block in these bytes, of which kind their count says
    d = half[raw[0] | np.uint16(raw[1]) << 8]
    if raw.size == 34:
        for i in range(32):
            numbers[i] = d * F32(np.int8(raw[2 + i]))
    elif raw.size == 20:
        m = half[raw[2] | np.uint16(raw[3]) << 8]
        for i in range(16):
            numbers[i] = d * F32(raw[4 + i] & 15) + m
            numbers[16 + i] = d * F32(raw[4 + i] >> 4) + m
    else:
        for i in range(16):
            numbers[i] = d * (F32(raw[2 + i] & 15) - F32(8))
            numbers[16 + i] = d * (F32(raw[2 + i] >> 4) - F32(8))


@njit(**_EXACT)
def spread(raw: np.ndarray, half: np.ndarray, room: np.ndarray) -> None:
    """room float32 (panels, depth, PANEL) = the columns in the blocks raw uint8 (O, blocks, size).

    half: `halves()`. Columns beyond O are zeros.
    """
    width, numbers = room.shape[2], np.empty((room.shape[2], 32), np.float32)
    for p in range(room.shape[0]):
        n = min(width, raw.shape[0] - p * width)
        numbers[n:] = 0
        for b in range(raw.shape[1]):
            for lane in range(n):
                _block(raw[p * width + lane, b], half, numbers[lane])
            for i in range(32):
                for lane in range(width):
                    room[p, 32 * b + i, lane] = numbers[lane, i]


@njit(**_EXACT)
def shrunk(wide: np.ndarray, q: np.ndarray, steps: np.ndarray) -> None:
    """q int8 (panels, depth, PANEL) and steps (panels, PANEL) of equation eq-token-int8."""
    for p in range(wide.shape[0]):
        step = steps[p]
        step[:] = F32(0)
        for k in range(wide.shape[1]):
            for lane in range(step.size):
                step[lane] = max(step[lane], abs(wide[p, k, lane]))
        for lane in range(step.size):
            step[lane] /= F32(127)
            if step[lane] == 0:
                step[lane] = F32(1)
        for k in range(wide.shape[1]):
            for lane in range(step.size):
                q[p, k, lane] = np.int8(np.rint(wide[p, k, lane] / step[lane]))


@njit(**_EXACT)
def sorted_blocks(raw: np.ndarray, room: np.ndarray, lanes: int) -> None:
    """Blocks of Q4_1, raw uint8 (O, blocks, 20), as panels have them: room (panels, blocks, bytes).

    lanes: columns of a vector. Columns beyond O stay as they are.
    """
    width = room.shape[2] // 20
    for column in range(raw.shape[0]):
        p, lane = column // width, column % width
        begin = 4 * width + lane // lanes * 16 * lanes + lane % lanes * 4
        for b in range(raw.shape[1]):
            block, out = raw[column, b], room[p, b]
            for i in range(2):
                out[2 * lane + i] = block[i]
                out[2 * width + 2 * lane + i] = block[2 + i]
            for g in range(2):
                for i in range(4):
                    one, two = block[4 + 8 * g + i], block[8 + 8 * g + i]
                    out[begin + 4 * lanes * g + i] = one & 15 | (two & 15) << 4
                    out[begin + 4 * lanes * (2 + g) + i] = one >> 4 | two >> 4 << 4


@njit(**_EXACT)
def sorted_bytes(raw: np.ndarray, room: np.ndarray) -> None:
    """Blocks of Q8_0, raw uint8 (O, blocks, 34), as panels have them: room (panels, blocks, bytes).

    First the scales of all columns, then their first numbers, their second ones, and so on. Columns
    beyond O are zeros.
    """
    width = room.shape[2] // 34
    for p in range(room.shape[0]):
        n = min(width, raw.shape[0] - p * width)
        for b in range(raw.shape[1]):
            out = room[p, b]
            out[:] = 0
            for lane in range(n):
                block = raw[p * width + lane, b]
                out[2 * lane], out[2 * lane + 1] = block[0], block[1]
                for i in range(32):
                    out[(2 + i) * width + lane] = block[2 + i]
