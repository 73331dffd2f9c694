# Made from book/02-euler.md by nanoeuler.book: edit the chapter, not this file.


# %% book/02-euler.md:50
"""One-step integrators of dx/dt = f(x, t), and the walk that repeats them.

x is anything that can be added and multiplied: a float, a Fraction, a NumPy array of any shape and
dtype. f takes (x, t) and returns a velocity like x. Steps are of fixed size: no error control here.
Letters: x state, t time (in a network, depth), h step size, n number of steps.
"""

import numpy as np


def euler_step(f, x, t, h):
    """x at t + h by Euler's method, one evaluation of f, order 1. Equation eq-euler-step."""
    return x + h * f(x, t)


def integrate(step, f, x0, t0, t1, n):
    """Walk from t0 to t1 in n equal steps of `step`; return the n + 1 states, x0 first."""
    assert n >= 1, f"a walk needs at least one step, got n = {n}"
    h = (t1 - t0) / n
    states = [x0]
    for i in range(n):
        x = step(f, states[-1], t0 + i * h, h)  # t from i, not summed up: n roundings would add up
        assert np.shape(x) == np.shape(x0), f"f turned shape {np.shape(x0)} into {np.shape(x)}"
        states.append(x)
    return states


# %% book/02-euler.md:163
def heun_step(f, x, t, h):
    """x at t + h by Heun's method, two evaluations of f, order 2. Equation eq-euler-heun."""
    k1 = f(x, t)
    k2 = f(x + h * k1, t + h)  # the velocity where Euler would land: terms (1) and (2)
    return x + h / 2 * (k1 + k2)


# %% book/02-euler.md:218
def rk4_step(f, x, t, h):
    """x at t + h by Kutta's method, four evaluations of f, order 4. Equation eq-euler-rk4."""
    k1 = f(x, t)
    k2 = f(x + h / 2 * k1, t + h / 2)
    k3 = f(x + h / 2 * k2, t + h / 2)  # the middle again, from a better guess of where it is
    k4 = f(x + h * k3, t + h)
    return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


# %% book/02-euler.md:360
def relative_step(x, fx, h=1.0):
    """How far a step moves the stream against its length: h |f(x)| / |x|. Equation eq-euler-rho.

    x, fx (..., C): the stream and what a layer adds to it. Returns (...), one number per vector.
    """
    assert np.shape(x) == np.shape(fx), f"the stream is {np.shape(x)} and the step {np.shape(fx)}"
    return h * np.linalg.norm(fx, axis=-1) / np.linalg.norm(x, axis=-1)


__all__ = [
    "euler_step",
    "integrate",
    "heun_step",
    "rk4_step",
    "relative_step",
]
