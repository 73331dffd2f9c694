"""The exercises of a chapter: a check and its solution, taken from the chapter's own text."""

import ast
import contextlib
import functools
import io

from nanoeuler.book.build import code_cells
from nanoeuler.files import project_root

DEFINITIONS = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


@functools.cache
def cells_of(chapter):
    """The code cells of a chapter, each as one text."""
    text = (project_root() / "book" / f"{chapter}.md").read_text(encoding="utf-8")
    return ["\n".join(lines) for _, lines in code_cells(text)]


@functools.cache
def definitions(cell, chapter):
    """What a cell defines and imports, compiled: its own calls and options are left out."""
    tree = ast.parse("\n".join(line for line in cell.split("\n") if not line.startswith(":")))
    tree.body = [part for part in tree.body if isinstance(part, DEFINITIONS)]
    return compile(tree, chapter, "exec")


def pair(chapter, name):
    """The cells with `check_name` and with `solution_name`, each of which is there once."""
    (check,) = (cell for cell in cells_of(chapter) if f"def check_{name}(" in cell)
    (solution,) = (cell for cell in cells_of(chapter) if f"def solution_{name}(" in cell)
    return check, solution


def answer(chapter, name, old="", new="", **names):
    """`check_name` and `solution_name` of a chapter, the solution with `old` replaced by `new`.

    Only what the cells define and import joins `names`: the chapter's own calls are left out.
    """
    check, solution = pair(chapter, name)
    assert old in solution, f"{chapter}: the solution of {name} has no {old!r}"
    names.setdefault("__name__", chapter)  # by which the paper tells a kernel from itself
    for cell in check, solution.replace(old, new):
        exec(definitions(cell, chapter), names)
    return names[f"check_{name}"], names[f"solution_{name}"]


def judge(chapter, name, old="", new="", arguments=(), **names):
    """What the check of an exercise says of its solution, with `old` replaced by `new`."""
    check, solution = answer(chapter, name, old, new, **names)
    return check(solution, *arguments)


def verdict(chapter, name, seed, old="", new="", **names):
    """(whether the check takes it, what is printed or raised); an exception is a refusal."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            check, solution = answer(chapter, name, old, new, **names)
            taken = check(solution, seed=seed)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return bool(taken), said.getvalue()
