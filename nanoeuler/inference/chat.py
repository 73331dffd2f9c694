# Made from book/16a-a-conversation.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-chat-loop
"""A conversation with a fine-tuned model: what it remembers, what it reads, what it answers.

Leaves out the form of a conversation (the tokenizer's chat_template.py), where a model learns it
(the training's sft.py), and how a program holds one (repl.py).
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from nanoeuler.errors import UserError
from nanoeuler.inference.backends import make_reader
from nanoeuler.inference.decoder import Decoder, generate, text_pieces
from nanoeuler.inference.sampling import SamplingOptions, check
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import Weights
from nanoeuler.tokenizer.chat_template import end_of, messages_of, prompt, template_of
from nanoeuler.tokenizer.tokenizer import Tokenizer

TEMPERATURE = 0.5  # below that of `generate`: an answer should be a likely one
TOKENS = 1024  # the most per answer, some 700 words: a longer one probably loops


class Turn(NamedTuple):
    """A question and what was answered, and their token ids in the template."""

    question: str
    answer: str
    ids: list[int]


class Memory:
    """What was said, and how much of it a model of this context sees at a question.

    `turns`: all; of those before the last question the model saw the newest `kept`.
    `system`: the message that it reads before everything else.
    """

    def __init__(self, tokenizer: Tokenizer, context: int):
        self.tokenizer, self.context = tokenizer, context
        self.turns: list[Turn] = []
        self.kept = 0
        prompt(tokenizer, "")  # UserError if it has no special tokens for a chat
        self.tell("")

    def tell(self, system: str) -> None:
        """Read this message before all else from now on. UserError, and no change, if too long."""
        ids, most = self.tokenizer.encode(system).tolist(), self.context // 4
        if len(ids) > most:
            raise UserError(f"expected a system message of at most {most} tokens, got {len(ids)}: "
                            "shorten it")  # fmt: skip
        self.system, self.first = system, ids

    def sees(self, question: str) -> tuple[list[int], list[int]]:
        """The ids that an answer will follow: those remembered, and those of the question.

        UserError if the question is too long.
        """
        if self.tokenizer.template:  # the model came with its own template: see below
            return self._rendered(question)
        ids = prompt(self.tokenizer, question)
        room = self.context // 2 - len(self.first)
        if len(ids) > room:
            raise UserError(f"expected a question of at most {room - 2} tokens, got "
                            f"{len(ids) - 2}: shorten it")  # fmt: skip
        ends = itertools.accumulate(len(turn.ids) for turn in reversed(self.turns))
        self.kept = sum(end <= room - len(ids) for end in ends)
        newest = self.turns[len(self.turns) - self.kept :]
        return [*self.first, *itertools.chain(*(turn.ids for turn in newest))], ids

    def messages(self) -> list[dict[str, str]]:
        """All that was said, each as {"role": system, user or assistant, "content": text}."""
        said = [("system", self.system)] if self.system else []
        for turn in self.turns:
            said += [("user", turn.question), ("assistant", turn.answer)]
        return [{"role": role, "content": text} for role, text in said]

    def _rendered(self, question: str) -> tuple[list[int], list[int]]:
        """What `sees` gives, in the tokenizer's own template."""
        template, room = template_of(self.tokenizer), self.context // 2
        for oldest in range(len(self.turns) + 1):
            turns = [(turn.question, turn.answer) for turn in self.turns[oldest:]]
            ids = template.prompt(messages_of([*turns, (question, None)], self.system))
            if len(ids) <= room:
                self.kept = len(turns)
                earlier = template.conversation(messages_of(turns, self.system))[0] if turns else []
                same = [a == b for a, b in zip(earlier, ids[:-1], strict=False)]
                cut = same.index(False) if False in same else len(same)
                return ids[:cut], ids[cut:]
        raise UserError(f"expected a question of at most {room} tokens, template and all, "
                        f"got {len(ids)}: shorten it")  # fmt: skip


# %% sec-chat-loop
class ChatOptions(SamplingOptions, total=False):
    """Options of `Model.chat` (appendix F): `SamplingOptions`, a system message, which reader."""

    system: str  # a message that is read before all questions
    tokens: int  # the most per answer
    engine: str  # for `make_reader`
    quantize: str  # none; int8, int4: matrices in less memory, less exact


class Chat:
    """A conversation with a model: `reply` is the next answer, `memory` what was said.

    `sampling`: `tokens` as in `change`, and options of `generate`: temperature, top_k, top_p ...
    The same questions get the same answers for the same seed. UserError for a wrong option, seed or
    engine, or if `Memory` raises it.
    """

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer, weights: Weights, seed: int = 0,
        system: str = "", engine: str = "auto", quantize: str = "none", **sampling: Any,
    ):  # fmt: skip
        self.config, self.tokenizer, self.seed = config, tokenizer, seed
        self.asked, self.sampling = 0, dict[str, Any]()
        self.change(TOKENS, temperature=TEMPERATURE)
        self.change(**sampling)  # tells of a wrong one now, not at a question
        self.memory = Memory(tokenizer, config.context)
        self.memory.tell(system)
        reader = make_reader(config, weights, engine, quantize=quantize)
        self.decoder = Decoder(config, weights, reader)

    def change(self, tokens: int | None = None, **sampling: Any) -> None:
        """Draw with these options from now on; `tokens`: the most per answer.

        UserError, and no change, if one is wrong.
        """
        check(**{**self.sampling, **sampling, "seed": self.seed})
        if tokens is not None:
            if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
                raise UserError(f"expected tokens, how long an answer may be, to be a whole number "
                                f"of at least 1, got {tokens!r}")  # fmt: skip
            self.tokens = tokens
        self.sampling |= sampling

    def reset(self) -> None:
        """Begin anew, with the same system message and the same options."""
        self.memory.turns, self.asked = [], 0
        self.decoder.forget(len(self.decoder.tokens))

    def _hold(self, ids):
        """Make the decoder hold `ids`, reading only from the first that it doesn't hold."""
        held = self.decoder.tokens
        differs = (i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b)
        same = next(differs, min(len(held), len(ids)))
        self.decoder.forget(len(held) - same)
        if ids[same:]:
            self.decoder.read(ids[same:])

    def reply(self, question: str) -> Iterator[str]:
        """Yield the answer piece by piece. UserError if `Memory.sees` raises it.

        After its last piece the answer becomes a turn. If the generator is closed before, the part
        so far becomes one.
        """
        before, ids = self.memory.sees(question)
        self.asked += 1
        self._hold(before)
        room = self.config.context - len(before) - len(ids)
        drawn = generate(
            self.decoder, ids, min(self.tokens, room),
            seed=(self.seed, self.asked), stop=self.tokenizer.special.values(), **self.sampling,
        )  # fmt: skip
        answer, whole = [], False
        try:
            yield from text_pieces(self.tokenizer, _noting(drawn, answer))
            whole = True
        finally:
            if whole or answer:
                said, end = self.tokenizer.decode_text(answer), end_of(self.tokenizer)
                self.memory.turns.append(Turn(question, said, [*ids, *answer, end]))


# %% sec-chat-loop
def _noting(ids, noted):
    """Yield `ids`, appending each to the list `noted`."""
    for token in ids:
        noted.append(token)
        yield token
