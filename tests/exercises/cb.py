"""Wrong answers to the exercise of appendix B, each of which its check must refuse."""

import random

CHAPTER = "b-a-tokenizer-at-full-speed"
NAMES = dict(random=random)

CUT = "held[i] == 32 and held[i - 1] != 32"
# (exercise, what is wrong, text of the solution, what it becomes)
ANSWERS = [
    ("recut", "between two blanks, too", CUT, "held[i] == 32"),
    ("recut", "behind a blank", CUT, "held[i - 1] == 32 and held[i] != 32"),
    ("recut", "behind the blank", "yield held[:i]\n                held = held[i:]",
     "yield held[: i + 1]\n                held = held[i + 1 :]"),
    ("recut", "line ends begin words", CUT, "held[i] in b' \\n' and held[i - 1] != 32"),
    ("recut", "not behind line ends", CUT, "held[i] == 32 and held[i - 1] not in b' \\n'"),
    ("recut", "anywhere", CUT, "True"),
    ("recut", "only at letters", CUT, "held[i] == 32 and held[i - 1 : i].isalnum()"),
    ("recut", "the first cut", "range(len(held) - 1, 0, -1)", "range(1, len(held))"),
    ("recut", "each word for itself", "held = held[i:]\n                break",
     "held = held[i:]"),
    ("recut", "at the beginning, too", "range(len(held) - 1, 0, -1)",
     "range(len(held) - 1, -1, -1)"),
    ("recut", "not at place 1", "range(len(held) - 1, 0, -1)", "range(len(held) - 1, 1, -1)"),
    ("recut", "a blank at the end waits", "range(len(held) - 1, 0, -1)",
     "range(len(held) - 2, 0, -1)"),
    ("recut", "only in the new chunk", "range(len(held) - 1, 0, -1)",
     "range(len(held) - 1, len(held) - len(chunk), -1)"),
    ("recut", "the rest is lost", "if held:\n        yield held", "pass"),
    ("recut", "an empty piece at the end", "if held:\n        yield held", "yield held"),
    ("recut", "what was given is kept", "held = held[i:]", "pass"),
    ("recut", "all at the end", "for chunk in chunks:", "for chunk in [b''.join(chunks)]:"),
    ("recut", "a chunk ahead", "for chunk in chunks:", "for chunk in list(chunks):"),
    ("recut", "each chunk for itself", "held += chunk", "held = chunk"),
    ("recut", "a list of pieces", "yield held[:i]", "yield held[:i].split()"),
]
