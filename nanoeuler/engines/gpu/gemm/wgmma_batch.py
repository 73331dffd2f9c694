# Made from book/13b-muon-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-muon-gpu-symmetric
"""Products of many matrices of one shape in one launch on Hopper, for Newton-Schulz; bf16.

The tile is chapter 11b's ping-pong tile of 128 x 128, without clusters; a work item names a matrix
as well as a tile. A symmetric product computes the tiles on and below its diagonal and stores each
of those below twice, the second time transposed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.gemm import wgmma_form as forms
from nanoeuler.engines.gpu.gemm import wgmma_schedule as schedule
from nanoeuler.engines.gpu.gemm.wgmma_epilogue import Consumer, Strip, strips
from nanoeuler.engines.gpu.gemm.wgmma_kernel import make_multiply, make_operands, make_turns
from nanoeuler.engines.gpu.lang import hopper, ptx
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int8, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, Map, cover
from nanoeuler.engines.gpu.lang.vectors import expect
from nanoeuler.engines.gpu.tile import ring
from nanoeuler.engines.gpu.tile.accumulator import in_order
from nanoeuler.engines.gpu.tile.layout import PANEL, chunk_at, lane_column, lane_row, squares_across
from nanoeuler.engines.gpu.tile.store import put_bf16
from nanoeuler.errors import UserError

TILE = 128  # rows and columns of a tile of C


@dataclass(frozen=True)
class Batch:
    """What is settled when a kernel is compiled, for matrices S_i = op(A_i) op(B_i).

    layout: NT or NN, as in `wgmma_form.Form`. symmetric: C is square and equal to its transpose.
    polynomial: C = one I + two D + three S, with D of C's shape; else C = scale_i S.
    """

    layout: str = "NT"
    symmetric: bool = False
    polynomial: bool = False

    @property
    def form(self) -> forms.Form:
        """The form of 11b whose ring and tile this one shares."""
        return forms.Form(self.layout, pingpong=True)


GRAM = Batch(symmetric=True)  # A = scale X X^T
POLYNOMIAL = Batch(symmetric=True, polynomial=True)  # P = a I + b A + c A A^T
APPLY = Batch("NN")  # X' = scale P X


# %% sec-muon-gpu-batch
def batch_tiles(count: int, down: int, across: int, symmetric: bool) -> np.ndarray:
    """The tiles of `count` matrices, `down` by `across` tiles each: (n, 3) int32 of (x, y, matrix).

    Matrix after matrix and down the rows first. Of a symmetric one those on and below the diagonal.
    """
    matrix, y, x = np.indices((count, across, down), np.int32).reshape(3, -1)
    kept = x >= y if symmetric else np.ones(len(x), bool)
    return np.stack([x, y, matrix], 1)[kept]


@cache
def batch_plan(batch: Batch, count: int, m: int, n: int, k: int, blocks: int) -> schedule.Plan:
    """Who computes which tile, dealt round; an item's slot is the number of its matrix."""
    order = batch_tiles(count, cover(m, TILE), cover(n, TILE), batch.symmetric)
    items = np.zeros((len(order), 5), np.int32)
    items[:, [0, 1, 4]], items[:, 3] = order, cover(k, schedule.TILE_K)
    return schedule.Plan([items[c::blocks] for c in range(min(blocks, len(order)))], [], 0)


def make_fetch_batch(batch: Batch) -> Callable:
    """produce(of, base, bars, item, end): one thread keeps the ring full."""
    form, transposed = batch.form, batch.layout == "NT"
    stages, stage_bytes, of_a = form.stages, form.stage, TILE * schedule.TILE_K * 2

    def fetch(of, to, full, k, x, y, matrix):
        hopper.load_tile(to, of.a, k, x * TILE, matrix, 0, full)
        if transposed:
            hopper.load_tile(to + of_a, of.b, k, y * TILE, matrix, 0, full)
        else:
            for j in range(TILE // 64):
                at = int32(to + of_a + j * forms.BOX)
                hopper.load_tile(at, of.b, y * TILE + j * 64, k, matrix, 0, full)

    def produce(of, base, bars, item, end):
        hopper.map_acquire(of.a)
        hopper.map_acquire(of.b)
        stage, phase = int32(0), int32(0)
        while item < end:
            x, y, ks, matrix = ptx.load_int4(of.work + int64(item) * 16)
            for k in range(ks >> 16):
                full = int32(bars + 8 * stage)
                hopper.mbarrier_wait(full + 8 * stages, phase ^ 1)
                hopper.mbarrier_expect(full, stage_bytes)
                to = int32(base + stage * stage_bytes)
                fetch(of, to, full, int32(k * schedule.TILE_K), x, y, matrix)
                stage, phase = ring.advance(stage, phase, stages)
            item = int32(item + 1)

    return produce


# %% sec-muon-gpu-twice
class Arguments(NamedTuple):
    """What a kernel is given: addresses of arrays and maps, and numbers."""

    a: int        # maps of A, B and C
    b: int
    c: int
    d: int
    work: int     # the work list
    scales: int
    n: int        # columns of C
    one: float    # the polynomial's numbers
    two: float
    three: float


class Square(NamedTuple):
    """A consumer's tile: which it is, of which matrix, and what its sums are multiplied by."""

    of: Arguments
    me: Consumer
    x: int
    y: int
    matrix: int
    scale: float


def put_turned(acc, i, box, t):
    """Sums i to i + 31 of thread t, 64 rows by 64 columns, transposed, to a box of bf16."""
    lane, warp = int32(t & 31), int32(t >> 5)
    row, chunk = squares_across(lane)
    for j in range(4):
        k = i + 8 * j
        hopper.stmatrix4_turned(
            int32(box + chunk_at(int32(16 * j + row), int32(2 * warp + chunk), PANEL)),
            ptx.pack_bf16(acc[k], acc[k + 1]),
            ptx.pack_bf16(acc[k + 2], acc[k + 3]),
            ptx.pack_bf16(acc[k + 4], acc[k + 5]),
            ptx.pack_bf16(acc[k + 6], acc[k + 7]),
        )


def make_send(put: Callable) -> Callable:
    """send(acc, i, box, tile, column, row, keep): a strip by way of a box to its place, if `keep`.

    A strip that isn't kept is a group of its own, too, so that boxes stay in turn.
    """

    def send(acc, i, box, tile, column, row, keep):
        me = tile.me
        if me.t == 0:
            hopper.bulk_wait_read()  # what stood in this box has left
        ptx.barrier(1 + me.c, 128)
        put(acc, i, box, me.t)
        hopper.proxy_fence()
        ptx.barrier(1 + me.c, 128)  # all have written the box
        if me.t == 0:
            if keep:
                hopper.store_tile(tile.of.c, column, row, tile.matrix, 0, box)
            hopper.bulk_commit()

    return send


def make_strip_out(batch: Batch, q: int, strip: Strip) -> Callable:
    """out(acc, tile): a strip to its place; of a symmetric product also to the mirrored one, unless
    the tile is on the diagonal and holds both."""
    i, right, down = strip
    symmetric, first = batch.symmetric, 0 if batch.symmetric else q % 2 * forms.BOX
    send, send_turned = make_send(put_bf16), make_send(put_turned)

    def out(acc, tile):
        row, column = int32(tile.x * TILE + down), int32(tile.y * TILE + right)
        send(acc, i, int32(tile.me.boxes + first), tile, column, row, True)
        if symmetric:
            box = int32(tile.me.boxes + forms.BOX)
            send_turned(acc, i, box, tile, row, column, tile.x != tile.y)

    return out


# %% sec-muon-gpu-polynomial
def make_scale_strip(batch: Batch, strip: Strip) -> Callable:
    """change(acc, tile): a strip's sums become what is stored."""
    i, right, down = strip
    diagonal = right == down

    def polynomial(acc, tile):
        of, t, n = tile.of, tile.me.t, tile.of.n
        lane = int32(t & 31)
        row = int32(tile.x * TILE + down + (t >> 5) * 16 + lane_row(lane))
        column = int32(tile.y * TILE + right + lane_column(lane))
        above = of.d + (int64(tile.matrix) * n + row) * (2 * n)
        end, end_below = n if row < n else int32(0), n if row + 8 < n else int32(0)
        for j in range(8):
            k, at = i + 4 * j, int32(column + 8 * j)
            high = ptx.load_if_below(above + int64(at) * 2, at, end)
            low = ptx.load_if_below(above + int64(at + 8 * n) * 2, at, end_below)
            acc[k] = of.three * acc[k] + of.two * ptx.low_bf16(high)
            acc[k + 1] = of.three * acc[k + 1] + of.two * ptx.high_bf16(high)
            acc[k + 2] = of.three * acc[k + 2] + of.two * ptx.low_bf16(low)
            acc[k + 3] = of.three * acc[k + 3] + of.two * ptx.high_bf16(low)
            if diagonal and tile.x == tile.y:
                acc[k] += of.one if row == at else float32(0)
                acc[k + 1] += of.one if row == at + 1 else float32(0)
                acc[k + 2] += of.one if row + 8 == at else float32(0)
                acc[k + 3] += of.one if row + 8 == at + 1 else float32(0)

    def scaled(acc, tile):
        for k in range(i, i + 32):
            acc[k] *= tile.scale

    return polynomial if batch.polynomial else scaled


def batch_epilogue(batch: Batch) -> Callable:
    """leave(acc, tile): from sums to C, strip by strip."""
    made: list[Callable] = []
    for q, strip in enumerate(strips(batch.form)):
        made += [make_scale_strip(batch, strip), make_strip_out(batch, q, strip)]
    return in_order(made)


def make_consume_batch(batch: Batch) -> Callable:
    """consume(of, me, item, end): a warpgroup computes every other tile of the list."""
    form, polynomial = batch.form, batch.polynomial
    stages, registers, multiply = form.stages, form.registers, make_multiply(form)
    (take, pass_on), release = make_turns(form), forms.make_release(form)
    wait, leave, operands_of = (
        hopper.wgmma_wait(registers), batch_epilogue(batch), make_operands(form))  # fmt: skip

    def consume(of, me, item, end):
        acc, operands = cuda.local.array(registers, float32), operands_of(me)
        stage, phase, turn = int32(0), int32(0), int32(me.c ^ 1)
        x, y, ks, matrix = ptx.load_int4(of.work + int64(item) * 16)
        if me.c == 1:  # the second tile, and so on
            stage, phase = ring.skip(stage, phase, stages, ks >> 16)
            item = int32(item + 1)
            x, y, ks, matrix = ptx.load_int4(of.work + int64(item) * 16)
        while item < end:
            item = int32(item + 2)
            next_x, next_y, next_ks, next_matrix = ptx.load_int4(of.work + int64(item) * 16)
            scale = float32(1)
            if not polynomial:
                scale = ptx.load_float(of.scales + 4 * int64(matrix))
            turn = take(me.bars, turn, me.c)
            count = int32(ks >> 16)
            stage, phase, last = multiply(acc, operands, me, stage, phase, count)
            pass_on(me.bars, me.c, me.t)
            wait(acc)
            release(me.bars + 8 * (stages + last), me.t)
            leave(acc, Square(of, me, x, y, matrix, scale))
            stage, phase = ring.skip(stage, phase, stages, count)
            x, y, ks, matrix = next_x, next_y, next_ks, next_matrix

    return consume


@cache
def batch_kernel(batch: Batch) -> Kernel:
    """The kernel of a batch. Of its arguments D and the polynomial's numbers are 0 without one, and
    the scales 0 with one."""
    form, produce, consume = batch.form, make_fetch_batch(batch), make_consume_batch(batch)
    stages = form.stages
    fewer = hopper.set_registers(forms.FEW, False)
    more = hopper.set_registers(forms.MANY, True)

    def batch_wgmma(of: Arguments):
        shared = cuda.shared.array(0, int8)
        base = ring.aligned(ptx.shared_address(shared))
        bars = int32(base + forms.RING + forms.SLOTS * forms.BOX)
        t, group = int32(cuda.threadIdx.x & 127), int32(cuda.threadIdx.x >> 7)
        if cuda.threadIdx.x == 0:
            forms.prepare(bars, stages, 1)
        cuda.syncthreads()
        item, end, _, _ = ptx.load_int4(of.work + int64(cuda.blockIdx.x) * 16)
        if group == 0:
            fewer()
            if t == 0:
                produce(of, base, bars, item, end)
        else:
            more()
            c = int32(group - 1)
            if t == 0:
                hopper.map_acquire(of.c)
            boxes = int32(base + forms.RING + c * 2 * forms.BOX)
            consume(of, Consumer(base, bars, boxes, c, t), item, end)
            if t == 0:
                hopper.bulk_wait()

    return Kernel(batch_wgmma, "l l l l l l r f f f", forms.THREADS, forms.SHARED)


class Operands(NamedTuple):
    """The arrays of a batch, in the copy engine's four axes; uint16 is bf16's bits.

    a (1, count, m, k); b (1, count, n, k) in NT, (1, count, k, n) in NN; c (1, count, m, n). by:
    the scales, float32 (count,), or D of a polynomial, uint16 (1, count, n, n). Extents are
    multiples of 8.
    """

    a: Any
    b: Any
    c: Any
    by: Any


def extents(batch: Batch, of: Operands) -> tuple[int, int, int, int]:
    """count, m, n and k; UserError where something does not fit."""
    (_, count, m, k), n = of.a.shape, of.c.shape[-1]
    expect("A", of.a, (1, count, m, k), "bf16")
    expect("B", of.b, (1, count, n, k) if batch.layout == "NT" else (1, count, k, n), "bf16")
    expect("C", of.c, (1, count, m, n), "bf16")
    if batch.polynomial:
        expect("D", of.by, (1, count, n, n), "bf16")
    else:
        expect("scales", of.by, (count,), "float32")
    if m % 8 or n % 8 or k % 8:
        raise UserError(f"extents of a batch are multiples of 8, not {m}, {n}, {k}: pad by zeros")
    if batch.symmetric and m != n:
        raise UserError(f"a symmetric product is square, not {m} by {n}")
    return count, m, n, k


def batch_launch(
    batch: Batch, of: Operands, numbers: tuple[float, float, float] = (0, 0, 0), *,
    place: Callable[[np.ndarray], Any] = lambda array: array, blocks: int = MULTIPROCESSORS,
) -> Launch:  # fmt: skip
    """All products of a batch in one launch; numbers: one, two and three of a polynomial.

    place: puts a NumPy array where the target can read it. blocks: that run at once.
    """
    count, m, n, k = extents(batch, of)
    plan = batch_plan(batch, count, m, n, k, blocks)
    tall, box = (1, 1, TILE, 64), (1, 1, 64, 64)
    views = Map(of.a, tall), Map(of.b, tall if batch.layout == "NT" else box), Map(of.c, box)
    work = place(plan.words)
    beside = (of.by, work, 0) if batch.polynomial else (0, work, of.by)
    args = *views, *beside, n, *map(float, numbers)
    return Launch(batch_kernel(batch), (len(plan.items),), args)
