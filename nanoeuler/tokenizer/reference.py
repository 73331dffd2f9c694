# Made from book/02-tokens.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-hand
"""Byte-pair encoding as one would write it first, in plain Python.

It is slow, and has neither special tokens nor a file format. The fast tokenizer.py has both,
and is compared with this module. Ids below 256 are the bytes; 256 + m is the id that merge m makes.
"""

import heapq
import re
from collections import Counter, defaultdict
from itertools import pairwise


def merged(ids: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """`ids` with each `pair`, from left to right, replaced by `new`."""
    out, i = [], 0
    while i < len(ids):
        if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


# %% sec-tokenizer-words
# GPT-2's pattern (Radford and others 2019), as near as Python's `re` comes to it.
WORD = re.compile(
    r"'(?:[sdmt]|ll|ve|re)"  # the end of an English contraction
    r"| ?[^\W\d_]+"  # letters: \w without the digits and the underscore
    r"| ?\d+"  # digits
    r"| ?(?:[^\s\w]|_)+"  # signs: all but white space and \w, plus _
    r"|\s+(?!\S)|\s+"  # white space, without its last character if a word follows
)


def split_words(text: str) -> list[bytes]:
    """The words of `text`, in order; together they are its UTF-8."""
    return [word.encode() for word in WORD.findall(text)]


# %% sec-tokenizer-incremental
def train_incremental(words: dict[bytes, int], wanted: int) -> list[tuple[int, int]]:
    """The first `wanted` merges of `words`, which maps each word, in bytes, to its count.

    There are fewer merges if no pair is left. See equation eq-tokenizer-update.
    """
    lines, times = [list(word) for word in words], list(words.values())
    counts: dict[tuple[int, int], int] = Counter()
    places: dict[tuple[int, int], set[int]] = defaultdict(set)  # the words that have or had a pair
    for w, ids in enumerate(lines):
        for pair in pairwise(ids):
            counts[pair] += times[w]
            places[pair].add(w)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    merges: list[tuple[int, int]] = []
    while heap and len(merges) < wanted:
        count, best = heapq.heappop(heap)
        if counts[best] != -count:  # outdated and too large: push the present count
            if counts[best] > 0:
                heapq.heappush(heap, (-counts[best], best))
            continue
        new, born = 256 + len(merges), set()
        merges.append(best)
        for w in places[best]:  # a word that no longer has the pair comes out as it was
            for pair in pairwise(lines[w]):
                counts[pair] -= times[w]
            lines[w] = merged(lines[w], best, new)
            for pair in pairwise(lines[w]):
                counts[pair] += times[w]
                if new in pair:  # it's never `best`, so `places[best]` stays unchanged
                    places[pair].add(w)
                    born.add(pair)
        for pair in born:  # other counts have only fallen: their entries are large enough
            heapq.heappush(heap, (-counts[pair], pair))
    return merges


# %% sec-tokenizer-encode
def encode_word(
    word: bytes | list[int], number: dict[tuple[int, int], int]
) -> list[int]:
    """The ids of one word (its bytes, or their ids); `number`: each known pair's merge m."""
    ids = list(word)
    while len(ids) > 1:
        best = min(pairwise(ids), key=lambda pair: number.get(pair, len(number)))
        if best not in number:  # no pair here has a merge
            break
        ids = merged(ids, best, 256 + number[best])
    return ids


# %% sec-tokenizer-plain
class PlainTokenizer:
    """Ids from text and text from ids; make one with `train`."""

    def __init__(self, merges: list[tuple[int, int]]):
        self.merges = merges
        self.number = {pair: m for m, pair in enumerate(merges)}
        self.tokens = [bytes([byte]) for byte in range(256)]
        for a, b in merges:
            self.tokens.append(self.tokens[a] + self.tokens[b])
        self.known: dict[bytes, list[int]] = {}

    @classmethod
    def train(cls, text: str, size: int) -> "PlainTokenizer":
        """A vocabulary of `size` ids, or fewer if `text` has no more pairs."""
        return cls(train_incremental(Counter(split_words(text)), size - 256))

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        ids: list[int] = []
        for word in split_words(text):
            if word not in self.known:
                self.known[word] = encode_word(word, self.number)
            ids += self.known[word]
        return ids

    def decode(self, ids: list[int]) -> bytes:
        """The bytes of `ids`, exactly; they need not be valid UTF-8."""
        return b"".join(self.tokens[i] for i in ids)
