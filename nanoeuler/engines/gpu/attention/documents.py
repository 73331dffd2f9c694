# Made from book/12-flash-attention.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-documents
"""Rows of several texts, as attention's kernels want them: how far each position sees, both ways.

Left out: the kernels; where texts begin in a row, which is the data's business.
B batch, T positions.
"""

from typing import Any, NamedTuple

import numpy as np

from nanoeuler.errors import UserError


class Documents(NamedTuple):
    """int32 (B, T) in C order. first: the first key that each query sees; last: the last query
    that sees each key. Along a row neither falls."""

    first: Any
    last: Any

    @staticmethod
    def window(T: int, W: int, B: int = 1) -> "Documents":
        """A sliding window: each of T queries sees W keys, its own and those before it."""
        if W < 1:
            raise UserError(f"a window has at least the query's own key, not {W} keys")
        t = np.arange(T, dtype=np.int32)
        first, last = np.maximum(t - (W - 1), 0), np.minimum(t + (W - 1), T - 1)
        return Documents(np.tile(first, (B, 1)), np.tile(last, (B, 1)))


def last_of(first: np.ndarray) -> np.ndarray:
    """The last query that sees each key, int32 (B, T), from the first key that each query sees."""
    first = np.asarray(first)
    T = first.shape[-1]
    places = np.arange(T)
    if first.ndim != 2 or (first < 0).any() or (first > places).any():
        raise UserError("`first` is (B, T), and gives for each position one that is not later")
    if (np.diff(first, axis=1) < 0).any():
        raise UserError("`first` falls within a row: a text that has ended does not come back")
    last = [np.searchsorted(row, places, side="right") - 1 for row in first]
    return np.array(last, np.int32)


def expect_documents(documents: Documents | None, B: int, T: int) -> tuple[Any, Any]:
    """The mask's arrays, or two zeros, never read; UserError for others than int32 (B, T) in
    C order."""
    for name, array in zip(Documents._fields, documents or (), strict=False):
        dense = array.strides[-1] == 4 and (B == 1 or array.strides[0] == 4 * T)
        if (tuple(array.shape), str(array.dtype), dense) != ((B, T), "int32", True):
            came = f"{array.dtype} {tuple(array.shape)}, strides {tuple(array.strides)}"
            raise UserError(f"documents' {name} is dense int32 {(B, T)}, not {came}")
    return tuple(documents or (0, 0))
