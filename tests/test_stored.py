"""Weights that stay in their file: numbers are those of float32, and memory is the file's."""

import hashlib
import json
import math
import mmap
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from reader_products import products
from tiers import kept

from nanoeuler.engines.cpu import decode, packing
from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.engines.cpu.packing import Bfloat16, Float16, GateUp, Held, Panels, interleaved
from nanoeuler.errors import UserError
from nanoeuler.interop import gguf_model, huggingface, quants
from nanoeuler.interop.safetensors_file import from_float32
from nanoeuler.model import stored
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.stored import StoredWeights, narrowed, widened
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.tokenizer.others import gguf_metadata
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.checkpoint import load, load_model, write_model

SIZES = {"vocab_size": 300, "dim": 24, "n_layers": 2, "hidden": 70, "context": 16, "n_predict": 1}
LLAMA = ModelConfig(**SIZES, n_heads=4, n_kv_heads=2)
MODELS = {
    "llama": LLAMA, "tied": ModelConfig(**SIZES, n_heads=4, n_kv_heads=2, tied=True),
    "qwen2": ModelConfig(**SIZES, n_heads=2, n_kv_heads=1, qkv_bias=True, tied=True),
    "gpt2": ModelConfig(**SIZES, n_heads=4, n_kv_heads=4, norm="layer", position="learned",
                        mlp="gelu", bias=True, tied=True),
}  # fmt: skip
KINDS = ("F32", "F16", "BF16")


def whole(names):
    """Cases of whole models. The pass is compiled for each kind, so those of 16 bits are `long`.

    Of these the products are compared, see `same_products`.
    """
    cases = [*product(names, KINDS)]
    return kept(cases, *(case for case in cases if case[1] == "F32"))


def same_products(config, stored, held):
    """That each matrix has the same product, bit for bit, and the same panels of int8."""
    readers = [CpuReader(config, each, threads=1) for each in (stored, held)]
    for (x, _, one), (_, _, other) in zip(*map(products, readers), strict=True):
        assert one.tobytes() == other.tobytes() and np.abs(x).max() > 0.1 < np.abs(one).max()
    small = [CpuReader(config, each, threads=1, quantize="int8") for each in (stored, held)]
    for one, other in zip(*(each._panels for each in small), strict=True):
        assert one.buffer.tobytes() == other.buffer.tobytes()
        assert one.scales.tobytes() == other.scales.tobytes()


@pytest.fixture(scope="module")
def words():
    return Tokenizer.train(bytes(range(256)) + b"".join(b"%d " % i for i in range(999)), 300)


def drawn(config):
    """Weights that are far from the small start, so that every term matters."""
    weights = initialise(config, seed=3)
    for name, tensor in weights.items():
        tensor[...] = 5 * tensor + (0.1 if name.endswith("_bias") else 0)
    return weights


def in_folder(folder, name, kind):
    """(config, stored weights, the same numbers in memory) of a model in a folder of the Hub."""
    config = MODELS[name]
    huggingface.write_folder(folder, config, drawn(config), kind)
    found, stored = huggingface.read_folder(folder)
    assert found == config and isinstance(stored, StoredWeights)
    held = Weights(config)
    for each, tensor in stored.items():
        held[each][...] = tensor
    assert stored.stored is not None  # reading a tensor leaves it in its file
    return config, stored, held


@pytest.mark.parametrize("name, kind", whole(MODELS))
def test_bits_are_those_of_float32(tmp_path, name, kind):
    """Equal numbers, added up in the same order: so the bound on the difference is zero."""
    config, stored, held = in_folder(tmp_path / "m", name, kind)
    ids = np.random.default_rng(0).integers(300, size=13).tolist()
    logits = [CpuReader(config, each, threads=1).read([ids], [0], rows=5)
              for each in (stored, held)]  # fmt: skip
    assert stored.stored is not None and np.abs(logits[1]).max() > 0.1
    assert logits[0].tobytes() == logits[1].tobytes()
    small = [CpuReader(config, each, threads=1, quantize="int8").read([ids], [0])
             for each in (stored, held)]  # fmt: skip
    assert small[0].tobytes() == small[1].tobytes()
    assert stored.flat.tobytes() == held.flat.tobytes() and stored.stored is None


@pytest.mark.parametrize("kind, form", [("F16", Float16), ("BF16", Bfloat16)])
def test_the_tile_reads_every_number_of_16_bits(kind, form):
    every = np.arange(1 << 16, dtype=np.uint16)
    every = every[np.isfinite(widened(every, kind))]
    numbers = widened(every, kind)[None]
    packed, out = Panels([Held(numbers)], form), np.zeros((1, packing.padded(every.size)), "f4")
    assert packed.buffer.nbytes == 2 * packing.padded(every.size)
    one, none = np.ones((1, 1), np.float32), np.zeros(0, np.float32)
    whole = np.zeros((1, 1, 32), np.int8), np.zeros((1, 1, 2), np.float32), one[0]
    decode._product(packed.matrices, 0, decode.Worker(1, 0, 1), one, none, out, whole)
    assert (out[:, : every.size] == numbers).all()


@pytest.mark.parametrize("kind", KINDS)
def test_narrowed_is_the_rounding_of_the_files(kind):
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    if kind != "F32":
        bits = from_float32(x, kind).view("<u2")
        assert (narrowed(widened(bits, kind), kind) == bits).all()


@pytest.mark.parametrize("F", [1, packing.PANEL // 2, packing.PANEL // 2 + 1, 3 * packing.PANEL])
def test_gate_and_up_come_in_any_number_of_panels(F):
    both = np.arange(6 * F, dtype=np.float32).reshape(3, 2 * F)
    whole, turned = interleaved(both), GateUp(Held(both))
    assert turned.shape == whole.shape
    for first in range(0, whole.shape[1], packing.PANEL):
        for last in range(first + packing.PANEL, whole.shape[1] + 1, packing.PANEL):
            assert (turned.columns(first, last) == whole[:, first:last]).all()


@pytest.mark.parametrize("name, kind", [*product(MODELS, KINDS)])
def test_products_are_those_of_float32(tmp_path, name, kind):
    config, stored, held = in_folder(tmp_path / "m", name, kind)
    same_products(config, stored, held)
    assert stored.stored is not None


@pytest.mark.parametrize("name, kind", whole(["llama", "gpt2"]))
def test_a_run_gives_the_logits_of_its_file(tmp_path, words, name, kind):
    config, stored, held = in_folder(tmp_path / "m", name, kind)
    write_model(tmp_path / "run", config, words, stored, "somewhere")
    again = load_model(tmp_path / "run")[2]
    logits = [CpuReader(config, each, threads=1).read([[1, 2, 3]], [0]) for each in (again, held)]
    assert logits[0].tobytes() == logits[1].tobytes()


@pytest.mark.parametrize("name, kind", [*product(["llama", "gpt2"], KINDS)])
def test_a_run_keeps_the_bits_of_its_file(tmp_path, words, name, kind):
    config, stored, held = in_folder(tmp_path / "m", name, kind)
    write_model(tmp_path / "run", config, words, stored, "somewhere")
    assert stored.stored is not None  # it was never whole in memory
    size = (tmp_path / "run" / "step-00000000" / "model.safetensors").stat().st_size
    matrices = sum(each.size for each in held.values() if each.ndim == 2)
    assert size - matrices * (4 if kind == "F32" else 2) < 20_000  # vectors, and the header
    text = (tmp_path / "run" / "config.json").read_text()
    assert f'"format": {3 if kind == "F32" else 5}' in text
    found, _, again = load_model(tmp_path / "run")
    assert found == config and again.stored is not None
    for each, tensor in held.items():
        assert (again[each] == tensor).all(), each
    same_products(config, again, held)
    with pytest.raises(UserError, match="imported model"):
        load(tmp_path / "run")


def test_stored_weights_are_read_only_until_they_are_in_memory(tmp_path):
    config, stored, held = in_folder(tmp_path / "m", "llama", "BF16")
    for name in ("norm", "output"):
        with pytest.raises(ValueError, match="read-only"):
            stored[name][...] = 0
    assert [*stored] == [*held] and len(stored) == len(held)
    stored.flat[...] = 0  # all of it comes into memory, and counts from here on
    assert not stored["output"].any() and not stored.blocks[1].wo.any()
    reader = CpuReader(config, stored, threads=1)
    assert not reader.read([[1]], [0]).any()
    stored["output"][...] = 1
    assert stored.starts == held.starts and not hasattr(stored, "nothing")


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_none_is_refused(tmp_path, kind):
    in_folder(tmp_path / "m", "llama", kind)
    file = tmp_path / "m" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2 if kind != "F32" else -4 :] = {"F32": b"\0\0\xc0\x7f", "F16": b"\0\x7e",
                                           "BF16": b"\xc0\x7f"}[kind]  # fmt: skip
    file.write_bytes(data)
    with pytest.raises(UserError, match="not finite"):
        huggingface.read_folder(tmp_path / "m")


MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from nanoeuler.inference.decoder import Decoder, generate
from nanoeuler.inference.backends import make_reader
from nanoeuler.interop import huggingface
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for folder in sys.argv[1:]:
    config, weights = huggingface.read_folder(folder)
    decoder = Decoder(config, weights, make_reader(config, weights, "cpu"))
    list(generate(decoder, [1, 2, 3], 4, seed=0))
    print(peak())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux alone")
@pytest.mark.parametrize("kind", kept(["F32", "BF16"], "F32"))
def test_load_and_generate_take_at_most_1_3_times_the_file(kind, tmp_path):
    """Beside what the program takes for a tiny model of the same kind."""
    large = ModelConfig(vocab_size=8000, dim=768, n_layers=6, n_heads=12, n_kv_heads=4, hidden=2048,
                        context=64, n_predict=1, tied=True)  # fmt: skip
    for name, config in (("tiny", MODELS["tied"]), ("large", large)):
        huggingface.write_folder(tmp_path / name, config, initialise(config, seed=0), kind)
    folders = [str(tmp_path / name) for name in ("tiny", "large")]
    command = [sys.executable, "-c", MEMORY, *folders]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    base, peak = map(int, found.stdout.split())
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert size > 80e6 and peak - base <= 1.3 * size, f"{(peak - base) / size:.2f} of the file"


BLOCKED = ModelConfig(vocab_size=300, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden=96,
                      context=16, n_predict=1, tied=True)  # fmt: skip


@pytest.fixture
def quantized(tmp_path, words):
    """(a run imported from a file of Q8_0, the weights that the file reads as)."""
    file, out = tmp_path / "m.gguf", tmp_path / "run"
    gguf_model.write_model(file, BLOCKED, drawn(BLOCKED), "Q8_0", gguf_metadata(words))
    config, weights, _ = gguf_model.read_model(file)
    write_model(out, config, words, weights, "m.gguf")
    return out, weights


def test_an_imported_run_keeps_blocks(quantized):
    """34 bytes for 32 numbers, the same numbers, and the same panels whatever is asked for."""
    out, weights = quantized
    file = out / "step-00000000" / "model.safetensors"
    matrices = sum(math.prod(x.shape) for x in weights.stored.values() if len(x.shape) == 2)
    assert 0 < file.stat().st_size - matrices // 32 * 34 < 20_000
    assert '"format": 6' in (out / "config.json").read_text()
    config, _, again = load_model(out)
    held = Weights(config)
    for name, tensor in weights.items():
        assert again[name].tobytes() == tensor.tobytes(), name
        held[name][...] = tensor
    assert {x.kind for x in again.stored.values()} == {"F32", "Q8_0"}
    for forms in ((packing.Int8, packing.Int8), (packing.Int4, packing.Int8)):
        both = [zip(decode._matrices(config, each), forms, strict=True) for each in (again, held)]
        laid = [[decode._laid(*pair) for pair in each] for each in both]
        for one, other in zip(*laid, strict=True):
            assert one.buffer.tobytes() == other.buffer.tobytes()
            assert one.scales.tobytes() == other.scales.tobytes()
    forms = [packing.form_of(each) for each in decode._matrices(config, again)]
    assert forms == [packing.Kept8] * 2
    assert (again.flat == held.flat).all()  # what training asks for


@pytest.mark.long
def test_kept_blocks_give_the_logits_of_float32(quantized):
    """Another form of the whole pass, which takes a minute to compile."""
    out, weights = quantized
    held = Weights(BLOCKED)
    for name, tensor in weights.items():
        held[name][...] = tensor
    readers = [CpuReader(BLOCKED, each, threads=1) for each in (load_model(out)[2], held)]
    logits = [reader.read([[1, 2, 3]], [0], rows=3).tobytes() for reader in readers]
    assert logits[0] == logits[1]


def test_parts_of_several_kinds_are_kept_each(quantized, words, tmp_path):
    """As in files of llama.cpp whose values have more bits than queries and keys."""
    _, weights = quantized
    tensor = weights.stored["block.0.wqkv"]
    assert len(tensor.parts) == 3
    bits = narrowed(np.ones((32, 64), "f4"), "F16").tobytes()
    (tmp_path / "bits").write_bytes(bits)
    with open(tmp_path / "bits", "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    value = stored.Piece(mapping, 0, (32, 64), "F16", 128, quants.dequantize, quants.finite)
    mixed = stored.Stored(tensor.shape, [*tensor.parts[:2], stored.Part(value, True, None)])
    weights.stored["block.0.wqkv"] = mixed
    assert mixed.kind == "F32" and mixed.blocked
    write_model(tmp_path / "mixed", BLOCKED, words, weights, "m.gguf")
    again = load_model(tmp_path / "mixed")[2]
    found = again.stored["block.0.wqkv"]
    assert [part.piece.kind for part in found.parts] == ["Q8_0", "Q8_0", "F16"]
    assert (found.whole() == mixed.whole()).all() and (found.whole()[:, -32:] == 1).all()


def forged(out, change):
    """Change the bytes of a run's weights, and the digest that they are known by."""
    folder = out / "step-00000000"
    data = change((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").write_bytes(data)
    state = json.loads((folder / "state.json").read_text())
    state["sha256"] = {"model.safetensors": hashlib.sha256(data).hexdigest()}
    (folder / "state.json").write_text(json.dumps(state))


def with_header(change):
    """Bytes of a file whose header is changed as a dict; padded to where the numbers begin."""

    def changed(data):
        n = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:n])
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + data[n:]

    return changed


@pytest.mark.parametrize("said", ["Q3_0 turned", "Q8_0 upside down", "", "Q4_0 turned", "Q8_0"])
def test_blocks_that_are_none_are_refused(quantized, said):
    out, _ = quantized
    name = "block.1.w_down:0"
    forged(out, with_header(lambda header: header["__metadata__"].update({name: said})))
    with pytest.raises(UserError, match="damaged .*block.1.w_down.* (of an unknown|should make)"):
        load_model(out)


def test_a_scale_that_is_no_number_is_refused(quantized):
    out, _ = quantized
    forged(out, lambda data: data[:-33] + b"\x7c" + data[-32:])  # the last block's exponent
    with pytest.raises(UserError, match="embedding:0 is not finite"):
        load_model(out)


def test_blocks_that_are_missing_are_refused(quantized):
    out, _ = quantized

    def rename(header):
        header["block.1.wo:1"] = header.pop("block.1.wo:0")

    forged(out, with_header(rename))
    with pytest.raises(UserError, match="expected block.1.wo to be .*, found nothing"):
        load_model(out)
