# Made from book/d-batches.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-bits
"""Evaluation on held-out windows: the bits per byte that a model needs for them.

Leaves out the model: `bits_per_byte` takes a function that computes the losses.
T positions (the context), K predicted tokens.
"""

import math
from collections.abc import Callable, Collection, Iterator

import numpy as np

from nanoeuler.data.shards import Tokens, windows
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.tokenizer.tokenizer import Tokenizer

QUICK_WINDOWS = 128  # windows in a validation during a run: 16,384 tokens at a context of 128


def entropies(tokens: np.ndarray, vocab_size: int) -> dict[str, float]:
    """Bits per token of two models without context: {"uniform": ..., "unigram": ...}."""
    counts = np.bincount(tokens)
    share = counts[counts > 0] / len(tokens)
    return {"uniform": math.log2(vocab_size), "unigram": float(-np.sum(share * np.log2(share)))}


def as_windows(tokens: Tokens | np.ndarray, special: Collection[int], context: int
                 ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """inputs, targets (n, T) int32 of a text's windows; a target that doesn't count is IGNORE."""
    rows = -(-(len(tokens) - 1) // context)
    padded = np.full(rows * context + 1, IGNORE, np.int32)
    padded[: len(tokens)] = windows(tokens, np.zeros(1, np.int64), len(tokens))[0]
    targets = np.where(np.isin(padded, [*special]), IGNORE, padded)
    inputs = np.maximum(padded[:-1], 0).reshape(rows, context)  # any token will do as padding
    return inputs, targets[1:].reshape(rows, context)


def evenly_spaced(n: int, most: int | None = None) -> np.ndarray:
    """The numbers of n windows, or of at most `most` of them, evenly spread."""
    if most is None or n <= most:
        return np.arange(n)
    return np.linspace(0, n - 1, most).astype(int)


def zero_padded(part: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """`part`, filled up with rows of zeros to `shape`, int32."""
    whole = np.zeros(shape, np.int32)
    whole[: len(part)] = part
    return whole


def byte_count(targets: np.ndarray, tokenizer: Tokenizer) -> int:
    """The number of bytes that the targets spell, without those that are IGNORE."""
    return len(tokenizer.decode(targets[targets != IGNORE]))


def baselines_of(targets: np.ndarray, tokenizer: Tokenizer) -> tuple[float, dict[str, float]]:
    """Bytes per token of the targets that count, and their `entropies` in bits per byte."""
    counted = targets[targets != IGNORE]
    if not len(counted):
        raise UserError("expected held-out tokens to judge, got none: give a longer text")
    length = byte_count(counted, tokenizer) / len(counted)
    bits = entropies(counted, tokenizer.vocab_size)
    return length, {name: value / length for name, value in bits.items()}


class HeldOut:
    """Windows to evaluate a model on: `inputs` (n, T) int32, `targets` (n, T) of the same windows.

    first (n, T) int32: the first position of each position's text, in packed windows, or None.
    Only head 0 counts, and no target IGNORE. `tokenizer` counts the targets' bytes.
    `bytes_per_token` and `baselines` (bits per byte) describe the targets that count.
    """

    def __init__(self, inputs: np.ndarray, targets: np.ndarray, tokenizer: Tokenizer,
                 batch_size: int, n_predict: int,
                 first: np.ndarray | None = None) -> None:  # fmt: skip
        self.inputs, self.targets, self.first = inputs, targets, first
        self.tokenizer, self.batch_size, self.n_predict = tokenizer, batch_size, n_predict
        self.bytes_per_token, self.baselines = baselines_of(targets, tokenizer)

    @classmethod
    def from_tokens(cls, tokens: Tokens | np.ndarray, tokenizer: Tokenizer, batch_size: int,
                    context: int, n_predict: int) -> "HeldOut":  # fmt: skip
        """The windows of a text: each token after the first counts once, special tokens never."""
        inputs, targets = as_windows(tokens, tokenizer.special.values(), context)
        return cls(inputs, targets, tokenizer, batch_size, n_predict)

    def batches(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield tokens (B, T), targets (B, T, K), and first (B, T) if any, of windows `rows`."""
        shape = self.batch_size, self.inputs.shape[1]
        for at in range(0, len(rows), self.batch_size):
            part = rows[at : at + self.batch_size]
            targets = np.full((*shape, self.n_predict), IGNORE, np.int32)
            targets[: len(part), :, 0] = self.targets[part]
            more = () if self.first is None else (zero_padded(self.first[part], shape),)
            yield zero_padded(self.inputs[part], shape), targets, *more

    def bits_per_byte(self, loss: Callable, quick: bool = False) -> float:
        """Equation eq-train-bits; loss(*batch) returns sums (K,) in nats for a batch of `batches`.

        quick: use at most QUICK_WINDOWS windows, evenly spread over the text.
        """
        rows = evenly_spaced(len(self.inputs), QUICK_WINDOWS if quick else None)
        nats = sum(float(loss(*batch)[0]) for batch in self.batches(rows))
        return nats / math.log(2) / byte_count(self.targets[rows], self.tokenizer)
