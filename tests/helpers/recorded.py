"""A recorded training step on paper, beside the reference engine in float64."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nanoeuler.emulator import device, rehearsal
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.rows.fill import CLEAR
from nanoeuler.engines.gpu.step import matmul
from nanoeuler.engines.gpu.step.precision import LOWER
from nanoeuler.engines.gpu.step.recording import (
    ProgramBuilder,
    Rules,
    fill_batch,
    fill_step,
    in_halves,
)
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model.layers import GELU_CUBIC, GELU_SCALE, rope
from nanoeuler.model.transformer import head_weights, loss_and_gradients, loss_scale
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.training import optim

RULES = Rules(optim.CLIP_NORM, optim.BETA1, optim.BETA2, optim.EPS)
RATES = 0.01, 10.0, 50.0, 0.1  # learning rate, corrections of the moments, decay


def numbers(array):
    """An array on paper as float64."""
    return (from_bf16(array) if array.dtype == np.uint16 else array).astype(np.float64)


def gelu(u):
    """GELU and its slope, in float64."""
    t = np.tanh(GELU_SCALE * (u + GELU_CUBIC * u**3))
    slope = (1 + t) / 2 + u / 2 * (1 - t * t) * GELU_SCALE * (1 + 3 * GELU_CUBIC * u * u)
    return u * (1 + t) / 2, slope


def gelu_exact(u):
    """The same of the exact GELU."""
    share = np.vectorize(lambda x: math.erfc(-x / math.sqrt(2)) / 2)(u)
    return u * share, share + u * np.exp(-u * u / 2) / math.sqrt(2 * math.pi)


CURVES = {"gelu": gelu, "gelu_exact": gelu_exact}


@dataclass(frozen=True)
class NumpyProduct:
    """Stands on a list for the launches of a product: exact sums, rounded where they are stored."""

    args: tuple  # a, b, c, aux, second, sums, cos, sin, with None for what there is not
    epilogue: str
    turned: tuple = (0, 0)  # positions of a sequence, columns of heads that are turned
    kernel: Any = CLEAR  # any: a device on paper asks for one

    def prepare(self, device):
        """As `Gemm.prepare`."""
        return device.prepare(self)

    def play(self):
        """Run on arrays of a device on paper."""
        arrays = [None if arg is None else arg._values for arg in self.args]
        replace(self, args=tuple(arrays)).run()
        for arg in self.args[2], self.args[4]:
            if arg is not None:
                arg._written[...] = True

    def run(self):
        a, b, c, aux, second, sums, cos, sin = self.args
        total = numbers(a) @ numbers(b)
        if cos is not None:
            (T, columns), half = self.turned, cos.shape[1]
            heads = total[:, :columns].reshape(-1, T, columns // (2 * half), 2 * half)
            turned = rope(heads, heads.shape[2], numbers(cos)[:T], numbers(sin)[:T])
            total[:, :columns] = turned.reshape(-1, columns)
        if "bias" in self.epilogue:
            total = total + numbers(aux)
        if self.epilogue == "add":
            total = total + c
        elif self.epilogue.startswith("bias and"):
            second[...] = to_bf16(total.astype(np.float32))
            total = CURVES[self.epilogue.removeprefix("bias and ")](total)[0]
        elif self.epilogue == "swiglu":
            second[...] = to_bf16(total.astype(np.float32))
            gate, up = np.split(total, 2, axis=1)
            total = gate / (1 + np.exp(-gate)) * up
        elif self.epilogue in ("gelu backward", "gelu_exact backward"):
            h, slope = CURVES[self.epilogue.removesuffix(" backward")](numbers(aux))
            total = total * slope
            second[...] = to_bf16(h.astype(np.float32))
        elif self.epilogue == "swiglu backward":
            (gate, up), dh = numbers(aux)[0], total
            sigma = 1 / (1 + np.exp(-gate))
            dgate = dh * up * sigma * (1 + gate * (1 - sigma))
            both = np.stack([dgate, dh * gate * sigma])[None]
            second[...] = to_bf16(both.astype(np.float32))
            total = gate * sigma * up
        total = total.astype(np.float32)
        c[...] = to_bf16(total) if c.dtype == np.uint16 else total
        if sums is not None:
            sums += numbers(c).sum(axis=0).astype(np.float32)


def by_numpy(monkeypatch):
    """Have all products of a recorded step done by NumPy: their kernels are tested elsewhere."""

    def call(self, name, a, b, c, end=matmul.STORE):
        cos, sin, *turned = end.rope or (None, None, 0, 0)
        args = a, b, c, end.aux, end.second, end.sums, cos, sin
        work = NumpyProduct(args, end.name, tuple(turned))
        self.recording.add(name, [work], 2 * a.shape[1] * math.prod(c.shape))

    monkeypatch.setattr(matmul.Multiplier, "__call__", call)
    run, play = rehearsal.run, device.play

    def run_or_not(this):
        return this.run() if isinstance(this, NumpyProduct) else run(this)

    def play_or_not(this, seed):
        return this.play() if isinstance(this, NumpyProduct) else play(this, seed)

    monkeypatch.setattr(rehearsal, "run", run_or_not)
    monkeypatch.setattr(device, "play", play_or_not)


@dataclass
class Outcome:
    """What a step on paper left, and what it should have."""

    recorded: Any
    memories: dict
    gradients: Weights
    sums: np.ndarray
    exact: Weights
    exact_sums: np.ndarray
    before: Weights

    def errors(self):
        """name -> relative error of each gradient, and of the sums of losses."""
        made = {"sums": (self.sums, self.exact_sums)}
        made |= {name: (self.gradients[name], self.exact[name]) for name in self.exact}
        return {
            name: np.linalg.norm(ours - exact) / np.linalg.norm(exact)
            for name, (ours, exact) in made.items()
        }


def problem(config, B, T, seed=0):
    """Weights none of whose gains is 1 and none of whose biases is 0; tokens; targets, some of
    them not counted; the loss's scale."""
    rng = np.random.default_rng(seed)
    w = initialise(config, seed)
    for view in w.values():
        view += 0.1 * rng.standard_normal(view.shape).astype(np.float32)
    tokens = rng.integers(config.vocab_size, size=(B, T))
    targets = rng.integers(-1, config.vocab_size, size=(B, T, config.n_predict))
    return w, tokens, targets, loss_scale(targets, head_weights(config.n_predict))


def step_on_paper(config, B, T, machine, precision, pieces=1, recorded=None, first=None):
    """Record a step, play it on paper, and compute it by the reference engine.

    first (B, T): where the text of each position begins in its row.
    """
    w, tokens, targets, scale = problem(config, B, T)
    if recorded is None:
        builder = ProgramBuilder(config, machine, precision)
        recorded = builder.build_step(B, T, RULES, pieces, first is not None)
    memories = {name: np.zeros(a.shape, a.dtype) for name, a in recorded.inputs.items()}
    fill_batch(memories, config, tokens, targets, first)
    fill_step(memories, scale, np.float32([RATES]), config.vocab_size)
    memories["weights"] = w.flat.copy()
    memories["gradients"] = np.full(w.flat.size, np.nan, np.float32)
    if LOWER in recorded.program.sizes:
        memories |= in_halves(w, precision.stream)
    elif precision.kind == "bf16":
        memories["copies"] = to_bf16(w.flat)
    list(rehearsal.rehearse(recorded.program, memories))
    exact_w = Weights(config, np.float64, w.flat.astype(np.float64))
    exact = exact_w.zeros_like()
    exact_sums = loss_and_gradients(
        ReferenceEngine(), config, exact_w, tokens, targets, scale, exact, first
    )
    sums = memories["sums"].view(np.float32).reshape(recorded.results["sums"].shape)
    sums = sums[:, : config.n_predict].sum(axis=0)
    gradients = Weights(config, flat=memories["gradients"])
    return Outcome(recorded, memories, gradients, sums, exact, exact_sums, w)
