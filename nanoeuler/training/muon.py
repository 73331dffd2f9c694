# Made from book/09b-better-than-adamw.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-muon-newton-schulz
"""Muon: a step of equal length in every direction for each hidden matrix, AdamW for the rest.

Leaves out GPUs. I and O are the inputs and outputs of a matrix (I, O), R and N the smaller and the
larger of the two.
"""

import math
from collections.abc import Callable, Iterator
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
STEPS = 5  # likewise: of Newton and Schulz
MOMENTUM = 0.95  # likewise: the buffer remembers about twenty gradients
MUON_PEAK = 8e-3  # AdamW's rate beside Muon: measured below
MUON_RATIO = 2.5  # the matrices' rate over MUON_PEAK, at MEASURED_DIM: measured below
PIECE = 1 << 16  # elements at a time, unless one matrix has more: 256 KiB, which fit an L2 cache


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray, work: np.ndarray) -> None:
    """out (n, M, N) = a (n, M, P) b (n, P, N), matrix by matrix, with chapter 10's `work`.

    float32 by chapter 10's product on one thread, so that no bit depends on the number of threads,
    as a library's may.
    """
    if a.dtype != np.float32:
        np.matmul(a, b, out=out)
        return
    from nanoeuler.engines.cpu.gemm import FULL, multiply_heads  # here: it compiles

    multiply_heads(a[:, None], b[:, None], out[:, None], FULL, work)


def gram(x: np.ndarray, out: np.ndarray, work: np.ndarray) -> None:
    """out (n, R, R) = x x^T of x (n, R, N), as `product`; in float32 only up to the diagonal."""
    if x.dtype != np.float32:
        np.matmul(x, x.swapaxes(1, 2), out=out)
        return
    from nanoeuler.engines.cpu.gemm import BELOW, multiply_heads

    multiply_heads(x[:, None], x.swapaxes(1, 2)[:, None], out[:, None], BELOW, work)


@njit(nogil=True, cache=True, error_model="numpy")
def _mirror(squares):
    """Copy what is below the diagonals of squares (n, R, R) to where it is missing above."""
    R = squares.shape[1]
    whole = R // 8 * 8
    for n in range(len(squares)):
        s = squares[n]
        for k in range(0, whole, 8):
            for m in range(0, k, 8):
                for j in range(8):
                    for i in range(8):
                        s[m + j, k + i] = s[k + i, m + j]
            for i in range(k, k + 8):
                for j in range(k, i):
                    s[j, i] = s[i, j]
        for i in range(whole, R):
            for j in range(i):
                s[j, i] = s[i, j]


@njit(nogil=True, cache=True, error_model="numpy")
def _polynomial(s, t, a, b, c):
    """t = a + b s + c t on and below the diagonals of s, t (n, R, R); t comes as the square of s.

    Eq. eq-muon-newton-schulz without its last factor.
    """
    for n in range(len(s)):
        for i in range(s.shape[1]):
            for j in range(i + 1):
                t[n, i, j] = b * s[n, i, j] + c * t[n, i, j]
            t[n, i, i] += a


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc"})  # adds in any order
def _normed(x, y):
    """y = x over its Frobenius norm, both (I, O); zeros stay zeros."""
    total = 0.0
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            total += np.float64(x[i, j]) * np.float64(x[i, j])
    factor = 1 / np.sqrt(total) if total else 0.0
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * factor


class Room:
    """Memory in which up to `count` matrices of one shape (I, O) and dtype are orthogonalized.

    They are put into `y` (count, I, O) by `put`, and are there again after `turn`.
    """

    def __init__(self, count: int, shape: tuple[int, int], dtype: np.dtype) -> None:
        R, single, make = min(shape), np.dtype(dtype) == np.float32, _plain
        if single:
            from nanoeuler.engines.cpu.gemm import WORK
            from nanoeuler.engines.cpu.memory import aligned as make
        self.wide = R == shape[0]
        self.y, self.other = make(count, *shape), make(count, *shape)
        self.squares, self.powers = make(count, R, R), make(count, R, R)
        self.work = make(WORK if single else 0)

    def put(self, place: int, x: np.ndarray) -> None:
        """Put x (I, O), divided by its norm, into a place."""
        _normed(x, self.y[place])

    def turn(
        self, count: int, steps: int = STEPS,
        coefficients: tuple[float, float, float] = COEFFICIENTS,
    ) -> None:  # fmt: skip
        """Newton-Schulz steps, eq-muon-newton-schulz, for the first `count` matrices."""
        factors, work = map(self.y.dtype.type, coefficients), self.work
        (a, b, c), s, t = factors, self.squares[:count], self.powers[:count]
        for _ in range(steps):
            y, out = self.y[:count], self.other[:count]
            gram(y if self.wide else y.swapaxes(1, 2), s, work)
            _mirror(s)
            gram(s, t, work)
            _polynomial(s, t, a, b, c)
            _mirror(t)
            product(*(t, y) if self.wide else (y, t), out, work)
            self.y, self.other = self.other, self.y


def _plain(*shape):
    return np.empty(shape)


def orthogonalize(
    x: np.ndarray, steps: int = STEPS,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
) -> np.ndarray:  # fmt: skip
    """About U V^T of x = U S V^T (I, O), float32 or float64: its singular values are near 1.

    In the dtype of x. Zeros stay zeros.
    """
    room = Room(1, x.shape, x.dtype)
    room.put(0, x)
    room.turn(1, steps, coefficients)
    return room.y[0]


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
    """What Muon adds to a step of `batch_size` whole contexts, as a line of text."""
    more = sum(map(flops, matrices(config)))
    share = more / (6 * count_parameters(config) * batch_size * config.context)
    return (f"Muon adds {more / 1e12:,.4f} TFLOP to a step, {share:.1%} of its products; its "
            "state takes what AdamW's does")  # fmt: skip


class Muon(AdamW):
    """AdamW, but for the hidden matrices: see `matrices`. Jordan and others 2024.

    For a matrix, m is the momentum buffer and v stays zero. `threads` share the matrices, and
    change no bit of what comes out.
    """

    momentum, peak = MOMENTUM, MUON_PEAK
    steps, coefficients, crew = STEPS, COEFFICIENTS, None
    # For training on a GPU (chapter 13b).
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
        rounded, decay = weights.flat.dtype.type, self.weight_decay
        mine = {name: slice(max(start, first), min(stop, end))
                for name, (start, stop) in spans.items() if max(start, first) < min(stop, end)}
        for span in mine.values():
            momentum = rounded(self.momentum), rounded(1 - self.momentum)
            _mix(self.m.flat[span], gradients.flat[span], *momentum)
        if end - first < weights.flat.size:
            self._gather(gradients.flat)
        self._turn(gradients, [each for each in these if each.name in mine])
        rate = matrix_rate(lr, weights.config.dim)
        for span in mine.values():
            _move(weights.flat[span], gradients.flat[span], rounded(rate), rounded(decay))

    # %% sec-muon-ranks
    def _gather(self, directions):
        """Make all parts of the directions known to this rank."""
        if self.gather is None:
            raise UserError("Muon was asked for a part of the weights where no other rank has the "
                            "rest: choose the optimizer adamw")  # fmt: skip
        self.gather(directions)

    def _turn(self, directions, these):
        """Put in the place of each of these matrices its step."""
        key = these, self.threads, directions.flat.dtype
        if self.crew is None or self.crew.key != key:
            self.crew = _Crew(*key)

        def of_piece(piece, room):
            places = [directions[each.name][:, each.start : each.start + each.columns]
                      for each in piece]  # fmt: skip
            for i, x in enumerate(places):
                room.put(i, x)
            room.turn(len(piece), self.steps, self.coefficients)
            for x, y in zip(places, room.y, strict=False):  # the last piece may be short
                np.multiply(y, y.dtype.type(matrix_scale(*x.shape)), out=x)

        self.crew.run(of_piece)


# %% sec-muon-ranks
class _Crew:
    """Threads that share `these` matrices in pieces of one shape, with a room for each shape."""

    def __init__(self, these: list[Matrix], threads: int, dtype: np.dtype) -> None:
        self.key, shapes = (these, threads, dtype), {}
        for each in these:
            shapes.setdefault((each.rows, each.columns), []).append(each)
        self.pieces, most = [], {}
        for (rows, columns), group in shapes.items():
            n = min(max(1, PIECE // (rows * columns)), -(-len(group) // threads))
            self.pieces += [group[i : i + n] for i in range(0, len(group), n)]
            most[rows, columns] = n
        self.pieces.sort(key=lambda piece: -sum(map(flops, piece)))
        self.free = [{shape: Room(n, shape, dtype) for shape, n in most.items()}
                     for _ in range(threads)]  # fmt: skip
        self.map = ThreadPoolExecutor(threads).map if threads > 1 else map

    def run(self, function: Callable[[list[Matrix], Room], None]) -> None:
        """Call it for each piece, with a room that no other piece uses meanwhile."""

        def call(piece):
            rooms = self.free.pop()  # there are as many as threads
            function(piece, rooms[piece[0].rows, piece[0].columns])
            self.free.append(rooms)

        for _ in self.map(call, self.pieces):
            pass


def _between(spans, first: int, end: int) -> Iterator[tuple[int, int]]:
    """What of first .. end lies in none of the spans, which are in order."""
    for start, stop in (*spans, (end, end)):
        if first < min(start, end):
            yield first, min(start, end)
        first = max(first, stop)
