"""Splits, batches and bits per byte: properties that must hold for any text and any sizes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler.backward import IGNORE
from nanoeuler.data import QUICK_WINDOWS, Batches, HeldOut, entropies, read_text, split
from nanoeuler.errors import UserError


class ThreeBytes:
    """A stand-in tokenizer: id i spells i % 3 + 1 bytes."""

    vocab_size = 50

    def decode(self, ids):
        return b"".join(b"x" * (int(i) % 3 + 1) for i in ids)


@given(st.text(max_size=200))
def test_a_split_loses_nothing_and_cuts_between_characters(text):
    text = text.encode("utf-8", "ignore")
    train, held_out = split(text)
    assert train + held_out == text
    train.decode("utf-8"), held_out.decode("utf-8")
    assert 0 <= len(train) - int(0.9 * len(text)) <= 3  # a character has at most four bytes


sizes = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**32))


@given(sizes, st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_a_pass_visits_every_window_once_and_targets_are_what_follows(sizes, more):
    context, n_predict, batch_size, seed = sizes
    tokens = np.arange(2 * context + n_predict - 1 + more)  # a token is its own position
    batches = Batches(tokens, batch_size, context, n_predict, seed)
    seen = []
    for step in range(1, 2 * batches.windows + 1):
        x, y = batches.batch(step)
        assert x.shape == (batch_size, context) and y.shape == (batch_size, context, n_predict)
        assert x.dtype == y.dtype == np.int32
        assert (np.diff(x, axis=1) == 1).all()
        assert (y == x[:, :, None] + 1 + np.arange(n_predict)).all()
        seen += list(x[:, 0])
    for number in range(2):  # passes
        starts = np.sort(seen[number * batches.windows : (number + 1) * batches.windows])
        assert 0 <= starts[0] < context and (np.diff(starts) == context).all()
    # no room was left for another window, at the offset where there is least room
    assert (batches.windows + 2) * context + n_predict - 1 > len(tokens)


@given(sizes, st.lists(st.integers(1, 60), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_a_batch_is_a_function_of_seed_and_step_alone(sizes, steps):
    context, n_predict, batch_size, seed = sizes
    tokens = np.random.default_rng(0).integers(0, 99, 100)
    asked = Batches(tokens, batch_size, context, n_predict, seed)
    for step in steps:
        fresh = Batches(tokens, batch_size, context, n_predict, seed).batch(step)
        for a, b in zip(asked.batch(step), fresh, strict=True):
            assert np.array_equal(a, b)


def test_other_seeds_and_passes_give_other_orders():
    tokens = np.arange(2000)
    firsts = {
        (seed, step): tuple(Batches(tokens, 62, 32, 1, seed).batch(step)[0][:, 0])
        for seed in (0, 1)
        for step in (1, 2)
    }
    assert Batches(tokens, 62, 32, 1, 0).windows in (61, 62) and len(set(firsts.values())) == 4


def test_a_text_that_is_too_short_is_refused_with_the_length_it_needs():
    with pytest.raises(UserError, match="at least 67 training tokens .* got 66"):
        Batches(np.zeros(66), 4, 32, 4, 0)
    assert Batches(np.zeros(67), 4, 32, 4, 0).batch(1)[1].shape == (4, 32, 4)
    with pytest.raises(UserError, match="held-out"):
        HeldOut(np.zeros(1, int), ThreeBytes(), 4, 32, 4)


@given(st.integers(2, 300), st.integers(1, 17), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_every_held_out_token_but_the_first_is_judged_once(n, context, batch_size):
    tokens = np.random.default_rng(n).integers(0, 50, n).astype(np.int32)
    held_out, judged = HeldOut(tokens, ThreeBytes(), batch_size, context, 3), []

    def loss(x, y):
        assert x.shape == (batch_size, context) and y.shape == (batch_size, context, 3)
        assert (y[:, :, 1:] == IGNORE).all() and (x >= 0).all()
        judged.extend(y[:, :, 0][y[:, :, 0] != IGNORE])
        return np.array([len(tokens) * 0.25, 7.0, 7.0])

    bits = held_out.bits_per_byte(loss)
    assert np.array_equal(judged, tokens[1:])
    n_bytes = len(ThreeBytes().decode(tokens[1:]))
    batches = math.ceil(math.ceil((n - 1) / context) / batch_size)
    assert math.isclose(bits, batches * n * 0.25 / math.log(2) / n_bytes, rel_tol=1e-12)
    assert math.isclose(held_out.bytes_per_token, n_bytes / (n - 1), rel_tol=1e-12)


def test_inputs_are_what_comes_before_the_targets():
    tokens = np.arange(40, dtype=np.int32)
    for x, y in HeldOut(tokens, ThreeBytes(), 2, 8, 1).batches(np.arange(5)):
        counted = y[:, :, 0] != IGNORE
        assert (x[counted] + 1 == y[:, :, 0][counted]).all()


def test_a_quick_look_judges_its_share_from_beginning_to_end():
    tokens = np.arange(10 * QUICK_WINDOWS * 4 + 1, dtype=np.int32)
    held_out, windows = HeldOut(tokens, ThreeBytes(), 16, 4, 1), []

    def loss(x, y):
        windows.extend(x[:, 0])
        return np.array([float(np.sum(y != IGNORE))])

    quick, full = held_out.bits_per_byte(loss, quick=True), held_out.bits_per_byte(loss)
    assert len(windows) == 11 * QUICK_WINDOWS
    assert windows[0] == 0 and windows[QUICK_WINDOWS - 1] == 4 * (10 * QUICK_WINDOWS - 1)
    # The tokens of a tenth of the windows spell 1, 2 or 3 bytes, on average nearly 2 as all do.
    assert math.isclose(quick, full, rel_tol=0.05)


def test_the_landmarks_of_a_text_with_two_tokens():
    assert entropies(np.array([3, 5, 3, 5]), 512) == {"uniform": 9.0, "unigram": 1.0}


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "latin1").write_bytes("é".encode("latin1"))
    for name, words in (("latin1", "byte 0"), ("absent", "No such file"), (".", "directory")):
        with pytest.raises(UserError, match=words):
            read_text(tmp_path / name)
