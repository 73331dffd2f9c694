"""Wrong answers to the exercises of appendix B, each of which its check must refuse."""

import random

from helpers.exercises import cells_of

CHAPTER = "b-a-tokenizer-at-full-speed"
NAMES = dict(random=random)
for cell in cells_of(CHAPTER):  # the words that a check draws, and what is right for them
    if "def drawn_words(" in cell:
        exec(cell, NAMES)

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
    ("merge", "a stale a", "rows[place] != a or rows[middle] != b", "rows[middle] != b"),
    ("merge", "a stale b", "rows[place] != a or rows[middle] != b", "rows[place] != a"),
    ("merge", "stale only if both are", "!= a or rows", "!= a and rows"),
    ("merge", "b stays", "rows[middle] = None", "pass"),
    ("merge", "the last row stays", "rows[place] = rows[end - 1] = n", "rows[place] = n"),
    ("merge", "the first row stays", "rows[place] = rows[end - 1] = n", "rows[end - 1] = n"),
    ("merge", "the row behind it", "rows[place] = rows[end - 1] = n",
     "rows[place] = rows[end] = n"),
    ("merge", "emptied too late",
     "rows[middle] = None\n    rows[place] = rows[end - 1] = n",
     "rows[place] = rows[end - 1] = n\n    rows[middle] = None"),
    ("merge", "a is a byte long", "middle = place + size[a]", "middle = place + 1"),
    ("merge", "b is a byte long", "end = middle + size[b]", "end = middle + 1"),
    ("merge", "the left neighbour is a byte long", "place - size[left]", "place - 1"),
    ("merge", "where n begins, on the left", "place - size[left]", "place"),
    ("merge", "two rows to the left", "rows[place - 1], rows[end], []",
     "rows[place - 2], rows[end], []"),
    ("merge", "the last of n as its neighbour", "rows[place - 1], rows[end], []",
     "rows[place - 1], rows[end - 1], []"),
    ("merge", "where the neighbour begins, on the right", "((n, right), place)",
     "((n, right), end)"),
    ("merge", "the pair turned round", "((left, n), place", "((n, left), place"),
    ("merge", "old pairs", "((n, right), place)", "((b, right), place)"),
    ("merge", "the left one only", "if right is not None", "if False"),
    ("merge", "the right one only", "if left is not None", "if False"),
]
