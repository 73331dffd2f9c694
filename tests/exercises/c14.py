"""Wrong answers to the exercises of chapter 14: each must be refused by its check."""

import numpy as np
from helpers.exercises import cells_of, definitions

from nanoeuler.engines.sharding import halved

CHAPTER = "14-many-ranks"
NAMES = dict(np=np, halved=halved)
for cell in cells_of(CHAPTER):  # the first half of the ring
    if "def ring_rounds(" in cell:
        exec(definitions(cell, CHAPTER), NAMES)

BOTH = "count(low, middle, first, end) + count(middle, high, first, end)"
PART, RIGHT, HALF = "(rank - turn) % R", "(rank + 1) % R, part]", "low + (high - low) // 2"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("gather", "its own part in each round", PART, "rank"),
    ("gather", "the part of the neighbour on the right", PART, "(rank + 1 - turn) % R"),
    ("gather", "the parts of the first half", PART, "(rank - 1 - turn) % R"),
    ("gather", "parts in the other direction", PART, "(rank + turn) % R"),
    ("gather", "the round's number", PART, "turn"),
    ("gather", "the round's number, a round early", PART, "(turn + 1) % R"),
    ("gather", "a round too few", "range(R - 1)", "range(R - 2)"),
    ("gather", "one round", "range(R - 1)", "range(min(1, R - 1))"),
    ("gather", "to the left", RIGHT, "(rank - 1) % R, part]"),
    ("gather", "to the rank after the next", RIGHT, "(rank + 2) % R, part]"),
    ("gather", "not from the last to the first", RIGHT, "min(rank + 1, R - 1), part]"),
    ("gather", "the last rank sends nothing", "for rank in range(R):",
     "for rank in range(R - 1):"),
    ("gather", "added, not overwritten", "] = before", "] += before"),
    ("gather", "it is put where one's own part is", RIGHT, "(rank + 1) % R, (rank + 1) % R]"),
    ("sums", "one for each rank", BOTH, "1"),
    ("sums", "shard by shard", "high <= end:", "high <= end and high - low == 1:"),
    ("sums", "all branches inside, not the largest", "            return 1",
     "            return 2 * (high - low) - 1"),
    ("sums", "what is elsewhere, too", "            return 0", "            return 1"),
    ("sums", "the longer half first", HALF, "low + (high - low + 1) // 2"),
    ("sums", "halves that are powers of two", HALF,
     "low + (1 << ((high - low - 1).bit_length() - 1))"),
    ("sums", "the first half alone", " + count(middle, high, first, end)", ""),
    ("sums", "the half with more", BOTH,
     BOTH.replace("count", "max(count", 1).replace(" +", ",") + ")"),
    ("sums", "shares rounded up", "shards * (r + 1) // ranks)", "-(-shards * (r + 1) // ranks))"),
    ("sums", "equal shares", "shards * r // ranks, shards * (r + 1) // ranks)",
     "shards // ranks * r, shards // ranks * (r + 1))"),
    ("sums", "what touches is inside", "end <= low or high <= first", "end < low or high < first"),
    ("sums", "the first rank's for all", "for r in range(ranks)]", "for r in [0] * ranks]"),
]
