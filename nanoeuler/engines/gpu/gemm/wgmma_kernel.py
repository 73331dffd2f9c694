# Made from book/11b-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-kernel
"""The kernels of a product: a producer that fetches, two consumers that multiply on tensor cores.

    blockIdx    -> cluster, and rank in it (neighbours along m): a list of tiles each
    warpgroup 0 -> the producer, one thread: k-blocks of A and B into the ring; another thread,
                   of another warp: what strips of a ping-pong tile meet, into bays
    warpgroup 1, 2 -> consumers c = 0, 1: rows 64 c of a 128 x 256 tile (cooperative), or every
                   other 128 x 128 tile (ping-pong)
"""

from collections.abc import Callable
from functools import cache

from nanoeuler.engines.gpu.gemm import wgmma_form as forms
from nanoeuler.engines.gpu.gemm.column_sums import HEADER
from nanoeuler.engines.gpu.gemm.wgmma_epilogue import (
    Arguments,
    Consumer,
    Maps,
    Tile,
    epilogue,
    make_read_tile,
    make_turns_of_heads,
)
from nanoeuler.engines.gpu.gemm.wgmma_schedule import TILE_K
from nanoeuler.engines.gpu.gemm.wgmma_split_k import make_sums, put_piece
from nanoeuler.engines.gpu.lang import hopper
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int8, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.engines.gpu.lang.ptx import barrier, grid_barrier, load_int4, shared_address
from nanoeuler.engines.gpu.tile import ring
from nanoeuler.engines.gpu.tile.accumulator import in_order
from nanoeuler.engines.gpu.tile.rope import Turning


def make_rank(form: forms.Form) -> Callable:
    """rank(): this block's number in its cluster."""
    cluster = form.cluster

    def rank():
        return int32(cuda.blockIdx.x & (cluster - 1))

    return rank


def make_fetch_b(form: forms.Form) -> Callable:
    """fetch_b(of, to, full, k, y): the block's share of B of tiles in column y."""
    cluster, dense, gated = form.cluster, form.layout[1] == "T", form.epilogue == "swiglu"
    share, of_c, everyone = form.columns // cluster, form.of_c, (1 << cluster) - 1
    halved, part_of_k, rank_of = form.halved, TILE_K // cluster, make_rank(form)
    parts = 2 if gated and cluster == 1 else 1  # gates and ups; in a cluster a block fetches one
    wide = share // parts

    def load(to, map_b, x, y, full):
        if cluster > 1:
            hopper.tma_load_multicast(to, map_b, x, y, full, everyone)
        else:
            hopper.tma_load(to, map_b, x, y, full)

    def fetch_b(of, to, full, k, y):
        rank = rank_of()
        if halved:
            for j in range(of_c // 64):
                at = int32(to + j * forms.BOX + rank * (forms.BOX // 2))
                x = int32(y * of_c + j * 64)
                load(at, of.b, x, k + rank * part_of_k, full)
            return
        column = int32(y * of_c + rank * (of.n if gated else share))
        to = int32(to + rank * (share * TILE_K * 2))
        for part in range(parts):  # ups come n after gates, in B's rows or columns
            at, x = int32(to + part * (wide * TILE_K * 2)), int32(column + part * of.n)
            if dense:
                load(at, of.b, k, x, full)
            else:
                for j in range(wide // 64):
                    load(at + j * forms.BOX, of.b, x + j * 64, k, full)

    return fetch_b


def make_fetch(form: forms.Form) -> Callable:
    """fetch(of, to, full, k, row, y): one k-block of A and B into a stage."""
    layout, a_bytes, fetch_b = form.layout, forms.TILE_M * TILE_K * 2, make_fetch_b(form)

    def fetch(of, to, full, k, row, y):
        if layout == "TN":
            hopper.tma_load(to, of.a, row, k, full)
            hopper.tma_load(to + forms.BOX, of.a, row + 64, k, full)
        else:
            hopper.tma_load(to, of.a, k, row, full)
        fetch_b(of, int32(to + a_bytes), full, k, y)

    return fetch


def make_fetch_tile(form: forms.Form) -> Callable:
    """fetch_tile(base, bars, map_d, row, column, stage, phase): of another array, for `read_tile`.

    Two stages, each with 128 x 128 of the tile. Returns the ring's state after them.
    """
    stages, stage_bytes = form.stages, form.stage

    def fetch_tile(base, bars, map_d, row, column, stage, phase):
        for half in range(2):
            full = int32(bars + 8 * stage)
            hopper.mbarrier_wait(full + 8 * stages, phase ^ 1)
            hopper.mbarrier_expect(full, 4 * forms.BOX)
            to = int32(base + stage * stage_bytes)
            for j in range(2):
                hopper.tma_load(
                    to + j * 2 * forms.BOX, map_d, column + half * 128 + j * 64, row, full
                )
            stage, phase = ring.advance(stage, phase, stages)
        return stage, phase

    return fetch_tile


def make_bring(form: forms.Form) -> Callable:
    """bring(of, base, bars, item, end): one thread fetches other arrays' strips into bays."""
    cluster, beside, first = form.cluster, form.beside, forms.bays_bars(form)
    of_c, bays, both, rank_of = form.of_c, form.bays, beside == 2, make_rank(form)

    def bring(of, base, bars, item, end):
        rank, phase, aux = rank_of(), int32(0), of.aux
        hopper.map_acquire(aux)
        while item < end:
            x, y, _, _ = load_int4(of.work + int64(item) * 16)
            row, column = int32((x * cluster + rank) * forms.TILE_M), int32(y * of_c)
            for q in range(forms.STRIPS):
                full = int32(bars + first + (phase * forms.STRIPS + q) * 8)
                to = int32(base + bays + q * beside * forms.BOX)
                at, down = int32(column + q % 2 * 64), int32(row + q // 2 * 64)
                empty = int32(bars + first + (2 * forms.STRIPS + q) * 8)
                hopper.mbarrier_wait(empty, phase ^ 1)  # what was there has left
                hopper.mbarrier_expect(full, beside * forms.BOX)
                if both:
                    hopper.load_tile(to, aux, at, down, 0, 0, full)
                    hopper.load_tile(to + forms.BOX, aux, at, down, 1, 0, full)
                else:
                    hopper.tma_load(to, aux, at, down, full)
            item, phase = int32(item + 1), int32(phase ^ 1)

    return bring


def make_produce(form: forms.Form) -> Callable:
    """produce(of, base, bars, item, end): one thread walks the list of items and keeps the ring
    full."""
    cluster, stages, stage_bytes, columns = form.cluster, form.stages, form.stage, form.columns
    met, fetch, fetch_tile = form.ringed, make_fetch(form), make_fetch_tile(form)
    rank_of = make_rank(form)

    def produce(of, base, bars, item, end):
        hopper.map_acquire(of.a)
        hopper.map_acquire(of.b)
        if met:
            hopper.map_acquire(of.aux)
        stage, phase = int32(0), int32(0)
        while item < end:
            x, y, ks, _ = load_int4(of.work + int64(item) * 16)
            row = int32((x * cluster + rank_of()) * forms.TILE_M)
            for k in range(ks & 0xFFFF, ks >> 16):
                full = int32(bars + 8 * stage)
                hopper.mbarrier_wait(full + 8 * stages, phase ^ 1)  # its last readers are done
                hopper.mbarrier_expect(full, stage_bytes)
                to = int32(base + stage * stage_bytes)
                fetch(of, to, full, int32(k * TILE_K), row, y)
                stage, phase = ring.advance(stage, phase, stages)
            if met:
                column = int32(y * columns)
                stage, phase = fetch_tile(base, bars, of.aux, row, column, stage, phase)
            item = int32(item + 1)

    return produce


def make_multiply(form: forms.Form) -> Callable:
    """multiply(acc, operands, me, stage, phase, count): acc = the product over `count` k-blocks.

    operands: the descriptors of A and B in stage 0. Returns the stage and parity that follow, and
    the last stage: the caller has to wait for its products, and to give it back.
    """
    stages, stage_bytes = form.stages, form.stage
    # Where k is dense in memory a step of 16 is 32 bytes on, else 16 rows of 128 bytes.
    a_step, b_step = (128 if form.layout[0] == "T" else 2), (128 if form.layout[1] == "N" else 2)
    rows = 2 if form.pingpong else 1
    mma = hopper.wgmma(form.columns, TILE_K // 16, a_step, b_step, form.layout, rows)
    release = forms.make_release(form)

    def multiply(acc, operands, me, stage, phase, count):
        (a, b), bars, t, last = operands, me.bars, me.t, stage
        for k in range(count):
            hopper.mbarrier_wait(bars + 8 * stage, phase)
            offset = int64(stage * (stage_bytes >> 4))
            mma(acc, a + offset, b + offset, k)
            if k > 0:
                hopper.wgmma_wait_previous()
                release(bars + 8 * (stages + last), t)
            last = stage
            stage, phase = ring.advance(stage, phase, stages)
        return stage, phase, last

    return multiply


def make_finish(form: forms.Form) -> Callable:
    """finish(acc, tile, slot, stage, phase): a tile's registers to C, or as a piece to memory;
    returns the ring's state."""
    read_tile, leave, rank = make_read_tile(form), in_order(epilogue(form)), make_rank(form)
    split, cluster = form.pieces != "no", form.cluster

    def finish(acc, tile, slot, stage, phase):
        stage, phase = read_tile(tile, stage, phase)
        if split and slot >= 0:
            piece = tile.of.space + int64(int32(slot * cluster + rank())) * forms.PIECE
            put_piece(acc, piece + int64(tile.me.c * (forms.PIECE // 2)), tile.me.t)
        else:
            leave(acc, tile)
        return stage, phase

    return finish


def make_turns(form: forms.Form) -> tuple[Callable, Callable]:
    """take(bars, turn, c) and pass_on(bars, c, t): of two ping-pong consumers, one multiplies.

    Turns also keep a consumer from taking one round of the ring for another of its parity.
    """
    turns = 16 * form.stages
    pingpong = form.pingpong

    def take(bars, turn, c):
        if pingpong:
            hopper.mbarrier_wait(bars + turns + 8 * c, turn)
        return int32(turn ^ 1)

    def pass_on(bars, c, t):
        if pingpong and t == 0:
            hopper.mbarrier_arrive(bars + turns + 8 * (c ^ 1))

    return take, pass_on


def make_operands(form: forms.Form) -> Callable:
    """operands(me): the descriptors of a consumer's rows of A and of B in stage 0."""
    # Dense along k: groups of 8 rows, 1024 bytes apart. Else boxes of 64 rows of k, 8192 apart.
    of_a = hopper.descriptor(forms.BOX if form.layout[0] == "T" else 16, 1024)
    of_b = hopper.descriptor(forms.BOX if form.layout[1] == "N" else 16, 1024)
    a_bytes, own = forms.TILE_M * TILE_K * 2, 0 if form.pingpong else forms.BOX

    def operands(me):
        # A descriptor has 18 bits of address; above them a cluster's addresses have the rank.
        a = int64(of_a) | int64(((me.base + me.c * own) & 0x3FFFF) >> 4)
        return a, int64(of_b) | int64(((me.base + a_bytes) & 0x3FFFF) >> 4)

    return operands


def make_corner(form: forms.Form) -> Callable:
    """corner(x, y, me): where a consumer has tile x, y: the first row and column of C, and the
    line of sums that this warp leaves."""
    cluster, of_c, own, rank = form.cluster, form.of_c, 0 if form.pingpong else 64, make_rank(form)

    def corner(x, y, me):
        block = int32(x * cluster + rank())
        line = int32(block * forms.LINES + me.c * (own // 16) + (me.t >> 5))
        return int32(block * forms.TILE_M + me.c * own), int32(y * of_c), line

    return corner


def make_consume(form: forms.Form) -> Callable:
    """consume(of, me, item, end): a warpgroup walks the list of items and multiplies."""
    pingpong, stages, registers = form.pingpong, form.stages, form.registers
    multiply, release, finish = make_multiply(form), forms.make_release(form), make_finish(form)
    (take, pass_on), (look_up, _) = make_turns(form), make_turns_of_heads(form)
    corner = make_corner(form)
    wait = hopper.wgmma_wait(registers)
    of_angles = form.way.turn // 2 or 1
    operands_of, step = make_operands(form), 2 if pingpong else 1

    def consume(of, me, item, end):
        acc, angles = cuda.local.array(registers, float32), cuda.local.array(of_angles, float32)
        u, c, t, operands = cuda.local.array(64, int32), me.c, me.t, operands_of(me)
        stage, phase, turn = int32(0), int32(0), int32(c ^ 1)
        x, y, ks, slot = load_int4(of.work + int64(item) * 16)
        if pingpong and c == 1:  # the second tile, and so on
            stage, phase = ring.skip(stage, phase, stages, ks >> 16)
            item = int32(item + 1)
            x, y, ks, slot = load_int4(of.work + int64(item) * 16)
        while item < end:
            item = int32(item + step)
            next_x, next_y, next_ks, next_slot = load_int4(of.work + int64(item) * 16)
            turn = take(me.bars, turn, c)
            look_up(angles, of.by, corner(x, y, me)[0], t)
            count = int32((ks >> 16) - (ks & 0xFFFF))
            stage, phase, last = multiply(acc, operands, me, stage, phase, count)
            pass_on(me.bars, c, t)
            wait(acc)
            release(me.bars + 8 * (stages + last), t)
            row, column, line = corner(x, y, me)
            # turn ^ c: 0, 1, 0, ..., the parity of its bays; u: room for bf16 pairs of other arrays
            tile = Tile(of, me, row, column, line, int32(turn ^ c), angles, u)
            stage, phase = finish(acc, tile, slot, stage, phase)
            if pingpong:  # pass over the other consumer's stages
                stage, phase = ring.skip(stage, phase, stages, count)
            x, y, ks, slot = next_x, next_y, next_ks, next_slot

    return consume


def arrival(block, blocks):
    """What a block adds to the word at which a grid waits; in sum 2^31, which flips its top bit."""
    return 0x80000000 - (blocks - 1) if block == 0 else 1


def make_together(form: forms.Form) -> Callable:
    """together(of, me): the consumers of all blocks wait for each other, then sum the pieces.

    Before and after, the space's first word has zeros below its top bit, which may be either.
    """
    sums, cluster, at_once = make_sums(form), form.cluster, form.pieces == "together"

    def together(of, me):
        if at_once:
            barrier(3, 256)
            if me.c == 0 and me.t == 0:
                step = int32(arrival(cuda.blockIdx.x, cuda.gridDim.x))
                grid_barrier(of.space - HEADER, step)
            barrier(3, 256)
            sums(of, int32(cuda.gridDim.x // cluster + cuda.blockIdx.x * 2 + me.c), me)

    return together


def make_block(form: forms.Form) -> Callable:
    """block(of, base, bars, item, end, t, group): the first warpgroup fetches, the others multiply.
    """
    produce, consume, together = make_produce(form), make_consume(form), make_together(form)
    fewer = hopper.set_registers(forms.FEW, False)
    more = hopper.set_registers(forms.MANY, True)
    bring, brought = make_bring(form), form.beside > 0
    second, (first_box, boxes) = form.second, form.boxes

    def block(of, base, bars, item, end, t, group):
        if group == 0:
            fewer()
            if t == 0:
                produce(of, base, bars, item, end)
            elif brought and t == 32:
                bring(of, base, bars, item, end)
        else:
            more()
            c = int32(group - 1)
            if t == 0:
                hopper.map_acquire(of.c)
                if second:
                    hopper.map_acquire(of.second)
            me = Consumer(base, bars, int32(base + first_box + c * boxes * forms.BOX), c, t)
            consume(of, me, item, end)
            together(of, me)
            if t == 0:
                hopper.bulk_wait()

    return block


@cache
def gemm_kernel(form: forms.Form) -> Kernel:
    """The kernel of a form. aux: a bias, or a map; work: the work list; space: for pieces or for
    sums of columns; n: columns of C."""
    cluster, stages, block = form.cluster, form.stages, make_block(form)
    readers = cluster if form.pingpong else 2 * cluster  # warpgroups that give a stage back

    def gemm_wgmma(maps: Maps, aux, work, space, n, by: Turning):
        of = Arguments(maps.a, maps.b, maps.c, maps.second, aux, work, space + HEADER, n, by)
        shared = cuda.shared.array(0, int8)
        base = ring.aligned(shared_address(shared))
        bars = int32(base + forms.RING + forms.SLOTS * forms.BOX)
        t, group = int32(cuda.threadIdx.x & 127), int32(cuda.threadIdx.x >> 7)
        if cuda.threadIdx.x == 0:
            forms.prepare(bars, stages, readers)
        if cluster > 1:
            hopper.cluster_arrive()
            hopper.cluster_wait()
        cuda.syncthreads()
        item, end, _, _ = load_int4(work + int64(cuda.blockIdx.x // cluster) * 16)
        block(of, base, bars, item, end, t, group)
        if cluster > 1:  # others may still write or signal here
            hopper.cluster_arrive()
            hopper.cluster_wait()

    args = "l l l l l l l r l l r r"
    return Kernel(
        gemm_wgmma, args, forms.THREADS, forms.SHARED, cluster, together=form.pieces == "together"
    )


@cache
def sum_kernel(form: forms.Form) -> Kernel:
    """The kernel that sums the pieces afterwards: map of C, work list, pieces, blocks of `gemm`."""
    sums, cluster = make_sums(form), form.cluster

    def gemm_sum_pieces(map_c, work, space, blocks):
        shared = cuda.shared.array(0, int8)
        base = ring.aligned(shared_address(shared))
        t, c = int32(cuda.threadIdx.x & 127), int32(cuda.threadIdx.x >> 7)
        of = Arguments(0, 0, map_c, 0, 0, work, space + HEADER, 0, Turning(0, 0, 0, 0))
        if t == 0:
            hopper.map_acquire(map_c)
        me = Consumer(base, base, int32(base + c * 2 * forms.BOX), c, t)
        sums(of, int32(blocks // cluster + cuda.blockIdx.x * 2 + c), me)
        if t == 0:
            hopper.bulk_wait()

    return Kernel(gemm_sum_pieces, "l l l r", 256, ring.ALIGN + forms.SLOTS * forms.BOX)
