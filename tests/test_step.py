"""The script that compares training steps, as far as no GPU is needed: jobs, batches, rows."""

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest
import step_inside
import step_sides
from bench import step

from nanoeuler.engines.gpu.step.precision import BF16
from nanoeuler.model.config import PRESETS
from nanoeuler.tokenizer.tokenizer import Tokenizer

BARS = [  # what, case, of the rows that are asked of ours
    ("training step", "gpt2-124m 16x1024 bf16"),
    ("peak memory", "gpt2-124m 16x1024 bf16"),
    ("training step", "euler-116m 16x512 bf16"),
    ("training step", "euler-116m 64x512 bf16"),
    ("peak memory", "euler-116m 64x512 bf16"),
    ("training step", "euler-116m 16x512 TF32"),
    ("loss after 500 steps", "gpt2-124m 16x1024 bf16"),
    ("training step", "gpt2-124m 16x1024 bf16, kernels of 8.9"),
    ("training step", "euler-116m 16x512 bf16, kernels of 8.9"),
    ("training step", "euler-116m 16x512 TF32, kernels of 8.9"),
]
SEEN = {"ms": 8.0, "least": 7.9, "most": 8.1, "MHz": 1500, "W": 600, "arrays": 2**31,
        "card": 2**32}  # fmt: skip


def outcome(part, factor):
    """What a job of a part may find."""
    if part == "curve":
        return {"losses": [factor * (10 - n / 100) for n in range(500)]}
    if part == "correct":
        return {"errors": {"sums": 1e-6, "a": 1e-3 * factor, "b": 2e-3}}
    return {name: factor * value for name, value in SEEN.items()}


def test_what_is_changed_for_comparison_is_a_number_of_precision():
    for numbers, _ in step_sides.OTHERS.values():
        assert BF16._replace(**numbers) != BF16 or not numbers


def test_every_bar_has_a_row_with_its_peer(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    journal = step.Journal({}, dry=True)
    parts = "correct", "time", "curve", "cards"
    for jobs, factor in zip(step.sides(parts), (1.0, 0.5, 1.0), strict=True):
        for job in jobs:
            if job.endswith("exact"):
                journal.tell(job, {"exact": True})
            else:
                journal.tell(job, outcome(job.split(":")[0], factor))
    rows = json.loads((tmp_path / "step.json").read_text())
    for what, case in BARS:
        (row,) = [r for r in rows if (r["what"], r["case"], r["engine"], r["peer"])
                  == (what, case, "cuda", "torch compile")]  # fmt: skip
        assert row["value"] / row["peer_value"] == pytest.approx(0.5)
    keys = [tuple(r[k] for k in ("what", "case", "engine", "peer")) for r in rows]
    assert len(keys) == len({*keys})  # none replaces another
    worst = [r for r in rows if r["what"] == "gradient error, worst beside"]
    assert len(worst) == 6 and {r["unit"] for r in worst} == {"sums"}
    assert len(json.loads((tmp_path / "curves.json").read_text())) == 9
    assert "0.500 of torch compile" in capsys.readouterr().out


def test_what_is_known_is_saved_though_the_rest_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    journal, (_, ours, torch) = step.Journal({}, dry=True), step.sides(["time"])
    journal.tell(torch[0], SEEN)
    assert {row["engine"] for row in journal.rows} == {"torch compile"}
    assert json.loads((tmp_path / "step.json").read_text()) == journal.rows
    before = len(journal.rows)
    journal.tell(ours[0], {"failed": "the process ended"})
    assert len(journal.rows) == before and "FAILED, the process ended" in capsys.readouterr().out


def test_what_adds_up_a_librarys_pieces_belongs_to_its_product():
    kernels = [("nvjet_splitK", 3.0), ("cublasLt::splitKreduce_kernel", 1.0), ("norm", 2.0)]
    assert step_inside.together(kernels) == [("nvjet_splitK", 4.0), ("norm", 2.0)]
    assert step_inside.together([]) == []


def test_memory_is_not_measured_twice():
    both, alone = step.sides(["time", "memory"]), step.sides(["memory"])
    assert both == step.sides(["time"]) and all(job.startswith("memory") for job in alone[1])
    assert {step.read(job)[0] for job in alone[2]} == {"memory"}
    assert step.read(both[2][0]) == ("time", "gpt2-124m", 16, 1024, "bf16", "torch compile")


def test_a_step_of_another_card_pretends_and_the_next_one_does_not(monkeypatch):
    monkeypatch.setenv(step.PRETENDED, "8.0")
    _, ours, torch = step.sides(["cards"])
    assert step.read(ours[2])[1:5] == ("euler-116m", 16, 512, "TF32")
    for job, said in (ours[0], "8.9x2"), (torch[0], None), (step.sides(["time"])[1][0], None):
        step.pretend(job, dry=True)  # an emulated card has two multiprocessors
        assert step.os.environ.get(step.PRETENDED) == said
    step.pretend(ours[0], dry=True)
    assert step.card(True).card.capability == (8, 9)
    assert step.FILES["cards"] == "cards"


def test_distances_of_curves_are_of_means():
    ours, theirs = (
        {"losses": [x + sign * 0.1 * (-1) ** n for n in range(100)]}
        for x, sign in ((3, 1), (3.004, -1))
    )
    assert step.apart(ours, theirs) == pytest.approx(0.004)


def test_both_sides_have_the_same_batches_and_small_models_the_same_switches(monkeypatch):
    monkeypatch.delenv("NANOEULER_TOKENS", raising=False)
    step_sides.tokens.cache_clear()
    for preset in ("gpt2-124m", "euler-116m"):
        config, tiny = PRESETS[preset], step_sides.config_of(preset, dry=True)
        for name in ("norm", "position", "mlp", "bias", "tied", "n_predict", "integrator"):
            assert getattr(tiny, name) == getattr(config, name)
        first, second = (step_sides.batches(config, 16, config.context)(3) for _ in range(2))
        assert all((a == b).all() for a, b in zip(first, second, strict=True))
        words, targets = first
        assert words.shape == (16, config.context) and targets.shape[2] == config.n_predict
        assert (targets[:, :-1, 0] == words[:, 1:]).all() and words.max() < config.vocab_size


def test_tokens_of_a_folder_are_used(tmp_path, monkeypatch):
    texts = [b"the river runs " * 40, b"and on it runs " * 30]
    (tmp_path / "a.txt").write_bytes(texts[0])
    with gzip.open(tmp_path / "b.txt.gz", "wb") as file:
        file.write(texts[1])
    monkeypatch.setattr(Tokenizer, "train", lambda texts, size: SimpleNamespace(
        encode=lambda text: np.frombuffer(text, np.uint8)))  # fmt: skip
    step_sides.make_tokens(tmp_path, tmp_path / "ids.npy")
    monkeypatch.setenv("NANOEULER_TOKENS", str(tmp_path / "ids.npy"))
    step_sides.tokens.cache_clear()
    assert step_sides.tokens("").tobytes() == np.frombuffer(
        b"".join(texts), np.uint8).astype(np.uint16).tobytes()  # fmt: skip
    step_sides.tokens.cache_clear()
