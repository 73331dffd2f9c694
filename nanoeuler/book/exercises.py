# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-exercises
"""Exercises: finds them in a chapter's text, writes their stubs, judges answers by their checks.

Run as a program, it's the judge's process: python -m nanoeuler.book.exercises PLAN RESULT.
Leaves out the list of chapters and what each may use, which `build` knows.
"""

import ast
import contextlib
import io
import json
import linecache
import re
import subprocess
import symtable
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nanoeuler.errors import UserError

NUMBER = re.compile(r"(\d+[a-z]?|[A-Za-z])\.[1-9]\d*")  # 4.2, 12a.1, A.1
LIMIT = 60.0  # seconds that an answer may take; our slowest solution takes a few
DRAWS = 5  # seeds that an answer is judged on: as many as the tests judge each solution on
_HINT = re.compile(r"<details>\s*<summary>(Hint[^<]*)</summary>(.*?)</details>", re.S)
_SIMPLE = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom,
           ast.Assign, ast.AnnAssign, ast.AugAssign)  # fmt: skip


class Exercise(NamedTuple):
    """An exercise as it is in its chapter: its hints, its cells, and the cells before it."""

    number: str  # for readers, such as 4.2
    title: str
    chapter: str  # the chapter's file name without its ending
    hints: list[str]
    before: list[str]  # the sources of all cells before it
    cells: list[str]  # the sources of its cells


def sections(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (first line, line after the last, heading) of a chapter's sections, counting from 1."""
    lines, open_fence, heads = text.split("\n"), "", []
    for at, line in enumerate(lines, 1):
        fence = re.match(r"(```+|:::+)", line)
        if fence and not open_fence:
            open_fence = fence[1]
        elif fence and line.strip() == open_fence:
            open_fence = ""
        elif not open_fence and re.match(r"#{1,3} ", line):
            heads.append(at)
    for at, end in zip(heads, [*heads[1:], len(lines) + 1], strict=True):
        yield at, end, lines[at - 1]


def exercises(chapter: str, text: str, cells: Iterable[tuple[int, list[str]]]) -> list[Exercise]:
    """The exercises of a chapter, in order: from its text and its (line, source lines) cells."""
    sources = [(line, "\n".join(s for s in source if not s.startswith(":")))
               for line, source in cells]  # fmt: skip
    letters, found = chapter.split("-")[0].lstrip("0"), []
    for first, end, heading in sections(text):
        if heading.startswith("### Exercise: "):
            body = "\n".join(text.split("\n")[first : end - 1])
            found.append(Exercise(
                f"{letters.upper() if letters.isalpha() else letters}.{len(found) + 1}",
                heading.removeprefix("### Exercise: "),
                chapter,
                [f"{title}\n\n{hint.strip()}" for title, hint in _HINT.findall(body)],
                [source for line, source in sources if line < first],
                [source for line, source in sources if first < line < end],
            ))  # fmt: skip
    return found


def names_of(source: str) -> tuple[set[str], set[str]]:
    """(the names that `source` binds at its top level, the global names that it uses)."""
    top = symtable.symtable(source, "cell", "exec")
    bound = {name.get_name() for name in top.get_symbols() if name.is_assigned()}
    bound |= {name.get_name() for name in top.get_symbols() if name.is_imported()}
    used = {name.get_name() for name in top.get_symbols() if name.is_referenced()}
    left = top.get_children()
    while left:
        table = left.pop()
        read = str(table.get_type()).endswith("class")  # a class may read a name, then bind it
        for name in table.get_symbols():
            if name.is_global() or (read and name.is_referenced()):
                used.add(name.get_name())
        left += table.get_children()
    return bound, used


def context(cells: Iterable[str], wanted: set[str]) -> list[str]:
    """The statements of `cells`, in order, that define the `wanted` names and whatever these need.

    Only definitions, imports and assignments; changes that a loop or a call makes are ignored.
    """
    statements = []
    for cell in cells:
        for part in ast.parse(cell).body:
            if isinstance(part, _SIMPLE):
                source = ast.unparse(part)
                statements.append((source, *names_of(source)))
    while True:
        kept = [(source, used) for source, bound, used in statements if bound & wanted]
        more = wanted.union(*(used for _, used in kept))
        if more == wanted:
            return [source for source, _ in kept]
        wanted = more


class Parts(NamedTuple):
    """The cells of an exercise by their role."""

    check: str  # the name after check_
    answer: str  # the name that the reader must define
    call: str  # the call of the check, in which `seed` is a name if it takes one
    stub: str
    judge: list[str]  # the cells with the check and everything that it uses
    solution: str


def parts(exercise: Exercise) -> Parts:
    """The roles of the cells of `exercise`; UserError if it has no check."""
    checks = [cell for cell in exercise.cells if "def check_" in cell]
    solutions = [cell for cell in exercise.cells if "def solution_" in cell]
    if not checks or not solutions or exercise.cells[0] in (*checks, *solutions):
        raise UserError(f"exercise {exercise.number} has no check: it's for pencil and paper")
    stub, solution = exercise.cells[0], solutions[0]
    name = re.findall(r"def check_(\w+)\(", checks[0])[0]
    shown = [cell for cell in exercise.cells if cell not in solutions]
    calls = [node for cell in shown for node in ast.walk(ast.parse(cell))
             if isinstance(node, ast.Call) and ast.unparse(node.func) == f"check_{name}"]
    assert calls, f"{exercise.number}: no cell calls check_{name} on the stub"
    call = calls[0]
    if re.search(rf"def check_{name}\([^)]*\bseed\b", checks[0]):
        call.keywords = [ast.keyword("seed", ast.Name("seed"))]
    answer = ast.unparse(call.args[0])
    judge = [cell for cell in shown if cell != stub]
    return Parts(name, answer, ast.unparse(call), stub, judge, solution)


def provided(exercise: Exercise) -> list[str]:
    """The statements of the chapter that the stub, the check and the solution need."""
    made = parts(exercise)
    wanted = set().union(*(names_of(cell)[1] for cell in (made.stub, *made.judge, made.solution)))
    return context([*exercise.before, *made.judge], wanted - {made.answer})


def stub_file(exercise: Exercise) -> str:
    """The text of the reader's file: the exercise's title, imports, names provided, stub."""
    made, ready, imports = parts(exercise), set(), []
    used = {"np"}.union(*(names_of(cell)[1] for cell in (made.stub, made.solution)))
    for source in provided(exercise):
        bound, node = names_of(source)[0], ast.parse(source).body[0]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [name for name in node.names if (name.asname or name.name) in used]
            if node.names and ast.unparse(node) not in imports:
                imports.append(ast.unparse(node))
        else:
            ready |= bound & used
    ready -= set().union(*(names_of(source)[0] for source in imports))
    ready -= {made.answer, f"check_{made.check}"}
    lines = [f"# Exercise {exercise.number}: {exercise.title}",
             f"# Judge it with: python -m nanoeuler.book check {exercise.number}"]
    if ready:
        lines.append(f"# Ready when it is judged, from the chapter: {', '.join(sorted(ready))}")
    return "\n".join([*lines, *imports, "", "", made.stub.strip(), ""])


def _execute(text: str, name: str, names: dict[str, Any]) -> None:
    """Run `text` in the namespace `names`; `inspect` can find its source, for the emulator."""
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    exec(compile(text, name, "exec"), names)


def judge(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Run an answer and its check: {verdict: right or a fault, said, seed, printed}."""
    names: dict[str, Any] = {"__name__": plan["chapter"]}
    _execute("\n".join(plan["context"]), plan["chapter"], names)
    printed: list[str] = []
    mine = {**names, "print": lambda *words, **how: printed.append(" ".join(map(str, words)))}
    mine.pop(plan["answer"], None)
    result = {"verdict": "right", "said": "", "seed": None, "printed": printed}
    try:
        _execute(plan["text"], plan["path"], mine)
        if plan["answer"] not in mine:
            return {**result, "verdict": "nameless"}
        scope = {**mine, plan["check"]: names[plan["check"]]}
        for seed in plan["seeds"]:
            said = io.StringIO()
            result["seed"] = scope["seed"] = seed
            with contextlib.redirect_stdout(said):
                taken = eval(plan["call"], scope)
            if not taken:
                return {**result, "verdict": "wrong", "said": said.getvalue()}
    except BaseException as error:  # SystemExit too: an answer must not end its judge
        lines, trace = [], error.__traceback__
        while trace:
            if trace.tb_frame.f_code.co_filename == plan["path"]:
                lines.append(trace.tb_lineno)
            trace = trace.tb_next
        where = f"line {lines[-1]} " if lines else ""
        first = str(error).strip().split("\n")[0]
        said = f"{where}raises {type(error).__name__}{': ' if first else ''}{first}"
        return {**result, "verdict": "raises", "said": said}
    return result


def verdict(
    exercise: Exercise, path: Path, env: Mapping[str, str], folder: Path, seeds: list[int],
    limit: float = LIMIT,
) -> tuple[bool, str]:  # fmt: skip
    """(whether the answer in `path` is right, the message for the reader).

    The judge runs in a separate process, in `folder` and with the environment `env`, for at most
    `limit` seconds. UserError if there is nothing to judge.
    """
    made, number = parts(exercise), exercise.number
    if not path.is_file():
        raise UserError(f"{path} doesn't exist: `python -m nanoeuler.book exercise {number}` "
                        "writes its stub")
    text = path.read_text(encoding="utf-8")
    try:
        written = ast.dump(ast.parse(text, str(path)))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        return False, f"{path} isn't valid Python, line {line}: {getattr(error, 'msg', error)}"
    if written == ast.dump(ast.parse(stub_file(exercise))):
        return False, f"{path} is still the stub: write your lines into {made.answer}"
    plan = {"context": provided(exercise), "chapter": exercise.chapter,
            "check": f"check_{made.check}", "call": made.call, "answer": made.answer,
            "text": text, "path": str(path), "seeds": seeds}
    return _tell(exercise, path, _ask(plan, env, folder, limit), limit)


def _ask(plan, env, folder, limit):
    """The result of `judge` in a separate process; None if time ran out, {} if it died."""
    with tempfile.TemporaryDirectory() as made:
        question, answer = Path(made) / "plan", Path(made) / "result"
        question.write_text(json.dumps(plan), encoding="utf-8")
        command = [sys.executable, "-m", "nanoeuler.book.exercises", str(question), str(answer)]
        try:
            subprocess.run(command, env=dict(env), cwd=folder, timeout=limit,
                           capture_output=True)  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
        return json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}


def _tell(exercise, path, result, limit):
    """(right or not, the lines for the reader), from the result of `_ask`."""
    answer = parts(exercise).answer
    if result is None:
        return False, f"{path} didn't finish within {limit:g} seconds: does it loop forever?"
    kind = result.get("verdict", "dead")
    told = {
        "right": f"exercise {exercise.number} is right",
        "wrong": f"{result.get('said', '').rstrip()}\nexercise {exercise.number} is wrong for seed "
                 f"{result.get('seed')}: repeat it with --seed {result.get('seed')}",
        "raises": f"{path} {result.get('said')}",
        "nameless": f"{path} doesn't define {answer}: keep the stub's name",
        "dead": f"{path} ended the program before it was judged",
    }[kind]  # fmt: skip
    if result.get("printed"):
        told += f"\nwhat it prints isn't judged; it begins: {result['printed'][0][:60]!r}"
    return kind == "right", told.strip()


if __name__ == "__main__" and "__file__" in globals():  # run as a program, not as a cell
    _found = judge(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(_found), encoding="utf-8")
