# Made from book/03-euler.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-euler-step
"""One-step integrators of dx/dt = f(x, t), and the loop that repeats their step.

x is anything that can be added and multiplied: a float, or a NumPy array of any shape and dtype.
(`integrate` computes in Fractions if `step` does; INTEGRATORS, below, has floats.) f takes (x, t)
and returns a velocity like x. Steps are of fixed size: no error control here.
Letters: x state, t time (in a network, depth), h step size, n number of steps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

State = Any  # what can be added and multiplied
Velocity = Callable[[State, float], State]  # f(x, t) -> dx/dt
Step = Callable[[Velocity, State, float, float], State]  # step(f, x, t, h) -> x at t + h


def integrate(step: Step, f: Velocity, x0: State, t0: float, t1: float, n: int) -> list[State]:
    """Go from t0 to t1 in n equal steps of step(f, x, t, h); return the n + 1 states."""
    assert n >= 1, f"expected at least one step, got n = {n}"
    h = (t1 - t0) / n
    states = [x0]
    for i in range(n):
        x = step(f, states[-1], t0 + i * h, h)  # t0 + h + h + ... would add up roundings
        assert np.shape(x) == np.shape(x0), f"f turned shape {np.shape(x0)} into {np.shape(x)}"
        states.append(x)
    return states


# %% sec-euler-table
class Tableau(NamedTuple):
    """An explicit Runge-Kutta method: a[i] weighs the velocities before stage i, b weighs all."""

    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]

    def step(self, f: Velocity, x: State, t: float, h: float) -> State:
        """x at t + h, by as many evaluations of f as b has weights. Equation eq-euler-table."""
        velocities = []
        for row in self.a:
            velocities.append(f(_moved(x, h, row, velocities), t + h * sum(row)))
        return _moved(x, h, self.b, velocities)


def _moved(x, h, weights, velocities):
    """x + h * the weighted sum of the velocities."""
    for weight, k in zip(weights, velocities, strict=True):
        if weight:
            x = x + h * weight * k
    return x


# Equations eq-euler-step, eq-euler-heun and eq-euler-rk4.
INTEGRATORS = {
    "euler": Tableau(((),), (1.0,)),
    "heun": Tableau(((), (1.0,)), (1 / 2, 1 / 2)),
    "rk4": Tableau(((), (1 / 2,), (0.0, 1 / 2), (0.0, 0.0, 1.0)), (1 / 6, 1 / 3, 1 / 3, 1 / 6)),
}


# %% sec-euler-stream
def relative_step(x: np.ndarray, fx: np.ndarray, h: float = 1.0) -> np.ndarray:
    """By what fraction of its length a step moves the stream, h |f(x)| / |x|: eq-euler-rho.

    x, fx (..., C): the stream and a layer's f(x). Returns (...), one number per vector.
    """
    assert np.shape(x) == np.shape(fx), f"the stream is {np.shape(x)} and the step {np.shape(fx)}"
    return h * np.linalg.norm(fx, axis=-1) / np.linalg.norm(x, axis=-1)
