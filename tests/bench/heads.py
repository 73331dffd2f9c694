"""What heads that guess further ahead are worth to head 0: `python tests/bench/heads.py BOOKS`.

Trains euler-116m on the prepared folder BOOKS with K = 4 predicted tokens and with K = 1, each for
the same number of floating-point operations: K = 1 gets more steps. Four seeds each, the runs of a
seed one after the other, on one GPU (--gpu), in one process. --runs 0 1 2 3 takes the first half of
the list, so that two processes share the work of two GPUs. Each run leaves a file in --to (or $OUT)
as soon as it ends, and one whose file is there is left out. --keep RUN saves the first model of
K = 4 as a run directory, for tests/bench/ahead.py.

    python tests/bench/heads.py --gather FOLDER ...

puts the files of all folders together: data/trained/heads.json, and rows of
data/measurements/talking.json. --dry trains models of nearly nothing for two steps on a paper GPU.
"""

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from nanoeuler import measurements
from nanoeuler.data.batches import Batches, Prefetcher
from nanoeuler.data.dataset import Prepared
from nanoeuler.data.validation import HeldOut
from nanoeuler.engines.interface import Stepper
from nanoeuler.engines.registry import make_stepper
from nanoeuler.files import project_root, replacing
from nanoeuler.model.config import PRESETS, ModelConfig
from nanoeuler.planning.counts import flops_per_token
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.checkpoint import save
from nanoeuler.training.optim import learning_rate
from nanoeuler.training.run import Run, Settings
from nanoeuler.training.throughput import validation_due

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from gpu_rows import circumstances  # noqa: E402

PRESET, KINDS, SEEDS = "euler-116m", (4, 1), 4
RUNS = [(seed, K) for seed in range(SEEDS) for K in KINDS]
# 26 million tokens of K = 4: three and a half readings of 25 books, before a fifth gains less.
STEPS, BATCH = 3200, 16
# A step takes lr * decay of a weight, one in 1,500: as much in a reading of the text as in the
# short run of chapter 9a, whose batches were four times as large.
DECAY, WARMUP = 1.0, 200
POINTS = 100  # of a curve of training losses
FILE, WHAT = "talking", "held-out bits per byte, equal compute"


# ---- A run


def steps_of(config: ModelConfig, steps: int) -> int:
    """As many steps as cost what `steps` steps of the same model with KINDS[0] heads cost."""
    first = flops_per_token(replace(config, n_predict=KINDS[0]))
    return round(steps * first / flops_per_token(config))


def trained(run: Run, books: Prepared, make: Callable[..., Stepper]) -> dict:
    """Take a run from its beginning to its end; what came of it. make(weights, optimizer)."""
    config, asked = run.config, run.settings
    shape = asked.batch_size, config.context, config.n_predict
    batches = Prefetcher(Batches(books.train, *shape, asked.seed))
    held_out = HeldOut.from_tokens(books.held_out, books.tokenizer, *shape)
    stepper, known, judged, seconds = make(run.weights, run.optimizer), [], [], []
    began = time.perf_counter()
    for number in range(1, asked.steps + 1):
        lr = learning_rate(number, asked.steps, asked.lr, asked.warmup)
        known += stepper.step(*batches.batch(number), lr, number)
        if number == 1 or validation_due(number, asked.steps):  # the first compiles
            known += stepper.finish()
            seconds.append((known[-1].number, time.perf_counter() - began))
            judged.append([number, held_out.bits_per_byte(stepper.sums, quick=True)])
            began = time.perf_counter()
    if not all(taken.finite for taken in known):
        raise ValueError("a loss or a gradient is not finite")
    bits = held_out.bits_per_byte(stepper.sums)
    stepper.pull()
    run.step = asked.steps
    counts = np.array([taken.sums for taken in known]) / (asked.batch_size * config.context)
    tokens = asked.steps * asked.batch_size * config.context
    return {
        "K": config.n_predict, "seed": asked.seed, "bits_per_byte": bits, "held_out": judged,
        "losses": thinned(counts[:, 0]), "steps": asked.steps, "tokens": tokens,
        "last_losses": counts[-max(1, len(counts) // 10) :].mean(axis=0).round(4).tolist(),
        "flops": tokens * flops_per_token(config),
        "seconds_a_step": sum(each for _, each in seconds[1:]) / max(1, asked.steps - 1),
        "model": asdict(config), "training": asdict(asked),
    }  # fmt: skip


def thinned(losses: np.ndarray) -> list[list[float]]:
    """[step, mean loss] of POINTS pieces of a run, each by its last step."""
    parts = np.array_split(np.arange(len(losses)), min(POINTS, len(losses)))
    return [[int(part[-1]) + 1, round(float(losses[part].mean()), 4)] for part in parts]


# ---- All of them


def name_of(seed: int, K: int) -> str:
    """Of a run's file."""
    return f"heads-K{K}-seed{seed}.json"


def train_all(options: argparse.Namespace, books: Prepared, config: ModelConfig, make) -> None:
    """Train what was asked for and is not there yet; a file each."""
    options.to.mkdir(parents=True, exist_ok=True)
    for seed, K in [RUNS[i] for i in options.runs]:
        path = options.to / name_of(seed, K)
        if path.exists():
            print(f"{path.name} is there", flush=True)
            continue
        began, plan = time.perf_counter(), replace(config, n_predict=K)
        settings = Settings(steps=steps_of(plan, options.steps), batch_size=options.batch,
                            seed=seed, weight_decay=DECAY, warmup=WARMUP)  # fmt: skip
        run = Run.begin(plan, settings, books.tokenizer, books.digest)
        found = trained(run, books, make) | options.where
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(found), encoding="utf-8")
        if options.keep and (seed, K) == RUNS[0]:
            save(options.keep, run, keep=1)
        print(f"K {K}, seed {seed}: {found['bits_per_byte']:.4f} bits/byte after {run.step} steps "
              f"of {1e3 * found['seconds_a_step']:.2f} ms, {time.perf_counter() - began:.0f} s in "
              "all", flush=True)  # fmt: skip
        del run
        gc.collect()  # a stepper may be a ring of objects, and holds a GPU's memory till then


def rehearse(options: argparse.Namespace) -> None:
    """All of it, on paper."""
    from nanoeuler.emulator.device import Device
    from nanoeuler.engines.gpu.step.stepper import CudaStepper

    options.steps, options.batch, options.where = 2, 2, {"device": "paper"}
    text = (project_root() / "data" / "river.txt").read_bytes()
    tokenizer = Tokenizer.train([text], 320)
    ids = np.array(tokenizer.encode(text), np.int32)
    books = SimpleNamespace(train=ids, held_out=ids[:33], tokenizer=tokenizer, digest="0" * 16)
    config = replace(PRESETS[PRESET], vocab_size=320, dim=96, n_layers=1, n_heads=3, n_kv_heads=1,
                     hidden=128, context=16)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        options.to = Path(folder)
        train_all(options, books, config, lambda *given: CudaStepper(*given, Device()))
        for row in gathered([options.to])[1]:
            print(row["case"], row["value"])


def gathered(folders: list[Path]) -> tuple[dict, list[dict]]:
    """What all runs left, for data/trained/heads.json; and the rows of what they ended with."""
    paths = sorted(path for folder in folders for path in folder.glob("heads-K*-seed*.json"))
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    rows = []
    for run in runs:
        case = f"{PRESET}, K {run['K']}, seed {run['seed']}"
        row = measurements.row(WHAT, case, "cuda", run["bits_per_byte"], "bits/byte")
        rows.append(row | {key: run[key] for key in row if key in run})
    shared = {key: runs[0].pop(key) for key in ("model", "training")}
    for run in runs[1:]:
        del run["model"], run["training"]
    return shared | {"runs": runs}, rows


def gather(folders: list[Path]) -> None:
    """Write what the book needs."""
    whole, rows = gathered(folders)
    to = project_root() / "data" / "trained" / "heads.json"
    with replacing(to) as temporary:
        text = json.dumps(whole, separators=(",", ":"), sort_keys=True)
        temporary.write_text(text.replace('{"K"', '\n{"K"') + "\n", encoding="utf-8")
    measurements.update(FILE, rows)
    print(*(f"{row['case']}: {row['value']:.4f}" for row in rows), sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("books", type=Path, nargs="?", help="a prepared folder")
    parser.add_argument("--gpu", help="which of this machine, from 0")
    parser.add_argument("--runs", type=int, nargs="+", default=range(len(RUNS)),
                        help=f"of 0 to {len(RUNS) - 1}")  # fmt: skip
    parser.add_argument("--steps", type=int, default=STEPS, help="of K = 4")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--to", type=Path, default=Path(os.environ.get("OUT", "build/heads")))
    parser.add_argument("--keep", type=Path, help="a run directory for the first model of K = 4")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot say it")
    parser.add_argument("--gather", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--dry", action="store_true", help="tiny models, without a GPU")
    options = parser.parse_args()
    if options.gather:
        gather(options.gather)
    elif options.dry:
        rehearse(options)
    elif not shutil.which("nvidia-smi"):
        print("there is no NVIDIA GPU here: nothing was trained; --dry rehearses")
    elif options.books is None:
        parser.error("expected a prepared folder to train on")
    else:
        if options.gpu:
            os.environ["NANOEULER_GPU"] = options.gpu
        from nanoeuler.engines.gpu.step.stepper import gpu

        commit = options.commit or measurements.commit()
        options.where = circumstances(gpu().name, commit)
        make = lambda *given: make_stepper("cuda", *given)  # noqa: E731
        train_all(options, Prepared(options.books), PRESETS[PRESET], make)
    return 0


if __name__ == "__main__":
    sys.exit(main())
