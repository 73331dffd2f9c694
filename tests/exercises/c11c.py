"""Wrong answers to the exercises of chapter 11c: each must be refused by its check."""

import numpy as np

from nanoeuler.emulator import run
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch

CHAPTER = "11c-loss-and-update"
NAMES = dict(np=np, run=run, Kernel=Kernel, Launch=Launch, cuda=cuda, float32=float32, int32=int32,
             int64=int64, ptx=ptx)  # fmt: skip

SLOPE, LENGTH = "np.exp(z - top) / s - q", "np.sqrt((y * y).sum(dtype=np.float32)) / scale"
SCALE = "np.float32(2.0 ** np.clip(-np.frexp(top)[1], -126, 126))"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("smeared", "a target of 1", "q[target] += 1 - epsilon", "q[target] = 1"),
    ("smeared", "all of the target beside the rest", "+= 1 - epsilon", "+= 1"),
    ("smeared", "the target has no share of the rest", "+= 1 - epsilon", "= 1 - epsilon"),
    ("smeared", "no target", "q[target] += 1 - epsilon", "pass"),
    ("smeared", "the first column's target", "q[target]", "q[0]"),
    ("smeared", "spread over the others", "epsilon / z.size", "epsilon / (z.size - 1)"),
    ("smeared", "epsilon for each", "epsilon / z.size", "epsilon"),
    ("smeared", "the slope of a single target", "/ s - q", "/ s - (q > 0.5)"),
    ("smeared", "no maximum", "top = z.max()", "top = 0.0"),
    ("smeared", "the maximum forgotten", "np.log(s) + top - q @ z", "np.log(s) - q @ z"),
    ("smeared", "the maximum taken off", "np.log(s) + top", "np.log(s) - top"),
    ("smeared", "the other way", SLOPE, "q - np.exp(z - top) / s"),
    ("smeared", "exponentials, not shares", SLOPE, "np.exp(z - top) - q"),
    ("smeared", "the loss of a single target", "- q @ z", "- z[target]"),
    ("norm", "not scaled", "y = x * scale", "y, scale = x, np.float32(1)"),
    ("norm", "not scaled back", LENGTH, LENGTH.removesuffix(" / scale")),
    ("norm", "scaled again", LENGTH, LENGTH.replace("/", "*")),
    ("norm", "scaled the wrong way", "-np.frexp", "np.frexp"),
    ("norm", "one scale for all", SCALE, "np.float32(2.0**-60)"),
    ("norm", "divided by a largest of 0", SCALE, "1 / top"),
    ("norm", "float64", "sum(dtype=np.float32)", "sum(dtype=np.float64)"),
    ("norm", "the largest positive", "np.abs(x).max()", "x.max()"),
    ("norm", "the smallest", "np.abs(x).max()", "np.abs(x).min()"),
    ("norm", "a mean", ".sum(", ".mean("),
    ("norm", "no root", "np.sqrt((y * y).sum(dtype=np.float32))", "(y * y).sum(dtype=np.float32)"),
    ("norm", "the largest alone", LENGTH, "top"),
    ("norm", "a nan for an infinity", "return top", "return np.float32(np.nan)"),
    ("norm", "an infinity for a nan", "return top", "return np.float32(np.inf)"),
    ("norm", "nothing for what is broken", "return top", "return np.float32(0)"),
    ("momentum", "a neighbour's gradient", "mu * m1 + g1", "mu * m1 + g0"),
    ("momentum", "the old momentum", "w2 - lr * m2", "w2 - lr * (m2 - g2) / mu"),
    ("momentum", "the gradient alone", "w3 - lr * m3", "w3 - lr * g3"),
    ("momentum", "no rate", "w1 - lr * m1", "w1 - m1"),
    ("momentum", "uphill", "w0 - lr * m0", "w0 + lr * m0"),
    ("momentum", "the gradient fades", "mu * m0 + g0", "m0 + mu * g0"),
    ("momentum", "momentum is not kept", "ptx.store_float4(m + at, m0, m1, m2, m3)", "pass"),
    ("momentum", "two exchanged", "store_float4(m + at, m0, m1,", "store_float4(m + at, m1, m0,"),
    ("momentum", "past the end", "if i < count:", "if True:"),
    ("momentum", "the last four left out", "if i < count:", "if i + 4 < count:"),
    ("momentum", "a quarter of all", "int32(4 * (cuda", "int32((cuda"),
    ("momentum", "numbers taken for bytes", "at = 4 * int64(i)", "at = int64(i)"),
    ("momentum", "four times too far", "at = 4 * int64(i)", "at = 16 * int64(i)"),
    ("momentum", "weights kept where momentum is", "w + at, float32(w0", "m + at, float32(w0"),
]
