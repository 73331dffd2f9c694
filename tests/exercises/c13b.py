"""Wrong answers to the exercise of chapter 13b, each of which its check must refuse."""

import math

import numpy as np

CHAPTER = "13b-muon-on-a-gpu"
NAMES = dict(np=np, math=math)

ROOT = "math.isqrt(8 * i + 1)"
ANSWERS = [
    ("tile", "a root in float64", ROOT, "int(math.sqrt(8 * i + 1))"),
    ("tile", "a root in float64, rounded", ROOT, "round(math.sqrt(8 * i + 1))"),
    ("tile", "the one is forgotten", ROOT, "math.isqrt(8 * i)"),
    ("tile", "twice, not eight times", ROOT, "math.isqrt(2 * i + 1)"),
    ("tile", "the root rounded up", ROOT, "math.isqrt(8 * i + 1) + 1"),
    ("tile", "half of the root", "(root - 1) // 2", "root // 2"),
    ("tile", "a row too far", "(root - 1) // 2", "(root + 1) // 2"),
    ("tile", "a float", "(root - 1) // 2", "(root - 1) / 2"),
    ("tile", "rows without a diagonal", "x * (x + 1) // 2", "x * (x - 1) // 2"),
    ("tile", "all tiles of the square", "x * (x + 1) // 2", "x * x"),
    ("tile", "half in float64", "x * (x + 1) // 2", "int(x * (x + 1) / 2)"),
    ("tile", "above the diagonal", "return x, i - first", "return i - first, x"),
    ("tile", "from the diagonal on", "return x, i - first", "return x, x - (i - first)"),
    ("tile", "columns begin at one", "return x, i - first", "return x, i - first + 1"),
]
