# Made from book/17-preferences.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-prefer-run
"""The run that learns from preferences: its steps on the cores, its judgement, its saves.

Leaves out what a comparison is and what it pulls at (preferences.py), and GPUs.

B texts, n comparisons (B = 2 n), T positions, K predicted tokens.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np

from nanoeuler.data.text import TRAIN_SHARE, digest
from nanoeuler.engines.interface import Engine, Optimizer
from nanoeuler.engines.registry import engine_factory
from nanoeuler.engines.sharding import cut
from nanoeuler.errors import UserError
from nanoeuler.measurements import cores
from nanoeuler.model.weights import Weights
from nanoeuler.training.checkpoint import Request, load_model, read_request, rewind, save
from nanoeuler.training.folder import add_metrics
from nanoeuler.training.loop import Execution, Options, Saving, Signals
from nanoeuler.training.optim import learning_rate, rate_for
from nanoeuler.training.run import Run, Settings
from nanoeuler.training.sft import Base
from nanoeuler.training.throughput import validation_due
from nanoeuler.training.train import open_run

# isort: split


from nanoeuler.training.preferences import (
    ANCHOR,
    BETA,
    Comparisons,
    Pair,
    Preference,
    couples,
    dpo,
    likelihoods,
    margins,
    pulls,
    weighted_gradients,
)


class DpoMetrics(NamedTuple):
    """What a model thinks of n comparisons, beside what it thought as the reference."""

    log_p: np.ndarray       # (2 n,) nats
    reference: np.ndarray   # (2 n,)
    beta: float

    def numbers(self) -> dict[str, float]:
        """loss; accuracy, of the margins; prefers, of log p; nats that each side has gained.

        accuracy: the share of margins above 0; one that is 0 counts half. prefers: the share of
        comparisons whose better answer is the more probable one.
        """
        gained, more = self.log_p - self.reference, self.log_p[0::2] - self.log_p[1::2]
        margin = margins(self.log_p, self.reference)
        found = {
            "loss": dpo(margin, self.beta)[0], "accuracy": (1 + np.sign(margin)) / 2,
            "prefers": (1 + np.sign(more)) / 2, "chosen": gained[0::2], "rejected": gained[1::2],
        }  # fmt: skip
        return {name: float(np.mean(each)) for name, each in found.items()}


# Comparisons in an engine's memory at a time. The order of sums follows from it: it is no setting.
TOGETHER = 2


def _waves(count: int, many: int) -> list[list[slice]]:
    """`count` rows in slices of TOGETHER comparisons each, in lists of at most `many`."""
    parts = cut(range(count // 2), -(-count // (2 * TOGETHER)))
    slices = [slice(2 * each.start, 2 * each.stop) for each in parts]
    return [slices[i : i + many] for i in range(0, len(slices), many)]


class PreferenceStepper:
    """The steps of a run on the cores, and likelihoods; `reference` stays as it is.

    threads: at most so many, and never more than there are cores, which is what None means.
    `make_engine` makes an engine for each thread that finds something to do.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], weights: Weights, reference: Weights,
        optimizer: Optimizer, beta: float = BETA, anchor: float = ANCHOR,
        threads: int | None = None,
    ):  # fmt: skip
        self.weights, self.reference = weights, reference
        self.optimizer, self.beta, self.anchor = optimizer, beta, anchor
        self.threads, self.make_engine = min(threads or cores(), cores()), make_engine
        self.pool, self.engines = ThreadPoolExecutor(self.threads), []
        self.gradients, self.parts = weights.zeros_like(), []

    def waves(self, count: int) -> list[list[slice]]:
        """`count` rows in lists of slices, a slice for a thread; makes the engines they need."""
        waves = _waves(count, self.threads)
        while len(self.engines) < len(waves[0]):
            self.engines.append(self.make_engine())
        return waves

    def likelihoods(
        self, weights: Weights, tokens: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        """log p (2 n,) of the rows of comparisons, as `preferences.likelihoods`."""
        def run(engine: Engine, rows: slice) -> np.ndarray:
            return likelihoods(engine, weights.config, weights, tokens[rows], targets[rows])

        waves = self.waves(len(tokens))
        return np.concatenate([p for rows in waves for p in self.pool.map(run, self.engines, rows)])

    def step(
        self, tokens: np.ndarray, targets: np.ndarray, lr: float, number: int
    ) -> tuple[DpoMetrics, float]:
        """Take step `number` on comparisons, tokens (2 n, T) and targets (2 n, T, K).

        Returns what was thought before it, and the gradient's norm. A step whose loss or norm is
        not finite changes nothing.
        """
        def run(engine: Engine, rows: slice, part: Weights) -> tuple[np.ndarray, np.ndarray]:
            part.flat[...] = 0
            texts = tokens[rows], targets[rows]
            known = likelihoods(engine, part.config, self.reference, *texts)

            def weigh(log_p: np.ndarray) -> np.ndarray:
                return pulls(log_p, known, self.beta, self.anchor, len(tokens) // 2)

            return weighted_gradients(engine, part.config, self.weights, *texts, weigh, part), known

        seen, self.gradients.flat[...] = [], 0
        waves = self.waves(len(tokens))
        self.parts += [self.weights.zeros_like() for _ in waves[0][len(self.parts) :]]
        for rows in waves:
            seen += self.pool.map(run, self.engines, rows, self.parts)
            for part in self.parts[: len(rows)]:
                self.gradients.flat += part.flat
        judged = DpoMetrics(*map(np.concatenate, zip(*seen, strict=True)), self.beta)
        norm = self.optimizer.clip(self.gradients)
        if math.isfinite(judged.numbers()["loss"]) and math.isfinite(norm):
            self.optimizer.update(self.weights, self.gradients, lr, number)
        return judged, norm


# %% sec-prefer-run
QUICK = 256  # comparisons in a judgement along the way: 3 % is the deviation of such a share


class DpoEvaluator:
    """What a run is judged by: `held_out` comparisons, and the reference's opinion of them."""

    def __init__(self, stepper: PreferenceStepper, held_out: Comparisons):
        self.stepper, self.held_out, self.known = stepper, held_out, {}

    def chosen(self, quick: bool) -> np.ndarray:
        """Which comparisons are judged: all, or QUICK of them, evenly spread and in couples."""
        twos = self.held_out.windows // 2
        if not quick or 2 * twos <= QUICK:
            return np.arange(self.held_out.windows)
        some = np.linspace(0, twos - 1, QUICK // 2).astype(int)
        return np.stack([2 * some, 2 * some + 1], axis=1).ravel()

    def __call__(self, quick: bool = True) -> dict[str, float]:
        """The numbers of `DpoMetrics`, and the bits per byte of the better answers."""
        at = self.chosen(quick)
        texts = self.held_out.rows(at)
        if quick not in self.known:
            self.known[quick] = self.stepper.likelihoods(self.stepper.reference, *texts)
        log_p = self.stepper.likelihoods(self.stepper.weights, *texts)
        size = sum(len(self.held_out.kept[i].chosen.encode()) for i in at)
        bits = -float(log_p[0::2].sum()) / math.log(2) / max(1, size)
        judged = DpoMetrics(log_p, self.known[quick], self.stepper.beta)
        return {**judged.numbers(), "bits_per_byte": bits}


OnStep = Callable[[dict[str, float]], None]  # on_step(line): a step's metrics


def _say(step: int, steps: int, found: dict[str, float]) -> None:
    print(f"step {step}/{steps}  held out: loss {found['loss']:.3f}  accuracy "
          f"{found['accuracy']:.1%}  prefers the better {found['prefers']:.1%}  "
          f"{found['bits_per_byte']:.3f} bits/byte", file=sys.stderr)  # fmt: skip


def _held_out(found: dict[str, float]) -> dict[str, float]:
    return {f"held_out_{name}": number for name, number in found.items()}


def _first_look(run: Run, judge: DpoEvaluator, on_step: OnStep | None) -> None:
    """What the reference itself is worth."""
    found = judge()
    _say(0, run.settings.steps, found)
    if on_step:
        on_step({"step": 0, **_held_out(found)})


def _line(
    run: Run, stepper: PreferenceStepper, learned: Comparisons, number: int
) -> dict[str, float]:
    """Take step `number`; the line of its metrics. UserError if it is not finite."""
    began, settings = time.perf_counter(), run.settings
    lr = learning_rate(number, settings.steps, settings.lr, settings.warmup)
    tokens, targets = learned.batch(number)[:2]
    judged, norm = stepper.step(tokens, targets, lr, number)
    numbers = judged.numbers()
    if not math.isfinite(numbers["loss"] + norm):
        raise UserError(
            f"step {number}: expected a finite loss and gradient, got a loss of "
            f"{numbers['loss']:.3g} and a norm of {norm:.3g}; the last save, if there is "
            "one, is from before and good: start anew with a lower learning rate"
        )
    run.step = number
    return {"step": number, **numbers, "lr": lr, "gradient_norm": norm, "tokens": tokens.size,
            "seconds": time.perf_counter() - began}  # fmt: skip


def _take_steps(
    out: str | Path, run: Run, stepper: PreferenceStepper, learned: Comparisons,
    judge: DpoEvaluator, saving: Saving, execution: Execution,
) -> None:  # fmt: skip
    """Take the steps that `run` has before it, or those up to a signal; the last is saved."""
    steps = run.settings.steps
    if not run.step:
        _first_look(run, judge, execution.on_step)
    with Signals() as signals:
        for number in range(run.step + 1, steps + 1):
            line = _line(run, stepper, learned, number)
            if validation_due(number, steps):
                found = judge(quick=number < steps)
                _say(number, steps, found)
                line |= _held_out(found)
            add_metrics(out, line)
            if execution.on_step:
                execution.on_step(line)
            if signals.caught or number == steps or saving.due(number):
                with saving.timed():
                    save(out, run, execution.keep, learned.windows)
            if signals.caught:
                print(f"{signals.caught}: step {number} of {steps} is saved in {out}; go on with "
                      "--resume", file=sys.stderr)  # fmt: skip
                return


# Chosen, not measured: 0.3 of `sft.LEARNING_RATE`. For wide models `optim.rate_for` lowers it.
LEARNING_RATE = 3e-4
# Four thousand comparisons, one or two minutes on two cores.
PREFERRING = Settings(steps=250, weight_decay=0.0)


def _check(beta: float, anchor: float) -> None:
    """UserError for numbers that no run can have."""
    for name, value, least in (("beta", beta, "above 0"), ("anchor", anchor, "of at least 0")):
        good = type(value) in (int, float) and 0 <= value <= sys.float_info.max
        if not good or (name == "beta" and value == 0):
            raise UserError(
                f"expected {name} to be a number {least}, got {value!r:.60}: choose another"
            )


def _compared(
    run: Run, learned: Sequence[Preference], held_out: Sequence[Preference]
) -> tuple[Comparisons, Comparisons]:
    """Both as batches; says on stderr how many are too long."""
    shape = run.settings.batch_size, run.config.context, run.config.n_predict, run.settings.seed
    both = [Comparisons(run.tokenizer, each, *shape) for each in (learned, held_out)]
    if left_out := both[0].left_out + both[1].left_out:
        print(f"{left_out:,} of {len(learned) + len(held_out):,} comparisons are longer than the "
              f"context of {run.config.context} tokens, and left out", file=sys.stderr)  # fmt: skip
    return both[0], both[1]


def halves(pairs: Sequence[Pair]) -> tuple[list[Preference], list[Preference]]:
    """Couples of nine tenths of the pairs to learn from, and of the last tenth, as in sft."""
    at = int(len(pairs) * TRAIN_SHARE)
    return couples(pairs[:at]), couples(pairs[at:])


def prefer(
    base: Base, compared: tuple[Sequence[Preference], Sequence[Preference]], out: Path | str, *,
    settings: Settings | None = None, beta: float = BETA, anchor: float = ANCHOR,
    resume: bool = False, **options: Unpack[Options],
) -> Run:  # fmt: skip
    """Move the model `base` towards the better answers, into the directory `out`.

    base stays as it is, and is the reference: a run directory, or a model's parts. `compared`:
    comparisons to learn from, and others that judge. Without settings they are PREFERRING, and
    settings that leave the learning rate open get LEARNING_RATE by `optim.rate_for`. With `resume`
    the run in `out` goes on, with the same base, comparisons, beta and anchor. `options` are those
    of `loop.Execution`, without sample and on_estimate; engine: one of those for a CPU, by default
    cpu. `on_step(line)` gets step 0, too. UserError for what is wrong, and as `train.open_run`
    raises it.
    """
    _check(beta, anchor)
    make_engine = engine_factory(options.setdefault("engine", "cpu"))
    execution, (learned, held_out) = Execution(**options), compared
    model = load_model(base) if isinstance(base, Path | str) else base
    config, tokenizer, reference = model
    facts = [beta, anchor, digest(reference.flat.tobytes()), learned, held_out]

    def begin() -> Run:
        asked = read_request(out) if resume else None
        chosen = settings or asked and asked.settings or PREFERRING
        chosen = dataclasses.replace(chosen, steps=chosen.steps or PREFERRING.steps)
        chosen = chosen.with_rate(rate_for(config.dim, LEARNING_RATE))
        run = Run.begin(config, chosen, tokenizer, data)
        run.weights.flat[...] = reference.flat
        return run

    data = digest(json.dumps(facts).encode())
    with open_run(out, begin, Request(config, settings, tokenizer, data, None), resume) as run:
        batches, judged = _compared(run, learned, held_out)
        stepper = PreferenceStepper(make_engine, run.weights, reference, run.optimizer, beta,
                                    anchor, execution.threads)  # fmt: skip
        saving = Saving(execution.save_every)
        with saving.timed():
            rewind(out, run, execution.keep)
        _take_steps(out, run, stepper, batches, DpoEvaluator(stepper, judged), saving, execution)
    return run
