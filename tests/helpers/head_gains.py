"""How large the terms are of which the gradients of heads' gains are sums: they nearly cancel."""

import numpy as np

from nanoeuler.engines.reference import ReferenceEngine


class TermsOfGains(ReferenceEngine):
    """The reference engine, which also adds up the squares of each such gradient's terms' sizes.

    A term is made of a gradient of attention's scores, itself a difference p (dp - delta), so it is
    off by some roundings of the formula on absolute values, with every difference a sum. Signs and
    roundings of different terms are independent, so what they are off by adds up by squares, and a
    partial sum of them is no larger than the root of these. squares: by the address of the
    gradient, (D,) each.
    """

    def __init__(self):
        self.squares = {}

    def attention_backward(self, dy, heads, n_kv, p, first=None):
        (B, T, N, D), H = heads.shape, heads.shape[2] - 2 * n_kv
        parts = slice(0, H), slice(H, H + n_kv), slice(H + n_kv, N)
        q, *shared = (np.abs(heads[:, :, part]).swapaxes(1, 2) for part in parts)
        k, v = (part.repeat(H // n_kv, axis=1) for part in shared)
        dp = np.abs(dy).reshape(B, T, H, D).swapaxes(1, 2) @ v.swapaxes(2, 3)
        ds = p * (dp + (p * dp).sum(axis=3, keepdims=True)) / D**0.5
        dk = (ds.swapaxes(2, 3) @ q).reshape(B, n_kv, H // n_kv, T, D).sum(axis=2)
        self.sizes = np.concatenate([ds @ k, dk], axis=1).swapaxes(1, 2)
        return super().attention_backward(dy, heads, n_kv, p, first)

    def rope_backward(self, dheads, n, cos, sin):
        left, right = np.split(self.sizes, 2, axis=3)
        self.sizes = np.concatenate([left + right] * 2, axis=3)
        return super().rope_backward(dheads, n, cos, sin)

    def norm_heads_backward(self, dheads, heads, gains, stats, dgains):
        n, n_kv = stats.shape[2], heads.shape[2] - stats.shape[2]
        for part, dgain in zip((slice(0, n - n_kv), slice(n - n_kv, n)), dgains, strict=True):
            x, at = heads[:, :, part], address(dgain)
            x_hat = x / np.sqrt((x * x).mean(axis=3, keepdims=True))
            terms = self.sizes[:, :, part] * np.abs(x_hat)
            self.squares[at] = self.squares.get(at, 0) + (terms * terms).sum(axis=(0, 1, 2))
        return super().norm_heads_backward(dheads, heads, gains, stats, dgains)

    def of(self, dgain):
        """The root of the squares of all terms of a gradient; None where it is no such sum."""
        found = self.squares.get(address(dgain))
        return None if found is None else found.sum() ** 0.5


def address(array):
    """Where an array begins."""
    return array.__array_interface__["data"][0]
