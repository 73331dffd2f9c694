# Made from book/19d-lora.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-lora-gpu-step
"""Training steps on a GPU in which adapters alone learn: see model/lora.py.

Weights are merged at the beginning of a program; then forward and backward are those of all
weights, without a gradient of any. Left out: several GPUs, and products of float32.

I and O the inputs and outputs of a linear map, N rows of a batch, r the rank, P the rank padded.
"""

import math
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.gemm import low_rank
from nanoeuler.engines.gpu.gemm.float32 import eights
from nanoeuler.engines.gpu.gemm.low_rank import Part
from nanoeuler.engines.gpu.lang.bf16 import to_bf16
from nanoeuler.engines.gpu.rows import adamw
from nanoeuler.engines.gpu.rows.lora_merge import Place, merge_launch, merge_tiles
from nanoeuler.engines.gpu.step.engine import CudaEngine, PackedRows, rows_of
from nanoeuler.engines.gpu.step.matmul import Epilogue
from nanoeuler.engines.gpu.step.precision import BF16, COPIES, WEIGHTS, Precision
from nanoeuler.engines.gpu.step.program import Array
from nanoeuler.engines.gpu.step.recording import (
    GRADIENTS,
    MOMENTS,
    Machine,
    ProgramBuilder,
    Recorded,
    Rules,
)
from nanoeuler.engines.gpu.step.stepper import CHOICE, CudaStepper, gpu
from nanoeuler.engines.interface import Optimizer, Taken
from nanoeuler.engines.sharding import slices
from nanoeuler.model.config import ModelConfig, parameter_shapes
from nanoeuler.model.lora import AdaptedWeights, Adapters, Lora, LowRank, adapted
from nanoeuler.model.weights import PADDING, Block, Weights


class Group(NamedTuple):
    """The adapters of one matrix in a flat buffer, by the columns they belong to."""

    columns: tuple[slice, ...]
    A: Any               # (n P, I): the transposed ones of n adapters below each other
    B: tuple[Any, ...]   # n times (P, columns)


class Learned(NamedTuple):
    """In the place of a matrix's gradient: its adapters' bf16 copies, and their gradients."""

    copies: Any                     # (size,), as their Parts say
    gradients: Any                  # (size,), float32
    parts: tuple[Part, ...]
    narrow: low_rank.Narrow | None  # None: they have more rows than the kernels for few


# Memories: A and B of all adapters as `Packing` lays them, float32, and their bf16 copy.
ADAPTERS, ADAPTER_COPIES = "adapters", "adapter copies"


class Packing:
    """How adapters lie on a device: by matrices, all with the rank first, ranks padded by zeros.

    size: elements of the flat buffer. names: the adapters of each tensor that has some.
    """

    def __init__(self, config: ModelConfig, lora: Lora) -> None:
        self.config, self.lora, self.shapes = config, lora, parameter_shapes(config)
        self.rank = eights(lora.rank)
        self.names: dict[str, list[tuple[str, slice]]] = {}
        for name, tensor, columns in adapted(config, lora):
            self.names.setdefault(tensor, []).append((name, columns))
        self.starts: dict[str, int] = {}
        self.size = 0
        for tensor, adapters in self.names.items():
            for name in (tensor, *(name for name, _ in adapters)):
                self.starts[name] = self.size
                count = self.rank * self.extent(tensor, name)
                self.size += -(-count // PADDING) * PADDING

    def extent(self, tensor: str, name: str) -> int:
        """The columns of P elements: of all A of a tensor, or of the B of an adapter."""
        if name == tensor:
            return self.shapes[tensor][0] * len(self.names[tensor])
        columns = dict(self.names[tensor])[name]
        return columns.stop - columns.start

    def groups(self, flat: Any) -> dict[str, Group]:
        """The adapters of each tensor in a flat buffer (size,), an array of any kind."""
        made, P = {}, self.rank
        for tensor, adapters in self.names.items():
            def part(name: str, shape: tuple[int, int], tensor: str = tensor) -> Any:
                start = self.starts[name]
                return flat[start : start + P * self.extent(tensor, name)].reshape(*shape)

            A = part(tensor, (P * len(adapters), self.shapes[tensor][0]))
            B = (part(name, (P, x.stop - x.start)) for name, x in adapters)
            made[tensor] = Group(tuple(x for _, x in adapters), A, tuple(B))
        return made

    def each(self, flat: np.ndarray, adapters: Adapters) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(what lies in flat, the same of the run's adapters), of every A and B, as views."""
        r, P = self.lora.rank, self.rank
        for tensor, group in self.groups(flat).items():
            for i, (name, _) in enumerate(self.names[tensor]):
                yield group.A[i * P : i * P + r], adapters[f"{name}.A"].T
                yield group.B[i][:r], adapters[f"{name}.B"]

    def pack(self, adapters: Adapters) -> np.ndarray:
        """The flat buffer (size,) of adapters, or of moments, float32."""
        flat = np.zeros(self.size, np.float32)
        for here, there in self.each(flat, adapters):
            here[...] = there
        return flat

    def unpack(self, flat: np.ndarray, adapters: Adapters) -> None:
        """Write a flat buffer into adapters, or into moments."""
        for here, there in self.each(flat, adapters):
            there[...] = here

    def places(self, weights: Weights) -> list[Place]:
        """What is merged, for a launch."""
        made, P = [], self.rank
        for tensor, adapters in self.names.items():
            rows, pitch = self.shapes[tensor]
            for i, (name, columns) in enumerate(adapters):
                wide = columns.stop - columns.start
                made.append(Place(
                    weights.starts[tensor] + columns.start, pitch, rows, wide,
                    self.starts[tensor] + i * P * rows, rows, self.starts[name], wide,
                ))  # fmt: skip
        return made

    def span(self, tensor: str) -> slice:
        """Where a tensor's adapters lie in the flat buffer."""
        last = self.names[tensor][-1][0]
        start, end = self.starts[tensor], self.starts[last] + self.rank * self.extent(tensor, last)
        return slice(start, end)

    def parts(self, tensor: str) -> tuple[Part, ...]:
        """The products of a tensor's adapters, in the arrays that begin where its span does.

        All A are one part, or several of MOST rows at most, or one each.
        """
        adapters, P, inputs = self.names[tensor], self.rank, self.shapes[tensor][0]
        n, made, few = len(adapters), [], max(1, low_rank.MOST // P)
        for i in range(0, n, few):
            rows = min(few, n - i) * P
            made.append(Part(0, 0, inputs, i * P * inputs, inputs, rows, i * P, (n + i) * P))
        for i, (name, columns) in enumerate(adapters):
            wide, start = columns.stop - columns.start, self.starts[name] - self.starts[tensor]
            made.append(Part(1, columns.start, wide, start, wide, P, (n + i) * P, i * P))
        return tuple(made)


# %% sec-lora-gpu-step
class LoraGradients:
    """What a backward pass takes for gradients, where adapters learn: None for a vector."""

    def __init__(self, config: ModelConfig, learned: dict[str, Learned]) -> None:
        self.found: dict[str, Any] = {
            name: None if len(shape) == 1 else learned.get(name, LowRank())
            for name, shape in parameter_shapes(config).items()
        }
        self.blocks = [Block(*(self.get(f"block.{i}.{name}") for name in Block._fields))
                       for i in range(config.n_blocks)]  # fmt: skip

    def __getitem__(self, name: str) -> Any:
        return self.found[name]

    def get(self, name: str) -> Any:
        """The same; None for a tensor that the model lacks."""
        return self.found.get(name)


class LoraEngine(CudaEngine):
    """`CudaEngine` where a matrix's gradient is `Learned`, or none at all, and a vector's None."""

    wide = math.inf  # norms' outputs are kept: without AdamW's moments there is memory for them

    def weight_gradient(self, dw: Any, x: Array, dy: Array, name: str) -> None:
        """dA and dB of each adapter of a matrix, N rows at a time. Eq. eq-lora-backward.

        The scale is already in dy: see `LoraStepper.step_scaled`.
        """
        if not isinstance(dw, Learned):
            return
        wide = rows_of(x), dy if len(dy.shape) == 2 else rows_of(dy)
        h = self.take(sum(part.rows for part in dw.parts), eights(wide[0].shape[0]))
        (self.by_few_rows if dw.narrow else self.by_tiles)(dw, wide, h, name)

    def by_few_rows(self, dw: Learned, wide: tuple[Array, Array], h: Array, name: str) -> None:
        """`weight_gradient` by the kernels for few rows: wide x and dy, h (rows, N padded)."""
        how, lines, multiprocessors = dw.narrow, wide[0].shape[0], self.multiprocessors
        assert how is not None
        flops = 2 * lines * how.size
        work: Any = low_rank.across_launch(how, dw.copies, wide, h)
        self.recording.add(f"{name}, x A and dy B", work, flops)
        shape = low_rank.space_of(how, lines, multiprocessors)
        space = self.take(*shape, kind="float32") if shape[0] else None
        add = self.ending(dw.gradients) == "add"
        work = low_rank.down_launches(how, h, wide, dw.gradients, space, multiprocessors, add)
        self.recording.add(f"{name}, dA and dB", work, flops)

    def by_tiles(self, dw: Learned, wide: tuple[Array, Array], h: Array, name: str) -> None:
        """The same by products of any size, part by part."""
        lines = wide[0].shape[0]

        def matrices(part: Part) -> tuple[Array, Array, Array]:
            """W, G and X."""
            span = slice(part.start, part.start + part.rows * part.pitch)
            W, G = (x[span].reshape(part.rows, part.pitch) for x in (dw.copies, dw.gradients))
            return W, G, wide[part.wide][:, part.column : part.column + part.columns]

        for part in dw.parts:
            W, _, X = matrices(part)
            y = h[part.own : part.own + part.rows, :lines]
            self.matmul(f"{name}, {('x A', 'dy B')[part.wide]}", W, X.T, y)
        for part in dw.parts:
            _, G, X = matrices(part)
            y = h[part.other : part.other + part.rows, :lines]
            self.matmul(f"{name}, {('dA', 'dB')[part.wide]}", y, X, G, Epilogue(self.ending(G)))

    def norm_backward(
        self, norm: str, given: tuple, dgain: Array | None, dbias: Array | None = None,
        dx: Array | None = None,
    ) -> Array:  # fmt: skip
        """dx (B, T, C) from given (dn, x, stats, gain); the gain is frozen, and stands for dgain.

        dx: an array to which it is added; None: a new one. Nothing is added to dgain and dbias.
        """
        return CudaEngine.norm_backward(self, norm, given, given[3], dbias, dx)

    def head_norm_backward(
        self, config: ModelConfig, b: Block, db: Block, dheads: Array, raw: Array
    ) -> None:
        """From the gradient after QK-norm and RoPE to that before, in place; gains are frozen."""
        CudaEngine.head_norm_backward(self, config, b, b, dheads, raw)

    def defer_sums(self, count: int, outs: list[Array]) -> Array:
        """Memory for partial sums of gains, which nobody adds up."""
        return self.take(count, outs[0].shape[0] * len(outs), kind="float32")

    def enter_backward(
        self, config: ModelConfig, dw: Any, tokens: Array, dx: Array,
        first: PackedRows | None = None,
    ) -> None:  # fmt: skip
        """Nothing learns below the first layer: the norm's backward that is pending is left out."""
        self.pending = None


# %% sec-lora-gpu-step
class LoraBuilder(ProgramBuilder):
    """Records programs of a model with adapters, on frozen weights whose bf16 copy is merged."""

    engine_type = LoraEngine

    def __init__(
        self, lora: Lora, config: ModelConfig, machine: Machine, precision: Precision
    ) -> None:
        super().__init__(config, machine, precision)
        self.packing = Packing(config, lora)
        self.adapters, self.adapter_copies = (
            self.recording.whole(name, (self.packing.size,), kind)
            for name, kind in ((ADAPTERS, np.float32), (ADAPTER_COPIES, np.uint16))
        )

    def merge(self) -> None:
        """W' = W + s A B, in bf16, of all adapters."""
        packing, flat = self.packing, self.weights.flat
        sizes = packing.rank, flat.shape[0], packing.size
        table = self.recording.constant(merge_tiles(packing.places(self.weights), *sizes))
        given = table, flat, self.adapters, self.copies, packing.lora.scale, packing.rank
        self.recording.add("merge", merge_launch(*given))

    def scatter_plan(self, i: int, tokens: Array) -> None:
        """None: the embedding is frozen."""

    def packed_rows(self, i: int, B: int, T: int, back: bool) -> PackedRows:
        """The texts in rows (B, T) of piece i; without a scatter plan: positions are frozen."""
        return super().packed_rows(i, B, T, False)

    def build_sums(self, B: int, T: int, packed: bool = False) -> Recorded:
        """The losses' sums of the merged model, B sequences of T; packed: of several texts each."""
        self.merge()
        return super().build_sums(B, T, packed)

    def learned(self, gradients: Array) -> dict[str, Learned]:
        """What learns of each tensor that has adapters, with gradients in a flat buffer."""
        packing, made = self.packing, {}
        for tensor in packing.names:
            span, parts, narrow = packing.span(tensor), packing.parts(tensor), None
            if packing.rank <= low_rank.MOST:
                inputs, outputs = packing.shapes[tensor]
                narrow = low_rank.plan_narrow(parts, span.stop - span.start, (inputs, outputs))
                tables = (self.recording.constant(table) for table in narrow[:2])
                narrow = low_rank.Narrow(*tables, *narrow[2:])
            made[tensor] = Learned(self.adapter_copies[span], gradients[span], parts, narrow)
        return made

    def build_step(
        self, B: int, T: int, rules: Rules, pieces: int = 1, packed: bool = False
    ) -> Recorded:
        """A training step of the adapters alone on B sequences of T, in so many pieces.

        Nothing is cleared: each gradient is stored before it is added to, and padding stays zero.
        """
        packing, recording = self.packing, self.recording
        self.merge()
        flat, *moments = (recording.whole(name, (packing.size,), np.float32)
                          for name in (GRADIENTS, *MOMENTS))  # fmt: skip
        gradients = LoraGradients(self.config, self.learned(flat))
        losses = self.passes(gradients, slices(range(B), pieces), T, packed)
        buffers = adamw.Buffers(self.adapters, flat, *moments, self.adapter_copies)
        tiles = adamw.tiles([adamw.Segment(0, packing.size, True, 0)])
        self.descend(tiles, buffers, losses, rules)
        return Recorded(recording.end(), self.inputs, self.results)


# %% sec-lora-gpu-step
LOW = 0xFFFF  # the bits of a float32 that bf16 lacks


def spread(base: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """float32 of any shape, of which those that are bf16 get low bits that round to the same bf16.

    Any of them could have been the weight before it was rounded. With them, a small change of many
    weights isn't rounded away in all: it moves as many to the next bf16 as it is large.
    """
    bits = np.ascontiguousarray(base).view(np.uint32).copy()
    drawn = rng.integers(-LOW // 2 + 1, LOW // 2, bits.shape, np.int32, endpoint=True)
    short = (bits & LOW == 0) & (base != 0) & np.isfinite(base)
    return np.where(short, bits + drawn.view(np.uint32), bits).view(np.float32)


class LoraStepper(CudaStepper):
    """Training steps of the adapters of one model on a device. The weights are sent once."""

    optimizers = ("LoraAdamW",)
    weights: AdaptedWeights

    def __init__(
        self, weights: AdaptedWeights, optimizer: Optimizer | None, device: Any, **how: Any
    ) -> None:
        self.packing = Packing(weights.config, weights.lora)
        self.step_builder = self.sums_builder = partial(LoraBuilder, weights.lora)
        super().__init__(weights, optimizer, device, **how)

    def base(self) -> np.ndarray:
        """The frozen weights (N,), those that are merged with low bits: see `spread`."""
        flat, rng = self.weights.flat.copy(), np.random.default_rng(0)
        views = Weights(self.weights.config, flat=flat)
        places = adapted(self.weights.config, self.weights.lora)
        for (_, tensor, columns), base in zip(places, self.weights.base, strict=True):
            views[tensor][:, columns] = spread(base, rng)
        return flat

    def state(self) -> dict[str, np.ndarray]:
        """What the device keeps: adapters, their bf16 copy, moments; once the frozen weights."""
        flat = self.packing.pack(self.weights.adapters)
        arrays = {ADAPTERS: flat, ADAPTER_COPIES: to_bf16(flat)}
        for name in MOMENTS if self.optimizer else ():
            arrays[name] = self.packing.pack(getattr(self.optimizer, name))
        if WEIGHTS not in self.memories:
            arrays[WEIGHTS] = self.base()
            arrays[COPIES] = to_bf16(arrays[WEIGHTS])
        return arrays

    def pull(self) -> None:
        """Bring the run's adapters and moments up to date with the device's, and merge them."""
        kept = {ADAPTERS: self.weights.adapters}
        kept |= {name: getattr(self.optimizer, name) for name in MOMENTS}
        for name, adapters in kept.items():
            self.packing.unpack(self.device.host(self.memories[name]), adapters)
        self.weights.merge()

    def step_scaled(
        self, tokens: np.ndarray, targets: np.ndarray, scale: np.ndarray, lr: float, number: int,
        first: np.ndarray | None = None,
    ) -> list[Taken]:  # fmt: skip
        """Begin step `number` at rate lr, alpha / r in the loss's scale (K,); the step before.

        All gradients of the step are those of A and B, and each has that factor once.
        """
        scale = scale * self.weights.lora.scale
        return CudaStepper.step_scaled(self, tokens, targets, scale, lr, number, first)


# %% sec-lora-gpu-step
def record_lora_step(
    lora: Lora, config: ModelConfig, B: int, T: int, machine: Machine, precision: Precision,
    *rest: Any,
) -> Recorded:  # fmt: skip
    """The program of a training step of adapters alone, on B sequences of T positions.

    lora: settled. rest: the optimizer's rules, and in how many pieces a batch goes through memory.
    """
    return LoraBuilder(lora, config, machine, precision).build_step(B, T, *rest)


def lora_stepper(
    weights: AdaptedWeights, optimizer: Optimizer | None, pieces: int = 1, recompute: bool = False
) -> LoraStepper:
    """A stepper on the GPU for weights with adapters; recompute: as in `Precision`."""
    multiplier, precision = import_module(CHOICE).multiplier(), BF16._replace(recompute=recompute)
    return LoraStepper(weights, optimizer, gpu(), precision=precision, pieces=pieces,
                       multiplier=multiplier)  # fmt: skip
