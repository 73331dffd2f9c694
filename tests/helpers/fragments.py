"""A fragment of source replaced by another, however the source is laid out and its locals called.

Fragments are compared token by token, so that line breaks, spaces and comments do not matter; but a
comment in a fragment says which of several places is meant, by the words that it begins with. A
name in a fragment that its function has no more may be a local that was renamed: it stands for any
local that the fragment does not name, the same one each time. What must not happen is that a
mistake goes stale unseen: a fragment that is not there exactly once is an error.
"""

import ast
import builtins
import keyword
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2]  # the folder that the package is in
NAME = re.compile(r"[^\W\d]\w*")
TOKEN = re.compile(
    r'''(?P<skip>\s+)|\#[^\n]*|[^\W\d]\w*|\d[\w.]*(?:(?<=[eE])[+-]\d+)?'''
    r'''|"""(?s:.*?)"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*\''''
    r"""|\*\*=?|//=?|<<=?|>>=?|->|\.\.\.|[-+*/%@&|^<>=!:]=|."""
)


class Token(NamedTuple):
    """A token and where it stands in its text."""

    text: str
    start: int
    stop: int


def tokens(text: str) -> list[Token]:
    """The tokens of a piece of Python, which may begin and end anywhere between two."""
    found = (match for match in TOKEN.finditer(text) if not match["skip"])
    return [Token(match[0], *match.span()) for match in found]


@cache
def local_names(function: str) -> frozenset[str]:
    """What the source of a function binds: its parameters, and what it or one in it assigns."""
    names = set()
    method = function.lstrip("\n").startswith(" ")
    for node in ast.walk(ast.parse("if True:\n" + function if method else function)):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


@cache
def names_by_module(module: str) -> dict[str, str]:
    """Name -> `hopper.name`, as the source of a module writes it, of our modules' names."""
    nodes = [*ast.walk(ast.parse(module))]
    lines = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    places = {
        alias.asname or alias.name
        for line in lines
        for alias in line.names
        if (PACKAGE / f"{line.module}.{alias.name}".replace(".", "/")).with_suffix(".py").exists()
    }
    return {
        node.attr: ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in places
    }


def qualified(fragment: str, module: str, function: str) -> str:
    """The fragment with `hopper.wait` for each `wait` that the function's module writes so."""
    own, full = local_names(function), names_by_module(module)
    parts, at, last = [], 0, ""
    for token in tokens(fragment):
        plain = last != "." and token.text not in own
        name = full.get(token.text, token.text) if plain else token.text
        parts += [fragment[at : token.start], name]
        at, last = token.stop, token.text
    return "".join(parts) + fragment[at:]


def unknown(wanted: list[Token], there: list[Token]) -> set[str]:
    """The names of a fragment that may be locals of other names in a source that has them not."""
    taken = {token.text for token in there} | {*keyword.kwlist, *dir(builtins)}
    before = [Token("", 0, 0), *wanted]
    named = (token.text for last, token in zip(before, wanted, strict=False) if last.text != ".")
    return {name for name in named if NAME.fullmatch(name)} - taken


def matches(
    there: list[Token], wanted: list[Token], free: set[str]
) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Yield (first, last character, name in the fragment -> local) of each place that fits.

    free: the locals that an unknown name may stand for.
    """
    names = unknown(wanted, there)
    for i in range(len(there)):
        called: dict[str, str] = {}
        left, last = [*reversed(wanted)], there[i]
        for token in there[i:]:
            want = left[-1].text
            if want in names:
                fits = token.text in free and called.setdefault(want, token.text) == token.text
            elif want[0] == "#":
                fits = token.text.startswith(want)
            else:
                fits = token.text == want
            if fits:
                left.pop()
            elif token.text[0] != "#" or token == there[i]:  # a comment may stand anywhere
                break
            last = token
            if not left:
                break
        if not left and len(set(called.values())) == len(called):
            yield there[i].start, last.stop, called


def replaced(function: str, old: str, new: str, name: str = "the source") -> str:
    """The source of a function with the fragment `old` as `new`; AssertionError unless once."""
    there, wanted = tokens(function), tokens(old)
    free = local_names(function) - {token.text for token in wanted}
    found = list(matches(there, wanted, free))
    assert len(found) == 1, f"{old!r} is {len(found)} times, not exactly once in {name}"
    start, stop, called = found[0]
    before, after = old[: -len(old.lstrip())], old[len(old.rstrip()) :]  # the space around it
    start -= len(before) if function[:start].endswith(before) else 0
    stop += len(after) if function[stop:].startswith(after) else 0
    parts, at = [], 0
    for token in tokens(new):
        parts += [new[at : token.start], called.get(token.text, token.text)]
        at = token.stop
    return function[:start] + "".join(parts) + new[at:] + function[stop:]
