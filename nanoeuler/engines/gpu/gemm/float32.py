# Made from book/k-float32-products.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-pieces-pairs
"""Float32 products on bf16 tensor cores (bf16x2, bf16x3): a float32 is split into bf16 pieces.

Pieces of A and B lie side by side along k, so that one bf16 product with float32 sums multiplies
all pairs that count. With three pieces a term is exact to about one rounding of float32, with two
to 2^-15; the sums round as well. Pieces are exact from 2^-110 on. Left out: a k that is not a
multiple of 8 where rows run along it, and rounding other than that of the kernels there are.
"""

import functools
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

from nanoeuler.engines.gpu.gemm.choice import product_on
from nanoeuler.engines.gpu.gemm.mma_form import pitch, require
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, cover
from nanoeuler.engines.gpu.lang.vectors import ACCESS, STEP, make_load
from nanoeuler.errors import UserError

# How many pieces -> (i, j) of the products A_i B_j in the order of k, the smallest first.
PAIRS: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((0, 0),),
    2: ((0, 1), (1, 0), (0, 0)),
    3: ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0)),
}


# %% sec-pieces-kernel
THREADS = 256  # of a block
WIDTH = STEP   # columns of a thread: 16 bytes of bf16
TOP = 0x7F7F8000  # bits of the smallest float32 that rounds to infinity as a bf16


def inside(x):
    """x, truncated to a bf16 where rounding would leave bf16's range."""
    bits = int32(ptx.bits_of(x))
    size = int32(bits & 0x7FFFFFFF)
    return ptx.float_of(int32(bits & -65536)) if size >= TOP else x


def cut(values, words, p):
    """Write the p-th pieces of eight numbers to words, and the remainders to values."""
    for j in range(WIDTH // 2):
        a, b = values[2 * j], values[2 * j + 1]
        word = ptx.pack_bf16(inside(a), inside(b)) if p == 0 else ptx.pack_bf16(a, b)
        words[p * (WIDTH // 2) + j] = word
        values[2 * j] = a - ptx.low_bf16(word)
        values[2 * j + 1] = b - ptx.high_bf16(word)


@functools.cache
def split_kernel(which: tuple[int, ...]) -> Kernel:
    """Pieces `which` of a float32 matrix, in this order; see `split_launch`.

    x, out: addresses. vectors: of 8 columns, in all; across: in a row. wide, line, step: bytes from
    a row of x to the next, from a row of out to the next, from a piece in out to the next. Thread i
    of the grid has vector i. Bytes of an element: 4 read, 2 written for each piece.
    """
    load, count, each = make_load("float32", WIDTH), max(which) + 1, WIDTH // 2
    held = count * each

    def split(x, out, vectors, across, wide, line, step):
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        values = cuda.local.array(WIDTH, float32)
        words = cuda.local.array(held, int32)
        if i < vectors:
            row = ptx.divide(i, across)
            column = int32(i - row * across) * WIDTH
            load(values, 0, x + int64(row) * wide + int64(column) * 4)
            for p in range(count):
                cut(values, words, p)
            at = out + int64(row) * line + int64(column) * 2
            for q in range(len(which)):
                w = which[q] * each
                ptx.store_int4(at, words[w], words[w + 1], words[w + 2], words[w + 3])
                at += step

    return Kernel(split, "l l r r l l l", THREADS, target=(8, 0))


def eights(columns: int) -> int:
    """Columns, up to a multiple of 8."""
    return cover(columns, WIDTH) * WIDTH


def split_shape(shape: tuple[int, int], count: int, axis: int) -> tuple[int, int]:
    """The shape of `count` pieces of a matrix: below each other (axis 0) or side by side (1)."""
    rows, columns = shape
    return (count * rows, eights(columns)) if axis == 0 else (rows, count * columns)


def split_launch(x: Any, out: Any, which: tuple[int, ...], axis: int) -> Launch:
    """Pieces of x, laid along `axis` in the order of `which`.

    x (rows, columns) float32, rows a multiple of 16 bytes apart, columns a multiple of 8; out
    uint16 (bf16), of `split_shape`, its rows likewise: block q of its rows or columns is piece
    which[q] of x, 0 the largest.
    """
    if axis not in (0, 1) or not which or not {*which} <= {0, 1, 2}:
        raise UserError(f"pieces 0, 1, 2 are laid along axis 0 or 1, not {which} along {axis}")
    if str(x.dtype) != "float32":
        raise UserError(f"float32 is cut, not {x.dtype}")
    rows, columns = x.shape
    if columns % WIDTH:
        raise UserError(f"columns that are cut come in eights, not {columns}: pad the rows")
    if not 0 < rows * columns < WIDTH << 31:
        came = f"{rows} x {columns}"
        raise UserError(f"a matrix that is cut has some elements, less than 2^34, not {came}")
    if getattr(x, "address", 0) % ACCESS:
        raise UserError(f"a matrix that is cut begins at a multiple of {ACCESS} bytes: {x.address}")
    require("the pieces", out, split_shape((rows, columns), len(which), axis), "uint16")
    wide, across = 4 * pitch(x), columns // WIDTH
    line, step = out.strides[0], 2 * columns if axis else rows * out.strides[0]
    args = x, out, rows * across, across, wide, line, step
    return Launch(split_kernel(tuple(which)), (cover(rows * across, THREADS),), args)


# %% sec-pieces-product
AXES = {"NT": (1, 1), "NN": (1, 0), "TN": (0, 0)}  # along which k runs, in A and in B
TILE = 128, 256  # of C, of a block of either kind of product
# About how long a stretch is, in k of the bf16 product, by pieces. With three, the last sixth, 128,
# is added at full size and loses no more than float32's own rounding (appendix K). With two, the
# split itself loses more. Twice that where blocks would be idle: long stretches leave room for
# split-K.
DEEP = {1: 6144, 2: 6144, 3: 768}


def stretches_for(
    m: int, n: int, k: int, pieces: int = 3, blocks: int = MULTIPROCESSORS
) -> int:
    """In how many stretches a product takes its k, at most."""
    idle = 2 * cover(m, TILE[0]) * cover(n, TILE[1]) < blocks
    least = cover(k * len(PAIRS[pieces]), (2 if idle else 1) * DEEP[pieces])
    return max(1, min(least, k // WIDTH))


def stretch_of(k: int, stretches: int) -> int:
    """The length of all stretches but the last, which has what is left: a multiple of WIDTH."""
    return k if stretches == 1 else WIDTH * cover(k, WIDTH * stretches)


def split_shapes(
    layout: str, m: int, n: int, k: int, pieces: int = 3, stretches: int | None = None,
    blocks: int = MULTIPROCESSORS,
) -> tuple[tuple[int, int], tuple[int, int]]:  # fmt: skip
    """The shapes, of bf16, that a product of m x n x k needs for the pieces of A and of B."""
    k = stretch_of(k, stretches or stretches_for(m, n, k, pieces, blocks))
    pairs, (of_a, of_b) = len(PAIRS[pieces]), AXES[layout]
    a, b = ((m, k) if of_a else (k, m)), ((n, k) if of_b else (k, n))
    return split_shape(a, pairs, of_a), split_shape(b, pairs, of_b)


def depth_of(layout: str, a: Any, b: Any, c: Any, pieces: int, epilogue: str) -> int:
    """k of a product in pieces; UserError where there is no such product."""
    if layout not in AXES or pieces not in PAIRS or epilogue not in ("store", "add"):
        known = f"{', '.join(AXES)} of 1, 2, 3 pieces, store and add"
        raise UserError(f"there are {known}, not {layout} of {pieces}, {epilogue!r}")
    of_a, of_b = AXES[layout]
    k = a.shape[of_a]
    if not 0 < k == b.shape[of_b] or str(c.dtype) != "float32":
        came = f"{a.shape} by {b.shape} to {c.dtype}"
        raise UserError(f"{layout} of float32 does not fit {came}")
    return k


class Splitting(TypedDict, total=False):
    """How a float32 product is split: into how many pieces (3 by default); the epilogue, store or
    add; into how many stretches k is divided, the last one shorter, all but the first added to C;
    blocks and place as in `choice.Ends`; and the bf16 GEMM, `product_on` or another with its
    arguments."""

    pieces: int
    epilogue: str
    stretches: int | None
    blocks: int
    place: Callable
    product: Callable[..., list[Launch]]


def first_of(cut: Any, axis: int, count: int) -> Any:
    """The first columns (axis 1) or rows of the memory for pieces: the last stretch needs less."""
    return cut[:, :count] if axis else cut[:count]


def pieces_product(
    capability: tuple[int, int], layout: str, a: Any, b: Any, c: Any, split_a: Any, split_b: Any,
    **how: Unpack[Splitting],
) -> list[Launch]:  # fmt: skip
    """The launches, in order, of C = op(A) op(B), or C += with "add", of float32 matrices.

    a, b (2-d) as the layout stores them and as `split_launch` takes them; c (m, n), rows a multiple
    of 16 bytes apart; split_a, split_b uint16 of `split_shapes`, overwritten. If a matrix is split
    along its rows, it may have more columns than C needs, up to a multiple of 8.
    """
    pieces, epilogue = how.pop("pieces", 3), how.pop("epilogue", "store")
    product, stretches = how.pop("product", product_on), how.pop("stretches", None)
    k = depth_of(layout, a, b, c, pieces, epilogue)
    (of_a, of_b), (m, n) = AXES[layout], c.shape
    blocks = how.get("blocks", MULTIPROCESSORS)
    length = stretch_of(k, stretches or stretches_for(m, n, k, pieces, blocks))
    left, right = zip(*PAIRS[pieces], strict=True)

    def room(cut: Any, axis: int, size: int) -> Any:
        return cut if size == length else first_of(cut, axis, len(left) * size)

    @functools.cache
    def multiply(size: int, way: str) -> list[Launch]:
        cut_a, cut_b = room(split_a, of_a, size), room(split_b, of_b, size)
        if of_a == 0 and m % WIDTH:
            cut_a = cut_a[:, :m]
        if of_b == 0 and n % WIDTH:
            cut_b = cut_b[:, :n]
        return product(capability, layout, cut_a, cut_b, c, epilogue=way, **how)

    made = []
    for at in range(0, k, length):
        size = min(length, k - at)
        for x, cut, which, axis in (a, split_a, left, of_a), (b, split_b, right, of_b):
            taken = x[:, at : at + size] if axis else x[at : at + size]
            made.append(split_launch(taken, room(cut, axis, size), which, axis))
        made += multiply(size, "add" if at else epilogue)
    return made
