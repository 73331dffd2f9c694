"""Wrong answers to the exercises of chapter 16a, each of which its check must refuse."""

import contextlib

import numpy as np

CHAPTER = "16a-a-conversation"
NAMES = dict(np=np, contextlib=contextlib)

LETTERS = "waits = 3 if byte >= 0xF0 else 2 if byte >= 0xE0 else 1 if byte >= 0xC0 else 0"
ANSWERS = [
    ("windows", "one turn at a time", "while 2 * seen > room:", "while seen > room:"),
    ("windows", "one turn alone", "while 2 * seen", "if 2 * seen"),
    ("windows", "less than half", "while 2 * seen > room", "while seen and 2 * seen >= room"),
    ("windows", "half at every question", "if seen > room", "if 2 * seen > room"),
    ("windows", "a full room overflows", "if seen > room", "if seen >= room"),
    ("windows", "all is dropped", "while 2 * seen > room:", "while seen:"),
    ("windows", "half is left in any case", "2 * seen > room:", "3 * seen > room:"),
    ("windows", "the newest turns are dropped", "turns[first]", "turns[question - 1]"),
    ("windows", "nothing is dropped", "first += 1", "pass"),
    ("windows", "all is read again at each question", "again = 0", "again = seen"),
    ("windows", "what was dropped is read", "again = seen", "again = sum(turns[:first])"),
    ("windows", "nothing is read again", "again = seen", "pass"),
    ("windows", "the question after the last turn is forgotten", "len(turns) + 1", "len(turns)"),
    ("windows", "a turn is seen before its question",
     "again = 0\n", "again, seen = 0, sum(turns[first:question + 1])\n"),
    ("windows", "the second before the first", "(first, again)", "(again, first)"),
    ("windows", "a turn counts as one", "seen += turns[question]", "seen += 1"),
    ("whole", "any token may end it", "if not waits:", "if True:"),
    ("whole", "none may", "if not waits:", "if waits:"),
    ("whole", "until the first unfinished one", "if not waits:\n            keep = n",
     "if waits:\n            break\n        keep = n"),
    ("whole", "letters, not tokens", "keep = n", "keep += 1"),
    ("whole", "numbered from 0", "start=1", "start=0"),
    ("whole", "each token begins a letter", "for byte in token:",
     "waits = 0\n        for byte in token:"),
    ("whole", "the last byte decides", "in token:", "in token[-1:]:"),
    ("whole", "letters have at most two bytes", LETTERS, "waits = 1 if byte >= 0xC0 else 0"),
    ("whole", "letters have at most three bytes", "3 if byte >= 0xF0 else ", ""),
    ("whole", "two bytes begin at 0xD0", "byte >= 0xC0", "byte >= 0xD0"),
    ("whole", "the first byte is counted, too", LETTERS,
     "waits = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 0"),
    ("whole", "a byte above 127 is a letter", LETTERS, "waits = int(byte >= 0x80)"),
    ("whole", "ASCII alone is whole", LETTERS, "waits = 10**9 if byte >= 0x80 else 0"),
    ("whole", "the bytes", "return keep", "return sum(map(len, tokens[:keep]))"),
]
