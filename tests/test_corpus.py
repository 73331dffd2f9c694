"""The embedded corpus: it is made by reading alone, is clean, and is kept until its key changes."""

import subprocess
import sys

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


def test_only_required_packages_are_read():
    required = docstrings.distributions()
    assert {"numpy", "numba", "llvmlite"} <= set(required)  # ours, and one that numba requires
    assert not {"pytest", "sphinx", "nanoeuler"} & set(required)  # extras, and ourselves
    sources = docstrings.sources()
    assert {"textwrap", "pydoc_data.topics", "numpy.linalg"} <= set(sources)
    assert not any("tests" in name.split(".") for name in sources)


def test_it_is_kept_until_the_key_changes(doors, tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "sources", lambda: doors)
    folder = tmp_path / "kept"
    first = docstrings.text_path(folder).read_text()
    assert docstrings.pairs(folder)[0][0] == "What is the module doors for?"
    (folder / "corpus.txt").write_text("kept")
    assert docstrings.text_path(folder).read_text() == "kept"  # the key holds: nothing is read
    (folder / "key.txt").write_text("python 2.7\n")
    assert docstrings.text_path(folder).read_text() == first
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.txt", "key.txt", "pairs.json"]


def test_a_harvest_cut_short_does_not_count(doors, tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "sources", lambda: doors)
    whole = docstrings.text_path(tmp_path / "whole").read_text()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "corpus.txt").write_text("half")  # and no key beside it
    assert docstrings.text_path(tmp_path / "cut").read_text() == whole


def test_a_python_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "sources", dict)
    with pytest.raises(UserError, match="--data FILE"):
        docstrings.text_path(tmp_path)


def test_the_real_harvest_is_large_and_clean():
    text = docstrings.text_path().read_text(encoding="ascii")
    pairs = docstrings.pairs()
    assert len(text) > 2_000_000 and len(pairs) > 3_000  # the standard library alone gives as much
    lines = [line for line in text.splitlines() if line]
    assert len(lines) == len(set(lines)) and all(map(docstrings.is_prose, lines))
    assert len({answer for _, answer in pairs}) == len(pairs)
    assert all(len(answer) <= docstrings.MAX_ANSWER for _, answer in pairs)
    questions = dict(pairs)
    assert "What does textwrap.fill do?" in questions


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
