"""Chapter 9c's switches where one number decides: what they compute, and the mistakes in them.

`tests/test_switches.py` compares the engines; this file says what the reference has to be.
"""

from dataclasses import replace

import numpy as np
import pytest
from mutants import Mutant, load

from nanoeuler.checks import gradcheck
from nanoeuler.checks.derivatives import complex_step
from nanoeuler.engines.cpu import elementwise, options
from nanoeuler.engines.cpu.engine import CpuEngine
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.errors import UserError
from nanoeuler.evaluation.likelihood import CpuScorer
from nanoeuler.inference.decoder import EngineReader
from nanoeuler.inference.sampling import log_probabilities
from nanoeuler.model import backward, modern, transformer
from nanoeuler.model import weights as weights_module
from nanoeuler.model.config import PRESETS, ModelConfig, telling
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.training import preferences

CAPPED = replace(gradcheck.TINY, logit_cap=1.5)
TOKENS = np.array([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]])


def drawn(config, dtype=np.float64):
    """Weights large enough for logits that a cap of 1.5 bends."""
    w = Weights(config, dtype)
    w.flat[:] = 0.5 * np.random.default_rng(0).standard_normal(w.flat.size)
    return w


# What each claim takes is the module that is right, or one with a mistake in it.


def squares(module=modern):
    u = np.array([-2.0, -0.3, 0.0, 0.5, 3.0])
    assert module.relu2(u).tolist() == [0, 0, 0, 0.25, 9]
    slope = complex_step(lambda z: np.sum(module.relu2(z)), u)
    assert np.abs(module.relu2_backward(np.ones(5), u) - slope).max() < 1e-15


def caps(module=backward):
    rng = np.random.default_rng(1)
    logits, targets, scale = rng.standard_normal((1, 3, 2, 4)), np.array([[[0, 3]] * 3]), np.ones(2)

    def loss(z):
        return np.sum(module.cross_entropy(z, targets, scale, 1.5)[0])

    sums, dlogits = module.cross_entropy(logits, targets, scale, 1.5)
    plain = backward.cross_entropy(1.5 * np.tanh(logits / 1.5), targets, scale)[0]
    assert np.abs(sums - plain).max() < 1e-13
    assert np.abs(dlogits - complex_step(loss, logits)).max() < 1e-13


def begins(module=weights_module):
    config = gradcheck.TINY
    zero, scaled = (module.initialise(replace(config, init=word), 3) for word in ("zero", "scaled"))
    for name, tensor in zero.items():
        if name.endswith((".wo", ".w_down")):
            assert not tensor.any() and scaled[name].any()
        else:  # the same numbers are drawn
            assert (tensor == scaled[name]).all()
    deviation = module.initialise(PRESETS["small"], 0)["block.0.wo"].std()
    assert 0.9 < deviation / (0.02 / 8**0.5) < 1.1


def passes(module=transformer):
    engine, w = ReferenceEngine(), drawn(CAPPED)
    logits = module.forward(engine, CAPPED, w, TOKENS)[0]
    plain = transformer.forward(engine, replace(CAPPED, logit_cap=0.0), w, TOKENS)[0]
    assert np.abs(logits - 1.5 * np.tanh(plain / 1.5)).max() < 1e-13
    targets = np.stack([TOKENS, TOKENS], axis=2)
    sums = module.loss_sums(engine, CAPPED, w, TOKENS, targets)
    log_p = np.take_along_axis(log_probabilities(logits), targets[..., None], axis=-1)
    assert np.abs(sums + log_p.sum(axis=(0, 1, 3))).max() < 1e-12
    one = module.loss_and_gradients(engine, CAPPED, w, TOKENS, targets, np.ones(2), w.zeros_like())
    assert (one == sums).all()


def loops(module=elementwise):
    """The CPU's kernels, of rows."""
    rng = np.random.default_rng(2)
    u, dh = rng.standard_normal((2, 3, 8)).astype(np.float32)
    h, du, slopes, z = np.empty_like(u), np.empty_like(u), np.empty_like(u), 3 * u
    module.relu2(u, h)
    module.relu2_backward(dh, u, du)
    assert np.allclose(h, modern.relu2(u), 1e-6, 0)  # a rounding or two
    assert np.allclose(du, modern.relu2_backward(dh, u), 1e-6, 0)
    module.cap_logits(z, np.float32(1.5), slopes)
    wanted = modern.soft_cap(3.0 * u.astype(np.float64), 1.5)
    assert np.abs(z - wanted).max() < 1e-6 and np.abs(slopes - 1 + (wanted / 1.5) ** 2).max() < 1e-6


CLAIMS = [squares, caps, begins, passes, loops]
MISTAKES = [
    ("model.modern", "relu2", "u * u", "u", squares),
    ("model.modern", "relu2_backward", "2 * u", "u", squares),
    ("model.modern", "relu2_backward", "u.real > 0", "u.real != 0", squares),
    ("model.backward", "cross_entropy", "soft_cap(logits, cap) if cap else logits", "logits", caps),
    ("model.backward", "cross_entropy", "dlogits *= 1 - (y / cap) ** 2", "pass", caps),
    ("model.backward", "cross_entropy", "1 - (y / cap) ** 2", "1 - (logits / cap) ** 2", caps),
    ("model.backward", "cross_entropy", "(y / cap) ** 2", "y ** 2 / cap", caps),
    ("model.weights", "initialise", 'config.init == "zero"', 'config.init != "zero"', begins),
    ("model.weights", "initialise", "1 / math.sqrt(2 * config.n_layers)", "1", begins),
    ("model.transformer", "forward", "if config.logit_cap:", "if False:", passes),
    ("model.transformer", "capping", "if config.logit_cap", "if False", passes),
    ("model.transformer", "loss_sums", ", **capping(config)", "", passes),
    ("model.transformer", "loss_and_gradients", ", **capping(config)", "", passes),
    ("engines.cpu.elementwise", "relu2", "above * above", "above", loops),
    ("engines.cpu.elementwise", "relu2_backward", "F32(2) * max", "max", loops),
    ("engines.cpu.elementwise", "cap_logits", "cap * share", "share", loops),
    ("engines.cpu.elementwise", "cap_logits", "share * share", "share", loops),
]  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims(claim):
    claim()


@pytest.mark.parametrize("module, function, old, new, claim", MISTAKES)
def test_mistakes_are_seen(module, function, old, new, claim, monkeypatch):
    monkeypatch.setitem(options.KERNEL, "cache", False)  # there is no file to keep kernels beside
    wrong = load(Mutant(module, function, "", old, new))
    with pytest.raises(AssertionError):
        claim(wrong)


def test_a_model_with_zero_projections_is_the_identity():
    config = replace(gradcheck.TINY, init="zero")
    w = initialise(config, 0, np.float64)
    _, saved = transformer.forward(ReferenceEngine(), config, w, TOKENS)
    assert (saved.layers[0][0][0].x == w["embedding"][TOKENS]).all()
    assert (saved.x == w["embedding"][TOKENS]).all()


def test_a_cap_leaves_the_order_and_bounds_the_logits():
    w = drawn(CAPPED)
    capped, plain = (
        transformer.forward(ReferenceEngine(), config, w, TOKENS)[0]
        for config in (CAPPED, replace(CAPPED, logit_cap=0.0))
    )
    assert (capped.argsort(axis=-1) == plain.argsort(axis=-1)).all()
    assert np.abs(capped).max() < 1.5 < np.abs(plain).max()


@pytest.mark.parametrize("engine", [ReferenceEngine, CpuEngine])
def test_likelihoods_are_those_of_capped_logits(engine):
    """Of evaluation, of preferences and of a decoder."""
    exact = drawn(CAPPED)
    w = drawn(CAPPED, np.float32)
    logits = transformer.forward(ReferenceEngine(), CAPPED, exact, TOKENS[:1])[0][0, :, 0]
    log_p = log_probabilities(logits)
    wanted = sum(log_p[t, TOKENS[0, t + 1]] for t in range(4))
    # Six products of float32 between ids and logits, of 16 terms and less: 1e-5 is a hundred units.
    (scored, _), = CpuScorer(engine(), w).score([(TOKENS[0].tolist(), 1)])
    assert abs(scored - wanted) < 1e-5
    targets = np.full((1, 5, 2), backward.IGNORE)
    targets[0, :4, 0] = TOKENS[0, 1:]
    (found,) = preferences.likelihoods(engine(), CAPPED, w, TOKENS[:1], targets)
    assert abs(found - wanted) < 1e-5
    reader = EngineReader(CAPPED, w, engine())
    assert np.abs(reader.read([TOKENS[0].tolist()], [0], 5)[0, :, 0] - logits).max() < 1e-5


@pytest.mark.parametrize("changes, said", [
    (dict(logit_cap=-1.0), "logit_cap must be a finite number above 0, or 0, got -1.0"),
    (dict(logit_cap=float("nan")), "logit_cap must be"), (dict(logit_cap=True), "logit_cap must"),
    (dict(logit_cap=float("inf")), "logit_cap must be"), (dict(norm_eps=0.0), "above 0, got 0.0"),
    (dict(init="ones"), "init must be scaled or zero, got 'ones'"),
    (dict(mlp="relu"), "mlp must be swiglu or gelu or gelu_exact or relu2, got 'relu'"),
])  # fmt: skip
def test_values_that_no_model_has_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        ModelConfig(**{**vars(gradcheck.TINY), **changes})


def test_runs_from_before_are_the_same_runs():
    known = telling(vars(PRESETS["small"]))
    assert not {"logit_cap", "init"} & known.keys()
    assert telling(vars(replace(PRESETS["small"], logit_cap=15.0)))["logit_cap"] == 15
