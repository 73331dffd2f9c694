"""Wrong answers to the exercises of appendix D, each of which its check must refuse."""

import numpy as np

CHAPTER = "d-batches"
NAMES = dict(np=np)

ANSWERS = [
    ("place", "one too many", "number < n", "number <= n"),
    ("place", "too few bits", "((n - 1).bit_length() + 1) // 2", "max(1, n.bit_length() // 4)"),
    ("place", "halves rounded down", "+ 1) // 2", ") // 2"),
    ("place", "a remainder, not another round", "if number < n:\n            return number",
     "return number % n"),
    ("place", "whatever comes", "if number < n:\n            return number", "return number"),
    ("place", "the key is forgotten", '{key} ', ""),
    ("place", "Python's own hash", 'int.from_bytes(digest, "little")', "hash(object())"),
    ("place", "the hash of the left half", "{turn} {right}", "{turn} {left}"),
    ("place", "the left half is forgotten", "(left ^ ", "(0 ^ "),
    ("place", "the right half twice", "(left ^ ", "(right ^ "),
    ("place", "all bits of the hash", ' & mask)', ")"),
    ("place", "halves not exchanged, and mixed", "(right << h) |", "(left << h) |"),
    ("place", "no rounds", "range(rounds)", "range(0)"),
]
