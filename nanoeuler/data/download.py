# Made from book/c-sources.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-sources-attempt
"""A download that resumes where it was cut off, and retries politely.

Leaves out several connections at once, logins, and digests, which fetch.py compares.
"""

import time
from collections.abc import Callable
from http.client import responses
from pathlib import Path

import requests
from urllib3 import Retry
from urllib3.exceptions import HTTPError, InvalidHeader, MaxRetryError, NewConnectionError

from nanoeuler import __version__
from nanoeuler.data.catalogue import File
from nanoeuler.errors import UserError, quoted

CHUNK = 1 << 16  # bytes in memory at once: many packets, and nothing next to a file
TIMEOUT = 30.0  # seconds of silence after which a connection counts as dead
LATER = {408, 425, 429, *range(500, 600)}  # answers that mean "later" (RFC 9110, 8470, 6585)
RETRIES = Retry(6, backoff_factor=0.5)  # 31 seconds without progress, by equation eq-sources-wait
LONGEST_WAIT = 120.0  # seconds; if a server asks for more, the user should come back later


class _Again(Exception):
    """An attempt failed in a way that may pass.

    wait: seconds that the server asked for. nobody: no server could be reached.
    """

    def __init__(self, why, wait=0.0, nobody=False):
        super().__init__(why)
        self.wait, self.nobody = wait, nobody


def _ask(url, have):
    """The server's answer to a request for the bytes of `url` from number `have` on."""
    headers = {"User-Agent": f"nanoeuler/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        return requests.get(url, headers=headers, stream=True, timeout=TIMEOUT)
    except (requests.RequestException, ValueError) as error:
        beneath = [error]
        while cause := beneath[-1].__cause__ or beneath[-1].__context__:
            beneath.append(cause)
        why = quoted(getattr(beneath[-1], "strerror", None) or beneath[-1])
        passing = isinstance(error, requests.ConnectionError | requests.Timeout)
        if passing and not isinstance(error, requests.exceptions.SSLError):
            nobody = any(isinstance(cause, NewConnectionError) for cause in beneath)
            raise _Again(f"no connection ({why})", nobody=nobody) from None
    raise UserError(f"expected {url} to lead to a file, but {why}: correct the catalogue, or give "
                    "a copy of the file with --from DIR")  # fmt: skip


def _judge(answer, url):
    """Raise the error for the answer's status, unless it may come with a body."""
    status = answer.status_code
    why = f"the server answers {status} {responses.get(status, '')}".strip()
    if status in LATER:
        try:
            wait = RETRIES.get_retry_after(answer.raw) or 0.0
        except (InvalidHeader, ValueError, OverflowError):  # nonsense: use our own waits
            wait = 0.0
        if wait > LONGEST_WAIT:
            raise UserError(f"{url}: {why} and asks for {wait:.0f} s: run the same command then")
        raise _Again(why, wait)
    if status not in (200, 206, 416):
        raise UserError(f"expected {url}, but {why}: look for the file's new address, or give a "
                        "copy of the file with --from DIR")  # fmt: skip


def _place(answer, part):
    """The number of the body's first byte in the file: 0, or where `part` ends."""
    have, claim = size_of(part), answer.headers.get("Content-Range", "")
    if answer.status_code == 200:
        return 0
    if answer.status_code == 206 and have and claim.startswith(f"bytes {have}-"):
        return have
    part.unlink(missing_ok=True)
    raise _Again(f"asked for bytes from {have:,} on, the server answers {answer.status_code} "
                 f"with range {quoted(repr(claim), 40)}")  # fmt: skip


def _attempt(file, part, report):
    """Add one connection's bytes to `part`. Raise `_Again` unless the file is then complete."""
    with _ask(file.url, size_of(part)) as answer:
        _judge(answer, file.url)
        have, whole = _place(answer, part), False
        with open(part, "ab" if have else "wb") as out:
            try:
                while chunk := answer.raw.read1(min(CHUNK, (file.bytes or have + CHUNK) - have)):
                    out.write(chunk)
                    have += len(chunk)
                    report(file.name, have, file.bytes, "")
                whole = have == (file.bytes or have)
            except HTTPError:  # the connection broke, timed out, or ended too early
                pass
    if not whole:
        size = f" of {file.bytes:,}" if file.bytes else ""
        raise _Again(f"the connection ended at byte {have:,}{size}")


def size_of(path: Path) -> int:
    """The size of a file in bytes, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


# %% sec-sources-again
def _again(retries, problem, file, have, first):
    """(the retries left after a problem, the seconds to wait); UserError if we should give up.

    have: the bytes in the part. first: whether this was the first attempt.
    """
    try:
        if problem.nobody and first:
            raise MaxRetryError(None, file.url, problem)
        retries = retries.increment("GET", file.url, error=problem)
    except MaxRetryError:
        kept = f" ({have:,} bytes are kept)" if have else ""
        raise UserError(
            f"expected {file.url}, but {problem}: try again later{kept}, "
            "or give a copy of the file with --from DIR"
        ) from None
    return retries, max(retries.get_backoff_time(), problem.wait)


def download(file: File, part: Path, report: Callable, pause: Callable = time.sleep) -> bool:
    """Download the rest of a file into `part`; True if several answers may have made it.

    Calls report(name, have, size, note) with its progress, and pause(seconds) to wait. UserError
    says what is in the way.
    """
    retries, furthest, attempts = RETRIES, size_of(part), 0
    resumed = furthest > 0
    while not file.bytes or size_of(part) < file.bytes:
        attempts += 1
        try:
            _attempt(file, part, report)
            break
        except _Again as problem:
            have = size_of(part)
            if have > furthest:
                retries, furthest, resumed = RETRIES, have, True
            retries, wait = _again(retries, problem, file, have, attempts == 1)
            when = f"in {wait:.0f} s" if wait else "at once"
            report(file.name, have, file.bytes, f"{problem}; trying again {when}")
            pause(wait)
    return resumed
