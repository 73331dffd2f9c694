"""The shapes of other people's models, by their published config.json, for benchmarks: the numbers
in them are random."""

from nanoeuler.model.config import ModelConfig

PUBLISHED = {  # shapes of other people's models, by their config.json; the numbers are random
    "smollm2-135m": ModelConfig(
        vocab_size=49152, dim=576, n_layers=30, n_heads=9, n_kv_heads=3, hidden=1536,
        context=2048, n_predict=1, tied=True,
    ),
    "llama-1b": ModelConfig(  # Llama 3.2
        vocab_size=128256, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, hidden=8192,
        context=2048, n_predict=1, tied=True,
    ),
}  # fmt: skip
