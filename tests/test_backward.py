"""Every backward over drawn shapes, and deliberate mistakes that the gradient check must see."""

from dataclasses import replace

import numpy as np
import pytest
from crossings import KNOWN, choices, crossings
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import MUTANTS, Mutant, examples, load, worst_error
from slopes import Slope, slopes
from tiers import paired, thinned

from nanoeuler.checks import gradcheck
from nanoeuler.checks.derivatives import central_difference, complex_step, relative_error
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import CHOICES

reference = ReferenceEngine()
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

    (bias,) = random(seed + 1, (outputs,))
    same, _, db = accumulated(
        lambda dw, db: reference.linear_backward(dy, x, w, dw, db), w.shape, bias.shape
    )
    np.testing.assert_array_equal(same, dx)
    assert_gradient(db, lambda z: reference.linear(x, w, z), bias, dy)


def test_linear_adds_to_a_transposed_view():
    x, w, dy = random(0, (2, 3, 4), (4, 5), (2, 3, 5))
    plain, embedding = np.ones((4, 5)), np.ones((5, 4))  # as the matrix of tied weights lies
    dx = reference.linear_backward(dy, x, w, plain)
    np.testing.assert_array_equal(reference.linear_backward(dy, x, w, embedding.T), dx)
    np.testing.assert_allclose(embedding.T, plain, rtol=ROUNDING)


@over_shapes
@given(seed=seeds, B=sizes, T=sizes, V=sizes, C=sizes)
def test_embed(seed, B, T, V, C):
    table, dx = random(seed, (V, C), (B, T, C))
    tokens = np.random.default_rng(seed).integers(V, size=(B, T))
    _, dtable = accumulated(lambda dtable: reference.embed_backward(dx, tokens, dtable), (V, C))
    assert_gradient(dtable, lambda z: reference.embed(tokens, z), table, dx)

    (positions,) = random(seed + 1, (T, C))
    _, same, dpositions = accumulated(
        lambda *buffers: reference.embed_backward(dx, tokens, *buffers), (V, C), (T, C)
    )
    np.testing.assert_array_equal(same, dtable)
    assert_gradient(dpositions, lambda z: reference.embed(tokens, table, z), positions, dx)


@over_shapes
@given(seed=seeds, B=sizes, T=sizes, C=sizes)
def test_rmsnorm(seed, B, T, C):
    x, gain, dy = random(seed, (B, T, C), (C,), (B, T, C))
    r = reference.rmsnorm(x, gain)[1]
    dx, dgain = accumulated(lambda dg: reference.rmsnorm_backward(dy, x, gain, r, dg), gain.shape)
    assert_gradient(dx, lambda z: reference.rmsnorm(z, gain)[0], x, dy)
    assert_gradient(dgain, lambda z: reference.rmsnorm(x, z)[0], gain, dy)


@over_shapes
@given(seed=seeds, B=sizes, T=sizes, C=sizes)
def test_layernorm(seed, B, T, C):
    x, dy, gain, bias = random(seed, (B, T, C), (B, T, C), (C,), (C,))
    stats = reference.layernorm(x, gain, bias)[1]
    dx, dgain, dbias = accumulated(
        lambda *buffers: reference.layernorm_backward(dy, x, gain, stats, *buffers), (C,), (C,)
    )
    # A deviation near epsilon's root, of one channel or of two that are close, is 1 / sigma large.
    worst = np.max(1 / stats[..., 1])
    assert_gradient(dx / worst, lambda z: reference.layernorm(z, gain, bias)[0] / worst, x, dy)
    assert_gradient(dgain, lambda z: reference.layernorm(x, z, bias)[0], gain, dy)
    assert_gradient(dbias, lambda z: reference.layernorm(x, gain, z)[0], bias, dy)
    alone, _ = accumulated(lambda dg: reference.layernorm_backward(dy, x, gain, stats, dg), (C,))
    np.testing.assert_array_equal(alone, dx)


@over_shapes
@given(seed=seeds, C=st.integers(3, 6))
def test_layernorm_sends_nothing_along_the_constant_and_x_hat(seed, C):
    x, dy, gain = random(seed, (2, C), (2, C), (C,))
    stats = reference.layernorm(x, gain, eps=0.0)[1]
    dx = reference.layernorm_backward(dy, x, gain, stats, np.zeros(C))
    x_hat, size = (x - stats[:, :1]) / stats[:, 1:], np.max(np.abs(gain * dy) / stats[:, 1:])
    assert np.max(np.abs(np.sum(dx, axis=1))) < ROUNDING * size
    assert np.max(np.abs(np.sum(dx * x_hat, axis=1))) < ROUNDING * size


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
@given(seed=seeds, B=sizes, T=sizes, F=sizes)
def test_gelu(seed, B, T, F):
    u, dh = random(seed, (B, T, F), (B, T, F))
    assert_gradient(reference.gelu_backward(dh, 3 * u), reference.gelu, 3 * u, dh)


@over_shapes
@given(seed=seeds, B=sizes, T=sizes, F=sizes)
def test_relu2(seed, B, T, F):
    u, dh = random(seed, (B, T, F), (B, T, F))
    assert_gradient(reference.relu2_backward(dh, u), reference.relu2, u, dh)


def test_relu2_of_numbers_that_a_hand_can_square():
    u = np.array([-2.0, 0.0, 0.5, 3.0])
    np.testing.assert_array_equal(reference.relu2(u), [0, 0, 0.25, 9])
    np.testing.assert_array_equal(reference.relu2_backward(np.ones(4), u), [0, 0, 1, 6])


def test_gelu_far_out_is_the_identity_or_nothing():
    slope = reference.gelu_backward(np.ones(4), np.array([-1e4, -20.0, 20.0, 1e4]))
    np.testing.assert_array_equal(slope, [0, 0, 1, 1])


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
    assert_gradient(dlogits, lambda z: reference.cross_entropy(z, targets, scale)[0], logits, scale)
    assert not np.any(dlogits[targets == IGNORE])


@over_shapes
@given(seed=seeds, B=sizes, T=sizes, K=sizes, V=sizes)
def test_cross_entropy_of_capped_logits(seed, B, T, K, V):
    """It is that of c tanh(z / c), and the gradient is by z."""
    logits, scale = random(seed, (B, T, K, V), (K,))
    targets = np.random.default_rng(seed).integers(IGNORE, V, size=(B, T, K))
    sums, dlogits = reference.cross_entropy(logits.copy(), targets, scale, 1.5)
    plain = reference.cross_entropy(1.5 * np.tanh(logits / 1.5), targets, scale)[0]
    np.testing.assert_allclose(sums, plain, rtol=ROUNDING, atol=ROUNDING)
    assert_gradient(
        dlogits, lambda z: reference.cross_entropy(z, targets, scale, 1.5)[0], logits, scale
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
        "layernorm": reference.layernorm_backward(x, x, draw(4), draw(2, 3, 2), np.zeros(4, dtype)),
        "rope": reference.rope_backward(heads.copy(), 2, *cos_sin),
        "attention": reference.attention_backward(dy, heads, 1, p),
        "swiglu": reference.swiglu_backward(draw(2, 3, 2), x),
        "gelu": reference.gelu_backward(x, x),
        "relu2": reference.relu2_backward(x, x),
        "scale": reference.scale(x, 0.7),
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


def test_the_code_as_it_is_passes_where_the_mutants_must_fail():
    for problem, exact in examples():
        derived = gradcheck.derived_gradient(problem)
        for slope in exact:
            assert slope.error(derived) < 1e-12  # rounding; the smallest mistake is 1e-6


def test_a_slope_of_nothing_has_no_error_and_hides_none():
    class Gradient:
        def __init__(self, *numbers):
            self.flat = np.array(numbers)

    flat, steep = (Slope(np.array([1.0, 2.0, 0.0]), exact) for exact in (0.0, 3.0))
    assert flat.error(Gradient(0.0, 0.0, 5.0)) == 0 == flat.error(Gradient(2.0, -1.0, 5.0))
    assert steep.error(Gradient(1.0, 1.0, 5.0)) == 0 < steep.error(Gradient(0.0, 0.0, 5.0))
    assert flat.error(Gradient(1.0, 0.0, 0.0)) > 0.1
    assert not flat.error(Gradient(np.nan, 0.0, 0.0)) <= 1


# All of them in make test, too: chapter 6a counts them, and its output is compared.
@pytest.mark.parametrize("mutant", thinned([(each,) for each in MUTANTS]),
                         ids=lambda mutant: f"{mutant.function}: {mutant.what}")  # fmt: skip
def test_every_mutant_is_caught(mutant):
    assert not worst_error(mutant) <= gradcheck.BOUND, f"{mutant.what} was not noticed"


def test_a_mutant_that_has_gone_stale_is_refused():
    for old in ("no such line", "np.sum"):  # not there; there twice
        with pytest.raises(AssertionError, match="not exactly once in layernorm_backward"):
            load(Mutant("model.backward", "layernorm_backward", "stale", old, "pass"))


ARCHITECTURES = gradcheck.architectures()
SWITCHES = {name: config for name, config in ARCHITECTURES.items() if "," not in name}


@pytest.mark.parametrize("setting", paired(crossings("integrator", "sliding_window"), choices()))
def test_every_architecture_with_other_steps_and_shared_blocks(setting):
    """Those of `nanoeuler check`, which compares every element, crossed with what it does not."""
    n_predict = 1 if setting["tied"] else gradcheck.TINIEST.n_predict
    steps = {"step_size": 0.7, "n_layers": 4, "repeat": 2, "n_predict": n_predict}
    config = replace(gradcheck.TINIEST, **setting, **steps)
    problem = gradcheck.tiny_problem(config)
    derived = gradcheck.derived_gradient(problem)
    for slope in slopes(problem, reference, 3):
        assert slope.error(derived) < 1e-11  # rounding, which some weights enlarge


@pytest.mark.long
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_element_of_every_architecture(name):
    """`nanoeuler check`, of which chapter 6a runs a third."""
    assert gradcheck.check_architecture(name, ARCHITECTURES[name]).derived < 1e-11


def test_an_architecture_has_the_error_of_its_worst_tensor():
    config = replace(gradcheck.TINIEST, n_layers=1)
    problem = gradcheck.tiny_problem(config)
    rows = gradcheck.check_tensors(problem)
    row = gradcheck.check_architecture("one layer", config)
    assert row.name == "one layer" and row.shape == (sum(x.size for x in problem.w.values()),)
    assert row.derived == max(row.derived for row in rows) < 1e-12


def test_the_architectures_are_all_there_are():
    seen = {tuple(getattr(config, s) for s in gradcheck.CROSSED) for config in SWITCHES.values()}
    assert len(SWITCHES) == len(seen) == 2 ** len(gradcheck.CROSSED)
    steps = [config for name, config in ARCHITECTURES.items() if name not in SWITCHES]
    ways = (*CHOICES, "step_size", "repeat")
    seen = {tuple(getattr(config, way) for way in ways) for config in steps}
    # Each integrator in four models, each other value that is not crossed in two.
    alone = sum(len(KNOWN[way]) - 1 - (way in gradcheck.CROSSED) for way in CHOICES)
    integrators = len(KNOWN["integrator"])
    assert len(steps) == len(seen) == 4 * integrators + 2 * (alone - integrators + 1)
    for name, values in KNOWN.items():
        assert {getattr(config, name) for config in ARCHITECTURES.values()} >= {*values}
    assert all(config.n_blocks == 2 for config in ARCHITECTURES.values())


def test_the_tables_of_tensors():
    for name in ("rms rope swiglu", "layer learned gelu bias tied"):
        problem = gradcheck.tiny_problem(ARCHITECTURES[name])
        rows = gradcheck.check_tensors(problem, "a ")
        assert [row.name for row in rows] == [f"a {name}" for name in problem.w]
        assert [row.shape for row in rows] == [tensor.shape for tensor in problem.w.values()]
        assert max(row.derived for row in rows) < 1e-12 < min(row.central for row in rows)
        assert max(row.central for row in rows) < 1e-5  # another witness, and it says the same


def test_the_whole_check_holds_two_tables_and_all_architectures(monkeypatch):
    for name in ("TINY", "TINY_GPT2"):
        monkeypatch.setattr(gradcheck, name, replace(gradcheck.TINIEST, vocab_size=2, n_layers=1))
    few = dict(list(ARCHITECTURES.items())[:2])
    monkeypatch.setattr(gradcheck, "architectures", lambda: few)
    rows = gradcheck.check()
    assert len(rows) == 9 + 9 + 2 and gradcheck.passed(rows)
    assert rows[0].name == "embedding" and rows[9].name == "GPT-2's embedding"
    assert [row.name for row in rows[18:]] == list(few) and rows[18].central is None


def test_a_nan_in_one_tensor_fails_the_architecture(monkeypatch):
    def broken(problem, engine=reference):
        dw = problem.w.zeros_like()
        dw["norm"][0] = np.nan
        return dw

    monkeypatch.setattr(gradcheck, "derived_gradient", broken)
    row = gradcheck.check_architecture("broken", replace(gradcheck.TINIEST, n_layers=1))
    assert not gradcheck.passed([row]) and gradcheck.table([row]).endswith("FAILED")


def test_the_table_names_the_tensor_and_the_verdict():
    good = gradcheck.Row("norm", (16,), 1e-15, 1e-10)
    bad = gradcheck.Row("output", (16, 14), 2e-9, 1e-10)
    model = gradcheck.Row("rms rope gelu", (236,), 1e-14)
    assert gradcheck.passed([good, model]) and not gradcheck.passed([good, bad, model])
    assert gradcheck.table([good, model]).endswith("worst 1.0e-14, bound 1e-10: passed")
    text = gradcheck.table([good, bad, model])
    assert "output" in text and "16x14" in text and text.endswith("FAILED")
    (line,) = (line for line in text.split("\n") if line.startswith("rms rope gelu"))
    assert line.split() == ["rms", "rope", "gelu", "236", "1.0e-14"]
    assert not gradcheck.passed([gradcheck.Row("norm", (16,), float("nan"), 0.0)])
