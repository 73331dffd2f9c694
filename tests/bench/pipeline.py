"""Time the main job as a reader runs it: `python tests/bench/pipeline.py [job] [road] [counts]`.

    job     harvest, train, sft and chat, each as a program of its own: about seven minutes
    road    the same and more by one command, `nanoeuler all --size laptop`: about ten minutes
    counts  chapter 1's mixed tables of counts, on the text that `small` learns from: a minute
Training takes as many steps as fit into five minutes; how many is one of the rows.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from nanoeuler import measurements
from nanoeuler.data import docstrings
from nanoeuler.data.text import read_text, split

STRENGTH = 4.0  # of a shorter context's opinion, as in chapter 1


def seconds(folder: Path, line: str, stdin: str = "") -> float:
    """Seconds that `nanoeuler LINE` takes in `folder`, start of Python included."""
    start = time.perf_counter()
    program = [sys.executable, "-m", "nanoeuler", *line.split()]
    subprocess.run(program, check=True, cwd=folder, input=stdin, text=True)
    return round(time.perf_counter() - start, 1)


def last_metrics(folder: Path) -> dict:
    """The last line of a run's metrics."""
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def job(folder: Path) -> None:
    """The stages one by one."""
    start = time.perf_counter()
    docstrings.text_path(folder / "corpus")
    rows = [("harvest of the corpus", round(time.perf_counter() - start, 1), "s")]
    docstrings.text_path()  # from here on it is there, as it is for a reader's second run
    for line, stdin in (("train", ""), ("sft", ""), ("chat", "What is argparse?\n")):
        rows.append((f"nanoeuler {line}", seconds(folder, line, stdin), "s"))
    for run, text in (("base", "held-out text"), ("chat", "held-out answers")):
        last = last_metrics(folder / "runs" / run)
        rows += [(f"runs/{run}: steps", last["step"], "steps"),
                 (f"runs/{run}: {text}", round(last["bits_per_byte"], 3), "bits/byte")]
    measurements.update("pipeline", [
        measurements.row("main job", case, "cpu", value, unit) for case, value, unit in rows
    ])


def said(folder: Path, line: str) -> str:
    """What `nanoeuler LINE` prints, on both streams."""
    program = [sys.executable, "-m", "nanoeuler", *line.split()]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(program, check=True, cwd=folder, text=True, **both).stdout


def road(folder: Path) -> None:
    """All stages by one command, beside its plan."""
    plan = re.findall(r"about ([\d.]+) (second|minute)", said(folder, "all --size laptop --plan"))
    predicted = round(sum(float(n) * (60 if unit == "minute" else 1) for n, unit in plan))
    what, how = "nanoeuler all --size laptop", ("predicted for the steps", predicted)
    took = seconds(folder, "all --size laptop")
    rows = [measurements.row(what, "all of it", "cpu", round(took), "s", *how)]
    for run, when in (("base", "after training"), ("preferred", "at the end")):
        judged = said(folder, f"eval runs/{run} --data docs")
        bits = float(re.findall(r"bits per byte +([\d.]+)", judged)[0])
        case = f"bits per byte of held-out text, {when}"
        rows.append(measurements.row(what, case, "cpu", bits, "bits/byte"))
    measurements.update("pipeline", rows)


def counted(text: bytes, n: int, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A code for each context of n bytes before the places `at`, with and without the byte there.

    n is at most 6: a code and a byte fit 64 bits.
    """
    x, code = np.frombuffer(text, np.uint8).astype(np.int64), np.zeros(len(at), np.int64)
    for back in range(n, 0, -1):
        code = code * 256 + x[at - back]
    return code * 256 + x[at], code


def look_up(asked: np.ndarray, learned: np.ndarray) -> np.ndarray:
    """How often each of the codes asked was learned."""
    codes, counts = np.unique(learned, return_counts=True)
    place = np.minimum(np.searchsorted(codes, asked), len(codes) - 1)
    return np.where(codes[place] == asked, counts[place], 0)


def counts(longest: int = 6) -> None:
    """Bits per byte of mixed counts of 0 to `longest` bytes, as chapter 1's `mixed` has them."""
    train, held_out = split(read_text(docstrings.text_path()))
    asked, learned = np.arange(longest, len(held_out)), np.arange(longest, len(train))
    p, rows = np.full(len(asked), 1 / 256), []
    for n in range(longest + 1):
        seen, before = map(look_up, counted(held_out, n, asked), counted(train, n, learned))
        p = (seen + STRENGTH * p) / (before + STRENGTH)
        bits = round(float(-np.log2(p).mean()), 3)
        case = f"up to {n} bytes, mixed"
        rows.append(measurements.row("counts of the same text", case, "numpy", bits, "bits/byte"))
        print(case, bits)
    measurements.update("pipeline", rows)


if __name__ == "__main__":
    for part in sys.argv[1:] or ["job", "road", "counts"]:
        with tempfile.TemporaryDirectory() as name:
            {"job": job, "road": road, "counts": lambda folder: counts()}[part](Path(name))
