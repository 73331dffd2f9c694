# Made from book/b-a-tokenizer-at-full-speed.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-gpt2
"""GPT-2's vocabulary, from its file of ranks. Leaves out all other vocabularies in that format."""

import base64
import hashlib
from itertools import pairwise

# The SHA-256 of the file, the one that tiktoken demands too.
GPT2_RANKS = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_SPECIAL_TOKENS = ("<|endoftext|>",)  # the only one that GPT-2 was trained with


def is_gpt2(ranks: bytes) -> bool:
    """Whether these are the bytes of GPT-2's file of ranks."""
    return hashlib.sha256(ranks).hexdigest() == GPT2_RANKS


def merges_from_ranks(ranks: bytes) -> list[tuple[int, int]]:
    """Recover the merges [(id, id)] from a file of ranks, which has a line for each id from 0 up.

    The first 256 are the bytes in GPT-2's order. A token of n bytes takes n * n steps.
    """
    tokens = [base64.b64decode(line.split()[0]) for line in ranks.splitlines()]
    rank, merges = {token: i for i, token in enumerate(tokens)}, []
    for i, token in enumerate(tokens[256:], 256):
        parts = [token[k : k + 1] for k in range(len(token))]
        while len(parts) > 2:
            made = [rank.get(a + b, i) for a, b in pairwise(parts)]
            at = made.index(min(made))  # earlier tokens make up this one, so i is never the least
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append((rank[parts[0]], rank[parts[1]]))
    return merges
