# Made from book/06d-cpu-training.md by nanoeuler.book: edit the chapter, not this file.


# %% book/06d-cpu-training.md:395
"""The run directory: what training leaves on disk, and how it comes back to the last byte.

    model.safetensors      the weights                      metrics.jsonl   one JSON line a step
    optimizer.safetensors  AdamW's two moments              loss.png        the curve
    config.json            everything else, and the step    tokenizer.json

Leaves out locking: two programs that train in one directory at once are the caller's concern.
"""

import dataclasses
import json
import math
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialised

from nanoeuler import __version__
from nanoeuler.config import ModelConfig, parameter_shapes
from nanoeuler.errors import UserError
from nanoeuler.files import replacing
from nanoeuler.model import Weights, initialise
from nanoeuler.optim import (
    BETA2,
    CLIP_NORM,
    LEARNING_RATE,
    WARMUP_STEPS,
    WEIGHT_DECAY,
    AdamW,
)
from nanoeuler.tokenizer import Tokenizer


@dataclass(frozen=True)
class Settings:
    """What decides the course of a run besides the model and the data."""

    steps: int = 3000
    batch_size: int = 16
    lr: float = LEARNING_RATE
    seed: int = 0
    warmup: int = WARMUP_STEPS
    weight_decay: float = WEIGHT_DECAY
    beta2: float = BETA2
    clip: float = CLIP_NORM

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            zero_is_fine = field.name in ("seed", "warmup", "weight_decay")
            good = type(value) in (int, field.type) and math.isfinite(value)
            if not good or value < 0 or (value == 0 and not zero_is_fine):
                wanted = "a whole number" if field.type is int else "a number"
                wanted += " of at least 0" if zero_is_fine else " above 0"
                raise UserError(f"training: expected {field.name} to be {wanted}, got {value!r}")
        if self.beta2 >= 1:
            raise UserError(f"training: expected beta2 to be below 1, got {self.beta2}")


# %% book/06d-cpu-training.md:462
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

    @classmethod
    def begin(cls, config, settings, tokenizer, data):
        """A run before its first step, its weights from the settings' seed."""
        weights = initialise(config, settings.seed)
        return cls(config, settings, tokenizer, data, weights, _optimizer(weights, settings), 0)


def _optimizer(weights, settings):
    return AdamW(weights, beta2=settings.beta2, weight_decay=settings.weight_decay)


def _moments(optimizer):
    """The optimizer's arrays under the names that they have in its file."""
    kinds = (("m", optimizer.m), ("v", optimizer.v))
    return {f"{kind}.{name}": array for kind, weights in kinds for name, array in weights.items()}


# %% book/06d-cpu-training.md:495
@contextmanager
def _disk(out, what):
    """Turn what a full or unwritable disk raises into a line for the user."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{what} could not be written in {out} ({getattr(error, 'strerror', None) or error}): "
            "the save before it is whole; make room or choose another directory, then resume"
        ) from None


def save(out, run):
    """Write `run` into the directory `out`, so that a crash at any moment leaves one whole save."""
    out = Path(out)
    if not np.isfinite(run.weights.flat).all():
        raise UserError(f"step {run.step}: the weights are not finite, so {out} was left as it was")
    record = {
        "nanoeuler": __version__,
        "step": run.step,
        "model": dataclasses.asdict(run.config),
        "training": dataclasses.asdict(run.settings),
        "data": run.data,
        "tokenizer": run.tokenizer.hash,
    }
    with _disk(out, f"step {run.step}"):
        run.tokenizer.save(out / "tokenizer.json")
        for name, tensors in (("model", run.weights), ("optimizer", _moments(run.optimizer))):
            with replacing(out / f"{name}.next.safetensors") as temporary:
                temporary.write_bytes(serialised(dict(tensors), {"step": str(run.step)}))
        with replacing(out / "config.json") as temporary:  # this rename is the commitment
            temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        for name in ("model", "optimizer"):
            os.replace(out / f"{name}.next.safetensors", out / f"{name}.safetensors")


# %% book/06d-cpu-training.md:537
def _record(out):
    """config.json, checked: (record, config, settings)."""
    path = out / "config.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        config, settings = ModelConfig(**record["model"]), Settings(**record["training"])
        if not (type(record["step"]) is int and 0 <= record["step"] <= settings.steps):
            raise ValueError(f"step {record['step']!r}")
        if not all(type(record[name]) is str for name in ("data", "tokenizer")):
            raise ValueError("data or tokenizer is not a text")
    except FileNotFoundError:
        raise UserError(f"expected a run in {out}, but found no config.json there") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, UserError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is not what a run writes ({reason}): restore it") from None
    return record, config, settings


@contextmanager
def _opened(path):
    """A safetensors file, open; whatever is wrong with it becomes a line for the user."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"expected a whole safetensors file, but {path} is not ({error}): restore it"
        ) from None


# %% book/06d-cpu-training.md:569
def _file(out, name, step):
    """The path of the weights or moments of `step`: a save cut short may not have renamed them."""
    found = []
    for path in (out / f"{name}.safetensors", out / f"{name}.next.safetensors"):
        if path.exists():
            with _opened(path) as file:
                found.append((file.metadata() or {}).get("step", "unknown"))
            if found[-1] == str(step):
                return path
    raise UserError(
        f"expected {name}.safetensors of step {step} in {out}, found "
        f"{' and '.join(f'step {s}' for s in found) or 'no such file'}: restore the directory"
    )


def _tensors(path, shapes):
    """The tensors of `path`, which must be exactly {name: shape} in float32, and finite."""
    with _opened(path) as file:
        found = {}
        for name in file.keys():
            part = file.get_slice(name)
            found[name] = part.get_dtype(), tuple(part.get_shape())
        expected = {name: ("F32", shape) for name, shape in shapes.items()}
        for name in sorted(found | expected):
            if found.get(name) != expected.get(name):
                raise UserError(
                    f"{path}: expected {name} to be {expected.get(name, 'absent')}, "
                    f"found {found.get(name, 'nothing')}: this file belongs to another model"
                )
        tensors = {name: file.get_tensor(name) for name in shapes}
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise UserError(f"{path}: {name} has values that are not finite: restore the file")
    return tensors


# %% book/06d-cpu-training.md:609
def _read(out, names):
    """The checked contents of a run directory, of its large files those in `names`.

    Returns (record, config, settings, tokenizer, {name: path}, {tensor's name: array}).
    """
    record, config, settings = _record(out)
    tokenizer = Tokenizer.load(out / "tokenizer.json")
    if tokenizer.hash != record["tokenizer"]:
        raise UserError(
            f"{out / 'tokenizer.json'}: expected the tokenizer {record['tokenizer'][:12]}... that "
            f"this run was trained with, found {tokenizer.hash[:12]}...: restore the file"
        )
    paths = {name: _file(out, name, record["step"]) for name in names}
    with _opened(paths["model"]) as file:
        if config.n_layers > len(file.keys()):  # asked before a huge number makes a huge dict
            raise UserError(f"expected {config.n_layers} layers in {paths['model']}: restore it")
    shapes = parameter_shapes(config)
    both = {f"{kind}.{name}": shape for kind in "mv" for name, shape in shapes.items()}
    tensors = {}
    for name, path in paths.items():
        tensors |= _tensors(path, shapes if name == "model" else both)
    return record, config, settings, tokenizer, paths, tensors


def load_model(out):
    """The model of a run directory, to use it: (config, tokenizer, weights). Changes nothing."""
    _, config, _, tokenizer, _, tensors = _read(Path(out), ["model"])
    weights = Weights(config)
    for name, tensor in weights.items():
        tensor[...] = tensors[name]
    return config, tokenizer, weights


def load(out):
    """The `Run` of a run directory, to continue it. Finishes a save that a crash cut short."""
    out = Path(out)
    record, config, settings, tokenizer, paths, tensors = _read(out, ["model", "optimizer"])
    weights = Weights(config)
    optimizer = _optimizer(weights, settings)
    for name, tensor in {**weights, **_moments(optimizer)}.items():
        tensor[...] = tensors[name]
    if (optimizer.v.flat < 0).any():
        raise UserError(f"{paths['optimizer']}: a mean of squares is negative: restore the file")
    with _disk(out, "a file's final name"):
        for name, path in paths.items():
            os.replace(path, out / f"{name}.safetensors")
    _drop_metrics_after(out, record["step"])
    return Run(config, settings, tokenizer, record["data"], weights, optimizer, record["step"])


# %% book/06d-cpu-training.md:663
def add_metrics(out, line):
    """Append one line, a dict with its "step", to metrics.jsonl."""
    with _disk(out, "metrics.jsonl"), open(Path(out) / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def read_metrics(out):
    """The lines of metrics.jsonl as dicts, up to the first that a crash left incomplete."""
    path, lines = Path(out) / "metrics.jsonl", []
    for text in path.read_bytes().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            line["step"] + 1  # a dict with a number, or it is not ours
        except (ValueError, TypeError, KeyError):
            break
        lines.append(line)
    return lines


def _drop_metrics_after(out, step):
    """Drop the lines of steps after `step`, which are about to be taken again."""
    kept = [line for line in read_metrics(out) if line["step"] <= step]
    with _disk(out, "metrics.jsonl"), replacing(out / "metrics.jsonl") as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")


__all__ = [
    "Settings",
    "Run",
    "save",
    "load_model",
    "load",
    "add_metrics",
    "read_metrics",
]
