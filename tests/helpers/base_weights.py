"""A model in parts that a call brings back, and the model of those parts.

A matrix is cut into groups of 256 numbers in the order of the file, each with a scale, and each
number becomes two bytes: w = scale (256 high + low) / 32639, where scale is the largest |w| of the
group. The high bytes alone are the usual 8 bits, the nearest multiple of scale / 128; with the low
bytes the error is below 1.6e-5 of the scale, less than bf16's. Vectors stay float32.

cut writes FOLDER/weights.json, with the configuration, the tokenizer and the SHA-256 of all files,
exact-00.bin (vectors, then scales), high-00.bin ... and low-00.bin ...; join makes a run folder of
them, with low or without.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nanoeuler.api import load
from nanoeuler.errors import UserError
from nanoeuler.files import sha256_of
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import Weights
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.checkpoint import write_model

GROUP = 256
MOST = 127 * 256 + 127  # the largest number whose high and low are of 8 bits
PART = 15 << 20  # bytes of a file, below the 16 MiB that come back
FILES, CALL = 7, 63 << 20  # files and bytes of a call: one more file, of rows, has to fit


def matrices(weights: Weights) -> np.ndarray:
    """All matrices, one after another, filled up with zeros to whole groups: (n, GROUP)."""
    flat = np.concatenate([each.ravel() for each in weights.values() if each.ndim > 1])
    return np.pad(flat, (0, -len(flat) % GROUP)).reshape(-1, GROUP)


def vectors(weights: Weights) -> np.ndarray:
    """All vectors, one after another."""
    return np.concatenate([np.zeros(0, np.float32), *(x for x in weights.values() if x.ndim < 2)])


def quantized(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """scales (n,) float32, high and low (n, GROUP) int8 of float32 groups (n, GROUP)."""
    scales = np.abs(groups).max(axis=1)
    whole = np.rint(groups * (MOST / np.where(scales > 0, scales, 1))[:, None]).astype(np.int32)
    high = (whole + 128) >> 8
    return scales, high.astype(np.int8), (whole - (high << 8)).astype(np.int8)


def numbers(scales: np.ndarray, high: np.ndarray, low: np.ndarray | None) -> np.ndarray:
    """What groups are taken for."""
    whole = high.astype(np.float32) * 256
    if low is not None:
        whole += low
    return whole * (scales / MOST)[:, None]


def _parts(folder, name, array) -> Iterator[Path]:
    """Write an array's bytes as files of PART bytes at most."""
    whole = memoryview(np.ascontiguousarray(array)).cast("B")
    for i in range(math.ceil(len(whole) / PART)):
        path = folder / f"{name}-{i:02}.bin"
        path.write_bytes(whole[i * PART : (i + 1) * PART])
        yield path


def cut(run: Path, folder: Path) -> list[Path]:
    """Write the model of a run in parts, the most important first; weights.json begins the list."""
    model = load(run)
    folder.mkdir(parents=True, exist_ok=True)
    scales, high, low = quantized(matrices(model.weights))
    exact, paths = np.concatenate([vectors(model.weights), scales]), []
    for name, array in ("exact", exact), ("high", high), ("low", low):
        paths += _parts(folder, name, array)
    model.tokenizer.save(folder / "tokenizer.json")
    record = {"model": dataclasses.asdict(model.config),
              "tokenizer": (folder / "tokenizer.json").read_text(encoding="utf-8"),
              "files": {path.name: sha256_of(path) for path in paths}}  # fmt: skip
    (folder / "tokenizer.json").unlink()
    (folder / "weights.json").write_text(json.dumps(record, indent=1) + "\n")
    return [folder / "weights.json", *paths]


def calls(paths: list[Path]) -> list[list[Path]]:
    """The files call by call, FILES and CALL bytes at most in each."""
    made: list[list[Path]] = [[]]
    for path in paths:
        size = sum(each.stat().st_size for each in made[-1]) + path.stat().st_size
        if len(made[-1]) == FILES or size > CALL:
            made.append([])
        made[-1].append(path)
    return made


def _read(folder, record, name, dtype) -> np.ndarray | None:
    """The array of all files of a name; None if there are none."""
    known = [each for each in record["files"] if each.split("-")[0] == name]
    paths = [folder / each for each in sorted(known)]
    there = [path for path in paths if path.exists()]
    if name == "low" and len(there) < len(paths):
        return None
    for path in paths:
        if path not in there or sha256_of(path) != record["files"][path.name]:
            raise UserError(f"expected {path} as it was cut, but it is missing or damaged: bring "
                            "it once more")  # fmt: skip
    return np.frombuffer(b"".join(path.read_bytes() for path in paths), dtype)


def join(folder: Path, out: Path, source: str = "the base model") -> bool:
    """Make a run folder of parts; returns whether the low bytes were there, all of them."""
    record = json.loads((folder / "weights.json").read_text())
    config, low = ModelConfig(**record["model"]), _read(folder, record, "low", np.int8)
    (folder / "tokenizer.json").write_text(record["tokenizer"], encoding="utf-8")
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    high = _read(folder, record, "high", np.int8).reshape(-1, GROUP)
    small, weights = _read(folder, record, "exact", np.float32), Weights(config)
    low = None if low is None else low.reshape(-1, GROUP)
    flat = numbers(small[-len(high) :], high, low).ravel()
    at = small_at = 0
    for tensor in weights.values():
        if tensor.ndim > 1:
            tensor[...] = flat[at : at + tensor.size].reshape(tensor.shape)
            at += tensor.size
        else:
            tensor[...] = small[small_at : small_at + tensor.size]
            small_at += tensor.size
    kind = "16 bits" if low is not None else "8 bits"
    write_model(out, config, tokenizer, weights, f"{source}, {kind}")
    return low is not None
