# Made from book/b-a-tokenizer-at-full-speed.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-file
"""Writes a tokenizer's file, in the format of Hugging Face's tokenizer.json, and reads it warily.

Leaves out the tokenizer that is made from the file.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nanoeuler.errors import UserError
from nanoeuler.files import check_regular
from nanoeuler.tokenizer.encode import BYTE_FROM_ID, VISIBLE_BYTES

MAX_FILE = 1 << 28  # bytes of a tokenizer.json: several times the largest vocabulary's

# GPT-2's visible character for each byte, in the order of the ids.
VISIBLE = [*map(chr, VISIBLE_BYTES), *map(chr, range(256, 256 + 256 - len(VISIBLE_BYTES)))]
_ID_FROM_VISIBLE = {character: i for i, character in enumerate(VISIBLE)}
# For `str.translate`: from a visible character to its byte; other characters become no byte.
_BYTE_OF = dict.fromkeys(range(256), "\uffff") | {
    ord(character): chr(byte) for byte, character in zip(BYTE_FROM_ID, VISIBLE, strict=True)}


def visible_names(merges: Iterable[Sequence[int]]) -> list[str]:
    """The name in a tokenizer.json of each id that is a byte or made by merges [(id, id)]."""
    names = list(VISIBLE)
    for a, b in merges:
        names.append(names[a] + names[b])
    return names


def tokenizer_json(merges: Iterable[Sequence[int]], special: dict[str, int]) -> str:
    """The text of a tokenizer.json: merges [(id, id)], special {name: id}."""
    names = visible_names(merges)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = True
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": name, **flags, "special": True} for name, i in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": [[names[a], names[b]] for a, b in merges],
        },
    }
    return json.dumps(content, ensure_ascii=False)


def merges_from_names(
    names: Iterable[tuple[str, str]], source: str | Path
) -> list[tuple[int, int]]:
    """Merges [(id, id)] from pairs of visible names; `source` names the file in errors."""
    ids, merges = dict(_ID_FROM_VISIBLE), list[tuple[int, int]]()
    for m, (left, right) in enumerate(names):
        if left not in ids or right not in ids or left + right in ids:
            raise UserError(
                f"{source}: merge {m} joins {left!r:.40} and {right!r:.40}; expected two that "
                "exist by then and make a new one: the file is damaged or wasn't made by training"
            )
        merges.append((ids[left], ids[right]))
        ids[left + right] = len(ids)
    return merges


def spelt_bytes(name: str) -> bytes | None:
    """The bytes of a token with this name in a tokenizer.json; None if no token has such a name."""
    try:
        return name.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return None


def read_file(path: str | Path) -> bytes:
    """The bytes of a tokenizer's file; UserError if it can't be read or is longer than MAX_FILE."""
    try:
        check_regular(path)  # or we might wait for a pipe forever
        with open(path, "rb") as file:
            text = file.read(MAX_FILE + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from None
    except ValueError as error:  # a zero byte in the path
        raise UserError(f"cannot read {path!r}: {error}") from None
    if len(text) > MAX_FILE:
        raise UserError(f"{path}: expected at most {MAX_FILE} bytes: this isn't a tokenizer.json")
    return text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError if a key comes twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key comes twice")
    return made


def parsed_json(text: bytes, source: str | Path) -> dict[str, Any]:
    """The JSON object in the bytes of a tokenizer.json; UserError if there is none."""
    try:
        content = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise UserError(
            f"{source} is not JSON from end to end, nor GPT-2's file of ranks: copy or train one"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{source} lacks a part of a BPE tokenizer.json: train it again")
    return content


def our_parts(content: dict[str, Any]) -> tuple[list[tuple[int, int]], tuple[str, ...]] | None:
    """Merges and names of the special tokens of a tokenizer.json of our kind, or else None."""
    try:
        model, words = content["model"], content["pre_tokenizer"]
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        names = [(str(left), str(right)) for left, right in pairs]
        special = {token["content"]: token["id"] for token in content["added_tokens"]}
        flags = ("lstrip", "rstrip", "single_word")
        plain = all(token["special"] and not any(token.get(flag) for flag in flags)
                    for token in content["added_tokens"])  # fmt: skip
        plain &= all((content.get(part) or {"type": "ByteLevel"})["type"] == "ByteLevel"
                     for part in ("post_processor", "decoder"))  # fmt: skip
        vocab = dict(model["vocab"])
        kind = [model["type"], content["normalizer"], words["type"], words["add_prefix_space"]]
        kind.append(words.get("use_regex", True))  # files older than this key mean yes
        marks = [model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")]
        changes = [*marks, model.get("dropout"), model.get("ignore_merges"), model.get("nanoeuler")]
        merges = merges_from_names(names, "")
    except (KeyError, TypeError, ValueError, AttributeError, UserError):
        return None
    if kind != ["BPE", None, "ByteLevel", False, True] or any(changes) or not plain:
        return None
    ours = {name: i for i, name in enumerate(visible_names(merges))}
    last = list(range(len(ours), len(ours) + len(content["added_tokens"])))
    if list(special.values()) != last or {**vocab, **special} != {**ours, **special}:
        return None
    return merges, tuple(special)
