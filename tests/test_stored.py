"""Weights that stay in their file: numbers are those of float32, and memory is the file's."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from nanoeuler.engines.cpu import decode, packing
from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.engines.cpu.packing import Bfloat16, Float16, GateUp, Held, Panels, interleaved
from nanoeuler.errors import UserError
from nanoeuler.interop import huggingface
from nanoeuler.interop.safetensors_file import from_float32
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.stored import StoredWeights, narrowed, widened
from nanoeuler.model.weights import Weights, initialise
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


@pytest.mark.parametrize("name, kind", [*product(MODELS, KINDS)])
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


@pytest.mark.parametrize("name, kind", [*product(("llama", "gpt2"), KINDS)])
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
    logits = [CpuReader(config, each, threads=1).read([[1, 2, 3]], [0]) for each in (again, held)]
    assert logits[0].tobytes() == logits[1].tobytes()
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
def test_load_and_generate_take_at_most_1_3_times_the_file(tmp_path):
    """Beside what the program takes for a tiny model of the same kind."""
    large = ModelConfig(vocab_size=8000, dim=768, n_layers=6, n_heads=12, n_kv_heads=4, hidden=2048,
                        context=64, n_predict=1, tied=True)  # fmt: skip
    for name, config in (("tiny", MODELS["tied"]), ("large", large)):
        huggingface.write_folder(tmp_path / name, config, initialise(config, seed=0), "BF16")
    folders = [str(tmp_path / name) for name in ("tiny", "large")]
    command = [sys.executable, "-c", MEMORY, *folders]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    base, peak = map(int, found.stdout.split())
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert size > 80e6 and peak - base <= 1.3 * size, f"{(peak - base) / size:.2f} of the file"
