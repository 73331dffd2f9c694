# Made from book/15a-guessing-ahead.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ahead-rule
"""Guessing ahead: the heads k >= 1 draft tokens, head 0 verifies them, several in one pass.

The text is that of plain decoding: the same when greedy, else of the same distribution. Leaves out
drafts by another model, and trees of guesses.

V vocabulary, K predicted tokens.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from nanoeuler.errors import UserError
from nanoeuler.inference.decoder import Decoder, check_count, check_length
from nanoeuler.inference.sampling import Sampler, SamplingOptions


def verdict(sampler: Sampler, guess: int, q: np.ndarray, p: np.ndarray) -> tuple[int, bool]:
    """A token that is distributed as p (V,), made from a `guess` drawn from q (V,).

    And whether it is the guess. Equation eq-ahead-sum. Two random numbers at most.
    """
    rest = np.maximum(p - q, 0)
    kept = sampler.rng.random() * q[guess] < p[guess]
    if kept or not rest.any():  # p and q may be equal but for a rounding: then nothing is refused
        return guess, True
    return sampler.draw(rest / rest.sum()), False


# %% sec-ahead-loop
@dataclass
class Count:
    """What became of the guesses: how many passes, and how many of each head's guesses were kept.

    `made` (judged guesses, so none after a wrong one) and `kept` are by head, 1 to K - 1.
    """

    passes: int
    tokens: int
    made: list[int]
    kept: list[int]


def generate_ahead(
    decoder: Decoder, tokens: Sequence[int], n: int, stop: Collection[int] = (),
    count: Count | None = None, guesses: int | None = None, **sampling: Unpack[SamplingOptions],
) -> Iterator[int]:  # fmt: skip
    """Yield up to n tokens after `tokens`, in at most as many passes as `decoder.generate`.

    They have the same distribution; the text of a seed is another, unless it is greedy.
    A round makes up to `guesses`: at most, and by default, K - 1. What became of them is added to
    `count`. UserError as there, for wrong `guesses`, and for a model that predicts one token only.
    """
    most = decoder.config.n_predict - 1
    if not most:
        raise UserError(
            "expected a model that predicts several tokens, got one with n_predict 1: "
            "generate without guesses"
        )
    if guesses is not None:
        check_count("guesses", guesses)
    sampler = Sampler(**sampling)
    check_length(n, tokens)
    guesses = most if guesses is None else min(guesses, most)
    return _ahead(decoder, tokens, n, stop, sampler, guesses, count or new_count(most))


def _ahead(decoder, tokens, n, stop, sampler, guesses, count):
    """What `generate_ahead` yields, whose arguments have been checked."""
    text = list(tokens)
    last = decoder.look(tokens, heads=1 + guesses)[0]  # the heads after what is known of the text
    token = sampler.draw(sampler.distribution(last[0], text))
    while n > 0 and token not in stop:
        yield token
        n, count.tokens = n - 1, count.tokens + 1
        text.append(token)
        if n == 0:
            return
        room = decoder.config.context - len(decoder.tokens) - 1
        drafts = _drafts(last[1:][: max(0, min(room, n - 1))], text, sampler)
        read = [token, *(guess for guess, _ in drafts)]
        rows = decoder.look(read, rows=len(read), heads=1 + guesses)
        count.passes += 1
        for i, (guess, q) in enumerate(drafts):
            token, right = verdict(sampler, guess, q, sampler.distribution(rows[i, 0], text))
            count.made[i] += 1
            if not right:
                decoder.forget(len(drafts) - i)
                last = rows[i]
                break
            count.kept[i] += 1
            if token in stop:
                return
            yield token
            n, count.tokens = n - 1, count.tokens + 1
            text.append(token)
        else:
            last = rows[-1]
            token = sampler.draw(sampler.distribution(last[0], text))


def new_count(heads: int) -> Count:
    """A `Count` of nothing yet, for so many guessing heads."""
    return Count(0, 0, [0] * heads, [0] * heads)


def _drafts(logits, text, sampler):
    """A guess and its distribution by each head (k, V), as if those before it were right."""
    found, text = [], list(text)
    for head in logits:
        q = sampler.distribution(head, text)
        found.append((sampler.draw(q), q))
        text.append(found[-1][0])
    return found
