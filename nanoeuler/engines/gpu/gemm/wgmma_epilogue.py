# Made from book/11b-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-epilogue-operations
"""What becomes of a tile's sums on their way to C: operations on registers, and strips.

acc are the registers of a consumer's thread: one accumulator of 64 rows, in ping-pong two below
each other (`tile.layout`; chapter 11b has the table). An operation is a function of acc and of a
`Tile`; `epilogue` lists those of a form.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.gemm import wgmma_form as forms
from nanoeuler.engines.gpu.gemm.column_sums import strip_columns
from nanoeuler.engines.gpu.gemm.epilogue import PAIRS, curve_of, swiglu_backward_pair
from nanoeuler.engines.gpu.lang import hopper, ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32
from nanoeuler.engines.gpu.tile import curves, ring
from nanoeuler.engines.gpu.tile.accumulator import make_bias
from nanoeuler.engines.gpu.tile.layout import PANEL, chunk_at, lane_row, squares_at
from nanoeuler.engines.gpu.tile.rope import Turning, position, take_angles, turn
from nanoeuler.engines.gpu.tile.store import put_bf16


class Maps(NamedTuple):
    """Addresses of maps of A, B and C, and of the second array."""

    a: int
    b: int
    c: int
    second: int


class Arguments(NamedTuple):
    """What a kernel is given: the addresses of maps of A, B, C and of the second array; aux, the
    address of a bias, or of a map; those of the work list and of the space behind its header; the
    columns of C; and by what heads are turned."""

    a: int
    b: int
    c: int
    second: int
    aux: int
    work: int
    space: int
    n: int
    by: Turning


class Consumer(NamedTuple):
    """A thread of a consumer: where its block's ring, its mbarriers and the consumer's boxes begin
    in shared memory; the consumer, 0 or 1; and the thread's number in it."""

    base: int
    bars: int
    boxes: int
    c: int
    t: int


class Tile(NamedTuple):
    """A consumer's tile: its first row and column of C; the line of sums that its warp leaves; the
    parity of its bays; angles of its rows; and 64 registers for a tile of another array, in pairs.
    """

    of: Arguments
    me: Consumer
    row: int
    column: int
    line: int
    lap: int
    angles: Any
    u: Any


def make_add_bias(form: forms.Form) -> Callable:
    """add_bias(acc, tile): acc += bias."""
    bias = make_bias(form.columns, 2 if form.pingpong else 1)

    def add_bias(acc, tile):
        bias(acc, tile.of.aux, tile.column, tile.of.n, int32(tile.me.t & 31))

    return add_bias


def put_pairs(pairs, i, box, t):
    """16 registers from `i` on that hold pairs of bf16, to a box (`put_bf16` also packs them)."""
    for j in range(4):
        k, place = i + 4 * j, int32(box + squares_at(t, j))
        hopper.stmatrix4(place, pairs[k], pairs[k + 1], pairs[k + 2], pairs[k + 3])


def put_float32(acc, i, box, t):
    """16 registers from `i` on to a box of 64 x 32 float32, swizzled in the same way."""
    row, pair = int32((t >> 5) * 16 + lane_row(int32(t & 31))), int32(t & 3)
    for j in range(4):
        chunk, k = int32(2 * j + (pair >> 1)), i + 4 * j
        at = int32(box + chunk_at(row, chunk, PANEL) + (pair & 1) * 8)
        ptx.store_shared_float2(at, acc[k], acc[k + 1])
        ptx.store_shared_float2(at + 1024, acc[k + 2], acc[k + 3])


class Corner(NamedTuple):
    """Where a box of an array begins: the array's map, a column and a row."""

    map: int
    column: int
    row: int


def free(me):
    """The consumer's threads go on when the older of its two boxes can be written."""
    if me.t == 0:
        hopper.bulk_wait_read()  # what stood in this box has left
    ptx.barrier(1 + me.c, 128)


def make_strip(put: Callable, add: bool = False) -> Callable:
    """strip(registers, i, box, to, me): a strip, from register i on, by way of a box to its
    `Corner`, stored there or added to what is there."""

    def send(box, to, me):
        hopper.proxy_fence()
        ptx.barrier(1 + me.c, 128)  # all have written the box
        if me.t == 0:
            if add:
                hopper.tma_add(to.map, to.column, to.row, box)
            else:
                hopper.tma_store(to.map, to.column, to.row, box)
            hopper.bulk_commit()

    def strip(registers, i, box, to, me):
        free(me)
        put(registers, i, box, me.t)
        send(box, to, me)

    return strip


def make_strip_of_c(form: forms.Form) -> Callable:
    """`make_strip` for sums as they are, in C's dtype, stored in C or added to it."""
    return make_strip(put_float32 if form.out == "float32" else put_bf16, form.epilogue == "add")


class Strip(NamedTuple):
    """A part of a tile that goes out at once, 64 rows of 128 bytes of C: its first register, and
    its columns and rows from the tile's corner."""

    i: int
    right: int
    down: int


def strips(form: forms.Form) -> list[Strip]:
    """All strips of a consumer's tile, left to right, then those below; of SwiGLU, of gates."""
    wide = 128 // (4 if form.out == "float32" else 2)
    across = form.of_c // wide
    every = range(across * (2 if form.pingpong else 1))
    apart = 64 if form.epilogue == "swiglu" and form.pingpong else form.strip  # ups between gates
    return [Strip(q * apart, q % across * wide, q // across * 64) for q in every]


def make_store(form: forms.Form, strip: Strip, box: int, second: bool = False) -> Callable:
    """store(acc, tile): a strip of the sums by way of a box to C, or to the second array. If sums
    met a tile from the ring, the second array gets what that tile became, not the sums."""
    i, right, down = strip
    pairs = second and form.ringed
    put = make_strip(put_pairs if pairs else put_bf16) if second else make_strip_of_c(form)

    def store(acc, tile):
        to = tile.of.second if second else tile.of.c
        to = Corner(to, int32(tile.column + right), int32(tile.row + down))
        at = int32(tile.me.boxes + box * forms.BOX)
        if pairs:
            put(tile.u, i // 2, at, to, tile.me)
        else:
            put(acc, i, at, to, tile.me)

    return store


def make_curve(form: forms.Form, strip: Strip) -> Callable:
    """curve(acc, tile): a strip becomes its activation, from rounded sums if these are stored."""
    second, first = form.second, strip.i
    gelu = curve_of(form.epilogue)  # or another activation function

    def curve(acc, tile):
        for j in range(first, first + 32, 2):
            low, high = acc[j], acc[j + 1]
            if second:
                pair = ptx.pack_bf16(low, high)
                low, high = ptx.low_bf16(pair), ptx.high_bf16(pair)
            acc[j], acc[j + 1] = gelu(low), gelu(high)

    return curve


def read_strip(u, q, at, t):
    """Registers 16 q to 16 q + 15 of u: a box of 64 x 64, pairs as `put_bf16` would pack them."""
    for j in range(4):
        i = q * 16 + j * 4
        u[i], u[i + 1], u[i + 2], u[i + 3] = ptx.ldmatrix4(int32(at + squares_at(t, j)))


def make_read_tile(form: forms.Form) -> Callable:
    """read_tile(tile, stage, phase): the tile that waits in the ring, 128 x 128 a stage in boxes of
    64 columns, into tile.u. Returns the ring's state after it; without such a tile, as it was."""
    stages, stage_bytes, release = form.stages, form.stage, forms.make_release(form)

    def read_tile(tile, stage, phase):
        me = tile.me
        for half in range(2):
            hopper.mbarrier_wait(me.bars + 8 * stage, phase)
            at = int32(me.base + stage * stage_bytes + me.c * forms.BOX)
            for q in range(2):
                read_strip(tile.u, half * 2 + q, int32(at + q * 2 * forms.BOX), me.t)
            ptx.barrier(1 + me.c, 128)  # all warps have read it, not only the one that says so
            release(me.bars + 8 * (stages + stage), me.t)
            stage, phase = ring.advance(stage, phase, stages)
        return stage, phase

    def nothing(tile, stage, phase):
        return stage, phase

    return read_tile if form.ringed else nothing


def make_meet(form: forms.Form, strip: Strip) -> Callable:
    """meet(acc, tile): a strip of the sums meets that of tile.u. A residual is added. Of a u,
    the slope becomes a factor of the sums, and then u becomes its activation."""
    meet_pair, half = PAIRS[form.epilogue], strip.i // 2

    def meet(acc, tile):
        for i in range(16):
            tile.u[half + i] = meet_pair(acc, 2 * (half + i), tile.u[half + i])

    return meet


def make_store_gates(form: forms.Form) -> Callable:
    """store_gates(acc, tile): gates and ups, rounded, to the second array (m, 2 n).

    n is a multiple of 64, so that a strip of gates ends where they end.
    """
    away, strip, (first, other) = 32 if form.pingpong else 64, make_strip(put_bf16), strips(form)

    def half(acc, tile, i, right, down):
        x, y, n = int32(tile.column + right), int32(tile.row + down), tile.of.n
        if x < n:  # for both boxes, so that they stay in turn
            me, to = tile.me, tile.of.second
            strip(acc, i, me.boxes, Corner(to, x, y), me)
            strip(acc, i + away, int32(me.boxes + forms.BOX), Corner(to, int32(x + n), y), me)

    def store_gates(acc, tile):
        half(acc, tile, first.i, first.right, first.down)
        half(acc, tile, other.i, other.right, other.down)

    return store_gates


def make_gate(form: forms.Form) -> Callable:
    """gate_all(acc, tile): gates become silu(gate) up, of the rounded sums if those are stored."""
    away, second, on = 32 if form.pingpong else 64, form.second, strips(form)[1].i

    def gate_all(acc, tile):
        for half in range(2):
            for j in range(32):
                i = half * on + j
                gate, up = acc[i], acc[i + away]
                if second:
                    pair = ptx.pack_bf16(gate, up)
                    gate, up = ptx.low_bf16(pair), ptx.high_bf16(pair)
                acc[i] = curves.silu_fast(gate) * up

    return gate_all


# %% sec-gemm-turn
def make_turns_of_heads(form: forms.Form) -> tuple[Callable, Callable]:
    """look_up(angles, by, row, t) before a tile is multiplied, whose first row is `row`;
    turn_heads(acc, tile): the heads in its columns that are turned."""
    D, columns, pingpong = form.way.turn, form.columns, form.pingpong

    def look_up(angles, by, row, t):
        if D > 0:
            lane = int32(t & 31)
            above = int32(row + (t >> 5) * 16 + lane_row(lane))
            above, below = position(above, by.T), position(int32(above + 8), by.T)
            take_angles(angles, by.cos, by.sin, above, below, D, lane)

    def turn_half(acc, first, tile):
        for i in range(columns // D):
            if tile.column + i * D < tile.of.by.columns:
                turn(acc, first + i * (D // 2), tile.angles, float32(1), D)

    def turn_heads(acc, tile):
        turn_half(acc, 0, tile)
        if pingpong:  # the lower 64 rows, while the other consumer multiplies
            look_up(tile.angles, tile.of.by, int32(tile.row + 64), tile.me.t)
            turn_half(acc, 64, tile)

    return look_up, turn_heads


# %% sec-gemm-bays
def make_meet_bay(form: forms.Form) -> Callable:
    """meet_bay(acc, i, bay, box, t): 32 sums from i on meet what is in a bay; C's strip to a box.

    Then the bay holds what is stored beside C.
    """
    meet_pair, second = PAIRS.get(form.epilogue), form.second

    def meet_two(acc, i, bay, box, t):
        gates, ups = cuda.local.array(16, int32), cuda.local.array(16, int32)
        read_strip(gates, 0, bay, t)
        read_strip(ups, 0, bay + forms.BOX, t)
        for j in range(4):
            k, at = i + 8 * j, squares_at(t, j)
            a, e = swiglu_backward_pair(acc, k, gates[4 * j], ups[4 * j])
            b, f = swiglu_backward_pair(acc, k + 2, gates[4 * j + 1], ups[4 * j + 1])
            c, g = swiglu_backward_pair(acc, k + 4, gates[4 * j + 2], ups[4 * j + 2])
            d, h = swiglu_backward_pair(acc, k + 6, gates[4 * j + 3], ups[4 * j + 3])
            hopper.stmatrix4(bay + at, a, b, c, d)
            hopper.stmatrix4(bay + forms.BOX + at, e, f, g, h)
            hopper.stmatrix4(
                box + at, ptx.pack_bf16(acc[k], acc[k + 1]), ptx.pack_bf16(acc[k + 2], acc[k + 3]),
                ptx.pack_bf16(acc[k + 4], acc[k + 5]), ptx.pack_bf16(acc[k + 6], acc[k + 7]),
            )  # fmt: skip

    def meet_one(acc, i, bay, box, t):
        u = cuda.local.array(16, int32)
        read_strip(u, 0, bay, t)
        for j in range(16):
            u[j] = meet_pair(acc, i + 2 * j, u[j])
        if second:
            put_pairs(u, 0, bay, t)
        put_bf16(acc, i, box, t)

    return meet_two if form.beside == 2 else meet_one


def make_send_met(form: forms.Form) -> Callable:
    """send_met(of, x, y, box, bay): C's strip from its box, and what a bay holds."""
    two, second = form.beside == 2, form.second

    def send_met(of, x, y, box, bay):
        hopper.tma_store(of.c, x, y, box)
        if two:
            hopper.store_tile(of.second, x, y, 0, 0, bay)
            hopper.store_tile(of.second, x, y, 1, 0, bay + forms.BOX)
        elif second:
            hopper.tma_store(of.second, x, y, bay)
        hopper.bulk_commit()

    return send_met


def make_met_strip(form: forms.Form, q: int) -> Callable:
    """met_strip(acc, tile): strip q meets what is in its bay and goes to C, and what it met to the
    second array."""
    beside, second, meet, send = form.beside, form.second, make_meet_bay(form), make_send_met(form)
    bays, bars, (i, right, down) = form.bays, forms.bays_bars(form), strips(form)[q]

    def met_strip(acc, tile):
        me, hidden = tile.me, int32(tile.lap >> 1)  # lap is 0 or 1, but no compiler knows
        full, box = int32(me.bars + hidden + bars), int32(me.boxes + (q & 1) * forms.BOX)
        bay = int32(me.base + hidden + bays + q * beside * forms.BOX)
        empty = full + (2 * forms.STRIPS + q) * 8
        hopper.mbarrier_wait(full + (me.c * forms.STRIPS + q) * 8, tile.lap)
        free(me)
        if second and q > 1 and me.t == 0:
            hopper.mbarrier_arrive(empty - 16)  # strip q - 2 has left with its box
        meet(acc, i, bay, box, me.t)
        hopper.proxy_fence()
        ptx.barrier(1 + me.c, 128)
        if me.t == 0:
            send(tile.of, int32(tile.column + right), int32(tile.row + down), box, bay)
            if not second:
                hopper.mbarrier_arrive(empty)

    return met_strip


def make_leave(form: forms.Form) -> Callable:
    """leave(acc, tile): when a tile's last two strips have left their bays, say so."""
    bars = forms.bays_bars(form)

    def leave(acc, tile):
        full = int32(tile.me.bars + int32(tile.lap >> 1) + bars)
        if tile.me.t == 0:
            hopper.bulk_wait_read_all()
            hopper.mbarrier_arrive(full + (3 * forms.STRIPS - 2) * 8)
            hopper.mbarrier_arrive(full + (3 * forms.STRIPS - 1) * 8)

    return leave


# %% sec-gemm-epilogue
def make_sum_columns(strip: Strip) -> Callable:
    """sum_columns(acc, tile): sums over a warp's 16 rows of a strip, to the warp's line."""
    i, right, down = strip

    def sum_columns(acc, tile):
        of, lane = tile.of, int32(tile.me.t & 31)
        column, line = int32(tile.column + right), int32(tile.line + down // 16)
        strip_columns(acc, i, of.space, column, line, of.n, lane)

    return sum_columns


def of_strip(form: forms.Form, q: int, strip: Strip) -> list[Callable]:
    """What is done with one strip of a tile."""
    sums = [make_sum_columns(strip)] if form.sums != "no" else []
    if form.beside:
        return [make_met_strip(form, q), *sums]
    made = [make_meet(form, strip)] if form.ringed else []
    both = form.second and form.epilogue != "swiglu"
    if both:
        made.append(make_store(form, strip, 0, second=True))
    if curve_of(form.epilogue):
        made.append(make_curve(form, strip))
    return [*made, *sums, make_store(form, strip, 1 if both else q % form.boxes[1])]


def epilogue(form: forms.Form) -> list[Callable]:
    """What is done with a tile's sums until they are in C: operations on acc and a `Tile`."""
    made = [make_turns_of_heads(form)[1]] if form.way.turn else []
    if form.way.aux == "bias":
        made.append(make_add_bias(form))
    if form.epilogue == "swiglu":
        made += [make_store_gates(form)] if form.second else []
        made.append(make_gate(form))
    for q, strip in enumerate(strips(form)):
        made += of_strip(form, q, strip)
    return [*made, make_leave(form)] if form.beside and form.second else made
