# Made from book/16-fine-tuning.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-corpus
"""The embedded corpus: English that every machine with Python on it already has.

Documentation of the standard library and of nanoeuler's own dependencies, taken from their source
files with `ast`: string literals and comments that read as prose, and question-answer pairs from
qualified names and the first sentence of their docstrings. Nothing is imported, nothing fetched.
It leaves out code, tables, test suites, and whatever was compiled without its source.
"""

import ast
import inspect
import itertools
import json
import os
import platform
import re
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from nanoeuler.errors import UserError
from nanoeuler.files import replacing
from nanoeuler.paths import data_folder
from nanoeuler.progress import bars

# The commonest words of English prose; code and tables lack them.
FUNCTION_WORDS = frozenset(
    "a an and are as at be but by can do for from has have if in is it its may must no not of on or"
    " should so such than that the their them then there these they this to used was when where"
    " which will with would you".split()
)
FUNCTION_WORD_SHARE = 0.2  # running English has about 0.4, lists of names under 0.1
LETTER_SHARE = 0.92  # of letters, spaces, commas, full stops: expressions are below
MIN_WORDS = 5  # fewer is seldom a sentence
MAX_ANSWER = 160  # bytes: with its question it then nearly always fits 128 tokens


def is_prose(text: str) -> bool:
    """Whether `text` reads as English sentences rather than code, a table or a list of names."""
    if not (text.isascii() and text[:1].isupper() and text[-1:] in ".!?:"):
        return False
    words = re.findall(r"[a-z']+", text.lower())
    letters = sum(c.isalpha() or c in " ,." for c in text)
    return (
        len(words) >= MIN_WORDS
        and letters >= LETTER_SHARE * len(text)
        and sum(word in FUNCTION_WORDS for word in words) >= FUNCTION_WORD_SHARE * len(words)
    )


_ITEM = re.compile(r"^ *([-*+]|\d+[.)]) +", re.MULTILINE)
_MARKUP = (  # reStructuredText and NumPy inline markup -> its plain text
    (re.compile(r":[a-zA-Z:+.-]+:`[~!]?([^`<]*?)(?:\s*<[^>]*>)?`"), r"\1"),  # :func:`open`
    (re.compile(r"``([^`]*)``"), r"\1"),  # ``open``
    (re.compile(r"`[~.]?([^`]*)`_{0,2}"), r"\1"),  # `open`, and the link `open`_
    # The next leaves the stars of a*b*c.
    (re.compile(r"(?<!\w)(\*{1,2})(?=\S)([^*]+?)(?<=\S)\1(?!\w)"), r"\2"),  # *emphasis*, **strong**
    (re.compile(r"\s+"), " "),
)


def plain(lines: Iterable[str]) -> str:
    """Join the lines of one paragraph and remove inline markup."""
    text = " ".join(lines)
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text.strip()


def paragraphs(text: str) -> list[str]:
    """The prose paragraphs of a docstring or comment, each on one line."""
    text = _ITEM.sub(lambda marker: "\n" + " " * len(marker.group()), inspect.cleandoc(text))
    runs = itertools.groupby(text.split("\n"), key=_indentation)
    candidates = (plain(lines) for indentation, lines in runs if indentation is not None)
    return [text for text in candidates if is_prose(text)]


def _indentation(line):
    """Spaces before the text of a line; None for an empty line or one of signs alone."""
    return re.match(" *", line).end() if re.search(r"\w", line) else None


def strings_and_comments(source: str, tree: ast.Module) -> list[str]:
    """Every string literal and every block of whole-line comments, in the order of the file."""
    texts, inside = [], set()  # (first line, text); the lines that strings cover
    for node in ast.walk(tree):
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno > node.lineno:
            inside.update(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append((node.lineno, node.value))
    block, start = [], 0
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        line = line.strip()
        if line.startswith("#") and number not in inside:
            start = start if block else number
            block.append(line.lstrip("#"))
        elif block:
            texts.append((start, "\n".join(block)))
            block = []
    return [text for _, text in sorted(texts, key=lambda item: item[0])]


# %% sec-corpus-pairs
# What is asked about each kind of definition.
QUESTIONS = {
    "module": "What is the module {} for?",
    "class": "What is {}?",
    "function": "What does {} do?",
}


def definitions(tree: ast.Module, module: str) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, qualified name, docstring) of a module and of its classes and functions."""
    kinds = {ast.Module: "module", ast.ClassDef: "class"}
    waiting = [(tree, module)]
    while waiting:
        node, name = waiting.pop(0)
        if docstring := ast.get_docstring(node):
            yield kinds.get(type(node), "function"), name, docstring
        if type(node) in kinds:
            waiting += [(child, f"{name}.{child.name}") for child in node.body
                        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]


def question_and_answer(kind: str, name: str, docstring: str) -> tuple[str, str] | None:
    """The pair that a docstring gives, or None where its first sentence is not prose."""
    first = plain(itertools.takewhile(str.strip, docstring.split("\n")))
    sentence = re.match(r".+?[.!?](?= [A-Z]|$)", first)
    answer = sentence.group() if sentence else first + "."
    if any(part.startswith("_") for part in name.split(".")) or len(answer) > MAX_ANSWER:
        return None
    return (QUESTIONS[kind].format(name), answer) if is_prose(answer) else None


# Test suites hold code, not English. The last two hold packages, some of which nanoeuler
# doesn't need.
SKIPPED_FOLDERS = frozenset(("test", "tests", "idle_test", "site-packages", "dist-packages"))


def distributions() -> dict[str, metadata.Distribution]:
    """The packages that nanoeuler requires, and that they require, by name."""
    packages, waiting = {}, ["nanoeuler"]
    while waiting:
        try:
            package = metadata.distribution(waiting.pop())
        except metadata.PackageNotFoundError:  # for another system, or a clone not installed
            continue
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
        if name not in packages:
            packages[name] = package
            required = [line for line in package.requires or [] if "extra" not in line]
            waiting += [re.match(r"[\w.-]+", line).group() for line in required]
    packages.pop("nanoeuler", None)
    return dict(sorted(packages.items()))


def sources() -> dict[str, Path]:
    """The Python source files that the corpus is taken from, by the names of their modules."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [(path.relative_to(library), path) for path in library.rglob("*.py")]
    for package in distributions().values():
        files += [(path, package.locate_file(path)) for path in package.files or []]
    return {
        ".".join(name.with_suffix("").parts).removesuffix(".__init__"): path
        for name, path in files
        if name.suffix == ".py" and not SKIPPED_FOLDERS.intersection(name.parts)
    }


def _parsed(path):
    """The source of a file and its tree; None if it can't be read as UTF-8 or parsed as Python."""
    try:
        source = Path(path).read_text(encoding="utf-8")
        with warnings.catch_warnings(action="ignore"):  # of the parser, on code not ours
            return source, ast.parse(source)
    except (SyntaxError, ValueError, OSError):
        return None


def harvest(modules: dict[str, Path]) -> tuple[str, list[tuple[str, str]]]:
    """Read source files {module name: path}; return (text, pairs).

    text: paragraphs, one a line, with an empty line between modules. pairs: (question, answer).
    No paragraph and no answer occurs twice. Files that are not Python of this version, or not
    UTF-8, are left out.
    """
    text, pairs, seen = [], [], set()

    def is_new(sentence):
        letters = re.sub(r"\W+", "", sentence.lower())
        return not (letters in seen or seen.add(letters))

    order = sorted(modules, key=lambda name: sha256(name.encode()).digest())
    with bars() as progress:
        for name in progress.track(order, description="reading documentation"):
            if parsed := _parsed(modules[name]):
                source, tree = parsed
                parts = strings_and_comments(source, tree)
                prose = [each for part in parts for each in paragraphs(part)]
                text.append("\n".join(filter(is_new, prose)))
                candidates = (question_and_answer(*item) for item in definitions(tree, name))
                # answers are compared with answers only, hence the prefix
                pairs += [pair for pair in candidates if pair and is_new("answer " + pair[1])]
    return "\n\n".join(filter(None, text)) + "\n", pairs


RULES = 1  # raised whenever the same source files would give another harvest


def key() -> str:
    """What a harvest depends on, a line each: Python, the rules, and the packages."""
    versions = [f"{name} {package.version}" for name, package in distributions().items()]
    return "\n".join([f"python {platform.python_version()}", f"rules {RULES}", *versions]) + "\n"


def _write(folder, text, pairs):
    """Write a harvest as `folder`, completely or not at all; a folder that exists is kept."""
    files = {"corpus.txt": text, "pairs.json": json.dumps(pairs, indent=0), "key.txt": key()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".harvest-", dir=folder.parent) as place:
        for name, content in files.items():
            with replacing(Path(place, folder.name, name)) as temporary:
                temporary.write_text(content, encoding="utf-8")
        try:
            os.rename(Path(place, folder.name), folder)
        except OSError:
            if not folder.exists():  # else another program was faster
                raise


def _folder(parent):
    """The folder in `parent` (None: data/embedded) with the harvest of today's key."""
    folder = Path(parent or data_folder("embedded")) / sha256(key().encode()).hexdigest()[:16]
    if not folder.exists():
        text, pairs = harvest(sources())
        if not pairs:
            raise UserError(
                "expected documented Python source files under "
                f"{sysconfig.get_paths()['stdlib']}, found none: give a text of your own with "
                "--data FILE"
            )
        _write(folder, text, pairs)
    return folder


def text_path(parent: Path | None = None) -> Path:
    """The file with the embedded corpus; harvested on the first call, in about half a minute."""
    return _folder(parent) / "corpus.txt"


def pairs(parent: Path | None = None) -> list[tuple[str, str]]:
    """The embedded question-answer pairs; harvested on the first call."""
    stored = (_folder(parent) / "pairs.json").read_text(encoding="utf-8")
    return [tuple(pair) for pair in json.loads(stored)]
