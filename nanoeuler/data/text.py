# Made from book/d-batches.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-data
"""One text as bytes: reads it in chunks, checks it, computes its digest, splits it by position.

Leaves out documents (`documents`), which are never cut, and tokens.
"""

import codecs
import hashlib
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from nanoeuler.errors import UserError
from nanoeuler.files import check_regular

TRAIN_SHARE = 0.9  # of the bytes, as in nanoGPT
HELD_OUT_BYTES = 10_000_000  # at most: some 2.5 million tokens, whose mean loss is known to 0.1 %


def held_out_bytes(total: int) -> int:
    """The number of bytes to hold out of a text of `total` bytes."""
    return min(total - int(total * TRAIN_SHARE), HELD_OUT_BYTES)


def begins(text: bytes) -> int:
    """The index of the first complete UTF-8 character in `text`, a piece of a longer text."""
    at = 0
    while at < len(text) and text[at] & 0xC0 == 0x80:  # 10xxxxxx: inside a character
        at += 1
    return at


def split(text: bytes) -> tuple[bytes, bytes]:
    """Split bytes by position into (training, held-out), between two characters."""
    cut = len(text) - held_out_bytes(len(text))
    cut += begins(text[cut:])
    return text[:cut], text[cut:]


CHUNK = 1 << 20  # bytes of a text file to read at a time


def _read(path):
    """Yield the bytes of a file, a CHUNK at a time."""
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def unix_newlines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a text's `parts` with every line end turned into a single line feed."""
    held = b""  # a carriage return, until the next part says whether a line feed comes after it
    for part in parts:
        part = held + part
        held = part[-1:] if part.endswith(b"\r") else b""
        yield part[: len(part) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if held:
        yield b"\n"


def chunks(path: str | Path, start: int = 0, stop: float = math.inf) -> Iterator[bytes]:
    """Yield bytes `start` to `stop` of a text file, counted after `unix_newlines`."""
    at = 0
    for chunk in unix_newlines(_read(path)):
        yield chunk[max(0, start - at) : int(min(len(chunk), max(0, stop - at)))]
        at += len(chunk)
        if at >= stop:
            return


def split_parts(parts: Iterator[bytes], cut: int) -> tuple[Iterator[bytes], Iterator[bytes]]:
    """A text's `parts` before byte `cut`, and those after it; read the first before the second."""
    rest = []

    def before() -> Iterator[bytes]:
        left = cut
        for part in parts:
            yield part[:left]
            if len(part) >= left:
                rest.append(part[left:])
                return
            left -= len(part)

    def after() -> Iterator[bytes]:
        yield from rest
        yield from parts

    return before(), after()


def _checked(path):
    """Yield the bytes of a text file in chunks; UserError if it isn't readable UTF-8."""
    decoder, before = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        check_regular(path)
        for chunk in _read(path):
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
    """All bytes of a UTF-8 text file, checked, after `unix_newlines`; only for small texts."""
    parts = list(_checked(path))
    say_line_ends(path, sum(part.count(b"\r") for part in parts))
    return b"".join(unix_newlines(parts))


def say_line_ends(path: str | Path, ends: int) -> None:
    """Say on stderr that line ends were normalized, if there were any."""
    if ends:
        print(f"{path}: line ends normalized: {ends:,}", file=sys.stderr)


_DIGITS = 16  # of a digest: 64 bits, enough because nobody gains by making two texts collide


def digest(text: bytes) -> str:
    """The first 16 hex digits of a text's sha256: runs with the same digest read the same data."""
    return hashlib.sha256(text).hexdigest()[:_DIGITS]


class Scanned(NamedTuple):
    """Facts about a text file after `unix_newlines`."""

    digest: str
    size: int  # bytes
    line_ends: int  # the number of carriage returns that were normalized


def scanned(path: str | Path) -> Scanned:
    """Read a text file once, a CHUNK at a time. UserError if it isn't readable UTF-8."""
    whole, size, ends = hashlib.sha256(), 0, 0

    def raw():
        nonlocal ends
        for chunk in _checked(path):
            ends += chunk.count(b"\r")
            yield chunk

    for chunk in unix_newlines(raw()):
        whole.update(chunk)
        size += len(chunk)
    return Scanned(whole.hexdigest()[:_DIGITS], size, ends)
