# Made from book/06d-cpu-training.md by nanoeuler.book: edit the chapter, not this file.


# %% book/06d-cpu-training.md:758
"""The training loop: batches, gradients, AdamW, and a run directory that survives a crash.

Leaves out how gradients are computed (`parallel.Sharded`) and how text is generated (`sample`).
"""

import dataclasses
import math
import signal
import statistics
import sys
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from nanoeuler import reference
from nanoeuler.backward import IGNORE
from nanoeuler.checkpoint import Run, Settings, add_metrics, load, read_metrics, save
from nanoeuler.data import Batches, HeldOut, digest, read_text, split
from nanoeuler.errors import UserError
from nanoeuler.files import replacing
from nanoeuler.model import head_weights, loss_and_gradients, loss_scale
from nanoeuler.optim import clip, learning_rate
from nanoeuler.parallel import Sharded, engine_factory
from nanoeuler.tokenizer import Tokenizer

VALIDATIONS = 20  # in a run: of 128 windows each, they take about 2 % of the small preset's time
SAVE_EVERY = 500  # steps: at 40 ms a step, a crash loses at most 20 seconds
SPEED_WINDOW = 50  # steps, whose median time gives the displayed tokens/s


class _NotFinite(Exception):
    """Raised by `_Watched`; its text names the operation."""


class _Watched:
    """The reference engine, stopped by the first operation that makes nan or infinity."""

    def __init__(self, *weights):
        tensors = [pair for each in weights for pair in each.items()]
        self.names = {tensor.ctypes.data: name for name, tensor in tensors}
        self.last = "embedding"

    def __getattr__(self, operation):
        def watched(*arguments):
            result = getattr(reference, operation)(*arguments)
            results = result if isinstance(result, tuple) else (result,)
            arrays = [a for a in (*results, *arguments) if isinstance(a, np.ndarray)]
            named = [self.names[a.ctypes.data] for a in arrays if a.ctypes.data in self.names]
            self.last = named[0] if named else self.last
            if not all(np.isfinite(array).all() for array in arrays):
                place = "with" if named else "after"
                raise _NotFinite(f"what {operation} makes {place} {self.last}")
            return result

        return watched


# %% book/06d-cpu-training.md:825
def first_bad_tensor(weights, gradients, tokens, targets):
    """Say in words which tensor is the first that is not finite.

    weights and their gradients (Weights), tokens (B, T), targets (B, T, K): those of the bad step.
    """
    for name, tensor in weights.items():
        if not np.isfinite(tensor).all():
            return f"the weight {name}"
    config, again = weights.config, weights.zeros_like()
    scale = loss_scale(targets, head_weights(config.n_predict))
    try:
        with np.errstate(all="ignore"):
            engine = _Watched(weights, again)
            loss_and_gradients(engine, config, weights, tokens, targets, scale, again)
    except _NotFinite as error:
        return str(error)
    bad = [name for name, tensor in gradients.items() if not np.isfinite(tensor).all()]
    return f"the gradient of {bad[-1]}" if bad else "the loss"  # backward begins at the last


# %% book/06d-cpu-training.md:863
class _Signals:
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


# %% book/06d-cpu-training.md:886
class _Display:
    """A live line on a terminal, a plain line at each validation elsewhere; all of it on stderr."""

    def __init__(self, steps, step):
        self.console = Console(  # in a notebook rich would answer for itself, and say yes
            stderr=True, highlight=False, force_jupyter=False, force_terminal=sys.stderr.isatty()
        )
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("", total=steps, completed=step)
        self.bits, self.seconds = "", deque(maxlen=SPEED_WINDOW)

    def say(self, text):
        """Print lines that stay, above the live one."""
        self.console.print(text, markup=False, soft_wrap=True)

    def show(self, run, line):
        """Show a step's metrics `line`."""
        self.seconds.append(line["seconds"])
        typical, steps = statistics.median(self.seconds), run.settings.steps
        if "bits_per_byte" in line:
            self.bits = f"  {line['bits_per_byte']:.3f} bits/byte"
        text = f"loss {line['loss']:.3f}{self.bits}  {line['tokens'] / typical:,.0f} tokens/s"
        self.progress.update(self.task, completed=run.step, description=text)
        if self.progress.disable and "bits_per_byte" in line:
            left = typical * (steps - run.step)
            self.say(f"step {run.step}/{steps}  {text}  {left:.0f} s left")


# %% book/06d-cpu-training.md:925
def draw(axes, lines, bytes_per_token, landmarks):
    """Draw metrics `lines` as curves in bits per byte on matplotlib `axes`, with the landmarks."""
    judged = [line for line in lines if "bits_per_byte" in line]
    bits = [line["loss"] / math.log(2) / bytes_per_token for line in lines]
    axes.plot([line["step"] for line in lines], bits,
              color="C0", alpha=0.5, lw=0.8, label="training, each batch")  # fmt: skip
    axes.plot([line["step"] for line in judged], [line["bits_per_byte"] for line in judged],
              color="C1", marker="o", ms=3, label="held-out text")  # fmt: skip
    for name, height in landmarks.items():
        axes.axhline(height, color="0.5", lw=0.8, ls="--")
        axes.annotate(name, (1, height), (-4, 2), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", color="0.4", fontsize=8)  # fmt: skip
    axes.set(xlabel="step", ylabel="bits per byte")
    if judged:
        axes.set_title(f"{judged[-1]['bits_per_byte']:.2f} bits per byte of held-out text")
    axes.legend()


def plot(out, held_out):
    """Write loss.png of the run directory `out` from its metrics; `held_out` is its HeldOut."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    draw(figure.subplots(), read_metrics(out), held_out.bytes_per_token, held_out.landmarks)
    with replacing(Path(out) / "loss.png") as temporary:
        figure.savefig(temporary, format="png", dpi=150)


# %% book/06d-cpu-training.md:957
def _step(run, compute, batches, gradients):
    """Take one step of `run` in place; return its line of metrics."""
    began, step, settings = time.perf_counter(), run.step + 1, run.settings
    tokens, targets = batches.batch(step)
    scale = loss_scale(targets, head_weights(run.config.n_predict))
    sums = compute.loss_and_gradients(run.weights, tokens, targets, scale, gradients)
    norm = clip(gradients, settings.clip)
    if not (np.isfinite(sums).all() and math.isfinite(norm)):
        raise UserError(
            f"step {step}: expected a finite loss and gradient, got a loss of {sums.sum():.3g} and "
            f"a norm of {norm:.3g}; the first bad tensor is "
            f"{first_bad_tensor(run.weights, gradients, tokens, targets)}; the last checkpoint is "
            "from before and good: start anew with a lower learning rate"
        )
    lr = learning_rate(step, settings.steps, settings.lr, settings.warmup)
    run.optimizer.update(run.weights, gradients, lr, step)
    run.step = step
    counted = max(1, np.sum(targets[:, :, 0] != IGNORE))
    return {
        "step": step, "loss": float(sums[0] / counted), "lr": lr, "gradient_norm": norm,
        "tokens": tokens.size, "seconds": time.perf_counter() - began,
    }  # fmt: skip


# %% book/06d-cpu-training.md:985
def fit(out, run, batches, held_out, *, engine="auto", threads=None, save_every=SAVE_EVERY,
        sample=None):  # fmt: skip
    """Take `run` to its last step, or to a signal, saving into `out`. Returns the `Run`.

    `batches.batch(step)` gives tokens (B, T) and targets (B, T, K); `held_out` has `bits_per_byte`,
    `bytes_per_token` and `landmarks` as `data.HeldOut` has. `sample(config, tokenizer, weights)`
    gives a text to print at the end.
    """
    compute = Sharded(engine_factory(engine), run.config, threads)
    gradients, unscaled = run.weights.zeros_like(), np.zeros(run.config.n_predict)
    steps, saved = run.settings.steps, run.step
    if run.step == 0:
        save(out, run)
    display = _Display(steps, run.step)
    with _Signals() as signals, display.progress:
        while run.step < steps and not signals.caught:
            line = _step(run, compute, batches, gradients)
            last = run.step == steps
            if last or run.step % max(1, steps // VALIDATIONS) == 0:
                line["bits_per_byte"] = held_out.bits_per_byte(
                    lambda x, y: compute.loss(run.weights, x, y, unscaled), quick=not last
                )
            add_metrics(out, line)
            display.show(run, line)
            if last or run.step % save_every == 0:
                save(out, run)
                saved = run.step
    if saved < run.step:  # a signal ended the loop
        save(out, run)
    plot(out, held_out)
    if run.step < steps:
        display.say(f"{signals.caught}: step {run.step} of {steps} is saved in {out}; "
                    "go on with --resume")  # fmt: skip
    elif sample:
        display.say(sample(run.config, run.tokenizer, run.weights))
    return run


# %% book/06d-cpu-training.md:1029
def open_run(out, given, data, begin, resume=False, config=None, tokenizer=None):
    """The run to take further in the directory `out`: a new one or, with `resume`, the one there.

    A new one is `begin(given)`, and nothing is written yet. One that is there must have begun with
    what is `given` (a dict; None: whatever it is), with the data digest `data`, and with `config`
    and `tokenizer` unless they are None.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if not resume:
        if (Path(out) / "config.json").exists():
            raise UserError(
                f"expected {out} to hold no run yet, but it does: continue that one with --resume, "
                "or choose another directory with --out"
            )
        return begin(given)
    run = load(out)
    then = {**dataclasses.asdict(run.settings), "data": run.data}
    then |= {"tokenizer": run.tokenizer.hash, "model": run.config}
    now = {**given, "data": data, "tokenizer": (tokenizer or run.tokenizer).hash}
    now["model"] = config or run.config
    for name in now:
        if now[name] != then[name]:
            raise UserError(
                f"{out} holds a run with {name} {then[name]}, but {now[name]} was asked for: "
                "resume it with what it began with, or start another in another directory"
            )
    return run


def train(config, data, out, *, steps=None, batch_size=None, lr=None, seed=None, engine="auto",
          threads=None, save_every=SAVE_EVERY, resume=False, sample=None,
          tokenizer=None):  # fmt: skip
    """Train on the text file `data` into the run directory `out`; returns the `Run`.

    config ModelConfig (None, with `resume`: the run's). Settings that are None take the defaults of
    `Settings` or, with `resume`, the run's. tokenizer Tokenizer, whose vocab_size then replaces
    config's (None: learned from the text). `fit` tells of the rest. UserError: a bad file or
    setting, a directory that holds another run, a loss that is not finite.
    """
    if tokenizer and config:
        config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size)
    text = read_text(data)
    train_text, held_out_text = split(text)
    given = {"steps": steps, "batch_size": batch_size, "lr": lr, "seed": seed}

    def begin(given):
        settings = Settings(**given)
        known = tokenizer or Tokenizer.train(train_text, config.vocab_size)
        return Run.begin(config, settings, known, digest(text))

    run = open_run(out, given, digest(text), begin, resume, config, tokenizer)
    shape = run.settings.batch_size, run.config.context, run.config.n_predict
    batches = Batches(run.tokenizer.encode(train_text), *shape, run.settings.seed)
    held_out = HeldOut(run.tokenizer.encode(held_out_text), run.tokenizer, *shape)
    return fit(out, run, batches, held_out, engine=engine, threads=threads,
               save_every=save_every, sample=sample)  # fmt: skip


__all__ = [
    "VALIDATIONS",
    "SAVE_EVERY",
    "SPEED_WINDOW",
    "first_bad_tensor",
    "draw",
    "plot",
    "fit",
    "open_run",
    "train",
]
