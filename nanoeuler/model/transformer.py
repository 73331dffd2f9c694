# Made from book/05-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-weights
"""The model: its parameters in one flat buffer, its forward pass, and its backward pass.

Written once, over the operations of an engine (`engines.reference` lists them). Left out: the
optimizer, and generating text (one position at a time, from a cache).

B batch, T positions, C channels, H query heads, G key/value heads, D head width, V vocabulary,
K predicted tokens, F MLP width, L layers.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import parameter_shapes
from nanoeuler.model.euler import INTEGRATORS
from nanoeuler.model.sublayers import (
    attention_sublayer,
    attention_sublayer_backward,
    block_tensors,
    mlp_sublayer,
    mlp_sublayer_backward,
    norm,
    norm_backward,
)

# Bytes: a cache line, and the widest vector register (AVX-512).
ALIGNMENT = 64
# Elements: every tensor starts at a multiple of this, which is 64 bytes of float32.
PADDING = 16
# Standard deviation of the initial matrices: GPT-2's.
INITIAL_DEVIATION = 0.02
# Weight of the heads k >= 1 beside 1 for head 0: DeepSeek-V3's lambda (its report, section 4.2).
EXTRA_HEAD_WEIGHT = 0.3


class Weights(Mapping):
    """The tensors of a model, or their gradients: named views into one flat, aligned buffer.

    `weights["block.0.wqkv"]` is a view; names, shapes and order are `parameter_shapes(config)`.
    `weights.flat` (N,) holds all of them, each padded with zeros to a multiple of 16 elements;
    `weights.blocks[i]` has the tensors of block i as `sublayers.block_tensors` names them. Give
    `flat` to lay the names over memory that exists, of the right size and dtype.
    """

    def __init__(self, config, dtype=np.float32, flat=None):
        shapes = parameter_shapes(config)
        size = sum(_padded(shape) for shape in shapes.values())
        self.config = config
        self.flat = _aligned_zeros(size, dtype) if flat is None else flat
        assert self.flat.shape == (size,) and self.flat.dtype == dtype
        self._views, start = {}, 0
        for name, shape in shapes.items():
            self._views[name] = self.flat[start : start + math.prod(shape)].reshape(shape)
            start += _padded(shape)
        self.blocks = [block_tensors(self, i) for i in range(config.n_blocks)]

    def __getitem__(self, name):
        return self._views[name]

    def __iter__(self):
        return iter(self._views)

    def __len__(self):
        return len(self._views)

    def zeros_like(self):
        """New weights of the same configuration and dtype, all zero: a gradient, or a moment."""
        return Weights(self.config, self.flat.dtype)


def _padded(shape):
    """The number of elements that a tensor occupies in the flat buffer."""
    return -(-math.prod(shape) // PADDING) * PADDING


def _aligned_zeros(size, dtype):
    """A zeroed array (size,) whose first element lies at a multiple of ALIGNMENT bytes."""
    n_bytes = size * np.dtype(dtype).itemsize
    raw = np.zeros(n_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + n_bytes].view(dtype)


def initialise(config, seed, dtype=np.float32):
    """Fresh `Weights`: gains 1, biases 0, matrices normal with deviation 0.02, or less in two.

    wo and w_down, which write to the stream 2L times, are divided by sqrt(2L). The same seed gives
    the same weights in every dtype, up to its rounding.
    """
    rng, weights = np.random.default_rng(seed), Weights(config, dtype)
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            tensor[...] = 0 if name.endswith("_bias") else 1
        else:
            tensor[...] = INITIAL_DEVIATION * rng.standard_normal(tensor.shape)
        if name.endswith((".wo", ".w_down")):
            tensor /= math.sqrt(2 * config.n_layers)
    return weights


# %% sec-backprop-step
def step(engine, config, f, x):
    """The stream after a step of size h by the configured integrator, and what each stage saved.

    f(x) returns what a sublayer adds to x (B, T, C), and what it saved. Eq. eq-backprop-stages.
    """
    a, b = INTEGRATORS[config.integrator]
    velocities, saved = [], []
    for row in a:
        k, s = f(_moved(engine, config, x, row, velocities))
        velocities.append(k)
        saved.append(s)
    return _moved(engine, config, x, b, velocities), saved


def _moved(engine, config, x, weights, velocities):
    """x + h * the weighted sum of the velocities."""
    for weight, k in zip(weights, velocities, strict=True):
        if weight:
            x = engine.add(x, k, config.step_size * weight)
    return x


def step_backward(engine, config, f_backward, saved, dx):
    """Turn dx, the gradient of the stream after `step`, into that before it, in place.

    f_backward(saved, dk) returns the gradient of f's argument in a new array. Eq. eq-backprop-step.
    """
    a, b = INTEGRATORS[config.integrator]
    h, last, du = config.step_size, len(b) - 1, [None] * len(b)
    for i in range(last, -1, -1):
        plain = i == last and h * b[i] == 1  # dk is dx, and nothing will be added to it
        dk = dx if plain else engine.scale(dx, h * b[i])                # (1)
        for j in range(i + 1, last + 1):
            if a[j][i]:
                engine.add_into(dk, du[j], h * a[j][i])                 # (2)
        du[i] = f_backward(saved[i], dk)
    for each in du:
        engine.add_into(dx, each)                                       # (3)


# %% sec-backprop-model
class Saved(NamedTuple):
    """What a forward pass keeps for its backward pass."""

    tokens: np.ndarray      # (B, T)
    angles: tuple           # cos, sin (T, D/2), or None
    layers: list            # a layer: the SavedAttention of each stage, the SavedMlp of each stage
    x: np.ndarray           # (B, T, C) the stream after the last layer
    stats: np.ndarray       # what the norm kept of it
    n: np.ndarray           # (B, T, C) normalised: the input of the output matrix


def stream(engine, config, w, tokens, start=0):
    """The stream n (B, T, C) that the output matrix reads, and `Saved` for the backward.

    tokens (B, T) int stand at the positions from `start` on.
    """
    end = start + tokens.shape[1]
    angles, positions, layers = None, None, []
    if config.position == "rope":
        angles = tuple(table[start:] for table in engine.rope_tables(end, config.head_dim))
    else:
        positions = w["positions"][start:end]
    x = engine.embed(tokens, w["embedding"], positions)
    for i in range(config.n_layers):
        b = w.blocks[i // config.repeat]
        attend = partial(attention_sublayer, engine, config, b, angles)
        x, attention = step(engine, config, attend, x)
        x, mlp = step(engine, config, partial(mlp_sublayer, engine, config, b), x)
        layers.append((attention, mlp))
    n, stats = norm(engine, config, x, w["norm"], w.get("norm_bias"))
    return n, Saved(tokens, angles, layers, x, stats, n)


def output_matrix(config, w):
    """The matrix (C, K V) from the last stream to the logits; of `Weights`, or of gradients."""
    return w["embedding"].T if config.tied else w["output"]


def forward(engine, config, w, tokens):
    """The logits (B, T, K, V) after each of tokens (B, T) int, and `Saved` for the backward."""
    n, saved = stream(engine, config, w, tokens)
    logits = engine.linear(n, output_matrix(config, w))
    return logits.reshape(*tokens.shape, config.n_predict, config.vocab_size), saved


# %% sec-backprop-backward
def backward(engine, config, w, saved, dlogits, dw):
    """Add to dw (Weights) the gradient of the loss, given dlogits (B, T, K, V)."""
    dlogits = dlogits.reshape(*saved.tokens.shape, -1)
    dn = engine.linear_backward(
        dlogits, saved.n, output_matrix(config, w), output_matrix(config, dw)
    )
    dx = norm_backward(
        engine, config, dn, saved.x, w["norm"], saved.stats, dw["norm"], dw.get("norm_bias")
    )
    for i in reversed(range(config.n_layers)):
        b, db = (tensors.blocks[i // config.repeat] for tensors in (w, dw))
        attention, mlp = saved.layers[i]
        with engine.scratch():  # dx outlives the layer; nothing else in it does
            mixing = partial(mlp_sublayer_backward, engine, config, b, db)
            step_backward(engine, config, mixing, mlp, dx)
            attending = partial(attention_sublayer_backward, engine, config, b, db, saved.angles)
            step_backward(engine, config, attending, attention, dx)
    positions = dw["positions"][: dx.shape[1]] if config.position == "learned" else None
    engine.embed_backward(dx, saved.tokens, dw["embedding"], positions)


# %% sec-backprop-loss
def head_weights(n_predict):
    """The weight (K,) of each head's mean loss in the training loss: 1, then EXTRA_HEAD_WEIGHT."""
    return np.where(np.arange(n_predict) == 0, 1.0, EXTRA_HEAD_WEIGHT)


def loss_scale(targets, weights):
    """The scale (K,) of one counted target: a head's weight over its number of counted targets.

    targets (B, T, K) int with IGNORE, weights (K,). Of a batch in parts: the whole batch's targets.
    """
    assert weights.shape == targets.shape[2:]
    counted = np.sum(targets != IGNORE, axis=(0, 1))
    return weights / np.maximum(counted, 1)  # a head without targets has no loss, at any scale


def loss_and_gradients(engine, config, w, tokens, targets, scale, dw):
    """Add the gradient of the loss sum_k scale_k sums_k to dw (Weights); return sums (K,) in nats.

    tokens (B, T) int, targets (B, T, K) int with IGNORE, scale (K,) as `loss_scale` makes it.
    Equation eq-backprop-loss.
    """
    engine.begin()
    logits, saved = forward(engine, config, w, tokens)
    sums, dlogits = engine.cross_entropy(logits, targets, scale)
    backward(engine, config, w, saved, dlogits, dw)
    return sums


def loss_sums(engine, config, w, tokens, targets):
    """The sums (K,) of -log p in nats over the counted targets, by a forward pass only."""
    engine.begin()
    logits, _ = forward(engine, config, w, tokens)
    return engine.cross_entropy(logits, targets, np.ones(config.n_predict))[0]
