# Made from book/12-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli
"""`nanoeuler train` and `nanoeuler sft`: the commands that take steps, and what they say.

Leaves out defaults of training: those are where they are explained, in saves.py and chat.py.
Imports inside, as main.py does.
"""

import sys
from pathlib import Path

import typer

from nanoeuler.cli import flags
from nanoeuler.errors import UserError

CHAT_TEMPERATURE = 0.5  # below generate's 0.8: of an answer one expects the likely
INTERRUPTED = 130  # what typer returns after Ctrl-C: 128 and the number of the signal, 2


def _say_plan(run):
    """Print on stderr what the steps that `run` has before it will take, if there are any."""
    from nanoeuler.planning.plan import summary

    settings, left = run.settings, run.settings.steps - run.step
    if left:
        parts = {"accumulate": settings.accumulate}
        print(summary(run.config, settings.batch_size, left, **parts), file=sys.stderr)


def _finished(run, out, then):
    """After a run: say what to do with it, or leave as after Ctrl-C if a signal cut it short."""
    if run.step < run.settings.steps:
        raise typer.Exit(INTERRUPTED)
    print(f"saved in {out}; next: {then}")


def _own_text(out):
    """The folder with the tokens of the text that the run in `out` began with."""
    if (out / "data" / "prepared.json").exists():
        return out / "data"
    raise UserError(
        f"expected a run with a text of its own in {out / 'data'}, but there is none: name the "
        "prepared data that it began with as --data, or leave out --resume to begin"
    )


def _text(data):
    """The path of --data for train: docs is the embedded corpus."""
    from nanoeuler.data import docstrings

    path = docstrings.text_path() if data == "docs" else flags.plain(Path(data))
    if (path / "pairs.jsonl").exists():
        raise UserError(f"--data {data} holds pairs, not text: nanoeuler sft learns from them")
    if path.is_file() or (path / "prepared.json").exists():
        return path
    raise UserError(
        f"expected --data to be docs, a text file, or a folder that nanoeuler data prepare has "
        f"made, but {path} is none: nanoeuler data list says of which texts it can make one"
    )


def _pairs(data):
    """The pairs of --data for sft: [(question, answer)]; docs are the embedded ones."""
    from nanoeuler.data import docstrings
    from nanoeuler.inference import chat

    path = Path(data)
    if data == "docs":
        return docstrings.pairs()
    if (path / "prepared.json").exists():
        raise UserError(f"--data {data} holds text, not pairs: nanoeuler train learns from it")
    path = path / "pairs.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"expected --data docs or a file of pairs, but there is no file {path}: nanoeuler data "
            "prepare makes one of a text whose format is pairs"
        )
    return chat.read_pairs(path)


def train(
    data: flags.Data = None, out: flags.Out = Path("runs/base"), preset: flags.Preset = None,
    tokenizer: flags.Tokenizer = None, engine: flags.Engine = "auto", steps: flags.Steps = None,
    batch_size: flags.BatchSize = None, accumulate: flags.Accumulate = None,
    lr: flags.Lr = None, seed: flags.Seed = None, save_every: flags.SaveEvery = 500,
    keep: flags.Keep = 2, resume: flags.Resume = False,
):  # fmt: skip
    """Train a model on a text.

    Left out, --data is docs, --preset small, and the tokenizer that of prepared data or learned
    from the text (nanoeuler data prepare learns other sizes). With --resume, all are the run's.

    Example: nanoeuler train --data story.txt --out runs/story --steps 500
    """
    from nanoeuler.inference.decoder import Decoder, generate, text_pieces
    from nanoeuler.training.loop import train as train_on

    config = None if resume and not preset else flags.preset_config(preset or "small")
    engine, tokenizer = flags.engine_name(engine), tokenizer and flags.load_tokenizer(tokenizer)
    flags.not_prepared(out)
    text = _own_text(out) if resume and data is None else _text(data or "docs")
    if tokenizer and text.is_dir() and tokenizer.hash != flags.load_tokenizer(text).hash:
        raise UserError(
            f"{text} was prepared with another tokenizer: leave out --tokenizer, or prepare the "
            "text again with nanoeuler data prepare --tokenizer"
        )

    def sample(config, tokenizer, weights):
        ids = generate(Decoder(config, weights), tokenizer.encode("\n"), 150)
        return "\n" + "".join(text_pieces(tokenizer, ids)) + "\n"

    run = train_on(
        config, text, out, steps=steps, batch_size=batch_size, accumulate=accumulate,
        lr=lr, seed=seed, engine=engine, save_every=save_every, keep=keep, resume=resume,
        sample=sample, tokenizer=tokenizer, before=_say_plan,
    )  # fmt: skip
    _finished(run, out, f"nanoeuler sft --from {out}")


def sft(
    data: flags.Data = "docs", base: flags.From = Path("runs/base"),
    out: flags.Out = Path("runs/chat"),
    engine: flags.Engine = "auto", steps: flags.Steps = None, batch_size: flags.BatchSize = None,
    accumulate: flags.Accumulate = None, lr: flags.Lr = None, seed: flags.Seed = None,
    save_every: flags.SaveEvery = 500, keep: flags.Keep = 2, resume: flags.Resume = False,
):  # fmt: skip
    """Teach a trained model to answer.

    A file of --data has a line {"question": TEXT, "answer": TEXT} for each pair.

    Example: nanoeuler sft --from runs/base --out runs/chat
    """
    from nanoeuler.inference import chat

    engine, pairs = flags.engine_name(engine), _pairs(data)
    flags.not_prepared(out)

    def sample(config, tokenizer, weights):
        text = ""
        for question, _ in pairs[-3:]:
            talk = chat.Chat(config, tokenizer, weights, temperature=CHAT_TEMPERATURE)
            text += f"\n{question}\n  {''.join(talk.reply(question))}\n"
        return text

    run = chat.sft(
        base, pairs, out, steps=steps, batch_size=batch_size, accumulate=accumulate, lr=lr,
        seed=seed, engine=engine, save_every=save_every, keep=keep, resume=resume, sample=sample,
        before=_say_plan,
    )  # fmt: skip
    _finished(run, out, f"nanoeuler chat --from {out}")
