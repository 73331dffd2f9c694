"""Attention of float32 arrays in pieces of bf16: on paper against float64, planted faults, plans.

Bounds are derived, element by element, in tests/helpers/attention_bounds.py; a card is held to them
too.
"""

import math
from itertools import product

import attention_bounds
import numpy as np
import pytest
from attention_bounds import PIECES, U
from bench.card import flash_pieces as flash_pieces_card
from bench.gpu import judge
from mutants import Mutant, load, source
from test_flash_tensor import NAMES, hidden, in_texts
from tiers import kept, thinned

from nanoeuler.emulator import Fault, run
from nanoeuler.engines.gpu.attention import (
    float32_launch,
    mma_backward,
    mma_forward,
    mma_launch,
)
from nanoeuler.engines.gpu.attention.documents import Documents
from nanoeuler.engines.gpu.attention.layout import Backward, padded
from nanoeuler.errors import UserError

GRADIENTS = "dq", "dk", "dv"
ARGUMENTS = "do", "q", "k", "v", "o", "lse", "delta", *GRADIENTS


def inputs(B, H, G, T, D, seed=0, scale=1.0):
    """q, k, v, do, and outputs full of nan."""
    rng = np.random.default_rng(seed)
    shapes = dict.fromkeys(NAMES, (B, H, T, D))
    shapes |= dict.fromkeys(("k", "v", "dk", "dv"), (B, G, T, D))
    shapes |= dict.fromkeys(("lse", "delta"), (B, H, padded(T)))
    a = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    for name in NAMES[:4]:
        values = rng.standard_normal(shapes[name]) * (scale if name in "qk" else 1)
        a[name][...] = values
    return a


def forward(a, pieces):
    names = "q", "k", "v", "o", "lse"
    arrays = (a[name] for name in names)
    return float32_launch.forward_launch(*arrays, pieces, a.get("documents"))


def backward(a, pieces):
    arrays = (a[name] for name in ARGUMENTS)
    return float32_launch.backward_launches(Backward(*arrays), pieces, a.get("documents"))


def play(a, pieces, seed=None):
    """Forward and backward on paper; returns their reports."""
    reports = [run(forward(a, pieces), seed)]
    return reports + [run(launch, seed) for launch in backward(a, pieces)]


def exact_and_bounds(a, pieces):
    """name -> (float64 value, largest error) of o, lse in base 2, dq, dk, dv."""
    arrays = (a[name].astype(float) for name in NAMES[:4])
    return attention_bounds.exact_and_bounds(np, *arrays, hidden(a), PIECES[pieces])


def worst(a, pieces, names=("o", "lse", *GRADIENTS)):
    """The largest error as a share of its bound; nan if anything is; inf if wrong past the end."""
    T, wanted = a["q"].shape[2], exact_and_bounds(a, pieces)
    if "lse" in names and not (a["lse"][..., T:] == np.float32(1e30)).all():
        return math.inf
    if "dq" in names and not (a["delta"][..., T:] == 0).all():
        return math.inf
    ours = {n: a[n][..., :T] if n == "lse" else a[n] for n in names}
    return max(attention_bounds.share(ours[n], *wanted[n]) for n in names)


def check_forward(shape, pieces):
    """Run the forward kernel on paper and hold o and lse to their bounds."""
    a = inputs(*shape)
    run(forward(a, pieces))
    assert worst(a, pieces, ("o", "lse")) < 1


def check_both(shape, pieces, seed=None, scale=1.0):
    """Run all kernels on paper and hold all results to their bounds."""
    a = inputs(*shape, scale=scale)
    play(a, pieces, seed)
    assert worst(a, pieces) < 1


# ---- On paper


CASES = [
    ((1, 4, 2, 1, 32), 3, None, 1),  # one position, most of a tile beyond the end
    ((1, 4, 1, 5, 32), 2, 1, 1),
    ((2, 1, 1, 65, 32), 2, None, 30),  # scores of thousands
    ((1, 2, 1, 66, 32), 3, 2, 1),
    ((1, 1, 1, 33, 64), 2, None, 1),
    ((1, 1, 1, 17, 64), 3, 3, 1),
    ((1, 1, 1, 40, 128), 2, None, 1),
    ((1, 1, 1, 3, 128), 3, None, 1),
    ((1, 1, 1, 40, 128), 3, 4, 1),  # two warps, more than one block; steps of 32
]


@pytest.mark.parametrize(
    "shape, pieces, seed, scale", kept(CASES, *(CASES[i] for i in (0, 2, 5, 6, 7)))
)
def test_forward_and_backward(shape, pieces, seed, scale):
    check_both(shape, pieces, seed, scale)


def on_a_card(a, pieces):
    """What the check on a card says of results, beside a library's that are exact."""
    wanted = exact_and_bounds(a, pieces)
    ours = {name: a[name].astype(float) for name in ("o", *GRADIENTS)}
    exact = {name: wanted[name][0] for name in ours}
    outcome = attention_bounds.outcomes(ours, exact, wanted, flash_pieces_card.LEAST[pieces])
    return judge(outcome)


@pytest.mark.parametrize("pieces, D", kept(product((2, 3), (32, 64, 128)), (2, 32), (3, 64)))
def test_a_card_is_held_to_the_same_bounds_where_nothing_is_left_of_a_difference(pieces, D):
    """Of one position dq and dk are 0: what comes is the rounding of dp and of delta."""
    a = inputs(1, 1, 1, 1, D, seed=1)
    play(a, pieces)
    outcome = on_a_card(a, pieces)
    assert {name for name, seen in outcome.items() if "unit" in seen} == {"dq", "dk"}
    a["dq"][...] = (a["do"] * a["v"]).sum() * a["k"] / math.sqrt(D)  # without delta
    with pytest.raises(ValueError, match="dq is off by"):
        on_a_card(a, pieces)


def test_a_card_is_held_to_rounding_where_something_is_left():
    """An error that no element's bound forbids is seen in the length of all."""
    a = inputs(1, 2, 1, 40, 32)
    play(a, 2)
    on_a_card(a, 2)
    wanted = exact_and_bounds(a, 2)
    a["dv"][...] = wanted["dv"][0] + 0.9 * wanted["dv"][1]
    with pytest.raises(ValueError, match="dv error .* above"):
        on_a_card(a, 2)


def full(rng, shape):
    """Numbers whose second and third piece are positive and almost as large as can be."""
    first, second = rng.integers(128, 140, shape), rng.integers(230, 251, shape)
    return (2.0**-7 * first + 2.0**-16 * second + 0.9 * 2.0**-17).astype(np.float32)


@pytest.mark.parametrize("pieces", [2, 3])
def test_all_pairs_of_pieces_count(pieces):
    """Of scores, told by lse of one position, and of probabilities by values."""
    assert pairs_seen(pieces) < 1


def pairs_seen(pieces):
    """The largest error as a share of what the pieces leave out and some roundings."""
    a, rng, D = inputs(1, 1, 1, 2, 32), np.random.default_rng(1), 32
    wanted = 0.5 * (1 + 2.0**-8 * 0.98 + 2.0**-17 * 0.9)  # a probability with such pieces
    bound = PIECES[pieces] + (D + 8) * U
    a["q"][...], a["k"][...] = full(rng, a["q"].shape), full(rng, a["k"].shape)
    run(forward(a, pieces))
    s = (a["q"][0, 0, 0].astype(float) @ a["k"][0, 0, 0]) / math.sqrt(D) / math.log(2)
    of_scores = abs(a["lse"][0, 0, 0] / s - 1) / bound
    a["q"][...] = a["k"][...] = 0
    a["q"][0, 0, 1, 0] = math.log2(wanted) * math.sqrt(D) * math.log(2)
    a["k"][0, 0, 0, 0] = 1
    a["v"][...] = full(rng, a["v"].shape)
    a["v"][0, 0, 1] = 0
    run(forward(a, pieces))
    s = a["q"][0, 0, 1, 0].astype(float) / math.sqrt(D)
    o = math.exp(s) / (math.exp(s) + 1) * a["v"][0, 0, 0].astype(float)
    return max(of_scores, np.abs(a["o"][0, 0, 1] / o - 1).max() / (PIECES[pieces] + 12 * U))


def test_heads_may_lie_side_by_side():
    """In the model's packed heads (B, T, H+2G, D), and another order of blocks: the same bits."""
    a = inputs(1, 2, 1, 5, 32)
    play(a, 2)
    b = dict(a)
    for names in (("q", "k", "v"), GRADIENTS, ("do",), ("o",)):
        packed = np.concatenate([a[name] for name in names], 1).transpose(0, 2, 1, 3).copy()
        if names[0] in ("dq", "o"):
            packed[...] = np.nan
        starts = np.cumsum([a[name].shape[1] for name in names])[:-1]
        parts = np.split(packed.transpose(0, 2, 1, 3), starts, axis=1)
        b |= dict(zip(names, parts, strict=True))
    b |= {name: np.full_like(a[name], np.nan) for name in ("lse", "delta")}
    play(b, 2, 5)
    for name in (*NAMES, "lse", "delta"):
        assert np.array_equal(a[name], b[name]), name


@pytest.mark.parametrize("pieces", [2, 3])
def test_what_is_moved_is_what_was_predicted(pieces):
    """One head of 64 queries: each matrix comes once, products are as many as pairs."""
    a, D = inputs(1, 1, 1, 64, 32), 32
    report = run(forward(a, pieces))
    tile = 4 * 64 * D  # bytes
    assert report["global loads bytes"] == 3 * tile
    assert report["global stores bytes"] == tile + 4 * 128
    assert report["tensor FLOPs"] == {2: 3, 3: 6}[pieces] * 2 * 2 * 64 * 64 * D
    assert report["barriers"] == 2


# ---- Several texts in a row


@pytest.mark.parametrize(
    "shape, lengths, pieces, seed",
    thinned([
        ((1, 2, 1, 90, 32), [[1, 63, 26]], 3, None),
        ((2, 2, 1, 150, 32), [[1, 63, 86], [150]], 3, None),
        ((1, 2, 2, 140, 64), [[70, 70]], 2, 4),
    ], 3),
)  # fmt: skip
def test_texts(shape, lengths, pieces, seed):
    a = in_texts(inputs(*shape), lengths)
    play(a, pieces, seed)
    assert worst(a, pieces) < 1


def test_a_window_is_a_row_of_limits_too():
    a = inputs(1, 1, 1, 100, 32) | {"documents": Documents.window(100, 30)}
    play(a, 2)
    assert worst(a, 2) < 1


# ---- Planted faults

# What is bf16's too has its mistakes planted in test_flash_mma.py; these are of the operands, and
# of what no operands of bf16 go through.
OPERANDS, FORWARD = (
    f"engines.gpu.attention.{name}" for name in ("float32_operands", "mma_forward")
)
MISTAKES = [
    ("tiles not waited for", OPERANDS, "commit", "cuda.syncthreads()", "pass"),
    ("no mask", FORWARD, "step", "if ahead < keys:", "if False:"),
    ("o not corrected", FORWARD, "step", "correct(half.rows, D)", "pass"),
    ("a key head for each head", FORWARD, "single_block", "at.batch, at.kv), head_of",
     "at.batch, at.head), head_of"),
    ("tiles filled too early", FORWARD, "make_key_loop", "cuda.syncthreads()  # every",
     "pass  # every"),
    ("lse not padded", FORWARD, "single_block", "after = int32(at.first + rows)",
     "after = int32(0)"),
    ("rows past the end are written", OPERANDS, "save", "if t + 8 < T", "if t < T"),
    ("rows past the end are read", OPERANDS, "fetch", "if row < limit", "if row < limit + 1"),
    ("a wrong remainder", OPERANDS, "split_eight", "i + 1] -= high_bf16", "i + 1] -= low_bf16"),
    ("delta of other columns", OPERANDS, "quarter_dot", "y + 16 * i", "y"),
    ("lines: a value missing", OPERANDS, "load_line", "a, b, c, d)", "a, b, c, c)"),
]  # fmt: skip
# Pairs that are left out, or made of other pieces.
PAIRS = [
    ("of_three", 3, "multiply(acc, by.a0, by.b)\n        load(by.b, at)", "load(by.b, at)"),
    ("of_three", 3, "int32(at + 2 * apart)", "int32(at + apart)"),
    ("of_three", 3, "multiply(acc, by.a2, by.b)", "pass"),
    ("of_three", 3, "load(by.b, at)\n", "pass\n"),
    ("of_three", 3, "by.a1, by.b)\n        multiply(acc, by.a0, by.b)", "by.a0, by.b)"),
    ("of_three", 3, "by.a2, by.b)\n        multiply(acc, by.a1, by.b)", "by.a2, by.b)"),
    ("of_two", 2, "multiply(acc, by.a0, by.b)", "pass"),
    ("of_two", 2, "multiply(acc, by.a1, by.b)", "pass"),
    ("split_scores", 3, "by.a2[i] = pack_bf16(x - low_bf16(second)", "by.a2[i] = pack_bf16(x - x"),
]


KERNELS = "forward_kernel", "dq_kernel", "dkdv_kernel"


def with_operands(forms, split):
    """Forms with other operands, which `split` makes, of as many columns."""
    return {
        pieces: {
            D: form._replace(operands=split(pieces, form.operands.fragments.keywords["columns"]))
            for D, form in of.items()
        }
        for pieces, of in forms.items()
    }


def put_wrong(mutant, monkeypatch):
    """Let the launches have what a wrong module makes: kernels, or what they multiply."""
    use(load(mutant), monkeypatch)


def use(wrong, monkeypatch):
    """Let the launches have what a module makes that has the mistake."""
    if hasattr(wrong, "split"):
        for name in ("FORWARD", "DQ", "DKDV"):
            forms = with_operands(getattr(float32_launch, name), wrong.split)
            monkeypatch.setattr(float32_launch, name, forms)
    if hasattr(wrong, "make_key_loop"):
        monkeypatch.setattr(mma_launch, "forward_kernel", wrong.forward_kernel)


@pytest.fixture(scope="module")
def before():
    """Arrays with a forward pass that is right."""
    a = inputs(1, 2, 1, 33, 32)  # two steps of dk and dv, a head each
    run(forward(a, 2))
    return a


def fails(launches, a, names):
    """Whether a run does not end well, or leaves wrong results."""
    try:
        for launch in launches:
            run(launch)
    except (Fault, UserError):
        return True
    return not worst(a, 2, names) < 1


def test_all_mistakes_have_their_place():
    for what, module, function, old, new in MISTAKES:
        source(Mutant(module, function, what, old, new))
    for function, _, old, new in PAIRS:
        source(Mutant(OPERANDS, function, "a pair is missing", old, new))


@pytest.mark.parametrize("what, module, function, old, new", thinned(MISTAKES, 8))
def test_mistakes_are_seen(what, module, function, old, new, monkeypatch, before):
    put_wrong(Mutant(module, function, what, old, new), monkeypatch)
    if "delta" in what or "lines" in what:
        a = {name: array.copy() for name, array in before.items()}
        assert fails(backward(a, 2), a, GRADIENTS)
    else:
        a = inputs(1, 2 if "head" in what else 1, 1, 33 if "padded" in what else 66, 32)
        assert fails([forward(a, 2)], a, ("o", "lse"))


@pytest.mark.parametrize("function, pieces, old, new", thinned(PAIRS, 8))
def test_a_missing_pair_is_seen(function, pieces, old, new, monkeypatch):
    put_wrong(Mutant(OPERANDS, function, "a pair is missing", old, new), monkeypatch)
    assert not pairs_seen(pieces) < 1


# ---- Plans


def test_every_card_has_the_shared_memory():
    """99 KiB of a block: CUDA C++ Programming Guide, compute capability 8.6 and 8.9."""
    makers = mma_forward.forward_kernel, mma_backward.dq_kernel, mma_backward.dkdv_kernel
    forms = float32_launch.FORWARD, float32_launch.DQ, float32_launch.DKDV
    kernels = [
        make(form)
        for make, of in zip(makers, forms, strict=True)
        for pieces in PIECES
        for form in of[pieces].values()
    ]
    assert max(kernel.shared for kernel in kernels) <= 99 * 1024
    assert {kernel.target for kernel in kernels} == {(8, 0)}


@pytest.mark.parametrize(
    "name, to, words",
    [
        ("k", np.zeros((1, 2, 8, 64), np.uint16), "attention's k is float32 .*, not uint16"),
        ("lse", np.zeros((1, 4, 8), np.float32), r"attention's lse is float32 \(1, 4, 128\), not"),
        ("q", np.zeros((1, 4, 8, 96), np.float32), "head width 32, 64 or 128, not 96"),
        ("o", np.zeros((1, 4, 8, 65), np.float32)[..., :64], "attention's o has dense rows"),
    ],
    ids=["dtype", "lines", "width", "rows"],
)
def test_what_does_not_fit_is_refused(name, to, words):
    with pytest.raises(UserError, match=words):
        forward(inputs(1, 4, 2, 8, 64) | {name: to}, 2)


def test_two_or_three_pieces():
    with pytest.raises(UserError, match="2 or 3 pieces, not 1"):
        forward(inputs(1, 4, 2, 8, 64), 1)
