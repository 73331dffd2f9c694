"""Wrong answers to the exercises of chapter 6: each must be refused by its check."""

import tracemalloc

import numpy as np

from nanoeuler.checks.derivatives import complex_step, relative_error
from nanoeuler.model.backward import IGNORE

CHAPTER = "06-backprop"

# What the cells of the chapter have imported before; the rest each check imports itself.
NAMES = dict(
    np=np,
    complex_step=complex_step,
    relative_error=relative_error,
    IGNORE=IGNORE,
    tracemalloc=tracemalloc,
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
]
