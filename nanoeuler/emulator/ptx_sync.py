# Made from book/h-ptx-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ptx-waits
"""PTX instructions that synchronize: mbarriers, named and cluster barriers, fences.

PTX ISA, "Parallel Synchronization and Communication Instructions".
"""

from nanoeuler.emulator.barriers import named_barrier
from nanoeuler.emulator.machine import Block, Thread, fault
from nanoeuler.emulator.machine import getcurrent as current
from nanoeuler.emulator.memory import CLUSTER_BIT, UNFENCED, USED, WINDOW, shared
from nanoeuler.emulator.ptx_parser import op
from nanoeuler.emulator.vector_clocks import acquire, clock, release

MOST = (1 << 20) - 1  # arrivals, and bytes, that one phase can count: PTX ISA, "mbarrier object"


class Mbarriers(dict):
    """The mbarriers of a block, by their byte; `bare`: without a fence after their init."""

    def __init__(self, block: Block):
        super().__init__()
        self.block, self.clock, self.bare = block, clock(block), set()


class Mbarrier:
    """Counts arrivals and bytes; when none is missing the phase is over and the next begins."""

    def __init__(self, count: int, start: int, thread: Thread):
        self.block, self.start = thread.block, start
        self.clock = clock(thread.block)
        self.count = self.missing = count
        self.phase, self.bytes, self.waiting = 0, 0, []
        self.maker, self.made = thread.warp.actor, int(thread.warp.known[thread.warp.actor])
        where = f"the mbarrier at byte {start} of block {self.block.index}"
        self.actor = self.clock.writer(f"a copy counted by {where}")
        self.arrived, self.known = self.clock.new(), self.clock.new()

    def update(self) -> None:
        """End the phase if nothing is missing, and wake the threads that wait for that."""
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count
            self.known = self.arrived.copy()
            self.known[self.actor] = self.phase
            self.block.machine.queue.extend(self.waiting)
            self.waiting.clear()

    def arrive(self) -> None:
        """One arrival, of the current thread."""
        if self.missing == 0:
            fault("misuse", f"more arrivals than the mbarrier at byte {self.start} counts")
        self.missing -= 1
        release(current().warp, self.arrived)
        self.update()

    def __str__(self) -> str:
        return (
            f"mbarrier at byte {self.start}, in phase {self.phase}, lacks {self.missing} of "
            f"{self.count} arrivals and {self.bytes} bytes"
        )


def mbarrier(address: int) -> Mbarrier:
    """The mbarrier at a shared address."""
    memory, start = shared(address)
    found = memory.block.of(Mbarriers).get(start)
    if not found:
        fault("misuse", f"no mbarrier is at shared byte {start}")
    if found.made > current().warp.known[found.maker]:
        fault("race", f"the mbarrier at byte {start}: this warp has not waited for its init")
    return found


@op(r"mbarrier\.init\.shared(?:::cta)?\.b64")
def init(address: int, count: int) -> None:
    """Make one; others may use it after a fence and a barrier."""
    thread = current()
    memory, start = shared(address)
    if start % 8 or start < WINDOW or start + 8 > memory.end or not memory.flags[start // 4] & USED:
        fault("bounds", f"an mbarrier at shared byte {start}: no multiple of 8, or outside")
    if not 1 <= count <= MOST:
        fault("misuse", f"an mbarrier for {count} arrivals")
    thread.block.settle()
    mbarriers = thread.block.of(Mbarriers)
    mbarriers[start] = Mbarrier(count, start, thread)
    mbarriers.bare.add(start)


@op(r"fence\.mbarrier_init\.release\.cluster")
def init_fence() -> None:
    """The copy engine and other blocks see the mbarriers made so far."""
    current().block.of(Mbarriers).bare.clear()


@op(r"mbarrier\.arrive\.expect_tx\.shared(?:::cta)?\.b64", 1)
def expect(address: int, size: int) -> None:
    """One arrival, and so many bytes more have to come."""
    found = mbarrier(address)
    found.bytes += size
    found.arrive()


@op(r"mbarrier\.arrive\.shared(?:::cta|::cluster)?\.b64", 1)
def arrive(address: int) -> None:
    """One arrival."""
    mbarrier(address).arrive()


@op(r"mapa\.shared::cluster\.u32", 1)
def map_rank(address: int, rank: int) -> int:
    """The same place in another block's memory."""
    return address & (1 << CLUSTER_BIT) - 1 | rank << CLUSTER_BIT


@op(r"mbarrier\.try_wait\.parity\.shared(?:::cta)?\.b64", 1)
def wait(address: int, parity: int) -> bool:
    """Wait for the end of a phase of this parity; true then."""
    thread, found = current(), mbarrier(address)
    span = None
    while found.phase & 1 == parity:
        if span is None:
            what = f"wait {thread.warp.name}"
            span = thread.block.machine.span(what, thread.block, found.start, found.start + 8)
        found.waiting.append(thread)
        thread.pause("mbarrier", lambda: f"parity {parity} of the {found}")
    if span:
        span.end = thread.block.machine.tick
    acquire(thread.warp, found.known)
    return True


@op(r"bar(?:rier)?\.sync(?:\.aligned)?")
def bar_sync(number: int, count: int) -> None:
    """Wait at a named barrier."""
    named_barrier(number, count, wait=True)


@op(r"bar(?:rier)?\.arrive(?:\.aligned)?")
def bar_arrive(number: int, count: int) -> None:
    """Arrive at a named barrier and go on."""
    named_barrier(number, count, wait=False)


class ClusterBarrier:
    """Where all threads of a cluster meet; kept by its first block."""

    def __init__(self, block: Block):
        self.count = sum(len(other.threads) for other in block.cluster)
        self.clock = clock(block)
        self.begin()

    def begin(self) -> None:
        """A new round."""
        self.arrivals, self.waiting, self.known = 0, [], self.clock.new()


@op(r"barrier\.cluster\.arrive(?:\.release|\.relaxed)?\.aligned")
def cluster_arrive() -> None:
    """Arrive at the cluster's barrier and go on."""
    thread = current()
    barrier = thread.block.cluster[0].of(ClusterBarrier)
    thread.parts["cluster barrier"] = barrier.known
    barrier.arrivals += 1
    release(thread.warp, barrier.known)
    if barrier.arrivals == barrier.count:
        thread.block.machine.queue.extend(barrier.waiting)
        barrier.begin()


@op(r"barrier\.cluster\.wait(?:\.acquire)?\.aligned")
def cluster_wait() -> None:
    """Wait until all threads of the cluster have come."""
    thread = current()
    barrier = thread.block.cluster[0].of(ClusterBarrier)
    known = thread.parts.pop("cluster barrier", None)
    if known is None:
        fault("misuse", "a wait at the cluster's barrier without having come there")
    if barrier.known is known:
        barrier.waiting.append(thread)
        thread.pause(
            "cluster", lambda: f"cluster: {barrier.arrivals} of {barrier.count} threads have come"
        )
    acquire(thread.warp, known)


@op(r"fence\.proxy\.async(?:\.shared::cta)?")
def proxy_fence() -> None:
    """From here on copies and tensor cores see this thread's stores to shared memory."""
    thread = current()
    thread.block.settle()
    for memory, words in thread.unfenced:
        memory.flags[words] &= ~UNFENCED & 0xFF
    thread.unfenced.clear()
    memory = shared(WINDOW | thread.block.rank << CLUSTER_BIT)[0]
    for threads, words in memory.stores:
        memory.flags[words[threads == thread.number]] &= ~UNFENCED & 0xFF
    memory.stores = [s for s in memory.stores if (memory.flags[s[1]] & UNFENCED).any()]
    memory.note()


@op(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32")
def registers(way: str, count: int) -> None:
    """The warpgroup's registers grow or shrink to `count` a thread."""
    if count % 8 or not 24 <= count <= 256:
        fault("misuse", f"setmaxnreg to {count}: a multiple of 8 from 24 to 256")
    thread = current()
    thread.warp.meet(thread, f"setmaxnreg.{way} {count}", None, lambda values: values)
