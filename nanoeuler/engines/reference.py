# Made from book/05-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-engine
"""The reference engine: the operations that the model is written over, in NumPy.

For float32, float64 and complex128. It is the truth that other engines are compared with. It leaves
out what makes them fast: `begin` and `scratch`, which tell an engine how long its memory is needed,
do nothing here.
"""

from contextlib import nullcontext

# Imported in order to be found here: these are the engine's operations.
from nanoeuler.model.attention import attention  # noqa: F401
from nanoeuler.model.backward import (  # noqa: F401
    attention_backward,
    cross_entropy,
    embed_backward,
    gelu_backward,
    layernorm_backward,
    linear_backward,
    rmsnorm_backward,
    rope_backward,
    swiglu_backward,
)
from nanoeuler.model.layers import (  # noqa: F401
    add,
    embed,
    gelu,
    layernorm,
    linear,
    rmsnorm,
    rope,
    rope_tables,
    swiglu,
)


def add_into(x, y, h=1.0):
    """Add h y to x in place, both of one shape. Equation eq-backprop-residual, term (2)."""
    assert x.shape == y.shape
    x += h * y


def scale(x, h):
    """A new array h x."""
    return h * x


def begin():
    """Say that a pass starts: an engine may use all the memory again that it handed out before."""


def scratch():
    """A context: an engine may use again, after it, the memory that it handed out inside."""
    return nullcontext()
