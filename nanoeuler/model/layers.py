# Made from book/04-layers.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-layers-embedding
"""The layers of the model except attention, in NumPy, exactly as chapter 4 derives them.

For float32, float64 and complex128: the type that goes in comes out, and every function is
analytic near real numbers (erf except at 6 and -6), so that complex-step derivatives hold.
Leaves out gradients and speed.
Letters: B batch, T positions, C channels, D head width, F MLP width, V vocabulary.
"""

from typing import NamedTuple

import numpy as np

RMSNORM_EPS = 1e-5  # Llama 2's value
ROPE_BASE = 10000.0  # Vaswani and others, 2017, section 3.5; kept by RoPE (Su and others, 2021)


def places(first: np.ndarray) -> np.ndarray:
    """How far each position is from the beginning of its text, t - first[b, t]: (B, T) int.

    first (B, T) int: where in its row the text of each position begins.
    """
    at = np.arange(first.shape[1])
    assert first.size == 0 or (first.min() >= 0 and (first <= at).all()), (
        "expected every text to begin at or before its positions, and in its row"
    )
    return at - first


def embed(
    tokens: np.ndarray, table: np.ndarray, positions: np.ndarray | None = None,
    first: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """The rows of `table` (V, C) that `tokens` (B, T) int name: (B, T, C). Eq. eq-layers-embed.

    positions (T, C), if given, are added: row t to position t, equation eq-layers-positions. With
    first (B, T), positions are counted from the beginning of each text, as in `places`.
    """
    assert np.issubdtype(tokens.dtype, np.integer), f"token ids are integers, got {tokens.dtype}"
    assert tokens.size == 0 or 0 <= tokens.min() <= tokens.max() < len(table), (
        f"token ids must be in [0, {len(table)}), got {tokens.min()} to {tokens.max()}"
    )
    if positions is None:
        return table[tokens]
    T, C = tokens.shape[1], table.shape[1]
    assert positions.shape == (T, C), f"positions {positions.shape} for {T} tokens of {C} channels"
    return table[tokens] + (positions if first is None else positions[places(first)])


# %% sec-layers-linear
def linear(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Multiply each row of `x` (..., I) by `w` (I, O) and add `bias` (O,): (..., O).

    Equation eq-layers-linear.
    """
    assert x.shape[-1] == w.shape[0], f"weights {w.shape} do not fit rows of {x.shape[-1]}"
    if bias is None:
        return x @ w
    assert bias.shape == w.shape[1:], f"bias {bias.shape} does not fit columns of {w.shape[1]}"
    return x @ w + bias


# %% sec-layers-rmsnorm
def rmsnorm(
    x: np.ndarray, gain: np.ndarray, eps: float = RMSNORM_EPS
) -> tuple[np.ndarray, np.ndarray]:
    """Divide each vector by its root mean square, then scale by `gain`. Equation eq-layers-rmsnorm.

    x (..., C), gain (C,). Returns y (..., C) and the root mean square r (..., 1), which the
    backward pass needs. Zhang and Sennrich, 2019.
    """
    assert gain.shape == x.shape[-1:], f"gain {gain.shape} does not fit vectors of {x.shape[-1]}"
    r = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return gain * (x / r), r


# %% sec-layers-swiglu
def sigmoid(z: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-z)) without overflow; z of any shape."""
    return 0.5 * (1 + np.tanh(0.5 * z))


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    """silu(gate) * up, where `gate_up` (..., 2F) holds gate, then up: (..., F).

    Equations eq-layers-silu and eq-layers-swiglu; Shazeer, 2020.
    """
    assert gate_up.shape[-1] % 2 == 0, f"expected gate and up of equal width, got {gate_up.shape}"
    gate, up = np.split(gate_up, 2, axis=-1)
    return gate * sigmoid(gate) * up


# %% sec-layers-rope
class Angles(NamedTuple):
    """RoPE's settings: fields of `ModelConfig`, under shorter names."""

    base: float = ROPE_BASE
    scaling: str = "none"  # or linear, llama3: the rule for longer texts, section RoPE scaling
    factor: float = 1.0  # how many times as long the texts are
    low: float = 1.0  # llama3: below this number of turns in `original`, divide by the factor
    high: float = 4.0  # llama3: above this number of turns, leave the angle as it is
    original: int = 8192  # llama3: positions of the texts that the model was trained with


def rope_angles(D: int, angles: Angles = Angles()) -> np.ndarray:  # noqa: B008 it's immutable
    """theta_i, radians a position: (D/2,) float64. Equations eq-layers-rope, -rope-llama3."""
    assert D % 2 == 0, f"rotary positions turn pairs of channels: head width {D} is odd"
    theta = float(angles.base) ** (-2 * np.arange(D // 2) / D)
    if angles.scaling == "linear":
        return theta / angles.factor
    if angles.scaling == "llama3":
        turns = angles.original * theta / (2 * np.pi)
        share = np.clip((turns - angles.low) / (angles.high - angles.low), 0, 1)
        return theta * (share + (1 - share) / angles.factor)
    assert angles.scaling == "none", f"no rule to scale angles by: {angles.scaling}"
    return theta


def rope_tables(
    T: int, D: int, angles: Angles = Angles()  # noqa: B008 it's immutable
) -> tuple[np.ndarray, np.ndarray]:
    """cos, sin of t * theta_i at T positions: (T, D/2) float64 each. Equation eq-layers-rope."""
    angle = np.arange(T)[:, None] * rope_angles(D, angles)
    return np.cos(angle), np.sin(angle)


def rope(heads: np.ndarray, n: int, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn the pairs (i, i + D/2) of the first `n` heads by each position's angles.

    heads (B, T, N, D); cos, sin (T, D/2) from `rope_tables`, the rows of the T positions. Returns
    an array like `heads`, here a new one. The engines of chapter 6a may write it into `heads`, so
    callers mustn't use `heads` afterwards. Equation eq-layers-rope.
    """
    B, T, N, D = heads.shape
    assert cos.shape == sin.shape == (T, D // 2), f"tables {cos.shape} for heads {heads.shape}"
    assert 0 <= n <= N, f"cannot turn {n} of {N} heads"
    # All heads of a position turn by its angles. The tables are cast to the heads' real type.
    cos, sin = (table[:, None, :].astype(heads.real.dtype) for table in (cos, sin))
    a, b = heads[:, :, :n, : D // 2], heads[:, :, :n, D // 2 :]
    turned = heads.copy()
    turned[:, :, :n, : D // 2] = a * cos - b * sin
    turned[:, :, :n, D // 2 :] = a * sin + b * cos
    return turned


# %% sec-layers-add
def add(x: np.ndarray, y: np.ndarray, h: float = 1.0) -> np.ndarray:
    """x + h y, the residual sum: one Euler step of size h. x, y (..., C) of one shape."""
    assert x.shape == y.shape, f"the stream {x.shape} and what is added to it {y.shape} differ"
    return x + h * y


# %% sec-layers-layernorm
LAYERNORM_EPS = 1e-5  # GPT-2's


def layernorm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None = None, eps: float = LAYERNORM_EPS
) -> tuple[np.ndarray, np.ndarray]:
    """Take off each vector's mean, divide by its deviation, scale by `gain`, add `bias`.

    x (..., C), gain and bias (C,). Returns y (..., C) and stats (..., 2), the mean and the
    deviation. Equation eq-layers-layernorm; Ba, Kiros and Hinton, 2016.
    """
    assert gain.shape == x.shape[-1:], f"gain {gain.shape} does not fit vectors of {x.shape[-1]}"
    assert bias is None or bias.shape == gain.shape, f"bias {bias.shape} for gain {gain.shape}"
    mean = np.mean(x, axis=-1, keepdims=True)
    centred = x - mean
    deviation = np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps)
    y = gain * (centred / deviation)
    if bias is not None:
        y = y + bias
    return y, np.concatenate([mean, deviation], axis=-1)


# %% sec-layers-gelu
# GPT-2's GELU: with sqrt(2/pi), Phi and its tanh form in eq-layers-gelu have the same slope at 0.
# The cubic coefficient makes them differ little (Hendrycks and Gimpel, 2016, section 2).
GELU_SCALE, GELU_CUBIC = (2 / np.pi) ** 0.5, 0.044715


def gelu(u: np.ndarray) -> np.ndarray:
    """u times about the probability that a standard normal number is below u; u of any shape.

    Equation eq-layers-gelu; Hendrycks and Gimpel, 2016, in the tanh form that GPT-2 uses.
    """
    return 0.5 * u * (1 + np.tanh(GELU_SCALE * (u + GELU_CUBIC * u * u * u)))


# %% sec-layers-gelu-exact
ERF_ONE = 6.0  # from here on 1 - erf is below 2.2e-17: float64 rounds erf to 1


def erf(z: np.ndarray) -> np.ndarray:
    """The error function, z of any shape; in float64 to within 64 * 2^-53. Eq. eq-layers-erf."""
    wide = np.asarray(z, np.result_type(z, np.float64))
    near = np.abs(wide.real) < ERF_ONE
    inner = np.where(near, wide, 0)
    term = 2 / np.pi**0.5 * inner * np.exp(-inner * inner)
    total, n = term, 0
    while np.any(np.abs(term) > 2.0**-70 * np.abs(total)):
        n += 1
        term = term * (2 * inner * inner / (2 * n + 1))
        total = total + term
    return np.where(near, total, np.sign(wide.real)).astype(z.dtype)


def gelu_exact(u: np.ndarray) -> np.ndarray:
    """u times the probability that a standard normal number is below u; u of any shape.

    Equation eq-layers-gelu; Hendrycks and Gimpel, 2016.
    """
    return 0.5 * u * (1 + erf(u * 0.5**0.5))
