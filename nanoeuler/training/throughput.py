# Made from book/e-a-run-that-survives.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-pace
"""How long a run takes on this machine, by its own first steps; how many steps fit into a time.

Leaves out what a run does besides steps and validations: reading its text, saving, its picture.
"""

import statistics
import time
from math import ceil
from typing import NamedTuple

from nanoeuler.data.validation import QUICK_WINDOWS, HeldOut
from nanoeuler.engines.interface import Stepper

VALIDATIONS = 20  # at most in a run: enough points for a curve
LONG_ENOUGH = 1.0  # seconds of steps after which FEWEST of them are enough
FEWEST, MOST = 3, 9  # steps that give the pace: ten with the first, which is left out
WATCHED = 0.1  # of a run's minutes, the most for which it measures its pace


def validation_due(step: int, steps: int) -> bool:
    """Whether the model is judged after this step of a run: at most VALIDATIONS times in total."""
    return step == steps or step % ceil(steps / VALIDATIONS) == 0


class Throughput(NamedTuple):
    """Seconds of a run's parts."""

    step: float
    quick: float  # of a validation on part of the held-out text
    full: float  # of the one on all of it, at the end

    def seconds(self, step: int, steps: int) -> float:
        """Seconds of all steps after `step`, with validations. eq-train-pace."""
        every = ceil(steps / VALIDATIONS)
        judged = ceil(steps / every) - step // every
        return (steps - step) * self.step + judged * self.quick + self.full

    def steps(self, minutes: float, done: int = 0, spent: float = 0.0) -> int:
        """How many steps fit into `minutes`, rounded down to three digits; at least one.

        The `done` steps among them, not judged yet, and all that was before took `spent` seconds.
        """
        left = 60 * minutes - spent - self.full
        many = (left - VALIDATIONS * self.quick) / self.step
        few = left / (self.step + self.quick)  # so short a run is judged at every step
        more = many if done + many >= VALIDATIONS else min(few, VALIDATIONS - done)
        count = max(1, done + int(max(0, more)))
        return count - count % 10 ** max(0, len(str(count)) - 3)


class StepTimer:
    """The times of a run's first steps, until its pace is known."""

    def __init__(self) -> None:
        self.began = self.at = time.perf_counter()
        self.times: list[float] = []

    def lap(self, known: int) -> None:
        """Count so many more steps as known."""
        if known:
            now = time.perf_counter()
            self.times += [(now - self.at) / known] * known
            self.at = now

    def skip(self) -> None:
        """Leave out the time since the last lap."""
        self.at = time.perf_counter()

    @property
    def spent(self) -> float:
        """The seconds since this timer was made."""
        return time.perf_counter() - self.began

    def is_enough(self, stopped: bool, minutes: float | None, warmup: int = 0) -> bool:
        """Whether the pace is known; if the run is stopped or out of time, one step is enough.

        A run that is given minutes watches longer, but no longer than its warm-up.
        """
        n, seconds = len(self.times) - 1, sum(self.times[1:])
        if minutes is None:
            return n >= MOST or n >= FEWEST and seconds >= LONG_ENOUGH
        if stopped or self.spent >= 60 * minutes:
            return n > 0
        watched = seconds >= WATCHED * 60 * minutes or n + 2 >= warmup  # one may have begun
        return watched and (n >= MOST or n >= FEWEST and seconds >= LONG_ENOUGH)

    def throughput(self, stepper: Stepper, held_out: HeldOut) -> Throughput:
        """The pace of the newer half of these steps, and of validations, from one batch."""
        rows, times = range(len(held_out.inputs)), self.times[1:]
        batch, judged = next(held_out.batches(rows[: held_out.batch_size])), list[float]()
        stepper.sums(*batch)  # the first compiles
        while len(judged) < MOST and sum(judged) < LONG_ENOUGH:
            began = time.perf_counter()
            stepper.sums(*batch)
            judged.append(time.perf_counter() - began)
        each = statistics.median(judged)
        quick = ceil(min(len(rows), QUICK_WINDOWS) / held_out.batch_size)
        full = ceil(len(rows) / held_out.batch_size)
        pace = statistics.median(times[len(times) // 2 :])
        return Throughput(pace, quick * each, full * each)
