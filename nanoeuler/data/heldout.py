# Made from book/d-batches.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-bits
"""What a model is judged by: held-out windows, and the bits that it needs for a byte of them.

Leaves out the model: `bits_per_byte` is given a function that says what the losses are.
T positions (the context), K predicted tokens.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from nanoeuler.data.shards import Tokens, windows
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.tokenizer.tokenizer import Tokenizer

QUICK_WINDOWS = 128  # windows in a validation along the way: 16,384 tokens at a context of 128


def entropies(tokens: np.ndarray, vocab_size: int) -> dict[str, float]:
    """Bits per token of two models that see no context: {"uniform": ..., "unigram": ...}."""
    counts = np.bincount(tokens)
    share = counts[counts > 0] / len(tokens)
    return {"uniform": math.log2(vocab_size), "unigram": float(-np.sum(share * np.log2(share)))}


class HeldOut:
    """What a model is judged by: `inputs` (n, T) int32, and `targets` (n, T) of the same windows.

    first (n, T) int32: where the text of each position begins, in windows that hold several; None:
    each window is one. A target IGNORE is not judged. Only the next token (head 0) is; `tokenizer`
    turns the targets back into the bytes that are counted, so they should be tokens that spell
    some. `bytes_per_token` and `landmarks` (bits per byte) describe those that count.
    """

    def __init__(self, inputs: np.ndarray, targets: np.ndarray, tokenizer: Tokenizer,
                 batch_size: int, n_predict: int,
                 first: np.ndarray | None = None) -> None:  # fmt: skip
        self.inputs, self.targets, self.tokenizer = inputs, targets, tokenizer
        self.first = first
        self.batch_size, self.n_predict = batch_size, n_predict
        counted = targets[targets != IGNORE]
        if not len(counted):
            raise UserError("expected held-out tokens to judge, got none: give a longer text")
        self.bytes_per_token = self._bytes(counted) / len(counted)
        bits = entropies(counted, tokenizer.vocab_size)
        self.landmarks = {name: value / self.bytes_per_token for name, value in bits.items()}

    @classmethod
    def from_tokens(cls, tokens: Tokens | np.ndarray, tokenizer: Tokenizer, batch_size: int,
                    context: int, n_predict: int) -> "HeldOut":  # fmt: skip
        """The windows of a text: every token but the first is predicted once, special ones never.

        tokens (N,), a row or `shards.Tokens`, are the ids of the held-out text.
        """
        rows = -(-(len(tokens) - 1) // context)
        padded = np.full(rows * context + 1, IGNORE, np.int32)
        padded[: len(tokens)] = windows(tokens, np.zeros(1, np.int64), len(tokens))[0]
        targets = np.where(np.isin(padded, [*tokenizer.special.values()]), IGNORE, padded)
        inputs = np.maximum(padded[:-1], 0).reshape(rows, context)  # padding: any token will do
        return cls(inputs, targets[1:].reshape(rows, context), tokenizer, batch_size, n_predict)

    def _bytes(self, targets):
        return len(self.tokenizer.decode(targets[targets != IGNORE]))

    def batches(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield tokens (B, T), targets (B, T, K), and first (B, T) if there is one, of the windows
        `rows`; the last batch is filled up."""
        shape = self.batch_size, self.inputs.shape[1]
        for at in range(0, len(rows), self.batch_size):
            part = rows[at : at + self.batch_size]
            tokens = np.zeros(shape, np.int32)
            targets = np.full((*shape, self.n_predict), IGNORE, np.int32)
            tokens[: len(part)], targets[: len(part), :, 0] = self.inputs[part], self.targets[part]
            if self.first is None:
                yield tokens, targets
                continue
            first = np.zeros(shape, np.int32)
            first[: len(part)] = self.first[part]
            yield tokens, targets, first

    def bits_per_byte(self, loss: Callable, quick: bool = False) -> float:
        """Equation eq-train-bits; `loss` gives the sums (K,) in nats of what `batches` yields.

        `quick` judges at most QUICK_WINDOWS windows, evenly spread over the text.
        """
        rows = np.arange(len(self.inputs))
        if quick and len(rows) > QUICK_WINDOWS:
            rows = np.linspace(0, len(rows) - 1, QUICK_WINDOWS).astype(int)
        nats = sum(float(loss(*batch)[0]) for batch in self.batches(rows))
        return nats / math.log(2) / self._bytes(self.targets[rows])
