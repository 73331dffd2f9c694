"""Products by mma.sync without a GPU: against float64, counted, planted faults, launches."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from mutants import Mutant, load, source
from test_gemm import CURVES, TABLES, expected, turned
from tiers import thinned

from nanoeuler import emulator
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.gemm import mma_epilogue, mma_tile
from nanoeuler.engines.gpu.gemm import mma_kernel as mma_kernel_module
from nanoeuler.engines.gpu.gemm.choice import product_on, space_on
from nanoeuler.engines.gpu.gemm.column_sums import columns_kernel
from nanoeuler.engines.gpu.gemm.mma_form import CURVED, DEPTH, SLOPED, MmaForm, fit
from nanoeuler.engines.gpu.gemm.mma_kernel import mma_kernel
from nanoeuler.engines.gpu.gemm.mma_launch import (
    choose_mma,
    mma_product,
    pieces_of,
    space_for,
)
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS, SHARED
from nanoeuler.engines.gpu.lang.kernel import cover
from nanoeuler.engines.gpu.tile.rope import Turning
from nanoeuler.errors import UserError

SMALL = dict(rows=64, columns=64, stages=3)  # one warp, a ring that wraps after three k-blocks
PAIR = dict(rows=64, columns=128, stages=3)  # two warps
POISON = 0x7FC0  # bf16's nan


def rows_of(values, dtype=np.uint16):
    """A view of a larger array: nan lies above and below, 32 bytes (a sector) to its left, and to
    its right as much as rows need that are a multiple of 16 bytes apart."""
    step = 16 // np.dtype(dtype).itemsize
    room = np.empty((len(values) + 2, (2 + cover(values.shape[1], step)) * step), dtype)
    room[...] = np.nan if dtype == np.float32 else POISON
    inside = room[1:-1, 2 * step : 2 * step + values.shape[1]]
    inside[...] = values if dtype == np.float32 else to_bf16(values)
    return inside


class Case:
    """Operands of one product, and what it has to be within `bound`."""

    def __init__(self, form, m, n, k, size=1.0):
        rng = np.random.default_rng([m, n, k])

        def random(*shape):
            return np.float32(size) * rng.standard_normal(shape, np.float32)

        self.form, self.shape = form, (m, n, k)
        self.a = rows_of(random(*((m, k) if form.layout[0] == "N" else (k, m))))
        self.b = rows_of(random(*((k, n) if form.layout[1] == "N" else (n, k))))
        left, right = (from_bf16(x).astype(np.float64) for x in (self.a, self.b))
        left = left if form.layout[0] == "N" else left.T
        right = right if form.layout[1] == "N" else right.T
        want, sums = left @ right, abs(left) @ abs(right)
        self.aux = None
        if form.epilogue == "residual":
            self.aux = rows_of(random(m, n))
        if "bias" in form.epilogue:
            self.aux = to_bf16(random(n))
        if self.aux is not None:
            want, sums = want + from_bf16(self.aux), sums + abs(from_bf16(self.aux))
        self.before = random(m, n) if form.epilogue == "add" else np.full((m, n), np.nan)
        if form.epilogue == "add":
            want, sums = want + self.before, sums + abs(self.before)
        # k products and one more are summed in float32, each sum half a unit off at most; then half
        # a unit of bf16.
        self.want, self.bound = want, (k + 1) * 2.0**-24 * sums
        if form.out == "bf16":
            self.bound += 2.0**-8 * (abs(want) + self.bound)

    def output(self):
        """C before the product, in rows with something behind them."""
        kind = np.float32 if self.form.out == "float32" else np.uint16
        return rows_of(self.before.astype(np.float32), kind)

    def run(self, seed=None, blocks=MULTIPROCESSORS, kernel=None):
        """C after it, and the reports of its launches."""
        c = self.output()
        around = c.base.copy()
        space = np.full(space_for(self.form, *self.shape, blocks) // 4, np.nan, np.float32)
        launches = mma_product(
            self.form, self.a, self.b, c, self.aux, space=space if space.size else None,
            blocks=blocks,
        )  # fmt: skip
        if kernel is not None:
            launches = [replace(launches[0], kernel=kernel)]
        reports = [emulator.run(launch, seed, fresh=[space]) for launch in launches[:1]]
        reports += [emulator.run(launch, seed) for launch in launches[1:]]
        left = 32 // c.itemsize
        around[1:-1, left : left + c.shape[1]] = c
        assert (c.base.view(np.uint8) == around.view(np.uint8)).all()
        return c, reports

    def check(self, c):
        """Assert that C is right."""
        c = c if self.form.out == "float32" else from_bf16(c)
        error = abs(c.astype(np.float64) - self.want)
        assert (error <= self.bound).all(), (error / self.bound).max()


# ---- Right


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize(
    "m, n, k", [(1, 1, 1), (3, 70, 70), (72, 65, 63), (64, 64, 7 * DEPTH), (65, 8, 2 * DEPTH + 9)]
)
def test_any_size_is_right_and_stays_in_its_place(layout, m, n, k):
    case = Case(MmaForm(layout, **SMALL), m, n, k)
    case.check(case.run()[0])


@pytest.mark.parametrize("epilogue", ["bias", "residual", "add"])
def test_what_is_done_with_the_sums(epilogue):
    out = "float32" if epilogue == "add" else "bf16"
    case = Case(MmaForm("NT", epilogue, out, **SMALL), 70, 70, 40)
    case.check(case.run()[0])


def test_large_and_small_numbers_keep_their_digits():
    for size in (1e-12, 1e12):
        case = Case(MmaForm("TN", "store", "float32", **SMALL), 9, 17, 80, size)
        case.check(case.run()[0])


@pytest.mark.parametrize("epilogue", ["store", "add"])
def test_pieces_of_k_are_summed_in_order(epilogue):
    case = Case(MmaForm("TN", epilogue, "float32", **SMALL), 40, 43, 6 * DEPTH + 8)
    assert pieces_of(case.form, *case.shape, 3) == 3
    c, reports = case.run(seed=5, blocks=3)
    case.check(c)
    assert len(reports) == 2


def test_the_tile_of_the_card_is_right():
    case = Case(MmaForm(), 100, 200, 4 * DEPTH - 8)
    case.check(case.run()[0])


@pytest.mark.parametrize(
    "form", [MmaForm(**PAIR), MmaForm("TN", "store", "float32", **SMALL)], ids=["NT", "TN, pieces"]
)
def test_any_order_of_blocks_and_copies_gives_equal_bits(form):
    case = Case(form, 72, 40, 3 * DEPTH)
    c = case.run(seed=1, blocks=4)[0]
    case.check(c)
    assert (case.run(seed=2, blocks=4)[0] == c).all()


# ---- Activation functions


def halves(rows):
    """Gates and ups (1, 2, m, n), a view of their rows (m, 2 n)."""
    return rows.reshape(1, len(rows), 2, -1).swapaxes(1, 2)


def whole(array):
    """The rows of a matrix, or of gates and ups."""
    return array if array.ndim == 2 else array.swapaxes(1, 2).reshape(array.shape[2], -1)


def curved(form, m, n, k, kernel=None, seed=None, scale=1.0, over=True, turn=None):
    """Names of what a form stores that is farther off than `expected` allows; its arrays, and the
    reports. over: a backward's second array goes over the one that it met. turn: of RoPE."""
    rng, wide = np.random.default_rng([m, n, k]), 2 * n if form.gated else n

    def random(*shape):
        return np.float32(scale) * rng.standard_normal(shape, np.float32)

    sizes = {"a": (k, m) if form.layout[0] == "T" else (m, k),
             "b": (k, wide) if form.layout[1] == "N" else (wide, k)}  # fmt: skip
    of = {name: rows_of(random(*x)) for name, x in sizes.items()}
    of |= {"c": rows_of(np.full((m, n), np.nan))}
    of["aux"] = {
        "bias": lambda: to_bf16(random(n)), "tile": lambda: rows_of(random(m, n)),
        "tiles": lambda: halves(rows_of(random(m, 2 * n))), "": lambda: None,
    }[form.way.aux]()  # fmt: skip
    aux = None if of["aux"] is None else from_bf16(of["aux"]).astype(float)
    if form.second and form.way.aux == "tiles":
        of["second"] = of["aux"] if over else halves(rows_of(np.full((m, 2 * n), np.nan)))
    elif form.second:
        of["second"] = of["aux"] if form.sloped else rows_of(np.full((m, wide), np.nan))
    if form.sums != "no":
        of["sums"] = np.full(n, 3.0 if form.sums == "add" else np.nan, np.float32)
    a, b = (from_bf16(of[name]).astype(float) for name in "ab")
    a, b = a.T if form.layout[0] == "T" else a, b.T if form.layout[1] == "T" else b
    s, e = turned(turn, form.way.turn, a @ b, k * 2.0**-24 * (abs(a) @ abs(b)))
    wanted = expected(form, s, e, aux)
    space = np.full(space_for(form, m, n, k) // 4, np.nan, np.float32)
    around = {name: of[name].base.copy() for name in ("c", "second") if name in of}
    launches = mma_product(form, **of, space=space if space.size else None, turn=turn)
    if kernel is not None:
        launches[0] = replace(launches[0], kernel=kernel)
    reports = [emulator.run(launch, seed, fresh=[space]) for launch in launches[:1]]
    reports += [emulator.run(launch) for launch in launches[1:]]
    for name, x in around.items():
        stored = whole(of[name])
        x[1:-1, 16 : 16 + stored.shape[1]] = stored
        assert (of[name].base == x).all(), name
    got = {name: of[name] if name == "sums" else from_bf16(of[name]) for name in wanted}
    wrong = [name for name, (want, bound) in wanted.items()
             if not (abs(got[name].astype(float) - want) <= bound).all()]  # fmt: skip
    return wrong, of, reports


@pytest.mark.parametrize("epilogue", CURVED)
@pytest.mark.parametrize("second", [False, True])
def test_an_activation_function_is_an_epilogue(epilogue, second):
    form = MmaForm("NN", epilogue, second=second, **PAIR)
    assert curved(form, 70, 142, 40)[0] == []


@pytest.mark.parametrize("epilogue", SLOPED)
@pytest.mark.parametrize(
    "more, size",
    [
        (dict(second=True, sums="add"), (70, 140, 40)),
        (dict(layout="NN", sums="store"), (65, 44, 72)),
        (dict(second=True), (3, 71, 16)),
    ],
)
def test_its_backward_is_one_too(epilogue, more, size):
    form = MmaForm(**{"epilogue": epilogue} | PAIR | more)
    assert curved(form, *size)[0] == []


def test_columns_are_summed_of_what_is_only_stored():
    assert curved(MmaForm("TN", sums="store", **PAIR), 100, 36, 40)[0] == []


def test_the_tile_of_the_card_ends_in_them_as_well():
    form = MmaForm("NT", "gelu backward", second=True, sums="store", columns=128)
    assert curved(form, 200, 132, 24)[0] == []


def test_the_backward_takes_the_very_curve_that_the_forward_took():
    for name in CURVES:
        _, forward, _ = curved(MmaForm("NN", f"bias and {name}", second=True, **SMALL), 40, 48, 24)
        back = MmaForm("NT", f"{name} backward", second=True, **SMALL)
        a, b = np.zeros((40, 8), np.uint16), np.zeros((48, 8), np.uint16)
        u = forward["second"].copy()
        for launch in mma_product(back, a, b, np.zeros((40, 48), np.uint16), u, second=u):
            emulator.run(launch)
        assert (u == forward["c"]).all()


def test_sums_of_columns_have_equal_bits_in_any_order_of_blocks():
    form = MmaForm("NT", "gelu backward", second=True, sums="store", **PAIR)
    first, again = (curved(form, 130, 136, 24, seed=seed)[1] for seed in (1, 2))
    for name in ("c", "second", "sums"):
        assert (first[name].view(np.uint8) == again[name].view(np.uint8)).all()


def test_a_backward_moves_the_bytes_that_were_predicted():
    """A tile of 64 x 128: U comes once, dU and GELU go once, and a line of sums."""
    form = MmaForm("NT", "gelu backward", second=True, sums="store", **PAIR)
    product, sums = curved(form, 64, 128, DEPTH)[2]
    tile = 64 * 128 * 2
    assert product["global loads bytes"] == form.stage + tile
    assert product["global stores bytes"] == 2 * tile + 128 * 4
    assert product["global stores sectors"] == (2 * tile + 128 * 4) // 32
    assert sums["global loads bytes"] == 128 * 4


# ---- SwiGLU

GATED = dict(layout="NN", epilogue="swiglu")
UNGATED = dict(layout="NT", epilogue="swiglu backward", second=True)


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize(
    "more, size, scale",
    [
        (PAIR, (70, 72, 40), 1), (PAIR, (130, 136, 4 * DEPTH + 9), 1), (SMALL, (1, 8, 8), 1),
        (PAIR | dict(layout="TN"), (9, 40, 16), 30), (dict(columns=128), (200, 136, 24), 1),
        ({}, (9, 264, 72), 1),
    ],
)  # fmt: skip
def test_swiglu_is_an_epilogue(more, size, scale, second):
    assert curved(MmaForm(**GATED | more, second=second), *size, scale=scale)[0] == []


@pytest.mark.parametrize(
    "more, size, how",
    [
        (PAIR, (70, 144, 40), {}), (PAIR, (65, 40, 4 * DEPTH + 9), dict(over=False)),
        (SMALL, (1, 8, 8), {}), (SMALL | dict(layout="NN"), (9, 80, 16), dict(scale=30)),
        (dict(columns=128), (200, 136, 24), {}), ({}, (9, 264, 72), {}),
    ],
)  # fmt: skip
def test_its_backward_is_one(more, size, how):
    assert curved(MmaForm(**UNGATED | more), *size, **how)[0] == []


@pytest.mark.parametrize("rounded", [True, False])
def test_swiglus_backward_takes_the_h_that_the_forward_stored(rounded):
    """Of the gates and ups that it stored, whatever comes from above: the sums are zero here. Not
    if a planted mistake takes them before they are rounded."""
    form = MmaForm(**GATED, second=True, **PAIR)
    flaw = wrong("make_gate", "if second:", "if False:", "gemm.mma_epilogue")
    with mock.patch.object(mma_epilogue, "make_gate", mma_epilogue.make_gate if rounded else flaw):
        kernel = mma_kernel.__wrapped__(form)
    _, forward, _ = curved(form, 40, 48, 24, kernel)
    u, h = forward["second"].copy(), np.full((40, 48), POISON, np.uint16)
    a, b = np.zeros((40, 8), np.uint16), np.zeros((48, 8), np.uint16)
    form = MmaForm(**UNGATED, **PAIR)
    for launch in mma_product(form, a, b, h, halves(u), second=halves(u)):
        emulator.run(launch)
    assert (h == forward["c"]).all() == rounded and not from_bf16(u).any()


@pytest.mark.parametrize("form", [GATED | dict(second=True), UNGATED], ids=["there", "back"])
def test_swiglu_has_equal_bits_in_any_order_of_blocks(form):
    first, again = (curved(MmaForm(**form, **PAIR), 130, 136, 24, seed=seed)[1] for seed in (1, 2))
    for name in ("c", "second"):
        assert (first[name] == again[name]).all()


def test_swiglu_moves_the_bytes_that_were_predicted():
    """A tile of 64 x 64 of h, and two of U. Rows of half a box are whole sectors, and no store or
    load of a box meets a bank twice."""
    form = MmaForm(**GATED, second=True, **PAIR)
    (report,) = curved(form, 64, 64, DEPTH)[2]
    (plain,) = curved(MmaForm("NN", **PAIR), 64, 128, DEPTH)[2]
    h = 64 * 64 * 2
    assert report["global loads bytes"] == plain["global loads bytes"] == form.stage
    assert report["global stores bytes"] == plain["global stores bytes"] + h == 3 * h
    assert report["global stores sectors"] == 3 * h // 32
    for name in ("shared loads wavefronts", "shared stores wavefronts"):
        assert report[name] - plain[name] == h // 128


def test_its_backward_moves_the_bytes_that_were_predicted():
    """Of a tile of 64 x 128 gates and ups come once, and their gradients and h go once."""
    form = MmaForm(**UNGATED, **PAIR)
    (report,) = curved(form, 64, 128, DEPTH)[2]
    tile = 64 * 128 * 2
    assert report["global loads bytes"] == form.stage + 2 * tile
    assert report["global stores bytes"] == 3 * tile
    assert report["global stores sectors"] == 3 * tile // 32


GATE_FAULTS = {  # what: module, function, text, its flaw, form
    "a gate by its neighbour's up": (
        "gemm.mma_epilogue", "make_gate", "acc[at + half]", "acc[at + half ^ 1]", GATED),
    "rows 32 on over the first": (
        "gemm.mma_epilogue", "make_gate", "i // 2 * half", "0", GATED),
    "rows 32 on are sent as the first's columns": (
        "gemm.mma_epilogue", "make_send", "(HALF, 8) if", "(0, 8) if", GATED),
    "ups are stored beside their gates": (
        "gemm.mma_epilogue", "make_send", "(right + box) * n", "(right + box) * 32",
        GATED | dict(second=True)),
    "gates where ups belong, in B": (
        "gemm.mma_tile", "make_column", "chunk // half % 2 * (columns >> 1)", "0", GATED),
    "the second tile's gates are the first's": (
        "gemm.mma_tile", "make_column", "chunk // (2 * half) * HALF", "0", GATED),
    "ups are not fetched": (
        "gemm.mma_epilogue", "make_fetch_boxes", "if boxes == 2:", "if False:", UNGATED),
    "gates and ups are not waited for": (
        "gemm.mma_epilogue", "make_fetch_boxes", "        wait_all()\n", "", UNGATED),
    "a warp's boxes over the next one's": (
        "gemm.mma_kernel", "make_kernel", "form.boxes * BOX", "BOX", UNGATED),
    "slopes by up where those by gate belong": (
        "gemm.mma_epilogue", "make_meet_gates", "ptx.store_shared_int(at, of_gates)",
        "ptx.store_shared_int(at, of_ups)", UNGATED),
    "the rows below meet what the upper ones met": (
        "gemm.mma_epilogue", "make_meet_gates", "meet_two(acc, q + 2, int32(at + 1024))",
        "meet_two(acc, q + 2, at)", UNGATED),
    "slopes by up go where those by gate went": (
        "gemm.mma_epilogue", "make_send", "(right + box) * n", "right * n", UNGATED),
}  # fmt: skip


def test_all_faults_of_gates_have_their_place():
    for what, (module, function, old, new, _) in GATE_FAULTS.items():
        source(Mutant(f"engines.gpu.{module}", function, what, old, new))


@pytest.mark.parametrize("name", thinned(GATE_FAULTS, 4))
def test_a_fault_of_gates_is_found(name):
    module, function, old, new, form = GATE_FAULTS[name]
    flawed, form = wrong(function, old, new, module), MmaForm(**form, **PAIR)
    place = {"gemm.mma_epilogue": mma_epilogue, "gemm.mma_tile": mma_tile,
             "gemm.mma_kernel": mma_kernel_module}[module]  # fmt: skip
    with mock.patch.object(place, function, flawed):
        kernel = mma_kernel_module.mma_kernel.__wrapped__(form)
    with pytest.raises((emulator.Fault, AssertionError)):
        assert curved(form, 130, 136, 24, kernel=kernel)[0] == []


# ---- RoPE


def by(T, heads):
    """Angles of heads of width 64, the first so many of a row, in sequences of T."""
    return Turning(*TABLES[64], T, heads * 64)


TURNS = {
    "values beside keys, a border within a tile": (PAIR, (140, 320, 72), by(70, 4), {}),
    "a border within 16 rows": (PAIR | dict(layout="NT"), (72, 192, 72), by(36, 2), {}),
    "sequences of one": (SMALL, (9, 64, 8), by(1, 1), {}),
    "nothing is turned": (SMALL, (9, 128, 8), by(9, 0), {}),
    "large": (SMALL | dict(layout="TN"), (64, 128, 16), by(8, 2), dict(scale=1e4)),
    "the tile of a card": (dict(columns=128), (140, 192, 24), by(70, 2), {}),
    "of another": ({}, (70, 320, 24), by(35, 4), {}),
}


@pytest.mark.parametrize("case", TURNS)
def test_rope_is_an_epilogue(case):
    more, size, turn, how = TURNS[case]
    form = MmaForm(**dict(layout="NN", epilogue="rope 64") | more)
    assert curved(form, *size, turn=turn, **how)[0] == []


def test_rope_has_equal_bits_in_any_order_of_blocks_and_reads_its_angles():
    """Each warp reads a row's 32 cosines and 32 sines for its head."""
    form, turn = MmaForm("NN", "rope 64", **PAIR), by(64, 2)
    first, again = (curved(form, 128, 128, 24, seed=seed, turn=turn) for seed in (1, 2))
    assert (first[1]["c"] == again[1]["c"]).all()
    (report,), (plain,) = first[2], curved(MmaForm("NN", **PAIR), 128, 128, 24)[2]
    read = report["global loads bytes"] - plain["global loads bytes"]
    assert read == 2 * 128 * 2 * 32 * 4
    assert report["global stores bytes"] == plain["global stores bytes"] == 128 * 128 * 2


TURN_FAULTS = {  # what: text of make_turn, its flaw
    "all rows turn as the first 16": ("tile.row + 16 * i", "tile.row"),
    "eight rows below is nine": ("above + 8", "above + 9"),
    "values are turned too": ("tile.column < tile.by.columns", "True"),
    "the last key is not turned": ("< tile.by.columns", "< tile.by.columns - 64"),
    "turned back": ("float32(1)", "float32(-1)"),
    "sines for cosines": ("of.cos, of.sin", "of.sin, of.cos"),
    "only the first rows are turned": ("acc, i * half", "acc, 0"),
}


def test_all_faults_of_rope_have_their_place():
    for what, flaw in TURN_FAULTS.items():
        source(Mutant("engines.gpu.gemm.mma_epilogue", "make_turn", what, *flaw))


@pytest.mark.parametrize("name", thinned(TURN_FAULTS, 4))
def test_a_fault_of_rope_is_found(name):
    form, turn = MmaForm("NN", "rope 64", **PAIR), by(35, 2)
    flawed = wrong("make_turn", *TURN_FAULTS[name], "gemm.mma_epilogue")
    with mock.patch.object(mma_epilogue, "make_turn", flawed):
        kernel = mma_kernel.__wrapped__(form)
    with pytest.raises((emulator.Fault, AssertionError)):
        assert curved(form, 70, 192, 24, kernel=kernel, turn=turn)[0] == []


CURVE_FAULTS = {
    "U is not waited for": ("make_fetch_boxes", "        wait_all()\n", ""),
    "slopes where the curve belongs": (
        "make_meet", "ptx.store_shared_int(at, above)",
        "ptx.store_shared_int(at, ptx.pack_bf16(acc[q], acc[q + 1]))"),
    "the rows below take the upper ones' slopes": (
        "make_meet", "ptx.load_shared_int(at + 1024)", "ptx.load_shared_int(at)"),
    "the box is written before it was sent": (
        "make_send", "            cuda.syncwarp()\n", "            pass\n"),
    "U is read before others have put it there": (
        "make_fetch_boxes", "        cuda.syncwarp()\n", ""),
    "a quarter of the rows is left out of the sums": (
        "sum_columns", "+ acc[i + 96]", ""),
    "the sums go to another line": (
        "sum_columns", "tile.row // SIDE", "tile.row // SIDE + 1"),
}  # fmt: skip


def test_all_faults_of_curves_have_their_place():
    for what, (function, old, new) in CURVE_FAULTS.items():
        source(Mutant("engines.gpu.gemm.mma_epilogue", function, what, old, new))


@pytest.mark.parametrize("name", thinned(CURVE_FAULTS))
def test_a_fault_of_a_curve_is_found(name):
    function, old, new = CURVE_FAULTS[name]
    flawed = wrong(function, old, new, "gemm.mma_epilogue")
    form = MmaForm("NT", "gelu backward", second=True, sums="store", **PAIR)
    with mock.patch.object(mma_epilogue, function, flawed):
        kernel = mma_kernel.__wrapped__(form)
    with pytest.raises((emulator.Fault, AssertionError)):
        assert curved(form, 130, 136, 24, kernel=kernel)[0] == []


# ---- Counted


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_bytes_sectors_and_rounds_are_as_predicted(layout):
    form, blocks = MmaForm(layout, **PAIR), 2
    _, (report,) = Case(form, 64, 256, blocks * DEPTH).run()
    tiles, warps = 2, 2
    fetched = tiles * blocks * form.stage  # bytes of A and B, and what is zero-filled behind k
    filled = tiles * (form.stages - 1) * form.stage
    assert report["global loads bytes"] == fetched
    assert report["global loads sectors"] == fetched // 32
    assert report["global stores bytes"] == 64 * 256 * 2
    assert report["global stores sectors"] == 64 * 256 * 2 // 32
    # A warp reads 64 x 16 of A and of B for a step, 128 bytes a round; the last k-block's first
    # fragments are loaded again, for nothing. Then 16 rounds bring a warp's box back.
    steps = tiles * warps * (4 * blocks + 1)
    out = tiles * warps * 64
    assert report["shared loads wavefronts"] == steps * 2 * 64 * 16 * 2 // 128 + out
    assert report["shared stores wavefronts"] == (fetched + filled) // 128 + out
    assert report["tensor FLOPs"] == 2 * 64 * 256 * blocks * DEPTH


# ---- Planted faults


def wrong(function, old, new, module="gemm.mma_kernel"):
    """The maker of that name in gemm_mma_tile or gemm_mma, with the fault in it."""
    return getattr(load(Mutant(f"engines.gpu.{module}", function, "", old, new)), function)


TILE = "gemm.mma_tile"
FAULTS = {
    "no wait for the copies": (
        "make_multiply", "            wait()  # (3)", "            # (3)", "gemm.mma_kernel"),
    "no wait at the start": (
        "make_multiply", "        wait()\n        cuda.syncthreads()\n        at",
        "        cuda.syncthreads()\n        at", "gemm.mma_kernel"),
    "one group too few is waited for": (
        "make_multiply", "copy_wait(stages - 2)", "copy_wait(stages - 1)", "gemm.mma_kernel"),
    "no barrier in the loop": (
        "make_multiply", "            cuda.syncthreads()  # so", "            # so",
        "gemm.mma_kernel"),
    "no barrier at the start": (
        "make_multiply", "        cuda.syncthreads()\n        at", "        at", "gemm.mma_kernel"),
    "copies into the stage that is read": (
        "make_multiply", "ahead = slot", "ahead = slot + stage", "gemm.mma_kernel"),
    "the same fragments twice": (
        "make_multiply", "load(a0, b0, at, slot, 2)", "load(a0, b0, at, slot, 1)",
        "gemm.mma_kernel"),
    "no swizzle on the way in": (
        "make_copies", "((chunk ^ swizzle(row, dense)) << 4)", "(chunk << 4)", TILE),
    "another swizzle on the way out": (
        "make_load", "chunk_at(row, chunk, DEPTH)",
        "row * (DEPTH * 2) + ((chunk ^ (row & 6)) << 4)", TILE),
    "no edge along k": (
        "make_copies", "int32(min(max(source.rest * size, 0), 16))", "int32(16)", TILE),
    "an edge along k that is one late": (
        "make_copies", "rest * size, 0", "rest * size + 2, 0", TILE),
    "no edge below": (
        "make_copies", "count if j * step < source.below else int32(0)", "count", TILE),
}  # fmt: skip


def test_all_faults_have_their_place():
    for what, (function, old, new, module) in FAULTS.items():
        source(Mutant(f"engines.gpu.{module}", function, what, old, new))


@pytest.mark.parametrize("name", thinned(FAULTS, 8))
def test_a_fault_is_found(name):
    function, old, new, module = FAULTS[name]
    with mock.patch.object(mma_kernel_module, function, wrong(function, old, new, module)):
        kernel = mma_kernel.__wrapped__(MmaForm(**PAIR))
    # The ring of three goes round twice; what is wrong with a tile shows without.
    blocks = 2 if module == TILE else 7
    case = Case(MmaForm(**PAIR), 60, 128, blocks * DEPTH - 3)
    with pytest.raises((emulator.Fault, AssertionError)):
        case.check(case.run(kernel=kernel)[0])


def test_an_unswizzled_ring_is_found_by_its_rounds():
    """Without the swizzle on either way all is right, and eight times as slow."""
    pair = {
        "make_copies": wrong(
            "make_copies", "((chunk ^ swizzle(row, dense)) << 4)", "(chunk << 4)", TILE),
        "make_load": wrong(
            "make_load", "chunk_at(row, chunk, DEPTH)", "row * (DEPTH * 2) + (chunk << 4)", TILE),
    }  # fmt: skip
    case = Case(MmaForm(**PAIR), 64, 128, DEPTH)
    with mock.patch.multiple(mma_kernel_module, **pair):
        kernel = mma_kernel.__wrapped__(case.form)
    c, (slow,) = case.run(kernel=kernel)
    case.check(c)
    fast = case.run()[1][0]
    out = 2 * 64  # rounds of two boxes, which keep their swizzle
    ratio = (slow["shared loads wavefronts"] - out) / (fast["shared loads wavefronts"] - out)
    assert ratio == 8


# ---- Launches


def test_what_does_not_fit_is_refused():
    a, b, c = (np.zeros(shape, np.uint16) for shape in ((8, 16), (24, 16), (8, 24)))
    form = MmaForm()
    assert fit(form, a, b, c) == (8, 24, 16)
    with pytest.raises(UserError, match="does not give"):
        fit(form, a, b, c[:4])
    with pytest.raises(UserError, match="expected uint16, uint16, float32"):
        fit(MmaForm(out="float32"), a, b, c)
    with pytest.raises(UserError, match=r"aux of 'bias' is \(\(24,\), 'uint16'\), not None"):
        fit(MmaForm(epilogue="bias"), a, b, c)
    with pytest.raises(UserError, match="pad the rows"):
        fit(form, np.zeros((8, 15), np.uint16), np.zeros((24, 15), np.uint16), c)
    with pytest.raises(UserError, match="pad the rows"):
        fit(form, a.T.copy().T, b, c)
    with pytest.raises(UserError, match="rows of one array, side by side"):
        apart = np.zeros((1, 2, 8, 24), np.uint16)
        mma_product(MmaForm(**UNGATED), a, b, c, apart, second=apart)
    with pytest.raises(UserError, match=r"'swiglu backward' is \(\(1, 2, 8, 24\), .*, not None"):
        gates = halves(np.zeros((8, 48), np.uint16))
        mma_product(MmaForm(**UNGATED), a, b, c, gates)
    with pytest.raises(UserError, match="gates come in eights, not 12"):
        narrow = np.zeros((8, 16), np.uint16)[:, :12]
        fit(MmaForm(**GATED), a, np.zeros((16, 24), np.uint16), narrow)
    with pytest.raises(UserError, match="come in pairs"):
        odd = np.zeros((8, 24), np.uint16)[:, :23]
        fit(MmaForm(epilogue="bias"), a, b[:23], odd, np.zeros(23, np.uint16))


def test_a_product_says_what_space_it_needs():
    form = MmaForm("TN", "store", "float32")
    a, b = np.zeros((2, 16384, 768), np.uint16)
    c = np.zeros((768, 768), np.float32)
    need = space_for(form, 768, 768, 16384)
    with pytest.raises(UserError, match=f"needs {need} bytes of space, not 0"):
        mma_product(form, a, b, c)
    parts, sums = mma_product(form, a, b, c, space=np.zeros(need, np.uint8))
    assert need == parts.grid[1] * 768 * 768 * 4 and parts.grid[0] == 18
    assert parts.grid[0] * parts.grid[1] <= MULTIPROCESSORS and sums.grid[0] == 768


@pytest.mark.parametrize(
    "words, match",
    [
        (dict(layout="TT"), "layouts are NT, NN, TN"),
        (dict(sums="yes"), "sums no, store or add"),
        (dict(epilogue="swiglu backward"), "'swiglu backward' stores two arrays"),
        (dict(epilogue="tanh"), "epilogues are store, bias"),
        (dict(out="float32", epilogue="bias"), "float32 is stored or added to"),
        (dict(epilogue="add"), "only float32 is added to"),
        (dict(rows=96), "a tile is 64, 128 or 256"),
        (dict(stages=1), "a ring has two stages or more"),
    ],
)
def test_a_form_that_there_is_not_is_refused(words, match):
    with pytest.raises(UserError, match=match):
        MmaForm(**words)


def test_every_card_since_8_0_gets_a_form_that_fits():
    for capability, room in SHARED.items():
        form = choose_mma("NT", capability=capability)
        assert form.shared <= room and form.threads <= 256
    assert choose_mma("NT", capability=(8, 9)).columns == 128
    with pytest.raises(UserError, match="8.0 or newer, not"):
        choose_mma("NT", capability=(7, 5))


@pytest.mark.parametrize(
    "capability, kernel", [((9, 0), "gemm_wgmma"), ((8, 0), "gemm_mma"), ((12, 0), "gemm_mma")]
)
def test_a_product_is_for_the_card_that_is_there(capability, kernel):
    a, b = np.zeros((2, 16384, 768), np.uint16)
    wide, narrow = np.zeros((768, 768), np.float32), np.zeros((16384, 16384), np.uint16)
    for layout, c in (("TN", wide), ("NT", narrow)):
        first, *_ = product_on(capability, layout, a, b, c)
        assert first.kernel.function.__name__ == kernel


def test_what_mma_has_not_got_is_refused_on_its_cards():
    a, b, c = (np.zeros(shape, np.uint16) for shape in ((8, 64), (256, 64), (8, 128)))
    with pytest.raises(UserError, match=r"gates and ups are columns of B \(NN, TN\), not rows"):
        product_on((8, 0), "NT", a, b, c, epilogue="swiglu", second=c)
    with pytest.raises(UserError, match="8.0 or newer, not"):
        product_on((7, 5), "NT", a, b[:128], c)
    with pytest.raises(UserError, match="'store' has no second array"):
        product_on((8, 0), "NT", a, b[:128], c, second=c)
    with pytest.raises(UserError, match="'swiglu backward' stores two arrays"):
        gates = halves(np.zeros((8, 256), np.uint16))
        product_on((8, 0), "NT", a, b[:128], c, gates, epilogue="swiglu backward")
    assert space_on((8, 0), "NT", 8, 128, 64, epilogue="swiglu backward", second=True) == 0
    with pytest.raises(UserError, match="columns of 'bias' to bf16 are not summed"):
        product_on(
            (8, 0), "NT", a, b[:128], c, c[0], epilogue="bias", sums=np.zeros(128, np.float32)
        )
    with pytest.raises(UserError, match="128 columns are no heads of width 64 in rows of 64"):
        tables = np.zeros((8, 32), np.float32)
        turn = Turning(tables, tables, 8, 128)
        product_on((8, 0), "NT", a, b[:64], c[:, :64], epilogue="rope 64", turn=turn)
    sums = np.zeros(126, np.float32)
    with pytest.raises(UserError, match="columns that are summed come in fours, not 126"):
        product_on(
            (8, 0), "NT", a, b[:126], c[:, :126], c[:, :126], epilogue="gelu backward", sums=sums
        )


def test_a_card_gets_a_backward_with_its_sums():
    """The lines of sums, and whether they're added, come by the door that a step uses."""
    a, b, u, du = (np.zeros(x, np.uint16) for x in ((130, 64), (136, 64), (130, 136), (130, 136)))
    kind = dict(epilogue="gelu backward", second=True)
    need = space_on((8, 9), "NT", 130, 136, 64, summed=True, **kind)
    for add in (False, True):
        given = dict(kind, second=u, sums=np.zeros(136, np.float32), add_sums=add)
        launches = product_on((8, 9), "NT", a, b, du, u, space=np.zeros(need, np.uint8), **given)
        assert [x.kernel.function.__name__ for x in launches] == ["gemm_mma", "gemm_columns"]
        assert launches[1].kernel is columns_kernel(add)
        assert need == 128 + launches[1].args[1] * 136 * 4 and launches[1].args[1] == 4


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_a_product_says_what_space_it_needs_before_there_are_arrays(capability):
    a, c = np.zeros((16384, 768), np.uint16), np.zeros((768, 768), np.float32)
    need = space_on(capability, "TN", 768, 768, 16384, out="float32")
    assert need > 0
    for space in (np.zeros(need, np.uint8), None):
        first, *_ = product_on(capability, "TN", a, a, c, space=space)
        given = [x.nbytes for x in first.args if getattr(x, "dtype", None) == np.uint8]
        assert given == [need]
    with pytest.raises(UserError, match=f"needs {need} bytes of space, not {need - 1}"):
        product_on(capability, "TN", a, a, c, space=np.zeros(need - 1, np.uint8))
    assert space_on(capability, "NT", 16384, 3072, 768) == 0


def test_what_hopper_stores_beside_c_is_handed_on():
    a, b, u, h = (np.zeros(x, np.uint16) for x in ((128, 64), (256, 64), (128, 256), (128, 256)))
    sums, kind = np.zeros(256, np.float32), "gelu backward"
    need = space_on((9, 0), "NT", 128, 256, 64, epilogue=kind, second=True, summed=True)
    given = dict(epilogue=kind, second=u, sums=sums, space=np.zeros(need, np.uint8))
    for add in (False, True):
        launches = product_on((9, 0), "NT", a, b, h, u, add_sums=add, **given)
        assert launches[0].args[3].array is u and launches[1].args[3] is sums
        assert launches[1].kernel is columns_kernel(add)
