# Made from book/06a-engines.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-sublayers
"""The interfaces of those that do the work: an engine, a cache, a stepper, an optimizer.

An `Engine` must have the single operations, which are abstract. The other methods that the model
calls have bodies made of them, and an engine may override these. `Stepper` is the level above the
model, which training calls. Left out: all arithmetic.

B batch, T positions, C channels, H query heads, G key/value heads, D head width, V vocabulary,
K predicted tokens, F MLP width, I and O the inputs and outputs of a linear map.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from nanoeuler.model.config import ModelConfig, Supports, first_keys
from nanoeuler.model.layers import LAYERNORM_EPS, RMSNORM_EPS, Angles
from nanoeuler.model.weights import Block, Weights

Array = np.ndarray  # or the engine's own kind, where it works in other memory


class SavedAttention(NamedTuple):
    """What `Engine.attend` keeps for its backward."""

    n: Array                # (B, T, C) the input of wqkv
    heads: Array            # (B, T, H+2G, D) queries and keys after RoPE, and values
    p: Any                  # what the engine's attention saved; the reference's is (B, H, T, T)
    y: Array                # (B, T, H*D) the input of wo
    first: Array | None = None  # (B, T) the first key that each query sees
    raw: Array | None = None  # (B, T, H+2G, D) the heads before they were normed, if they are
    roots: Array | None = None  # (B, T, H+G, 1) what that norm saved


class SavedMlp(NamedTuple):
    """What `Engine.mlp` keeps for its backward."""

    n: Array                # (B, T, C) the input of w_up
    u: Array                # (B, T, 2F) gate and up, or (B, T, F) without a gate
    h: Array                # (B, T, F) the input of w_down


class Cache(Protocol):
    """The keys and values of one attention, at one place of the model, for the positions read."""

    def attention(self, heads: Array, n_kv: int, start: int) -> Array:
        """Keep the keys and values of `heads` (B, T, H + 2G, D) at positions start, start + 1, ...

        Returns y (B, T, H * D): each query over the positions up to its own, in its window.
        """


class Engine(ABC):
    """All that the model needs. To make one: inherit, define the operations and `supports`.

    Operations compute what the NumPy functions of these names in `nanoeuler.model` do. Gradients of
    parameters are added to the buffers that are passed. Of what else is passed, only a first
    argument is ever changed: `add_into` adds to it, and `rope`, `rope_backward` and `cross_entropy`
    may write over it. `first` (B, T) int32, 0 <= first[b, t] <= t: where in its row each position's
    text begins (for attention: the first key it sees); None: each row is one text.

    b and db are a `Block` and its gradients. What the forward of a half saves is its engine's own
    affair; `again()` returns n anew, for an engine that did not keep it.
    """

    supports: Supports  # the switches that this engine has code for; the others are refused
    forward_only: bool = False  # whether no backward pass follows: then layers keep nothing for it
    recompute: bool = False  # whether the backward pass runs each layer again, from x alone

    def attend(
        self, config: ModelConfig, b: Block, n: Array, start: int = 0, cache: Cache | None = None,
        first: Array | None = None,
    ) -> tuple[Array, Any]:  # fmt: skip
        """Attention's addition (B, T, C) for n (B, T, C) at the positions from start on; saved.

        first (B, T): where texts begin in their rows; not together with a cache. A cache knows the
        window of its config.
        """
        B, T, _ = n.shape
        H, G, D = config.n_heads, config.n_kv_heads, config.head_dim
        heads = self.linear(n, b.wqkv, b.wqkv_bias).reshape(B, T, H + 2 * G, D)
        raw, stats = None, None
        if config.qk_norm:
            raw, gains = heads, (b.q_norm, b.k_norm)
            heads, stats = self.norm_heads(raw, G, gains, config.norm_eps)
        if config.position == "rope":  # queries and keys are turned, values are not
            cos, sin = self.rope_tables(config.context, D, config.angles)
            heads = self.rope(heads, H + G, cos[start : start + T], sin[start : start + T])
        if cache is None:
            first = self.first_keys(config, B, T, first)
            y, p = self.attention(heads, G, first)
        else:
            y, p = cache.attention(heads, G, start), None
        saved = SavedAttention(n, heads, p, y, first, raw, stats)
        return self.linear(y, b.wo, b.wo_bias), saved

    def attend_backward(
        self, config: ModelConfig, b: Block, db: Block, saved: Any, dout: Array,
        again: Callable[[], Array],
    ) -> Array:  # fmt: skip
        """From dout (B, T, C) to dn (B, T, C), of an `attend` at position 0; adds to db."""
        (B, T, _), H, G = dout.shape, config.n_heads, config.n_kv_heads
        dy = self.linear_backward(dout, saved.y, b.wo, db.wo, db.wo_bias)
        dheads = self.attention_backward(dy, saved.heads, G, saved.p, saved.first)
        if config.position == "rope":
            cos, sin = self.rope_tables(config.context, config.head_dim, config.angles)
            dheads = self.rope_backward(dheads, H + G, cos[:T], sin[:T])
        if config.qk_norm:
            gains, dgains = (b.q_norm, b.k_norm), (db.q_norm, db.k_norm)
            dheads = self.norm_heads_backward(dheads, saved.raw, gains, saved.roots, dgains)
        dheads = dheads.reshape(B, T, -1)
        return self.linear_backward(dheads, saved.n, b.wqkv, db.wqkv, db.wqkv_bias)

    def first_keys(
        self, config: ModelConfig, B: int, T: int, first: Array | None = None
    ) -> Array | None:
        """The first key that each query sees, as `Engine.attention` takes it; None: key 0.

        first: where texts begin in their rows.
        """
        seen = first_keys(config, T, first)
        return first if seen is first else np.broadcast_to(seen, (B, T))

    def norm_heads(
        self, heads: Array, n_kv: int, gains: tuple[Array, Array], eps: float
    ) -> tuple[Array, Array]:
        """heads (B, T, H+2G, D) with queries and keys normed; what the backward needs of it.

        gains: of queries and of keys, (D,) each. Equation eq-attention-qk-norm.
        """
        H = heads.shape[2] - 2 * n_kv
        q, q_stats = self.rmsnorm(heads[:, :, :H], gains[0], eps)
        k, k_stats = self.rmsnorm(heads[:, :, H : H + n_kv], gains[1], eps)
        normed = np.concatenate([q, k, heads[:, :, H + n_kv :]], axis=2)
        return normed, np.concatenate([q_stats, k_stats], axis=2)

    def norm_heads_backward(
        self, dheads: Array, heads: Array, gains: tuple[Array, Array], stats: Array,
        dgains: tuple[Array, Array],
    ) -> Array:  # fmt: skip
        """From dheads (B, T, H+2G, D) after `norm_heads` to before it; adds to dgains (D,) each.

        heads are those before the norm, stats what it saved.
        """
        n_kv = heads.shape[2] - stats.shape[2]
        H, parts = stats.shape[2] - n_kv, []
        for i, part in enumerate((slice(0, H), slice(H, H + n_kv))):
            dn, x = (np.ascontiguousarray(each[:, :, part]) for each in (dheads, heads))
            parts.append(self.rmsnorm_backward(dn, x, gains[i], stats[:, :, part], dgains[i]))
        return np.concatenate([*parts, dheads[:, :, H + n_kv :]], axis=2)

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

    # %% sec-backprop-list
    @abstractmethod
    def begin(self) -> None:
        """Say that a pass starts: all memory that was handed out before may be used again."""

    @abstractmethod
    def scratch(self) -> AbstractContextManager:
        """A context: the memory that is handed out inside may be used again after it."""

    @abstractmethod
    def add(self, x: Array, y: Array, h: float = 1.0) -> Array:
        """x + h y in a new array, all of one shape."""

    @abstractmethod
    def add_into(self, x: Array, y: Array, h: float = 1.0) -> None:
        """x += h y, both of one shape."""

    @abstractmethod
    def scale(self, x: Array, h: float) -> Array:
        """h x in a new array."""

    @abstractmethod
    def embed(
        self, tokens: Array, table: Array, positions: Array | None = None,
        first: Array | None = None,
    ) -> Array:  # fmt: skip
        """tokens (B, T), table (V, C), positions (T, C), first (B, T) -> (B, T, C)."""

    @abstractmethod
    def embed_backward(
        self, dx: Array, tokens: Array, dtable: Array, dpositions: Array | None = None,
        first: Array | None = None,
    ) -> None:  # fmt: skip
        """dx (B, T, C); adds to dtable (V, C) and dpositions (T, C)."""

    @abstractmethod
    def cross_entropy(
        self, logits: Array, targets: Array, scale: Array, cap: float = 0.0
    ) -> tuple[Array, Array]:
        """logits (B, T, K, V), targets (B, T, K), scale (K,) -> sums (K,) of -log p; dlogits.

        cap: c of c tanh(logits / c), which the probabilities are of; 0: none.
        """

    @abstractmethod
    def linear(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        """x (..., I), w (I, O), bias (O,) -> (..., O). w may be a transposed view."""

    @abstractmethod
    def linear_backward(
        self, dy: Array, x: Array, w: Array, dw: Array, dbias: Array | None = None
    ) -> Array:
        """dy (..., O) -> dx (..., I); adds to dw (I, O) and dbias (O,)."""

    @abstractmethod
    def rmsnorm(self, x: Array, gain: Array, eps: float = RMSNORM_EPS) -> tuple[Array, Array]:
        """x (..., C), gain (C,) -> y (..., C), stats (..., 1)."""

    @abstractmethod
    def rmsnorm_backward(
        self, dy: Array, x: Array, gain: Array, stats: Array, dgain: Array
    ) -> Array:
        """dy (..., C) -> dx (..., C); adds to dgain (C,)."""

    @abstractmethod
    def layernorm(
        self, x: Array, gain: Array, bias: Array | None = None, eps: float = LAYERNORM_EPS
    ) -> tuple[Array, Array]:
        """x (..., C), gain and bias (C,) -> y (..., C), stats (..., 2)."""

    @abstractmethod
    def layernorm_backward(
        self, dy: Array, x: Array, gain: Array, stats: Array, dgain: Array,
        dbias: Array | None = None,
    ) -> Array:  # fmt: skip
        """dy (..., C) -> dx (..., C); adds to dgain and dbias (C,)."""

    @abstractmethod
    def rope_tables(
        self, T: int, D: int, angles: Angles = Angles()  # noqa: B008 it's immutable
    ) -> tuple[Array, Array]:
        """cos, sin (T, D/2) of the positions 0 .. T - 1."""

    @abstractmethod
    def rope(self, heads: Array, n: int, cos: Array, sin: Array) -> Array:
        """heads (B, T, N, D), the first n turned by cos, sin (T, D/2)."""

    @abstractmethod
    def rope_backward(self, dheads: Array, n: int, cos: Array, sin: Array) -> Array:
        """dheads (B, T, N, D), the first n turned back."""

    @abstractmethod
    def attention(
        self, heads: Array, n_kv: int, first: Array | None = None
    ) -> tuple[Array, Any]:
        """heads (B, T, H+2G, D), n_kv = G -> y (B, T, H*D), what the backward needs of it."""

    @abstractmethod
    def attention_backward(
        self, dy: Array, heads: Array, n_kv: int, p: Any, first: Array | None = None
    ) -> Array:
        """dy (B, T, H*D) -> dheads (B, T, H+2G, D)."""

    @abstractmethod
    def swiglu(self, gate_up: Array) -> Array:
        """gate_up (..., 2F) -> (..., F)."""

    @abstractmethod
    def swiglu_backward(self, dh: Array, gate_up: Array) -> Array:
        """dh (..., F) -> dgate_up (..., 2F)."""

    @abstractmethod
    def gelu(self, u: Array) -> Array:
        """u of any shape -> the same shape."""

    @abstractmethod
    def gelu_backward(self, dh: Array, u: Array) -> Array:
        """dh of any shape -> du."""

    # %% sec-backprop-levels
    def mlp_again(self, config: ModelConfig, b: Block, n: Array) -> Any:
        """What `mlp` saved for n (B, T, C), computed again, bit for bit."""
        return self.mlp(config, b, n)[1]

    def running_again(self) -> AbstractContextManager:
        """A context in which the forward of a layer runs in the middle of the backward pass."""
        return nullcontext()

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

    def move_norm(
        self, config: ModelConfig, x: Array, terms: Sequence[tuple[float, Array]], gain: Array,
        bias: Array | None,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """x + the sum of weight * k over terms (weight, k); its norm n; what the backward needs.

        All of them (B, T, C), but for the last. x is not changed; without terms it is returned.
        """
        for weight, k in terms:
            x = self.add(x, k, weight)
        if config.norm == "rms":
            return x, *self.rmsnorm(x, gain, config.norm_eps)
        return x, *self.layernorm(x, gain, bias, config.norm_eps)

    def move_norm_backward(
        self, config: ModelConfig, dn: Array, x: Array, gain: Array, stats: Array,
        dnorm: tuple[Array, Array | None], dx: Array | None = None,
    ) -> Array:  # fmt: skip
        """dx, to which the norm's gradient is added, or that alone where no dx is given.

        x is the stream that `move_norm` returned. dnorm: the gradients of gain and of bias, or None
        without a bias; both are added to.
        """
        dgain, dbias = dnorm
        if config.norm == "rms":
            du = self.rmsnorm_backward(dn, x, gain, stats, dgain)
        else:
            du = self.layernorm_backward(dn, x, gain, stats, dgain, dbias)
        if dx is None:
            return du
        self.add_into(dx, du)
        return dx

    def loss(
        self, n: Array, W: Array, targets: Array, scale: Array, dW: Array | None = None,
        cap: float = 0.0,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """The sums (K,) of `cross_entropy` for n (B, T, C), W (C, K V), targets (B, T, K); and dn.

        Adds to dW (C, K V). Where that is None the gradient is not wanted, and dn is None. cap: see
        `cross_entropy`, which is told of it if there is one.
        """
        logits = self.linear(n, W).reshape(*targets.shape, -1)
        sums, dlogits = self.cross_entropy(logits, targets, scale, *([cap] if cap else []))
        if dW is None:
            return sums, None
        return sums, self.linear_backward(dlogits.reshape(*n.shape[:-1], -1), n, W, dW)

    def ready(self, i: int) -> None:  # noqa: B027 few engines listen
        """Called when the gradients from block i to the end of the flat buffer are complete.

        i is n_blocks, then n_blocks - 1, down to 0: `dw.flat[dw.block_starts[i] :]` is final in
        this pass. The part before block 0 follows with the end of the backward pass.
        """


# %% sec-backprop-list
# The names of the operations above, in the order of their definition.
OPERATIONS = [x for x, f in vars(Engine).items() if getattr(f, "__isabstractmethod__", False)]


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
    threads: int  # that an update may use: a stepper says how many
    gather: Callable[[np.ndarray], None] | None  # tells each rank all parts of a flat buffer

    def clip(self, gradients: Weights) -> float:
        """Bound the gradients' global norm, in place; the norm before, finite if they all are."""

    def squares(self, flat: np.ndarray, parts: int) -> list[float]:
        """The sums of the squares of `parts` equal parts of `flat`."""

    def limit(self, flat: np.ndarray, squares: list[float]) -> float:
        """Scale a part `flat` of the gradients as `clip` would; `squares`: of all parts."""

    def update(
        self, weights: Weights, gradients: Weights, lr: float, number: int,
        part: slice = slice(None),
    ) -> None:  # fmt: skip
        """Change the weights in place, in step `number` (from 1), at the learning rate lr.

        `part` of the flat buffers alone, where other ranks change the rest.
        """


class Stepper(ABC):
    """Weights, gradients and the optimizer's moments, and the step that changes them."""

    @abstractmethod
    def step(
        self, tokens: np.ndarray, targets: np.ndarray, lr: float, number: int,
        first: np.ndarray | None = None,
    ) -> list[Taken]:  # fmt: skip
        """Begin training step `number` on tokens (B, T), targets (B, T, K) at learning rate lr.

        first (B, T) int32, for rows of several texts: see `Engine`.
        Returns the steps that have become known meanwhile, oldest first: on a processor this very
        one, on a device that works ahead of us the one before. A step whose loss or gradient is
        not finite changes nothing.
        """

    def finish(self) -> list[Taken]:
        """Wait for all steps that were begun; return those that `step` has not returned yet."""
        return []

    @abstractmethod
    def sums(
        self, tokens: np.ndarray, targets: np.ndarray, first: np.ndarray | None = None
    ) -> np.ndarray:
        """The sums (K,) of -log p in nats over the counted targets, by a forward pass alone."""

    def pull(self) -> None:  # noqa: B027 nothing to do where they are the run's own
        """Bring the weights and moments of the run up to date with the stepper's own."""

    def push(self) -> None:  # noqa: B027 as for pull
        """Bring the stepper's own weights and moments up to date with those of the run."""
