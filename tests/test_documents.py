"""Books without their wrapping, on every real one; texts, row groups, questions and answers."""

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nanoeuler.data.catalogue import File, Source, catalogue
from nanoeuler.data.documents import documents, pairs, row_groups, text_of, unwrapped
from nanoeuler.errors import UserError
from nanoeuler.files import project_root

DATA = Path(os.environ.get("NANOEULER_DATA", project_root() / ".." / "shared" / "data"))
BOOKS = [file.name for file in catalogue()["gutenberg"].files]


def needs(*names):
    missing = [name for name in names if not (DATA / name).exists()]
    return pytest.mark.skipif(
        bool(missing), reason=f"needs {', '.join(missing)} in {DATA} (NANOEULER_DATA)"
    )


def source(format, *names):
    files = tuple(File(name, "https://nowhere.invalid/file") for name in names)
    return Source("thing", "A thing", "MIT", "for tests", format, files)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "thing").mkdir()
    return tmp_path


# ------------------------------------------------------------------ Project Gutenberg

START = "*** START OF THIS PROJECT GUTENBERG EBOOK A BOOK ***"
END = "*** END OF THIS PROJECT GUTENBERG EBOOK A BOOK ***"


def wrapped(body, start=START, end=END):
    return f"The Project Gutenberg EBook of A Book\n\n{start}\n{body}\n{end}\n\nA licence.\n"


@pytest.mark.parametrize(
    "start",
    [
        START,
        "*** START OF THE PROJECT GUTENBERG EBOOK A BOOK ***",
        "***START OF THE PROJECT GUTENBERG EBOOK A BOOK***",
        "*** START OF THIS PROJECT GUTENBERG EBOOK A BOOK\nWITH A LONG TITLE ***",
        "*** START OF THIS PROJECT GUTENBERG EBOOK LES MISÉRABLES ***  ",
    ],
)
@pytest.mark.parametrize(
    "end",
    [
        END,
        "***END OF THE PROJECT GUTENBERG EBOOK A BOOK***",
        "*** END OF THE PROJECT GUTENBERG EBOOK A BOOK ***",
    ],
)
def test_the_marks_variants(start, end):
    assert unwrapped(wrapped("\n\nOne.\n\nTwo.\n\n", start, end)) == "One.\n\nTwo.\n"


@pytest.mark.parametrize(
    "thanks",
    [
        "Produced by Judith Boss and David Widger",
        "Produced by Chuck Greif and the Online Distributed\nProofreading Team",
        "E-text prepared by anonymous Project Gutenberg\nvolunteers",
        "Transcribed from the 1910 John Murray edition by David Price",
        "Special thanks are due to Sharon Partridge for extensive\nproofreading",
        "An Anonymous Volunteer, and David Widger",
    ],
)
def test_thanks_are_dropped_once_and_only_in_front(thanks):
    assert unwrapped(wrapped(f"\n\n{thanks}\n\n\n\nTITLE\n\nOne.")) == "TITLE\n\nOne.\n"
    later = f"TITLE\n\n{thanks}\n\nOne.\n"
    assert unwrapped(wrapped(later)) == later


@pytest.mark.parametrize(
    "closing",
    [
        "End of the Project Gutenberg EBook of A Book, by A Writer",
        "End of The Project Gutenberg Etext of A Book, by A Writer",
        "End of Project Gutenberg's A Book, by A Writer",
        "End of Project Gutenberg’s A Book, by A Writer",
        "End of the Project Gutenberg EBook of A Book,\nComplete, by A Writer",
    ],
)
def test_the_closing_sentence_is_dropped_at_the_end_only(closing):
    assert unwrapped(wrapped(f"One.\n\nTHE END\n\n\n{closing}\n")) == "One.\n\nTHE END\n"
    inside = f"One.\n\n{closing}\n\nTwo.\n\nThree.\n"
    assert unwrapped(wrapped(inside)) == inside
    longer = f"One.\n\n{closing}\nwas what\nhe read\nthere.\n"  # no sentence of theirs
    assert unwrapped(wrapped(longer)) == longer


def test_what_looks_like_a_mark_inside_a_line_is_the_books():
    body = "He wrote *** END OF THIS PROJECT GUTENBERG EBOOK *** on the wall.\n"
    assert unwrapped(wrapped(body)) == body


@pytest.mark.parametrize(
    "text, missing",
    [
        ("A plain text.", "START"),
        ("", "START"),
        (f"{END}\n", "START"),
        (f"{START}\nOne.\n", "END"),
        (f"{END}\n{START}\nOne.", "END"),
        ("*** START OF THIS PROJECT GUTENBERG EBOOK " + "A\n" * 500 + "***", "START"),
    ],
)
def test_without_marks_it_is_refused(text, missing):
    with pytest.raises(UserError, match=f"{missing} OF THE PROJECT.* in a.txt") as error:
        unwrapped(text, "a.txt")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "data, text",
    [
        ("Zoë\n".encode(), "Zoë\n"),
        ("\ufeffZoë\n".encode(), "Zoë\n"),
        (b"a\r\nb\rc\nd\r\n", "a\nb\nc\nd\n"),
        (b"a\r\r\nb", "a\n\nb"),
        (b"", ""),
        (b"Character set encoding: latin-1\r\nZo\xeb", "Character set encoding: latin-1\nZoë"),
        (b"Character set encoding: cp1252\n\x93a\x94", "Character set encoding: cp1252\n“a”"),
        ("Character set encoding: ISO-8859-1\nZoë".encode(),
         "Character set encoding: ISO-8859-1\nZoë"),  # declared wrongly: UTF-8 comes first
    ],
)  # fmt: skip
def test_bytes_become_characters(data, text):
    assert text_of(data) == text


@pytest.mark.parametrize(
    "data",
    [
        b"Zo\xeb",
        b"Character set encoding: ASCII\nZo\xeb",
        b"Character set encoding: klingon\nZo\xeb",
        b"Character set encoding: zip\nZo\xeb",
        b"Character set encoding: undefined\nZo\xeb",
        b"Character set encoding: unicode_escape\nZo\xeb",
        b"Character set encoding: iso-8859-99\nZo\xeb",
        b"Character set encoding: windows-1252\nZo\x81",
        b"\xff\xfea\x00",
    ],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(UserError, match=r"byte \d+ of b.txt is not"):
        text_of(data, "b.txt")


@needs("gutenberg")
@pytest.mark.parametrize("name", BOOKS)
def test_a_real_book(name):
    data = gzip.decompress((DATA / "gutenberg" / f"{name}.gz").read_bytes())
    text = text_of(data, name)
    assert "\r" not in text and "\ufeff" not in text
    assert len(re.findall(r"(?m)^\*\*\* ?START OF", text)) == 1
    assert len(re.findall(r"(?m)^\*\*\* ?END OF", text)) == 1
    book = unwrapped(text, name)
    # One piece of the file, and nothing of the wrapping in it.
    assert text.count(book) == 1
    assert not re.search(r"(?i)\*\*\* ?(start|end) of|gutenberg-tm|gutenberg license", book)
    assert not re.match(r"(?i)(produced|prepared|transcribed|e-text|an anonymous|special)", book)
    assert "Project Gutenberg" not in book[-500:]
    # The licence has the same words in all of them: headers and credits make the difference.
    assert 18_500 < len(text) - len(book) < 21_000
    assert book == book.strip("\n") + "\n"


@needs("gutenberg")
def test_the_books_as_documents_from_packed_files(tmp_path):
    (tmp_path / "gutenberg").symlink_to(DATA / "gutenberg")
    books = catalogue()["gutenberg"]
    found = list(documents(books, tmp_path))
    assert len(found) == len(books.files)
    assert found[2].startswith("ALICE’S ADVENTURES IN WONDERLAND\n\nLewis Carroll\n")
    assert found[2].endswith("happy summer days.\n\n              THE END\n")


# ------------------------------------------------------------------ texts


def test_texts_in_the_catalogues_order_plain_and_packed(folder):
    (folder / "thing" / "b.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    (folder / "thing" / "a.txt.gz").write_bytes(gzip.compress(b"two\n"))
    (folder / "thing" / "c.txt").write_bytes(b" \n\n")
    assert list(documents(source("text", "b.txt", "a.txt", "c.txt"), folder)) == ["one\n", "two\n"]


def test_a_plain_file_comes_before_a_packed_one(folder):
    (folder / "thing" / "a.txt").write_bytes(b"plain")
    (folder / "thing" / "a.txt.gz").write_bytes(gzip.compress(b"packed"))
    assert list(documents(source("text", "a.txt"), folder)) == ["plain"]


def test_a_missing_file_is_said_before_anything_is_given(folder):
    (folder / "thing" / "a.txt").write_text("one")
    texts = documents(source("text", "a.txt", "b.txt"), folder)
    with pytest.raises(UserError, match="b.txt, but .* run nanoeuler data fetch thing"):
        next(texts)


@pytest.mark.parametrize(
    "packed", [gzip.compress(b"one" * 999, mtime=0)[:-12], b"no gzip", b"\x1f\x8b" * 20]
)
def test_a_damaged_packed_file(packed, folder):
    (folder / "thing" / "a.txt.gz").write_bytes(packed)
    with pytest.raises(UserError, match="expected a readable file"):
        list(documents(source("text", "a.txt"), folder))


@needs("tinyshakespeare.txt")
def test_a_real_text_is_one_document(tmp_path):
    (tmp_path / "tinyshakespeare").symlink_to(DATA)
    (text,) = documents(catalogue()["tinyshakespeare"], tmp_path)
    assert text.encode() == (DATA / "tinyshakespeare.txt").read_bytes()


# ------------------------------------------------------------------ parquet

needs_duckdb = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import duckdb"], capture_output=True).returncode != 0,
    reason="needs DuckDB: pip install -e '.[data]'",
)


def write_parquet(path, query, group=2048):
    import duckdb

    with duckdb.connect(config={"threads": 1}) as database:
        database.execute(f"COPY ({query}) TO '{path}' (FORMAT parquet, ROW_GROUP_SIZE {group})")


@needs_duckdb
@pytest.mark.parametrize("n", [1, 2047, 2048, 2049, 10_000])
def test_row_groups_in_order_and_complete(n, tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, f"SELECT i AS id, 'page ' || i AS text FROM range({n}) t(i)")
    groups = list(row_groups(path))
    assert [text for group in groups for text in group] == [f"page {i}" for i in range(n)]
    assert max(map(len, groups)) <= 2048


@needs_duckdb
def test_parquet_documents_are_the_rows_that_say_something(folder):
    path = folder / "thing" / "a.parquet"
    write_parquet(path, "SELECT unnest(['one', '', NULL, ' ', 'two']) AS text")
    assert list(documents(source("parquet", "a.parquet"), folder)) == ["one", "two"]


@needs_duckdb
def test_a_file_name_is_no_pattern(folder):
    """DuckDB takes `*` and `[a]` in names for patterns; the folder above may have any name."""
    odd = folder / "odd [a]*"
    (odd / "thing").mkdir(parents=True)
    write_parquet(folder / "a.parquet", "SELECT 'one' AS text")
    (folder / "a.parquet").rename(odd / "thing" / "a.parquet")
    assert list(documents(source("parquet", "a.parquet"), odd)) == ["one"]


@needs_duckdb
@pytest.mark.parametrize("data", [b"", b"a text", b"PAR1" + bytes(100) + b"PAR1"])
def test_what_is_not_parquet(data, folder):
    (folder / "thing" / "a.parquet").write_bytes(data)
    with pytest.raises(UserError, match="expected a parquet file with a column text") as error:
        list(documents(source("parquet", "a.parquet"), folder))
    assert "\n" not in str(error.value)


@needs_duckdb
def test_a_truncated_parquet_file(folder):
    path = folder / "thing" / "a.parquet"
    write_parquet(path, "SELECT 'page ' || i AS text FROM range(10000) t(i)")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="expected a parquet file"):
        list(documents(source("parquet", "a.parquet"), folder))


@needs_duckdb
def test_parquet_without_the_column(folder):
    write_parquet(folder / "thing" / "a.parquet", "SELECT 1 AS number")
    with pytest.raises(UserError, match="a column text"):
        list(documents(source("parquet", "a.parquet"), folder))


@needs_duckdb
@pytest.mark.parametrize("value", ["5", "[1]", "'one'::BLOB"])
def test_a_column_text_without_strings(value, folder):
    path = folder / "thing" / "a.parquet"
    write_parquet(path, f"SELECT unnest([NULL, {value}]) AS text")
    with pytest.raises(UserError, match=r"expected strings in the column text of .*a\.parquet"):
        list(documents(source("parquet", "a.parquet"), folder))


def test_without_duckdb_it_says_what_to_install(folder, monkeypatch):
    (folder / "thing" / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "duckdb", None)  # what Python does for a missing module
    with pytest.raises(UserError, match=re.escape("pip install -e '.[data]'")):
        list(documents(source("parquet", "a.parquet"), folder))


GROWTH = """
import resource, sys
from nanoeuler.data.documents import row_groups
groups = row_groups(sys.argv[1])
next(groups)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
characters = sum(len(text) for group in groups for text in group)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(characters, (after - before) * (1 if sys.platform == "darwin" else 1024))
"""


@needs_duckdb
@pytest.mark.skipif(sys.platform == "win32", reason="needs getrusage, which Windows lacks")
def test_memory_stays_at_a_row_group(tmp_path):
    path = tmp_path / "a.parquet"
    text = "md5(i::VARCHAR) || repeat('x', 2000)"
    write_parquet(path, f"SELECT {text} AS text FROM range(100000) t(i)")
    run = subprocess.run(
        [sys.executable, "-c", GROWTH, path], capture_output=True, text=True, check=True,
        cwd=project_root(),
    )  # fmt: skip
    characters, growth = map(int, run.stdout.split())
    # 48 more groups of 4 MB: kept, they would be 200 MB. A quarter leaves room for two allocators.
    assert characters > 190_000_000 and growth < characters / 4


# ------------------------------------------------------------------ questions and answers


def write_pairs(folder, entries):
    (folder / "thing" / "a.json").write_text(json.dumps(entries))
    return list(pairs(source("pairs", "a.json"), folder))


def entry(instruction="Do.", input="", output="Done.", **more):
    return {"instruction": instruction, "input": input, "output": output, **more}


def test_pairs(folder):
    entries = [
        entry(),
        entry(" Add. ", " 1, 2\n", " 3 "),
        entry(output="<nooutput> Not for a model."),
        entry(output=" "),
        entry(instruction=""),
        entry(text="Alpaca-like lists on the Hub have a fourth field"),
    ]
    assert write_pairs(folder, entries) == [
        ("Do.", "Done."), ("Add.\n1, 2", "3"), ("Do.", "Done."),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"a": 1}, "expected a list in .* but it is a dict"),
        ([entry(), {"instruction": "Do."}], "entry 2 of .*a.json"),
        ([entry(output=None)], "entry 1 of"),
        ([3], "entry 1 of"),
        (["text"], "entry 1 of"),
        ([entry(output="half a pair: \ud83d")], "entry 1 of"),
    ],
)
def test_wrong_pairs(entries, message, folder):
    with pytest.raises(UserError, match=message):
        write_pairs(folder, entries)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, '{"a": }'])
def test_what_is_not_json(text, folder):
    (folder / "thing" / "a.json").write_text(text)
    with pytest.raises(UserError, match="expected JSON in .*: fetch it again") as error:
        list(pairs(source("pairs", "a.json"), folder))
    assert "\n" not in str(error.value)


def test_formats_are_not_mixed_up(folder):
    with pytest.raises(UserError, match="holds questions and answers"):
        list(documents(source("pairs", "a.json"), folder))
    with pytest.raises(UserError, match="expected a source of questions and answers"):
        list(pairs(source("text", "a.txt"), folder))


@needs("instruct/alpaca_tiny_100.json", "instruct/alpaca_train_4900.json")
def test_real_pairs(tmp_path):
    (tmp_path / "alpaca").symlink_to(DATA / "instruct")
    alpaca = catalogue()["alpaca"]
    files = tuple(
        replace(alpaca.files[0], name=f"alpaca_{name}.json") for name in ("tiny_100", "train_4900")
    )
    found = list(pairs(replace(alpaca, files=files), tmp_path))
    assert len(found) == 99 + 4900  # one of the hundred is <nooutput>
    assert found[1] == (
        "What are the three primary colors?", "The three primary colors are red, blue, and yellow.",
    )  # fmt: skip
    assert all(question and answer for question, answer in found)
