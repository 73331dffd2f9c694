"""Heads turned in registers by the product that makes them, and gradients turned back by attention:
on paper, and planted faults.

Against float64, with `test_gemm`'s bounds: turning is two products of float32 and their sum, on top
of what the sums of a tile are off; what is stored is rounded once.
"""

import numpy as np
import pytest
from mutants import Mutant, load, source
from test_flash_tensor import CROWD, backward, exact_and_bounds, forward, inputs
from test_gemm import TABLES, arrays, exchanged, on_paper, wrong
from tiers import kept, thinned

from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.emulator.machine import Fault
from nanoeuler.emulator.runner import run
from nanoeuler.engines.gpu.attention import choice, wgmma_backward
from nanoeuler.engines.gpu.attention.layout import Backward
from nanoeuler.engines.gpu.gemm.choice import product_on
from nanoeuler.engines.gpu.gemm.wgmma_form import Form
from nanoeuler.engines.gpu.gemm.wgmma_launch import choose, product
from nanoeuler.engines.gpu.rows.rope import rope_launch
from nanoeuler.engines.gpu.tile.rope import Turning
from nanoeuler.errors import UserError
from nanoeuler.model.layers import rope_tables


def by(D, T, heads):
    """Angles of heads of width D, the first so many of a row, in sequences of T."""
    return Turning(*TABLES[D], T, heads * D)


def form(D, layout="NN", cluster=1, pingpong=False):
    return Form(layout, pingpong, cluster, f"rope {D}")


# Form, rows x columns x depth, angles, draws.
CASES = {
    "sequences of 70 in tiles of 128 rows, values beside keys": (
        form(64), (140, 320, 72), by(64, 70, 4), {}),
    "a border between heads within a tile": (form(64), (72, 192, 72), by(64, 36, 2), dict(seed=1)),
    "the same, wide heads": (form(128), (72, 384, 72), by(128, 24, 2), dict(seed=2)),
    "none but queries and keys": (form(128, "NT"), (67, 256, 77), by(128, 67, 2), {}),
    "sequences of one": (form(64), (9, 64, 8), by(64, 1, 1), {}),
    "nothing turned": (form(64), (9, 128, 8), by(64, 9, 0), {}),
    "a cluster": (form(64, cluster=2), (290, 128, 72), by(64, 58, 1), dict(blocks=2)),
    "one, wide heads": (form(128, "NT", 2), (264, 256, 72), by(128, 66, 1), dict(blocks=2, seed=3)),
    "tiles one after the other": (form(64), (136, 576, 328), by(64, 68, 7), dict(blocks=1)),
    "ping-pong": (form(64, pingpong=True), (140, 448, 72), by(64, 70, 5), dict(seed=4)),
    "ping-pong, wide heads": (form(128, "NT", 2, True), (330, 384, 72), by(128, 55, 2),
                              dict(blocks=2, seed=5)),
    "ping-pong, turns of both": (form(64, pingpong=True), (136, 704, 328), by(64, 68, 9),
                                 dict(blocks=1)),
    "large": (form(64), (64, 128, 16), by(64, 8, 2), dict(scale=1e4)),
}


@pytest.mark.parametrize("case", CASES)
def test_heads_are_turned_where_they_are_stored(case):
    made, size, turn, draws = CASES[case]
    got, wanted, _ = on_paper(made, *size, turn=turn, **draws)
    assert not wrong(got, wanted)


@pytest.mark.parametrize("D", [64, 128])
def test_the_order_of_blocks_and_warps_changes_no_bit(D):
    seen = [on_paper(form(D), 140, 2 * D, 72, seed, blocks, turn=by(D, 70, 1))[0]["c"]
            for seed, blocks in ((None, 1), (1, 2), (2, 2))]  # fmt: skip
    assert (seen[0] == seen[1]).all() and (seen[0] == seen[2]).all()


def test_what_is_turned_is_rounded_once():
    """The sums turned, and then rounded: less is lost than by a product and RoPE's own kernel."""
    turn = by(64, 70, 2)
    got, wanted, _ = on_paper(form(64), 140, 128, 72, turn=turn)
    apart, _, _ = on_paper(Form("NN"), 140, 128, 72)
    heads = np.ascontiguousarray(apart["c"])
    run(rope_launch(heads, turn.cos, turn.sin, 2, 70))
    once, twice = (np.sqrt(np.mean((from_bf16(x) - wanted["c"][0]) ** 2))
                   for x in (got["c"], heads))  # fmt: skip
    assert 0.65 < once / twice < 0.77  # 1 / sqrt(2), of errors that are independent


@pytest.mark.parametrize("D", [64, 128])
def test_angles_are_read_once_for_each_row_of_a_tile(D):
    reads, others = [], []
    for made, turn in ((form(D), by(D, 64, 1)), (Form("NN"), None)):
        (report,) = on_paper(made, 128, 256, 128, turn=turn)[2]
        reads.append([report[f"global loads {what}"] for what in ("bytes", "sectors")])
        others.append([report[name] for name in ("copies in bytes", "copies out bytes")])
    tables = 2 * 128 * D // 2 * 4
    assert reads[0][0] - reads[1][0] == tables and reads[0][1] - reads[1][1] == tables // 32
    assert others[0] == others[1]


ANGLES = "gemm.wgmma_epilogue.make_turns_of_heads"
FLAWS = {  # what: (function, text in it, what it becomes)
    "the position of the row above at a tile's border": (
        ANGLES, "row + (t >> 5) * 16", "row - 1 + (t >> 5) * 16"),
    "positions of the other consumer": (
        "gemm.wgmma_kernel.make_corner", "TILE_M + me.c * own", "TILE_M + (1 - me.c) * own"),
    "angles of the upper rows for the lower ones, in ping-pong": (
        ANGLES, "look_up(tile.angles, tile.of.by, int32(tile.row + 64), tile.me.t)", "pass"),
    "the upper rows turned twice, in ping-pong": (ANGLES, "turn_half(acc, 64", "turn_half(acc, 0"),
    "positions of the cluster's other block": (
        "gemm.wgmma_kernel.make_rank", "& (cluster - 1)", "& 0"),
    "eight rows below is nine": (ANGLES, "above + 8", "above + 9"),
    "values are turned too": (ANGLES, "< tile.of.by.columns", "< tile.of.by.columns + D"),
    "the last key is not turned": (ANGLES, "< tile.of.by.columns", "< tile.of.by.columns - D"),
    "what is turned is counted from the tile": (ANGLES, "tile.column + i * D", "i * D"),
    "heads overlap": (ANGLES, "i * (D // 2)", "i * (D // 4)"),
    "turned back": (ANGLES, "float32(1)", "float32(-1)"),
    "a sign": ("tile.rope.turn", "left * cos - right", "left * cos + right"),
    "the neighbour's partner": ("tile.rope.turn", "acc[i + k], acc[i + D // 4 + k]\n",
                                "acc[i + k], acc[i + D // 4 + k ^ 1]\n"),
    "cosines for sines": ("tile.rope.turn", "angles[D // 4 + k]", "angles[k]"),
    "angles of another lane": ("tile.rope.take_row", "lane & 3", "lane & 1"),
    "angles of every fourth column": ("tile.rope.take_row", "at + j * 32", "at + j * 16"),
    "both rows turn alike": ("tile.rope.take_angles", "2, cos, below", "2, cos, above"),
    "positions that never begin again": ("tile.rope.position", "row - T * divide(row, T)",
    "row"),
    "a sequence too long by one": ("tile.rope.position", "divide(row, T)",
    "divide(row, T + 1)"),
}  # fmt: skip


def test_all_mistakes_have_their_place():
    for flaw, (where, old, new) in FLAWS.items():
        module, name = where.rsplit(".", 1)
        source(Mutant(f"engines.gpu.{module}", name, flaw, old, new))
    for flaw, texts in FLAWS_BACK.items():
        source(Mutant("engines.gpu.attention.wgmma_backward", flaw.partition(":")[0], flaw, *texts))


@pytest.mark.parametrize("flaw", thinned(FLAWS, 10))
def test_a_flaw_is_found(flaw):
    place, old, new = FLAWS[flaw]
    module, name = place.rsplit(".", 1)
    ways = {"cluster": "a cluster", "ping-pong": "ping-pong"}
    case = next((ways[way] for way in ways if way in flaw), "tiles one after the other")
    made, size, turn, draws = CASES[case]
    with exchanged(load(Mutant(f"engines.gpu.{module}", name, flaw, old, new))):
        try:
            got, wanted, _ = on_paper(made, *size, turn=turn, **draws)
            assert wrong(got, wanted)
        except Fault:
            pass


# ---- What is refused, and what is chosen


@pytest.mark.parametrize("change, words", [
    (dict(cos=np.zeros((80, 64), np.float32)), r"cos is dense float32 \(positions, 32\), not"),
    (dict(sin=np.zeros((80, 32))), "sin is dense float32 .*, not float64"),
    (dict(sin=np.zeros((80, 64), np.float32)[:, :32]), "sin is dense"),
    (dict(T=71), "140 rows are no sequences of 71"), (dict(T=0), "no sequences of 0"),
    (dict(T=140), "fewer positions"), (dict(columns=96), "96 columns are no heads of width 64"),
    (dict(columns=192), "192 columns are no heads of width 64 in rows of 128"),
])  # fmt: skip
def test_angles_that_do_not_fit(change, words):
    of = arrays(form(64), 140, 128, 72)
    with pytest.raises(UserError, match=words):
        product(form(64), **of, turn=by(64, 70, 2)._replace(**change))


def test_angles_come_with_forms_that_turn_and_only_with_them():
    of = arrays(form(64), 140, 128, 72)
    with pytest.raises(UserError, match="heads of width 64 are turned by None"):
        product(form(64), **of)
    with pytest.raises(UserError, match="heads of width 0 are turned by"):
        product(Form("NN"), **of, turn=by(64, 70, 2))
    with pytest.raises(UserError, match="heads of width 64 are turned by None"):
        product_on((8, 0), "NN", **of, epilogue="rope 64")
    with pytest.raises(UserError, match="epilogues are store, bias, .*, to bf16 or float32: .*128"):
        product_on((8, 0), "NN", **of, epilogue="rope 128", turn=by(128, 70, 1))


def test_a_form_that_turns_is_chosen_by_its_own_measurements_and_the_rule():
    assert choose("NN", (16384, 1280, 768), "rope 64") == form(64, cluster=2)
    assert choose("NT", (16384, 2304, 768), "rope 128") == form(128, "NT", 2, True)


def test_the_product_for_the_card_that_is_there_turns_them():
    of = arrays(form(128), 64, 256, 8)
    of["a"][...], of["b"][...] = to_bf16(np.float32(1)), to_bf16(np.float32(1))
    for launch in product_on((9, 0), "NN", **of, epilogue="rope 128", turn=by(128, 64, 1)):
        run(launch)
    cos, sin = (x[:64].astype(float) for x in TABLES[128])
    got = from_bf16(of["c"]).astype(float)
    assert abs(got[:, :128] - 8 * np.hstack([cos - sin, sin + cos])).max() < 16 * 2**-8
    assert (got[:, 128:] == 8).all()


# ---- Attention's gradients, turned back

u, U = 2.0**-8, 2.0**-24  # as in test_flash_tensor, whose bounds hold before anything is turned
BACK = {  # B, H, G, T, D; whether blocks have as many warpgroups as they can; seed
    "odd, two sequences, shared keys": ((2, 4, 2, 77, 64), False, 1),
    "one position": ((1, 2, 1, 1, 64), False, None),
    "all warpgroups": ((1, 2, 1, 150, 64), True, None),
    "wide": ((1, 2, 1, 130, 128), False, 2),
    "wide, all warpgroups": ((1, 3, 3, 193, 128), True, None),
}


def angles(H, G, T, D):
    """Of as many positions as there are, and not one more."""
    cos, sin = (x.astype(np.float32) for x in rope_tables(T, D))
    return Turning(cos, sin, T, (H + G) * D)


def turned_back(x, off, turn):
    """x (B, heads, T, D), off by at most so much before it is rounded, turned back and rounded."""
    cos, sin, half = turn.cos.astype(float), turn.sin.astype(float), x.shape[-1] // 2
    a, b, a_off, b_off = x[..., :half], x[..., half:], off[..., :half], off[..., half:]
    back = np.concatenate([a * cos + b * sin, b * cos - a * sin], -1)
    size = np.concatenate([abs(a * cos) + abs(b * sin), abs(b * cos) + abs(a * sin)], -1)
    off = np.concatenate([a_off * abs(cos) + b_off * abs(sin), b_off * abs(cos) + a_off * abs(sin)],
                         -1) + 2 * U * size  # fmt: skip
    return back, (1 + u) * off + u * abs(back)


def attended(shape, crowd, seed=None):
    """Arrays after a forward and a backward that turns back; the largest error of each gradient
    as a share of its bound."""
    a, turn = inputs(*shape), angles(*shape[1:])
    run(forward(a), seed)
    for launch in backward(a, turn=turn, **CROWD if crowd else {}):
        run(launch, seed)
    sums, shares = exact_and_bounds(a)[0], {}
    for name in ("dq", "dk", "dv"):
        x, off = sums[name]
        if name != "dv":
            x, off = turned_back(x, off - u * abs(x), turn)  # bounds there include the rounding
        shares[name] = np.max(abs(from_bf16(a[name]) - x) / (off + 1e-30))
    return a, shares


@pytest.mark.parametrize("case", kept(
    BACK, "odd, two sequences, shared keys", "all warpgroups", "wide"
))  # fmt: skip
def test_gradients_are_turned_back(case):
    shape, crowd, seed = BACK[case]
    a, shares = attended(shape, crowd, seed)
    assert all(share < 1 for share in shares.values()), shares
    assert (a["delta"][..., shape[3] :] == 0).all()


def test_the_order_of_blocks_changes_no_bit_of_gradients():
    first, second = (attended((1, 2, 1, 140, 64), False, seed)[0] for seed in (None, 5))
    assert all(first[name].tobytes() == second[name].tobytes() for name in ("dq", "dk", "dv"))


FLAWS_BACK = {  # what: (text, what it becomes) of the function, by its name before the colon
    "make_turn_back: turned on": ("float32(-1)", "float32(1)"),
    "make_turn_back: a position late": ("row + own_row(at))", "row + own_row(at) + 1)"),
    "make_turn_back: the tile's position": ("row + own_row(at))", "own_row(at))"),
    "make_turn_back: eight rows below is seven": ("first + 8", "first + 7"),
    "make_turn_back: beyond the tables": ("last = int32(row + own_row(at)), int32(T - 1)",
                                          "last = int32(row + own_row(at)), int32(T)"),
    "dq_body: dq left as it is": ("turn_back(parts.dq, x.angles, row, T, at)", "pass"),
    "dkdv_body: dk left as it is": ("turn_back(parts.dk, x.angles, row, sizes.T, at)", "pass"),
    "dkdv_body: dv for dk": ("turn_back(parts.dk,", "turn_back(parts.dv,"),
    "dkdv_body: angles of the block's first keys": ("angles, row, sizes.T, at)",
                                                    "angles, key, sizes.T, at)"),
}  # fmt: skip


@pytest.mark.parametrize("flaw", thinned(FLAWS_BACK, 10))
def test_a_flaw_in_turning_back_is_found(flaw, monkeypatch):
    name, (old, new) = flaw.partition(":")[0], FLAWS_BACK[flaw]
    wrong = load(Mutant("engines.gpu.attention.wgmma_backward", name, flaw, old, new))
    for maker in ("dq_kernel", "dkdv_kernel"):
        monkeypatch.setattr(wgmma_backward, maker, getattr(wrong, maker))
    try:
        assert not max(attended((1, 2, 1, 150, 64), True)[1].values()) < 1
    except Fault:
        pass


def test_attention_refuses_angles_that_are_not_its_own():
    a, turn = inputs(1, 4, 2, 8, 64), angles(4, 2, 8, 64)
    with pytest.raises(UserError, match="in all 6 heads at 8 positions"):
        backward(a, turn=turn._replace(columns=256))
    with pytest.raises(UserError, match="in all 6 heads at 8 positions"):
        backward(a, turn=turn._replace(T=4))
    with pytest.raises(UserError, match=r"cos is dense float32 \(positions, 32\)"):
        backward(a, turn=turn._replace(cos=turn.cos[:, :16]))
    names = "do", "q", "k", "v", "o", "lse", "delta", "dq", "dk", "dv"
    with pytest.raises(UserError, match="on Hopper alone, at head widths 64 and 128"):
        choice.backward_launches(Backward(*(a[name] for name in names)), (8, 0), turn)
