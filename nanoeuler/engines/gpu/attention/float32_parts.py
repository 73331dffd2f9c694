# Made from book/12c-attention-in-pieces.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-pieces-parts
"""What attention of float32 arrays by mma.sync shares: tiles in pieces of bf16, their products.

A tile is `pieces` tiles of bf16 (flash_mma_parts.py), the largest piece first. Numbers of 2^128
(1 - 2^-9) and more become infinite. Left out: the kernels themselves.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention.layout import PAD, round_up
from nanoeuler.engines.gpu.attention.mma_parts import (
    Head,
    beside,
    load_left,
    load_rows,
    own_column,
    own_row,
    own_thread,
    share,
)
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.ptx import (
    again,
    high_bf16,
    ldmatrix_across,
    load_float4,
    low_bf16,
    mma_tile,
    pack_bf16,
    store_float,
    store_float2,
    store_shared_int4,
    zeros,
)

HELD = 4  # times eight float32 that a thread loads of a tile before it cuts any; half at D = 128


class Form(NamedTuple):
    """A form of a kernel: head width; pieces, 2 or 3; warps of a block, with 16 rows each; rows of
    a step; columns that a step's sums are made for at a time; blocks of a multiprocessor that
    registers must suffice for; whether more than the diagonal limits what is seen.
    """

    D: int
    pieces: int
    warps: int
    step: int
    columns: int
    resident: int
    limited: bool = False

    @property
    def own(self) -> int:
        """Bytes of a piece of a tile of the block's own rows."""
        return 16 * self.warps * self.D * 2

    @property
    def size(self) -> int:
        """Bytes of a piece of a step's tile."""
        return self.step * self.D * 2


def fetcher(form: Form, rows: int) -> tuple[Callable, Callable, int, int]:
    """Two functions of a thread's share of a tile: load a part of it, and cut and store that.

    Also how many times eight numbers a part has, and how many parts there are.
    """
    D, pieces, threads = form.D, form.pieces, 32 * form.warps
    apart = threads // (D // 8)
    count, size = rows // apart, rows * D * 2
    each = min(count, HELD if D < 128 else HELD // 2)

    def fetch(values: Any, part: int, head: Head, first: int, limit: int) -> None:
        """Load rows `first` on; zeros from row `limit` on."""
        of = share(D)
        for i in range(each):
            row, at = int32(first + of.row + (part * each + i) * apart), 8 * i
            for j in range(8):
                values[at + j] = float32(0)
            if row < limit:
                x = int64(head.start + int64(row) * head.step + 32 * of.chunk)
                for j in range(0, 8, 4):
                    a, b, c, d = load_float4(x + 4 * j)
                    values[at + j], values[at + j + 1] = a, b
                    values[at + j + 2], values[at + j + 3] = c, d

    def settle(values: Any, part: int, tile: int) -> None:
        """Cut them, and store each piece in its tile."""
        of, words = share(D), cuda.local.array(4, int32)
        for i in range(each):
            below = (part * each + i) * apart  # rows; those 8 below are swapped alike
            at = int32(tile + (of.to ^ (below & 7) << 4) + below * 2 * D)
            for p in range(pieces):
                cut_eight(values, 8 * i, words)
                to = int32(at + p * size)
                store_shared_int4(to, words[0], words[1], words[2], words[3])

    return fetch, settle, each, count // each


def cut_eight(values: Any, at: int, words: Any) -> None:
    """Eight numbers, `at` on, rounded to bf16 into words; what that leaves stays in values."""
    for j in range(4):
        i = at + 2 * j
        words[j] = pack_bf16(values[i], values[i + 1])
        values[i] -= low_bf16(words[j])
        values[i + 1] -= high_bf16(words[j])


def cutter(form: Form, rows: int) -> Callable:
    """cut(tile, x, y, first, limit): so many rows of two heads into two tiles in pieces."""
    fetch, settle, each, parts = fetcher(form, rows)
    held, second = 8 * each, rows * form.D * 2 * form.pieces

    def cut(tile: int, x: Head, y: Head, first: int, limit: int) -> None:
        """All threads of the block call it. The second tile is behind the first."""
        of_x, of_y = cuda.local.array(held, float32), cuda.local.array(held, float32)
        for part in range(parts):
            fetch(of_x, part, x, first, limit)
            fetch(of_y, part, y, first, limit)
            settle(of_x, part, tile)
            settle(of_y, part, int32(tile + second))

    return cut


def pad_line(line: int, after: int, T: int, value: float, threads: int) -> None:
    """The last block of a head also sets what its line of lse or delta has `after` its own rows."""
    if after >= T:
        for i in range(0, PAD, threads):
            t = int32(after + own_thread() + i)
            if t < round_up(T, PAD):
                store_float(line + 4 * int64(t), value)


def put_sums(
    acc: Any, at: int, above: float, below: float, head: Head, first: int, T: int, D: int
) -> None:
    """A warp's 16 rows of sums, acc[at] on, times `above` and `below`, to rows `first` on."""
    t = int32(first + own_row())
    to = int64(head.start + int64(t) * head.step + 4 * own_column())
    for n in range(D // 8):
        j, here = at + 4 * n, to + 32 * n
        if t < T:
            store_float2(here, acc[j] * above, acc[j + 1] * above)
        if t + 8 < T:
            store_float2(here + 8 * head.step, acc[j + 2] * below, acc[j + 3] * below)


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


def rows_product(form: Form) -> Callable:
    """acc = A B^T: a warp's 16 rows of a tile of the block's own, by all rows of a step's tile."""
    D, step, own, twice = form.D, form.step, form.own, form.pieces == 3
    multiply, zero = mma_tile(16, step), zeros(step // 2)

    def load(b: Any, address: int) -> None:
        load_rows(b, address, step, D)

    small = small_products(form.pieces, multiply, load, form.size)

    def rows_times(acc: Any, by: Fragments, left_tile: int, right_tile: int) -> None:
        """left_tile, right_tile: with `left` and `right` of flash_mma_parts added."""
        zero(acc)
        left_tile = again(left_tile)  # or else all addresses of A would stay in registers
        for i in range(D // 16):
            at, there = beside(left_tile, i), beside(right_tile, i)
            load_left(by.a0, 0, at)
            load_left(by.a1, 0, int32(at + own))
            if twice:
                load_left(by.a2, 0, int32(at + 2 * own))
            small(acc, by, there)
            if not twice:
                multiply(acc, by.a0, by.b)
        if twice:
            left_tile = again(left_tile)
            for i in range(D // 16):
                load_left(by.a0, 0, beside(left_tile, i))
                load(by.b, beside(right_tile, i))
                multiply(acc, by.a0, by.b)

    return rows_times


def cut_scores(pieces: int) -> tuple[Callable, Callable]:
    """Two functions of 16 x 16 of a tile's numbers, columns 16 k on: all pieces, and the first."""

    def cut(s: Any, k: int, by: Fragments) -> None:
        for i in range(4):
            n = 8 * k + 2 * i
            first = pack_bf16(s[n], s[n + 1])
            x, y = s[n] - low_bf16(first), s[n + 1] - high_bf16(first)
            second = pack_bf16(x, y)
            by.a0[i], by.a1[i] = first, second
            if pieces == 3:
                by.a2[i] = pack_bf16(x - low_bf16(second), y - high_bf16(second))

    def cut_first(s: Any, k: int, by: Fragments) -> None:
        for i in range(4):
            n = 8 * k + 2 * i
            by.a0[i] = pack_bf16(s[n], s[n + 1])

    return cut, cut_first


def columns_product(form: Form) -> Callable:
    """acc += S B: 16 x step numbers in registers by a step's tile of `step` rows."""
    D, columns, depth, twice = form.D, form.columns, form.step // 16, form.pieces == 3
    multiply, zero = mma_tile(16, columns), zeros(columns // 2)
    across = ldmatrix_across(columns // 16)
    small = small_products(form.pieces, multiply, across, form.size)
    cut, cut_first = cut_scores(form.pieces)

    def add_columns(acc: Any, by: Fragments, s: Any, tile: int) -> None:
        """tile: with `left` of flash_mma_parts added."""
        for c in range(D // columns):
            zero(by.part)
            here = beside(tile, c * (columns // 16))
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
            for n in range(columns // 2):
                acc[c * (columns // 2) + n] += by.part[n]

    return add_columns
