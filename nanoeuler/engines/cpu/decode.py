# Made from book/p-token-on-a-cpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-token-tile
"""One token at a time on a processor: all of a model's forward pass in one compiled function.

For every architecture, with matrices in any form of packing.py, on any number of threads, which
change no bit of a result; nor do the rows of other texts. Leaves out drawing, and what becomes of a
text that is longer than the context: the room `inference`.

n rows (positions being read, of one text or several), S stages of an integrator, C channels,
H query heads, G key/value heads, D head width, F MLP width, T context, V vocabulary, K predicted
tokens. Addresses are integers, distances are bytes.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import unpack_tuple
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from nanoeuler.engines.cpu import llvm
from nanoeuler.engines.cpu.elementwise import below, exp, highest
from nanoeuler.engines.cpu.llvm import LANES
from nanoeuler.engines.cpu.memory import aligned
from nanoeuler.engines.cpu.options import F32, KERNEL, PART
from nanoeuler.engines.cpu.packing import (
    BLOCK,
    BLOCK_BYTES,
    IN_BLOCKS,
    PANEL,
    VECTORS,
    WEIGHT,
    Bfloat16,
    Float16,
    Float32,
    GateUp,
    Held,
    Int4,
    Int8,
    Kept4,
    Kept8,
    Matrices,
    Panels,
    Turned,
    form_of,
    padded,
)
from nanoeuler.engines.interface import Array
from nanoeuler.jit import njit
from nanoeuler.measurements import cores
from nanoeuler.model.config import ModelConfig, first_keys, parameter_shapes, require
from nanoeuler.model.integrators import INTEGRATORS
from nanoeuler.model.layers import GELU_CUBIC, GELU_SCALE, rope_tables
from nanoeuler.model.modern import soft_cap
from nanoeuler.model.weights import Block, Weights


def _integers(build, address, bits, count=LANES):
    # `count` integers of so many bits from `address`, wherever it is
    kind = ir.VectorType(ir.IntType(bits), count)
    return build.load(build.inttoptr(address, kind.as_pointer()), align=1)


def _all_of(n):
    # the 32 bits of n in every lane
    return ir.Constant(ir.VectorType(llvm.INT32, LANES), [n] * LANES)


def _floats(build, address, form):
    # LANES weights from `address` as floats
    if form is Float32:
        return llvm.load(build, address, llvm.ALL)
    whole = _integers(build, address, 8 * WEIGHT[form])
    wide = ir.VectorType(llvm.INT32, LANES)
    if form is Int8:
        return build.sitofp(build.sext(whole, wide), llvm.VECTOR)
    bits = build.zext(whole, wide)
    if form is Bfloat16:
        return build.bitcast(build.shl(bits, _all_of(16)), llvm.VECTOR)
    # The magnitude, where float32 has it, times 2^112, whose exponent's bits are 112 + 127.
    size = build.shl(build.and_(bits, _all_of(0x7FFF)), _all_of(13))
    scale = build.bitcast(_all_of(239 << 23), llvm.VECTOR)
    size = build.bitcast(build.fmul(build.bitcast(size, llvm.VECTOR), scale), wide)
    sign = build.shl(build.and_(bits, _all_of(0x8000)), _all_of(16))
    return build.bitcast(build.or_(size, sign), llvm.VECTOR)


# Of what the pass calls and whose sums keep their order. Inside the pass, not called: a call would
# hand over 293 words, the arrays of `Model` and `Room`.
_INSIDE = {"error_model": "numpy", "forceinline": True}
# Positions in a pass. Each brings all weights from memory once, so a prompt wants many; 64 rows of
# anything in it take as much of the second-level cache as a panel does.
ROWS = 64


def _over_depth(build, form, x, w, depth, rows, chosen):
    # The sums of x[:rows, :depth] w[:depth] for the chosen vectors of a panel w, row by row. x: an
    # address, and how far apart its rows are.
    size, (x, x_row) = WEIGHT[form], x
    before, loop = build.block, build.append_basic_block("depth")
    done = build.append_basic_block("store")
    build.branch(loop)
    build.position_at_end(loop)
    k, at_x, at_w = (build.phi(llvm.INT64) for _ in range(3))
    sums = [build.phi(llvm.VECTOR) for _ in range(rows * len(chosen))]
    places = [llvm.at(build, at_w, llvm.number(size * LANES), v) for v in chosen]
    columns, added = [_floats(build, place, form) for place in places], []
    for r in range(rows):
        place = build.inttoptr(llvm.at(build, at_x, x_row, r), llvm.FLOAT.as_pointer())
        one = llvm.spread(build, build.load(place))
        for v, column in enumerate(columns):
            product = build.fmul(one, column, flags=("contract",))
            before_it = sums[r * len(chosen) + v]
            added.append(build.fadd(product, before_it, flags=("contract",)))
    steps = (k, 1), (at_x, 4), (at_w, size * PANEL)
    afters = [build.add(value, llvm.number(step)) for value, step in steps]
    phis, firsts = [k, at_x, at_w, *sums], [llvm.number(0), x, w, *[llvm.ZEROS] * len(sums)]
    for phi, first, after in zip(phis, firsts, [*afters, *added], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(after, loop)
    build.cbranch(build.icmp_signed("<", afters[0], depth), loop, done)
    build.position_at_end(done)
    return added


def _make_tile(rows):
    # Where the sums and the columns of a panel need more registers than there are: half of it first
    at_once = VECTORS if (rows + 1) * VECTORS < llvm.REGISTERS else VECTORS // 2

    @intrinsic
    def tile(typing, matrices, x, w, depth, scales, out):
        # out[:rows, :PANEL] = x[:rows, :depth] w[:depth], w a panel of `matrices`, times the
        # scales if it's int8. x and out: an address, and how far apart its rows are.
        form = matrices.instance_class if matrices.instance_class in WEIGHT else Float32
        # (blocks have a tile of their own, and this one isn't reached)

        def generate(context, build, signature, arguments):
            w, depth, scales = arguments[2:5]
            x, out = (unpack_tuple(build, arguments[n]) for n in (1, 5))
            for first in range(0, VECTORS, at_once):
                chosen = range(first, first + at_once)
                added = _over_depth(build, form, x, w, depth, rows, chosen)
                _store(build, added, scales if form is Int8 else None, out, chosen)
            return context.get_dummy_value()

        pair = types.UniTuple(types.intp, 2)
        return types.void(matrices, pair, *[types.intp] * 3, pair), generate

    return tile


def _store(build, sums, scales, out, chosen):
    # Write the rows of sums of the chosen vectors, each column times its scale if there are scales.
    for i, total in enumerate(sums):
        r, v = divmod(i, len(chosen))
        across = llvm.number(4 * LANES * chosen[v])
        if scales is not None:
            total = build.fmul(total, llvm.load(build, build.add(scales, across), llvm.ALL))
        place = llvm.at(build, out[0], out[1], r)
        llvm.store(build, total, build.add(place, across), llvm.ALL)


_tile1, _tile2, _tile3, _tile4 = (_make_tile(rows) for rows in (1, 2, 3, 4))


# The processor's instruction for `_pairs`, by the features that it needs, and its lanes.
_PAIRS = {
    16: ("+avx512bw", "llvm.x86.avx512.pmaddubs.w.512"), 8: ("+avx2", "llvm.x86.avx2.pmadd.ub.sw"),
    4: ("+ssse3", "llvm.x86.ssse3.pmadd.ub.sw.128"),
}  # fmt: skip
_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)


def _pairs(build, q, p):
    # q p of unsigned and signed bytes (4 LANES,), neighbours added up, in 16 bits: exact where the
    # sum of two products fits, as 2 * 15 * 127 does
    feature, name = _PAIRS[LANES]
    if feature in _FEATURES:
        kind = ir.FunctionType(_SHORTS, [_BYTES, _BYTES])
        function = build.module.globals.get(name) or ir.Function(build.module, kind, name)
        return build.call(function, [q, p])
    wide = ir.VectorType(ir.IntType(16), 4 * LANES)
    products = build.mul(build.zext(q, wide), build.sext(p, wide))
    index = ir.VectorType(llvm.INT32, 2 * LANES)
    parts = [build.shuffle_vector(products, products, ir.Constant(index, [*range(i, 4 * LANES, 2)]))
             for i in (0, 1)]  # fmt: skip
    return build.add(*parts)


def _whole(build, sums):
    # float32 (LANES,) of sums (2 LANES,) in 16 bits: neighbours added up
    both, half = build.bitcast(sums, ir.VectorType(llvm.INT32, LANES)), _all_of(16)
    low = build.ashr(build.shl(both, half), half)
    return build.sitofp(build.add(low, build.ashr(both, half)), llvm.VECTOR)


def _columns_of_block(build, at_w, v, rows):
    # For each row (the address of its 32 bytes): the sums of p q over a block, vector v of columns
    sums = [ir.Constant(_SHORTS, None) for _ in rows]
    low = ir.Constant(_BYTES, [15] * 4 * LANES)
    for g in range(4):
        place = build.add(at_w, llvm.number(4 * PANEL + (4 * v + g) * 4 * LANES))
        packed = _integers(build, place, 8, 4 * LANES)
        halves = build.and_(packed, low), build.lshr(packed, ir.Constant(_BYTES, [4] * 4 * LANES))
        for half, q in enumerate(halves):
            for r, row in enumerate(rows):
                place = build.add(row, llvm.number(8 * g + 4 * half))
                four = build.load(build.inttoptr(place, llvm.INT32.as_pointer()), align=4)
                p = build.bitcast(llvm.spread(build, four), _BYTES)
                sums[r] = build.add(sums[r], _pairs(build, q, p))
    return [_whole(build, each) for each in sums]


def _one_block(build, at_w, rows, scales, sums):
    # `sums` after one more block: equation eq-token-int4. rows: addresses of whole numbers, scales:
    # addresses of s, and of s times their sum
    factors = []
    for place in scales:
        for at in (place, build.add(place, llvm.number(4))):
            one = build.load(build.inttoptr(at, llvm.FLOAT.as_pointer()), align=4)
            factors.append(llvm.spread(build, one))
    after = list(sums)
    for v in range(VECTORS):
        places = [build.add(at_w, llvm.number(2 * PANEL * i + 2 * LANES * v)) for i in (0, 1)]
        d, m = (_floats(build, place, Float16) for place in places)
        for r, whole in enumerate(_columns_of_block(build, at_w, v, rows)):
            n = r * VECTORS + v
            part = build.fmul(build.fmul(d, factors[2 * r]), whole, flags=("contract",))
            after[n] = build.fadd(part, after[n], flags=("contract",))
            part = build.fmul(m, factors[2 * r + 1], flags=("contract",))
            after[n] = build.fadd(part, after[n], flags=("contract",))
    return after


def _make_block_tile(rows):
    @intrinsic
    def tile(typing, x, w, blocks, scales, out):
        # out[:rows, :PANEL] = x[:rows] w, so many blocks of a panel in four bits. x: the address of
        # whole numbers, and how far apart rows are; scales: the address of theirs, 8 bytes a block.
        def generate(context, build, signature, arguments):
            w, blocks, scales = arguments[1:4]
            (x, x_row), (out, out_row) = (unpack_tuple(build, arguments[n]) for n in (0, 4))
            before, loop = build.block, build.append_basic_block("blocks")
            done = build.append_basic_block("store")
            build.branch(loop)
            build.position_at_end(loop)
            k, at_x, at_s, at_w = (build.phi(llvm.INT64) for _ in range(4))
            sums = [build.phi(llvm.VECTOR) for _ in range(rows * VECTORS)]
            each = [llvm.at(build, at_x, x_row, r) for r in range(rows)]
            row = build.udiv(x_row, llvm.number(BLOCK // 8))
            theirs = [llvm.at(build, at_s, row, r) for r in range(rows)]
            added = _one_block(build, at_w, each, theirs, sums)
            steps = (k, 1), (at_x, BLOCK), (at_s, 8), (at_w, BLOCK_BYTES * PANEL)
            afters = [build.add(value, llvm.number(step)) for value, step in steps]
            firsts = [llvm.number(0), x, scales, w, *[llvm.ZEROS] * len(sums)]
            phis = [k, at_x, at_s, at_w, *sums]
            for phi, first, after in zip(phis, firsts, [*afters, *added], strict=True):
                phi.add_incoming(first, before)
                phi.add_incoming(after, loop)
            build.cbranch(build.icmp_signed("<", afters[0], blocks), loop, done)
            build.position_at_end(done)
            _store(build, added, None, (out, out_row), range(VECTORS))
            return context.get_dummy_value()

        pair = types.UniTuple(types.intp, 2)
        return types.void(pair, *[types.intp] * 3, pair), generate

    return tile


_block_tile1, _block_tile2, _block_tile3, _block_tile4 = map(_make_block_tile, (1, 2, 3, 4))


@njit(**_INSIDE)
def _panel(matrices, x, n, w, depth, scales, out):
    # out (n, PANEL) = x (n, depth) times the panel at w, four rows at a time. x and out: an
    # address, and how far apart its rows are.
    for i in range(0, n, 4):
        a, c, left = (x[0] + i * x[1], x[1]), (out[0] + i * out[1], out[1]), n - i
        if left >= 4:
            _tile4(matrices, a, w, depth, scales, c)
        elif left == 3:
            _tile3(matrices, a, w, depth, scales, c)
        elif left == 2:
            _tile2(matrices, a, w, depth, scales, c)
        else:
            _tile1(matrices, a, w, depth, scales, c)


# %% sec-token-kept
def _widened4(build, at_w, out):
    # A block of four bits at `at_w` as float32 (32, PANEL) at `out`: d q + m
    for v in range(VECTORS):
        places = [build.add(at_w, llvm.number(2 * PANEL * i + 2 * LANES * v)) for i in (0, 1)]
        d, m = (_floats(build, place, Float16) for place in places)
        for g in range(4):
            place = build.add(at_w, llvm.number(4 * PANEL + (4 * v + g) * 4 * LANES))
            packed = _integers(build, place, 32)
            for i in range(8):  # the low halves of four bytes, and their high ones
                bits = build.lshr(packed, _all_of(8 * (i % 4) + i // 4 * 4))
                q = build.sitofp(build.and_(bits, _all_of(15)), llvm.VECTOR)
                w = build.fadd(build.fmul(d, q, flags=("contract",)), m, flags=("contract",))
                across = 4 * PANEL * (8 * g + i) + 4 * LANES * v
                llvm.store(build, w, build.add(out, llvm.number(across)), llvm.ALL)


def _widened8(build, at_w, out):
    # The same of a block of eight bits: d q
    for v in range(VECTORS):
        d = _floats(build, build.add(at_w, llvm.number(2 * LANES * v)), Float16)
        for i in range(BLOCK):
            place = build.add(at_w, llvm.number((2 + i) * PANEL + LANES * v))
            w = build.fmul(d, _floats(build, place, Int8))
            across = 4 * (PANEL * i + LANES * v)
            llvm.store(build, w, build.add(out, llvm.number(across)), llvm.ALL)


@intrinsic
def _widen(typing, matrices, w, blocks, out):
    # The address of the panel to multiply with: w, or `out`, to which so many kept blocks at w are
    # written as float32.
    form = matrices.instance_class

    def generate(context, build, signature, arguments):
        w, blocks, out = arguments[1:]
        if form not in (Kept4, Kept8):
            return w
        before, loop = build.block, build.append_basic_block("blocks")
        done = build.append_basic_block("widened")
        build.branch(loop)
        build.position_at_end(loop)
        k, at_w, to = (build.phi(llvm.INT64) for _ in range(3))
        (_widened4 if form is Kept4 else _widened8)(build, at_w, to)
        steps = (k, 1), (at_w, IN_BLOCKS[form] * PANEL), (to, 4 * BLOCK * PANEL)
        afters = [build.add(value, llvm.number(step)) for value, step in steps]
        for phi, first, after in zip((k, at_w, to), (llvm.number(0), w, out), afters, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(after, loop)
        build.cbranch(build.icmp_signed("<", afters[0], blocks), loop, done)
        build.position_at_end(done)
        return out

    return types.intp(matrices, *[types.intp] * 3), generate


class Worker(NamedTuple):
    """A thread's place in a pass."""

    rows: int  # that are read
    thread: int  # which it is, from 0
    threads: int


@njit(**PART)
def _share(worker, count):
    # The part of `count` panels that is this thread's: first, and one after the last.
    _, thread, threads = worker
    return count * thread // threads, count * (thread + 1) // threads


@intrinsic
def _bytes(typing, matrices, depth):
    # The bytes of a panel of `matrices`, `panel_bytes` at the time of running.
    form = matrices.instance_class

    def generate(context, build, signature, arguments):
        depth = arguments[1]
        if form not in IN_BLOCKS:
            return build.mul(depth, llvm.number(PANEL * WEIGHT[form]))
        blocks = build.udiv(build.add(depth, llvm.number(BLOCK - 1)), llvm.number(BLOCK))
        return build.mul(blocks, llvm.number(IN_BLOCKS[form] * PANEL))

    return types.intp(matrices, types.intp), generate


@intrinsic
def _in_blocks(typing, matrices):
    # Whether `matrices` are Int4: a constant, so that what isn't needed is left out.
    def generate(context, build, signature, arguments):
        return ir.Constant(ir.IntType(1), matrices.instance_class is Int4)

    return types.boolean(matrices), generate


@njit(**PART)
def _quantized(x, p, scales):
    # p, a row of whole numbers (blocks, BLOCK), and scales (blocks, 2) of a row x: s, and s times
    # their sum. What is beyond x is zeros.
    for b in range((x.size + BLOCK - 1) // BLOCK):
        largest, total, size = F32(0), 0, min(BLOCK, x.size - b * BLOCK)
        part = x[b * BLOCK : b * BLOCK + size]
        for i in range(size):
            largest = max(largest, abs(part[i]))
        inverse = F32(127) / largest if largest > 0 else F32(0)
        p[b] = 0
        for i in range(size):
            p[b, i] = np.int8(np.rint(part[i] * inverse))
        for i in range(BLOCK):
            total += np.int32(p[b, i])
        scales[b, 0] = largest / F32(127)
        scales[b, 1] = scales[b, 0] * F32(total)


@njit(**_INSIDE)
def _block_panel(n, w, depth, whole, out):
    # As `_panel`, of a panel in four bits, for the first n rows of `whole`.
    p, scales, _ = whole
    blocks = (depth + BLOCK - 1) // BLOCK
    for i in range(0, n, 4):
        a, s = (p[i].ctypes.data, p.strides[0]), scales[i].ctypes.data
        c, left = (out[0] + i * out[1], out[1]), n - i
        if left >= 4:
            _block_tile4(a, w, blocks, s, c)
        elif left == 3:
            _block_tile3(a, w, blocks, s, c)
        elif left == 2:
            _block_tile2(a, w, blocks, s, c)
        else:
            _block_tile1(a, w, blocks, s, c)


@njit(**_INSIDE)
def _product(matrices, i, worker, x, bias, out, whole):
    # out (n, panels * PANEL) = x (n, depth) times matrix i plus bias: this thread's. whole: room
    # for the rows in whole numbers, for their scales, and for a panel in float32
    place = matrices.places[i]
    address, panels, depth, scales = place[0], place[1], place[2], place[3]
    first, last = _share(worker, panels)
    if _in_blocks(matrices):
        for r in range(worker.rows):
            _quantized(x[r, :depth], whole[0][r], whole[1][r])
    for p in range(first, last):
        w, here = address + p * _bytes(matrices, depth), scales + 4 * PANEL * p if scales else 0
        rows, to = (x.ctypes.data, x.strides[0]), (out.ctypes.data + 4 * PANEL * p, out.strides[0])
        if _in_blocks(matrices):
            _block_panel(worker.rows, w, depth, whole, to)
        else:
            w = _widen(matrices, w, (depth + BLOCK - 1) // BLOCK, whole[2].ctypes.data)
            _panel(matrices, rows, worker.rows, w, depth, here, to)
        for r in range(worker.rows):
            for j in range(p * PANEL, min((p + 1) * PANEL, bias.size)):
                out[r, j] += bias[j]


# %% sec-token-pass
class Model(NamedTuple):
    """A model as the compiled pass reads it."""

    C: int
    H: int
    G: int
    D: int
    F: int
    V: int
    K: int
    layers: int
    repeat: int  # layers that share a block
    h: float  # the size of a step
    rms: bool  # or LayerNorm
    eps: float  # what a norm adds under its root
    gated: bool  # SwiGLU, or GELU
    exact: bool  # GELU by the integral
    squared: bool  # ReLU squared, and no GELU
    a: Array  # (S, S) and
    b: Array  # (S,): the integrator's table
    flat: Array  # (N,) all weights, of which the vectors are read, or these alone
    starts: Array  # (blocks, 14) where the tensors of `Block` begin there; -1: there is none
    ends: Array  # (4,) the same of embedding (-1: see `Room`), positions, norm, norm_bias
    blocks: Matrices  # wqkv, wo, w_up, w_down of each block
    heads: Matrices  # K output matrices
    cos: Array  # (T, D/2), or (T, 0): learned positions
    sin: Array
    first: Array  # (P, T) int32, the first key that each position sees; layer l has row l mod P


class Room(NamedTuple):
    """Where a pass writes. What a thread has for itself has the threads as its first axis."""

    job: Array  # (4, ROWS) int64: of each row token, text, position; not negative: logits wanted
    embedded: Array  # (ROWS, C) the rows' embeddings, if `Model.flat` lacks them
    keys: Array  # (texts, layers * S, G, T / PANEL, D, PANEL): the cache, a position is a column
    values: Array  # (texts, layers * S, G, T, D)
    heads: Array  # (ROWS, (H + 2G) D), padded
    y: Array  # (ROWS, H D) what attention says
    up: Array  # (ROWS, F, or 2F), as panels have it, padded
    hidden: Array  # (ROWS, F)
    k: Array  # (S, ROWS, C) velocities, padded
    logits: Array  # (ROWS, K, V), padded
    met: Array  # (1,) int64: how often a thread has arrived
    whole: Array  # (threads, ROWS, blocks, BLOCK) int8: a row of a product in whole numbers
    scales: Array  # (threads, ROWS, blocks, 2): their scales, and these times their sums
    wide: Array  # (threads, depth * PANEL): a panel of kept blocks in float32
    x: Array  # (threads, ROWS, C) the stream
    u: Array  # (threads, ROWS, C) the point where a stage asks
    n: Array  # (threads, ROWS, C) its norm
    p: Array  # (threads, H/G, T) probabilities, padded


@njit(**PART)
def _vector(m, at, size):
    # The vector of the weights that begins at `at`; an empty one if there is none.
    return m.flat[at : at + size] if at >= 0 else m.flat[:0]


@njit(**PART)
def _plus(x, y):
    for j in range(y.size):
        x[j] += y[j]


@njit(**PART)
def _norm(m, x, gain, bias, n):
    # n (C,) = the norm of x (C,)
    mean, square = F32(0), F32(0)
    if not m.rms:
        for c in range(m.C):
            mean += x[c]
        mean /= F32(m.C)
    for c in range(m.C):
        square += (x[c] - mean) * (x[c] - mean)
    scale = F32(1) / np.sqrt(square / F32(m.C) + F32(m.eps))
    for c in range(m.C):
        n[c] = (x[c] - mean) * scale * gain[c]
    _plus(n, bias)


@njit(**PART)
def _mean(p, values, y):
    # y (D,) = the mean of the values (t, D), weighted by the softmax of the scores p (t,)
    D, top, total = y.size, highest(p), F32(0)
    for i in range(p.size):
        p[i] = exp(p[i] - top)
        total += p[i]
    y[:] = F32(0)
    for i in range(0, p.size - 3, 4):
        p0, p1, p2, p3 = p[i], p[i + 1], p[i + 2], p[i + 3]
        v0, v1, v2, v3 = values[i], values[i + 1], values[i + 2], values[i + 3]
        for d in range(D):
            y[d] += p0 * v0[d] + p1 * v1[d] + p2 * v2[d] + p3 * v3[d]
    for i in range(p.size // 4 * 4, p.size):
        for d in range(D):
            y[d] += p[i] * values[i, d]
    for d in range(D):
        y[d] /= total


@njit(**PART)
def _norm_head(m, x, gain):
    # x (D,) = its norm, in place, if there's a gain: equation eq-attention-qk-norm.
    if gain.size == 0:
        return
    square = F32(0)
    for d in range(m.D):
        square += x[d] * x[d]
    scale = F32(1) / np.sqrt(square / F32(m.D) + F32(m.eps))
    for d in range(m.D):
        x[d] = x[d] * scale * gain[d]


@njit(**PART)
def _turn(x, cos, sin):
    # The rotation of one head, in place: equation eq-layers-rope.
    half = cos.size
    for j in range(half):
        a, b = x[j], x[half + j]
        x[j], x[half + j] = a * cos[j] - b * sin[j], a * sin[j] + b * cos[j]


@njit(**PART)
def _group(m, o, place, g, first, last, p):
    # Key/value head g for the rows of one text: keep keys and values, then attend. In order: a row
    # finds what the rows before it have kept.
    D, group, scale = m.D, m.H // m.G, F32(1) / np.sqrt(F32(m.D))
    text, layer = o.job[1, first], place // m.b.size
    start, begins = m.starts[layer // m.repeat], m.first[layer % m.first.shape[0]]
    q_gain, k_gain = _vector(m, start[4], D), _vector(m, start[5], D)
    keys, values = o.keys[text, place, g], o.values[text, place, g]
    for r in range(first, last):
        t, row = o.job[2, r], o.heads[r]
        k, v = row[(m.H + g) * D :][:D], row[(m.H + m.G + g) * D :][:D]
        _norm_head(m, k, k_gain)
        _turn(k, m.cos[t], m.sin[t])
        for d in range(D):
            keys[t // PANEL, d, t % PANEL], values[t, d] = k[d], v[d]
        q = row[g * group * D : (g + 1) * group * D].reshape(group, D)
        for i in range(group):
            _norm_head(m, q[i], q_gain)
            _turn(q[i], m.cos[t], m.sin[t])
            for d in range(D):
                q[i, d] *= scale
        low = begins[t]
        for j in range(low // PANEL, t // PANEL + 1):
            rows, scores = (q.ctypes.data, 4 * D), (p.ctypes.data + 4 * PANEL * j, p.strides[0])
            _panel(Float32(m.starts), rows, group, keys[j].ctypes.data, D, 0, scores)
        for i in range(group):
            _mean(p[i, low : t + 1], values[low:], o.y[r, (g * group + i) * D :][:D])


@njit(**_INSIDE)
def _attention(m, o, worker, place):
    # Attention of all rows: a text's rows, which lie together, and a key/value head are one task.
    first, task = 0, 0
    while first < worker.rows:
        last = first + 1
        while last < worker.rows and o.job[1, last] == o.job[1, first]:
            last += 1
        for g in range(m.G):
            if task % worker.threads == worker.thread:
                _group(m, o, place, g, first, last, o.p[worker.thread])
            task += 1
        first = last


@njit(**PART)
def _sigmoid(x):
    return F32(1) / (F32(1) + exp(-x))


@njit(**PART)
def _gelu(u):
    z = F32(GELU_SCALE) * (u + F32(GELU_CUBIC) * u * u * u)
    return u * _sigmoid(F32(2) * z)


@njit(**PART)
def _activate(m, u, bias, start, hidden):
    # hidden[start : ...] of one row from a panel u (PANEL,) of the up matrix
    if m.gated:
        half = PANEL // 2
        for j in range(min(half, m.F - start)):
            gate, up = u[j], u[half + j]
            if bias.size:
                gate, up = gate + bias[start + j], up + bias[m.F + start + j]
            hidden[start + j] = gate * _sigmoid(gate) * up
        return
    for j in range(min(PANEL, m.F - start)):
        x = u[j] + bias[start + j] if bias.size else u[j]
        if m.squared:
            hidden[start + j] = max(x, F32(0)) * max(x, F32(0))
        else:
            hidden[start + j] = x * below(x) if m.exact else _gelu(x)


@njit(**_INSIDE)
def _hidden(m, o, worker, panels, bias):
    # o.hidden (n, F) = the activation of this thread's panels of o.up
    first, last = _share(worker, panels)
    for p in range(first, last):
        start = p * (PANEL // 2 if m.gated else PANEL)
        for r in range(worker.rows):
            _activate(m, o.up[r, p * PANEL : (p + 1) * PANEL], bias, start, o.hidden[r])


_LOOKS = 1000  # at a counter before a core is offered to others: about 1 us


@intrinsic
def _arrive(typing, counter):
    def generate(context, build, signature, arguments):
        place = build.inttoptr(arguments[0], llvm.INT64.as_pointer())
        return build.atomic_rmw("add", place, llvm.number(1), "seq_cst")

    return types.intp(types.intp), generate


@intrinsic
def _arrived(typing, counter):
    def generate(context, build, signature, arguments):
        place = build.inttoptr(arguments[0], llvm.INT64.as_pointer())
        return build.load_atomic(place, "seq_cst", 8)

    return types.intp(types.intp), generate


@intrinsic
def _let_others_run(typing):
    def generate(context, build, signature, arguments):
        name = "SwitchToThread" if os.name == "nt" else "sched_yield"
        kind = ir.FunctionType(llvm.INT32, [])
        build.call(build.module.globals.get(name) or ir.Function(build.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), generate


@njit(**_INSIDE)
def _meet(o, meeting, threads):
    # Wait until all threads have come to this meeting, the first being 1; the next one's number.
    counter, looks = o.met.ctypes.data, 0
    _arrive(counter)
    while _arrived(counter) < meeting * threads:
        looks += 1
        if looks > _LOOKS:
            _let_others_run()
    return meeting + 1


@njit(**PART)
def _moved(m, x, weights, stages, k, r, u):
    # u (C,) = x (C,) + h times the velocities of row r, by the first `stages` of the weights
    for c in range(m.C):
        u[c] = x[c]
    for j in range(stages):
        weight = F32(m.h * weights[j])
        if weight != 0:
            for c in range(m.C):
                u[c] += weight * k[j, r, c]


@njit(**_INSIDE)
def _sublayer(m, o, worker, layer, half, stage, meeting):
    # k[stage] (n, C): what attention (half 0) or the MLP (half 1) says to the norm at this stage
    block, x, threads = layer // m.repeat, o.n[worker.thread], worker.threads
    start, matrix = m.starts[block], 4 * block
    whole = o.whole[worker.thread], o.scales[worker.thread], o.wide[worker.thread]
    if half == 0:
        bias = _vector(m, start[3], (m.H + 2 * m.G) * m.D)
        _product(m.blocks, matrix, worker, x, bias, o.heads, whole)
        meeting = _meet(o, meeting, threads)
        _attention(m, o, worker, layer * len(m.b) + stage)
        meeting = _meet(o, meeting, threads)
        out = _vector(m, start[7], m.C)
        _product(m.blocks, matrix + 1, worker, o.y, out, o.k[stage], whole)
    else:
        bias = _vector(m, start[11], 2 * m.F if m.gated else m.F)
        _product(m.blocks, matrix + 2, worker, x, m.flat[:0], o.up, whole)
        _hidden(m, o, worker, m.blocks.places[matrix + 2, 1], bias)
        meeting = _meet(o, meeting, threads)
        down = _vector(m, start[13], m.C)
        _product(m.blocks, matrix + 3, worker, o.hidden, down, o.k[stage], whole)
    return _meet(o, meeting, threads)


@njit(**KERNEL)
def _pass(m, o, n, heads, thread, threads):
    # Read the n rows of o.job; o.logits of those of which they are wanted, of so many heads.
    C, x, meeting, worker = m.C, o.x[thread], 1, Worker(n, thread, threads)
    for r in range(n):
        if m.ends[0] >= 0:
            x[r] = _vector(m, m.ends[0] + o.job[0, r] * C, C)
        else:
            x[r] = o.embedded[r]
        if m.ends[1] >= 0:
            _plus(x[r], _vector(m, m.ends[1] + o.job[2, r] * C, C))
    for layer in range(m.layers):
        for half in range(2):
            start = m.starts[layer // m.repeat, 8 * half :]
            gain, bias = _vector(m, start[0], C), _vector(m, start[1], C)
            for stage in range(m.b.size):
                for r in range(n):
                    _moved(m, x[r], m.a[stage], stage, o.k, r, o.u[thread, r])
                    _norm(m, o.u[thread, r], gain, bias, o.n[thread, r])
                meeting = _sublayer(m, o, worker, layer, half, stage, meeting)
            for r in range(n):
                _moved(m, x[r], m.b, m.b.size, o.k, r, x[r])
    gain, bias, wanted = _vector(m, m.ends[2], C), _vector(m, m.ends[3], C), 0
    for r in range(n):
        if o.job[3, r] >= 0:
            _norm(m, x[r], gain, bias, o.n[thread, wanted])
            wanted += 1
    for head in range(heads):
        rows = Worker(wanted, thread, threads)
        whole = o.whole[thread], o.scales[thread], o.wide[thread]
        _product(m.heads, head, rows, o.n[thread], m.flat[:0], o.logits[:, head], whole)
    _meet(o, meeting, threads)


# Bytes of weights from which all cores are used: with the 3 MB of `small`, two lose.
MANY = 16 << 20
# The forms of blocks and of output matrices, by what somebody asks for; None: as they are.
QUANTIZE = {"none": (None, None), "int8": (Int8, Int8), "int4": (Int4, Int8)}


SUPPORTS = {
    "norm": ("rms", "layer"), "position": ("rope", "learned"), "bias": (False, True),
    "mlp": ("swiglu", "gelu", "gelu_exact", "relu2"), "qk_norm": (False, True),
    "tied": (False, True), "logit_cap": (0.0, 2.0), "init": ("scaled", "zero"),
    "integrator": ("euler", "heun", "rk4"), "window_pattern": ("S", "SL"),
    "sliding_window": (0, 2), "norm_eps": (1e-5, 0.1), "rope_base": (10000.0, 100.0),
    "rope_scaling": ("none", "linear", "llama3"), "head_width": (0, 16), "qkv_bias": (False, True),
}  # fmt: skip


class CpuReader:
    """Passes over the newest tokens of texts, on this machine's processor: what a decoder asks.

    Weights in float32, or stored ones, whose matrices keep their 16 bits or their blocks; `texts`
    is how many it reads at once. threads: None for one, or for many weights one per core. quantize:
    a word of QUANTIZE. int8 and int4 keep matrices in a quarter or a sixth of the memory, with an
    error; the output matrix is int8 in both.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, texts: int = 1, threads: int | None = None,
        quantize: str = "none",
    ) -> None:  # fmt: skip
        stored = getattr(weights, "stored", None)
        kind = np.float32 if stored else weights.flat.dtype
        assert kind == np.float32, f"weights in {kind}, not float32"
        require(config, SUPPORTS, "the compiled reader")
        self.config, self.texts = config, texts
        self._panels = [_laid(*each) for each in zip(_matrices(config, weights),
                                                     QUANTIZE[quantize], strict=True)]  # fmt: skip
        self._model = _model(config, weights, *(each.matrices for each in self._panels))
        size = sum(each.buffer.size for each in self._panels)
        self.threads = threads or (cores() if size >= MANY else 1)
        self._embedding = stored["embedding"] if stored else None
        self._room = _room(config, texts, self.threads)
        self._logits = self._room.logits
        self._pool = ThreadPoolExecutor(self.threads)

    def _run(self, job, heads, done):
        # One pass over at most ROWS rows, by all threads, after `done` rows of logits.
        model, room = self._model, self._room._replace(logits=self._logits[done:])
        room.job[:, : len(job)] = np.array(job).T
        if self._embedding:
            for row, (token, *_) in zip(room.embedded, job, strict=False):
                row[...] = self._embedding.rows(token, token + 1)[0]
        room.met[0] = 0
        ask = model, room, len(job), heads
        others = [self._pool.submit(_pass, *ask, i, self.threads) for i in range(1, self.threads)]
        _pass(*ask, 0, self.threads)
        for each in others:
            each.result()

    def read(
        self, pieces: Sequence[Sequence[int]], starts: Sequence[int], rows: int = 1, heads: int = 1
    ) -> np.ndarray:
        """Logits (B, rows, heads, V) after the last `rows` tokens of each of B pieces.

        Piece i, ids of text i, is at positions starts[i], starts[i] + 1, ...: what was read of
        that text at these positions and after is forgotten. An empty piece is not read. The logits
        are good until the next call, which writes in the same place.
        """
        V, T, job = self.config.vocab_size, self.config.context, []
        for text, (piece, start) in enumerate(zip(pieces, starts, strict=True)):
            end, late = start + len(piece), rows - len(piece)
            assert 0 <= start <= end <= T and text < self.texts, f"no room for {start} to {end}"
            for i, token in enumerate(piece, start=late):
                assert 0 <= token < V, f"no id of the model: {token}"
                job.append((token, text, end - rows + i, text * rows + i if i >= 0 else -1))
        wanted, done = len(pieces) * rows, 0
        if wanted > len(self._logits):
            self._logits = aligned(wanted, *self._logits.shape[1:])
        for first in range(0, len(job), ROWS):
            part = job[first : first + ROWS]
            self._run(part, heads, done)
            done += sum(row >= 0 for *_, row in part)
        logits = self._logits[:wanted, :heads, :V]
        if done < wanted:  # pieces shorter than `rows` left gaps
            logits[[row for *_, row in job if row >= 0]] = logits[:done].copy()
        logits = logits.reshape(-1, rows, heads, V)
        cap = self.config.logit_cap
        return soft_cap(logits, cap) if cap else logits


# %% sec-token-pass
def _matrices(config, weights):
    """What goes into panels: wqkv, wo, up and down of each block; and the output matrices."""
    stored, found = getattr(weights, "stored", None), []
    for i in range(config.n_blocks):
        names = [f"block.{i}.{name}" for name in ("wqkv", "wo", "w_up", "w_down")]
        each = [stored[name] if stored else Held(weights[name]) for name in names]
        each[2] = GateUp(each[2]) if config.mlp == "swiglu" else each[2]
        found += each
    if stored and config.n_predict == 1:
        return found, [Turned(stored["embedding"]) if config.tied else stored["output"]]
    matrix = weights["embedding"].T if config.tied else weights["output"]
    return found, [*map(Held, np.split(matrix, config.n_predict, axis=1))]


def _laid(matrices, form):
    """`Panels` of matrices in a form; None: the one that a file has them in."""
    return Panels(matrices, form or form_of(matrices))


def _vectors(config, weights):
    """A flat array with the vectors of a model, and {name: where each begins there}.

    Of weights in memory that is all of them; of stored ones it lacks the matrices but has the
    positions.
    """
    if not getattr(weights, "stored", None):
        return weights.flat, weights.starts
    shapes = parameter_shapes(config)
    names = [name for name in shapes if len(shapes[name]) == 1 or name == "positions"]
    parts = [weights[name].ravel() for name in names]
    starts = np.cumsum([0, *map(len, parts)]).tolist()
    return np.concatenate(parts), dict(zip(names, starts, strict=False))


def _model(config, weights, blocks, heads):
    """The `Model` of a configuration, its weights, and its matrices in panels."""
    c, table = config, INTEGRATORS[config.integrator]
    a = np.zeros((len(table.b), len(table.b)))
    for row, found in zip(a, table.a, strict=True):
        row[: len(found)] = found
    shape = c.context, c.head_dim, c.angles
    turns = rope_tables(*shape) if c.position == "rope" else [np.zeros((c.context, 0))] * 2
    names = [f"block.{i}.{name}" for i in range(c.n_blocks) for name in Block._fields]
    ends = "embedding", "positions", "norm", "norm_bias"
    flat, places = _vectors(config, weights)
    starts, ends = ([places.get(name, -1) for name in each] for each in (names, ends))
    return Model(
        c.dim, c.n_heads, c.n_kv_heads, c.head_dim, c.hidden, c.vocab_size, c.n_predict,
        c.n_layers, c.repeat, float(c.step_size), c.norm == "rms", float(c.norm_eps),
        c.mlp == "swiglu", c.mlp == "gelu_exact", c.mlp == "relu2",
        a, np.array(table.b), flat, np.array(starts).reshape(c.n_blocks, -1),
        np.array(ends), blocks, heads,
        *(np.ascontiguousarray(table, np.float32) for table in turns),
        np.array([first_keys(c.in_layer(i), c.context, np.zeros(c.context, np.int32))
                  for i in range(len(c.window_pattern))]),
    )  # fmt: skip


def _room(config, texts, threads):
    """Room for `texts` texts and so many threads."""
    c, stages = config, len(INTEGRATORS[config.integrator].b)
    G, D, T = c.n_kv_heads, c.head_dim, c.context
    places, up = (texts, c.n_layers * stages, G), padded(c.hidden)
    if c.mlp == "swiglu":
        up = -(-c.hidden // (PANEL // 2)) * PANEL
    blocks = -(-max(c.dim, c.hidden, c.n_heads * D) // BLOCK)
    return Room(
        np.zeros((4, ROWS), np.int64), aligned(ROWS, c.dim),
        aligned(*places, padded(T) // PANEL, D, PANEL), aligned(*places, T, D),
        aligned(ROWS, padded((c.n_heads + 2 * G) * D)), aligned(ROWS, c.n_heads * D),
        aligned(ROWS, up), aligned(ROWS, c.hidden), aligned(stages, ROWS, padded(c.dim)),
        aligned(ROWS, c.n_predict, padded(c.vocab_size)), np.zeros(1, np.int64),
        np.zeros((threads, ROWS, blocks, BLOCK), np.int8), aligned(threads, ROWS, blocks, 2),
        aligned(threads, blocks * BLOCK * PANEL),
        *(aligned(threads, ROWS, c.dim) for _ in range(3)),
        aligned(threads, c.n_heads // G, padded(T)),
    )  # fmt: skip
