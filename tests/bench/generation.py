"""Time decoding with the small preset on this machine: `python tests/bench/generation.py`."""

import statistics
import time

import numpy as np

from nanoeuler import measurements
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.inference.decoder import Decoder
from nanoeuler.model.config import PRESETS, ModelConfig
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import Weights, initialise

REPEATS = 7


def with_cache(config: ModelConfig, weights: Weights, tokens: np.ndarray) -> float:
    """Seconds to read `tokens` one by one."""
    decoder, start = Decoder(config, weights), time.perf_counter()
    for token in tokens:
        decoder.read([token])
    return time.perf_counter() - start


def reading_again(config: ModelConfig, weights: Weights, tokens: np.ndarray) -> float:
    """Seconds to have the logits after each token by a whole forward pass each time."""
    engine, start = ReferenceEngine(), time.perf_counter()
    for end in range(1, len(tokens) + 1):
        forward(engine, config, weights, tokens[None, :end])
    return time.perf_counter() - start


def prompt_at_once(config: ModelConfig, weights: Weights, tokens: np.ndarray) -> float:
    """Seconds to read `tokens` in one pass of the decoder."""
    decoder, start = Decoder(config, weights), time.perf_counter()
    decoder.read(tokens)
    return time.perf_counter() - start


if __name__ == "__main__":
    config = PRESETS["small"]
    weights = initialise(config, seed=0)
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=config.context)
    ways = {"one token at a time, with the cache": with_cache,
            "one token at a time, everything again": reading_again,
            "the prompt in one pass": prompt_at_once}
    seconds = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            seconds[name].append(way(config, weights, tokens))
    measurements.save("generation", [
        measurements.row("small, 128 tokens", name, "numpy",
                         round(len(tokens) / statistics.median(times)), "tokens/s")
        for name, times in seconds.items()
    ])
