# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli-main
"""The command line. Each command parses its flags, calls the package, and prints.

Leaves out defaults: those are where they are explained. Commands import what they need inside:
`nanoeuler --help` must not wait for numba and matplotlib.
"""

import contextlib
import os
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated

import typer

from nanoeuler.cli import flags
from nanoeuler.cli.convert import export, import_model
from nanoeuler.cli.data import data_app
from nanoeuler.cli.prefer import prefer
from nanoeuler.cli.serve import serve
from nanoeuler.cli.speedrun import speedrun
from nanoeuler.cli.stdio import Messages, drop
from nanoeuler.cli.tokenizer import tokenizer_app
from nanoeuler.cli.train import sft, train
from nanoeuler.errors import UserError

INTERRUPTED = 130  # what typer returns after Ctrl-C: 128 and the number of the signal, 2
LINE = 1000  # characters of an error: room for two paths and what to do about them


# Plain help, for which rich need not be imported.
app = typer.Typer(
    name="nanoeuler",
    help="A language model, built and trained from scratch. To begin, run nanoeuler train, then "
    "nanoeuler sft, then nanoeuler chat: they need no flags.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(sft)
app.command()(prefer)
app.command()(serve)
app.command()(speedrun)
app.command("import")(import_model)
app.command()(export)
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")


def main(args: list[str] | None = None) -> int:
    """Run the command line on `args` (by default the program's); return the exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed before we began; a file must not take its number
            setattr(sys, name, open(os.devnull, mode))
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):  # a character the terminal lacks is no reason to stop
            stream.reconfigure(errors="replace")
    with contextlib.redirect_stderr(Messages(sys.stderr)), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, about numbers that overflow
        code, problem = _run(sys.argv[1:] if args is None else args)
        if problem and _speaks():
            print("nanoeuler:", line(problem), file=sys.stderr)
    return code


def line(problem: str) -> str:
    """`problem` as one line for a terminal: no control characters, the middle of a long one cut."""
    text = " ".join(problem.split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
                   for c in text)  # fmt: skip
    return text if len(text) <= LINE else f"{text[: LINE // 2]} ... {text[-LINE // 2 :]}"


def _speaks():
    """Whether this process prints errors: of several ranks only the first does."""
    from nanoeuler.engines.ranks.launch import launched

    return not launched()


def _run(args):
    """Run the command line on `args`: (exit code, error in words or "")."""
    try:
        flags.not_empty(args)
        code = app(args, prog_name="nanoeuler", standalone_mode=False, obj=args) or 0
        sys.stdout.flush()  # here, where a closed pipe can still be caught
        return (2, "interrupted") if code == INTERRUPTED else (code, "")
    except typer.TyperException as error:
        problem = f"{error.format_message()} (see --help)"
    except UserError as error:
        problem = str(error)
    except (BrokenPipeError, SystemExit):  # typer makes the second of the first
        drop(sys.__stdout__)  # with `head` for example: nobody to tell, nothing to say
        problem = ""
    except KeyboardInterrupt:  # while the flags are read
        problem = "interrupted"
    except MemoryError:
        problem = "this needs more memory than there is: choose a smaller model, batch or context"
    except OSError as error:
        problem = f"{error.filename or 'input or output'}: {error.strerror}"
    return 2, problem


@app.command()
@flags.grouped(sampling=flags.SAMPLING, writing=flags.GENERATION)
def generate(
    sampling: flags.Group, writing: flags.Group,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="what to continue", show_default="an empty line")
    ] = "\n",
    base: flags.From = flags.BASE, tokens: flags.Tokens = None,
    log_probabilities: Annotated[
        bool, typer.Option("--log-probabilities", help="one token a line, with its log probability")
    ] = False,
) -> None:  # fmt: skip
    """Continue a text.

    Each token is sampled: --top-k, --top-p and --min-p limit the choice, and a higher --temperature
    makes it bolder.

    Example: nanoeuler generate "The function returns" --tokens 100 --seed 3
    """
    from nanoeuler import api

    model, options = api.load(base), sampling | writing | _given(tokens=tokens)
    options["stop_tokens"] = [flags.token(word) for word in options.get("stop_tokens", ())]
    if log_probabilities:
        if "stop" in options or "guesses" in options:
            raise UserError("--log-probabilities lists tokens: leave out --stop and --guesses")
        for drawn in model.draws(os.fsencode(text), **options):
            piece = model.tokenizer.decode_text([drawn.token])
            print(f"{drawn.log_probability:8.3f}  {piece!r}", flush=True)
        return
    pieces = model.stream(os.fsencode(text), **options)
    print(text, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def _given(**values):
    """Those of `values` that are not None."""
    return {name: value for name, value in values.items() if value is not None}


@app.command()
@flags.grouped(sampling=flags.SAMPLING, reading=flags.BACKEND)
def chat(
    sampling: flags.Group, reading: flags.Group, base: flags.From = flags.CHAT,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="system prompt, read before all questions")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--max-tokens", parser=flags.whole_number(1), metavar="N",
                                 help="the most tokens of an answer  [default: 1024]")
    ] = None,
) -> None:  # fmt: skip
    """Chat with a fine-tuned model.

    Type one question a line; end with Ctrl-D. A line that begins with / is a command to the
    program, and /help lists them. At a terminal, Ctrl-C stops an answer.

    Example: nanoeuler chat --from runs/chat
    """
    from nanoeuler import api
    from nanoeuler.inference.repl import converse, introduction, typed

    model, somebody = api.load(base), sys.stdin.isatty()
    talk = model.chat(**sampling, **reading, **_given(system=system, tokens=tokens))
    if somebody:
        print(introduction(model.config), file=sys.stderr)
    lines = typed() if somebody else sys.stdin
    converse(talk, lines, lambda text: print(text, end="", flush=True), stoppable=somebody)


_Tasks = Annotated[str | None, typer.Option(
    "--task", metavar="NAME,...", help="core, hellaswag, lambada, blimp, ..., wikitext")]
_TasksFrom = Annotated[Path | None, typer.Option(
    "--tasks-from", metavar="DIR|FILE", help="the tasks' files, if not those of data fetch")]
_Shots = Annotated[int, typer.Option(
    "--shots", parser=flags.whole_number(0, 100), metavar="N",
    help="solved examples in front of each item")]
_Limit = Annotated[int | None, typer.Option(
    "--limit", parser=flags.whole_number(1), metavar="N", help="only the first items of each task")]


def _bar_of_tokens(progress):
    """A progress bar as `report` of `Model.evaluate`: tokens per second, bits per byte so far."""
    task, began = progress.add_task("", total=None), time.monotonic()

    def report(done, total, bits):
        rate = done / max(1e-9, time.monotonic() - began)
        text = f"{done:,} of {total:,} tokens  {rate:,.0f} tokens/s  {bits:.4f} bits/byte"
        progress.update(task, completed=done, total=total, description=text)

    return report


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a folder with a run")],
    data: flags.Data = None, engine: flags.Engine = "auto", threads: flags.Threads = None,
    task: _Tasks = None, tasks_from: _TasksFrom = None, shots: _Shots = 0,
    limit: _Limit = None,
) -> None:  # fmt: skip
    """Measure how well a model predicts a text, or solves tasks.

    For a text, it prints bits per byte and perplexity. A file is judged whole; of docs and prepared
    data, and without --data of the run's own text, only the held-out part. With --task, it scores
    each task's items, with standard errors; finished items are kept in the run's folder. --task
    core stands for CORE-20: twenty tasks, each with its own number of shots.

    Example: nanoeuler eval runs/base --data story.txt
    """
    from nanoeuler import api
    from nanoeuler.data.text import read_text, split
    from nanoeuler.engines.registry import engine_name
    from nanoeuler.progress import bars
    from nanoeuler.training.train import own_text

    if task is not None:
        return _judge_tasks(run, _asked(task, shots), tasks_from, limit, (engine, threads))
    name, model = engine_name(engine), api.load(run)
    text = own_text(run) if data is None else api.text_of(data)
    with bars() as progress:
        judged = model.evaluate(
            split(read_text(text))[1] if data == "docs" else text,
            engine=name, threads=threads, report=_bar_of_tokens(progress),
        )  # fmt: skip
    print(f"bits per byte   {judged.bits_per_byte:.4f}")
    print(f"perplexity      {judged.perplexity:.2f}")
    print(f"judged          {judged.tokens:,} tokens, {judged.bytes:,} bytes of {text}")


def _asked(task: str, shots: int) -> list[tuple[str, int]]:
    """The tasks that a flag names, and their shots; core stands for CORE's tasks and shots."""
    from nanoeuler.evaluation.judge import task_name
    from nanoeuler.evaluation.tasks import TASKS

    made: list[tuple[str, int]] = []
    for name in task.split(","):
        if name.lower() != "core":
            made.append((task_name(name), shots))
        elif shots:
            raise UserError(f"core has shots of its own, got --shots {shots}: leave that out")
        else:
            made += [(each, n) for each, of in TASKS.items() for n in of.core]
    return list(dict.fromkeys(made))


def _judge_tasks(
    run: Path, asked: list[tuple[str, int]], folder: Path | None, limit: int | None,
    how: tuple[str, int | None],
) -> None:  # fmt: skip
    """Print a line for each metric of each task. Missing files are found before a model is read."""
    from nanoeuler import api
    from nanoeuler.evaluation.judge import TaskFile, core, is_core, judge, judge_text
    from nanoeuler.evaluation.likelihood import CpuScorer, scorers
    from nanoeuler.evaluation.tasks import TASKS, file_of
    from nanoeuler.paths import data_folder
    from nanoeuler.progress import bars

    fetched = [data_folder("fetched") / name for name in ("core", "blimp", "wikitext")]
    files = [file_of(name, *([folder] if folder else fetched)) for name, _ in asked]
    model, found = api.load(run), []
    by = scorers(how[0], model.weights, how[1])
    kind = "" if by[0].numbers == CpuScorer.numbers else f"-{by[0].numbers}"
    for (name, shots), path in zip(asked, files, strict=True):
        kept = run / "eval" / f"{name}-{shots}{kind}.jsonl" if run.is_dir() else None
        with bars() as progress:
            given = {"by": by, "report": _bar_of_items(progress, name), "keep": kept}
            of = model.weights, model.tokenizer
            if TASKS[name].kind == "text":
                _print_text(name, judge_text(*of, path, **given))
                continue
            found.append(judge(*of, TaskFile(name, path, shots, limit), **given))
        _print_scores(found[-1])
    if is_core(found):
        score = core(found)
        print(f"{'CORE-20':18} {'centred mean':18} {score.value:.4f} +- {score.error:.4f}   CORE's "
              "22 tasks without SQuAD and CoQA")  # fmt: skip


def _print_text(name, text):
    """The lines of a text's perplexities."""
    for measure, value, of in (
        ("perplexity, word", f"{text.word:.2f}", f"{text.words:,} words"),
        ("perplexity, token", f"{text.token:.2f}", f"{text.tokens:,} tokens"),
        ("bits per byte", f"{text.bits_per_byte:.4f}", f"{text.bytes:,} bytes"),
    ):  # fmt: skip
        print(f"{name:18} {measure:18} {value:18} {of}", flush=True)


def _print_scores(judged):
    """The lines of a task's scores."""
    more = f", {judged.shots} shots" if judged.shots else ""
    more += f", {judged.cut:,} of them cut to the context" if judged.cut else ""
    for measure, each in judged.scores.items():
        value = f"{each.value:.4f} +- {each.error:.4f}"
        print(f"{judged.task:18} {measure:18} {value:18} {each.items:,} items{more}", flush=True)


def _bar_of_items(progress, name):
    """A progress bar as `report` of `judge`."""
    task = progress.add_task(name, total=None)
    return lambda done, total: progress.update(task, completed=done, total=total,
                                               description=f"{name}: {done:,} of {total:,}")


# %% sec-cli-speedrun
_PlannedEngine = Annotated[
    str | None,
    typer.Option("--engine", metavar="NAME", help="plan for this engine: cpu, cuda, ..."),
]


def _print_added(optimizer, config, batch_size):
    """Print what an optimizer that multiplies matrices adds to a step."""
    from nanoeuler.training.muon import added
    from nanoeuler.training.run import Settings

    if Settings(optimizer=optimizer).optimizer == "muon":  # UserError for one that there isn't
        print(f"\n{added(config, batch_size)}")


@app.command()
def check() -> None:
    """Check the gradients of a tiny model.

    The gradient of every element of every tensor is compared with its complex-step derivative.

    Example: nanoeuler check
    """
    from nanoeuler.checks import gradcheck

    rows = gradcheck.check()
    print(gradcheck.table(rows))
    if not gradcheck.passed(rows):
        raise typer.Exit(1)


def _adapters(config, lora, batch_size, engine, recompute):
    """What adapters take on an engine."""
    from nanoeuler.engines.registry import GPU_ENGINES
    from nanoeuler.planning.lora import lora_lines, lora_on_cards

    if engine in GPU_ENGINES:
        return lora_on_cards(config, lora, batch_size, engine, recompute)
    return lora_lines(config, lora, batch_size)


def _config_of(preset, sizes, base):
    """The model that is asked for, or that of the run `base`."""
    config = flags.config_of(preset, sizes, base)
    if config is None:
        from nanoeuler.training.checkpoint import read_record  # only here: it brings numba

        config = read_record(base).config
    return config


@app.command()
@flags.grouped(sizes=flags.SIZES, adapters=flags.LORA)
def plan(
    sizes: flags.Group, adapters: flags.Group, preset: flags.Preset = None,
    batch_size: flags.BatchSize = None, tokens: flags.Tokens = None, engine: _PlannedEngine = None,
    ranks: flags.Ranks = None, base: flags.FromRun = None, optimizer: flags.Optimizer = None,
    recompute: flags.Recompute = None,
) -> None:  # fmt: skip
    """Estimate training: FLOPs, memory, and hours on several devices.

    The model is --preset, changed by the flags for sizes, or that of the run in --from. It is
    trained on --tokens tokens, by default 20 per parameter. --engine cuda prints a line for every
    GPU that we know, and --engine cpu times this machine. --ranks splits the batch over so many
    H200 GPUs. --lora prints what adapters take, and --optimizer muon what Muon adds to a step.
    --recompute, with --engine cuda, plans for steps that run each block again to keep less.

    Example: nanoeuler plan --preset euler-116m --batch-size 16
    """
    from nanoeuler.engines.registry import CPU_ENGINES, GPU_ENGINES, engine_name
    from nanoeuler.planning import plan, step
    from nanoeuler.planning.ranks import report

    name = engine if engine in (*GPU_ENGINES, None) else engine_name(engine)
    if recompute and name not in GPU_ENGINES:
        raise UserError("--recompute is for the steps of a GPU: add --engine cuda")
    config, batch_size = _config_of(preset, sizes, base), batch_size or plan.BATCH_SIZE
    if lora := flags.lora_of(adapters):
        print(_adapters(config, lora, batch_size, name, bool(recompute)))
    elif name in CPU_ENGINES:
        print(plan.here(config, batch_size, tokens, name))
    elif name:
        print(step.on_cards(config, batch_size, name, recompute=bool(recompute)))
    else:
        print(plan.report(config, batch_size, tokens))
        print(f"\na training step on an H200, by its launch sequence\n"
              f"{step.report(config, batch_size)}")  # fmt: skip
    if ranks:
        print(f"\n{report(config, batch_size, ranks)}")
    if optimizer:
        _print_added(optimizer, config, batch_size)


@app.command(context_settings={"ignore_unknown_options": True})
def bench(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="what to measure")] = None,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="FLAG", help="flags of that script")
    ] = None,
) -> None:
    """Repeat one of the book's measurements on this machine.

    Most results go into data/measurements of the checkout. Without NAME, it lists the names. What
    follows NAME goes to the measurement's script; bench gpu --report FILE also writes one file that
    you can send to others.

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
    script = str(tests / "bench" / f"{name}.py")
    sys.argv = [script, *(flags or [])]  # as if the script were called alone
    sys.path[:0] = [str(tests), str(tests / "helpers")]  # where the tests find their helpers, too
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except ModuleNotFoundError as error:
        extras = "install the extras: pip install -e '.[test,bench]'"
        raise UserError(f"no {error.name}: {extras}") from None


# %% sec-cli-doctor
@app.command()
def doctor() -> None:
    """Report what this machine offers, and what may slow it down.

    It changes nothing.

    Example: nanoeuler doctor
    """
    from nanoeuler.planning.doctor import report

    print(report())
