# Made from book/06-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-complex-step
"""Numerical derivatives: the complex step and central differences, and how two gradients compare.

They are slow, because they run the function once or twice for each number. But they need no
derivation, so they can check a derived gradient. Left out: functions of several arrays.
"""

from collections.abc import Callable

import numpy as np

# So small that terms of order h^2 vanish next to 1e-16; any value from 1e-20 to 1e-200 would do.
COMPLEX_STEP = 1e-30
# Where the two errors of a float64 central difference meet: the cube root of 2.2e-16.
CENTRAL_STEP = 6e-6


def complex_step(f: Callable, x: np.ndarray, h: float = COMPLEX_STEP) -> np.ndarray:
    """The gradient of `f` at `x`, each element exact to rounding. Equation eq-backprop-complex.

    `f` takes a complex128 array of the shape of x and returns a scalar. It must be analytic: no
    `abs`, no `conj`, and only real parts compared. x float64; the gradient is float64.
    """
    z, gradient = x.astype(np.complex128), np.empty(x.shape)
    for at in np.ndindex(x.shape):
        z[at] += 1j * h
        gradient[at] = f(z).imag / h
        z[at] = x[at]
    return gradient


def central_difference(f: Callable, x: np.ndarray, h: float = CENTRAL_STEP) -> np.ndarray:
    """The gradient of `f` at `x` (float64), in two runs per element. Eq. eq-backprop-central."""
    z, gradient = x.copy(), np.empty(x.shape)
    for at in np.ndindex(x.shape):
        z[at] = x[at] + h
        above = f(z)
        z[at] = x[at] - h
        gradient[at] = (above - f(z)) / (2 * h)
        z[at] = x[at]
    return gradient


def relative_error(gradient: np.ndarray, exact: np.ndarray) -> float:
    """The largest difference of two arrays, in units of the largest element of `exact`."""
    assert gradient.shape == exact.shape, f"{gradient.shape} against {exact.shape}"
    return float(np.max(np.abs(gradient - exact)) / np.max(np.abs(exact)))
