"""FlashAttention against chapters 4 and 5 in float64: tiles, kernels, hard inputs, counts, mutants.

The kernels' bounds are derived. With u = 2^-24, the error of a score is D + 3 roundings of the sum
of |q||k|, and those of s - m and s - lse; it is the *relative* error of a probability. Sums over T
positions add T roundings. Each gradient's bound is that relative error times the sum of the
absolute values of its terms.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import Mutant, load

from nanoeuler.engines.gpu import flash
from nanoeuler.engines.gpu.door import SIMULATED, Counted, blocks
from nanoeuler.engines.gpu.flash_tiles import attention_tiles, attention_tiles_backward
from nanoeuler.model.attention import attention
from nanoeuler.model.backward import attention_backward

U = 2.0**-24
simulated = pytest.mark.skipif(not SIMULATED, reason="only a simulated kernel can be counted")


def random(seed, B, T, H, G, D, scale=1.0):
    """heads (B, T, H+2G, D) and dy (B, T, H*D), float32; `scale` is of queries and keys."""
    rng = np.random.default_rng(seed)
    heads = rng.standard_normal((B, T, H + 2 * G, D))
    heads[:, :, : H + G] *= scale
    return heads.astype(np.float32), rng.standard_normal((B, T, H * D)).astype(np.float32)


def exact_and_bounds(heads, dy, G):
    """y and dheads in float64, and how far a float32 computation of each may be off."""
    heads, dy = heads.astype(float), dy.astype(float)
    B, T, N, D = heads.shape
    H = N - 2 * G
    R = H // G
    y, p = attention(heads, G)
    dheads = attention_backward(dy, heads, G, p)

    q, k, v = (np.abs(part) for part in np.split(heads, [H, H + G], axis=2))
    q, dy = q.reshape(B, T, G, R, D), np.abs(dy).reshape(B, T, G, R, D)
    p = p.reshape(B, G, R, T, T)
    size = np.einsum("btgrd,bsgd->bgrts", q, k).max() / np.sqrt(D)
    of_score = (D + 3 + 2) * U * size           # the score, and two subtractions from it
    of_y = 2 * (2 * of_score + (T + 8 * T + 8) * U)  # above and below the line; 8 a rescaling
    of_lse = of_y / 2 + U * (size + np.log(T))
    of_ds = of_score + of_lse + of_y + (D + 3) * U + (R * T + 2) * U
    terms_y = np.einsum("bgrts,bsgd->btgrd", p, v)
    terms_ds = p * (np.einsum("btgrd,bsgd->bgrts", dy, v)
                    + np.einsum("btgrd,btgrd->bgrt", dy, terms_y)[..., None]) / np.sqrt(D)
    dq = np.einsum("bgrts,bsgd->btgrd", terms_ds, k).reshape(B, T, H, D)
    dk = np.einsum("bgrts,btgrd->bsgd", terms_ds, q)
    dv = np.einsum("bgrts,btgrd->bsgd", p, dy)
    bound = of_ds * np.concatenate([dq, dk, dv], axis=2)
    return y, dheads, of_y * terms_y.reshape(B, T, H * D), bound


def launch(module, heads, dy, G, rows, columns):
    """y, lse, dheads by the kernels of `module`, into arrays of nan."""
    B, T, N, D = heads.shape
    H = N - 2 * G
    y, lse = np.full((B, T, H * D), np.nan, np.float32), np.full((B, H, T), np.nan, np.float32)
    delta, dheads = np.full_like(lse, np.nan), np.full_like(heads, np.nan)
    module.flash_attention(heads, G, y, lse, rows, columns)
    module.flash_attention_backward(dy, heads, G, y, lse, delta, dheads, rows, columns)
    return y, lse, dheads


def worst(module, shape, rows, columns, scale=1.0, seed=0):
    """The largest error of y and dheads as a fraction of its bound; nan if anything is nan."""
    heads, dy = random(seed, *shape, scale=scale)
    G = shape[3]
    y, _, dheads = launch(module, heads, dy, G, rows, columns)
    exact_y, exact_dheads, bound_y, bound_dheads = exact_and_bounds(heads, dy, G)
    smallest = 2.0**-126  # below it float32 keeps fewer digits, or nothing
    of_y = np.max(np.abs(y - exact_y) / (bound_y + smallest))
    return np.maximum(of_y, np.max(np.abs(dheads - exact_dheads) / (bound_dheads + smallest)))


sizes = st.integers(1, 9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(T=sizes, G=st.integers(1, 3), R=st.integers(1, 3), D=st.integers(1, 4),
       rows=sizes, columns=sizes, seed=st.integers(0, 2**32 - 1))
def test_tiles_are_attention_and_its_backward(T, G, R, D, rows, columns, seed):
    heads, dy = (a.astype(float) for a in random(seed, 2, T, G * R, G, D))
    y, lse = attention_tiles(heads, G, rows, columns)
    exact, p = attention(heads, G)
    rounding = 1e-12  # a few hundred operations of 1e-16 each, with room
    assert np.abs(y - exact).max() < rounding
    dheads = attention_tiles_backward(dy, heads, G, y, lse, rows, columns)
    assert np.abs(dheads - attention_backward(dy, heads, G, p)).max() < rounding


@pytest.mark.parametrize(
    "shape, rows, columns",
    [
        ((1, 1, 1, 1, 1), 4, 4),   # one element
        ((2, 1, 2, 1, 4), 2, 2),   # one position
        ((1, 8, 1, 1, 4), 4, 4),   # nothing ragged
        ((2, 7, 2, 2, 3), 4, 4),   # ragged
        ((1, 11, 4, 2, 4), 8, 2),  # rows that see nothing of a tile
        ((1, 9, 6, 2, 4), 2, 8),   # tiles wider than what a block owns
        ((1, 5, 3, 1, 4), 1, 1),   # one query, one key at a time
        ((1, 5, 4, 4, 4), 8, 8),   # one block larger than the sequence
    ],
)
def test_kernels(shape, rows, columns):
    assert worst(flash, shape, rows, columns) < 1


@pytest.mark.parametrize("scale", [1e-4, 30.0, 300.0])  # 300: scores of 1e5, exp overflows at 89
def test_kernels_with_small_and_large_scores(scale):
    assert worst(flash, (1, 9, 2, 1, 4), 4, 4, scale=scale) < 1


def test_large_scores_put_all_weight_on_one_key():
    heads, dy = random(3, 1, 9, 2, 1, 4, scale=300.0)
    y, lse, _ = launch(flash, heads, dy, 1, 8, 4)
    s = np.einsum("thd,sd->hts", heads[0, :, :2], heads[0, :, 2]) / 2
    s[:, np.triu(np.ones((9, 9), bool), 1)] = -np.inf
    chosen = heads[0, s.argmax(axis=2), 3]  # (H, T, D)
    sure = np.sort(s, axis=2)[..., -1] - np.sort(s, axis=2)[..., -2] > 50  # others below e^-50
    assert sure[:, 1:].mean() > 0.9
    y = y.reshape(9, 2, 4).swapaxes(0, 1)
    assert np.array_equal(y[sure], chosen[sure]) and np.isfinite(lse).all()


def test_the_saved_number_gives_the_probabilities():
    heads, dy = random(4, 1, 7, 2, 1, 4)
    _, lse, _ = launch(flash, heads, dy, 1, 4, 4)
    s = np.einsum("thd,sd->hts", heads[0, :, :2], heads[0, :, 2]) / 2
    p = np.tril(np.exp(s - lse[0, :, :, None]))
    # Two dozen roundings of numbers up to the largest score, about 5.
    assert np.abs(p - attention(heads.astype(float), 1)[1][0]).max() < 24 * 5 * U


def test_the_future_changes_no_bit_of_the_past():
    heads, dy = random(5, 1, 10, 2, 1, 4)
    changed = heads.copy()
    changed[:, 6:] = 7.0
    before, after = (launch(flash, h, dy, 1, 4, 4) for h in (heads, changed))
    assert before[0][:, :6].tobytes() == after[0][:, :6].tobytes()
    assert before[0][:, 6:].tobytes() != after[0][:, 6:].tobytes()


def test_two_runs_agree_to_the_last_bit():
    heads, dy = random(6, 1, 9, 4, 2, 4)
    first, second = (launch(flash, heads, dy, 2, 4, 4) for _ in range(2))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


def test_launches_refuse_what_does_not_fit():
    heads, dy = random(7, 1, 5, 3, 1, 4)
    y, lse, dheads = launch(flash, heads, dy, 1, 4, 4)
    with pytest.raises(AssertionError, match="evenly"):
        flash.flash_attention(np.empty((1, 5, 7, 4), np.float32), 2, y, lse)
    with pytest.raises(AssertionError):
        flash.flash_attention(heads, 1, y[:, :4], lse)
    with pytest.raises(AssertionError):
        flash.flash_attention(heads.astype(float), 1, y, lse)
    with pytest.raises(AssertionError):
        flash.flash_attention_backward(dy, heads, 1, y, lse, lse[:, :1], dheads)


@simulated
@pytest.mark.parametrize("T, rows, columns", [(10, 4, 4), (7, 2, 4), (9, 4, 2)])
def test_kernels_read_what_their_budgets_say(T, rows, columns):
    B, H, G, D = 1, 4, 2, 3
    heads, dy = random(8, B, T, H, G, D)
    y, lse, _ = launch(flash, heads, dy, G, rows, columns)
    tiles, mine = blocks(T, rows), np.arange(T) // rows
    times = H // G * (tiles - mine)  # query tiles that end after a key, for each head that reads it

    counted = [Counted(a) for a in (heads, y, lse)]
    flash.flash_attention(counted[0], G, counted[1], counted[2], rows, columns)
    assert (counted[0].reads[0, :, :H] == 1).all()
    assert (counted[0].reads[0, :, H:] == times[:, None, None]).all()
    assert all((a.writes == 1).all() and (a.reads == 0).all() for a in counted[1:])

    names = "dy heads y lse delta dheads".split()
    c = {n: Counted(a) for n, a in zip(names, (dy, heads, y, lse, lse * 0, heads * 0), strict=True)}
    flash.flash_attention_backward(
        c["dy"], c["heads"], G, c["y"], c["lse"], c["delta"], c["dheads"], rows, columns
    )
    again = mine + 1  # key tiles that begin before a query's tile ends
    assert (c["y"].reads == 1).all() and (c["dy"].reads[0] == 1 + again[:, None]).all()
    assert (c["lse"].reads[0] == 1 + again).all() and (c["delta"].reads[0] == again).all()
    assert (c["heads"].reads[0, :, :H] == 1 + again[:, None, None]).all()
    assert (c["heads"].reads[0, :, H:] == times[:, None, None] + 1).all()
    assert (c["delta"].writes == 1).all() and (c["dheads"].writes == 1).all()


@pytest.mark.parametrize("T, w", [(12, 4), (13, 4), (5, 8)])
def test_tiles_move_what_the_equation_says(T, w):
    D = 3
    heads = Counted(np.random.default_rng(9).standard_normal((1, T, 3, D)))
    attention_tiles(heads, 1, w, w)
    ends = [min(end, T) for end in range(w, T + w, w)]
    assert heads.reads.sum() == T * D + sum(2 * D * end for end in ends)
    if T % w == 0:
        assert heads.reads.sum() == 2 * T * D + T * T * D // w  # eq-flash-bytes without y and L


FULL, OVER = "no thread reads the tile before all have", "no thread fills the next tile while"
KERNELS = FORWARD, DQ, DKV = "forward_kernel", "dq_kernel", "dkv_kernel"
# In which function of `flash`, what is wrong, the source's text and what it becomes.
MUTANTS = [
    *[(k, "a tile read before it is full", f"cuda.syncthreads()  # {FULL}", "pass #")
      for k in KERNELS],
    *[(k, "a tile overwritten while read", f"cuda.syncthreads()  # {OVER}", "pass #")
      for k in KERNELS],
    (FORWARD, "the output not rescaled", "o[d] *= alpha", "pass"),
    (FORWARD, "the total not rescaled", "total *= alpha", "pass"),
    (FORWARD, "the maximum not carried", "larger = m\n", "larger = np.float32(-3e38)\n"),
    (FORWARD, "no maximum subtracted", "math.exp(s[j] - larger)", "math.exp(s[j])"),
    (FORWARD, "sees one key too many", "if first + j <= t else", "if first + j <= t + 1 else"),
    (FORWARD, "sees one key too few", "if first + j <= t else", "if first + j < max(t, 1) else"),
    (FORWARD, "the wrong group", "g = H + h // (H // n_kv)", "g = H + h % n_kv"),
    (DQ, "the wrong group", "g = H + h // (H // n_kv)", "g = H + h % n_kv"),
    (FORWARD, "the last tile forgotten", "range(0, end,", "range(0, end - columns,"),
    (FORWARD, "lse without the maximum", "m + np.float32(math.log(total))", "math.log(total)"),
    (DQ, "delta forgotten", "p * (dp - delta_t) * scale", "p * dp * scale"),
    (DQ, "the scale forgotten", "p * (dp - delta_t) * scale", "p * (dp - delta_t)"),
    (DQ, "delta of the first channel", "delta_t += dy_row[d]", "delta_t = dy_row[d]"),
    (DQ, "the gradient of a later key", "if first + j <= t:", "if first + j <= t + 1:"),
    (DKV, "one head of the group", "(group + 1) * sharing", "group * sharing + 1"),
    (DKV, "queries that do not see the key", "key <= first + i < T", "first + i < T"),
    (DKV, "a query too few", "key <= first + i < T", "key < first + i < T"),
    (DKV, "starts a query late", "range(tile * rows, T,", "range(tile * rows + 1, T,"),
    (DKV, "dk from dy", "dk[d] += ds * q_tile[i, d]", "dk[d] += ds * dy_tile[i, d]"),
    (DKV, "dv from q", "dv[d] += p * dy_tile[i, d]", "dv[d] += p * q_tile[i, d]"),
    (DKV, "dk and dv exchanged", "dheads[b, key, g, d] = dk[d]", "dheads[b, key, g, d] = dv[d]"),
]


@pytest.mark.skipif(not SIMULATED, reason="on hardware a warp may hide a missing barrier")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what a wrong kernel does with garbage
@pytest.mark.parametrize("function, what, old, new", MUTANTS)
def test_mutants_are_seen(function, what, old, new):
    module = load(Mutant("engines.gpu.flash", function, what, old, new))
    try:  # at scale 300 scores reach 1e5, so that a missing maximum overflows
        errors = [worst(module, (1, 11, 4, 2, 4), 4, 4, scale) for scale in (3.0, 300.0)]
    except (IndexError, ArithmeticError, ValueError):
        return  # an index outside, or garbage that Python's math refuses
    assert not np.max(errors) < 1, what
