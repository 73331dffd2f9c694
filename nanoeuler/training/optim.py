# Made from book/06d-cpu-training.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-adamw
"""AdamW on a model's flat buffers, the learning rate's schedule, and clipping by the global norm.

Leaves out groups of parameters: matrices decay, vectors do not; nothing else tells them apart.
"""

import math

import numpy as np
from numba import njit

BETA1 = 0.9  # Kingma and Ba 2015, section 2: the first moment remembers about ten steps
BETA2 = 0.98  # Vaswani et al. 2017, section 5.3: the second moment remembers about fifty
EPS = 1e-8  # Kingma and Ba 2015, section 2: far below the root of a second moment that is alive
LEARNING_RATE = 4e-3  # measured: the section on settings, chapter 6
WEIGHT_DECAY = 0.3  # measured: the same section
WARMUP_STEPS = 50  # measured: the same section; one memory of the second moment
CLIP_NORM = 1.0  # Brown et al. 2020 (GPT-3), appendix B


@njit(nogil=True, cache=True, error_model="numpy")  # no test for x / 0, which forbids vectors
def _adamw(w, dw, m, v, beta1, rest1, beta2, rest2, m_scale, v_scale, eps, lr, decay):
    """Equations eq-train-moments to eq-train-adamw on flat arrays (N,), in place, in one pass."""
    for i in range(w.size):
        m[i] = beta1 * m[i] + rest1 * dw[i]                              # (1)
        v[i] = beta2 * v[i] + rest2 * (dw[i] * dw[i])                    # (2)
        s = (m[i] * m_scale) / (np.sqrt(v[i] * v_scale) + eps)           # (3)
        w[i] -= lr * (s + decay * w[i])                                  # (4)


class AdamW:
    """The optimizer's state: two moments of each parameter's gradient, as `Weights`."""

    def __init__(self, weights, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=WEIGHT_DECAY):
        self.beta1, self.beta2, self.eps, self.weight_decay = beta1, beta2, eps, weight_decay
        self.m, self.v = weights.zeros_like(), weights.zeros_like()

    def update(self, weights, gradients, lr, step):
        """Change `weights` in place, given `gradients` (both Weights); `step` counts from 1.

        Matrices decay, the embedding and learned positions among them, as in nanoGPT; vectors (the
        gains and biases of norms, the biases of linear maps) do not. Loshchilov and Hutter 2019,
        algorithm 2.
        """
        assert step >= 1
        number = weights.flat.dtype.type  # all arithmetic in the weights' own precision
        for name, w in weights.items():
            decay = self.weight_decay if w.ndim > 1 else 0.0
            scalars = (
                self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2,
                1 / (1 - self.beta1**step), 1 / (1 - self.beta2**step), self.eps, lr, decay,
            )  # fmt: skip
            arrays = w, gradients[name], self.m[name], self.v[name]
            _adamw(*(array.reshape(-1) for array in arrays), *map(number, scalars))


# %% sec-train-schedule
@njit(nogil=True, cache=True, fastmath={"reassoc"})  # may add in vector lanes, and nothing else
def _sum_of_squares(flat):
    total = 0.0
    for i in range(flat.size):
        total += np.float64(flat[i]) * np.float64(flat[i])
    return total


def clip(gradients, limit=CLIP_NORM):
    """Scale `gradients` (Weights) in place so that their global norm is at most `limit`.

    Returns the norm before, which is finite if and only if every gradient is: a sum in float64 of
    squares of float32 cannot overflow. Equation eq-train-clip.
    """
    norm = math.sqrt(_sum_of_squares(gradients.flat))
    if limit < norm < math.inf:
        gradients.flat *= limit / norm
    return norm


def learning_rate(step, steps, peak, warmup=WARMUP_STEPS):
    """The learning rate of step 1, 2, ... `steps`: a line up to `peak`, then half a cosine down.

    The line takes `warmup` steps, but no more than a tenth of the run. Equation eq-train-schedule.
    """
    assert 1 <= step <= steps
    warmup = min(warmup, steps // 10)
    if step <= warmup:
        return peak * step / warmup
    return peak / 2 * (1 + math.cos(math.pi * (step - warmup) / (steps + 1 - warmup)))
