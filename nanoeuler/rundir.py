# Made from book/06d-cpu-training.md by nanoeuler.book: edit the chapter, not this file.


# %% book/06d-cpu-training.md:583
"""What stands in a run directory under which name: its saves, its metrics; and a disk's refusals.

Leaves out what is inside a save (checkpoint.py).
"""

import json
from contextlib import contextmanager
from pathlib import Path

from nanoeuler.errors import UserError


def save_name(step):
    """The name of the folder of a save: in the order of names, the newest is the last."""
    return f"step-{step:08d}"


def saves(out):
    """The saves in a run directory, oldest first: [(step, folder)]. Without one there is no run."""
    found = []
    for path in Path(out).glob("step-*"):
        digits = path.name.removeprefix("step-")
        if digits.isdecimal() and path.name == save_name(int(digits)):
            found.append((int(digits), path))
    return sorted(found)


@contextmanager
def writing(out, failure):
    """Turn what a full or forbidden disk raises into a line for the user; `failure` begins it."""
    try:
        yield
    except OSError as error:
        kept = saves(out)
        left = f"the save of step {kept[-1][0]} is whole" if kept else "nothing is saved there yet"
        then = "then go on with --resume" if kept else "or choose another directory"
        reason = error.strerror or error
        raise UserError(f"{failure} in {out} ({reason}): {left}; make room, {then}") from None


# %% book/06d-cpu-training.md:627
def add_metrics(out, line):
    """Append one line, a dict with its "step", to metrics.jsonl."""
    with writing(out, "metrics.jsonl could not be written"):
        with open(Path(out) / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(out):
    """The lines of metrics.jsonl as dicts, up to the first that a crash left incomplete."""
    path, lines = Path(out) / "metrics.jsonl", []
    for text in path.read_bytes().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            line["step"] + 1  # a dict with a number, or it is not ours
        except (ValueError, TypeError, KeyError):
            break
        lines.append(line)
    return lines


__all__ = [
    "save_name",
    "saves",
    "writing",
    "add_metrics",
    "read_metrics",
]
