"""Wrong answers to the exercise of chapter 11a: each must be refused by its check."""

import numpy as np

CHAPTER = "11a-a-ladder-on-tensor-cores"
NAMES = dict(np=np)

# (exercise, what is wrong, text of the solution, what it becomes)
ANSWERS = [
    ("snake", "every column downwards", "step % 2 == 1", "False"),
    ("snake", "every column upwards", "step % 2 == 1", "True"),
    ("snake", "every group from the bottom", "step % 2 == 1", "step % 2 == 0"),
    ("snake", "the last group as high as the others", "min(group, down - first)", "group"),
    ("snake", "turned round in a whole group", "high - 1 - x", "group - 1 - x"),
    ("snake", "turned round one too far", "high - 1 - x", "high - x"),
    ("snake", "every group from the left", "number % 2 == 0", "True"),
    ("snake", "every group from the right", "number % 2 == 0", "False"),
    ("snake", "counted from one beyond the right", "across - 1 - step", "across - step"),
    ("snake", "every other column first", "y = step if", "y = step * 2 % across if"),
    ("snake", "groups of columns", "group * across", "group * down"),
    ("snake", "groups overlap", "first = number * group", "first = number * (group - 1)"),
    ("snake", "row and column exchanged", "return first + x, y", "return y, first + x"),
    ("snake", "along the rows of a group", "divmod(i - first * across, high)",
     "divmod(i - first * across, across)[::-1]"),
]  # fmt: skip
