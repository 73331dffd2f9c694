# Made from book/08a-flash-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-mma-plan
"""Launches of causal attention by mma.sync: what fits, which kernel, which grid.

Arrays as in flash_layout.py; D = 32, 64 or 128. Left out: running the launches (device.py, paper),
and which family of kernels a card gets (attention.py).
"""

from typing import Any

from nanoeuler.engines.gpu.flash_layout import (
    at_a_time,
    expect_lines,
    scales,
    shared_shape,
)
from nanoeuler.engines.gpu.flash_mma import QUERIES, Form, forward_kernel
from nanoeuler.engines.gpu.gemm_plan import cover
from nanoeuler.engines.gpu.kernel import Launch
from nanoeuler.errors import UserError

WIDTHS = 32, 64, 128
# Bytes of what all heads that are worked on at a time stream: they should stay in the L2 cache.
FORWARD_SHARE, BACKWARD_SHARE = 32 << 20, 16 << 20
FORMS = {32: Form(32, 2, 2, True), 64: Form(64, 2, 2, True), 128: Form(128, 2, 2, False)}


def with_steps(name: str, array: Any) -> tuple[Any, int, int, int]:
    """An array's address and the bytes from sequence to sequence, head to head, row to row."""
    if array.strides[3] != 2 or any(step % 16 for step in array.strides[:3]):
        raise UserError(
            f"attention's {name} has dense rows, and all else in steps of 16 bytes: pad the rows, "
            f"strides are {tuple(array.strides)}"
        )
    return array, *map(int, array.strides[:3])


def forward_launch(q: Any, k: Any, v: Any, o: Any, lse: Any, form: Form | None = None) -> Launch:
    """o = causal attention of q, k, v; lse = log2 of each row's sum of exponentials.

    lse of rows from T on is 1e30. Every o and lse is written.
    """
    B, H, G, T, D = shared_shape({"q": q, "o": o}, {"k": k, "v": v}, WIDTHS)
    expect_lines(B, H, T, lse=lse)
    together = at_a_time(B * H, 4 * T * D, FORWARD_SHARE)
    arrays = [x for n, array in zip("qkvo", (q, k, v, o), strict=True) for x in with_steps(n, array)]
    grid = together, cover(T, QUERIES), B * H // together
    kernel = forward_kernel(form or FORMS[D])
    return Launch(kernel, grid, (*arrays, lse, T, H, H // G, scales(D)[0]))
