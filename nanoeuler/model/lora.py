# Made from book/19d-lora.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-lora-backward
"""Low-rank adapters (LoRA, Hu et al. 2021): W' = W + (alpha / r) A B, of which A and B are learned.

The model computes with merged weights; what changes is the gradient of a matrix. Leaves out the
optimizer and saves (training/lora.py) and files of others (interop/peft.py).

C channels, H query heads, G key/value heads, D head width, F MLP width, I and O the inputs and
outputs of a linear map, N positions of a batch, r the rank.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.interface import Array, Engine
from nanoeuler.errors import UserError, quoted
from nanoeuler.model.config import ModelConfig, parameter_shapes
from nanoeuler.model.weights import PADDING, Block, Weights


class Adapter(NamedTuple):
    """The adapter of some columns of a matrix, and the buffers that its gradient is added to."""

    columns: slice
    scale: float            # alpha / r
    A: Array                # (I, r)
    B: Array                # (r, columns)
    dA: Array               # (I, r)
    dB: Array               # (r, columns)


class LowRank(NamedTuple):
    """In the place of a matrix's gradient: those of its adapters. Without one, it is frozen."""

    adapters: tuple[Adapter, ...] = ()

    @property
    def T(self) -> "LowRank":
        """Of a frozen embedding that is the output matrix as well: frozen too."""
        assert not self.adapters
        return self


def linear_backward(
    engine: Engine, dense: Callable[..., Array], dy: Array, x: Array, w: Array,
    dw: Array | LowRank, dbias: Array | None = None,
) -> Array:  # fmt: skip
    """`Engine.linear_backward`, `dense`, for a `dw` that may be `LowRank`. Eq. eq-lora-backward.

    dy (..., O), x (..., I), w (I, O) merged -> dx (..., I). The gradient of w is never made.
    """
    if not isinstance(dw, LowRank):
        return dense(dy, x, w, dw, dbias)
    dx = engine.linear(dy, w.T)                                         # (1)
    for columns, scale, A, B, dA, dB in dw.adapters:
        with engine.scratch():
            h, dpart = engine.linear(x, A), dy[..., columns]
            dh = dense(dpart, engine.scale(h, scale), B, dB)            # (2)
            dense(x, engine.scale(dh, scale), A.T, dA.T)                # (3), turned around
    return dx


def _norm_backward(dense, gain, into, *arguments):
    """`dense`, whose arguments of these numbers are a gain and the buffer of its gradient.

    What a frozen gain, whose buffer is None, would get is forgotten.
    """
    given = list(arguments)
    if given[into] is None:
        given[into] = np.zeros_like(given[gain])
    return dense(*given)


def for_adapters(engine: Engine) -> Engine:
    """`engine` itself, which from now on takes gradients that are `LowRank`, or None: frozen.

    Only A and B learn: whatever else has a gradient in a model is left out, or forgotten.
    """
    mine: dict[str, Callable] = {
        "linear_backward": partial(linear_backward, engine, engine.linear_backward),
        "rmsnorm_backward": partial(_norm_backward, engine.rmsnorm_backward, 2, 4),
        "layernorm_backward": partial(_norm_backward, engine.layernorm_backward, 2, 4),
        "move_norm_backward": partial(_move_norm_backward, engine.move_norm_backward),
        "norm_heads_backward": partial(_norm_heads_backward,
                                       getattr(engine, "norm_heads_backward", None)),
        "enter_backward": lambda *arguments: None,  # of the embedding and the positions
    }
    for name, operation in mine.items():
        setattr(engine, name, operation)
    return engine


def _move_norm_backward(dense, config, dn, x, gain, stats, dnorm, *dx):
    """`Engine.move_norm_backward`, `dense`, for a gain that may be frozen."""
    dgain, dbias = dnorm
    into = np.zeros_like(gain) if dgain is None else dgain
    return dense(config, dn, x, gain, stats, (into, dbias), *dx)


def _norm_heads_backward(dense, dheads, raw, gains, stats, dgains):
    """`Engine.norm_heads_backward`, `dense`, for gains that may be frozen."""
    pairs = zip(gains, dgains, strict=True)
    into = tuple(np.zeros_like(gain) if each is None else each for gain, each in pairs)
    return dense(dheads, raw, gains, stats, into)


# %% sec-lora-targets
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # matrices by the names that papers use
ALPHA = 2.0  # times the rank, where nobody says alpha: the update counts twice


@dataclass(frozen=True)
class Lora:
    """What adapters a model has. None: see `settled`. UserError for values that cannot be."""

    rank: int
    alpha: float | None = None
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if type(self.rank) is not int or not 1 <= self.rank < 2**31:
            raise UserError(f"expected a LoRA rank of at least 1, got {quoted(repr(self.rank))}")
        alpha = self.alpha
        if alpha is not None and not (
            type(alpha) in (int, float) and 0 < alpha <= sys.float_info.max
        ):
            raise UserError(f"expected LoRA's alpha to be a number above 0, got "
                            f"{quoted(repr(alpha))}")  # fmt: skip
        if isinstance(self.targets, list):  # as JSON has it
            object.__setattr__(self, "targets", tuple(self.targets))
        if self.targets is not None:
            wrong = [name for name in self.targets if name not in TARGETS]
            if wrong or not self.targets or len({*self.targets}) < len(self.targets):
                shown = quoted(",".join(map(str, self.targets)) or "none")
                raise UserError(f"expected LoRA's targets to be some of {','.join(TARGETS)}, each "
                                f"once, got {shown!r}")  # fmt: skip

    @property
    def scale(self) -> float:
        """What A B is multiplied by, alpha / r; alpha must be settled."""
        assert self.alpha is not None
        return self.alpha / self.rank

    def settled(self, config: ModelConfig) -> "Lora":
        """With alpha ALPHA times the rank and all targets of the model, where they were left open.

        UserError for a target that the model lacks, and for a rank above a matrix's smaller side.
        """
        places = places_of(config)
        order = [name for name in TARGETS if name in (self.targets or places)]
        for name in order:
            if name not in places:
                raise UserError(f"expected LoRA's targets to be some of {','.join(places)}, which "
                                f"this model has, got {name}: leave it out")  # fmt: skip
        alpha = ALPHA * self.rank if self.alpha is None else float(self.alpha)
        lora = replace(self, alpha=alpha, targets=tuple(order))
        least = min(min(shape) for shape in _matrix_shapes(config, lora))
        if self.rank > least:
            raise UserError(f"expected a LoRA rank of at most {least}, the smaller side of the "
                            f"smallest matrix that is adapted, got {self.rank}: choose "
                            "a lower one")  # fmt: skip
        return lora


# %% sec-lora-targets
class Place(NamedTuple):
    """Where a target is: a tensor of a block, and which of its columns."""

    tensor: str
    columns: slice


def places_of(config: ModelConfig) -> dict[str, Place]:
    """The `Place` of each target that the model has, in the order of TARGETS."""
    H, G, D, F, C = config.n_heads, config.n_kv_heads, config.head_dim, config.hidden, config.dim
    up = {"up": Place("w_up", slice(0, F))}
    if config.mlp == "swiglu":  # two matrices, side by side
        up = {"gate": Place("w_up", slice(0, F)), "up": Place("w_up", slice(F, 2 * F))}
    return {
        "q": Place("wqkv", slice(0, H * D)),
        "k": Place("wqkv", slice(H * D, (H + G) * D)),
        "v": Place("wqkv", slice((H + G) * D, (H + 2 * G) * D)),
        "o": Place("wo", slice(0, C)), **up, "down": Place("w_down", slice(0, C)),
    }  # fmt: skip


def _matrix_shapes(config: ModelConfig, lora: Lora) -> list[tuple[int, int]]:
    """(I, columns) of each target of a block; `lora` is settled."""
    shapes, places = parameter_shapes(replace(config, n_layers=config.repeat)), places_of(config)
    found = [places[name] for name in lora.targets or ()]
    return [(shapes[f"block.0.{each.tensor}"][0], each.columns.stop - each.columns.start)
            for each in found]  # fmt: skip


def adapter_shapes(config: ModelConfig, lora: Lora) -> dict[str, tuple[int, int]]:
    """Name -> shape of A (I, r) and B (r, columns) of each target of each block: a dict."""
    shapes, sides = {}, _matrix_shapes(config, lora)
    for i in range(config.n_blocks):
        for name, (inputs, columns) in zip(lora.targets or (), sides, strict=True):
            shapes[f"block.{i}.{name}.A"] = inputs, lora.rank
            shapes[f"block.{i}.{name}.B"] = lora.rank, columns
    return shapes


def count_adapters(config: ModelConfig, lora: Lora) -> int:
    """How many numbers learn; `lora` is settled."""
    return sum(math.prod(shape) for shape in adapter_shapes(config, lora).values())


# %% sec-lora-merge
class Adapters(Weights):
    """A and B of all adapters of a model, named views into a flat buffer, as `Weights` has them.

    `of` are the adapters whose gradients these are: then `blocks`, and names of the model's own
    tensors, give what a backward pass asks for, `LowRank` for a matrix and None for a vector.
    """

    def __init__(
        self, config: ModelConfig, lora: Lora, dtype: np.typing.DTypeLike = np.float32,
        of: "Adapters | None" = None,
    ) -> None:  # fmt: skip
        self.config, self.lora, shapes = config, lora, adapter_shapes(config, lora)
        sizes = [-(-math.prod(shape) // PADDING) * PADDING for shape in shapes.values()]
        self.flat, self._views, self.starts, start = np.zeros(sum(sizes), dtype), {}, {}, 0
        for (name, shape), size in zip(shapes.items(), sizes, strict=True):
            self._views[name] = self.flat[start : start + math.prod(shape)].reshape(shape)
            self.starts[name] = start
            start += size
        self._gradients: dict[str, Any] = {}
        self._gradients = {} if of is None else self._of(of)
        self.blocks = [Block(*(self._gradients.get(f"block.{i}.{name}") for name in Block._fields))
                       for i in range(config.n_blocks)]  # fmt: skip
        self.block_starts = []

    def __getitem__(self, name: str) -> Any:
        return self._gradients[name] if name in self._gradients else self._views[name]

    def zeros_like(self) -> "Adapters":
        """New ones of the same shapes and dtype, all zero, which are nobody's gradients."""
        return Adapters(self.config, self.lora, self.flat.dtype)

    def gradients(self) -> "Adapters":
        """New ones, all zero, for the gradients of these."""
        return Adapters(self.config, self.lora, self.flat.dtype, of=self)

    def _of(self, adapters):
        """The gradient of each tensor of the model: None, or LowRank."""
        found: dict[str, Any] = {
            name: None if len(shape) == 1 else LowRank()
            for name, shape in parameter_shapes(self.config).items()
        }
        for name, tensor, columns in adapted(self.config, self.lora):
            A, B = f"{name}.A", f"{name}.B"
            mine = Adapter(columns, self.lora.scale, adapters[A], adapters[B], self[A], self[B])
            found[tensor] = LowRank((*found[tensor].adapters, mine))
        return found


# %% sec-lora-merge
def adapted(config: ModelConfig, lora: Lora) -> Iterator[tuple[str, str, slice]]:
    """For each adapter: its name, as block.0.q, the model's tensor, and the columns there."""
    places = places_of(config)
    for i in range(config.n_blocks):
        for name in lora.targets or ():
            yield f"block.{i}.{name}", f"block.{i}.{places[name].tensor}", places[name].columns


def add_product(a: Array, b: Array, out: Array) -> None:
    """out += a b, in NumPy, for numbers of any kind."""
    out += a @ b


class AdaptedWeights(Weights):
    """Merged weights, which the model computes with, and the adapters that are in them.

    It takes over the memory of `weights`, and copies the adapted columns, which stay as they are.
    `product(a, b, out)` adds a b to out, for `merge`. lora must be settled.
    """

    def __init__(
        self, weights: Weights, lora: Lora,
        product: Callable[[Array, Array, Array], None] = add_product,
    ) -> None:  # fmt: skip
        super().__init__(weights.config, weights.flat.dtype, weights.flat)
        self.lora, self.product = lora, product
        self.adapters = Adapters(weights.config, lora, weights.flat.dtype)
        self.base = [self[tensor][:, columns].copy()
                     for _, tensor, columns in adapted(self.config, lora)]  # fmt: skip

    def zeros_like(self) -> Adapters:
        """The gradients that a step needs, or moments: those of the adapters, all zero."""
        return self.adapters.gradients()

    def engine(self, engine: Engine) -> Engine:
        """`engine`, as it is needed for them."""
        return for_adapters(engine)

    def begin(self, seed: int) -> None:
        """Draw every A, uniform within 1 / sqrt(I) of 0, as PEFT does; each B is 0."""
        rng = np.random.default_rng((seed, self.lora.rank))
        for name, tensor in self.adapters.items():
            bound = tensor.shape[0] ** -0.5
            tensor[...] = rng.uniform(-bound, bound, tensor.shape) if name.endswith(".A") else 0

    def merge(self) -> None:
        """W' = W + (alpha / r) A B, in place, wherever there is an adapter. Eq. eq-lora-merge."""
        places = adapted(self.config, self.lora)
        for (name, tensor, columns), base in zip(places, self.base, strict=True):
            A, B = self.adapters[f"{name}.A"], self.adapters[f"{name}.B"]
            into = self[tensor][:, columns]
            into[...] = base
            self.product(A * A.dtype.type(self.lora.scale), B, into)


# %% sec-lora-merge
def merged(weights: Weights) -> Weights:
    """The weights to use, in the same memory, without adapters to learn."""
    return Weights(weights.config, weights.flat.dtype, weights.flat)
