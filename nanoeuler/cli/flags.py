# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli-flags
"""What each flag of the command line means, written once: the type of a command's parameter.

Also looks up what a flag's value names, such as a preset. Imports inside functions, as main.py
does.
"""

import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from nanoeuler.errors import UserError

if TYPE_CHECKING:
    from nanoeuler.model.config import ModelConfig
    from nanoeuler.model.lora import Lora
    from nanoeuler.tokenizer.tokenizer import Tokenizer as LoadedTokenizer


MOST = 2**63 - 1  # the largest number that may be typed: what 64 bits hold
SHOWN = 40  # characters of a wrong value that an error repeats


def _refuse(wanted, text) -> NoReturn:
    shown = text if len(text) <= SHOWN else text[:SHOWN] + "..."
    raise typer.BadParameter(f"expected {wanted}, got {shown!r}")


def whole_number(least: int = 0, most: int = MOST) -> Callable[[str | int], int]:
    """A parser of ASCII digits, for a flag that is a whole number from `least` to `most`."""

    def parse(value):
        text = str(value)  # a default is a number already
        digits = re.fullmatch("([+-]?)[0-9]+", text)
        if digits and len(text) <= SHOWN and least <= int(text) <= most:
            return int(text)
        large = digits and digits[1] != "-" and (len(text) > SHOWN or int(text) > most)
        bounds = f"from {least} to {most}" if large or most < MOST else f"of at least {least}"
        _refuse(f"a whole number {bounds}", text)

    return parse


def number(value: str | float) -> float:
    """A parser of a finite decimal number in ASCII; its user checks the range."""
    text = str(value)
    digits = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", text, re.IGNORECASE)
    if not digits or len(text) > SHOWN or not math.isfinite(float(text)):
        _refuse("a finite number, such as 0.5 or 3e-4", text)
    return float(text)


def whole(meaning: str, least: int = 1, most: int = MOST) -> Any:
    """The type of a flag for a whole number; left out, it is None."""
    option = typer.Option(parser=whole_number(least, most), metavar="N", help=meaning)
    return Annotated[int | None, option]


def _number(meaning):
    """The type of a flag for a number; left out, it is None."""
    return Annotated[float | None, typer.Option(parser=number, metavar="X", help=meaning)]


# The text, or the pairs, to learn from; docs is the embedded corpus.
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="NAME|FILE|DIR",
                 help="docs (the embedded corpus), a file, or prepared data"),  # fmt: skip
]


def _folder(flag, metavar="RUN_DIR"):
    """The option of a flag that names a folder."""
    meaning = "folder to read from" if flag == "--from" else "where to write"
    return typer.Option(flag, metavar=metavar, file_okay=False, help=meaning)


From = Annotated[Path, _folder("--from")]  # runs are directories, as checkpoint.py describes them
FromRun = Annotated[Path | None, _folder("--from")]  # None: a resumed run needs none
FromDir = Annotated[Path | None, _folder("--from", "DIR")]  # a folder of files
Out = Annotated[Path, _folder("--out")]  # a new run, or with --resume an existing one
OutFile = Annotated[Path, typer.Option("--out", metavar="FILE", help="where to write")]
OutDir = Annotated[Path | None, _folder("--out", "DIR")]  # None: as the command says
# As load_tokenizer reads it: a folder stands for the tokenizer in it.
Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FILE|RUN_DIR", help="a tokenizer.json, or a run with one"),
]


# A name that engines.registry knows.
Engine = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="auto, cuda, cuda-tf32, cuda-float32, cpu, fused or reference"
    ),
]
# A name of config.PRESETS.
Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="small, small-modern, euler-10m, euler-116m or gpt2-124m"),
]
# Without it, a directory that holds a run is refused.
Resume = Annotated[bool, typer.Option("--resume", help="continue the run in --out")]
# As Tokenizer.train counts it, which also says how few it can be.
VocabSize = whole("vocabulary size: bytes, merges and special tokens", least=0)
# More than one: `mpiexec` starts so many processes (chapter 14).
Ranks = whole("processes that train together (data parallelism)")
# A step has at most 64 shards for them (chapter 10).
Threads = whole("cores to use; the result doesn't depend on it", most=1024)
BatchSize = whole("sequences per step")  # each as long as the context
Tokens = whole("number of tokens")  # to generate, or to plan for

# Where the commands write without flags: what train writes sft reads, and so on.
BASE, CHAT = Path("runs/base"), Path("runs/chat")


# A name of training.run.OPTIMIZERS.
Optimizer = Annotated[str | None, typer.Option(metavar="NAME", help="adamw or muon")]
# Activation recomputation; of a GPU (chapter 13a).
Recompute = Annotated[
    bool | None, typer.Option("--recompute", help="keep less: run each block twice, on a GPU")
]


# The fields of Settings: left out, a new run has its defaults, a resumed one its own.
SETTINGS = {
    "steps": whole("training steps in total"),
    "minutes": _number("minutes to train, instead of a number of steps"),
    "batch_size": BatchSize,
    "accumulate": whole("gradient accumulation: split each batch into N parts"),
    "lr": _number("peak learning rate"),
    "seed": whole("random seed", least=0),
    "warmup": whole("warm-up steps, in which the learning rate rises", least=0),
    "weight_decay": _number("decoupled weight decay (AdamW)"),
    "beta2": _number("beta2 of Adam, below 1"),
    "clip": _number("clip gradients to this global norm"),
    "optimizer": Optimizer,
    "momentum": _number("momentum of Muon, below 1"),
    "recompute": Recompute,
}
# How a run is executed: parameters of api.train and api.finetune.
EXECUTION = {
    "threads": Threads,
    "save_every": whole("steps between checkpoints"),  # a crash costs at most so many
    "keep": whole("checkpoints to keep"),  # the oldest ones go
}
# Adapters instead of all weights: fields of model.lora.Lora.
LORA = {
    "lora": whole("train LoRA adapters of this rank, and nothing else"),
    "lora_alpha": _number("LoRA alpha: adapters are scaled by alpha / rank"),
    "lora_targets": Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="matrices to adapt, out of q,k,v,o,gate,up,down"),
    ],
}
# More flags of a run that learns from comparisons: parameters of dpo.prefer.
DPO = {
    "beta": _number("DPO beta: strength of the KL penalty"),
    "anchor": _number("weight of the usual loss on the better answers"),
}


# The sizes of a model, and switches of its block: fields of ModelConfig by the names of flags.
SIZES = {
    "dim": whole("width of the model"),
    "layers": whole("number of layers"),
    "heads": whole("attention heads"),
    "kv_heads": whole("key/value heads"),
    "hidden": whole("hidden width of the MLP"),
    "context": whole("context length, in tokens"),
    "sliding_window": whole("attend to the last N tokens only; 0: to all", least=0),
    "vocab_size": VocabSize,
    "predict": whole("next tokens that each position predicts"),
    "mlp": Annotated[
        str | None, typer.Option(metavar="NAME", help="swiglu, gelu, gelu_exact or relu2")
    ],
    "qk_norm": Annotated[
        bool | None, typer.Option("--qk-norm/--no-qk-norm", help="normalize queries and keys")
    ],
    "logit_cap": _number("soft-cap the logits at this value; 0: no cap"),
    "init": Annotated[
        str | None,
        typer.Option(metavar="NAME", help="scaled or zero: initial output matrices of each layer"),
    ],
}
# The flags whose names are not those of the fields of `ModelConfig`.
FIELDS = {"layers": "n_layers", "heads": "n_heads", "kv_heads": "n_kv_heads",
          "predict": "n_predict"}  # fmt: skip


# The options of sampling.Sampler, which also checks them.
SAMPLING = {
    "seed": SETTINGS["seed"],
    "temperature": _number("sampling temperature; 0: always the likeliest token"),
    "top_k": whole("sample from the N likeliest tokens; 0: from all", least=0),
    "top_p": _number("nucleus sampling: from the likeliest tokens that together reach X"),
    "min_p": _number("only from tokens at least X times as likely as the likeliest"),
    "repetition_penalty": _number("above 1: tokens already in the text become less likely"),
}
# Which backend runs the model: parameters of Model.stream and Model.chat, which also check them.
InferenceEngine = Annotated[
    str | None, typer.Option("--engine", metavar="NAME",
                             help="auto, cuda, cuda-tf32, cuda-float32, cpu, fused or reference")
]  # fmt: skip
BACKEND = {
    "engine": InferenceEngine,
    "quantize": Annotated[
        str | None,
        typer.Option("--quantize", metavar="NAME",
                     help="none, int8 or int4: smaller weights, slightly less accurate"),
    ],  # fmt: skip
}
# How a text is generated: parameters of Model.stream, which also checks them.
GENERATION = {
    "stop": Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="stop before this text (repeatable)"),
    ],
    "stop_tokens": Annotated[
        list[str] | None,
        typer.Option("--stop-token", metavar="NAME|ID", help="stop at this token (repeatable)"),
    ],
    "guesses": whole("speculative decoding: tokens to guess per pass", least=0),
    **BACKEND,
}


def lora_of(adapters: dict[str, Any]) -> "Lora | None":
    """The adapters that the flags LORA describe; None without such flags."""
    from nanoeuler.model.lora import Lora

    if "lora" not in adapters:
        if adapters:
            raise UserError(f"--{next(iter(adapters)).replace('_', '-')} is for LoRA: give "
                            "the rank of the adapters, too (--lora)")  # fmt: skip
        return None
    targets = adapters.get("lora_targets")
    return Lora(adapters["lora"], adapters.get("lora_alpha"),
                None if targets is None else tuple(targets.split(",")))  # fmt: skip


LONGEST_ID = 18  # digits, which an int64 holds whatever they are; an id has at most seven


def token(word: str) -> int | str:
    """What --stop-token names: an id in ASCII digits, or else the name of a special token."""
    return int(word) if re.fullmatch(f"[0-9]{{1,{LONGEST_ID}}}", word) else word


Group = dict[str, Any]  # the flags of a group that were given, and their values


def grouped(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command the flags of these groups; each is a dict {flag: type}.

    For each group, the command gets a dict of the flags that were given.
    """

    def decorate(command):
        @functools.wraps(command)
        def run(**values):
            typed = {name: value for name, value in values.items() if value is not None}
            given = {name: {flag: typed[flag] for flag in group if flag in typed}
                     for name, group in groups.items()}  # fmt: skip
            return command(**{name: values[name] for name in own if name in values}, **given)

        parameters = inspect.signature(command).parameters
        own = {name: each for name, each in parameters.items() if name not in groups}
        flags = [inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=None,
                                   annotation=kind)
                 for group in groups.values() for flag, kind in group.items()]  # fmt: skip
        run.__signature__ = inspect.Signature([*own.values(), *flags])  # which typer reads
        run.__annotations__ = {each.name: each.annotation for each in (*own.values(), *flags)}
        return run

    return decorate


def not_empty(args: Sequence[str]) -> None:
    """UserError if a flag among the words `args` has an empty value."""
    for word, value in pairwise([*args, None]):
        flag, equals, own = word.partition("=")
        if flag.startswith("--") and flag != "--" and (value == "" if not equals else own == ""):
            raise UserError(
                f"expected a value for {flag}, but it is empty: is a shell variable not set?"
            )


def _writable(out):
    """UserError if nothing can be written where `out` is to be."""
    try:
        out.resolve(strict=False)
        above = next(folder for folder in out.absolute().parents if folder.exists())
    except (OSError, RuntimeError, StopIteration):  # a link that leads to itself; the root
        raise UserError(f"cannot write to --out {out}: choose another path") from None
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UserError(f"--out {out} cannot be written in {above}: name a place elsewhere")


def file_out(out: Path) -> Path:
    """`out`, if a file can be written there that replaces at most a file."""
    _writable(out)
    if out.is_dir():
        raise UserError(f"--out {out} is a directory: name a file, such as {out / 'result'}")
    if os.path.lexists(out) and not out.is_file():
        raise UserError(f"--out {out} is no regular file: name a file, or a path for a new one")
    return out


def folder_out(out: Path) -> Path:
    """`out`, if a folder can be written there, and none of prepared data would be spoiled."""
    _writable(out)
    if os.path.lexists(out) and not out.is_dir():
        raise UserError(f"--out {out} is no folder: name a folder, or a path for a new one")
    if out.is_dir() and not os.access(out, os.W_OK):
        raise UserError(f"--out {out} cannot be written: name a folder elsewhere")
    if is_prepared(out):
        raise UserError(f"{out} holds prepared data: name another folder with --out, or remove it")
    return out


# The files of prepared data that are written last: a folder with one of them is whole.
PREPARED = ("prepared.json", "pairs.jsonl")


def is_prepared(folder: Path) -> bool:
    """Whether `folder` holds what nanoeuler data prepare makes: tokens of a text, or pairs."""
    return any((folder / last).exists() for last in PREPARED)


def load_tokenizer(path: Path) -> "LoadedTokenizer":
    """The tokenizer of `path`: a tokenizer.json, or a folder that holds one."""
    from nanoeuler.tokenizer.tokenizer import Tokenizer

    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise UserError(
            f"expected a tokenizer.json or a run directory, but there is no {path}: name one with "
            "--tokenizer, or make one with nanoeuler tokenizer train"
        )
    return Tokenizer.load(path)


def preset_config(name: str | None) -> "ModelConfig":
    """The preset of that name; the default one for None."""
    from nanoeuler.model.config import PRESET, PRESETS

    name = PRESET if name is None else name
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}: choose {' or '.join(PRESETS)}")
    return PRESETS[name]


def learned_size(vocab_size: int | None, size: int | None) -> int:
    """`vocab_size`; for None, what is usual for a text of `size` bytes, which may be unknown."""
    from nanoeuler.model.sizes import usual_vocabulary

    return usual_vocabulary(size) if vocab_size is None else vocab_size


def config_of(
    preset: str | None, sizes: Group, run: Path | None = None
) -> "ModelConfig | None":
    """The configuration that the flags describe, None if there are none; `run`: one to go on with.

    The sizes change those of the preset or, without a preset, those of the run.
    """
    from nanoeuler.model.sizes import resized

    if run and preset is None:
        if not sizes:
            return None
        from nanoeuler.training.checkpoint import read_origin

        origin = read_origin(run)
        config = origin and origin.config or preset_config(None)
    else:
        config = preset_config(preset)
    return resized(config, **{FIELDS.get(name, name): size for name, size in sizes.items()})
