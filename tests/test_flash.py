"""FlashAttention against chapters 5 and 6 in float64: tiles, kernels on paper, counts, mistakes.

The kernels' bounds are derived. With u = 2^-24, a score has D + 2 roundings of the sum of |q||k|,
its distance from the running maximum two more, and so has the way of that maximum; together that is
the *relative* error of a probability. Each key brings four roundings to a sum over keys: of alpha,
of the product with it, of p v, of the sum. Each gradient's bound is the relative error of its terms
times the sum of their absolute values.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import Mutant, load, source
from tiers import kept, thinned

from nanoeuler.emulator import Fault, run
from nanoeuler.engines.gpu.attention import reference
from nanoeuler.engines.gpu.attention.reference import ROWS, padded
from nanoeuler.engines.gpu.attention.tiles import attention_tiles, attention_tiles_backward
from nanoeuler.errors import UserError
from nanoeuler.model.attention import attention
from nanoeuler.model.backward import attention_backward

U = 2.0**-24


def random(seed, B, T, H, G, D, scale=1.0):
    """heads (B, T, H+2G, D) and dy (B, T, H, D), float32; `scale` is of queries and keys."""
    rng = np.random.default_rng(seed)
    heads = rng.standard_normal((B, T, H + 2 * G, D))
    heads[:, :, : H + G] *= scale
    return heads.astype(np.float32), rng.standard_normal((B, T, H, D)).astype(np.float32)


def exact_and_bounds(heads, dy, G):
    """name -> (float64 value, largest error) of y, lse, dheads of a float32 computation."""
    heads, dy = heads.astype(float), dy.astype(float)
    B, T, N, D = heads.shape
    H = N - 2 * G
    R = H // G
    y, p = attention(heads, G)
    dheads = attention_backward(dy.reshape(B, T, H * D), heads, G, p)
    q, k = heads[:, :, :H].reshape(B, T, G, R, D), heads[:, :, H : H + G]
    scores = np.einsum("btgrd,bsgd->bgrts", q, k) / np.sqrt(D)
    scores[..., np.triu(np.ones((T, T), bool), 1)] = -np.inf
    lse = np.logaddexp.reduce(scores, axis=-1).reshape(B, H, T)

    q, k, v = (np.abs(part) for part in np.split(heads, [H, H + G], axis=2))
    q, dy = q.reshape(B, T, G, R, D), np.abs(dy).reshape(B, T, G, R, D)
    p = p.reshape(B, G, R, T, T)
    size = np.einsum("btgrd,bsgd->bgrts", q, k).max() / np.sqrt(D)
    of_p = (D + 2 + 2 + 2) * U * size
    of_y = 2 * (of_p + 4 * T * U) + 4 * U  # above and below the line
    of_lse = of_p + 4 * T * U + 2 * U * (size + np.log(T))
    of_ds = of_p + of_lse + 2 * U * size + of_y + (2 * D + 5) * U + (R * T + 2) * U
    terms_y = np.einsum("bgrts,bsgd->btgrd", p, v)
    terms_ds = p * (np.einsum("btgrd,bsgd->bgrts", dy, v)
                    + np.einsum("btgrd,btgrd->bgrt", dy, terms_y)[..., None]) / np.sqrt(D)
    dq = np.einsum("bgrts,bsgd->btgrd", terms_ds, k).reshape(B, T, H, D)
    dk = np.einsum("bgrts,btgrd->bsgd", terms_ds, q)
    dv = np.einsum("bgrts,btgrd->bsgd", p, dy)
    bounds = of_y * terms_y, of_lse, of_ds * np.concatenate([dq, dk, dv], axis=2)
    shape = B, T, H, D
    return {
        "y": (y.reshape(shape), bounds[0].reshape(shape)), "lse": (lse, bounds[1]),
        "dheads": (dheads, bounds[2]),
    }  # fmt: skip


def play(heads, dy, G, module=reference, seed=None):
    """name -> y, lse, dheads by the kernels of `module`, out of nan; and the three reports."""
    B, T, _, _ = heads.shape
    H = dy.shape[2]
    y, dheads = np.full_like(dy, np.nan), np.full_like(heads, np.nan)
    lse, delta = np.full((2, B, H, padded(T)), np.nan, np.float32)
    launches = [module.forward_launch(heads, G, y, lse)]
    launches += module.backward_launches(dy, heads, G, y, lse, delta, dheads)
    fresh = [y, lse], [delta, dheads], [dheads]
    reports = [run(one, seed, fresh=new) for one, new in zip(launches, fresh, strict=True)]
    return {"y": y, "lse": lse[..., :T], "dheads": dheads}, reports


def worst(shape, scale=1.0, seed=0, module=reference):
    """The largest error of any output as a fraction of its bound; nan if anything is nan."""
    heads, dy = random(seed, *shape, scale=scale)
    outputs, _ = play(heads, dy, shape[3], module)
    smallest = 2.0**-126  # below it float32 keeps fewer digits, or nothing
    return np.max([
        np.max(np.abs(outputs[name] - exact) / (bound + smallest))
        for name, (exact, bound) in exact_and_bounds(heads, dy, shape[3]).items()
    ])  # fmt: skip


# ---- Tiles in NumPy

sizes = st.integers(1, 9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(T=sizes, G=st.integers(1, 3), R=st.integers(1, 3), D=st.integers(1, 4),
       rows=sizes, columns=sizes, seed=st.integers(0, 2**32 - 1))
def test_tiles_are_attention_and_its_backward(T, G, R, D, rows, columns, seed):
    heads, dy = (a.astype(float) for a in random(seed, 2, T, G * R, G, D))
    dy = dy.reshape(2, T, -1)
    y, lse = attention_tiles(heads, G, rows, columns)
    exact, p = attention(heads, G)
    rounding = 1e-12  # a few hundred operations of 1e-16 each, with room
    assert np.abs(y - exact).max() < rounding
    dheads = attention_tiles_backward(dy, heads, G, y, lse, rows, columns)
    assert np.abs(dheads - attention_backward(dy, heads, G, p)).max() < rounding


# ---- Kernels


SHAPES = [
    (1, 1, 1, 1, 32),   # one position
    (1, 1, 4, 4, 64),
    (2, 7, 4, 2, 32),   # less than a tile
    (1, 7, 4, 4, 128),
    (1, 32, 4, 1, 32),  # nothing ragged
    (1, 33, 4, 1, 64),
    (1, 65, 1, 1, 32),  # three tiles
    (1, 65, 4, 2, 32),
    (1, 130, 1, 1, 64),
    (1, 33, 2, 1, 128),
]  # fmt: skip


@pytest.mark.parametrize(
    "shape", kept([(each,) for each in SHAPES], *((SHAPES[i],) for i in (0, 2, 4, 6, 9)))
)
def test_kernels(shape):
    assert worst(shape) < 1


# At 30 scores are thousands, and exp ends at 88.
@pytest.mark.parametrize("scale", kept([1e-4, 10.0, 30.0], 1e-4, 30.0))
def test_kernels_with_small_and_large_scores(scale):
    assert worst((1, 40, 2, 1, 32), scale) < 1


def test_large_scores_put_all_weight_on_one_key():
    heads, dy = random(3, 1, 40, 2, 1, 32, scale=300.0)
    outputs, _ = play(heads, dy, 1)
    s = np.einsum("thd,sd->hts", heads[0, :, :2], heads[0, :, 2]) / np.sqrt(32)
    s[:, np.triu(np.ones((40, 40), bool), 1)] = -np.inf
    chosen = heads[0, s.argmax(axis=2), 3]  # (H, T, D)
    second, first = np.moveaxis(np.sort(s, axis=2)[..., -2:], 2, 0)
    sure = ~(first - second <= 50)  # others below e^-50
    assert sure.mean() > 0.9
    y = outputs["y"][0].swapaxes(0, 1)
    # 1 / total and the product with it round once each.
    assert (np.abs(y - chosen)[sure] <= 2 * U * np.abs(chosen)[sure]).all()


def test_the_future_changes_no_bit_of_the_past():
    heads, dy = random(5, 1, 40, 2, 1, 32)
    changed = heads.copy()
    changed[:, 35:] = 7.0
    before, after = (play(h, dy, 1)[0]["y"] for h in (heads, changed))
    assert before[:, :35].tobytes() == after[:, :35].tobytes()
    assert before[:, 35:].tobytes() != after[:, 35:].tobytes()


def test_the_order_of_blocks_and_warps_changes_no_bit():
    heads, dy = random(6, 1, 33, 2, 1, 32)
    runs = [play(heads, dy, 1, seed=seed)[0] for seed in (None, 1)]
    assert all(runs[0][name].tobytes() == runs[1][name].tobytes() for name in runs[0])


# ---- Counts


@pytest.mark.parametrize(
    "B, T, H, G, D", thinned([(1, 70, 2, 1, 32), (2, 33, 2, 2, 64)], 2)
)
def test_kernels_move_what_was_predicted(B, T, H, G, D):
    heads, dy = random(8, B, T, H, G, D)
    _, reports = play(heads, dy, G)
    tiles = padded(T) // ROWS
    ends = [min(start + ROWS, T) for start in range(0, T, ROWS)]
    seen, row = sum(ends), D // 8  # keys that tiles of queries see; sectors of a position
    later = sum(T - start for start in range(0, T, ROWS))  # queries that tiles of keys meet
    each = ROWS * tiles  # rows of all tiles, and 4 sectors a tile for a number of each
    predicted = [
        (B * H * (each + 2 * seen) * row, B * H * (T * row + 4 * tiles)),
        (B * H * ((3 * each + 2 * seen) * row + 4 * tiles), B * H * (T * row + 4 * tiles)),
        (B * G * (2 * each * row + H // G * later * (2 * row + 2)), B * G * 2 * T * row),
    ]
    for report, (loads, stores) in zip(reports, predicted, strict=True):
        assert report["global loads sectors"] == loads
        assert report["global stores sectors"] == stores
        assert report["global stores bytes"] == 32 * stores  # no byte that nobody wanted
        for kind in "loads", "stores":  # no two lanes want one bank
            assert report[f"shared {kind} wavefronts"] == report[f"shared {kind}"]
    assert reports[0]["global loads bytes"] == 32 * predicted[0][0]

    # Operands in shared memory: two for a multiply-add of a score, one for one of a sum.
    saved = T * D // 32
    assert reports[0]["shared loads"] == B * H * (seen * (2 + 1) * D + saved)
    of_delta = 2 * D * tiles
    assert reports[1]["shared loads"] == B * H * (seen * (2 + 2 + 1) * D + of_delta + saved)
    assert reports[2]["shared loads"] == B * (H * later * (2 + 2 + 1 + 1) * D + G * 2 * saved)


# ---- What is refused


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("heads", lambda a: a.astype(float), "heads is dense float32 .*, not float64"),
        ("heads", lambda a: a[..., ::2], "heads is dense float32"),
        ("heads", lambda a: a[..., :16], "head width 32, 64 or 128, not 16"),
        ("heads", lambda a: a[:, :, :3], "1 query heads do not share 2|0 query heads|-1 query"),
        ("heads", lambda a: a[0], "heads are .batch, T, heads, width., not"),
        ("y", lambda a: a[:, :4], r"y is dense float32 \(1, 5, 2, 64\), not"),
        ("lse", lambda a: a[..., :5], r"lse is dense float32 \(1, 2, 32\), not"),
    ],
)
def test_forward_refuses_what_does_not_fit(name, change, words):
    heads, dy = random(7, 1, 5, 2, 2, 64)
    a = {"heads": heads, "y": dy, "lse": np.empty((1, 2, 32), np.float32)}
    with pytest.raises(UserError, match=words):
        reference.forward_launch(n_kv=2, **a | {name: change(a[name])})


def test_backward_refuses_what_does_not_fit():
    heads, dy = random(7, 1, 5, 2, 2, 64)
    lse = np.empty((1, 2, 32), np.float32)
    for words, arrays in {
        "dheads is": (dy, heads, 2, dy, lse, lse, heads[:, :, :4]),
        "delta is": (dy, heads, 2, dy, lse, lse[..., :5], heads),
        "dy is": (dy.reshape(1, 5, 128), heads, 2, dy, lse, lse, heads),
    }.items():
        with pytest.raises(UserError, match=words):
            reference.backward_launches(*arrays)


# ---- Mistakes

FULL, OVER = "no thread reads a tile before all have", "no thread fills the next tile while"
SAVED = "no row is saved before its thread has"
KERNELS = FORWARD, DQ, DKV = "flash_forward", "flash_dq", "flash_dkv"
# In which function of `flash`, what is wrong, the source's text and what it becomes.
MISTAKES = [
    *[(kernel, f"no barrier: {text}", f"cuda.syncthreads()  # {text}", "pass  #")
      for kernel in KERNELS for text in (FULL, OVER, SAVED)],
    (DQ, "delta of half a row", "cuda.syncthreads()  # no thread reads a row", "pass  #"),
    (DQ, "queries over outputs", "cuda.syncthreads()  # no thread fetches queries", "pass  #"),
    (FORWARD, "the output not rescaled", "alpha * o[d] + p", "o[d] + p"),
    (FORWARD, "the total not rescaled", "alpha * total + p", "total + p"),
    (FORWARD, "the maximum not carried", "m, total = larger,", "m, total = s,"),
    (FORWARD, "no maximum subtracted", "math.exp(s - larger)", "math.exp(s)"),
    (FORWARD, "sees one key too many", "first + j <= t", "first + j <= t + 1"),
    (FORWARD, "does not see itself", "first + j <= t", "first + j < t"),
    (FORWARD, "the wrong group", "H + h // (H // n_kv)", "H + h % n_kv"),
    (DQ, "the wrong group", "H + h // (H // n_kv)", "H + h % n_kv"),
    (FORWARD, "the last tile forgotten", "range(0, end,", "range(0, end - columns,"),
    (FORWARD, "lse without the maximum", "m + float32(math.log", "float32(math.log"),
    (FORWARD, "the scale forgotten", "s = scale * dot", "s = dot"),
    (DQ, "delta forgotten", "p * (dp - delta_t)", "p * dp"),
    (DQ, "the scale forgotten", "dq, scale, D)", "dq, float32(1), D)"),
    (DQ, "delta from the queries", "fetch(q_tile, y, b,", "fetch(q_tile, heads, b,"),
    (DQ, "the gradient of a later key", "first + j <= t", "first + j <= t + 1"),
    (DKV, "one head of the group", "(group + 1) * sharing", "group * sharing + 1"),
    (DKV, "queries that do not see the key", "start + key <= t", "start <= t"),
    (DKV, "a query too few", "start + key <= t", "start + key < t"),
    (DKV, "starts a query late", "range(start, T,", "range(start + 1, T,"),
    (DKV, "delta of the first head", "delta[b, h, t]", "delta[b, 0, t]"),
    (DKV, "dk from dy", "(dp - delta[b, h, t]), q_tile", "(dp - delta[b, h, t]), dy_tile"),
    (DKV, "dv from q", "add(dv, p, dy_tile", "add(dv, p, q_tile"),
    (DKV, "dk and dv exchanged", "save(k_tile, dheads", "save(v_tile, dheads"),
    ("fetch", "reads beyond the last position", "min(first + j, array.shape[1] - 1)", "first + j"),
    ("save", "writes beyond the last position", "min(ROWS, array.shape[1] - first)", "ROWS"),
]  # fmt: skip


def test_all_mistakes_have_their_place():
    for function, what, old, new in MISTAKES:
        source(Mutant("engines.gpu.attention.reference", function, what, old, new))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what a wrong kernel does with garbage
@pytest.mark.parametrize("function, what, old, new", thinned(MISTAKES, 12))
def test_mistakes_are_seen(function, what, old, new):
    module = load(Mutant("engines.gpu.attention.reference", function, what, old, new))
    try:  # at scale 10 scores reach hundreds, so that a missing maximum overflows
        right = all(worst((1, 34, 4, 2, 32), scale, module=module) < 1 for scale in (1.0, 10.0))
    except (Fault, ArithmeticError, ValueError):
        return  # what the paper forbids, or garbage that Python's math refuses
    assert not right, what


def test_a_tile_without_its_spare_column_has_conflicts():
    flaw = "forward_kernel", "no pad", "D, D + 1,", "D, D,"
    module = load(Mutant("engines.gpu.attention.reference", *flaw))
    heads, dy = random(9, 1, 4, 1, 1, 32)
    y, lse = np.empty_like(dy), np.empty((1, 1, 32), np.float32)
    report = run(module.forward_launch(heads, 1, y, lse))
    # Each of D reads of a query's own row, for each of 4 keys, takes a round for each lane.
    assert report["shared loads wavefronts"] - report["shared loads"] == 4 * 32 * 31
