# Made from book/06a-engines.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-sublayers
"""What the package asks of those who do the work: an engine, a cache, a stepper, an optimizer.

The interface has three levels. `Primitives` are single operations, which an engine must have.
`Sublayers` and `Engine` add what the model calls, with bodies made of primitives, which an engine
may override. `Stepper` stands above the model: it is what training calls. Left out: all arithmetic.

B batch, T positions, C channels, H query heads, G key/value heads, D head width, V vocabulary,
K predicted tokens, F MLP width.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from nanoeuler.engines.primitives import Array, Primitives
from nanoeuler.model.config import ModelConfig, Supports
from nanoeuler.model.weights import Block, Weights


class SavedAttention(NamedTuple):
    """What `Sublayers.attend` keeps for its backward."""

    n: Array                # (B, T, C) the input of wqkv
    heads: Array            # (B, T, H+2G, D) queries and keys after RoPE, and values
    p: Any                  # what the engine's attention saved; the reference's is (B, H, T, T)
    y: Array                # (B, T, H*D) the input of wo
    first: Array | None = None  # (B, T) where the text of each position begins


class SavedMlp(NamedTuple):
    """What `Sublayers.mlp` keeps for its backward."""

    n: Array                # (B, T, C) the input of w_up
    u: Array                # (B, T, 2F) gate and up, or (B, T, F) for GELU
    h: Array                # (B, T, F) the input of w_down


class Cache(Protocol):
    """The keys and values of one attention, at one place of the model, for the positions read."""

    def attention(self, heads: Array, n_kv: int, start: int) -> Array:
        """Keep the keys and values of `heads` (B, T, H + 2G, D) at positions start, start + 1, ...

        Returns y (B, T, H * D): each of the T queries over all positions up to its own.
        """


class AttentionHalf(Primitives, Protocol):
    """Attention's half of a block: from the normalised stream n to what is added to the stream."""

    def attend(
        self, config: ModelConfig, b: Block, n: Array, start: int = 0, cache: Cache | None = None,
        first: Array | None = None,
    ) -> tuple[Array, Any]:  # fmt: skip
        """Attention's addition (B, T, C) for n (B, T, C) at the positions from start on; saved.

        first (B, T): as for `Primitives.attention`; not together with a cache.
        """
        B, T, _ = n.shape
        H, G, D = config.n_heads, config.n_kv_heads, config.head_dim
        heads = self.linear(n, b.wqkv, b.wqkv_bias).reshape(B, T, H + 2 * G, D)
        if config.position == "rope":  # queries and keys are turned, values are not
            cos, sin = self.rope_tables(config.context, D)
            heads = self.rope(heads, H + G, cos[start : start + T], sin[start : start + T])
        if cache is None:
            y, p = self.attention(heads, G, first)
        else:
            y, p = cache.attention(heads, G, start), None
        return self.linear(y, b.wo, b.wo_bias), SavedAttention(n, heads, p, y, first)

    def attend_backward(
        self, config: ModelConfig, b: Block, db: Block, saved: Any, dout: Array,
        again: Callable[[], Array],
    ) -> Array:  # fmt: skip
        """From dout (B, T, C) to dn (B, T, C), of an `attend` at position 0; adds to db."""
        (B, T, _), H, G = dout.shape, config.n_heads, config.n_kv_heads
        dy = self.linear_backward(dout, saved.y, b.wo, db.wo, db.wo_bias)
        dheads = self.attention_backward(dy, saved.heads, G, saved.p, saved.first)
        if config.position == "rope":
            cos, sin = self.rope_tables(config.context, config.head_dim)
            dheads = self.rope_backward(dheads, H + G, cos[:T], sin[:T])
        dheads = dheads.reshape(B, T, -1)
        return self.linear_backward(dheads, saved.n, b.wqkv, db.wqkv, db.wqkv_bias)


class MlpHalf(Primitives, Protocol):
    """The MLP's half of a block: from the normalised stream n to what is added to the stream."""

    def mlp(self, config: ModelConfig, b: Block, n: Array) -> tuple[Array, Any]:
        """The MLP's addition (B, T, C) for n (B, T, C); saved."""
        u = self.linear(n, b.w_up, b.w_up_bias)
        h = getattr(self, config.mlp)(u)
        return self.linear(h, b.w_down, b.w_down_bias), SavedMlp(n, u, h)

    def mlp_backward(
        self, config: ModelConfig, b: Block, db: Block, saved: Any, dout: Array,
        again: Callable[[], Array],
    ) -> Array:  # fmt: skip
        """From dout (B, T, C) to dn (B, T, C); adds to db."""
        dh = self.linear_backward(dout, saved.h, b.w_down, db.w_down, db.w_down_bias)
        du = getattr(self, f"{config.mlp}_backward")(dh, saved.u)
        return self.linear_backward(du, saved.n, b.w_up, db.w_up, db.w_up_bias)


class Sublayers(AttentionHalf, MlpHalf, Protocol):
    """The halves of a block. b and db are a `Block` and its gradients.

    What a forward saves is its engine's own affair; `again()` returns n anew, for an engine that
    did not keep it.
    """


# %% sec-backprop-levels
class Entrance(Primitives, Protocol):
    """From tokens to the stream."""

    def enter(
        self, config: ModelConfig, w: Weights, tokens: Array, start: int = 0,
        first: Array | None = None,
    ) -> Array:  # fmt: skip
        """The stream (B, T, C) of tokens (B, T) at the positions from start on; first (B, T)."""
        learned = config.position == "learned"
        positions = w["positions"][start : start + tokens.shape[1]] if learned else None
        return self.embed(tokens, w["embedding"], positions, first)

    def enter_backward(
        self, config: ModelConfig, dw: Weights, tokens: Array, dx: Array,
        first: Array | None = None,
    ) -> None:  # fmt: skip
        """Add to dw the gradients of what `enter` read at position 0, given dx (B, T, C)."""
        learned = config.position == "learned"
        dpositions = dw["positions"][: tokens.shape[1]] if learned else None
        self.embed_backward(dx, tokens, dw["embedding"], dpositions, first)


class Moves(Primitives, Protocol):
    """The stream's moves, each with the norm that reads where it arrives."""

    def move_norm(
        self, config: ModelConfig, x: Array, terms: Sequence[tuple[float, Array]], gain: Array,
        bias: Array | None,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """x + the sum of weight * k over terms (weight, k); its norm n; what the backward wants.

        All of them (B, T, C), but for the last. x is not changed; without terms it is returned.
        """
        for weight, k in terms:
            x = self.add(x, k, weight)
        if config.norm == "rms":
            return x, *self.rmsnorm(x, gain)
        return x, *self.layernorm(x, gain, bias)

    def move_norm_backward(
        self, config: ModelConfig, dn: Array, x: Array, gain: Array, stats: Array, dgain: Array,
        dbias: Array | None, dx: Array | None = None,
    ) -> Array:  # fmt: skip
        """dx, to which the norm's gradient is added, or that alone where no dx is given.

        x is the stream that `move_norm` returned. Adds to dgain and dbias.
        """
        if config.norm == "rms":
            du = self.rmsnorm_backward(dn, x, gain, stats, dgain)
        else:
            du = self.layernorm_backward(dn, x, gain, stats, dgain, dbias)
        if dx is None:
            return du
        self.add_into(dx, du)
        return dx


class Engine(Sublayers, Entrance, Moves, Protocol):
    """All that the model asks for. To make one: inherit, define the primitives and `supports`."""

    supports: Supports  # the switches that this engine has code for; the others are refused

    def loss(
        self, n: Array, W: Array, targets: Array, scale: Array, dW: Array | None = None
    ) -> tuple[Array, Array | None]:
        """The sums (K,) of `cross_entropy` for n (B, T, C), W (C, K V), targets (B, T, K); and dn.

        Adds to dW (C, K V). Where that is None the gradient is not wanted, and dn is None.
        """
        logits = self.linear(n, W).reshape(*targets.shape, -1)
        sums, dlogits = self.cross_entropy(logits, targets, scale)
        if dW is None:
            return sums, None
        return sums, self.linear_backward(dlogits.reshape(*n.shape[:-1], -1), n, W, dW)

    def ready(self, i: int) -> None:
        """Hear that the gradients from block i to the end of the flat buffer are complete.

        i is n_blocks, then n_blocks - 1, down to 0: `dw.flat[dw.block_starts[i] :]` is final in
        this pass. What stands before block 0 follows with the end of the backward pass.
        """


# %% sec-backprop-stepper
class Taken(NamedTuple):
    """What became known of a training step."""

    number: int             # of the step, from 1
    sums: np.ndarray        # (K,) of -log p in nats over the counted targets
    norm: float             # of the gradient, before it was clipped

    @property
    def finite(self) -> bool:
        """Whether the step was taken: one with a loss or gradient that is not finite is skipped."""
        return bool(np.isfinite(self.sums).all() and np.isfinite(self.norm))


class Optimizer(Protocol):
    """What turns gradients into a change of the weights. It owns its moments, m and v.

    A stepper calls `clip` and `update`, or does what they do with the numbers: see
    `training.optim.AdamW`, which says what they mean.
    """

    m: Weights
    v: Weights
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float

    def clip(self, gradients: Weights) -> float:
        """Bound the gradients' global norm, in place; the norm before, finite if they all are."""

    def squares(self, flat: np.ndarray, parts: int) -> list[float]:
        """The sums of the squares of `parts` equal parts of `flat`."""

    def limit(self, flat: np.ndarray, squares: list[float]) -> float:
        """As `clip` for a part `flat` of the gradients; `squares` are those of all."""

    def update(
        self, weights: Weights, gradients: Weights, lr: float, number: int,
        part: slice = slice(None),
    ) -> None:  # fmt: skip
        """Change the weights in place, in step `number` (from 1), at the learning rate lr.

        `part` of the flat buffers alone, where other ranks change the rest.
        """


class Stepper(Protocol):
    """Weights, gradients and the optimizer's moments, and the step that changes them."""

    def step(
        self, tokens: np.ndarray, targets: np.ndarray, lr: float, number: int,
        first: np.ndarray | None = None,
    ) -> list[Taken]:  # fmt: skip
        """Begin training step `number` on tokens (B, T), targets (B, T, K) at learning rate lr.

        first (B, T) int32, for rows of several texts: see `Primitives`.
        Returns the steps that have become known meanwhile, oldest first: on a processor this very
        one, on a device that works ahead of us the one before. A step whose loss or gradient is
        not finite changes nothing.
        """

    def finish(self) -> list[Taken]:
        """Wait for all steps that were begun; return those that `step` has not returned yet."""

    def sums(
        self, tokens: np.ndarray, targets: np.ndarray, first: np.ndarray | None = None
    ) -> np.ndarray:
        """The sums (K,) of -log p in nats over the counted targets, by a forward pass alone."""

    def pull(self) -> None:
        """Bring the weights and moments of the run up to date with the stepper's own."""

    def push(self) -> None:
        """Bring the stepper's own weights and moments up to date with those of the run."""
