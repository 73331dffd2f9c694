"""What ptxas says of every kernel: `python tests/helpers/registers.py` writes tests/registers.tsv.

Each kernel of every family of tests/bench/card is compiled, and assembled for the GPUs of MACHINES
that can run it; no GPU is needed, but numba-cuda and ptxas are (the extra `gpu`). With names of
families only their lines are written anew. tests/test_registers.py compiles some of them again, and
holds the others by the digest of what they are made of.
"""

import ast
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
if __name__ in ("__main__", "__mp_main__"):
    sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]

from bench.card import families  # noqa: E402

from nanoeuler import syntax  # noqa: E402
from nanoeuler.engines.gpu.compile import Code, assemble, build, machine  # noqa: E402
from nanoeuler.engines.gpu.kernel import Kernel  # noqa: E402
from nanoeuler.errors import UserError  # noqa: E402

TABLE = TESTS / "registers.tsv"
MACHINES = (8, 0), (9, 0)  # the oldest that the kernels are for, and the one they are measured on
HEAD = "family", "kernel", "GPU", "registers", "spills", "stack", "static", "dynamic", "divisions"
NOTE = """\
# What ptxas says of each kernel: registers of a thread; bytes of a thread that are spilled, and of
# its stack; bytes of shared memory of a block that are fixed, and that the launch asks for; and the
# divisions of 64 bits in its PTX, a hundred instructions each, which numba makes of // and %.
# Written by tests/helpers/registers.py, held by tests/test_registers.py. A digest is of the code
# that the kernels of a family are made of, and of the versions of the compilers.
"""
KERNELS = "nanoeuler.engines.gpu."
Line = tuple[str, ...]  # as in HEAD
DIVISION = re.compile(r"\b(?:div|rem)\.[su]64\b")
# An array of fixed size in shared memory, as PTX lays it out.
STATIC = re.compile(r"(?m)^\s*(?:\.visible )?\.shared [^\[]*\[(\d+)\]")


def static(text: str) -> int:
    """The bytes of shared memory that a PTX text lays out itself."""
    return sum(int(size) for size in STATIC.findall(text))


def measure(make: Callable[[], Kernel]) -> list[Line]:
    """The lines of one kernel, without its names, for each GPU that can run it."""
    code, kernel = build(make), make()
    divisions, lines = len(DIVISION.findall(code.text)), []
    for capability in MACHINES:
        try:
            target = machine(kernel, capability)
        except UserError:  # of another GPU
            continue
        other: Code = code if target == code.target else assemble(code.text, target)
        name = f"{target[0]}.{target[1]}" + "".join(target[2:])
        if other.warnings:  # such as that products wait for themselves
            raise RuntimeError(*other.warnings)
        memory = static(other.text), kernel.shared
        figures = other.registers, other.spills, other.stack, *memory, divisions
        lines.append((name, *map(str, figures)))
    return lines


def bare(path: Path) -> str:
    """A module's syntax tree without its docstrings: what a compiler sees of it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
    return ast.dump(tree)


def digest(family: str) -> str:
    """Of all that decides on a family's machine code: its modules and theirs, and the compilers."""
    root = TESTS.parent
    paths, left = set(), [TESTS / "bench" / "card" / f"{family}.py"]
    while left:
        path = left.pop()
        if path not in paths:
            paths.add(path)
            names = syntax.imports(path.read_text(encoding="utf-8"))
            files = {name.replace(".", "/") + ".py" for name in names if name.startswith(KERNELS)}
            files |= {str(Path(file).parent) + ".py" for file in files}
            left += [root / file for file in files if (root / file).exists()]
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    extra = text.partition("\ngpu = [")[2].partition("]\n")[0]
    parts = [extra, *(bare(path) for path in sorted(paths) if "paper" not in path.parts)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def digests() -> dict[str, str]:
    """Family -> digest, as the table has them."""
    marked = re.findall(r"(?m)^# digest (\w+) (\w+)$", TABLE.read_text(encoding="utf-8"))
    return dict(marked)


def makers(only: Iterable[str] = ()) -> dict[tuple[str, str], Callable[[], Kernel]]:
    """(family, kernel) -> maker."""
    return {
        (family, name): make
        for family, module in families().items()
        if not only or family in only
        for name, make in module.kernels().items()
    }


def lines_of(wanted: Mapping[tuple[str, str], Callable], workers: int | None = None) -> list[Line]:
    """The table's lines of these kernels; RuntimeError for one that does not compile."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {names: pool.submit(measure, make) for names, make in wanted.items()}
        made = []
        for names, job in jobs.items():
            if job.exception():
                raise RuntimeError(f"{': '.join(names)} does not compile: {job.exception()}")
            made += [(*names, *line) for line in job.result()]
        return made


def read() -> list[Line]:
    """The lines of the table as it is committed."""
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    rows = [tuple(line.split("\t")) for line in text.splitlines() if not line.startswith("#")]
    return rows[1:]


def write(lines: Iterable[Line], made: Mapping[str, str]) -> None:
    """Write the table: its lines, and the digest of each family."""
    rows = [f"# digest {family} {of}" for family, of in sorted(made.items())]
    rows += ["\t".join(line) for line in (HEAD, *sorted(lines))]
    TABLE.write_text(NOTE + "\n".join(rows) + "\n", encoding="utf-8")


def main(only: list[str]) -> None:
    """Compile, family by family, and write the lines of each as soon as it is done."""
    known = families()
    for family in only or known:
        lines = lines_of(makers([family]), os.cpu_count())
        made = {name: of for name, of in digests().items() if name in known}
        others = [line for line in read() if line[0] in known and line[0] != family]
        write(others + lines, {**made, family: digest(family)})
        spilled = [line for line in lines if line[HEAD.index("spills")] != "0"]
        for line in spilled:
            print("SPILLS", *line)
        print(f"{family}: {len(lines)} lines, {len(spilled)} with spills", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
