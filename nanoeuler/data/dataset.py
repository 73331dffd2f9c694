# Made from book/d-batches.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-batches-opening
"""Opens a prepared folder: its tokenizer, its two sides, and the record in prepared.json.

Leaves out how it is made (`prepare`) and how it is read in batches (`batches`).
"""

import json
import re
from pathlib import Path

from nanoeuler.data.shards import SIDES, Tokens, shard_path
from nanoeuler.errors import UserError, quoted
from nanoeuler.files import sha256_of
from nanoeuler.tokenizer.tokenizer import Tokenizer


def read_record(folder: Path) -> dict:
    """prepared.json of `folder`: a dict whose source, counts and hashes have the right types."""
    path = folder / "prepared.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        hashes, counts = [record["digest"], record["tokenizer"]], []
        for side in SIDES:
            counts += [record[side][name] for name in ("documents", "tokens", "bytes")]
            for shard in record[side]["shards"]:
                hashes.append(shard["sha256"])
                counts += [shard["tokens"], shard["bytes"]]
        if not all(type(count) is int and count > 0 for count in counts):
            raise ValueError("a count is not a whole number above 0")
        if not all(type(name) is str and re.fullmatch("[0-9a-f]+", name) for name in hashes):
            raise ValueError("a digest is not a text of hexadecimal digits")
        if type(record["source"]) is not str or not record["source"].isprintable():
            raise ValueError("the source is not a line of printable text")
    except FileNotFoundError:
        raise UserError(
            f"expected a prepared folder, but {folder} has no prepared.json: prepare the data "
            "first, or again if that was interrupted"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"expected {path} as preparing writes it, but {type(error).__name__}: {quoted(error)}: "
            "move it away and prepare again"
        ) from None
    return record


VERIFY_BYTES = 1 << 28  # of shards; their sha256 takes a fifth of a second to a second


def _open(folder, record, side, tokenizer):
    """The Tokens of a side, their counts compared with the record."""
    paths = [shard_path(folder, side, i) for i in range(len(record[side]["shards"]))]
    tokens = Tokens(paths, tokenizer)
    for name, count in (("tokens", len(tokens)), ("documents", tokens.n_documents)):
        if count != record[side][name]:
            raise UserError(f"expected {record[side][name]} {name} in {folder / side}-*"
                            f".safetensors, got {count}: prepare it again")  # fmt: skip
    return tokens


class Prepared:
    """A prepared folder, checked and open: `tokenizer`, `train` and `held_out` (Tokens), `digest`.

    Opening checks each shard's header, types and tokenizer, and compares the counts of each side
    with prepared.json. It compares the sha256 of shards of up to VERIFY_BYTES in all; `verify`
    always does.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.record = read_record(self.folder)
        self.digest = self.record["digest"]
        known = self.record["tokenizer"]
        self.tokenizer = Tokenizer.load(self.folder / "tokenizer.json", known=known)
        if self.tokenizer.hash != known:
            raise UserError(f"expected the tokenizer {known:.16} in {folder}, "
                            f"but it is {self.tokenizer.hash:.16}: prepare it again")  # fmt: skip
        self.train, self.held_out = (
            _open(self.folder, self.record, side, self.tokenizer) for side in SIDES
        )
        paths = self.train.paths + self.held_out.paths
        if sum(path.stat().st_size for path in paths) <= VERIFY_BYTES:
            self.verify()

    @property
    def vocab_size(self) -> int:
        """The number of ids of the tokenizer."""
        return self.tokenizer.vocab_size

    def verify(self) -> None:
        """Compare the sha256 of every shard with prepared.json; UserError if one differs."""
        for side, tokens in zip(SIDES, (self.train, self.held_out), strict=True):
            for path, shard in zip(tokens.paths, self.record[side]["shards"], strict=True):
                if sha256_of(path) != shard["sha256"]:
                    raise UserError(f"expected {path} as it was prepared, but its sha256 is "
                                    "another: prepare it again")  # fmt: skip
