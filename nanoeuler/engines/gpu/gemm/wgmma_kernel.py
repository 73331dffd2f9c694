# Made from book/11d-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-kernel
"""The kernels of a product: a producer that fetches, two consumers that multiply on tensor cores.

    blockIdx    -> cluster, and rank in it (neighbours along m): a list of tiles each
    warpgroup 0 -> the producer, one thread: k-blocks of A and B into the ring; another thread,
                   of another warp: what strips of a ping-pong tile meet, into bays
    warpgroup 1, 2 -> consumers c = 0, 1: rows 64 c of a 128 x 256 tile (cooperative), or every
                   other 128 x 128 tile (ping-pong)
"""

from functools import cache
from typing import Any

from nanoeuler.engines.gpu.gemm.wgmma_column_sums import strip_columns
from nanoeuler.engines.gpu.gemm.wgmma_epilogue import (
    make_add_bias,
    make_curve,
    make_leave,
    make_meet,
    make_met_strip,
    make_read_tile,
    make_strip,
    make_swiglu,
    make_tile,
    make_turns_of_heads,
    put_bf16,
    put_pairs,
)

# isort: split


from nanoeuler.engines.gpu.gemm.wgmma_form import (
    ALIGN,
    BOX,
    FEW,
    HEADER,
    LINES,
    MANY,
    PIECE,
    REGISTERS,
    RING,
    SHARED,
    SLOTS,
    STRIPS,
    THREADS,
    TILE_M,
    Form,
    advance,
    bays_bars,
    make_release,
    prepare,
    skip,
)
from nanoeuler.engines.gpu.gemm.wgmma_schedule import TILE_K
from nanoeuler.engines.gpu.gemm.wgmma_split_k import make_sums, put_piece

# isort: split


from nanoeuler.engines.gpu.gemm.wgmma_rope import Turning
from nanoeuler.engines.gpu.lang.hopper import (
    bulk_wait,
    cluster_arrive,
    cluster_wait,
    descriptor,
    load_tile,
    map_acquire,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    set_registers,
    tma_load,
    tma_load_multicast,
    wgmma,
    wgmma_wait,
    wgmma_wait_previous,
)
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int8, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.engines.gpu.lang.ptx import barrier, grid_barrier, load_int4, shared_address


def make_fetch_b(form: Form) -> Any:
    """fetch_b(to, full, map_b, k, y, rank, n): the block's share of B of tiles in column y."""
    cluster, dense, gated = form.cluster, form.layout[1] == "T", form.epilogue == "swiglu"
    share, of_c, everyone = form.columns // cluster, form.of_c, (1 << cluster) - 1
    halved, part_of_k = form.halved, TILE_K // cluster
    parts = 2 if gated and cluster == 1 else 1  # gates and ups; in a cluster a block has either
    wide = share // parts

    def load(to, map_b, x, y, full):
        if cluster > 1:
            tma_load_multicast(to, map_b, x, y, full, everyone)
        else:
            tma_load(to, map_b, x, y, full)

    def fetch_b(to, full, map_b, k, y, rank, n):
        if halved:
            for j in range(of_c // 64):
                at, x = int32(to + j * BOX + rank * (BOX // 2)), int32(y * of_c + j * 64)
                load(at, map_b, x, k + rank * part_of_k, full)
            return
        column = int32(y * of_c + rank * (n if gated else share))
        to = int32(to + rank * (share * TILE_K * 2))
        for part in range(parts):  # ups come n after gates, in B's rows or columns
            at, x = int32(to + part * (wide * TILE_K * 2)), int32(column + part * n)
            if dense:
                load(at, map_b, k, x, full)
            else:
                for j in range(wide // 64):
                    load(at + j * BOX, map_b, x + j * 64, k, full)

    return fetch_b


def make_fetch(form: Form) -> Any:
    """fetch(to, full, map_a, map_b, k, row, y, rank, n): one k-block of A and B into a stage."""
    layout, a_bytes, fetch_b = form.layout, TILE_M * TILE_K * 2, make_fetch_b(form)

    def fetch(to, full, map_a, map_b, k, row, y, rank, n):
        if layout == "TN":
            tma_load(to, map_a, row, k, full)
            tma_load(to + BOX, map_a, row + 64, k, full)
        else:
            tma_load(to, map_a, k, row, full)
        fetch_b(int32(to + a_bytes), full, map_b, k, y, rank, n)

    return fetch


def make_fetch_tile(form: Form) -> Any:
    """fetch_tile(base, bars, map_d, row, column, stage, phase): of another array, for `read_tile`.

    128 x 128 a stage. Returns the ring's state after them.
    """
    stages, stage_bytes = form.stages, form.stage

    def fetch_tile(base, bars, map_d, row, column, stage, phase):
        for half in range(2):
            full = int32(bars + 8 * stage)
            mbarrier_wait(full + 8 * stages, phase ^ 1)
            mbarrier_expect(full, 4 * BOX)
            to = int32(base + stage * stage_bytes)
            for j in range(2):
                tma_load(to + j * 2 * BOX, map_d, column + half * 128 + j * 64, row, full)
            stage, phase = advance(stage, phase, stages)
        return stage, phase

    return fetch_tile


def make_bring(form: Form) -> Any:
    """bring(base, bars, aux, work, item, end): one thread fetches what strips meet into bays."""
    cluster, beside, first = form.cluster, form.beside, bays_bars(form)
    of_c, bays, both = form.of_c, form.bays, beside == 2

    def bring(base, bars, aux, work, item, end):
        rank, phase = int32(cuda.blockIdx.x & (cluster - 1)), int32(0)
        map_acquire(aux)
        while item < end:
            x, y, _, _ = load_int4(work + int64(item) * 16)
            row, column = int32((x * cluster + rank) * TILE_M), int32(y * of_c)
            for q in range(STRIPS):
                full = int32(bars + first + (phase * STRIPS + q) * 8)
                to = int32(base + bays + q * beside * BOX)
                at, down = int32(column + q % 2 * 64), int32(row + q // 2 * 64)
                empty = int32(bars + first + (2 * STRIPS + q) * 8)
                mbarrier_wait(empty, phase ^ 1)  # what was there has left
                mbarrier_expect(full, beside * BOX)
                if both:
                    load_tile(to, aux, at, down, 0, 0, full)
                    load_tile(to + BOX, aux, at, down, 1, 0, full)
                else:
                    tma_load(to, aux, at, down, full)
            item, phase = int32(item + 1), int32(phase ^ 1)

    return bring


def make_produce(form: Form) -> Any:
    """produce(...): one thread walks the list of items and keeps the ring full."""
    cluster, stages, stage_bytes, columns = form.cluster, form.stages, form.stage, form.columns
    met, fetch, fetch_tile = form.ringed, make_fetch(form), make_fetch_tile(form)

    def produce(base, bars, map_a, map_b, aux, work, n, item, end):
        rank = int32(cuda.blockIdx.x & (cluster - 1))
        map_acquire(map_a)
        map_acquire(map_b)
        if met:
            map_acquire(aux)
        stage, phase = int32(0), int32(0)
        while item < end:
            x, y, ks, _ = load_int4(work + int64(item) * 16)
            row = int32((x * cluster + rank) * TILE_M)
            for k in range(ks & 0xFFFF, ks >> 16):
                full = int32(bars + 8 * stage)
                mbarrier_wait(full + 8 * stages, phase ^ 1)  # its last readers are done
                mbarrier_expect(full, stage_bytes)
                to = int32(base + stage * stage_bytes)
                fetch(to, full, map_a, map_b, int32(k * TILE_K), row, y, rank, n)
                stage, phase = advance(stage, phase, stages)
            if met:
                column = int32(y * columns)
                stage, phase = fetch_tile(base, bars, aux, row, column, stage, phase)
            item = int32(item + 1)

    return produce


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


def make_out_strip(form: Form) -> Any:
    """out_strip(acc, u, q, ...): all that is done with strip q of the sums, and it goes to C."""
    across, second, in_turn = form.columns // 64, form.second, form.boxes[1]
    met, summed, curved = form.ringed, form.sums != "no", "and gelu" in form.epilogue
    meet, curve = make_meet(form), make_curve(form)
    strip, strip_of_pairs = make_strip(put_bf16), make_strip(put_pairs)

    def out_strip(acc, u, q, boxes, map_c, map_d, lines, n, column, row, line, c, t):
        i, x, y = q * 32, int32(column + q % across * 64), int32(row + q // across * 64)
        if met:
            meet(acc, u, q)
        if met and second:
            strip_of_pairs(u, q * 16, boxes, map_d, x, y, c, t)
        elif second:
            strip(acc, i, boxes, map_d, x, y, c, t)
        if curved:
            curve(acc, i)
        if summed:
            strip_columns(acc, i, lines, x, int32(line + q // across * 4), n, int32(t & 31))
        box = boxes + BOX if second else boxes + q % in_turn * BOX
        strip(acc, i, box, map_c, x, y, c, t)

    return out_strip


def make_out_met(form: Form) -> Any:
    """out_met(acc, base, bars, ...): a tile's four strips meet what was brought, and go to C."""
    strip, leave, summed = make_met_strip(form), make_leave(form), form.sums != "no"
    bays, first = form.bays, bays_bars(form)

    def add_up(acc, q, lines, column, line, n, t):
        if summed:
            at, below = int32(column + q % 2 * 64), int32(line + q // 2 * 4)
            strip_columns(acc, q * 32, lines, at, below, n, int32(t & 31))

    def out_met(acc, base, bars, lap, map_c, map_d, lines, n, column, row, line, c, t):
        base = int32(base + (lap >> 1))  # lap is 0 or 1, but no compiler knows
        full, at = int32(bars + (lap >> 1) + first), int32(base + bays)
        boxes = int32(base + RING + c * 2 * BOX)
        strip(acc, 0, full, lap, at, boxes, map_c, map_d, column, row, c, t)
        add_up(acc, 0, lines, column, line, n, t)
        strip(acc, 1, full, lap, at, boxes, map_c, map_d, column, row, c, t)
        add_up(acc, 1, lines, column, line, n, t)
        strip(acc, 2, full, lap, at, boxes, map_c, map_d, column, row, c, t)
        add_up(acc, 2, lines, column, line, n, t)
        strip(acc, 3, full, lap, at, boxes, map_c, map_d, column, row, c, t)
        add_up(acc, 3, lines, column, line, n, t)
        leave(full, t)

    return out_met


def make_finish(form: Form) -> Any:
    """finish(...): a tile's registers to C, or as a piece to memory; returns the ring's state."""
    bias, read_tile, swiglu = make_add_bias(form), make_read_tile(form), make_swiglu(form)
    tile, out_strip, cluster, of_c = make_tile(form), make_out_strip(form), form.cluster, form.of_c
    biased, met, gated = form.way.aux == "bias", form.ringed, form.epilogue == "swiglu"
    brought, out_met = form.beside > 0, make_out_met(form)
    split, plain = form.pieces != "no", gated or form.out == "float32"
    own = 0 if form.pingpong else 64  # rows of a tile that are above the second consumer's
    fourth = form.registers == REGISTERS

    def finish(
        acc, boxes, base, bars, map_c, map_d, aux, space, n, x, y, slot, stage, phase, lap, c, t
    ):  # fmt: skip
        rank = int32(cuda.blockIdx.x & (cluster - 1))
        block = int32(x * cluster + rank)
        row, column = int32(block * TILE_M + c * own), int32(y * of_c)
        line, u = int32(block * LINES + c * (own // 16) + (t >> 5)), cuda.local.array(64, int32)
        if met:
            stage, phase = read_tile(u, base, bars, stage, phase, c, t)
        if biased:
            bias(acc, aux, column, n, int32(t & 31))
        if gated:
            swiglu(acc, boxes, map_d, column, row, n, c, t)
        if brought:
            out_met(acc, base, bars, lap, map_c, map_d, space, n, column, row, line, c, t)
        elif split and slot >= 0:
            piece = space + int64(int32(slot * cluster + rank)) * PIECE
            put_piece(acc, piece + int64(c * (PIECE // 2)), t)
        elif plain or split:
            tile(acc, boxes, map_c, column, row, c, t)
        else:
            out_strip(acc, u, 0, boxes, map_c, map_d, space, n, column, row, line, c, t)
            out_strip(acc, u, 1, boxes, map_c, map_d, space, n, column, row, line, c, t)
            out_strip(acc, u, 2, boxes, map_c, map_d, space, n, column, row, line, c, t)
            if fourth:
                out_strip(acc, u, 3, boxes, map_c, map_d, space, n, column, row, line, c, t)
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
    a_bytes, own, step = TILE_M * TILE_K * 2, 0 if pingpong else BOX, 2 if pingpong else 1
    multiply, release, finish = make_multiply(form), make_release(form), make_finish(form)
    take, pass_on = make_turns(form)
    registers, (look_up, turn_heads) = form.registers, make_turns_of_heads(form)
    wait, of_angles = wgmma_wait(registers), form.way.turn // 2 or 1
    first_box, in_turn = form.boxes

    def consume(base, bars, map_c, map_d, aux, work, space, n, by, item, end, c, t):
        acc, angles = cuda.local.array(registers, float32), cuda.local.array(of_angles, float32)
        # A descriptor has 18 bits of address; above them a cluster's addresses have the rank.
        a = int64(of_a) | int64(((base + c * own) & 0x3FFFF) >> 4)
        b = int64(of_b) | int64(((base + a_bytes) & 0x3FFFF) >> 4)
        boxes = int32(base + first_box + c * in_turn * BOX)
        stage, phase, turn = int32(0), int32(0), int32(c ^ 1)
        x, y, ks, slot = load_int4(work + int64(item) * 16)
        if pingpong and c == 1:  # the second tile, and so on
            stage, phase = skip(stage, phase, stages, ks >> 16)
            item = int32(item + 1)
            x, y, ks, slot = load_int4(work + int64(item) * 16)
        while item < end:
            item = int32(item + step)
            next_x, next_y, next_ks, next_slot = load_int4(work + int64(item) * 16)
            turn = take(bars, turn, c)
            look_up(angles, by, x, c, t)
            count = int32((ks >> 16) - (ks & 0xFFFF))
            stage, phase, last = multiply(acc, a, b, bars, stage, phase, count, t)
            pass_on(bars, c, t)
            wait(acc)
            release(bars + 8 * (stages + last), t)
            turn_heads(acc, angles, by, x, y, t)
            stage, phase = finish(
                acc, boxes, base, bars, map_c, map_d, aux, space, n, x, y, slot, stage, phase,
                int32(turn ^ c), c, t,
            )  # fmt: skip
            if pingpong:  # pass over the other consumer's stages
                stage, phase = skip(stage, phase, stages, count)
            x, y, ks, slot = next_x, next_y, next_ks, next_slot

    return consume


def arrival(block, blocks):
    """What a block adds to the word at which a grid waits: all add 2^31, and its top bit turns."""
    return 0x80000000 - (blocks - 1) if block == 0 else 1


def make_together(form: Form) -> Any:
    """together(...): the consumers of all blocks wait for each other, then sum the pieces.

    space: its first word has some top bit and zeros below, before and after.
    """
    sums, cluster, at_once = make_sums(form), form.cluster, form.pieces == "together"

    def together(base, map_c, work, space, c, t):
        if at_once:
            barrier(3, 256)
            if c == 0 and t == 0:
                grid_barrier(space, int32(arrival(cuda.blockIdx.x, cuda.gridDim.x)))
            barrier(3, 256)
            head = int32(cuda.gridDim.x // cluster + cuda.blockIdx.x * 2 + c)
            sums(work, head, space + HEADER, int32(base + RING + c * 2 * BOX), map_c, c, t)

    return together


@cache
def gemm_kernel(form: Form) -> Kernel:
    """The kernel of a form: maps of A, B, C, another output; aux (bias, or map), work list, space
    for pieces or for sums of columns, columns of C, a `Turning`."""
    cluster, stages, pingpong = form.cluster, form.stages, form.pingpong
    produce, consume, together = make_produce(form), make_consume(form), make_together(form)
    fewer, more = set_registers(FEW, False), set_registers(MANY, True)
    readers = cluster if pingpong else 2 * cluster  # warpgroups that give a stage back
    second, brought, bring = form.second, form.beside > 0, make_bring(form)

    def gemm_wgmma(map_a, map_b, map_c, map_d, aux, work, space, n, cos, sin, T, turned):
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
                produce(base, bars, map_a, map_b, aux, work, n, item, end)
            elif brought and t == 32:
                bring(base, bars, aux, work, item, end)
        else:
            more()
            c = int32(group - 1)
            if t == 0:
                map_acquire(map_c)
                if second:
                    map_acquire(map_d)
            by = Turning(cos, sin, T, turned)
            consume(base, bars, map_c, map_d, aux, work, space + HEADER, n, by, item, end, c, t)
            together(base, map_c, work, space, c, t)
            if t == 0:
                bulk_wait()
        if cluster > 1:  # others may still write or signal here
            cluster_arrive()
            cluster_wait()

    args = "l l l l l l l r l l r r"
    return Kernel(gemm_wgmma, args, THREADS, SHARED, cluster, together=form.pieces == "together")


@cache
def sum_kernel(form: Form) -> Kernel:
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
