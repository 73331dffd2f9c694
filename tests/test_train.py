"""The trainer: exact resume after any death, signals, numbers that are not finite, what it says."""

import io
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from deaths import Died, dying_before
from rich.console import Console

from nanoeuler import checkpoint, train
from nanoeuler.backward import IGNORE
from nanoeuler.config import ModelConfig
from nanoeuler.data import Batches
from nanoeuler.errors import UserError
from nanoeuler.model import initialise
from nanoeuler.optim import AdamW
from nanoeuler.parallel import Sharded
from nanoeuler.tokenizer import Tokenizer

RIVER = Path(__file__).parents[1] / "data" / "river.txt"
CONFIG = ModelConfig(
    vocab_size=280, dim=8, n_layers=2, n_heads=2, n_kv_heads=1, hidden=8, context=32, n_predict=2
)
STEPS = 12
SHORT = dict(steps=STEPS, batch_size=8, lr=0.01, seed=5, engine="reference", save_every=4)
EXACT = ("model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json")


def go(out, **changes):
    return train.train(CONFIG, RIVER, out, **{**SHORT, **changes})


def resume(out, **changes):
    return train.train(None, RIVER, out, engine="reference", save_every=4, resume=True, **changes)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "straight"
    assert go(out).step == STEPS
    return out


def assert_same_run(out, straight):
    for name in EXACT:
        assert (out / name).read_bytes() == (straight / name).read_bytes(), name
    ours, theirs = checkpoint.read_metrics(out), checkpoint.read_metrics(straight)
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    for a, b in zip(ours, theirs, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}


# A run of 12 steps asks for 12 batches, updates 12 times and renames 6 files at each of 4 saves.
DEATHS = (
    [(Batches, "batch", step) for step in (1, 4, 5, 12)]
    + [(AdamW, "update", step) for step in (1, 8, 9)]
    + [(os, "replace", call) for call in range(6, 25)]
)


@pytest.mark.parametrize(("owner", "name", "call"), DEATHS)
def test_a_run_that_died_goes_on_to_the_same_bytes(owner, name, call, straight, tmp_path):
    with mock.patch.object(train, "plot"):  # a picture takes longer than the run
        with pytest.raises(Died), dying_before(owner, name, call):
            go(tmp_path)
        assert resume(tmp_path).step == STEPS
    assert_same_run(tmp_path, straight)


def test_a_run_that_died_again_and_again(straight, tmp_path):
    with pytest.raises(Died), dying_before(Batches, "batch", 2):
        go(tmp_path)
    for call in (3, 6, 5, 4, 2):
        with pytest.raises(Died), dying_before(Batches, "batch", call):
            resume(tmp_path)
    resume(tmp_path)
    assert_same_run(tmp_path, straight)


SCRIPT = f"""
import sys
from nanoeuler import train
from nanoeuler.config import ModelConfig
train.train({CONFIG!r}, {str(RIVER)!r}, sys.argv[1], steps={STEPS * 10}, batch_size=8, seed=5,
            engine="reference", save_every=3, resume=sys.argv[2] == "resume")
"""


def test_killed_for_real_at_random_moments(tmp_path):
    def start(out, how):
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, out, how], stderr=subprocess.PIPE, text=True
        )

    whole = start(tmp_path / "whole", "new")
    assert whole.wait(60) == 0, whole.stderr.read()
    whole.stderr.close()
    rng, how = random.Random(0), "new"
    for _ in range(3):
        with start(tmp_path / "killed", how) as process:
            while how == "new" and not (tmp_path / "killed" / "metrics.jsonl").exists():
                time.sleep(0.01)
                assert process.poll() is None, process.stderr.read()
            if how == "resume":
                process.stderr.read(1)  # its first line means that it has begun
            time.sleep(rng.random() * 0.3)
            process.kill()
        how = "resume"
    with start(tmp_path / "killed", how) as last:
        said = last.stderr.read()
    assert last.returncode == 0, said
    for name in EXACT:
        killed, whole = (tmp_path / run / name for run in ("killed", "whole"))
        assert killed.read_bytes() == whole.read_bytes(), name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(number, straight, tmp_path, capsys):
    batch, before = Batches.batch, signal.getsignal(number)

    def signalled(self, step):
        if step == 6:
            os.kill(os.getpid(), number)
        return batch(self, step)

    with mock.patch.object(Batches, "batch", signalled):
        run = go(tmp_path)
    assert run.step == 6 and checkpoint.load(tmp_path).step == 6
    said = capsys.readouterr().err
    assert f"{signal.Signals(number).name}: step 6 of {STEPS} is saved in" in said
    assert "--resume" in said and (tmp_path / "loss.png").exists()
    assert signal.getsignal(number) is before
    resume(tmp_path)
    assert_same_run(tmp_path, straight)


def test_a_second_signal_is_not_held_back(tmp_path):
    batch = Batches.batch

    def signalled(self, step):
        if step in (6, 7):  # 7 is never reached after the first, so send both at once
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return batch(self, step)

    with mock.patch.object(Batches, "batch", signalled), pytest.raises(KeyboardInterrupt):
        go(tmp_path)
    assert checkpoint.load(tmp_path).step == 4


def test_the_number_of_threads_does_not_matter(straight, tmp_path):
    go(tmp_path, threads=1)
    assert_same_run(tmp_path, straight)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_stops_and_leaves_the_last_checkpoint(value, tmp_path):
    compute, calls = Sharded.loss_and_gradients, [0]

    def bad(self, w, tokens, targets, scale, dw):
        sums = compute(self, w, tokens, targets, scale, dw)
        calls[0] += 1
        if calls[0] == 6:
            dw["block.0.wo"][1, 1] = dw["block.1.w_down"][0, 0] = value
        return sums

    with (
        mock.patch.object(Sharded, "loss_and_gradients", bad),
        pytest.raises(UserError, match=r"step 6: .* the gradient of block\.1\.w_down; the last"),
    ):
        go(tmp_path)
    run = checkpoint.load(tmp_path)
    assert run.step == 4 and np.isfinite(run.weights.flat).all()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("embedding", np.nan, "the weight embedding"),
        ("block.1.norm2", np.inf, "the weight block.1.norm2"),
        ("embedding", 1e38, "what rmsnorm makes with block.0.norm1"),
        ("block.0.w_up", 1e38, "what linear makes with block.0.w_up"),
        ("output", 3e38, "what linear makes with output"),
    ],
)
def test_the_first_bad_tensor_is_named(name, value, words):
    weights = initialise(CONFIG, 0)
    weights[name][...] = value
    tokens = np.arange(16, dtype=np.int32).reshape(1, 16)
    targets = np.full((1, 16, 2), IGNORE, np.int32)
    targets[:, :, 0] = 1
    assert train.first_bad_tensor(weights, weights.zeros_like(), tokens, targets) == words


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
        (lambda: train.train(None, other, straight, resume=True), "with data"),
        (lambda: resume(tmp_path / "nothing"), "no config.json"),
        (lambda: go(tmp_path / "a", engine="abacus"), "abacus"),
        (lambda: go(tmp_path / "b", steps=0), "steps"),
        (lambda: train.train(CONFIG, brief, tmp_path / "c"), "use more text"),
        (lambda: train.train(CONFIG, tmp_path / "absent", tmp_path / "d"), "No such file"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
    larger = ModelConfig(**{**CONFIG.__dict__, "n_layers": 3})
    with pytest.raises(UserError, match="n_layers=2.*n_layers=3"):
        train.train(larger, RIVER, straight, resume=True)


def test_a_tokenizer_that_exists_is_used_and_kept(tmp_path):
    text = RIVER.read_bytes()[:5000]  # whose merges are not those of the whole
    given, other = Tokenizer.train(text, 290), Tokenizer.train(text, 280)
    run = go(tmp_path / "given", tokenizer=given)
    assert run.config == replace(CONFIG, vocab_size=290)
    assert run.weights["embedding"].shape[0] == 290
    assert (tmp_path / "given" / "tokenizer.json").read_text() == given.json
    assert checkpoint.load(tmp_path / "given").tokenizer.hash == given.hash

    with mock.patch.object(Tokenizer, "train", None):  # learning one is not reached
        with pytest.raises(Died), dying_before(Batches, "batch", 7):
            go(tmp_path / "died", tokenizer=given)
        assert resume(tmp_path / "died", tokenizer=given).step == STEPS
        assert_same_run(tmp_path / "died", tmp_path / "given")
        assert resume(tmp_path / "died").step == STEPS
        assert go(tmp_path / "died", tokenizer=given, resume=True).step == STEPS
    with pytest.raises(UserError, match=f"with tokenizer {given.hash}, but {other.hash}"):
        resume(tmp_path / "died", tokenizer=other)


def test_a_finished_run_is_resumed_to_nothing_but_its_sample(straight, capsys):
    before = (straight / "model.safetensors").read_bytes()
    assert resume(straight, sample=lambda *_: "Once upon").step == STEPS
    assert capsys.readouterr().err == "Once upon\n"
    assert (straight / "model.safetensors").read_bytes() == before


def test_the_sample_is_made_by_the_caller_from_the_trained_model(tmp_path, capsys):
    def sample(config, tokenizer, weights):
        assert config == CONFIG and tokenizer.vocab_size == 280
        return f"[bold]{float(weights.flat.sum()):.6f}[/bold]"  # rich markup is not for samples

    run = go(tmp_path, sample=sample)
    assert capsys.readouterr().err.endswith(f"[bold]{float(run.weights.flat.sum()):.6f}[/bold]\n")


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys):
    go(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == STEPS  # a validation every step, when a run has fewer steps than 20
    line = r"step \d+/12  loss \d\.\d{3}  \d+\.\d{3} bits/byte  [\d,]+ tokens/s  \d+ s left"
    assert all(re.fullmatch(line, text) for text in lines), lines


def test_a_live_line_on_a_terminal(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with mock.patch.object(train, "Console", lambda **_: console):
        go(tmp_path)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    assert "step 12/12" in shown and "bits/byte" in shown and "tokens/s" in shown
    assert "s left" not in shown  # no plain lines


def test_the_picture_and_the_metrics(straight):
    assert (straight / "loss.png").read_bytes().startswith(b"\x89PNG")
    lines = checkpoint.read_metrics(straight)
    assert all(line["tokens"] == 256 and line["seconds"] > 0 for line in lines)
    assert lines[-1]["bits_per_byte"] < lines[0]["bits_per_byte"] < 8.5
    assert sorted(os.listdir(straight)) == sorted((*EXACT, "loss.png", "metrics.jsonl"))
