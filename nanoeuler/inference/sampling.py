# Made from book/15-generation.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-generation-distribution
"""The rules to draw the next token by, given the logits of a model and the text so far.

Not here: how the text is read, and where it ends (decoder.py).

V vocabulary.
"""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypedDict

import numpy as np

from nanoeuler.errors import UserError

# The largest temperature and penalty. (At this temperature usual logits give equal probabilities.)
HOTTEST = 1e30
LEAST = 1e-30  # the least penalty: the largest float32, 3e38, divided by it fits a float64


class SamplingOptions(TypedDict, total=False):
    """How the next token is drawn; an option that is left out has the default of `Sampler`."""

    temperature: float  # 0: always the most probable token
    top_k: int          # only so many of the most probable tokens stay; 0: all
    top_p: float        # the most probable tokens that together reach this; 1: all
    min_p: float        # tokens with at least this share of the largest probability; 0: all
    repetition_penalty: float  # above 1: lowers logits of tokens already in the text; 1: no change
    seed: int           # equal seeds, equal texts (a `Sampler` takes several numbers, too)


def _is(value, kind, good):
    """Whether a value is a number of this kind for which `good` holds; false for NaN."""
    return isinstance(value, kind) and not isinstance(value, bool) and good(value)


def check(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
    repetition_penalty: float = 1.0, seed: int | Sequence[int] = 0,
) -> None:  # fmt: skip
    """UserError, in one line, for the first option whose value isn't allowed.

    NumPy's numbers are allowed, too; a seed may be a list or tuple of whole numbers.
    """
    seeds = seed if isinstance(seed, list | tuple) else [seed]
    for name, value, allowed, wanted in (
        ("temperature", temperature, _is(temperature, Real, lambda x: 0 <= x <= HOTTEST),
         f"a number from 0 to {HOTTEST:g}"),
        ("top_k", top_k, _is(top_k, Integral, lambda x: x >= 0),
         "a whole number of at least 0, where 0 leaves out nothing"),
        ("top_p", top_p, _is(top_p, Real, lambda x: 0 < x <= 1),
         "a number above 0 and at most 1 (1: all stay)"),
        ("min_p", min_p, _is(min_p, Real, lambda x: 0 <= x <= 1),
         "a number from 0 (0: all stay) to 1"),
        ("repetition_penalty", repetition_penalty,
         _is(repetition_penalty, Real, lambda x: LEAST <= x <= HOTTEST),
         f"a number from {LEAST:g} to {HOTTEST:g}, of which 1 changes nothing"),
        ("seed", seed, all(_is(each, Integral, lambda x: x >= 0) for each in seeds),
         "a whole number of at least 0"),
    ):  # fmt: skip
        if not allowed:
            raise UserError(f"expected {name} to be {wanted}, got {value!r:.60}: choose another")


def distribution(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """The probabilities (V,) float64 to draw a token from, given its logits (V,).

    temperature 0 keeps only the most probable token; top_k 0, top_p 1 and min_p 0 leave out
    nothing. Cuts come in this order, each on what the previous left. Equation
    eq-generation-temperature. UserError as from `check`.
    """
    check(temperature, top_k, top_p, min_p)
    z = np.asarray(logits, dtype=np.float64)
    if temperature == 0:
        return np.eye(1, z.size, np.argmax(z))[0]  # 1 at the largest, 0 elsewhere
    with np.errstate(over="ignore"):  # overflow gives -inf, whose exponential is 0
        p = np.exp((z - z.max()) / temperature)  # not scaled yet: the largest is e^0 = 1
    if top_k or top_p < 1:
        best = np.sort(p)[::-1][: top_k or None]
        if top_p < 1:
            before = np.cumsum(best) - best  # the probability of all that come before
            # Not `before < ...`: for NaN logits that's empty, and best[-1] would fail.
            best = best[~(before >= top_p * best.sum())]
        p[p < best[-1]] = 0
        equal = np.flatnonzero(p == best[-1])  # keep as many as `best` has, smaller ids first
        p[equal[np.count_nonzero(best == best[-1]) :]] = 0
    if min_p:
        p[p < min_p] = 0
    return p / p.sum()


def penalised(logits: np.ndarray, text: Sequence[int], penalty: float) -> np.ndarray:
    """The logits (V,) after the repetition penalty for the ids in `text`; 1 changes nothing."""
    if penalty == 1:
        return logits
    z, seen = np.array(logits, dtype=np.float64), np.unique(text)
    z[seen] = np.where(z[seen] > 0, z[seen] / penalty, z[seen] * penalty)
    return z


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """What the model itself says, before any option: log p (..., V) float64 of logits (..., V)."""
    z = np.asarray(logits, dtype=np.float64)
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def draw(probabilities: np.ndarray, u: float) -> int:
    """The token in whose stretch of the interval the number 0 <= u < 1 falls; (V,) -> int."""
    possible = np.flatnonzero(probabilities)
    ends = np.cumsum(probabilities[possible])
    return int(possible[np.searchsorted(ends[:-1], u, side="right")])


class Sampler:
    """Draws the tokens of one text. UserError for wrong `SamplingOptions`, when it is made."""

    def __init__(
        self, temperature: float = 0.8, top_k: int = 0, top_p: float = 0.95, min_p: float = 0.0,
        repetition_penalty: float = 1.0, seed: int | Sequence[int] = 0,
    ):  # fmt: skip
        check(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        self.cut, self.penalty = (temperature, top_k, top_p, min_p), repetition_penalty
        self.rng = np.random.default_rng(seed)

    def distribution(self, logits: np.ndarray, text: Sequence[int]) -> np.ndarray:
        """The probabilities (V,) of the token after `text`, which the penalty looks at."""
        return distribution(penalised(logits, text, self.penalty), *self.cut)

    def draw(self, probabilities: np.ndarray) -> int:
        """A token drawn with probabilities (V,); always uses up exactly one random number."""
        return draw(probabilities, self.rng.random())
