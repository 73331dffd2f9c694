# Made from book/06-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-buffer
"""The parameters of a model in one flat buffer, with a name and a shape for each tensor.

Gradients and the moments of an optimizer are kept in the same way. Left out: what is done with
them.

B batch, T positions, C channels, H query heads, G key/value heads, D head width, V vocabulary,
K predicted tokens, F MLP width, L layers.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, count
from typing import NamedTuple

import numpy as np

from nanoeuler.model.config import ModelConfig, parameter_shapes

# Bytes: a cache line, and the widest vector register (AVX-512).
ALIGNMENT = 64
# Elements: every tensor starts at a multiple of this, which is 64 bytes of float32.
PADDING = 16
# Standard deviation of the initial matrices: GPT-2's.
INITIAL_DEVIATION = 0.02


class Block(NamedTuple):
    """The tensors of one block, or their gradients; None for one that the architecture lacks."""

    norm1: np.ndarray               # (C,) the gain of the norm before attention
    norm1_bias: np.ndarray | None   # (C,)
    wqkv: np.ndarray                # (C, (H+2G) D) to queries, keys and values
    wqkv_bias: np.ndarray | None    # ((H+2G) D,)
    q_norm: np.ndarray | None       # (D,) the gain of each query's norm
    k_norm: np.ndarray | None       # (D,) and of each key's
    wo: np.ndarray                  # (H D, C) from attention to the stream
    wo_bias: np.ndarray | None      # (C,)
    norm2: np.ndarray               # (C,) the gain of the norm before the MLP
    norm2_bias: np.ndarray | None   # (C,)
    w_up: np.ndarray                # (C, 2F) gate and up, or (C, F) ungated
    w_up_bias: np.ndarray | None    # (2F,) or (F,)
    w_down: np.ndarray              # (F, C) from the MLP to the stream
    w_down_bias: np.ndarray | None  # (C,)


class Weights(Mapping):
    """The tensors of a model, or their gradients: named views into one flat, aligned buffer.

    `weights["block.0.wqkv"]` is a view; names, shapes and order are `parameter_shapes(config)`.
    `weights.flat` (N,) holds all of them, each padded with zeros to a multiple of 16 elements.
    `weights.starts[name]` is where a tensor begins there. `weights.blocks[i]` is the `Block` i. It
    begins at `block_starts[i]`, and the last of the `block_starts` is the end of all blocks. If
    `flat` is given, of the right size and dtype, the views are into it and not into a new buffer.
    """

    def __init__(
        self, config: ModelConfig, dtype: np.typing.DTypeLike = np.float32,
        flat: np.ndarray | None = None,
    ):  # fmt: skip
        self.config, size = config, flat_size(config)
        self.flat = _aligned_zeros(size, dtype) if flat is None else flat
        assert self.flat.shape == (size,) and self.flat.dtype == dtype
        self._views, self.starts, start = {}, {}, 0
        for name, shape in parameter_shapes(config).items():
            self._views[name] = self.flat[start : start + math.prod(shape)].reshape(shape)
            self.starts[name] = start
            start += _padded(shape)
        named = [[f"block.{i}.{name}" for name in Block._fields] for i in range(config.n_blocks)]
        self.blocks = [Block(*map(self.get, names)) for names in named]
        first = [names[0] for names in named]
        self.block_starts = [self.starts[name] for name in (*first, "norm")]

    def __getitem__(self, name: str) -> np.ndarray:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def zeros_like(self) -> "Weights":
        """New weights of the same configuration and dtype, all zero: a gradient, or a moment."""
        return Weights(self.config, self.flat.dtype)


def flat_size(config: ModelConfig) -> int:
    """N, the elements of a flat buffer for this architecture."""
    return sum(_padded(shape) for shape in parameter_shapes(config).values())


def _padded(shape: tuple) -> int:
    """The number of elements that a tensor occupies in the flat buffer."""
    return -(-math.prod(shape) // PADDING) * PADDING


def _aligned_zeros(size: int, dtype: np.typing.DTypeLike) -> np.ndarray:
    """A zeroed array (size,) whose first element lies at a multiple of ALIGNMENT bytes."""
    n_bytes = size * np.dtype(dtype).itemsize
    raw = np.zeros(n_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + n_bytes].view(dtype)


# %% sec-backprop-draws
STRETCH = 1 << 18  # normals that a thread draws at a time, 2 MB
AT_ONCE = 16  # threads; the values don't depend on how many run at once
# A reader that jumps in is out of step with a chance of 2 %, and mostly in step after a normal or
# two. For a normal beyond 3.65 NumPy draws pairs of raw numbers until one fits, as 94 % do. There
# it may stay out longer. After SETTLED normals it's out with a chance of 1e-13; then `_stretch`
# finds no end and raises. Two normals are equal by chance less than once in 2^52, so SAME in a row
# that are equal are from the same place.
SETTLED, SAME = 16, 4


def _reader(seed, place):
    """What reads the stream of `default_rng(seed)` from its raw number `place` on."""
    return np.random.Generator(np.random.PCG64(seed).advance(place))


def _stretch(seed, i):
    """Part i of the normals of the stream; the parts join without a gap.

    Reader i starts at raw number i STRETCH. Part i begins after the first SETTLED of its normals
    (part 0 with the first of all), and ends where part i + 1 begins.
    """
    values = _reader(seed, i * STRETCH).standard_normal(STRETCH)
    mark = _reader(seed, (i + 1) * STRETCH).standard_normal(SETTLED + SAME)[SETTLED:]
    (end,) = (at for at in np.flatnonzero(values == mark[0])
              if np.array_equal(values[at : at + SAME], mark))  # fmt: skip
    return values[SETTLED if i else 0 : end]


def _place(matrices, starts, values, at):
    """Write `values`, the normals from number `at` on, into the matrices; drop any left over."""
    while len(values) and at < starts[-1]:
        i = bisect_right(starts, at) - 1
        there = matrices[i][at - starts[i] :][: len(values)]
        np.multiply(values[: len(there)], INITIAL_DEVIATION, out=there, casting="same_kind")
        values, at = values[len(there) :], at + len(there)


def _draw(seed, matrices):
    """Fill flat matrices, one after the other, with the normals of `default_rng(seed)`."""
    starts = [0, *accumulate(map(len, matrices))]
    if starts[-1] <= STRETCH:
        values = np.random.default_rng(seed).standard_normal(starts[-1])
        return _place(matrices, starts, values, 0)
    done, place = 0, partial(_place, matrices, starts)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for first in count(0, AT_ONCE):
            found = [*pool.map(partial(_stretch, seed), range(first, first + AT_ONCE))]
            places = [*accumulate(map(len, found), initial=done)]
            list(pool.map(place, found, places[:-1]))
            if (done := places[-1]) >= starts[-1]:
                return


def initialise(config: ModelConfig, seed: int, dtype: np.typing.DTypeLike = np.float32) -> Weights:
    """Fresh `Weights`: gains 1, biases 0, matrices normal with deviation 0.02.

    wo and w_down, which write to the residual stream 2L times in a pass, are then divided by
    sqrt(2L), or are 0 if `config.init` is "zero". The same seed gives the same weights in every
    dtype, up to its rounding.
    """
    weights = Weights(config, dtype)
    _draw(seed, [tensor.reshape(-1) for tensor in weights.values() if tensor.ndim > 1])
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            tensor[...] = 0 if name.endswith("_bias") else 1
        if name.endswith((".wo", ".w_down")):
            tensor *= 0 if config.init == "zero" else 1 / math.sqrt(2 * config.n_layers)
    return weights


def output_matrix(config: ModelConfig, w: Weights) -> np.ndarray:
    """The matrix (C, K V) from the residual stream to the logits, or its gradient: a view of w."""
    return w["embedding"].T if config.tied else w["output"]
