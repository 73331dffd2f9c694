"""What chapter 9 cannot hold: the plan against counts made by shape, over drawn configurations."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler import model, reference
from nanoeuler.config import PRESETS, ModelConfig, count_parameters
from nanoeuler.errors import UserError
from nanoeuler.plan import (
    DEVICES,
    ELEMENTWISE,
    UTILISATION,
    estimate,
    floor_seconds,
    flops_per_token,
    memory,
    operations,
    report,
)

SMALL, LARGE = PRESETS["small"], PRESETS["euler-116m"]


@st.composite
def configs(draw):
    """Small valid configurations, odd sizes included, to be run by the reference engine."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    return ModelConfig(
        vocab_size=draw(st.integers(5, 40)),
        dim=heads * 2 * draw(st.integers(1, 4)),
        n_layers=draw(st.integers(1, 3)),
        n_heads=heads,
        n_kv_heads=kv_heads,
        hidden=draw(st.integers(1, 30)),
        context=draw(st.integers(2, 9)),
        n_predict=draw(st.integers(1, 3)),
    )


class CountingEngine:
    """The reference engine; adds up multiply-adds from the shapes each operation is given.

    (Chapter 9 counts in the other way, by listening to what NumPy computes.)
    """

    def __init__(self):
        self.multiply_adds = 0

    def __getattr__(self, name):
        def operation(*args):
            if name == "linear":
                x, w = args
                self.multiply_adds += x.size * w.shape[1]
            elif name == "linear_backward":
                dy, _, w, _ = args
                self.multiply_adds += 2 * dy.size * w.shape[0]  # dx and dw
            elif name == "attention":
                (B, T, N, D), G = args[0].shape, args[1]
                self.multiply_adds += 2 * B * (N - 2 * G) * T * T * D  # scores and values
            elif name == "attention_backward":
                (B, T, N, D), G = args[1].shape, args[2]
                self.multiply_adds += 4 * B * (N - 2 * G) * T * T * D  # dv, dp, dq, dk
            return getattr(reference, name)(*args)

        return operation


def run_step(engine, config, batch_size):
    """One training step on random tokens; returns the weights, the gradients and what was saved."""
    rng = np.random.default_rng(0)
    w = model.initialise(config, seed=0)
    dw = w.zeros_like()
    tokens = rng.integers(config.vocab_size, size=(batch_size, config.context))
    targets = rng.integers(config.vocab_size, size=(*tokens.shape, config.n_predict))
    logits, saved = model.forward(engine, config, w, tokens)
    _, dlogits = engine.cross_entropy(logits, targets, np.ones(config.n_predict))
    model.backward(engine, config, w, saved, dlogits, dw)
    return w, dw, logits, saved


@settings(max_examples=25)  # each runs a training step
@given(config=configs(), batch_size=st.integers(1, 3))
def test_flops_and_memory_are_those_of_a_real_step(config, batch_size):
    engine = CountingEngine()
    w, dw, logits, saved = run_step(engine, config, batch_size)
    tokens = batch_size * config.context
    assert 2 * engine.multiply_adds == tokens * flops_per_token(config, causal=False)

    paper = memory(config, batch_size, value_bytes=4, flash=False)
    kept = [x for block in saved.blocks for x in block] + [saved.x, saved.r, saved.n]
    assert paper["weights"] == w.flat.nbytes
    assert paper["gradients"] == dw.flat.nbytes
    assert paper["moments"] == 2 * w.flat.nbytes
    assert paper["copy of the weights"] == 0
    assert paper["activations"] == sum(x.nbytes for x in kept)
    assert paper["logits"] == 2 * logits.nbytes


@given(config=configs(), batch_size=st.integers(1, 8), causal=st.booleans())
def test_the_rows_of_the_products_add_up_to_the_equation(config, batch_size, causal):
    rows = operations(config, batch_size, value_bytes=2, causal=causal)
    products = sum(row.flops for row in rows if row.name not in (*ELEMENTWISE, "adamw"))
    assert products == batch_size * config.context * flops_per_token(config, causal)


@given(config=configs())
def test_six_flops_a_parameter_but_for_embedding_gains_and_attention(config):
    unmultiplied = config.vocab_size * config.dim + (2 * config.n_layers + 1) * config.dim
    pairs = sum(range(1, config.context + 1))  # a query sees itself and all before it
    attention = 12 * config.n_layers * config.n_heads * config.head_dim * pairs / config.context
    predicted = 6 * (count_parameters(config) - unmultiplied) + attention
    assert flops_per_token(config) == pytest.approx(predicted, rel=1e-12)  # a sum in another order


def test_the_hand_example_of_a_linear_layer():
    # 2 tokens, I = 3, O = 4: 144 FLOPs a step and 3 * (6 + 12 + 8) values, as in the chapter.
    config = ModelConfig(
        vocab_size=4, dim=4, n_layers=1, n_heads=1, n_kv_heads=1, hidden=3, context=2, n_predict=1
    )
    row = {row.name: row for row in operations(config, 1, value_bytes=4)}["w_down"]
    assert (row.flops, row.bytes) == (144, 4 * 3 * (6 + 12 + 8))


def test_the_presets():
    assert count_parameters(LARGE) == pytest.approx(116.4e6, rel=1e-3)  # as the preset's name says
    with_copy, without = memory(LARGE, 16, 2), memory(LARGE, 16, 4)
    assert with_copy["copy of the weights"] == without["weights"] / 2
    assert 2 * with_copy["activations"] == without["activations"]


def test_flash_keeps_one_number_where_a_row_of_probabilities_was():
    kept = [memory(LARGE, 3, 2, flash)["activations"] for flash in (False, True)]
    rows = 3 * LARGE.context * LARGE.n_layers * LARGE.n_heads
    assert kept[0] - kept[1] == 2 * rows * (LARGE.context - 1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_never_faster_than_its_floor_nor_than_its_utilisation(device):
    peak = DEVICES[device].flops_per_s
    for config in (SMALL, LARGE):
        for utilisation in (0.01, UTILISATION, 1.0):
            e = estimate(config, device, 16, tokens=10**9, utilisation=utilisation)
            flops = 16 * config.context * flops_per_token(config)
            assert e.step_s >= e.floor_s
            assert flops / e.step_s <= utilisation * peak * (1 + 1e-12)  # rounding of one quotient
            assert e.tokens_per_s == pytest.approx(16 * config.context / e.step_s, rel=1e-12)
            assert e.hours == pytest.approx(1e9 / e.tokens_per_s / 3600, rel=1e-12)


def test_the_floor_is_the_slower_of_arithmetic_and_memory():
    for row in operations(LARGE, 16, 2):
        for device in DEVICES.values():
            ridge = device.flops_per_s / device.bytes_per_s
            bound_by_memory = row.bytes / device.bytes_per_s
            bound_by_flops = row.flops / device.flops_per_s
            slower = bound_by_flops if row.flops / row.bytes > ridge else bound_by_memory
            assert floor_seconds(row, device) == slower


def test_what_does_not_fit_is_said_not_to_fit():
    assert estimate(LARGE, "l4", batch_size=16).fits
    assert not estimate(LARGE, "l4", batch_size=16 * 64).fits
    assert not estimate(replace(LARGE, n_layers=16 * 16), "l4").fits


def test_the_report_has_a_line_for_every_device():
    text = report(LARGE, batch_size=8, tokens=10**9)
    assert [line.split()[0] for line in text.splitlines()[-len(DEVICES) :]] == list(DEVICES)
    assert "116,417,280" in text and "8 x 512 tokens" in text and "1,000,000,000 tokens" in text


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"device": "abacus"}, "unknown device 'abacus': choose one of laptop"),
        ({"device": "l4", "utilisation": 0}, "utilisation above 0"),
        ({"device": "l4", "utilisation": 1.5}, "utilisation above 0 and at most 1, got 1.5"),
        ({"device": "l4", "utilisation": float("nan")}, "got nan"),
        ({"device": "l4", "batch_size": 0}, "at least 1 sequence"),
        ({"device": "l4", "tokens": 0}, "at least 1 sequence and 1 token, got 16 and 0"),
    ],
)
def test_bad_input_is_named(bad, message):
    with pytest.raises(UserError, match=message):
        estimate(SMALL, **bad)
