# Made from book/20a-a-corpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-corpus-marks
"""One document: its book cut out of the file, lines joined, and a reason where it's refused.

Leaves out other documents (`corpus`): nothing here depends on them, so several threads can do it.
"""

import re
from typing import NamedTuple

import numpy as np

from nanoeuler.data.documents import text_of
from nanoeuler.data.words import FOLD, FUNCTIONS, LANGUAGES, NOTHING, RUN, survey
from nanoeuler.data.wrapped import paragraphs, plain
from nanoeuler.errors import UserError
from nanoeuler.jit import njit

_HEAD, _TAIL = 60_000, 24_000  # bytes in which the marks are looked for
_START = re.compile(
    rb"\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG E(?:BOOK|TEXT)\b"
    rb"[\s\S]{0,300}?\*\*\*[ \t]*\n"
    rb"|\*END.{0,4}THE SMALL PRINT!.*\n|\*\*\*\* +SMALL PRINT! FOR .*\n"
)
_END = re.compile(
    rb"\*\*\* ?END OF TH(?:E|IS) PROJECT GUTENBERG E(?:BOOK|TEXT)\b"
    rb"|[ \t]*(?:the )?end of (?:the |this )?(?:project gutenb[eu]rg|etext)",
    re.I,
)
_CREDITS = re.compile(
    rb"\s*(?:Produced by|E-?text (?:prepared|produced|scanned) by|Transcribed (?:from|by)"
    rb"|This e(?:book|text) was (?:produced|prepared) by|Special thanks are due"
    rb"|Note: Project Gutenberg also|\[?Transcriber.{1,3}s Note|An Anonymous Volunteer)\b"
    rb"[\s\S]{0,2000}?\n[ \t]*\n",
    re.I,
)
_COPYRIGHTED = b"COPYRIGHTED PROJECT GUTENBERG"


def _marks(text, word, pattern):
    """The matches of `pattern` at the lines of `text`, bytes, that hold `word`, in order."""
    at, found = text.find(word), []
    while at >= 0:
        match = pattern.match(text, text.rfind(b"\n", 0, at) + 1)
        found += [match] if match else []
        at = text.find(word, at + len(word))
    return found


def book_in(text: np.ndarray) -> tuple[np.ndarray, str]:
    """(the book in a text of Project Gutenberg, "" or why it mustn't be used).

    text, uint8, is one of `plain`; without marks all of it is the book.
    """
    head = text[:_HEAD].tobytes()
    if _COPYRIGHTED in head.upper():
        return text, "copyrighted"
    found = [_marks(head, word, _START) for word in (b"START OF TH", b"SMALL PRINT")]
    first = max((match.end() for matches in found for match in matches), default=0)
    body = text[first:]
    if first:
        while match := _CREDITS.match(body[:_HEAD].tobytes()):
            body = body[match.end() :]
    cut = max(len(body) - _TAIL, 0)
    tail = body[cut:].tobytes()
    found = [_marks(tail, word, _END) for word in (b"END OF TH", b"nd of ")]
    last = min((match.start() for matches in found for match in matches), default=len(tail))
    return body[: cut + last], ""


LEAST_WORDS = 50  # of a document: of fewer, no language can be recognized
LEAST_SHARE = 0.2  # of its words that are function words, in every language here


class Rules(NamedTuple):
    """What is kept: documents in `language` (None: in any), without runs of `held_out`."""

    language: str | None = "en"
    held_out: tuple[np.ndarray, np.ndarray] = NOTHING


class Cleaned(NamedTuple):
    """A document: `text` uint8 (n,), and of its paragraphs `starts` (p + 1,), and (p,) each
    `hashes`, `words`, and `runs` that are held out. Where there's a `reason`, it is refused.
    """

    text: np.ndarray
    starts: np.ndarray
    hashes: np.ndarray
    words: np.ndarray
    runs: np.ndarray
    language: str = ""
    gutenberg: bool = False
    reason: str = ""


_EMPTY = (np.zeros(0, np.uint8), np.zeros(1, np.int64), *(np.zeros(0, np.int64) for _ in range(3)))


def _language(counts, words):
    """The language with most function words, or "none" if they are too few of all `words`."""
    most = int(counts.argmax())
    return LANGUAGES[most] if counts[most] >= LEAST_SHARE * max(words, 1) else "none"


def _fault(raw, place):
    """Why `plain` has stopped at byte `place` of `raw`."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16, not UTF-8"
    return f"binary: byte {place} is 0" if raw[place] == 0 else f"not UTF-8 at byte {place}"


def _declared(raw):
    """`raw` in UTF-8, if a header of Project Gutenberg declares what it is in; else nothing."""
    try:
        return text_of(raw).encode()
    except UserError:
        return b""


def clean(raw: bytes, rules: Rules) -> Cleaned:
    """The document in the bytes of a file, by itself: nothing of others is known here."""
    if not raw:
        return Cleaned(*_EMPTY, reason="empty")
    out = np.empty(len(raw) + 1, np.uint8)
    n, fault = plain(np.frombuffer(raw, np.uint8), out)
    if fault >= 0:
        if raw[fault] and (declared := _declared(raw)):
            return clean(declared, rules)
        return Cleaned(*_EMPTY, reason=_fault(raw, fault))
    body, reason = book_in(out[:n])
    gutenberg = bool(reason) or len(body) < n
    if reason:
        return Cleaned(*_EMPTY, gutenberg=gutenberg, reason=reason)
    text, starts = paragraphs(body)
    hashes, words, runs, counts = survey(text, starts, FOLD, FUNCTIONS, rules.held_out)
    total = int(words.sum())
    language = _language(counts, total)
    if total < LEAST_WORDS:
        reason = f"under {LEAST_WORDS} words"
    elif rules.language and language != rules.language:
        reason = f"language: {language}"
    return Cleaned(text, starts, hashes, words, runs, language, gutenberg, reason)


# %% sec-corpus-copies
KEPT, COPY, HELD_OUT = range(3)


@njit(cache=True, nogil=True)
def _with_neighbours(fates, words):
    """Let paragraphs under 13 words go where the nearest longer ones go: both, or at an end one."""
    before, at, n = -1, 0, fates.size
    while at < n:
        after = at
        while after < n and words[after] < RUN:
            after += 1
        left, right = before >= 0, after < n
        goes = (left or right) and not (left and fates[before] == KEPT)
        goes = goes and not (right and fates[after] == KEPT)
        for short in range(at, after if goes else at):
            if fates[short] == KEPT:
                fates[short] = fates[before] if left else fates[after]
        before, at = after, after + 1


@njit(cache=True, nogil=True)
def fates_of(
    hashes: np.ndarray, words: np.ndarray, runs: np.ndarray, known: np.ndarray
) -> np.ndarray:
    """KEPT, COPY or HELD_OUT for each paragraph, int64 (p,).

    known: a table of the hashes of those in earlier documents, with a free slot.
    """
    fates = np.zeros(hashes.size, np.int64)
    for p in range(hashes.size):
        if runs[p] > 0:
            fates[p] = HELD_OUT
        elif words[p] >= RUN:
            slot = hashes[p] & (known.size - 1)
            while known[slot] != 0 and known[slot] != hashes[p]:
                slot = (slot + 1) & (known.size - 1)
            fates[p] = COPY if known[slot] == hashes[p] else KEPT
    _with_neighbours(fates, words)
    return fates


@njit(cache=True, nogil=True)
def left_of(text: np.ndarray, starts: np.ndarray, fates: np.ndarray) -> np.ndarray:
    """The paragraphs of `text` that are KEPT, one after the other; ends in one line feed."""
    out, n = np.empty(text.size, np.uint8), 0
    for p in range(fates.size):
        if fates[p] == KEPT:
            part = text[starts[p] : starts[p + 1]]
            rest = out[n : n + part.size]
            for at in range(part.size):
                rest[at] = part[at]
            n += part.size
    while n > 1 and out[n - 2] == 10:
        n -= 1
    return out[:n]


def verdict(sizes: np.ndarray, fates: np.ndarray) -> str:
    """Why a whole document goes, or ""; `sizes` (p,) are the bytes of its paragraphs."""
    total, held_out = int(sizes.sum()), int(sizes[fates == HELD_OUT].sum())
    if 2 * held_out > total:
        return "held out"
    return "copy" if 10 * int(sizes[fates == KEPT].sum()) < total else ""
