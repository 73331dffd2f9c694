# Made from book/r-server.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-serve-writing
"""From a checked request to its answer: pieces of text with their tokens, and the end.

Leaves out the format of the response: responses.py.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nanoeuler.inference.decoder import Decoder, Reader, draws, text_pieces
from nanoeuler.inference.sampling import log_probabilities
from nanoeuler.inference.speculative import Count, generate_ahead, new_count
from nanoeuler.model.weights import Weights
from nanoeuler.serve.request import Request
from nanoeuler.tokenizer.tokenizer import Tokenizer


class Token(NamedTuple):
    """A token of the answer, its log p and the likeliest tokens, if asked for; if guessed."""

    id: int
    log_probability: float | None = None
    likeliest: list[tuple[int, float]] = []  # of Drawn.logits, the most probable first
    guessed: bool = False


class Piece(NamedTuple):
    """Text, and the tokens that were drawn since the last piece."""

    text: str
    tokens: list[Token]


class End(NamedTuple):
    """Why the text ended (stop or length), after how many tokens; which guesses were accepted."""

    reason: str
    tokens: int
    count: Count | None


def noted(
    request: Request, decoder: Decoder, ends: list[int], count: Count | None
) -> Iterator[Token]:
    """The tokens of an answer, each with the notes that the request asks for."""
    how = decoder, request.ids, request.tokens, ends
    if count:
        kept = 0
        for token in generate_ahead(*how, count, request.guesses, **request.sampling):
            yield Token(token, guessed=sum(count.kept) > kept)
            kept = sum(count.kept)
        return
    for drawn in draws(*how, **request.sampling):
        if request.top is None:
            yield Token(drawn.token)
            continue
        p = log_probabilities(drawn.logits)
        first = np.argsort(-p, kind="stable")[: request.top].tolist()
        yield Token(drawn.token, float(p[drawn.token]), [(i, float(p[i])) for i in first])


def write(
    request: Request, tokenizer: Tokenizer, weights: Weights, reader: Reader
) -> Iterator[Piece | End]:
    """The text for a request, in pieces, and its `End`. Any special token ends it."""
    decoder, ends = Decoder(reader.config, weights, reader), [*tokenizer.special.values()]
    count = new_count(reader.config.n_predict - 1) if request.guesses else None
    notes: list[Token] = []
    number, over = 0, False

    def ids():
        nonlocal number, over
        for token in noted(request, decoder, ends, count):
            number += 1
            notes.append(token)
            yield token.id
        over = True

    for text in text_pieces(tokenizer, ids(), request.stop):
        if text:
            yield Piece(text, notes[:])
            notes.clear()
    yield End("length" if over and number == request.tokens else "stop", number, count)
