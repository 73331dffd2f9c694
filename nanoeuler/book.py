# Made from book/00-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% book/00-how-this-book-works.md:277
"""The book's own tool: chapters become a package and notebooks, and neither can go stale unseen.

    python -m nanoeuler.book export | run [CHAPTER] | check | where FILE:LINE | html

A chapter is book/NN-name.md; its cells that begin with `#| export nanoeuler/FILE.py` are that file.
The tool leaves out editing: outputs are made from text, and nothing ever flows back.
"""

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import typer
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from nanoeuler.errors import UserError
from nanoeuler.files import project_root, replacing

EXPORT = "#| export "  # a cell whose first line begins so is part of the package


def code_cells(text):
    """Yield (line, source lines) for each code cell of a chapter's text; lines count from 1."""
    lines, at = text.split("\n"), 0
    for cell in jupytext.reads(text, fmt="md:myst").cells:
        source = cell.source.split("\n")
        if cell.cell_type == "code" and cell.source:
            while lines[at : at + len(source)] != source:
                at += 1
                assert at < len(lines), f"jupytext changed this cell on reading it: {source[0]!r}"
            yield at + 1, source
            at += len(source)


# %% book/00-how-this-book-works.md:333
def exported_cells(text):
    """Yield (file, line, source lines) for each exported cell; `line` is that of its first code."""
    for line, source in code_cells(text):
        if source[0].startswith(EXPORT):
            yield source[0].removeprefix(EXPORT).strip(), line + 1, source[1:]


def public_names(tree):
    """Yield (name, node) for what a module's syntax tree defines at its top level for others."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            leaves = [leaf for target in targets for leaf in ast.walk(target)]
            names = [leaf.id for leaf in leaves if isinstance(leaf, ast.Name)]
        else:
            continue
        yield from ((name, node) for name in names if not name.startswith("_"))


# %% book/00-how-this-book-works.md:356
def module_text(chapter, cells):
    """The text of a module: a header, `chapter`'s cells [(line, source lines)], `__all__`."""
    text = f"# Made from {chapter} by nanoeuler.book: edit the chapter, not this file.\n"
    for line, source in cells:
        text += f"\n\n# %% {chapter}:{line}\n" + "\n".join(source).strip("\n") + "\n"
    names = dict.fromkeys(name for name, _ in public_names(ast.parse(text, chapter)))
    listed = "".join(f"    {name!r},\n".replace("'", '"') for name in names)
    return text + (f"\n\n__all__ = [\n{listed}]\n" if names else "")


# %% book/00-how-this-book-works.md:379
def chapters(root):
    """The chapters' paths in reading order: the entries of `_toc.yml` named book/NN-something."""
    files = re.findall(r"file: (book/\d\d\w?-[\w-]+)", (root / "_toc.yml").read_text())
    for file in files:
        if not (root / f"{file}.md").exists():
            raise UserError(f"_toc.yml names {file}.md, which is not there: write it or strike it")
    return [root / f"{file}.md" for file in files]


def chosen(root, name):
    """The chapters whose file name begins with `name`; all of them where it is empty."""
    found = [path for path in chapters(root) if path.name.startswith(name)]
    if not found:
        known = ", ".join(path.stem for path in chapters(root))
        raise UserError(f"no chapter begins with {name!r}: choose one of {known}")
    return found


def package(root, last=None):
    """What the chapters up to the path `last` export: a dict of file -> (chapter, text)."""
    files, order = {}, chapters(root)
    for chapter in order[: order.index(last) + 1] if last else order:
        name, mine = chapter.relative_to(root).as_posix(), {}
        for file, line, source in exported_cells(chapter.read_text(encoding="utf-8")):
            mine.setdefault(file, []).append((line, source))
        for file, cells in mine.items():
            if file in files:
                raise UserError(f"{file} has owners {files[file][0]} and {name}: use two files")
            files[file] = name, module_text(name, cells)
    return files


# %% book/00-how-this-book-works.md:415
def export(root, only=""):
    """Write the modules of the chapters that begin with `only`; return the files that changed."""
    wanted = {path.relative_to(root).as_posix() for path in chosen(root, only)}
    changed = []
    for file, (chapter, text) in package(root).items():
        path = root / file
        if chapter in wanted and not (path.exists() and path.read_text(encoding="utf-8") == text):
            with replacing(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
            changed.append(file)
    if changed:
        for compiled in (root / "nanoeuler" / "__pycache__").glob("*.nb[ic]"):
            compiled.unlink()
    return changed


# %% book/00-how-this-book-works.md:435
def where(text, line):
    """The place "book/NN-name.md:LINE" that line `line` of a module's `text` came from."""
    origin = None
    for number, content in enumerate(text.split("\n")[:line], 1):
        if match := re.fullmatch(r"# %% (\S+):(\d+)", content):
            origin = match[1], int(match[2]) - number - 1
        elif content == "__all__ = [":
            origin = None  # the list of names is the tool's own
    if origin is None or not line <= text.count("\n"):
        raise UserError(f"line {line} comes from no chapter: expected a line of a chapter's code")
    return f"{origin[0]}:{origin[1] + line}"


# %% book/00-how-this-book-works.md:467
def notebook(text):
    """The notebook of a chapter's text: no outputs, and nothing in it that changes between runs."""
    notebook = jupytext.reads(text, fmt="md:myst")
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    seen = {}
    for cell in notebook.cells:
        digest = hashlib.sha256((cell.cell_type + cell.source).encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, -1) + 1
        cell.id = f"{digest}-{seen[digest]}" if seen[digest] else digest
    return notebook


# %% book/00-how-this-book-works.md:487
def prefix(root, chapter):
    """Make the package as of `chapter`, links into nanoeuler/; return the folder that holds it."""
    folder = root / "build" / "prefix" / chapter.stem
    shutil.rmtree(folder, ignore_errors=True)
    compiled = root / "nanoeuler" / "__pycache__"
    compiled.mkdir(exist_ok=True)
    (folder / "nanoeuler").mkdir(parents=True)
    (folder / "nanoeuler" / "__pycache__").symlink_to(compiled)
    for file in package(root, last=chapter):
        (folder / file).symlink_to(root / file)
    return folder


# %% book/00-how-this-book-works.md:502
def environment(root, chapter):
    """The environment variables `chapter` runs under: its prefix of the package, fixed hashes."""
    fixed = {"PYTHONPATH": str(prefix(root, chapter)), "PYTHONHASHSEED": "0"}
    fixed["OPENBLAS_NUM_THREADS"] = "1"  # two chapters at once must not fight over the cores
    return {**os.environ, **fixed}


def run(root, chapter):
    """Export `chapter`, execute it against its prefix of the package, and write its notebook."""
    export(root, chapter.stem)
    made = notebook(chapter.read_text(encoding="utf-8"))
    client = NotebookClient(
        made,
        timeout=600,  # seconds a cell may take; the slowest of ours takes well under one minute
        record_timing=False,
        coalesce_streams=True,  # else what a slow cell prints is cut up as it happened to arrive
        resources={"metadata": {"path": str(chapter.parent)}},
    )
    # What cells write to stderr comes back as outputs; this is the kernel process's own chatter.
    try:
        client.execute(env=environment(root, chapter), stderr=subprocess.DEVNULL)
    except CellExecutionError as error:
        raise UserError(f"{chapter.name} stopped in this cell:\n{error}") from None
    made.metadata = notebook("").metadata
    for cell in made.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise UserError(f"{chapter.name}: expected no stderr, got {output.text!r}")
    with replacing(chapter.with_suffix(".ipynb")) as temporary:
        temporary.write_text(nbformat.writes(made) + "\n", encoding="utf-8")


# %% book/00-how-this-book-works.md:557
def undocumented(file, text):
    """Yield a line for each public def or class without a docstring, each bare constant."""
    lines = text.split("\n")
    for name, node in public_names(ast.parse(text, file)):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            if not any("#" in line for line in lines[node.lineno - 2 : node.end_lineno]):
                yield f"{file}: {name} has no comment that says where its value comes from"
            continue
        members = node.body if isinstance(node, ast.ClassDef) else []
        for item in (node, *members):
            if isinstance(item, (ast.FunctionDef, ast.ClassDef)) and not item.name.startswith("_"):
                if ast.get_docstring(item) is None:
                    yield f"{file}: {item.name} has no docstring"


# %% book/00-how-this-book-works.md:574
def problems(root, only=""):
    """Yield a line for each stale or bare thing in the chapters that begin with `only`."""
    picked = chosen(root, only)
    files = package(root)
    for file, (chapter, text) in files.items():
        if root / chapter in picked:
            path = root / file
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                yield f"{file} is not what {chapter} says: run `python -m nanoeuler.book export`"
            yield from undocumented(file, text)
    for path in sorted((root / "nanoeuler").glob("*.py")):
        if path.relative_to(root).as_posix() not in files:
            yield f"nanoeuler/{path.name} comes from no chapter: delete it or export it from one"
    for chapter in picked:
        path = chapter.with_suffix(".ipynb")
        made = notebook(chapter.read_text(encoding="utf-8"))
        if not path.exists() or content(nbformat.read(path, as_version=4)) != content(made):
            yield f"{path.name} is not {chapter.name}'s cells: run `python -m nanoeuler.book run`"


def content(notebook):
    """What a notebook says, without what it printed: [(type, source, tags)] of its cells."""
    return [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in notebook.cells]


# %% book/00-how-this-book-works.md:701
# The five commands of the module's docstring.
app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


@app.command("export")
def export_command(chapter: str = typer.Argument("", help="the first letters of a file in book/")):
    """Write the package from the chapters. Example: python -m nanoeuler.book export"""
    for file in export(project_root(), chapter):
        print("wrote", file)


@app.command("run")
def run_command(chapter: str = typer.Argument("", help="the first letters of a file in book/")):
    """Execute chapters into their notebooks. Example: python -m nanoeuler.book run 03"""
    for path in chosen(project_root(), chapter):
        run(project_root(), path)
        print("ran", path.name)


@app.command("check")
def check_command(chapter: str = typer.Argument("", help="the first letters of a file in book/")):
    """Say what is stale; exit 1 if anything is. Example: python -m nanoeuler.book check"""
    found = list(problems(project_root(), chapter))
    print("\n".join(found) or "chapters, package and notebooks agree")
    raise typer.Exit(1 if found else 0)


# %% book/00-how-this-book-works.md:730
@app.command("where")
def where_command(place: str = typer.Argument(help="FILE:LINE, as a traceback has it")):
    """Say where a line comes from. Example: python -m nanoeuler.book where nanoeuler/book.py:40"""
    file, _, line = place.rpartition(":")
    if not line.isdecimal() or not Path(file).is_file():
        raise UserError(f"expected FILE:LINE with a file of the package, got {place!r}")
    print(where(Path(file).read_text(encoding="utf-8"), int(line)))


@app.command("html")
def html_command():
    """Build the web pages into build/html. Example: python -m nanoeuler.book html"""
    root = project_root()
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"]  # a warning is an error
    if subprocess.run([*sphinx, "-c", "book", ".", "build/html"], cwd=root).returncode:
        raise UserError("the pages were not built: the lines above say which file and why")
    print("open", root / "build" / "html" / "index.html")


if __name__ == "__main__" and "__file__" in globals():  # run as a file, not as a cell
    try:
        app()
    except UserError as error:
        print(f"nanoeuler.book: {error}", file=sys.stderr)
        sys.exit(2)


__all__ = [
    "EXPORT",
    "code_cells",
    "exported_cells",
    "public_names",
    "module_text",
    "chapters",
    "chosen",
    "package",
    "export",
    "where",
    "notebook",
    "prefix",
    "environment",
    "run",
    "undocumented",
    "problems",
    "content",
    "app",
    "export_command",
    "run_command",
    "check_command",
    "where_command",
    "html_command",
]
