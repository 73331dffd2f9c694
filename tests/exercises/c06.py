"""Wrong answers to the exercises of chapter 6: each must be refused by its check."""

import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from nanoeuler.checks.derivatives import complex_step, relative_error
from nanoeuler.checks.gradcheck import TINY, TINY_GPT2, tiny_problem
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.transformer import loss_and_gradients, stream

CHAPTER = "06-backprop"


def hear_queries(heads, n_kv, start):
    """As the chapter has it: a cache's answer that is none."""
    return heads[:, :, : -2 * n_kv].reshape(*heads.shape[:2], -1)


# What the cells of the chapter have imported before; the rest each check imports itself.
NAMES = dict(
    np=np,
    replace=replace,
    complex_step=complex_step,
    relative_error=relative_error,
    IGNORE=IGNORE,
    TINY=TINY,
    TINY_GPT2=TINY_GPT2,
    tiny_problem=tiny_problem,
    ReferenceEngine=ReferenceEngine,
    loss_and_gradients=loss_and_gradients,
    stream=stream,
    tracemalloc=tracemalloc,
    SimpleNamespace=SimpleNamespace,
    hear_queries=hear_queries,
)
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("rows", "heads dealt out in turn", "h // (H // G)", "h % G"),
    ("rows", "a position does not see itself", "slice(t + 1)", "slice(t)"),
    ("rows", "a position sees the future", "slice(t + 1)", "slice(T)"),
    ("rows", "the row is rebuilt without its scale", "@ q[b, h, t] / D**0.5", "@ q[b, h, t]"),
    ("rows", "the last use overwrites dv", "dv[b, g, past] +=", "dv[b, g, past] ="),
    ("rows", "the last use overwrites dk", "dk[b, g, past] +=", "dk[b, g, past] ="),
    ("rows", "the average is forgotten", "(dp - a[b, h, t])", "dp"),
    ("rows", "the average of y, not of dp", "np.sum(dy * y, axis=-1)", "np.sum(y * y, axis=-1)"),
    ("rows", "one average for all heads", "a[b, h, t]", "a[b, 0, t]"),
    ("rows", "dq and dk without their scale", "a[b, h, t]) / D**0.5", "a[b, h, t])"),
    ("rows", "dk from the output's gradient", "np.outer(dm, q[b, h, t])",
     "np.outer(dm, dy[b, h, t])"),
    ("rows", "dk without its own position", "np.outer(dm, q[b, h, t])",
     "np.outer(np.where(np.arange(t + 1) < t, dm, 0), q[b, h, t])"),
    ("rows", "the row's sum is taken for its logarithm", "np.exp(S - lse[b, h, t])",
     "np.exp(S) / lse[b, h, t]"),
    ("rows", "right, but holds all of P", "a = np.sum(dy * y, axis=-1)",
     "a, whole = np.sum(dy * y, axis=-1), np.zeros((B, H, T, T))"),
    ("z_loss", "the square's derivative without its two", "2 * alpha * log_z", "alpha * log_z"),
    ("z_loss", "the square's derivative without log Z", "2 * alpha * log_z", "2 * alpha"),
    ("z_loss", "no gradient of the price", " * (1 + 2 * alpha * log_z)", ""),
    ("z_loss", "the price lowers the gradient", "(1 + 2", "(1 - 2"),
    ("z_loss", "the price without p", "* (1 + 2 * alpha * log_z)", "+ 2 * alpha * log_z"),
    ("z_loss", "log Z of the shifted logits", "np.log(total) + highest", "np.log(total)"),
    ("z_loss", "one shift for all positions", "logits.real, axis=-1, keepdims=True",
     "logits.real, keepdims=True"),
    ("z_loss", "nothing is shifted", "np.exp(logits - highest)",
     "np.exp(logits) * np.exp(-highest)"),
    ("z_loss", "the price is not squared", "alpha * log_z**2", "alpha * log_z"),
    ("z_loss", "the sums without the price", " + alpha * log_z**2", ""),
    ("z_loss", "ignored targets are paid for", "losses[..., 0] * counted", "losses[..., 0]"),
    ("z_loss", "ignored targets have a gradient", "(counted * scale)[..., None]",
     "scale[:, None]"),
    ("z_loss", "the gradient without its scale", "(counted * scale)", "counted"),
    ("z_loss", "the sums are scaled", "[..., 0] * counted", "[..., 0] * counted * scale"),
    ("z_loss", "means for sums", "np.sum(losses", "np.mean(losses"),
    ("z_loss", "the target's logit is spared the price", "picked - 1",
     "picked / (1 + 2 * alpha * np.take_along_axis(log_z, 0 * at, axis=-1)) - 1"),
    ("thrifty", "attention keeps n", "saved._replace(n=None)", "saved"),
    ("thrifty", "attention keeps a copy of n", "saved._replace(n=None)",
     "saved._replace(n=n.copy())"),
    ("thrifty", "the MLP keeps h", "_replace(n=None, h=None)", "_replace(n=None)"),
    ("thrifty", "the MLP keeps n", "_replace(n=None, h=None)", "_replace(h=None)"),
    ("thrifty", "the engine itself keeps n", "out, saved = super().mlp(config, b, n)",
     "self.kept, (out, saved) = [n, *getattr(self, 'kept', [])], super().mlp(config, b, n)"),
    ("thrifty", "GELU is forgotten", "self.gelu(saved.u)", "saved.u"),
    ("thrifty", "SwiGLU is forgotten", "self.swiglu(saved.u)", "saved.u[..., : config.hidden]"),
    ("thrifty", "the gradient stands in for attention's n", "_replace(n=again())",
     "_replace(n=dout)"),
    ("thrifty", "the gradient stands in for the MLP's n", "n=again(), h=h", "n=dout, h=h"),
    ("thrifty", "attention's gradients are added twice",
     "return super().attend_backward(config, b, db, saved, dout, again)",
     "super().attend_backward(config, b, db, saved, dout, again)\n"
     "            return super().attend_backward(config, b, db, saved, dout, again)"),
    ("thrifty", "the MLP's gradients are added twice",
     "return super().mlp_backward(config, b, db, saved, dout, again)",
     "super().mlp_backward(config, b, db, saved, dout, again)\n"
     "            return super().mlp_backward(config, b, db, saved, dout, again)"),
    ("thrifty", "several texts are forgotten", "n, start, cache, first)", "n, start, cache)"),
    ("thrifty", "the first position is forgotten", "n, start, cache, first)",
     "n, 0, cache, first)"),
    ("midpoint", "a whole step to the second question", "(1 / 2,)", "(1.0,)"),
    ("midpoint", "a quarter of a step", "(1 / 2,)", "(1 / 4,)"),
    ("midpoint", "two thirds of a step", "(1 / 2,)", "(2 / 3,)"),
    ("midpoint", "no step to the second question", "(1 / 2,)", "(0.0,)"),
    ("midpoint", "half a step backwards", "(1 / 2,)", "(-1 / 2,)"),
    ("midpoint", "Heun's weights", "(0.0, 1.0)", "(1 / 2, 1 / 2)"),
    ("midpoint", "Ralston's method", "(1 / 2,)), (0.0, 1.0)", "(2 / 3,)), (1 / 4, 3 / 4)"),
    ("midpoint", "the first answer is believed", "(0.0, 1.0)", "(1.0, 0.0)"),
    ("midpoint", "both answers are added", "(0.0, 1.0)", "(1.0, 1.0)"),
    ("midpoint", "half a step is taken", "(0.0, 1.0)", "(0.0, 1 / 2)"),
    ("midpoint", "twice the step is taken", "(0.0, 1.0)", "(0.0, 2.0)"),
    ("midpoint", "a third question for nothing", "(1 / 2,)), (0.0, 1.0)",
     "(1 / 2,), (0.0, 1.0)), (0.0, 1.0, 0.0)"),
]
