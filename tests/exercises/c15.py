"""Wrong answers to the exercises of chapter 15, each of which its check must refuse."""

import numpy as np

from nanoeuler.inference.decoder import newest_attention
from nanoeuler.model.layers import rope

CHAPTER = "15-generation"
NAMES = dict(np=np, rope=rope, newest_attention=newest_attention)

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
    ("turning", "nobody turns the queries",
     "rope(heads[None, :, :H], H, cos[start:end], sin[start:end])[0]", "heads[:, :H]"),
    ("turning", "queries as if they began at zero", "H, cos[start:end], sin[start:end]",
     "H, cos[: len(heads)], sin[: len(heads)]"),
    ("turning", "nobody turns the keys", "rope(held, G, cos[:end], sin[:end])[0]", "held[0]"),
    ("turning", "the first key head alone is turned", "rope(held, G,", "rope(held, 1,"),
    ("turning", "keys turned the other way", "sin[:end])[0]", "-sin[:end])[0]"),
    ("turning", "keys one place ahead", "G, cos[:end], sin[:end]", "G, cos[1 : end + 1], "
     "sin[1 : end + 1]"),
    ("turning", "turned keys are kept", "    return newest",
     "    keys[:, :end] = turned\n    return newest"),
    ("turning", "no key is written", "keys[:, start:end] = heads[:, H : H + G].swapaxes(0, 1)",
     "pass"),
    ("turning", "no value is written", "values[:, start:end] = heads[:, H + G :].swapaxes(0, 1)",
     "pass"),
    ("turning", "values for keys", "heads[:, H : H + G]", "heads[:, H + G :]"),
    ("turning", "keys for values", "heads[:, H + G :]", "heads[:, H : H + G]"),
    ("turning", "written from the beginning", "start:end] = heads[:, H + G",
     "0 : len(heads)] = heads[:, H + G"),
    ("turning", "queries for keys", "heads[:, H : H + G]", "heads[:, :G]"),
    ("turning", "the same key in all places", "keys[:, start:end] =", "keys[:, start:] ="),
    ("turning", "a value ahead", "values[:, :end])", "values[:, 1 : end + 1])"),
    ("turning", "the newest alone", "held = keys[:, :end]", "held = keys[:, start:end]"),
    ("typical", "top-p", "np.abs(surprise - np.sum(p * surprise))", "surprise"),
    ("typical", "the rare first", "np.abs(surprise - np.sum(p * surprise))", "-surprise"),
    ("typical", "more surprising ones only", "np.abs(surprise - np.sum(p * surprise))",
     "np.maximum(surprise - np.sum(p * surprise), 0)"),
    ("typical", "a plain mean", "np.sum(p * surprise)", "np.mean(surprise)"),
    ("typical", "a sum", "np.sum(p * surprise)", "np.sum(surprise)"),
    ("typical", "zero for the entropy's zero", "-np.log(np.where(p > 0, p, 1))", "-np.log(p)"),
    ("typical", "entropy in bits", "np.sum(p * surprise)", "np.sum(p * surprise) / np.log(2)"),
    ("typical", "nearest in probability", "np.abs(surprise - np.sum(p * surprise))",
     "np.abs(p - np.sum(p * p))"),
    ("typical", "the farthest first", "np.where(p > 0, distance, np.inf)",
     "np.where(p > 0, -distance, np.inf)"),
    ("typical", "the one that reaches it is dropped", " - p[order]", ""),
    ("typical", "the others", "before < share", "before >= share"),
    ("typical", "each for itself", "before < share", "p[order] < share"),
    ("typical", "in the order of the sort", "keep[order] = before", "keep[:] = before"),
    ("typical", "what is impossible is kept", "keep & (p > 0)", "keep | (p == 0)"),
    ("typical", "half of the share", "before < share", "before < share / 2"),
]
