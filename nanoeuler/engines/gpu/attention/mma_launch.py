# Made from book/l-attention-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-mma-plan
"""Launches of causal attention by mma.sync: what fits, which kernel, which grid.

Arrays as in layout.py; D = 32, 64 or 128. Left out: running the launches (device.py, the emulator),
and which family of kernels a card gets (choice.py).
"""

from typing import Any

from nanoeuler.engines.gpu.attention import layout
from nanoeuler.engines.gpu.attention.documents import Documents, expect_documents
from nanoeuler.engines.gpu.attention.mma_backward import dkdv_kernel, dq_kernel
from nanoeuler.engines.gpu.attention.mma_forward import forward_kernel, queries_of
from nanoeuler.engines.gpu.attention.mma_parts import EVERY_CARD as EVERY_CARD
from nanoeuler.engines.gpu.attention.operands import Form
from nanoeuler.engines.gpu.lang.kernel import Launch, cover
from nanoeuler.errors import UserError

WIDTHS = 32, 64, 128  # of heads: a row is 64, 128 or 256 bytes, which `swizzle` knows to swap
# Chosen by measurement: the log book's table of attempts.
FORMS = {
    32: Form(32, 4, 64, 2, 2), 64: Form(64, 4, 64, 2, 2), 128: Form(128, 4, 64, 2, 2, park=True)
}  # fmt: skip
DQ = {32: Form(32, 4, 64, 2, 3), 64: Form(64, 4, 64, 2, 3), 128: Form(128, 4, 64, 2, 2)}  # ditto
DKDV = DQ  # the same steps and resident blocks serve both
Forms = dict[int, Form]  # by head width
KINDS = {2: "uint16", 4: "float32"}  # dtypes of arrays, by the size of an element


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
    q: Any, k: Any, v: Any, o: Any, lse: Any, documents: Documents | None = None,
    forms: Forms = FORMS,
) -> Launch:  # fmt: skip
    """o = causal attention of q, k, v; lse = log2 of each row's sum of exponentials.

    lse of rows from T on is 1e30. Every o and lse is written. documents: within which each
    position sees others. forms: all of one kind of operands, which says what arrays are made of.
    """
    size = forms[32].operands.size
    B, H, G, T, D = layout.shared_shape({"q": q, "o": o}, {"k": k, "v": v}, WIDTHS, KINDS[size])
    layout.expect_lines(B, H, T, lse=lse)
    arrays, first = with_steps(size, q=q, k=k, v=v, o=o), expect_documents(documents, B, T)[0]
    form = forms[D]._replace(limited=documents is not None)
    grid = layout.grid_of(B * H, cover(T, queries_of(form)), 2 * size * T * D, layout.FORWARD_SHARE)
    args = *arrays, lse, T, H, H // G, layout.scales(D)[0], first
    return Launch(forward_kernel(form), grid, args)


def backward_launches(
    a: layout.Backward, documents: Documents | None = None, forms: tuple[Forms, Forms] = (DQ, DKDV)
) -> tuple[Launch, Launch]:
    """dq, dk, dv from do and what `forward_launch` had and gave; to be run in this order.

    delta is working memory. Every dq, dk, dv and delta is written. forms: of the two kernels.
    """
    size = forms[0][32].operands.size
    B, H, G, T, D = layout.backward_shape(a, WIDTHS, KINDS[size])
    limited, lines = documents is not None, expect_documents(documents, B, T)
    dq, dkdv = (each[D]._replace(limited=limited) for each in forms)
    rest = a.lse, a.delta, T, H, H // G, *layout.scales(D)
    grid = layout.grid_of(B * H, cover(T, 16 * dq.warps), 2 * size * T * D, layout.BACKWARD_SHARE)
    arrays = with_steps(size, q=a.q, k=a.k, v=a.v, o=a.o, do=a.do, dq=a.dq)
    first = Launch(dq_kernel(dq), grid, (*arrays, *rest, lines[0]))
    streamed = 2 * size * T * D * (H // G)
    grid = layout.grid_of(B * G, cover(T, 16 * dkdv.warps), streamed, layout.BACKWARD_SHARE)
    arrays = with_steps(size, q=a.q, k=a.k, v=a.v, do=a.do, dk=a.dk, dv=a.dv)
    return first, Launch(dkdv_kernel(dkdv), grid, (*arrays, *rest, lines[1]))
