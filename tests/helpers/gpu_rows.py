"""Rows of checks and contests on a GPU: written as soon as there are any, and found again.

A job is "check: FAMILY: NAME" or "time: FAMILY: WHAT: CASE"; its outcome is what a child of
tests/bench/gpu.py returns. Rows go to data/measurements, and to the folder $OUT where that is set.
"""

import datetime
import json
import os
import platform
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from nanoeuler import measurements
from nanoeuler.errors import UserError
from nanoeuler.files import replacing
from nanoeuler.measurements import Row

PACKAGES = "numpy", "numba", "numba-cuda", "torch"  # whose versions all rows name
FILES = {"check": "gpu", "time": "kernels"}  # where rows go, in data/measurements
BESIDE = ", in turn", ", clock", ", power"  # rows of a contest that are not its time alone
Outcome = dict[str, Any]


def circumstances(device: str | None, commit: str) -> Row:
    """What all rows say of where they were measured."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {
        "device": device, "commit": commit, "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()} | versions,
    }  # fmt: skip


def errors_of(outcome: Outcome) -> dict[str, Outcome]:
    """Part -> errors of a check's outcome; the part is "" where there is but one."""
    return {"": outcome} if "error" in outcome else outcome


def check_rows(job: str, outcome: Outcome, where: Row) -> Iterator[Row]:
    """A row for each part of a check."""
    name = job.split(": ", 1)[1]
    for part, seen in errors_of(outcome).items():
        peer = seen.get("peer")
        yield where | {
            "what": "check", "case": f"{name}{part and ', ' + part}", "engine": "cuda",
            "value": seen["error"], "unit": seen.get("unit", "relative to float64"),
            "peer": None if peer is None else "torch", "peer_value": peer,
        }  # fmt: skip


def time_rows(outcome: Outcome, where: Row) -> Iterator[Row]:
    """Rows of one contest: ours under "cuda", each other entrant under its own name."""
    what, case, seen = outcome["what"], outcome["case"], outcome["times"]
    peers = [who for who in outcome["peers"] if who in seen]

    def row(what, engine, unit, value, peer=None, peer_value=None):
        return where | {
            "what": what, "case": case, "engine": engine, "value": round(value, 5),
            "unit": unit, "peer": peer, "peer_value": peer_value and round(peer_value, 5),
        }  # fmt: skip

    names = [(who, who) for who in seen] + [("cuda", outcome["ours"])] * (outcome["ours"] in seen)
    for engine, who in names:
        yield row(f"{what}, clock", engine, "MHz", seen[who]["MHz"])
        yield row(f"{what}, power", engine, "W", seen[who]["W"])
        for way, title in (("alone", what), ("in turn", f"{what}, in turn")):
            for peer in peers if who not in outcome["peers"] else []:
                yield row(title, engine, "ms", seen[who][way], peer, seen[peer][way])
            if not outcome["peers"]:
                yield row(title, engine, "ms", seen[who][way])


def write(kind: str, rows: list[Row]) -> None:
    """Put rows of a kind of FILES where they belong; either all are there afterwards, or none."""
    if folder := os.environ.get("OUT"):
        path = Path(folder) / f"{FILES[kind]}.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(before + rows, indent=0), encoding="utf-8")
    try:
        measurements.update(FILES[kind], rows)
    except UserError:  # a copy without the book has no place for them
        pass


def same(kind: str, where: Row) -> list[Row]:
    """Rows of a kind that were measured before where all is as in `where`: commit and device.

    A commit without a name, or with changes, may be other code under the same name: none then.
    """
    if not where["commit"] or where["commit"].endswith("-dirty"):
        return []
    try:
        rows = measurements.load(FILES[kind])
    except UserError:
        return []
    return [row for row in rows if all(row[key] == where[key] for key in ("commit", "device"))]


def attributed(jobs: Iterable[str], rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Job -> its rows, of the jobs that have any. A check's part belongs to the longest name."""
    names = {job: job.split(": ", 1)[1] for job in jobs}
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["what"] == "check":
            fit = [job for job, name in names.items() if f"{row['case']}, ".startswith(f"{name}, ")]
        else:
            ends = (end for end in BESIDE if row["what"].endswith(end))
            title = f"{row['what'].removesuffix(next(ends, ''))}: {row['case']}"
            fit = [job for job, name in names.items() if name.split(": ", 1)[1] == title]
        for job in sorted(fit, key=len)[-1:]:
            found.setdefault(job, []).append(row)
    return found


class Record:
    """The rows of a run. A family with a check that failed leaves no times.

    rows: kind -> those of this run, and those of before that stand for jobs left out.
    """

    def __init__(self, where: Row, again: bool = False):
        self.where, self.again = where, again
        self.rows: dict[str, list[Row]] = {kind: [] for kind in FILES}
        self.bad: set[str] = set()  # families

    def rest(self, kind: str, jobs: list[str], every: list[str]) -> list[str]:
        """The jobs of a kind that have no rows yet, of this commit on this device.

        every: all jobs of the kind, by which rows are told apart.
        """
        there = {} if self.again else attributed(every, same(kind, self.where))
        for job in jobs:
            self.rows[kind] += there.get(job, [])
        return [job for job in jobs if job not in there]

    def take(self, job: str, outcome: Outcome) -> None:
        """Write the rows of a job."""
        kind, family, _ = job.split(": ", 2)
        if "failed" in outcome:
            self.bad |= {family} if kind == "check" else set()
            return
        if kind == "time" and family in self.bad:
            return
        checked = kind == "check"
        made = check_rows(job, outcome, self.where) if checked else time_rows(outcome, self.where)
        rows = list(made)
        self.rows[kind] += rows
        write(kind, rows)

    def report(self, path: Path, facts: str) -> None:
        """One file with all rows, and `facts` about the machine: for somebody without this card."""
        said = self.where | {"failed": sorted(self.bad), "machine": facts.splitlines()} | self.rows
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(said, indent=1), encoding="utf-8")
