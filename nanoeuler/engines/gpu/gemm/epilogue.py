# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-mma
"""Epilogues by their names: what may come with each, and what becomes of the sums in some."""

from collections.abc import Callable
from dataclasses import dataclass

from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.tile import curves


@dataclass(frozen=True)
class Way:
    """What an epilogue allows.

    aux: what it reads beside A and B: nothing, a "bias" (n,), a "tile" of another (m, n), or
    "tiles" of two. outs:
    dtypes of C. second: whether it can store another array as well. sums: whether its columns can
    be summed. cut: whether a tile can be made of pieces. turn: the width of heads that it turns.
    pingpong: what its blocks are, None: either. narrow: whether a tile can have 192 columns.
    """

    aux: str = ""
    outs: tuple[str, ...] = ("bf16",)
    second: bool = False
    sums: bool = False
    cut: bool = False
    turn: int = 0
    pingpong: bool | None = None
    narrow: bool = False


# What can be done with the sums of a tile, and what may come with it: see `wgmma_form.Form`.
EPILOGUES = {
    "store": Way(outs=("bf16", "float32"), sums=True, cut=True, narrow=True),
    "add": Way(outs=("float32",), cut=True, narrow=True),
    "bias": Way("bias", narrow=True),
    "bias and gelu": Way("bias", second=True, narrow=True),
    "gelu backward": Way("tile", second=True, sums=True),
    "bias and gelu_exact": Way("bias", second=True, narrow=True),
    "gelu_exact backward": Way("tile", second=True, sums=True),
    "bias and relu2": Way("bias", second=True, narrow=True),
    "relu2 backward": Way("tile", second=True, sums=True),
    "residual": Way("tile", sums=True),
    "swiglu": Way(second=True),
    "swiglu backward": Way("tiles", second=True, pingpong=True),
    "rope 64": Way(turn=64),
    "rope 128": Way(turn=128),
}


def curve_of(epilogue: str) -> Callable | None:
    """The activation function in which an epilogue ends, if it does."""
    return {
        "bias and gelu": curves.gelu_fast, "bias and gelu_exact": curves.gelu_exact,
        "bias and relu2": curves.relu2,
    }.get(epilogue)  # fmt: skip


def residual_pair(acc, i, pair):
    """acc[i : i + 2] += a pair of bf16, which is returned."""
    acc[i] += ptx.low_bf16(pair)
    acc[i + 1] += ptx.high_bf16(pair)
    return pair


def make_backward_pair(curve_and_slope: Callable) -> Callable:
    """backward_pair(acc, i, pair): acc[i : i + 2] *= the slopes of a curve at a pair of bf16;
    returns the curve's values there, a pair."""

    def backward_pair(acc, i, pair):
        low, low_slope = curve_and_slope(ptx.low_bf16(pair))
        high, high_slope = curve_and_slope(ptx.high_bf16(pair))
        acc[i] *= low_slope
        acc[i + 1] *= high_slope
        return ptx.pack_bf16(low, high)

    return backward_pair


def swiglu_backward_pair(acc, i, gates, ups):
    """acc[i : i + 2] meet a pair of gates and one of ups, and become h; pairs of slopes of both."""
    low, high = acc[i], acc[i + 1]
    a, b, acc[i] = curves.swiglu_and_slopes_fast(low, ptx.low_bf16(gates), ptx.low_bf16(ups))
    c, d, acc[i + 1] = curves.swiglu_and_slopes_fast(high, ptx.high_bf16(gates), ptx.high_bf16(ups))
    return ptx.pack_bf16(a, c), ptx.pack_bf16(b, d)


# What becomes of a pair of sums and of the pair that they meet, by the epilogue.
PAIRS = {
    "residual": residual_pair,
    "gelu backward": make_backward_pair(curves.gelu_and_slope_fast),
    "gelu_exact backward": make_backward_pair(curves.gelu_exact_and_slope),
    "relu2 backward": make_backward_pair(curves.relu2_and_slope),
}
