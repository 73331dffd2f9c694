# Made from book/09d-five-minutes.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-speedrun-race
"""A race against the clock: train for some minutes since the start of the process, then judge.

Has the recipes, the race and its records. Leaves out the clock and the plan of steps (clock.py),
and saves and resuming, which so short a run can do without (loop.py).
"""

import dataclasses
import datetime
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from nanoeuler import measurements
from nanoeuler.data.batches import Batches, Prefetcher
from nanoeuler.data.dataset import Prepared
from nanoeuler.data.validation import HeldOut
from nanoeuler.engines.interface import Taken
from nanoeuler.engines.registry import GPU_ENGINES, engine_name, make_stepper
from nanoeuler.errors import UserError, quoted
from nanoeuler.files import check_regular, json_lines
from nanoeuler.model.config import PRESETS, ModelConfig
from nanoeuler.training.checkpoint import save
from nanoeuler.training.clock import Clock, Plan
from nanoeuler.training.folder import add_metrics, check_free, locked
from nanoeuler.training.run import Run, Settings

PRESET = "euler-116m"  # what recipes change; the vocabulary is that of the data
RECIPES: dict[str, dict[str, dict[str, Any]]] = {  # fields of ModelConfig, and of Settings
    "adamw": {  # as the base model was trained for twelve minutes: chapter 9a
        "model": {"n_predict": 1},
        "settings": {"batch_size": 64, "lr": 1e-3, "warmup": 300, "weight_decay": 0.2,
                     "beta2": 0.98},
    },
    # Among the best at half the width (data/trained/recipes.json); 13b says why this one. decay:
    # matrices have a rate of 0.02 by default (9b), so they forget in 1 / (0.02 x 0.03) = 1,667
    # steps, a third of our first run's 4,874.
    "muon": {
        "model": {"n_predict": 1, "qk_norm": True},
        "settings": {"batch_size": 64, "optimizer": "muon", "warmup": 300, "weight_decay": 0.03,
                     "beta2": 0.98},
    },
}  # fmt: skip


class Recipe(NamedTuple):
    """What is trained and how: fields of ModelConfig that differ from PRESET's, and of Settings."""

    name: str
    model: dict[str, Any]
    settings: dict[str, Any]

    def with_changes(self, model: dict[str, Any], settings: dict[str, Any]) -> "Recipe":
        """The same with other values; its name says so, unless only seed and minutes are given."""
        name = self.name + ", changed" * bool({*model, *settings} - {"seed", "minutes"})
        return Recipe(name, self.model | model, self.settings | settings)

    def config(self, vocab_size: int) -> ModelConfig:
        """The model, with so many tokens. UserError where it can't be."""
        return _replaced(PRESETS[PRESET], {**self.model, "vocab_size": vocab_size}, self.name)


def recipe_of(name: str) -> Recipe:
    """The recipe of this name, or of the file of this name, which ends with .json. UserError."""
    if not name.endswith(".json"):
        if name not in RECIPES:
            raise UserError(f"unknown recipe {quoted(name)}: choose {' or '.join(RECIPES)}, or "
                            "name a file that ends with .json")  # fmt: skip
        return Recipe(name, **RECIPES[name])
    check_regular(name)
    try:
        found = json.loads(Path(name).read_bytes())
        if type(found) is not dict:
            raise ValueError("it holds something else")
        parts = [found.pop(part, {}) for part in ("model", "settings")]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"expected a recipe in {name}, but {quoted(error)}: give a JSON object "
                        "with model and settings") from None  # fmt: skip
    if found or not all(type(part) is dict for part in parts):
        raise UserError(f"expected model and settings in {name}, two JSON objects, and nothing "
                        "else: write it like the recipes of training/speedrun.py")  # fmt: skip
    return Recipe(Path(name).stem, *parts)


def _replaced(base, values, name):
    """The dataclass `base` with these values; UserError for a field that it hasn't."""
    known = {field.name for field in dataclasses.fields(base)}
    if wrong := [each for each in values if each not in known]:
        raise UserError(f"the recipe {quoted(name)} names {quoted(wrong[0])}, which isn't one of "
                        f"{', '.join(sorted(known))}: correct it")  # fmt: skip
    return dataclasses.replace(base, **values)


SETTLED = 10  # steps without a pace: memory is touched, clocks rise from idle, caches fill
# The first pace is a mean over at least so many steps and this share of the time.
MEASURED, SHARE = 20, 0.01
# Where a plan is corrected, as shares of its steps, and whether the model is judged there.
LOOKS = (0.25, True), (0.5, True), (0.75, True), (0.95, False)
# A run that ends more than so many seconds late is refused. The first steps can make it so late:
# they are taken before a pace is known. Each later one is taken only if it should end in time.
LATE = 1.0
RESERVE = 0.25  # seconds that a plan leaves: 1.7 % of the last twentieth, 15 s


class Race:
    """A run, and all that its steps are taken with, against `clock`. `say` gets lines to show.

    first: when the first step had ended. lines: metrics of all steps that are known.
    """

    def __init__(
        self, run: Run, stepper: Any, sides: tuple[Batches, HeldOut], clock: Clock,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self.run, self.stepper, self.clock, self.say = run, stepper, clock, say
        self.batches, self.held_out = Prefetcher(sides[0]), sides[1]
        self.plan = Plan(run.settings.lr, run.settings.warmup)
        self.first, self.lines, self.rates, self.looks = 0.0, [], {}, [*LOOKS]
        self.pace, self.mark = 0.0, (0.0, 0)  # seconds a step; time and step it's measured from

    def note(self, known: list[Taken]) -> None:
        """What has become known. UserError for a step whose loss or gradient isn't finite."""
        count = self.run.settings.batch_size * self.run.config.context
        for taken in known:
            if not taken.finite:
                raise UserError(f"step {taken.number}: expected a finite loss and gradient, got "
                                f"{taken.sums.sum() / count:.3g} and a norm of {taken.norm:.3g}: "
                                "lower the learning rate")  # fmt: skip
            self.run.step = taken.number
            rate, at = self.rates.pop(taken.number), self.clock()
            self.lines.append({"step": taken.number, "loss": float(taken.sums[0] / count),
                               "lr": rate, "gradient_norm": taken.norm, "tokens": count,
                               "seconds": at})  # fmt: skip

    def fits(self, number: int) -> bool:
        """Whether one more step than `number` would end in time, by the pace so far."""
        at, done = self.mark
        if done and self.run.step > done:
            self.pace = (self.clock() - at) / (self.run.step - done)
        return self.clock.left > (number + 1 - self.run.step) * self.pace

    def take_steps(self) -> None:
        """All steps that fit, to the last's end. UserError if it's LATE s late, or none fits."""
        number = 0
        while (self.plan.steps is None or number < self.plan.steps) and self.fits(number):
            number += 1
            batch, self.rates[number] = self.batches.batch(number), self.plan.rate(number)
            self.note(self.stepper.step(*batch, self.rates[number], number))
            if number in (1, SETTLED):
                self.note(self.stepper.finish())
                self.first = self.first or self.clock()
                self.mark = self.clock(), number
            elif self.plan.steps is None:
                if self.knows_enough(number):
                    self.correct(number, judged=False)
            elif self.looks and number >= max(self.looks[0][0] * self.plan.steps,
                                              self.mark[1] + MEASURED):  # fmt: skip
                self.correct(number, self.looks.pop(0)[1])
        self.note(self.stepper.finish())
        if not self.lines or self.clock.left < -LATE:
            when = f"ended, after {self.clock():.1f} s" if self.lines else "could begin"
            raise UserError(
                f"{self.clock.budget:.1f} s were over before step {number or 1} {when}: try again, "
                "since kernels are compiled now, or give more minutes"
            )

    def knows_enough(self, number: int) -> bool:
        """Whether the first plan can be made. After half of the time, one step's pace must do."""
        at, done = self.mark
        if self.run.step == done or self.clock.left < self.clock.budget / 2:
            return self.run.step > done
        since = self.clock() - at
        return number >= SETTLED + MEASURED and since >= SHARE * self.clock.budget

    def correct(self, number: int, judged: bool) -> None:
        """Plan anew after step `number`, and judge the model if that's due."""
        self.fits(number)  # takes the pace, before anything else is done
        if judged:
            self.note(self.stepper.finish())
            bits = self.held_out.bits_per_byte(self.stepper.sums, quick=True)
            self.lines[-1]["bits_per_byte"] = bits
            self.say(f"{self.clock():6.1f} s  step {number:,}: {bits:.4f} bits per byte of a part "
                     "of the held-out text")  # fmt: skip
        steps = self.run.step + int((self.clock.left - RESERVE) / self.pace)
        self.plan.revise(number, steps)
        self.mark = self.clock(), self.run.step
        pace = f"{1e3 * self.pace:.2f} ms"
        self.say(f"{self.clock():6.1f} s  {self.plan.steps:,} steps fit, {pace} each")


# %% sec-speedrun-rules
# Checksums of prepared folders of the books: those of Project Gutenberg that chapter 20a cleans,
# in a vocabulary of 8,192. `tests/bench/base.py pack` cuts the training text into 89 blocks, and a
# machine may have been given only the first few of them. The held-out books are always the same.
CORPORA = {
    "6ece89a0daf6f5bc": "books", "bc00ec614048d454": "books, 85 blocks of 89",
    "86cc8c3cb48374d1": "books, 71 blocks of 89", "9063558a997131e3": "books, 57 blocks of 89",
    "04c19be39fb9b2f1": "books, 44 blocks of 89",
}
MINUTES = 5.0  # as karpathy's autoresearch has, without its compiling


def checksum(prepared: Prepared) -> str:
    """16 hexadecimal digits that tell which text it is, and in which tokens."""
    return sha256(f"{prepared.digest} {prepared.tokenizer.hash}".encode()).hexdigest()[:16]


def corpus_of(prepared: Prepared) -> str:
    """The name of a known text, or that it's another."""
    return CORPORA.get(checksum(prepared), "another corpus")


def begin(
    prepared: Prepared, recipe: Recipe, engine: str, threads: int | None = None
) -> tuple[Run, Any, tuple[Batches, HeldOut]]:
    """The run of a recipe before its first step, what takes its steps, and its two texts."""
    settings = _replaced(Settings(), recipe.settings, recipe.name)
    run = Run.begin(recipe.config(prepared.vocab_size), settings, prepared.tokenizer,
                    prepared.digest)  # fmt: skip
    shape = settings.batch_size, run.config.context, run.config.n_predict
    sides = (Batches(prepared.train, *shape, settings.seed),
             HeldOut.from_tokens(prepared.held_out, prepared.tokenizer, *shape))  # fmt: skip
    stepper = make_stepper(engine, run.weights, run.optimizer, threads=threads,
                           pieces=settings.accumulate, recompute=settings.recompute)  # fmt: skip
    return run, stepper, sides


def engine_for(name: str) -> str:
    """The engine's name; UserError, which says what to do, where there is no GPU for it."""
    try:
        return engine_name(name)
    except UserError as error:
        if name not in GPU_ENGINES:
            raise
        raise UserError(f"a speedrun needs a GPU: {error}; --engine cpu rehearses on the "
                        "processor, with a small --dim and --context") from None  # fmt: skip


def speedrun(
    data: Path, recipe: Recipe, clock: Clock, *, engine: str = "cuda", out: Path | None = None,
    threads: int | None = None, say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Train by the recipe until `clock` is over, and judge: the record, less idea and prediction.

    out: where the model is written then; None: nowhere. UserError: no GPU, bad data, a bad recipe,
    an `out` that's in use, a step that isn't finite, or too little time for a step.
    """
    engine = engine_for(engine)
    if out:
        check_free(out)
    prepared = Prepared(data)
    run, stepper, sides = begin(prepared, recipe, engine, threads)
    race = Race(run, stepper, sides, clock, say)
    race.take_steps()
    seconds, tokens = clock(), run.step * race.lines[0]["tokens"]
    bits = sides[1].bits_per_byte(stepper.sums)
    changed = dataclasses.replace(run.settings, steps=run.step, minutes=clock.budget / 60)
    run.settings = changed
    if out:
        keep(out, run, race)
    device = getattr(getattr(stepper, "device", None), "name", None) or measurements.device()
    return {
        "date": datetime.date.today().isoformat(), "device": device, "commit": _commit(),
        "engine": engine, "data": checksum(prepared), "corpus": corpus_of(prepared),
        "recipe": recipe.name, "model": dataclasses.asdict(run.config),
        "settings": dataclasses.asdict(changed), "bits_per_byte": bits, "seconds": seconds,
        "first_step": race.first, "clock": clock.source, "steps": run.step, "tokens": tokens,
        "tokens_per_second": tokens / seconds, "plans": race.plan.revisions,
        "cut": race.plan.steps is None or run.step < race.plan.steps,
        "held_out": [[line["step"], line["seconds"], line["bits_per_byte"]]
                     for line in race.lines if "bits_per_byte" in line],
    }  # fmt: skip


def keep(out: Path, run: Run, race: Race) -> None:
    """Write the model, and the metrics of all steps, as a run folder."""
    with locked(out):
        race.stepper.pull()
        for line in race.lines:
            add_metrics(out, line)
        save(out, run)


def _commit():
    """The commit of the code; "" where nothing can tell."""
    try:
        return measurements.commit()
    except (UserError, OSError):
        return ""


# What a record needs to stand in the table.
NEEDED = ("date", "recipe", "bits_per_byte", "tokens", "tokens_per_second", "first_step", "steps")


def add_record(path: Path, record: dict[str, Any]) -> None:
    """Append a record to the file, which is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record, sort_keys=True) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, none if there is no file. UserError for a line that isn't one."""
    if not path.exists():
        return []
    check_regular(path)
    records = []
    for number, _, record in json_lines(path.read_text(encoding="utf-8", errors="replace")):
        if type(record) is not dict or any(name not in record for name in NEEDED):
            raise UserError(f"line {number} of {path} is no record of a speedrun: remove it, or "
                            "name another file with --log")  # fmt: skip
        records.append(record)
    return records


def result(record: dict[str, Any]) -> str:
    """The outcome of a record in a line."""
    more = ", cut before its schedule's end" if record["cut"] else ""
    return (f"{record['bits_per_byte']:.4f} bits per byte: {record['tokens'] / 1e6:,.1f} million "
            f"tokens in {record['seconds']:.1f} s, {record['tokens_per_second']:,.0f} a second, "
            f"{record['steps']:,} steps, the first after {record['first_step']:.2f} s{more}")


def table(records: list[dict[str, Any]]) -> str:
    """Records as lines of a table, the best first."""
    lines = [f"{'bits/byte':>9} {'predicted':>9} {'Mtokens':>8} {'tokens/s':>9} {'first s':>7} "
             f"{'minutes':>7} {'seed':>4}  date        recipe, device, idea"]  # fmt: skip
    for each in sorted(records, key=lambda record: record["bits_per_byte"]):
        settings, predicted = each.get("settings", {}), each.get("predicted")
        words = [each["recipe"], each.get("device", ""), each.get("idea") or ""]
        words += [each["corpus"]] if each.get("corpus") == "another corpus" else []
        lines.append(
            f"{each['bits_per_byte']:9.4f} {'' if predicted is None else f'{predicted:.4f}':>9} "
            f"{each['tokens'] / 1e6:8.1f} {each['tokens_per_second']:9,.0f} "
            f"{each['first_step']:7.2f} {settings.get('minutes', MINUTES):7.3g} "
            f"{settings.get('seed', 0):4}  {each['date']}  {'; '.join(filter(None, words))}"
        )
    return "\n".join(lines)
