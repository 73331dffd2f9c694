# Made from book/b-a-tokenizer-at-full-speed.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-numba
"""Byte-pair encoding in numba: the tools that training and encoding share, and encoding.

Leaves out training (learn.py), a vocabulary's bytes (tokenizer.py) and its files (file.py).
Symbols are ids. In our vocabularies 0 to 255 are the bytes in GPT-2's order, and merge m makes
256 + m; other vocabularies have ids in any order. A pair (left, right) of ids is one int64 key,
left << 32 | right. Its value is one int64 too, rank << 32 | id of the result; the lowest rank is
merged first.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nanoeuler.jit import njit
from nanoeuler.tokenizer.pretokenizer import CHARACTER_CLASSES
from nanoeuler.tokenizer.scanners import GPT2, next_end

# Bytes that are one visible character in Latin-1: GPT-2 numbers these first, then the others.
VISIBLE_BYTES = (*range(33, 127), *range(161, 173), *range(174, 256))
# The byte of each id below 256.
BYTE_FROM_ID = np.array([*VISIBLE_BYTES, *sorted(set(range(256)) - set(VISIBLE_BYTES))], np.uint8)
ID_FROM_BYTE = np.argsort(BYTE_FROM_ID).astype(np.int32)  # and the id of each byte

SPREAD = 5700357409661599241  # an odd number near 2**63 / golden ratio: it spreads a key's bits
FREE = -1  # the value of an empty slot of a hash table, and of an empty row of symbols


@njit(cache=True, nogil=True)
def first_slot(key: int, slots: int) -> int:
    """The slot where the search for `key` (int64) begins in a table of `slots`, a power of two."""
    h = key * SPREAD
    return (h ^ h >> 32) & (slots - 1)


@njit(cache=True, nogil=True)
def free_slots(slots: int) -> np.ndarray:
    """An empty table, int64 (slots,). A loop: np.full takes longer to compile."""
    table = np.empty(slots, np.int64)
    for slot in range(slots):
        table[slot] = FREE
    return table


def padded(text: bytes) -> np.ndarray:
    """`text` (bytes) as a uint8 array, with 8 more bytes of memory after its end."""
    return np.frombuffer(text + bytes(8), np.uint8)[: len(text)]


@intrinsic
def _load(typing, text, at):
    # The 8 bytes of `text` from `at` on as one int64, whatever the alignment.
    def codegen(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(place, align=1)

    return types.int64(text, types.int64), codegen


@njit(cache=True, nogil=True, inline="always")
def eight_bytes(text: np.ndarray, at: int, end: int) -> int:
    """At most the first eight bytes of text[at:end], as one int64 with zeros for the rest."""
    ones = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(max(64 - 8 * (end - at), 0))
    return _load(text, at) & np.int64(ones)


@njit(cache=True, nogil=True, inline="always")
def hash_bytes(text: np.ndarray, start: int, end: int) -> int:
    """A hash (int64) of text[start:end]; `text` must be `padded`."""
    h = end - start
    while start < end:
        h = (h ^ eight_bytes(text, start, end)) * SPREAD
        h ^= h >> 32
        start += 8
    return h


@njit(cache=True, nogil=True, inline="always")
def same_bytes(left: np.ndarray, a: int, right: np.ndarray, b: int, length: int) -> bool:
    """Whether `length` bytes of `left` from `a` on are those of `right` from `b` on."""
    a_end, b_end = a + length, b + length
    while a < a_end:
        if eight_bytes(left, a, a_end) != eight_bytes(right, b, b_end):
            return False
        a, b = a + 8, b + 8
    return True


@njit(cache=True, nogil=True)
def push(heap: np.ndarray, size: int, first: int, second: int) -> int:
    """Add (first, second) to `heap`, (2, capacity) with `size` entries; return the new size."""
    i = size
    while i > 0:
        above = (i - 1) >> 1
        if heap[0, above] < first or (heap[0, above] == first and heap[1, above] <= second):
            break
        heap[0, i], heap[1, i] = heap[0, above], heap[1, above]
        i = above
    heap[0, i], heap[1, i] = first, second
    return size + 1


@njit(cache=True, nogil=True)
def pop(heap: np.ndarray, size: int) -> int:
    """Remove the smallest entry, which is heap[:, 0]; return the new size."""
    size -= 1
    first, second = heap[0, size], heap[1, size]
    i = 0
    while 2 * i + 1 < size:
        below, other = 2 * i + 1, 2 * i + 2
        if other < size and (
            heap[0, other] < heap[0, below]
            or (heap[0, other] == heap[0, below] and heap[1, other] < heap[1, below])
        ):
            below = other
        if first < heap[0, below] or (first == heap[0, below] and second <= heap[1, below]):
            break
        heap[0, i], heap[1, i] = heap[0, below], heap[1, below]
        i = below
    heap[0, i], heap[1, i] = first, second
    return size


# %% sec-tokenizer-words-encoded
NEVER = 1 << 62  # the value of a pair that no merge knows; its rank is above every other
ID = 0xFFFFFFFF  # the bits of a value that are the id; above them is the rank


@njit(cache=True, nogil=True)
def _filled(merges, made):
    """A hash table, int64 (slots, 2), from each pair of `merges` (M, 2) to its value in `made`."""
    slots = 1024
    while slots < 4 * merges.shape[0]:
        slots *= 2
    table = free_slots(2 * slots).reshape(slots, 2)
    for m in range(merges.shape[0]):
        key = np.int64(merges[m, 0]) << 32 | merges[m, 1]
        slot = first_slot(key, slots)
        while table[slot, 0] != FREE:
            slot = (slot + 1) & (slots - 1)
        table[slot, 0], table[slot, 1] = key, made[m]
    return table


def merge_table(
    merges: np.ndarray, made: np.ndarray | None = None, ranks: np.ndarray | None = None
) -> np.ndarray:
    """A hash table, int64 (slots, 2), from each pair of `merges`, int32 (M, 2), to its value.

    made, ranks: int (M,), the id that each merge makes and its rank; by default 256 + m and m.
    """
    rank = np.arange(len(merges)) if ranks is None else np.asarray(ranks, np.int64)
    new = rank + 256 if made is None else np.asarray(made, np.int64)
    return _filled(np.ascontiguousarray(merges, np.int32), rank << 32 | new)


@njit(cache=True, nogil=True)
def _made_of(a, b, table):
    """The value of the pair (a, b), rank << 32 | id, or NEVER."""
    key = np.int64(a) << 32 | b
    slot = first_slot(key, table.shape[0])
    while table[slot, 0] != key:
        if table[slot, 0] == FREE:
            return NEVER
        slot = (slot + 1) & (table.shape[0] - 1)
    return table[slot, 1]


@njit(cache=True, nogil=True)
def _merge_short(ids, n, table, made):
    """Merge ids[:n] in place in n * n steps; return how many are left. `made` (n,) is scratch."""
    for i in range(n - 1):
        made[i] = _made_of(ids[i], ids[i + 1], table)
    while n > 1:
        at = 0
        for i in range(1, n - 1):
            if made[i] >> 32 < made[at] >> 32:  # of equal ranks the first place
                at = i
        if made[at] == NEVER:
            break
        new = made[at] & ID
        ids[at] = new
        n -= 1
        for i in range(at + 1, n):
            ids[i], made[i] = ids[i + 1], made[i + 1]
        if at > 0:
            made[at - 1] = _made_of(ids[at - 1], new, table)
        if at < n - 1:
            made[at] = _made_of(new, ids[at + 1], table)
    return n


@njit(cache=True, nogil=True)
def _merge_long(ids, n, table):
    """Does the same as `_merge_short`, in n log n steps."""
    left, right = np.arange(-1, n - 1), np.arange(1, n + 1)
    heap, waiting = np.empty((2, 3 * n), np.int64), 0
    for i in range(n - 1):
        made = _made_of(ids[i], ids[i + 1], table)
        if made != NEVER:
            waiting = push(heap, waiting, made >> 32, i)
    while waiting > 0:
        rank, at = heap[0, 0], heap[1, 0]
        waiting = pop(heap, waiting)
        gone = right[at]
        if ids[at] == FREE or gone == n:
            continue
        made = _made_of(ids[at], ids[gone], table)
        if made >> 32 != rank:
            continue
        new, before, after = made & ID, left[at], right[gone]
        ids[at], ids[gone], right[at] = new, FREE, after
        if before >= 0:
            made = _made_of(ids[before], new, table)
            if made != NEVER:
                waiting = push(heap, waiting, made >> 32, before)
        if after < n:
            left[after] = at
            made = _made_of(new, ids[after], table)
            if made != NEVER:
                waiting = push(heap, waiting, made >> 32, at)
    kept = 0
    for i in range(n):
        if ids[i] != FREE:
            ids[kept] = ids[i]
            kept += 1
    return kept


@njit(cache=True, nogil=True)
def whole_table(store: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """A hash table of tokens by their bytes, with rows (start, length, id): int64 (slots, 3).

    store: their bytes, `padded`, one after the other; id i is store[starts[i] : starts[i + 1]].
    """
    slots = 256
    while slots < 4 * starts.size:
        slots *= 2
    table = free_slots(3 * slots).reshape(slots, 3)
    for i in range(starts.size - 1):
        start, end = starts[i], starts[i + 1]
        if end > start:
            slot = hash_bytes(store, start, end) & (slots - 1)
            while table[slot, 0] != FREE:
                slot = (slot + 1) & (slots - 1)
            table[slot, 0], table[slot, 1], table[slot, 2] = start, end - start, i
    return table


@njit(cache=True, nogil=True)
def _whole_word(text, at, length, whole, store):
    """The id of the token with the bytes text[at : at + length], or -1."""
    slot = hash_bytes(text, at, at + length) & (whole.shape[0] - 1)
    while whole[slot, 0] != FREE:
        if whole[slot, 1] == length and same_bytes(text, at, store, whole[slot, 0], length):
            return whole[slot, 2]
        slot = (slot + 1) & (whole.shape[0] - 1)
    return -1


@njit(cache=True, nogil=True)
def _spell(ids, n, least, spelled):
    """Replace symbols from `least` on in ids[:n] by the ids that spell them; return the number."""
    size = 0
    for i in range(n):
        size += 1 if ids[i] < least else spelled[ids[i] - least, 0]
    if size < n:  # some become no id, and none becomes more than one
        kept = 0
        for i in range(n):
            symbol = ids[i]
            if symbol < least or spelled[symbol - least, 0]:
                ids[kept] = symbol if symbol < least else spelled[symbol - least, 1]
                kept += 1
        return size
    to = size
    for i in range(n - 1, -1, -1):  # from the end, where there is room
        symbol = ids[i]
        if symbol < least:
            to -= 1
            ids[to] = symbol
        else:
            for k in range(spelled[symbol - least, 0], 0, -1):
                to -= 1
                ids[to] = spelled[symbol - least, k]
    return size


LONG_WORD = 48  # bytes; near the length where `_merge_short` and `_merge_long` take the same time
REMEMBERED = 1 << 16  # slots for words, 2.6 MB in all
TRIES = 8  # slots to look at before we count a word as not remembered


class Rules(NamedTuple):
    """The other differences between vocabularies. A table without rows isn't used.

    byte_ids int32 (256,): the first symbol of each byte, -1 for none. classes, scanner: arguments
    of `next_end`. whole int64 (slots, 3): tokens that are a whole word, as (start, length, id)
    with their bytes in `store`, padded uint8. spelled int32 (S, 5): the ids that replace symbol
    `least` + s, which isn't a token: a count and up to four ids.
    """

    byte_ids: np.ndarray = ID_FROM_BYTE
    classes: np.ndarray = CHARACTER_CLASSES
    scanner: int = GPT2
    whole: np.ndarray = np.empty((0, 3), np.int64)
    store: np.ndarray = padded(b"")
    least: int = 0
    spelled: np.ndarray = np.empty((0, 5), np.int32)


@njit(cache=True, nogil=True)
def _merge_word(text, at, length, ids, table, rules, made):
    """Write the ids of text[at : at + length] to the beginning of `ids`; return their number."""
    if rules.whole.shape[0] > 0:
        known = _whole_word(text, at, length, rules.whole, rules.store)
        if known >= 0:
            ids[0] = known
            return 1
    n = 0
    for i in range(length):
        symbol = rules.byte_ids[text[at + i]]
        if symbol >= 0:
            ids[n] = symbol
            n += 1
    if n <= LONG_WORD:
        n = _merge_short(ids, n, table, made)
    else:
        n = _merge_long(ids, n, table)
    return _spell(ids, n, rules.least, rules.spelled) if rules.spelled.shape[0] > 0 else n


@njit(cache=True, nogil=True)
def _encode(text, table, rules):
    """The ids, int32, of the words of `text` (padded)."""
    out, made = np.empty(text.size, np.int32), np.empty(LONG_WORD, np.int64)
    slots = 256
    while slots < text.size and slots < REMEMBERED:
        slots *= 2
    # a row: first eight bytes, length, start; its only id, or the place of its ids; their number
    memory = free_slots(5 * slots).reshape(slots, 5)
    at, n, classes, scanner = 0, 0, rules.classes, rules.scanner
    while at < text.size:
        end = next_end(text, at, classes, scanner)
        length, eight = end - at, eight_bytes(text, at, end)
        slot = hash_bytes(text, at, end) & (slots - 1)
        tries, hit = 0, False
        while tries < TRIES and memory[slot, 1] != FREE:
            if memory[slot, 0] == eight and memory[slot, 1] == length:
                hit = length <= 8 or same_bytes(text, memory[slot, 2], text, at, length)
            if hit:
                break
            slot = (slot + 1) & (slots - 1)
            tries += 1
        if hit:
            first, count = memory[slot, 3], memory[slot, 4]
            if count == 1:
                out[n] = first
            else:
                for i in range(count):
                    out[n + i] = out[first + i]
        else:
            count = _merge_word(text, at, length, out[n:], table, rules, made)
            if tries < TRIES:
                memory[slot, 0], memory[slot, 1], memory[slot, 2] = eight, length, at
                memory[slot, 3], memory[slot, 4] = out[n] if count == 1 else n, count
        at, n = end, n + count
    return out[:n]


OURS = Rules()  # GPT-2's words, and the bytes in its order


def encode_words(text: bytes, table: np.ndarray, rules: Rules = OURS) -> np.ndarray:
    """The ids, int32 (n,), of the words of `text` (bytes), with a `table` made by `merge_table`."""
    ids = _encode(padded(text), table, rules)
    return ids.copy()  # because `ids` keeps 4 bytes for each byte of the text
