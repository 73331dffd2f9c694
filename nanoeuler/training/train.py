# Made from book/e-a-run-that-survives.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-open
"""From a text to a trained model in a directory: open a run and its data, and take its steps.

Leaves out how the steps are taken (loop.py) and what a directory holds (checkpoint.py).
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Unpack

from nanoeuler.data.batches import Batches
from nanoeuler.data.dataset import Prepared
from nanoeuler.data.prepare import prepare_text
from nanoeuler.data.text import Scanned, scanned
from nanoeuler.data.validation import HeldOut
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESET, PRESETS, ModelConfig
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.checkpoint import Request, load, read_origin, read_request, write_request
from nanoeuler.training.folder import (
    LOCK,
    REQUEST,
    check_free,
    checkpoints,
    clear,
    is_begun,
    locked,
    read_metrics,
    remove,
)
from nanoeuler.training.loop import Execution, Options, fit
from nanoeuler.training.run import Run, Settings, check_batch

# Presets that have settings of their own: measured in chapter 9c.
RECIPES = {
    "small-modern": Settings(optimizer="muon", momentum=0.9, weight_decay=0.1),
}
# What a run that died before its first save needs to continue.
ASKED = ("data", "tokenizer.json", REQUEST, LOCK)


def recipe(preset: str | None = None) -> Settings:
    """The settings that a preset is trained with; None: the default preset."""
    return RECIPES.get(preset or PRESET, Settings())


def of_a_new_run(
    config: ModelConfig | None, settings: Settings | None
) -> tuple[ModelConfig, Settings]:
    """The model and the settings of a new run: those given; if neither is, PRESET and its recipe.

    A model without settings has `Settings()`; settings without a model are those of PRESET, as
    they are.
    """
    usual = recipe() if config is None else Settings()
    return config or PRESETS[PRESET], settings or usual


def settings_for(
    out: str | Path, resume: bool, default: Settings | None = None, **changes: float | None
) -> Settings:
    """The settings of a run: `changes`, and for the rest `default` (None: `Settings()`).

    With `resume`, the rest is that of the run in `out`, or of its request.
    """
    origin = read_origin(out) if resume else None
    base = origin and origin.settings or default or Settings()
    return dataclasses.replace(base, **changes)


def _flat(of: Run | Request) -> dict:
    """What a run began with, or its request, as {name of a field: value}."""
    values = {f"lora_{name}": getattr(of.lora, name, None) for name in ("rank", "alpha", "targets")}
    for each in filter(None, (of.settings, of.config)):
        values |= dataclasses.asdict(each)
    return values | {"data": of.data, "tokenizer": of.tokenizer and of.tokenizer.hash}


def _compare(out, before: Run | Request, asked: Request) -> None:
    """UserError unless the run in `out` began with everything that is asked for and not None."""
    facts, wanted = _flat(before), _flat(asked)
    if before.tokenizer:
        wanted.pop("vocab_size", None)  # the tokenizer decides it, whatever was asked for
    if asked.settings and asked.settings.steps is not None:
        wanted.pop("minutes")
    wanted.pop("recompute", None)  # changes no bit
    for name, value in wanted.items():
        if value is not None and name in facts and value != facts[name]:
            raise UserError(
                f"{out} holds a run with {name} {facts[name]}, but {value} was asked for: "
                "resume it without changing that, or start another run in another directory"
            )


def _found_or_begun(out, begin: Callable[[], Run], asked: Request, resume: bool) -> Run:
    """The run in `out`, or a new one, whose request has been written; see `open_run`."""
    if checkpoints(out):
        run = load(out)
        _compare(out, run, asked)
        return run
    request = read_request(out) if resume else None
    if request:
        _compare(out, request, asked)
    if resume:
        print(f"nothing was saved in {out}: the run begins", file=sys.stderr)
    clear(out, spared=ASKED if request else ("data", LOCK))
    if not request:
        write_request(out, asked)
    return begin()


@contextmanager
def open_run(
    out: str | Path, begin: Callable[[], Run], asked: Request, resume: bool = False
) -> Iterator[Run]:
    """A context that locks the directory `out`, and yields the run to train there.

    A new run is `begin()`, in a directory that is new or empty, where request.json then holds what
    is `asked` (`read_request`); what fails before its first step leaves the directory as it was.
    With `resume` it is the run that is there, which must have begun with all that is asked and not
    None; or, where a run died before its first save, `begin()` with its request. Only `recompute`
    may be another, since another card may need it. UserError for another directory.
    """
    out = Path(out)
    if checkpoints(out) and not resume:
        raise UserError(
            f"expected {out} to hold no run yet, but it does: continue that one with --resume, "
            "or choose another directory with --out"
        )
    if resume and not is_begun(out):
        raise UserError(f"expected a run in {out}, but there is none: leave out --resume to begin")
    if not checkpoints(out):
        check_free(out)
    new = not out.exists()
    with locked(out):
        try:
            run = _found_or_begun(out, begin, asked, resume)
            if asked.settings:
                again = asked.settings.recompute
                run.settings = dataclasses.replace(run.settings, recompute=again)
            yield run
        except BaseException:
            if not checkpoints(out) and not read_metrics(out):
                clear(out, spared=ASKED if resume else ())
                if new:
                    with suppress(OSError):  # somebody else has put something there
                        os.rmdir(out)
            raise


def own_text(out: Path) -> Path:
    """The text of the run in `out`: its own tokens, or the path in its request."""
    own, request = out / "data", read_request(out)
    if (own / "prepared.json").exists():
        return own
    if request and request.text:
        return request.text
    if not checkpoints(out):
        raise UserError(
            f"expected a run in {out}, but there is none: name another folder, or leave out "
            "--resume to begin one"
        )
    raise UserError(
        f"expected the run's own text in {own}, but there is none, since the run began with "
        "prepared data or with pairs: name the data (--data)"
    )


def _first(asked: Request, folder: Path, known: Scanned | None, ids: Tokenizer | None) -> Run:
    """A run before its first step; its text, if it was scanned (`known`), is prepared first.

    ids: the tokenizer of the folder, if that has been opened.
    """
    model, chosen = of_a_new_run(asked.config, asked.settings)
    check_batch(model, chosen)  # before a long preparation, not after it
    if known:
        remove(folder)  # left by a run that died before its first save
        prepare_text(asked.text, folder, vocab_size=model.vocab_size, tokenizer=asked.tokenizer,
                     known=known)  # fmt: skip
    ids = asked.tokenizer or ids or Tokenizer.load(folder / "tokenizer.json")
    model = dataclasses.replace(model, vocab_size=ids.vocab_size)
    return Run.begin(model, chosen, ids, asked.data)


def _sides(prepared: Prepared, run: Run, out: Path) -> tuple[Batches, HeldOut]:
    """The run's training and held-out data. UserError if the folder is not the run's."""
    if (prepared.digest, prepared.tokenizer.hash) != (run.data, run.tokenizer.hash):
        raise UserError(
            f"expected {prepared.folder} to hold the text and the tokens of the run in {out}, but "
            f"it holds others: prepare the text again, with {out / 'tokenizer.json'}"
        )
    shape = run.settings.batch_size, run.config.context, run.config.n_predict
    return (Batches(prepared.train, *shape, run.settings.seed),
            HeldOut.from_tokens(prepared.held_out, run.tokenizer, *shape))  # fmt: skip


def train(
    data: str | Path | None, out: str | Path, *, config: ModelConfig | None = None,
    settings: Settings | None = None, tokenizer: Tokenizer | None = None, resume: bool = False,
    **options: Unpack[Options],
) -> Run:  # fmt: skip
    """Train on `data`, a text file or a prepared folder, into the directory `out`: the `Run`.

    None is, with `resume`, what the run in `out` began with, or what was asked of it if it died
    before its first save; else config and settings are those of `of_a_new_run`, vocab_size becomes
    the tokenizer's, and the tokenizer is the prepared folder's or learned from the text.
    `options` are those of `fit`. UserError: a bad file or argument, a directory that holds anything
    else, and what `fit` raises.
    """
    Execution(**options)  # check the options before doing anything
    out = Path(out)
    text = own_text(out) if data is None else Path(data)
    prepared = Prepared(text) if text.is_dir() else None
    folder = text if prepared else out / "data"
    known = None if prepared else scanned(text)
    digest = prepared.digest if prepared else known.digest
    if not resume:
        config, settings = of_a_new_run(config, settings)

    new = Request(config, settings, tokenizer, digest, text)

    def begin() -> Run:
        asked = read_request(out) if resume else new
        return _first(asked._replace(data=digest, text=text), folder, known,
                      prepared and prepared.tokenizer)  # fmt: skip

    with open_run(out, begin, new, resume) as run:
        return fit(out, run, *_sides(prepared or Prepared(folder), run, out), **options)
