# Made from book/b-a-tokenizer-at-full-speed.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-others
"""Reads and writes Hugging Face's tokenizer.json, of byte-level BPE and of SentencePiece's kind.

Leaves out our own files, which file.py knows, and the tokenizer that is made from the file.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from nanoeuler.errors import UserError, quoted
from nanoeuler.tokenizer.encode import BYTE_FROM_ID
from nanoeuler.tokenizer.file import VISIBLE, spelt_bytes
from nanoeuler.tokenizer.vocabulary import MAX_VOCAB, Added, Vocabulary

_WORDS = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_WORDS}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The patterns that we have scanners for, as files write them.
PATTERNS = {_LLAMA3: "llama3", _LLAMA3.replace("{1,3}", ""): "qwen2", _GPT2: "gpt2",
            _GPT2.replace("'s|'t|'re|'ve|'m|'ll|'d", "'(?:[sdmt]|ll|ve|re)"): "gpt2"}  # fmt: skip
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
_SPACED = [  # a space before a text, and SentencePiece's sign for spaces
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
]


def vocabulary_of(content: dict[str, Any], source: str) -> Vocabulary:
    """The vocabulary in a parsed tokenizer.json; `source` names the file in errors.

    UserError that names the part, if we have no code for its kind or it is damaged.
    """
    try:
        model = content["model"]
        kind, names = model["type"], model["vocab"]
        added = _added(content.get("added_tokens") or [], source)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{source} lacks a part of a BPE tokenizer.json: train it again") from None
    if kind != "BPE":
        raise UserError(f"{source}: expected a model of type BPE, got {kind!r:.40}: we have no "
                        "code for it")  # fmt: skip
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UserError(f"{source}: the model has {key} {model[key]!r:.40}, for which we "
                            "have no code: expected none")  # fmt: skip
    ids = _checked_ids(names, added, source)
    if model.get("byte_fallback") or _is_spaced(content):
        return _of_characters(content, ids, added, source)
    return _of_bytes(content, ids, added, source)


def _added(tokens: list[dict[str, Any]], source: str) -> tuple[Added, ...]:
    """The added tokens of a file; their names and ids are checked with those of the vocabulary."""
    found = []
    for token in tokens:
        name, i = token["content"], token["id"]
        if not isinstance(name, str) or not name or not _is_utf8(name):
            raise UserError(f"{source}: expected added tokens with names, got {name!r:.40}")
        flags = {flag: bool(token.get(flag, False)) for flag in _FLAGS}
        found.append(Added(name, i, bool(token.get("special", False)), **flags))
    return tuple(found)


def _is_utf8(name: str) -> bool:
    """Whether a name has no half of a surrogate pair in it."""
    return not any(0xD800 <= ord(character) < 0xE000 for character in name)


def _checked_ids(names: Any, added: tuple[Added, ...], source: str) -> dict[str, int]:
    """Name -> id of the vocabulary without added tokens; UserError if an id has two names."""
    owner: dict[int, str] = {}
    pairs = [*names.items()] if isinstance(names, dict) else [("", None)]
    for name, i in [*pairs, *((token.content, token.id) for token in added)]:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < MAX_VOCAB:
            raise UserError(f"{source}: expected ids from 0 to {MAX_VOCAB - 1}, got {i!r:.40} for "
                            f"{name!r:.40}: the file is damaged")  # fmt: skip
        if owner.setdefault(i, name) != name:
            raise UserError(f"{source}: id {i} is both {owner[i]!r:.40} and {name!r:.40}: the "
                            "file is damaged")  # fmt: skip
    if len({*owner.values()}) < len(owner) or len({t.content for t in added}) < len(added):
        raise UserError(f"{source}: two ids have one name, or an added token comes twice: the file "
                        "is damaged")  # fmt: skip
    marks = {token.content for token in added}
    return {name: i for name, i in pairs if name not in marks}


def _merges(
    content: dict[str, Any], ids: dict[str, int], source: str
) -> tuple[np.ndarray, np.ndarray]:
    """The merges of a file: pairs of ids (M, 2), and the id that each makes (M,)."""
    rows, find, listed = list[int](), ids.get, content["model"].get("merges")
    seen = set[int]()
    for m, pair in enumerate(listed if isinstance(listed, list) else [None]):
        parts = pair.split(" ") if isinstance(pair, str) else pair
        if not (type(parts) is list and len(parts) == 2
                and type(parts[0]) is str and type(parts[1]) is str):  # fmt: skip
            raise UserError(f"{source} lacks a part of a BPE tokenizer.json: merge {m} is "
                            f"{pair!r:.40}, no pair of names")  # fmt: skip
        one, two = parts
        row = left, right, _ = find(one, -1), find(two, -1), find(one + two, -1)
        key = left << 32 | right
        if min(row) < 0 or key in seen:
            raise UserError(
                f"{source}: merge {m} joins {one!r:.40} and {two!r:.40}; expected two "
                "tokens of the vocabulary that make a third, and each pair once: it is damaged"
            )
        seen.add(key)
        rows += row
    found = np.array(rows, np.int32).reshape(-1, 3)
    return np.ascontiguousarray(found[:, :2]), np.ascontiguousarray(found[:, 2])


def _of_bytes(
    content: dict[str, Any], ids: dict[str, int], added: tuple[Added, ...], source: str
) -> Vocabulary:
    """The vocabulary of a file of byte-level BPE."""
    normalizer, nfc = content.get("normalizer"), False
    if normalizer is not None:
        if _types(normalizer) != ["NFC"]:
            raise _unknown(source, "normalizer", normalizer, "none or NFC")
        nfc = True
    tokens = _rows(ids, added)
    for name, i in ids.items():
        spelt = spelt_bytes(name)
        if spelt is None or not name:
            raise UserError(f"{source}: token {i}, {name!r:.40}, is not spelt in the 256 characters"
                            " of byte-level BPE")  # fmt: skip
        tokens[i] = spelt
    byte_ids = np.full(256, -1, np.int32)
    for byte, name in zip(BYTE_FROM_ID, VISIBLE, strict=True):
        byte_ids[byte] = ids.get(name, -1)
    if content["model"].get("unk_token") and (byte_ids < 0).any():
        raise UserError(f"{source}: expected a token for each of the 256 bytes, or no unk_token; "
                        f"byte {int(np.argmin(byte_ids))} has none, and would be unknown")
    decoder = content.get("decoder")
    if decoder is not None and _types(decoder) != ["ByteLevel"]:
        raise _unknown(source, "decoder", decoder, "ByteLevel")
    merges, made = _merges(content, ids, source)
    return _finished(Vocabulary(
        tokens, merges, made, np.arange(len(made)), added, byte_ids, _scanner(content, source), nfc,
        bool(content["model"].get("ignore_merges")),
    ), content, source)  # fmt: skip


def _rows(ids: dict[str, int], added: tuple[Added, ...]) -> list[bytes]:
    """The bytes of each id so far: those of the added tokens."""
    last = max([-1, *ids.values(), *(token.id for token in added)])
    tokens = [b""] * (last + 1)
    for token in added:
        tokens[token.id] = token.content.encode()
    return tokens


def _types(part: Any) -> list[str]:
    """The types of a part of a file, one after the other if it is a sequence of them."""
    if isinstance(part, dict) and part.get("type") == "Sequence":
        lists = [value for value in part.values() if isinstance(value, list)]
        if len(lists) != 1:
            return ["Sequence"]
        return [str(step.get("type")) if isinstance(step, dict) else "" for step in lists[0]]
    return [str(part.get("type"))] if isinstance(part, dict) else [""]


def _unknown(source: str, what: str, part: Any, expected: str) -> UserError:
    """The error for a part that we have no code for."""
    shown = quoted(" then ".join(_types(part)) or "nothing", 60)
    return UserError(f"{source}: its {what} is {shown}, for which we have no code: expected "
                     f"{expected}")  # fmt: skip


def _scanner(content: dict[str, Any], source: str) -> str:
    """The scanner of a file's pre-tokenizer; UserError that names one that we lack."""
    part = content.get("pre_tokenizer")
    sequence = isinstance(part, dict) and part.get("type") == "Sequence"
    steps = part["pretokenizers"] if sequence and "pretokenizers" in part else [part]
    expected = "the words of GPT-2, Llama 3, Qwen2 or SmolLM2"
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps) or (
            not steps or steps[-1].get("type") != "ByteLevel"):  # fmt: skip
        raise _unknown(source, "pre-tokenizer", part, expected)
    *before, level = steps
    if level.get("add_prefix_space", True):
        raise UserError(f"{source}: its pre-tokenizer puts a space before each text, as "
                        f"add_prefix_space says, for which we have no code: expected {expected}"
                        )  # fmt: skip
    own = level.get("use_regex", True)
    if not before and own:
        return "gpt2"
    if [step.get("type") for step in before] == ["Digits"] and own:
        if before[0].get("individual_digits") is True:
            return "digits"
    if [step.get("type") for step in before] == ["Split"] and not own:
        step = before[0]
        pattern = step.get("pattern")
        found = PATTERNS.get(str(pattern.get("Regex")) if isinstance(pattern, dict) else "")
        if found and step.get("behavior") == "Isolated" and not step.get("invert"):
            return found
        raise UserError(f"{source}: its pre-tokenizer splits by {str(pattern):.80}, for which we "
                        f"have no code: expected {expected}")  # fmt: skip
    raise _unknown(source, "pre-tokenizer", part, expected)


def _is_spaced(content: dict[str, Any]) -> bool:
    """Whether spaces become SentencePiece's sign, by a normalizer or by a pre-tokenizer."""
    before = content.get("normalizer"), content.get("pre_tokenizer")
    return any(part is not None and {*_types(part)} & {"Replace", "Prepend", "Metaspace"}
               for part in before)  # fmt: skip


def _prefix(content: dict[str, Any], source: str) -> str:
    """Which segments get a space before them, by the normalizer or the pre-tokenizer."""
    normalizer, words = content.get("normalizer"), content.get("pre_tokenizer")
    if words is None and normalizer is not None:
        steps = normalizer.get("normalizers") if normalizer.get("type") == "Sequence" else [
            normalizer]  # fmt: skip
        if steps in (_SPACED, _SPACED[1:]):
            return "segment" if len(steps) > 1 else ""
        raise _unknown(source, "normalizer", normalizer, "Prepend and Replace of spaces")
    if normalizer is not None:
        raise _unknown(source, "normalizer", normalizer, "none beside Metaspace")
    scheme = words.get("prepend_scheme", "always")
    if _types(words) != ["Metaspace"] or words.get("replacement") != "▁" or (
            words.get("split", True) or scheme not in ("first", "always", "never")):  # fmt: skip
        raise _unknown(source, "pre-tokenizer", words, "Metaspace that does not split")
    return "" if scheme == "never" else scheme


def _of_characters(
    content: dict[str, Any], ids: dict[str, int], added: tuple[Added, ...], source: str
) -> Vocabulary:
    """The vocabulary of a file of SentencePiece's kind."""
    model, tokens, prefix = content["model"], _rows(ids, added), _prefix(content, source)
    byte_ids = np.full(256, -1, np.int32)
    if model.get("byte_fallback"):
        byte_ids[:] = [ids.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
        if (byte_ids < 0).any():
            raise UserError(f"{source}: expected a token for each of the 256 bytes, to fall back "
                            f"on, but <0x{int(np.argmin(byte_ids)):02X}> is missing")  # fmt: skip
    of_byte = {int(i): bytes([byte]) for byte, i in enumerate(byte_ids)}
    for name, i in ids.items():
        if not _is_utf8(name):
            raise UserError(f"{source}: token {i} has half of a surrogate pair: it is damaged")
        tokens[i] = of_byte.get(i) or name.replace("▁", " ").encode()
    decoder = content.get("decoder")
    steps = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if decoder is not None and not {*_types(decoder)} <= steps:
        raise _unknown(source, "decoder", decoder, "that of SentencePiece")
    unknown = model.get("unk_token")
    every = ids | {token.content: token.id for token in added}
    merges, made = _merges(content, every, source)
    return _finished(Vocabulary(
        tokens, merges, made, np.arange(len(made)), added, byte_ids, "spans",
        characters=True, prefix=prefix, unknown=every.get(unknown),
        fuse_unknown=bool(model.get("fuse_unk")),
    ), content, source)  # fmt: skip


def _ends(content: dict[str, Any], source: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor puts before and after a text."""
    part = content.get("post_processor")
    steps = part.get("processors") if part and _types(part) != [""] and (
        part.get("type") == "Sequence") else [part]  # fmt: skip
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    try:
        for step in steps:
            if step is None or step["type"] == "ByteLevel":
                continue
            if step["type"] != "TemplateProcessing":
                raise _unknown(source, "post-processor", part, "TemplateProcessing")
            kinds = [[*piece] for piece in step["single"]]
            at, known = kinds.index(["Sequence"]), step["special_tokens"]
            if kinds.count(["Sequence"]) > 1:
                raise ValueError
            rows = [known[piece["SpecialToken"]["id"]]["ids"] for n, piece in
                    enumerate(step["single"]) if n != at]  # fmt: skip
            begin = tuple(int(i) for row in rows[:at] for i in row)
            end = tuple(int(i) for row in rows[at:] for i in row)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{source}: its post-processor is damaged: expected special tokens around "
                        "one sequence") from None  # fmt: skip
    return begin, end


def _finished(vocabulary: Vocabulary, content: dict[str, Any], source: str) -> Vocabulary:
    """The vocabulary with the tokens around a text, and with what only we write into a file."""
    begin, end = _ends(content, source)
    vocabulary = replace(vocabulary, begin=begin, end=end)
    extra = content["model"].get("nanoeuler") or {}
    try:
        if "ranks" in extra:
            ranks = np.array(extra["ranks"], np.int64)
            if ranks.shape != vocabulary.made.shape or not (0 <= ranks).all():
                raise ValueError
            vocabulary = replace(vocabulary, ranks=ranks.clip(max=MAX_VOCAB << 4))
        taken: dict[str, Callable[[Any], Any]] = {
            "prefix": str, "template": str, "bos": int, "eos": int,
            "scores": lambda row: tuple(float(x) for x in row)}  # fmt: skip
        changes = {key: made(extra[key]) for key, made in taken.items() if key in extra}
        vocabulary = replace(vocabulary, **changes)
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise UserError(f"{source}: its part 'nanoeuler' is damaged: import it again") from None
    size = len(vocabulary.tokens)
    around = (*begin, *end, vocabulary.bos or 0, vocabulary.eos or 0)
    if not all(0 <= i < size for i in around):
        raise UserError(f"{source}: expected the tokens around a text to be below {size}, got "
                        f"{str(around):.60}")  # fmt: skip
    return vocabulary


def names_of(vocabulary: Vocabulary) -> dict[str, int]:
    """Name in a file -> id, for each token; unused ids are left out."""
    if vocabulary.characters:
        of_byte = {int(i): f"<0x{byte:02X}>" for byte, i in enumerate(vocabulary.byte_ids)}
        spelt = [token.decode("utf-8", "replace").replace(" ", "▁") for token in vocabulary.tokens]
        names = [of_byte.get(i, name) for i, name in enumerate(spelt)]
    else:
        visible = dict(zip(BYTE_FROM_ID.tolist(), VISIBLE, strict=True))
        names = ["".join([visible[byte] for byte in token]) for token in vocabulary.tokens]
    for token in vocabulary.added:
        names[token.id] = token.content
    return {name: i for i, name in enumerate(names) if name}


def json_of(vocabulary: Vocabulary, extras: bool = True) -> str:
    """The text of a tokenizer.json that describes a vocabulary completely.

    extras: include whatever Hugging Face's format has no place for, in a part of the model that
    its reader ignores.
    """
    names = names_of(vocabulary)
    spelt = [""] * len(vocabulary.tokens)
    for name, i in names.items():
        spelt[i] = name
    order = np.argsort(vocabulary.ranks, kind="stable")
    merges = [[spelt[a], spelt[b]] for a, b in vocabulary.merges[order].tolist()]
    model = {
        "type": "BPE", "dropout": None,
        "unk_token": spelt[vocabulary.unknown] if vocabulary.unknown is not None else None,
        "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": vocabulary.characters and vocabulary.fuse_unknown,
        "byte_fallback": vocabulary.fallback,
        "ignore_merges": vocabulary.ignore_merges, "vocab": names, "merges": merges,
    }  # fmt: skip
    if extras and (extra := _extras(vocabulary, order)):
        model["nanoeuler"] = extra
    content = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": token.id, "content": token.content,
             **{flag: getattr(token, flag) for flag in _FLAGS}, "special": token.special}
            for token in sorted(vocabulary.added, key=lambda token: token.id)
        ],
        **_steps(vocabulary), "post_processor": _around(vocabulary, spelt), "model": model,
    }  # fmt: skip
    return json.dumps(content, ensure_ascii=False)


def _extras(vocabulary: Vocabulary, order: np.ndarray) -> dict[str, Any]:
    """The parts of a vocabulary that a tokenizer.json has no place for."""
    found: dict[str, Any] = {}
    ranks = vocabulary.ranks[order]
    if not np.array_equal(ranks, np.arange(len(ranks))):
        found["ranks"] = ranks.tolist()
    if vocabulary.prefix == "text":
        found["prefix"] = "text"
    for key in ("template", "bos", "eos", "scores"):
        value = getattr(vocabulary, key)
        if value not in (None, "", ()):
            found[key] = value
    return found


def _steps(vocabulary: Vocabulary) -> dict[str, Any]:
    """The normalizer, the pre-tokenizer and the decoder of a vocabulary."""
    if vocabulary.characters:
        back: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]  # fmt: skip
        if vocabulary.prefix:
            back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        decoder = {"type": "Sequence", "decoders": back}
        if vocabulary.prefix in ("first", "always"):
            words = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": vocabulary.prefix,
                     "split": False}  # fmt: skip
            return {"normalizer": None, "pre_tokenizer": words, "decoder": decoder}
        spaced = _SPACED if vocabulary.prefix else _SPACED[1:]
        normalizer = {"type": "Sequence", "normalizers": spaced}
        return {"normalizer": normalizer, "pre_tokenizer": None, "decoder": decoder}
    level, plain = _LEVEL, {**_LEVEL, "use_regex": False}
    if vocabulary.scanner == "digits":
        digits = {"type": "Digits", "individual_digits": True}
        level = {"type": "Sequence", "pretokenizers": [digits, _LEVEL]}
    elif vocabulary.scanner != "gpt2":
        pattern = next(p for p, scanner in PATTERNS.items() if scanner == vocabulary.scanner)
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                 "invert": False}  # fmt: skip
        level = {"type": "Sequence", "pretokenizers": [split, plain]}
    normal = {"type": "NFC"} if vocabulary.nfc else None
    return {"normalizer": normal, "pre_tokenizer": level, "decoder": _LEVEL}


def _around(vocabulary: Vocabulary, spelt: list[str]) -> dict[str, Any] | None:
    """The post-processor: the tokens before and after a text."""
    if not vocabulary.begin and not vocabulary.end:
        return None
    ids = {spelt[i]: i for i in (*vocabulary.begin, *vocabulary.end)}

    def single(kind: int, which: str) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": which, "type_id": kind}}
        marks = [[{"SpecialToken": {"id": spelt[i], "type_id": kind}} for i in row]
                 for row in (vocabulary.begin, vocabulary.end)]  # fmt: skip
        return [*marks[0], text, *marks[1]]

    special = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in ids.items()}
    return {"type": "TemplateProcessing", "single": single(0, "A"),
            "pair": [*single(0, "A"), *single(1, "B")], "special_tokens": special}  # fmt: skip
