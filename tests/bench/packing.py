"""Four ways to put conversations into rows, and answers before and after fine-tuning.

    python tests/bench/packing.py rows BASE [--pairs FILE] [--seeds N] [--engine NAME]
    python tests/bench/packing.py answers BASE TUNED NAME [--pairs FILE] [--ask QUESTION ...]

`rows` fine-tunes the run BASE with each way and seed, by the steps and batches of `sft`, so at
equal compute, and judges all by the same held-out answers: data/measurements/packing.json. A run of
`small` takes a minute of two cores. `answers` asks both models the same held-out questions:
data/trained/NAME.json, as they came. FILE: conversations as `read_pairs` reads them, else the
embedded ones.
"""

import argparse
import dataclasses
import datetime
import json
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np

from nanoeuler import measurements
from nanoeuler.data import docstrings
from nanoeuler.data.conversations import read_pairs, turns_of
from nanoeuler.data.text import TRAIN_SHARE
from nanoeuler.engines.registry import engine_name
from nanoeuler.files import project_root, replacing
from nanoeuler.inference.decoder import Decoder, generate
from nanoeuler.model.backward import IGNORE
from nanoeuler.tokenizer.chat_template import prompt
from nanoeuler.training import sft
from nanoeuler.training.checkpoint import load_model
from nanoeuler.training.folder import read_metrics

TOKENS = 60  # of an answer that does not end: some lines, enough to see what it does
QUESTIONS = 6


def one_each(conversations, context):
    """As `sft.pack`: a row for each conversation."""
    left_out = [n for n, (ids, _) in enumerate(conversations, 1) if len(ids) > context]
    return [[each] for each in conversations if len(each[0]) <= context], left_out


def as_they_come(conversations, context):
    """As `sft.pack`: one behind the other, until the next does not fit."""
    rows, room = [], 0
    alone, left_out = one_each(conversations, context)
    for (each,) in alone:
        if len(each[0]) > room:
            rows.append([])
            room = context + 1
        rows[-1].append(each)
        room -= len(each[0])
    return rows, left_out


class Joined(sft.Conversations):
    """Rows in which every conversation reads those before it."""

    def rows(self, chosen):
        at = np.arange(self.context)[:, None] + self.ahead
        tokens, counted = self.tokens[chosen], self.counted[chosen]
        return tokens[:, : self.context], np.where(counted[:, at], tokens[:, at], IGNORE)


WAYS = {
    "a row each": (sft.Conversations, one_each),
    "as they come, joined": (Joined, as_they_come),
    "best fit, joined": (Joined, sft.pack),
    "best fit, apart": (sft.Conversations, sft.pack),
}


def tune(base, pairs, way, seed, held_out, options):
    """Bits per byte of the held-out answers at the end, and the share of places not filling."""
    kind, pack = WAYS[way]
    settings = dataclasses.replace(sft.FINETUNING, steps=options.steps, seed=seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(sft, "Conversations", kind),
        mock.patch.object(sft, "pack", pack),
        mock.patch.object(sft, "held_out_answers", lambda *_: held_out),
    ):
        run = sft.finetune(base, pairs, Path(folder) / "run", settings=settings,
                           engine=options.engine)  # fmt: skip
        bits = read_metrics(Path(folder) / "run")[-1]["bits_per_byte"]
        made = kind(run.tokenizer, pairs[: int(len(pairs) * TRAIN_SHARE)], 1, run.config.context, 1)
    filling = (made.tokens == made.tokens[0, -1]) & (made.first == made.first[:, -1:])
    return bits, 1 - filling[:, : run.config.context].mean()


def rows(base, pairs, options):
    """Fine-tune in every way, save after each run."""
    config, tokenizer, _ = load_model(base)
    cut = int(len(pairs) * TRAIN_SHARE)
    held_out = sft.held_out_answers(
        tokenizer, pairs[cut:], sft.FINETUNING.batch_size, config.context, config.n_predict
    )
    for way in WAYS:
        for seed in range(options.seeds):
            bits, full = tune(base, pairs, way, seed, held_out, options)
            print(f"{way}, seed {seed}: {bits:.4f} bits/byte, {full:.1%} of the places used")
            measurements.update("packing", [
                measurements.row(f"held-out answers after {options.steps} steps",
                                 f"{way}: seed {seed}", options.engine, round(bits, 4),
                                 "bits/byte"),
                measurements.row("places used", way, options.engine, round(float(full), 4),
                                 "share"),
            ])  # fmt: skip


def answers(base, tuned, options, pairs):
    """Ask both models; write what they say."""
    rest = pairs[int(len(pairs) * TRAIN_SHARE) :]
    asked = [turns_of(each)[0] for each in rest[:: max(1, len(rest) // QUESTIONS)][:QUESTIONS]]
    asked = [(question, "") for question in options.ask] or asked
    said = []
    for question, known in asked:
        line = {"question": question, "held out": known}
        for when, run in (("before", base), ("after", tuned)):
            config, tokenizer, weights = load_model(run)
            stop = tokenizer.special.values()
            drawn = list(generate(Decoder(config, weights), prompt(tokenizer, question), TOKENS,
                                  temperature=0.0, stop=stop))  # fmt: skip
            line[when] = tokenizer.decode_text(drawn) + ("" if len(drawn) < TOKENS else " ...")
        said.append(line)
    path = project_root() / "data" / "trained" / f"{options.name}.json"
    made = {"said": said, "commit": options.commit or measurements.commit(),
            "device": options.device or measurements.device(),
            "date": datetime.date.today().isoformat()}  # fmt: skip
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(said, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["rows", "answers"])
    parser.add_argument("base", type=Path)
    parser.add_argument("tuned", type=Path, nargs="?")
    parser.add_argument("name", nargs="?")
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=sft.FINETUNING.steps)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--ask", action="append", default=[], help="in place of held-out questions")
    parser.add_argument("--commit", default="", help="of the code, where git cannot say it")
    parser.add_argument("--device", default="", help="that trained, where it is another")
    options = parser.parse_args()
    options.engine = engine_name(options.engine)
    pairs = sft.checked_pairs(read_pairs(options.pairs) if options.pairs else docstrings.pairs())
    if options.what == "rows":
        rows(options.base, pairs, options)
    else:
        answers(options.base, options.tuned, options, pairs)


if __name__ == "__main__":
    main()
