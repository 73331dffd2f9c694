"""How the base model, its small relatives and its twin are trained: settings, steps, and the time.

Wall time is counted in parts. `first` is all up to the end of a command's first step, from the
start of Python: kernels that are compiled, or torch.compile's work. `loop` is the time of steps, by
the gaps between those that become known, where one that a validation or a save has stretched counts
as the middle one. `rest` are those stretches, which the twin has none of. The twin gets the base
model's `loop`, so neither its compiling nor our validations count; a row says what would be if
compiling did.
"""

import json
import os
import signal
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from nanoeuler.data.dataset import Prepared
from nanoeuler.model.config import PRESETS, ModelConfig, count_parameters
from nanoeuler.planning.counts import flops_per_token
from nanoeuler.training.folder import checkpoints, is_begun, read_metrics
from nanoeuler.training.run import Settings
from nanoeuler.training.train import train

# ---- Settings, each with what speaks for it
#
# BATCH 64 of 512, 32,768 tokens: Li and others (2025, "Step Law") find 0.58 D^0.571, 41,000 for
# D = 320 million. With 16 an H200 reads 6 % fewer tokens a second.
# RATE 1e-3: their 1.79 N^-0.713 D^0.307 is 1.4e-3 for N = 107 million; ours for this width, from
# chapter E's 4e-3 at a width of 128, is 6.7e-4; GPT-3's for 125 million, at half a million tokens
# a batch, is 6e-4. Between the first two.
# WARMUP 300 steps, 3 %: six memories of the second moment at a rate above the one that was tried.
# DECAY 0.2: 1 / (rate decay) = 5,000 steps, half of the run. Bergsma and others (2025) find 0.6 of
# a run best at 3 tokens a parameter, and the books are read twice and a half, which asks for more.
# The schedule is the trainer's own, half a cosine to zero: a run harvests at its end (chapter 9a).
BATCH, RATE, WARMUP, DECAY, BETA2 = 64, 1e-3, 300, 0.2, 0.98
SECONDS = 470.0  # of steps: with 75 s of torch.compile the twin fits into one call of 600 s
STOP_AFTER = 575.0  # seconds after which a command saves and ends, 25 s before it would be killed
PACE = 650_000  # tokens a second that are planned with
SMALL_BATCH = 16  # of small models, whose runs are a thirtieth to a sixth as long
STRETCHED = 3  # times the middle gap between two steps: a validation or a save was in it
NEVER = 10**9  # steps between saves: at a signal and at the end alone, since a save takes seconds

PRESET = "euler-116m"
CASES = {"base": "base model", "twin": "twin, torch compile"}  # of rows
# width, layers, query heads, key/value heads, hidden: the base model's shape, a quarter to a half
FAMILY = ((192, 4, 3, 1, 512), (256, 6, 4, 2, 688), (384, 8, 6, 2, 1024))
DRY_FAMILY = ((16, 1, 2, 1, 32), (24, 1, 2, 1, 48), (32, 2, 2, 1, 64))
DRY_CONTEXT, DRY_BATCH = 32, 4


def family(dry: bool) -> tuple:
    """The shapes of the small models."""
    return DRY_FAMILY if dry else FAMILY


def add_flags(parser) -> None:
    """What can be said of training."""
    group = parser.add_argument_group("training")
    group.add_argument("--seconds", type=float, default=SECONDS, help="of steps")
    group.add_argument("--steps", type=int, help="in place of --seconds")
    group.add_argument("--stop-after", type=float, default=STOP_AFTER,
                       help="seconds, after which a command saves, to be asked for again")
    group.add_argument("--batch-size", type=int, default=BATCH)
    group.add_argument("--rate", type=float, default=RATE, help="the highest")
    group.add_argument("--warmup", type=int, default=WARMUP)
    group.add_argument("--decay", type=float, default=DECAY)
    group.add_argument("--beta2", type=float, default=BETA2)
    group.add_argument("--optimizer", default="adamw", help="or muon, which the twin has not")
    group.add_argument("--model", type=json.loads, default={}, help="fields of ModelConfig, JSON")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--pace", type=float, default=PACE, help="tokens a second, as planned")


def settings_of(options) -> Settings:
    """The settings of both models."""
    return Settings(steps=options.steps, minutes=options.seconds / 60,
                    batch_size=DRY_BATCH if options.dry else options.batch_size,
                    lr=options.rate, seed=options.seed, warmup=options.warmup,
                    weight_decay=options.decay, beta2=options.beta2,
                    optimizer=options.optimizer)  # fmt: skip


def config_of(options, prepared: Prepared, heads: int) -> ModelConfig:
    """The base model: the preset with the tokenizer's vocabulary and `heads` predicted tokens."""
    config = replace(PRESETS[PRESET], vocab_size=prepared.vocab_size, n_predict=heads,
                     **options.model)  # fmt: skip
    if not options.dry:
        return config
    return replace(config, dim=48, n_layers=2, n_heads=2, n_kv_heads=1, hidden=96,
                   context=DRY_CONTEXT)  # fmt: skip


def planned_tokens(options) -> float:
    """How many tokens the base model will read, as far as is known before."""
    if options.steps:
        settings, context = settings_of(options), PRESETS[PRESET].context
        return options.steps * settings.batch_size * (DRY_CONTEXT if options.dry else context)
    return options.seconds * options.pace


# ---- Small models


def small(options, prepared: Prepared, heads: int) -> None:
    """Train the small model of width --width, and leave small-WIDTH.json.

    It reads tokens in proportion to the products of a token; its rate is larger as it is narrower.
    """
    whole = config_of(options, prepared, heads)
    shape = next(each for each in family(options.dry) if each[0] == options.width)
    names = "dim", "n_layers", "n_heads", "n_kv_heads", "hidden"
    config = replace(whole, **dict(zip(names, shape, strict=True)))
    share = flops_per_token(config) / flops_per_token(whole)
    batch = DRY_BATCH if options.dry else SMALL_BATCH
    steps = max(2, round(planned_tokens(options) * share / (batch * config.context)))
    settings = replace(settings_of(options), steps=steps, batch_size=batch,
                       lr=options.rate * whole.dim / config.dim)  # fmt: skip
    out = options.work / f"small-{options.width}"
    train(prepared.folder, out, config=config, settings=settings, engine=options.engine,
          save_every=NEVER, resume=is_begun(out))  # fmt: skip
    tokens = steps * batch * config.context
    said = {"bits": read_metrics(out)[-1]["bits_per_byte"], "tokens": tokens, "steps": steps,
            "parameters": count_parameters(config), "flops": tokens * flops_per_token(config),
            "model": asdict(config), "training": asdict(settings)}  # fmt: skip
    (options.work / f"small-{options.width}.json").write_text(json.dumps(said, indent=1) + "\n")


# ---- The base model


class Watch:
    """When the first step of a command ended, and the last; ends the run when time is up."""

    def __init__(self, began: float, stop_after: float) -> None:
        self.began, self.known = began, []  # when each step was known, and its number
        left = max(1.0, stop_after - (time.perf_counter() - began))
        self.timer = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM))
        self.timer.daemon = True  # the trainer ends its step, saves, and says how to go on

    def __call__(self, line: dict) -> None:
        self.known.append((time.perf_counter(), line["step"]))

    def told(self, steps: int) -> dict:
        """What the command took."""
        if not self.known:
            return {}
        (first, begin), (last, end) = self.known[0], self.known[-1]
        loop = of_steps([at for at, _ in self.known])
        return {"first": first - self.began, "loop": loop * (1 + 1 / max(1, end - begin)),
                "rest": last - first - loop, "from": begin, "to": end, "steps": steps}  # fmt: skip


def of_steps(times: list[float]) -> float:
    """The sum of the gaps between times, where those far from the middle one count as that one.

    Longer ones have a validation or a save in them, and the next is next to nothing, since the step
    that it waited for has become known as well.
    """
    gaps = np.diff(times)
    middle = float(np.median(gaps)) if len(gaps) else 0.0
    odd = (gaps > STRETCHED * middle) | (gaps < middle / STRETCHED)
    return float(np.where(odd, middle, gaps).sum())


def ours(options, prepared: Prepared, heads: int, began: float) -> None:
    """Train the base model, on from where it is, and note the time."""
    out, watch = options.work / "base", Watch(began, options.stop_after)
    begun = is_begun(out)
    fresh = {} if begun and checkpoints(out) else {
        "config": config_of(options, prepared, heads), "settings": settings_of(options)}
    watch.timer.start()
    try:
        run = train(prepared.folder, out, engine=options.engine, save_every=NEVER, on_step=watch,
                    resume=begun, **fresh)  # fmt: skip
    finally:
        watch.timer.cancel()
    note(options, "base", watch.told(run.settings.steps))
    curve = {name: [[line["step"], line[key]] for line in read_metrics(out) if key in line]
             for name, key in (("losses", "loss"), ("held_out", "bits_per_byte"))}  # fmt: skip
    curve["losses"] = curve["losses"][::50]
    (options.work / "curve.json").write_text(json.dumps(curve))


def note(options, who: str, told: dict) -> None:
    """Add what a command took to times.json."""
    known = times(options)
    if told:
        known.setdefault(who, []).append(told)
    (options.work / "times.json").write_text(json.dumps(known, indent=1) + "\n")


def times(options) -> dict:
    """What each command took."""
    path = options.work / "times.json"
    return json.loads(path.read_text()) if path.exists() else {}


def loop_seconds(options, who: str) -> float:
    """The seconds of steps of all commands."""
    return sum(each["loop"] for each in times(options).get(who, []))


# ---- The twin


def theirs(options, prepared: Prepared, heads: int, began: float) -> None:
    """Train the twin for as many seconds as the base model took, on from where it is."""
    from base_twin import Plan, Twin

    from nanoeuler.training.checkpoint import write_model

    config, settings = config_of(options, prepared, heads), settings_of(options)
    spent = time.perf_counter() - began
    seconds = loop_seconds(options, "base") or options.seconds
    twin = Twin(prepared, Plan(config, settings, seconds, options.work / "twin.pt",
                               options.stop_after - spent, options.dry))  # fmt: skip
    if (options.work / "twin").exists():
        return
    told = twin.run()
    told["first"] += spent
    note(options, "twin", told)
    if twin.step < twin.steps:
        twin.save()
        print(f"step {twin.step:,} of {twin.steps:,} is saved: ask for the twin once more")
        return
    write_model(options.work / "twin", config, prepared.tokenizer, twin.weights(),
                "PyTorch's twin")  # fmt: skip


def tell(options, journal, who: str, heads: int) -> None:
    """Rows of what a model took so far."""
    known = times(options).get(who, [])
    if not known:
        return
    settings, prepared = settings_of(options), Prepared(options.work / "prepared")
    context = config_of(options, prepared, heads).context
    tokens, loop = known[-1]["to"] * settings.batch_size * context, loop_seconds(options, who)
    done = known[-1]["to"] == known[-1]["steps"]
    case = CASES[who]
    first, rate = sum(each["first"] for each in known), tokens / max(loop, 1e-9)
    print(f"{case}: {known[-1]['to']:,} of {known[-1]['steps']:,} steps, {tokens / 1e6:.1f} "
          f"million tokens in {loop:.1f} s of steps, {rate:,.0f} a second; {first:.1f} s in "
          f"{len(known)} commands before their first step")  # fmt: skip
    if done:
        journal.add("tokens seen", case, tokens, "tokens")
        journal.add("seconds of steps", case, loop, "s")
        journal.add("seconds before the first step", case, first, "s")
        rest = sum(each.get("rest", 0.0) for each in known)
        journal.add("seconds of validations and saves between steps", case, rest, "s")
        journal.add("tokens a second, whole run", case, rate, "tokens/s")


def folder_of(options, who: str) -> Path | None:
    """The run folder of a model that is done, or None."""
    known = times(options).get(who, [])
    if not (options.work / who).exists() or not known or known[-1]["to"] < known[-1]["steps"]:
        print(f"{who} is not done: ask for it once more, to judge it")
        return None
    return options.work / who
