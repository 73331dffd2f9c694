"""Every backward over drawn shapes, and deliberate mistakes that the gradient check must see."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import MUTANTS, load

from nanoeuler import gradcheck, reference
from nanoeuler.backward import IGNORE
from nanoeuler.derivatives import central_difference, complex_step, relative_error

# Rounding: a few hundred operations of 1e-16 each, with room.
ROUNDING = 1e-12

over_shapes = settings(max_examples=20, deadline=None, derandomize=True)
sizes = st.integers(1, 4)
seeds = st.integers(0, 2**32 - 1)


def random(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def assert_gradient(derived, f, x, dy):
    """`derived` is the gradient of sum(dy * f(x)) by x; compared with the size of its terms."""
    exact = complex_step(lambda z: np.sum(dy * f(z)), x)
    terms = np.max(np.abs(exact)) + np.max(np.abs(dy))  # an exact zero has no largest element
    assert np.max(np.abs(derived - exact)) < ROUNDING * terms


def accumulated(backward, *shapes):
    """Run `backward(*buffers)` into buffers of ones and take the ones away: it must have added."""
    buffers = [np.ones(shape) for shape in shapes]
    dx = backward(*buffers)
    return dx, *(buffer - 1 for buffer in buffers)


@over_shapes
@given(seed=seeds, B=sizes, T=sizes, inputs=sizes, outputs=sizes)
def test_linear(seed, B, T, inputs, outputs):
    x, w, dy = random(seed, (B, T, inputs), (inputs, outputs), (B, T, outputs))
    dx, dw = accumulated(lambda dw: reference.linear_backward(dy, x, w, dw), w.shape)
    assert_gradient(dx, lambda z: reference.linear(z, w), x, dy)
    assert_gradient(dw, lambda z: reference.linear(x, z), w, dy)


@over_shapes
@given(seed=seeds, B=sizes, T=sizes, V=sizes, C=sizes)
def test_embed(seed, B, T, V, C):
    table, dx = random(seed, (V, C), (B, T, C))
    tokens = np.random.default_rng(seed).integers(V, size=(B, T))
    _, dtable = accumulated(lambda dtable: reference.embed_backward(dx, tokens, dtable), (V, C))
    assert_gradient(dtable, lambda z: reference.embed(tokens, z), table, dx)


@over_shapes
@given(seed=seeds, B=sizes, T=sizes, C=sizes)
def test_rmsnorm(seed, B, T, C):
    x, gain, dy = random(seed, (B, T, C), (C,), (B, T, C))
    r = reference.rmsnorm(x, gain)[1]
    dx, dgain = accumulated(lambda dg: reference.rmsnorm_backward(dy, x, gain, r, dg), gain.shape)
    assert_gradient(dx, lambda z: reference.rmsnorm(z, gain)[0], x, dy)
    assert_gradient(dgain, lambda z: reference.rmsnorm(x, z)[0], gain, dy)


@over_shapes
@given(seed=seeds, B=sizes, T=sizes, N=sizes, half=sizes, data=st.data())
def test_rope(seed, B, T, N, half, data):
    n = data.draw(st.integers(0, N))
    x, dy = random(seed, (B, T, N, 2 * half), (B, T, N, 2 * half))
    cos, sin = reference.rope_tables(T, 2 * half)
    dx = reference.rope_backward(dy.copy(), n, cos, sin)
    assert_gradient(dx, lambda z: reference.rope(z.copy(), n, cos, sin), x, dy)


@over_shapes
@given(seed=seeds, B=sizes, T=sizes, G=sizes, R=sizes, D=sizes)
def test_attention(seed, B, T, G, R, D):
    heads, dy = random(seed, (B, T, (R + 2) * G, D), (B, T, R * G * D))
    p = reference.attention(heads, G)[1]
    dheads = reference.attention_backward(dy, heads, G, p)
    assert_gradient(dheads, lambda z: reference.attention(z, G)[0], heads, dy)


@over_shapes
@given(seed=seeds, T=st.integers(2, 5), G=sizes, R=sizes, data=st.data())
def test_attention_sends_no_gradient_to_the_future(seed, T, G, R, data):
    now = data.draw(st.integers(0, T - 2))
    heads, dy = random(seed, (2, T, (R + 2) * G, 2), (2, T, R * G * 2))
    dy[:, now + 1 :] = 0  # a loss that looks at positions up to `now`
    dheads = reference.attention_backward(dy, heads, G, reference.attention(heads, G)[1])
    assert not np.any(dheads[:, now + 1 :])
    assert np.all(np.any(dheads[:, : now + 1], axis=(2, 3)))


@over_shapes
@given(seed=seeds, B=sizes, T=sizes, F=sizes)
def test_swiglu(seed, B, T, F):
    gate_up, dh = random(seed, (B, T, 2 * F), (B, T, F))
    assert_gradient(reference.swiglu_backward(dh, gate_up), reference.swiglu, gate_up, dh)


@over_shapes
@given(seed=seeds, B=sizes, T=sizes, K=sizes, V=sizes)
def test_cross_entropy(seed, B, T, K, V):
    logits, scale = random(seed, (B, T, K, V), (K,))
    targets = np.random.default_rng(seed).integers(IGNORE, V, size=(B, T, K))
    sums, dlogits = reference.cross_entropy(logits.copy(), targets, scale)
    p = np.exp(logits) / np.sum(np.exp(logits), axis=-1, keepdims=True)
    expected = np.zeros(K)
    for b, t, k in np.argwhere(targets != IGNORE):
        expected[k] -= np.log(p[b, t, k, targets[b, t, k]])
    np.testing.assert_allclose(sums, expected, rtol=ROUNDING, atol=ROUNDING)
    assert_gradient(
        dlogits, lambda z: reference.cross_entropy(z, targets, scale)[0], logits, scale
    )
    assert not np.any(dlogits[targets == IGNORE])


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_cross_entropy_of_huge_logits_is_finite_and_right(size):
    logits = np.array([0, size], np.float32).reshape(1, 1, 1, 2)
    sums, dlogits = reference.cross_entropy(logits, np.array([[[0]]]), np.ones(1))
    assert sums[0] == max(size, 0)  # exp(-1e4) is 0 in float32 and in float64
    np.testing.assert_array_equal(dlogits.ravel(), [-1, 1] if size > 0 else [0, 0])


def test_cross_entropy_refuses_what_is_no_token():
    for target in (3, -2):
        with pytest.raises(AssertionError, match="no token"):
            reference.cross_entropy(np.zeros((1, 1, 1, 3)), np.array([[[target]]]), np.ones(1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
def test_dtypes_are_kept(dtype):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    x, dy, cos_sin = draw(2, 3, 4), draw(2, 3, 6), reference.rope_tables(3, 2)
    heads = draw(2, 3, 5, 2)
    _, p = reference.attention(heads, 1)
    targets = rng.integers(4, size=(2, 3, 2))
    logits = reference.cross_entropy(draw(2, 3, 2, 4), targets, np.ones(2))[1]
    results = {
        "linear": reference.linear_backward(dy, x, draw(4, 6), np.zeros((4, 6), dtype)),
        "rmsnorm": reference.rmsnorm_backward(x, x, draw(4), draw(2, 3, 1), np.zeros(4, dtype)),
        "rope": reference.rope_backward(heads.copy(), 2, *cos_sin),
        "attention": reference.attention_backward(dy, heads, 1, p),
        "swiglu": reference.swiglu_backward(draw(2, 3, 2), x),
        "cross_entropy": logits,
    }
    assert {name: result.dtype for name, result in results.items()} == dict.fromkeys(results, dtype)


def test_central_differences_and_the_complex_step_know_a_derivative():
    x = np.array([[0.5, -1.0], [2.0, 3.0]])
    exact = 3 * x**2
    # 1e-8: the error of the best step, 1e-11, times the size of the sum, with room.
    assert relative_error(central_difference(lambda z: np.sum(z**3), x), exact) < 1e-8
    assert relative_error(complex_step(lambda z: np.sum(z**3), x), exact) < 1e-15
    assert x.tolist() == [[0.5, -1.0], [2.0, 3.0]]


@pytest.fixture(scope="module")
def problem():
    return gradcheck.tiny_problem()


@pytest.fixture(scope="module")
def exact(problem):
    return gradcheck.numerical_gradient(problem, complex_step, np.complex128)


def errors(derived, exact):
    return np.array([relative_error(derived[name], exact[name]) for name in exact])


def test_the_code_as_it_is_passes(problem, exact):
    assert np.all(errors(gradcheck.derived_gradient(problem), exact) < 1e-13)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_every_mutant_is_caught(mutant, problem, exact, monkeypatch):
    module, engine = load(mutant), SimpleNamespace(**vars(reference))
    if mutant.module == "model":
        monkeypatch.setattr(gradcheck, "loss_and_gradients", module.loss_and_gradients)
    else:
        for name in set(vars(reference)) & set(module.__all__):
            setattr(engine, name, vars(module)[name])
    derived = gradcheck.derived_gradient(problem, engine)  # the mistake raises nothing
    assert np.max(errors(derived, exact)) > gradcheck.BOUND, f"{mutant.what} was not noticed"


def test_the_table_names_the_tensor_and_the_verdict():
    good = gradcheck.Row("norm", (16,), 1e-15, 1e-10)
    bad = gradcheck.Row("output", (16, 14), 2e-9, 1e-10)
    assert gradcheck.passed([good]) and not gradcheck.passed([good, bad])
    assert gradcheck.table([good]).endswith("worst 1.0e-15, bound 1e-10: passed")
    text = gradcheck.table([good, bad])
    assert "output" in text and "16x14" in text and text.endswith("FAILED")
    assert not gradcheck.passed([gradcheck.Row("norm", (16,), float("nan"), 0.0)])
