"""Other people's models: shapes for benchmarks, and small ones read for tests.

Files are in Hugging Face's format. The package's own reader is in the room `interop`; this one
shares no code with it, and checks no name, shape or type.
"""

import json
import os
from pathlib import Path

import numpy as np

from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import Weights

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("NANOEULER_DATA", ROOT.parent / "shared/data")) / "interop/hf"

PUBLISHED = {  # by their config.json; the numbers are random
    "smollm2-135m": ModelConfig(
        vocab_size=49152, dim=576, n_layers=30, n_heads=9, n_kv_heads=3, hidden=1536,
        context=2048, n_predict=1, tied=True,
    ),
    "llama-1b": ModelConfig(  # Llama 3.2
        vocab_size=128256, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, hidden=8192,
        context=2048, n_predict=1, tied=True,
    ),
}  # fmt: skip


def tensors(path):
    """Name -> float64 array of a safetensors file of F32 and BF16."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + at for at in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            bits = np.frombuffer(raw[begin:end], "<u2").astype(np.uint32) << 16
            values = bits.view(np.float32)
        else:
            assert entry["dtype"] == "F32", name
            values = np.frombuffer(raw[begin:end], "<f4")
        found[name] = values.reshape(entry["shape"]).astype(np.float64)
    return found


def config_of(said):
    """The `ModelConfig` of a config.json of GPT-2, Llama, Mistral or Qwen2."""
    if said["model_type"] == "gpt2":
        return ModelConfig(
            said["vocab_size"], said["n_embd"], said["n_layer"], said["n_head"], said["n_head"],
            4 * said["n_embd"], said["n_positions"], 1, norm="layer", position="learned",
            mlp="gelu", bias=True, tied=True, norm_eps=said["layer_norm_epsilon"],
        )  # fmt: skip
    rope = said.get("rope_parameters") or said | (said.get("rope_scaling") or {})
    scaled = {}
    if rope.get("rope_type") == "llama3":
        scaled = {
            "rope_scaling": "llama3", "rope_factor": rope["factor"],
            "rope_low_freq_factor": rope["low_freq_factor"],
            "rope_high_freq_factor": rope["high_freq_factor"],
            "rope_original_context": rope["original_max_position_embeddings"],
        }  # fmt: skip
    windowed = said["model_type"] == "mistral"
    return ModelConfig(
        said["vocab_size"], said["hidden_size"], said["num_hidden_layers"],
        said["num_attention_heads"], said["num_key_value_heads"], said["intermediate_size"],
        said["max_position_embeddings"], 1, tied=said["tie_word_embeddings"],
        norm_eps=said["rms_norm_eps"], rope_base=rope["rope_theta"],
        head_width=said.get("head_dim", 0), qkv_bias=said["model_type"] == "qwen2",
        sliding_window=said["sliding_window"] if windowed else 0, **scaled,
    )  # fmt: skip


GPT2 = {
    "norm1": "ln_1.weight", "norm1_bias": "ln_1.bias", "wqkv": "attn.c_attn.weight",
    "wqkv_bias": "attn.c_attn.bias", "wo": "attn.c_proj.weight", "wo_bias": "attn.c_proj.bias",
    "norm2": "ln_2.weight", "norm2_bias": "ln_2.bias", "w_up": "mlp.c_fc.weight",
    "w_up_bias": "mlp.c_fc.bias", "w_down": "mlp.c_proj.weight", "w_down_bias": "mlp.c_proj.bias",
    "embedding": "wte.weight", "positions": "wpe.weight", "norm": "ln_f.weight",
    "norm_bias": "ln_f.bias",
}  # fmt: skip
LLAMA = {  # several are one matrix of ours; theirs are (outputs, inputs)
    "norm1": ["input_layernorm.weight"], "norm2": ["post_attention_layernorm.weight"],
    "wqkv": [f"self_attn.{x}_proj.weight" for x in "qkv"], "wo": ["self_attn.o_proj.weight"],
    "wqkv_bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "w_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "w_down": ["mlp.down_proj.weight"],
    "embedding": ["embed_tokens.weight"], "norm": ["norm.weight"],
}  # fmt: skip


def theirs(config, found, name):
    """The tensor `name` of ours as it is in their file, in our layout."""
    block, kind = name.split(".")[1:-1], name.rpartition(".")[2]
    if config.position == "learned":
        start = "transformer." if "transformer.wte.weight" in found else ""
        return found[start + "".join(f"h.{i}." for i in block) + GPT2[kind]]
    if kind == "output":
        return found["lm_head.weight"].T
    parts = [found["model." + "".join(f"layers.{i}." for i in block) + x] for x in LLAMA[kind]]
    whole = np.concatenate(parts)
    return whole.T if whole.ndim == 2 and kind != "embedding" else whole


def model(folder, dtype):
    """The config and the weights of a model in `folder`."""
    config = config_of(json.loads((folder / "config.json").read_text()))
    weights, found = Weights(config, dtype), tensors(folder / "model.safetensors")
    for name, tensor in weights.items():
        tensor[...] = theirs(config, found, name)
    return config, weights
