# Made from book/19a-quantized-files.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-quantized-llama2c
"""Checkpoints of llama2.c: versions 0, 1 and 2 of its .bin are read, and version 0 is written.

Leaves out its tokenizer.bin (nanoeuler/tokenizer).
"""

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nanoeuler.errors import UserError, quoted
from nanoeuler.files import check_regular, replacing
from nanoeuler.interop.families import (
    Layout,
    Table,
    cut_context,
    exported,
    family_of,
    left_out,
    table_of,
    target_of,
    weights_from,
)
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.layers import rope_tables
from nanoeuler.model.weights import Weights

MAGIC = 0x616B3432  # "ak42", stored backwards at the beginning of every version but the first
HEADER = 256  # bytes of the header of those versions


# Its matrices are those of Llama; each is stored for all layers, one after the other.
LAYOUT = Layout(
    {
        "embedding": ("tok_embeddings",), "norm": ("norm",), "output": ("output",),
        "norm1": ("attention_norm.{}",), "wqkv": ("wq.{}", "wk.{}", "wv.{}"), "wo": ("wo.{}",),
        "norm2": ("ffn_norm.{}",), "w_up": ("w1.{}", "w3.{}"), "w_down": ("w2.{}",),
    },
    paired=True,
)  # fmt: skip
ORDER = {  # the names, in the order of each version's file; freq_cis is RoPE's tables
    0: "tok_embeddings attention_norm wq wk wv wo ffn_norm w1 w2 w3 norm freq_cis output",
    1: "attention_norm ffn_norm norm tok_embeddings wq wk wv wo w1 w2 w3 output",
    2: "attention_norm ffn_norm norm tok_embeddings wq wk wv wo w1 w2 w3 output",
}


def _header(data):
    """(version, the seven sizes, tied, group size, where the numbers begin) of a file; ValueError.
    """
    if len(data) < 28:
        raise ValueError("it is shorter than a header")
    if struct.unpack_from("<I", data)[0] != MAGIC:
        sizes = struct.unpack_from("<7i", data)
        return 0, (*sizes[:5], abs(sizes[5]), sizes[6]), sizes[5] > 0, 0, 28
    if len(data) < HEADER:
        raise ValueError("it is shorter than a header")
    version, *sizes, tied = struct.unpack_from("<i7iB", data, 4)
    if version not in (1, 2):
        raise ValueError(f"it is of version {version}, and we read 0, 1 and 2")
    group = struct.unpack_from("<i", data, 37)[0] if version == 2 else 0
    if tied > 1 or (version == 2 and group < 1):
        raise ValueError("its header is damaged")
    return version, tuple(sizes), bool(tied), group, HEADER


def _config(sizes, tied):
    """The `ModelConfig` of the seven numbers of a header; ValueError."""
    dim, hidden, layers, heads, kv, vocab, context = sizes
    try:
        return ModelConfig(vocab_size=vocab, dim=dim, n_layers=layers, n_heads=heads, hidden=hidden,
                           n_kv_heads=kv, context=context, n_predict=1, tied=tied)  # fmt: skip
    except UserError as error:
        raise ValueError(str(error)) from None


def in_order(config: ModelConfig, table: Table, version: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a file's tensors in the order of its version."""
    shapes = {part.name: part.shape for parts in table.values() for part in parts}
    found = []
    for stem in ORDER[version].split():
        if stem == "freq_cis":  # cosines, then sines, which nobody needs
            found.append((stem, (2, config.context, config.head_dim // 2)))
            continue
        names = [f"{stem}.{i}.weight" for i in range(config.n_layers)]
        single = f"{stem}.weight"
        found += [(name, shapes[name]) for name in [single, *names] if name in shapes]
    return found


def _places(config, version, group, start, table):
    """{name: (first byte, shape, whether in int8)} and where the file should end; ValueError."""
    places, at = {}, start
    for name, shape in in_order(config, table, version):
        n = math.prod(shape)
        packed = version == 2 and len(shape) == 2
        if packed and n % group:
            raise ValueError(f"{name} has {n} numbers, which are no whole groups of {group}")
        places[name] = at, shape, packed
        at += n + n // group * 4 if packed else 4 * n
    return places, at


def _reader(data, places, group) -> Callable[[str], np.ndarray]:
    """A function that gives each tensor as float32: int8 times a scale for each group, or as it is.
    """

    def read(name: str) -> np.ndarray:
        at, shape, packed = places[name]
        n = math.prod(shape)
        if not packed:
            return data[at : at + 4 * n].view("<f4").reshape(shape)
        q = data[at : at + n].view(np.int8).reshape(-1, group)
        scale = data[at + n : at + n + n // group * 4].view("<f4")
        with np.errstate(invalid="ignore", over="ignore"):  # the caller looks for it
            return (q * scale[:, None]).reshape(shape)

    return read


def read_model(path: str | Path, context: int | None = None) -> tuple[ModelConfig, Weights]:
    """The model in a .bin of llama2.c, as float32. UserError for a file of another length.

    context: a smaller one than the model's.
    """
    path = Path(path)
    check_regular(path)
    try:
        with open(path, "rb") as file:
            if path.stat().st_size == 0:
                raise ValueError("it is empty")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        version, sizes, tied, group, start = _header(data)
        config = _config(sizes, tied)
        table = table_of(config, LAYOUT)
        places, end = _places(config, version, group, start, table)
        if end != len(data):
            raise ValueError(f"it has {len(data)} bytes, and by its header it should have {end}")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check the path and "
                        "the permissions") from None  # fmt: skip
    except ValueError as error:
        raise UserError(f"expected a checkpoint of llama2.c, but {path}: {quoted(error, 200)}: "
                        "fetch it again") from None  # fmt: skip
    read = _reader(np.frombuffer(data, np.uint8), places, group)
    config = cut_context(config, context)
    return config, weights_from(config, table, read, path)


# What run.c has no code for, with the values that it has.
FIXED: Mapping[str, Any] = {
    "position": "rope", "bias": False, "qkv_bias": False, "qk_norm": False, "sliding_window": 0,
    "norm_eps": 1e-5, "rope_base": 10000.0, "rope_scaling": "none", "head_width": 0,
}  # fmt: skip


def write_model(path: str | Path, config: ModelConfig, weights: Weights) -> list[str]:
    """Write a model as version 0 of llama2.c's .bin, float32; sentences say what is not in it.

    UserError for a model that run.c does not compute.
    """
    for name, value in FIXED.items():
        if getattr(config, name) != value:
            raise UserError(f"llama2.c has {name} {value}, and this model {getattr(config, name)}: "
                            "export it to another format")  # fmt: skip
    target = target_of(config, family_of(config))
    table = table_of(target, LAYOUT)
    shapes, make = exported(config, weights, table)
    vocab = config.vocab_size if config.tied else -config.vocab_size
    sizes = (config.dim, config.hidden, config.n_layers, config.n_heads, config.n_kv_heads,
             vocab, config.context)  # fmt: skip
    freq_cis = np.stack(rope_tables(config.context, config.head_dim, config.angles))
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(struct.pack("<7i", *sizes))
        for name, _ in in_order(target, table, 0):
            tensor = freq_cis if name == "freq_cis" else make(name)
            file.write(np.ascontiguousarray(tensor, "<f4").data)
    return left_out(config)
