# Made from book/h-ptx-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ptx-abreast
"""PTX instructions for a team of threads in lockstep; those without a form here go one by one.

A function takes the operands that the families' own take, where any may be Lanes. Results of
arithmetic are the same to the last bit: where NumPy's vectors might round otherwise, Python's
functions are used.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from nanoeuler.emulator import dtypes, ptx_copy, ptx_math, ptx_memory, ptx_mma, ptx_parser, ptx_sync
from nanoeuler.emulator.lockstep import (
    UNDEFINED,
    Apart,
    Lanes,
    Registers,
    active,
    by_warps,
    float32,
    from_warps,
    merge,
    negate,
    shuffle,
    split,
    spread,
)
from nanoeuler.engines.gpu.lang.instruction import Instruction

# isort: split


from nanoeuler.emulator.barriers import check_named, come
from nanoeuler.emulator.dtypes import from_bf16, int32, int64
from nanoeuler.emulator.machine import MOST_THREADS, WARP
from nanoeuler.emulator.machine import getcurrent as current
from nanoeuler.emulator.memory import CLUSTER_BIT, UNFENCED, Shared
from nanoeuler.emulator.ptx_parser import Operation, Statement, Translation

WIDE: dict[Callable, Callable] = {}  # a family's function -> the one for a team


def wide(*ones: Callable) -> Callable:
    """Register a replacement for these functions of the families."""

    def register(act: Callable) -> Callable:
        for one in ones:
            WIDE[one] = act
        return act

    return register


def scalars(value: Any) -> Any:
    """The values of a team's threads, one by one."""
    if not isinstance(value, Lanes):
        return None
    value = value.view(np.ndarray)
    return list(value) if value.dtype == np.float32 else value.tolist()


def each(act: Callable, *args: Any) -> Any:
    """Act for each active thread, one after the other."""
    team = current()
    if plain_of(act) not in PURE:
        team.alone(int(plain_of(act) in FAR))
    if plain_of(act) in ATOMIC and team.count > 1:
        raise Apart  # the threads' order decides on the values found, or on a sum's rounding
    lists, answers = [scalars(arg) for arg in args], []
    who = team.active()
    for n in who:
        team.acting = team.seats[n]
        own = [arg if of is None else of[n] for of, arg in zip(lists, args, strict=True)]
        answers.append(act(*own))
    team.acting = team.seats[who[0]]
    if len(who) == 1 and team.size == 1:
        return answers[0]
    if isinstance(answers[0], tuple | list | np.ndarray):
        return tuple(together(column) for column in zip(*answers, strict=True))
    return together(answers)


def together(answers: list) -> Any:
    """A value of each active thread as Lanes."""
    first = answers[0]
    if first is None:
        return None
    if isinstance(first, np.floating):
        return spread(np.array(answers, np.float32))
    return spread(np.array(answers, bool if type(first) is bool else np.int64))


def plain_of(act: Callable) -> Callable:
    """A family's function, without the matches of its pattern's groups."""
    return getattr(act, "func", act)


def once(act: Callable, *args: Any) -> Any:
    """Act once for all: the whole team, as one."""
    team = current()
    if team.mask is not None:
        raise Apart
    if plain_of(act) in MEETINGS:
        team.met()
    return once_for_any(act, *args)


def once_for_any(act: Callable, *args: Any) -> Any:
    """Act once, whichever threads are active: it does not matter how often."""
    return act(*[arg.same().item() if isinstance(arg, Lanes) else arg for arg in args])


def once_a_warp(act: Callable, *args: Any) -> Any:
    """Act for one thread of each warp, on behalf of the warp."""
    if any(isinstance(arg, Lanes) for arg in args):
        return each(act, *args)
    team = current()
    team.alone(0)
    who, answer = team.active(), None
    for n in who[np.unique((team.first + who) // WARP, return_index=True)[1]]:
        team.acting = team.seats[n]
        answer = act(*args)
    team.acting = team.seats[who[0]]
    return answer


def bits_of(value: Any) -> np.ndarray:
    """Registers of 32 bits as uint32."""
    value = np.asarray(value)
    if value.dtype == np.float32:
        return value.view(np.uint32)
    return value.astype(np.int64, copy=False).astype(np.uint32)


def signed(word: np.ndarray) -> Lanes:
    """uint32 -> int32 in int64."""
    return word.astype(np.uint32, copy=False).view(np.int32).astype(np.int64).view(Lanes)


def floats(value: Any) -> np.ndarray:
    """An operand as float32."""
    return np.asarray(value, np.float32) if not isinstance(value, Lanes) else value.view(np.ndarray)


def flush(value: np.ndarray) -> Lanes:
    """float32 Lanes of values; what is too small for a normal number is a zero of its sign."""
    small, tiny = value.astype(np.float32, copy=False), np.abs(value) < ptx_math.LEAST
    if np.count_nonzero(tiny):
        small = np.where(tiny, np.copysign(np.float32(0), small), small)
    return small.view(Lanes)


@wide(ptx_math.exponential)
def exponential(ftz: str | None, x: Lanes) -> Lanes:
    """2^x, with Python's power, which is the same on every processor."""
    given = x.view(np.ndarray).astype(np.float64)
    inside = (given < 128) & (given > -1000)
    y = np.array([2.0**one for one in np.where(inside, given, 0.0).tolist()])
    if np.count_nonzero(inside) < len(inside):
        y = np.where(given >= 128, np.inf, np.where(given <= -1000, 0.0, y))
        y = np.where(given == given, y, given)
    return flush(y) if ftz else y.astype(np.float32).view(Lanes)


@wide(ptx_math.logarithm)
def logarithm(ftz: str | None, x: Lanes) -> Lanes:
    """Base 2."""
    return np.log2(flush(x) if ftz else floats(x)).view(Lanes)


@wide(ptx_math.approximate)
def approximate(name: str, ftz: str | None, x: Lanes) -> Lanes:
    """1 / x, 1 / sqrt(x), sqrt(x), tanh(x)."""
    x = np.asarray(flush(x) if ftz else x, np.float64)
    y = ptx_math.APPROXIMATE[name](x)
    return flush(y) if ftz else y.astype(np.float32).view(Lanes)


@wide(ptx_math.extreme)
def extreme(name: str, a: Any, b: Any) -> Lanes:
    """The larger or smaller, and 0 is larger than -0; a nan gives way to a number."""
    a, b = floats(a), floats(b)
    chosen = np.where(((a > b) | (a == b) & np.signbit(b)) == (name == "max"), a, b)
    return np.where(a != a, b, np.where(b != b, a, chosen)).view(Lanes)


@wide(ptx_math.fused)
def fused(a: Any, b: Any, c: Any) -> Lanes:
    """a b + c, rounded once."""
    a, b, c = (floats(x).astype(np.float64) for x in (a, b, c))
    product = a * b
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    odd = (lost < 0) | (lost > 0)
    odd &= (np.asarray(total).view(np.int64) & 1) == 0
    total = np.where(odd, np.nextafter(total, np.copysign(np.inf, lost)), total)
    return total.astype(np.float32).view(Lanes)


def half(value: Any) -> np.ndarray:
    """The bits of the nearest bf16, in uint32."""
    x = bits_of(floats(value))
    nearest = (x + np.uint32(0x7FFF) + (x >> 16 & 1)) >> 16
    return np.where((x & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FFF), nearest)


@wide(ptx_math.rounded)
def rounded(value: Any) -> Lanes:
    """The bits of the bf16 that is nearest."""
    return half(value).astype(np.int64).view(Lanes)


@wide(ptx_math.pack)
def pack(high: Any, low: Any) -> Lanes:
    """Two float32 as bf16 in one register."""
    both = np.empty((2, current().size), np.float32)
    both[0], both[1] = floats(high), floats(low)
    above, below = half(both)
    return signed(above << 16 | below)


@wide(ptx_math.extreme_pair)
def extreme_pair(name: str, a: Any, b: Any) -> Lanes:
    """`extreme` of both halves."""
    low, high = (
        half(extreme(name, *(from_bf16(bits_of(x) >> by & 0xFFFF) for x in (a, b))))
        for by in (0, 16)
    )
    return signed(high << 16 | low)


def shifted(bits: int, act: Callable) -> Callable:
    """A shift by up to all bits, of registers as unsigned numbers."""

    def of(a: Any, n: Any) -> Lanes:
        a = bits_of(a) if bits == 32 else np.asarray(a, np.int64).view(np.uint64)
        n = np.asarray(n).astype(a.dtype)
        moved = np.where(n < bits, act(a, np.minimum(n, bits - 1)), 0).astype(a.dtype)
        return signed(moved) if bits == 32 else moved.view(np.int64).view(Lanes)

    return of


def same_type(a: Any, b: Any) -> tuple:
    """Two registers that are compared."""
    a, b = np.asarray(a), np.asarray(b)
    if "f" in (a.dtype.kind, b.dtype.kind):
        return a.astype(np.float32), b.astype(np.float32)
    return a, b


# Of all threads at once.
INTEGER = ptx_math.INTEGER | {"min": np.minimum, "max": np.maximum}
BY_PATTERN = {
    r"(add|sub|mul)(?:\.rn)?\.f32": lambda name, a, b: ptx_math.FLOAT[name](floats(a), floats(b)),
    r"(add|sub|min|max)\.s32": lambda name, a, b: int32(INTEGER[name](a, b)),
    r"div\.u32": lambda a, b: signed(bits_of(a) // nonzero(bits_of(b))),
    r"rem\.u32": lambda a, b: signed(bits_of(a) % nonzero(bits_of(b))),
    r"shl\.b32": shifted(32, np.left_shift),
    r"shr\.u32": shifted(32, np.right_shift),
    r"shl\.b64": shifted(64, np.left_shift),
    r"shr\.u64": shifted(64, np.right_shift),
    r"setp\.(eq|ne|lt|le|gt|ge)\.(?:s32|s64|f32)":
        lambda name, a, b: ptx_math.ORDER[name](*same_type(a, b)),
    r"selp\.(?:b32|f32|s32)": lambda a, b, p: merge(np.asarray(p), a, b),
    r"mov\.f32": float32,
    r"cvt\.rn\.f32\.s32": lambda a: a.astype(np.float32),
}  # fmt: skip


def nonzero(b: np.ndarray) -> np.ndarray:
    """A divisor that is none of 0, of the active threads."""
    if (b == 0).any():
        raise Apart
    return b


def arithmetic(act: Callable, all_of: Callable) -> Callable:
    """A function of values: of one where all are the same, else of all."""

    def of(*args: Any) -> Any:
        for arg in args:
            if isinstance(arg, Lanes):
                answer = all_of(*args)
                return answer if isinstance(answer, Lanes) else np.asarray(answer).view(Lanes)
        return act(*args)

    return of


class Access:
    """A load or a store: the addresses of the active threads, or one for all."""

    def __init__(self, address: Any, size: int):
        self.team = current()
        self.one = not isinstance(address, Lanes)
        self.at = np.array([address]) if self.one else active(address)
        if (self.at % size).any():
            raise Apart
        self.size = size
        self.mine = slice(None) if self.team.mask is None else self.team.mask
        self.threads = self.team.numbers[self.mine]
        self.ids = self.threads + MOST_THREADS * self.team.block.number  # of all blocks

    def who(self) -> tuple:
        """The threads, and the last meetings of their warps."""
        return self.threads, self.team.stamps[self.mine]

    def note(self, what: str) -> None:
        """Count it."""
        at = np.broadcast_to(self.at, self.threads.shape)
        self.team.touch(int(what.startswith("global")))
        loads = self.team.block.of(ptx_memory.Loads)
        loads.note_all(what, ptx_memory.place(), self.size, self.threads, at)

    def rows(self) -> np.ndarray:
        """The row of each one's warp in the clock."""
        return self.team.rows[self.mine]

    def answer(self, table: np.ndarray, kind: str) -> Any:
        """(threads, registers) uint32 as values of registers."""
        if kind == "f32":
            columns = table.view(np.float32).T
        else:
            columns = table.view(np.int32).T.astype(np.int64)
        if self.one:
            got = [c[0] if kind == "f32" else int(c[0]) for c in columns]
        else:
            got = [spread(c) for c in columns]
        return got if len(got) > 1 else got[0]


# %% sec-ptx-abreast
def table_of(given: tuple) -> np.ndarray:
    """(threads, registers) uint32 of values to be stored."""
    team = current()
    columns = [bits_of(v) for v in given]
    columns = [c if c.ndim == 0 else c if team.mask is None else c[team.mask] for c in columns]
    table = np.empty((team.count, len(columns)), np.uint32)
    for n, column in enumerate(columns):
        table[:, n] = column
    return table


@wide(ptx_memory.load)
def load(vector: str | None, kind: str, address: Any) -> Any:
    """Global memory to registers."""
    size = 4 * ptx_memory.count(vector)
    access = Access(address, size)
    access.note("global loads")
    memory = access.team.block.machine.memory
    data = memory.read_all(access.at, size, access.ids)
    return access.answer(data.view(np.uint32), kind)


@wide(ptx_memory.store)
def store(vector: str | None, kind: str, address: Any, *given: Any) -> None:
    """Registers to global memory."""
    ptx_memory.whole(vector, given)
    put(address, table_of(given).view(np.uint8))


@wide(ptx_memory.store_half)
def store_half(address: Any, value: Any) -> None:
    """Two bytes to global memory."""
    put(address, table_of((value,)).view(np.uint8)[:, :2])


def put(address: Any, data: np.ndarray) -> None:
    """(threads, bytes) to global memory."""
    access = Access(address, data.shape[1])
    access.note("global stores")
    if access.one:
        access.at = np.broadcast_to(access.at, len(data))
    machine = access.team.block.machine
    machine.memory.write_all(access.at, data, access.ids)
    machine.wake()


def place_in(access: Access) -> tuple[Shared, np.ndarray]:
    """The memory and the words (threads, words) that shared addresses mean."""
    rank = access.at >> CLUSTER_BIT
    cluster = access.team.block.cluster
    if (rank != rank[0]).any() or not 0 <= rank[0] < len(cluster):
        raise Apart
    access.at = access.at & (1 << CLUSTER_BIT) - 1
    return cluster[rank[0]].of(Shared), access.at[:, None] // 4 + np.arange(access.size // 4)


def read_shared(access: Access, memory: Shared, words: np.ndarray) -> np.ndarray:
    """The values of words, of each thread or of one place for all."""
    if access.one:
        words = np.broadcast_to(words, (len(access.threads), words.shape[1]))
    return memory.read(words, access.rows(), access.who())


@wide(ptx_memory.load_shared)
def load_shared(vector: str | None, kind: str, address: Any) -> Any:
    """Shared memory to registers."""
    access = Access(address, 4 * ptx_memory.count(vector))
    memory, words = place_in(access)
    access.note("shared loads")
    return access.answer(read_shared(access, memory, words), kind)


@wide(ptx_memory.store_shared)
def store_shared(vector: str | None, kind: str, address: Any, *given: Any) -> None:
    """Registers to shared memory."""
    ptx_memory.whole(vector, given)
    access = Access(address, 4 * ptx_memory.count(vector))
    if access.one and access.team.count > 1:
        raise Apart  # many store at one place
    table = table_of(given)
    memory, words = place_in(access)
    access.note("shared stores")
    memory.write(words, table, access.rows(), access.who())
    access.team.stores.append((memory, words, access.team.active()))


@wide(ptx_copy.copy)
def copy(cached: str, to: Any, address: Any, size: int, source: Any = None) -> None:
    """Some bytes to shared memory, while the thread goes on."""
    if size not in ptx_copy.SIZES[cached]:
        raise Apart
    access, fetched = Access(to, size), Access(address, size)
    sizes = np.full(len(access.at), size) if source is None else source
    sizes = active(sizes) if isinstance(sizes, Lanes) else np.broadcast_to(sizes, len(access.at))
    if access.one or fetched.one or ((sizes < 0) | (sizes > size)).any():
        raise Apart
    memory, words = place_in(access)
    memory.expect_by(words, access.rows(), access.who())
    access.note("shared stores")
    data = np.zeros((len(words), size), np.uint8)
    team = access.team
    for count in set(sizes.tolist()) - {0}:
        mine = np.flatnonzero(sizes == count)
        at, ids = fetched.at[mine], fetched.ids[mine]
        loads = team.block.of(ptx_memory.Loads)
        loads.note_all("global loads", ptx_memory.place(), count, fetched.threads[mine], at)
        data[mine, :count] = team.block.machine.memory.read_all(at, count, ids)
    where = access.at[:, None] + np.arange(size)
    team.of(ptx_copy.Pieces).open.append((memory, words, where, data, team.active()))


@wide(ptx_copy.copy_wait)
def copy_wait(most: int) -> None:
    """Wait until at most `most` groups are under way."""
    team = current()
    if team.mask is not None:
        raise Apart
    groups = team.of(ptx_copy.Pieces).groups
    while len(groups) > most:
        for memory, words, where, data, who in groups.popleft():
            memory.land(words, where, data)
            memory.flags[words] |= UNFENCED
            team.stores.append((memory, words, who))


@wide(ptx_sync.proxy_fence)
def proxy_fence() -> None:
    """From here on copies and tensor cores see the active threads' stores."""
    team = current()
    team.block.settle()
    left = []
    for memory, words, who in team.stores:
        mine = np.ones(len(who), bool) if team.mask is None else team.mask[who]
        memory.flags[words[mine]] &= ~UNFENCED & 0xFF
        if not mine.all():
            left.append((memory, words[~mine], who[~mine]))
    team.stores = left
    memory = team.block.of(Shared)
    if memory.stores:
        numbers_of = team.numbers if team.mask is None else team.numbers[team.mask]
        for threads, words in memory.stores:
            memory.flags[words[np.isin(threads, numbers_of)]] &= ~UNFENCED & 0xFF
        memory.stores = [s for s in memory.stores if (memory.flags[s[1]] & UNFENCED).any()]


@wide(ptx_memory.shuffle)
def exchange(mode: str, value: Any, lane: Any, limits: int, mask: int) -> Any:
    """Each lane gets the value of another."""
    if limits != (0 if mode == "up" else 31):
        raise Apart
    return shuffle(mask, mode, value, lane)


def rows_of(addresses: Any, count: int) -> tuple[Shared, np.ndarray, np.ndarray]:
    """Of warps' 8 x 8 matrices: memory, words (warps, matrix, row, 4), and each warp's row."""
    team, table = current(), by_warps(addresses)[:, : 8 * count]
    return *ptx_mma.rows(table), team.rows.reshape(-1, WARP)[team.warps(), 0]


@wide(ptx_mma.ldmatrix)
def ldmatrix(count: str, trans: str | None, address: Any) -> Any:
    """Warps' 8 x 8 matrices from shared memory."""
    n = int(count)
    memory, words, rows = rows_of(address, n)
    ptx_mma.note("loads", words)
    data = ptx_mma.turned(memory.read(words, rows), trans)
    pairs = data.view(np.int32).reshape(-1, n, WARP).astype(np.int64)
    got = [from_warps(pairs[:, i]) for i in range(n)]
    return got if n > 1 else got[0]


@wide(ptx_mma.stmatrix)
def stmatrix(count: str, trans: str | None, address: Any, *pairs: Any) -> None:
    """The other way round."""
    n, team = int(count), current()
    memory, words, rows = rows_of(address, n)
    ptx_mma.note("stores", words)
    data = np.stack([bits_of(by_warps(pair)) for pair in pairs], axis=1)
    memory.write(words, ptx_mma.turned(data.reshape(-1, n, 8, 4), trans), rows)
    each_row = words.reshape(len(words), -1, 4)  # row 8 m + r is lane (8 m + r) % 32's to fence
    who = (team.warps()[:, None] * WARP + np.arange(8 * n) % WARP).reshape(-1)
    team.stores.append((memory, each_row.reshape(-1, 4), who))


@wide(ptx_mma.mma)
def mma(*registers: Any) -> tuple:
    """D (16 x 8) = A (16 x 16) B (16 x 8) + C, in the registers of each warp."""
    table = [by_warps(value) for value in registers]
    a, b = (np.stack(part, axis=2) for part in (table[:4], table[4:6]))
    c = np.stack([part.astype(np.float32) for part in table[6:]], axis=2)
    d = ptx_mma.sums(c, ptx_mma.lefts(a), ptx_mma.rights(b))
    return tuple(from_warps(d[:, :, i]) for i in range(4))


@wide(ptx_mma.mma_many)
def mma_many(plan: list, *arrays: Registers) -> None:
    """Many mma in a row."""
    team = current()
    warps = team.warps()
    held = [
        registers.table().reshape(len(registers), -1, WARP)[:, warps].transpose(1, 2, 0)
        for registers in arrays
    ]
    ptx_mma.multiply_all(plan, held)
    for n in {d for (d, _), *_ in plan}:
        table = np.ascontiguousarray(held[n].transpose(2, 0, 1)).reshape(len(arrays[n]), -1)
        if team.mask is None:
            arrays[n].fill(0, table)
        else:
            arrays[n].fill(0, np.array([spread(row) for row in table]))


def named_barrier(number: Any, count: Any, wait: bool) -> None:
    """bar.sync (wait) and bar.arrive, of each active warp."""
    team = current()
    number, count = int(number), int(count)
    check_named(team.block, number, count)
    warps = team.warps()
    team.met()
    team.block.machine.memory.settle()
    rounds = [come(team.warps_of[n], number, count, wait) for n in warps]
    last = rounds[-1]
    if any(other is not last for other in rounds):
        raise Apart
    if wait and not last.open:
        last.waiting.append(team)
        team.pause("named", str)


for barrier, wait in ((ptx_sync.bar_sync, True), (ptx_sync.bar_arrive, False)):
    wide(barrier)(functools.partial(named_barrier, wait=wait))


def when(test: Any, act: Callable, old: Any) -> Any:
    """`act()` for the threads whose predicate holds, the old value for the others."""
    side = split(test)
    if not side.mixed:
        return act() if side.first() else old
    side.first()
    new = act()
    side.join({})
    if old is None:
        return None
    pairs = zip(new, old, strict=True) if isinstance(old, tuple) else [(new, old)]
    made = [merge(side.yes, *alike(a, b)) for a, b in pairs]
    return tuple(made) if isinstance(old, tuple) else made[0]


def alike(new: Any, old: Any) -> tuple:
    """A register that is loaded, and what was moved there before, which may be bits or a number."""
    kinds = np.asarray(new).dtype, np.asarray(old).dtype
    if kinds[0] == np.float32 and kinds[1] == np.int64:
        old = bits_of(old).view(np.float32)
        return new, old.view(Lanes) if old.ndim else old[()]
    return new, old


def result(letter: str, value: Any) -> Any:
    """A register as a result."""
    if letter == "l":
        return value if isinstance(value, Lanes) else int(value)
    if not isinstance(value, Lanes):
        if letter == "r":
            return value if type(value) is int else dtypes.bits(value)
        return dtypes.number(value) if type(value) is int else value
    if (value.dtype == np.float32) == (letter == "f"):
        return value
    return signed(bits_of(value)) if letter == "r" else bits_of(value).view(np.float32).view(Lanes)


# What an operand of a kernel becomes, by the letter of its type.
CASTS = {"r": int32, "l": int64, "f": float32}
# Special registers, of a team.
SPECIAL = ptx_parser.SPECIAL | {"%laneid": lambda: (current().numbers % WARP).view(Lanes)}


class Wide(Translation):
    """One instruction's text on its way to a function of a team."""

    def __init__(self, instruction: Instruction):
        super().__init__(instruction)
        self.env |= {"when": when, "negate": negate, "special": SPECIAL}
        self.env |= {f"result_{letter}": functools.partial(result, letter) for letter in "rlf"}

    def serve(self, found: Operation, groups: tuple) -> Callable:
        """A team's function for an instruction."""
        return serving(found, groups)

    def many(self, found: Operation) -> Callable | None:
        """Its team's."""
        return WIDE.get(found.many)

    def cast(self, name: str, letter: str) -> str:
        """An operand as what it is to be."""
        self.env[f"cast_{letter}"] = CASTS[letter]
        return f"{name} = cast_{letter}({name})"

    def answer(self, name: str, letter: str) -> str:
        """A register as a result."""
        return f"result_{letter}({name})"

    def first(self) -> list[str]:
        """Registers that only some may load are nothing before."""
        self.env["UNDEFINED"] = UNDEFINED
        names = {
            name
            for number, part in enumerate(self.body)
            if isinstance(part, Statement) and part.predicate and "bra" not in part.mnemonic
            for name in self.call(number, part)[0]
        }
        return [f"{name} = UNDEFINED" for name in sorted(names) if "[" not in name]

    def step(self, number: int, part: Statement) -> str:
        """A statement as a line of Python."""
        into, call = self.call(number, part)
        left = ", ".join(into)
        if not part.predicate:
            return f"{left} = {call}" if into else call
        test = f"negate(r_{part.predicate})" if part.negated else f"r_{part.predicate}"
        old = left if len(into) == 1 else f"({left})" if into else "None"
        return f"{left + ' = ' if into else ''}when({test}, lambda: {call}, {old})"


# %% sec-ptx-abreast
def serving(found: Operation, groups: tuple) -> Callable:
    """A team's function for an instruction."""
    act = functools.partial(found.act, *groups) if groups else found.act
    if found.act in WIDE:
        made = functools.partial(WIDE[found.act], *groups) if groups else WIDE[found.act]
        return arithmetic(act, made) if found.act.__module__ == ptx_math.__name__ else made
    made = found.act if found.lanes else BY_PATTERN.get(found.pattern.pattern)
    if made:
        return arithmetic(act, functools.partial(made, *groups) if groups else made)
    return functools.partial(HOW.get(found.act, each), act)


# How those serve a team that have no function of their own here; the others, `each`.
HOW = dict.fromkeys(
    [ptx_mma.fence, ptx_mma.wgmma, ptx_mma.commit, ptx_mma.wait, ptx_sync.registers,
     ptx_copy.copy_commit],
    once,
) | {ptx_sync.wait: once_a_warp} | dict.fromkeys(
    [ptx_sync.init_fence, ptx_memory.fence_memory, ptx_memory.depend, ptx_copy.prefetch],
    once_for_any
)  # fmt: skip
MEETINGS = {ptx_mma.commit, ptx_mma.wait, ptx_sync.registers}  # in which warps meet
PURE = {ptx_sync.map_rank}  # what hangs on its operands alone
ATOMIC = {ptx_memory.reduce, ptx_memory.atomic_add, ptx_memory.atomic_shared}
# of global memory
FAR = {ptx_memory.load_acquire, ptx_memory.store_release, ptx_memory.reduce, ptx_memory.atomic_add}


@functools.cache
def translate(instruction: Instruction) -> Callable:
    """The function of an instruction for a team."""
    return Wide(instruction).function()
