# Made from book/e-a-run-that-survives.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-cursor
"""The run directory: what training writes to disk, and how it is read back, to the last byte.

    config.json      what the run began with, written once      metrics.jsonl  one JSON line a step
    tokenizer.json   likewise                                   loss.png       the curve
    request.json     what was asked, before there is a step
    data/            the text in tokens, if the run was given a text and not a prepared folder
    step-00000500/   a save, written aside and renamed as a whole; the newest counts:
        model.safetensors  optimizer.safetensors  state.json
    best/            the model that judged best so far

Leaves out best/ (best.py), and locking: `folder.locked`, which `open_run` holds.
"""


import dataclasses
import functools
import hashlib
import json
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from nanoeuler.data.shards import header_of
from nanoeuler.errors import UserError, quoted
from nanoeuler.files import check_regular, fsync, replacing, sha256_of
from nanoeuler.model.config import ModelConfig, parameter_shapes
from nanoeuler.model.stored import HALVES, Part, Piece, Stored, StoredWeights
from nanoeuler.model.weights import Weights
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.folder import (
    REQUEST,
    check_free,
    checkpoint_name,
    checkpoints,
    discard,
    locked,
    read_metrics,
    reading,
    remove,
    sweep,
    writing,
)
from nanoeuler.training.run import Run, Settings, check_sizes, identity, making_room, program


def _state(run, windows):
    """state.json without the digests of its files. windows: of a pass over the data, or None."""
    read = run.step * run.settings.batch_size
    cursor = {"pass": read // windows, "window": read % windows} if windows else {}
    names = {"run": identity(run.facts), "tokenizer": run.tokenizer.hash}
    return {"step": run.step, "windows_read": read, **cursor, **names, "program": run.program}


MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"  # the large files of a save
KEEP = 2  # saves to keep: the newest, and one to go back to if the disk damages it
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}  # bytes of the types of a file
TURNED = " turned"  # marks blocks whose rows are our columns


def serialised(arrays: Mapping[str, np.ndarray | Stored]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of float32 `arrays`, in parts; the numbers are not copied.

    As `safetensors.numpy.save` has them: a header's length, the header, the numbers by name. Stored
    tensors are read one at a time; matrices of 16 bits keep them, and matrices in blocks theirs.
    """
    entries = [each for name, array in sorted(arrays.items()) for each in _entries(name, array)]
    entries.sort(key=lambda entry: entry.dtype == "U8")  # last, because their lengths may be odd
    header, end = {}, 0
    if said := {entry.name: entry.said for entry in entries if entry.said}:
        header["__metadata__"] = said
    for name, dtype, shape, *_ in entries:
        place = [end, end := end + math.prod(shape) * SIZES[dtype]]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for entry in entries:
        yield memoryview(np.ascontiguousarray(entry.make())).cast("B")


class Entry(NamedTuple):
    """A tensor in a file: its name there, and a function that makes its numbers or bytes."""

    name: str
    dtype: str
    shape: list[int]
    said: str  # of blocks, in the file's metadata: "Q4_1", or "Q4_1 turned"
    make: Callable[[], np.ndarray]


def _entries(name, array):
    """The entries of a tensor: one, or, of a matrix in blocks, one for each of its parts."""
    if not isinstance(array, Stored):
        assert array.dtype == "<f4" and array.flags.c_contiguous
        return [Entry(name, "F32", [*array.shape], "", lambda: array)]
    if array.blocked:
        return [Entry(f"{name}:{i}", "U8", [part.piece.shape[0], part.piece.size],
                      part.piece.kind + part.turned * TURNED, part.raw)
                for i, part in enumerate(array.parts)]  # fmt: skip
    if array.kind in HALVES:
        columns = functools.partial(array.columns, 0, array.shape[1], bits=True)
        return [Entry(name, array.kind, [*array.shape], "", columns)]
    return [Entry(name, "F32", [*array.shape], "", array.whole)]


def _write(path, parts):
    """Write bytes to a new file and wait until the disk has them; return their sha256."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _sync(folder):
    """Wait until the disk has the names in `folder`. Windows opens no folders."""
    if os.name == "posix":
        fsync(folder)


def write_folder(
    folder: Path, tensors: Mapping[str, Mapping[str, np.ndarray | Stored]], state: dict[str, Any]
) -> None:
    """Write a save, {file: {name: array}} and its state, as `folder`: all of it or nothing."""
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)  # left by a save that was killed
    try:
        aside.mkdir(parents=True)
        digests = {
            name: _write(aside / name, serialised(arrays)) for name, arrays in tensors.items()
        }
        _write(aside / "state.json", [as_json({**state, "sha256": digests})])
        _sync(aside)
        os.rename(aside, folder)  # this commits the save
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _sync(folder.parent)


def save(out: str | Path, run: Run, keep: int = KEEP, windows: int | None = None) -> None:
    """Write `run` into the directory `out` as its newest save; keep the last `keep` saves.

    A crash at any moment leaves the saves before it whole, and this one whole or absent. windows:
    how many windows a pass over the data has, for the cursor that state.json shows.
    """
    out, weights, moments = Path(out), dict(run.learned), run.moments
    for name, tensor in (weights | moments).items():
        if not np.isfinite(tensor).all():
            raise UserError(f"step {run.step}: {name} is not finite, so {out} was left as it was")
    with writing(out, f"step {run.step} could not be written"):
        if not checkpoints(out):
            write_record(out, run)
        if (out / "metrics.jsonl").exists():
            fsync(out / "metrics.jsonl")
        tensors = {MODEL: weights, OPTIMIZER: moments}
        write_folder(out / checkpoint_name(run.step), tensors, _state(run, windows))
    tidy(out, keep)


def tidy(out: str | Path, keep: int = KEEP) -> None:
    """Remove from `out` all but the last `keep` saves, and the leftovers of a killed run."""
    assert keep >= 1, keep  # `Execution` has checked it
    with writing(out, "older saves could not be removed"):
        sweep(out)
        if checkpoints(out) and checkpoints(out)[-1][0]:  # with a step: the request is now a run
            remove(Path(out) / REQUEST)
        for _, folder in checkpoints(out)[:-keep]:
            discard(folder)


# The module that reads config.json's lora: only named here, since a later chapter builds it.
ADAPTERS = "nanoeuler.training.lora"
# Formats of config.json. The first has no number and no `minutes`. The third is for imported
# models, which have no settings; the fourth for adapters; the fifth for imported models with
# matrices of 16 bits; the sixth for those with quantized blocks.
FORMAT, IMPORTED, ADAPTED, HALVED, BLOCKED = 2, 3, 4, 5, 6
# The module for the blocks of quantized files, also only named here.
QUANTS = "nanoeuler.interop.quants"
T = TypeVar("T")  # the result of parsing a JSON object


class CorruptFile(Exception):
    """A file is damaged; the text says how."""


def as_json(record: dict) -> bytes:
    """The JSON object of a run in a file, as text."""
    return (json.dumps(record, indent=2) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, as a dict; CorruptFile if it has none."""
    check_regular(path)
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CorruptFile(f"{path.name} is missing") from None
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, of a number's length
        raise CorruptFile(f"{path.name} is no JSON: {error}") from None
    if type(record) is not dict:
        raise CorruptFile(f"{path.name} is no JSON object")
    return record


def field_of(record: dict, name: str, kind: type[T]) -> T:
    """record[name]; CorruptFile if it is not exactly of this type."""
    value = record.get(name)
    if type(value) is not kind:
        raise CorruptFile(f"{name} is no {kind.__name__}")
    return value


def _checked(cls, values):
    """The dataclass `cls` from the JSON object of its `asdict`; the class checks the values."""
    fields = {each.name: each.default is dataclasses.MISSING for each in dataclasses.fields(cls)}
    wrong = [name for name in values if name not in fields]
    wrong += [name for name, needed in fields.items() if needed and name not in values]
    if wrong:
        raise CorruptFile(f"{cls.__name__} does not fit with {wrong[0]}")
    try:
        return cls(**values)
    except UserError as error:
        raise CorruptFile(str(error)) from None


class Record(NamedTuple):
    """What a run began with, from config.json and tokenizer.json."""

    config: ModelConfig
    settings: Settings | None  # None: an imported model, trained elsewhere
    tokenizer: Tokenizer
    data: str  # the digest of the training text
    identity: str
    adaptation: Any = None  # if the saves hold only adapters: see ADAPTERS


def write_record(out: Path, run: Run) -> None:
    """Write what `run` began with into the directory `out`."""
    _write_facts(out, run.tokenizer, ADAPTED if run.lora else FORMAT, run.facts)


def _write_facts(out, tokenizer, version, facts):
    """Write config.json of this format, and tokenizer.json."""
    tokenizer.save(out / "tokenizer.json")
    with replacing(out / "config.json") as temporary:
        temporary.write_bytes(as_json({"format": version, "program": program(), **facts}))


def _read(path: Path, parse: Callable[[dict], T], cure: str) -> T:
    """`parse` of the JSON object at `path`; `cure` says what to do if it is damaged."""
    try:
        record = read_json(path)
        version = field_of({"format": 1} | record, "format", int)
        if version > BLOCKED:
            raise UserError(f"{path.parent} holds a run of format {version}, and this nanoeuler "
                            f"knows formats up to {BLOCKED}: use a newer one")  # fmt: skip
        if version < 1:
            raise CorruptFile(f"there is no format {version}")
        return parse(record)
    except CorruptFile as error:
        raise UserError(f"{path} is damaged ({quoted(error, 200)}): {cure}") from None


def _facts(record):
    """The config, settings, two digests (data, tokenizer), identity and adapters of config.json.

    Format 1, which had no number, had no `minutes`; every later format has.
    """
    config = _checked(ModelConfig, field_of(record, "model", dict))
    digests = [field_of(record, name, str) for name in ("data", "tokenizer")]
    if record.get("format") in (IMPORTED, HALVED, BLOCKED):
        if record.get("training") is not None or not all(map(str.isprintable, digests)):
            raise CorruptFile("an imported model has settings, or a digest is none")
        return config, None, *digests, identity(record), _adaptation(record, config)
    settings = _checked(Settings, field_of(record, "training", dict))
    if ("minutes" in record["training"]) != (record.get("format", 1) > 1):
        raise CorruptFile("its format and its minutes do not fit")
    if None in (settings.steps, settings.lr) or not all(map(str.isprintable, digests)):
        raise CorruptFile("the number of steps, the learning rate or a digest is none")
    return config, settings, *digests, identity(record), _adaptation(record, config)


def _adaptation(record, config):
    """The adapters in config.json, or None; CorruptFile if no run writes that."""
    if (record.get("lora") is None) == (record.get("format") == ADAPTED):
        raise CorruptFile("its format and its lora do not fit")
    if record.get("lora") is None:
        return None
    try:
        return import_module(ADAPTERS).adaptation_of(record, config)
    except ValueError as error:
        raise CorruptFile(str(error)) from None


def _tokenizer(out, name):
    """The tokenizer in the directory `out`, whose hash must be `name`."""
    tokenizer = Tokenizer.load(out / "tokenizer.json", name)
    if tokenizer.hash != name:
        raise UserError(
            f"{out / 'tokenizer.json'}: expected the tokenizer {name[:12]!r} that this run was "
            f"trained with, found {tokenizer.hash[:12]!r}: restore the file"
        )
    return tokenizer


# For newcomers who start with the last command.
MAKERS = "nanoeuler train makes a model in runs/base, and nanoeuler sft one that chats in runs/chat"


def read_record(out: str | Path) -> Record:
    """What the run in the directory `out` began with, checked. Raises UserError as `load` does."""
    out = Path(out)
    path = out / "config.json"
    with reading(path):
        if not path.exists():
            raise UserError(f"expected a run in {out}, but found no config.json there: {MAKERS}")
        facts = _read(path, _facts, "restore it")
        config, settings, data, name, known, adapters = facts
        tokenizer = _tokenizer(out, name)
    check_sizes(config, tokenizer)
    return Record(config, settings, tokenizer, data, known, adapters)


class Request(NamedTuple):
    """The request for a run that has no save yet, from request.json; None: not given."""

    config: ModelConfig | None
    settings: Settings | None
    tokenizer: Tokenizer | None
    data: str  # the digest of the training text
    text: Path | None  # its path: a file, or a prepared folder
    lora: Any = None  # adapters, a `model.lora.Lora`


def write_request(out: Path, request: Request) -> None:
    """Write `request` into the directory `out`, and its tokenizer as tokenizer.json."""
    config, settings, tokenizer, data, text, lora = request
    record = {
        "format": FORMAT, "model": config and dataclasses.asdict(config),
        "training": settings and dataclasses.asdict(settings), "data": data,
        "tokenizer": tokenizer and tokenizer.hash, "text": text and os.path.realpath(text),
    }  # fmt: skip
    record |= {"lora": dataclasses.asdict(lora)} if lora else {}
    with writing(out, "what was asked could not be written"):
        if tokenizer:
            tokenizer.save(out / "tokenizer.json")
        with replacing(out / REQUEST) as temporary:
            temporary.write_bytes(as_json(record))


def _wishes(record):
    """The config, settings, adapters, hash of the tokenizer, digest and path of the text."""
    kinds = [("model", ModelConfig), ("training", Settings), ("lora", None)]
    if record.get("lora") is not None:
        kinds[-1] = "lora", import_module(ADAPTERS).Lora
    wishes = [_checked(cls, field_of(record, name, dict)) if record.get(name) is not None else None
              for name, cls in kinds]  # fmt: skip
    for name in ("tokenizer", "data", "text"):
        optional = name != "data" and record.get(name) is None
        wishes.append(None if optional else field_of(record, name, str))
    return wishes


def read_request(out: str | Path) -> Request | None:
    """The request for the run in the directory `out`, checked; None if there is none.

    UserError for a damaged file.
    """
    out = Path(out)
    with reading(out / REQUEST):
        if not (out / REQUEST).exists():
            return None
        cure = "remove it, and begin the run without --resume"
        config, settings, lora, name, data, text = _read(out / REQUEST, _wishes, cure)
        tokenizer = None if name is None else _tokenizer(out, name)
    where = None if text is None else Path(text)
    return Request(config, settings, tokenizer, data, where, lora)


def read_origin(out: str | Path) -> Record | Request | None:
    """What the run in `out` began with; before its first save, its request, if there is one."""
    return read_record(out) if checkpoints(out) else read_request(out)


def _read_state(folder, step, record):
    """state.json of the save in `folder`, checked for `step` and for the run of `record`."""
    state = read_json(folder / "state.json")
    last = record.settings.steps if record.settings else 0
    if field_of(state, "step", int) != step or step > last:
        raise CorruptFile(f"state.json has step {state['step']}")
    bits = field_of({"bits_per_byte": 1.0} | state, "bits_per_byte", float)  # of a best model
    if not 0 < bits < math.inf:
        raise CorruptFile("bits_per_byte in state.json is no number of bits")
    for text in [each for pair in field_of(state, "program", dict).items() for each in pair]:
        if type(text) is not str or not text.isprintable() or len(text) > 100:  # it may be printed
            raise CorruptFile("program in state.json is not what a save holds")
    names = field_of(state, "run", str), field_of(state, "tokenizer", str)
    if names != (record.identity, record.tokenizer.hash):
        raise UserError(
            f"{folder} and {folder.with_name('config.json')} are from different runs: "
            "put back the one that belongs here"
        )
    return state


def _check_digest(path, state):
    """CorruptFile unless the file at `path` is still the one that was saved."""
    check_regular(path)
    try:
        digest = sha256_of(path)
    except FileNotFoundError:
        raise CorruptFile(f"{path.name} is missing") from None
    if digest != field_of(state, "sha256", dict).get(path.name):
        raise CorruptFile(f"{path.name} is not the file that was saved")


def _check_tensors(path, file, record, kinds):
    """The names of the tensors in the open `file`: for each prefix in `kinds`, the model's."""
    config, tensors = record.config, {}
    for name in file.keys():
        part = file.get_slice(name)
        tensors[name] = part.get_dtype(), tuple(part.get_shape())
    if config.n_layers > config.repeat * len(tensors):  # else a huge number would make a huge dict
        raise CorruptFile(f"{len(tensors)} tensors for {config.n_layers} layers")
    known = record.adaptation
    shapes = known.shapes(config) if known else parameter_shapes(config)
    wanted = {kind + name: ("F32", shape) for kind in kinds for name, shape in shapes.items()}
    if record.settings is None:  # an imported model, whose matrices may have 16 bits
        wanted |= {name: (tensors[name][0], shape) for name, (_, shape) in wanted.items()
                   if len(shape) == 2 and name in tensors and tensors[name][0] in HALVES}
        for name, shape in shapes.items():
            if blocks := _blocks(name, shape, tensors, file.metadata() or {}):
                del wanted[name]
                wanted |= {block.name: tensors[block.name] for block in blocks}
    for name in sorted(tensors | wanted):
        if tensors.get(name) != wanted.get(name):
            pair = [each.get(name, "nothing") for each in (wanted, tensors)]
            raise CorruptFile(f"{path.name}: expected {name} to be {pair[0]}, found {pair[1]}")
    return list(wanted)


class Blocks(NamedTuple):
    """Quantized blocks of a matrix in one of our files."""

    name: str
    kind: str
    turned: bool
    shape: tuple[int, int]  # of the numbers


def _blocks(name, shape, tensors, said):
    """The `Blocks` of a matrix of this shape, side by side; none if it isn't in blocks.

    tensors: {name: (dtype, shape)}. CorruptFile unless they make the whole matrix.
    """
    kinds, found = import_module(QUANTS).KINDS, []
    while len(shape) == 2 and (each := f"{name}:{len(found)}") in tensors:
        dtype, (rows, size) = tensors[each][0], (*tensors[each][1], 0, 0)[:2]
        kind, _, turned = said.get(each, "").partition(" ")
        block = kinds.get(kind)
        if block is None or turned not in ("", TURNED.strip()) or dtype != "U8" or (
                size % block.size):  # fmt: skip
            raise CorruptFile(f"{each} is in blocks of an unknown type")
        found.append(Blocks(each, kind, bool(turned), (rows, size // block.size * block.numbers)))
    if found:
        ours = [block.shape[::-1] if block.turned else block.shape for block in found]
        if {rows for rows, _ in ours} != {shape[0]} or sum(n for _, n in ours) != shape[1]:
            raise CorruptFile(f"the blocks of {name} should make {shape}, but are {ours}")
    return found


def _check_names(path):
    """The header of a safetensors file; CorruptFile if it names a tensor twice."""
    try:
        return header_of(path)
    except ValueError as error:
        raise CorruptFile(f"{path.name}: {error}") from None


def _map_tensors(path, record):
    """The tensors of an imported model, each a `Stored` in the mapped file, checked as well."""
    try:
        with safe_open(path, framework="numpy") as file:
            _check_tensors(path, file, record, ("",))
    except SafetensorError as error:
        raise CorruptFile(f"{path.name}: {error}") from None
    header, quants, tensors = _check_names(path), import_module(QUANTS), {}
    said = header.pop("__metadata__", {})
    there = {name: (each["dtype"], tuple(each["shape"])) for name, each in header.items()}
    with open(path, "rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def part(name, kind, turned, shape):
        place, how = (mapping, begin + header[name]["data_offsets"][0]), quants.KINDS[kind]
        ways = quants.dequantize, quants.finite
        piece = Piece.of(place, shape, kind, (how.numbers, how.size), *ways)
        if not piece.finite():
            raise CorruptFile(f"{path.name}: {name} is not finite")
        return Part(piece, turned, order=None)

    for name, shape in parameter_shapes(record.config).items():
        blocks = _blocks(name, shape, there, said) or [Blocks(name, there[name][0], False, shape)]
        tensors[name] = Stored(shape, [part(*each) for each in blocks])
    return tensors


def _read_tensors(path, record, kinds):
    """The tensors of a file, finite float32: for each prefix in `kinds`, those of the model."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = _check_tensors(path, file, record, kinds)
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise CorruptFile(f"{path.name}: {error}") from None
    _check_names(path)
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all() or (name.startswith("v.") and (tensor < 0).any()):
            raise CorruptFile(f"{path.name}: {name} is not finite, or a mean of squares below 0")
    return tensors


FILES = {MODEL: ("",), OPTIMIZER: ("m.", "v.")}  # and their prefixes


def read_save(
    out: Path, names: Iterable[str], locked: str = "restore it, or start again in another directory"
) -> tuple[Record, dict[str, Any], dict[str, np.ndarray]]:
    """The newest save, of its large files those in `names`, all checked.

    Returns (record, state, {tensor's name: array}), of an imported model {name: `Stored`}, since
    that stays in its file. `locked` is what helps if it is damaged and the only one.
    """
    with reading(out):
        early = not checkpoints(out) and (out / REQUEST).exists()
    if early:
        raise UserError(f"expected a save in {out}, but that run was stopped before its first: "
                        "continue it with --resume")  # fmt: skip
    record = read_record(out)
    *earlier, (step, folder) = checkpoints(out) or [(None, None)]
    if folder is None:
        raise UserError(f"expected a save in {out}, but found none: start the run again")
    tensors = {}
    try:
        with reading(folder):
            state = _read_state(folder, step, record)
            if record.settings is None and OPTIMIZER in names:
                raise UserError(f"{out} holds an imported model, which can't be resumed: "
                                "fine-tune it into another folder (nanoeuler sft)")  # fmt: skip
            if "bits_per_byte" in state and OPTIMIZER in names:
                raise UserError(f"{out} holds a model without its optimizer, which can't be "
                                f"resumed: resume {out.parent}, or fine-tune it")  # fmt: skip
            for name in names:
                _check_digest(folder / name, state)
            for name in names:
                if record.settings is None:
                    tensors |= _map_tensors(folder / name, record)
                else:
                    tensors |= _read_tensors(folder / name, record, FILES[name])
    except CorruptFile as error:
        cure = f"it is the only save there: {locked}"
        if earlier:
            cure = f"delete that folder to go on from step {earlier[-1][0]}"
        raise UserError(f"{folder} is damaged ({quoted(error, 200)}): {cure}") from None
    return record, state, tensors


def _weights(out, record):
    """Memory for the weights of a run; if it trains adapters, with the model they belong to."""
    with making_room(record.config):
        if record.adaptation:
            return record.adaptation.weights(Path(out), record.config)
        return Weights(record.config)


def _fill(weights, tensors):
    """Copy the tensors of a save into the weights; adapters are merged."""
    adapters = getattr(weights, "adapters", None)
    for name, tensor in (weights if adapters is None else adapters).items():
        tensor[...] = tensors[name]
    if adapters is not None:
        weights.merge()


def load_model(out: str | Path) -> tuple[ModelConfig, Tokenizer, Weights]:
    """The newest model of a run directory, for use: its config, tokenizer and weights.

    Those of an imported model stay in its file until somebody needs them in float32.
    """
    record, _, tensors = read_save(Path(out), [MODEL])
    if record.settings is None:
        return record.config, record.tokenizer, StoredWeights(record.config, tensors)
    weights = _weights(out, record)
    _fill(weights, tensors)
    return record.config, record.tokenizer, Weights(record.config, flat=weights.flat)


def load_adapters(out: str | Path) -> tuple[Any, Any]:
    """The `Adapters` in the newest save of a run, and its `Adaptation`. UserError without any."""
    record, _, tensors = read_save(Path(out), [MODEL])
    if record.adaptation is None:
        raise UserError(f"expected a run with LoRA adapters in {out}, but it trained all weights: "
                        "export it whole, without --adapter")  # fmt: skip
    adapters = record.adaptation.adapters(record.config)
    for name, tensor in adapters.items():
        tensor[...] = tensors[name]
    return adapters, record.adaptation


def load(out: str | Path) -> Run:
    """The `Run` of a run directory at its newest save, to continue it.

    UserError if something is damaged, missing, from another run, or can't be read.
    """
    record, state, tensors = read_save(Path(out), FILES)
    with making_room(record.config):
        run = Run.begin(*record[:4], _weights(out, record))
    _fill(run.weights, tensors)
    for name, tensor in run.moments.items():
        tensor[...] = tensors[name]
    run.step, run.program = state["step"], state["program"]
    return run


def write_model(
    out: str | Path, config: ModelConfig, tokenizer: Tokenizer, weights: Weights, source: str
) -> None:
    """Write a model that was trained elsewhere into the new directory `out`, as a save of step 0.

    Matrices that a file has in 16 bits or in blocks keep them, and one tensor at a time is in
    memory. source: where it came from, in a line. UserError where the directory is in use or can't
    be written.
    """
    check_sizes(config, tokenizer)
    check_free(out)
    out, names = Path(out), {"data": source, "tokenizer": tokenizer.hash}
    facts = {"model": dataclasses.asdict(config), "training": None, **names}
    tensors = getattr(weights, "stored", None) or dict(weights)
    stored = [each for each in tensors.values() if isinstance(each, Stored)]
    version = HALVED if any(each.kind in HALVES for each in stored) else IMPORTED
    version = BLOCKED if any(each.blocked for each in stored) else version
    with locked(out), writing(out, "the model could not be written"):
        _write_facts(out, tokenizer, version, facts)
        state = {"step": 0, "run": identity(facts), "tokenizer": tokenizer.hash,
                 "program": program()}  # fmt: skip
        write_folder(out / checkpoint_name(0), {MODEL: tensors}, state)


def rewind(out: str | Path, run: Run, keep: int = KEEP) -> None:
    """Make `out` the directory of `run` at its step: without later lines. A new run has no save."""
    tidy(out, keep)
    kept = [json.dumps(line) + "\n" for line in read_metrics(out) if line["step"] <= run.step]
    with writing(out, "metrics.jsonl could not be written"):
        with replacing(Path(out) / "metrics.jsonl") as temporary:
            temporary.write_text("".join(kept), encoding="utf-8")
