"""Time the book's own commands on this machine: `python tests/bench/book.py`."""

import subprocess
import sys
import time

from nanoeuler import measurements
from nanoeuler.book import build
from nanoeuler.files import project_root


def seconds(*command):
    """Seconds that `python -m nanoeuler.book COMMAND` takes, start of Python included."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "nanoeuler.book", *command], check=True)
    return round(time.perf_counter() - start, 2)


if __name__ == "__main__":
    root = project_root()
    commands = [["export"], ["check"], ["html"]]
    commands += [["run", chapter.stem] for chapter in build.chapters(root)]
    rows = [
        measurements.row("wall clock", " ".join(command), "book", seconds(*command), "s")
        for command in commands
    ]
    measurements.save("book", rows)
