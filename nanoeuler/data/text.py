# Made from book/d-batches.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-data
"""One text as bytes: read in chunks, checked, named by a digest, and cut by position in two.

Leaves out documents (`documents`), which are not cut, and tokens.
"""

import codecs
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nanoeuler.errors import UserError

TRAIN_SHARE = 0.9  # of the bytes; the share that nanoGPT trains on, too
HELD_OUT_BYTES = 10_000_000  # at most: some 2.5 million tokens, whose mean loss is known to 0.1 %


def held_out_bytes(total: int) -> int:
    """How many of a text's `total` bytes are held out."""
    return min(total - int(total * TRAIN_SHARE), HELD_OUT_BYTES)


def split_at(text: bytes | np.ndarray) -> int:
    """Where held-out bytes begin in `text` (bytes or a uint8 array): between two characters."""
    cut = len(text) - held_out_bytes(len(text))
    while cut < len(text) and text[cut] & 0xC0 == 0x80:  # 10xxxxxx: inside a UTF-8 character
        cut += 1
    return cut


def split(text: bytes) -> tuple[bytes, bytes]:
    """Cut bytes by position into (training, held-out), between two characters."""
    cut = split_at(text)
    return text[:cut], text[cut:]


CHUNK = 1 << 20  # bytes of a text file that are read at a time


def chunks(path: str | Path, start: int = 0, stop: float = math.inf) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` to `stop`, a CHUNK at a time."""
    with open(path, "rb") as file:
        file.seek(start)
        while chunk := file.read(min(CHUNK, stop - file.tell())):
            yield chunk


def checked_text(path: str | Path) -> Iterator[bytes]:
    """Yield the bytes of a text file in chunks; UserError for what is no readable UTF-8."""
    decoder, before = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        for chunk in chunks(path):
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


def read_text(path: str | Path) -> bytes:
    """The bytes of a UTF-8 text file, checked: all of them, so for small texts only."""
    return b"".join(checked_text(path))


_DIGITS = 16  # of a digest: 64 bits, and nobody has anything to gain from two texts with the same


def digest(text: bytes) -> str:
    """The first 16 hex digits of a text's sha256: runs with the same digest read the same data."""
    return hashlib.sha256(text).hexdigest()[:_DIGITS]


def digest_of(path: str | Path) -> str:
    """`digest` of a text file, a CHUNK in memory at a time. UserError: no readable UTF-8."""
    whole = hashlib.sha256()
    for chunk in checked_text(path):
        whole.update(chunk)
    return whole.hexdigest()[:_DIGITS]
