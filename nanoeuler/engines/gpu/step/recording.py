# Made from book/13a-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-step
"""A training step, and a judgement of the model, as recorded programs: nothing here runs.

The step: gradients that are only added to (products' biases, tables that are only looked up) to
zero; forward and backward for each piece of the batch; the norm of all gradients; AdamW. Left out:
running it (stepper.py), schedules.

B batch, T positions, V vocabulary, K predicted tokens, N elements of a model's flat buffer.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.attention.documents import Documents, last_of
from nanoeuler.engines.gpu.lang.card import L2
from nanoeuler.engines.gpu.rows import adamw, gradient_norm
from nanoeuler.engines.gpu.rows.embedding import plan_length, scatter_plan
from nanoeuler.engines.gpu.rows.fill import clear_launch, clear_table
from nanoeuler.engines.gpu.step.engine import CudaEngine, PackedRows, expect_sizes
from nanoeuler.engines.gpu.step.matmul import Multiplier
from nanoeuler.engines.gpu.step.precision import COPIES, LOWER, WEIGHTS, Precision
from nanoeuler.engines.gpu.step.program import ALIGN, NOWHERE, Array, Excerpt, Program, Recording
from nanoeuler.engines.sharding import slices
from nanoeuler.model.config import ModelConfig, first_keys
from nanoeuler.model.transformer import loss_and_gradients, loss_sums
from nanoeuler.model.weights import Weights, flat_size

GRADIENTS, MOMENTS = "gradients", ("m", "v")  # memories of float32 (N,), besides WEIGHTS


class Machine(NamedTuple):
    """What a program is recorded for: a card's compute capability, its multiprocessors, what
    records products for it, and the bytes of its L2 cache."""

    capability: tuple[int, int]
    multiprocessors: int
    multiplier: type[Multiplier] = Multiplier
    l2: int = L2


class Rules(NamedTuple):
    """The optimizer's numbers that no step changes: see `training.optim.AdamW`."""

    clip_norm: float
    beta1: float
    beta2: float
    eps: float


class Recorded(NamedTuple):
    """A program with its ends, each a memory of its name.

    inputs: of part i of the batch, "tokens i" int32 (B, T), "targets i" int32 (B, T, K), and in a
    step its scatter plan, "plan i". For rows of several texts also "first i" and "last i", as in
    `Documents`; for layers with another window, the names that `windows` gives. Where
    positions are learned "places i", and in a step their "scatter i". Of a
    step also scale float32 (K,) and rates float32 (1, 4), as `gradient_norm.schedule` makes them.
    results: sums float32 (pieces, K rounded up to a multiple of 4), zero at first, and of a step
    its decision float32 (8,).
    """

    program: Program
    inputs: dict[str, Array]
    results: dict[str, Array]


def cleared(weights: Weights) -> np.ndarray:
    """The tiles of all gradients that a step adds to and never stores."""
    spans, tied = [], weights.config.tied
    for name, part in zip(weights, adamw.segments(weights), strict=True):
        bias = not part.decay and "norm" not in name
        if bias or name == "positions" or (name == "embedding" and not tied):
            spans.append((part.start, part.length))
    return clear_table(spans, weights.flat.shape[0])


def lendable(gradients: Weights) -> dict[int, list[tuple[str, int, int]]]:
    """(memory, start, bytes) of the gradients that a step stores before it adds to them, by block.

    Whole units of ALIGN, as the arena lends; a gradient that begins within one is left out.
    """
    found: dict[int, list[tuple[str, int, int]]] = {}
    for name, view in gradients.items():
        first, *rest = name.split(".")
        stored = len(view.shape) > 1 or "norm" in name
        if first == "block" and stored and view.address % ALIGN == 0 and view.nbytes >= ALIGN:
            span = view.memory, view.address, view.nbytes // ALIGN * ALIGN
            found.setdefault(int(rest[0]), []).append(span)
    return found


def windows(config: ModelConfig, i: int) -> list[tuple[ModelConfig, tuple[str, str]]]:
    """The config of a layer with each window that occurs, and what inputs of piece i say of it."""
    layers = (config.in_layer(layer) for layer in range(config.n_layers))
    each = list({own.sliding_window: own for own in layers}.values())
    ends = ["", *(f", window {own.sliding_window}" for own in each[1:])]
    return [(own, (f"first {i}{end}", f"last {i}{end}"))
            for own, end in zip(each, ends, strict=True)]  # fmt: skip


def updated(weights: Weights, copied: bool) -> np.ndarray:
    """The tiles of all parameters, for AdamW; copied: whether there is a bf16 copy."""
    parts = adamw.segments(weights)
    return adamw.tiles(parts if copied else [part._replace(copy=-1) for part in parts])


class ProgramBuilder:
    """Records one program of a model: its weights, an engine, and what the host sends and fetches.

    inputs, results: see `Recorded`. copied: whether products read a bf16 copy of the weights.
    UserError: see `expect_sizes`.
    """

    engine_type = CudaEngine

    def __init__(self, config: ModelConfig, machine: Machine, precision: Precision) -> None:
        expect_sizes(config)
        self.recording, self.config, self.stream = Recording(), config, precision.stream
        self.inputs: dict[str, Array] = {}
        self.results: dict[str, Array] = {}
        self.copied = precision.kind == "bf16"
        self.weights = self.read()
        length = self.weights.flat.shape[0] if self.copied else 16
        self.copies = self.recording.whole(COPIES, (length,), np.uint16)
        self.engine = self.engine_type(self.recording, *machine, precision)
        views = self.weights.items()
        self.engine.names = {(view.memory, view.address): name for name, view in views}

    def read(self) -> Weights:
        """The weights, as the model's code reads them."""
        return Weights(self.config, np.float32, self.whole(WEIGHTS))

    def memories(self, weights: Weights) -> dict[str, np.ndarray]:
        """What the memories of weights hold for these programs: float32, and a bf16 copy."""
        copies = adamw.to_halves(weights.flat)[0] if self.copied else np.zeros(16, np.uint16)
        return {WEIGHTS: weights.flat, COPIES: copies}

    def whole(self, memory: str) -> Array:
        """A flat buffer (N,)."""
        return self.recording.whole(memory, (flat_size(self.config),), np.float32)

    def input(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Something that the host sends."""
        return self.inputs.setdefault(name, self.recording.whole(name, shape, dtype))

    def result(self, name: str, shape: tuple[int, ...]) -> Array:
        """Something that it fetches."""
        return self.results.setdefault(name, self.recording.whole(name, shape, np.float32))

    def batch(self, i: int, B: int, T: int) -> tuple[Array, Array]:
        """tokens and targets of piece i."""
        shape = B, T, self.config.n_predict
        tokens = self.input(f"tokens {i}", (B, T), np.int32)
        return tokens, self.input(f"targets {i}", shape, np.int32)

    def packed_rows(self, i: int, B: int, T: int, back: bool) -> PackedRows:
        """Which texts the rows of piece i hold; back: for a backward pass, too."""
        seen = {
            own.sliding_window: Documents(*(self.input(name, (B, T), np.int32) for name in names))
            for own, names in windows(self.config, i)
        }
        documents = next(iter(seen.values()))
        if self.config.position != "learned":
            return PackedRows(documents, windows=seen)
        places, length = self.input(f"places {i}", (B, T), np.int32), plan_length(B * T, T)
        plan = self.input(f"scatter {i}", (length,), np.int32) if back else None
        return PackedRows(documents, places, plan, windows=seen)

    def loss_sums(self, pieces: int) -> Array:
        """Where sums of losses go: a row for each piece, 16 bytes or a multiple of it."""
        return self.result("sums", (pieces, -(-self.config.n_predict // 4) * 4))

    def update(self, flat: Array, losses: Array, rules: Rules) -> None:
        """The step of all weights, whose gradients are flat (N,)."""
        buffers = adamw.Buffers(self.weights.flat, flat, *map(self.whole, MOMENTS), self.copies)
        self.descend(updated(self.weights, self.copied), buffers, losses, rules)

    def descend(
        self, tiles: np.ndarray, buffers: adamw.Buffers, losses: Array, rules: Rules
    ) -> None:
        """The norm of all gradients, what is decided from it and from the losses, and AdamW."""
        recording, flat = self.recording, buffers.gradients
        partials = recording.take((gradient_norm.blocks_for(flat.shape[0]),), np.float32)
        rates, decision = self.input("rates", (1, 4), np.float32), self.result("decision", (8,))
        number, limit = recording.whole("number", (1,), np.int32), rules.clip_norm
        given = flat, partials, losses, rates, number, limit, decision
        recording.add("norm of gradients", gradient_norm.norm_launches(*given))
        table = recording.constant(tiles)
        given = table, decision, buffers, rules.beta1, rules.beta2, rules.eps
        recording.add("AdamW", adamw.adamw_launch(*given))

    def build_sums(self, B: int, T: int, packed: bool = False) -> Recorded:
        """The program of `transformer.loss_sums`; packed: of rows that may hold several texts."""
        self.engine.sums = self.loss_sums(1)[0, : self.config.n_predict]
        self.engine.forward_only = True
        first = self.packed_rows(0, B, T, False) if packed else None
        loss_sums(self.engine, self.config, self.weights, *self.batch(0, B, T), first)
        return Recorded(self.recording.end(), self.inputs, self.results)

    def passes(self, gradients: Any, cut: Sequence[slice], T: int, packed: bool) -> Array:
        """Forward and backward of each part of a batch, one after the other; all sums of losses."""
        config, engine, sums = self.config, self.engine, self.loss_sums(len(cut))
        K = config.n_predict
        scale = self.input("scale", (K,), np.float32)
        for i, x in enumerate(cut):
            tokens, targets = self.batch(i, x.stop - x.start, T)
            engine.plan, engine.sums = self.scatter_plan(i, tokens), sums[i, :K]
            first = self.packed_rows(i, *tokens.shape, True) if packed else None
            given = self.weights, tokens, targets, scale, gradients, first
            loss_and_gradients(engine, config, *given)
            engine.flush()  # reclaims norms' gradients, which the next part could borrow else
        return sums.reshape(-1)

    def scatter_plan(self, i: int, tokens: Array) -> Array:
        """Which rows of the embedding's gradient the tokens (B, T) of piece i belong to."""
        length = plan_length(math.prod(tokens.shape), self.config.vocab_size)
        return self.input(f"plan {i}", (length,), np.int32)

    def build_step(
        self, B: int, T: int, rules: Rules, pieces: int = 1, packed: bool = False
    ) -> Recorded:
        """The program of a training step on a batch of B sequences, in so many `pieces`.

        packed: of rows that may hold several texts.
        """
        flat = self.whole(GRADIENTS)
        gradients = Weights(self.config, np.float32, flat)
        tiles = cleared(gradients)
        if len(tiles):
            self.recording.add("clear", clear_launch(self.recording.constant(tiles), flat))
        self.engine.fresh = {view.address for name, view in gradients.items() if "norm" in name}
        self.engine.lendable = lendable(gradients)
        losses = self.passes(gradients, slices(range(B), pieces), T, packed)
        self.update(flat, losses, rules)
        return Recorded(self.recording.end(), self.inputs, self.results)


# %% sec-step-step
def read_spans(config: ModelConfig, stream: str) -> list[tuple[int, int]]:
    """(start, stop) of what kernels read in float32 where masters are in halves: norms, and the
    tables, unless the embedding reads their bf16 copy: a bf16 stream, no learned positions."""
    nowhere = Array(NOWHERE, 0, (flat_size(config),), np.dtype(np.float32), (4,))
    weights = Weights(config, np.float32, nowhere)
    tables = config.position == "learned" or stream != "bf16"
    norms = (part for part in adamw.segments(weights) if part.copy < 0)
    spans = [(norm.start, norm.start + norm.length) for norm in norms]
    return [(0, weights.block_starts[0]), *spans] if tables else spans


class HalvesBuilder(ProgramBuilder):
    """Records programs of a model whose masters are in two halves: of one GPU, in bf16."""

    def read(self) -> Weights:
        spans = read_spans(self.config, self.stream)
        size = sum(stop - start for start, stop in spans)
        self.kept = self.recording.whole(WEIGHTS, (size,), np.float32)
        flat = Excerpt(flat_size(self.config), self.kept, spans)
        return Weights(self.config, np.float32, flat)

    def update(self, flat: Array, losses: Array, rules: Rules) -> None:
        """The step of all weights in halves; flat: their gradients, float32 (N,)."""
        lower, parts = self.recording.whole(LOWER, flat.shape, np.uint16), []
        for part, view in zip(adamw.segments(self.weights), self.weights.values(), strict=True):
            place = view.address // 4 if view.memory == WEIGHTS else -1
            parts.append(part._replace(copy=place))
        moments = map(self.whole, MOMENTS)
        buffers = adamw.Buffers(lower, flat, *moments, self.copies, self.kept)
        self.descend(adamw.tiles(parts), buffers, losses, rules)

    def memories(self, weights: Weights) -> dict[str, np.ndarray]:
        """What the memories of weights hold for these programs, by name: see `in_halves`."""
        return in_halves(weights, self.stream)


# %% sec-step-step
def in_halves(weights: Weights, stream: str) -> dict[str, np.ndarray]:
    """The memories of masters in halves, as `HalvesBuilder` has them."""
    flat, (copies, lower) = weights.flat, adamw.to_halves(weights.flat)
    read = [flat[slice(*span)] for span in read_spans(weights.config, stream)]
    return {WEIGHTS: np.concatenate(read), COPIES: copies, LOWER: lower}


def program_builder(config: ModelConfig, machine: Machine, precision: Precision) -> ProgramBuilder:
    """What records programs of a single GPU."""
    kind = HalvesBuilder if precision.kind == "bf16" else ProgramBuilder
    return kind(config, machine, precision)


def record_step(
    config: ModelConfig, B: int, T: int, machine: Machine, precision: Precision, rules: Rules,
    pieces: int = 1,
) -> Recorded:  # fmt: skip
    """The program of a training step, as `ProgramBuilder.build_step` has it, of a single GPU."""
    return program_builder(config, machine, precision).build_step(B, T, rules, pieces)


Page = dict[str, np.ndarray]  # the inputs of a program, in memory of the host


def fill_batch(
    page: Page, config: ModelConfig, tokens: np.ndarray, targets: np.ndarray,
    first: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Write a batch: tokens (B, T), targets (B, T, K), cut into the program's pieces.

    first (B, T): for a program of rows that may hold several texts.
    """
    pieces = sum(name.startswith("tokens") for name in page)
    for i, x in enumerate(slices(range(len(tokens)), pieces)):
        page[f"tokens {i}"][...], page[f"targets {i}"][...] = tokens[x], targets[x]
        if first is not None:
            for own, (low, high) in windows(config, i):
                seen = first_keys(own, tokens.shape[1], first[x])
                page[low][...], page[high][...] = seen, last_of(seen)
        if f"places {i}" in page:
            page[f"places {i}"][...] = np.arange(first.shape[1]) - first[x]


def fill_step(page: Page, scale: np.ndarray, rates: np.ndarray, V: int) -> None:
    """Write what a step wants besides: the loss's scale, the rates, where each token stands."""
    page["scale"][...], page["rates"][...] = scale, rates
    for name in page:
        if name.startswith("plan"):
            tokens = page[name.replace("plan", "tokens")]
            page[name][...] = scatter_plan(tokens.reshape(-1), V)
        if name.startswith("scatter"):
            places = page[name.replace("scatter", "places")]
            page[name][...] = scatter_plan(places.reshape(-1), places.shape[1])
