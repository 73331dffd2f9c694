# Made from book/j-row-kernels.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-rows-stream
"""Residual addition and norm in one pass: x' = x + weight t, n = norm(x') gain (+ bias).

x, x' (rows, columns) are of the residual stream's kind, t and n of the activations', each "bf16" or
"float32"; x' may be x. gain, bias (columns,) float32. stats float32: of "rms" (rows, 1), one over
the root mean square; of "layer" (rows, 2), the mean and one over the deviation. n and stats are
those of x' as it is stored, so that they can be computed again from it, bit for bit. Sums in
float32.
"""

import functools
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, cover
from nanoeuler.engines.gpu.lang.ptx import inverse_root, store_float
from nanoeuler.engines.gpu.lang.vectors import (
    SIZES,
    Layout,
    expect,
    given,
    kind_of,
    make_load,
    make_load_row,
    make_round_row,
    make_row_sum,
    make_store,
    make_store_row,
    piece,
    place,
)
from nanoeuler.errors import UserError
from nanoeuler.model.layers import LAYERNORM_EPS, RMSNORM_EPS

NORMS = {"rms": 1, "layer": 2}  # and the numbers that each keeps of a row
MOST = 8  # columns that a lane is meant to hold: many small blocks (see the attempts)
EPS = {"rms": RMSNORM_EPS, "layer": LAYERNORM_EPS}


class Norm(NamedTuple):
    """A norm, "rms" or "layer", and its epsilon, which a kernel is compiled for."""

    kind: str
    eps: float


def make_norm(layout: Layout, norm: Norm) -> Callable:
    """normed(values, stats, lane): values = (values - mean) / deviation, of a row; fills stats.

    Of "rms" the mean is left where it is.
    """
    row_sum, eps, share = make_row_sum(layout), norm.eps, 1 / layout.columns
    columns, width, lanes, whole = layout.columns, layout.width, layout.lanes, layout.whole
    pieces, centred = layout.pieces, norm.kind == "layer"

    def inside(j, lane):
        return whole or (j * lanes + lane) * width < columns

    def squares(values, mean, lane):
        total = float32(0)
        for j in range(pieces):
            if inside(j, lane):
                for k in range(j * width, (j + 1) * width):
                    values[k] -= mean
                    total += values[k] * values[k]
        return row_sum(total)

    def normed(values, stats, lane):
        mean = float32(0)
        if centred:
            for k in range(pieces * width):
                mean += values[k]
            mean = row_sum(mean) * float32(share)
        inverse = inverse_root(squares(values, mean, lane) * float32(share) + float32(eps))
        for k in range(pieces * width):
            values[k] *= inverse
        if lane == 0:
            if centred:
                store_float(stats, mean)
                store_float(stats + 4, inverse)
            else:
                store_float(stats, inverse)

    return normed


class Add(NamedTuple):
    """A residual addition: moved = x + weight t; moved may be x."""

    t: Any
    weight: float
    moved: Any


@functools.cache
def move_norm_kernel(
    columns: int, norm: Norm, stream: str, kind: str, move: bool, biased: bool
) -> Kernel:
    """n = norm(x + weight t) gain + bias, of rows of these kinds; see `move_norm_launch`.

    Block b has rows b * R to b * R + R - 1, a warp each (R = 4), or one row, all its warps.
    """
    layout = Layout(columns, piece(stream, kind), MOST)
    load_x = make_load_row(layout, stream, own=move)
    load_t, load_gain = make_load_row(layout, kind), make_load_row(layout, "float32")
    store_x, store_n = make_store_row(layout, stream), make_store_row(layout, kind)
    settle, normed = make_round_row(layout, stream), make_norm(layout, norm)
    lanes, rows_a_block, own = layout.lanes, layout.rows, layout.pieces * layout.width
    size, size_n, kept = SIZES[stream], SIZES[kind], NORMS[norm.kind]

    def move_norm(x, add: Add, n, gain, bias, stats, rows):
        thread = int32(cuda.threadIdx.x)
        row = int32(cuda.blockIdx.x * rows_a_block + thread // lanes)
        lane = int32(thread % lanes)
        values, others = cuda.local.array(own, float32), cuda.local.array(own, float32)
        if row < rows:
            load_x(values, place(x, row, columns, size), lane)
            if move:
                load_t(others, place(add.t, row, columns, size_n), lane)
                for k in range(own):
                    values[k] += add.weight * others[k]
                settle(values)
                store_x(values, place(add.moved, row, columns, size), lane)
            normed(values, stats + int64(row) * (4 * kept), lane)
            load_gain(others, gain, lane)
            for k in range(own):
                values[k] *= others[k]
            if biased:
                load_gain(others, bias, lane)
                for k in range(own):
                    values[k] += others[k]
            store_n(values, place(n, row, columns, size_n), lane)

    return Kernel(move_norm, "l l f l l l l l r", layout.threads, target=(8, 0))


def move_norm_launch(
    norm: str | Norm, x: Any, n: Any, gain: Any, stats: Any, bias: Any = None,
    add: Add | None = None,
) -> Launch:  # fmt: skip
    """n and stats of x, or of the residual stream that `add` makes of x.

    Shapes and kinds as above; "layer" alone takes a bias. A norm's name means its usual epsilon.
    """
    t, weight, moved = add or Add(None, 1.0, None)
    norm = norm if isinstance(norm, Norm) else Norm(norm, EPS.get(norm, 0.0))
    if norm.kind not in NORMS:
        raise UserError(f"norms are {' and '.join(NORMS)}, not {norm.kind!r}")
    if norm.kind == "rms" and bias is not None:
        raise UserError("the root mean square's norm has no bias")
    rows, columns = x.shape
    stream, kind = kind_of(x), kind_of(n)
    expect("x", x, (rows, columns), stream)
    expect("n", n, (rows, columns), kind)
    expect("gain", gain, (columns,), "float32")
    expect("stats", stats, (rows, NORMS[norm.kind]), "float32")
    if t is not None:
        expect("t", t, (rows, columns), kind)
        expect("the moved stream", moved, (rows, columns), stream)
    if bias is not None:
        expect("bias", bias, (columns,), "float32")
    kernel = move_norm_kernel(columns, norm, stream, kind, t is not None, bias is not None)
    args = x, given(t), weight, given(moved), n, gain, given(bias), stats, rows
    return Launch(kernel, (cover(rows, Layout(columns, piece(stream, kind), MOST).rows),), args)


ADDERS = 256  # threads of a block that adds


@functools.cache
def add_scaled_kernel(stream: str, kind: str) -> Kernel:
    """out = x + weight t, all in one line of `count` pieces; thread i of the grid has piece i."""
    width, size, size_t = piece(stream, kind), SIZES[stream], SIZES[kind]
    load_x, load_t = make_load(stream, width, own=True), make_load(kind, width)
    store = make_store(stream, width)

    def add_scaled(x, t, weight, out, count):
        i = int32(cuda.blockIdx.x * ADDERS + cuda.threadIdx.x)
        values, others = cuda.local.array(width, float32), cuda.local.array(width, float32)
        if i < count:
            load_x(values, 0, x + int64(i) * (width * size))
            load_t(others, 0, t + int64(i) * (width * size_t))
            for k in range(width):
                values[k] += weight * others[k]
            store(values, 0, out + int64(i) * (width * size))

    return Kernel(add_scaled, "l l f l r", ADDERS, target=(8, 0))


def add_scaled_launch(x: Any, t: Any, weight: float, out: Any) -> Launch:
    """out = x + weight t; out may be x. x and out of one kind, t of any, all of one shape."""
    stream, kind = kind_of(x), kind_of(t)
    width, elements = piece(stream, kind), prod(x.shape)
    for name, array, its in (("x", x, stream), ("t", t, kind), ("the sum", out, stream)):
        expect(name, array, tuple(x.shape), its)
    if elements % width or not elements:
        raise UserError(f"what is added has a multiple of {width} elements, not {elements}")
    count = elements // width
    args = x, t, weight, out, count
    return Launch(add_scaled_kernel(stream, kind), (cover(count, ADDERS),), args)
