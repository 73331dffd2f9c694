# Made from book/11-fine-tuning-and-chat.md by nanoeuler.book: edit the chapter, not this file.


# %% book/11-fine-tuning-and-chat.md:788
"""What each flag of the command line means, written once, as the type of a command's parameter."""

from pathlib import Path
from typing import Annotated

import typer

# The text, or the pairs, to learn from; docs is the embedded corpus.
Data = Annotated[str, typer.Option("--data", metavar="NAME|FILE", help="docs, or a file")]
# Runs are directories, as checkpoint.py describes them.
From = Annotated[Path, typer.Option("--from", metavar="RUN_DIR", help="the run to read")]
# A new run, or with --resume one that is there.
Out = Annotated[Path, typer.Option("--out", metavar="RUN_DIR", help="where to write")]
# For a command whose result is one file.
OutFile = Annotated[Path, typer.Option("--out", metavar="FILE", help="where to write")]
# As cli_tokenizer.load_tokenizer reads it: a run directory stands for the tokenizer in it.
Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FILE|RUN_DIR", help="a tokenizer.json, or a run with one"),
]
# A name of parallel.ENGINES.
Engine = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu or reference")]
# A name of config.PRESETS.
Preset = Annotated[str | None, typer.Option(metavar="NAME", help="small, euler-116m or gpt2-124m")]
# These four are settings of the run: left out, the run's own or the default.
Steps = Annotated[int | None, typer.Option(min=1, metavar="N", help="steps of the whole run")]
# Sequences of a whole context each.
BatchSize = Annotated[int | None, typer.Option(min=1, metavar="N", help="sequences in a step")]
# The peak of the schedule in optim.py.
Lr = Annotated[float | None, typer.Option(metavar="X", help="the highest learning rate")]
# Of initial weights, of the order of batches, of what is drawn.
Seed = Annotated[int | None, typer.Option(min=0, metavar="N", help="decides all that is random")]
# A crash costs at most so many steps.
SaveEvery = Annotated[int, typer.Option(min=1, metavar="N", help="steps between checkpoints")]
# Without it, a directory that holds a run is refused.
Resume = Annotated[bool, typer.Option("--resume", help="go on with the run in --out")]
# As Tokenizer.train counts it.
VocabSize = Annotated[int, typer.Option(metavar="N", help="bytes, merges and special tokens")]
# To generate, or to plan for.
Tokens = Annotated[int | None, typer.Option(min=1, metavar="N", help="how many tokens")]
# This and the next two are the knobs of generate.distribution.
Temperature = Annotated[float, typer.Option(metavar="X", help="0: the most probable token")]
# Checked there, like all three.
TopK = Annotated[int, typer.Option(metavar="N", help="of the N most probable tokens; 0: of all")]
# The nucleus.
TopP = Annotated[float, typer.Option(metavar="X", help="of the tokens that together have X")]


__all__ = [
    "Data",
    "From",
    "Out",
    "OutFile",
    "Tokenizer",
    "Engine",
    "Preset",
    "Steps",
    "BatchSize",
    "Lr",
    "Seed",
    "SaveEvery",
    "Resume",
    "VocabSize",
    "Tokens",
    "Temperature",
    "TopK",
    "TopP",
]
