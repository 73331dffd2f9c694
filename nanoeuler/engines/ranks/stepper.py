# Made from book/14-many-ranks.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ranks-step
"""A training step over ranks on processors: data parallelism, the optimizer's moments in parts.

Leaves out graphics cards, and who calls the ranks together (`controller`). Methods in which ranks
exchange anything are called by every rank, with the same arguments or with its own part of a batch.
The results are those of one `CpuStepper`, to the last bit.

B batch, T positions, K predicted tokens, R ranks.
"""

import numpy as np

from nanoeuler.engines.cpu.stepper import CpuStepper, shards_of
from nanoeuler.engines.interface import Taken
from nanoeuler.engines.ranks.group import MOST_RANKS, Group, check_size, own
from nanoeuler.engines.ranks.scatter import Dealt, Part, parts_of
from nanoeuler.engines.sharding import HALVINGS, halved
from nanoeuler.errors import UserError


def shares(shape: tuple[int, int], ranks: int) -> list[list[range]]:
    """The shards of each rank, for tokens of this shape (B, T): ranges of sequences, maybe none."""
    return halved(shards_of(*shape), ranks.bit_length() - 1)


class RankStepper(Dealt):
    """The `Stepper` of a rank on processors: all weights, and the moments of its own part alone.

    `inner` takes its shards. `gradients` are those of the last step, clipped, in the own part.
    """

    def __init__(self, group: Group, inner: CpuStepper) -> None:
        check_size(group.size)
        self.group, self.inner, self.optimizer = group, inner, inner.optimizer
        self.weights, self.gradients = inner.weights, inner.gradients
        self.own = own(self.weights.flat.size, group.rank, group.size)
        self.optimizer.gather = group.all_gather
        self.push()

    def pull(self) -> None:
        """Gather the moments of all ranks on rank 0. The weights are everywhere already."""
        self.group.gather(self.optimizer.m.flat)
        self.group.gather(self.optimizer.v.flat)

    def push(self) -> None:
        """Send the weights of rank 0 to each rank, and to each the moments of its own part."""
        self.group.spread(self.weights.flat)
        self.group.scatter(self.optimizer.m.flat)
        self.group.scatter(self.optimizer.v.flat)

    def step_part(self, part: Part, lr: float, number: int) -> list[Taken]:
        """Step `number` at learning rate lr, of which `part` is this rank's; equal bits on all."""
        group, flat = self.group, self.gradients.flat
        left = HALVINGS - (group.size.bit_length() - 1)  # to be made in a rank's own part
        sums = self.inner.shard_gradients(part.tokens, part.targets, part.scale, self._rows(part),
                                          left, part.first)  # fmt: skip
        group.reduce_scatter(flat)
        squares = self.optimizer.squares(flat[self.own], MOST_RANKS // group.size)
        told = group.share((sums, squares))
        norm = self.optimizer.limit(flat[self.own], [x for _, each in told for x in each])
        taken = Taken(number, sum(x for each, _ in told for x in each), norm)
        if taken.finite:
            self.optimizer.update(self.weights, self.gradients, lr, number, self.own)
            group.all_gather(self.weights.flat)
        return [taken]

    def sums_part(self, part: Part) -> np.ndarray:
        """The sums (K,) of -log p over the whole batch, of which `part` is this rank's."""
        rows = self._rows(part)
        told = self.group.share(self.inner.shard_sums(part.tokens, part.targets, rows, part.first))
        return sum(x for each in told for x in each)

    def _rows(self, part):
        """This rank's shards as rows of its own part."""
        rows = shares(part.shape, self.group.size)[self.group.rank]
        return [range(x.start - rows[0].start, x.stop - rows[0].start) for x in rows]

    def expect_parts(self, shape: tuple[int, int]) -> None:
        """UserError unless a batch of tokens of this shape (B, T) has a shard for each rank."""
        (B, T), ranks = shape, self.group.size
        count = len(shards_of(B, T))
        if count < ranks:
            raise UserError(
                f"expected a batch of at least {ranks} shards, one for each rank, but {B} sequences"
                f" of {T} tokens are {count}: choose a larger batch_size or fewer ranks"
            )

    def parts_to_judge(
        self, tokens: np.ndarray, targets: np.ndarray, first: np.ndarray | None = None
    ) -> list[Part]:
        """A part for each rank of a batch for `sums`; some may be empty."""
        each = shares(tokens.shape, self.group.size)
        rows = [slice(some[0].start, some[-1].stop) if some else slice(0, 0) for some in each]
        return parts_of(rows, tokens, targets, first)
