# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-device
"""Where the elements of an array are, and of a part of it: shapes and strides, in bytes.

Arrays here have `shape`, `dtype` and `strides` as NumPy's do, wherever their memory is.
"""

import math
from typing import Any

import numpy as np

from nanoeuler.errors import UserError


def dense(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The strides of an array in C order, of elements of `size` bytes."""
    return tuple(math.prod(shape[i + 1 :]) * size for i in range(len(shape)))


def reach(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> int:
    """The bytes from the beginning of an array's first element to the end of its last."""
    if 0 in shape:
        return 0
    return sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + size


def require_dense(array: Any) -> None:
    """UserError unless the array is in C order without gaps."""
    if array.strides != dense(array.shape, array.dtype.itemsize):
        raise UserError(
            f"expected an array in C order without gaps, got {array.shape} with strides "
            f"{array.strides}: copy it first"
        )


def part_of(
    array: Any, offset: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None
) -> tuple[tuple[int, ...], np.dtype, tuple[int, ...]]:
    """Shape, dtype and strides of a part that begins `offset` bytes into an array.

    strides: C order where None is given. UserError if the part would reach outside, or its elements
    would not be at multiples of their size.
    """
    kind, shape = np.dtype(dtype), tuple(shape)
    size = kind.itemsize
    strides = dense(shape, size) if strides is None else tuple(strides)
    whole = reach(array.shape, array.strides, array.dtype.itemsize)
    if len(strides) != len(shape) or min((offset, *strides)) < 0:
        raise UserError(f"no part begins at {offset} with shape {shape} and strides {strides}")
    if any(step % size for step in (offset, *strides)):
        raise UserError(f"{kind} lies at multiples of {size}, not at {offset} and {strides} on")
    if offset + reach(shape, strides, size) > whole:
        raise UserError(
            f"a part {shape} of {kind} from byte {offset} on, with strides {strides}, reaches "
            f"outside of an array of {whole} bytes"
        )
    return shape, kind, strides
