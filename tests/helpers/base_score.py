"""What the base model and its twin are worth: held-out books, tasks with standard errors, samples.

Both are judged by one engine of ours, in float32, so that what differs is the weights alone.
"""

import json
import math
import os
from pathlib import Path

import base_law
import base_train

from nanoeuler.api import load
from nanoeuler.errors import UserError
from nanoeuler.evaluation.judge import TaskFile, core, is_core, judge, judge_text
from nanoeuler.evaluation.likelihood import scorers
from nanoeuler.evaluation.tasks import TASKS, file_of

PEER, BITS = "torch compile", "bits per byte, held-out books"
FIRST = ("blimp", "lambada_openai", "hellaswag", "arc_easy", "piqa", "wikitext")  # most wanted
# What others report of GPT-2 124M by lm-evaluation-harness, by our conventions (chapter 20): its
# issues 2159 (LAMBADA) and, for the others, what is cited of its runs.
HARNESS = "GPT-2 124M, lm-eval"
PUBLISHED = {
    ("lambada_openai", "acc"): 0.3256, ("lambada_openai", "perplexity"): 40.06,
    ("hellaswag", "acc_norm"): 0.3114, ("piqa", "acc_norm"): 0.6251,
    ("winogrande", "acc"): 0.5162, ("arc_challenge", "acc_norm"): 0.2270,
    ("wikitext", "perplexity, word"): 37.37,
}  # fmt: skip
# Names of rows that others look for.
CALLED = {("blimp", "acc"): "BLiMP", ("lambada_openai", "acc"): "LAMBADA, accuracy"}
PROMPTS = ("", "It was a dark night, and", '"My dear Mr. Bennet," said his lady to him one day,',
           "The old captain looked at the sea and said", "To make a good soup, you first",
           "The capital of France is", "In the year 1969 the first man on the moon",
           "Question: What is two and two?\nAnswer:")  # fmt: skip
DRAWN, TEMPERATURE = 120, 0.8
DRY_ITEMS = 4


def books(options, journal) -> None:
    """Bits per byte of the held-out books, of both, and by how much the twin is behind."""
    bits = {}
    for who, case in base_train.CASES.items():
        if out := base_train.folder_of(options, who):
            told = load(out).evaluate(options.work / "prepared", engine=options.judge)
            bits[who] = told.bits_per_byte
            print(f"{who}: {told.bits_per_byte:.4f} bits per byte of {told.bytes:,} bytes of "
                  "held-out books", flush=True)  # fmt: skip
            journal.add(BITS, case, told.bits_per_byte, "bits/byte")
            _predicted(options, journal, case)
        elif (known := journal.value(BITS, case)) is not None:  # of another machine
            bits[who] = known
    if len(bits) == 2:
        print(f"ours over the twin's: {bits['base'] / bits['twin']:.4f}")
        journal.add(BITS, "base model, equal wall time", bits["base"], "bits/byte", PEER,
                    bits["twin"])  # fmt: skip
        _with_compiling(options, journal, bits)


def _predicted(options, journal, case):
    """What the law, fitted before, says of the tokens that were read: the plan was for others."""
    path, tokens = options.work / "prediction.json", journal.value("tokens seen", case)
    if path.exists() and tokens:
        said = json.loads(path.read_text())
        flops = tokens * said["flops"] / said["tokens"]
        value = base_law.at(said["points"], said["E"], flops)
        print(f"    predicted for {tokens / 1e6:.1f} million tokens: {value:.4f}", flush=True)
        journal.add(f"{BITS}, predicted for the tokens read", case, value, "bits/byte")


def _with_compiling(options, journal, bits):
    """The same if what comes before the first step counts: what the law says of the twin then.

    Ours gives up its own seconds too: both are taken to have stopped so many tokens sooner.
    """
    path = options.work / "prediction.json"
    if not path.exists():
        return
    said, values = json.loads(path.read_text()), {}
    per_token = said["flops"] / said["tokens"]
    for who, value in bits.items():
        known = base_train.times(options)[who]
        loop = sum(each["loop"] for each in known)
        share = max(0.05, 1 - sum(each["first"] for each in known) / loop)
        tokens = journal.value("tokens seen", base_train.CASES[who])
        law = [base_law.at(said["points"], said["E"], n * per_token)
               for n in (tokens * share, tokens)]  # fmt: skip
        values[who] = value * law[0] / law[1]
    journal.add(BITS, "base model, equal wall time, compiling counted, by the fitted law",
                values["base"], "bits/byte", PEER, values["twin"])  # fmt: skip


def tasks(options, journal) -> None:
    """Scores on all tasks whose files are there; what has been scored before is kept."""
    out = base_train.folder_of(options, "base")
    if out is None:
        return
    folder = Path(os.environ.get("NANOEULER_DATA", "../shared/data")) / "eval"
    model, found, missing = load(out), [], []
    by, limit = scorers(options.judge, model.weights), DRY_ITEMS if options.dry else None
    asked = [(name, 0) for name in FIRST]
    asked += [(name, n) for name, task in TASKS.items() for n in task.core]
    for name, shots in dict.fromkeys(asked):
        path = _file(name, folder)
        if path is None:
            missing.append(name)
            continue
        kept = options.work / "scored" / f"{name}-{shots}.jsonl"
        given = model.weights, model.tokenizer
        if TASKS[name].kind == "text":
            if not options.dry:  # a page has thousands of tokens
                _text(journal, name, judge_text(*given, path, by=by, keep=kept))
            continue
        found.append(judge(*given, TaskFile(name, path, shots, limit), by=by, keep=kept))
        _scores(journal, found[-1])
    if is_core(found):
        score = core(found)
        _row(journal, "CORE-20", score.value, score.error, None)
    elif missing:
        print(f"no CORE-20, since these have no file in {folder}: {', '.join(missing)}")


def _file(name, folder):
    """A task's file, whole or a sample of it; None if there is none."""
    sample = folder / f"{name}_sample.jsonl"  # beside it may be what others scored
    try:
        return file_of(name, sample if sample.exists() else folder)
    except UserError:
        return None


def _scores(journal, judged):
    """A row for each measure, and one for its standard error."""
    for measure, score in judged.scores.items():
        key = judged.task, measure
        what = CALLED.get(key) or f"{TASKS[judged.task].title}, {measure}"
        what += f", {judged.shots} shots" if judged.shots else ""
        peer = None if judged.shots else PUBLISHED.get(key)
        _row(journal, what, score.value, score.error, peer, score.items)


def _row(journal, what, value, error, peer=None, items=None):
    print(f"{what:32} {value:.4f} +- {error:.4f}" + (f"   {items:,} items" if items else "")
          + (f"   {HARNESS}: {peer}" if peer else ""), flush=True)  # fmt: skip
    journal.add(what, "base model", value, "")
    if math.isfinite(error):  # none is known of some measures
        journal.add(f"{what}, standard error", "base model", error, "")
    if peer:
        journal.add(what, "base model", value, "", HARNESS, peer)


def _text(journal, name, text):
    """Rows of a text's perplexities."""
    peer = PUBLISHED[name, "perplexity, word"]
    print(f"{name}: {text.word:.2f} a word ({HARNESS}: {peer}), {text.bits_per_byte:.4f} bits per "
          "byte", flush=True)  # fmt: skip
    journal.add("WikiText, bits per byte", "base model", text.bits_per_byte, "bits/byte")
    journal.add("WikiText, perplexity, word", "base model", text.word, "", HARNESS, peer)


def samples(options, journal) -> None:
    """Texts by the base model as they came, greedy and drawn."""
    out = base_train.folder_of(options, "base")
    if out is None:
        return
    model, said, engine = load(out), [], "reference" if options.dry else options.engine
    for prompt in PROMPTS:
        for temperature in 0.0, TEMPERATURE:
            text = model.generate(prompt or "\n", tokens=8 if options.dry else DRAWN, seed=0,
                                  temperature=temperature, engine=engine)  # fmt: skip
            said.append({"prompt": prompt, "temperature": temperature, "text": text})
            print(f"[{prompt}] at {temperature:g}: {text[:160]!r}", flush=True)
    (options.work / "samples.json").write_text(json.dumps(said, indent=1) + "\n")
    journal.copy()
