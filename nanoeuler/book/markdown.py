# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-plain
"""Translates MyST into Markdown that every viewer of notebooks can show.

Knows the markup that this book uses: labels, numbered equations, references, glossary terms and
boxes. Leaves out all other markup, which it passes through unchanged.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """The target of a label."""

    file: str  # the file in book/ that contains it
    shown: str  # the text of a link that has none: a heading, or an equation's number


_LABEL = re.compile(r"^\(([a-z0-9-]+)\)=\n(?:\n*#+ (.*))?", re.M)
_FORMULA = re.compile(r"^\$\$\n((?:(?!\$\$).*\n)+)\$\$ \(([a-z0-9-]+)\)$", re.M)
_ROLE = re.compile(r"(?<!`)\{(eq|term)\}`([^`]+)`")
_LINK = re.compile(r"\[([^\[\]]*)\]\(#([a-z0-9-]+)\)")
_BOX = re.compile(r"^:::\{([a-z]+)\} *([^\n]*)\n(.*?)\n:::$", re.M | re.S)
_ROLED = re.compile(r"^(.*?)(?: <(.*)>)?$", re.S)  # of a term: the words shown, the entry's name
_GLOSSARY = re.compile(r"^```\{glossary\}\n(.*?)^```$", re.M | re.S)
_TERM = re.compile(r"^(\S.*)\n  ", re.M)


def anchor(term: str) -> str:
    """The anchor of a term in the glossary."""
    return "term-" + re.sub(r"[^a-z0-9]+", "-", term.lower()).strip("-")


def places(file: str, text: str) -> dict[str, Place]:
    """Label -> place, for every label in a text in MyST."""
    found = {label: Place(file, title) for label, title in _LABEL.findall(text)}
    for number, (_, label) in enumerate(_FORMULA.findall(text), 1):
        found[label] = Place(file, f"({number})")
    return found


def plain(text: str, file: str, known: Mapping[str, Place]) -> str:
    """The plain Markdown of a text in MyST that belongs to `file` in book/."""

    def link(words: str, label: str) -> str:
        """A link to a label, with the notebook's name if the label is in another one."""
        to = known[label]
        there = "" if to.file == file else to.file
        return f"[{words or to.shown}]({there}#{label})"

    def formula(found: re.Match[str]) -> str:
        number = known[found[2]].shown.strip("()")
        return f'<a id="{found[2]}"></a>\n\n$$\n{found[1]}\\tag{{{number}}}\n$$'

    def role(found: re.Match[str]) -> str:
        kind, about = found.groups()
        if kind == "term":
            words, term = _ROLED.findall(about)[0]
            return f"[{words}](glossary.ipynb#{anchor(term or words)})"
        return link("", about) if about in known else found[0]

    def box(found: re.Match[str]) -> str:
        kind, title, inside = found.groups()
        head = title or kind.capitalize()
        head += "" if head.endswith(("?", "!")) else "."
        return "\n".join(f"> {line}".rstrip() for line in f"**{head}** {inside}".split("\n"))

    text = _FORMULA.sub(lambda found: formula(found) if found[2] in known else found[0], text)
    text = re.sub(r"^\(([a-z0-9-]+)\)=$", r'<a id="\1"></a>\n', text, flags=re.M)
    text = _BOX.sub(box, text)
    text = _GLOSSARY.sub(
        lambda whole: _TERM.sub(
            lambda found: f'<a id="{anchor(found[1])}"></a>**{found[1]}.** ', whole[1]), text
    )
    text = _LINK.sub(lambda found: link(*found.groups()) if found[2] in known else found[0], text)
    return _ROLE.sub(role, text)
