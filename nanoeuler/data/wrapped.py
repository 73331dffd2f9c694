# Made from book/20a-a-corpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-corpus-plain
"""From hard-wrapped lines to paragraphs: bytes checked, the line ends of an editor taken out.

Leaves out what is in a paragraph (`words`) and whether it is kept (`cleaning`).
"""

import numpy as np

from nanoeuler.jit import njit

NEW, SPACE, TAB = 10, 32, 9  # line feed, space, tabulator


@njit(cache=True, nogil=True)
def _character(raw, at):
    """The number of bytes of the UTF-8 character at raw[at], which is above 7F; 0 if none is."""
    b = raw[at]
    if b < 0xC2 or b > 0xF4:
        return 0
    size = 2 if b < 0xE0 else 3 if b < 0xF0 else 4
    if at + size > raw.size:
        return 0
    for i in range(1, size):
        if raw[at + i] & 0xC0 != 0x80:
            return 0
    second = raw[at + 1]
    if (b == 0xE0 and second < 0xA0) or (b == 0xF0 and second < 0x90):  # could be shorter
        return 0
    if (b == 0xED and second > 0x9F) or (b == 0xF4 and second > 0x8F):  # no character
        return 0
    return size


@njit(cache=True, nogil=True)
def _ended(out, n):
    """Write a line feed after out[:n], in place of blanks at its end; return the new length."""
    while n > 0 and (out[n - 1] == SPACE or out[n - 1] == TAB):
        n -= 1
    out[n] = NEW
    return n + 1


@njit(cache=True, nogil=True)
def plain(raw: np.ndarray, out: np.ndarray) -> tuple:
    """Copy the UTF-8 text `raw` to `out` with \\n as line ends, without blanks before them or
    ASCII's control characters, tabs excepted; out has a byte more. Return (length, -1),
    or (_, place) of a fault.
    """
    n, at, size = 0, 0, raw.size
    if size >= 3 and raw[0] == 0xEF and raw[1] == 0xBB and raw[2] == 0xBF:  # byte order mark
        at = 3
    while at < size:
        b = raw[at]
        if b >= 0x80:
            width = _character(raw, at)
            if width == 0:
                return n, at
            for i in range(width):
                out[n + i] = raw[at + i]
            n, at = n + width, at + width
            continue
        if b >= SPACE and b != 127 or b == TAB:
            out[n] = b
            n += 1
        elif b == 0:
            return n, at
        elif 10 <= b <= 13 and not (b == 13 and at + 1 < size and raw[at + 1] == NEW):
            n = _ended(out, n)  # line feed, vertical tab, form feed, lone carriage return
        at += 1
    return (n if n > 0 and out[n - 1] == NEW else _ended(out, n)), -1


# %% sec-corpus-wrapped
# The columns of a line's row, int64 each: where its bytes begin and end, its width in characters,
# its indentation, the width of its first word, whether it begins with a capital or has wide gaps.
START, END, WIDTH, INDENT, FIRST, CAPITAL, GAPS = range(7)


@njit(cache=True, nogil=True)
def _is_capital(line):
    """Whether the first letter of `line`, uint8 (n,), is a capital; signs may stand before it."""
    for at in range(line.size):
        b = line[at]
        if b == 0xC3:  # C3 80 to C3 9E are the capitals with accents
            return line[at + 1] < 0x9F
        if 65 <= b <= 90:
            return True
        if 97 <= b <= 122 or b > 0xC3 and b != 0xE2:  # E2: quotation marks and dashes
            return False
    return False


@njit(cache=True, nogil=True)
def _look(line, row):
    """Fill in the `row` of a line, whose bytes are uint8 (n,)."""
    width, gaps, indent = 0, False, 0
    for b in line:
        width += b & 0xC0 != 0x80  # else it goes on with a character
    while indent < line.size and (line[indent] == SPACE or line[indent] == TAB):
        indent += 1
    word, first = line[indent:], 0
    for b in word:
        if b == SPACE or b == TAB:
            break
        first += b & 0xC0 != 0x80
    for at in range(word.size - 1):
        blanks = at > 0 and word[at - 1] == SPACE and word[at] == SPACE and word[at + 1] == SPACE
        gaps |= blanks or word[at] == TAB
    row[WIDTH], row[INDENT], row[FIRST] = width, indent, first
    row[CAPITAL], row[GAPS] = _is_capital(word), gaps


@njit(cache=True, nogil=True)
def lines_of(text: np.ndarray) -> np.ndarray:
    """The lines of a text that ends in a line feed: int64 (n, 7), the columns named above."""
    n = 0
    for b in text:
        n += b == NEW
    rows, start, n = np.zeros((n, 7), np.int64), 0, 0
    for at in range(text.size):
        if text[at] == NEW:
            rows[n, START], rows[n, END] = start, at
            _look(text[start:at], rows[n])
            start, n = at + 1, n + 1
    return rows


LEAST = 50  # columns of the longest line of a joined block; a pentameter has about 45
SLACK = 15  # columns that it may lack of the document's usual width
LONG = 120  # columns: a longer line is a paragraph
USUAL = 0.9  # of a document's lines are at most as wide as its usual width


@njit(cache=True, nogil=True)
def usual_width(rows: np.ndarray) -> int:
    """The width, in columns, that nine in ten of the lines that aren't blank keep within."""
    counts, n = np.zeros(LONG + 2, np.int64), 0
    for row in rows:
        if row[WIDTH] > 0:
            counts[min(row[WIDTH], LONG + 1)] += 1
            n += 1
    width, seen = 0, counts[0]
    while seen < USUAL * n:
        width += 1
        seen += counts[width]
    return width


@njit(cache=True, nogil=True)
def is_wrapped(rows: np.ndarray, usual: int) -> bool:
    """Whether an editor made the line ends of a block of lines, `rows` (n, 7)."""
    n, widest, least = rows.shape[0], 0, rows[-1, INDENT]
    for i in range(n):
        widest = max(widest, rows[i, WIDTH])
        if i > 0:
            least = min(least, rows[i, INDENT])
    if n < 2 or widest < max(LEAST, usual - SLACK) or widest > LONG:
        return False
    forced, ends, capitals, gaps = 0, 0, 0, rows[0, GAPS]
    for i in range(1, n):
        if rows[i, INDENT] <= least:  # else a paragraph begins here, and nothing is forced
            ends += 1
            forced += rows[i - 1, WIDTH] + 1 + rows[i, FIRST] > widest
        capitals += rows[i, CAPITAL]
        gaps += rows[i, GAPS]
    verse = n >= 4 and capitals == n - 1 and rows[0, CAPITAL] == 1
    return not verse and 2 * gaps < n and 5 * forced >= 4 * ends


@njit(cache=True, nogil=True)
def _copied(line, out, n):
    """Copy `line` behind out[:n]; return the new length."""
    rest = out[n : n + line.size]
    for at in range(line.size):
        rest[at] = line[at]
    return n + line.size


@njit(cache=True, nogil=True)
def _dashed(out, n):
    """Whether out[:n] ends in a hyphen, or in one of Unicode's dashes: E2 80 90 to E2 80 95."""
    if out[n - 1] == 45:
        return True
    return n > 2 and out[n - 3] == 0xE2 and out[n - 2] == 0x80 and 0x90 <= out[n - 1] <= 0x95


@njit(cache=True, nogil=True)
def _block(text, rows, usual, out, n, starts, p):
    """Write a block of lines behind out[:n] and where its paragraphs begin behind starts[:p]."""
    joins, least = is_wrapped(rows, usual), rows[0, INDENT]
    for i in range(rows.shape[0]):
        least = rows[i, INDENT] if joins and i == 1 else min(least, rows[i, INDENT])
    for i in range(rows.shape[0]):
        deeper = rows[i, INDENT] > least
        long = i > 0 and max(rows[i, WIDTH], rows[i - 1, WIDTH]) > LONG
        if i == 0 or (deeper if joins else long):
            if n > 0:
                out[n] = NEW
                n += 1
                if i == 0 or joins:
                    out[n] = NEW
                    n += 1
            starts[p] = n
            p += 1
        elif not (joins and _dashed(out, n)):
            out[n] = SPACE if joins else NEW
            n += 1
        indent = rows[i, INDENT] if joins else least
        n = _copied(text[rows[i, START] + indent : rows[i, END]], out, n)
    return n, p


@njit(cache=True, nogil=True)
def paragraphs(text: np.ndarray) -> tuple:
    """(text, starts) of a text from `plain`: its lines joined, and where its paragraphs begin.

    text uint8 (n,); starts int64 (p + 1,), the last one n. A paragraph ends with its line feeds.
    """
    rows = lines_of(text)
    out, starts = np.empty(text.size + 2, np.uint8), np.empty(rows.shape[0] + 1, np.int64)
    usual, i, n, p = usual_width(rows), 0, 0, 0
    while i < rows.shape[0]:
        j = i
        while j < rows.shape[0] and rows[j, WIDTH] > 0:
            j += 1
        if j > i:
            n, p = _block(text, rows[i:j], usual, out, n, starts, p)
        i = j + 1
    if n > 0:
        out[n] = NEW
        n += 1
    starts[p] = n
    return out[:n], starts[: p + 1]
