# Made from book/11-fine-tuning-and-chat.md by nanoeuler.book: edit the chapter, not this file.


# %% book/11-fine-tuning-and-chat.md:840
"""The command line. Each command parses its flags, calls the package, and prints.

Leaves out defaults of training: those are where they are explained, in checkpoint.py and chat.py.
Commands import what they need inside, and only here and in cli_tokenizer.py is that allowed:
`nanoeuler --help` must not wait for numba and matplotlib.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from nanoeuler import flags
from nanoeuler.cli_tokenizer import load_tokenizer, tokenizer_app
from nanoeuler.errors import UserError

# Plain help: importing rich for its markup would take longer than all the rest.
app = typer.Typer(
    name="nanoeuler",
    help="A language model from nothing. On this machine: nanoeuler train, then sft, then chat.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(tokenizer_app, name="tokenizer")

CHAT_TEMPERATURE = 0.5  # below generate's 0.8: of an answer one expects the likely
INTERRUPTED = 130  # what typer returns after Ctrl-C: 128 and the number of the signal, 2


def main(args=None):
    """Run the command line on `args` (by default the program's); return the exit code."""
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):  # a character the terminal lacks is no reason to stop
            stream.reconfigure(errors="replace")
    try:
        code = app(args, prog_name="nanoeuler", standalone_mode=False) or 0
        sys.stdout.flush()  # here, where a closed pipe can still be caught
        if code != INTERRUPTED:
            return code
        problem = "interrupted"
    except typer.TyperException as error:
        problem = f"{error.format_message()} (see --help)"
    except UserError as error:
        problem = str(error)
    except (BrokenPipeError, SystemExit):  # typer makes the second of the first
        # Whoever read our output has gone, with `head` for example: nobody to tell, nothing to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        return 2
    except OSError as error:
        problem = f"{error.filename or 'input or output'}: {error.strerror}"
    print("nanoeuler:", " ".join(problem.split()), file=sys.stderr)
    return 2


# %% book/11-fine-tuning-and-chat.md:904
def _finished(run, out, then):
    """After a run: say what to do with it, or leave as after Ctrl-C if a signal cut it short."""
    if run.step < run.settings.steps:
        raise typer.Exit(INTERRUPTED)
    print(f"saved in {out}; next: {then}")


def _engine(name):
    """`name`, if this version can train with it; asked before anything is written."""
    if name == "cuda":
        raise UserError("engine cuda: this version trains on a CPU: choose auto, cpu or reference")
    from nanoeuler.parallel import engine_factory

    engine_factory(name)
    return name


def _preset(name):
    """The configuration of that name."""
    from nanoeuler.config import PRESETS

    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}: choose {' or '.join(PRESETS)}")
    return PRESETS[name]


def _file(data):
    """The path of --data FILE."""
    if not Path(data).is_file():
        raise UserError(f"expected --data docs or --data FILE, but there is no file {data}")
    return Path(data)


@app.command()
def train(
    data: flags.Data = "docs", out: flags.Out = Path("runs/base"), preset: flags.Preset = None,
    tokenizer: flags.Tokenizer = None, engine: flags.Engine = "auto", steps: flags.Steps = None,
    batch_size: flags.BatchSize = None, lr: flags.Lr = None, seed: flags.Seed = None,
    save_every: flags.SaveEvery = 500, resume: flags.Resume = False,
):  # fmt: skip
    """Train a model on a text.

    Left out, --preset is small and the tokenizer is learned from the text; with --resume, both are
    the run's.

    Example: nanoeuler train --data story.txt --out runs/story --steps 500
    """
    from nanoeuler import corpus
    from nanoeuler.generate import Decoder, generate, text_pieces
    from nanoeuler.train import train as train_on

    config = None if resume and not preset else _preset(preset or "small")
    engine, tokenizer = _engine(engine), tokenizer and load_tokenizer(tokenizer)

    def sample(config, tokenizer, weights):
        ids = generate(Decoder(config, weights), tokenizer.encode("\n"), 150)
        return "a sample:\n\n" + "".join(text_pieces(tokenizer, ids)) + "\n"

    run = train_on(
        config, corpus.text_path() if data == "docs" else _file(data), out, steps=steps,
        batch_size=batch_size, lr=lr, seed=seed, engine=engine, save_every=save_every,
        resume=resume, sample=sample, tokenizer=tokenizer,
    )  # fmt: skip
    _finished(run, out, f"nanoeuler sft --from {out}")


@app.command()
def sft(
    data: flags.Data = "docs", base: flags.From = Path("runs/base"),
    out: flags.Out = Path("runs/chat"),
    engine: flags.Engine = "auto", steps: flags.Steps = None, batch_size: flags.BatchSize = None,
    lr: flags.Lr = None, seed: flags.Seed = None, save_every: flags.SaveEvery = 500,
    resume: flags.Resume = False,
):  # fmt: skip
    """Teach a trained model to answer.

    A file of --data has a line {"question": TEXT, "answer": TEXT} for each pair.

    Example: nanoeuler sft --from runs/base --out runs/chat
    """
    from nanoeuler import chat, corpus

    engine = _engine(engine)
    pairs = corpus.pairs() if data == "docs" else chat.read_pairs(_file(data))

    def sample(config, tokenizer, weights):
        text = "questions it was not trained on:\n"
        for question, _ in pairs[-3:]:
            talk = chat.Chat(config, tokenizer, weights, temperature=CHAT_TEMPERATURE)
            text += f"\n{question}\n  {''.join(talk.reply(question))}\n"
        return text

    run = chat.sft(
        base, pairs, out, steps=steps, batch_size=batch_size, lr=lr, seed=seed, engine=engine,
        save_every=save_every, resume=resume, sample=sample,
    )  # fmt: skip
    _finished(run, out, f"nanoeuler chat --from {out}")


# %% book/11-fine-tuning-and-chat.md:1026
@app.command()
def generate(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="what to continue")] = "\n",
    base: flags.From = Path("runs/base"), tokens: flags.Tokens = 200, seed: flags.Seed = 0,
    temperature: flags.Temperature = 0.8, top_k: flags.TopK = 0, top_p: flags.TopP = 0.95,
):  # fmt: skip
    """Continue a text.

    Each token is drawn: --top-k and --top-p say from which, --temperature how boldly.

    Example: nanoeuler generate "The function returns" --tokens 100 --seed 3
    """
    from nanoeuler import generate as generation
    from nanoeuler.checkpoint import load_model

    config, tokenizer, weights = load_model(base)
    knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    decoder, prompt = generation.Decoder(config, weights), tokenizer.encode(text)
    ids = generation.generate(decoder, prompt, tokens, **knobs)
    pieces = generation.text_pieces(tokenizer, ids)
    print(text + next(pieces), end="", flush=True)  # at once: a wrong knob is told before anything
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


@app.command()
def chat(
    base: flags.From = Path("runs/chat"), seed: flags.Seed = 0,
    temperature: flags.Temperature = CHAT_TEMPERATURE, top_k: flags.TopK = 0,
    top_p: flags.TopP = 0.95,
):  # fmt: skip
    """Ask a fine-tuned model.

    A question a line, until the input ends (Ctrl-D).

    Example: nanoeuler chat --from runs/chat
    """
    from nanoeuler.chat import Chat, converse
    from nanoeuler.checkpoint import load_model

    def questions():
        while sys.stdin.isatty():
            try:
                yield input("> ")
            except EOFError:
                print()
                return
        yield from sys.stdin

    talk = Chat(*load_model(base), seed, temperature=temperature, top_k=top_k, top_p=top_p)
    converse(talk, questions(), lambda text: print(text, end="", flush=True))


# %% book/11-fine-tuning-and-chat.md:1335
@app.command()
def check():
    """Prove the gradients.

    Every element of every tensor of a tiny model is compared with its complex step.

    Example: nanoeuler check
    """
    from nanoeuler import gradcheck

    rows = gradcheck.check()
    print(gradcheck.table(rows))
    if not gradcheck.passed(rows):
        raise typer.Exit(1)


@app.command()
def plan(
    preset: flags.Preset = "small", batch_size: flags.BatchSize = 16, tokens: flags.Tokens = None,
):  # fmt: skip
    """What training takes: FLOPs, memory, and hours on several devices.

    Without --tokens, a model is trained on 20 tokens for each of its parameters.

    Example: nanoeuler plan --preset euler-116m --batch-size 16
    """
    from nanoeuler.plan import report

    print(report(_preset(preset), batch_size, tokens))


@app.command()
def bench(name: Annotated[str | None, typer.Argument(metavar="NAME")] = None):
    """Measure this machine anew, into data/measurements/NAME.json of the checkout.

    Without NAME, say which names there are.

    Example: nanoeuler bench tokenizer
    """
    from nanoeuler.files import project_root

    tests = project_root() / "tests"
    names = sorted(path.stem.removeprefix("bench_") for path in tests.glob("bench_*.py"))
    if not name:
        print("\n".join(names))
        return
    if name not in names:
        raise UserError(f"no measurement is named {name!r}: choose one of {', '.join(names)}")
    sys.argv = [str(tests / f"bench_{name}.py")]  # the script's own: it has no arguments
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except ModuleNotFoundError as error:
        extras = "install the extras: pip install -e '.[test,bench]'"
        raise UserError(f"no {error.name}: {extras}") from None


# %% book/11-fine-tuning-and-chat.md:1440
@app.command()
def doctor():
    """What this machine offers, and what may slow it down. Changes nothing.

    Example: nanoeuler doctor
    """
    from nanoeuler.doctor import report

    print(report())


__all__ = [
    "app",
    "CHAT_TEMPERATURE",
    "INTERRUPTED",
    "main",
    "train",
    "sft",
    "generate",
    "chat",
    "check",
    "plan",
    "bench",
    "doctor",
]
