# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-run
"""Running a launch: its blocks, the faults that they show, and a Report of the run."""

import functools
import importlib
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np

from nanoeuler.emulator import dtypes
from nanoeuler.emulator import lockstep as teams
from nanoeuler.emulator.arrays import Log
from nanoeuler.emulator.cuda import Cuda
from nanoeuler.emulator.machine import (
    GROUP,
    HERE,
    MOST_THREADS,
    WARP,
    Block,
    Machine,
    Place,
    Span,
    Thread,
    close,
)
from nanoeuler.emulator.machine import getcurrent as current
from nanoeuler.emulator.memory import MOST, Global
from nanoeuler.emulator.shadow import GlobalState
from nanoeuler.emulator.vector_clocks import Clock
from nanoeuler.engines.gpu.lang import instruction
from nanoeuler.engines.gpu.lang.instruction import Instruction, Name, Operand, rebind
from nanoeuler.engines.gpu.lang.kernel import Launch, Map
from nanoeuler.errors import UserError


def places(size: Place) -> list[Place]:
    """All places of a block or a grid of this size, x first."""
    return [Place(x, y, z) for z, y, x in itertools.product(*map(range, reversed(size)))]


@dataclass
class Report:
    """A run of a launch. counts: by name; ticks: turns that were taken; spans: what took time;
    history: (turn, the watched words' states), noted at stores, copies and products; team: how many
    threads ran in lockstep.
    """

    counts: dict[str, int]
    ticks: int
    spans: list[Span] = field(default_factory=list, repr=False)
    history: list[tuple[int, np.ndarray]] = field(default_factory=list, repr=False)
    team: int = 1

    def __getitem__(self, name: str) -> int:
        return self.counts.get(name, 0)


def run(
    launch: Launch,
    seed: int | None = None,
    fresh: Iterable[np.ndarray] | dict[int, np.ndarray] = (),
    watch: tuple[int, int] | None = None,
    past: Mapping[int, int] = MappingProxyType({}),
    abreast: bool = True,
) -> Report:
    """Run a launch in the emulator; its arrays are NumPy arrays and hold the results afterwards.

    seed: an order of blocks, warps and copies; without one, they go in order and copies are late.
    fresh: arrays of the launch that count as not written, so that reading them is a Fault; or, by
    the id of an array, which of its elements (size,) count so, which is brought up to date.
    watch: from which byte to which of block 0's shared memory the report keeps a history of states.
    past: by the id of an array, how many bytes behind a multiple of 256 it begins; 0 for others.
    abreast: whether threads may run in lockstep where that shows nothing wrong; else one by one.
    """
    arrays = [a.array if isinstance(a, Map) else a for a in launch.args]
    arrays = [array for array in arrays if isinstance(array, np.ndarray)]
    if not isinstance(fresh, dict):
        fresh = {id(array): np.ones(array.size, bool) for array in fresh}
    arrays += fresh.values()
    if abreast and watch is None:
        report = tried(launch, seed, fresh, past, arrays)
        if report:
            return report
    return Run(launch, seed, fresh, watch, past).play()


def tried(
    launch: Launch, seed: int | None, fresh: dict, past: Mapping, arrays: list[np.ndarray]
) -> Report | None:
    """The report of a run in teams; None, and the arrays as they were, if there cannot be one."""
    uses = instructions(launch.kernel.function)
    before = [(array, array.copy()) for array in arrays if array.flags.writeable]
    for size in sizes(uses, seed):
        try:
            return Together(launch, seed, fresh, past, size, bool(uses)).play()
        except TimeoutError:  # somebody has set a limit
            raise
        except Exception:  # whatever it is, it has to show again when threads run one by one
            for array, copy in before:
                array[...] = copy
    return None


def sizes(uses: set[Instruction], seed: int | None) -> tuple[int, ...]:
    """How many threads to try in a team: all of a block, or fewer where some wait for others.

    A seed is for the order of warps, so they are teams of their own.
    """
    text = " ".join(instruction.text for instruction in uses)
    if seed is not None:
        return (WARP,)
    return (GROUP, WARP) if "wgmma" in text or "mbarrier" in text else (MOST_THREADS, WARP)


def instructions(function: FunctionType) -> set[Instruction]:
    """The PTX instructions that a kernel and its helpers use."""
    met = set()
    rebind(function, lambda value: met.add(value) if isinstance(value, Instruction) else value)
    return met


def argument(memory: Global, operand: Operand, value: Any, together: bool) -> Any:
    """An argument as the kernel gets it; of an array that it indexes, the array and its state."""
    if isinstance(value, Map):
        return memory.map_address(value)
    if isinstance(value, np.ndarray):
        address = memory.address(value)
        if not operand.axes:
            return address
        if not value.flags.c_contiguous:
            raise UserError(f"an array of shape {value.shape} that a kernel indexes is to be dense")
        return value, GlobalState(address, value, memory.fresh.get(id(value)), together)
    return dtypes.float32(value) if operand.letter == "f" else value


class Run:
    """One run of a launch, thread by thread: its machine, memory and arguments."""

    size = 1  # threads of a team
    # The objects behind the names of a kernel: for `cuda`, which looks up who is running, for the
    # types, and the module that translates instructions.
    cuda: Any = Cuda()
    types, ptx = vars(dtypes), "ptx_parser"

    def __init__(
        self, launch: Launch, seed: int | None, fresh: dict, watch: tuple | None, past: Mapping
    ):
        kernel = launch.kernel
        self.launch = launch
        self.machine = machine = Machine(seed)
        machine.watch = watch
        shape = kernel.block
        if not 1 <= np.prod(shape) <= MOST_THREADS or kernel.shared > MOST:
            raise UserError(
                f"a block has at most {MOST_THREADS} threads and {MOST} bytes of shared memory, "
                f"not {shape} and {kernel.shared}"
            )
        machine.gridDim, machine.blockDim = (
            Place(*(*size, 1, 1)[:3]) for size in (launch.grid, shape)
        )
        machine.shared = kernel.shared
        self.memory = machine.memory = Global(fresh, past)
        self.names = kernel.names()
        self.args = [
            argument(self.memory, operand, value, kernel.together)
            for operand, value in zip(kernel.parameters, launch.args, strict=True)
        ]
        self.threads = places(machine.blockDim)
        self.function = self.bound(kernel.function)

    def bound(self, function: FunctionType) -> FunctionType:
        """The kernel with the emulator's objects behind its names."""
        return rebind(function, self.meaning)

    def meaning(self, value: Any) -> Any:
        """The emulator's object for a kernel's global or closed-over value."""
        if isinstance(value, Name):
            return self.cuda if value is instruction.cuda else self.types[value.name]
        if isinstance(value, Instruction):
            return importlib.import_module(f"{HERE}.{self.ptx}").translate(value)
        return value

    def _args(self, block: Block) -> list:
        """The kernel's arguments in one block."""
        args, arrays = list(self.args), {}
        for n, arg in enumerate(args):
            if isinstance(arg, tuple):
                values, state = arg
                if id(values) not in arrays:  # an array that is given twice is one array
                    arrays[id(values)] = block.log.array(values, self.names[n])
                    arrays[id(values)].state = state
                args[n] = arrays[id(values)]
        return self.launch.kernel.grouped(args)

    def play(self) -> Report:
        """Run all blocks, cluster by cluster."""
        machine, kernel = self.machine, self.launch.kernel
        grid = list(enumerate(places(machine.gridDim)))
        clusters = [grid[i : i + kernel.cluster] for i in range(0, len(grid), kernel.cluster)]
        if machine.random:
            machine.random.shuffle(clusters)
        for wave in [clusters] if kernel.together else [[cluster] for cluster in clusters]:
            blocks = [block for cluster in wave for block in self._cluster(cluster)]
            self._play(blocks)
            for block in blocks:
                block.settle()
                close(block)
        counts, size = dict(machine.counts), min(self.size, len(self.threads))
        return Report(counts, machine.tick, machine.spans, machine.history, size)

    def _play(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.log = Log(block)
            body = functools.partial(self._thread, self._args(block))
            block.threads = [Thread(body, block, n, at) for n, at in enumerate(self.threads)]
        self.machine.play([thread for block in blocks for thread in block.threads])

    def _thread(self, args: list) -> None:
        """What each thread does."""
        self.function(*args)
        close(current())

    def _cluster(self, cluster: list[tuple[int, Place]]) -> list[Block]:
        blocks: list[Block] = []
        for rank, (number, place) in enumerate(cluster):
            blocks.append(Block(self.machine, number, place, rank, blocks, len(self.threads)))
        blocks[0].of(Clock)
        return blocks


# %% sec-paper-run
class Together(Run):
    """One run of a launch, its threads in teams of `size`; told: whether it has instructions that
    put accesses in an order."""

    cuda: Any = teams.Cuda()
    types, ptx = teams.TYPES, "ptx_lockstep"

    def __init__(
        self, launch: Launch, seed: int | None, fresh: dict, past: Mapping, size: int, told: bool
    ):
        super().__init__(launch, seed, fresh, None, past)
        self.size, self.told = size, told

    def bound(self, function: FunctionType) -> FunctionType:
        """The same for the threads of a team."""
        return teams.abreast(rebind(function, self.meaning, teams.abreast))

    def meaning(self, value: Any) -> Any:
        """The object for a name of the kernel's module: `math` takes the values of all threads."""
        return teams.MATH if value is math else super().meaning(value)

    def _play(self, blocks: list[Block]) -> None:
        made = []
        for block in blocks:
            block.log = teams.RowLog(block, len(self.threads), self.told)
            body = functools.partial(self._team, self._args(block))
            for first in range(0, len(self.threads), self.size):
                places = self.threads[first : first + self.size]
                made.append(teams.Team(body, block, first, places))
            block.threads = [team for team in made if team.block is block for _ in team.numbers]
        self.machine.play(made)
        self.memory.settle()

    def _team(self, args: list) -> None:
        # Threads that are not active compute as well. NumPy keeps this for each greenlet apart.
        with np.errstate(all="ignore"):
            self.function(*args)
            current().close()
