"""Wrong answers to the exercises of chapter 15, each of which its check must refuse."""

import numpy as np

CHAPTER = "15-generation"
NAMES = dict(np=np)

BEFORE = "np.cumsum(p) - p < top_p"
ANSWERS = [
    ("kept", "no top-k", "p[:top_k] / p[:top_k].sum()", "p / p.sum()"),
    ("kept", "not made to sum to one", " / p[:top_k].sum()", ""),
    ("kept", "the one that reaches it is dropped", " - p < top_p", " < top_p"),
    ("kept", "the others", "< top_p", "> top_p"),
    ("kept", "each for itself", BEFORE, "p < top_p"),
    ("kept", "those that are large enough", BEFORE, "p > 1 - top_p"),
    ("kept", "one too few of top-k", "p = p[:top_k]", "p = p[: max(1, top_k - 1)]"),
    ("kept", "from the other end", "np.cumsum(p)", "np.cumsum(p[::-1])[::-1]"),
    ("kept", "what top-k cuts off", "p = p[:top_k]", "p = p[top_k:]"),
    ("kept", "one too many", "top_p))", "top_p)) + 1"),
    ("kept", "the rest's share", "top_p))", "1 - top_p))"),
    ("kept", "top-k alone", BEFORE, "p < 2"),
]
