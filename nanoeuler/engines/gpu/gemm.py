# Made from book/07d-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-host
"""Products on tensor cores: C = op(A) op(B) of arrays, as launches. bf16 in, float32 sums.

Any m, n and k; rows are multiples of 16 bytes apart. Equal operands give equal bits, always.
Compute capability 9.0 (H100, H200). Left out: batches, and adding to a bf16 C.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.gemm_columns import WIDE, columns_kernel
from nanoeuler.engines.gpu.gemm_form import (
    EPILOGUES,
    HEADER,
    LINES,
    PIECE,
    REGISTERS,
    TILE_M,
    Form,
)
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


@dataclass(frozen=True)
class Operands:
    """The arrays of a product, 2-d where nothing else is said; uint16 is bf16's bits.

    a, b uint16; c (m, n) uint16 or float32. aux uint16: the bias (n,), or U or R (m, n). second
    uint16 (m, n), what the form stores beside C, may be aux; of swiglu (m, 2 n), gates and ups.
    sums float32 (n,): of C's columns.
    """

    a: Any
    b: Any
    c: Any
    aux: Any = None
    second: Any = None
    sums: Any = None


def require(name: str, array: Any, shape: tuple[int, ...] | None, kind: str) -> None:
    """UserError unless the array has this shape and dtype, or is None where shape is."""
    there = None if array is None else (tuple(array.shape), str(array.dtype))
    wanted = None if shape is None else (shape, kind)
    if there != wanted:
        raise UserError(f"{name} is {wanted or 'nothing'}, not {there}")


def sizes(form: Form, of: Operands) -> tuple[int, int, int]:
    """m, n and k of a product, n of C's columns; UserError where something does not fit."""
    m, k = of.a.shape if form.layout[0] == "N" else of.a.shape[::-1]
    of_b, n_b = of.b.shape if form.layout[1] == "N" else of.b.shape[::-1]
    gated = form.epilogue == "swiglu"
    n = n_b // 2 if gated else n_b
    if of_b != k or tuple(of.c.shape) != (m, n) or not min(m, n, k) or gated and n_b % 2:
        raise UserError(f"{form.layout}: {of.a.shape} by {of.b.shape} does not give {of.c.shape}")
    kinds = [str(array.dtype) for array in (of.a, of.b, of.c)]
    wanted = ["uint16", "uint16", "float32" if form.out == "float32" else "uint16"]
    if kinds != wanted:
        raise UserError(f"A, B and C are {', '.join(kinds)}; expected {', '.join(wanted)}")
    aux = {"": None, "bias": (n,), "tile": (m, n)}[form.way.aux]
    require(f"aux of {form.epilogue!r}", of.aux, aux, "uint16")
    second = (m, n_b) if form.second else None
    require(f"the second array of {form.epilogue!r}", of.second, second, "uint16")
    require("sums", of.sums, None if form.sums == "no" else (n,), "float32")
    if (form.way.aux == "bias" or form.sums != "no") and n % 8:
        raise UserError(f"columns with a bias or sums come in eights, not {n}: pad B by zeros")
    if gated and form.second and n % 64:
        raise UserError(f"gates that are stored come in sixty-fours, not {n}")
    if cover(k, TILE_K) >= 1 << 15:
        raise UserError(f"k is at most {(1 << 15) * TILE_K - TILE_K}, not {k}")
    return m, n, k


def plan(
    form: Form, m: int, n: int, k: int, blocks: int = MULTIPROCESSORS, cut: str = "best"
) -> Plan:
    """Who multiplies what on a machine with room for `blocks` blocks; cut: `gemm_plan.split`."""
    order = tiles(m, n, TILE_M * form.cluster, form.of_c)
    clusters, k_blocks = blocks // form.cluster, cover(k, TILE_K)
    if form.pieces == "no":
        return whole(order, k_blocks, clusters)
    return split(order, k_blocks, clusters, form.cluster, REGISTERS // form.strip, cut)


def maps(form: Form, of: Operands) -> list[Any]:
    """A, B, C, the second array and aux as the kernel takes them; 0 for what there is not."""
    rows_b = 128 if form.epilogue == "swiglu" else form.columns // form.cluster
    second, aux = of.second, of.aux
    return [
        Map(of.a, (64, 64) if form.layout[0] == "T" else (TILE_M, TILE_K)),
        Map(of.b, (64, 64) if form.layout[1] == "N" else (rows_b, TILE_K)),
        Map(of.c, (64, 32) if form.out == "float32" else (64, 64)),
        0 if second is None else Map(second, (64, 64)),
        0 if aux is None else Map(aux, (TILE_M, 64)) if form.way.aux == "tile" else aux,
    ]


def space_for(form: Form, m: int, n: int, who: Plan) -> int:
    """Bytes that a plan's pieces need, or the lines of its sums of columns."""
    lines = cover(m, TILE_M * form.cluster) * form.cluster * LINES
    return HEADER + (who.slots * form.cluster * PIECE if form.sums == "no" else lines * n * 4)


def product(
    form: Form, a: Any, b: Any, c: Any, aux: Any = None, *, second: Any = None, sums: Any = None,
    place: Any = lambda array: array, space: Any = None,
    blocks: int = MULTIPROCESSORS, cut: str = "best",
) -> list[Launch]:  # fmt: skip
    """The launches, in order, of C = op(A) op(B) with the form's epilogue; arrays: `Operands`.

    place: puts a NumPy array where the target can read it. space: bytes for pieces and for sums of
    columns, `space_for` of them, zero at first and shared by products that follow each other.
    """
    of = Operands(a, b, c, aux, second, sums)
    m, n, k = sizes(form, of)
    who = plan(form, m, n, k, blocks, cut)
    work = place(who.words())
    if (form.pieces, form.sums) != ("no", "no") and space is None:
        space = place(np.zeros(space_for(form, m, n, who), np.uint8))
    views, space = maps(form, of), 0 if space is None else space
    grid = len(who.items) * form.cluster
    launches = [Launch(gemm_kernel(form), (grid,), (*views, work, space, n))]
    if form.pieces == "after" and who.slots:
        launches.append(Launch(sum_kernel(form), (grid,), (views[2], work, space, grid)))
    if form.sums != "no":
        lines = cover(m, TILE_M) * LINES
        args = space, lines, n, sums
        launches.append(Launch(columns_kernel(form.sums == "add"), (cover(n, WIDE),), args))
    return launches


# k-blocks that cutting tiles must save. Where it saved 64 and 70 it lost 5 and 2 % (8192^3, NN
# 16384 x 768 x 50304); where it saves 116 and more, most blocks would have nothing to do without.
WORTH = 100
# The k up to which putting a tile's sums away is worth hiding: at 768 ping-pong was 10 % ahead in
# turn and within 2 % alone, in NT and for n of 2304 and more; at 3072 it was 8 % behind alone. With
# a GELU and one store it was level in one run and 4 % behind in the next, so it is not taken there.
SHALLOW = 1024


def choose(
    layout: str, m: int, n: int, k: int, epilogue: str = "store", out: str = "bf16",
    second: bool = False, sums: str = "no",
) -> Form:  # fmt: skip
    """The form that is fastest for a product, as measured (chapter 7d)."""
    few = cover(m, TILE_M) * cover(n, 256) < MULTIPROCESSORS // 4
    way, curved = EPILOGUES[epilogue], epilogue == "bias and gelu" and not second
    plain = out == "bf16" and way.aux != "tile" and epilogue != "swiglu"
    pingpong = layout == "NT" and plain and not (few or curved) and k <= SHALLOW < n
    cluster = 1 if m <= TILE_M or few or curved else 2
    form = Form(layout, pingpong, cluster, epilogue, out, "no", second, sums)
    if pingpong or not way.cut or sums != "no":
        return form
    parts = replace(form, pieces="together")
    gain = plan(form, m, n, k).load - plan(parts, m, n, k).load
    return parts if gain > WORTH else form
