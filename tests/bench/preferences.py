"""What preferences do to a fine-tuned model: `python tests/bench/preferences.py BASE CHAT`.

BASE is a run that was trained on text, CHAT one fine-tuned from it on the embedded pairs. Runs of
`prefer` at several beta and anchors, and one of fine-tuning that goes on instead, are made in a
temporary folder; data/trained/preferences.json has their curves, what they cost in bits per byte of
answers and of text, and answers before and after. --run BETA ANCHOR for one; --steps N to rehearse.
"""

import argparse
import datetime
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from nanoeuler import measurements
from nanoeuler.data import docstrings
from nanoeuler.data.dataset import Prepared
from nanoeuler.data.validation import HeldOut
from nanoeuler.engines.registry import engine_factory, make_stepper
from nanoeuler.files import project_root, replacing
from nanoeuler.inference.decoder import Decoder, generate
from nanoeuler.tokenizer.chat_template import prompt
from nanoeuler.training.checkpoint import load_model
from nanoeuler.training.dpo import (
    LEARNING_RATE,
    PREFERRING,
    DpoEvaluator,
    PreferenceStepper,
    halves,
    prefer,
)
from nanoeuler.training.optim import AdamW, rate_for
from nanoeuler.training.preferences import Comparisons
from nanoeuler.training.run import Settings
from nanoeuler.training.sft import finetune

# beta and anchor
RUNS = [0.1, 0.0], [0.1, 0.1], [0.3, 0.0], [0.03, 0.0], [0.1, 0.03]
EXAMPLES = 3  # couples that are shown
TO = project_root() / "data" / "trained" / "preferences.json"
NAMES = "loss", "accuracy", "prefers", "chosen", "rejected", "bits_per_byte"


def rounded(line: dict, start: str = "") -> dict:
    """The numbers NAMES of a line."""
    return {name: round(line[start + name], 4) for name in NAMES if start + name in line}


class Measure:
    """The models of a measurement, and what is asked of each."""

    def __init__(self, base: Path, chat: Path, pairs: list):
        self.chat, self.config, self.tokenizer = chat, *load_model(chat)[:2]
        self.learned, self.held_out = halves(pairs)
        shape = 16, self.config.context, self.config.n_predict
        self.compared = Comparisons(self.tokenizer, self.held_out, *shape)
        text = Prepared(base / "data").held_out
        self.text = HeldOut.from_tokens(text, self.tokenizer, *shape)
        self.known = {}  # what the reference thinks of all comparisons

    def judge(self, weights) -> dict:
        """All held-out comparisons, and bits per byte of running text."""
        stepper = PreferenceStepper(engine_factory("cpu"), weights, weights, AdamW(weights))
        judge = DpoEvaluator(stepper, self.compared)
        judge.known = self.known  # filled by the first that is judged, which is the reference
        return {**rounded(judge(quick=False)), **self.text_bits(weights)}

    def text_bits(self, weights) -> dict:
        """Bits per byte of running text."""
        sums = make_stepper("cpu", weights, AdamW(weights)).sums
        return {"text_bits_per_byte": round(self.text.bits_per_byte(sums, quick=True), 4)}

    def examples(self, weights) -> list[dict]:
        """Some couples from the middle: log p of both answers, and what the model answers."""
        twos = self.compared.windows // 2
        at = [2 * (twos * (i + 1) // (EXAMPLES + 1)) + j for i in range(EXAMPLES) for j in (0, 1)]
        optimizer = AdamW(weights)
        stepper = PreferenceStepper(engine_factory("cpu"), weights, weights, optimizer)
        log_p = stepper.likelihoods(weights, *self.compared.rows(at)).reshape(-1, 2)
        return [{**self.compared.kept[i]._asdict(), "log_p": np.round(log_p[n], 1).tolist(),
                 "says": self.answer(weights, self.compared.kept[i].question)}
                for n, i in enumerate(at)]  # fmt: skip

    def answer(self, weights, question: str) -> str:
        """The most probable answer, token by token."""
        ids = generate(Decoder(self.config, weights), prompt(self.tokenizer, question), 60,
                       stop=self.tokenizer.special.values(), temperature=0.0)  # fmt: skip
        return self.tokenizer.decode_text(list(ids))

    def preferred(self, beta: float, anchor: float, steps: int) -> dict:
        """A run at `beta` and `anchor`: its curves, and its end."""
        lines = []
        with tempfile.TemporaryDirectory() as place:
            run = prefer(self.chat, (self.learned, self.held_out), Path(place) / "run", beta=beta,
                         anchor=anchor, settings=replace(PREFERRING, steps=steps),
                         on_step=lines.append)  # fmt: skip
        judged = [line for line in lines if "held_out_loss" in line]
        return {
            "beta": beta, "anchor": anchor, "steps": steps, "lr": run.settings.lr,
            "end": {**rounded(judged[-1], "held_out_"), **self.text_bits(run.weights)},
            "held_out": [{"step": x["step"], **rounded(x, "held_out_")} for x in judged],
            "examples": self.examples(run.weights),
        }  # fmt: skip

    def tuned_on(self, pairs: list, steps: int) -> dict:
        """Fine-tuning that goes on instead: as many steps, at the same rate."""
        settings = Settings(steps=steps, lr=rate_for(self.config.dim, LEARNING_RATE),
                            weight_decay=0.0)  # fmt: skip
        with tempfile.TemporaryDirectory() as place:
            run = finetune(self.chat, pairs, Path(place) / "run", settings=settings, engine="cpu")
        return self.judge(run.weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("chat", type=Path)
    parser.add_argument("--run", type=float, nargs=2, action="append", help="beta and anchor")
    parser.add_argument("--steps", type=int, default=PREFERRING.steps)
    parser.add_argument("--out", type=Path, default=TO)
    options = parser.parse_args()
    pairs = docstrings.pairs()
    measure = Measure(options.base, options.chat, pairs)
    first = load_model(options.chat)[2]
    found = {
        "judged": measure.compared.windows, "learned": len(measure.learned),
        "before": measure.judge(first), "examples": measure.examples(first), "runs": [],
        "tuned_on": measure.tuned_on(pairs, options.steps),
        "commit": measurements.commit(), "device": measurements.device(),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    for beta, anchor in options.run or RUNS:
        found["runs"].append(measure.preferred(beta, anchor, options.steps))
        with replacing(options.out) as temporary:  # after each: what is there is there
            text = json.dumps(found, indent=1, ensure_ascii=False)
            temporary.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
