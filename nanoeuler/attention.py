# Made from book/04-attention.md by nanoeuler.book: edit the chapter, not this file.


# %% book/04-attention.md:168
"""Causal grouped-query attention in NumPy, exactly as chapter 4 derives it.

For float32, float64 and complex128, analytic. Keeps the whole T x T matrix of weights: the version
that does not is chapter 8's. Leaves out rotary positions (layers.rope turns the heads beforehand).
Letters: B batch, T positions, H query heads, G key/value heads, D head width.
"""

import numpy as np


def split_heads(heads, n_kv):
    """Views of packed `heads` (B, T, H + 2G, D): q (B, T, G, H/G, D), k and v (B, T, G, D)."""
    B, T, N, D = heads.shape
    H, G = N - 2 * n_kv, n_kv
    assert G >= 1 and H >= G and H % G == 0, f"{N} packed heads cannot hold {G} keys and values"
    q = heads[:, :, :H].reshape(B, T, G, H // G, D)
    return q, heads[:, :, H : H + G], heads[:, :, H + G :]


def causal_softmax(scores):
    """Softmax over the last axis of `scores` (..., T, T); zero where the key is after the query."""
    T = scores.shape[-1]
    assert scores.shape[-2] == T, f"expected as many queries as keys, got {scores.shape}"
    past = np.tril(np.ones((T, T), dtype=bool))
    # Equation eq-attention-shift: any shift gives the same weights, this one cannot overflow.
    highest = np.max(scores.real, axis=-1, where=past, initial=-np.inf, keepdims=True)
    weights = np.exp(np.where(past, scores - highest, -np.inf))
    return weights / np.sum(weights, axis=-1, keepdims=True)


def attention(heads, n_kv):
    """Each position's weighted mean of the values up to it, per query head. Equation eq-attention.

    heads (B, T, H + 2G, D): queries, keys, values packed in this order; G = `n_kv`. Query head h
    reads key/value head h // (H/G). Returns y (B, T, H * D) and the weights p (B, H, T, T).
    """
    q, k, v = split_heads(heads, n_kv)
    B, T, G, R, D = q.shape
    scores = np.einsum("btgrd,bsgd->bgrts", q, k) / np.sqrt(D).astype(heads.real.dtype)
    p = causal_softmax(scores)
    y = np.einsum("bgrts,bsgd->btgrd", p, v)
    return y.reshape(B, T, G * R * D), p.reshape(B, G * R, T, T)


__all__ = [
    "split_heads",
    "causal_softmax",
    "attention",
]
