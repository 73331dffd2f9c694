"""A recorded training step on paper, beside the reference engine in float64."""

import math
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from nanoeuler.emulator import device, rehearsal
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.attention import choice
from nanoeuler.engines.gpu.attention.layout import PAST_END
from nanoeuler.engines.gpu.rows.fill import CLEAR
from nanoeuler.engines.gpu.step import engine, matmul
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


def relu2(u):
    """The same of ReLU squared."""
    above = np.maximum(u, 0)
    return above * above, 2 * above


CURVES = {"gelu": gelu, "gelu_exact": gelu_exact, "relu2": relu2}


@dataclass(frozen=True)
class ByNumpy:
    """Stands on a list for launches; `writes`: which of its args it writes."""

    args: tuple  # with None for what there is not
    kernel: Any = CLEAR  # any: a device on paper asks for one

    writes = ()

    def prepare(self, device):
        """As `Gemm.prepare`."""
        return device.prepare(self)

    def play(self):
        """Run on arrays of a device on paper."""
        arrays = [None if arg is None else arg._values for arg in self.args]
        replace(self, args=tuple(arrays)).run()
        for n in self.writes:
            if self.args[n] is not None:
                self.args[n]._written[...] = True


def seen_by(q, k, first, last):
    """Scores in powers of two, and whether each query sees each key: by what queries know, and by
    what keys do."""
    B, T = len(q), q.shape[2]
    t = np.arange(T)
    first = np.zeros((B, T), int) if first is None else first
    last = np.full((B, T), T - 1) if last is None else last
    causal = t <= t[:, None]
    of_queries = causal & (t >= first[:, :, None])
    of_keys = causal & (t[:, None] <= last[:, None])
    s = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3]) / math.log(2)
    return s, of_queries[:, None], of_keys[:, None]


@dataclass(frozen=True)
class NumpyAttention(ByNumpy):
    """A forward pass of attention; args: q, k, v, o, lse, first."""

    writes = 3, 4

    def run(self):
        q, k, v, o, lse, first = self.args
        groups, T = q.shape[1] // k.shape[1], q.shape[2]
        k, v = (np.repeat(numbers(x), groups, axis=1) for x in (k, v))
        s, seen, _ = seen_by(numbers(q), k, first, None)
        s = np.where(seen, s, -np.inf)
        lse[...] = PAST_END
        with np.errstate(invalid="ignore"):  # of planted mistakes
            total = np.logaddexp2.reduce(s, axis=-1)
        lse[..., :T] = total
        o[...] = to_bf16((np.exp2(s - total[..., None]) @ v).astype(np.float32))


@dataclass(frozen=True)
class NumpyAttentionBackward(ByNumpy):
    """Its backward; args: do, q, k, v, o, lse, delta, dq, dk, dv, cos, sin, first, last."""

    writes = 6, 7, 8, 9

    def run(self):
        *arrays, lse, delta, dq, dk, dv, cos, sin, first, last = self.args
        do, q, k, v, o = map(numbers, arrays)
        (B, H, T, D), G = q.shape, k.shape[1]
        k, v = (np.repeat(x, H // G, axis=1) for x in (k, v))
        s, of_queries, of_keys = seen_by(q, k, first, last)
        p = np.exp2(np.minimum(s - lse[..., :T, None], 100))  # of what is not seen, anything
        delta[...] = 0
        delta[..., :T] = (do * o).sum(axis=-1)
        ds = p * (do @ v.swapaxes(2, 3) - delta[..., :T, None]) / math.sqrt(D)
        back = {id(dq): (ds * of_queries) @ k}
        for x, each, y in (dk, ds, q), (dv, p, do):
            of_heads = (each * of_keys).swapaxes(2, 3) @ y
            back[id(x)] = of_heads.reshape(B, G, H // G, T, D).sum(axis=2)
        for x in (dq, dk) if cos is not None else ():
            turned = back[id(x)].swapaxes(1, 2)
            turned = rope(turned, turned.shape[2], numbers(cos)[:T], -numbers(sin)[:T])
            back[id(x)] = turned.swapaxes(1, 2)
        for x in dq, dk, dv:
            x[...] = to_bf16(back[id(x)].astype(np.float32))


@dataclass(frozen=True)
class NumpyProduct(ByNumpy):
    """A product: exact sums, rounded where they are stored.

    args: a, b, c, aux, second, sums, cos, sin.
    """

    epilogue: str = "store"
    turned: tuple = (0, 0)  # positions of a sequence, columns of heads that are turned

    writes = 2, 4

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
        elif self.epilogue.removesuffix(" backward") in CURVES:
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


def attention_by_numpy(monkeypatch):
    """Have attention in bf16 done by NumPy, once its own launches have taken the arrays."""
    forward, backward = choice.forward_launch, choice.backward_launches

    def forward_launch(q, k, v, o, lse, capability, documents=None):
        forward(q, k, v, o, lse, capability, documents)
        return NumpyAttention((q, k, v, o, lse, documents and documents.first))

    def backward_launches(a, capability, turn=None, documents=None):
        backward(a, capability, turn, documents)
        angles = (turn.cos, turn.sin) if turn else (None, None)
        return NumpyAttentionBackward((*a, *angles, *(documents or (None, None))))

    monkeypatch.setattr(engine.layout, "in_cache", lambda q, k, launches, share: launches)
    monkeypatch.setattr(choice, "forward_launch", forward_launch)
    monkeypatch.setattr(choice, "backward_launches", backward_launches)


def by_numpy(monkeypatch, attention=True):
    """Have all products of a recorded step done by NumPy, and attention in bf16 unless a test is
    about it: their kernels are tested elsewhere."""
    if attention:
        attention_by_numpy(monkeypatch)

    def call(self, name, a, b, c, end=matmul.STORE):
        cos, sin, *turned = end.rope or (None, None, 0, 0)
        args = a, b, c, end.aux, end.second, end.sums, cos, sin
        work = NumpyProduct(args, epilogue=end.name, turned=tuple(turned))
        self.recording.add(name, [work], 2 * a.shape[1] * math.prod(c.shape))

    monkeypatch.setattr(matmul.Multiplier, "__call__", call)
    run, play = rehearsal.run, device.play

    def run_or_not(this):
        return this.run() if isinstance(this, ByNumpy) else run(this)

    def play_or_not(this, seed):
        return this.play() if isinstance(this, ByNumpy) else play(this, seed)

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


def play(program, memories, update=False):
    """Play a step's program up to its gradients, or all of it, which takes a third longer.

    What comes after them is the same two kernels over flat arrays, whatever the model.
    """
    names = [step.name for step in program.steps]
    gradients = names.index("norm of gradients")
    assert {*names[gradients:]} == {"norm of gradients", "AdamW"}
    for _ in islice(rehearsal.rehearse(program, memories), None if update else gradients):
        pass


def step_on_paper(
    config, B, T, machine, precision, pieces=1, recorded=None, first=None, update=False
):
    """Record a step, play it on paper, and compute it by the reference engine.

    first (B, T): where the text of each position begins in its row. update: whether the weights
    change, too.
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
    play(recorded.program, memories, update)
    exact_w = Weights(config, np.float64, w.flat.astype(np.float64))
    exact = exact_w.zeros_like()
    exact_sums = loss_and_gradients(
        ReferenceEngine(), config, exact_w, tokens, targets, scale, exact, first
    )
    sums = memories["sums"].view(np.float32).reshape(recorded.results["sums"].shape)
    sums = sums[:, : config.n_predict].sum(axis=0)
    gradients = Weights(config, flat=memories["gradients"])
    return Outcome(recorded, memories, gradients, sums, exact, exact_sums, w)
