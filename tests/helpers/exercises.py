"""The exercises of a chapter: a check and its solution, taken from the chapter's own text."""

import ast

from nanoeuler.book import code_cells
from nanoeuler.files import project_root

DEFINITIONS = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


def answer(chapter, name, old="", new="", **names):
    """`check_name` and `solution_name` of a chapter, the solution with `old` replaced by `new`.

    Only what the cells define and import joins `names`: the chapter's own calls are left out.
    """
    text = (project_root() / "book" / f"{chapter}.md").read_text(encoding="utf-8")
    cells = ["\n".join(lines) for _, lines in code_cells(text)]
    (judge,) = (cell for cell in cells if f"def check_{name}(" in cell)
    (solution,) = (cell for cell in cells if f"def solution_{name}(" in cell)
    assert old in solution
    names.setdefault("__name__", chapter)  # by which the paper tells a kernel from itself
    for cell in judge, solution.replace(old, new):
        tree = ast.parse("\n".join(line for line in cell.split("\n") if not line.startswith(":")))
        tree.body = [part for part in tree.body if isinstance(part, DEFINITIONS)]
        exec(compile(tree, chapter, "exec"), names)
    return names[f"check_{name}"], names[f"solution_{name}"]


def judge(chapter, name, old="", new="", arguments=(), **names):
    """What the check of an exercise says of its solution, with `old` replaced by `new`."""
    check, solution = answer(chapter, name, old, new, **names)
    return check(solution, *arguments)
