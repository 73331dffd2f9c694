"""Measure the cleaning of a collection into corpus.json: `nanoeuler bench data`, some four minutes.

The collection is the folder NANOEULER_COLLECTION (rcdm-uga/Gutenberg_Text, 1.2 GB); the books and
tasks under NANOEULER_DATA (default ../shared/data beside the project) are held out. Whole runs are
made by processes of their own with two threads on two cores: medians of three by the clock.
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from nanoeuler import measurements
from nanoeuler.data import cleaning, words, wrapped
from nanoeuler.data.collection import files_in
from nanoeuler.data.corpus import held_out_in, texts_in
from nanoeuler.files import project_root
from nanoeuler.tokenizer.tokenizer import Tokenizer

DATA = Path(os.environ.get("NANOEULER_DATA", project_root().parent / "shared" / "data"))
COLLECTION = Path(os.environ.get("NANOEULER_COLLECTION", DATA / "collection"))
HELD_OUT = [DATA / "gutenberg", DATA / "eval"]
CASE = "Gutenberg collection, 2 cores"
VOCABULARY = 16384
REPEATS = 3
PROGRAM = """
import json, os, sys, time
cores = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, cores)
from nanoeuler.data.corpus import texts_in, write_corpus
from nanoeuler.data.prepare import prepare
from nanoeuler.tokenizer.tokenizer import Tokenizer
collection, out, tokenizer, *held_out = sys.argv[1:]
start = time.perf_counter()
said = write_corpus([collection], out + "/clean", without=held_out, threads=2)
cleaned = time.perf_counter()
if tokenizer:
    prepare(lambda: texts_in(out + "/clean"), out + "/tokens", vocab_size=0, source="bench",
            tokenizer=Tokenizer.load(tokenizer))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([said, cleaned - start, time.perf_counter() - start,
                  int(status["VmHWM"].split()[0]) / 1024]))
"""


def whole(folder: Path, tokenizer: str, held_out: list[Path]) -> list:
    """[summary, seconds of cleaning, with tokens, MiB] of a run in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, "-c", PROGRAM, COLLECTION, out, tokenizer, *held_out]
        return json.loads(subprocess.check_output([*map(str, command)], cwd=project_root()))


def counted(said: dict, tasks: dict) -> list:
    """Rows: what became of the bytes, and what held-out texts and tasks share with them."""
    found = {"read": said["bytes"], "kept": said["text"]}
    found |= {f"{name} in kept documents": said[name] for name in ("copies", "near_copies")}
    found |= {f"dropped: {reason}": size for reason, size in said["dropped_bytes"].items()}
    rows = [measurements.row("corpus", case, "nanoeuler", size / 1e6, "MB")
            for case, size in found.items()]  # fmt: skip
    counts = {"documents read": said["documents"], "documents kept": said["kept"]}
    counts |= {f"documents dropped: {reason}": n for reason, n in said["dropped"].items()}
    counts |= {f"held out: {name}": n for name, n in said["held_out"].items()}
    counts |= {"runs in held-out texts and tasks": said["runs"],
               "runs in held-out tasks alone": tasks["runs"]}  # fmt: skip
    return rows + [measurements.row("corpus", case, "nanoeuler", n, "count")
                   for case, n in counts.items()]  # fmt: skip


def stages(files: list[Path], held_out: tuple) -> list:
    """Rows: nanoseconds a byte read, on one core, of each stage of cleaning."""
    spent, size, known = Counter(), 0, np.zeros(1 << 22, np.int64)

    def timed(stage: str, function, *given):
        start = time.perf_counter()
        result = function(*given)
        spent[stage] += time.perf_counter() - start
        return result

    for path in files:
        raw = timed("reading", path.read_bytes)
        timed("SHA-256", lambda raw=raw: hashlib.sha256(raw).hexdigest())
        out = np.empty(len(raw) + 1, np.uint8)
        n, fault = timed("bytes checked", wrapped.plain, np.frombuffer(raw, np.uint8), out)
        if fault >= 0:
            continue
        size += len(raw)
        body, _ = timed("book cut out", cleaning.book_in, out[:n])
        text, starts = timed("lines joined", wrapped.paragraphs, body)
        hashes, counts, runs, _ = timed("words surveyed", words.survey, text, starts, words.FOLD,
                                        words.FUNCTIONS, held_out)  # fmt: skip
        fates = timed("paragraphs judged", cleaning.fates_of, hashes, counts, runs, known)
        words.add_all(known, hashes[fates == cleaning.KEPT])
    return [measurements.row("cleaning, one core", stage, "nanoeuler", 1e9 * seconds / size, "ns/B")
            for stage, seconds in spent.items()]  # fmt: skip


def tokens(files: list[Path], tokenizer: Tokenizer) -> list:
    """Rows: bytes a token of the same words, with their line ends and with lines joined."""
    plain = joined = size = 0
    for path in files:
        out = np.empty(path.stat().st_size + 1, np.uint8)
        n, fault = wrapped.plain(np.frombuffer(path.read_bytes(), np.uint8), out)
        if fault < 0:
            body, _ = cleaning.book_in(out[:n])
            size += len(body)
            plain += len(tokenizer.encode(body.tobytes()))
            joined += len(tokenizer.encode(wrapped.paragraphs(body)[0].tobytes()))
    counts = {"lines as they are": plain, "lines joined": joined}
    return [measurements.row("tokens of 1 MB", case, "nanoeuler", count / size * 1e6, "tokens")
            for case, count in counts.items()]  # fmt: skip


def main() -> None:
    """Measure everything and save the rows."""
    if not COLLECTION.is_dir():
        raise SystemExit(f"expected the collection in {COLLECTION}: name its folder with "
                         "NANOEULER_COLLECTION")  # fmt: skip
    paths = [path for _, path in files_in([COLLECTION])][::16]
    held_out, _ = held_out_in(HELD_OUT)
    stages(paths[:2], held_out)  # compiles
    rows = stages(paths, held_out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks = whole(folder, "", HELD_OUT[1:])[0]  # and the files are in the cache from here on
        with tempfile.TemporaryDirectory(dir=folder) as out:
            command = [sys.executable, "-c", PROGRAM, COLLECTION, out, "", *HELD_OUT]
            subprocess.check_output([*map(str, command)], cwd=project_root())
            sample = [text for i, text in enumerate(texts_in(Path(out) / "clean")) if i % 16 == 0]
        tokenizer = Tokenizer.train(sample, VOCABULARY)
        tokenizer.save(folder / "tokenizer.json")
        runs = [whole(folder, str(folder / "tokenizer.json"), HELD_OUT) for _ in range(REPEATS)]
    said = runs[0][0]
    seconds, both, peak = (statistics.median(run[i] for run in runs) for i in (1, 2, 3))
    rate = said["bytes"] / 1e6 / np.array([seconds, both])
    what = "corpus preparation"
    for name, value, unit in (("MB/s", rate[0], "MB/s"), ("peak memory", peak, "MiB")):
        rows.append(measurements.row(f"{what}, {name}", CASE, "nanoeuler", value, unit))
    what = f"{what} with tokens, MB/s"
    rows.append(measurements.row(what, CASE, "nanoeuler", rate[1], "MB/s"))
    rows += counted(said, tasks) + tokens(paths, tokenizer)
    measurements.save("corpus", rows)
    for row in rows:
        print(*(row[key] for key in ("what", "case", "value", "unit")))


if __name__ == "__main__":
    main()
