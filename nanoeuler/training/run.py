# Made from book/e-a-run-that-survives.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-cursor
"""A training run between two steps: its settings, and everything that the next step depends on.

Leaves out how it gets to the disk and back (checkpoint.py) and how it takes its steps (loop.py).
"""

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from rich.filesize import decimal

from nanoeuler import __version__
from nanoeuler.data.batches import check_batch_size
from nanoeuler.errors import UserError, quoted
from nanoeuler.model.config import ModelConfig, count_parameters, telling
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import optim
from nanoeuler.training.muon import MOMENTUM, Muon

# The largest numbers of 64 bits: Python reads larger ones from JSON, but NumPy does not take them.
LARGEST = {int: 2**63 - 1, float: sys.float_info.max}
YEAR = 365 * 24 * 60  # minutes; a longer run is a typo
MAY_BE_ZERO = ("seed", "warmup", "weight_decay")
OPTIMIZERS = {"adamw": optim.AdamW, "muon": Muon}  # by their names in `Settings.optimizer`


@dataclass(frozen=True)
class Settings:
    """The hyperparameters of a run, besides the model and the data. UserError for bad values."""

    steps: int | None = None  # None: as many as fit into `minutes`
    minutes: float = 5.0  # of training, with its validations: short enough to wait for
    batch_size: int = 16
    accumulate: int = 1  # gradient accumulation: pieces of each shard of a batch
    lr: float | None = None  # None: `optim.rate_for` the width, or that of fine-tuning
    seed: int = 0
    warmup: int = optim.WARMUP_STEPS
    weight_decay: float = optim.WEIGHT_DECAY
    beta2: float = optim.BETA2
    clip: float = optim.CLIP_NORM
    optimizer: str = "adamw"  # a name of OPTIMIZERS
    momentum: float = MOMENTUM  # of Muon; the others have none
    recompute: bool = False  # on a GPU: keep a block's input alone, and run it again to go back

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.type is bool and type(value) is not bool:
                raise UserError(f"training: expected {each.name} to be True or False, got "
                                f"{quoted(repr(value))}")  # fmt: skip
            number = each.type not in (str, bool)
            if number and (value is not None or each.default is not None):
                _check(each.name, value, float if each.type in (float, float | None) else int)
        if self.minutes > YEAR:
            raise UserError(f"training: expected minutes to be at most {YEAR:,}, which is a year, "
                            f"got {self.minutes:g}")  # fmt: skip
        if type(self.optimizer) is not str or self.optimizer not in OPTIMIZERS:
            raise UserError(f"training: expected the optimizer {' or '.join(OPTIMIZERS)}, got "
                            f"{quoted(repr(self.optimizer))}")  # fmt: skip
        for name in ("beta2", "momentum"):
            if (value := getattr(self, name)) >= 1:
                raise UserError(f"training: expected {name} to be below 1, got {value}")
        if self.accumulate > self.batch_size:
            raise UserError(f"training: expected accumulate to be at most batch_size "
                            f"{self.batch_size}, got {self.accumulate}: choose fewer pieces, since "
                            "each has at least one sequence")  # fmt: skip

    def with_rate(self, lr: float) -> "Settings":
        """These settings, with the learning rate `lr` if they have none."""
        return dataclasses.replace(self, lr=lr) if self.lr is None else self


# %% sec-train-cursor
def _check(name, value, kind):
    """UserError unless the setting `name` may have this value; kind is int or float."""
    good = type(value) in (int, kind) and 0 <= value <= LARGEST[kind]
    if good and (value > 0 or name in MAY_BE_ZERO):
        return
    wanted = "a whole number" if kind is int else "a number"
    wanted += " of at least 0" if name in MAY_BE_ZERO else " above 0"
    if type(value) in (int, float) and value > LARGEST[kind]:
        wanted += f" and at most {LARGEST[kind]}"
    if type(value) is int and value.bit_length() > 100:  # Python refuses to print very long ones
        value = math.inf if value > 0 else -math.inf
    raise UserError(f"training: expected {name} to be {wanted}, got {quoted(repr(value))}")


def program() -> dict[str, str]:
    """The software and hardware that decide the last bits of a step: {what: version or name}."""
    return {
        "nanoeuler": __version__, "numpy": np.__version__, "numba": numba.__version__,
        "processor": llvmlite.binding.get_host_cpu_name(),
    }  # fmt: skip


def check_sizes(config: ModelConfig, tokenizer: Tokenizer) -> None:
    """UserError unless the model has a row for each id of the tokenizer.

    Imported models may have more: Qwen3 has 151,936 rows for 151,669 ids, to fill its matrices up.
    """
    if config.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"expected a tokenizer of at most {config.vocab_size} ids, as many as the model has, "
            f"but it has {tokenizer.vocab_size}: use the tokenizer that belongs to the model"
        )


def check_batch(config: ModelConfig, settings: Settings) -> None:
    """UserError for a step of too many tokens."""
    check_batch_size(settings.batch_size, config.context)


@contextmanager
def making_room(config: ModelConfig) -> Iterator[None]:
    """Turn a MemoryError while memory is allocated for the model into a UserError."""
    try:
        yield
    except MemoryError:
        parameters = count_parameters(config)
        raise UserError(
            f"a model of {parameters:,} parameters, {decimal(4 * parameters)} for each of its "
            "weights, gradients and two moments, does not fit into this machine's memory: choose "
            "fewer layers or a smaller dim"
        ) from None


@dataclass
class Run:
    """A training run between two steps: everything that the next step depends on."""

    config: ModelConfig
    settings: Settings
    tokenizer: Tokenizer
    data: str  # the digest of the training text
    weights: Weights
    optimizer: optim.AdamW
    step: int  # steps done
    program: dict[str, str] = field(default_factory=program)  # `fit` adds the engine

    @classmethod
    def begin(
        cls, config: ModelConfig, settings: Settings, tokenizer: Tokenizer, data: str,
        weights: Weights | None = None,
    ) -> "Run":  # fmt: skip
        """A run before its first step. None: initial weights from the seed, the default rate."""
        check_sizes(config, tokenizer)
        check_batch(config, settings)
        kind = OPTIMIZERS[settings.optimizer]
        settings = settings.with_rate(optim.rate_for(config.dim, kind.peak))
        with making_room(config):
            weights = weights or initialise(config, settings.seed)
            if hasattr(weights, "optimizer"):  # adapters have one of their own
                if kind is not optim.AdamW:
                    raise UserError("LoRA adapters are trained with AdamW: leave out the optimizer "
                                    f"{settings.optimizer}")  # fmt: skip
                kind = weights.optimizer
            optimizer = kind(weights, beta2=settings.beta2, weight_decay=settings.weight_decay,
                             clip_norm=settings.clip)  # fmt: skip
            if kind is Muon:
                optimizer.momentum = settings.momentum
        return cls(config, settings, tokenizer, data, weights, optimizer, 0)

    @property
    def moments(self) -> dict[str, np.ndarray]:
        """The optimizer's arrays under their names in its file: m.NAME and v.NAME."""
        kinds = (("m", self.optimizer.m), ("v", self.optimizer.v))
        return {f"{kind}.{name}": each for kind, tensors in kinds for name, each in tensors.items()}

    @property
    def facts(self) -> dict[str, object]:
        """What the run began with, for config.json: FACTS and, if it trains adapters, these."""
        values = dataclasses.asdict(self.config), dataclasses.asdict(self.settings)
        known = dict(zip(FACTS, (*values, self.data, self.tokenizer.hash), strict=True))
        return known | getattr(self.weights, "facts", {})

    @property
    def lora(self) -> Any:
        """The adapters that it trains, a `model.lora.Lora`; None: all weights."""
        return getattr(self.weights, "lora", None)

    @property
    def learned(self) -> Weights:
        """What training changes and a save holds: all weights, or only the adapters."""
        return getattr(self.weights, "adapters", self.weights)


# %% sec-train-cursor
# The entries of config.json in which a resumed run must be the same.
FACTS = ("model", "training", "data", "tokenizer")


def identity(facts: dict) -> str:
    """16 hex digits that are the same for the same FACTS, whatever else the dict holds.

    Without `minutes`, which decide nothing once the number of steps is known, and `recompute`,
    which changes no bit. An imported model has no training.
    """
    training = dict(facts["training"] or {})
    for name in ("minutes", "recompute"):
        training.pop(name, None)
    for name in ("optimizer", "momentum"):
        if training.get(name) == getattr(Settings, name):
            del training[name]  # older runs had no such setting
    known = {name: facts[name] for name in FACTS}
    known |= {"model": telling(facts["model"]), "training": training}
    known |= {"lora": facts["lora"]} if facts.get("lora") else {}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
