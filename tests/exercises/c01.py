"""Wrong answers to the exercises of chapter 1, each of which its check must refuse."""

import numpy as np


def count(text, vocabulary, context=1):
    """As in the chapter: for each context of a text, how often each letter followed."""
    table = {}
    for i in range(context, len(text)):
        row = table.setdefault(text[i - context : i], np.zeros(len(vocabulary)))
        row[vocabulary.index(text[i])] += 1
    return table


CHAPTER = "01-what-a-language-model-does"
NAMES = dict(np=np, count=count)

P = "(row.get(text[place], 0) + extra) / (sum(row.values()) + extra * len(letters))"
ROW = "tables[n].get(context[len(context) - n :], np.zeros(V))"
ANSWERS = [
    ("drawn", "a right end belongs to its piece", "point < end", "point <= end"),
    ("drawn", "the first piece that does not reach", "point < end", "point > end"),
    ("drawn", "counts taken for probabilities", "u * sum(counts)", "u"),
    ("drawn", "times the number of letters", "u * sum(counts)", "u * len(counts)"),
    ("drawn", "times the greatest count", "u * sum(counts)", "u * max(counts)"),
    ("drawn", "from the right", "u * sum(counts)", "(1 - u) * sum(counts)"),
    ("drawn", "dice of its own", "u * sum(counts)",
     "np.random.default_rng().random() * sum(counts)"),
    ("drawn", "nothing is added up", "end += counts[place]", "end = counts[place]"),
    ("drawn", "one added to each count", "end += counts[place]", "end += counts[place] + 1"),
    ("drawn", "all letters alike", "end += counts[place]", "end += sum(counts) / len(counts)"),
    ("drawn", "squares of counts", "end += counts[place]", "end += counts[place] ** 2"),
    ("drawn", "the letter after it", "return place", "return place + 1"),
    ("drawn", "the count, not the place", "return place", "return counts[place]"),
    ("drawn", "the letters from the last", "range(len(counts))", "reversed(range(len(counts)))"),
    ("drawn", "the last letter is left out", "range(len(counts))", "range(len(counts) - 1)"),
    ("drawn", "the counts are changed", "    point, end = u * sum(counts), 0.0",
     "    counts /= sum(counts)\n    point, end = u, 0.0"),
    ("drawn", "always the most probable", "    point, end = u * sum(counts), 0.0",
     "    return int(np.argmax(counts))\n    point, end = u * sum(counts), 0.0"),
    ("worst", "the least surprise", "-np.log2(p) > most[2] + 1e-9", "-np.log2(p) < abs(most[2])"),
    ("worst", "the last of equals", "> most[2] + 1e-9", ">= most[2] - 1e-9"),
    ("worst", "nats", "most = place, text[place], -np.log2(p)",
     "most = place, text[place], -np.log(p)"),
    ("worst", "a place early", "most = place, text[place]", "most = place - 1, text[place]"),
    ("worst", "the letter before", "most = place, text[place]", "most = place, text[place - 1]"),
    ("worst", "the row of the letter itself", "table[text[place - 1]]", "table[text[place]]"),
    ("worst", "nothing added to the count", "row.get(text[place], 0) + extra",
     "row.get(text[place], 1e-9)"),
    ("worst", "added once to the sum", "extra * len(letters)", "extra"),
    ("worst", "added for what was seen alone", "extra * len(letters)", "extra * len(row)"),
    ("worst", "letters with a row alone", "set(table).union(*table.values())", "set(table)"),
    ("worst", "one added, whatever is asked", P,
     "(row.get(text[place], 0) + 1) / (sum(row.values()) + len(letters))"),
    ("worst", "kinds, not how often", "sum(row.values())", "len(row)"),
    ("worst", "the whole table's sum", "sum(row.values())",
     "sum(n for r in table.values() for n in r.values())"),
    ("worst", "the first pair is left out", "range(1, len(text))", "range(2, len(text))"),
    ("worst", "the last letter is left out", "range(1, len(text))", "range(1, len(text) - 1)"),
    ("mixed", "begins with nothing", "np.full(V, 1 / V)", "np.zeros(V)"),
    ("mixed", "begins with ones", "np.full(V, 1 / V)", "np.ones(V)"),
    ("mixed", "the longest context is left out", "range(len(context) + 1)", "range(len(context))"),
    ("mixed", "the empty context is left out", "range(len(context) + 1)",
     "range(1, len(context) + 1)"),
    ("mixed", "from the longest to the empty", "range(len(context) + 1)",
     "reversed(range(len(context) + 1))"),
    ("mixed", "the first letters, not the last", "context[len(context) - n :]", "context[:n]"),
    ("mixed", "the whole context for the empty one", "context[len(context) - n :]", "context[-n:]"),
    ("mixed", "the shorter one not weighed", "row + strength * p", "row + p"),
    ("mixed", "the strength in place of the shorter one", "row + strength * p",
     "row + strength / V"),
    ("mixed", "the sum without strength", "(row.sum() + strength)", "max(row.sum(), 1)"),
    ("mixed", "kinds, not how often", "row.sum()", "(row > 0).sum()"),
    ("mixed", "strength of one", "    V = len", "    strength = 1.0\n    V = len"),
    ("mixed", "the table is changed", "p = (row + strength * p)", "row += strength * p; p = row"),
]
