"""Wrong answers to the exercises of appendix C, each of which its check must refuse."""

import hashlib

import numpy as np
from helpers.exercises import cells_of, definitions

CHAPTER = "c-sources"
NAMES = dict(np=np, hashlib=hashlib, __name__=CHAPTER)
(server,) = (cell for cell in cells_of(CHAPTER) if "class Unreliable:" in cell)
exec(definitions(server, CHAPTER), NAMES)  # the server that check_whole judges with
NAMES.pop("__builtins__")

SHARE = "both >= least * len(a | b)"
# (exercise, what is wrong, text of the solution, what it becomes)
ANSWERS = [
    ("twins", "of the smaller page", SHARE, "both >= least * min(len(a), len(b))"),
    ("twins", "of the larger page", SHARE, "both >= least * max(len(a), len(b))"),
    ("twins", "of the sum of both", SHARE, "both >= least * (len(a) + len(b))"),
    ("twins", "more than the least", SHARE, "both > least * len(a | b)"),
    ("twins", "empty pages are alike", "if both and both", "if both"),
    ("twins", "one shingle will do", SHARE, "both"),
    ("twins", "capitals count", "text.lower()", "text"),
    ("twins", "at single blanks", ".split()", ".split(' ')"),
    ("twins", "short pages have none", "max(1, len(words) - n + 1)", "len(words) - n + 1"),
    ("twins", "the last one is missing", "len(words) - n + 1", "len(words) - n"),
    ("twins", "shorter ones at the end", "max(1, len(words) - n + 1)", "len(words)"),
    ("twins", "words run together", "tuple(words[i : i + n])", "''.join(words[i : i + n])"),
    ("twins", "words in any order", "tuple(words[i : i + n])", "frozenset(words[i : i + n])"),
    ("twins", "single words", "words[i : i + n]", "words[i : i + 1]"),
    ("twins", "one word too many", "words[i : i + n]", "words[i : i + n + 1]"),
    ("twins", "side by side, no overlap", "for i in starts", "for i in starts[::n]"),
    ("twins", "each pair the other way", "(j, i)", "(i, j)"),
    ("twins", "in the order of discovery", "sorted(found)", "found"),
    ("twins", "only neighbours", "enumerate(pages[:i])",
     "list(enumerate(pages[:i]))[-1:]"),
    ("whole", "no digest", "hashlib.sha256(part).hexdigest() != sha256", "False"),
    ("whole", "the length will do", "hashlib.sha256(part).hexdigest() != sha256",
     "len(part) != size"),
    ("whole", "put behind whatever is there", 'if first != len(part):\n            part = b""',
     "first = len(part)"),
    ("whole", "what is there is kept", 'part = b""\n        if', "part = part[:first]\n        if"),
    ("whole", "a gap is taken", "if first == len(part):", "if True:"),
    ("whole", "some bytes are progress", "len(part) > furthest", "len(part) > 0"),
    ("whole", "more than before this answer is progress", "furthest = max(furthest, len(part))",
     "furthest = 0"),
    ("whole", "failures are never forgotten", "idle = 0 if len(part) > furthest else idle + 1",
     "idle += len(part) <= furthest"),
    ("whole", "one failure is enough", "idle < 3", "idle < 1"),
    ("whole", "one failure too many", "idle < 3", "idle < 4"),
    ("whole", "for ever", " and idle < 3", ""),
    ("whole", "reads on", "if len(part) >= size:\n                    break", "pass"),
    ("whole", "one piece too many", "if len(part) >= size:", "if len(part) > size:"),
    ("whole", "all from the beginning each time", "ask(len(part))", "ask(0)"),
    ("whole", "from the next byte", "ask(len(part))", "ask(len(part) + 1)"),
    ("whole", "what came too much stays", "part = part[:size]", "pass"),
    ("whole", "half a file, and nobody noticed", 'raise ValueError("expected the file of this '
     'sha256, got another")', "return part"),
    ("whole", "another error", "raise ValueError", "raise KeyError"),
]
