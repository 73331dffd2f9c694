# Made from book/19d-lora.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-lora-train
"""Training adapters: their optimizer, and the saved model that they belong to.

Leaves out what an adapter is (model/lora.py), and runs, which are as all others are (run.py,
checkpoint.py).
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from nanoeuler.engines.cpu.memory import aligned
from nanoeuler.engines.interface import Array
from nanoeuler.errors import UserError, quoted
from nanoeuler.files import sha256_of
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.lora import AdaptedWeights, Adapters, Lora, adapter_shapes
from nanoeuler.model.weights import Weights
from nanoeuler.training.folder import checkpoints, reading
from nanoeuler.training.optim import AdamW

MODEL = "model.safetensors"  # of a save: see checkpoint.py


def add_product(a: Array, b: Array, out: Array) -> None:
    """out += a b in float32, by chapter 10's product: the same bits for any number of threads."""
    from nanoeuler.engines.cpu.gemm import WORK, multiply  # a compiler, where adapters are used

    multiply(a, b, out, True, aligned(WORK))


class LoraAdamW(AdamW):
    """AdamW on the adapters of `AdaptedWeights`, which it merges anew after each step."""

    def update(
        self, weights: Weights, gradients: Weights, lr: float, number: int,
        part: slice = slice(None),
    ) -> None:  # fmt: skip
        """Change A and B in step `number` (from 1) at rate lr, then merge them into the weights.

        weights: `AdaptedWeights`; gradients: float32 of the adapters' shapes; part: of their flat
        buffers alone, where other ranks change the rest.
        """
        assert isinstance(weights, AdaptedWeights)
        super().update(weights.adapters, gradients, lr, number, part)
        weights.merge()


class Adaptation(NamedTuple):
    """What config.json says of a run's adapters: what they are, and what they belong to."""

    lora: Lora                  # settled
    base: str                   # the sha256 of that model's file of weights
    places: tuple[str, ...]     # where its run was: as a path of its own, and from the run's folder

    @property
    def facts(self) -> dict[str, Any]:
        """It, for config.json."""
        values = dataclasses.asdict(self.lora) | {"targets": [*(self.lora.targets or ())]}
        return {"lora": {**values, "base": self.base}, "base": [*self.places]}

    def shapes(self, config: ModelConfig) -> dict[str, tuple[int, int]]:
        """The shapes of what a save holds, by name."""
        return adapter_shapes(config, self.lora)

    def adapters(self, config: ModelConfig) -> Adapters:
        """Adapters of these shapes, all zero."""
        return Adapters(config, self.lora)

    def weights(self, out: Path, config: ModelConfig) -> "TrainedAdapters":
        """The model that the run in `out` adapts; its adapters are still zero."""
        return TrainedAdapters(base_weights(self, out, config), self)


class TrainedAdapters(AdaptedWeights):
    """Adapters that a run trains: with their optimizer, and what config.json says of them."""

    optimizer = LoraAdamW

    def __init__(self, weights: Weights, known: Adaptation) -> None:
        super().__init__(weights, known.lora, add_product)
        self.facts = known.facts


def adaptation_of(record: dict[str, Any], config: ModelConfig) -> Adaptation:
    """The `Adaptation` in a config.json. ValueError for a damaged one."""
    try:
        values, places = dict(record["lora"]), record["base"]
        base, targets = values.pop("base"), values.pop("targets")
        lora = Lora(**values, targets=tuple(targets))
        good = lora.settled(config) == lora and type(lora.alpha) is float
    except (KeyError, TypeError, UserError) as error:
        raise ValueError(f"its lora is none: {error}") from None
    texts = [base, *places] if type(places) is list and places else [None]
    if not good or not all(type(each) is str and each.isprintable() for each in texts):
        raise ValueError("its lora is none that a run writes")
    return Adaptation(lora, base, tuple(places))


def adaptation(base: Path, out: Path, lora: Lora) -> Adaptation:
    """How a run in `out` refers to the newest save of the run in `base`, which has been read."""
    _, folder = checkpoints(base)[-1]
    state = json.loads((folder / "state.json").read_bytes())
    where = os.path.realpath(base)
    try:
        beside = os.path.relpath(where, os.path.realpath(out))
    except ValueError:  # on another drive of Windows
        beside = where
    return Adaptation(lora, state["sha256"][MODEL], (where, beside))


def _stated(folder):
    """The sha256 that a save states of its model; None if it states none."""
    try:
        return json.loads((folder / "state.json").read_bytes())["sha256"][MODEL]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def find_base(known: Adaptation, out: Path) -> Path:
    """The file of weights that the adapters of the run in `out` belong to. UserError without it.

    It is sought where it was, and where it is if both runs have moved together.
    """
    first, *beside = known.places
    places = [Path(first), *(above / each for each in beside for above in (out, out.parent))]
    with reading(out):
        saves = [folder for place in places for _, folder in checkpoints(place)]
        for folder in saves:
            if _stated(folder) == known.base and sha256_of(folder / MODEL) == known.base:
                return folder / MODEL
    what = "another model is there now" if saves else "it is not there"
    raise UserError(f"{out} holds LoRA adapters alone, which belong to the model {known.base[:12]} "
                    f"in {first}, but {what}: put that run back")  # fmt: skip


def base_weights(known: Adaptation, out: Path, config: ModelConfig) -> Weights:
    """The weights of the model that the run in `out` adapts."""
    path, weights = find_base(known, out), Weights(config)
    try:
        with reading(path), safe_open(path, framework="numpy") as file:
            for name, tensor in weights.items():
                read = file.get_tensor(name)
                if read.dtype != np.float32 or read.shape != tensor.shape:
                    raise UserError(f"{path}: expected {name} to be float32 {[*tensor.shape]}, "
                                    f"found {read.dtype} {[*read.shape]}: these adapters are of "
                                    "another model")  # fmt: skip
                tensor[...] = read
    except SafetensorError as error:
        raise UserError(f"{path} is not the model that the adapters in {out} belong to "
                        f"({quoted(error)}): put that run back") from None  # fmt: skip
    return weights


# Ten times the rate of all weights, `sft.LEARNING_RATE`, and as that by the width: Schulman and
# Thinking Machines Lab (2025) found that factor for models of all sizes.
LORA_RATE = 1e-2


def adapt(
    base: Any, weights: Weights, out: str | Path, lora: Lora, seed: int
) -> TrainedAdapters:  # fmt: skip
    """Fresh adapters for `weights`, the newest model of the run in `base`, for a run in `out`.

    UserError if `base` is no folder of a run, or one that has nothing but adapters itself.
    """
    if not isinstance(base, Path | str):
        raise UserError("expected the folder of a run to adapt, to which the adapters will belong: "
                        "import or save the model first, and name its folder")  # fmt: skip
    if json.loads((Path(base) / "config.json").read_bytes()).get("lora"):
        raise UserError(f"expected a whole model in {base}, but it holds adapters itself: export "
                        "it (--to hf), import that, and adapt the result")  # fmt: skip
    known = adaptation(Path(base), Path(out), lora.settled(weights.config))
    adapted = TrainedAdapters(weights, known)
    adapted.begin(seed)
    return adapted
