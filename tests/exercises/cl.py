"""Wrong answers to the exercises of appendix L: each must be refused by its check."""

import numpy as np

CHAPTER = "l-attention-on-every-card"
NAMES = dict(np=np, FORBIDDEN=-1e30)

MAXIMA = "    for bit in 1, 2:\n        m = np.maximum(m, shuffle(m, bit))\n"
SUMS = "    for bit in 1, 2:\n        total = total + shuffle(total, bit)\n"
PARTS = "s.reshape(32, 4, 2, 2)"
PACKED = "p.reshape(32, 2, 4, 2), total"
BEHIND = "distance + 8 * (i // 2) - (8 * n + i % 2)"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("quad", "each lane its own maximum", MAXIMA, ""),
    ("quad", "each lane its own sum", SUMS, ""),
    ("quad", "maxima of two lanes", MAXIMA, MAXIMA.replace("in 1, 2:", "in (1,):")),
    ("quad", "sums of two lanes", SUMS, SUMS.replace("in 1, 2:", "in (1,):")),
    ("quad", "the same exchange twice", SUMS, SUMS.replace("in 1, 2:", "in 1, 1:")),
    ("quad", "lanes of other rows", MAXIMA, MAXIMA.replace("in 1, 2:", "in 4, 8:")),
    ("quad", "lanes of other rows add", SUMS, SUMS.replace("in 1, 2:", "in 4, 8:")),
    ("quad", "all eight lanes", SUMS, SUMS.replace("in 1, 2:", "in 1, 2, 4:")),
    ("quad", "one maximum for both rows", "parts.max(axis=(1, 3))",
     "np.repeat(parts.max(axis=(1, 2, 3))[:, None], 2, axis=1)"),
    ("quad", "one sum for both rows", "p.sum(axis=(1, 3))",
     "np.repeat(p.sum(axis=(1, 2, 3))[:, None], 2, axis=1)"),
    ("quad", "no maximum at all", "np.exp2(parts - m[:, None, :, None])", "np.exp2(parts)"),
    ("quad", "base e", "np.exp2(", "np.exp("),
    ("quad", "rows exchanged", "m[:, None, :, None]", "m[:, None, ::-1, None]"),
    ("quad", "the least of a row", "np.maximum(", "np.minimum("),
    ("quad", "sums of scores", "p.sum(", "parts.sum("),
    ("quad", "divided already", PACKED,
     "(p / total[:, None, :, None]).reshape(32, 2, 4, 2), total"),
    ("quad", "rows before keys", PACKED, "p.swapaxes(1, 2).reshape(32, 2, 4, 2), total"),
    ("quad", "neighbours exchanged", PACKED, "p.reshape(32, 2, 4, 2)[..., ::-1], total"),
    ("quad", "rows and neighbours confused", PARTS, "s.reshape(32, 4, 2, 2).swapaxes(2, 3)"),
    ("window", "the future", "not 0 <= behind < W", "not behind < W"),
    ("window", "no window", "not 0 <= behind < W", "not 0 <= behind"),
    ("window", "a key too many", "behind < W", "behind <= W"),
    ("window", "a key too few", "behind < W", "behind < W - 1"),
    ("window", "not itself", "0 <= behind", "0 < behind"),
    ("window", "what is seen is forbidden", "not 0 <= behind < W", "0 <= behind < W"),
    ("window", "one query alone", "8 * (i // 2)", "0"),
    ("window", "the lower query before the upper", "distance + 8", "distance - 8"),
    ("window", "queries side by side", "i // 2", "i % 2"),
    ("window", "pairs of keys", "i % 2", "0"),
    ("window", "half of the keys", "keys // 8", "keys // 16"),
    ("window", "groups of four keys", "8 * n", "4 * n"),
    ("window", "behind and ahead", BEHIND, f"-({BEHIND})"),
    ("window", "the upper query's score four times", "s[4 * n + i]", "s[4 * n]"),
]
