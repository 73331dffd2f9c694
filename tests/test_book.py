"""The book's tool on small books of its own: what it refuses, and that running changes no byte."""

import builtins
import functools
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

from nanoeuler import measurements
from nanoeuler.book import build, exercises, syntax
from nanoeuler.book.method import method
from nanoeuler.errors import UserError
from nanoeuler.files import project_root, replacing
from nanoeuler.progress import bars, say

HEADER = """---
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# A chapter

"""


def cell(*lines):
    return "```{code-cell} ipython3\n" + "\n".join(lines) + "\n```\n\n"


FIRST = HEADER + cell("#| export nanoeuler/__init__.py", '"""A package."""') + cell(
    "#| export nanoeuler/one.py",
    '"""One."""',
    "",
    "LIMIT = 3  # as many as fingers we use",
    "",
    "",
    "def double(x):",
    '    """Twice x."""',
    "    return 2 * x",
)
SECOND = HEADER + cell("from nanoeuler.one import double", "print(double(21), {'a', 'b', 'c'})")


def written(root):
    """`root`, with a book of two chapters."""
    (root / "book").mkdir()
    (root / "_toc.yml").write_text("root: x\nchapters:\n- file: book/00-a\n- file: book/01-b\n")
    (root / "book" / "00-a.md").write_text(FIRST)
    (root / "book" / "01-b.md").write_text(SECOND)
    (root / "nanoeuler").mkdir()
    return root


@pytest.fixture
def small_book(tmp_path):
    return written(tmp_path)


def run_all(root):
    for chapter in build.chapters(root):
        build.run(root, chapter)


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    root = written(tmp_path_factory.mktemp("run"))
    run_all(root)
    return root


@pytest.fixture
def run_book(run_once, tmp_path):
    """The small book, whose chapters have been run; each test has a copy."""
    return shutil.copytree(run_once, tmp_path, symlinks=True, dirs_exist_ok=True)


def test_running_twice_changes_no_byte(run_book):
    first = [path.read_bytes() for path in sorted((run_book / "book").glob("*.ipynb"))]
    run_all(run_book)
    assert [path.read_bytes() for path in sorted((run_book / "book").glob("*.ipynb"))] == first
    assert len(first) == 2 and b"42" in first[1]
    assert list(build.problems(run_book)) == []


# Bytes at random behind a PNG's signature, its width and its height.
PICTURE = cell(
    ":tags: [rounding]", "", "import base64, os", "from IPython.display import display",
    "head = b'\\x89PNG\\r\\n\\x1a\\n' + bytes([0, 0, 0, 13]) + b'IHDR' + bytes([0, 0, 0, 1] * 2)",
    "text = base64.b64encode(head + os.urandom(16)).decode()",
    "display({'image/png': text}, raw=True)", "print('as large as', 3)",
)  # fmt: skip


def test_a_picture_of_rounding_errors_stays_while_all_else_is_the_same(small_book):
    chapter = small_book / "book" / "00-a.md"
    chapter.write_text(HEADER + PICTURE)
    build.run(small_book, chapter)
    first = chapter.with_suffix(".ipynb").read_bytes()
    build.run(small_book, chapter)
    assert chapter.with_suffix(".ipynb").read_bytes() == first

    def kept(change):
        """Whether a picture stays in spite of another one, and of a change of its cell."""
        made, before = build.stored(chapter), build.stored(chapter)
        drawn = made.cells[-1].outputs[0].data
        drawn["image/png"] = drawn["image/png"][:32] + "other"
        change(made.cells[-1])
        build.keep_pictures(made, before)
        return made.cells[-1].outputs == before.cells[-1].outputs

    def widen(cell):
        data = cell.outputs[0].data
        data["image/png"] = "w" + data["image/png"][1:]

    assert kept(lambda cell: None)
    assert not kept(lambda cell: cell.metadata.pop("tags"))
    assert not kept(lambda cell: cell.update(id="that of other code"))
    assert not kept(lambda cell: cell.outputs[1].update(text="as large as 4\n"))
    assert not kept(lambda cell: cell.outputs.pop())
    assert not kept(widen)


def test_export_writes_only_what_changed(small_book):
    assert build.export(small_book) == ["nanoeuler/__init__.py", "nanoeuler/one.py"]
    assert build.export(small_book) == []


def test_export_drops_machine_code_of_what_changed_and_of_its_users(small_book):
    users = {"two": "from nanoeuler.one import double", "three": "import nanoeuler.two",
             "other": "import math", "on": "import math"}  # fmt: skip
    more = [cell(f"#| export nanoeuler/{name}.py", line) for name, line in users.items()]
    chapter = small_book / "book" / "00-a.md"
    chapter.write_text(FIRST + "".join(more))
    build.export(small_book)
    compiled = small_book / "nanoeuler" / "__pycache__"
    compiled.mkdir(exist_ok=True)
    files = {name: compiled / f"{name}.f-1.py311.nbi" for name in ["one", *users]}
    for file in files.values():
        file.write_bytes(b"")
    build.export(small_book)
    assert all(file.exists() for file in files.values())
    chapter.write_text((FIRST + "".join(more)).replace("2 * x", "3 * x"))
    build.export(small_book)
    assert {name for name, file in files.items() if file.exists()} == {"other", "on"}


def test_cells_are_those_of_the_notebook():
    for text in build.texts(project_root(Path(__file__).parent)):
        written = text.read_text(encoding="utf-8")
        made = [cell.source.rstrip("\n").split("\n") for cell in build.notebook(written).cells
                if cell.cell_type == "code" and cell.source]  # fmt: skip
        cells, lines = build.code_cells(written), written.split("\n")
        assert [source for _, source in cells] == made, text.name
        assert all(lines[n - 1 : n - 1 + len(source)] == source for n, source in cells), text.name


@pytest.mark.parametrize(
    ("mistake", "line", "said"),
    [
        (("y = 3", "double('', 1)"), 2, "TypeError: double()"),
        ((":tags: [hide-cell]", "", "", "1 / 0"), 4, "ZeroDivisionError: division by zero"),
        (("def f(:",), 1, "SyntaxError: invalid syntax"),
        (("print(", "    double([2])", "    + 1)"), 2, "TypeError: can only concatenate"),
    ],
)
def test_an_error_in_a_cell_names_the_line_of_the_chapter(small_book, mistake, line, said):
    chapter = small_book / "book" / "01-b.md"
    text = SECOND + "Some prose.\n\n" + cell("") + cell(*mistake)
    chapter.write_text(text)
    at = text.split("\n").index(mistake[0]) + line
    build.export(small_book)
    with pytest.raises(UserError) as refusal:
        build.run(small_book, chapter)
    assert str(refusal.value).startswith(f"book/01-b.md:{at}: {said}")


def test_an_error_in_the_package_names_the_line_of_its_chapter(small_book):
    (small_book / "book" / "01-b.md").write_text(SECOND.replace("double(21)", "double(None)"))
    at = FIRST.split("\n").index("    return 2 * x") + 1
    with pytest.raises(UserError, match=rf"book/00-a.md:{at} \(nanoeuler/one.py:\d+\)"):
        build.run(small_book, small_book / "book" / "00-a.md")
        build.run(small_book, small_book / "book" / "01-b.md")


def test_an_output_on_stderr_names_the_line_of_its_cell(small_book):
    chapter = small_book / "book" / "01-b.md"
    text = SECOND + cell("") + cell("import sys", "_ = sys.stderr.write('3')")
    chapter.write_text(text)
    at = text.split("\n").index("import sys") + 1
    build.export(small_book)
    with pytest.raises(UserError, match=f"01-b.md:{at}: expected no stderr, got '3'"):
        build.run(small_book, chapter)


def test_a_chapter_cannot_use_a_later_one(small_book):
    toc = "root: x\nchapters:\n- file: book/01-b\n- file: book/02-a\n"
    (small_book / "_toc.yml").write_text(toc)
    (small_book / "book" / "00-a.md").rename(small_book / "book" / "02-a.md")
    build.export(small_book)
    with pytest.raises(UserError, match="No module named 'nanoeuler.one'"):
        build.run(small_book, small_book / "book" / "01-b.md")


def test_a_chapter_may_use_a_later_one_that_it_takes_on_trust(small_book):
    toc = "root: x\nchapters:\n- file: book/01-b\n- file: book/02-a\n"
    (small_book / "_toc.yml").write_text(toc)
    (small_book / "book" / "00-a.md").unlink()
    later, user = small_book / "book" / "02-a.md", small_book / "book" / "01-b.md"
    later.write_text(FIRST.replace("# A chapter", "(ch-a)=\n# A chapter"))
    build.export(small_book)
    user.write_text(SECOND.replace("# A chapter", "# B\n\nNot in its line: [a](#ch-a).\n"))
    with pytest.raises(UserError, match="No module named 'nanoeuler.one'"):
        build.run(small_book, user)
    line = "On trust here: [one](#ch-a), built there."
    user.write_text(SECOND.replace("# A chapter", f"# B\n\n{line}"))
    build.run(small_book, user)
    assert build.trusted(small_book, user) == [later] and not build.trusted(small_book, later)


def test_nothing_is_used_before_it_is_taught_unless_on_trust(monkeypatch):
    """Chapters that import from each other make no circle: static_order would name it."""
    root = project_root(Path(__file__).parent)
    files, graph = build.package(root), {}
    below = build.builds_on(files)  # once, not for each chapter that takes one on trust
    monkeypatch.setattr(build, "builds_on", lambda found: below if found == files else None)
    for chapter in build.chapters(root):
        name = chapter.relative_to(root).as_posix()
        cells = build.code_cells(chapter.read_text(encoding="utf-8"))
        used = {word for _, source in cells for word in syntax.imports("\n".join(source))}
        homes = {build.module_of(files, word) for word in used} - {None}
        graph[name] = {files[home][0] for home in homes} - {name}
        taught = {path.relative_to(root).as_posix() for path in build.taught(root, chapter)}
        assert graph[name] <= taught, f"{name} uses {graph[name] - taught}"
    list(TopologicalSorter(graph).static_order())


def test_docstrings_and_comments_name_only_what_there_is():
    """Each name between backticks is a word of the code, and each file is there."""
    root = project_root(Path(__file__).parent)
    modules = sorted((root / "nanoeuler").rglob("*.py"))
    files = {path.name for path in [*modules, *(root / "tests").rglob("*.py")]}
    known, said = {*dir(builtins), *dir(np), "py"}, []
    for path in modules:
        known |= {*path.relative_to(root).with_suffix("").parts}
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            prose = token.string.startswith(('"""', 'r"""'))
            if token.type == tokenize.COMMENT or token.type == tokenize.STRING and prose:
                said.append((path.name, token.string))
            elif token.type in (tokenize.NAME, tokenize.STRING):
                known |= {*re.findall(r"\w+", token.string)}
    names = [(file, name) for file, text in said
             for name in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)", text)]  # fmt: skip
    assert len(names) > 1000
    assert not [(file, name) for file, name in names if not {*name.split(".")} <= known | {""}]
    named = {(file, name) for file, text in said for name in re.findall(r"\b[a-z]\w*\.py\b", text)}
    assert not {(file, name) for file, name in named if name not in files}


def test_a_prefix_hides_the_installed_package():
    root = project_root(Path(__file__).parent)
    first = build.chapters(root)[0]
    done = subprocess.run(
        [sys.executable, "-c", "import nanoeuler.book.build, nanoeuler.model.layers"],
        env=build.environment(root, first), cwd=root / "book", capture_output=True, text=True,
    )  # fmt: skip
    assert "No module named 'nanoeuler.model'" in done.stderr


def test_check_finds_each_fault(run_book):

    def faults():
        return "\n".join(build.problems(run_book))

    package = run_book / "nanoeuler" / "one.py"
    whole = package.read_text()
    package.write_text(whole.replace("2 * x", "3 * x"))
    assert "nanoeuler/one.py is not what book/00-a.md says" in faults()
    package.write_text(whole)
    stray = run_book / "nanoeuler" / "room" / "stray.py"
    stray.parent.mkdir()
    stray.write_text("")
    assert "nanoeuler/room/stray.py comes from no chapter" in faults()
    stray.unlink()
    chapter = run_book / "book" / "01-b.md"
    chapter.write_text(SECOND.replace("21", "22"))
    assert "01-b.ipynb is not 01-b.md's cells" in faults()
    chapter.write_text(SECOND)
    bare = FIRST.replace('    """Twice x."""\n', "").replace("  # as many as fingers we use", "")
    (run_book / "book" / "00-a.md").write_text(bare)
    assert "double has no docstring" in faults() and "LIMIT has no comment" in faults()


def test_a_missing_chapter_is_named(small_book):
    (small_book / "book" / "01-b.md").unlink()
    with pytest.raises(UserError, match="book/01-b.md"):
        build.chapters(small_book)


def test_one_module_has_one_owner(small_book):
    (small_book / "book" / "01-b.md").write_text(FIRST)
    with pytest.raises(UserError, match="book/00-a.md and book/01-b.md both export"):
        build.export(small_book)


def test_stderr_fails_a_run(small_book):
    (small_book / "book" / "01-b.md").write_text(
        HEADER + cell("import sys", "print('oops', file=sys.stderr)")
    )
    with pytest.raises(UserError, match="expected no stderr"):
        build.run(small_book, small_book / "book" / "01-b.md")


def test_every_line_of_the_package_has_its_line_of_a_chapter():
    root = project_root(Path(__file__).parent)
    for file, (chapter, cells) in build.package(root).items():
        lines, made = (root / chapter).read_text().split("\n"), build.module_lines(chapter, cells)
        assert next(made)[0].startswith("# Made from")
        for line, at in made:
            if at is None:
                assert not line or line.lstrip().startswith("# %% "), (file, line)
            else:  # a method in a cell of its own stands in its class: to the right
                assert line in (lines[at - 1], f"    {lines[at - 1]}"), (file, at)


def test_where_finds_a_line(small_book):
    build.export(small_book)
    module = (small_book / "nanoeuler" / "one.py").read_text().split("\n")
    place = build.where(small_book, "nanoeuler/one.py", module.index("    return 2 * x") + 1)
    assert FIRST.split("\n")[int(place.removeprefix("book/00-a.md:")) - 1] == "    return 2 * x"


def test_where_refuses_what_comes_from_nowhere(small_book):
    build.export(small_book)
    for line in (0, 1, 2, 10**6):
        with pytest.raises(UserError, match="comes from no chapter"):
            build.where(small_book, "nanoeuler/one.py", line)
    with pytest.raises(UserError, match="comes from no chapter"):
        build.where(small_book, "nanoeuler/two.py", 5)
    stale = small_book / "nanoeuler" / "one.py"
    stale.write_text("# edited by hand\n" + stale.read_text())
    with pytest.raises(UserError, match="is not what book/00-a.md says"):
        build.where(small_book, "nanoeuler/one.py", 5)


def test_prose_changes_no_module(small_book):
    """Sentences added, and a section moved, leave every byte of the package."""
    chapter = small_book / "book" / "00-a.md"
    parts = [
        "(sec-a)=\n## A\n\n" + cell("#| export nanoeuler/a.py", "A = 1  # one"),
        "(sec-b)=\n## B\n\n" + cell("#| export nanoeuler/room/b.py", "B = 2  # two"),
    ]
    chapter.write_text(FIRST + "".join(parts))
    changed = build.export(small_book)
    assert "nanoeuler/room/b.py" in changed
    assert "# %% sec-b\n" in (small_book / "nanoeuler" / "room" / "b.py").read_text()
    chapter.write_text(FIRST + "A sentence.\n\n" + "More.\n\n".join(reversed(parts)))
    assert build.export(small_book) == []


def test_commands_report_errors_in_one_line(small_book, monkeypatch):
    done = subprocess.run(
        [sys.executable, "-m", "nanoeuler.book", "run", "zz"],
        cwd=small_book, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("nanoeuler.book: no chapter begins with 'zz'")
    monkeypatch.chdir(small_book.parent)
    for arguments in (["check"], ["export"], ["where", "nonsense"]):
        with pytest.raises(UserError, match="expected to be inside the project"):
            build.app(arguments, standalone_mode=False)


def test_a_notebook_that_a_merge_has_marked_is_told_in_a_line(run_book, monkeypatch):
    path = run_book / "book" / "01-b.ipynb"
    whole = path.read_text()
    monkeypatch.chdir(run_book)
    for damaged in ("<<<<<<< HEAD\n" + whole + "=======\n{}\n>>>>>>> other\n", whole[:-20], "[]",
                    "{}", "\udcff"):  # fmt: skip
        path.write_bytes(damaged.encode(errors="surrogateescape"))
        for words in (["check"], ["export"], ["run", "01"]):
            with pytest.raises(UserError, match=r"01-b.ipynb isn.t a valid notebook \(did a merge"):
                build.app(words, standalone_mode=False)
    path.unlink()
    build.run(run_book, run_book / "book" / "01-b.md")
    assert path.read_text() == whole


def test_replacing_keeps_the_old_file_on_any_error(tmp_path):
    path = tmp_path / "deep" / "file"
    with replacing(path) as temporary:
        temporary.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half a ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and [p.name for p in path.parent.iterdir()] == ["file"]


def test_replacing_refuses_what_is_no_file(tmp_path):
    """A rename puts a file over a device as gladly as over a file, where the user may do that."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "folder", "link"):
        with pytest.raises(UserError, match="is not a file"), replacing(tmp_path / name) as part:
            part.write_text("lost")
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 3
    assert not list((tmp_path / "folder").iterdir())


def test_imports_are_found_wherever_they_stand():
    text = "import os\nimport nanoeuler.a.b as c\ndef f():\n    from nanoeuler.d import e, g\n"
    assert syntax.imports(text) == {"nanoeuler.a.b", "nanoeuler.d.e", "nanoeuler.d.g"}


def test_what_is_said_stays_and_bars_are_for_terminals(capsys):
    news = "[1/2] news of a.txt:100: no emoji, longer than a line of a terminal " * 3
    for shown in (None, True):
        with bars(shown) as progress:
            for _ in progress.track(range(2), description="work"):
                say(progress, news)
        printed = capsys.readouterr()
        assert printed.out == "" and ("\x1b[" in printed.err) == bool(shown)
        assert printed.err.count(news) == 2


def test_cores_are_those_that_this_process_may_use():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("only Linux can give a process fewer cores")
    all_of_them = os.sched_getaffinity(0)
    assert measurements.cores() == len(all_of_them)
    try:
        os.sched_setaffinity(0, {min(all_of_them)})
        assert measurements.cores() == 1 and measurements.device().endswith(", 1 cores")
    finally:
        os.sched_setaffinity(0, all_of_them)


def test_pages_with_a_warning_are_built_again(run_book, monkeypatch):
    """Sphinx does not warn a second time of a page that it keeps from the time before."""
    (run_book / "build" / "html").mkdir(parents=True)
    monkeypatch.chdir(run_book)
    failed = subprocess.CompletedProcess([], returncode=1)
    monkeypatch.setattr(build.subprocess, "run", lambda *command, **how: failed)
    with pytest.raises(UserError, match="the pages were not built"):
        build.html_command()
    assert not (run_book / "build" / "html").exists()


def test_pages_of_chapters_that_are_gone_are_removed(run_book, monkeypatch):
    pages = run_book / "build" / "html" / "book"
    pages.mkdir(parents=True)
    for name in ("00-a.html", "01-b.html", "12c-an-old-name.html"):
        (pages / name).write_text("a page")
    monkeypatch.chdir(run_book)
    built = subprocess.CompletedProcess([], returncode=0)
    monkeypatch.setattr(build.subprocess, "run", lambda *command, **how: built)
    build.html_command()
    assert sorted(path.name for path in pages.iterdir()) == ["00-a.html", "01-b.html"]


def test_measuring_and_running_leave_a_commit_clean(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a",
                        *words], check=True, capture_output=True)  # fmt: skip

    code, rows, notebook = "code.py", "data/measurements/a.json", "book/01-a.ipynb"
    for name in (code, rows, notebook):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    git("init"), git("add", "."), git("commit", "-m", "one")
    monkeypatch.setattr(measurements, "project_root", lambda: tmp_path / "book")
    (tmp_path / rows).write_text("2")
    (tmp_path / notebook).write_text("2")
    clean = measurements.commit()
    assert len(clean) >= 7 and "dirty" not in clean
    (tmp_path / code).write_text("2")
    assert measurements.commit() == f"{clean}-dirty"


def test_rows_are_replaced_by_those_of_the_same_names(tmp_path, monkeypatch):
    (tmp_path / "data" / "measurements").mkdir(parents=True)
    monkeypatch.setattr(measurements, "project_root", lambda: tmp_path)
    one, two = ({"what": "a", "case": "b", "engine": "c", "peer": peer} for peer in (None, "d"))
    measurements.update("new", [one | {"value": 1}, two | {"value": 2}])
    measurements.update("new", iter([one | {"value": 3}]))
    assert measurements.load("new") == [two | {"value": 2}, one | {"value": 3}]


# ---- Exercises

TASK = """### Exercise: a half

""" + cell("def half(x):", '    """Half of x."""', "    ...  # your line") + cell(
    "# not a heading", "import random", "", "", "def check_half(half, seed=None):",
    "    x = random.Random(seed).random() + TINY",
    "    right = half(x) == x / 2", '    print("right" if right else "not a half")',
    "    return right", "", "", "_ = check_half(half, seed=0)",
) + """<details>
<summary>Hint 1: parts</summary>

How many?

</details>

<details>
<summary>Hint 2: more</summary>

Two.

</details>

""" + cell("def solution_half(x):", "    return x / 2", "", "", "assert check_half(solution_half)")
RIGHT = "def half(x):\n    return x / 2\n"


@pytest.fixture
def desk(small_book, monkeypatch, capsys):
    """A chapter with exercises, and a function that runs a command of the tool in its folder."""
    later = TASK.replace("a half", "another") + "## After\n\n" + cell("x = 1")
    text = SECOND + cell("TINY = 2.0**-20", "LOUD = 1 / 1") + TASK + later
    (small_book / "book" / "01-b.md").write_text(text)
    build.export(small_book)
    # what the judge's own process runs, beside the small package
    for name in ("errors", "book/__init__", "book/exercises"):
        text = (project_root(Path(__file__).parent) / "nanoeuler" / f"{name}.py").read_text()
        (small_book / "book" / "00-a.md").write_text(
            (small_book / "book" / "00-a.md").read_text()
            + cell(f"#| export nanoeuler/{name}.py", *text.split("\n"))
        )
    build.export(small_book)
    monkeypatch.chdir(small_book)

    def command(*words):
        try:
            code = build.app(list(words), standalone_mode=False)
        except UserError as error:
            return 2, str(error)
        return code or 0, capsys.readouterr().out

    return command


def answered(desk, text):
    """What `check 1.1` says of an answer."""
    Path("exercises").mkdir(exist_ok=True)
    Path("exercises/1.1.py").write_text(text)
    return desk("check", "1.1")


def test_exercises_are_listed_and_numbered_by_chapter(desk):
    assert desk("exercise") == (0, "1.1    a half\n1.2    another\n")
    assert [desk("exercise", number)[0] for number in ("1.3", "2.1", "A.1", "01")] == [2] * 4
    assert "there is no exercise '1.3'" in desk("check", "1.3")[1]


def test_a_stub_is_written_once(desk):
    assert "doesn't exist" in desk("check", "1.1")[1]
    assert desk("exercise", "1.1")[0] == 0
    written = Path("exercises/1.1.py").read_text()
    assert "def half(x):" in written and "check_half(" not in written
    assert "solution" not in written
    Path("exercises/1.1.py").write_text(RIGHT)
    code, said = desk("exercise", "1.1")
    assert code == 2 and "may hold your answer" in said and "\n" not in said
    assert Path("exercises/1.1.py").read_text() == RIGHT


def test_hints_come_one_by_one(desk):
    assert desk("exercise", "1.1", "--hint", "1") == (0, "Hint 1: parts\n\nHow many?\n")
    assert desk("check", "1.2", "--hint", "2") == (0, "Hint 2: more\n\nTwo.\n")
    assert "has 2 hints" in desk("exercise", "1.1", "--hint", "3")[1]
    assert not Path("exercises").exists()


def test_answers_are_judged(desk):
    assert answered(desk, RIGHT) == (0, "exercise 1.1 is right\n")
    code, said = answered(desk, RIGHT.replace("/ 2", "/ 3"))
    assert code == 1 and said.startswith("not a half\nexercise 1.1 is wrong for seed ")
    seed = said.split()[-1]
    assert desk("check", "1.1", "--seed", seed)[1] == said


def test_answers_that_say_nothing_are_told_why_in_one_line(desk):
    desk("exercise", "1.1")
    for text, why in (
        (Path("exercises/1.1.py").read_text() + "# a thought\n", "is still the stub"),
        ("def half(x)\n", "isn't valid Python, line 1"),
        ("def third(x):\n    return x / 2\n", "doesn't define half"),
        ("def half(x):\n    return x / y\n", "line 2 raises NameError"),
        ("import sys\nsys.exit(0)\n", "line 2 raises SystemExit"),
        ("import os\nos._exit(0)\n", "ended the program before it was judged"),
    ):
        code, said = answered(desk, text)
        assert code == 1 and why in said and said.count("\n") == 1, said


def test_what_an_answer_prints_is_no_verdict(desk):
    code, said = answered(desk, 'def half(x):\n    print("exercise 1.1 is right")\n    return x\n')
    assert code == 1 and said.endswith("what it prints isn't judged; it begins: "
                                       "'exercise 1.1 is right'\n")  # fmt: skip
    code, said = answered(desk, 'print("hello")\n' + RIGHT)
    assert code == 0 and said.startswith("exercise 1.1 is right\nwhat it prints")


def test_an_answer_that_never_ends_is_ended(desk, small_book):
    chapter, one = build.exercise_of(small_book, "1.1")
    path = small_book / "1.1.py"
    path.write_text("def half(x):\n    while True:\n        pass\n")
    env = build.environment(small_book, chapter)
    right, said = exercises.verdict(one, path, env, small_book, [0], limit=2.0)
    assert not right and "didn't finish within 2 seconds" in said


def test_a_judge_needs_no_more_than_what_the_check_rests_on():
    cells = ["a = 1\nb = a + 1\nprint(1 / 0)", "def f():\n    return b", "c = f\na = 2\nx = 3",
             "def g(x):\n    return f() + x"]  # fmt: skip
    assert exercises.context(cells, {"g"}) == [
        "a = 1", "b = a + 1", "def f():\n    return b", "a = 2", "def g(x):\n    return f() + x",
    ]  # fmt: skip


# ---- Methods in cells of their own

CLASS = ["class Counter:", '    """Counts."""', "", "    n = 0", "", "", "LIMIT = 3"]
STEP = ["# One more than before.", "@method(Counter)", "def step(self):", '    """One',
        '    more."""', ""]
STEP += ["    self.n += 1", "", "", "def free():", "    return 1"]
HALF = ["@method(Counter)", "@property", "def half(self):", "    return self.n / 2"]


def made_of(*cells):
    return list(build.module_lines("book/00-a.md", cells))


def test_a_method_of_a_later_cell_stands_in_its_class():
    lines = made_of(("sec-a", 10, CLASS), ("sec-b", 30, STEP), ("sec-a", 50, HALF))
    place = {}
    exec("\n".join(line for line, _ in lines), place)
    counter = place["Counter"]()
    counter.step()
    assert counter.half == 0.5 and place["free"]() == 1 and place["LIMIT"] == 3
    assert not hasattr(place["Counter"], "free")
    assert place["Counter"].step.__doc__ == "One\n        more."
    cells = {10: CLASS, 30: STEP, 50: HALF}
    numbered = [(line, number) for line, number in lines if number]
    assert len(numbered) > 15
    for line, number in numbered:
        first = max(start for start in cells if start <= number)
        assert line.strip() == cells[first][number - first].strip()
    assert [line for line, number in lines if line.strip().startswith("# %%")] == [
        "# %% sec-a", "    # %% sec-b", "    # %% sec-a", "# %% sec-b"
    ]  # fmt: skip
    assert not any("@method" in line for line, _ in lines)


def test_a_cell_of_methods_alone_leaves_nothing_behind():
    lines = [line for line, _ in made_of(("sec-a", 10, CLASS), ("sec-a", 50, HALF))]
    assert lines[-1] == "LIMIT = 3" and lines.count("# %% sec-a") == 1


def test_methods_that_have_no_class_or_would_be_changed_are_refused():
    with pytest.raises(UserError, match="has methods of Counter"):
        made_of(("sec-a", 50, HALF))
    text = ["@method(Counter)", "def said(self):", "    return \"\"\"two", "lines\"\"\""]
    with pytest.raises(UserError, match="a string of several lines"):
        made_of(("sec-a", 10, CLASS), ("sec-a", 50, text))
    parts = ["@method(Counter)", "def said(self):", "    return ('one, '", "            f'{self}')"]
    lines = [line for line, _ in made_of(("sec-a", 10, CLASS), ("sec-a", 50, parts))]
    assert "        return ('one, '" in lines  # quotes of its own on each line: nothing changes


def test_the_mark_works_at_once_in_a_notebook():
    class Counter:
        n = 3

    @method(Counter)
    def double(self):
        return 2 * self.n

    @method(Counter)
    @property
    def half(self):
        return self.n / 2

    @method(Counter)
    @functools.cached_property
    def third(self):
        return [self.n / 3]

    @method(Counter)
    @staticmethod
    def name():
        return "counter"

    counter = Counter()
    assert (counter.double(), counter.half, counter.third) == (6, 1.5, [1])
    assert Counter.name() == "counter"
    assert counter.third is counter.third
