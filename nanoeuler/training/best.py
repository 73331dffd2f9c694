# Made from book/e-a-run-that-survives.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-best
"""The best model of a run: found by validations, held in memory, written next to the saves.

    best/            in the run directory, and a run directory itself, which `load_model` reads:
        config.json  tokenizer.json
        step-00000300/  model.safetensors, and state.json with its bits per byte; the newest counts

Leaves out when a run is judged (loop.py).
"""

import math
from pathlib import Path

import numpy as np

from nanoeuler.data.validation import QUICK_WINDOWS, HeldOut
from nanoeuler.engines.interface import Stepper
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.training.checkpoint import MODEL, read_record, read_save, write_folder, write_record
from nanoeuler.training.folder import (
    BEST,
    checkpoint_name,
    checkpoints,
    discard,
    read_metrics,
    sweep,
    writing,
)
from nanoeuler.training.run import Run, Settings, identity

SPREAD = 0.3  # measured: this section, s of eq-train-noise
SURE = 3  # standard deviations: one in 740 values of a normal distribution is further above
PATIENCE = 3  # validations in a row, since one of twenty may be unlucky
MOST_PASSES = 16  # Muennighoff et al. 2023: after these, another pass gains little
CURE = "more text, more --weight-decay, fewer --steps or a smaller model"


def passes(settings: Settings, steps: int, windows: int) -> float:
    """How often `steps` steps read data of so many windows."""
    return steps * settings.batch_size / windows


def say_passes(settings: Settings, windows: int) -> str:
    """A line that says how often a run with these settings reads data of so many windows."""
    often = passes(settings, settings.steps or 0, windows)
    line = f"the run makes {often:,.3g} passes over its data"
    if often <= MOST_PASSES:
        return line
    most = max(1, int(MOST_PASSES * windows / settings.batch_size))
    return (f"{line}: after about {MOST_PASSES} passes, another gains little, and a model may "
            f"learn it by heart; choose about --steps {most}, or more text")  # fmt: skip


def noise(held_out: HeldOut) -> float:
    """The relative rise in bits per byte of a quick validation that may be chance."""
    judged = np.count_nonzero(held_out.targets != IGNORE)
    judged *= min(1.0, QUICK_WINDOWS / len(held_out.targets))
    return SURE * SPREAD / math.sqrt(judged)


def chosen(out: str | Path) -> Path:
    """The model to use of a finished run: `out`, or its best/ if its last model is worse."""
    best, lines = Path(out) / BEST, read_metrics(out)
    return best if lines and "best" in lines[-1] and checkpoints(best) else Path(out)


class Best:
    """The model of a run with the fewest `bits` per byte, of `step`; None before there is one.

    `weights` hold it until it is `written`; a rise by more than `noise` is real. All bits per byte
    are of quick validations, which judge the same windows.
    """

    def __init__(self, out: str | Path, run: Run, noise: float, windows: int) -> None:
        self.out, self.run, self.noise, self.windows = Path(out) / BEST, run, noise, windows
        self.weights, self.written = run.learned.zeros_like(), True
        self.step: int | None = None
        self.bits = math.inf
        self.last, self.above = (0, 0.0), 0  # the newest (step, bits); how many in a row were worse

    def take(self, stepper: Stepper, bits: float) -> None:
        """Take the run's model at its step, the best so far."""
        stepper.pull()
        self.weights.flat[...] = self.run.learned.flat
        self.step, self.bits, self.written = self.run.step, bits, False

    def rewind(self) -> None:
        """Begin with the best model in the directory for the run at its newest save."""
        out, run = self.out, self.run
        if checkpoints(out) and read_record(out).identity != identity(run.facts):
            raise UserError(f"{out} holds a model of another run: move it elsewhere")
        tidy_best(out.parent)
        if checkpoints(out):
            _, state, _ = read_save(out, [MODEL], "delete that folder to go on without it")
            self.step, self.bits = state["step"], state.get("bits_per_byte", math.inf)
        for line in read_metrics(out.parent):  # of the steps since the best
            if "bits_per_byte" in line and line["step"] >= (self.step or 0):
                self._count(line["step"], line.get("quick_bits_per_byte", line["bits_per_byte"]))

    def save(self) -> None:
        """Write the model taken since the last save. Called before the save of the run."""
        if self.written:
            return
        out, run = self.out, self.run
        state = {"step": self.step, "bits_per_byte": self.bits, "run": identity(run.facts),
                 "tokenizer": run.tokenizer.hash, "program": run.program}  # fmt: skip
        with writing(out.parent, f"the best model, of step {self.step}, could not be written"):
            if not checkpoints(out):
                write_record(out, run)
            write_folder(out / checkpoint_name(self.step), {MODEL: dict(self.weights)}, state)
        self.written = True

    def observe(self, stepper: Stepper, bits: float) -> str:
        """Judge the run at its step; return a warning, once for each rise, or an empty text."""
        if bits < self.bits:
            self.take(stepper, bits)
        self._count(self.run.step, bits)
        if self.above != PATIENCE:
            return ""
        often = passes(self.run.settings, self.run.step, self.windows)
        return (f"the model begins to learn its text by heart, after {often:,.3g} passes over it: "
                f"held-out bits per byte rose from {self.bits:.3f} at step {self.step:,} to "
                f"{bits:.3f}; the best model is kept; what helps: {CURE}")  # fmt: skip

    def _count(self, step, bits):
        self.last = step, bits
        self.above = self.above + 1 if self.is_better else 0

    @property
    def is_better(self) -> bool:
        """Whether it is better than the newest judged model, by more than `noise`."""
        return self.last[1] > self.bits * (1 + self.noise)

    def __str__(self) -> str:
        """The best model in words; empty if it is no better than the last."""
        if not self.is_better:
            return ""
        step, bits = self.last
        return (f"the best model is that of step {self.step:,}, in {self.out}: {self.bits:.3f} "
                f"bits per byte, where step {step:,} needs {bits:.3f} for the same held-out text")


# %% sec-train-best
def tidy_best(out: str | Path) -> None:
    """Keep, for each save of the run in `out`, the newest best model that is not newer."""
    best = Path(out) / BEST
    found = [step for step, _ in checkpoints(best)]
    needed = {max([each for each in found if each <= step], default=0)
              for step, _ in checkpoints(out)}  # fmt: skip
    with writing(out, "older best models could not be removed"):
        sweep(best)
        for step, folder in checkpoints(best):
            if step not in needed:
                discard(folder)
