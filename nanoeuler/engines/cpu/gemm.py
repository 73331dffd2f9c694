# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-llvm
"""Matrix products in float32: a tile held in vector registers, and everything built on it.

For any sizes, and for operands that are transposed views. Runs on one thread without the GIL.
Leaves out other types, and blocking for the last-level cache.

M rows and N columns of the result, P depth: the length of its sums. Addresses are integers, and
all distances in memory are bytes. Numba's cache knows one file: kernels stay beside the tile.
"""

from collections.abc import Callable
from functools import partial, update_wrapper
from threading import Lock
from typing import Any

from numba import types
from numba.core.cgutils import unpack_tuple
from numba.extending import intrinsic

from nanoeuler.engines.cpu import llvm
from nanoeuler.engines.cpu.llvm import LANES, REGISTERS
from nanoeuler.engines.interface import Array
from nanoeuler.jit import njit

# A tile is ROWS x VECTORS registers of sums: 3/4 of all; a strip of b and one of a need the rest.
# VECTORS is 2 or 3: `_product` has no wider tile, and cuts strips that are two wide.
VECTORS, ROWS = 3, REGISTERS // 4
# Rows of b packed at a time: 128 x 48 x 4 bytes = 24 KiB, so that a strip fits any level 1 cache.
DEPTH = 128
# Bytes of a float32.
SIZE = 4
# Steps of the depth that a is asked for ahead of its use. At 7 ns a step it's about 200 ns, enough
# for the way from memory.
_AHEAD = 32
# Float32 elements of work space: a packed strip, whose rows are written LANES at a time.
WORK = (DEPTH + LANES) * VECTORS * LANES


def _places(build, vectors, a_row, c, c_row, rows):
    # For each row whether it exists, and its offset in a; the address of each vector of c. A row
    # that does not exist reads row 0 of a, which does, and writes nothing.
    inside = [build.icmp_signed("<", llvm.number(r), rows) for r in range(ROWS)]
    offsets, places = [], []
    for r in range(ROWS):
        offset = build.mul(a_row, llvm.number(r))
        offsets.append(build.select(inside[r], offset, llvm.number(0)))
        for v in range(vectors):
            row = llvm.at(build, c, c_row, r)
            places.append(build.add(row, llvm.number(4 * LANES * v)))
            llvm.prefetch(build, places[-1], write=1)
    return inside, offsets, places


def _one_round(build, vectors, at_a, a_depth, offsets, at_b, sums):
    # The sums after one round: a column of a times a row of the strip is added to them.
    strip = [build.add(at_b, llvm.number(4 * LANES * v)) for v in range(vectors)]
    strip = [llvm.load(build, address, llvm.ALL) for address in strip]
    llvm.prefetch(build, llvm.at(build, at_a, a_depth, _AHEAD), write=0)
    added = []
    for r in range(ROWS):
        address = build.inttoptr(build.add(at_a, offsets[r]), llvm.FLOAT.as_pointer())
        x = llvm.spread(build, build.load(address))
        for v in range(vectors):
            product = build.fmul(x, strip[v], flags=("contract",))  # one FMA with fadd
            total = build.fadd(product, sums[r * vectors + v], flags=("contract",))
            added.append(total)
    return added


def _over_depth(build, vectors, a, a_depth, offsets, b, depth):
    # The loop; what is written next comes after it. The sums at its end.
    before, loop = build.block, build.append_basic_block("depth")
    done = build.append_basic_block("store")
    build.branch(loop)
    build.position_at_end(loop)
    k, at_a, at_b = build.phi(llvm.INT64), build.phi(llvm.INT64), build.phi(llvm.INT64)
    sums = [build.phi(llvm.VECTOR) for _ in range(ROWS * vectors)]
    added = _one_round(build, vectors, at_a, a_depth, offsets, at_b, sums)
    firsts = [llvm.number(0), a, b, *[llvm.ZEROS] * len(sums)]
    next_b = build.add(at_b, llvm.number(4 * LANES * vectors))
    next_a = llvm.at(build, at_a, a_depth, 1)
    afters = [build.add(k, llvm.number(1)), next_a, next_b, *added]
    for phi, first, after in zip([k, at_a, at_b, *sums], firsts, afters, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(after, loop)
    build.cbranch(build.icmp_signed("<", afters[0], depth), loop, done)
    build.position_at_end(done)
    return added


def _store_sums(build, vectors, sums, places, inside, columns, add):
    # Each sum to its place, if its row exists, as many lanes as there are columns.
    wide = build.icmp_signed(">=", columns, llvm.number(LANES * vectors))
    whole = build.and_(wide, inside[-1])
    with build.if_else(build.and_(whole, build.not_(add))) as (plain, careful):
        with plain:
            for total, place in zip(sums, places, strict=True):
                llvm.store(build, total, place, llvm.ALL)
        with careful:
            for n, (total, place) in enumerate(zip(sums, places, strict=True)):
                left = build.sub(columns, llvm.number(LANES * (n % vectors)))
                left = build.select(inside[n // vectors], left, llvm.number(0))
                mask = llvm.below(build, left)
                old = llvm.load(build, place, build.select(add, mask, llvm.NONE))
                llvm.store(build, build.fadd(total, old), place, mask)


def _make_tile(vectors):
    @intrinsic
    def tile(typing, a, b, c, sizes, add):
        # c[:rows, :columns] (+)= a[:rows, :depth] b[:depth], b a packed strip, `vectors` wide.
        # a: address, and how far apart rows and columns are; c: address and rows; sizes: of these.
        def generate(context, build, signature, arguments):
            b, add = arguments[1], arguments[4]
            a, a_row, a_depth = unpack_tuple(build, arguments[0])
            c, c_row = unpack_tuple(build, arguments[2])
            rows, columns, depth = unpack_tuple(build, arguments[3])
            inside, offsets, places = _places(build, vectors, a_row, c, c_row, rows)
            sums = _over_depth(build, vectors, a, a_depth, offsets, b, depth)
            _store_sums(build, vectors, sums, places, inside, columns, add)
            return context.get_dummy_value()

        of = types.UniTuple
        kinds = of(types.intp, 3), types.intp, of(types.intp, 2), of(types.intp, 3), types.boolean
        return types.void(*kinds), generate

    return tile


_tile1, _tile2, _tile3 = (_make_tile(vectors) for vectors in (1, 2, 3))


# %% sec-cpu-strips
@intrinsic
def _move(typing, source, target, columns):
    # target[:LANES] = source[:columns], then zeros
    def generate(context, build, signature, arguments):
        source, target, columns = arguments
        llvm.store(build, llvm.load(build, source, llvm.below(build, columns)), target, llvm.ALL)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def _transpose(typing, source, source_row, target, target_row, rows, columns):
    # target[j, i] = source[i, j], LANES x LANES; outside (rows, columns) the source reads as zero
    def generate(context, build, signature, arguments):
        source, source_row, target, target_row, rows, columns = arguments
        x = []
        for r in range(LANES):
            exists = build.icmp_signed("<", llvm.number(r), rows)
            mask = llvm.below(build, build.select(exists, columns, llvm.number(0)))
            x.append(llvm.load(build, llvm.at(build, source, source_row, r), mask))
        for step in [1 << s for s in range(LANES.bit_length() - 1)]:
            # Swap the two off-diagonal squares of `step` in every square of 2 * step.
            low = [n + LANES - step if n & step else n for n in range(LANES)]
            high = [n + LANES if n & step else n + step for n in range(LANES)]
            for r in range(LANES):
                if not r & step:
                    upper, lower = x[r], x[r + step]
                    x[r] = llvm.shuffle(build, upper, lower, low)
                    x[r + step] = llvm.shuffle(build, upper, lower, high)
        for r in range(LANES):
            llvm.store(build, x[r], llvm.at(build, target, target_row, r), llvm.ALL)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


@intrinsic
def _ask(typing, source, source_row):
    # Prefetch source[:ROWS, :VECTORS * LANES], or what lies there: it is only a hint.
    def generate(context, build, signature, arguments):
        source, source_row = arguments
        for r in range(ROWS):
            for v in range(VECTORS):
                place = build.add(llvm.at(build, source, source_row, r), llvm.number(4 * LANES * v))
                llvm.prefetch(build, place, write=0)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 2), generate


@njit(error_model="numpy")
def _pack(b, depth, columns, width, strip):
    # strip (depth, width) contiguous = b[:depth, :columns], padded with zeros to `width`
    at, down, across = b
    for k in range(0, depth, 1 if across == SIZE else LANES):
        for n in range(0, width, LANES):
            to, source = strip + SIZE * (k * width + n), at + k * down + n * across
            if across == SIZE:
                _move(source, to, columns - n)
            else:
                _transpose(source, across, to, SIZE * width, columns - n, depth - k)


# Where the operands of a product are zero, or where its result is not wanted (all T x T, causal):
FULL = 0  # nowhere
BELOW = 1  # the result is wanted on and below the diagonal: scores. Above, some of it is written
LOWER = 2  # a is zero above the diagonal: probabilities times values
UPPER = 3  # a is zero below the diagonal: transposed probabilities times gradients


@njit(error_model="numpy")
def _product(a, b, c, sizes, shape, add, strip):
    # c (+)= a b, by pieces k of the depth, strips j of b, row tiles i of a. Each of a, b and c is
    # its address and how far apart its rows, and its columns, are; sizes: rows, columns, depth.
    (a, a_row, a_depth), (b, b_depth, b_column), (c, c_row, _) = a, b, c
    rows, columns, depth = sizes
    for k in range(0, depth, DEPTH):
        end, j = min(k + DEPTH, depth), 0
        while j < columns:
            vectors, n = (columns - j + LANES - 1) // LANES, columns - j
            width = LANES * (2 if vectors == 4 else min(vectors, VECTORS))  # 2 + 2 beats 3 + 1
            from_b = b + k * b_depth + j * b_column
            _pack((from_b, b_depth, b_column), end - k, n, width, strip)
            for i in range(j // ROWS * ROWS if shape == BELOW else 0, rows, ROWS):
                begin = i if shape == UPPER else 0
                low, high = max(k, begin), min(end, i + ROWS) if shape == LOWER else end
                if low >= high:
                    continue
                if b_column == SIZE and n > width and i < end - k:
                    _ask(from_b + i * b_depth + SIZE * width, b_depth)
                x = a + i * a_row + low * a_depth, a_row, a_depth
                y = strip + SIZE * (low - k) * width
                to, part = (c + i * c_row + SIZE * j, c_row), (rows - i, n, high - low)
                if width == LANES:
                    _tile1(x, y, to, part, add or low > begin)
                elif width == 2 * LANES:
                    _tile2(x, y, to, part, add or low > begin)
                else:
                    _tile3(x, y, to, part, add or low > begin)
            j += width


class Kernel:
    """A function that numba compiles for one signature, or loads, when it is first called.

    `dispatcher` is numba's, None until then.
    """

    def __init__(self, signature: str, function: Callable[..., None]) -> None:
        self.signature, self.function, self.dispatcher = signature, function, None
        self.lock = Lock()
        update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> None:
        if self.dispatcher is None:
            with self.lock:  # a thread that waited finds it made
                self.dispatcher = self.dispatcher or njit(
                    self.signature, nogil=True, cache=True, error_model="numpy"
                )(self.function)
        self.dispatcher(*arguments)


@njit(error_model="numpy")
def _place(x):
    # The address of a matrix, and how far apart its rows, and its columns, are.
    return x.ctypes.data, x.strides[0], x.strides[1]


@partial(Kernel, "void(f4[:,:], f4[:,:], f4[:,:], b1, f4[::1])")
def multiply(a: Array, b: Array, c: Array, add: bool, work: Array) -> None:
    """c (M, N) = a (M, P) b (P, N), or c += a b if `add`. Float32 views, transposed or not.

    The elements of a row or of a column of b, and of a row of c, lie side by side. work (WORK,).
    Every sum runs over P in order, in pieces of DEPTH, whatever the other sizes.
    """
    (rows, depth), columns = a.shape, b.shape[1]
    if not (b.shape[0] == depth and c.shape == (rows, columns) and work.size >= WORK):
        raise ValueError("shapes that cannot be multiplied, or a work space too small")
    if not (c.strides[1] == SIZE and (b.strides[0] == SIZE or b.strides[1] == SIZE)):
        raise ValueError("expected a contiguous row of c, and a row or column of b")
    strip = work.ctypes.data
    _product(_place(a), _place(b), _place(c), (rows, columns, depth), FULL, add, strip)


@partial(Kernel, "void(f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], i8, f4[::1])")
def multiply_heads(a: Array, b: Array, c: Array, shape: int, work: Array) -> None:
    """c[i, h] = a[i, h] b[i, h] for every sequence i and head h; `shape` says where to save work.

    a (B, Ha, M, P), b (B, Hb, P, N), c (B, Hc, M, N), float32 views as for `multiply`. With H the
    largest of Ha, Hb, Hc, head h of fewer is the one its group shares: h // (H / Ha), and so on;
    a group that shares a head of c adds up in it. `shape` is FULL, BELOW, LOWER or UPPER.
    """
    (B, _, rows, depth), columns = a.shape, b.shape[3]
    H = max(a.shape[1], b.shape[1])
    if not (b.shape[0] == B and b.shape[2] == depth and c.shape[0] == B and work.size >= WORK):
        raise ValueError("shapes that cannot be multiplied, or a work space too small")
    if not (c.shape[2] == rows and c.shape[3] == columns):
        raise ValueError("expected c to have the rows of a and the columns of b")
    if H % a.shape[1] or H % b.shape[1] or H % c.shape[1]:
        raise ValueError("expected equal groups of heads")
    if not (c.strides[3] == SIZE and (b.strides[2] == SIZE or b.strides[3] == SIZE)):
        raise ValueError("expected a contiguous row of c, and a row or column of b")
    for i in range(B):
        for h in range(H):
            ha, hb, hc = h * a.shape[1] // H, h * b.shape[1] // H, h * c.shape[1] // H
            add = h * c.shape[1] % H > 0  # not the first of its group
            x, y, z = _place(a[i, ha]), _place(b[i, hb]), _place(c[i, hc])
            _product(x, y, z, (rows, columns, depth), shape, add, work.ctypes.data)
