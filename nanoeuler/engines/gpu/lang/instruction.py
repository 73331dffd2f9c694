# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-instruction
"""What a kernel is written in beyond Python: PTX instructions, `cuda`, types of fixed width.

A kernel is a plain function. Its `Instruction`s and `Name`s mean nothing by themselves: a target,
the compiler or the emulator, gives the same code other objects for them (`rebind`). No CUDA here.
"""

import dis
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from nanoeuler.errors import UserError

PACKAGE = __name__.partition(".")[0] + "."  # how names of our modules begin
ATTRIBUTES = "LOAD_ATTR", "LOAD_METHOD"  # what follows a module's name where `module.name` is used
# A token of an operand list: a letter; for registers their number, + where they are written too,
# = where they are only written; for an array that a kernel indexes, its axes.
OPERAND = re.compile(r"(?:[rlfp]|[+=]?[rlf]\*[1-9]\d*|[hrlf]\[[1-4]\])")
DTYPES = {"h": "uint16", "r": "int32", "l": "int64", "f": "float32"}  # of elements, by the letter


@dataclass(frozen=True)
class Operand:
    """An operand of an instruction: the meaning of one `$`.

    letter: r int32, l int64, f float32, h uint16, p the address of an array. count: 0 for a value,
    else the registers of an array. written: whether an array's registers are results as well.
    read: whether what they held before matters. axes: of an array that is an argument of a kernel
    and that the kernel indexes, else 0.
    """

    letter: str
    count: int = 0
    written: bool = False
    read: bool = True
    axes: int = 0

    @property
    def dtype(self) -> str:
        """Of the elements of an array that the kernel indexes."""
        return DTYPES[self.letter]


def operands(tokens: str) -> tuple[Operand, ...]:
    """The operands that `tokens`, separated by spaces, name: "+f*64 l r" is an array and two."""
    for token in tokens.split():
        if not OPERAND.fullmatch(token):
            raise UserError(
                f"expected an operand such as r, l, f, p, f*64, +f*64, =f*64 or f[2], got {token!r}"
            )
    return tuple(
        Operand(
            token.strip("+=")[0],
            int(token.partition("*")[2] or 0),
            written=token[0] in "+=",
            read=token[0] != "=",
            axes=int(token[2]) if token[1:2] == "[" else 0,
        )
        for token in tokens.split()
    )


@dataclass(frozen=True)
class Instruction:
    """PTX that a kernel calls like a function; see `ptx`, which makes it."""

    text: str
    args: tuple[Operand, ...]
    ret: tuple[Operand, ...]
    pure: bool

    def __call__(self, *args: Any) -> Any:
        raise UserError(f"{self.text.split(';')[0]!r} runs in a kernel only, on a GPU or emulated")

    def fill(self, names: Sequence[str | Sequence[str]]) -> str:
        """The text with its operands spelled `names`: a word for a value, a list for an array."""

        def spell(match: re.Match) -> str:
            name, start, end = names[int(match[1])], match[2], match[3]
            if isinstance(name, str):
                return name
            return ", ".join(name[int(start) : int(end)] if start else name)

        return re.sub(r"\$(\d+)(?:\[(\d+):(\d+)\])?", spell, self.text)


def ptx(text: str, args: str = "", ret: str = "", pure: bool = False) -> Instruction:
    """An instruction from PTX `text` with operands `args` and results `ret` (see `operands`).

    In the text, $0, $1... are the results, then the arguments. An array means its registers with
    commas between, $1[0:4] the first four. One result is returned as it is, several as a tuple.
    pure: the results depend on nothing but the arguments, so a compiler may move, merge or drop it.
    Otherwise it stays in its place, in order with all accesses to memory.
    """
    made = Instruction(text, operands(args), operands(ret), pure)
    if any(operand.count or operand.letter == "p" for operand in made.ret):
        raise UserError(
            f"expected results r, l or f, got {ret!r}: make an array an argument, as +f*4 or =f*4"
        )
    highest = max((int(n) for n in re.findall(r"\$(\d+)", text)), default=-1)
    if highest >= len(made.args) + len(made.ret):
        raise UserError(
            f"${highest} in {text!r} has no operand: the lists have only {ret!r} and {args!r}"
        )
    return made


@dataclass(frozen=True)
class Name:
    """A placeholder for an object of each target: numba's for the compiler, ours emulated."""

    name: str

    def __call__(self, *args: Any) -> Any:
        raise UserError(f"{self.name} means something in a kernel only, on a GPU or emulated")


# threadIdx, blockIdx, gridDim, shared, local, syncthreads: as in numba.
cuda = Name("cuda")
# Types of values and of arrays; called, they convert, integers by wrapping round.
int8, int32, int64, float32 = Name("int8"), Name("int32"), Name("int64"), Name("float32")


@cache  # a kernel's helpers are looked up at each launch, and equal code uses equal names
def used(code: CodeType) -> frozenset[str]:
    """The globals that a function's code, or one inside it, looks up: `name`, `module.name`."""
    inner = [used(part) for part in code.co_consts if isinstance(part, CodeType)]
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    steps = [step for step in steps if step[0] != "EXTENDED_ARG"]
    names: set[str] = set()
    for (op, name), (after, attribute) in zip(steps, [*steps[1:], ("", "")], strict=True):
        if op == "LOAD_GLOBAL":
            names |= {name, f"{name}.{attribute}"} if after in ATTRIBUTES else {name}
    return frozenset(names.union(*inner))


def looked_up(function: FunctionType) -> dict[str, Any]:
    """Name -> object of all globals that a function uses; instead of a module of ours, what it
    uses of that: `module.name` -> object.
    """
    place, found = function.__globals__, {}
    for name in sorted(used(function.__code__)):
        first, _, attribute = name.partition(".")
        value = place.get(first)
        module = isinstance(value, ModuleType) and value.__name__.startswith(PACKAGE)
        if module and attribute:
            found[name] = getattr(value, attribute)
        elif first in place and not module and not attribute:
            found[name] = value
    return found


def rebind(
    function: FunctionType,
    replace: Callable[[Any], Any],
    helper: Callable[[FunctionType], Any] = lambda copy: copy,
) -> FunctionType:
    """The same code with other objects behind its global names and its closure.

    Each object there becomes `replace(object)`, once; a plain function is a helper: it is rebound
    in the same way, and `helper(copy)` takes its place. Helpers may not call each other in circles.
    """
    made: dict[int, Any] = {}

    def other(value: Any) -> Any:
        if id(value) not in made:
            plain = isinstance(value, FunctionType)
            made[id(value)] = helper(copy(value)) if plain else replace(value)
        return made[id(value)]

    def copy(old: FunctionType) -> FunctionType:
        place: dict[str, Any] = {"__name__": old.__module__}
        for name, value in looked_up(old).items():
            module, _, attribute = name.rpartition(".")
            if module:
                setattr(place.setdefault(module, ModuleType(module)), attribute, other(value))
            else:
                place[name] = other(value)
        cells = tuple(CellType(other(cell.cell_contents)) for cell in old.__closure__ or ())
        new = FunctionType(old.__code__, place, old.__name__, old.__defaults__, cells)
        new.__kwdefaults__ = old.__kwdefaults__
        new.__module__, new.__qualname__ = old.__module__, old.__qualname__
        return new

    return copy(function)
