"""Train `small` with each switch of chapter 9c alone: `python tests/bench/modern.py [SEED ...]`.

All runs are equally long and read the same windows in the same order; the switch is the only
difference. What is measured are losses, which don't depend on time or on the number of threads, so
the machine may be busy. Rows are written after each run, and one whose row is there from an equally
long run is not repeated. The changes in PREDICTED were written down before the first run.
"""

import json
import sys
from dataclasses import replace

from nanoeuler import measurements
from nanoeuler.data import docstrings
from nanoeuler.data.batches import Batches
from nanoeuler.data.text import read_text, split
from nanoeuler.data.validation import HeldOut
from nanoeuler.engines.registry import make_stepper
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESETS, count_parameters
from nanoeuler.model.weights import initialise
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.optim import AdamW, learning_rate, rate_for

STEPS, BATCH, SEEDS = 250, 16, (0, 1, 2)
CHECKED = (25, 50, 100, 250)  # after these steps
UNGATED = 516  # hidden channels: 2 * 516 columns cost what SwiGLU's 3 * 344 do
VARIANTS = {
    "as it is": {},
    "GELU": {"mlp": "gelu", "hidden": UNGATED},
    "ReLU squared": {"mlp": "relu2", "hidden": UNGATED},
    "QK-norm": {"qk_norm": True},
    "logits capped at 15": {"logit_cap": 15.0},
    "zero projections": {"init": "zero"},
    "windows of 32, SSSL": {"sliding_window": 32, "window_pattern": "SSSL"},
    "ReLU squared, QK-norm, cap, zero": {
        "mlp": "relu2", "hidden": UNGATED, "qk_norm": True, "logit_cap": 15.0, "init": "zero",
    },
    "one token ahead": {"n_predict": 1},
    "one token ahead, tied": {"n_predict": 1, "tied": True},
}  # fmt: skip
# Bits per byte at the end, less those of "as it is"; of the tied one, of "one token ahead".
PREDICTED = {
    "GELU": 0.01, "ReLU squared": 0.0, "QK-norm": -0.02, "logits capped at 15": 0.0,
    "zero projections": -0.02, "windows of 32, SSSL": 0.01,
    "ReLU squared, QK-norm, cap, zero": -0.04, "one token ahead, tied": 0.02,
}  # fmt: skip


def text(config):
    """The tokens to train on, and the held-out part: of the embedded corpus, by config's sizes."""
    corpus = read_text(docstrings.text_path())
    tokenizer = Tokenizer.train(corpus, config.vocab_size)
    rest, held_out = split(corpus)
    return tokenizer.encode(rest), tokenizer.encode(held_out), tokenizer


def run(config, seed, tokens, held_out, tokenizer):
    """Train a model; bits per byte after each of CHECKED, on 128 windows of the held-out part."""
    weights = initialise(config, seed)
    stepper = make_stepper("cpu", weights, AdamW(weights), threads=1)
    batches = Batches(tokens, BATCH, config.context, config.n_predict, seed)
    judge = HeldOut.from_tokens(held_out, tokenizer, BATCH, config.context, config.n_predict)
    peak, found = rate_for(config.dim), {}
    for number in range(1, STEPS + 1):
        stepper.step(*batches.batch(number), learning_rate(number, STEPS, peak), number)
        if number in CHECKED:
            found[number] = judge.bits_per_byte(stepper.sums, quick=True)
    return found


def main():
    """All runs whose rows are not there yet, seed by seed."""
    seeds = [int(word) for word in sys.argv[1:]] or SEEDS
    read = text(PRESETS["small"])
    for seed in seeds:
        for name, changes in VARIANTS.items():
            config = replace(PRESETS["small"], **changes)
            case = {"model": name, "seed": seed, "steps": STEPS}
            try:
                stored = {row["case"] for row in measurements.load("modern")}
            except UserError:  # there are none yet
                stored = set()
            if json.dumps(case | {"after": STEPS}) in stored:
                continue
            found = run(config, seed, *read)
            rows = [measurements.row("bits", json.dumps(case | {"after": n}), "cpu", value,
                                     "bits/byte") for n, value in found.items()]  # fmt: skip
            size = json.dumps({"model": name})
            rows.append(measurements.row("parameters", size, "cpu", count_parameters(config), ""))
            if name in PREDICTED:
                change = PREDICTED[name]
                rows.append(measurements.row("predicted", size, "cpu", change, "bits/byte"))
            measurements.update("modern", rows)
            print(name, seed, {n: round(value, 4) for n, value in found.items()}, flush=True)


if __name__ == "__main__":
    main()
