"""The engine of a GPU on paper: gradients of a recorded step against the reference in float64.

The bound in bf16. A number that is rounded to bf16 is off by at most u = 2^-9 of it, in the root
of the mean square by u / sqrt(3) where all mantissas are as likely. A gradient has passed at most
R such roundings on its way: per layer the weights, n, heads, p, y and the sublayers' output,
forward and backward, twice, and again at the ends: R = 24 L + 8. Roundings of different tensors
are independent, so that they add up as squares do. Four times that leaves room for gradients
that are small differences of large terms, and a planted fault is beyond it by far.
"""

import math
from dataclasses import replace

import pytest
import recorded as helpers
from recorded import step_on_paper

from nanoeuler.engines.gpu.primitives import BF16
from nanoeuler.engines.gpu.step import Machine
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.euler import INTEGRATORS

HOPPER, AMPERE = Machine((9, 0), 132), Machine((8, 0), 108)
GPT = ModelConfig(
    vocab_size=71, dim=64, n_layers=1, n_heads=1, n_kv_heads=1, hidden=64, context=16, n_predict=1,
    norm="layer", position="learned", mlp="gelu", bias=True, tied=True,
)  # fmt: skip
EULER = ModelConfig(
    vocab_size=64, dim=64, n_layers=1, n_heads=2, n_kv_heads=1, hidden=88, context=16, n_predict=3
)
NARROW = BF16._replace(stream="bf16", gradient="bf16")
# Each pair of switches' values occurs in one of them.
MODELS = {
    "GPT-2's": (GPT, BF16, 1),
    "GPT-2's, narrow stream": (GPT, NARROW, 1),
    "Euler's": (EULER, BF16, 1),
    "Euler's, narrow stream, in pieces": (EULER, NARROW, 2),
    "tied RoPE, shared, by Heun": (
        replace(EULER, n_predict=1, tied=True, n_layers=2, repeat=2, integrator="heun",
                step_size=0.7, mlp="gelu"), BF16, 1,
    ),
    "LayerNorm without bias, learned, SwiGLU": (
        replace(EULER, norm="layer", position="learned", n_kv_heads=2), BF16, 1
    ),
    "RMSNorm, learned, GELU, biases, untied": (
        replace(GPT, norm="rms", tied=False, vocab_size=64, step_size=0.5), NARROW, 1
    ),
}  # fmt: skip


def bound(config):
    """The largest relative error of a gradient in bf16: see above."""
    stages = len(INTEGRATORS[config.integrator].b)
    return 4 * math.sqrt(24 * config.n_layers * stages + 8) * 2**-9 / math.sqrt(3)


def check(outcome):
    """All gradients and sums within the bound; those of padding zero."""
    errors = outcome.errors()
    wrong = {name: error for name, error in errors.items() if not error < bound_of(outcome)}
    assert not wrong, wrong


def bound_of(outcome):
    return bound(outcome.exact.config)


@pytest.mark.parametrize("machine", [HOPPER, AMPERE], ids=["9.0", "8.0"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_references(name, machine, monkeypatch):
    config, precision, pieces = MODELS[name]
    helpers.by_numpy(monkeypatch)
    check(step_on_paper(config, 2, 8, machine, precision, pieces))


# Of float32: u = 2^-24 for every rounding of numbers and sums; a sum of k terms in order, of which
# each partial sum is rounded, grows as sqrt(k) u at most here, with k below 256.
FLOAT32 = 4 * 16 * 2.0**-24
# Of two pieces: what is left out of a product is 2^-16 of its terms.
TF32 = 2.0**-14
