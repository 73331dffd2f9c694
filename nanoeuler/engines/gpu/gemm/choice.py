# Made from book/11b-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-any
"""A product for the card that is there: by wgmma on Hopper, by mma.sync on others since 8.0."""

from typing import Any, TypedDict, Unpack

import numpy as np

from nanoeuler.engines.gpu.gemm.mma_launch import Given as Beside
from nanoeuler.engines.gpu.gemm.mma_launch import choose_mma, mma_product, space_for
from nanoeuler.engines.gpu.gemm.wgmma_launch import Given, choose, product, space_bytes
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS
from nanoeuler.engines.gpu.lang.kernel import Launch

HOPPER = 9, 0  # the one capability that has wgmma


class Ends(Given, total=False):
    """What a product may be given, and how it ends: the epilogue, "store" if none is named, and
    whether sums are added to what is there. space: see `space_on`."""

    epilogue: str
    add_sums: bool


def product_on(
    capability: tuple[int, int], layout: str, a: Any, b: Any, c: Any, aux: Any = None,
    **ends: Unpack[Ends],
) -> list[Launch]:  # fmt: skip
    """The launches of C = op(A) op(B) with an epilogue, on a card of this compute capability.

    a, b, c, aux: as `wgmma_launch.Operands` has them, C float32 or bf16 by its dtype. UserError
    below 8.0, and for what `mma.sync` has not got.
    """
    epilogue, add = ends.pop("epilogue", "store"), ends.pop("add_sums", False)
    m, n, k = *c.shape, a.shape[layout[0] == "N"]
    out = "float32" if str(c.dtype) == "float32" else "bf16"
    second, sums = ends.get("second"), ends.get("sums")
    summed = "no" if sums is None else "add" if add else "store"
    kind = epilogue, out, second is not None, summed
    if tuple(capability) == HOPPER:
        return product(choose(layout, (m, n, k), *kind), a, b, c, aux, **ends)
    form = choose_mma(layout, *kind, capability)
    blocks, space = ends.get("blocks", MULTIPROCESSORS), ends.get("space")
    need = space_for(form, m, n, k, blocks)
    if need and space is None:
        space = ends.get("place", np.asarray)(np.empty(need, np.uint8))
    given: Beside = {"second": second, "sums": sums, "turn": ends.get("turn"), "blocks": blocks}
    given["space"] = space if need else None
    return mma_product(form, a, b, c, aux, **given)


class Kind(TypedDict, total=False):
    """What decides on a product's workspace besides its sizes: the epilogue, C's dtype, whether
    there is a second array, whether columns are summed, how many blocks run at once."""

    epilogue: str
    out: str
    second: bool
    summed: bool
    blocks: int


def space_on(
    capability: tuple[int, int], layout: str, m: int, n: int, k: int, **kind: Unpack[Kind]
) -> int:
    """Bytes of workspace that `product_on` wants for a product; 0: none.

    Products that follow each other share the largest, whose first word is 0 before the first.
    """
    ends = kind.get("epilogue", "store"), kind.get("out", "bf16"), kind.get("second", False)
    sums, blocks = "store" if kind.get("summed") else "no", kind.get("blocks", MULTIPROCESSORS)
    if tuple(capability) == HOPPER:
        return space_bytes(choose(layout, (m, n, k), *ends, sums), m, n, k, blocks)
    return space_for(choose_mma(layout, *ends, sums, capability), m, n, k, blocks)
