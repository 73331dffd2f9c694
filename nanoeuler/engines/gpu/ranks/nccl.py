# Made from book/14a-gradients-between-gpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-exchange-nccl
"""Exchanges between GPUs by NVIDIA's NCCL, on a stream of their own.

Sums are float32; all else travels as bytes. Left out: a rank that dies while others wait for it,
which the launcher of the ranks must end.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.host import libraries
from nanoeuler.engines.gpu.host.device import Device, check
from nanoeuler.engines.gpu.ranks.exchange import Exchange
from nanoeuler.engines.ranks.group import Group

FIRST = 1 << 18  # float32 of a rank in `warm_up`: 1 MiB, to open NCCL's way for large messages


class Nccl:
    """The `Link` of this rank's device to the others: a communicator, and a stream of its own.

    All ranks make theirs at the same time.
    """

    copies = False

    def __init__(self, device: Device, group: Group) -> None:
        self.rank, self.size, self.driver = group.rank, group.size, device.driver
        self.device, self.library = device, libraries.exchanges()
        name = group.broadcast(None if group.rank else self.library.get_unique_id())
        self.communicator = self.library.NcclCommunicator(group.size, name, group.rank)
        flags = int(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        _, first = check(self.driver.cuCtxGetStreamPriorityRange())  # whose blocks start first
        self.side = int(check(self.driver.cuStreamCreateWithPriority(flags, first)))
        self.warm_up()

    def event(self, owner: Any) -> Any:
        """An event that lives as long as its owner."""
        flags = int(self.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        made = check(self.driver.cuEventCreate(flags))
        self.device.keep(owner, self.driver.cuEventDestroy, made)
        return made

    def after(self, event: Any, first: int, then: int) -> None:
        """Have a stream wait for what another has so far."""
        check(self.driver.cuEventRecord(event, first))
        check(self.driver.cuStreamWaitEvent(then, event, 0))

    def carry(self, work: Exchange) -> None:
        """Put one exchange on our stream."""
        library, communicator, side = self.library, self.communicator, self.side
        if work.kind == "broadcast":
            library.groupStart()
            for (given, to), root in zip(work.pairs(), work.roots, strict=True):
                ends = given.address, to.address, bytes_of(to)
                communicator.broadcast(*ends, library.NCCL_UINT8, root, side)
            library.groupEnd()
            return
        library.groupStart()
        for given, to in work.pairs():
            if work.kind == "all-gather":
                sizes = bytes_of(given), library.NCCL_UINT8
                communicator.allGather(given.address, to.address, *sizes, side)
            else:
                how = to.shape[0], library.NCCL_FLOAT32, library.NCCL_SUM
                communicator.reduceScatter(given.address, to.address, *how, side)
        library.groupEnd()

    def warm_up(self) -> None:
        """Exchange a little of each kind: NCCL connects the first time, and in no graph."""
        many = self.device.array(np.zeros(self.size * FIRST, np.float32))
        mine = self.device.part(many, 4 * self.rank * FIRST, (FIRST,), np.float32)
        for kind, args, roots in (
            ("reduce-scatter", (many, mine), ()), ("all-gather", (mine, many), ()),
            ("broadcast", (many, many), (0,)),
        ):  # fmt: skip
            self.carry(Exchange(kind, args, self, roots))
        self.device.synchronize()

    def exchange(self, work: Exchange) -> Callable[..., None]:
        """A function of a stream that begins `work` by NCCL, on a stream beside it."""

        def start(stream: int = 0) -> None:
            self.after(event, stream, self.side)
            self.carry(work)

        event = self.event(start)
        return start

    def join(self) -> Callable[..., None]:
        """A function of a stream that waits for the exchanges that NCCL has under way."""

        def start(stream: int = 0) -> None:
            self.after(event, self.side, stream)

        event = self.event(start)
        return start


# %% sec-exchange-nccl
def bytes_of(array: Any) -> int:
    """The bytes of a flat array."""
    return array.shape[0] * array.dtype.itemsize
