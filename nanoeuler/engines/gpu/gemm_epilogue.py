# Made from book/07d-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-out
"""What becomes of a tile's sums on their way to C: curves, bias, a tile of another array; strips.

c is the consumer, 0 or 1; t a thread's number in its warpgroup; acc its registers, of which 4 j to
4 j + 3 hold two columns of C in two rows, 8 apart (chapter 7d has the table).
"""

from typing import Any

from nanoeuler.engines.gpu.gemm_form import BOX, REGISTERS, Form, advance, make_release
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
    load_if_below,
    low_bf16,
    pack_bf16,
    store_shared_float2,
    tanh_approx,
)

STRIPS = 4  # of 64 x 64, in a consumer's sums


def gelu_tangent(x):
    """t of GELU(x) = x/2 (1 + t), tanh form; and x squared."""
    square = x * x
    return tanh_approx(x * (float32(0.7978845608) + float32(0.0356774081) * square)), square


def gelu(x):
    """GELU, tanh form, of a float32: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    t, _ = gelu_tangent(x)
    half = float32(0.5) * x
    return half + half * t


def gelu_and_slope(x):
    """GELU(x) and its slope, equation eq-gelu-slope; |x| is below 1e19, so that x x is finite."""
    t, square = gelu_tangent(x)
    half, one = float32(0.5) * x, float32(1)
    steep = float32(0.7978845608) + float32(0.1070322244) * square
    return half + half * t, float32(0.5) * (one + t) + half * (one - t * t) * steep


def silu(x):
    """x sigmoid(x) of a float32."""
    half = float32(0.5) * x
    return half + half * tanh_approx(half)


def make_bias(form: Form) -> Any:
    """bias(acc, address, column, n, lane): acc = f(acc + bias), f GELU or nothing."""
    columns, curved = form.columns, form.epilogue == "bias and gelu" and not form.second
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


def put_bf16(acc, i, box, t):
    """32 registers from `i` on to a box of 64 x 64 bf16; chunk q of row r stands at q ^ (r & 7)."""
    lane = int32(t & 31)
    r = int32((t >> 5) * 16 + (lane & 15))
    for j in range(4):
        chunk, k = int32(((2 * j + (lane >> 4)) ^ (r & 7)) * 16), i + j * 8
        stmatrix4(
            int32(box + r * 128 + chunk),
            pack_bf16(acc[k], acc[k + 1]), pack_bf16(acc[k + 2], acc[k + 3]),
            pack_bf16(acc[k + 4], acc[k + 5]), pack_bf16(acc[k + 6], acc[k + 7]),
        )  # fmt: skip


def put_pairs(pairs, i, box, t):
    """The same of 16 registers that hold pairs of bf16."""
    lane = int32(t & 31)
    r = int32((t >> 5) * 16 + (lane & 15))
    for j in range(4):
        k, place = i + 4 * j, int32(box + r * 128 + ((2 * j + (lane >> 4)) ^ (r & 7)) * 16)
        stmatrix4(place, pairs[k], pairs[k + 1], pairs[k + 2], pairs[k + 3])


def put_float32(acc, i, box, t):
    """16 registers from `i` on to a box of 64 x 32 float32, swizzled in the same way."""
    r, pair = int32((t >> 5) * 16 + ((t & 31) >> 2)), int32(t & 3)
    at = int32(box + r * 128 + (pair & 1) * 8)
    for j in range(4):
        chunk = int32(((2 * j + (pair >> 1)) ^ (r & 7)) * 16)
        a = i + 4 * j
        store_shared_float2(at + chunk, acc[a], acc[a + 1])
        store_shared_float2(at + chunk + 1024, acc[a + 2], acc[a + 3])


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


def make_strip(form: Form) -> Any:
    """strip(acc, i, box, map_c, column, row, c, t): a strip's registers, from i on, to C."""
    put = put_float32 if form.out == "float32" else put_bf16
    send = make_send(form.epilogue == "add")

    def strip(acc, i, box, map_c, column, row, c, t):
        free(c, t)
        put(acc, i, box, t)
        send(map_c, column, row, box, c, t)

    return strip


def curve_strip(acc, i):
    """32 registers from `i` on: each the GELU of what it is in bf16."""
    for j in range(16):
        k = i + 2 * j
        pair = pack_bf16(acc[k], acc[k + 1])
        acc[k], acc[k + 1] = gelu(low_bf16(pair)), gelu(high_bf16(pair))


def make_tile(form: Form) -> Any:
    """tile(acc, boxes, map_c, map_u, column, row, c, t): a consumer's registers to C, by strips.

    map_u: where u goes before its GELU is taken, where the form says so.
    """
    registers, wide = form.strip, form.strip * 2  # of a strip; its columns
    across = form.of_c // wide
    count = REGISTERS // registers * form.of_c // form.columns
    both = form.second and form.epilogue == "bias and gelu"
    strip = make_strip(form)

    def two(acc, q, boxes, map_c, map_u, column, row, c, t):
        x, y, i = column + q % across * wide, row + q // across * 64, q * registers
        strip(acc, i, boxes, map_u, x, y, c, t)
        curve_strip(acc, i)
        strip(acc, i, boxes + BOX, map_c, x, y, c, t)

    def tile(acc, boxes, map_c, map_u, column, row, c, t):
        if both:  # too long for the compiler to unroll, and a loop would put acc into memory
            two(acc, 0, boxes, map_c, map_u, column, row, c, t)
            two(acc, 1, boxes, map_c, map_u, column, row, c, t)
            two(acc, 2, boxes, map_c, map_u, column, row, c, t)
            two(acc, 3, boxes, map_c, map_u, column, row, c, t)
        else:
            for q in range(count):
                x, y, i = column + q % across * wide, row + q // across * 64, q * registers
                strip(acc, i, boxes + (q & 1) * BOX, map_c, x, y, c, t)

    return tile


def add_pair(acc, i, pair):
    """acc[i : i + 2] += a pair of bf16, which is returned."""
    acc[i] += low_bf16(pair)
    acc[i + 1] += high_bf16(pair)
    return pair


def bend_pair(acc, i, pair):
    """acc[i : i + 2] *= GELU' of a pair of bf16; returns GELU of the pair."""
    low, low_slope = gelu_and_slope(low_bf16(pair))
    high, high_slope = gelu_and_slope(high_bf16(pair))
    acc[i] *= low_slope
    acc[i + 1] *= high_slope
    return pack_bf16(low, high)


def read_strip(u, q, at, t):
    """Registers 16 q to 16 q + 15 of u: a box of 64 x 64, pairs as `put_bf16` would pack them."""
    lane = int32(t & 31)
    r = int32((t >> 5) * 16 + (lane & 15))
    for j in range(4):
        i = q * 16 + j * 4
        place = int32(at + r * 128 + ((2 * j + (lane >> 4)) ^ (r & 7)) * 16)
        u[i], u[i + 1], u[i + 2], u[i + 3] = ldmatrix4(place)


def make_read_tile(form: Form) -> Any:
    """read_tile(u, base, bars, stage, phase, c, t): the tile that waits in the ring, 128 x 128 a
    stage in boxes of 64 columns, into 64 registers. Returns the ring's state after it."""
    stages, stage_bytes, pingpong = form.stages, form.stage, form.pingpong
    stops, each = (1, STRIPS) if pingpong else (2, STRIPS // 2)  # stages, and strips of each
    release = make_release(form)

    def read_tile(u, base, bars, stage, phase, c, t):
        for stop in range(stops):
            mbarrier_wait(bars + 8 * stage, phase)
            for s in range(each):
                q = stop * each + s
                side = q // 2 * BOX if pingpong else c * BOX
                read_strip(u, q, int32(base + stage * stage_bytes + q % 2 * 2 * BOX + side), t)
            barrier(1 + c, 128)  # all warps have read it, not only the one that says so
            release(bars + 8 * (stages + stage), t)
            stage, phase = advance(stage, phase, stages)
        return stage, phase

    return read_tile


def make_meet(form: Form) -> Any:
    """meet(acc, boxes, base, bars, map_d, column, row, stage, phase, c, t): acc and the tile that
    waits in the ring; map_d: where GELU of it goes. Returns the ring's state after it."""
    across, second = form.columns // 64, form.second
    read_tile, send = make_read_tile(form), make_send(False)
    meet_pair = add_pair if form.epilogue == "residual" else bend_pair

    def one(acc, u, q, boxes, map_d, column, row, c, t):
        for i in range(16):
            u[q * 16 + i] = meet_pair(acc, q * 32 + 2 * i, u[q * 16 + i])
        if second:
            box = int32(boxes + (q & 1) * BOX)
            free(c, t)
            put_pairs(u, q * 16, box, t)
            send(map_d, column + q % across * 64, row + q // across * 64, box, c, t)

    def meet(acc, boxes, base, bars, map_d, column, row, stage, phase, c, t):
        u = cuda.local.array(64, int32)
        stage, phase = read_tile(u, base, bars, stage, phase, c, t)
        one(acc, u, 0, boxes, map_d, column, row, c, t)
        one(acc, u, 1, boxes, map_d, column, row, c, t)
        one(acc, u, 2, boxes, map_d, column, row, c, t)
        one(acc, u, 3, boxes, map_d, column, row, c, t)
        return stage, phase

    return meet


def make_swiglu(form: Form) -> Any:
    """swiglu(acc, boxes, map_s, column, row, n, c, t): acc[:64] = silu(acc[:64]) acc[64:].

    map_s: (m, 2 n), where both go before, rounded, where the form says so; n is then a multiple of
    64, so that a strip of gates ends where they end.
    """
    second, strip = form.second, make_strip(form)

    def swiglu(acc, boxes, map_s, column, row, n, c, t):
        if second:
            for half in range(2):
                x = int32(column + half * 64)
                if x < n:  # for both boxes, so that they stay in turn
                    strip(acc, half * 32, boxes, map_s, x, row, c, t)
                    strip(acc, 64 + half * 32, boxes + BOX, map_s, x + n, row, c, t)
        for i in range(64):
            gate, up = acc[i], acc[64 + i]
            if second:
                pair = pack_bf16(gate, up)
                gate, up = low_bf16(pair), high_bf16(pair)
            acc[i] = silu(gate) * up

    return swiglu
