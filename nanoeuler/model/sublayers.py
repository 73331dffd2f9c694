# Made from book/05-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-sublayers
"""The two halves of a block as functions of the stream, and their backward passes.

Each is the f of a step x + h f(x); the step itself is transformer.py's. Written over the operations
of an engine (`engines.reference` lists them). b and db are the tensors of one block and their
gradients, as `block_tensors` names them; a tensor that the architecture does not have is None.

B batch, T positions, C channels, H query heads, G key/value heads, D head width, F MLP width.
"""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

# Every tensor that a block can have, of `parameter_shapes`.
TENSORS = [
    f"{name}{bias}"
    for name in ("norm1", "wqkv", "wo", "norm2", "w_up", "w_down")
    for bias in ("", "_bias")
]


def block_tensors(w, i):
    """The tensors of block i under their short names: `block_tensors(w, 0).wqkv`."""
    return SimpleNamespace(**{name: w.get(f"block.{i}.{name}") for name in TENSORS})


def norm(engine, config, x, gain, bias):
    """The configured norm of x (..., C): y (..., C), and what its backward needs of x."""
    if config.norm == "rms":
        return engine.rmsnorm(x, gain)
    return engine.layernorm(x, gain, bias)


def norm_backward(engine, config, dy, x, gain, stats, dgain, dbias):
    """The backward of `norm`: adds to dgain and dbias, returns dx."""
    if config.norm == "rms":
        return engine.rmsnorm_backward(dy, x, gain, stats, dgain)
    return engine.layernorm_backward(dy, x, gain, stats, dgain, dbias)


class SavedAttention(NamedTuple):
    """What `attention_sublayer` keeps for its backward, under its names."""

    x: np.ndarray           # (B, T, C) the stream that it read
    stats: np.ndarray       # (B, T, 1) its root mean square, or (B, T, 2) for LayerNorm
    a: np.ndarray           # (B, T, C) normalised: the input of wqkv
    heads: np.ndarray       # (B, T, H+2G, D) queries and keys after RoPE, and values
    p: np.ndarray           # whatever the engine's attention saved; here (B, H, T, T)
    y: np.ndarray           # (B, T, H*D) the input of wo


def attention_sublayer(engine, config, b, angles, x):
    """What attention adds to the stream x (B, T, C), and `SavedAttention`.

    angles: cos, sin (T, D/2) for RoPE, or None where positions are learned.
    """
    B, T, _ = x.shape
    H, G = config.n_heads, config.n_kv_heads
    a, stats = norm(engine, config, x, b.norm1, b.norm1_bias)
    heads = engine.linear(a, b.wqkv, b.wqkv_bias).reshape(B, T, H + 2 * G, config.head_dim)
    if angles:
        heads = engine.rope(heads, H + G, *angles)  # queries and keys, not values
    y, p = engine.attention(heads, G)
    return engine.linear(y, b.wo, b.wo_bias), SavedAttention(x, stats, a, heads, p, y)


def attention_sublayer_backward(engine, config, b, db, angles, s, dout):
    """The backward of `attention_sublayer`: from dout (B, T, C) and its `SavedAttention` s to dx.

    db are the gradients of the tensors b, and are added to.
    """
    (B, T, _), H, G = dout.shape, config.n_heads, config.n_kv_heads
    dy = engine.linear_backward(dout, s.y, b.wo, db.wo, db.wo_bias)
    dheads = engine.attention_backward(dy, s.heads, G, s.p)
    if angles:
        dheads = engine.rope_backward(dheads, H + G, *angles)
    da = engine.linear_backward(dheads.reshape(B, T, -1), s.a, b.wqkv, db.wqkv, db.wqkv_bias)
    return norm_backward(engine, config, da, s.x, b.norm1, s.stats, db.norm1, db.norm1_bias)


class SavedMlp(NamedTuple):
    """What `mlp_sublayer` keeps for its backward, under its names."""

    x: np.ndarray           # (B, T, C) the stream that it read
    stats: np.ndarray       # (B, T, 1) its root mean square, or (B, T, 2) for LayerNorm
    m: np.ndarray           # (B, T, C) normalised: the input of w_up
    u: np.ndarray           # (B, T, 2F) gate and up, or (B, T, F) for GELU
    h: np.ndarray           # (B, T, F) the input of w_down


def mlp_sublayer(engine, config, b, x):
    """What the MLP adds to the stream x (B, T, C), and `SavedMlp`."""
    m, stats = norm(engine, config, x, b.norm2, b.norm2_bias)
    u = engine.linear(m, b.w_up, b.w_up_bias)
    h = engine.swiglu(u) if config.mlp == "swiglu" else engine.gelu(u)
    return engine.linear(h, b.w_down, b.w_down_bias), SavedMlp(x, stats, m, u, h)


def mlp_sublayer_backward(engine, config, b, db, s, dout):
    """The backward of `mlp_sublayer`: from dout (B, T, C) and its `SavedMlp` s to dx.

    db are the gradients of the tensors b, and are added to.
    """
    dh = engine.linear_backward(dout, s.h, b.w_down, db.w_down, db.w_down_bias)
    backward = engine.swiglu_backward if config.mlp == "swiglu" else engine.gelu_backward
    dm = engine.linear_backward(backward(dh, s.u), s.m, b.w_up, db.w_up, db.w_up_bias)
    return norm_backward(engine, config, dm, s.x, b.norm2, s.stats, db.norm2, db.norm2_bias)
