# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tile
"""RoPE on heads that lie in registers, as the tensor cores leave them.

A thread has, of a head of width D = 64 or 128, D / 2 registers: 4 j and 4 j + 1 are columns
8 j + 2 (lane % 4) and the next of one row, 4 j + 2 and 4 j + 3 the same of the row 8 below. So the
partner of a column, D / 2 further on, is D / 4 registers further on. Equation eq-layers-rope.
"""

from typing import Any, NamedTuple

from nanoeuler.engines.gpu.lang.instruction import int32, int64
from nanoeuler.engines.gpu.lang.ptx import divide, float_of, load_int2
from nanoeuler.errors import UserError


class Turning(NamedTuple):
    """By what heads are turned, and which.

    cos, sin: tables float32 (positions, D / 2) in C order, in a kernel their addresses; the first T
    positions belong to rows 0 to T - 1, T to 2 T - 1, and so on. columns: so many, the first of a
    row, are of heads that are turned.
    """

    cos: Any = 0
    sin: Any = 0
    T: int = 0
    columns: int = 0


def take_row(angles, k, table, position, D, lane):
    """angles[k], [k + 1], [k + 4], [k + 5] ... = what the lane needs of a row of a table."""
    at = table + int64(position) * (D * 2) + int64((lane & 3) * 8)
    for j in range(D // 16):
        low, high = load_int2(at + j * 32)
        angles[k + 4 * j], angles[k + 4 * j + 1] = float_of(low), float_of(high)


def take_angles(angles, cos, sin, above, below, D, lane):
    """Cosines, then as many sines, of the positions of a thread's two rows: D / 2 registers."""
    take_row(angles, 0, cos, above, D, lane)
    take_row(angles, D // 4, sin, above, D, lane)
    take_row(angles, 2, cos, below, D, lane)
    take_row(angles, D // 4 + 2, sin, below, D, lane)


def turn(acc, i, angles, sign, D):
    """The head in registers i to i + D / 2 - 1, turned by sign times the angles."""
    for k in range(D // 4):
        left, right = acc[i + k], acc[i + D // 4 + k]
        cos, sin = angles[k], sign * angles[D // 4 + k]
        acc[i + k] = left * cos - right * sin
        acc[i + D // 4 + k] = left * sin + right * cos


def position(row, T):
    """The position of a row in its sequence of T."""
    return int32(row - T * divide(row, T))


def expect_turning(by: Turning | None, rows: int, columns: int, D: int) -> None:
    """UserError unless heads of width D (0: none) in an array (rows, columns) can be turned so."""
    if (by is None) != (D == 0):
        raise UserError(f"heads of width {D} are turned by {by}")
    if by is None:
        return
    for name, table in (("cos", by.cos), ("sin", by.sin)):
        shape, dtype, steps = tuple(table.shape), str(table.dtype), tuple(table.strides)
        if shape[1:] != (D // 2,) or dtype != "float32" or steps != (D * 2, 4):
            raise UserError(f"{name} is dense float32 (positions, {D // 2}), not {dtype} {shape}")
    if not 1 <= by.T <= min(by.cos.shape[0], by.sin.shape[0]) or rows % by.T:
        raise UserError(f"{rows} rows are no sequences of {by.T}, or tables have fewer positions")
    if by.columns % D or not 0 <= by.columns <= columns:
        raise UserError(f"{by.columns} columns are no heads of width {D} in rows of {columns}")
