"""Wrong answers to the exercises of appendix K: each must be refused by its check."""

import numpy as np

CHAPTER = "k-float32-products"
# fmt: off
BIASED = "(x.view(np.uint32) + np.uint32(0x8000)"  # rounded to nearest, halves up


def bf16(x):
    """Float32 x rounded to bf16, as the chapter has it."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def pieces_of(x, count=3):
    """What the stub has: pieces that are rounded."""
    made = []
    for _ in range(count):
        made.append(bf16(x))
        x = x - made[-1]
    return made


NAMES = dict(np=np, pieces_of=pieces_of)
CUT = "(x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)"
# (exercise, what is wrong, text of the solution, what it becomes)
ANSWERS = [
    ("cut", "rounded to nearest", "(x.view(np.uint32)", BIASED),
    ("cut", "what is left is never taken", "x = x - made[-1]", "pass"),
    ("cut", "what is left is added to", "x - made[-1]", "x + made[-1]"),
    ("cut", "always three", "range(count)", "range(3)"),
    ("cut", "one too many", "range(count)", "range(count + 1)"),
    ("cut", "one too few", "range(count)", "range(count - 1)"),
    ("cut", "seven bits", "0xFFFF0000", "0xFFFE0000"),
    ("cut", "nine bits", "0xFFFF0000", "0xFFFF8000"),
    ("cut", "nothing is cut off", "0xFFFF0000", "0xFFFFFFFF"),
    ("cut", "the lower half", "0xFFFF0000", "0x0000FFFF"),
    ("cut", "the sign is lost", "0xFFFF0000", "0x7FFF0000"),
    ("cut", "half precision", CUT, "x.astype(np.float16).astype(np.float32)"),
    ("cut", "in float64", CUT, CUT + ".astype(float)"),
    ("cut", "x is changed", "x = x - made[-1]", "x -= made[-1]"),
    ("cut", "the smallest first", "return made", "return made[::-1]"),
    ("needed", "all pairs", " if i + j < 3", ""),
    ("needed", "one size too many", "i + j < 3", "i + j < 4"),
    ("needed", "one size too few", "i + j < 3", "i + j < 2"),
    ("needed", "the large ones first", ", reverse=True", ""),
    ("needed", "in no order", "sorted(pairs, key=sum, reverse=True)", "pairs"),
    ("needed", "by the pairs themselves", "key=sum, ", ""),
    ("needed", "always three of both", "range(p) for j in range(q)", "range(3) for j in range(3)"),
    ("needed", "p and q exchanged", "range(p) for j in range(q)", "range(q) for j in range(p)"),
    ("needed", "as many of B as of A", "range(q)", "range(p)"),
    ("needed", "i and j exchanged", "[(i, j) for", "[(j, i) for"),
    ("needed", "without the square in the middle", "i + j < 3", "i + j < 3 and (i, j) != (1, 1)"),
    ("needed", "of equal numbers alone", "i + j < 3", "i == j"),
    ("needed", "each twice", "sorted(pairs,", "sorted(pairs + pairs,"),
    ("needed", "the smallest are left out", "i + j < 3", "i + j < p + q - 2 or i + j == 0"),
]
