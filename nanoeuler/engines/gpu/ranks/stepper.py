# Made from book/14a-gradients-between-gpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-exchange-stepper
"""Training steps of several GPUs, one for each rank: see `interface.Stepper`.

Each rank has its part of a batch. What is read is whole on each; what only the update needs is in
shards: moments, and masters where products read copies. Left out: GPUs that differ.

B batch, T positions, K predicted tokens.
"""

import os
import sys
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.ranks.buckets import LEAST, Sharing
from nanoeuler.engines.gpu.ranks.exchange import (
    ATTENTION,
    MASTERS,
    Exchange,
    Join,
    Link,
    RankBuilder,
    RankStepBuilder,
)
from nanoeuler.engines.gpu.ranks.muon import muon_rank_builder
from nanoeuler.engines.gpu.ranks.nccl import Nccl
from nanoeuler.engines.gpu.ranks.peer_copies import Peers, reachable
from nanoeuler.engines.gpu.step.muon import rules_of
from nanoeuler.engines.gpu.step.precision import PRECISIONS, WEIGHTS
from nanoeuler.engines.gpu.step.recording import GRADIENTS, MOMENTS
from nanoeuler.engines.gpu.step.stepper import CHOICE, NUMBER, CudaStepper, gpu
from nanoeuler.engines.interface import Optimizer, Taken
from nanoeuler.engines.ranks.group import Group
from nanoeuler.engines.ranks.scatter import Dealt, Part, parts_of
from nanoeuler.engines.sharding import slices
from nanoeuler.errors import UserError
from nanoeuler.model.weights import Weights


class CudaRankStepper(Dealt, CudaStepper):
    """Training steps of one model on several devices; this rank's is `device`.

    when: as `RankStepBuilder` has it. least: bytes of a bucket. gatherings: a
    graph for each memory, see `gathering`.
    """

    optimizers = ("AdamW", "Muon")

    def __init__(
        self, weights: Weights, optimizer: Optimizer, device: Any, link: Link, group: Group, *,
        when: str = ATTENTION, least: int = LEAST, **how: Any,
    ) -> None:  # fmt: skip
        self.link, self.group = link, group
        self.gatherings: dict[str, Any] = {}
        self.sharing = Sharing(weights, link.size, least)
        self.sums_builder = partial(RankBuilder, link=link, least=least)
        self.step_builder = partial(RankStepBuilder, link=link, when=when, least=least)
        if type(optimizer).__name__ == "Muon":
            rules, given = rules_of(optimizer, weights), self.step_builder.keywords
            self.step_builder = partial(muon_rank_builder, rules=rules, **given)
        super().__init__(weights, optimizer, device, **how)
        self.memories[GRADIENTS] = device.array(np.zeros(self.sharing.length, np.float32))

    def gathering(self, name: str) -> Any:
        """A graph that gathers a memory's shards (or gradients' parts) into the gradients;
        made when first asked for."""
        if name not in self.gatherings:
            ends = []
            for bucket in self.sharing.buckets:
                part, held = self.sharing.part(bucket, self.link.rank), self.sharing.held(bucket)
                mine = self.floats(name, part if name == GRADIENTS else held)
                ends += [mine, self.floats(GRADIENTS, slice(*bucket[:2]))]
            works = Exchange("all-gather", tuple(ends), self.link), Join(self.link)
            starts = [work.prepare(self.device) for work in works]
            self.gatherings[name] = self.device.capture(starts)
        return self.gatherings[name]

    def floats(self, name: str, part: slice) -> Any:
        """A part of a memory of float32."""
        length = part.stop - part.start
        return self.device.part(self.memories[name], 4 * part.start, (length,), np.float32)

    def moments(self) -> dict[str, np.ndarray]:
        """This rank's shard of the optimizer's moments."""
        whole = CudaStepper.moments(self)
        return {name: self.sharing.shard(flat, self.link.rank) for name, flat in whole.items()}

    def push(self) -> None:
        """Copy rank 0's weights and moments to every rank; all ranks call it together."""
        for kept in (self.weights, self.optimizer.m, self.optimizer.v):
            self.group.spread(kept.flat)
        CudaStepper.push(self)

    def pull(self) -> None:
        """Bring weights and moments from all ranks' shards to the run of every rank."""
        n = self.weights.flat.shape[0]
        shards = {name: getattr(self.optimizer, name) for name in MOMENTS}
        if self.precision.kind == "bf16":
            shards[MASTERS] = self.weights
        else:
            self.weights.flat[...] = self.device.host(self.memories[WEIGHTS])[:n]
        for name, kept in shards.items():
            self.gathering(name).launch()
            kept.flat[...] = self.device.host(self.memories[GRADIENTS])[:n]

    def expect_parts(self, shape: tuple[int, int]) -> None:
        """UserError for a batch of tokens of this shape (B, T) that ranks cannot share equally."""
        count, size = shape[0], self.link.size
        if count % size:
            raise UserError(
                f"a batch of {count} sequences cannot be shared by {size} ranks: "
                f"choose a batch_size that is a multiple of {size}"
            )

    def parts_to_judge(
        self, tokens: np.ndarray, targets: np.ndarray, first: np.ndarray | None = None
    ) -> list[Part]:
        """A part for each rank of a batch for `sums`; the last have fewer sequences, or none."""
        rows = slices(range(len(tokens)), self.link.size)
        rows += [slice(0, 0)] * (self.link.size - len(rows))
        return parts_of(rows, tokens, targets, first)

    def step_part(self, part: Part, lr: float, number: int) -> list[Taken]:
        return self.step_scaled(part.tokens, part.targets, part.scale, lr, number, part.first)

    def sums_part(self, part: Part) -> np.ndarray:
        found = np.zeros(part.targets.shape[2])
        if len(part.tokens):
            found = CudaStepper.sums(self, part.tokens, part.targets, part.first)
        return sum(self.group.share(found))


# %% sec-exchange-copies
EXCHANGES = "NANOEULER_EXCHANGES"  # the variable that says who carries them
LINKS = {"copies": Peers, "nccl": Nccl}


def carrier(group: Group) -> tuple[str, str]:
    """Who carries exchanges, a name of LINKS, and why; all ranks ask at the same time."""
    wish, no_way = os.environ.get(EXCHANGES) or "", ""
    if wish and wish not in LINKS:
        raise UserError(f"{EXCHANGES} is one of {', '.join(LINKS)}, and not {wish!r}")
    if wish == "nccl":
        return wish, f"{EXCHANGES} asks for it"
    if group.local < group.size:
        no_way = "ranks run on several machines"
    elif not reachable(gpu(), group):
        no_way = "a GPU here cannot write into another's memory"
    if wish and no_way:
        raise UserError(f"{EXCHANGES} is copies, but {no_way}: say nccl")
    return ("nccl", no_way) if no_way else ("copies", "all GPUs are on this machine")


@cache
def link_of(group: Group) -> Nccl:
    """What joins this rank's GPU to the others; ranks of one machine take its GPUs in order.

    Rank 0 says on stderr who carries.
    """
    os.environ.setdefault(NUMBER, str(group.rank % group.local))
    name, why = carrier(group)
    if group.rank == 0:
        print(f"exchanges  {name}: {why}", file=sys.stderr)
    return LINKS[name](gpu(), group)


def ranked_stepper(
    group: Group, name: str, weights: Weights, optimizer: Optimizer, pieces: int = 1
) -> CudaRankStepper:
    """A stepper of this rank's GPU, for the engine of this name, one of `registry.GPU_ENGINES`.

    pieces: in how many parts this rank's sequences go through memory.
    """
    multiplier, link = import_module(CHOICE).multiplier(), link_of(group)
    return CudaRankStepper(
        weights, optimizer, link.device, link, group, precision=PRECISIONS[name], pieces=pieces,
        multiplier=multiplier,
    )  # fmt: skip
