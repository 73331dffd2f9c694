# Made from book/06a-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-arena
"""The CPU engine: the operations of `nanoeuler.engines.interface` in float32, fast, on one thread.

One engine per thread. Leaves out threads (stepper.py) and other types: gradient checks need
float64, and the reference has it. Methods mean what the interface says of them.

B batch, T positions, C channels, H query heads, G key/value heads, D head width, V vocabulary,
K predicted tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from nanoeuler.engines.cpu import loops
from nanoeuler.engines.cpu.memory import Arena, aligned
from nanoeuler.engines.cpu.products import BELOW, LOWER, UPPER, WORK, multiply, multiply_heads
from nanoeuler.engines.interface import Array, Engine, Primitives
from nanoeuler.model.attention import attention
from nanoeuler.model.backward import attention_backward
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.layers import LAYERNORM_EPS, RMSNORM_EPS, ROPE_BASE, rope_tables

# Positions whose logits are held at a time: those of a shard of short sequences, see stepper.py.
LOSS_ROWS = 256


def _rows(x):
    if x.dtype != np.float32:
        raise TypeError(f"the CPU engine works in float32, got {x.dtype}")
    return x.reshape(-1, x.shape[-1])


def _agree(*pairs):
    # The kernels do not look where they write: shapes must be what they take them for.
    for shape, expected in pairs:
        if shape != expected:
            raise ValueError(f"expected the shape {expected}, got {shape}")


def _ids(x):
    return np.ascontiguousarray(x, np.int32).reshape(-1)


def _plus(y, row):
    # y (..., C), with a bias (C,) or rows of positions (T, C) added in place, if there are any.
    if row is not None:
        loops.add_row(y.reshape(-1, row.size), row.reshape(-1))
    return y


def _plus_backward(dy, drow):
    # Adds to drow, the gradient of what `_plus` added, if there is any.
    if drow is not None:
        loops.add_row_backward(dy.reshape(-1, drow.size), drow.reshape(-1))


class FusedPrimitives(Primitives):
    """The operations as fused loops in an arena; matrix products and attention are NumPy's."""

    def __init__(self):
        self.arena, self.tables = Arena(), {}

    def begin(self) -> None:
        """Start a pass: every array that this engine returned before may be overwritten."""
        self.arena.begin()

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Memory taken inside may be reused after."""
        used = self.arena.used
        yield
        self.arena.used = used

    def rope_tables(self, T: int, D: int, base: float = ROPE_BASE) -> tuple[Array, Array]:
        """`layers.rope_tables` in float32, kept from the first call on."""
        if (T, D, base) not in self.tables:
            tables = rope_tables(T, D, base)
            self.tables[T, D, base] = tuple(table.astype(np.float32) for table in tables)
        return self.tables[T, D, base]

    def embed(self, tokens: Array, table: Array, positions: Array | None = None) -> Array:
        """As `layers.embed`."""
        x = self.arena.take(*tokens.shape, table.shape[1])
        loops.embed(_ids(tokens), table, _rows(x))
        return _plus(x, positions)

    def embed_backward(
        self, dx: Array, tokens: Array, dtable: Array, dpositions: Array | None = None
    ) -> None:
        """As `backward.embed_backward`."""
        _agree((dx.shape, tokens.shape + dtable.shape[1:]))
        loops.embed_backward(_rows(dx), _ids(tokens), dtable)
        _plus_backward(dx, dpositions)

    def rmsnorm(self, x: Array, gain: Array, eps: float = RMSNORM_EPS) -> tuple[Array, Array]:
        """As `layers.rmsnorm`."""
        _agree((gain.shape, x.shape[-1:]))
        y, r = self.arena.take(*x.shape), self.arena.take(*x.shape[:-1], 1)
        loops.rmsnorm(_rows(x), gain, eps, _rows(y), _rows(r))
        return y, r

    def rmsnorm_backward(self, dy: Array, x: Array, gain: Array, r: Array, dgain: Array) -> Array:
        """As `backward.rmsnorm_backward`."""
        return self._norm_backward(loops.rmsnorm_backward, dy, x, gain, r, dgain, None)

    def layernorm(
        self, x: Array, gain: Array, bias: Array | None = None, eps: float = LAYERNORM_EPS
    ) -> tuple[Array, Array]:
        """As `layers.layernorm`."""
        _agree((gain.shape, x.shape[-1:]))
        y, stats = self.arena.take(*x.shape), self.arena.take(*x.shape[:-1], 2)
        loops.layernorm(_rows(x), gain, eps, _rows(y), _rows(stats))
        return _plus(y, bias), stats

    def layernorm_backward(
        self, dy: Array, x: Array, gain: Array, stats: Array, dgain: Array,
        dbias: Array | None = None,
    ) -> Array:  # fmt: skip
        """As `backward.layernorm_backward`."""
        _plus_backward(dy, dbias)                                       # (5)
        return self._norm_backward(loops.layernorm_backward, dy, x, gain, stats, dgain, None)

    def _norm_backward(self, kernel, dy, x, gain, stats, dgain, dx):
        C, out = x.shape[-1:], self.arena.take(*x.shape) if dx is None else dx
        _agree((dy.shape, x.shape), (gain.shape, C), (dgain.shape, C), (out.shape, x.shape))
        _agree((stats.shape, x.shape[:-1] + (1 if kernel is loops.rmsnorm_backward else 2,)))
        assert out.flags.c_contiguous  # or reshape would write into a copy
        kernel(_rows(dy), _rows(x), gain, _rows(stats), _rows(out), dx is not None, dgain)
        return out

    def rope(self, heads: Array, n: int, cos: Array, sin: Array) -> Array:
        """As `layers.rope`, in place; heads must be contiguous."""
        return self._turn(heads, n, cos, sin, 1)

    def rope_backward(self, dheads: Array, n: int, cos: Array, sin: Array) -> Array:
        """As `backward.rope_backward`, in place; dheads must be contiguous."""
        return self._turn(dheads, n, cos, sin, -1)

    def _turn(self, heads, n, cos, sin, sign):
        angles = heads.shape[1], heads.shape[3] // 2
        _agree((cos.shape, angles), (sin.shape, angles))
        if n > heads.shape[2]:
            raise ValueError(f"expected at most {heads.shape[2]} heads to turn, got {n}")
        assert heads.flags.c_contiguous  # the kernel is compiled for that
        loops.rope(heads, n, cos, sin, sign)
        return heads

    def swiglu(self, gate_up: Array) -> Array:
        """As `layers.swiglu`."""
        h = self.arena.take(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        loops.swiglu(_rows(gate_up), _rows(h))
        return h

    def swiglu_backward(self, dh: Array, gate_up: Array) -> Array:
        """As `backward.swiglu_backward`."""
        _agree((gate_up.shape, dh.shape[:-1] + (2 * dh.shape[-1],)))
        dgate_up = self.arena.take(*gate_up.shape)
        loops.swiglu_backward(_rows(dh), _rows(gate_up), _rows(dgate_up))
        return dgate_up

    def gelu(self, u: Array) -> Array:
        """As `layers.gelu`."""
        h = self.arena.take(*u.shape)
        loops.gelu(_rows(u), _rows(h))
        return h

    def gelu_backward(self, dh: Array, u: Array) -> Array:
        """As `backward.gelu_backward`."""
        _agree((dh.shape, u.shape))
        du = self.arena.take(*u.shape)
        loops.gelu_backward(_rows(dh), _rows(u), _rows(du))
        return du

    def add(self, x: Array, y: Array, h: float = 1.0) -> Array:
        """As `layers.add`."""
        _agree((x.shape, y.shape))
        out = self.arena.take(*x.shape)
        loops.add(x.reshape(-1), y.reshape(-1), np.float32(h), out.reshape(-1))
        return out

    def add_into(self, x: Array, y: Array, h: float = 1.0) -> None:
        """As `reference.add_into`."""
        _agree((x.shape, y.shape))
        assert x.flags.c_contiguous  # or reshape would write into a copy
        loops.add(x.reshape(-1), y.reshape(-1), np.float32(h), x.reshape(-1))

    def scale(self, x: Array, h: float) -> Array:
        """As `reference.scale`."""
        return np.multiply(x, np.float32(h), out=self.arena.take(*x.shape))

    def cross_entropy(self, logits: Array, targets: Array, scale: Array) -> tuple[Array, Array]:
        """As `backward.cross_entropy`; dlogits is written over logits."""
        _agree((targets.shape, logits.shape[:-1]), (scale.shape, targets.shape[2:]))
        sums = np.zeros(scale.shape)
        loops.cross_entropy(_rows(logits), _ids(targets), np.asarray(scale, np.float32), sums)
        return sums, logits

    def linear(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        """As `layers.linear`."""
        y = self.arena.take(*x.shape[:-1], w.shape[1])
        np.matmul(_rows(x), w, out=_rows(y))
        return _plus(y, bias)

    def linear_backward(
        self, dy: Array, x: Array, w: Array, dw: Array, dbias: Array | None = None
    ) -> Array:
        """As `backward.linear_backward`."""
        dx = self.arena.take(*x.shape)
        np.matmul(_rows(dy), w.T, out=_rows(dx))
        with self.scratch():
            product = self.arena.take(*w.shape)
            np.matmul(_rows(x).T, _rows(dy), out=product)
            dw += product
        _plus_backward(dy, dbias)
        return dx

    def attention(self, heads: Array, n_kv: int) -> tuple[Array, Array]:
        """As `attention.attention`, by it."""
        return attention(heads, n_kv)

    def attention_backward(self, dy: Array, heads: Array, n_kv: int, p: Array) -> Array:
        """As `backward.attention_backward`, by it."""
        return np.ascontiguousarray(attention_backward(dy, heads, n_kv, p))


class FusedEngine(FusedPrimitives, Engine):
    """The engine over fused loops, with what it does better than operation by operation."""

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
        _agree((k.shape, x.shape), (gain.shape, x.shape[-1:]))
        moved, n = self.arena.take(*x.shape), self.arena.take(*x.shape)
        is_rms = config.norm == "rms"
        stats = self.arena.take(*x.shape[:-1], 1 if is_rms else 2)
        kernel = loops.move_rmsnorm if is_rms else loops.move_layernorm
        eps = RMSNORM_EPS if is_rms else LAYERNORM_EPS
        arrays = _rows(moved), _rows(n), _rows(stats)
        kernel(_rows(x), _rows(k), np.float32(weight), gain, eps, *arrays)
        return moved, _plus(n, bias), stats

    def move_norm_backward(
        self, config: ModelConfig, dn: Array, x: Array, gain: Array, stats: Array, dgain: Array,
        dbias: Array | None, dx: Array | None = None,
    ) -> Array:  # fmt: skip
        """As `Engine.move_norm_backward`: added where it is computed."""
        _plus_backward(dn, dbias)
        is_rms = config.norm == "rms"
        kernel = loops.rmsnorm_backward if is_rms else loops.layernorm_backward
        return self._norm_backward(kernel, dn, x, gain, stats, dgain, dx)

    def loss(
        self, n: Array, W: Array, targets: Array, scale: Array, dW: Array | None = None
    ) -> tuple[Array, Array | None]:
        """As `Engine.loss`: the logits of LOSS_ROWS positions at a time."""
        rows, aims = _rows(n), targets.reshape(-1, targets.shape[-1])
        _agree((targets.shape[:-1], n.shape[:-1]))
        sums, dn = np.zeros(scale.shape), None if dW is None else self.arena.take(*n.shape)
        for first in range(0, len(rows), LOSS_ROWS):
            part = slice(first, first + LOSS_ROWS)
            with self.scratch():
                more, dpart = super().loss(rows[None, part], W, aims[None, part], scale, dW)
                sums += more
                if dn is not None:
                    _rows(dn)[part] = dpart[0]
        return sums, dn


# %% sec-cpu-tile
def _split(heads, n_kv):
    # Views q (B, H, T, D), k and v (B, G, T, D) of packed heads (B, T, H + 2G, D).
    x, H = heads.swapaxes(1, 2), heads.shape[2] - 2 * n_kv
    return x[:, :H], x[:, H : H + n_kv], x[:, H + n_kv :]


class CpuEngine(FusedEngine):
    """The engine with our own matrix products, in the linear layers and in attention."""

    def __init__(self):
        super().__init__()
        self.work = aligned(WORK)

    def linear(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        """As `layers.linear`."""
        y = self.arena.take(*x.shape[:-1], w.shape[1])
        multiply(_rows(x), w, _rows(y), False, self.work)
        return _plus(y, bias)

    def linear_backward(
        self, dy: Array, x: Array, w: Array, dw: Array, dbias: Array | None = None
    ) -> Array:
        """As `backward.linear_backward`."""
        dx, dy = self.arena.take(*x.shape), _rows(dy)
        if dw.flags.c_contiguous:
            multiply(_rows(x).T, dy, dw, True, self.work)               # (1)
        else:  # tied weights: the transpose of an embedding
            multiply(dy.T, _rows(x), dw.T, True, self.work)             # (1)
        multiply(dy, w.T, _rows(dx), False, self.work)                  # (2)
        _plus_backward(dy, dbias)                                       # (3)
        return dx

    def attention(self, heads: Array, n_kv: int) -> tuple[Array, Array]:
        """As `attention.attention`."""
        (B, T, N, D), (q, k, v) = heads.shape, _split(heads, n_kv)
        H = N - 2 * n_kv
        y, p = self.arena.take(B, T, H, D), self.arena.take(B, H, T, T)
        multiply_heads(q, k.swapaxes(2, 3), p, BELOW, self.work)
        loops.causal_softmax(p, D**-0.5)
        multiply_heads(p, v, y.swapaxes(1, 2), LOWER, self.work)
        return y.reshape(B, T, H * D), p

    def attention_backward(self, dy: Array, heads: Array, n_kv: int, p: Array) -> Array:
        """As `backward.attention_backward`."""
        (B, T, N, D), (q, k, v) = heads.shape, _split(heads, n_kv)
        _agree((dy.shape, (B, T, (N - 2 * n_kv) * D)), (p.shape, (B, N - 2 * n_kv, T, T)))
        dheads = self.arena.take(B, T, N, D)
        dq, dk, dv = _split(dheads, n_kv)
        dy = dy.reshape(B, T, -1, D).swapaxes(1, 2)
        with self.scratch():
            ds = self.arena.take(*p.shape)
            multiply_heads(p.swapaxes(2, 3), dy, dv, UPPER, self.work)  # (1)
            multiply_heads(dy, v.swapaxes(2, 3), ds, BELOW, self.work)  # (2)
            loops.causal_softmax_backward(p, ds, D**-0.5)               # (3), (4)
            multiply_heads(ds, k, dq, LOWER, self.work)                 # (5)
            multiply_heads(ds.swapaxes(2, 3), q, dk, UPPER, self.work)  # (6)
        return dheads
