# Made from book/14-many-ranks.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ranks-group
"""What the ranks of a run ask of each other, and the one order in which their numbers are added.

Leaves out who carries the messages: `Alone` has nobody to talk to, `threads` are ranks of one
process, `mpi` are processes. R ranks, N elements of a flat buffer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanoeuler.engines.sharding import HALVINGS
from nanoeuler.errors import UserError

# With so many ranks each still has a branch of the tree of shards to sum (`halved`). And a flat
# buffer, whose tensors are padded to 16 elements, can be split into so many equal parts.
MOST_RANKS = 2**HALVINGS


def check_size(size: int) -> None:
    """UserError unless a sum over so many ranks has the order of one over 1 rank: see `added`."""
    if not 0 < size <= MOST_RANKS or size & (size - 1):
        raise UserError(f"expected 1, 2, 4, 8 or {MOST_RANKS} ranks, got {size}: choose one of "
                        "these, since a sum of other parts would have other last bits")  # fmt: skip


def own(n: int, rank: int, size: int) -> slice:
    """The part of rank `rank` of `size` in a flat buffer of n elements, a multiple of `size`."""
    assert n % size == 0, f"{n} elements for {size} ranks"
    return slice(n // size * rank, n // size * (rank + 1))


def added(parts: np.ndarray) -> np.ndarray:
    """The sum over the first axis of (R, ...), R a power of two: neighbours, then their sums.

    Halves of the ranks are summed alike and then added, so if each rank's addend was itself made in
    this order, the sum has the bits that one rank with all addends would get.
    """
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


class Group(ABC):
    """One rank's view of all. Every rank calls each method, but `abort` and `doom`, in one order.

    `local` of the ranks, this one among them, run on this machine. Buffers are flat, contiguous and
    of N elements, a multiple of `size`; each is worked on in place.
    """

    rank: int
    size: int
    local: int
    doomed: bool = False

    @abstractmethod
    def share(self, value: Any) -> list[Any]:
        """The `value` of every rank, in the order of ranks: small things, copied."""

    def scatter_objects(self, values: Sequence[Any] | None = None) -> Any:
        """values[r] of rank 0, on rank r."""
        return self.share(values)[0][self.rank]

    def broadcast(self, value: Any = None) -> Any:
        """The value of rank 0."""
        return self.scatter_objects(None if self.rank else [value] * self.size)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.share(None)

    @abstractmethod
    def abort(self, why: str) -> None:
        """End every rank at once, this one too; `why` is a line for the user."""

    def doom(self) -> None:
        """End every rank when this one ends: it failed where the others wait for it."""
        self.doomed = True

    def reduce_scatter(self, flat: np.ndarray) -> None:
        """Make this rank's own part of `flat` the sum of all ranks', in the order of `added`.

        What the rest then holds is not said.
        """
        mine = own(len(flat), self.rank, self.size)
        flat[mine] = added(np.stack([x[mine] for x in self.share(flat)]))

    def all_gather(self, flat: np.ndarray) -> None:
        """Fill each part of `flat` from the rank that owns it."""
        mine = own(len(flat), self.rank, self.size)
        flat[...] = np.concatenate(self.share(flat[mine]))

    def gather(self, flat: np.ndarray) -> None:
        """The same on rank 0 alone; elsewhere `flat` stays as it is."""
        every = self.share(flat[own(len(flat), self.rank, self.size)])
        if self.rank == 0:
            flat[...] = np.concatenate(every)

    def scatter(self, flat: np.ndarray) -> None:
        """Make this rank's own part of `flat` what rank 0 has there."""
        mine = own(len(flat), self.rank, self.size)
        flat[mine] = self.share(None if self.rank else flat)[0][mine]

    def spread(self, flat: np.ndarray) -> None:
        """Make `flat` what rank 0 has."""
        flat[...] = self.share(None if self.rank else flat)[0]


# %% sec-ranks-group
class Alone(Group):
    """The group of a single rank."""

    rank, size, local = 0, 1, 1

    def share(self, value: Any) -> list[Any]:
        """[value]: there is one rank."""
        return [value]

    def abort(self, why: str) -> None:
        """UserError with `why`: no other rank has to end."""
        raise UserError(why)
