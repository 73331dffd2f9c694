# Made from book/12-flash-attention.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-tiles
"""Causal grouped-query attention without the T x T matrix, in NumPy tiles, for any float type.

The algorithm of the kernels in `attention.reference`, and the oracle of the faster ones. Left out:
speed.

B batch, T positions, H query heads, G key/value heads, D head width; rows and columns: how many
queries, and how many keys, are held at a time.
"""

import math

import numpy as np


def _scores(q, k, start, first):
    """Scaled scores of queries at start.. and keys at first.., -inf where the key is later."""
    s = q @ k.T / math.sqrt(q.shape[-1])
    later = first + np.arange(len(k)) > start + np.arange(len(q))[:, None]
    s[later] = -np.inf
    return s


def attention_tiles(
    heads: np.ndarray, n_kv: int, rows: int = 64, columns: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """y (B, T, H*D) as `attention` gives it, and lse (B, H, T). Equations eq-flash-online, -lse.

    heads (B, T, H+2G, D) float of any precision, n_kv = G. Holds rows x columns scores at once.
    """
    B, T, N, D = heads.shape
    H = N - 2 * n_kv
    y = np.empty((B, T, H * D), heads.dtype)
    lse = np.empty((B, H, T), heads.dtype)
    for b, h in np.ndindex(B, H):
        g = H + h // (H // n_kv)                      # its keys; its values are at g + n_kv
        for start in range(0, T, rows):
            end = min(start + rows, T)
            q = heads[b, start:end, h]
            m = np.full((end - start, 1), -np.inf, heads.dtype)
            total, o = np.zeros_like(m), np.zeros_like(q)
            for first in range(0, end, columns):      # from key 0, which every query sees
                last = min(first + columns, end)      # no query of this tile sees a later key
                s = _scores(q, heads[b, first:last, g], start, first)
                larger = np.maximum(m, s.max(axis=1, keepdims=True))
                alpha, e = np.exp(m - larger), np.exp(s - larger)
                m, total = larger, alpha * total + e.sum(axis=1, keepdims=True)
                o = alpha * o + e @ heads[b, first:last, g + n_kv]
            y[b, start:end, h * D : (h + 1) * D] = o / total
            lse[b, h, start:end] = (m + np.log(total))[:, 0]
    return y, lse


# %% sec-flash-backward
def attention_tiles_backward(
    dy: np.ndarray, heads: np.ndarray, n_kv: int, y: np.ndarray, lse: np.ndarray,
    rows: int = 64, columns: int = 64,
) -> np.ndarray:  # fmt: skip
    """dheads (B, T, H+2G, D) from dy (B, T, H*D) and what `attention_tiles` had and gave.

    Equations eq-flash-backward and eq-flash-delta. Holds rows x columns probabilities at once.
    """
    B, T, N, D = heads.shape
    H = N - 2 * n_kv
    dheads = np.zeros(heads.shape, heads.dtype)
    for b, h in np.ndindex(B, H):
        g = H + h // (H // n_kv)                           # its keys; its values are at g + n_kv
        for start in range(0, T, rows):
            end = min(start + rows, T)
            mine = b, slice(start, end), slice(h * D, (h + 1) * D)
            q, dy_tile = heads[b, start:end, h], dy[mine]
            delta = np.sum(dy_tile * y[mine], axis=1, keepdims=True)
            for first in range(0, end, columns):
                last = min(first + columns, end)
                k, v = heads[b, first:last, g], heads[b, first:last, g + n_kv]
                p = np.exp(_scores(q, k, start, first) - lse[b, h, start:end, None])
                dheads[b, first:last, g + n_kv] += p.T @ dy_tile           # (1), over the group
                dm = p * (dy_tile @ v.T - delta) / math.sqrt(D)            # (2), (3), (4)
                dheads[b, start:end, h] += dm @ k                          # (5)
                dheads[b, first:last, g] += dm.T @ q                       # (6), over the group
    return dheads
