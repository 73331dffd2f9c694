"""Time `make test` of a fresh clone on two idle cores, its set-up aside: `nanoeuler bench suite`.

Nothing of the clone is compiled yet, as for a newcomer. It is of the last commit.
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path

from nanoeuler import measurements
from nanoeuler.errors import UserError
from nanoeuler.files import project_root

CORES = 2  # as many as CI has
IDLE = 0.3  # processes that want to run, on average over a minute: less is an idle machine


def minutes(folder):
    """Minutes that `make test` takes in a checkout whose .venv is made; UserError if it fails."""
    start = time.perf_counter()
    done = subprocess.run(["make", "test", f"WORKERS={CORES}"], cwd=folder)
    if done.returncode:
        raise UserError("make test failed, and a red suite has no time: mend it first")
    return (time.perf_counter() - start) / 60


def main():
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("only Linux can hold a program to two cores: measure there")
    busy = os.getloadavg()[0]
    if busy > IDLE:
        raise UserError(f"the machine is busy (load {busy:.1f}): wait until it is below {IDLE}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "nanoeuler"
        subprocess.run(["git", "clone", "--quiet", project_root(), folder], check=True)
        subprocess.run(["make", ".venv/installed-test"], cwd=folder, check=True)
        taken = minutes(folder)
    row = measurements.row("make test, minutes", "two idle cores", "pytest", round(taken, 1), "min")
    measurements.update("suite", [row])
    print(f"make test: {taken:.1f} minutes on {CORES} cores")


if __name__ == "__main__":
    main()
