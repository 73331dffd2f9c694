# Made from book/b-a-tokenizer-at-full-speed.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-others
"""Other people's pre-tokenizers, which split a text into words: Llama 3, Qwen, SmolLM2 and
SentencePiece.

Leaves out GPT-2's (pretokenizer.py). A scanner has a number, so that the compiled encoder can take
it as an argument. `text` is a uint8 array of UTF-8; bytes that aren't valid count as punctuation.
"""

import numpy as np

from nanoeuler.jit import njit
from nanoeuler.tokenizer.pretokenizer import (
    CHARACTER_CLASSES,
    LETTER,
    NUMBER,
    OTHER,
    SPACE,
    character,
    class_before,
    word_end,
)

# The scanners' names in our files; a scanner's number is its place in this list.
SCANNERS = ("gpt2", "digits", "llama3", "qwen2", "spans")
GPT2, DIGITS, LLAMA3, QWEN2, SPANS = range(5)  # their numbers


@njit(cache=True, nogil=True, inline="always")
def _run(text, at, classes, kind):
    """The index just past the characters of class `kind` that begin at `at`, possibly none."""
    while at < text.size:
        after, length = character(text, at, classes)
        if after != kind:
            break
        at += length
    return at


@njit(cache=True, nogil=True)
def _contraction(text, start):
    """The index just past 's 't 're 've 'm 'll 'd, in either case, at an apostrophe; or 0."""
    if start + 1 >= text.size:
        return 0
    c = text[start + 1] | 32  # a letter in lower case
    if c == 115 or c == 116 or c == 109 or c == 100:
        return start + 2
    if start + 2 < text.size:
        d = text[start + 2] | 32
        if (c == 108 and d == 108) or ((c == 114 or c == 118) and d == 101):
            return start + 3
        # the long s, U+017F, is an s if case is ignored
        if text[start + 1] == 0xC5 and text[start + 2] == 0xBF:
            return start + 3
    return 0


@njit(cache=True, nogil=True)
def _llama_end(text, start, classes, most):
    """The end of the word at `start` by Llama 3's pattern, numbers of at most `most` digits."""
    n, first = text.size, text[start]
    if first == 39:
        end = _contraction(text, start)
        if end:
            return end
    kind, length = character(text, start, classes)
    end, after = start + length, OTHER - 1
    if kind == LETTER:
        return _run(text, end, classes, LETTER)
    if kind == NUMBER:
        for _ in range(most - 1):
            if end < n:
                after, length = character(text, end, classes)
                if after == NUMBER:
                    end += length
        return end
    if end < n:
        after, length = character(text, end, classes)
    if after == LETTER and first != 10 and first != 13:
        return _run(text, end, classes, LETTER)
    if kind == OTHER or (first == 32 and after == OTHER):
        end = _run(text, end, classes, OTHER)
        while end < n and (text[end] == 10 or text[end] == 13):
            end += 1
        return end
    return _white(text, start, classes)


@njit(cache=True, nogil=True)
def _white(text, start, classes):
    """The end of the white space at `start`: after its last line end, or before its last one."""
    end, last, lines = start, start, 0
    while end < text.size:
        kind, length = character(text, end, classes)
        if kind != SPACE:
            break
        last, end = end, end + length
        if text[last] == 10 or text[last] == 13:
            lines = end
    if lines:
        return lines
    return last if end < text.size and last > start else end


@njit(cache=True, nogil=True)
def _digits_end(text, start, classes):
    """The end of the word at `start`: numbers one by one, then GPT-2's words between them."""
    kind, length = character(text, start, classes)
    if kind == NUMBER:
        return start + length
    if kind != SPACE:
        return word_end(text, start, classes)
    end = start + length
    if text[start] == 32 and end < text.size:
        after, length = character(text, end, classes)
        if after == LETTER or after == OTHER:
            return _run(text, end, classes, after)
    last = start
    while end < text.size:
        after, length = character(text, end, classes)
        if after == NUMBER:
            return end  # to GPT-2's pattern the text ends here
        if after != SPACE:
            return last if last > start else end
        last, end = end, end + length
    return end


@njit(cache=True, nogil=True)
def _span_end(text, start, joins):
    """The end of the span at `start`: joins[a << 8 | b] says whether byte b may follow a in one."""
    end = start + 1
    while end < text.size and joins[np.int64(text[end - 1]) << 8 | text[end]]:
        end += 1
    return end


@njit(cache=True, nogil=True)
def _other_end(text, start, classes, scanner):
    """`next_end` for a scanner that isn't GPT-2's."""
    if scanner == LLAMA3:
        return _llama_end(text, start, classes, 3)
    if scanner == QWEN2:
        return _llama_end(text, start, classes, 1)
    if scanner == DIGITS:
        return _digits_end(text, start, classes)
    return _span_end(text, start, classes)


@njit(cache=True, nogil=True, inline="always")
def next_end(text: np.ndarray, start: int, classes: np.ndarray, scanner: int) -> int:
    """The index just past the word at `start`, 0 <= start < text.size, by the scanner's number.

    classes: a class for each code point; for SPANS, the table of `_span_end`.
    """
    if scanner == GPT2:
        return word_end(text, start, classes)
    return _other_end(text, start, classes, scanner)


@njit(cache=True, nogil=True)
def _ends(text, classes, scanner):
    """The index just past each word of `text`, int64."""
    ends = np.empty(text.size, np.int64)
    count, at = 0, 0
    while at < text.size:
        at = next_end(text, at, classes, scanner)
        ends[count] = at
        count += 1
    return ends[:count]


def words_of(text: bytes, scanner: str, joins: np.ndarray | None = None) -> list[bytes]:
    """Split `text` into the words of a scanner of SCANNERS: a list of bytes that join to `text`.

    joins: uint8 (65536,), which only "spans" needs.
    """
    table = CHARACTER_CLASSES if joins is None else joins
    ends = _ends(np.frombuffer(text, np.uint8), table, SCANNERS.index(scanner)).tolist()
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@njit(cache=True, nogil=True)
def _may_cut(before, after, x, y, scanner):
    """Whether a text may be cut between characters of these classes; x and y: the bytes there."""
    if scanner == DIGITS and (before == NUMBER or after == NUMBER):
        return True
    if scanner == GPT2 or scanner == DIGITS:
        return before != SPACE and before != after and x != 39
    if before == LETTER or before == NUMBER:
        return after != before
    if before == OTHER:
        return after == NUMBER or (after == SPACE and y != 10 and y != 13)
    return after != SPACE and (x == 10 or x == 13)


@njit(cache=True, nogil=True)
def _last_cut(text, classes, scanner, composing):
    """`last_cut` for the words of any scanner."""
    for at in range(text.size - 4, 0, -1):
        x, y = np.int64(text[at - 1]), np.int64(text[at])
        if scanner == SPANS:
            if not classes[x << 8 | y]:
                return at
            continue
        if y & 0xC0 == 0x80 or (composing and y >= 0x80):
            continue
        before = class_before(text, at, classes)
        after, _ = character(text, at, classes)
        if _may_cut(before, after, x, y, scanner):
            return at
    return 0


def last_cut_of(
    text: np.ndarray, classes: np.ndarray, scanner: int, composing: bool = False
) -> int:
    """The last place where `text` (uint8) may be cut, whatever comes before and after, or 0.

    composing: cut only before an ASCII character, which Unicode never composes with its left.
    """
    return _last_cut(text, classes, scanner, composing)
