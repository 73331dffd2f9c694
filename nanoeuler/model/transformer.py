# Made from book/06a-engines.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-euler
"""The model: its forward pass, its backward pass, and its loss.

Written once, over what an engine offers (`engines.interface`). Left out: the optimizer, and drawing
text from the model.

B batch, T positions, C channels, G key/value heads, D head width, V vocabulary, K predicted tokens,
L layers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.interface import Array, Cache, Engine
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import ModelConfig, require
from nanoeuler.model.integrators import INTEGRATORS
from nanoeuler.model.modern import soft_cap
from nanoeuler.model.weights import Block, Weights, output_matrix

# Weight of each head k >= 1; head 0 has 1. DeepSeek-V3 begins with 0.3 for its one extra head and
# lowers it later (its report, section 4.2); here it stays, and is not divided by their number.
EXTRA_HEAD_WEIGHT = 0.3

Terms = list[tuple[float, Array]]  # weights and arrays (B, T, C) of a sum


class Stage(NamedTuple):
    """What a stage of a step keeps for its backward."""

    x: Array                # (B, T, C) the point of the stream that it read
    stats: Array            # for the norm's backward
    saved: Any              # for the backward of the engine's half


# %% sec-backprop-model
class AttentionContext(NamedTuple):
    """Which keys the tokens (B, T) of a pass attend to besides their own."""

    start: int                      # the position of the first of them
    caches: Sequence[Cache | None]  # for each stage: what the layer has kept of those before
    first: Array | None             # (B, T) where the text of each position begins


def layer(
    engine: Engine, config: ModelConfig, b: Block, x: Array, pending: Terms,
    context: AttentionContext, again: bool = False,
) -> tuple[Array, Terms, tuple]:  # fmt: skip
    """The two steps of a layer: where the second began, what is pending after it, their stages.

    again: only the stages are wanted, so the last term isn't computed.
    """
    last = len(INTEGRATORS[config.integrator].b) - 1

    def attend(n: Array, stage: int) -> tuple[Array, Any]:
        return engine.attend(config, b, n, context.start, context.caches[stage], context.first)

    def mlp(n: Array, stage: int) -> tuple[Array, Any]:
        if again and stage == last:
            return None, engine.mlp_again(config, b, n)
        return engine.mlp(config, b, n)

    x, pending, attended = step(engine, config, attend, (b.norm1, b.norm1_bias), x, pending)
    x, pending, thought = step(engine, config, mlp, (b.norm2, b.norm2_bias), x, pending)
    return x, pending, (attended, thought)


class Saved(NamedTuple):
    """What a forward pass keeps for its backward pass."""

    tokens: Array           # (B, T)
    start: int              # the position of the first of them
    layers: list            # per layer: attention's and the MLP's lists of `Stage`, or x, see below
    x: Array                # (B, T, C) the stream after the last layer
    stats: Array            # for the last norm's backward
    first: Array | None     # (B, T) where the text of each position begins


def stream(
    engine: Engine, config: ModelConfig, w: Weights, tokens: Array, start: int = 0,
    caches: Sequence[Sequence[Cache]] | None = None, first: Array | None = None,
) -> tuple[Array, Saved]:  # fmt: skip
    """The normalised stream n (B, T, C), which the output matrix reads, and `Saved`.

    tokens (B, T) int are at the positions from `start` on. caches[layer][stage] answers for that
    call of attention; without caches, attention sees these tokens alone. first (B, T) int, for rows
    of several texts that are read at once, from position 0: where each position's text begins.
    UserError where the context has no such positions.
    """
    if first is not None:
        assert first.shape == tokens.shape and start == 0 and caches is None
    end, most = start + tokens.shape[1], config.context
    if end > most:
        raise UserError(f"expected at most {most} tokens, the context, got {end}: cut some off")
    require(config, engine.supports, type(engine).__name__)
    x, pending, layers = engine.enter(config, w, tokens, start, first), [], []
    none = [None] * len(INTEGRATORS[config.integrator].b)
    for i in range(config.n_layers):
        b, mine = w.blocks[i // config.repeat], caches[i] if caches else none
        own = config.in_layer(i)  # the window of this layer
        x, pending, stages = layer(engine, own, b, x, pending, AttentionContext(start, mine, first))
        if not engine.forward_only:
            layers.append(stages[0][0].x if engine.recompute else stages)
        del stages  # whatever isn't kept of them
    x, n, stats = engine.move_norm(config, x, pending, w["norm"], w.get("norm_bias"))
    return n, Saved(tokens, start, layers, x, stats, first)


def forward(
    engine: Engine, config: ModelConfig, w: Weights, tokens: Array, start: int = 0,
    caches: Sequence[Sequence[Cache]] | None = None, first: Array | None = None,
) -> tuple[Array, Saved]:  # fmt: skip
    """The logits (B, T, K, V) after each of tokens (B, T) int, and `Saved`; as `stream`."""
    n, saved = stream(engine, config, w, tokens, start, caches, first)
    logits = engine.linear(n, output_matrix(config, w))
    if config.logit_cap:
        logits = soft_cap(logits, config.logit_cap)
    return logits.reshape(*tokens.shape, config.n_predict, config.vocab_size), saved


# %% sec-backprop-backward
def layer_backward(
    engine: Engine, config: ModelConfig, b: Block, db: Block, stages: tuple, dx: Array
) -> None:
    """The backward of `layer`: dx after it becomes dx before it, in place. Adds to db."""
    attention, mlp = stages
    for half, saved, norm, dnorm in (
        (engine.mlp_backward, mlp, (b.norm2, b.norm2_bias), (db.norm2, db.norm2_bias)),
        (engine.attend_backward, attention, (b.norm1, b.norm1_bias), (db.norm1, db.norm1_bias)),
    ):
        step_backward(engine, config, partial(half, config, b, db), norm, dnorm, saved, dx)


def layer_again(
    engine: Engine, config: ModelConfig, b: Block, x: Array, first: Array | None
) -> tuple:
    """The stages of `layer`, run again from its x (B, T, C) at position 0; bit for bit."""
    context = AttentionContext(0, [None] * len(INTEGRATORS[config.integrator].b), first)
    with engine.running_again():
        return layer(engine, config, b, x, [], context, again=True)[2]


def backward(
    engine: Engine, config: ModelConfig, w: Weights, saved: Saved, dn: Array, dw: Weights
) -> None:
    """Add to dw the gradient of the loss, given that of the stream's end, dn (B, T, C).

    `saved` is of a `stream` from position 0, without caches, and its layers are used up. The
    gradient of the output matrix as such is left out: `Engine.loss` adds it. Says `ready` to the
    engine, block by block.
    """
    assert saved.start == 0, f"expected a pass from position 0, got one from {saved.start}"
    dnorm = dw["norm"], dw.get("norm_bias")
    dx = engine.move_norm_backward(config, dn, saved.x, w["norm"], saved.stats, dnorm)
    engine.ready(config.n_blocks)
    for i in reversed(range(config.n_layers)):
        block = i // config.repeat
        with engine.scratch():  # dx outlives the layer; nothing else in it does
            stages, b, own = saved.layers.pop(), w.blocks[block], config.in_layer(i)
            if engine.recompute:
                stages = layer_again(engine, own, b, stages, saved.first)
            layer_backward(engine, own, b, dw.blocks[block], stages, dx)
            del stages  # before those of the next layer are made
        if i % config.repeat == 0:
            engine.ready(block)
    engine.enter_backward(config, dw, saved.tokens, dx, saved.first)


# %% sec-backprop-loss
def head_weights(n_predict: int) -> np.ndarray:
    """The weight (K,) of each head's mean loss in the training loss: 1, then EXTRA_HEAD_WEIGHT."""
    return np.where(np.arange(n_predict) == 0, 1.0, EXTRA_HEAD_WEIGHT)


def loss_scale(targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The scale (K,) of one counted target: a head's weight over its number of counted targets.

    targets (B, T, K) int with IGNORE, weights (K,). Of a batch in parts: the whole batch's targets.
    """
    assert weights.shape == targets.shape[2:]
    counted = np.sum(targets != IGNORE, axis=(0, 1))
    return weights / np.maximum(counted, 1)  # a head without targets has no loss, at any scale


def loss_and_gradients(
    engine: Engine, config: ModelConfig, w: Weights, tokens: Array, targets: Array, scale: Array,
    dw: Weights, first: Array | None = None,
) -> Array:  # fmt: skip
    """Add the gradient of the loss sum_k scale_k sums_k to dw; return sums (K,) in nats.

    tokens (B, T) int, targets (B, T, K) int with IGNORE, scale (K,) as `loss_scale` makes it,
    first (B, T) as for `stream`. Equation eq-backprop-loss.
    """
    engine.begin()
    n, saved = stream(engine, config, w, tokens, first=first)
    W, dW = output_matrix(config, w), output_matrix(config, dw)
    sums, dn = engine.loss(n, W, targets, scale, dW, **capping(config))
    backward(engine, config, w, saved, dn, dw)
    return sums


def capping(config: ModelConfig) -> dict[str, float]:
    """What `Engine.loss` is told of a cap of the logits, where there is one."""
    return {"cap": config.logit_cap} if config.logit_cap else {}


def loss_sums(
    engine: Engine, config: ModelConfig, w: Weights, tokens: Array, targets: Array,
    first: Array | None = None,
) -> Array:  # fmt: skip
    """The sums (K,) of -log p in nats over the counted targets, by a forward pass only."""
    engine.begin()
    n, _ = stream(engine, config, w, tokens, first=first)
    W, ones = output_matrix(config, w), np.ones(config.n_predict)
    return engine.loss(n, W, targets, ones, **capping(config))[0]


# %% sec-backprop-step
def step(
    engine: Engine, config: ModelConfig, f: Callable, norm: tuple, x: Array, pending: Terms
) -> tuple[Array, Terms, list[Stage]]:
    """A step of size h by the configured integrator, from x (B, T, C) plus what is pending.

    norm: the gain and bias that f reads through; f(n, i) returns the velocity of stage i and what
    it saved. Returns where the step began, what is pending after it, and its stages. Equation
    eq-backprop-stages.
    """
    a, b = INTEGRATORS[config.integrator]
    velocities, stages = [], []
    for i, row in enumerate(a):
        terms = pending if i == 0 else _terms(config, row, velocities)
        u, n, stats = engine.move_norm(config, x, terms, *norm)
        if i == 0:
            x = u  # the sum is taken: here the step begins
        k, saved = f(n, i)
        velocities.append(k)
        stages.append(Stage(u, stats, saved))
    return x, _terms(config, b, velocities), stages


def _terms(config: ModelConfig, weights: Sequence[float], velocities: list) -> Terms:
    """h times the weighted velocities, those of weight zero left out."""
    pairs = zip(weights, velocities, strict=True)
    return [(config.step_size * weight, k) for weight, k in pairs if weight]


def step_backward(
    engine: Engine, config: ModelConfig, f_backward: Callable, norm: tuple, dnorm: tuple,
    stages: list[Stage], dx: Array,
) -> None:  # fmt: skip
    """Turn dx, the gradient of the stream after `step`, into that before it, in place.

    f_backward(saved, dk, again) returns dn in a new array; norm and dnorm are gain and bias, and
    their gradients, which are added to. Equation eq-backprop-step.
    """
    a, b = INTEGRATORS[config.integrator]
    h, last, du = config.step_size, len(b) - 1, [None] * len(b)
    for i in range(last, -1, -1):
        u, stats, saved = stages[i]
        plain = i == last and h * b[i] == 1  # dk is dx, and nothing will be added to it
        dk = dx if plain else engine.scale(dx, h * b[i])                # (1)
        for j in range(i + 1, last + 1):
            if a[j][i]:
                engine.add_into(dk, du[j], h * a[j][i])                 # (2)
        dn = f_backward(saved, dk, partial(_normalised, engine, config, u, norm))
        into = dx if i == 0 else None                                   # (3) of stage 0
        du[i] = engine.move_norm_backward(config, dn, u, norm[0], stats, dnorm, into)
    for each in du[1:]:
        engine.add_into(dx, each)                                       # (3)


def _normalised(engine: Engine, config: ModelConfig, x: Array, norm: tuple) -> Array:
    """The norm of the point x of the stream, again."""
    return engine.move_norm(config, x, [], *norm)[1]
