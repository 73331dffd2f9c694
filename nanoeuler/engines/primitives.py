# Made from book/06a-engines.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-list
"""The lowest level of what the package asks of an engine: single operations, each a name.

A class for each family of them, and `Primitives`, all together. Leaves out all arithmetic, and what
the model calls: that is made of these, in interface.py.

B batch, T positions, C channels, H query heads, G key/value heads, D head width, V vocabulary,
K predicted tokens, F MLP width, I and O the inputs and outputs of a linear map.
"""

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

Array = np.ndarray  # or the engine's own kind, where it works in other memory


class Memory(Protocol):
    """How long memory is needed."""

    @abstractmethod
    def begin(self) -> None:
        """Say that a pass starts: all memory that was handed out before may be used again."""

    @abstractmethod
    def scratch(self) -> AbstractContextManager:
        """A context: the memory that is handed out inside may be used again after it."""


class Sums(Protocol):
    """What the stream is moved with."""

    @abstractmethod
    def add(self, x: Array, y: Array, h: float = 1.0) -> Array:
        """x + h y in a new array, all of one shape."""

    @abstractmethod
    def add_into(self, x: Array, y: Array, h: float = 1.0) -> None:
        """x += h y, both of one shape."""

    @abstractmethod
    def scale(self, x: Array, h: float) -> Array:
        """h x in a new array."""


class Ends(Protocol):
    """From tokens to the stream, and from logits to the loss."""

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
    def cross_entropy(self, logits: Array, targets: Array, scale: Array) -> tuple[Array, Array]:
        """logits (B, T, K, V), targets (B, T, K), scale (K,) -> sums (K,) of -log p; dlogits."""


class Linear(Protocol):
    """Products with matrices of weights, in which nearly all of the operations are."""

    @abstractmethod
    def linear(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        """x (..., I), w (I, O), bias (O,) -> (..., O). w may be a transposed view."""

    @abstractmethod
    def linear_backward(
        self, dy: Array, x: Array, w: Array, dw: Array, dbias: Array | None = None
    ) -> Array:
        """dy (..., O) -> dx (..., I); adds to dw (I, O) and dbias (O,)."""


class Norms(Protocol):
    """The two norms. A backward is given the stats that its forward returned."""

    @abstractmethod
    def rmsnorm(self, x: Array, gain: Array) -> tuple[Array, Array]:
        """x (..., C), gain (C,) -> y (..., C), stats (..., 1)."""

    @abstractmethod
    def rmsnorm_backward(
        self, dy: Array, x: Array, gain: Array, stats: Array, dgain: Array
    ) -> Array:
        """dy (..., C) -> dx (..., C); adds to dgain (C,)."""

    @abstractmethod
    def layernorm(self, x: Array, gain: Array, bias: Array | None = None) -> tuple[Array, Array]:
        """x (..., C), gain and bias (C,) -> y (..., C), stats (..., 2)."""

    @abstractmethod
    def layernorm_backward(
        self, dy: Array, x: Array, gain: Array, stats: Array, dgain: Array,
        dbias: Array | None = None,
    ) -> Array:  # fmt: skip
        """dy (..., C) -> dx (..., C); adds to dgain and dbias (C,)."""


class Heads(Protocol):
    """What is done with queries, keys and values."""

    @abstractmethod
    def rope_tables(self, T: int, D: int) -> tuple[Array, Array]:
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
        """heads (B, T, H+2G, D), n_kv = G -> y (B, T, H*D), what the backward wants of it."""

    @abstractmethod
    def attention_backward(
        self, dy: Array, heads: Array, n_kv: int, p: Any, first: Array | None = None
    ) -> Array:
        """dy (B, T, H*D) -> dheads (B, T, H+2G, D)."""


class Gates(Protocol):
    """What bends in an MLP, element by element."""

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


class Primitives(Memory, Sums, Ends, Linear, Norms, Heads, Gates, Protocol):
    """All of them, as the NumPy functions of these names in `nanoeuler.model` compute them.

    Gradients of parameters are added to the buffers that are passed. Of what else is passed, only a
    first argument is ever changed: `add_into` adds to it, and `rope`, `rope_backward` and
    `cross_entropy` may write over it. `first` (B, T) int32 says where in its row the text of each
    position begins, 0 <= first[b, t] <= t; None: each row is one text.
    """


# Family -> the names of its operations. An underscore begins what Python notes about a class.
FAMILIES = {
    family.__name__: [name for name in vars(family) if not name.startswith("_")]
    for family in (Memory, Sums, Ends, Linear, Norms, Heads, Gates)
}
OPERATIONS = [name for names in FAMILIES.values() for name in names]  # of all of them
