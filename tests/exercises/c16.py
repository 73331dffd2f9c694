"""Wrong answers to the exercises of chapter 16, each of which its check must refuse."""

import numpy as np

CHAPTER = "16-fine-tuning"
NAMES = dict(np=np)

ANSWERS = [
    ("learned", "not shifted", "ids[at + 1]", "token"),
    ("learned", "shifted twice", "ids[at + 1]", "ids[(at + 2) % len(ids)]"),
    ("learned", "an answer never ends", "inside = False\n        if", "pass\n        if"),
    ("learned", "from the first token on", "-1), False", "-1), True"),
    ("learned", "the questions", "if inside:", "if not inside:"),
    ("learned", "everything", "if inside:", "if True:"),
    ("learned", "nothing", "if inside:", "if False:"),
    ("learned", "the end is not learned", "if inside:", "if inside and ids[at + 1] != end:"),
    ("learned", "the first word is not learned", "if inside:",
     "if inside and token != assistant:"),
    ("learned", "the mark is learned", "if inside:", "if inside or ids[at + 1] == assistant:"),
    ("learned", "zeros, not -1", "-1), False", "0), False"),
    ("learned", "a target too many", "len(ids) - 1, -1", "len(ids), -1"),
    ("learned", "the last target is forgotten", "enumerate(ids[:-1])", "enumerate(ids[:-2])"),
    ("learned", "one answer alone", "elif token == end:\n            inside = False",
     "elif token == end:\n            break"),
]
