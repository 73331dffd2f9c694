# Made from book/d-batches.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-batches-split
"""From documents to a prepared folder: a split by document, a tokenizer, shards, prepared.json.

Leaves out where documents come from (`documents`) and how the folder is read (`dataset`).
"""

import hashlib
import json
import os
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from nanoeuler import __version__
from nanoeuler.data.dataset import read_record
from nanoeuler.data.shards import END_OF_TEXT, SIDES, ShardWriter
from nanoeuler.data.text import (
    Scanned,
    begins,
    chunks,
    digest,
    held_out_bytes,
    say_line_ends,
    scanned,
    split_parts,
)
from nanoeuler.errors import UserError, quoted
from nanoeuler.files import replacing
from nanoeuler.measurements import cores
from nanoeuler.tokenizer.pretokenizer import whole_words
from nanoeuler.tokenizer.tokenizer import Tokenizer, utf8


def hold_out(hashes: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which documents to keep, and which of them to hold out: two arrays of bools (n,).

    hashes (n,) and sizes (n,) in bytes, of all documents. Of equal hashes the first is kept. The
    lowest are held out until they have `held_out_bytes`: at least one document, and never all.
    """
    order = np.unique(hashes, return_index=True)[1]  # sorted by hash; the first of equal ones
    if len(order) < 2:
        raise UserError(
            f"expected at least 2 different documents, but got {len(order)}: one is needed to "
            "train on and one to hold out; prepare a single text as a text file"
        )
    upto = np.cumsum(sizes[order])
    enough = 1 + np.searchsorted(upto, held_out_bytes(int(upto[-1])))
    keep, held_out = np.zeros((2, len(hashes)), bool)
    keep[order], held_out[order[: min(enough, len(order) - 1)]] = True, True
    return keep, held_out


# %% sec-batches-prepare
def _hash(text):
    """The first 8 bytes of a text's sha256; ten million texts collide with probability 3e-6."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


class _Documents:
    """The documents that `documents()` yields, for several passes; keeps 10 bytes for each."""

    def __init__(self, documents, report):
        self._documents, self._report = documents, report or (lambda stage, documents, size: None)
        hashes, sizes = array("Q"), array("Q")
        for text in self._texts("reading"):
            hashes.append(_hash(text))
            sizes.append(len(text))
        self._hashes = np.array(hashes, np.uint64)
        self._keep, self._held_out = hold_out(self._hashes, np.array(sizes, np.int64))
        self.repeated = int(np.sum(~self._keep))
        self.digest = digest(self._hashes[self._keep].astype(">u8").tobytes())

    def _texts(self, stage):
        """Yield the bytes of each document that has any."""
        size = 0
        for i, text in enumerate(filter(None, map(utf8, self._documents())), start=1):
            yield text
            size += len(text)
            self._report(stage, i, size)

    def again(self, stage: str) -> Iterator[tuple[bytes, bool]]:
        """Yield (bytes, whether held out) of the documents to keep."""
        left = zip(self._hashes, self._keep, self._held_out, strict=True)
        for text in self._texts(stage):
            before, keep, held_out = next(left, (None, False, False))
            if _hash(text) != before:
                break
            if keep:
                yield text, held_out
        else:
            if next(left, None) is None:
                return
        raise UserError(
            f"{stage}: expected the same documents in every pass, but they have changed: "
            "prepare them again when nothing else writes to them"
        )


# A file in a folder that is being prepared: the hashes of its tokenizers, a line each.
_UNFINISHED = "unfinished.txt"
# A file of a preparation, or a part of one that is left if the program was killed.
_OURS = re.compile(
    r"\.?((prepared|tokenizer)\.json|(train|held-out)-\d+\.safetensors|unfinished\.txt)(.*\.part)?"
)


def _tokenizers(out):
    """The hashes of the tokenizers that preparations wrote, or were going to write, in `out`."""
    hashes, unfinished = set(), out / _UNFINISHED
    if unfinished.exists():
        hashes.update(unfinished.read_text(encoding="utf-8").split())
    if (out / "prepared.json").exists():
        hashes.add(read_record(out)["tokenizer"])
    return hashes


def _check(out):
    """Raise UserError unless every file in the folder `out` belongs to a preparation."""
    names = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    hashes = _tokenizers(out)
    for name in names:
        whose = Tokenizer.load(out / name).hash if name == "tokenizer.json" else None
        if not _OURS.fullmatch(name) or not hashes or (whose and whose not in hashes):
            raise UserError(
                f"expected {out} to be empty or prepared before, but it holds {name}, which no "
                "preparation has left there: choose another folder"
            )


def _clear(out):
    """Remove the files of preparations from `out`, prepared.json first; keep unfinished.txt."""
    (out / "prepared.json").unlink(missing_ok=True)
    for path in out.iterdir():
        if _OURS.fullmatch(path.name) and path.name != _UNFINISHED:
            path.unlink()


def _begin(out, tokenizer):
    """Make room in `out` for a new preparation, and write its tokenizer there."""
    hashes = _tokenizers(out) | {tokenizer.hash}
    with replacing(out / _UNFINISHED) as temporary:
        temporary.write_text("\n".join(sorted(hashes)) + "\n", encoding="utf-8")
    _clear(out)
    tokenizer.save(out / "tokenizer.json")


@contextmanager
def _folder(out):
    """Yield the folder `out`; on an error clear it, unless the old preparation is complete."""
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        _check(out)
        try:
            yield out
        except BaseException:
            if not (out / "prepared.json").exists():
                _clear(out)
            (out / _UNFINISHED).unlink(missing_ok=True)
            raise
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"expected to read the documents and write {out}, but {error}: make room, choose "
            "another folder or repair the unreadable file, and prepare again"
        ) from None


def _commit(out, tokenizer, writers, source, **about):
    """Write the last shards and finally prepared.json, without which nothing opens."""
    sides = {side: writer.close() for side, writer in zip(SIDES, writers, strict=True)}
    record = {"nanoeuler": __version__, "source": quoted(source), **about,
              "tokenizer": tokenizer.hash, **sides}  # fmt: skip
    with replacing(out / "prepared.json") as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (out / _UNFINISHED).unlink()


def in_order(function: Callable, items: Iterable, threads: int) -> Iterator:
    """Yield function(item) for each of `items`, in their order, computed by `threads` threads."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * threads + 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def prepare(documents: Callable[[], Iterable], out: str | Path, *, vocab_size: int, source: str,
            tokenizer: Tokenizer | None = None,
            report: Callable | None = None) -> None:  # fmt: skip
    """Prepare documents for training: write the folder `out`, which `Prepared` opens.

    documents() returns a fresh iterator of texts (str or bytes), the same each time; it is called
    twice, or three times if `tokenizer` is None. Then a tokenizer with `vocab_size` ids learns
    from the training documents. source: their origin, for prepared.json. report(stage, documents,
    bytes) is called after each document. UserError for a bad text or setting, or if the folder
    holds anything but a preparation; then nothing in it is changed.
    """
    with _folder(out) as out:
        texts = _Documents(documents, report)
        if tokenizer is None:
            training = (text for text, held_out in texts.again("learning") if not held_out)
            tokenizer = Tokenizer.train(training, vocab_size)
        if END_OF_TEXT not in tokenizer.special:
            raise UserError(
                f"expected a tokenizer with the special token {END_OF_TEXT}, but this one has "
                "none: use one that nanoeuler has trained"
            )
        _begin(out, tokenizer)
        writers = [ShardWriter(out, side, tokenizer) for side in SIDES]
        encoded = in_order(lambda pair: (*pair, tokenizer.encode(pair[0])),
                           texts.again("encoding"), cores())  # fmt: skip
        with closing(encoded):
            for text, held_out, ids in encoded:
                writers[int(held_out)].document(len(text), (ids, [tokenizer.special[END_OF_TEXT]]))
        _commit(out, tokenizer, writers, source, digest=texts.digest, repeated=texts.repeated)


def prepare_text(path: str | Path, out: str | Path, *, vocab_size: int,
                 tokenizer: Tokenizer | None = None,
                 known: Scanned | None = None) -> None:  # fmt: skip
    """Prepare one text file as two documents, the two parts of `text.split`.

    Like `prepare`, but with the digest of `text.digest`. known: the result of `scanned`, if there
    is one. After it, the text is read to learn and to encode; with carriage returns, once more.
    """
    path = Path(path)
    identity, size, line_ends = known or scanned(path)
    cut = size - held_out_bytes(size)
    with open(path, "rb") as file:
        file.seek(cut)
        there = file.read(4)  # a character has four bytes at most
    cut += begins(b"".join(chunks(path, cut, cut + 4)) if line_ends else there)
    if not 0 < cut < size:
        raise UserError(f"expected a text that has two parts, but {path} has {size} bytes: use a "
                        "longer one")  # fmt: skip
    if os.path.dirname(os.path.realpath(path)) == os.path.realpath(out):
        raise UserError(f"expected {path} to lie outside of {out}, whose files are replaced: "
                        "choose another folder")  # fmt: skip
    say_line_ends(path, line_ends)
    with _folder(out) as out:
        if tokenizer is None:
            tokenizer = Tokenizer.train(whole_words(chunks(path, 0, cut)), vocab_size)
        _begin(out, tokenizer)
        writers = [ShardWriter(out, side, tokenizer) for side in SIDES]
        sides = zip(writers, (cut, size - cut), split_parts(chunks(path), cut), strict=True)
        for writer, length, parts in sides:
            writer.document(length, tokenizer.encode_stream(parts))
        _commit(out, tokenizer, writers, path.name, digest=identity)
