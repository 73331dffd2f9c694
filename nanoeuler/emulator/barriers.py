# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-barriers
"""Where threads of a block wait for each other: barriers, whole and named, and syncwarp."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from nanoeuler.emulator.machine import WARP, Block, Meeting, Thread, fault, line
from nanoeuler.emulator.machine import getcurrent as current
from nanoeuler.emulator.vector_clocks import acquire, clock, join, release

NAMED = 16  # barriers of a block: PTX ISA, "bar, barrier"


class Barriers:
    """The barriers of a block."""

    def __init__(self, block: Block):
        self.waiting: list[Thread] = []  # at syncthreads
        self.arrived = 0  # CUDA threads that those are
        self.site: object = None  # where the first of them waits
        self.named: dict[int, Named] = {}


class Named:
    """One round of a named barrier: `count` threads come, the warps in `warps` wait."""

    def __init__(self, count: int, knowledge: np.ndarray):
        self.count, self.knowledge = count, knowledge
        self.arrivals, self.open = 0, False
        self.warps: list[Meeting] = []
        self.waiting: list[Thread] = []

    def let_go(self, block: Block) -> None:
        """All have come."""
        self.open = True
        for warp in self.warps:
            acquire(warp, self.knowledge)
        block.machine.counts["barriers"] += 1
        block.machine.queue.extend(self.waiting)


def sync_threads() -> None:
    """Wait until all threads of the block are here, at the same call."""
    wait_for_block(sys._getframe(1))


def wait_for_block(frame: FrameType) -> None:
    """The current thread, or a team of threads, waits at a call in `frame` for all of its block."""
    thread = current()
    block, site = thread.block, (frame.f_code, frame.f_lasti)
    barriers = block.of(Barriers)
    waiting = barriers.waiting
    if not waiting:
        barriers.site = site
    elif site != barriers.site:
        other = line(waiting[0].gr_frame)
        fault("divergence", f"a barrier, while {len(waiting)} threads wait at another: {other}")
    waiting.append(thread)
    barriers.arrived += thread.size
    if barriers.arrived < len(block.threads):
        thread.pause(
            "syncthreads", lambda: f"{len(waiting)} of {len(block.threads)} threads have come"
        )
        return
    join(block)
    block.machine.memory.settle()
    block.machine.counts["barriers"] += 1
    barriers.waiting, barriers.arrived = [], 0
    block.machine.queue.extend(waiting[:-1])


def check_named(block: Block, number: int, count: int) -> None:
    """Fault unless a block has a barrier of this number, for so many threads."""
    if not 0 <= number < NAMED or count % WARP or not 0 < count <= len(block.threads):
        fault("misuse", f"barrier {number} of {NAMED}, for {count} of {len(block.threads)} threads")


def come(warp: Meeting, number: int, count: int, wait: bool) -> Named:
    """A warp comes to a named barrier, and perhaps waits there; the last one opens it."""
    named = warp.block.of(Barriers).named
    barrier = named.setdefault(number, Named(count, clock(warp.block).new()))
    if barrier.count != count:
        fault("misuse", f"barrier {number} for {count} threads, and for {barrier.count}")
    barrier.arrivals += warp.size
    barrier.warps += [warp] if wait else []
    release(warp, barrier.knowledge)
    if barrier.arrivals >= count:
        del named[number]
        barrier.let_go(warp.block)
    return barrier


def named_barrier(number: int, count: int, wait: bool) -> None:
    """bar.sync (wait) and bar.arrive: a warp comes; `count` threads open the barrier."""
    thread = current()
    warp = thread.warp
    check_named(thread.block, number, count)
    together = lambda values: [come(warp, number, count, wait)] * len(values)  # noqa: E731
    barrier = warp.meet(thread, f"barrier {number}", None, together)
    if wait and not barrier.open:
        barrier.waiting.append(thread)
        thread.pause(
            "named", lambda: f"barrier {number}: {barrier.arrivals} of {count} threads have come"
        )


def sync_warp(mask: int = 0xFFFFFFFF) -> None:
    """Wait until the lanes in `mask` are here; each sees what the others wrote."""
    thread = current()
    meet(mask, "syncwarp", None, lambda values: (thread.block.settle(), values)[1])


def meet(mask: int, key: str, value: Any, together: Callable) -> Any:
    """The lanes of a mask execute something together, of the current thread's warp."""
    thread = current()
    warp = thread.warp
    if not mask >> thread.lane & 1:
        fault("misuse", f"{key} with a mask, {mask:#x}, that leaves this thread out")
    return warp.part(mask).meet(thread, key, value, together)
