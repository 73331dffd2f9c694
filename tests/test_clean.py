"""A clean collection: each rule by examples and planted mistakes, any threads, kills, bad files."""

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler.cli import main as cli
from nanoeuler.data import cleaning, collection, corpus, words, wrapped
from nanoeuler.data.cleaning import COPY, HELD_OUT, KEPT, Rules, clean, fates_of, verdict
from nanoeuler.data.corpus import Known, read_corpus, texts_in, write_corpus
from nanoeuler.data.prepare import in_order
from nanoeuler.errors import UserError

ROOT = Path(__file__).parents[1]
VOCABULARY = (
    "the of and to in a that it was his her she with as for had you not be at on which by river "
    "stone window ferry morning letter answer house winter garden"
).split()


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Dozens of small files: that they outlive a power cut is not what is tested here."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def prose(seed, count):
    """A paragraph of `count` words, of which two in three are function words of English."""
    draw = random.Random(seed)
    said = " ".join(draw.choice(VOCABULARY) + draw.choice(["", "", ",", f"{draw.randrange(99)}"])
                    for _ in range(count))  # fmt: skip
    return said.capitalize() + "."


def arrays(text):
    return np.frombuffer(text, np.uint8)


def tidied(raw, module=wrapped):
    """What `plain` makes of bytes, or the place of the fault."""
    out = np.empty(len(raw) + 1, np.uint8)
    n, fault = module.plain(arrays(raw), out)
    return out[:n].tobytes() if fault < 0 else fault


def joined(text, module=wrapped):
    """(the text, its paragraphs) that `paragraphs` makes."""
    out, starts = module.paragraphs(arrays(text.encode()))
    parts = [out[a:b].tobytes().decode() for a, b in zip(starts[:-1], starts[1:], strict=True)]
    assert "".join(parts) == out.tobytes().decode()
    return out.tobytes().decode(), parts


# --- bytes

pieces = st.lists(st.one_of(
    st.text(max_size=4).map(lambda s: s.replace("\0", "").encode("utf-8", "ignore")),
    st.sampled_from([b"\r\n", b"\r", b"\n", b" \n", b"\t\n", b"\x0c", b"\x07", b"\x7f", b"\xef\xbb",
                     b"\xc0\xaf", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf8",
                     b"\xf0\x8f\xbf\xbf", b"\xc3", b"\xe2\x80", b"\x00"]),
    st.binary(max_size=2)), max_size=8).map(b"".join)  # fmt: skip


@given(pieces)
@settings(max_examples=400)
def test_bytes_are_utf_8_exactly_where_python_says_so(raw):
    got = tidied(raw)
    try:
        text = raw.decode("utf-8-sig")
        fault = text.find("\0")
    except UnicodeDecodeError as error:
        text, fault = None, error.start
        nul = raw.find(b"\0")
        fault = nul if 0 <= nul < fault else fault
    if text is None:
        assert got == fault
    elif fault >= 0:
        assert got == raw.find(b"\0")
    else:
        text = re.sub(r"\r\n|[\r\x0b\x0c]", "\n", text)
        text = re.sub(r"[\x01-\x08\x0e-\x1f\x7f]", "", text)
        text = re.sub(r"[ \t]+$", "", text, flags=re.M)
        assert got.decode() == (text if text.endswith("\n") else text + "\n")


# --- lines

STANZA = """\
The river runs, the river goes,
And nobody on the river knows
What any fish has ever found
That went along without a sound."""
LONG_VERSE = "\n".join(
    f"{word} we went along the northern river till the {word.lower()} morning found us,"
    for word in ("Westward", "Northward", "Eastward", "Southward"))  # fmt: skip
TABLE = "\n".join(f"{name:24}{n:20}{n * n:20}{'ferries':>10}" for name, n in
                  (("northern bank", 2), ("southern bank", 3), ("the island", 5)))  # fmt: skip
ADDRESS = "To the Ferryman,\nNorthern Bank,\nby the river."


def wrap(text, width, **how):
    return textwrap.fill(text, width, break_on_hyphens=False, **how)


def rules_of_lines(module):
    """Assert the rule of line ends by examples of `module`, compiled or not."""
    filler = "\n\n".join(wrap(prose(seed, 60), 72) for seed in range(6))

    def kept(block, after=None):
        text, parts = joined(f"{filler}\n\n{block}\n\n{filler}\n", module)
        assert f"\n\n{after or block}\n\n" in text, text[800:1400]
        return parts

    for seed, width in ((1, 60), (2, 66), (3, 72), (4, 75)):
        said = prose(seed, 50)
        kept(wrap(said, width), said)
    by_hand = wrap(prose(5, 90), 72).split("\n")
    by_hand[1] = by_hand[1].rsplit(" ", 2)[0]  # one line end in six that nothing forced
    kept("\n".join(by_hand), " ".join(by_hand))
    ragged = "went to the river on which the morning ferry was as it had been\nfor her\nat noon"
    for block in (STANZA, LONG_VERSE, TABLE, ADDRESS, f"{ragged}\n{ragged}",
                  "CHAPTER I\nIn Which Nothing Is Said"):  # fmt: skip
        kept(block)
    pages = enumerate(wrap(prose(15, 50), 70).split("\n"))
    kept("\n".join(f"{line}\t{page}" for page, line in pages))  # a table of contents
    kept(textwrap.indent(STANZA, "    "), STANZA)
    uneven = STANZA.replace("\nAnd", "\n  And")
    kept(textwrap.indent(uneven, "      "), uneven)
    first = wrap(prose(6, 40), 72, initial_indent="    ")
    second = wrap(prose(7, 40), 72, initial_indent="    ")
    kept(f"{first}\n{second}", f"{prose(6, 40)}\n\n{prose(7, 40)}")
    kept(wrap(prose(8, 50), 72, subsequent_indent="   "), prose(8, 50))
    kept(wrap(prose(9, 50), 62, initial_indent="   ", subsequent_indent="   "), prose(9, 50))
    web = f"A Heading\n{prose(10, 40)}\n{prose(11, 50)}\nand\na list\n{prose(12, 40)}"
    assert len(kept(web)) == 2 * 6 + 5
    two = f"{prose(13, 50)}\n{prose(14, 20)}"
    assert len(kept(two)) == 2 * 6 + 2
    dash = "x" * 60 + " well-\nknown " + "y" * 60 + " and\u2014\nso on and " + "z" * 40
    kept(dash, dash.replace("\n", ""))


def rules_of_words(module):
    """Assert what words, hashes and runs are."""
    a = "\u201cTWO  pence,\u201d\u00a0he _said_\u2014don't! caf\u00e9 x2"
    found = re.findall(r"[a-z0-9\u00e9]+", a.lower())

    def hashes(*texts):
        ends = np.cumsum([0, *(len(text.encode()) for text in texts)])
        return module.words_of(arrays("".join(texts).encode()), ends, module.FOLD)

    said, firsts = hashes(a)
    assert len(said) == len(found) == 8 and list(firsts) == [0, 8]
    assert [*said] == [*hashes(" ".join(found))[0]] and len({*said}) == 8
    text = prose(1, 40)
    ends = np.array([0, len(text), 2 * len(text)])
    keys, begins = module.runs_of(*module.words_of(arrays((text * 2).encode()), ends, module.FOLD))
    count = len(re.findall(r"\w+", text))
    assert list(begins) == [0, count - 12, 2 * (count - 12)], "runs stay within a paragraph"
    assert [*keys[: count - 12]] == [*keys[count - 12 :]] and len({*keys}) == count - 12
    held = module.held_out_of([keys[:5]])
    parts = [text, " ".join(text.split()[3:16]), " ".join(text.split()[3:15])]
    ends = np.cumsum([0, *map(len, parts)])
    got, words_, runs, spoken = module.survey(
        arrays("".join(parts).encode()), ends, module.FOLD, module.FUNCTIONS, held)
    assert [*runs] == [5, 1, 0] and [*words_] == [count, 13, 12] and len({*got}) == 3
    english = module.FUNCTION_WORDS["en"].split()
    expected = sum(word in english for word in re.findall(r"\w+", " ".join(parts).lower()))
    assert spoken[0] == expected > max(spoken[1:])
    absent = np.arange(1, 2000) * 7919
    assert not len(module._found(absent, *held)) and len(module._found(keys[2:9], *held)) == 3


def rules_of_fates(module):
    """Assert which paragraphs go: by themselves, and with their neighbours."""
    known = words.table_for(np.array([11, 12, 13]))
    for line, expected in (
        ("11 a 12 a 20 a", "CCCKKK"), ("a 11 a 20", "CCKK"), ("a b", "KK"), ("20 a 11 a", "KKCC"),
        ("11 a x21 b 12", "CCHHC"), ("x11 a 20", "HKK"), ("20 20 21", "KKK"), ("11", "C"),
        ("a b x20 c", "HHHH"), ("11 a 20 b 12", "CKKKC"),
    ):  # fmt: skip
        parts = line.split()
        hashes = np.array([int(p.strip("x")) if not p.isalpha() else 11 for p in parts])
        counts = np.array([3 if part.isalpha() else 20 for part in parts])
        runs = np.array([int(part.startswith("x") and not part.isalpha()) for part in parts])
        got = module.fates_of(hashes, counts, runs, known)
        assert "".join("KCH"[fate] for fate in got) == expected, (line, got)
    sizes = np.array([40, 10, 50])
    assert module.verdict(sizes, np.array([HELD_OUT, KEPT, HELD_OUT])) == "held out"
    assert module.verdict(sizes, np.array([KEPT, KEPT, HELD_OUT])) == ""
    assert module.verdict(sizes, np.array([COPY, KEPT, COPY])) == ""
    assert module.verdict(np.array([41, 9, 50]), np.array([COPY, KEPT, COPY])) == "copy"


def book(start, end, text, credits=""):
    return f"Head of the file\n\n{start}\n\n{credits}{text}\n\n{end}\n\nThe licence.\n"


MARKS = [
    ("*** START OF THIS PROJECT GUTENBERG EBOOK X ***", "*** END OF THIS PROJECT GUTENBERG EBOOK"),
    ("*** START OF THE PROJECT GUTENBERG EBOOK X,\nA LONG TITLE ***",
     "*** END OF THE PROJECT GUTENBERG EBOOK X ***"),
    ("***START OF THE PROJECT GUTENBERG EBOOK X***", "***END OF THE PROJECT GUTENBERG EBOOK X***"),
    ("*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*",
     "End of Project Gutenberg Etext of X"),
    ("*END THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.10/04/01*END*",
     "End of The Project Gutenburg Etext of X"),
    ("****   SMALL PRINT! FOR __ COMPLETE SHAKESPEARE ****", "End of this Etext of The Works"),
    ("***** SMALL PRINT! for COMPLETE SHAKESPEARE *****\nno\n****   SMALL PRINT! FOR __ X ****",
     "The end of Project Gutenberg Etext of X"),
    ("*** START OF THIS PROJECT GUTENBERG EBOOK X ***\n\n*END*THE SMALL PRINT! FOR X*END*",
     "End of the Project Gutenberg EBook of X\n\n*** END OF THIS PROJECT GUTENBERG EBOOK X"),
]  # fmt: skip


def rules_of_marks(module):
    """Assert what is cut out of a file."""
    text = f"CHAPTER I\n\nThe small print of the end of this river.\n\n{prose(1, 80)}"
    for start, end in MARKS:
        for credits in ("", "Produced by two who\ndid it\n\n", "E-text prepared by me\n\n",
                        "Note: Project Gutenberg also has it\n\nTranscribed from\nit\n\n"):
            raw = book(start, end, text, credits)
            got, reason = module.book_in(arrays(raw.encode()))
            assert got.tobytes().decode().strip() == text and not reason, (start, end, credits)
    plain = f"Produced by the river:\n\n{text}\n\nProduced by nobody.\n"
    assert module.book_in(arrays(plain.encode()))[0].tobytes().decode() == plain
    first = f"{text}\n\nEnd of Project Gutenberg's X, volume 1\n\n"
    volumes = book(*MARKS[0], first + "a b\n" * 9000)
    assert b"a b" in module.book_in(arrays(volumes.encode()))[0].tobytes()
    owned = "** This is a COPYRIGHTED Project Gutenberg eBook **"
    owned = book(*MARKS[0], text).replace("Head", owned)
    assert module.book_in(arrays(owned.encode()))[1] == "copyrighted"


def mutated(module, fragment, replacement):
    """`module` as plain Python, with a fragment of its source replaced."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(fragment) == 1, f"{source.count(fragment)} times in {module.__name__}"
    source = source.replace(fragment, replacement)
    source = source.replace("from nanoeuler.jit import njit", "njit = lambda **how: lambda f: f")
    made = types.ModuleType("mutated")
    with np.errstate(all="ignore"):
        exec(compile(source, "mutated", "exec"), made.__dict__)
    return made


MISTAKES = [
    (rules_of_lines, wrapped, "+ rows[i, FIRST] > widest", "> widest"),
    (rules_of_lines, wrapped, "widest < max(LEAST, usual - SLACK)", "False"),
    (rules_of_lines, wrapped, "SLACK = 15", "SLACK = 2"),
    (rules_of_lines, wrapped, "or widest > LONG", ""),
    (rules_of_lines, wrapped, "not verse and", ""),
    (rules_of_lines, wrapped, "2 * gaps < n and", ""),
    (rules_of_lines, wrapped, "range(word.size - 1)", "range(word.size - 2)"),
    (rules_of_lines, wrapped, "5 * forced >= 4 * ends", "True"),
    (rules_of_lines, wrapped, "if i == 0 or joins:", "if i == 0:"),
    (rules_of_lines, wrapped, "deeper if joins else long", "False"),
    (rules_of_lines, wrapped, "not (joins and _dashed(out, n))", "True"),
    (rules_of_lines, wrapped, "if joins and i == 1 else", "if False else"),
    (rules_of_lines, wrapped, "if joins else least\n", "\n"),
    (rules_of_lines, wrapped, "max(rows[i, WIDTH], rows[i - 1, WIDTH])", "rows[i, WIDTH]"),
    (rules_of_fates, cleaning, "elif words[p] >= RUN:", "else:"),
    (rules_of_fates, cleaning, "    _with_neighbours(fates, words)\n", ""),
    (rules_of_fates, cleaning, "fates[before] if left else fates[after]", "COPY"),
    (rules_of_fates, cleaning, "goes and not (right and fates[after] == KEPT)", "goes"),
    (rules_of_fates, cleaning, "(left or right) and", ""),
    (rules_of_fates, cleaning, "2 * held_out > total", "held_out > total"),
    (rules_of_fates, cleaning, "== KEPT].sum()) < total", "== KEPT].sum()) <= total"),
    (rules_of_marks, cleaning, r"\*\*\* ?START OF TH(?:E|IS)", r"\*\*\* START OF TH(?:E|IS)"),
    (rules_of_marks, cleaning, r"START OF TH(?:E|IS) P", "START OF THIS P"),
    (rules_of_marks, cleaning, r"[\s\S]{0,300}?\*", r".{0,300}?\*"),
    (rules_of_marks, cleaning, r"|\*\*\*\* +SMALL PRINT! FOR .*\n", ""),
    (rules_of_marks, cleaning, "first = max(", "first = min("),
    (rules_of_marks, cleaning, "last = min(", "last = max("),
    (rules_of_marks, cleaning, "while match := _CREDITS", "if match := _CREDITS"),
    (rules_of_marks, cleaning, "    if first:\n        while", "    if True:\n        while"),
    (rules_of_marks, cleaning, "_HEAD, _TAIL = 60_000, 24_000", "_HEAD, _TAIL = 60_000, 90_000"),
    (rules_of_marks, cleaning, 'b"COPYRIGHTED PROJECT', 'b"COPYRIGHTED  PROJECT'),
]  # fmt: skip
COMPILED = [
    (rules_of_lines, wrapped), (rules_of_words, words), (rules_of_fates, cleaning),
    (rules_of_marks, cleaning),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "module"), COMPILED, ids=lambda each: each.__name__)
def test_the_rules(rules, module):
    rules(module)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[2][:30])
def test_a_planted_mistake_is_seen(mistake):
    rules, module, fragment, replacement = mistake
    with pytest.raises((AssertionError, IndexError)):
        rules(mutated(module, fragment, replacement))


def test_the_rules_hold_without_a_compiler_too():
    """Else a planted mistake would prove nothing."""
    for rules, module in COMPILED:
        if module is not words:  # whose arithmetic is modulo 2**64 only if compiled
            rules(mutated(module, "import numpy as np\n", "import numpy as np\n#\n"))


@given(st.lists(st.integers(-(2**63), 2**63 - 1).filter(bool), max_size=60), st.data())
@settings(max_examples=40)
def test_a_table_holds_what_was_put_in(keys, data):
    keys = np.array(keys, np.int64)
    held = words.table_for(keys), words.bits_for(keys)
    assert {*held[0][held[0] != 0]} == {*keys}
    other = np.array(data.draw(st.lists(st.integers(1, 2**40), max_size=20)), np.int64)
    every = np.concatenate([keys, other])
    found = {*words._found(every, *held)}
    assert found == {i for i, key in enumerate(every) if key in {*keys}}


def test_languages():
    texts = {
        "de": "Der Fluss ist nicht von mir und auch nicht von ihm, aber die Brücke war schon da. ",
        "fr": "La rivière est dans la plaine et je ne sais pas qui a fait le pont sur elle. ",
        "es": "El río no era de los que se ven en la ciudad, y yo lo sabía como él con su barco. ",
        "it": "Il fiume non era di mio padre, e io lo so: si va al ponte con la barca del nonno. ",
        "nl": "De rivier is niet van mij en het water dat er in zit was ook niet van hem, maar. ",
        "en": "The river is not his, and it was not mine; but he had the boat that I was in. ",
    }
    for language, text in texts.items():
        got = clean(text.encode() * 6, Rules(language))
        assert got.language == language and not got.reason
        assert clean(text.encode() * 6, Rules("la")).reason == f"language: {language}"
    assert clean(b"river stone window ferry " * 30, Rules()).reason == "language: none"
    assert clean(b"river stone window ferry " * 30, Rules(None)).reason == ""
    assert clean(b"The river and the sea. " * 9, Rules()).reason == "under 50 words"
    latin = book(*MARKS[0], prose(1, 80) + " caf\u00e9").replace(
        "Head of the file", "Character set encoding: ISO-8859-1").encode("latin-1")
    assert "caf\u00e9" in clean(latin, Rules()).text.tobytes().decode()


# --- a whole collection


def collection_in(folder):
    """A collection of 24 files with copies, a held-out text, and what must be dropped."""
    folder.mkdir()
    for n in range(20):
        paragraphs = [prose(100 * n + i, 30 + i) for i in range(6)]
        paragraphs[2:2] = ['"Yes," he said.'] * 2
        if n % 4 == 3:
            paragraphs[1:4] = [prose(100 * (n - 1) + i, 30 + i) for i in range(3)]
        if n == 9:
            paragraphs[5] = "He read: " + " ".join(prose(9999, 40).split()[5:25])
        text = "\n\n".join(wrap(part, 70) for part in paragraphs)
        (folder / f"{n:02}.txt").write_text(book(*MARKS[n % 8], text))
    (folder / "copy.txt").write_bytes((folder / "04.txt").read_bytes())
    (folder / "german.txt").write_text("Das ist nicht von mir und auch nicht von ihm. " * 20)
    (folder / "held.txt").write_text(wrap(prose(9999, 40).upper() + "\n" + prose(3, 20), 60))
    (folder / "nul.txt").write_bytes(b"a\0b")
    (folder.parent / "held").mkdir()
    (folder.parent / "held" / "poem.txt").write_text(prose(9999, 40) + "\n" + prose(5, 20))
    items = [{"question": prose(8888, 20), "choices": ["a", {"text": "b c"}]}, {"short": "a b c"}]
    (folder.parent / "held" / "task.jsonl").write_text("\n".join(map(json.dumps, items)) + "\n")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A collection, and all files that come of it at once, with shards of 4 kB."""
    place = tmp_path_factory.mktemp("corpus")
    books = collection_in(place / "books")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "SHARD_TEXT", 4000)
        said = write_corpus([books], place / "out", without=[place / "held"], threads=2)
    return place, said


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lines_of(folder):
    return {line["name"].split("/")[-1]: line for _, line in corpus.lines_in(folder)}


def test_each_document_has_a_line_that_says_what_became_of_it(made):
    place, said = made
    lines = lines_of(place / "out")
    assert len(lines) == said["documents"] == 24 and said["kept"] == 20
    assert lines["copy.txt"]["dropped"] == "copy" and lines["held.txt"]["dropped"] == "held out"
    assert lines["german.txt"]["dropped"] == "language: de"
    assert lines["nul.txt"]["dropped"] == "binary: byte 1 is 0"
    assert said["dropped"] == {"copy": 1, "held out": 1, "language": 1, "binary": 1}
    assert said["held_out"] == {"items": 2, "short_items": 1, "texts": 1, "runs": 28 + 8 + 8}
    assert lines["09.txt"]["runs"] == 8 and lines["09.txt"]["held_out"] > 100
    assert [name for name in lines if "copies" in lines[name]] == [
        *(f"{n:02}.txt" for n in range(3, 20, 4)), "copy.txt"]  # fmt: skip
    texts = [*texts_in(place / "out")]
    kept = [line for line in lines.values() if "text" in line]
    assert [len(text) for text in texts] == [line["text"] for line in kept]
    assert len(said["shards"]) > 3 and sum(map(len, texts)) == said["text"]
    for n, text in enumerate(texts):
        assert b"licence" not in text and b"Head" not in text and text.endswith(b".\n")
        assert text.count(b'"Yes,"') == (0 if n % 4 == 3 else 2), "between two copies"
    assert {line["licence"] for line in kept} == {corpus.GUTENBERG}
    assert not [*(place / "out").glob("hashes*")] and not (place / "out" / "begun.json").exists()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(made, tmp_path, monkeypatch, threads):
    place, _ = made
    monkeypatch.setattr(corpus, "SHARD_TEXT", 4000)
    write_corpus([place / "books"], tmp_path / "out", without=[place / "held"], threads=threads)
    assert contents(tmp_path / "out") == contents(place / "out")


class Small(Known):
    """A table that is full after 48 paragraphs."""

    def __init__(self):
        super().__init__(64)
        self.table = np.zeros(64, np.int64)


@pytest.mark.parametrize("table", [Known, Small])
def test_a_death_anywhere_loses_at_most_a_shard(made, tmp_path, monkeypatch, table):
    place, _ = made
    monkeypatch.setattr(corpus, "SHARD_TEXT", 4000)
    monkeypatch.setattr(corpus, "Known", table)
    whole = write_corpus([place / "books"], tmp_path / "whole", without=[place / "held"])
    assert (whole["unlearned"] > 0) == (table is Small)
    out, left = tmp_path / "out", [5, 1, 9, 0, 23]

    def dying(line, size):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    while len(left) > 1 or left[0] >= 0:
        before = len([*out.glob("manifest*")])
        try:
            write_corpus([place / "books"], out, without=[place / "held"], report=dying)
            break
        except KeyboardInterrupt:
            assert len([*out.glob("manifest*")]) >= before
            left.pop(0)
    assert contents(out) == contents(tmp_path / "whole")
    assert table is Small or contents(out) == contents(place / "out")


def test_killed_for_good(made, tmp_path):
    place, _ = made
    program = (
        "import sys, os, signal\nfrom nanoeuler.data import corpus\n"
        "corpus.SHARD_TEXT, seen = 4000, []\n"
        "def report(line, size):\n    seen.append(line)\n"
        "    if len(seen) == 13: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"corpus.write_corpus([{str(place / 'books')!r}], {str(tmp_path / 'out')!r}, "
        f"without=[{str(place / 'held')!r}], report=report)\n"
    )
    died = subprocess.run([sys.executable, "-c", program], cwd=ROOT)
    assert died.returncode == -signal.SIGKILL and (tmp_path / "out" / "begun.json").exists()
    with pytest.raises(UserError, match="run nanoeuler data clean first"):
        read_corpus(tmp_path / "out")
    with pytest.raises(UserError, match="begun with the same files and options"):
        write_corpus([place / "books"], tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "SHARD_TEXT", 4000)
        write_corpus([place / "books"], tmp_path / "out", without=[place / "held"])
    assert contents(tmp_path / "out") == contents(place / "out")


def test_a_finished_folder_is_left_alone_and_a_strange_one_refused(made, tmp_path):
    place, said = made
    before = contents(place / "out")
    assert write_corpus([place / "books"], place / "out", without=[place / "held"]) == said
    with pytest.raises(UserError, match="choose another folder"):
        write_corpus([place / "books"], place / "out")
    (tmp_path / "mine").write_text("dear diary")
    with pytest.raises(UserError, match="holds mine: choose another folder"):
        write_corpus([place / "books"], tmp_path)
    assert contents(place / "out") == before
    cut = tmp_path / "cut"
    cut.mkdir()
    for name, content in before.items():
        (cut / name).write_bytes(content[:-1] if name == "text-00001.txt" else content)
    with pytest.raises(UserError, match="as long as"):
        next(texts_in(cut))


def test_hostile_files_are_a_line_each(tmp_path):
    good = (prose(1, 60) + "\n").encode()
    books = tmp_path / "b"
    (books / "sub").mkdir(parents=True)
    rows = [{"text": prose(n, 60), "id": n, "url": "u"} for n in range(20, 24)]
    lines = [json.dumps(row) for row in rows]
    packed = gzip.compress("\n".join(json.dumps({"text": prose(n, 60)}) for n in range(30, 60))
                           .encode())  # fmt: skip
    for name, raw in {
        "16.txt": good.decode().encode("utf-16"), "bin": bytes(range(256)), "empty": b"",
        "late": b"\xff" + good, "cut.gz": gzip.compress(good)[:-9], "no.gz": good,
        "good.txt.gz": gzip.compress(prose(2, 60).encode()), "no.zip": b"PK" + good,
        "rows.jsonl": "\n".join([*lines[:2], "{", "[1]", '{"text": 3}', ""]).encode(),
        "cut.jsonl.gz": packed[: len(packed) // 2], "no.parquet": good, "\udcff.txt": b"a b",
        ".hidden": good, "sub/long": b"the of and to a in " * 2_700_000,
    }.items():  # fmt: skip
        (books / name).write_bytes(raw)
    with zipfile.ZipFile(books / "two.zip", "w") as archive:
        archive.writestr("one.txt", prose(3, 60))
        archive.writestr("two.txt", b"a\0")
    os.mkfifo(books / "pipe")
    (books / "sub" / "circle").symlink_to(books)
    (books / "nowhere").symlink_to(books / "gone")
    (tmp_path / "elsewhere").write_text(prose(4, 60))
    (books / "link").symlink_to(tmp_path / "elsewhere")
    write_corpus([books], tmp_path / "out", threads=2)
    got = {name: line.get("dropped", "kept") for name, line in lines_of(tmp_path / "out").items()}
    parquet = got.pop("no.parquet:1")
    assert "parquet" in parquet or "DuckDB" in parquet
    cut = [got.pop(f"cut.jsonl.gz:{n}") for n in range(1, 40) if f"cut.jsonl.gz:{n}" in got]
    assert len(cut) > 3 and {*cut[:-1]} == {"kept"}
    assert cut[-1].startswith("cannot be read on: Compressed file ended")
    assert got == {
        "16.txt": "UTF-16, not UTF-8", "bin": "binary: byte 0 is 0", "empty": "empty",
        "late": "not UTF-8 at byte 0", "good.txt.gz": "kept", "link": "kept", "long": "kept",
        "cut.gz": "cannot be read: Compressed file ended before the end-of-stream marker was "
                  "reached",
        "no.gz": got["no.gz"], "no.zip": "cannot be read: File is not a zip file",
        "rows.jsonl:1": "kept", "rows.jsonl:2": "kept", "one.txt": "kept",
        "two.txt": "binary: byte 1 is 0", "\udcff.txt": "under 50 words",
        **{f"rows.jsonl:{n}": "no line of JSON with a text" for n in (3, 4, 5)},
        "pipe": "a pipe or a device, not a file",
        "nowhere": "cannot be read: No such file or directory",
    }  # fmt: skip
    assert got["no.gz"].startswith("cannot be read: Not a gzipped file")


def test_a_document_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(collection, "MOST", 3000)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "bomb.gz").write_bytes(gzip.compress(bytes(10**7)))
    (tmp_path / "b" / "lines.jsonl").write_text(json.dumps({"text": "a " * 3000}) + "\n")
    (tmp_path / "b" / "small").write_text(prose(1, 60))
    write_corpus([tmp_path / "b"], tmp_path / "out")
    got = {name: line.get("dropped") for name, line in lines_of(tmp_path / "out").items()}
    assert got["small"] is None and "over 0 MiB" in got["bomb.gz"]
    assert "a line over" in got["lines.jsonl:1"]


def test_parquet(tmp_path, monkeypatch):
    monkeypatch.setattr(collection, "MOST", 3000)
    duckdb = pytest.importorskip("duckdb", reason="needs the extra data: DuckDB")
    with duckdb.connect() as database:
        database.execute("CREATE TABLE t (text VARCHAR, id VARCHAR, language VARCHAR)")
        database.executemany("INSERT INTO t VALUES (?, ?, 'en')",
                             [(prose(n, 60), str(n)) for n in range(3)]
                             + [(prose(3, 600), "3")])  # fmt: skip
        database.execute(f"COPY t TO '{tmp_path / 'web.parquet'}' (FORMAT parquet)")
    write_corpus([tmp_path / "web.parquet"], tmp_path / "out", licence="ODC-By")
    assert [*texts_in(tmp_path / "out")] == [(prose(n, 60) + "\n").encode() for n in range(3)]
    lines = lines_of(tmp_path / "out")
    assert lines["web.parquet:4"]["dropped"] == "a row over 0 MiB"
    assert {line["licence"] for line in lines.values()} == {"ODC-By"}


def test_what_is_held_out_must_be_readable(tmp_path):
    (tmp_path / "b.txt").write_text(prose(1, 60))
    for name, raw in (("t.jsonl", b"{"), ("t.txt", b"a\0b"), ("t.gz", b"a")):
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(UserError, match=rf"{name}, but"):
            write_corpus([tmp_path / "b.txt"], tmp_path / "out", without=[tmp_path / name])
    with pytest.raises(UserError, match="there is no"):
        write_corpus([tmp_path / "none"], tmp_path / "out")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="they hold no files"):
        write_corpus([tmp_path / "nothing"], tmp_path / "out")


def test_the_table_of_known_paragraphs_is_bounded():
    known = Known(most=1 << 13)
    known.add(np.arange(1, 6001))
    assert known.used == 6000 and len(known.table) == 1 << 13
    assert not known.add(np.arange(7001, 7400)) and known.used == 6000
    assert known.add(np.full(500, 6999)) and known.used == 6001  # one paragraph, again and again
    hashes, twenty = np.array([5000, 7001]), np.array([20, 20])
    assert [*fates_of(hashes, twenty, np.zeros(2, np.int64), known.table)] == [COPY, KEPT]
    assert verdict(np.array([10]), np.array([KEPT])) == ""


def test_results_come_in_order_and_an_error_ends_the_work():
    draw = random.Random(0)

    def work(n):
        for _ in range(draw.randrange(20_000)):
            pass
        if n == 40:
            raise ValueError(n)
        return n

    assert [*in_order(work, range(30), 4)] == [*range(30)]
    with pytest.raises(ValueError, match="40"):
        [*in_order(work, range(1000), 4)]


def test_the_command_cleans_and_prepare_takes_it(made, tmp_path, capsys, monkeypatch):
    place, _ = made
    monkeypatch.chdir(tmp_path)
    line = f"data clean {place / 'books'} --out clean --without {place / 'held'}"
    assert cli.main(line.split()) == 0
    out = capsys.readouterr().out
    assert "read      24 documents" in out and "dropped   1 documents" in out
    assert out.endswith("next: nanoeuler data prepare clean\n")
    assert cli.main("data prepare clean --vocab-size 300 --out tokens".split()) == 0
    assert cli.main("data show tokens 1".split()) == 0
    assert cli.main(f"data clean {place / 'books'} --out more --language elvish".split()) == 2
    assert "one of en, de" in capsys.readouterr().err
