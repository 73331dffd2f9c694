# Made from book/01-tokenizer.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-gpt2
"""GPT-2's vocabulary from the two forms it is published in. Leaves out all other vocabularies."""

import base64
import binascii
import json
from pathlib import Path

import numpy as np

from nanoeuler.errors import UserError
from nanoeuler.tokenizer.encode import BYTE_FROM_ID
from nanoeuler.tokenizer.tokenizer import VISIBLE, Tokenizer, merges_from_names

# The only special token that GPT-2 was trained with: it ends a document.
GPT2_SPECIAL_TOKENS = ("<|endoftext|>",)
# Recovering a merge takes steps in the square of its token's length: GPT-2's, 2.5 million in all.
MAX_STEPS = 20_000_000


def _read(path):
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8: fetch it again") from None


def import_gpt2(vocab_bpe, encoder_json):
    """The Tokenizer of the files `vocab.bpe` (merges) and `encoder.json` (ids)."""
    lines = _read(vocab_bpe).rstrip("\n").split("\n")[1:]  # the first line names the version
    names = [tuple(line.split(" ")) for line in lines]
    if any(len(pair) != 2 for pair in names):
        raise UserError(f"{vocab_bpe}: expected two tokens on each line: fetch it again")
    tokenizer = Tokenizer(merges_from_names(names, vocab_bpe), GPT2_SPECIAL_TOKENS)
    expected = [*VISIBLE, *(left + right for left, right in names), *GPT2_SPECIAL_TOKENS]
    try:
        found = json.loads(_read(encoder_json))
    except (ValueError, RecursionError):
        raise UserError(f"{encoder_json} is not JSON from end to end: fetch it again") from None
    if found != {name: i for i, name in enumerate(expected)}:
        raise UserError(f"{encoder_json} does not number the tokens of {vocab_bpe} in their order")
    return tokenizer


def import_tiktoken(path):
    """The Tokenizer of a file of ranks: lines of a token's bytes in base 64 and its id."""
    damaged = UserError(f"{path} is no whole file of GPT-2's ranks: fetch it again")
    try:
        rows = [line.split(" ") for line in _read(path).split("\n") if line]
        tokens = [base64.b64decode(token, validate=True) for token, _ in rows]
        ids = [int(i) for _, i in rows]
    except (ValueError, binascii.Error):
        raise damaged from None
    if ids != list(range(len(ids))) or tokens[:256] != [bytes([b]) for b in BYTE_FROM_ID]:
        raise damaged
    if sum(len(token) ** 2 for token in tokens) > MAX_STEPS:
        raise damaged
    rank, merges = {token: i for i, token in enumerate(tokens)}, []
    for i, token in enumerate(tokens[256:], 256):
        parts = [token[k : k + 1] for k in range(len(token))]
        while len(parts) > 2:
            made = [rank.get(a + b, i) for a, b in zip(parts, parts[1:], strict=False)]
            at = int(np.argmin(made))
            if made[at] >= i:
                raise damaged
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) != 2 or not all(rank[part] < i for part in parts):
            raise damaged
        merges.append((rank[parts[0]], rank[parts[1]]))
    return Tokenizer(merges, GPT2_SPECIAL_TOKENS)
