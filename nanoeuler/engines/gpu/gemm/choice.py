# Made from book/11d-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-any
"""A product for the card that is there: by wgmma on Hopper, by mma.sync on others since 8.0."""

from typing import Any

import numpy as np

from nanoeuler.engines.gpu.gemm.mma_launch import choose_mma, mma_product, space_for
from nanoeuler.engines.gpu.gemm.wgmma_launch import choose, product, space_bytes
from nanoeuler.engines.gpu.lang.kernel import Launch
from nanoeuler.errors import UserError

HOPPER = 9, 0  # the one capability that has wgmma


def product_on(
    capability: tuple[int, int], layout: str, a: Any, b: Any, c: Any, aux: Any = None, *,
    epilogue: str = "store", second: Any = None, sums: Any = None, add_sums: bool = False,
    turn: Any = None, space: Any = None, blocks: int = 132, place: Any = lambda array: array,
) -> list[Launch]:  # fmt: skip
    """The launches of C = op(A) op(B) with an epilogue, on a card of this compute capability.

    a, b, c, aux, second, sums, turn: as `wgmma_launch.Operands` has them, C float32 or bf16 by its
    dtype; sums are stored, or added to. space: see `space_on`; made by `place` where it is needed
    and does not come. blocks: the card's multiprocessors. place: puts a NumPy array where the card
    can read it. UserError below 8.0, and for what `mma.sync` has not got.
    """
    (m, n), out = c.shape, "float32" if str(c.dtype) == "float32" else "bf16"
    k = a.shape[1] if layout[0] == "N" else a.shape[0]
    if tuple(capability) == HOPPER:
        summed = "no" if sums is None else "add" if add_sums else "store"
        form = choose(layout, m, n, k, epilogue, out, second is not None, summed)
        more = {"second": second, "sums": sums, "turn": turn, "space": space}
        return product(form, a, b, c, aux, place=place, blocks=blocks, **more)
    if second is not None or sums is not None or turn is not None:
        raise UserError(f"a product by mma.sync stores C alone, on a GPU of {capability}")
    form = choose_mma(layout, m, n, k, epilogue, out, capability)
    need = space_for(form, m, n, k, blocks)
    if need and space is None:
        space = place(np.empty(need, np.uint8))
    return mma_product(form, a, b, c, aux, space=space if need else None, blocks=blocks)


def space_on(
    capability: tuple[int, int], layout: str, m: int, n: int, k: int, *, epilogue: str = "store",
    out: str = "bf16", second: bool = False, summed: bool = False, blocks: int = 132,
) -> int:  # fmt: skip
    """Bytes of workspace that `product_on` wants for a product; 0: none.

    Products that follow each other share the largest, whose first word is 0 before the first.
    """
    if tuple(capability) == HOPPER:
        sums = "store" if summed else "no"
        form = choose(layout, m, n, k, epilogue, out, second, sums)
        return space_bytes(form, m, n, k, blocks)
    return space_for(choose_mma(layout, m, n, k, epilogue, out, capability), m, n, k, blocks)
