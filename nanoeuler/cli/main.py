# Made from book/12-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli
"""The command line. Each command parses its flags, calls the package, and prints.

Leaves out defaults of training: those are where they are explained, in saves.py and chat.py.
Commands import what they need inside, and only in the modules of the command line is that
allowed: `nanoeuler --help` must not wait for numba and matplotlib.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from nanoeuler.cli import flags
from nanoeuler.cli.data import data_app
from nanoeuler.cli.tokenizer import tokenizer_app
from nanoeuler.cli.train import CHAT_TEMPERATURE, INTERRUPTED, sft, train
from nanoeuler.errors import UserError

# Plain help: importing rich for its markup would take longer than all the rest.
app = typer.Typer(
    name="nanoeuler",
    help="A language model from nothing. On this machine: nanoeuler train, then sft, then chat.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(sft)
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")


def main(args=None):
    """Run the command line on `args` (by default the program's); return the exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed before we began; a file must not take its number
            setattr(sys, name, open(os.devnull, mode))
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
    from nanoeuler.inference import decoder as generation
    from nanoeuler.training.saves import load_model

    config, tokenizer, weights = load_model(base)
    knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    decoder, prompt = generation.Decoder(config, weights), tokenizer.encode(os.fsencode(text))
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
    from nanoeuler.inference.chat import Chat, converse
    from nanoeuler.training.saves import load_model

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


# %% sec-cli-tokenizer
@app.command()
def check():
    """Prove the gradients.

    Every element of every tensor of a tiny model is compared with its complex step.

    Example: nanoeuler check
    """
    from nanoeuler.checks import gradcheck

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
    from nanoeuler.planning.plan import report

    print(report(flags.preset_config(preset), batch_size, tokens))


@app.command()
def bench(name: Annotated[str | None, typer.Argument(metavar="NAME")] = None):
    """Measure this machine anew, into data/measurements/NAME.json of the checkout.

    Without NAME, say which names there are.

    Example: nanoeuler bench tokenizer
    """
    from nanoeuler.files import project_root

    tests = project_root() / "tests"
    names = sorted(path.stem for path in (tests / "bench").glob("*.py"))
    if not name:
        print("\n".join(names))
        return
    if name not in names:
        raise UserError(f"no measurement is named {name!r}: choose one of {', '.join(names)}")
    sys.argv = [str(tests / "bench" / f"{name}.py")]  # the script's own: it has no arguments
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except ModuleNotFoundError as error:
        extras = "install the extras: pip install -e '.[test,bench]'"
        raise UserError(f"no {error.name}: {extras}") from None


# %% sec-cli-doctor
@app.command()
def doctor():
    """What this machine offers, and what may slow it down. Changes nothing.

    Example: nanoeuler doctor
    """
    from nanoeuler.planning.doctor import report

    print(report())
