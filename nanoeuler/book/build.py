# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-cells
"""The book's tool: makes the package and the notebooks from chapters, and tells if one is stale.

    python -m nanoeuler.book export | run [CHAPTER] | check | where FILE:LINE | html
    python -m nanoeuler.book exercise [4.2] | check 4.2

A chapter is book/NN-name.md, an appendix book/x-name.md. Its cells that begin with
`#| export nanoeuler/FILE.py` make up that file.
Leaves out the way back: package and notebooks are made from the text, never the text from them.
"""

import ast
import copy
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated

# nbformat validates notebooks with jsonschema. That works without the package for internet
# addresses, whose import spends two seconds on building a grammar.
# ruff: noqa: E402
sys.modules.setdefault("rfc3987_syntax", None)

import jupytext
import nbformat
import typer
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from nanoeuler.book.exercises import DRAWS, NUMBER, Exercise, exercises, parts, stub_file, verdict
from nanoeuler.book.markdown import Place, places, plain
from nanoeuler.book.syntax import class_ends, docstrings, imports, undocumented
from nanoeuler.errors import UserError
from nanoeuler.files import project_root, replacing

EXPORT = "#| export "  # a cell whose first line begins so is part of the package
METHOD = re.compile(r"@method\((\w+)\)")  # the first line of a method outside of its class
LABEL = re.compile(r"\([a-z][\w-]*\)=")  # the line above the heading that it names
# A code cell between its fences: options, and the lines without empty ones around them.
CELL = re.compile(r"^```\{code-cell\}.*\n(?::.*\n)*\n*((?:.*\n)*?)\n*```$", re.MULTILINE)

Cell = tuple[str, int, list[str]]  # an exported cell: its section, its first line, its source lines
Lines = list[tuple[str, int | None]]  # of a module, with their numbers in the chapter
Package = dict[str, tuple[str, list[Cell]]]  # file -> (the chapter that it comes from, its cells)


@cache
def code_cells(text: str) -> tuple[tuple[int, list[str]], ...]:
    """(line, source lines) of each code cell of a chapter's text; lines count from 1."""
    found = [each for each in CELL.finditer(text) if each[1]]
    starts = (1 + text.count("\n", 0, each.start(1)) for each in found)
    return tuple((line, each[1].rstrip("\n").split("\n"))
                 for line, each in zip(starts, found, strict=True))  # fmt: skip


# %% sec-book-export
def exported_cells(text: str) -> Iterator[tuple[str, *Cell]]:
    """Yield (file, section, line, source lines) for each exported cell.

    `line` is that of the cell's first code, `section` the label of the section that contains it.
    """
    lines = enumerate(text.split("\n"), 1)
    labels = [(0, ""), *((n, line[1:-2]) for n, line in lines if LABEL.fullmatch(line))]
    for line, source in code_cells(text):
        if source[0].startswith(EXPORT):
            section = [label for n, label in labels if n < line][-1]
            yield source[0].removeprefix(EXPORT).strip(), section, line + 1, source[1:]


@cache
def outside(text: str) -> tuple[tuple[str, range], ...]:
    """(class, lines from 0) of each method in a cell that is written outside of its class.

    Comments right above are the method's. UserError for a string of several lines that isn't a
    docstring, because indenting its lines would change it.
    """
    source, found = text.split("\n"), []
    marked = [METHOD.fullmatch(line) for line in source]
    for node in ast.parse(text).body if any(marked) else ():
        marks = getattr(node, "decorator_list", [])
        mark = marked[marks[0].lineno - 1] if marks else None
        if mark:
            texts = [each for each in ast.walk(node) if isinstance(each, ast.JoinedStr) or
                     isinstance(each, ast.Constant) and isinstance(each.value, str)]  # fmt: skip
            # A line that ends with its quote is followed by another string, so it can be indented.
            ends = [[source[n].rstrip()[-1] for n in range(each.lineno - 1, each.end_lineno - 1)
                     if source[n].strip()] for each in texts]  # fmt: skip
            if sum(not {*each} <= {'"', "'"} for each in ends) > len(docstrings(node)):
                raise UserError(f"a method of {mark[1]} has a string of several lines that isn't "
                                "a docstring: make it a constant outside")  # fmt: skip
            start = marks[0].lineno - 1
            while start and source[start - 1].startswith("#"):
                start -= 1
            found.append((mark[1], range(start, node.end_lineno)))
    return tuple(found)


def inside(cells: list[Cell]) -> dict[str, list[tuple[str, Lines]]]:
    """Class -> [(section, lines as indented in the class)] of its methods in other cells."""
    found: dict[str, list[tuple[str, Lines]]] = {}
    for section, first, source in cells:
        for name, lines in outside("\n".join(source)):
            there = [n for n in lines if not METHOD.fullmatch(source[n])]
            body = [(f"    {source[n]}" if source[n] else "", first + n) for n in there]
            found.setdefault(name, []).append((section, body))
    return found


def kept(source: list[str]) -> list[int]:
    """The lines of a cell, from 0, that stay in place, without superfluous empty ones."""
    away = {n for _, lines in outside("\n".join(source)) for n in lines}
    stays: list[int] = []
    for n in (n for n in range(len(source)) if n not in away):
        if source[n] or stays and any(source[m] for m in stays[-2:]):
            stays.append(n)
    while stays and not source[stays[-1]]:
        stays.pop()
    return stays


def module_lines(chapter: str, cells: Iterable[Cell]) -> Iterator[tuple[str, int | None]]:
    """Yield (line, its number in `chapter` or None) of the module that the chapter's cells make."""
    yield f"# Made from {chapter} by nanoeuler.book: edit the chapter, not this file.", None
    cells, before = list(cells), None
    methods = inside(cells)
    for section, first, source in cells:
        ends = class_ends("\n".join(source)) if methods else {}
        for place, n in enumerate(kept(source)):
            if not place:
                yield from (("", None), ("", None))
                yield from [(f"# %% {section}", None)] if section != before else ()
                before = section
            yield source[n], first + n
            within = section
            for mark, lines in methods.pop(ends.get(n + 1, ""), ()):
                yield "", None
                yield from [(f"    # %% {mark}", None)] if mark != within else ()
                within, before = mark, None  # the code after the class names its section again
                yield from lines
    if methods:
        raise UserError(f"{chapter} has methods of {', '.join(methods)}, but its module has no "
                        "such class: correct the name in @method(...)")  # fmt: skip


def module_text(chapter: str, cells: Iterable[Cell]) -> str:
    """The text of a module: the lines of `module_lines`."""
    return "".join(f"{line}\n" for line, _ in module_lines(chapter, cells))


def chapters(root: Path) -> list[Path]:
    """The chapters' paths, in the order of `_toc.yml`: book/NN-name, or book/x-name (appendix)."""
    entry = r"file: (book/(?:\d\d\w?|[a-z])-[\w-]+)"
    files = re.findall(entry, (root / "_toc.yml").read_text(encoding="utf-8"))
    for file in files:
        if not (root / f"{file}.md").exists():
            raise UserError(f"_toc.yml names {file}.md, which doesn't exist: write it, or delete "
                            "the line")  # fmt: skip
    return [root / f"{file}.md" for file in files]


def chosen(root: Path, name: str) -> list[Path]:
    """The chapters whose file name begins with `name`; all of them where it is empty."""
    everyone = chapters(root)
    paths = [path for path in everyone if path.name.startswith(name)]
    if not paths:
        names = ", ".join(path.stem for path in everyone)
        raise UserError(f"no chapter begins with {name!r}: choose one of {names}")
    return paths


GROUND = "book/a-"  # the start of this appendix's file name, which all chapters may use


def trusted(root: Path, chapter: Path) -> list[Path]:
    """The chapters that `chapter` takes on trust: its lines "On trust here:" link to them."""
    said = re.findall(r"(?m)^On trust here: .*$", chapter.read_text(encoding="utf-8"))
    labels = re.findall(r"\]\(#([a-z][\w-]*)\)", " ".join(said))
    marks = [f"\n({label})=\n" for label in labels]
    texts = {path: path.read_text(encoding="utf-8") for path in chapters(root) if marks}
    return [path for path, text in texts.items() if any(mark in text for mark in marks)]


def module_of(files: Package, name: str) -> str | None:
    """The file of `files` that the imported `name` belongs to, if any."""
    parts = name.split(".")
    while len(parts) > 1:
        for file in ("/".join(parts) + ".py", "/".join(parts) + "/__init__.py"):
            if file in files:
                return file
        parts.pop()
    return None


def imported(files: Package) -> dict[str, set[str]]:
    """For each module of `files`, the modules that it imports."""
    used = {}
    for file, (chapter, cells) in files.items():
        names = imports(module_text(chapter, cells)) if file.endswith(".py") else ()
        used[file] = {other for name in names if (other := module_of(files, name))}
    return used


def builds_on(files: Package) -> dict[str, set[str]]:
    """For each chapter of `files`, the other chapters whose modules its modules import."""
    used: dict[str, set[str]] = {}
    for file, others in imported(files).items():
        chapter = files[file][0]
        used.setdefault(chapter, set()).update({files[other][0] for other in others} - {chapter})
    return used


def taught(root: Path, chapter: Path) -> list[Path]:
    """The chapters whose exports `chapter` may use: all up to it, those that it takes on trust,
    and the chapters that these build on.
    """
    order = {path.relative_to(root).as_posix(): path for path in chapters(root)}
    names = list(order)
    at = names.index(chapter.relative_to(root).as_posix())
    known = {*names[: at + 1], *(name for name in names if name.startswith(GROUND))}
    ahead = [path.relative_to(root).as_posix() for path in trusted(root, chapter)]
    below = builds_on(package(root)) if ahead else {}
    while ahead:
        name = ahead.pop()
        if name not in known:
            known.add(name)
            ahead += below.get(name, ())
    return [path for name, path in order.items() if name in known]


def package(root: Path, user: Path | None = None) -> Package:
    """The exports of all chapters, or of those `user` may use: file -> (chapter, cells)."""
    files: Package = {}
    for chapter in taught(root, user) if user else chapters(root):
        name = chapter.relative_to(root).as_posix()
        mine: dict[str, list[Cell]] = {}
        for file, section, line, source in exported_cells(chapter.read_text(encoding="utf-8")):
            mine.setdefault(file, []).append((section, line, source))
        for file, cells in mine.items():
            if file in files:
                raise UserError(f"{files[file][0]} and {name} both export {file}: use two files")
            files[file] = name, cells
    return files


def forget(root: Path, changed: list[str]) -> None:
    """Delete numba's machine code for the modules `changed` and for those that import them."""
    stale, users = [*changed], imported(package(root)) if changed else {}
    for file in stale:  # the list grows during the loop
        stale += [user for user, used in users.items() if file in used and user not in stale]
        path = root / file
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.nb[ic]"):
            compiled.unlink()


def export(root: Path, only: str = "") -> list[str]:
    """Write the modules of the chapters that begin with `only`; return the files that changed."""
    wanted = {path.relative_to(root).as_posix() for path in chosen(root, only)}
    changed = []
    for file, (chapter, cells) in package(root).items():
        path, text = root / file, module_text(chapter, cells)
        if chapter in wanted and not (path.exists() and path.read_text(encoding="utf-8") == text):
            with replacing(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
            changed.append(file)
    forget(root, changed)
    return changed


def where(root: Path, file: str, line: int) -> str:
    """The place "book/NN-name.md:LINE" that line `line` of the module `file` was made from."""
    chapter, cells = package(root).get(file, ("", []))
    made = list(module_lines(chapter, cells)) if cells else []
    path = root / file
    if made and path.read_text(encoding="utf-8") != module_text(chapter, cells):
        raise UserError(f"{file} is not what {chapter} says: run `python -m nanoeuler.book export`")
    if not 1 <= line <= len(made) or made[line - 1][1] is None:
        raise UserError(f"line {line} of {file} comes from no chapter: expected a line of its code")
    return f"{chapter}:{made[line - 1][1]}"


# %% sec-book-plain
def write(made: nbformat.NotebookNode, path: Path) -> None:
    """Write a notebook, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(nbformat.writes(made) + "\n", encoding="utf-8")


def texts(root: Path, only: str = "") -> list[Path]:
    """All texts in book/ whose names begin with `only`: chapters and pages without code."""
    return sorted(path for path in (root / "book").glob("*.md") if path.name.startswith(only))


def labels(root: Path) -> dict[str, Place]:
    """The place of each label in the book, for `markdown.plain`."""
    known = {}
    for path in texts(root):
        known |= places(path.with_suffix(".ipynb").name, path.read_text(encoding="utf-8"))
    return known


def readable(
    made: nbformat.NotebookNode, chapter: Path, known: dict[str, Place]
) -> nbformat.NotebookNode:
    """The notebook `made` of a chapter, its prose turned into plain Markdown in place."""
    for cell in made.cells:
        if cell.cell_type == "markdown":
            cell.source = plain(cell.source, chapter.with_suffix(".ipynb").name, known)
    return made


def with_outputs(
    made: nbformat.NotebookNode, stored: nbformat.NotebookNode
) -> nbformat.NotebookNode | None:
    """`made` with the outputs of the notebook `stored`; None if their code cells differ."""
    mine, others = ([c for c in each.cells if c.cell_type == "code"] for each in (made, stored))
    if [cell.source for cell in mine] != [cell.source for cell in others]:
        return None
    for cell, other in zip(mine, others, strict=True):
        cell.outputs, cell.execution_count = other.outputs, other.execution_count
    return made


def stored(text: Path) -> nbformat.NotebookNode:
    """The notebook next to a text, or an empty one; UserError if the file isn't a notebook."""
    path = text.with_suffix(".ipynb")
    try:
        return nbformat.read(path, as_version=4) if path.exists() else notebook("")
    except (ValueError, TypeError, KeyError, AttributeError, nbformat.ValidationError):
        raise UserError(f"{path.name} isn't a valid notebook (did a merge leave its marks?): "
                        f"remove it and run `python -m nanoeuler.book run {text.stem}`") from None


def renew(root: Path, only: str = "") -> list[str]:
    """Write changed prose into notebooks whose code is unchanged; return their names."""
    known, written = labels(root), []
    for text in texts(root, only):
        made, there = notebook(text.read_text(encoding="utf-8")), stored(text)
        if with_outputs(made, there) and readable(made, text, known) != there:
            write(made, text.with_suffix(".ipynb"))
            written.append(f"book/{text.stem}.ipynb")
    return written


def pages(root: Path) -> Path:
    """Make the folder that Sphinx reads: the book as it is written, with all outputs."""
    folder = root / "build" / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "book", folder / "book")
    shutil.copy2(root / "_toc.yml", folder)
    for text in texts(root):
        made, path = notebook(text.read_text(encoding="utf-8")), text.with_suffix(".ipynb")
        if not with_outputs(made, stored(text)):
            raise UserError(f"{path.name} doesn't have the cells of {text.name}: run `python -m "
                            f"nanoeuler.book run {text.stem}`")  # fmt: skip
        write(made, folder / "book" / path.name)
        (folder / "book" / text.name).unlink()
        shutil.copystat(path if path.exists() else text, folder / "book" / path.name)
    return folder


# %% sec-book-run
def notebook(text: str) -> nbformat.NotebookNode:
    """The notebook of a chapter's text, without outputs or anything that varies between runs."""
    made = jupytext.reads(text, fmt="md:myst")
    made.nbformat, made.nbformat_minor = 4, 5
    made.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    seen: dict[str, int] = {}
    for cell in made.cells:
        digest = hashlib.sha256((cell.cell_type + cell.source).encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, -1) + 1
        cell.id = f"{digest}-{seen[digest]}" if seen[digest] else digest
    return made


def prefix(root: Path, chapter: Path) -> Path:
    """Make the partial package that `chapter` may use, of links; return the folder around it."""
    folder = root / "build" / "prefix" / chapter.stem
    shutil.rmtree(folder, ignore_errors=True)
    for file in package(root, chapter):
        link, compiled = folder / file, (root / file).parent / "__pycache__"
        if not link.parent.exists():
            link.parent.mkdir(parents=True)
            compiled.mkdir(exist_ok=True)
            (link.parent / "__pycache__").symlink_to(compiled)
        link.symlink_to(root / file)
    return folder


def environment(root: Path, chapter: Path) -> dict[str, str]:
    """The environment variables for running `chapter`: partial package, fixed hashes, no GPU."""
    fixed = {"PYTHONPATH": str(prefix(root, chapter)), "PYTHONHASHSEED": "0"}
    fixed["CUDA_VISIBLE_DEVICES"] = ""  # outputs come from the CPU, wherever a chapter runs
    fixed["OPENBLAS_NUM_THREADS"] = "1"  # two chapters at once mustn't fight over the cores
    return {**os.environ, **fixed}


ROUNDING = "rounding"  # the tag of a cell whose picture shows rounding errors
HEAD = 32  # characters of base64 that hold a PNG's signature and its width and height


def outlines(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The outputs of a cell, with its pictures reduced to their sizes."""
    outputs = copy.deepcopy(cell.outputs)
    for output in outputs:
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = output.data["image/png"][:HEAD]
    return outputs


def keep_pictures(made: nbformat.NotebookNode, before: nbformat.NotebookNode) -> None:
    """Give cells tagged ROUNDING their pictures from `before` if nothing else has changed."""
    there = {cell.id: cell for cell in before.cells if cell.cell_type == "code"}
    for cell in made.cells:
        if ROUNDING in cell.metadata.get("tags", []) and cell.id in there:
            if outlines(cell) == outlines(there[cell.id]):
                cell.outputs = there[cell.id].outputs


COLOUR = re.compile(r"\x1b\[[\d;]*m")  # a terminal's escape sequence for a colour, as IPython's
IN_CELL = re.compile(r"Cell In\[(\d+)\], line (\d+)")  # the place of an error, as IPython prints it
IN_MODULE = re.compile(r"File \S+/(nanoeuler/\S+\.py):(\d+)")  # the same in the package


def located(root: Path, chapter: Path, traceback: str) -> tuple[str, str]:
    """(CHAPTER:LINE of the cell that failed, its traceback with lines of chapters)."""
    cells, name = code_cells(chapter.read_text(encoding="utf-8")), chapter.relative_to(root)

    def in_cell(found: re.Match) -> str:
        number, line = int(found[1]), int(found[2])
        return f"{name.as_posix()}:{cells[number - 1][0] + line - 1}"

    def in_module(found: re.Match) -> str:
        return f"{where(root, found[1], int(found[2]))} ({found[1]}:{found[2]})"

    plain_text = COLOUR.sub("", traceback)
    first = IN_CELL.search(plain_text)
    told = IN_MODULE.sub(in_module, IN_CELL.sub(in_cell, plain_text))
    return in_cell(first) if first else chapter.name, told


def run(root: Path, chapter: Path) -> None:
    """Export `chapter`, execute it against its partial package, and write its notebook."""
    export(root, chapter.stem)
    text, before = chapter.read_text(encoding="utf-8"), stored(chapter)
    made = notebook(text)
    client = NotebookClient(
        made,
        timeout=600,  # seconds a cell may take; the slowest of ours takes well under one minute
        record_timing=False,
        coalesce_streams=True,  # otherwise the output of a slow cell is cut up as it arrived
        resources={"metadata": {"path": str(chapter.parent)}},
    )
    # The cells' stderr comes back as outputs; the stderr discarded here is the kernel process's.
    try:
        client.execute(env=environment(root, chapter), stderr=subprocess.DEVNULL)
    except CellExecutionError as error:
        outputs = [each for cell in made.cells for each in cell.get("outputs", ())]
        (paint,) = (each.traceback for each in outputs if each.output_type == "error")
        place, told = located(root, chapter, "\n".join(paint))
        raise UserError(f"{place}: {error.ename}: {error.evalue}\n\n{told}") from None
    made.metadata = notebook("").metadata
    executed = [cell for cell in made.cells if cell.cell_type == "code" and cell.source]
    for (line, _), cell in zip(code_cells(text), executed, strict=True):
        for output in cell.outputs:
            if output.get("name") == "stderr":
                raise UserError(f"{chapter.name}:{line}: expected no stderr, got {output.text!r}")
    keep_pictures(made, before)
    write(readable(made, chapter, labels(root)), chapter.with_suffix(".ipynb"))


# %% sec-book-check
def problems(root: Path, only: str = "") -> Iterator[str]:
    """Yield a line for each stale or unexplained thing in the chapters that begin with `only`."""
    picked = chosen(root, only)
    files = package(root)
    for file, (chapter, cells) in files.items():
        if root / chapter in picked:
            path, text = root / file, module_text(chapter, cells)
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                yield f"{file} is not what {chapter} says: run `python -m nanoeuler.book export`"
            yield from undocumented(file, text)
    for path in sorted((root / "nanoeuler").rglob("*.py")):
        file = path.relative_to(root).as_posix()
        if file not in files:
            yield f"{file} comes from no chapter: delete it or export it from one"
    known = labels(root)
    for text in texts(root, only):
        made = readable(notebook(text.read_text(encoding="utf-8")), text, known)
        if content(stored(text)) != content(made):
            name = text.with_suffix(".ipynb").name
            yield f"{name} is not {text.name}'s cells: run `python -m nanoeuler.book run`"


def content(notebook: nbformat.NotebookNode) -> list[tuple[str, str, list[str]]]:
    """A notebook without its outputs: [(type, source, tags)] of its cells."""
    return [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in notebook.cells]


# %% sec-book-commands
# The commands of the module's docstring.
app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)
_Chapter = Annotated[str, typer.Argument(help="the first letters of a file in book/")]
_Place = Annotated[str, typer.Argument(help="FILE:LINE, as a traceback has it")]


@app.command("export")
def export_command(chapter: _Chapter = "") -> None:
    """Write the package and the notebooks' prose. Example: python -m nanoeuler.book export"""
    root = project_root()
    for file in [*export(root, chapter), *renew(root, chapter)]:
        print("wrote", file)


@app.command("run")
def run_command(chapter: _Chapter = "") -> None:
    """Execute chapters into their notebooks. Example: python -m nanoeuler.book run 03"""
    for path in chosen(project_root(), chapter):
        run(project_root(), path)
        print("ran", path.name)


@app.command("check")
def check_command(
    chapter: _Chapter = "",
    seed: Annotated[int | None, typer.Option(help="judge an exercise on this seed alone")] = None,
    hint: Annotated[int, typer.Option(help="print this hint of an exercise instead")] = 0,
) -> None:
    """List what is stale, or judge an exercise (4.2); exit 1 if anything is wrong.

    Examples: python -m nanoeuler.book check, python -m nanoeuler.book check 4.2
    """
    if NUMBER.fullmatch(chapter):
        if hint:
            print(hint_of(exercise_of(project_root(), chapter)[1], hint))
            return
        chance = random.SystemRandom()
        seeds = [chance.randrange(2**31) for _ in range(DRAWS)] if seed is None else [seed]
        right, told = judged(project_root(), chapter, Path("exercises"), seeds)
        print(told)
        raise typer.Exit(0 if right else 1)
    faults = list(problems(project_root(), chapter))
    print("\n".join(faults) or "chapters, package and notebooks agree")
    raise typer.Exit(1 if faults else 0)


def all_exercises(root: Path) -> Iterator[tuple[Path, Exercise]]:
    """Yield (chapter, exercise) for each "### Exercise:" of the book, in reading order."""
    for chapter in chapters(root):
        text = chapter.read_text(encoding="utf-8")
        if "\n### Exercise: " in text:
            yield from ((chapter, one) for one in exercises(chapter.stem, text, code_cells(text)))


def exercise_of(root: Path, number: str) -> tuple[Path, Exercise]:
    """(chapter, exercise) of a `number` such as 4.2; UserError if there is none."""
    for chapter, one in all_exercises(root):
        if one.number.lower() == number.lower():
            return chapter, one
    raise UserError(f"there is no exercise {number!r}: `python -m nanoeuler.book exercise` "
                    "lists them all")


def hint_of(one: Exercise, n: int) -> str:
    """Hint `n` of an exercise, counted from 1; UserError if there is none."""
    if not 1 <= n <= len(one.hints):
        raise UserError(f"exercise {one.number} has {len(one.hints)} hints, so none is hint {n}")
    return one.hints[n - 1]


def judged(root: Path, number: str, folder: Path, seeds: list[int]) -> tuple[bool, str]:
    """(whether the answer in `folder` is right, the message), for the exercise `number`."""
    chapter, one = exercise_of(root, number)
    env = environment(root, chapter)
    return verdict(one, folder / f"{one.number}.py", env, root / "book", seeds)


_Hint = Annotated[int, typer.Option(help="print this hint and write nothing")]


@app.command("exercise")
def exercise_command(number: str = typer.Argument(""), hint: _Hint = 0) -> None:
    """Write an exercise's stub, or list all. Example: python -m nanoeuler.book exercise 4.2"""
    root = project_root()
    if not number:
        for _, one in all_exercises(root):
            print(f"{one.number:6} {one.title}")
        return
    one = exercise_of(root, number)[1]
    if hint:
        print(hint_of(one, hint))
        return
    path, text = Path("exercises") / f"{one.number}.py", stub_file(one)
    if path.exists():
        raise UserError(f"{path} exists and may hold your answer: rename it to begin again")
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"wrote {path}: define {parts(one).answer}, then run "
          f"`python -m nanoeuler.book check {one.number}`")


@app.command("where")
def where_command(place: _Place) -> None:
    """Say where a line comes from. Example: python -m nanoeuler.book where nanoeuler/api.py:40"""
    file, _, line = place.rpartition(":")
    root, path = project_root(), Path(file).resolve()
    if not line.isdecimal() or not path.is_file() or not path.is_relative_to(root):
        raise UserError(f"expected FILE:LINE with a file of the package, got {place!r}")
    print(where(root, path.relative_to(root).as_posix(), int(line)))


@app.command("html")
def html_command() -> None:
    """Build the web pages into build/html. Example: python -m nanoeuler.book html"""
    root = project_root()
    source, html = pages(root), root / "build" / "html"
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"]  # a warning is an error
    if subprocess.run([*sphinx, "-c", "book", source, html], cwd=root).returncode:
        # Sphinx warns of a page once: next time it would keep the page and say nothing.
        shutil.rmtree(html, ignore_errors=True)
        raise UserError("the pages were not built: the lines above say which file and why")
    for page in html.glob("book/*.html"):  # Sphinx keeps the page of a chapter that was renamed
        if not (source / "book" / page.name).with_suffix(".ipynb").exists():
            page.unlink()
    print("open", html / "index.html")


def main() -> None:
    """The program; a UserError prints its message and exits with status 2."""
    try:
        app()
    except UserError as error:
        print(f"nanoeuler.book: {error}", file=sys.stderr)
        sys.exit(2)
