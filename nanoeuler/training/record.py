# Made from book/e-a-run-that-survives.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-cursor
"""What a run began with, in config.json and tokenizer.json; before that, request.json.

Leaves out its saves (saves.py).
"""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nanoeuler.errors import UserError
from nanoeuler.files import check_regular, replacing
from nanoeuler.model.config import ModelConfig
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.folder import REQUEST, reading, saves, writing
from nanoeuler.training.run import Run, Settings, check_sizes, identity, program

FORMAT = 2  # of config.json; the one before did not say so, and its settings had no `minutes`
T = TypeVar("T")


class Damage(Exception):
    """What is wrong with a file that was read, in words."""


def brief(thing: object) -> str:
    """What an error says on one short line, whatever a hostile file made it say."""
    return "".join(c if c.isprintable() else "?" for c in str(thing)[:200])


def as_json(record: dict) -> bytes:
    """A JSON object as a file has it."""
    return (json.dumps(record, indent=2) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, a dict; Damage if it is none."""
    check_regular(path)
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Damage(f"{path.name} is missing") from None
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, of a number's length
        raise Damage(f"{path.name} is no JSON: {error}") from None
    if type(record) is not dict:
        raise Damage(f"{path.name} is no JSON object")
    return record


def field_of(record: dict, name: str, kind: type[T]) -> T:
    """record[name]; Damage if it is not of exactly this type."""
    value = record.get(name)
    if type(value) is not kind:
        raise Damage(f"{name} is no {kind.__name__}")
    return value


def _checked(cls, values):
    """The dataclass `cls` of the JSON object that its `asdict` became; it checks the values."""
    fields = {each.name: each.default is dataclasses.MISSING for each in dataclasses.fields(cls)}
    wrong = [name for name in values if name not in fields]
    wrong += [name for name, needed in fields.items() if needed and name not in values]
    if wrong:
        raise Damage(f"{cls.__name__} does not fit with {wrong[0]}")
    try:
        return cls(**values)
    except UserError as error:
        raise Damage(str(error)) from None


class Record(NamedTuple):
    """What a run began with, as config.json and tokenizer.json have it."""

    config: ModelConfig
    settings: Settings
    tokenizer: Tokenizer
    data: str  # the digest of the training text
    identity: str


def write_record(out: Path, run: Run) -> None:
    """Write into the directory `out` what `run` began with."""
    run.tokenizer.save(out / "tokenizer.json")
    with replacing(out / "config.json") as temporary:
        temporary.write_bytes(as_json({"format": FORMAT, "program": program(), **run.facts}))


def _read(path: Path, parse: Callable[[dict], T], cure: str) -> T:
    """What `parse` makes of the JSON object at `path`; `cure` says what helps if it is damaged."""
    try:
        record = read_json(path)
        version = field_of({"format": 1} | record, "format", int)
        if version > FORMAT:
            raise UserError(f"{path.parent} holds a run of format {brief(version)}, and this "
                            f"nanoeuler knows formats up to {FORMAT}: use a newer one")  # fmt: skip
        if version < 1:
            raise Damage(f"there is no format {version}")
        return parse(record)
    except Damage as error:
        raise UserError(f"{path} is not what a run writes ({brief(error)}): {cure}") from None


def _facts(record):
    """The config, settings and the two digests, of the data and the tokenizer, of config.json.

    Format 1, which did not name itself, had no `minutes`, and every later one has.
    """
    config = _checked(ModelConfig, field_of(record, "model", dict))
    settings = _checked(Settings, field_of(record, "training", dict))
    digests = [field_of(record, name, str) for name in ("data", "tokenizer")]
    if ("minutes" in record["training"]) != (record.get("format", 1) > 1):
        raise Damage("its format and its minutes do not fit")
    if None in (settings.steps, settings.lr) or not all(map(str.isprintable, digests)):
        raise Damage("the number of steps, the learning rate or a digest is none")
    return config, settings, *digests, identity(record)


def _tokenizer(out, name):
    """The tokenizer in the directory `out`, whose hash must be `name`."""
    tokenizer = Tokenizer.load(out / "tokenizer.json")
    if tokenizer.hash != name:
        raise UserError(
            f"{out / 'tokenizer.json'}: expected the tokenizer {name[:12]!r} that this run was "
            f"trained with, found {tokenizer.hash[:12]!r}: restore the file"
        )
    return tokenizer


def read_record(out: str | Path) -> Record:
    """What the run in the directory `out` began with, checked. UserError, as for `load`."""
    out = Path(out)
    path = out / "config.json"
    with reading(path):
        if not path.exists():
            raise UserError(f"expected a run in {out}, but found no config.json there")
        config, settings, data, name, known = _read(path, _facts, "restore it")
        tokenizer = _tokenizer(out, name)
    check_sizes(config, tokenizer)
    return Record(config, settings, tokenizer, data, known)


class Request(NamedTuple):
    """What was asked of a run that has no save yet, as request.json has it; None: nothing."""

    config: ModelConfig | None
    settings: Settings | None
    tokenizer: Tokenizer | None
    data: str  # the digest of the training text
    text: Path | None  # where it lies: a file, or a prepared folder


def write_request(out: Path, request: Request) -> None:
    """Write `request` into the directory `out`, and its tokenizer as tokenizer.json."""
    config, settings, tokenizer, data, text = request
    record = {
        "format": FORMAT, "model": config and dataclasses.asdict(config),
        "training": settings and dataclasses.asdict(settings), "data": data,
        "tokenizer": tokenizer and tokenizer.hash, "text": text and os.path.realpath(text),
    }  # fmt: skip
    with writing(out, "what was asked could not be written"):
        if tokenizer:
            tokenizer.save(out / "tokenizer.json")
        with replacing(out / REQUEST) as temporary:
            temporary.write_bytes(as_json(record))


def _wishes(record):
    """The config, settings, tokenizer's hash, digest of the data and place of the text."""
    wishes = [_checked(cls, field_of(record, name, dict)) if record.get(name) is not None else None
              for name, cls in (("model", ModelConfig), ("training", Settings))]  # fmt: skip
    for name in ("tokenizer", "data", "text"):
        optional = name != "data" and record.get(name) is None
        wishes.append(None if optional else field_of(record, name, str))
    return wishes


def read_request(out: str | Path) -> Request | None:
    """What was asked of the run in the directory `out`, checked; None if it is not written there.

    UserError for a damaged file.
    """
    out = Path(out)
    with reading(out / REQUEST):
        if not (out / REQUEST).exists():
            return None
        cure = "remove it, and begin the run without --resume"
        config, settings, name, data, text = _read(out / REQUEST, _wishes, cure)
        tokenizer = None if name is None else _tokenizer(out, name)
    return Request(config, settings, tokenizer, data, None if text is None else Path(text))


def read_origin(out: str | Path) -> Record | Request | None:
    """What the run in `out` began with; before its first save what was asked, if that is known."""
    return read_record(out) if saves(out) else read_request(out)
