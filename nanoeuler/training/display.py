# Made from book/e-a-run-that-survives.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-loop
"""A run's display: a live line or plain lines while it trains, and a loss curve at the end.

Leaves out what is measured and when: those are lines of metrics, and loop.py makes them.
"""

import math
import statistics
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from nanoeuler.data.validation import HeldOut
from nanoeuler.files import replacing
from nanoeuler.progress import bars, say
from nanoeuler.training.folder import read_metrics, writing
from nanoeuler.training.run import Run

if TYPE_CHECKING:  # `plot` imports it when it draws, since that takes a second
    from matplotlib.axes import Axes

SPEED_WINDOW = 50  # steps whose median time gives the displayed tokens/s
SAMPLE_SHOWN = 160  # characters of a sample during the run: two lines of a terminal


class Display:
    """On stderr: a live line on a terminal; elsewhere a plain line at each validation."""

    def __init__(self, step: int) -> None:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn  # see `bars`

        steps_done = TextColumn("step {task.completed}{task.fields[of]}")
        columns = BarColumn(bar_width=20), TextColumn("{task.description}"), TimeRemainingColumn()
        self.progress = bars(None, steps_done, *columns, stay=True)
        self.task = self.progress.add_task("", total=None, completed=step, of="")
        self.bits, self.seconds = "", deque(maxlen=SPEED_WINDOW)

    def reach(self, steps: int) -> None:
        """Show the number of steps, now that it is known."""
        self.progress.update(self.task, total=steps, of=f"/{steps}")

    def say(self, text: str) -> None:
        """Print lines that stay, above the live line."""
        say(self.progress, text)

    def show(self, run: Run, line: dict) -> None:
        """Show a step's metrics `line`."""
        self.seconds.append(line["seconds"])
        typical, steps = statistics.median(self.seconds), run.settings.steps
        typical = max(typical, 1e-9)  # a coarse clock may not move during a step
        if "bits_per_byte" in line:
            self.bits = f"  {line['bits_per_byte']:.3f} bits/byte"
        text = f"loss {line['loss']:.3f}{self.bits}  {line['tokens'] / typical:,.0f} tokens/s"
        self.progress.update(self.task, completed=line["step"], description=text)
        if self.progress.disable and "bits_per_byte" in line:
            left = typical * (steps - line["step"])
            self.say(f"step {line['step']}/{steps}  {text}  {left:.0f} s left")
        if "warning" in line:
            self.say(line["warning"])
        if "sample" in line:
            self.say(f"  it says: {' '.join(line['sample'].split())[:SAMPLE_SHOWN]}")


def draw(axes: "Axes", lines: list[dict], bytes_per_token: float, baselines: dict) -> None:
    """Draw metrics `lines` as curves in bits per byte on matplotlib `axes`, with the landmarks."""
    judged = [line for line in lines if "bits_per_byte" in line]
    bits = [line["loss"] / math.log(2) / bytes_per_token for line in lines]
    axes.plot([line["step"] for line in lines], bits,
              color="C0", alpha=0.5, lw=0.8, label="training, each batch")  # fmt: skip
    axes.plot([line["step"] for line in judged], [line["bits_per_byte"] for line in judged],
              color="C1", marker="o", ms=3, label="held-out text")  # fmt: skip
    for name, height in baselines.items():
        axes.axhline(height, color="0.5", lw=0.8, ls="--")
        axes.annotate(name, (1, height), (-4, 2), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", color="0.4", fontsize=8)  # fmt: skip
    axes.set(xlabel="step", ylabel="bits per byte")
    if judged:
        axes.set_title(f"{judged[-1]['bits_per_byte']:.2f} bits per byte of held-out text")
    axes.legend()


def plot(out: str | Path, held_out: HeldOut) -> None:
    """Write loss.png of the run directory `out` from its metrics."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    draw(figure.subplots(), read_metrics(out), held_out.bytes_per_token, held_out.baselines)
    with writing(out, "loss.png could not be written"):
        with replacing(Path(out) / "loss.png") as temporary:
            figure.savefig(temporary, format="png", dpi=150)
