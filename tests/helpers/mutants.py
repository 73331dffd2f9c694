"""Deliberate mistakes in the backward pass, one line each: the gradient check must see them all.

A mutant is a module of the package with one fragment of one function replaced (`fragments`), which
refuses what does not occur exactly once there, so that a mutant cannot go stale unseen. Chapter 6a
prints how many are caught, tests/test_backward.py demands all.
"""

import ast
import importlib.util
import linecache
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import numpy as np
from fragments import qualified, replaced
from slopes import slopes

from nanoeuler.checks import gradcheck
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model import transformer


class Mutant(NamedTuple):
    """`what` is wrong: in `function` (or method) of nanoeuler.`module`, `old` becomes `new`."""

    module: str
    function: str
    what: str
    old: str
    new: str


def execute(source, name, module):
    """Run the source of a module in `module`; tracebacks and the paper find its lines by `name`."""
    name = f"<{name}, {hash(source):x}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    exec(compile(source, name, "exec"), vars(module))


@cache
def functions(text):
    """The functions of a module's text, which has many mistakes planted in it."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]


def source(mutant):
    """(path, text) of the module with the mistake in it; AssertionError where it finds no place."""
    path = Path(importlib.util.find_spec(f"nanoeuler.{mutant.module}").origin)
    text = path.read_text(encoding="utf-8")
    (node,) = (node for node in functions(text) if node.name == mutant.function)
    lines = text.splitlines(keepends=True)
    before, after = lines[: node.lineno - 1], lines[node.end_lineno :]
    body = "".join(lines[node.lineno - 1 : node.end_lineno])
    old, new = (qualified(each, text, body) for each in (mutant.old, mutant.new))
    wrong = replaced(body, old, new, mutant.function)
    return path, "".join([*before, wrong, *after])


def load(mutant):
    """The module `mutant` as it would be with the mistake in it; the package is not touched."""
    _, text = source(mutant)
    module = ModuleType(f"nanoeuler.mutants.{mutant.module}")
    execute(text, f"{mutant.function}, mistaken", module)
    return module


def derived_gradient(mutant, problem):
    """`gradcheck.derived_gradient` of `problem`, by the package with the mistake in it."""
    wrong, name, engine, patch = load(mutant), mutant.function, ReferenceEngine, nullcontext()
    if mutant.module == "engines.reference":
        engine = wrong.ReferenceEngine
    elif mutant.module == "engines.interface":
        engine = type("Wrong", (ReferenceEngine,), {name: getattr(wrong.Engine, name)})
    elif mutant.module == "model.backward":
        engine = type("Wrong", (ReferenceEngine,), {name: staticmethod(vars(wrong)[name])})
    elif mutant.module == "model.weights":
        patch = mock.patch.object(transformer, name, vars(wrong)[name])
    else:
        patch = mock.patch.object(gradcheck, "loss_and_gradients", wrong.loss_and_gradients)
    with patch:
        return gradcheck.derived_gradient(problem, engine())


@cache
def examples():
    """The problems that a mistake must show itself on, each with its slopes by complex steps."""
    configs = [
        gradcheck.TINY,
        gradcheck.TINY_GPT2,
        # Two layers to each of two blocks, four stages, and a step that is no power of two.
        replace(gradcheck.TINIEST, n_layers=4, repeat=2, integrator="rk4", step_size=0.7),
        # The weight of the first stage, h / 2, is 1.
        replace(gradcheck.TINIEST, integrator="heun", step_size=2.0),
    ]
    problems = [gradcheck.tiny_problem(config) for config in configs]
    return [(problem, [*slopes(problem, ReferenceEngine(), 2)]) for problem in problems]


def worst_error(mutant):
    """The largest error of any slope with the mistake in, on the first example that shows it."""
    for problem, exact in examples():
        derived = derived_gradient(mutant, problem)  # the mistake raises nothing
        worst = np.max([slope.error(derived) for slope in exact])
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
    ("(2) with the value before", "dy @ v.swapaxes", "dy @ np.roll(v, 1, 3).swapaxes"),
    ("(3) without the average", "(dp - np.sum(p * dp, axis=-1, keepdims=True))", "dp"),
    ("(3) average not weighted by p", "np.sum(p * dp, axis=-1", "np.mean(dp, axis=-1"),
    ("(3) average over queries", "np.sum(p * dp, axis=-1", "np.sum(p * dp, axis=-2"),
    ("(3) without the factor p", "dS = p * (dp", "dS = (p > 0) * (dp"),
    ("(3) without the mask", "dS = p * (dp", "dS = (p + 1e-6) * (dp"),
    ("(3) mask off by one", "dS = p * (dp", "dS = np.tril(p, -1) * (dp"),
    ("(4) no scale", "dS / D**0.5", "dS"),
    ("(4) scale 1/D", "dS / D**0.5", "dS / D"),
    ("(5) scores transposed", "dm @ k", "dm.swapaxes(-2, -1) @ k"),
    ("(6) scores not transposed", "dm.swapaxes(-2, -1) @ q", "dm @ q"),
    ("(6) one head of the group", "@ q, axis=2)", "@ q, axis=2, where=[[[True]], [[False]]])"),
    ("(6) the query before", "-1) @ q", "-1) @ np.roll(q, 1, 3)"),
    ("dk and dv exchanged", "D), dk, dv]", "D), dv, dk]"),
    ("neighbouring heads in different groups", "dm @ k", "(dm @ k).swapaxes(1, 2)"),
]
SWIGLU = [
    ("(1) gate as if linear", "sigma * (1 + gate * (1 - sigma))", "sigma"),
    ("(1) wrong sign inside", "(1 + gate * (1 - sigma))", "(1 - gate * (1 - sigma))"),
    ("(1) without up", "dh * up * sigma", "dh * sigma"),
    ("(2) without sigma", "dh * gate * sigma", "dh * gate"),
    ("halves exchanged", "[dgate, dup]", "[dup, dgate]"),
]
GELU = [
    ("(1) dropped", "dh * (share + growth)", "dh * growth"),
    ("(1) without the half", "share = 0.5 * (1 + tanh)", "share = 1 + tanh"),
    (
        "(1) by the error function",
        "(1 + tanh)",
        '(1 + np.vectorize(__import__("math").erf)(u / 2**0.5))',
    ),
    ("(2) dropped", "dh * (share + growth)", "dh * share"),
    ("(2) without the half", "growth = 0.5 * u", "growth = u"),
    ("(2) without u", "growth = 0.5 * u *", "growth = 0.5 *"),
    ("(2) tanh not squared", "(1 - tanh * tanh)", "(1 - tanh)"),
    ("(2) the sign of tanh squared", "(1 - tanh * tanh)", "(1 + tanh * tanh)"),
    ("(2) z without its scale", "dz = GELU_SCALE * (", "dz = ("),
    ("(2) z as if linear", "(1 + 3 * GELU_CUBIC * u * u)", "1"),
    ("(2) the cube's 3 missing", "1 + 3 * GELU_CUBIC", "1 + GELU_CUBIC"),
    ("z without its cube", "(u + GELU_CUBIC * u * u * u)", "u"),
]
CROSS_ENTROPY = [
    ("(1) not divided by the total", "dlogits /= total", "dlogits /= 1"),
    ("(2) dropped", "p_target - 1, axis", "p_target - 0, axis"),
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
    ("wo with the input of wqkv", "(dout, saved.y, b.wo", "(dout, saved.n, b.wo"),
    ("wqkv with the input of wo", "(dheads, saved.n, b.wqkv", "(dheads, saved.y, b.wqkv"),
    ("keys not turned back", "rope_backward(dheads, H + G", "rope_backward(dheads, H"),
    ("nothing turned back", "rope_backward(dheads, H + G", "rope_backward(dheads, 0"),
    ("wqkv's bias forgotten", "db.wqkv, db.wqkv_bias", "db.wqkv"),
    ("wo's bias in w_down's", "db.wo_bias", "db.w_down_bias"),
]
MLP_HALF = [
    (
        "w_down with the gate alone",
        "saved.h, b.w_down",
        "saved.u[..., : saved.h.shape[-1]], b.w_down",
    ),
    ("w_down's bias in wo's", "db.w_down_bias", "db.wo_bias"),
    ("w_up's bias forgotten", "db.w_up, db.w_up_bias", "db.w_up"),
]
MOVE_NORM = [
    ("not added to dx", "self.add_into(dx, du)", "pass"),
    ("added to a copy of dx", "self.add_into(dx, du)", "dx = dx + du"),
    ("no residual", "self.add_into(dx, du)", "dx[...] = du"),
    ("the norm's bias forgotten", "dgain, dbias)\n", "dgain)\n"),
]
LOSS = [
    ("dW into a copy", "n, W, dW)", "n, W, dW.copy())"),
    ("dn of the logits' scale", "sums, self.linear_backward", "sums, 0.5 * self.linear_backward"),
]
ENTER = [
    ("the embedding forgotten", "self.embed_backward(dx", "(dx"),
    (
        "tied: the embedding assigned",
        "self.embed_backward(dx",
        'dw["embedding"].fill(0)\n        self.embed_backward(dx',
    ),
    ("the positions forgotten", 'config.position == "learned"', "False"),
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
    ("what another stage saved", "stages[i]", "*stages[i][:2], stages[last - i].saved"),
    ("where another stage stood", "dn, u, norm", "dn, stages[last - i].x, norm"),
    ("the stats of another stage", "[0], stats,", "[0], stages[last - i].stats,"),
    ("(3) without stage 0", "dx if i == 0 else None", "None"),
    ("(3) added before the other stages read dx", "dx if i == 0 else None", "dx"),
    ("(3) stage 0 and the last alone", "in du[1:]:", "in du[1:][-1:]:"),
    ("(3) stage 0 alone", "in du[1:]:", "in []:"),
    ("(3) stage 0 twice", "in du[1:]:", "in du:"),
    ("(3) times h", "(dx, each)", "(dx, each, h)"),
    ("no residual", "engine.add_into(dx, each)", "np.copyto(dx, each)"),
]
LAYER = [
    ("attention through norm2's gain", "attention, (b.norm1,", "attention, (b.norm2,"),
    ("norm1's gradient in norm2's", "(db.norm1,", "(db.norm2,"),
    ("norm1's bias in norm2's", "db.norm1_bias", "db.norm2_bias"),
    ("norm2's bias in norm1's", "db.norm2_bias", "db.norm1_bias"),
    ("the MLP adds to a copy of dx", "saved, dx)", "saved, dx.copy() if saved is mlp else dx)"),
]
OUTPUT = [("tied: the gradient of a copy", 'w["embedding"].T', 'w["embedding"].T.copy()')]
BACKWARD = [
    ("layers in forward order", "reversed(range(config.n_layers))", "range(config.n_layers)"),
    ("repeat: another layer's block", "i // config.repeat", "i % config.n_blocks"),
    (
        "repeat: the last use overwrites the others",
        "block = i // config.repeat",
        "block = i // config.repeat; [t.fill(0) for t in dw.blocks[block] if t is not None]",
    ),
    ("the last norm's bias forgotten", 'dw.get("norm_bias")', "None"),
    ("the stream's gradient dropped at the end", "saved.tokens, dx,", "saved.tokens, 0 * dx,"),
]

MUTANTS = [
    Mutant(module, function, what, old, new)
    for module, function, table in [
        ("model.backward", "linear_backward", LINEAR),
        ("model.backward", "embed_backward", EMBED),
        ("model.backward", "rmsnorm_backward", RMSNORM),
        ("model.backward", "layernorm_backward", LAYERNORM),
        ("model.backward", "rope_backward", ROPE),
        ("model.backward", "attention_backward", ATTENTION),
        ("model.backward", "swiglu_backward", SWIGLU),
        ("model.backward", "gelu_backward", GELU),
        ("model.backward", "cross_entropy", CROSS_ENTROPY),
        ("engines.reference", "add_into", ADD_INTO),
        ("engines.reference", "scale", SCALE),
        ("engines.interface", "attend_backward", ATTENTION_HALF),
        ("engines.interface", "mlp_backward", MLP_HALF),
        ("engines.interface", "move_norm_backward", MOVE_NORM),
        ("engines.interface", "enter_backward", ENTER),
        ("engines.interface", "loss", LOSS),
        ("model.transformer", "step_backward", STEP),
        ("model.transformer", "layer_backward", LAYER),
        ("model.transformer", "backward", BACKWARD),
        ("model.weights", "output_matrix", OUTPUT),
    ]
    for what, old, new in table
]
