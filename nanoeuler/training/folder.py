# Made from book/06d-cpu-training.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-cursor
"""What stands in a run directory under which name: its saves, its metrics; and a disk's refusals.

Leaves out what is inside a save (saves.py).
"""

import errno
import json
import math
import os
from contextlib import contextmanager
from pathlib import Path

from nanoeuler.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk, a user's share, a file


def save_name(step):
    """The name of the folder of a save: in the order of names, the newest is the last."""
    return f"step-{step:08d}"


def saves(out):
    """The saves in a run directory, oldest first: [(step, folder)]. Without one there is no run."""
    found = []
    for path in Path(out).glob("step-*"):
        digits = path.name.removeprefix("step-")
        if digits.isdecimal() and path.name == save_name(int(digits)) and path.is_dir():
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
        cure = "make room" if error.errno in FULL else "remove the cause"
        cure += ", then go on with --resume" if kept else ", or choose another directory"
        reason = error.strerror or error
        raise UserError(f"{failure} in {out} ({reason}): {left}; {cure}") from None


@contextmanager
def alone(out):
    """Hold the directory `out`, made if need be: UserError if another program trains in it.

    Without effect on Windows, and on network disks that have no locks.
    """
    with writing(out, "nothing could be written"):
        Path(out).mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"expected to train alone in {out}, but another program trains there now: "
                "wait until it ends, or choose another directory"
            ) from None
        except OSError:
            pass  # no locks on this disk
        yield
    finally:
        os.close(handle)


def add_metrics(out, line):
    """Append one line, a dict with its "step", to metrics.jsonl."""
    with writing(out, "metrics.jsonl could not be written"):
        with open(Path(out) / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(out):
    """The lines of metrics.jsonl as dicts, up to the first that a crash left incomplete."""
    path, lines = Path(out) / "metrics.jsonl", []
    for text in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
            numbers = line["step"], line["loss"], line.get("bits_per_byte", 0)
            if line["step"] < 1 or not all(map(math.isfinite, numbers)):
                break
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            break
        lines.append(line)
    return lines
