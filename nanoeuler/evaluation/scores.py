# Made from book/20-is-it-any-good.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-eval-accuracy
"""What is made of likelihoods: accuracies, perplexities, their standard errors, and CORE's mean."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nanoeuler.errors import UserError
from nanoeuler.evaluation.items import Item
from nanoeuler.evaluation.likelihood import Likelihood


class Score(NamedTuple):
    """A number, its standard error, and over how many items."""

    value: float
    error: float
    items: int


def right(item: Item, found: Sequence[Likelihood], measure: str = "acc") -> bool:
    """Whether the model answers an item: by acc, acc_norm or acc_token, of equals the first.

    An item with one continuation is answered if the model writes it, token for token.
    """
    if len(found) == 1:
        return found[0].greedy
    sizes = {"acc": [1] * len(found), "acc_norm": item.sizes,
             "acc_token": [each.tokens for each in found]}[measure]  # fmt: skip
    values = [each.log_p / size for each, size in zip(found, sizes, strict=True)]
    return int(np.argmax(values)) == item.gold


# %% sec-eval-error
def mean(values: Sequence[float]) -> Score:
    """The mean and its standard error: equation eq-eval-error; of one value it is not known."""
    if not len(values):
        raise UserError("expected items to take a mean of, got none: is the task's file empty?")
    n, a = len(values), np.asarray(values, float)
    error = math.sqrt(a.var(ddof=1) / n) if n > 1 else math.nan
    return Score(float(a.mean()), error, n)


def grouped(values: Sequence[float], groups: Sequence[str]) -> Score:
    """The mean of the means of groups, each of which counts the same."""
    names = sorted({*groups})
    means = [mean([v for v, g in zip(values, groups, strict=True) if g == name])
             for name in names]  # fmt: skip
    error = math.sqrt(sum(each.error**2 for each in means)) / len(names)
    return Score(sum(each.value for each in means) / len(names), error, len(values))


# %% sec-eval-perplexity
class Perplexities(NamedTuple):
    """How well a text is predicted, by each of the field's measures."""

    word: float           # perplexity per word of the text as published
    token: float          # perplexity per token
    bits_per_byte: float  # of the text as published
    words: int
    tokens: int
    bytes: int


def power(x: float) -> float:
    """e to x; infinity where that is more than a float holds, beyond 709."""
    return math.exp(x) if x < 709 else math.inf


def perplexities(found: Sequence[Likelihood], texts: Sequence[str]) -> Perplexities:
    """The measures of the table, of documents `texts` as published and what was found of them.

    Words as white space separates them; a text that begins or ends with it has an empty word there,
    which the harness counts.
    """
    nats, tokens = -sum(each.log_p for each in found), sum(each.tokens for each in found)
    words = sum(len(text.split()) + (text[:1].isspace() or not text) + text[-1:].isspace()
                for text in texts)  # fmt: skip
    size = sum(len(text.encode()) for text in texts)
    if not tokens:
        raise UserError("expected a text with a token to judge, got none: is the file empty?")

    return Perplexities(power(nats / words), power(nats / tokens), nats / math.log(2) / size,
                        words, tokens, size)  # fmt: skip
