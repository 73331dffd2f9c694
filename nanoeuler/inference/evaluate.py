# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-face-evaluate
"""How well a model predicts a text: bits per byte and perplexity, as validation measures them.

Leaves out tasks with questions and right answers. If a model predicts K tokens, only the next
one is judged.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nanoeuler.data.validation import HeldOut, byte_count
from nanoeuler.engines.registry import make_stepper
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.weights import Weights

# Tokens of a batch: 64 shards of a CPU at a context of 128 (chapter 10), 16 windows of 1024.
BATCH_TOKENS = 1 << 14
Report = Callable[[int, int, float], None]  # of tokens judged, of all, and bits per byte so far


class Evaluation(NamedTuple):
    """How well a model predicts a text, each token from those before it in its window."""

    bits_per_byte: float
    perplexity: float  # e to the mean of -log p, in tokens
    tokens: int        # that were judged
    bytes: int         # that these spell


def windows_at_once(n: int, context: int) -> int:
    """How many of n windows make a batch, with little padding: BATCH_TOKENS at most, or one."""
    batches = math.ceil(n / max(1, BATCH_TOKENS // context))
    return math.ceil(n / batches)


def evaluate(
    weights: Weights, held_out: HeldOut, engine: str = "auto", threads: int | None = None,
    report: Report | None = None,
) -> Evaluation:  # fmt: skip
    """The numbers of equation eq-face-evaluate over all windows of `held_out`.

    engine and threads are those of `make_stepper`; `report` is called after each batch.
    """
    if threads is not None and threads < 1:
        raise UserError(f"expected threads to be above 0, got {threads}: leave it out, or give one")
    stepper = make_stepper(engine, weights, None, threads=threads)
    tokens, size = int(np.sum(held_out.targets != IGNORE)), byte_count(held_out.targets,
                                                                  held_out.tokenizer)
    done, nats = 0, 0.0

    def sums(*batch: np.ndarray) -> np.ndarray:
        nonlocal done, nats
        found = stepper.sums(*batch)
        if report:
            done, nats = done + int(np.sum(batch[1][:, :, 0] != IGNORE)), nats + float(found[0])
            report(done, tokens, nats / math.log(2) / (done * held_out.bytes_per_token))
        return found

    bits = held_out.bits_per_byte(sums)
    return Evaluation(bits, math.exp(bits * math.log(2) * size / tokens), tokens, size)
