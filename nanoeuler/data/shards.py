# Made from book/d-batches.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-batches-shards
"""Token shards: the tokens of a text in files that are mapped into memory, not read into it.

Leaves out compression, and the text itself, which a tokenizer can restore. A shard is a safetensors
file: `tokens` (N,) U16 or U32, and `documents` (D,) I64, the indices where documents begin.
"""

import json
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from nanoeuler.errors import UserError, quoted
from nanoeuler.files import replacing, sha256_of
from nanoeuler.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer

END_OF_TEXT = SPECIAL_TOKENS[0]  # ends a document


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type, two bytes or four, that holds ids below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_shard(path: Path, tokens: Sequence, documents: Sequence, tokenizer: Tokenizer) -> None:
    """Write tokens (N,) and the documents' first indices (D,) to the file `path`, atomically."""
    tensors = {
        "tokens": np.asarray(tokens, token_dtype(tokenizer.vocab_size)),
        "documents": np.asarray(documents, "<i8"),
    }
    with replacing(path) as temporary:
        save_file(tensors, temporary, {"tokenizer": tokenizer.hash})


_TYPES = {"U16": "<u2", "U32": "<u4", "I64": "<i8"}  # safetensors' names of the types and NumPy's


def _once(pairs):
    """The dict of a JSON object; ValueError if a name comes twice."""
    names = Counter(name for name, _ in pairs)
    if len(names) < len(pairs):
        raise ValueError(f"its header has {quoted(names.most_common(1)[0][0])} twice")
    return dict(pairs)


def header_of(path: Path) -> dict:
    """The header of a safetensors file that the library accepts; ValueError if a name comes twice.

    Of two tensors with one name, different readers take different ones.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size), object_pairs_hook=_once)


def _header(path, tokenizer):
    """Raise a UserError unless the header of `path` is that of a shard of `tokenizer`."""
    kind = "U16" if token_dtype(tokenizer.vocab_size) == _TYPES["U16"] else "U32"
    expected = {"documents": ("I64", 1), "tokens": (kind, 1)}  # type, number of axes
    try:
        with safe_open(path, framework="numpy") as file:  # an error if sizes don't add up
            parts = ((name, file.get_slice(name)) for name in file.keys())
            layout = {name: (part.get_dtype(), len(part.get_shape())) for name, part in parts}
            owner = (file.metadata() or {}).get("tokenizer")
        header_of(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(
            f"expected a whole shard, but {path}: {quoted(error)}: prepare it again"
        ) from None
    if layout != expected:
        raise UserError(f"expected a shard to have {expected}, but {path} has {quoted(layout)}: "
                        "prepare it again")  # fmt: skip
    if owner != tokenizer.hash:
        raise UserError(
            f"expected tokens of the tokenizer {tokenizer.hash:.16}, but {path} has those of "
            f"{quoted(owner or 'an unknown one')[:16]}: prepare it again"
        )


def _mapped(path):
    """(tokens, documents) of a shard with a good header: arrays whose bytes stay in the file."""
    raw = np.asarray(np.memmap(path, np.uint8, "r"))
    begin = 8 + int.from_bytes(raw[:8].tobytes(), "little")  # of the data, after the header
    header, arrays = header_of(path), []
    for name in ("tokens", "documents"):
        first, last = (begin + offset for offset in header[name]["data_offsets"])
        arrays.append(raw[first:last].view(_TYPES[header[name]["dtype"]]))
    return arrays


def open_shard(path: Path, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, documents) of the shard `path`, mapped. UserError if `tokenizer` didn't make it.

    Reads the header and the documents; ids are checked when they are used.
    """
    _header(path, tokenizer)
    tokens, documents = _mapped(path)
    bounds = np.concatenate([[-1], documents, [len(tokens)]])
    if len(tokens) == 0 or (np.diff(bounds) <= 0).any():
        raise UserError(
            f"expected documents that begin one after the other within {len(tokens)} tokens, but "
            f"those of {path} do not: prepare it again"
        )
    return tokens, documents


def _joined(paths, tokenizer):
    """(parts, firsts, counts): the arrays of each shard, tokens and documents before each."""
    parts, firsts, counts = [], [0], [0]
    for path in paths:
        tokens, documents = open_shard(path, tokenizer)
        if not parts and (len(documents) == 0 or documents[0] != 0):
            raise UserError(f"expected {path} to begin with a document: prepare it again")
        parts.append((tokens, documents))
        firsts.append(firsts[-1] + len(tokens))
        counts.append(counts[-1] + len(documents))
    return parts, firsts, counts


def _begin(i, counts, firsts, parts):
    """The index, among all tokens, where document i begins; after the last one, where it ends."""
    if i == counts[-1]:
        return firsts[-1]
    shard = bisect_right(counts, i) - 1
    return firsts[shard] + int(parts[shard][1][i - counts[shard]])


def _fill(row, start, firsts, parts):
    """Fill `row` with the tokens from number `start` on, from as many shards as needed."""
    shard, done = bisect_right(firsts, start) - 1, 0
    while done < len(row):
        at = start + done - firsts[shard]
        part = parts[shard][0][at : at + len(row) - done]
        row[done : done + len(part)] = part
        shard, done = shard + 1, done + len(part)


class Tokens:
    """The tokens of some shards as one sequence, which stays on the disk.

    `len` counts tokens, `n_documents` documents. A document may continue in the next shard.
    """

    def __init__(self, paths: Iterable[Path], tokenizer: Tokenizer) -> None:
        self.paths, self.vocab_size = list(paths), tokenizer.vocab_size
        self._end = tokenizer.special.get(END_OF_TEXT)
        self._parts, self._firsts, self._counts = _joined(self.paths, tokenizer)

    def __len__(self) -> int:
        return self._firsts[-1]

    @property
    def n_documents(self) -> int:
        """The number of documents that begin in these shards."""
        return self._counts[-1]

    def window(self, starts: Sequence, length: int) -> np.ndarray:
        """Ids (n, length) int32: `length` tokens from each of `starts` (n,), across shards."""
        ids = np.empty((len(starts), length), np.int32)
        for row, start in zip(ids, starts, strict=True):
            assert 0 <= start <= len(self) - length, (start, length, len(self))
            _fill(row, start, self._firsts, self._parts)
        largest = ids.view(np.uint32).max(initial=0)  # an id of four bytes could look negative
        if largest >= self.vocab_size:
            raise UserError(f"expected ids below {self.vocab_size}, but {self.paths[0].parent} "
                            f"holds {largest}: a shard is damaged; prepare it again")  # fmt: skip
        return ids

    def document(self, i: int) -> np.ndarray:
        """The ids, int32, of document i, without the token that ends it."""
        assert 0 <= i < self.n_documents, (i, self.n_documents)
        first, last = (_begin(j, self._counts, self._firsts, self._parts) for j in (i, i + 1))
        ids = self.window([first], last - first)[0]
        return ids[:-1] if ids[-1] == self._end else ids


def windows(tokens: Tokens | np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Ids (n, length) int32 from each of `starts` (n,) of Tokens, or of an array of ids (N,)."""
    if isinstance(tokens, Tokens):
        return tokens.window(starts, length)
    return np.asarray(tokens)[starts[:, None] + np.arange(length)].astype(np.int32)


SIDES = ("train", "held-out")  # of a prepared folder
SHARD_TOKENS = 1 << 25  # 64 MiB of two bytes; 10 billion tokens are 299 files


def shard_path(folder: Path, side: str, i: int) -> Path:
    """The path of shard i of a side of a prepared folder."""
    return folder / f"{side}-{i:05}.safetensors"


class ShardWriter:
    """Writes the shards of a side into a folder, holding one shard at a time."""

    def __init__(self, folder: Path, side: str, tokenizer: Tokenizer) -> None:
        self._place, self._tokenizer = (folder, side), tokenizer
        self._tokens = np.empty(SHARD_TOKENS, token_dtype(tokenizer.vocab_size))
        self._filled, self._documents = 0, array("q")
        self.shards, self.documents, self.bytes = [], 0, 0

    def document(self, size: int, parts: Iterable) -> None:
        """Add a document of `size` bytes, whose ids come in `parts`, an iterable of arrays."""
        self._documents.append(self._filled)
        self.documents, self.bytes = self.documents + 1, self.bytes + size
        for ids in parts:
            while len(ids):
                part = ids[: len(self._tokens) - self._filled]
                self._tokens[self._filled : self._filled + len(part)] = part
                self._filled, ids = self._filled + len(part), ids[len(part) :]
                if self._filled == len(self._tokens):
                    self._write()

    def _write(self):
        path = shard_path(*self._place, len(self.shards))
        write_shard(path, self._tokens[: self._filled], self._documents, self._tokenizer)
        self.shards.append({"tokens": self._filled, "bytes": path.stat().st_size,
                            "sha256": sha256_of(path)})  # fmt: skip
        self._filled, self._documents = 0, array("q")

    def close(self) -> dict:
        """Write the last shard; return the entry of this side in prepared.json."""
        if self._filled:
            self._write()
        tokens = sum(shard["tokens"] for shard in self.shards)
        return {"documents": self.documents, "bytes": self.bytes, "tokens": tokens,
                "shards": self.shards}  # fmt: skip
