# Made from book/06a-engines.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-gradcheck
"""The gradient check: every element of every tensor of tiny models against its complex step.

It proves the reference engine, in float64; other engines are compared with that one. Central
differences are printed next to it, to show how much less they see.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.checks.derivatives import central_difference, complex_step, relative_error
from nanoeuler.engines.interface import Engine
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import CHOICES, ModelConfig
from nanoeuler.model.transformer import (
    head_weights,
    loss_and_gradients,
    loss_scale,
    loss_sums,
)
from nanoeuler.model.weights import Weights

reference = ReferenceEngine()  # the engine that is proved
# The largest relative error that passes. Rounding gives less than 1e-12; of the mistakes made on
# purpose in tests/, the least visible one (a forgotten epsilon) gives 2e-5 by element.
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


def tiny_problem(config: ModelConfig = TINY, seed: int = 0) -> Problem:
    """A random `Problem` of three texts that hides nothing: no gain is 1, some targets ignored."""
    rng, w = np.random.default_rng(seed), Weights(config, np.float64)
    for name, tensor in w.items():
        tensor[...] = 0.5 * rng.standard_normal(tensor.shape)
        if tensor.ndim == 1 and not name.endswith("_bias"):
            tensor += 1  # a gain
    tokens = rng.integers(config.vocab_size, size=(3, config.context))
    targets = rng.integers(config.vocab_size, size=(*tokens.shape, config.n_predict))
    targets[rng.random(targets.shape) < 0.2] = IGNORE
    return Problem(config, w, tokens, targets, loss_scale(targets, head_weights(config.n_predict)))


def derived_gradient(problem: Problem, engine: Engine = reference) -> Weights:
    """The gradient by backward passes of `engine`: text 0's, then the others' added."""
    dw = problem.w.zeros_like()
    for part in (slice(0, 1), slice(1, None)):
        loss_and_gradients(
            engine, problem.config, problem.w, problem.tokens[part], problem.targets[part],
            problem.scale, dw,
        )  # fmt: skip
    return dw


def numerical_gradient(problem: Problem, method: Callable, dtype: np.typing.DTypeLike) -> Weights:
    """The gradient by `method`, one of `checks.derivatives`, stepping in `dtype`."""
    trial, gradient = Weights(problem.config, dtype), problem.w.zeros_like()
    trial.flat[...] = problem.w.flat
    for name, tensor in trial.items():
        gradient[name][...] = method(_loss_of(problem, trial, tensor), problem.w[name])
        tensor[...] = problem.w[name]
    return gradient


def _loss_of(problem: Problem, trial: Weights, tensor: np.ndarray) -> Callable:
    """The loss as a function of one tensor of `trial`, the others fixed."""

    def loss(value: np.ndarray) -> float:
        tensor[...] = value
        sums = loss_sums(reference, problem.config, trial, problem.tokens, problem.targets)
        return np.sum(problem.scale * sums)

    return loss


class Row(NamedTuple):
    """A line of the check: the relative errors of a tensor, or those of a model's worst tensor."""

    name: str               # of the tensor, or of the model's architecture
    shape: tuple            # of the tensor, or the model's number of parameters
    derived: float          # the error of the backward pass against the complex step
    central: float | None = None  # the error of central differences, where it was asked for


def check_tensors(problem: Problem, prefix: str = "") -> list[Row]:
    """Check every element of every tensor of `problem`: one Row for each tensor."""
    derived = derived_gradient(problem)
    exact = numerical_gradient(problem, complex_step, np.complex128)
    central = numerical_gradient(problem, central_difference, np.float64)
    return [
        Row(
            prefix + name,
            tensor.shape,
            relative_error(derived[name], tensor),
            relative_error(central[name], tensor),
        )
        for name, tensor in exact.items()
    ]


# %% sec-backprop-architectures
# GPT-2's choices at the size of TINY. Tied weights predict one token.
TINY_GPT2 = replace(
    TINY, norm="layer", position="learned", mlp="gelu", bias=True, tied=True, n_predict=1
)
# For many architectures: two blocks, two query heads that share a key, repeated tokens.
TINIEST = ModelConfig(
    vocab_size=5, dim=4, n_layers=2, n_heads=2, n_kv_heads=1, hidden=3, context=4, n_predict=2
)


# Switches whose first two values are combined with each other. All else is set one at a time.
CROSSED = ("norm", "position", "mlp", "bias", "tied")
STEPS = (1.0, 1), (1.0, 2), (0.7, 1), (0.7, 2)  # a step's size, how often a block is repeated
# What scales RoPE's angles in a model with a context of a few positions: in 8 positions the first
# angle makes 1.3 turns, between Llama 3's `low` and `high`, and the others fewer than `low`.
ROPE = {
    "none": {},
    "linear": {"rope_factor": 4.0},
    "llama3": {"rope_factor": 4.0, "rope_original_context": 8},
}


def setting(name: str, value: Any) -> dict[str, Any]:
    """The fields to change in a config to set this value of a switch, and what it needs."""
    beside = {"window_pattern": {"sliding_window": 2}}.get(name, {})
    if name in ("rope_base", "rope_scaling"):  # base**0 is 1, so take two angles
        beside = {"head_width": 4, **ROPE.get(value, {})}
    return {**beside, name: value}


def architectures() -> dict[str, ModelConfig]:
    """Name -> a tiny config: the CROSSED switches; then the others, by steps of several sizes."""
    configs, known = {}, {name: reference.supports.get(name, v[:1]) for name, v in CHOICES.items()}
    for values in product(*(known[switch][:2] for switch in CROSSED)):
        chosen = dict(zip(CROSSED, values, strict=True))
        words = [switch if value is True else value for switch, value in chosen.items() if value]
        n_predict = 1 if chosen["tied"] else TINIEST.n_predict
        configs[" ".join(words)] = replace(TINIEST, n_predict=n_predict, **chosen)
    ways = {"euler": {}}
    for switch, values in known.items():
        for value in values[2 if switch in CROSSED else 1 :]:
            ways[value if switch == "integrator" else f"{switch} {value}"] = setting(switch, value)
    for way, changes in ways.items():
        for h, repeat in STEPS if way in CHOICES["integrator"] else (STEPS[0], STEPS[-1]):
            configs[f"{way}, step {h}, repeat {repeat}"] = replace(
                TINIEST, n_layers=2 * repeat, step_size=h, repeat=repeat, **changes
            )
    return configs


def check_architecture(name: str, config: ModelConfig) -> Row:
    """Check every element of every tensor of a model of `config`: one Row, its worst tensor's."""
    problem = tiny_problem(config)
    exact = numerical_gradient(problem, complex_step, np.complex128)
    derived = derived_gradient(problem)
    worst = np.max([relative_error(derived[name], tensor) for name, tensor in exact.items()])
    return Row(name, (sum(tensor.size for tensor in exact.values()),), float(worst))


def check() -> list[Row]:
    """The whole check: two architectures by tensor, and each one in a line."""
    return [
        *check_tensors(tiny_problem(TINY)),
        *check_tensors(tiny_problem(TINY_GPT2), "GPT-2's "),
        *(check_architecture(name, config) for name, config in architectures().items()),
    ]


def passed(rows: list[Row]) -> bool:
    """Whether the backward pass agrees with the complex step to BOUND in every row."""
    return all(row.derived <= BOUND for row in rows)


def table(rows: list[Row]) -> str:
    """The check as text: a line for each row, then the verdict."""
    lines = [f"{'tensor or model':28} {'shape':>7} {'backward':>9} {'central differences':>20}"]
    for row in rows:
        shape = "x".join(map(str, row.shape))
        central = "" if row.central is None else f"{row.central:20.1e}"
        lines.append(f"{row.name:28} {shape:>7} {row.derived:9.1e} {central}".rstrip())
    worst = np.max([row.derived for row in rows])
    verdict = "passed" if passed(rows) else "FAILED"
    return "\n".join([*lines, f"worst {worst:.1e}, bound {BOUND:.0e}: {verdict}"])
