# Made from book/07-the-first-run.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-adamw
"""AdamW on a model's flat buffers, gradient clipping, and the learning-rate schedule.

Matrices decay and vectors don't; all other settings are the same for both.
"""

import math
from typing import NamedTuple

import numpy as np

from nanoeuler.jit import njit
from nanoeuler.model.weights import Weights

# A moment remembers about 1 / (1 - beta) steps: ten, and fifty.
BETA1 = 0.9  # Kingma and Ba 2015, section 2
BETA2 = 0.98  # Vaswani et al. 2017, section 5.3
EPS = 1e-8  # Kingma and Ba 2015, section 2: for parameters that have had no gradient yet
LEARNING_RATE = 4e-3  # measured: the section on settings, appendix E
MEASURED_DIM = 128  # the width of the small preset, on which LEARNING_RATE was measured
WEIGHT_DECAY = 0.3  # measured: the same section
WARMUP_STEPS = 50  # measured: the same section; as many steps as the second moment remembers
CLIP_NORM = 1.0  # Brown et al. 2020 (GPT-3), appendix B
# The gradient's squares are added up in 16 partial sums, which up to 16 processes share (chapter
# 14), so that the norm has the same bits for any number of them.
PARTS = 16


class Scalars(NamedTuple):
    """What one step of AdamW multiplies by, in the weights' dtype."""

    beta1: float
    rest1: float    # 1 - beta1
    beta2: float
    rest2: float    # 1 - beta2
    m_scale: float  # 1 / (1 - beta1^t)
    v_scale: float  # 1 / (1 - beta2^t)
    eps: float
    lr: float
    decay: float


@njit(nogil=True, cache=True, error_model="numpy")  # no test of x / 0
def _adamw(w, dw, m, v, by):
    """Equations eq-train-moments to eq-train-adamw on flat arrays (N,), in place, in one pass."""
    for i in range(w.size):
        m[i] = by.beta1 * m[i] + by.rest1 * dw[i]                        # (1)
        v[i] = by.beta2 * v[i] + by.rest2 * (dw[i] * dw[i])              # (2)
        s = (m[i] * by.m_scale) / (np.sqrt(v[i] * by.v_scale) + by.eps)  # (3)
        w[i] -= by.lr * (s + by.decay * w[i])                            # (4)


class AdamW:
    """The optimizer's state, two moments of each parameter's gradient as `Weights`, and its rules.

    Call `clip` first, and then `update` only if the norm is finite.
    """

    peak = LEARNING_RATE  # a run's highest rate by default, for a model MEASURED_DIM wide
    threads, gather = 1, None  # only for Muon (chapter 9b), which needs whole matrices

    def __init__(
        self, weights: Weights, beta1: float = BETA1, beta2: float = BETA2, eps: float = EPS,
        weight_decay: float = WEIGHT_DECAY, clip_norm: float = CLIP_NORM,
    ) -> None:  # fmt: skip
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.weight_decay, self.clip_norm = weight_decay, clip_norm
        self.m, self.v = weights.zeros_like(), weights.zeros_like()

    def update(
        self, weights: Weights, gradients: Weights, lr: float, number: int,
        part: slice = slice(None),
    ) -> None:  # fmt: skip
        """Take training step `number`, from 1: change `weights`, or only `weights.flat[part]`.

        Of several processes (chapter 14) each changes its own part.

        Matrices decay, the embedding and learned positions among them, as in nanoGPT; vectors (the
        gains and biases of norms, the biases of linear maps) do not. Loshchilov and Hutter 2019.
        """
        assert number >= 1
        rounded = weights.flat.dtype.type  # all arithmetic in the weights' own precision
        first, end, _ = part.indices(weights.flat.size)
        flats = [each.flat for each in (weights, gradients, self.m, self.v)]
        for name, w in weights.items():
            start, decay = weights.starts[name], self.weight_decay if w.ndim > 1 else 0.0
            scalars = (
                self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2,
                1 / (1 - self.beta1**number), 1 / (1 - self.beta2**number), self.eps, lr, decay,
            )  # fmt: skip
            mine = slice(max(start, first), min(start + w.size, end))
            if mine.start < mine.stop:
                _adamw(*(flat[mine] for flat in flats), Scalars(*map(rounded, scalars)))

    # %% sec-train-schedule
    def clip(self, gradients: Weights) -> float:
        """Scale `gradients` in place so that their norm is at most `clip_norm`. Eq. eq-train-clip.

        Returns the norm before the scaling. It is finite exactly when all gradients are, if they
        are float32: a sum of their squares in float64 cannot overflow.
        """
        return self.limit(gradients.flat, self.squares(gradients.flat, PARTS))

    def squares(self, flat: np.ndarray, parts: int) -> list[float]:
        """The sums of the squares of `parts` equal parts of `flat`, in float64.

        `Weights` pads each tensor to a multiple of 16 elements, so PARTS divides `flat.size`.
        """
        return [_sum_of_squares(part) for part in flat.reshape(parts, -1)]

    def limit(self, flat: np.ndarray, squares: list[float]) -> float:
        """Scale `flat`, all or a part of the gradients, in place; return the norm of all of them.

        squares: the PARTS sums of squares of all gradients.
        """
        norm = math.sqrt(sum(squares))
        if self.clip_norm < norm < math.inf:
            flat *= self.clip_norm / norm
        return norm


# %% sec-train-schedule
@njit(nogil=True, cache=True, fastmath={"reassoc"})  # may add in another order
def _sum_of_squares(flat):
    total = 0.0
    for i in range(flat.size):
        total += np.float64(flat[i]) * np.float64(flat[i])
    return total


def learning_rate(number: int, steps: int, peak: float, warmup: int = WARMUP_STEPS) -> float:
    """The learning rate of step 1, 2, ... `steps`: a line up to `peak`, then half a cosine down.

    The line takes `warmup` steps, but no more than a tenth of the run. Equation eq-train-schedule.
    """
    assert 1 <= number <= steps
    warmup = min(warmup, steps // 10)
    if number <= warmup:
        return peak * number / warmup
    return peak / 2 * (1 + math.cos(math.pi * (number - warmup) / (steps + 1 - warmup)))


def rate_for(dim: int, peak: float = LEARNING_RATE) -> float:
    """The schedule's peak for a model `dim` wide, if `peak` is right for one MEASURED_DIM wide.

    Twice the width, half the rate: eq-train-width. A narrower model gets `peak` itself.
    """
    return peak * min(1.0, MEASURED_DIM / dim)
