"""The embedded corpus: it is made by reading alone, is clean, and is kept until its key changes."""

import ast
import hashlib
import json
import subprocess
import sys
import threading

import pytest

from nanoeuler.data import docstrings
from nanoeuler.errors import UserError

PACKAGE = '''
"""Opening and closing of doors, for houses with some."""
import sys
sys.exit("this module must never be imported")

class Door:
    """A door, which can be open or closed but not both."""

    def close(self):
        """Close the door and turn the key in it.

        - It is an error to close a door twice.
          The second call is the one that fails.
        """

    def _oil(self):
        """Put a drop of oil into the hinges of the door."""
'''


@pytest.fixture
def doors(tmp_path):
    path = tmp_path / "doors.py"
    path.write_text(PACKAGE)
    return {"doors": path}


def test_a_module_is_read_and_not_run(doors):
    text, pairs = docstrings.harvest(doors)
    assert text.splitlines() == [
        "Opening and closing of doors, for houses with some.",
        "A door, which can be open or closed but not both.",
        "Close the door and turn the key in it.",
        "It is an error to close a door twice. The second call is the one that fails.",
        "Put a drop of oil into the hinges of the door.",
    ]
    assert pairs == [
        ("What is the module doors for?", "Opening and closing of doors, for houses with some."),
        ("What is doors.Door?", "A door, which can be open or closed but not both."),
        ("What does doors.Door.close do?", "Close the door and turn the key in it."),
    ]


@pytest.mark.parametrize("text", [
    "x = [i for i in range(10) if i in the_list_of(a, b)].",  # code
    "alpha beta gamma delta epsilon zeta eta theta iota kappa.",  # names
    "is the end of a sentence that began in another place.",  # no beginning
    "This is the beginning of a sentence that ends in",  # no end
    "Not this one.",  # too short
    "The café is closed on the first day of the week.",  # not ASCII
])  # fmt: skip
def test_what_is_not_prose(text):
    assert not docstrings.is_prose(text)


def test_markup_is_removed():
    doc = "Use :func:`~os.path.join` or ``open`` for *all* files, `Path` being **the** exception."
    assert docstrings.paragraphs(doc) == [
        "Use os.path.join or open for all files, Path being the exception."
    ]


def test_the_order_does_not_depend_on_the_order_of_the_files(doors):
    many = {f"m{i}": doors["doors"] for i in range(9)}
    assert docstrings.harvest(many) == docstrings.harvest(dict(reversed(many.items())))


def test_files_that_cannot_be_read_are_left_out(doors, tmp_path):
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9"""')
    (tmp_path / "zero.py").write_bytes(b"x = 1\0")
    names = ("broken", "latin", "zero", "absent")
    more = {name: tmp_path / f"{name}.py" for name in names}
    assert docstrings.harvest({**doors, **more}) == docstrings.harvest(doors)


@pytest.fixture(scope="module")
def sources():
    """The real ones, of this Python."""
    return docstrings.sources()


def test_only_required_packages_are_read(sources):
    required = docstrings.distributions()
    assert {"numpy", "numba", "llvmlite"} <= set(required)  # ours, and one that numba requires
    assert not {"pytest", "sphinx", "nanoeuler"} & set(required)  # extras, and ourselves
    assert {"textwrap", "pydoc_data.topics", "numpy.linalg"} <= set(sources)
    tests = {name for name in sources if "tests" in name.split(".")}
    assert tests <= {"jinja2.tests"}  # which a template can ask about a value: no tests of Jinja's


# A file in which each rule has something to decide.
RULED = '''"""Rules and the cases that they decide, one after another.

A paragraph with :func:`~os.path.join`, ``__init__``, *one* word and **two words** of markup in it.

a paragraph that begins with a small letter is none of ours.

A paragraph that has no end at all is none of ours

It is five words long.

It has only four.

Alpha, beta, gamma, delta, epsilon, zeta are the names.

Alpha, beta, gamma, delta are names.

Four (signs) of (this kind) are too few, so this one stays.

Six (of) those (of this kind) are one too many.

The café is not one that we know how to write.

- An item of a list is a paragraph, and its
  second line belongs to it.
1. A numbered item is one as well, and so it is kept.

A run of lines that ends where the indentation of the next is
    another one is not a whole sentence, and is not kept.
"""

# A comment of whole lines, and the second of
# them is joined to the first.
x = 1  # A comment behind code is not one of those that we take.

## A comment with two signs is as good as one that has one.

text = f"""A string that has {x} in it, and it covers these lines.
# A line of a string is no comment, whatever it may begin with.
"""


class Rule:
    """A rule is what decides; a second sentence is not. It is left out of the answer."""

    def method(self):
        """Decide whether a paragraph is to be kept in the corpus"""

    async def wait(self):
        """Wait until there is something to decide for this rule."""

    def _own(self):
        """Do what is of no interest to anyone who is outside of this class."""

    def fits(self):
        """Say so much that the answer is nearly as long as what would fit into the context of a
        small model together with its question, which is 160 bytes, and then end."""

    def long(self):
        """Say so much that the answer is longer than what would fit into the context of a small
        model together with its question, which is 160 bytes, and then go on a while."""


def outer():
    """Hold a function that nobody can call from the outside of this one."""

    def inner():
        """Be called by nobody but the function that is around this one."""


def again():
    """Wait until there is something to decide for this rule!"""
'''
# The number of the rules: the first 16 digits of the sha256 of what they find in RULED.
DIGEST = {1: "bde95ce87bafa860"}


def test_a_clone_that_is_not_installed_has_the_standard_library(monkeypatch):
    def missing(name):
        raise docstrings.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(docstrings.metadata, "distribution", missing)
    assert docstrings.distributions() == {}
    sources = docstrings.sources()
    assert "textwrap" in sources and not any(name.startswith("numpy.") for name in sources)


def test_other_rules_have_another_number(tmp_path):
    """Prose and comments may change in docstrings.py; what it finds may not, or RULES is raised."""
    for name in ("rules", "other"):
        (tmp_path / f"{name}.py").write_text(RULED)
    found = docstrings.harvest({path.stem: path for path in tmp_path.iterdir()})
    digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
    assert DIGEST == {docstrings.RULES: digest}, "raise RULES, and write the new digest here"


def test_it_is_kept_until_the_key_changes(doors, tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "sources", lambda: doors)
    kept = tmp_path / "kept"
    path = docstrings.text_path(kept)
    assert docstrings.pairs(kept)[0][0] == "What is the module doors for?"
    text = path.read_text()
    path.write_text("kept")
    assert docstrings.text_path(kept).read_text() == "kept"  # the key holds: nothing is read
    monkeypatch.setattr(docstrings, "RULES", docstrings.RULES + 1)
    assert docstrings.text_path(kept).read_text() == text
    folders = [sorted(path.name for path in folder.iterdir()) for folder in kept.iterdir()]
    assert folders == 2 * [["corpus.txt", "key.txt", "pairs.json"]]


def test_the_key_is_not_of_the_prose(monkeypatch):
    """It was: a hash of the module's bytes, so that a better comment changed the corpus."""
    lines = docstrings.key().splitlines()
    assert lines[1] == f"rules {docstrings.RULES}"
    assert {line.split()[0] for line in lines} == {"python", "rules", *docstrings.distributions()}


def test_a_harvest_cut_short_does_not_count(doors, tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "sources", lambda: doors)
    whole = docstrings.text_path(tmp_path / "whole").read_text()

    def die(*paths):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("nanoeuler.data.docstrings.os.rename", die)
        docstrings.text_path(tmp_path / "cut")
    assert not [*(tmp_path / "cut").iterdir()]
    assert docstrings.text_path(tmp_path / "cut").read_text() == whole


def test_two_programs_may_harvest_at_once(doors, tmp_path, monkeypatch):
    """Both find nothing there, both harvest; the slower one takes what the faster one has made."""
    kept, paths = tmp_path / "kept", []
    meeting = threading.Barrier(2, timeout=60)

    def sources():
        meeting.wait()
        return doors

    monkeypatch.setattr(docstrings, "sources", sources)
    # Threads stand for programs, and CPython 3.11 must not build two syntax trees at once in one
    # ("SystemError: AST constructor recursion depth mismatch").
    parse, one = ast.parse, threading.Lock()

    def parse_alone(source):
        with one:
            return parse(source)

    monkeypatch.setattr(docstrings.ast, "parse", parse_alone)

    def work():
        paths.append(docstrings.text_path(kept))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2 and paths[0] == paths[1]
    assert [path.name for path in kept.iterdir()] == [paths[0].parent.name]
    assert paths[0].read_text() == docstrings.harvest(doors)[0]


def test_a_python_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "sources", dict)
    with pytest.raises(UserError, match="--data FILE"):
        docstrings.text_path(tmp_path)


def test_the_real_harvest_is_large_and_clean(sources):
    """Of every twentieth file, since all take 15 seconds: a twentieth of 2 MB and of 3000 pairs."""
    part = {name: sources[name] for name in {*sorted(sources)[::20], "textwrap"}}
    text, pairs = docstrings.harvest(part)
    assert len(text) > 2_000_000 / 20 and len(pairs) > 3_000 / 20
    lines = [line for line in text.splitlines() if line]
    assert len(lines) == len(set(lines)) and all(map(docstrings.is_prose, lines))
    assert len({answer for _, answer in pairs}) == len(pairs)
    assert all(len(answer) <= docstrings.MAX_ANSWER for _, answer in pairs)
    assert "What does textwrap.fill do?" in dict(pairs)


def test_reading_imports_nothing(doors, tmp_path):
    """In a fresh interpreter: the modules known before and after a harvest are the same."""
    program = """
import sys
from nanoeuler.data import docstrings
known = {name: path for name, path in docstrings.sources().items() if name.startswith("html")}
before = set(sys.modules)
assert docstrings.harvest(known)[1]
print([name for name in set(sys.modules) - before if name.startswith("html")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert done.stderr == ""  # no bar where there is no terminal
