"""Models of others in safetensors: headers, names, configurations and logits, in and out."""

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nanoeuler.engines.cpu.engine import CpuEngine
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.errors import UserError
from nanoeuler.files import project_root
from nanoeuler.interop import families, safetensors_file
from nanoeuler.interop.huggingface import open_folder, read_config, read_folder, write_folder
from nanoeuler.interop.safetensors_file import Tensors, as_float32, from_float32, read_header
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import Weights, initialise

DATA = Path(os.environ.get("NANOEULER_DATA", project_root() / ".." / "shared" / "data"))
HF = DATA / "interop" / "hf"
FOLDERS = sorted(path.name for path in HF.glob("*")) or ["none"]
needs_data = pytest.mark.skipif(not HF.is_dir(), reason=f"needs interop/hf in {DATA} "
                                                        "(NANOEULER_DATA)")  # fmt: skip

ENGINES = {"reference": ReferenceEngine, "cpu": CpuEngine}
LLAMA = ModelConfig(vocab_size=40, dim=24, n_layers=3, n_heads=4, n_kv_heads=2, hidden=32,
                    context=16, n_predict=1)  # fmt: skip
GPT2 = replace(LLAMA, n_kv_heads=4, norm="layer", position="learned", mlp="gelu", bias=True,
               tied=True)  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "llama tied": replace(LLAMA, tied=True, norm_eps=1e-3, rope_base=5e5),
    "llama biases": replace(LLAMA, bias=True),
    "llama linear": replace(LLAMA, rope_scaling="linear", rope_factor=4.0),
    "llama 3": replace(LLAMA, rope_scaling="llama3", rope_factor=8.0, rope_original_context=8,
                       head_width=10),
    "mistral": replace(LLAMA, sliding_window=4, head_width=8),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen2 windows": replace(LLAMA, qkv_bias=True, sliding_window=4, window_pattern="LLS"),
    "qwen3": replace(LLAMA, qk_norm=True, head_width=10),
    "qwen3 windows": replace(LLAMA, qk_norm=True, sliding_window=3, window_pattern="SL"),
    "gpt2": GPT2,
    "gpt2 exact": replace(GPT2, mlp="gelu_exact", tied=False),
}  # fmt: skip


def drawn(config, seed=0):
    """Weights in which every tensor has numbers of its own, biases and gains too."""
    weights, rng = initialise(config, seed), np.random.default_rng(seed)
    for tensor in weights.values():
        tensor += 0.1 * rng.standard_normal(tensor.shape).astype(np.float32)
    return weights


def same(one, two):
    """Whether two `Weights` have the same names and the same bits."""
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


# ---- The file


def test_a_file_of_the_library_is_read_and_ours_is_read_by_the_library(tmp_path):
    rng = np.random.default_rng(0)
    made = {"a": rng.normal(size=(3, 5)).astype("f4"), "b": rng.normal(size=7).astype("f2"),
            "c.d": np.arange(4), "e": np.zeros((0, 2), "f4")}  # fmt: skip
    save_file(made, tmp_path / "theirs.safetensors", {"format": "pt"})
    tensors = Tensors([tmp_path / "theirs.safetensors"])
    assert {*tensors} == {*made} and len(tensors) == 4
    assert tensors.shapes == {name: array.shape for name, array in made.items()}
    assert tensors.kinds == {"a": "F32", "b": "F16", "c.d": "I64", "e": "F32"}
    for name in "abe":
        assert np.array_equal(tensors[name], made[name]) and tensors[name].dtype == np.float32
    with pytest.raises(UserError, match="expected 'c.d' to be F32, F16 or BF16, got I64|c.d"):
        tensors["c.d"]
    shapes = {name: made[name].shape for name in "ab"}
    for kind in ("F32", "F16"):
        path = tmp_path / f"{kind}.safetensors"
        safetensors_file.write(path, shapes, lambda name: made[name].astype("f4"), kind)
        found = load_file(path)
        dtype = {"F32": "f4", "F16": "f2"}[kind]
        assert all(np.array_equal(found[name], made[name].astype(dtype)) for name in "ab")
    assert read_header(path)[2] == {"format": "pt"}


def test_bf16_is_the_nearest_and_of_two_nearest_the_even_one():
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(size=5000), rng.normal(size=100) * 1e-39,
                        [0, -0.0, 1, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.3e38]])  # fmt: skip
    x = x.astype("f4")
    bits = from_float32(x, "BF16")
    low = (x.view(np.uint32) >> 16).astype(np.uint32)
    below, above = ((each << 16).view("f4").astype("f8") for each in (low, low + 1))
    to_low, to_high = np.abs(x - below), np.abs(above - x)
    nearest = np.where(to_low < to_high, low, low + 1)
    wanted = np.where(to_low == to_high, low + (low & 1), nearest)
    assert np.array_equal(bits, wanted)
    assert (to_low == to_high).sum() >= 3  # ties were among them
    again = as_float32(bits.view(np.uint8), "BF16")
    assert np.array_equal(from_float32(again, "BF16"), bits)  # exact for what is bf16 already


@pytest.mark.parametrize("kind, value", [("F16", 7e4), ("BF16", 3.4e38)])
def test_a_number_that_is_too_large_is_refused(kind, value):
    with pytest.raises(UserError, match=f"is more than {kind} can hold"):
        from_float32(np.array([1, -value], "f4"), kind)


def file_of(path, header, data=b"\0" * 24, length=None):
    """Write a safetensors file with this header, a dict or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    n = len(text) if length is None else length
    path.write_bytes(n.to_bytes(8, "little") + text + data)
    return path


def entry(begin=0, end=24, shape=(2, 3), dtype="F32", **more):
    return {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end], **more}


HOSTILE = {
    "a length that is too large": ({}, dict(length=1 << 40), "should have 1099511627776 bytes"),
    "a length of 64 bits": ({}, dict(length=(1 << 64) - 1), "should have"),
    "no JSON": (b"{nothing", {}, "Expecting"),
    "no UTF-8": (b'{"\xff": 1}', {}, "decode"),
    "a list": ([], {}, "no JSON object"),
    "deep nesting": (b"[" * 100_000, {}, "recursion"),
    "a number of many digits": (b'{"a": ' + b"9" * 5000 + b"}", {}, "digits|described"),
    "a name twice": (b'{"a": 1, "a": 2}', {}, "has a twice"),
    "metadata that is no text": ({"__metadata__": {"a": 1}, "a": entry()}, {}, "not text"),
    "a missing field": ({"a": {"dtype": "F32", "shape": [6]}}, {}, "not described"),
    "a field too many": ({"a": entry(more=1)}, {}, "not described"),
    "an unknown type": ({"a": entry(dtype="F33")}, {}, "unknown type F33"),
    "a type that is a list": ({"a": entry(dtype=["F32"])}, {}, "unknown type"),
    "a negative axis": ({"a": entry(shape=(-2, -3))}, {}, "has the shape"),
    "a truth value as an axis": ({"a": entry(shape=(True, 6))}, {}, "has the shape"),
    "a fraction as an axis": ({"a": entry(shape=(2.0, 3))}, {}, "has the shape"),
    "a huge axis": ({"a": entry(shape=(2**62, 2**62))}, {}, "has 24 bytes"),
    "an axis of 65 bits": ({"a": entry(shape=(2**64,))}, {}, "has the shape"),
    "too many axes": ({"a": entry(shape=(1,) * 40)}, {}, "has the shape"),
    "offsets the wrong way round": ({"a": entry(24, 0)}, {}, "-24 bytes"),
    "one offset": ({"a": {**entry(), "data_offsets": [24]}}, {}, "has the offsets"),
    "too few bytes for its shape": ({"a": entry(0, 20)}, {}, "has 20 bytes"),
    "an end behind the file's": ({"a": entry(shape=(6000,), end=24000)}, {}, "promises 24000"),
    "bytes that nobody has": ({"a": entry(shape=(5,), end=20)}, {}, "promises 20 bytes"),
    "a hole": ({"a": entry(4, 24, (5,))}, {}, "leaves a hole"),
    "an overlap": ({"a": entry(0, 24), "b": entry(20, 24, (1,))}, {}, "overlaps"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_in_one_line(tmp_path, case):
    header, more, said = HOSTILE[case]
    with pytest.raises(UserError, match=said) as refusal:
        read_header(file_of(tmp_path / "model.safetensors", header, **more))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 500


@pytest.mark.parametrize("size", range(0, 8))
def test_a_file_shorter_than_a_length_is_refused(tmp_path, size):
    (tmp_path / "model.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(UserError, match=f"it has {size} bytes"):
        read_header(tmp_path / "model.safetensors")


def mutants(data, rng, n):
    """Copies of a file with bytes changed, cut out, doubled or put in, most of them in front."""
    for _ in range(n):
        made = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(0, max(1, min(len(made), 600))))
            kind = rng.integers(0, 5)
            if kind == 0:
                made[at : at + 1] = bytes([rng.integers(0, 256)])
            elif kind == 1:
                del made[at : at + int(rng.integers(1, 9))]
            elif kind == 2:
                made[at:at] = made[at : at + int(rng.integers(1, 30))]
            elif kind == 3:
                made[at : at + 8] = b"\xff" * 8
            else:
                del made[int(rng.integers(0, len(made) + 1)) :]
        yield bytes(made)


def test_hundreds_of_damaged_folders_are_refused_or_read(tmp_path):
    """Never another exception than UserError, and never much more memory than the file has."""
    write_folder(tmp_path / "whole", LLAMA, drawn(LLAMA))
    names = ("model.safetensors", "config.json")
    whole = {name: (tmp_path / "whole" / name).read_bytes() for name in names}
    rng, refused = np.random.default_rng(0), 0
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    most = 8 * sum(map(len, whole.values())) + 2_000_000  # bytes: weights, their header, Python
    for name in names:
        for data in mutants(whole[name], rng, 300):
            for each in names:
                (damaged / each).write_bytes(data if each == name else whole[each])
            tracemalloc.start()
            try:
                read_folder(damaged)
            except UserError as error:
                refused += 1
                assert "\n" not in str(error) and str(error).isprintable()
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert peak < most
    assert refused > 300


# ---- Folders


def test_a_folder_in_several_files_is_the_same_model(tmp_path):
    weights = drawn(LLAMA)
    write_folder(tmp_path / "one", LLAMA, weights)
    write_folder(tmp_path / "many", LLAMA, weights, most=9000)
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 3
    assert {*open_folder(tmp_path / "one")} == {*open_folder(tmp_path / "many")}
    for name in ("one", "many"):
        config, found = read_folder(tmp_path / name)
        assert config == LLAMA and same(found, weights)


@pytest.mark.parametrize("change, said", [
    (lambda index, folder: index.update(weight_map=[]), "weight_map"),
    (lambda index, folder: index["weight_map"].update({"more.weight": "x.safetensors"}),
     "which model.safetensors.index.json names"),
    (lambda index, folder: index["weight_map"].update({"more.weight": "../a.safetensors"}),
     "beside it"),
    (lambda index, folder: index["weight_map"].update({"more.weight": "/a.safetensors"}),
     "beside it"),
    (lambda index, folder: index["weight_map"].update({"more.weight": 3}), "beside it"),
    (lambda index, folder: index["weight_map"].update({"more.weight": "model.bin"}), "beside it"),
    (lambda index, folder: index["weight_map"].update(
        {"more.weight": index["weight_map"]["model.norm.weight"]}), "to hold more.weight"),
])  # fmt: skip
def test_a_damaged_index_is_refused(tmp_path, change, said):
    write_folder(tmp_path / "m", LLAMA, drawn(LLAMA), most=9000)
    path = tmp_path / "m" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index, tmp_path)
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=said):
        read_folder(tmp_path / "m")


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in "ab":
        save_file({"x": np.zeros(2, "f4")}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match="which another file of the same model holds"):
        Tensors([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


@pytest.mark.parametrize("name, said", [
    ("pytorch_model.bin", "pickle"), ("pytorch_model.bin.index.json", "pickle"),
    ("model.pth", "pickle"), ("adapter_config.json", "adapter"),
    ("readme.txt", "expected model.safetensors"),
])  # fmt: skip
def test_a_folder_without_safetensors_is_refused_by_name(tmp_path, name, said):
    (tmp_path / "config.json").write_text(json.dumps(families.record_of(LLAMA, "llama", "float32")))
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=said):
        read_folder(tmp_path)


def test_a_folder_that_holds_something_is_not_written_to(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="new or empty"):
        write_folder(tmp_path, LLAMA, drawn(LLAMA))


def changed(tmp_path, change, config=LLAMA):
    """A folder with a model whose tensors, a dict, were changed."""
    write_folder(tmp_path / "m", config, drawn(config))
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    return tmp_path / "m"


Q, K = (f"model.layers.1.self_attn.{each}_proj.weight" for each in "qk")
WRONG = {
    "one is missing": (lambda t: t.pop(Q), f"expected a tensor {Q} .*found none"),
    "one is transposed": (
        lambda t: t.update({K: t[K].T.copy()}),
        r"of the shape \[12, 24\] by its configuration, found \[24, 12\]"),
    "one is strange": (lambda t: t.update({"score.weight": t[Q]}), "holds a tensor score.weight"),
    "one has experts": (lambda t: t.update({"model.layers.0.mlp.experts.0.w1.weight": t[Q]}),
                        "holds a tensor model.layers.0.mlp.experts"),
    "one is of integers": (lambda t: t.update({Q: t[Q].astype("i4")}), "to be F32, F16 or BF16"),
    "one is not finite": (lambda t: t[Q].__setitem__((0, 0), np.nan), "not finite"),
    "one is infinite": (lambda t: t[Q].__setitem__((0, 0), np.inf), "not finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_fit_are_refused(tmp_path, case):
    change, said = WRONG[case]
    with pytest.raises(UserError, match=said):
        read_folder(changed(tmp_path, change))


def test_buffers_are_ignored_and_names_may_lack_their_prefix(tmp_path):
    def old(tensors):
        for name in [*tensors]:
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 16, 16), "f4")
        tensors["h.0.attn.masked_bias"] = np.ones((), "u1")

    config, weights = read_folder(changed(tmp_path, old, GPT2))
    assert config == GPT2 and same(weights, drawn(GPT2))


def test_a_tied_model_may_hold_its_embedding_twice_but_not_two_embeddings(tmp_path):
    def twice(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    tied = replace(LLAMA, tied=True)
    folder = changed(tmp_path, twice, tied)
    config, weights = read_folder(folder)
    assert config == tied and same(weights, drawn(tied))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="tie_word_embeddings"):
        read_folder(folder)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_smaller_context_is_cut_and_a_larger_one_refused(tmp_path, config):
    weights = drawn(config)
    write_folder(tmp_path / "m", config, weights)
    small, cut = read_folder(tmp_path / "m", context=5)
    assert small == replace(config, context=5)
    for name in weights:
        whole = weights[name][:5] if name == "positions" else weights[name]
        assert np.array_equal(cut[name], whole), name
    for wrong in (0, 17, True, "5"):
        with pytest.raises(UserError, match="expected a context from 1 to 16"):
            read_folder(tmp_path / "m", context=wrong)


# ---- Configurations


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
def test_what_is_written_is_read_again(tmp_path, name, kind):
    """Exactly in F32, and in BF16 and F16 of numbers that are such; by the library as well."""
    config = CONFIGS[name]
    weights = drawn(config)
    if kind != "F32":
        for tensor in weights.values():
            rounded = from_float32(tensor, kind)
            tensor[...] = as_float32(rounded.view(np.uint8).reshape(-1), kind).reshape(tensor.shape)
    assert write_folder(tmp_path / "m", config, weights, kind) == []
    found, again = read_folder(tmp_path / "m")
    assert found == config == read_config(tmp_path / "m")
    assert same(weights, again)
    record = json.loads((tmp_path / "m" / "config.json").read_text())
    assert record["model_type"] == name.split()[0]


@pytest.mark.parametrize("config, target", [
    (replace(LLAMA, n_predict=3), LLAMA),
    (replace(LLAMA, step_size=0.5), LLAMA),
    (replace(GPT2, bias=False), GPT2),
    (replace(LLAMA, sliding_window=4, window_pattern="SL"),
     replace(LLAMA, sliding_window=4, window_pattern="SL", qkv_bias=True)),
], ids=["heads", "step", "no biases", "mixed windows"])  # fmt: skip
def test_what_a_family_says_otherwise_computes_the_same(tmp_path, config, target):
    weights = drawn(config)
    said = write_folder(tmp_path / "m", config, weights)
    assert len(said) == (config.n_predict > 1) + (config.step_size != 1)
    found, again = read_folder(tmp_path / "m")
    assert found == target
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 9))
    ours, _ = forward(ReferenceEngine(), config, weights, tokens)
    theirs, _ = forward(ReferenceEngine(), found, again, tokens)
    assert np.abs(ours[:, :, :1] - theirs).max() <= 1e-5  # half a step is exact; sums are not


@pytest.mark.parametrize("change, said", [
    (dict(integrator="heun"), "integrator euler, and this model heun"),
    (dict(repeat=3), "repeat 1, and this model 3"),
    (dict(position="learned"), "norm layer, and this model rms"),
    (dict(norm="layer"), "norm rms, and this model layer"),
    (dict(mlp="gelu"), "mlp swiglu, and this model gelu"),
    (dict(mlp="relu2"), "mlp swiglu, and this model relu2"),
    (dict(logit_cap=15.0), "logit_cap 0, and this model 15"),
    (dict(qk_norm=True, bias=True), "bias False, and this model True"),
    (dict(sliding_window=4, bias=True), "bias False, and this model True"),
])  # fmt: skip
def test_a_model_that_no_family_computes_is_refused_by_name(tmp_path, change, said):
    config = replace(LLAMA, **change)
    with pytest.raises(UserError, match=said):
        write_folder(tmp_path / "m", config, drawn(config))
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("change, said", [
    (dict(position="learned", norm="layer", mlp="swiglu", n_kv_heads=4), "mlp gelu"),
    (dict(position="learned", norm="layer", mlp="gelu"), "n_kv_heads 4, and this model 2"),
    (dict(position="learned", norm="layer", mlp="gelu", n_kv_heads=4, head_width=8), "head_dim 6"),
])  # fmt: skip
def test_what_gpt2_lacks_is_refused_by_name(change, said):
    with pytest.raises(UserError, match=said):
        families.family_of(replace(LLAMA, **change))


SMALL = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 40,
         "intermediate_size": 32}  # fmt: skip


def test_fields_that_are_left_out_have_the_family_s_defaults():
    llama = families.config_of({"model_type": "llama", **SMALL})
    assert (llama.norm_eps, llama.rope_base, llama.context) == (1e-6, 1e4, 2048)
    assert (llama.n_kv_heads, llama.tied, llama.bias, llama.sliding_window) == (4, False, False, 0)
    mistral = families.config_of({"model_type": "mistral", **SMALL, "num_attention_heads": 8,
                                  "hidden_size": 32})  # fmt: skip
    assert (mistral.n_kv_heads, mistral.sliding_window, mistral.context) == (8, 4096, 131072)
    qwen2 = families.config_of({"model_type": "qwen2", **SMALL, "num_key_value_heads": None})
    assert (qwen2.qkv_bias, qwen2.bias, qwen2.sliding_window) == (True, False, 0)
    assert (qwen2.n_kv_heads, qwen2.context, qwen2.norm_eps) == (4, 32768, 1e-6)
    qwen3 = families.config_of({"model_type": "qwen3", **SMALL, "num_key_value_heads": 2})
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias) == (128, True, False)
    gpt2 = families.config_of({"model_type": "gpt2"})
    assert gpt2 == ModelConfig(
        vocab_size=50257, dim=768, n_layers=12, n_heads=12, n_kv_heads=12, hidden=3072,
        context=1024, n_predict=1, norm="layer", position="learned", mlp="gelu", bias=True,
        tied=True)  # fmt: skip
    assert families.config_of({"model_type": "gpt2", "activation_function": None}) == gpt2


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize("old, new", [
    ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
     {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}),
    ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
     {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}),
    ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "type": "llama3", **LLAMA3}},
     {"full_attention": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}}),
])  # fmt: skip
def test_transformers_4_and_5_describe_the_same_rotary_positions(old, new):
    record = {"model_type": "llama", **SMALL}
    one = families.config_of(record | old)
    assert one == families.config_of(record | {"rope_parameters": new})
    assert one.rope_base == old["rope_theta"]
    kind = old.get("rope_scaling", {})
    assert one.rope_scaling == kind.get("rope_type", kind.get("type", "none"))
    assert one.rope_factor == kind.get("factor", 1.0)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_a_nan_is_refused_and_no_zero(kind, bits):
    with pytest.raises(UserError, match=f"a weight of nan is more than {kind} can hold"):
        from_float32(np.array([0, bits], np.uint32).view(np.float32), kind)


@pytest.mark.parametrize("family, more, window, pattern", [
    ("mistral", {"sliding_window": None}, 0, "S"),
    ("mistral", {"sliding_window": 8}, 8, "S"),
    ("mistral", {"sliding_window": 8, "use_sliding_window": False}, 8, "S"),
    ("mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, 8, "S"),
    ("qwen2", {"sliding_window": 8}, 0, "S"),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 8, "S"),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, 8, "LSSS"),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, 0, "S"),
    ("qwen3", {"sliding_window": 8, "use_sliding_window": True,
               "layer_types": ["sliding_attention", "full_attention"] * 2}, 8, "SL"),
    ("qwen3", {"sliding_window": None, "use_sliding_window": True}, 0, "S"),
])  # fmt: skip
def test_which_layers_have_a_window(family, more, window, pattern):
    record = {"model_type": family, **SMALL, "num_hidden_layers": 4, "num_key_value_heads": 4}
    config = families.config_of(record | more)
    assert (config.sliding_window, config.window_pattern) == (window, pattern)


@pytest.mark.parametrize("more, bias, zero", [
    ({"attention_bias": True, "mlp_bias": True}, True, set()),
    ({"attention_bias": True}, True, {"w_up_bias", "w_down_bias"}),
    ({"mlp_bias": True}, True, {"wqkv_bias", "wo_bias"}),
])  # fmt: skip
def test_biases_of_a_part_of_llama_are_biases_of_which_others_are_zero(more, bias, zero):
    record = {"model_type": "llama", **SMALL, **more}
    assert families.config_of(record).bias is bias and families.absent(record) == zero


REFUSED = {
    "mixtral": ({"model_type": "mixtral"}, "got mixtral, which has a mixture of experts"),
    "gemma": ({"model_type": "gemma2"}, "got gemma2, which has"),
    "phi3": ({"model_type": "phi3"}, "got phi3"),
    "neox": ({"model_type": "gpt_neox"}, "got gpt_neox"),
    "smollm3": ({"model_type": "smollm3"}, "without rotary positions"),
    "bloom": ({"model_type": "bloom"}, "ALiBi"),
    "unknown": ({"model_type": "of tomorrow"}, "got of tomorrow: choose"),
    "none": ({}, "without a model_type"),
    "a list": ({"model_type": ["llama"]}, "families"),
    "code": ({"auto_map": {"AutoModel": "modeling.Model"}}, "code of its own"),
    "gptq": ({"quantization_config": {"quant_method": "gptq"}}, "quantized by gptq"),
    "awq": ({"quantization_config": {"quant_method": "awq"}}, "quantized by awq"),
    "odd quantization": ({"quantization_config": [1]}, "quantized by"),
    "experts": ({"num_local_experts": 8}, "mixture of experts"),
    "nope": ({"no_rope_layers": [1, 0]}, "without rotary positions"),
    "alibi": ({"alibi": True}, "ALiBi"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "got 'yarn'"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "got 'dynamic'"),
    "yarn of 5": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "got 'yarn'"),
    "two bases": ({"rope_parameters": {"a": {"rope_theta": 1e4}, "b": {"rope_theta": 1e6}}},
                  "different kinds"),
    "half a head": ({"partial_rotary_factor": 0.5}, "a part of each head"),
    "half a head of 5": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "a part of each"),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, "expected factor to be a number"),
    "relu": ({"hidden_act": "relu"}, "expected the activation silu, got 'relu'"),
    "a text as a size": ({"hidden_size": "24"}, "expected hidden_size to be a whole number"),
    "a truth value": ({"num_hidden_layers": True}, "expected num_hidden_layers"),
    "a negative size": ({"hidden_size": -24}, "dim must be"),
    "too many layers": ({"num_hidden_layers": 10**9}, "n_layers must be"),
    "not a number": ({"rms_norm_eps": float("nan")}, "norm_eps must be"),
    "layers by name": ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4,
                        "layer_types": ["chunked_attention"] * 2}, "layer_types"),
    "gelu of another kind": ({"model_type": "gpt2", "activation_function": "relu"}, "activation"),
    "scores by layer": ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scaled"),
    "cross-attention": ({"model_type": "gpt2", "add_cross_attention": True}, "cross-attention"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_our_model_cannot_be_is_refused_by_name_before_a_weight_is_looked_for(tmp_path, case):
    more, said = REFUSED[case]
    record = {"model_type": "llama", **SMALL, **more}
    if case == "none":
        del record["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=said) as refusal:
        read_folder(tmp_path)  # which holds no weights, and nobody asks for them
    assert "\n" not in str(refusal.value)


def test_configurations_of_random_values_are_refused_or_taken():
    rng = np.random.default_rng(0)
    odd = [None, True, -1, 0, 1, 2.5, 10**30, float("inf"), "text", [], [1], {}, {"a": 1}]
    keys = sorted({key for each in families.DEFAULTS.values() for key in each} | {
        "rope_scaling", "rope_parameters", "layer_types", "quantization_config", "auto_map"})
    for _ in range(2000):
        record = {"model_type": str(rng.choice([*families.FAMILIES])), **SMALL}
        for key in rng.choice(keys, 2):
            record[str(key)] = odd[rng.integers(len(odd))]
        try:
            assert isinstance(families.config_of(record), ModelConfig)
        except UserError as error:
            assert "\n" not in str(error)


# ---- Against transformers


@needs_data
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_transformers(name, engine):
    config, weights = read_folder(HF / name)
    with np.load(HF / name / "expected.npz") as wanted:
        got, _ = forward(ENGINES[engine](), config, weights, wanted["ids"])
        logits, gap = wanted["logits"], float(wanted["float64_gap"])
    bound = 5e-5 * max(1, np.sqrt(np.mean(logits**2))) + 3 * gap  # the README's
    assert np.abs(got[:, :, 0] - logits).max() <= bound


@needs_data
@pytest.mark.parametrize("name", FOLDERS)
def test_the_loss_and_its_gradient_are_those_of_transformers(name):
    """The norm of the gradient of each of their tensors, through our table."""
    from nanoeuler.model.transformer import head_weights, loss_and_gradients, loss_scale

    config, weights = read_folder(HF / name)
    with np.load(HF / name / "expected.npz") as wanted:
        ids, loss = wanted["ids"], float(wanted["loss"])
        names, norms = wanted["param_names"], wanted["grad_norm_and_7_samples"][:, 0]
    tokens, targets = ids[:, :-1], ids[:, 1:, None]
    scale, dw = loss_scale(targets, head_weights(1)), weights.zeros_like()
    sums = loss_and_gradients(ReferenceEngine(), config, weights, tokens, targets, scale, dw)
    assert abs(float(sums[0] * scale[0]) - loss) <= 1e-5 * loss
    family = families.family_name(json.loads((HF / name / "config.json").read_text()))
    _, make = families.exported(config, dw, families.table_of(config, families.FAMILIES[family]))
    for each, norm in zip(names, norms, strict=True):
        assert abs(np.linalg.norm(make(str(each))) - norm) <= 1e-4 * norm + 1e-6, each


@needs_data
@pytest.mark.parametrize("name", FOLDERS)
def test_an_export_is_the_folder_again(tmp_path, name):
    """All tensors but the buffers, bit by bit, under transformers' names."""
    config, weights = read_folder(HF / name)
    theirs = open_folder(HF / name)
    write_folder(tmp_path / "m", config, weights, {*theirs.kinds.values()}.pop())
    ours = open_folder(tmp_path / "m")
    prefix = "" if "wte.weight" in theirs else "transformer."
    names = {each: each if each in ours else each.replace(prefix, "transformer.", 1) if prefix
             else f"transformer.{each}" for each in theirs
             if not families.BUFFERS.fullmatch(each)}  # fmt: skip
    assert {*names.values()} == {*ours}
    for one, two in names.items():
        assert np.array_equal(theirs.raw(one), ours.raw(two)), one


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_opens_an_export_and_says_the_same(tmp_path, name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    config, weights = CONFIGS[name], drawn(CONFIGS[name])
    write_folder(tmp_path / "m", config, weights)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float32, attn_implementation="eager")  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 16))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    ours, _ = forward(ReferenceEngine(), config, weights, tokens)
    bound = 5e-5 * max(1, np.sqrt(np.mean(theirs**2)))
    assert np.abs(ours[:, :, 0] - theirs).max() <= bound


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_transformers_in_float64(tmp_path, monkeypatch, name):
    """Of every tensor, to 1e-10 of its largest number.

    transformers computes norms, angles and softmax in float32 in any model: here, where it asks
    for float32 it gets float64. What is left are sums of at most 64 float64 terms in other orders.
    """
    from nanoeuler.model.transformer import head_weights, loss_and_gradients, loss_scale

    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    config, weights = CONFIGS[name], drawn(CONFIGS[name])
    write_folder(tmp_path / "m", config, weights)
    for word in ("float32", "float"):
        monkeypatch.setattr(torch, word, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    record = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    model = transformers.AutoModelForCausalLM.from_config(
        record, dtype=torch.float64, attn_implementation="eager")  # fmt: skip
    exact = Weights(config, np.float64, np.float64(weights.flat))
    family = families.family_name(json.loads((tmp_path / "m" / "config.json").read_text()))
    table = families.table_of(config, families.FAMILIES[family])
    shapes, make = families.exported(config, exact, table)
    model.load_state_dict({each: torch.tensor(make(each)) for each in shapes}, strict=False)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 13))
    logits = model(torch.tensor(ids[:, :-1])).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(ids[:, 1:].ravel()))
    loss.backward()
    targets, dw = ids[:, 1:, None], exact.zeros_like()
    scale = loss_scale(targets, head_weights(1))
    sums = loss_and_gradients(ReferenceEngine(), config, exact, ids[:, :-1], targets, scale, dw)
    assert abs(float(sums[0] * scale[0]) - loss.item()) <= 1e-10
    make = families.exported(config, dw, table)[1]
    theirs = {each: tensor.grad.numpy() for each, tensor in model.named_parameters()}
    assert {*theirs} == {*shapes}
    for each, wanted in theirs.items():
        assert np.abs(make(each) - wanted).max() <= 1e-10 * np.abs(wanted).max(), each
