# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tile
"""Epilogues: operations on an accumulator before it leaves the registers, and a bias.

An operation is a function of acc, a lane's float32 sums, and of a tile: whatever else it needs to
know, such as where the sums belong. An epilogue is a list of them.
"""

from collections.abc import Callable, Sequence

from nanoeuler.engines.gpu.lang.instruction import int32, int64
from nanoeuler.engines.gpu.lang.ptx import high_bf16, load_if_below, low_bf16
from nanoeuler.engines.gpu.tile.layout import lane_column


def in_order(operations: Sequence[Callable]) -> Callable:
    """One or more operations as one, which does them one after the other."""
    first, rest = operations[0], operations[1:]
    if not rest:
        return first
    others = in_order(rest)

    def both(acc, tile):
        first(acc, tile)
        others(acc, tile)

    return both


def same(x):
    """x: the curve that is a straight line."""
    return x


def make_bias(columns: int, blocks: int, curve: Callable = same) -> Callable:
    """bias(acc, address, column, n, lane): acc = curve(acc + bias) of bf16 (n,), n even.

    acc: `blocks` accumulators of so many columns, below each other, the first of C's `column`.
    """

    def bias(acc, address, column, n, lane):
        first = int32(column + lane_column(lane))
        for j in range(columns // 8):
            at = int32(first + j * 8)
            pair = load_if_below(address + int64(at) * 2, at, n)
            low, high = low_bf16(pair), high_bf16(pair)
            for block in range(blocks):
                i = block * (columns // 2) + 4 * j
                acc[i] = curve(acc[i] + low)
                acc[i + 1] = curve(acc[i + 1] + high)
                acc[i + 2] = curve(acc[i + 2] + low)
                acc[i + 3] = curve(acc[i + 3] + high)

    return bias
