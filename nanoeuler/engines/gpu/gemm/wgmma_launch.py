# Made from book/11b-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-host
"""Products on tensor cores: C = op(A) op(B) of arrays, as launches. bf16 in, float32 sums.

Any m, n and k that `sizes` lets through; operands may be views, their rows dense and multiples of
16 bytes apart. Equal operands and an equal plan give equal bits.
Compute capability 9.0 (H100, H200). Left out: batches, and adding to a bf16 C.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypedDict, Unpack

import numpy as np

from nanoeuler.engines.gpu.gemm import wgmma_form as forms
from nanoeuler.engines.gpu.gemm import wgmma_schedule as schedule
from nanoeuler.engines.gpu.gemm.column_sums import HEADER, WIDE, columns_kernel
from nanoeuler.engines.gpu.gemm.epilogue import EPILOGUES
from nanoeuler.engines.gpu.gemm.mma_form import extents, require, require_space
from nanoeuler.engines.gpu.gemm.wgmma_kernel import gemm_kernel, sum_kernel
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS
from nanoeuler.engines.gpu.lang.kernel import Launch, Map, cover
from nanoeuler.engines.gpu.tile.rope import Turning, expect_turning
from nanoeuler.errors import UserError


@dataclass(frozen=True)
class Operands:
    """The arrays of a product, 2-d where nothing else is said; uint16 is bf16's bits.

    a, b uint16; c (m, n) uint16 or float32. aux uint16: the bias (n,), or U or R (m, n). second
    uint16 (m, n), what the form stores beside C, may be aux; of swiglu (m, 2 n), gates and ups.
    For swiglu backward, both are (1, 2, m, n): gates, then ups. sums float32 (n,): of C's columns.
    turn: of rope.
    """

    a: Any
    b: Any
    c: Any
    aux: Any = None
    second: Any = None
    sums: Any = None
    turn: Turning | None = None


def sizes(form: forms.Form, of: Operands) -> tuple[int, int, int]:
    """m, n and k of a product, n of C's columns; UserError where something does not fit."""
    gated = form.epilogue == "swiglu"
    m, n, k = extents(form, of.a, of.b, of.c, 2 if gated else 1)
    aux = {"": None, "bias": (n,), "tile": (m, n), "tiles": (1, 2, m, n)}[form.way.aux]
    require(f"aux of {form.epilogue!r}", of.aux, aux, "uint16")
    second = (aux if form.beside == 2 else (m, 2 * n if gated else n)) if form.second else None
    require(f"the second array of {form.epilogue!r}", of.second, second, "uint16")
    require("sums", of.sums, None if form.sums == "no" else (n,), "float32")
    expect_turning(of.turn, m, n, form.way.turn)
    if (form.way.aux == "bias" or form.sums != "no") and n % 8:
        raise UserError(f"columns with a bias or sums come in eights, not {n}: pad B by zeros")
    if gated and form.second and n % 64:
        raise UserError(f"gates that are stored come in sixty-fours, not {n}")
    if max(m, n) >= 1 << 31:
        raise UserError(f"C's rows and columns fit into 31 bits each, not {m} x {n}")
    if cover(k, schedule.TILE_K) >= 1 << 15:
        raise UserError(f"k is at most {(1 << 15) * schedule.TILE_K - schedule.TILE_K}, not {k}")
    return m, n, k


@cache
def plan(
    form: forms.Form, m: int, n: int, k: int, blocks: int = MULTIPROCESSORS, cut: str = "best"
) -> schedule.Plan:
    """Who multiplies what on a machine with room for `blocks` blocks; cut: `wgmma_schedule.split`.

    Equal arguments give the same plan, and so the same array of words.
    """
    order = schedule.tiles(m, n, forms.TILE_M * form.cluster, form.of_c)
    clusters, k_blocks = blocks // form.cluster, cover(k, schedule.TILE_K)
    if form.pieces == "no":
        return schedule.whole(order, k_blocks, clusters)
    return schedule.split(
        order, k_blocks, clusters, form.cluster, forms.REGISTERS // form.strip, cut
    )


# %% sec-gemm-space
def maps(form: forms.Form, of: Operands) -> list[Any]:
    """A, B, C, the second array and aux as the kernel takes them; 0 for what there is not."""
    rows_b = form.columns // (2 if form.epilogue == "swiglu" else form.cluster)
    rows_of_k = schedule.TILE_K // 2 if form.halved else schedule.TILE_K
    second, aux = of.second, of.aux
    box = (1, 1, 64, 64) if form.beside == 2 else (64, 64)
    met = (forms.TILE_M, 64) if form.ringed else box
    return [
        Map(of.a, (64, 64) if form.layout[0] == "T" else (forms.TILE_M, schedule.TILE_K)),
        Map(of.b, (rows_of_k, 64) if form.layout[1] == "N" else (rows_b, schedule.TILE_K)),
        Map(of.c, (64, 32) if form.out == "float32" else (64, 64)),
        0 if second is None else Map(second, box),
        0 if aux is None else aux if form.way.aux == "bias" else Map(aux, met),
    ]


def space_bytes(
    form: forms.Form, m: int, n: int, k: int, blocks: int = MULTIPROCESSORS, cut: str = "best"
) -> int:
    """Bytes of workspace that a product wants, for pieces or for sums of columns; 0: none."""
    if form.sums != "no":
        return HEADER + cover(m, forms.TILE_M * form.cluster) * form.cluster * forms.LINES * n * 4
    if form.pieces != "no":
        return HEADER + plan(form, m, n, k, blocks, cut).slots * form.cluster * forms.PIECE
    return 0


class Given(TypedDict, total=False):
    """What a product may be given besides A, B, C and aux.

    second, sums, turn: as `Operands` has them. place: puts a NumPy array where the target can read
    it. space: `space_bytes` or more, whose first word is zero at first; products that follow each
    other share it, and zeros are placed if none comes. blocks: that run at once. cut:
    `wgmma_schedule.split`.
    """

    second: Any
    sums: Any
    turn: Turning | None
    place: Callable[[np.ndarray], Any]
    space: Any
    blocks: int
    cut: str


def product(
    form: forms.Form, a: Any, b: Any, c: Any, aux: Any = None, **given: Unpack[Given]
) -> list[Launch]:
    """The launches, in order, of C = op(A) op(B) with the form's epilogue; arrays: `Operands`.

    A row of C ends at a multiple of 16 bytes, or the bytes up to there are written, too. Products
    of equal form and sizes share the array of their work list.
    """
    place, space = given.pop("place", lambda array: array), given.pop("space", None)
    limits = given.pop("blocks", MULTIPROCESSORS), given.pop("cut", "best")
    of = Operands(a, b, c, aux, **given)
    m, n, k = sizes(form, of)
    who, need = plan(form, m, n, k, *limits), space_bytes(form, m, n, k, *limits)
    work = place(who.words)
    if need and space is None:
        space = place(np.zeros(need, np.uint8))
    require_space(space, need, (m, n, k))
    views, space, grid = maps(form, of), space if need else 0, len(who.items) * form.cluster
    args = *views, work, space, n, *(of.turn or Turning())
    launches = [Launch(gemm_kernel(form), (grid,), args)]
    if form.pieces == "after" and who.slots:
        launches.append(Launch(sum_kernel(form), (grid,), (views[2], work, space, grid)))
    if form.sums != "no":
        args = space, cover(m, forms.TILE_M) * forms.LINES, n, of.sums
        launches.append(Launch(columns_kernel(form.sums == "add"), (cover(n, WIDE),), args))
    return launches


# %% sec-gemm-choice
# Ping-pong, cluster and pieces of the forms that were fastest most often.
COOPERATIVE, PINGPONG, CUT = (False, 2, "no"), (True, 2, "no"), (False, 2, "together")
ALONE = (True, 1, "no")  # ping-pong without a partner
NARROW = (False, 1, "no", True)  # cooperative, no partner, whole; True: with a narrow tile
# The products that were timed alone at full load by the form of each that was fastest then (later
# others led by up to 7 %), as `tests/bench/card/gemm.py` prints it: (layout, epilogue, C's dtype,
# second) -> {(ping-pong, cluster, pieces): [(m, n, k)]}, and a fourth, True, where the tile is
# narrow. Three narrow ones of 8192 rows were ahead by 2 to 4 % if timed alone, and behind by 5 to
# 7 % if timed in turn with others, as in a step: they are not here.
MEASURED: dict[tuple, dict[tuple, list[tuple[int, int, int]]]] = {
    ("NT", "store", "bf16", False): {
        COOPERATIVE: [(8192, 8192, 8192), (4096, 50304, 768), (16384, 768, 3072),
            (32768, 768, 1280), (32768, 768, 4096), (8192, 2048, 16384), (4096, 128256, 2048)],
        ALONE: [(8192, 2048, 2048), (8192, 2048, 3072)],
        PINGPONG: [(2048, 768, 16384), (8192, 768, 768), (8192, 768, 1280), (8192, 768, 4096),
            (8192, 2048, 768), (16384, 768, 768), (16384, 2304, 768), (16384, 3072, 768),
            (16384, 50304, 768), (32768, 768, 768), (32768, 2048, 768), (4096, 49152, 576)],
        NARROW: [(4096, 768, 16384), (16384, 576, 576), (16384, 576, 960), (16384, 576, 3072)],
        CUT: [(8192, 768, 16384)],
    },
    ("NN", "store", "bf16", False): {
        CUT: [(2048, 768, 50304), (4096, 768, 50304)],
        COOPERATIVE: [(4096, 16384, 768), (16384, 768, 768), (16384, 768, 2304), (16384, 768, 3072),
            (16384, 3072, 768), (16384, 768, 50304), (32768, 768, 2048), (8192, 2048, 8192),
            (4096, 576, 49152), (4096, 2048, 128256)],
        PINGPONG: [(8192, 768, 768), (8192, 768, 2048), (8192, 1280, 768), (8192, 16384, 768),
            (32768, 768, 768), (32768, 1280, 768), (16384, 960, 576)],
        ALONE: [(8192, 2048, 2048), (8192, 3072, 2048)],
        NARROW: [(16384, 576, 576), (16384, 576, 1536)],
    },
}  # fmt: skip


MEASURED |= {
    ("NN", "bias", "bf16", False): {
        COOPERATIVE: [(16384, 768, 768), (16384, 768, 3072)],
        PINGPONG: [(16384, 2304, 768)],
    },
    ("TN", "store", "float32", False): {
        (False, 1, "together"): [(768, 768, 8192), (576, 576, 16384), (576, 960, 16384),
            (576, 3072, 16384), (1536, 576, 16384)],
        CUT: [(768, 768, 16384), (768, 3072, 16384), (768, 4096, 32768), (2048, 768, 8192),
            (2304, 768, 16384), (3072, 768, 16384)],
        NARROW: [(768, 4096, 8192), (49152, 576, 4096)],
        (False, 2, "no", True): [(2048, 3072, 8192)],
        COOPERATIVE: [(768, 16384, 4096), (50304, 768, 4096), (50304, 768, 16384),
            (2048, 2048, 8192), (2048, 16384, 8192), (8192, 2048, 8192), (128256, 2048, 4096)],
    },
    ("NT", "bias and gelu", "bf16", False): {(False, 1, "no"): [(16384, 3072, 768)]},
    ("NT", "bias and gelu", "bf16", True): {PINGPONG: [(16384, 3072, 768)]},
    ("NN", "gelu backward", "bf16", True): {COOPERATIVE: [(16384, 3072, 768)]},
    ("NT", "gelu backward", "bf16", True): {PINGPONG: [(16384, 3072, 768)]},
    ("NT", "swiglu backward", "bf16", True): {
        ALONE: [(8192, 2048, 768), (32768, 2048, 768), (16384, 1536, 576), (8192, 8192, 2048)],
    },
    ("NT", "swiglu", "bf16", False): {COOPERATIVE: [(16384, 2048, 768)]},
    ("NT", "swiglu", "bf16", True): {COOPERATIVE: [(16384, 2048, 768)]},
    ("NN", "bias and gelu", "bf16", True): {PINGPONG: [(16384, 3072, 768)]},
    ("NN", "swiglu", "bf16", True): {
        (False, 1, "no"): [(16384, 2048, 768)], ALONE: [(16384, 1536, 576), (8192, 8192, 2048)],
    },
    ("NN", "rope 64", "bf16", False): {COOPERATIVE: [(8192, 1280, 768), (32768, 1280, 768)]},
}  # fmt: skip

NEAR = 2.0  # a product is like one that was timed if no size is farther off than by this factor
# For others: how many k-blocks cutting must save. Where it saved 62 and 71 it lost 2 and 1 %
# (8192^3, NN 16384 x 768 x 50304); of 16 in MEASURED where it saves 110 and more, 13 are cut.
WORTH = 100
# The k up to which putting a tile's sums away is worth hiding in NT: at 768 ping-pong was 10 to
# 14 % ahead timed in turn and 1 to 2 % alone, if n is 2304 or more; at 3072, 4 % behind alone.
SHALLOW = 1024


def like(kind: tuple, sizes: tuple[int, int, int]) -> tuple | None:
    """What MEASURED has of the most similar product in it, if one is near."""

    def factor(other: tuple[int, int, int]) -> float:
        return max(max(a / b, b / a) for a, b in zip(sizes, other, strict=True))

    known = {size: way for way, of in MEASURED.get(kind, {}).items() for size in of}
    nearest = min(sorted(known), key=factor, default=None)
    return known[nearest] if nearest and factor(nearest) <= NEAR else None


def rule(layout: str, m: int, n: int, k: int, plain: bool, cut: bool) -> tuple[bool, int, str]:
    """A form by sizes alone. plain: ping-pong has the epilogue; cut: it can have pieces."""
    few = cover(m, forms.TILE_M) * cover(n, 256) < MULTIPROCESSORS // 4
    pingpong = layout == "NT" and plain and not few and k <= SHALLOW < n
    cluster = 1 if m <= forms.TILE_M or few else 2
    clusters, blocks = MULTIPROCESSORS // cluster, cover(k, schedule.TILE_K)
    count = cover(m, forms.TILE_M * cluster) * cover(n, 256)
    saved = cover(count, clusters) * blocks - cover(count * blocks, clusters)
    return pingpong, cluster, "together" if cut and not pingpong and saved > WORTH else "no"


def choose(
    layout: str, sizes: tuple[int, int, int], epilogue: str = "store", out: str = "bf16",
    second: bool = False, sums: str = "no",
) -> forms.Form:  # fmt: skip
    """MEASURED's form of a product like this one of m, n, k, or one by these sizes."""
    way = EPILOGUES[epilogue]
    name = "store" if epilogue == "add" else epilogue.replace("_exact", "")
    plain = out == "bf16" and not way.aux.startswith("tile") and way.pingpong is None
    found = like((layout, name, out, second), sizes)
    found = found or rule(layout, *sizes, plain, way.cut and sums == "no")
    pingpong, cluster, pieces, narrow = (*found, False)[:4]
    pieces = pieces if way.cut and sums == "no" else "no"
    pingpong = pingpong if way.pingpong is None else way.pingpong
    return forms.Form(layout, pingpong, cluster, epilogue, out, pieces, second, sums, narrow)
