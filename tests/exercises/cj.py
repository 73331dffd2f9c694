"""Wrong answers to the exercises of appendix J: each must be refused by its check."""

import numpy as np

from nanoeuler.emulator import Fault, run
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.engines.gpu.lang.vectors import piece
from nanoeuler.engines.gpu.rows import embedding
from nanoeuler.engines.gpu.rows.column_sums import FREE, Walk

CHAPTER = "j-row-kernels"
NAMES = dict(np=np, run=run, Fault=Fault, to_bf16=to_bf16, from_bf16=from_bf16, Kernel=Kernel,
             Launch=Launch, Walk=Walk, FREE=FREE, piece=piece, embedding=embedding)  # fmt: skip

SQUARE, POSITIVE = "positive * positive", "max(values[k], float32(0))"
TURN = "order[own] = order[own][::-1]"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("squared_relu", "not squared", SQUARE, "positive"),
    ("squared_relu", "cubed", SQUARE, SQUARE + " * positive"),
    ("squared_relu", "negative numbers too", POSITIVE, "values[k]"),
    ("squared_relu", "what is negative", POSITIVE, "min(values[k], float32(0))"),
    ("squared_relu", "one row of each block", "row += int32(cuda.gridDim.y)", "row = rows"),
    ("squared_relu", "all rows from the block's on", "row += int32(cuda.gridDim.y)", "row += 1"),
    ("squared_relu", "past the last column", "row < rows and column < columns", "row < rows"),
    ("squared_relu", "past the last row", "row < rows and", "row <= rows and"),
    ("squared_relu", "loaded twice", "load(values, 0, u + at)", "load(values, 0, u + at);" * 2),
    ("squared_relu", "stored where it was loaded", "h + at", "u + at"),
    ("squared_relu", "the first strip alone", "cuda.blockIdx.x * threads + ", ""),
    ("squared_relu", "half of each piece", "range(width)", "range(width // 2)"),
    ("squared_relu", "a column a thread", "cuda.threadIdx.x) * width", "cuda.threadIdx.x)"),
    ("squared_relu", "float32's size", "multiprocessors=1), 2", "multiprocessors=1), 4"),
    ("backwards", "as before", "order[own][::-1]", "order[own]"),
    ("backwards", "turned twice", "order[own][::-1]", "order[own][::-1][::-1]"),
    ("backwards", "tokens backwards as well", TURN, "order[:] = order[::-1]"),
    ("backwards", "of the first token alone", "range(V)", "range(1)"),
    ("backwards", "not of the first token", "range(V)", "range(1, V)"),
    ("backwards", "not of the last token", "range(V)", "range(V - 1)"),
    ("backwards", "chunk by chunk", TURN,
     "order[own] = np.concatenate([c[::-1] for c in np.split(order[own], [32])])"),
    ("backwards", "chunks backwards, places not", TURN,
     "order[own] = np.concatenate(np.split(order[own], [32])[::-1])"),
    ("backwards", "the first place for all", "order[own][::-1]", "order[own][0]"),
    ("backwards", "the two ends exchanged", TURN,
     "order[own] = order[own][[-1, *range(1, own.sum() - 1), 0]]"),
    ("backwards", "begun at the second place", "order[own][::-1]", "np.roll(order[own], -1)"),
    ("backwards", "in a copy", "plan[-tokens.size :]", "plan[-tokens.size :].copy()"),
    ("backwards", "places counted from the end", "order[own][::-1]",
     "tokens.size - 1 - order[own]"),
]
