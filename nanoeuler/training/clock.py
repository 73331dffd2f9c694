# Made from book/09d-five-minutes.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-speedrun-clock
"""The time that a process has left of a fixed budget, and how many steps are planned with it.

Imports nothing but Python's own modules: what takes time to import would count.
"""

import math
import os
import time
from pathlib import Path


def process_age(stat: str | None = None, now: float | None = None) -> float | None:
    """Seconds since this process was started; None where the system doesn't say.

    stat, now: a text as Linux has it in /proc/self/stat, and the seconds since the machine started;
    None: asked of the system. Good to a hundredth of a second.
    """
    try:
        text = Path("/proc/self/stat").read_text() if stat is None else stat
        after = text.rpartition(")")[2].split()  # field 3 and on, so field 22 has the index 19
        begun = int(after[19]) / os.sysconf("SC_CLK_TCK")
        age = (time.clock_gettime(time.CLOCK_BOOTTIME) if now is None else now) - begun
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return age if begun > 0 and age >= 0 else None


class Clock:
    """Counts the seconds since the process started, against `budget`; call it for the count.

    source: "process" if the system told the start; if it doesn't, "processor time", the seconds
    that the process has computed so far, which leave out its waiting; "given" if `age` was.
    """

    def __init__(self, budget: float, age: float | None = None) -> None:
        self.budget, self.source = budget, "given"
        if age is None:
            age, self.source = process_age(), "process"
        if age is None:
            age, self.source = time.process_time(), "processor time"
        self.began = time.perf_counter() - age

    def __call__(self) -> float:
        return time.perf_counter() - self.began

    @property
    def left(self) -> float:
        """Seconds of the budget that are left; below 0 when it's over."""
        return self.budget - self()


# %% sec-speedrun-plan
class Plan:
    """How many steps a run has, as far as is known, and the learning rate of each.

    The trainer's schedule, `optim.learning_rate`, if the number is never revised. steps: None
    before the first `revise`. revisions: [step, steps] of each `revise`.
    """

    def __init__(self, peak: float, warmup: int) -> None:
        self.peak, self.warmup, self.steps = peak, warmup, None
        self.anchor = warmup, 0.0  # a step m and its p_m
        self.revisions: list[list[int]] = []

    def revise(self, step: int, steps: int) -> None:
        """From now on, after `step`, the run has so many `steps` in all; at least one more."""
        steps = max(steps, step + 1)
        if self.steps is None:  # a warm-up takes a tenth of a run at most
            self.warmup = min(self.warmup, steps // 10)
            self.anchor = self.warmup, 0.0
        elif step > self.warmup:
            self.anchor = step, self.fallen(step)
        self.steps = steps
        self.revisions.append([step, steps])

    def fallen(self, number: int) -> float:
        """How far the fall is at step `number`, p in 0 to 1. Equation eq-speedrun-plan."""
        step, share = self.anchor
        if self.steps is None or number <= step:
            return share
        return share + (1 - share) * (number - step) / (self.steps + 1 - step)

    def rate(self, number: int) -> float:
        """The learning rate of step 1, 2, ..."""
        if number <= self.warmup:
            return self.peak * number / self.warmup
        return self.peak / 2 * (1 + math.cos(math.pi * self.fallen(number)))
