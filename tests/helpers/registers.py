"""What ptxas says of every kernel: `python tests/helpers/registers.py` writes tests/registers.tsv.

Each kernel of every family of tests/bench/card has been compiled, and assembled for the GPUs of
MACHINES that can run it; no GPU is needed, but numba-cuda and ptxas are (the extra `gpu`). A line
ends with a digest of all that decides on it, and only kernels whose digest has changed are compiled
again. After a change that machine code cannot show, such as a name's, `--same` compiles a sample.
"""

import argparse
import ast
import hashlib
import inspect
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
if __name__ in ("__main__", "__mp_main__"):
    sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]

from bench.card import families  # noqa: E402

from nanoeuler.engines.gpu.host.compile import Code, assemble, build, machine, to_ptx  # noqa: E402
from nanoeuler.engines.gpu.lang.card import THREADS, limit, require_fit  # noqa: E402
from nanoeuler.engines.gpu.lang.instruction import looked_up  # noqa: E402
from nanoeuler.engines.gpu.lang.kernel import Kernel  # noqa: E402
from nanoeuler.errors import UserError  # noqa: E402

TABLE = TESTS / "registers.tsv"
# The oldest that the kernels are for, those that people own, and the one they are measured on.
MACHINES = (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)
# Families that are compiled for the oldest and the measured GPU alone.
FEWER, FEW = ("decode", "flash_scalar", "ladder", "twins"), ("8.0", "9.0", "9.0a")
SHARE = 8  # of kernels that are said to be the same, one in so many is compiled
HEAD = ("family", "kernel", "GPU", "registers", "spills", "stack", "static", "dynamic", "divisions",
        "digest")  # fmt: skip
NOTE = """\
# What ptxas says of each kernel: registers of a thread; bytes of a thread that are spilled, and of
# its stack; bytes of shared memory of a block that are fixed, and that the launch asks for; and the
# divisions of 64 bits in its PTX, a hundred instructions each, which numba makes of // and %.
# Written by tests/helpers/registers.py, held by tests/test_registers.py. The digest is of the code
# that the kernel reaches, and of the versions of the compilers.
"""
Line = tuple[str, ...]  # as in HEAD, or a part of it
Names = tuple[str, str]  # of a family, and of a kernel
DIVISION = re.compile(r"\b(?:div|rem)\.[su]64\b")
# An array of fixed size in shared memory, as PTX lays it out.
STATIC = re.compile(r"(?m)^\s*(?:\.visible )?\.shared [^\[]*\[(\d+)\]")


def static(text: str) -> int:
    """The bytes of shared memory that a PTX text lays out itself."""
    return sum(int(size) for size in STATIC.findall(text))


def runs_on(kernel: Kernel) -> list[tuple]:
    """The targets of MACHINES for which a kernel is compiled: those that run it and have room.

    For its shared memory, and for the threads of as many blocks as it is made to be resident.
    """
    targets, threads = [], math.prod(kernel.block) * kernel.resident
    for capability in MACHINES:
        try:
            require_fit(kernel, capability)
            target = machine(kernel, capability)
        except UserError:
            continue
        targets += [target] * (threads <= limit(THREADS, capability))
    return targets


def spelled(target: tuple) -> str:
    """A target as the table has it: 8.9, 9.0a."""
    return f"{target[0]}.{target[1]}" + "".join(target[2:])


def measure(make: Callable[[], Kernel], names: Iterable[str] = ()) -> list[Line]:
    """The lines of one kernel, without its names, for each GPU that can run it, or for `names`."""
    code, kernel = build(make), make()
    divisions, lines = len(DIVISION.findall(code.text)), []
    for target in runs_on(kernel):
        if names and spelled(target) not in names:
            continue
        other: Code = code if target == code.target else assemble(code.text, target)
        if other.warnings:  # such as that products wait for themselves
            raise RuntimeError(*other.warnings)
        memory = static(other.text), kernel.shared
        figures = other.registers, other.spills, other.stack, *memory, divisions
        lines.append((spelled(target), *map(str, figures)))
    return lines


@cache
def bare(thing: CodeType | type) -> str:
    """The source of a function or a class without comments, docstrings and layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def ours(thing: FunctionType | type) -> bool:
    """Whether a function or a class is of this repository."""
    file = Path(getattr(sys.modules[thing.__module__], "__file__", None) or "/").resolve()
    return file.is_relative_to(TESTS) or file.is_relative_to(TESTS.parent / "nanoeuler")


def reached(*functions: FunctionType) -> str:
    """The source of functions and of all that they look up: other functions of ours, constants.

    What `instruction.rebind` would give other names, and nothing else of the modules around it.
    """
    numbers: dict[FunctionType, int] = {}
    parts = []

    def told(value: Any) -> str:
        plain = inspect.unwrap(value) if callable(value) else value  # of a cache, what it keeps
        if isinstance(plain, FunctionType) and ours(plain):
            return visit(plain)
        if isinstance(value, type) and ours(value):
            return bare(value)
        named = isinstance(value, FunctionType | ModuleType | type)
        return value.__name__ if named else repr(value)

    def visit(function: FunctionType) -> str:
        if function not in numbers:
            numbers[function] = len(numbers)
            code, names = function.__code__, looked_up(function)
            cells = (cell.cell_contents for cell in function.__closure__ or ())
            names |= zip(code.co_freevars, cells, strict=True)
            values = [f"{name} = {told(names[name])}" for name in sorted(names)]
            defaults = [told(value) for value in function.__defaults__ or ()]
            parts.extend([str(numbers[function]), bare(code), *values, *defaults])
        return f"function {numbers[function]}"

    for function in functions:
        visit(function)
    return "\n".join(parts)


@cache
def compilers() -> str:
    """All that decides on the machine code of every kernel: our own part, and versions."""
    text = (TESTS.parent / "pyproject.toml").read_text(encoding="utf-8")
    extra = text.partition("\ngpu = [")[2].partition("]\n")[0]
    numba = re.search(r'"numba==.*"', text)[0]
    return "\n".join([numba, extra, reached(to_ptx, assemble, machine)])


def digest(kernel: Kernel) -> str:
    """Of all that decides on a kernel's line in the table: its code, its shape, the compilers."""
    shape = kernel.args, kernel.block, kernel.shared, kernel.resident, kernel.target
    shape += tuple((name, kind._fields) for name, kind in kernel.groups.items())
    text = "\n".join([compilers(), repr(shape), reached(kernel.function)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def makers(only: Iterable[str] = ()) -> dict[Names, Callable[[], Kernel]]:
    """(family, kernel) -> maker."""
    return {
        (family, name): make
        for family, module in families().items()
        if not only or family in only
        for name, make in module.kernels().items()
    }


def lines_of(
    wanted: Mapping[Names, Callable[[], Kernel]], workers: int | None = None,
    only: Mapping[Names, Iterable[str]] | None = None,
) -> dict[Names, list[Line]]:  # fmt: skip
    """The table's lines of these kernels, without digests; RuntimeError where one won't compile.

    only: the GPUs of those kernels that are not compiled for all.
    """
    only = only or {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {
            names: pool.submit(measure, make, only.get(names, ())) for names, make in wanted.items()
        }
        made = {}
        for names, job in jobs.items():
            if job.exception():
                raise RuntimeError(f"{': '.join(names)} does not compile: {job.exception()}")
            made[names] = [(*names, *line) for line in job.result()]
        return made


def read() -> list[Line]:
    """The lines of the table as it is committed."""
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    rows = [tuple(line.split("\t")) for line in text.splitlines() if not line.startswith("#")]
    return rows[1:]


def write(lines: Iterable[Line]) -> None:
    """Write the table."""
    rows = ["\t".join(line) for line in (HEAD, *sorted(lines))]
    TABLE.write_text(NOTE + "\n".join(rows) + "\n", encoding="utf-8")


def missing(kernel: Kernel, lines: Iterable[Line]) -> list[str]:
    """The GPUs that a kernel's lines in the table lack, as the table has them."""
    there = {line[2] for line in lines}
    return [name for name in map(spelled, runs_on(kernel)) if name not in there]


def renew(family: str, known: Mapping[Names, list[Line]], same: bool) -> list[Line]:
    """The lines of a family; only kernels whose digest is another are compiled.

    known: the table's lines of each kernel. same: one in SHARE of those that have lines is
    compiled, and the others keep theirs; RuntimeError if one needs something else than before.
    """
    made = makers([family])
    digests = {names: digest(make()) for names, make in made.items()}
    there = {names: {line[-1] for line in known.get(names, [])} for names in made}
    new = [names for names in made if not there[names]]
    changed = [names for names in made if there[names] - {digests[names]}]
    tried = changed[::SHARE] if same else changed
    print(f"{family}: of {len(made)} kernels {len(changed) + len(new)} have changed", flush=True)
    kept = {names: [line[:-1] for line in known.get(names, [])] for names in made}
    lacking = {names: missing(made[names](), kept[names]) for names in made
               if names not in new + changed and family not in FEWER}  # fmt: skip
    lacking = {names: gpus for names, gpus in lacking.items() if gpus}
    if lacking:  # of a GPU that MACHINES did not have
        print(f"{family}: {len(lacking)} kernels lack a GPU", flush=True)
        more = lines_of({names: made[names] for names in lacking}, os.cpu_count(), lacking)
        kept |= {names: [*kept[names], *lines] for names, lines in more.items()}
    few = dict.fromkeys(made, FEW) if family in FEWER else {}
    compiled = lines_of({names: made[names] for names in new + tried}, os.cpu_count(), few)
    for names, lines in compiled.items():
        if same and kept[names] and sorted(lines) != sorted(kept[names]):
            raise RuntimeError(f"{': '.join(names)} is not the same: {kept[names]}, now {lines}")
    return [(*line, digests[names]) for names, lines in (kept | compiled).items() for line in lines]


def main() -> None:
    """Compile what has changed, family by family, and write the lines of each when it is done."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", help="all, if none is named")
    parser.add_argument("--same", action="store_true", help=f"""the code changed, what it does did
        not: compile one kernel in {SHARE} of those that changed, keep the others' figures""")
    options = parser.parse_args()
    for family in options.families or families():
        rows, known = read(), families()
        lines: dict[Names, list[Line]] = {}
        for line in rows:
            lines.setdefault(line[:2], []).append(line)
        others = [line for line in rows if line[0] in known and line[0] != family]
        mine = renew(family, lines, options.same)
        write(others + mine)
        for line in mine:
            if line[HEAD.index("spills")] != "0":
                print("SPILLS", *line)


if __name__ == "__main__":
    main()
