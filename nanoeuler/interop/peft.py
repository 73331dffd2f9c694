# Made from book/19d-lora.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-lora-peft
"""LoRA adapters in PEFT's format: a folder with adapter_config.json and its safetensors file.

Leaves out everything of PEFT's that is no plain LoRA of a model's own matrices, which is refused by
name.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nanoeuler.errors import UserError, quoted
from nanoeuler.interop import families
from nanoeuler.interop.huggingface import DTYPES, read_json, save_json
from nanoeuler.interop.safetensors_file import Tensors, write
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.lora import TARGETS, AdaptedWeights, Adapters, Lora, merged
from nanoeuler.model.weights import Weights

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
PREFIX = "base_model.model."  # PEFT's wrapper, and the model inside it
# Where the families' table has each target: a tensor of a block, and which of its parts.
IN_TABLE = {"q": ("wqkv", 0), "k": ("wqkv", 1), "v": ("wqkv", 2), "o": ("wo", 0),
            "gate": ("w_up", 0), "up": ("w_up", 1), "down": ("w_down", 0)}  # fmt: skip


def names_of(config: ModelConfig, targets: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Our name of each adapter, as block.0.q, and PEFT's of its module. UserError for GPT-2's."""
    family = families.family_of(config)
    if family == "gpt2":
        raise UserError("adapters of GPT-2's family are not exchanged, since its queries, keys and "
                        "values are one matrix there: merge them (export without --adapter)")
    table = families.table_of(families.target_of(config, family), families.FAMILIES[family])
    for i in range(config.n_blocks):
        for name in targets:
            tensor, at = IN_TABLE[name]
            module = table[f"block.{i}.{tensor}"][at].name.removesuffix(".weight")
            yield f"block.{i}.{name}", PREFIX + module


def write_adapter(
    folder: str | Path, config: ModelConfig, adapters: Adapters, base: str, kind: str = "F32"
) -> None:
    """Write adapters as a folder that PEFT opens. kind: F32, F16 or BF16.

    base: the name or folder of the model that they belong to, in Hugging Face's format. UserError,
    before anything is written, for a model of no family, and where files are in the way.
    """
    folder, lora = Path(folder), adapters.lora
    if kind not in DTYPES:
        raise UserError(f"expected {', '.join(DTYPES)}, got {quoted(kind)!r}: choose one of them")
    names = [*names_of(config, lora.targets or ())]
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"expected {folder} to be new or empty: choose another folder")
    ours = {f"{module}.lora_{side}.weight": f"{own}.{side}"
            for own, module in names for side in "AB"}  # fmt: skip
    shapes = {name: adapters[own].shape[::-1] for name, own in ours.items()}

    def make(name: str) -> np.ndarray:
        tensor = adapters[ours[name]].T
        if ours[name].endswith((".o.B", ".down.B")):  # as the exported matrices
            tensor = tensor * np.float32(config.step_size)
        return tensor

    folder.mkdir(parents=True, exist_ok=True)
    write(folder / FILE, shapes, make, kind)
    modules = sorted({module.rsplit(".", 1)[1] for _, module in names})
    save_json(folder / CONFIG, {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": modules, "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "use_rslora": False,
        "use_dora": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    })  # fmt: skip


# Fields of adapter_config.json that make something else of it than plain LoRA, unless they are off.
OFF = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "modules_to_save",
    "rank_pattern", "alpha_pattern", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config",
    "monteclora_config", "velora_config",
)  # fmt: skip
# Each init_lora_weights that leaves W alone.
SAME_BASE = (True, False, "gaussian", "orthogonal", "eva", "mica", None)


def _lora_of(record: dict[str, Any], path: Path) -> Lora:
    """Rank and alpha of an adapter_config.json; UserError for another kind of adapter."""
    if record.get("peft_type") != "LORA":
        raise UserError(f"{path} describes an adapter of the kind "
                        f"{quoted(repr(record.get('peft_type')))}, and only LORA is read: choose "
                        "another")  # fmt: skip
    strange = [name for name in OFF if record.get(name)]
    if record.get("bias", "none") != "none":
        strange.append("bias")
    if record.get("init_lora_weights") not in SAME_BASE:
        strange.append("init_lora_weights")
    if strange:
        raise UserError(f"{path} has {strange[0]} {quoted(repr(record[strange[0]]))}, which makes "
                        "something else of it than plain LoRA: merge it with PEFT, and import the "
                        "model")  # fmt: skip
    rank, alpha = record.get("r", 8), record.get("lora_alpha", 8)  # PEFT's defaults
    if alpha is None:
        raise UserError(f"expected lora_alpha in {path} to be a number, got null: save it anew")
    lora = Lora(rank, alpha)
    if not record.get("use_rslora"):
        return lora
    return Lora(rank, alpha * math.sqrt(rank))  # whose alpha / r is the other's alpha / sqrt(r)


def read_adapter(folder: str | Path, config: ModelConfig) -> Adapters:
    """The adapters in a folder of PEFT's, for a model of this config. UserError if it has others.

    Where a layer has no adapter and others have, ours is zero.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file() or not (folder / FILE).is_file():
        raise UserError(f"expected {CONFIG} and {FILE} in {folder}, an adapter as PEFT saves it in "
                        "safetensors: check the path, or save it anew")  # fmt: skip
    lora = _lora_of(read_json(folder / CONFIG), folder / CONFIG)
    tensors = Tensors([folder / FILE])
    places = {f"{module}.lora_{side}.weight": f"{own}.{side}"
              for own, module in names_of(config, TARGETS) for side in "AB"}  # fmt: skip
    for name in tensors:
        if name not in places:
            raise UserError(f"{folder / FILE} holds {quoted(name)}, which is no adapter of a "
                            "matrix of this model: choose the model that it was made for")
    found = {places[name]: name for name in tensors}
    targets = {own.split(".")[2] for own in found}
    if not targets:
        raise UserError(f"{folder / FILE} holds no adapter at all: save it anew")
    lora = Lora(lora.rank, lora.alpha, tuple(targets)).settled(config)
    adapters = Adapters(config, lora)
    _fill(adapters, found, tensors, folder / FILE)
    return adapters


def _fill(adapters, found, tensors, path):
    """Read A and B of each adapter that there is; UserError unless they fit."""
    for own, into in adapters.items():
        other = own[:-1] + ("B" if own.endswith("A") else "A")
        if own not in found and other not in found:
            continue
        name = found.get(own, "")
        if not name or tensors.shapes[name] != into.shape[::-1]:
            what = f"{name} in {[*tensors.shapes[name]]}" if name else f"nothing beside {other}"
            raise UserError(f"{path}: expected {own} as {[*into.shape[::-1]]}, found {what}: "
                            "choose the model that it was made for")  # fmt: skip
        tensor = tensors[name]
        if not np.isfinite(tensor).all():
            raise UserError(f"{path}: {name} holds numbers that are not finite: save it anew")
        into[...] = tensor.T


def with_adapter(weights: Weights, folder: str | Path) -> Weights:
    """`weights`, into whose own memory the adapters in a folder of PEFT's are merged."""
    adapters = read_adapter(folder, weights.config)
    both = AdaptedWeights(weights, adapters.lora)
    both.adapters.flat[...] = adapters.flat
    both.merge()
    return merged(both)
