# Made from book/06-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-page
"""A whole GPT on one page, forward and backward, made of the functions of chapters 4 to 6.

Llama's architecture with K prediction heads: RMSNorm, RoPE, grouped queries, SwiGLU, no biases.
The package trains `model.transformer`, in which an engine can replace each operation, and
which has more architectures. The tests compare it with this page.
"""

import numpy as np

from nanoeuler.model.attention import attention
from nanoeuler.model.backward import (
    attention_backward,
    cross_entropy,
    embed_backward,
    linear_backward,
    rmsnorm_backward,
    rope_backward,
    swiglu_backward,
)
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.layers import embed, linear, rmsnorm, rope, rope_tables, swiglu
from nanoeuler.model.weights import Weights


def gpt(
    config: ModelConfig, w: Weights, tokens: np.ndarray, targets: np.ndarray, scale: np.ndarray,
    dw: Weights,
) -> np.ndarray:  # fmt: skip
    """Add the gradient of eq-backprop-loss to dw; return its l_k (K,), in nats. scale: its c_k."""
    (B, T), H, G, D = tokens.shape, config.n_heads, config.n_kv_heads, config.head_dim
    cos, sin = rope_tables(T, D)
    x, saved = embed(tokens, w["embedding"]), []
    for b in w.blocks:
        n1, r1 = rmsnorm(x, b.norm1)
        heads = rope(linear(n1, b.wqkv).reshape(B, T, H + 2 * G, D), H + G, cos, sin)
        y, p = attention(heads, G)
        middle = x + linear(y, b.wo)
        n2, r2 = rmsnorm(middle, b.norm2)
        u = linear(n2, b.w_up)
        h = swiglu(u)
        saved.append((b, x, n1, r1, heads, y, p, middle, n2, r2, u, h))
        x = middle + linear(h, b.w_down)
    n, r = rmsnorm(x, w["norm"])
    logits = linear(n, w["output"]).reshape(B, T, config.n_predict, config.vocab_size)
    sums, dlogits = cross_entropy(logits, targets, scale)  # from here on, backward

    dn = linear_backward(dlogits.reshape(B, T, -1), n, w["output"], dw["output"])
    dx = rmsnorm_backward(dn, x, w["norm"], r, dw["norm"])
    for db in reversed(dw.blocks):
        b, x, n1, r1, heads, y, p, middle, n2, r2, u, h = saved.pop()
        dh = linear_backward(dx, h, b.w_down, db.w_down)
        dn2 = linear_backward(swiglu_backward(dh, u), n2, b.w_up, db.w_up)
        dx = dx + rmsnorm_backward(dn2, middle, b.norm2, r2, db.norm2)
        dy = linear_backward(dx, y, b.wo, db.wo)
        dheads = rope_backward(attention_backward(dy, heads, G, p), H + G, cos, sin)
        dn1 = linear_backward(dheads.reshape(B, T, -1), n1, b.wqkv, db.wqkv)
        dx = dx + rmsnorm_backward(dn1, x, b.norm1, r1, db.norm1)
    embed_backward(dx, tokens, dw["embedding"])
    return sums
