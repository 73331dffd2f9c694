# Made from book/09b-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-step
"""A training step, and a judgement of the model, as recorded programs: nothing here runs.

The step: gradients of norms, biases and tables to zero; forward and backward for each piece of the
batch; the norm of all gradients; AdamW. What changes from step to step comes in the memory
"inputs" and leaves in "results". Left out: running it (stepper.py), schedules.

B batch, T positions, V vocabulary, K predicted tokens, N elements of a model's flat buffer.
"""

from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu import norm, update
from nanoeuler.engines.gpu.embedding import plan_length, scatter_plan
from nanoeuler.engines.gpu.engine import CudaEngine
from nanoeuler.engines.gpu.fill import clear_launch, clear_table
from nanoeuler.engines.gpu.primitives import COPIES, WEIGHTS, Precision
from nanoeuler.engines.gpu.program import Array, Program, Recording
from nanoeuler.engines.interface import Optimizer
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import loss_and_gradients, loss_sums
from nanoeuler.model.weights import Weights

GRADIENTS, MOMENTS = "gradients", ("m", "v")  # memories of float32 (N,), besides WEIGHTS
INPUTS, RESULTS = "inputs", "results"


class Machine(NamedTuple):
    """What a program is recorded for: a card's compute capability, its multiprocessors."""

    capability: tuple[int, int]
    multiprocessors: int


class Inputs(NamedTuple):
    """What a program reads of its batch, in the memory "inputs".

    tokens int32 (B, T); targets int32 (B, T, K); of a step also the scatter plan of each piece,
    int32, scale float32 (K,) and rates float32 (1, 4), as `norm.schedule` makes them.
    """

    tokens: Array
    targets: Array
    plans: tuple[Array, ...] = ()
    scale: Array | None = None
    rates: Array | None = None


class Results(NamedTuple):
    """What it leaves in "results", which is zero at first.

    float32 sums (pieces, K, up to a multiple of 4), and of a step the decision (8,).
    """

    sums: Array
    decision: Array | None = None


class Recorded(NamedTuple):
    """A program with its ends."""

    program: Program
    inputs: Inputs
    results: Results


def pieces_of(B: int, pieces: int) -> list[slice]:
    """The sequences of each piece of a batch, of nearly equal number, none empty."""
    pieces = min(pieces, B)
    return [slice(B * i // pieces, B * (i + 1) // pieces) for i in range(pieces)]


def cleared(config: ModelConfig) -> np.ndarray:
    """The tiles of all gradients that a step adds to and never stores."""
    weights, spans = Weights(config), []
    for part in update.segments(weights, weights.flat):
        spans.append((part.start, part.length))
    names = [
        name == "positions" or view.ndim == 1 or (name == "embedding" and not config.tied)
        for name, view in weights.items()
    ]
    chosen = [span for span, wanted in zip(spans, names, strict=True) if wanted]
    return clear_table(chosen, weights.flat.size)


def updated(config: ModelConfig, copied: bool) -> np.ndarray:
    """The tiles of all parameters, for AdamW; copied: whether there is a bf16 copy."""
    weights = Weights(config)
    parts = update.segments(weights, weights.flat)
    if not copied:
        parts = [part._replace(copy=-1) for part in parts]
    return update.tiles(parts)


class Writer:
    """What both programs begin with: a recording, weights, an engine."""

    def __init__(self, config: ModelConfig, machine: Machine, precision: Precision):
        self.recording, self.config = Recording(), config
        self.flat = self.whole(WEIGHTS)
        self.weights = Weights(config, np.float32, self.flat)
        self.copied = precision.kind == "bf16"
        self.copies = self.recording.whole(
            COPIES, (self.flat.shape[0] if self.copied else 16,), np.uint16
        )
        self.engine = CudaEngine(self.recording, *machine, precision)
        self.engine.names = {view.address: name for name, view in self.weights.items()}

    def whole(self, memory: str) -> Array:
        """A flat buffer (N,)."""
        return self.recording.whole(memory, Weights(self.config).flat.shape, np.float32)

    def sums(self, pieces: int) -> Array:
        """Where the sums of losses go: a row for each piece, 16 bytes or a multiple of it."""
        width = -(-self.config.n_predict // 4) * 4
        return self.recording.place(RESULTS, (pieces, width), np.float32)

    def input(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Something of a batch."""
        return self.recording.place(INPUTS, shape, dtype)

    def batch(self, B: int, T: int) -> tuple[Array, Array]:
        """tokens and targets."""
        K = self.config.n_predict
        return self.input((B, T), np.int32), self.input((B, T, K), np.int32)


def record_sums(
    config: ModelConfig, B: int, T: int, machine: Machine, precision: Precision
) -> Recorded:
    """The program of `transformer.loss_sums`."""
    this = Writer(config, machine, precision)
    tokens, targets = this.batch(B, T)
    sums = this.sums(1)
    this.engine.sums = sums[0, : config.n_predict]
    loss_sums(this.engine, config, this.weights, tokens, targets)
    return Recorded(this.recording.end(), Inputs(tokens, targets), Results(sums))


def record_step(
    config: ModelConfig, B: int, T: int, machine: Machine, precision: Precision,
    optimizer: Optimizer, pieces: int = 1,
) -> Recorded:  # fmt: skip
    """The program of a training step on a batch of B sequences, a piece of them at a time."""
    this, V, K = Writer(config, machine, precision), config.vocab_size, config.n_predict
    recording, engine = this.recording, this.engine
    flat = this.whole(GRADIENTS)
    gradients = Weights(config, np.float32, flat)
    tokens, targets = this.batch(B, T)
    cut = pieces_of(B, pieces)
    plans = tuple(this.input((plan_length((x.stop - x.start) * T, V),), np.int32) for x in cut)
    scale, rates = this.input((K,), np.float32), this.input((1, 4), np.float32)
    sums = this.sums(len(cut))
    decision = recording.place(RESULTS, (8,), np.float32)
    recording.add("clear", clear_launch(recording.constant(cleared(config)), flat))
    for i, x in enumerate(cut):
        engine.plans, engine.sums = {tokens[x].address: plans[i]}, sums[i, :K]
        loss_and_gradients(
            engine, config, this.weights, tokens[x], targets[x], scale, gradients
        )
    blocks = norm.blocks_for(flat.shape[0])
    partials = recording.take((blocks,), np.float32)
    number = recording.place("number", (1,), np.int32)
    losses = sums.reshape(-1)
    launches = norm.norm_launches(
        flat, partials, losses, rates, number, optimizer.clip_norm, decision
    )
    recording.add("norm of gradients", launches)
    moments = [this.whole(memory) for memory in MOMENTS]
    table = recording.constant(updated(config, this.copied))
    launch = update.adamw_launch(
        table, decision, this.flat, flat, *moments, this.copies,
        optimizer.beta1, optimizer.beta2, optimizer.eps,
    )  # fmt: skip
    recording.add("AdamW", launch)
    inputs = Inputs(tokens, targets, plans, scale, rates)
    return Recorded(recording.end(), inputs, Results(sums, decision))


def fill_batch(
    page: np.ndarray, recorded: Recorded, tokens: np.ndarray, targets: np.ndarray
) -> None:
    """Write a batch into the bytes of "inputs"."""
    host_view(page, recorded.inputs.tokens)[...] = tokens
    host_view(page, recorded.inputs.targets)[...] = targets


def fill_step(
    page: np.ndarray, recorded: Recorded, tokens: np.ndarray, scale: np.ndarray,
    rates: np.ndarray, V: int,
) -> None:  # fmt: skip
    """Write what a step wants besides: where each token stands, the loss's scale, the rates."""
    inputs = recorded.inputs
    cut = pieces_of(len(tokens), len(inputs.plans))
    for x, plan in zip(cut, inputs.plans, strict=True):
        host_view(page, plan)[...] = scatter_plan(tokens[x].reshape(-1), V)
    host_view(page, inputs.scale)[...] = scale
    host_view(page, inputs.rates)[...] = rates


def host_view(page: np.ndarray, array: Array) -> np.ndarray:
    """An array of a memory, in a copy of its bytes on the host."""
    return np.ndarray(array.shape, array.dtype, page, array.address)
