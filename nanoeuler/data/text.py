# Made from book/d-batches.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-data
"""One text as bytes: read in chunks, checked, named by a digest, and cut by position in two.

Leaves out documents (`documents`), which are not cut, and tokens.
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

TRAIN_SHARE = 0.9  # of the bytes; the share that nanoGPT trains on, too
HELD_OUT_BYTES = 10_000_000  # at most: some 2.5 million tokens, whose mean loss is known to 0.1 %


def held_out_bytes(total: int) -> int:
    """How many of a text's `total` bytes are held out."""
    return min(total - int(total * TRAIN_SHARE), HELD_OUT_BYTES)


def begins(text: bytes) -> int:
    """Where in `text`, cut out of a longer one, the first whole UTF-8 character begins."""
    at = 0
    while at < len(text) and text[at] & 0xC0 == 0x80:  # 10xxxxxx: inside a character
        at += 1
    return at


def split(text: bytes) -> tuple[bytes, bytes]:
    """Cut bytes by position into (training, held-out), between two characters."""
    cut = len(text) - held_out_bytes(len(text))
    cut += begins(text[cut:])
    return text[:cut], text[cut:]


CHUNK = 1 << 20  # bytes of a text file that are read at a time


def _read(path):
    """Yield the bytes of a file, a CHUNK at a time."""
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def unix_newlines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a text's `parts` with its lines ended by a line feed alone, by which each shrinks."""
    held = b""  # a carriage return, until the next part says whether a line feed comes after it
    for part in parts:
        part = held + part
        held = part[-1:] if part.endswith(b"\r") else b""
        yield part[: len(part) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if held:
        yield b"\n"


def chunks(path: str | Path, start: int = 0, stop: float = math.inf) -> Iterator[bytes]:
    """Yield the bytes of a text file, by `unix_newlines`, from `start` to `stop` of those."""
    at = 0
    for chunk in unix_newlines(_read(path)):
        yield chunk[max(0, start - at) : int(min(len(chunk), max(0, stop - at)))]
        at += len(chunk)
        if at >= stop:
            return


def split_parts(parts: Iterator[bytes], cut: int) -> tuple[Iterator[bytes], Iterator[bytes]]:
    """A text's `parts` before byte `cut`, and those from there on, to be read one after the other.
    """
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
    """Yield the bytes of a text file in chunks; UserError for what is no readable UTF-8."""
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
    """The bytes of a UTF-8 text file, checked, by `unix_newlines`: all, so for small texts only."""
    parts = list(_checked(path))
    say_line_ends(path, sum(part.count(b"\r") for part in parts))
    return b"".join(unix_newlines(parts))


def say_line_ends(path: str | Path, ends: int) -> None:
    """Say on stderr that line ends were normalized, if there were any."""
    if ends:
        print(f"{path}: line ends normalized: {ends:,}", file=sys.stderr)


_DIGITS = 16  # of a digest: 64 bits, and nobody has anything to gain from two texts with the same


def digest(text: bytes) -> str:
    """The first 16 hex digits of a text's sha256: runs with the same digest read the same data."""
    return hashlib.sha256(text).hexdigest()[:_DIGITS]


class Scanned(NamedTuple):
    """What a text file is, by `unix_newlines`."""

    digest: str
    size: int  # bytes
    line_ends: int  # that were others


def scanned(path: str | Path) -> Scanned:
    """Read a text file once, a CHUNK in memory at a time. UserError: no readable UTF-8."""
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
