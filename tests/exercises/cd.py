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
    ("compared", "nats", " / np.log(2)", ""),
    ("compared", "logarithm of ten", "np.log(2)", "np.log(10)"),
    ("compared", "multiplied", "/ np.log(2)", "* np.log(2)"),
    ("compared", "bits per token", "len(spells[i])", "1"),
    ("compared", "characters", "len(spells[i])", 'len(spells[i].decode("utf-8", "replace"))'),
    ("compared", "what predicts, not what is predicted", "ids[1:]", "ids[:-1]"),
    ("compared", "special tokens pay", "if spells[i]:\n            total += loss",
     "total += loss\n        if spells[i]:"),
    ("compared", "the first is counted", "total, length = 0.0, 0",
     "total, length = 0.0, len(spells[ids[0]])"),
    ("compared", "a mean of ratios", "total += loss\n            length += len(spells[i])",
     "total += loss / len(spells[i])\n            length += 1"),
    ("compared", "nothing to judge is perfect", "if length else None", "if length else 0.0"),
    ("compared", "nothing to judge divides by zero", "if length else None", "if True else None"),
    ("compared", "bytes per bit", "total / np.log(2) / length", "length / total * np.log(2)"),
    ("compared", "over all losses", "/ length if", "/ len(nats) if"),
    ("compared", "eight bits less", "total / np.log(2) / length", "8 - total / np.log(2) / length"),
    ("compared", "each kind of token once", "for loss, i in zip(nats, ids[1:], strict=True):",
     "for i, loss in dict(zip(ids[1:], nats, strict=True)).items():"),
]
