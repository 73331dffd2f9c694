"""The trainer: exact resume after any death, signals, numbers that are not finite, what it says."""

import contextlib
import gc
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from deaths import Died, dying_before, full_disk
from rich.console import Console

from nanoeuler.data.batches import Batches, Prepared
from nanoeuler.data.prepare import prepare
from nanoeuler.engines.choice import make_stepper
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import initialise
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import display, loop, run
from nanoeuler.training.blame import first_bad_tensor
from nanoeuler.training.folder import LOCK, alone, read_metrics, saves
from nanoeuler.training.optim import AdamW
from nanoeuler.training.run import Settings
from nanoeuler.training.saves import load
from nanoeuler.training.train import settings_for, train

RIVER = Path(__file__).parents[1] / "data" / "river.txt"
CONFIG = ModelConfig(
    vocab_size=280, dim=8, n_layers=2, n_heads=2, n_kv_heads=1, hidden=8, context=32, n_predict=2
)
STEPS = 12
SHORT = dict(steps=STEPS, batch_size=8, lr=0.01, seed=5)
HOW = dict(engine="reference", save_every=4)


def split(changes):
    """The settings among `changes`, and the rest."""
    names = {field.name for field in fields(Settings)} & set(changes)
    return {name: changes.pop(name) for name in names}, changes


def go(out, data=RIVER, config=CONFIG, **changes):
    """A new run."""
    settings, how = split(changes)
    return train(data, out, config=config, settings=Settings(**SHORT | settings), **HOW | how)


def resume(out, data=RIVER, **changes):
    """The run in `out`, further, as the command line resumes one."""
    settings, how = split(changes)
    chosen = settings_for(out, True, **settings) if settings else None
    return train(data, out, settings=chosen, resume=True, **HOW | how)


def again(out):
    """The run in `out`, further, or begun where no save was left: the same command, to resume."""
    return go(out, resume=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "straight"
    assert go(out).step == STEPS
    return out


def contents(out):
    """The bytes of all files of a run but its metrics, which hold times; and those, without."""
    found = {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }
    found["metrics.jsonl"] = [{**line, "seconds": 0} for line in read_metrics(out)]
    return found


def assert_same_run(out, straight):
    ours, theirs = contents(out), contents(straight)
    assert sorted(ours) == sorted(theirs)
    for name in theirs:
        assert ours[name] == theirs[name], name
    steps = [line["step"] for line in ours["metrics.jsonl"]]
    assert steps == list(range(1, len(steps) + 1))


def deaths(owner, name, first=1, stride=1):
    """Yield (a number of a call, a context in which the run dies before it), for ever."""
    for call in itertools.count(first, stride):
        yield call, dying_before(owner, name, call)


# What a run calls, and the first call and the stride of those that are tried until none is left.
@pytest.mark.parametrize(
    ("owner", "name", "first", "stride"),
    [(loop._Steps, "begin", 1, 4), (AdamW, "update", 1, 4), (os, "rename", 1, 1),
     (os, "fsync", 1, 6)],
)  # fmt: skip
def test_a_run_that_died_goes_on_to_the_same_bytes(owner, name, first, stride, straight, tmp_path):
    died = 0
    with mock.patch.object(loop, "plot"):  # a picture takes longer than the run
        for call, death in deaths(owner, name, first, stride):
            out = tmp_path / f"{call}"
            try:
                with death:
                    go(out)
                break
            except Died:
                died += 1
            assert again(out).step == STEPS
            shutil.copy(straight / "loss.png", out)
            assert_same_run(out, straight)
    assert died >= 3


def test_a_run_that_died_again_and_again(straight, tmp_path):
    with pytest.raises(Died), dying_before(loop._Steps, "begin", 2):
        go(tmp_path)
    for call in (3, 6, 5, 4, 2):
        with pytest.raises(Died), dying_before(loop._Steps, "begin", call):
            resume(tmp_path)
    resume(tmp_path)
    assert_same_run(tmp_path, straight)


# Marks written to a pipe say where the process is: import, text, first save, steps, metrics, saves,
# end. The disk is made a little slower, so that a save takes longer than the parent needs to kill.
SCRIPT = f"""
import os, sys, time
mark = lambda letter: os.write(int(sys.argv[1]), letter.encode())
mark("i")
from pathlib import Path
from nanoeuler.model.config import ModelConfig
from nanoeuler.training import loop
from nanoeuler.training.folder import is_begun
from nanoeuler.training.run import Settings
from nanoeuler.training.train import train

def marked(name, letter, wait=0.0):
    call = getattr(loop, name)
    def marking(*arguments):
        mark(letter)
        time.sleep(wait)
        result = call(*arguments)
        mark("t")
        return result
    setattr(loop, name, marking)

def slower(name, call):
    def slow(*arguments, **named):
        time.sleep(0.002)
        return call(*arguments, **named)
    setattr(os, name, slow)

for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
    slower(name, getattr(os, name))
marked("settle", "f"), marked("add_metrics", "m", 0.002), marked("save", "s"), marked("plot", "e")
mark("p")
out = Path(sys.argv[2])
train({str(RIVER)!r}, out, config={CONFIG!r}, settings=Settings(steps=60, batch_size=8, seed=5),
      engine="reference", save_every=2, resume=is_begun(out))
"""
PHASES = dict(i="import", p="preparing", f="first save", t="step", m="metrics", s="save", e="end")
# Where to aim in one life after another: a letter, how often to see it first, and within how many
# seconds of it the kill comes. Five runs are killed ten times each.
AIMS = [
    ("i", 1, 1.0), ("p", 1, 0.3), ("f", 1, 0.05), ("s", 1, 0.04), ("s", 2, 0.04), ("t", 4, 0.02),
    ("m", 3, 0.003), ("s", 3, 0.04), ("s", 5, 0.04), ("e", 1, 0.3),
]  # fmt: skip


def life(out, aim=None, rng=None):
    """One process that trains in `out`, killed where `aim` says; the marks it left, its stderr."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(write), str(out)], pass_fds=[write],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    os.close(write)
    letter, times, seconds = aim or ("", 0, 0.0)
    with os.fdopen(read, "rb", buffering=0) as pipe, process:
        marks = ""
        while piece := pipe.read(1):
            marks += piece.decode()
            if aim and marks[-1] == letter and marks.count(letter) == times:
                time.sleep(rng.random() * seconds)
                process.kill()
        said = process.stderr.read()
    return marks, said, process.returncode


def killed_ten_times(out, seed):
    """Kill a run where AIMS say, then let it end; the phases in which it was killed."""
    rng, phases = random.Random(seed), Counter()
    for aim in AIMS:
        marks, said, code = life(out, aim, rng)
        assert code == -signal.SIGKILL, (aim, code, said)
        phases[PHASES[marks[-1]]] += 1
    marks, said, code = life(out)
    assert code == 0, said
    return phases


def test_killed_at_fifty_random_moments(tmp_path, capsys):
    marks, said, code = life(tmp_path / "whole")
    assert code == 0, said
    assert (marks.count("s"), marks.count("m")) == (30, 60)
    with ThreadPoolExecutor(2) as pool:
        outs = [tmp_path / f"killed-{seed}" for seed in range(5)]
        phases = sum(pool.map(killed_ten_times, outs, range(5)), Counter())
    with capsys.disabled():
        print("\nkilled:", ", ".join(f"{count} in {name}" for name, count in phases.items()))
    assert phases.total() == 50
    # half of them are aimed there, and some of these come a little too late
    assert phases["save"] + phases["first save"] >= 5
    for out in outs:
        assert_same_run(out, tmp_path / "whole")


def signalled(step, *numbers):
    """Patch AdamW.update to send signals during `step`."""
    update = AdamW.update

    def patched(self, weights, gradients, lr, at):
        update(self, weights, gradients, lr, at)
        if at == step:
            for number in numbers:
                os.kill(os.getpid(), number)

    return mock.patch.object(AdamW, "update", patched)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(number, straight, tmp_path, capsys):
    before = signal.getsignal(number)
    with signalled(6, number):
        assert go(tmp_path).step == 6
    assert load(tmp_path).step == 6
    said = capsys.readouterr().err
    assert f"{signal.Signals(number).name}: step 6 of {STEPS} is saved in" in said
    assert "--resume" in said and (tmp_path / "loss.png").exists()
    assert signal.getsignal(number) is before
    resume(tmp_path)
    assert_same_run(tmp_path, straight)


def test_a_signal_in_the_last_step_ends_the_run(straight, tmp_path, capsys):
    with signalled(STEPS, signal.SIGTERM):
        assert go(tmp_path).step == STEPS
    assert "--resume" not in capsys.readouterr().err
    assert_same_run(tmp_path, straight)


def test_a_second_signal_is_not_held_back(tmp_path):
    with signalled(6, signal.SIGINT, signal.SIGINT), pytest.raises(KeyboardInterrupt):
        go(tmp_path)
    assert load(tmp_path).step == 4


def test_a_signal_to_the_process_itself(tmp_path):
    """As an operating system sends it: to a process that is training, which then leaves with 0."""
    for number in (signal.SIGINT, signal.SIGTERM):
        out, read = tmp_path / number.name, os.pipe()
        command = [sys.executable, "-c", SCRIPT, str(read[1]), str(out)]
        with subprocess.Popen(command, pass_fds=[read[1]], stderr=subprocess.PIPE) as process:
            os.close(read[1])
            with os.fdopen(read[0], "rb", buffering=0) as pipe:
                while pipe.read(1) not in (b"m", b""):
                    pass
                process.send_signal(number)
                while pipe.read(1):
                    pass
            said = process.stderr.read().decode()
        assert process.returncode == 0, said
        step = saves(out)[-1][0]
        assert 0 < step < 60 and f"{number.name}: step {step} of 60 is saved" in said


def test_a_full_disk_stops_the_run_and_leaves_the_save_before(straight, tmp_path):
    # the second rename is that of the save of step 4
    with full_disk("rename", 2), pytest.raises(UserError, match="step 4 .*the save of step 0 is"):
        go(tmp_path)
    assert load(tmp_path).step == 0
    assert resume(tmp_path).step == STEPS
    assert_same_run(tmp_path, straight)
    # replaced are files of the text's preparation, of the run's beginning, metrics and the picture
    for call in range(1, 20):
        out = tmp_path / f"{call}"
        with full_disk("replace", call) as count:
            try:
                go(out)
            except UserError as error:
                assert "No space left" in str(error) and "\n" not in str(error)
        if count[0] < call:
            break
        again = resume if saves(out) else go
        assert again(out).step == STEPS
        assert_same_run(out, straight)
    assert call > 6


@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_number_of_threads_does_not_matter(engine, accumulate, tmp_path):
    outs = [tmp_path / f"{threads}" for threads in (1, 2, 3)]
    for threads, out in enumerate(outs, 1):
        go(out, threads=threads, engine=engine, accumulate=accumulate, steps=4)
    for out in outs[1:]:
        assert_same_run(out, outs[0])


def test_a_batch_in_pieces_is_another_order_of_additions(straight, tmp_path):
    with mock.patch.object(loop, "make_stepper", wraps=make_stepper) as made:
        go(tmp_path, accumulate=2)
    assert made.call_args.kwargs["pieces"] == 2
    ours, theirs = read_metrics(tmp_path), read_metrics(straight)
    # the first step's loss, before any weight has moved: sums of a few hundred float32 numbers
    assert abs(ours[0]["loss"] - theirs[0]["loss"]) < 1e-5 * theirs[0]["loss"]
    # after 12 steps of AdamW, which divides small differences by small roots
    assert abs(ours[-1]["loss"] - theirs[-1]["loss"]) < 1e-2 * theirs[-1]["loss"]
    with pytest.raises(UserError, match="accumulate 2, but 1 was asked for"):
        resume(tmp_path, accumulate=1)
    with pytest.raises(UserError, match="accumulate to be at most batch_size 8, got 9"):
        go(tmp_path / "more", accumulate=9)


def test_what_may_change_from_one_life_to_the_next(straight, tmp_path):
    with pytest.raises(Died), dying_before(loop._Steps, "begin", 6):
        go(tmp_path, save_every=1, keep=5, threads=2)
    assert [step for step, _ in saves(tmp_path)] == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="keep to be a whole number above 0, got 0"):
        resume(tmp_path, keep=0)
    assert [step for step, _ in saves(tmp_path)] == [1, 2, 3, 4, 5]
    resume(tmp_path, keep=2, threads=1)
    assert_same_run(tmp_path, straight)


def test_another_program_is_told_and_no_obstacle(straight, tmp_path, capsys):
    with pytest.raises(Died), dying_before(loop._Steps, "begin", 6):
        go(tmp_path)
    capsys.readouterr()
    with mock.patch.object(loop, "program", lambda: {**run.program(), "numpy": "0.1"}):
        resume(tmp_path)
    told = capsys.readouterr().err.splitlines()[0]
    then = np.__version__
    assert told.startswith(f"step 4 of {tmp_path} was saved with numpy {then}, now 0.1: the run")
    assert load(tmp_path).program["numpy"] == "0.1"
    weights = f"step-{STEPS:08d}/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (straight / weights).read_bytes()
    resume(straight)
    assert "was saved with" not in capsys.readouterr().err


def test_another_engine_is_told(tmp_path, capsys):
    with pytest.raises(Died), dying_before(loop._Steps, "begin", 6):
        go(tmp_path, engine="auto")
    capsys.readouterr()
    with pytest.raises(Died), dying_before(loop._Steps, "begin", 1):
        resume(tmp_path)
    assert "step 4 of" in (told := capsys.readouterr().err) and "engine cpu, now reference" in told
    with pytest.raises(Died), dying_before(loop._Steps, "begin", 1):
        resume(tmp_path, engine="cpu")  # what "auto" stood for
    assert "engine" not in capsys.readouterr().err


def test_a_directory_is_trained_in_by_one_program_at_a_time(straight, tmp_path):
    out = shutil.copytree(straight, tmp_path / "run")
    before = contents(out)
    with alone(out), pytest.raises(UserError, match="another program trains there now"):
        resume(out)
    with alone(tmp_path / "new"), pytest.raises(UserError, match="another program trains there"):
        go(tmp_path / "new")
    late = load(out)  # read before the lock was taken; then another went on
    late.step = 8
    with pytest.raises(UserError, match="to be of step 8, but another program has written step 12"):
        loop.fit(out, late, None, None)
    assert contents(out) == before


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_stops_and_leaves_the_last_save(value, accumulate, tmp_path):
    clip, calls = AdamW.clip, [0]

    def bad(self, gradients):
        calls[0] += 1
        if calls[0] == 6:
            gradients["block.0.wo"][1, 1] = value
        return clip(self, gradients)

    words = r"step 6: .* norm of (nan|inf); the first bad tensor is none that the reference engine"
    with mock.patch.object(AdamW, "clip", bad), pytest.raises(UserError, match=words):
        go(tmp_path, accumulate=accumulate)
    stopped = load(tmp_path)
    assert stopped.step == 4 and np.isfinite(stopped.weights.flat).all()
    assert len(read_metrics(tmp_path)) == 5


GPT2 = dict(norm="layer", position="learned", mlp="gelu", bias=True)


@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize(
    ("changes", "name", "value", "words"),
    [
        ({}, "embedding", 1e38, "what rmsnorm makes with block.0.norm1"),
        ({}, "block.0.w_up", 1e38, "what swiglu makes after block.0.w_up"),
        ({}, "output", 3e38, "what linear makes with output"),
        (GPT2, "positions", 3e38, "what layernorm makes with block.0.norm1"),
        (GPT2, "block.1.norm2_bias", 3e38, "what layernorm makes with norm"),
        (GPT2, "block.0.w_up_bias", 3e38, "what layernorm makes with block.1.norm1"),
        (GPT2, "block.0.wqkv_bias", 3e38, "what attention makes after block.0.wqkv"),
        (dict(n_predict=1, tied=True), "norm", 3e38, "what rmsnorm makes with norm"),
        (dict(integrator="heun"), "block.1.wo", 3e38, "what rmsnorm makes with block.1.norm1"),
        (dict(repeat=2), "block.0.w_down", 3e38, "what rmsnorm makes with block.0.norm1"),
    ],
)
def test_the_first_bad_tensor_is_named(changes, name, value, words, row):
    config = replace(CONFIG, **changes)
    weights = initialise(config, 0)
    used = np.s_[7] if name == "embedding" else np.s_[8] if name == "positions" else ...
    weights[name][used] = value
    tokens = np.full((3, 9), 6, np.int32)
    tokens[:, ::2] = 9
    targets = np.full((3, 9, config.n_predict), IGNORE, np.int32)
    targets[:, :8, 0] = 1
    if name == "embedding":
        tokens[row, 4] = 7  # only this sequence meets the bad row
    expected = row + 1 if name == "embedding" else 1
    blamed = first_bad_tensor(weights, tokens, targets)
    assert blamed == f"{words}, in sequence {expected} of the batch"


@pytest.mark.parametrize("changes", [{}, GPT2, dict(n_predict=1, tied=True)])
def test_a_bad_weight_is_named_whichever_it_is(changes):
    clean = initialise(replace(CONFIG, **changes), 0)
    tokens = np.full((1, 4), 6, np.int32)
    targets = np.full((1, 4, clean.config.n_predict), 1, np.int32)
    for name in clean:
        weights = initialise(clean.config, 0)
        weights[name].reshape(-1)[-1] = np.nan
        assert first_bad_tensor(weights, tokens, targets) == f"the weight {name}"


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_run_that_diverges_for_real(tmp_path):
    """All of GPT-2's choices, at a learning rate that no weight survives."""
    config = replace(CONFIG, **GPT2)
    with pytest.raises(UserError, match=r"step \d+: .*first bad tensor is .*; the last") as caught:
        go(tmp_path, config=config, lr=1e30, accumulate=2)
    assert "\n" not in str(caught.value)
    assert np.isfinite(load(tmp_path).weights.flat).all()


def test_what_is_refused(straight, tmp_path):
    other = tmp_path / "other.txt"
    other.write_bytes(RIVER.read_bytes() + b" ")
    brief = tmp_path / "brief.txt"
    brief.write_text("Too short.")
    for call, words in (
        (lambda: go(straight), "to hold no run yet"),
        (lambda: resume(straight, steps=13), "steps 12, but 13 was asked for"),
        (lambda: resume(straight, lr=0.02), "lr 0.01, but 0.02"),
        (lambda: resume(straight, batch_size=5), "batch_size 8, but 5"),
        (lambda: resume(straight, seed=0), "seed 5, but 0"),
        (lambda: resume(straight, data=other), "with data"),
        (lambda: resume(tmp_path / "nothing"), "expected a run in .*nothing, but there is none"),
        (lambda: go(tmp_path / "e", keep=0), "keep to be a whole number above 0, got 0"),
        (lambda: go(tmp_path / "f", save_every=0), "save_every to be a whole number above 0"),
        (lambda: go(tmp_path / "f", save_every=None), "save_every .* got None"),
        (lambda: go(tmp_path / "f", threads=-1), "threads to be .* got -1"),
        (lambda: go(tmp_path / "f", steps=10**400), "steps to be a whole number"),
        (lambda: go(tmp_path / "a", engine="abacus"), "abacus"),
        (lambda: go(tmp_path / "b", steps=0), "steps"),
        (lambda: go(tmp_path / "c", data=brief), "more"),
        (lambda: go(tmp_path / "d", data=tmp_path / "absent"), "No such file"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
    larger = ModelConfig(**{**CONFIG.__dict__, "n_layers": 3})
    with pytest.raises(UserError, match="with n_layers 2, but 3 was asked for"):
        train(RIVER, straight, config=larger, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["brief.txt", "other.txt"]


def test_a_tokenizer_that_exists_is_used_and_kept(tmp_path):
    text = RIVER.read_bytes()[:5000]  # whose merges are not those of the whole
    given, other = Tokenizer.train(text, 290), Tokenizer.train(text, 280)
    run = go(tmp_path / "given", tokenizer=given)
    assert run.config == replace(CONFIG, vocab_size=290)
    assert run.weights["embedding"].shape[0] == 290
    assert (tmp_path / "given" / "tokenizer.json").read_text() == given.json
    assert load(tmp_path / "given").tokenizer.hash == given.hash

    with mock.patch.object(Tokenizer, "train", None):  # learning one is not reached
        with pytest.raises(Died), dying_before(loop._Steps, "begin", 7):
            go(tmp_path / "died", tokenizer=given)
        assert resume(tmp_path / "died", tokenizer=given).step == STEPS
        assert_same_run(tmp_path / "died", tmp_path / "given")
        assert resume(tmp_path / "died").step == STEPS
        assert go(tmp_path / "died", tokenizer=given, resume=True).step == STEPS
    with pytest.raises(UserError, match=f"with tokenizer {given.hash}, but {other.hash}"):
        resume(tmp_path / "died", tokenizer=other)


def documents(folder):
    """The text as a prepared folder of many documents."""
    lines = [line for line in RIVER.read_text().splitlines() if line]
    prepare(lambda: lines, folder, vocab_size=280, source="river")
    return folder


def test_a_prepared_folder_serves_several_runs(straight, tmp_path):
    folder = documents(tmp_path / "docs")
    before = contents(folder)
    for name in ("a", "b"):
        run = go(tmp_path / name, data=folder)
        assert run.step == STEPS and run.data == Prepared(folder).digest
        assert not (tmp_path / name / "data").exists()
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert contents(folder) == before
    assert resume(tmp_path / "a", data=folder).step == STEPS
    large = replace(CONFIG, vocab_size=999)  # the folder's tokenizer says how many there are
    assert go(tmp_path / "c", data=folder, config=large).config == CONFIG
    with pytest.raises(UserError, match="with data"):
        resume(straight, data=folder)
    with pytest.raises(UserError, match="with data"):
        resume(tmp_path / "a")
    other = Tokenizer.train(RIVER.read_bytes()[:5000], 270)
    with pytest.raises(UserError, match="prepare the text again, with .*tokenizer.json"):
        go(tmp_path / "d", data=folder, tokenizer=other)
    assert not (tmp_path / "d").exists()


def test_tokens_that_are_gone_or_others_are_refused(straight, tmp_path):
    for name, change in (("gone", None), ("others", documents)):
        out = shutil.copytree(straight, tmp_path / name)
        shutil.rmtree(out / "data")
        if change:
            change(out / "data")
        with pytest.raises(UserError, match="prepare") as caught:
            resume(out)
        assert "\n" not in str(caught.value)


def test_no_thread_stays_behind(tmp_path):
    before = set(threading.enumerate())
    go(tmp_path, threads=2, steps=2)
    for _ in range(100):  # the batch after the last is still being prepared, for milliseconds
        gc.collect()  # a pool of threads ends with its stepper
        left = set(threading.enumerate()) - before
        if not left:
            break
        time.sleep(0.02)
    assert not left, left


def test_a_finished_run_is_resumed_to_nothing_but_its_sample(straight, capsys):
    before = contents(straight)
    assert resume(straight, sample=lambda *_: "Once upon").step == STEPS
    assert capsys.readouterr().err == "Once upon\n"
    assert contents(straight) == before


def test_samples_are_made_by_the_caller_on_the_way_and_at_the_end(straight, tmp_path, capsys):
    asked = []

    def sample(config, tokenizer, weights):
        assert config == CONFIG and tokenizer.vocab_size == 280
        asked.append(float(weights.flat.sum()))
        # rich markup is not for samples
        return f"[bold]{asked[-1]:.6f}[/bold]\n{'long ' * 100}end"

    run = go(tmp_path, sample=sample)
    told = capsys.readouterr().err
    assert told.endswith(f"[bold]{float(run.weights.flat.sum()):.6f}[/bold]\n{'long ' * 100}end\n")
    assert len(asked) == 4 and told.count("it says: [bold]") == 3
    lines = {line["step"]: line["sample"] for line in read_metrics(tmp_path) if "sample" in line}
    assert list(lines) == [3, 6, 9]  # a quarter, half, three quarters
    for text, total in zip(lines.values(), asked, strict=False):
        assert text == f"[bold]{total:.6f}[/bold]\n{'long ' * 100}end"
    short = [line for line in told.splitlines() if "it says" in line]
    assert all(len(line) <= len("  it says: ") + display.SAMPLE_SHOWN for line in short)
    for name in ("model.safetensors", "optimizer.safetensors"):  # and they change nothing
        ours, theirs = (saves(out)[-1][1] / name for out in (tmp_path, straight))
        assert ours.read_bytes() == theirs.read_bytes()


def test_before_is_told_of_the_run_once(tmp_path):
    seen = []

    def before(run, seconds_per_step):
        assert 0 < seconds_per_step < 60
        seen.append((run.step, [at for at, _ in saves(tmp_path)]))

    go(tmp_path, before=before)
    resume(tmp_path, before=before)  # no step is left
    assert seen == [(0, [0])]
    with pytest.raises(UserError):
        go(tmp_path, before=before)
    assert len(seen) == 1


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys):
    go(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == STEPS  # a validation every step, when a run has fewer steps than 20
    line = r"step \d+/12  loss \d\.\d{3}  \d+\.\d{3} bits/byte  [\d,]+ tokens/s  \d+ s left"
    assert all(re.fullmatch(line, text) for text in lines), lines


def test_a_reader_who_has_gone_does_not_end_the_run(tmp_path, monkeypatch):
    """As with `nanoeuler train 2>&1 | head -1`: the steps go on, unseen."""
    end, ours = os.pipe()
    os.close(end)
    gone = open(ours, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", gone)
    try:
        assert go(tmp_path).step == STEPS
    finally:
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            gone.close()
    assert load(tmp_path).step == STEPS


def test_a_live_line_on_a_terminal(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with mock.patch.object(display, "_Console", lambda **_: console):
        go(tmp_path)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    assert "step 12/12" in shown and "bits/byte" in shown and "tokens/s" in shown
    assert "s left" not in shown  # no plain lines


def test_the_picture_the_metrics_and_the_cursor(straight):
    assert (straight / "loss.png").read_bytes().startswith(b"\x89PNG")
    lines = read_metrics(straight)
    assert all(line["tokens"] == 256 and line["seconds"] > 0 for line in lines)
    assert lines[-1]["bits_per_byte"] < lines[0]["bits_per_byte"] < 8.5
    folders = [f"step-{step:08d}" for step in (8, 12)]
    assert sorted(os.listdir(straight)) == sorted(
        [LOCK, "config.json", "data", "loss.png", "metrics.jsonl", "tokenizer.json", *folders]
    )
    state = json.loads((straight / folders[-1] / "state.json").read_text())
    windows = Batches(Prepared(straight / "data").train, 8, 32, 2, 5).windows
    assert state["pass"] * windows + state["window"] == state["windows_read"] == 12 * 8
