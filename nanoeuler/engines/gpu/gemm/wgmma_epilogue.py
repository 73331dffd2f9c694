# Made from book/11d-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-out
"""What becomes of a tile's sums on their way to C: curves, bias, a tile of another array; strips.

c is the consumer, 0 or 1; t a thread's number in its warpgroup; acc its registers, of which 4 j to
4 j + 3 hold two columns of C in two rows, 8 apart (chapter 11d has the table).
"""

from typing import Any

from nanoeuler.engines.gpu.gemm.wgmma_form import BOX, STRIPS, TILE_M, Form, advance, make_release
from nanoeuler.engines.gpu.gemm.wgmma_rope import position, take_angles, turn
from nanoeuler.engines.gpu.lang.hopper import (
    bulk_commit,
    bulk_wait_read,
    bulk_wait_read_all,
    mbarrier_arrive,
    mbarrier_wait,
    proxy_fence,
    stmatrix4,
    store_tile,
    tma_add,
    tma_store,
)
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32
from nanoeuler.engines.gpu.lang.ptx import (
    barrier,
    high_bf16,
    ldmatrix4,
    low_bf16,
    pack_bf16,
    store_shared_float2,
)
from nanoeuler.engines.gpu.tile.accumulator import make_bias
from nanoeuler.engines.gpu.tile.curves import (
    gelu_and_slope_fast,
    gelu_fast,
    silu_fast,
    swiglu_and_slopes_fast,
)
from nanoeuler.engines.gpu.tile.layout import PANEL, chunk_at, lane_row, squares_at


def make_add_bias(form: Form) -> Any:
    """add_bias(acc, address, column, n, lane): acc += bias, of the columns from `column` on."""
    return make_bias(form.columns, 2 if form.pingpong else 1)


def put_bf16(acc, i, box, t):
    """32 registers from `i` on to a box of 64 x 64 bf16."""
    for j in range(4):
        k = i + j * 8
        stmatrix4(
            int32(box + squares_at(t, j)),
            pack_bf16(acc[k], acc[k + 1]), pack_bf16(acc[k + 2], acc[k + 3]),
            pack_bf16(acc[k + 4], acc[k + 5]), pack_bf16(acc[k + 6], acc[k + 7]),
        )  # fmt: skip


def put_pairs(pairs, i, box, t):
    """The same of 16 registers that hold pairs of bf16."""
    for j in range(4):
        k, place = i + 4 * j, int32(box + squares_at(t, j))
        stmatrix4(place, pairs[k], pairs[k + 1], pairs[k + 2], pairs[k + 3])


def put_float32(acc, i, box, t):
    """16 registers from `i` on to a box of 64 x 32 float32, swizzled in the same way."""
    row, pair = int32((t >> 5) * 16 + lane_row(int32(t & 31))), int32(t & 3)
    for j in range(4):
        chunk, k = int32(2 * j + (pair >> 1)), i + 4 * j
        at = int32(box + chunk_at(row, chunk, PANEL) + (pair & 1) * 8)
        store_shared_float2(at, acc[k], acc[k + 1])
        store_shared_float2(at + 1024, acc[k + 2], acc[k + 3])


def free(c, t):
    """The consumer's threads go on when the older of its two boxes can be written."""
    if t == 0:
        bulk_wait_read()  # what stood in this box has left
    barrier(1 + c, 128)


def make_send(add: bool) -> Any:
    """send(map_c, column, row, box, c, t): the box, which all have written, to C or added to it."""

    def send(map_c, column, row, box, c, t):
        proxy_fence()
        barrier(1 + c, 128)
        if t == 0:
            if add:
                tma_add(map_c, column, row, box)
            else:
                tma_store(map_c, column, row, box)
            bulk_commit()

    return send


def make_strip(put: Any, add: bool = False) -> Any:
    """strip(registers, i, box, map_c, column, row, c, t): a strip, from register i on, to C."""
    send = make_send(add)

    def strip(registers, i, box, map_c, column, row, c, t):
        free(c, t)
        put(registers, i, box, t)
        send(map_c, column, row, box, c, t)

    return strip


def make_wide_strip(form: Form) -> Any:
    """The same of a form's sums as they are, in its own dtype, stored in C or added to it."""
    return make_strip(put_float32 if form.out == "float32" else put_bf16, form.epilogue == "add")


def make_tile(form: Form) -> Any:
    """tile(acc, boxes, map_c, column, row, c, t): a consumer's registers to C as they are."""
    registers, wide = form.strip, form.strip * 2  # of a strip; its columns
    count, strip = form.of_c // wide, make_wide_strip(form)
    below = 64 if form.pingpong else 0  # of gated values: two strips, one below the other

    def tile(acc, boxes, map_c, column, row, c, t):
        if below:
            strip(acc, 0, boxes, map_c, column, row, c, t)
            strip(acc, 64, boxes + BOX, map_c, column, row + below, c, t)
        else:
            for q in range(count):
                x = column + q * wide
                strip(acc, q * registers, boxes + (q & 1) * BOX, map_c, x, row, c, t)

    return tile


def make_curve(form: Form) -> Any:
    """curve(acc, i): 32 registers from i on become their GELU, of bf16 where that is stored."""
    second = form.second

    def curve(acc, i):
        for j in range(0, 32, 2):
            low, high = acc[i + j], acc[i + j + 1]
            if second:
                pair = pack_bf16(low, high)
                low, high = low_bf16(pair), high_bf16(pair)
            acc[i + j], acc[i + j + 1] = gelu_fast(low), gelu_fast(high)

    return curve


def add_pair(acc, i, pair):
    """acc[i : i + 2] += a pair of bf16, which is returned."""
    acc[i] += low_bf16(pair)
    acc[i + 1] += high_bf16(pair)
    return pair


def bend_pair(acc, i, pair):
    """acc[i : i + 2] *= GELU' of a pair of bf16; returns GELU of the pair."""
    low, low_slope = gelu_and_slope_fast(low_bf16(pair))
    high, high_slope = gelu_and_slope_fast(high_bf16(pair))
    acc[i] *= low_slope
    acc[i + 1] *= high_slope
    return pack_bf16(low, high)


def read_strip(u, q, at, t):
    """Registers 16 q to 16 q + 15 of u: a box of 64 x 64, pairs as `put_bf16` would pack them."""
    for j in range(4):
        i = q * 16 + j * 4
        u[i], u[i + 1], u[i + 2], u[i + 3] = ldmatrix4(int32(at + squares_at(t, j)))


def make_read_tile(form: Form) -> Any:
    """read_tile(u, base, bars, stage, phase, c, t): the tile that waits in the ring, 128 x 128 a
    stage in boxes of 64 columns, into 64 registers. Returns the ring's state after it."""
    stages, stage_bytes, release = form.stages, form.stage, make_release(form)

    def read_tile(u, base, bars, stage, phase, c, t):
        for half in range(2):
            mbarrier_wait(bars + 8 * stage, phase)
            at = int32(base + stage * stage_bytes + c * BOX)
            for q in range(2):
                read_strip(u, half * 2 + q, int32(at + q * 2 * BOX), t)
            barrier(1 + c, 128)  # all warps have read it, not only the one that says so
            release(bars + 8 * (stages + stage), t)
            stage, phase = advance(stage, phase, stages)
        return stage, phase

    return read_tile


def make_meet(form: Form) -> Any:
    """meet(acc, u, q): strip q of the sums and that of a tile in pairs, which become their GELU in
    a backward one."""
    meet_pair = add_pair if form.epilogue == "residual" else bend_pair

    def meet(acc, u, q):
        for i in range(16):
            u[q * 16 + i] = meet_pair(acc, q * 32 + 2 * i, u[q * 16 + i])

    return meet


def make_swiglu(form: Form) -> Any:
    """swiglu(acc, boxes, map_s, column, row, n, c, t): gates become silu(gate) up.

    Of each half of a consumer's sums, 64 x 64 gates: beside each other from registers 0 and 32 on,
    in ping-pong below each other from 0 and 64 on; their ups are `away`. map_s: (m, 2 n), where
    both go before, rounded, where the form says so; n is then a multiple of 64, so that a strip of
    gates ends where they end.
    """
    second, strip = form.second, make_strip(put_bf16)
    half_on, away = (64, 32) if form.pingpong else (32, 64)
    right, down = (0, 64) if form.pingpong else (64, 0)

    def swiglu(acc, boxes, map_s, column, row, n, c, t):
        if second:
            for half in range(2):
                x, y, i = int32(column + half * right), int32(row + half * down), half * half_on
                if x < n:  # for both boxes, so that they stay in turn
                    strip(acc, i, boxes, map_s, x, y, c, t)
                    strip(acc, i + away, boxes + BOX, map_s, x + n, y, c, t)
        for half in range(2):
            for j in range(32):
                i = half * half_on + j
                gate, up = acc[i], acc[i + away]
                if second:
                    pair = pack_bf16(gate, up)
                    gate, up = low_bf16(pair), high_bf16(pair)
                acc[i] = silu_fast(gate) * up

    return swiglu


# %% sec-gemm-turn
def make_turns_of_heads(form: Form) -> Any:
    """look_up(angles, by, x, c, t) before a tile is multiplied, turn_heads(acc, angles, by, x, y,
    t) of its sums: the heads in its columns that are turned."""
    D, columns, cluster, pingpong = form.way.turn, form.columns, form.cluster, form.pingpong

    def take(angles, by, x, half, t):
        block, lane = int32(x * cluster + (cuda.blockIdx.x & (cluster - 1))), int32(t & 31)
        row = int32(block * TILE_M + half * 64 + (t >> 5) * 16 + (lane >> 2))
        above, below = position(row, by.T), position(int32(row + 8), by.T)
        take_angles(angles, by.cos, by.sin, above, below, D, lane)

    def turn_half(acc, first, angles, by, y):
        for i in range(columns // D):
            if y * columns + i * D < by.columns:
                turn(acc, first + i * (D // 2), angles, float32(1), D)

    def look_up(angles, by, x, c, t):
        if D > 0:
            take(angles, by, x, 0 if pingpong else c, t)

    def turn_heads(acc, angles, by, x, y, t):
        if D > 0:
            turn_half(acc, 0, angles, by, y)
            if pingpong:  # the lower 64 rows, while the other consumer multiplies
                take(angles, by, x, 1, t)
                turn_half(acc, 64, angles, by, y)

    return look_up, turn_heads


# %% sec-gemm-bays
def gate_pair(acc, i, gates, ups):
    """acc[i : i + 2] meet a pair of gates and one of ups; pairs of slopes of both, and of h."""
    a, b, c = swiglu_and_slopes_fast(acc[i], low_bf16(gates), low_bf16(ups))
    d, e, f = swiglu_and_slopes_fast(acc[i + 1], high_bf16(gates), high_bf16(ups))
    return pack_bf16(a, d), pack_bf16(b, e), pack_bf16(c, f)


def make_bend(form: Form) -> Any:
    """bend(acc, i, bay, box, t): 32 sums from i on meet what is in a bay; C's strip to a box.

    What is stored beside C stands in the bay then.
    """
    meet_pair = add_pair if form.epilogue == "residual" else bend_pair
    two, second = form.beside == 2, form.second

    def bend_two(acc, i, bay, box, t):
        gates, ups = cuda.local.array(16, int32), cuda.local.array(16, int32)
        read_strip(gates, 0, bay, t)
        read_strip(ups, 0, bay + BOX, t)
        for j in range(4):
            k, at = i + 8 * j, squares_at(t, j)
            a, e, u = gate_pair(acc, k, gates[4 * j], ups[4 * j])
            b, f, v = gate_pair(acc, k + 2, gates[4 * j + 1], ups[4 * j + 1])
            c, g, w = gate_pair(acc, k + 4, gates[4 * j + 2], ups[4 * j + 2])
            d, h, x = gate_pair(acc, k + 6, gates[4 * j + 3], ups[4 * j + 3])
            stmatrix4(bay + at, a, b, c, d)
            stmatrix4(bay + BOX + at, e, f, g, h)
            stmatrix4(box + at, u, v, w, x)

    def bend_one(acc, i, bay, box, t):
        u = cuda.local.array(16, int32)
        read_strip(u, 0, bay, t)
        for j in range(16):
            u[j] = meet_pair(acc, i + 2 * j, u[j])
        if second:
            put_pairs(u, 0, bay, t)
        put_bf16(acc, i, box, t)

    return bend_two if two else bend_one


def make_send_met(form: Form) -> Any:
    """send_met(map_c, map_d, x, y, box, bay): C's strip from its box, and what a bay holds."""
    two, second = form.beside == 2, form.second

    def send_met(map_c, map_d, x, y, box, bay):
        tma_store(map_c, x, y, box)
        if two:
            store_tile(map_d, x, y, 0, 0, bay)
            store_tile(map_d, x, y, 1, 0, bay + BOX)
        elif second:
            tma_store(map_d, x, y, bay)
        bulk_commit()

    return send_met


def make_met_strip(form: Form) -> Any:
    """met_strip(acc, q, full, lap, bays, boxes, map_c, map_d, column, row, c, t): strip q goes to
    C, and what it met to the second array. full: the first mbarrier of bays; lap: a parity."""
    beside, second, bend, send = form.beside, form.second, make_bend(form), make_send_met(form)

    def met_strip(acc, q, full, lap, bays, boxes, map_c, map_d, column, row, c, t):
        bay, box = int32(bays + q * beside * BOX), int32(boxes + (q & 1) * BOX)
        empty = int32(full + (2 * STRIPS + q) * 8)
        mbarrier_wait(full + (c * STRIPS + q) * 8, lap)
        free(c, t)
        if second and q > 1 and t == 0:
            mbarrier_arrive(empty - 16)  # strip q - 2 has left with its box
        bend(acc, q * 32, bay, box, t)
        proxy_fence()
        barrier(1 + c, 128)
        if t == 0:
            x, y = int32(column + q % 2 * 64), int32(row + q // 2 * 64)
            send(map_c, map_d, x, y, box, bay)
            if not second:
                mbarrier_arrive(empty)

    return met_strip


def make_leave(form: Form) -> Any:
    """leave(full, t): a tile's last two strips have left their bays."""
    second = form.second

    def leave(full, t):
        if second and t == 0:
            bulk_wait_read_all()
            mbarrier_arrive(full + (3 * STRIPS - 2) * 8)
            mbarrier_arrive(full + (3 * STRIPS - 1) * 8)

    return leave
