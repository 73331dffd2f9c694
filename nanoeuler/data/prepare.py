# Made from book/06c-batches.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-batches-split
"""From documents to a prepared folder: a split by document, a tokenizer, shards, prepared.json.

Leaves out where documents come from (`documents`) and how the folder is read (`data.Prepared`).
"""

import hashlib
import json
import re
from array import array
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from nanoeuler import __version__
from nanoeuler.data.batches import checked_text, digest, held_out_bytes, split_at, text_chunks
from nanoeuler.data.shards import END_OF_TEXT, SIDES, ShardWriter
from nanoeuler.errors import UserError
from nanoeuler.files import replacing
from nanoeuler.tokenizer.tokenizer import Tokenizer, utf8
from nanoeuler.tokenizer.words import whole_words


def hold_out(hashes, sizes):
    """Which documents to keep, and which of them to hold out: two arrays of bools (n,).

    hashes (n,) and sizes (n,) in bytes, of all documents. Of equal hashes the first is kept; the
    lowest are held out until they have `held_out_bytes`: at least one of them, and never all.
    """
    order = np.unique(hashes, return_index=True)[1]  # sorted by hash; of equal ones the first
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
    """The first 8 bytes of a text's sha256: among ten million, a clash in 3 of a million cases."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


class _Documents:
    """What `documents()` gives, gone through several times; keeps 10 bytes for each document."""

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

    def again(self, stage):
        """Yield (bytes, whether held out) of the documents to keep."""
        left = zip(self._hashes, self._keep, self._held_out, strict=True)
        for text in self._texts(stage):
            known, keep, held_out = next(left, (None, False, False))
            if _hash(text) != known:
                break
            if keep:
                yield text, held_out
        else:
            if next(left, None) is None:
                return
        raise UserError(
            f"{stage}: expected the documents that were there at first, but they have changed: "
            "prepare them again when nothing else writes to them"
        )


# A file of a prepared folder, or what was to become one when the program was killed.
_OURS = re.compile(r"\.?((prepared|tokenizer)\.json|(train|held-out)-\d+\.safetensors)(.*\.part)?")


def _clear(out):
    """Remove what an earlier or interrupted preparation left in `out`; prepared.json goes first."""
    (out / "prepared.json").unlink(missing_ok=True)
    for path in out.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()


@contextmanager
def _folder(out):
    """Yield the folder `out`; on an error clear it, unless what was prepared before is whole."""
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in out.iterdir():
            if not _OURS.fullmatch(path.name) and not path.name.startswith("."):
                raise UserError(
                    f"expected {out} to be empty or prepared before, but it holds {path.name}: "
                    "choose another folder"
                )
        try:
            yield out
        except BaseException:
            if not (out / "prepared.json").exists():
                _clear(out)
            raise
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"expected to read the documents and write {out}, but {error}: make room, choose "
            "another folder or mend what cannot be read, and prepare again"
        ) from None


def _commit(out, tokenizer, writers, about):
    """Write the last shards and then, last of all, prepared.json, without which nothing opens."""
    sides = {side: writer.close() for side, writer in zip(SIDES, writers, strict=True)}
    record = {"nanoeuler": __version__, **about, "tokenizer": tokenizer.hash, **sides}
    with replacing(out / "prepared.json") as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def prepare(documents, out, *, vocab_size, source, tokenizer=None, report=None):
    """Prepare documents for training: the folder `out`, which `data.Prepared` opens.

    documents() gives a fresh iterator of texts (str or bytes), the same each time; it is called
    twice, or three times if the tokenizer is to be learned. vocab_size is that of the tokenizer
    learned from the training documents, if `tokenizer` is None. source: what prepared.json says of
    their origin. report(stage, documents, bytes) is called after each document.
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
        _clear(out)
        tokenizer.save(out / "tokenizer.json")
        writers = [ShardWriter(out, side, tokenizer) for side in SIDES]
        for text, held_out in texts.again("encoding"):
            ids = tokenizer.encode(text)
            writers[int(held_out)].document(len(text), (ids, [tokenizer.special[END_OF_TEXT]]))
        about = {"source": source, "digest": texts.digest, "repeated": texts.repeated}
        _commit(out, tokenizer, writers, about)


def prepare_text(path, out, *, vocab_size, tokenizer=None):
    """Prepare one text file, as two documents: what `data.split` trains on and what it holds out.

    As `prepare`; the digest is the one that `data.digest` gives for the text.
    """
    path, whole, size = Path(path), hashlib.sha256(), 0
    for chunk in checked_text(path):
        whole.update(chunk)
        size += len(chunk)
    cut = split_at(np.memmap(path, np.uint8, "r")) if size else 0
    if not 0 < cut < size:
        raise UserError(f"expected a text with two parts, but {path} has {size} bytes: use more")
    with _folder(out) as out:
        if tokenizer is None:
            tokenizer = Tokenizer.train(whole_words(text_chunks(path, 0, cut)), vocab_size)
        _clear(out)
        tokenizer.save(out / "tokenizer.json")
        writers = [ShardWriter(out, side, tokenizer) for side in SIDES]
        for writer, first, last in zip(writers, (0, cut), (cut, size), strict=True):
            writer.document(last - first, tokenizer.encode_stream(text_chunks(path, first, last)))
        _commit(out, tokenizer, writers, {"source": path.name, "digest": whole.hexdigest()[:16]})
