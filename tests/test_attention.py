"""Attention on drawn shapes: causality, grouping, positions, and scores of any size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler.model import attention as module
from nanoeuler.model.attention import attention, causal_softmax
from nanoeuler.model.layers import rope, rope_tables

EPS = 2.0**-53  # unit roundoff of float64
over_shapes = settings(max_examples=50, deadline=None, derandomize=True)
few = st.integers(1, 3)
shapes = st.tuples(few, st.integers(1, 9), few, few, st.integers(1, 6))  # B, T, G, R = H/G, D
seeds = st.integers(0, 2**32 - 1)


def packed(shape, seed):
    """Heads (B, T, R * G + 2 * G, D) for drawn (B, T, G, R, D)."""
    B, T, G, R, D = shape
    return np.random.default_rng(seed).standard_normal((B, T, R * G + 2 * G, D))


def sees_the_future(heads, n_kv):
    """Does any position of attention move by a bit when only later positions change?"""
    y, p = attention(heads, n_kv)
    for t in range(heads.shape[1]):
        changed = heads.copy()
        changed[:, t + 1 :] = 1e3
        y_changed, p_changed = attention(changed, n_kv)
        if not np.array_equal(y_changed[:, : t + 1], y[:, : t + 1]):
            return True
        if not np.array_equal(p_changed[:, :, : t + 1], p[:, :, : t + 1]):
            return True
    return False


@over_shapes
@given(shapes, seeds)
def test_changing_the_future_leaves_the_past(shape, seed):
    assert not sees_the_future(packed(shape, seed), shape[2])


@pytest.mark.parametrize("first_hidden", [2, 9], ids=["mask off by one", "no mask"])
def test_a_wrong_mask_is_noticed(first_hidden, monkeypatch):
    def leaking(scores, first):
        T = scores.shape[-1]
        seen = np.where(np.tri(T, k=first_hidden - 1, dtype=bool), scores, -np.inf)
        weights = np.exp(seen - seen.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)

    monkeypatch.setattr(module, "causal_softmax", leaking)
    assert sees_the_future(packed((1, 9, 2, 2, 4), 0), 2)


@over_shapes
@given(shapes, seeds)
def test_every_position_reads_its_whole_past(shape, seed):
    heads, G = packed(shape, seed), shape[2]
    T = heads.shape[1]
    _, p = attention(heads, G)
    assert (p[..., np.tril(np.ones((T, T), bool))] > 0).all()
    assert (p[..., ~np.tril(np.ones((T, T), bool))] == 0).all()
    assert np.abs(p.sum(axis=-1) - 1).max() <= (T + 2) * EPS  # a sum of T quotients


@over_shapes
@given(shapes, seeds)
def test_grouped_equals_repeated(shape, seed):
    heads, (_, T, G, R, D) = packed(shape, seed), shape
    H = R * G
    keys, values = heads[:, :, H : H + G], heads[:, :, H + G :]
    full = [heads[:, :, :H], np.repeat(keys, R, axis=2), np.repeat(values, R, axis=2)]
    y, p = attention(heads, G)
    y_full, p_full = attention(np.concatenate(full, axis=2), H)
    # The same sums in another order: scores of D terms (times the largest score), means of T terms.
    bound = 4 * (D * np.abs(heads).max() ** 2 + T) * EPS * max(1.0, np.abs(heads).max())
    assert np.abs(y - y_full).max() <= bound and np.abs(p - p_full).max() <= bound


@over_shapes
@given(shapes, seeds)
def test_one_head_by_the_formula(shape, seed):
    heads, (_, T, G, R, D) = packed(shape, seed), shape
    y, _ = attention(heads, G)
    for h in range(R * G):
        q, k, v = heads[:, :, h], heads[:, :, R * G + h // R], heads[:, :, R * G + G + h // R]
        for t in range(T):
            weights = np.exp(np.einsum("bd,bsd->bs", q[:, t], k[:, : t + 1]) / np.sqrt(D))
            weights /= weights.sum(axis=-1, keepdims=True)
            wanted = np.einsum("bs,bsd->bd", weights, v[:, : t + 1])
            got = y[:, t, h * D : (h + 1) * D]
            size = max(1.0, np.abs(heads).max())
            assert np.abs(got - wanted).max() <= 8 * (D * size**2 + T) * EPS * size


def moved_on(heads, n_kv, by, turned):
    """The change of attention when the text stands `by` positions further on; and its bound.

    The first `turned` heads are rotated.
    """
    _, T, N, D = heads.shape
    tables = rope_tables(T + by, D)
    near = rope(heads, turned, *(table[:T] for table in tables))
    far = rope(heads, turned, *(table[by:] for table in tables))
    change = np.abs(attention(far, n_kv)[0] - attention(near, n_kv)[0]).max()
    # Chapter 5's bound: angles below T + by with two roundings each, two of them in a score, and a
    # sum of D terms; a weight then moves by twice that part of itself. A quotient by a sum of T and
    # a mean of T in both results.
    longest = np.linalg.norm(heads, axis=-1).max()
    score = 2 * (2 * 2 * (T + by) + D) * EPS * longest**2 / np.sqrt(D)
    return change, (2 * score + 2 * (2 * T + 4) * EPS) * np.abs(heads).max()


even_heads = st.tuples(few, st.integers(1, 9), few, few, st.sampled_from([2, 4, 6]))


@over_shapes
@given(even_heads, st.integers(1, 300), seeds)
def test_only_distances_matter(shape, by, seed):
    heads, (_, _, G, R, _) = packed(shape, seed), shape
    change, bound = moved_on(heads, G, by, R * G + G)
    assert change <= bound


@pytest.mark.parametrize("turned", [4, 8], ids=["queries alone", "values, too"])
def test_turning_the_wrong_heads_is_noticed(turned):
    change, bound = moved_on(packed((1, 9, 2, 2, 4), 0), 2, 5, turned)
    assert change > 1e6 * bound


@over_shapes
@given(even_heads, seeds)
def test_without_positions_the_past_is_a_set(shape, seed):
    heads, (_, T, G, _, D) = packed(shape, seed), shape
    order = [*np.random.default_rng(seed).permutation(T - 1), T - 1]
    last, shuffled = (attention(h, G)[0][:, -1] for h in (heads, heads[:, order]))
    size = max(1.0, np.abs(heads).max())  # scores of D terms, means of T terms in another order
    assert np.abs(last - shuffled).max() <= 8 * (D * size**2 + T) * EPS * size


def test_with_rotations_the_past_has_an_order():
    heads, tables = packed((1, 9, 2, 2, 4), 0), rope_tables(9, 4)
    backwards = heads[:, [*range(7, -1, -1), 8]]
    last, other = (attention(rope(h, 6, *tables), 2)[0][:, -1] for h in (heads, backwards))
    assert np.abs(last - other).max() > 0.01


@pytest.mark.parametrize("D", [4, 16, 64, 256])
def test_scores_have_variance_one_at_any_width(D):
    heads = np.random.default_rng(D).standard_normal((4000, 2, 3, D))
    p = attention(heads, 1)[1][:, 0, 1]  # the second position's two weights
    difference = np.log(p[:, 0] / p[:, 1])  # of two scores of one query: variance 2
    # For a given q it is normal with variance 2 |q|^2 / D, so its fourth moment is 12 (1 + 2/D),
    # and the variance of its square 8 + 24/D. A scale of 1 or of 1/D would give 2 D or 2/D.
    assert abs(difference.var() - 2) < 5 * np.sqrt((8 + 24 / D) / 4000)


@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e3, 1e30, 1e300])
def test_scores_of_any_size_give_weights(scale):
    scores = scale * np.random.default_rng(0).choice([-1.0, 1.0], (2, 5, 5))
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        p = causal_softmax(scores)
    assert np.isfinite(p).all() and np.abs(p.sum(-1) - 1).max() <= 7 * EPS


def test_an_imaginary_step_is_a_derivative():
    heads, direction = packed((2, 5, 2, 2, 4), 1), packed((2, 5, 2, 2, 4), 2)
    complex_step = attention(heads + 1e-30j * direction, 2)
    h = 6e-6  # the cube root of the roundoff, where the two errors of a central difference meet:
    over, under = attention(heads + h * direction, 2), attention(heads - h * direction, 2)
    for exact, above, below in zip(complex_step, over, under, strict=True):
        # roundoff / h = 2e-11, and h^2 / 6 times third derivatives, which are below 100 here
        assert np.abs(exact.imag / 1e-30 - (above - below) / (2 * h)).max() < 1e-9


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
def test_types_are_kept(dtype):
    y, p = attention(packed((2, 5, 2, 2, 4), 0).astype(dtype), 2)
    assert y.dtype == p.dtype == dtype


def test_heads_that_cannot_be_grouped_are_refused():
    for N, G in ((4, 2), (7, 2), (3, 0)):
        with pytest.raises(AssertionError):
            attention(np.zeros((1, 2, N, 4)), G)
