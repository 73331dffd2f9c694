# Made from book/q-token-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gputoken-products
"""Products of a few rows with weights that are read once: one token's share of a model.

Y (R, O) = X (R, I) W. W is packed: a warp reads 512 bytes at a time, 8 outputs by 64 bytes of
inputs, and a lane's 16 bytes are what it hands to the tensor cores. A block has all inputs of its
outputs, each warp a share, whose sums are added in order. Kinds are "bf16" (multiplied by mma.sync,
added in float32) and "float32". The kernel includes the product's prologue (a norm, or attention's
parts combined) and its epilogue. Left out: more than 16 rows at a time (`Form.rows`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.lang import instruction, ptx
from nanoeuler.engines.gpu.lang.bf16 import to_bf16
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int8, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, cover
from nanoeuler.engines.gpu.lang.vectors import SIZES, warp_sum
from nanoeuler.engines.gpu.rows.rope import Tables
from nanoeuler.engines.gpu.tile.curves import gelu_exact_share, gelu_share, relu2_share, sigmoid
from nanoeuler.errors import UserError

OUT = 8         # outputs of a tile: the columns of B in mma.sync.m16n8k16
TILE = 512      # bytes of a tile: 16 of each of 32 lanes
MOST_TILES = 12  # that a lane loads before it uses one: 48 registers
WARPS = 8, 16, 32  # of a block: the fewest whose shares are that small
PAD = 4         # groups of outputs come in multiples of it: the most that a block takes
LEAN = 24       # registers of weights: a kernel with so few leaves room for others
LINE = 16       # bytes of a row's line: token, position, text, and a word that is free


def verify(shape: "Shape") -> None:
    """UserError where a block has no room for the inputs, or they do not come by eights."""
    most = WARPS[-1] * MOST_TILES * shape.depth
    if shape.inputs > most or shape.inputs % OUT:
        raise UserError(
            f"a product of few rows has a multiple of {OUT} inputs, at most {most} of "
            f"{shape.kind}, not {shape.inputs}"
        )


def sharers(tiles: int) -> int:
    """How many warps of a block share a group's tiles."""
    return min(tiles, next(n for n in WARPS if tiles <= n * MOST_TILES))


@dataclass(frozen=True)
class Shape:
    """How a matrix of `inputs` x `outputs` numbers of a kind is packed, and who reads what."""

    kind: str
    inputs: int
    outputs: int

    def __post_init__(self) -> None:
        verify(self)

    @property
    def width(self) -> int:
        """Inputs in a lane's 16 bytes."""
        return 16 // SIZES[self.kind]

    @property
    def depth(self) -> int:
        """Inputs in a tile: of four lanes."""
        return 4 * self.width

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return sharers(cover(self.inputs, self.depth))

    @property
    def tiles(self) -> int:
        """Tiles of a warp, for each group of outputs."""
        return cover(cover(self.inputs, self.depth), self.warps)

    @property
    def padded(self) -> int:
        """Inputs with the padding after them."""
        return self.warps * self.tiles * self.depth

    @property
    def groups(self) -> int:
        """Groups of eight outputs, with the padded ones after them."""
        return cover(self.outputs, OUT * PAD) * PAD


def pack(shape: Shape, matrix: np.ndarray) -> np.ndarray:
    """A matrix (inputs, outputs) in the order of reading, (groups, tiles, 8, 4, width)."""
    lanes = shape.padded // shape.depth, 4, shape.width
    rows = np.zeros((shape.groups * OUT, shape.padded), np.float32)
    rows[: shape.outputs, : shape.inputs] = matrix.T
    tiles = rows.reshape(shape.groups, OUT, *lanes).swapaxes(1, 2)
    return to_bf16(tiles) if shape.kind == "bf16" else np.ascontiguousarray(tiles)


def pairs(outputs: int, half: int) -> np.ndarray:
    """The order of outputs that puts i and i + half, of each 2 half, into one group of eight."""
    if half % 4 or outputs % (2 * half):
        raise UserError(f"pairs of outputs come by fours, not {half} of {outputs}")
    return np.arange(outputs).reshape(-1, 2, half // 4, 4).swapaxes(1, 2).reshape(-1)


# Hopper: the next kernel of the stream may be started; its memory is not ready yet
start_next = instruction.ptx("griddepcontrol.launch_dependents;")
# Hopper: wait until the kernel before has ended and what it wrote is there
wait_before = instruction.ptx("griddepcontrol.wait;")


@dataclass(frozen=True)
class Heads:
    """Attention's sizes: H query heads, G key/value heads of width D, `context` positions.

    turned: whether RoPE turns queries and keys. chunk: positions that one block of attention has.
    window: how many keys a query sees, its own and those before it; 0: all. normed: whether heads
    are normed (and turned) by a kernel of their own.
    """

    H: int
    G: int
    D: int
    context: int
    turned: bool
    chunk: int
    window: int = 0
    normed: bool = False


@dataclass(frozen=True)
class Form:
    """What a kernel of these products is made for."""

    shape: Shape
    rows: int                   # of X in a block: 1, 8 or 16; of float32 any
    front: str                  # "rms", "layer" (norms), "parts" (of attention), "plain"
    end: str                    # "add" (to residual stream), "store", "heads", or an activation
    groups: int = 1             # of eight outputs, in a block
    early: bool = False         # whether it may start while the kernel before it runs
    heads: Heads | None = None  # of a kernel that touches attention
    eps: float = 1e-5           # of the norm in front

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return SIZES[self.shape.kind]

    @property
    def stride(self) -> int:
        """Bytes from row to row in shared memory: an odd multiple of 64, so that banks differ."""
        size = self.shape.padded * self.size
        return size + 64 * (size // 64 % 2 == 0)

    @property
    def operand(self) -> int:
        """Bytes of X in shared memory."""
        return 0 if self.front == "plain" else self.rows * self.stride

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.shape.warps

    @property
    def items(self) -> int:
        """What a block gives: outputs, or pairs of outputs, of all its rows."""
        return self.rows * self.groups * (4 if self.end in ("swiglu", "heads") else 8)


# %% sec-gputoken-front
def nothing() -> None:
    """What a kernel does that must not start early: its memory is ready."""
    return


def starts(early: bool) -> tuple[Callable, Callable, tuple[int, int]]:
    """What a kernel does first, what it does before it needs memory, and its target; early: whether
    it may start while the kernel before it runs."""
    return (start_next, wait_before, (9, 0)) if early else (nothing, nothing, (8, 0))


def make_fetch(form: Form) -> Callable:
    """fetch(held, weights, block, warp, lane): all of this lane's weights, loads before uses."""
    load = ptx.load_int4 if form.shape.kind == "bf16" else ptx.load_float4
    groups, tiles, whole = form.groups, form.shape.tiles, form.shape.tiles * form.shape.warps

    def fetch(held, weights, block, warp, lane):
        for n in range(groups):
            at = weights + (int64(block * groups + n) * whole + warp * tiles) * TILE + lane * 16
            for j in range(tiles):
                k = 4 * (n * tiles + j)
                held[k], held[k + 1], held[k + 2], held[k + 3] = load(at + j * TILE)

    return fetch


def make_keep(form: Form) -> Callable:
    """keep(values, i, at, column): values[i : i + 4] to four numbers in shared memory."""
    bf16, padded = form.shape.kind == "bf16", form.shape.padded

    def keep_pairs(values, i, at, column):
        if column < padded:
            low = ptx.pack_bf16(values[i], values[i + 1])
            high = ptx.pack_bf16(values[i + 2], values[i + 3])
            ptx.store_shared_float2(int32(at + column * 2), ptx.float_of(low), ptx.float_of(high))

    def keep_floats(values, i, at, column):
        if column < padded:
            a, b, c, d = values[i], values[i + 1], values[i + 2], values[i + 3]
            ptx.store_shared_float4(int32(at + column * 4), a, b, c, d)

    return keep_pairs if bf16 else keep_floats


def make_row(form: Form) -> tuple[Callable, Callable]:
    """load(values, address, lane), settle(values, lane): a warp's row of the stream, and its norm.

    Lane l has columns 4 (32 j + l) and three more, j = 0, 1, ...; zeros after the row. `settle`
    takes the mean away, where the norm does, and returns one over the deviation.
    """
    columns, pieces = form.shape.inputs, cover(form.shape.padded, 128)
    own, share, centred = 4 * pieces, 1 / columns, form.front == "layer"
    eps = form.eps

    def load(values, address, lane):
        for j in range(pieces):
            a, b, c, d, i = float32(0), float32(0), float32(0), float32(0), 4 * j
            if (j * 32 + lane) * 4 < columns:
                a, b, c, d = ptx.load_own_float4(address + (j * 32 + lane) * 16)
            values[i], values[i + 1], values[i + 2], values[i + 3] = a, b, c, d

    def settle(values, lane):
        mean, total = float32(0), float32(0)
        if centred:
            for k in range(own):
                mean += values[k]
            mean = warp_sum(mean) * float32(share)
        for k in range(own):
            if ((k >> 2) * 32 + lane) * 4 < columns:
                values[k] -= mean
                total += values[k] * values[k]
        return ptx.inverse_root(warp_sum(total) * float32(share) + float32(eps))

    return load, settle


class Reads(NamedTuple):
    """Addresses of what is multiplied: x, and what its prologue needs."""

    x: int
    gain: int
    shift: int


def make_norm_front(form: Form) -> Callable:
    """front(reads, lines, tile, shared, t): the norm of the rows, a warp each.

    Reads: x (R, C) float32; gain, shift (C,). Of a single row every warp finds the norm, and writes
    a part of it: so no warp waits for another's sums.
    """
    columns, rows, warps, stride = form.shape.inputs, form.rows, form.shape.warps, form.stride
    pieces, keep, (load, settle) = cover(form.shape.padded, 128), make_keep(form), make_row(form)
    own, centred, lone = 4 * pieces, form.front == "layer", form.rows == 1

    def scale(values, i, inverse, gain, shift, column):
        gains = cuda.local.array(4, float32)
        if column < columns:
            gains[0], gains[1], gains[2], gains[3] = ptx.load_float4(gain + column * 4)
            for k in range(4):
                values[i + k] *= inverse * gains[k]
            if centred:
                gains[0], gains[1], gains[2], gains[3] = ptx.load_float4(shift + column * 4)
                for k in range(4):
                    values[i + k] += gains[k]

    def front(reads, lines, tile, shared, t):
        lane, warp = t & 31, t >> 5
        values = cuda.local.array(own, float32)
        for row in range(0 if lone else warp, rows, warps):
            load(values, reads.x + int64(tile * rows + row) * (4 * columns), lane)
            inverse = settle(values, lane)
            for j in range(pieces):
                if not lone or j % warps == warp:
                    column = (j * 32 + lane) * 4
                    scale(values, 4 * j, inverse, reads.gain, reads.shift, column)
                    keep(values, 4 * j, shared + row * stride, column)

    return front


AT_ONCE = 8  # parts of attention that are loaded together
LOWEST = -1e30  # below every score


class Parts(NamedTuple):
    """Addresses of attention's parts: sums of values, largest scores, sums of weights."""

    x: int
    top: int
    weight: int


def make_add_parts(form: Form) -> Callable:
    """add_parts(o, parts, at, first, count, best, total): AT_ONCE `Parts` of a head, first, first +
    1, ..., join its sums o[0:4]; returns the largest score and the sum of weights.
    """
    D, four = form.heads.D, 4 * AT_ONCE

    def add_parts(o, parts, at, first, count, best, total):
        tops, sizes = cuda.local.array(AT_ONCE, float32), cuda.local.array(AT_ONCE, float32)
        values = cuda.local.array(four, float32)
        for i in range(0, AT_ONCE, 4):
            a = at + 4 * (first + i)
            tops[i], tops[i + 1], tops[i + 2], tops[i + 3] = ptx.load_own_float4(parts.top + a)
            sizes[i], sizes[i + 1], sizes[i + 2], sizes[i + 3] = ptx.load_own_float4(
                parts.weight + a)
        for i in range(AT_ONCE):
            k, place = 4 * i, int32(first + i)
            values[k], values[k + 1], values[k + 2], values[k + 3] = ptx.load_float4_if_below(
                parts.x + (at + 4 * place) * D, place, count)
        new = best
        for i in range(AT_ONCE):
            if first + i < count and tops[i] > new:
                new = tops[i]
        scale = ptx.exp2(best - new)
        total *= scale
        for k in range(4):
            o[k] *= scale
        for i in range(AT_ONCE):
            if first + i < count:  # later ones are left over from earlier tokens
                share = ptx.exp2(tops[i] - new)
                total += sizes[i] * share
                for k in range(4):
                    o[k] += values[4 * i + k] * share
        return new, total

    return add_parts


def make_parts_front(form: Form) -> Callable:
    """front(reads, lines, tile, shared, t): attention's parts, each of `chunk` positions.

    Reads: x (R, H, N, D) float32, of N parts each a sum of values, not divided; gain (R, H, N)
    their largest scores, shift (R, H, N) the sums of their weights; N a multiple of AT_ONCE. A row
    whose position is negative has none, and gets zeros.
    """
    heads, rows, stride, keep = form.heads, form.rows, form.stride, make_keep(form)
    H, D, chunk, channels = heads.H, heads.D, heads.chunk, form.shape.inputs
    parts, threads, log = part_count(heads), form.threads, chunk.bit_length() - 1
    add_parts, padded, begin = make_add_parts(form), form.shape.padded, make_begin(heads)

    def front(reads, lines, tile, shared, t):
        o = cuda.local.array(4, float32)
        for item in range(t, rows * padded // 4, threads):
            row = ptx.divide(item, padded // 4)
            column = int32(item - row * (padded // 4)) * 4
            for k in range(4):
                o[k] = float32(0)
            if column < channels:
                line = int64(tile * rows + row)
                _, position, _, _ = ptx.load_own_int4(lines + line * LINE)
                head = ptx.divide(column, D)
                at = (line * H + head) * (4 * parts)
                inside = int64(column - head * D) * 4
                count, best = int32((position + chunk) >> log), float32(LOWEST)
                count, total = int32(count - (begin(position) >> log)), float32(0)
                of = Parts(reads.x + inside, reads.gain, reads.shift)
                for first in range(0, count, AT_ONCE):
                    best, total = add_parts(o, of, at, first, count, best, total)
                if count > 0:
                    whole = ptx.reciprocal(total)
                    for k in range(4):
                        o[k] *= whole
            keep(o, 0, shared + row * stride, column)

    return front


def make_begin(heads: Heads) -> Callable:
    """begin(position): the first key that a query there sees, in its text."""
    window = heads.window

    def begin_window(position):
        return int32(max(position + 1 - window, 0))

    def begin_text(position):
        return int32(0)

    return begin_window if 0 < window < heads.context else begin_text


def part_count(heads: Heads) -> int:
    """N, the parts of attention for which there is room."""
    return cover(cover(heads.context, heads.chunk), AT_ONCE) * AT_ONCE


def part_blocks(heads: Heads) -> int:
    """How many parts a query may have: of a window, those that it covers where it lies worst."""
    every = cover(heads.context, heads.chunk)
    return min(every, cover(heads.window - 1, heads.chunk) + 1) if heads.window else every


# %% sec-gputoken-middle
def make_operand(form: Form) -> Callable:
    """operand(x, shared, tile, row, offset): 16 bytes of a row of X, zeros for a row there is not.
    """
    rows, stride, bytes_of = form.rows, form.stride, form.shape.padded * form.size
    bf16, plain = form.shape.kind == "bf16", form.front == "plain"
    near = ptx.load_shared_int4 if bf16 else ptx.load_shared_float4
    far = ptx.load_own_int4 if bf16 else ptx.load_own_float4
    zero = int32 if bf16 else float32

    def of_memory(x, shared, tile, row, offset):
        a, b, c, d = zero(0), zero(0), zero(0), zero(0)
        if row < rows:
            a, b, c, d = far(x + int64(tile * rows + row) * bytes_of + offset)
        return a, b, c, d

    def of_block(x, shared, tile, row, offset):
        a, b, c, d = zero(0), zero(0), zero(0), zero(0)
        if row < rows:
            a, b, c, d = near(int32(shared + row * stride + offset))
        return a, b, c, d

    return of_memory if plain else of_block


def make_multiply(form: Form) -> Callable:
    """multiply(held, x, shared, sums, tile, warp, lane): this warp's share, to shared memory.

    sums: (warps, rows, 8 groups) float32. A lane's 16 bytes of W are 8 inputs of one output: two
    words of B for each of two mma.sync; X, as A, in the same order.
    """
    rows, groups, tiles, operand = form.rows, form.groups, form.shape.tiles, make_operand(form)
    wide, four = OUT * groups, 4 * groups

    def multiply(held, x, shared, sums, tile, warp, lane):
        g, q = lane >> 2, lane & 3
        acc = cuda.local.array(four, float32)
        for k in range(four):
            acc[k] = float32(0)
        for j in range(tiles):
            offset = (warp * tiles + j) * 64 + q * 16
            a0, a1, a2, a3 = operand(x, shared, tile, g, offset)
            b0, b1, b2, b3 = operand(x, shared, tile, g + 8, offset)
            for n in range(groups):
                k, i = 4 * (n * tiles + j), 4 * n
                for half in range(2):
                    u, v, w, z = (a0, b0, a1, b1) if half == 0 else (a2, b2, a3, b3)
                    acc[i], acc[i + 1], acc[i + 2], acc[i + 3] = ptx.mma(
                        u, v, w, z, held[k + 2 * half], held[k + 2 * half + 1],
                        acc[i], acc[i + 1], acc[i + 2], acc[i + 3])
        for n in range(groups):
            at = sums + ((warp * rows + g) * wide + n * 8 + 2 * q) * 4
            if g < rows:
                ptx.store_shared_float2(int32(at), acc[4 * n], acc[4 * n + 1])
            if g + 8 < rows:
                ptx.store_shared_float2(int32(at + 8 * wide * 4), acc[4 * n + 2], acc[4 * n + 3])

    return multiply


def make_multiply_floats(form: Form) -> Callable:
    """The same for float32, without tensor cores: a lane has four inputs of one output."""
    rows, groups, tiles, operand = form.rows, form.groups, form.shape.tiles, make_operand(form)
    wide, all_sums = OUT * groups, rows * groups

    def multiply(held, x, shared, sums, tile, warp, lane):
        g, q = lane >> 2, lane & 3
        acc = cuda.local.array(all_sums, float32)
        for k in range(all_sums):
            acc[k] = float32(0)
        for j in range(tiles):
            for row in range(rows):
                offset = (warp * tiles + j) * 64 + q * 16
                a, b, c, d = operand(x, shared, tile, row, offset)
                for n in range(groups):
                    k = 4 * (n * tiles + j)
                    more = (held[k] * a + held[k + 1] * b) + (held[k + 2] * c + held[k + 3] * d)
                    acc[row * groups + n] += more
        for row in range(rows):
            for n in range(groups):
                value = acc[row * groups + n]
                value += ptx.shuffle_xor(value, 1)
                value += ptx.shuffle_xor(value, 2)
                if q == 0:
                    at = sums + ((warp * rows + row) * wide + n * 8 + g) * 4
                    store_shared_float(int32(at), value)

    return multiply


def store_shared_float(address, value):
    """A float32 to shared memory."""
    ptx.store_shared_int(address, ptx.bits_of(value))


def make_total(form: Form) -> Callable:
    """total(sums, row, output): the warps' shares of one output of the block, in order."""
    rows, warps, wide = form.rows, form.shape.warps, OUT * form.groups

    def total(sums, row, output):
        value = float32(0)
        for warp in range(warps):
            at = sums + ((warp * rows + row) * wide + output) * 4
            value += ptx.float_of(ptx.load_shared_int(int32(at)))
        return value

    return total


# %% sec-gputoken-behind
def make_put(kind: str) -> Callable:
    """put(address, i, value): element i of an array of this kind = value."""

    def put_bf16(address, i, value):
        ptx.store_short(address + 2 * int64(i), ptx.pack_bf16(value, float32(0)))

    def put_float(address, i, value):
        ptx.store_float(address + 4 * int64(i), value)

    return put_bf16 if kind == "bf16" else put_float


class Item(NamedTuple):
    """Item i of a thread: what it keeps while the block multiplies, two numbers each; its number in
    the block, the block of outputs, the tile of rows."""

    kept: Any
    spots: Any
    i: int
    item: int
    block: int
    tile: int


class Target(NamedTuple):
    """Where outputs go: y and its row's elements, or keys and values."""

    y: int
    stride: int
    keys: int
    values: int


def make_single_end(form: Form) -> tuple[Callable, Callable]:
    """prepare(of, to, tables, lines), finish(of, sums, shifts, to, scale) of an `Item` that is one
    output: add, store, gelu, gelu_exact, relu2. to: the `Target`.

    What is ready before the products is loaded before them: the old stream.
    """
    wide, outputs, rows = OUT * form.groups, form.shape.outputs, form.rows
    put, total = make_put(form.shape.kind), make_total(form)
    shares = {"gelu": gelu_share, "gelu_exact": gelu_exact_share, "relu2": relu2_share}
    adds, curves, share = form.end == "add", form.end in shares, shares.get(form.end, gelu_share)

    def place(of):
        row = ptx.divide(of.item, wide)
        output = int32(of.item - row * wide)
        return row, output, int32(of.block * wide + output), int64(of.tile * rows + row)

    def prepare(of, to, tables, lines):
        if adds:
            _, _, column, line = place(of)
            if column < outputs:
                of.kept[2 * of.i] = ptx.load_own_float(to.y + (line * to.stride + column) * 4)

    def finish(of, sums, shifts, to, scale):
        row, output, column, line = place(of)
        value, at = total(sums, row, output) + shifts[2 * of.i], line * to.stride + column
        if column < outputs:
            if adds:
                ptx.store_float(to.y + at * 4, of.kept[2 * of.i] + scale * value)
            elif curves:
                put(to.y, at, value * share(value))
            else:
                ptx.store_float(to.y + at * 4, value)

    return prepare, finish


def make_gate_end(form: Form) -> tuple[Callable, Callable]:
    """The same of an item that is a gate and its other half: h = silu(gate) up."""
    pairs_wide, half, rows = 4 * form.groups, form.shape.outputs // 2, form.rows
    put, total = make_put(form.shape.kind), make_total(form)

    def prepare(of, to, tables, lines):
        return

    def finish(of, sums, shifts, to, scale):
        row = ptx.divide(of.item, pairs_wide)
        pair = int32(of.item - row * pairs_wide)
        column, output = int32(of.block * pairs_wide + pair), int32((pair >> 2) * 8 + (pair & 3))
        gate = total(sums, row, output) + shifts[2 * of.i]
        up = total(sums, row, output + 4) + shifts[2 * of.i + 1]
        if column < half:
            at = int64(of.tile * rows + row) * to.stride + column
            put(to.y, at, gate * sigmoid(gate) * up)

    return prepare, finish


def make_place(form: Form) -> Callable:
    """place(item, block): row, the pair's number in the block, its head and its channel i."""
    wide, half = 4 * form.groups, form.heads.D // 2

    def place(item, block):
        row = ptx.divide(item, wide)
        pair = int32(block * wide + item - row * wide)  # among the pairs of all heads
        head = ptx.divide(pair, half)
        return row, int32(item - row * wide), head, int32(pair - head * half)

    return place


def make_heads_prepare(form: Form) -> Callable:
    """prepare(of, to, tables, lines) of an item that is channels i and i + D / 2 of a head: its
    row's position and text, and the angle if it is turned here."""
    heads, rows, place = form.heads, form.rows, make_place(form)
    half, rotated, raw = heads.D // 2, heads.H + heads.G, heads.normed
    turned = heads.turned and not raw

    def prepare(of, to, tables, lines):
        kept, spots, i = of.kept, of.spots, of.i
        row, _, head, channel = place(of.item, of.block)
        _, position, text, _ = ptx.load_own_int4(lines + int64(of.tile * rows + row) * LINE)
        spots[2 * i], spots[2 * i + 1] = position, text
        if not raw:
            kept[2 * i], kept[2 * i + 1] = float32(1), float32(0)
        if turned and head < rotated:
            at = (int64(max(position, 0)) * half + channel) * 4
            kept[2 * i] = ptx.load_float(tables.cos + at)
            kept[2 * i + 1] = ptx.load_float(tables.sin + at)

    return prepare


def make_heads_end(form: Form) -> tuple[Callable, Callable]:
    """prepare and finish of an item that is channels i and i + D / 2 of a head, turned if it is to
    be.

    Queries go to y (R, H, D) float32, times `scale`; keys and values to the caches (texts, G,
    context, D), at the row's position, unless that is negative. Where heads are normed later,
    queries and keys go to y (R, H + G, D) as they are.
    """
    heads, rows, place, raw = form.heads, form.rows, make_place(form), form.heads.normed
    H, G, D, context = heads.H, heads.G, heads.D, heads.context
    half, all_heads, shown = D // 2, heads.H + 2 * heads.G, H + G if raw else H
    put, total = make_put(form.shape.kind), make_total(form)

    def finish(of, sums, shifts, to, scale):
        kept, spots, i = of.kept, of.spots, of.i
        row, pair, head, channel = place(of.item, of.block)
        output, position, text = (pair >> 2) * 8 + (pair & 3), spots[2 * i], spots[2 * i + 1]
        a = total(sums, row, output) + shifts[2 * i]
        b = total(sums, row, output + 4) + shifts[2 * i + 1]
        left, right, by = a, b, float32(1)
        if not raw:
            left = a * kept[2 * i] - b * kept[2 * i + 1]
            right, by = a * kept[2 * i + 1] + b * kept[2 * i], scale
        if head < shown:
            at = to.y + ((int64(of.tile * rows + row) * shown + head) * D + channel) * 4
            ptx.store_float(at, left * by)
            ptx.store_float(at + half * 4, right * by)
        elif head < all_heads and position >= 0:
            cache, group = (to.keys, head - H) if head < H + G else (to.values, head - H - G)
            at = ((int64(text) * G + group) * context + position) * D + channel
            put(cache, at, left)
            put(cache, at + half, right)

    return make_heads_prepare(form), finish


def parts_of(form: Form) -> tuple[Callable, ...]:
    """The pieces of a kernel, prologue, product and epilogue: front, ..., finish."""
    front = nothing_to_do
    if form.front in ("rms", "layer"):
        front = make_norm_front(form)
    elif form.front == "parts":
        front = make_parts_front(form)
    multiply = make_multiply if form.shape.kind == "bf16" else make_multiply_floats
    ends = {"heads": make_heads_end, "swiglu": make_gate_end}
    return front, multiply(form), *ends.get(form.end, make_single_end)(form)


def nothing_to_do(reads, lines, tile, shared, t):
    """The front of an operand that is read as it lies."""
    return


def room(form: Form) -> int:
    """How many threads of a multiprocessor registers must suffice for, so that none is spilled.

    Where a lane holds few weights, many: then the next kernel's blocks find room beside these.
    """
    lean = form.groups * form.shape.tiles * 4 <= LEAN and form.front != "parts"
    if form.rows == 1:
        return (768 if form.end == "heads" else 1024) if lean else 512
    return 512 if form.shape.kind == "bf16" and form.groups == 1 else 256


class Packed(NamedTuple):
    """Addresses of a packed matrix and its bias."""

    weights: int
    bias: int


def make_fetch_bias(form: Form) -> Callable:
    """fetch_bias(shifts, bias, block, t): two numbers for each of a thread's items."""
    threads, paired, wide = form.threads, form.end in ("swiglu", "heads"), OUT * form.groups
    own, per_row = cover(form.items, threads), form.items // form.rows

    def fetch_bias(shifts, bias, block, t):
        for i in range(own):
            column = int32(t + i * threads)
            column -= ptx.divide(column, per_row) * per_row
            if paired:
                column = int32((column >> 2) * 8 + (column & 3))
            at = bias + (int64(block) * wide + column) * 4
            shifts[2 * i] = ptx.load_float(at)
            if paired:
                shifts[2 * i + 1] = ptx.load_float(at + 16)

    return fetch_bias


@cache
def few_rows_kernel(form: Form) -> Kernel:
    """Block (b, i): outputs from 8 groups b on, of rows from `rows` i on."""
    front, multiply, prepare, finish = parts_of(form)
    fetch, fetch_bias = make_fetch(form), make_fetch_bias(form)
    threads, items, operand = form.threads, form.items, form.operand
    own, many = cover(items, threads), 4 * form.groups * form.shape.tiles
    first, ready, target = starts(form.early)
    number, twice = int32 if form.shape.kind == "bf16" else float32, 2 * own

    def few_rows(matrix: Packed, reads: Reads, to: Target, tables: Tables, lines, scale):
        first()
        t = int32(cuda.threadIdx.x)
        block, tile, warp, lane = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y), t >> 5, t & 31
        held, spots = cuda.local.array(many, number), cuda.local.array(twice, int32)
        kept, shifts = cuda.local.array(twice, float32), cuda.local.array(twice, float32)
        shared = ptx.shared_address(cuda.shared.array(0, int8))
        sums = int32(shared + operand)
        fetch(held, matrix.weights, block, warp, lane)
        fetch_bias(shifts, matrix.bias, block, t)
        ready()
        for i in range(own):
            if t + i * threads < items:
                of = Item(kept, spots, i, t + i * threads, block, tile)
                prepare(of, to, tables, lines)
        front(reads, lines, tile, shared, t)
        cuda.syncthreads()  # X is there
        multiply(held, reads.x, shared, sums, tile, warp, lane)
        cuda.syncthreads()  # all shares are there
        for i in range(own):
            if t + i * threads < items:
                of = Item(kept, spots, i, t + i * threads, block, tile)
                finish(of, sums, shifts, to, scale)

    shared_bytes = operand + 4 * form.shape.warps * form.rows * OUT * form.groups
    resident = max(1, room(form) // threads)
    args = "l l l l l l r l l l l l f"
    return Kernel(
        few_rows, args, threads, shared_bytes, 1, resident, target, early=form.early
    )
