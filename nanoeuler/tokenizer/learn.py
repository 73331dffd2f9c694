# Made from book/b-a-tokenizer-at-full-speed.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-learn
"""Training byte-pair encoding: from texts to merges, updating only what each merge changes.

Leaves out the choice of vocabulary size and most errors for people (tokenizer.py). The merges are
those of Hugging Face's tokenizers: the most frequent pair first, ties to the smaller pair of ids.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from nanoeuler.errors import UserError
from nanoeuler.jit import njit
from nanoeuler.tokenizer.encode import (
    FREE,
    ID_FROM_BYTE,
    eight_bytes,
    first_slot,
    free_slots,
    hash_bytes,
    padded,
    pop,
    push,
    same_bytes,
)
from nanoeuler.tokenizer.pretokenizer import CHARACTER_CLASSES, word_end

# Columns of the four tables that are used below, and the sizes of the growing ones.
EIGHT, START, LENGTH, TIMES = 0, 1, 2, 3  # words: START is a place in the store
SYMBOL, WORD = 0, 1  # symbols: a row for each byte of the distinct words
KEY, COUNT, FIRST, MANY = 0, 1, 2, 3  # pairs: MANY places, from FIRST on
PAIRS, PLACES, NOTES, WAITING, MADE = 0, 1, 2, 3, 4  # sizes: WAITING in the heap, MADE merges


@njit(cache=True, nogil=True)
def _count(text, at, classes, table, words, store, used):
    """Count the words of `text` (padded) from `at` until `words` is full; return where it stopped.

    used = (words, bytes of the store), brought up to date.
    """
    while at < text.size:
        end = word_end(text, at, classes)
        length, eight = end - at, eight_bytes(text, at, end)
        # find its row, or the free slot for it
        slot = hash_bytes(text, at, end) & (table.size - 1)
        w = table[slot]
        while w != FREE and not (
            words[w, EIGHT] == eight
            and words[w, LENGTH] == length
            and (length <= 8 or same_bytes(store, words[w, START], text, at, length))
        ):
            slot = (slot + 1) & (table.size - 1)
            w = table[slot]
        # a new word
        if w == FREE:
            w, start = used[0], used[1]
            if w == words.shape[0]:
                break
            table[slot] = w
            words[w, EIGHT], words[w, START] = eight, start
            words[w, LENGTH], words[w, TIMES] = length, 0
            for i in range(length):
                store[start + i] = text[at + i]
            used[0], used[1] = w + 1, start + length
        words[w, TIMES] += 1
        at = end
    return at


@njit(cache=True, nogil=True)
def _table_of(words, store, slots):
    """The hash table, of `slots`, from the bytes of each of `words` to its row."""
    table = free_slots(slots)
    for w in range(words.shape[0]):
        start = words[w, START]
        slot = hash_bytes(store, start, start + words[w, LENGTH]) & (slots - 1)
        while table[slot] != FREE:
            slot = (slot + 1) & (slots - 1)
        table[slot] = w
    return table


def _grown(array, rows):
    """A copy of `array` with room for `rows` rows."""
    longer = np.empty((rows, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer


def count_words(texts: Iterable[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The distinct words of `texts` (bytes) in order of appearance.

    Returns words int64 (n, 4), with columns EIGHT, START, LENGTH, TIMES, and the store, uint8.
    """
    table, words = free_slots(1 << 12), np.empty((1 << 11, 4), np.int64)
    store, used = np.empty(0, np.uint8), np.zeros(2, np.int64)
    for text in texts:
        buffer, at = padded(text), 0
        if used[1] + buffer.size + 8 > store.size:  # 8 more, as `padded` has
            store = _grown(store[: used[1]], 2 * (used[1] + buffer.size + 8))
        while at < buffer.size:
            at = _count(buffer, at, CHARACTER_CLASSES, table, words, store, used)
            if at < buffer.size:
                words = _grown(words, 2 * len(words))
                table = _table_of(words[: used[0]], store, 2 * len(words))
    return words[: used[0]], store


# %% sec-tokenizer-places
class State(NamedTuple):
    """The arrays of training, but for the table: what each holds is in appendix B."""

    symbols: np.ndarray
    times: np.ndarray
    spans: np.ndarray
    pairs: np.ndarray
    places: np.ndarray
    notes: np.ndarray
    heap: np.ndarray
    born: np.ndarray
    sizes: np.ndarray


@njit(cache=True, nogil=True)
def _find(key, table, pairs):
    """The slot of `table` that holds the row of `key` in `pairs`, or the free slot for it."""
    slot = first_slot(key, table.size)
    while table[slot] != FREE and pairs[table[slot], KEY] != key:
        slot = (slot + 1) & (table.size - 1)
    return slot


@njit(cache=True, nogil=True)
def _new_pair(key, table, state):
    """Give `key` the next row of `pairs`, with no places yet; return the table.

    The table is a new one when over half of its slots are taken.
    """
    pairs, sizes = state.pairs, state.sizes
    row = sizes[PAIRS]
    sizes[PAIRS] += 1
    table[_find(key, table, pairs)] = row
    pairs[row, KEY], pairs[row, COUNT], pairs[row, FIRST], pairs[row, MANY] = key, 0, 0, 0
    if 2 * sizes[PAIRS] > table.size:
        table = free_slots(4 * table.size)
        for row in range(sizes[PAIRS]):
            table[_find(pairs[row, KEY], table, pairs)] = row
    return table


@njit(cache=True, nogil=True, inline="always")
def _note(row, at, weight, state):
    """Note that pair `row` is now at row `at` of `symbols`, in a word of that weight."""
    pairs, notes, sizes = state.pairs, state.notes, state.sizes
    pairs[row, COUNT] += weight
    pairs[row, MANY] += 1
    note = sizes[NOTES]
    notes[note, 0], notes[note, 1] = row, at
    sizes[NOTES] += 1


@njit(cache=True, nogil=True)
def _settle(since, state):
    """Sort the noted places by pair, for the pairs from row `since` on, and queue the pairs."""
    pairs, places, notes, heap, sizes = (
        state.pairs, state.places, state.notes, state.heap, state.sizes)  # fmt: skip
    for row in range(since, sizes[PAIRS]):
        pairs[row, FIRST], sizes[PLACES] = sizes[PLACES], sizes[PLACES] + pairs[row, MANY]
        pairs[row, MANY] = 0  # counted again in the loop over the notes
        if pairs[row, COUNT] > 0:  # in a run such as a a a a some appear and disappear at once
            sizes[WAITING] = push(heap, sizes[WAITING], -pairs[row, COUNT], pairs[row, KEY])
    for note in range(sizes[NOTES]):
        row = notes[note, 0]
        places[pairs[row, FIRST] + pairs[row, MANY]] = notes[note, 1]
        pairs[row, MANY] += 1
    sizes[NOTES] = 0


@njit(cache=True, nogil=True)
def _first_pairs(table, state):
    """Enter every pair of neighbours in `symbols`, before the first merge; return the table."""
    symbols, times, pairs, sizes = state.symbols, state.times, state.pairs, state.sizes
    for at in range(1, symbols.shape[0] - 1):
        a, b = symbols[at, SYMBOL], symbols[at + 1, SYMBOL]
        if a != FREE and b != FREE:
            key = np.int64(a) << 32 | b
            row = table[_find(key, table, pairs)]
            if row == FREE:
                row = sizes[PAIRS]
                table = _new_pair(key, table, state)
            _note(row, at, times[symbols[at, WORD]], state)
    _settle(0, state)
    return table


@njit(cache=True, nogil=True)
def _most_frequent(table, state):
    """Take the most frequent pair out of the heap; its row, or FREE if there is none."""
    pairs, heap, sizes = state.pairs, state.heap, state.sizes
    while sizes[WAITING] > 0:
        count, key = -heap[0, 0], heap[1, 0]
        sizes[WAITING] = pop(heap, sizes[WAITING])
        row = table[_find(key, table, pairs)]
        if pairs[row, COUNT] == count:
            return row
        if pairs[row, COUNT] > 0:  # the entry is out of date: put it back with the true count
            sizes[WAITING] = push(heap, sizes[WAITING], -pairs[row, COUNT], key)
    return FREE


@njit(cache=True, nogil=True)
def _merge_everywhere(best, new, table, state):
    """Merge the pair of row `best` into `new` wherever it still occurs; return the table.

    From left to right: x a b y becomes x new y. Equation eq-tokenizer-update.
    """
    symbols, times, spans, pairs = state.symbols, state.times, state.spans, state.pairs
    places, born, sizes = state.places, state.born, state.sizes
    a, b = pairs[best, KEY] >> 32, pairs[best, KEY] & 0xFFFFFFFF
    first = pairs[best, FIRST]
    for place in range(first, first + pairs[best, MANY]):
        at = np.int64(places[place])
        right, after = at + spans[a], at + spans[new]
        if symbols[at, SYMBOL] != a or symbols[right, SYMBOL] != b:
            continue
        symbols[right, SYMBOL] = FREE
        symbols[at, SYMBOL] = symbols[after - 1, SYMBOL] = new
        x, y = symbols[at - 1, SYMBOL], symbols[after, SYMBOL]
        weight = times[symbols[at, WORD]]
        if x != FREE:
            if born[0, x] == FREE:
                born[0, x] = sizes[PAIRS]
                table = _new_pair(np.int64(x) << 32 | new, table, state)
            _note(born[0, x], at - spans[x], weight, state)
        if y != FREE:
            if born[1, y] == FREE:
                born[1, y] = sizes[PAIRS]
                table = _new_pair(np.int64(new) << 32 | y, table, state)
            _note(born[1, y], at, weight, state)
    return table


@njit(cache=True, nogil=True)
def _take_off(a, b, new, since, table, state):
    """Subtract the count of each new pair: (x, new) from (x, a), and (new, y) from (b, y)."""
    pairs, born = state.pairs, state.born
    for row in range(since, state.sizes[PAIRS]):
        x, y = pairs[row, KEY] >> 32, pairs[row, KEY] & 0xFFFFFFFF
        if y == new:
            born[0, x], lost = FREE, x << 32 | a
        else:
            born[1, y], lost = FREE, b << 32 | y
        pairs[table[_find(lost, table, pairs)], COUNT] -= pairs[row, COUNT]


@njit(cache=True, nogil=True)
def _learn(table, state, merges, until):
    """Go on until `until` merges are made or no pair is left; return the table."""
    spans, pairs, sizes = state.spans, state.pairs, state.sizes
    while sizes[MADE] < until:
        best = _most_frequent(table, state)
        if best == FREE:
            break
        a, b, new = pairs[best, KEY] >> 32, pairs[best, KEY] & 0xFFFFFFFF, 256 + sizes[MADE]
        merges[sizes[MADE], 0], merges[sizes[MADE], 1] = a, b
        spans[new] = spans[a] + spans[b]
        sizes[MADE] += 1
        since = sizes[PAIRS]
        table = _merge_everywhere(best, new, table, state)
        _take_off(a, b, new, since, table, state)
        _settle(since, state)
    return table


MOST_BYTES = (2**31 - 1) // 3  # of the distinct words, so that rows of `pairs` fit an int32
TELL_EVERY = 100  # merges between two calls of `progress`


def _laid_out(words, store):
    """The symbols, int32 (rows, 2), of the distinct words before any merge.

    A row for each byte, and an empty one before, between and after the words.
    """
    starts, lengths = words[:, START], words[:, LENGTH]
    if lengths.sum() > MOST_BYTES:
        raise UserError(
            f"expected at most {MOST_BYTES} bytes in distinct words, got {lengths.sum()}: train on "
            "a part of the text"
        )
    firsts = np.cumsum(lengths + 1) - lengths  # the first row of each word
    symbols = np.full((lengths.sum() + len(words) + 1, 2), FREE, np.int32)
    byte = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = np.repeat(firsts, lengths) + byte
    symbols[rows, SYMBOL] = ID_FROM_BYTE[store[np.repeat(starts, lengths) + byte]]
    symbols[rows, WORD] = np.repeat(np.arange(len(words)), lengths)
    return symbols


def learn_merges(
    texts: Iterable[bytes], wanted: int, progress: Callable[[int], object] | None = None
) -> np.ndarray:
    """The first `wanted` merges of `texts`, int32 (M, 2); M < wanted if pairs run out.

    texts: bytes objects, each split into words by itself. progress(M) is called now and then.
    """
    words, store = count_words(texts)
    symbols, times = _laid_out(words, store), words[:, TIMES].copy()
    most = 3 * len(symbols)
    pairs, heap = np.empty((most, 4), np.int64), np.empty((2, most), np.int64)
    places, notes = np.empty(most, np.int32), np.empty((most, 2), np.int32)
    merges, born = np.empty((wanted, 2), np.int32), np.full((2, 256 + wanted), FREE)
    spans, sizes = np.ones(256 + wanted, np.int64), np.zeros(5, np.int64)
    state = State(symbols, times, spans, pairs, places, notes, heap, born, sizes)
    table = _first_pairs(free_slots(1 << 12), state)
    for until in [*range(TELL_EVERY, wanted, TELL_EVERY), wanted]:
        table = _learn(table, state, merges, until)
        if progress:
            progress(int(sizes[MADE]))
    return merges[: sizes[MADE]]
