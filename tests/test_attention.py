"""Attention on drawn shapes: causality, grouping, and scores of any size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler import attention as module
from nanoeuler.attention import attention, causal_softmax

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
    def leaking(scores):
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
