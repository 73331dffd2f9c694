"""The command line end to end, at tiny size; and every error as one line with exit code 2."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from nanoeuler import cli, corpus, gradcheck

STORY = Path(__file__).resolve().parents[1] / "data" / "river.txt"
PAIRS = [{"question": f"What is {i}?", "answer": f"The number {i}."} for i in range(40)]
SMALL = "--steps 4 --batch-size 4 --save-every 2"


def start(line, **how):
    """The program as a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "nanoeuler", *line.split()], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            **how)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a trained run (base), a fine-tuned one (chat), and pairs.jsonl."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(f"train --data {STORY} --out base {SMALL}".split()) == 0
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
        assert {path.name for path in (runs / name).iterdir()} == {
            "config.json", "loss.png", "metrics.jsonl", "model.safetensors",
            "optimizer.safetensors", "tokenizer.json",
        }  # fmt: skip
        assert len((runs / name / "metrics.jsonl").read_text().splitlines()) == 4
    tokenizers = [(runs / name / "tokenizer.json").read_bytes() for name in ("base", "chat")]
    assert tokenizers[0] == tokenizers[1]


def test_training_prints_a_sample_and_what_comes_next(nanoeuler, tmp_path):
    code, out, err = nanoeuler(f"train --data {STORY} --out {tmp_path / 'run'} {SMALL}")
    assert code == 0 and "a sample:" in err
    assert out == f"saved in {tmp_path / 'run'}; next: nanoeuler sft --from {tmp_path / 'run'}\n"
    code, out, err = nanoeuler(
        f"sft --from {tmp_path / 'run'} --data pairs.jsonl --out {tmp_path / 'chat'} {SMALL}"
    )
    assert code == 0 and all(pair["question"] in err for pair in PAIRS[-3:])
    assert out.endswith(f"next: nanoeuler chat --from {tmp_path / 'chat'}\n")


def test_a_terminated_run_is_saved_and_resumed_to_the_same_byte(nanoeuler, tmp_path):
    run = f"train --data {STORY} --out {tmp_path / 'cut'} --batch-size 4"
    process = start(f"{run} --steps 2000 --save-every 1000")
    while not (tmp_path / "cut" / "metrics.jsonl").exists():  # its first step is done
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert err.splitlines()[-1] == "nanoeuler: interrupted"
    assert "--resume" in err and "Traceback" not in err
    done = json.loads((tmp_path / "cut" / "config.json").read_text())["step"]
    assert 1 <= done < 2000

    # Resuming 2000 steps would take a minute: the same promise on a run of 4.
    assert nanoeuler(f"train --data {STORY} --out {tmp_path / 'a'} {SMALL}")[0] == 0
    code, out, err = nanoeuler(f"train --data {STORY} --out {tmp_path / 'a'} --resume")
    assert code == 0  # nothing is left to do, and that is no error
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        Path("base") / "model.safetensors"
    ).read_bytes()


def test_the_same_seed_generates_the_same_text(nanoeuler):
    line = ["generate", "The river", "--from", "base", "--tokens", "30", "--seed"]
    first, again, other = (nanoeuler([*line, seed])[1] for seed in "112")
    assert first == again != other
    assert first.startswith("The river") and first.endswith("\n")


def test_an_engine_of_each_name(nanoeuler, tmp_path):
    ends = []
    for engine in ("auto", "cpu", "reference"):
        out = tmp_path / engine
        line = f"train --data {STORY} --out {out} --steps 1 --batch-size 2 --engine {engine}"
        assert nanoeuler(line)[0] == 0
        ends.append(json.loads((out / "metrics.jsonl").read_text())["loss"])
    assert ends[0] == ends[1]
    # Float32 sums of a thousand terms, in another order.
    assert ends[2] == pytest.approx(ends[0], rel=1e-4)


def test_the_chat_answers_piped_questions(runs):
    process = start("chat --from chat", cwd=runs)
    out, err = process.communicate("What is 3?\n\nWhat is 5?\n", timeout=60)
    assert process.returncode == 0 and err == ""
    assert out.count("\n") >= 2  # an answer for each question, none for the empty line
    process = start("chat --from chat", cwd=runs)
    assert process.communicate("What is 3?\n\nWhat is 5?\n", timeout=60)[0] == out


def test_a_long_question_does_not_end_the_chat(runs):
    process = start("chat --from chat", cwd=runs)
    out, err = process.communicate("why " * 100 + "\nWhat is 5?\n", timeout=60)
    assert process.returncode == 0 and err == ""
    assert out.startswith("(expected a question of at most 62 tokens, got ")


def test_bytes_that_are_no_text_do_not_end_the_chat(runs):
    done = subprocess.run([sys.executable, "-m", "nanoeuler", "chat", "--from", "chat"], cwd=runs,
                          input=b"caf\xe9?\n", capture_output=True, timeout=60)  # fmt: skip
    assert done.returncode == 0 and done.stderr == b""


def test_the_tokenizer_commands(nanoeuler, tmp_path):
    code, out, _ = nanoeuler(["tokenizer", "encode", "The river", "--from", "base"])
    assert code == 0
    assert nanoeuler(f"tokenizer decode {out} --from base")[1] == "The river\n"
    shown = nanoeuler("tokenizer show --from base")[1].splitlines()
    assert len(shown) == 512 and shown[-1] == "511 '<|end|>'"
    line = f"tokenizer train --data {STORY} --out {tmp_path} --vocab-size 300"
    code, out, _ = nanoeuler(line)
    assert code == 0 and re.search(r"\d\.\d\d bytes", out)
    assert len(nanoeuler(f"tokenizer show --from {tmp_path}")[1].splitlines()) == 300


def test_check_proves_the_gradients(nanoeuler):
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


ERRORS = {  # a command line, and what its one line must say
    "train --data nowhere.txt": "no file nowhere.txt",
    "train --data .": "no file .",
    "train --preset huge": "unknown preset 'huge': choose small or euler-116m",
    "train --engine cuda --out new": "trains on a CPU",
    "train --engine abacus --out new": "unknown engine 'abacus'",
    "train --data binary --out new": "expected UTF-8 text",
    "train --data empty --out new": "",
    f"train --data {STORY} --out base": "--resume",
    f"train --data {STORY} --out new --resume": "no config.json",
    f"train --data {STORY} --out base --resume --steps 9": "steps 4, but 9",
    f"train --data {STORY} --out new --lr -1": "lr",
    f"train --data {STORY} --out binary": "binary",
    "train --steps 0": "--steps",
    "train --steps many": "--steps",
    "train --seed -1": "--seed",
    "train --speed 9": "--speed",
    "sft --from nowhere --data pairs.jsonl --out new": "no config.json",
    "sft --from base --data wrong.jsonl --out new": "line 1 of wrong.jsonl",
    "sft --from base --data pairs.jsonl --out chat": "--resume",
    "sft --from base --data empty --out new": "pairs",
    "generate --from nowhere": "no config.json",
    "generate --from base --temperature -1": "temperature",
    "generate --from base --top-p 2": "top-p",
    "generate --from base --tokens 0": "--tokens",
    "chat --from nowhere": "no config.json",
    "chat --from chat --temperature -1": "temperature",
    "sft --from base --data pairs.jsonl --out new --lr 0": "lr",
    "chat --from broken": "model.safetensors",
    "tokenizer encode text --from nowhere": "tokenizer.json",
    "tokenizer decode 1 99999 --from base": "99999",
    "tokenizer decode one --from base": "ids",
    f"tokenizer train --data {STORY} --vocab-size 3 --out new": "vocabulary size",
    "tokenizer": "",
    "plan --preset huge": "unknown preset",
    "plan --tokens 0": "--tokens",
    "fly": "fly",
    "": "",
    "--fly": "--fly",
}


@pytest.mark.parametrize("line", ERRORS)
def test_an_error_is_one_line_and_exit_code_2(nanoeuler, runs, line):
    (runs / "binary").write_bytes(b"\xff\xfe\x00")
    (runs / "empty").write_bytes(b"")
    (runs / "wrong.jsonl").write_text("What is it?\n")
    (runs / "broken").mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (runs / "broken" / name).write_bytes((runs / "chat" / name).read_bytes())
    (runs / "broken" / "model.safetensors").write_bytes(b"not at all")
    code, out, err = nanoeuler(line)
    assert code == 2 and out == ""
    assert re.fullmatch(r"nanoeuler: [^\n]+\n", err), err
    assert ERRORS[line] in err
    assert not (runs / "new").exists() or not any((runs / "new").iterdir())


def test_an_empty_prompt_is_an_error(nanoeuler):
    code, _, err = nanoeuler(["generate", "", "--from", "base"])
    assert code == 2 and "at least one token" in err


def test_a_closed_pipe_ends_the_program_quietly(runs):
    for line in ("tokenizer show --from base", "generate --from base --tokens 3000"):
        process = start(line, cwd=runs)
        process.stdout.close()  # long before it has anything to say
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 2


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
            meanings.setdefault(flag, set()).add(meaning.split("  [")[0])
    assert {"--data", "--from", "--out", "--preset", "--engine", "--steps"} <= set(meanings)
    assert {flag for flag, said in meanings.items() if len(said) > 1} == set()


def test_the_commands_are_those_of_the_book():
    assert {words[0] for words in commands(cli.app)} == {
        "train", "sft", "generate", "chat", "tokenizer", "check", "plan", "doctor"
    }  # fmt: skip
    assert isinstance(cli.app, typer.Typer)


def test_help_does_not_wait_for_numerical_libraries():
    program = (
        "import sys\n"
        "from nanoeuler.cli import main\n"
        "assert main(['--help']) == 0\n"
        "slow = {'numpy', 'numba', 'llvmlite', 'matplotlib', 'safetensors', 'rich'}\n"
        "sys.exit(str(slow & set(sys.modules)) if slow & set(sys.modules) else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_default_data_is_the_embedded_corpus(nanoeuler, tmp_path, monkeypatch):
    (tmp_path / "docs.txt").write_text(STORY.read_text())
    pairs = [(pair["question"], pair["answer"]) for pair in PAIRS]
    monkeypatch.setattr(corpus, "text_path", lambda: tmp_path / "docs.txt")
    monkeypatch.setattr(corpus, "pairs", lambda: pairs)
    monkeypatch.chdir(tmp_path)
    assert cli.main(f"train {SMALL}".split()) == 0
    assert cli.main(f"sft {SMALL}".split()) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 3?\n"))
    assert cli.main(["chat"]) == 0  # with the defaults, each finds what the one before it made
    assert sorted(os.listdir("runs")) == ["base", "chat"]
