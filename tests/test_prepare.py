"""Prepared folders: every document once, on one side; whole or not there; nothing foreign opens."""

import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoeuler.data import dataset as opening
from nanoeuler.data import shards
from nanoeuler.data import text as reading
from nanoeuler.data.dataset import Prepared
from nanoeuler.data.prepare import hold_out, prepare, prepare_text
from nanoeuler.data.shards import Tokens, shard_path
from nanoeuler.data.text import HELD_OUT_BYTES, digest, held_out_bytes, split
from nanoeuler.errors import UserError
from nanoeuler.files import project_root
from nanoeuler.tokenizer.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(b"the river, the river, the sea", 264)
reused_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
LETTER = "Letter {}. It rained on {} days, and I walked on.\n"
DOCUMENTS = [LETTER.format(i, i * i % 7) * 3 for i in range(40)]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Hundreds of small files: that they outlive a power cut is not what is tested here."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def prepared(folder, documents, shard_tokens=1 << 12, **how):
    """Prepare `documents`, a list, in shards of so many tokens, and open the folder."""
    how = {"tokenizer": TOKENIZER, "vocab_size": None, "source": "a test", **how}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_TOKENS", shard_tokens)
        prepare(lambda: iter(documents), folder, **how)
    return Prepared(folder)


def texts(folder):
    """The documents of the two sides of a Prepared, as lists of bytes."""
    return [
        [folder.tokenizer.decode(side.document(i)) for i in range(side.n_documents)]
        for side in (folder.train, folder.held_out)
    ]


@given(st.lists(st.text(max_size=30), min_size=2, max_size=12), st.integers(1, 60))
@settings(reused_folder, max_examples=30)
def test_every_document_comes_back_byte_for_byte_and_once(tmp_path, documents, shard_tokens):
    wanted = list(dict.fromkeys(text.encode() for text in documents if text))
    if len(wanted) < 2:
        with pytest.raises(UserError, match="at least 2 different documents"):
            prepared(tmp_path, documents, shard_tokens)
        return
    train, held_out = texts(prepared(tmp_path, documents, shard_tokens))
    assert sorted(train + held_out) == sorted(wanted) and train and held_out
    assert train == [text for text in wanted if text in train]  # in the order in which they came
    # the side is decided by the hash: the lowest are held out, and no more than are needed
    by_hash = sorted(wanted, key=lambda text: hashlib.sha256(text).digest())
    assert set(by_hash[: len(held_out)]) == set(held_out)
    enough = held_out_bytes(sum(map(len, wanted)))
    assert sum(map(len, by_hash[: len(held_out) - 1])) < enough
    assert len(train) == 1 or sum(map(len, held_out)) >= enough


def test_the_size_of_a_shard_changes_nothing_else(tmp_path):
    found = []
    for shard_tokens in (7, 300, 1 << 20):
        folder = prepared(tmp_path, DOCUMENTS, shard_tokens, tokenizer=None, vocab_size=300)
        rows = [side.window([0], len(side))[0].tolist() for side in (folder.train, folder.held_out)]
        found.append((folder.digest, folder.tokenizer.hash, rows))
    assert found[0] == found[1] == found[2]


def test_the_order_of_arrival_does_not_change_the_sides(tmp_path):
    there = texts(prepared(tmp_path / "a", DOCUMENTS))
    back = texts(prepared(tmp_path / "b", DOCUMENTS[::-1]))
    assert [sorted(side) for side in there] == [sorted(side) for side in back]


def test_the_tokenizer_learns_from_training_documents_alone(tmp_path):
    folder = prepared(tmp_path, DOCUMENTS, tokenizer=None, vocab_size=300)
    train, _ = texts(folder)
    assert folder.tokenizer.hash == Tokenizer.train(train, 300).hash
    assert folder.vocab_size == 300


def test_prepared_json_says_what_is_there(tmp_path):
    folder = prepared(tmp_path, [*DOCUMENTS, "", DOCUMENTS[3]], 100)
    record = json.loads((tmp_path / "prepared.json").read_text())
    assert record["source"] == "a test" and record["repeated"] == 1
    for side, tokens, parts in zip(
        ("train", "held-out"), (folder.train, folder.held_out), texts(folder), strict=True
    ):
        assert record[side]["documents"] == len(parts) == tokens.n_documents
        assert record[side]["bytes"] == sum(map(len, parts))
        assert record[side]["tokens"] == len(tokens)
        for i, shard in enumerate(record[side]["shards"]):
            raw = shard_path(tmp_path, side, i).read_bytes()
            assert shard["sha256"] == hashlib.sha256(raw).hexdigest()
            assert shard["bytes"] == len(raw)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), max_size=12))
def test_hold_out_keeps_first_copies_and_holds_out_the_lowest(documents):
    hashes = np.array([h for h, _ in documents], np.uint64)
    sizes = np.array([size for _, size in documents], np.int64)
    if len(set(hashes.tolist())) < 2:
        with pytest.raises(UserError, match="at least 2 different documents"):
            hold_out(hashes, sizes)
        return
    keep, held_out = hold_out(hashes, sizes)
    assert keep.tolist() == [h not in hashes[:i] for i, h in enumerate(hashes)]
    assert not (held_out & ~keep).any() and held_out.any() and (keep & ~held_out).any()
    assert hashes[held_out].max() < hashes[keep & ~held_out].min()


def test_no_more_than_ten_megabytes_are_held_out():
    sizes = np.full(1000, 1_000_000)
    held_out = hold_out(np.arange(1000, dtype=np.uint64), sizes)[1]
    assert sizes[held_out].sum() == HELD_OUT_BYTES == held_out_bytes(sizes.sum())
    assert held_out_bytes(50_000_000) == 5_000_000


def test_documents_that_change_between_two_walks_are_refused(tmp_path):
    walks = ([*DOCUMENTS[:5], "another"], DOCUMENTS[:7], DOCUMENTS[:5], DOCUMENTS[4::-1])
    for later in walks:
        left = iter([DOCUMENTS[:6], later])
        with pytest.raises(UserError, match="they have changed"):
            prepare(lambda: iter(next(left)), tmp_path, vocab_size=None, source="",  # noqa: B023
                    tokenizer=TOKENIZER)  # fmt: skip
        assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    plain = Tokenizer.train(b"the river, the river", 258, special_tokens=("<|user|>",))
    with pytest.raises(UserError, match="special token <|endoftext|>"):
        prepared(tmp_path, DOCUMENTS, tokenizer=plain)


def test_half_a_character_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="surrogate"):
        prepared(tmp_path, ["whole", "half \ud800"])


@given(st.text(min_size=2, max_size=200), st.integers(1, 50))
@reused_folder
def test_a_text_is_split_as_split_does(tmp_path, text, chunk):
    (tmp_path / "text").write_bytes(text.encode())
    text = text.replace("\r\n", "\n").replace("\r", "\n").encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "CHUNK", chunk)
        if not all(split(text)):
            with pytest.raises(UserError, match="two parts"):
                prepare_text(tmp_path / "text", tmp_path / "out", vocab_size=0, tokenizer=TOKENIZER)
            return
        prepare_text(tmp_path / "text", tmp_path / "out", vocab_size=0, tokenizer=TOKENIZER)
    folder = Prepared(tmp_path / "out")
    assert folder.digest == digest(text)
    sides = folder.train, folder.held_out
    assert [TOKENIZER.decode(side.window([0], len(side))[0]) for side in sides] == [*split(text)]


def test_a_text_is_read_once_to_learn_and_once_to_encode(tmp_path, monkeypatch):
    read, many = reading._read, []

    def counted(path):
        for chunk in read(path):
            many.append(len(chunk))
            yield chunk

    monkeypatch.setattr(reading, "_read", counted)
    river = project_root() / "data" / "river.txt"
    known, size = reading.scanned(river), river.stat().st_size
    prepare_text(river, tmp_path / "learned", vocab_size=300, known=known)
    assert sum(many) == 3 * size  # to examine, to learn, to encode
    tokenizer = Tokenizer.load(tmp_path / "learned" / "tokenizer.json")
    prepare_text(river, tmp_path / "given", vocab_size=0, tokenizer=tokenizer, known=known)
    assert sum(many) == 4 * size
    learned, other = (tmp_path / name / "train-00000.safetensors" for name in ("learned", "given"))
    assert learned.read_bytes() == other.read_bytes()


def test_a_text_gets_the_tokens_of_its_parts_and_a_tokenizer_of_the_first(tmp_path):
    text = Path(__file__).read_bytes()
    prepare_text(Path(__file__), tmp_path, vocab_size=400)
    folder, (train, held_out) = Prepared(tmp_path), split(text)
    assert folder.tokenizer.hash == Tokenizer.train(train, 400).hash
    assert folder.train.document(0).tolist() == folder.tokenizer.encode(train).tolist()
    assert folder.held_out.document(0).tolist() == folder.tokenizer.encode(held_out).tolist()


@pytest.mark.parametrize("content, words", [(b"", "0 bytes"), (b"x", "1 bytes"),
                                            ("é".encode("latin1"), "byte 0")])  # fmt: skip
def test_a_text_that_cannot_be_split_leaves_no_folder(tmp_path, content, words):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(UserError, match=words):
        prepare_text(tmp_path / "text", tmp_path / "out", vocab_size=300)
    assert not (tmp_path / "out").exists()


def failing_after(n):
    """os.replace, with a disk that is full after n renames; and the list of what it renamed."""
    rename, done = os.replace, []

    def replace(source, target):
        if len(done) == n:
            raise OSError(28, "No space left on device")
        rename(source, target)
        done.append(Path(target).name)

    return replace


@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000])
def test_a_full_disk_leaves_nothing_that_opens_and_says_so(tmp_path, monkeypatch, n):
    before = prepared(tmp_path, DOCUMENTS, 60)
    renames = 3 + len(before.train.paths) + len(before.held_out.paths)
    monkeypatch.setattr(os, "replace", failing_after(min(n, renames - 1)))
    with pytest.raises(UserError, match="No space left on device: make room"):
        prepared(tmp_path, DOCUMENTS, 60)
    if n == 0:  # nothing was begun
        assert Prepared(tmp_path).digest == before.digest
        return
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="has no prepared.json"):
        Prepared(tmp_path)


KILLED = """
import os, signal, sys
from nanoeuler.data import shards
from nanoeuler.data.prepare import prepare
shards.SHARD_TOKENS, rename, left = 60, os.replace, [int(sys.argv[2])]
def replace(source, target):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    rename(source, target)
os.replace = replace
prepare(lambda: (f"letter {i} " * 9 for i in range(40)), sys.argv[1], vocab_size=270, source="")
"""


def killed(folder, renames):
    """Prepare `folder` in a process that is killed before its rename number `renames`, from 0."""
    command = [sys.executable, "-c", KILLED, str(folder), str(renames)]
    assert subprocess.run(command).returncode == -signal.SIGKILL


needs_kill = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")


@needs_kill
def test_a_killed_preparation_does_not_open_and_the_next_begins_anew(tmp_path):
    whole = prepared(tmp_path / "whole", DOCUMENTS, 60)
    for renames in (0, 7):  # while unfinished.txt is written, and among the shards
        killed(tmp_path / "cut", renames)
        left = [path.name for path in (tmp_path / "cut").iterdir()]
        assert len(left) == renames + 1 and "prepared.json" not in left  # one is temporary
        with pytest.raises(UserError, match="has no prepared.json"):
            Prepared(tmp_path / "cut")
    again = prepared(tmp_path / "cut", DOCUMENTS, 60)
    assert again.digest == whole.digest
    for path in sorted((tmp_path / "whole").iterdir()):
        assert path.read_bytes() == (tmp_path / "cut" / path.name).read_bytes()
    assert len([*(tmp_path / "cut").iterdir()]) == len([*(tmp_path / "whole").iterdir()])


MINE = Tokenizer.train(b"a tokenizer of the user's own, own, own", 270)


def untouched(folder, act, words):
    """`act()` must be refused with these words, and leave every file in `folder` as it was."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match=words) as error:
        act()
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_the_user_trained_stays(tmp_path):
    MINE.save(tmp_path / "tokenizer.json")
    text = tmp_path / "tokenizer.json"  # which is UTF-8, after all
    holds = "it holds tokenizer.json, which no preparation has left there"
    untouched(tmp_path, lambda: prepared(tmp_path, DOCUMENTS), holds)
    untouched(tmp_path, lambda: prepared(tmp_path, DOCUMENTS, tokenizer=MINE), holds)
    untouched(tmp_path, lambda: prepare_text(__file__, tmp_path, vocab_size=300), holds)
    untouched(tmp_path, lambda: prepare_text(text, tmp_path, vocab_size=300), "to lie outside of")


def test_a_tokenizer_that_took_the_place_of_the_prepared_one_stays(tmp_path):
    prepared(tmp_path, DOCUMENTS)
    MINE.save(tmp_path / "tokenizer.json")
    untouched(tmp_path, lambda: prepared(tmp_path, DOCUMENTS), "it holds tokenizer.json, which no")


@needs_kill
def test_a_tokenizer_among_the_leftovers_of_a_killed_preparation_stays(tmp_path):
    killed(tmp_path, 4)
    assert (tmp_path / "tokenizer.json").exists()
    MINE.save(tmp_path / "tokenizer.json")
    untouched(tmp_path, lambda: prepared(tmp_path, DOCUMENTS), "it holds tokenizer.json, which no")


@pytest.mark.parametrize("name", ["train-00000.safetensors", "held-out-00003.safetensors"])
def test_shards_without_a_record_are_somebodys(tmp_path, name):
    (tmp_path / name).write_text("mine")
    untouched(tmp_path, lambda: prepared(tmp_path, DOCUMENTS), f"it holds {name}")


def test_a_prepared_json_that_is_none_of_ours_stays(tmp_path):
    (tmp_path / "prepared.json").write_text('{"meals": 3}')
    untouched(tmp_path, lambda: prepared(tmp_path, DOCUMENTS), "move it away and prepare again")


def test_a_text_in_the_folder_that_is_written_is_refused(tmp_path):
    prepared(tmp_path, DOCUMENTS)
    text = tmp_path / "prepared.json"
    untouched(tmp_path, lambda: prepare_text(text, tmp_path, vocab_size=300), "to lie outside of")


def test_a_folder_that_links_to_itself_is_one_line(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for act in (lambda: prepared(tmp_path / "loop", DOCUMENTS), lambda: Prepared(tmp_path / "loop"),
                lambda: prepare_text(__file__, tmp_path / "loop", vocab_size=300)):  # fmt: skip
        with pytest.raises(UserError, match="symbolic link|File exists") as error:
            act()
        assert "\n" not in str(error.value)


def test_the_record_is_the_first_file_that_a_new_preparation_removes(tmp_path, monkeypatch):
    prepared(tmp_path, DOCUMENTS, 60)
    unlink, done = Path.unlink, []

    def once(path, **how):
        if done and path.exists():
            raise OSError(5, "Input/output error")
        unlink(path, **how)
        done.append(path.name)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="Input/output error"):
        patch.setattr(Path, "unlink", once)
        prepared(tmp_path, DOCUMENTS, 60, tokenizer=MINE)
    assert done[0] == "prepared.json" and shard_path(tmp_path, "train", 3).exists()
    with pytest.raises(UserError, match="has no prepared.json"):
        Prepared(tmp_path)
    assert Tokenizer.load(tmp_path / "tokenizer.json").hash == TOKENIZER.hash  # the old one's, left
    prepared(tmp_path, DOCUMENTS, 60, tokenizer=MINE)  # and known to be ours


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="out"):
        prepared(tmp_path / "out", DOCUMENTS)


@pytest.mark.parametrize("name", ["config.json", "train-00000.txt", "held-out"])
def test_a_folder_with_files_of_others_is_refused_and_loses_none(tmp_path, name):
    prepared(tmp_path, DOCUMENTS)
    (tmp_path / name).write_text("mine")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=f"it holds {name}, which no"):
        prepared(tmp_path, DOCUMENTS[:9])
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


PEAK = """
import sys
from pathlib import Path
from nanoeuler.data import shards
from nanoeuler.data.prepare import prepare
from nanoeuler.tokenizer.tokenizer import Tokenizer
shards.SHARD_TOKENS = 1 << 16
tokenizer = Tokenizer.train(b"the river, the river, the sea", 264)
documents = lambda: (f"{i} " * 2000 for i in range(int(sys.argv[2])))
prepare(documents, sys.argv[1], vocab_size=None, source="", tokenizer=tokenizer)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) / 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc: no peak memory")
def test_peak_memory_does_not_grow_with_the_text(tmp_path):
    small, large = (
        float(subprocess.run([sys.executable, "-c", PEAK, str(tmp_path / n), n], check=True,
                             capture_output=True, text=True).stdout)
        for n in ("200", "1200")
    )  # fmt: skip
    # 9 MB more of text, at a token a byte 18 MB more of tokens; what an allocator keeps is less
    assert large - small < 6, (small, large)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "good"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        prepared(folder, DOCUMENTS, 500)
    return folder


def edited(change):
    """A damage: `change` is called with the content of prepared.json."""

    def damage(folder):
        record = json.loads((folder / "prepared.json").read_text())
        change(record)
        (folder / "prepared.json").write_text(json.dumps(record))

    return damage


def flipped(folder):
    raw = bytearray(shard_path(folder, "held-out", 0).read_bytes())
    raw[-2] ^= 1
    shard_path(folder, "held-out", 0).write_bytes(raw)


def swapped(folder):
    first, second = (shard_path(folder, "train", i) for i in range(2))
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)


BAD = {
    "no folder": (shutil.rmtree, "has no prepared.json"),
    "no record": (lambda f: (f / "prepared.json").unlink(), "has no prepared.json"),
    "a folder for a record": (
        lambda f: ((f / "prepared.json").unlink(), (f / "prepared.json").mkdir()),
        "as preparing writes it",
    ),
    "latin1": (lambda f: (f / "prepared.json").write_bytes(b'"\xe9"'), "UnicodeDecodeError"),
    "cut": (lambda f: os.truncate(f / "prepared.json", 300), "JSONDecodeError"),
    "a list": (lambda f: (f / "prepared.json").write_text("[]"), "TypeError"),
    "deep": (lambda f: (f / "prepared.json").write_text("[" * 10**5), "RecursionError"),
    "no source": (edited(lambda r: r.pop("source")), "KeyError: 'source'"),
    "a number for a source": (edited(lambda r: r.update(source=5)), "the source is not a line"),
    "a source that clears the screen": (
        edited(lambda r: r.update(source="\x1b[2J")),
        "the source is not a line of printable text",
    ),
    "a key of forty thousand characters": (
        edited(lambda r: r.update(train={"x": 1}, digest=["y" * 40_000])),
        "prepared.json",
    ),
    "no digest": (edited(lambda r: r.pop("digest")), "KeyError: 'digest'"),
    "a number for a hash": (edited(lambda r: r.update(tokenizer=5)), "a digest is not a text"),
    "two lines for a hash": (edited(lambda r: r.update(digest="ab\ncd")), "a digest is not a text"),
    "a lie that would leave the sha256 unread": (
        lambda f: (edited(lambda r: r["train"]["shards"][0].update(bytes=10**12))(f), flipped(f)),
        "held-out-00000.safetensors as it was prepared",
    ),
    "shards as text": (edited(lambda r: r["train"].update(shards="abc")), "TypeError"),
    "minus": (edited(lambda r: r["train"].update(tokens=-1)), "not a whole number above 0"),
    "a half": (edited(lambda r: r["train"].update(tokens=0.5)), "not a whole number above 0"),
    "more tokens": (edited(lambda r: r["train"].update(tokens=9)), "expected 9 tokens in .*train"),
    "more documents": (edited(lambda r: r["held-out"].update(documents=99)), "expected 99 docum"),
    "no shards": (edited(lambda r: r["train"].update(shards=[])), "tokens in .*got 0"),
    "a shard less": (edited(lambda r: r["train"]["shards"].pop()), "tokens in .*train"),
    "a sha256": (
        edited(lambda r: r["train"]["shards"][0].update(sha256="ab" * 32)),
        "train-00000.safetensors as it was prepared, but its sha256 is another",
    ),
    "another tokenizer": (
        lambda f: Tokenizer.train(b"the sea, the sea", 262).save(f / "tokenizer.json"),
        "expected the tokenizer",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "cannot read .*tokenizer.json"),
    "a missing shard": (lambda f: shard_path(f, "train", 1).unlink(), "00001.*No such file"),
    "a bit": (flipped, "held-out-00000.safetensors as it was prepared"),
    "two shards swapped": (swapped, "sha256 is another|to begin with a document"),
}


@pytest.mark.parametrize("damage, words", BAD.values(), ids=BAD)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path, good, damage, words):
    shutil.copytree(good, tmp_path / "bad")
    Prepared(tmp_path / "bad")
    damage(tmp_path / "bad")
    with pytest.raises(UserError, match=words) as error:
        Prepared(tmp_path / "bad")
    said = str(error.value).replace(str(tmp_path), "")
    assert said.isprintable() and len(said) < 300


def test_a_mistake_leaves_what_was_prepared_before(tmp_path, good):
    shutil.copytree(good, tmp_path / "kept")
    before = {path.name: path.read_bytes() for path in good.iterdir()}
    for documents, vocab_size in (([b"a text", b"another"], 3), ([], 300)):
        with pytest.raises(UserError):
            prepare(documents.__iter__, tmp_path / "kept", vocab_size=vocab_size, source="test")
        assert {x.name: x.read_bytes() for x in (tmp_path / "kept").iterdir()} == before
    with pytest.raises(UserError):
        prepare_text(__file__, tmp_path / "kept", vocab_size=3)
    assert {x.name: x.read_bytes() for x in (tmp_path / "kept").iterdir()} == before


def test_a_large_folder_opens_without_its_bytes_and_verify_reads_them(tmp_path, good, monkeypatch):
    shutil.copytree(good, tmp_path / "bad")
    flipped(tmp_path / "bad")
    monkeypatch.setattr(opening, "VERIFY_BYTES", 0)
    with pytest.raises(UserError, match="sha256 is another"):
        Prepared(tmp_path / "bad").verify()
    Prepared(good).verify()


def test_real_books_come_back(tmp_path):
    default = project_root() / ".." / "shared" / "data"
    folder = Path(os.environ.get("NANOEULER_DATA", default)) / "gutenberg"
    if not folder.is_dir():
        pytest.skip(f"no {folder}: set NANOEULER_DATA to a folder that holds gutenberg/")
    books = [gzip.decompress(path.read_bytes()) for path in sorted(folder.glob("*.gz"))[:4]]
    opened = prepared(tmp_path, books, 1 << 18, tokenizer=None, vocab_size=1024)
    train, held_out = texts(opened)
    assert sorted(train + held_out) == sorted(books)
    assert isinstance(opened.train, Tokens) and len(opened.train.paths) > 1


def test_report_is_told_of_every_walk(tmp_path):
    told = []
    prepared(tmp_path, DOCUMENTS, tokenizer=None, vocab_size=300, report=lambda *a: told.append(a))
    total = sum(map(len, DOCUMENTS))
    ends = [line for line in told if line[1] == len(DOCUMENTS)]
    assert ends == [(stage, 40, total) for stage in ("reading", "learning", "encoding")]
