# Made from book/j-row-kernels.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-rows-rotary
"""RoPE on the queries and keys inside the products' output, in place, forward and backward.

heads (rows, N * D), "bf16" or "float32": N heads of width D a row; the first n are rotated.
Row i is position start + i % T of its sequence. cos, sin (context, D / 2) float32. D is a multiple
of 16 for bf16, of 8 for float32. Equation eq-layers-rope. Where heads are normed before that
(QK-norm), one kernel does both.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.lang import vectors
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, cover
from nanoeuler.engines.gpu.lang.ptx import divide, inverse_root, shuffle_xor, store_float
from nanoeuler.errors import UserError

ROWS = 4  # of a block, a warp each


class Halves(NamedTuple):
    """A lane's numbers of both halves of a head."""

    a: Any
    b: Any


class Tables(NamedTuple):
    """Addresses of the tables of cosines and sines."""

    cos: int
    sin: int


def make_halves(kind: str, D: int) -> tuple[Callable, Callable, Callable]:
    """load_two(x, at), store_two(x, at): a lane's `Halves` of a head; rotate(x, tables, place,
    sign): rotated by sign times the angles from byte `place` on."""
    width, size, half = vectors.piece(kind), vectors.SIZES[kind], D // 2
    load, store = vectors.make_load(kind, width, own=True), vectors.make_store(kind, width)
    load_turn = vectors.make_load("float32", width)

    def load_two(x, at):
        load(x.a, 0, at)
        load(x.b, 0, at + half * size)

    def store_two(x, at):
        store(x.a, 0, at)
        store(x.b, 0, at + half * size)

    def rotate(x, tables, angle, sign):
        cos, sin = cuda.local.array(width, float32), cuda.local.array(width, float32)
        load_turn(cos, 0, tables.cos + angle)
        load_turn(sin, 0, tables.sin + angle)
        for k in range(width):
            left, right, sine = x.a[k], x.b[k], sign * sin[k]
            x.a[k] = left * cos[k] - right * sine
            x.b[k] = left * sine + right * cos[k]

    return load_two, store_two, rotate


@functools.cache
def rope_kernel(kind: str, n: int, N: int, D: int) -> Kernel:
    """Rotates the first n of N heads by sign times each position's angles; see `rope_launch`.

    Lane l of a row's warp has pieces l, l + 32, ... of the n * D / 2 pairs (i, i + D / 2).
    """
    width, size, half = vectors.piece(kind), vectors.SIZES[kind], D // 2
    pieces = half // width  # of a head
    load_two, store_two, rotate = make_halves(kind, D)

    def rope(heads, tables: Tables, sign, rows, T, start):
        row = int32(cuda.blockIdx.x * ROWS + cuda.threadIdx.x // vectors.LANES)
        x = Halves(cuda.local.array(width, float32), cuda.local.array(width, float32))
        if row < rows:
            position = int32(start + row - T * divide(row, T))
            for i in range(int32(cuda.threadIdx.x % vectors.LANES), n * pieces, vectors.LANES):
                head = divide(i, pieces)
                column = int32(i - head * pieces) * width
                at = vectors.place(heads, row, N * D, size) + int64(head * D + column) * size
                load_two(x, at)
                angle = vectors.place(0, position, half, 4) + int64(column) * 4
                rotate(x, tables, angle, sign)
                store_two(x, at)

    return Kernel(rope, "l l l f r r r", vectors.LANES * ROWS, target=(8, 0))


def rope_launch(
    heads: Any, cos: Any, sin: Any, n: int, T: int, *, start: int = 0, back: bool = False
) -> Launch:
    """Rotate the first n heads of each row, in place; back: by the opposite angles, the gradient.

    heads (rows, N * D), rows a multiple of T: positions start to start + T - 1 of each sequence.
    """
    (rows, width), (context, half) = heads.shape, cos.shape
    kind, D = vectors.kind_of(heads), 2 * half
    if D % (2 * vectors.piece(kind)) or D < 1 or width % D or not 0 <= n <= width // D:
        raise UserError(
            f"{n} heads of width {D}, {2 * vectors.piece(kind)} at a time, are not in {width}"
        )
    if T < 1 or rows % T or start < 0 or start + T > context:
        raise UserError(f"{rows} rows are no sequences of {T} positions from {start} to {context}")
    vectors.expect("heads", heads, (rows, width), kind)
    for name, table in (("cos", cos), ("sin", sin)):
        vectors.expect(name, table, (context, half), "float32")
    args = heads, cos, sin, -1.0 if back else 1.0, rows, T, start
    return Launch(rope_kernel(kind, n, width // D, D), (cover(rows, ROWS),), args)


# %% sec-rows-head-norm
class HeadNorm(NamedTuple):
    """QK-norm, of a row's first heads: H queries, then keys. Equation eq-attention-qk-norm.

    gains (D,) float32 of queries and of keys; eps: added under the root. cos, sin: tables of RoPE
    after the norm, or None.
    """

    H: int
    q_gain: Any
    k_gain: Any
    eps: float
    cos: Any = None
    sin: Any = None


class HeadForm(NamedTuple):
    """What QK-norm's kernels are compiled for: n of N heads of width D are normed, the first H of
    them queries; turned: whether RoPE rotates them."""

    kind: str
    n: int
    N: int
    D: int
    H: int
    eps: float
    turned: bool

    @property
    def pieces(self) -> int:
        """The lanes that have a head."""
        return self.D // 2 // vectors.piece(self.kind)

    @property
    def rounds(self) -> int:
        """How many rounds a warp needs for a row."""
        return cover(self.n * self.pieces, vectors.LANES)


def make_head_sum(form: HeadForm) -> Callable:
    """head_sum(value): the sum over the lanes of a head."""
    pieces = form.pieces

    def head_sum(value):
        for step in range(5):
            if (1 << step) < pieces:
                value += shuffle_xor(value, 1 << step)
        return value

    return head_sum


class Gains(NamedTuple):
    """Addresses of the gains of queries and of keys."""

    q: int
    k: int


def make_lane(form: HeadForm) -> tuple[Callable, Callable, Callable]:
    """find(j, lane) -> a lane's head in round j, its first column and its byte of a row;
    load_gains(gain, gains, head, column): the gains of both its halves;
    root(total): the norm's factor, from a lane's sum of squares."""
    D, H, half, pieces = form.D, form.H, form.D // 2, form.pieces
    width, size, share, eps = vectors.piece(form.kind), vectors.SIZES[form.kind], 1 / D, form.eps
    load, head_sum = vectors.make_load("float32", width), make_head_sum(form)

    def find(j, lane):
        i = int32(j * vectors.LANES + lane)
        head = divide(i, pieces)
        column = int32(i - head * pieces) * width
        return head, column, int64(head * D + column) * size

    def load_gains(gain, gains, head, column):
        at = (gains.q if head < H else gains.k) + int64(column) * 4
        load(gain.a, 0, at)
        load(gain.b, 0, at + half * 4)

    def root(total):
        return inverse_root(head_sum(total) * float32(share) + float32(eps))

    return find, load_gains, root


@functools.cache
def head_norm_kernel(form: HeadForm) -> Kernel:
    """Norms heads in place, then rotates them; raw: as they were. See `head_norm_launch`."""
    n, N, D, turned, rounds, half = form.n, form.N, form.D, form.turned, form.rounds, form.D // 2
    width, size = vectors.piece(form.kind), vectors.SIZES[form.kind]
    load_two, store_two, rotate = make_halves(form.kind, D)
    find, load_gains, root_of = make_lane(form)

    def head_norm(heads, raw, gains: Gains, tables: Tables, rows, T, start):
        lane = int32(cuda.threadIdx.x % vectors.LANES)
        row = int32(cuda.blockIdx.x * ROWS + cuda.threadIdx.x // vectors.LANES)
        x = Halves(cuda.local.array(width, float32), cuda.local.array(width, float32))
        gain = Halves(cuda.local.array(width, float32), cuda.local.array(width, float32))
        if row < rows:
            position = int32(start + row - T * divide(row, T))
            for j in range(rounds):
                head, column, at = find(j, lane)
                total = float32(0)
                if head < n:
                    load_two(x, vectors.place(heads, row, N * D, size) + at)
                    store_two(x, vectors.place(raw, row, n * D, size) + at)
                    for k in range(width):
                        total += x.a[k] * x.a[k] + x.b[k] * x.b[k]
                root = root_of(total)
                if head < n:
                    load_gains(gain, gains, head, column)
                    for k in range(width):
                        x.a[k] *= root * gain.a[k]
                        x.b[k] *= root * gain.b[k]
                    if turned:
                        angle = vectors.place(0, position, half, 4) + int64(column) * 4
                        rotate(x, tables, angle, float32(1))
                    store_two(x, vectors.place(heads, row, N * D, size) + at)

    return Kernel(head_norm, "l l l l l l r r r", vectors.LANES * ROWS, target=(8, 0))


def make_leave_gains(form: HeadForm) -> Callable:
    """leave(sums, partials, t): a block's sums of both gains, a row of partials (blocks, 2 D).

    sums: a lane's, of its columns: of queries the left half's and the right half's, then of keys.
    """
    D, pieces, width, half = form.D, form.pieces, vectors.piece(form.kind), form.D // 2
    every, threads = ROWS * 2 * form.D, vectors.LANES * ROWS

    def leave(sums, partials, t):
        both = cuda.shared.array(every, float32)
        warp, lane = t // vectors.LANES, t % vectors.LANES
        for part in range(4):
            for k in range(width):
                value = sums[part * width + k]
                for step in range(5):
                    if (1 << step) >= pieces:
                        value += shuffle_xor(value, 1 << step)
                if lane < pieces:
                    both[warp * 2 * D + part * half + lane * width + k] = value
        cuda.syncthreads()  # all warps' sums are there
        for i in range(t, 2 * D, threads):
            total = float32(0)
            for w in range(ROWS):
                total += both[w * 2 * D + i]
            store_float(vectors.place(partials, cuda.blockIdx.x, 2 * D, 4) + int64(i) * 4, total)

    return leave


def make_slopes(form: HeadForm) -> tuple[Callable, Callable]:
    """products(g, x, gain) -> the sums of x^2 and of gain g x over a lane's `Halves`; slopes(g, x,
    gain, sums, head, root, along): gradients g become those before the norm, and join the sums of
    queries' gains, or of keys' behind them."""
    n, H, width = form.n, form.H, vectors.piece(form.kind)

    def products(g, x, gain):
        total, along = float32(0), float32(0)
        for k in range(width):
            total += x.a[k] * x.a[k] + x.b[k] * x.b[k]
            along += gain.a[k] * g.a[k] * x.a[k] + gain.b[k] * g.b[k] * x.b[k]
        return total, along

    def half_slopes(g, x, gain, sums, at, root, along):
        for k in range(width):
            x_hat = x[k] * root
            sums[at + k] += g[k] * x_hat
            g[k] = root * (gain[k] * g[k] - x_hat * along)

    def slopes(g, x, gain, sums, head, root, along):
        if head < H:
            half_slopes(g.a, x.a, gain.a, sums, 0, root, along)
            half_slopes(g.b, x.b, gain.b, sums, width, root, along)
        elif head < n:
            half_slopes(g.a, x.a, gain.a, sums, 2 * width, root, along)
            half_slopes(g.b, x.b, gain.b, sums, 3 * width, root, along)

    return products, slopes


@functools.cache
def head_norm_backward_kernel(form: HeadForm) -> Kernel:
    """The gradient in place, and partial sums of the gains': see `head_norm_backward_launch`."""
    n, N, D, turned, rounds = form.n, form.N, form.D, form.turned, form.rounds
    width, size, half, share = vectors.piece(form.kind), vectors.SIZES[form.kind], D // 2, 1 / D
    load_two, store_two, rotate = make_halves(form.kind, D)
    (find, load_gains, root_of), (products, slopes) = make_lane(form), make_slopes(form)
    head_sum, leave, four = make_head_sum(form), make_leave_gains(form), 4 * width

    def head_norm_backward(dheads, raw, gains: Gains, tables: Tables, partials, rows, T):
        t = int32(cuda.threadIdx.x)
        row = int32(cuda.blockIdx.x * ROWS + t // vectors.LANES)
        g = Halves(cuda.local.array(width, float32), cuda.local.array(width, float32))
        x = Halves(cuda.local.array(width, float32), cuda.local.array(width, float32))
        gain = Halves(cuda.local.array(width, float32), cuda.local.array(width, float32))
        sums = cuda.local.array(four, float32)
        for k in range(four):
            sums[k] = float32(0)
        while row < rows:
            position = int32(row - T * divide(row, T))
            for j in range(rounds):
                head, column, at = find(j, int32(t % vectors.LANES))
                total, along = float32(0), float32(0)
                if head < n:
                    load_two(g, vectors.place(dheads, row, N * D, size) + at)
                    load_two(x, vectors.place(raw, row, n * D, size) + at)
                    load_gains(gain, gains, head, column)
                    if turned:
                        angle = vectors.place(0, position, half, 4) + int64(column) * 4
                        rotate(g, tables, angle, float32(-1))
                    total, along = products(g, x, gain)
                root = root_of(total)
                along = head_sum(along) * root * float32(share)
                slopes(g, x, gain, sums, head, root, along)
                if head < n:
                    store_two(g, vectors.place(dheads, row, N * D, size) + at)
            row += int32(cuda.gridDim.x * ROWS)
        leave(sums, partials, t)

    return Kernel(head_norm_backward, "l l l l l l l r r", vectors.LANES * ROWS, target=(8, 0))


def _head_form(heads: Any, raw: Any, norm: HeadNorm, T: int, start: int) -> HeadForm:
    # What the kernels are made for; UserError where the arrays do not fit.
    (rows, width), (D,) = heads.shape, norm.q_gain.shape
    kind, n = vectors.kind_of(heads), raw.shape[1] // D
    form = HeadForm(kind, n, width // D, D, norm.H, norm.eps, norm.cos is not None)
    if form.pieces not in (1, 2, 4, 8, 16, 32) or width % D or not 0 < norm.H <= n <= form.N:
        raise UserError(
            f"heads of width {D}, {norm.H} of {n} of them queries, are not normed in rows of "
            f"{width}"
        )
    vectors.expect("heads", heads, (rows, width), kind)
    vectors.expect("heads before their norm", raw, (rows, n * D), kind)
    for name in ("q_gain", "k_gain"):
        vectors.expect(name, getattr(norm, name), (D,), "float32")
    most = norm.cos.shape[0] if form.turned else start + T
    if T < 1 or rows % T or start < 0 or start + T > most:
        raise UserError(f"{rows} rows are no sequences of {T} positions from {start} to {most}")
    for name in ("cos", "sin") if form.turned else ():
        vectors.expect(name, getattr(norm, name), (most, D // 2), "float32")
    return form


def _head_args(norm: HeadNorm) -> tuple[Any, ...]:
    return norm.q_gain, norm.k_gain, vectors.given(norm.cos), vectors.given(norm.sin)


def head_norm_launch(heads: Any, raw: Any, norm: HeadNorm, T: int, *, start: int = 0) -> Launch:
    """Norm the queries and keys of each row in place, and rotate them.

    heads (rows, N * D), rows a multiple of T, as for `rope_launch`; raw (rows, n * D): where
    queries and keys are kept as they were, n of them.
    """
    form = _head_form(heads, raw, norm, T, start)
    rows = heads.shape[0]
    args = heads, raw, *_head_args(norm), rows, T, start
    return Launch(head_norm_kernel(form), (cover(rows, ROWS),), args)


def head_norm_blocks(rows: int, multiprocessors: int = MULTIPROCESSORS) -> int:
    """Blocks of the backward, each of which leaves a row of partial sums."""
    return min(cover(rows, ROWS), 4 * multiprocessors)


def head_norm_backward_launch(
    dheads: Any, raw: Any, norm: HeadNorm, partials: Any, T: int
) -> Launch:
    """The gradient of `head_norm_launch` from position 0, in place.

    partials (blocks, 2 D) float32: sums of the gradients of both gains; as many blocks are run.
    Equation eq-rows-head-norm.
    """
    form, blocks = _head_form(dheads, raw, norm, T, 0), partials.shape[0]
    vectors.expect("partial sums", partials, (blocks, 2 * form.D), "float32")
    args = dheads, raw, *_head_args(norm), partials, dheads.shape[0], T
    return Launch(head_norm_backward_kernel(form), (blocks,), args)
