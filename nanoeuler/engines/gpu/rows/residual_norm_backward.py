# Made from book/j-row-kernels.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-rows-backward
"""Backward of residual addition and norm: from dn to dx, and the sums over rows for parameters.

In one pass over dn, x' and the dx that is there: dx (rows, columns), of the gradient stream's kind;
a copy, weight dx, of the activations' kind, for the product whose output was added; and partial
sums of dn x^ (gain), dn (bias), weight dx (its bias). Equations eq-backprop-rmsnorm, -layernorm.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, cover
from nanoeuler.engines.gpu.lang.vectors import (
    LANES,
    SIZES,
    Layout,
    expect,
    given,
    kind_of,
    make_load_row,
    make_round_row,
    make_row_sum,
    make_store,
    make_store_row,
    piece,
    place,
)
from nanoeuler.engines.gpu.rows.column_sums import sum_launch
from nanoeuler.engines.gpu.rows.residual_norm import NORMS
from nanoeuler.errors import UserError

MOST = 32  # columns that a lane is meant to hold: few blocks, few partial sums


@dataclass(frozen=True)
class Form:
    """What a backward kernel does. stream, kind, gradient: of x', of dn and the copy, of dx.

    add: whether there is a dx to add to; copy: whether weight dx is wanted; biased, moved: whether
    the sums of dn and of weight dx are wanted, beside those of dn x^.
    """

    columns: int
    norm: str
    stream: str
    kind: str
    gradient: str
    add: bool
    copy: bool
    biased: bool
    moved: bool

    @property
    def layout(self) -> Layout:
        """Which lane holds which columns."""
        return Layout(self.columns, piece(self.stream, self.kind, self.gradient), MOST)

    @property
    def sums(self) -> int:
        """How many sums over rows: of dn x^, dn, weight dx, in this order."""
        return 1 + self.biased + self.moved

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor has registers for: 12 warps if a lane needs few, else 8."""
        few = self.sums == 1 and self.layout.pieces * self.layout.width <= 24
        return max(1, (12 if few else 8) * LANES // self.layout.threads)


class Inputs(NamedTuple):
    """Addresses of what the norm's gradient is made of: dn, x', and what the forward kept."""

    dn: int
    x: int
    stats: int


class Copy(NamedTuple):
    """The copy of dx: what it is multiplied by, and its address."""

    weight: float
    scaled: int


def make_read(form: Form) -> Callable:
    """read(g, x_hat, sums, rows, row, lane) -> inverse: a row of dn and of x^.

    Adds the row to the sums of dn x^ and of dn.
    """
    layout, own = form.layout, form.layout.pieces * form.layout.width
    load_dn, load_x = make_load_row(layout, form.kind), make_load_row(layout, form.stream)
    size, size_x = SIZES[form.kind], SIZES[form.stream]
    columns, centred, biased = form.columns, form.norm == "layer", form.biased
    kept = 4 * NORMS[form.norm]

    def read(g, x_hat, sums, of, row, lane):
        load_dn(g, place(of.dn, row, columns, size), lane)
        load_x(x_hat, place(of.x, row, columns, size_x), lane)
        stats = of.stats + int64(row) * kept
        mean = float32(0)
        if centred:
            mean = ptx.load_float(stats)
            stats += 4
        inverse = ptx.load_float(stats)
        for k in range(own):
            x_hat[k] = (x_hat[k] - mean) * inverse
            sums[k] += g[k] * x_hat[k]                                  # (4)
            if biased:
                sums[own + k] += g[k]                                   # (5)
        return inverse

    return read


def make_slope(form: Form) -> Callable:
    """slope(g, x_hat, gain, inverse, lane): g = the norm's gradient of g = dn, for a row.

    The numbers are those of the equations.
    """
    layout, centred = form.layout, form.norm == "layer"
    row_sum, share = make_row_sum(layout), 1 / layout.columns
    own = layout.pieces * layout.width
    load_gain = make_load_row(layout, "float32")

    def slope(g, x_hat, gain, inverse, lane):
        gains = cuda.local.array(own, float32)
        load_gain(gains, gain, lane)
        along, shift = float32(0), float32(0)
        for k in range(own):
            g[k] *= gains[k]                                            # (1)
            shift += g[k]                                               # (2)
            along += g[k] * x_hat[k]                                    # (3)
        along = row_sum(along) * float32(share)
        if centred:
            shift = row_sum(shift) * float32(share)
            for k in range(own):
                g[k] -= shift
        for k in range(own):
            g[k] = (g[k] - x_hat[k] * along) * inverse

    return slope


def add_piece(sums, i, address, first):
    """Four of `sums` to shared memory: the first warp stores, the others add."""
    a, b, c, d = sums[i], sums[i + 1], sums[i + 2], sums[i + 3]
    if not first:
        e, f, g, h = ptx.load_shared_float4(address)
        a, b, c, d = e + a, f + b, g + c, h + d
    ptx.store_shared_float4(address, a, b, c, d)


def make_write_sums(form: Form) -> Callable:
    """write_sums(sums, out, lane, warp): the block's sums, each warp's added in order, to `out`."""
    layout, width, count = form.layout, form.layout.width, form.sums
    columns, lanes, whole, pieces = layout.columns, layout.lanes, layout.whole, layout.pieces
    own, warps, threads = pieces * width, layout.rows, layout.threads
    size = count * columns if warps > 1 else 4
    store = make_store("float32", 4)

    def directly(sums, out, lane, warp):
        for s in range(count):
            for j in range(pieces):
                column = (j * lanes + lane) * width
                if whole or column < columns:
                    for k in range(0, width, 4):
                        at = (s * columns + column + k) * 4
                        store(sums, s * own + j * width + k, out + at)

    def in_turn(sums, out, lane, warp):
        pile = cuda.shared.array(size, float32)
        place_of = ptx.shared_address(pile)
        for turn in range(warps):
            if warp == turn:
                for s in range(count):
                    for j in range(pieces):
                        column = (j * lanes + lane) * width
                        if whole or column < columns:
                            for k in range(0, width, 4):
                                at = place_of + (s * columns + column + k) * 4
                                add_piece(sums, s * own + j * width + k, at, turn == 0)
            cuda.syncthreads()  # the next warp adds to what this one has left
        for i in range(int32(cuda.threadIdx.x), size // 4, threads):
            a, b, c, d = ptx.load_shared_float4(place_of + i * 16)
            ptx.store_float4(out + i * 16, a, b, c, d)

    return in_turn if warps > 1 else directly


def make_leave(form: Form) -> Callable:
    """leave(g, sums, dx, copied, row, lane): a row of dx as it is stored; then g = weight dx to its
    `Copy` and, if wanted, to the last of the sums."""
    layout, columns, own = form.layout, form.columns, form.layout.pieces * form.layout.width
    settle = make_round_row(layout, form.gradient)
    store_dx, store_copy = (make_store_row(layout, kind) for kind in (form.gradient, form.kind))
    size, narrow, last = SIZES[form.gradient], SIZES[form.kind], (form.sums - 1) * own
    copy, moved = form.copy, form.moved

    def leave(g, sums, dx, copied, row, lane):
        settle(g)
        store_dx(g, place(dx, row, columns, size), lane)
        for k in range(own):
            g[k] *= copied.weight
            if moved:
                sums[last + k] += g[k]
        if copy:
            store_copy(g, place(copied.scaled, row, columns, narrow), lane)

    return leave


@functools.cache
def norm_backward_kernel(form: Form) -> Kernel:
    """dx and partial sums from dn; of G blocks of R warps, warp w of b has rows b R + w + i G R."""
    layout = form.layout
    read, slope, write_sums = make_read(form), make_slope(form), make_write_sums(form)
    load_dx, leave = make_load_row(layout, form.gradient, own=True), make_leave(form)
    lanes, rows_a_block, own = layout.lanes, layout.rows, layout.pieces * layout.width
    columns, size, add, all_sums = form.columns, SIZES[form.gradient], form.add, form.sums * own
    wide = form.sums * columns

    def norm_backward(of: Inputs, gain, before, dx, copied: Copy, partials, rows):
        warp, lane = int32(cuda.threadIdx.x // lanes), int32(cuda.threadIdx.x % lanes)
        g, x_hat = cuda.local.array(own, float32), cuda.local.array(own, float32)
        sums, old = cuda.local.array(all_sums, float32), cuda.local.array(own, float32)
        for k in range(all_sums):
            sums[k] = float32(0)
        row = int32(cuda.blockIdx.x * rows_a_block + warp)
        while row < rows:
            inverse = read(g, x_hat, sums, of, row, lane)
            if add:
                load_dx(old, place(before, row, columns, size), lane)
            slope(g, x_hat, gain, inverse, lane)
            if add:
                for k in range(own):
                    g[k] += old[k]
            leave(g, sums, dx, copied, row, lane)
            row += int32(cuda.gridDim.x * rows_a_block)
        write_sums(sums, place(partials, cuda.blockIdx.x, wide, 4), lane, warp)

    types = "l l l l l l f l l r"
    return Kernel(norm_backward, types, layout.threads, resident=form.resident, target=(8, 0))


def norm_backward_blocks(form: Form, rows: int, multiprocessors: int = MULTIPROCESSORS) -> int:
    """The blocks of a launch; partial sums are float32 (blocks, form.sums * columns)."""
    return min(cover(rows, form.layout.rows), multiprocessors * form.resident)


class NormBackward(NamedTuple):
    """The arguments of a norm's backward.

    x (rows, columns) is the stream that was normed, stats what the forward kept. dx = the norm's
    gradient, plus `before` where it is given (which may be dx); copy = weight dx. Adds to dgain, to
    dbias where it is given, and to dmoved, the sums of weight dx.
    """

    norm: str
    dn: Any
    x: Any
    stats: Any
    gain: Any
    dx: Any
    dgain: Any
    before: Any = None
    dbias: Any = None
    weight: float = 1.0
    copy: Any = None
    dmoved: Any = None

    @property
    def form(self) -> Form:
        """The form of the launch."""
        kinds = kind_of(self.x), kind_of(self.dn), kind_of(self.dx)
        wanted = (x is not None for x in (self.before, self.copy, self.dbias, self.dmoved))
        return Form(self.x.shape[1], self.norm, *kinds, *wanted)

    @property
    def sums(self) -> tuple[Any, ...]:
        """What sums over rows are added to."""
        return tuple(x for x in (self.dgain, self.dbias, self.dmoved) if x is not None)


def norm_backward_launches(
    this: NormBackward, partials: Any, multiprocessors: int = MULTIPROCESSORS
) -> tuple[Launch, Launch]:
    """What `NormBackward` says; partials: float32 (norm_backward_blocks, sums * columns)."""
    form, (rows, columns) = this.form, this.x.shape
    norm, dn, x, stats, gain, dx, _, before, dbias, weight, copy, _ = this
    if norm not in NORMS or (norm == "rms" and dbias is not None):
        raise UserError(f"norms are rms and layer, and layer alone has a bias, not {norm!r}")
    blocks = norm_backward_blocks(form, rows, multiprocessors)
    for name, array, kind in (
        ("dn", dn, form.kind), ("x", x, form.stream), ("dx", dx, form.gradient),
        ("the dx before", before, form.gradient), ("the copy of dx", copy, form.kind),
    ):  # fmt: skip
        if array is not None:
            expect(name, array, (rows, columns), kind)
    expect("stats", stats, (rows, NORMS[norm]), "float32")
    expect("gain", gain, (columns,), "float32")
    expect("partial sums", partials, (blocks, form.sums * columns), "float32")
    args = dn, x, stats, gain, given(before), dx, weight, given(copy), partials, rows
    launch = Launch(norm_backward_kernel(form), (blocks,), args)
    return launch, sum_launch(partials, this.sums, add=True)
