"""Wrong answers to the exercises of chapter 12a: each must be refused by its check."""

import re

import numpy as np

from nanoeuler.emulator import run
from nanoeuler.engines.gpu.attention.layout import Backward, padded
from nanoeuler.engines.gpu.attention.wgmma_launch import backward_launches

CHAPTER = "12a-flash-on-tensor-cores"
NAMES = dict(
    np=np, re=re, padded=padded, Backward=Backward, backward_launches=backward_launches, run=run
)  # fmt: skip

LINE = r're.sub(r"\n *dq_before\(dq\).*", "", source)'
NUMBERS = "384, 2"
FIRST = "max(0, first - W + 1) // keys"
LAST = "last // keys + 1"
BEGIN, UNTIL = "range(first // queries, ", "last[end] // queries + 1"
END, LATEST = "min(first + rows, T) - 1", "min((n + 1) * queries, T) - 1"
DIAGONAL, EDGE = "n * keys + keys - 1 > first", "n * keys < last - W + 1"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("without", "nothing gone", LINE, "source"),
    ("without", "another wait gone", LINE, r're.sub(r"\n *rows_done\(dp\).*", "", source)'),
    ("without", "the wait for scores gone", LINE, r're.sub(r"\n *first_done\(s\).*", "", source)'),
    ("without", "all waits gone", LINE, r're.sub(r"\n *\w+_(done|before)\(\w+\).*", "", source)'),
    ("without", "the line before gone too", LINE,
     r're.sub(r"\n[^\n]*\n *dq_before\(dq\).*", "", source)'),
    ("without", "the line after gone too", LINE,
     r're.sub(r"\n *dq_before\(dq\).*\n.*", "", source)'),
    ("without", "a step later", LINE,
     r're.sub(r"(\n *dq_before\(dq\).*)(\n.*)", r"\2\1", source)'),
    ("without", "twice", LINE, r're.sub(r"(\n *dq_before\(dq\).*)", r"\1\1", source)'),
    ("without", "nothing left", LINE, '""'),
    ("without", "one block, one warpgroup", NUMBERS, "128, 1"),
    ("without", "one warpgroup alone", NUMBERS, "384, 1"),
    ("without", "too few steps", NUMBERS, "128, 2"),
    ("without", "as many steps as stages", NUMBERS, "256, 2"),
    ("without", "one position", NUMBERS, "1, 2"),
    ("window_tiles", "no window", FIRST, "0"),
    ("window_tiles", "a key too many", FIRST, "max(0, first - W) // keys"),
    ("window_tiles", "before the first key", FIRST, "(first - W + 1) // keys"),
    ("window_tiles", "the window of the last query", FIRST, "max(0, last - W + 1) // keys"),
    ("window_tiles", "tiles of the block's size", FIRST, "max(0, first - W + 1) // rows"),
    ("window_tiles", "whole tiles alone", FIRST, "-(-max(0, first - W + 1) // keys)"),
    ("window_tiles", "without the diagonal", LAST, "last // keys"),
    ("window_tiles", "a tile beyond the diagonal", LAST, "last // keys + 2"),
    ("window_tiles", "no mask on the diagonal", f"{DIAGONAL} or ", ""),
    ("window_tiles", "no mask at the window's edge", f" or {EDGE}", ""),
    ("window_tiles", "masks where both edges cut", f"{DIAGONAL} or", f"{DIAGONAL} and"),
    ("window_tiles", "a mask everywhere", f"{DIAGONAL} or", "True or"),
    ("window_tiles", "the edge of the first query", EDGE, "n * keys < first - W + 1"),
    ("window_tiles", "the edge a key too late", EDGE, "n * keys <= last - W + 1"),
    ("window_tiles", "the edge by a tile's last key", EDGE, "n * keys + keys - 1 < last - W + 1"),
    ("window_tiles", "the diagonal of the last query", DIAGONAL, "n * keys + keys - 1 > last"),
    ("window_tiles", "masks for all, tiles for none", "list(tiles), masked", "masked, list(tiles)"),
    ("query_tiles", "from the first query on", BEGIN, "range(0, "),
    ("query_tiles", "from the last key on", BEGIN, "range(end // queries, "),
    ("query_tiles", "tiles of the block's size", BEGIN, "range(first // rows, "),
    ("query_tiles", "to the end of the row", UNTIL, "(T - 1) // queries + 1"),
    ("query_tiles", "to where the first key is seen", UNTIL, "last[first] // queries + 1"),
    ("query_tiles", "to its own diagonal", UNTIL, "end // queries + 1"),
    ("query_tiles", "a tile too few", UNTIL, "last[end] // queries"),
    ("query_tiles", "a tile too many", UNTIL, "last[end] // queries + 2"),
    ("query_tiles", "a key beyond the block", END, "min(first + rows, T - 1)"),
    ("query_tiles", "keys beyond the row", END, "first + rows - 1"),
    ("query_tiles", "no mask on the diagonal", "n * queries < end or ", ""),
    ("query_tiles", "no mask between texts", " or min((n + 1) * queries, T) - 1 > limit", ""),
    ("query_tiles", "masks where both cut", "< end or min", "< end and min"),
    ("query_tiles", "a mask everywhere", "n * queries < end or", "True or"),
    ("query_tiles", "the diagonal of the first key", "n * queries < end", "n * queries < first"),
    ("query_tiles", "the diagonal a query too late", "n * queries < end", "n * queries <= end"),
    ("query_tiles", "the limit of the last key", "limit = last[first]", "limit = last[end]"),
    ("query_tiles", "the limit a query too early", "- 1 > limit", "- 1 >= limit"),
    ("query_tiles", "queries beyond the row", LATEST, "(n + 1) * queries - 1"),
    ("query_tiles", "a tile's first query", LATEST, "n * queries"),
    ("query_tiles", "all of the line is read", "limit = last[first]",
     "limit = min(last[s] for s in range(first, end + 1))"),
]
