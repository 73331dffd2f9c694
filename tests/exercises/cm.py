"""Wrong answers to the exercises of appendix M: each must be refused by its check."""

import numpy as np

CHAPTER = "m-float32-attention"
OFF = {1: 2**-7 + 2**-16, 2: 2**-15 * (1 + 2**-8), 3: 2**-24 + 2**-34}  # as the chapter has it
NAMES = dict(np=np, OFF=OFF)

SIZE = "np.log1p(error) / (2 * OFF[pieces])"
FORWARD, DQ, DKDV = '"forward": own + 2', '"dq": 2 * own + 2', '"dkdv": 2 * own + 2'
LINES = '2 * 4 * step if kernel == "dkdv" else 0'
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("largest", "the sum is exact", SIZE, "np.log1p(error) / OFF[pieces]"),
    ("largest", "a root", SIZE, "np.sqrt(error) / (2 * OFF[pieces])"),
    ("largest", "small errors alone", SIZE, "error / (2 * OFF[pieces])"),
    ("largest", "too small instead of too large", SIZE,
     "-np.log1p(-np.minimum(error, 0.9)) / (2 * OFF[pieces])"),
    ("largest", "the exponential, not its inverse", SIZE, "np.expm1(error) / (2 * OFF[pieces])"),
    ("largest", "without the probability itself", SIZE, "np.log(error) / (2 * OFF[pieces])"),
    ("largest", "in base 2", SIZE, "np.log2(1 + error) / (2 * OFF[pieces])"),
    ("largest", "halves that are multiplied", SIZE, "np.log1p(error / 2) / OFF[pieces]"),
    ("largest", "errors that cancel", SIZE, "np.log1p(error) / (np.sqrt(2) * OFF[pieces])"),
    ("largest", "too careful", SIZE, "np.log1p(error) / (4 * OFF[pieces])"),
    ("largest", "all pieces alike", SIZE, "np.log1p(error) / (2 * OFF[2])"),
    ("largest", "a product less exact", SIZE, "np.log1p(error) / (2 * 2.0 ** (-8 * pieces))"),
    ("largest", "multiplied", SIZE, "np.log1p(error) * (2 * OFF[pieces])"),
    ("held", "no do in dq", DQ, '"dq": own + 2'),
    ("held", "keys without values in dkdv", DKDV, '"dkdv": own + 2'),
    ("held", "two tiles of queries forward", FORWARD, '"forward": 2 * own + 2'),
    ("held", "keys without values forward", FORWARD, '"forward": own + 1'),
    ("held", "keys without values in dq", DQ, '"dq": 2 * own + 1'),
    ("held", "queries without do in dkdv", DKDV, '"dkdv": 2 * own + 1'),
    ("held", "outputs forward", FORWARD, '"forward": 3 * own + 2'),
    ("held", "no lines", LINES, "0"),
    ("held", "lse without delta", LINES, '4 * step if kernel == "dkdv" else 0'),
    ("held", "lines in halves", LINES, '2 * 2 * step if kernel == "dkdv" else 0'),
    ("held", "lines of keys", LINES, '2 * 4 * own if kernel == "dkdv" else 0'),
    ("held", "lines in dq too", LINES, '2 * 4 * step if kernel != "forward" else 0'),
    ("held", "lines in pieces", LINES,
     '2 * form.operands.parts * 2 * step if kernel == "dkdv" else 0'),
    ("held", "lines wherever", LINES, "2 * 4 * step"),
    ("held", "always two pieces", "2 * form.operands.parts *", "2 * 2 *"),
    ("held", "pieces of float32", "2 * form.operands.parts *", "4 * form.operands.parts *"),
    ("held", "a warp of eight rows", "16 * form.warps", "8 * form.warps"),
    ("held", "a warp of 32 rows", "16 * form.warps", "32 * form.warps"),
]
