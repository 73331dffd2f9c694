"""The layers on drawn shapes: types, invariances, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler import layers

EPS = 2.0**-53  # unit roundoff of float64
over_shapes = settings(max_examples=50, deadline=None, derandomize=True)
sizes = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


@over_shapes
@given(sizes, sizes, st.integers(2, 9), seeds)
def test_rmsnorm_has_unit_mean_square_and_no_scale(B, T, C, seed):
    x = drawn(seed, B, T, C)
    y, r = layers.rmsnorm(x, np.ones(C), eps=0.0)
    bound = 4 * (C + 4) * EPS  # a sum of C squares, a root, a quotient, and the check's own sum
    assert np.abs(np.mean(y * y, axis=-1) - 1).max() < bound
    larger = layers.rmsnorm(1024 * x, np.ones(C), eps=0.0)[0]
    assert np.array_equal(larger, y)  # a power of two changes exponents only
    assert r.shape == (B, T, 1)


@over_shapes
@given(sizes, sizes, seeds)
def test_rmsnorm_by_the_formula(T, C, seed):
    x, gain = drawn(seed, T, C), drawn(seed + 1, C)
    y, r = layers.rmsnorm(x, gain)
    for t in range(T):
        wanted_r = np.sqrt(sum(value**2 for value in x[t]) / C + 1e-5)
        bound = (C + 8) * EPS  # relative: a sum of C squares, a root, a quotient, a product
        assert abs(r[t, 0] - wanted_r) <= bound * wanted_r
        assert (np.abs(y[t] - gain * x[t] / wanted_r) <= bound * np.abs(y[t])).all()


def test_rmsnorm_of_zero_is_zero():
    y, r = layers.rmsnorm(np.zeros((2, 3)), np.ones(3))
    assert (y == 0).all() and np.array_equal(r, np.full((2, 1), np.sqrt(layers.RMSNORM_EPS)))


@over_shapes
@given(sizes, st.integers(1, 6), st.integers(0, 40), seeds)
def test_rope_scores_depend_on_the_distance_alone(T, half, shift, seed):
    D = 2 * half
    heads = drawn(seed, 1, T, 2, D)
    cos, sin = layers.rope_tables(T + shift, D)
    near = layers.rope(heads, 2, cos[:T], sin[:T])
    far = layers.rope(heads, 2, cos[shift:], sin[shift:])
    scores = [turned[0, :, 0] @ turned[0, :, 1].T for turned in (near, far)]
    size = np.prod(np.linalg.norm(heads[0], axis=-1).max(axis=0))  # longest query times longest key
    # An angle below T + shift has two roundings (theta, and its product with t). A score holds two
    # angles, a turn with four roundings on each side, and a sum of D products; two are compared.
    assert np.abs(scores[0] - scores[1]).max() <= 2 * (4 * (T + shift) + D + 8) * EPS * size


@over_shapes
@given(sizes, st.integers(1, 6), seeds)
def test_rope_keeps_lengths(T, half, seed):
    heads = drawn(seed, 2, T, 3, 2 * half)
    turned = layers.rope(heads, 3, *layers.rope_tables(T, 2 * half))
    ratio = np.linalg.norm(turned, axis=-1) / np.linalg.norm(heads, axis=-1)
    # two sums of D squares, two roots and a quotient; the turn itself has four roundings
    assert np.abs(ratio - 1).max() <= (2 * half + 12) * EPS


def test_rope_turns_each_pair_by_its_own_angle():
    T, D = 5, 6
    heads = drawn(0, 1, T, 1, D)
    turned = layers.rope(heads, 1, *layers.rope_tables(T, D))
    assert np.array_equal(turned[:, 0], heads[:, 0])  # position 0 is not turned
    for t, i in np.ndindex(T, D // 2):
        before, after = (complex(h[0, t, 0, i], h[0, t, 0, i + D // 2]) for h in (heads, turned))
        wanted = before * np.exp(1j * t * 10000 ** (-2 * i / D))
        # two roundings of an angle below T in the code and two here, and the turns themselves
        assert abs(after - wanted) < (4 * T + 8) * EPS * abs(before)


@over_shapes
@given(sizes, st.integers(1, 4), st.integers(0, 4), seeds)
def test_rope_leaves_the_other_heads_and_its_argument_alone(T, half, n, seed):
    heads = drawn(seed, 2, T, 4, 2 * half)
    before = heads.copy()
    turned = layers.rope(heads, n, *layers.rope_tables(T, 2 * half))
    assert np.array_equal(turned[:, :, n:], before[:, :, n:])
    assert np.array_equal(heads, before)


@over_shapes
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


@pytest.mark.parametrize(
    "function",
    [
        lambda x: layers.rmsnorm(x, np.linspace(-1, 2, 8))[0],
        lambda x: layers.rmsnorm(x, np.ones(8))[1],
        lambda x: layers.swiglu(x),
        lambda x: layers.rope(x.reshape(2, 3, 2, 4), 1, *layers.rope_tables(3, 4)).reshape(x.shape),
    ],
    ids=["rmsnorm", "rms", "swiglu", "rope"],
)
def test_an_imaginary_step_is_a_derivative(function):
    x, direction = drawn(1, 2, 2, 3, 8)
    complex_step = function(x + 1e-30j * direction).imag / 1e-30
    h = 6e-6  # the cube root of the roundoff, where the two errors of a central difference meet:
    central = (function(x + h * direction) - function(x - h * direction)) / (2 * h)
    # roundoff / h = 2e-11, and h^2 / 6 times third derivatives, which are below 100 here
    assert np.abs(complex_step - central).max() < 1e-9


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
