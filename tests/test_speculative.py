"""Guessing ahead: the text of plain decoding, token for token or in distribution."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate import model
from tiers import kept

from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.errors import UserError
from nanoeuler.inference import speculative
from nanoeuler.inference.decoder import Decoder, EngineReader, generate
from nanoeuler.inference.sampling import Sampler
from nanoeuler.inference.speculative import generate_ahead, new_count, verdict


def guesser(context=20, vocab=5, heads=4):
    """A model of few tokens, whose heads agree now and then."""
    config, weights = model(
        context=context, vocab_size=vocab, n_predict=heads, dtype=np.float32, n_layers=2
    )
    output = weights["output"].reshape(config.dim, heads, vocab)
    for head in range(1, heads):
        output[:, head] = 0.7 * output[:, 0] + 0.7 * output[:, head]
    return config, weights


@pytest.mark.parametrize(("kind", "prompts"), kept(
    [(CpuReader, 60), (CpuReader, 300), (EngineReader, 40)], (CpuReader, 60), (EngineReader, 40)
))  # fmt: skip
def test_greedy_text_is_that_of_plain_decoding(kind, prompts):
    """To beyond the context, where half of the text is forgotten."""
    config, weights = guesser()
    rng, count = np.random.default_rng(0), new_count(3)
    readers = [kind(config, weights) for _ in range(2)]
    for _ in range(prompts):
        prompt = rng.integers(5, size=rng.integers(1, 31)).tolist()
        n, penalty = int(rng.integers(0, 60)), float(rng.choice([1.0, 1.3]))
        sampling = {"temperature": 0, "repetition_penalty": penalty, "n": n}
        plain = list(generate(Decoder(config, weights, readers[0]), prompt, **sampling))
        ahead = Decoder(config, weights, readers[1])
        assert list(generate_ahead(ahead, prompt, count=count, **sampling)) == plain
    assert 0 < sum(count.kept) < sum(count.made)
    assert count.passes < 0.95 * count.tokens


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_it_ends_where_plain_decoding_ends(data):
    config, weights = guesser()
    n, guesses = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 5))
    stop = data.draw(st.sets(st.integers(0, 4), max_size=2))
    prompt = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=25))
    sampling = {"temperature": 0, "stop": stop, "n": n}
    plain = list(generate(Decoder(config, weights), prompt, **sampling))
    ahead = generate_ahead(Decoder(config, weights), prompt, guesses=guesses, **sampling)
    assert list(ahead) == plain


# 3 tokens of 4: 64 texts. The 0.9999 quantile of chi-square with 63 degrees of freedom: one seed
# in ten thousand fails.
CHI_SQUARE = 113.5


def exact(config, weights, prompt, sampling):
    """The probability of each text of three tokens, by plain decoding."""
    sampler, found = Sampler(**sampling), np.zeros((4, 4, 4))
    for text in product(range(4), repeat=3):
        probability, decoder, new, read = 1.0, Decoder(config, weights), prompt, list(prompt)
        for token in text:
            probability *= sampler.distribution(decoder.read(new), read)[token]
            read, new = [*read, token], [token]
        found[text] = probability
    return found.ravel()


def distance(found, expected):
    """Chi-square of counts, over what can come; what cannot must not have."""
    can = expected > 0
    assert not found[~can].any()
    wanted = expected[can] * found.sum()
    return np.sum((found[can] - wanted) ** 2 / wanted)


def drawn_texts(config, weights, prompt, sampling, n):
    reader, found = CpuReader(config, weights, threads=1), np.zeros((4, 4, 4))
    for seed in range(n):
        decoder = Decoder(config, weights, reader)
        found[tuple(generate_ahead(decoder, prompt, 3, **sampling, seed=seed))] += 1
    return found.ravel()


@pytest.mark.parametrize("sampling", [
    pytest.param({"temperature": 1.5, "top_p": 1.0}, id="plain", marks=pytest.mark.long),
    pytest.param({"temperature": 2.0, "top_k": 3, "repetition_penalty": 1.4}, id="options"),
])  # fmt: skip
def test_drawn_texts_have_the_distribution_of_plain_decoding(sampling):
    config, weights = guesser(vocab=4, heads=3)
    weights["output"][...] *= 0.5  # not too certain
    expected = exact(config, weights, [1, 2], sampling)
    assert abs(expected.sum() - 1) < 1e-12
    found = drawn_texts(config, weights, [1, 2], sampling, 4000)
    assert distance(found, expected) < CHI_SQUARE


def always(sampler, guess, q, p):
    return guess, True


def from_p(sampler, guess, q, p):
    """Refused guesses are drawn from p, and not from what is left of it."""
    _, right = verdict(sampler, guess, q, p)
    return (guess, True) if right else (sampler.draw(p), False)


@pytest.mark.parametrize("wrong", kept([always, from_p], from_p))
def test_the_distance_notices_a_wrong_rule(wrong, monkeypatch):
    config, weights = guesser(vocab=4, heads=3)
    weights["output"][...] *= 0.5
    sampling = {"temperature": 1.5, "top_p": 1.0}
    expected = exact(config, weights, [1, 2], sampling)
    monkeypatch.setattr(speculative, "verdict", wrong)
    assert distance(drawn_texts(config, weights, [1, 2], sampling, 4000), expected) > CHI_SQUARE


@given(st.integers(0, 2**32), st.integers(1, 5))
@settings(max_examples=50)
def test_the_verdict_of_equal_distributions_is_the_guess(seed, size):
    p = np.random.default_rng(seed).dirichlet(np.ones(size))
    sampler = Sampler(seed=seed)
    guess = sampler.draw(p)
    assert verdict(sampler, guess, p, p) == (guess, True)
    assert verdict(sampler, guess, p * (1 + 1e-16), p) == (guess, True)


def test_a_model_with_one_head_cannot_guess():
    config, weights = model(n_predict=1, dtype=np.float32)
    with pytest.raises(UserError, match="predicts several tokens, got one with n_predict 1"):
        generate_ahead(Decoder(config, weights), [1], 3)
    with pytest.raises(UserError, match="at least one token"):
        generate_ahead(Decoder(*guesser()), [], 3)
    with pytest.raises(UserError, match="expected temperature"):
        generate_ahead(Decoder(*guesser()), [1], 3, temperature=-1)
    for guesses in (-1, 1.5, "a"):
        with pytest.raises(UserError, match="expected guesses to be a whole number"):
            generate_ahead(Decoder(*guesser()), [1], 3, guesses=guesses)
