# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-arena
"""The engines of a CPU: fused loops, and those with matrix products of our own. On one thread.

One engine per thread. Leaves out threads: stepper.py. Methods mean what the interface says of them.

B batch, T positions, C channels, H query heads, G key/value heads, D head width.
"""

from collections.abc import Sequence

import numpy as np

from nanoeuler.engines.cpu import elementwise, norms
from nanoeuler.engines.cpu.gemm import BELOW, LOWER, UPPER, WORK, multiply, multiply_heads
from nanoeuler.engines.cpu.memory import aligned
from nanoeuler.engines.cpu.options import LOSS_ROWS
from nanoeuler.engines.cpu.primitives import (
    FusedPrimitives,
    agree,
    plus,
    plus_backward,
    rows_of,
)
from nanoeuler.engines.interface import Engine, Moves
from nanoeuler.engines.primitives import Array
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.layers import LAYERNORM_EPS, RMSNORM_EPS


class FusedMoves(FusedPrimitives, Moves):
    """The stream's moves, each in one loop with the norm that follows."""

    def move_norm(
        self, config: ModelConfig, x: Array, terms: Sequence[tuple[float, Array]], gain: Array,
        bias: Array | None,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """As `Engine.move_norm`: the last term is added where the sum is normed."""
        if not terms:
            return super().move_norm(config, x, terms, gain, bias)
        *others, (weight, k) = terms
        for each, velocity in others:
            x = self.add(x, velocity, each)
        agree((k.shape, x.shape), (gain.shape, x.shape[-1:]))
        moved, n = self.arena.take(*x.shape), self.arena.take(*x.shape)
        is_rms = config.norm == "rms"
        stats = self.arena.take(*x.shape[:-1], 1 if is_rms else 2)
        kernel = norms.move_rmsnorm if is_rms else norms.move_layernorm
        eps = RMSNORM_EPS if is_rms else LAYERNORM_EPS
        arrays = rows_of(moved), rows_of(n), rows_of(stats)
        kernel(rows_of(x), rows_of(k), np.float32(weight), gain, eps, *arrays)
        return moved, plus(n, bias), stats

    def move_norm_backward(
        self, config: ModelConfig, dn: Array, x: Array, gain: Array, stats: Array, dgain: Array,
        dbias: Array | None, dx: Array | None = None,
    ) -> Array:  # fmt: skip
        """As `Engine.move_norm_backward`: added where it is computed."""
        plus_backward(dn, dbias)
        is_rms = config.norm == "rms"
        kernel = norms.rmsnorm_backward if is_rms else norms.layernorm_backward
        return self._norm_backward(kernel, dn, x, gain, stats, dgain, dx)


SUPPORTS = {
    "norm": ("rms", "layer"), "position": ("rope", "learned"), "mlp": ("swiglu", "gelu"),
    "bias": (False, True), "tied": (False, True), "integrator": ("euler", "heun", "rk4"),
}  # fmt: skip


class FusedEngine(FusedMoves, Engine):
    """The engine over fused loops, with what it does better than operation by operation."""

    supports = SUPPORTS

    def loss(
        self, n: Array, W: Array, targets: Array, scale: Array, dW: Array | None = None
    ) -> tuple[Array, Array | None]:
        """As `Engine.loss`: the logits of LOSS_ROWS positions at a time."""
        rows, aims = rows_of(n), targets.reshape(-1, targets.shape[-1])
        agree((targets.shape[:-1], n.shape[:-1]))
        sums, dn = np.zeros(scale.shape), None if dW is None else self.arena.take(*n.shape)
        for first in range(0, len(rows), LOSS_ROWS):
            part = slice(first, first + LOSS_ROWS)
            with self.scratch():
                more, dpart = super().loss(rows[None, part], W, aims[None, part], scale, dW)
                sums += more
                if dn is not None:
                    rows_of(dn)[part] = dpart[0]
        return sums, dn


# %% sec-cpu-tile
class LinearEngine(FusedEngine):
    """The engine with our own matrix products in the linear layers."""

    def __init__(self):
        super().__init__()
        self.work = aligned(WORK)

    def linear(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        """As `layers.linear`."""
        y = self.arena.take(*x.shape[:-1], w.shape[1])
        multiply(rows_of(x), w, rows_of(y), False, self.work)
        return plus(y, bias)

    def linear_backward(
        self, dy: Array, x: Array, w: Array, dw: Array, dbias: Array | None = None
    ) -> Array:
        """As `backward.linear_backward`."""
        dx, dy = self.arena.take(*x.shape), rows_of(dy)
        if dw.flags.c_contiguous:
            multiply(rows_of(x).T, dy, dw, True, self.work)               # (1)
        else:  # tied weights: the transpose of an embedding
            multiply(dy.T, rows_of(x), dw.T, True, self.work)             # (1)
        multiply(dy, w.T, rows_of(dx), False, self.work)                  # (2)
        plus_backward(dy, dbias)                                       # (3)
        return dx


def _split(heads, n_kv):
    # Views q (B, H, T, D), k and v (B, G, T, D) of packed heads (B, T, H + 2G, D).
    x, H = heads.swapaxes(1, 2), heads.shape[2] - 2 * n_kv
    return x[:, :H], x[:, H : H + n_kv], x[:, H + n_kv :]


class CpuEngine(LinearEngine):
    """The engine with our own matrix products, in the linear layers and in attention."""

    def attention(
        self, heads: Array, n_kv: int, first: Array | None = None
    ) -> tuple[Array, Array]:
        """As `attention.attention`."""
        (B, T, N, D), (q, k, v) = heads.shape, _split(heads, n_kv)
        H = N - 2 * n_kv
        y, p = self.arena.take(B, T, H, D), self.arena.take(B, H, T, T)
        multiply_heads(q, k.swapaxes(2, 3), p, BELOW, self.work)
        if first is None:
            elementwise.causal_softmax(p, D**-0.5)
        else:
            agree((first.shape, (B, T)))
            elementwise.document_softmax(p, np.ascontiguousarray(first, np.int32), D**-0.5)
        multiply_heads(p, v, y.swapaxes(1, 2), LOWER, self.work)
        return y.reshape(B, T, H * D), p

    def attention_backward(
        self, dy: Array, heads: Array, n_kv: int, p: Array, first: Array | None = None
    ) -> Array:
        """As `backward.attention_backward`: p is zero wherever `first` hides a key."""
        (B, T, N, D), (q, k, v) = heads.shape, _split(heads, n_kv)
        agree((dy.shape, (B, T, (N - 2 * n_kv) * D)), (p.shape, (B, N - 2 * n_kv, T, T)))
        dheads = self.arena.take(B, T, N, D)
        dq, dk, dv = _split(dheads, n_kv)
        dy = dy.reshape(B, T, -1, D).swapaxes(1, 2)
        with self.scratch():
            ds = self.arena.take(*p.shape)
            multiply_heads(p.swapaxes(2, 3), dy, dv, UPPER, self.work)  # (1)
            multiply_heads(dy, v.swapaxes(2, 3), ds, BELOW, self.work)  # (2)
            elementwise.causal_softmax_backward(p, ds, D**-0.5)               # (3), (4)
            multiply_heads(ds, k, dq, LOWER, self.work)                 # (5)
            multiply_heads(ds.swapaxes(2, 3), q, dk, UPPER, self.work)  # (6)
        return dheads
