"""Wrong answers to the exercises of appendix Q: each must be refused by its check."""

import numpy as np

from nanoeuler.engines.gpu.decode.gemv import Shape, pack

CHAPTER = "q-token-on-a-gpu"
NAMES = dict(np=np, pack=pack, Shape=Shape)

TOP = "max(m for _, m, _ in parts)"
QUOTIENT = "above / sum(2.0 ** (m - top) * w for _, m, w in parts)"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("place", "a number is one byte", "i % 8 * 2", "i % 8"),
    ("place", "a number is four bytes", "i % 8 * 2", "i % 8 * 4"),
    ("place", "sixteen inputs in a tile", "+ i // 32)", "+ i // 16)"),
    ("place", "all inputs in one tile", " + i // 32)", ")"),
    ("place", "a group is one tile", "(o // 8) * tiles", "(o // 8)"),
    ("place", "tiles of different groups in turn", "(o // 8) * tiles + i // 32",
     "o // 8 + i // 32 * tiles"),
    ("place", "sixteen outputs in a group", "(o // 8) * tiles", "(o // 16) * tiles"),
    ("place", "a tile of 256 bytes", "* 512", "* 256"),
    ("place", "eight lanes for an output", "(o % 8) * 4", "(o % 8) * 8"),
    ("place", "lanes across the outputs", "(o % 8) * 4 + i % 32 // 8", "o % 8 + i % 32 // 8 * 8"),
    ("place", "four inputs in a lane", "i % 32 // 8", "i % 32 // 4"),
    ("place", "pairs, as the instruction has them", "i % 32 // 8", "i % 8 // 2"),
    ("place", "a lane of 8 bytes", "lane * 16", "lane * 8"),
    ("place", "inputs for outputs", "lane = (o", "i, o = o, i\n    lane = (o"),
    ("together", "from the first part's score", TOP, "parts[0][1]"),
    ("together", "from the last part's score", TOP, "parts[-1][1]"),
    ("together", "from the smallest score", TOP, "min(m for _, m, _ in parts)"),
    ("together", "from zero", TOP, "0.0"),
    ("together", "from the mean score", TOP, "sum(m for _, m, _ in parts) / len(parts)"),
    ("together", "values not scaled", "2.0 ** (m - top) * o", "o"),
    ("together", "weights not scaled", "2.0 ** (m - top) * w", "w"),
    ("together", "weights not counted", "2.0 ** (m - top) * w", "2.0 ** (m - top)"),
    ("together", "values scaled as e", "sum(2.0 ** (m - top) * o", "sum(2.718 ** (m - top) * o"),
    ("together", "everything as e", "top = max",
     "parts = [(o, m * 1.4427, w) for o, m, w in parts]\n"
     "    top = max"),
    ("together", "not divided", QUOTIENT, "above"),
    ("together", "divided by how many parts", QUOTIENT, "above / len(parts)"),
    ("together", "means of parts", "2.0 ** (m - top) * o", "2.0 ** (m - top) * o / w"),
    ("together", "the part with the largest score alone", QUOTIENT,
     "max(parts, key=lambda p: p[1])[0] / max(parts, key=lambda p: p[1])[2]"),
]
