"""The linear layers and attention as plain nested loops, in the manner of llm.c's train_gpt2.c.

A peer of bench/cpu.py: what a C programmer writes first, with the rows shared among two threads
and the compiler free to reorder sums. The other operations are FusedEngine's, on one thread, as
they are there. A layer's matrix is (in, out), where llm.c's is (out, in): its forward loop is our
loop for dx, and the other way round.
"""

import numpy as np
from numba import njit, prange

from nanoeuler.engines.cpu.engine import FusedEngine

_LOOPS = {"parallel": True, "cache": True, "error_model": "numpy",
          "fastmath": {"reassoc", "contract", "arcp", "nsz"}}  # fmt: skip
F32 = np.float32


@njit(**_LOOPS)
def linear(x, w, y):
    """y (N, O) = x (N, I) w (I, O)."""
    for n in prange(x.shape[0]):
        y[n] = F32(0)
        for i in range(w.shape[0]):
            for o in range(w.shape[1]):
                y[n, o] += x[n, i] * w[i, o]


@njit(**_LOOPS)
def linear_backward(dy, x, w, dx, dw):
    """dx (N, I) = dy (N, O) w', and x' dy added to dw (I, O)."""
    for n in prange(x.shape[0]):
        for i in range(w.shape[0]):
            total = F32(0)
            for o in range(w.shape[1]):
                total += dy[n, o] * w[i, o]
            dx[n, i] = total
    for i in prange(w.shape[0]):
        for n in range(x.shape[0]):
            for o in range(w.shape[1]):
                dw[i, o] += x[n, i] * dy[n, o]


@njit(**_LOOPS)
def attention(heads, H, G, y, p):
    """y (B, T, H, D) and p (B, H, T, T) of `attention.attention` from heads (B, T, H + 2G, D)."""
    B, T, _, D = heads.shape
    for row in prange(B * T):
        b, t = row // T, row % T
        for h in range(H):
            k, z, top = H + h * G // H, F32(0), F32(-np.inf)
            for s in range(t + 1):
                score = F32(0)
                for d in range(D):
                    score += heads[b, t, h, d] * heads[b, s, k, d]
                p[b, h, t, s] = score * F32(D**-0.5)
                top = max(top, p[b, h, t, s])
            for s in range(t + 1):
                p[b, h, t, s] = np.exp(p[b, h, t, s] - top)
                z += p[b, h, t, s]
            y[b, t, h] = F32(0)
            for s in range(t + 1):
                p[b, h, t, s] /= z
                for d in range(D):
                    y[b, t, h, d] += p[b, h, t, s] * heads[b, s, k + G, d]
            p[b, h, t, t + 1 :] = F32(0)


@njit(**_LOOPS)
def attention_backward(dy, heads, H, G, p, dheads):
    """dheads (B, T, H + 2G, D), zero on entry, from dy (B, T, H, D): a sequence to a thread."""
    B, T, _, D = heads.shape
    for b in prange(B):
        dp = np.empty(T, F32)
        for t in range(T):
            for h in range(H):
                k, along = H + h * G // H, F32(0)
                for s in range(t + 1):
                    total = F32(0)
                    for d in range(D):
                        total += dy[b, t, h, d] * heads[b, s, k + G, d]
                        dheads[b, s, k + G, d] += p[b, h, t, s] * dy[b, t, h, d]
                    dp[s] = total
                    along += p[b, h, t, s] * total
                for s in range(t + 1):
                    ds = p[b, h, t, s] * (dp[s] - along) * F32(D**-0.5)
                    for d in range(D):
                        dheads[b, t, h, d] += ds * heads[b, s, k, d]
                        dheads[b, s, k, d] += ds * heads[b, t, h, d]


class NaiveEngine(FusedEngine):
    """The operations of `reference`, without biases or tied weights."""

    def linear(self, x, w, bias=None):
        """As `layers.linear`."""
        y = self.arena.take(*x.shape[:-1], w.shape[1])
        linear(x.reshape(-1, len(w)), w, y.reshape(-1, w.shape[1]))
        return y

    def linear_backward(self, dy, x, w, dw, dbias=None):
        """As `backward.linear_backward`."""
        dx, (inputs, outputs) = self.arena.take(*x.shape), w.shape
        dx_rows, x_rows = dx.reshape(-1, inputs), x.reshape(-1, inputs)
        linear_backward(dy.reshape(-1, outputs), x_rows, w, dx_rows, dw)
        return dx

    def attention(self, heads, n_kv, first=None):
        """As `attention.attention`."""
        B, T, N, D = heads.shape
        H = N - 2 * n_kv
        y, p = self.arena.take(B, T, H, D), self.arena.take(B, H, T, T)
        attention(heads, H, n_kv, y, p)
        return y.reshape(B, T, H * D), p

    def attention_backward(self, dy, heads, n_kv, p, first=None):
        """As `backward.attention_backward`."""
        B, T, N, D = heads.shape
        dheads = self.arena.take(B, T, N, D)
        dheads[...] = 0
        attention_backward(dy.reshape(B, T, -1, D), heads, N - 2 * n_kv, n_kv, p, dheads)
        return dheads
