# Made from book/19a-quantized-files.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-quantized-model
"""Models in GGUF files: the keys and names of llama.cpp's architectures, in and out.

Leaves out the file as such (gguf.py) and its tokenizer (nanoeuler/tokenizer).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nanoeuler.errors import UserError, quoted
from nanoeuler.interop import gguf
from nanoeuler.interop.families import (
    Layout,
    check_shapes,
    cut_context,
    exported,
    family_of,
    left_out,
    shortest,
    stored_from,
    table_of,
    target_of,
)
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.stored import Piece
from nanoeuler.model.weights import Weights

ROPE_FACTORS = "rope_freqs.weight"  # what llama3's scaling divides each frequency by
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # general.file_type, as llama.cpp has it


_NAMES = {
    "embedding": ("token_embd",), "positions": ("position_embd",), "norm": ("output_norm",),
    "output": ("output",), "norm1": ("blk.{}.attn_norm",),
    "wqkv": tuple(f"blk.{{}}.attn_{each}" for each in "qkv"),
    "q_norm": ("blk.{}.attn_q_norm",), "k_norm": ("blk.{}.attn_k_norm",),
    "wo": ("blk.{}.attn_output",), "norm2": ("blk.{}.ffn_norm",),
    "w_up": ("blk.{}.ffn_gate", "blk.{}.ffn_up"), "w_down": ("blk.{}.ffn_down",),
}  # fmt: skip
_QWEN = Layout(_NAMES)
ARCHITECTURES = {
    "gpt2": Layout({**_NAMES, "wqkv": ("blk.{}.attn_qkv",), "w_up": ("blk.{}.ffn_up",)}),
    "llama": Layout(_NAMES, paired=True), "qwen2": _QWEN, "qwen3": _QWEN,
}  # fmt: skip


class Keys:
    """The metadata of a model's architecture: `keys["block_count", int]`, and `get` with a default.

    UserError for a value of another type, or one that is missing.
    """

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata, self.name = metadata, metadata.get("general.architecture")
        if type(self.name) is not str or self.name not in ARCHITECTURES:
            known = ", ".join([*ARCHITECTURES][:-1])
            raise UserError(f"expected a GGUF file of the architectures {known} or "
                            f"{[*ARCHITECTURES][-1]}, got {quoted(self.name or 'none')}: choose "
                            "another model")  # fmt: skip

    def get(self, key: str, kind: type, default: Any) -> Any:
        """The value of the key after the architecture's name; `default` if there is none."""
        value = self.metadata.get(f"{self.name}.{key}", default)
        if value is default:
            return value
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise UserError(f"expected {self.name}.{key} to be of the type {kind.__name__}, got "
                            f"{quoted(value)}: fetch the file again")  # fmt: skip
        return float(value) if kind is float else value

    def __getitem__(self, pair: tuple[str, type]) -> Any:
        value = self.get(*pair, None)
        if value is None:
            raise UserError(f"expected a key {self.name}.{pair[0]}, and the file has none: fetch "
                            "it again")  # fmt: skip
        return value


def as_written(value: float) -> float:
    """The shortest decimal number with the same float32: 1e-5, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def llama3_factors(
    half: int, base: float, factor: float, low: float, high: float, context: int
) -> np.ndarray:  # fmt: skip
    """What Llama 3's scaling divides each of `half` frequencies by, (half,) float32.

    1 for those that turn more than `high` times in the `context` it was first trained with,
    `factor` for those that turn fewer than `low` times, and in between a mean by turns. Equation
    eq-quantized-rope.
    """
    turns = context * base ** (-np.arange(half) / half) / (2 * np.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)  # of the frequency as it was
    return (1 / (share + (1 - share) / factor)).astype(np.float32)


# Llama 3.1's to 3.3's. The last one is a key of llama.cpp, the others are in our own files alone.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context_length": 8192}


def rope_fields(keys: Keys, tensors: gguf.GgufTensors, half: int) -> dict[str, Any]:
    """Our fields of the rotary positions. UserError for a scaling that we don't have."""
    base = as_written(keys.get("rope.freq_base", float, 10000.0))
    kind = keys.get("rope.scaling.type", str, "none")
    if ROPE_FACTORS in tensors:
        factors = tensors[ROPE_FACTORS]
        said = {name: type(value)(keys.get(f"rope.scaling.{name}", type(value), value))
                for name, value in LLAMA3.items()}  # fmt: skip
        factor = float(np.max(factors, initial=0))
        if factor > 0 and factors.shape == (half,) and said["high_freq_factor"] > said[
                "low_freq_factor"]:  # fmt: skip
            wanted = llama3_factors(half, base, factor, *said.values())
            if np.allclose(factors, wanted, rtol=1e-5, atol=0):
                low, high, context = said.values()
                return {"rope_base": base, "rope_scaling": "llama3", "rope_factor": factor,
                        "rope_low_freq_factor": low, "rope_high_freq_factor": high,
                        "rope_original_context": context}  # fmt: skip
        raise UserError(f"the factors of its rotary positions ({ROPE_FACTORS}) are not those of "
                        "Llama 3.1: choose another model")  # fmt: skip
    old = keys.get("rope.scale_linear", float, 1.0)  # in files of 2023
    if kind == "none" and old not in (0, 1):
        return {"rope_base": base, "rope_scaling": "linear", "rope_factor": as_written(old)}
    if kind == "none":
        return {"rope_base": base}
    if kind != "linear":
        raise UserError(f"expected rotary positions scaled by linear or llama3, got "
                        f"{quoted(kind)!r}: choose another model")  # fmt: skip
    factor = as_written(keys["rope.scaling.factor", float])
    return {"rope_base": base, "rope_scaling": "linear", "rope_factor": factor}


def _sizes(keys, tensors):
    """Our fields of a model's sizes, of every architecture."""
    name = "token_embd.weight"
    if name not in tensors or len(tensors.shapes[name]) != 2:
        raise UserError(f"expected a matrix {name}, and the file has none: choose another model")
    heads = keys["attention.head_count", int]
    return {
        "vocab_size": tensors.shapes[name][0], "dim": keys["embedding_length", int],
        "n_layers": keys["block_count", int], "n_heads": heads,
        "n_kv_heads": keys.get("attention.head_count_kv", int, heads),
        "hidden": keys["feed_forward_length", int], "context": keys["context_length", int],
        "n_predict": 1, "tied": "output.weight" not in tensors,
    }  # fmt: skip


def _windows(keys, layers):
    """Our fields of a sliding window, where a file has one: see `write_model`."""
    window = keys.get("attention.sliding_window", int, 0)
    pattern = keys.get("attention.sliding_window_pattern", np.ndarray, None)
    if not window:
        return {}
    if pattern is None:
        return {"sliding_window": window}
    if pattern.dtype != bool or pattern.shape != (layers,) or not pattern.any():
        raise UserError("expected a sliding_window_pattern with a truth value for each layer, got "
                        f"{quoted(pattern)}: choose another model")  # fmt: skip
    letters = "".join("S" if each else "L" for each in pattern)
    return {"sliding_window": window, "window_pattern": shortest(letters)}


def config_of(metadata: Mapping[str, Any], tensors: gguf.GgufTensors) -> ModelConfig:
    """The architecture of a model in a GGUF file. UserError, by name, for what ours can't be."""
    keys = Keys(metadata)
    if keys.get("expert_count", int, 0):
        raise UserError("it is a mixture of experts, and our model can't be that: choose another")
    sizes = _sizes(keys, tensors)
    heads, dim = sizes["n_heads"], sizes["dim"]
    if keys.name == "gpt2":
        eps = as_written(keys["attention.layer_norm_epsilon", float])
        return ModelConfig(**sizes, norm="layer", position="learned", mlp="gelu", bias=True,
                           norm_eps=eps)  # fmt: skip
    width = keys.get("attention.key_length", int, dim // heads if heads else 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, int, width) != width:
            raise UserError(f"expected {key} to be the width of a head, {width}, got "
                            f"{keys.get(key, int, width)}: choose another model")  # fmt: skip
    return ModelConfig(
        **sizes, head_width=0 if width * heads == dim else width,
        norm_eps=as_written(keys["attention.layer_norm_rms_epsilon", float]),
        bias=keys.name != "qwen2" and any(
            f"blk.0.{name}.bias" in tensors for name in ("attn_q", "attn_output", "ffn_up")),
        qkv_bias=keys.name == "qwen2", qk_norm=keys.name == "qwen3",
        **rope_fields(keys, tensors, width // 2), **_windows(keys, sizes["n_layers"]),
    )  # fmt: skip


def _without_copy(tensors):
    """The shapes of all tensors but an output matrix that is the embedding once more."""
    shapes, one, two = dict(tensors.shapes), "output.weight", "token_embd.weight"
    if one in shapes and two in shapes and tensors.kinds[one] == tensors.kinds[two]:
        if shapes[one] == shapes[two] and np.array_equal(tensors.raw(one), tensors.raw(two)):
            del shapes[one]
    shapes.pop(ROPE_FACTORS, None)  # `rope_fields` has read them
    return shapes


def read_model(
    path: str | Path, context: int | None = None
) -> tuple[ModelConfig, Weights, dict[str, Any]]:
    """The model in a GGUF file, where its weights stay; and all of the file's metadata.

    UserError for what our model can't be, and for damage. context: a smaller one than the model's.
    """
    metadata, tensors = gguf.read(path)
    whole = config_of(metadata, tensors)
    shapes = _without_copy(tensors)
    whole = replace(whole, tied="output.weight" not in shapes)
    config = cut_context(whole, context)
    table = table_of(whole, ARCHITECTURES[metadata["general.architecture"]])
    if whole.bias:  # of attention alone, or of the MLP alone: the others are zero
        table = {name: parts for name, parts in table.items()
                 if not name.endswith("_bias") or all(part.name in shapes for part in parts)}
    check_shapes(table, shapes, path)
    learned = table["positions"][0].name if "positions" in table else None

    def piece(name: str) -> Piece:
        found = tensors.piece(name)
        return found.cut(config.context) if name == learned else found

    return config, stored_from(config, table, piece, path), metadata


def metadata_of(config: ModelConfig, architecture: str, kind: str, name: str) -> dict[str, Any]:
    """The keys that llama.cpp needs of a model, except for the tokenizer's."""
    keys = {
        "context_length": config.context, "embedding_length": config.dim,
        "block_count": config.n_layers, "feed_forward_length": config.hidden,
        "attention.head_count": config.n_heads, "attention.head_count_kv": config.n_kv_heads,
        "vocab_size": config.vocab_size,
    }  # fmt: skip
    if architecture == "gpt2":
        keys["attention.layer_norm_epsilon"] = float(config.norm_eps)
    else:
        keys |= {
            "attention.layer_norm_rms_epsilon": float(config.norm_eps),
            "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
            "rope.dimension_count": config.head_dim, "rope.freq_base": float(config.rope_base),
        }  # fmt: skip
    if config.rope_scaling == "linear" and architecture != "gpt2":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope_factor)}
    if config.rope_scaling == "llama3" and architecture != "gpt2":
        keys |= {
            "rope.scaling.low_freq_factor": float(config.rope_low_freq_factor),
            "rope.scaling.high_freq_factor": float(config.rope_high_freq_factor),
            "rope.scaling.original_context_length": config.rope_original_context,
        }
    if config.sliding_window:
        keys["attention.sliding_window"] = config.sliding_window
        if config.window_pattern != "S":
            letters = (config.window_pattern * config.n_layers)[: config.n_layers]
            keys["attention.sliding_window_pattern"] = np.array([c == "S" for c in letters])
    general = {"architecture": architecture, "name": name, "file_type": FILE_TYPES[kind]}
    if kind == "Q8_0":
        general["quantization_version"] = 2  # of the blocks' layout
    return {f"general.{key}": value for key, value in general.items()} | {
        f"{architecture}.{key}": value for key, value in keys.items()}  # fmt: skip


def _kind(name, shape, kind):
    """The type of a tensor in a file of this kind: vectors and positions stay float32.

    Rows that are no whole blocks of Q8_0 become float16.
    """
    if len(shape) == 1 or name.startswith("position_embd"):
        return "F32"
    return "F16" if kind == "Q8_0" and shape[-1] % 32 else kind


def _check_known(config, family):
    """UserError, by name, for a model of this family that llama.cpp has no code for."""
    if config.mlp == "gelu_exact":
        raise UserError("llama.cpp's gpt2 has mlp gelu, and this model gelu_exact: it can't be "
                        "exported; export it to Hugging Face's format")  # fmt: skip
    if config.rope_scaling == "llama3" and family in ("qwen2", "qwen3"):
        raise UserError(f"llama.cpp has rope_scaling llama3 for llama alone, and this is a model "
                        f"of the family {family}: export it to Hugging Face's format")  # fmt: skip
    if family == "qwen2" and config.head_dim * config.n_heads != config.dim:
        raise UserError(f"llama.cpp's qwen2 has heads of dim / n_heads channels, and this model's "
                        f"have {config.head_dim}: export it to Hugging Face's format")  # fmt: skip


def write_model(
    path: str | Path, config: ModelConfig, weights: Weights, kind: str = "F16",
    tokenizer_metadata: Mapping[str, Any] | None = None, name: str = "nanoeuler",
) -> list[str]:  # fmt: skip
    """Write a model as a GGUF file for llama.cpp; sentences say what is not in it.

    kind: F32, F16, BF16 or Q8_0. tokenizer_metadata: the keys tokenizer.ggml.*, without which
    llama.cpp opens no file. UserError for a model that none of its architectures computes.
    """
    if kind not in FILE_TYPES:
        raise UserError(f"expected {', '.join(FILE_TYPES)}, got {quoted(kind)!r}: choose one of "
                        "them")  # fmt: skip
    family, said = family_of(config), left_out(config)
    _check_known(config, family)
    if config.sliding_window:
        said.append(f"llama.cpp may ignore the window of {config.sliding_window} tokens, and then "
                    "computes something else after as many")  # fmt: skip
    architecture = "llama" if family == "mistral" else family
    target = target_of(config, family)
    shapes, make = exported(config, weights, table_of(target, ARCHITECTURES[architecture]))
    factors = None
    if config.rope_scaling == "llama3" and architecture != "gpt2":
        factors = llama3_factors(
            config.head_dim // 2, config.rope_base, config.rope_factor,
            config.rope_low_freq_factor, config.rope_high_freq_factor,
            config.rope_original_context,
        )  # fmt: skip
        shapes[ROPE_FACTORS] = factors.shape
    metadata = metadata_of(target, architecture, kind, name) | dict(tokenizer_metadata or {})
    kinds = {each: _kind(each, shape, kind) for each, shape in shapes.items()}
    gguf.write(path, metadata, shapes,
               lambda each: factors if each == ROPE_FACTORS else make(each), kinds)  # fmt: skip
    return said
