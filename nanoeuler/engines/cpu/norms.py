# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-fused
"""The norms, and what else is one row against many: biases and learned positions. Float32 loops.

As elementwise.py. The gradient of a row is a sum over all positions, which is taken in blocks.

N rows (positions of all sequences), C channels.
"""

import numpy as np

from nanoeuler.engines.cpu.options import F32, KERNEL, PART
from nanoeuler.engines.interface import Array
from nanoeuler.jit import njit

# Rows that are added up from zero before they join a sum of n rows: BLOCK + n / BLOCK roundings,
# which is least at the root of n, and n is the number of tokens in a shard, about 256 or more.
BLOCK = 16


@njit(**PART)
def _rms_row(x, gain, eps, y, stats):
    # y (C,) and the root mean square (1,) of a row x (C,), in two passes over it.
    squares = F32(0)
    for j in range(x.size):
        squares += x[j] * x[j]
    stats[0] = np.sqrt(squares / F32(x.size) + eps)
    for j in range(x.size):
        y[j] = gain[j] * (x[j] / stats[0])


@njit(**KERNEL)
def rmsnorm(x: Array, gain: Array, eps: float, y: Array, r: Array) -> None:
    """y (N, C) and r (N, 1) of `layers.rmsnorm` from x (N, C), gain (C,), and a float32."""
    for i in range(x.shape[0]):
        _rms_row(x[i], gain, eps, y[i], r[i])


@njit(**KERNEL)
def move_rmsnorm(
    x: Array, k: Array, numbers: tuple[float, float], gain: Array, u: Array, y: Array, r: Array
) -> None:
    """u (N, C) = x + h k, all (N, C), and y and r of u as `rmsnorm` writes them.

    numbers: h and the norm's epsilon, float32.
    """
    h, eps = numbers
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            u[i, j] = x[i, j] + h * k[i, j]
        _rms_row(u[i], gain, eps, y[i], r[i])


@njit(**PART)
def _join(block, total):
    # Add the sum of a block of rows to that of all, and begin another.
    for j in range(total.size):
        total[j] += block[j]
        block[j] = F32(0)


@njit(**KERNEL)
def rmsnorm_backward(
    dy: Array, x: Array, gain: Array, r: Array, dx: Array, add: bool, dgain: Array
) -> None:
    """dx (N, C) of `backward.rmsnorm_backward`, whose numbers these are; adds to dgain (C,).

    With `add`, a bool, adds to dx instead of writing it.
    """
    (N, C), block = x.shape, np.zeros(x.shape[1], F32)
    for i in range(N):
        inverse, along = F32(1) / r[i, 0], F32(0)
        for j in range(C):
            along += gain[j] * dy[i, j] * x[i, j]                       # (2)
        along *= inverse / F32(C)
        for j in range(C):
            x_hat, before = x[i, j] * inverse, dx[i, j] if add else F32(0)
            block[j] += dy[i, j] * x_hat                                # (3)
            dx[i, j] = before + (gain[j] * dy[i, j] - along * x_hat) * inverse  # (1)
        if (i + 1) % BLOCK == 0 or i == N - 1:
            _join(block, dgain)


@njit(**KERNEL)
def norm_heads(
    heads: Array, out: Array, r: Array, n_kv: int, gains: tuple[Array, Array], eps: float
) -> None:
    """out (N, H+2G, D) and r (N, H+G, 1) of `Engine.norm_heads` from heads (N, H+2G, D).

    n_kv = G; gains of queries and keys, (D,) each; eps a float32. The values are copied.
    """
    both = r.shape[1]
    for i in range(heads.shape[0]):
        for h in range(both):
            gain = gains[0] if h < both - n_kv else gains[1]
            _rms_row(heads[i, h], gain, eps, out[i, h], r[i, h])
        for h in range(both, heads.shape[1]):
            out[i, h] = heads[i, h]


@njit(**PART)
def _rms_row_backward(dx, x, gain, r, block):
    # dx (D,) from the gradient after the norm to that before it, in place; adds to block (D,).
    inverse, along = F32(1) / r, F32(0)
    for j in range(x.size):
        along += gain[j] * dx[j] * x[j]
    along *= inverse / F32(x.size)
    for j in range(x.size):
        x_hat = x[j] * inverse
        block[j] += dx[j] * x_hat
        dx[j] = (gain[j] * dx[j] - along * x_hat) * inverse


@njit(**KERNEL)
def norm_heads_backward(
    dheads: Array, heads: Array, r: Array, gains: tuple[Array, Array], dgains: tuple[Array, Array]
) -> None:
    """dheads (N, H+2G, D) of `Engine.norm_heads_backward`, in place; adds to dgains (D,) each."""
    (N, heads_all, D), both = heads.shape, r.shape[1]
    H = 2 * both - heads_all
    for kind in range(2):
        gain, dgain, done, block = gains[kind], dgains[kind], 0, np.zeros(D, F32)
        for i in range(N):
            for h in range(H if kind else 0, both if kind else H):
                _rms_row_backward(dheads[i, h], heads[i, h], gain, r[i, h, 0], block)
                done += 1
                if done % BLOCK == 0:
                    _join(block, dgain)
        _join(block, dgain)


# %% sec-cpu-layernorm
@njit(**PART)
def _layer_row(x, gain, eps, y, stats):
    # y (C,), mean and deviation (2,) of a row x (C,), in three passes over it.
    mean, squares = F32(0), F32(0)
    for j in range(x.size):
        mean += x[j]
    mean /= F32(x.size)
    for j in range(x.size):
        squares += (x[j] - mean) * (x[j] - mean)
    deviation = np.sqrt(squares / F32(x.size) + eps)
    stats[0], stats[1] = mean, deviation
    for j in range(x.size):
        y[j] = gain[j] * ((x[j] - mean) / deviation)


@njit(**KERNEL)
def layernorm(x: Array, gain: Array, eps: float, y: Array, stats: Array) -> None:
    """y (N, C), stats (N, 2) of `layers.layernorm` without bias from x (N, C), gain (C,), eps."""
    for i in range(x.shape[0]):
        _layer_row(x[i], gain, eps, y[i], stats[i])


@njit(**KERNEL)
def move_layernorm(
    x: Array, k: Array, numbers: tuple[float, float], gain: Array, u: Array, y: Array, stats: Array
) -> None:
    """u (N, C) = x + h k, all (N, C), and y and stats of u as `layernorm` writes them.

    numbers: h and the norm's epsilon, float32.
    """
    h, eps = numbers
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            u[i, j] = x[i, j] + h * k[i, j]
        _layer_row(u[i], gain, eps, y[i], stats[i])


@njit(**KERNEL)
def layernorm_backward(
    dy: Array, x: Array, gain: Array, stats: Array, dx: Array, add: bool, dgain: Array
) -> None:
    """dx (N, C) of `backward.layernorm_backward`, whose numbers these are; adds to dgain (C,).

    With `add`, a bool, adds to dx instead of writing it.
    """
    (N, C), block = x.shape, np.zeros(x.shape[1], F32)
    for i in range(N):
        mean, inverse, shift, along = stats[i, 0], F32(1) / stats[i, 1], F32(0), F32(0)
        for j in range(C):
            shift += gain[j] * dy[i, j]                                 # (2)
            along += gain[j] * dy[i, j] * ((x[i, j] - mean) * inverse)  # (3)
        shift, along = shift / F32(C), along / F32(C)
        for j in range(C):
            x_hat, before = (x[i, j] - mean) * inverse, dx[i, j] if add else F32(0)
            block[j] += dy[i, j] * x_hat                                # (4)
            dx[i, j] = before + (gain[j] * dy[i, j] - shift - x_hat * along) * inverse
        if (i + 1) % BLOCK == 0 or i == N - 1:
            _join(block, dgain)


@njit(**KERNEL)
def add_row(x: Array, row: Array) -> None:
    """Add row (C,) to each row of x (N, C), in place."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] += row[j]


@njit(**KERNEL)
def add_row_backward(dx: Array, drow: Array) -> None:
    """Add the sum of the rows of dx (N, C) to drow (C,)."""
    block = np.zeros(drow.size, F32)
    for i in range(dx.shape[0]):
        for j in range(dx.shape[1]):
            block[j] += dx[i, j]
        if (i + 1) % BLOCK == 0 or i == dx.shape[0] - 1:
            _join(block, drow)
