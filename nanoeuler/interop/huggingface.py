# Made from book/19-other-peoples-models.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-others-folder
"""A model's folder as the Hub has it: config.json, and safetensors in one file or several.

Leaves out its tokenizer (the room of that name), and fetching a folder.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nanoeuler.errors import UserError, quoted
from nanoeuler.files import check_regular, replacing
from nanoeuler.interop import families
from nanoeuler.interop.safetensors_file import SIZES, Tensors, write
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.stored import Piece
from nanoeuler.model.weights import Weights

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # transformers' names
# Weights as pickles, which are programs in disguise: we don't read them.
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "*.pth", "*.pt", "*.ckpt", "*.pkl")
MOST_JSON = 50_000_000  # bytes of a configuration or an index; these families' have up to 100 kB
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # and as config.json has them


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, a dict. UserError if it is none."""
    check_regular(path)
    try:
        if path.stat().st_size > MOST_JSON:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        record = json.loads(path.read_bytes().decode("utf-8-sig"))
        if type(record) is not dict:
            raise ValueError("it is something else")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check the path and "
                        "the permissions") from None  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise UserError(f"expected {path} to be a JSON object, but {quoted(error)}: fetch it "
                        "again") from None  # fmt: skip
    return record


def _indexed(folder):
    """(files, {tensor: file's name}) of an index; UserError unless it names files beside it."""
    places = read_json(folder / INDEX).get("weight_map")
    if type(places) is not dict or not places:
        raise UserError(f"expected {folder / INDEX} to have a weight_map, with a file for each "
                        "tensor: fetch it again")  # fmt: skip
    for name in places.values():
        plain = type(name) is str and name == Path(name).name and "\\" not in name
        if not plain or not name.endswith(".safetensors") or "\0" in name:
            raise UserError(f"expected {folder / INDEX} to name safetensors files beside it, got "
                            f"{quoted(name)!r}: fetch it again")  # fmt: skip
    return [folder / name for name in sorted(set(places.values()))], places


def open_folder(folder: str | Path) -> Tensors:
    """The tensors of a folder, in one file or several. UserError if there are none to be read."""
    folder = Path(folder)
    if (folder / SINGLE).exists():
        return Tensors([folder / SINGLE])
    if (folder / INDEX).exists():
        paths, places = _indexed(folder)
        for path in paths:
            if not path.exists():
                raise UserError(f"expected {path}, which {INDEX} names, but it is not there: fetch "
                                "the model again")  # fmt: skip
        tensors = Tensors(paths)
        missing = [name for name in places if name not in tensors]
        if missing:
            raise UserError(f"expected the files of {folder} to hold {quoted(missing[0])}, which "
                            f"{INDEX} names: fetch the model again")  # fmt: skip
        return tensors
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} holds an adapter, which changes a model, and no model: fetch "
                        "the model that it is for, or merge the two")  # fmt: skip
    pickles = [path.name for pattern in PICKLES for path in sorted(folder.glob(pattern))]
    if pickles:
        raise UserError(f"{folder} holds its weights as a pickle ({quoted(pickles[0])}), a program "
                        "that reading would run: choose a version with safetensors")  # fmt: skip
    raise UserError(f"expected {SINGLE} in {folder}, but it is not there: fetch the model again")


def _layout(family, tensors):
    """The family's layout, without its prefix where the file's names have none."""
    layout = families.FAMILIES[family]
    first = f"{layout.names['embedding'][0]}.weight"
    return layout._replace(prefix="") if first in tensors else layout


def _without_copy(folder, tensors, embedding):
    """The shapes of all tensors but an output matrix that is the embedding again.

    UserError if it is another one, though the configuration says that it is the same.
    """
    shapes = dict(tensors.shapes)
    if "lm_head.weight" in shapes and embedding in shapes:
        same = shapes.pop("lm_head.weight") == shapes[embedding]
        same = same and tensors.kinds["lm_head.weight"] == tensors.kinds[embedding]
        if not (same and np.array_equal(tensors.raw("lm_head.weight"), tensors.raw(embedding))):
            raise UserError(f"{folder}: its configuration says that output matrix and embedding "
                            "are the same (tie_word_embeddings), and the file has two different "
                            "ones: correct config.json")  # fmt: skip
    return shapes


def _record(folder):
    """The config.json of a folder, a dict. UserError if it has none."""
    if not (folder / "config.json").exists():
        raise UserError(f"expected a model of Hugging Face's format in {folder}, but found no "
                        "config.json there: check the path")  # fmt: skip
    return read_json(folder / "config.json")


def read_config(folder: str | Path) -> ModelConfig:
    """The architecture of the model in a folder, from its config.json. UserError, by name."""
    return families.config_of(_record(Path(folder)))


def read_folder(folder: str | Path, context: int | None = None) -> tuple[ModelConfig, Weights]:
    """The model in a folder of Hugging Face's format; its weights stay in the files.

    Names and shapes are checked before numbers are read, except that a tied model's output matrix
    is first compared with its embedding. UserError for what our model can't be, and for damage.
    context: a smaller one than the model has.
    """
    folder = Path(folder)
    record = _record(folder)
    whole = families.config_of(record)
    config = families.cut_context(whole, context)
    tensors = open_folder(folder)
    layout = _layout(record["model_type"], tensors)
    table = families.table_of(whole, layout)
    lacks = families.absent(record)
    table = {name: parts for name, parts in table.items() if name.split(".")[-1] not in lacks}
    shapes = tensors.shapes
    if whole.tied:
        shapes = _without_copy(folder, tensors, table["embedding"][0].name)
    families.check_shapes(table, shapes, folder)
    learned = table["positions"][0].name if "positions" in table else None

    def piece(name: str) -> Piece:
        found = tensors.piece(name)
        return found.cut(config.context) if name == learned else found

    return config, families.stored_from(config, table, piece, folder)


# %% sec-others-out
def _shards(shapes, kind, most):
    """The names of tensors in groups of at most `most` bytes, in order; a larger one is alone."""
    groups, size = [[]], 0
    for name, shape in sorted(shapes.items()):
        n = math.prod(shape) * SIZES[kind]
        if groups[-1] and size + n > most:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += n
    return groups


def save_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON object; the file is whole or not there."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write_folder(
    folder: str | Path, config: ModelConfig, weights: Weights, kind: str = "F32",
    extra: Mapping[str, Any] | None = None, most: int = 5_000_000_000,
) -> list[str]:  # fmt: skip
    """Write a model as a folder that transformers opens; return sentences on what it lacks.

    kind: F32, F16 or BF16. extra: more fields of config.json, such as eos_token_id. most: bytes of
    a file, above which there are several. UserError, before anything is written, for a model that
    no family computes, and where files are in the way.
    """
    folder = Path(folder)
    if kind not in DTYPES:
        raise UserError(f"expected {', '.join(DTYPES)}, got {quoted(kind)!r}: choose one of them")
    family = families.family_of(config)
    target = families.target_of(config, family)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"expected {folder} to be new or empty: choose another folder")
    table = families.table_of(target, families.FAMILIES[family])
    shapes, make = families.exported(config, weights, table)
    groups, places = _shards(shapes, kind, most), {}
    for i, names in enumerate(groups, start=1):
        path = folder / (SINGLE if len(groups) == 1 else
                         f"model-{i:05d}-of-{len(groups):05d}.safetensors")  # fmt: skip
        write(path, {name: shapes[name] for name in names}, make, kind)
        places |= dict.fromkeys(names, path.name)
    if len(groups) > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * SIZES[kind]
        save_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    record = families.record_of(target, family, DTYPES[kind]) | dict(extra or {})
    save_json(folder / "config.json", record)
    return families.left_out(config)
