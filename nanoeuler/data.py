# Made from book/06c-batches.md by nanoeuler.book: edit the chapter, not this file.


# %% book/06c-batches.md:18
"""From a text file to batches: the split, the windows, the targets of K heads, bits per byte.

Leaves out shards and documents: the tokens of one text stay in memory.

B batch, T positions (the context), K predicted tokens.
"""

import hashlib
import math
from pathlib import Path

import numpy as np

from nanoeuler.backward import IGNORE
from nanoeuler.errors import UserError

TRAIN_SHARE = 0.9  # of the bytes, from the beginning; the share that nanoGPT trains on, too
QUICK_WINDOWS = 128  # windows in a validation along the way: 16,384 tokens at a context of 128


def read_text(path):
    """The bytes of a UTF-8 text file, checked."""
    path = Path(path)
    try:
        text = path.read_bytes()
        text.decode("utf-8")
    except OSError as error:
        raise UserError(f"expected a readable text file, but {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"expected UTF-8 text, but byte {error.start} of {path} is not: "
            "convert the file, for example with iconv -f latin1 -t utf-8"
        ) from None
    return text


def digest(text):
    """The first 16 hex digits of a text's sha256: runs with the same digest read the same data."""
    return hashlib.sha256(text).hexdigest()[:16]


def split(text):
    """Cut bytes by position into (training, held-out), between two characters."""
    cut = int(len(text) * TRAIN_SHARE)
    while cut < len(text) and text[cut] & 0xC0 == 0x80:  # 10xxxxxx: inside a UTF-8 character
        cut += 1
    return text[:cut], text[cut:]


# %% book/06c-batches.md:73
class Batches:
    """Batches that are a function of (seed, step) alone, so that a run can be resumed exactly.

    The tokens are cut into windows of `context`, which are visited in a new random order in every
    pass over the text, from a new random offset. A window's targets reach n_predict tokens beyond.
    """

    def __init__(self, tokens, batch_size, context, n_predict, seed):
        self.tokens = np.asarray(tokens, np.int32)
        self.batch_size, self.context = batch_size, context
        self.n_predict, self.seed = n_predict, seed
        self.windows = (len(self.tokens) - context - n_predict + 1) // context
        if self.windows < 1:
            raise UserError(
                f"expected at least {2 * context + n_predict - 1} training tokens for a context of "
                f"{context}, got {len(self.tokens)}: give a longer text or a smaller context"
            )
        self._pass, self._starts = None, None

    def _start(self, index):
        """The first token of window `index`, counted from the beginning of the run."""
        number, at = divmod(index, self.windows)
        if number != self._pass:
            rng = np.random.default_rng((self.seed, number))
            offset = rng.integers(self.context)
            self._pass, self._starts = number, offset + self.context * rng.permutation(self.windows)
        return self._starts[at]

    def batch(self, step):
        """tokens (B, T) and targets (B, T, K), int32, of step 1, 2, ...: targets[b, t, k] is the
        token 1 + k places after tokens[b, t]."""
        first = (step - 1) * self.batch_size
        starts = np.array([self._start(first + b) for b in range(self.batch_size)])
        at = starts[:, None] + np.arange(self.context)
        ahead = 1 + np.arange(self.n_predict)
        return self.tokens[at], self.tokens[at[:, :, None] + ahead]


# %% book/06c-batches.md:143
def entropies(tokens, vocab_size):
    """Bits per token of two models that see no context: {"uniform": ..., "unigram": ...}."""
    counts = np.bincount(tokens)
    share = counts[counts > 0] / len(tokens)
    return {"uniform": math.log2(vocab_size), "unigram": float(-np.sum(share * np.log2(share)))}


# %% book/06c-batches.md:154
class HeldOut:
    """The held-out text in windows of `context`, every token but the first predicted once.

    tokens (N,) are its ids; `tokenizer` turns them back into the bytes that are counted. Only the
    next token (head 0) is judged. `bytes_per_token` and `landmarks` (bits per byte) describe it.
    """

    def __init__(self, tokens, tokenizer, batch_size, context, n_predict):
        if len(tokens) < 2:
            raise UserError(f"expected 2 held-out tokens, got {len(tokens)}: give a longer text")
        rows = -(-(len(tokens) - 1) // context)
        padded = np.full(rows * context + 1, IGNORE, np.int32)
        padded[: len(tokens)] = tokens
        self.targets = padded[1:].reshape(rows, context)
        self.inputs = np.maximum(padded[:-1], 0).reshape(rows, context)  # padding: any token
        self.batch_size, self.n_predict, self.tokenizer = batch_size, n_predict, tokenizer
        self._describe()

    def _describe(self):
        """Set `bytes_per_token` and `landmarks` from the targets that count."""
        counted = self.targets[self.targets != IGNORE]
        self.bytes_per_token = self._bytes(counted) / len(counted)
        bits = entropies(counted, self.tokenizer.vocab_size)
        self.landmarks = {name: value / self.bytes_per_token for name, value in bits.items()}

    def _bytes(self, targets):
        return len(self.tokenizer.decode(targets[targets != IGNORE]))

    def batches(self, rows):
        """Yield tokens (B, T), targets (B, T, K) of the windows `rows`; the last is filled up."""
        shape = self.batch_size, self.inputs.shape[1]
        for at in range(0, len(rows), self.batch_size):
            part = rows[at : at + self.batch_size]
            tokens = np.zeros(shape, np.int32)
            targets = np.full((*shape, self.n_predict), IGNORE, np.int32)
            tokens[: len(part)], targets[: len(part), :, 0] = self.inputs[part], self.targets[part]
            yield tokens, targets

    def bits_per_byte(self, loss, quick=False):
        """Equation eq-train-bits; `loss(tokens, targets)` gives the sums (K,) in nats.

        `quick` judges at most QUICK_WINDOWS windows, evenly spread over the text.
        """
        rows = np.arange(len(self.inputs))
        if quick and len(rows) > QUICK_WINDOWS:
            rows = np.linspace(0, len(rows) - 1, QUICK_WINDOWS).astype(int)
        nats = sum(float(loss(tokens, targets)[0]) for tokens, targets in self.batches(rows))
        return nats / math.log(2) / self._bytes(self.targets[rows])


__all__ = [
    "TRAIN_SHARE",
    "QUICK_WINDOWS",
    "read_text",
    "digest",
    "split",
    "Batches",
    "entropies",
    "HeldOut",
]
