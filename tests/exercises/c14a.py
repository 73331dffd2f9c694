"""Wrong answers to the exercises of chapter 14a: each must be refused by its check."""

from random import Random

import numpy as np
from helpers.exercises import cells_of

from nanoeuler.engines.gpu.ranks.exchange import Exchange, Join
from nanoeuler.engines.gpu.rows.residual_norm import add_scaled_launch
from nanoeuler.engines.gpu.step.program import Recording

CHAPTER = "14a-gradients-between-gpus"
NAMES = dict(
    np=np,
    Random=Random,
    Exchange=Exchange,
    Join=Join,
    Recording=Recording,
    add_scaled_launch=add_scaled_launch,
)
for cell in cells_of(CHAPTER):  # what the checks draw from and plant
    if "def listed(" in cell:
        exec(cell, NAMES)

START, SEEN = "max(clock, at) + time", "clock - complete[-1]"
GIVEN, MEET = "for span in spans(other.launch)]", "start < b and a < end"
ALONE = "            under_way = []"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("seen", "nobody waits for completion", START, "clock + time"),
    ("seen", "nobody waits for the wire", START, "at + time"),
    ("seen", "the earlier", "max(clock, at)", "min(clock, at)"),
    ("seen", "all travel at once", START, "max(clock, at + time)"),
    ("seen", "from the first's completion", "complete[-1]", "complete[0]"),
    ("seen", "from the last but one's completion", "complete[-1]", "complete[-2:][0]"),
    ("seen", "from the beginning", SEEN, "clock"),
    ("seen", "nothing overlaps", SEEN, "sum(takes)"),
    ("seen", "the last alone", SEEN, "takes[-1]"),
    ("seen", "the longest", SEEN, "max(takes)"),
    ("seen", "the wire's idle time", SEEN, "clock - sum(takes)"),
    ("seen", "all of the backward pass hides", SEEN, "max(0, sum(takes) - complete[-1])"),
    ("seen", "each by itself", SEEN,
     "takes[-1] + sum(max(0, t - b + a) for t, a, b in zip(takes, complete, complete[1:]))"),
    ("racing", "where it goes alone", GIVEN, GIVEN.replace(")]", ")[1:]]")),
    ("racing", "what is given alone", GIVEN, GIVEN.replace(")]", ")[:1]]")),
    ("racing", "any memory", "m == memory and ", ""),
    ("racing", "neighbours meet", MEET, "start <= b and a <= end"),
    ("racing", "the same beginning", MEET, "start == a"),
    ("racing", "begins inside", MEET, "a <= start < b"),
    ("racing", "is inside", MEET, "a <= start and end <= b"),
    ("racing", "no join", ALONE, "            pass"),
    ("racing", "a join waits for the first alone", ALONE, "            under_way = under_way[1:]"),
    ("racing", "the last exchange alone", "under_way.append(step)", "under_way = [step]"),
    ("racing", "nobody need wait", "found + [step.name for step in under_way]", "found"),
    ("racing", "who does not wait is no race", "return found +", "return"),
    ("racing", "where it is written alone", "for memory, start, end in spans(step.launch):",
     "for memory, start, end in spans(step.launch)[:1]:"),
    ("racing", "the exchange, not the launch", "found.append(step.name)",
     "found.append(under_way[0].name)"),
]
