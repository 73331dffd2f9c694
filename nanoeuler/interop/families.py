# Made from book/19-other-peoples-models.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-others-names
"""Names of tensors by family: one table for import and export, and each family's config.json.

Leaves out the files (safetensors_file.py, gguf.py). Letters: C channels, H query heads, G key/value
heads, D head width, F MLP width, V vocabulary.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.errors import UserError, quoted
from nanoeuler.model.config import ModelConfig, parameter_shapes
from nanoeuler.model.stored import Part as StoredPart
from nanoeuler.model.stored import Piece, Stored, StoredWeights
from nanoeuler.model.weights import Weights


class Layout(NamedTuple):
    """How a family stores a model: its names for our tensors, and which matrices it transposes."""

    names: Mapping[str, tuple[str, ...]]  # ours -> theirs, side by side; {} is the layer
    prefix: str = ""            # before each name but that of the output matrix
    as_ours: frozenset[str] = frozenset({"embedding", "positions"})  # not transposed
    paired: bool = False        # whether RoPE rotates the pairs (2i, 2i + 1)


class Part(NamedTuple):
    """A tensor of theirs, and how it becomes the next columns of one of ours."""

    name: str
    shape: tuple[int, ...]  # theirs
    width: int              # how many of our columns it is
    turned: bool            # whether it is the transpose of ours
    heads: int              # how many heads have their rows in pairs; 0: none


GPT2 = Layout(
    {
        "embedding": ("wte",), "positions": ("wpe",), "norm": ("ln_f",), "output": ("lm_head",),
        "norm1": ("h.{}.ln_1",), "wqkv": ("h.{}.attn.c_attn",), "wo": ("h.{}.attn.c_proj",),
        "norm2": ("h.{}.ln_2",), "w_up": ("h.{}.mlp.c_fc",), "w_down": ("h.{}.mlp.c_proj",),
    },
    prefix="transformer.",
    as_ours=frozenset({"embedding", "positions", "wqkv", "wo", "w_up", "w_down"}),
)  # fmt: skip
LLAMA = Layout(
    {
        "embedding": ("embed_tokens",), "norm": ("norm",), "output": ("lm_head",),
        "norm1": ("layers.{}.input_layernorm",),
        "wqkv": tuple(f"layers.{{}}.self_attn.{each}_proj" for each in "qkv"),
        "q_norm": ("layers.{}.self_attn.q_norm",), "k_norm": ("layers.{}.self_attn.k_norm",),
        "wo": ("layers.{}.self_attn.o_proj",),
        "norm2": ("layers.{}.post_attention_layernorm",),
        "w_up": ("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"),
        "w_down": ("layers.{}.mlp.down_proj",),
    },
    prefix="model.",
)  # fmt: skip
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA}
# What some files hold beside the weights: masks and tables that follow from the configuration.
BUFFERS = re.compile(r".*\.attn\.(masked_)?bias|.*rotary_emb\.inv_freq")
Table = dict[str, list[Part]]  # our name -> the parts that it is made of


def _widths(config, own, n):
    """How many columns each of `n` parts has that make our tensor `own` together; None: all."""
    H, G, D = config.n_heads, config.n_kv_heads, config.head_dim
    if n == 1:
        return [config.vocab_size if own == "output" else None]
    return {"wqkv": [H * D, G * D, G * D], "w_up": [config.hidden] * 2}[own]


def table_of(config: ModelConfig, layout: Layout) -> Table:
    """For each tensor of a model, the tensors of a family that it is made of, side by side.

    A model that predicts several tokens keeps only the first.
    """
    table: Table = {}
    for name, ours in parameter_shapes(config).items():
        block, _, own = name.rpartition(".")
        stem, kind = own.removesuffix("_bias"), "bias" if own.endswith("_bias") else "weight"
        theirs, parts = layout.names[stem], []
        for at, width in enumerate(_widths(config, stem, len(theirs))):
            shape = (*ours[:-1], width or ours[-1])
            turned = len(shape) == 2 and stem not in layout.as_ours
            full = f"{theirs[at].format(block.removeprefix('block.'))}.{kind}"
            full = full if stem == "output" else layout.prefix + full
            heads = (config.n_heads, config.n_kv_heads, 0)[at] if stem == "wqkv" else 0
            parts.append(Part(full, shape[::-1] if turned else shape, shape[-1], turned,
                              heads if layout.paired else 0))  # fmt: skip
        table[name] = parts
    return table


# %% sec-others-pairs
def halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows (heads D, ...), where RoPE rotates (2i, 2i + 1) of a head, in our order (i, i + D/2)."""
    split = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def pairs_from_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `halves_from_pairs`."""
    split = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def check_shapes(table: Table, shapes: Mapping[str, tuple[int, ...]], source: object) -> None:
    """UserError unless `source` holds the tensors of the table in their shapes, and no others."""
    wanted = {part.name: part.shape for parts in table.values() for part in parts}
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            found = f"found {[*shapes[name]]}" if name in shapes else "found none"
            raise UserError(f"{source}: expected a tensor {name} of the shape {[*shape]} by its "
                            f"configuration, {found}: fetch the model again")  # fmt: skip
    strange = [name for name in shapes if name not in wanted and not BUFFERS.fullmatch(name)]
    if strange:
        raise UserError(f"{source} holds a tensor {quoted(strange[0])}, which no model of its "
                        "family has, so that it would compute something else: choose another "
                        "model")  # fmt: skip


def cut_context(config: ModelConfig, context: int | None) -> ModelConfig:
    """The config with a smaller context, for less memory; None leaves it as it is."""
    if context is None:
        return config
    if type(context) is not int or not 1 <= context <= config.context:
        raise UserError(f"expected a context from 1 to {config.context}, which the model has "
                        f"learned, got {context!r}")  # fmt: skip
    return replace(config, context=context)


def stored_from(
    config: ModelConfig, table: Table, pieces: Callable[[str], Piece], source: object = "it"
) -> StoredWeights:
    """A model's weights, left in the file where `pieces(name)` finds its tensors.

    `check_shapes` has accepted them. UserError for a number that isn't finite.
    """
    stored = {}
    for name, shape in parameter_shapes(config).items():
        parts = []
        for part in table.get(name, ()):
            piece = pieces(part.name)
            if not piece.finite():
                raise UserError(f"{source}: {part.name} holds numbers that are not finite: fetch "
                                "the model again, or choose another")  # fmt: skip
            rows = np.arange(part.width)
            order = halves_from_pairs(rows, part.heads) if part.heads else None
            parts.append(StoredPart(piece, part.turned, order))
        stored[name] = Stored(shape, parts)
    return StoredWeights(config, stored)


def weights_from(
    config: ModelConfig, table: Table, read: Callable[[str], np.ndarray], source: object = "it"
) -> Weights:
    """The weights of a model whose tensors `read(name)` gives as float32, one at a time.

    `check_shapes` has accepted them. UserError for a number that isn't finite.
    """
    weights = Weights(config)
    for name, parts in table.items():
        into, at = weights[name], 0
        for part in parts:
            tensor = read(part.name)
            if not np.isfinite(tensor).all():
                raise UserError(f"{source}: {part.name} holds numbers that are not finite: fetch "
                                "the model again, or choose another")  # fmt: skip
            if part.heads:
                tensor = halves_from_pairs(tensor, part.heads)
            into[..., at : at + part.width] = tensor.T if part.turned else tensor
            at += part.width
    return weights


def exported(
    config: ModelConfig, weights: Weights, table: Table
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """The shapes of a family's tensors, and a function that makes each from ours, as float32.

    `table` describes the model as exported, with one predicted token. A bias that we lack
    is zero, and the step size is multiplied into what writes to the residual stream.
    """
    shapes, places = {}, {}
    for ours, parts in table.items():
        at = 0
        for part in parts:
            shapes[part.name], places[part.name] = part.shape, (ours, at, part)
            at += part.width

    def make(name: str) -> np.ndarray:
        ours, at, part = places[name]
        if ours not in weights:
            return np.zeros(part.shape, np.float32)
        tensor = weights[ours][..., at : at + part.width]
        if re.search(r"\.(wo|w_down)(_bias)?$", ours) and config.step_size != 1:
            tensor = tensor * np.float32(config.step_size)
        tensor = tensor.T if part.turned else tensor
        return pairs_from_halves(tensor, part.heads) if part.heads else tensor

    return shapes, make


# %% sec-others-config
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "num_key_value_heads": None, "head_dim": None, "attention_bias": False, "mlp_bias": False,
    "sliding_window": None,
}  # fmt: skip
_QWEN = {
    "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768,
    "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip
# What a field is that a config.json leaves out: the defaults of transformers' classes.
DEFAULTS = {
    "gpt2": {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
        "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True, "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
    },
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "qwen2": {**_LLAMA, **_QWEN},
    "qwen3": {**_LLAMA, **_QWEN, "head_dim": 128},
}  # fmt: skip
GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}
SILUS = ("silu", "swish")  # two names of one function
# Fields in which null says something; in all others it is as if they were not there.
MEANT = ("n_inner", "num_key_value_heads", "head_dim", "sliding_window")


# Families that people try, and something in each that our model doesn't do.
OTHERS = {
    "mixtral": "a mixture of experts", "qwen2_moe": "a mixture of experts",
    "qwen3_moe": "a mixture of experts", "deepseek_v2": "a mixture of experts",
    "deepseek_v3": "a mixture of experts", "gpt_oss": "a mixture of experts",
    "olmoe": "a mixture of experts", "llama4": "a mixture of experts",
    "gemma": "norms with 1 + gain, and scaled embeddings", "gemma2": "four norms a layer",
    "gemma3": "four norms a layer", "gemma3_text": "four norms a layer",
    "phi": "attention and MLP in parallel", "phi3": "fused matrices, and scaled rotations",
    "gpt_neox": "attention and MLP in parallel", "gptj": "attention and MLP in parallel",
    "falcon": "attention and MLP in parallel", "bloom": "ALiBi positions",
    "mpt": "ALiBi positions", "smollm3": "layers without rotary positions",
    "mamba": "no attention", "qwen3_next": "layers of linear attention",
}  # fmt: skip


def refusals(record: Mapping[str, Any]) -> Iterable[str]:
    """What in a config.json makes a model another one than ours, each in a few words."""
    if record.get("auto_map"):
        yield "code of its own (auto_map), which we don't run"
    if record.get("quantization_config"):
        method = record["quantization_config"]
        method = method.get("quant_method") if type(method) is dict else method
        yield f"weights quantized by {quoted(method or 'an unnamed method')}"
    if experts := [name for name in ("num_local_experts", "num_experts", "n_routed_experts")
                   if record.get(name)]:  # fmt: skip
        yield f"a mixture of experts ({experts[0]})"
    if record.get("no_rope_layers") or record.get("no_rope_layer_interval"):
        yield "layers without rotary positions (no_rope_layers)"
    if record.get("alibi") or record.get("position_embedding_type") not in (None, "absolute"):
        yield "another kind of positions than rotary or learned ones (ALiBi, for example)"
    if record.get("partial_rotary_factor") not in (None, 1, 1.0):
        yield "rotary positions in a part of each head (partial_rotary_factor)"
    if record.get("add_cross_attention") or record.get("is_encoder_decoder"):
        yield "cross-attention"
    if record.get("scale_attn_by_inverse_layer_idx") or record.get("scale_attn_weights") is False:
        yield "attention that is scaled in another way (scale_attn_weights and its like)"
    if record.get("attn_logit_softcapping") or record.get("final_logit_softcapping"):
        yield "logits with a soft cap"


def family_name(record: Mapping[str, Any]) -> str:
    """The family of a config.json, one of `FAMILIES`. UserError for what our model can't be."""
    kind = record.get("model_type")
    if type(kind) is not str or kind not in FAMILIES:
        known = ", ".join([*FAMILIES][:-1])
        why = f", which has {OTHERS[kind]}" if type(kind) is str and kind in OTHERS else ""
        raise UserError(f"expected a model of the families {known} or {[*FAMILIES][-1]}, got "
                        f"{quoted(kind or 'one without a model_type')}{why}: choose another "
                        "model")  # fmt: skip
    for what in refusals(record):
        raise UserError(f"this {kind} model has {what}, and our model can't be that: choose "
                        "another model")  # fmt: skip
    return kind


KINDS = {int: "a whole number", float: "a number", bool: "true or false"}  # of a JSON value


def _value(record, name, kind):
    """record[name]; UserError unless it has this type. A whole number is a float, too."""
    value = record[name]
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise UserError(f"config.json: expected {name} to be {KINDS[kind]}, got "
                        f"{quoted(value)!r}: restore it")  # fmt: skip
    if kind is float:
        value = float(value) if abs(value) < 1e300 else 0.0  # too large: ModelConfig refuses 0
    return value


def _flat_rope(record):
    """theta and the scaling's dict of a config.json, written by transformers 4 or 5."""
    new = record.get("rope_parameters")
    if type(new) is dict and new and all(type(each) is dict for each in new.values()):
        kinds = [*new.values()]  # one for each kind of layer
        if any(each != kinds[0] for each in kinds):
            raise UserError("its kinds of layers have rotary positions of different kinds, and "
                            "all of ours have the same: choose another model")  # fmt: skip
        new = kinds[0]
    old = record.get("rope_scaling")
    scaling = new if type(new) is dict else old
    if scaling is not None and type(scaling) is not dict:
        raise UserError(f"config.json: expected rope_scaling to be an object, got "
                        f"{quoted(scaling)!r}: restore it")  # fmt: skip
    return {"rope_theta": record["rope_theta"], **(scaling or {})}


def rope_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields of the rotary positions in a config.json. UserError for another scaling."""
    rope = _flat_rope(record)
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError("it has rotary positions in a part of each head (partial_rotary_factor), "
                        "and ours turn all of it: choose another model")  # fmt: skip
    kind = rope.get("rope_type", rope.get("type")) or "default"
    fields = {"rope_base": _value(rope, "rope_theta", float)}
    if kind == "default":
        return fields
    if kind not in ("linear", "llama3"):
        raise UserError(f"expected rotary positions scaled by linear or llama3, got "
                        f"{quoted(kind)!r}: choose another model")  # fmt: skip
    rope = {"factor": None, "low_freq_factor": None, "high_freq_factor": None,
            "original_max_position_embeddings": None, **rope}  # fmt: skip
    fields |= {"rope_scaling": kind, "rope_factor": _value(rope, "factor", float)}
    if kind == "llama3":
        fields["rope_low_freq_factor"] = _value(rope, "low_freq_factor", float)
        fields["rope_high_freq_factor"] = _value(rope, "high_freq_factor", float)
        name = "original_max_position_embeddings"
        fields["rope_original_context"] = _value(rope, name, int)
    return fields


def shortest(pattern: str) -> str:
    """The shortest text that, repeated, begins with `pattern`: SSS is S, LLSLL is LLS."""
    n = next(n for n in range(1, len(pattern) + 1) if pattern.startswith(pattern[n:]))
    return pattern[:n]


def window_fields(family: str, record: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Our fields of the sliding window in a config.json: which layers have one, and how wide."""
    window = record["sliding_window"]
    every = family == "mistral"  # which reads no other field of its windows
    if window is None or family == "llama" or not (every or record.get("use_sliding_window", True)):
        return {}
    window = _value(record, "sliding_window", int)
    kinds = None if every else record.get("layer_types")
    if kinds is None:
        first = 0 if every else _value(record, "max_window_layers", int)
        pattern = "".join("S" if i >= first else "L" for i in range(layers))
    else:
        letters = {"sliding_attention": "S", "full_attention": "L"}
        good = type(kinds) is list and len(kinds) == layers
        if not good or not all(type(each) is str and each in letters for each in kinds):
            raise UserError(f"config.json: expected layer_types to be {layers} times "
                            "sliding_attention or full_attention, got "
                            f"{quoted(kinds)}: restore it")  # fmt: skip
        pattern = "".join(letters[each] for each in kinds)
    if "S" not in pattern:
        return {}
    return {"sliding_window": window, "window_pattern": shortest(pattern)}


def _gpt2_config(record):
    """The `ModelConfig` of GPT-2's config.json, completed by the defaults."""
    kind = record["activation_function"]
    if type(kind) is not str or kind not in GELUS:
        raise UserError(f"expected the activation {' or '.join(GELUS)}, got {quoted(kind)!r}: "
                        "choose another model")  # fmt: skip
    dim, heads = (_value(record, name, int) for name in ("n_embd", "n_head"))
    hidden = 4 * dim if record["n_inner"] is None else _value(record, "n_inner", int)
    return ModelConfig(
        vocab_size=_value(record, "vocab_size", int), dim=dim, hidden=hidden, n_heads=heads,
        n_layers=_value(record, "n_layer", int), n_kv_heads=heads, n_predict=1,
        context=_value(record, "n_positions", int), norm="layer", position="learned",
        mlp=GELUS[kind], bias=True, tied=_value(record, "tie_word_embeddings", bool),
        norm_eps=_value(record, "layer_norm_epsilon", float),
    )  # fmt: skip


def _llama_config(family, record):
    """The `ModelConfig` of a config.json of Llama and its descendants, completed likewise."""
    if record["hidden_act"] not in SILUS:
        raise UserError(f"expected the activation silu, got {quoted(record['hidden_act'])!r}: "
                        "choose another model")  # fmt: skip
    dim, heads, layers = (_value(record, name, int) for name in (
        "hidden_size", "num_attention_heads", "num_hidden_layers"))  # fmt: skip
    kv = record["num_key_value_heads"]
    kv = heads if kv is None else _value(record, "num_key_value_heads", int)
    width = 0 if record["head_dim"] is None else _value(record, "head_dim", int)
    biases = [_value(record, name, bool) for name in ("attention_bias", "mlp_bias")]
    return ModelConfig(
        vocab_size=_value(record, "vocab_size", int), dim=dim, n_layers=layers, n_heads=heads,
        n_kv_heads=kv, hidden=_value(record, "intermediate_size", int), n_predict=1,
        context=_value(record, "max_position_embeddings", int),
        bias=any(biases) and family != "qwen2", qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3", tied=_value(record, "tie_word_embeddings", bool),
        head_width=0 if width * heads == dim else width,
        norm_eps=_value(record, "rms_norm_eps", float),
        **rope_fields(record), **window_fields(family, record, min(layers, 10**4)),
    )  # fmt: skip


def config_of(record: Mapping[str, Any]) -> ModelConfig:
    """The architecture that a config.json describes, written by transformers 4 or 5.

    UserError, by name, for what our model can't be.
    """
    family = family_name(record)
    said = {name: value for name, value in record.items()
            if value is not None or name in MEANT}  # fmt: skip
    record = {**DEFAULTS[family], **said}
    return _gpt2_config(record) if family == "gpt2" else _llama_config(family, record)


def absent(record: Mapping[str, Any]) -> set[str]:
    """Biases that our `bias=True` includes but this config.json's model lacks: they are zero."""
    if record["model_type"] not in ("llama", "qwen3"):
        return set()
    attention, mlp = {"wqkv_bias", "wo_bias"}, {"w_up_bias", "w_down_bias"}
    return (set() if record.get("attention_bias") else attention) | (
        set() if record.get("mlp_bias") else mlp)  # fmt: skip


# %% sec-others-out
def _expect(config, family, **wanted):
    """UserError for the first field of a config that a family does not have like this."""
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise UserError(f"{family} has {name} {value}, and this model {getattr(config, name)}: "
                            "it can't be exported; train one with the other value")  # fmt: skip


def family_of(config: ModelConfig) -> str:
    """The family whose models compute what this one does. UserError, by name, if there is none.

    Of several predicted tokens the first one counts; a step size other than 1 can be multiplied
    into the weights.
    """
    _expect(config, "every family that we write", integrator="euler", repeat=1, logit_cap=0)
    if config.position == "learned":
        _expect(config, "GPT-2 (the family with learned positions)", norm="layer",
                n_kv_heads=config.n_heads, head_dim=config.dim // config.n_heads,
                qk_norm=False, sliding_window=0)  # fmt: skip
        if config.mlp not in GELUS.values():
            raise UserError("GPT-2 (the family with learned positions) has mlp gelu, and this "
                            f"model {config.mlp}: it can't be exported; train one with the other "
                            "value")  # fmt: skip
        return "gpt2"
    _expect(config, "each family with rotary positions", norm="rms", mlp="swiglu")
    if config.qk_norm:
        _expect(config, "Qwen3 (the family with qk_norm)", bias=False, qkv_bias=False)
        return "qwen3"
    mixed = config.sliding_window and config.window_pattern != "S"
    if config.qkv_bias or mixed:
        _expect(config, "Qwen2", bias=False)
        return "qwen2"
    if config.sliding_window:
        _expect(config, "Mistral (the family with a window)", bias=False)
        return "mistral"
    return "llama"


def target_of(config: ModelConfig, family: str) -> ModelConfig:
    """What a reader will take the exported model for: one predicted token, the family's biases."""
    config = replace(config, n_predict=1, step_size=1.0, init="scaled")
    if family == "gpt2":
        return replace(config, bias=True, qkv_bias=False)
    return replace(config, qkv_bias=family == "qwen2")


def left_out(config: ModelConfig) -> list[str]:
    """What the export of a model changes or leaves out, each in a sentence."""
    said = []
    if config.n_predict > 1:
        said.append(f"of {config.n_predict} predicted tokens only the next one is exported")
    if config.step_size != 1:
        said.append(f"the step size {config.step_size} is multiplied into the weights")
    return said


def _windows(config, family):
    """The fields of config.json for a sliding window, or for none."""
    if family == "mistral":
        return {"sliding_window": config.sliding_window}
    if family == "llama":
        return {}
    pattern = config.window_pattern * config.n_layers
    layers = pattern[: config.n_layers] if config.sliding_window else "L" * config.n_layers
    kinds = {"S": "sliding_attention", "L": "full_attention"}
    return {
        "use_sliding_window": bool(config.sliding_window),
        "sliding_window": config.sliding_window or None,
        "max_window_layers": len(layers) - len(layers.lstrip("L")),
        "layer_types": [kinds[each] for each in layers],
    }


def _rotary(config):
    """The fields of config.json for rotary positions, as transformers 4 has them."""
    scaling: dict[str, Any] = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        scaling |= {
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_context,
        }
    scaled = config.rope_scaling != "none"
    return {"rope_theta": config.rope_base, "rope_scaling": scaling if scaled else None}


CLASSES = {  # of transformers
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip


def record_of(config: ModelConfig, family: str, dtype: str) -> dict[str, Any]:
    """The config.json of a model of this family, as transformers 4 writes it and 5 reads it."""
    both = {
        "architectures": [CLASSES[family]], "model_type": family, "torch_dtype": dtype,
        "vocab_size": config.vocab_size, "tie_word_embeddings": config.tied,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if family == "gpt2":
        return both | {
            "n_positions": config.context, "n_ctx": config.context, "n_embd": config.dim,
            "n_layer": config.n_layers, "n_head": config.n_heads, "n_inner": config.hidden,
            "activation_function": "gelu_new" if config.mlp == "gelu" else "gelu",
            "layer_norm_epsilon": config.norm_eps, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }  # fmt: skip
    more = {"attention_bias": config.bias} if family in ("llama", "qwen3") else {}
    more |= {"mlp_bias": config.bias} if family == "llama" else {}
    return both | more | _rotary(config) | _windows(config, family) | {
        "hidden_size": config.dim, "intermediate_size": config.hidden, "hidden_act": "silu",
        "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.context, "rms_norm_eps": config.norm_eps,
    }  # fmt: skip
