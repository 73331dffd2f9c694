# Made from book/14-many-ranks.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ranks-group
"""Ranks as threads of one process: for paper, and for tests. Nothing is faster by it."""

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from nanoeuler.engines.ranks.group import Group, Talk, added, own
from nanoeuler.errors import UserError


class Table(Talk):
    """Rank `rank` of those that share the list `slots`, one for each, and a `meeting`."""

    def __init__(self, rank: int, slots: list[Any], meeting: threading.Barrier) -> None:
        self.rank, self.size, self.local = rank, len(slots), len(slots)
        self.slots, self.meeting = slots, meeting

    def _seen(self, value, use):
        """use(what every rank has brought here), while nobody changes it."""
        self.slots[self.rank] = value
        self.meeting.wait()
        used = use(self.slots)
        self.meeting.wait()
        return used

    def share(self, value: Any) -> list[Any]:
        """As `Group.share`."""
        return self._seen(value, copy.deepcopy)

    def deal(self, values: Sequence[Any] | None = None) -> Any:
        """As `Group.deal`."""
        return self._seen(values, lambda slots: copy.deepcopy(slots[0][self.rank]))

    def abort(self, why: str) -> None:
        """As `Group.abort`: the others fail where they wait."""
        self.meeting.abort()
        raise UserError(f"rank {self.rank} of {self.size}: {why}")

    def doom(self) -> None:
        """As `Group.doom`: the others fail where they wait."""
        self.doomed = True
        self.meeting.abort()


class Threads(Table, Group):
    """A rank that is a thread."""

    def reduce_scatter(self, flat: np.ndarray) -> None:
        """As `Group.reduce_scatter`: of all buffers a rank reads the part that is its own."""
        mine = own(len(flat), self.rank, self.size)
        flat[mine] = self._seen(flat, lambda flats: added(np.stack([x[mine] for x in flats])))

    def _copied(self, flat, sources):
        """Copy into `flat` from those of other ranks: sources is [(rank, slice)]."""
        def copy_parts(flats):
            for rank, part in sources:
                if rank != self.rank:
                    flat[part] = flats[rank][part]

        self._seen(flat, copy_parts)

    def all_gather(self, flat: np.ndarray) -> None:
        """As `Group.all_gather`."""
        self._copied(flat, [(r, own(len(flat), r, self.size)) for r in range(self.size)])

    def gather(self, flat: np.ndarray) -> None:
        """As `Group.gather`."""
        ranks = range(self.size if self.rank == 0 else 0)
        self._copied(flat, [(r, own(len(flat), r, self.size)) for r in ranks])

    def scatter(self, flat: np.ndarray) -> None:
        """As `Group.scatter`."""
        self._copied(flat, [(0, own(len(flat), self.rank, self.size))])

    def spread(self, flat: np.ndarray) -> None:
        """As `Group.spread`."""
        self._copied(flat, [(0, slice(None))])


def together(size: int, function: Callable[[Group], Any]) -> list[Any]:
    """What function(group) returns on each of `size` ranks, which run as threads.

    If one raises, the others are ended where they wait for it, and its error is raised.
    """
    slots, meeting = [None] * size, threading.Barrier(size)

    def run(rank):
        try:
            return function(Threads(rank, slots, meeting))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        jobs = [pool.submit(run, rank) for rank in range(size)]
    errors = [job.exception() for job in jobs if job.exception()]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [job.result() for job in jobs]
