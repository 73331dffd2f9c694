# Made from book/07c-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-kernel
"""Matrix products on Hopper's tensor cores, bf16 in, float32 sums: TMA, mbarriers, wgmma.

C (m, n) = op(A) op(B), where the layout names how A and B are stored:

    NT   forward  Y = X W^T    A (m, k)   B (n, k)
    NN   dX = dY W             A (m, k)   B (k, n)
    TN   dW = dY^T X           A (k, m)   B (k, n)

Any m, n, k whose rows are multiples of 16 bytes apart. Equal operands give equal bits, always.
Who does what: chapter 7c. Compute capability 9.0 only (H100, H200).

    blockIdx    -> cluster, rank in it (neighbours along m)        persistent: a list of tiles each
    warpgroup 0 -> the producer, one thread: fetches k-blocks of A and B into a ring of stages
    warpgroup 1, 2 -> consumers: rows 64 c of a 128 x 256 tile (cooperative), or every other
                   128 x 128 tile (ping-pong)
    thread, register i -> row, column of C: `accumulator` in the tests
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.gemm_plan import (
    MULTIPROCESSORS,
    TILE_K,
    Plan,
    cover,
    split,
    tiles,
    whole,
)
from nanoeuler.engines.gpu.instruction import cuda, float32, int8, int32, int64
from nanoeuler.engines.gpu.kernel import Kernel, Launch, Map
from nanoeuler.engines.gpu.ptx import (
    barrier,
    bulk_commit,
    bulk_wait,
    bulk_wait_read,
    cluster_arrive,
    cluster_wait,
    descriptor,
    divide,
    grid_barrier,
    high_bf16,
    ldmatrix4,
    load_float4_if_below,
    load_if_below,
    load_int4,
    low_bf16,
    map_acquire,
    mbarrier_arrive,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    pack_bf16,
    proxy_fence,
    set_registers,
    shared_address,
    stmatrix4,
    store_float4,
    store_shared_float2,
    tanh_approx,
    tma_add,
    tma_load,
    tma_load_multicast,
    tma_store,
    wgmma,
    wgmma_wait,
    wgmma_wait_previous,
)
from nanoeuler.errors import UserError

TILE_M = 128      # rows of C in a block's tile: two warpgroups of 64, the m of wgmma
BOX = 8192        # bytes: 64 rows of 128, a box of the copy engine
RING = 196608     # bytes of the ring: 192 of the 227 KiB that a block can have
SLOTS = 4         # boxes on their way out, two of each consumer
ALIGN = 1024      # bytes: the swizzle's period
SHARED = ALIGN + RING + SLOTS * BOX + 256  # the last for the mbarriers
THREADS = 384     # a producer's warpgroup and two consumers'
REGISTERS = 128   # accumulators of a consumer's thread: 64 x 256 or 128 x 128 over 128 threads
PIECE = TILE_M * 256 * 4  # bytes: a block's tile in float32
# A thread's registers while it produces and while it consumes: 168 on average, all there are.
FEW, MANY = 40, 232


EPILOGUES = "store", "bias", "bias and gelu", "residual", "add"


@dataclass(frozen=True)
class Form:
    """What is settled when a kernel is compiled.

    layout: NT, NN or TN. pingpong: two tiles of 128 x 128 in turn, for one of 128 x 256. cluster: 1
    or 2 blocks that share B. epilogue: store; bias; bias and gelu (tanh); residual: another (m, n)
    is added; add: C is added to. out: bf16 or float32 of C. pieces: items may be parts of a tile
    along k, summed in order, by the same kernel ("together") or by another ("after"); "no": whole.
    Float32 comes with store and add only, and only float32 with add and pieces.
    """

    layout: str = "NT"
    pingpong: bool = False
    cluster: int = 1
    epilogue: str = "store"
    out: str = "bf16"
    pieces: str = "no"

    def __post_init__(self) -> None:
        wide = self.out == "float32"
        if self.layout not in ("NT", "NN", "TN") or self.cluster not in (1, 2):
            raise UserError(f"layouts are NT, NN, TN and clusters 1 or 2, not {self}")
        if self.epilogue not in EPILOGUES or self.out not in ("bf16", "float32"):
            raise UserError(f"epilogues are {', '.join(EPILOGUES)}, to bf16 or float32, not {self}")
        if wide and self.epilogue not in ("store", "add") or self.epilogue == "add" and not wide:
            raise UserError(f"float32 is stored or added to, and only float32 is added to: {self}")
        if self.pingpong and (wide or self.epilogue == "residual"):
            raise UserError(f"ping-pong has neither float32 nor residual: {self}")
        if self.pieces not in ("no", "together", "after") or self.pieces != "no" and not wide:
            raise UserError(f"pieces are for float32, no, together or after: {self}")

    @property
    def columns(self) -> int:
        """Columns of C in a block's tile."""
        return 128 if self.pingpong else 256

    @property
    def stage(self) -> int:
        """Bytes of a stage of the ring: a k-block of A and one of B."""
        return (TILE_M + self.columns) * TILE_K * 2

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        return RING // self.stage


# ---- What all forms share. A ring's state is its stage and the parity of the round it is in.


def advance(stage, phase, stages):
    """The next stage of the ring, and its parity."""
    stage = int32(stage + 1)
    if stage == stages:
        stage = int32(0)
        phase = int32(phase ^ 1)
    return stage, phase


def skip(stage, phase, stages, count):
    """The stage and parity after `count` more stages."""
    stage = int32(stage + count)
    rounds = divide(stage, stages)
    return int32(stage - rounds * stages), int32((phase ^ rounds) & 1)


def gelu(x):
    """GELU, tanh form, of a float32: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    half = float32(0.5) * x
    inner = x * (float32(0.7978845608) + float32(0.0356774081) * x * x)
    return half + half * tanh_approx(inner)


def prepare(bars, stages, arrivals):
    """One thread makes the mbarriers: full ones, empty ones, two for the turns of ping-pong."""
    for s in range(stages):
        mbarrier_init(bars + 8 * s, 1)
        mbarrier_init(bars + 8 * (stages + s), arrivals)
    mbarrier_init(bars + 16 * stages, 1)
    mbarrier_init(bars + 16 * stages + 8, 1)
    mbarrier_init_fence()


# ---- The producer.


def make_fetch(form: Form) -> Any:
    """fetch(to, full, map_a, map_b, k, row, column, rank): one k-block of A and B into a stage."""
    cluster, layout = form.cluster, form.layout
    share = form.columns // cluster  # columns of B that a block fetches, for all of its cluster
    a_bytes = TILE_M * TILE_K * 2
    everyone = (1 << cluster) - 1

    def fetch_b(to, map_b, x, y, full):
        if cluster > 1:
            tma_load_multicast(to, map_b, x, y, full, everyone)
        else:
            tma_load(to, map_b, x, y, full)

    def fetch(to, full, map_a, map_b, k, row, column, rank):
        if layout == "TN":
            tma_load(to, map_a, row, k, full)
            tma_load(to + BOX, map_a, row + 64, k, full)
        else:
            tma_load(to, map_a, k, row, full)
        b = int32(to + a_bytes + rank * (share * TILE_K * 2))
        if layout == "NT":
            fetch_b(b, map_b, k, column, full)
        else:
            for j in range(share // 64):
                fetch_b(b + j * BOX, map_b, column + j * 64, k, full)

    return fetch


def make_produce(form: Form) -> Any:
    """produce(...): one thread walks the list of items and keeps the ring full."""
    cluster, stages, stage_bytes, columns = form.cluster, form.stages, form.stage, form.columns
    share, residual = columns // cluster, form.epilogue == "residual"
    fetch = make_fetch(form)

    def fetch_residual(base, bars, map_r, row, column, stage, phase):
        """The tile of the residual, two stages of 128 x 128."""
        for half in range(2):
            full = int32(bars + 8 * stage)
            mbarrier_wait(full + 8 * stages, phase ^ 1)
            mbarrier_expect(full, 4 * BOX)
            to = int32(base + stage * stage_bytes)
            for j in range(2):
                tma_load(to + j * 2 * BOX, map_r, column + half * 128 + j * 64, row, full)
            stage, phase = advance(stage, phase, stages)
        return stage, phase

    def produce(base, bars, map_a, map_b, aux, work, item, end):
        rank = int32(cuda.blockIdx.x & (cluster - 1))
        map_acquire(map_a)
        map_acquire(map_b)
        stage, phase = int32(0), int32(0)
        while item < end:
            x, y, ks, _ = load_int4(work + int64(item) * 16)
            row = int32((x * cluster + rank) * TILE_M)
            column = int32(y * columns)
            for k in range(ks & 0xFFFF, ks >> 16):
                full = int32(bars + 8 * stage)
                mbarrier_wait(full + 8 * stages, phase ^ 1)  # its last readers are done
                mbarrier_expect(full, stage_bytes)
                to = int32(base + stage * stage_bytes)
                at = int32(column + rank * share)
                fetch(to, full, map_a, map_b, int32(k * TILE_K), row, at, rank)
                stage, phase = advance(stage, phase, stages)
            if residual:
                stage, phase = fetch_residual(base, bars, aux, row, column, stage, phase)
            item = int32(item + 1)

    return produce


# ---- The consumers. c is 0 or 1, t the thread's number in its warpgroup.


def make_release(form: Form) -> Any:
    """release(empty, t): a consumer gives a stage back, to every block that writes into it."""
    cluster = form.cluster

    def release(empty, t):
        if cluster > 1:
            if t < cluster:
                mbarrier_arrive_at(empty, t)
        elif t == 0:
            mbarrier_arrive(empty)

    return release


def make_multiply(form: Form) -> Any:
    """multiply(acc, a, b, bars, stage, phase, count, t): acc = the product over `count` k-blocks.

    Returns the stage and parity that follow. The last stage is not given back, nor is it waited
    for: the caller does both.
    """
    stages, stage_bytes = form.stages, form.stage
    # Where k is dense in memory a step of 16 is 32 bytes on, else 16 rows of 128 bytes.
    a_step, b_step = (128 if form.layout[0] == "T" else 2), (128 if form.layout[1] == "N" else 2)
    rows = 2 if form.pingpong else 1
    mma = wgmma(form.columns, TILE_K // 16, a_step, b_step, form.layout, rows)
    release = make_release(form)

    def multiply(acc, a, b, bars, stage, phase, count, t):
        last = stage
        for k in range(count):
            mbarrier_wait(bars + 8 * stage, phase)
            offset = int64(stage * (stage_bytes >> 4))
            mma(acc, a + offset, b + offset, k)
            if k > 0:
                wgmma_wait_previous()
                release(bars + 8 * (stages + last), t)
            last = stage
            stage, phase = advance(stage, phase, stages)
        return stage, phase, last

    return multiply


# ---- Epilogues. Registers 4 j to 4 j + 3 of a thread hold two columns of C in two rows, 8 apart.


def make_bias(form: Form) -> Any:
    """bias(acc, address, column, n, lane): acc = f(acc + bias), f GELU or nothing."""
    columns, curved = form.columns, form.epilogue == "bias and gelu"
    halves = 2 if form.pingpong else 1

    def curve(x):
        return gelu(x) if curved else x

    def bias(acc, address, column, n, lane):
        first = int32(column + (lane & 3) * 2)
        for j in range(columns // 8):
            at = int32(first + j * 8)
            pair = load_if_below(address + int64(at) * 2, at, n)
            low, high = low_bf16(pair), high_bf16(pair)
            for half in range(halves):
                i = half * 64 + 4 * j
                acc[i] = curve(acc[i] + low)
                acc[i + 1] = curve(acc[i + 1] + high)
                acc[i + 2] = curve(acc[i + 2] + low)
                acc[i + 3] = curve(acc[i + 3] + high)

    return bias


def add_row(acc, i, address):
    """acc[i : i + 8] += the bf16 that stand where `put_row` would put them."""
    a, b, c, d = ldmatrix4(address)
    acc[i] += low_bf16(a)
    acc[i + 1] += high_bf16(a)
    acc[i + 2] += low_bf16(b)
    acc[i + 3] += high_bf16(b)
    acc[i + 4] += low_bf16(c)
    acc[i + 5] += high_bf16(c)
    acc[i + 6] += low_bf16(d)
    acc[i + 7] += high_bf16(d)


def put_row(acc, i, address):
    """acc[i : i + 8] as bf16: a warp's 16 rows of 16 columns, each lane with its row's address."""
    stmatrix4(
        address,
        pack_bf16(acc[i], acc[i + 1]), pack_bf16(acc[i + 2], acc[i + 3]),
        pack_bf16(acc[i + 4], acc[i + 5]), pack_bf16(acc[i + 6], acc[i + 7]),
    )  # fmt: skip


# ---- The way out: a box of 64 rows of 128 bytes at a time, through two boxes for each consumer.


def open_box(c, t):
    """Return when the box before the last has left its place in shared memory."""
    if t == 0:
        bulk_wait_read()
    barrier(1 + c, 128)


def close_box(c):
    """Return when all of the warpgroup's stores to the box are there for the copy engine."""
    proxy_fence()
    barrier(1 + c, 128)


def make_strip(form: Form) -> Any:
    """strip(acc, i, box, map_c, column, row, c, t): 64 x 32 float32 from 16 registers to C.

    The swizzle: 16-byte chunk q of row r stands at chunk q ^ (r & 7).
    """
    add = form.epilogue == "add"

    def strip(acc, i, box, map_c, column, row, c, t):
        open_box(c, t)
        r, pair = int32((t >> 5) * 16 + ((t & 31) >> 2)), int32(t & 3)
        at = int32(box + r * 128 + (pair & 1) * 8)
        for j in range(4):
            chunk = int32(((2 * j + (pair >> 1)) ^ (r & 7)) * 16)
            a = i + 4 * j
            store_shared_float2(at + chunk, acc[a], acc[a + 1])
            store_shared_float2(at + chunk + 1024, acc[a + 2], acc[a + 3])
        close_box(c)
        if t == 0:
            if add:
                tma_add(map_c, column, row, box)
            else:
                tma_store(map_c, column, row, box)
            bulk_commit()

    return strip


def make_float32_tile(form: Form) -> Any:
    """tile(...): a consumer's 64 x 256 float32, eight strips of 32 columns."""
    strip = make_strip(form)

    def tile(acc, boxes, base, bars, map_c, column, row, stage, phase, c, t):
        for q in range(8):
            strip(acc, q * 16, boxes + (q & 1) * BOX, map_c, column + q * 32, row, c, t)
        return stage, phase

    return tile


def make_bf16_tile(form: Form) -> Any:
    """tile(...): a consumer's 64 x 256 or 128 x 128 as bf16, four boxes of 64 columns.

    A residual waits in the ring, in the layout of the boxes, 128 columns in each of two stages.
    """
    across, residual = form.columns // 64, form.epilogue == "residual"
    stages, stage_bytes = form.stages, form.stage
    release = make_release(form)

    def tile(acc, boxes, base, bars, map_c, column, row, stage, phase, c, t):
        lane = int32(t & 31)
        r = int32((t >> 5) * 16 + (lane & 15))
        for q in range(4):
            box = int32(boxes + (q & 1) * BOX)
            if residual and q % 2 == 0:
                mbarrier_wait(bars + 8 * stage, phase)
            open_box(c, t)
            for j in range(4):
                chunk = int32(((2 * j + (lane >> 4)) ^ (r & 7)) * 16)
                i = q * 32 + j * 8
                if residual:
                    at = base + stage * stage_bytes + (q & 1) * 2 * BOX + c * BOX
                    add_row(acc, i, int32(at + r * 128 + chunk))
                put_row(acc, i, int32(box + r * 128 + chunk))
            close_box(c)
            if t == 0:
                tma_store(map_c, column + q % across * 64, row + q // across * 64, box)
                bulk_commit()
            if residual and q % 2 == 1:
                release(bars + 8 * (stages + stage), t)
                stage, phase = advance(stage, phase, stages)
        return stage, phase

    return tile


# ---- Pieces of a tile along k wait in memory, thread by thread, for the sum in the order of k.


def put_piece(acc, address, t):
    """A consumer's 128 registers: four of them are 16 bytes of each thread, side by side."""
    for j in range(REGISTERS // 4):
        i = 4 * j
        store_float4(
            address + int64(j * 2048 + t * 16), acc[i], acc[i + 1], acc[i + 2], acc[i + 3]
        )


def gather(total, address, step, count):
    """total (16) = the sum of `count` pieces, `step` bytes apart, in order; four are on the way."""
    batch = cuda.local.array(64, float32)
    for i in range(16):
        total[i] = float32(0)
    for first in range(0, count, 4):
        for u in range(4):
            for j in range(4):
                at = address + int64(first + u) * step + j * 2048
                a, b, c, d = load_float4_if_below(at, first + u, count)
                i = u * 16 + j * 4
                batch[i], batch[i + 1], batch[i + 2], batch[i + 3] = a, b, c, d
        for i in range(64):
            total[i & 15] += batch[i]


def make_sums(form: Form) -> Any:
    """sums(...): a warpgroup walks its list of strips, sums the pieces of each, puts it in C."""
    cluster, columns = form.cluster, form.columns
    strip = make_strip(form)

    def sums(work, head, pieces, boxes, map_c, c, t):
        total = cuda.local.array(16, float32)
        item, end, _, _ = load_int4(work + int64(head) * 16)
        side = int32(0)
        while item < end:
            x, y, where, slots = load_int4(work + int64(item) * 16)
            rank, half, q = int32(where >> 8), int32((where >> 3) & 1), int32(where & 7)
            block = int32((slots & 0xFFFF) * cluster + rank)
            at = pieces + int64(block) * PIECE + int64(half * (PIECE // 2) + q * 8192 + t * 16)
            gather(total, at, int64(cluster * PIECE), int32(slots >> 16))
            row = int32((x * cluster + rank) * TILE_M + half * 64)
            column = int32(y * columns + q * 32)
            strip(total, 0, boxes + side * BOX, map_c, column, row, c, t)
            side = int32(side ^ 1)
            item = int32(item + 1)

    return sums


# ---- A consumer, and the kernel.


def make_finish(form: Form) -> Any:
    """finish(...): a tile's registers to C, or as a piece to memory; returns the ring's state."""
    tile = make_float32_tile(form) if form.out == "float32" else make_bf16_tile(form)
    bias, biased = make_bias(form), "bias" in form.epilogue
    split, cluster, columns = form.pieces != "no", form.cluster, form.columns
    own = 0 if form.pingpong else 64  # rows of a tile that are above the second consumer's

    def finish(acc, boxes, base, bars, map_c, aux, pieces, n, x, y, slot, stage, phase, c, t):
        block = int32(x * cluster + int32(cuda.blockIdx.x & (cluster - 1)))
        column = int32(y * columns)
        if biased:
            bias(acc, aux, column, n, int32(t & 31))
        if split and slot >= 0:
            spot = int32(slot * cluster + int32(cuda.blockIdx.x & (cluster - 1)))
            put_piece(acc, pieces + int64(spot) * PIECE + int64(c * (PIECE // 2)), t)
        else:
            row = int32(block * TILE_M + c * own)
            stage, phase = tile(
                acc, boxes, base, bars, map_c, column, row, stage, phase, c, t
            )
        return stage, phase

    return finish


def make_turns(form: Form) -> Any:
    """take(bars, turn, c) and pass_on(bars, c, t): of two ping-pong consumers, one multiplies.

    Turns also keep a consumer from taking a round of the ring for the one after the next.
    """
    turns = 16 * form.stages
    pingpong = form.pingpong

    def take(bars, turn, c):
        if pingpong:
            mbarrier_wait(bars + turns + 8 * c, turn)
        return int32(turn ^ 1)

    def pass_on(bars, c, t):
        if pingpong and t == 0:
            mbarrier_arrive(bars + turns + 8 * (c ^ 1))

    return take, pass_on


def make_consume(form: Form) -> Any:
    """consume(...): a warpgroup walks the list of items and multiplies."""
    pingpong, stages = form.pingpong, form.stages
    # Dense along k: groups of 8 rows, 1024 bytes apart. Else boxes of 64 rows of k, 8192 apart.
    of_a = descriptor(BOX if form.layout[0] == "T" else 16, 1024)
    of_b = descriptor(BOX if form.layout[1] == "N" else 16, 1024)
    a_bytes, own = TILE_M * TILE_K * 2, 0 if pingpong else BOX
    multiply, release, finish = make_multiply(form), make_release(form), make_finish(form)
    take, pass_on = make_turns(form)
    wait = wgmma_wait(REGISTERS)

    def consume(base, bars, map_c, aux, work, pieces, n, item, end, c, t):
        acc = cuda.local.array(REGISTERS, float32)
        # A descriptor has 18 bits of address; above them a cluster's addresses have the rank.
        a = int64(of_a) | int64(((base + c * own) & 0x3FFFF) >> 4)
        b = int64(of_b) | int64(((base + a_bytes) & 0x3FFFF) >> 4)
        boxes = int32(base + RING + c * 2 * BOX)
        stage, phase, step, turn = int32(0), int32(0), int32(1), int32(c ^ 1)
        x, y, ks, slot = load_int4(work + int64(item) * 16)
        if pingpong:
            step = int32(2)
            if c == 1:
                stage, phase = skip(stage, phase, stages, ks >> 16)
                item = int32(item + 1)
                x, y, ks, slot = load_int4(work + int64(item) * 16)
        while item < end:
            item = int32(item + step)
            next_x, next_y, next_ks, next_slot = load_int4(work + int64(item) * 16)
            turn = take(bars, turn, c)
            count = int32((ks >> 16) - (ks & 0xFFFF))
            stage, phase, last = multiply(acc, a, b, bars, stage, phase, count, t)
            pass_on(bars, c, t)
            wait(acc)
            release(bars + 8 * (stages + last), t)
            stage, phase = finish(
                acc, boxes, base, bars, map_c, aux, pieces, n, x, y, slot, stage, phase, c, t
            )
            if pingpong:  # pass over the other consumer's stages
                stage, phase = skip(stage, phase, stages, count)
            x, y, ks, slot = next_x, next_y, next_ks, next_slot

    return consume


HEADER = 128  # bytes before the pieces: the word that a grid waits at


def make_together(form: Form) -> Any:
    """together(...): the consumers of all blocks wait for each other, then sum the pieces."""
    sums, cluster, at_once = make_sums(form), form.cluster, form.pieces == "together"

    def together(base, map_c, work, space, c, t):
        if at_once:
            barrier(3, 256)
            if c == 0 and t == 0:
                others = int32(cuda.gridDim.x - 1)
                last = cuda.blockIdx.x == 0
                grid_barrier(space, int32(0x80000000 - others) if last else int32(1))
            barrier(3, 256)
            head = int32(cuda.gridDim.x // cluster + cuda.blockIdx.x * 2 + c)
            sums(work, head, space + HEADER, int32(base + RING + c * 2 * BOX), map_c, c, t)

    return together


@cache
def gemm(form: Form) -> Kernel:
    """The kernel of a form: maps of A, B, C, aux (bias, map), work list, pieces, columns of C."""
    cluster, stages, pingpong = form.cluster, form.stages, form.pingpong
    produce, consume, together = make_produce(form), make_consume(form), make_together(form)
    fewer, more = set_registers(FEW, False), set_registers(MANY, True)
    readers = cluster if pingpong else 2 * cluster  # warpgroups that give a stage back

    def gemm_wgmma(map_a, map_b, map_c, aux, work, space, n):
        shared = cuda.shared.array(0, int8)
        base = int32((shared_address(shared) + (ALIGN - 1)) & ~(ALIGN - 1))
        bars = int32(base + RING + SLOTS * BOX)
        t, group = int32(cuda.threadIdx.x & 127), int32(cuda.threadIdx.x >> 7)
        if cuda.threadIdx.x == 0:
            prepare(bars, stages, readers)
        if cluster > 1:
            cluster_arrive()
            cluster_wait()
        cuda.syncthreads()
        item, end, _, _ = load_int4(work + int64(cuda.blockIdx.x // cluster) * 16)
        if group == 0:
            fewer()
            if t == 0:
                produce(base, bars, map_a, map_b, aux, work, item, end)
        else:
            more()
            c = int32(group - 1)
            if t == 0:
                map_acquire(map_c)
            consume(base, bars, map_c, aux, work, space + HEADER, n, item, end, c, t)
            together(base, map_c, work, space, c, t)
            if t == 0:
                bulk_wait()
        if cluster > 1:  # others may still write or signal here
            cluster_arrive()
            cluster_wait()

    return Kernel(
        gemm_wgmma, "l l l l l l r", THREADS, SHARED, cluster, together=form.pieces == "together"
    )


@cache
def sum_pieces(form: Form) -> Kernel:
    """The kernel that sums the pieces afterwards: map of C, work list, pieces, blocks of `gemm`."""
    sums, cluster = make_sums(form), form.cluster

    def gemm_sum_pieces(map_c, work, space, blocks):
        shared = cuda.shared.array(0, int8)
        base = int32((shared_address(shared) + (ALIGN - 1)) & ~(ALIGN - 1))
        t, c = int32(cuda.threadIdx.x & 127), int32(cuda.threadIdx.x >> 7)
        if t == 0:
            map_acquire(map_c)
        head = int32(blocks // cluster + cuda.blockIdx.x * 2 + c)
        sums(work, head, space + HEADER, int32(base + c * 2 * BOX), map_c, c, t)
        if t == 0:
            bulk_wait()

    return Kernel(gemm_sum_pieces, "l l l r", 256, ALIGN + SLOTS * BOX)


# ---- The host's side.


def sizes(form: Form, a: Any, b: Any, c: Any, aux: Any = None) -> tuple[int, int, int]:
    """m, n and k of a product of 2-d arrays; UserError where something does not fit."""
    m, k = a.shape if form.layout[0] == "N" else a.shape[::-1]
    of_b = b.shape if form.layout[1] == "N" else b.shape[::-1]
    n = of_b[1]
    if of_b[0] != k or tuple(c.shape) != (m, n) or not min(m, n, k):
        raise UserError(f"{form.layout}: {a.shape} by {b.shape} does not give {c.shape}")
    kinds = [str(array.dtype) for array in (a, b, c)]
    wanted = ["uint16", "uint16", "float32" if form.out == "float32" else "uint16"]
    if kinds != wanted:
        raise UserError(f"A, B and C are {', '.join(kinds)}; expected {', '.join(wanted)}")
    shape = {"residual": (m, n), "bias": (n,), "bias and gelu": (n,)}.get(form.epilogue)
    if shape != (None if aux is None else tuple(aux.shape)):
        raise UserError(f"{form.epilogue} takes {shape}, not {getattr(aux, 'shape', None)}")
    if "bias" in form.epilogue and n % 2:
        raise UserError(f"columns with a bias come in pairs, not {n}: pad W by a row of zeros")
    if cover(k, TILE_K) >= 1 << 15:
        raise UserError(f"k is at most {(1 << 15) * TILE_K - TILE_K}, not {k}")
    return m, n, k


def plan(
    form: Form, m: int, n: int, k: int, blocks: int = MULTIPROCESSORS, cut: str = "best"
) -> Plan:
    """Who multiplies what on a machine with room for `blocks` blocks; cut: `gemm_plan.split`."""
    order = tiles(m, n, TILE_M * form.cluster, form.columns)
    clusters, k_blocks = blocks // form.cluster, cover(k, TILE_K)
    if form.pieces == "no":
        return whole(order, k_blocks, clusters)
    return split(order, k_blocks, clusters, form.cluster, cut)


def maps(form: Form, a: Any, b: Any, c: Any) -> tuple[Map, Map, Map]:
    """A, B and C as the copy engine sees them."""
    rows_b = form.columns // form.cluster
    return (
        Map(a, (64, 64) if form.layout[0] == "T" else (TILE_M, TILE_K)),
        Map(b, (64, 64) if form.layout[1] == "N" else (rows_b, TILE_K)),
        Map(c, (64, 32) if form.out == "float32" else (64, 64)),
    )


def product(
    form: Form, a: Any, b: Any, c: Any, aux: Any = None, *,
    place: Any = lambda array: array, space: Any = None,
    blocks: int = MULTIPROCESSORS, cut: str = "best",
) -> list[Launch]:  # fmt: skip
    """The launches, in order, of C = op(A) op(B) with the form's epilogue.

    a, b (2-d) uint16, bf16's bits; c (m, n) uint16 or float32; aux: the bias (n,) or the residual
    (m, n), uint16. place: puts a NumPy array where the target can read it. space: bytes for pieces,
    `space_for` of them, zero at first and shared by products that follow each other.
    """
    m, n, k = sizes(form, a, b, c, aux)
    who = plan(form, m, n, k, blocks, cut)
    work = place(who.words())
    if form.pieces != "no" and space is None:
        space = place(np.zeros(space_for(form, who), np.uint8))
    map_a, map_b, map_c = maps(form, a, b, c)
    extra = Map(aux, (TILE_M, 64)) if form.epilogue == "residual" else 0 if aux is None else aux
    grid = len(who.items) * form.cluster
    args = map_a, map_b, map_c, extra, work, 0 if space is None else space, n
    launches = [Launch(gemm(form), (grid,), args)]
    if form.pieces == "after" and who.slots:
        launches.append(Launch(sum_pieces(form), (grid,), (map_c, work, args[5], grid)))
    return launches


def space_for(form: Form, who: Plan) -> int:
    """Bytes that the pieces of a plan need."""
    return HEADER + who.slots * form.cluster * PIECE
