"""How large the terms are of which the gradients of heads' gains are sums: they nearly cancel."""

import numpy as np

from nanoeuler.engines.reference import ReferenceEngine


class TermsOfGains(ReferenceEngine):
    """The reference engine, which also adds up the magnitudes of each such gradient's terms.

    A float32 sum of n terms is off by about sqrt(n) roundings of *their* sizes (Higham and Mary
    2019), however small the sum is. magnitudes: by the address of the gradient, (D,) each.
    """

    def __init__(self):
        self.magnitudes = {}

    def norm_heads_backward(self, dheads, heads, gains, stats, dgains):
        n_kv = heads.shape[2] - stats.shape[2]
        H = stats.shape[2] - n_kv
        for part, dgain in zip((slice(0, H), slice(H, H + n_kv)), dgains, strict=True):
            x = heads[:, :, part]
            terms = np.abs(dheads[:, :, part] * x) / np.sqrt((x * x).mean(axis=3, keepdims=True))
            at = address(dgain)
            self.magnitudes[at] = self.magnitudes.get(at, 0) + terms.sum(axis=(0, 1, 2))
        return super().norm_heads_backward(dheads, heads, gains, stats, dgains)

    def of(self, dgain):
        """The norm of the terms' magnitudes of a gradient; None where it is no such sum."""
        found = self.magnitudes.get(address(dgain))
        return None if found is None else np.linalg.norm(found)


def address(array):
    """Where an array begins."""
    return array.__array_interface__["data"][0]
