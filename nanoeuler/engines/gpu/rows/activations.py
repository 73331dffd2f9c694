# Made from book/j-row-kernels.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-rows-gates
"""SwiGLU and GELU, forward and backward: rows of u to rows of h, rows of dh to rows of du.

SwiGLU: u (rows, 2F) is gate, then up; h (rows, F). GELU, in the tanh form or exact, and ReLU
squared: u and h (rows, F). All of one kind, "bf16" or "float32". A thread keeps its
columns and goes down the rows (`Walk`); the sums of du's columns, float32, come with the backward.
du may be u.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.lang import vectors
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.engines.gpu.rows.column_sums import (
    FREE,
    SUMMING,
    Walk,
    make_put,
    make_zero,
    sum_launch,
)
from nanoeuler.engines.gpu.tile.curves import (
    gelu_exact_share,
    gelu_exact_slope,
    gelu_share,
    gelu_slope,
    relu2_share,
    relu2_slope,
    swiglu,
    swiglu_slopes,
)
from nanoeuler.errors import UserError


def shares(name: str) -> tuple[Callable, Callable]:
    """Of an activation without a gate: the share of u that it lets through, and its slope."""
    known = {
        "gelu": (gelu_share, gelu_slope), "gelu_exact": (gelu_exact_share, gelu_exact_slope),
        "relu2": (relu2_share, relu2_slope),
    }  # fmt: skip
    if name not in known:
        raise UserError(f"expected an activation, swiglu, {', '.join(known)}, got {name!r}")
    return known[name]


@functools.cache
def swiglu_kernel(kind: str, threads: int) -> Kernel:
    """h = silu(gate) up; `Walk` says which thread has what of h."""
    width, size = vectors.piece(kind), vectors.SIZES[kind]
    load, store = vectors.make_load(kind, width), vectors.make_store(kind, width)

    def gated(u, h, rows, columns):
        column = int32(cuda.blockIdx.x * threads + cuda.threadIdx.x) * width
        gate, up = cuda.local.array(width, float32), cuda.local.array(width, float32)
        row = int32(cuda.blockIdx.y)
        while row < rows and column < columns:
            start = vectors.place(u, row, 2 * columns, size) + int64(column) * size
            load(gate, 0, start)
            load(up, 0, start + int64(columns) * size)
            for k in range(width):
                gate[k], _ = swiglu(gate[k], up[k])
            store(gate, 0, vectors.place(h, row, columns, size) + int64(column) * size)
            row += int32(cuda.gridDim.y)

    return Kernel(gated, "l l r r", threads, resident=FREE // threads, target=(8, 0))


@functools.cache
def curve_kernel(kind: str, name: str, threads: int) -> Kernel:
    """h = u times its share, one of `shares`; `Walk` says which thread has what."""
    share, _ = shares(name)
    width, size = vectors.piece(kind), vectors.SIZES[kind]
    load, store = vectors.make_load(kind, width), vectors.make_store(kind, width)

    def curved(u, h, rows, columns):
        column = int32(cuda.blockIdx.x * threads + cuda.threadIdx.x) * width
        values, row = cuda.local.array(width, float32), int32(cuda.blockIdx.y)
        while row < rows and column < columns:
            load(values, 0, vectors.place(u, row, columns, size) + int64(column) * size)
            for k in range(width):
                values[k] *= share(values[k])
            store(values, 0, vectors.place(h, row, columns, size) + int64(column) * size)
            row += int32(cuda.gridDim.y)

    return Kernel(curved, "l l r r", threads, resident=FREE // threads, target=(8, 0))


AHEAD = 2  # rows that a thread loads before it uses one, on the way back


class Arrays(NamedTuple):
    """Addresses of what the backward kernels read and write."""

    dh: int
    u: int
    du: int
    h: int


def make_gated_rows(kind: str, count: int, again: bool) -> Callable:
    """gated_rows(of, here, wide, step, half, left, right): `count` rows of `Arrays`, loads first.

    here, wide: bytes from the beginning of h and u to this thread's in the first row; step: of h
    from row to row; half: from gate to up. Adds du to left (dgate) and right (dup).
    """
    width, many = vectors.piece(kind), count * vectors.piece(kind)
    load, load_u = vectors.make_load(kind, width), vectors.make_load(kind, width, own=True)
    store = vectors.make_store(kind, width)

    def gated_rows(of, here, wide, step, half, left, right):
        slope, gate = cuda.local.array(many, float32), cuda.local.array(many, float32)
        up, value = cuda.local.array(many, float32), cuda.local.array(width, float32)
        for i in range(count):
            load(slope, i * width, of.dh + here + i * step)
            load_u(gate, i * width, of.u + wide + i * 2 * step)
            load_u(up, i * width, of.u + wide + i * 2 * step + half)
        for i in range(count):
            for k in range(width):
                at = i * width + k
                value[k], sigma = swiglu(gate[at], up[at])
                gate[at], up[at] = swiglu_slopes(slope[at], gate[at], up[at], sigma)
                left[k] += gate[at]
                right[k] += up[at]
            store(gate, i * width, of.du + wide + i * 2 * step)
            store(up, i * width, of.du + wide + i * 2 * step + half)
            if again:
                store(value, 0, of.h + here + i * step)

    return gated_rows


@functools.cache
def swiglu_backward_kernel(kind: str, again: bool, summed: bool, threads: int) -> Kernel:
    """du of dh and u, and h once more (again), and partial sums of du's columns (summed)."""
    width, size = vectors.piece(kind), vectors.SIZES[kind]
    one, several = make_gated_rows(kind, 1, again), make_gated_rows(kind, AHEAD, again)
    zero, put = make_zero(width), make_put(width)

    def gated_backward(of: Arrays, partials, rows, columns):
        column = int32(cuda.blockIdx.x * threads + cuda.threadIdx.x) * width
        left, right = cuda.local.array(width, float32), cuda.local.array(width, float32)
        zero(left)
        zero(right)
        row, slabs, half = int32(cuda.blockIdx.y), int32(cuda.gridDim.y), int64(columns) * size
        if column < columns:
            at = int64(column) * size
            while row + (AHEAD - 1) * slabs < rows:
                here = row * half + at
                several(of, here, here + row * half, slabs * half, half, left, right)
                row += AHEAD * slabs
            while row < rows:
                here = row * half + at
                one(of, here, here + row * half, slabs * half, half, left, right)
                row += slabs
            if summed:
                out = vectors.place(partials, cuda.blockIdx.y, 2 * columns, 4) + int64(column) * 4
                put(left, out)
                put(right, out + int64(columns) * 4)

    args = "l l l l l r r"
    return Kernel(gated_backward, args, threads, resident=SUMMING // threads, target=(8, 0))


def make_curved_rows(kind: str, count: int, again: bool, name: str) -> Callable:
    """curved_rows(of, here, step, sums): `count` rows of `Arrays`, loads first.

    here: bytes to this thread's in the first row; step: from row to row. Adds du to sums.
    """
    share, slope_of = shares(name)
    width, many = vectors.piece(kind), count * vectors.piece(kind)
    load, load_u = vectors.make_load(kind, width), vectors.make_load(kind, width, own=True)
    store = vectors.make_store(kind, width)

    def curved_rows(of, here, step, sums):
        slope, value = cuda.local.array(many, float32), cuda.local.array(many, float32)
        for i in range(count):
            load(slope, i * width, of.dh + here + i * step)
            load_u(value, i * width, of.u + here + i * step)
        for i in range(count):
            for k in range(width):
                at = i * width + k
                slope[at] *= slope_of(value[at])
                sums[k] += slope[at]
                if again:
                    value[at] *= share(value[at])
            store(slope, i * width, of.du + here + i * step)
            if again:
                store(value, i * width, of.h + here + i * step)

    return curved_rows


@functools.cache
def curve_backward_kernel(
    kind: str, again: bool, summed: bool, name: str, threads: int
) -> Kernel:
    """du of dh and u, h once more (again), and partial sums of du's columns (summed)."""
    width, size, zero = vectors.piece(kind), vectors.SIZES[kind], make_zero(vectors.piece(kind))
    put = make_put(width)
    one, several = (make_curved_rows(kind, count, again, name) for count in (1, AHEAD))

    def curved_backward(of: Arrays, partials, rows, columns):
        column = int32(cuda.blockIdx.x * threads + cuda.threadIdx.x) * width
        sums = cuda.local.array(width, float32)
        zero(sums)
        row, slabs = int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
        if column < columns:
            at, step = int64(column) * size, slabs * (int64(columns) * size)
            while row + (AHEAD - 1) * slabs < rows:
                several(of, vectors.place(at, row, columns, size), step, sums)
                row += AHEAD * slabs
            while row < rows:
                one(of, vectors.place(at, row, columns, size), step, sums)
                row += slabs
            if summed:
                put(sums, vectors.place(partials, cuda.blockIdx.y, columns, 4) + int64(column) * 4)

    args = "l l l l l r r"
    return Kernel(curved_backward, args, threads, resident=SUMMING // threads, target=(8, 0))


def _walk(
    name: str, u: Any, room: int, multiprocessors: int, **others: tuple[Any, int]
) -> tuple[str, Walk, bool]:
    # The kind of u (rows, F or 2F) and who has what of (rows, F); whether u is gate and up.
    gated = name == "swiglu"
    kind, rows, columns = vectors.kind_of(u), u.shape[0], u.shape[1] // (1 + gated)
    for what, (array, wide) in {"u": (u, 1 + gated), **others}.items():
        if array is not None:
            vectors.expect(f"{name}'s {what}", array, (rows, wide * columns), kind)
    return kind, Walk(rows, columns, vectors.piece(kind), room, multiprocessors), gated


def activation_launch(
    name: str, u: Any, h: Any, multiprocessors: int = MULTIPROCESSORS
) -> Launch:
    """h (rows, F), an activation of u (rows, F), or "swiglu" of gate and up (rows, 2F).

    u and h are of one kind, "bf16" or "float32".
    """
    kind, walk, gated = _walk(name, u, FREE, multiprocessors, h=(h, 1))
    if gated:
        kernel = swiglu_kernel(kind, walk.threads)
    else:
        kernel = curve_kernel(kind, name, walk.threads)
    return Launch(kernel, walk.grid, (u, h, walk.rows, walk.columns))


def partials_shape(
    rows: int, F: int, kind: str, wide: int, multiprocessors: int = MULTIPROCESSORS
) -> tuple[int, int]:
    """The shape of the partial sums of du (rows, wide * F): wide is 2 of SwiGLU, 1 of GELU."""
    return Walk(rows, F, vectors.piece(kind), SUMMING, multiprocessors).slabs, wide * F


def activation_backward_launches(
    name: str, dh: Any, u: Any, du: Any, *, h: Any = None, sums: tuple[Any, Any] | None = None,
    multiprocessors: int = MULTIPROCESSORS,
) -> list[Launch]:  # fmt: skip
    """du, which may be u, of dh (rows, F) and u, as of `activation_launch`; all of one kind.

    h (rows, F): made again if given. sums: dbias float32, a number for each column of u, to which
    du's sums over rows are added, and memory for partial sums, see `partials_shape`.
    """
    wide = u.shape[1] // dh.shape[1]
    others = {"dh": (dh, 1), "du": (du, wide), "h": (h, 1)}
    kind, walk, gated = _walk(name, u, SUMMING, multiprocessors, **others)
    wanted = h is not None, sums is not None
    if gated:
        kernel = swiglu_backward_kernel(kind, *wanted, walk.threads)
    else:
        kernel = curve_backward_kernel(kind, *wanted, name, walk.threads)
    args = dh, u, du, vectors.given(h), sums[1] if sums else 0, walk.rows, walk.columns
    launches = [Launch(kernel, walk.grid, args)]
    if sums:
        dbias, partials = sums
        vectors.expect("partial sums", partials, (walk.slabs, u.shape[1]), "float32")
        launches.append(sum_launch(partials, (dbias,), add=True))
    return launches
