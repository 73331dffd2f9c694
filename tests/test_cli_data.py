"""`nanoeuler data`, end to end: list, fetch, prepare, show, and training on what was prepared."""

import contextlib
import dataclasses
import http.server
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

import pytest
import sketches
from deaths import Died, dying_before

from nanoeuler import paths
from nanoeuler.cli import main as cli
from nanoeuler.data import catalogue, download
from nanoeuler.data.dataset import Prepared
from nanoeuler.files import project_root
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import loop
from nanoeuler.training.checkpoint import checkpoints

ROOT = Path(__file__).resolve().parents[1]
STORY = (ROOT / "data" / "river.txt").read_text()
HOST = "https://texts.invalid"  # a catalogue allows no http; the tests put their server there
REAL = Path(os.environ.get("NANOEULER_DATA", project_root() / ".." / "shared" / "data"))
SMALL = "--batch-size 4 --save-every 2"
TINY = "--preset small --dim 32 --layers 1 --heads 2 --kv-heads 1 --context 64"

# Five books as Project Gutenberg wraps them, of which two are the same; a play; questions.
PARTS = [STORY[i * 3000 : (i + 1) * 3000].strip() for i in range(4)]
BOOKS = [
    "\ufeffThe Project Gutenberg EBook of A River\n\n"
    "*** START OF THIS PROJECT GUTENBERG EBOOK A RIVER ***\n\n"
    f"{part}\n\n*** END OF THIS PROJECT GUTENBERG EBOOK A RIVER ***\n\nA licence.\n"
    for part in [*PARTS, PARTS[0]]
]
QUESTIONS = [
    {"instruction": f"What is {i}?", "input": "", "output": f"The number {i}."} for i in range(30)
]
FILES = {
    "books": ("gutenberg", {f"{i}.txt": book.replace("\n", "\r\n").encode()
                            for i, book in enumerate(BOOKS)}),
    "play": ("text", {"play.txt": STORY.encode()}),
    "questions": ("pairs", {"questions.json": json.dumps(QUESTIONS).encode()}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def drawn():
    with sketches.drawn():
        yield


def toml():
    """A catalogue of FILES."""
    lines = []
    for name, (kind, files) in FILES.items():
        lines += [f"[{name}]", 'title = "A title"', 'licence = "A licence"', 'about = "About"',
                  f'format = "{kind}"']  # fmt: skip
        for file, data in files.items():
            lines += [f"[[{name}.files]]", f'name = "{file}"', f'url = "{HOST}/{file}"',
                      f"bytes = {len(data)}", f'sha256 = "{sha256(data).hexdigest()}"']  # fmt: skip
    return "\n".join(lines)


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends the files; if `stall` is set, half of a file and then nothing for a while."""

    def do_GET(self):
        data = next(files for _, files in FILES.values() if self.path[1:] in files)[self.path[1:]]
        asked = self.headers["Range"]
        self.server.asked.append(asked)
        first = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data) - first))
        self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.server.stall:
            self.wfile.write(data[: len(data) // 2])
            self.server.stall.wait(60)
        else:
            self.wfile.write(data[first:])

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    """A server of FILES on this machine."""
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.asked, found.stall, found.url = [], None, f"http://127.0.0.1:{found.server_port}"
    found.handle_error = lambda *_: None  # a client that hangs up is no news
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


# The program as a process, with data in the folder argv[1] and HOST at the address argv[2]; {more}
# is what a test does to it.
PROGRAM = """
import dataclasses, os, signal, sys, time
from pathlib import Path
from nanoeuler import paths
from nanoeuler.data import catalogue, documents
from nanoeuler.cli.main import main
folder, url = Path(sys.argv[1]), sys.argv[2]
paths.data_folder = paths.shipped = lambda name: folder / name
read = catalogue.catalogue
def at(source):
    files = tuple(dataclasses.replace(f, url=f.url.replace({host!r}, url)) for f in source.files)
    return dataclasses.replace(source, files=files)
catalogue.catalogue = lambda: dict((name, at(s)) for name, s in read().items())
{more}
sys.exit(main(sys.argv[3:]))
"""


def process(folder, server, line, more="", **how):
    """The program as a process of its own, with `more` done to it first."""
    program = PROGRAM.format(host=HOST, more=more)
    words = [sys.executable, "-c", program, folder, server.url, *line.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, text=True, **{**pipes, **how})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in the place of the checkout's data/."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "sources.toml").write_text(toml())
    return folder


@pytest.fixture
def nanoeuler(folder, server, monkeypatch, capfd):
    """Run a command line in that folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(folder)
    read = catalogue.catalogue

    def at(source):
        files = (dataclasses.replace(f, url=f.url.replace(HOST, server.url)) for f in source.files)
        return dataclasses.replace(source, files=tuple(files))

    monkeypatch.setattr(paths, "data_folder", lambda name: folder / name)
    monkeypatch.setattr(paths, "shipped", lambda name: folder / name)
    monkeypatch.setattr(
        catalogue, "catalogue", lambda: {name: at(s) for name, s in read().items()}
    )

    def run(line):
        capfd.readouterr()
        return cli.main(line if isinstance(line, list) else line.split()), *capfd.readouterr()

    return run


@pytest.fixture
def prepared(nanoeuler, folder):
    """Run command lines where all of FILES are fetched and prepared."""
    for name in FILES:
        if not (folder / "prepared" / name).exists():
            assert nanoeuler(f"data fetch {name}")[0] == nanoeuler(f"data prepare {name}")[0] == 0
    return nanoeuler


def test_the_list_says_how_far_each_text_has_come(nanoeuler, folder, monkeypatch):
    def states():
        code, out, err = nanoeuler("data list")
        assert code == 0 and err == ""
        assert out.count("A title: About") == out.count("A licence; from ") == 3
        return re.findall(r"^(\w+) +[\d.]+ kB  \w+ +(.*)$", out, re.MULTILINE)

    monkeypatch.setattr("socket.create_connection", None)  # no network is asked
    assert states() == [("books", "not here"), ("play", "not here"), ("questions", "not here")]
    monkeypatch.undo()
    monkeypatch.setattr(paths, "data_folder", lambda name: folder / name)
    monkeypatch.setattr(paths, "shipped", lambda name: folder / name)
    there = folder / "fetched" / "books"
    there.mkdir(parents=True)
    for name, data in FILES["books"][1].items():
        (there / name).write_bytes(data[:-1])
    assert states()[0] == ("books", "not here")  # a byte is missing in each
    for name, data in list(FILES["books"][1].items())[:2]:
        (there / name).write_bytes(data)
    assert states()[0] == ("books", "2 of 5 files")
    shutil.rmtree(there)


def test_a_list_without_a_checkout_says_what_is_missing(nanoeuler, monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "data_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(paths, "shipped", lambda name: tmp_path / name)
    code, out, err = nanoeuler("data list")
    assert code == 2 and re.fullmatch(r"nanoeuler: expected a catalogue[^\n]*\n", err)


def test_texts_are_fetched_prepared_and_shown(nanoeuler, folder):
    code, out, err = nanoeuler("data fetch books")
    assert (code, out) == (0, "fetched into fetched/books; next: nanoeuler data prepare books\n")
    assert err.splitlines() == [f"{i}.txt: whole" for i in range(5)]
    assert nanoeuler("data fetch books")[2].count("already there") == 5
    code, out, err = nanoeuler("data prepare books --vocab-size 300")
    tokens = int(re.match(r"prepared ([\d,]+) tokens in prepared/books; ", out)[1].replace(",", ""))
    assert out.endswith("next: nanoeuler train --data prepared/books\n")
    assert code == 0 and err.splitlines()[0].startswith("reading: 5 documents, ")

    data = Prepared(folder / "prepared" / "books")
    assert tokens == len(data.train) + len(data.held_out) and data.vocab_size == 300
    out = nanoeuler("data show prepared/books")[1]
    assert re.search(r"^source +A title\nvocabulary +300 ids\ntrain +3 documents", out)
    assert re.search(r"^held-out +1 documents", out, re.MULTILINE)  # and one was there twice
    shown = [nanoeuler(f"data show prepared/books {n}")[1] for n in range(1, 5)]
    assert sorted(text.strip() for text in shown) == sorted(PARTS)
    assert shown[3].strip() == data.tokenizer.decode_text(data.held_out.document(0)).strip()
    assert re.search(r"^books .* prepared$", nanoeuler("data list")[1], re.MULTILINE)


def on_a_terminal(folder, server, line, until=b""):
    """Run a process with a terminal as its stderr: (stdout, what the terminal got).

    Once the terminal has got `until`, the server no longer stalls.
    """
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    started = process(folder, server, line, stderr=theirs, env=environment, cwd=folder)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that nobody has it open any more
        while part := os.read(ours, 1 << 16):
            shown += part
            if server.stall and until in shown:
                server.stall.set()
                server.stall = None
    os.close(ours)
    out = started.communicate(timeout=60)[0]
    assert started.returncode == 0, shown
    return out, shown.decode()


def test_a_terminal_sees_how_far_it_is(server, tmp_path):
    (tmp_path / "sources.toml").write_text(toml())
    size = len(STORY.encode())
    half = f"play.txt: {size // 2 / 1000:.1f} kB of {size / 1000:.1f} kB"
    server.stall = threading.Event()
    out, shown = on_a_terminal(tmp_path, server, "data fetch play", half.encode())
    assert half in shown and "play.txt: the connection" in shown and "play.txt: whole" in shown
    assert out == "fetched into fetched/play; next: nanoeuler data prepare play\n"
    out, shown = on_a_terminal(tmp_path, server, "data prepare play --vocab-size 300")
    assert "preparing play" in shown and out.count("\n") == 1  # stdout has the result alone


def test_pairs_are_prepared_and_fine_tuning_reads_them(prepared, folder):
    lines = (folder / "prepared" / "questions" / "pairs.jsonl").read_text().splitlines()
    assert json.loads(lines[7]) == {"question": "What is 7?", "answer": "The number 7."}
    assert prepared("data show prepared/questions")[1].split() == ["pairs", "30"]
    assert prepared("data show prepared/questions 8")[1] == "What is 7?\n\nThe number 7.\n"
    train = f"train --data prepared/play --out runs/base --steps 4 {SMALL} {TINY}"
    assert prepared(train)[0] == 0
    sft = f"sft --from runs/base --out runs/chat --steps 2 {SMALL}"
    code, out, err = prepared(f"{sft} --data prepared/questions")
    assert code == 0 and all(f"What is {i}?" in err for i in (27, 28, 29)), err
    assert prepared(f"{sft} --data prepared/questions/pairs.jsonl --resume")[0] == 0  # the same


def test_files_of_ones_own(nanoeuler, folder):
    for i, part in enumerate(PARTS):
        (folder / f"{i}.txt").write_text(part)
    assert nanoeuler("data prepare 0.txt 1.txt 2.txt 3.txt --out mine")[0] == 0
    texts = {nanoeuler(f"data show mine {n}")[1].strip() for n in range(1, 5)}
    assert texts == set(PARTS)
    (folder / "story.txt").write_text(STORY)
    code, out, err = nanoeuler("data prepare story.txt")
    assert code == 0 and err == "" and "prepared/story; next: " in out  # named after the file
    whole = [nanoeuler(f"data show prepared/story {n}")[1][:-1] for n in (1, 2)]
    assert "".join(whole) == STORY

    known = Tokenizer.train(STORY, 300)
    known.save(folder / "t.json")
    assert nanoeuler("data prepare story.txt --tokenizer t.json --out again")[0] == 0
    assert Prepared(folder / "again").tokenizer.hash == known.hash
    assert nanoeuler("data prepare story.txt --tokenizer again --out third")[0] == 0  # a folder
    assert Prepared(folder / "third").tokenizer.hash == known.hash


def test_a_run_on_prepared_data_survives_its_death(prepared, tmp_path, capfd):
    line = "train --data prepared/books --steps 6 --batch-size 8 --accumulate 2 --save-every 2 "
    line += f"--keep 1 {TINY} --out "
    with pytest.raises(Died), dying_before(loop, "add_metrics", 5):  # by SIGKILL: in test_train
        prepared(line + str(tmp_path / "killed"))
    assert "parameters" in capfd.readouterr().err  # the plan came first
    assert checkpoints(tmp_path / "killed")[-1][0] == 4
    assert prepared(f"{line}{tmp_path / 'killed'} --resume")[0] == 0
    assert prepared(f"{line}{tmp_path / 'straight'}")[0] == 0
    ends = [checkpoints(tmp_path / name) for name in ("killed", "straight")]
    assert [[step for step, _ in end] for end in ends] == [[6], [6]]  # --keep 1
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        killed, straight = (end[-1][1] / name for end in ends)
        assert killed.read_bytes() == straight.read_bytes()


def test_ctrl_c_keeps_what_has_come(server, tmp_path):
    (tmp_path / "sources.toml").write_text(toml())
    part, half = tmp_path / "fetched" / "play" / ".play.txt.part", len(STORY.encode()) // 2
    server.stall = threading.Event()
    cut = process(tmp_path, server, "data fetch play", cwd=tmp_path)
    while not (part.exists() and part.stat().st_size == half):
        assert cut.poll() is None, cut.stderr.read()
        time.sleep(0.01)
    cut.send_signal(signal.SIGINT)
    out, err = cut.communicate(timeout=60)
    server.stall.set()
    server.stall = None
    assert (cut.returncode, out) == (2, "")
    kept = "what has come is kept in fetched/play; run the same command again to continue"
    assert err == f"nanoeuler: interrupted: {kept}\n"
    assert part.stat().st_size == half
    again = process(tmp_path, server, "data fetch play", cwd=tmp_path)
    assert again.communicate(timeout=60)[1] == "play.txt: whole\n"
    assert server.asked[-1] == f"bytes={half}-"
    assert part.with_name("play.txt").read_bytes() == STORY.encode()


def test_ctrl_c_in_preparing_leaves_nothing_that_opens(prepared, folder, server):
    stops = (
        "def two_and_wait(source, folder):\n"
        "    yield from ('A river.', 'A sea.')\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(60)\n"
        "documents.documents = two_and_wait\n"
    )
    cut = process(folder, server, "data prepare books --out cut", stops, cwd=folder)
    assert cut.stdout.readline() == "waiting\n"
    cut.send_signal(signal.SIGINT)
    err = cut.communicate(timeout=60)[1]
    assert cut.returncode == 2
    assert re.fullmatch(r"nanoeuler: interrupted: nothing is left in cut[^\n]*to start over\n", err)
    code, _, err = prepared("data show cut")
    assert code == 2 and "prepare the data first" in err
    assert prepared("data prepare books --out cut")[0] == 0
    assert Prepared(folder / "cut").digest == Prepared(folder / "prepared" / "books").digest


ERRORS = {  # a command line, and what its one line must say
    "data": "",
    "data fly": "fly",
    "data fetch": "NAME",
    "data fetch nowhere": "no text is named 'nowhere': choose one of books, play, questions",
    "data prepare": "NAME|FILE",
    "data prepare nowhere": "but there is no file nowhere",
    "data prepare 0.txt nowhere": "but there is no file nowhere",
    "data prepare fetched": "fetched is a folder: nanoeuler data clean",
    "data prepare packed.gz --out new": "packed.gz is compressed: gunzip",
    "data prepare play": "prepared/play holds prepared data: name another folder",
    "data prepare questions --out prepared/play": "prepared/play holds prepared data",
    "data prepare play --out prepared/questions": "prepared/questions holds prepared data",
    "data prepare empty --out new": "empty has 0 bytes",
    "data prepare binary --out new": "expected UTF-8 text",
    "data prepare binary empty --out new": "expected UTF-8, but byte 0 of",
    "data prepare empty empty --out new": "at least 2 different documents",
    "data prepare play --vocab-size 3 --out new": "vocabulary size",
    "data prepare play --vocab-size 0 --out new": "vocabulary size",
    "data prepare play --vocab-size 300 --tokenizer prepared/play --out new": "leave out one",
    "data prepare play --tokenizer nowhere --out new": "there is no nowhere",
    "data prepare questions --vocab-size 300 --out new": "pairs have no vocabulary",
    "data prepare play --out binary": "'binary' is a file",
    "data show binary": "'binary' is a file",
    "data show nowhere": "prepare the data first",
    "data show prepared/books 5": "expected a document from 1 to 4, got 5",
    "data show prepared/books 0": "'N'",
    "data show prepared/questions 31": "expected a pair from 1 to 30, got 31",
    "train --data prepared/questions": "holds pairs, not text: nanoeuler sft",
    "train --data fetched": "but fetched is none",
    "train --data broken --out new": "prepare it again",
    "sft --data prepared/books": "holds text, not pairs: nanoeuler train",
    "train --data prepared/play --tokenizer prepared/books --out new": "another tokenizer",
    "train --data prepared/play --out prepared/books": "prepared/books holds prepared data",
    "train --resume --out prepared/books": "prepared/books holds prepared data",
}


@pytest.mark.parametrize("line", ERRORS)
def test_an_error_is_one_line_and_exit_code_2(prepared, folder, line):
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    (folder / "packed.gz").write_bytes(b"\x1f\x8b")
    (folder / "empty").write_bytes(b"")
    (folder / "0.txt").write_text(PARTS[0])
    shutil.copytree(folder / "prepared" / "play", folder / "broken", dirs_exist_ok=True)
    (folder / "broken" / "train-00000.safetensors").write_bytes(b"not at all")
    code, out, err = prepared(line)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"nanoeuler: [^\n]+\n", err), err
    assert ERRORS[line] in err
    assert not (folder / "new").exists() or not any((folder / "new").iterdir())


def test_a_text_that_was_not_fetched_is_told_of(nanoeuler, folder, monkeypatch, tmp_path):
    (tmp_path / "sources.toml").write_text(toml())
    monkeypatch.setattr(paths, "data_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(paths, "shipped", lambda name: tmp_path / name)
    for name in FILES:
        code, _, err = nanoeuler(f"data prepare {name}")
        assert code == 2 and re.fullmatch(r"nanoeuler: expected [^\n]+data fetch[^\n]*\n", err)
    code, _, err = nanoeuler("data fetch play --from nowhere")
    assert code == 2 and "expected play.txt or play.txt.gz in nowhere, but neither is there" in err


def test_tasks_are_fetched_and_judge_a_model_but_train_none(nanoeuler, tmp_path, monkeypatch):
    asked = {"query": "The river begins under", "choices": ["a stone.", "the sea."], "gold": 0}
    data = (json.dumps(asked) + "\n").encode() * 3
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "copa.jsonl").write_bytes(data)
    (tmp_path / "story.txt").write_text(STORY)
    with monkeypatch.context() as other:
        other.setitem(FILES, "core", ("tasks", {"copa.jsonl": data}))
        (tmp_path / "sources.toml").write_text(toml())
    monkeypatch.setattr(paths, "data_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(paths, "shipped", lambda name: tmp_path / name)
    monkeypatch.chdir(tmp_path)
    train = f"train --data story.txt --vocab-size 300 --out base --steps 2 {SMALL} {TINY}"
    assert nanoeuler(train)[0] == 0
    judge = "eval base --engine cpu --task"
    code, _, err = nanoeuler(f"{judge} copa")
    assert code == 2 and "nanoeuler data fetch core" in err and err.count("\n") == 1
    code, out, err = nanoeuler("data fetch core --from there")
    assert (code, out) == (0, "fetched into fetched/core; next: nanoeuler eval RUN --task core\n")
    code, out, err = nanoeuler(f"{judge} copa")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and [line[1] for line in lines] == ["acc", "acc_norm", "acc_token"]
    assert all(line[-2:] == ["3", "items"] for line in lines)
    for line, said in (("data prepare core", "holds tasks"), (f"{judge} core", "hellaswag"),
                       (f"{judge} core --shots 2", "core has shots of its own")):  # fmt: skip
        code, _, err = nanoeuler(line)
        assert code == 2 and said in err and err.count("\n") == 1, err


def test_a_server_that_is_gone_is_one_line(nanoeuler, tmp_path, monkeypatch):
    (tmp_path / "sources.toml").write_text(toml().replace(HOST, "https://127.0.0.1:1"))
    monkeypatch.setattr(paths, "data_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(paths, "shipped", lambda name: tmp_path / name)
    monkeypatch.setattr(download, "RETRIES", download.Retry(0))  # one attempt
    code, out, err = nanoeuler("data fetch play")
    assert (code, out) == (2, "") and "--from DIR" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no folder {REAL}: set NANOEULER_DATA to one")
def test_real_books_become_a_model(nanoeuler, folder, monkeypatch):
    monkeypatch.undo()  # the real catalogue
    monkeypatch.chdir(folder)
    monkeypatch.setattr(paths, "data_folder", lambda name: folder / name)
    monkeypatch.setattr(paths, "shipped", lambda name: folder / name)
    books = catalogue.catalogue(ROOT / "data" / "sources.toml")["gutenberg"]
    few = tuple(sorted(books.files, key=lambda file: file.bytes)[:3])
    few = dataclasses.replace(books, files=few)
    monkeypatch.setattr(catalogue, "catalogue", lambda: {"gutenberg": few})
    code, out, err = nanoeuler(["data", "fetch", "gutenberg", "--from", str(REAL / "gutenberg")])
    assert code == 0 and err.count(": whole") == 3, err
    assert nanoeuler("data prepare gutenberg")[0] == 0
    for n in (1, 2, 3):
        text = nanoeuler(f"data show prepared/gutenberg {n}")[1]
        assert len(text) > 50_000 and "Gutenberg" not in text and "\r" not in text
    line = "train --data prepared/gutenberg --out runs/books"
    assert nanoeuler(f"{line} --steps 2 {SMALL} {TINY}")[0] == 0
    assert nanoeuler(f"{line} --resume")[0] == 0
