# Made from book/m-float32-attention.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-pieces-parts
"""float32 as operands of attention by mma.sync: sums of two or three bf16, their products.

A tile is `parts` tiles of bf16 (mma_parts.py), the largest part first. Numbers of 2^128
(1 - 2^-9) and more become infinite. Left out: the kernels, which are those of bf16.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention import mma_parts
from nanoeuler.engines.gpu.attention.layout import Head
from nanoeuler.engines.gpu.attention.operands import Form, Operands
from nanoeuler.engines.gpu.attention.softmax import Span
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64

HELD = 4  # times eight float32 that a thread loads of a tile before it splits any; half at D = 128


def make_fetch(form: Form, rows: int) -> tuple[Callable, Callable, int, int]:
    """Two functions of a thread's share of a tile: load some of it, and split and store that.

    Also how many times eight numbers that is, and how often it is done.
    """
    D, parts, threads = form.D, form.operands.parts, 32 * form.warps
    apart = threads // (D // 8)
    count, size = rows // apart, rows * D * 2
    each = min(count, HELD if D < 128 else HELD // 2)

    def fetch(values: Any, turn: int, head: Head, first: int, limit: int) -> None:
        """Load rows `first` on; zeros from row `limit` on."""
        of = mma_parts.share(D)
        for i in range(each):
            row, at = int32(first + of.row + (turn * each + i) * apart), 8 * i
            for j in range(8):
                values[at + j] = float32(0)
            if row < limit:
                x = int64(head.start + int64(row) * head.step + 32 * of.chunk)
                for j in range(0, 8, 4):
                    a, b, c, d = ptx.load_float4(x + 4 * j)
                    values[at + j], values[at + j + 1] = a, b
                    values[at + j + 2], values[at + j + 3] = c, d

    def settle(values: Any, turn: int, tile: int) -> None:
        """Split them, and store each part in its tile."""
        of, words = mma_parts.share(D), cuda.local.array(4, int32)
        for i in range(each):
            below = (turn * each + i) * apart  # rows; those 8 below are swapped alike
            at = int32(tile + (of.to ^ (below & 7) << 4) + below * 2 * D)
            for p in range(parts):
                split_eight(values, 8 * i, words)
                to = int32(at + p * size)
                ptx.store_shared_int4(to, words[0], words[1], words[2], words[3])

    return fetch, settle, each, count // each


def split_eight(values: Any, at: int, words: Any) -> None:
    """Eight numbers, `at` on, rounded to bf16 into words; what that leaves stays in values."""
    for j in range(4):
        i = at + 2 * j
        words[j] = ptx.pack_bf16(values[i], values[i + 1])
        values[i] -= ptx.low_bf16(words[j])
        values[i + 1] -= ptx.high_bf16(words[j])


def make_loads(form: Form, rows: int) -> tuple[Callable, Callable]:
    """The loads of `Operands`: load(tile, x, first, limit), load_pair(tile, x, y, first, limit).

    All threads of the block call them. The second tile of a pair is behind the first.
    """
    fetch, settle, each, turns = make_fetch(form, rows)
    held, second = 8 * each, rows * form.D * 2 * form.operands.parts

    def load(tile: int, x: Head, first: int, limit: int) -> None:
        values = cuda.local.array(held, float32)
        for turn in range(turns):
            fetch(values, turn, x, first, limit)
            settle(values, turn, tile)

    def load_pair(tile: int, x: Head, y: Head, first: int, limit: int) -> None:
        of_x, of_y = cuda.local.array(held, float32), cuda.local.array(held, float32)
        for turn in range(turns):
            fetch(of_x, turn, x, first, limit)
            fetch(of_y, turn, y, first, limit)
            settle(of_x, turn, tile)
            settle(of_y, turn, int32(tile + second))

    return load, load_pair


def make_wait(stages: int) -> Callable:
    """Nothing is under way when a step begins."""

    def wait() -> None:
        pass

    return wait


def commit() -> None:
    """A step's tiles are complete when all threads have stored their parts."""
    cuda.syncthreads()  # all parts are there


def load_line(to: int, source: int) -> None:
    """16 bytes."""
    a, b, c, d = ptx.load_float4(source)
    ptx.store_shared_float4(to, a, b, c, d)


def quarter_dot(x: int, y: int, D: int) -> float:
    """The dot product of D / 4 float32 at each of two addresses: what a lane has of a row."""
    total = float32(0)
    for i in range(D // 16):
        x0, x1, x2, x3 = ptx.load_float4(x + 16 * i)
        y0, y1, y2, y3 = ptx.load_float4(y + 16 * i)
        total += (x0 * y0 + x1 * y1) + (x2 * y2 + x3 * y3)
    return total


def make_save(form: Form) -> Callable:
    """Straight to memory, two numbers at a time."""
    D = form.D

    def save(
        acc: Any, above: float, below: float, tile: int, head: Head, first: int, T: int
    ) -> None:
        """A warp's 16 rows of sums times `above` and `below` to rows `first` on."""
        t = int32(first + mma_parts.own_row())
        to = int64(head.start + int64(t) * head.step + 4 * mma_parts.own_column())
        for n in range(D // 8):
            j, here = 4 * n, to + 32 * n
            if t < T:
                ptx.store_float2(here, acc[j] * above, acc[j + 1] * above)
            if t + 8 < T:
                ptx.store_float2(here + 8 * head.step, acc[j + 2] * below, acc[j + 3] * below)

    return save


# %% sec-flash-pieces-products
class Fragments(NamedTuple):
    """Registers that operands of products pass through: three pieces of A of 16 x 16, one of B;
    and sums of a step.
    """

    a0: Any
    a1: Any
    a2: Any
    b: Any
    part: Any


def make_fragments(form: Form, columns: int) -> Callable:
    """Those of products of a form, so many columns of the output at a time."""
    most, part = max(columns, form.step) // 4, columns // 2

    def fragments() -> Fragments:
        return Fragments(
            cuda.local.array(4, int32), cuda.local.array(4, int32), cuda.local.array(4, int32),
            cuda.local.array(most, int32), cuda.local.array(part, float32),
        )  # fmt: skip

    return fragments


def small_products(pieces: int, multiply: Callable, load: Callable, apart: int) -> Callable:
    """small(acc, by, at): acc += A B for the pairs that are small, all pieces of A being there.

    load(b, address): a piece of B; the next is `apart` bytes on. It leaves the first piece in b.
    """

    def of_two(acc: Any, by: Fragments, at: int) -> None:
        load(by.b, int32(at + apart))
        multiply(acc, by.a0, by.b)
        load(by.b, at)
        multiply(acc, by.a1, by.b)

    def of_three(acc: Any, by: Fragments, at: int) -> None:
        load(by.b, int32(at + 2 * apart))
        multiply(acc, by.a0, by.b)
        load(by.b, int32(at + apart))
        multiply(acc, by.a1, by.b)
        multiply(acc, by.a0, by.b)
        load(by.b, at)
        multiply(acc, by.a2, by.b)
        multiply(acc, by.a1, by.b)

    return of_two if pieces == 2 else of_three


def make_rows_product(form: Form) -> Callable:
    """16 rows of a tile of the block's own by all rows of a step's tile, over D."""
    D, step, parts = form.D, form.step, form.operands.parts
    own, twice = form.own // parts, parts == 3
    multiply, zero = ptx.mma_tile(16, step), ptx.zeros(step // 2)

    def load(b: Any, address: int) -> None:
        mma_parts.load_rows(b, address, step, D)

    small = small_products(parts, multiply, load, form.size // parts)

    def rows_times(acc: Any, by: Fragments, left_tile: int, right_tile: int) -> None:
        """acc = A B^T. left_tile, right_tile: with `left` and `right` added."""
        zero(acc)
        left_tile = ptx.again(left_tile)  # or else all addresses of A would stay in registers
        for i in range(D // 16):
            at, there = mma_parts.beside(left_tile, i), mma_parts.beside(right_tile, i)
            mma_parts.load_left(by.a0, 0, at)
            mma_parts.load_left(by.a1, 0, int32(at + own))
            if twice:
                mma_parts.load_left(by.a2, 0, int32(at + 2 * own))
            small(acc, by, there)
            if not twice:
                multiply(acc, by.a0, by.b)
        if twice:
            left_tile = ptx.again(left_tile)
            for i in range(D // 16):
                mma_parts.load_left(by.a0, 0, mma_parts.beside(left_tile, i))
                load(by.b, mma_parts.beside(right_tile, i))
                multiply(acc, by.a0, by.b)

    return rows_times


def split_scores(parts: int) -> tuple[Callable, Callable]:
    """Two functions of 16 x 16 of a tile's numbers, columns 16 k on: all parts, and the first."""

    def cut(s: Any, k: int, by: Fragments) -> None:
        for i in range(4):
            n = 8 * k + 2 * i
            first = ptx.pack_bf16(s[n], s[n + 1])
            x, y = s[n] - ptx.low_bf16(first), s[n + 1] - ptx.high_bf16(first)
            second = ptx.pack_bf16(x, y)
            by.a0[i], by.a1[i] = first, second
            if parts == 3:
                by.a2[i] = ptx.pack_bf16(x - ptx.low_bf16(second), y - ptx.high_bf16(second))

    def cut_first(s: Any, k: int, by: Fragments) -> None:
        for i in range(4):
            n = 8 * k + 2 * i
            by.a0[i] = ptx.pack_bf16(s[n], s[n + 1])

    return cut, cut_first


def make_columns_product(form: Form, made: Callable, columns: int) -> Callable:
    """16 x step numbers in registers by a step's tile of `step` rows, some columns at a time."""
    D, depth, parts = form.D, form.step // 16, form.operands.parts
    twice, all_of_it = parts == 3, Span(0, form.step)
    multiply, zero = ptx.mma_tile(16, columns), ptx.zeros(columns // 2)
    across = ptx.ldmatrix_across(columns // 16)
    small = small_products(parts, multiply, across, form.size // parts)
    cut, cut_first = split_scores(parts)

    def add_columns(acc: Any, by: Fragments, s: Any, tile: int, x: tuple) -> None:
        """acc += S B. tile: with `left` added. A step's sums are made from zero."""
        made(x, all_of_it)
        for c in range(D // columns):
            zero(by.part)
            here = mma_parts.beside(tile, c * (columns // 16))
            for k in range(depth):
                cut(s, k, by)
                small(by.part, by, int32(here + k * 32 * D))
                if not twice:
                    multiply(by.part, by.a0, by.b)
            if twice:
                for k in range(depth):
                    cut_first(s, k, by)
                    across(by.b, int32(here + k * 32 * D))
                    multiply(by.part, by.a0, by.b)
            for i in range(columns // 2):
                acc[c * (columns // 2) + i] += by.part[i]

    return add_columns


@functools.cache
def split(parts: int, columns: int) -> Operands:
    """float32 as sums of two (to 2^-15) or three bf16 (as exact as float32).

    columns: of an output that a step's sums are made for at a time.
    """
    return Operands(
        4, parts, 1, functools.partial(make_fragments, columns=columns), make_loads,
        make_rows_product, functools.partial(make_columns_product, columns=columns), make_save,
        make_wait, commit, load_line, quarter_dot,
    )  # fmt: skip
