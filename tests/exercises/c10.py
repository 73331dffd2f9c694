"""Wrong answers to the exercises of chapter 10: each must be refused by its check."""

import numpy as np

from nanoeuler.book.build import code_cells
from nanoeuler.files import project_root

CHAPTER = "10-cpu-engine"
NAMES = dict(np=np)
# What the chapter defines in a cell of its own, before the check.
_TEXT = (project_root() / "book" / f"{CHAPTER}.md").read_text(encoding="utf-8")
(_CELL,) = (cell for _, cell in code_cells(_TEXT) if cell[0].startswith("class Strips"))
exec("\n".join(_CELL), NAMES)

# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
HALVES = "return solution_sum_rows(numbers[:half]) + solution_sum_rows(numbers[half:])"
ANSWERS = [
    ("sum_rows", "the first is split off", "half = len(numbers) // 2", "half = 1"),
    ("sum_rows", "the last is split off", "half = len(numbers) // 2", "half = len(numbers) - 1"),
    ("sum_rows", "thirds", "len(numbers) // 2", "max(1, len(numbers) // 3)"),
    ("sum_rows", "blocks of sixteen", "half = len(numbers) // 2",
     "half = min(16, len(numbers) - 1)"),
    ("sum_rows", "both halves lack a number", "numbers[half:]",
     "numbers[min(half + 1, len(numbers) - 1):]"),
    ("sum_rows", "the first half alone", HALVES, "return solution_sum_rows(numbers[:half])"),
    ("sum_rows", "the first half twice", "numbers[half:]", "numbers[:half]"),
    ("sum_rows", "pairs, and then in a row", HALVES,
     "pairs = [a + b for a, b in zip(numbers[::2], numbers[1::2])]\n"
     "    pairs += numbers[len(numbers) // 2 * 2:]\n"
     "    total = pairs[0]\n    for x in pairs[1:]:\n        total = total + x\n    return total"),
    ("sum_rows", "a half that is left over is forgotten", HALVES,
     "return solution_sum_rows([a + b for a, b in zip(numbers[::2], numbers[1::2])])"),
    ("sum_rows", "what is left over joins the first pair", HALVES,
     "pairs = [a + b for a, b in zip(numbers[::2], numbers[1::2])]\n"
     "    if len(numbers) % 2:\n        pairs[0] = pairs[0] + numbers[-1]\n"
     "    return solution_sum_rows(pairs)"),
    ("sum_rows", "the caller's list is used up", HALVES,
     "while len(numbers) > 1:\n        numbers.append(numbers.pop(0) + numbers.pop(0))\n"
     "    return numbers[0]"),
    ("sum_rows", "from zero", HALVES, "return sum(numbers)"),
    ("sum_rows", "one number is no list", "return numbers[0]", "return numbers"),
    ("tiles", "later pieces overwrite", "] += tile", "] = tile"),
    ("tiles", "c is not cleared", "    c[:] = 0\n", ""),
    ("tiles", "one piece of the depth", "range(0, P, 128)", "range(0, min(P, 128), 128)"),
    ("tiles", "all the depth at once", "for k in range(0, P, 128):\n        end = min(k + 128, P)",
     "for k in range(1):\n        end = P"),
    ("tiles", "pieces that overlap", "range(0, P, 128)", "range(0, P, 127)"),
    ("tiles", "the last columns are left out", "range(0, N, 48)", "range(0, max(1, N - 47), 48)"),
    ("tiles", "the last rows are left out", "range(0, M, 8)", "range(0, max(1, M - 7), 8)"),
    ("tiles", "the tile is cut, not c", "[:rows, :columns]", ""),
    ("tiles", "a strip as wide as what is left", "np.zeros((end - k, 48), c.dtype)",
     "np.zeros((end - k, columns), c.dtype)"),
    ("tiles", "rows that do not exist are left out", "np.zeros((8, end - k), c.dtype)",
     "np.zeros((rows, end - k), c.dtype)"),
    ("tiles", "packed for each row tile", "            for i in range(0, M, 8):\n",
     "            for i in range(0, M, 8):\n                b[k:end, j : j + columns]\n"),
    ("tiles", "half tiles of rows", "range(0, M, 8)", "range(0, M, 4)"),
    ("tiles", "pieces are padded to 128", "end = min(k + 128, P)\n",
     "end = min(k + 128, P)\n        tile(np.zeros((8, 128)), np.zeros((128, 48)))\n"),
    ("tiles", "the rows of the first tile always", "a[i : i + rows, k:end]", "a[:rows, k:end]"),
    ("tiles", "the first columns of b always", "b[k:end, j : j + columns]", "b[k:end, :columns]"),
    ("tiles", "the first piece of a always", "a[i : i + rows, k:end]",
     "a[i : i + rows, : end - k]"),
]
