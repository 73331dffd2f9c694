"""Wrong answers to the exercises of chapter 20, each of which its check must refuse."""

import numpy as np

CHAPTER = "20-is-it-any-good"
NAMES = dict(np=np)

# (exercise, what is wrong, text of the solution, what it becomes)
ANSWERS = [
    ("best", "the other way round", "a - b for", "b - a for"),
    ("best", "the likelihood in the context alone", "a - b for", "a for"),
    ("best", "the likelihood without it alone", "a - b for", "b for"),
    ("best", "a sum", "a - b for", "a + b for"),
    ("best", "a quotient", "a - b for", "a / b for"),
    ("best", "the smallest gain", "max(gains)", "min(gains)"),
    ("best", "of equals the last", "return gains.index(max(gains))",
     "return len(gains) - 1 - gains[::-1].index(max(gains))"),
    ("best", "the gain, not its number", "return gains.index(max(gains))", "return max(gains)"),
    ("best", "counted from one", "gains.index(max(gains))", "gains.index(max(gains)) + 1"),
    ("best", "the size of the gain", "a - b for", "abs(a - b) for"),
    ("best", "never the last", "max(gains)", "max(gains[:-1] or gains)"),
    ("paired", "a sum", "a - b for", "a + b for"),
    ("paired", "the other way round", "a - b for", "b - a for"),
    ("paired", "as if there were no second list", "a - b for", "a for"),
    ("paired", "the deviation, not the error of the mean", "/ n / (n - 1)", "/ (n - 1)"),
    ("paired", "n twice", "/ n / (n - 1)", "/ n / n"),
    ("paired", "without the root", "** 0.5", "** 1"),
    ("paired", "around zero", "(x - middle) ** 2", "x ** 2"),
    ("paired", "absolute differences", "a - b for", "abs(a - b) for"),
    ("paired", "the error first", "return middle, (", "return middle * 0 + (", ),
    ("paired", "the sum of differences", "middle = sum(d) / n", "middle = sum(d)"),
    ("paired", "n - 1 in the mean", "middle = sum(d) / n", "middle = sum(d) / (n - 1)"),
    ("paired", "two errors added", "(x - middle) ** 2 for x in d",
     "(x - sum(one) / n) ** 2 for x in one"),
]  # fmt: skip
