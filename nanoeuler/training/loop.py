# Made from book/e-a-run-that-survives.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-full
"""The training loop: steps with metrics, validations, saves, signals and a check of memory.

Leaves out how a step is computed (a stepper does), and how a run is opened (train.py).
"""

import dataclasses
import errno
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np

from nanoeuler.data.batches import Batches, Prefetcher
from nanoeuler.data.validation import HeldOut
from nanoeuler.engines.interface import Stepper, Taken
from nanoeuler.engines.registry import engine_name, make_stepper
from nanoeuler.errors import UserError, quoted
from nanoeuler.model.backward import IGNORE
from nanoeuler.training.anomaly import first_bad_tensor
from nanoeuler.training.best import Best, noise, say_passes, tidy_best
from nanoeuler.training.checkpoint import KEEP, rewind, save
from nanoeuler.training.display import Display, plot
from nanoeuler.training.folder import add_metrics, checkpoints
from nanoeuler.training.optim import learning_rate
from nanoeuler.training.run import LARGEST, Run, making_room, program
from nanoeuler.training.throughput import StepTimer, validation_due

# For saves by the clock, in seconds of training, which is what a death may cost.
FIRST_SECONDS = 12.0  # before its first save
SAVE_SECONDS = 60.0  # between two, later
SAVE_SHARE = 0.02  # of a run's time that its saves may take


class Saving:
    """When a save is due: every `save_every` steps; if that is None, by the clock.

    Then SAVE_SECONDS after the last, or so long that saves take SAVE_SHARE of the time; but in the
    beginning after as long again as the run has lasted, from FIRST_SECONDS on.
    """

    def __init__(self, save_every: int | None) -> None:
        self.save_every, self.took = save_every, 0.0
        self.began = self.ended = time.perf_counter()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Make a save in this context, which measures its time."""
        began = time.perf_counter()
        yield
        self.ended = time.perf_counter()
        self.took = self.ended - began

    def due(self, number: int) -> bool:
        """Whether a save is due after step `number`."""
        if self.save_every is not None:
            return number % self.save_every == 0
        often = max(SAVE_SECONDS, self.took / SAVE_SHARE)
        early = max(FIRST_SECONDS, self.took, self.ended - self.began)
        return time.perf_counter() - self.ended >= min(early, often)


class Signals:
    """A context in which the first SIGINT or SIGTERM only sets `caught`; a second acts as usual."""

    def __enter__(self):
        self.caught, self.before = None, {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids it
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._catch)
        return self

    def _catch(self, number, frame):
        self.caught = signal.Signals(number).name
        self.__exit__()

    def __exit__(self, *error):
        while self.before:
            signal.signal(*self.before.popitem())


def _diverged(run: Run, stepper: Stepper, batch: tuple, step: int, expected: str) -> UserError:
    """The error for a run whose numbers are no longer finite, after a search for the cause."""
    stepper.pull()
    return UserError(
        f"step {step}: expected {expected}; the first bad tensor is "
        f"{first_bad_tensor(run.weights, *batch)}; the last save, if there is one, is from before "
        "and good: start again with a lower learning rate"
    )


class _Steps:
    """The steps of a run, each begun and later known; known ones give `lines` of metrics."""

    def __init__(self, run: Run, stepper: Stepper, batches: Batches) -> None:
        self.run, self.stepper, self.batches = run, stepper, Prefetcher(batches)
        self.open = {}  # steps begun and not known yet: {number: (rate, batch)}

    def begin(self, number: int) -> list[dict]:
        """Begin step `number`; return the lines of the steps that have become known."""
        began, settings = time.perf_counter(), self.run.settings
        tokens, targets, *first = self.batches.batch(number)
        steps = settings.steps or LARGEST[int]  # not known yet: as in a run without an end
        lr = learning_rate(number, steps, settings.lr, settings.warmup)
        self.open[number] = lr, tokens, targets, *first
        return self._lines(self.stepper.step(tokens, targets, lr, number, *first), began)

    def finish(self) -> list[dict]:
        """Wait for all steps that have begun; return their lines."""
        began = time.perf_counter()
        return self._lines(self.stepper.finish(), began)

    def _lines(self, known, began):
        seconds = (time.perf_counter() - began) / max(1, len(known))
        return [{**self._line(taken), "seconds": seconds} for taken in known]

    def _line(self, taken: Taken) -> dict:
        lr, tokens, targets, *first = self.open.pop(taken.number)
        if not taken.finite:
            raise _diverged(self.run, self.stepper, (tokens, targets, *first), taken.number,
                            f"a finite loss and gradient, got a loss of {taken.sums.sum():.3g} "
                            f"and a norm of {taken.norm:.3g}")  # fmt: skip
        self.run.step = taken.number
        counted = max(1, np.sum(targets[:, :, 0] != IGNORE))
        return {"step": taken.number, "loss": float(taken.sums[0] / counted), "lr": lr,
                "gradient_norm": taken.norm, "tokens": tokens.size}  # fmt: skip


Sample = Callable[..., str]  # sample(config, tokenizer, weights): a text from the model
OnEstimate = Callable[[Run, float | None], None]  # on_estimate(run, seconds_per_step): see `fit`


class Options(TypedDict, total=False):
    """How a run is executed, as keyword arguments: the fields of `Execution`."""

    engine: str
    threads: int | None
    save_every: int | None
    keep: int
    sample: Sample | None
    on_step: Callable[[dict], None] | None
    on_estimate: OnEstimate | None


@dataclass
class Execution:
    """How a run is executed, which changes at most its last bits. UserError for bad values."""

    engine: str = "auto"
    threads: int | None = None     # of a CPU; None: one for each core
    save_every: int | None = None  # steps between saves; None: by the clock (`Saving`)
    keep: int = KEEP               # saves to keep
    sample: Sample | None = None   # its text is shown after each quarter, and at the end
    on_step: Callable[[dict], None] | None = None  # gets each step's metrics
    on_estimate: OnEstimate | None = None

    def __post_init__(self) -> None:
        self.engine = engine_name(self.engine)
        for name in ("save_every", "keep", "threads"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and (value is not None or name == "keep"):
                raise UserError(f"expected {name} to be a whole number above 0, got "
                                f"{quoted(repr(value))}")  # fmt: skip
        for name in ("sample", "on_step", "on_estimate"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise UserError(f"expected {name} to be a function, got {quoted(repr(value))}")


class _Fit:
    """A run, with everything that `fit` needs for its steps."""

    def __init__(
        self, out: str | Path, run: Run, batches: Batches, held_out: HeldOut, execution: Execution
    ) -> None:
        self.out, self.run, self.execution = out, run, execution
        self.batches, self.held_out = batches, held_out
        with making_room(run.config):
            self.stepper = make_stepper(
                execution.engine, run.weights, run.optimizer, threads=execution.threads,
                pieces=run.settings.accumulate, recompute=run.settings.recompute,
            )  # fmt: skip
            self.best = Best(out, run, noise(held_out), batches.windows)
        self.saving, self.display = Saving(execution.save_every), Display(run.step)
        self.timer = StepTimer()
        # Whether somebody waits for the estimate of the remaining time.
        self.untold = execution.on_estimate is not None or run.settings.steps is None

    def samples(self, step: int, steps: int) -> bool:
        """Whether a text is shown after this step of a run: after each quarter but the last."""
        return bool(self.execution.sample) and step in (steps // 4, steps // 2, 3 * steps // 4)

    def sample(self) -> str:
        """A text from the model."""
        return self.execution.sample(self.run.config, self.run.tokenizer, self.run.weights)

    def judge(self) -> dict:
        """More entries for some steps' lines: bits per byte, and after each quarter a sample."""
        run, stepper, held_out, more = self.run, self.stepper, self.held_out, {}
        step, steps = run.step, run.settings.steps
        if validation_due(step, steps):
            more["bits_per_byte"] = bits = held_out.bits_per_byte(stepper.sums, quick=True)
            if not math.isfinite(bits):
                few = range(min(held_out.batch_size, len(held_out.inputs)))
                raise _diverged(run, stepper, next(held_out.batches(few)), step,
                                f"a finite loss of the held-out text, got {bits:.3g}")  # fmt: skip
            if warning := self.best.observe(stepper, bits):
                more["warning"] = warning
            if step == steps:
                more["quick_bits_per_byte"] = bits
                more |= {"best": self.best.step} if self.best.is_better else {}
                more["bits_per_byte"] = held_out.bits_per_byte(stepper.sums)
        if self.samples(step, steps):
            stepper.pull()
            more["sample"] = self.sample()
        return more

    def announce(self) -> None:
        """Say how often a run with steps left reads its data, and what it takes besides time."""
        run = self.run
        if run.settings.steps is None:
            return
        self.display.reach(run.settings.steps)
        if run.step < run.settings.steps:
            self.display.say(say_passes(run.settings, self.batches.windows))
            if self.execution.on_estimate:
                self.execution.on_estimate(run, None)

    def estimate_due(self, known: int, stopped: bool) -> bool:
        """Whether to estimate the time now, when so many more steps are known; see `StepTimer`."""
        settings = self.run.settings
        if not self.untold:
            return False
        self.timer.lap(known)
        minutes = settings.minutes if settings.steps is None else None
        return self.timer.is_enough(stopped, minutes, settings.warmup)

    def tell_estimate(self) -> None:
        """Report the estimate once; a run with minutes gets its steps. The stepper has finished."""
        run, self.untold = self.run, False
        speed = self.timer.throughput(self.stepper, self.held_out)
        if run.settings.steps is None:
            steps = max(run.step, speed.steps(run.settings.minutes, run.step, self.timer.spent))
            run.settings = dataclasses.replace(run.settings, steps=steps)
            self.display.say(f"{steps:,} steps and their validations fit into "
                             f"{run.settings.minutes:g} minutes, at {1e3 * speed.step:,.1f} ms "
                             "a step; --steps chooses another number")
            self.announce()
        if self.execution.on_estimate and (left := run.settings.steps - run.step):
            self.execution.on_estimate(run, speed.seconds(run.step, run.settings.steps) / left)

    def write(self, lines: list[dict]) -> None:
        """Write these lines of metrics, show them, and pass them to `on_step`."""
        for line in lines:
            add_metrics(self.out, line)
            self.display.show(self.run, line)
            if self.execution.on_step:
                self.execution.on_step(line)

    def checkpoint(self) -> None:
        """Save the run at its step, and its best model."""
        with self.saving.timed():
            self.stepper.pull()
            self.best.save()
            save(self.out, self.run, self.execution.keep, self.batches.windows)
            tidy_best(self.out)

    def take_steps(self) -> str | None:
        """Take the remaining steps of the run; return the signal that ended them, or None."""
        run, number, stop = self.run, self.run.step, None
        walk = _Steps(run, self.stepper, self.batches)
        with Signals() as signals, self.display.progress:
            while (steps := run.settings.steps) is None or (number < steps and not stop):
                number += 1
                lines, stop = walk.begin(number), signals.caught
                if told := self.estimate_due(len(lines), stop is not None):
                    lines += walk.finish()
                    self.tell_estimate()
                due = judged = False
                if steps := run.settings.steps:
                    due = stop or number == steps or self.saving.due(number)
                    due = due or (told and not checkpoints(self.out))
                    judged = validation_due(number, steps) or self.samples(number, steps)
                if due or judged:
                    lines += walk.finish()
                    lines[-1] |= self.judge()
                self.write(lines)
                if due:
                    self.checkpoint()
                if told or due or judged:
                    self.timer.skip()
        return stop

    def close(self, stop: str | None) -> None:
        """Say which model is the best, and how to continue, or show what the model writes."""
        run = self.run
        if words := str(self.best):
            self.display.say(words)
        if run.step < run.settings.steps:
            self.display.say(f"{stop}: step {run.step} of {run.settings.steps} is saved in "
                             f"{self.out}; continue with --resume")  # fmt: skip
        elif self.execution.sample:
            self.display.say(self.sample())


# %% sec-train-full
def _note_program(out, run: Run, engine: str) -> None:
    """Note in `run` the program that continues it; if that has changed, say so on stderr."""
    before, now = run.program, {**program(), "engine": engine}
    changes = [f"{at} {before.get(at)}, now {now.get(at)}" for at in now | before
               if before.get(at) != now.get(at)]  # fmt: skip
    if run.step and changes:
        print(f"step {run.step} of {out} was saved with {'; '.join(changes)}: the run continues, "
              "but its last bits may differ from those of a run that was never interrupted",
              file=sys.stderr)  # fmt: skip
    run.program = now


def _check_place(out, run: Run) -> None:
    """UserError if the directory is not where `run` is."""
    newest = checkpoints(out)[-1][0] if checkpoints(out) else run.step
    if newest != run.step:
        raise UserError(f"expected the newest save in {out} to be of step {run.step}, but another "
                        f"program has written step {newest}: continue from that with --resume")


@contextmanager
def _enough_memory(run: Run) -> Iterator[None]:
    """Turn a MemoryError into a UserError."""
    size = run.settings.batch_size
    try:
        yield
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        if size == 1:
            what, cure = "a step with one sequence", "a smaller context or model"
        else:
            what = f"a batch of {size} windows of {run.config.context} tokens"
            cure = "a smaller batch_size or a larger accumulate"
        why = f" ({error})" if isinstance(error, MemoryError) and str(error) else ""
        raise UserError(
            f"{what} does not fit into this machine's memory{why}: choose {cure}"
        ) from None


def fit(
    out: str | Path, run: Run, batches: Batches, held_out: HeldOut, **options: Unpack[Options]
) -> Run:
    """Train `run` to its last step or to a signal, saving into `out`, `locked` by the caller.

    `batches` and `held_out` are used as `data.batches` and `data.validation` have them; `options`
    are those of `Execution`. `on_estimate(run, seconds_per_step)` is called with None once the
    number of steps is known, and with the seconds, a share of the validations in them, once the
    pace is, if any steps are left.
    UserError: a loss that is not finite, a full disk, too little memory.
    """
    execution = Execution(**options)
    _check_place(out, run)
    with _enough_memory(run):
        fitting = _Fit(out, run, batches, held_out, execution)
        _note_program(out, run, execution.engine)
        with fitting.saving.timed():
            rewind(out, run, execution.keep)
            fitting.best.rewind()
        fitting.announce()
        stop = fitting.take_steps()
    plot(out, held_out)
    fitting.close(stop)
    return run
