# Made from book/l-attention-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-softmax
"""Softmax in the registers of an accumulator, forward (online) and backward.

A thread has two rows, 8 apart, and of each the columns 8 n and 8 n + 1 from its own first one on:
s[4 n] and s[4 n + 1] of the upper row, s[4 n + 2] and s[4 n + 3] of the lower. The families differ
in when they call what; here is what is called.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention import layout
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import float32, int32, int64


class Rows(NamedTuple):
    """A thread's part of two queries: output so far; for each row its running maximum, its
    sum of exponentials over this lane's keys, and the factor of the last correction.
    """

    o: Any
    m: Any
    total: Any
    alpha: Any


def start_rows(rows: Rows, D: int) -> None:
    """Nothing has been seen."""
    layout.clear(rows.o, D // 2)
    layout.clear(rows.total, 2)
    for h in range(2):
        rows.m[h] = float32(layout.LOWEST)


def lane_maxima(s: Any, keys: int, above: float, below: float) -> tuple[float, float]:
    """The largest of `above`, or `below`, and of what this lane has of its two rows: two chains
    of comparisons each.
    """
    a0, a1, b0, b1 = above, below, above, below
    for i in range(0, keys // 2, 8):
        a0 = ptx.larger(a0, ptx.larger(s[i], s[i + 1]))
        a1 = ptx.larger(a1, ptx.larger(s[i + 2], s[i + 3]))
        b0 = ptx.larger(b0, ptx.larger(s[i + 4], s[i + 5]))
        b1 = ptx.larger(b1, ptx.larger(s[i + 6], s[i + 7]))
    return ptx.larger(a0, b0), ptx.larger(a1, b1)


def follow(rows: Rows, above: float, below: float, scale: float) -> None:
    """m of the two rows becomes this, `total` follows, alpha is what o still has to follow.

    scale: that of maxima; 1 where they are kept with the scale multiplied in.
    """
    m, total, alpha = rows.m, rows.total, rows.alpha
    alpha[0], alpha[1] = ptx.exp2((m[0] - above) * scale), ptx.exp2((m[1] - below) * scale)
    m[0], m[1] = above, below
    total[0] *= alpha[0]
    total[1] *= alpha[1]


def raise_maxima(s: Any, keys: int, rows: Rows, scale: float) -> None:
    """m becomes the largest score so far; o has to follow by alpha."""
    above, below = lane_maxima(s, keys, rows.m[0], rows.m[1])
    above, below = layout.quad_maxima(above, below)
    follow(rows, above, below, scale)


def correct(rows: Rows, D: int) -> None:
    """o under the old maximum becomes o under the new one."""
    o, alpha = rows.o, rows.alpha
    for i in range(0, D // 2, 4):
        o[i] *= alpha[0]
        o[i + 1] *= alpha[0]
        o[i + 2] *= alpha[1]
        o[i + 3] *= alpha[1]


class Span(NamedTuple):
    """Some columns of an accumulator: the first, a multiple of 8, and how many."""

    first: int
    count: int


def exponentials(
    s: Any, of: Span, maxima: tuple[float, float], sums: tuple[float, float], scale: float
) -> tuple[float, float]:
    """Scores become exp2(s scale - m). maxima: scaled; sums: of each row, to which they add."""
    above, below = sums
    for j in range(of.count // 8):
        i = of.first // 2 + 4 * j
        s[i], s[i + 1] = ptx.exp2(s[i] * scale - maxima[0]), ptx.exp2(s[i + 1] * scale - maxima[0])
        s[i + 2] = ptx.exp2(s[i + 2] * scale - maxima[1])
        s[i + 3] = ptx.exp2(s[i + 3] * scale - maxima[1])
        above += s[i] + s[i + 1]
        below += s[i + 2] + s[i + 3]
    return above, below


def pack(s: Any, of: Span, a: Any) -> None:
    """Columns of an accumulator, rounded to bf16 in pairs: the left operand of a product."""
    for i in range(of.count // 4):
        j = of.first // 2 + 2 * i
        a[i] = ptx.pack_bf16(s[j], s[j + 1])


def save_lse(rows: Rows, line: int, row: int, lane: int, T: int, scale: float) -> None:
    """`total` over the quad, and lse = m scale + log2(total) of a lane's rows, `row` and 8 below.

    line: the address of the head's lse. Rows past T get what hides them.
    """
    for h in range(2):
        rows.total[h] = layout.quad_sum(rows.total[h])
        if lane & 3 == 0:
            t = int32(row + 8 * h)
            value = float32(layout.PAST_END)
            if t < T:
                value = rows.m[h] * scale + ptx.log2(rows.total[h])
            ptx.store_float(line + 4 * int64(t), value)


def row_probabilities(s: Any, keys: int, lse: Any, scale: float) -> None:
    """Scores become probabilities, rows being queries."""
    for i in range(0, keys // 2, 4):
        s[i], s[i + 1] = ptx.exp2(s[i] * scale - lse[0]), ptx.exp2(s[i + 1] * scale - lse[0])
        s[i + 2] = ptx.exp2(s[i + 2] * scale - lse[1])
        s[i + 3] = ptx.exp2(s[i + 3] * scale - lse[1])


def row_gradients(p: Any, dp: Any, of: Span, delta: Any) -> None:
    """p becomes ds = p (dp - delta), unscaled. Equation eq-flash-backward (3)."""
    for n in range(of.count // 8):
        i = of.first // 2 + 4 * n
        p[i], p[i + 1] = p[i] * (dp[i] - delta[0]), p[i + 1] * (dp[i + 1] - delta[0])
        p[i + 2] = p[i + 2] * (dp[i + 2] - delta[1])
        p[i + 3] = p[i + 3] * (dp[i + 3] - delta[1])


def column_probabilities(s: Any, of: Span, line: int, scale: float) -> None:
    """The same on a transposed tile. line: the address of lse of this lane's first query."""
    for n in range(of.count // 8):
        i = of.first // 2 + 4 * n
        x, y = ptx.load_shared_float2(int32(line + 4 * of.first + 32 * n))
        s[i], s[i + 1] = ptx.exp2(s[i] * scale - x), ptx.exp2(s[i + 1] * scale - y)
        s[i + 2], s[i + 3] = ptx.exp2(s[i + 2] * scale - x), ptx.exp2(s[i + 3] * scale - y)


def column_gradients(p: Any, dp: Any, of: Span, line: int) -> None:
    """The same on a transposed tile. line: the address of delta of this lane's first query."""
    for n in range(of.count // 8):
        i = of.first // 2 + 4 * n
        x, y = ptx.load_shared_float2(int32(line + 4 * of.first + 32 * n))
        p[i], p[i + 1] = p[i] * (dp[i] - x), p[i + 1] * (dp[i + 1] - y)
        p[i + 2], p[i + 3] = p[i + 2] * (dp[i + 2] - x), p[i + 3] * (dp[i + 3] - y)


class Outputs(NamedTuple):
    """A head's output of the forward pass and its gradient, o and do; its rows of lse and delta."""

    o: layout.Head
    do: layout.Head
    lse: int
    delta: int


def make_take_deltas(D: int, size: int, dot: Callable) -> Callable:
    """take_deltas(lse, delta, y, row, lane, T) of elements of `size` bytes.

    dot(x, y, D): the product of D / 4 of them at each of two addresses.
    """

    def take_deltas(lse: Any, delta: Any, y: Outputs, row: int, lane: int, T: int) -> None:
        """delta = do . o of a lane's rows, `row` and 8 below, kept and saved; their lse.
        Equation eq-flash-delta.
        """
        for h in range(2):
            t = int32(row + 8 * h)
            sum_of_row, lse[h] = float32(0), float32(0)
            if t < T:
                part = (lane & 3) * (D * size // 4)  # bytes: four lanes share a row
                o, do = y.o.start + int64(t) * y.o.step, y.do.start + int64(t) * y.do.step
                sum_of_row = dot(o + part, do + part, D)
                lse[h] = ptx.load_float(y.lse + 4 * int64(t))
            delta[h] = layout.quad_sum(sum_of_row)
            if lane & 3 == 0 and t < layout.round_up(T, layout.PAD):
                ptx.store_float(y.delta + 4 * int64(t), delta[h])

    return take_deltas


def pad_line(line: int, after: int, T: int, value: float, thread: int, threads: int) -> None:
    """The last block of a head also sets what its line of lse or delta has `after` its own rows."""
    if after >= T:
        for i in range(0, layout.PAD, threads):
            t = int32(after + thread + i)
            if t < layout.round_up(T, layout.PAD):
                ptx.store_float(line + 4 * int64(t), value)
