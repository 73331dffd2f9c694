"""The model: its buffer, its start, its gradient over drawn configurations, and in parts."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler import reference
from nanoeuler.backward import IGNORE
from nanoeuler.config import ModelConfig, count_parameters, parameter_shapes
from nanoeuler.derivatives import relative_error
from nanoeuler.gradcheck import TINY, derived_gradient, tiny_problem
from nanoeuler.model import (
    EXTRA_HEAD_WEIGHT,
    PADDING,
    Weights,
    forward,
    head_weights,
    initialise,
    loss_and_gradients,
    loss_scale,
    loss_sums,
)

few = settings(max_examples=25, deadline=None, derandomize=True)


@st.composite
def configs(draw):
    """Small configurations of every form: any grouping, odd sizes, one layer or head or target."""
    size = st.integers(1, 3)
    n_kv_heads, group, half = draw(size), draw(size), draw(size)
    n_heads = n_kv_heads * group
    return ModelConfig(
        vocab_size=draw(st.integers(2, 9)),
        dim=n_heads * 2 * half,
        n_layers=draw(size),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        hidden=draw(st.integers(1, 7)),
        context=draw(st.integers(1, 6)),
        n_predict=draw(size),
    )


def gradient(problem, dtype=np.float64):
    """(loss, dw) of the whole batch in one pass, with weights of `dtype`."""
    w = Weights(problem.config, dtype)
    w.flat[...] = problem.w.flat
    dw = w.zeros_like()
    sums = loss_and_gradients(
        reference, problem.config, w, problem.tokens, problem.targets, problem.scale, dw
    )
    return problem.scale @ sums, dw


def text(problem, i):
    """The problem of text i alone, with the scale of the whole."""
    i = slice(i, i + 1)
    return problem._replace(tokens=problem.tokens[i], targets=problem.targets[i])


@few
@given(config=configs(), seed=st.integers(0, 1000))
def test_gradient_of_any_configuration_in_random_directions(config, seed):
    problem = tiny_problem(config, seed)
    _, dw = gradient(problem)
    rng = np.random.default_rng(seed)
    w = Weights(config, np.complex128)
    for _ in range(3):  # no wrong element is perpendicular to a random direction
        v = rng.standard_normal(dw.flat.size)
        w.flat[...] = problem.w.flat + 1e-30j * v
        sums = loss_sums(reference, config, w, problem.tokens, problem.targets)
        slope = (problem.scale @ sums).imag / 1e-30
        # Rounding: sums of some thousand terms, each right to 1e-15 of the longest vectors' size.
        assert abs(slope - dw.flat @ v) <= 1e-12 * np.linalg.norm(dw.flat) * np.linalg.norm(v)


@few
@given(config=configs())
def test_the_buffer(config):
    for dtype in (np.float32, np.float64, np.complex128):
        w = Weights(config, dtype)
        assert w.flat.dtype == dtype and w.flat.ctypes.data % 64 == 0
        assert {name: t.shape for name, t in w.items()} == parameter_shapes(config)
        assert list(w) == list(parameter_shapes(config)) and len(w) == len(list(w.items()))
        starts = [(t.ctypes.data - w.flat.ctypes.data) // w.flat.itemsize for t in w.values()]
        assert starts == sorted(starts) and all(start % PADDING == 0 for start in starts)
        for number, tensor in enumerate(w.values(), 1):
            assert not np.any(tensor)  # nobody else's view reaches into this one
            tensor[...] = number
        assert np.count_nonzero(w.flat) == count_parameters(config)
        assert w.flat.size - count_parameters(config) < PADDING * len(w)


@few
@given(config=configs(), seed=st.integers(0, 1000))
def test_padding_stays_zero(config, seed):
    for w in (gradient(tiny_problem(config, seed))[1], initialise(config, seed)):
        for tensor in w.values():
            tensor[...] = 0
        assert not np.any(w.flat)


def test_weights_lie_over_given_memory():
    w = initialise(TINY, 0)
    again = Weights(TINY, np.float32, w.flat)
    again["norm"][...] = 7
    assert np.all(w["norm"] == 7) and again.flat is w.flat
    zeros = w.zeros_like()
    assert zeros.flat.dtype == np.float32 and not np.any(zeros.flat) and zeros.config == TINY
    for flat in (np.zeros(w.flat.size + 1, np.float32), np.zeros(w.flat.size, np.float64)):
        with pytest.raises(AssertionError):
            Weights(TINY, np.float32, flat)


def test_initialise():
    config = ModelConfig(**{**vars(TINY), "vocab_size": 256, "dim": 64, "n_layers": 8})
    w, wide, other = (
        initialise(config, seed, dtype)
        for seed, dtype in [(0, np.float32), (0, np.float64), (1, np.float32)]
    )
    for name, tensor in w.items():
        if tensor.ndim == 1:
            assert np.all(tensor == 1)
            continue
        deviation = 0.02 / 4 if name.endswith(("wo", "w_down")) else 0.02  # sqrt(2 * 8) = 4
        n = tensor.size  # five deviations of the sample's mean and deviation
        assert abs(tensor.mean()) < 5 * deviation / n**0.5
        assert abs(tensor.std() / deviation - 1) < 5 / (2 * n) ** 0.5
        assert not np.any(tensor == other[name])
    np.testing.assert_allclose(w.flat, wide.flat, rtol=1e-6)  # the rounding of float32


@pytest.mark.parametrize("seed", range(3))
def test_parts_of_a_batch_add_up_to_the_whole(seed):
    problem = tiny_problem(seed=seed)
    loss, whole = gradient(problem)
    parts = derived_gradient(problem)  # text by text into one buffer
    assert relative_error(parts.flat, whole.flat) < 1e-13  # the same terms in another order
    assert abs(gradient(text(problem, 0))[0] + gradient(text(problem, 1))[0] - loss) < 1e-13 * loss


def test_gradients_are_added_to_what_is_there():
    problem = tiny_problem()
    _, once = gradient(problem)
    dw = once.zeros_like()
    for tensor in dw.values():
        tensor[...] = 3
    loss_and_gradients(
        reference, TINY, problem.w, problem.tokens, problem.targets, problem.scale, dw
    )
    for name, tensor in dw.items():
        np.testing.assert_allclose(tensor, 3 + once[name], rtol=1e-13, atol=1e-13)


def test_ignored_targets_teach_nothing():
    problem = tiny_problem()
    silent = problem._replace(targets=np.full_like(problem.targets, IGNORE))
    loss, dw = gradient(silent)
    assert loss == 0 and not np.any(dw.flat)

    # What stands after the last counted target reaches no gradient at all: neither its tokens ...
    cut = problem.targets.copy()
    cut[:, 3:] = IGNORE
    tokens = problem.tokens.copy()
    tokens[:, 3:] = (tokens[:, 3:] + 1) % TINY.vocab_size
    _, one = gradient(problem._replace(targets=cut))
    _, other = gradient(problem._replace(targets=cut, tokens=tokens))
    np.testing.assert_array_equal(one.flat, other.flat)
    # ... nor the columns of a head that has no target.
    cut[..., 1] = IGNORE
    _, dw = gradient(problem._replace(targets=cut))
    columns = dw["output"].reshape(TINY.dim, TINY.n_predict, TINY.vocab_size)
    assert np.any(columns[:, 0]) and not np.any(columns[:, 1])


def test_heads_own_their_columns_and_their_targets():
    problem = tiny_problem()
    logits, _ = forward(reference, TINY, problem.w, problem.tokens)
    assert logits.shape == (2, TINY.context, TINY.n_predict, TINY.vocab_size)
    one = ModelConfig(**{**vars(TINY), "n_predict": 1})
    w = Weights(one, np.float64)
    for name, tensor in w.items():
        columns = problem.w[name][:, TINY.vocab_size :] if name == "output" else problem.w[name]
        tensor[...] = columns
    np.testing.assert_allclose(
        forward(reference, one, w, problem.tokens)[0][:, :, 0], logits[:, :, 1], rtol=1e-13
    )


def test_scale_and_head_weights():
    assert head_weights(3).tolist() == [1, EXTRA_HEAD_WEIGHT, EXTRA_HEAD_WEIGHT]
    targets = np.array([[[1, 2], [3, IGNORE]], [[IGNORE, IGNORE], [0, IGNORE]]])
    assert loss_scale(targets, np.array([1.0, 0.5])).tolist() == [1 / 3, 0.5]
    assert np.all(np.isfinite(loss_scale(np.full((1, 1, 2), IGNORE), np.ones(2))))


def test_float32_is_float64_rounded():
    problem = tiny_problem()
    loss, exact = gradient(problem)
    loss32, dw = gradient(problem, np.float32)
    assert dw.flat.dtype == np.float32
    assert abs(loss32 - loss) < 1e-5 * loss
    assert relative_error(dw.flat, exact.flat) < 1e-5  # 1e-7 a rounding, some hundred of them
    _, saved = forward(reference, TINY, Weights(TINY), problem.tokens)
    arrays = [array for block in saved.blocks for array in block] + [saved.x, saved.r, saved.n]
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}


def test_evaluation_equals_training_loss():
    problem = tiny_problem()
    sums = loss_sums(reference, TINY, problem.w, problem.tokens, problem.targets)
    assert problem.scale @ sums == gradient(problem)[0]


def test_a_pass_begins_once_and_gives_back_each_blocks_memory():
    events = []

    class Scratch:
        def __enter__(self):
            events.append("in")

        def __exit__(self, *error):
            events.append("out")

    engine = SimpleNamespace(
        **{**vars(reference), "begin": lambda: events.append("begin"), "scratch": Scratch}
    )
    dw = derived_gradient(text(tiny_problem(), 0), engine)
    assert events == ["begin"] + ["in", "out"] * TINY.n_layers
    assert np.any(dw.flat)
