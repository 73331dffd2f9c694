"""GGUF and llama2.c: quantized blocks, hostile files, and models in and out."""

import lzma
import os
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_interop import CONFIGS, ENGINES, GPT2, LLAMA, drawn, mutants, same

from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.errors import UserError
from nanoeuler.files import project_root
from nanoeuler.interop import gguf, gguf_model, llama2c, quants
from nanoeuler.interop.huggingface import read_folder
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import forward

DATA = Path(os.environ.get("NANOEULER_DATA", project_root() / ".." / "shared" / "data"))
INTEROP = DATA / "interop"
needs_data = pytest.mark.skipif(not INTEROP.is_dir(), reason=f"needs interop in {DATA} "
                                                             "(NANOEULER_DATA)")  # fmt: skip
QUANTS = ["F16", "Q8_0", "Q4_1", "Q4_K_M"]


def unpacked(tmp_path, name):
    """The path of a GGUF file of the shared data, uncompressed."""
    path = tmp_path / Path(name).stem
    path.write_bytes(lzma.decompress((INTEROP / name).read_bytes()))
    return path


# ---- Blocks


def half(value):
    return np.float16(value).tobytes()


def test_blocks_that_a_hand_can_check():
    """One number of each block, and its neighbours, by the formulas of ggml."""
    q = bytes(range(16))  # the low nibbles are 0 to 15, the high ones 0
    found = quants.dequantize(np.frombuffer(half(0.5) + q, np.uint8), "Q4_0")
    assert found.tolist() == [0.5 * (n - 8) for n in range(16)] + [-4.0] * 16
    found = quants.dequantize(np.frombuffer(half(0.5) + half(3) + q, np.uint8), "Q4_1")
    assert found.tolist() == [0.5 * n + 3 for n in range(16)] + [3.0] * 16
    bits = struct.pack("<I", 1 << 3 | 1 << 20)
    found = quants.dequantize(np.frombuffer(half(0.5) + bits + q, np.uint8), "Q5_0")
    wanted = [0.5 * (n - 16) for n in range(16)] + [-8.0] * 16
    wanted[3] += 8
    wanted[20] += 8
    assert found.tolist() == wanted
    found = quants.dequantize(np.frombuffer(half(0.5) + half(3) + bits + q, np.uint8), "Q5_1")
    assert found.tolist() == [each + 11 for each in wanted]
    q = np.arange(-16, 16, dtype=np.int8).tobytes()
    found = quants.dequantize(np.frombuffer(half(0.25) + q, np.uint8), "Q8_0")
    assert found.tolist() == [0.25 * n for n in range(-16, 16)]


def slow_k(kind, block):
    """The 256 numbers of a K block, one by one, by the loops of its description."""
    d, out = (lambda at: float(np.frombuffer(block[at : at + 2], "<f2")[0])), []
    if kind == "Q6_K":
        low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
        for i in range(256):
            part, quarter, at = i // 128, i % 128 // 32, i % 32
            byte = low[64 * part + at + 32 * (quarter % 2)]
            nibble = byte >> 4 if quarter > 1 else byte & 15
            two = high[32 * part + at] >> 2 * quarter & 3
            out.append(d(208) * int(scales[i // 16]) * ((nibble | two << 4) - 32))
        return out
    s, fifth = block[4:16], block[16:48] if kind == "Q5_K" else bytes(32)
    packed = block[48:] if kind == "Q5_K" else block[16:]
    for i in range(256):
        j, at = i // 32, i % 32
        if j < 4:
            scale, least = s[j] & 63, s[j + 4] & 63
        else:
            scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4
            least = (s[j + 4] >> 4) | (s[j] >> 6) << 4
        byte = packed[32 * (j // 2) + at]
        q = (byte >> 4 if j % 2 else byte & 15) | (fifth[at] >> j & 1) << 4
        out.append(d(0) * scale * q - d(2) * least)
    return out


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_blocks_are_those_of_the_loops(kind):
    rng, size = np.random.default_rng(0), quants.KINDS[kind].size
    for _ in range(20):
        block = bytearray(rng.integers(0, 256, size, np.uint8).tobytes())
        for at in (208,) if kind == "Q6_K" else (0, 2):
            block[at : at + 2] = half(rng.normal())
        found = quants.dequantize(np.frombuffer(bytes(block), np.uint8), kind)
        wanted = slow_k(kind, bytes(block))
        # products of float32 are rounded: 3 times 2^-24 of the largest term
        assert np.abs(found - wanted).max() <= 2e-7 * 2 * 32 * 127 * 4


@pytest.mark.parametrize("kind", quants.KINDS)
def test_blocks_are_those_of_the_package_gguf(kind):
    theirs = pytest.importorskip("gguf", reason="gguf is not installed")
    rng, size = np.random.default_rng(0), quants.KINDS[kind].size
    raw = rng.integers(0, 256, (200, size), np.uint8)
    halves = {"Q6_K": [208], "Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "F32": [], "F16": [0],
              "BF16": []}.get(kind, [0, 2])  # fmt: skip
    for at in halves:
        raw[:, at : at + 2] = rng.normal(size=(200, 1)).astype("<f2").view(np.uint8)
    if kind in ("F32", "BF16"):
        raw[:, -1] = 63  # no infinities
    wanted = theirs.quants.dequantize(raw.reshape(-1), theirs.GGMLQuantizationType[kind])
    assert np.array_equal(quants.dequantize(raw.reshape(-1), kind), wanted.reshape(-1))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_q8_0_is_off_by_half_a_scale_at_most(scale):
    rng = np.random.default_rng(0)
    x = (scale * rng.standard_normal((300, 32))).astype("f4")
    x[0], x[1, 5] = 0, 40 * scale  # nothing, and one that is much larger than its neighbours
    raw = quants.quantize(x.reshape(-1), "Q8_0")
    d = raw.reshape(-1, 34)[:, :2].copy().view("<f2").astype("f8")
    again = quants.dequantize(raw, "Q8_0").reshape(x.shape)
    # The scale is rounded to float16: by 2^-11 of it, or by 2^-25 below float16's normal numbers.
    # So 127 of it reach to the largest number but for 127 times as much, which is less than half
    # a scale of the normal ones.
    bound = d / 2 + 127 * np.maximum(0, 2.0**-25 - d * 2.0**-11) + 1e-7 * scale
    assert (np.abs(again - x) <= bound).all()
    assert np.array_equal(quants.quantize(again.reshape(-1), "Q8_0"), raw) or scale == 1e-6


def test_unpacking_takes_some_megabytes_beside_its_result():
    """4 million numbers of each K type: a million at a time, in less than 3 times their 4 MB."""
    for kind in ("Q4_K", "Q5_K", "Q6_K"):
        raw = np.zeros((1 << 14) * quants.KINDS[kind].size, np.uint8)
        tracemalloc.start()
        try:
            out = quants.dequantize(raw, kind)
            assert tracemalloc.get_traced_memory()[1] < out.nbytes + 3 * 4 * quants.AT_ONCE
        finally:
            tracemalloc.stop()


def test_q8_0_refuses_what_it_cannot_hold():
    with pytest.raises(UserError, match="more than Q8_0 can hold"):
        quants.quantize(np.full(32, 1e7, "f4"), "Q8_0")


# ---- The file

TENSORS = {"a.weight": (3, 64), "b.weight": (5,)}
KINDS = {"a.weight": "Q8_0", "b.weight": "F32"}
METADATA = {
    "general.architecture": "llama", "text": "ö", "int": 7, "large": 1 << 40, "minus": -3,
    "float": 0.25, "yes": True, "texts": ["a", "", "b c"], "ints": [1, -2], "floats": [0.5, 1.0],
    "array": np.arange(3, dtype="u1"), "truths": [True, False], "empty": [],
}  # fmt: skip


def small(tmp_path):
    rng = np.random.default_rng(0)
    made = {name: rng.normal(size=shape).astype("f4") for name, shape in TENSORS.items()}
    gguf.write(tmp_path / "small.gguf", METADATA, TENSORS, made.__getitem__, KINDS)
    return tmp_path / "small.gguf", made


def test_what_is_written_is_read_again(tmp_path):
    path, made = small(tmp_path)
    metadata, tensors = gguf.read(path)
    assert metadata.keys() == METADATA.keys()
    for key, value in METADATA.items():
        found = metadata[key]
        assert np.array_equal(found, value) if key not in ("texts", "text") else found == value, key
        assert isinstance(found, np.ndarray) == isinstance(value, list | np.ndarray) or (
            key == "texts")  # fmt: skip
    assert type(metadata["yes"]) is bool and type(metadata["int"]) is int
    assert tensors.shapes == TENSORS and tensors.kinds == KINDS
    assert np.array_equal(tensors["b.weight"], made["b.weight"])
    assert np.abs(tensors["a.weight"] - made["a.weight"]).max() < 0.02


def test_the_package_gguf_reads_what_we_write(tmp_path):
    theirs = pytest.importorskip("gguf", reason="gguf is not installed")
    path, made = small(tmp_path)
    reader = theirs.GGUFReader(path)
    assert reader.get_field("text").contents() == "ö"
    assert reader.get_field("texts").contents() == ["a", "", "b c"]
    assert reader.get_field("ints").contents() == [1, -2]
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert np.array_equal(found["b.weight"].data, made["b.weight"])
    assert found["a.weight"].tensor_type.name == "Q8_0"


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def tensor(name="a", axes=(2,), code=0, offset=0):
    return text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, code, offset)


def file_of(keys=(), tensors=(), version=3, counts=None, data=bytes(64)):
    n = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, *n) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


NESTED = struct.pack("<IQ", 9, 1) * 40_000
HOSTILE = {
    "another magic": (b"GGML" + bytes(60), "does not begin with GGUF"),
    "nothing": (b"", "shorter than a header"),
    "version 1": (file_of(version=1), "version 1, and we read 2 and 3"),
    "the other order of bytes": (file_of(version=3 << 24), "in the other order"),
    "too many keys": (file_of(counts=(0, 1 << 60)), "inside its header|twice"),
    "too many tensors": (file_of(counts=(1 << 60, 0)), "inside its header|has .* axes"),
    "a long key": (file_of([struct.pack("<Q", 1 << 62)]), "inside its header"),
    "no UTF-8": (file_of([key(b"\xff", 4, bytes(4))]), "decode"),
    "a value of no type": (file_of([key("k", 99, bytes(8))]), "unknown type 99"),
    "a key twice": (file_of([key("k", 4, bytes(4))] * 2), "has k twice"),
    "a long array": (file_of([key("k", 9, struct.pack("<IQ", 4, 1 << 60))]), "inside its header"),
    "many texts": (file_of([key("k", 9, struct.pack("<IQ", 8, 1 << 60))]), "fewer bytes"),
    "deep nesting": (file_of([key("k", 9, NESTED)]), "nested more than"),
    "an alignment of 24": (file_of([key("general.alignment", 4, struct.pack("<I", 24))]),
                           "should be a power of two"),
    "an alignment of text": (file_of([key("general.alignment", 8, text("32"))]), "a power of two"),
    "an alignment of 0": (file_of([key("general.alignment", 4, bytes(4))]), "a power of two"),
    "five axes": (file_of(tensors=[tensor(axes=(1, 1, 1, 1, 2))]), "has 5 axes"),
    "no axes": (file_of(tensors=[tensor(axes=())]), "no whole blocks"),
    "an empty axis": (file_of(tensors=[tensor(axes=(0,))]), "no whole blocks"),
    "huge axes": (file_of(tensors=[tensor(axes=((1 << 63) + 32, 1 << 62))]), "of a file of"),
    "half a block": (file_of(tensors=[tensor(axes=(33,), code=8)]), "no whole blocks of 32"),
    "a type that we don't read": (file_of(tensors=[tensor(code=10)]), "a is Q2_K, and we read"),
    "a type of nobody": (file_of(tensors=[tensor(code=77)]), "the unknown type 77"),
    "a tensor twice": (file_of(tensors=[tensor(), tensor(offset=32)]), "tensor a twice"),
    "an odd offset": (file_of(tensors=[tensor(offset=4)]), "at a multiple of 32"),
    "a far offset": (file_of(tensors=[tensor(offset=1 << 40)]), "of a file of"),
    "an offset of 64 bits": (file_of(tensors=[tensor(offset=(1 << 64) - 32)]), "of a file of"),
    "an end behind the file's": (file_of(tensors=[tensor(axes=(17,))]), "of a file of"),
    "an overlap": (file_of(tensors=[tensor(axes=(9,)), tensor("b", offset=32)]), "overlaps"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(tmp_path, case):
    data, said = HOSTILE[case]
    (tmp_path / "m.gguf").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=said) as refusal:
            gguf.read(tmp_path / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000 + 4 * len(data)
    finally:
        tracemalloc.stop()
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 500


def test_hundreds_of_damaged_files_are_refused_or_read(tmp_path):
    """Never another exception than UserError, and never much more memory than the file has."""
    gguf_model.write_model(tmp_path / "m.gguf", LLAMA, drawn(LLAMA), "F32")
    gguf_model.write_model(tmp_path / "g.gguf", GPT2, drawn(GPT2), "Q8_0",
                           {"tokenizer.ggml.tokens": ["a"] * 40})  # fmt: skip
    llama2c.write_model(tmp_path / "m.bin", LLAMA, drawn(LLAMA))
    rng, refused = np.random.default_rng(0), 0
    for name, read in (("m.gguf", gguf_model.read_model), ("g.gguf", gguf_model.read_model),
                       ("m.bin", llama2c.read_model)):  # fmt: skip
        whole = (tmp_path / name).read_bytes()
        for data in mutants(whole, rng, 300):
            (tmp_path / "damaged").write_bytes(data)
            tracemalloc.start()
            try:
                read(tmp_path / "damaged")
            except UserError as error:
                refused += 1
                assert "\n" not in str(error) and str(error).isprintable()
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert peak < 16 * len(whole) + 60_000_000, peak  # 10,000 layers have that many names
    assert refused > 500


# ---- Models


@needs_data
@pytest.mark.parametrize("name", QUANTS)
def test_tensors_of_llama_cpp_have_the_expected_numbers(tmp_path, name):
    tensors = gguf.read(unpacked(tmp_path, f"gguf-quants/{name}.gguf.xz")).tensors
    with np.load(INTEROP / "gguf-quants" / f"{name}.expected.npz") as wanted:
        assert {*tensors} == {*wanted["tensor_names"].tolist()}
        for i, each in enumerate(wanted["tensor_names"].tolist()):
            assert tensors.kinds[each] == wanted["tensor_types"][i]
            found = tensors[each].astype("f8")
            assert np.array_equal(tensors[each].reshape(-1)[:8], wanted["first8"][i])
            # sums of float64 in another order
            assert abs(found.sum() - wanted["sums"][i]) <= 1e-12 * np.abs(found).sum()
            assert abs((found**2).sum() - wanted["squares"][i]) <= 1e-12 * (found**2).sum()


@needs_data
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", QUANTS)
def test_logits_are_those_of_the_dequantized_model(tmp_path, name, engine):
    config, weights, _ = gguf_model.read_model(unpacked(tmp_path, f"gguf-quants/{name}.gguf.xz"))
    with np.load(INTEROP / "gguf-quants" / f"{name}.expected.npz") as wanted:
        got, _ = forward(ENGINES[engine](), config, weights, wanted["ids"])
        logits = wanted["logits"]
    bound = 5e-5 * max(1, np.sqrt(np.mean(logits**2))) + 3e-5  # a float64 gap as in hf's folders
    assert np.abs(got[:, :, 0] - logits).max() <= bound


@needs_data
def test_gpt2_in_gguf_is_gpt2_in_safetensors(tmp_path):
    config, weights, metadata = gguf_model.read_model(unpacked(tmp_path, "gguf/gpt2.f32.gguf.xz"))
    other, theirs = read_folder(INTEROP / "hf" / "gpt2")
    assert config == other and same(weights, theirs)
    assert metadata["tokenizer.ggml.model"] == "gpt2"
    assert len(metadata["tokenizer.ggml.tokens"]) == 320


@needs_data
def test_qwen3_in_gguf_has_its_own_head_width_and_norms(tmp_path):
    config, weights, _ = gguf_model.read_model(unpacked(tmp_path, "gguf/qwen3-tied.f32.gguf.xz"))
    assert (config.head_dim, config.head_width, config.qk_norm, config.tied) == (16, 16, True, True)
    assert (config.rope_base, config.norm_eps) == (1e6, 1e-6)
    assert weights["block.0.q_norm"].shape == (16,) and weights["block.2.wqkv"].shape == (48, 128)


GGUF_CONFIGS = {name: config for name, config in CONFIGS.items() if config.mlp != "gelu_exact"}


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16", "Q8_0"])
@pytest.mark.parametrize("name", GGUF_CONFIGS)
def test_a_model_that_is_written_is_read_again(tmp_path, name, kind):
    """Exactly in F32; elsewhere every number is as near as its type allows."""
    config, weights = GGUF_CONFIGS[name], drawn(GGUF_CONFIGS[name])
    said = gguf_model.write_model(tmp_path / "m.gguf", config, weights, kind, {"tokenizer.x": "y"})
    assert len(said) == bool(config.sliding_window)
    found, again, metadata = gguf_model.read_model(tmp_path / "m.gguf")
    assert found == config and metadata["tokenizer.x"] == "y"
    for each, tensor in weights.items():
        if kind == "F32" or tensor.ndim == 1 or each == "positions":
            assert np.array_equal(tensor, again[each]), each
        else:
            # half a unit of 11 or 8 bits of the number; of Q8_0 half a 127th of the largest
            # number of the block, and of the tensor at most
            bits = {"F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 2.0**-11}[kind]
            bound = bits * np.abs(tensor) + 1e-7
            if kind == "Q8_0":
                bound = np.maximum(bound, np.abs(tensor).max() / 127 / 2 * (1 + 2**-10))
            assert (np.abs(tensor - again[each]) <= bound).all(), each
            assert not np.array_equal(tensor, again[each])
    if not config.sliding_window:
        small, *_ = gguf_model.read_model(tmp_path / "m.gguf", context=5)
        assert small == replace(config, context=5)


def test_pairs_and_halves():
    """Row 2i of a head becomes row i, and row 2i + 1 becomes row i + D/2; and back."""
    from nanoeuler.interop.families import halves_from_pairs, pairs_from_halves

    rows = np.arange(12)  # two heads of six
    assert halves_from_pairs(rows, 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    matrix = np.random.default_rng(0).normal(size=(12, 5))
    assert np.array_equal(pairs_from_halves(halves_from_pairs(matrix, 2), 2), matrix)


def test_llama3_s_factors_are_those_of_its_scaling():
    """Frequencies that turn often stay, slow ones are divided by the factor."""
    factors = gguf_model.llama3_factors(64, 5e5, 8.0, 1.0, 4.0, 8192)
    turns = 8192 * 5e5 ** (-np.arange(64) / 64) / (2 * np.pi)
    assert (factors[turns > 4] == 1).all() and (factors[turns < 1] == 8).all()
    between = factors[(turns > 1) & (turns < 4)]
    assert len(between) > 3 and (np.diff(between) > 0).all()


@pytest.mark.parametrize("change, said", [
    ({"general.architecture": "gemma"}, "got gemma"),
    ({"general.architecture": 3}, "architectures"),
    ({"llama.expert_count": 8}, "mixture of experts"),
    ({"llama.block_count": "3"}, "expected llama.block_count to be of the type int"),
    ({"llama.block_count": None}, "expected a key llama.block_count"),
    ({"llama.attention.head_count": 0}, "n_heads must be"),
    ({"llama.rope.scaling.type": "yarn"}, "got 'yarn'"),
    ({"llama.rope.scaling.type": "linear"}, "expected a key llama.rope.scaling.factor"),
    ({"llama.rope.dimension_count": 4}, "expected rope.dimension_count to be the width"),
    ({"llama.embedding_length": 28}, "expected a tensor"),
    ({"llama.attention.sliding_window": 4,
      "llama.attention.sliding_window_pattern": np.arange(3)}, "truth value for each layer"),
])  # fmt: skip
def test_metadata_that_our_model_cannot_be_is_refused_by_name(tmp_path, change, said):
    gguf_model.write_model(tmp_path / "m.gguf", LLAMA, drawn(LLAMA), "F32")
    metadata, tensors = gguf.read(tmp_path / "m.gguf")
    metadata = {name: value for name, value in (metadata | change).items() if value is not None}
    gguf.write(tmp_path / "x.gguf", metadata, tensors.shapes, tensors.__getitem__, tensors.kinds)
    with pytest.raises(UserError, match=said):
        gguf_model.read_model(tmp_path / "x.gguf")


@pytest.mark.parametrize("config, said", [
    (CONFIGS["gpt2 exact"], "gelu_exact"),
    (replace(LLAMA, integrator="heun"), "integrator"),
    (replace(LLAMA, logit_cap=30.0), "logit_cap 0, and this model 30"),
    (replace(LLAMA, mlp="relu2"), "mlp swiglu, and this model relu2"),
    (replace(LLAMA, qkv_bias=True, head_width=8), "heads of dim / n_heads channels"),
    (replace(LLAMA, qk_norm=True, rope_scaling="llama3", rope_factor=8.0), "for llama alone"),
])  # fmt: skip
def test_a_model_that_llama_cpp_cannot_be_is_refused_by_name(tmp_path, config, said):
    with pytest.raises(UserError, match=said):
        gguf_model.write_model(tmp_path / "m.gguf", config, drawn(config))
    assert not (tmp_path / "m.gguf").exists()


def test_rows_that_are_no_blocks_are_float16_and_vectors_float32(tmp_path):
    gguf_model.write_model(tmp_path / "m.gguf", LLAMA, drawn(LLAMA), "Q8_0")
    kinds = gguf.read(tmp_path / "m.gguf").tensors.kinds
    assert kinds["blk.0.ffn_down.weight"] == "Q8_0"  # rows of 32
    assert kinds["blk.0.attn_q.weight"] == "F16" and kinds["blk.0.attn_norm.weight"] == "F32"


def test_an_output_matrix_that_is_the_embedding_again_is_tied(tmp_path):
    tied = replace(LLAMA, tied=True)
    weights = drawn(tied)
    gguf_model.write_model(tmp_path / "m.gguf", tied, weights, "F32")
    metadata, tensors = gguf.read(tmp_path / "m.gguf")
    shapes = tensors.shapes | {"output.weight": tensors.shapes["token_embd.weight"]}
    kinds = tensors.kinds | {"output.weight": "F32"}

    def make(name):
        return tensors["token_embd.weight" if name == "output.weight" else name]

    gguf.write(tmp_path / "twice.gguf", metadata, shapes, make, kinds)
    config, again, _ = gguf_model.read_model(tmp_path / "twice.gguf")
    assert config == tied and same(weights, again)


@pytest.mark.parametrize("name", ["llama", "llama tied", "qwen2"])
def test_transformers_reads_our_gguf_and_says_the_same(tmp_path, name):
    """By its own reader, which knows no biases of llama, no scaling, and no head width."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    pytest.importorskip("gguf", reason="gguf is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    config, weights = CONFIGS[name], drawn(CONFIGS[name])
    tokenizer = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["A B"],
                 "tokenizer.ggml.tokens": [*map(chr, range(64, 104))]}  # fmt: skip
    gguf_model.write_model(tmp_path / "m.gguf", config, weights, "F32", tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32)  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 16))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    ours, _ = forward(ReferenceEngine(), config, weights, tokens)
    assert np.abs(ours[:, :, 0] - theirs).max() <= 5e-5 * max(1, np.sqrt(np.mean(theirs**2)))


def test_llama_cpp_says_the_same(tmp_path):
    """Logits of F32 files, with a cache in F32 (0, in its enumeration; F16 parts by 1e-3).

    GPT-2 is left out: llama.cpp's GELU is a table in float16.
    """
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    config = ModelConfig(vocab_size=64, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden=96,
                         context=64, n_predict=1)  # fmt: skip
    letters = [chr(c) for c in range(64, 128)]
    tokenizer = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": letters, "tokenizer.ggml.token_type": [1] * 64,
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }  # fmt: skip
    tokens = np.random.default_rng(0).integers(2, 64, (1, 20))
    for name, change in (("llama", {}), ("qwen3", dict(qk_norm=True)),
                         ("qwen2", dict(qkv_bias=True))):  # fmt: skip
        one = replace(config, **change)
        weights = drawn(one)
        gguf_model.write_model(tmp_path / f"{name}.gguf", one, weights, "F32", tokenizer)
        model = llama_cpp.Llama(str(tmp_path / f"{name}.gguf"), logits_all=True, verbose=False,
                                n_ctx=64, type_k=0, type_v=0, flash_attn=False)  # fmt: skip
        model.eval(tokens[0].tolist())
        ours, _ = forward(ReferenceEngine(), one, weights, tokens)
        bound = 5e-5 * max(1, np.sqrt(np.mean(ours**2)))  # as beside transformers
        assert np.abs(model.scores[:20] - ours[0, :, 0]).max() <= bound, name


# ---- llama2.c


def run_c(sizes, w, tokens):
    """Logits (T, V) in float64 by the equations of run.c, which turns the pairs (2i, 2i + 1)."""
    dim, _, layers, heads, kv, _, _ = sizes
    D, out = dim // heads, []
    keys, values = ([[] for _ in range(layers)] for _ in range(2))

    def norm(x, gain):
        return gain * x / np.sqrt(np.mean(x * x) + 1e-5)

    def turned(x, at):
        x = x.copy()
        for i in range(0, len(x), 2):
            angle = at / 10000.0 ** (i % D / D)
            a, b = x[i], x[i + 1]
            x[i], x[i + 1] = (a * np.cos(angle) - b * np.sin(angle),
                              a * np.sin(angle) + b * np.cos(angle))  # fmt: skip
        return x

    for at, token in enumerate(tokens):
        x = w["tok_embeddings"][token].copy()
        for i in range(layers):
            n = norm(x, w["attention_norm"][i])
            q = turned(w["wq"][i] @ n, at).reshape(heads, D)
            keys[i].append(turned(w["wk"][i] @ n, at).reshape(kv, D))
            values[i].append((w["wv"][i] @ n).reshape(kv, D))
            y = []
            for h in range(heads):
                g = h // (heads // kv)
                scores = np.array([q[h] @ k[g] for k in keys[i]]) / np.sqrt(D)
                p = np.exp(scores - scores.max())
                y.append(sum(a * v[g] for a, v in zip(p / p.sum(), values[i], strict=True)))
            x = x + w["wo"][i] @ np.concatenate(y)
            n = norm(x, w["ffn_norm"][i])
            gate = w["w1"][i] @ n
            x = x + w["w2"][i] @ (gate / (1 + np.exp(-gate)) * (w["w3"][i] @ n))
        out.append(w["output"] @ norm(x, w["norm"]))
    return np.array(out)


SIZES = (24, 32, 2, 4, 2, 40, 16)  # dim, hidden, layers, heads, kv heads, vocabulary, positions
ORDERS = {
    0: "tok_embeddings attention_norm wq wk wv wo ffn_norm w1 w2 w3 norm freq output",
    1: "attention_norm ffn_norm norm tok_embeddings wq wk wv wo w1 w2 w3 output",
}  # fmt: skip


def drawn_c(tied):
    """Random weights in run.c's shapes, each of all layers in one array."""
    dim, hidden, layers, heads, kv, vocab, context = SIZES
    narrow, rng = dim * kv // heads, np.random.default_rng(0)
    shapes = {
        "tok_embeddings": (vocab, dim), "attention_norm": (layers, dim), "wq": (layers, dim, dim),
        "wk": (layers, narrow, dim), "wv": (layers, narrow, dim), "wo": (layers, dim, dim),
        "ffn_norm": (layers, dim), "w1": (layers, hidden, dim), "w2": (layers, dim, hidden),
        "w3": (layers, hidden, dim), "norm": (dim,), "output": (vocab, dim),
        "freq": (2, context, dim // heads // 2),
    }  # fmt: skip
    w = {name: rng.normal(size=shape).astype("f4") / 4 for name, shape in shapes.items()}
    return w | {"output": w["tok_embeddings"]} if tied else w


def packed(x, group=4):
    """int8 and a scale for each group, as export.py of llama2.c makes them."""
    groups = x.reshape(-1, group)
    scale = np.abs(groups).max(axis=1) / 127
    return np.rint(groups / scale[:, None]).astype("i1").tobytes() + scale.astype("<f4").tobytes()


def write_c(path, w, version, tied, group=4):
    """A checkpoint of llama2.c, as its export.py writes it."""
    order = ORDERS[min(version, 1)].split()[: -1 if tied else None]
    if version == 0:
        vocab = SIZES[5] if tied else -SIZES[5]
        head = struct.pack("<7i", *SIZES[:5], vocab, SIZES[6])
    else:
        head = struct.pack("<Ii7iB", 0x616B3432, version, *SIZES, tied)
        head = (head + struct.pack("<i", group) if version == 2 else head).ljust(256, b"\0")
    body = []
    for name in order:
        layers = w[name] if w[name].ndim == 3 else [w[name]]
        for each in layers:
            plain = version < 2 or "norm" in name
            body.append(each.astype("<f4").tobytes() if plain else packed(each, group))
    path.write_bytes(head + b"".join(body))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_logits_of_llama2_c_are_those_of_run_c(tmp_path, version, tied):
    w = drawn_c(tied)
    write_c(tmp_path / "m.bin", w, version, tied)
    config, weights = llama2c.read_model(tmp_path / "m.bin")
    assert (config.dim, config.hidden, config.n_layers, config.n_heads, config.n_kv_heads,
            config.vocab_size, config.context) == SIZES and config.tied == tied  # fmt: skip
    if version == 2:  # what the int8 stand for
        for name, each in w.items():
            if each.ndim > 1 and "norm" not in name:
                groups = each.reshape(-1, 4).astype("f4")
                scale = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype("f4")
                w[name] = (np.rint(groups / scale) * scale).reshape(each.shape)
    tokens = np.random.default_rng(1).integers(0, 40, 12)
    wanted = run_c(SIZES, {name: each.astype("f8") for name, each in w.items()}, tokens)
    got, _ = forward(ReferenceEngine(), config, weights, tokens[None])
    assert np.abs(got[0, :, 0] - wanted).max() <= 5e-5 * max(1, np.sqrt(np.mean(wanted**2)))


@pytest.mark.parametrize("tied", [True, False])
def test_llama2_c_s_version_0_is_written_as_its_own_export_does(tmp_path, tied):
    """The version that run.c reads."""
    _, _, _, heads, _, _, context = SIZES
    D = SIZES[0] // heads
    angles = np.outer(np.arange(context), [10000.0 ** (-i / D) for i in range(0, D, 2)])
    w = drawn_c(tied) | {"freq": np.stack([np.cos(angles), np.sin(angles)])}
    write_c(tmp_path / "theirs.bin", w, 0, tied)
    config, weights = llama2c.read_model(tmp_path / "theirs.bin")
    assert llama2c.write_model(tmp_path / "ours.bin", config, weights) == []
    ours, theirs = ((tmp_path / f"{name}.bin").read_bytes() for name in ("ours", "theirs"))
    assert ours[:28] == theirs[:28] and len(ours) == len(theirs)
    found, wanted = (np.frombuffer(each, "<f4", offset=28) for each in (ours, theirs))
    other = np.flatnonzero(found != wanted)  # a cosine of float64 may round the other way
    np.testing.assert_array_max_ulp(found[other], wanted[other], 1)
    assert other.size < 4 and same(llama2c.read_model(tmp_path / "ours.bin")[1], weights)


@pytest.mark.parametrize("name", [
    "llama tied", "llama biases", "llama linear", "llama 3", "mistral", "qwen2", "qwen3", "gpt2",
])  # fmt: skip
def test_what_run_c_does_not_compute_is_refused_by_name(tmp_path, name):
    with pytest.raises(UserError, match="llama2.c has"):
        llama2c.write_model(tmp_path / "m.bin", CONFIGS[name], drawn(CONFIGS[name]))
    assert not (tmp_path / "m.bin").exists()


def test_a_llama2_c_file_of_another_length_is_refused(tmp_path):
    write_c(tmp_path / "m.bin", drawn_c(True), 1, True)
    whole = (tmp_path / "m.bin").read_bytes()
    cases = {
        whole[:-4]: "by its header it should have", whole + bytes(4): "by its header",
        whole[:100]: "shorter than a header", b"": "empty", whole[:20]: "shorter",
        whole[:4] + struct.pack("<i", 3) + whole[8:]: "version 3",
        whole[:8] + struct.pack("<i", -24) + whole[12:]: "dim must be",
        whole[:8] + struct.pack("<i", 1 << 30) + whole[12:]: "by its header|multiple",
        whole[:36] + b"\7" + whole[37:]: "damaged",
    }  # fmt: skip
    for data, said in cases.items():
        (tmp_path / "x.bin").write_bytes(data)
        with pytest.raises(UserError, match=said):
            llama2c.read_model(tmp_path / "x.bin")
    write_c(tmp_path / "m.bin", drawn_c(True), 2, True, group=4)
    data = (tmp_path / "m.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(data[:37] + struct.pack("<i", 7) + data[41:])
    with pytest.raises(UserError, match="no whole groups of 7"):
        llama2c.read_model(tmp_path / "x.bin")
