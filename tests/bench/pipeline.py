"""Time the main job as a reader runs it, about seven minutes: `python tests/bench/pipeline.py`.

Five of them are training's, which takes as many steps as fit; how many is one of the rows.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nanoeuler import measurements
from nanoeuler.data import docstrings


def seconds(folder: Path, line: str, stdin: str = "") -> float:
    """Seconds that `nanoeuler LINE` takes in `folder`, start of Python included."""
    start = time.perf_counter()
    program = [sys.executable, "-m", "nanoeuler", *line.split()]
    subprocess.run(program, check=True, cwd=folder, input=stdin, text=True)
    return round(time.perf_counter() - start, 1)


def last_metrics(folder: Path) -> dict:
    """The last line of a run's metrics."""
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        docstrings.text_path(folder / "corpus")
        rows = [("harvest of the corpus", round(time.perf_counter() - start, 1), "s")]
        docstrings.text_path()  # from here on it is there, as it is for a reader's second run
        for line, stdin in (("train", ""), ("sft", ""), ("chat", "What is argparse?\n")):
            rows.append((f"nanoeuler {line}", seconds(folder, line, stdin), "s"))
        for run, text in (("base", "held-out text"), ("chat", "held-out answers")):
            last = last_metrics(folder / "runs" / run)
            rows += [(f"{run}: steps", last["step"], "steps"),
                     (f"{run}: {text}", round(last["bits_per_byte"], 3), "bits/byte")]
    measurements.save("pipeline", [
        measurements.row("main job", case, "cpu", value, unit) for case, value, unit in rows
    ])
