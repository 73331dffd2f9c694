"""Wrong answers to the exercise of appendix A, each of which its check must refuse."""

CHAPTER = "a-how-this-book-works"
NAMES: dict = {}

START = "length[path] + 2 if path in length else head"
# (exercise, what is wrong, text of the solution, what it becomes)
ANSWERS = [
    ("rehearse", "no head", "else head", "else 0"),
    ("rehearse", "a head of two lines", "else head", "else 2"),
    ("rehearse", "a head before each cell", "length[path] + 2", "length[path] + head"),
    ("rehearse", "nothing between cells", "length[path] + 2", "length[path]"),
    ("rehearse", "one line between cells", "length[path] + 2", "length[path] + 1"),
    ("rehearse", "two lines before the first, too", START, "length.get(path, head) + 2"),
    ("rehearse", "from 0", "line - first + 1", "line - first"),
    ("rehearse", "one too far", "line - first + 1", "line - first + 2"),
    ("rehearse", "the line behind the cell", "line < first + len(lines)",
     "line <= first + len(lines)"),
    ("rehearse", "the last line is left out", "line < first + len(lines)",
     "line < first + len(lines) - 1"),
    ("rehearse", "the first line is left out", "first <= line <", "first < line <"),
    ("rehearse", "the fence is a line", "first <= line <", "first - 1 <= line <"),
    ("rehearse", "cells that stay are exported", "if path is None:\n            continue",
     "pass"),
    ("rehearse", "cells that stay are in the way", "if path is None:\n            continue",
     "if path is None:\n            length = {key: n + len(lines) for key, n in length.items()}\n"
     "            continue"),
    ("rehearse", "one module for all", "length[path] = start + len(lines)",
     "length = dict.fromkeys([*length, path], start + len(lines))"),
    ("rehearse", "the last cell alone counts", "start + len(lines)\n    return",
     "head + len(lines)\n    return"),
    ("rehearse", "prose belongs to the cell before", "return None", "return path, start"),
    ("rehearse", "a number alone", "return path, start", "return start"),
]
