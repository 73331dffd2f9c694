# Made from book/11-fine-tuning-and-chat.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-chat-batches
"""Supervised fine-tuning: question-answer pairs, their batches, and the run that learns from them.

Leaves out everything that learns from preferences, and how a run takes its steps (loop.py).

B batch, T positions (the context), K predicted tokens.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nanoeuler.data.heldout import HeldOut
from nanoeuler.data.text import TRAIN_SHARE, digest
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import Weights
from nanoeuler.tokenizer.template import END, conversation
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.folder import saves
from nanoeuler.training.loop import fit
from nanoeuler.training.optim import rate_for
from nanoeuler.training.record import read_record, read_request
from nanoeuler.training.run import Run, Settings
from nanoeuler.training.saves import load_model
from nanoeuler.training.train import open_run

Pair = tuple[str, str]  # a question and its answer


def pack(
    conversations: Iterable[tuple[list[int], list[bool]]], context: int
) -> tuple[list[list[tuple[int, bool]]], int]:
    """Put whole conversations, (ids, counted) each, into rows of at most `context` + 1 tokens.

    Returns the rows, [(id, counted)] each, and how many conversations are longer than the context
    and left out.
    """
    rows, left_out = [], 0
    for ids, counted in conversations:
        if len(ids) > context:
            left_out += 1
            continue
        if not rows or len(rows[-1]) + len(ids) > context + 1:
            rows.append([])
        rows[-1] += zip(ids, counted, strict=True)
    return rows, left_out


class Conversations:
    """Question-answer pairs as batches for `loop.fit`; a row holds whole conversations.

    `tokens` (rows, T + K) int32 and `counted`, bool, of the same shape. Pairs that are longer than
    the context are left out, `left_out` of them. UserError if none is left.
    """

    def __init__(self, tokenizer: Tokenizer, pairs: Iterable[Pair], batch_size: int, context: int,
                 n_predict: int, seed: int = 0):  # fmt: skip
        self.batch_size, self.context, self.seed = batch_size, context, seed
        self.ahead = 1 + np.arange(n_predict)
        rows, self.left_out = pack((conversation(tokenizer, *pair) for pair in pairs), context)
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
    def windows(self) -> int:
        """How many rows a pass over the pairs has, as `batches.Batches` has windows."""
        return len(self.tokens)

    def rows(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """tokens (B, T) and targets (B, T, K), int32, of the chosen rows (B,)."""
        at = np.arange(self.context)[:, None] + self.ahead
        tokens, counted = self.tokens[chosen], self.counted[chosen]
        return tokens[:, : self.context], np.where(counted[:, at], tokens[:, at], IGNORE)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens and targets of step 1, 2, ...: each pass visits all rows in a new random order."""
        n, first = self.windows, (step - 1) * self.batch_size
        passes = range(first // n, (first + self.batch_size - 1) // n + 1)
        order = [np.random.default_rng((self.seed, p)).permutation(n) for p in passes]
        start = first - n * passes[0]
        return self.rows(np.concatenate(order)[start : start + self.batch_size])


# %% sec-chat-sft
def held_out_answers(
    tokenizer: Tokenizer, pairs: Iterable[Pair], batch_size: int, context: int, n_predict: int
) -> HeldOut:
    """What a fine-tuned model is judged by: the bytes of the answers of `pairs`, in their rows."""
    every = Conversations(tokenizer, pairs, batch_size, context, n_predict)
    inputs, targets = every.rows(np.arange(every.windows))
    answers = targets[:, :, 0]
    judged = np.where(answers == tokenizer.special[END], IGNORE, answers)
    if (judged == IGNORE).all():
        raise UserError(
            "expected answers to judge the model by, but the last tenth of the pairs, which is "
            "held out, has empty ones: give more pairs, or others"
        )
    return HeldOut(inputs, judged, tokenizer, batch_size, n_predict)


def _pair(line):
    """The pair of a line of JSON, bytes; None if it is none."""
    try:
        record = json.loads(line)
        pair = record["question"], record["answer"]
        "".join(pair).encode()  # fails where one is no text, or half of a surrogate pair
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return pair


def read_pairs(path: Path) -> list[Pair]:
    """Question-answer pairs from a file: a line {"question": TEXT, "answer": TEXT} for each."""
    lines = path.read_bytes().splitlines()
    pairs = [_pair(line) for line in lines]
    if None in pairs:
        at = pairs.index(None)
        raise UserError(
            f'line {at + 1} of {path}: expected {{"question": TEXT, "answer": TEXT}}, but it '
            f"begins with {lines[at][:40].decode(errors='replace')!r}"
        )
    return pairs


def checked_pairs(pairs: Iterable[Pair]) -> list[Pair]:
    """`pairs` as a list of tuples; UserError about the first that is no pair of texts."""
    if not isinstance(pairs, Iterable):
        raise UserError(
            f"expected question-answer pairs, got {pairs!r:.60}: give a list of (question, answer)"
        )
    every = list(pairs)
    for number, pair in enumerate(every, start=1):
        if not (isinstance(pair, tuple | list) and [*map(type, pair)] == [str, str]):
            raise UserError(
                f"expected pair {number} to be (question, answer), two str, got {pair!r:.60}: "
                "give a list of such pairs"
            )
    return [(question, answer) for question, answer in every]


# A quarter of the rate of training from nothing, `optim.LEARNING_RATE`, and as that by the width.
LEARNING_RATE = 1e-3
# One and a half passes over the embedded pairs, half a minute on two cores.
FINETUNING = Settings(steps=600)

Base = Path | str | tuple[ModelConfig, Tokenizer, Weights]  # a run directory, or a model's parts


def finetune(
    base: Base | None, pairs: Iterable[Pair], out: Path | str, *,
    settings: Settings | None = None, resume: bool = False, **how: Any,
) -> Run:  # fmt: skip
    """Fine-tune `base` on `pairs` into the directory `out`; the model of `base` is not changed.

    The last tenth of the pairs is held out. settings None: FINETUNING; settings that leave the
    learning rate open get LEARNING_RATE by `optim.rate_for`. With `resume`, the run in `out` goes
    on: its settings hold, and base may be None; one that is not must have its architecture and its
    tokenizer. `how` goes to `loop.fit`. UserError for wrong pairs, and as `train.train` raises it.
    """
    pairs = checked_pairs(pairs)
    if len(pairs) < 2:
        raise UserError(
            f"expected at least 2 question-answer pairs, got {len(pairs)}: a tenth is held out, "
            "and the others are trained on"
        )
    data, cut = digest(json.dumps(pairs).encode()), int(len(pairs) * TRAIN_SHARE)
    config, tokenizer = _sizes(base) if resume and saves(out) else (None, None)

    def begin() -> Run:
        if base is None:
            raise UserError(f"nothing was saved in {out}: name the model that it begins with")
        config, tokenizer, weights = load_model(base) if isinstance(base, Path | str) else base
        asked = read_request(out) if resume else None
        chosen = settings or asked and asked.settings or FINETUNING
        chosen = chosen.with_rate(rate_for(config.dim, LEARNING_RATE))
        run = Run.begin(config, chosen, tokenizer, data)
        run.weights.flat[...] = weights.flat
        return run

    with open_run(out, begin, data=data, settings=settings, config=config, tokenizer=tokenizer,
                  resume=resume) as run:  # fmt: skip
        shape = run.settings.batch_size, run.config.context, run.config.n_predict
        batches = Conversations(run.tokenizer, pairs[:cut], *shape, run.settings.seed)
        held_out = held_out_answers(run.tokenizer, pairs[cut:], *shape)
        if batches.left_out:
            print(f"{batches.left_out:,} of {cut:,} pairs are longer than the context of "
                  f"{run.config.context} tokens, and left out", file=sys.stderr)  # fmt: skip
        return fit(out, run, batches, held_out, **how)


def _sizes(base):
    """The configuration and the tokenizer of `base`; None of each if there is none."""
    if base is None:
        return None, None
    if isinstance(base, Path | str):
        record = read_record(base)
        return record.config, record.tokenizer
    return base[:2]
