# Made from book/b-a-tokenizer-at-full-speed.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-class
"""The tokenizer: text to ids and back by byte-pair encoding, and its hash.

Leaves out the format of its file (file.py) and the rules of other people's vocabularies
(vocabulary.py, segments.py). The ids of our vocabularies are the 256 bytes in GPT-2's order, the
merges, and last the special tokens, which only a program can place in a sequence, never a text.
"""

import codecs
import contextlib
import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np

from nanoeuler.errors import UserError
from nanoeuler.files import replacing
from nanoeuler.measurements import cores
from nanoeuler.tokenizer.encode import BYTE_FROM_ID, encode_words
from nanoeuler.tokenizer.file import our_parts, parsed_json, read_file, spelt_bytes, tokenizer_json
from nanoeuler.tokenizer.huggingface import json_of, vocabulary_of
from nanoeuler.tokenizer.learn import learn_merges
from nanoeuler.tokenizer.pretokenizer import MAX_WORD, whole_words
from nanoeuler.tokenizer.segments import Segments
from nanoeuler.tokenizer.tiktoken import GPT2_SPECIAL_TOKENS, is_gpt2, merges_from_ranks
from nanoeuler.tokenizer.vocabulary import MAX_VOCAB, Added, Vocabulary

Text = str | bytes | bytearray | memoryview  # types we can encode; bytes needn't be valid UTF-8

# The end of a document; the two speakers of a chat; the end of a speaker's turn.
SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")


def utf8(text: Text) -> bytes:
    """The bytes of `text`: UTF-8 for a str; bytes are returned as they are, valid or not."""
    if isinstance(text, str):
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"character {error.start} of the text is half of a surrogate pair, which UTF-8 "
                "cannot hold: read the text again with encoding='utf-8', or pass its bytes"
            ) from None
    if isinstance(text, Text):
        return bytes(text)
    raise UserError(f"expected text as str or bytes, got {type(text).__name__}")


@contextlib.contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Switch off garbage collection, which would search a hundred thousand lists that all stay."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _spelled(merges: np.ndarray) -> list[bytes]:
    """The bytes of each id: the 256 bytes, and what `merges`, int32 (M, 2), make."""
    tokens = [bytes([byte]) for byte in BYTE_FROM_ID]
    for m, (a, b) in enumerate(merges.tolist()):
        assert 0 <= a < 256 + m and 0 <= b < 256 + m, f"merge {m} joins {a} and {b}"
        tokens.append(tokens[a] + tokens[b])
    if len(set(tokens)) < len(tokens):
        raise UserError("two merges make the same bytes, as no training does: train the tokenizer "
                        "again")  # fmt: skip
    return tokens


def _names_in_bytes(names: list[str], ordinary: list[bytes]) -> list[bytes]:
    """The bytes of special tokens, which must differ from each other and from all `ordinary`."""
    for name in names:
        if not isinstance(name, str):
            raise UserError(f"expected special tokens as str, got {type(name).__name__}")
    marks, tokens = {spelt_bytes(name) for name in names}, [utf8(name) for name in names]
    known = {*ordinary}
    if len({*known, *tokens}) < len(known) + len(tokens) or b"" in tokens or known & marks:
        raise UserError(
            "expected special tokens that aren't empty and differ from each other, from the bytes "
            f"of all tokens and from their names in a file; got {str(names)[1:-1]:.200}"
        )
    return tokens


def _our_vocabulary(merges: np.ndarray, names: list[str]) -> Vocabulary:
    """The vocabulary of `merges`, int32 (M, 2), and of special tokens with these names."""
    tokens, number = _spelled(merges), np.arange(len(merges))
    added = tuple(Added(name, len(tokens) + i) for i, name in enumerate(names))
    tokens += _names_in_bytes(names, tokens)
    if len(tokens) > MAX_VOCAB:
        raise UserError(f"expected at most {MAX_VOCAB} ids, got {len(tokens)}")
    return Vocabulary(tokens, merges, number + 256, number, added, ours=True)


class Tokenizer:
    """Byte-pair encoding, of bytes within GPT-2's words or by the rules of another `vocabulary`.

    Make one with `train` or `load`, or from a vocabulary with `of`. merges int32 (M, 2): in our
    vocabularies, merge m makes id 256 + m from two smaller ids. `tokens` lists the bytes of each
    id, `special` maps special tokens to their ids. `begin` and `end` are the ids that the model
    expects around a whole text; `encode` leaves them to the caller.
    """

    def __init__(
        self,
        merges: np.ndarray | Sequence[Sequence[int]],
        special_tokens: Iterable[str] = SPECIAL_TOKENS,
    ):
        merges = np.array(merges, np.int32).reshape(-1, 2)
        self._take(_our_vocabulary(merges, list(special_tokens)))

    def _take(self, vocabulary: Vocabulary) -> None:
        self.vocabulary, self.merges, self.tokens = vocabulary, vocabulary.merges, vocabulary.tokens
        self.special = {token.content: token.id for token in vocabulary.added if token.special}
        self.begin, self.end, self.template = vocabulary.begin, vocabulary.end, vocabulary.template
        self._table, self._rules = vocabulary.tables()
        self._segments = Segments(vocabulary, self._rules)

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> "Tokenizer":
        """The tokenizer of any vocabulary."""
        tokenizer = cls.__new__(cls)
        tokenizer._take(vocabulary)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of ids; in ours 256 bytes, the merges, the special tokens."""
        return len(self.tokens)

    @cached_property
    def json(self) -> str:
        """The text of its file, tokenizer.json."""
        if self.vocabulary.ours:
            return tokenizer_json(self.merges.tolist(), self.special)
        return json_of(self.vocabulary)

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of the file, in hexadecimal: one content, one hash."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json to `path`, whole or not at all."""
        with replacing(path) as temporary:
            temporary.write_bytes(self.json.encode())

    def decode(self, ids: np.ndarray | Sequence[int]) -> bytes:
        """The bytes of `ids`, a row of integers; special tokens become their names.

        Removes the space that encoding puts before a text, if it does.
        """
        return b"".join(self.stream().bytes_of(ids))

    def decode_text(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of `ids`; bytes that aren't valid UTF-8 become U+FFFD."""
        return self.decode(ids).decode("utf-8", errors="replace")

    def stream(self, begins: bool = True) -> "Stream":
        """A decoder for ids that come one at a time; begins: whether they begin a text."""
        return Stream(self, begins)

    def encode(
        self, text: Text, special: bool = False, begins: bool = True, guard: str = ""
    ) -> np.ndarray:
        """The ids of `text` (str or bytes), int32 (n,), without special tokens.

        special: turn names of special tokens in the text into their ids, as in the output of a
        chat template. A name with the character `guard` in it stays text, and the guard goes.
        begins: whether `text` begins a whole text, where SentencePiece puts a space.
        """
        text = utf8(text)
        if len(text) > MAX_WORD and not special:  # a shorter one can have no word that is too long
            pieces = list(self._segments.pieces([text]))
        elif self._segments.plain and not special:
            return encode_words(text, self._table, self._rules)
        else:
            pieces = [text]
        ids = [self._ids(part, special, begins and not n, guard) for n, part in enumerate(pieces)]
        return np.concatenate(ids)

    def _ids(self, text: bytes, special: bool, begins: bool, guard: str = "") -> np.ndarray:
        """The ids of a piece of a text."""
        if self._segments.plain and not special:
            return encode_words(text, self._table, self._rules)
        rows = [np.empty(0, np.int32)]
        for part in self._segments.parts(text, special, begins):
            if isinstance(part, int):
                rows.append(np.array([part], np.int32))
            else:
                part = part.replace(guard.encode(), b"") if guard else part
                cut = len(part) > MAX_WORD  # the text of `special` is whole: a cut may be in a name
                for piece in self._segments.pieces([part]) if cut else [part]:
                    rows.append(encode_words(piece, self._table, self._rules))
        return self._segments.fused(np.concatenate(rows))

    def encode_batch(
        self, texts: Iterable[Text], threads: int | None = None
    ) -> list[np.ndarray]:
        """The ids of each of `texts`, a list of arrays, made by `threads` (None: one per core)."""
        with ThreadPoolExecutor(threads or cores()) as pool:
            return list(pool.map(self.encode, texts))

    def encode_stream(self, chunks: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yield the ids of a text in `chunks` of bytes, holding a chunk and twice a word.

        The concatenated arrays equal `encode` of the whole text.
        """
        for n, piece in enumerate(self._segments.pieces(chunks)):
            yield self._ids(piece, False, n == 0)

    @classmethod
    def train(
        cls,
        texts: Text | Iterable[Text],
        vocab_size: int,
        special_tokens: Iterable[str] = SPECIAL_TOKENS,
        progress: Callable[[int], object] | None = None,
    ) -> "Tokenizer":
        """Learn merges from `texts` until there are `vocab_size` ids in all.

        texts: one text (str or bytes) or an iterable of them, which is read once and not kept.
        Words end where a text ends. progress(merges made) is called now and then.
        """
        special_tokens = tuple(special_tokens)  # used twice, and may be a generator
        least = cls((), special_tokens).vocab_size  # also refuses invalid names
        wanted = _checked_size(vocab_size, least)
        if isinstance(texts, Text) or not isinstance(texts, Iterable):
            texts = [texts]
        pieces = (piece for text in texts for piece in whole_words([utf8(text)]))
        merges = learn_merges(pieces, wanted, progress)
        return cls(_enough(merges, wanted, least), special_tokens)

    @classmethod
    def load(cls, path: str | Path, known: str = "") -> "Tokenizer":
        """Read a tokenizer.json of `save` or of another program, or GPT-2's file of ranks.

        known: the hash of the tokenizer that was saved there. If it equals the file's digest, we
        don't compute it again.
        """
        text = read_file(path)
        if is_gpt2(text):
            return cls(merges_from_ranks(text), GPT2_SPECIAL_TOKENS)
        with _collecting_nothing():
            content = parsed_json(text, path)
            ours = our_parts(content)
            made = cls(*ours) if ours else cls.of(vocabulary_of(content, str(path)))
        if known and hashlib.sha256(text).hexdigest() == known:
            made.__dict__["hash"] = known
        return made


# %% sec-tokenizer-class
def _row_of_ids(ids: np.ndarray | Sequence[int], vocab_size: int) -> np.ndarray:
    """`ids` as an array; UserError unless they are a row of integers from 0 to vocab_size - 1."""
    try:
        ids = np.asarray(ids)
    except ValueError:  # rows of different lengths
        raise UserError("expected a row of integer ids, got rows of several lengths") from None
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(f"expected a row of integer ids, got {ids.dtype} of shape {ids.shape}")
    for i in (int(ids.min()), int(ids.max())):
        if not 0 <= i < vocab_size:
            raise UserError(
                f"id {i} is not in this vocabulary of {vocab_size}: "
                "the ids come from another tokenizer"
            )
    return ids


class Stream:
    """Text from ids that come one at a time, never half a character. From `Tokenizer.stream`."""

    def __init__(self, tokenizer: Tokenizer, begins: bool = True):
        self._tokens, self._marks = tokenizer.tokens, {*tokenizer.special.values()}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._again = self._begins = begins and bool(tokenizer.vocabulary.prefix)

    def bytes_of(self, ids: np.ndarray | Sequence[int]) -> list[bytes]:
        """The bytes of each of `ids`, which go on from those before them."""
        row = _row_of_ids(ids, len(self._tokens)).tolist()
        parts = [self._tokens[i] for i in row]
        for n, i in enumerate(row):
            if not self._begins:
                break
            if i not in self._marks:  # SentencePiece's space before the text
                parts[n], self._begins = parts[n].removeprefix(b" "), False
        return parts

    def feed(self, i: int) -> str:
        """The characters that id `i` completes, possibly none."""
        return self._decoder.decode(b"".join(self.bytes_of([i])))

    def flush(self) -> str:
        """The bytes held back, as U+FFFD; the stream starts again."""
        self._begins = self._again
        return self._decoder.decode(b"", final=True)


def _checked_size(vocab_size: int, least: int) -> int:
    """The number of merges in a vocabulary of `vocab_size`, `least` of which aren't merges."""
    if not isinstance(vocab_size, int) or not least <= vocab_size <= MAX_VOCAB:
        raise UserError(
            f"expected a vocabulary size from {least} (256 bytes and {least - 256} special "
            f"tokens) to {MAX_VOCAB}, got {vocab_size!r}"
        )
    return vocab_size - least


def _enough(merges: np.ndarray, wanted: int, least: int) -> np.ndarray:
    """`merges`; UserError if there are fewer than `wanted`."""
    if len(merges) < wanted:
        raise UserError(
            f"expected text with {wanted} pairs to merge, but this text has "
            f"{len(merges)}: use more text, or a vocabulary size of at most "
            f"{least + len(merges)}"
        )
    return merges
