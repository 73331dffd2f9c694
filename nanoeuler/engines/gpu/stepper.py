# Made from book/09b-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-stepper
"""Training steps on a GPU: see `interface.Stepper`. A step is one graph, and nobody waits for it.

Weights, gradients and moments live on the device; `pull` and `push` exchange them with the run's.
Works the same on paper. Left out: several devices.

B batch, T positions, K predicted tokens.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu import norm
from nanoeuler.engines.gpu.device import Device
from nanoeuler.engines.gpu.primitives import BF16, COPIES, PRECISIONS, WEIGHTS, Precision
from nanoeuler.engines.gpu.program import ARENA, CONSTANTS, bind, constants
from nanoeuler.engines.gpu.step import (
    INPUTS,
    MOMENTS,
    RESULTS,
    Machine,
    Recorded,
    fill_batch,
    fill_step,
    host_view,
    record_step,
    record_sums,
)
from nanoeuler.engines.interface import Optimizer, Stepper, Taken
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.transformer import head_weights, loss_scale
from nanoeuler.model.weights import Weights

OWN = INPUTS, RESULTS, CONSTANTS  # memories that each program has for itself


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 (N,) rounded to bf16, nearest even, as uint16: what AdamW's kernel makes of them."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Loaded(NamedTuple):
    """A program on the device: its ends, its own memories, its graph, two pages for each way."""

    recorded: Recorded
    memories: dict[str, Any]
    graph: Any
    inbox: tuple[np.ndarray, np.ndarray]
    outbox: tuple[np.ndarray, np.ndarray]


class Resident:
    """A model on a device: its weights and moments there, and the programs that work on them.

    `weights` and the `optimizer`'s moments are the run's; pieces: in how many parts a batch goes
    through memory.
    """

    def __init__(
        self, weights: Weights, optimizer: Optimizer, device: Any, *,
        precision: Precision = BF16, pieces: int = 1,
    ) -> None:  # fmt: skip
        self.weights, self.optimizer, self.device = weights, optimizer, device
        self.precision, self.pieces = precision, pieces
        self.machine = Machine(tuple(device.capability), device.multiprocessors)
        self.memories: dict[str, Any] = {}
        self.programs: dict[tuple, Loaded] = {}
        self.push()

    def push(self) -> None:
        """Bring the device's weights and moments up to date with those of the run."""
        flat = self.weights.flat
        arrays = {WEIGHTS: flat, COPIES: to_bf16(flat) if self._copied else np.zeros(16, np.uint16)}
        arrays |= {name: getattr(self.optimizer, name).flat for name in MOMENTS}
        for name, values in arrays.items():
            if name in self.memories:
                self.device.fill(self.memories[name], values)
            else:
                self.memories[name] = self.device.array(values)

    def pull(self) -> None:
        """Bring the run's weights and moments up to date with those of the device."""
        self.weights.flat[...] = self.device.host(self.memories[WEIGHTS])
        for name in MOMENTS:
            getattr(self.optimizer, name).flat[...] = self.device.host(self.memories[name])

    @property
    def _copied(self) -> bool:
        return self.precision.kind == "bf16"

    def load(self, recorded: Recorded) -> Loaded:
        """Give a recorded program its memory, compile its kernels and make it a graph."""
        program, device, sizes = recorded.program, self.device, recorded.program.sizes
        own = {CONSTANTS: device.array(constants(program))}
        own[RESULTS] = device.array(np.zeros(sizes[RESULTS], np.uint8))
        own[INPUTS] = device.empty((sizes[INPUTS],), np.uint8)
        for name, size in sizes.items():
            if name not in (*self.memories, *OWN):
                own[name] = self._shared(name, size)

        def part(memory: str, address: int, *rest: Any) -> Any:
            whole = own[memory] if memory in own else self.memories[memory]
            return device.part(whole, address, *rest)

        starts = [device.prepare(launch) for launch in bind(program, part)]
        inbox = device.page(sizes[INPUTS]), device.page(sizes[INPUTS])
        outbox = device.page(sizes[RESULTS]), device.page(sizes[RESULTS])
        return Loaded(recorded, own, device.capture(starts), inbox, outbox)

    def _shared(self, name: str, size: int) -> Any:
        """A memory that programs share, as they run one after another; zero at first."""
        for other in self.programs.values():
            there = other.memories.get(name)
            if there is not None and there.shape[0] >= size:
                return there
        if name == ARENA:  # which holds nothing that was not written before it is read
            return self.device.empty((size,), np.uint8)
        return self.device.array(np.zeros(size, np.uint8))

    def step_program(self, B: int, T: int) -> Loaded:
        """The program of a training step on such a batch; recorded when it is first asked for."""
        key = "step", B, T
        if key not in self.programs:
            config = self.weights.config
            recorded = record_step(
                config, B, T, self.machine, self.precision, self.optimizer, self.pieces
            )
            self.programs[key] = self.load(recorded)
        return self.programs[key]

    def sums_program(self, B: int, T: int) -> Loaded:
        """The program for batches of B sequences, or the one for more of them that is there."""
        for kind, rows, length in self.programs:
            if kind == "sums" and rows >= B and length == T:
                return self.programs[kind, rows, length]
        recorded = record_sums(self.weights.config, B, T, self.machine, self.precision)
        return self.programs.setdefault(("sums", B, T), self.load(recorded))


class CudaStepper(Resident, Stepper):
    """Training steps of one model on a device: `engines.gpu.device.Device`, or one on paper."""

    begun: tuple | None = None  # the step that is not known yet: number, program, outbox, wait

    def step(self, tokens: np.ndarray, targets: np.ndarray, lr: float, number: int) -> list[Taken]:
        """As `Stepper.step`: begins this step, and returns the one before."""
        this, config, rules = self.step_program(*tokens.shape), self.weights.config, self.optimizer
        page, outbox = this.inbox[number % 2], this.outbox[number % 2]
        scale = loss_scale(targets, head_weights(config.n_predict))
        fill_batch(page, this.recorded, tokens, targets)
        rates = norm.schedule([lr], rules.beta1, rules.beta2, rules.weight_decay, first=number)
        fill_step(page, this.recorded, tokens, scale, rates, config.vocab_size)
        wait = self._run(this, page, outbox)
        taken = self.finish()
        self.begun = number, this, outbox, wait
        return taken

    def finish(self) -> list[Taken]:
        """As `Stepper.finish`."""
        if self.begun is None:
            return []
        (number, this, outbox, wait), self.begun = self.begun, None
        wait()
        results = this.recorded.results
        sums = host_view(outbox, results.sums)[:, : self.weights.config.n_predict]
        norm_of_all = host_view(outbox, results.decision)[5]
        return [Taken(number, sums.sum(axis=0, dtype=np.float64), float(norm_of_all))]

    def sums(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """As `Stepper.sums`."""
        (B, T), K = tokens.shape, self.weights.config.n_predict
        this = self.sums_program(B, T)
        rows = this.recorded.inputs.tokens.shape[0]
        tokens = np.concatenate([tokens, np.zeros((rows - B, T), tokens.dtype)])
        targets = np.concatenate([targets, np.full((rows - B, T, K), IGNORE, targets.dtype)])
        page, outbox = this.inbox[0], this.outbox[0]
        fill_batch(page, this.recorded, tokens, targets)
        self._run(this, page, outbox)()
        return host_view(outbox, this.recorded.results.sums)[0, :K].astype(np.float64)

    def _run(self, this: Loaded, page: np.ndarray, outbox: np.ndarray) -> Any:
        """Send a page, launch the graph, fetch its results; a function that waits for them."""
        self.device.send(this.memories[INPUTS], page)
        this.graph.launch()
        self.device.fetch(outbox, this.memories[RESULTS])
        return self.device.mark()


@cache
def gpu() -> Device:
    """The GPU of this process: kernels are compiled for it once."""
    return Device()


def cuda_stepper(
    engine: str, weights: Weights, optimizer: Optimizer, pieces: int = 1
) -> CudaStepper:
    """A stepper on the GPU, for one of `choice.GPU_ENGINES`."""
    return CudaStepper(weights, optimizer, gpu(), precision=PRECISIONS[engine], pieces=pieces)
