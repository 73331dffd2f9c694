# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-face-evaluate
"""How good a model is on a text: bits per byte, perplexity, and how often it is right.

Leaves out tasks with questions and right answers. B batch, T positions, K predicted tokens, of
which only the next one is judged, V vocabulary.
"""

from typing import NamedTuple

import numpy as np

from nanoeuler.data.heldout import HeldOut
from nanoeuler.engines.choice import engine_factory
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import Weights

# Logits that are computed at a time: 8 MB of them in float32, some windows of a small model.
LOGITS = 1 << 21


class Evaluation(NamedTuple):
    """How well a model predicts a text, each token from those before it in its window."""

    bits_per_byte: float
    perplexity: float  # e to the mean of -log p, in tokens
    accuracy: float    # the share of tokens that the model gave more than any other, 0 to 1
    tokens: int        # that were judged
    bytes: int         # that these spell


def windows_at_once(config: ModelConfig) -> int:
    """How many windows of the whole context make LOGITS logits, at least one."""
    return max(1, LOGITS // (config.context * config.n_predict * config.vocab_size))


def evaluate(config: ModelConfig, weights: Weights, held_out: HeldOut) -> Evaluation:
    """The numbers of equation eq-face-evaluate over all windows of `held_out`, in float64 sums."""
    engine, nats, right, judged = engine_factory("reference")(), 0.0, 0, 0
    for tokens, targets in held_out.batches(np.arange(len(held_out.inputs))):
        logits, _ = forward(engine, config, weights, tokens)
        counted = targets[:, :, 0] != IGNORE
        scores, wanted = logits[:, :, 0][counted].astype(np.float64), targets[:, :, 0][counted]
        highest = scores.max(axis=-1)
        sums = np.log(np.exp(scores - highest[:, None]).sum(axis=-1)) + highest
        nats += float(np.sum(sums - scores[np.arange(len(wanted)), wanted]))
        right += int(np.sum(scores.argmax(axis=-1) == wanted))
        judged += len(wanted)
    size = round(held_out.bytes_per_token * judged)
    bits = nats / float(np.log(2)) / size
    return Evaluation(bits, float(np.exp(nats / judged)), right / judged, judged, size)
