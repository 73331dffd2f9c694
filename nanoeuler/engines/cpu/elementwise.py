# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-fused
"""The operations of the model that are neither products nor norms, as float32 loops over memory.

Every kernel runs on one thread without the GIL and writes into arrays that its caller gives. NaN
goes through; `exp` clamps infinity. Leaves out shapes and memory: engine.py.

N rows (positions of all sequences), C channels, D head width, F MLP width, H heads, V vocabulary.
"""

import numpy as np

from nanoeuler.engines.cpu.options import F32, KERNEL, PART
from nanoeuler.engines.interface import Array
from nanoeuler.jit import njit
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.layers import GELU_CUBIC, GELU_SCALE

# log 2 in two parts, the first with few bits so that n times it is exact, and the coefficients of
# the polynomial for (e^r - 1 - r) / r^2: Cephes, expf.c (Moshier, 1989).
_LOG2_HIGH, _LOG2_LOW = F32(0.693359375), F32(-2.12194440e-4)
_EXP = [F32(x) for x in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3,
                         4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)]  # fmt: skip
_E0, _E1, _E2, _E3, _E4, _E5 = _EXP
_TO_INTEGER = F32(1.5 * 2**23)  # adding it leaves no bits after the point: the sum is rounded
_LOWEST, _HIGHEST = F32(-87), F32(88)  # e^x stays a normal float32: 1.6e-38 to 1.7e38


# Without reassoc, which would cancel _TO_INTEGER.
@njit(**{**PART, "fastmath": {"contract"}})
def exp(x: float) -> np.float32:
    """e^x of a float32, with a relative error below 2^-23. Equation eq-cpu-exp.

    Below -87 and above 88 it is the value there; NaN stays NaN.
    """
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    shifted = x * F32(1 / np.log(2)) + _TO_INTEGER
    n = shifted - _TO_INTEGER
    r = (x - n * _LOG2_HIGH) - n * _LOG2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    power = np.int32((F32(shifted).view(np.int32) + 127) << 23)  # n + 127 is 2^n's exponent field
    return (p * r * r + r + F32(1)) * power.view(np.float32)


@njit(error_model="numpy", forceinline=True)
def highest(x: Array) -> np.float32:
    """The largest of x (n,) float32; NaN if there is one with its sign bit clear.

    Compared as integers: floats order like the integers of their bits once those of negative
    numbers are mirrored, and a maximum of integers may be taken in any order, so in vector lanes.
    """
    top = np.int32(-(2**31))
    for i in range(x.size):
        bits = F32(x[i]).view(np.int32)
        top = max(top, np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF)))
    return np.int32(top ^ ((top >> 31) & 0x7FFFFFFF)).view(np.float32)


@njit(**KERNEL)
def swiglu(gate_up: Array, h: Array) -> None:
    """h (N, F) of `layers.swiglu` from gate_up (N, 2F)."""
    N, F = h.shape
    for i in range(N):
        for j in range(F):
            gate = gate_up[i, j]
            h[i, j] = gate / (F32(1) + exp(-gate)) * gate_up[i, F + j]


@njit(**KERNEL)
def swiglu_backward(dh: Array, gate_up: Array, dgate_up: Array) -> None:
    """dgate_up (N, 2F) of `backward.swiglu_backward` from dh (N, F). The sigmoid is made again."""
    N, F = dh.shape
    for i in range(N):
        for j in range(F):
            gate, up = gate_up[i, j], gate_up[i, F + j]
            sigma = F32(1) / (F32(1) + exp(-gate))
            dgate_up[i, j] = dh[i, j] * up * sigma * (F32(1) + gate * (F32(1) - sigma))  # (1)
            dgate_up[i, F + j] = dh[i, j] * gate * sigma                                 # (2)


@njit(**PART)
def _share(u):
    """The share of u that GELU lets through. Equation eq-cpu-gelu."""
    z = F32(GELU_SCALE) * (u + F32(GELU_CUBIC) * u * u * u)
    return F32(1) / (F32(1) + exp(F32(-2) * z))


@njit(**KERNEL)
def gelu(u: Array, h: Array) -> None:
    """h (N, F) of `layers.gelu` from u (N, F)."""
    N, F = u.shape
    for i in range(N):
        for j in range(F):
            h[i, j] = u[i, j] * _share(u[i, j])


@njit(**KERNEL)
def gelu_backward(dh: Array, u: Array, du: Array) -> None:
    """du (N, F) of `backward.gelu_backward` from dh (N, F). The gate is made again."""
    N, F = u.shape
    for i in range(N):
        for j in range(F):
            x, share = u[i, j], _share(u[i, j])                                     # (1)
            dz = F32(GELU_SCALE) * (F32(1) + F32(3 * GELU_CUBIC) * x * x)
            bend = x * F32(2) * share * (F32(1) - share) * dz                       # (2)
            du[i, j] = dh[i, j] * (share + bend)


@njit(**KERNEL)
def relu2(u: Array, h: Array) -> None:
    """h (N, F) of `modern.relu2` from u (N, F)."""
    N, F = u.shape
    for i in range(N):
        for j in range(F):
            above = max(u[i, j], F32(0))
            h[i, j] = above * above


@njit(**KERNEL)
def relu2_backward(dh: Array, u: Array, du: Array) -> None:
    """du (N, F) of `modern.relu2_backward` from dh (N, F)."""
    N, F = u.shape
    for i in range(N):
        for j in range(F):
            du[i, j] = F32(2) * max(u[i, j], F32(0)) * dh[i, j]


@njit(**KERNEL)
def cross_entropy(logits: Array, targets: Array, scale: Array, sums: Array) -> None:
    """`backward.cross_entropy`, in place: logits (N K, V) becomes dlogits, sums (K,) is added to.

    targets (N K,), scale (K,) float32, sums (K,) float64. Logits are not capped.
    """
    K, V = scale.size, logits.shape[1]
    for i in range(targets.size):
        k, target, row = i % K, targets[i], logits[i]
        if target == IGNORE:
            row[:] = F32(0)
            continue
        if not 0 <= target < V:
            raise IndexError("a target outside the vocabulary")
        top, z = highest(row), F32(0)
        hit = row[target] - top
        for j in range(V):
            row[j] = exp(row[j] - top)
            z += row[j]
        sums[k] += np.log(np.float64(z)) - hit
        weight = scale[k] / z
        for j in range(V):
            row[j] *= weight                                            # (1), (3)
        row[target] -= scale[k]                                         # (2)


@njit(**KERNEL)
def cap_logits(logits: Array, cap: float, slopes: Array) -> None:
    """Logits z (N, V) become y = c tanh(z / c), in place; slopes (N, V) 1 - (y / c)^2."""
    N, V = logits.shape
    for i in range(N):
        for j in range(V):
            share = np.tanh(logits[i, j] / cap)
            logits[i, j] = cap * share
            slopes[i, j] = F32(1) - share * share


@njit(**KERNEL)
def causal_softmax(p: Array, first: Array, scale: float) -> None:
    """Scores p (B, H, T, T) become, in place, softmax(scale p) from first to the diagonal, else 0.

    first (B, T) int32: of each position the first that it sees.
    """
    B, H, T, _ = p.shape
    for b in range(B):
        for h in range(H):
            for t in range(T):
                low, n, x = first[b, t], t + 1, p[b, h, t]
                if not 0 <= low <= t:
                    raise IndexError("a text must begin in its row, up to its position")
                seen, z = x[low:n], F32(0)
                top = highest(seen)
                for j in range(seen.size):
                    seen[j] = exp((seen[j] - top) * F32(scale))
                    z += seen[j]
                for j in range(seen.size):
                    seen[j] /= z
                x[:low], x[n:] = F32(0), F32(0)


@njit(**KERNEL)
def causal_softmax_backward(p: Array, ds: Array, scale: float) -> None:
    """Gradients ds (B, H, T, T) of the probabilities p become, in place, those of the scores."""
    B, H, T, _ = p.shape
    for b in range(B):
        for h in range(H):
            for t in range(T):
                x, dx, n, along = p[b, h, t], ds[b, h, t], t + 1, F32(0)
                for j in range(n):
                    along += x[j] * dx[j]
                for j in range(n):
                    dx[j] = x[j] * (dx[j] - along) * F32(scale)
                dx[n:] = F32(0)


@njit(**KERNEL)
def rope(heads: Array, n: int, cos: Array, sin: Array, sign: int) -> None:
    """Turn the first n heads of (B, T, N, D) in place by the tables' angles, back if sign is -1."""
    B, T, _, D = heads.shape
    half = D // 2
    for b in range(B):
        for t in range(T):
            for h in range(n):
                x = heads[b, t, h]
                for j in range(half):
                    turn = F32(sign) * sin[t, j]
                    x[j], x[half + j] = (
                        x[j] * cos[t, j] - x[half + j] * turn,
                        x[j] * turn + x[half + j] * cos[t, j],
                    )


# %% sec-cpu-phi
# Of eq-cpu-phi, fitted to math.erfc from 0 to 14: off by 1.7e-8 of it, as float32 by 7.5e-8.
_BEND = F32(0.21)
_PHI = [F32(x) for x in (0.083711576, 0.0850688528, 0.0691922072,
                         0.124872583, -0.0939248765, 0.349400558,
                         -0.330253028, 0.28358842, -0.0716562858)]  # fmt: skip
_P1, _P2, _P3, _P4, _P5, _P6, _P7, _P8, _P9 = _PHI
_DENSITY = F32(1 / np.sqrt(2 * np.pi))  # of a standard normal number at 0


@njit(**PART)
def below(u: float) -> np.float32:
    """Phi(u), the probability that a standard normal number is below u. Equation eq-cpu-phi."""
    a = np.abs(u)
    w = F32(1) / (F32(1) + _BEND * a)
    p = (((_P9 * w + _P8) * w + _P7) * w + _P6) * w + _P5
    tail = exp(F32(-0.5) * a * a) * ((((p * w + _P4) * w + _P3) * w + _P2) * w + _P1) * w
    return F32(1) - tail if u > F32(0) else tail


@njit(**KERNEL)
def gelu_exact(u: Array, h: Array) -> None:
    """h (N, F) of `layers.gelu_exact` from u (N, F)."""
    N, F = u.shape
    for i in range(N):
        for j in range(F):
            h[i, j] = u[i, j] * below(u[i, j])


@njit(**KERNEL)
def gelu_exact_backward(dh: Array, u: Array, du: Array) -> None:
    """du (N, F) of `backward.gelu_exact_backward` from dh (N, F)."""
    N, F = u.shape
    for i in range(N):
        for j in range(F):
            x = u[i, j]
            bend = x * exp(F32(-0.5) * x * x) * _DENSITY                            # (2)
            du[i, j] = dh[i, j] * (below(x) + bend)                                 # (1)


# %% sec-cpu-layernorm
@njit(**KERNEL)
def embed(tokens: Array, table: Array, x: Array) -> None:
    """x (N, C) = the rows of table (V, C) that tokens (N,) name."""
    for i in range(tokens.size):
        if not 0 <= tokens[i] < table.shape[0]:
            raise IndexError("a token outside the vocabulary")
        x[i] = table[tokens[i]]


@njit(**KERNEL)
def embed_backward(dx: Array, tokens: Array, dtable: Array) -> None:
    """Add each dx (N, C) to its token's row of dtable (V, C), in the order of the positions."""
    for i in range(tokens.size):
        if not 0 <= tokens[i] < dtable.shape[0]:
            raise IndexError("a token outside the vocabulary")
        for j in range(dtable.shape[1]):
            dtable[tokens[i], j] += dx[i, j]


@njit(**KERNEL)
def add(x: Array, y: Array, h: float, out: Array) -> None:
    """out = x + h y, flat arrays (n,) and a float32; `out` may be x."""
    for i in range(x.size):
        out[i] = x[i] + h * y[i]
