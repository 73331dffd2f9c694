# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-measurements
"""Measured numbers as data: rows in data/measurements/NAME.json that chapters plot and quote.

A row's keys: what, case, engine, value, unit, peer, peer_value, device, versions, commit, date.
"""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from nanoeuler.errors import UserError
from nanoeuler.files import project_root, replacing

Row = dict[str, Any]  # a measurement, its keys as above


def load(name: str) -> list[Row]:
    """The rows of data/measurements/NAME.json, a list of dicts."""
    path = project_root() / "data" / "measurements" / f"{name}.json"
    if not path.exists():
        raise UserError(f"no measurements named {name!r}: expected {path}")
    return json.loads(path.read_text(encoding="utf-8"))


def save(name: str, rows: Iterable[Row]) -> None:
    """Write `rows` as data/measurements/NAME.json, one row a line, replacing what was there."""
    path = project_root() / "data" / "measurements" / f"{name}.json"
    with replacing(path) as temporary:
        text = ",\n".join(json.dumps(row, sort_keys=True) for row in rows)
        temporary.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def update(name: str, rows: Iterable[Row]) -> None:
    """Save `rows`, replacing those with the same what, case, engine and peer; others stay."""

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[field] for field in ("what", "case", "engine", "peer"))

    rows = list(rows)
    new = {key(row) for row in rows}
    try:
        stored = load(name)
    except UserError:  # there are none yet
        stored = []
    save(name, [row for row in stored if key(row) not in new] + rows)


def cores() -> int:
    """The number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device() -> str:
    """The name of this machine's processor, and the number of cores that this process may use."""
    name = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")  # the one place on Linux with the name that it's sold under
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().split("\n") if line.startswith("model name")]
        name = lines[0].split(":")[1].strip() if lines else name
    return f"{name}, {cores()} cores"


def commit() -> str:
    """The commit of the code, with "-dirty" if a file has changed that can influence a result.

    Measurements and notebooks can't, although measuring and running the book changes them.
    """
    git = ["git", "-C", str(project_root())]
    written = ":(top,exclude)data/measurements", ":(top,exclude,glob)**/*.ipynb"
    name, changes = (
        subprocess.run([*git, *command], capture_output=True, text=True).stdout.strip()
        for command in (
            ["describe", "--always", "--exclude=*"],
            ["status", "--porcelain", "--untracked-files=no", "--", ":/", *written],
        )
    )
    return f"{name}-dirty" if changes else name


def row(
    what: str,
    case: str,
    engine: str,
    value: float,
    unit: str,
    peer: str | None = None,
    peer_value: float | None = None,
) -> Row:
    """One measurement of this machine's processor, with its circumstances."""
    versions = {"python": platform.python_version()}
    for name in ("numpy", "numba", *([peer] if peer else [])):
        try:
            versions[name] = metadata.version(name.split()[0])
        except metadata.PackageNotFoundError:
            pass  # a peer need not be a Python package
    return {
        "what": what, "case": case, "engine": engine, "value": value, "unit": unit,
        "peer": peer, "peer_value": peer_value, "device": device(), "versions": versions,
        "commit": commit(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip
