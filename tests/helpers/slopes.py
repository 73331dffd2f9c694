"""A fast witness of gradients: the loss's slope along random directions, by complex steps.

One pass for a direction instead of one for an element. A wrong element changes the gradient's
product with a random direction too, because no error is perpendicular to it but by a chance of
zero. What is lost is only which element it was; `nanoeuler check` compares them all.
"""

from typing import NamedTuple

import numpy as np

from nanoeuler.checks.derivatives import COMPLEX_STEP
from nanoeuler.model.transformer import loss_sums
from nanoeuler.model.weights import Weights


class Slope(NamedTuple):
    """The derivative of a problem's loss along a direction in the flat buffer of its weights."""

    direction: np.ndarray
    exact: float

    def error(self, dw):
        """How far the gradient dw (Weights) is from it, in units of the longest they could be.

        Where the loss is flat, as behind a ReLU that is shut, both may be exactly 0: so is this.
        """
        length = np.linalg.norm(self.direction) * np.linalg.norm(dw.flat[self.direction != 0])
        difference = abs(self.direction @ dw.flat - self.exact)
        return difference / max(length, abs(self.exact)) if difference != 0 else 0.0


def slopes(problem, engine, count, seed=0):
    """`count` slopes along random directions through all weights, then one through each tensor."""
    rng, w = np.random.default_rng(seed), Weights(problem.config, np.complex128)
    directions = [rng.standard_normal(w.flat.size) for _ in range(count)]
    for name in w:
        through = Weights(problem.config, np.float64)
        through[name][...] = rng.standard_normal(w[name].shape)
        directions.append(through.flat)
    for v in directions:
        w.flat[...] = problem.w.flat + 1j * COMPLEX_STEP * v
        sums = loss_sums(engine, problem.config, w, problem.tokens, problem.targets)
        yield Slope(v, (problem.scale @ sums).imag / COMPLEX_STEP)
