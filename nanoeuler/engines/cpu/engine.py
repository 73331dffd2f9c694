# Made from book/06a-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-arena
"""The CPU engine: the operations of `nanoeuler.engines.reference` in float32, fast, on one thread.

Drive it with `model.forward` and `model.backward`, one engine per thread. Leaves out threads
(stepper.py) and other types: gradient checks need float64, and the reference has it.

B batch, T positions, C channels, H query heads, G key/value heads, D head width.
"""

from contextlib import contextmanager
from math import prod
from mmap import mmap

import numpy as np

from nanoeuler.engines.cpu import loops
from nanoeuler.engines.cpu.products import BELOW, LOWER, UPPER, WORK, multiply, multiply_heads
from nanoeuler.engines.interface import Engine
from nanoeuler.model.attention import attention
from nanoeuler.model.backward import attention_backward
from nanoeuler.model.layers import LAYERNORM_EPS, RMSNORM_EPS, ROPE_BASE, rope_tables

# Bytes of a cache line and of the widest vector register: an aligned vector lies in one line.
ALIGNMENT = 64


def aligned(*shape):
    """A float32 array of unspecified contents, whose address is a multiple of ALIGNMENT."""
    raw = np.empty(4 * prod(shape) + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + 4 * prod(shape)].view(np.float32).reshape(shape)


def mapped(*shape):
    """As `aligned`, but straight from the operating system, and back to it when it is dropped."""
    size = prod(shape)
    return np.frombuffer(mmap(-1, max(1, 4 * size)), np.float32, size).reshape(shape)


class Arena:
    """Memory handed out by moving an offset. The first pass measures, later ones replay.

    Arrays stay valid until `begin`. What does not fit into the slab is mapped, and the next `begin`
    makes a slab that would have held it: passes like the first do not allocate again.
    """

    def __init__(self):
        self.slab, self.used, self.needed = aligned(0), 0, 0

    def begin(self):
        """Take back all memory."""
        if self.needed > self.slab.size:
            self.slab = aligned(self.needed)
        self.used = 0

    def take(self, *shape):
        """A float32 array of unspecified contents."""
        start, size = self.used, prod(shape)
        self.used += -(-size // 16) * 16  # the next array starts on a cache line too
        self.needed = max(self.needed, self.used)
        if self.used > self.slab.size:
            return mapped(*shape)
        return self.slab[start : start + size].reshape(shape)


def _rows(x):
    assert x.dtype == np.float32, f"the CPU engine works in float32, got {x.dtype}"
    return x.reshape(-1, x.shape[-1])


def _ids(x):
    return np.ascontiguousarray(x, np.int32).reshape(-1)


def _plus(y, rows):
    # y, with a bias or the rows of positions added in place, if there are any.
    if rows is not None:
        loops.add_rows(_rows(y), rows.reshape(-1, y.shape[-1]))
    return y


def _plus_backward(dy, drows):
    # Adds to drows, the gradient of what `_plus` added, if there is any.
    if drows is not None:
        loops.add_rows_backward(_rows(dy), drows.reshape(-1, dy.shape[-1]))


class FusedEngine(Engine):
    """The operations as fused loops in an arena; matrix products and attention are NumPy's."""

    def __init__(self):
        self.arena, self.tables = Arena(), {}

    def begin(self):
        """Start a pass: every array that this engine returned before may be overwritten."""
        self.arena.begin()

    @contextmanager
    def scratch(self):
        """Memory taken inside may be reused after."""
        used = self.arena.used
        yield
        self.arena.used = used

    def rope_tables(self, T, D, base=ROPE_BASE):
        """`layers.rope_tables` in float32, kept from the first call on."""
        if (T, D, base) not in self.tables:
            tables = rope_tables(T, D, base)
            self.tables[T, D, base] = tuple(table.astype(np.float32) for table in tables)
        return self.tables[T, D, base]

    def embed(self, tokens, table, positions=None):
        """As `layers.embed`."""
        x = self.arena.take(*tokens.shape, table.shape[1])
        loops.embed(_ids(tokens), table, _rows(x))
        return _plus(x, positions)

    def embed_backward(self, dx, tokens, dtable, dpositions=None):
        """As `backward.embed_backward`."""
        assert dx.shape == tokens.shape + dtable.shape[1:]
        loops.embed_backward(_rows(dx), _ids(tokens), dtable)
        _plus_backward(dx, dpositions)

    def rmsnorm(self, x, gain, eps=RMSNORM_EPS):
        """As `layers.rmsnorm`."""
        assert gain.shape == x.shape[-1:]
        y, r = self.arena.take(*x.shape), self.arena.take(*x.shape[:-1], 1)
        loops.rmsnorm(_rows(x), gain, eps, _rows(y), r.reshape(-1))
        return y, r

    def rmsnorm_backward(self, dy, x, gain, r, dgain):
        """As `backward.rmsnorm_backward`."""
        assert dy.shape == x.shape and x.shape[-1:] == gain.shape == dgain.shape
        dx = self.arena.take(*x.shape)
        loops.rmsnorm_backward(_rows(dy), _rows(x), gain, r.reshape(-1), _rows(dx), dgain)
        return dx

    def layernorm(self, x, gain, bias=None, eps=LAYERNORM_EPS):
        """As `layers.layernorm`."""
        assert gain.shape == x.shape[-1:]
        y, stats = self.arena.take(*x.shape), self.arena.take(*x.shape[:-1], 2)
        loops.layernorm(_rows(x), gain, eps, _rows(y), _rows(stats))
        return _plus(y, bias), stats

    def layernorm_backward(self, dy, x, gain, stats, dgain, dbias=None):
        """As `backward.layernorm_backward`."""
        assert dy.shape == x.shape and x.shape[-1:] == gain.shape == dgain.shape
        dx = self.arena.take(*x.shape)
        loops.layernorm_backward(_rows(dy), _rows(x), gain, _rows(stats), _rows(dx), dgain)
        _plus_backward(dy, dbias)                                       # (5)
        return dx

    def rope(self, heads, n, cos, sin):
        """As `layers.rope`, in place; heads must be contiguous."""
        assert heads.flags.c_contiguous and cos.shape == (heads.shape[1], heads.shape[3] // 2)
        loops.rope(heads, n, cos, sin, 1)
        return heads

    def rope_backward(self, dheads, n, cos, sin):
        """As `backward.rope_backward`, in place; dheads must be contiguous."""
        assert dheads.flags.c_contiguous
        loops.rope(dheads, n, cos, sin, -1)
        return dheads

    def swiglu(self, gate_up):
        """As `layers.swiglu`."""
        h = self.arena.take(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        loops.swiglu(_rows(gate_up), _rows(h))
        return h

    def swiglu_backward(self, dh, gate_up):
        """As `backward.swiglu_backward`."""
        assert gate_up.shape == dh.shape[:-1] + (2 * dh.shape[-1],)
        dgate_up = self.arena.take(*gate_up.shape)
        loops.swiglu_backward(_rows(dh), _rows(gate_up), _rows(dgate_up))
        return dgate_up

    def gelu(self, u):
        """As `layers.gelu`."""
        h = self.arena.take(*u.shape)
        loops.gelu(_rows(u), _rows(h))
        return h

    def gelu_backward(self, dh, u):
        """As `backward.gelu_backward`."""
        assert dh.shape == u.shape
        du = self.arena.take(*u.shape)
        loops.gelu_backward(_rows(dh), _rows(u), _rows(du))
        return du

    def add(self, x, y, h=1.0):
        """As `layers.add`."""
        assert x.shape == y.shape
        out = self.arena.take(*x.shape)
        loops.add(x.reshape(-1), y.reshape(-1), np.float32(h), out.reshape(-1))
        return out

    def add_into(self, x, y, h=1.0):
        """As `reference.add_into`."""
        assert x.shape == y.shape and x.flags.c_contiguous
        loops.add(x.reshape(-1), y.reshape(-1), np.float32(h), x.reshape(-1))

    def scale(self, x, h):
        """As `reference.scale`."""
        return np.multiply(x, np.float32(h), out=self.arena.take(*x.shape))

    def cross_entropy(self, logits, targets, scale):
        """As `backward.cross_entropy`; dlogits is written over logits."""
        assert targets.shape == logits.shape[:-1] and scale.shape == targets.shape[2:]
        sums = np.zeros(scale.shape)
        loops.cross_entropy(_rows(logits), _ids(targets), np.asarray(scale, np.float32), sums)
        return sums, logits

    def linear(self, x, w, bias=None):
        """As `layers.linear`."""
        y = self.arena.take(*x.shape[:-1], w.shape[1])
        np.matmul(_rows(x), w, out=_rows(y))
        return _plus(y, bias)

    def linear_backward(self, dy, x, w, dw, dbias=None):
        """As `backward.linear_backward`."""
        dx = self.arena.take(*x.shape)
        np.matmul(_rows(dy), w.T, out=_rows(dx))
        with self.scratch():
            product = self.arena.take(*w.shape)
            np.matmul(_rows(x).T, _rows(dy), out=product)
            dw += product
        _plus_backward(dy, dbias)
        return dx

    def attention(self, heads, n_kv):
        """As `attention.attention`, by it."""
        return attention(heads, n_kv)

    def attention_backward(self, dy, heads, n_kv, p):
        """As `backward.attention_backward`, by it."""
        return np.ascontiguousarray(attention_backward(dy, heads, n_kv, p))


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

    def linear(self, x, w, bias=None):
        """As `layers.linear`."""
        y = self.arena.take(*x.shape[:-1], w.shape[1])
        multiply(_rows(x), w, _rows(y), False, self.work)
        return _plus(y, bias)

    def linear_backward(self, dy, x, w, dw, dbias=None):
        """As `backward.linear_backward`."""
        dx, dy = self.arena.take(*x.shape), _rows(dy)
        if dw.flags.c_contiguous:
            multiply(_rows(x).T, dy, dw, True, self.work)               # (1)
        else:  # tied weights: the transpose of an embedding
            multiply(dy.T, _rows(x), dw.T, True, self.work)             # (1)
        multiply(dy, w.T, _rows(dx), False, self.work)                  # (2)
        _plus_backward(dy, dbias)                                       # (3)
        return dx

    def attention(self, heads, n_kv):
        """As `attention.attention`."""
        (B, T, N, D), (q, k, v) = heads.shape, _split(heads, n_kv)
        H = N - 2 * n_kv
        y, p = self.arena.take(B, T, H, D), self.arena.take(B, H, T, T)
        multiply_heads(q, k.swapaxes(2, 3), p, BELOW, self.work)
        loops.causal_softmax(p, D**-0.5)
        multiply_heads(p, v, y.swapaxes(1, 2), LOWER, self.work)
        return y.reshape(B, T, H * D), p

    def attention_backward(self, dy, heads, n_kv, p):
        """As `backward.attention_backward`."""
        (B, T, N, D), (q, k, v) = heads.shape, _split(heads, n_kv)
        assert dy.shape == (B, T, (N - 2 * n_kv) * D) and p.shape == (B, N - 2 * n_kv, T, T)
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
