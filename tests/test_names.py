"""Programs beside the tests (attack, bench) use no name that the package has lost."""

import ast
import importlib
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FOLDERS = "attack", "bench", "helpers"
PROGRAMS = sorted(path for folder in FOLDERS for path in (TESTS / folder).rglob("*.py"))


def modules_and_names(tree):
    """(module, name) of what a program takes of the package: imported, or an attribute of that."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoeuler"):
            for each in node.names:
                yield node.module, each.name
                known[each.asname or each.name] = f"{node.module}.{each.name}"
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.startswith("nanoeuler") and each.asname:
                    known[each.asname] = each.name
    others = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}  # parameters
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in known.keys() - others:
                yield known[node.value.id], node.attr


def missing(module, name):
    """Whether a module has no such name; False for what is no module, as a class or a table."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    if hasattr(found, name):
        return False
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return True
    return False


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(TESTS)))
def test_a_program_uses_names_that_the_package_has(path):
    used = sorted(set(modules_and_names(ast.parse(path.read_text(encoding="utf-8")))))
    assert [f"{module}.{name}" for module, name in used if missing(module, name)] == []
