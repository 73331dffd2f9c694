# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-threads
"""The machine: threads that take turns, meetings where they wait, and a scheduler.

Every CUDA thread, or team of them, is a greenlet: it runs until it has to wait, and hands over to
the scheduler. What must not happen is a `Fault`, which names a line of the kernel. Left out:
memory.
"""

import collections
import linecache
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

from greenlet import getcurrent, greenlet

WARP, GROUP = 32, 128  # threads: a warp, and the four warps of a warpgroup
MOST_THREADS = 1024  # of a block: CUDA C++ Programming Guide, technical specifications
HERE = "nanoeuler.emulator"
OFTEN = 0.05  # with a seed, how often a copy arrives before a turn: once in twenty


class Fault(Exception):
    """A mistake of a kernel. `kind` is a word: race, bounds, unwritten, proxy, flight, divergence,
    deadlock, misuse. The host's mistakes: capture, race, unwritten."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


def line(frame: FrameType | None) -> str:
    """The innermost line of the kernel at or around `frame`: function, number and text."""
    while frame and frame.f_globals.get("__name__", "").startswith(HERE):
        frame = frame.f_back
    return text_of(frame.f_code, frame.f_lineno) if frame else "its end"


def text_of(code: CodeType, number: int) -> str:
    """A line of a function's code: function, number and text."""
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_name}:{number}" + (f" `{text}`" if text else "")


def fault(kind: str, text: str) -> None:
    """Raise a Fault of the thread that is running, with its place in the kernel."""
    thread = getcurrent()
    raise Fault(kind, f"{thread} at {line(sys._getframe(1))}: {text}")


class Place(NamedTuple):
    """threadIdx, blockIdx, blockDim, gridDim."""

    x: int
    y: int
    z: int


class Owner:
    """State that other modules keep for a thread, meeting or block: `of(Kind)` makes it once."""

    parts: dict

    def of(self, kind: Callable) -> Any:
        """The part of this kind."""
        part = self.parts.get(kind)
        if part is None:
            part = self.parts[kind] = kind(self)
        return part


def close(owner: Owner) -> None:
    """A thread or a block ends: its parts finish counting, and refuse what it left unfinished."""
    for part in owner.parts.values():
        if hasattr(part, "close"):
            part.close()


class Thread(greenlet, Owner):
    """One CUDA thread: `number` in its block, `lane` in its `warp`, its place as threadIdx."""

    size = 1  # a team of threads in lockstep has more

    def __init__(self, body: Callable[[], None], block: "Block", number: int, place: Any):
        super().__init__(body)
        self.block, self.number, self.lane, self.threadIdx = block, number, number % WARP, place
        self.warp, self.group = block.warps[number // WARP], block.groups[number // GROUP]
        self.parts = {}
        self.reason: Callable[[], str] = str  # why it waits, in words, made only for a report
        self.waits = ""  # what it waits at: syncthreads, a warp, or anything else
        self.answer: Any = None  # what a meeting gives it
        self.unfenced: list = []  # (memory, words) that it stored and no proxy fence followed

    def __str__(self) -> str:
        return f"block {self.block.index} thread {self.number}"

    @property
    def warps_of(self) -> list:
        """The warps that it acts for."""
        return [self.warp]

    def pause(self, waits: str, reason: Callable[[], str]) -> Any:
        """Let others run until somebody puts this thread into the queue again."""
        self.waits, self.reason = waits, reason
        self.parent.switch()
        return self.answer


class Meeting(Owner):
    """Threads that execute one instruction together: the lanes of a warp, a warpgroup."""

    def __init__(self, name: str, size: int):
        self.name, self.size, self.parts = name, size, {}
        self.came: dict[int, tuple[Thread, Any]] = {}
        self.key, self.arrived = "", 0

    def part(self, mask: int) -> "Meeting":
        """The lanes of a mask, as a separate meeting."""
        whole = (1 << self.size) - 1
        if mask & whole == whole:
            return self
        if mask not in self.parts:
            lanes = f"lanes {mask:#x} of {self.name}"
            self.parts[mask] = Meeting(lanes, (mask & whole).bit_count())
        return self.parts[mask]

    def meet(
        self, thread: Thread, key: str, value: Any, together: Callable[[list], Iterable]
    ) -> Any:
        """Wait for all; then `together(their values)` gives each its answer, in their order."""
        if self.came and key != self.key:
            fault("divergence", f"{key}, while others of {self.name} are at {self.key}")
        self.key = key
        self.came[thread.number] = thread, value
        self.arrived += thread.size
        if self.arrived < self.size:
            return thread.pause(
                "warp", lambda: f"{key}: {len(self.came)} of {self.size} of {self.name} are here"
            )
        came = [self.came[number] for number in sorted(self.came)]
        self.came, self.arrived = {}, 0
        for (other, _), answer in zip(came, together([value for _, value in came]), strict=True):
            other.answer = answer
            if other is not thread:
                thread.block.machine.queue.append(other)
        return thread.answer


class Block(Owner):
    """A block's threads by warps and warpgroups, and its place in grid and cluster."""

    def __init__(
        self, machine: "Machine", number: int, place: Place, rank: int, cluster: list, threads: int
    ):
        self.machine, self.number, self.blockIdx = machine, number, place
        self.rank, self.cluster, self.index = rank, cluster, tuple(place)
        self.parts: dict = {}
        self.warps = self._meetings("warp", WARP, threads)
        self.groups = self._meetings("warpgroup", GROUP, threads)
        for number, warp in enumerate(self.warps):
            warp.block, warp.group = self, self.groups[number * WARP // GROUP]
        for number, group in enumerate(self.groups):
            group.warps = self.warps[number * GROUP // WARP : (number + 1) * GROUP // WARP]
        self.threads: list[Thread] = []
        self.log: Any = None  # what the threads' accesses to arrays are written into

    @staticmethod
    def _meetings(name: str, size: int, threads: int) -> list[Meeting]:
        starts = range(0, threads, size)
        return [Meeting(f"{name} {n // size}", min(size, threads - n)) for n in starts]

    def settle(self) -> None:
        """Check the accesses logged so far, before anything that puts accesses in an order."""
        if self.log is not None:
            self.log.settle()


@dataclass
class Span:
    """Something that took from turn `begin` to turn `end`: a copy, a product, a wait."""

    what: str
    block: int
    start: int
    stop: int
    begin: int
    end: int = -1


class Machine:
    """The scheduler: threads that can run, effects that are still to come, and a record of the run.

    Without a seed threads run in order and effects (copies under way) come as late as they can.
    With one, both come in a random order, the same for the same seed.
    """

    def __init__(self, seed: int | None):
        self.random = random.Random(seed) if seed is not None else None
        self.queue: collections.deque[Thread] = collections.deque()
        self.effects: collections.deque[Callable[[], None]] = collections.deque()
        self.spinners: list[Thread] = []  # in a loop until somebody changes memory
        self.counts: collections.Counter = collections.Counter()
        self.tick = 0  # turns taken so far: the only clock here
        self.meetings = 0  # of warps in lockstep, so far
        self.spans: list[Span] = []
        self.watch: tuple[int, int] | None = None  # shared bytes of block 0, for a picture
        self.history: list[tuple[int, Any]] = []  # (turn, the state of each word) of those

    def span(self, what: str, block: Block, start: int, stop: int) -> Span:
        """Something begins that takes time, with the shared bytes start to stop of a block."""
        self.spans.append(Span(what, block.number, start, stop, self.tick))
        return self.spans[-1]

    def wake(self) -> None:
        """Memory has changed: threads that read it in a loop look again."""
        self.queue.extend(self.spinners)
        self.spinners.clear()

    def play(self, threads: list[Thread]) -> None:
        """Run these threads until all have ended."""
        self.queue.extend(threads)
        while self.queue or self.effects:
            if not self.queue or self._arrives():
                self._draw(self.effects)()
            else:
                self._turn()
        if any(not thread.dead for thread in threads):
            raise deadlock(threads)

    def _arrives(self) -> bool:
        return self.random and self.effects and self.random.random() < OFTEN

    def _turn(self) -> None:
        thread = self._draw(self.queue)
        thread.switch()
        log = thread.block.log
        if log is not None:
            log.mark(thread.number)

    def _draw(self, waiting: collections.deque) -> Any:
        if self.random:
            waiting.rotate(self.random.randrange(len(waiting)))
        self.tick += 1
        return waiting.popleft()


# %% sec-paper-threads
def deadlock(threads: list[Thread]) -> Fault:
    """The report of a deadlock: where each thread waits and for what, alike ones in one line."""
    alike = collections.defaultdict(list)
    for thread in threads:
        if not thread.dead:
            alike[thread.block.index, line(thread.gr_frame), thread.reason()].append(thread)
    lines = [
        f"  block {block} threads {ranges(t.number for t in them)} at {place}: {reason}"
        for (block, place, reason), them in alike.items()
    ]
    ended = sum(thread.dead for thread in threads)
    if ended:
        lines.append(f"  {ended} threads have ended")
    waits = {thread.waits for them in alike.values() for thread in them}
    kind = "divergence" if waits <= {"syncthreads", "warp"} else "deadlock"
    return Fault(kind, "nobody can run:\n" + "\n".join(lines))


def ranges(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)
