# Made from book/09-depth-as-time.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-depth-otherwise
"""A model's layers in other steps: finer, coarser, or by another integrator.

A model is a pair (config, weights). No function here changes a number of the one it is given.
Leaves out training: what comes out trains like any other model.

B batch, T positions, C channels, L layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from nanoeuler.engines.interface import Engine
from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.integrators import relative_step
from nanoeuler.model.transformer import stream
from nanoeuler.model.weights import Block, Weights

Model = tuple[ModelConfig, Weights]  # the pair that makes a model


def with_step(config: ModelConfig, w: Weights, **changes: float | str) -> Model:
    """The same layers with another `step_size` or `integrator`; the weights are shared."""
    config = replace(config, **changes)
    return config, Weights(config, w.flat.dtype, w.flat)


def at_depths(config: ModelConfig, w: Weights, depths: Sequence[float], step_size: float) -> Model:
    """The model whose layer i has the weights that the given one has at depth depths[i].

    Depth l is layer l's, between two layers the weights are mixed in proportion, and past the last
    they stay. The new layers share nothing (repeat is 1), so that each can be trained on.
    """
    for depth in depths:
        if not 0 <= depth < config.n_layers:
            raise UserError(f"expected depths from 0 up to {config.n_layers}, got {depth}")
    new_config = replace(config, n_layers=len(depths), step_size=step_size, repeat=1)
    new = Weights(new_config, w.flat.dtype)
    for name, tensor in new.items():
        tensor[...] = 0 if name.startswith("block.") else w[name]
    for i, depth in enumerate(depths):
        below = int(depth)
        for layer, share in ((below, 1 - (depth - below)), (below + 1, depth - below)):
            if share:
                block = min(layer, config.n_layers - 1) // config.repeat
                for mixed, tensor in zip(new.blocks[i], w.blocks[block], strict=True):
                    if tensor is not None:
                        mixed += share * tensor
    return new_config, new


def refine_depth(config: ModelConfig, w: Weights, how: str = "split") -> Model:
    """A model of 2 L layers and half the step: each layer twice, or the mean of two between them.

    how: "split" does every layer twice; "insert" puts after each layer the mean of it and the next.
    """
    twice = np.arange(2 * config.n_layers)
    if how not in ("split", "insert"):
        raise UserError(f"expected how to be split or insert, got {how!r}")
    depths = twice // 2 if how == "split" else twice / 2
    return at_depths(config, w, depths.tolist(), config.step_size / 2)


def drop_layers(config: ModelConfig, w: Weights) -> Model:
    """A model of every second layer, the first included, and twice the step."""
    if config.n_layers % 2:
        raise UserError(
            f"expected an even number of layers to drop every second of, got {config.n_layers}"
        )
    return at_depths(config, w, range(0, config.n_layers, 2), 2 * config.step_size)


# %% sec-depth-measures
def walk(engine: Engine, config: ModelConfig, w: Weights, tokens: np.ndarray) -> list[np.ndarray]:
    """The stream (B, T, C) before each sublayer and after the last: a list of 2 L + 1 arrays."""
    engine.begin()
    _, saved = stream(engine, config, w, tokens)
    states = [stages[0].x for layer in saved.layers for stages in layer]
    return [np.array(x) for x in (*states, saved.x)]  # copies: engines use their memory again


def moved(engine: Engine, model: Model, other: Model, tokens: np.ndarray) -> float:
    """How far from `model`'s end `other` ends, as a part of the way from its start to its end.

    Both are taken at length 1, as the norm in front of the output reads them.
    """
    states, others = walk(engine, *model, tokens), walk(engine, *other, tokens)
    start, end, there = (
        x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (states[0], states[-1], others[-1])
    )
    return float(np.linalg.norm(there - end) / np.linalg.norm(end - start))


def relative_steps(
    engine: Engine, config: ModelConfig, w: Weights, tokens: np.ndarray
) -> np.ndarray:
    """rho (L, 2) of each attention and MLP, the mean over positions. Equation eq-euler-rho."""
    steps = pairwise(walk(engine, config, w, tokens))
    return np.reshape([np.mean(relative_step(x, after - x)) for x, after in steps], (-1, 2))


def neighbours(engine: Engine, config: ModelConfig, w: Weights, tokens: np.ndarray) -> np.ndarray:
    """The change of f from a layer to the next, (L - 1, 2) for attention and MLP.

    |f_next(x) - f(x)| over the root mean square of |f(x)| and |f_next(x)|, at the place x where the
    layer itself reads: 0 where the two are the same, 1.41 where they are perpendicular.
    """
    engine.begin()
    _, saved = stream(engine, config, w, tokens)
    blocks = [w.blocks[i // config.repeat] for i in range(config.n_layers)]

    def attention(b: Block, x: np.ndarray) -> np.ndarray:
        n = engine.move_norm(config, x, [], b.norm1, b.norm1_bias)[1]
        return engine.attend(config, b, n)[0]

    def mlp(b: Block, x: np.ndarray) -> np.ndarray:
        n = engine.move_norm(config, x, [], b.norm2, b.norm2_bias)[1]
        return engine.mlp(config, b, n)[0]

    changes = []
    for (b, after), layer in zip(pairwise(blocks), saved.layers[:-1], strict=True):
        for f, stages in zip((attention, mlp), layer, strict=True):
            here, there = f(b, stages[0].x), f(after, stages[0].x)
            size = np.sqrt((np.linalg.norm(here) ** 2 + np.linalg.norm(there) ** 2) / 2)
            changes.append(np.linalg.norm(there - here) / size)
    return np.reshape(changes, (-1, 2))
