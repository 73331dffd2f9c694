# Made from book/06d-cpu-training.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-cursor
"""A training run between two steps: its settings, and all that decides what comes next.

Leaves out how it gets to the disk and back (saves.py) and how it takes a step (loop.py).
"""

import dataclasses
import functools
import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import llvmlite.binding
import numba
import numpy as np

from nanoeuler import __version__
from nanoeuler.engines.cpu.stepper import SHARDS
from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import Weights, initialise
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.optim import (
    BETA2,
    CLIP_NORM,
    LEARNING_RATE,
    WARMUP_STEPS,
    WEIGHT_DECAY,
    AdamW,
)

# What 64 bits hold: Python reads larger numbers from JSON, and NumPy takes none of them.
LARGEST = {int: 2**63 - 1, float: sys.float_info.max}


@dataclass(frozen=True)
class Settings:
    """What decides the course of a run besides the model and the data."""

    steps: int = 3000
    batch_size: int = 16
    accumulate: int = 1  # pieces in which each shard of a batch goes through memory
    lr: float = LEARNING_RATE
    seed: int = 0
    warmup: int = WARMUP_STEPS
    weight_decay: float = WEIGHT_DECAY
    beta2: float = BETA2
    clip: float = CLIP_NORM

    def __post_init__(self):
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            zero_is_fine = each.name in ("seed", "warmup", "weight_decay")
            good = type(value) in (int, each.type) and 0 <= value <= LARGEST[each.type]
            if not good or (value == 0 and not zero_is_fine):
                wanted = "a whole number" if each.type is int else "a number"
                wanted += " of at least 0" if zero_is_fine else " above 0"
                if type(value) in (int, float) and value > LARGEST[each.type]:
                    wanted += f" and at most {LARGEST[each.type]}"
                raise UserError(f"training: expected {each.name} to be {wanted}, got {value!r}")
        if self.beta2 >= 1:
            raise UserError(f"training: expected beta2 to be below 1, got {self.beta2}")
        if self.accumulate > 1 and self.batch_size < SHARDS * self.accumulate:
            raise UserError(
                f"training: expected batch_size to be at least {SHARDS * self.accumulate} "
                f"({SHARDS} shards of {self.accumulate} pieces), got {self.batch_size}: "
                "choose a larger batch_size or a smaller accumulate"
            )


@functools.cache
def code_digest():
    """16 hex digits of the sha256 of this package's sources: the same digest, the same code."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def program():
    """What may change the last bits of a step besides the run: {what: its version or name}."""
    return {
        "nanoeuler": __version__, "code": code_digest(), "numpy": np.__version__,
        "numba": numba.__version__, "processor": llvmlite.binding.get_host_cpu_name(),
    }  # fmt: skip


@dataclass
class Run:
    """A training run between two steps: all that decides what comes next."""

    config: ModelConfig
    settings: Settings
    tokenizer: Tokenizer
    data: str  # the digest of the training text
    weights: Weights
    optimizer: AdamW
    step: int  # how many are done
    program: dict = field(default_factory=program)  # that took it this far; `fit` adds the engine

    @classmethod
    def begin(cls, config, settings, tokenizer, data, weights=None):
        """A run before its first step, its weights (None) from the settings' seed."""
        weights = weights or initialise(config, settings.seed)
        beta2, decay = settings.beta2, settings.weight_decay
        optimizer = AdamW(weights, beta2=beta2, weight_decay=decay)
        return cls(config, settings, tokenizer, data, weights, optimizer, 0)

    @property
    def moments(self):
        """The optimizer's arrays under the names that they have in its file: m.NAME and v.NAME."""
        kinds = (("m", self.optimizer.m), ("v", self.optimizer.v))
        return {f"{kind}.{name}": each for kind, tensors in kinds for name, each in tensors.items()}

    @property
    def facts(self):
        """What it began with, for config.json: FACTS."""
        values = dataclasses.asdict(self.config), dataclasses.asdict(self.settings)
        return dict(zip(FACTS, (*values, self.data, self.tokenizer.hash), strict=True))


# Of config.json, besides the program that wrote it: in what a resumed run must be the same.
FACTS = ("model", "training", "data", "tokenizer")


def identity(facts):
    """16 hex digits that are the same for the same FACTS, whatever else the dict holds."""
    text = json.dumps({name: facts[name] for name in FACTS}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
