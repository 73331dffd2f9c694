# Made from book/06d-cpu-training.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-loop
"""The training loop: batches, gradients, AdamW, and a run directory that survives a crash.

Leaves out how gradients are computed (`parallel.Sharded`) and how text is generated (`sample`).
"""

import dataclasses
import math
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from nanoeuler.data.batches import Ahead, Batches, HeldOut, Prepared, digest, read_text
from nanoeuler.data.prepare import prepare_text
from nanoeuler.engines import reference
from nanoeuler.engines.cpu.stepper import ENGINES, Sharded, engine_factory
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.transformer import head_weights, loss_and_gradients, loss_scale
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.display import Display, plot
from nanoeuler.training.folder import add_metrics, alone, saves
from nanoeuler.training.optim import clip, learning_rate
from nanoeuler.training.run import Run, Settings, program
from nanoeuler.training.saves import KEEP, load, save, settle

VALIDATIONS = 20  # in a run: of 128 windows each, they take about 2 % of the small preset's time
SAVE_EVERY = 500  # steps: at 40 ms a step, a crash loses at most 20 seconds


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


def first_bad_tensor(weights, gradients, tokens, targets):
    """Say in words which tensor is the first that is not finite.

    weights and their gradients (Weights), tokens (B, T), targets (B, T, K): those of the bad step.
    """
    for name, tensor in weights.items():
        if not np.isfinite(tensor).all():
            return f"the weight {name}"
    config, again = weights.config, weights.zeros_like()
    engine, scale = _Watched(weights, again), loss_scale(targets, head_weights(config.n_predict))
    for at in range(len(tokens)):
        row = slice(at, at + 1)
        try:
            with np.errstate(all="ignore"):
                loss_and_gradients(engine, config, weights, tokens[row], targets[row], scale, again)
        except _NotFinite as error:
            return f"{error}, in sequence {at + 1} of the batch"
    bad = [name for name, tensor in gradients.items() if not np.isfinite(tensor).all()]
    return f"the gradient of {bad[-1]}" if bad else "the loss"  # backward begins at the last


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


def _judged(run, compute, held_out, sample):
    """What some steps' lines tell besides: bits per byte, and after each quarter a text."""
    step, steps, found = run.step, run.settings.steps, {}
    if step == steps or step % max(1, steps // VALIDATIONS) == 0:
        unscaled = np.zeros(run.config.n_predict)
        found["bits_per_byte"] = held_out.bits_per_byte(
            lambda x, y: compute.loss(run.weights, x, y, unscaled), quick=step < steps
        )
    if sample and step in (steps // 4, steps // 2, 3 * steps // 4):
        found["sample"] = sample(run.config, run.tokenizer, run.weights)
    return found


def _steps(out, run, compute, batches, held_out, display, save_every, keep, sample):
    """Take the steps that `run` has before it; return the signal that ended them, or None."""
    gradients, ahead = run.weights.zeros_like(), Ahead(batches)
    steps, stop = run.settings.steps, None
    with _Signals() as signals, display.progress:
        while run.step < steps and not stop:
            line = _step(run, compute, ahead, gradients)
            line |= _judged(run, compute, held_out, sample)
            add_metrics(out, line)
            display.show(run, line)
            stop = signals.caught
            if stop or run.step == steps or run.step % save_every == 0:
                save(out, run, keep, batches.windows)
    return stop


def _note_program(out, run, engine):
    """Note in `run` what takes it on; if other things took it so far, say so on stderr."""
    makers = {make: name for name, make in ENGINES.items()}  # "auto" stands for one of them
    then, now = run.program, {**program(), "engine": makers[engine_factory(engine)]}
    changed = [f"{at} {then.get(at)}, now {now[at]}" for at in now if then.get(at) != now[at]]
    if run.step and changed:
        print(f"step {run.step} of {out} was saved with {'; '.join(changed)}: the run goes on, but "
              "its last bits may differ from those of a run that was never interrupted",
              file=sys.stderr)  # fmt: skip
    run.program = now


def _check(out, run, save_every, threads):
    """UserError for what would fail in the middle, and if the directory is not where `run` is."""
    for name, value in (("save_every", save_every), ("threads", threads or 1)):
        if type(value) is not int or value < 1:
            raise UserError(f"expected {name} to be a whole number above 0, got {value!r}")
    newest = saves(out)[-1][0] if saves(out) else run.step
    if newest != run.step:
        raise UserError(f"expected the newest save in {out} to be of step {run.step}, but another "
                        f"program has written step {newest}: go on from that with --resume")


def fit(out, run, batches, held_out, *, engine="auto", threads=None, save_every=SAVE_EVERY,
        keep=KEEP, sample=None, before=None, held=False):  # fmt: skip
    """Take `run` to its last step, or to a signal, saving into `out`. Returns the `Run`.

    `batches.batch(step)` gives tokens (B, T) and targets (B, T, K), a pass has `batches.windows`
    of them; `held_out` has `bits_per_byte`, `bytes_per_token` and `landmarks` as `data.HeldOut`
    has. `sample(config, tokenizer, weights)` gives a text: printed at the end, and its beginning
    after each quarter of the run. `before(run)` is called before the first step. held: whether the
    caller holds the directory already (`rundir.alone`).
    """
    with nullcontext() if held else alone(out):
        _check(out, run, save_every, threads)
        pieces = run.settings.accumulate
        compute = Sharded(engine_factory(engine), run.config, threads, pieces=pieces)
        _note_program(out, run, engine)
        settle(out, run, keep, batches.windows)
        if before:
            before(run)
        display, steps = Display(run.settings.steps, run.step), run.settings.steps
        stop = _steps(out, run, compute, batches, held_out, display, save_every, keep, sample)
        plot(out, held_out)
    if run.step < steps:
        display.say(f"{stop}: step {run.step} of {steps} is saved in {out}; go on with --resume")
    elif sample:
        display.say(sample(run.config, run.tokenizer, run.weights))
    return run


def open_run(out, given, data, begin, resume=False, config=None, tokenizer=None):
    """The run to take further in the directory `out`: a new one or, with `resume`, the one there.

    A new one is `begin(given)`, and nothing is written yet. One that is there must have begun with
    what is `given` (a dict; None: whatever it is), with the data digest `data`, and with `config`
    and `tokenizer` unless they are None.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if not resume:
        if saves(out):
            raise UserError(
                f"expected {out} to hold no run yet, but it does: continue that one with --resume, "
                "or choose another directory with --out"
            )
        return begin(given)
    run = load(out)
    model = dataclasses.asdict(run.config)
    then = {**dataclasses.asdict(run.settings), **model, "data": run.data}
    now = {**given, **(dataclasses.asdict(config) if config else model), "data": data}
    then["tokenizer"], now["tokenizer"] = run.tokenizer.hash, (tokenizer or run.tokenizer).hash
    for name in now:
        if now[name] != then[name]:
            raise UserError(
                f"{out} holds a run with {name} {then[name]}, but {now[name]} was asked for: "
                "resume it with what it began with, or start another in another directory"
            )
    return run


def train(config, data, out, *, steps=None, batch_size=None, accumulate=None, lr=None, seed=None,
          engine="auto", threads=None, save_every=SAVE_EVERY, keep=KEEP, resume=False,
          sample=None, tokenizer=None, before=None):  # fmt: skip
    """Train on `data`, a text file or a prepared folder, into the directory `out`: the `Run`.

    config ModelConfig (None, with `resume`: the run's), whose vocab_size becomes the tokenizer's.
    Settings that are None take the defaults of `Settings` or, with `resume`, the run's. tokenizer
    Tokenizer (None: the folder's, or learned from the text). `fit` tells of the rest. UserError: a
    bad file or setting, a directory that holds another run, a loss that is not finite.
    """
    given = {"steps": steps, "batch_size": batch_size, "accumulate": accumulate, "lr": lr,
             "seed": seed}  # fmt: skip
    prepared = Prepared(data) if Path(data).is_dir() else None
    folder = Path(data) if prepared else Path(out) / "data"
    identity = prepared.digest if prepared else digest(read_text(data))
    known = tokenizer or (prepared and prepared.tokenizer)
    if known and config:
        config = dataclasses.replace(config, vocab_size=known.vocab_size)
    if resume and not saves(out):
        load(out)  # raises, and says what is missing

    def begin(given):
        settings = Settings(**given)  # complains before a long preparation, and not after
        if not prepared:
            prepare_text(data, folder, vocab_size=config.vocab_size, tokenizer=tokenizer)
        known = tokenizer or Tokenizer.load(folder / "tokenizer.json")
        return Run.begin(config, settings, known, identity)

    with alone(out):
        run = open_run(out, given, identity, begin, resume, config, tokenizer)
        prepared = prepared or Prepared(folder)
        if (prepared.digest, prepared.tokenizer.hash) != (run.data, run.tokenizer.hash):
            raise UserError(
                f"expected {folder} to hold the text and the tokens of the run in {out}, but it "
                f"holds others: prepare the text again, with {Path(out) / 'tokenizer.json'}"
            )
        shape = run.settings.batch_size, run.config.context, run.config.n_predict
        return fit(
            out, run, Batches(prepared.train, *shape, run.settings.seed),
            HeldOut(prepared.held_out, run.tokenizer, *shape), engine=engine, threads=threads,
            save_every=save_every, keep=keep, sample=sample, before=before, held=True,
        )  # fmt: skip
