# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-mma-columns
"""The epilogue of a warp's sums: operations that add, curve or multiply them, and store them in C.

acc are a lane's 128 sums, 64 x 64 as four accumulators of 16 rows below each other (`tile.layout`).
"""

from collections.abc import Callable
from typing import NamedTuple

from nanoeuler.engines.gpu.gemm.column_sums import strip_columns
from nanoeuler.engines.gpu.gemm.epilogue import PAIRS, curve_of, swiglu_backward_pair
from nanoeuler.engines.gpu.gemm.mma_form import BOX, HALF, SIDE, SUMS, MmaForm
from nanoeuler.engines.gpu.gemm.mma_tile import Matrix
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.tile import curves
from nanoeuler.engines.gpu.tile.accumulator import make_bias, same
from nanoeuler.engines.gpu.tile.layout import PANEL, chunk_at, lane_column, lane_row, pair_at
from nanoeuler.engines.gpu.tile.rope import Turning, position, take_angles, turn

wait_all = ptx.copy_wait(0)  # for all of the thread's copies


class Tile(NamedTuple):
    """A warp's 64 x 64 of C: C; another matrix that it meets, or a bias as a row; the second array;
    where lines of sums are; the tile's first row and column in C; its boxes in shared memory; the
    lane; and by what heads are turned. Of gates the tile is 64 x 32 of C, and of gates and ups that
    sums meet, aux and second are the gates."""

    c: Matrix
    aux: Matrix
    second: Matrix
    lines: int
    row: int
    column: int
    box: int
    lane: int
    by: Turning


def make_add_bias(form: MmaForm) -> Callable:
    """add_bias(acc, tile): acc + bias, or its curve where that alone is stored."""
    curve = None if form.second else curve_of(form.epilogue)
    bias = make_bias(SIDE, SIDE // 16, curve or same)

    def add_bias(acc, tile):
        bias(acc, tile.aux.start, tile.column, tile.c.columns, tile.lane)

    return add_bias


def make_turn(form: MmaForm, i: int) -> Callable:
    """turn_rows(acc, tile): the i-th 16 rows of a head are turned, if its columns are of those."""
    D = form.way.turn  # a warp's 64 columns are one head
    half = D // 2

    def turn_rows(acc, tile):
        if tile.column < tile.by.columns:
            angles, of = cuda.local.array(half, float32), tile.by
            above = int32(tile.row + 16 * i + lane_row(tile.lane))
            above, below = position(above, of.T), position(int32(above + 8), of.T)
            take_angles(angles, of.cos, of.sin, above, below, D, tile.lane)
            turn(acc, i * half, angles, float32(1), D)

    return turn_rows


def make_curve(form: MmaForm, i: int) -> Callable:
    """curve_rows(acc, tile): the sums of the i-th 16 rows become a curve of what they are as bf16.
    """
    curve = curve_of(form.epilogue)

    def curve_rows(acc, tile):
        for j in range(32 * i, 32 * i + 32, 2):
            pair = ptx.pack_bf16(acc[j], acc[j + 1])
            acc[j], acc[j + 1] = curve(ptx.low_bf16(pair)), curve(ptx.high_bf16(pair))

    return curve_rows


def box_row(p, lane):
    """The p-th row of its box that a lane moves: of eight lanes 16 bytes each."""
    return int32(p * 4 + (lane >> 3))


def make_fetch_boxes(form: MmaForm) -> Callable:
    """fetch_boxes(acc, tile): a tile of the other matrix, bf16, into the warp's box; of gates and
    ups, which are n columns on, both."""
    boxes = form.boxes

    def fetch_boxes(acc, tile):
        x, chunk = tile.aux, int32(tile.lane & 7)
        size = int32(min(max((x.columns - tile.column - chunk * 8) * 2, 0), 16))
        for p in range(16):
            r = box_row(p, tile.lane)
            at = x.start + (int64(tile.row + r) * x.pitch + tile.column + chunk * 8) * 2
            to = int32(tile.box + chunk_at(r, chunk, PANEL))
            ptx.copy_async_part(to, at, size if tile.row + r < x.rows else int32(0))
            if boxes == 2:
                at += int64(2 * x.columns)
                ptx.copy_async_part(to + BOX, at, size if tile.row + r < x.rows else int32(0))
        ptx.copy_commit()
        wait_all()
        cuda.syncwarp()

    return fetch_boxes


def make_meet(form: MmaForm, i: int) -> Callable:
    """meet(acc, tile): the sums of the i-th 16 rows meet what is in the box: it's added, or they're
    multiplied by a curve's slopes there, and the curve takes its place."""
    meet_pair, second = PAIRS[form.epilogue], form.second

    def meet(acc, tile):
        own = int32(tile.box + pair_at(tile.lane) + i * 2048)
        for j in range(8):
            q, at = 32 * i + 4 * j, int32(own ^ (j << 4))
            above = meet_pair(acc, q, ptx.load_shared_int(at))
            below = meet_pair(acc, q + 2, ptx.load_shared_int(at + 1024))
            if second:
                ptx.store_shared_int(at, above)
                ptx.store_shared_int(at + 1024, below)
        cuda.syncwarp()

    return meet


def make_meet_gates(form: MmaForm, i: int) -> Callable:
    """meet_gates(acc, tile): the sums of the i-th 16 rows become silu(gate) up of the gates and ups
    in the boxes, and these the sums' slopes by gate and by up."""

    def meet_two(acc, q, at):
        gates, ups = ptx.load_shared_int(at), ptx.load_shared_int(at + BOX)
        of_gates, of_ups = swiglu_backward_pair(acc, q, gates, ups)
        ptx.store_shared_int(at, of_gates)
        ptx.store_shared_int(at + BOX, of_ups)

    def meet_gates(acc, tile):
        own = int32(tile.box + pair_at(tile.lane) + i * 2048)
        for j in range(8):
            q, at = 32 * i + 4 * j, int32(own ^ (j << 4))
            meet_two(acc, q, at)
            meet_two(acc, q + 2, int32(at + 1024))
        cuda.syncwarp()

    return meet_gates


def make_gate(form: MmaForm, i: int) -> Callable:
    """gate_rows(acc, tile): the i-th 16 rows become silu(gate) up, 32 columns, of bf16 where gates
    and ups are stored. Rows 32 on come into the registers of the first rows' ups, so a box's row
    has a row's 32 columns, then those of the row 32 below."""
    second, half = form.second, HALF // 2  # registers of a lane's two rows

    def gate_rows(acc, tile):
        for j in range(half):
            at = 32 * i + j
            gate, up = acc[at], acc[at + half]
            if second:
                pair = ptx.pack_bf16(gate, up)
                gate, up = ptx.low_bf16(pair), ptx.high_bf16(pair)
            acc[32 * (i % 2) + i // 2 * half + j] = curves.silu_fast(gate) * up

    return gate_rows


def sum_columns(acc, tile):
    """Sums over a warp's 64 rows, to its line; acc is used up."""
    for i in range(SUMS // 4):
        acc[i] = (acc[i] + acc[i + 32]) + (acc[i + 64] + acc[i + 96])
    line = int32(tile.row // SIDE)
    strip_columns(acc, 0, tile.lines, tile.column, line, tile.c.columns, tile.lane)


def make_put(count: int) -> Callable:
    """put_box(acc, tile): `count` times 16 rows of a warp's sums as bf16 into its box: rows of 128
    bytes, swizzled."""

    def put_box(acc, tile):
        own = int32(tile.box + pair_at(tile.lane))
        for i in range(count):
            for j in range(8):
                q, to = 32 * i + 4 * j, int32((own ^ (j << 4)) + i * 2048)
                ptx.store_shared_int(to, ptx.pack_bf16(acc[q], acc[q + 1]))
                ptx.store_shared_int(to + 1024, ptx.pack_bf16(acc[q + 2], acc[q + 3]))
        cuda.syncwarp()

    return put_box


def put_edge(address, words, count):
    """The first `count` of 8 bf16, one by one."""
    for i in range(4):
        if 2 * i < count:
            ptx.store_short(address + 4 * i, words[i])
        if 2 * i + 1 < count:
            ptx.store_short(address + 4 * i + 2, words[i] >> 16)


def make_send(form: MmaForm, second: bool = False, box: int = 0) -> Callable:
    """send(acc, tile): a warp's box to C, or to the second array, and then it's free. 16 bytes a
    lane, eight lanes a row. box: which; 1: of ups, n columns on.

    Of gates the right half of a box's row is n columns on, or in C 32 rows below.
    """
    gated, shift = form.gated, box * BOX
    own, half = (3, 2) if gated else (7, 3)  # bits of a chunk's number: in its half, and the half
    down, passes = (HALF, 8) if gated and not second else (0, 16)

    def send(acc, tile):
        c, n, chunk = tile.second if second else tile.c, tile.c.columns, int32(tile.lane & 7)
        column, right = int32(chunk & own), int32(chunk >> half)
        count, away = int32(n - tile.column - column * 8), (right + box) * n if second else 0
        for p in range(passes):
            r = box_row(p, tile.lane)
            words = ptx.load_shared_int4(tile.box + shift + chunk_at(r, chunk, PANEL))
            row = tile.row + r + right * down
            at = c.start + (int64(row) * c.pitch + tile.column + column * 8 + away) * 2
            if row < c.rows:
                if count >= 8:
                    ptx.store_int4(at, words[0], words[1], words[2], words[3])
                else:
                    put_edge(at, words, count)
        if second:
            cuda.syncwarp()

    return send


def make_store_floats(add: bool) -> Callable:
    """store_floats(acc, tile): the sums to a float32 C, or added to what it holds."""

    def put(at, x, y, count):
        if add:
            old_x, old_y = ptx.load_float2_if(at, count)
            x += old_x
            y += old_y
        ptx.store_float2_if(at, x, y, count)

    def store_floats(acc, tile):
        c, down = tile.c, int32(tile.row + lane_row(tile.lane))
        across = int32(tile.column + lane_column(tile.lane))
        for i in range(4):
            above, below = int32(down + 16 * i), int32(down + 16 * i + 8)
            at = c.start + (int64(above) * c.pitch + across) * 4
            lower = at + int64(32) * c.pitch
            for j in range(8):
                q = 32 * i + 4 * j
                count = int32(c.columns - across - 8 * j)
                put(at + 32 * j, acc[q], acc[q + 1], count if above < c.rows else int32(0))
                put(lower + 32 * j, acc[q + 2], acc[q + 3], count if below < c.rows else int32(0))

    return store_floats


def epilogue(form: MmaForm) -> list[Callable]:
    """What becomes of a warp's sums: operations on acc and a `Tile`, in order."""
    if form.out == "float32":
        return [make_store_floats(form.epilogue == "add")]
    made: list[Callable] = [make_add_bias(form)] if form.way.aux == "bias" else []
    made += [make_turn(form, i) for i in range(4 if form.way.turn else 0)]
    stored = [make_send(form, True, box) for box in range(form.boxes)] if form.second else []
    if form.way.aux in ("tile", "tiles"):
        meet = make_meet if form.boxes == 1 else make_meet_gates
        made += [make_fetch_boxes(form), *(meet(form, i) for i in range(4)), *stored]
    elif form.second or form.gated:
        change = make_gate if form.gated else make_curve
        made += [make_put(4)] * form.second + stored + [change(form, i) for i in range(4)]
    made += [make_put(2 if form.gated else 4), make_send(form)]
    return made + [sum_columns] * (form.sums != "no")
