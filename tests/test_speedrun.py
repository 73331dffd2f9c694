"""The race against the clock: when it began, how many steps are planned, records, refusals."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench import speedrun as bench

from nanoeuler.cli.main import main
from nanoeuler.data.dataset import Prepared
from nanoeuler.data.prepare import prepare_text
from nanoeuler.engines.gpu.step.muon import muon_builder, rules_of
from nanoeuler.engines.gpu.step.precision import PRECISIONS
from nanoeuler.engines.gpu.step.recording import Machine, record_step
from nanoeuler.engines.interface import Stepper, Taken
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESETS
from nanoeuler.model.weights import Weights
from nanoeuler.planning.step import RULES
from nanoeuler.tokenizer import tokenizer
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import speedrun as module
from nanoeuler.training.checkpoint import load
from nanoeuler.training.clock import Clock, Plan, process_age
from nanoeuler.training.folder import read_metrics
from nanoeuler.training.muon import Muon
from nanoeuler.training.optim import learning_rate
from nanoeuler.training.run import OPTIMIZERS, Settings
from nanoeuler.training.speedrun import RECIPES, Race, Recipe, recipe_of, speedrun
from nanoeuler.training.train import train

ROOT = Path(__file__).resolve().parents[1]
STORY = ROOT / "data" / "river.txt"
SIZES = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "hidden": 48, "context": 16}
TINY = "--dim 32 --layers 1 --heads 2 --kv-heads 1 --hidden 48 --context 16 --batch-size 2"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A prepared folder of the story."""
    folder = tmp_path_factory.mktemp("story") / "prepared"
    prepare_text(STORY, folder, vocab_size=300)
    return folder


def tiny(name="adamw", **settings):
    """A recipe, with a model of nearly nothing."""
    return recipe_of(name).with_changes(SIZES, {"batch_size": 2} | settings)


# ---- The clock


def test_the_age_of_a_process_counts_from_its_start():
    code = ("import time; time.sleep(0.5); from nanoeuler.training.clock import Clock; "
            "clock = Clock(300.0); print(clock(), clock.left, clock.source)")  # fmt: skip
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    whole, (age, left, source) = time.monotonic() - began, done.stdout.split()
    if source == "process":
        assert 0.5 <= float(age) <= whole + 0.02  # a tick of the system's clock, twice
    assert float(age) + float(left) == pytest.approx(300, abs=0.01)


@pytest.mark.parametrize("stat", ["", "1 (x) S", "1 (x) S " + "0 " * 18 + "many", None])
def test_where_the_system_does_not_say_it_is_none(stat, monkeypatch):
    if stat is None:  # sandboxes that know nothing say 0
        stat = "1 (x) S " + "0 " * 30
    assert process_age(stat, now=5.0) is None
    monkeypatch.setattr("nanoeuler.training.clock.process_age", lambda: None)
    clock = Clock(10.0)
    assert clock.source == "processor time" and 0 < clock() < time.process_time() + 1


def test_names_with_spaces_and_parentheses_are_passed_over():
    fields = " ".join(str(i) for i in range(4, 22))  # of /proc/self/stat, counted from 1
    assert process_age(f"12 (a ) (b) S {fields} 250 23", now=3.0) == pytest.approx(0.5)


# ---- The plan


@pytest.mark.parametrize("steps", [1, 2, 9, 30, 1000])
@pytest.mark.parametrize("warmup", [0, 1, 50])
def test_a_plan_that_nothing_corrects_is_the_trainers_schedule(steps, warmup):
    plan = Plan(3e-3, warmup)
    plan.revise(0, steps)
    for number in range(1, steps + 1):
        assert plan.rate(number) == pytest.approx(learning_rate(number, steps, 3e-3, warmup))


def test_before_the_plan_the_rate_is_that_of_a_run_without_an_end():
    plan = Plan(1e-3, 20)
    for number in (1, 7, 20, 21, 500):
        assert plan.rate(number) == pytest.approx(learning_rate(number, 2**63 - 1, 1e-3, 20))


@pytest.mark.parametrize("steps", [700, 1300])
def test_a_corrected_plan_has_no_jump_and_ends_at_zero(steps):
    plan, rates = Plan(1.0, 50), []
    plan.revise(20, 1000)
    number = 0
    while number < plan.steps:
        number += 1
        rates.append(plan.rate(number))
        if number == 500:
            plan.revise(500, steps)
    assert len(rates) == steps and plan.revisions == [[20, 1000], [500, steps]]
    slope = np.abs(np.diff(rates[50:])).max()
    assert slope < math.pi / 2 * max(1, 500 / (steps - 500)) / 950 * 1.01  # of half a cosine
    assert rates[-1] < (math.pi / (steps - 500)) ** 2 and rates[-2] > rates[-1]


def test_a_plan_has_at_least_one_step_more():
    plan = Plan(1.0, 0)
    plan.revise(30, -5)
    assert plan.steps == 31 and math.isfinite(plan.rate(31))


# ---- The race, with a stepper and a clock that are made up


class Time:
    """Seconds that pass when somebody says so."""

    def __init__(self, budget, age):
        self.budget, self.now, self.source = budget, age, "made up"

    def __call__(self):
        return self.now

    @property
    def left(self):
        return self.budget - self.now


class Steps(Stepper):
    """A device that works one step ahead; `pace` tells the seconds of a step."""

    def __init__(self, time, pace):
        self.time, self.pace, self.open = time, pace, None

    def step(self, tokens, targets, lr, number, first=None):
        known, self.open = self.finish(), number
        return known

    def finish(self):
        if self.open is None:
            return []
        number, self.open = self.open, None
        self.time.now += self.pace(number)
        return [Taken(number, np.ones(1), 1.0)]

    def sums(self, tokens, targets, first=None):
        self.time.now += 0.001
        return np.ones(1)


def raced(prepared, pace, budget=300.0, age=4.0):
    """A race with steps of this pace."""
    run, _, sides = module.begin(Prepared(prepared), tiny(), "cpu")
    clock = Time(budget, age)
    race = Race(run, Steps(clock, pace), sides, clock)
    race.take_steps()
    return race


PACES = {
    "steady": lambda n: 0.05 + (9.0 if n == 1 else 0),
    "slower": lambda n: 0.05 * (1 + n / 60_000) + (9.0 if n == 1 else 0),
    "faster": lambda n: 0.055 - 0.005 * min(1, n / 1000),
    "uneven": lambda n: 0.04 + 0.02 * (n % 2),
    "slow": lambda n: 3.0,
}


@pytest.mark.parametrize("name", PACES)
def test_a_race_uses_its_time_and_ends_at_a_rate_of_nearly_zero(name, prepared):
    race = raced(prepared, PACES[name])
    one = PACES[name](race.run.step)
    assert 300 - 1 - 1.5 * one < race.clock() <= 300 + 0.01
    assert race.first == pytest.approx(4 + PACES[name](1))
    assert [line["step"] for line in race.lines] == [*range(1, race.run.step + 1)]
    assert race.lines[-1]["lr"] < 0.003 * race.plan.peak
    assert race.run.step >= race.plan.steps - 1 or name == "slower"


def test_a_card_that_falls_asleep_at_the_end_cuts_the_run_in_time(prepared):
    race = raced(prepared, lambda n: 0.05 if n < 5700 else 0.2)
    assert race.run.step < race.plan.steps and race.clock() <= 300.2
    assert race.lines[-1]["lr"] < 0.003 * race.plan.peak


def test_the_plans_tell_every_rate(prepared):
    race = raced(prepared, PACES["slower"])
    again, todo = Plan(race.plan.peak, tiny().settings["warmup"]), [*race.plan.revisions]
    for line in race.lines:
        assert again.rate(line["step"]) == line["lr"]
        while todo and todo[0][0] == line["step"]:
            again.revise(*todo.pop(0))
    assert not todo and len(race.plan.revisions) == 5


def test_it_is_judged_three_times_on_the_way(prepared):
    race = raced(prepared, PACES["steady"])
    judged = [line["step"] / race.run.step for line in race.lines if "bits_per_byte" in line]
    assert judged == pytest.approx([0.25, 0.5, 0.75], abs=0.01)


@pytest.mark.parametrize("age, pace", [(301.0, 1.0), (4.0, 400.0)])
def test_too_little_time_for_a_step_is_refused(age, pace, prepared):
    with pytest.raises(UserError, match="300.0 s were over before step 1"):
        raced(prepared, lambda n: pace, age=age)


def test_a_step_that_is_not_finite_is_told(prepared, monkeypatch):
    monkeypatch.setattr(Steps, "finish", lambda self: [Taken(1, np.array([np.nan]), 1.0)])
    with pytest.raises(UserError, match="step 1: .* lower the learning rate"):
        raced(prepared, PACES["steady"])


# ---- Recipes


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_fields_that_there_are(name):
    recipe = recipe_of(name)
    config, settings = recipe.config(8192), Settings(**recipe.settings)
    assert config.n_predict == 1 and settings.batch_size * config.context == 32768
    assert settings.optimizer in OPTIMIZERS


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_can_be_recorded_for_a_gpu(name):
    """At full width, of two layers: every kernel takes the sizes."""
    config = replace(recipe_of(name).config(8192), n_layers=2)
    machine, precision = Machine((9, 0), 132), PRECISIONS["cuda"]
    if recipe_of(name).settings.get("optimizer") == "muon":
        optimizer = Muon.__new__(Muon)  # without moments, which nobody reads here
        builder = muon_builder(config, machine, precision, rules_of(optimizer, Weights(config)))
        assert builder.build_step(64, config.context, RULES).program.steps
    else:
        assert record_step(config, 64, config.context, machine, precision, RULES).program.steps


def test_a_recipe_may_be_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"model": {"mlp": "relu2"}, "settings": {"lr": 0.5}}))
    recipe = recipe_of(str(path))
    assert recipe == Recipe("mine", {"mlp": "relu2"}, {"lr": 0.5})
    assert recipe.config(300) == replace(PRESETS["euler-116m"], vocab_size=300, mlp="relu2")
    assert recipe.with_changes({}, {"seed": 3}).name == "mine"
    assert recipe.with_changes({"dim": 24}, {}).name == "mine, changed"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model": 3}', '{"modell": {}}'])
def test_a_file_that_is_no_recipe_is_refused(text, tmp_path):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UserError, match="recipe"):
        recipe_of(str(tmp_path / "bad.json"))


def test_a_pipe_is_no_recipe_and_no_record(tmp_path):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for read in (lambda: recipe_of(str(pipe)), lambda: module.read_records(pipe)):
        with pytest.raises(UserError, match="a pipe or a device"):
            read()


def test_unknown_names_are_refused(prepared):
    for given in ("adam", "nowhere.json"):
        with pytest.raises(UserError, match="recipe"):
            recipe_of(given)
    with pytest.raises(UserError, match="x names depth, which isn't one of"):
        Recipe("x", {"depth": 3}, {}).config(300)
    with pytest.raises(UserError, match="x names rate, which isn't one of"):
        module.begin(Prepared(prepared), Recipe("x", SIZES, {"rate": 3}), "cpu")


# ---- The whole, on a processor


def test_the_first_steps_are_the_trainers(prepared, tmp_path, monkeypatch):
    """With the number of steps known from the start, the weights are those of `train`."""
    monkeypatch.setattr(Race, "knows_enough", lambda self, number: False)
    monkeypatch.setattr(Race, "fits", lambda self, number: True)
    monkeypatch.setattr(module, "LOOKS", ())
    begin = Plan.__init__

    def planned(self, *given):
        begin(self, *given)
        self.revise(0, 12)

    monkeypatch.setattr(Plan, "__init__", planned)
    recipe = tiny(seed=3)
    record = speedrun(prepared, recipe, Clock(60.0, 0.0), engine="cpu", out=tmp_path / "a")
    settings = Settings(**recipe.settings, steps=12)
    train(prepared, tmp_path / "b", config=recipe.config(300), settings=settings, engine="cpu")
    ours, trainers = load(tmp_path / "a"), load(tmp_path / "b")
    assert (ours.weights.flat == trainers.weights.flat).all() and record["steps"] == 12
    assert record["bits_per_byte"] == read_metrics(tmp_path / "b")[-1]["bits_per_byte"]
    assert not record["cut"] and record["plans"] == [[0, 12]]


@pytest.mark.parametrize("name", RECIPES)
def test_a_race_on_a_processor(name, prepared, tmp_path):
    recipe = tiny(name)
    train(prepared, tmp_path / "compiled", config=recipe.config(300), engine="cpu",
          settings=Settings(**recipe.settings, steps=1))  # fmt: skip
    record = speedrun(prepared, tiny(name), Clock(4.0, 0.0), engine="cpu", out=tmp_path / "run")
    assert record["seconds"] <= 4.0 + module.LATE
    assert record["tokens"] == record["steps"] * 2 * 16 and record["first_step"] < 4
    assert record["corpus"] == "another corpus" and record["recipe"] == f"{name}, changed"
    run = load(tmp_path / "run")
    assert run.step == record["steps"] == len(read_metrics(tmp_path / "run"))
    assert run.settings.steps == run.step and math.isfinite(record["bits_per_byte"])
    with pytest.raises(UserError, match="new or empty"):
        speedrun(prepared, tiny(name), Clock(4.0, 0.0), engine="cpu", out=tmp_path / "run")


def test_the_tokenizer_is_read_once_and_not_hashed_again(prepared, tmp_path, monkeypatch):
    """GPT-2's 50,000 merges take a quarter of a second each time, and so does their hash."""
    known, load = Prepared(prepared).tokenizer.hash, Tokenizer.load.__func__
    found = []

    def counted(cls, path, known=""):
        found.append(known)
        return load(cls, path, known)

    monkeypatch.setattr(Tokenizer, "load", classmethod(counted))
    train(prepared, tmp_path / "run", engine="cpu", settings=Settings(steps=1, batch_size=2),
          config=replace(PRESETS["small"], **SIZES))  # fmt: skip
    assert found == [known]
    monkeypatch.delattr(tokenizer, "tokenizer_json")  # from which it would be computed
    clock = Time(300.0, 4.0)
    monkeypatch.setattr(module, "make_stepper", lambda *_, **__: Steps(clock, lambda n: 3.0))
    speedrun(prepared, tiny(), clock, engine="cpu")
    assert found == [known, known]


def test_the_books_are_known_by_their_checksum(prepared, monkeypatch):
    opened = Prepared(prepared)
    known = module.checksum(opened)
    assert module.corpus_of(opened) == "another corpus" and len(known) == 16
    monkeypatch.setitem(module.CORPORA, known, "the story")
    assert module.corpus_of(opened) == "the story"
    opened.digest = "0" * 16
    assert module.corpus_of(opened) == "another corpus"


# ---- The command


def command(line, code=0):
    assert main(["speedrun", *line.split()]) == code


def test_the_command_keeps_records_and_lists_them(prepared, tmp_path, capsys, monkeypatch):
    age = process_age() or time.process_time()  # of this process, which runs many tests
    log = tmp_path / "log" / "all.jsonl"
    command(f"--list --log {log}")
    assert "no speedrun has been recorded" in capsys.readouterr().out
    minutes = (age + 6) / 60
    command(f"--data {prepared} --engine cpu --recipe adamw {TINY} --minutes {minutes} --seed 7 "
            f"--log {log} --idea smaller --predicted 2.5")  # fmt: skip
    said = capsys.readouterr()
    assert said.out.count("\n") == 1 and "bits per byte" in said.out
    assert "isn't the corpus on which records are compared" in said.err
    (record,) = module.read_records(log)
    assert record["idea"] == "smaller" and record["predicted"] == 2.5
    assert record["settings"]["seed"] == 7 and record["model"]["dim"] == 32
    module.add_record(log, record | {"bits_per_byte": 1.0, "idea": "best", "predicted": None})
    command(f"--list --log {log}")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "best" in lines[1] and "smaller" in lines[2]
    assert "2.5000" in lines[2] and "another corpus" in lines[2]


@pytest.mark.parametrize("line, said", [
    ("--data {data}", "a speedrun needs a GPU"),
    ("--data {data} --engine warp", "unknown engine"),
    ("--engine cpu", "--data"),
    ("--data {data} --engine cpu --recipe adam", "unknown recipe"),
    ("--data {data}/nowhere --engine cpu", "prepared"),
    ("--data {data} --engine cpu --minutes 0", "minutes"),
    ("--data {data} --engine cpu --out {data}", "prepared data"),
    ("--list --log {data}/prepared.json", "no record of a speedrun"),
])  # fmt: skip
def test_refusals_are_one_line(line, said, prepared, capsys):
    command(line.format(data=prepared), code=2)
    error = capsys.readouterr().err
    assert said in error and error.startswith("nanoeuler: ") and error.count("\n") == 1


def test_a_log_that_cannot_be_written_is_refused_before_the_race(
    prepared, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(module, "speedrun", lambda *_, **__: pytest.fail("the race has begun"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir()
    able = os.access  # which lets root write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "locked" and able(path, mode))
    for log in ("", "loop", "file/log.jsonl", "locked/new/log.jsonl"):
        log = tmp_path / log
        command(f"--data {prepared} --engine cpu --recipe adamw {TINY} --log {log}", code=2)
        assert capsys.readouterr().err == ("nanoeuler: expected a file that can be written for "
                                           f"--log, got {log}: name another\n")  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "locked", "loop"]


def test_a_log_may_be_new_or_a_link_to_a_new_file(prepared, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "speedrun", lambda *_, **__: {"corpus": "the story"})
    monkeypatch.setattr(module, "result", lambda record: "done")
    (tmp_path / "link").symlink_to(tmp_path / "target.jsonl")
    for log in (tmp_path / "a" / "b.jsonl", tmp_path / "link", tmp_path / "link", "/dev/null"):
        command(f"--data {prepared} --engine cpu --recipe adamw {TINY} --log {log}")
    assert len((tmp_path / "target.jsonl").read_text().splitlines()) == 2
    assert len((tmp_path / "a" / "b.jsonl").read_text().splitlines()) == 1


# ---- The bench


def rows_of(work):
    """{(what, case, peer): value} of a folder's rows."""
    return {(row["what"], row["case"], row["peer"]): row["value"]
            for row in json.loads((work / "rows.json").read_text())}  # fmt: skip


def test_the_bench_rehearses_a_contestant(prepared, tmp_path, monkeypatch, capfd):
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    given = ["--dry", "--data", prepared, "--work", tmp_path / "work", "--commit", "abc",
             "--minutes", 0.25, "--seed", 2]  # fmt: skip
    assert not bench.main([*map(str, ["ours-adamw", *given])])
    told = json.loads((out / "speedrun.json").read_text())
    rows = rows_of(tmp_path / "work")
    bits = rows[bench.BITS, "speedrun, ours-adamw, seed 2", None]
    assert bits == told["told-ours-adamw-2"]["judged"]
    assert bits == pytest.approx(told["told-ours-adamw-2"]["bits_per_byte"], abs=1e-6)
    assert rows["tokens seen", "speedrun, ours-adamw, seed 2", None] > 0
    (record,) = module.read_records(out / "speedrun.jsonl")
    assert record["commit"] == "abc" and not (tmp_path / "work" / "ours-adamw-2").exists()


@pytest.mark.long
def test_the_bench_rehearses_pytorch(prepared, tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch: pip install -e '.[oracle]'")
    for who in ("torch-adamw", "torch-muon"):
        given = [who, "--dry", "--data", prepared, "--work", tmp_path, "--minutes", 1]
        assert not bench.main([*map(str, given)])
        rows = rows_of(tmp_path)
        assert 0 < rows[bench.BITS, f"speedrun, {who}, seed 0", None] < 8
        assert rows["seconds, all included", f"speedrun, {who}, seed 0", None] < 60 + module.LATE


def test_ratios_are_of_seeds_that_both_have():
    def row(who, seed, value, device="H100"):
        return {"what": bench.BITS, "case": f"speedrun, {who}, seed {seed}", "engine": "x",
                "peer": None, "value": value, "device": device, "date": "2026-11-26"}  # fmt: skip

    rows = [row("ours-muon", 0, 1.0), row("ours-muon", 1, 1.2), row("torch-muon", 0, 2.0),
            row("torch-adamw", 0, 3.0), row("torch-adamw", 1, 4.0),
            row("torch-adamw", 2, 9.0), row("torch-muon", 5, 7.0, "H200")]  # fmt: skip
    made = {(each["case"], each["peer"]): (each["value"], each["peer_value"], each["engine"])
            for each in bench.ratios(rows)}  # fmt: skip
    assert made == {("speedrun", "torch compile, Muon"): (1.0, 2.0, "cuda"),
                    ("speedrun", "torch compile, AdamW"): (1.1, 3.5, "cuda")}  # fmt: skip


# ---- PyTorch's Muon


@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
def test_their_muon_is_ours_but_for_bf16(mlp):
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e '.[oracle]'")
    import torch_muon
    import torch_peer

    from nanoeuler.model.weights import initialise
    from nanoeuler.training.muon import matrix_rate

    config = replace(PRESETS["small"], **SIZES | {"vocab_size": 60, "mlp": mlp})
    weights, rng = initialise(config, 0), np.random.default_rng(1)
    model = torch_peer.Model(config).float()
    torch_peer.load(model, weights)
    theirs, ours = torch_muon.Muon(model, config, 0.1, False), Muon(weights, weight_decay=0.1)
    before = weights.flat.copy()
    for number in (1, 2, 3):
        gradients = weights.zeros_like()
        gradients.flat[...] = rng.standard_normal(weights.flat.size)
        for name, x in model.named_parameters():
            key, _ = torch_peer.ours(name, x)
            g = torch.from_numpy(gradients[key].copy())
            linear = x.ndim == 2 and key != "embedding"
            x.grad = g.T.contiguous() if linear else g
        theirs.step(matrix_rate(0.01, config.dim))
        ours.update(weights, gradients, 0.01, number)
    mine = [each.name for each in ours.matrices(weights)]
    assert len(theirs.learned) == len({*mine})
    for name, x in model.named_parameters():
        key, x = torch_peer.ours(name, x.detach())
        if key in mine:
            step = weights[key] - before[weights.starts[key] :][: x.numel()].reshape(x.shape)
            off = np.linalg.norm(x.numpy() - weights[key]) / np.linalg.norm(step)
            assert off < 0.05, key  # five rounds in bf16, of numbers with 8 bits


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_their_gradients_begin_anew_each_step(optimizer):
    """Muon's matrices aren't among AdamW's parameters, and must be emptied as well."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e '.[oracle]'")
    import speed_twin

    config = replace(PRESETS["small"], **SIZES | {"vocab_size": 60})
    settings = {"seed": 0, "optimizer": optimizer, "weight_decay": 0.1, "beta2": 0.98, "clip": 1e9,
                "batch_size": 2}  # fmt: skip
    spec = {"settings": settings, "dry": True, "mode": "default", "ratio": 1.0}
    racer = speed_twin.Racer(spec, config, "cpu")
    tokens = np.random.default_rng(0).integers(60, size=(2, config.context + 1))
    seen = []
    racer.model.register_forward_pre_hook(
        lambda model, given: seen.append([x.grad for x in model.parameters()])
    )
    for _ in range(2):
        targets = np.repeat(tokens[:, 1:, None], config.n_predict, axis=2)
        racer.step(tokens[:, :-1], targets, 0.0)
    assert len(seen) == 2 and all(g is None or not torch.any(g) for each in seen for g in each)
