# Made from book/05-attention.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-attention-config
"""The architecture of a model: its sizes and switches, the presets, every parameter's shape.

Leaves out how it is trained (the room `training`) and where its numbers live (weights.py).
Letters: V vocabulary, C channels, L layers, H query heads, G key/value heads, D head width, F MLP
width, T positions, K predicted tokens.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

from nanoeuler.errors import UserError
from nanoeuler.model.integrators import INTEGRATORS
from nanoeuler.model.layers import Angles

# What a switch can be set to, the default first. Of a number, and of the pattern of windows, the
# second value is an example: it stands for every value but the default. `repeat` and `step_size`
# aren't here, because every program has code for all their values.
CHOICES = {
    "norm": ("rms", "layer"),
    "position": ("rope", "learned"),
    "mlp": ("swiglu", "gelu", "gelu_exact", "relu2"),
    "bias": (False, True),
    "tied": (False, True),
    "sliding_window": (0, 2),
    "integrator": tuple(INTEGRATORS),
    "norm_eps": (1e-5, 0.1),
    "rope_base": (10000.0, 100.0),
    "rope_scaling": ("none", "linear", "llama3"),
    "head_width": (0, 16),
    "qkv_bias": (False, True),
    "qk_norm": (False, True),
    "window_pattern": ("S", "SL"),
    "logit_cap": (0.0, 2.0),
    "init": ("scaled", "zero"),
}
# What belongs to a way of scaling RoPE's angles, and means nothing without it.
SCALES = {
    "rope_factor": ("linear", "llama3"),
    "rope_low_freq_factor": ("llama3",),
    "rope_high_freq_factor": ("llama3",),
    "rope_original_context": ("llama3",),
}
# Ten times the deepest transformer that we know of (Wang et al. 2022, DeepNet). A layer costs
# some Python objects even before its arrays are made, so millions of layers would fill the memory.
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a model. UserError where the values do not fit together."""

    vocab_size: int  # V
    dim: int  # C
    n_layers: int  # L
    n_heads: int  # H
    n_kv_heads: int  # G
    hidden: int  # F
    context: int  # T, the most positions the model is used with
    n_predict: int  # K: head k predicts the token 1 + k places ahead
    norm: str = "rms"  # or layer
    position: str = "rope"  # or learned
    mlp: str = "swiglu"  # or gelu, gelu_exact, relu2
    bias: bool = False  # whether a block's linear maps and LayerNorm add one
    tied: bool = False  # whether the output matrix is the embedding, transposed
    integrator: str = "euler"  # how attention or MLP becomes a step of the stream: INTEGRATORS
    step_size: float = 1.0  # h of that step
    repeat: int = 1  # how many layers in a row share the weights of one block
    sliding_window: int = 0  # how many keys a query sees, its own and those before it; 0: all
    norm_eps: float = 1e-5  # what a norm adds under its root; Llama 2's and GPT-2's
    rope_base: float = 10000.0  # of RoPE's angles; Vaswani and others, 2017, section 3.5
    rope_scaling: str = "none"  # or linear, llama3: what is done to the angles for long texts
    rope_factor: float = 1.0  # linear, llama3: how many times as long the texts are
    rope_low_freq_factor: float = 1.0  # llama3: with fewer turns, divide the angle by the factor
    rope_high_freq_factor: float = 4.0  # llama3: with more turns, leave the angle as it is
    rope_original_context: int = 8192  # llama3: the positions that count for turns
    head_width: int = 0  # D; 0: dim / n_heads
    qkv_bias: bool = False  # whether queries, keys and values have a bias, though others have none
    qk_norm: bool = False  # whether each query and key head is normed before RoPE
    window_pattern: str = "S"  # repeated over the layers: S has the sliding window, L sees all
    logit_cap: float = 0.0  # c of logits c tanh(z / c); 0: they are as they are
    init: str = "scaled"  # or zero: what wo and w_down begin as, `weights.initialise`

    def __post_init__(self):
        _check_values(self)
        _check_fit(self)

    @property
    def head_dim(self) -> int:
        """D, the width of one head."""
        return self.head_width or self.dim // self.n_heads

    @property
    def angles(self) -> Angles:
        """RoPE's numbers, as `layers.rope_tables` takes them."""
        return Angles(
            self.rope_base, self.rope_scaling, self.rope_factor, self.rope_low_freq_factor,
            self.rope_high_freq_factor, self.rope_original_context,
        )  # fmt: skip

    def in_layer(self, i: int) -> "ModelConfig":
        """The config of layer i by itself, with the window that the pattern gives it, or none."""
        if self.window_pattern == "S":
            return self
        return _without_pattern(self, self.window_pattern[i % len(self.window_pattern)])

    @property
    def n_blocks(self) -> int:
        """How many blocks have weights of their own: L / repeat."""
        return self.n_layers // self.repeat


# %% sec-attention-config
@cache
def _without_pattern(config, letter):
    """The config of a layer of this letter."""
    window = config.sliding_window if letter == "S" else 0
    return replace(config, window_pattern="S", sliding_window=window)


def _check_values(config):
    """UserError for a value that no model has."""
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if field.type is int:
            least = 0 if name in CHOICES else 1  # 0 turns a switch off; no size is 0
            wanted = f"a whole number of at least {least}"
            good = type(value) is int and value >= least
        elif field.type is float:
            wanted = "a finite number above 0" + (", or 0" if field.default == 0 else "")
            good = type(value) in (int, float) and 0 <= value <= sys.float_info.max
            good = good and (value > 0 or field.default == 0)
        elif name == "window_pattern":
            wanted = "some letters S and L"
            good = type(value) is str and 0 < len(value) <= MOST_LAYERS and not set(value) - {*"SL"}
        else:
            wanted = " or ".join(map(str, CHOICES[name]))
            good = type(value) is field.type and value in CHOICES[name]
        if not good:
            raise UserError(f"{name} must be {wanted}, got {value!r:.60}")


def _check_fit(config):
    """UserError for values that do not fit together."""
    pairs = [("dim", "n_heads"), ("n_heads", "n_kv_heads"), ("n_layers", "repeat")]
    for large, small in pairs[1:] if config.head_width else pairs:
        if getattr(config, large) % getattr(config, small):
            raise UserError(
                f"{large} ({getattr(config, large)}) must be a multiple of {small} "
                f"({getattr(config, small)}): change one of them"
            )
    if config.n_layers > MOST_LAYERS:
        raise UserError(f"n_layers must be at most {MOST_LAYERS}, got {config.n_layers}")
    if config.position == "rope" and config.head_dim % 2:
        raise UserError(
            f"heads are {config.head_dim} channels wide (head_width, or dim / n_heads), and rotary "
            "positions turn pairs: choose dim and n_heads so that the width is even"
        )
    if config.tied and config.n_predict > 1:
        raise UserError(
            f"n_predict is {config.n_predict}, and each predicted token needs its own output "
            "matrix: tied has only the embedding; set n_predict to 1 or tied to False"
        )
    _check_scaling(config)


def _check_scaling(config):
    """UserError for numbers that the scaling doesn't use, or a low factor not below the high."""
    for field in fields(config):
        name, kinds = field.name, SCALES.get(field.name, CHOICES["rope_scaling"])
        if config.rope_scaling not in kinds and getattr(config, name) != field.default:
            raise UserError(
                f"{name} is {getattr(config, name)}, which rope_scaling {config.rope_scaling} does "
                f"not use: leave it at {field.default}, or choose {' or '.join(kinds)}"
            )
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    if not low < high:
        raise UserError(
            f"rope_low_freq_factor ({low}) must be below rope_high_freq_factor ({high}): "
            "change one of them"
        )


Supports = Mapping[str, Sequence[Any]]  # switch -> the values that a program has code for


def require(config: ModelConfig, supports: Supports, who: str) -> None:
    """UserError unless the program called `who` has code for all switches of CHOICES in `config`.

    A switch that `supports` doesn't name may only have its default. For numbers
    and for the pattern of windows, one non-default value in `supports` stands for every value.
    """
    for name, values in CHOICES.items():
        value, known = getattr(config, name), supports.get(name, values[:1])
        open_ended = type(values[0]) in (int, float) or name == "window_pattern"
        if value not in known and not (open_ended and {*known} - {values[0]}):
            raise UserError(
                f"expected {name} {' or '.join(map(str, known))} for {who}, got {value}: "
                f"choose another {name}, or an engine that has it"
            )


# %% sec-attention-presets
PRESETS = {  # hidden: 8/3 dim for swiglu, rounded up to a multiple of 8; else 4 dim
    "small": ModelConfig(  # trains on two CPU cores in minutes; what the chapters try things on
        vocab_size=512, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, hidden=344, context=128,
        n_predict=4,
    ),
    "small-modern": ModelConfig(  # learns more in the same minutes: chapters 9b and 9c
        vocab_size=4096, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, hidden=344, context=128,
        n_predict=1, qk_norm=True,
    ),
    "euler-10m": ModelConfig(  # trains on two CPU cores in a day or so: chapter 13
        vocab_size=2048, dim=256, n_layers=10, n_heads=8, n_kv_heads=4, hidden=688, context=256,
        n_predict=4,
    ),
    "euler-116m": ModelConfig(  # GPT-2's width and more layers, for a GPU
        vocab_size=4096, dim=768, n_layers=16, n_heads=12, n_kv_heads=4, hidden=2048, context=512,
        n_predict=4,
    ),
    "gpt2-124m": ModelConfig(  # Radford and others, 2019, the smallest of their four
        vocab_size=50257, dim=768, n_layers=12, n_heads=12, n_kv_heads=12, hidden=3072,
        context=1024, n_predict=1, norm="layer", position="learned", mlp="gelu", bias=True,
        tied=True,
    ),
}  # fmt: skip
PRESET = "small-modern"  # the model of a new run, by default


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """A dict, name -> shape of every parameter tensor, in the order of use."""
    V, C, D, F = config.vocab_size, config.dim, config.head_dim, config.hidden
    H, G = config.n_heads, config.n_kv_heads
    heads, up = (H + 2 * G) * D, 2 * F if config.mlp == "swiglu" else F
    block = {
        "norm1": (C,), "norm1_bias": (C,),
        "wqkv": (C, heads), "wqkv_bias": (heads,), "q_norm": (D,), "k_norm": (D,),
        "wo": (H * D, C), "wo_bias": (C,),
        "norm2": (C,), "norm2_bias": (C,),
        "w_up": (C, up), "w_up_bias": (up,),
        "w_down": (F, C), "w_down_bias": (C,),
    }  # fmt: skip
    shapes = {"embedding": (V, C), "positions": (config.context, C)}
    for i in range(config.n_blocks):
        shapes |= {f"block.{i}.{name}": shape for name, shape in block.items()}
    shapes |= {"norm": (C,), "norm_bias": (C,), "output": (C, config.n_predict * V)}
    return {name: shape for name, shape in shapes.items() if _exists(config, name)}


def _exists(config, name):
    """Whether a model of this architecture has the tensor of this name."""
    if name == "positions":
        return config.position == "learned"
    if name == "output":
        return not config.tied
    if name.endswith(("q_norm", "k_norm")):
        return config.qk_norm
    if name.endswith("wqkv_bias"):
        return config.bias or config.qkv_bias
    if name.endswith("_bias"):
        return config.bias and ("norm" not in name or config.norm == "layer")
    return True


def telling(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a saved run's config that a resumed run must share: for appendix E.

    The fields after `sliding_window` were added when runs had already been saved. At its default
    such a field is left out, so that a run saved without it counts as the same model.
    """
    defaults = {field.name: field.default for field in fields(ModelConfig)}
    added = [*defaults][[*defaults].index("sliding_window") + 1 :]
    left_out = [name for name in added if model.get(name) == defaults[name]]
    return {name: value for name, value in model.items() if name not in left_out}


def count_parameters(config: ModelConfig) -> int:
    """How many numbers the model learns."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


# %% sec-attention-window
def first_keys(
    config: ModelConfig, T: int, first: np.ndarray | None = None
) -> np.ndarray | None:
    """The first key that each of T queries sees, (T,) or (B, T) int; None: key 0.

    first (B, T) or (T,) int, if given: where the texts of the positions begin. With a pattern
    of windows, pass each layer's own config, `config.in_layer(i)`. Equation eq-attention-window.
    """
    assert config.window_pattern == "S", "the first keys of which layer?"
    window = config.sliding_window
    if not 0 < window < T:
        return first
    begins = np.maximum(np.arange(T, dtype=np.int32) - (window - 1), 0)
    return begins if first is None else np.maximum(begins, first, dtype=np.int32)
