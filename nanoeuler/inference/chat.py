# Made from book/11-fine-tuning-and-chat.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-chat-template
"""From a model that continues text to one that answers: template, loss mask, fine-tuning, chat.

One question, one answer, in one fixed template; several in a row are a conversation. Leaves out
system prompts, tools, and everything that learns from preferences.

B batch, T positions (the context), K predicted tokens.
"""

import itertools
import json
import sys

import numpy as np

from nanoeuler.data.batches import TRAIN_SHARE, HeldOut, digest
from nanoeuler.errors import UserError
from nanoeuler.inference.decoder import Decoder, distribution, generate, text_pieces
from nanoeuler.model.backward import IGNORE
from nanoeuler.training.loop import fit, open_run
from nanoeuler.training.saves import Run, Settings, load_model

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"  # chapter 1's special tokens


def prompt(tokenizer, question):
    """The ids (a list) of a question in the template, up to where the answer begins."""
    if missing := [name for name in (USER, ASSISTANT, END) if name not in tokenizer.special]:
        raise UserError(
            f"expected a tokenizer with the special tokens of a chat, but it has no {missing[0]}: "
            "train the model with a tokenizer that nanoeuler has made"
        )
    asked = tokenizer.encode(question).tolist()
    return [tokenizer.special[USER], *asked, tokenizer.special[ASSISTANT]]


def conversation(tokenizer, question, answer):
    """The ids of a question and its answer, and for each id whether the loss counts it (bools)."""
    before = prompt(tokenizer, question)
    after = [*tokenizer.encode(answer).tolist(), tokenizer.special[END]]
    return before + after, [False] * len(before) + [True] * len(after)


# %% sec-chat-batches
class Conversations:
    """Question-answer pairs as batches for `train.fit`; a row holds whole conversations.

    `tokens` (rows, T + K) int32 and `counted`, bool, of the same shape. Pairs that are longer than
    the context are left out, `left_out` of them; UserError if none is left.
    """

    def __init__(self, tokenizer, pairs, batch_size, context, n_predict, seed=0):
        self.batch_size, self.context, self.seed = batch_size, context, seed
        self.ahead = 1 + np.arange(n_predict)
        rows, self.left_out = [], 0
        for ids, counted in (conversation(tokenizer, *pair) for pair in pairs):
            if len(ids) <= context:
                if not rows or len(rows[-1]) + len(ids) > context + 1:  # the last is only predicted
                    rows.append([])
                rows[-1] += zip(ids, counted, strict=True)
            else:
                self.left_out += 1
        if not rows:
            raise UserError(
                f"expected question-answer pairs of at most {context} tokens, got none: "
                "give shorter ones, or more"
            )
        shape = len(rows), context + n_predict
        self.tokens = np.full(shape, tokenizer.special[END], np.int32)
        self.counted = np.zeros(shape, bool)
        for row, tokens, counted in zip(rows, self.tokens, self.counted, strict=True):
            tokens[: len(row)], counted[: len(row)] = zip(*row, strict=True)

    @property
    def windows(self):
        """How many rows a pass over the pairs has, as `data.Batches` has windows."""
        return len(self.tokens)

    def rows(self, chosen):
        """tokens (B, T) and targets (B, T, K), int32, of the chosen rows."""
        at = np.arange(self.context)[:, None] + self.ahead
        tokens, counted = self.tokens[chosen], self.counted[chosen]
        return tokens[:, : self.context], np.where(counted[:, at], tokens[:, at], IGNORE)

    def batch(self, step):
        """tokens and targets of step 1, 2, ...: each pass visits all rows in a new random order."""
        n, first = self.windows, (step - 1) * self.batch_size
        passes = range(first // n, (first + self.batch_size - 1) // n + 1)
        order = [np.random.default_rng((self.seed, p)).permutation(n) for p in passes]
        start = first - n * passes[0]
        return self.rows(np.concatenate(order)[start : start + self.batch_size])


# %% sec-chat-sft
SFT_STEPS = 600  # about two passes over the embedded pairs, half a minute on two cores
SFT_LR = 1e-3  # a quarter of the rate of training from nothing, `optim.LEARNING_RATE`


class HeldOutAnswers(HeldOut):
    """The held-out text of `train.fit` for question-answer pairs: the bytes of their answers."""

    def __init__(self, tokenizer, pairs, batch_size, context, n_predict):
        every = Conversations(tokenizer, pairs, batch_size, context, n_predict)
        self.inputs, targets = every.rows(np.arange(len(every.tokens)))
        answers = targets[:, :, 0] != tokenizer.special[END]  # which spells nothing
        self.targets = np.where(answers, targets[:, :, 0], IGNORE)
        if (self.targets == IGNORE).all():
            raise UserError(
                f"expected answers to judge the model by, but the last {len(pairs)} pairs, which "
                "are held out, have empty ones: give more pairs, or others"
            )
        self.batch_size, self.n_predict, self.tokenizer = batch_size, n_predict, tokenizer
        self._describe()


def sft(base, pairs, out, *, steps=None, batch_size=None, accumulate=None, lr=None, seed=None,
        resume=False, **how):  # fmt: skip
    """Fine-tune the model of the run directory `base` on pairs [(question, answer)] into `out`.

    The last tenth of the pairs is held out. Settings that are None: SFT_STEPS, SFT_LR, and those of
    `checkpoint.Settings`; with `resume`, the run's, and `base` is not read. `how` goes to
    `train.fit`. Returns the `Run`. UserError as `train.train` raises it.
    """
    if len(pairs) < 2:
        raise UserError(f"expected at least 2 question-answer pairs, got {len(pairs)}")
    data, cut = digest(json.dumps(pairs).encode()), int(len(pairs) * TRAIN_SHARE)
    given = {"steps": steps, "batch_size": batch_size, "accumulate": accumulate, "lr": lr,
             "seed": seed}  # fmt: skip

    def begin(given):
        config, tokenizer, weights = load_model(base)
        settings = Settings(**{"steps": SFT_STEPS, "lr": SFT_LR, **given})
        run = Run.begin(config, settings, tokenizer, data)
        run.weights.flat[...] = weights.flat
        return run

    run = open_run(out, given, data, begin, resume)
    shape = run.settings.batch_size, run.config.context, run.config.n_predict
    batches = Conversations(run.tokenizer, pairs[:cut], *shape, run.settings.seed)
    held_out = HeldOutAnswers(run.tokenizer, pairs[cut:], *shape)
    if batches.left_out:
        print(f"{batches.left_out:,} of {cut:,} pairs are longer than the context of "
              f"{run.config.context} tokens, and left out", file=sys.stderr)  # fmt: skip
    return fit(out, run, batches, held_out, **how)


# %% sec-chat-loop
class Chat:
    """A conversation with a model, with as much memory of its turns as the context has room for.

    `knobs` go to `generate`: temperature, top_k, top_p (UserError for a wrong one). The same
    questions get the same answers for the same seed.
    """

    def __init__(self, config, tokenizer, weights, seed=0, **knobs):
        self.config, self.tokenizer, self.weights = config, tokenizer, weights
        self.seed, self.knobs, self.turns, self.asked = seed, knobs, [], 0
        distribution(np.zeros(1), **knobs)  # tells of a wrong knob now and not at every question
        prompt(tokenizer, "")  # and of a tokenizer that has no special tokens for a chat

    def reply(self, question):
        """Yield the answer piece by piece. UserError if the question is longer than its room."""
        asked = prompt(self.tokenizer, question)
        room = self.config.context // 2
        if len(asked) > room:
            raise UserError(
                f"expected a question of at most {room - 2} tokens, got {len(asked) - 2}: "
                "shorten it"
            )
        while len(asked) + sum(map(len, self.turns)) > room:
            self.turns.pop(0)
        tokens = [*itertools.chain(*self.turns), *asked]
        self.asked += 1
        ids = generate(
            Decoder(self.config, self.weights), tokens, self.config.context - len(tokens),
            seed=(self.seed, self.asked), stop=self.tokenizer.special.values(), **self.knobs,
        )  # fmt: skip
        answer = []
        yield from text_pieces(self.tokenizer, _noting(ids, answer))
        self.turns.append([*asked, *answer, self.tokenizer.special[END]])


def _noting(ids, noted):
    """Yield `ids`, appending each to the list `noted`."""
    for token in ids:
        noted.append(token)
        yield token


def converse(chat, questions, show):
    """Answer each of `questions` (an iterable of lines) with `chat`; `show(text)` shows pieces."""
    for question in filter(None, map(str.strip, questions)):
        try:
            for piece in chat.reply(question):
                show(piece)
        except UserError as error:  # a chat goes on after a question that was too long
            show(f"({error})")
        show("\n")


# %% sec-chat-limits
def read_pairs(path):
    """Question-answer pairs from a file: a line {"question": TEXT, "answer": TEXT} for each."""
    pairs = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            pair = json.loads(line)
            pairs.append((pair["question"], pair["answer"]))
            if not all(isinstance(text, str) for text in pairs[-1]):
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            wanted, found = '{"question": TEXT, "answer": TEXT}', line[:40].decode(errors="replace")
            raise UserError(
                f"line {number} of {path}: expected {wanted}, but it begins with {found!r}"
            ) from None
    return pairs
