# Made from book/16-fine-tuning.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-chat-batches
"""Supervised fine-tuning: conversations, their batches, and the run that learns from them.

Leaves out everything that learns from preferences, and how a run takes its steps (loop.py).

B batch, T positions (the context), K predicted tokens.
"""

import json
import sys
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from nanoeuler.data.conversations import Conversation, Pair, numbers, turns_of
from nanoeuler.data.text import TRAIN_SHARE, digest
from nanoeuler.data.validation import HeldOut
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import Weights
from nanoeuler.tokenizer.chat_template import dialogue, end_of
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.checkpoint import (
    ADAPTERS,
    Request,
    load_model,
    read_record,
    read_request,
)
from nanoeuler.training.folder import checkpoints
from nanoeuler.training.loop import Options, fit
from nanoeuler.training.optim import rate_for
from nanoeuler.training.run import Run, Settings
from nanoeuler.training.train import open_run

Spelled = tuple[list[int], list[bool]]  # ids, and for each whether the loss counts it


def spell(tokenizer: Tokenizer, talk: Pair | Conversation) -> Spelled:
    """The ids of a conversation in the template, and for each whether the loss counts it."""
    return dialogue(tokenizer, turns_of(talk), getattr(talk, "system", None))


def pack(conversations: list[Spelled], context: int) -> tuple[list[list[Spelled]], list[int]]:
    """Put whole conversations into rows of at most `context` + 1 tokens: best fit decreasing.

    Returns the rows, and which conversations (from 1) are left out, longer than the context.
    """
    left_out = [n for n, (ids, _) in enumerate(conversations, start=1) if len(ids) > context]
    open_rows: list[list] = [[] for _ in range(context + 2)]  # [r]: rows with room for r tokens
    rows = []
    for spelled in sorted(conversations, key=lambda spelled: -len(spelled[0])):
        size = len(spelled[0])
        if size > context:
            continue
        room = next((r for r in range(size, context + 2) if open_rows[r]), None)
        if room is None:
            row, room = [], context + 1
            rows.append(row)
        else:
            row = open_rows[room].pop()
        row.append(spelled)
        open_rows[room - size].append(row)
    return rows, left_out


class Conversations:
    """Batches for `loop.fit`, of rows that each hold several whole conversations.

    Three arrays (rows, T + K), since the last head at the last position looks K places ahead:
    `tokens` int32; `counted` bool, whether each is part of an answer; `first` int32, where in the
    row its conversation begins. `left_out`: the numbers of the conversations that are longer than
    the context. UserError if no conversation fits.
    """

    def __init__(self, tokenizer: Tokenizer, talks: Iterable[Pair | Conversation], batch_size: int,
                 context: int, n_predict: int, seed: int = 0):  # fmt: skip
        self.batch_size, self.context, self.seed = batch_size, context, seed
        self.ahead = 1 + np.arange(n_predict)
        rows, self.left_out = pack([spell(tokenizer, talk) for talk in talks], context)
        if not rows:
            raise UserError(
                f"expected question-answer pairs of at most {context} tokens, got none: "
                "give shorter ones, or more"
            )
        shape = len(rows), context + n_predict
        self.tokens = np.full(shape, end_of(tokenizer), np.int32)
        self.counted, self.first = np.zeros(shape, bool), np.zeros(shape, np.int32)
        for i, row in enumerate(rows):
            end = 0
            for ids, counted in row:
                at, end = slice(end, end + len(ids)), end + len(ids)
                self.tokens[i, at], self.counted[i, at], self.first[i, at] = ids, counted, at.start
            self.first[i, end:] = end

    @property
    def windows(self) -> int:
        """The number of rows, by the name that the loop asks for: a pass reads each row once."""
        return len(self.tokens)

    def rows(self, chosen: np.ndarray) -> tuple[np.ndarray, ...]:
        """tokens (B, T), targets (B, T, K) and first (B, T), int32, of the chosen rows (B,)."""
        T, at = self.context, np.arange(self.context)[:, None] + self.ahead
        tokens, counted, first = (x[chosen] for x in (self.tokens, self.counted, self.first))
        trained = counted[:, at] & (first[:, at] == first[:, :T, None])
        return tokens[:, :T], np.where(trained, tokens[:, at], IGNORE), first[:, :T]

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """The `rows` of step 1, 2, ...: each pass visits all of them in a new random order."""
        n, begin = self.windows, (step - 1) * self.batch_size
        # A batch may begin in one pass over the rows and end in another.
        passes = range(begin // n, (begin + self.batch_size - 1) // n + 1)
        order = [np.random.default_rng((self.seed, p)).permutation(n) for p in passes]
        start = begin - n * passes[0]
        return self.rows(np.concatenate(order)[start : start + self.batch_size])


# %% sec-chat-sft
def held_out_answers(
    tokenizer: Tokenizer, pairs: Iterable[Pair | Conversation], batch_size: int, context: int,
    n_predict: int,
) -> HeldOut:  # fmt: skip
    """The validation set: the answers of `pairs` without their end, in rows as in training.

    UserError if all of them are empty.
    """
    every = Conversations(tokenizer, pairs, batch_size, context, n_predict)
    inputs, targets, first = every.rows(np.arange(every.windows))
    answers = targets[:, :, 0]
    judged = np.where(answers == end_of(tokenizer), IGNORE, answers)
    if (judged == IGNORE).all():
        raise UserError(
            "expected answers to judge the model by, but the last tenth of the pairs, which is "
            "held out, has empty ones: give more pairs, or others"
        )
    return HeldOut(inputs, judged, tokenizer, batch_size, n_predict, first)


# A quarter of the rate of training from scratch, `optim.LEARNING_RATE`. For wide models
# `optim.rate_for` lowers both.
LEARNING_RATE = 1e-3
# Nearly two passes over the embedded pairs.
FINETUNING = Settings(steps=600)

Base = Path | str | tuple[ModelConfig, Tokenizer, Weights]  # a run directory, or a model's parts


def _begin(base, out, asked, resume):
    """A `Run` before its first step: with the weights of `base`, or with adapters beside them."""
    if base is None:
        raise UserError(f"nothing was saved in {out}: name the model that it begins with")
    config, tokenizer, weights = load_model(base) if isinstance(base, Path | str) else base
    before = read_request(out) if resume else None
    chosen = asked.settings or (before and before.settings) or FINETUNING
    if (adapters := asked.lora or (before and before.lora)) is not None:
        room = import_module(ADAPTERS)
        chosen = chosen.with_rate(rate_for(config.dim, room.LORA_RATE))
        weights = room.adapt(base, weights, out, adapters, chosen.seed)
        return Run.begin(config, chosen, tokenizer, asked.data, weights)
    chosen = chosen.with_rate(rate_for(config.dim, LEARNING_RATE))
    run = Run.begin(config, chosen, tokenizer, asked.data)
    run.weights.flat[...] = weights.flat
    return run


def finetune(
    base: Base | None, pairs: Iterable[Pair | Conversation], out: Path | str, *,
    settings: Settings | None = None, resume: bool = False, lora: Any = None,
    **options: Unpack[Options],
) -> Run:  # fmt: skip
    """Fine-tune `base` on `pairs` into the directory `out`; the model of `base` is not changed.

    The last tenth of the pairs is held out. settings None: FINETUNING; settings that leave the
    learning rate open get LEARNING_RATE by `optim.rate_for`. With `resume`, the run in `out` goes
    on with its own settings, and base may be None. If base is given, it must have the architecture
    and the tokenizer of that run. With `lora`, a `model.lora.Lora`, adapters learn, by default with
    LORA_RATE in place of LEARNING_RATE, and `base` must be a run directory. `options` go to
    `loop.fit`. UserError for wrong pairs, and where `train` raises one.
    """
    pairs = checked_pairs(pairs)
    if len(pairs) < 2:
        raise UserError(f"expected at least 2 question-answer pairs, got {len(pairs)}: a tenth is "
                        "held out, and the others are trained on")  # fmt: skip
    data, cut = digest(json.dumps(pairs).encode()), int(len(pairs) * TRAIN_SHARE)
    config, tokenizer = _sizes(base) if resume and checkpoints(out) else (None, None)

    asked = Request(config, settings, tokenizer, data, None, lora)
    with open_run(out, partial(_begin, base, out, asked, resume), asked, resume) as run:
        shape = run.settings.batch_size, run.config.context, run.config.n_predict
        batches = Conversations(run.tokenizer, pairs[:cut], *shape, run.settings.seed)
        held_out = held_out_answers(run.tokenizer, pairs[cut:], *shape)
        if batches.left_out:
            print(f"{len(batches.left_out):,} of {cut:,} pairs are longer than the context of "
                  f"{run.config.context} tokens, and left out: numbers "
                  f"{numbers(batches.left_out)}", file=sys.stderr)  # fmt: skip
        return fit(out, run, batches, held_out, **options)


# %% sec-chat-files
def _is_pair(x):
    return isinstance(x, tuple | list) and [*map(type, x)] == [str, str]


def checked_pairs(pairs: Iterable[Pair | Conversation]) -> list[Pair | Conversation]:
    """`pairs` as a list of tuples and `Conversation`; UserError about the first that is neither."""
    if not isinstance(pairs, Iterable):
        raise UserError(
            f"expected question-answer pairs, got {pairs!r:.60}: give a list of (question, answer)"
        )
    every = []
    for number, pair in enumerate(pairs, start=1):
        if isinstance(pair, Conversation) and pair.turns and all(map(_is_pair, pair.turns)):
            good = isinstance(pair.system, str | None)
            every.append(Conversation([(q, a) for q, a in pair.turns], pair.system))
        else:
            good = _is_pair(pair)
            every.append(tuple(pair) if good else pair)
        if not good:
            raise UserError(
                f"expected pair {number} to be (question, answer), two str, got {pair!r:.60}: "
                "give a list of such pairs"
            )
    return every


def _sizes(base):
    """The configuration and the tokenizer of `base`; None of each if there is none."""
    if base is None:
        return None, None
    if isinstance(base, Path | str):
        record = read_record(base)
        return record.config, record.tokenizer
    return base[:2]
