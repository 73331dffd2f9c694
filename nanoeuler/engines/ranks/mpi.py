# Made from book/14-many-ranks.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ranks-group
"""Ranks as processes that MPI has started: the only module that opens mpi4py.

Importing mpi4py starts MPI, so a process asks for `Mpi` only where a launcher has made it a rank.
"""

import atexit
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanoeuler.engines.ranks.group import Group, added, check_size, own

# Elements taken in from each rank at a time: 1 MiB takes many times as long as a message's latency.
CHUNK = 1 << 18
NAP = 5e-4  # seconds between two looks for a message: short beside a step, long beside a look
HEARD = 1.0  # seconds that a launcher needs at most to pass on a line, before it ends all
FAILED = 2  # the exit status of a command that could not do what it was asked


class Mpi(Group):
    """A rank that is a process, among those that its launcher has started."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.local = self.comm.Split_type(MPI.COMM_TYPE_SHARED).size
        check_size(self.size)

    def share(self, value: Any) -> list[Any]:
        """The `value` of every rank, pickled and sent by MPI to all."""
        return self.comm.allgather(value)

    def scatter_objects(self, values: Sequence[Any] | None = None) -> Any:
        """values[r] of rank 0, on rank r, which keeps no core busy while it waits."""
        if self.rank:
            while not self.comm.iprobe(0):
                time.sleep(NAP)
            return self.comm.recv(source=0)
        for request in [self.comm.isend(values[rank], rank) for rank in range(1, self.size)]:
            request.wait()
        return values[0]

    def abort(self, why: str) -> None:
        """Print `why` and end every rank at once, by MPI."""
        print(f"nanoeuler: rank {self.rank} of {self.size}: {why}", file=sys.stderr, flush=True)
        self.end()

    def doom(self) -> None:
        """End every rank when this one ends: registered last, it runs before MPI would wait."""
        super().doom()
        atexit.register(self.end)

    def end(self) -> None:
        """End all ranks, when what this one has said is heard."""
        sys.stderr.flush()
        time.sleep(HEARD)
        self.comm.Abort(FAILED)

    def reduce_scatter(self, flat: np.ndarray) -> None:
        """Make this rank's own part of `flat` the sum of all: in chunks, added here."""
        assert len(flat) % self.size == 0, f"{len(flat)} elements for {self.size} ranks"
        parts = flat.reshape(self.size, -1)
        for first in range(0, parts.shape[1], CHUNK):
            sent = np.ascontiguousarray(parts[:, first : first + CHUNK])
            received = np.empty_like(sent)
            self.comm.Alltoall(sent, received)
            parts[self.rank, first : first + CHUNK] = added(received)

    def all_gather(self, flat: np.ndarray) -> None:
        """Fill each part of `flat` from the rank that owns it, in place."""
        self.comm.Allgather(self.mpi.IN_PLACE, flat)

    def gather(self, flat: np.ndarray) -> None:
        """Fill `flat` on rank 0 with each rank's own part; elsewhere it stays as it is."""
        mine = flat[own(len(flat), self.rank, self.size)]
        self.comm.Gather(mine if self.rank else self.mpi.IN_PLACE, None if self.rank else flat)

    def scatter(self, flat: np.ndarray) -> None:
        """Make this rank's own part of `flat` what rank 0 has there, in place."""
        mine = flat[own(len(flat), self.rank, self.size)]
        self.comm.Scatter(None if self.rank else flat, mine if self.rank else self.mpi.IN_PLACE)

    def spread(self, flat: np.ndarray) -> None:
        """Make `flat` on every rank what it is on rank 0, in place."""
        self.comm.Bcast(flat)
