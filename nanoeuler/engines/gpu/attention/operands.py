# Made from book/l-attention-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-mma-operands
"""Operands of attention by mma.sync: bf16, and the interface for other number formats.

Left out: float32 as a sum of bf16, in float32_operands.py; the kernels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention import mma_parts as mma
from nanoeuler.engines.gpu.attention.layout import Head, quarter_dot
from nanoeuler.engines.gpu.attention.softmax import Span, pack
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, int32


class Operands(NamedTuple):
    """A number format as operands. size: bytes of a number in memory; parts: the tiles of bf16
    that make up a tile in shared memory; halves: how many times 16 queries a warp has forward.
    These are factories, which get a form:

    fragments: fragments(), the registers that operands pass through
    loads: of a form and rows, load(tile, x, first, limit), and load_pair(tile, x, y, first, limit)
    rows_product: rows_times(acc, by, left_tile, right_tile), acc = A B^T
    columns_product: of a form and made(x, span), which makes columns of S of whatever x is;
        add_columns(acc, by, s, tile, x), acc += S B
    save: save(acc, above, below, tile, head, first, T), a warp's 16 rows to memory

    wait, of a number of stages, and commit: a step's tiles are there; a step's loads are all asked
    for. line(to, source) loads 16 bytes; dot is what `make_take_deltas` takes.
    """

    size: int
    parts: int
    halves: int
    fragments: Callable
    loads: Callable
    rows_product: Callable
    columns_product: Callable
    save: Callable
    wait: Callable
    commit: Callable
    line: Callable
    dot: Callable


class Fragments(NamedTuple):
    """Registers that operands of products pass through: A of 16 x 16, B of 16 x 16 or more."""

    a: Any
    b: Any


def make_fragments(form: "Form") -> Callable:
    """Those of 16 by the larger of a step and a head's width."""
    most = max(form.D, form.step) // 4

    def fragments() -> Fragments:
        return Fragments(cuda.local.array(4, int32), cuda.local.array(most, int32))

    return fragments


def make_loads(form: "Form", rows: int) -> tuple[Callable, Callable]:
    """Start copying; the second tile of a pair is behind the first."""
    D, second = form.D, rows * form.D * 2
    copy = mma.make_copy(D, rows, 32 * form.warps)

    def load(tile: int, x: Head, first: int, limit: int) -> None:
        copy(tile, x, first, limit, mma.share(D), False)

    def load_pair(tile: int, x: Head, y: Head, first: int, limit: int) -> None:
        of = mma.share(D)
        copy(tile, x, first, limit, of, False)
        copy(int32(tile + second), y, first, limit, of, False)

    return load, load_pair


def make_rows_product(form: "Form") -> Callable:
    """16 rows of a tile of the block's own by all rows of a step's tile, over D."""
    D, rows = form.D, form.step
    multiply, zero = ptx.mma_tile(16, rows), ptx.zeros(rows // 2)

    def rows_times(acc: Any, by: Fragments, left_tile: int, right_tile: int) -> None:
        """acc = A B^T. left_tile, right_tile: with `left` and `right` added."""
        zero(acc)
        left_tile = ptx.again(left_tile)  # or else all addresses of A would stay in registers
        for i in range(D // 16):
            mma.load_left(by.a, 0, mma.beside(left_tile, i))
            mma.load_rows(by.b, mma.beside(right_tile, i), rows, D)
            multiply(acc, by.a, by.b)

    return rows_times


def make_columns_product(form: "Form", made: Callable) -> Callable:
    """16 x step numbers in registers by a step's tile of `step` rows."""
    D, depth = form.D, form.step // 16
    multiply, across = ptx.mma_tile(16, D), ptx.ldmatrix_across(D // 16)

    def add_columns(acc: Any, by: Fragments, s: Any, tile: int, x: tuple) -> None:
        """acc += S B. tile: with `left` added. Numbers are made when they are multiplied."""
        for n in range(depth):
            made(x, Span(16 * n, 16))
            pack(s, Span(16 * n, 16), by.a)
            across(by.b, int32(tile + n * 32 * D))
            multiply(acc, by.a, by.b)

    return add_columns


def make_save(form: "Form") -> Callable:
    """Through 16 rows of shared memory that are this warp's own, the tile's first."""
    D = form.D

    def save(
        acc: Any, above: float, below: float, tile: int, head: Head, first: int, T: int
    ) -> None:
        """16 rows of sums times `above` and `below` to rows `first` on."""
        mma.stage_rows(acc, above, below, tile, D)
        mma.put_rows(tile, head, first, T, D)

    return save


def make_wait(stages: int) -> Callable:
    """This thread's copies of the oldest of so many stages have come."""
    return ptx.copy_wait(stages - 2)


BF16 = Operands(
    2, 1, 2, make_fragments, make_loads, make_rows_product, make_columns_product, make_save,
    make_wait, ptx.copy_commit, ptx.copy_async, quarter_dot,
)  # fmt: skip


class Form(NamedTuple):
    """A form of a kernel: head width; warps of a block; rows of a step; stages of these in shared
    memory; blocks of a multiprocessor that registers must suffice for; the kind of operands;
    whether sums and some maxima wait in shared memory from step to step (forward), because
    registers do not suffice; whether more than the diagonal limits what is seen.
    """

    D: int
    warps: int
    step: int
    stages: int
    resident: int
    operands: Operands = BF16
    park: bool = False
    limited: bool = False

    @property
    def own(self) -> int:
        """Bytes of a tile of the block's own rows, 16 to a warp."""
        return 16 * self.warps * self.D * 2 * self.operands.parts

    @property
    def size(self) -> int:
        """Bytes of a step's tile."""
        return self.step * self.D * 2 * self.operands.parts
