# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli-main
"""`nanoeuler prefer`: the command that teaches a model which of two answers is better (DPO).

Leaves out defaults of the run and imports inside functions, as train.py does.
"""

from pathlib import Path
from typing import Annotated

import typer

from nanoeuler.cli import flags
from nanoeuler.cli.stdio import tell
from nanoeuler.errors import UserError

# Only CPU engines can do this.
Engine = Annotated[str, typer.Option(metavar="NAME", help="cpu, fused or reference")]
PREFERRED = Path("runs/preferred")  # it starts from flags.CHAT
# The settings of a run with a number of steps, which takes each batch through memory at once.
SETTINGS = {
    name: kind for name, kind in flags.SETTINGS.items()
    if name not in ("minutes", "accumulate", "recompute")
}


# Pairs, so that the held-out tenth has the two that make a comparison.
FEWEST = 20


def _comparisons(data):
    """Comparisons to learn from, and held-out ones: made of pairs, or read from a file."""
    from nanoeuler import api
    from nanoeuler.data.text import TRAIN_SHARE
    from nanoeuler.training.dpo import halves
    from nanoeuler.training.preferences import read_preferences

    path = api.path_of("data", data)
    if data == "docs" or path.is_dir():
        pairs = [pair for pair in api.pairs_of(data) if [*map(type, pair)] == [str, str]]
        if len(pairs) < FEWEST:
            raise UserError(f"expected at least {FEWEST} pairs of a question and an answer, "
                            f"but {data} has {len(pairs)}: give more")  # fmt: skip
        return halves(pairs)
    if not path.is_file():
        raise UserError(f"expected docs, a file of comparisons, or a folder of prepared pairs, but "
                        f"there is no {path}: name another")  # fmt: skip
    found = read_preferences(path)
    cut = int(len(found) * TRAIN_SHARE)
    if not cut:
        raise UserError(f"expected at least 2 comparisons in {path}, got {len(found)}: one is "
                        "held out, and one is learned from")  # fmt: skip
    return found[:cut], found[cut:]


@flags.grouped(settings=SETTINGS, options={**flags.DPO, **flags.EXECUTION})
def prefer(
    settings: flags.Group, options: flags.Group, data: flags.Data = "docs",
    base: flags.From = flags.CHAT, out: flags.Out = PREFERRED, engine: Engine = "cpu",
    resume: flags.Resume = False,
) -> None:  # fmt: skip
    """Teach a model which of two answers is better (DPO).

    Without flags, it continues runs/chat on docs: what is said of a function in its documentation
    is better than what is said of another. A file for --data has one JSON object a line:
    {"question": TEXT, "chosen": TEXT, "rejected": TEXT}. With --resume, give the same flags again.
    It uses the CPU only.

    Example: nanoeuler prefer --from runs/chat --out runs/preferred
    """
    from nanoeuler.training import dpo as preferring
    from nanoeuler.training.checkpoint import read_record
    from nanoeuler.training.train import settings_for

    folder = flags.folder_out(out)
    if not resume:
        read_record(base)  # as for sft
    run = preferring.prefer(
        base, _comparisons(data), folder, resume=resume, engine=engine,
        settings=settings_for(folder, resume, preferring.PREFERRING, **settings), **options,
    )  # fmt: skip
    if run.step < run.settings.steps:
        raise KeyboardInterrupt
    tell(f"saved in {folder}; next: nanoeuler chat --from {folder}")
