# Made from book/03-layers.md by nanoeuler.book: edit the chapter, not this file.


# %% book/03-layers.md:51
"""The layers of the model except attention, in NumPy, exactly as chapter 3 derives them.

For float32, float64 and complex128: the type that goes in comes out, and every function is
analytic, so that complex-step derivatives hold. Leaves out gradients (backward.py), speed (cpu.py).
Letters: B batch, T positions, C channels, D head width, F MLP width, V vocabulary.
"""

import numpy as np

RMSNORM_EPS = 1e-5  # Llama 2's value; takes 1 % off a fresh embedding, mean square 4e-4
ROPE_BASE = 10000.0  # Vaswani and others, 2017, section 3.5; kept by RoPE (Su and others, 2021)


def embed(tokens, table):
    """The rows of `table` (V, C) that `tokens` (B, T) int name: (B, T, C). Eq. eq-layers-embed."""
    assert np.issubdtype(tokens.dtype, np.integer), f"token ids are integers, got {tokens.dtype}"
    assert tokens.size == 0 or 0 <= tokens.min() <= tokens.max() < len(table), (
        f"token ids must be in [0, {len(table)}), got {tokens.min()} to {tokens.max()}"
    )
    return table[tokens]


# %% book/03-layers.md:99
def linear(x, w):
    """Multiply each row of `x` (..., I) by `w` (I, O): (..., O). Equation eq-layers-linear."""
    assert x.shape[-1] == w.shape[0], f"weights {w.shape} do not fit rows of {x.shape[-1]}"
    return x @ w


# %% book/03-layers.md:126
def rmsnorm(x, gain, eps=RMSNORM_EPS):
    """Divide each vector by its root mean square, then scale by `gain`. Equation eq-layers-rmsnorm.

    x (..., C), gain (C,). Returns y (..., C) and the root mean square r (..., 1), which the
    backward pass needs. Zhang and Sennrich, 2019.
    """
    assert gain.shape == x.shape[-1:], f"gain {gain.shape} does not fit vectors of {x.shape[-1]}"
    r = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return gain * (x / r), r


# %% book/03-layers.md:200
def sigmoid(z):
    """1 / (1 + exp(-z)) without overflow; z of any shape."""
    return 0.5 * (1 + np.tanh(0.5 * z))


# %% book/03-layers.md:209
def swiglu(gate_up):
    """silu(gate) * up, where `gate_up` (..., 2F) holds gate, then up: (..., F).

    Equations eq-layers-silu and eq-layers-swiglu; Shazeer, 2020.
    """
    assert gate_up.shape[-1] % 2 == 0, f"expected gate and up of equal width, got {gate_up.shape}"
    gate, up = np.split(gate_up, 2, axis=-1)
    return gate * sigmoid(gate) * up


# %% book/03-layers.md:272
def rope_tables(T, D, base=ROPE_BASE):
    """cos, sin of t * theta_i at T positions: (T, D/2) float64 each. Equation eq-layers-rope."""
    assert D % 2 == 0, f"rotary positions turn pairs of channels: head width {D} is odd"
    theta = base ** (-2 * np.arange(D // 2) / D)
    angle = np.arange(T)[:, None] * theta
    return np.cos(angle), np.sin(angle)


# %% book/03-layers.md:286
def rope(heads, n, cos, sin):
    """Turn the pairs (i, i + D/2) of the first `n` heads by each position's angles.

    heads (B, T, N, D); cos, sin (T, D/2) from `rope_tables`, the rows of the T positions. Returns
    an array like `heads`. An engine may reuse its memory: do not use `heads` afterwards.
    Equation eq-layers-rope.
    """
    B, T, N, D = heads.shape
    assert cos.shape == sin.shape == (T, D // 2), f"tables {cos.shape} for heads {heads.shape}"
    assert 0 <= n <= N, f"cannot turn {n} of {N} heads"
    # One angle for all heads of a position; the tables take the precision of what they turn.
    cos, sin = (table[:, None, :].astype(heads.real.dtype) for table in (cos, sin))
    a, b = heads[:, :, :n, : D // 2], heads[:, :, :n, D // 2 :]
    turned = heads.copy()
    turned[:, :, :n, : D // 2] = a * cos - b * sin
    turned[:, :, :n, D // 2 :] = a * sin + b * cos
    return turned


# %% book/03-layers.md:375
def add(x, y):
    """x + y, the residual sum: one Euler step of size 1. x, y (..., C) of one shape."""
    assert x.shape == y.shape, f"the stream {x.shape} and what is added to it {y.shape} differ"
    return x + y


__all__ = [
    "RMSNORM_EPS",
    "ROPE_BASE",
    "embed",
    "linear",
    "rmsnorm",
    "sigmoid",
    "swiglu",
    "rope_tables",
    "rope",
    "add",
]
