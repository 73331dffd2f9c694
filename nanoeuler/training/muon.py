# Made from book/09b-better-than-adamw.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-muon-newton-schulz
"""Muon: a step of equal length in every direction for each hidden matrix, AdamW for the rest.

Leaves out GPUs. I and O are the inputs and outputs of a matrix (I, O), R and N the smaller and the
larger of the two.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from nanoeuler.errors import UserError
from nanoeuler.jit import njit
from nanoeuler.model.config import ModelConfig, count_parameters, parameter_shapes
from nanoeuler.model.weights import Weights
from nanoeuler.training.optim import MEASURED_DIM, AdamW

# Jordan and others 2024: chosen so that small singular values grow fast, not for convergence.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5  # the same: of Newton and Schulz
MOMENTUM = 0.95  # the same: the buffer remembers about twenty gradients
MUON_PEAK = 8e-3  # AdamW's rate beside Muon: measured below
MUON_RATIO = 2.5  # rate of the matrices in parts of that, at MEASURED_DIM: the same


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a (M, P) b (P, N) in a new array (M, N); float32 by chapter 10's product, on one thread.

    Then the bits are the same for any number of threads, which a library's product need not have.
    """
    if a.dtype != np.float32:
        return a @ b
    from nanoeuler.engines.cpu.gemm import WORK, multiply  # a compiler, where it is used
    from nanoeuler.engines.cpu.memory import aligned

    out = aligned(a.shape[0], b.shape[1])
    multiply(a, b, out, False, aligned(WORK))
    return out


def gram(x: np.ndarray) -> np.ndarray:
    """x x^T (R, R) of x (R, N), as `product`; in float32 for half of the work, since it mirrors."""
    if x.dtype != np.float32:
        return x @ x.T
    from nanoeuler.engines.cpu.gemm import BELOW, WORK, multiply_heads
    from nanoeuler.engines.cpu.memory import aligned

    out = aligned(len(x), len(x))
    alone = (each[None, None] for each in (x, x.T, out))
    multiply_heads(*alone, BELOW, aligned(WORK))
    _mirror(out)
    return out


@njit(nogil=True, cache=True)
def _mirror(x):
    """Copy what is below the diagonal of x (R, R) to where it is missing above."""
    for i in range(len(x)):
        for j in range(i):
            x[j, i] = x[i, j]


def orthogonalize(
    x: np.ndarray, steps: int = STEPS,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
) -> np.ndarray:  # fmt: skip
    """About U V^T of x = U S V^T: x (I, O) of any float dtype with all singular values near 1.

    Newton-Schulz steps, eq-muon-newton-schulz, in the dtype of x. Zeros stay zeros.
    """
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    y = np.ascontiguousarray(x.T if tall else x)  # (R, N): the squares below are R wide
    norm = math.sqrt(np.square(y, dtype=np.float64).sum())
    y = y * y.dtype.type(1 / norm if norm else 0)
    for _ in range(steps):
        s = gram(y)
        y = a * y + product(b * s + c * gram(s), y)
    return y.T if tall else y


# %% sec-muon-scale
def matrix_scale(inputs: int, outputs: int) -> float:
    """What the step of a matrix (I, O) is multiplied by: eq-muon-step."""
    return math.sqrt(max(1.0, outputs / inputs))


def matrix_rate(lr: float, dim: int) -> float:
    """The rate of the matrices where AdamW's is lr, in a model `dim` wide.

    MUON_RATIO times lr, without the fall with the width that `optim.rate_for` gives AdamW's.
    """
    return MUON_RATIO * lr * max(1.0, dim / MEASURED_DIM)


@njit(nogil=True, cache=True, error_model="numpy")
def _mix(m, dw, momentum, rest):
    """Equation eq-muon-momentum on flat arrays (N,), in place: dw becomes the direction."""
    for i in range(m.size):
        m[i] = momentum * m[i] + rest * dw[i]
        dw[i] = momentum * m[i] + rest * dw[i]


@njit(nogil=True, cache=True, error_model="numpy")
def _move(w, o, rate, decay):
    """Equation eq-muon-step on flat arrays (N,), in place."""
    for i in range(w.size):
        w[i] -= rate * (o[i] + decay * w[i])


# %% sec-muon-code
class Matrix(NamedTuple):
    """A hidden matrix: some columns of a tensor of the weights."""

    name: str     # of the tensor (I, all its columns)
    start: int    # its first column
    columns: int  # O
    rows: int     # I


def matrices(of: Weights | ModelConfig) -> list[Matrix]:
    """The matrices of the blocks that Muon changes; joint tensors are cut into what they hold.

    wqkv are queries, keys and values, w_up of SwiGLU gate and up; wo and w_down are whole. The
    embedding, learned positions, the output matrix and all vectors stay AdamW's.
    """
    config, found = of.config if isinstance(of, Weights) else of, []
    D, F = config.head_dim, config.hidden
    heads = [each * D for each in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
    cuts = {"wqkv": heads, "w_up": [F, F] if config.mlp == "swiglu" else [F]}
    for name, (inputs, *outputs) in parameter_shapes(config).items():
        if name.startswith("block.") and outputs:
            start = 0
            for columns in cuts.get(name.split(".")[-1], outputs):
                found.append(Matrix(name, start, columns, inputs))
                start += columns
            assert start == outputs[0]
    return found


def flops(each: Matrix) -> int:
    """FLOPs of the products of its orthogonalization: eq-muon-share."""
    small, large = sorted((each.rows, each.columns))
    return STEPS * (3 * small**2 * large + small**3)


def added(config: ModelConfig, batch_size: int) -> str:
    """What Muon adds to a step of so many whole contexts, as a line of text."""
    more = sum(map(flops, matrices(config)))
    share = more / (6 * count_parameters(config) * batch_size * config.context)
    return (f"Muon adds {more / 1e12:,.4f} TFLOP to a step, {share:.1%} of its products; its "
            "state takes what AdamW's does")  # fmt: skip


class Muon(AdamW):
    """AdamW, but for the hidden matrices: see `matrices`. Jordan and others 2024.

    Of a matrix m is the momentum buffer, and v stays zero. `threads` share the matrices, and change
    no bit of what comes out.
    """

    momentum, peak = MOMENTUM, MUON_PEAK
    steps, coefficients = STEPS, COEFFICIENTS
    # For a stepper on a GPU, which takes the step itself.
    matrices, scale, rate = map(staticmethod, (matrices, matrix_scale, matrix_rate))

    def update(
        self, weights: Weights, gradients: Weights, lr: float, number: int,
        part: slice = slice(None),
    ) -> None:  # fmt: skip
        """Change `weights` in place by step `number` (from 1), or a `part` of them.

        The gradients of the matrices are overwritten, by their steps. For a part, `gather` must
        be there, which makes the directions of all parts known to all ranks.
        """
        first, end, _ = part.indices(weights.flat.size)
        these = matrices(weights)
        whole = {each.name: weights[each.name].size for each in these}
        spans = {name: (weights.starts[name], weights.starts[name] + size)
                 for name, size in whole.items()}  # fmt: skip
        for start, stop in _between(spans.values(), first, end):
            super().update(weights, gradients, lr, number, slice(start, stop))
        rounded = weights.flat.dtype.type
        mine = {name: slice(max(start, first), min(stop, end))
                for name, (start, stop) in spans.items() if max(start, first) < min(stop, end)}
        for span in mine.values():
            momentum = rounded(self.momentum), rounded(1 - self.momentum)
            _mix(self.m.flat[span], gradients.flat[span], *momentum)
        if end - first < weights.flat.size:
            if self.gather is None:
                raise UserError("Muon was asked for a part of the weights where no other rank has "
                                "the rest: choose the optimizer adamw")  # fmt: skip
            self.gather(gradients.flat)
        self._turn(gradients, [each for each in these if each.name in mine])
        rate = matrix_rate(lr, weights.config.dim)
        for span in mine.values():
            _move(weights.flat[span], gradients.flat[span], rounded(rate),
                  rounded(self.weight_decay))

    # %% sec-muon-ranks
    def _turn(self, directions, these):
        """Put in the place of each of these matrices its step, the largest first."""

        def turn(each):
            x = directions[each.name][:, each.start : each.start + each.columns]
            x[...] = matrix_scale(*x.shape) * orthogonalize(x)

        these = sorted(these, key=flops, reverse=True)
        if self.threads == 1:
            list(map(turn, these))
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                list(pool.map(turn, these))


# %% sec-muon-ranks
def _between(spans, first: int, end: int) -> Iterator[tuple[int, int]]:
    """What of first .. end lies in none of the spans, which are in order."""
    for start, stop in (*spans, (end, end)):
        if first < min(start, end):
            yield first, min(start, end)
        first = max(first, stop)
