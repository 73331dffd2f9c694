# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-mma-host
"""Products by mma.sync, as launches: how many pieces, how much space, which tile for which card."""

from dataclasses import replace
from typing import Any

from nanoeuler.engines.gpu.gemm.mma_form import DEPTH, MmaForm, fit, pitch, require_space
from nanoeuler.engines.gpu.gemm.mma_kernel import SUM_THREADS, mma_kernel, sum_kernel
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS, SHARED, limit
from nanoeuler.engines.gpu.lang.kernel import Launch, cover
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
    tiles, k_blocks = cover(m, form.rows) * cover(n, form.columns), cover(k, DEPTH)
    moved = BYTES * blocks / form.resident * form.columns / 256  # meanwhile, by all of memory

    def cost(pieces: int) -> float:
        waves = cover(tiles * pieces, blocks)
        summed = pieces * m * n * 8 / moved if pieces > 1 else 0
        return waves * (cover(k_blocks, pieces) + TILE_COST) + summed

    return min(range(1, min(MOST_PIECES, k_blocks) + 1), key=cost)


def space_for(form: MmaForm, m: int, n: int, k: int, blocks: int = MULTIPROCESSORS) -> int:
    """Bytes of workspace that a product needs; 0 if none."""
    pieces = pieces_of(form, m, n, k, blocks)
    return pieces * m * cover(n, 4) * 16 if pieces > 1 else 0


def mma_product(
    form: MmaForm, a: Any, b: Any, c: Any, aux: Any = None, *,
    space: Any = None, blocks: int = MULTIPROCESSORS,
) -> list[Launch]:  # fmt: skip
    """The launches, in order, of C = op(A) op(B) with the form's epilogue.

    a, b (2-d) uint16, bf16's bits; c (m, n) uint16 or float32; aux: the bias (n,) or the residual
    (m, n), uint16. space: `space_for` bytes, as they are; needed where that is not 0. blocks: how
    many run at once, multiprocessors times form.resident.
    """
    m, n, k = fit(form, a, b, c, aux)
    pieces = pieces_of(form, m, n, k, blocks)
    grid = cover(m, form.rows) * cover(n, form.columns), pieces
    of_aux = pitch(aux) if form.epilogue == "residual" else 0
    sizes = m, n, k, pitch(a), pitch(b)
    extra = 0 if aux is None else aux
    if pieces == 1:
        return [Launch(mma_kernel(form), grid, (a, b, c, extra, *sizes, pitch(c), of_aux))]
    require_space(space, space_for(form, m, n, k, blocks), (m, n, k))
    wide = cover(n, 4) * 4
    parts = mma_kernel(replace(form, epilogue="store"))
    sums = sum_kernel(form.epilogue == "add")
    return [
        Launch(parts, grid, (a, b, space, 0, *sizes, wide, 0)),
        Launch(sums, (m, cover(n, 4 * SUM_THREADS)), (space, c, m, n, wide, pitch(c), pieces)),
    ]


def choose_mma(
    layout: str, m: int, n: int, k: int, epilogue: str = "store", out: str = "bf16",
    capability: tuple[int, int] = (8, 0),
) -> MmaForm:  # fmt: skip
    """The form for a product on a card of this capability; UserError below 8.0."""
    if tuple(capability) < (8, 0):
        raise UserError(f"bf16 products need compute capability 8.0 or newer, not {capability}")
    room = limit(SHARED, capability)
    form = MmaForm(layout, epilogue, out)
    return form if form.shared <= room else replace(form, columns=128)
