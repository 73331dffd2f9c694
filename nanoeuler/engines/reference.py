# Made from book/06a-engines.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-reference
"""The reference engine: the operations that the model is written over, in NumPy.

For float32, float64 and complex128. It is the truth that other engines are compared with. It leaves
out what makes them fast: `begin` and `scratch`, which tell an engine how long its memory is needed,
do nothing here.
"""

from contextlib import nullcontext
from functools import cache

from nanoeuler.engines.interface import Array, Engine
from nanoeuler.model.attention import attention
from nanoeuler.model.backward import (
    attention_backward,
    cross_entropy,
    embed_backward,
    gelu_backward,
    gelu_exact_backward,
    layernorm_backward,
    linear_backward,
    rmsnorm_backward,
    rope_backward,
    swiglu_backward,
)
from nanoeuler.model.layers import (
    add,
    embed,
    gelu,
    gelu_exact,
    layernorm,
    linear,
    rmsnorm,
    rope,
    rope_tables,
    swiglu,
)
from nanoeuler.model.modern import relu2, relu2_backward

SUPPORTS = {
    "norm": ("rms", "layer"), "position": ("rope", "learned"), "bias": (False, True),
    "mlp": ("swiglu", "gelu", "gelu_exact", "relu2"), "qk_norm": (False, True),
    "tied": (False, True), "logit_cap": (0.0, 2.0), "init": ("scaled", "zero"),
    "integrator": ("euler", "heun", "rk4"), "window_pattern": ("S", "SL"),
    "sliding_window": (0, 2), "norm_eps": (1e-5, 0.1), "rope_base": (10000.0, 100.0),
    "rope_scaling": ("none", "linear", "llama3"), "head_width": (0, 16), "qkv_bias": (False, True),
}  # fmt: skip


class ReferenceEngine(Engine):
    """The operations exactly as chapters 4 to 6 derive them."""

    supports = SUPPORTS
    embed, embed_backward = staticmethod(embed), staticmethod(embed_backward)
    linear, linear_backward = staticmethod(linear), staticmethod(linear_backward)
    rmsnorm, rmsnorm_backward = staticmethod(rmsnorm), staticmethod(rmsnorm_backward)
    layernorm, layernorm_backward = staticmethod(layernorm), staticmethod(layernorm_backward)
    rope, rope_backward = staticmethod(rope), staticmethod(rope_backward)
    attention, attention_backward = staticmethod(attention), staticmethod(attention_backward)
    swiglu, swiglu_backward = staticmethod(swiglu), staticmethod(swiglu_backward)
    gelu, gelu_backward = staticmethod(gelu), staticmethod(gelu_backward)
    gelu_exact, gelu_exact_backward = staticmethod(gelu_exact), staticmethod(gelu_exact_backward)
    relu2, relu2_backward = staticmethod(relu2), staticmethod(relu2_backward)
    add, cross_entropy = staticmethod(add), staticmethod(cross_entropy)
    rope_tables = staticmethod(cache(rope_tables))

    def add_into(self, x: Array, y: Array, h: float = 1.0) -> None:
        """Add h y to x in place, both of one shape. Equation eq-backprop-residual, term (2)."""
        assert x.shape == y.shape
        x += h * y

    def scale(self, x: Array, h: float) -> Array:
        """A new array h x."""
        return h * x

    def begin(self) -> None:
        """Nothing: NumPy frees what nobody holds."""

    def scratch(self) -> nullcontext:
        """Nothing: NumPy frees what nobody holds."""
        return nullcontext()
