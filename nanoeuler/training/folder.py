# Made from book/e-a-run-that-survives.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-cursor
"""The names in a run directory: its saves and metrics; and errors of the disk.

Leaves out what is inside a save (checkpoint.py).
"""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nanoeuler.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space: on disk, by quota, in a file


def checkpoint_name(step: int) -> str:
    """The name of the folder of a save: in the order of names, the newest is the last."""
    return f"step-{step:08d}"


def checkpoints(out: str | Path) -> list[tuple[int, Path]]:
    """The saves in a run directory, oldest first: [(step, folder)]. Without any there is no run."""
    steps = []
    for path in Path(out).glob("step-*"):
        digits = path.name.removeprefix("step-")
        if digits.isdecimal() and path.name == checkpoint_name(int(digits)) and path.is_dir():
            steps.append((int(digits), path))
    return sorted(steps)


@contextmanager
def writing(out: str | Path, failure: str) -> Iterator[None]:
    """Turn the OSError of a full or forbidden disk into a UserError that begins with `failure`."""
    try:
        yield
    except OSError as error:
        kept = checkpoints(out)
        left = f"the save of step {kept[-1][0]} is complete" if kept else "nothing was saved yet"
        cure = "make room" if error.errno in FULL else "solve that problem"
        cure += ", then continue with --resume" if kept else ", or choose another directory"
        reason = error.strerror or error
        raise UserError(f"{failure} in {out} ({reason}): {left}; {cure}") from None


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn an OSError while `path` is read into a UserError; the file may well be complete."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be read ({error.strerror or error}): "
                        "solve that problem, and try again") from None  # fmt: skip


LOCK = ".lock"  # in a run directory; it is only made in an empty folder, or where a run is


@contextmanager
def locked(out: str | Path) -> Iterator[None]:
    """Lock the directory `out`, made if need be: UserError if another program trains in it.

    Without effect on disks that have no locks, as some network disks.
    """
    with writing(out, "nothing could be written"):
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / LOCK).touch()
    lock = FileLock(Path(out) / LOCK, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"expected to train alone in {out}, but another program trains there now: "
            "wait until it ends, or choose another directory"
        ) from None
    except OSError:
        pass  # this disk has no locks
    try:
        yield
    finally:
        lock.release()


REQUEST = "request.json"  # the request for a run, until a save holds a step of it
BEST = "best"  # folder of the best model, written before the save that knows of it
# The files of a run in its directory, besides its saves.
NAMES = ("config.json", "tokenizer.json", "metrics.jsonl", "loss.png", "data", BEST, REQUEST, LOCK)
# What a killed run leaves of a save or a file; we may remove no other names.
LEFTOVER = re.compile(
    r"\.(step-\d{8,}|((config|request|tokenizer)\.json|metrics\.jsonl|loss\.png)\.\d+)\.part"
)


def is_begun(out: str | Path) -> bool:
    """Whether a run has begun in `out`, with or without a save."""
    return (Path(out) / LOCK).is_file() or bool(checkpoints(out))


def check_free(out: str | Path) -> None:
    """UserError unless `out` is new, empty, or left by a run that died before its first save."""
    with reading(out):
        names = sorted(path.name for path in Path(out).iterdir()) if Path(out).exists() else []
    if LOCK in names:
        names = [name for name in names if name not in NAMES and not LEFTOVER.fullmatch(name)]
    if names:
        raise UserError(
            f"expected {out} to be new or empty, but it holds {names[0]}: choose another directory "
            "with --out"
        )


def remove(path: Path) -> None:
    """Remove a folder or a file; of a link, remove only the link."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def discard(folder: Path) -> None:
    """Remove a save. It is renamed first, because a folder with a save's name must be complete."""
    aside = folder.with_name(f".{folder.name}.part")
    os.rename(folder, aside)
    remove(aside)


def sweep(out: str | Path) -> None:
    """Remove from `out` the leftovers of a killed run."""
    for path in Path(out).glob(".*.part"):
        if LEFTOVER.fullmatch(path.name):
            remove(path)


def clear(out: str | Path, spared: tuple[str, ...] = ()) -> None:
    """Remove what a run without a save left in `out`, except the names in `spared`."""
    with writing(out, "what an earlier run has left could not be removed"):
        for path in Path(out).iterdir():
            if path.name not in spared and (path.name in NAMES or LEFTOVER.fullmatch(path.name)):
                remove(path)


def add_metrics(out: str | Path, line: dict) -> None:
    """Append one line, a dict with its "step", to metrics.jsonl."""
    with writing(out, "metrics.jsonl could not be written"):
        with open(Path(out) / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(out: str | Path) -> list[dict]:
    """The lines of metrics.jsonl as dicts, up to the first that a crash left incomplete."""
    path, lines = Path(out) / "metrics.jsonl", []
    with reading(path):
        texts = path.read_bytes().splitlines() if path.is_file() else []
    for text in texts:
        try:
            line = json.loads(text)
            numbers = line["step"], line["loss"], line.get("bits_per_byte", 0)
            if line["step"] < 1 or not all(map(math.isfinite, numbers)):
                break
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            break
        lines.append(line)
    return lines
