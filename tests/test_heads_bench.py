"""The script that compares K = 1 with K = 4, as far as no GPU is needed; and the one of guesses."""

import json
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from bench import ahead, heads

from nanoeuler.data.batches import Batches
from nanoeuler.data.validation import HeldOut
from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.engines.registry import make_stepper
from nanoeuler.files import project_root
from nanoeuler.model.config import PRESETS, ModelConfig
from nanoeuler.model.weights import initialise
from nanoeuler.planning.counts import flops_per_token
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.checkpoint import load_model
from nanoeuler.training.loop import fit
from nanoeuler.training.run import Run, Settings

TINY = ModelConfig(vocab_size=300, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, hidden=24,
                   context=16, n_predict=4)  # fmt: skip


def test_one_head_gets_more_steps_for_the_same_operations():
    four = PRESETS[heads.PRESET]
    one = replace(four, n_predict=1)
    steps = heads.steps_of(one, heads.STEPS)
    assert heads.steps_of(four, heads.STEPS) == heads.STEPS < steps
    costs = heads.STEPS * flops_per_token(four), steps * flops_per_token(one)
    assert costs[1] == pytest.approx(costs[0], rel=1 / heads.STEPS)


def test_each_seed_has_both_kinds_and_two_processes_share_them():
    assert len({*heads.RUNS}) == 2 * heads.SEEDS and heads.SEEDS >= 4
    for half in heads.RUNS[:4], heads.RUNS[4:]:
        for seed in {seed for seed, _ in half}:
            assert {K for other, K in half if other == seed} == {1, 4}


@pytest.fixture(scope="module")
def books():
    """A text, as a prepared folder has it."""
    text = (project_root() / "data" / "river.txt").read_bytes()
    tokenizer = Tokenizer.train([text], TINY.vocab_size)
    ids = np.array(tokenizer.encode(text), np.int32)
    return SimpleNamespace(train=ids, held_out=ids[:100], tokenizer=tokenizer, digest="0" * 16)


def test_runs_leave_files_once_and_rows(books, tmp_path, capsys):
    options = Namespace(steps=10, batch=2, runs=[0, 1], to=tmp_path, keep=tmp_path / "run",
                        where={"device": "a machine", "commit": "abc"})  # fmt: skip
    make = lambda *given: make_stepper("cpu", *given)  # noqa: E731
    heads.train_all(options, books, TINY, make)
    whole, rows = heads.gathered([tmp_path])
    by_kind = {run["K"]: run for run in whole["runs"]}
    assert by_kind[4]["steps"] == 10 < by_kind[1]["steps"]
    for run in by_kind.values():
        assert run["held_out"][0][0] == 1 and run["held_out"][-1][0] == run["steps"]
        assert run["bits_per_byte"] < run["held_out"][0][1]
        assert run["losses"][-1][0] == run["steps"] and len(run["last_losses"]) == run["K"]
    assert {row["value"] for row in rows} == {run["bits_per_byte"] for run in whole["runs"]}
    assert {(row["device"], row["commit"]) for row in rows} == {("a machine", "abc")}
    assert load_model(tmp_path / "run")[0] == TINY
    capsys.readouterr()
    heads.train_all(options, books, TINY, None)  # with nothing to train with
    assert capsys.readouterr().out.count("is there") == 2


def test_a_run_is_that_of_the_command_line(books, tmp_path):
    """The same weights as `fit` has after the same steps, so that the comparison is of `train`."""
    settings = Settings(steps=6, batch_size=2, warmup=2)
    runs = [Run.begin(TINY, settings, books.tokenizer, books.digest) for _ in range(2)]
    found = heads.trained(runs[0], books, lambda *given: make_stepper("cpu", *given))
    shape, lines = (2, TINY.context, TINY.n_predict), []
    fit(tmp_path, runs[1], Batches(books.train, *shape, 0),
        HeldOut.from_tokens(books.held_out, books.tokenizer, *shape), engine="cpu",
        on_step=lines.append)  # fmt: skip
    assert np.array_equal(runs[0].weights.flat, runs[1].weights.flat)
    assert found["bits_per_byte"] == lines[-1]["bits_per_byte"]
    assert found["losses"] == [[i, round(line["loss"], 4)] for i, line in enumerate(lines, 1)]


def test_what_is_said_of_guesses_adds_up():
    config = replace(TINY, context=64)
    weights = initialise(config, seed=0)
    reader = CpuReader(config, weights, threads=1)
    prompts = ahead.prompts_of(np.arange(300, dtype=np.int32) % 300, 3)
    assert [len(prompt) for prompt in prompts] == [ahead.PROMPT] * 3 and prompts[0] != prompts[2]
    seen = ahead.written(reader, weights, prompts, 20, 3, 1.0, 2)
    count = seen.count
    # each pass yields a token that was not guessed, and those that were kept
    assert count.tokens == 60 and count.tokens - 3 == count.passes + sum(count.kept)
    rows = list(ahead.told("tiny", reader, weights, prompts, 8, 1))
    keys = [row[:2] for row in rows]
    assert len(keys) == len({*keys}) == 4 + 2 * (3 * 2 + 3)
    assert json.dumps(rows)
