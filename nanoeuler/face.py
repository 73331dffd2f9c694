# Made from book/12-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-face
"""The functions behind `import nanoeuler as ne`: train, finetune and load; each returns a `Model`.

Leaves out how a step is taken and what a run leaves on the disk: the room `training`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanoeuler.data import docstrings
from nanoeuler.data.prepared import Prepared
from nanoeuler.errors import UserError
from nanoeuler.inference.model import Model
from nanoeuler.model.config import PRESETS, ModelConfig
from nanoeuler.planning.counts import stages
from nanoeuler.planning.memory import need
from nanoeuler.planning.plan import cpu_memory
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import sft
from nanoeuler.training import train as training
from nanoeuler.training.loop import SAVE_EVERY
from nanoeuler.training.run import Run, Settings, check_batch
from nanoeuler.training.saves import KEEP, load_model
from nanoeuler.training.sft import FINETUNING, Pair, read_pairs

# The model of a new run for which no other was asked.
PRESET = "small"
Sample = Callable[[Model], str]  # a text that shows what a model can do by now


def resized(config: ModelConfig, **sizes: int) -> ModelConfig:
    """`config` with other sizes: `dim=64, n_layers=2`.

    `hidden`, if it is not given, follows `dim` by the rule of the presets: four times as much for
    gelu; 8/3 times as much for swiglu, rounded up to a multiple of 8.

    >>> resized(PRESETS["small"], dim=64, n_layers=2).hidden
    176
    """
    dim, changes = sizes.get("dim", config.dim), dict[str, Any](sizes)
    if dim != config.dim:
        changes.setdefault("hidden", 4 * dim if config.mlp == "gelu" else -(-dim // 3) * 8)
    return dataclasses.replace(config, **changes)


def plain(path: Path) -> Path:
    """`path`, if it is no compressed file, whose bytes are no text."""
    if path.suffix == ".gz":
        raise UserError(f"expected plain text, but {path} is compressed: gunzip -k {path} first")
    return path


def own_text(out: Path) -> Path:
    """The folder with the tokens of the text that the run in `out` began with."""
    if (out / "data" / "prepared.json").exists():
        return out / "data"
    raise UserError(
        f"expected a run with a text of its own in {out / 'data'}, but there is none: name the "
        "prepared data that it began with (--data), or begin a run instead of resuming one"
    )


def text_of(data: Path | str) -> Path:
    """The file or prepared folder of a text that `data` names: docs, or its path."""
    path = docstrings.text_path() if data == "docs" else plain(Path(data))
    if (path / "pairs.jsonl").exists():
        raise UserError(f"{data} holds pairs, not text: nanoeuler sft learns from them")
    if path.is_file() or (path / "prepared.json").exists():
        return path
    raise UserError(
        f"expected docs, a text file, or a folder that nanoeuler data prepare has made, but {path} "
        "is none: nanoeuler data list says of which texts it can make one"
    )


def pairs_of(data: Path | str) -> list[Pair]:
    """The question-answer pairs that `data` names: docs, a file of pairs, or a prepared folder."""
    if data == "docs":
        return docstrings.pairs()
    path = Path(data)
    if (path / "prepared.json").exists():
        raise UserError(f"{data} holds text, not pairs: nanoeuler train learns from it")
    path = path / "pairs.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"expected docs or a file of pairs, but there is no file {path}: nanoeuler data "
            "prepare makes one of a text whose format is pairs"
        )
    return read_pairs(path)


def _fits(config: ModelConfig, settings: Settings, threads: int | None) -> None:
    """UserError if a training step could not fit into the memory of this machine."""
    check_batch(config, settings)
    size = sum(cpu_memory(config, settings.batch_size, settings.accumulate, threads).values())
    need(size, f"a step of {settings.batch_size} x {config.context} tokens",
         "choose a smaller batch_size or model, or more pieces to accumulate")  # fmt: skip


def _model(run: Run) -> Model:
    """The model of a run at its last step; KeyboardInterrupt if a signal has cut it short."""
    if run.settings.steps is None or run.step < run.settings.steps:
        raise KeyboardInterrupt
    return Model(run.config, run.tokenizer, run.weights)


def _hooks(sample: Sample | None, **hooks: Any) -> dict[str, Any]:
    """`hooks` for `loop.fit`, and a `sample` of a `Model` as one of the parts of a model."""
    return hooks | ({"sample": lambda *parts: sample(Model(*parts))} if sample else {})


def train(data: Path | str | None = None, *, out: Path | str, config: ModelConfig | None = None,
          settings: Settings | None = None, tokenizer: Tokenizer | None = None,
          resume: bool = False, engine: str = "auto", threads: int | None = None,
          save_every: int = SAVE_EVERY, keep: int = KEEP, sample: Sample | None = None,
          before: Callable[..., None] | None = None) -> Model:  # fmt: skip
    """Train a model on a text into the folder `out`, which holds the run afterwards.

    data: a text file, the folder of a prepared text, or "docs", the embedded corpus; None is docs
    or, with `resume`, the run's own text. config, settings and tokenizer None: PRESETS["small"],
    Settings() and one learned from the text or, with `resume`, the run's. threads None: one for
    each core. A save every `save_every` steps, of which `keep` stay; `sample(model)` gives a text
    to be shown along the way; `before` as `loop.fit` has it. UserError for a wrong argument, and
    where disk or memory is too small; KeyboardInterrupt when a signal ended the run, once it is
    saved.

    >>> import nanoeuler as ne
    >>> settings = ne.Settings(steps=3, batch_size=4)
    >>> model = ne.train(story, out=folder / "mine", settings=settings)
    >>> again = ne.train(out=folder / "mine", resume=True)  # nothing is left to do
    >>> bool((again.weights["output"] == model.weights["output"]).all())
    True
    """
    out = Path(out)
    if not resume:
        config, settings = config or PRESETS[PRESET], settings or Settings()
        _fits(config, settings, threads)
    text = own_text(out) if resume and data is None else text_of("docs" if data is None else data)
    if tokenizer and text.is_dir() and tokenizer.hash != Prepared(text).tokenizer.hash:
        raise UserError(
            f"{text} was prepared with another tokenizer: leave out the tokenizer, or prepare the "
            "text again with it (nanoeuler data prepare --tokenizer)"
        )
    how = _hooks(sample, before=before, engine=engine, threads=threads, save_every=save_every,
                 keep=keep)  # fmt: skip
    return _model(training.train(text, out, config=config, settings=settings, tokenizer=tokenizer,
                                 resume=resume, **how))  # fmt: skip


def finetune(model: Model | Path | str, pairs: Sequence[Pair] | Path | str, *, out: Path | str,
             settings: Settings | None = None, resume: bool = False, engine: str = "auto",
             threads: int | None = None, save_every: int = SAVE_EVERY, keep: int = KEEP,
             sample: Sample | None = None,
             before: Callable[..., None] | None = None) -> Model:  # fmt: skip
    """Teach a model to answer, into the folder `out`; the model itself stays as it is.

    model: a `Model`, or the folder of a run. pairs: [(question, answer)], "docs", a file with a
    line {"question": TEXT, "answer": TEXT} for each, or the folder of a prepared source of pairs.
    settings None: FINETUNING or, with `resume`, the run's. The rest is as `train` has it.

    >>> import nanoeuler as ne
    >>> pairs = [(f"What is {i}?", f"The number {i}.") for i in range(20)]
    >>> settings = ne.Settings(steps=3, batch_size=4)
    >>> chatty = ne.finetune(model, pairs, out=folder / "chatty", settings=settings)
    >>> answer = "".join(chatty.chat().reply("What is 7?"))
    """
    if not resume:
        model = load(model) if isinstance(model, str | Path) else model
        settings = settings or FINETUNING
        _fits(model.config, settings, threads)
    parts = (model.config, model.tokenizer, model.weights) if isinstance(model, Model) else model
    how = _hooks(sample, before=before, engine=engine, threads=threads, save_every=save_every,
                 keep=keep)  # fmt: skip
    pairs = pairs_of(pairs) if isinstance(pairs, str | Path) else pairs
    return _model(sft.finetune(parts, pairs, out, settings=settings, resume=resume, **how))


def load(run: Path | str) -> Model:
    """The model of a run, at its newest save. UserError if there is none, or a damaged one.

    >>> import nanoeuler as ne
    >>> model = ne.load(folder / "base")
    >>> model.generate("The river", tokens=20, seed=3) != ""
    True
    """
    model = Model(*load_model(run))
    config = model.config
    cache = 2 * config.n_layers * stages(config) * config.n_kv_heads * config.head_dim
    need(4 * cache * config.context, f"the cache of the model in {run} for {config.context} tokens",
         "use a smaller model, or a larger machine")  # fmt: skip
    return model
