# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tile
"""Activation functions of float32 in registers, and their slopes: SwiGLU, GELU in both forms, ReLU
squared.

First those that are good to float32, except for a few of its last bits. Then those with the special
function unit's tanh, good to 11 bits, for results that are rounded to bf16: their names end in
_fast.
"""

import math

from nanoeuler.engines.gpu.lang.instruction import float32
from nanoeuler.engines.gpu.lang.ptx import exp2, larger, reciprocal, tanh_approx
from nanoeuler.model.layers import GELU_CUBIC as CUBIC
from nanoeuler.model.layers import GELU_SCALE as SCALE

LOG2_E = 1.4426950408889634  # e^x is 2^(x log2 e)


def sigmoid(x):
    """1 / (1 + e^-x). Of large -x the power is infinite and the quotient 0."""
    return reciprocal(float32(1) + exp2(x * float32(-LOG2_E)))


def swiglu(gate, up):
    """The gated value, and what its slopes share: h, sigmoid(gate)."""
    sigma = sigmoid(gate)
    return gate * sigma * up, sigma


def swiglu_slopes(dh, gate, up, sigma):
    """dgate and dup. Equation eq-backprop-swiglu."""
    dgate = dh * up * sigma * (float32(1) + gate * (float32(1) - sigma))
    return dgate, dh * gate * sigma


def gelu_share(u):
    """The share of u that GELU lets through, (1 + tanh z) / 2 = sigmoid(2 z)."""
    return sigmoid(float32(2 * SCALE) * u * (float32(1) + float32(CUBIC) * u * u))


def gelu_slope(u):
    """dh / du. Equation eq-backprop-gelu; 1 - tanh^2 z is 4 s (1 - s) for the share s."""
    share = gelu_share(u)
    dz = float32(SCALE) * (float32(1) + float32(3 * CUBIC) * u * u)
    return share + float32(2) * u * share * (float32(1) - share) * dz


# Of eq-cpu-phi, as chapter 10 has fitted them.
NEAR = 0.21
PHI = (0.083711576, 0.0850688528, 0.0691922072, 0.124872583, -0.0939248765, 0.349400558,
       -0.330253028, 0.28358842, -0.0716562858)  # fmt: skip
P1, P2, P3, P4, P5, P6, P7, P8, P9 = PHI
DENSITY = 1 / math.sqrt(2 * math.pi)  # of a standard normal number at 0


def normal(u):
    """Phi(u), the chance of a normal number below u, and its density. eq-tile-gelu-exact."""
    a = larger(u, -u)
    w = reciprocal(float32(1) + float32(NEAR) * a)
    power = exp2(float32(-0.5 * LOG2_E) * a * a)  # of a large a zero, even where a a is infinite
    p = ((float32(P9) * w + float32(P8)) * w + float32(P7)) * w + float32(P6)
    p = ((p * w + float32(P5)) * w + float32(P4)) * w + float32(P3)
    tail = power * ((p * w + float32(P2)) * w + float32(P1)) * w
    return float32(1) - tail if u > float32(0) else tail, float32(DENSITY) * power


def gelu_exact_share(u):
    """The share of u that the exact GELU lets through, Phi(u)."""
    share, _ = normal(u)
    return share


def gelu_exact_slope(u):
    """Its slope. Equation eq-tile-gelu-exact."""
    share, density = normal(u)
    return share + u * density


def gelu_exact(u):
    """The exact GELU, u Phi(u)."""
    return u * gelu_exact_share(u)


def gelu_exact_and_slope(u):
    """The exact GELU and its slope, of one power."""
    share, density = normal(u)
    return u * share, share + u * density


def relu2_share(u):
    """The share of u that ReLU squared lets through: u itself, if it is positive."""
    return larger(u, float32(0))


def relu2_slope(u):
    """Its slope. Equation eq-modern-relu2."""
    return float32(2) * larger(u, float32(0))


def relu2(u):
    """The square of what is positive in u."""
    return u * relu2_share(u)


def relu2_and_slope(u):
    """The square of what is positive in u, and its slope."""
    return u * relu2_share(u), relu2_slope(u)


def gelu_tangent(x):
    """t of GELU(x) = x/2 (1 + t), tanh form; and x squared."""
    square = x * x
    return tanh_approx(x * (float32(SCALE) + float32(SCALE * CUBIC) * square)), square


def gelu_fast(x):
    """GELU: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    t, _ = gelu_tangent(x)
    half = float32(0.5) * x
    return half + half * t


def gelu_and_slope_fast(x):
    """GELU(x) and its slope, equation eq-gelu-slope; |x| is below 1e19, so that x x is finite."""
    t, square = gelu_tangent(x)
    half, one = float32(0.5) * x, float32(1)
    steep = float32(SCALE) + float32(3 * SCALE * CUBIC) * square
    return half + half * t, float32(0.5) * (one + t) + half * (one - t * t) * steep


def silu_fast(x):
    """x sigmoid(x)."""
    half = float32(0.5) * x
    return half + half * tanh_approx(half)


def swiglu_and_slopes_fast(dh, gate, up):
    """dgate, dup and h, equation eq-gemm-swiglu-slopes."""
    half = float32(0.5) * gate
    t = tanh_approx(half)
    silu, sigma = half + half * t, float32(0.5) + float32(0.5) * t
    return dh * up * (sigma + silu * (float32(1) - sigma)), dh * silu, silu * up
