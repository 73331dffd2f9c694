# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-tile
"""Two rungs below `gemm.multiply`: the schoolbook's three loops, and a tile of plain variables.

They are short enough to be checked by reading, and serve as a measure of what the rest is worth.
Leaves out transposed operands, and sizes that the tile does not divide.

M rows and N columns of the result, P depth: the length of its sums.
"""

import numpy as np

from nanoeuler.engines.cpu.options import F32, KERNEL, PART
from nanoeuler.engines.interface import Array
from nanoeuler.jit import njit


@njit(**PART)
def _sizes(a, b, c):
    # M, N, P of the product c = a b. The loops do not look where they write.
    if a.shape[1] != b.shape[0] or c.shape[0] != a.shape[0] or c.shape[1] != b.shape[1]:
        raise ValueError("shapes that cannot be multiplied")
    return c.shape[0], c.shape[1], a.shape[1]


@njit(**KERNEL)
def three_loops(a: Array, b: Array, c: Array) -> None:
    """c (M, N) = a (M, P) b (P, N), contiguous float32: one sum after the other."""
    M, N, P = _sizes(a, b, c)
    for i in range(M):
        for j in range(N):
            total = F32(0)
            for k in range(P):
                total += a[i, k] * b[k, j]
            c[i, j] = total


@njit(**KERNEL)
def tile(a: Array, b: Array, c: Array) -> None:
    """c (M, N) = a (M, P) b (P, N), 4 x 4 sums at a time; M and N are multiples of 4."""
    M, N, P = _sizes(a, b, c)
    if M % 4 or N % 4:
        raise ValueError("expected multiples of 4 for the rows and the columns")
    t = np.ascontiguousarray(b.T)
    for i in range(0, M, 4):
        for j in range(0, N, 4):
            p0 = p1 = p2 = p3 = q0 = q1 = q2 = q3 = F32(0)
            r0 = r1 = r2 = r3 = s0 = s1 = s2 = s3 = F32(0)
            for k in range(P):
                p, q, r, s = a[i, k], a[i + 1, k], a[i + 2, k], a[i + 3, k]
                t0, t1, t2, t3 = t[j, k], t[j + 1, k], t[j + 2, k], t[j + 3, k]
                p0, p1, p2, p3 = p0 + p * t0, p1 + p * t1, p2 + p * t2, p3 + p * t3
                q0, q1, q2, q3 = q0 + q * t0, q1 + q * t1, q2 + q * t2, q3 + q * t3
                r0, r1, r2, r3 = r0 + r * t0, r1 + r * t1, r2 + r * t2, r3 + r * t3
                s0, s1, s2, s3 = s0 + s * t0, s1 + s * t1, s2 + s * t2, s3 + s * t3
            c[i, j], c[i, j + 1], c[i, j + 2], c[i, j + 3] = p0, p1, p2, p3
            c[i + 1, j], c[i + 1, j + 1], c[i + 1, j + 2], c[i + 1, j + 3] = q0, q1, q2, q3
            c[i + 2, j], c[i + 2, j + 1], c[i + 2, j + 2], c[i + 2, j + 3] = r0, r1, r2, r3
            c[i + 3, j], c[i + 3, j + 1], c[i + 3, j + 2], c[i + 3, j + 3] = s0, s1, s2, s3
