# Made from book/06b-sources.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-sources-attempt
"""Fetching files over networks that fail: in pieces, checked as a whole, renamed when right.

Leaves out two fetches of one file at once, several connections, and servers that ask for a login.
"""

import errno
import gzip
import os
import re
import socket
import ssl
import time
import zlib
from email.utils import parsedate_to_datetime
from http.client import HTTPException, InvalidURL, responses
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from nanoeuler import __version__
from nanoeuler.errors import UserError
from nanoeuler.files import confirm, replacing, sha256_of

CHUNK = 1 << 16  # bytes in memory at once: many packets, and nothing next to a file
TIMEOUT = 30.0  # seconds of silence after which a connection counts as dead
WAITS = (1, 2, 4, 8, 16)  # seconds before each further attempt; chapter 6b, "Many attempts"
LONGEST_WAIT = 120.0  # seconds that a server may ask for; beyond, the reader had better come back
_PASSING = {408, 425, 429}  # the 4xx that say "later" rather than "no" (RFC 9110, 8470, 6585)


class _Again(Exception):
    """An attempt that failed in a way that may pass.

    wait: seconds that the server asked for. forget: what has come is worth nothing.
    unreachable: no server has answered, for a reason that looks like no network.
    """

    def __init__(self, why, *, wait=0.0, forget=False, unreachable=False):
        super().__init__(why)
        self.wait, self.forget, self.unreachable = wait, forget, unreachable


def _refusal(error, url):
    """The exception to raise for an answer of 300 or more that urllib has not followed."""
    why = f"the server answers {error.code} {responses.get(error.code, '')}"
    if error.code == 416:
        return _Again(why, forget=True)
    if error.code not in _PASSING and error.code < 500:
        return UserError(
            f"expected {url}, but {why}: look for the file's new address, "
            "or give a copy of the file with --from DIR"
        )
    wait = _retry_after(error.headers.get("Retry-After", ""))
    if wait > LONGEST_WAIT:
        return UserError(f"{url}: {why} and asks for {wait:.0f} s: run the same command then")
    return _Again(why, wait=wait)


def _retry_after(value):
    """The seconds that a Retry-After header asks for, as a number or as a date (RFC 9110)."""
    if re.fullmatch(r"\d{1,9}", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):  # no header, or nonsense: our own waits stand
        return 0.0


_NO_ROUTE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN}


def _open(url, have):
    """The server's answer to a request for the bytes of `url` from number `have` on."""
    headers = {"User-Agent": f"nanoeuler/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        return urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        with error:  # it holds the connection
            raise _refusal(error, url) from None
    except URLError as error:
        reason = error.reason
        lost = isinstance(reason, socket.gaierror | ssl.SSLCertVerificationError)
        lost = lost or getattr(reason, "errno", None) in _NO_ROUTE
        why = getattr(reason, "strerror", None) or reason
        raise _Again(f"no connection ({why})", unreachable=lost) from None
    except (ValueError, InvalidURL) as error:
        raise UserError(
            f"expected {url!r} to lead to an address, but: {_words(error)}: correct the catalogue, "
            "or give a copy of the file with --from DIR"
        ) from None
    except (OSError, HTTPException) as error:
        raise _Again(f"the connection broke ({_words(error)})") from None


def _words(error):
    """What an exception says, in printable characters (a server may have chosen them)."""
    said = "".join(c if c.isprintable() else " " for c in str(error))
    return " ".join(said.split()) or type(error).__name__


def _placed(response, have):
    """(number of the body's first byte, size of the file or None) as the answer claims them."""
    if response.status == 200:
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if re.fullmatch(r"\d{1,18}", length) else None
    claim = response.headers.get("Content-Range", "")
    found = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", claim)
    if response.status == 206 and found and int(found[1]) == have:
        return have, None if found[2] == "*" else int(found[2])
    answer = f"the server answers {response.status} with range {claim!r}"
    raise _Again(f"asked for bytes from {have:,} on, {answer}", forget=True)


def _receive(response, n):
    """At most `n` bytes, as soon as there are any; none at the end of the body."""
    try:
        return response.read1(n)
    except (OSError, HTTPException) as error:
        raise _Again(f"the connection broke ({_words(error)})") from None


def _attempt(file, part, report):
    """Add to `part` what one connection gives. Raise `_Again` unless the file is then complete."""
    have = _size(part) if file.sha256 else 0  # without a digest nothing proves that pieces fit
    with _open(file.url, have) as response:
        have, claimed = _placed(response, have)
        size = file.bytes or claimed
        with open(part, "ab" if have else "wb") as out:
            while size is None or have < size:
                chunk = _receive(response, CHUNK if size is None else min(CHUNK, size - have))
                if not chunk:
                    break
                out.write(chunk)
                have += len(chunk)
                report(file.name, have, size, "")
    if size is not None and have < size:
        doubt = f", and the server says {claimed:,}" if claimed not in (None, size) else ""
        raise _Again(f"the connection ended at byte {have:,} of {size:,}{doubt}")


def _size(path):
    """The size of a file in bytes, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


# %% sec-sources-again
def _download(file, part, report, pause):
    """Complete `part` from file.url, in as many attempts as it takes; return how many it took.

    UserError: what is in the way. `part` then holds what has come, for another time.
    """
    attempts, failures, furthest = 0, 0, _size(part)
    while file.bytes is None or _size(part) < file.bytes:
        attempts += 1
        try:
            _attempt(file, part, report)
            break
        except _Again as problem:
            if problem.forget:
                part.unlink(missing_ok=True)
            have = _size(part)
            failures = 1 if have > furthest else failures + 1
            furthest = max(furthest, have)
            if (problem.unreachable and attempts == 1) or failures > len(WAITS):
                kept = f" ({have:,} bytes are kept)" if have else ""
                raise UserError(
                    f"expected {file.url}, but {problem}: try again later{kept}, "
                    "or give a copy of the file with --from DIR"
                ) from None
            wait = max(WAITS[failures - 1], problem.wait)
            report(file.name, have, file.bytes, f"{problem}; again in {wait:.0f} s")
            pause(wait)
    return attempts


# %% sec-sources-whole
def _wrong(file, found, size, origin):
    """The UserError for a file that is complete and not the one that was meant."""
    wanted = f"{file.bytes:,} bytes with" if file.bytes else "a file with"
    came = f"{size:,} bytes with sha256 {found}"
    if size > (file.bytes or size):
        came = "more bytes than that"
    return UserError(
        f"expected {wanted} sha256 {file.sha256}, but {origin} gave {came}: it is another version "
        "or damaged; look at it before you change the catalogue"
    )


def _bring(file, path, report, pause):
    """Fetch `file` to `path`: pieces, digest, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    if not file.sha256 or _size(part) > (file.bytes or _size(part)):
        part.unlink(missing_ok=True)
    for last in (False, True):
        kept = _size(part)
        attempts = _download(file, part, report, pause)
        found = sha256_of(part)
        if found == (file.sha256 or found):
            break
        size = _size(part)
        part.unlink()
        if last or (attempts == 1 and not kept):
            raise _wrong(file, found, size, file.url)
        report(file.name, 0, file.bytes, "the pieces do not fit together; from the beginning")
    confirm(part)  # here, where Ctrl-C leaves the part; `replacing` would remove it
    with replacing(path) as temporary:
        os.replace(part, temporary)
    return found


def _copy(file, path, source, copy_from):
    """Copy `file` from the folder `copy_from` to `path`, unpacked and checked."""
    folders = Path(copy_from), Path(copy_from) / source.name
    places = [folder / (file.name + end) for folder in folders for end in ("", ".gz")]
    origin = next((place for place in places if place.is_file()), None)
    if origin is None:
        raise UserError(
            f"expected {file.name} or {file.name}.gz in {copy_from}, but neither is there: "
            "copy it there, or fetch it over the network without --from"
        )
    with replacing(path) as temporary:
        with (
            (gzip.open if origin.suffix == ".gz" else open)(origin, "rb") as packed,
            open(temporary, "wb") as out,
        ):
            try:
                while chunk := packed.read(CHUNK):
                    out.write(chunk)
                    if file.bytes and out.tell() > file.bytes:
                        break
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise UserError(f"expected a gzip file, but {origin}: {_words(error)}") from None
        found = sha256_of(temporary)
        if found != (file.sha256 or found):
            raise _wrong(file, found, _size(temporary), origin)
    return found


def fetch(source, folder, copy_from=None, report=None, *, pause=time.sleep):
    """Bring all files of `source` (a Source) into folder/NAME, checked; return their paths.

    copy_from: a folder to take them from, instead of the network. report(name, have, size, note)
    is told of each file's bytes so far (size may be None) and, if note is not empty, of news.
    pause(seconds) waits. UserError: what is in the way; the same call later goes on from there.
    """
    report = report or (lambda name, have, size, note: None)
    paths = []
    for file in source.files:
        path = Path(folder) / source.name / file.name
        paths.append(path)
        try:
            _one(file, path, source, copy_from, report, pause)
        except OSError as error:
            raise UserError(
                f"expected to write {path}, but: {error.strerror or error}: make room or choose "
                "another folder, and run the same command; it goes on from what has come"
            ) from None
    return paths


def _one(file, path, source, copy_from, report, pause):
    """Bring one file to `path` unless it is there and right; record a digest that was not known."""
    record = path.with_name(path.name + ".sha256")
    known = file.sha256
    if not known and record.is_file():
        known = record.read_bytes()[:64].decode("ascii", "replace")
    if path.is_file():
        size = _size(path)
        if known and size == (file.bytes or size) and sha256_of(path) == known:
            return report(file.name, size, size, "already there")
        report(file.name, 0, file.bytes, "there, but not as it should be; once more")
    found = _copy(file, path, source, copy_from) if copy_from else _bring(file, path, report, pause)
    if not file.sha256:
        with replacing(record) as temporary:
            temporary.write_text(f"{found}  {file.name}\n")
    news = "whole" if file.sha256 else f"whole; its sha256, until now unknown, is {found}"
    report(file.name, _size(path), _size(path), news)
