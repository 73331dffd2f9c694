"""Exchanges by copy engines, on a driver whose streams are threads and whose GPUs are this memory.

Ranks are threads of this process, so what the driver lends of another rank's memory is the memory
itself. Everything that is put on a stream may take its time, longer on one rank than on another.
"""

import ctypes
import queue
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from lazy_driver import Driver, Error, numbers
from test_exchange import fake_nccl

from nanoeuler.engines.gpu.host import libraries
from nanoeuler.engines.gpu.host.device import Device
from nanoeuler.engines.gpu.ranks import peer_copies, stepper
from nanoeuler.engines.gpu.ranks.exchange import Exchange, Join
from nanoeuler.engines.gpu.ranks.peer_copies import Peers
from nanoeuler.engines.ranks.threads import together
from nanoeuler.errors import UserError

EACH = 32  # float32 of a rank's part
STEPS = 4
PATIENCE = 20  # seconds after which a flag is not set any more
MAIN = 7  # the stream of launches


class Handle:
    """A handle of memory: 64 bytes."""

    def __init__(self):
        self.there = ctypes.create_string_buffer(64)

    def getPtr(self):
        return ctypes.addressof(self.there)


class Lanes(Driver):
    """A driver of one rank. slow(name): seconds before a thing of that name is done."""

    CUipcMemHandle = Handle
    CUipcMem_flags = numbers(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CUstreamWaitValue_flags = numbers(CU_STREAM_WAIT_VALUE_EQ=1)

    def __init__(self, slow):
        super().__init__(room=1 << 24)
        self.slow, self.lanes, self.signals, self.failed = slow, {}, {}, []

    def lane(self, stream):
        if stream not in self.lanes:
            self.lanes[stream] = queue.Queue()
            threading.Thread(target=self.work_on, args=(stream,), daemon=True).start()
        return self.lanes[stream]

    def work_on(self, stream):
        while True:
            name, act = self.lanes[stream].get()
            time.sleep(self.slow(name))
            try:
                act()
            except Exception as error:
                self.failed.append(error)

    def later(self, stream, name, act):
        self.lane(stream).put((name, act))
        return (0,)

    def wait_for_all(self):
        for stream in list(self.lanes):
            done = threading.Event()
            self.later(stream, "", done.set)
            assert done.wait(PATIENCE)
        if self.failed:
            raise self.failed[0]

    def cuCtxGetStreamPriorityRange(self):
        return 0, 0, -5

    def cuStreamCreateWithPriority(self, flags, priority):
        return 0, next(self.handles)

    def cuEventRecord(self, hEvent, hStream):
        self.signals[hEvent] = threading.Event()
        return self.later(hStream, "", self.signals[hEvent].set)

    def cuStreamWaitEvent(self, hStream, hEvent, Flags):
        return self.later(hStream, "", self.signals[hEvent].wait)

    def cuEventDestroy(self, hEvent):
        return (0,)

    def cuMemGetAddressRange(self, dptr):
        ((base, size),) = [(base, there.size) for base, there in self.taken.items()
                           if base <= dptr < base + there.size]  # fmt: skip
        return 0, base, size

    def cuIpcGetMemHandle(self, dptr):
        assert dptr in self.taken, "a handle is of a whole memory"
        made = Handle()
        ctypes.memmove(made.getPtr(), dptr.to_bytes(64, "little"), 64)
        return 0, made

    def cuIpcOpenMemHandle(self, handle, Flags):
        return 0, int.from_bytes(handle.there.raw, "little")

    def cuStreamWriteValue32(self, stream, addr, value, flags):
        def act():
            ctypes.c_uint32.from_address(addr).value = value

        return self.later(stream, "say", act)

    def cuStreamWaitValue32(self, stream, addr, value, flags):
        def act():
            end = time.monotonic() + PATIENCE
            while ctypes.c_uint32.from_address(addr).value != value:
                assert time.monotonic() < end, "nobody sets this flag"
                time.sleep(1e-4)

        return self.later(stream, "hear", act)

    def cuMemcpyDtoDAsync(self, dstDevice, srcDevice, ByteCount, hStream):
        return self.later(hStream, "copy", lambda: ctypes.memmove(dstDevice, srcDevice, ByteCount))


def numbers_of(rank, step, size):
    """What a rank has to give."""
    return np.random.default_rng((rank, step)).random(EACH * size, np.float32)


def seen(array):
    """An array's memory, as it is now."""
    there = (ctypes.c_float * array.shape[0]).from_address(array.address)
    return np.frombuffer(there, np.float32)


def train(group, kind, slow, wrong):
    """Steps in which parts are handed over, added and gathered; what is wrong goes on a list."""
    driver = Lanes(lambda name: slow(group.rank, name))
    device = Device.__new__(Device)
    device.driver, device.capturing, device.later = driver, False, []
    link = kind(device, group)
    size, rank = group.size, group.rank
    flat = device.array(np.zeros(EACH * size, np.float32))
    arena = device.array(np.zeros(EACH * size, np.float32))  # lent to others in turn
    space = device.part(arena, 4 * EACH, (EACH * (size - 1),), np.float32)
    mine = device.part(flat, 4 * EACH * rank, (EACH,), np.float32)
    copy = device.array(np.zeros(2 * EACH * size, np.float32))
    part = device.part(copy, 4 * EACH * rank, (EACH,), np.float32)
    first = device.part(copy, 0, (EACH * size,), np.float32)
    second = device.part(copy, 4 * EACH * size, (EACH * size,), np.float32)
    works = [
        Exchange("hand over", (flat, space), link), Join(link),
        Exchange("all-gather", (mine, flat), link),
        Exchange("all-gather", (part, first, mine, second), link), Join(link),
    ]  # fmt: skip
    hand, join, gather, pairs, last = [work.prepare(device) for work in works]

    def expect(what, got, want):
        if not np.array_equal(got, want):
            wrong.append(what)

    for step in range(STEPS):
        addends = [numbers_of(each, step, size) for each in range(size)]
        total = addends[rank].copy()
        for each in range(size):
            total += 0 if each == rank else addends[each]
        own = slice(EACH * rank, EACH * (rank + 1))

        def compute(step=step):
            """The backward pass: it needs the arena, and leaves gradients."""
            seen(arena)[:] = step
            time.sleep(slow(rank, "compute"))
            expect("somebody wrote where we work", seen(arena), np.full(EACH * size, step))
            seen(flat)[:] = numbers_of(rank, step, size)

        def add(own=own):
            """In the order of ranks, after our own."""
            for at in range(0, space.shape[0], EACH):
                seen(flat)[own] += seen(space)[at : at + EACH]
            seen(copy)[own] = 2 * seen(flat)[own]

        def judge(own=own, total=total, addends=addends):
            expect("a sum", seen(flat)[own], total[own])
            for each in range(size):
                its = slice(EACH * each, EACH * (each + 1))
                want = addends[each][its].copy()
                for other in range(size):
                    want += 0 if other == each else addends[other][its]
                expect("gathered", seen(flat)[its], want)
                expect("the first of two", seen(first)[its], 2 * want)
                expect("the second of two", seen(second)[its], want)

        driver.later(MAIN, "", compute)
        hand(MAIN)
        join(MAIN)
        driver.later(MAIN, "", add)
        gather(MAIN)
        pairs(MAIN)
        last(MAIN)
        driver.later(MAIN, "", judge)
    driver.wait_for_all()
    group.barrier()  # nobody's memory goes while another writes there
    return driver, flat, arena, copy


def faults(monkeypatch, size, slow, kind=Peers):
    """What went wrong in steps of so many ranks."""
    monkeypatch.setattr(libraries, "exchanges", lambda: fake_nccl([]))
    monkeypatch.setattr(peer_copies, "LEAST_COPIED", 4 * EACH)
    wrong = []
    together(size, lambda group: train(group, kind, slow, wrong))
    return wrong


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_sums_are_right_however_long_things_take(monkeypatch, size, seed):
    drawn = random.Random(seed)
    assert faults(monkeypatch, size, lambda rank, name: drawn.random() * 2e-3) == []


class Pushy(Peers):
    """Writes to others before they say that it may."""

    def await_flag(self, address):
        if (address - self.flags.address) % 8 == 0:
            self.set_flag(address, 0)
        else:
            super().await_flag(address)


class Hurried(Peers):
    """Does not wait for what others send."""

    def await_flag(self, address):
        if (address - self.flags.address) % 8:
            self.set_flag(address, 0)
        else:
            super().await_flag(address)


class Swapped(Peers):
    """Sends each rank the part of the one before."""

    def parts(self, kind, given, to):
        made = super().parts(kind, given, to)
        if kind == "all-gather":
            return made
        sources = [source for _, source, _ in made]
        return [(to, source, size) for (to, _, size), source in
                zip(made, sources[1:] + sources[:1], strict=True)]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "size", "slow", "says"),
    [
        (Pushy, 2, lambda rank, name: 0.02 * (rank == 0 and name == "compute"), "where we work"),
        (Hurried, 2, lambda rank, name: 0.02 * (rank == 1 and name == "copy"), "a sum"),
        (Swapped, 4, lambda rank, name: 0, "a sum"),
    ],
)
def test_what_does_not_wait_is_seen(monkeypatch, kind, size, slow, says):
    assert faults(monkeypatch, size, slow) == []
    assert any(says in each for each in faults(monkeypatch, size, slow, kind))


def test_what_is_small_and_what_is_broadcast_is_left_to_the_library(monkeypatch):
    notes = []
    monkeypatch.setattr(libraries, "exchanges", lambda: fake_nccl(notes))

    def act(group):
        driver = Lanes(lambda name: 0)
        device = Device.__new__(Device)
        device.driver, device.capturing, device.later = driver, False, []
        link = Peers(device, group)
        small = device.array(np.zeros(64 * group.size, np.float32))
        mine = device.part(small, 256 * group.rank, (64,), np.float32)
        group.barrier()
        notes.clear()
        group.barrier()
        for work in (Exchange("all-gather", (mine, small), link),
                     Exchange("broadcast", (small, small), link, (0,))):  # fmt: skip
            work.prepare(device)(MAIN)
        group.barrier()
        return link.plans

    assert together(2, act) == [{}, {}]
    assert sorted(n[0] for n in notes if not isinstance(n, str)) == ["allGather"] * 2 + [
        "broadcast"] * 2  # fmt: skip


@pytest.mark.parametrize(
    "wish, local, reached, name, why",
    [
        ("", 2, True, "copies", "all GPUs are on this machine"),
        ("", 1, True, "nccl", "ranks run on several machines"),
        ("", 2, False, "nccl", "a GPU here cannot write into another's memory"),
        ("nccl", 2, True, "nccl", "NANOEULER_EXCHANGES asks for it"),
        ("copies", 2, True, "copies", "all GPUs are on this machine"),
    ],
    ids=["one machine", "several", "no way", "nccl asked for", "copies asked for"],
)
def test_copies_carry_where_they_can(wish, local, reached, name, why, monkeypatch, capsys):
    monkeypatch.setattr(stepper, "gpu", lambda: None)
    monkeypatch.setattr(stepper, "reachable", lambda *a: reached)
    links = {name: lambda *a, name=name: name for name in stepper.LINKS}
    monkeypatch.setattr(stepper, "LINKS", links)
    monkeypatch.setenv(stepper.NUMBER, "0")
    monkeypatch.setenv(stepper.EXCHANGES, wish)
    for rank in 0, 1:
        group = SimpleNamespace(rank=rank, size=2, local=local)
        assert stepper.link_of.__wrapped__(group) == name
    assert capsys.readouterr().err == f"exchanges  {name}: {why}\n"  # once, by rank 0


@pytest.mark.parametrize(
    "wish, local, words",
    [
        ("pigeons", 2, "one of copies, nccl, and not 'pigeons'"),
        ("copies", 1, "is copies, but ranks run on several machines: say nccl"),
        ("copies", 2, "is copies, but a GPU here cannot write into another's memory: say nccl"),
    ],
)
def test_who_cannot_carry_is_not_asked_for(wish, local, words, monkeypatch):
    monkeypatch.setattr(stepper, "gpu", lambda: None)
    monkeypatch.setattr(stepper, "reachable", lambda *a: False)
    monkeypatch.setenv(stepper.EXCHANGES, wish)
    with pytest.raises(UserError, match=words):
        stepper.carrier(SimpleNamespace(rank=0, size=2, local=local))


class Refusing(Lanes):
    """A driver that refuses a call of this name; it counts the memory that it keeps open."""

    refused, opened = "", 0

    def cuIpcGetMemHandle(self, dptr):
        if self.refused == "lend":
            return Error(801, "NOT_SUPPORTED"), None
        return super().cuIpcGetMemHandle(dptr)

    def cuIpcOpenMemHandle(self, handle, Flags):
        if self.refused == "reach":
            return Error(217, "PEER_ACCESS_UNSUPPORTED"), None
        self.opened += 1
        return super().cuIpcOpenMemHandle(handle, Flags)

    def cuIpcCloseMemHandle(self, dptr):
        self.opened -= 1
        return (0,)


@pytest.mark.parametrize("refused", ["", "lend", "reach"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_knows_whether_all_reach_each_other(size, refused):
    """What the last one's driver refuses none has; nothing stays open, nor is it waited for."""

    def act(group):
        driver, device = Refusing(lambda name: 0), Device.__new__(Device)
        device.driver, device.capturing, device.later = driver, False, []
        driver.refused = refused if group.rank == size - 1 else ""
        return peer_copies.reachable(device, group), driver.opened

    assert together(size, act) == [(not refused, 0)] * size


def bare(link):
    """A device and a link of a rank, on a driver that takes no time."""
    driver, device = Lanes(lambda name: 0), Device.__new__(Device)
    device.driver, device.capturing, device.later = driver, False, []
    return driver, device, link(device)


def test_who_carries_goes_by_bytes_and_one_large_pair_takes_all(monkeypatch):
    """By what a rank has of it, in bytes; what is handed over NCCL could not even express."""
    monkeypatch.setattr(libraries, "exchanges", lambda: fake_nccl([]))
    monkeypatch.setattr(peer_copies, "LEAST_COPIED", 256)

    def act(group):
        _, device, link = bare(lambda device: Peers(device, group))

        def pair(n, dtype):
            whole = device.array(np.zeros(2 * n, dtype))
            return device.part(whole, n * whole.dtype.itemsize * group.rank, (n,), dtype), whole

        less, enough = pair(63, np.float32), pair(64, np.float32)
        halves, doubled = pair(127, np.uint16), pair(128, np.uint16)
        flat, space = (device.array(np.zeros(n, np.float32)) for n in (8, 4))
        carried = []
        for kind, args in (("all-gather", less), ("all-gather", enough), ("all-gather", halves),
                           ("all-gather", doubled), ("all-gather", (*less, *enough)),
                           ("hand over", (flat, space))):  # fmt: skip
            work = Exchange(kind, args, link)
            work.prepare(device)
            carried.append(work in link.plans)
        return carried

    assert together(2, act) == [[False, True, False, True, True, True]] * 2


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_its_memory_elsewhere(monkeypatch, size):
    """What is exchanged begins at other places of other ranks' memories, and has 2 bytes each."""
    monkeypatch.setattr(libraries, "exchanges", lambda: fake_nccl([]))
    monkeypatch.setattr(peer_copies, "LEAST_COPIED", 1)

    def act(group):
        driver, device, link = bare(lambda device: Peers(device, group))
        rank, at = group.rank, 64 * (1 + group.rank)
        room = device.array(np.zeros(4096, np.uint8))
        flat = device.part(room, at, (EACH * size,), np.uint16)
        mine = device.part(room, at + 2 * EACH * rank, (EACH,), np.uint16)
        here = np.frombuffer((ctypes.c_uint16 * (EACH * size)).from_address(flat.address),
                             np.uint16)  # fmt: skip
        here[EACH * rank : EACH * (rank + 1)] = 1 + rank
        group.barrier()
        for work in Exchange("all-gather", (mine, flat), link), Join(link):
            work.prepare(device)(MAIN)
        driver.wait_for_all()
        group.barrier()
        everything = np.frombuffer((ctypes.c_uint8 * 4096).from_address(room.address), np.uint8)
        around = everything[:at].any() or everything[at + 2 * EACH * size :].any()
        return here.tolist(), bool(around)

    want = np.repeat(np.arange(1, size + 1), EACH).tolist()
    assert together(size, act) == [(want, False)] * size


def test_flags_do_not_run_over(monkeypatch):
    """Two exchanges of two ranks take eight flags; for a third there are none."""
    monkeypatch.setattr(libraries, "exchanges", lambda: fake_nccl([]))
    monkeypatch.setattr(peer_copies, "FLAGS", 8)
    monkeypatch.setattr(peer_copies, "LEAST_COPIED", 1)

    def act(group):
        _, device, link = bare(lambda device: Peers(device, group))
        whole = device.array(np.zeros(16, np.float32))
        mine = device.part(whole, 32 * group.rank, (8,), np.float32)
        ends = link.flags.address + 4 * 8
        for _ in range(2):
            work = Exchange("all-gather", (mine, whole), link)
            work.prepare(device)
            assert all(link.flags.address <= at < ends for pair in link.plans[work].flags
                       for at in pair)  # fmt: skip
        every = [at for plan in link.plans.values() for pair in plan.flags for at in pair]
        assert len(set(every)) == len(every) == 8, "each has flags of its own"
        with pytest.raises(AssertionError, match="more exchanges than there are flags"):
            Exchange("all-gather", (mine, whole), link).prepare(device)
        return True

    assert together(2, act) == [True] * 2
