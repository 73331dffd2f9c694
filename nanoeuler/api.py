# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-face
"""The functions behind `import nanoeuler as ne`: train, finetune and load; each returns a `Model`.

Leaves out training steps and the files of a run: those are in the room `training`.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from nanoeuler.data import docstrings
from nanoeuler.data.conversations import Conversation, Pair, read_pairs
from nanoeuler.data.dataset import Prepared
from nanoeuler.engines.registry import GPU_ENGINES, expect_adapter_engine
from nanoeuler.errors import UserError
from nanoeuler.inference.model import Model, check_kind
from nanoeuler.interop.peft import with_adapter
from nanoeuler.interop.source import HUB, is_source, read_source
from nanoeuler.model.config import ModelConfig, count_parameters
from nanoeuler.model.lora import Lora, merged
from nanoeuler.model.sizes import resized as resized
from nanoeuler.model.sizes import usual_vocabulary
from nanoeuler.model.weights import Weights
from nanoeuler.planning.counts import stages
from nanoeuler.planning.lora import lora_memory
from nanoeuler.planning.memory import need
from nanoeuler.planning.plan import cpu_memory
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import sft
from nanoeuler.training import train as training
from nanoeuler.training.checkpoint import load_model, read_record
from nanoeuler.training.folder import checkpoints
from nanoeuler.training.loop import Execution, Options
from nanoeuler.training.run import Run, Settings, check_batch
from nanoeuler.training.sft import FINETUNING

Sample = Callable[[Model], str]  # a text that shows what the model can do so far


def plain(path: Path) -> Path:
    """`path`, if it is no compressed file, whose bytes are no text."""
    if path.suffix == ".gz":
        raise UserError(f"expected plain text, but {path} is compressed: gunzip -k {path} first")
    return path


def path_of(name: str, value: Path | str | None) -> Path:
    """`value`, the argument `name`, as a path. UserError if it cannot be one, or is empty.

    >>> path_of("out", "runs/mine").name
    'mine'
    """
    try:
        path = Path(value or "")
        usable = bool(value) and b"\0" not in os.fsencode(path)
    except (TypeError, ValueError):  # of another type; half of a surrogate pair
        usable = False
    if not usable:
        raise UserError(
            f"expected {name} to be a path, as str or Path, got {value!r:.60}: name a file or a "
            "folder"
        )
    return path


def text_of(data: Path | str) -> Path:
    """The file or prepared folder of a text that `data` names: docs, or its path."""
    path = plain(path_of("data", data))
    path = docstrings.text_path() if data == "docs" else path
    if (path / "pairs.jsonl").exists():
        raise UserError(f"{data} holds pairs, not text: nanoeuler sft learns from them")
    if path.is_file() or (path / "prepared.json").exists():
        return path
    raise UserError(
        f"expected docs, a text file, or a folder made by nanoeuler data prepare, but {path} is "
        "none of these: nanoeuler data list shows the texts that it can prepare"
    )


def pairs_of(data: Path | str) -> list[Pair | Conversation]:
    """The question-answer pairs that `data` names: docs, a file of pairs, or a prepared folder."""
    path = path_of("pairs", data)
    if data == "docs":
        return [*docstrings.pairs()]
    if (path / "prepared.json").exists():
        raise UserError(f"{data} holds text, not pairs: nanoeuler train learns from it")
    path = path / "pairs.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"expected docs or a file of pairs, but there is no file {path}: nanoeuler data "
            "prepare makes one from a source of pairs"
        )
    return read_pairs(path)


def for_text(config: ModelConfig, text: Path | None) -> ModelConfig:
    """`config` with as many tokens as are usual for the file `text`; None: for docs."""
    if text and not text.is_file():  # a prepared folder has its own
        return config
    return replace(config, vocab_size=usual_vocabulary(text.stat().st_size if text else None))


# The classes of arguments, by their names.
KINDS = {"config": ModelConfig, "settings": Settings, "tokenizer": Tokenizer, "lora": Lora}


def _check(resume: object, **given: object) -> None:
    """UserError unless `resume` is a bool, and each of `given` is None or what KINDS says."""
    if not isinstance(resume, bool):
        raise UserError(f"expected resume to be a bool, got {resume!r:.60}: say True or False")
    for name, value in given.items():
        if value is not None:
            check_kind(name, value, KINDS[name])


def _fitting(
    config: ModelConfig, settings: Settings, execution: Execution, lora: Lora | None = None
) -> Settings:
    """Settings whose training step fits into this machine; on a GPU perhaps in more parts.

    If none can, a UserError says what is too large."""
    check_batch(config, settings)
    what = f"a step of {settings.batch_size} x {config.context} tokens"
    less = ("choose a smaller batch_size, a larger accumulate, fewer threads, or a model of a "
            "shorter context (nanoeuler import --context)")  # fmt: skip
    shape = settings.batch_size, settings.accumulate, execution.threads
    if execution.engine in GPU_ENGINES:
        if lora:
            expect_adapter_engine(execution.engine)
        from nanoeuler.planning import gpu_memory  # and with it all of the GPU's modules

        need(gpu_memory.host_bytes(config, lora),
             f"a model of {count_parameters(config):,} parameters, trained on a GPU,",
             "choose fewer layers or a smaller width")  # fmt: skip
        given = config, *shape[:2], execution.engine, lora, settings.recompute
        parts, again = gpu_memory.fitting(*given)
        return replace(settings, accumulate=parts, recompute=again)
    if settings.recompute:
        raise UserError(f"the engine {execution.engine} keeps what a step computes: leave out "
                        "recompute (--recompute), or choose the engine cuda")  # fmt: skip
    if lora:
        need(sum(lora_memory(config, lora, *shape).values()), what, less)
        return settings
    need(sum(cpu_memory(config, 1, threads=1).values()),
         f"a model of {count_parameters(config):,} parameters in {config.n_layers:,} layers, with "
         f"a step of a single sequence of {config.context:,} tokens,",
         "choose fewer layers, a smaller width or a shorter context")  # fmt: skip
    need(sum(cpu_memory(config, *shape).values()), what, less)
    return settings


def _fitting_tuning(
    config: ModelConfig, settings: Settings | None, *how: Any
) -> Settings | None:
    """`_fitting` for fine-tuning, where settings may be None: returned as they are, if they fit."""
    asked = FINETUNING if settings is None else settings
    fitting = _fitting(config, asked, *how)
    return settings if fitting == asked else fitting


def _model(run: Run) -> Model:
    """The model of a run at its last step; KeyboardInterrupt if a signal cut the run short."""
    if run.settings.steps is None or run.step < run.settings.steps:
        raise KeyboardInterrupt
    return Model(run.config, run.tokenizer, merged(run.weights))


def _shows(options: Options) -> Options:
    """`options` with a `sample` that takes a model's parts, as `loop.fit` calls it."""
    if (sample := options.get("sample")) is None:
        return options

    def show(*parts: Any) -> str:
        text = sample(Model(*parts))
        if not isinstance(text, str):
            raise UserError(
                f"expected sample to return a str, got {text!r:.60}: fix it; if something has "
                "been saved, the run can be resumed"
            )
        return text

    return {**options, "sample": show}


def train(data: Path | str | None = None, *, out: Path | str, config: ModelConfig | None = None,
          settings: Settings | None = None, tokenizer: Tokenizer | None = None,
          resume: bool = False, **options: Unpack[Options]) -> Model:  # fmt: skip
    """Train a model on a text; the folder `out` holds the run afterwards.

    data: a text file, the folder of a prepared text, or "docs", the embedded corpus; None is docs
    or, with `resume`, the run's own text. config, settings and tokenizer None: those of the run,
    with `resume`; else PRESETS["small-modern"] (of 512 tokens, if the text is under a megabyte)
    with RECIPES["small-modern"] of training.train, and a tokenizer learned from the text. If only
    one of config and settings is given, settings are Settings(), or what you gave. options: engine,
    threads (None: one for each core), save_every (steps, None: by the clock), keep (saves to keep),
    on_step and on_estimate (see `loop.fit`); `sample(model)` returns a text to show along the way.
    UserError for a wrong argument, and if disk or memory is too small; KeyboardInterrupt if a
    signal ended the run, once it is saved.

    >>> import nanoeuler as ne
    >>> settings = ne.Settings(steps=3, batch_size=4)
    >>> model = ne.train(story, out=folder / "mine", settings=settings)
    >>> again = ne.train(out=folder / "mine", resume=True)  # nothing is left to do
    >>> bool((again.weights["output"] == model.weights["output"]).all())
    True
    """
    out = path_of("out", out)
    _check(resume, config=config, settings=settings, tokenizer=tokenizer)
    execution = Execution(**options)
    text = None if resume and data is None else text_of("docs" if data is None else data)
    if not resume:
        usual, settings = training.of_a_new_run(config, settings)
        config = for_text(usual, text) if config is None else config
        settings = _fitting(config, settings, execution)
    if tokenizer and text and text.is_dir() and tokenizer.hash != Prepared(text).tokenizer.hash:
        raise UserError(
            f"{text} was prepared with another tokenizer: leave out the tokenizer, or prepare the "
            "text again with it (nanoeuler data prepare --tokenizer)"
        )
    return _model(training.train(text, out, config=config, settings=settings, tokenizer=tokenizer,
                                 resume=resume, **_shows(options)))  # fmt: skip


def finetune(model: Model | Path | str | None, pairs: Iterable[Pair | Conversation] | Path | str, *,
             out: Path | str, settings: Settings | None = None, resume: bool = False,
             lora: Lora | int | None = None, **options: Unpack[Options]) -> Model:  # fmt: skip
    """Fine-tune a model on questions and answers, into the folder `out`; `model` is not changed.

    model: a `Model`, or the folder of a run. pairs: (question, answer) of each or a `Conversation`,
    "docs", a file of them (`data.conversations.read_pairs`), or the folder of a prepared source.
    settings None: FINETUNING or, with `resume`, the run's; a learning rate that they leave open is
    that of FINETUNING. With `resume` the run in `out` goes on with its own weights: `model` may be
    None, and one that is not must have the run's architecture and tokenizer. With `lora`, a `Lora`
    or a rank, only low-rank adapters are trained, and model is the folder of a run, which has to
    stay where it is. The other arguments are those of `train`.

    >>> import nanoeuler as ne
    >>> pairs = [(f"What is {i}?", f"The number {i}.") for i in range(20)]
    >>> settings = ne.Settings(steps=3, batch_size=4)
    >>> chatty = ne.finetune(model, pairs, out=folder / "chatty", settings=settings)
    >>> answer = "".join(chatty.chat().reply("What is 7?"))
    """
    out, execution = path_of("out", out), Execution(**options)
    if isinstance(lora, int):
        lora = Lora(lora)
    _check(resume, settings=settings, lora=lora)
    pairs = pairs_of(pairs) if isinstance(pairs, str | Path) else pairs
    base, begun = _base(model, resume), resume and checkpoints(out)
    if lora and isinstance(base, Path) and not begun:
        config = read_record(base).config
        settings = _fitting_tuning(config, settings, execution, lora.settled(config))
    elif isinstance(base, Path) and not begun:
        base = _parts(load(base))
    if isinstance(base, tuple) and not begun:
        settings = _fitting_tuning(base[0], settings, execution)
    return _model(sft.finetune(base, pairs, out, settings=settings, resume=resume, lora=lora,
                               **_shows(options)))  # fmt: skip


def _parts(model: Model) -> tuple[ModelConfig, Tokenizer, Weights]:
    """The parts of a model."""
    return model.config, model.tokenizer, model.weights


def _base(model: Model | Path | str | None, resume: bool) -> sft.Base | None:
    """`model` as `sft.finetune` takes it: None only with `resume`."""
    if isinstance(model, Model):
        return _parts(model)
    return None if resume and model is None else path_of("model, if it is no Model,", model)


def load(
    run: Path | str, *, context: int | None = None, adapter: Path | str | None = None
) -> Model:
    """The model of a run at its newest save (RUN/best: at its best); UserError if it has none.

    run may also be somebody else's model: a folder as on the Hub, a .gguf file, llama2.c's .bin, or
    "hf:OWNER/NAME"; context: use only so many of its positions. adapter: a folder with PEFT's LoRA
    adapters, to be merged into the model.

    >>> import nanoeuler as ne
    >>> model = ne.load(folder / "base")
    >>> model.generate("The river", tokens=20, seed=3) != ""
    True
    """
    if str(run).startswith(HUB) or is_source(path_of("run", run)):
        model = Model(*read_source(run, context)[:3])
    elif context is None:
        model = Model(*load_model(Path(run)))
    else:
        raise UserError("a context can be chosen only for somebody else's model: import it again")
    if adapter is not None:
        model = Model(model.config, model.tokenizer, with_adapter(model.weights, adapter))
    config = model.config
    cache = 2 * config.n_layers * stages(config) * config.n_kv_heads * config.head_dim
    need(4 * cache * config.context, f"the cache of the model in {run} for {config.context} tokens",
         "use a smaller model, or a larger machine")  # fmt: skip
    return model
