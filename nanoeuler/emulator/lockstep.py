# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-abreast
"""Threads in lockstep: a value is an array with an entry for each thread of a team.

A kernel without races and atomics gives the same result in every order of its threads. So we may
take the order that NumPy does best, many at once. Where they part, `masks` has both sides run, each
for its own threads. What was read and written is checked as ever; if anything is wrong, or has no
form here (`Apart`), the launch is run again thread by thread.
"""

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from nanoeuler.emulator import dtypes
from nanoeuler.emulator.arrays import Array, Log, Side
from nanoeuler.emulator.barriers import wait_for_block
from nanoeuler.emulator.cuda import SOURCE
from nanoeuler.emulator.cuda import Cuda as OneByOne
from nanoeuler.emulator.machine import GROUP, WARP, Block, Owner, Place, Thread, close
from nanoeuler.emulator.machine import getcurrent as current
from nanoeuler.emulator.masks import rewritten


class Apart(Exception):
    """An operation that has no form in lockstep."""


class Lanes(np.ndarray):
    """A value of each thread of a team: int64, float32 or bool."""

    def same(self) -> Any:
        """The value that all active threads have."""
        mine = active(self)
        first = mine[0]
        if (mine != first).any():
            raise Apart
        return first

    def __bool__(self) -> bool:
        return bool(self.same())

    def __index__(self) -> int:
        return int(self.same())

    __int__ = __index__

    def __float__(self) -> float:
        raise Apart


def active(values: np.ndarray) -> np.ndarray:
    """The entries of the threads that are active."""
    values, team = values.view(np.ndarray), current()
    return values if team.mask is None else values[team.mask]


def anew(name: str) -> Callable[[Any, Any], Any]:
    """`a += b` as `a = a + b`: a number cannot change under another name, and an array can."""
    return lambda a, b: getattr(operator, name)(a, b)


# All of Python's that an array has in place.
for _name in "add sub mul truediv floordiv mod pow lshift rshift and_ or_ xor".split():
    setattr(Lanes, f"__i{_name.strip('_')}__", anew(_name))


def careful(name: str, good: Callable[[np.ndarray], Any]) -> None:
    """An operator of Lanes that is refused where the right side is not `good` for all."""
    act = getattr(np.ndarray, name)

    def of_lanes(a: Any, b: Any) -> Any:
        if not np.all(good(np.asarray(b))):
            raise Apart
        return act(a, b)

    setattr(Lanes, name, of_lanes)


for _name in "__floordiv__", "__mod__":
    careful(_name, lambda b: b != 0)
for _name in "__lshift__", "__rshift__":
    careful(_name, lambda b: (b >= 0) & (b < 64))

KINDS = "int64", "float32", "bool"  # of Lanes


def merge(mask: np.ndarray, new: Any, old: Any) -> Any:
    """`new` for the threads in the mask, `old` for the others."""
    if new is old or (type(new) is int and type(old) is int and new == old):
        return new
    if isinstance(new, tuple) and type(new) is type(old) and len(new) == len(old):
        parts = [merge(mask, a, b) for a, b in zip(new, old, strict=True)]
        return type(new)(*parts) if hasattr(new, "_fields") else tuple(parts)
    if new is UNDEFINED or old is UNDEFINED:
        return UNDEFINED
    a, b = np.asarray(new), np.asarray(old)
    if a.dtype != b.dtype or a.dtype.name not in KINDS:
        raise Apart
    return np.where(mask, a, b).view(Lanes)


UNDEFINED = type("Undefined", (), {})()  # a name's value where some threads never assigned it


class Seat(Owner):
    """State that each thread of a team has for itself."""

    def __init__(self, block: Block, number: int, place: Place):
        self.number, self.lane, self.threadIdx = number, number % WARP, place
        self.warp, self.group = block.warps[number // WARP], block.groups[number // GROUP]
        self.parts: dict = {}
        self.unfenced: list = []


class Seats(dict):
    """Number in the team -> seat, made on first use: few threads ever act alone."""

    def __init__(self, block: Block, first: int, places: list[Place]):
        super().__init__()
        self.block, self.first, self.places = block, first, places

    def __missing__(self, n: int) -> Seat:
        self[n] = Seat(self.block, self.first + int(n), self.places[n])
        return self[n]


def own(name: str) -> Any:
    """The acting thread's value of this attribute."""
    return property(operator.attrgetter(f"acting.{name}"))


class Team(Thread):
    """Threads of a block in lockstep, first to last, whole warps if there are several.

    mask: who is active, None for all. acting: for whom an instruction is executed that knows one
    thread only.
    """

    number, lane, threadIdx = own("number"), own("lane"), own("threadIdx")
    warp, group, parts, unfenced = own("warp"), own("group"), own("parts"), own("unfenced")

    def __init__(self, body: Callable[[], None], block: Block, first: int, places: list[Place]):
        super(Thread, self).__init__(body)
        self.block, self.first, self.size = block, first, len(places)
        self.seats = Seats(block, first, places)
        self.acting, self.mask, self.count = self.seats[0], None, self.size
        self.numbers = np.arange(first, first + self.size)
        self.rows = np.repeat([warp.row for warp in self.warps_of], WARP)[: self.size]
        self.reason: Callable[[], str] = str
        self.waits, self.answer = "", None
        self.shared = Place(*(view(axis) for axis in zip(*places, strict=True)))
        self.stores: list = []  # (memory, words, threads), not yet fenced
        # Of each thread, since its warp last met: whether it touched shared memory, global memory;
        # whether others of its warp have waited for something there.
        self.touched = np.zeros((2, self.size), bool)
        self.behind = np.zeros((2, self.size), bool)
        self.stamps = -1 - self.numbers // WARP - block.number * WARP  # when it did, of its own

    def narrow(self, mask: np.ndarray | None) -> None:
        """From here on the threads of this mask are active."""
        self.mask = mask
        self.count = self.size if mask is None else int(np.count_nonzero(mask))
        self.acting = self.seats[0 if mask is None else int(mask.argmax())]

    def active(self) -> np.ndarray:
        """The numbers, from the team's first on, of the active threads."""
        return np.arange(self.size) if self.mask is None else np.flatnonzero(self.mask)

    def warps(self) -> np.ndarray:
        """The numbers, in the team, of the warps that are active as a whole."""
        if self.size % WARP:
            raise Apart
        if self.mask is None:
            return np.arange(self.size // WARP)
        table = self.mask.reshape(-1, WARP)
        if (table.any(axis=1) != table.all(axis=1)).any():
            raise Apart
        return np.flatnonzero(table[:, 0])

    @property
    def warps_of(self) -> list:
        """The warps that it acts for."""
        return self.block.warps[self.first // WARP : -(-(self.first + self.size) // WARP)]

    def close(self) -> None:
        """The team ends."""
        for seat in list(self.seats.values()):
            self.acting = seat
            close(seat)

    def met(self) -> None:
        """The active warps have met: their threads are at one place, for certain."""
        self.block.machine.meetings += self.size
        stamps = self.block.machine.meetings + np.arange(self.size) // WARP
        if self.mask is None:
            self.touched[:], self.behind[:], self.stamps[:] = False, False, stamps
        else:
            self.touched[:, self.mask], self.behind[:, self.mask] = False, False
            self.stamps[self.mask] = stamps[self.mask]

    def touch(self, where: int) -> None:
        """The active threads touch shared memory (0), global memory (1).

        One by one, each might have come here before others of its warp had waited.
        """
        if self.mask is None:
            apart, self.touched[where] = self.behind[where].any(), True
        else:
            apart = self.behind[where, self.mask].any()
            self.touched[where, self.mask] = True
        if apart:
            raise Apart

    def alone(self, where: int) -> None:
        """The active threads order something, or wait for something, without the rest of their
        warps: one by one, they might do so before the rest has touched what it did.
        """
        if self.mask is None:
            return
        rest = ~self.mask
        if self.size % WARP == 0:
            rest &= np.repeat(self.mask.reshape(-1, WARP).any(axis=1), WARP)
        if self.touched[where, rest].any():
            raise Apart
        self.behind[where, rest] = True


# %% sec-paper-abreast
def view(values: Any) -> Any:
    """`values` (threads,) as Lanes, or one number where all are the same."""
    values = np.asarray(values)
    return int(values[0]) if (values == values[0]).all() else values.view(Lanes)


class Agreed:
    """A choice about which all agree."""

    mixed = False

    def __init__(self, yes: bool):
        self.first, self.second = (lambda: yes), (lambda: not yes)


class Parting:
    """A divergence of threads: the mask of those active before, and the names' values."""

    mixed = True

    def __init__(self) -> None:
        self.team = current()
        self.before = self.team.mask

    def keep(self, names: list, values: dict) -> None:
        """Keep these names' values before a side may change them."""
        self.names = names
        self.old = self.now(values)

    def now(self, values: dict) -> list:
        """The names' values."""
        return [values.get(name, UNDEFINED) for name in self.names] if values else []

    def merged(self, mask: np.ndarray, new: list, old: list) -> list:
        """`new` for the threads of the mask."""
        return [merge(mask, a, b) for a, b in zip(new, old, strict=True)]


class Choice(Parting):
    """An `if` about which threads disagree. yes: the mask of those that take the first side."""

    def __init__(self, yes: np.ndarray):
        super().__init__()
        self.yes = yes
        self.new = None

    def first(self) -> bool:
        """The first side, for those."""
        self.team.narrow(self.yes)
        return True

    def turn(self, values: dict) -> list:
        """Its end: for the others the names keep their old values."""
        self.team.narrow(~self.yes if self.before is None else self.before & ~self.yes)
        self.new = self.now(values)
        return self.old if values else []

    def second(self) -> bool:
        """The second side."""
        return True

    def join(self, values: dict) -> list:
        """The end of both."""
        self.team.narrow(self.before)
        if not values:
            return []
        if self.new is None:
            return self.merged(self.yes, self.now(values), self.old)
        return self.merged(self.yes, self.new, self.now(values))


YES, NO = Agreed(True), Agreed(False)  # what all say


def split(test: Any) -> Any:
    """An `if`: whether all threads agree, and which take each side."""
    if not isinstance(test, Lanes):
        return YES if test else NO
    team, yes = current(), test.view(np.ndarray).astype(bool)
    yes = yes if team.mask is None else yes & team.mask
    count = np.count_nonzero(yes)
    return NO if not count else YES if count == team.count else Choice(yes)


class While(Parting):
    """A loop that threads may leave one after the other."""

    mixed = False

    def __init__(self) -> None:
        super().__init__()
        self.count = self.team.count

    def test(self, condition: Any) -> bool:
        """Whether anybody goes on."""
        side = split(condition)
        if side.mixed:
            side.first()
            self.mixed = True
        return side.first()

    def join(self, values: dict) -> list:
        """The end of a round."""
        return self.merged(self.team.mask, self.now(values), self.old) if values else []

    def leave(self) -> None:
        """A break or a continue."""
        if self.mixed or self.team.count != self.count:
            raise Apart

    def end(self) -> None:
        """All have left."""
        self.team.narrow(self.before)


class For(While):
    """A loop over numbers, perhaps from another to another for each thread."""

    def __init__(self, over: Any):
        super().__init__()
        self.over = over

    def __iter__(self) -> Iterator:
        if not isinstance(self.over, Range):
            yield from self.over
            return
        at, stop, step = self.over
        while self.test(at < stop):
            yield at
            at = at + step
        self.end()


class Range(tuple):
    """Start, stop and step, of which one differs by thread."""


def span(*bounds: Any) -> Any:
    """`range`."""
    start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    try:
        return range(*map(operator.index, (start, stop, step)))
    except Apart:
        if np.asarray(step).min() < 1:
            raise
        size = current().size
        return Range((np.broadcast_to(start, size).copy().view(Lanes), stop, step))


def pick(test: Any, yes: Callable, no: Callable) -> Any:
    """`yes if test else no`."""
    side = split(test)
    if not side.mixed:
        return yes() if side.first() else no()
    side.first()
    a = yes()
    side.turn({})
    b = no()
    side.join({})
    return merge(side.yes, a, b)


def both(a: Any, rest: Callable) -> Any:
    """`a and b`."""
    if not isinstance(a, Lanes):
        return a and rest()
    return pick(a, rest, lambda: False)


def either(a: Any, rest: Callable) -> Any:
    """`a or b`."""
    if not isinstance(a, Lanes):
        return a or rest()
    return pick(a, lambda: True, rest)


def negate(a: Any) -> Any:
    """`not a`."""
    return np.logical_not(a).view(Lanes) if isinstance(a, Lanes) else not a


def extreme(choose: Callable, array: Callable) -> Callable:
    """min or max, of values or of all threads' values."""

    def of(*values: Any) -> Any:
        if not any(isinstance(value, Lanes) for value in values):
            return choose(*values)
        a, b = values
        if np.asarray(a).dtype.kind == "f" or np.asarray(b).dtype.kind == "f":
            raise Apart  # nan and zeros of both signs: as Python has it
        return array(a, b).view(Lanes)

    return of


def whole(value: Any) -> Any:
    """`int`."""
    return value.astype(np.int64) if isinstance(value, Lanes) else int(value)


SINGLE = np.dtype(np.float32)  # NumPy has one object for it, so that `is` will do


def float32(value: Any) -> Any:
    """A conversion, of one value or of all threads' values."""
    if isinstance(value, np.ndarray):
        if value.dtype is SINGLE and type(value) is Lanes:
            return value
        if value.dtype == np.float64 and not isinstance(value, Exact):
            raise Apart  # an int64 and a float32: NumPy widens, and Python's numbers do not
        return value.astype(np.float32, copy=False).view(Lanes)
    return np.float32(value)


class Exact(Lanes):
    """float64, as `math` gives it."""


# By the names of `engines.gpu.lang.instruction`.
TYPES = vars(dtypes) | {"float32": float32}


def of_all(name: str) -> Callable:
    """A function of `math`, of one value or with float64 of all threads' values."""
    one, all_of = getattr(math, name), getattr(np, name)

    def of(value: Any) -> Any:
        if isinstance(value, Lanes):
            return all_of(np.asarray(value, np.float64)).view(Exact)
        return one(value)

    return of


# Stands in for the module `math`, which takes one number at a time.
MATH = SimpleNamespace(**vars(math) | {name: of_all(name) for name in ("exp", "log", "sqrt")})

# What rewritten code calls, and builtins that take all threads' values.
MEANINGS = {
    "_split": split, "_While": While, "_For": For, "_pick": pick, "_both": both,
    "_either": either, "_negate": negate, "range": span, "int": whole,
    "min": extreme(min, np.minimum), "max": extreme(max, np.maximum),
}  # fmt: skip


def abreast(function: FunctionType) -> FunctionType:
    """A function of a kernel, for many threads at once."""
    code, place = rewritten(function.__code__), function.__globals__
    for name, meaning in MEANINGS.items():
        place.setdefault(name, meaning)
    new = FunctionType(code, place, function.__name__, function.__defaults__, function.__closure__)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


class Registers(list):
    """A cuda.local.array of every thread: values of all threads, by index."""

    lent, reading = 0, False  # what wgmmas under way do with them

    def __init__(self, shape: tuple, kind: np.dtype):
        self.shape, self.dtype = shape, kind
        fill = np.float32(np.nan) if kind.kind == "f" else 0x5A5A5A5A
        super().__init__([fill] * math.prod(shape))

    def _at(self, index: Any) -> int:
        if type(index) is int and len(self.shape) == 1:
            at = index
        else:
            place = index if isinstance(index, tuple) else (index,)
            place = [operator.index(i) for i in place]
            try:
                at = int(np.ravel_multi_index(place, self.shape))
            except ValueError as error:
                raise Apart from error
        if not 0 <= at < len(self) or self.lent:
            raise Apart
        return at

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(self._at(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        at, mask = self._at(index), current().mask
        value = kept(value, self.dtype)
        if mask is not None:
            value = merge(mask, value, super().__getitem__(at))
        if self.reading:
            raise Apart
        super().__setitem__(at, value)

    def lend(self) -> None:
        """A wgmma under way owns them."""
        self.lent += 1

    def give_back(self) -> None:
        """It is done."""
        self.lent -= 1

    def feed(self) -> None:
        """A wgmma under way reads them."""
        self.reading = True

    def fed(self) -> None:
        """It has read them."""
        self.reading = False

    def table(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """(registers, threads) of the team: some of them, as an array."""
        count = len(self) if count is None else count
        kind = np.int64 if self.dtype.kind in "iu" else self.dtype
        table = np.empty((count, current().size), kind)
        for n, row in enumerate(table, first):
            row[...] = list.__getitem__(self, n)
        return table

    def part(self, first: int, count: int) -> np.ndarray:
        """Some registers, (threads, count)."""
        return np.ascontiguousarray(self.table(first, count).T)

    def put(self, first: int, rows: np.ndarray) -> None:
        """Put (threads, count) into registers."""
        self.fill(first, np.ascontiguousarray(rows.T))

    def fill(self, first: int, table: np.ndarray) -> None:
        """Put a table into some registers, for all threads that are active."""
        mask = current().mask
        for n, row in enumerate(table, first):
            old = list.__getitem__(self, n)
            new = row.view(Lanes)
            list.__setitem__(self, n, new if mask is None else merge(mask, new, old))


# %% sec-paper-abreast
def kept(value: Any, dtype: np.dtype) -> Any:
    """A value as registers of this dtype hold it."""
    if dtype.kind == "f":
        return value if type(value) is np.float32 else float32(value)
    if isinstance(value, np.ndarray):
        value = value.view(np.ndarray).astype(np.int64)
        if (value.astype(dtype) != value).any():
            raise Apart
        return value.view(Lanes)
    return int(dtype.type(value))


@functools.lru_cache(1 << 14)  # the places of a tile: each is read by every step of a loop
def alike(place: tuple, shape: tuple, threads: int) -> np.ndarray:
    """The element at a place, for each of the threads that name it."""
    return np.full(threads, np.ravel_multi_index(place, shape))


class Rows(Array):
    """An array that all threads of a team index at once; it keeps a row for each instruction."""

    def __init__(self, log: "RowLog", values: np.ndarray, name: str):
        super().__init__(log, values, name, base=0)
        self.flat = values.reshape(-1)
        self.reads: list[tuple] = []
        self.writes: list[tuple] = []

    def _elements(self, index: Any) -> np.ndarray:
        """Of the active threads."""
        place, team = index if type(index) is tuple else (index,), current()
        try:
            if all(type(i) is int for i in place):
                return alike(place, self.shape, team.count)
            if team.mask is not None:
                place = tuple(i[team.mask] if isinstance(i, Lanes) else i for i in place)
            elements = np.ravel_multi_index(tuple(map(np.asarray, place)), self.shape)
        except (ValueError, TypeError) as error:  # outside, or no index at all
            raise Apart from error
        return elements if elements.ndim else np.full(team.count, elements)

    def __getitem__(self, index: Any) -> Lanes:
        team, elements = current(), self._elements(index)
        if self.log.clocks:
            team.touch(0)
        self.reads.append((elements, team, team.mask, self.log.tick()))
        values = self.flat[elements]
        values = values.astype(np.int64) if self.dtype.kind in "iu" else values
        return spread(values)

    def __setitem__(self, index: Any, value: Any) -> None:
        team, elements = current(), self._elements(index)
        if self.log.clocks:
            team.touch(0)
        self.writes.append((elements, team, team.mask, self.log.tick()))
        if isinstance(value, Lanes):
            value = active(float32(value) if self.dtype.kind == "f" else value)
        self.flat[elements] = value


def spread(values: np.ndarray) -> Lanes:
    """Values of the active threads as Lanes."""
    team = current()
    if team.mask is None:
        return values.view(Lanes)
    lanes = np.zeros(team.size, values.dtype)
    lanes[team.mask] = values
    return lanes.view(Lanes)


class Whole(Side):
    """A side whose entries stand in order: by instruction, then by thread."""

    def __init__(self, rows: list[tuple], threads: int):
        self.count = threads
        self.elements = np.concatenate([row[0] for row in rows]) if rows else np.zeros(0, np.int64)
        self.threads = np.tile(np.arange(threads), len(rows))
        self.at = np.repeat(np.array([row[3] for row in rows], np.int64), threads)

    def table(self, start: int, size: int) -> np.ndarray:
        """Addresses of bytes (accesses, threads): the rows are the instructions already."""
        rows = (start + self.elements * size).reshape(-1, self.count)
        if self.count % WARP:
            rows = np.pad(rows, ((0, 0), (0, -self.count % WARP)), constant_values=-1)
        return rows.reshape(-1, WARP)


def side(rows: list[tuple], threads: int) -> Side:
    """Rows of (elements, team, mask, when) as one side."""
    if all(mask is None and team.size == threads for _, team, mask, _ in rows):
        return Whole(rows, threads)
    elements = np.concatenate([row[0] for row in rows])
    who = [team.numbers if mask is None else team.numbers[mask] for _, team, mask, _ in rows]
    at = np.repeat([row[3] for row in rows], [len(row[0]) for row in rows])
    return Side(elements, np.concatenate(who), at)


class RowLog(Log):
    """What all threads did to arrays since the last barrier."""

    def __init__(self, block: Block, threads: int, clocks: bool):
        super().__init__(block)
        self.threads, self.clocks = threads, clocks
        self.time = 0  # instructions so far

    def tick(self) -> int:
        """One more."""
        self.time += 1
        return self.time

    def array(self, values: np.ndarray, name: str) -> Rows:
        """These values as an array of the kernel."""
        self.arrays.append(Rows(self, values, name))
        return self.arrays[-1]

    def mark(self, thread: int) -> None:
        """A turn ends: rows know whose they are."""

    def settle(self) -> None:
        """Check and count what was done, and begin anew."""
        if not self.time:
            return
        for array in self.arrays:
            if array.reads or array.writes:
                self.plain, self.before = np.ones(self.time + 1, bool), range(self.time + 1)
                reads, writes = (side(rows, self.threads) for rows in (array.reads, array.writes))
                array.state.settle(self, array, reads, writes)
                array.reads.clear()
                array.writes.clear()
        self.time = 0


def local_array(shape: int | tuple, dtype: Any) -> Registers:
    """Registers, filled with nan or 0x5A5A5A5A, so that reading them too early shows."""
    return Registers(shape if isinstance(shape, tuple) else (shape,), dtypes.dtype(dtype))


FULL = 0xFFFFFFFF  # the mask of all lanes of a warp


def by_warps(value: Any, mask: int = FULL) -> np.ndarray:
    """(warps that are active, 32) of a value; they have to be whole."""
    team = current()
    if not isinstance(mask, int) or mask & FULL != FULL:
        raise Apart
    warps = team.warps()
    team.met()
    if isinstance(value, Lanes):
        return value.view(np.ndarray).reshape(-1, WARP)[warps]
    return np.broadcast_to(np.asarray(value), (len(warps), WARP))


def from_warps(table: np.ndarray) -> Any:
    """A value for each active warp, or (active warps, 32) values, as Lanes."""
    if table.ndim == 1:
        table = np.repeat(table[:, None], WARP, axis=1)
    return spread(table.reshape(-1))


def shuffle(mask: int, mode: str, value: Any, by: Any) -> Any:
    """A shuffle of each active warp: the `value` of the lane that `mode` and `by` say."""
    table = by_warps(value, mask)
    if not isinstance(value, Lanes):
        return value
    own = np.arange(WARP)
    lanes = SOURCE[mode](own, operator.index(by))
    return from_warps(table[:, np.where((lanes >= 0) & (lanes < WARP), lanes, own)])


def vote(mask: int, key: str, value: Any, count: Callable) -> Any:
    """A vote of each active warp: `count` over its lanes' values, told to each lane."""
    return from_warps(count(np.arange(WARP), by_warps(value, mask).astype(bool)))


def sync_threads() -> None:
    """Wait until all threads of the block are here, at the same call."""
    team = current()
    if team.mask is not None:
        raise Apart
    team.met()
    wait_for_block(sys._getframe(1))


class Cuda(OneByOne):
    """Stands in for numba.cuda, for all threads of a team."""

    threadIdx = property(lambda self: current().shared)
    laneid = property(lambda self: view(current().numbers % WARP))
    local = SimpleNamespace(array=local_array)
    atomic = None
    syncthreads = staticmethod(sync_threads)
    _shuffle, _vote = staticmethod(shuffle), staticmethod(vote)

    @staticmethod
    def selp(condition: Any, yes: Any, no: Any) -> Any:
        """One of two values for each thread."""
        if not isinstance(condition, Lanes):
            return yes if condition else no
        return merge(condition.view(np.ndarray), yes, no)

    @staticmethod
    def syncwarp(mask: int = -1) -> None:
        """Wait until all lanes of a warp are here."""
        if not current().block.log.clocks:
            raise Apart  # then barriers alone would order what is written down
        current().block.settle()
        by_warps(0, mask)
