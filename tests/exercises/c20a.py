"""Wrong answers to the exercises of chapter 20a, each of which its check must refuse."""

import numpy as np

CHAPTER = "20a-a-corpus"
NAMES = dict(np=np)

# (exercise, what is wrong, text of the solution, what it becomes)
ANSWERS = [
    ("forced", "no blank before the word", "len(line) + 1 + len(word)", "len(line) + len(word)"),
    ("forced", "two blanks", "len(line) + 1 +", "len(line) + 2 +"),
    ("forced", "a word that just fits", "> widest", ">= widest"),
    ("forced", "the other way round", "> widest", "<= widest"),
    ("forced", "the last word", "after.split()[0]", "after.split()[-1]"),
    ("forced", "the whole next line", "len(word) > widest", "len(after) > widest"),
    ("forced", "this line's first word", "after.split()[0]", "line.split()[0]"),
    ("forced", "the last line isn't measured", "for line in lines)",
     "for line in lines[:-1] or lines)"),
    ("forced", "the shortest line", "widest = max(", "widest = min("),
    ("forced", "this line's width", "+ len(word) > widest", "+ len(word) > len(line)"),
    ("forced", "the room of the two lines alone", "> widest", "> max(len(line), len(after))"),
    ("forced", "an end for the last line, too", "return ends", "return [*ends, True]"),
    ("shared", "the last run is left out", "len(words) - n + 1)", "len(words) - n)"),
    ("shared", "the last held-out run is left out", "len(held_out) - n + 1)", "len(held_out) - n)"),
    ("shared", "each run once", "return count",
     "return len({tuple(words[i : i + n]) for i in range(len(words) - n + 1)} & known)"),
    ("shared", "one word fewer", "tuple(words[i : i + n]) in", "tuple(words[i : i + n - 1]) in"),
    ("shared", "in any order",
     "tuple(words[i : i + n]) in known",
     "tuple(sorted(words[i : i + n])) in {tuple(sorted(run)) for run in known}"),
    ("shared", "whether there is one", "return count", "return bool(count)"),
    ("shared", "the share", "return count", "return count / max(1, len(words) - n + 1)"),
    ("shared", "those that are not", "in known", "not in known"),
    ("shared", "the first word decides", "tuple(words[i : i + n]) in known",
     "words[i] in {run[0] for run in known}"),
    ("shared", "without boundaries", "tuple(words[i : i + n]) in known",
     "''.join(words[i : i + n]) in {''.join(run) for run in known}"),
    ("shared", "from the second on", "for i in range(len(words)", "for i in range(1, len(words)"),
]  # fmt: skip
