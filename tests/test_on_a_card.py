"""A whole run on a GPU, as far as the host goes: room, plans, saves, signals. The card is a double.

What it computes is in test_cuda_engine.py; how a run goes on a processor, in test_train.py.
"""

import itertools
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from idle_card import IdleCard, install

import nanoeuler as ne
from nanoeuler import measurements
from nanoeuler.cli import train as commands
from nanoeuler.cli.main import main
from nanoeuler.engines import registry
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESETS
from nanoeuler.planning import doctor, memory
from nanoeuler.planning import gpu_memory as planned
from nanoeuler.training.checkpoint import read_origin
from nanoeuler.training.run import Settings

RIVER = Path(__file__).parents[1] / "data" / "river.txt"
BIG = PRESETS["euler-116m"]


def test_a_batch_that_does_not_fit_goes_through_in_parts(monkeypatch):
    install(monkeypatch, IdleCard(free=8e9))
    monkeypatch.setattr(planned, "step_bytes", cache(planned.step_bytes))  # each is asked for often
    size = planned.step_bytes(BIG, 64, 1, "cuda") / 1e9
    (seen,) = (row for row in measurements.load("gpu") if row["what"] == "peak memory" and
               row["case"] == "euler-116m 64x512 bf16" and row["engine"] == "cuda" and
               row["peer"] == "torch compile")  # fmt: skip
    # As it came on an H200, with every n kept, or before it was.
    norms, took = 2 * 16 * 64 * 512 * 768 * 2 / 1e9, seen["value"] * 2**30 / 1e9
    assert pytest.approx(took, rel=0.1) in (size, size - norms)
    parts, again = planned.fitting(BIG, 64, 1, "cuda")
    assert not again
    room = 8e9 - planned.SPARE
    assert parts > 1 and planned.step_bytes(BIG, 64, parts, "cuda") <= room
    assert planned.step_bytes(BIG, 64, parts // 2, "cuda") > room
    assert f", each batch in {parts} parts; " in planned.words(BIG, 64, parts, "cuda")
    assert planned.fitting(BIG, 64, 8, "cuda") == (8, False)  # as many as were asked for
    assert planned.fitting(BIG, 1, 1, "cuda") == (1, False)
    install(monkeypatch, IdleCard(free=1e9))
    with pytest.raises(UserError) as caught:
        planned.fitting(BIG, 64, 1, "cuda")
    least = planned.in_parts(BIG, 64, 64, "cuda", None, True) / 1e9
    said = str(caught.value)
    assert f"one sequence at a time and with --recompute, takes {least:.2f} GB" in said
    assert "has 1.00 of its 24.00 GB free: choose a smaller model" in said
    install(monkeypatch, IdleCard(capability=(7, 5)))
    planned.step_bytes.cache_clear()
    with pytest.raises(UserError, match="compute capability 8.0"):
        planned.fitting(BIG, 64, 1, "cuda")


LONG = replace(PRESETS["euler-10m"], context=32768)


def test_blocks_are_run_again_where_asked_or_where_a_sequence_does_not_fit_otherwise(monkeypatch):
    """Parts first, since they cost less time: a part of one sequence cannot be divided."""
    plain, again = (planned_bytes(monkeypatch, each) for each in (False, True))
    assert again < 0.6 * plain
    for free, expected in ((plain + 1e6, (2, False)), (plain - 1e6, (1, True))):
        install(monkeypatch, IdleCard(free=free + planned.SPARE))
        assert planned.fitting(LONG, 2, 1, "cuda") == expected
    install(monkeypatch, IdleCard())
    assert planned.fitting(LONG, 2, 1, "cuda") == (1, False)
    assert planned.fitting(LONG, 2, 1, "cuda", None, True) == (1, True)
    told = planned.words(LONG, 2, 2, "cuda", None, True)
    assert "each batch in 2 parts, blocks run again in the backward pass; " in told
    assert "again" not in planned.words(LONG, 2, 1, "cuda")


def planned_bytes(monkeypatch, again):
    """What a step of LONG takes, a sequence at a time."""
    install(monkeypatch, IdleCard())
    return planned.in_parts(LONG, 2, 2, "cuda", None, again)


def test_a_run_that_recomputes_says_so_and_goes_on_so(monkeypatch, tmp_path, capsys):
    """By itself on a small card, and asked for; a processor has nothing of the kind."""
    install(monkeypatch, IdleCard())
    out = tmp_path / "run"
    sizes = ["--dim", "64", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--context", "16"]
    train = ["train", "--data", str(RIVER), *sizes, "--vocab-size", "512", "--steps", "3"]
    assert main([*train, "--out", str(out), "--engine", "cuda", "--recompute"]) == 0
    assert "blocks run again in the backward pass" in capsys.readouterr().err
    assert read_origin(out).settings.recompute
    assert main([*train, "--out", str(tmp_path / "b"), "--engine", "cpu", "--recompute"]) == 2
    assert "the engine cpu keeps what a step computes" in capsys.readouterr().err
    with pytest.raises(UserError, match="expected recompute to be True or False, got 1"):
        Settings(recompute=1)
    with pretended_ranks(), pytest.raises(UserError, match="several ranks keep what a step"):
        registry.make_stepper("cuda", None, None, recompute=True)


@contextmanager
def pretended_ranks():
    """Inside it steppers are those of several ranks."""
    before = registry.LEAD.set(lambda *given: None)
    yield
    registry.LEAD.reset(before)


@pytest.mark.parametrize("preset", ["gpt2-124m", "euler-116m"])
def test_the_models_of_the_road_train_on_8_gb_with_a_batch_chosen_for_them(monkeypatch, preset):
    """On a GeForce whose screen has taken half a gigabyte; on 12 GB 16 sequences go whole."""
    for free, most in (7.5e9, 2), (11.5e9, 1):
        install(monkeypatch, IdleCard(capability=(8, 9), free=free))
        parts, again = planned.fitting(PRESETS[preset], 16, 1, "cuda")
        assert parts <= most and not again


def test_a_run_on_a_card_asks_for_the_cards_memory_and_little_of_this_machine(
    monkeypatch, tmp_path
):
    """Of this machine's memory a step on its processor would take 20 GB, and on a card 3."""
    install(monkeypatch, IdleCard(free=1e9))
    settings = Settings(steps=1, batch_size=64)

    def begin(engine, here):
        monkeypatch.setattr(memory, "limit", lambda: here)
        ne.train(RIVER, out=tmp_path / "a", config=BIG, settings=settings, engine=engine)

    with pytest.raises(UserError, match="of the GPU's memory"):
        begin("cuda", 5e9)
    with pytest.raises(UserError, match="and this machine has 2.0 GB"):
        begin("cpu", 2e9)
    with pytest.raises(UserError, match="trained on a GPU, needs 2.8 GB of memory"):
        begin("cuda", 2e9)
    assert not (tmp_path / "a").exists()


def test_the_doctor_knows_the_card(monkeypatch):
    install(monkeypatch, IdleCard())
    monkeypatch.setattr(doctor, "no_gpu", lambda: "")
    told = "GPU        an idle card, compute capability 9.0, 20.0 of 24.0 GB free; --engine cuda"
    assert told in doctor.report()
    install(monkeypatch, IdleCard(capability=(7, 5)))
    assert "too old for our engines" in planned.found()


def test_a_run_says_what_it_takes_of_the_card(monkeypatch, tmp_path, capsys):
    card = install(monkeypatch, IdleCard())
    out = tmp_path / "run"
    sizes = ["--dim", "64", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--context", "16"]
    code = main(["train", "--data", str(RIVER), "--out", str(out), *sizes, "--steps", "3",
                 "--batch-size", "4", "--engine", "cuda", "--vocab-size", "512"])  # fmt: skip
    said = capsys.readouterr().err
    assert code == 0, said
    size = planned.step_bytes(ne.load(out).config, 4, 1, "cuda")
    assert f"memory  {size / 1e9:.2f} GB of the an idle card" in said
    # The memory of one stepper, and not of a second one that tries steps.
    assert size / 2 < card.most < 1.5 * size


def test_an_answer_is_short_and_no_question_ends_a_run():
    def reply(question):
        if len(question) > 9:
            raise UserError("shorten it")
        yield from itertools.repeat("a")

    model = SimpleNamespace(chat=lambda: SimpleNamespace(reply=reply))
    assert commands._answer(model, "short?") == "a" * commands.ANSWER_TOKENS
    assert commands._answer(model, "much longer?") == "(shorten it)"
