"""Wrong answers to the exercises of chapter 12: each must be refused by its check."""

import numpy as np

CHAPTER = "12-flash-attention"
NAMES = dict(np=np)

LSE, Y = "np.logaddexp(lse1, lse2)", "w1 * y1 + w2 * y2"
WEIGHTS = "np.exp(lse1 - lse)[:, None], np.exp(lse2 - lse)[:, None]"
SEES = "(s <= t) & (s > t - W)"
START = "max(0, start - W + 1)"
TILES = "range(first, last[end - 1] + 1, rows)"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("merge", "a mean", Y, "(y1 + y2) / 2"),
    ("merge", "a sum", Y, "y1 + y2"),
    ("merge", "weights exchanged", Y, "w2 * y1 + w1 * y2"),
    ("merge", "the likelier half alone", Y, "np.where(w1 > w2, y1, y2)"),
    ("merge", "the second half alone", Y, "y2"),
    ("merge", "no maximum", LSE, "np.log(np.exp(lse1) + np.exp(lse2))"),
    ("merge", "the larger half alone", LSE, "np.maximum(lse1, lse2)"),
    ("merge", "logarithms added", LSE, "lse1 + lse2"),
    ("merge", "in base 2", LSE, "np.logaddexp2(lse1, lse2)"),
    ("merge", "a mean of the exponentials", LSE, "np.logaddexp(lse1, lse2) - np.log(2)"),
    ("merge", "weights that no maximum holds down", WEIGHTS,
     "(np.exp(lse1) / np.exp(lse))[:, None], (np.exp(lse2) / np.exp(lse))[:, None]"),
    ("merge", "weights that do not add up to 1", WEIGHTS,
     "np.exp(lse1 - np.maximum(lse1, lse2))[:, None], "
     "np.exp(lse2 - np.maximum(lse1, lse2))[:, None]"),
    ("merge", "weights without the exponential", WEIGHTS,
     "(lse1 / (lse1 + lse2))[:, None], (lse2 / (lse1 + lse2))[:, None]"),
    ("merge", "the difference turned round", "lse1 - lse)", "lse - lse1)"),
    ("window", "no window", SEES, "s <= t"),
    ("window", "one key too many", SEES, "(s <= t) & (s >= t - W)"),
    ("window", "one key too few", SEES, "(s <= t) & (s > t - W + 1)"),
    ("window", "the future", SEES, "s > t - W"),
    ("window", "not itself", SEES, "(s < t) & (s > t - W)"),
    ("window", "all tiles fetched", START, "0"),
    ("window", "a tile fetched in vain", START, "max(0, start - W + 1 - columns)"),
    ("window", "a key too late", START, "max(0, start - W + 2)"),
    ("window", "the last query's window", START, "max(0, end - W)"),
    ("window", "keys one position on", "np.arange(first, last)", "np.arange(first, last) + 1"),
    ("window", "nan", "np.where(np.isfinite(larger), larger, 0.0)", "larger"),
    ("window", "o not rescaled", "alpha * o", "o"),
    ("window", "l not rescaled", "alpha * total", "total"),
    ("window", "rescaled by the old maximum", "np.exp(m - base)", "np.exp(base - m)"),
    ("window", "no scale", " / D**0.5", ""),
    ("window", "not divided by the sum", "o / total", "o"),
    ("window", "the last tile alone", "alpha * o + e @", "e @"),
    ("owner", "the future", "(np.arange(first, end) <= t[:, None]) & ", ""),
    ("owner", "queries of other texts", " & (t[:, None] <= last[keys])", ""),
    ("owner", "not the last query of a text", "<= last[keys]", "< last[keys]"),
    ("owner", "the first key's limit for all", "last[keys])", "last[first])"),
    ("owner", "all queries from 0 on", TILES, "range(0, last[end - 1] + 1, rows)"),
    ("owner", "all queries to the end", TILES, "range(first, T, rows)"),
    ("owner", "as far as the first key is seen", TILES, "range(first, last[first] + 1, rows)"),
    ("owner", "its own positions alone", TILES, "range(first, end, rows)"),
    ("owner", "one head of the group", "for h in range(R)", "for h in range(1)"),
    ("owner", "delta left out", " - delta[h, t, None]", ""),
    ("owner", "delta added", " - delta[h", " + delta[h"),
    ("owner", "L left out", "S - lse[h, t, None]", "S"),
    ("owner", "a softmax of the tile", "S - lse[h, t, None]",
     "S - np.logaddexp.reduce(S, axis=1, keepdims=True)"),
    ("owner", "no scale in the scores", "@ k[keys].T / np.sqrt(D)", "@ k[keys].T"),
    ("owner", "no scale in dk", "@ q[h, t] / np.sqrt(D)", "@ q[h, t]"),
    ("owner", "the last tile alone in dv", "dv += p.T", "dv = p.T"),
    ("owner", "the last tile alone in dk", "dk += dS.T", "dk = dS.T"),
    ("owner", "dS without p", "dS = p * (", "dS = ("),
    ("owner", "the scores' gradient in dv", "p.T @ dy[h, t]", "p.T @ q[h, t]"),
]
