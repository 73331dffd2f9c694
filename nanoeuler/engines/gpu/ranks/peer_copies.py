# Made from book/14a-gradients-between-gpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-exchange-copies
"""Exchanges between GPUs of one machine by their copy engines, which take no multiprocessor.

Each rank writes into the others' memory, of which the driver lends it addresses, and flags say
when. Left out: what is small, and GPUs of other machines, which are NCCL's (nccl.py); and giving
back: memory that other ranks write to is there until the process ends. R ranks.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.host.device import Device, check
from nanoeuler.engines.gpu.ranks.exchange import Exchange
from nanoeuler.engines.gpu.ranks.nccl import Nccl, bytes_of
from nanoeuler.engines.ranks.group import Group

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE of the driver's API
# Copies carry an exchange whose parts have at least these bytes: a copy of 1 MiB takes 7 us, NCCL
# 14. For less, flags may take longer.
LEAST_COPIED = 1 << 20
FLAGS = 1 << 19  # uint32 of flags: 2 MiB, which the driver lends as one piece; 2 R an exchange


class CopyPlan(NamedTuple):
    """What one exchange does. flags: addresses of this rank's, by rank: "you may write", "it is
    there"; theirs: of the other ranks' for this one; copies: (to, from, bytes)."""

    flags: list[tuple[int, int]]
    theirs: list[tuple[int, int]]
    copies: list[tuple[int, int, int]]


def export_handle(driver: Any, base: int) -> bytes:
    """What another process needs to reach this memory of ours, which begins at `base`."""
    handle = check(driver.cuIpcGetMemHandle(base))
    return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)


def open_handle(driver: Any, raw: bytes) -> int:
    """The address here of another process's memory."""
    handle = driver.CUipcMemHandle()
    ctypes.memmove(int(handle.getPtr()), raw, HANDLE_BYTES)
    peers = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return int(check(driver.cuIpcOpenMemHandle(handle, peers)))


def allowed(call: Callable, *args: Any) -> Any:
    """What a call returns, or None if the driver refuses."""
    try:
        return call(*args)
    except RuntimeError:
        return None


def reachable(device: Device, group: Group) -> bool:
    """Whether the GPU of every rank reaches the others' memory; all ranks ask at the same time.

    It is tried, with memory for nothing else: cards may have no way to each other, and a driver
    may lend nothing, or not between these processes.
    """
    driver, probe = device.driver, device.array(np.zeros(FLAGS, np.uint32))
    every = group.share(allowed(export_handle, driver, probe.address))
    others = [raw for rank, raw in enumerate(every) if rank != group.rank]
    there = [raw and allowed(open_handle, driver, raw) for raw in others]
    for address in filter(None, there):
        check(driver.cuIpcCloseMemHandle(address))
    return all(group.share(all(there)))  # nobody's probe is given back before all have left it


class Peers(Nccl):
    """The `Link` of this rank's device to others of this machine, by copies into their memory."""

    copies = True

    def __init__(self, device: Device, group: Group) -> None:
        self.group, self.under_way = group, []  # exchanges that nobody has waited for
        # Also keeps the exchanges' arrays: others write to them.
        self.plans: dict[Exchange, CopyPlan] = {}
        self.bases: dict[int, list[int]] = {}  # of a memory here -> of all ranks'
        super().__init__(device, group)
        self.flags, self.taken = device.array(np.zeros(FLAGS, np.uint32)), 0

    def bases_of(self, base: int) -> list[int]:
        """Where this memory and the other ranks' memories of the same use begin, seen from here.

        All ranks ask at the same time.
        """
        if base not in self.bases:
            every = self.group.share(export_handle(self.driver, base))
            self.bases[base] = [
                base if rank == self.rank else open_handle(self.driver, raw)
                for rank, raw in enumerate(every)
            ]
        return self.bases[base]

    def addresses_of(self, address: int) -> list[int]:
        """An address of this rank and those that the others name at the same time."""
        base = int(check(self.driver.cuMemGetAddressRange(address))[0])
        offsets = self.group.share(address - base)
        return [start + offset for start, offset in zip(self.bases_of(base), offsets, strict=True)]

    def plan(self, work: Exchange) -> CopyPlan:
        """What this rank does for an exchange; all ranks plan the same one at the same time."""
        first = self.flags.address + 4 * 2 * self.size * self.taken
        self.taken += 1
        assert 2 * self.size * self.taken <= FLAGS, "more exchanges than there are flags"
        flags = [(first + 8 * rank, first + 8 * rank + 4) for rank in range(self.size)]
        mine = self.addresses_of(first)
        theirs = [(at + 8 * self.rank, at + 8 * self.rank + 4) for at in mine]
        copies = [copy for pair in work.pairs() for copy in self.parts(work.kind, *pair)]
        return CopyPlan(flags, theirs, copies)

    def others(self) -> list[int]:
        """The other ranks, the next one first, so that no two send to the same one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def parts(self, kind: str, given: Any, to: Any) -> list[tuple[int, int, int]]:
        """The copies of one pair of an exchange."""
        places = self.addresses_of(to.address)
        if kind == "all-gather":
            size = bytes_of(given)
            own = places[self.rank] + size * self.rank
            there = [(places[rank] + size * self.rank, given.address, size)
                     for rank in self.others()]  # fmt: skip
            return there if own == given.address else [*there, (own, given.address, size)]
        size = bytes_of(given) // self.size
        return [(places[rank] + size * place_of(self.rank, rank), given.address + size * rank, size)
                for rank in self.others()]  # fmt: skip

    def set_flag(self, address: int, value: int) -> None:
        """Set a flag, after what our stream has so far."""
        check(self.driver.cuStreamWriteValue32(self.side, address, value, 0))

    def await_flag(self, address: int) -> None:
        """Have our stream wait until a flag of this rank is set, and clear it."""
        equal = int(self.driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        check(self.driver.cuStreamWaitValue32(self.side, address, 1, equal))
        self.set_flag(address, 0)

    def carry(self, work: Exchange) -> None:
        """Put one exchange on our stream."""
        if work not in self.plans:
            return Nccl.carry(self, work)
        plan, others = self.plans[work], self.others()
        for rank in others:
            self.set_flag(plan.theirs[rank][0], 1)  # you may write where this goes
        for rank in others:
            self.await_flag(plan.flags[rank][0])
        for to, given, size in plan.copies:
            check(self.driver.cuMemcpyDtoDAsync(to, given, size, self.side))
        for rank in others:
            self.set_flag(plan.theirs[rank][1], 1)  # it is there

    def exchange(self, work: Exchange) -> Callable[..., None]:
        """A function of a stream that begins `work` by copies; all ranks call it together."""
        sizes = [min(bytes_of(given), bytes_of(to)) for given, to in work.pairs()
                 ] if work.kind != "broadcast" else [0]  # fmt: skip
        if max(sizes) >= LEAST_COPIED or work.kind == "hand over":
            self.plans[work] = self.plan(work)
            self.under_way.append(self.plans[work])
        return Nccl.exchange(self, work)

    def join(self) -> Callable[..., None]:
        """A function of a stream that waits for the copies under way, and for NCCL's exchanges."""
        waits, (done, self.under_way) = Nccl.join(self), (self.under_way, [])

        def start(stream: int = 0) -> None:
            for plan in done:
                for rank in self.others():
                    self.await_flag(plan.flags[rank][1])
            waits(stream)

        return start


# %% sec-exchange-copies
def place_of(rank: int, among: int) -> int:
    """The place of what a rank sends among all that rank `among` gets."""
    return rank - (rank > among)
