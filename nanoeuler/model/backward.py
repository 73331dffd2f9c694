# Made from book/06-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-linear
"""The backward of the model's operations, in NumPy, exactly as the chapter derives it.

Most functions take the gradient of their output first, then what the forward used and saved, last
the buffers of their parameters' gradients, to which they add; they return the gradient of their
input. `dx` stands for dL/dx. Left out: ReLU squared (`model.modern`), speed (the CPU engine's
business) and attention without a saved p.

B batch, T positions, C channels, H query heads, G key/value heads, D head width, V vocabulary,
K predicted tokens, F MLP width; R = H / G query heads share a key/value head.
"""

import numpy as np

from nanoeuler.model.attention import split_heads
from nanoeuler.model.layers import GELU_CUBIC, GELU_SCALE, erf, places, rope, sigmoid
from nanoeuler.model.modern import soft_cap

# The target of a position that the loss doesn't count; never a token, since ids start at 0.
IGNORE = -1


def linear_backward(
    dy: np.ndarray, x: np.ndarray, w: np.ndarray, dw: np.ndarray,
    dbias: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Gradients of y = x w + bias. Equation eq-backprop-linear.

    dy (..., O), x (..., I), w (I, O). Adds to dw (I, O) and dbias (O,), returns dx (..., I).
    """
    assert dy.shape == x.shape[:-1] + w.shape[1:] and x.shape[-1:] == w.shape[:1]
    assert dw.shape == w.shape
    rows_x, rows_dy = x.reshape(-1, w.shape[0]), dy.reshape(-1, w.shape[1])
    dw += rows_x.T @ rows_dy                                            # (1)
    if dbias is not None:
        dbias += np.sum(rows_dy, axis=0)                                # (3)
    return (rows_dy @ w.T).reshape(x.shape)                             # (2)


# %% sec-backprop-embed
def embed_backward(
    dx: np.ndarray, tokens: np.ndarray, dtable: np.ndarray, dpositions: np.ndarray | None = None,
    first: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Gradient of x = table[tokens] + positions. Equation eq-backprop-embed.

    dx (B, T, C), tokens (B, T) int. Adds to dtable (V, C) and dpositions (T, C). first (B, T) int,
    for packed sequences: where the text of each position begins. Tokens have no gradient to return.
    """
    assert dx.shape == tokens.shape + dtable.shape[1:]
    np.add.at(dtable, tokens, dx)                                       # (1) repeated tokens too
    if dpositions is not None:
        assert dpositions.shape == dx.shape[1:]
        if first is None:
            dpositions += np.sum(dx, axis=0)                            # (2)
        else:
            np.add.at(dpositions, places(first), dx)                    # (2) packed


# %% sec-backprop-rmsnorm
def rmsnorm_backward(
    dy: np.ndarray, x: np.ndarray, gain: np.ndarray, r: np.ndarray, dgain: np.ndarray
) -> np.ndarray:
    """Gradients of y = gain * x / r, where r is the root mean square. Equation eq-backprop-rmsnorm.

    dy, x (..., C), gain (C,), r (..., 1). Adds to dgain (C,), returns dx (..., C).
    """
    assert dy.shape == x.shape and x.shape[-1:] == gain.shape == dgain.shape
    assert r.shape == x.shape[:-1] + (1,)
    x_hat = x / r
    dx_hat = gain * dy                                                  # (1)
    along = np.mean(dx_hat * x_hat, axis=-1, keepdims=True)             # (2)
    dgain += np.sum((dy * x_hat).reshape(-1, gain.size), axis=0)        # (3)
    return (dx_hat - x_hat * along) / r


# %% sec-backprop-rope
def rope_backward(dheads: np.ndarray, n: int, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Gradient of `rope`: the first n heads turned by the opposite angle.

    dheads (B, T, N, D), cos and sin (T, D // 2). Returns (B, T, N, D). Equation eq-backprop-rope.
    As with `rope`, an engine's version may overwrite its argument.
    """
    return rope(dheads, n, cos, -sin)


# %% sec-backprop-attention
def attention_backward(
    dy: np.ndarray, heads: np.ndarray, n_kv: int, p: np.ndarray, first: np.ndarray | None = None
) -> np.ndarray:
    """Gradient of causal grouped-query attention. Equation eq-backprop-attention.

    dy (B, T, H*D); heads (B, T, H+2G, D) as given to `attention`, n_kv = G; p (B, H, T, T) as saved
    by it. first (B, T): where each text begins. Not read here, as p is 0 for keys of other texts.
    Engines that save no p need it. Returns dheads (B, T, H+2G, D).
    """
    q, k, v = split_heads(heads, n_kv)
    B, G, R, T, D = q.shape
    assert dy.shape == (B, T, G * R * D) and p.shape == (B, G * R, T, T)
    dy = dy.reshape(B, T, G, R, D).transpose(0, 2, 3, 1, 4)             # (B, G, R, T, D), as q
    p = p.reshape(B, G, R, T, T)

    dv = np.sum(p.swapaxes(-2, -1) @ dy, axis=2)                        # (1) the group's sum
    dp = dy @ v.swapaxes(-2, -1)                                        # (2)
    dS = p * (dp - np.sum(p * dp, axis=-1, keepdims=True))              # (3) 0 where p is masked
    dm = dS / D**0.5                                                    # (4)
    dq = dm @ k                                                         # (5)
    dk = np.sum(dm.swapaxes(-2, -1) @ q, axis=2)                        # (6) the group's sum
    return np.concatenate([dq.reshape(B, G * R, T, D), dk, dv], axis=1).swapaxes(1, 2)


# %% sec-backprop-swiglu
def swiglu_backward(dh: np.ndarray, gate_up: np.ndarray) -> np.ndarray:
    """Gradient of h = silu(gate) * up. Equation eq-backprop-swiglu.

    dh (..., F), gate_up (..., 2F), the gate first. Returns dgate_up (..., 2F).
    """
    F = dh.shape[-1]
    assert gate_up.shape == dh.shape[:-1] + (2 * F,)
    gate, up = gate_up[..., :F], gate_up[..., F:]
    sigma = sigmoid(gate)
    dgate = dh * up * sigma * (1 + gate * (1 - sigma))                  # (1)
    dup = dh * gate * sigma                                             # (2)
    return np.concatenate([dgate, dup], axis=-1)


# %% sec-backprop-cross-entropy
def cross_entropy(
    logits: np.ndarray, targets: np.ndarray, scale: np.ndarray, cap: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """The losses of K heads and their gradient.

    Equations eq-backprop-loss and eq-backprop-cross-entropy.

    logits (B, T, K, V); targets (B, T, K) int in 0..V-1, or IGNORE; scale (K,), the c_k.
    Returns sums (K,), the l_k, in nats (float64 for real logits), and dlogits
    (B, T, K, V), the gradient of the sum of c_k l_k, in the dtype of the logits.
    An engine may write dlogits over logits. With a cap above 0, the softmax is that of
    cap tanh(logits / cap), equation eq-modern-cap.
    """
    assert targets.shape == logits.shape[:-1] and scale.shape == targets.shape[2:]
    assert targets.min() >= IGNORE and targets.max() < logits.shape[-1], "a target is no token"
    counted = targets != IGNORE
    at = np.where(counted, targets, 0)[..., None]  # any token would do for those not counted
    y = soft_cap(logits, cap) if cap else logits
    z = y - np.max(y.real, axis=-1, keepdims=True)  # the same softmax, and exp <= 1
    dlogits = np.exp(z)
    total = np.sum(dlogits, axis=-1, keepdims=True)
    losses = (np.log(total) - np.take_along_axis(z, at, axis=-1))[..., 0]
    sums = np.sum(losses * counted, axis=(0, 1), dtype=np.result_type(losses, np.float64))

    dlogits /= total                                                    # (1)
    p_target = np.take_along_axis(dlogits, at, axis=-1)
    np.put_along_axis(dlogits, at, p_target - 1, axis=-1)               # (2)
    dlogits *= (counted * scale)[..., None]                             # (3)
    if cap:
        dlogits *= 1 - (y / cap) ** 2                                   # eq-modern-cap
    return sums, dlogits


# %% sec-backprop-layernorm
def layernorm_backward(
    dy: np.ndarray, x: np.ndarray, gain: np.ndarray, stats: np.ndarray, dgain: np.ndarray,
    dbias: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Gradients of y = gain * (x - mean) / deviation + bias. Equation eq-backprop-layernorm.

    dy, x (..., C), gain (C,), stats (..., 2) as saved by `layernorm`. Adds to dgain and dbias (C,),
    returns dx (..., C).
    """
    assert dy.shape == x.shape and x.shape[-1:] == gain.shape == dgain.shape
    assert stats.shape == x.shape[:-1] + (2,)
    mean, deviation = stats[..., :1], stats[..., 1:]
    x_hat = (x - mean) / deviation
    dx_hat = gain * dy                                                  # (1)
    shift = np.mean(dx_hat, axis=-1, keepdims=True)                     # (2)
    along = np.mean(dx_hat * x_hat, axis=-1, keepdims=True)             # (3)
    dgain += np.sum((dy * x_hat).reshape(-1, gain.size), axis=0)        # (4)
    if dbias is not None:
        dbias += np.sum(dy.reshape(-1, gain.size), axis=0)              # (5)
    return (dx_hat - shift - x_hat * along) / deviation


# %% sec-backprop-gelu
def gelu_backward(dh: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Gradient of h = gelu(u), both of any one shape. Equation eq-backprop-gelu."""
    assert dh.shape == u.shape
    tanh = np.tanh(GELU_SCALE * (u + GELU_CUBIC * u * u * u))
    dz = GELU_SCALE * (1 + 3 * GELU_CUBIC * u * u)
    share = 0.5 * (1 + tanh)                                            # (1)
    growth = 0.5 * u * (1 - tanh * tanh) * dz                           # (2)
    return dh * (share + growth)


def gelu_exact_backward(dh: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Gradient of h = gelu_exact(u), both of one shape. Equation eq-backprop-gelu-exact."""
    assert dh.shape == u.shape
    share = 0.5 * (1 + erf(u * 0.5**0.5))                               # (1)
    growth = u * np.exp(-0.5 * u * u) / (2 * np.pi) ** 0.5              # (2)
    return dh * (share + growth)
