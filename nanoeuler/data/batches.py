# Made from book/06c-batches.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-data
"""From a text or a prepared folder to batches: windows, targets of K heads, bits per byte.

Leaves out how a folder is prepared (`prepare`). B batch, T positions (the context), K predicted
tokens.
"""

import codecs
import hashlib
import math
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from nanoeuler.data.shards import SIDES, Tokens, read_record, shard_path
from nanoeuler.data.shuffle import ROUNDS, shuffled
from nanoeuler.errors import UserError
from nanoeuler.files import sha256_of
from nanoeuler.model.backward import IGNORE
from nanoeuler.tokenizer.tokenizer import Tokenizer

TRAIN_SHARE = 0.9  # of the bytes; the share that nanoGPT trains on, too
HELD_OUT_BYTES = 10_000_000  # at most: some 2.5 million tokens, whose mean loss is known to 0.1 %
QUICK_WINDOWS = 128  # windows in a validation along the way: 16,384 tokens at a context of 128


def held_out_bytes(total):
    """How many of a text's `total` bytes are held out."""
    return min(total - int(total * TRAIN_SHARE), HELD_OUT_BYTES)


def split_at(text):
    """Where held-out bytes begin in `text` (bytes or a uint8 array): between two characters."""
    cut = len(text) - held_out_bytes(len(text))
    while cut < len(text) and text[cut] & 0xC0 == 0x80:  # 10xxxxxx: inside a UTF-8 character
        cut += 1
    return cut


def split(text):
    """Cut bytes by position into (training, held-out), between two characters."""
    cut = split_at(text)
    return text[:cut], text[cut:]


CHUNK = 1 << 20  # bytes of a text file that are read at a time


def text_chunks(path, start=0, stop=math.inf):
    """Yield the bytes of a file from `start` to `stop`, a CHUNK at a time."""
    with open(path, "rb") as file:
        file.seek(start)
        while chunk := file.read(min(CHUNK, stop - file.tell())):
            yield chunk


def checked_text(path):
    """Yield the bytes of a text file in chunks; UserError for what is no readable UTF-8."""
    decoder, before = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        for chunk in text_chunks(path):
            held = len(decoder.getstate()[0])  # the first bytes of a character, from the last chunk
            decoder.decode(chunk)
            yield chunk
            before += len(chunk)
        held = len(decoder.getstate()[0])
        decoder.decode(b"", final=True)
    except OSError as error:
        raise UserError(f"expected a readable text file, but {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"expected UTF-8 text, but byte {before - held + error.start} of {path} is not: "
            "convert the file, for example with iconv -f latin1 -t utf-8"
        ) from None


def read_text(path):
    """The bytes of a UTF-8 text file, checked."""
    return b"".join(checked_text(path))


def digest(text):
    """The first 16 hex digits of a text's sha256: runs with the same digest read the same data."""
    return hashlib.sha256(text).hexdigest()[:16]


# %% sec-batches-opening
VERIFY_BYTES = 1 << 28  # of shards, whose sha256 takes a fifth of a second to a second


class Prepared:
    """A prepared folder, checked and open: `tokenizer`, `train` and `held_out` (Tokens), `digest`.

    Opening checks each shard's header, types and tokenizer, compares the counts of each side with
    prepared.json, and the sha256 of up to VERIFY_BYTES of shards; `verify` compares that of all.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.record = read_record(self.folder)
        self.digest = self.record["digest"]
        self.tokenizer = Tokenizer.load(self.folder / "tokenizer.json")
        if self.tokenizer.hash != self.record["tokenizer"]:
            raise UserError(f"expected the tokenizer {self.record['tokenizer']:.16} in {folder}, "
                            f"but it is {self.tokenizer.hash:.16}: prepare it again")  # fmt: skip
        self.train, self.held_out = (self._open(side) for side in SIDES)
        paths = self.train.paths + self.held_out.paths
        if sum(path.stat().st_size for path in paths) <= VERIFY_BYTES:
            self.verify()

    @property
    def vocab_size(self):
        """The number of ids of the tokenizer."""
        return self.tokenizer.vocab_size

    def _open(self, side):
        """The Tokens of a side, their counts compared with prepared.json."""
        expected = self.record[side]
        numbers = range(len(expected["shards"]))
        tokens = Tokens([shard_path(self.folder, side, i) for i in numbers], self.tokenizer)
        for name, found in (("tokens", len(tokens)), ("documents", tokens.n_documents)):
            if found != expected[name]:
                raise UserError(f"expected {expected[name]} {name} in {self.folder / side}-*"
                                f".safetensors, found {found}: prepare it again")  # fmt: skip
        return tokens

    def verify(self):
        """Compare the sha256 of every shard with prepared.json; a UserError names what differs."""
        for side, tokens in zip(SIDES, (self.train, self.held_out), strict=True):
            for path, shard in zip(tokens.paths, self.record[side]["shards"], strict=True):
                if sha256_of(path) != shard["sha256"]:
                    raise UserError(f"expected {path} as it was prepared, but its sha256 is "
                                    "another: prepare it again")  # fmt: skip


# %% sec-batches-shuffle
def _windows(tokens, starts, length):
    """Ids (n, length) int32 from each of `starts` of Tokens or a row of ids."""
    if isinstance(tokens, Tokens):
        return tokens.window(starts, length)
    return np.asarray(tokens)[starts[:, None] + np.arange(length)].astype(np.int32)


class Batches:
    """Batches that are a function of (seed, step) alone, so that a run can be resumed exactly.

    The tokens (a row, or `shards.Tokens`) are cut into windows of `context`, which are visited in a
    new random order in every pass, from a new random offset. A window's targets reach n_predict
    tokens beyond.
    """

    def __init__(self, tokens, batch_size, context, n_predict, seed):
        self.tokens, self.batch_size, self.context = tokens, batch_size, context
        self.n_predict, self.seed = n_predict, seed
        self.windows = (len(tokens) - context - n_predict + 1) // context
        if self.windows < 1:
            raise UserError(
                f"expected at least {2 * context + n_predict - 1} training tokens for a context of "
                f"{context}, got {len(tokens)}: give a longer text or a smaller context"
            )

    def starts(self, step):
        """Where the windows of step 1, 2, ... begin, int64 (B,)."""
        index = (step - 1) * self.batch_size + np.arange(self.batch_size)
        passes, places = np.divmod(index, self.windows)
        found = np.empty_like(index)
        for number in np.unique(passes):
            rng, here = np.random.default_rng((self.seed, number)), passes == number
            offset = rng.integers(self.context)
            keys = rng.integers(1 << 64, size=ROUNDS, dtype=np.uint64)
            found[here] = offset + self.context * shuffled(places[here], self.windows, keys)
        return found

    def batch(self, step):
        """tokens (B, T) and targets (B, T, K), int32, of step 1, 2, ...: targets[b, t, k] is the
        token 1 + k places after tokens[b, t]."""
        rows = _windows(self.tokens, self.starts(step), self.context + self.n_predict)
        targets = sliding_window_view(rows[:, 1:], self.n_predict, axis=1)
        return rows[:, : self.context].copy(), targets.copy()


# %% sec-batches-ahead
class Ahead:
    """The batches of `batches`, each prepared by a thread while the caller works on the one before.

    A thread lives for one batch, and none keeps the program from ending. An error of a batch is
    raised when that batch is asked for.
    """

    def __init__(self, batches):
        self.batches = batches
        self._step, self._ready = None, None

    def batch(self, step):
        """What `batches.batch(step)` gives; then step + 1 is begun."""
        known = self._step == step
        self._step, ready = None, self._ready
        found = ready.result() if known else self.batches.batch(step)
        ready = Future()
        threading.Thread(target=self._prepare, args=(step + 1, ready), daemon=True).start()
        self._step, self._ready = step + 1, ready  # not before: a thread may fail to start
        return found

    def _prepare(self, step, ready):
        try:
            ready.set_result(self.batches.batch(step))
        except BaseException as error:  # whatever it is belongs to the thread that asks
            ready.set_exception(error)


# %% sec-train-bits
def entropies(tokens, vocab_size):
    """Bits per token of two models that see no context: {"uniform": ..., "unigram": ...}."""
    counts = np.bincount(tokens)
    share = counts[counts > 0] / len(tokens)
    return {"uniform": math.log2(vocab_size), "unigram": float(-np.sum(share * np.log2(share)))}


class HeldOut:
    """The held-out text in windows of `context`, every token but the first predicted once.

    tokens (N,), a row or `shards.Tokens`, are its ids; `tokenizer` turns them back into the bytes
    that are counted. Only the next token (head 0) is judged, and special tokens, which spell no
    byte, are not. `bytes_per_token` and `landmarks` (bits per byte) describe it.
    """

    def __init__(self, tokens, tokenizer, batch_size, context, n_predict):
        rows = -(-(len(tokens) - 1) // context)
        padded = np.full(rows * context + 1, IGNORE, np.int32)
        padded[: len(tokens)] = _windows(tokens, np.zeros(1, np.int64), len(tokens))[0]
        targets = np.where(np.isin(padded, [*tokenizer.special.values()]), IGNORE, padded)
        self.targets = targets[1:].reshape(rows, context)
        self.inputs = np.maximum(padded[:-1], 0).reshape(rows, context)  # padding: any token
        self.batch_size, self.n_predict, self.tokenizer = batch_size, n_predict, tokenizer
        self._describe()

    def _describe(self):
        """Set `bytes_per_token` and `landmarks` from the targets that count."""
        counted = self.targets[self.targets != IGNORE]
        if not len(counted):
            raise UserError("expected held-out tokens to judge, got none: give a longer text")
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
