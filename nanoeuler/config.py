# Made from book/04-attention.md by nanoeuler.book: edit the chapter, not this file.


# %% book/04-attention.md:329
"""The shape of a model: eight numbers, the presets, and the shape of every parameter tensor.

Leaves out how it is trained (train.py) and where its numbers live (model.Weights).
Letters: V vocabulary, C channels, L layers, H query heads, G key/value heads, D head width, F MLP
width, T positions, K predicted tokens.
"""

import math
from dataclasses import dataclass, fields

from nanoeuler.errors import UserError


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a model. UserError where the numbers do not fit together."""

    vocab_size: int  # V
    dim: int  # C
    n_layers: int  # L
    n_heads: int  # H
    n_kv_heads: int  # G
    hidden: int  # F
    context: int  # T, the most positions the model is used with
    n_predict: int  # K: head k predicts the token 1 + k places ahead

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{field.name} must be a whole number of at least 1, got {value!r}")
        for large, small in (("dim", "n_heads"), ("n_heads", "n_kv_heads")):
            if getattr(self, large) % getattr(self, small):
                raise UserError(
                    f"{large} ({getattr(self, large)}) must be a multiple of {small} "
                    f"({getattr(self, small)}): change one of them"
                )
        if self.head_dim % 2:
            raise UserError(
                f"heads are {self.head_dim} channels wide (dim / n_heads), and rotary positions "
                "turn pairs: choose dim and n_heads so that the width is even"
            )

    @property
    def head_dim(self):
        """D, the width of one head."""
        return self.dim // self.n_heads


# %% book/04-attention.md:382
PRESETS = {  # hidden is 8/3 dim, rounded up to a multiple of 8 (Shazeer, 2020: equal weights)
    "small": ModelConfig(  # trains on two CPU cores in minutes
        vocab_size=512, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, hidden=344, context=128,
        n_predict=4,
    ),
    "euler-116m": ModelConfig(  # GPT-2's width and more layers, for a GPU
        vocab_size=4096, dim=768, n_layers=16, n_heads=12, n_kv_heads=4, hidden=2048, context=512,
        n_predict=4,
    ),
}  # fmt: skip


# %% book/04-attention.md:398
def parameter_shapes(config):
    """Name -> shape of every parameter tensor, in the order of their use: a dict."""
    V, C, D, F = config.vocab_size, config.dim, config.head_dim, config.hidden
    H, G = config.n_heads, config.n_kv_heads
    block = {
        "norm1": (C,),
        "wqkv": (C, (H + 2 * G) * D),
        "wo": (H * D, C),
        "norm2": (C,),
        "w_gate_up": (C, 2 * F),
        "w_down": (F, C),
    }
    blocks = {
        f"block.{i}.{name}": shape for i in range(config.n_layers) for name, shape in block.items()
    }
    return {"embedding": (V, C), **blocks, "norm": (C,), "output": (C, config.n_predict * V)}


def count_parameters(config):
    """How many numbers the model learns."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


__all__ = [
    "ModelConfig",
    "PRESETS",
    "parameter_shapes",
    "count_parameters",
]
