# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli-main
"""`nanoeuler train` and `nanoeuler sft`: the commands that take training steps.

Leaves out the defaults of training, which are where they are explained. Imports inside functions,
as main.py does.
"""

import sys
from functools import partial
from itertools import islice
from pathlib import Path

import typer

from nanoeuler.cli import flags
from nanoeuler.cli.stdio import tell
from nanoeuler.errors import UserError

SAMPLE_TOKENS = 150  # of the sample that a run shows: a few lines of a terminal
ASKED = 3  # held-out questions whose answers fine-tuning shows
ANSWER_TOKENS = 128  # of such an answer at most: the model may not have learned to end yet


def _print_plan(run, seconds_per_step, ranks=1):
    """Print on stderr what the remaining steps of `run` will take; their time once it is known."""
    from nanoeuler.engines.registry import GPU_ENGINES
    from nanoeuler.planning.plan import size_lines, time_line

    settings, left, engine = run.settings, run.settings.steps - run.step, run.program["engine"]
    if seconds_per_step is not None:
        print(time_line(left, seconds_per_step), file=sys.stderr)
        return
    sizes = run.config, settings.batch_size
    if run.lora:
        from nanoeuler.planning import lora

        if engine in GPU_ENGINES:
            from nanoeuler.planning import gpu_memory

            given = settings.accumulate, engine, run.lora, settings.recompute
            memory = gpu_memory.words(*sizes, *given)
            lines = f"{lora.learning(run.config, run.lora)}\nmemory  {memory}"
        else:
            lines = lora.lora_lines(run.config, run.lora, settings.batch_size, settings.accumulate)
        print(lines, file=sys.stderr)
        return
    options = dict(accumulate=settings.accumulate, ranks=ranks)
    if engine in GPU_ENGINES:
        from nanoeuler.planning import gpu_memory

        given = settings.accumulate, engine, None, settings.recompute
        options["memory"] = gpu_memory.words(*sizes, *given)
    print(size_lines(*sizes, left, **options), file=sys.stderr)


def _asked(preset, sizes, run, data):
    """The configuration that flags ask for, None if `run` goes on as it is.

    The default preset's vocabulary, unless chosen, is as large as is usual for the text `data`.
    """
    from nanoeuler import api
    from nanoeuler.model.config import PRESET

    config = flags.config_of(preset, sizes, run)
    if preset not in (None, PRESET) or run or "vocab_size" in sizes:
        return config
    return api.for_text(config, None if data in (None, "docs") else Path(data))


def _learned_vocabulary(sizes, tokenizer, text):
    """UserError if --vocab-size is given where no vocabulary will be learned."""
    if "vocab_size" in sizes and (tokenizer or text and Path(text).is_dir()):
        raise UserError(
            "--vocab-size is for a text whose vocabulary will be learned, but a tokenizer or "
            "prepared data is given: leave out --vocab-size"
        )


def _over_ranks(call, ranks, train):
    """Call train(number of ranks), alone or as rank 0 of several, which the others follow."""
    from nanoeuler.engines.ranks import controller, launch

    group = launch.world(ranks)
    if (ranks or 1) > group.size:  # nobody has started them yet
        raise typer.Exit(launch.start(ranks, call.obj))
    if group.rank:
        controller.ignore_signals()
        controller.follow(group)
        return
    with controller.leading(group):
        train(group.size)


@flags.grouped(settings=flags.SETTINGS, sizes=flags.SIZES, options=flags.EXECUTION)
def train(
    call: typer.Context, settings: flags.Group, sizes: flags.Group, options: flags.Group,
    data: flags.Data = None, out: flags.Out = flags.BASE, preset: flags.Preset = None,
    tokenizer: flags.Tokenizer = None, engine: flags.Engine = "auto", ranks: flags.Ranks = None,
    resume: flags.Resume = False,
) -> None:  # fmt: skip
    """Train a model on a text.

    Without flags, it trains the preset small-modern for five minutes on docs. The tokenizer is
    learned from the text (for small-modern 512 tokens, if that is under a megabyte), or is that of
    prepared data. Flags for sizes and switches change the preset; small-modern has settings of its
    own (Muon). --engine auto takes a GPU if there is one.
    With --resume, leave out all that the run knows: its data (unless prepared), model and settings.

    Example: nanoeuler train --data story.txt --out runs/story --steps 500
    """
    from nanoeuler.engines.registry import engine_name, warm_up

    if not ranks:  # whose processes are still to come
        warm_up(engine)
    from nanoeuler import api
    from nanoeuler.training.best import chosen
    from nanoeuler.training.folder import is_begun
    from nanoeuler.training.train import recipe, settings_for

    def run(size):
        ids, folder = tokenizer and flags.load_tokenizer(tokenizer), flags.folder_out(out)
        _learned_vocabulary(sizes, ids, data)
        begun = folder if resume and is_begun(folder) else None
        api.train(
            data, out=folder, config=_asked(preset, sizes, begun, data),
            settings=settings_for(folder, resume, recipe(preset), **settings),
            tokenizer=ids, engine=engine_name(engine), resume=resume, **options,
            on_estimate=partial(_print_plan, ranks=size),
            sample=lambda model: f"\n{model.generate(tokens=SAMPLE_TOKENS)}\n",
        )  # fmt: skip
        tell(f"saved in {folder}; next: nanoeuler sft --from {chosen(folder)}")

    _over_ranks(call, ranks, run)


def _answer(model, question):
    """The beginning of a model's answer; or the error, if the question is too long.

    A finished run must not fail because of one question.
    """
    try:
        return "".join(islice(model.chat().reply(question), ANSWER_TOKENS))
    except UserError as error:
        return f"({error})"


def _model_to_tune(base, folder, resume):
    """The run to start from; None: `folder` has a save, which knows it."""
    from nanoeuler.training.checkpoint import read_record
    from nanoeuler.training.folder import checkpoints

    if base is None and not (resume and checkpoints(folder)):
        base = flags.BASE
    if base and not resume:
        read_record(base)  # fail for a missing model before half a minute of reading pairs
    return base


def _answers(pairs, model):
    """The questions of these conversations, each with the model's answer."""
    from nanoeuler.data.conversations import turns_of

    asked = [turns_of(each)[0][0] for each in pairs]
    return "".join(f"\n{each}\n  {_answer(model, each)}\n" for each in asked)


@flags.grouped(settings=flags.SETTINGS, options=flags.EXECUTION, adapters=flags.LORA)
def sft(
    call: typer.Context, settings: flags.Group, options: flags.Group, adapters: flags.Group,
    data: flags.Data = "docs",
    base: flags.FromRun = None, out: flags.Out = flags.CHAT, engine: flags.Engine = "auto",
    ranks: flags.Ranks = None, resume: flags.Resume = False,
) -> None:  # fmt: skip
    """Fine-tune a trained model to answer questions.

    Without flags, it fine-tunes runs/base on docs. A file for --data has one JSON object a line:
    {"question": TEXT, "answer": TEXT}, or Alpaca's instruction, input and output, or messages of
    user and assistant. With --lora, only adapters are trained, and the run of --from has to stay
    where it is. With --resume, the model and all settings are the run's.

    Example: nanoeuler sft --from runs/base --out runs/chat
    """
    from nanoeuler import api
    from nanoeuler.engines.registry import engine_name
    from nanoeuler.training.best import chosen
    from nanoeuler.training.sft import FINETUNING
    from nanoeuler.training.train import settings_for

    lora = flags.lora_of(adapters)

    def run(size):
        folder = flags.folder_out(out)
        first = _model_to_tune(base, folder, resume)
        pairs = api.pairs_of(data)
        api.finetune(
            first, pairs, out=folder, engine=engine_name(engine), resume=resume,
            sample=partial(_answers, pairs[-ASKED:]), lora=lora,
            settings=settings_for(folder, resume, FINETUNING, **settings),
            on_estimate=partial(_print_plan, ranks=size), **options,
        )  # fmt: skip
        tell(f"saved in {folder}; next: nanoeuler chat --from {chosen(folder)}")

    if lora and (ranks or 1) > 1:
        raise UserError("LoRA adapters can't be trained by several ranks yet: leave out --ranks")
    _over_ranks(call, ranks, run)
