"""Put the questions of chapter 9 to trained models: `python tests/bench/depth.py [RUN]`.

RUN is a run directory of `nanoeuler train --preset small` (default runs/base). First the model in
it is walked otherwise and judged on the held-out part of the embedded corpus, the text of
`nanoeuler train`. Then its architecture and others of the same cost are trained on that text for a
short time, over two seeds, and asked the same questions. Their rows are written after each run, and
a run whose rows are in the file is not repeated: delete the file to begin anew.
"""

import json
import sys
from dataclasses import replace

from nanoeuler import measurements
from nanoeuler.data import docstrings
from nanoeuler.data.batches import Batches
from nanoeuler.data.text import read_text, split
from nanoeuler.data.validation import HeldOut
from nanoeuler.engines.registry import engine_factory, make_stepper
from nanoeuler.errors import UserError
from nanoeuler.model.depth import (
    at_depths,
    drop_layers,
    moved,
    neighbours,
    refine_depth,
    relative_steps,
    with_step,
)
from nanoeuler.model.integrators import INTEGRATORS
from nanoeuler.model.weights import initialise
from nanoeuler.training.checkpoint import load_model
from nanoeuler.training.optim import LEARNING_RATE, AdamW, learning_rate
from nanoeuler.training.run import Settings

ENGINE = "cpu"
SCALES = (0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0)  # of h
SEEDS = (0, 1)
STEPS, BATCH = 500, 8  # of each training run: a twelfth of what `nanoeuler train` reads
SHORT = 1 / 32  # a step size that keeps every rho of these runs below about one half
# Changes to the run's architecture. All have the same operations a token but "2 blocks, Euler",
# which has half the layers, and the one that is refined, which has half of them for half the time.
CONTESTANTS = {
    "4 blocks, Euler": {},
    "2 blocks, Euler twice each": {"repeat": 2},
    "2 blocks, Heun": {"n_layers": 2, "integrator": "heun"},
    "1 block, Euler four times": {"repeat": 4},
    "1 block, RK4": {"n_layers": 1, "integrator": "rk4"},
    "2 blocks, Euler": {"n_layers": 2},
    "2 blocks, refined to 4": {"n_layers": 2},
    "4 blocks, Euler, h = 1": {"step_size": 1.0},
}
# The walks that were tried first, for one seed; "larger start" leaves the scale to `initialise`.
FIRST = {
    f"{name}, h = 1{start}": {**CONTESTANTS[name], "step_size": 1.0}
    for name in list(CONTESTANTS)[1:-1]
    for start in ("", ", larger start")
    if not start or "integrator" in CONTESTANTS[name]
}



class Judge:
    """The text of a run: tokens to train on, and what a model is worth on the held-out part."""

    def __init__(self, config, tokenizer):
        text, held_out = split(read_text(docstrings.text_path()))
        self.tokens = tokenizer.encode(text)
        self.held_out = HeldOut.from_tokens(
            tokenizer.encode(held_out), tokenizer, 16, config.context, config.n_predict
        )
        self.batch = next(self.held_out.batches(range(16)))[0]
        self.engine = engine_factory(ENGINE)()

    def bits(self, w):
        """Bits per byte of 128 windows, spread over the held-out text."""
        return self.held_out.bits_per_byte(make_stepper(ENGINE, w, AdamW(w)).sums, quick=True)

    def answers(self, name, seed, asked):
        """Rows for `asked`, {question: model}: bits of each, how far from the first it ends."""
        first = next(iter(asked.values()))
        for question, model in asked.items():
            case = json.dumps({"model": name, "seed": seed, "question": question})
            yield measurements.row("bits", case, ENGINE, self.bits(model[1]), "bits/byte")
            distance = moved(self.engine, first, model, self.batch)
            yield measurements.row("moved", case, ENGINE, distance, "of the way")

    def layers(self, name, seed, config, w):
        """Rows of rho, and of the change of f to the next layer, of each sublayer."""
        for what, measure in (("rho", relative_steps), ("neighbours", neighbours)):
            for i, pair in enumerate(measure(self.engine, config, w, self.batch)):
                for sublayer, value in zip(("attention", "mlp"), pair, strict=True):
                    place = {"model": name, "seed": seed, "layer": i, "sublayer": sublayer}
                    yield measurements.row(what, json.dumps(place), ENGINE, float(value), "")


def questions(config, w):
    """The three questions of chapter 9: {question: model}, the model itself first."""
    asked = {"as it is": (config, w), "split": refine_depth(config, w)}
    asked["split twice"] = refine_depth(*asked["split"])
    asked["insert"] = refine_depth(config, w, "insert")
    if config.n_layers % 2 == 0:
        asked["drop"] = drop_layers(config, w)
    return asked


def further_questions(config, w):
    """What is asked of the run alone."""
    layers, h = range(config.n_layers), config.step_size
    asked = {f"h times {scale}": with_step(config, w, step_size=scale * h) for scale in SCALES}
    for i in layers:
        rest = [depth for depth in layers if depth != i]
        asked[f"without layer {i}"] = at_depths(config, w, rest, h)
        swapped = [*layers[:i], *layers[i : i + 2][::-1], *layers[i + 2 :]]
        if swapped != [*layers]:
            asked[f"layers {i} and {i + 1} swapped"] = at_depths(config, w, swapped, h)
    for integrator in INTEGRATORS:
        if integrator != config.integrator:
            asked[integrator] = with_step(config, w, integrator=integrator)
    finer = {"split": [i for i in layers[1:] for _ in (1, 2)],
             "insert": [1 + i / 2 for i in range(2 * len(layers) - 2)]}  # fmt: skip
    for how, depths in finer.items():
        asked[f"{how}, all but layer 0"] = halved(*at_depths(config, w, [0, *depths], h))
    return asked


def halved(config, w):
    """The model with half the step in all layers but the first, in place: f is linear in these."""
    for name, tensor in w.items():
        if name.partition("_bias")[0].endswith((".wo", ".w_down")) and "block.0." not in name:
            tensor /= 2
    return config, w


def stages(config):
    """How many times a layer asks for its f."""
    return len(INTEGRATORS[config.integrator].b)


def operations(config):
    """Multiplications by weights for a token; twice that many floating-point operations forward."""
    w = initialise(config, 0)
    block = sum(t.size for name, t in w.items() if name.startswith("block.0.") and t.ndim > 1)
    return config.n_layers * stages(config) * block + w["output"].size


def begun(config, seed):
    """Fresh weights; equal costs begin at an equal scale.

    `initialise` divides what writes to the stream by the root of twice the layers; here every
    evaluation of a layer counts as one.
    """
    w = initialise(config, seed)
    for name, tensor in w.items():
        if name.endswith((".wo", ".w_down")):
            tensor /= stages(config) ** 0.5
    return w


def fitted(tokens, config, seed, refined, start):
    """(config, weights) after STEPS steps from start(config, seed); refined half-way if asked."""
    settings = Settings(steps=STEPS, batch_size=BATCH, seed=seed)
    batches = Batches(tokens, BATCH, config.context, config.n_predict, seed)
    w = start(config, seed)
    how = {"beta2": settings.beta2, "weight_decay": settings.weight_decay}
    optimizer = AdamW(w, **how, clip_norm=settings.clip)
    stepper = make_stepper(ENGINE, w, optimizer)
    for number in range(1, STEPS + 1):
        if refined and number == STEPS // 2 + 1:
            _, optimizer.m = refine_depth(config, optimizer.m)
            _, optimizer.v = refine_depth(config, optimizer.v)
            config, w = refine_depth(config, w)
            stepper = make_stepper(ENGINE, w, optimizer)
        lr = learning_rate(number, STEPS, LEARNING_RATE, settings.warmup)
        stepper.step(*batches.batch(number), lr, number)
    stepper.finish()
    return config, w


def stored():
    """The rows in the file, if there is one."""
    try:
        return measurements.load("depth")
    except UserError:
        return []


def write(rows):
    """Add `rows` to the file, in the place of older ones of the same case."""
    new = {(row["what"], row["case"]) for row in rows}
    old = [row for row in stored() if (row["what"], row["case"]) not in new]
    measurements.save("depth", old + rows)


def main(run="runs/base"):
    """Measure all of it: a quarter of an hour on two quiet cores."""
    config, tokenizer, w = load_model(run)
    judge = Judge(config, tokenizer)
    asked = questions(config, w) | further_questions(config, w)
    write([*judge.answers("trained", 0, asked), *judge.layers("trained", 0, config, w)])
    for seed in SEEDS:
        for name, changes in (CONTESTANTS if seed else CONTESTANTS | FIRST).items():
            done = {"model": name, "seed": seed}.items()
            if any(json.loads(row["case"]).items() >= done for row in stored()):
                continue
            plan = replace(config, **{"step_size": SHORT, **changes})
            start = initialise if "larger start" in name else begun
            model = fitted(judge.tokens, plan, seed, "refined" in name, start)
            rows = [*judge.answers(name, seed, questions(*model)),
                    *judge.layers(name, seed, *model)]  # fmt: skip
            if not seed:
                value = (operations(plan) + operations(model[0])) / 2  # of its two halves
                case = json.dumps({"model": name})
                rows.append(measurements.row("operations", case, ENGINE, value, "per token"))
            write(rows)
            print(f"{rows[0]['value']:.4f} bits/byte: {name}, seed {seed}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
