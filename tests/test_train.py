"""The trainer: exact resume after any death, signals, numbers that are not finite, what it says."""

import contextlib
import errno
import gc
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lives
import numpy as np
import pytest
import sketches
from deaths import Died, dying_before, full_disk
from lives import CONFIG, RIVER
from matplotlib.figure import Figure
from tiers import kept, thinned

from nanoeuler.data.batches import Batches
from nanoeuler.data.dataset import Prepared
from nanoeuler.data.prepare import prepare
from nanoeuler.engines.cpu.stepper import CpuStepper
from nanoeuler.engines.registry import make_stepper
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import initialise
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import anomaly, display, loop, run, throughput
from nanoeuler.training import train as training
from nanoeuler.training.anomaly import first_bad_tensor
from nanoeuler.training.checkpoint import Request, load, read_origin
from nanoeuler.training.folder import LOCK, REQUEST, checkpoints, locked, read_metrics
from nanoeuler.training.muon import Muon
from nanoeuler.training.optim import LEARNING_RATE, AdamW, learning_rate
from nanoeuler.training.run import Run, Settings
from nanoeuler.training.train import open_run, settings_for, train

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


def again(out, **changes):
    """The run in `out`, further, or begun where no save was left: the same command, to resume."""
    return go(out, resume=True, **changes)


@pytest.fixture(scope="module", autouse=True)
def drawn():
    with sketches.drawn():
        yield


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
    kept([(loop._Steps, "begin", 1, 4), (AdamW, "update", 1, 4), (os, "rename", 1, 2),
          (os, "rename", 2, 2), (os, "fsync", 1, 12), (os, "fsync", 7, 12)],
         (loop._Steps, "begin", 1, 4), (os, "rename", 1, 2), (os, "fsync", 1, 12)),
)  # fmt: skip
def test_a_run_that_died_goes_on_to_the_same_bytes(owner, name, first, stride, straight, tmp_path):
    died = 0
    for call, death in deaths(owner, name, first, stride):
        out = tmp_path / f"{call}"
        try:
            with death:
                go(out)
            break
        except Died:
            died += 1
        assert again(out).step == STEPS
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


PHASES = dict(p="preparing", f="first save", t="step", m="metrics", s="save", e="end")
# Where to aim in one life after another: a letter, how often to see it first, and within how many
# seconds of it the kill comes.
AIMS = [
    ("p", 1, 0.1), ("p", 1, 0.2), ("f", 1, 0.05), ("s", 1, 0.04), ("s", 2, 0.04), ("t", 4, 0.02),
    ("m", 3, 0.003), ("s", 3, 0.04), ("s", 5, 0.04), ("e", 1, 0.2),
]  # fmt: skip
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["warm_lives", "pytest"])  # what is slow is imported once
# To start a process is to ask the others how they ended; who waits for one then gets no answer.
ALONE = threading.Lock()


def life(out, aim=None, rng=None):
    """One process that trains in `out`, killed where `aim` says; the marks it left, its stderr."""
    said = out.with_name(f"{out.name}.stderr")
    said.unlink(missing_ok=True)
    pipe, theirs = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=lives.live, args=(out, theirs, said))
    with ALONE:
        process.start()
    theirs.close()
    (letter, times, seconds), marks = aim or ("", 0, 0.0), ""
    while piece := os.read(pipe.fileno(), 1):
        marks += piece.decode()
        if aim and marks[-1] == letter and marks.count(letter) == times:
            time.sleep(rng.random() * seconds)
            process.kill()
    with ALONE:  # it has closed its pipe, and ends
        process.join()
    return marks, said.read_text(), process.exitcode


def killed_again_and_again(out, seed, aims):
    """Kill a run where `aims` say, then let it end; the phases in which it was killed."""
    rng, phases = random.Random(seed), Counter()
    for aim in aims:
        marks, said, code = life(out, aim, rng)
        assert code == -signal.SIGKILL, (aim, code, said)
        phases[PHASES[marks[-1]]] += 1
    marks, said, code = life(out)
    assert code == 0, said
    return phases


# Six moments of one run, or ten of each of three. Half of thirty are aimed at saves, and some of
# these come a little too late.
@pytest.mark.parametrize(("runs", "aims", "saves"), [
    pytest.param(1, AIMS[:1] + AIMS[2:4] + AIMS[5:8], 0, id="six"),
    pytest.param(3, AIMS, 3, id="thirty", marks=pytest.mark.long),
])  # fmt: skip
def test_killed_at_random_moments(runs, aims, saves, tmp_path, capsys):
    marks, said, code = life(tmp_path / "whole")
    assert code == 0, said
    assert (marks.count("s"), marks.count("m")) == (lives.STEPS // lives.SAVE_EVERY, lives.STEPS)
    with ThreadPoolExecutor(2) as pool:
        outs = [tmp_path / f"killed-{seed}" for seed in range(runs)]
        kill = partial(killed_again_and_again, aims=aims)
        phases = sum(pool.map(kill, outs, range(runs)), Counter())
    with capsys.disabled():
        print("\nkilled:", ", ".join(f"{count} in {name}" for name, count in phases.items()))
    assert phases.total() == runs * len(aims)
    assert phases["save"] + phases["first save"] >= saves
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


@pytest.mark.parametrize("number", kept([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_signal_to_the_process_itself(number, tmp_path):
    """As an operating system sends it: to a process that is training, which then leaves with 0."""
    program = "import sys, lives, types; lives.live(lives.Path(sys.argv[1]), types.SimpleNamespace("
    program += "fileno=lambda: 1), sys.argv[2])"
    helpers = [str(Path(lives.__file__).parent), str(Path(lives.__file__).parents[2])]
    out, said = tmp_path / number.name, tmp_path / f"{number.name}.stderr"
    command = [sys.executable, "-c", program, str(out), str(said)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(helpers)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=env) as process:
        while process.stdout.read(1) not in (b"m", b""):
            pass
        process.send_signal(number)
        process.stdout.read()
    assert process.returncode == 0, said.read_text()
    step = checkpoints(out)[-1][0]
    assert 0 < step < lives.STEPS
    assert f"{number.name}: step {step} of {lives.STEPS} is saved" in said.read_text()


@pytest.mark.parametrize("first", thinned([1, 2, 3]))
def test_a_full_disk_stops_the_run_and_leaves_the_save_before(first, straight, tmp_path):
    # a rename is that of a best model, the next one that of its save
    with full_disk("rename", 2), pytest.raises(UserError, match="step 4 .*nothing was saved yet"):
        go(tmp_path)
    assert not checkpoints(tmp_path) and len(read_metrics(tmp_path)) == 4
    with full_disk("rename", 4), pytest.raises(UserError, match="step 8 .*the save of step 4 is"):
        go(tmp_path)
    assert load(tmp_path).step == 4
    assert resume(tmp_path).step == STEPS
    assert_same_run(tmp_path, straight)
    # replaced are files of the text's preparation, of the run's beginning, metrics and the picture
    for call in range(first, 20, 3):
        out = tmp_path / f"{call}"
        with full_disk("replace", call) as count:
            try:
                go(out)
            except UserError as error:
                assert "No space left" in str(error) and "\n" not in str(error)
        if count[0] < call:
            break
        again = resume if checkpoints(out) else go
        assert again(out).step == STEPS
        assert_same_run(out, straight)
    assert call > 6


@pytest.mark.parametrize(
    ("accumulate", "engine"),
    kept(itertools.product([1, 2], ["reference", "cpu"]), (1, "reference"), (2, "cpu")),
)
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
    assert [step for step, _ in checkpoints(tmp_path)] == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="keep to be a whole number above 0, got 0"):
        resume(tmp_path, keep=0)
    assert [step for step, _ in checkpoints(tmp_path)] == [1, 2, 3, 4, 5]
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
    with locked(out), pytest.raises(UserError, match="another program trains there now"):
        resume(out)
    with locked(tmp_path / "new"), pytest.raises(UserError, match="another program trains there"):
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
    assert not checkpoints(tmp_path)


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
        (lambda: go(tmp_path / "f", save_every=True), "save_every .* got True"),
        (lambda: go(tmp_path / "f", keep=None), "keep .* got None"),
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
        ours, theirs = (checkpoints(out)[-1][1] / name for out in (tmp_path, straight))
        assert ours.read_bytes() == theirs.read_bytes()


def test_the_pace_is_told_once_after_ten_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "LONG_ENOUGH", math.inf)  # as in `fits`
    seen = []

    def on_estimate(run, seconds_per_step):
        assert (seconds_per_step is None) == (run.step == 0)
        assert seconds_per_step is None or 0 < seconds_per_step < 60
        seen.append((run.step, [at for at, _ in checkpoints(tmp_path)]))

    go(tmp_path, on_estimate=on_estimate)
    resume(tmp_path, on_estimate=on_estimate)  # no step is left
    assert seen == [(0, []), (1 + throughput.MOST, [4, 8])]
    with pytest.raises(UserError):
        go(tmp_path, on_estimate=on_estimate)
    assert len(seen) == 2


@pytest.mark.parametrize("how", [dict(steps=11), dict(steps=40), dict(steps=None, minutes=0.003)])
def test_a_run_takes_the_steps_that_were_asked_for_and_no_others(how, tmp_path, monkeypatch):
    """None of them on another model, or by another stepper, to find out how long they take."""
    taken, made, step = [], [], CpuStepper.step

    def counted(self, tokens, targets, lr, number, *first):
        taken.append(number)
        return step(self, tokens, targets, lr, number, *first)

    def making(*arguments, **named):
        made.append(make_stepper(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(CpuStepper, "step", counted)
    monkeypatch.setattr(loop, "make_stepper", making)
    ended = go(tmp_path, on_estimate=lambda *_: None, save_every=None, **how)
    assert taken == [*range(1, ended.settings.steps + 1)] and len(made) == 1
    assert ended.settings.steps == (how["steps"] or ended.step)


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys):
    go(tmp_path)
    passes, *lines = capsys.readouterr().err.splitlines()
    assert passes == "the run makes 0.299 passes over its data"
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


def test_a_live_line_on_a_terminal(tmp_path, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "120")
    go(tmp_path)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    assert "step 12/12" in shown and "bits/byte" in shown and "tokens/s" in shown
    assert "s left" not in shown  # no plain lines


def test_the_picture_the_metrics_and_the_cursor(straight, tmp_path):
    out = shutil.copytree(straight, tmp_path / "run")
    with mock.patch.object(loop, "plot", display.plot):  # as everywhere else
        resume(out)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    lines = read_metrics(straight)
    assert all(line["tokens"] == 256 and line["seconds"] > 0 for line in lines)
    assert lines[-1]["bits_per_byte"] < lines[0]["bits_per_byte"] < 8.5
    folders = [f"step-{step:08d}" for step in (8, 12)]
    assert sorted(os.listdir(straight)) == sorted(
        [
            LOCK,
            "best",
            "config.json",
            "data",
            "loss.png",
            "metrics.jsonl",
            "tokenizer.json",
            *folders,
        ]
    )
    state = json.loads((straight / folders[-1] / "state.json").read_text())
    windows = Batches(Prepared(straight / "data").train, 8, 32, 2, 5).windows
    assert state["pass"] * windows + state["window"] == state["windows_read"] == 12 * 8


def test_every_setting_reaches_the_weights(tmp_path):
    """The run is a loop of ten lines with the settings, every one of them unlike its default."""
    chosen = Settings(steps=9, batch_size=6, accumulate=2, lr=0.03, seed=4, warmup=0,
                      weight_decay=0.9, beta2=0.9, clip=0.05, optimizer="muon",
                      momentum=0.8, recompute=True)  # fmt: skip
    default = Settings()
    for field in fields(Settings):
        if field.name != "minutes":  # which decides nothing where steps are given
            assert getattr(chosen, field.name) != getattr(default, field.name)
    ended = train(RIVER, tmp_path / "run", config=CONFIG, settings=chosen, engine="reference")
    tokens = Prepared(tmp_path / "run" / "data").train
    batches, w = Batches(tokens, 6, CONFIG.context, CONFIG.n_predict, 4), initialise(CONFIG, 4)
    optimizer = Muon(w, beta2=0.9, weight_decay=0.9, clip_norm=0.05)
    optimizer.momentum = 0.8
    stepper = make_stepper("reference", w, optimizer, pieces=2)
    for number in range(1, 10):
        lr = learning_rate(number, 9, 0.03, warmup=0)
        (taken,) = stepper.step(*batches.batch(number), lr, number)
        assert taken.norm > 0.05  # so that the limit matters
    assert np.array_equal(ended.weights.flat, w.flat)


def test_a_resumed_run_may_recompute(tmp_path):
    """It changes no bit, and another card may have less memory."""
    out, asked = tmp_path / "run", Settings(steps=4, batch_size=4)
    held = train(RIVER, out, config=CONFIG, settings=asked, engine="reference")
    again = settings_for(out, True, recompute=True)
    ended = train(None, out, settings=again, resume=True, engine="reference")
    assert ended.settings == replace(held.settings, recompute=True)
    died = tmp_path / "died"
    with open_run(died, partial(Run.begin, CONFIG, asked, held.tokenizer, "1"),
                  Request(CONFIG, asked, held.tokenizer, "1", None)):  # fmt: skip
        pass
    with open_run(died, partial(Run.begin, CONFIG, asked, held.tokenizer, "1"),
                  Request(CONFIG, replace(asked, recompute=True), held.tokenizer, "1", None),
                  resume=True) as begun:  # fmt: skip
        assert begun.settings.recompute


def test_warmup_is_the_settings_own(tmp_path):
    steep, flat = ([line["lr"] for line in read_metrics(go_few(tmp_path / f"{warmup}", warmup))]
                   for warmup in (2, 0))  # fmt: skip
    assert steep == [learning_rate(n, 20, 0.01, 2) for n in range(1, 21)]
    assert flat == [learning_rate(n, 20, 0.01, 0) for n in range(1, 21)]
    assert steep[0] == 0.005 and flat[0] > 0.0099


def go_few(out, warmup):
    go(out, steps=20, warmup=warmup, save_every=100)
    return out


class Judge:
    """A held-out text that notes how it was asked."""

    def __init__(self):
        self.quick, self.bytes_per_token, self.baselines = [], 2.0, {"unigram": 3.0}
        self.inputs = self.targets = np.zeros((8, 32), int)

    def bits_per_byte(self, loss, quick=False):
        self.quick.append(quick)
        return 4.0


class Answers:
    """Batches of which most targets are not counted, as those of questions and answers."""

    windows = 8

    def batch(self, number):
        tokens = np.random.default_rng(number).integers(280, size=(8, 32)).astype(np.int32)
        targets = np.full((8, 32, 2), IGNORE, np.int32)
        targets[:, 20:, 0] = 7
        return tokens, targets


def fresh(steps):
    tokenizer = Tokenizer.train(RIVER.read_bytes(), 280)
    return run.Run.begin(CONFIG, Settings(steps=steps, batch_size=8), tokenizer, "digest")


def test_only_the_last_validation_is_of_all_the_text(tmp_path):
    judge = Judge()
    with locked(tmp_path):
        loop.fit(tmp_path, fresh(41), Answers(), judge, engine="reference")
    steps = [line["step"] for line in read_metrics(tmp_path) if "bits_per_byte" in line]
    assert steps == [*range(3, 41, 3), 41]  # at most twenty
    assert judge.quick == [True] * len(steps) + [False]


def test_the_logged_loss_is_a_mean_over_the_counted_targets(tmp_path):
    begun = fresh(1)
    x, y = Answers().batch(1)
    stepper = make_stepper("reference", initialise(CONFIG, 0), AdamW(begun.weights))
    with locked(tmp_path):
        loop.fit(tmp_path, begun, Answers(), Judge(), engine="reference")
    (line,) = read_metrics(tmp_path)
    assert math.isclose(line["loss"], stepper.sums(x, y)[0] / (8 * 12), rel_tol=1e-6)
    # of a model that knows nothing, whatever share of the positions counts
    assert abs(line["loss"] - math.log(280)) < 0.2


def test_the_speed_shown_is_that_of_the_metrics(tmp_path, capsys):
    shown = display.Display(0)
    shown.reach(1000)
    begun = fresh(1000)
    for step, seconds in enumerate((9.0, 0.5, 0.5, 0.25, 0.5), 1):
        shown.show(begun, {"step": step, "loss": 1.0, "seconds": seconds, "tokens": 256,
                           "bits_per_byte": 2.0})  # fmt: skip
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "step 5/1000  loss 1.000  2.000 bits/byte  512 tokens/s  498 s left"
    go(tmp_path)
    slow = AdamW.update

    def slower(self, *arguments):
        time.sleep(0.05)
        slow(self, *arguments)

    with mock.patch.object(AdamW, "update", slower):
        go(tmp_path / "slow")
    assert min(line["seconds"] for line in read_metrics(tmp_path / "slow")) >= 0.05
    assert min(line["seconds"] for line in read_metrics(tmp_path)) < 0.05


def test_the_picture_is_of_the_metrics(tmp_path):
    lines = [{"step": step, "loss": 6 / step, "tokens": 1, "seconds": 1.0} for step in range(1, 9)]
    lines[3]["bits_per_byte"], lines[7]["bits_per_byte"] = 4.0, 3.5
    axes = Figure().subplots()
    display.draw(axes, lines, 2.0, {"unigram": 3.0})
    losses, judged, landmark = axes.lines
    np.testing.assert_allclose(losses.get_ydata(), [6 / s / math.log(2) / 2 for s in range(1, 9)])
    assert list(judged.get_xdata()) == [4, 8] and list(judged.get_ydata()) == [4.0, 3.5]
    assert list(landmark.get_ydata()) == [3.0, 3.0] and "3.50 bits" in axes.get_title()
    pictures = set()
    for name, many in (("few", lines[:4]), ("all", lines), ("again", lines)):
        for line in many:
            add_metrics_to(tmp_path / name, line)
        display.plot(tmp_path / name, Judge())
        pictures.add((tmp_path / name / "loss.png").read_bytes())
    assert len(pictures) == 2  # the same for the same metrics, and another for others


def add_metrics_to(out, line):
    out.mkdir(exist_ok=True)
    loop.add_metrics(out, line)


def test_each_step_is_told_when_its_metrics_are_written(tmp_path):
    lines = []

    def on_step(line):
        assert read_metrics(tmp_path)[-1] == line
        lines.append(line)

    go(tmp_path, on_step=on_step)
    assert lines == read_metrics(tmp_path) and len(lines) == STEPS


# What a device does that works ahead of us: a step is known when the one after it has begun.
class Late:
    """The stepper of the processor, whose steps become known one late."""

    def __init__(self, *arguments, **named):
        self.stepper, self.open = make_stepper(*arguments, **named), []
        self.step_of, self.sums = self.stepper.step, self.stepper.sums

    def step(self, tokens, targets, lr, number):
        self.open += self.step_of(tokens, targets, lr, number)
        known, self.open = self.open[:-1], self.open[-1:]
        return known

    def finish(self):
        known, self.open = self.open, []
        return known

    def pull(self):
        assert not self.open, "a step is on its way"


def test_a_stepper_that_works_ahead_makes_the_same_run(straight, tmp_path):
    with mock.patch.object(loop, "make_stepper", Late):
        go(tmp_path, sample=lambda *_: "text")
    weights = f"step-{STEPS:08d}/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (straight / weights).read_bytes()
    for ours, theirs in zip(read_metrics(tmp_path), read_metrics(straight), strict=True):
        left = {name: value for name, value in ours.items() if name not in ("seconds", "sample")}
        assert left == {name: value for name, value in theirs.items() if name != "seconds"}


def test_a_signal_to_a_stepper_that_works_ahead_loses_nothing(straight, tmp_path):
    def stop(line):
        if line["step"] == 5:
            signal.raise_signal(signal.SIGTERM)

    with mock.patch.object(loop, "make_stepper", Late):
        stopped = go(tmp_path, on_step=stop)
        assert 5 < stopped.step < STEPS and checkpoints(tmp_path)[-1][0] == stopped.step
        assert [line["step"] for line in read_metrics(tmp_path)] == [*range(1, stopped.step + 1)]
        resume(tmp_path)
    weights = f"step-{STEPS:08d}/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (straight / weights).read_bytes()


def moments(cost, until):
    """When, in seconds, saves that take `cost` each are written by the clock, after the first."""
    now, at = [100.0], []
    with mock.patch.object(loop, "time", mock.Mock(perf_counter=lambda: now[0])):
        saving = loop.Saving(None)
        while now[0] < 100 + until:
            if not at or saving.due(len(at)):
                at.append(now[0] - 100)
                with saving.timed():
                    now[0] += cost
            now[0] += 0.25
    return at[1:]


def test_saves_by_the_clock(tmp_path):
    # at first after 12 s, and after as long again; each minute later
    assert np.allclose(moments(0.0, 300), [12, 24, 48, 96, 156, 216, 276], atol=2)
    for cost in (0.0, 0.1, 1.2, 3.0, 40.0):
        at = moments(cost, 40_000)
        assert at[0] <= 1 + cost + max(loop.FIRST_SECONDS, cost)
        begins = np.array([0, *at]) + cost  # of the training that a death before the next loses
        loses = np.diff([0, *at, 40_000]) - cost
        allowed = np.maximum(loop.SAVE_SECONDS, cost / loop.SAVE_SHARE)
        assert (loses <= np.minimum(np.maximum(12, begins), allowed) + 1).all()
        for count, moment in enumerate(at, 1):  # the share, and six more
            assert (count - 6) * cost <= loop.SAVE_SHARE * moment
    assert [number for number in range(1, 10) if loop.Saving(3).due(number)] == [3, 6, 9]
    go(tmp_path / "short", save_every=None, keep=99)
    assert [step for step, _ in checkpoints(tmp_path / "short")] == [STEPS]
    with mock.patch.multiple(loop, FIRST_SECONDS=0.0, SAVE_SECONDS=0.0, SAVE_SHARE=1e9):
        go(tmp_path / "slow", save_every=None, keep=99)
    assert [step for step, _ in checkpoints(tmp_path / "slow")] == [*range(1, STEPS + 1)]


@pytest.mark.parametrize("moment", kept([1, 2, 5, 9], 2, 9))
def test_a_clock_that_goes_as_it_likes_changes_no_byte(moment, straight, tmp_path):
    """Whatever saves it has written, and wherever it died and went on."""
    rng = random.Random(moment)
    with mock.patch.object(loop.Saving, "due", lambda *_: rng.random() < 0.3):
        with pytest.raises(Died), dying_before(loop._Steps, "begin", moment):
            go(tmp_path, save_every=None)
        resume(tmp_path, save_every=None)
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (checkpoints(out)[-1][1] / name for out in (tmp_path, straight))
        assert ours.read_bytes() == theirs.read_bytes()
    assert contents(tmp_path)["metrics.jsonl"] == contents(straight)["metrics.jsonl"]


def test_looking_for_what_is_not_finite_ends(monkeypatch):
    monkeypatch.setattr(anomaly, "PATIENCE", -1.0)
    tokens = np.zeros((4, CONFIG.context), np.int32)
    targets = np.zeros((4, CONFIG.context, CONFIG.n_predict), np.int32)
    said = anomaly.first_bad_tensor(initialise(CONFIG, 0), tokens, targets)
    assert said == "none in the first 0 sequences of the batch; more were not looked at"


def fits(monkeypatch, steps):
    """Patch the pace, so that so many steps fit into any minutes."""
    monkeypatch.setattr(throughput.Throughput, "steps", lambda self, *spent: steps)
    # Told after MOST steps on a busy machine too, where fewer take LONG_ENOUGH.
    monkeypatch.setattr(throughput, "LONG_ENOUGH", math.inf)


def test_as_many_steps_as_fit_into_the_minutes(tmp_path, capsys, monkeypatch):
    # Minutes of a thread: beside other programs, half a second by the clock can be one step's.
    clock = SimpleNamespace(perf_counter=time.thread_time)
    monkeypatch.setattr("nanoeuler.training.throughput.time", clock)
    seen = []
    chosen = Settings(minutes=0.01, batch_size=8, seed=5, lr=0.01)

    def on_estimate(run, seconds):
        if seconds:
            seen.append((run.settings.steps, seconds))

    ended = train(RIVER, tmp_path / "minutes", config=CONFIG, settings=chosen, engine="reference",
                  on_estimate=on_estimate)  # fmt: skip
    told = capsys.readouterr().err.splitlines()
    steps = ended.settings.steps
    assert ended.step == steps == seen[0][0] > 1
    assert 0.5 < seen[0][1] * steps / 0.6 <= 1.5  # the last digits, and a validation each 20th
    said = r"([\d,]+) steps and their validations fit into 0.01 minutes, at [\d,]+\.\d ms a step; "
    found = re.fullmatch(said + "--steps chooses another number", told[0])
    assert found[1] == f"{steps:,}"
    assert told[1].startswith("the run makes ")
    record = json.loads((tmp_path / "minutes" / "config.json").read_text())["training"]
    assert (record["steps"], record["minutes"]) == (steps, 0.01)
    later = train(RIVER, tmp_path / "minutes", settings=chosen, resume=True)
    assert later.step == later.settings.steps == steps


MINUTES = dict(steps=None, minutes=1.0, warmup=12)
TOLD = 11  # the step of these after which the length is known: LONG_ENOUGH is never, as in `fits`


@pytest.mark.parametrize("stepper", kept([make_stepper, Late], make_stepper))
def test_minutes_are_bit_for_bit_the_steps_that_fit_into_them(stepper, tmp_path, monkeypatch):
    """If these have room for ten times the warm-up, which is longer than the measurement."""
    fits(monkeypatch, 240)
    how = dict(engine="cpu", save_every=100, batch_size=2)
    monkeypatch.setattr(loop, "make_stepper", stepper)
    outs = [tmp_path / name for name in ("minutes", "steps")]
    assert go(outs[0], **how, **MINUTES).step == 240
    go(outs[1], steps=240, warmup=12, **how)
    ours, theirs = map(contents, outs)
    for found in (ours, theirs):
        record = json.loads(found.pop("config.json"))
        assert record["training"].pop("minutes") and record["training"]["steps"] == 240
        found["config"] = record
        found.pop("best/config.json", None)
    assert ours == theirs


@pytest.mark.parametrize("moment", thinned([1, 6, 11, 12, 14, 29], 2))
def test_a_run_of_minutes_that_died_goes_on_to_its_own_end(moment, tmp_path, monkeypatch):
    """Before its length is known it begins again; after that it is what the first save says."""
    fits(monkeypatch, 30)
    go(whole := tmp_path / "whole", **MINUTES)
    out = tmp_path / "died"
    with pytest.raises(Died), dying_before(loop._Steps, "begin", moment):
        go(out, **MINUTES)
    assert (not checkpoints(out)) == (moment <= TOLD)
    if checkpoints(out):
        assert checkpoints(out)[0][0] >= TOLD
        fits(monkeypatch, 99)  # another machine, and nobody asks it
    train(None, out, resume=True, **HOW)
    assert_same_run(out, whole)


@pytest.mark.parametrize("late", kept([False, True], True))
def test_a_signal_before_the_length_is_known(late, tmp_path, monkeypatch, capsys):
    """A step or two more are taken, which tell it; then the run is saved, and goes on as ever."""
    fits(monkeypatch, 120)  # not fewer: ten times the warm-up
    how = dict(engine="cpu", batch_size=2)
    if late:
        monkeypatch.setattr(loop, "make_stepper", Late)
    go(whole := tmp_path / "whole", **how, **MINUTES)

    def stop(line):
        if line["step"] == 1:
            signal.raise_signal(signal.SIGTERM)

    out = tmp_path / "stopped"
    stopped = go(out, on_step=stop, **how, **MINUTES)
    assert 2 <= stopped.step <= 4 and checkpoints(out)[-1][0] == stopped.step
    assert f"step {stopped.step} of 120 is saved" in capsys.readouterr().err
    resume(out, engine="cpu")
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (checkpoints(each)[-1][1] / name for each in (out, whole))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_run_whose_time_is_up_ends(tmp_path):
    assert go(tmp_path, steps=None, minutes=1e-9).settings.steps == 2


def test_the_pace_of_a_device_that_works_ahead_is_its_own():
    """A step of 0.1 s on the device, beside which the host takes 0.06 s for the next batch."""
    watch, ready = throughput.StepTimer(), 0.0
    for number in range(1, 6):
        time.sleep(0.06)
        time.sleep(max(0.0, ready - time.perf_counter()))  # for the step before
        watch.lap(int(number > 1))
        ready = time.perf_counter() + 0.1
    assert all(0.1 <= each < 0.145 for each in watch.times[1:])  # 0.16, if each is waited for


def test_what_comes_between_two_steps_is_no_part_of_the_pace():
    watch = throughput.StepTimer()
    for _ in range(5):
        time.sleep(0.02)
        watch.lap(1)
        time.sleep(0.1)
        watch.skip()
    # With what was skipped each would take 0.12 s; one of five isn't held up by other programs.
    assert all(each >= 0.02 for each in watch.times) and min(watch.times) < 0.1


class Judging:
    """In the place of a stepper and of held-out texts: 100 windows, judged ten at a time."""

    inputs, batch_size = range(100), 10

    def __init__(self, seconds, clock):
        self.seconds, self.clock = [*seconds], clock

    def batches(self, rows):
        yield [rows]

    def sums(self, rows):
        self.clock.now += self.seconds.pop(0)


@pytest.mark.parametrize("slow", [0, 5, 25])
def test_a_slow_start_costs_a_run_of_minutes_no_more_than_itself(slow, monkeypatch):
    """Of five minutes nearly all are used, and none over, if first steps or judgements are slow.

    A step takes 0.1 s and a batch 0.03; the first takes 8 s more, `slow` more of them three times
    as long, and so do the first two judgements. Five slow steps ended the run after two minutes,
    when it listened to nine.
    """
    clock = SimpleNamespace(now=50.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(throughput, "time", clock)
    watch, done = throughput.StepTimer(), 0
    while not watch.is_enough(False, 5.0, warmup=50):
        clock.now += 8.1 if done == 0 else 0.3 if done <= slow else 0.1
        done += 1
        watch.lap(1)
    assert done == 49
    judge = Judging([2.0, 0.09, 0.09, *[0.03] * 7], clock)
    pace = watch.throughput(judge, judge)
    steps = pace.steps(5, done, watch.spent)
    assert pace.seconds(done, steps) + watch.spent <= 300
    honest = throughput.Throughput(0.1, 0.3, 0.3)
    ends = watch.spent + honest.seconds(done, steps)
    assert 294 < ends <= 301


def test_a_run_of_minutes_watches_no_longer_than_its_warm_up(monkeypatch):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(throughput, "time", clock)
    for each, warmup, wanted in ((1e-3, 50, 49), (1e-3, 5, 10), (0.1, 500, 301),
                                 (3.0, 50, 11)):
        watch, done = throughput.StepTimer(), 0
        while not watch.is_enough(False, 5.0, warmup):
            clock.now, done = clock.now + each, done + 1
            watch.lap(1)
        assert done - wanted in (0, 1)  # a sum of tenths may be a rounding short
        assert not watch.is_enough(False, 1e6, 10**9) and watch.is_enough(True, 5.0)


def test_a_pace_by_hand():
    measured = throughput.Throughput(step=0.06, quick=0.2, full=0.5)
    assert measured.steps(5) == 4920
    assert measured.steps(5, 50, 30.0) == 4470  # 50 and 265.5 s
    assert measured.steps(5, 50, 400.0) == 50
    assert math.isclose(measured.seconds(0, 4920), 4920 * 0.06 + 20 * 0.2 + 0.5)
    assert math.isclose(measured.seconds(4919, 4920), 0.06 + 0.2 + 0.5)
    assert measured.steps(1e-9) == 1
    for step, quick, full, minutes in (
        (0.06, 0.2, 0.5, 5), (0.1, 3.0, 3.0, 1), (20.0, 5.0, 80.0, 10), (1e-3, 1e-2, 5.0, 2),
        (0.3, 0.4, 0.5, 0.2), (1.0, 0.1, 0.1, 0.35),
    ):  # fmt: skip
        each = throughput.Throughput(step, quick, full)
        steps = each.steps(minutes)
        assert each.seconds(0, steps) <= 60 * minutes + 1e-9
        more = steps + 1 + steps // 100 + 2 * quick / step  # the last digits; a validation or two
        assert each.seconds(0, int(more) + 1) > 60 * minutes * 0.9
    for steps in (1, 2, 19, 20, 21, 39, 40, 400, 407, 12345):
        judged = [step for step in range(1, steps + 1) if throughput.validation_due(step, steps)]
        assert judged[-1] == steps and min(steps, 11) <= len(judged) <= throughput.VALIDATIONS
        for at in (0, steps // 3, steps - 1):
            left = [step for step in judged if step > at]
            wanted = (steps - at) * 0.06 + len(left) * 0.2 + 0.5
            assert math.isclose(measured.seconds(at, steps), wanted)


def user_files(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", [
    "config.json", "metrics.jsonl", "loss.png", "tokenizer.json", "model.safetensors", ".part",
    ".config.json.7.part", "data/prepared.json", "data/train-00000.safetensors", "notes/a.txt",
])  # fmt: skip
def test_nothing_of_a_user_is_overwritten(name, tmp_path):
    out = tmp_path / "mine"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    before = user_files(out)
    for call in (go, resume):
        with pytest.raises(UserError, match="to be new or empty, but it holds|but there is none"):
            call(out)
        assert user_files(out) == before
    # and where a run of ours has died, a file that is none of ours
    died = tmp_path / "died"
    with pytest.raises(Died), dying_before(os, "fsync", 1):
        go(died)
    (died / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="but it holds notes.txt"):
        again(died)
    assert (died / "notes.txt").read_text() == "mine"


def test_a_start_that_fails_leaves_nothing(tmp_path):
    """And the directory is as it was: absent, or empty."""
    (tmp_path / "empty").mkdir()
    (brief := tmp_path / "brief.txt").write_text("Too short.")
    for out in (tmp_path / "absent", tmp_path / "empty"):
        for changes, words in (
            (dict(batch_size=2**63 - 1), "a batch_size of at most 131072 for a context of 32"),
            (dict(batch_size=10**9), "a batch_size of at most 131072"),
            (dict(batch_size=131073), "a batch_size of at most 131072"),
            (dict(data=brief), "more"),
            (dict(engine="abacus"), "abacus"),
            (dict(on_estimate=mock.Mock(side_effect=UserError("no"))), "no"),
        ):
            existed = out.exists()
            with pytest.raises(UserError, match=words) as caught:
                go(out, **changes)
            assert "\n" not in str(caught.value)
            assert out.exists() == existed and not list(tmp_path.glob(f"{out.name}/*"))


SHORT_OF_MEMORY = (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"),
                   MemoryError("an array"))  # fmt: skip


@pytest.mark.parametrize(("error", "steps"), kept(
    itertools.product(SHORT_OF_MEMORY, [STEPS, None]),
    *zip(SHORT_OF_MEMORY, [STEPS, None, STEPS], strict=True),
))  # fmt: skip
def test_too_little_memory_is_one_line_and_no_obstacle(error, steps, straight, tmp_path):
    refuse = mock.Mock(side_effect=error)
    with mock.patch.object(CpuStepper, "step", refuse), pytest.raises(UserError) as caught:
        go(tmp_path / "run", steps=steps)
    why = " (an array)" if str(error) == "an array" else ""
    told = f"a batch of 8 windows of 32 tokens does not fit into this machine's memory{why}: choose"
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    go(tmp_path / "run")  # the next try
    assert_same_run(tmp_path / "run", straight)


def test_a_model_whose_held_out_loss_is_not_finite_is_not_saved(tmp_path):
    """As that of a last step whose weights are finite, and their products are not."""
    words = "step 1: expected a finite loss of the held-out text, got nan; the first bad tensor is "
    with mock.patch.object(loop.HeldOut, "bits_per_byte", lambda *_, **__: math.nan):
        with pytest.raises(UserError, match=words):
            go(tmp_path, steps=1)
    assert not checkpoints(tmp_path)


def test_too_little_memory_in_the_middle_leaves_the_last_save(straight, tmp_path):
    step, calls = CpuStepper.step, itertools.count(1)

    def refuse(self, *arguments):
        if next(calls) == 7:
            raise MemoryError
        return step(self, *arguments)

    with mock.patch.object(CpuStepper, "step", refuse), pytest.raises(UserError, match="memory"):
        go(tmp_path)
    assert load(tmp_path).step == 4
    resume(tmp_path)
    assert_same_run(tmp_path, straight)


def test_a_run_that_died_before_its_first_save_is_begun_by_either(straight, tmp_path, capsys):
    for number, begin in enumerate((go, again)):
        out = tmp_path / f"{number}"
        with pytest.raises(Died), dying_before(os, "rename", 1):
            go(out)
        assert not checkpoints(out) and (out / "best").exists()  # the rename was to end this
        capsys.readouterr()
        begin(out)
        told = capsys.readouterr().err.splitlines()[0]
        assert (told == f"nothing was saved in {out}: the run begins") == (begin is again)
        assert_same_run(out, straight)
    # from the tokens that it left there, as the command line resumes without --data
    out = tmp_path / "tokens"
    with pytest.raises(Died), dying_before(os, "rename", 1):
        go(out)
    again(out, data=out / "data")
    assert_same_run(out, straight)


@pytest.mark.parametrize("own_tokenizer", [False, True])
def test_a_run_that_died_preparing_goes_on_with_what_was_asked(own_tokenizer, straight, tmp_path):
    """Without a word of it, from any place, and however often it dies again."""
    ids = Tokenizer.train(RIVER.read_bytes()[:5000], 270) if own_tokenizer else None
    whole, out = straight, tmp_path / "died"
    if ids:
        go(whole := tmp_path / "whole", tokenizer=ids)
    with pytest.raises(Died), dying_before(training, "prepare_text", 1):
        go(out, data=os.path.relpath(RIVER), tokenizer=ids)
    names = [LOCK, REQUEST] + ["tokenizer.json"] * own_tokenizer
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    asked = read_origin(out)
    assert (asked.config, asked.settings, asked.text) == (CONFIG, Settings(**SHORT), RIVER)
    assert settings_for(out, True, steps=3) == replace(Settings(**SHORT), steps=3)
    with contextlib.chdir(tmp_path):
        for owner, name in ((training, "prepare_text"), (os, "rename"), (loop._Steps, "begin")):
            with pytest.raises(Died), dying_before(owner, name, 1):
                train(None, out, resume=True, **HOW)
            assert (out / REQUEST).exists()
        train(None, out, resume=True, **HOW)
    assert_same_run(out, whole)


def test_what_is_asked_of_a_run_that_died_preparing(straight, tmp_path):
    out = tmp_path / "died"
    with pytest.raises(Died), dying_before(training, "prepare_text", 1):
        go(out)
    with pytest.raises(UserError, match="that run was stopped before its first"):
        load(out)
    before = contents(out)
    refused = partial(pytest.raises, UserError)
    for changes, words in (
        (dict(batch_size=5), "batch_size 8, but 5 was asked for"),
        (dict(config=replace(CONFIG, n_layers=3)), "n_layers 2, but 3 was asked for"),
        (dict(config=replace(CONFIG, vocab_size=290)), "vocab_size 280, but 290 was asked for"),
        (dict(tokenizer=Tokenizer.train(b"la la", 262)), "tokenizer None, but .* was asked for"),
        (dict(data=Path(__file__)), "with data .* was asked for"),
    ):
        with refused(match=words) as caught:
            again(out, **changes)
        assert "\n" not in str(caught.value) and contents(out) == before
    with mock.patch.object(training, "prepare_text", side_effect=UserError("no")):
        with refused(match="no"):
            train(None, out, resume=True)
    assert contents(out) == before  # what fails takes nothing of what was asked
    for text in ("[]", "{}", '{"format": 3}', '{"data": "a", "model": {"dim": 10}}'):
        damaged = shutil.copytree(out, tmp_path / f"damaged {text}")
        (damaged / REQUEST).write_text(text)
        with refused(match="is damaged|formats up to 2") as caught:
            train(None, damaged, resume=True)
        assert "\n" not in str(caught.value)
    (out / REQUEST).rename(tmp_path / "elsewhere")
    # killed before it was written: nothing was done
    with refused(match="leave out --resume to begin one"):
        train(None, out, resume=True)
    (tmp_path / "elsewhere").rename(out / REQUEST)
    # without --resume, another run begins in the same place
    go(out, steps=3, save_every=100)
    assert load(out).settings.steps == 3 and not (out / REQUEST).exists()


def test_a_prepared_folder_is_named_by_the_request(tmp_path):
    out, folder = tmp_path / "died", documents(tmp_path / "docs")
    with pytest.raises(Died), dying_before(os, "rename", 1):
        go(out, data=folder)
    assert train(None, out, resume=True, **HOW).data == Prepared(folder).digest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(sample="x"), "sample to be a function, got 'x'"),
        (dict(on_estimate=3), "on_estimate to be a function, got 3"),
        (dict(on_step=3), "on_step to be a function, got 3"),
        (dict(engine=3), "unknown engine 3"),
        (dict(threads=0), "threads to be a whole number above 0, got 0"),
    ],
)  # fmt: skip
def test_an_argument_of_another_kind_is_refused_before_anything_is_done(changes, words, tmp_path):
    arguments = dict(data=RIVER, out=tmp_path / "out") | changes
    with (
        mock.patch.object(training, "prepare_text", side_effect=Died),
        pytest.raises(UserError, match=words) as caught,
    ):
        train(arguments.pop("data"), arguments.pop("out"), **arguments)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_memory_that_is_short_names_what_is_too_large(tmp_path):
    model = "a model of 7,528 parameters, 30.1 kB for each of .* choose fewer layers"
    for owner, name, size, words in (
        (run, "initialise", 8, model), (loop, "make_stepper", 8, model),
        (CpuStepper, "step", 8, "a batch of 8 windows of 32 tokens does not fit"),
        (CpuStepper, "step", 1, "a step with one sequence .* choose a smaller context or model"),
    ):  # fmt: skip
        with mock.patch.object(owner, name, side_effect=MemoryError):
            with pytest.raises(UserError, match=words):
                go(tmp_path / "run", batch_size=size)
        assert not (tmp_path / "run").exists()


def test_a_large_text_is_not_read_into_memory(straight, tmp_path):
    """Neither to begin with it nor to go on: 24 MB, and a peak of a few."""
    large = tmp_path / "large.txt"
    large.write_bytes(b"All of a river is water, and none of it stays.\n" * 500_000)
    begun = load(straight)  # whose tokenizer.json takes memory of its own

    def stop(*_, **__):
        raise UserError("far enough")

    for out, words in ((straight, "with data"), (tmp_path / "new", "far enough")):
        tracemalloc.start()
        with (
            mock.patch.object(training, "prepare_text", stop),
            mock.patch.object(training, "load", lambda _: begun),
            pytest.raises(UserError, match=words),
        ):
            train(large, out, config=CONFIG, tokenizer=begun.tokenizer, resume=out is straight)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8e6, (out, peak)  # some pieces of 1 MiB, and their text


def test_settings_for_a_command_line(straight, tmp_path):
    assert settings_for(tmp_path / "new", False) == Settings()
    tuned = Settings(steps=600, lr=1e-3)
    assert settings_for(tmp_path / "new", False, tuned, lr=0.5) == replace(tuned, lr=0.5)
    assert settings_for(tmp_path / "new", True, tuned) == tuned  # nothing is there to be resumed
    assert settings_for(straight, True, tuned) == Settings(**SHORT)
    assert settings_for(straight, True, steps=13).steps == 13
    with pytest.raises(UserError, match="lr to be"):
        settings_for(straight, True, lr=-1.0)
    assert resume(straight, minutes=9.0).step == STEPS  # its steps are settled


def test_a_learning_rate_that_nobody_asked_for_is_that_of_what_is_done(straight, tmp_path):
    asked = Settings(steps=100)
    assert (asked.lr, asked.with_rate(0.5).lr) == (None, 0.5)
    assert Settings(lr=0.1).with_rate(0.5).lr == 0.1
    tokenizer = Tokenizer.train(RIVER.read_bytes(), 280)
    assert run.Run.begin(CONFIG, asked, tokenizer, "").settings == replace(asked, lr=LEARNING_RATE)
    wide = replace(CONFIG, dim=512)  # four times as wide as the model that it was measured on
    assert run.Run.begin(wide, asked, tokenizer, "").settings.lr == LEARNING_RATE / 4
    tuned = run.Run.begin(CONFIG, asked.with_rate(1e-3), tokenizer, "")
    assert tuned.settings == replace(asked, lr=1e-3)
    # a run that goes on keeps its own, and a save without one is none
    assert resume(straight).settings.lr == SHORT["lr"]
    asked = replace(Settings(**SHORT), lr=None)
    assert train(RIVER, straight, settings=asked, resume=True).settings.lr == SHORT["lr"]
    out = shutil.copytree(straight, tmp_path / "run")
    record = json.loads((out / "config.json").read_text())
    record["training"]["lr"] = None
    (out / "config.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="the learning rate or a digest is none"):
        load(out)


def test_a_disk_without_locks_is_trained_on(straight, tmp_path):
    refusal = OSError(errno.ENOLCK, "No locks available")
    with mock.patch("filelock.FileLock.acquire", side_effect=refusal):
        go(tmp_path / "run")
    assert_same_run(tmp_path / "run", straight)
