"""Walking a model otherwise: what is copied, what must not move, how fast refinements settle."""

from dataclasses import replace

import numpy as np
import pytest
from slopes import slopes

from nanoeuler.checks import gradcheck
from nanoeuler.checks.gradcheck import TINY, tiny_problem
from nanoeuler.engines.cpu.engine import CpuEngine
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.errors import UserError
from nanoeuler.model.config import parameter_shapes
from nanoeuler.model.depth import (
    at_depths,
    drop_layers,
    moved,
    neighbours,
    refine_depth,
    relative_steps,
    walk,
    with_step,
)
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import Weights

reference = ReferenceEngine()
FOUR = replace(TINY, n_layers=4)
GPT2 = dict(norm="layer", position="learned", mlp="gelu", bias=True, tied=True, n_predict=1)
SHAPES = [FOUR, replace(FOUR, repeat=2), replace(FOUR, repeat=4), replace(FOUR, **GPT2)]
every_shape = pytest.mark.parametrize("config", SHAPES, ids=["plain", "twice", "shared", "gpt2"])


def model(config, seed=0, small=1.0):
    """A random model in float64 and a batch; `small` scales what the layers add to the stream."""
    problem = tiny_problem(config, seed)
    for name, tensor in problem.w.items():
        if ".wo" in name or ".w_down" in name:
            tensor *= small
    return (config, problem.w), problem.tokens


def numbered(config):
    """Weights in which every number of block i is i, and every other number is -1."""
    w = Weights(config, np.float64)
    for name, tensor in w.items():
        tensor[...] = int(name.split(".")[1]) if name.startswith("block.") else -1
    return w


@pytest.mark.parametrize(("repeat", "how", "expected"), [
    (1, "split", [0, 0, 1, 1, 2, 2, 3, 3]),
    (1, "insert", [0, 0.5, 1, 1.5, 2, 2.5, 3, 3]),
    (1, "drop", [0, 2]),
    (2, "split", [0, 0, 0, 0, 1, 1, 1, 1]),
    (2, "insert", [0, 0, 0, 0.5, 1, 1, 1, 1]),
    (2, "drop", [0, 1]),
    (4, "insert", [0] * 8),
])  # fmt: skip
@pytest.mark.parametrize("switches", [{}, GPT2], ids=["ours", "gpt2"])
def test_which_weights_a_layer_gets(repeat, how, expected, switches):
    config = replace(FOUR, repeat=repeat, step_size=0.5, **switches)
    w = numbered(config)
    before = w.flat.copy()
    drop = how == "drop"
    new_config, new = drop_layers(config, w) if drop else refine_depth(config, w, how)
    changes = {"n_layers": len(expected), "repeat": 1, "step_size": 1.0 if drop else 0.25}
    assert new_config == new.config == replace(config, **changes)
    assert {name: tensor.shape for name, tensor in new.items()} == parameter_shapes(new_config)
    for name, tensor in new.items():
        value = expected[int(name.split(".")[1])] if name.startswith("block.") else -1
        assert np.all(tensor == value), name
    new.flat[...] = 7  # in memory of its own
    assert np.array_equal(w.flat, before)


@every_shape
@pytest.mark.parametrize("how", ["split", "insert"])
def test_dropping_undoes_refining(config, how):
    (config, w), tokens = model(config)
    again, back = drop_layers(*refine_depth(config, w, how))
    assert again == replace(config, repeat=1)
    end, same = (walk(reference, c, each, tokens) for c, each in ((config, w), (again, back)))
    assert all(np.array_equal(a, b) for a, b in zip(end, same, strict=True))


def test_the_dtype_is_kept():
    for dtype in (np.float32, np.float64, np.complex128):
        assert refine_depth(FOUR, Weights(FOUR, dtype), "insert")[1].flat.dtype == dtype


def test_shared_layers_are_split_by_repeating_more_often():
    (config, w), tokens = model(replace(FOUR, repeat=4))
    halved = replace(config, n_layers=8, repeat=8, step_size=0.5)
    logits = forward(reference, halved, w, tokens)[0]
    for how in ("split", "insert"):  # between equal layers a mean is the layer itself
        assert np.array_equal(forward(reference, *refine_depth(config, w, how), tokens)[0], logits)


def test_a_step_that_is_nothing_leads_nowhere():
    (config, w), tokens = model(FOUR)
    still = with_step(config, w, step_size=1e-12)
    states = walk(reference, *still, tokens)
    assert len(states) == 2 * FOUR.n_layers + 1
    # Eight steps of 1e-12, each times a velocity that is below 100 here.
    assert np.abs(states[-1] - states[0]).max() < 1e-9
    assert moved(reference, (config, w), still, tokens) == pytest.approx(1, abs=1e-9)
    assert moved(reference, (config, w), (config, w), tokens) == 0


@every_shape
def test_a_longer_step_is_a_shorter_embedding(config):
    """The norms read everything at one length, so only the proportion of f to the start counts."""
    (config, w), tokens = model(config)
    for name in ("embedding", "positions"):
        if name in w:
            w[name][...] *= 1000
    longer = with_step(config, w, step_size=2.0)
    short = Weights(config, np.float64)
    short.flat[...] = w.flat
    for name in ("embedding", "positions"):
        if name in w:
            short[name][...] /= 2
    ends = [walk(reference, *each, tokens)[-1] for each in (longer, (config, short))]
    # The norms' epsilon, 1e-5, against mean squares of 250,000: 4e-11, through four layers.
    np.testing.assert_allclose(ends[0], 2 * ends[1], rtol=1e-7)


def test_with_step_shares_memory_and_changes_only_the_walk():
    (config, w), _ = model(FOUR)
    longer, same = with_step(config, w, step_size=2.0, integrator="heun")
    assert longer == replace(config, step_size=2.0, integrator="heun") == same.config
    assert same.flat is w.flat


@pytest.mark.parametrize("seed", range(3))
def test_refining_shared_layers_converges_at_order_one(seed):
    """The flow of one block: halving the step halves the rest of the way to the limit."""
    current, tokens = model(replace(FOUR, repeat=4), seed, small=0.002)
    ends = []
    for _ in range(5):
        ends.append(walk(reference, *current, tokens)[-1])
        current = refine_depth(*current)
    gaps = [np.linalg.norm(b - a) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    # Euler's error is c h (1 + O(rho)), and rho is about a hundredth here.
    for wide, narrow in zip(gaps[:-1], gaps[1:], strict=True):
        assert wide / narrow == pytest.approx(2, abs=0.05)


def test_refining_layers_that_add_constants_changes_nothing():
    """Where f does not depend on x, half a step twice is a step. GELU of a bias alone is such an f.

    Norm gains of zero hide x; of attention only the bias of wo is left.
    """
    (config, w), tokens = model(replace(FOUR, **GPT2))
    for name, tensor in w.items():
        if name.startswith("block.") and name.endswith(("norm1", "norm2")):
            tensor[...] = 0
    # Two additions of a half instead of one of the whole: roundings of numbers of the end's size.
    assert moved(reference, (config, w), refine_depth(config, w), tokens) < 1e-14


@pytest.mark.parametrize(("silent", "low", "high"), [
    ("w_down", 1.98, 2.02), ("wo", 1.98, 2.02), (None, 0, 1.8),
])  # fmt: skip
def test_half_steps_find_half_of_what_heun_finds_inside_sublayers(silent, low, high):
    """Inside a sublayer Euler is off by e: half steps repair e / 2; Heun and RK4 nearly all of it.

    Where attention and MLP take turns, half steps also repair half of what taking turns costs,
    and the other methods none of it.
    """
    asked, tokens = model(FOUR, small=2e-4)
    for name, tensor in asked[1].items():
        if silent and name.endswith(silent):
            tensor[...] = 0
    split = moved(reference, asked, refine_depth(*asked), tokens)
    heun, rk4 = (
        moved(reference, asked, with_step(*asked, integrator=name), tokens)
        for name in ("heun", "rk4")
    )
    # Up to the next order in rho, which is two thousandths here. The upper bound of the last case
    # is that of this draw: what taking turns costs has no fixed ratio to e.
    assert low < heun / split < high and rk4 / heun == pytest.approx(1, abs=0.01)
    assert split > 1e-4  # far above rounding


@pytest.mark.parametrize("switches", [{}, GPT2], ids=["ours", "gpt2"])
@pytest.mark.parametrize("how", ["split", "insert"])
def test_a_refined_model_has_the_gradient_of_its_own_loss(switches, how):
    problem = tiny_problem(replace(TINY, **switches))
    config, w = refine_depth(problem.config, problem.w, how)
    problem = problem._replace(config=config, w=w)
    derived = gradcheck.derived_gradient(problem)
    for slope in slopes(problem, reference, 3):
        assert slope.error(derived) < 1e-12  # rounding: sums of some hundred terms of 1e-16


def test_rho_is_the_step_over_the_length():
    (config, w), tokens = model(replace(FOUR, repeat=2, step_size=0.5))
    states = walk(reference, config, w, tokens)
    steps = relative_steps(reference, config, w, tokens)
    assert steps.shape == (4, 2)
    for i in range(4):
        b = w.blocks[i // 2]
        x, middle, after = states[2 * i : 2 * i + 3]
        adds = (
            reference.attend(config, b, reference.rmsnorm(x, b.norm1)[0])[0],
            reference.mlp(config, b, reference.rmsnorm(middle, b.norm2)[0])[0],
        )
        for f, place, rho in zip(adds, (x, middle), steps[i], strict=True):
            by_hand = 0.5 * np.linalg.norm(f, axis=-1) / np.linalg.norm(place, axis=-1)
            assert rho == pytest.approx(by_hand.mean(), rel=1e-12)  # rounding of x + h f - x
        np.testing.assert_allclose(after, middle + 0.5 * adds[1], rtol=1e-13, atol=1e-13)


def test_neighbours():
    (config, w), tokens = model(FOUR)
    for layer, factor in ((1, -1), (2, 3)):  # of layer 0, layer 1 is -f; of layer 1, layer 2 is 3 f
        for name in ("norm1", "wqkv", "wo", "norm2", "w_up", "w_down"):
            times = factor if name in ("wo", "w_down") else 1
            w[f"block.{layer}.{name}"][...] = times * w[f"block.{layer - 1}.{name}"]
    changes = neighbours(reference, config, w, tokens)
    assert changes.shape == (3, 2)
    np.testing.assert_allclose(changes[0], 2, rtol=1e-12)  # |-f - f| over |f|
    np.testing.assert_allclose(changes[1], 2 / 5**0.5, rtol=1e-12)  # 2 |f| over root(5) |f|
    assert np.all(np.abs(changes[2] - 2**0.5) < 0.3)  # a layer of its own draw
    shared, _ = model(replace(FOUR, repeat=4))
    assert not np.any(neighbours(reference, *shared, tokens))
    assert neighbours(reference, *model(replace(TINY, n_layers=1))[0], tokens).shape == (0, 2)


def test_an_engine_that_uses_its_memory_again():
    """What is measured must not be overwritten by the pass that it is compared with."""
    (config, w), tokens = model(FOUR)
    narrow = Weights(config)
    narrow.flat[...] = w.flat
    engine, other = CpuEngine(), drop_layers(config, narrow)
    walk(engine, config, narrow, tokens)  # the first pass measures its memory, later ones reuse it
    tokens = tokens.astype(np.int32)
    distance = moved(engine, (config, narrow), other, tokens)
    exact = moved(reference, (config, w), drop_layers(config, w), tokens)
    assert distance == pytest.approx(exact, rel=1e-4)  # float32, some hundred roundings of 1e-7
    for measure in (relative_steps, neighbours):
        there = measure(engine, config, narrow, tokens)
        np.testing.assert_allclose(there, measure(reference, config, w, tokens), rtol=1e-4)


def test_what_cannot_be_asked():
    odd = replace(TINY, n_layers=3)
    with pytest.raises(UserError, match="even number of layers .* got 3"):
        drop_layers(odd, Weights(odd))
    with pytest.raises(UserError, match="split or insert, got 'halve'"):
        refine_depth(FOUR, Weights(FOUR), "halve")
    with pytest.raises(UserError, match="step_size must be .*number above 0"):
        with_step(FOUR, Weights(FOUR), step_size=0.0)
    with pytest.raises(UserError, match="n_layers must be .* at least 1, got 0"):
        at_depths(FOUR, Weights(FOUR), [], 1.0)
    for depth in (-0.5, 4, float("nan")):
        with pytest.raises(UserError, match=f"depths from 0 up to 4, got {depth}"):
            at_depths(FOUR, Weights(FOUR), [0, depth], 1.0)
