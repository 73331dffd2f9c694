"""Products on tensor cores, without a GPU: who multiplies what, what is launched, what compiles."""

import ctypes
import importlib.util
import math
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import registers
from bench.card import gemm as card
from hypothesis import example, given
from hypothesis import strategies as st
from mutants import Mutant, load, source
from published import PUBLISHED
from tiers import kept, thinned

from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.emulator.machine import Fault
from nanoeuler.emulator.runner import run
from nanoeuler.engines.gpu.gemm import (
    column_sums,
    wgmma_epilogue,
    wgmma_form,
    wgmma_kernel,
    wgmma_launch,
    wgmma_split_k,
)
from nanoeuler.engines.gpu.gemm import epilogue as epilogues
from nanoeuler.engines.gpu.gemm.wgmma_form import PIECE, RING, SHARED, THREADS, Form
from nanoeuler.engines.gpu.gemm.wgmma_kernel import gemm_kernel, sum_kernel
from nanoeuler.engines.gpu.gemm.wgmma_launch import (
    Operands,
    choose,
    plan,
    product,
    sizes,
    space_bytes,
)
from nanoeuler.engines.gpu.gemm.wgmma_schedule import (
    TILE_K,
    Item,
    Sum,
    even,
    level,
    slotted,
    split,
    tiles,
    whole,
)
from nanoeuler.engines.gpu.host import compile, device, libraries
from nanoeuler.engines.gpu.host.device import DeviceArray
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS, Card
from nanoeuler.engines.gpu.lang.hopper import descriptor, wgmma
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int8, int32, ptx
from nanoeuler.engines.gpu.lang.kernel import Kernel, Map, cover
from nanoeuler.engines.gpu.tile import curves, rope
from nanoeuler.engines.gpu.tile.rope import Turning
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESETS, parameter_shapes
from nanoeuler.model.layers import rope_tables

SHARED_LIMIT = 227 * 1024  # CUDA C++ Programming Guide, technical specifications: of a block, 9.0
WIDE = dict(layout="TN", epilogue="add", out="float32")
FORMS = {
    "NT": Form("NT"),
    "NN in clusters": Form("NN", cluster=2),
    "NT ping-pong, GELU": Form("NT", True, 2, "bias and gelu"),
    "NT bias": Form("NT", epilogue="bias"),
    "NT residual": Form("NT", cluster=2, epilogue="residual"),
    "NT pieces": Form("NT", cluster=2, pieces="together"),
    "TN add": Form(**WIDE),
    "TN add, pieces": Form(**WIDE, cluster=2, pieces="together"),
    "NT two stored": Form("NT", epilogue="bias and gelu", second=True),
    "NN backward": Form("NN", False, 2, "gelu backward", second=True, sums="add"),
    "NT swiglu": Form("NT", False, 1, "swiglu", second=True),
    "NT swiglu backward": Form("NT", True, 2, "swiglu backward", second=True),
    "NN ping-pong backward": Form("NN", True, 2, "gelu backward", second=True, sums="add"),
    "NN narrow": Form("NN", False, 2, narrow=True),
    "NT narrow": Form("NT", False, 2, narrow=True),
    "TN narrow": Form("TN", False, 1, "add", "float32", narrow=True),
}

orders = st.builds(
    lambda down, across, group: tiles(down * 128, across * 256, 128, 256, group),
    st.integers(1, 12), st.integers(1, 5), st.integers(1, 9),
)  # fmt: skip


# ---- Plans


def pairs(order):
    """The tiles of an order as tuples."""
    return [tuple(tile) for tile in order.tolist()]


def items_of(made):
    """The items of a plan, a list a cluster."""
    return [[Item(*row) for row in own.tolist()] for own in made.items]


def sums_of(made):
    """The sums of a plan, a list a warpgroup."""
    return [[Sum(*row) for row in own.tolist()] for own in made.sums]


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 12))
def test_tiles_are_all_tiles_once(m, n, group):
    order = tiles(m, n, 128, 256, group)
    down, across = cover(m, 128), cover(n, 256)
    assert sorted(pairs(order)) == [(x, y) for x in range(down) for y in range(across)]


def ranges(lists):
    """tile -> its items' ranges of k, in order."""
    of = {}
    for item in (item for own in lists for item in own):
        of.setdefault((item.x, item.y), []).append((item.first, item.end))
    return {tile: sorted(parts) for tile, parts in of.items()}


def assert_once(order, blocks, lists):
    """Every k-block of every tile is on exactly one list, and no list or range is empty."""
    of = ranges(lists)
    assert of.keys() == {*pairs(order)} and all(lists)
    for parts in of.values():
        assert parts[0][0] == 0 and parts[-1][1] == blocks
        assert all(a < b for a, b in parts)
        assert all(left[1] == right[0] for left, right in zip(parts, parts[1:], strict=False))


@given(orders, st.integers(1, 300), st.integers(1, 140))
def test_plans_have_every_k_block_once(order, blocks, clusters):
    for cut in (items_of(whole(order, blocks, clusters)), level(order, blocks, clusters)):
        assert_once(order, blocks, cut)
        assert len(cut) <= clusters
    if len(order) <= clusters:
        assert_once(order, blocks, even(order, blocks, clusters))


@given(orders, st.integers(1, 300), st.integers(1, 140))
def test_a_level_plan_is_level(order, blocks, clusters):
    loads = [sum(item.end - item.first for item in own) for own in level(order, blocks, clusters)]
    assert max(loads) - min(loads) <= 1 or min(loads) == max(loads) == 1
    assert max(loads) == max(1, math.ceil(len(order) * blocks / clusters))


@given(orders, st.integers(1, 300), st.integers(2, 140), st.sampled_from(["level", "even", "best"]))
def test_pieces_have_slots_in_the_order_of_k_and_are_summed_once(order, blocks, clusters, cut):
    made = split(order, blocks, clusters, 2, 8, cut)
    assert_once(order, blocks, items_of(made))
    items = [item for own in items_of(made) for item in own]
    assert made.load == max(sum(i.end - i.first for i in own) for own in items_of(made))
    slots = sorted(item.slot for item in items if item.slot >= 0)
    assert slots == list(range(made.slots))
    for item in items:
        assert (item.slot < 0) == (item.end - item.first == blocks)
    of = {}
    for item in sorted(items, key=lambda item: item.first):
        of.setdefault((item.x, item.y), []).append(item.slot)
    cut_tiles = {tile: own for tile, own in of.items() if own[0] >= 0}
    assert all(own == list(range(own[0], own[0] + len(own))) for own in cut_tiles.values())
    assert len(made.sums) == 2 * 2 * len(made.items)
    sums = [part for own in sums_of(made) for part in own]
    places = [(part.x, part.y, part.rank, part.half, part.strip) for part in sums]
    assert len({*places}) == len(places) == len(cut_tiles) * 2 * 2 * 8
    for part in sums:
        own = cut_tiles[part.x, part.y]
        assert (part.slot, part.pieces) == (own[0], len(own))


@example(tiles(768, 768, 256, 256), 256, 66)
@given(orders, st.integers(1, 300), st.integers(1, 70))
def test_words_say_what_the_plan_says(order, blocks, clusters):
    made = split(order, blocks, clusters, 2, 4)
    words = made.words
    assert words is made.words and not words.flags.writeable
    assert words.dtype == np.int32 and words.shape[1] == 4
    for c, own in enumerate(items_of(made)):
        first, end = words[c, :2]
        rows = [(i.x, i.y, i.first | i.end << 16, i.slot) for i in own]
        assert words[first:end].tolist() == [list(row) for row in rows]
    for w, own in enumerate(sums_of(made)):
        first, end = words[len(made.items) + w, :2]
        for row, part in zip(words[first:end], own, strict=True):
            where, slots = int(row[2]), int(row[3])
            assert (where >> 8, where >> 4 & 1, where & 15) == (part.rank, part.half, part.strip)
            assert (slots & 0xFFFF, slots >> 16) == (part.slot, part.pieces)
    ends = [words[i, 1] for i in range(len(made.items))]
    assert max(ends) + 1 < len(words)  # a consumer reads up to two rows after its last


def test_slots_are_the_same_however_lists_are_ordered():
    """The order of a sum is of k, not of who multiplies: so equal bits on any number of blocks."""
    order = tiles(768, 768, 256, 256)
    lists = level(order, 256, 66)
    _, slots = slotted(lists, 256)
    shuffled, again = slotted(lists[::-1], 256)
    firsts = {}
    for item in (item for own in shuffled for item in own):
        firsts.setdefault((item.x, item.y), []).append((item.slot, item.first))
    assert {t: n for t, (_, n) in slots.items()} == {t: n for t, (_, n) in again.items()}
    assert all(sorted(own) == sorted(own, key=lambda pair: pair[1]) for own in firsts.values())


# ---- Launches


def shapes(form, m, n, k):
    """Name -> shape of a product's operands."""
    wide, two = 2 * n if form.epilogue == "swiglu" else n, form.way.aux == "tiles"
    made = {
        "a": (k, m) if form.layout[0] == "T" else (m, k),
        "b": (k, wide) if form.layout[1] == "N" else (wide, k),
        "c": (m, n),
        "aux": {"": None, "bias": (n,), "tile": (m, n)}.get(form.way.aux, (1, 2, m, n)),
        "second": ((1, 2, m, n) if two else (m, wide)) if form.second else None,
        "sums": None if form.sums == "no" else (n,),
    }
    return {name: shape for name, shape in made.items() if shape}


def arrays(form, m, n, k, make=np.zeros):
    """Operands of zeros."""
    wide = {"sums"} | ({"c"} if form.out == "float32" else set())
    made = shapes(form, m, n, k).items()
    return {name: make(x, np.float32 if name in wide else np.uint16) for name, x in made}


def view(shape, kind):
    """Zeros inside of a larger array of nan: 16 bytes to the left, a row above and one below, and
    to the right as much as rows that are 16 bytes apart need, and 16 bytes more."""
    if len(shape) == 1:
        return np.zeros(shape, kind)
    if len(shape) == 4:  # gates and ups, side by side
        _, two, m, n = shape
        made = view((m, two * n), kind).reshape(1, m, two, n).swapaxes(1, 2)
        assert made.base is not None and made.shape == shape
        return made
    step = 16 // np.dtype(kind).itemsize
    whole = np.empty((shape[0] + 2, (cover(shape[1], step) + 2) * step), kind)
    whole.view(np.uint8)[...] = 0xFF  # nan of bf16 and of float32
    inside = whole[1:-1, step : step + shape[1]]
    inside[...] = 0
    return inside


def assert_untouched(array):
    """What lies around a view is still nan, but for the 16 bytes that its rows end in."""
    if array.ndim > 1:
        width = math.prod(array.shape) // array.shape[-2]
        whole = array.base.copy().view(np.uint8)
        whole[1:-1, 16 : 16 + cover(width * array.itemsize, 16) * 16] = 0xFF
        assert (whole == 0xFF).all()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_launches_fit_the_machine_and_the_maps_the_ring(form):
    kernel = gemm_kernel(form)
    assert kernel.shared == SHARED <= SHARED_LIMIT and kernel.threads == THREADS
    of = arrays(form, 2000, 1024, 4096)
    first = product(form, **of)[0]
    assert first.grid[0] % form.cluster == 0 and first.grid[0] <= MULTIPROCESSORS
    map_a, map_b, map_c = first.args[:3]
    rows = 128 // (64 if form.layout[0] == "T" else 128)  # boxes of a k-block of A
    each = 128 if form.epilogue == "swiglu" else form.columns // form.cluster  # rows of B's boxes
    columns = form.columns // (64 if form.layout[1] == "N" else each)
    each_of_b = math.prod(map_b.box) * columns * (2 if form.halved else 1)
    fetched = math.prod(map_a.box) * rows + each_of_b
    assert 2 * fetched == form.stage
    beside = math.prod(first.args[4].box) * 2 if form.beside else 0  # bytes of a box that is met
    used = form.stage * form.stages + 4 * form.beside * beside
    assert used == RING or form.narrow and RING - used < form.stage
    assert form.bays - form.stage < form.stage * form.stages <= form.bays and form.stages > 3
    assert wgmma_form.bays_bars(form) + 24 * wgmma_form.STRIPS <= 256  # the room for mbarriers
    assert math.prod(map_c.box) * of["c"].dtype.itemsize == 8192
    assert all(array.box[-1] * array.array.dtype.itemsize == 128 for array in (map_a, map_b, map_c))


def test_pieces_have_room_and_a_launch_of_their_own():
    form = Form(**WIDE, cluster=2, pieces="after")
    multiply, sums = product(form, **arrays(form, 768, 768, 16384))
    assert sums.kernel is sum_kernel(form) and multiply.kernel is gemm_kernel(form)
    who = plan(form, 768, 768, 16384)
    space = space_bytes(form, 768, 768, 16384)
    assert multiply.args[6].nbytes == space == 128 + who.slots * 2 * PIECE
    assert sums.grid == multiply.grid == (len(who.items) * 2,)
    whole_tiles = product(form, **arrays(form, 50304, 768, 64))
    assert len(whole_tiles) == 1, "nothing to sum, nothing launched"


def test_one_kernel_serves_many_products():
    assert gemm_kernel(Form("NN")) is gemm_kernel(Form("NN"))
    assert gemm_kernel(Form("NN")) is not gemm_kernel(Form("NT"))


def test_what_was_measured_is_chosen_and_what_is_like_it():
    for (layout, epilogue, out, second), of in wgmma_launch.MEASURED.items():
        for (pingpong, cluster, pieces, *narrow), timed in of.items():
            wanted = Form(layout, pingpong, cluster, epilogue, out, pieces, second)
            for size in timed:
                form = choose(layout, size, epilogue, out, second)
                assert form == replace(wanted, narrow=narrow == [True])
    assert choose("NT", (32768, 2048, 1024)).pingpong  # 16384 x 2304 x 768 and 3072 are near
    assert choose("TN", (768, 768, 8192), "add", "float32").cluster == 1
    far = choose("NT", (1 << 17, 2304, 768))
    assert far == Form("NT", True, 2)  # by the rule
    gated = choose("NN", (32768, 2048, 768), "swiglu backward", second=True)
    assert gated == Form("NN", True, 2, "swiglu backward", second=True)  # by the rule
    few = choose("NN", (8, 8, 8), "swiglu backward", second=True)
    assert few == Form("NN", True, 1, "swiglu backward", second=True)
    bent = choose("NT", (16384, 3072, 768), "gelu backward", second=True, sums="store")
    assert bent == Form("NT", True, 2, "gelu backward", second=True, sums="store")


@given(
    st.sampled_from(["NT", "NN", "TN"]), st.sampled_from([*wgmma_form.EPILOGUES]), st.booleans(),
    st.sampled_from(["no", "store"]), st.tuples(*[st.sampled_from([1, 8, 768, 4096, 60000])] * 3),
)  # fmt: skip
def test_there_is_a_form_for_every_product(layout, epilogue, second, sums, size):
    way = wgmma_form.EPILOGUES[epilogue]
    for out in way.outs:
        summed = sums if way.sums and out == "bf16" else "no"
        two = (second or way.aux == "tiles") and way.second
        form = choose(layout, size, epilogue, out, two, summed)
        assert (form.epilogue, form.out, form.sums) == (epilogue, out, summed)


def test_the_choice_splits_where_whole_tiles_leave_the_machine_idle():
    assert choose("TN", (768, 768, 16384), "add", "float32").pieces == "together"
    assert choose("NT", (8192, 8192, 8192)).pieces == "no"  # 15.5 rounds of tiles are almost 16
    curved = choose("NT", (16384, 3072, 768), "bias and gelu")
    assert curved.cluster == 1 and not curved.pingpong
    assert choose("NN", (16384, 3072, 768), "gelu backward", second=True, sums="add").cluster == 2
    assert not choose("NT", (16384, 768, 3072)).pingpong  # deep: its bytes cost more than they hide
    assert choose("NT", (16384, 768, 768)).pieces == "no"
    form = choose("TN", (768, 768, 16384), "add", "float32")
    busy = 18 * 256 / (132 * plan(form, 768, 768, 16384).load)
    assert busy > 0.94  # of the blocks' time, 18 tiles of 256 k-blocks for 132 blocks


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(layout="TT"), "layouts are NT, NN, TN"),
        (dict(cluster=3), "clusters 1 or 2"),
        (dict(epilogue="relu"), "epilogues are store, add, bias"),
        (dict(out="float32", epilogue="bias"), "'bias' goes to bf16, not to float32"),
        (dict(epilogue="add"), "'add' goes to float32, not to bf16"),
        (dict(out="float64"), "'store' goes to bf16 or float32, not to float64"),
        (dict(second=True), "'store' has no second array to store"),
        (dict(sums="yes"), "sums are no, store or add"),
        (dict(sums="add", epilogue="bias"), "columns of 'bias' to bf16 are not summed"),
        (dict(sums="add", out="float32"), "columns of 'store' to float32 are not summed"),
        (dict(pingpong=True, out="float32"), "float32 is not ping-pong"),
        (dict(epilogue="swiglu backward", second=True), "swiglu backward is"),
        (dict(epilogue="swiglu backward", pingpong=True), "'swiglu backward' stores two arrays"),
        (dict(narrow=True, pingpong=True), "'store' in tiles of 192 columns: cooperative"),
        (dict(narrow=True, pieces="after"), "'store' in tiles of 192 columns: cooperative, whole"),
        (dict(narrow=True, epilogue="residual"), "'residual' in tiles of 192 columns"),
        (dict(pieces="later"), "pieces no, together or after"),
        (dict(pieces="after", epilogue="bias"), "pieces come with store and add alone"),
        (dict(pieces="after", sums="store"), "pieces come with store and add alone"),
    ],
)
def test_forms_that_there_are_not(change, message):
    with pytest.raises(UserError, match=message):
        Form(**change)


def replaced(form, name, array, m=256, n=256, k=128):
    """Launches of a product one of whose operands is another array."""
    return product(form, **(arrays(form, m, n, k) | {name: array}))


TWO, BACK = Form(epilogue="bias and gelu", second=True), Form("NN", epilogue="gelu backward")
UNGATED = dict(epilogue="swiglu backward", pingpong=True, second=True)


@pytest.mark.parametrize(
    "form, name, array, message",
    [
        (Form(), "a", np.zeros((256, 64), np.uint16), "does not give"),
        (Form(), "c", np.zeros((256, 255), np.uint16), "does not give"),
        (Form(epilogue="swiglu"), "b", np.zeros((511, 128), np.uint16), "does not give"),
        (Form(), "b", np.zeros((256, 128), np.float32), "expected uint16, uint16, uint16"),
        (Form("TN", out="float32"), "c", np.zeros((256, 256), np.uint16), "expected .* float32"),
        (Form(epilogue="bias"), "aux", None, r"aux of 'bias' is \(\(256,\), 'uint16'\), not None"),
        (Form(epilogue="bias"), "aux", np.zeros(256, np.float32), "aux of 'bias' is .*float32"),
        (BACK, "aux", np.zeros((256, 255), np.uint16), "aux of 'gelu backward' is"),
        (Form(), "aux", np.zeros(256, np.uint16), "aux of 'store' is nothing"),
        (TWO, "second", None, "second array of 'bias and gelu' is"),
        (BACK, "second", np.zeros((256, 256), np.uint16), "second array .* is nothing"),
        (Form(**UNGATED), "aux", np.zeros((256, 512), np.uint16), r"\(1, 2, 256, 256\)"),
        (Form(**UNGATED), "second", np.zeros((1, 2, 256, 512), np.uint16)[..., ::2], "pad the"),
        (Form(sums="add"), "sums", np.zeros(256, np.uint16), "sums is .* not .*uint16"),
        (Form(sums="add"), "sums", np.zeros((256, 2), np.float32)[:, 0], "sums is dense, not 8"),
        (Form(epilogue="bias"), "aux", np.zeros(512, np.uint16)[::2], "is dense, not 4 bytes"),
        (Form(), "sums", np.zeros(256, np.float32), "sums is nothing"),
        (Form(), "a", np.zeros((256, 256), np.uint16)[:, ::2], "pad the rows"),
        (Form(), "a", np.zeros((256, 132), np.uint16)[:, :128], "pad the rows"),
        (Form(), "c", DeviceArray(520, (256, 256), np.dtype("uint16"), (512, 2)), "from 520: pad"),
    ],
)
def test_operands_that_do_not_fit(form, name, array, message):
    with pytest.raises(UserError, match=message):
        replaced(form, name, array)


def test_sizes_that_kernels_cannot_hold():
    for form in Form(epilogue="bias"), Form(sums="store"):
        with pytest.raises(UserError, match="come in eights, not 12"):
            sizes(form, Operands(**arrays(form, 8, 12, 8, view)))
    gated = Form(epilogue="swiglu", second=True)
    with pytest.raises(UserError, match="gates that are stored come in sixty-fours, not 72"):
        sizes(gated, Operands(**arrays(gated, 8, 72, 8)))
    long = (1 << 15) * TILE_K
    a, b = (DeviceArray(0, (8, long), np.dtype("uint16"), (2 * long, 2)) for _ in "ab")
    with pytest.raises(UserError, match="k is at most 2097088, not 2097152"):
        sizes(Form(), Operands(a, b, np.zeros((8, 8), np.uint16)))
    a, b = np.zeros((2, 8, 0), np.uint16)
    with pytest.raises(UserError, match="does not give"):
        sizes(Form(), Operands(a, b, np.zeros((8, 8), np.uint16)))


# ---- Ways out, on paper

BF16, F32 = 2.0**-8, 2.0**-24  # the relative error of one rounding, at most
SLOPE = 1.13  # of GELU and of silu, at most
BEFORE = 3.0  # what is in an array that is added to


def gelu(x):
    """GELU and its slope, in float64."""
    t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    steep = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return x / 2 * (1 + t), (1 + t) / 2 + x / 2 * (1 - t * t) * steep


def gelu_exact(x):
    """The exact GELU and its slope, in float64."""
    below = np.vectorize(lambda x: math.erfc(-x / math.sqrt(2)) / 2)(x)
    return x * below, below + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def relu2(x):
    """ReLU squared and its slope, in float64."""
    above = np.maximum(x, 0)
    return above * above, 2 * above


CURVES = {"gelu": gelu, "gelu_exact": gelu_exact, "relu2": relu2}


def silu(x):
    return x / 2 * (1 + np.tanh(x / 2))


def silu_slope(x):
    sigma = (1 + np.tanh(x / 2)) / 2
    return sigma * (1 + x * (1 - sigma))


def expected(form, s, e, aux):
    """Name -> what a form stores, from float64 sums s with errors of at most e; and its bounds.

    Each rounding to bf16 costs BF16 of the value; curves are evaluated in float32, in at most 16
    operations on values no larger than their argument or what comes out. Of the exact GELU the
    share's relative error, (1.5 u^2 + 24) F32 below zero, is at most 16 F32 of one.
    """
    way = form.epilogue
    if way.startswith("bias and"):
        u = s + aux
        h, slope = CURVES[way.removeprefix("bias and ")](u)
        before = e + F32 * abs(u) + (BF16 * abs(u) if form.second else 0)
        steep = 2 * (abs(u) + before) if "relu2" in way else SLOPE
        made = {"c": (h, steep * before + 16 * F32 * abs(u) + (F32 + BF16) * abs(h))}
        made |= {"second": (u, e + (F32 + BF16) * abs(u))} if form.second else {}
    elif way.removesuffix(" backward") in CURVES:
        h, slope = CURVES[way.removesuffix(" backward")](aux)
        steep = abs(slope) if "relu2" in way else SLOPE
        error = steep * e + 16 * F32 * abs(s) * (1 + abs(aux)) + BF16 * abs(s * slope)
        made = {"c": (s * slope, error)}
        made |= {"second": (h, 16 * F32 * abs(aux) + (F32 + BF16) * abs(h))} if form.second else {}
    elif way == "swiglu backward":
        (gates, ups), slope = aux[0], silu_slope(aux[0, 0])
        c, of_gate, of_up = silu(gates) * ups, s * ups * slope, s * silu(gates)
        by_gate = SLOPE * e * abs(ups) + 16 * F32 * abs(s * ups) * (1 + abs(gates))
        by_up = e * abs(silu(gates)) + 16 * F32 * abs(s * gates)
        both = np.stack([of_gate, of_up])[None]
        made = {"c": (c, 16 * F32 * abs(gates * ups) + BF16 * abs(c)),
                "second": (both, np.stack([by_gate, by_up])[None] + BF16 * abs(both))}
    elif way == "swiglu":
        gates, ups = np.split(s, 2, axis=1)
        by_gate, by_up = (part + (BF16 if form.second else 0) * abs(x)
                          for part, x in zip(np.split(e, 2, axis=1), (gates, ups), strict=True))
        error = SLOPE * by_gate * (abs(ups) + by_up) + abs(silu(gates)) * by_up
        c = silu(gates) * ups
        made = {"c": (c, error + 16 * F32 * abs(gates * ups) + BF16 * abs(c))}
        made |= {"second": (s, e + BF16 * abs(s))} if form.second else {}
    else:
        c = s + (aux if form.way.aux else BEFORE if way == "add" else 0)
        made = {"c": (c, e + (F32 + (BF16 if form.out == "bf16" else F32)) * abs(c))}
    if form.sums != "no":
        c, error = made["c"]
        before = BEFORE if form.sums == "add" else 0
        rounding = F32 * (len(c) * abs(c).sum(0) + 2 * before)
        made["sums"] = c.sum(0) + before, error.sum(0) + rounding
    return made


def turned(by, D, s, e):
    """Sums s with errors e, their first heads turned; both tables are float32, and exact here."""
    if by is None:
        return s, e
    s, e, T, N = s.copy(), e.copy(), by.T, by.columns // D
    cos, sin = (np.tile(x[:T].astype(float), (len(s) // T, 1))[:, None] for x in (by.cos, by.sin))
    (a, b), (a_off, b_off) = (
        x[:, : N * D].reshape(len(s), N, 2, D // 2).transpose(2, 0, 1, 3).copy() for x in (s, e)
    )
    sizes = abs(a * cos) + abs(b * sin), abs(a * sin) + abs(b * cos)
    # Two products and their sum, each rounded once.
    off = a_off * abs(cos) + b_off * abs(sin), a_off * abs(sin) + b_off * abs(cos)
    for x, parts in ((s, (a * cos - b * sin, a * sin + b * cos)),
                     (e, [o + 2 * F32 * size for o, size in zip(off, sizes, strict=True)])):
        x[:, : N * D] = np.stack(parts, 2).reshape(len(s), N * D)
    return s, e


def on_paper(
    form, m, n, k, seed=None, blocks=1, draw=0, scale=1.0, turn=None, over=True, **more
):  # fmt: skip
    """What a form stores, by name; what is expected, with the most it may be off; reports.

    All are views, and what lies around them has to stay as it is. over: what a backward stores
    beside C goes over what it met.
    """
    rng, of = np.random.default_rng(draw), arrays(form, m, n, k, view)
    for name in sorted(of.keys() & {"a", "b", "aux"}):
        of[name][...] = to_bf16(scale * rng.standard_normal(of[name].shape, np.float32))
    exact = {name: from_bf16(of[name]).astype(float) for name in of.keys() & {"a", "b", "aux"}}
    a = exact["a"].T if form.layout[0] == "T" else exact["a"]
    b = exact["b"].T if form.layout[1] == "T" else exact["b"]
    s, e = turned(turn, form.way.turn, a @ b, k * F32 * (abs(a) @ abs(b)))
    wanted = expected(form, s, e, exact.get("aux"))
    fresh = [of["c"]]
    if "backward" in form.epilogue and form.second and over:
        of["second"] = of["aux"]  # GELU over U
    elif form.second:
        fresh.append(of["second"])
    for name, way in (("sums", form.sums), ("c", form.epilogue)):
        if way == "add":
            of[name][...] = BEFORE
            fresh = [array for array in fresh if array is not of[name]]
    launches = product(form, **of, turn=turn, blocks=blocks, **more)
    reports = [run(launch, seed, fresh=fresh) for launch in launches]
    for array in of.values():
        assert_untouched(array)
    return {name: of[name] for name in wanted}, wanted, reports


def values(array):
    return from_bf16(array).astype(float) if array.dtype == np.uint16 else array.astype(float)


def wrong(got, wanted):
    """Names of what is stored and is farther off than it may be."""
    return [name for name, (want, bound) in wanted.items()
            if not (abs(values(got[name]) - want) <= bound).all()]  # fmt: skip


GATED = dict(layout="NN", epilogue="swiglu", second=True)


@pytest.mark.parametrize(
    "form, size, draws",
    # Ragged, one element of 8 columns, more blocks than tiles, rings that wrap, large values.
    thinned([
        (dict(epilogue="bias and gelu", second=True), (136, 136, 72), dict(seed=0)),
        (dict(epilogue="bias and gelu", second=True, pingpong=True), (72, 264, 328), {}),
        (dict(layout="NN", epilogue="gelu backward"), (72, 264, 328), dict(seed=1)),
        (dict(layout="NN", epilogue="gelu backward", second=True, sums="store"),
         (136, 136, 328), dict(blocks=2, seed=2)),
        (dict(epilogue="gelu backward", second=True, sums="add", cluster=2),
         (136, 136, 72), dict(blocks=2)),
        (dict(layout="NN", epilogue="gelu backward", second=True), (1, 8, 8), dict(blocks=2)),
        (dict(layout="NN", epilogue="gelu backward", second=True), (64, 64, 16), dict(scale=1e4)),
        (dict(epilogue="swiglu", second=True), (72, 192, 72), dict(seed=3)),
        (dict(epilogue="swiglu", cluster=2), (136, 72, 328), dict(blocks=2)),
        (dict(layout="NN", epilogue="swiglu"), (72, 136, 328), {}),
        (dict(layout="NN", epilogue="swiglu", second=True, cluster=2), (72, 128, 72),
         dict(blocks=2, seed=4)),
        (dict(layout="TN", epilogue="swiglu", second=True), (8, 64, 8), dict(scale=30)),
        (dict(epilogue="residual", sums="add"), (136, 136, 72), {}),
        # ping-pong: tiles of both consumers, and more than one of each
        (dict(layout="NN", epilogue="gelu backward", second=True, sums="store", pingpong=True),
         (72, 392, 328), dict(seed=1)),
        (dict(epilogue="gelu backward", pingpong=True, cluster=2), (136, 264, 72),
         dict(blocks=2, seed=2)),
        (dict(epilogue="residual", sums="add", pingpong=True), (72, 264, 72), dict(seed=3)),
        (UNGATED, (72, 392, 328), dict(seed=4)),
        (UNGATED | dict(layout="NN"), (136, 344, 72), dict(seed=5, over=False)),
        (UNGATED | dict(cluster=2), (264, 136, 136), dict(blocks=2, seed=6)),
        (UNGATED | dict(layout="NN", cluster=2), (9, 72, 456), dict(blocks=4)),
        (UNGATED, (1, 8, 8), {}),
        (UNGATED, (72, 648, 72), dict(seed=7)),  # three tiles of each consumer
        (UNGATED | dict(layout="TN"), (8, 704, 8), dict(scale=30)),
        (GATED | dict(pingpong=True), (72, 192, 72), dict(seed=8)),
        (dict(epilogue="swiglu", pingpong=True, cluster=2), (136, 72, 328), dict(blocks=2)),
        (GATED | dict(layout="NT", pingpong=True), (200, 320, 328), dict(seed=9)),
        (GATED | dict(pingpong=True, cluster=2), (264, 128, 72), dict(blocks=2, scale=30)),
        (dict(layout="NN", sums="add", pingpong=True), (136, 136, 456), {}),
        (dict(layout="NN", sums="store"), (136, 264, 72), dict(blocks=3)),
        # views, odd sizes; 209 is 17 more than a multiple of 64, as a vocabulary of 50257 is
        (dict(layout="NT"), (137, 131, 209), {}),
        (dict(layout="NN", cluster=2), (9, 131, 77), dict(blocks=2)),
        (dict(layout="NN", pingpong=True), (131, 137, 209), dict(seed=5)),
        (dict(layout="NN", pingpong=True, epilogue="bias"), (72, 264, 456), {}),
        (dict(layout="NN", pingpong=True, cluster=2, epilogue="bias and gelu", second=True),
         (136, 136, 328), dict(blocks=2, seed=6)),
        (dict(layout="TN", epilogue="add", out="float32"), (67, 131, 77), {}),
        # tiles of 192 columns: B's boxes by columns, by halves of a k-block, and in a ragged one
        (dict(layout="NT", narrow=True), (136, 264, 328), {}),
        (dict(layout="NT", narrow=True, cluster=2, sums="add"), (264, 200, 328), dict(blocks=2)),
        (dict(layout="NN", narrow=True, epilogue="bias"), (72, 392, 200), dict(seed=3)),
        (dict(layout="NN", narrow=True, cluster=2), (9, 211, 209), dict(blocks=4, seed=4)),
        (dict(layout="NN", narrow=True, cluster=2, epilogue="bias and gelu", second=True),
         (264, 200, 72), dict(blocks=2)),
        (dict(layout="TN", narrow=True, epilogue="add", out="float32"), (67, 211, 137), {}),
        (dict(layout="TN", narrow=True, out="float32", cluster=2), (264, 136, 72), dict(blocks=2)),
        (dict(layout="TN", epilogue="add", out="float32", cluster=2, pieces="after"),
         (67, 131, 137), dict(blocks=4)),
    ], 3),
)  # fmt: skip
def test_ways_out_against_float64(form, size, draws):
    got, wanted, _ = on_paper(Form(**form), *size, **draws)
    assert not wrong(got, wanted)


EXACT = "bias and gelu_exact", "gelu_exact backward"


@pytest.mark.parametrize("form, size, draws", [
    (dict(epilogue=EXACT[0], second=True, pingpong=True), (72, 136, 72), {}),
    (dict(layout="NN", epilogue=EXACT[0]), (72, 136, 72), dict(scale=3)),
    (dict(layout="NN", epilogue=EXACT[1], second=True, sums="add"), (72, 136, 72), dict(seed=1)),
    (dict(epilogue=EXACT[1], second=True, sums="store", pingpong=True), (72, 136, 72), {}),
    (dict(layout="NN", epilogue=EXACT[1], second=True), (64, 64, 16), dict(scale=1e4)),
])  # fmt: skip
def test_ways_out_of_the_exact_gelu(form, size, draws):
    got, wanted, _ = on_paper(Form(**form), *size, **draws)
    assert not wrong(got, wanted)


SQUARED = "bias and relu2", "relu2 backward"


@pytest.mark.parametrize("form, size, draws", [
    (dict(epilogue=SQUARED[0], second=True, pingpong=True), (72, 136, 72), {}),
    (dict(layout="NN", epilogue=SQUARED[1], second=True, sums="add"), (72, 136, 72), dict(seed=1)),
])  # fmt: skip
def test_ways_out_of_relu_squared(form, size, draws):
    got, wanted, _ = on_paper(Form(**form), *size, **draws)
    assert not wrong(got, wanted)


def test_gelu_for_relu_squared_is_seen():
    form, kind = Form("NN", epilogue=SQUARED[0]), "engines.gpu.gemm.epilogue"
    flaw = Mutant(kind, "curve_of", "gelu", '"bias and relu2": curves.relu2',
                  '"bias and relu2": curves.gelu_fast')  # fmt: skip
    with exchanged(load(flaw)):
        assert wrong(*on_paper(form, 72, 136, 8)[:2]) == ["c"]


def test_the_tanh_form_for_the_exact_gelu_is_seen():
    """Of sums so short that their error hides nothing: the two differ by 4e-4 near -3."""
    form, kind = Form("NN", epilogue=EXACT[0]), "engines.gpu.gemm.epilogue"
    flaw = Mutant(kind, "curve_of", "tanh", '"bias and gelu_exact": curves.gelu_exact',
                  '"bias and gelu_exact": curves.gelu_fast')  # fmt: skip
    assert not wrong(*on_paper(form, 72, 136, 8)[:2])
    with exchanged(load(flaw)):
        assert wrong(*on_paper(form, 72, 136, 8)[:2]) == ["c"]


def test_the_exact_gelu_takes_the_form_of_the_other():
    size = 16384, 3072, 768
    for layout, kind in ("NN", "bias and gelu"), ("NT", "gelu backward"):
        one = choose(layout, size, kind, second=True)
        other = choose(layout, size, kind.replace("gelu", "gelu_exact"), second=True)
        assert replace(other, epilogue=kind) == one


def test_the_word_at_which_grids_wait_serves_one_launch_after_the_other():
    """Whatever the grids and the order in which blocks come: only the last turns the top bit."""
    rng, word = np.random.default_rng(0), 0
    for launch in range(1000):
        blocks = int(rng.integers(1, 133))
        assert word == launch % 2 << 31
        top = word >> 31
        for i, block in enumerate(rng.permutation(blocks)):
            word = (word + wgmma_kernel.arrival(int(block), blocks)) % 2**32
            assert word >> 31 == (top if i + 1 < blocks else 1 - top)


CUT = dict(layout="TN", out="float32", pieces="together")
SEQUENCE = (  # form, sizes, blocks
    (CUT, (67, 131, 137), 3), (dict(layout="NN", sums="store"), (8, 16, 8), 1),
    (dict(layout="NN", cluster=2, pieces="together"), (8, 8, 72), 4), (CUT, (67, 131, 137), 3),
)  # fmt: skip


def test_one_workspace_serves_products_that_follow_each_other():
    """As large as the largest needs, with anything in it but zero in its first word."""
    made = [(Form(**form), size, blocks) for form, size, blocks in SEQUENCE]
    need = max(space_bytes(form, *size, blocks) for form, size, blocks in made)
    space, seen, grids = np.full(need // 4, -1, np.int32), [], []
    space[0] = 0
    for form, size, blocks in made:
        got, wanted, _ = on_paper(form, *size, blocks=blocks, space=space, seed=blocks)
        seen.append(got)
        grids.append(form.pieces == "together")
        assert not wrong(got, wanted)
        assert space.view(np.uint32)[0] == sum(grids) % 2 << 31
    assert (seen[0]["c"] == seen[-1]["c"]).all()


def test_a_workspace_that_is_too_small_is_refused():
    form = Form(**CUT)
    need = space_bytes(form, 768, 768, 16384)
    assert need == 128 + plan(form, 768, 768, 16384).slots * PIECE
    assert space_bytes(Form(), 768, 768, 16384) == 0
    assert space_bytes(Form(sums="add"), 768, 776, 64) == 128 + 768 // 16 * 776 * 4
    with pytest.raises(UserError, match=f"needs {need} bytes of space, not {need - 4}"):
        product(form, **arrays(form, 768, 768, 16384), space=np.zeros(need // 4 - 1, np.int32))


def test_equal_sizes_share_one_work_list_which_takes_no_time():
    begin = time.process_time()
    first = plan(Form(cluster=2), 16384, 50304, 776).words
    spent = time.process_time() - begin
    assert plan(Form(cluster=2), 16384, 50304, 776).words is first
    assert spent < 0.05  # it takes 2 milliseconds
    placed = []
    for _ in range(2):
        product(Form(), **arrays(Form(), 8, 8, 8), place=lambda a: placed.append(a) or a)
    assert placed[0] is placed[1]


@pytest.mark.parametrize(
    "form",
    [
        dict(layout="NN", epilogue="gelu backward", second=True, sums="store"),
        dict(layout="NN", epilogue="gelu backward", second=True, sums="store", pingpong=True),
        UNGATED,
        GATED | dict(pingpong=True),
    ],
    ids=["cooperative", "ping-pong", "gates", "gates forward"],
)
@pytest.mark.parametrize("seeds", kept([[1], [1, 2]], [1]), ids=len)
def test_the_order_of_blocks_and_warps_changes_no_bit(form, seeds):
    form, n = Form(**form), 128 if "swiglu" == form["epilogue"] else 72
    outcomes = [on_paper(form, 136, n, 72, None, 1)[0]]
    outcomes += [on_paper(form, 136, n, 72, seed, 2)[0] for seed in seeds]
    for other in outcomes[1:]:
        assert all((other[name] == array).all() for name, array in outcomes[0].items())


def forward_and_backward(which="gelu"):
    """GELU of the same u as the forward stores it, and as the backward takes it again."""
    two, _, _ = on_paper(Form(epilogue=f"bias and {which}", second=True), 64, 64, 72)
    back = Form("NN", epilogue=f"{which} backward", second=True)
    of = arrays(back, 64, 64, 8) | {"aux": two["second"].copy()}
    for launch in product(back, **of):
        run(launch)
    return two["c"], of["second"]


@pytest.mark.parametrize("which", ["gelu", "gelu_exact"])
def test_the_backward_takes_the_very_gelu_that_the_forward_took(which):
    forward, backward = forward_and_backward(which)
    assert (forward == backward).all()


def test_the_backward_takes_the_very_gated_values_that_the_forward_took():
    both = on_paper(Form(epilogue="swiglu", second=True), 64, 64, 72)[0]
    halves = both["second"].copy().reshape(1, 64, 2, 64).swapaxes(1, 2)
    form = Form(**UNGATED)
    of = arrays(form, 64, 64, 8) | {"aux": halves, "second": halves}
    for launch in product(form, **of):
        run(launch)
    assert (of["c"] == both["c"]).all()


def test_gates_and_ups_of_every_float_have_finite_slopes():
    """Gates as large as they get: the curve is 0 or the gate, and no slope is nan."""
    form, of = Form(**UNGATED), arrays(Form(**UNGATED), 8, 64, 8)
    of["a"][...] = of["b"][...] = to_bf16(np.float32(1))
    gates, ups = of["aux"][0]
    gates[...] = to_bf16(np.float32(np.geomspace(1e-30, 1e30, 64) * np.resize([1, -1], 64)))
    ups[...] = to_bf16(np.float32(1))
    for launch in product(form, **of):
        run(launch)
    g = from_bf16(gates).astype(float)
    assert np.isfinite(from_bf16(of["second"])).all()
    np.testing.assert_allclose(from_bf16(of["c"]), np.where(g > 0, g, 0) + np.where(
        abs(g) < 50, silu(g) - np.where(g > 0, g, 0), 0), rtol=2**-7, atol=1e-6)  # fmt: skip


def test_what_swiglus_backward_moves_is_what_was_predicted():
    """A tile of 128 x 128 over two k-blocks: gate and up come once, three arrays go once."""
    form = Form(**UNGATED)
    (report,) = on_paper(form, 128, 128, 128)[2]
    tile = 128 * 128 * 2
    assert report["copies in bytes"] == 2 * form.stage + 2 * tile
    assert report["copies out bytes"] == 3 * tile
    assert report["shared stores wavefronts"] == 3 * tile // 128  # no bank twice


def test_bytes_are_those_that_were_predicted():
    form = Form("NN", epilogue="gelu backward", second=True, sums="store")
    product_, sums = on_paper(form, 128, 256, 128)[2]
    tile = 128 * 256 * 2
    assert product_["copies in bytes"] == 2 * form.stage + tile
    assert product_["copies out bytes"] == 2 * tile  # gradient, and GELU
    assert product_["global stores bytes"] == 8 * 256 * 4  # a line of each warp
    assert product_["global stores sectors"] == 8 * 256 * 4 // 32
    assert sums["global loads bytes"] == 8 * 256 * 4 and sums["global stores bytes"] == 256 * 4


def test_stores_of_bf16_have_no_conflicts_and_those_of_float32_two_ways():
    """128 bytes of shared memory a tick at most; 128 x 256 float32 take 2048 ticks, not 1024."""
    narrow = on_paper(Form("NN"), 128, 256, 64)[2][0]
    assert narrow["shared stores wavefronts"] == 128 * 256 * 2 // 128
    wide = on_paper(Form("NN", out="float32"), 128, 256, 64)[2][0]
    assert wide["shared stores wavefronts"] == 2 * 128 * 256 * 4 // 128


ALL = dict(layout="NN", epilogue="gelu backward", second=True, sums="store")
MET = dict(layout="NN", epilogue="gelu backward")
GATED_TURNS = GATED | dict(pingpong=True)
NARROW = dict(layout="NN", narrow=True, cluster=2)
FLAWS = {  # what: (function, text in it, what it becomes, form, kind of fault or what is wrong)
    "no fence before GELU leaves": (
        "gemm.wgmma_epilogue.make_strip", "        proxy_fence()\n", "", ALL, "proxy"),
    "GELU into a box that is being read": (
        "gemm.wgmma_epilogue.make_strip", "        free(me)", "        pass", ALL,
        "race unwritten"),
    "a stage given back while warps read it": (
        "gemm.wgmma_epilogue.make_read_tile", "            barrier(1 + me.c, 128)  # all",
        "            #",
        MET, "race"),
    "the slope of the other column": (
        "gemm.epilogue.make_backward_pair", "acc[i + 1] *= high_slope",
        "acc[i + 1] *= low_slope", ALL, "c"),
    "a slope without its square": (
        "tile.curves.gelu_and_slope_fast", "(one - t * t)", "(one - t)", ALL, "c"),
    "an exact slope without its density": (
        "tile.curves.gelu_exact_and_slope", "share + u * density", "share",
        ALL | dict(epilogue="gelu_exact backward"), "c"),
    "the wrong half of U": (
        "gemm.wgmma_kernel.make_fetch_tile", "column + half * 128 + j * 64", "column + j * 64", ALL,
        "c"),
    "sums of the wrong column": (
        "gemm.column_sums.strip_columns", "lane * 2)", "(lane ^ 1) * 2)", ALL, "sums"),
    "a row dropped from the sums": (
        "gemm.column_sums.strip_columns", "acc[at] + acc[at + 2]", "acc[at]", ALL, "sums"),
    "rows of ping-pong dropped": (
        "gemm.wgmma_epilogue.make_sum_columns", "tile.line + down // 16", "tile.line",
        dict(layout="NN", sums="store", pingpong=True), "sums"),
    "the halves exchanged": (
        "gemm.column_sums.halve", "if lane & bit", "if not lane & bit", ALL, "sums"),
    "a warp's line over another's": (
        "gemm.wgmma_kernel.make_corner", " + (me.t >> 5))", ")", ALL, "sums"),
    "columns beside the last": (
        "gemm.column_sums.strip_columns", "if at < n:", "if at < n + 8:", ALL, "bounds sums"),
    "lines dropped": (
        "gemm.column_sums.columns_kernel", "for bit in (8, 16)", "for bit in (8, 8)", ALL,
        "sums"),
    "no barrier before the sums are read": (
        "gemm.column_sums.columns_kernel", "        cuda.syncthreads()\n", "", ALL,
        "race unwritten"),
    "GELU of u before it was rounded": (
        "gemm.wgmma_epilogue.make_curve", "            if second:", "            if 0:", None,
        "bits"),
    "a gate by its neighbour's up": (
        "gemm.wgmma_epilogue.make_gate", "acc[i], acc[i + away]", "acc[i], acc[i + away - 1]",
        GATED,
        "c"),
    "the upper gates twice": (
        "gemm.wgmma_epilogue.make_gate", "half * on + j", "j", GATED_TURNS, "c"),
    "the lower gates beside the upper ones": (
        "gemm.wgmma_epilogue.strips", "q % across * wide, q // across * 64", "q * wide, 0",
        GATED_TURNS, "second bounds"),
    "the lower values over the upper ones": (
        "gemm.wgmma_epilogue.make_store", "tile.row + down", "tile.row", GATED_TURNS, "c race"),
    "gates and ups through one box": (
        "gemm.wgmma_epilogue.make_store_gates", "int32(me.boxes + BOX)", "me.boxes", GATED, "race"),
    "gates fetched twice": (
        "gemm.wgmma_kernel.make_fetch_b", "column + part * of.n)", "column)", GATED, "c second"),
    "halves of a k-block that are one": (
        "gemm.wgmma_kernel.make_fetch_b", "k + rank * part_of_k", "k", NARROW, "c"),
    "halves of a k-block over each other": (
        "gemm.wgmma_kernel.make_fetch_b", "j * BOX + rank * (BOX // 2)", "j * BOX", NARROW,
        "c race unwritten"),
    "a strip too few": (
        "gemm.wgmma_epilogue.strips", "Strip(q * apart,", "Strip(min(q, 1) * apart,", NARROW,
        "c unwritten race"),
    "a third strip in the first one's box": (
        "gemm.wgmma_epilogue.of_strip", "q % form.boxes[1]", "q % 2", NARROW, "race"),
    "no fence before a bay leaves": (
        "gemm.wgmma_epilogue.make_met_strip", "        proxy_fence()\n", "", UNGATED, "proxy"),
    "a strip met before it has come": (
        "gemm.wgmma_epilogue.make_met_strip",
        "        mbarrier_wait(full + (me.c * STRIPS + q) * 8, tile.lap)\n",
        "", UNGATED, "race unwritten"),
    "a strip of the tile before": (
        "gemm.wgmma_epilogue.make_met_strip", "q) * 8, tile.lap)", "q) * 8, tile.lap ^ 1)", UNGATED,
        "race unwritten deadlock"),
    "the box of C while it is being read": (
        "gemm.wgmma_epilogue.make_met_strip", "        free(me)\n", "", UNGATED, "race"),
    "a bay given back a strip early": (
        "gemm.wgmma_epilogue.make_met_strip", "mbarrier_arrive(empty - 16)",
        "mbarrier_arrive(empty - 8)", UNGATED, "race deadlock"),
    "the last bays given back at once": (
        "gemm.wgmma_epilogue.make_leave", "            bulk_wait_read_all()\n", "", UNGATED,
        "race"),
    "a bay given back while warps read it": (
        "gemm.wgmma_epilogue.make_met_strip", "        barrier(1 + me.c, 128)\n", "",
        dict(layout="NN", epilogue="residual", pingpong=True), "race unwritten proxy"),
    "a bay filled before it is empty": (
        "gemm.wgmma_kernel.make_bring", "mbarrier_wait(empty, phase ^ 1)", "pass", UNGATED, "race"),
    "slopes of up for those of gate": (
        "gemm.wgmma_epilogue.make_send_met", "store_tile(of.second, x, y, 0, 0, bay)",
        "store_tile(of.second, x, y, 0, 0, bay + BOX)", UNGATED, "second"),
    "a slope without its curve": (
        "tile.curves.swiglu_and_slopes_fast", "sigma + silu *", "sigma + gate *", UNGATED,
        "second"),
    "an up by its neighbour's gate": (
        "gemm.epilogue.swiglu_backward_pair", "(high, high_bf16(gates)", "(high, low_bf16(gates)",
        UNGATED, "c"),
    "the upper strips twice": (
        "gemm.wgmma_kernel.make_bring", "row + q // 2 * 64)", "row)", UNGATED, "c second"),
    "a consumer's sums in the other's lines": (
        "gemm.wgmma_epilogue.make_sum_columns", "tile.line + down", "tile.line + 0 * down",
        ALL | dict(pingpong=True),
        "sums"),
}  # fmt: skip


def outcome_of(form):
    """What is noticed of a product: the kind of a fault, or what is wrong."""
    try:
        if form is None:
            forward, backward = forward_and_backward()
            return [] if (forward == backward).all() else ["bits"]
        # A second tile where something has to follow the first one's.
        n = 264 if form is MET or form.get("pingpong") else 136
        n = 392 if form is NARROW else 128 if form in (GATED, GATED_TURNS) else n
        got, wanted, _ = on_paper(Form(**form), 72, n, 200, blocks=form.get("cluster", 1))
        return wrong(got, wanted)
    except Fault as fault:
        return [fault.kind]


@contextmanager
def exchanged(module):
    """Products with this module's functions in the place of those of the same names."""
    own = {name: value for name, value in vars(module).items()
           if callable(value) and value.__module__ == module.__name__
           and not isinstance(value, type)}  # fmt: skip
    with ExitStack() as stack:
        parts = curves, rope, wgmma_form, epilogues, wgmma_epilogue, column_sums, wgmma_split_k
        for other in *parts, wgmma_kernel, wgmma_launch:
            for name in own.keys() & vars(other).keys():
                stack.enter_context(mock.patch.object(other, name, own[name]))
        if kept := {"gelu_and_slope_fast", "gelu_exact_and_slope"} & own.keys():  # in a table
            ways = {f"{name.split('_and_')[0]} backward": own[name] for name in kept}
            pairs = {way: epilogues.make_backward_pair(curve) for way, curve in ways.items()}
            stack.enter_context(mock.patch.dict(epilogues.PAIRS, pairs))
        if "PAIRS" in vars(module):  # a table of the functions that have changed
            stack.enter_context(mock.patch.dict(epilogues.PAIRS, module.PAIRS))
        for name in "gemm_kernel", "sum_kernel", "columns_kernel":  # not those that were kept
            bare = getattr(wgmma_launch, name).__wrapped__
            stack.enter_context(mock.patch.object(wgmma_launch, name, bare))
        yield


def test_all_mistakes_have_their_place():
    for flaw, (where, old, new, *_) in FLAWS.items():
        module, name = where.rsplit(".", 1)
        source(Mutant(f"engines.gpu.{module}", name, flaw, old, new))


@pytest.mark.parametrize("flaw", thinned(FLAWS, 9))
def test_a_flaw_in_the_way_out_is_found(flaw):
    place, old, new, form, signs = FLAWS[flaw]
    module, name = place.rsplit(".", 1)
    with exchanged(load(Mutant(f"engines.gpu.{module}", name, flaw, old, new))):
        assert {*outcome_of(form)} & {*signs.split()}


# Angles of 80 positions by the width of heads.
TABLES = {D: tuple(x.astype(np.float32) for x in rope_tables(80, D)) for D in (64, 128)}
# Small products that together use every function of the kernels; which module needs which.
SMALL = {
    "columns": (dict(layout="NN", sums="add", pingpong=True), (136, 136, 8), {}),
    "biased": (dict(cluster=2, epilogue="bias"), (9, 136, 328), dict(blocks=2, seed=1)),
    "turns": (dict(layout="NN", pingpong=True, epilogue="bias and gelu", second=True),
              (72, 264, 456), {}),
    "gates": (GATED, (72, 192, 72), dict(seed=2)),
    "gates apart": (dict(epilogue="swiglu", cluster=2), (9, 72, 72), dict(blocks=2)),
    "met": (ALL, (72, 264, 200), {}),
    "met in turns": (ALL | dict(pingpong=True), (72, 264, 72), {}),
    "brought": (UNGATED | dict(cluster=2), (72, 392, 72), dict(blocks=2, seed=4)),
    "turned": (dict(layout="NN", epilogue="rope 64"), (140, 320, 72),
               dict(turn=Turning(*TABLES[64], 70, 256))),
    "pieces": (WIDE | dict(pieces="together", cluster=2), (24, 40, 137), dict(blocks=4, seed=3)),
    "pieces after": (dict(layout="TN", pieces="after"), (67, 131, 137), dict(blocks=2)),
}  # fmt: skip
NEEDS = {"column_sums": ("columns",), "wgmma_split_k": ("pieces", "pieces after")}


def play(module):
    """Products with a module's functions are right: what a mistake in it has to break."""
    with exchanged(module):
        for name in NEEDS.get(module.__name__.split(".")[-1].removeprefix("variant_"), SMALL):
            form, size, draws = SMALL[name]
            got, wanted, _ = on_paper(Form(**form), *size, **draws)
            assert not wrong(got, wanted), name


# ---- On a device that only writes down what it is told


class Driver:
    """Answers every call of the driver with success, and remembers it."""

    def __init__(self, **answers):
        self.answers, self.calls = answers, []

    def __getattr__(self, name):
        if name.startswith("CU") or name.startswith("cuuint"):
            answer = self.answers.get(name)
            return answer or (lambda value=0: SimpleNamespace() if name.startswith("CU") else value)

        def call(*args):
            self.calls.append((name, args))
            return 0, self.answers.get(name, 7)

        return call

    def args(self, name):
        return [args for called, args in self.calls if called == name]


class Everything:
    """Has any attribute: its own name."""

    def __getattr__(self, name):
        return name


def attribute():
    return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))


@pytest.fixture
def driver(monkeypatch):
    enums = "CUdevice_attribute", "CUlaunchAttributeID", "CUtensorMapDataType"
    enums += "CUtensorMapInterleave", "CUtensorMapSwizzle", "CUtensorMapL2promotion"
    enums += "CUtensorMapFloatOOBfill", "CUfunction_attribute"
    words = (ctypes.c_char * 128)()
    encoded = SimpleNamespace(getPtr=lambda: ctypes.addressof(words))
    made = Driver(
        **{name: Everything() for name in enums}, CUlaunchAttribute=attribute,
        cuDeviceGetName=b"a card\0\0", cuDeviceGetAttribute=9, cuTensorMapEncodeTiled=encoded,
        cuMemAlloc=256,
    )  # fmt: skip
    monkeypatch.setattr(device.libraries, "driver", lambda: made)
    return made


def test_a_launch_reaches_the_driver_whole(driver):
    gpu = device.Device()
    assert gpu.name == "a card"
    gpu.capability, gpu.real = (9, 0), Card((9, 0), 132, 1)
    form = Form("NT", cluster=2, pieces="together")
    there = {name: gpu.array(array) for name, array in arrays(form, 8192, 8192, 8192).items()}
    (launch,) = product(form, **there, place=gpu.array)
    gpu.load(launch.kernel, compile.Code(".entry some_kernel("))
    gpu.run(launch, stream=3)
    (config, function, (values, types), _), *more = driver.args("cuLaunchKernelEx")
    assert not more and function == 7 and config.hStream == 3
    assert (config.gridDimX, config.gridDimY, config.blockDimX) == (132, 1, THREADS)
    assert config.sharedMemBytes == SHARED and config.numAttrs == len(config.attrs) == 2
    size = config.attrs[0].value.clusterDim
    assert (size.x, size.y, size.z) == (2, 1, 1) and config.attrs[1].value.cooperative == 1
    assert [kind(value).value for kind, value in zip(types, values, strict=True)] == [*values]
    assert driver.args("cuModuleGetFunction")[0][1] == b"some_kernel"


def test_a_map_reaches_the_driver_innermost_first(driver):
    gpu = device.Device()
    device.encode(gpu, Map(gpu.empty((40, 24), np.float32), (16, 32)))
    kind, rank, _, extents, steps, box = driver.args("cuTensorMapEncodeTiled")[0][:6]
    assert kind.endswith("FLOAT32") and rank == 2
    assert (extents, steps, box) == ([24, 40], [96], [32, 16])


def test_a_kernel_for_another_card_is_refused(driver):
    with pytest.raises(UserError, match=r"gemm_wgmma is for GPUs of capability 9.0, not \(8, 6\)"):
        gpu = device.Device()
        gpu.capability = 8, 6
        gpu.load(gemm_kernel(Form()))


# ---- Instructions


def test_wgmma_names_every_register_once_for_each_step():
    text = wgmma(256, 4, 2, 2, "NT").fill([[f"r{i}" for i in range(128)], "da", "db", "keep"])
    assert text.count("wgmma.mma_async") == 4 and text.count("m64n256k16") == 4
    assert all(text.count(f"r{i},") + text.count(f"r{i}}}") == 4 for i in range(128))
    assert [f"add.s64 a, da, {step};" in text for step in (0, 2, 4, 6)] == [True] * 4
    assert text.index("wgmma.fence") < text.index("mma_async") < text.index("commit_group")
    halves = wgmma(128, 4, 128, 128, "TN", rows=2)
    assert halves.text.count("$0[0:64]") == halves.text.count("$0[64:128]") == 4
    assert halves.text.count(", 1, 1, 1, 1;") == 8  # both operands transposed


def test_a_descriptor_has_its_offsets_in_units_of_16_bytes():
    made = descriptor(8192, 1024)
    assert (made >> 16 & 0x3FFF, made >> 32 & 0x3FFF, made >> 62) == (512, 64, 1)


# ---- Machine code


def test_compiling_is_refused_where_a_gpu_is_simulated(monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UserError, match="this process simulates"):
        libraries.compiler()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="no compiler for GPUs here: numba-cuda is missing"):
        libraries.compiler()
    with pytest.raises(UserError, match="no way to call the driver here"):
        libraries.driver()


needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason=f"no compiler here: {libraries.MISSING}"
)
def store_sum():
    """A kernel of one instruction of each kind of operand."""
    address = ptx("{ .reg .u64 p; cvta.to.shared.u64 p, $1; cvt.u32.u64 $0, p; }", "p", "r", True)
    both = ptx("mov.b32 $0, $2; mov.b32 $1, $3;", "r f", "r f", True)
    first = ptx("add.f32 $0[0:1], $0[0:1], $1;", "+f*4 f")
    store = ptx("st.global.v4.f32 [$0], {$1};", "l f*4")

    def helper(values, x):
        first(values, float32(x))

    def kernel(out, x):
        values = cuda.local.array(4, float32)
        n, y = both(x, address(cuda.shared.array(0, int8)))
        for i in range(4):
            values[i] = y
        helper(values, int32(n + 1))
        store(out, values)

    return Kernel(kernel, "l r", 32, target=(8, 0))


@needs_compiler
def test_operands_arrive_where_the_text_wants_them():
    text = compile.build_all({"operands": store_sum}, 1)["operands"].text
    assert ".target sm_80" in text and f".version {compile.PTX_VERSION}" in text
    added = text[text.index("add.f32") :].split()[1:3]
    assert added[0] == added[1], "the array's register is read and written"
    stored = text[text.index("st.global.v4.f32") :].partition("{")[2].partition("}")[0].split(", ")
    assert stored[0] == added[0].strip(",") and len({*stored}) == 4


def test_registers_and_nothing_wider_than_one_is_carried_round_the_ring():
    """168 registers are what a block of 384 threads can have; setmaxnreg then deals them out.

    numba adds int32 in 64 bits; a stage that is not cast back divides and compares in 64.
    """
    lines = [dict(zip(registers.HEAD, line, strict=True)) for line in registers.read()]
    lines = [line for line in lines if line["family"] == "gemm" and line["GPU"] == "9.0a"]
    assert len(lines) > 20
    for line in lines:
        assert int(line["registers"]) <= 168 and line["divisions"] == "0", line


# ---- The script for the card


@pytest.mark.parametrize("preset, sequences, positions, chunks", card.STEPS)
def test_the_products_of_a_step_are_those_of_the_model(preset, sequences, positions, chunks):
    """A multiply-add for each row and each weight of a product, once forward and twice backward."""
    config, rows = (PRESETS | PUBLISHED)[preset], sequences * positions
    of = {name: math.prod(shape) for name, shape in parameter_shapes(config).items()}
    inside = sum(size for name, size in of.items() if ".w" in name and "bias" not in name)
    outputs = cover(config.vocab_size * config.n_predict, 64) * 64 * config.dim
    made = [*card.products_of(preset, sequences, positions, chunks)]
    name = f"{preset} {sequences}x{positions}"
    for chunk in chunks:
        parts = [one for one in made if one.step in (name, f"{name} by {chunk}")]
        work = sum(
            one.times * math.prod(one.shape) * (1 + (one.forms[0].epilogue == "swiglu"))
            for one in parts
        )
        assert work == 3 * rows * (inside + outputs)


def test_the_products_of_a_step_are_added_up():
    rows = [
        dict(what=one.what, case=one.case, engine=engine, unit="ms", value=1.0, peer="cuBLAS",
             peer_value=2.0)
        for one in card.products() if one.step
        for engine in ("cuda", card.label(one.forms[-1]))
    ]  # fmt: skip
    lines = [*card.steps(rows)]
    count = 12 * 12 + 8 + 8 + 1 + 7
    sums = f"by 2048 rows: {count}.000 ms, library {2 * count}.000: 0.500"
    assert f"step gpt2-124m 16x1024 {sums}" in lines
    assert len(lines) == sum(len(chunks) for *_, chunks in card.STEPS)
    rest = [row for row in rows if "gpt2" not in row["what"] or "qkv" not in row["what"]]
    others = sum(len(chunks) for preset, *_, chunks in card.STEPS if "gpt2" not in preset)
    left = len([*card.steps(rest)])
    assert left == others, "a step has no sum while one of its products has no time"
    best = "('NT', 'store', 'bf16', False): (True, 1, 'no'): (2048, 50304, 768),  # 1.0000 ms"
    assert best in card.fastest(rows)
