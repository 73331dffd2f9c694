"""The model: its buffer, its start, its gradient over drawn configurations, and in parts."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from crossings import KNOWN, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler.checks import plain
from nanoeuler.checks.derivatives import complex_step, relative_error
from nanoeuler.checks.gradcheck import TINIEST, TINY, TINY_GPT2, derived_gradient, tiny_problem
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model import weights
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import ModelConfig, count_parameters, parameter_shapes
from nanoeuler.model.integrators import INTEGRATORS, Tableau
from nanoeuler.model.transformer import (
    EXTRA_HEAD_WEIGHT,
    forward,
    head_weights,
    loss_and_gradients,
    loss_scale,
    loss_sums,
    step,
    step_backward,
    stream,
)
from nanoeuler.model.weights import (
    INITIAL_DEVIATION,
    PADDING,
    Weights,
    initialise,
    output_matrix,
)

reference = ReferenceEngine()

few = settings(max_examples=25, deadline=None, derandomize=True)


@st.composite
def configs(draw):
    """Small configurations of every form: any grouping, odd sizes, one layer or head or target."""
    size = st.integers(1, 3)
    n_kv_heads, group, half, repeat = draw(size), draw(size), draw(size), draw(st.integers(1, 2))
    n_heads = n_kv_heads * group
    switches = {name: draw(st.sampled_from(choices)) for name, choices in KNOWN.items()}
    return ModelConfig(
        vocab_size=draw(st.integers(2, 9)),
        dim=n_heads * (2 * half if switches["position"] == "rope" else half),
        n_layers=draw(size) * repeat,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        hidden=draw(st.integers(1, 7)),
        context=draw(st.integers(1, 6)),
        n_predict=1 if switches["tied"] else draw(size),
        step_size=draw(st.sampled_from([1.0, 0.5, 0.3])),
        repeat=repeat,
        **whole(switches),
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


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("stretch", [1 << 14, 3 << 14, 1 << 18])
def test_weights_drawn_by_many_threads_are_those_of_one_generator(stretch, seed, monkeypatch):
    """To the last bit, wherever stretches and matrices end."""
    monkeypatch.setattr(weights, "STRETCH", stretch)
    config = replace(TINY, vocab_size=1000, dim=160, n_layers=2, hidden=200)
    made, rng = initialise(config, seed, np.float64), np.random.default_rng(seed)
    assert made.flat.size > 1 << 18
    for name, tensor in made.items():
        if tensor.ndim > 1:
            expected = INITIAL_DEVIATION * rng.standard_normal(tensor.shape)
            if name.endswith((".wo", ".w_down")):
                expected *= 1 / math.sqrt(2 * config.n_layers)
            np.testing.assert_array_equal(tensor, expected, name)


@pytest.mark.parametrize("tiny", [TINY, TINY_GPT2])
def test_initialise(tiny):
    config = replace(tiny, vocab_size=256, dim=64, n_layers=8, context=64)
    w, wide, other = (
        initialise(config, seed, dtype)
        for seed, dtype in [(0, np.float32), (0, np.float64), (1, np.float32)]
    )
    for name, tensor in w.items():
        if tensor.ndim == 1:
            assert np.all(tensor == (0 if "bias" in name else 1))
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
    assert abs(sum(gradient(text(problem, i))[0] for i in range(3)) - loss) < 1e-13 * loss


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_model_computes_what_the_model_on_one_page_does(groups, seed):
    """They share the operations, so what differs is the order of a few sums: some 2^-53 of each."""
    problem = tiny_problem(replace(TINY, n_kv_heads=groups), seed)
    page, model = problem.w.zeros_like(), problem.w.zeros_like()
    page_sums = plain.gpt(*problem, page)
    model_sums = loss_and_gradients(ReferenceEngine(), *problem, model)
    np.testing.assert_allclose(page_sums, model_sums, rtol=1e-13)
    assert relative_error(model.flat, page.flat) < 1e-13


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
    assert logits.shape == (3, TINY.context, TINY.n_predict, TINY.vocab_size)
    one = replace(TINY, n_predict=1)
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


@pytest.mark.parametrize("config", [TINY, TINY_GPT2, replace(TINIEST, integrator="rk4")])
def test_float32_is_float64_rounded(config):
    problem = tiny_problem(config)
    loss, exact = gradient(problem)
    loss32, dw = gradient(problem, np.float32)
    assert dw.flat.dtype == np.float32
    assert abs(loss32 - loss) < 1e-5 * loss
    assert relative_error(dw.flat, exact.flat) < 1e-5  # 1e-7 a rounding, some hundred of them
    _, saved = forward(reference, config, Weights(config), problem.tokens)
    stages = [stage for layer in saved.layers for half in layer for stage in half]
    assert len(stages) == 2 * config.n_layers * len(INTEGRATORS[config.integrator].b)
    arrays = [array for stage in stages for array in (stage.x, stage.stats, *stage.saved)]
    arrays += [saved.x, saved.stats]
    assert {a.dtype for a in arrays if a is not None} == {np.dtype(np.float32)}  # None: no `first`


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

    class Engine(ReferenceEngine):
        scratch = Scratch

        def begin(self):
            events.append("begin")

    p, dw = tiny_problem(), Weights(TINY, np.float64)
    loss_and_gradients(Engine(), TINY, p.w, p.tokens, p.targets, p.scale, dw)
    assert events == ["begin"] + ["in", "out"] * TINY.n_layers
    assert np.any(dw.flat)


def drawn(seed, stages):
    """A random explicit table, with a zero in it, and weights that do not sum to one."""
    rng = np.random.default_rng(seed)
    a = [tuple(rng.uniform(-1, 1, i)) for i in range(stages)]
    if stages > 2:
        a[-1] = (0.0, *a[-1][1:])
    return Tableau(tuple(a), tuple(rng.uniform(-1, 1, stages)))


def stepped(config, f, x, gain):
    """The stream after a step with velocity f(n, i), and the stages; f reads through an RMSNorm."""
    x, pending, stages = step(reference, config, f, (gain, None), x, [])
    return reference.move_norm(config, x, pending, gain, None)[0], stages


@pytest.mark.parametrize("h", [1.0, 0.3])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_the_backward_of_a_step_of_any_table(stages, h, monkeypatch):
    monkeypatch.setitem(INTEGRATORS, "drawn", drawn(stages, stages))
    config = SimpleNamespace(integrator="drawn", step_size=h, norm="rms", norm_eps=1e-5)
    rng = np.random.default_rng(stages)
    x, dy, matrix = (rng.standard_normal(shape) for shape in [(2, 3), (2, 3), (3, 3)])
    gain = rng.standard_normal(3)

    def f(n, i, matrix=matrix):
        k = np.tanh(n @ matrix)
        return k, (n, k)

    def f_backward(saved, dk, again):
        n, k = saved
        np.testing.assert_array_equal(again(), n)
        return reference.linear_backward(dk * (1 - k * k), n, matrix, dmatrix)

    dx, dmatrix, dgain = dy.copy(), np.zeros((3, 3)), np.zeros(3)
    kept = stepped(config, f, x, gain)[1]
    step_backward(reference, config, f_backward, (gain, None), (dgain, None), kept, dx)
    exact = complex_step(lambda z: np.sum(dy * stepped(config, f, z, gain)[0]), x)
    assert relative_error(dx, exact) < 1e-13  # rounding, some hundred operations
    exact = complex_step(
        lambda z: np.sum(dy * stepped(config, lambda n, i: f(n, i, z), x, gain)[0]), matrix
    )
    assert relative_error(dmatrix, exact) < 1e-13
    exact = complex_step(lambda z: np.sum(dy * stepped(config, f, x, z)[0]), gain)
    assert relative_error(dgain, exact) < 1e-13


class NoNorm(ReferenceEngine):
    """An engine whose norm leaves everything as it is, to see the step alone."""

    rmsnorm = staticmethod(lambda x, gain, eps: (x, None))
    rmsnorm_backward = staticmethod(lambda dy, x, gain, stats, dgain: dy.copy())


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_a_step_is_that_of_chapter_two(integrator):
    config = SimpleNamespace(integrator=integrator, step_size=0.5, norm="rms", norm_eps=1e-5)
    x, k = np.random.default_rng(0).standard_normal((2, 2, 3))
    f, none = (lambda n, i: (np.sin(n), i)), (None, None)
    # Terms that are pending are the first thing that a step adds.
    y, pending, stages = step(NoNorm(), config, f, none, x, [(2.0, k)])
    start, y = x + 2.0 * k, y + sum(weight * velocity for weight, velocity in pending)
    expected = INTEGRATORS[integrator].step(lambda u, t: np.sin(u), start, 0.0, 0.5)
    np.testing.assert_allclose(y, expected, rtol=1e-14)
    assert [stage.saved for stage in stages] == list(range(len(INTEGRATORS[integrator].b)))
    np.testing.assert_array_equal(stages[0].x, start)


def test_a_step_leaves_what_it_was_given():
    x, seen, none = np.ones((1, 2)), [], (None, None)
    # With h = 2 the weight of each stage is 1.
    config = SimpleNamespace(integrator="heun", step_size=2.0, norm="rms", norm_eps=1e-5)
    _, _, stages = step(NoNorm(), config, lambda n, i: (n, None), none, x, [])
    assert np.all(x == 1) and stages[0].x is x
    dx = np.ones((1, 2))

    def f_backward(saved, dk, again):
        seen.append(dk[0, 0])
        return dk.copy()

    step_backward(NoNorm(), config, f_backward, none, none, stages, dx)
    assert seen == [1, 3]  # dk_1 = h/2 dy, dk_0 = h/2 dy + h du_1
    assert np.all(dx == 1 + 3 + 1)


@pytest.mark.parametrize("config", [TINY, TINY_GPT2])
def test_blocks_are_views_and_none_for_what_is_not_there(config):
    w = initialise(config, 0)
    b = w.blocks[1]
    assert len(w.blocks) == config.n_blocks
    assert b.wqkv is w["block.1.wqkv"] and b.norm2 is w["block.1.norm2"]
    assert (b.w_up_bias is None) == (config is TINY)
    named = {name for name, tensor in b._asdict().items() if tensor is not None}
    assert named == {name[8:] for name in w if name.startswith("block.1.")}


@few
@given(config=configs())
def test_a_block_starts_where_its_first_tensor_does(config):
    w = Weights(config)
    for i, start in enumerate(w.block_starts):
        w.flat[...] = 0
        w.flat[start:] = 1
        behind = {name for name, tensor in w.items() if np.all(tensor == 1)}
        assert all(np.all(tensor == tensor.flat[0]) for tensor in w.values())  # no cut within
        last = [name for name in w if name in ("norm", "norm_bias", "output")]
        blocks = [name for name in w if name.startswith("block.") and int(name.split(".")[1]) >= i]
        assert behind == {*blocks, *last}
    assert len(w.block_starts) == config.n_blocks + 1


def test_the_output_matrix_of_a_tied_model_is_a_view_of_the_embedding():
    w = initialise(TINY_GPT2, 0)
    assert "output" not in w and np.shares_memory(output_matrix(TINY_GPT2, w), w["embedding"])
    plain = initialise(TINY, 0)
    assert output_matrix(TINY, plain) is plain["output"]


def test_shared_tensors_receive_the_sum_of_their_copies_gradients():
    config = replace(TINIEST, tied=True, n_predict=1, n_layers=4, repeat=2)
    apart = replace(config, tied=False, repeat=1)
    problem = tiny_problem(config)
    w = Weights(apart, np.float64)

    def original(tensors, name):
        if name == "output":
            return tensors["embedding"].T
        if name.startswith("block."):
            _, layer, short = name.split(".")
            return tensors[f"block.{'0011'[int(layer)]}.{short}"]
        return tensors[name]

    for name, tensor in w.items():
        tensor[...] = original(problem.w, name)
    loss, dw = gradient(problem)
    loss_apart, dw_apart = gradient(problem._replace(config=apart, w=w))
    assert loss_apart == loss
    added = dw.zeros_like()
    for name, tensor in dw_apart.items():
        original(added, name)[...] += tensor
    assert relative_error(dw.flat, added.flat) < 1e-13


def test_a_text_shorter_than_the_context_uses_the_first_positions():
    problem = tiny_problem(TINY_GPT2)
    short = problem._replace(tokens=problem.tokens[:, :3], targets=problem.targets[:, :3])
    _, dw = gradient(short)
    assert np.all(np.any(dw["positions"][:3], axis=1)) and not np.any(dw["positions"][3:])
    before, _ = stream(reference, TINY_GPT2, problem.w, problem.tokens[:, :3])
    whole, _ = stream(reference, TINY_GPT2, problem.w, problem.tokens)
    np.testing.assert_allclose(before, whole[:, :3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_stream_may_start_later(position):
    # One layer's first half sees no other text: its values at position 2 are those of the whole.
    config = replace(TINIEST, position=position, n_layers=1)
    problem = tiny_problem(config)
    _, whole = stream(reference, config, problem.w, problem.tokens)
    _, late = stream(reference, config, problem.w, problem.tokens[:, 2:], start=2)
    (attention,), _ = whole.layers[0]
    (piece,), _ = late.layers[0]
    heads, later = attention.saved.heads, piece.saved.heads
    np.testing.assert_allclose(later, heads[:, 2:], rtol=1e-13, atol=1e-13)


def test_every_layer_of_a_shared_block_keeps_its_own():
    config = replace(TINIEST, n_layers=4, repeat=2)
    problem = tiny_problem(config)
    _, saved = stream(reference, config, problem.w, problem.tokens)
    streams = [half[0].x for layer in saved.layers for half in layer]
    assert len(streams) == 8 and len({id(x) for x in streams}) == 8
