"""The whole road: which commands it types, what it passes by, where it ends, what it says first."""

import json
import re
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import sketches
import typer

import nanoeuler.__main__  # noqa: F401  adds the command
from nanoeuler.cli import main as cli
from nanoeuler.cli import pipeline
from nanoeuler.cli import train as cli_train
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESET, PRESETS, ModelConfig
from nanoeuler.model.weights import Weights
from nanoeuler.planning import plan
from nanoeuler.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer
from nanoeuler.training import dpo as preferring
from nanoeuler.training import loop
from nanoeuler.training.checkpoint import load, load_model, write_model
from nanoeuler.training.folder import checkpoints
from nanoeuler.training.run import Settings

STORY = Path(__file__).parents[1] / "data" / "river.txt"
NAMES = ["train", "sft", "prefer", "eval", "eval"]


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Pictures that are not drawn, and short samples: most of these runs' time otherwise."""
    with sketches.drawn(), mock.patch.multiple(cli_train, SAMPLE_TOKENS=9, ANSWER_TOKENS=9):
        yield


@pytest.fixture
def folder(tmp_path):
    lines = [x for x in STORY.read_text(encoding="utf-8").split(". ") if 30 < len(x) < 70][:24]
    asked = [(f"What comes after {a[:12]}?", b) for a, b in zip(lines, lines[1:], strict=False)]
    pairs = [{"question": q, "answer": a} for q, a in asked]
    better = [{"question": q, "chosen": a, "rejected": a[::-1]} for q, a in asked]
    for name, records in ("pairs.jsonl", pairs), ("better.jsonl", better):
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in records))
    return tmp_path


def walk(folder, capfd, *more, out="runs"):
    """(exit code, the names of the commands typed, stdout, stderr) of `nanoeuler all`."""
    words = ["all", "--size", "try", "--out", str(folder / out), "--data", str(STORY),
             "--pairs", str(folder / "pairs.jsonl"), "--comparisons", str(folder / "better.jsonl"),
             "--engine", "cpu", *more]  # fmt: skip
    code = cli.main(words)
    said, err = capfd.readouterr()
    return code, re.findall(r"(?m)^\$ nanoeuler (\w+)", said), said, err


def weights(run):
    return load_model(run)[2].flat


@contextmanager
def stopped(step):
    """Ctrl-C once the metrics of this step are written; nobody presses it in a step that isn't."""
    add_metrics = preferring.add_metrics

    def pressed(out, line):
        add_metrics(out, line)
        if line["step"] == step:
            signal.raise_signal(signal.SIGINT)

    with (
        mock.patch.object(loop, "add_metrics", pressed),
        mock.patch.object(preferring, "add_metrics", pressed),
    ):
        yield


def test_a_road_that_was_stopped_ends_where_one_ends_that_was_not(folder, capfd):
    code, typed, said, _ = walk(folder, capfd, out="whole")
    assert code == 0 and typed == NAMES and f"chat --from {folder}/whole/preferred" in said
    judged = [f"bytes of {folder}/whole/base/data" in line for line in said.splitlines()]
    assert sum(judged) == 2  # of a file the held-out part

    # The same command four times: it is stopped inside its first, its second and its third stage.
    for step, names, run in (
        (13, ["train"], "base"), (9, ["train", "sft"], "chat"), (2, ["sft", "prefer"], "preferred"),
    ):  # fmt: skip
        with stopped(step):
            code, typed, _, err = walk(folder, capfd)
        assert code == 2 and typed == names and "interrupted" in err
        (at, _), steps = checkpoints(folder / "runs" / run)[-1], load(folder / "runs" / run)
        assert step <= at < steps.settings.steps and f"step {at} of" in err
    shutil.rmtree(folder / "runs" / "chat")  # and somebody tidies up
    code, typed, said, err = walk(folder, capfd)
    assert code == 0 and typed == NAMES[1:]
    assert re.search(r"runs/base is done: [\d,]+ parameters, \d+ steps", said)
    assert "train" in err and re.search(r"base .* GB  done", err)
    assert re.search(r"preferred .* GB  about .*, begun", err)
    for run in "base", "chat", "preferred":
        ends = (weights(folder / out / run) for out in ("whole", "runs"))
        np.testing.assert_array_equal(*ends)
    assert (weights(folder / "runs" / "chat") != weights(folder / "runs" / "preferred")).any()


def test_a_model_from_elsewhere_is_a_stage_that_has_ended(tmp_path):
    config = ModelConfig(vocab_size=256 + len(SPECIAL_TOKENS), dim=8, n_layers=1, n_heads=1,
                         n_kv_heads=1, hidden=8, context=8, n_predict=1)  # fmt: skip
    write_model(tmp_path / "base", config, Tokenizer([]), Weights(config), "elsewhere")
    how = pipeline.SIZES["try"], tmp_path, str(STORY), "docs", "docs", {}
    first, *_, judges = pipeline.stages(*how)
    assert first.ended() and pipeline.made(first.out).endswith(" parameters, 0 steps")
    assert judges.flags[2] == str(STORY)  # the text is judged whole: it was never learned
    shutil.rmtree(tmp_path / "base")
    first, *_, judges = pipeline.stages(*how)
    assert not first.ended() and judges.flags[2] == str(tmp_path / "base" / "data")


def test_the_plan_does_nothing(folder, capfd):
    code, typed, said, err = walk(folder, capfd, "--plan")
    assert code == 0 and not typed and not said and not (folder / "runs").exists()
    assert re.findall(r"(?m)^  (\w+) .* GB  about [\d.]+ \w+$", err) == NAMES[:3]


def test_a_failure_ends_the_road_there(folder, capfd):
    (folder / "better.jsonl").write_text("no comparison\n")
    code, typed, _, err = walk(folder, capfd)
    assert code == 2 and typed == NAMES[:3] and "line 1 of" in err and "Traceback" not in err
    assert not (folder / "runs" / "preferred").exists()


def test_stages_go_on_with_the_best_of_the_stage_before(tmp_path, monkeypatch):
    from nanoeuler.training import best

    monkeypatch.setattr(best, "chosen", lambda out: Path(out) / "best")
    how = "a text", "docs", "docs", {"engine": "cpu"}
    every = pipeline.stages(pipeline.SIZES["try"], tmp_path, *how)
    said = [stage.words() for stage in every]
    assert [words[0] for words in said] == NAMES
    assert said[0][1:3] == ["--data", "a text"] and "--resume" not in said[0]
    assert all(words[-2:] == ["--engine", "cpu"] for words in said[3:])  # judges, too
    for words, base in (said[1], "base"), (said[2], "chat"):
        at = words.index("--from")
        assert words[at + 1] == str(tmp_path / base / "best")


def test_a_large_model_is_judged_where_it_was_trained(tmp_path):
    shared = {"engine": "cuda", "ranks": 2}
    every = pipeline.stages(pipeline.SIZES["gpu"], tmp_path, "books", "docs", "docs", shared)
    assert [stage.name for stage in every] == ["train", "sft", "eval", "eval"]
    assert all(stage.flags[-2:] == ["--engine", "cuda"] for stage in every[2:])


def test_a_code_that_is_not_zero_is_handed_on(tmp_path):
    every, seen = pipeline.stages(pipeline.SIZES["try"], tmp_path, "docs", "docs", "docs", {}), []

    def run(words):
        seen.append(words[0])
        return 130 if words[0] == "sft" else 0

    with pytest.raises(typer.Exit) as ended:
        pipeline.run_stages(every, run)
    assert ended.value.exit_code == 130 and seen == ["train", "sft"]


def test_sizes():
    assert pipeline.SIZES["laptop"] == (PRESET, {}, {}, {}, {})  # what commands do without flags
    assert pipeline.chosen_size("auto", "cpu", None) is pipeline.SIZES["laptop"]
    assert pipeline.chosen_size("auto", "cuda", None) is pipeline.SIZES["gpu"]
    evening = pipeline.chosen_size("gpu", "cuda", 240.0)
    assert evening.train["minutes"] == 240 and "steps" not in evening.train
    assert "steps" in pipeline.SIZES["gpu"].train
    with pytest.raises(UserError, match="choose auto, try, laptop, gpu"):
        pipeline.chosen_size("huge", "cpu", None)


def test_minutes_and_ranks_are_predicted():
    (_, alone, _), *_ = pipeline.forecast(pipeline.SIZES["gpu"], "cuda", 1)
    (_, shared, _), *_ = pipeline.forecast(pipeline.SIZES["gpu"], "cuda", 2)
    assert 0.4 * alone < shared < 0.6 * alone
    (_, evening, _), *_ = pipeline.forecast(pipeline.chosen_size("gpu", "cuda", 240.0), "cuda", 1)
    assert evening == 240 * 60


def test_memory_on_processors_is_that_of_a_rank():
    size, config = pipeline.SIZES["laptop"], PRESETS[PRESET]
    with mock.patch.object(plan, "product_rate", lambda threads: 1e12):
        alone, shared = ([memory for *_, memory in pipeline.forecast(size, "cpu", ranks)]
                         for ranks in (1, 2))  # fmt: skip
    held = sum(plan.cpu_memory(config, Settings().batch_size, ranks=2).values())
    assert shared[0] == shared[1] == plan.PROCESS_BYTES + held < alone[0]
    assert shared[2] == alone[2]  # prefer has no ranks
