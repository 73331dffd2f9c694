# Made from book/e-a-run-that-survives.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-best
"""The steps of a run, and what surrounds them: metrics, validations, saves, signals, memory.

Leaves out how a step is computed (a stepper does), and how a run is opened (train.py).
"""

import dataclasses
import errno
import math
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from nanoeuler.data.batches import Ahead, Batches
from nanoeuler.data.quote import quoted
from nanoeuler.data.validation import HeldOut
from nanoeuler.engines.interface import Stepper, Taken
from nanoeuler.engines.registry import engine_name, make_stepper
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.training.anomaly import first_bad_tensor
from nanoeuler.training.best import Best, noise, say_passes, tidy_best
from nanoeuler.training.checkpoint import KEEP, save, settle
from nanoeuler.training.display import Display, plot
from nanoeuler.training.folder import add_metrics, saves
from nanoeuler.training.optim import learning_rate
from nanoeuler.training.run import LARGEST, Run, making_room, program
from nanoeuler.training.throughput import Pace, Watch, validates

# Where nobody says after how many steps a run is saved. Seconds of training: what a death may cost.
FIRST_SECONDS = 12.0  # before its first save
SAVE_SECONDS = 60.0  # between two, later
SAVE_SHARE = 0.02  # of a run's time that its saves may take, as much as its validations do


class Saving:
    """When a save is due: every `save_every` steps; where that is None, by the clock.

    Then SAVE_SECONDS after the last, or so long that saves take SAVE_SHARE of the time; but in the
    beginning after as long again as the run has lasted, from FIRST_SECONDS on.
    """

    def __init__(self, save_every: int | None) -> None:
        self.save_every, self.took = save_every, 0.0
        self.began = self.ended = time.perf_counter()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Where a save is made."""
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
    """Inside it the first SIGINT or SIGTERM only sets `caught`; a second acts as always."""

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
    """What to tell of a run that has nothing finite more, after the search for the cause."""
    stepper.pull()
    return UserError(
        f"step {step}: expected {expected}; the first bad tensor is "
        f"{first_bad_tensor(run.weights, *batch)}; the last save, if there is one, is from before "
        "and good: start anew with a lower learning rate"
    )


class _Steps:
    """The steps of a run, each begun and then known; `lines` of metrics come of what is known."""

    def __init__(self, run: Run, stepper: Stepper, batches: Batches) -> None:
        self.run, self.stepper, self.batches = run, stepper, Ahead(batches)
        self.open = {}  # number of a step that is begun and not known: its rate, its batch

    def begin(self, number: int) -> list[dict]:
        """Begin step `number`; the lines of what has become known meanwhile."""
        began, settings = time.perf_counter(), self.run.settings
        tokens, targets, *first = self.batches.batch(number)
        steps = settings.steps or LARGEST[int]  # not known yet: a run without an end
        lr = learning_rate(number, steps, settings.lr, settings.warmup)
        self.open[number] = lr, tokens, targets, *first
        return self._lines(self.stepper.step(tokens, targets, lr, number, *first), began)

    def finish(self) -> list[dict]:
        """Wait for all that was begun; its lines."""
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


Sample = Callable[..., str]  # sample(config, tokenizer, weights): a text by the model
OnPace = Callable[[Run, float | None], None]  # on_pace(run, seconds_per_step): see `fit`


def _samples(step: int, steps: int) -> bool:
    """Whether a text is shown after this step of a run: after each quarter but the last."""
    return step in (steps // 4, steps // 2, 3 * steps // 4)


def _judge(
    run: Run, stepper: Stepper, held_out: HeldOut, best: Best, sample: Sample | None
) -> dict:
    """What some steps' lines tell besides: bits per byte, and after each quarter a text."""
    step, steps, more = run.step, run.settings.steps, {}
    if validates(step, steps):
        more["bits_per_byte"] = bits = held_out.bits_per_byte(stepper.sums, quick=True)
        if not math.isfinite(bits):
            batch = next(held_out.batches(range(min(held_out.batch_size, len(held_out.inputs)))))
            raise _diverged(run, stepper, batch, step,
                            f"a finite loss of the held-out text, got {bits:.3g}")  # fmt: skip
        if warning := best.hear(stepper, bits):
            more["warning"] = warning
        if step == steps:
            more["quick_bits_per_byte"] = bits
            more |= {"best": best.step} if best.is_better else {}
            more["bits_per_byte"] = held_out.bits_per_byte(stepper.sums)
    if sample and _samples(step, steps):
        stepper.pull()
        more["sample"] = sample(run.config, run.tokenizer, run.weights)
    return more


def _announce(run: Run, display: Display, windows: int) -> None:
    """Show how many steps the run has and, if any are left, how often they read its data."""
    display.reach(run.settings.steps)
    if run.step < run.settings.steps:
        display.say(say_passes(run.settings, windows))


def _settle_length(run: Run, pace: Pace, display: Display, windows: int) -> None:
    """Give a run that was given minutes its number of steps, and say so."""
    steps = max(run.step, pace.steps(run.settings.minutes))
    run.settings = dataclasses.replace(run.settings, steps=steps)
    display.say(f"{steps:,} steps fit into {run.settings.minutes:g} minutes at "
                f"{1e3 * pace.step:.3g} ms a step; --steps chooses another number")  # fmt: skip
    _announce(run, display, windows)


class _Timing:
    """The pace of a run: told once, after its first steps; see `Watch`.

    `on_pace` as `fit` has it. Where there is none, and the number of steps is known, no one asks.
    """

    def __init__(self, run: Run, on_pace: OnPace | None) -> None:
        self.run, self.on_pace, self.watch = run, on_pace, Watch()
        self.asked = on_pace is not None or run.settings.steps is None

    def begin(self) -> None:
        """Tell of the run, its pace still unknown, if it has steps before it."""
        if self.on_pace and (self.run.settings.steps or 0) > self.run.step:
            self.on_pace(self.run, None)

    def due(self, known: int, stopped: bool) -> bool:
        """Whether the pace is to be told, now that so many steps more are known."""
        settings = self.run.settings
        if not self.asked:
            return False
        self.watch.lap(known)
        return self.watch.tells(stopped, settings.minutes if settings.steps is None else None)

    def tell(self, stepper: Stepper, held_out: HeldOut, display: Display, windows: int) -> None:
        """Tell it; the stepper has finished."""
        run, pace = self.run, self.watch.pace(stepper, held_out)
        self.asked = False
        if run.settings.steps is None:
            _settle_length(run, pace, display, windows)
            self.begin()
        if self.on_pace and (left := run.settings.steps - run.step):
            self.on_pace(run, pace.seconds(run.step, run.settings.steps) / left)


def _write(out, run: Run, lines: list[dict], display: Display, on_step) -> None:
    """Write these lines of metrics, show them, and tell of them."""
    for line in lines:
        add_metrics(out, line)
        display.show(run, line)
        if on_step:
            on_step(line)


def _take_steps(
    out, run: Run, stepper: Stepper, batches: Batches, held_out: HeldOut, *, best: Best,
    display: Display, timing: _Timing, saving: Saving, keep: int, sample: Sample | None,
    on_step: Callable[[dict], None] | None,
) -> str | None:  # fmt: skip
    """Take the steps that `run` has before it; return the signal that ended them, or None."""
    walk, number, stop = _Steps(run, stepper, batches), run.step, None
    with Signals() as signals, display.progress:
        while (steps := run.settings.steps) is None or (number < steps and not stop):
            number += 1
            lines, stop = walk.begin(number), signals.caught
            if told := timing.due(len(lines), stop is not None):
                lines += walk.finish()
                timing.tell(stepper, held_out, display, batches.windows)
            due = judged = False
            if steps := run.settings.steps:
                due = stop or number == steps or saving.due(number) or (told and not saves(out))
                judged = validates(number, steps) or (sample and _samples(number, steps))
            if due or judged:
                lines += walk.finish()
                lines[-1] |= _judge(run, stepper, held_out, best, sample)
            _write(out, run, lines, display, on_step)
            if due:
                with saving.timed():
                    stepper.pull()
                    best.save()
                    save(out, run, keep, batches.windows)
                    tidy_best(out)
            if told or due or judged:
                timing.watch.skip()
    return stop


def _note_program(out, run: Run, engine: str) -> None:
    """Note in `run` what takes it on; if other things took it so far, say so on stderr."""
    before, now = run.program, {**program(), "engine": engine_name(engine)}
    changes = [f"{at} {before.get(at)}, now {now.get(at)}" for at in now | before
               if before.get(at) != now.get(at)]  # fmt: skip
    if run.step and changes:
        print(f"step {run.step} of {out} was saved with {'; '.join(changes)}: the run goes on, but "
              "its last bits may differ from those of a run that was never interrupted",
              file=sys.stderr)  # fmt: skip
    run.program = now


def check_counts(save_every: int | None, keep: int, threads: int | None) -> None:
    """UserError for what would fail in the middle of a run."""
    checked = {"save_every": save_every, "keep": keep, "threads": threads}
    for name, value in checked.items():
        if value is None and name != "keep":
            continue
        if type(value) is not int or value < 1:
            raise UserError(
                f"expected {name} to be a whole number above 0, got {quoted(repr(value))}"
            )


def _check_place(out, run: Run) -> None:
    """UserError if the directory is not where `run` is."""
    newest = saves(out)[-1][0] if saves(out) else run.step
    if newest != run.step:
        raise UserError(f"expected the newest save in {out} to be of step {run.step}, but another "
                        f"program has written step {newest}: go on from that with --resume")


@contextmanager
def _enough_memory(out, run: Run) -> Iterator[None]:
    """Turn a refusal of memory into a line for the user; a run without a step leaves no save."""
    before, size = saves(out), run.settings.batch_size
    try:
        yield
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        if not before and not run.step:
            for _, folder in saves(out):
                shutil.rmtree(folder)
        if size == 1:
            what, cure = "a step with one sequence", "a smaller context or model"
        else:
            what = f"a batch of {size} windows of {run.config.context} tokens"
            cure = "a smaller batch_size or a larger accumulate"
        why = f" ({error})" if isinstance(error, MemoryError) and str(error) else ""
        raise UserError(
            f"{what} does not fit into this machine's memory{why}: choose {cure}"
        ) from None


def _close(out, run: Run, best: Best, display: Display, stop: str | None, sample) -> None:
    """Say which model is the best, and how to go on or what the model writes now."""
    if words := str(best):
        display.say(words)
    if run.step < run.settings.steps:
        display.say(f"{stop}: step {run.step} of {run.settings.steps} is saved in {out}; "
                    "go on with --resume")  # fmt: skip
    elif sample:
        display.say(sample(run.config, run.tokenizer, run.weights))


def fit(
    out: str | Path, run: Run, batches: Batches, held_out: HeldOut, *, engine: str = "auto",
    threads: int | None = None, save_every: int | None = None, keep: int = KEEP,
    sample: Sample | None = None, on_step: Callable[[dict], None] | None = None,
    on_pace: OnPace | None = None,
) -> Run:  # fmt: skip
    """Take `run` to its last step, or to a signal, saving into `out`, held by the caller (`alone`).

    `batches` and `held_out` are used as `data.batches` and `data.validation` have them. save_every:
    steps between saves, None: by the clock (`Saving`). `sample(config, tokenizer, weights)` gives
    a text: shown at the end, and its beginning after each quarter. `on_step(line)` gets each step's
    metrics. `on_pace(run, seconds_per_step)` is called with None before the first step, and with
    the seconds, a share of the validations in them, after some ten, if any are left. UserError: a
    loss that is not finite, a full disk, too little memory.
    """
    check_counts(save_every, keep, threads)
    _check_place(out, run)
    with _enough_memory(out, run):
        with making_room(run.config):
            stepper = make_stepper(engine, run.weights, run.optimizer, threads=threads,
                                   pieces=run.settings.accumulate)  # fmt: skip
            best = Best(out, run, noise(held_out), batches.windows)
        _note_program(out, run, engine)
        saving, display, timing = Saving(save_every), Display(run.step), _Timing(run, on_pace)
        with saving.timed():
            settle(out, run, keep, batches.windows)
            best.settle()
        if run.settings.steps:
            _announce(run, display, batches.windows)
        timing.begin()
        stop = _take_steps(
            out, run, stepper, batches, held_out, best=best, display=display, keep=keep,
            timing=timing, saving=saving, sample=sample, on_step=on_step,
        )  # fmt: skip
    plot(out, held_out)
    _close(out, run, best, display, stop, sample)
    return run
