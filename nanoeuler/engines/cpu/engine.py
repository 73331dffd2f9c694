# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-arena
"""The engines of a CPU: fused loops, and one with matrix products of our own.

One engine per thread. Shapes are compared here, since the loops do not look. Leaves out threads:
stepper.py, though the BLAS of the first engine has its own; and other types: gradient checks need
float64, and the reference has it. Methods mean what the interface says of them.

B batch, T positions, C channels, H query heads, G key/value heads, D head width, V vocabulary,
K predicted tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from nanoeuler.engines.cpu import elementwise, norms
from nanoeuler.engines.cpu.gemm import BELOW, LOWER, UPPER, WORK, multiply, multiply_heads
from nanoeuler.engines.cpu.memory import Arena, aligned
from nanoeuler.engines.cpu.options import LOSS_ROWS
from nanoeuler.engines.interface import Array, Engine
from nanoeuler.engines.reference import SUPPORTS as REFERENCE_SUPPORTS
from nanoeuler.model import backward, layers
from nanoeuler.model.attention import attention
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.layers import LAYERNORM_EPS, RMSNORM_EPS, Angles


def rows_of(x: Array) -> Array:
    """x (..., C) float32 as rows (N, C): a view, or a copy where its rows are not evenly spaced."""
    if x.dtype != np.float32:
        raise TypeError(f"the CPU engine works in float32, got {x.dtype}")
    return x.reshape(-1, x.shape[-1])


def agree(*pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """ValueError unless in each pair the first shape is what the second says."""
    for shape, expected in pairs:
        if shape != expected:
            raise ValueError(f"expected the shape {expected}, got {shape}")


def _ids(x):
    return np.ascontiguousarray(x, np.int32).reshape(-1)


def plus(y: Array, row: Array | None) -> Array:
    """y (..., C), with a bias (C,) or rows of positions (T, C) added in place, if there are any."""
    if row is not None:
        norms.add_row(y.reshape(-1, row.size), row.reshape(-1))
    return y


def plus_backward(dy: Array, drow: Array | None) -> None:
    """Add to drow the gradient of what `plus` added, if there is any, given dy (..., C)."""
    if drow is not None:
        norms.add_row_backward(dy.reshape(-1, drow.size), drow.reshape(-1))


# Switches that `Engine` or the model's code handles are the reference's; norms and activations
# are ours.
SUPPORTS = {
    **REFERENCE_SUPPORTS, "norm": ("rms", "layer"),
    "mlp": ("swiglu", "gelu", "gelu_exact", "relu2"), "qk_norm": (False, True),
}  # fmt: skip


class FusedEngine(Engine):
    """The operations as fused loops in an arena; matrix products and attention are NumPy's."""

    supports = SUPPORTS
    attention = staticmethod(attention)

    def __init__(self) -> None:
        self.arena, self.tables = Arena(), {}  # RoPE's tables

    def begin(self) -> None:
        """Start a pass: every array that this engine returned before may be overwritten.

        If `forward_only`, the arena has no slab: each array is mapped, and freed when unused.
        """
        if not self.forward_only:
            self.arena.begin()

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Memory taken inside may be reused after."""
        used = self.arena.used
        yield
        self.arena.used = used

    def add(self, x: Array, y: Array, h: float = 1.0) -> Array:
        """x + h y of arrays of one shape, in the arena's memory."""
        agree((x.shape, y.shape))
        out = self.arena.take(*x.shape)
        elementwise.add(x.reshape(-1), y.reshape(-1), np.float32(h), out.reshape(-1))
        return out

    def add_into(self, x: Array, y: Array, h: float = 1.0) -> None:
        """x += h y in place, both of one shape; x must be contiguous."""
        agree((x.shape, y.shape))
        assert x.flags.c_contiguous  # or reshape would write into a copy
        elementwise.add(x.reshape(-1), y.reshape(-1), np.float32(h), x.reshape(-1))

    def scale(self, x: Array, h: float) -> Array:
        """h x (any shape) in the arena's memory."""
        return np.multiply(x, np.float32(h), out=self.arena.take(*x.shape))

    def embed(
        self, tokens: Array, table: Array, positions: Array | None = None,
        first: Array | None = None,
    ) -> Array:  # fmt: skip
        """(B, T, C) of tokens (B, T): rows of table (V, C), plus those of positions (T, C)."""
        x = self.arena.take(*tokens.shape, table.shape[1])
        elementwise.embed(_ids(tokens), table, rows_of(x))
        if positions is None or first is None:
            return plus(x, positions)
        return np.add(x, positions[layers.places(first)], out=x)

    def embed_backward(
        self, dx: Array, tokens: Array, dtable: Array, dpositions: Array | None = None,
        first: Array | None = None,
    ) -> None:  # fmt: skip
        """Add dx (B, T, C) to the rows of dtable (V, C) and dpositions (T, C) that `embed` read."""
        agree((dx.shape, tokens.shape + dtable.shape[1:]))
        elementwise.embed_backward(rows_of(dx), _ids(tokens), dtable)
        if dpositions is None or first is None:
            plus_backward(dx, dpositions)
        else:  # they are looked up, like the table
            elementwise.embed_backward(rows_of(dx), _ids(layers.places(first)), dpositions)

    def cross_entropy(
        self, logits: Array, targets: Array, scale: Array, cap: float = 0.0
    ) -> tuple[Array, Array]:
        """Sums (K,) of -log p; dlogits (B, T, K, V), by scale (K,), over the logits."""
        agree((targets.shape, logits.shape[:-1]), (scale.shape, targets.shape[2:]))
        sums, rows = np.zeros(scale.shape), rows_of(logits)
        scale = np.asarray(scale, np.float32)
        with self.scratch():
            slopes = self.arena.take(*rows.shape) if cap else None
            if cap:
                elementwise.cap_logits(rows, np.float32(cap), slopes)
            elementwise.cross_entropy(rows, _ids(targets), scale, sums)
            if cap:
                rows *= slopes
        return sums, logits

    def rmsnorm(self, x: Array, gain: Array, eps: float = RMSNORM_EPS) -> tuple[Array, Array]:
        """y (..., C) = gain x / rms(x), and rms (..., 1). Equation eq-layers-rmsnorm."""
        agree((gain.shape, x.shape[-1:]))
        y, r = self.arena.take(*x.shape), self.arena.take(*x.shape[:-1], 1)
        norms.rmsnorm(rows_of(x), gain, np.float32(eps), rows_of(y), rows_of(r))
        return y, r

    def rmsnorm_backward(self, dy: Array, x: Array, gain: Array, r: Array, dgain: Array) -> Array:
        """dx (..., C) from dy (..., C) and the saved r (..., 1); adds to dgain (C,)."""
        return self._norm_backward(norms.rmsnorm_backward, dy, x, gain, r, dgain, None)

    def layernorm(
        self, x: Array, gain: Array, bias: Array | None = None, eps: float = LAYERNORM_EPS
    ) -> tuple[Array, Array]:
        """y (..., C), of mean 0 and variance 1, times gain, plus bias; stats (..., 2)."""
        agree((gain.shape, x.shape[-1:]))
        y, stats = self.arena.take(*x.shape), self.arena.take(*x.shape[:-1], 2)
        norms.layernorm(rows_of(x), gain, np.float32(eps), rows_of(y), rows_of(stats))
        return plus(y, bias), stats

    def layernorm_backward(
        self, dy: Array, x: Array, gain: Array, stats: Array, dgain: Array,
        dbias: Array | None = None,
    ) -> Array:  # fmt: skip
        """dx (..., C) from dy (..., C) and stats (..., 2); adds to dgain and dbias (C,)."""
        plus_backward(dy, dbias)                                       # (5)
        return self._norm_backward(norms.layernorm_backward, dy, x, gain, stats, dgain, None)

    def _norm_backward(self, kernel, dy, x, gain, stats, dgain, dx):
        C, out = x.shape[-1:], self.arena.take(*x.shape) if dx is None else dx
        agree((dy.shape, x.shape), (gain.shape, C), (dgain.shape, C), (out.shape, x.shape))
        agree((stats.shape, x.shape[:-1] + (1 if kernel is norms.rmsnorm_backward else 2,)))
        assert out.flags.c_contiguous  # or reshape would write into a copy
        kernel(rows_of(dy), rows_of(x), gain, rows_of(stats), rows_of(out), dx is not None, dgain)
        return out

    def rope_tables(
        self, T: int, D: int, angles: Angles = Angles()  # noqa: B008 it's immutable
    ) -> tuple[Array, Array]:
        """`layers.rope_tables` in float32, kept from the first call on."""
        asked = T, D, angles
        if asked not in self.tables:
            cos, sin = layers.rope_tables(*asked)
            self.tables[asked] = cos.astype(np.float32), sin.astype(np.float32)
        return self.tables[asked]

    def rope(self, heads: Array, n: int, cos: Array, sin: Array) -> Array:
        """Turn the first n of heads (B, T, N, D) by cos, sin (T, D/2), in place."""
        return self._turn(heads, n, cos, sin, 1)

    def rope_backward(self, dheads: Array, n: int, cos: Array, sin: Array) -> Array:
        """Turn the first n of dheads (B, T, N, D) back, in place; dheads contiguous."""
        return self._turn(dheads, n, cos, sin, -1)

    def _turn(self, heads, n, cos, sin, sign):
        angles = heads.shape[1], heads.shape[3] // 2
        agree((cos.shape, angles), (sin.shape, angles))
        if n > heads.shape[2]:
            raise ValueError(f"expected at most {heads.shape[2]} heads to turn, got {n}")
        assert heads.flags.c_contiguous  # or numba would compile the kernel once more
        elementwise.rope(heads, n, cos, sin, sign)
        return heads

    def attention_backward(
        self, dy: Array, heads: Array, n_kv: int, p: Array, first: Array | None = None
    ) -> Array:
        """dheads (B, T, H+2G, D) from dy (B, T, H*D); p is 0 where `first` hides a key."""
        return np.ascontiguousarray(backward.attention_backward(dy, heads, n_kv, p))

    def swiglu(self, gate_up: Array) -> Array:
        """h (..., F) = silu(gate) * up, of gate_up (..., 2F), gates first."""
        h = self.arena.take(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        elementwise.swiglu(rows_of(gate_up), rows_of(h))
        return h

    def swiglu_backward(self, dh: Array, gate_up: Array) -> Array:
        """dgate_up (..., 2F) from dh (..., F) and the forward pass's gate_up."""
        agree((gate_up.shape, dh.shape[:-1] + (2 * dh.shape[-1],)))
        dgate_up = self.arena.take(*gate_up.shape)
        elementwise.swiglu_backward(rows_of(dh), rows_of(gate_up), rows_of(dgate_up))
        return dgate_up

    def norm_heads(
        self, heads: Array, n_kv: int, gains: tuple[Array, Array], eps: float
    ) -> tuple[Array, Array]:
        """heads (B, T, H+2G, D), queries and keys normed; roots (B, T, H+G, 1)."""
        B, T, N, D = heads.shape
        agree((gains[0].shape, (D,)), (gains[1].shape, (D,)))
        out, stats = self.arena.take(B, T, N, D), self.arena.take(B, T, N - n_kv, 1)
        rows = (x.reshape(B * T, -1, x.shape[-1]) for x in (heads, out, stats))
        norms.norm_heads(*rows, n_kv, gains, np.float32(eps))
        return out, stats

    def norm_heads_backward(
        self, dheads: Array, heads: Array, gains: tuple[Array, Array], stats: Array,
        dgains: tuple[Array, Array],
    ) -> Array:  # fmt: skip
        """dheads (B, T, H+2G, D) before the norm, in place; adds to dgains, (D,) each."""
        B, T, N, D = heads.shape
        agree((dheads.shape, heads.shape), (stats.shape, (B, T, stats.shape[2], 1)))
        agree(*((x.shape, (D,)) for x in (*gains, *dgains)))
        if not N // 2 <= stats.shape[2] <= N:
            raise ValueError(f"expected roots of {N // 2} to {N} heads, got {stats.shape[2]}")
        assert dheads.flags.c_contiguous  # or reshape would write into a copy
        rows = (x.reshape(B * T, -1, x.shape[-1]) for x in (dheads, heads, stats))
        norms.norm_heads_backward(*rows, gains, dgains)
        return dheads

    def _each(self, kernel, *given):
        # What an elementwise kernel makes of arrays of one shape: another.
        agree(*((x.shape, given[0].shape) for x in given))
        out = self.arena.take(*given[0].shape)
        kernel(*map(rows_of, given), rows_of(out))
        return out

    def gelu_exact(self, u: Array) -> Array:
        """GELU with the exact error function, elementwise: u to h of the same shape."""
        return self._each(elementwise.gelu_exact, u)

    def gelu_exact_backward(self, dh: Array, u: Array) -> Array:
        """du from dh and u of one shape, for GELU with the exact error function."""
        return self._each(elementwise.gelu_exact_backward, dh, u)

    def relu2(self, u: Array) -> Array:
        """ReLU squared, elementwise: u to h of the same shape."""
        return self._each(elementwise.relu2, u)

    def relu2_backward(self, dh: Array, u: Array) -> Array:
        """du from dh and u of one shape, for ReLU squared."""
        return self._each(elementwise.relu2_backward, dh, u)

    def gelu(self, u: Array) -> Array:
        """GELU by its tanh approximation, elementwise: u to h of the same shape."""
        return self._each(elementwise.gelu, u)

    def gelu_backward(self, dh: Array, u: Array) -> Array:
        """du from dh and u of one shape, for GELU by its tanh approximation."""
        return self._each(elementwise.gelu_backward, dh, u)

    def linear(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        """x (..., I) @ w (I, O) + bias (O,), by NumPy's BLAS, in the arena's memory."""
        y = self.arena.take(*x.shape[:-1], w.shape[1])
        np.matmul(rows_of(x), w, out=rows_of(y))
        return plus(y, bias)

    def linear_backward(
        self, dy: Array, x: Array, w: Array, dw: Array, dbias: Array | None = None
    ) -> Array:
        """dx (..., I) from dy (..., O), by NumPy's BLAS; adds to dw (I, O) and dbias (O,)."""
        dx = self.arena.take(*x.shape)
        np.matmul(rows_of(dy), w.T, out=rows_of(dx))
        with self.scratch():
            product = self.arena.take(*w.shape)
            np.matmul(rows_of(x).T, rows_of(dy), out=product)
            dw += product
        plus_backward(dy, dbias)
        return dx

    def move_norm(
        self, config: ModelConfig, x: Array, terms: Sequence[tuple[float, Array]], gain: Array,
        bias: Array | None,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """x + sum of weight * k, its norm n, stats; the last term is added where it's normed."""
        if not terms:
            return Engine.move_norm(self, config, x, terms, gain, bias)
        *others, (weight, k) = terms
        for each, velocity in others:
            x = self.add(x, velocity, each)
        agree((k.shape, x.shape), (gain.shape, x.shape[-1:]))
        moved, n = self.arena.take(*x.shape), self.arena.take(*x.shape)
        is_rms = config.norm == "rms"
        stats = self.arena.take(*x.shape[:-1], 1 if is_rms else 2)
        kernel = norms.move_rmsnorm if is_rms else norms.move_layernorm
        arrays = rows_of(moved), rows_of(n), rows_of(stats)
        numbers = np.float32(weight), np.float32(config.norm_eps)
        kernel(rows_of(x), rows_of(k), numbers, gain, *arrays)
        return moved, plus(n, bias), stats

    def move_norm_backward(
        self, config: ModelConfig, dn: Array, x: Array, gain: Array, stats: Array,
        dnorm: tuple[Array, Array | None], dx: Array | None = None,
    ) -> Array:  # fmt: skip
        """dx (B, T, C) plus the norm's gradient, which is added where it is computed."""
        dgain, dbias = dnorm
        plus_backward(dn, dbias)
        is_rms = config.norm == "rms"
        kernel = norms.rmsnorm_backward if is_rms else norms.layernorm_backward
        return self._norm_backward(kernel, dn, x, gain, stats, dgain, dx)

    def loss(
        self, n: Array, W: Array, targets: Array, scale: Array, dW: Array | None = None,
        cap: float = 0.0,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """The sums (K,) of -log p, and dn (B, T, C), by logits of LOSS_ROWS positions a time."""
        rows, aims = rows_of(n), targets.reshape(-1, targets.shape[-1])
        agree((targets.shape[:-1], n.shape[:-1]))
        sums, dn = np.zeros(scale.shape), None if dW is None else self.arena.take(*n.shape)
        for first in range(0, len(rows), LOSS_ROWS):
            part = slice(first, first + LOSS_ROWS)
            with self.scratch():
                given = rows[None, part], W, aims[None, part], scale, dW, cap
                more, dpart = Engine.loss(self, *given)
                sums += more
                if dn is not None:
                    rows_of(dn)[part] = dpart[0]
        return sums, dn


# %% sec-cpu-tile
class CpuEngine(FusedEngine):
    """The engine with our own matrix products, in the linear layers and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.work = aligned(WORK)

    def linear(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        """x (..., I) @ w (I, O) + bias (O,), by our own `multiply`, in the arena's memory."""
        y = self.arena.take(*x.shape[:-1], w.shape[1])
        multiply(rows_of(x), w, rows_of(y), False, self.work)
        return plus(y, bias)

    def linear_backward(
        self, dy: Array, x: Array, w: Array, dw: Array, dbias: Array | None = None
    ) -> Array:
        """dx (..., I) from dy (..., O), by our own `multiply`; adds to dw (I, O) and dbias (O,)."""
        dx, dy = self.arena.take(*x.shape), rows_of(dy)
        if dw.flags.c_contiguous:
            multiply(rows_of(x).T, dy, dw, True, self.work)               # (1)
        else:  # tied weights: the transpose of an embedding
            multiply(dy.T, rows_of(x), dw.T, True, self.work)             # (1)
        multiply(dy, w.T, rows_of(dx), False, self.work)                  # (2)
        plus_backward(dy, dbias)                                       # (3)
        return dx

    def attention(self, heads: Array, n_kv: int, first: Array | None = None) -> tuple[Array, Array]:
        """y (B, T, H*D) and p (B, H, T, T) of causal attention over heads (B, T, H+2G, D)."""
        (B, T, N, D), (q, k, v) = heads.shape, _split(heads, n_kv)
        H = N - 2 * n_kv
        y, p = self.arena.take(B, T, H, D), self.arena.take(B, H, T, T)
        multiply_heads(q, k.swapaxes(2, 3), p, BELOW, self.work)
        first = np.zeros((B, T)) if first is None else first
        agree((first.shape, (B, T)))
        elementwise.causal_softmax(p, np.ascontiguousarray(first, np.int32), D**-0.5)
        multiply_heads(p, v, y.swapaxes(1, 2), LOWER, self.work)
        return y.reshape(B, T, H * D), p

    def attention_backward(
        self, dy: Array, heads: Array, n_kv: int, p: Array, first: Array | None = None
    ) -> Array:
        """dheads (B, T, H+2G, D) from dy (B, T, H*D); p is 0 where `first` hides a key."""
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


# %% sec-cpu-tile
def _split(heads, n_kv):
    # Views q (B, H, T, D), k and v (B, G, T, D) of packed heads (B, T, H + 2G, D).
    x, H = heads.swapaxes(1, 2), heads.shape[2] - 2 * n_kv
    return x[:, :H], x[:, H : H + n_kv], x[:, H + n_kv :]
