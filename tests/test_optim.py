"""The optimizer, the schedule and the clip: by hand, against NumPy, on hostile gradients."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import initialise
from nanoeuler.training.optim import BETA1, BETA2, EPS, AdamW, learning_rate

CONFIG = ModelConfig(
    vocab_size=10, dim=4, n_layers=1, n_heads=1, n_kv_heads=1, hidden=6, context=4, n_predict=1
)


def random_like(weights, seed, scale=1.0):
    made, rng = weights.zeros_like(), np.random.default_rng(seed)
    for tensor in made.values():
        tensor[...] = scale * rng.standard_normal(tensor.shape)
    return made


def test_two_steps_done_by_hand():
    """The numbers of the chapter, in float64: gradients 0.5 and -0.1, decay 0.3, rate 0.01."""
    weights = initialise(CONFIG, 0, np.float64)
    weights["output"][0, 0] = 1.0
    optimizer, gradients = AdamW(weights, beta2=0.98, weight_decay=0.3), weights.zeros_like()
    by_hand = 1.0
    second = 0.035 / 0.19 / math.sqrt(0.0051 / 0.0396)
    for step, (g, s) in enumerate(((0.5, 1.0), (-0.1, second)), 1):
        gradients["output"][0, 0] = g
        optimizer.update(weights, gradients, 0.01, step)
        by_hand -= 0.01 * (s + 0.3 * by_hand)
        # EPS = 1e-8 beside a root of about 0.4 moves a step of 0.01 by under 1e-9
        assert abs(weights["output"][0, 0] - by_hand) < 1e-9


@given(st.integers(0, 2**32), st.integers(-20, 10), st.sampled_from([0, 0.3]))
@settings(max_examples=30, deadline=None)
def test_every_bit_equals_numpy_in_float32(seed, exponent, decay):
    weights, f = initialise(CONFIG, 0), np.float32
    optimizer = AdamW(weights, weight_decay=decay)
    plain = {name: (w.copy(), 0 * w, 0 * w) for name, w in weights.items()}
    for t in (1, 2, 3):
        gradients = random_like(weights, seed + t, 2.0**exponent)
        optimizer.update(weights, gradients, 0.01, t)
        for name, (w, m, v) in plain.items():
            g = gradients[name]
            m = f(BETA1) * m + f(1 - BETA1) * g
            v = f(BETA2) * v + f(1 - BETA2) * (g * g)
            s = (m * f(1 / (1 - BETA1**t))) / (np.sqrt(v * f(1 / (1 - BETA2**t))) + f(EPS))
            plain[name] = w - f(0.01) * (s + f(decay * (w.ndim > 1)) * w), m, v
    for name, (w, _, _) in plain.items():
        assert np.array_equal(weights[name], w), name


def test_the_units_of_a_gradient_do_not_matter():
    """With eps = 0 a gradient times a power of two gives the same weights to the last bit."""
    ends = []
    for scale in (1.0, 1024.0):
        weights = initialise(CONFIG, 0)
        optimizer = AdamW(weights, eps=0.0)
        for step in (1, 2, 3):
            gradients = weights.zeros_like()
            gradients.flat[:] = 1 + np.abs(random_like(weights, step).flat)
            gradients.flat *= np.float32(scale)
            optimizer.update(weights, gradients, 0.01, step)
        ends.append(weights.flat.copy())
    assert np.array_equal(*ends)


GPT2 = dict(norm="layer", position="learned", mlp="gelu", bias=True, tied=True)


@pytest.mark.parametrize("changes", [{}, GPT2])
def test_matrices_decay_and_gains_and_biases_do_not(changes):
    weights = random_like(initialise(replace(CONFIG, **changes), 0), 1)  # no bias is zero
    before = {name: w.copy() for name, w in weights.items()}
    AdamW(weights, weight_decay=0.5).update(weights, weights.zeros_like(), 0.1, 1)
    spared = {name for name, w in weights.items() if np.array_equal(w, before[name])}
    assert spared == {name for name in weights if "norm" in name or name.endswith("_bias")}
    assert len(spared) == (10 if changes else 3)  # of GPT-2, 8 in its layer and 2 at the end
    for name in weights.keys() - spared:
        # one product and one difference in float32
        np.testing.assert_allclose(weights[name], before[name] * 0.95, rtol=3e-7)
    assert ("positions" in weights) == bool(changes) and "positions" not in spared


def test_the_padding_of_the_flat_buffer_stays_zero():
    weights = initialise(CONFIG, 0)
    gradients = random_like(weights, 1)
    optimizer = AdamW(weights, clip_norm=0.1)
    optimizer.update(weights, gradients, 0.1, 1)
    optimizer.clip(gradients)
    for buffer in (weights, gradients):
        used = buffer.zeros_like()
        for tensor in used.values():
            tensor[...] = 1
        assert (buffer.flat[used.flat == 0] == 0).all() and (used.flat == 0).any()


@given(seed=st.integers(0, 1000), exponent=st.integers(-30, 60), limit=st.floats(1e-3, 1e3))
@settings(max_examples=50, deadline=None)
def test_clip_limits_the_norm_and_keeps_the_direction(seed, exponent, limit):
    weights = initialise(CONFIG, 0)
    gradients = random_like(weights, seed, 2.0**exponent)
    before = gradients.flat.astype(np.float64)
    norm = AdamW(weights, clip_norm=limit).clip(gradients)
    # sums of a few hundred float64 squares, added in any order
    assert abs(norm - np.sqrt(np.sum(before**2))) < 1e-13 * norm
    # one float32 rounding of each element
    np.testing.assert_allclose(gradients.flat, before * min(1, limit / norm), rtol=2e-7, atol=1e-38)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_norm_is_finite_only_if_every_gradient_is(value):
    weights = initialise(CONFIG, 0)
    gradients = random_like(weights, 0, 1e38)
    assert math.isfinite(AdamW(weights, clip_norm=1e300).clip(gradients))
    gradients["norm"][2] = value
    before = gradients.flat.copy()
    assert not math.isfinite(AdamW(weights).clip(gradients))
    assert np.array_equal(gradients.flat, before, equal_nan=True)


@given(steps=st.integers(1, 400), warmup=st.integers(0, 500), peak=st.floats(1e-6, 1))
@settings(max_examples=100, deadline=None)
def test_the_schedule_rises_then_falls_and_never_stops(steps, warmup, peak):
    rates = [learning_rate(step, steps, peak, warmup) for step in range(1, steps + 1)]
    turn = min(warmup, steps // 10)
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates)
    assert all(a < b for a, b in zip(rates[:turn], rates[1:turn], strict=False))
    assert all(a > b for a, b in zip(rates[turn:], rates[turn + 1 :], strict=False))
    if turn:
        assert math.isclose(rates[turn - 1], peak, rel_tol=5e-16)  # two roundings of float64


def test_the_schedule_done_by_hand():
    for step, rate in ((5, 0.5), (10, 1.0), (35, 0.5 + math.sqrt(0.125)), (60, 0.5)):
        assert abs(learning_rate(step, 109, 1.0, 10) - rate) < 1e-15
