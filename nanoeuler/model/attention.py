# Made from book/05-attention.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-attention-causal
"""Causal grouped-query attention in NumPy, exactly as chapter 5 derives it.

For float32, float64 and complex128, analytic. Keeps the whole T x T matrix of probabilities: the
version that does not is chapter 12's. Leaves out rotary positions (layers.rope turns the heads
beforehand).
Letters: B batch, T positions, H query heads, G key/value heads, D head width.
"""

import numpy as np


def causal_softmax(scores: np.ndarray, first: np.ndarray | None = None) -> np.ndarray:
    """Softmax over the last axis of `scores` (..., T, T); zero where the key is after the query.

    With `first` (..., T) int, also zero for keys before it: equation eq-attention-documents.
    """
    T = scores.shape[-1]
    assert scores.shape[-2] == T, f"expected as many queries as keys, got {scores.shape}"
    past = np.tril(np.ones((T, T), dtype=bool))
    if first is not None:
        assert (first <= np.arange(T)).all(), "expected each query to see its own position"
        past = past & (np.arange(T) >= first[..., None])
    # Equation eq-attention-shift: any shift gives the same result, this one cannot overflow.
    highest = np.max(scores.real, axis=-1, where=past, initial=-np.inf, keepdims=True)
    e = np.exp(np.where(past, scores - highest, -np.inf))
    return e / np.sum(e, axis=-1, keepdims=True)


# %% sec-attention-heads
def split_heads(heads: np.ndarray, n_kv: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed `heads` (B, T, H + 2G, D) as q (B, G, H/G, T, D), k and v (B, G, 1, T, D)."""
    B, T, N, D = heads.shape
    H, G = N - 2 * n_kv, n_kv
    assert G >= 1 and H >= G and H % G == 0, f"{N} packed heads cannot hold {G} keys and values"
    by_head = heads.swapaxes(1, 2)  # (B, H + 2G, T, D)
    q = by_head[:, :H].reshape(B, G, H // G, T, D)
    return q, by_head[:, H : H + G, None], by_head[:, H + G :, None]


def attention(
    heads: np.ndarray, n_kv: int, first: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Each position's weighted mean of the values up to it, per query head. Equation eq-attention.

    heads (B, T, H + 2G, D): queries, keys, values packed in this order; G = `n_kv`. Query head h
    reads key/value head h // (H/G). first (B, T) int, if given: position t of row b reads from
    first[b, t] on. Returns y (B, T, H * D) and the probabilities p (B, H, T, T).
    """
    q, k, v = split_heads(heads, n_kv)
    B, G, R, T, D = q.shape
    begins = None if first is None else first[:, None, None]  # alike for all heads
    p = causal_softmax(q @ k.swapaxes(-2, -1) / D**0.5, begins)
    y = (p @ v).reshape(B, G * R, T, D).swapaxes(1, 2)
    return y.reshape(B, T, G * R * D), p.reshape(B, G * R, T, T)
