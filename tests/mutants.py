"""Deliberate mistakes in the backward pass, one line each: the gradient check must see them all.

A mutant is a module of the package with one fragment of its source replaced. `load` refuses a
fragment that does not occur exactly once, so that a mutant cannot go stale unseen.
"""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class Mutant(NamedTuple):
    """`what` is wrong: in the source of nanoeuler/`module`.py, `old` becomes `new`."""

    module: str
    what: str
    old: str
    new: str


def load(mutant):
    """The module `mutant` as it would be with the mistake in it; the package is not touched."""
    path = Path(importlib.util.find_spec(f"nanoeuler.{mutant.module}").origin)
    source = path.read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, f"{mutant.old!r} does not occur exactly once in {path}"
    module = ModuleType(f"mutant_{mutant.module}")
    exec(compile(source.replace(mutant.old, mutant.new), str(path), "exec"), vars(module))
    return module


LINEAR = [
    ("dw assigned, not added", "dw += rows_x.T", "dw[...] = rows_x.T"),
    ("dw without the first position", "rows_x.T @ rows_dy", "rows_x[1:].T @ rows_dy[1:]"),
    ("dw is a mean over positions", "rows_x.T @ rows_dy", "rows_x.T @ rows_dy / len(rows_x)"),
    ("dx loses an output", "rows_dy @ w.T", "rows_dy[:, 1:] @ w.T[1:]"),
]
EMBED = [
    ("a repeated token counted once", "np.add.at(dtable, tokens, dx)", "dtable[tokens] += dx"),
    ("dtable assigned, not added", "np.add.at(dtable, tokens, dx)", "dtable[tokens] = dx"),
    ("the next token's row", "dtable, tokens, dx", "dtable, np.roll(tokens, 1, -1), dx"),
]
RMSNORM = [
    ("term (2) dropped", "(dx_hat - x_hat * along) / r", "dx_hat / r"),
    ("term (2) with the wrong sign", "dx_hat - x_hat * along", "dx_hat + x_hat * along"),
    ("term (2) with x in place of x / r", "x_hat * along) / r", "x * along) / r"),
    ("term (2) before the gain", "np.mean(dx_hat * x_hat", "np.mean(dy * x_hat"),
    ("term (2) a sum, 1/C missing", "np.mean(dx_hat", "np.sum(dx_hat"),
    ("term (2) over positions", "x_hat, axis=-1", "x_hat, axis=1"),
    ("term (1) without the gain", "dx_hat = gain * dy", "dx_hat = dy"),
    ("dx not divided by r", "- x_hat * along) / r", "- x_hat * along)"),
    ("r without epsilon", "x_hat = x / r", "x_hat = x / np.sqrt(r * r - 1e-5)"),
    ("dgain from x in place of x / r", "(dy * x_hat).reshape", "(dy * x).reshape"),
    ("dgain assigned, not added", "dgain += np", "dgain[...] = np"),
]
ROPE = [
    ("turned on, not back", "cos, -sin", "cos, sin"),
    ("cosine's sign too", "cos, -sin", "-cos, -sin"),
    ("one head too few", "rope(dheads, n,", "rope(dheads, n - 1,"),
    ("values turned as well", "rope(dheads, n,", "rope(dheads, dheads.shape[2],"),
    ("a position late", "cos, -sin", "np.roll(cos, 1, 0), -np.roll(sin, 1, 0)"),
]
ATTENTION = [
    ("(1) p not transposed", "p.swapaxes(-2, -1) @ dy", "p @ dy"),
    ("(1) one head of the group", "@ dy, axis=2)", "@ dy, axis=2, where=[[[True]], [[False]]])"),
    ("(1) mask off by one", "p.swapaxes(-2, -1) @ dy", "np.tril(p, -1).swapaxes(-2, -1) @ dy"),
    ("(1) a mean over the group", "dv = np.sum", "dv = np.mean"),
    ("(2) with the value before", "dy @ v.swap", "dy @ np.roll(v, 1, 3).swap"),
    ("(3) without the average", "(dp - np.sum(p * dp, axis=-1, keepdims=True))", "dp"),
    ("(3) average not weighted by p", "np.sum(p * dp, axis=-1", "np.mean(dp, axis=-1"),
    ("(3) average over queries", "np.sum(p * dp, axis=-1", "np.sum(p * dp, axis=-2"),
    ("(3) without the factor p", "dS = p * (dp", "dS = (p > 0) * (dp"),
    ("(3) without the mask", "dS = p * (dp", "dS = (p + 1e-6) * (dp"),
    ("(3) mask off by one", "dS = p * (dp", "dS = np.tril(p, -1) * (dp"),
    ("(4) no scale", "dS / D**0.5", "dS"),
    ("(4) scale 1/D", "dS / D**0.5", "dS / D"),
    ("(5) scores transposed", "dqk @ k", "dqk.swapaxes(-2, -1) @ k"),
    ("(6) scores not transposed", "dqk.swapaxes(-2, -1) @ q", "dqk @ q"),
    ("(6) one head of the group", "@ q, axis=2)", "@ q, axis=2, where=[[[True]], [[False]]])"),
    ("(6) the query before", "-1) @ q", "-1) @ np.roll(q, 1, 3)"),
    ("dk and dv exchanged", "D), dk, dv]", "D), dv, dk]"),
    ("neighbouring heads in different groups", "dqk @ k", "(dqk @ k).swapaxes(1, 2)"),
]
SWIGLU = [
    ("(1) gate as if linear", "sigma * (1 + gate * (1 - sigma))", "sigma"),
    ("(1) wrong sign inside", "(1 + gate * (1 - sigma))", "(1 - gate * (1 - sigma))"),
    ("(1) without up", "dh * up * sigma", "dh * sigma"),
    ("(2) without sigma", "dh * gate * sigma", "dh * gate"),
    ("halves exchanged", "[dgate, dup]", "[dup, dgate]"),
]
CROSS_ENTROPY = [
    ("(1) not divided by the total", "dlogits /= total", "dlogits /= 1"),
    ("(2) dropped", "axis=-1) - 1, axis=-1)", "axis=-1) - 0, axis=-1)"),
    ("(2) at the token before", "put_along_axis(dlogits, at,", "put_along_axis(dlogits, at - 1,"),
    ("(3) scale forgotten", "(counted * scale)", "(counted * np.ones_like(scale))"),
    ("(3) scales of the heads exchanged", "(counted * scale)", "(counted * scale[::-1])"),
    ("ignored targets counted", "(counted * scale)", "(np.ones_like(counted) * scale)"),
]
RESIDUAL, NONE = "engine.add_into(dx, engine.rms", "np.copyto(dx, engine.rms"
MODEL = [
    ("blocks in forward order", "reversed(range(config.n_layers))", "range(config.n_layers)"),
    ("no residual around the MLP", RESIDUAL + "norm_backward(dm", NONE + "norm_backward(dm"),
    ("no residual around attention", RESIDUAL + "norm_backward(da", NONE + "norm_backward(da"),
    ("norm2 at the block's entry", "(dm, s.x_mid, b.norm2", "(dm, s.x, b.norm2"),
    ("norm1 with the other r", "s.x, b.norm1, s.r1", "s.x, b.norm1, s.r2"),
    ("norm1's gradient in norm2's", "s.r1, db.norm1", "s.r1, db.norm2"),
    ("keys not turned back", "_backward(dheads, turned", "_backward(dheads, turned - G"),
    ("nothing turned back", "_backward(dheads, turned", "_backward(dheads, 0"),
    ("wqkv with the MLP's input", "reshape(B, T, -1), s.a", "reshape(B, T, -1), s.m"),
    ("wo with the MLP's input", "(dx, s.y, b.wo", "(dx, s.m, b.wo"),
    ("embedding forgotten", "engine.embed_backward(dx", "(dx"),
]
REFERENCE = [("add_into changes a copy", "x += y", "x = x + y")]

MUTANTS = [
    Mutant(module, f"{operation}: {what}", old, new)
    for module, operation, table in [
        ("backward", "linear", LINEAR),
        ("backward", "embed", EMBED),
        ("backward", "rmsnorm", RMSNORM),
        ("backward", "rope", ROPE),
        ("backward", "attention", ATTENTION),
        ("backward", "swiglu", SWIGLU),
        ("backward", "cross-entropy", CROSS_ENTROPY),
        ("model", "model", MODEL),
        ("reference", "engine", REFERENCE),
    ]
    for what, old, new in table
]
