# Made from book/19b-other-peoples-tokenizers.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-their-gguf
"""A tokenizer in the metadata of a GGUF file, keys `tokenizer.ggml.*`: read and written.

Leaves out the file itself. Kinds of tokens have the numbers of SentencePiece's pieces.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nanoeuler.errors import UserError
from nanoeuler.tokenizer.huggingface import names_of, vocabulary_of
from nanoeuler.tokenizer.sentencepiece import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    vocabulary_of_pieces,
)
from nanoeuler.tokenizer.vocabulary import MAX_VOCAB, Vocabulary

# llama.cpp's names of pre-tokenizers: the scanner, whether words that are tokens stay whole, NFC.
PRE = {
    "gpt-2": ("gpt2", False, False), "smollm": ("digits", False, False),
    "starcoder": ("digits", False, False), "llama-bpe": ("llama3", True, False),
    "llama3": ("llama3", True, False), "llama-v3": ("llama3", True, False),
    "smaug-bpe": ("llama3", False, False), "qwen2": ("qwen2", False, True),
    "deepseek-r1-qwen": ("qwen2", False, True),
}  # fmt: skip
SOURCE = "the GGUF's tokenizer"


def vocabulary_of_metadata(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary in a GGUF file's metadata; UserError for kinds that we have no code for."""
    names = _list(metadata, "tokens", str)
    kinds = _list(metadata, "token_type", int, len(names)) or [NORMAL] * len(names)
    model = metadata.get("tokenizer.ggml.model")
    if model == "llama":
        found = _spaced(metadata, names, kinds)
    elif model == "gpt2":
        found = _bytes(metadata, names, kinds)
    else:
        raise UserError(f"{SOURCE} is a {model!r:.40} model, for which we have no code: expected "
                        "'gpt2' or 'llama'")  # fmt: skip
    bos, eos = (_id(metadata, key, len(names)) for key in ("bos_token_id", "eos_token_id"))
    adds = metadata.get("tokenizer.ggml.add_bos_token", model == "llama")
    ends = metadata.get("tokenizer.ggml.add_eos_token", False)
    template = metadata.get("tokenizer.chat_template", "")
    return replace(
        found, bos=bos, eos=eos, template=template if isinstance(template, str) else "",
        begin=(bos,) if adds and bos is not None else (),
        end=(eos,) if ends and eos is not None else (),
    )  # fmt: skip


def _list(metadata: Mapping[str, Any], key: str, kind: type, size: int | None = None) -> list[Any]:
    """A list of the metadata, its elements of one kind; empty if it isn't there and may be so."""
    found = metadata.get(f"tokenizer.ggml.{key}")
    if found is None and size is not None:
        return []
    values = found.tolist() if isinstance(found, np.ndarray) else found
    if not isinstance(values, (list, tuple)) or len(values) > 16 * MAX_VOCAB:
        raise UserError(f"{SOURCE}: expected a list tokenizer.ggml.{key}, got {found!r:.40}")
    if not all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
        raise UserError(f"{SOURCE}: expected tokenizer.ggml.{key} to be a list of {kind.__name__}: "
                        "the file is damaged")  # fmt: skip
    if size is not None and len(values) != size:
        raise UserError(f"{SOURCE}: expected {size} values of tokenizer.ggml.{key}, got "
                        f"{len(values)}: the file is damaged")  # fmt: skip
    return list(values)


def _id(metadata: Mapping[str, Any], key: str, size: int) -> int | None:
    """An id of the metadata, or None if there is none."""
    i = metadata.get(f"tokenizer.ggml.{key}")
    if i is None:
        return None
    if isinstance(i, bool) or not isinstance(i, (int, np.integer)) or not 0 <= i < size:
        raise UserError(f"{SOURCE}: expected {key} to be below {size}, got {i!r:.40}")
    return int(i)


def _spaced(metadata: Mapping[str, Any], names: list[str], kinds: list[int]) -> Vocabulary:
    """The vocabulary of a model of SentencePiece's kind."""
    scores = _list(metadata, "scores", float, len(names)) or [0.0] * len(names)
    pieces = [Piece(*row) for row in zip(names, scores, kinds, strict=True)]
    unknown = _id(metadata, "unknown_token_id", len(names))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown = -1 if unknown is None else unknown
    return vocabulary_of_pieces(pieces, SOURCE, prefix=prefix, fallback=BYTE in kinds,
                                unknown=unknown)  # fmt: skip


def _bytes(metadata: Mapping[str, Any], names: list[str], kinds: list[int]) -> Vocabulary:
    """The vocabulary of a model of byte-level BPE, by way of what a tokenizer.json would say."""
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PRE:
        raise UserError(f"{SOURCE} cuts words as {str(pre):.40} does, for which we have no code: "
                        f"expected tokenizer.ggml.pre to be one of {', '.join(PRE)}")  # fmt: skip
    if len(set(names)) < len(names):
        raise UserError(f"{SOURCE}: two ids have one name: the file is damaged")
    scanner, whole, nfc = PRE[pre]
    rows = [*enumerate(zip(names, kinds, strict=True))]
    added = [{"content": name, "id": i, "special": kind != USER_DEFINED}
             for i, (name, kind) in rows if kind in (CONTROL, USER_DEFINED, UNKNOWN)]  # fmt: skip
    model = {"type": "BPE", "vocab": {name: i for i, (name, kind) in rows if kind == NORMAL},
             "merges": _list(metadata, "merges", str)}  # fmt: skip
    words = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    content = {"model": model, "added_tokens": added, "pre_tokenizer": words}
    found = vocabulary_of(content, SOURCE)
    tokens = found.tokens + [b""] * (len(names) - len(found.tokens))  # rows that pad the model
    return replace(found, tokens=tokens, scanner=scanner, ignore_merges=whole, nfc=nfc)


def metadata_of(vocabulary: Vocabulary, rows: int = 0) -> dict[str, Any]:
    """The keys of a vocabulary for a GGUF file, padded to `rows` tokens, those of the model."""
    size = max(len(vocabulary.tokens), rows)
    names, kinds = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for name, i in names_of(vocabulary).items():
        names[i], kinds[i] = name, NORMAL
    for token in vocabulary.added:
        kinds[token.id] = CONTROL if token.special else USER_DEFINED
    if vocabulary.unknown is not None and vocabulary.characters:
        kinds[vocabulary.unknown] = UNKNOWN
    key = "tokenizer.ggml."
    found: dict[str, Any] = {f"{key}model": "llama" if vocabulary.characters else "gpt2"}
    if vocabulary.characters:
        for i in vocabulary.byte_ids.tolist():
            if i >= 0:
                kinds[i] = BYTE
        found |= {f"{key}pre": "default", f"{key}scores": _scores(vocabulary, size)}
        found[f"{key}add_space_prefix"] = bool(vocabulary.prefix)
    else:
        wanted = vocabulary.scanner, vocabulary.ignore_merges
        pre = next((name for name, rule in PRE.items() if rule[:2] == wanted), None)
        if pre is None:
            raise UserError("expected a tokenizer that llama.cpp has a name for, but it has none "
                            f"for {wanted[0]} words with whole words first")  # fmt: skip
        order = np.argsort(vocabulary.ranks, kind="stable")
        merges = [f"{names[a]} {names[b]}" for a, b in vocabulary.merges[order].tolist()]
        found |= {f"{key}pre": pre, f"{key}merges": merges}
    found |= {f"{key}tokens": names, f"{key}token_type": kinds}
    for name, i in (("bos", vocabulary.bos), ("eos", vocabulary.eos),
                    ("unknown", vocabulary.unknown)):  # fmt: skip
        if i is not None:
            found[f"{key}{name}_token_id"] = i
    found |= {f"{key}add_bos_token": bool(vocabulary.begin)}
    found |= {f"{key}add_eos_token": bool(vocabulary.end)}
    return found | ({"tokenizer.chat_template": vocabulary.template} if vocabulary.template else {})


def _scores(vocabulary: Vocabulary, size: int) -> list[float]:
    """The score of each token: its own, or -1 - the rank of the first merge that makes it."""
    scores = [*vocabulary.scores]
    if not scores:
        scores = [0.0] * len(vocabulary.tokens)
        for i, rank in zip(vocabulary.made.tolist(), vocabulary.ranks.tolist(), strict=True):
            scores[i] = max(scores[i], -1.0 - rank) if scores[i] else -1.0 - rank
    return scores + [0.0] * (size - len(scores))
