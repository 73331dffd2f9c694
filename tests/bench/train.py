"""Train the small preset on tinyshakespeare for two minutes; time the trainer's parts; sweep.

    python tests/bench/train.py            two minutes of training, then the parts (about 3 minutes)
    python tests/bench/train.py sweep      settings one at a time, three seeds each

Writes data/measurements/train.json. The text is tinyshakespeare.txt in the directory named by the
environment variable NANOEULER_DATA (default: ../shared/data beside the project). The sweep takes
36 runs of a minute or two, as many at a time as there are pairs of cores.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from nanoeuler import measurements
from nanoeuler.data.batches import Batches
from nanoeuler.data.text import digest, read_text, split
from nanoeuler.data.validation import HeldOut
from nanoeuler.files import project_root
from nanoeuler.model.config import PRESETS
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.checkpoint import load, save
from nanoeuler.training.folder import locked, read_metrics
from nanoeuler.training.loop import fit
from nanoeuler.training.optim import LEARNING_RATE, AdamW
from nanoeuler.training.run import Run, Settings
from nanoeuler.training.train import train

SECONDS = 120  # the goal's budget, everything included: reading, tokenizer, validations, saves
SPARE = 0.95  # of the budget that is planned for: the measuring takes seconds, and times vary
SWEEP_STEPS = 1500
SWEEP = {
    "lr": (0.001, 0.002, 0.004, 0.008, 0.016),
    "weight_decay": (0.0, 0.1, 0.3, 1.0),
    "beta2": (0.95, 0.98, 0.999),
    "warmup": (0, 50, 200),
}
SEEDS = (0, 1, 2)
CONFIG = PRESETS["small"]


def shakespeare():
    folder = os.environ.get("NANOEULER_DATA") or project_root() / ".." / "shared" / "data"
    return Path(folder) / "tinyshakespeare.txt"


def write(rows, replaces):
    """Save `rows` in place of the measured ones for which `replaces(row)` holds."""
    path = project_root() / "data" / "measurements" / "train.json"
    kept = [row for row in measurements.load("train") if not replaces(row)] if path.exists() else []
    measurements.save("train", kept + rows)


def two_minutes(folder):
    """Let a run have as many steps as fit; rows of what came out."""
    began = time.perf_counter()
    train(shakespeare(), folder / "short", config=CONFIG, settings=Settings(steps=1))
    fixed_s = time.perf_counter() - began  # reading, tokenizer, and what is compiled
    settings = Settings(minutes=(SPARE * SECONDS - fixed_s) / 60)
    began = time.perf_counter()
    run = train(shakespeare(), folder / "run", config=CONFIG, settings=settings)
    seconds = time.perf_counter() - began
    lines = read_metrics(folder / "run")
    tokens = sum(line["tokens"] for line in lines)
    case = f"tinyshakespeare, batch 16, {run.step} steps"
    return [
        measurements.row("held-out text", case, "cpu", lines[-1]["bits_per_byte"], "bits/byte"),
        measurements.row("the whole run", case, "cpu", seconds, "s"),
        measurements.row("training speed", case, "cpu", tokens / seconds, "tokens/s"),
        measurements.row("step", case, "cpu",
                         1e3 * statistics.median(line["seconds"] for line in lines), "ms"),
    ]  # fmt: skip


def parts(folder):
    """What the trainer adds to a step and at a checkpoint: medians of 30 and of 10."""
    run = load(folder / "run")
    gradients, optimizer = run.weights.zeros_like(), AdamW(run.weights, clip_norm=1e9)
    gradients.flat[:] = run.weights.flat

    def save_next():
        run.step += 1  # every save is a folder of its own
        save(folder / "run", run)

    for name, call, repeats in (
        ("AdamW", lambda: optimizer.update(run.weights, gradients, 0.0, 1), 30),
        ("clip", lambda: optimizer.clip(gradients), 30),
        ("load", lambda: load(folder / "run"), 10),
        ("save", save_next, 10),  # last: the steps that it counts are none that a load accepts
    ):
        times = []
        for _ in range(repeats + 1):  # the first compiles
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        middle = 1e3 * statistics.median(times[1:])
        yield measurements.row(name, "small preset", "cpu", middle, "ms")


def one_of_sweep(changes):
    """The held-out bits per byte of a run with `changes` to the default settings, and a seed."""
    text = read_text(shakespeare())
    train_text, held_out_text = split(text)
    tokenizer = Tokenizer.train(train_text, CONFIG.vocab_size)
    assert tokenizer.vocab_size == CONFIG.vocab_size
    settings = Settings(steps=SWEEP_STEPS, **changes)
    run = Run.begin(CONFIG, settings, tokenizer, digest(text))
    shape = settings.batch_size, CONFIG.context, CONFIG.n_predict
    batches = Batches(tokenizer.encode(train_text), *shape, settings.seed)
    held_out = HeldOut.from_tokens(tokenizer.encode(held_out_text), tokenizer, *shape)
    with tempfile.TemporaryDirectory() as out, locked(out):
        fit(out, run, batches, held_out, threads=2)
        return read_metrics(out)[-1]["bits_per_byte"]


def sweep():
    """Rows of the sweep; the case is the changed settings as JSON."""
    default = Settings().with_rate(LEARNING_RATE)
    changes = [{}]
    for name, values in SWEEP.items():
        changes += [{name: value} for value in values if value != getattr(default, name)]
    jobs = [{**change, "seed": seed} for seed in SEEDS for change in changes]
    workers = max(1, (os.cpu_count() or 2) // 2)
    unit = f"bits/byte after {SWEEP_STEPS} steps at batch {default.batch_size}"
    with ProcessPoolExecutor(workers) as pool:
        rows = []
        for job, bits in zip(jobs, pool.map(one_of_sweep, jobs), strict=True):
            print(f"{bits:.4f} bits/byte with {job}", flush=True)
            rows.append(measurements.row("sweep", json.dumps(job), "cpu", bits, unit))
        return rows


if __name__ == "__main__":
    if sys.argv[1:] == ["sweep"]:
        write(sweep(), lambda row: row["what"] == "sweep")
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = [*two_minutes(Path(folder)), *parts(Path(folder))]
        write(rows, lambda row: row["what"] != "sweep")
