"""The model against transformers' numbers: small models of several families, written by it.

On the engines of a CPU, in whole passes and with a cache, and the gradients of the reference. The
folder `interop/hf` of NANOEULER_DATA has the models, the logits that transformers gives in float32,
and how far these are from its float64. Equal means, as the folder says: off by at most
5e-5 max(1, rms) + 3 times that distance.
"""

from dataclasses import replace

import numpy as np
import published
import pytest

from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.engines.registry import CPU_ENGINES, engine_factory
from nanoeuler.inference.decoder import Decoder, EngineReader, generate
from nanoeuler.model.transformer import forward

MODELS = (
    "gpt2", "gpt2-old-names", "llama-eps-1e-3", "llama3-scaled-rope", "mistral-window-8",
    "qwen2-tied", "smollm2-like-tied-bf16",
)  # fmt: skip
pytestmark = pytest.mark.skipif(
    not published.FOLDER.exists(), reason="NANOEULER_DATA has no folder interop/hf"
)


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """The folder of a model, and what it must give."""
    folder = published.FOLDER / request.param
    if not folder.exists():
        pytest.skip(f"no folder {request.param}")
    return folder, dict(np.load(folder / "expected.npz"))


def equal(logits, expected, gap):
    rms = np.sqrt(np.mean(np.float64(expected) ** 2))
    return np.abs(logits - expected).max() <= 5e-5 * max(1, rms) + 3 * gap


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_logits_of_a_whole_pass(case, engine):
    folder, expected = case
    config, weights = published.model(folder, np.float32)
    logits = forward(engine_factory(engine)(), config, weights, expected["ids"])[0][:, :, 0]
    assert equal(logits, expected["logits"], expected["float64_gap"])


@pytest.mark.parametrize("reader", [EngineReader, CpuReader])
def test_logits_and_greedy_text_with_a_cache(case, reader):
    folder, expected = case
    config, weights = published.model(folder, np.float32)
    made = reader(config, weights)
    for ids, logits in zip(expected["ids"], expected["logits"], strict=True):
        decoder, at = Decoder(config, weights, made), 0
        for n in (7, 1, 1, 12, len(ids) - 21):
            seen = decoder.look(ids[at : at + n], rows=n)[:, 0]
            assert equal(seen, logits[at : at + n], expected["float64_gap"])
            at += n
    greedy = expected["greedy"].tolist()
    texts = generate(Decoder(config, weights, made), expected["prompt"], len(greedy), temperature=0)
    assert list(texts) == greedy


def test_int8_is_near(case):
    """A weight in eight bits is off by at most half of a 127th of its column's largest."""
    folder, expected = case
    config, weights = published.model(folder, np.float32)
    reader, (ids, *_) = CpuReader(config, weights, quantize="int8"), expected["ids"]
    logits = reader.read([ids.tolist()], [0], len(ids))[0, :, 0]
    off = np.linalg.norm(logits - expected["logits"][0]) / np.linalg.norm(expected["logits"][0])
    assert 1e-4 < off < 0.1


WRONG = {  # a field of each family that no shape depends on, and another value
    "gpt2": {"norm_eps": 1e-3}, "llama-eps-1e-3": {"norm_eps": 1e-5},
    "llama3-scaled-rope": {"rope_factor": 7.0}, "mistral-window-8": {"sliding_window": 9},
    "qwen2-tied": {"rope_base": 500000.0}, "smollm2-like-tied-bf16": {"norm_eps": 1e-3},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_another_number_is_seen(name):
    folder = published.FOLDER / name
    if not folder.exists():
        pytest.skip(f"no folder {name}")
    config, weights = published.model(folder, np.float64)
    expected = np.load(folder / "expected.npz")
    for change, same in ({}, True), (WRONG[name], False):
        wrong = replace(config, **change)
        logits = forward(ReferenceEngine(), wrong, weights, expected["ids"])[0][:, :, 0]
        assert equal(logits, expected["logits"], expected["float64_gap"]) == same
