# Made from book/06d-cpu-training.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-cursor
"""The run directory: what training leaves on disk, and how it comes back to the last byte.

    config.json      what the run began with, written once      metrics.jsonl  one JSON line a step
    tokenizer.json   likewise                                   loss.png       the curve
    data/            the text in tokens, if the run was given a text and not a prepared folder
    step-00000500/   a save, written aside and renamed as a whole; the newest counts:
        model.safetensors  optimizer.safetensors  state.json

Leaves out locking: `rundir.alone`, which `train` holds.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialised

from nanoeuler.errors import UserError
from nanoeuler.files import confirm, replacing, sha256_of
from nanoeuler.model.config import ModelConfig, parameter_shapes
from nanoeuler.model.transformer import Weights
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.folder import read_metrics, save_name, saves, writing
from nanoeuler.training.run import Run, Settings, identity, program

KEEP = 2  # saves: the newest, and one to go back to if the disk damages it


# What a death leaves of a save or a file of the run directory; no other name is ours to remove.
LEFTOVER = re.compile(
    r"\.(step-\d{8,}|((config|tokenizer)\.json|metrics\.jsonl|loss\.png)\.\d+)\.part"
)


def _state(run, windows):
    """state.json, but for the digests of its files. `windows` to a pass over the data, or None."""
    read = run.step * run.settings.batch_size
    cursor = {"pass": read // windows, "window": read % windows} if windows else {}
    names = {"run": identity(run.facts), "tokenizer": run.tokenizer.hash}
    return {"step": run.step, "windows_read": read, **cursor, **names, "program": run.program}


def _json(record):
    return (json.dumps(record, indent=2) + "\n").encode()


def _written(path, content):
    """Write bytes to a new file and wait until the disk has them; return their sha256."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def _sync(folder):
    """Wait until the disk has the names in `folder`. Windows opens no folders."""
    if os.name == "posix":
        confirm(folder)


def _write_folder(folder, tensors, state):
    """Write a save, {file: {name: array}} and its state, as `folder`: all of it or nothing."""
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)  # left by a save that was killed
    try:
        aside.mkdir(parents=True)
        digests = {
            name: _written(aside / name, serialised(arrays)) for name, arrays in tensors.items()
        }
        _written(aside / "state.json", _json({**state, "sha256": digests}))
        _sync(aside)
        os.rename(aside, folder)  # the commitment
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _sync(folder.parent)


def save(out, run, keep=KEEP, windows=None):
    """Write `run` into the directory `out` as its newest save; the last `keep` saves stay.

    A crash at any moment leaves the saves before it whole, and this one whole or absent. windows:
    how many windows a pass over the data has, for the cursor that state.json shows.
    """
    out, weights, moments = Path(out), dict(run.weights), run.moments
    for name, tensor in (weights | moments).items():
        if not np.isfinite(tensor).all():
            raise UserError(f"step {run.step}: {name} is not finite, so {out} was left as it was")
    with writing(out, f"step {run.step} could not be written"):
        if not saves(out):
            run.tokenizer.save(out / "tokenizer.json")
            with replacing(out / "config.json") as temporary:
                temporary.write_bytes(_json({"program": program(), **run.facts}))
        if (out / "metrics.jsonl").exists():
            confirm(out / "metrics.jsonl")
        tensors = {"model.safetensors": weights, "optimizer.safetensors": moments}
        _write_folder(out / save_name(run.step), tensors, _state(run, windows))
    tidy(out, keep)


def _remove(path):
    """Remove a folder or a file; of a link only the link, and nothing of where it leads."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def tidy(out, keep=KEEP):
    """Remove from `out` the saves before the last `keep`, and what a death left half done."""
    if type(keep) is not int or keep < 1:
        raise UserError(f"expected to keep at least 1 save, got {keep!r}")
    with writing(out, "older saves could not be removed"):
        for path in Path(out).glob(".*.part"):
            if LEFTOVER.fullmatch(path.name):
                _remove(path)
        for _, folder in saves(out)[:-keep]:
            aside = folder.with_name(f".{folder.name}.part")
            os.rename(folder, aside)  # what has the name of a save is whole
            _remove(aside)


# What reading a file can raise that was cut short, edited, or made to do harm.
DAMAGE = (
    OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, SafetensorError
)  # fmt: skip


def _brief(error):
    """An error on one short line, whatever a hostile file made it say."""
    text = f"{type(error).__name__}: {error}"[:200]
    return "".join(c if c.isprintable() else "?" for c in text)


def _record(out):
    """What the run began with, checked: (record, config, settings, tokenizer)."""
    path = out / "config.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        config, settings = ModelConfig(**record["model"]), Settings(**record["training"])
        if not (record["data"].isprintable() and record["tokenizer"].isprintable()):
            raise ValueError("data or tokenizer is not a digest")
    except FileNotFoundError:
        raise UserError(f"expected a run in {out}, but found no config.json there") from None
    except (*DAMAGE, UserError) as error:
        reason = _brief(error)
        raise UserError(f"{path} is not what a run writes ({reason}): restore it") from None
    tokenizer = Tokenizer.load(out / "tokenizer.json")
    if tokenizer.hash != record["tokenizer"]:
        raise UserError(
            f"{out / 'tokenizer.json'}: expected the tokenizer {record['tokenizer'][:12]!r} that "
            f"this run was trained with, found {tokenizer.hash[:12]!r}: restore the file"
        )
    return record, config, settings, tokenizer


def _checked_state(folder, step, settings, names):
    """state.json of the save in `folder`, which must be of `step`, with the digests of `names`."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if state["step"] != step or type(state["step"]) is not int or step > settings.steps:
        raise ValueError(f"state.json has step {state['step']!r}")
    for told in (*state["program"], *state["program"].values()):
        if not told.isprintable() or len(told) > 100:  # they may be printed
            raise ValueError("program in state.json is not what a save holds")
    for name in names:
        if sha256_of(folder / name) != state["sha256"][name]:
            raise ValueError(f"{name} is not the file that was saved")
    return state


def _tensors(path, config, kinds):
    """The tensors of `path`, finite float32: for each kind, a prefix, those of the model."""
    with safe_open(path, framework="numpy") as file:
        found = {}
        for name in file.keys():
            part = file.get_slice(name)
            found[name] = part.get_dtype(), tuple(part.get_shape())
        if config.n_layers > config.repeat * len(found):  # or a huge number makes a huge dict
            raise ValueError(f"{len(found)} tensors for {config.n_layers} layers")
        shapes = parameter_shapes(config).items()
        expected = {kind + name: ("F32", shape) for kind in kinds for name, shape in shapes}
        for name in sorted(found | expected):
            if found.get(name) != expected.get(name):
                told = [each.get(name, "nothing") for each in (expected, found)]
                raise ValueError(f"{path.name}: expected {name} to be {told[0]}, found {told[1]}")
        tensors = {name: file.get_tensor(name) for name in expected}
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all() or (name.startswith("v.") and (tensor < 0).any()):
            raise ValueError(f"{path.name}: {name} is not finite, or a mean of squares below 0")
    return tensors


FILES = {"model.safetensors": ("",), "optimizer.safetensors": ("m.", "v.")}  # and their prefixes


def _read(out, names):
    """The newest save, of its large files those in `names`, checked, and what the run began with.

    Returns (record, config, settings, tokenizer, state, {tensor's name: array}).
    """
    record, config, settings, tokenizer = _record(out)
    *earlier, (step, folder) = saves(out) or [(None, None)]
    if folder is None:
        raise UserError(f"expected a save in {out}, but found none: start the run anew")
    try:
        state, tensors = _checked_state(folder, step, settings, names), {}
        if (state["run"], state["tokenizer"]) != (identity(record), record["tokenizer"]):
            raise UserError(
                f"{folder} and {out / 'config.json'} are of different runs: "
                "put back the one that belongs here"
            )
        for name in names:
            tensors |= _tensors(folder / name, config, FILES[name])
    except DAMAGE as error:
        cure = "it is the only save there: restore it, or start anew in another directory"
        if earlier:
            cure = f"delete that folder to go on from step {earlier[-1][0]}"
        raise UserError(f"{folder} is damaged ({_brief(error)}): {cure}") from None
    return record, config, settings, tokenizer, state, tensors


def load_model(out):
    """The newest model of a run directory, to use it: (config, tokenizer, weights)."""
    _, config, _, tokenizer, _, tensors = _read(Path(out), ["model.safetensors"])
    weights = Weights(config)
    for name, tensor in weights.items():
        tensor[...] = tensors[name]
    return config, tokenizer, weights


def load(out):
    """The `Run` of a run directory at its newest save, to continue it."""
    record, config, settings, tokenizer, state, tensors = _read(Path(out), FILES)
    run = Run.begin(config, settings, tokenizer, record["data"], Weights(config))
    for name, tensor in {**run.weights, **run.moments}.items():
        tensor[...] = tensors[name]
    run.step, run.program = state["step"], state["program"]
    return run


def settle(out, run, keep=KEEP, windows=None):
    """Make `out` the directory of `run` at its step: saved once, and without what came after."""
    tidy(out, keep)
    kept = [json.dumps(line) + "\n" for line in read_metrics(out) if line["step"] <= run.step]
    with writing(out, "metrics.jsonl could not be written"):
        with replacing(Path(out) / "metrics.jsonl") as temporary:
            temporary.write_text("".join(kept), encoding="utf-8")
    if not saves(out):
        save(out, run, keep, windows)
