"""Wrong answers to the exercises of chapter 13a: each must be refused by its check."""

from dataclasses import replace
from random import Random

import numpy as np
from helpers.exercises import cells_of

from nanoeuler.engines.gpu.rows.residual_norm import add_scaled_launch
from nanoeuler.engines.gpu.step.precision import PRECISIONS
from nanoeuler.engines.gpu.step.program import Arena, Array, Recording
from nanoeuler.engines.gpu.step.recording import Machine, Rules, record_step
from nanoeuler.model.config import ModelConfig

CHAPTER = "13a-a-step-as-a-list"
TINY = ModelConfig(
    vocab_size=71, dim=64, n_layers=1, n_heads=1, n_kv_heads=1, hidden=64, context=16, n_predict=1,
    norm="layer", position="learned", mlp="gelu", bias=True, tied=True,
)  # fmt: skip
NAMES = dict(
    np=np,
    replace=replace,
    Random=Random,
    Arena=Arena,
    Array=Array,
    Recording=Recording,
    add_scaled_launch=add_scaled_launch,
    record_step=record_step,
    PRECISIONS=PRECISIONS,
    card=Machine((9, 0), 132),
    rules=Rules(1.0, 0.9, 0.98, 1e-8),
    tiny=TINY,
)
for cell in cells_of(CHAPTER):  # what the checks draw from and plant
    if "def drawn_loans(" in cell or "def planted(" in cell:
        exec(cell, NAMES)

MEET = "first < until and since < last"
END = "sum((n - 1) * s for n, s in extents) + array.dtype.itemsize"
INSIDE = "start <= begin and end <= stop"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("most", "all that ever came", "most = max(most, lent)", "most += max(change, 0)"),
    ("most", "what is lent at the end", "most = max(most, lent)", "most = lent"),
    ("most", "the largest alone", "max(most, lent)", "max(most, change)"),
    ("most", "the least", "max(most, lent)", "min(most, lent)"),
    ("most", "back a launch too late", "(last, -size)", "(last + 1, -size)"),
    ("most", "back a launch too early", "(last, -size)", "(last - 1, -size)"),
    ("most", "what comes back is lent again", "(last, -size)", "(last, size)"),
    ("most", "lent before what came back", "sorted(events)",
     "sorted(events, key=lambda e: (e[0], -e[1]))"),
    ("most", "all that comes back first", "sorted(events)", "sorted(events, key=lambda e: e[1])"),
    ("most", "backwards", "sorted(events)", "sorted(events, reverse=True)"),
    ("most", "arrays, not bytes", "lent += change", "lent += (change > 0) - (change < 0)"),
    ("most", "addresses for launches", "(first, size) for _, size, first, _ in",
     "(start, size) for start, size, _, _ in"),
    ("most", "where the last loan ends", "lent = most = 0",
     "return max(start + size for start, size, _, _ in loans)"),
    ("placed", "time forgotten", MEET + " and ", ""),
    ("placed", "a launch too short", "since < last", "since < last - 1"),
    ("placed", "a launch too short at its other end", "first < until", "first < until - 1"),
    ("placed", "a launch too long", "since < last", "since <= last"),
    ("placed", "a launch too long at its other end", "first < until", "first <= until"),
    ("placed", "what was lent first is forgotten", MEET, "first < until and since == first"),
    ("placed", "where it begins, not where it ends", "start < starts[i] + size",
     "start < starts[i]"),
    ("placed", "the place in front", "starts[i] = end", "starts[i] = start"),
    ("placed", "nobody is pushed", "starts[i] = end", "pass"),
    ("placed", "behind its own bytes", "starts[i] = end", "starts[i] += size"),
    ("placed", "the order of the places", "sorted(done)", "done"),
    ("placed", "sizes for ends", "starts[i] + size, first, last))", "size, first, last))"),
    ("placed", "the old places are remembered", "done.append((starts[i],",
     "done.append((loans[i][0],"),
    ("placed", "the places in order, not the loans'", "return starts", "return sorted(starts)"),
    ("placed", "last and first exchanged", "_, size, first, last = loans[i]",
     "_, size, last, first = loans[i]"),
    ("astray", "its first byte alone", "end <= stop", "begin < stop"),
    ("astray", "its last byte alone", "start <= begin and ", ""),
    ("astray", "a byte too few", "end <= stop", "end < stop"),
    ("astray", "whole loans alone", INSIDE, "start == begin"),
    ("astray", "in all loans", "not any(", "not all("),
    ("astray", "what is lent", "if not any(", "if any("),
    ("astray", "a launch too long", "a <= i < b", "a <= i <= b"),
    ("astray", "a launch too short", "a <= i < b", "a < i < b"),
    ("astray", "a launch too short at its end", "a <= i < b", "a <= i < b - 1"),
    ("astray", "a launch later", "a <= i < b", "a < i <= b"),
    ("astray", "lent at any time", " if a <= i < b", ""),
    ("astray", "as if it were dense", END, "array.nbytes"),
    ("astray", "a row too many", "(n - 1) * s", "n * s"),
    ("astray", "the last axis alone", "in extents)", "in [*extents][-1:])"),
    ("astray", "launches are counted from one", "found.append((i, begin))",
     "found.append((i + 1, begin))"),
]
