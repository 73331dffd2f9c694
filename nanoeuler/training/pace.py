# Made from book/e-a-run-that-survives.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-pace
"""How long a run takes on this machine, measured before it; and how many steps fit into a time.

Leaves out what a run does besides steps and validations: reading its text, saving, its picture.
"""

import statistics
import time
from math import ceil
from typing import NamedTuple

from nanoeuler.data.batches import Batches
from nanoeuler.data.heldout import QUICK_WINDOWS, HeldOut
from nanoeuler.engines.choice import make_stepper
from nanoeuler.model.weights import Weights
from nanoeuler.training.optim import AdamW
from nanoeuler.training.run import Run

VALIDATIONS = 20  # at most in a run: points enough to see a curve
LONG_ENOUGH = 1.0  # seconds of measuring: the small preset takes some ten steps in it
MOST = 10  # steps that are measured as one, three times, where one takes milliseconds


def validates(step: int, steps: int) -> bool:
    """Whether the model is judged after this step of a run: at most VALIDATIONS times in all."""
    return step == steps or step % ceil(steps / VALIDATIONS) == 0


class Pace(NamedTuple):
    """Seconds of a run's parts."""

    step: float
    quick: float  # of a validation of a part of the held-out text
    full: float  # of the one of all of it, at the end

    def seconds(self, step: int, steps: int) -> float:
        """Of all steps after `step` up to the last, validations among them. eq-train-pace."""
        every = ceil(steps / VALIDATIONS)
        judged = ceil(steps / every) - step // every
        return (steps - step) * self.step + judged * self.quick + self.full

    def steps(self, minutes: float) -> int:
        """How many steps fit into `minutes`, in three digits; at least one."""
        left = 60 * minutes - self.full
        many = (left - VALIDATIONS * self.quick) / self.step
        few = left / (self.step + self.quick)  # a run of so few steps is judged at every one
        count = int(max(1, many if many >= VALIDATIONS else min(few, VALIDATIONS)))
        return count - count % 10 ** max(0, len(str(count)) - 3)


def measure(
    run: Run, batches: Batches, held_out: HeldOut, engine: str = "auto", threads: int | None = None
) -> Pace:
    """Measure on copies of the run's weights what its steps and validations take, in seconds."""
    weights = Weights(run.config, flat=run.weights.flat.copy())
    pieces = run.settings.accumulate
    stepper = make_stepper(engine, weights, AdamW(weights), threads=threads, pieces=pieces)

    def seconds(first, count=1):
        """Of each of `count` steps, from number `first` on, that are begun one after the other."""
        began = time.perf_counter()
        for number in range(first, first + count):
            tokens, targets, *begins = batches.batch(number)
            stepper.step(tokens, targets, 0.0, number, *begins)
        stepper.finish()
        return (time.perf_counter() - began) / count

    seconds(1)  # compiles, and takes memory
    times = [seconds(2), seconds(3)]
    count = min(MOST, int(LONG_ENOUGH / 3 / max(*times, 1e-9)))
    if count > 1:
        times = [seconds(4 + count * i, count) for i in range(3)]
    rows = range(len(held_out.inputs))
    batch = next(held_out.batches(rows[: held_out.batch_size]))
    stepper.sums(*batch)  # as above
    began = time.perf_counter()
    stepper.sums(*batch)
    each = time.perf_counter() - began
    quick = ceil(min(len(rows), QUICK_WINDOWS) / held_out.batch_size)
    full = ceil(len(rows) / held_out.batch_size)
    return Pace(statistics.median(times), quick * each, full * each)
