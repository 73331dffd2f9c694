# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli-speedrun
"""`nanoeuler speedrun`: train against the clock, and keep the record.

Imports inside functions, as main.py does; here their time counts, too.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from nanoeuler.cli import flags
from nanoeuler.cli.stdio import tell
from nanoeuler.errors import UserError

# A race has minutes instead of steps, and takes the vocabulary of its data.
SETTINGS = {name: kind for name, kind in flags.SETTINGS.items() if name != "steps"}
# All sizes but that of the vocabulary.
SIZES = {name: kind for name, kind in flags.SIZES.items() if name != "vocab_size"}
_Recipe = Annotated[str, typer.Option(metavar="NAME|FILE", help="adamw, muon, or a .json file")]
_Engine = Annotated[str, typer.Option(metavar="NAME", help="cuda, or cpu for a rehearsal")]
_Idea = Annotated[str | None, typer.Option(metavar="TEXT", help="what is new about this run")]
_Predicted = Annotated[float | None, typer.Option(
    parser=flags.number, metavar="X", help="bits per byte that you predict")]
_Log = Annotated[Path | None, typer.Option(
    metavar="FILE", help="file of records  [default: data/speedrun.jsonl]")]
_Listed = Annotated[bool, typer.Option("--list", help="show the records, and do nothing else")]


@flags.grouped(settings=SETTINGS, sizes=SIZES)
def speedrun(
    settings: flags.Group, sizes: flags.Group, data: flags.Data = None,
    out: flags.OutDir = None, recipe: _Recipe = "muon", engine: _Engine = "cuda",
    threads: flags.Threads = None, idea: _Idea = None, predicted: _Predicted = None,
    log: _Log = None, listed: _Listed = False,
) -> None:  # fmt: skip
    """Train for five minutes on one GPU, and score: a benchmark.

    The clock starts with this process and stops after the last step; then the model is judged on
    the held-out part of --data, a prepared folder. Flags for settings and sizes change the recipe.
    It prints the result and adds it to a file of records, which --list shows. Without --out, the
    model isn't kept.

    Example: nanoeuler speedrun --data data/prepared/books --recipe muon --seed 1
    """
    from nanoeuler.paths import data_folder
    from nanoeuler.training.clock import Clock

    log = log or data_folder("speedrun.jsonl")
    if listed:
        return _list(log)
    _check_log(log)
    if data is None:
        raise UserError("expected --data, a folder made by nanoeuler data prepare, but got none")
    from nanoeuler.engines.registry import warm_up

    warm_up(engine)  # while the next lines import
    from nanoeuler.training import speedrun as race

    clock, kept = Clock(60 * settings.get("minutes", race.MINUTES)), out and flags.folder_out(out)
    fields = {flags.FIELDS.get(name, name): size for name, size in sizes.items()}
    chosen = race.recipe_of(recipe).with_changes(fields, settings)
    record = race.speedrun(
        Path(data), chosen, clock, engine=engine, threads=threads, out=kept,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    ) | {"idea": idea, "predicted": predicted}  # fmt: skip
    race.add_record(log, record)
    if record["corpus"] == "another corpus":
        print("the data isn't the corpus on which records are compared", file=sys.stderr)
    tell(race.result(record))


def _check_log(log):
    """UserError if no record can be added to the file `log`, which may be new."""
    path = Path(os.path.realpath(log))
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if there.is_dir() == (there == path) or not os.access(there, os.W_OK):
        raise UserError(f"expected a file that can be written for --log, got {log}: name another")


def _list(log):
    """Print the records in a file."""
    from nanoeuler.training.speedrun import read_records, table

    records = read_records(log)
    tell(table(records) if records else f"no speedrun has been recorded in {log} yet")
