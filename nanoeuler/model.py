# Made from book/05-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% book/05-backprop.md:685
"""The model: its parameters in one flat buffer, its forward pass, and its backward pass.

Written once, over the operations of an engine (`nanoeuler.reference` lists them). Left out: the
optimizer, and generating text (one position at a time, from a cache).

B batch, T positions, C channels, H query heads, G key/value heads, D head width, V vocabulary,
K predicted tokens, F MLP width, L layers.
"""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from nanoeuler.backward import IGNORE
from nanoeuler.config import parameter_shapes

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
    `weights.flat` (N,) holds all of them, each padded with zeros to a multiple of 16 elements. Give
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


# %% book/05-backprop.md:764
def initialise(config, seed, dtype=np.float32):
    """Fresh `Weights`: gains 1, matrices normal with deviation 0.02, wo and w_down / sqrt(2L).

    The same seed gives the same weights in every dtype, up to its rounding.
    """
    rng, weights = np.random.default_rng(seed), Weights(config, dtype)
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            tensor[...] = 1
        else:
            tensor[...] = INITIAL_DEVIATION * rng.standard_normal(tensor.shape)
        if name.endswith((".wo", ".w_down")):  # these write to the residual stream
            tensor /= math.sqrt(2 * config.n_layers)
    return weights


# %% book/05-backprop.md:796
class SavedBlock(NamedTuple):
    """What the forward of one block keeps for its backward, under the names of `forward`."""

    x: np.ndarray           # (B, T, C) the stream at the block's entry
    r1: np.ndarray          # (B, T, 1) its root mean square
    a: np.ndarray           # (B, T, C) normalised: the input of wqkv
    heads: np.ndarray       # (B, T, H+2G, D) queries and keys after RoPE, and values
    p: np.ndarray           # whatever the engine's attention saved; here (B, H, T, T)
    y: np.ndarray           # (B, T, H*D) the input of wo
    x_mid: np.ndarray       # (B, T, C) the stream between attention and MLP
    r2: np.ndarray          # (B, T, 1) its root mean square
    m: np.ndarray           # (B, T, C) normalised: the input of w_gate_up
    gate_up: np.ndarray     # (B, T, 2F) the input of SwiGLU
    h: np.ndarray           # (B, T, F) the input of w_down


class Saved(NamedTuple):
    """What a forward pass keeps for its backward pass."""

    tokens: np.ndarray      # (B, T)
    cos: np.ndarray         # (T, D // 2)
    sin: np.ndarray         # (T, D // 2)
    blocks: list            # of SavedBlock, one a layer
    x: np.ndarray           # (B, T, C) the stream after the last block
    r: np.ndarray           # (B, T, 1) its root mean square
    n: np.ndarray           # (B, T, C) normalised: the input of the output matrix


def block_weights(w, i):
    """The tensors of block i under their short names: `block_weights(w, 0).wqkv`."""
    prefix = f"block.{i}."
    return SimpleNamespace(
        **{name.removeprefix(prefix): t for name, t in w.items() if name.startswith(prefix)}
    )


def forward(engine, config, w, tokens):
    """The logits (B, T, K, V) after each of tokens (B, T) int, and `Saved` for the backward."""
    B, T = tokens.shape
    G, turned = config.n_kv_heads, config.n_heads + config.n_kv_heads  # RoPE turns q and k, not v
    cos, sin = engine.rope_tables(T, config.head_dim)
    x, blocks = engine.embed(tokens, w["embedding"]), []
    for i in range(config.n_layers):
        b = block_weights(w, i)
        a, r1 = engine.rmsnorm(x, b.norm1)
        heads = engine.linear(a, b.wqkv).reshape(B, T, turned + G, config.head_dim)
        heads = engine.rope(heads, turned, cos, sin)
        y, p = engine.attention(heads, G)
        x_mid = engine.add(x, engine.linear(y, b.wo))
        m, r2 = engine.rmsnorm(x_mid, b.norm2)
        gate_up = engine.linear(m, b.w_gate_up)
        h = engine.swiglu(gate_up)
        blocks.append(SavedBlock(x, r1, a, heads, p, y, x_mid, r2, m, gate_up, h))
        x = engine.add(x_mid, engine.linear(h, b.w_down))
    n, r = engine.rmsnorm(x, w["norm"])
    logits = engine.linear(n, w["output"]).reshape(B, T, config.n_predict, config.vocab_size)
    return logits, Saved(tokens, cos, sin, blocks, x, r, n)


# %% book/05-backprop.md:861
def backward(engine, config, w, saved, dlogits, dw):
    """Add to dw (Weights) the gradient of the loss, given dlogits (B, T, K, V)."""
    B, T = saved.tokens.shape
    G, turned = config.n_kv_heads, config.n_heads + config.n_kv_heads
    dn = engine.linear_backward(dlogits.reshape(B, T, -1), saved.n, w["output"], dw["output"])
    dx = engine.rmsnorm_backward(dn, saved.x, w["norm"], saved.r, dw["norm"])
    for i in reversed(range(config.n_layers)):
        s, b, db = saved.blocks[i], block_weights(w, i), block_weights(dw, i)
        with engine.scratch():  # dx outlives the block; nothing else in it does
            dh = engine.linear_backward(dx, s.h, b.w_down, db.w_down)
            dgate_up = engine.swiglu_backward(dh, s.gate_up)
            dm = engine.linear_backward(dgate_up, s.m, b.w_gate_up, db.w_gate_up)
            engine.add_into(dx, engine.rmsnorm_backward(dm, s.x_mid, b.norm2, s.r2, db.norm2))

            dy = engine.linear_backward(dx, s.y, b.wo, db.wo)
            dheads = engine.attention_backward(dy, s.heads, G, s.p)
            dheads = engine.rope_backward(dheads, turned, saved.cos, saved.sin)
            da = engine.linear_backward(dheads.reshape(B, T, -1), s.a, b.wqkv, db.wqkv)
            engine.add_into(dx, engine.rmsnorm_backward(da, s.x, b.norm1, s.r1, db.norm1))
    engine.embed_backward(dx, saved.tokens, dw["embedding"])


# %% book/05-backprop.md:892
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


__all__ = [
    "ALIGNMENT",
    "PADDING",
    "INITIAL_DEVIATION",
    "EXTRA_HEAD_WEIGHT",
    "Weights",
    "initialise",
    "SavedBlock",
    "Saved",
    "block_weights",
    "forward",
    "backward",
    "head_weights",
    "loss_scale",
    "loss_and_gradients",
    "loss_sums",
]
