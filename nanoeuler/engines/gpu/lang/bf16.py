# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-numbers
"""bf16, which NumPy lacks: a float32's upper half, kept as uint16."""

import numpy as np


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> the bits of the nearest bf16, ties to even, as uint16 of the same shape."""
    word = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = (word + 0x7FFF + (word >> 16 & 1)) >> 16
    quiet = word >> 16 | 0x40  # of a nan the sum above could make an infinity
    return np.where((word & 0x7FFFFFFF) > 0x7F800000, quiet, nearest).astype(np.uint16)


def from_bf16(half: np.ndarray) -> np.ndarray:
    """The float32 of each bf16, given by its bits: its upper half, then zeros."""
    return (np.asarray(half).astype(np.uint32) << 16).view(np.float32)
