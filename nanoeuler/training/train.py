# Made from book/06d-cpu-training.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-open
"""From a text to a trained model in a directory: a run is opened, its data are, its steps taken.

Leaves out how the steps are taken (loop.py) and what a directory holds (saves.py).
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nanoeuler.data.batches import Batches
from nanoeuler.data.heldout import HeldOut
from nanoeuler.data.prepare import prepare_text
from nanoeuler.data.prepared import Prepared
from nanoeuler.data.text import digest_of
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESETS, ModelConfig
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.folder import LOCK, alone, check_free, clear, is_begun, remove, saves
from nanoeuler.training.loop import SAVE_EVERY, Sample, fit
from nanoeuler.training.run import Run, Settings, check_batch
from nanoeuler.training.saves import KEEP, load, read_record


def settings_for(
    out: str | Path, resume: bool, default: Settings | None = None, **changes
) -> Settings:
    """The settings of a run of which `changes` were asked for; the rest is the default's.

    With `resume` the rest is that of the run in `out`, if it has one yet.
    """
    base = read_record(out).settings if resume and saves(out) else default or Settings()
    return dataclasses.replace(base, **changes)


def _compare(out, run: Run, settings, config, tokenizer, data: str) -> None:
    """UserError unless the run in `out` began with all of these that are not None."""
    before = {**dataclasses.asdict(run.settings), **dataclasses.asdict(run.config)}
    before |= {"data": run.data, "tokenizer": run.tokenizer.hash}
    asked = {"data": data, "tokenizer": (tokenizer or run.tokenizer).hash}
    for each in filter(None, (settings, config)):
        asked |= dataclasses.asdict(each)
    asked["vocab_size"] = run.config.vocab_size  # the tokenizer's, whatever was asked for
    if settings and settings.steps is not None:
        asked.pop("minutes")
    for name, value in asked.items():
        if value not in (None, before[name]):
            raise UserError(
                f"{out} holds a run with {name} {before[name]}, but {value} was asked for: "
                "resume it with what it began with, or start another in another directory"
            )


@contextmanager
def open_run(
    out: str | Path, begin: Callable[[], Run], *, data: str, settings: Settings | None = None,
    config: ModelConfig | None = None, tokenizer: Tokenizer | None = None, resume: bool = False,
) -> Iterator[Run]:  # fmt: skip
    """Hold the directory `out`, and yield the run to take further there; a context.

    A new run is `begin()`, in a directory that is new or empty; what fails before its first save
    leaves it so. With `resume` it is the run that is there, which must have begun with the data of
    this digest and with all else that is not None; or a new one, where a run died before its first
    save. UserError for another directory.
    """
    out = Path(out)
    if saves(out) and not resume:
        raise UserError(
            f"expected {out} to hold no run yet, but it does: continue that one with --resume, "
            "or choose another directory with --out"
        )
    if resume and not is_begun(out):
        raise UserError(f"expected a run in {out}, but there is none: leave out --resume to begin")
    if not saves(out):
        check_free(out)
    new = not out.exists()
    with alone(out):
        try:
            if saves(out):
                run = load(out)
                _compare(out, run, settings, config, tokenizer, data)
            else:
                if resume:
                    print(f"nothing was saved in {out}: the run begins", file=sys.stderr)
                clear(out, spared=("data", LOCK))
                run = begin()
            yield run
        except BaseException:
            if not saves(out):
                clear(out)
                if new:
                    with suppress(OSError):  # somebody else has put something there
                        os.rmdir(out)
            raise


def train(
    data: str | Path, out: str | Path, *, config: ModelConfig | None = None,
    settings: Settings | None = None, tokenizer: Tokenizer | None = None, engine: str = "auto",
    threads: int | None = None, save_every: int = SAVE_EVERY, keep: int = KEEP,
    resume: bool = False, sample: Sample | None = None,
    on_step: Callable[[dict], None] | None = None,
    before: Callable[[Run, float], None] | None = None,
) -> Run:  # fmt: skip
    """Train on `data`, a text file or a prepared folder, into the directory `out`: the `Run`.

    None is, with `resume`, what the run in `out` began with; else config is the small preset, whose
    vocab_size becomes the tokenizer's, settings are `Settings()`, and the tokenizer is the prepared
    folder's or learned from the text. `fit` tells of the rest. UserError: a bad file or setting, a
    directory that holds anything else, and what `fit` raises.
    """
    prepared = Prepared(data) if Path(data).is_dir() else None
    folder = Path(data) if prepared else Path(out) / "data"
    digest = prepared.digest if prepared else digest_of(data)

    def begin() -> Run:
        model, chosen = config or PRESETS["small"], settings or Settings()
        check_batch(model, chosen)  # before a long preparation, and not after
        if not prepared:
            remove(folder)  # left by a run that died before its first save
            prepare_text(data, folder, vocab_size=model.vocab_size, tokenizer=tokenizer)
        ids = tokenizer or Tokenizer.load(folder / "tokenizer.json")
        model = dataclasses.replace(model, vocab_size=ids.vocab_size)
        return Run.begin(model, chosen, ids, digest)

    with open_run(out, begin, data=digest, settings=settings, config=config, tokenizer=tokenizer,
                  resume=resume) as run:  # fmt: skip
        prepared = prepared or Prepared(folder)
        if (prepared.digest, prepared.tokenizer.hash) != (run.data, run.tokenizer.hash):
            raise UserError(
                f"expected {folder} to hold the text and the tokens of the run in {out}, but it "
                f"holds others: prepare the text again, with {Path(out) / 'tokenizer.json'}"
            )
        shape = run.settings.batch_size, run.config.context, run.config.n_predict
        return fit(
            out, run, Batches(prepared.train, *shape, run.settings.seed),
            HeldOut.from_tokens(prepared.held_out, run.tokenizer, *shape),
            engine=engine, threads=threads,
            save_every=save_every, keep=keep, sample=sample, on_step=on_step, before=before,
        )  # fmt: skip
