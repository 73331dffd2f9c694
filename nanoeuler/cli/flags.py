# Made from book/12-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli
"""What each flag of the command line means, written once: the type of a command's parameter.

And what the name behind a flag stands for, where that is not the flag itself. Imports inside
functions, as main.py does.
"""

from pathlib import Path
from typing import Annotated

import typer

from nanoeuler.errors import UserError

# The text, or the pairs, to learn from; docs is the embedded corpus.
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="NAME|FILE|DIR", help="docs, a file, or prepared data"),
]
# Runs are directories, as saves.py describes them.
From = Annotated[
    Path, typer.Option("--from", metavar="RUN_DIR", file_okay=False, help="the folder to read")
]
# Files that somebody else has brought here.
FromDir = Annotated[
    Path | None,
    typer.Option("--from", metavar="DIR", file_okay=False, help="the folder to read"),
]
# A new run, or with --resume one that is there.
Out = Annotated[
    Path, typer.Option("--out", metavar="RUN_DIR", file_okay=False, help="where to write")
]
# For a command whose result is one file.
OutFile = Annotated[Path, typer.Option("--out", metavar="FILE", help="where to write")]
# For a command whose result is a folder, which has a name of its own if none is given.
OutDir = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", file_okay=False, help="where to write")
]
# As load_tokenizer reads it: a folder stands for the tokenizer in it.
Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FILE|RUN_DIR", help="a tokenizer.json, or a run with one"),
]
# A name of parallel.ENGINES.
Engine = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, fused or reference")]
# A name of config.PRESETS.
Preset = Annotated[
    str | None, typer.Option(metavar="NAME", help="small, euler-10m, euler-116m or gpt2-124m")
]
# These five are settings of the run: left out, the run's own or the default.
Steps = Annotated[int | None, typer.Option(min=1, metavar="N", help="steps of the whole run")]
# Sequences of a whole context each.
BatchSize = Annotated[int | None, typer.Option(min=1, metavar="N", help="sequences in a step")]
# As parallel.Sharded reads its pieces: less memory, the same step but for rounding.
Accumulate = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="parts in which a step goes through memory")
]
# The peak of the schedule in optim.py.
Lr = Annotated[float | None, typer.Option(metavar="X", help="the highest learning rate")]
# Of initial weights, of the order of batches, of what is drawn.
Seed = Annotated[int | None, typer.Option(min=0, metavar="N", help="decides all that is random")]
# A crash costs at most so many steps.
SaveEvery = Annotated[int, typer.Option(min=1, metavar="N", help="steps between checkpoints")]
# Newer ones push out older ones.
Keep = Annotated[int, typer.Option(min=1, metavar="N", help="checkpoints to keep")]
# Without it, a directory that holds a run is refused.
Resume = Annotated[bool, typer.Option("--resume", help="go on with the run in --out")]
# As Tokenizer.train counts it; left out, VOCAB_SIZE.
VocabSize = Annotated[
    int | None, typer.Option(metavar="N", help="how many ids: bytes, merges, special tokens")
]
VOCAB_SIZE = 512  # the preset small's
# To generate, or to plan for.
Tokens = Annotated[int | None, typer.Option(min=1, metavar="N", help="how many tokens")]
# This and the next two are the knobs of generate.distribution.
Temperature = Annotated[float, typer.Option(metavar="X", help="0: the most probable token")]
# Checked there, like all three.
TopK = Annotated[int, typer.Option(metavar="N", help="of the N most probable tokens; 0: of all")]
# The nucleus.
TopP = Annotated[float, typer.Option(metavar="X", help="of the tokens that together have X")]


# The files of prepared data that are written last: a folder with one of them is whole.
PREPARED = ("prepared.json", "pairs.jsonl")


def is_prepared(folder):
    """Whether `folder` holds what nanoeuler data prepare makes: tokens of a text, or pairs."""
    return any((folder / last).exists() for last in PREPARED)


def not_prepared(out):
    """`out`, if what is written there cannot spoil prepared data."""
    if is_prepared(out):
        raise UserError(f"{out} holds prepared data: name another folder with --out, or remove it")
    return out


def plain(path):
    """`path`, if it is no compressed file, whose bytes are no text."""
    if path.suffix == ".gz":
        raise UserError(f"expected plain text, but {path} is compressed: gunzip -k {path} first")
    return path


def load_tokenizer(path):
    """The tokenizer of `path`: a tokenizer.json, or a folder that holds one."""
    from nanoeuler.tokenizer.tokenizer import Tokenizer

    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise UserError(
            f"expected a tokenizer.json or a run directory, but there is no {path}: name one with "
            "--tokenizer, or make one with nanoeuler tokenizer train"
        )
    return Tokenizer.load(path)


def engine_name(name):
    """`name`, if this version can train with it; asked before anything is written."""
    if name == "cuda":
        raise UserError("engine cuda: this version trains on a CPU: choose auto")
    from nanoeuler.engines.cpu.stepper import engine_factory

    engine_factory(name)
    return name


def preset_config(name):
    """The configuration of that name."""
    from nanoeuler.model.config import PRESETS

    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}: choose {' or '.join(PRESETS)}")
    return PRESETS[name]
