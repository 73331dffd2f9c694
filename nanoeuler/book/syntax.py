# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-check
"""Reads a module's syntax tree, without running it: imports, names, missing docstrings.

Leaves out the values of the names: to know them, import the module.
"""

import ast
from collections.abc import Iterator
from functools import cache


@cache
def imports(text: str) -> frozenset[str]:
    """The names "nanoeuler.room.module" and "nanoeuler.room.module.name" that a module imports.

    Leaves out imports under `if TYPE_CHECKING`, which never run.
    """
    names, left = set(), [ast.parse(text)]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        unread = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        left += node.orelse if unread else ast.iter_child_nodes(node)
    return frozenset(name for name in names if name.startswith("nanoeuler."))


@cache
def class_ends(text: str) -> dict[int, str]:
    """The last line of each class of a module, from 1, and the name of the class."""
    classes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    return {node.end_lineno or 0: node.name for node in classes}


def docstrings(tree: ast.AST) -> list[ast.expr]:
    """The docstrings in a tree that have several lines."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, kinds) and node.body]
    firsts = [body[0].value for body in bodies if isinstance(body[0], ast.Expr)]
    return [each for each in firsts if isinstance(each, ast.Constant)
            and isinstance(each.value, str) and each.end_lineno != each.lineno]  # fmt: skip


def public_names(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield (name, node) for each public name that a module defines at its top level."""
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


def undocumented(file: str, text: str) -> Iterator[str]:
    """Yield a line for each public def or class without a docstring, constant without comment."""
    lines = text.split("\n")
    for name, node in public_names(ast.parse(text, file)):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            if not any("#" in line for line in lines[node.lineno - 2 : node.end_lineno]):
                yield f"{file}: {name} has no comment that says where its value comes from"
            continue
        # In a class that inherits, a method without one has its base's, as `help` shows.
        own = isinstance(node, ast.ClassDef) and not node.bases
        for item in (node, *(node.body if own else ())):
            if isinstance(item, (ast.FunctionDef, ast.ClassDef)) and not item.name.startswith("_"):
                if ast.get_docstring(item) is None:
                    yield f"{file}: {item.name} has no docstring"
