# Made from book/10-generation.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-generation-distribution
"""The rules to draw the next token by, given the logits of a model.

Leaves out the model (decoder.py), and rules that look back at the text.

V vocabulary.
"""

from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np

from nanoeuler.errors import UserError

HOTTEST = 1e30  # a temperature that no logits differ by: all tokens are equally likely


def check(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int | Sequence[int] = 0
) -> None:
    """UserError, in a line about the first that is wrong, for knobs that nothing is drawn by.

    NumPy's numbers are as good as Python's; a seed may be several whole numbers.
    """
    seeds = seed if isinstance(seed, list | tuple) else [seed]
    for name, value, good, wanted in (
        ("temperature", temperature,
         isinstance(temperature, Real) and 0 <= temperature <= HOTTEST,
         f"a number from 0 to {HOTTEST:g}"),
        ("top_k", top_k, isinstance(top_k, Integral) and top_k >= 0,
         "a whole number of at least 0, which leaves out nothing"),
        ("top_p", top_p, isinstance(top_p, Real) and 0 < top_p <= 1,
         "a number above 0 and at most 1, which leaves out nothing"),
        ("seed", seed, all(isinstance(each, Integral) and each >= 0 for each in seeds),
         "a whole number of at least 0"),
    ):  # fmt: skip
        if not good:
            raise UserError(f"expected {name} to be {wanted}, got {value!r:.60}: choose another")


def distribution(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """The probabilities (V,) float64 to draw a token from, given its logits (V,).

    temperature 0 leaves the most probable token alone; top_k 0 and top_p 1 leave out nothing. With
    both, a token must pass both. Equation eq-generation-temperature. UserError as `check` has it.
    """
    check(temperature, top_k, top_p)
    z = np.asarray(logits, dtype=np.float64)
    if temperature == 0:
        return np.eye(1, z.size, np.argmax(z))[0]
    with np.errstate(over="ignore"):  # to -inf, of which the exponential is 0
        p = np.exp((z - z.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")  # of two that are equal, the smaller id comes first
    if top_k:
        p[order[top_k:]] = 0
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]  # the probability of all that are more probable
        p[order[before >= top_p]] = 0
    return p / p.sum()


def draw(probabilities: np.ndarray, u: float) -> int:
    """The token in whose stretch of the interval the number 0 <= u < 1 falls; (V,) -> int."""
    possible = np.flatnonzero(probabilities)
    ends = np.cumsum(probabilities[possible])
    return int(possible[np.searchsorted(ends[:-1], u, side="right")])
