"""The plan of the house: each room imports what its docstring says, and no arrow runs back up."""

import ast
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from nanoeuler.book.syntax import imports

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    path.relative_to(ROOT).with_suffix("").parts for path in (ROOT / "nanoeuler").rglob("*.py")
)
ROOMS = [parts[1:-1] for parts in MODULES if parts[-1] == "__init__" and len(parts) > 2]


def targets(parts):
    """The modules of the package that a module imports anywhere in it, each as its parts."""
    for name in imports(ROOT.joinpath(*parts).with_suffix(".py").read_text(encoding="utf-8")):
        name = tuple(name.split("."))
        while name not in MODULES and (*name, "__init__") not in MODULES:
            name = name[:-1]
        yield name if name in MODULES else (*name, "__init__")


def allowed(room):
    """What the docstring of a room says that it may import: names of rooms and of modules."""
    path = ROOT.joinpath("nanoeuler", *room, "__init__.py")
    text = ast.get_docstring(ast.parse(path.read_text()))
    said = re.search(r"^May import: (.+?)\.$", text, re.M | re.S)
    assert said, f"{path} does not say what it may import"
    return re.split(r",\s+", said[1]) if said[1] != "nothing" else []


@pytest.mark.parametrize("room", ROOMS, ids=".".join)
def test_a_room_imports_what_it_says(room):
    said, used = allowed(room), set()
    for parts in MODULES:
        if parts[1:-1] != room:
            continue
        for target in targets(parts):
            if target[1:-1] == room or target == ("nanoeuler", "__init__"):
                continue
            ways = {".".join(target[1:n]) for n in range(2, len(target) + 1)} | {"everything"}
            ways &= {*said}
            assert ways, f"{'.'.join(parts)} imports {'.'.join(target)}; its room may import {said}"
            used |= ways
    assert used == {*said}, f"{'.'.join(room)} may import more than it does: {set(said) - used}"


def test_no_arrow_runs_back_up():
    """Neither among modules nor among rooms: static_order names a circle.

    An interface is an agreement between two rooms. It stands in one of them, and both import it.
    """
    graph = {parts: set(targets(parts)) - {parts} for parts in MODULES}
    list(TopologicalSorter(graph).static_order())
    rooms = {}
    for parts, used in graph.items():
        if len(parts) > 2:
            used = {target[1] for target in used if len(target) > 2 and target[-1] != "interface"}
            rooms.setdefault(parts[1], set()).update(used - {parts[1]})
    list(TopologicalSorter(rooms).static_order())


def test_a_method_without_a_docstring_has_that_of_a_base():
    classes = {
        node.name: node
        for parts in MODULES
        for node in ast.parse(ROOT.joinpath(*parts).with_suffix(".py").read_text()).body
        if isinstance(node, ast.ClassDef)
    }

    def told(name, method):
        """Whether the class, or what it inherits from, says what the method does."""
        if name not in classes:
            return False
        for item in classes[name].body:
            if getattr(item, "name", "") == method and ast.get_docstring(item):
                return True
        bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in classes[name].bases]
        return any(told(base, method) for base in bases if base != name)

    silent = [
        f"{name}.{item.name}"
        for name, node in classes.items()
        for item in (node.body if node.bases and name[0] != "_" else ())
        if isinstance(item, ast.FunctionDef) and item.name[0] != "_"
        if not told(name, item.name)
    ]
    assert silent == []


def test_each_folder_is_a_room():
    """Without an `__init__` a folder is in no wheel, and says nothing of what it may import."""
    folders = {parts[1:-1] for parts in MODULES}
    assert folders == {(), *ROOMS}


def called(node):
    """The name of the function that is called, or its last part."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def test_only_the_door_imports_cuda():
    cuda = re.compile(r"(numba\.cuda|numba_cuda|cupy|cuda|nvmath|nccl)(\.|$)")
    openers = set()
    for parts in MODULES:
        for node in ast.walk(ast.parse(ROOT.joinpath(*parts).with_suffix(".py").read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
                names = [ast.literal_eval(a) for a in node.args if isinstance(a, ast.Constant)]
            if any(cuda.match(name) for name in names):
                openers.add(parts[1:])
    assert openers == {("engines", "gpu", "host", "libraries")}


def test_what_is_compiled_takes_the_compiler_from_one_module():
    """It finds a place for machine code where numba finds none, and says what switches it off."""
    for parts in MODULES:
        text = ROOT.joinpath(*parts).with_suffix(".py").read_text()
        direct = re.search(r"^ *from numba import .*\bnjit\b|numba\.n?jit", text, re.M)
        assert not direct or parts[1:] == ("jit",), parts


def test_a_clone_that_is_not_installed_can_be_imported():
    """Without site-packages (-S), so with none of what is installed, and nothing heavy loaded."""
    code = "import sys, nanoeuler; print(nanoeuler.__version__, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert re.fullmatch(r"\d+\.\d+\.\d+ False", done.stdout.strip()), done.stderr


def test_importing_the_package_imports_nothing_heavy():
    heavy = "numpy", "numba", "matplotlib", "rich", "typer"
    code = f"import sys, nanoeuler; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
