"""Float64's causal attention, and how far float32 kernels may be off it, element by element.

One account for the emulator, with NumPy's arrays, and for a card, with PyTorch's: `xp` is either
module. A product of two numbers is off by at most `off` of itself, which is 0 for float32's own and
in PIECES for numbers in pieces of bf16. What float32 rounds is added with U, D + 8 times in a sum
over D, T + 8 times in one over T. A score's error is relative in its p, once for itself and once
for lse.

ds = p (dp - delta) is a difference, off by as much as dp and delta are, however little is left of
it: p (of dp + of delta), where of dp = |do| |v| (off + (D + 8) U). A query that sees one key has
p = 1 and dp = delta, so that its ds is nothing but this error.
"""

import math
from collections.abc import Mapping
from typing import Any

U = 2.0**-24
PIECES = {2: 2.0**-15 * (1 + 2.0**-8), 3: 2.0**-24 + 2.0**-34}  # appendix K
TINY = 1e-30  # a bound where a result and its bound are 0
Bounds = dict[str, tuple[Any, Any]]


def flip(x: Any) -> Any:
    """Rows become columns."""
    return x.swapaxes(-2, -1)


def of_heads(xp: Any, x: Any, heads: int) -> Any:
    """x (B, G, T, D) once for each of the query heads that share it: (B, heads, T, D)."""
    B, G, T, D = x.shape
    return xp.broadcast_to(x[:, :, None], (B, G, heads // G, T, D)).reshape(B, heads, T, D)


def fold(x: Any, G: int) -> Any:
    """Sums over the query heads that share a key head."""
    B, H, T, D = x.shape
    return x.reshape(B, G, H // G, T, D).sum(2)


def exact_and_bounds(
    xp: Any, q: Any, k: Any, v: Any, do: Any, hidden: Any, off: float
) -> Bounds:
    """name -> (float64 value, largest error) of o, lse in base 2, dq, dk, dv.

    q, do (B, H, T, D), k, v (B, G, T, D) float64; hidden (B or 1, 1, T, T): keys a query does not
    see.
    """
    (_, H, T, D), G = q.shape, k.shape[1]
    k, v = of_heads(xp, k, H), of_heads(xp, v, H)
    over_D, over_T, root = off + (D + 8) * U, off + (T + 8) * U, 1 / math.sqrt(D)
    s = xp.where(hidden, -math.inf, q @ flip(k) * root)
    of_s = xp.where(hidden, 0.0, abs(q) @ flip(abs(k)) * root) * over_D
    top = xp.amax(s, -1)
    lse = top + xp.log(xp.exp(s - top[..., None]).sum(-1))
    p = xp.exp(s - lse[..., None])
    row = xp.amax(of_s, -1) + 8 * U * xp.amax(abs(xp.where(hidden, 0.0, s)), -1) + (T + 8) * U
    of_p = xp.expm1(of_s + row[..., None])
    o = p @ v
    of_o = (of_p * p) @ abs(v) + over_T * (p @ abs(v))
    dp, delta = do @ flip(v), (do * o).sum(-1)[..., None]
    ds = p * (dp - delta)
    of_dp = abs(do) @ flip(abs(v)) * over_D
    of_delta = (abs(do) * (of_o + (D + 8) * U * abs(o))).sum(-1)[..., None]
    of_ds = of_p * abs(ds) + p * (of_dp + of_delta + 4 * U * (abs(dp) + abs(delta)))
    of_ds = of_ds * (1 + of_p)

    def product(x: Any, of_x: Any, y: Any, times: float) -> tuple[Any, Any]:
        error = of_x @ abs(y) + over_T * ((abs(x) + of_x) @ abs(y))
        return times * (x @ y), times * error

    dk, dv = product(flip(ds), flip(of_ds), q, root), product(flip(p), flip(of_p * p), do, 1)
    return {
        "o": (o, of_o), "lse": (lse / math.log(2), row / math.log(2) + 8 * U * abs(lse)),
        "dq": product(ds, of_ds, k, root),
        "dk": (fold(dk[0], G), fold(dk[1], G)), "dv": (fold(dv[0], G), fold(dv[1], G)),
    }  # fmt: skip


def share(values: Any, exact: Any, bound: Any) -> float:
    """The largest error as a share of its bound; nan if any value is."""
    return float((abs(values - exact) / (bound + TINY)).max())


def length(x: Any) -> float:
    """The root of the sum of squares."""
    return float((x * x).sum()) ** 0.5


def outcomes(
    ours: Mapping[str, Any], peer: Mapping[str, Any], wanted: Bounds, least: float
) -> dict[str, dict[str, Any]]:
    """What a check returns of each part that `ours` has, beside a library's; both in float64.

    ValueError where an element is beyond its bound. Of a result that is shorter than its bound
    nothing is left but what was rounded, and an error relative to it would say nothing: then
    errors are shares of their bounds.
    """
    made = {}
    for name, values in ours.items():
        exact, bound = wanted[name]
        most = share(values, exact, bound)
        if not most <= 1:
            raise ValueError(f"{name} is off by {most:.3g} of what may be rounded")
        size = length(exact)
        if size > length(bound):
            error, theirs = (length(x - exact) / size for x in (values, peer[name]))
            made[name] = {"error": error, "peer": theirs, "least": least}
        else:
            theirs = share(peer[name], exact, bound)
            made[name] = {"error": most, "peer": theirs, "least": 0.5, "unit": "of its bound"}
    return made
