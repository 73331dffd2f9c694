# Made from book/e-a-run-that-survives.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-best
"""The steps of a run, and what surrounds them: metrics, validations, saves, signals, memory.

Leaves out how a step is computed (a stepper does), and how a run is opened (train.py).
"""

import dataclasses
import errno
import gc
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
from nanoeuler.data.heldout import HeldOut
from nanoeuler.data.quote import quoted
from nanoeuler.engines.choice import engine_name, make_stepper
from nanoeuler.engines.interface import Stepper, Taken
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.training.best import Best, noise, save_best, say_passes, tidy_best
from nanoeuler.training.blame import first_bad_tensor
from nanoeuler.training.display import Display, plot
from nanoeuler.training.folder import add_metrics, saves
from nanoeuler.training.optim import learning_rate
from nanoeuler.training.pace import Pace, measure, validates
from nanoeuler.training.run import Run, making_room, program
from nanoeuler.training.saves import KEEP, save, settle

SAVE_SECONDS = 60.0  # between saves, where nobody says after how many steps: what a death may cost
SAVE_SHARE = 0.02  # of a run's time that its saves may take, as much as its validations do


class _Saving:
    """When a save is due: every `save_every` steps; where that is None, by the clock.

    Then SAVE_SECONDS after the last, or so long that saves take SAVE_SHARE of the time.
    """

    def __init__(self, save_every: int | None) -> None:
        self.save_every, self.took, self.ended = save_every, 0.0, time.perf_counter()

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
        wait = max(SAVE_SECONDS, self.took / SAVE_SHARE)
        return time.perf_counter() - self.ended >= wait


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


class _Steps:
    """The steps of a run, each begun and then known; `lines` of metrics come of what is known."""

    def __init__(self, run: Run, stepper: Stepper, batches: Batches) -> None:
        self.run, self.stepper, self.batches = run, stepper, Ahead(batches)
        self.open = {}  # number of a step that is begun and not known: its rate, its batch

    def begin(self, number: int) -> list[dict]:
        """Begin step `number`; the lines of what has become known meanwhile."""
        began, settings = time.perf_counter(), self.run.settings
        tokens, targets, *first = self.batches.batch(number)
        lr = learning_rate(number, settings.steps, settings.lr, settings.warmup)
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
            self.stepper.pull()
            bad = first_bad_tensor(self.run.weights, tokens, targets, *first)
            raise UserError(
                f"step {taken.number}: expected a finite loss and gradient, got a loss of "
                f"{taken.sums.sum():.3g} and a norm of {taken.norm:.3g}; the first bad tensor is "
                f"{bad}; the last save is from before and good: start anew with a lower learning "
                "rate"
            )
        self.run.step = taken.number
        counted = max(1, np.sum(targets[:, :, 0] != IGNORE))
        return {"step": taken.number, "loss": float(taken.sums[0] / counted), "lr": lr,
                "gradient_norm": taken.norm, "tokens": tokens.size}  # fmt: skip


Sample = Callable[..., str]  # sample(config, tokenizer, weights): a text by the model


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


def _take_steps(
    out, run: Run, stepper: Stepper, batches: Batches, held_out: HeldOut, *, best: Best,
    display: Display, saving: _Saving, keep: int, sample: Sample | None,
    on_step: Callable[[dict], None] | None,
) -> str | None:  # fmt: skip
    """Take the steps that `run` has before it; return the signal that ended them, or None."""
    walk, steps, stop = _Steps(run, stepper, batches), run.settings.steps, None
    with Signals() as signals, display.progress:
        for number in range(run.step + 1, steps + 1):
            lines, stop = walk.begin(number), signals.caught
            due = stop or number == steps or saving.due(number)
            if due or validates(number, steps) or (sample and _samples(number, steps)):
                lines += walk.finish()
                lines[-1] |= _judge(run, stepper, held_out, best, sample)
            for line in lines:
                add_metrics(out, line)
                display.show(run, line)
                if on_step:
                    on_step(line)
            if due:
                with saving.timed():
                    stepper.pull()
                    save_best(best)
                    save(out, run, keep, batches.windows)
                    tidy_best(out)
            if stop:
                break
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


def _timed(run: Run, batches: Batches, held_out: HeldOut, engine: str, threads) -> Pace:
    """What a step takes; a run that was given minutes gets its number of steps, and says so."""
    pace = measure(run, batches, held_out, engine, threads)
    gc.collect()  # its stepper may be a ring of objects, and holds a GPU's memory till then
    if run.settings.steps is None:
        steps = pace.steps(run.settings.minutes)
        print(f"{steps:,} steps fit into {run.settings.minutes:g} minutes at "
              f"{1e3 * pace.step:.3g} ms a step; --steps chooses another number",
              file=sys.stderr)  # fmt: skip
        run.settings = dataclasses.replace(run.settings, steps=steps)
    return pace


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
    before: Callable[[Run, float], None] | None = None,
) -> Run:  # fmt: skip
    """Take `run` to its last step, or to a signal, saving into `out`, held by the caller (`alone`).

    `batches` and `held_out` are used as `data.batches` and `data.heldout` have them. save_every:
    steps between saves, None: by the clock (`_Saving`). `sample(config, tokenizer, weights)` gives
    a text: shown at the end, and its beginning after each quarter. `before(run, seconds_per_step)`
    is called before the first step, the seconds with a share of the validations; `on_step(line)`
    with each step's metrics. UserError: a loss that is not finite, a full disk, too little memory.
    """
    check_counts(save_every, keep, threads)
    _check_place(out, run)
    with _enough_memory(out, run):
        left = run.settings.steps is None or run.step < run.settings.steps
        if left and (before or run.settings.steps is None):
            pace = _timed(run, batches, held_out, engine, threads)
        steps = run.settings.steps
        with making_room(run.config):
            stepper = make_stepper(engine, run.weights, run.optimizer, threads=threads,
                                   pieces=run.settings.accumulate)  # fmt: skip
            best = Best(out, run, noise(held_out), batches.windows)
        _note_program(out, run, engine)
        saving = _Saving(save_every)
        with saving.timed():
            settle(out, run, keep, batches.windows)
            best.settle()
        if left and before:
            before(run, pace.seconds(run.step, steps) / (steps - run.step))
        display = Display(steps, run.step)
        if left:
            display.say(say_passes(run.settings, batches.windows))
        stop = _take_steps(out, run, stepper, batches, held_out, best=best, display=display,
                           keep=keep, saving=saving, sample=sample, on_step=on_step)  # fmt: skip
    plot(out, held_out)
    _close(out, run, best, display, stop, sample)
    return run
