# Made from book/07d-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-out
"""What becomes of a tile's sums: bias, GELU, residual; out to C; pieces, and their sum.

c is the consumer, 0 or 1; t a thread's number in its warpgroup; acc its registers, of which 4 j to
4 j + 3 hold two columns of C in two rows, 8 apart (chapter 7d has the table).
"""

from typing import Any

from nanoeuler.engines.gpu.gemm_form import (
    BOX,
    PIECE,
    REGISTERS,
    TILE_M,
    Form,
    advance,
    make_release,
)
from nanoeuler.engines.gpu.hopper import (
    bulk_commit,
    bulk_wait_read,
    mbarrier_wait,
    proxy_fence,
    stmatrix4,
    tma_add,
    tma_store,
)
from nanoeuler.engines.gpu.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.ptx import (
    barrier,
    high_bf16,
    ldmatrix4,
    load_float4_if_below,
    load_if_below,
    load_int4,
    low_bf16,
    pack_bf16,
    store_float4,
    store_shared_float2,
    tanh_approx,
)


def gelu(x):
    """GELU, tanh form, of a float32: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    half = float32(0.5) * x
    inner = x * (float32(0.7978845608) + float32(0.0356774081) * x * x)
    return half + half * tanh_approx(inner)


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


def make_residual(form: Form) -> Any:
    """residual(acc, base, bars, stage, phase, c, t): acc += the tile that waits in the ring.

    Two stages hold 128 x 128 each, in boxes of 64 columns. Returns the ring's state after them.
    """
    stages, stage_bytes = form.stages, form.stage
    release = make_release(form)

    def residual(acc, base, bars, stage, phase, c, t):
        lane = int32(t & 31)
        r = int32((t >> 5) * 16 + (lane & 15))
        for half in range(2):
            mbarrier_wait(bars + 8 * stage, phase)
            at = int32(base + stage * stage_bytes + c * BOX + r * 128)
            for q in range(2):
                for j in range(4):
                    chunk = int32(((2 * j + (lane >> 4)) ^ (r & 7)) * 16)
                    add_row(acc, half * 64 + q * 32 + j * 8, int32(at + q * 2 * BOX + chunk))
            barrier(1 + c, 128)  # all warps have read it, not only the one that says so
            release(bars + 8 * (stages + stage), t)
            stage, phase = advance(stage, phase, stages)
        return stage, phase

    return residual


def put_row(acc, i, address):
    """acc[i : i + 8] as bf16: a warp's 16 rows of 16 columns, each lane with its row's address."""
    stmatrix4(
        address,
        pack_bf16(acc[i], acc[i + 1]), pack_bf16(acc[i + 2], acc[i + 3]),
        pack_bf16(acc[i + 4], acc[i + 5]), pack_bf16(acc[i + 6], acc[i + 7]),
    )  # fmt: skip


def put_bf16(acc, i, box, t):
    """32 registers from `i` on to a box of 64 x 64 bf16; chunk q of row r stands at q ^ (r & 7)."""
    lane = int32(t & 31)
    r = int32((t >> 5) * 16 + (lane & 15))
    for j in range(4):
        chunk = int32(((2 * j + (lane >> 4)) ^ (r & 7)) * 16)
        put_row(acc, i + j * 8, int32(box + r * 128 + chunk))


def put_float32(acc, i, box, t):
    """16 registers from `i` on to a box of 64 x 32 float32, swizzled in the same way."""
    r, pair = int32((t >> 5) * 16 + ((t & 31) >> 2)), int32(t & 3)
    at = int32(box + r * 128 + (pair & 1) * 8)
    for j in range(4):
        chunk = int32(((2 * j + (pair >> 1)) ^ (r & 7)) * 16)
        a = i + 4 * j
        store_shared_float2(at + chunk, acc[a], acc[a + 1])
        store_shared_float2(at + chunk + 1024, acc[a + 2], acc[a + 3])


def make_strip(form: Form) -> Any:
    """strip(acc, i, box, map_c, column, row, c, t): a strip's registers, from i on, to C."""
    put = put_float32 if form.out == "float32" else put_bf16
    add = form.epilogue == "add"

    def strip(acc, i, box, map_c, column, row, c, t):
        if t == 0:
            bulk_wait_read()  # what stood in this box has left
        barrier(1 + c, 128)
        put(acc, i, box, t)
        proxy_fence()
        barrier(1 + c, 128)
        if t == 0:
            if add:
                tma_add(map_c, column, row, box)
            else:
                tma_store(map_c, column, row, box)
            bulk_commit()

    return strip


def make_tile(form: Form) -> Any:
    """tile(acc, boxes, map_c, column, row, c, t): a consumer's registers to C, strip by strip."""
    registers, wide = form.strip, form.strip * 2  # of a strip; its columns
    across = form.columns // wide
    strip = make_strip(form)

    def tile(acc, boxes, map_c, column, row, c, t):
        for q in range(REGISTERS // registers):
            x, y = column + q % across * wide, row + q // across * 64
            strip(acc, q * registers, boxes + (q & 1) * BOX, map_c, x, y, c, t)

    return tile


def put_piece(acc, address, t):
    """A consumer's 128 registers: four of them are 16 bytes of each thread, side by side."""
    for j in range(REGISTERS // 4):
        i = 4 * j
        store_float4(
            address + int64(j * 2048 + t * 16), acc[i], acc[i + 1], acc[i + 2], acc[i + 3]
        )


def make_gather(form: Form) -> Any:
    """gather(total, address, step, count): total = the sum of pieces of a strip, in their order.

    `count` pieces, `step` bytes apart; 64 registers' worth is on its way at a time.
    """
    registers = form.strip
    together = 64 // registers

    def gather(total, address, step, count):
        batch = cuda.local.array(64, float32)
        for i in range(registers):
            total[i] = float32(0)
        for first in range(0, count, together):
            for u in range(together):
                for j in range(registers // 4):
                    at = address + int64(first + u) * step + j * 2048
                    i = u * registers + j * 4
                    a, b, c, d = load_float4_if_below(at, first + u, count)
                    batch[i], batch[i + 1], batch[i + 2], batch[i + 3] = a, b, c, d
            for i in range(64):
                total[i % registers] += batch[i]

    return gather


def make_sums(form: Form) -> Any:
    """sums(...): a warpgroup walks its list of strips, sums the pieces of each, puts it in C."""
    cluster, columns, registers = form.cluster, form.columns, form.strip
    gather, strip = make_gather(form), make_strip(form)

    def sums(work, head, pieces, boxes, map_c, c, t):
        total = cuda.local.array(registers, float32)
        item, end, _, _ = load_int4(work + int64(head) * 16)
        side = int32(0)
        while item < end:
            x, y, where, slots = load_int4(work + int64(item) * 16)
            rank, half, q = int32(where >> 8), int32((where >> 4) & 1), int32(where & 15)
            block = int32((slots & 0xFFFF) * cluster + rank)
            inside = int32(half * (PIECE // 2) + q * (registers * 512) + t * 16)
            at = pieces + int64(block) * PIECE + int64(inside)
            gather(total, at, int64(cluster * PIECE), int32(slots >> 16))
            row = int32((x * cluster + rank) * TILE_M + half * 64)
            column = int32(y * columns + q * registers * 2)
            strip(total, 0, boxes + side * BOX, map_c, column, row, c, t)
            side = int32(side ^ 1)
            item = int32(item + 1)

    return sums


def make_finish(form: Form) -> Any:
    """finish(...): a tile's registers to C, or as a piece to memory; returns the ring's state."""
    tile, bias, residual = make_tile(form), make_bias(form), make_residual(form)
    biased, added = "bias" in form.epilogue, form.epilogue == "residual"
    split, cluster, columns = form.pieces != "no", form.cluster, form.columns
    own = 0 if form.pingpong else 64  # rows of a tile that are above the second consumer's

    def finish(acc, boxes, base, bars, map_c, aux, pieces, n, x, y, slot, stage, phase, c, t):
        rank = int32(cuda.blockIdx.x & (cluster - 1))
        column = int32(y * columns)
        if biased:
            bias(acc, aux, column, n, int32(t & 31))
        if added:
            stage, phase = residual(acc, base, bars, stage, phase, c, t)
        if split and slot >= 0:
            block = int32(slot * cluster + rank)
            put_piece(acc, pieces + int64(block) * PIECE + int64(c * (PIECE // 2)), t)
        else:
            row = int32((x * cluster + rank) * TILE_M + c * own)
            tile(acc, boxes, map_c, column, row, c, t)
        return stage, phase

    return finish
