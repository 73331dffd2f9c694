"""The command line end to end, at tiny size; and every error as one line with exit code 2."""

import ast
import contextlib
import io
import json
import os
import pty
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import sketches
import tiers
import typer
from deaths import Died, dying_before

import nanoeuler.__main__  # noqa: F401  adds the command `all`
from nanoeuler.checks import gradcheck
from nanoeuler.cli import flags
from nanoeuler.cli import main as cli
from nanoeuler.cli import tokenizer as cli_tokenizer
from nanoeuler.data import docstrings
from nanoeuler.data.validation import HeldOut
from nanoeuler.engines.cpu import llvm
from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.inference import backends
from nanoeuler.planning import doctor
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import train as training
from nanoeuler.training.checkpoint import checkpoints
from nanoeuler.training.train import of_a_new_run

ROOT = Path(__file__).resolve().parents[1]
TESTS, STORY = str(ROOT / "tests"), ROOT / "data" / "river.txt"
PAIRS = [{"question": f"What is {i}?", "answer": f"The number {i}."} for i in range(40)]
SMALL = "--steps 4 --batch-size 4 --save-every 2"
TINY = "--preset small --dim 32 --layers 1 --heads 2 --kv-heads 1 --context 64"
NINES = "9" * 400  # a number of which no float is large enough


def model(run):
    """The file with the newest weights of a run directory."""
    return checkpoints(Path(run))[-1][1] / "model.safetensors"


def start(line, **how):
    """The program as a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "nanoeuler", *line.split()], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            **how)  # fmt: skip


def piped(line, data=b"", **how):
    """Run the program with `data` on its stdin: what subprocess.run gives, all of it bytes."""
    words = line if isinstance(line, list) else line.split()
    return subprocess.run([sys.executable, "-m", "nanoeuler", *words], input=data, timeout=60,
                          capture_output=True, **how)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def drawn():
    with sketches.drawn():
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a trained run (base), a fine-tuned one (chat), and pairs.jsonl."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(f"train --data {STORY} --out base {SMALL} {TINY}".split()) == 0
        assert cli.main(f"sft --from base --data pairs.jsonl --out chat {SMALL}".split()) == 0
    return folder


@pytest.fixture
def nanoeuler(runs, monkeypatch, capfd):
    """Run a command line in the folder of `runs`: (exit code, stdout, stderr)."""
    monkeypatch.chdir(runs)

    def run(line):
        capfd.readouterr()
        code = cli.main(line if isinstance(line, list) else line.split())
        return code, *capfd.readouterr()

    return run


def test_a_run_directory_is_complete(runs):
    for name in ("base", "chat"):
        assert {path.name for path in (runs / name).iterdir()} - {"data"} == {
            ".lock", "best", "config.json", "loss.png", "metrics.jsonl", "tokenizer.json",
            "step-00000002", "step-00000004",
        }  # fmt: skip
        assert (runs / name / "data").exists() == (name == "base")  # pairs are not prepared
        assert {path.name for path in (runs / name / "step-00000004").iterdir()} == {
            "model.safetensors", "optimizer.safetensors", "state.json"
        }  # fmt: skip
        assert len((runs / name / "metrics.jsonl").read_text().splitlines()) == 4
    tokenizers = [(runs / name / "tokenizer.json").read_bytes() for name in ("base", "chat")]
    assert tokenizers[0] == tokenizers[1]


def test_training_prints_a_sample_and_what_comes_next(nanoeuler, tmp_path):
    code, out, err = nanoeuler(f"train --data {STORY} --out {tmp_path / 'run'} {SMALL} {TINY}")
    written = nanoeuler(["generate", "--from", str(tmp_path / "run"), "--tokens", "150"])[1]
    letters, shown = (re.sub(r"\W", "", text) for text in (written, err))
    assert code == 0 and shown.endswith(letters)  # rich leaves out what would ring a bell
    assert "sample" in (tmp_path / "run" / "metrics.jsonl").read_text()  # and along the way
    assert "parameters" in err.split("loss")[0]  # the plan comes before the first step
    assert out == f"saved in {tmp_path / 'run'}; next: nanoeuler sft --from {tmp_path / 'run'}\n"
    code, out, err = nanoeuler(
        f"sft --from {tmp_path / 'run'} --data pairs.jsonl --out {tmp_path / 'chat'} {SMALL}"
    )
    assert code == 0 and all(pair["question"] in err for pair in PAIRS[-3:])
    assert out.endswith(f"next: nanoeuler chat --from {tmp_path / 'chat'}\n")


def test_a_model_better_than_the_last_is_what_comes_next(nanoeuler, tmp_path, monkeypatch):
    bits = iter([6.0, 2.0, 6.0, 6.0, 6.0])  # of steps 1 to 4, and of the whole text
    monkeypatch.setattr(HeldOut, "bits_per_byte", lambda *_, **__: next(bits))
    run, best = tmp_path / "run", tmp_path / "run" / "best"
    code, out, err = nanoeuler(f"train --data {STORY} --out {run} {SMALL} {TINY}")
    assert code == 0 and out == f"saved in {run}; next: nanoeuler sft --from {best}\n"
    assert "passes over its data" in err.split("step 1/4")[0]
    assert f"the best model is that of step 2, in {best}: 2.000 bits per byte, where step 4" in err
    for folder in (run, best):
        assert nanoeuler(f"generate --from {folder} --tokens 5")[0] == 0
    code, _, err = nanoeuler(f"train --data {STORY} --out {best} --resume")
    assert code == 2 and "holds a model without its optimizer" in err and err.count("\n") == 1


def test_a_terminated_run_is_saved_and_resumed_to_the_same_byte(nanoeuler, tmp_path):
    run = f"train --data {STORY} --out {tmp_path / 'cut'} --batch-size 4 {TINY}"
    process = start(f"{run} --steps 200000 --save-every 1000")
    metrics = tmp_path / "cut" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):  # its first step is done
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert err.splitlines()[-1] == "nanoeuler: interrupted"
    assert "--resume" in err and "Traceback" not in err
    assert 1 <= checkpoints(tmp_path / "cut")[-1][0] < 200_000

    # Resuming all these steps would take minutes: the same promise on a run of 4.
    assert nanoeuler(f"train --data {STORY} --out {tmp_path / 'a'} {SMALL} {TINY}")[0] == 0
    code, out, err = nanoeuler(f"train --data {STORY} --out {tmp_path / 'a'} --resume")
    assert code == 0  # nothing is left to do, and that is no error
    assert model(tmp_path / "a").read_bytes() == model("base").read_bytes()


def test_a_run_goes_on_with_its_own_text(nanoeuler, tmp_path, monkeypatch):
    docs = tmp_path / "docs.txt"
    docs.write_text(STORY.read_text())
    monkeypatch.setattr(docstrings, "text_path", lambda: docs)
    line = f"train --out {tmp_path / 'run'}"
    assert nanoeuler(f"{line} {SMALL} {TINY}")[0] == 0
    shutil.rmtree(checkpoints(tmp_path / "run")[-1][1])  # as if it had been cut short
    docs.write_text(STORY.read_text() + "Another package.\n")
    assert nanoeuler(f"{line} --resume")[0] == 0
    assert model(tmp_path / "run").read_bytes() == model("base").read_bytes()
    code, _, err = nanoeuler(f"{line} --resume --data docs")
    assert code == 2 and "holds a run with data" in err


def test_a_run_that_died_before_its_first_save_goes_on_as_it_was_asked(nanoeuler, tmp_path):
    line = f"train --out {tmp_path / 'run'}"
    with pytest.raises(Died), dying_before(training, "prepare_text", 1):
        nanoeuler(f"{line} --data {STORY} {SMALL} {TINY}")
    code, _, err = nanoeuler(f"{line} --resume --layers 3")
    assert code == 2 and "holds a run with n_layers 1, but 3 was asked for" in err
    assert nanoeuler(f"{line} --resume")[0] == 0
    assert model(tmp_path / "run").read_bytes() == model("base").read_bytes()


def test_a_prompt_is_the_bytes_that_were_typed(runs):
    done = piped(["generate", b"caf\xe9", "--from", "base", "--tokens", "1"], cwd=runs)
    assert done.returncode == 0 and done.stdout.startswith(b"caf?") and done.stderr == b""


CLOSED = ["--help >&-", "plan 2>&-", "tokenizer encode --tokenizer base <&-"]


@pytest.mark.skipif(os.name != "posix", reason="other systems have no shell that closes a stream")
@pytest.mark.parametrize("line", tiers.kept(CLOSED, CLOSED[0], CLOSED[2]))
def test_a_stream_that_was_closed_beforehand_is_no_error(line, runs):
    line = f"{sys.executable} -m nanoeuler {line}"
    done = subprocess.run(line, shell=True, cwd=runs, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_pairs_that_do_not_fit_are_counted(nanoeuler, tmp_path):
    long = [{"question": "What?", "answer": "A word. " * 100}, *PAIRS]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in long))
    line = f"sft --from base --data {tmp_path / 'long.jsonl'} --out {tmp_path / 'new'} {SMALL}"
    code, _, err = nanoeuler(line)
    assert code == 0 and "1 of 36 pairs are longer than the context of 64 tokens" in err


def test_the_same_seed_generates_the_same_text(nanoeuler):
    line = ["generate", "The river", "--from", "base", "--tokens", "30", "--seed"]
    first, again, other = (nanoeuler([*line, seed])[1] for seed in "112")
    assert first == again != other
    assert first.startswith("The river") and first.endswith("\n")


def test_a_text_ends_before_a_stop_string_or_token(nanoeuler):
    line = ["generate", "The river", "--from", "base", "--tokens", "30", "--temperature", "0"]
    whole = nanoeuler(line)[1]
    assert whole.endswith("\n")
    for stop in (whole[15:17], whole[20]):
        short = nanoeuler([*line, "--stop", "no such words", "--stop", stop])[1]
        assert short == "The river" + whole[9:-1].split(stop)[0] + "\n"
    listed = nanoeuler([*line, "--log-probabilities"])[1].splitlines()
    assert len(listed) == 30 and all(float(each.split()[0]) <= 0 for each in listed)
    assert "".join(ast.literal_eval(each.split(None, 1)[1]) for each in listed) == whole[9:-1]
    first = nanoeuler([*line, "--stop-token", "<|end|>"])[1]
    assert first == whole  # none was drawn


def test_readers_and_guesses_write_the_same_greedy_text(nanoeuler):
    line = "generate river --from base --tokens 60 --temperature 0 "
    texts = {nanoeuler(line + more)[1] for more in ("", "--engine cpu", "--engine fused")}
    assert len(texts) == 1
    assert nanoeuler(line + "--min-p 0.1 --repetition-penalty 1.2 --seed 1")[0] == 0


def test_matrices_in_less_memory_are_asked_for(nanoeuler, monkeypatch):
    """By a reader in float32, for which a pass is compiled already."""
    asked = []

    def reader(config, weights, texts, threads, quantize):
        asked.append(quantize)
        return CpuReader(config, weights, texts, threads)

    monkeypatch.setattr(backends, "CpuReader", reader)
    line = "generate river --from base --tokens 60 --temperature 0 "
    plain = nanoeuler(line + "--engine cpu")
    assert plain[0] == 0 and nanoeuler(line + "--quantize int8") == plain
    assert asked == ["none", "int8"]


@pytest.mark.long  # half a minute to compile the pass; tests/test_reader.py has its products
def test_a_text_in_int8(nanoeuler):
    assert nanoeuler("generate river --from base --tokens 60 --quantize int8")[0] == 0


def test_an_engine_of_each_name(nanoeuler, tmp_path):
    ends = []
    for engine in ("auto", "cpu", "reference"):
        out = tmp_path / engine
        line = f"train --data {STORY} --out {out} --steps 1 --batch-size 2 --engine {engine}"
        assert nanoeuler(f"{line} {TINY}")[0] == 0
        ends.append(json.loads((out / "metrics.jsonl").read_text())["loss"])
    assert ends[0] == ends[1]
    # Float32 sums of a thousand terms, in another order.
    assert ends[2] == pytest.approx(ends[0], rel=1e-4)


def chat(nanoeuler, monkeypatch, data):
    """What `nanoeuler chat` answers to the bytes on its stdin: (exit code, stdout, stderr)."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    return nanoeuler("chat --from chat")


def test_the_chat_answers_piped_questions(nanoeuler, monkeypatch):
    code, out, err = chat(nanoeuler, monkeypatch, b"What is 3?\n\nWhat is 5?\n")
    assert code == 0 and err == ""
    assert out.count("\n") >= 2  # an answer for each question, none for the empty line
    assert chat(nanoeuler, monkeypatch, b"What is 3?\n\nWhat is 5?\n") == (code, out, err)


def test_a_long_question_does_not_end_the_chat(nanoeuler, monkeypatch):
    code, out, err = chat(nanoeuler, monkeypatch, b"why " * 100 + b"\nWhat is 5?\n")
    assert code == 0 and err == ""
    assert out.startswith("(expected a question of at most 30 tokens, got ")


def test_bytes_that_are_no_text_do_not_end_the_chat(nanoeuler, monkeypatch):
    code, out, err = chat(nanoeuler, monkeypatch, b"caf\xe9?\n")
    assert code == 0 and err == "" and out.endswith("\n")


def test_the_tokenizer_commands(nanoeuler, tmp_path):
    code, out, _ = nanoeuler(["tokenizer", "encode", "The river", "--tokenizer", "base"])
    assert code == 0
    assert nanoeuler(f"tokenizer decode {out} --tokenizer base") == (0, "The river\n", "")
    code, shown, _ = nanoeuler(["tokenizer", "show", "The river", "--tokenizer", "base"])
    lines = [line.split(" ", 1) for line in shown.splitlines()]
    assert [i for i, _ in lines] == out.split()
    assert "".join(token[1:-1] for _, token in lines) == "The river"
    shown = nanoeuler("tokenizer show --tokenizer base/tokenizer.json")[1].splitlines()
    assert len(shown) == 512 and shown[-1] == "511 '<|end|>'"


def test_a_tokenizer_is_learned_and_found_without_flags(nanoeuler, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = nanoeuler(f"tokenizer train {STORY} --vocab-size 300")
    assert code == 0 and err == ""  # no progress: stderr is no terminal
    said = r"saved tokenizer.json: 300 ids, (\S+) bytes per token in the first (\S+ kB) of .* s\n"
    ratio, size = re.fullmatch(said, out).groups()
    story, tokenizer = STORY.read_bytes(), Tokenizer.load("tokenizer.json")
    assert size == f"{len(story) / 1000:.1f} kB"
    assert ratio == f"{len(story) / len(tokenizer.encode(story)):.2f}"
    assert tokenizer.hash == Tokenizer.train(story, 300).hash
    ids = tokenizer.encode("river").tolist()
    assert nanoeuler("tokenizer encode river")[1] == " ".join(map(str, ids)) + "\n"
    assert len(nanoeuler("tokenizer show")[1].splitlines()) == 300


def test_chunks_do_not_show(nanoeuler, tmp_path, monkeypatch):
    """A chunk may end anywhere: in a word, in a character, in a number."""
    story, out = STORY.read_bytes(), tmp_path / "t.json"
    text = "Ð ½—the river’s bed…  " * 20
    nanoeuler(f"tokenizer train {STORY} --vocab-size 400 --out {tmp_path / 'whole.json'}")
    encode = f"tokenizer encode --tokenizer {tmp_path / 'whole.json'}"
    ids = through(encode, text.encode(), monkeypatch)
    monkeypatch.setattr(cli_tokenizer, "CHUNK", 7)
    assert nanoeuler(f"tokenizer train {STORY} --vocab-size 400 --out {out}")[0] == 0
    assert Tokenizer.load(out).hash == Tokenizer.train(story, 400).hash
    for command, given, wanted in (("encode", text, ids.decode()), ("decode", ids.decode(), text)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
        assert nanoeuler(f"tokenizer {command} --tokenizer {out}") == (0, wanted, "")


def test_no_word_goes_on_from_one_file_into_the_next(nanoeuler, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("x", "x"), ("y", "y"), ("both", "xy")):
        Path(name).write_text(text)
    line = "tokenizer train {} --vocab-size 261"
    code, _, err = nanoeuler(line.format("x y x y"))
    assert code == 2 and "expected text with 1 pairs to merge, but this text has 0" in err
    assert nanoeuler(line.format("x both y"))[0] == 0
    assert b"xy" in Tokenizer.load("tokenizer.json").tokens


def through(line, data, monkeypatch):
    """What the command line `line` makes of the bytes `data` on its stdin: bytes."""
    out = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    with contextlib.redirect_stdout(out):
        assert cli.main(line if isinstance(line, list) else line.split()) == 0
    return out.buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"caf\xe9 \xff\xfe", b"one\r\ntwo\r\n \n", random.Random(0).randbytes(100_000)],
    ids=["nothing", "an empty line", "no UTF-8", "ends of lines", "noise"],
)
def test_every_byte_comes_back(runs, monkeypatch, data):
    monkeypatch.chdir(runs)
    ids = through("tokenizer encode --tokenizer base", data, monkeypatch)
    assert re.fullmatch(rb"(\d+( \d+)*)?\n", ids)
    assert through("tokenizer decode --tokenizer base", ids, monkeypatch) == data


@pytest.mark.long  # the test above it, by real programs; test_a_terminal_... encodes through one
def test_every_byte_comes_back_through_a_pipe(runs):
    data = random.Random(0).randbytes(300_000)
    encoded = piped("tokenizer encode --tokenizer base", data, cwd=runs)
    decoded = piped("tokenizer decode --tokenizer base", encoded.stdout, cwd=runs)
    assert decoded.stdout == data
    for done in (encoded, decoded):
        assert done.returncode == 0 and done.stderr == b""


def test_an_argument_is_the_bytes_that_were_typed(runs, monkeypatch):
    monkeypatch.chdir(runs)
    typed = os.fsdecode(b"caf\xe9")  # as Python puts it into sys.argv
    ids = through(["tokenizer", "encode", typed, "--tokenizer", "base"], b"", monkeypatch)
    assert through("tokenizer decode --tokenizer base", ids, monkeypatch) == b"caf\xe9"


def test_a_vocabulary_of_text_that_is_no_utf_8(nanoeuler, tmp_path):
    text = b"caf\xe9 au lait, \xff\x00 "
    (tmp_path / "latin1").write_bytes(text * 50)
    out = tmp_path / "folder" / "t.json"  # a folder that is made
    code, _, err = nanoeuler(f"tokenizer train {tmp_path / 'latin1'} --vocab-size 271 --out {out}")
    assert code == 0 and err == ""
    assert b" \xff\x00" in Tokenizer.load(out).tokens
    assert [path.name for path in out.parent.iterdir()] == ["t.json"]


def on_a_terminal(words, **how):
    """The program with a terminal as its stderr: (stdout, what the terminal has got)."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-m", "nanoeuler", *words], stderr=theirs,
                               stdout=subprocess.PIPE, env=environment, **how)  # fmt: skip
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that nobody has it open any more
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0, shown
    return out, shown.decode()


def test_a_terminal_sees_how_far_it_is_and_a_pipe_does_not(runs, tmp_path, monkeypatch):
    size = f"{STORY.stat().st_size / 1000:.1f} kB"
    words = ["tokenizer", "train", str(STORY), "--vocab-size", "600", "--out"]
    out, shown = on_a_terminal([*words, str(tmp_path / "t.json")])
    assert f"read {size} of {size}" in shown and "340 of 340 merges" in shown
    assert re.fullmatch(rb"saved .*\n", out)

    words = ["tokenizer", "encode", "--tokenizer", str(runs / "base")]
    with open(STORY, "rb") as story:
        out, shown = on_a_terminal(words, stdin=story)
    assert f"read {size} of {size}" in shown
    assert out == through(words, STORY.read_bytes(), monkeypatch)
    source = subprocess.Popen(["cat", STORY], stdout=subprocess.PIPE)
    with source.stdout:
        assert on_a_terminal(words, stdin=source.stdout) == (out, "")  # a pipe has no known end
    assert source.wait() == 0


def test_a_stream_of_digits_without_end_is_refused(runs):
    process = start("tokenizer decode --tokenizer base", cwd=runs)
    with contextlib.suppress(BrokenPipeError):
        for _ in range(64):
            process.stdin.write("1" * (1 << 16))
    assert process.wait(timeout=60) == 2  # and its stdin is still open
    assert re.fullmatch(r"nanoeuler: expected ids[^\n]+\n", process.stderr.read())


def test_wrong_ids_on_stdin_are_one_line(nanoeuler, monkeypatch):
    for ids, said in ((b"84 1o4\n", "'1o4'"), (b"84 512\n", "512"), (b"84 -1", "'-1'")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(ids)))
        code, _, err = nanoeuler("tokenizer decode --tokenizer base")
        assert code == 2 and re.fullmatch(rf"nanoeuler: [^\n]*{said}[^\n]*\n", err)


def reads(process, path):
    """Whether a process has the file open, by Linux's /proc."""
    opened = Path(f"/proc/{process.pid}/fd")
    return str(path) in [os.path.realpath(each) for each in opened.iterdir()]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_a_learning_cut_short_leaves_no_file(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(random.Random(0).randbytes(48_000_000))  # no word twice: it takes minutes
    process = start("tokenizer train text --out t.json", cwd=tmp_path)
    while not reads(process, text):
        time.sleep(0.02)
    for _ in range(6):
        process.send_signal(signal.SIGINT)  # lost, if it comes while LLVM calls Python back
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(timeout=10) == 2
            break
    out, err = process.communicate()
    assert out == "" and err.splitlines()[-1] == "nanoeuler: interrupted"
    assert os.listdir(tmp_path) == ["text"]


def test_a_folder_that_may_not_be_written_is_told_before_the_reading(nanoeuler, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(Tokenizer, "train", None)  # is not reached
    code, _, err = nanoeuler(f"tokenizer train {STORY} --out new/t.json")
    assert code == 2 and "--out new/t.json cannot be written in " in err


def test_a_model_is_trained_with_a_tokenizer_that_is_there(nanoeuler, tmp_path):
    given, other = (Tokenizer.train(STORY.read_bytes(), size) for size in (300, 310))
    given.save(tmp_path / "given.json")
    other.save(tmp_path / "other.json")
    run = f"train --data {STORY} --out {tmp_path / 'run'}"
    given_run = f"{run} {SMALL} {TINY} --tokenizer {tmp_path / 'given.json'}"
    assert nanoeuler(given_run)[0] == 0
    assert (tmp_path / "run" / "tokenizer.json").read_text() == given.json
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["vocab_size"] == 300
    again = f"train --data {STORY} --out {tmp_path / 'again'} {SMALL} {TINY}"
    assert nanoeuler(f"{again} --tokenizer {tmp_path / 'run'}")[0] == 0  # a run's tokenizer
    models = [model(tmp_path / name).read_bytes() for name in ("run", "again")]
    assert models[0] == models[1]

    for line in (run, f"{run} {TINY} --tokenizer {tmp_path / 'given.json'}"):
        assert nanoeuler(f"{line} --resume")[0] == 0
    code, _, err = nanoeuler(f"{run} --resume --tokenizer {tmp_path / 'other.json'}")
    assert code == 2 and f"holds a run with tokenizer {given.hash}, but {other.hash}" in err


def test_a_tokenizer_that_knows_no_chat_is_told_of(nanoeuler, tmp_path):
    Tokenizer.train(STORY.read_bytes(), 300, ("<|endoftext|>",)).save(tmp_path / "gpt2.json")
    run, tokenizer = tmp_path / "run", tmp_path / "gpt2.json"
    line = f"train --data {STORY} --out {run} {SMALL} {TINY} --tokenizer {tokenizer}"
    assert nanoeuler(line)[0] == 0
    for line in ("sft --data pairs.jsonl", "chat"):
        out = ["--out", str(tmp_path / "new")] if line != "chat" else []
        code, _, err = nanoeuler([*line.split(), "--from", str(run), *out])
        assert code == 2 and re.fullmatch(r"nanoeuler: .* it has no <\|user\|>[^\n]*\n", err)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder that looks like the project's, with measurements, and a folder within it."""
    (tmp_path / "_toc.yml").touch()
    for name, text in {
        "bench/speed": "import sys\n"
        "import a_helper\n"
        "from bench import peer_of\n"
        "from nanoeuler import measurements\n"
        "if __name__ == '__main__':\n"
        "    measurements.save('speed', [{'arguments': sys.argv[1:]}])\n",
        "bench/peer_of": "",
        "bench/peer": "import a_peer_that_is_not_here\n",
        "helpers/a_helper": "",
    }.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path / "tests")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["nanoeuler"])
    monkeypatch.delitem(sys.modules, "bench", raising=False)
    yield tmp_path
    for name in ("bench", "bench.peer_of", "a_helper"):
        sys.modules.pop(name, None)


def test_bench_runs_a_measurement_of_the_checkout(checkout, capfd):
    assert cli.main(["bench"]) == 0 and capfd.readouterr().out == "peer\npeer_of\nspeed\n"
    assert cli.main(["bench", "speed"]) == 0  # which finds the helpers
    measured = checkout / "data" / "measurements" / "speed.json"
    assert json.loads(measured.read_text()) == [{"arguments": []}]
    assert cli.main(["bench", "speed", "time", "--report", "my-card.json"]) == 0
    given = ["time", "--report", "my-card.json"]
    assert json.loads(measured.read_text()) == [{"arguments": given}]


def test_what_bench_lacks_is_one_line(checkout, capfd):
    for name, said in (
        ("peer", "no a_peer_that_is_not_here: install the extras: pip install -e '.[test,bench]'"),
        ("nothing", "no measurement is named 'nothing': choose one of peer, peer_of, speed"),
    ):
        assert cli.main(["bench", name]) == 2
        assert capfd.readouterr().err == f"nanoeuler: {said}\n"


BENCHES = sorted(path.stem for path in (ROOT / "tests" / "bench").glob("*.py"))


@pytest.mark.parametrize("name", BENCHES)
def test_each_measurement_finds_what_it_needs(name, monkeypatch, capfd):
    """All but the measuring: the script is run under another name than its own."""
    ran = []

    def import_it(path, run_name):
        assert run_name == "__main__"
        ran.append(runpy.run_path(path, run_name="imported"))

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if not each.startswith(TESTS)])
    monkeypatch.setattr(sys, "argv", ["nanoeuler"])
    monkeypatch.setattr(cli, "runpy", SimpleNamespace(run_path=import_it))
    code = cli.main(["bench", name])
    err = capfd.readouterr().err
    if code == 2 and "pip install -e '.[test,bench]'" in err:
        missing = err.removeprefix("nanoeuler: no ").split(":")[0]
        assert not list((ROOT / "tests").rglob(f"{missing}.py")), f"{missing} is ours, not a peer"
        pytest.skip(err)  # a peer that is not installed
    assert code == 0 and len(ran) == 1, err


def test_check_proves_the_gradients(nanoeuler, monkeypatch):
    """That they are right is what tests/test_backward.py proves; this is what is said of it."""
    row = gradcheck.Row("embedding", (7, 16), 1e-16, 1e-16)
    monkeypatch.setattr(gradcheck, "check", lambda: [row])
    code, out, err = nanoeuler("check")
    assert code == 0 and out.rstrip().endswith("passed") and err == ""


def test_check_fails_where_a_gradient_is_wrong(nanoeuler, monkeypatch):
    row = gradcheck.Row("embedding", (7, 16), 1e-3, 1e-3)
    monkeypatch.setattr(gradcheck, "check", lambda: [row])
    code, out, _ = nanoeuler("check")
    assert code == 1 and out.rstrip().endswith("FAILED")


def test_plan_prints_a_plan(nanoeuler):
    code, out, err = nanoeuler("plan --preset euler-116m --batch-size 8")
    assert code == 0 and "parameters      116," in out and err == ""


def test_the_doctor_names_what_pins_slow_kernels(nanoeuler, monkeypatch):
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    code, out, err = nanoeuler("doctor")
    assert code == 0 and err == "" and "unset OPENBLAS_CORETYPE" not in out
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    code, out, err = nanoeuler("doctor")
    assert code == 0 and "OPENBLAS_CORETYPE=Prescott" in out and "unset" in out


def test_the_doctor_tells_what_is_found_from_what_is_used(nanoeuler, monkeypatch):
    found = "AVX-512 in this processor; the kernels are compiled for"
    for features, used, said in (
        ("+avx512f,+avx2,+fma", (16, 32), f"{found} AVX-512, 32 registers of 16 float32"),
        ("+avx512f,+avx2,+fma", (8, 16), f"{found} AVX2, 16 registers of 8 float32: something"),
        ("+neon", (4, 32), "NEON in this processor; the kernels are compiled for NEON"),
        ("", (4, 16), "plain in this processor"),
    ):
        monkeypatch.setattr(doctor.binding, "get_host_cpu_features", lambda f=features: Features(f))
        monkeypatch.setattr(llvm, "LANES", used[0])
        monkeypatch.setattr(llvm, "REGISTERS", used[1])
        assert said in doctor.vector_units()
        assert ("holds numba back" in doctor.vector_units()) == ("something" in said)
    monkeypatch.undo()
    rate = re.search(r"^products +(\d+) GFLOP/s", nanoeuler("doctor")[1], re.MULTILINE)
    assert int(rate[1]) >= 1  # a scalar loop at 1 GHz: the kernel does better anywhere


class Features(str):
    """What LLVM says of a processor."""

    def flatten(self):
        return str(self)


ERRORS = {  # a command line, and what its one line must say
    "train --data nowhere.txt": "but nowhere.txt is none of these: nanoeuler data list shows",
    "train --data tokenizerless": "but tokenizerless is none",
    "train --data packed.gz": "packed.gz is compressed: gunzip -k packed.gz first",
    "train --data base/data --tokenizer other.json --out new": "prepared with another tokenizer",
    "train --data base/data --vocab-size 300 --out new": "leave out --vocab-size",
    "train --data= --out new": "expected a value for --data, but it is empty",
    "train --data  --out new": "expected a value for --data, but it is empty",
    "train --preset  --out new": "expected a value for --preset, but it is empty",
    "train --out ": "expected a value for --out, but it is empty",
    "tokenizer train --out=": "expected a value for --out, but it is empty",
    "train --data docs --out loop": "cannot write to --out loop: choose another path",
    "train --data docs --out /dev/null": "--out /dev/null is no folder",
    "train --data docs --out /dev/null/run": "--out /dev/null/run cannot be written in /dev/null",
    "train --dim 30 --out new": "dim (30) must be a multiple of n_heads (4)",
    "train --dim 1 --heads 1 --kv-heads 1 --out new": "rotary positions turn pairs",
    "train --batch-size 1000000000 --out new": "expected a batch_size of at most 32768",
    "train --batch-size 9223372036854775807 --out new": "expected a batch_size of at most",
    f"train --batch-size {'9' * 400} --out new": "from 1 to 9223372036854775807, got",
    "train --accumulate 17 --out new": "accumulate to be at most batch_size 16",
    "train --minutes 0 --out new": "minutes to be a number above 0",
    "train --threads 0 --out new": "--threads",
    "sft --from base --data pairs.jsonl --batch-size 1000000000 --out new": "at most 65536",
    **{f"plan --{flag} {NINES}": "from 1 to 9223372036854775807, got '9999" for flag in (
        "batch-size", "tokens", "hidden", "context", "ranks", "layers", "dim")},
    f"plan --vocab-size {NINES}": "from 0 to 9223372036854775807",
    f"train --data {STORY} --out new --hidden {NINES}": "'--hidden': expected a whole number",
    f"train --data {STORY} --out new --lr {NINES}": "'--lr': expected a finite number",
    f"generate a --from base --stop-token {'9' * 5000}": "expected a token to stop at, got '99999",
    "generate --from base --seed 0.0": "expected a whole number of at least 0, got '0.0'",
    "generate --from base --top-k 1_0": "expected a whole number of at least 0, got '1_0'",
    "generate --from base --seed 0x10": "got '0x10'",
    "generate --from base --seed ٣": "got '٣'",
    "generate --from base --temperature inf": "expected a finite number, such as 0.5 or 3e-4, got",
    "generate --from base --temperature 1e999": "expected a finite number",
    "generate --from base --temperature ٣": "expected a finite number",
    "serve --from chat --port 0.0": "expected a whole number from 0 to 65535, got '0.0'",
    "serve --from chat --port 65536": "expected a whole number from 0 to 65535, got '65536'",
    "data show base/data 0": "expected a whole number of at least 1, got '0'",
    f"train --data {STORY} --out new --threads 4294967296": "from 1 to 1024, got '4294967296'",
    "eval base --engine abacus": "unknown engine 'abacus'",
    "eval base --engine cuda": "needs a GPU, and there is no CUDA driver",
    "eval base --threads 0": "expected a whole number from 1 to 1024, got '0'",
    "plan --engine abacus": "unknown engine 'abacus'",
    "tokenizer train loop --out new/t.json": "expected a readable file, but loop: Too many levels",
    f"tokenizer train {STORY} --out /": "cannot write to --out /: choose another path",
    f"tokenizer train {STORY} --out loop": "cannot write to --out loop: choose another path",
    f"tokenizer train {STORY} --out /dev/null": "--out /dev/null is no regular file",
    "eval base --task nonsense": "expected a task, got 'nonsense'",
    "eval base --task copa --tasks-from nowhere": "expected one file copa.jsonl in nowhere",
    "eval base --task copa --limit 0": "expected a whole number of at least 1",
    "eval base --task copa --shots -1": "expected a whole number from 0 to 100",
    "eval nowhere": "no config.json",
    "eval chat": "in chat/data, but there is none, since the run began with prepared data or with",
    "generate --from base --seed -1": "--seed",
    "generate --from base --min-p 2": "expected min_p to be a number from 0",
    "generate --from base --repetition-penalty 0": "expected repetition_penalty to be",
    "generate --from base --stop-token <|none|>": "expected a token to stop at, got '<|none|>'",
    "generate --from base --stop-token 99999": "or the name of a special one",
    "generate --from base --engine cuda": "needs a GPU, and there is no CUDA driver",
    "generate --from base --engine fused --quantize int8": "expected engine cpu, or auto, with",
    "generate --from base --quantize int3": "expected quantize to be none, int8, int4, got 'int3'",
    "generate --from base --log-probabilities --stop x": "leave out --stop and --guesses",
    "generate --from base --top-k -1": "expected a whole number of at least 0, got '-1'",
    "train --layers 10000 --out new": "in 10,000 layers, with a step of a single sequence",
    "eval base --data empty": "expected held-out tokens to judge, got none",
    "eval base --data pairs": "holds pairs, not text",
    "eval base --data again": "prepared with another tokenizer than the model's",
    f"train --data {STORY} --out base/data": "base/data holds prepared data: name",
    "train --resume --out nowhere": "expected a run in nowhere, but there is none",
    "sft --resume --data pairs.jsonl --out nowhere --from base": "a run in nowhere, but",
    "sft --resume --data pairs.jsonl --out chat --from nowhere": "no config.json",
    "train --data pairs": "pairs holds pairs, not text: nanoeuler sft learns",
    "train --data base/data --out base": "--resume",
    "train --accumulate 0": "--accumulate",
    "train --keep 0": "--keep",
    "train --preset huge": "unknown preset 'huge': choose small or small-modern or euler-10m or ",
    "train --mlp silu --out new": "mlp must be swiglu or gelu or gelu_exact or relu2, got 'silu'",
    "train --logit-cap -1 --out new": "logit_cap must be a finite number above 0, or 0, got -1",
    "train --init ones --out new": "init must be scaled or zero, got 'ones'",
    "train --predict 0 --out new": "--predict",
    "train --momentum 1 --out new": "expected momentum to be below 1, got 1",
    "train --engine cuda --out new": "needs a GPU, and there is no CUDA driver",
    "train --engine abacus --out new": "unknown engine 'abacus'",
    "train --data binary --out new": "expected UTF-8 text",
    "train --data empty --out new": "",
    f"train --data {STORY} --out base": "--resume",
    f"train --data {STORY} --out new --resume": "but there is none: leave out --resume",
    f"train --data {STORY} --out base --resume --steps 9": "steps 4, but 9",
    f"train --data {STORY} --out new --lr -1": "lr",
    f"train --data {STORY} --out binary": "'binary' is a file",
    "train --steps 0": "--steps",
    "train --steps many": "--steps",
    "train --seed -1": "--seed",
    "train --speed 9": "--speed",
    "sft --from nowhere --data pairs.jsonl --out new": "no config.json",
    "sft --from base --data wrong.jsonl --out new": "TEXT}, but it begins with 'What is it?'",
    "sft --from base --data silent.jsonl --out new":
        "but in all 2 a question or answer is empty or <nooutput>",
    "sft --from base --data pairs.jsonl --out pairs": "pairs holds prepared data",
    "sft --from binary --data pairs.jsonl --out new": "'binary' is a file",
    "sft --from base --data nowhere.jsonl --out new": "no file nowhere.jsonl",
    "sft --from base --data base/data --out new": "holds text, not pairs",
    "sft --from base --data broken --out new": "no file broken/pairs.jsonl",
    "sft --from base --data pairs.jsonl --out chat": "--resume",
    "sft --from base --data empty --out new": "pairs",
    "generate --from nowhere": "no config.json",
    "generate --from base --temperature -1": "temperature",
    "generate --from base --top-p 2": "expected top_p to be a number above 0 and at most 1",
    "generate --from base --tokens 0": "--tokens",
    "chat --from nowhere": "no config.json",
    "chat --from chat --temperature -1": "temperature",
    "sft --from base --data pairs.jsonl --out new --lr 0": "lr",
    "chat --from broken": "model.safetensors",
    f"train --data {STORY} --out new --tokenizer nowhere": "there is no nowhere",
    "tokenizer encode text --tokenizer nowhere": "there is no nowhere",
    "tokenizer encode text": "there is no tokenizer.json",
    "tokenizer encode text --tokenizer binary": "binary",
    "tokenizer encode --tokenizer tokenizerless": "there is no tokenizerless/tokenizer.json",
    "tokenizer decode --tokenizer nowhere": "there is no nowhere",
    "tokenizer decode 1 99999 --tokenizer base": "99999",
    "tokenizer decode 1 99999999999999999999 --tokenizer base": "at most 18 digits",
    "tokenizer decode one --tokenizer base": "ids",
    "tokenizer show --tokenizer nowhere": "there is no nowhere",
    f"tokenizer train {STORY} --vocab-size 3 --out new/t.json": "vocabulary size",
    f"tokenizer train {STORY} --vocab-size many": "--vocab-size",
    f"tokenizer train {STORY} --vocab-size 99999 --out new/t.json": "pairs to merge",
    f"tokenizer train {STORY} nowhere --out new/t.json": "nowhere: No such file",
    f"tokenizer train {STORY} base --out new/t.json": "base: Is a directory",
    "tokenizer train empty empty --vocab-size 260 --out new/t.json": "empty is empty",
    f"tokenizer train {STORY} --out base": "base is a directory: name a file",
    f"tokenizer train {STORY} --out binary/t.json": "cannot be written in",
    "tokenizer train binary --out ./binary": "is a text to learn from",
    "tokenizer": "",
    "plan --preset huge": "unknown preset",
    "plan --tokens 0": "--tokens",
    "bench cpu": "inside the project",  # which the folder of the runs is not
    "fly": "fly",
    "": "",
    "--fly": "--fly",
}


@pytest.fixture(scope="module")
def wrong(runs):
    """What the command lines of ERRORS name, in the folder of `runs`: made once."""
    (runs / "binary").write_bytes(b"\xff\xfe\x00")
    (runs / "empty").write_bytes(b"")
    (runs / "wrong.jsonl").write_text("What is it?\n")
    (runs / "silent.jsonl").write_text('{"question": "Why?", "answer": ""}\n' * 2)
    (runs / "packed.gz").write_bytes(b"\x1f\x8b")
    Tokenizer.train(STORY.read_bytes(), 300).save(runs / "other.json")
    (runs / "tokenizerless").mkdir()
    shutil.copytree(runs / "chat", runs / "broken")
    model(runs / "broken").write_bytes(b"not at all")
    (runs / "pairs").mkdir()
    shutil.copy(runs / "pairs.jsonl", runs / "pairs")
    with contextlib.chdir(runs):
        assert cli.main(f"data prepare {STORY} --vocab-size 300 --out again".split()) == 0
    (runs / "loop").symlink_to("loop")


@pytest.mark.parametrize("line", ERRORS)
def test_an_error_is_one_line_and_exit_code_2(nanoeuler, runs, wrong, line):
    code, out, err = nanoeuler(line.split(" "))
    assert code == 2 and out == ""
    assert re.fullmatch(r"nanoeuler: [^\n]+\n", err), err
    assert ERRORS[line] in err
    assert not (runs / "new").exists() or not any((runs / "new").iterdir())


def test_an_error_that_repeats_what_was_typed_is_a_short_printable_line(nanoeuler):
    code, out, err = nanoeuler(["eval", "base", "--data", f"\x1b[31m{'x' * 5000}\x07\u202e"])
    assert (code, out) == (2, "") and err.startswith("nanoeuler: ") and err.count("\n") == 1
    assert err[:-1].isprintable() and "\\x1b[31mxx" in err and " ... " in err and len(err) < 1100
    code, _, err = nanoeuler(["generate", "a", "--from", "nowhere\udcff"])
    assert code == 2 and "nowhere\\udcff" in err


def test_no_warning_of_numpy_reaches_a_user(nanoeuler, tmp_path):
    """Weights this large overflow wherever they are used; whether a loss is still finite, which
    ends a run or not, depends on the order of a processor's sums."""
    line = f"train --data {STORY} --out {tmp_path / 'run'} --steps 1 --batch-size 2 --warmup 0"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        code, _, err = nanoeuler(f"{line} {TINY} --lr 1e18 --engine cpu")
    assert code in (0, 2) and "Warning" not in err and not seen, (err, seen)


def test_a_wrong_knob_is_told_before_anything_is_printed(nanoeuler):
    code, out, err = nanoeuler("generate river --from base --temperature nan")
    assert (code, out) == (2, "") and "--temperature': expected a finite number" in err


def test_a_fine_tuning_goes_on_without_its_base(nanoeuler, tmp_path):
    line = f"sft --data pairs.jsonl --out {tmp_path / 'chat'}"
    assert nanoeuler(f"{line} --from base {SMALL}")[0] == 0
    shutil.rmtree(checkpoints(tmp_path / "chat")[-1][1])  # as if it had been cut short
    assert not Path("runs").exists()  # where --from, if it is left out, is
    assert nanoeuler(f"{line} --resume")[0] == 0
    assert model(tmp_path / "chat").read_bytes() == model("chat").read_bytes()


def test_an_empty_prompt_is_an_error(nanoeuler):
    code, _, err = nanoeuler(["generate", "", "--from", "base"])
    assert code == 2 and "at least one token" in err


SPEAKERS = ["tokenizer show --tokenizer base", "generate --from base --tokens 3000"]


@pytest.mark.parametrize("line", tiers.kept(SPEAKERS, SPEAKERS[1]))
def test_a_closed_pipe_ends_the_program_quietly(line, runs):
    process = start(line, cwd=runs)
    process.stdout.close()  # long before it has anything to say
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 2


def deaf(line, runs, heard):
    """A child whose stdout and stderr have one reader, gone after the lines `heard`: its code."""
    ours, theirs = os.pipe()
    process = subprocess.Popen([sys.executable, "-m", "nanoeuler", *line.split()], cwd=runs,
                               stdout=theirs, stderr=theirs)  # fmt: skip
    os.close(theirs)
    with open(ours) as reader:
        for _ in range(heard):
            assert reader.readline()
    return process.wait(timeout=60)


# After so many lines the reader is gone: "head -1", and "true". One is a test, both are compared.
@pytest.mark.parametrize("heard", tiers.kept([[1], [0, 1]], [1]), ids=str)
def test_training_goes_on_where_nobody_listens(heard, runs, tmp_path):
    outs = [tmp_path / str(lines) for lines in heard]
    for lines, out in zip(heard, outs, strict=True):
        line = f"sft --from base --data pairs.jsonl --out {out} {SMALL}"
        assert deaf(line, runs, lines) == 0
        assert checkpoints(out)[-1][0] == 4
    # Not those of `runs`: kernels that a process has compiled itself may round otherwise.
    assert len({model(out).read_bytes() for out in outs}) == 1


@pytest.mark.long  # its lines are said as those of training are
def test_a_prepared_text_is_there_where_nobody_listens(runs, tmp_path):
    assert deaf(f"data prepare {STORY} --vocab-size 300 --out {tmp_path / 'data'}", runs, 0) == 0
    assert (tmp_path / "data" / "prepared.json").exists()


def test_what_must_be_compiled_says_so(runs):
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = piped("tokenizer encode river --tokenizer base", cwd=runs, env=environment)
    said = rb"nanoeuler: [^\n]*NUMBA_DISABLE_JIT is set in the environment: unset it\n"
    assert done.returncode == 2 and re.fullmatch(said, done.stderr)


def test_want_of_memory_is_one_line(nanoeuler, monkeypatch):
    def full(run):
        raise MemoryError

    monkeypatch.setattr("nanoeuler.api.load", full)
    code, _, err = nanoeuler("generate --from base")
    assert code == 2 and err.startswith("nanoeuler: this needs more memory than there is")


def test_a_device_stays_what_it_is(nanoeuler, tmp_path):
    """Where root would rename its result over a pipe, a socket or /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        code, _, err = nanoeuler(f"tokenizer train {STORY} --out {tmp_path / name}")
        assert code == 2 and "is no regular file" in err
        for line in (f"train --data {STORY} {SMALL}", "sft --data pairs.jsonl --from base",
                     f"data prepare {STORY}"):  # fmt: skip
            code, _, err = nanoeuler(f"{line} --out {tmp_path / name}")
            assert code == 2 and "is no folder" in err
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()


def test_ctrl_c_is_one_line(runs):
    process = start("chat --from chat", cwd=runs)
    process.stdin.write("What is 3?\n")
    process.stdin.flush()
    process.stdout.readline()  # it has answered, and waits for the next question
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 2
    assert process.stderr.read() == "nanoeuler: interrupted\n"


def commands(app, before=()):
    """Every command, as words: [("train",), ..., ("tokenizer", "show")]."""
    found = [(*before, c.name or c.callback.__name__) for c in app.registered_commands]
    for group in app.registered_groups:
        found += commands(group.typer_instance, (*before, group.name))
    return found


@pytest.mark.parametrize("command", commands(cli.app), ids=" ".join)
def test_help_shows_an_example_that_parses(command, nanoeuler):
    code, out, err = nanoeuler([*command, "--help"])
    assert code == 0 and err == ""
    example = re.search(r"Example: nanoeuler (.*)", out)[1]
    assert tuple(example.split()[: len(command)]) == command
    for flag in re.findall(r"--[\w-]+", example):
        assert re.search(rf"^ +{flag}\b", out, re.MULTILINE), f"{flag} is no flag of {command}"


def test_a_flag_means_the_same_everywhere(nanoeuler):
    meanings = {}
    for command in commands(cli.app):
        text = re.sub(r"\n {9,}", " ", nanoeuler([*command, "--help"])[1])  # wrapped lines
        for flag, meaning in re.findall(r"^  (--[\w-]+)(?: [\w|]+)? +(.*)", text, re.MULTILINE):
            meanings.setdefault(flag, set()).add(re.split(r" +\[", meaning)[0])
    wanted = {"--data", "--from", "--out", "--preset", "--engine", "--steps", "--tokenizer"}
    assert wanted <= set(meanings)
    different = {flag for flag, said in meanings.items() if len(said) > 1}
    assert different == {"--engine"}  # other ones read than train


def test_the_commands_are_those_of_the_book():
    assert {words[0] for words in commands(cli.app)} == {
        "all", "train", "sft", "prefer", "generate", "chat", "serve", "eval", "data", "tokenizer",
        "check", "plan", "bench", "doctor", "import", "export", "speedrun",
    }  # fmt: skip
    assert isinstance(cli.app, typer.Typer)


def loaded(lines):
    """The modules that a program has when it has run `lines`."""
    program = f"{lines}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def rooms(modules, *names):
    """Those of the modules that are one of `names`, or in a room of that name."""
    return [m for m in modules if any(m == name or m.startswith(f"{name}.") for name in names)]


TRAINS = """
from nanoeuler.cli.main import main
from nanoeuler.training import loop
loop.plot = lambda *_: None  # which needs matplotlib, at the end
line = "train --data {story} --out {out} --engine cpu --steps 1 --batch-size 2 {tiny}"
assert main(line.split()) == 0
"""


def test_a_program_loads_what_it_uses(tmp_path):
    """matplotlib where a picture is drawn, a GPU's modules where there is one, numba to compile."""
    gpu = "nanoeuler.engines.gpu", "nanoeuler.planning.gpu_memory"
    # Limits of cards, which are numbers, and the words in which a kernel is described.
    words = "lang", "lang.card", "lang.kernel", "lang.instruction"
    page = {gpu[0], *(f"{gpu[0]}.{name}" for name in words)}
    assert {*rooms(loaded("import nanoeuler.api"), "matplotlib", *gpu)} <= page
    lines = TRAINS.format(story=STORY, out=tmp_path / "run", tiny=TINY)
    trained = rooms(loaded(lines), "matplotlib", *gpu)
    gpu = "nanoeuler.engines.gpu"
    assert {*trained} <= page | {f"{gpu}.host", f"{gpu}.host.libraries"}  # is there one?
    planned = "from nanoeuler.cli.main import main\nassert main(['plan']) == 0"
    assert not rooms(loaded(planned), "matplotlib", "numba", "llvmlite")


@pytest.mark.long  # a plan loads no compiler: so says the test above
def test_a_plan_of_the_cpu_loads_its_compiler():
    cpu = "from nanoeuler.cli.main import main\nassert main(['plan', '--engine', 'cpu']) == 0"
    assert rooms(loaded(cpu), "numba")  # it multiplies


def test_products_are_compiled_when_they_are_called():
    lines = """
from nanoeuler.engines.cpu import gemm
assert gemm.multiply.dispatcher is gemm.multiply_heads.dispatcher is None
from nanoeuler.planning.plan import product_rate
product_rate(2, seconds=0.01)
assert gemm.multiply.dispatcher.signatures and gemm.multiply_heads.dispatcher is None
"""
    assert loaded(lines)


def test_the_usual_preset_of_a_plan_is_that_of_training():
    assert flags.preset_config(None) == of_a_new_run(None, None)[0]


def test_eval_shows_on_a_terminal_how_far_it_is(runs, nanoeuler):
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "nanoeuler", "eval", "base", "--engine", "cpu"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.run(words, cwd=runs, stdout=subprocess.PIPE, stderr=theirs, text=True,
                          env=environment, timeout=60)  # fmt: skip
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux's way to say that all of a terminal was read
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    tokens = re.search(r"judged +([\d,]+) tokens", done.stdout)[1]
    said = rf"{tokens} of {tokens} tokens +[\d,]+ tokens/s +\d+\.\d{{4}} bits/byte"
    assert re.search(said, shown.decode()), shown
    assert nanoeuler("eval base --engine cpu") == (0, done.stdout, "")


def test_a_plan_of_an_engine(nanoeuler):
    for engine in ("cuda", "cuda-float32"):
        code, out, err = nanoeuler(f"plan --engine {engine}")
        assert (code, err) == (0, "") and out.startswith(engine) and "rtx-4090" in out
    code, out, err = nanoeuler("plan --engine cpu --tokens 1000000 --batch-size 16")
    assert (code, err) == (0, "") and "489 steps of 16 x 128 tokens" in out and "GFLOP/s on" in out
    assert "by the engine cpu" in nanoeuler("plan --engine reference")[1]


@pytest.mark.parametrize("text, value", [("3", 3), ("+7", 7), ("007", 7), (8000, 8000)])
def test_a_whole_number_is_read(text, value):
    assert flags.whole_number(1)(text) == value


@pytest.mark.parametrize(
    "text, value",
    [("3", 3), ("-0.5", -0.5), (".5", 0.5), ("1.", 1), ("3e-4", 3e-4), ("1E+3", 1000), (0.1, 0.1)],
)
def test_a_number_is_read(text, value):
    assert flags.number(text) == value


def test_help_does_not_wait_for_numerical_libraries():
    program = (
        "import sys\n"
        "from nanoeuler.cli.main import main\n"
        "assert main(['--help']) == main(['tokenizer', 'encode', '--help']) == 0\n"
        "slow = {'numpy', 'numba', 'llvmlite', 'matplotlib', 'safetensors', 'rich'}\n"
        "sys.exit(str(slow & set(sys.modules)) if slow & set(sys.modules) else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_default_data_is_the_embedded_corpus(nanoeuler, tmp_path, monkeypatch):
    (tmp_path / "docs.txt").write_text(STORY.read_text())
    pairs = [(pair["question"], pair["answer"]) for pair in PAIRS]
    monkeypatch.setattr(docstrings, "text_path", lambda: tmp_path / "docs.txt")
    monkeypatch.setattr(docstrings, "pairs", lambda: pairs)
    monkeypatch.chdir(tmp_path)
    assert cli.main("tokenizer train".split()) == 0
    assert Tokenizer.load("tokenizer.json").hash == Tokenizer.train(STORY.read_bytes(), 512).hash
    assert cli.main(f"train {SMALL} {TINY}".split()) == 0
    assert cli.main(f"sft {SMALL}".split()) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 3?\n"))
    assert cli.main(["chat"]) == 0  # with the defaults, each finds what the one before it made
    assert sorted(os.listdir("runs")) == ["base", "chat"]


def test_resume_with_sizes_begins_a_run_that_died_before_its_first_save(nanoeuler, runs):
    """The words that began it, and --resume: what a script does that is started again."""
    (runs / "died").mkdir()
    (runs / "died" / ".lock").touch()
    code, _, err = nanoeuler(f"train --data {STORY} --out died {SMALL} {TINY} --dim 16 --resume")
    assert code == 0 and "nothing was saved in died: the run begins" in err
    assert json.loads((runs / "died" / "config.json").read_text())["model"]["dim"] == 16
