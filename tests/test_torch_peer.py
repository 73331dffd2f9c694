"""The peer of the benchmarks is our model: loss, every gradient, and what a training step does."""

from dataclasses import replace

import numpy as np
import pytest

from nanoeuler.checks.derivatives import relative_error
from nanoeuler.engines.cpu.stepper import CpuStepper
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model.config import PRESETS
from nanoeuler.model.transformer import head_weights, loss_and_gradients, loss_scale
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.training.optim import AdamW

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e '.[oracle]'")
peer = pytest.importorskip("torch_peer")

# Some dozen float64 sums, one after the other, each of at most some hundred terms in another order:
# 1e-14; forty times that are allowed. A term that is left out is off by a millionth at least.
TOLERANCE = 4096 * 2.0**-53
TINY = {
    name: replace(PRESETS[name], dim=48, n_layers=2, hidden=80, context=12, vocab_size=71)
    for name in ("euler-116m", "gpt2-124m")
}
TINY["a modern block"] = replace(TINY["euler-116m"], mlp="relu2", qk_norm=True, logit_cap=2.0)


def setting(config, dtype=np.float64, seed=0):
    """Weights without a gain of 1 or a bias of 0; tokens, and targets that do not all count."""
    rng, w = np.random.default_rng(seed), Weights(config, dtype)
    for x in w.values():
        x[...] = rng.standard_normal(x.shape) / np.sqrt(x.shape[0] if x.ndim > 1 else 9)
    tokens = rng.integers(config.vocab_size, size=(3, config.context - 1)).astype(np.int32)
    targets = rng.integers(config.vocab_size, size=(*tokens.shape, config.n_predict))
    targets[rng.random(targets.shape) < 0.2] = -1
    return w, tokens, targets.astype(np.int32)


@pytest.mark.parametrize("preset", TINY)
def test_loss_and_every_gradient_are_ours(preset):
    config = TINY[preset]
    w, tokens, targets = setting(config)
    dw, scale = w.zeros_like(), loss_scale(targets, head_weights(config.n_predict))
    sums = loss_and_gradients(ReferenceEngine(), config, w, tokens, targets, scale, dw)
    trainer = peer.Trainer(config, w, "float64", compiled=False, device="cpu")
    their_sums, gradients = trainer.gradients(tokens, targets)
    assert relative_error(sums, their_sums) <= TOLERANCE
    assert gradients.keys() == dw.keys()
    for name, gradient in gradients.items():
        assert relative_error(dw[name], gradient) <= TOLERANCE, name


@pytest.mark.parametrize("preset", TINY)
def test_training_steps_are_ours(preset):
    """Clipping, decay, moments, corrections, the rate: five steps, and the same weights.

    PyTorch adds 1e-6 to the norm that it divides by. So where a gradient is clipped, its moments
    differ by a millionth of themselves, and after five steps of at most 1e-2 the weights by less
    than 5e-8, the sums by some times that. A rule that is another changes a weight by a part of
    the rate.
    """
    config = TINY[preset]
    w, tokens, targets = setting(config)
    trainer = peer.Trainer(config, w, "float64", compiled=False, device="cpu")
    stepper = CpuStepper(ReferenceEngine, w, AdamW(w), threads=1)
    for number in range(1, 6):
        (taken,) = stepper.step(tokens, targets, 1e-2 / number, number)
        trainer.step(tokens, targets, 1e-2 / number, number)
        assert relative_error(taken.sums, trainer.sums[-1].numpy()) <= 1e-6
    for name, x in trainer.model.named_parameters():
        name, x = peer.ours(name, x.detach())
        assert np.abs(w[name] - x.numpy()).max() <= 1e-7, name


def test_half_precision_is_near():
    config = TINY["euler-116m"]
    w, tokens, targets = setting(config, np.float32)
    exact = peer.Trainer(config, w, "float64", compiled=False, device="cpu")
    half = peer.Trainer(config, w, "bf16", compiled=False, device="cpu")
    sums, gradients = exact.gradients(tokens, targets)
    rough, roughs = half.gradients(tokens, targets)
    assert 1e-6 < relative_error(sums, rough) < 2e-2  # bf16 rounds by 2^-9, some dozen times
    assert max(relative_error(gradients[name], roughs[name]) for name in gradients) < 0.2


def test_what_it_has_no_model_for_is_refused():
    with pytest.raises(ValueError, match="no model"):
        peer.Model(replace(TINY["gpt2-124m"], integrator="heun"))


def test_initial_weights_reach_it_whole():
    config = TINY["gpt2-124m"]
    w = initialise(config, seed=1)
    model = peer.Model(config)
    peer.load(model, w)
    found = dict(peer.ours(name, x.detach().numpy()) for name, x in model.named_parameters())
    assert found.keys() == w.keys() and all((found[name] == w[name]).all() for name in w)
