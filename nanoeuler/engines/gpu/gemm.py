# Made from book/07d-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-host
"""Products on tensor cores: C = op(A) op(B) of arrays, as launches. bf16 in, float32 sums.

Any m, n and k; rows are multiples of 16 bytes apart. Equal operands give equal bits, always.
Compute capability 9.0 (H100, H200). Left out: batches, and adding to a bf16 C.
"""

from typing import Any

import numpy as np

from nanoeuler.engines.gpu.gemm_form import HEADER, PIECE, REGISTERS, TILE_M, Form
from nanoeuler.engines.gpu.gemm_plan import (
    MULTIPROCESSORS,
    TILE_K,
    Plan,
    cover,
    split,
    tiles,
    whole,
)
from nanoeuler.engines.gpu.gemm_wgmma import gemm_kernel, sum_kernel
from nanoeuler.engines.gpu.kernel import Launch, Map
from nanoeuler.errors import UserError


def sizes(form: Form, a: Any, b: Any, c: Any, aux: Any = None) -> tuple[int, int, int]:
    """m, n and k of a product of 2-d arrays; UserError where something does not fit."""
    m, k = a.shape if form.layout[0] == "N" else a.shape[::-1]
    of_b = b.shape if form.layout[1] == "N" else b.shape[::-1]
    n = of_b[1]
    if of_b[0] != k or tuple(c.shape) != (m, n) or not min(m, n, k):
        raise UserError(f"{form.layout}: {a.shape} by {b.shape} does not give {c.shape}")
    kinds = [str(array.dtype) for array in (a, b, c)]
    wanted = ["uint16", "uint16", "float32" if form.out == "float32" else "uint16"]
    if kinds != wanted:
        raise UserError(f"A, B and C are {', '.join(kinds)}; expected {', '.join(wanted)}")
    shape = {"residual": (m, n), "bias": (n,), "bias and gelu": (n,)}.get(form.epilogue)
    if shape != (None if aux is None else tuple(aux.shape)):
        raise UserError(f"{form.epilogue} takes {shape}, not {getattr(aux, 'shape', None)}")
    if "bias" in form.epilogue and n % 2:
        raise UserError(f"columns with a bias come in pairs, not {n}: pad W by a row of zeros")
    if cover(k, TILE_K) >= 1 << 15:
        raise UserError(f"k is at most {(1 << 15) * TILE_K - TILE_K}, not {k}")
    return m, n, k


def plan(
    form: Form, m: int, n: int, k: int, blocks: int = MULTIPROCESSORS, cut: str = "best"
) -> Plan:
    """Who multiplies what on a machine with room for `blocks` blocks; cut: `gemm_plan.split`."""
    order = tiles(m, n, TILE_M * form.cluster, form.columns)
    clusters, k_blocks = blocks // form.cluster, cover(k, TILE_K)
    if form.pieces == "no":
        return whole(order, k_blocks, clusters)
    return split(order, k_blocks, clusters, form.cluster, REGISTERS // form.strip, cut)


def maps(form: Form, a: Any, b: Any, c: Any) -> tuple[Map, Map, Map]:
    """A, B and C as the copy engine sees them."""
    rows_b = form.columns // form.cluster
    return (
        Map(a, (64, 64) if form.layout[0] == "T" else (TILE_M, TILE_K)),
        Map(b, (64, 64) if form.layout[1] == "N" else (rows_b, TILE_K)),
        Map(c, (64, 32) if form.out == "float32" else (64, 64)),
    )


def space_for(form: Form, who: Plan) -> int:
    """Bytes that the pieces of a plan need."""
    return HEADER + who.slots * form.cluster * PIECE


def product(
    form: Form, a: Any, b: Any, c: Any, aux: Any = None, *,
    place: Any = lambda array: array, space: Any = None,
    blocks: int = MULTIPROCESSORS, cut: str = "best",
) -> list[Launch]:  # fmt: skip
    """The launches, in order, of C = op(A) op(B) with the form's epilogue.

    a, b (2-d) uint16, bf16's bits; c (m, n) uint16 or float32; aux: the bias (n,) or the residual
    (m, n), uint16. place: puts a NumPy array where the target can read it. space: bytes for pieces,
    `space_for` of them, zero at first and shared by products that follow each other.
    """
    m, n, k = sizes(form, a, b, c, aux)
    who = plan(form, m, n, k, blocks, cut)
    work = place(who.words())
    if form.pieces != "no" and space is None:
        space = place(np.zeros(space_for(form, who), np.uint8))
    map_a, map_b, map_c = maps(form, a, b, c)
    extra = Map(aux, (TILE_M, 64)) if form.epilogue == "residual" else 0 if aux is None else aux
    grid = len(who.items) * form.cluster
    args = map_a, map_b, map_c, extra, work, 0 if space is None else space, n
    launches = [Launch(gemm_kernel(form), (grid,), args)]
    if form.pieces == "after" and who.slots:
        launches.append(Launch(sum_kernel(form), (grid,), (map_c, work, args[5], grid)))
    return launches


# k-blocks that cutting tiles must save. Where it saved 64 and 70 it lost 5 and 2 % (8192^3, NN
# 16384 x 768 x 50304); where it saves 116 and more, most blocks would have nothing to do without.
WORTH = 100


def choose(
    layout: str, m: int, n: int, k: int, epilogue: str = "store", out: str = "bf16"
) -> Form:
    """The form that is fastest for a product, as measured (chapter 7d)."""
    few = cover(m, TILE_M) * cover(n, Form(layout).columns) < MULTIPROCESSORS // 4
    cluster = 1 if m <= TILE_M or few or "gelu" in epilogue else 2
    form = Form(layout, False, cluster, epilogue, out)
    if epilogue not in ("store", "add"):
        return form
    parts = Form(layout, False, cluster, epilogue, out, "together")
    gain = plan(form, m, n, k).load - plan(parts, m, n, k).load
    return parts if gain > WORTH else form
