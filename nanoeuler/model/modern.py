# Made from book/06-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-relu2
"""Later switches of the architecture, forward and backward: ReLU squared, and capped logits.

Functions of arrays of any one shape, in NumPy, for float32, float64 and complex128, as
`model.layers` and `model.backward` are. Left out: how an engine makes them fast.
"""

import numpy as np


def relu2(u: np.ndarray) -> np.ndarray:
    """u squared where u is positive, else 0; u of any shape.

    Equation eq-modern-relu2; So and others, 2021 (Primer).
    """
    return np.where(u.real > 0, u * u, np.zeros_like(u))


def relu2_backward(dh: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Gradient of h = relu2(u), both of any one shape. Equation eq-modern-relu2."""
    assert dh.shape == u.shape
    return dh * np.where(u.real > 0, 2 * u, np.zeros_like(u))


def soft_cap(z: np.ndarray, cap: float) -> np.ndarray:
    """y = c tanh(z / c) of logits z of any shape, for a cap c > 0: -c < y < c.

    Equation eq-modern-cap; Gemma 2 (Riviere and others, 2024). Its gradient, dz = (1 - (y / c)^2)
    dy, is part of `backward.cross_entropy`.
    """
    return cap * np.tanh(z / cap)
