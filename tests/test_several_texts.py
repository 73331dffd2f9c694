"""Rows of several texts: what each gives is what it gives in a row of its own."""

from dataclasses import replace

import numpy as np
import pytest

from nanoeuler.checks.gradcheck import (
    TINY,
    TINY_GPT2,
    architectures,
    derived_gradient,
    relative_error,
    tiny_problem,
)
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.engines.registry import engine_factory, make_stepper
from nanoeuler.model.attention import attention
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.layers import places
from nanoeuler.model.transformer import forward, loss_and_gradients, loss_sums
from nanoeuler.model.weights import Weights
from nanoeuler.training.optim import AdamW

ARCHITECTURES = {**architectures(), "ours": TINY, "GPT-2's": TINY_GPT2}
CONTEXT = 11
LENGTHS = (4, 1, 3, 2)  # of the texts of a row; what is left is filling, a text of its own
UNIT = 2.0**-53
# Both ways take the same sums, but for zeros in them and for the order of those over positions: a
# few dozen roundings a layer, carried on through some hundred sums (tests/test_seam.py).
TOLERANCE = 4096 * UNIT


def beginnings(lengths, T):
    """first (T,) int32 of a row with texts of these lengths, and filling."""
    starts = np.cumsum([0, *lengths])
    return np.repeat(starts, np.diff([*starts, T])).astype(np.int32)


def packed(config, seed=0):
    """A problem with rows of several texts; and the same texts, each in a row of its own."""
    problem = tiny_problem(replace(config, context=CONTEXT), seed)
    B, T = problem.tokens.shape
    rows = [beginnings(np.roll(LENGTHS, b), T) for b in range(B)]
    first, alone = np.array(rows), []
    for b in range(B):
        for begin in np.unique(first[b]):
            at = np.flatnonzero(first[b] == begin)
            if begin == first[b, -1]:
                problem.targets[b, at] = IGNORE  # filling
            alone.append((problem.tokens[b : b + 1, at], problem.targets[b : b + 1, at]))
    return problem, first, alone


def both(config, engine, seed=0):
    """Sums and gradients of the packed rows, and those of rows of one text, added up."""
    problem, first, alone = packed(config, seed)
    config, w, tokens, targets, scale = problem
    one, other, sums = w.zeros_like(), w.zeros_like(), 0
    got = loss_and_gradients(engine, config, w, tokens, targets, scale, one, first)
    for text, aims in alone:
        sums = sums + loss_and_gradients(engine, config, w, text, aims, scale, other)
    return got, one, sums, other


@pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_a_packed_row_gives_what_its_texts_give_alone(config):
    got, one, sums, other = both(config, ReferenceEngine())
    np.testing.assert_allclose(got, sums, rtol=TOLERANCE)
    for name in one:
        assert relative_error(one[name], other[name]) <= TOLERANCE, name


def test_without_the_mask_it_does_not():
    problem, first, alone = packed(TINY)
    config, w, tokens, targets, _ = problem
    expected = sum(loss_sums(ReferenceEngine(), config, w, *each) for each in alone)
    for wrong in (None, np.zeros_like(first), np.maximum(first - 1, 0)):
        got = loss_sums(ReferenceEngine(), config, w, tokens, targets, wrong)
        assert np.abs(got / expected - 1).max() > 1e-3


def test_learned_positions_are_counted_from_the_beginning_of_a_text():
    assert places(np.array([[0, 0, 2, 2, 4]])).tolist() == [[0, 1, 0, 1, 0]]
    got, one, _, _ = both(TINY_GPT2, ReferenceEngine())
    assert not one["positions"][max(LENGTHS) :].any()  # no text is longer: no row beyond is read

    class Forgetful(ReferenceEngine):
        def embed(self, tokens, table, positions=None, first=None):
            return super().embed(tokens, table, positions)

    assert np.abs(both(TINY_GPT2, Forgetful())[0] / got - 1).max() > 1e-3


@pytest.mark.parametrize("first", [[[1, 0, 0]], [[0, 2, 2]], [[0, 1, -1]]], ids=str)
def test_a_text_begins_in_its_row_and_not_after_its_positions(first):
    heads, first = np.ones((1, 3, 3, 2)), np.array(first)
    with pytest.raises(AssertionError, match="expected every text"):
        places(first)
    if first.min() >= 0:
        with pytest.raises(AssertionError, match="its own position"):
            attention(heads, 1, first)
    with pytest.raises(IndexError, match="its row"):
        engine_factory("cpu")().attention(np.float32(heads), 1, first)


def test_one_text_a_row_is_the_row_without_a_mask():
    problem = tiny_problem()
    zeros = np.zeros(problem.tokens.shape, np.int32)
    dw = problem.w.zeros_like()
    loss_and_gradients(ReferenceEngine(), *problem[:-1], problem.scale, dw, zeros)
    whole = derived_gradient(problem)  # in two parts
    assert np.abs(dw.flat - whole.flat).max() <= 1e-13 * np.abs(whole.flat).max()


def test_no_bit_of_a_text_depends_on_its_neighbours():
    problem, first, _ = packed(TINY)
    config, w, tokens, _, _ = problem
    logits = forward(ReferenceEngine(), config, w, tokens, first=first)[0]
    for begin in np.unique(first[0]):
        inside, others = first[0] == begin, tokens.copy()
        others[0, ~inside] = (others[0, ~inside] + 1) % config.vocab_size
        again = forward(ReferenceEngine(), config, w, others, first=first)[0]
        assert np.array_equal(again[0, inside], logits[0, inside])
        assert not np.array_equal(again[0, ~inside], logits[0, ~inside])


def in_float32(config):
    """The packed problem of `config` in float32, and its gradient in float64."""
    problem, first, _ = packed(config)
    exact = problem.w.zeros_like()
    sums = loss_and_gradients(ReferenceEngine(), *problem, exact, first)
    w = Weights(problem.config, flat=problem.w.flat.astype(np.float32))
    tokens, targets = (x.astype(np.int32) for x in (problem.tokens, problem.targets))
    return problem._replace(w=w, tokens=tokens, targets=targets), first, sums, exact


@pytest.mark.parametrize("name", ["fused", "cpu"])
@pytest.mark.parametrize("config", [TINY, TINY_GPT2], ids=["ours", "GPT-2's"])
def test_engines_in_float32(config, name):
    problem, first, sums, exact = in_float32(config)
    engine = engine_factory(name)()
    for _ in range(2):  # memory from NumPy, then from the slab
        dw = problem.w.zeros_like()
        got = loss_and_gradients(engine, *problem, dw, first)
        # float32 in place of float64 (TOLERANCE), with the rounding of the weights themselves
        np.testing.assert_allclose(got, sums, rtol=4096 * 2.0**-24)
        for part in dw:
            assert relative_error(dw[part], exact[part]) <= 4096 * 2.0**-24, part


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_stepper_gives_each_shard_its_own_rows(pieces):
    config = replace(TINY, context=64)
    problem = tiny_problem(config)
    tokens, targets = np.tile(problem.tokens, (5, 1)), np.tile(problem.targets, (5, 1, 1))
    rng = np.random.default_rng(1)
    begins = np.sort(rng.integers(1, 64, (len(tokens), 3)), axis=1)
    first = np.array([beginnings(np.diff([0, *each]), 64) for each in begins])
    whole = problem.w.zeros_like()
    sums = loss_and_gradients(
        ReferenceEngine(), config, problem.w, tokens, targets, problem.scale, whole, first
    )
    stepper = make_stepper("reference", problem.w, AdamW(problem.w), threads=2, pieces=pieces)
    got = sum(stepper.shard_gradients(tokens, targets, problem.scale, first=first))
    np.testing.assert_allclose(got, sums, rtol=1e-13)
    assert np.abs(stepper.gradients.flat - whole.flat).max() <= 1e-13 * np.abs(whole.flat).max()
    np.testing.assert_allclose(stepper.sums(tokens, targets, first), sums, rtol=1e-13)
