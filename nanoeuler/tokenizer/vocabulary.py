# Made from book/b-a-tokenizer-at-full-speed.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-others
"""A vocabulary, ours or another's: its tokens, merges and rules, and the encoder's tables.

Leaves out the files that it is read from, and encoding (encode.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from nanoeuler.tokenizer.encode import ID_FROM_BYTE, Rules, merge_table, padded, whole_table
from nanoeuler.tokenizer.scanners import SCANNERS, SPANS

MAX_VOCAB = 1 << 20  # four times the largest vocabulary in use; a typing error is more likely


@dataclass(frozen=True)
class Added:
    """A token that we look for in a text, by its name, before anything is merged.

    special: only a program may place it. lstrip, rstrip: it swallows white space on that side.
    single_word: not within a word. normalized: looked for in the text after `nfc` and `prefix`.
    """

    content: str
    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A vocabulary of byte-level BPE, or with `characters` one of SentencePiece's kind.

    tokens: the bytes of each id, empty if an id is unused. merges int32 (M, 2): pairs of ids.
    made, ranks (M,): the id that each merge makes and its rank; the lowest rank is merged first.
    byte_ids int32 (256,): the token of each byte, -1 for none. scanner: one of SCANNERS. prefix:
    where to put a space, "text", "segment", "first" or "always" (see `Segments`).
    """

    tokens: list[bytes]
    merges: np.ndarray
    made: np.ndarray
    ranks: np.ndarray
    added: tuple[Added, ...] = ()
    byte_ids: np.ndarray = field(default_factory=lambda: ID_FROM_BYTE)
    scanner: str = "gpt2"
    nfc: bool = False
    ignore_merges: bool = False
    characters: bool = False
    prefix: str = ""
    unknown: int | None = None
    fuse_unknown: bool = True
    scores: tuple[float, ...] = ()
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    bos: int | None = None
    eos: int | None = None
    template: str = ""
    ours: bool = False

    @property
    def fallback(self) -> bool:
        """Whether a character that isn't a token becomes its bytes."""
        return self.characters and bool((self.byte_ids >= 0).all())

    def tables(self) -> tuple[np.ndarray, Rules]:
        """The table of merges and the rules, for `encode_words`."""
        if self.characters:
            return _character_tables(self)
        table = merge_table(self.merges, self.made, self.ranks)
        rules = Rules(self.byte_ids, scanner=SCANNERS.index(self.scanner))
        if self.ignore_merges:
            special = {token.id for token in self.added if token.special}
            words = [b"" if i in special else token for i, token in enumerate(self.tokens)]
            starts = np.cumsum([0, *map(len, words)])
            store = padded(b"".join(words))
            rules = rules._replace(whole=whole_table(store, starts), store=store)
        return table, rules


# %% sec-tokenizer-others
def _characters(vocabulary: Vocabulary) -> dict[bytes, int]:
    """The tokens that are one character, by their bytes."""
    bare = {*vocabulary.byte_ids.tolist(), vocabulary.unknown}
    bare |= {token.id for token in vocabulary.added if token.special}
    found = {}
    for i, token in enumerate(vocabulary.tokens):
        if 0 < len(token) <= 4 and i not in bare:
            try:
                if len(token.decode()) == 1:
                    found[token] = i
            except UnicodeDecodeError:
                continue
    return found


class _Symbols:
    """Symbols that aren't tokens (bytes, beginnings of characters), and the ids that spell them."""

    def __init__(self, vocabulary: Vocabulary):
        self.least, self.spelled = len(vocabulary.tokens), list[list[int]]()
        self._vocabulary = vocabulary

    def new(self, part: bytes) -> int:
        """A symbol for `part` of a character."""
        unknown = self._vocabulary.unknown
        if self._vocabulary.fallback:
            ids = [int(self._vocabulary.byte_ids[byte]) for byte in part]
        else:  # one for a character: for its first byte
            ids = [unknown] if unknown is not None and part[0] & 0xC0 != 0x80 else []
        self.spelled.append([len(ids), *ids, *[0] * (4 - len(ids))])
        return self.least + len(self.spelled) - 1


def _character_tables(vocabulary: Vocabulary) -> tuple[np.ndarray, Rules]:
    """The table of merges and the rules of a vocabulary of characters.

    Symbols begin as bytes. The first merges make characters of them, and all have rank 0.
    """
    symbols, merges, made = _Symbols(vocabulary), list[tuple[int, int]](), list[int]()
    known = _characters(vocabulary)
    for byte in range(256):
        if bytes([byte]) not in known:
            known[bytes([byte])] = symbols.new(bytes([byte]))
    for token in [token for token in known if len(token) > 1]:
        for size in range(2, len(token) + 1):
            part = token[:size]
            if part not in known:
                known[part] = symbols.new(part)
            pair = known[part[:-1]], known[part[-1:]]
            if size == len(token) or symbols.least <= known[part]:
                merges.append(pair)
                made.append(known[part])
    unique = dict(zip(merges, made, strict=True))
    table = merge_table(
        np.array([*unique, *vocabulary.merges.tolist()], np.int32).reshape(-1, 2),
        np.array([*unique.values(), *vocabulary.made.tolist()], np.int64),
        np.array([0] * len(unique) + (vocabulary.ranks + 1).tolist(), np.int64),
    )
    first = np.array([known[bytes([byte])] for byte in range(256)], np.int32)
    spelled = np.array(symbols.spelled, np.int32).reshape(-1, 5)
    joins = joined_bytes(vocabulary.tokens[i] for i in set(vocabulary.made.tolist()))
    return table, Rules(first, joins, SPANS, least=symbols.least, spelled=spelled)


def joined_bytes(tokens: Iterable[bytes]) -> np.ndarray:
    """joins[a << 8 | b], uint8 (65536,): 1 if b follows a in a token or continues a character."""
    joins = np.zeros((256, 256), np.uint8)
    joins[:, 0x80:0xC0] = 1
    for a, b in {pair for token in tokens for pair in pairwise(token)}:
        joins[a, b] = 1
    return joins.reshape(-1)
