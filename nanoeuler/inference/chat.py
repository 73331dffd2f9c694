# Made from book/11-fine-tuning-and-chat.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-chat-loop
"""A conversation with a fine-tuned model: what it remembers, what it reads, what the user sees.

Leaves out the form of a conversation (the tokenizer's template.py) and where a model learns it
(the training's sft.py).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nanoeuler.errors import UserError
from nanoeuler.inference.decoder import Decoder, generate, text_pieces
from nanoeuler.inference.sampling import check
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import Weights
from nanoeuler.tokenizer.template import END, prompt
from nanoeuler.tokenizer.tokenizer import Tokenizer

TEMPERATURE = 0.5  # below that of `generate`: of an answer one expects the likely


class Chat:
    """A conversation with a model, with as much memory of its turns as the context has room for.

    `knobs` go to `generate`: top_k, top_p. The same questions get the same answers for the same
    seed. UserError for a wrong knob or seed, and for a tokenizer without a chat's special tokens.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, weights: Weights, seed: int = 0,
                 temperature: float = TEMPERATURE, **knobs: Any):  # fmt: skip
        self.config, self.tokenizer, self.weights = config, tokenizer, weights
        self.seed, self.knobs = seed, {"temperature": temperature, **knobs}
        self.turns, self.asked = [], 0  # the ids of each turn; how many questions there were
        check(seed=seed, **self.knobs)  # tells of a wrong knob now, not at a question
        prompt(tokenizer, "")  # and of a tokenizer that has no special tokens for a chat

    def reply(self, question: str) -> Iterator[str]:
        """Yield the answer piece by piece. UserError if the question is longer than its room.

        It becomes a turn of the conversation when its last piece has been taken.
        """
        ids = prompt(self.tokenizer, question)
        room = self.config.context // 2
        if len(ids) > room:
            raise UserError(
                f"expected a question of at most {room - 2} tokens, got {len(ids) - 2}: shorten it"
            )
        while len(ids) + sum(map(len, self.turns)) > room:
            self.turns.pop(0)
        tokens = [*itertools.chain(*self.turns), *ids]
        self.asked += 1
        answer = []
        drawn = generate(
            Decoder(self.config, self.weights), tokens, self.config.context - len(tokens),
            seed=(self.seed, self.asked), stop=self.tokenizer.special.values(), **self.knobs,
        )  # fmt: skip
        yield from text_pieces(self.tokenizer, _noting(drawn, answer))
        self.turns.append([*ids, *answer, self.tokenizer.special[END]])


def _noting(ids, noted):
    """Yield `ids`, appending each to the list `noted`."""
    for token in ids:
        noted.append(token)
        yield token


def converse(chat: Chat, questions: Iterable[str], show: Callable[[str], object]) -> None:
    """Answer each of `questions` (lines) with `chat`; `show(text)` shows pieces."""
    for question in filter(None, map(str.strip, questions)):
        try:
            for piece in chat.reply(question):
                show(piece)
        except UserError as error:  # a chat goes on after a question that was too long
            show(f"({error})")
        show("\n")
