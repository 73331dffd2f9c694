"""Wrong answers to the exercises of chapter 11b: each must be refused by its check."""

import numpy as np

CHAPTER = "11b-ptx-on-paper"
NAMES = dict(np=np)

END = "if missing == 0 and size == 0:"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("answers", "the parity that is under way", "phase % 2 != number", "phase % 2 == number"),
    ("answers", "the phase, not its parity", "phase % 2 != number", "phase != number"),
    ("answers", "any phase that is over", "phase % 2 != number", "phase > number"),
    ("answers", "arrivals alone", END, "if missing == 0:"),
    ("answers", "bytes alone", END, "if size == 0 and kind == 'land':"),
    ("answers", "either", END, "if missing == 0 or size == 0:"),
    ("answers", "arrivals are not set again", "phase, missing = phase + 1, count",
     "phase = phase + 1"),
    ("answers", "one arrival a phase", "phase + 1, count", "phase + 1, 1"),
    ("answers", "expecting is no arrival", "            missing -= 1\n            size += number",
     "            missing -= kind == 'arrive'\n            size += number"),
    ("answers", "expected bytes replace what is missing", "size += number", "size = number"),
    ("answers", "a copy lands whole", "size -= number", "size = 0"),
    ("answers", "copies are counted, not bytes", "size -= number", "size -= 16"),
    ("answers", "a phase too early", "phase, missing, size, said = 0,",
     "phase, missing, size, said = 1,"),
    ("answers", "no bytes below none", "size -= number", "size = max(0, size - number)"),
    ("answers", "phases are two", "phase + 1, count", "1, count"),
]
