"""Deliberate mistakes in the backward pass, one line each: the gradient check must see them all.

A mutant is a module of the package with one fragment of one function replaced. `load` refuses a
fragment that does not occur exactly once there, so that a mutant cannot go stale unseen. Chapter 5
prints how many are caught, tests/test_backward.py demands all.
"""

import ast
import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np

from nanoeuler.book import public_names
from nanoeuler.checks import gradcheck
from nanoeuler.checks.derivatives import complex_step, relative_error
from nanoeuler.engines import reference
from nanoeuler.model import transformer


class Mutant(NamedTuple):
    """`what` is wrong: in `function` of nanoeuler/model/`module`.py, `old` becomes `new`.

    Without a function, `old` is looked for in the whole module.
    """

    module: str
    function: str | None
    what: str
    old: str
    new: str


def load(mutant):
    """The module `mutant` as it would be with the mistake in it; the package is not touched."""
    path = Path(importlib.util.find_spec(f"nanoeuler.model.{mutant.module}").origin)
    source = path.read_text(encoding="utf-8")
    before, start, body, end, after = "", "", source, "", ""
    if mutant.function:
        before, start, rest = source.partition(f"\ndef {mutant.function}(")
        body, end, after = rest.partition("\n\n\n")
    place = mutant.function or mutant.module
    assert body.count(mutant.old) == 1, f"{mutant.old!r} is not exactly once in {place}"
    wrong = "".join([before, start, body.replace(mutant.old, mutant.new), end, after])
    module = ModuleType(f"mutant_{mutant.module}")
    exec(compile(wrong, str(path), "exec"), vars(module))
    return module


def derived_gradient(mutant, problem):
    """`gradcheck.derived_gradient` of `problem`, by the package with the mistake in it."""
    wrong, engine = load(mutant), SimpleNamespace(**vars(reference))
    user = {"transformer": gradcheck, "sublayers": transformer}.get(mutant.module, engine)
    path = importlib.util.find_spec(f"nanoeuler.model.{mutant.module}").origin
    tree = ast.parse(Path(path).read_text())
    public = {name for name, _ in public_names(tree)}
    mine = {name: vars(wrong)[name] for name in public & set(vars(user))}
    with mock.patch.multiple(user, **mine):
        return gradcheck.derived_gradient(problem, engine)


@cache
def examples():
    """The problems that a mistake must show itself on, each with its exact gradient."""
    configs = [
        gradcheck.TINY,
        gradcheck.TINY_GPT2,
        # Two layers to each of two blocks, four stages, and a step that is no power of two.
        replace(gradcheck.TINIEST, n_layers=4, repeat=2, integrator="rk4", step_size=0.7),
        # The weight of the first stage, h / 2, is 1.
        replace(gradcheck.TINIEST, integrator="heun", step_size=2.0),
    ]
    problems = [gradcheck.tiny_problem(config) for config in configs]
    return [
        (problem, gradcheck.numerical_gradient(problem, complex_step, np.complex128))
        for problem in problems
    ]


def worst_error(mutant):
    """The largest error of any tensor with the mistake in, on the first example that shows it."""
    for problem, exact in examples():
        derived = derived_gradient(mutant, problem)  # the mistake raises nothing
        worst = np.max([relative_error(derived[name], exact[name]) for name in exact])
        if not worst <= gradcheck.BOUND:
            break
    return worst


LINEAR = [
    ("dw assigned, not added", "dw += rows_x.T", "dw[...] = rows_x.T"),
    ("dw without the first position", "rows_x.T @ rows_dy", "rows_x[1:].T @ rows_dy[1:]"),
    ("dw is a mean over positions", "rows_x.T @ rows_dy", "rows_x.T @ rows_dy / len(rows_x)"),
    ("dx loses an output", "rows_dy @ w.T", "rows_dy[:, 1:] @ w.T[1:]"),
    ("bias forgotten", "dbias += np.sum(rows_dy, axis=0)", "pass"),
    ("bias assigned, not added", "dbias += np", "dbias[...] = np"),
    ("bias without the first position", "np.sum(rows_dy,", "np.sum(rows_dy[1:],"),
    ("bias is a mean over positions", "np.sum(rows_dy", "np.mean(rows_dy"),
    (
        "bias summed over the wrong axis",
        "np.sum(rows_dy, axis=0)",
        "np.sum(rows_dy.reshape(dbias.size, -1), axis=1)",
    ),
]
EMBED = [
    ("a repeated token counted once", "np.add.at(dtable, tokens, dx)", "dtable[tokens] += dx"),
    ("dtable assigned, not added", "np.add.at(dtable, tokens, dx)", "dtable[tokens] = dx"),
    ("the next token's row", "dtable, tokens, dx", "dtable, np.roll(tokens, 1, -1), dx"),
    ("positions of the first text alone", "np.sum(dx, axis=0)", "dx[0]"),
    ("positions a mean over the texts", "np.sum(dx, axis=0)", "np.mean(dx, axis=0)"),
    ("positions assigned, not added", "dpositions += np", "dpositions[...] = np"),
    ("positions a row late", "np.sum(dx, axis=0)", "np.roll(np.sum(dx, axis=0), 1, 0)"),
    (
        "positions in the rows of the tokens",
        "dpositions += np.sum(dx, axis=0)",
        "np.add.at(dpositions, tokens % len(dpositions), dx)",
    ),
]
RMSNORM = [
    ("(1) without the gain", "dx_hat = gain * dy", "dx_hat = dy"),
    ("(2) dropped", "(dx_hat - x_hat * along) / r", "dx_hat / r"),
    ("(2) with the wrong sign", "dx_hat - x_hat * along", "dx_hat + x_hat * along"),
    ("(2) with x in place of x / r", "x_hat * along) / r", "x * along) / r"),
    ("(2) before the gain", "np.mean(dx_hat * x_hat", "np.mean(dy * x_hat"),
    ("(2) a sum, 1/C missing", "np.mean(dx_hat", "np.sum(dx_hat"),
    ("(2) over positions", "x_hat, axis=-1", "x_hat, axis=1"),
    ("(3) from x in place of x / r", "(dy * x_hat).reshape", "(dy * x).reshape"),
    ("(3) assigned, not added", "dgain += np", "dgain[...] = np"),
    ("dx not divided by r", "- x_hat * along) / r", "- x_hat * along)"),
    ("r without epsilon", "x_hat = x / r", "x_hat = x / np.sqrt(r * r - 1e-5)"),
]
LAYERNORM = [
    ("(1) without the gain", "dx_hat = gain * dy", "dx_hat = dy"),
    ("(2) dropped, as in RMSNorm", "dx_hat - shift - x_hat", "dx_hat - x_hat"),
    ("(2) with the wrong sign", "dx_hat - shift", "dx_hat + shift"),
    ("(2) before the gain", "shift = np.mean(dx_hat,", "shift = np.mean(dy,"),
    ("(2) over positions", "np.mean(dx_hat, axis=-1", "np.mean(dx_hat, axis=1"),
    ("(2) a sum, 1/C missing", "shift = np.mean", "shift = np.sum"),
    ("(3) dropped", "- shift - x_hat * along)", "- shift)"),
    ("(3) with the wrong sign", "- x_hat * along", "+ x_hat * along"),
    ("(3) before the gain", "np.mean(dx_hat * x_hat", "np.mean(dy * x_hat"),
    ("(3) with 1/(C - 1)", "x_hat * along)", "x_hat * along * gain.size / (gain.size - 1))"),
    ("(3) not divided by the deviation", "x_hat * along) /", "(x - mean) * along) /"),
    ("(4) with x not centred", "(dy * x_hat).reshape", "(dy * x / deviation).reshape"),
    ("(4) assigned, not added", "dgain += np", "dgain[...] = np"),
    ("(5) forgotten", "dbias += np.sum(dy.reshape(-1, gain.size), axis=0)", "pass"),
    ("(5) times the gain", "np.sum(dy.reshape", "np.sum(dx_hat.reshape"),
    ("(5) times x_hat", "np.sum(dy.reshape", "np.sum((dy * x_hat).reshape"),
    ("(5) assigned, not added", "dbias += np", "dbias[...] = np"),
    (
        "(5) over the wrong axis",
        "dy.reshape(-1, gain.size), axis=0",
        "dy.reshape(gain.size, -1), axis=1",
    ),
    ("the mean not taken off", "x_hat = (x - mean) /", "x_hat = x /"),
    (
        "mean and deviation exchanged",
        "stats[..., :1], stats[..., 1:]",
        "stats[..., 1:], stats[..., :1]",
    ),
    ("dx not divided by the deviation", "x_hat * along) / deviation", "x_hat * along)"),
    (
        "the deviation without epsilon",
        "x_hat = (x - mean) / deviation",
        "x_hat = (x - mean) / np.sqrt(deviation * deviation - 1e-5)",
    ),
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
GELU = [
    ("(1) dropped", "dh * (share + bend)", "dh * bend"),
    ("(1) without the half", "share = 0.5 * (1 + tanh)", "share = 1 + tanh"),
    (
        "(1) by the error function",
        "(1 + tanh)",
        '(1 + np.vectorize(__import__("math").erf)(u / 2**0.5))',
    ),
    ("(2) dropped", "dh * (share + bend)", "dh * share"),
    ("(2) without the half", "bend = 0.5 * u", "bend = u"),
    ("(2) without u", "bend = 0.5 * u *", "bend = 0.5 *"),
    ("(2) tanh not squared", "(1 - tanh * tanh)", "(1 - tanh)"),
    ("(2) the sign of tanh squared", "(1 - tanh * tanh)", "(1 + tanh * tanh)"),
    ("(2) z without its scale", "dz = GELU_SCALE * (", "dz = ("),
    ("(2) z as if linear", "(1 + 3 * GELU_CUBIC * u * u)", "1"),
    ("(2) the cube's 3 missing", "1 + 3 * GELU_CUBIC", "1 + GELU_CUBIC"),
    ("z without its cube", "(u + GELU_CUBIC * u * u * u)", "u"),
]
CROSS_ENTROPY = [
    ("(1) not divided by the total", "dlogits /= total", "dlogits /= 1"),
    ("(2) dropped", "axis=-1) - 1, axis=-1)", "axis=-1) - 0, axis=-1)"),
    ("(2) at the token before", "put_along_axis(dlogits, at,", "put_along_axis(dlogits, at - 1,"),
    ("(3) scale forgotten", "(counted * scale)", "(counted * np.ones_like(scale))"),
    ("(3) scales of the heads exchanged", "(counted * scale)", "(counted * scale[::-1])"),
    ("ignored targets counted", "(counted * scale)", "(np.ones_like(counted) * scale)"),
]
ADD_INTO = [
    ("changes a copy", "x += h * y", "x = x + h * y"),
    ("without h", "x += h * y", "x += y"),
]
SCALE = [
    ("changes its argument", "return h * x", "x *= h; return x"),
    ("without h", "return h * x", "return x.copy()"),
]
ATTENTION_HALF = [
    ("wo with the input of wqkv", "(dout, s.y, b.wo", "(dout, s.a, b.wo"),
    ("wqkv with the stream not normalised", "(B, T, -1), s.a", "(B, T, -1), s.x"),
    ("keys not turned back", "_backward(dheads, H + G", "_backward(dheads, H"),
    ("nothing turned back", "_backward(dheads, H + G", "_backward(dheads, 0"),
    ("norm of what is normalised", "da, s.x, b.norm1", "da, s.a, b.norm1"),
    ("norm2's gain", "s.x, b.norm1", "s.x, b.norm2"),
    ("norm1's gradient in norm2's", "db.norm1, db", "db.norm2, db"),
    ("norm1's bias in norm2's", "db.norm1_bias", "db.norm2_bias"),
    ("wqkv's bias forgotten", "db.wqkv, db.wqkv_bias", "db.wqkv"),
    ("wo's bias in w_down's", "db.wo_bias", "db.w_down_bias"),
]
MLP_HALF = [
    ("norm of what is normalised", "dm, s.x, b.norm2", "dm, s.m, b.norm2"),
    ("w_up with the stream not normalised", "s.u), s.m,", "s.u), s.x,"),
    ("w_up's bias forgotten", "db.w_up, db.w_up_bias", "db.w_up"),
    ("norm2's bias in norm1's", "db.norm2_bias", "db.norm1_bias"),
]
STEP = [
    ("(1) without h", "scale(dx, h * b[i])", "scale(dx, b[i])"),
    ("(1) without b", "scale(dx, h * b[i])", "scale(dx, h)"),
    ("(1) with another stage's b", "scale(dx, h * b[i])", "scale(dx, h * b[i - 1])"),
    ("(1) the last stage's dk is dx for any h", "i == last and h * b[i] == 1", "i == last"),
    ("(1) dx itself for a stage that is added to", "i == last and h * b[i] == 1", "h * b[i] == 1"),
    ("(2) dropped", "engine.add_into(dk, du[j], h * a[j][i])", "pass"),
    ("(2) without h", "h * a[j][i])", "a[j][i])"),
    ("(2) a transposed", "h * a[j][i])", "h * a[j][j - 1 - i])"),
    ("(2) without the last stage", "range(i + 1, last + 1)", "range(i + 1, last)"),
    ("(2) du of the wrong stage", "(dk, du[j],", "(dk, du[last],"),
    ("what another stage saved", "f_backward(saved[i]", "f_backward(saved[last - i]"),
    ("(3) without the first stage", "in du:", "in du[min(1, last) :]:"),
    ("(3) the last stage alone", "in du:", "in du[-1:]:"),
    ("(3) times h", "(dx, each)", "(dx, each, h)"),
    ("no residual", "engine.add_into(dx, each)", "np.copyto(dx, each)"),
]
OUTPUT = [("tied: the gradient of a copy", 'w["embedding"].T', 'w["embedding"].T.copy()')]
BACKWARD = [
    ("layers in forward order", "reversed(range(config.n_layers))", "range(config.n_layers)"),
    ("repeat: another layer's block", "i // config.repeat", "i % config.n_blocks"),
    (
        "repeat: the last use overwrites the others",
        "attention, mlp = saved.layers[i]",
        "attention, mlp = saved.layers[i]; [t.fill(0) for t in vars(db).values() if t is not None]",
    ),
    ("the MLP adds to a copy of dx", "mixing, mlp, dx)", "mixing, mlp, dx.copy())"),
    ("the embedding forgotten", "engine.embed_backward(dx", "(dx"),
    (
        "tied: the embedding assigned",
        "engine.embed_backward(dx",
        'dw["embedding"].fill(0)\n    engine.embed_backward(dx',
    ),
    ("the positions forgotten", 'config.position == "learned"', "False"),
]

MUTANTS = [
    Mutant(module, function, what, old, new)
    for module, function, table in [
        ("backward", "linear_backward", LINEAR),
        ("backward", "embed_backward", EMBED),
        ("backward", "rmsnorm_backward", RMSNORM),
        ("backward", "layernorm_backward", LAYERNORM),
        ("backward", "rope_backward", ROPE),
        ("backward", "attention_backward", ATTENTION),
        ("backward", "swiglu_backward", SWIGLU),
        ("backward", "gelu_backward", GELU),
        ("backward", "cross_entropy", CROSS_ENTROPY),
        ("reference", "add_into", ADD_INTO),
        ("reference", "scale", SCALE),
        ("sublayers", "attention_sublayer_backward", ATTENTION_HALF),
        ("sublayers", "mlp_sublayer_backward", MLP_HALF),
        ("transformer", "step_backward", STEP),
        ("transformer", "output_matrix", OUTPUT),
        ("transformer", "backward", BACKWARD),
    ]
    for what, old, new in table
]
