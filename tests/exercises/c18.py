"""Wrong answers to the exercises of chapter 18, each of which its check must refuse."""

import numpy as np

CHAPTER = "18-the-whole-pipeline"
NAMES = dict(np=np)

RULE = "if name not in ended or stale & set(reads):"
ANSWERS = [
    ("again", "a change goes one stage far", "stale.add(writes)", "pass"),
    ("again", "what has ended stays", RULE, "if name not in ended:"),
    ("again", "what was begun is done", RULE, "if stale & set(reads):"),
    ("again", "both are demanded", "ended or stale", "ended and stale"),
    ("again", "all that it reads must have changed", "stale & set(reads)", "stale >= set(reads)"),
    ("again", "the first thing alone is looked at", "set(reads)", "set(reads[:1])"),
    ("again", "the last thing alone is looked at", "set(reads)", "set(reads[-1:])"),
    ("again", "what it writes, not what it reads", "stale & set(reads)", "writes in stale"),
    ("again", "whoever has written a changed thing, too", "stale & set(reads):",
     "stale & {*reads, writes}:"),
    ("again", "all after the first", RULE, "if names or name not in ended or stale & set(reads):"),
    ("again", "from the last to the first", "in stages:", "in stages[::-1]:"),
    ("again", "the names are in the wrong order", "return names", "return names[::-1]"),
    ("again", "what was given is changed", "set(changed), []", "changed, []"),
    ("again", "a stage that runs makes its inputs stale", "stale.add(writes)",
     "stale.update(reads, [writes])"),
    ("again", "only a stage that has not ended spreads", "if writes is not None:",
     "if writes is not None and name not in ended:"),
    ("again", "only a stage that had ended spreads", "if writes is not None:",
     "if writes is not None and name in ended:"),
    ("left", "what was done is forgotten", '(run["steps"] - run["done"])', 'run["steps"]'),
    ("left", "what is done, not what is left", '(run["steps"] - run["done"])', 'run["done"]'),
    ("left", "forward alone", "6 *", "2 *"),
    ("left", "the share multiplies the time", "/ (rate * share)", "* share / rate"),
    ("left", "the rate without its share", "(rate * share)", "rate"),
    ("left", "the share divides the rate", "(rate * share)", "rate * share"),
    ("left", "a comparison is a step", "2 * (1 + 1 / 3)", "1"),
    ("left", "two answers without the reference", "2 * (1 + 1 / 3)", "2"),
    ("left", "one answer and the reference", "2 * (1 + 1 / 3)", "(1 + 1 / 3)"),
    ("left", "the reference goes back, too", "2 * (1 + 1 / 3)", "4"),
    ("left", "every run compares", 'if run["compares"] else 1', ""),
    ("left", "minutes are seconds", '60 * run["minutes"]', 'run["minutes"]'),
    ("left", "minutes from the beginning", ' - run["seconds"]', ""),
    ("left", "less than nothing is left", "max(0, rest)", "rest"),
    ("left", "minutes of comparisons take longer", "seconds.append(",
     'rest *= 8 / 3 if run["compares"] and run["steps"] is None else 1\n        seconds.append('),
    ("left", "the sum", "return seconds", "return [sum(seconds)]"),
    ("left", "the tokens are left out", ' * run["tokens"]', ""),
    ("left", "always steps", 'if run["steps"] is None:', "if False:"),
]
