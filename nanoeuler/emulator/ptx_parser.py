# Made from book/h-ptx-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ptx-translate
"""PTX text to Python: each statement becomes the call of a function that does what it says.

The functions are registered, one for each mnemonic, by the modules of instruction families. A
mnemonic is matched in full: a suffix that nobody wrote a function for is refused, not passed over.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nanoeuler.emulator import dtypes
from nanoeuler.emulator.machine import HERE
from nanoeuler.emulator.machine import getcurrent as current
from nanoeuler.engines.gpu.lang.instruction import Instruction
from nanoeuler.errors import UserError


@dataclass(frozen=True)
class Operation:
    """A function for the mnemonics that `pattern` matches; its groups come before the operands.

    results: the number of results, which are the first operands, or a function of the groups that
    gives it. vectors: operands in braces come as (array of registers, first, count). many: a
    function for an instruction that is nothing but many of these, on arrays. lanes: whether `act`
    takes arrays with a value of each thread as well.
    """

    pattern: re.Pattern
    act: Callable
    results: int | Callable[..., int]
    vectors: bool
    many: Callable | None = None
    lanes: bool = False


OPERATIONS: dict[str, Operation] = {}  # by pattern


def op(
    pattern: str, results: int | Callable[..., int] = 0, vectors: bool = False,
    many: Callable | None = None, lanes: bool = False,
) -> Callable:  # fmt: skip
    """Register a function for the mnemonics that match `pattern` from end to end."""

    def register(act: Callable) -> Callable:
        if getattr(act, "__module__", "") != "__main__":  # a chapter's cells are copies
            OPERATIONS[pattern] = Operation(re.compile(pattern), act, results, vectors, many, lanes)
        return act

    return register


# Modules that register functions, loaded with the first instruction that is translated.
FAMILIES = "ptx_math", "ptx_memory", "ptx_sync", "ptx_copy", "ptx_mma"


def operation(mnemonic: str) -> tuple[Operation, tuple]:
    """The function for a mnemonic, and the matches of its pattern's groups."""
    for name in FAMILIES:
        importlib.import_module(f"{HERE}.{name}")
    for candidate in OPERATIONS.values():
        match = candidate.pattern.fullmatch(mnemonic)
        if match:
            return candidate, match.groups()
    raise UserError(
        f"the emulator has no instruction {mnemonic!r}: register a function in {HERE}"
    )


LABEL = re.compile(r"\s*(\w+)\s*:(?!:)")  # PTX ISA, "Statements"
# Predicate, mnemonic, operands.
STATEMENT = re.compile(r"(?:@(!?)(\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
# A list in braces, a word (an address may have an offset), a bracket or a comma.
OPERAND = re.compile(r"\{[^}]*\}|-?%?[\w.]+(?:\+\d+)?|[\[\],]")


@dataclass(frozen=True)
class Statement:
    """One statement of PTX. operands: words, and lists of words for operands in braces."""

    mnemonic: str
    operands: list
    predicate: str = ""
    negated: bool = False


def statements(text: str) -> Iterator[Statement | str]:
    """The statements of a PTX text, and its labels as strings; declarations are left out."""
    for piece in re.sub(r"//[^\n]*", "", text).split(";"):
        # A brace that opens or closes a scope comes before a statement; one of a list, inside.
        piece = re.sub(r"^[\s{}]+", "", piece)
        while match := LABEL.match(piece):
            yield match[1]
            piece = re.sub(r"^[\s{}]+", "", piece[match.end() :])
        if not piece or piece.startswith(".reg"):
            continue
        match = STATEMENT.fullmatch(piece.strip())
        if not match:
            raise UserError(f"expected a PTX statement, got {piece.strip()!r}")
        negated, predicate, mnemonic, rest = match.groups()
        words = [word for word in OPERAND.findall(rest) if word not in "[],"]
        groups = [re.findall(r"%?\w+", w) if w[0] == "{" else w for w in words]
        yield Statement(mnemonic, groups, predicate or "", bool(negated))


# Special registers: PTX ISA, chapter of that name.
SPECIAL = {
    "%laneid": lambda: current().lane,
    "%cluster_ctarank": lambda: current().block.rank,
}
# What an operand of a kernel becomes, by the letter of its type, as numba casts it.
CASTS = {"r": dtypes.int32, "l": dtypes.int64, "f": dtypes.float32}
# Whether operand {0} is that already, as most are: no call is needed then.
FITS = {
    "r": "type({0}) is int and -1 << 31 <= {0} < 1 << 31",
    "l": "type({0}) is int and -1 << 63 <= {0} < 1 << 63",
    "f": "type({0}) is float32",
}
# A register as a result: a move of bits does not say what they are.
RESULTS = {
    "r": "{0} if type({0}) is int else bits({0})",
    "l": "int({0})",
    "f": "number({0}) if type({0}) is int else {0}",
}


class Translation:
    """One instruction's text on its way to a Python function."""

    def __init__(self, instruction: Instruction):
        self.instruction = instruction
        self.env: dict[str, Any] = {"__name__": HERE, "rest": rest, "special": SPECIAL}
        self.results = [f"o{n}" for n in range(len(instruction.ret))]
        self.args = [f"a{n}" for n in range(len(instruction.args))]
        self.parts: dict[str, tuple[str, int]] = {}  # a word of the text -> an array's element
        names: list = list(self.results)
        for name, operand in zip(self.args, instruction.args, strict=True):
            words = [f"{name}_{i}" for i in range(operand.count)]
            self.parts |= {word: (name, i) for i, word in enumerate(words)}
            names.append(words or name)
        self.body = list(statements(instruction.fill(names)))
        labels = [part for part in self.body if isinstance(part, str)]
        self.labels = {label: n + 1 for n, label in enumerate(labels)}

    def word(self, word: str) -> str:
        """A word of the text in Python: an operand, a register, a number."""
        if word in self.parts:
            array, at = self.parts[word]
            return f"{array}[{at}]"
        if word in self.args or word in self.results:
            return word
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", word):
            return f"number({int(word[2:], 16)})"
        if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", word):
            return word
        if "+" in word:
            address, _, offset = word.partition("+")
            return f"({self.word(address)} + {offset})"
        if word[0] == "%":
            if word not in SPECIAL:
                raise UserError(f"the emulator has no special register {word}")
            return f"special[{word!r}]()"
        return "_" if word == "_" else f"r_{word}"

    def vector(self, words: list[str]) -> str:
        """Registers in braces, in a row of one array, as (array, first, count)."""
        array, first = self.parts[words[0]]
        if [self.parts[word] for word in words] != [(array, first + i) for i in range(len(words))]:
            raise UserError(f"registers {words} are not in a row")
        return f"({array}, {first}, {len(words)})"

    def serve(self, found: Operation, groups: tuple) -> Callable:
        """The function of an instruction."""
        return functools.partial(found.act, *groups) if groups else found.act

    def call(self, number: int, statement: Statement) -> tuple[list[str], str]:
        """A statement as a call in Python, and the variables that take its results."""
        found, groups = operation(statement.mnemonic)
        operands = []
        for operand in statement.operands:
            if isinstance(operand, str):
                operands.append(self.word(operand))
            elif found.vectors:
                operands.append(self.vector(operand))
            else:
                operands += [self.word(word) for word in operand]
        results = found.results(*groups) if callable(found.results) else found.results
        into, given = operands[:results], operands[results:]
        try:
            inspect.signature(found.act).bind(*groups, *given)
        except TypeError as error:
            raise UserError(f"{statement.mnemonic} with {statement.operands}: {error}") from error
        self.env[f"f{number}"] = self.serve(found, groups)
        return into, f"f{number}({', '.join(given)})"

    def cast(self, name: str, letter: str) -> str:
        """An operand as what it is to be."""
        self.env[f"cast_{letter}"] = CASTS[letter]
        return f"if not ({FITS[letter].format(name)}): {name} = cast_{letter}({name})"

    def answer(self, name: str, letter: str) -> str:
        """A register as a result."""
        return RESULTS[letter].format(name)

    def first(self) -> list[str]:
        """The lines before all statements."""
        return []

    def step(self, number: int, part: Statement) -> str:
        """A statement as a line of Python."""
        into, call = self.call(number, part)
        test = f"if {'not ' * part.negated}r_{part.predicate}: " if part.predicate else ""
        return test + (f"{', '.join(into)} = {call}" if into else call)

    def lines(self) -> Iterator[str]:
        """The function's body. Labels cut it into parts; a jump enters the loop again at one."""
        for name, operand in zip(self.args, self.instruction.args, strict=True):
            if operand.letter == "p":
                yield f"{name} = {name}.address"
            elif not operand.count:
                yield self.cast(name, operand.letter)
        yield from self.first()
        indent, label = "", 0
        if self.labels:
            yield from ("at = 0", "while True:", " if at <= 0:", "  pass")
            indent = "  "
        for number, part in enumerate(self.body):
            if isinstance(part, str):
                label = self.labels[part]
                yield from (f" if at <= {label}:", "  pass")
                continue
            if part.mnemonic in ("bra", "bra.uni"):
                test = f"if {'not ' * part.negated}r_{part.predicate}: " if part.predicate else ""
                target = self.labels[part.operands[0]]
                back = "rest(); " if target <= label else ""
                yield f"{indent}{test}{back}at = {target}; continue"
            else:
                yield f"{indent}{self.step(number, part)}"
        pairs = zip(self.results, self.instruction.ret, strict=True)
        answer = ", ".join(self.answer(name, operand.letter) for name, operand in pairs)
        yield f"{' ' * bool(self.labels)}return {answer}"

    def many(self, found: Operation) -> Callable | None:
        """The function for an instruction that is nothing but many of these."""
        return found.many

    def batch(self) -> Callable | None:
        """One function for all statements, where they are many of a kind that has one."""
        kinds = {part.mnemonic for part in self.body if isinstance(part, Statement)}
        many = self.many(operation(next(iter(kinds)))[0]) if len(kinds) == 1 else None
        words = [part.operands for part in self.body if many and isinstance(part, Statement)]
        if len(words) < 2 or any(isinstance(w, str) or w[0] not in self.parts for w in words[0]):
            return None
        for group in (group for operands in words for group in operands):
            self.vector(group)  # in a row, or refused
        places = [[self.parts[group[0]] for group in operands] for operands in words]
        return functools.partial(many, [[(int(a[1:]), i) for a, i in row] for row in places])

    def function(self) -> Callable:
        """The Python function that executes the text."""
        if batch := self.batch():
            return batch
        self.env |= {name: getattr(dtypes, name) for name in ("number", "bits", "float32")}
        source = f"def ptx({', '.join(self.args)}):\n" + "".join(f" {x}\n" for x in self.lines())
        exec(compile(source, f"<{self.instruction.text[:40]}>", "exec"), self.env)
        return self.env["ptx"]


# %% sec-ptx-translate
@functools.cache
def translate(instruction: Instruction) -> Callable:
    """The Python function of an instruction."""
    return Translation(instruction).function()


def rest() -> None:
    """A jump back: somebody else has to change memory first."""
    thread = current()
    thread.block.machine.spinners.append(thread)
    thread.pause("spin", lambda: "goes round in a loop; nothing that it reads changes")
