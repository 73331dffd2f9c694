# Made from book/m-float32-attention.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-pieces-plan
"""Launches of causal attention of float32 arrays on tensor cores.

Arrays as in layout.py, but float32; D = 32, 64 or 128. pieces: 2, each product to 2^-15, or 3, as
exact as float32. Left out: running the launches (device.py, the emulator).
"""

from typing import Any

from nanoeuler.engines.gpu.attention import mma_launch
from nanoeuler.engines.gpu.attention.documents import Documents
from nanoeuler.engines.gpu.attention.float32_operands import split
from nanoeuler.engines.gpu.attention.layout import Backward
from nanoeuler.engines.gpu.attention.mma_launch import Forms
from nanoeuler.engines.gpu.attention.operands import Form
from nanoeuler.engines.gpu.lang.kernel import Launch
from nanoeuler.errors import UserError


def forms_of(pieces: int, *rows: tuple[int, int, int, int, int]) -> Forms:
    """Forms of one kernel by head width: D, warps, rows of a step, columns, resident blocks."""
    return {
        D: Form(D, warps, step, 1, resident, split(pieces, columns))
        for D, warps, step, columns, resident in rows
    }


# By pieces. At most 99 KiB of shared memory: what cards of 8.6 and 8.9 give a block.
FORWARD = {
    2: forms_of(2, (32, 4, 64, 32, 3), (64, 4, 64, 64, 3), (128, 4, 64, 64, 2)),
    3: forms_of(3, (32, 4, 64, 32, 3), (64, 4, 64, 64, 2), (128, 4, 32, 64, 2)),
}
# The same, with two tiles of own rows.
DQ = {
    2: forms_of(2, (32, 4, 64, 32, 3), (64, 4, 64, 64, 3), (128, 4, 32, 64, 2)),
    3: forms_of(3, (32, 4, 64, 32, 3), (64, 4, 64, 64, 2), (128, 2, 32, 64, 2)),
}
# As those of dq, with registers for two outputs.
DKDV = {
    2: forms_of(2, (32, 4, 64, 32, 2), (64, 4, 64, 64, 2), (128, 4, 32, 64, 2)),
    3: forms_of(3, (32, 4, 64, 32, 2), (64, 4, 64, 64, 2), (128, 2, 32, 64, 2)),
}


def expect_pieces(pieces: int) -> None:
    """Refuse other numbers of bf16 than there are kernels for."""
    if pieces not in FORWARD:
        raise UserError(f"attention of float32 is made of 2 or 3 pieces, not {pieces}")


def forward_launch(
    q: Any, k: Any, v: Any, o: Any, lse: Any, pieces: int = 2, documents: Documents | None = None
) -> Launch:
    """The launch of o and lse of float32 q, k, v; UserError for `pieces` that no kernel has."""
    expect_pieces(pieces)
    return mma_launch.forward_launch(q, k, v, o, lse, documents, FORWARD[pieces])


def backward_launches(
    a: Backward, pieces: int = 2, documents: Documents | None = None
) -> tuple[Launch, Launch]:
    """The two launches of dq, dk and dv in float32, to be run in this order; UserError as above."""
    expect_pieces(pieces)
    return mma_launch.backward_launches(a, documents, (DQ[pieces], DKDV[pieces]))
