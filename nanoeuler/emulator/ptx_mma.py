# Made from book/h-ptx-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ptx-tensor
"""PTX instructions of the tensor cores: fragments to and from shared memory, mma, wgmma.

PTX ISA, "Warp Level Matrix Instructions", "Asynchronous Warpgroup Level Matrix Instructions".
Sums are float64, rounded to float32 after each 16 of k: what a tensor core does is not known.
"""

import collections

import numpy as np

from nanoeuler.emulator import fragments
from nanoeuler.emulator.counters import wavefronts
from nanoeuler.emulator.cuda import Local
from nanoeuler.emulator.dtypes import Register, from_bf16
from nanoeuler.emulator.machine import GROUP, WARP, Meeting, Thread, fault
from nanoeuler.emulator.machine import getcurrent as current
from nanoeuler.emulator.memory import CLUSTER_BIT, Shared, shared
from nanoeuler.emulator.ptx_parser import op

# The maps that are looked up at each product.
ACCUMULATOR = {n: fragments.accumulator(n) for n in range(8, 257, 8)}
OPERAND = fragments.operand()  # of A, in registers


def rows(addresses: np.ndarray) -> tuple[Shared, np.ndarray]:
    """The words of the rows of 8 x 8 matrices: (warps, matrix, row, 4).

    addresses (warps, 8 count): of a warp, number 8 m + r is that of row r of matrix m.
    """
    rank, start = addresses >> CLUSTER_BIT, addresses & (1 << CLUSTER_BIT) - 1
    if (rank != rank[0, 0]).any() or (start % 16).any():
        fault("misuse", "matrix rows in two blocks, or at addresses that are no multiples of 16")
    words = (start[:, :, None] // 4 + np.arange(4)).reshape(len(start), -1, 8, 4)
    return shared(int(addresses[0, 0]))[0], words


def note(what: str, words: np.ndarray) -> None:
    """Count the rounds of shared memory for warps' rows of 16 bytes: eight rows go at once."""
    counts = current().block.machine.counts
    for row in 4 * words[..., 0].reshape(len(words), -1):  # a warp's pattern is remembered
        table = np.pad(row, (0, -len(row) % WARP), constant_values=-1)[None]
        counts[f"shared {what} wavefronts"] += wavefronts(table, 16)
    counts[f"shared {what}"] += len(words)


def turned(words: np.ndarray, trans: str | None) -> np.ndarray:
    """Rows of matrices (..., 8, 4) uint32, two numbers to a word; turned over where `trans` is."""
    if not trans:
        return words
    halves = np.ascontiguousarray(words).view(np.uint16)
    return np.ascontiguousarray(halves.swapaxes(-2, -1)).view(np.uint32)


# The mnemonics after ld and st: how many matrices, and whether they are turned over.
MATRICES = r"matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16"


@op("ld" + MATRICES, lambda count, trans: int(count))
def ldmatrix(count: str, trans: str | None, address: int) -> int | list[int]:
    """A warp's 8 x 8 matrices from shared memory: lane 4 r + c gets (r, 2 c) and (r, 2 c + 1)."""
    thread, count = current(), int(count)

    def together(addresses):
        memory, words = rows(np.array(addresses[: 8 * count])[None])
        note("loads", words)
        pairs = turned(memory.read(words), trans).view(np.int32).reshape(count, WARP).T.tolist()
        return pairs if count > 1 else [pair for (pair,) in pairs]

    return thread.warp.meet(thread, "ldmatrix", address, together)


@op("st" + MATRICES)
def stmatrix(count: str, trans: str | None, address: int, *pairs: int) -> None:
    """The other way round."""
    thread, count = current(), int(count)

    def together(values):
        memory, words = rows(np.array([value[0] for value in values[: 8 * count]])[None])
        note("stores", words)
        data = np.array([value[1:] for value in values], np.int64).astype(np.uint32)
        memory.write(words, turned(data.T.reshape(1, count, 8, 4), trans))
        each = words.reshape(-1, 4)
        return [(memory, each[lane::32]) for lane in range(len(values))]

    thread.unfenced.append(thread.warp.meet(thread, "stmatrix", (address, *pairs), together))


def lefts(pairs: np.ndarray) -> np.ndarray:
    """A of warps (n, 16, 16) float32 from their registers [warp, lane, 4]."""
    a = np.empty((len(pairs), 16, 16), np.uint16)
    halves = np.ascontiguousarray(pairs).astype(np.uint32).view(np.uint16)
    a[:, OPERAND[0][:32], OPERAND[1][:32]] = halves.reshape(-1, 32, 4, 2)
    return from_bf16(a)


def rights(pairs: np.ndarray) -> np.ndarray:
    """B of warps (n, 16, 8) float32 from their registers [warp, lane, 2]."""
    b = np.empty((len(pairs), 8, 16), np.uint16)
    lane, i, h = np.ogrid[:32, :2, :2]
    halves = np.ascontiguousarray(pairs).astype(np.uint32).view(np.uint16)
    b[:, lane // 4 + 0 * (i + h), lane % 4 * 2 + i * 8 + h] = halves.reshape(-1, 32, 2, 2)
    return from_bf16(b).swapaxes(1, 2)


def summed(total: np.ndarray | float, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A B + total in float32, rounded once: each element the same, wherever it is.

    A library's float32 product sums the last rows of a matrix in another order than the others, on
    some processors. In float64 products of bf16 are exact, and their sum is to 1e-15.
    """
    return (total + a.astype(np.float64) @ b).astype(np.float32)


ROW, COLUMN = (part[:32] for part in ACCUMULATOR[8])  # of a warp's sums, by lane and register


def sums(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A B + C as warps' registers [warp, lane, 4], C given so."""
    total = np.empty((len(c), 16, 8), np.float32)
    total[:, ROW, COLUMN] = c
    current().block.machine.counts["tensor FLOPs"] += 2 * 16 * 8 * 16 * len(c)
    return summed(total, a, b)[:, ROW, COLUMN]


def multiply_all(plan: list, held: list[np.ndarray]) -> None:
    """Many mma in a row, on arrays of registers [warp, lane, register], in place.

    plan: of each, D, A, B and C as (which of the arrays, the first of its registers there).
    """
    left: dict = {}
    right: dict = {}
    for (d, to), of_a, of_b, (c, at) in plan:
        for made, make, (n, i), count in (left, lefts, of_a, 4), (right, rights, of_b, 2):
            if (n, i) not in made:
                made[n, i] = make(held[n][:, :, i : i + count])
        held[d][:, :, to : to + 4] = sums(held[c][:, :, at : at + 4], left[of_a], right[of_b])


def mma_many(plan: list, *arrays: Local) -> None:
    """Many mma in a row: the same as one by one, and sooner done."""
    thread = current()

    def together(values: list) -> list:
        held = [np.array([lane[n].base for lane in values])[None] for n in range(len(arrays))]
        multiply_all(plan, held)
        for n in {d for (d, _), *_ in plan}:
            for lane, registers in zip(values, held[n][0], strict=True):
                lane[n].base[...] = registers
        return [None] * len(values)

    thread.warp.meet(thread, "mma.sync", arrays, together)


@op(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32", 4, many=mma_many)
def mma(*registers: Register) -> np.ndarray:
    """D (16 x 8) = A (16 x 16) B (16 x 8) + C, in the registers of a warp: A 4, B 2, C 4 a lane."""
    thread = current()

    def together(values):
        pairs = np.array([value[:6] for value in values], np.int64)[None]
        c = np.array([value[6:] for value in values], np.float32)[None]
        return sums(c, lefts(pairs[:, :, :4]), rights(pairs[:, :, 4:]))[0]

    return thread.warp.meet(thread, "mma.sync", registers, together)


class Products:
    """A thread's wgmmas: not committed, and groups under way; `fenced`: registers are in order."""

    def __init__(self, thread: Thread):
        self.open: list = []
        self.groups: collections.deque = collections.deque()
        self.fenced = False

    def close(self) -> None:
        """The thread ends."""
        if self.open or self.groups:
            fault("flight", "a thread ends with a wgmma that it never waited for")


class Accumulators:
    """A warpgroup's sums whose values are not in registers yet, and its count of groups."""

    def __init__(self, group: Meeting):
        self.epoch, self.sums = 0, {}


@op(r"wgmma\.fence\.sync\.aligned")
def fence() -> None:
    """Registers written so far may be used by wgmma."""
    current().of(Products).fenced = True


# Columns; bf16 operands and float32 sums only.
WGMMA = r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16"


@op(WGMMA, vectors=True)
def wgmma(n: str, into: tuple, a: int | tuple, b: int, keep: bool, *flags: int) -> None:
    """D (64 x n) = A B or D + A B, queued. A and B are given by descriptors, or A in registers."""
    columns, (registers, first, count), products = int(n), into, current().of(Products)
    if columns not in ACCUMULATOR or count != columns // 2:
        fault("misuse", f"a wgmma of {n} columns with {count} registers")
    if not products.fenced:
        fault("flight", "a wgmma with no wgmma.fence since registers were used")
    if len(flags) != (3 if isinstance(a, tuple) else 4) or flags[:2] != (1, 1):
        fault("misuse", f"a wgmma with flags {flags}: scales are 1, then the majors of A and B")
    registers.lend()
    majors = flags[2:]
    if isinstance(a, tuple):
        a[0].feed()
        majors = (0, *majors)
    products.open.append((columns, registers, first, a, b, bool(keep), majors))


@op(r"wgmma\.commit_group\.sync\.aligned")
def commit() -> None:
    """The products since the last commit are a group, and are under way."""
    thread = current()
    products = thread.of(Products)
    mine, products.open = products.open, []
    flight = thread.group.meet(thread, "wgmma.commit_group", mine, multiply)
    products.groups.append((mine, flight))


class Flight:
    """One group of a warpgroup's products: what it has borrowed, and the sums to hand out."""

    def __init__(self, epoch: int):
        self.epoch, self.borrowed, self.last, self.fragments = epoch, [], {}, {}


def multiply(queues: list[list]) -> list["Flight"]:
    """One group of a warpgroup: each thread gets the Flight."""
    thread = current()
    thread.block.settle()
    own = thread.group.of(Accumulators)
    own.epoch += 1
    flight = Flight(own.epoch)
    if len({len(queue) for queue in queues}) > 1:
        fault("divergence", "threads of a warpgroup have started different numbers of wgmmas")
    for calls in zip(*queues, strict=True):
        columns, registers, first, a, b, keep, (a_mn, b_mn) = calls[0]
        same = (columns, first, b, keep, (a_mn, b_mn))
        if any((c[0], c[2], c[4], c[5], c[6]) != same for c in calls):
            fault("divergence", "threads of a warpgroup give a wgmma different operands")
        key = id(registers), first
        if key not in own.sums:
            total = np.empty((64, columns), np.float32)
            parts = [c[1].part(first, columns // 2) for c in calls]
            total[ACCUMULATOR[columns]] = np.concatenate(parts)
        else:
            total = own.sums[key][0]
        right = behind(flight, b, columns, bool(b_mn))
        if isinstance(a, tuple):
            left = np.empty((64, 16), np.uint16)
            pairs = np.concatenate([c[3][0].part(c[3][1], 4) for c in calls])
            pairs = np.ascontiguousarray(pairs, np.int32).view(np.uint16)
            left[OPERAND] = pairs.reshape(GROUP, 4, 2)
            left = from_bf16(left)
        else:
            if any(c[3] != a for c in calls):
                fault("divergence", "threads of a warpgroup give a wgmma different operands")
            left = behind(flight, a, 64, bool(a_mn))
        total = summed(total if keep else 0.0, left, right.T)
        own.sums[key] = total, registers  # registers: so that its id stays its own
        flight.last[key] = columns, total
        thread.block.machine.counts["tensor FLOPs"] += 2 * 64 * columns * 16
    flight.fragments = {key: total[ACCUMULATOR[n]] for key, (n, total) in flight.last.items()}
    return [flight] * len(queues)


def behind(flight: Flight, descriptor: int, count: int, mn_major: bool) -> np.ndarray:
    """The operand (count, 16) that a descriptor means; PTX ISA, "Matrix descriptor"."""
    thread = current()
    start, leading, stride = (
        (descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32)
    )
    if descriptor >> 62 & 3 != 1 or descriptor >> 49 & 7:
        fault("misuse", "a descriptor without the 128-byte swizzle, or with an offset of its base")
    if not mn_major and stride < 1024:
        fault("misuse", f"a descriptor whose groups of 8 rows are {stride} bytes apart")
    memory = thread.block.of(Shared)
    low = start & ~1023
    halves, words = fragments.matrix(start & 1023, leading, stride, count, mn_major)
    words = words + low // 4
    group = thread.group
    known = np.minimum.reduce([warp.known for warp in group.warps])  # each warp has to know
    actors = [warp.products for warp in group.warps]
    memory.lend(words, "a wgmma", known, actors, flight.epoch)
    first, last = 4 * int(words[0]), 4 * int(words[-1]) + 4
    span = thread.block.machine.span(f"wgmma {group.name}", thread.block, first, last)
    flight.borrowed.append((memory, words, span))
    return from_bf16(memory.halves[halves + low // 2])


@op(r"wgmma\.wait_group\.sync\.aligned")
def wait(most: int) -> None:
    """Wait until at most `most` groups are under way; the registers of the others are back."""
    thread = current()
    products = thread.of(Products)
    if products.open:
        fault("flight", "a wait for a wgmma that was not committed")
    products.fenced = False
    thread.warp.meet(thread, "wgmma.wait_group", None, lambda values: values)
    thread.block.settle()
    while len(products.groups) > most:
        mine, flight = products.groups.popleft()
        # One warp's wait tells that the whole warpgroup's operands are read.
        for warp in thread.warps_of:
            for other in thread.group.warps:
                warp.known[other.products] = max(warp.known[other.products], flight.epoch)
        for memory, words, span in flight.borrowed:
            memory.give_back(words)
            span.end = thread.block.machine.tick
        flight.borrowed = []
        hand_out(mine, thread, flight)
        sums = thread.group.of(Accumulators).sums
        for key, (_, total) in flight.last.items():
            if key in sums and sums[key][0] is total:  # nothing later is under way
                del sums[key]


def hand_out(calls: list, thread: Thread, flight: Flight) -> None:
    """Put a thread's parts of the sums into its registers, and give registers back."""
    keys = list(dict.fromkeys(flight.fragments))
    for _, registers, _, a, *_ in calls:
        registers.give_back()
        if isinstance(a, tuple):
            a[0].fed()
    own = slice(thread.number % GROUP, thread.number % GROUP + thread.size)
    for key, (_, registers, first) in zip(keys, distinct(calls), strict=True):
        registers.put(first, flight.fragments[key][own])


def distinct(calls: list) -> list[tuple]:
    """The accumulators of some wgmmas, each once, in order."""
    return list({(id(c[1]), c[2]): (c[0], c[1], c[2]) for c in calls}.values())
