# Made from book/12a-flash-on-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-tensor-plan
"""Launches of causal attention on tensor cores: what fits, which kernel, which grid.

Arrays as in layout.py, D = 64 or 128. Left out: running the launches (device.py, the emulator), and
which family of kernels a card gets (choice.py).
"""

from typing import Any, NamedTuple

from nanoeuler.engines.gpu.attention import layout, wgmma_backward, wgmma_forward
from nanoeuler.engines.gpu.attention.documents import Documents, expect_documents
from nanoeuler.engines.gpu.attention.wgmma_parts import MOST
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS
from nanoeuler.engines.gpu.lang.kernel import Launch, Map, cover
from nanoeuler.engines.gpu.tile.rope import Turning, expect_turning
from nanoeuler.errors import UserError

WIDTHS = 64, 128  # head widths: whole panels of the widest swizzle, and accumulators that fit


def _box(array: Any, rows: int) -> Map:
    return Map(array, (1, 1, rows, 64))


def _countable(heads: int, T: int) -> None:
    if heads * cover(T, 64) >= MOST:  # the kernels divide numbers of heads and of tiles
        raise UserError(
            f"attention of {heads} heads of {T} positions is too much for one launch: "
            "split the batch"
        )


def forward_launch(
    q: Any, k: Any, v: Any, o: Any, lse: Any, documents: Documents | None = None,
    places: int = wgmma_forward.RESIDENT * MULTIPROCESSORS,
) -> Launch:  # fmt: skip
    """o = causal attention of q, k, v; lse = log2 of each row's sum of exponentials.

    lse of rows from T on is 1e30. Every o and lse is written. places: how many blocks of width
    64 the card runs at once. documents: a position sees only positions of its own document.
    """
    B, H, G, T, D = layout.shared_shape({"q": q, "o": o}, {"k": k, "v": v}, WIDTHS)
    layout.expect_lines(B, H, T, lse=lse)
    _countable(B * H, T)
    first, limited = expect_documents(documents, B, T)[0], documents is not None
    maps = _box(q, 64), _box(k, wgmma_forward.KEYS), _box(v, wgmma_forward.KEYS), _box(o, 64)
    tiles, scale = cover(T, wgmma_forward.QUERIES), layout.scales(D)[0]
    if D == 128:
        grid = layout.grid_of(B * H, tiles, 4 * T * D, layout.FORWARD_SHARE)
        return Launch(
            wgmma_forward.wide_kernel(limited), grid, (*maps, lse, T, H, H // G, scale, first)
        )
    deal = deal_tiles(B * H, tiles, places)
    by = (wgmma_forward.reciprocal_of(n, deal.links) for n in (deal.of_head, H, H // G))
    args = *maps, lse, T, H, tiles, *deal[1:], scale, *by, first
    return Launch(wgmma_forward.narrow_kernel(limited), (deal.blocks,), args)


class Deal(NamedTuple):
    """How tiles of queries are dealt: how many blocks; links of a head; all links."""

    blocks: int
    of_head: int
    links: int


def deal_tiles(heads: int, tiles: int, places: int) -> Deal:
    """A long tile and a short one to a link, or each alone if all of them find a place."""
    of_head = tiles if heads * tiles <= places else cover(tiles, 2)
    links = heads * of_head
    return Deal(min(links, places), of_head, links)


def warpgroups(most: int, T: int, heads: int, multiprocessors: int) -> int:
    """How many warpgroups share a block: `most`, or one, when that leaves multiprocessors idle."""
    return most if cover(T, 64 * most) * heads >= multiprocessors else 1


def backward_launches(
    a: layout.Backward, documents: Documents | None = None, turn: Turning | None = None,
    multiprocessors: int = MULTIPROCESSORS,
) -> tuple[Launch, Launch]:  # fmt: skip
    """dq, dk, dv from do and what `forward_launch` had and gave; to be run in this order.

    delta is working memory. Every dq, dk, dv and delta is written. do and o are laid out alike.
    turn: RoPE's tables, if q and k were rotated; dq and dk are then those before the rotation.
    """
    B, H, G, T, D = layout.backward_shape(a, WIDTHS)
    do, q, k, v, o, lse, delta, dq, dk, dv = a
    _countable(B * H, T)
    if o.strides != do.strides:
        came = f"{o.strides} and {do.strides}"
        raise UserError(f"attention's o and do lie alike in memory, but their strides are {came}")
    expect_turning(turn, T, (H + G) * D, D if turn else 0)
    if turn and turn[2:] != (T, (H + G) * D):
        came = f"{turn.columns // D} heads at {turn.T} positions"
        raise UserError(f"attention undoes RoPE in all {H + G} heads at {T} positions, not {came}")
    rest = T, H, H // G, *layout.scales(D), *(turn[:2] if turn else (0, 0))
    form = wgmma_backward.Form(D, 1, turn is not None, documents is not None)
    lines = expect_documents(documents, B, T)
    groups = warpgroups(2 if D == 64 else 3, T, B * H, multiprocessors)
    maps = [_box(array, 64) for array in (q, k, v, do, dq)]
    grid = layout.grid_of(B * H, cover(T, 64 * groups), 4 * T * D, layout.BACKWARD_SHARE)
    args = *maps, o, do, *o.strides[:3], lse, delta, *rest, lines[0]
    first = Launch(wgmma_backward.dq_kernel(form._replace(groups=groups)), grid, args)
    groups, queries = warpgroups(2, T, B * G, multiprocessors), wgmma_backward.step_queries(D)
    maps = [_box(q, queries), _box(k, 64), _box(v, 64), _box(do, queries), _box(dk, 64)]
    grid = layout.grid_of(B * G, cover(T, 64 * groups), 4 * T * D * (H // G), layout.BACKWARD_SHARE)
    args = *maps, _box(dv, 64), lse, delta, *rest, lines[1]
    return first, Launch(wgmma_backward.dkdv_kernel(form._replace(groups=groups)), grid, args)
