"""The layers on drawn shapes: types, invariances, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoeuler import layers

EPS = 2.0**-53  # unit roundoff of float64
sizes = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


@given(sizes, sizes, st.integers(2, 9), seeds)
def test_rmsnorm_has_unit_mean_square_and_no_scale(B, T, C, seed):
    x = drawn(seed, B, T, C)
    y, r = layers.rmsnorm(x, np.ones(C), eps=0.0)
    bound = 4 * (C + 4) * EPS  # a sum of C squares, a root, a quotient, and the check's own sum
    assert np.abs(np.mean(y * y, axis=-1) - 1).max() < bound
    larger = layers.rmsnorm(1024 * x, np.ones(C), eps=0.0)[0]
    assert np.array_equal(larger, y)  # a power of two changes exponents only
    assert r.shape == (B, T, 1)


@given(sizes, st.integers(1, 6), st.integers(0, 40), seeds)
def test_rope_scores_depend_on_the_distance_alone(T, half, shift, seed):
    D = 2 * half
    heads = drawn(seed, 1, T, 2, D)
    cos, sin = layers.rope_tables(T + shift, D)
    near = layers.rope(heads, 2, cos[:T], sin[:T])
    far = layers.rope(heads, 2, cos[shift:], sin[shift:])
    scores = [turned[0, :, 0] @ turned[0, :, 1].T for turned in (near, far)]
    size = np.prod(np.linalg.norm(heads[0], axis=-1).max(axis=0))  # longest query times longest key
    # four rounded angles below T + shift radians, and a sum of D products on each side
    assert np.abs(scores[0] - scores[1]).max() <= (4 * (T + shift) + 4 * D + 8) * EPS * size


@given(sizes, st.integers(1, 4), st.integers(0, 4), seeds)
def test_rope_leaves_the_other_heads_and_its_argument_alone(T, half, n, seed):
    heads = drawn(seed, 2, T, 4, 2 * half)
    before = heads.copy()
    turned = layers.rope(heads, n, *layers.rope_tables(T, 2 * half))
    assert np.array_equal(turned[:, :, n:], before[:, :, n:])
    assert np.array_equal(heads, before)


@given(sizes, sizes, seeds)
def test_embed_is_a_product_with_one_hot(V, C, seed):
    table = drawn(seed, V, C)
    tokens = np.random.default_rng(seed).integers(0, V, (2, 3))
    assert np.array_equal(layers.embed(tokens, table), np.eye(V)[tokens] @ table)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_swiglu_is_finite_without_a_warning_at_any_gate(dtype):
    gates = np.array([-1e30, -1000, -1, 0, 1, 1000, 1e30], dtype)
    with np.errstate(all="raise"):
        h = layers.swiglu(np.stack([gates, np.ones_like(gates)], axis=-1))[:, 0]
    assert np.isfinite(h).all() and h[0] == h[1] == 0 and h[-1] == gates[-1]


def test_silu_is_the_textbook_formula():
    z = np.linspace(-30, 30, 601)
    h = layers.swiglu(np.stack([z, np.ones_like(z)], axis=-1))[:, 0]
    # sigma is computed as half of 1 + tanh: its absolute error is a few roundings of 1, times z
    assert np.abs(h - z / (1 + np.exp(-z))).max() < 8 * EPS * 30


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
def test_types_are_kept(dtype):
    x = drawn(0, 2, 3, 8).astype(dtype)
    heads = x.reshape(2, 3, 2, 4)
    outputs = [
        layers.linear(x, np.ones((8, 5), dtype)), *layers.rmsnorm(x, np.ones(8, dtype)),
        layers.swiglu(x), layers.add(x, x), layers.rope(heads, 1, *layers.rope_tables(3, 4)),
        layers.embed(np.zeros((1, 2), int), x[0]),
    ]  # fmt: skip
    assert {output.dtype for output in outputs} == {np.dtype(dtype)}


@pytest.mark.parametrize(
    "call",
    [
        lambda x: layers.embed(np.array([[3]]), np.ones((3, 2))),
        lambda x: layers.embed(np.array([[-1]]), np.ones((3, 2))),
        lambda x: layers.embed(np.array([[0.0]]), np.ones((3, 2))),
        lambda x: layers.linear(x, np.ones((7, 2))),
        lambda x: layers.rmsnorm(x, np.ones(7)),
        lambda x: layers.swiglu(x[..., :7]),
        lambda x: layers.add(x, x[:1]),
        lambda x: layers.rope_tables(4, 3),
        lambda x: layers.rope(x.reshape(2, 3, 2, 4), 1, *layers.rope_tables(4, 4)),
        lambda x: layers.rope(x.reshape(2, 3, 2, 4), 3, *layers.rope_tables(3, 4)),
    ],
)
def test_wrong_shapes_are_refused(call):
    with pytest.raises(AssertionError):
        call(drawn(0, 2, 3, 8))
