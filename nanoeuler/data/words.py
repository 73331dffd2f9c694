# Made from book/20a-a-corpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-corpus-words
"""Paragraphs by their words: hashes, runs of 13 words that are held out too, languages.

Leaves out what happens to a copy (`cleaning`, `corpus`). A word is a run of letters and digits,
without ASCII's case; hashes are int64, 0 for none.
"""

from collections.abc import Iterable

import numpy as np

from nanoeuler.jit import njit

RUN = 13  # words: the length of a run, and of the shortest paragraph that can be a copy
_WORD = 0x100000001B3  # FNV's prime, which multiplies a word's hash for each byte
_BASE = 0x5851F42D4C957F2D  # P, the odd multiplier of Knuth's MMIX, for words in a run
_MIX = 0x2545F4914F6CDD1D  # an odd number, xorshift64*'s


@njit(cache=True, nogil=True, inline="always")
def mixed(h: int) -> int:
    """`h` with every bit spread over all of them; never 0."""
    h = (h ^ ((h >> 32) & 0xFFFFFFFF)) * _MIX
    h = (h ^ ((h >> 29) & 0x7FFFFFFFF)) * _MIX
    h ^= (h >> 32) & 0xFFFFFFFF
    return h if h != 0 else 1


def _folded():
    """uint8 (256,): the byte that each one counts as in a word; 0 if it is in none."""
    fold = np.zeros(256, np.uint8)
    fold[0xC3:] = np.arange(0xC3, 256)
    fold[0x80:0xC0] = np.arange(0x80, 0xC0)  # these go on with a character
    fold[0xE2] = 0
    for low, high in ((b"0", b"9"), (b"a", b"z"), (b"A", b"Z")):
        codes = np.arange(low[0], high[0] + 1)
        fold[codes] = codes | 32 if low == b"A" else codes
    return fold


FOLD = _folded()  # for words_of and survey, which take it as an argument


@njit(cache=True, nogil=True)
def words_of(text: np.ndarray, starts: np.ndarray, fold: np.ndarray) -> tuple:
    """The words of paragraphs `starts` (p + 1,) of `text`: (hashes, firsts).

    hashes int64 (w,); those of paragraph i are hashes[firsts[i] : firsts[i + 1]].
    """
    hashes, firsts = np.empty(text.size // 2 + 2, np.int64), np.zeros(starts.size, np.int64)
    n, h, one = 0, 0, np.uint64(1)  # an unsigned place in an array is never counted from its end
    for p in range(starts.size - 1):
        at, end = np.uint64(starts[p]), np.uint64(starts[p + 1])
        while at < end:
            b = text[at]
            c = fold[b]
            if c != 0:
                h = (h ^ c) * _WORD
                at += one
            else:
                hashes[n] = h ^ ((h >> 32) & 0xFFFFFFFF)
                n += h != 0
                h = 0
                at += np.uint64(3) if b == 0xE2 else np.uint64(2) if b == 0xC2 else one
        hashes[n] = h ^ ((h >> 32) & 0xFFFFFFFF)
        n += h != 0
        h = 0
        firsts[p + 1] = n
    return hashes[:n], firsts


@njit(cache=True, nogil=True)
def slot_of(table: np.ndarray, key: int) -> int:
    """The slot of `table`, int64 (a power of two,), that holds `key`, or the free one for it."""
    slot = key & (table.size - 1)
    while table[slot] != 0 and table[slot] != key:
        slot = (slot + 1) & (table.size - 1)
    return slot


@njit(cache=True, nogil=True)
def add_all(table: np.ndarray, keys: np.ndarray) -> int:
    """Put keys, none 0, into a table with room for them; return how many were new."""
    new = 0
    for key in keys:
        slot = slot_of(table, key)
        new += table[slot] == 0
        table[slot] = key
    return new


def table_for(keys: np.ndarray) -> np.ndarray:
    """A table that holds `keys`, int64 (n,), at most two thirds full."""
    table = np.zeros(1 << max(8, (len(keys) + len(keys) // 2).bit_length()), np.int64)
    add_all(table, keys)
    return table


@njit(cache=True, nogil=True)
def _set_bits(bits, keys):
    for key in keys:
        at = (key >> 17) & (64 * bits.size - 1)
        bits[at >> 6] |= 1 << (at & 63)


def bits_for(keys: np.ndarray) -> np.ndarray:
    """A Bloom filter, int64 (words,): each of `keys` sets one bit, of at least 8 for each key."""
    bits = np.zeros(1 << max(4, (len(keys) // 8).bit_length()), np.int64)
    _set_bits(bits, keys)
    return bits


@njit(cache=True, nogil=True)
def _found(keys, table, bits):
    """The places in `keys` of those that `table`, and so `bits`, holds: int64 (f,)."""
    places, n = np.empty(keys.size + 1, np.int64), 0
    for i in range(keys.size):  # no branch: the processor asks for many bits at once
        at = (keys[i] >> 17) & (64 * bits.size - 1)
        places[n] = i
        n += (bits[at >> 6] >> (at & 63)) & 1
    f = 0
    for i in places[:n]:
        places[f] = i
        f += table[slot_of(table, keys[i])] == keys[i]
    return places[:f]


# The commonest words of running text that need no sign beyond ASCII.
FUNCTION_WORDS = {
    "en": "the of and to a in that he was it his i with as had for you she not her on at be is",
    "de": "der die und in zu den das nicht von sie ist des sich mit dem er es ein ich auf so eine"
    " war aber",
    "fr": "de la le et les des en un du une que est dans qui il au pour pas sur se ne par plus je",
    "es": "de la que el en y a los se del las un por con no una su para es al lo como si era",
    "it": "di e che la il un a per in una non sono mi si lo ma con ha del da le al gli era",
    "nl": "de en van het een in is dat op te zijn met voor niet aan er om ook als maar dan hij ik"
    " was",
    "pt": "de a o que e do da em um para com uma os no se na por mais as dos como mas ao ele",
    "la": "et in est non ad ut cum quae qui sed si quod ex per esse hoc ab atque nec sunt quam aut"
    " de etiam",
}
LANGUAGES = tuple(FUNCTION_WORDS)  # those that we recognize, in the order of survey's counts


_SLOTS = 1 << 12


def _owners():
    """(owners, numbers, shift, members): the hash and the number of the function word in each slot,
    the shift with which no two words share a slot, and in members, int64 (words, L), whose it is.
    """
    words = sorted({word for line in FUNCTION_WORDS.values() for word in line.split()})
    lengths = [len(word) for word in words]
    text, starts = "".join(words).encode(), np.cumsum([0, *lengths])
    hashes, _ = words_of(np.frombuffer(text, np.uint8), starts, FOLD)
    shift = next(s for s in range(52) if len({*(hashes >> s & (_SLOTS - 1))}) == len(words))
    owners, numbers = np.zeros(_SLOTS, np.int64), np.full(_SLOTS, len(words), np.int64)
    owners[hashes >> shift & (_SLOTS - 1)] = hashes
    numbers[hashes >> shift & (_SLOTS - 1)] = range(len(words))
    members = np.array([[word in line.split() for line in FUNCTION_WORDS.values()]
                        for word in words], np.int64)  # fmt: skip
    return owners, numbers, shift, members


@njit(cache=True, nogil=True)
def _spoken(hashes, functions):
    """How many of the words with these hashes are function words of each language: int64 (L,)."""
    owners, numbers, shift, members = functions
    counts = np.zeros(members.shape[0] + 1, np.int64)
    for h in hashes:
        slot = (h >> shift) & (_SLOTS - 1)
        counts[numbers[slot] if owners[slot] == h else members.shape[0]] += 1
    languages = np.zeros(members.shape[1], np.int64)
    for word in range(members.shape[0]):
        for language in range(languages.size):
            languages[language] += counts[word] * members[word, language]
    return languages


_POWER = pow(_BASE, RUN, 1 << 64)
_POWER -= (_POWER >> 63) << 64  # as an int64


@njit(cache=True, nogil=True)
def runs_of(hashes: np.ndarray, firsts: np.ndarray) -> tuple:
    """(keys, begins): the runs of 13 words within paragraphs, from what `words_of` gives.

    keys int64 (r,), none 0; those of paragraph i are keys[begins[i] : begins[i + 1]].
    """
    keys, begins, n = np.empty(hashes.size, np.int64), np.zeros(firsts.size, np.int64), 0
    for p in range(firsts.size - 1):
        words, run = hashes[firsts[p] : firsts[p + 1]], 0
        for i in range(min(RUN - 1, words.size)):
            run = run * _BASE + words[i]
        for i in range(RUN - 1, words.size):
            run = run * _BASE + words[i]
            if i >= RUN:
                run -= words[i - RUN] * _POWER
            keys[n] = mixed(run)
            n += 1
        begins[p + 1] = n
    return keys[:n], begins


@njit(cache=True, nogil=True)
def survey(
    text: np.ndarray, starts: np.ndarray, fold: np.ndarray, functions: tuple, held_out: tuple
) -> tuple:
    """The words of paragraphs `starts` (p + 1,) of `text`: (hashes, words, runs, languages).

    hashes int64 (p,), none 0; words int64 (p,), how many; runs int64 (p,), how many of their runs
    are in `held_out`, a (table, bits); languages int64 (L,): function words of each.
    """
    table, bits = held_out
    said, firsts = words_of(text, starts, fold)
    hashes, words = np.empty(firsts.size - 1, np.int64), firsts[1:] - firsts[:-1]
    for p in range(hashes.size):
        total = 0
        for h in said[firsts[p] : firsts[p + 1]]:
            total = total * _BASE + h
        hashes[p] = mixed(total)
    runs = np.zeros(hashes.size, np.int64)
    if table.size > 0:
        keys, begins = runs_of(said, firsts)
        p = 0
        for i in _found(keys, table, bits):
            while begins[p + 1] <= i:
                p += 1
            runs[p] += 1
    return hashes, words, runs, _spoken(said, functions)


FUNCTIONS = _owners()  # the function words, as survey takes them
NOTHING = np.zeros(0, np.int64), np.zeros(1, np.int64)  # held out


def held_out_of(runs: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(table, bits) of the runs of everything held out, for `survey`."""
    keys = np.concatenate([np.zeros(0, np.int64), *runs])
    return (table_for(keys), bits_for(keys)) if len(keys) else NOTHING
