# Made from book/b-a-tokenizer-at-full-speed.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-unicode
"""GPT-2's pretokenizer: splits a text into words, within which byte-pair encoding merges.

Leaves out every other pattern. Unicode 18.0.0 is frozen here, so a text is split in the same way by
every version of Python. `text` is a uint8 array of UTF-8. Bytes that aren't valid UTF-8 count as
punctuation, so that every sequence of bytes can be split.
"""

import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from nanoeuler.errors import UserError
from nanoeuler.jit import njit

# The character classes of the pattern; indices into ".LNS".
OTHER, LETTER, NUMBER, SPACE = 0, 1, 2, 3


# Runs of code points of one class, from U+0000 up: L letter, N number, S white space, . other;
# a run without a length is one character. Unicode 18.0.0: \p{L}, \p{N} and White_Space.
_RUNS = (
    ".9S5.18S.15N10.7L26.6L26.10S.26S.9L.7N2.L.3NL.N3.L23.L31.L458.4L12.14L5.7L.L.129L5.L2.2L4.L"
    ".6L.L3.L.L20.L83.L139.8L166.L38.L2.6L41.2L2.67L27.4L4.45L43.21N10.4L2.L99.L.15L2.7L2N10L3.2L"
    ".16L.L30.29L89.11L.14N10L33.9L2.4L.5L22.4L.9L.3L.23L25.7L11.5L24.L7.16L42.58L54.3L.18L.7L10"
    ".4N10.L16.4L8.2L2.2L22.L7.L.3L4.3L.16L.13L2.L3.4N10L2.2N6.2L.8L6.4L2.2L22.L7.L2.L2.L2.31L4.L"
    ".7N10.2L3.16L9.L3.L22.L7.L2.L5.3L.18L.15L2.4N10.9L.11L8.2L2.2L22.L7.L2.L5.3L.30L2.L3.4N10.L"
    "N6.11L.L6.3L3.L4.3L2.L.L2.3L2.3L3.3L12.22L.21N13.18L8.L3.L23.L16.3L.26L3.L2.2L2.4N10.8N7.L.4"
    "L8.L3.L23.L10.L5.3L.30L3.L2.4N10.L2.17L9.L3.L41.2L.16L.5L3.N7L3.4N19.L6.5L18.3L24.L9.L.2L7"
    ".31N10.17L48.L2.12L7.9N10.39L2.L.L5.L24.L.L10.L2.9L.2L5.L.9N10.2L4.32L.31N20.12L8.L36.27L5"
    ".115L43.20LN10.6L6.4L4.3L.3L2.7L3.4L13.12L.N10.6L38.L.5L.2L43.L333.L4.2L7.L.L4.2L41.L4.2L33."
    "L4.2L7.L.L4.2L15.L57.L4.2L67.14N20.3L16.16L86.2L6.3L620.2L17SL26.5L75.3N3L8.7L18.13L19.14L18"
    ".14L13.L3.15L52.35L.4L.3N10.6N10.22N10.6L89.7L5.2L34.L.5L70.10L31.39N10L30.2L5.11L44.4L26.6"
    "N11.37L23.9L53.43N10.6N10.13L.93L47.17L8.3N10.41L30.13L2N10L44.26L36.28N10.3L3N10L36.2L11.5"
    "L43.2L3.41L4.L6.L2.3L.5L192.64L278.2L6.2L38.2L6.2L8.L.L.L.L31.2L53.L7.L.3L3.L7.3L4.2L6.4L13"
    ".5L3.L7.3S11.29S2.5S.47S.16NL.2N6.5LN10.5L17.98L.4L.2L10.L.3L5.6L.L.L.L4.L11.2L4.5L5.4L.N51"
    "L2N5.726N60.78N22.630N30.1132L229.6L4.3L2.9N.2L38.L.5L.2L56.7L.16L23.9L7.L7.L7.L7.L7.L7.L7."
    "L7.80L.464S.4L2N.25N9.7L5.2N3L2.4L86.6L3.L90.L4.5L43.L94.3N4.10L32.48L16.32N10.30N8.N15.32"
    "N10.39N15.320L6592.64L22157.67L46.2L269.3L16N10L2.20L47.16L31.2L70N10.39L9.2L103.2L83.4L.14"
    "L17.L3.L4.L23.13N6.10L52.14L50.28N10.24L6.3L.L2.N10L28.10L23.25L29.7L47.28LN10.6L5.L10N10L5."
    "L41.23L3.L8.4N10.6L23.3L.3L50.L.3L2.2L5.2L.L.24L3.2L11.7L3.12L6.2L6.2L6.9L7.L7.L43.L14.2L2.2"
    "L115.13N10.6L11172.12L23.4L49.8452L366.2L106.38L7.12L5.5L.L10.L13.L5.L.L2.L2.L108.33L363.18"
    "L64.2L54.40L12.116L5.L135.19N10.7L26.6L26.11L89.3L6.2L6.2L6.2L3.35L12.L26.L19.L2.L15.2L14.34"
)


_RUNS += (
    "L123.12N45.12N57.17N2.244L29.3L49.16N27.4L32N4.9L20NL8N.5L38.10L30.2L36.4L8.N5.42L158.2N10.6"
    "L36.4L36.4L40.8L52.12L11.L15.L7.L2.L11.L15.L7.L2.3L52.12L311.9L22.10L8.24L6.L42.L14.64L6.2L."
    "L44.L2.3L.2L23.2N8L23.2N7L31.8N9.48L19.L2.5N5L22N6.4L26.6L26.38L56.4N2L2N16.2N46L.15L4.L3."
    "L29.10N9.23L29N2.L29N3.32L8.L28.6N5.16L54.10L22.2N8L19.5N8L18.23N7.80L73.55L51.13L51.7N6L36"
    ".12N10.6N10L28.9L23.218N31.L42.6L2.16L6.17L22.17L29N10L.8L22.11N4.27L18.46L21N7.20L23.12L53"
    ".26N30.L2.2L.13L45.32L25.7N10.9L36.15N10.4L.2L.8L35.3L.12L48.14L4.11N10L.L.4N20.11L18.L25.19"
    "L2.63L7.L.L4.L15.L10.7L47.17N10.11L8.2L2.2L22.L7.L2.L5.3L.18L.12L5.30L10.L.2L.L38.L.25L.L.44"
    "L53.18L4.5N10.5L3.30L48.20L2.L.8N10.166L47.41L4.36L48.20L.11N10.38L43.13L.7N10.6N20.28L27.21"
    "N12.4L7.185L44.116L64N19.12L8.2L.2L8.L2.L24.15L.L.14N10.70L8.2L39.16L.L.28L.10L40.7L.21L.11"
    "L46.19L.18L73.17L.181L33.15N10.6L9.L37.17L.15N29.5L30.112L7.L2.L38.21L.9N10.6L6.L2.L32.14L.7"
    "N10.6L44.4N10.7L.238L19.15L.L13.L34.28N10.86L.15N21.43L922.102N112.5N11L196.12N311.2313L97"
    ".15L1072.17L6.25L3995.5L583.6841L30.18N10.1734L569.7L31.N10.6L79.N10.6L30.18L48.16L4.12N10."
    "N7.L21.5L19.432L45.3N10.198L64N23.9L25.2L25.44L75.5L.66L13.64L2.L.14L2N3.9L7387.36L34.95L115"
    ".13L914.14L51.7709L4.L7.L2.L297.9L.29L3.2L.14L5.7L396.2308L107.5L13.3L9.7L10.4182N10.1478N20"
    ".12N20.108N25.135L85.L71.L2.2L.2L2.2L4.L12.L.L7.L65.L4.2L8.L7.L28.L4.L5.L.3L7.L341.L25.L25."
    "L31.L25.L31.L25.L31.L25.L31.L25.L8.2N50.1792L130.14L7.54L51.48L62.146L45.10L7.2N10.4L.321L30"
    ".18L44.4N10.470L28.4N10.214L30.2LN10.197L31.L3.L2.L7.2L5.9L2.224L7.L4.L2.L15.L197.2N9.48L68"
    ".7L.4N10.791N59.N3.N4.76N45.N15.194L4.L27.L2.L.2L.L10.L4.L.L.6L.4L.L.L.L3.L2.L.2L.L.L.L.L.L2"
    ".L.2L4.L7.L4.L4.L.L10.L17.5L3.L5.L17.580N13.2787N10.1030L42720.32L4383.L5774.2L7473.15L622"
    ".2466L542.1506L4939.5L8490.39814L11328.852928"
)


def _expanded(runs):
    """The class of each code point, uint8 (0x110000,), from the text of the runs."""
    pairs = re.findall(r"([.LNS])(\d*)", runs)
    kinds = np.array([".LNS".index(kind) for kind, _ in pairs], np.uint8)
    return np.repeat(kinds, [int(length or 1) for _, length in pairs])


# One byte for each code point is 1.1 MB, of which a text in one alphabet reads a few kilobytes.
CHARACTER_CLASSES = _expanded(_RUNS)
assert CHARACTER_CLASSES.size == 0x110000


# %% sec-tokenizer-scanner
@njit(cache=True, nogil=True, inline="always")
def character(text: np.ndarray, at: int, classes: np.ndarray) -> tuple[int, int]:
    """The class and the length in bytes of the character at `at`."""
    if text[at] < 0x80:
        return np.int64(classes[text[at]]), 1
    return _beyond_ascii(text, at, classes)


@njit(cache=True, nogil=True, inline="always")
def word_end(text: np.ndarray, start: int, classes: np.ndarray) -> int:
    """The index just past the word that begins at `start`, 0 <= start < text.size."""
    n = text.size
    # 's 't 'd 'm 'll 've 're
    if text[start] == 39 and start + 1 < n:
        c = text[start + 1]
        if c == 115 or c == 116 or c == 100 or c == 109:
            return start + 2
        if start + 2 < n:
            d = text[start + 2]
            if (c == 108 and d == 108) or ((c == 118 or c == 114) and d == 101):
                return start + 3
    # a space joins the word after it
    kind, length = character(text, start, classes)
    end = start + length
    if text[start] == 32 and end < n:
        after, length = character(text, end, classes)
        if after != SPACE:
            kind, end = after, end + length
    # the run
    last = start
    while end < n:
        after, length = character(text, end, classes)
        if after != kind:
            break
        last, end = end, end + length
    # white space leaves its last character to the word after it
    if kind == SPACE and end < n and last > start:
        return last
    return end


@njit(cache=True, nogil=True)
def _word_ends(text, classes):
    """The index just past each word of `text`, int64."""
    ends = np.empty(text.size, np.int64)
    count, at = 0, 0
    while at < text.size:
        at = word_end(text, at, classes)
        ends[count] = at
        count += 1
    return ends[:count]


def split(text: bytes) -> list[bytes]:
    """Split `text` (bytes) into words: a list of bytes whose concatenation is `text`."""
    ends = _word_ends(np.frombuffer(text, np.uint8), CHARACTER_CLASSES).tolist()
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


# %% sec-tokenizer-utf8
@njit(cache=True, nogil=True)
def _beyond_ascii(text, at, classes):
    """The class and length of the character whose first byte, at `at`, is 0x80 or more."""
    lead = np.int64(text[at])
    if lead < 0xC0 or lead > 0xF7:
        return OTHER, 1
    # how many bytes follow, and the first code point that needs so many
    if lead < 0xE0:
        more, lowest = 1, 0x80
    elif lead < 0xF0:
        more, lowest = 2, 0x800
    else:
        more, lowest = 3, 0x10000
    if at + more >= text.size:
        return OTHER, 1
    code = lead & (0x3F >> more)
    for i in range(at + 1, at + 1 + more):
        if text[i] & 0xC0 != 0x80:
            return OTHER, 1
        code = code << 6 | np.int64(text[i]) & 0x3F
    if code < lowest or code >= classes.size:
        return OTHER, 1
    return np.int64(classes[code]), 1 + more


# %% sec-tokenizer-pieces
@njit(cache=True, nogil=True)
def class_before(text: np.ndarray, at: int, classes: np.ndarray) -> int:
    """The class of the character that ends at `at`: back to its lead byte, if it has one."""
    start = at - 1
    while start > max(at - 4, 0) and text[start] & 0xC0 == 0x80:
        start -= 1
    kind, length = character(text, start, classes)
    return kind if start + length == at else OTHER


@njit(cache=True, nogil=True)
def last_cut(text: np.ndarray, classes: np.ndarray) -> int:
    """The last place where `text` can be cut, whatever comes before and after, or 0 for none.

    `text` must not begin inside a character.
    """
    for at in range(text.size - 4, 0, -1):
        if text[at] & 0xC0 == 0x80:
            continue
        before = class_before(text, at, classes)
        after, _ = character(text, at, classes)
        if before != SPACE and before != after and text[at - 1] != 39:
            return at
    return 0


MAX_WORD = 1 << 24  # bytes; merging so long a word takes up to 1 GB, and no language has one


def whole_words(
    chunks: Iterable[bytes], cut_of: Callable[[bytes], int] | None = None
) -> Iterator[bytes]:
    """Regroup the `chunks` (bytes) of a text into pieces (bytes) that end where words end.

    cut_of: finds the last cut of a piece, for words that aren't GPT-2's. Holds at most a chunk and
    twice a word. UserError for a word of more than MAX_WORD bytes that hasn't ended when it is
    searched again.
    """
    held, size, look_again = [], 0, 0
    for chunk in chunks:
        if not isinstance(chunk, (bytes, bytearray, memoryview)):
            raise UserError(f"expected chunks of bytes, got {type(chunk).__name__}")
        for at in range(0, len(chunk), MAX_WORD):
            held.append(bytes(chunk[at : at + MAX_WORD]))  # a copy, if the caller may change it
            size += len(held[-1])
            if size < look_again:
                continue
            piece = b"".join(held)
            if cut_of:
                cut = cut_of(piece)
            else:
                cut = last_cut(np.frombuffer(piece, np.uint8), CHARACTER_CLASSES)
            size -= cut
            if size > MAX_WORD:
                raise UserError(
                    f"expected words of at most {MAX_WORD} bytes, but the text goes on for {size} "
                    "without the end of one: is it text? Break its lines, or leave it out"
                )
            if cut:
                yield piece[:cut]
            held, look_again = [piece[cut:]], 2 * size
    yield b"".join(held)
