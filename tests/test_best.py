"""The best model of a run: which it is, that it outlives every death, and what the run says."""

import functools
import json
import os
import re
import shutil
from itertools import product
from unittest import mock

import numpy as np
import pytest
from deaths import Died, dying_before, full_disk
from lives import CONFIG, RIVER
from tiers import kept

from nanoeuler.data.batches import Batches
from nanoeuler.errors import UserError
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import loop
from nanoeuler.training.best import BEST, Best, chosen, noise, say_passes
from nanoeuler.training.checkpoint import load, load_model
from nanoeuler.training.folder import checkpoints, locked, read_metrics
from nanoeuler.training.run import Run, Settings

STEPS = 12  # each of which is judged
FALLS, TURNS = [5.0 - 0.1 * i for i in range(12)], [5.0, 4.5, 4.0, 4.2, 3.9, 4.1, 4.3] + 5 * [4.5]


class Script:
    """A held-out text of which a model needs what is written, by the step of `run`."""

    bytes_per_token, baselines = 2.0, {}
    inputs = targets = np.zeros((128, 32), int)  # 4096 tokens that count
    batch_size = 8

    def __init__(self, run, bits):
        self.run, self.bits = run, bits

    def batches(self, numbers):
        yield self.inputs[:8], np.zeros((8, 32, CONFIG.n_predict), int)

    def bits_per_byte(self, loss, quick=False):
        return self.bits[self.run.step - 1] + (0.0 if quick else 0.01)


@functools.cache
def tokenizer():
    return Tokenizer.train(RIVER.read_bytes(), CONFIG.vocab_size)


@functools.cache
def tokens():
    return tokenizer().encode(RIVER.read_bytes())


def begun():
    settings = Settings(steps=STEPS, batch_size=8, lr=0.01, seed=5)
    return Run.begin(CONFIG, settings, tokenizer(), "digest")


def fit(out, bits, **how):
    """Train in `out`, on or from the beginning; {step: the weights after it} of the steps taken."""
    run, seen = load(out) if checkpoints(out) else begun(), {}

    def on_step(line):
        seen[line["step"]] = run.weights.flat.copy()

    how = dict(save_every=4, engine="reference", threads=1) | how
    batches = Batches(tokens(), 8, CONFIG.context, CONFIG.n_predict, 5)
    with locked(out), mock.patch.object(loop, "plot"):
        loop.fit(out, run, batches, Script(run, bits), on_step=on_step, **how)
    return seen


def steps_in(folder):
    return [step for step, _ in checkpoints(folder)]


def contents(out):
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*"))
            if path.is_file() and path.name != "metrics.jsonl"}  # fmt: skip


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("bits, best", [(FALLS, 12), (TURNS, 5), (FALLS[::-1], 1)])
def test_the_best_model_is_kept_and_read_like_any_other(bits, best, tmp_path):
    seen = fit(tmp_path, bits)
    config, ids, weights = load_model(tmp_path / BEST)
    assert (config, ids.hash) == (CONFIG, tokenizer().hash)
    assert np.array_equal(weights.flat, seen[best])
    assert np.array_equal(load_model(tmp_path)[2].flat, seen[STEPS])  # the run's own is its newest
    state = json.loads((checkpoints(tmp_path / BEST)[-1][1] / "state.json").read_text())
    assert (state["step"], state["bits_per_byte"]) == (best, bits[best - 1])
    assert chosen(tmp_path) == (tmp_path if best == STEPS else tmp_path / BEST)
    moved = shutil.move(tmp_path / BEST, tmp_path / "alone")  # it needs nothing of the run
    assert np.array_equal(load_model(moved)[2].flat, seen[best])
    assert chosen(tmp_path) == tmp_path


def test_to_keep_the_best_changes_no_bit_of_the_run(tmp_path):
    weights = [fit(tmp_path / str(i), bits)[STEPS] for i, bits in enumerate((FALLS, TURNS))]
    with mock.patch.object(Best, "observe", lambda *_: ""):
        weights.append(fit(tmp_path / "none", FALLS)[STEPS])
    assert not (tmp_path / "none" / BEST).exists()
    assert all(np.array_equal(each, weights[0]) for each in weights)


@pytest.mark.parametrize("keep, kept", [(1, [7]), (2, [7]), (3, [4, 7]), (9, [4, 7])])
def test_each_save_that_is_kept_has_its_best(keep, kept, tmp_path):
    bits = [5.0, 4.9, 4.8, 4.7, 4.9, 4.6, 4.5, 4.9, 4.9, 4.9, 4.9, 4.9]
    seen = fit(tmp_path, bits, keep=keep)
    assert steps_in(tmp_path) == [4, 8, 12][-keep:]
    assert steps_in(tmp_path / BEST) == kept
    if keep == 3:  # back to an earlier save, as where the disk has damaged the newer ones
        for _, folder in checkpoints(tmp_path)[1:]:
            shutil.rmtree(folder)
        with pytest.raises(Died), dying_before(loop._Steps, "begin", 2):
            fit(tmp_path, bits)
        assert steps_in(tmp_path / BEST) == [4]
        assert np.array_equal(load_model(tmp_path / BEST)[2].flat, seen[4])


def test_the_last_model_is_compared_on_the_same_part_as_the_others(tmp_path, capsys):
    bits = [3.0] * 11 + [2.995]  # of the whole text, which is harder, it needs 3.005
    fit(tmp_path, bits)
    last = read_metrics(tmp_path)[-1]
    assert (last["bits_per_byte"], last["quick_bits_per_byte"]) == (3.005, 2.995)
    assert steps_in(tmp_path / BEST)[-1] == STEPS
    assert "best model is" not in capsys.readouterr().err


def test_a_run_says_once_that_it_learns_by_heart(tmp_path, capsys):
    fit(tmp_path, TURNS)
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if "by heart" in line]
    for words in ("3.900 at step 5 to 4.500", "--steps", "more text", "--weight-decay", "passes"):
        assert words in line, words
    (noted,) = [line for line in read_metrics(tmp_path) if "warning" in line]
    assert noted["step"] == 8 and noted["warning"] == line  # three in a row: steps 6, 7 and 8
    assert f"that of step 5, in {tmp_path / BEST}: 3.900" in said and "step 12 needs 4.500" in said


@pytest.mark.parametrize("bits", [
    FALLS,
    [3.0] + 11 * [3.0 * (1 + 0.99 * 3 * 0.3 / 64)],  # within the noise of 4096 tokens
    [3.0, 3.5, 3.5, 3.0, 3.5, 3.5, 2.9, 3.5, 3.5, 2.9, 3.5, 3.5],  # never three in a row
], ids=["falls", "noise", "luck"])  # fmt: skip
def test_what_is_no_sign_of_learning_by_heart(bits, tmp_path, capsys):
    fit(tmp_path, bits)
    assert "by heart" not in capsys.readouterr().err


def test_few_held_out_tokens_are_a_worse_judge():
    script = Script(None, [])
    assert noise(script) == pytest.approx(3 * 0.3 / 64)
    script.targets = np.full((1280, 32), -1)
    script.targets[:, :8] = 5  # a quarter counts, and a tenth is looked at
    assert noise(script) == pytest.approx(3 * 0.3 / 32)


def test_a_run_says_how_often_it_reads_its_data():
    settings = Settings(steps=200, batch_size=8)
    assert say_passes(settings, 100) == "the run makes 16 passes over its data"
    line = say_passes(settings, 99)
    assert line.startswith("the run makes 16.2 passes") and line.count("\n") == 0
    assert int(re.search(r"--steps (\d+)", line)[1]) == 16 * 99 // 8


@pytest.mark.parametrize(
    ("name", "way"),
    kept(product(["rename", "fsync", "replace"], ["turns", "falls"]),
         ("rename", "turns"), ("fsync", "falls"), ("replace", "turns")),
)  # fmt: skip
def test_a_death_at_any_write_leaves_a_best_that_fits(name, way, tmp_path):
    bits = {"turns": TURNS, "falls": FALLS}[way]
    seen = fit(tmp_path / "whole", bits)
    whole, died = contents(tmp_path / "whole"), 0
    for call in range(1, 200, 1 if name == "rename" else 4):
        out = tmp_path / str(call)
        try:
            with dying_before(os, name, call):
                fit(out, bits)
            break
        except Died:
            died += 1
        if checkpoints(out / BEST):  # whole, whatever else is there
            found = steps_in(out / BEST)[-1]
            assert np.array_equal(load_model(out / BEST)[2].flat, seen[found])
        fit(out, bits)
        assert contents(out) == whole
        assert not list(out.rglob("*.part"))
    assert died >= 2


def test_killed_between_best_and_save_the_run_goes_back_to_what_it_knew(tmp_path):
    save = loop.save

    def dies(saves, *given):
        if len(checkpoints(tmp_path)) == saves:
            raise Died
        save(*given)

    # the run is at the step of its last save, and will find again what it has found since
    for saves, saved, best, known in ((0, [], [3], []), (1, [4], [3, 5], [3])):
        with pytest.raises(Died), mock.patch.object(loop, "save", functools.partial(dies, saves)):
            fit(tmp_path, TURNS)
        assert (steps_in(tmp_path), steps_in(tmp_path / BEST)) == (saved, best)
        with pytest.raises(Died), dying_before(loop._Steps, "begin", 1):
            fit(tmp_path, TURNS)
        assert steps_in(tmp_path / BEST) == known


def test_a_resumed_run_knows_the_best_so_far_and_what_it_has_said(tmp_path, capsys):
    with pytest.raises(Died), dying_before(loop._Steps, "begin", 10):
        fit(tmp_path, TURNS)
    assert "by heart" in capsys.readouterr().err
    seen = fit(tmp_path, TURNS)
    assert sorted(seen) == [9, 10, 11, 12] and steps_in(tmp_path / BEST) == [5]
    said = capsys.readouterr().err
    assert "by heart" not in said and "the best model is that of step 5" in said
    assert fit(tmp_path, TURNS) == {}  # nothing is left to do, and it says so again
    assert "the best model is that of step 5" in capsys.readouterr().err


def test_a_run_begun_without_a_best_has_one_from_where_it_goes_on(tmp_path):
    with pytest.raises(Died), dying_before(loop._Steps, "begin", 10):
        fit(tmp_path, TURNS)
    shutil.rmtree(tmp_path / BEST)
    seen = fit(tmp_path, TURNS)
    assert np.array_equal(load_model(tmp_path / BEST)[2].flat, seen[9])


@pytest.mark.parametrize(
    ("name", "stride"),
    kept([("rename", 1), ("fsync", 4), ("fsync", 1), ("mkdir", 1)], ("rename", 1), ("fsync", 4)),
)
def test_a_full_disk_is_one_line_and_loses_nothing(name, stride, tmp_path):
    out, told = tmp_path / name, set()
    for call in range(1, 60, stride):
        try:
            with full_disk(name, call) as count:
                fit(out, TURNS)
        except UserError as error:
            told.add(str(error).split(" in /")[0])
            assert "No space left" in str(error) and "\n" not in str(error)
        if count[0] < call:
            break
        shutil.rmtree(out, ignore_errors=True) if not checkpoints(out) else fit(out, TURNS)
        if checkpoints(out):
            assert steps_in(out / BEST)[-1] == 5 and steps_in(out)[-1] == STEPS
            shutil.rmtree(out)
    assert any("the best model, of step 3, could not be written" in line for line in told)


def damage(path):
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_damaged_best_is_named_with_its_cure(name, tmp_path):
    fit(tmp_path, TURNS)
    folder = checkpoints(tmp_path / BEST)[-1][1]
    damage(folder / name)
    for call in (lambda: fit(tmp_path, TURNS), lambda: load_model(tmp_path / BEST)):
        with pytest.raises(UserError) as error:
            call()
        assert f"{folder} is damaged" in one_line(error)
    with pytest.raises(UserError, match="delete that folder to go on without it"):
        fit(tmp_path, TURNS)
    assert np.array_equal(load_model(tmp_path)[2].flat, load(tmp_path).weights.flat)  # the last is
    shutil.rmtree(folder)
    fit(tmp_path, TURNS)


@pytest.mark.parametrize("bits", ["1.0", None, 0.0, -1.0, float("nan"), float("inf"), 3])
def test_hostile_bits_are_refused(bits, tmp_path):
    fit(tmp_path, TURNS)
    path = checkpoints(tmp_path / BEST)[-1][1] / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bits_per_byte": bits}))
    with pytest.raises(UserError, match="is damaged .*bits_per_byte"):
        fit(tmp_path, TURNS)


def test_a_best_of_another_run_is_left_alone(tmp_path):
    fit(tmp_path / "one", TURNS)
    with mock.patch(f"{__name__}.begun", lambda: Run.begin(
            CONFIG, Settings(steps=STEPS, batch_size=8, seed=6), tokenizer(), "digest")):
        fit(tmp_path / "two", TURNS)
    shutil.rmtree(tmp_path / "one" / BEST)
    shutil.copytree(tmp_path / "two" / BEST, tmp_path / "one" / BEST)
    before = contents(tmp_path / "one")
    with pytest.raises(UserError, match="holds a model of another run") as error:
        fit(tmp_path / "one", TURNS)
    assert one_line(error) and contents(tmp_path / "one") == before


def test_a_best_model_is_no_run_to_go_on_with(tmp_path):
    fit(tmp_path, TURNS)
    with pytest.raises(UserError, match="a model without its optimizer.*resume") as error:
        load(tmp_path / BEST)
    assert one_line(error)


def test_what_is_not_ours_stays(tmp_path):
    fit(tmp_path, TURNS)
    (tmp_path / BEST / "notes.txt").write_text("mine")
    (tmp_path / BEST / ".step-00000003.part").mkdir()  # what a death left
    fit(tmp_path, TURNS)
    assert (tmp_path / BEST / "notes.txt").read_text() == "mine"
    assert not (tmp_path / BEST / ".step-00000003.part").exists()


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    with pytest.raises(UserError, match="a finite loss of the held-out text, got nan"):
        fit(tmp_path, [5.0] + 11 * [float("nan")])
