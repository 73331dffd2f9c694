# Made from book/13a-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-stepper
"""Training steps on a GPU: see `interface.Stepper`. A step is one graph, and nobody waits for it.

Weights, gradients and moments live on the device; `pull` and `push` exchange them with the run's.
Works the same in the emulator. Left out: several devices. B batch, T positions, K predicted tokens.
"""

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.host.device import Device
from nanoeuler.engines.gpu.host.libraries import NUMBER
from nanoeuler.engines.gpu.host.staging import Inbox, Outbox
from nanoeuler.engines.gpu.lang.kernel import Launch
from nanoeuler.engines.gpu.rows import gradient_norm
from nanoeuler.engines.gpu.rows.adamw import from_halves
from nanoeuler.engines.gpu.step import recording
from nanoeuler.engines.gpu.step.matmul import Multiplier
from nanoeuler.engines.gpu.step.precision import BF16, COPIES, LOWER, PRECISIONS, WEIGHTS, Precision
from nanoeuler.engines.gpu.step.program import ARENA, CONSTANTS, Array, bind, constants
from nanoeuler.engines.gpu.step.recording import MOMENTS, Machine, ProgramBuilder, Recorded, Rules
from nanoeuler.engines.interface import Optimizer, Stepper, Taken
from nanoeuler.engines.sharding import slices
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.transformer import head_weights, loss_scale
from nanoeuler.model.weights import Weights


def fields(arrays: dict[str, Array]) -> dict[str, tuple]:
    """The fields of a box for these memories."""
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


class Loaded(NamedTuple):
    """A program on the device. shared: the memories that others may use when it does not run."""

    graph: Any
    inbox: Inbox
    outbox: Outbox
    shared: dict[str, Any]


class CudaStepper(Stepper):
    """Training steps of one model on a device: `engines.gpu.host.device.Device`, or the emulator's.

    `weights` and the `optimizer`'s moments are the run's; without an optimizer there are no moments
    on the device, and `sums` alone can be asked for. pieces: in how many parts a batch goes through
    memory. multiplier: what records products. programs: by what they do and for which batches.
    in_flight: the number and the program of a step whose results nobody has read. UserError for an
    optimizer whose update has no kernel.
    """

    optimizers: tuple[str, ...] = ("AdamW",)  # classes whose update is a kernel: `rows.adamw`
    step_builder: Callable[..., ProgramBuilder] = staticmethod(recording.program_builder)
    sums_builder: Callable[..., ProgramBuilder] = staticmethod(recording.program_builder)

    def __init__(
        self, weights: Weights, optimizer: Optimizer | None, device: Any, *,
        precision: Precision = BF16, pieces: int = 1, multiplier: type[Multiplier] = Multiplier,
    ) -> None:  # fmt: skip
        kind = type(optimizer).__name__
        if optimizer is not None and kind not in self.optimizers:
            raise UserError(
                f"expected the optimizer {' or '.join(self.optimizers)} for training on a GPU, got "
                f"{kind}: choose another optimizer, or the engine cpu"
            )
        self.weights, self.optimizer, self.device = weights, optimizer, device
        self.precision, self.pieces, self.multiplier = precision, pieces, multiplier
        self.programs: dict[tuple, Loaded] = {}
        self.in_flight: tuple[int, Loaded] | None = None
        self.memories: dict[str, Any] = {}
        self.push()

    def builder(self, kind: str) -> ProgramBuilder:
        """What records a "step" or "sums" for this device."""
        *card, l2 = self.device.card
        builds = self.step_builder if kind == "step" else self.sums_builder
        machine = Machine(*card, self.multiplier, l2)
        return builds(self.weights.config, machine, self.precision)

    def moments(self) -> dict[str, np.ndarray]:
        """The optimizer's moments, if there is one."""
        return {name: getattr(self.optimizer, name).flat for name in MOMENTS if self.optimizer}

    def state(self) -> dict[str, np.ndarray]:
        """What the device keeps from step to step, as the run has it now and programs read it."""
        return self.builder("sums").memories(self.weights) | self.moments()

    def push(self) -> None:
        """Bring the device's weights and moments up to date with those of the run."""
        for name, values in self.state().items():
            if name in self.memories:
                self.device.fill(self.memories[name], values)
            elif values.view(np.uint8).any():
                self.memories[name] = self.device.array(values)
            else:  # the moments of a run that begins
                self.memories[name] = self.device.zeros(values.shape, values.dtype)

    def pull(self) -> None:
        """Bring the run's weights and moments up to date with those of the device."""
        names = (COPIES, LOWER) if LOWER in self.memories else (WEIGHTS,)
        parts = [self.device.host(self.memories[name]) for name in names]
        self.weights.flat[...] = from_halves(*parts) if len(parts) == 2 else parts[0]
        for name in MOMENTS:
            getattr(self.optimizer, name).flat[...] = self.device.host(self.memories[name])

    def memory_for(self, name: str, size: int) -> Any:
        """A memory for a program, which may be another's; zero at first, but for the arena."""
        for other in self.programs.values():
            there = other.shared.get(name)
            if there is not None and there.shape[0] >= size:
                return there
        if name == ARENA:  # in which nothing is read that was not written
            return self.device.empty((size,), np.uint8)
        return self.device.zeros((size,), np.uint8)

    def load(self, recorded: Recorded) -> Loaded:
        """Give a recorded program its memory, compile its kernels and make it a graph."""
        program, device = recorded.program, self.device
        inbox, outbox = (Box(device, fields(ends)) for Box, ends in (
            (Inbox, recorded.inputs), (Outbox, recorded.results)))  # fmt: skip
        device.fill(outbox.parts["sums"], 0)
        own = {CONSTANTS: device.array(constants(program)), **inbox.parts, **outbox.parts}
        shared = {
            name: self.memory_for(name, size)
            for name, size in program.sizes.items()
            if name not in {**own, **self.memories} and size
        }
        memories = {**self.memories, **own, **shared}

        def part(memory: str, address: int, *rest: Any) -> Any:
            return device.part(memories[memory], address, *rest)

        works = bind(program, part)
        device.load_all(work.kernel for work in works if isinstance(work, Launch))
        starts = [
            device.prepare(work) if isinstance(work, Launch) else work.prepare(device)
            for work in works
        ]
        return Loaded(device.capture(starts), inbox, outbox, shared)

    def program_for(
        self, kind: str, B: int, T: int, pieces: int = 1, packed: bool = False
    ) -> Loaded:
        """The program of a "step" or of "sums" on B sequences; recorded when first asked for.

        packed: of rows that may hold several texts.
        """
        key = kind, B, T, packed
        if key not in self.programs:
            builder = self.builder(kind)
            if kind == "step":
                rules = Rules(*(getattr(self.optimizer, name) for name in Rules._fields))
                recorded = builder.build_step(B, T, rules, pieces, packed)
            else:
                recorded = builder.build_sums(B, T, packed)
            self.programs[key] = self.load(recorded)
        return self.programs[key]

    def launch(self, this: Loaded) -> None:
        """Send the inbox, launch, have the results fetched; wait for nothing."""
        this.inbox.send()
        this.graph.launch()
        this.outbox.fetch()

    def sums(
        self, tokens: np.ndarray, targets: np.ndarray, first: np.ndarray | None = None
    ) -> np.ndarray:
        """The float64 sums (K,) of -log p in nats over the targets (B, T, K) of tokens (B, T).

        first (B, T): where texts begin in packed rows. In as many parts as a step's batch.
        """
        total = np.zeros(self.weights.config.n_predict)
        for part in slices(range(len(tokens)), self.pieces):
            begins = None if first is None else first[part]
            total += self.sums_at_once(tokens[part], targets[part], begins)
        return total

    def sums_at_once(
        self, tokens: np.ndarray, targets: np.ndarray, first: np.ndarray | None
    ) -> np.ndarray:
        """`sums` of a part of a batch.

        A part with fewer sequences than one before is filled up with targets that do not count, so
        that no new program is recorded.
        """
        (B, T), K, packed = tokens.shape, self.weights.config.n_predict, first is not None
        rest = "sums", T, packed
        most = max([B, *(b for kind, b, t, of in self.programs if (kind, t, of) == rest)])
        tokens = np.concatenate([tokens, np.zeros((most - B, T), tokens.dtype)])
        targets = np.concatenate([targets, np.full((most - B, T, K), IGNORE, targets.dtype)])
        if first is not None:
            first = np.concatenate([first, np.zeros((most - B, T), first.dtype)])
        this = self.program_for("sums", most, T, packed=packed)
        recording.fill_batch(this.inbox.page(), self.weights.config, tokens, targets, first)
        self.launch(this)
        return this.outbox.read()["sums"][0, :K].astype(np.float64)

    def finish(self) -> list[Taken]:
        if self.in_flight is None:
            return []
        (number, this), self.in_flight = self.in_flight, None
        results = this.outbox.read()
        sums = results["sums"][:, : self.weights.config.n_predict]
        norm = float(results["decision"][5])  # its fields: `gradient_norm.decide`
        return [Taken(number, sums.sum(axis=0, dtype=np.float64), norm)]

    def step(
        self, tokens: np.ndarray, targets: np.ndarray, lr: float, number: int,
        first: np.ndarray | None = None,
    ) -> list[Taken]:  # fmt: skip
        """Begin step `number` on tokens (B, T), targets (B, T, K), integers, at learning rate lr.

        first (B, T): where texts begin in packed rows. Returns the step before, since the device
        works one ahead; a step with a loss or gradient that is not finite changes nothing.
        """
        scale = loss_scale(targets, head_weights(self.weights.config.n_predict))
        return self.step_scaled(tokens, targets, scale, lr, number, first)

    def step_scaled(
        self, tokens: np.ndarray, targets: np.ndarray, scale: np.ndarray, lr: float, number: int,
        first: np.ndarray | None = None,
    ) -> list[Taken]:  # fmt: skip
        """The same with the scale (K,) of each predicted token's loss: see `loss_scale`."""
        config, rules = self.weights.config, self.optimizer
        this = self.program_for("step", *tokens.shape, self.pieces, first is not None)
        page = this.inbox.page()
        how = rules.beta1, rules.beta2, rules.weight_decay
        rates = gradient_norm.schedule([lr], *how, first=number)
        recording.fill_batch(page, config, tokens, targets, first)
        recording.fill_step(page, scale, rates, config.vocab_size)
        self.launch(this)
        taken, self.in_flight = self.finish(), (number, this)
        return taken


# %% sec-step-stepper
CHOICE = "nanoeuler.engines.gpu.step.backends"  # named only: appendix N builds it
MUON = "nanoeuler.engines.gpu.step.muon"  # the same: chapter 13b


@cache
def gpu() -> Device:
    """The GPU of this process, the first if nothing is said: kernels are compiled for it once."""
    said = os.environ.get(NUMBER) or "0"
    if not said.isdecimal():
        raise UserError(f"expected the number of a GPU in {NUMBER}, as 0 or 1, got {said!r}")
    return Device(int(said))


def cuda_stepper(
    engine: str, weights: Weights, optimizer: Optimizer | None, pieces: int = 1,
    recompute: bool = False,
) -> CudaStepper:  # fmt: skip
    """A stepper on the GPU, for one of `registry.GPU_ENGINES`; recompute: as in `Precision`."""
    multiplier = import_module(CHOICE).multiplier()
    of_muon = type(optimizer).__name__ == "Muon"
    kind = import_module(MUON).MuonStepper if of_muon else CudaStepper
    return kind(
        weights, optimizer, gpu(), pieces=pieces, multiplier=multiplier,
        precision=PRECISIONS[engine]._replace(recompute=recompute),
    )  # fmt: skip
