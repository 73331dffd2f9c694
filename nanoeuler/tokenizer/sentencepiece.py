# Made from book/19b-other-peoples-tokenizers.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-their-sentencepiece
"""SentencePiece's models of the BPE kind: tokenizer.model, and llama2.c's tokenizer.bin.

The first is a protocol buffer, which is read here by hand. Leaves out unigram models, which merge
nothing, and normalization by a table of characters: both are refused by name.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.errors import UserError
from nanoeuler.tokenizer.vocabulary import MAX_VOCAB, Added, Vocabulary

# Kinds of pieces, by the numbers that SentencePiece and GGUF give them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class Piece(NamedTuple):
    """A piece: its text with "▁" for a space, its score, and its kind."""

    text: str
    score: float
    kind: int


def fields(data: bytes, source: str) -> Iterator[tuple[int, int | bytes]]:
    """Each field of a protocol buffer's message: its number and its value.

    A varint is an int; four and eight bytes, and what has a length, are bytes. UserError if cut.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at, source)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at, source)
            yield number, value
            continue
        if kind == 2:
            size, at = _varint(data, at, source)
        else:
            size = {1: 8, 5: 4}.get(kind, len(data))
        if size > len(data) - at or number == 0:
            raise UserError(f"{source}: expected SentencePiece's model, but it breaks off or is "
                            f"damaged at byte {at}: copy it again")  # fmt: skip
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int, source: str) -> tuple[int, int]:
    """The number whose bytes begin at `at`, seven bits in each, lowest first; and where it ends."""
    value = 0
    for n, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * n
        if byte < 0x80:
            return value, at + n + 1
    raise UserError(f"{source}: expected SentencePiece's model, but it breaks off or is damaged at "
                    f"byte {at}: copy it again")  # fmt: skip


def _message(data: int | bytes, source: str) -> dict[int, int | bytes]:
    """The fields of a message by their numbers; of one that comes twice the last."""
    if not isinstance(data, bytes):
        raise UserError(f"{source}: expected SentencePiece's model, but a message in it is a "
                        "number: copy it again")  # fmt: skip
    return dict(fields(data, source))


def _piece(data: int | bytes, source: str) -> Piece:
    """A piece from its message."""
    found = _message(data, source)
    text, score, kind = found.get(1, b""), found.get(2, b"\0\0\0\0"), found.get(3, NORMAL)
    try:
        if isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int):
            return Piece(text.decode(), struct.unpack("<f", score)[0], kind)
        raise ValueError("a field has another type")
    except (ValueError, struct.error):
        told = f"{source}: a piece is damaged: {text!r:.40}: copy the file again"
        raise UserError(told) from None


# Fields: of the model; of its trainer's and its normalizer's settings.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _SUFFIX, _BYTE_FALLBACK, _UNK, _BOS, _EOS = 3, 24, 35, 40, 41, 42
_NAME, _CHARSMAP, _DUMMY_PREFIX, _EXTRA_SPACES, _ESCAPE = 1, 2, 3, 4, 5
_TYPES = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}


def vocabulary_of_model(data: bytes, source: str) -> Vocabulary:
    """The vocabulary in the bytes of a tokenizer.model; `source`: what an error calls the file."""
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in fields(data, source):
        if number == _PIECE:
            pieces.append(_piece(value, source))
        elif number == _TRAINER:
            trainer = _message(value, source)
        elif number == _NORMALIZER:
            normalizer = _message(value, source)
    kind = trainer.get(_MODEL_TYPE, 1)
    if kind != 2:
        raise UserError(f"{source}: expected a SentencePiece model of type BPE, but it is "
                        f"{_TYPES.get(kind, 'unknown')}, for which we have no code"  # type: ignore
                        )  # fmt: skip
    name = normalizer.get(_NAME, b"identity")
    if normalizer.get(_CHARSMAP):
        raise UserError(f"{source}: it normalizes text by {name!r:.30}, for which we have no code: "
                        "expected identity")  # fmt: skip
    if normalizer.get(_EXTRA_SPACES, 1) or not normalizer.get(_ESCAPE, 1) or trainer.get(_SUFFIX):
        raise UserError(f"{source}: it removes spaces, keeps their sign or puts it behind words, "
                        "for which we have no code: expected Llama's settings")  # fmt: skip
    ends = {key: trainer.get(field, default) for key, field, default in
            (("unknown", _UNK, 0), ("bos", _BOS, 1), ("eos", _EOS, 2))}  # fmt: skip
    return vocabulary_of_pieces(
        pieces, source, prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
        fallback=bool(trainer.get(_BYTE_FALLBACK, 0)), **ends,
    )  # fmt: skip


def vocabulary_of_pieces(
    pieces: Sequence[Piece], source: str, *, prefix: bool, fallback: bool, **ends: Any
) -> Vocabulary:
    """The vocabulary of SentencePiece's pieces, the id of each being its place.

    prefix: whether a text gets a space before it; fallback: whether characters that are no piece
    become bytes. ends: `unknown`, `bos` and `eos`, ids, or -1 for none.
    """
    _check_pieces(pieces, source)
    tokens, added, byte_ids = list[bytes](), list[Added](), np.full(256, -1, np.int32)
    for i, piece in enumerate(pieces):
        text = "" if piece.kind == UNUSED else piece.text.replace("▁", " ")
        tokens.append(text.encode())
        if piece.kind == BYTE:
            byte = _byte_of(piece.text, source)
            byte_ids[byte], tokens[-1] = i, bytes([byte])
        elif piece.kind in (UNKNOWN, CONTROL, USER_DEFINED):
            special = piece.kind != USER_DEFINED
            tokens[-1] = piece.text.encode() if special else tokens[-1]
            added.append(Added(piece.text, i, special, normalized=not special))
    if fallback and (byte_ids < 0).any():
        raise UserError(f"{source}: expected a piece for each of the 256 bytes, to fall back on, "
                        f"but <0x{int(np.argmin(byte_ids)):02X}> is missing")  # fmt: skip
    if not fallback:
        byte_ids[:] = -1
    found = {key: int(i) if 0 <= i < len(pieces) else None for key, i in ends.items()}
    merges, made, ranks = merges_of_scores(pieces)
    bos = found.get("bos")
    return Vocabulary(
        tokens, merges, made, ranks, tuple(added), byte_ids, "spans", characters=True,
        prefix="text" if prefix else "", scores=tuple(piece.score for piece in pieces),
        begin=() if bos is None else (bos,), **found,
    )  # fmt: skip


def _byte_of(text: str, source: str) -> int:
    """The byte of a piece such as <0x0A>."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return int(text[3:5], 16)
        except ValueError:
            pass
    raise UserError(f"{source}: expected the piece of a byte, such as <0x0A>, got {text!r:.40}")


def _check_pieces(pieces: Sequence[Piece], source: str) -> None:
    """UserError for pieces that no model has: none or too many, empty ones, twice the same."""
    if not 0 < len(pieces) <= MAX_VOCAB:
        raise UserError(f"{source}: expected from 1 to {MAX_VOCAB} pieces, got {len(pieces)}: it "
                        "is no SentencePiece model, or damaged")  # fmt: skip
    seen: set[str] = set()
    for i, piece in enumerate(pieces):
        if not piece.text or piece.text in seen or math.isnan(piece.score):
            raise UserError(f"{source}: piece {i}, {piece.text!r:.40} with score {piece.score}, is "
                            "empty, comes twice or has no score: the file is damaged")  # fmt: skip
        if piece.kind == UNUSED and piece.text.startswith("[PAD"):
            continue  # a row that pads the model
        if piece.kind == UNUSED or not NORMAL <= piece.kind <= BYTE:
            raise UserError(f"{source}: piece {i}, {piece.text!r:.40}, is of kind {piece.kind}, "
                            "unused or unknown: we have no code for it")  # fmt: skip
        seen.add(piece.text)


def merges_of_scores(pieces: Sequence[Piece]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of ids (M, 2), what each makes, and its rank, equal for equal scores, best first.

    A pair is two pieces that joined are a third. SentencePiece merges it whatever its parts are.
    """
    free = (NORMAL, USER_DEFINED)
    ids = {piece.text: i for i, piece in enumerate(pieces) if piece.kind in free}
    rank_of = {score: r for r, score in enumerate(sorted({-ps.score for ps in pieces}))}
    found = []
    for text, new in ids.items():
        rank = rank_of[-pieces[new].score]
        for at in range(1, len(text)):
            left, right = ids.get(text[:at]), ids.get(text[at:])
            if left is not None and right is not None:
                found.append((rank, left, right, new))
    table = np.array(sorted(found), np.int32).reshape(-1, 4)
    return table[:, 1:3], table[:, 3], table[:, 0]


def vocabulary_of_llama2c(data: bytes, vocab_size: int, source: str) -> Vocabulary:
    """The vocabulary in the bytes of llama2.c's tokenizer.bin.

    The file says neither how many tokens it has nor what kind they are. So the number comes from
    the model, and the kinds from Llama's order: unknown, begin, end, 256 bytes, and the others.
    """
    if not 259 <= vocab_size <= MAX_VOCAB:
        raise UserError(f"{source}: expected a vocabulary of 259 ids or more, got {vocab_size}")
    pieces, at = list[Piece](), 4  # behind the length of the longest token
    for i in range(vocab_size):
        score, size = struct.unpack_from("<fi", data, at) if at + 8 <= len(data) else (0.0, -1)
        text = data[at + 8 : at + 8 + max(size, 0)]
        if size < 0 or len(text) < size:
            raise UserError(f"{source}: expected {vocab_size} tokens, but it breaks off in token "
                            f"{i}: it belongs to a smaller model, or was cut short")  # fmt: skip
        at += 8 + size
        try:
            name = text.decode().replace(" ", "▁")
        except UnicodeDecodeError:
            raise UserError(f"{source}: token {i}, {text!r:.40}, is no UTF-8: it is damaged") from (
                None)  # fmt: skip
        kind = (UNKNOWN, CONTROL, CONTROL)[i] if i < 3 else BYTE if i < 259 else NORMAL
        pieces.append(Piece(name.strip("\n") if i < 3 else name, score, kind))
    if at != len(data):
        raise UserError(f"{source}: expected {vocab_size} tokens and then its end, but "
                        f"{len(data) - at} bytes follow: it belongs to a larger model")  # fmt: skip
    return vocabulary_of_pieces(pieces, source, prefix=True, fallback=True, unknown=0, bos=1, eos=2)
