"""What earlier turns do to an answer: `python tests/bench/conversation.py BASE FOLDER`, 10 minutes.

BASE is a trained run of a small model. It is fine-tuned twice into FOLDER, on the same embedded
pairs with the same settings: each pair as a conversation of its own, and in conversations of one to
MOST turns (most of the longer ones do not fit the context, and `fitting` cuts them into single
turns). Then both are judged on the same held-out answers, after 0, 1, ... earlier turns: pairs that
have nothing to do with the question. A fine-tuning that was cut short goes on where it was.

Rows of data/measurements/conversation.json, and what the models said in
data/trained/conversation.json.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from nanoeuler import measurements
from nanoeuler.data import docstrings
from nanoeuler.data.conversations import Conversation
from nanoeuler.data.text import TRAIN_SHARE
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.files import project_root, replacing
from nanoeuler.inference.chat import Chat
from nanoeuler.inference.sampling import log_probabilities
from nanoeuler.model.transformer import forward
from nanoeuler.tokenizer.chat_template import conversation
from nanoeuler.training.checkpoint import load_model
from nanoeuler.training.run import Settings
from nanoeuler.training.sft import finetune, spell

MOST = 3      # turns of a conversation: as many of SHORT tokens as fit a context of 128
SHORT = 42    # tokens of a turn that is judged with, a third of that context
STEPS = 300
ASKED = "What does json.dumps do?", "What does it return?", "And what is json for?"


def talks(pairs, seed=0):
    """The pairs in conversations of 1 to MOST turns, drawn at random."""
    rng, found, at = np.random.default_rng(seed), [], 0
    while at < len(pairs):
        turns = int(rng.integers(1, MOST + 1))
        found.append(Conversation(pairs[at : at + turns]))
        at += turns
    return found


def fitting(tokenizer, found, context):
    """The conversations, those that are too long cut into their turns."""
    for talk in found:
        short = len(spell(tokenizer, talk)[0]) <= context
        yield from [talk] if short else [Conversation([turn]) for turn in talk.turns]


def bits_per_byte(config, tokenizer, weights, last, before):
    """Bits per byte of the answers of the pairs `last`, each after its turns in `before`."""
    engine, bits, size = ReferenceEngine(), 0.0, 0
    for pair, turns in zip(last, before, strict=True):
        history = spell(tokenizer, Conversation(turns))[0] if turns else []
        ids, counted = conversation(tokenizer, *pair)
        first = len(history) + counted.index(True)
        ids = np.array(history + ids)
        logits, _ = forward(engine, config, weights, ids[None, :-1])
        said = log_probabilities(logits[0, first - 1 : -1, 0])  # without the mark at the end
        bits -= said[np.arange(len(said)), ids[first:-1]].sum() / np.log(2)
        size += len(pair[1].encode())
    return float(bits / size)


def judged(config, tokenizer, weights, pairs):
    """Bits per byte by the number of earlier turns, 0 to MOST - 1, of the same answers."""
    short = [pair for pair in pairs if len(conversation(tokenizer, *pair)[0]) <= SHORT]
    others = np.random.default_rng(1).permutation(len(short))
    for n in range(MOST):
        before = [[short[others[(i + k + 1) % len(short)]] for k in range(n)]
                  for i in range(len(short))]  # fmt: skip
        yield len(short), bits_per_byte(config, tokenizer, weights, short, before)


def main() -> None:
    """Fine-tune, judge, ask, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    pairs, (_, tokenizer, _) = docstrings.pairs(), load_model(asked.base)
    cut = int(len(pairs) * TRAIN_SHARE)
    many = [*fitting(tokenizer, talks(pairs[:cut]), load_model(asked.base)[0].context)]
    ways = {"pairs": pairs[:cut], "talks": many}
    rows, said = [], {}
    for name, learned in ways.items():
        # Both judge themselves along the way by the same pairs: the last tenth that is held out.
        held_out = pairs[cut:][: len(learned) // 9]
        finetune(asked.base, [*learned, *held_out], asked.folder / name,
                 settings=Settings(steps=STEPS, batch_size=16),
                 resume=(asked.folder / name).exists())  # fmt: skip
        model = load_model(asked.folder / name)
        for n, (count, bits) in enumerate(judged(*model, pairs[cut:])):
            case = f"learned from {name}, {n} earlier turns, {count} answers"
            print(f"{case:50} {bits:.4f}")
            rows.append(measurements.row("answers after turns", case, "reference",
                                         round(bits, 4), "bits/byte"))  # fmt: skip
        chat = Chat(*model, temperature=0.0)
        said[name] = [[question, "".join(chat.reply(question))] for question in ASKED]
    measurements.update("conversation", rows)
    facts = {"said": said, "commit": measurements.commit(), "date": rows[0]["date"]}
    with replacing(project_root() / "data" / "trained" / "conversation.json") as temporary:
        temporary.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
