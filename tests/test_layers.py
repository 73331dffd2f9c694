"""The layers on drawn shapes: types, invariances, and what they refuse."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler.model import layers

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
@given(sizes, sizes, st.integers(3, 9), seeds)
def test_layernorm_has_zero_mean_unit_deviation_and_no_scale(B, T, C, seed):
    x = drawn(seed, B, T, C)
    y, stats = layers.layernorm(x, np.ones(C), eps=0.0)
    # What the subtraction of the mean rounds, C EPS of the largest |x|, the division makes larger.
    size = 1 + (np.abs(x).max(axis=-1) / stats[..., 1]).max()
    assert np.abs(np.mean(y, axis=-1)).max() < 2 * (C + 4) * EPS * size
    assert np.abs(np.mean(y * y, axis=-1) - 1).max() < 4 * (C + 4) * EPS * size
    larger, larger_stats = layers.layernorm(1024 * x, np.ones(C), eps=0.0)
    assert np.array_equal(larger, y)  # a power of two changes exponents only
    assert np.array_equal(larger_stats, 1024 * stats)


@over_shapes
@given(sizes, st.integers(3, 9), st.integers(-1000, 1000), seeds)
def test_layernorm_does_not_see_a_shift(T, C, shift, seed):
    x = np.round(64 * drawn(seed, T, C)) / 64  # so that x + shift is exact
    (y, stats), (shifted, after) = (layers.layernorm(z, np.ones(C)) for z in (x, x + shift))
    # A mean of C numbers below |shift| + 8 has C roundings; the deviation divides what they leave.
    bound = 4 * (C + 4) * EPS * (abs(shift) + 8)
    assert np.abs(after - stats - [shift, 0]).max() < bound
    assert (np.abs(shifted - y) < bound * (1 + np.abs(y)) / stats[:, 1:]).all()


@over_shapes
@given(sizes, sizes, seeds)
def test_layernorm_and_its_stats_by_the_formula(T, C, seed):
    x, gain, bias = drawn(seed, T, C), drawn(seed + 1, C), drawn(seed + 2, C)
    y, stats = layers.layernorm(x, gain, bias)
    assert y.shape == (T, C) and stats.shape == (T, 2)
    for t in range(T):
        mean = math.fsum(x[t]) / C
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in x[t]) / C + 1e-5)
        size = np.abs(x[t]).max()
        bound = 2 * (C + 8) * EPS  # a sum of C numbers below `size`, and a few operations
        assert abs(stats[t, 0] - mean) <= bound * size
        assert abs(stats[t, 1] - deviation) <= bound * (deviation + size)
        wanted = gain * (x[t] - mean) / deviation + bias
        terms = np.abs(gain) * size / deviation * (1 + size / deviation) + np.abs(bias)
        assert (np.abs(y[t] - wanted) <= 2 * bound * terms).all()


def test_layernorm_by_hand():
    x, gain, bias = np.array([[1.0, 7.0]]), np.array([2.0, 2.0]), np.array([0.0, 1.0])
    y, stats = layers.layernorm(x, gain, bias, eps=0.0)
    assert y.tolist() == [[-2.0, 3.0]] and stats.tolist() == [[4.0, 3.0]]
    y, stats = layers.layernorm(np.full((1, 4), 3.0), np.ones(4))  # nothing but a mean
    assert (y == 0).all() and stats.tolist() == [[3.0, math.sqrt(1e-5)]]


def test_layernorm_in_float32_survives_a_large_mean():
    x = np.tile(np.array([-1.0, 1.0], np.float32), 32)
    y, stats = layers.layernorm(x + np.float32(1000), np.ones(64, np.float32))
    # The shift is exact. The mean may be off by a few roundings of 1000, each 1000 * 2^-24 = 6e-5;
    # mean(x^2) - mean^2 would be off by roundings of a million, 0.06 each.
    assert np.abs(y - x).max() < 1e-3 and abs(stats[1] - 1) < 1e-3


@over_shapes
@given(sizes, sizes, seeds)
def test_layernorm_is_rmsnorm_after_the_mean_is_taken_off(T, C, seed):
    x, gain = drawn(seed, T, C), drawn(seed + 1, C)
    y, stats = layers.layernorm(x, gain)
    centred = x - np.mean(x, axis=-1, keepdims=True)
    wanted, r = layers.rmsnorm(centred, gain)  # the same operations, in the same order
    assert np.array_equal(y, wanted) and np.array_equal(stats[:, 1:], r)


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


@over_shapes
@given(sizes, sizes, sizes, seeds)
def test_embed_adds_the_row_of_each_position(B, T, C, seed):
    table, positions = drawn(seed, 7, C), drawn(seed + 1, T, C)
    tokens = np.random.default_rng(seed).integers(0, 7, (B, T))
    x = layers.embed(tokens, table, positions)
    for b, t in np.ndindex(B, T):
        assert np.array_equal(x[b, t], table[tokens[b, t]] + positions[t])


def test_embed_leaves_its_tables_alone():
    table, positions = np.ones((3, 2)), np.ones((2, 2))
    x = layers.embed(np.array([[0, 0]]), table, positions)
    x += 1
    layers.embed(np.array([[0, 0]]), table)[...] = 0
    assert (table == 1).all() and (positions == 1).all()


@over_shapes
@given(sizes, sizes, sizes, seeds)
def test_a_bias_is_the_row_of_a_constant_input(rows, n_in, n_out, seed):
    x, w, bias = drawn(seed, rows, n_in), drawn(seed + 1, n_in, n_out), drawn(seed + 2, n_out)
    y = layers.linear(x, w, bias)
    extended = layers.linear(np.c_[x, np.ones(rows)], np.vstack([w, bias]))
    sizes_of_terms = np.abs(x) @ np.abs(w) + np.abs(bias)  # n_in + 1 terms in either order
    assert (np.abs(y - extended) <= 2 * (n_in + 1) * EPS * sizes_of_terms).all()
    assert np.array_equal(layers.linear(x, w), x @ w)
    assert np.array_equal(layers.linear(np.zeros((1, n_in)), w, bias)[0], bias)


def test_add_takes_a_step_of_size_h():
    x, y = np.array([1.0, 2.0]), np.array([4.0, -2.0])
    assert layers.add(x, y).tolist() == [5.0, 0.0]
    assert layers.add(x, y, 0.5).tolist() == [3.0, 1.0]
    assert layers.add(x, y, 0.0).tolist() == x.tolist() == [1.0, 2.0]  # and x is left as it was


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


def exact_gelu(u):
    return u * 0.5 * np.array([math.erfc(-value / math.sqrt(2)) for value in u])


def test_gelu_is_near_the_exact_form_and_no_nearer_than_known():
    u = np.linspace(-8, 8, 1601)
    difference = np.abs(layers.gelu(u) - exact_gelu(u)).max()
    # 4.732e-4 on a finer grid. With the coefficient 0.0447 it is 4.69e-4, with 0.0455, which makes
    # the third derivative of Phi right, 7.5e-4, and with 1.702 u in a sigmoid, the paper's other
    # form, 2e-2.
    assert 4.72e-4 < difference < 4.74e-4


def test_gelu_keeps_what_is_exact_of_the_normal_distribution():
    u = np.linspace(0, 8, 801)
    # Phi(u) + Phi(-u) = 1, so gelu(u) - gelu(-u) = u; each has a few roundings of a product with u.
    assert np.abs(layers.gelu(u) - layers.gelu(-u) - u).max() < 8 * EPS * 8
    # gelu(u) / u = Phi(u) = 1/2 + u / sqrt(2 pi) + O(u^3): put an imaginary u in, read both terms
    near_zero = layers.gelu(np.array([1e-30j]))[0] / 1e-30j
    assert near_zero.real == 0.5
    assert abs(near_zero.imag / 1e-30 - 1 / math.sqrt(2 * math.pi)) < 8 * EPS


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gelu_is_finite_without_a_warning_at_any_size_a_stream_can_have(dtype):
    u = np.array([-1e6, -30, 0, 30, 1e6], dtype)
    with np.errstate(all="raise"):
        h = layers.gelu(u)
    assert h.tolist() == np.maximum(u, 0).tolist()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: layers.rmsnorm(x, np.linspace(-1, 2, 8))[0],
        lambda x: layers.rmsnorm(x, np.ones(8))[1],
        lambda x: layers.layernorm(x, np.linspace(-1, 2, 8), np.linspace(1, 3, 8))[0],
        lambda x: layers.layernorm(x, np.ones(8))[1],
        lambda x: layers.linear(x, np.linspace(-1, 2, 16).reshape(8, 2), np.ones(2)),
        lambda x: layers.embed(np.array([[0, 1, 0]]), x[0, :2], x[1]),
        lambda x: layers.add(x, x * x, 0.3),
        lambda x: layers.gelu(x),
        lambda x: layers.swiglu(x),
        lambda x: layers.rope(x.reshape(2, 3, 2, 4), 1, *layers.rope_tables(3, 4)).reshape(x.shape),
    ],
    ids="rmsnorm rms layernorm stats linear embed add gelu swiglu rope".split(),
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
    ones = np.ones(8, dtype)
    outputs = [
        layers.linear(x, np.ones((8, 5), dtype)),
        layers.linear(x, np.ones((8, 8), dtype), ones),
        *layers.rmsnorm(x, ones),
        *layers.layernorm(x, ones),
        *layers.layernorm(x, ones, ones),
        layers.swiglu(x),
        layers.gelu(x),
        layers.add(x, x),
        layers.add(x, x, 0.5),
        layers.rope(heads, 1, *layers.rope_tables(3, 4)),
        layers.embed(np.zeros((1, 2), int), x[0]),
        layers.embed(np.zeros((1, 3), int), x[0], x[0]),
    ]
    assert {output.dtype for output in outputs} == {np.dtype(dtype)}


@pytest.mark.parametrize(
    "call",
    [
        lambda x: layers.embed(np.array([[3]]), np.ones((3, 2))),
        lambda x: layers.embed(np.array([[-1]]), np.ones((3, 2))),
        lambda x: layers.embed(np.array([[0.0]]), np.ones((3, 2))),
        lambda x: layers.embed(np.array([[0, 1, 2]]), np.ones((3, 2)), np.ones((2, 2))),
        lambda x: layers.embed(np.array([[0]]), np.ones((3, 2)), np.ones((2, 2))),
        lambda x: layers.embed(np.array([[0, 1]]), np.ones((3, 2)), np.ones((2, 1))),
        lambda x: layers.linear(x, np.ones((7, 2))),
        lambda x: layers.linear(x, np.ones((8, 2)), np.ones(1)),
        lambda x: layers.linear(x, np.ones((8, 2)), np.ones((2, 3, 2))),
        lambda x: layers.rmsnorm(x, np.ones(7)),
        lambda x: layers.layernorm(x, np.ones(7)),
        lambda x: layers.layernorm(x, np.ones(1)),
        lambda x: layers.layernorm(x, np.ones(8), np.ones(1)),
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
