# Made from book/12a-flash-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-mma-plan
"""Launches of causal attention by mma.sync: what fits, which kernel, which grid.

Arrays as in flash_layout.py; D = 32, 64 or 128. Left out: running the launches (device.py, paper),
and which family of kernels a card gets (attention.py).
"""

from typing import Any

from nanoeuler.engines.gpu.attention.documents import Documents, expect_documents
from nanoeuler.engines.gpu.attention.layout import (
    BACKWARD_SHARE,
    FORWARD_SHARE,
    expect_lines,
    grid_of,
    scales,
    shared_shape,
)
from nanoeuler.engines.gpu.attention.mma_backward import BackForm, dkdv_kernel, dq_kernel
from nanoeuler.engines.gpu.attention.mma_forward import QUERIES, Form, forward_kernel
from nanoeuler.engines.gpu.attention.mma_parts import EVERY_CARD as EVERY_CARD
from nanoeuler.engines.gpu.lang.kernel import Launch, cover
from nanoeuler.errors import UserError

WIDTHS = 32, 64, 128  # of heads: a row is 64, 128 or 256 bytes, which `turn` knows to swap
DQ = {
    32: BackForm(32, 4, 64, 2, 3), 64: BackForm(64, 4, 64, 2, 3), 128: BackForm(128, 4, 64, 2, 2)
}  # fmt: skip
DKDV = {
    32: BackForm(32, 4, 64, 2, 3), 64: BackForm(64, 4, 64, 2, 3), 128: BackForm(128, 4, 64, 2, 2)
}  # fmt: skip
FORMS = {32: Form(32, 2, 2), 64: Form(64, 2, 2), 128: Form(128, 2, 2, park=True)}


def with_steps(size: int, **arrays: Any) -> list[Any]:
    """Each array of elements of so many bytes, then the bytes from sequence to sequence, head to
    head, row to row.
    """
    made = []
    for name, array in arrays.items():
        steps = tuple(map(int, array.strides))
        if steps[3] != size or any(step % 16 for step in steps[:3]):
            raise UserError(
                f"attention's {name} has dense rows, and all else in steps of 16 bytes: pad the "
                f"rows, strides are {steps}"
            )
        made += [array, *steps[:3]]
    return made


def forward_launch(
    q: Any, k: Any, v: Any, o: Any, lse: Any, form: Form | None = None,
    documents: Documents | None = None,
) -> Launch:  # fmt: skip
    """o = causal attention of q, k, v; lse = log2 of each row's sum of exponentials.

    lse of rows from T on is 1e30. Every o and lse is written. documents: within which each
    position sees others.
    """
    B, H, G, T, D = shared_shape({"q": q, "o": o}, {"k": k, "v": v}, WIDTHS)
    expect_lines(B, H, T, lse=lse)
    arrays = with_steps(2, q=q, k=k, v=v, o=o)
    grid = grid_of(B * H, cover(T, QUERIES), 4 * T * D, FORWARD_SHARE)
    kernel = forward_kernel((form or FORMS[D])._replace(limited=documents is not None))
    first = expect_documents(documents, B, T)[0]
    return Launch(kernel, grid, (*arrays, lse, T, H, H // G, scales(D)[0], first))


def backward_launches(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, delta: Any, dq: Any, dk: Any, dv: Any,
    forms: tuple[BackForm, BackForm] | None = None, documents: Documents | None = None,
) -> tuple[Launch, Launch]:  # fmt: skip
    """dq, dk, dv from do and what `forward_launch` had and gave; to be run in this order.

    delta is working memory. Every dq, dk, dv and delta is written.
    """
    queries, keys = {"q": q, "o": o, "do": do, "dq": dq}, {"k": k, "v": v, "dk": dk, "dv": dv}
    B, H, G, T, D = shared_shape(queries, keys, WIDTHS)
    expect_lines(B, H, T, lse=lse, delta=delta)
    limited = documents is not None
    of_dq, of_dkdv = (form._replace(limited=limited) for form in forms or (DQ[D], DKDV[D]))
    rest, lines = (lse, delta, T, H, H // G, *scales(D)), expect_documents(documents, B, T)
    grid = grid_of(B * H, cover(T, 16 * of_dq.warps), 4 * T * D, BACKWARD_SHARE)
    arrays = with_steps(2, q=q, k=k, v=v, o=o, do=do, dq=dq)
    first = Launch(dq_kernel(of_dq), grid, (*arrays, *rest, lines[0]))
    grid = grid_of(B * G, cover(T, 16 * of_dkdv.warps), 4 * T * D * (H // G), BACKWARD_SHARE)
    arrays = with_steps(2, q=q, k=k, v=v, do=do, dk=dk, dv=dv)
    return first, Launch(dkdv_kernel(of_dkdv), grid, (*arrays, *rest, lines[1]))
