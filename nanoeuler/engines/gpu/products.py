# Made from book/07d-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-any
"""A product for the card that is there: by wgmma on Hopper, by mma.sync on others since 8.0."""

from typing import Any

import numpy as np

from nanoeuler.engines.gpu.gemm import choose, product
from nanoeuler.engines.gpu.gemm_mma_plan import choose_mma, mma_product, space_for
from nanoeuler.engines.gpu.kernel import Launch

HOPPER = 9, 0  # the capability that gemm_wgmma is for, and no other


def product_on(
    capability: tuple[int, int], layout: str, a: Any, b: Any, c: Any, aux: Any = None, *,
    epilogue: str = "store", blocks: int = 132, place: Any = lambda array: array,
) -> list[Launch]:  # fmt: skip
    """The launches of C = op(A) op(B) with an epilogue, on a card of this compute capability.

    a, b, c, aux: as `mma_product` has them, C float32 or bf16 by its dtype. blocks: the card's
    multiprocessors. place: puts a NumPy array where the card can read it. UserError below 8.0, and
    for epilogues that `mma.sync` has not got.
    """
    (m, n), out = c.shape, "float32" if str(c.dtype) == "float32" else "bf16"
    k = a.shape[1] if layout[0] == "N" else a.shape[0]
    if tuple(capability) == HOPPER:
        form = choose(layout, m, n, k, epilogue, out)
        return product(form, a, b, c, aux, place=place, blocks=blocks)
    form = choose_mma(layout, m, n, k, epilogue, out, capability)
    need = space_for(form, m, n, k, blocks)
    space = place(np.empty(need, np.uint8)) if need else None
    return mma_product(form, a, b, c, aux, space=space, blocks=blocks)
