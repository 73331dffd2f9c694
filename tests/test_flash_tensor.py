"""Attention on tensor cores without a GPU: on paper against float64, and planted faults.

Bounds are derived, element by element. bf16 rounds with a relative error of at most u = 2^-8. An
output is rounded once, and so is each p and each ds that is an operand of a product: a term of a
sum then has its own u. delta is a product with the o that was rounded. What float32 rounds is
added with U = 2^-24, D + 8 times in a score and T + 8 times in a sum; a score's error is relative
in its p.
"""

import math
import re
from functools import partial

import numpy as np
import pytest
import registers
from bench.card import flash
from mutants import Mutant, load, source
from tiers import kept, thinned

from nanoeuler.emulator import Fault, run
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.attention import (
    layout,
    wgmma_backward,
    wgmma_forward,
    wgmma_parts,
)
from nanoeuler.engines.gpu.attention.documents import Documents, expect_documents, last_of
from nanoeuler.engines.gpu.attention.layout import Backward, padded
from nanoeuler.engines.gpu.attention.wgmma_forward import narrow_kernel, reciprocal_of
from nanoeuler.engines.gpu.attention.wgmma_launch import backward_launches, forward_launch
from nanoeuler.engines.gpu.attention.wgmma_parts import MOST
from nanoeuler.errors import UserError
from nanoeuler.files import project_root

CHAPTER = "12a-flash-on-tensor-cores"
u, U = 2.0**-8, 2.0**-24
NAMES = "q", "k", "v", "do", "o", "dq", "dk", "dv"


def inputs(B, H, G, T, D, seed=0, scale=1.0):
    """q, k, v, do and poisoned outputs as bf16, lse and delta as nan."""
    rng = np.random.default_rng(seed)
    shapes = dict.fromkeys(NAMES, (B, H, T, D))
    shapes |= dict.fromkeys(("k", "v", "dk", "dv"), (B, G, T, D))
    a = {name: np.full(shape, 0x7FC0, np.uint16) for name, shape in shapes.items()}
    for name in NAMES[:4]:
        values = rng.standard_normal(shapes[name]) * (scale if name in "qk" else 1)
        a[name] = to_bf16(values.astype(np.float32))
    return a | {name: np.full((B, H, padded(T)), np.nan, np.float32) for name in ("lse", "delta")}


def in_texts(a, lengths):
    """`a` with each row cut into texts of these lengths, one list for each row."""
    starts = [np.repeat(np.cumsum(row) - row, row) for row in lengths]
    first = np.array(starts, np.int32)
    assert first.shape == (len(a["q"]), a["q"].shape[2])
    return a | {"documents": Documents(first, last_of(first))}


def hidden(a):
    """What a query does not see: (B or 1, 1, T, T)."""
    t = np.arange(a["q"].shape[2])
    later = (t > t[:, None])[None, None]
    if "documents" not in a:
        return later
    return later | (t < a["documents"].first[:, None, :, None])


def forward(a, **more):
    arrays = (a[name] for name in ("q", "k", "v", "o", "lse"))
    return forward_launch(*arrays, documents=a.get("documents"), **more)


def backward(a, **more):
    order = "do", "q", "k", "v", "o", "lse", "delta", "dq", "dk", "dv"
    arrays = (a[name] for name in order)
    return backward_launches(Backward(*arrays), documents=a.get("documents"), **more)


def fold(x, G):
    """Sums over the query heads that share a key head."""
    B, H, T, D = x.shape
    return x.reshape(B, G, H // G, T, D).sum(2)


def exact_and_bounds(a):
    """name -> (float64 value, largest error) of o, dq, dk, dv, and lse in base 2."""
    q, k, v, do = (from_bf16(a[name]).astype(float) for name in NAMES[:4])
    (_, H, T, D), G = q.shape, k.shape[1]
    k, v = (np.repeat(x, H // G, axis=1) for x in (k, v))
    root, times, flip = 1 / math.sqrt(D), np.matmul, partial(np.swapaxes, axis1=-2, axis2=-1)
    s = times(q, flip(k)) * root
    s[np.broadcast_to(hidden(a), s.shape)] = -np.inf
    lse = np.logaddexp.reduce(s, axis=-1)
    p = np.exp(s - lse[..., None])
    of_p = (2 * (D + 8) * np.abs(s[np.isfinite(s)]).max() + T + 8) * U
    o, size = times(p, v), times(p, np.abs(v))
    of_o = u * np.abs(o) + (u + of_p + (T + 8) * U) * size
    dp = times(do, flip(v))
    ds = p * (dp - (do * o).sum(-1)[..., None])
    of_delta = (np.abs(do) * (of_o + (D + 8) * U * np.abs(o))).sum(-1)[..., None]
    float32s = of_p * np.abs(ds) + (D + 8) * U * p * np.abs(do).max() * np.abs(v).max() * D
    of_ds = u * np.abs(ds) + p * of_delta + float32s
    products = {
        "dq": (times(ds, k), times(of_ds, np.abs(k)), root),
        "dk": (fold(times(flip(ds), q), G), fold(times(flip(of_ds), np.abs(q)), G), root),
        "dv": (fold(times(flip(p), do), G), fold(times(flip(p) * (u + of_p), np.abs(do)), G), 1),
    }
    sums = {
        name: (factor * x, factor * ((1 + u) * e + (u + 2 * T * U) * np.abs(x)))
        for name, (x, e, factor) in products.items()
    }
    return {"o": (o, of_o)} | sums, lse / math.log(2), of_p


def worst(a, names):
    """The largest error as a share of its bound; nan if anything is."""
    sums, _, _ = exact_and_bounds(a)
    tiny = 1e-30  # where both are zero
    return max(np.max(np.abs(from_bf16(a[n]) - sums[n][0]) / (sums[n][1] + tiny)) for n in names)


CROWD = {"multiprocessors": 0}  # a plan for as many warpgroups in a block as there can be


# ---- On paper


def hold(a):
    """o and lse of a forward pass are within their bounds."""
    T, (_, lse, of_p) = a["q"].shape[2], exact_and_bounds(a)
    assert worst(a, ["o"]) < 1
    assert np.abs(a["lse"][..., :T] - lse).max() < of_p / math.log(2) + 8 * U * np.abs(lse).max()
    assert (a["lse"][..., T:] == np.float32(1e30)).all()


SHAPES = [
    ((1, 2, 1, 1, 64), None),     # one position, most of a tile beyond the end
    ((2, 2, 2, 77, 64), 1),       # one tile, in another order of blocks and warps
    ((1, 1, 1, 513, 64), None),   # each tile alone, rings of two stages wrap twice
    ((1, 1, 1, 513, 128), None),  # two stages wrap twice; one row in the last tile
    ((1, 2, 1, 200, 128), 2),
]  # fmt: skip


@pytest.mark.parametrize("shape, seed", kept(SHAPES, *SHAPES[:2], *SHAPES[3:]))
def test_forward(shape, seed):
    a = inputs(*shape)
    run(forward(a), seed)
    hold(a)


CHAINS = [
    ((1, 1, 1, 300, 64), 1, 2),   # a link of two tiles, then the one in the middle
    ((1, 4, 2, 140, 64), 1, 4),   # four links of two tiles: queries come to each place twice
    ((3, 1, 1, 70, 64), 2, 3),    # links of one tile; a chain of two sequences, and of one
]  # fmt: skip


@pytest.mark.parametrize("shape, places, links", kept(CHAINS, CHAINS[0], CHAINS[2]))
def test_chains_of_any_length_give_the_same_bits(shape, places, links):
    a, b = inputs(*shape), inputs(*shape)
    run(forward(a, places=1 << 20), 3)  # each tile alone
    chained = forward(b, places=places)
    assert chained.grid == (places,) and chained.args[9] == links
    run(chained, None)
    hold(a)
    for name in ("o", "lse"):
        assert np.array_equal(a[name], b[name]), name


def rising(by, T=300):
    """Inputs whose scores grow towards key 0, by so much from one tile of keys to the next."""
    a = inputs(1, 1, 1, T, 64, scale=0.1)
    q, k = (from_bf16(a[name]).copy() for name in "qk")
    q[..., 0] = 8.0  # over the root of D: 1
    k[..., 0] = by * (T // 128 - np.arange(T) // 128)
    return a | {"q": to_bf16(q), "k": to_bf16(k)}


# In powers of two 4.3, so that a maximum lags behind for a step and then moves; and 87, so that
# all sums would overflow if it did not.
SLOWLY, STEEPLY = 3.0, 60.0


@pytest.mark.parametrize("by", [SLOWLY, STEEPLY])
def test_a_maximum_that_lags_behind(by):
    a = rising(by)
    run(forward(a, places=1), 1)
    hold(a)


def rows_apart():
    """Whether all others keep their bits when query 250's scores rise, and its warp corrects."""
    a, b = (inputs(1, 1, 1, 300, 64) for _ in range(2))
    b["q"][..., 250, :] = to_bf16(40 * from_bf16(b["k"])[..., 3, :])
    for arrays in (a, b):
        run(forward(arrays))
    others = np.arange(300) != 250
    assert not np.array_equal(a["o"], b["o"])
    return all(
        np.array_equal(a[name][:, :, :300][:, :, others], b[name][:, :, :300][:, :, others])
        for name in ("o", "lse")
    )


def test_no_later_query_changes_a_bit_of_an_earlier_one(monkeypatch):
    assert rows_apart()
    what, old = "rows move with their warp", "(above - m[0]) * scale <= float32(LEAP)"
    new = "above < float32(-1e30)"
    wrong = load(Mutant("engines.gpu.attention.wgmma_forward", "raise_lazily", what, old, new))
    monkeypatch.setattr(wgmma_forward, "narrow_kernel", wrong.narrow_kernel)
    assert not rows_apart()


BOTH_WAYS = [
    ((1, 2, 1, 1, 64), False, None),
    ((2, 2, 2, 77, 64), False, 1),
    ((1, 4, 1, 200, 64), True, None),  # the ring wraps twice, through four heads of a group
    ((1, 2, 1, 130, 128), False, None),  # lse is longer than the blocks' rows
    ((1, 2, 1, 193, 128), True, 2),
]


@pytest.mark.parametrize(
    "shape, all_warpgroups, seed", kept(BOTH_WAYS, *BOTH_WAYS[:2], *BOTH_WAYS[3:])
)
def test_backward(shape, all_warpgroups, seed):
    a = inputs(*shape)
    run(forward(a), seed)
    for launch in backward(a, **CROWD if all_warpgroups else {}):
        run(launch, seed)
    assert worst(a, ["dq", "dk", "dv"]) < 1
    assert (a["delta"][..., shape[3] :] == 0).all()


def test_dq_when_the_ring_wraps_twice():
    a = inputs(1, 1, 1, 520, 64)
    run(forward(a))
    run(backward(a, **CROWD)[0])  # the last block has nine steps of four stages
    assert worst(a, ["dq"]) < 1


def test_large_scores():
    """Scores of thousands: exp would overflow at 89, all weight is on one key."""
    a = inputs(1, 1, 1, 150, 64, scale=30.0)
    run(forward(a))
    o = from_bf16(a["o"])[0, 0]
    q, k = (from_bf16(a[name]).astype(float)[0, 0] for name in "qk")
    s = np.where(np.tri(150, dtype=bool), q @ k.T / 8, -np.inf)
    ordered = np.sort(s, axis=1)
    sure = ordered[:, -1] - np.where(np.isfinite(ordered[:, -2]), ordered[:, -2], -1e9) > 50
    assert sure.mean() > 0.9 and np.isfinite(a["lse"]).all()
    assert np.array_equal(o[sure], from_bf16(a["v"])[0, 0, s.argmax(1)[sure]])


def beside(a, *names):
    """Copies of arrays in the model's layout: the heads of a position side by side, in one tensor.

    Returns name -> part of that tensor (B, heads, T, D), with gaps between its rows.
    """
    whole = np.concatenate([a[name] for name in names], 1).transpose(0, 2, 1, 3).copy()
    whole, at, parts = whole.transpose(0, 2, 1, 3), 0, {}
    for name in names:
        parts[name] = whole[:, at : at + a[name].shape[1]]
        at += a[name].shape[1]
    return parts


@pytest.mark.parametrize("seed", kept([None, 0], None))
def test_heads_may_lie_side_by_side(seed):
    """q, k, v of the model's packed heads (B, T, H + 2 G, D), and the same bits; backward too."""
    a = inputs(2, 2, 1, 70, 64)
    b = a | beside(a, "q", "k", "v") | beside(a, "dq", "dk", "dv") | beside(a, "o")
    b |= beside(a, "do") | {name: a[name].copy() for name in ("lse", "delta")}
    assert not any(b[name].flags.c_contiguous for name in NAMES)
    for arrays in (a, b):
        for launch in (forward(arrays), *backward(arrays)):
            run(launch, seed)
    for name in (*NAMES, "lse", "delta"):
        assert np.array_equal(a[name], b[name]), name


def test_the_order_of_blocks_and_warps_changes_no_bit():
    outcomes = []
    for seed in (None, 5):
        a = inputs(1, 1, 1, 140, 64)
        run(forward(a), seed)
        for launch in backward(a):
            run(launch, seed)
        outcomes.append([a[name].tobytes() for name in NAMES])
    assert outcomes[0] == outcomes[1]


FORWARD = [
    ("o not corrected", "raise_lazily", "correct(rows, 64)", "pass"),
    ("a sum forgotten", "weigh", "rows.total[0] += above", "rows.total[0] = above"),
    ("one lane's maximum", "raise_lazily", "above, below = quad_maxima(above, below)", "pass"),
    ("the vote the wrong way", "raise_lazily", "scale > float32(LEAP)", "scale < float32(LEAP)"),
    ("rows the wrong way", "raise_lazily", "above - m[0]) * scale <=", "above - m[0]) * scale >="),
    ("no mask for the first warpgroup", "diagonal", "forbid_later(s, HALF, key, row, at)", "pass"),
    ("the same values twice", "weigh_second", "int32(v + HALF * 128)", "v"),
    ("a tile again", "go_on", "next_of(stand.later, chain.links)", "stand.later"),
    ("the same link again", "next_of", "int32(now.link + cuda.gridDim.x)", "now.link"),
    ("the long tile's keys twice", "cursor_key", "        end = long", "        pass"),
    ("links in another order", "link_of", "int32(links.cut.tiles - i)", "int32(i + 1)"),
    ("no short tiles", "link_of", "links.cut.of_head < links.cut.tiles",
     "links.cut.of_head > links.cut.tiles"),
    ("a stage filled too early", "refill", "stand.left == WARPS - 1", "stand.left >= WARPS - 2"),
    ("no wait for values", "earlier", "mbarrier_wait(full_of(v,", "max(full_of(v,"),
    ("the queries' other phase", "diagonal", "int32(item.number >> 1 & 1)",
     "int32(item.number & 1)"),
    ("output overwritten", "fetch_next", "        bulk_wait_read_all()", "        pass"),
    ("output not handed over", "save", "hand_over(at)", "pass"),
    ("gone too early", "outputs_read", "bulk_wait_read_all()", "pass"),
    ("no barrier after barriers", "narrow_start", "cuda.syncthreads()  #", "pass  #"),
]
BACKWARD = [
    ("delta left out", "over_keys", "row_gradients(s, dp, Span(0, KEYS), parts.delta)", "pass"),
    ("lse of the first head", "fill_queries", "source.number + at.head", "source.number"),
    ("the same head again", "next_of", "int32(now.head + 1)", "now.head"),
    ("dk not scaled", "block_of_keys", "parts.dk, sizes.root,", "parts.dk, sizes.scale,"),
    ("operands overwritten", "multiply", "dk_before(parts.dk)  #", "pass  #"),
    ("lse of the first head, dq", "outputs_of", "int64(block.number)", "int64(0)"),
]


@pytest.mark.filterwarnings("ignore:invalid value")  # sums that overflow
@pytest.mark.parametrize("what, function, old, new", thinned(FORWARD, 10))
def test_mistakes_in_the_forward_are_seen(what, function, old, new, monkeypatch):
    wrong = load(Mutant("engines.gpu.attention.wgmma_forward", function, what, old, new))
    monkeypatch.setattr(wgmma_forward, "narrow_kernel", wrong.narrow_kernel)
    # In one chain: three tiles of queries, the one in the middle alone.
    a = rising(STEEPLY if function == "raise_lazily" else SLOWLY)
    if what == "one lane's maximum":  # one key alone scores high, which one lane of a row has
        k = from_bf16(a["k"]).copy()
        k[..., 0] = STEEPLY * (np.arange(k.shape[2]) == 5)
        a["k"] = to_bf16(k)
    try:
        run(forward(a, places=1))
    except Fault:
        return
    assert not worst(a, ["o"]) < 1


@pytest.mark.parametrize("what, function, old, new", thinned(BACKWARD, 6))
def test_mistakes_in_the_backward_are_seen(what, function, old, new, monkeypatch):
    a = inputs(1, 2, 1, 200, 64)
    run(forward(a))
    wrong = load(Mutant("engines.gpu.attention.wgmma_backward", function, what, old, new))
    for name in ("dq_kernel", "dkdv_kernel"):
        monkeypatch.setattr(wgmma_backward, name, getattr(wrong, name))
    try:
        for launch in backward(a, **CROWD):
            run(launch)
    except Fault:
        return
    assert not worst(a, ["dq", "dk", "dv"]) < 1


# ---- Several texts in a row

# A text of one position, one across a tile's end, one that ends with a tile, one of several tiles.
TEXTS = [[1, 139, 116], [256]], [[60, 70, 1, 20, 105], [3, 253]]


ALONE = 1 << 20  # places: each tile has one


@pytest.mark.parametrize(
    "places, seed", kept([(1, None), (1, 3), (ALONE, None), (ALONE, 3)], (1, None), (ALONE, 3))
)
def test_texts_forward(places, seed):
    for lengths in TEXTS:
        a = in_texts(inputs(2, 1, 1, 256, 64), lengths)
        run(forward(a, places=places), seed)
        hold(a)


@pytest.mark.parametrize(
    "shape, lengths",
    thinned([
        ((1, 2, 1, 300, 64), [[130, 130, 40]]), ((2, 2, 1, 300, 64), [[130, 130, 40], [299, 1]])
    ], 2),
)  # fmt: skip
def test_texts_through_a_chain_of_links(shape, lengths):
    """Links of two tiles and the one in the middle, cut by texts; all through one block."""
    a = in_texts(inputs(*shape), lengths)
    b = a | {name: a[name].copy() for name in ("o", "lse")}
    run(forward(a, places=1), 1)
    run(forward(b, places=1 << 20))
    hold(a)
    assert a["o"].tobytes() == b["o"].tobytes() and a["lse"].tobytes() == b["lse"].tobytes()


@pytest.mark.parametrize(
    "shape, lengths, crowd",
    thinned([
        ((1, 2, 1, 140, 64), [[129, 11]], CROWD),
        ((2, 2, 1, 200, 64), [[70, 60, 70], [200]], CROWD),
        ((1, 2, 2, 140, 64), [[129, 11]], {}),
        ((1, 2, 1, 193, 128), [[64, 1, 127, 1]], CROWD),
        ((1, 1, 1, 130, 128), [[100, 30]], {}),
    ], 5),
)  # fmt: skip
def test_texts_both_ways(shape, lengths, crowd):
    outcomes = []
    for seed in (None, 5):
        a = in_texts(inputs(*shape), lengths)
        run(forward(a), seed)
        for launch in backward(a, **crowd):
            run(launch, seed)
        hold(a)
        assert worst(a, ["dq", "dk", "dv"]) < 1
        outcomes.append([a[name].tobytes() for name in NAMES])
    assert outcomes[0] == outcomes[1]


def test_a_window_is_a_row_of_limits_too():
    a = inputs(1, 1, 1, 300, 64) | {"documents": Documents.window(300, 100)}
    t = np.arange(300)
    behind = t[:, None] - t
    assert np.array_equal(hidden(a)[0, 0], (behind < 0) | (behind >= 100))
    for launch in (forward(a), *backward(a, **CROWD)):
        run(launch)
    hold(a)
    assert worst(a, ["dq", "dk", "dv"]) < 1


def test_tiles_before_a_text_are_left_out():
    """Nor multiplied: three tiles off the diagonal, two products of each."""
    asked = []
    for lengths in ([[384]], [[128, 128, 128]]):
        a = in_texts(inputs(1, 1, 1, 384, 64), lengths)
        asked.append(run(forward(a, places=1 << 20))["tensor FLOPs"])
    tile = 2 * 128 * 128 * 64
    assert asked[0] - asked[1] == 3 * 2 * tile


TEXT_FAULTS = [
    ("attention.wgmma_parts", "limits_of", "limit_of(limit, batch, strictest)", "int32(0)"),
    ("attention.wgmma_forward", "steps_left", "(long - 1) * QUERIES", "long * QUERIES"),
    ("attention.wgmma_forward", "cursor_key", "int32(now.long + i + 1)", "int32(now.steps)"),
    ("attention.wgmma_forward", "link_of", " and n < links.cut.count", ""),
    ("attention.wgmma_backward", "last_tile", "int32(key + rows - 1)", "key"),
    ("attention.wgmma_backward", "skip_keys", "block.end - own_steps", "block.steps - own_steps"),
]


def test_all_mistakes_have_their_place():
    named = [("attention.wgmma_forward", *each) for _, *each in FORWARD]
    named += [("attention.wgmma_backward", *each) for _, *each in BACKWARD]
    for module, *each in named + TEXT_FAULTS:
        source(Mutant(f"engines.gpu.{module}", each[0], "", *each[1:]))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("module, function, old, new", thinned(TEXT_FAULTS, 6))
def test_mistakes_with_texts_are_seen(module, function, old, new, monkeypatch):
    wrong = load(Mutant(f"engines.gpu.{module}", function, "texts", old, new))
    if module == "attention.wgmma_parts":
        for made in (narrow_kernel, wgmma_backward.dq_kernel, wgmma_backward.dkdv_kernel):
            made.cache_clear()
        monkeypatch.setattr(wgmma_parts, function, getattr(wrong, function))
    for name in ("narrow_kernel", "dq_kernel", "dkdv_kernel"):
        if hasattr(wrong, name):
            owner = wgmma_forward if name == "narrow_kernel" else wgmma_backward
            monkeypatch.setattr(owner, name, getattr(wrong, name))
    a = in_texts(inputs(1, 2, 1, 400, 64), [[128, 150, 122]])
    try:
        run(forward(a, places=1))
        if not worst(a, ["o"]) < 1:
            return
        for launch in backward(a, **CROWD):
            run(launch)
    except Fault:
        return
    assert not worst(a, ["dq", "dk", "dv"]) < 1


@pytest.mark.parametrize("T, W", [(1, 1), (5, 1), (5, 3), (5, 9)])
def test_the_two_lines_of_a_window(T, W):
    first, last = Documents.window(T, W, 2)
    assert expect_documents(Documents(first, last), 2, T) and np.array_equal(last, last_of(first))
    assert first[1].tolist() == [max(0, t - W + 1) for t in range(T)]
    with pytest.raises(UserError, match="at least the query's own key, not 0"):
        Documents.window(T, 0)


def test_the_two_lines_of_texts():
    first = np.array([[0, 0, 2, 2, 4], [0, 0, 0, 0, 0]], np.int32)
    assert last_of(first).tolist() == [[1, 1, 3, 3, 4], [4] * 5]
    for wrong, words in (
        ([0, 1, 0], "falls within a row"), ([0, 2, 2], "not later"), ([-1, 0, 0], "not later"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            last_of(np.array([wrong], np.int32))
    lines = Documents(first, last_of(first))
    assert expect_documents(None, 2, 5) == (0, 0) and expect_documents(lines, 2, 5) == tuple(lines)
    for wrong in (lines._replace(last=first[:1]), lines._replace(first=first.astype(np.int64))):
        with pytest.raises(UserError, match="documents' .* is dense int32"):
            expect_documents(wrong, 2, 5)


def test_a_kernel_without_documents_gets_no_line():
    a = inputs(1, 1, 1, 70, 64)
    b = in_texts(a, [[70]])
    for plain, packed in zip((forward(a), *backward(a)), (forward(b), *backward(b)), strict=True):
        assert plain.kernel is not packed.kernel and plain.args[-1] == 0
        assert any(packed.args[-1] is line for line in b["documents"])
    assert forward(a).kernel is narrow_kernel(False)
    assert backward(a)[0].kernel is wgmma_backward.dq_kernel(wgmma_backward.Form(64, 1))


def test_without_documents_none_of_their_code_runs(monkeypatch):
    """Not a limit is looked up: on paper, where the compiler has not dropped dead branches."""

    def never(*_):
        raise AssertionError("a kernel without documents looks a limit up")

    monkeypatch.setattr(layout, "limit_of", never)
    for D in (64, 128):
        a = inputs(1, 1, 1, 140, D)
        for launch in (forward(a), *backward(a)):
            run(launch)
        with pytest.raises(AssertionError, match="looks a limit up"):
            run(forward(in_texts(a, [[140]])))


# ---- Plans


def change(a, name, **to):
    """`a` with an array of other dtype or shape."""
    return a | {name: np.empty(to.get("shape", a[name].shape), to.get("dtype", a[name].dtype))}


@pytest.mark.parametrize(
    "name, to, words",
    [
        ("k", {"dtype": np.float32}, "attention's k is uint16 .*, not float32"),
        ("v", {"shape": (1, 1, 9, 64)}, r"attention's v is uint16 \(1, 2, 8, 64\), not"),
        ("o", {"shape": (1, 4, 8, 128)}, "attention's o is"),
        ("lse", {"shape": (1, 4, 8)}, r"attention's lse is float32 \(1, 4, 128\), not"),
        ("q", {"shape": (4, 8, 64)}, r"attention takes \(batch, heads, T, D\)"),
        ("q", {"shape": (1, 4, 8, 96)}, "head width 64 or 128, not 96"),
        ("q", {"shape": (1, 3, 8, 64)}, "3 query heads do not share 2 key heads evenly"),
    ],
)  # fmt: skip
def test_forward_refuses_what_does_not_fit(name, to, words):
    a = change(inputs(1, 4, 2, 8, 64), name, **to)
    with pytest.raises(UserError, match=words):
        forward(a)


def test_backward_refuses_what_does_not_fit():
    a = inputs(1, 4, 2, 8, 64)
    with pytest.raises(UserError, match="attention's dk is"):
        backward(change(a, "dk", shape=(1, 4, 8, 64)))
    turned = np.empty((1, 8, 4, 64), np.uint16).transpose(0, 2, 1, 3)
    with pytest.raises(UserError, match="o and do lie alike"):
        backward(a | {"do": turned})
    with pytest.raises(UserError, match="delta is in C order"):
        backward(a | {"delta": np.empty((1, 4, 256), np.float32)[..., ::2]})
    with pytest.raises(UserError, match="pad the rows"):
        backward(a | {"dq": np.empty((1, 4, 8, 65), np.uint16)[..., :64]})


@pytest.mark.parametrize(
    "shape, dq, dkdv",
    [
        ((16, 12, 12, 1024, 64), (256, (64, 8, 3)), (256, (64, 8, 3))),
        ((16, 12, 4, 1024, 64), (256, (64, 8, 3)), (256, (16, 8, 4))),
        ((4, 16, 16, 4096, 128), (384, (8, 22, 8)), (256, (8, 32, 8))),
        ((2, 4, 2, 768, 64), (128, (8, 12, 1)), (128, (4, 12, 1))),  # 48, 24 blocks of 2
    ],
)  # fmt: skip
def test_grids_cover_and_small_ones_are_split(shape, dq, dkdv):
    B, H, G, T, D = shape
    a = {name: np.empty((B, H, T, D), np.uint16) for name in NAMES}
    a |= {name: np.empty((B, G, T, D), np.uint16) for name in ("k", "v", "dk", "dv")}
    a |= {name: np.empty((B, H, padded(T)), np.float32) for name in ("lse", "delta")}
    made = [(launch.kernel.threads, launch.grid) for launch in backward(a)]
    assert made == [dq, dkdv]
    few = [launch.kernel.threads for launch in backward(a, multiprocessors=1)]
    many = [launch.kernel.threads for launch in backward(a, multiprocessors=1 << 20)]
    assert few == [256 if D == 64 else 384, 256] and many == [128, 128]


@pytest.mark.parametrize(
    "shape, grid, links",
    [
        ((16, 12, 12, 1024, 64), (264,), (4, 768)),  # pairs of tiles, three to most blocks
        ((16, 12, 4, 512, 64), (264,), (2, 384)),
        ((2, 1, 1, 9000, 64), (142,), (71, 142)),    # each tile finds a place, alone
        ((4, 16, 16, 4096, 128), (16, 32, 4), None),
        ((2, 6, 3, 193, 128), (12, 2, 1), None),
    ],
)  # fmt: skip
def test_forward_grids_cover(shape, grid, links):
    B, H, G, T, D = shape
    a = {name: np.empty((B, H, T, D), np.uint16) for name in "qo"}
    a |= {name: np.empty((B, G, T, D), np.uint16) for name in "kv"}
    launch = forward(a | {"lse": np.empty((B, H, padded(T)), np.float32)})
    assert launch.grid == grid
    if links is None:
        assert grid[0] * grid[2] == B * H and grid[1] == -(-T // 128)
    else:
        assert launch.args[8:10] == links and launch.kernel is narrow_kernel(False)


@pytest.mark.parametrize("n, most", [(1, 5000), (3, 9999), (12, 5000), (264, 9000), (65535, 65537)])
def test_quotients_are_exact(n, most):
    by, x = reciprocal_of(n, most), np.arange(most + 1)
    assert np.array_equal(x * by >> 32, x // n)


def test_quotients_that_would_not_be_exact_are_refused():
    with pytest.raises(UserError, match="split the batch"):
        reciprocal_of(65536, 65536)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 12, 255, 4095, 4097, MOST - 1])
def test_divide_is_exact(n):
    """Numbers around all multiples, in float32, with a reciprocal that is off by 2^-23 either way.
    """
    multiples = n * np.unique(np.linspace(0, (MOST - 1) // n, 5000).astype(np.int64))
    x = np.concatenate([multiples, multiples + 1, multiples + n - 1])
    x = x[x < MOST]
    for off in (1 - 2.0**-23, 1.0, 1 + 2.0**-23):
        q = (x.astype(np.float32) * np.float32(off / n)).astype(np.int64)
        rest = x - q * n
        assert np.array_equal(q - (rest < 0) + (rest >= n), x // n)


def test_numbers_that_would_not_be_divided_exactly_are_refused():
    few = np.empty((1, 1, 1, 64), np.uint16)
    many = np.lib.stride_tricks.as_strided(few, (1 << 12, 1 << 10, 1, 64), (0, 0, 128, 2))
    lse = np.lib.stride_tricks.as_strided(
        np.empty(1, np.float32), (1 << 12, 1 << 10, 128), (4 * 128 << 10, 4 * 128, 4)
    )
    with pytest.raises(UserError, match="split the batch"):
        forward_launch(many, many, many, many, lse)


# ---- Machine code, which test_registers.py makes and tests/registers.tsv has

MAKERS = {
    "forward, D = 64": "forward 64", "forward, D = 128": "forward 128",
    "dq, D = 64": "dq 64, 2 warpgroups", "dq, D = 128": "dq 128, 3 warpgroups",
    "dk and dv, D = 64": "dkdv 64, 2 warpgroups", "dk and dv, D = 128": "dkdv 128, 2 warpgroups",
    "dq, D = 64, one warpgroup": "dq 64, 1 warpgroups",
    "dq, D = 128, one warpgroup": "dq 128, 1 warpgroups",
    "dk and dv, D = 64, one warpgroup": "dkdv 64, 1 warpgroups",
    "dk and dv, D = 128, one warpgroup": "dkdv 128, 1 warpgroups",
}  # fmt: skip


def table():
    """name -> (threads, blocks an SM, registers, shared bytes) as chapter 12a has them."""
    text = (project_root() / "book" / f"{CHAPTER}.md").read_text(encoding="utf-8")
    row = re.compile(r"^\| ([^|]+?) \| (\d+) x (\d) \| (\d+) \| ([\d,]+) \|", re.M)
    return {
        name: (int(threads), int(blocks), int(registers), int(shared.replace(",", "")))
        for name, threads, blocks, registers, shared in row.findall(text)
    }


STATIC = registers.HEAD.index("static")


def test_the_chapter_s_table_is_what_the_kernels_ask_for():
    rows, kernels = table(), flash.kernels()
    lines = {line[1]: line for line in registers.read() if line[0] == "flash"}
    assert rows.keys() == MAKERS.keys()
    for name, (threads, blocks, most, shared) in rows.items():
        kernel = kernels[MAKERS[name]]()
        assert (threads, blocks, shared) == (kernel.threads, kernel.resident, kernel.shared)
        assert blocks * (shared + 1024) <= 228 * 1024  # an SM's, 1 KiB of it for each block
        assert lines[MAKERS[name]][STATIC] == "0"  # or dynamic memory begins elsewhere
        assert int(lines[MAKERS[name]][3]) <= most and blocks * threads * most <= 65536
