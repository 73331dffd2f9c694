"""Wrong answers to the exercises of chapter 11b: each must be refused by its check."""

import numpy as np

CHAPTER = "11b-tensor-cores"
NAMES = dict(np=np)

ROUND = "max(fetch + multiply, work)"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("waiting", "a fetch for each product", ROUND, "max(stages * fetch, work)"),
    ("waiting", "the longer of two", ROUND, "max(fetch, work)"),
    ("waiting", "fetch and product never overlap", ROUND, "(fetch + work)"),
    ("waiting", "all fetches and all products", ROUND, "(stages * fetch + work)"),
    ("waiting", "one stage always", "stages * multiply", "multiply"),
    ("waiting", "a stage too many", "stages * multiply", "(stages + 1) * multiply"),
    ("waiting", "a stage too few", "stages * multiply", "(stages - 1) * multiply"),
    ("waiting", "the share of work", "1 - work", "work"),
    ("waiting", "the products of others are not limited", ROUND, "(fetch + multiply)"),
    ("waiting", "the shorter of two", "max(", "min("),
    ("waiting", "fetches share the way", ROUND, "max(stages * fetch + multiply, work)"),
    ("waiting", "never", "1 - work / max(fetch + multiply, work)", "0.0"),
    ("waiting", "of the fetch's time", "1 - work / max(fetch + multiply, work)",
     "max(0, fetch + multiply - work) / fetch"),
    ("halving", "kept and given exchanged", "(high, low), (low, high)", "(low, high), (high, low)"),
    ("halving", "keeps what it gives", "keep + shuffle", "give + shuffle"),
    ("halving", "given is not added", "keep + shuffle(give, bit)", "shuffle(give, bit)"),
    ("halving", "nothing is given", "keep + shuffle(give, bit)", "keep"),
    ("halving", "gives what it keeps", "shuffle(give, bit)", "shuffle(keep, bit)"),
    ("halving", "bits in the other order", "(8, 16), (4, 8), (2, 4)", "(8, 4), (4, 8), (2, 16)"),
    ("halving", "the low bits", "(8, 16), (4, 8), (2, 4)", "(8, 4), (4, 2), (2, 1)"),
    ("halving", "two halvings", "(8, 16), (4, 8), (2, 4)", "(8, 16), (4, 8)"),
    ("halving", "one halving too many", "(2, 4):", "(2, 4), (1, 2):"),
    ("halving", "all are shuffled", "for i in range(count)", "for i in range(2 * count)"),
    ("halving", "neighbours are paired", "sums[:, count + i].copy()", "sums[:, i ^ 1].copy()"),
    ("halving", "all lanes keep the lower half", "np.where(lane & bit, (high, low), (low, high))",
     "(low, high)"),
    ("halving", "every lane has everything", "for count, bit in (8, 16), (4, 8), (2, 4):",
     "for bit in (16, 8, 4):\n        for i in range(16):\n"
     "            sums[:, i] = sums[:, i] + shuffle(sums[:, i], bit)\n"
     "    at = lane // 4 * 2\n    return np.stack([sums[lane, at], sums[lane, at + 1]], axis=1)\n"
     "    for count, bit in ():"),
]
