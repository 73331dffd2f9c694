# Made from book/12a-flash-on-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-choice
"""Causal attention on whatever tensor cores a card has: the choice between two families.

Arrays as in layout.py. Left out: cards before 8.0, which none of our kernels run on.
"""

from types import ModuleType
from typing import Any

from nanoeuler.engines.gpu.attention import mma_launch, wgmma_launch
from nanoeuler.engines.gpu.attention.documents import Documents
from nanoeuler.engines.gpu.attention.layout import Backward
from nanoeuler.engines.gpu.gemm.choice import HOPPER
from nanoeuler.engines.gpu.lang.kernel import Launch
from nanoeuler.engines.gpu.tile.rope import Turning
from nanoeuler.errors import UserError


def family(capability: tuple, D: int) -> ModuleType:
    """The module that plans launches for heads of width D on a card of this capability."""
    capability = tuple(capability)[:2]
    if capability < mma_launch.EVERY_CARD:
        needs, has = (".".join(map(str, x)) for x in (mma_launch.EVERY_CARD, capability))
        raise UserError(
            f"attention on tensor cores is for GPUs of capability {needs} or newer, and this one "
            f"has {has}: use the engine of the CPU"
        )
    return wgmma_launch if capability == HOPPER and D in wgmma_launch.WIDTHS else mma_launch


def forward_launch(
    q: Any, k: Any, v: Any, o: Any, lse: Any, capability: tuple, documents: Documents | None = None
) -> Launch:
    """o and lse of q, k, v: see `forward_launch` of either family."""
    return family(capability, q.shape[-1]).forward_launch(q, k, v, o, lse, documents)


def backward_launches(
    a: Backward, capability: tuple, turn: Turning | None = None, documents: Documents | None = None
) -> tuple[Launch, Launch]:
    """delta, dq, dk, dv, to be run in this order: see `backward_launches` of either family."""
    plan = family(capability, a.q.shape[-1])
    if turn is None:
        return plan.backward_launches(a, documents)
    if plan is not wgmma_launch:
        raise UserError(
            "attention undoes RoPE in gradients on Hopper alone, at head widths 64 and 128: "
            "leave out `turn`"
        )
    return wgmma_launch.backward_launches(a, documents, turn)
