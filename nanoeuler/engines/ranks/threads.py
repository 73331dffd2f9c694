# Made from book/14-many-ranks.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ranks-group
"""Ranks as threads of one process: for this book, and for tests. Nothing is faster by it."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nanoeuler.engines.ranks.group import Group
from nanoeuler.errors import UserError


class Threads(Group):
    """A rank that is a thread: rank `rank` of those that share the list `slots`, one for each."""

    def __init__(self, rank: int, slots: list[Any], meeting: threading.Barrier) -> None:
        self.rank, self.size, self.local = rank, len(slots), len(slots)
        self.slots, self.meeting = slots, meeting

    def share(self, value: Any) -> list[Any]:
        """The `value` of every rank, copied while nobody changes any of them."""
        self.slots[self.rank] = value
        self.meeting.wait()
        every = copy.deepcopy(self.slots)
        self.meeting.wait()
        return every

    def abort(self, why: str) -> None:
        """UserError with `why`; the others fail where they wait."""
        self.meeting.abort()
        raise UserError(f"rank {self.rank} of {self.size}: {why}")

    def doom(self) -> None:
        """Say that this rank has failed; the others fail where they wait."""
        super().doom()
        self.meeting.abort()


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
