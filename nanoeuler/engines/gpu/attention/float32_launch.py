# Made from book/12c-attention-in-pieces.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-pieces-plan
"""Launches of causal attention of float32 arrays on tensor cores: what fits, kernels, grids.

Arrays as in flash_layout.py, but float32; D = 32, 64 or 128. pieces: 2, each product to 2^-15, or
3, as exact as float32. Left out: running the launches (device.py, paper).
"""

from typing import Any

from nanoeuler.engines.gpu.attention.documents import Documents, expect_documents
from nanoeuler.engines.gpu.attention.float32_backward import dkdv_kernel, dq_kernel
from nanoeuler.engines.gpu.attention.float32_forward import forward_kernel
from nanoeuler.engines.gpu.attention.float32_parts import Form
from nanoeuler.engines.gpu.attention.layout import (
    BACKWARD_SHARE,
    FORWARD_SHARE,
    expect_lines,
    grid_of,
    scales,
    shared_shape,
)
from nanoeuler.engines.gpu.attention.mma_launch import WIDTHS, with_steps
from nanoeuler.engines.gpu.lang.kernel import Launch, cover
from nanoeuler.errors import UserError

# By head width and pieces. At most 99 KiB of shared memory: what cards of 8.6 and 8.9 give a block.
FORWARD = {
    (32, 2): Form(32, 2, 4, 64, 32, 3), (32, 3): Form(32, 3, 4, 64, 32, 3),
    (64, 2): Form(64, 2, 4, 64, 64, 3), (64, 3): Form(64, 3, 4, 64, 64, 2),
    (128, 2): Form(128, 2, 4, 64, 64, 2), (128, 3): Form(128, 3, 4, 32, 64, 2),
}  # fmt: skip
DQ = {
    (32, 2): Form(32, 2, 4, 64, 32, 3), (32, 3): Form(32, 3, 4, 64, 32, 3),
    (64, 2): Form(64, 2, 4, 64, 64, 3), (64, 3): Form(64, 3, 4, 64, 64, 2),
    (128, 2): Form(128, 2, 4, 32, 64, 2), (128, 3): Form(128, 3, 2, 32, 64, 2),
}  # fmt: skip
DKDV = {
    (32, 2): Form(32, 2, 4, 64, 32, 2), (32, 3): Form(32, 3, 4, 64, 32, 2),
    (64, 2): Form(64, 2, 4, 64, 64, 2), (64, 3): Form(64, 3, 4, 64, 64, 2),
    (128, 2): Form(128, 2, 4, 32, 64, 2), (128, 3): Form(128, 3, 2, 32, 64, 2),
}  # fmt: skip


def form_of(forms: dict[tuple[int, int], Form], D: int, pieces: int) -> Form:
    """The form for heads of D columns; UserError where there is none."""
    if (D, pieces) not in forms:
        raise UserError(f"attention of float32 is made of 2 or 3 pieces, not {pieces}")
    return forms[D, pieces]


def forward_launch(
    q: Any, k: Any, v: Any, o: Any, lse: Any, pieces: int = 2, documents: Documents | None = None
) -> Launch:
    """o = causal attention of q, k, v; lse = log2 of each row's sum of exponentials.

    lse of rows from T on is 1e30. Every o and lse is written. documents: within which each
    position sees others.
    """
    B, H, G, T, D = shared_shape({"q": q, "o": o}, {"k": k, "v": v}, WIDTHS, "float32")
    expect_lines(B, H, T, lse=lse)
    form = form_of(FORWARD, D, pieces)
    arrays = with_steps(4, q=q, k=k, v=v, o=o)
    grid = grid_of(B * H, cover(T, 16 * form.warps), 8 * T * D, FORWARD_SHARE)
    kernel = forward_kernel(form._replace(limited=documents is not None))
    first = expect_documents(documents, B, T)[0]
    return Launch(kernel, grid, (*arrays, lse, T, H, H // G, scales(D)[0], first))


def backward_launches(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, delta: Any, dq: Any, dk: Any, dv: Any,
    pieces: int = 2, documents: Documents | None = None,
) -> tuple[Launch, Launch]:  # fmt: skip
    """dq, dk, dv from do and what `forward_launch` had and gave; to be run in this order.

    delta is working memory. Every dq, dk, dv and delta is written.
    """
    queries, keys = {"q": q, "o": o, "do": do, "dq": dq}, {"k": k, "v": v, "dk": dk, "dv": dv}
    B, H, G, T, D = shared_shape(queries, keys, WIDTHS, "float32")
    expect_lines(B, H, T, lse=lse, delta=delta)
    limited = documents is not None
    forms = form_of(DQ, D, pieces), form_of(DKDV, D, pieces)
    of_dq, of_dkdv = (form._replace(limited=limited) for form in forms)
    rest, lines = (lse, delta, T, H, H // G, *scales(D)), expect_documents(documents, B, T)
    grid = grid_of(B * H, cover(T, 16 * of_dq.warps), 8 * T * D, BACKWARD_SHARE)
    arrays = with_steps(4, q=q, k=k, v=v, o=o, do=do, dq=dq)
    first = Launch(dq_kernel(of_dq), grid, (*arrays, *rest, lines[0]))
    grid = grid_of(B * G, cover(T, 16 * of_dkdv.warps), 8 * T * D * (H // G), BACKWARD_SHARE)
    arrays = with_steps(4, q=q, k=k, v=v, do=do, dk=dk, dv=dv)
    return first, Launch(dkdv_kernel(of_dkdv), grid, (*arrays, *rest, lines[1]))
