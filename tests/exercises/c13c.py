"""Wrong answers to the exercises of chapter 13c, each of which its check must refuse."""

import numpy as np

CHAPTER = "13c-what-a-step-takes"
NAMES = dict(np=np)

MEANS = 'np.abs(np.convolve(gaps, np.ones(window), "valid") / window)'
ANSWERS = [
    ("apart", "nothing is smoothed", MEANS, "np.abs(gaps)"),
    ("apart", "a sum, no mean", MEANS, 'np.abs(np.convolve(gaps, np.ones(window), "valid"))'),
    ("apart", "distances are averaged", MEANS,
     'np.convolve(np.abs(gaps), np.ones(window), "valid") / window'),
    ("apart", "windows that hang over the ends", MEANS,
     'np.abs(np.convolve(gaps, np.ones(window), "same") / window)'),
    ("apart", "all windows that touch the curve", MEANS,
     'np.abs(np.convolve(gaps, np.ones(window)) / window)'),
    ("apart", "only where the first is above", MEANS,
     'np.convolve(gaps, np.ones(window), "valid") / window'),
    ("apart", "only where the second is above", MEANS,
     '-np.convolve(gaps, np.ones(window), "valid") / window'),
    ("apart", "windows beside each other", MEANS,
     "np.abs(gaps[: len(gaps) // window * window].reshape(-1, window).mean(axis=1))"),
    ("apart", "the window is one too short", MEANS,
     'np.abs(np.convolve(gaps, np.ones(max(1, window - 1)), "valid") / max(1, window - 1))'),
    ("apart", "the first window is left out", MEANS, MEANS + "[1:]"),
    ("apart", "the last window is left out", MEANS, MEANS + "[:-1]"),
    ("apart", "the least distance", "np.argmax(means)", "np.argmin(means)"),
    ("apart", "the last of equal ones", "int(np.argmax(means))",
     "len(means) - 1 - int(np.argmax(means[::-1]))"),
    ("apart", "where the window begins", "where + window", "where + 1"),
    ("apart", "steps from 0", "where + window", "where + window - 1"),
    ("apart", "in the middle of the window", "where + window", "where + window // 2"),
    ("apart", "the mean distance", "return means[where]", "return means.mean()"),
]
