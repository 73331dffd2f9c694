"""What small models predict of a large one: bits per byte, a power of the work and a rest.

All models of the family read tokens in proportion to the products of a token, so that a model is
where it is by one number, C, the FLOPs of its training: L = E + A / C^a (Kaplan and others, 2020;
Hoffmann and others, 2022, for the rest E). Three runs leave a and E little to err by, but do not
hold them apart well. So E is drawn from 0 to where the fit is best, and the ends are told as well.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from nanoeuler.model.config import ModelConfig
from nanoeuler.planning.counts import flops_per_token

MOST = 0.9  # of the lowest bits that were seen, E at most


def line(points: Sequence[tuple[float, float]], rest: float) -> tuple[float, float, float]:
    """A, a and the sum of squares of L = rest + A / C^a through points (C, L), in logarithms."""
    x, y = np.log([c for c, _ in points]), np.log([bits - rest for _, bits in points])
    slope, begin = np.polyfit(x, y, 1)
    return math.exp(begin), -slope, float(np.sum((begin + slope * x - y) ** 2))


def at(points: Sequence[tuple[float, float]], rest: float, flops: float) -> float:
    """L at so many FLOPs, for one rest."""
    A, a, _ = line(points, rest)
    return rest + A / flops**a


def fitted(points: Sequence[tuple[float, float]]) -> float:
    """The rest E, from 0 to MOST of the lowest L, for which the line fits best."""
    grid = np.linspace(0, MOST * min(bits for _, bits in points), 400)
    return float(min(grid, key=lambda rest: line(points, rest)[2]))


def predict(runs: Sequence[dict], config: ModelConfig, tokens: float) -> dict:
    """What runs, {"flops", "bits"} each, predict of a model that reads so many tokens."""
    points = [(run["flops"], run["bits"]) for run in runs]
    flops, rest = tokens * flops_per_token(config), fitted(points)
    values = [at(points, each, flops) for each in (rest, 0.0, MOST * min(b for _, b in points))]
    A, a, error = line(points, rest)
    return {"model": asdict(config), "tokens": tokens, "flops": flops, "E": rest, "A": A, "a": a,
            "error": math.sqrt(error / len(points)), "predicted": values[0], "points": points,
            "lowest": min(values), "highest": max(values)}  # fmt: skip


def words(said: dict) -> str:
    """A prediction in a line."""
    return (f"predicted: {said['predicted']:.4f} bits per byte of held-out books after "
            f"{said['tokens'] / 1e6:.0f} million tokens, {said['lowest']:.3f} to "
            f"{said['highest']:.3f}, by {said['E']:.3f} + {said['A']:.3g} / C^{said['a']:.4f}")
