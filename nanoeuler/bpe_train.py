# Made from book/01-tokenizer.md by nanoeuler.book: edit the chapter, not this file.


# %% book/01-tokenizer.md:674
"""Training byte-pair encoding: from a text to its merges, touching only what each merge changes.

Leaves out the choice of vocabulary size and all errors for people (tokenizer.py). Merges are those
of Hugging Face's `tokenizers`: most frequent pair first, of equals the smaller pair of ids.
"""

import numpy as np
from numba import njit

from nanoeuler.bpe import (
    FREE,
    ID_FROM_BYTE,
    first_slot,
    free_slots,
    hash_bytes,
    padded,
    pop,
    push,
    same_bytes,
)
from nanoeuler.pretokenizer import CHARACTER_CLASSES, word_end

# Columns of the four tables, int64, that are used below.
START, LENGTH, TIMES = 0, 1, 2  # words: where one first stands, and how often it occurs
SYMBOL, LEFT, RIGHT, WEIGHT = 0, 1, 2, 3  # symbols: a row for each byte of the distinct words
KEY, COUNT, FIRST, LAST = 0, 1, 2, 3  # pairs: FIRST and LAST are rows of places
POSITION, NEXT = 0, 1  # places: a row of symbols where the pair stands, or once stood


@njit(cache=True, nogil=True)
def count_words(text, classes):
    """The distinct words of `text` (padded) in order of appearance, int64 (words, 3)."""
    table, words, n = free_slots(1 << 12), np.empty((1 << 11, 3), np.int64), 0
    at = 0
    while at < text.size:
        end = word_end(text, at, classes)
        length = end - at
        slot = hash_bytes(text, at, end) & (table.size - 1)
        while table[slot] != FREE:
            w = table[slot]
            if words[w, LENGTH] == length and same_bytes(text, words[w, START], at, length):
                words[w, TIMES] += 1
                break
            slot = (slot + 1) & (table.size - 1)
        else:
            table[slot] = n
            words[n, START], words[n, LENGTH], words[n, TIMES] = at, length, 1
            n += 1
            if n == words.shape[0]:
                fewer, words = words, np.empty((2 * n, 3), np.int64)
                table = free_slots(4 * n)
                for w in range(n):
                    for column in range(3):
                        words[w, column] = fewer[w, column]
                    h = hash_bytes(text, words[w, START], words[w, START] + words[w, LENGTH])
                    slot = h & (table.size - 1)
                    while table[slot] != FREE:
                        slot = (slot + 1) & (table.size - 1)
                    table[slot] = w
        at = end
    return words[:n]


# %% book/01-tokenizer.md:755
@njit(cache=True, nogil=True)
def _find(key, table, pairs):
    """The slot of `table` that holds the row of `key` in `pairs`, or the free slot for it."""
    slot = first_slot(key, table.size)
    while table[slot] != FREE and pairs[table[slot], KEY] != key:
        slot = (slot + 1) & (table.size - 1)
    return slot


@njit(cache=True, nogil=True)
def _add_place(key, position, weight, table, pairs, places, sizes):
    """Append `position` to the places of `key` and `weight` to its count; return the table.

    sizes = (pairs used, places used). The table is a new one when half of its slots are taken.
    """
    slot = _find(key, table, pairs)
    row, place = table[slot], sizes[1]
    sizes[1] += 1
    places[place, POSITION], places[place, NEXT] = position, FREE
    if row != FREE:
        places[pairs[row, LAST], NEXT] = place
        pairs[row, LAST] = place
        pairs[row, COUNT] += weight
        return table
    row = sizes[0]
    sizes[0] += 1
    table[slot] = row
    pairs[row, KEY], pairs[row, COUNT] = key, weight
    pairs[row, FIRST], pairs[row, LAST] = place, place
    if 2 * sizes[0] > table.size:
        table = free_slots(4 * table.size)
        for row in range(sizes[0]):
            table[_find(pairs[row, KEY], table, pairs)] = row
    return table


# %% book/01-tokenizer.md:795
@njit(cache=True, nogil=True)
def _learn(symbols, wanted):
    """At most `wanted` merges, int32 (M, 2), of `symbols` (N, 4), which is used up.

    Equation eq-tokenizer-update.
    """
    n = symbols.shape[0]
    pairs, places = np.empty((3 * n + 1, 4), np.int64), np.empty((3 * n + 1, 2), np.int64)
    heap, waiting = np.empty((2, 3 * n + 1), np.int64), 0
    table, sizes, queued = free_slots(1 << 12), np.zeros(2, np.int64), 0
    merges, made = np.empty((wanted, 2), np.int32), 0
    for at in range(n):
        right = symbols[at, RIGHT]
        if right != FREE:
            key = symbols[at, SYMBOL] << 32 | symbols[right, SYMBOL]
            table = _add_place(key, at, symbols[at, WEIGHT], table, pairs, places, sizes)
    while made < wanted:
        # (1) the pairs that were born since the last merge: from now on they can only lose
        for row in range(queued, sizes[0]):
            if pairs[row, COUNT] > 0:  # in a run such as a a a a some are born and lost at once
                waiting = push(heap, waiting, -pairs[row, COUNT], pairs[row, KEY])
        queued = sizes[0]
        # (2) the most frequent pair; an entry that overstates goes back with its true count
        row = FREE
        while waiting > 0 and row == FREE:
            count, key = -heap[0, 0], heap[1, 0]
            row = table[_find(key, table, pairs)]
            waiting = pop(heap, waiting)
            if pairs[row, COUNT] != count:
                if pairs[row, COUNT] > 0:
                    waiting = push(heap, waiting, -pairs[row, COUNT], key)
                row = FREE
        if row == FREE:
            break
        # (3) merge it wherever it still stands, from left to right: x a b y becomes x new y
        a, b, new = key >> 32, key & 0xFFFFFFFF, 256 + made
        merges[made, 0], merges[made, 1] = a, b
        made += 1
        place = pairs[row, FIRST]
        while place != FREE:
            at, place = places[place, POSITION], places[place, NEXT]
            gone = symbols[at, RIGHT]
            if symbols[at, SYMBOL] != a or gone == FREE or symbols[gone, SYMBOL] != b:
                continue
            weight, left, right = symbols[at, WEIGHT], symbols[at, LEFT], symbols[gone, RIGHT]
            symbols[at, SYMBOL], symbols[at, RIGHT], symbols[gone, SYMBOL] = new, right, FREE
            if left != FREE:
                x = symbols[left, SYMBOL]
                pairs[table[_find(x << 32 | a, table, pairs)], COUNT] -= weight
                table = _add_place(x << 32 | new, left, weight, table, pairs, places, sizes)
            if right != FREE:
                symbols[right, LEFT] = at
                y = symbols[right, SYMBOL]
                pairs[table[_find(b << 32 | y, table, pairs)], COUNT] -= weight
                table = _add_place(new << 32 | y, at, weight, table, pairs, places, sizes)
    return merges[:made]


# %% book/01-tokenizer.md:857
def learn_merges(text, wanted):
    """The first `wanted` merges of `text` (bytes), int32 (M, 2); M < wanted if pairs run out."""
    text = padded(text)
    starts, lengths, times = count_words(text, CHARACTER_CLASSES).T
    ends = np.cumsum(lengths)
    rows, first_rows = np.arange(lengths.sum()), ends - lengths
    symbols = np.empty((rows.size, 4), np.int64)
    symbols[:, SYMBOL] = ID_FROM_BYTE[text[rows + np.repeat(starts - first_rows, lengths)]]
    symbols[:, LEFT], symbols[:, RIGHT] = rows - 1, rows + 1
    symbols[first_rows, LEFT] = symbols[ends - 1, RIGHT] = FREE
    symbols[:, WEIGHT] = np.repeat(times, lengths)
    return _learn(symbols, wanted)


__all__ = [
    "START",
    "LENGTH",
    "TIMES",
    "SYMBOL",
    "LEFT",
    "RIGHT",
    "WEIGHT",
    "KEY",
    "COUNT",
    "FIRST",
    "LAST",
    "POSITION",
    "NEXT",
    "count_words",
    "learn_merges",
]
