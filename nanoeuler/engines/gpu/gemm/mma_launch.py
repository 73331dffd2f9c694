# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-mma-host
"""Products by mma.sync, as launches: how many pieces, how much space, which tile for which card."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from nanoeuler.engines.gpu.gemm.column_sums import HEADER, WIDE, columns_kernel
from nanoeuler.engines.gpu.gemm.mma_form import (
    SIDE,
    MmaForm,
    fit,
    fit_more,
    halves_pitch,
    pitch,
    require_space,
)
from nanoeuler.engines.gpu.gemm.mma_kernel import SUM_THREADS, mma_kernel, sum_kernel
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS, SHARED, limit
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, cover
from nanoeuler.engines.gpu.tile.rope import Turning, expect_turning
from nanoeuler.errors import UserError

# The cost of a tile besides its k-blocks (ring filled, sums stored), in k-blocks; about.
TILE_COST = 4
# Bytes that memory moves for each multiprocessor while a block multiplies a k-block of 128 x 256;
# about, and alike on cards with fewer of them, which have less memory to wait for, too.
BYTES = 5e6 / MULTIPROCESSORS
MOST_PIECES = 16  # along k: more are not worth the sum


def pieces_of(form: MmaForm, m: int, n: int, k: int, blocks: int = MULTIPROCESSORS) -> int:
    """Into how many pieces k is cut, on a machine that runs `blocks` blocks at once."""
    if form.out != "float32":
        return 1
    tiles, k_blocks = cover(m, form.rows) * cover(n, form.columns), cover(k, form.depth)
    least = cover(k_blocks, form.longest) if form.longest else 1
    moved = BYTES * blocks / form.resident * form.columns / 256  # meanwhile, by all of memory

    def cost(pieces: int) -> float:
        waves = cover(tiles * pieces, blocks)
        summed = pieces * m * n * 8 / moved if pieces > 1 else 0
        return waves * (cover(k_blocks, pieces) + TILE_COST) + summed

    return min(range(least, max(least, min(MOST_PIECES, k_blocks)) + 1), key=cost)


def row_pitch(array: Any) -> int:
    """Elements from row to row of a matrix, or of gates and ups; 0 of none, and of one row."""
    axes = 0 if array is None else len(array.shape)
    return {2: pitch, 4: halves_pitch}[axes](array) if axes > 1 else 0


def lines_of(form: MmaForm, m: int) -> int:
    """Lines of column sums that the blocks leave: of each warp's 64 rows."""
    return cover(m, form.rows) * (form.rows // SIDE)


def space_for(form: MmaForm, m: int, n: int, k: int, blocks: int = MULTIPROCESSORS) -> int:
    """Bytes of workspace that a product needs; 0 if none."""
    if form.sums != "no":
        return HEADER + lines_of(form, m) * n * 4
    pieces = pieces_of(form, m, n, k, blocks)
    return pieces * m * cover(n, 4) * 16 if pieces > 1 else 0


class Given(TypedDict, total=False):
    """What a product may be given besides A, B, C and aux.

    second: uint16 (m, n), where the form stores one; it may be aux; of swiglu gates and ups (m,
    2 n), of swiglu backward their gradients (1, 2, m, n). sums: float32 (n,), where it
    sums columns. turn: of rope. space: `space_for` bytes, as they are. blocks: that run at once,
    multiprocessors times form.resident. make: makes a form's kernel, `mma_kernel` by default.
    """

    second: Any
    sums: Any
    turn: Turning | None
    space: Any
    blocks: int
    make: Callable[[Any], Kernel]


def mma_product(
    form: MmaForm, a: Any, b: Any, c: Any, aux: Any = None, **given: Unpack[Given]
) -> list[Launch]:
    """The launches, in order, of C = op(A) op(B) with the form's epilogue.

    a, b (2-d) uint16, bf16's bits; c (m, n) uint16 or float32; aux: the bias (n,), or the (m, n)
    that sums meet, uint16, or gates and ups (1, 2, m, n), halves of rows.
    """
    second, sums, space = (given.get(name) for name in ("second", "sums", "space"))
    turn = given.get("turn")
    blocks, make = given.get("blocks", MULTIPROCESSORS), given.get("make", mma_kernel)
    m, n, k = fit(form, a, b, c, aux)
    fit_more(form, m, n, second, sums)
    expect_turning(turn, m, n, form.way.turn)
    pieces, need = pieces_of(form, m, n, k, blocks), space_for(form, m, n, k, blocks)
    require_space(space, need, (m, n, k))
    grid = cover(m, form.rows) * cover(n, form.of_c), pieces
    sizes = m, n, k, pitch(a), pitch(b)
    if pieces > 1:
        wide = cover(n, 4) * 4
        parts, add = make(replace(form, epilogue="store")), form.epilogue == "add"
        last = (space, c, m, n, wide, pitch(c), pieces)
        return [
            Launch(parts, grid, (a, b, space, 0, 0, 0, *sizes, wide, 0, 0, *Turning())),
            Launch(sum_kernel(add), (m, cover(n, 4 * SUM_THREADS)), last),
        ]
    extra = [0 if x is None else x for x in (aux, second)] + [space if need else 0]
    pitches = row_pitch(aux), row_pitch(second)
    kernel = make(form if form.sums == "no" else replace(form, sums="store"))
    args = a, b, c, *extra, *sizes, pitch(c), *pitches, *(turn or Turning())
    launches = [Launch(kernel, grid, args)]
    if form.sums != "no":
        args = space, lines_of(form, m), n, sums
        launches.append(Launch(columns_kernel(form.sums == "add"), (cover(n, WIDE),), args))
    return launches


def choose_mma(
    layout: str, epilogue: str = "store", out: str = "bf16", second: bool = False,
    sums: str = "no", capability: tuple[int, int] = (8, 0),
) -> MmaForm:  # fmt: skip
    """The form for a product on a card of this capability; UserError below 8.0."""
    if tuple(capability) < (8, 0):
        raise UserError(f"bf16 products need compute capability 8.0 or newer, not {capability}")
    form = MmaForm(layout, epilogue, out, second, sums)
    return form if form.shared <= limit(SHARED, capability) else replace(form, columns=128)
