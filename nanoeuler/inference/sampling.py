# Made from book/10-generation.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-generation-distribution
"""The rules to draw the next token by, given the logits of a model.

Leaves out the model (decoder.py), and rules that look back at the text.

V vocabulary.
"""

import numpy as np

from nanoeuler.errors import UserError


def distribution(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """The probabilities (V,) float64 to draw a token from, given its logits (V,).

    temperature 0 leaves the most probable token alone; top_k 0 and top_p 1 leave out nothing. With
    both, a token must pass both. Equation eq-generation-temperature. UserError for other values.
    """
    if not 0 <= temperature < np.inf or top_k < 0 or not 0 < top_p <= 1:
        raise UserError(
            "expected temperature >= 0, top-k >= 0 and 0 < top-p <= 1, got temperature "
            f"{temperature}, top-k {top_k}, top-p {top_p}"
        )
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
