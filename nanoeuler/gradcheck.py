# Made from book/05-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% book/05-backprop.md:956
"""The gradient check: every element of every tensor of a tiny model against its complex step.

It proves the reference engine, in float64; other engines are compared with that one. Central
differences stand beside it, to show how much less they see.
"""

from typing import NamedTuple

import numpy as np

from nanoeuler import reference
from nanoeuler.backward import IGNORE
from nanoeuler.config import ModelConfig
from nanoeuler.derivatives import central_difference, complex_step, relative_error
from nanoeuler.model import Weights, head_weights, loss_and_gradients, loss_scale, loss_sums

# The largest relative error that passes. Rounding gives 1e-14; of the mistakes made on purpose in
# tests/, the least visible one (a forgotten epsilon) gives 2e-5.
BOUND = 1e-10
# Two layers, two groups of two query heads, two RoPE angles, two predicted tokens; repeated tokens.
TINY = ModelConfig(
    vocab_size=7, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden=10, context=5, n_predict=2
)


class Problem(NamedTuple):
    """A model and a batch: all that a gradient depends on."""

    config: ModelConfig
    w: Weights              # float64
    tokens: np.ndarray      # (B, T) int
    targets: np.ndarray     # (B, T, K) int
    scale: np.ndarray       # (K,)


def tiny_problem(config=TINY, seed=0):
    """A random `Problem` of two texts that hides nothing: no gain is 1, some targets ignored."""
    rng, w = np.random.default_rng(seed), Weights(config, np.float64)
    for tensor in w.values():
        tensor[...] = 0.5 * rng.standard_normal(tensor.shape) + (tensor.ndim == 1)
    tokens = rng.integers(config.vocab_size, size=(2, config.context))
    targets = rng.integers(config.vocab_size, size=(*tokens.shape, config.n_predict))
    targets[rng.random(targets.shape) < 0.2] = IGNORE
    return Problem(config, w, tokens, targets, loss_scale(targets, head_weights(config.n_predict)))


# %% book/05-backprop.md:1006
def derived_gradient(problem, engine=reference):
    """The gradient (Weights) by backward passes of `engine`, accumulated over the texts in turn."""
    dw = problem.w.zeros_like()
    for tokens, targets in zip(problem.tokens, problem.targets, strict=True):
        loss_and_gradients(
            engine, problem.config, problem.w, tokens[None], targets[None], problem.scale, dw
        )
    return dw


def numerical_gradient(problem, method, dtype):
    """The gradient (Weights) by `method`, one of `nanoeuler.derivatives`, stepping in `dtype`."""
    trial, gradient = Weights(problem.config, dtype), problem.w.zeros_like()
    trial.flat[...] = problem.w.flat
    for name, tensor in trial.items():
        gradient[name][...] = method(_loss_of(problem, trial, tensor), problem.w[name])
        tensor[...] = problem.w[name]
    return gradient


def _loss_of(problem, trial, tensor):
    """The loss as a function of one tensor of `trial`, the others fixed."""

    def loss(value):
        tensor[...] = value
        sums = loss_sums(reference, problem.config, trial, problem.tokens, problem.targets)
        return np.sum(problem.scale * sums)

    return loss


# %% book/05-backprop.md:1041
class Row(NamedTuple):
    """One tensor's line: relative errors against the complex step, in its largest element."""

    name: str
    shape: tuple
    derived: float          # of the backward pass
    central: float          # of central differences


def check(problem=None):
    """Check every element of every tensor of `problem` (`tiny_problem()`): a list of Row."""
    problem = problem or tiny_problem()
    derived = derived_gradient(problem)
    exact = numerical_gradient(problem, complex_step, np.complex128)
    central = numerical_gradient(problem, central_difference, np.float64)
    return [
        Row(
            name,
            tensor.shape,
            relative_error(derived[name], tensor),
            relative_error(central[name], tensor),
        )
        for name, tensor in exact.items()
    ]


def passed(rows):
    """Whether the backward pass agrees with the complex step to BOUND in every tensor."""
    return all(row.derived <= BOUND for row in rows)


def table(rows):
    """The check as text: a line for each tensor, then the verdict."""
    lines = [f"{'tensor':18} {'shape':>7} {'backward':>9} {'central differences':>20}"]
    for row in rows:
        shape = "x".join(map(str, row.shape))
        lines.append(f"{row.name:18} {shape:>7} {row.derived:9.1e} {row.central:20.1e}")
    worst, verdict = max(row.derived for row in rows), "passed" if passed(rows) else "FAILED"
    return "\n".join([*lines, f"worst {worst:.1e}, bound {BOUND:.0e}: {verdict}"])


__all__ = [
    "BOUND",
    "TINY",
    "Problem",
    "tiny_problem",
    "derived_gradient",
    "numerical_gradient",
    "Row",
    "check",
    "passed",
    "table",
]
