"""Wrong answers to the exercises of chapter 19b, each of which its check must refuse."""

import random
import re
from itertools import pairwise

CHAPTER = "19b-other-peoples-tokenizers"
NAMES = dict(pairwise=pairwise, random=random, re=re)

# (exercise, what is wrong, text of the solution, what it becomes)
ANSWERS = [
    ("white", "the first line end", "lines[-1] + 1", "lines[0] + 1"),
    ("white", "before the line end", "return lines[-1] + 1", "return lines[-1]"),
    ("white", "only \\n", 'in "\\r\\n"', 'in "\\n"'),
    ("white", "no line ends", "if lines:", "if False:"),
    ("white", "line ends only at the end", "if lines:", "if lines and lines[-1] == end - 1:"),
    ("white", "line ends from the beginning of the text", "range(at, end)", "range(end)"),
    ("white", "gives up at the end of the text, too", "if end < len(text) and end - at > 1:",
     "if end - at > 1:"),
    ("white", "gives up a single character", "end - at > 1", "end - at > 0"),
    ("white", "gives up of three at least", "end - at > 1", "end - at > 2"),
    ("white", "gives up nothing", "return end - 1", "return end"),
    ("white", "gives up two", "return end - 1", "return end - 2"),
    ("white", "only blanks are white space", "text[end].isspace()", "text[end] == ' '"),
    ("white", "gives up behind a line end, too", "return lines[-1] + 1",
     "return lines[-1] + 1 - (end > lines[-1] + 1)"),
    ("white", "the length", "    return end\n", "    return end - at\n"),
    ("score", "the worst first", "(-scores[a + b], i)", "(scores[a + b], i)"),
    ("score", "from the left", "(-scores[a + b], i)", "(0, i)"),
    ("score", "the longest first", "(-scores[a + b], i)", "(-len(a + b), i)"),
    ("score", "the longest of equals", "at = min(found)[1]",
     "at = min((s, -len(symbols[i] + symbols[i + 1]), i) for s, i in found)[2]"),
    ("score", "only once", "while True:", "for _ in range(1):"),
    ("score", "only pieces of two characters", "if a + b in scores",
     "if a + b in scores and len(a + b) == 2"),
    ("score", "halves must be pieces", "if a + b in scores",
     "if a + b in scores and a in scores and b in scores"),
    ("score", "no scores below -3", "if a + b in scores",
     "if a + b in scores and scores[a + b] > -3"),
    ("score", "the other way round", "[symbols[at] + symbols[at + 1]]",
     "[symbols[at + 1] + symbols[at]]"),
    ("score", "the last pair is never seen", "enumerate(pairwise(symbols))",
     "enumerate(pairwise(symbols[:-1]))"),
    ("score", "the right half stays", "symbols[at : at + 2]", "symbols[at : at + 1]"),
    ("score", "a string", "return symbols", "return ''.join(symbols)"),
    ("score", "the rightmost of equals", "at = min(found)[1]",
     "at = max(i for s, i in found if s == min(found)[0])"),
]  # fmt: skip
