"""Attention by mma.sync without a GPU: on paper against float64, counts, planted faults, plans.

Bounds are those of test_flash_tensor.py, which say where they come from.
"""

import inspect
import math
import sys

import numpy as np
import pytest
from mutants import Mutant, load, source
from test_flash_tensor import NAMES, U, change, exact_and_bounds, in_texts, inputs, worst
from tiers import kept, thinned

from nanoeuler.emulator import Fault, run
from nanoeuler.engines.gpu.attention import (
    choice,
    layout,
    mma_backward,
    mma_forward,
    mma_launch,
    mma_parts,
    operands,
    wgmma_launch,
)
from nanoeuler.engines.gpu.attention.documents import Documents
from nanoeuler.engines.gpu.attention.layout import Backward
from nanoeuler.engines.gpu.attention.operands import Form
from nanoeuler.errors import UserError

GRADIENTS = "dq", "dk", "dv"


PARKED = {32: Form(32, 4, 64, 2, 2, park=True)}  # as of width 128, in a quarter of the time


def forward(a, plan=mma_launch, **more):
    arrays = (a[name] for name in ("q", "k", "v", "o", "lse"))
    return plan.forward_launch(*arrays, documents=a.get("documents"), **more)


def backward(a, plan=mma_launch):
    order = "do", "q", "k", "v", "o", "lse", "delta", "dq", "dk", "dv"
    return plan.backward_launches(Backward(*(a[name] for name in order)), a.get("documents"))


def play(a, seed=None, plans=(mma_launch, mma_launch)):
    """Forward and backward on paper, each by its plan; returns their reports."""
    reports = [run(forward(a, plans[0]), seed)]
    return reports + [run(launch, seed) for launch in backward(a, plans[1])]


def off(a):
    """The largest error of all results as a share of its bound; nan if anything is.

    inf where lse is wrong, or anything past T.
    """
    T, (_, lse, of_p) = a["q"].shape[2], exact_and_bounds(a)
    bound = of_p / math.log(2) + 8 * U * np.abs(lse).max()
    if not np.abs(a["lse"][..., :T] - lse).max() < bound:
        return math.inf
    if not ((a["lse"][..., T:] == np.float32(1e30)).all() and (a["delta"][..., T:] == 0).all()):
        return math.inf
    return worst(a, ("o", *GRADIENTS))


# ---- On paper


def check_forward(B, H, G, T, D, **more):
    """Run a forward pass; AssertionError unless o and lse are right."""
    a = inputs(B, H, G, T, D)
    run(forward(a, **more))
    _, lse, of_p = exact_and_bounds(a)
    assert worst(a, ("o",)) < 1
    assert np.abs(a["lse"][..., :T] - lse).max() < of_p / math.log(2) + 8 * U * np.abs(lse).max()
    assert (a["lse"][..., T:] == np.float32(1e30)).all()


def check_both(B, H, G, T, D):
    """Run both passes; AssertionError unless all results are right."""
    a = inputs(B, H, G, T, D)
    play(a)
    assert off(a) < 1


@pytest.mark.parametrize(
    "shape, seed, scale",
    [
        ((1, 4, 4, 1, 32), None, 1),   # one position, most of a tile beyond the end
        ((1, 4, 2, 5, 32), 1, 1),
        ((1, 4, 1, 63, 32), None, 1),  # the ring wraps in the heads of a group
        ((1, 1, 1, 64, 64), 2, 30),    # a tile, to the row; scores of thousands
        ((2, 1, 1, 65, 32), None, 30),
        ((1, 1, 1, 65, 128), None, 1),
        ((1, 1, 1, 130, 32), 3, 1),    # the rings of two stages wrap
    ],
)
def test_forward_and_backward(shape, seed, scale):
    a = inputs(*shape, scale=scale)
    play(a, seed)
    assert off(a) < 1


def test_a_longer_forward_whose_sums_are_parked():
    """The ring of two stages wraps twice, and all rows of a lane are there in its last block."""
    check_forward(1, 1, 1, 208, 32, forms=PARKED)


@pytest.mark.parametrize("plans", [(mma_launch, wgmma_launch), (wgmma_launch, mma_launch)])
def test_one_family_s_backward_takes_the_other_s_forward(plans):
    a = inputs(1, 1, 1, 63, 64)
    play(a, plans=plans)
    assert off(a) < 1


def test_heads_may_lie_side_by_side():
    """q, k, v, and their gradients, in the model's packed heads (B, T, H+2G, D): the same bits."""
    a = inputs(1, 2, 1, 5, 32)
    play(a)
    b = dict(a)
    for names in (("q", "k", "v"), GRADIENTS, ("do",), ("o",)):
        packed = np.concatenate([a[name] for name in names], 1).transpose(0, 2, 1, 3).copy()
        if names[0] in ("dq", "o"):
            packed[...] = 0x7FC0
        starts = np.cumsum([a[name].shape[1] for name in names])[:-1]
        parts = np.split(packed.transpose(0, 2, 1, 3), starts, axis=1)
        b |= dict(zip(names, parts, strict=True))
    b |= {name: np.full_like(a[name], np.nan) for name in ("lse", "delta")}
    play(b)
    for name in (*NAMES, "lse", "delta"):
        assert np.array_equal(a[name], b[name]), name


def test_the_order_of_blocks_and_warps_changes_no_bit():
    outcomes = []
    for seed in (None, 5):
        a = inputs(1, 2, 1, 5, 32)
        play(a, seed)
        outcomes.append([a[name].tobytes() for name in (*NAMES, "lse", "delta")])
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("D", mma_launch.WIDTHS)
def test_what_is_moved_is_what_was_predicted(D):
    """One head of 128 queries: each matrix comes once, and no bank is asked twice at a time."""
    a = inputs(1, 1, 1, 128, D)
    report = run(forward(a))
    tile = 2 * 128 * D  # bytes
    assert report["global loads bytes"] == 3 * tile
    assert report["global stores bytes"] == tile + 4 * 128
    assert report["tensor FLOPs"] == 3 * 2 * 2 * 64 * 64 * D  # three quarters of 128 x 128 pairs
    loads, rounds = report["shared loads"], report["shared loads wavefronts"]
    assert rounds == 4 * loads if D < 128 else rounds < 4 * loads  # 512 bytes by 128; or 256
    assert report["barriers"] == 2


KERNELS = "forward_kernel", "dq_kernel", "dkdv_kernel"
USERS = mma_parts, operands, mma_forward, mma_backward  # of functions of other modules


def use(wrong, monkeypatch):
    """Let kernels be made of what a module has that was made with a mistake in it."""
    right = "nanoeuler.engines.gpu.attention." + wrong.__name__.rpartition(".")[2]
    for user in *USERS, sys.modules[right]:
        for name, value in list(vars(user).items()):
            if inspect.isfunction(value) and value.__module__ == right:
                monkeypatch.setattr(user, name, getattr(wrong, name))
    if hasattr(wrong, "BF16"):
        for forms in mma_launch.FORMS, mma_launch.DQ, mma_launch.DKDV:
            for D, form in list(forms.items()):
                monkeypatch.setitem(forms, D, form._replace(operands=wrong.BF16))
    for name in KERNELS:
        made = getattr(wrong, name, getattr(mma_launch, name).__wrapped__)
        monkeypatch.setattr(mma_launch, name, made)


# ---- Several texts in a row


IN_TEXTS = [
    ((2, 2, 1, 150, 32), [[1, 63, 86], [150]], None),
    ((1, 1, 1, 150, 32), [[70, 70, 10]], 4),
    ((1, 2, 1, 260, 64), [[100, 28, 132]], 1),
    ((1, 1, 1, 140, 128), [[50, 90]], None),
]


# Those with a seed are long, as warps of their own take four times as long: one is below.
@pytest.mark.parametrize("shape, lengths, seed", kept(IN_TEXTS, IN_TEXTS[0], IN_TEXTS[3]))
def test_texts(shape, lengths, seed):
    a = in_texts(inputs(*shape), lengths)
    play(a, seed)
    assert off(a) < 1


@pytest.mark.parametrize("W", [1, 50])
def test_a_window_is_a_row_of_limits_too(W):
    a = inputs(1, 2, 1, 150, 32) | {"documents": Documents.window(150, W)}
    play(a)
    assert off(a) < 1


@pytest.mark.parametrize("H", kept([1, 2], 1))  # two blocks of queries; heads have blocks, too
def test_texts_and_the_order_of_blocks(H):
    outcomes = []
    for seed in (None, 7):
        a = in_texts(inputs(1, H, 1, 140, 32), [[33, 80, 27]])
        play(a, seed)
        outcomes.append([a[name].tobytes() for name in NAMES])
    assert outcomes[0] == outcomes[1]


WITH_TEXTS = [
    ("attention.mma_parts", "steps_from", "limits.batch, first)", "limits.batch, first + 127)"),
    ("attention.mma_parts", "forbid_others", "int32(row + 15)", "row"),
    ("attention.mma_parts", "forbid_foreign", "> limit_of(", "< limit_of("),
    ("attention.mma_forward", "whole", "int32(row + HALF), work.limits", "row, work.limits"),
    ("attention.mma_backward", "tiles_to", "limits.batch, last)", "limits.batch, last - 63)"),
]  # fmt: skip


@pytest.mark.parametrize("module, function, old, new", thinned(WITH_TEXTS, 10))
def test_mistakes_with_texts_are_seen(module, function, old, new, monkeypatch):
    use(load(Mutant(f"engines.gpu.{module}", function, "texts", old, new)), monkeypatch)
    a = in_texts(inputs(1, 1, 1, 260, 32), [[100, 120, 40]])
    try:
        play(a)
    except Fault:
        return
    assert not off(a) < 1


def test_without_documents_none_of_their_code_runs(monkeypatch):
    def never(*_):
        raise AssertionError("a kernel without documents looks a limit up")

    monkeypatch.setattr(layout, "limit_of", never)
    a = inputs(1, 1, 1, 70, 32)
    play(a)
    with pytest.raises(AssertionError, match="looks a limit up"):
        run(forward(in_texts(a, [[70]])))


# ---- Planted faults

SOFTMAX, PARTS, OPERANDS, FORWARD, BACKWARD = (
    f"engines.gpu.attention.{name}"
    for name in ("softmax", "mma_parts", "operands", "mma_forward", "mma_backward")
)
MISTAKES = [
    ("a wait is missing", FORWARD, "make_halves_loop", "here()  # this", "pass  # this"),
    ("a barrier is missing", FORWARD, "make_halves_loop", "cuda.syncthreads()  # every",
     "pass  # every"),
    ("a stage is filled too early", FORWARD, "make_halves_loop", "int32(i + stages - 1)",
     "int32(i + stages)"),
    ("o not corrected", SOFTMAX, "correct", "o[i] *= alpha[0]", "pass"),
    ("total not corrected", SOFTMAX, "follow", "total[1] *= alpha[1]", "pass"),
    ("the first half has no mask", FORWARD, "whole", "if masked:", "if False:"),
    ("a key head for each head", PARTS, "query_block", "divide(head, sizes.sharing)", "head"),
    ("lse without the maximum", SOFTMAX, "save_lse", "rows.m[h] * scale + log2", "log2"),
    ("the diagonal is forbidden", PARTS, "forbid_later", "keys, distance", "keys, distance - 1"),
    ("chunks swapped in one place", PARTS, "right", "lane >> 3 & 1", "lane >> 4 & 1"),
    ("rows past the end are copied", PARTS, "copy", "else int32(0)", "else int32(16)"),
    ("rows past the end are written", PARTS, "put_rows", "first + here < T", "True"),
    ("lanes do not wait for lanes", PARTS, "put_rows", "cuda.syncwarp()", "pass"),
    ("an operand again", OPERANDS, "make_columns_product", "tile + n * 32 * D", "tile"),
    ("values in the place of keys", OPERANDS, "make_loads", "tile + second", "tile"),
    ("delta left out", SOFTMAX, "row_gradients", "p[i + 2] * (dp[i + 2] - delta[1])",
     "p[i + 2] * dp[i + 2]"),
    ("delta not padded", SOFTMAX, "pad_line", "after >= T", "after < 0"),
    ("dq not scaled", BACKWARD, "block_of_queries", "dq, sizes.root, sizes.root,",
     "dq, sizes.scale, sizes.scale,"),
    ("a query before its key", BACKWARD, "forbid_earlier", "s, queries, distance",
     "s, queries, distance + 8"),
    ("the same head again", BACKWARD, "fill", "head * group.do_head", "0 * group.do_head"),
    ("lse of the first head", BACKWARD, "fill", "head * group.line", "0 * group.line"),
    ("dk not scaled", BACKWARD, "block_of_keys", "parts.dk, sizes.root, sizes.root",
     "parts.dk, sizes.scale, sizes.scale"),
]  # fmt: skip


@pytest.fixture(scope="module")
def before():
    """Arrays with a forward pass that is right."""
    a = inputs(1, 2, 1, 33, 32)  # delta is longer than the rows of a block
    run(forward(a))
    return a


def fails(launches, a, names):
    """Whether a run does not end well, or leaves wrong results."""
    try:
        for launch in launches:
            run(launch)
    except (Fault, UserError):
        return True
    return not worst(a, names) < 1 or not (a["delta"][..., a["q"].shape[2] :] == 0).all()


def test_all_mistakes_have_their_place():
    for what, module, function, old, new in MISTAKES:
        source(Mutant(module, function, what, old, new))
    for module, function, old, new in WITH_TEXTS:
        source(Mutant(f"engines.gpu.{module}", function, "texts", old, new))


@pytest.mark.parametrize("what, module, function, old, new", thinned(MISTAKES, 10))
def test_mistakes_are_seen(what, module, function, old, new, monkeypatch, before):
    wrong = load(Mutant(module, function, what, old, new))
    use(wrong, monkeypatch)
    if module in (BACKWARD, OPERANDS) or "delta" in what:
        a = {name: array.copy() for name, array in before.items()}
        assert fails(backward(a), a, GRADIENTS)
        return
    H = 2 if "head" in what else 1
    a = inputs(1, H, 1, 130, 32)  # four steps in the last block: the ring wraps
    a["delta"][...] = 0
    lse = exact_and_bounds(a)[1]
    wrong_results = fails([forward(a)], a, ("o",))
    assert wrong_results or not np.abs(a["lse"][..., :130] - lse).max() < 1e-3


def test_an_unswapped_tile_asks_banks_twice(monkeypatch):
    """Results are right without the swap, and only the counts tell."""
    monkeypatch.setattr("nanoeuler.engines.gpu.tile.layout.swizzle", lambda row, D: 0)
    a = inputs(1, 1, 1, 128, 32)
    report = run(forward(a))
    assert report["shared loads wavefronts"] > 4 * report["shared loads"]


# ---- Plans


@pytest.mark.parametrize(
    "capability, D, plan",
    [
        ((8, 0), 64, mma_launch), ((8, 9), 128, mma_launch), ((12, 0), 64, mma_launch),
        ((9, 0), 32, mma_launch), ((9, 0), 64, wgmma_launch), ((9, 0), 128, wgmma_launch),
    ],
)  # fmt: skip
def test_the_card_and_the_width_choose_the_family(capability, D, plan):
    a = inputs(1, 2, 1, 8, D)
    assert choice.family(capability, D) is plan
    names = "do", "q", "k", "v", "o", "lse", "delta", "dq", "dk", "dv"
    launch = choice.forward_launch(*(a[n] for n in ("q", "k", "v", "o", "lse")), capability)
    assert launch.kernel is forward(a, plan).kernel
    launches = choice.backward_launches(Backward(*(a[name] for name in names)), capability)
    assert [x.kernel for x in launches] == [x.kernel for x in backward(a, plan)]


def test_older_cards_are_refused():
    with pytest.raises(UserError, match=r"capability 8.0 or newer, and this one has 7.5"):
        choice.family((7, 5), 64)


@pytest.mark.parametrize(
    "name, to, words",
    [
        ("k", {"dtype": np.float32}, "attention's k is uint16 .*, not float32"),
        ("lse", {"shape": (1, 4, 8)}, r"attention's lse is float32 \(1, 4, 128\), not"),
        ("q", {"shape": (1, 4, 8, 96)}, "head width 32, 64 or 128, not 96"),
        ("q", {"shape": (1, 3, 8, 64)}, "3 query heads do not share 2 key heads evenly$"),
        ("q", {"shape": (1, 4, 0, 64)}, "takes one token at least, not 1 times 0"),
    ],
)
def test_forward_refuses_what_does_not_fit(name, to, words):
    with pytest.raises(UserError, match=words):
        forward(change(inputs(1, 4, 2, 8, 64), name, **to))


def test_rows_have_to_begin_at_multiples_of_16_bytes():
    a = inputs(1, 4, 2, 8, 64)
    with pytest.raises(UserError, match="attention's dq has dense rows"):
        backward(a | {"dq": np.empty((1, 4, 8, 65), np.uint16)[..., :64]})


def test_every_card_has_the_shared_memory():
    """99 KiB of a block: CUDA C++ Programming Guide, compute capability 8.6 and 8.9."""
    plan = mma_launch
    kernels = [mma_forward.forward_kernel(form) for form in plan.FORMS.values()]
    kernels += [mma_backward.dq_kernel(form) for form in plan.DQ.values()]
    kernels += [mma_backward.dkdv_kernel(form) for form in plan.DKDV.values()]
    assert max(kernel.shared for kernel in kernels) <= 99 * 1024
    assert {kernel.target for kernel in kernels} == {(8, 0)}
