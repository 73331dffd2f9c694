"""Run directories: whole after any crash, refused with one line when anything is wrong."""

import json
import os
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from deaths import Died, dying_before
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from nanoeuler import checkpoint
from nanoeuler.checkpoint import Run, Settings, load, load_model, save
from nanoeuler.config import ModelConfig
from nanoeuler.errors import UserError
from nanoeuler.tokenizer import Tokenizer

RIVER = Path(__file__).parents[1] / "data" / "river.txt"
CONFIG = ModelConfig(
    vocab_size=280, dim=8, n_layers=2, n_heads=2, n_kv_heads=1, hidden=8, context=8, n_predict=2
)
FILES = ("model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json")


def run_at(step, seed=3):
    """A run whose every number depends on `step`."""
    run = Run.begin(CONFIG, Settings(steps=9), tokenizer(), "digest")
    rng = np.random.default_rng((seed, step))
    for tensors in (run.weights, run.optimizer.m, run.optimizer.v):
        for tensor in tensors.values():
            tensor[...] = rng.random(tensor.shape)
    run.step = step
    return run


def tokenizer(cache=[]):  # noqa: B006 (trained once)
    if not cache:
        cache.append(Tokenizer.train(RIVER.read_bytes(), CONFIG.vocab_size))
    return cache[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    save(out, run_at(4))
    return out


def same(a, b):
    return all(
        np.array_equal(x.flat, y.flat)
        for x, y in (
            (a.weights, b.weights), (a.optimizer.m, b.optimizer.m), (a.optimizer.v, b.optimizer.v)
        )
    )  # fmt: skip


def test_what_is_saved_comes_back(saved):
    run, back = run_at(4), load(saved)
    assert same(run, back) and (back.config, back.settings) == (run.config, run.settings)
    assert (back.step, back.data, back.tokenizer.hash) == (4, "digest", run.tokenizer.hash)
    config, back_tokenizer, weights = load_model(saved)
    assert config == CONFIG and back_tokenizer.hash == run.tokenizer.hash
    assert np.array_equal(weights.flat, run.weights.flat)


def test_saving_twice_gives_the_same_bytes(saved, tmp_path):
    save(tmp_path, run_at(4))
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (saved / name).read_bytes(), name
    assert sorted(os.listdir(tmp_path)) == sorted(FILES)


@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_a_death_at_any_write_leaves_one_whole_save(name, saved, tmp_path):
    steps = []
    for call in range(1, 20):
        out = tmp_path / f"{call}"
        shutil.copytree(saved, out)
        died = True
        with dying_before(os, name, call):
            try:
                save(out, run_at(5))
                died = False
            except Died:
                pass
        weights = load_model(out)[2]
        back = load(out)
        steps.append(back.step)
        assert same(back, run_at(back.step)) and np.array_equal(weights.flat, back.weights.flat)
        save(out, run_at(6))  # and life goes on
        assert same(load(out), run_at(6))
        if not died:
            break
    assert steps == sorted(steps) and set(steps) == {4, 5} and len(steps) >= 5


def test_a_death_of_a_death(saved, tmp_path):
    """Die just after the commitment, then while the next save is under way, then load."""
    out = shutil.copytree(saved, tmp_path / "run")
    for step, call in ((5, 5), (6, 3)):
        with pytest.raises(Died), dying_before(os, "replace", call):
            save(out, run_at(step))
        assert same(load(out), run_at(5))


def test_to_use_a_model_changes_nothing(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    with pytest.raises(Died), dying_before(os, "replace", 5):
        save(out, run_at(5))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    load_model(out)
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


def test_a_full_disk_is_one_line_and_the_save_before_is_whole(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    write = Path.write_bytes

    def full(self, data):
        write(self, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with mock.patch.object(Path, "write_bytes", full), pytest.raises(UserError, match="No space"):
        save(out, run_at(5))
    assert same(load(out), run_at(4))
    assert sorted(os.listdir(out)) == sorted((*FILES, "metrics.jsonl"))


def test_weights_that_are_not_finite_are_not_saved(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    run = run_at(5)
    run.weights["norm"][0] = np.nan
    with pytest.raises(UserError, match="not finite"):
        save(out, run)
    assert same(load(out), run_at(4))


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be written"):
        save(tmp_path / "file", run_at(1))
    with pytest.raises(UserError):
        load(tmp_path / "file")
    with pytest.raises(UserError, match="no config.json"):
        load(tmp_path / "nowhere")


def refused(out, words=None):
    """Continuing the run in `out` is refused."""
    with pytest.raises(UserError, match=words):
        load(out)


@given(data=st.data(), name=st.sampled_from(FILES))
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_truncated_files_are_refused(saved, tmp_path_factory, data, name):
    out = shutil.copytree(saved, tmp_path_factory.mktemp("cut") / "run")
    whole = (saved / name).read_bytes()
    end = data.draw(st.integers(0, len(whole) - 1))
    (out / name).write_bytes(whole[:end])
    if name == "config.json" and end == len(whole) - 1:
        assert same(load(out), run_at(4))  # only the newline at the end is gone
    elif name == "tokenizer.json" and whole[:end].strip() == whole.strip():
        load(out)  # likewise
    else:
        refused(out)


@given(data=st.data(), name=st.sampled_from(FILES))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_bytes_changed_at_random_never_crash(saved, tmp_path_factory, data, name):
    """Whatever is changed, the answer is a run or a UserError. Headers are hit most."""
    out = shutil.copytree(saved, tmp_path_factory.mktemp("flip") / "run")
    changed = bytearray((saved / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, min(len(changed), 1500) - 1))] = data.draw(
            st.integers(0, 255)
        )
    (out / name).write_bytes(changed)
    try:
        assert np.isfinite(load(out).weights.flat).all()
    except UserError as error:
        assert "\n" not in str(error)


def edit(out, name, change):
    tensors = load_file(out / f"{name}.safetensors")
    change(tensors)
    save_file(tensors, out / f"{name}.safetensors", metadata={"step": "4"})


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model", lambda t: t["norm"].__setitem__(1, np.nan), "norm has values that are not"),
        ("model", lambda t: t["output"].__setitem__((1, 1), np.inf), "output has values"),
        ("optimizer", lambda t: t["m.norm"].__setitem__(1, np.nan), "m.norm has values"),
        ("optimizer", lambda t: t["v.norm"].__setitem__(1, -1), "mean of squares is negative"),
        ("model", lambda t: t.pop("norm"), "found nothing"),
        ("model", lambda t: t.update(extra=np.zeros(3)), "absent"),
        ("model", lambda t: t.update(norm=np.zeros(9, np.float32)), "belongs to another model"),
        ("model", lambda t: t.update(norm=np.zeros(8, np.float64)), "belongs to another model"),
        ("model", lambda t: t.update(norm=np.zeros((8, 1), np.float32)), "another model"),
    ],
)
def test_wrong_tensors_are_refused(saved, tmp_path, name, change, words):
    out = shutil.copytree(saved, tmp_path / "run")
    edit(out, name, change)
    refused(out, words)


def test_a_pair_of_two_steps_is_refused(saved, tmp_path):
    other = tmp_path / "other"
    save(other, run_at(5))
    for name in ("model", "optimizer"):
        out = shutil.copytree(saved, tmp_path / name)
        shutil.copy(other / f"{name}.safetensors", out)
        refused(out, f"expected {name}.safetensors of step 4 .* found step 5")
        (out / f"{name}.safetensors").unlink()
        refused(out, "no such file")


def test_another_tokenizer_is_refused(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    Tokenizer.train(b"another text altogether, " * 50, 270).save(out / "tokenizer.json")
    refused(out, "expected the tokenizer .* found")
    with pytest.raises(UserError, match="expected the tokenizer"):
        load_model(out)
    (out / "tokenizer.json").unlink()
    refused(out)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("step",), -1), (("step",), "4"), (("step",), 10), (("step",), True), (("step",), None),
        (("data",), 7), (("tokenizer",), None), (("model",), []), (("training",), "fast"),
        (("model", "n_layers"), 10**12), (("model", "dim"), 10**9), (("model", "dim"), 8.5),
        (("model", "vocab_size"), 2**62), (("model", "surprise"), 1), (("training", "lr"), "high"),
        (("training", "lr"), -1), (("training", "steps"), 1.5), (("training", "beta2"), 1),
        (("training", "lr"), float("nan")), (("training", "seed"), -1),
        (("training", "warmup"), None),
    ],
)  # fmt: skip
def test_hostile_records_are_refused_at_once(saved, tmp_path, where, value):
    out = shutil.copytree(saved, tmp_path / "run")
    record = json.loads((out / "config.json").read_text())
    *path, last = where
    inner = record
    for key in path:
        inner = inner[key]
    inner[last] = value
    (out / "config.json").write_text(json.dumps(record))
    refused(out)


def test_records_that_are_no_objects_are_refused(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    for text in ("", "[]", "7", "null", "[" * 100_000, '{"step": 4}', "\x00", "é"):
        (out / "config.json").write_bytes(text.encode("latin1"))
        refused(out)


def test_metrics_lose_their_torn_end_and_the_steps_that_come_again(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    for step in range(1, 7):
        checkpoint.add_metrics(out, {"step": step, "loss": 1 / step})
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    assert [line["step"] for line in checkpoint.read_metrics(out)] == [1, 2, 3, 4, 5, 6]
    load(out)
    assert [line["step"] for line in checkpoint.read_metrics(out)] == [1, 2, 3, 4]
    assert (out / "metrics.jsonl").read_text().endswith("}\n")


def test_settings_say_what_they_expect():
    for name, value, words in (
        ("steps", 0, "a whole number above 0, got 0"),
        ("batch_size", 2.0, "a whole number above 0, got 2.0"),
        ("lr", float("inf"), "a number above 0, got inf"),
        ("seed", -1, "a whole number of at least 0, got -1"),
        ("weight_decay", -0.1, "of at least 0"),
        ("beta2", 1.5, "below 1"),
    ):
        with pytest.raises(UserError, match=f"{name} to be .*{words}"):
            Settings(**{name: value})
    assert Settings(lr=1).lr == 1
