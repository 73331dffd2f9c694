# Made from book/b-a-tokenizer-at-full-speed.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-others
"""Prepares a text before it is split into words: added tokens, NFC, a space before it.

Leaves out merging (encode.py).
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator

import numpy as np

from nanoeuler.tokenizer.encode import Rules
from nanoeuler.tokenizer.pretokenizer import whole_words
from nanoeuler.tokenizer.scanners import last_cut_of
from nanoeuler.tokenizer.vocabulary import Added, Vocabulary

BLANK = "\u2581".encode()  # SentencePiece's sign for a space
_WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


def composed(text: bytes) -> bytes:
    """`text` in Unicode's normal form C; bytes that aren't valid UTF-8 stay."""
    if text.isascii():
        return text
    characters = text.decode("utf-8", "surrogateescape")
    return unicodedata.normalize("NFC", characters).encode("utf-8", "surrogateescape")


class Segments:
    """Splits texts at added tokens, and changes the segments between them by a vocabulary's rules.

    `prefix` decides where a space goes: before a text and after a special token ("text", as in
    SentencePiece), before each segment ("segment"), or, unless there is one already, before the
    first segment ("first") or each segment ("always").
    """

    def __init__(self, vocabulary: Vocabulary, rules: Rules):
        self._vocabulary, self._rules = vocabulary, rules
        by_kind: dict[bool, dict[bytes, Added]] = {False: {}, True: {}}
        for token in vocabulary.added:
            name = token.content.encode()
            if token.normalized:
                name = self._changed(name, vocabulary.prefix == "segment")
            by_kind[token.normalized][name] = token
        self._raw, self._normal = (_Names(by_kind[kind]) for kind in (False, True))
        self.plain = not (vocabulary.nfc or vocabulary.characters) and not any(
            not token.special for token in vocabulary.added
        )
        loose = [t for t in vocabulary.added if not t.special]
        self._whole = any(t.lstrip or t.rstrip or t.single_word for t in loose) or (
            vocabulary.unknown is not None and not vocabulary.fallback
        )
        self._loose = [t.content.encode() for t in loose]
        self._loose += [self._changed(name, False) for name in self._loose]

    def _changed(self, text: bytes, space: bool) -> bytes:
        """`text` as it is merged, with a space before it or not."""
        text = composed(text) if self._vocabulary.nfc else text
        if self._vocabulary.characters:
            text = text.replace(BLANK, b" ")
        return b" " + text if space else text

    def parts(self, text: bytes, special: bool, begins: bool) -> Iterator[bytes | int]:
        """The ids of the added tokens of `text`, and the texts between them, ready to be merged.

        special: whether names of special tokens count. begins: whether a text begins here.
        """
        first, after = True, begins  # after: whether "text" puts a space here
        for part in self._raw.cut(text, special):
            if isinstance(part, Added):
                if after and first and not part.special and self._vocabulary.prefix == "text":
                    yield b" "
                yield part.id
                first, after = False, part.special
            elif part:
                late = self._vocabulary.prefix in ("first", "always")  # after all names are found
                changed = self._changed(part, not late and self._spaced(part, first, begins, after))
                for piece in self._normal.cut(changed, special):
                    if isinstance(piece, Added):
                        yield piece.id
                    elif piece:
                        yield b" " * (late and self._spaced(piece, first, begins, after)) + piece
                    first = first and not piece
                first, after = False, False

    def _spaced(self, part: bytes, first: bool, begins: bool, after: bool) -> bool:
        """Whether this segment gets a space before it."""
        prefix, has = self._vocabulary.prefix, part[:1] == b" " or part[:3] == BLANK
        if prefix == "text":
            return after
        if prefix == "segment":
            return begins or not first
        if prefix == "first":
            return begins and first and not has
        return prefix == "always" and (begins or not first) and not has

    def fused(self, ids: np.ndarray) -> np.ndarray:
        """`ids` with one unknown token in place of several in a row, if the vocabulary says so."""
        unknown = self._vocabulary.unknown
        if not self._whole or unknown is None or not self._vocabulary.fuse_unknown:
            return ids
        same = ids == unknown
        return ids[~same | ~np.concatenate([[False], same[:-1]])]

    def pieces(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Regroup the `chunks` of a text into pieces that can go through `parts` one by one."""
        if self.plain and not self._rules.scanner:
            return whole_words(chunks)
        return whole_words(chunks, self._cut)

    def _cut(self, text: bytes) -> int:
        """The last place where `text` can be cut, whatever is before and after, or 0 for none."""
        if self._whole:
            return 0
        room, array = max(map(len, self._loose), default=0), np.frombuffer(text, np.uint8)
        rules = self._rules.classes, self._rules.scanner, self._vocabulary.nfc
        at = last_cut_of(array[: max(len(text) - room, 0)], *rules)
        while at and not self._free(text, at):
            at = last_cut_of(array[: at + 3], *rules)
        return at

    def _free(self, text: bytes, at: int) -> bool:
        """Whether no name crosses a cut, and no sign for a space is next to it."""
        if self._vocabulary.characters and BLANK in (text[at - 3 : at], text[at : at + 3]):
            return False
        return not any(
            name in text[max(at - len(name) + 1, 0) : at + len(name) - 1] for name in self._loose
        )


# %% sec-tokenizer-others
class _Names:
    """Finds names in a text, from the left, and the longest if several begin at one place."""

    def __init__(self, names: dict[bytes, Added]):
        self._names = names
        longest = sorted(names, key=len, reverse=True)
        self._search = re.compile(b"|".join(map(re.escape, longest))) if names else None
        self._loose = [name for name, token in names.items() if not token.special]

    def cut(self, text: bytes, special: bool) -> Iterator[bytes | Added]:
        """The texts between the names and the tokens of the names, in order."""
        start, wanted = 0, self._names if special else self._loose
        if self._search and any(name in text for name in wanted):
            for found in self._search.finditer(text):
                token, (begin, end) = self._names[found[0]], found.span()
                if token.special > special or begin < start:
                    continue
                if token.single_word and not _alone(text, begin, end):
                    continue
                if token.lstrip:
                    before = text[start:begin].decode("utf-8", "surrogateescape").rstrip(_WHITE)
                    begin = start + len(before.encode("utf-8", "surrogateescape"))
                if token.rstrip:
                    after = text[end:].decode("utf-8", "surrogateescape").lstrip(_WHITE)
                    end = len(text) - len(after.encode("utf-8", "surrogateescape"))
                yield text[start:begin]
                yield token
                start = end
        yield text[start:]


def _alone(text: bytes, begin: int, end: int) -> bool:
    """Whether text[begin:end] has no letter, number or underscore on either side."""
    before = text[max(begin - 4, 0) : begin].decode("utf-8", "ignore")[-1:]
    after = text[end : end + 4].decode("utf-8", "ignore")[:1]
    return not re.match(r"\w", before) and not re.match(r"\w", after)
