"""What chapter 13 cannot hold: the plan against counts made by shape, over drawn configurations."""

import subprocess
import sys
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from crossings import KNOWN, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler import measurements
from nanoeuler.engines.cpu.engine import CpuEngine
from nanoeuler.engines.gpu.lang.kernel import Launch
from nanoeuler.engines.gpu.step.precision import PRECISIONS
from nanoeuler.engines.gpu.step.recording import Machine, record_step
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.engines.registry import GPU_ENGINES, make_stepper
from nanoeuler.errors import UserError
from nanoeuler.model import transformer as model
from nanoeuler.model.config import CHOICES, PRESETS, ModelConfig, count_parameters, parameter_shapes
from nanoeuler.model.weights import initialise, output_matrix
from nanoeuler.planning import memory as machine
from nanoeuler.planning import plan as planning
from nanoeuler.planning import step
from nanoeuler.planning.cards import CARDS, GEFORCE, MEASURED, OLDEST, SHARED, known, table
from nanoeuler.planning.counts import ELEMENTWISE, flops_per_token, memory, operations
from nanoeuler.planning.plan import (
    BATCH_SIZE,
    CPU_SHARE,
    DEVICES,
    PROCESS_BYTES,
    UTILISATION,
    arena_bytes,
    cpu_memory,
    estimate,
    floor_seconds,
    product_rate,
    report,
    size_lines,
    summary,
    time_line,
)
from nanoeuler.training.optim import AdamW
from nanoeuler.training.run import Settings

SMALL, LARGE = PRESETS["small"], PRESETS["euler-116m"]


@st.composite
def configs(draw):
    """Small valid configurations, odd sizes and all switches, to be run by the reference engine."""
    kv_heads, group, repeat = (draw(st.integers(1, 3)) for _ in range(3))
    heads, switches = kv_heads * group, {n: draw(st.sampled_from(x)) for n, x in KNOWN.items()}
    return ModelConfig(
        vocab_size=draw(st.integers(5, 40)),
        dim=heads * 2 * draw(st.integers(1, 4)),
        n_layers=repeat * draw(st.integers(1, 2)),
        n_heads=heads,
        n_kv_heads=kv_heads,
        hidden=draw(st.integers(1, 30)),
        context=draw(st.integers(2, 9)),
        n_predict=1 if switches["tied"] else draw(st.integers(1, 3)),
        step_size=draw(st.sampled_from([0.5, 1.0, 2.0])),  # with 2, Heun's last factor h b is one
        repeat=repeat,
        **whole(switches),
    )


class CountingEngine(ReferenceEngine):
    """The reference engine; counts multiply-adds, and elements, by the shapes it is given.

    (Chapter 13 counts in the other way, by listening to what NumPy computes.)
    """

    def __init__(self):
        self.multiply_adds, self.elements = 0, Counter()

    def linear(self, x, w, bias=None):
        self.multiply_adds += x.size * w.shape[1]
        self.elements["bias"] += x.size // len(w) * (bias.size if has(bias) else 0)
        return super().linear(x, w, bias)

    def linear_backward(self, dy, x, w, dw, dbias=None):
        self.multiply_adds += 2 * dy.size * w.shape[0]  # dx and dw
        return super().linear_backward(dy, x, w, dw, dbias)

    def attention(self, heads, n_kv, first=None):
        (B, T, N, D), G = heads.shape, n_kv
        self.multiply_adds += 2 * B * (N - 2 * G) * T * T * D  # scores and values
        return super().attention(heads, n_kv, first)

    def attention_backward(self, dy, heads, n_kv, p, first=None):
        (B, T, N, D), G = heads.shape, n_kv
        self.multiply_adds += 4 * B * (N - 2 * G) * T * T * D  # dv, dp, dq, dk
        return super().attention_backward(dy, heads, n_kv, p, first)

    def layernorm(self, x, gain, bias=None, eps=1e-5):
        self.elements["layernorm"] += x.size
        self.elements["bias"] += x.size * has(bias)
        return super().layernorm(x, gain, bias, eps)

    def rmsnorm(self, x, gain, eps=1e-5):
        self.elements["rmsnorm"] += x.size
        return super().rmsnorm(x, gain, eps)

    def norm_heads(self, heads, n_kv, gains, eps):
        normed = heads[:, :, : heads.shape[2] - n_kv].size
        self.elements["qk_norm"] += normed
        self.elements["rmsnorm"] -= normed  # which it will count
        return super().norm_heads(heads, n_kv, gains, eps)

    def embed(self, tokens, table, positions=None, first=None):
        x = super().embed(tokens, table, positions, first)
        self.elements["embed"] += x.size
        self.elements["positions"] += x.size * has(positions)
        return x

    def rope(self, heads, n, cos, sin):
        self.elements["rope"] += heads[:, :, :n].size
        return super().rope(heads, n, cos, sin)

    def add(self, x, y, h=1.0):
        self.elements["add"] += x.size
        return super().add(x, y, h)

    def add_into(self, x, y, h=1.0):
        self.elements["add"] += x.size
        super().add_into(x, y, h)

    def scale(self, x, h):
        self.elements["scale"] += x.size
        return super().scale(x, h)

    def gelu(self, u):
        self.elements["gelu"] += u.size
        return super().gelu(u)

    def gelu_exact(self, u):
        self.elements["gelu_exact"] += u.size
        return super().gelu_exact(u)

    def relu2(self, u):
        self.elements["relu2"] += u.size
        return super().relu2(u)

    def swiglu(self, gate_up):
        h = super().swiglu(gate_up)
        self.elements["swiglu"] += h.size
        return h

    def cross_entropy(self, logits, targets, scale, cap=0.0):
        self.elements["cross_entropy"] += logits.size
        self.elements["logit_cap"] += logits.size * (cap > 0)
        return super().cross_entropy(logits, targets, scale, cap)


def has(tensor):
    """Whether the architecture has this tensor."""
    return tensor is not None


def run_step(engine, config, batch_size):
    """One training step on random tokens; returns the weights, the gradients and what was kept."""
    tokens, targets, scale = random_batch(config, batch_size)
    w = initialise(config, seed=0)
    dw = w.zeros_like()
    n, saved = model.stream(engine, config, w, tokens)
    W, dW = output_matrix(config, w), output_matrix(config, dw)
    _, dn = engine.loss(n, W, targets, scale, dW, config.logit_cap)
    layers = list(saved.layers)  # the backward pass uses them up
    model.backward(engine, config, w, saved, dn, dw)
    stages = [stage for halves in layers for half in halves for stage in half]
    kept = [x for stage in stages for x in (stage.x, stage.stats, *stage.saved)]
    # Left out: the first key that each query sees, which is not there, or the same T numbers.
    kept = [x for x in kept if x is not None and x.dtype != np.int32]
    return w, dw, [*kept, saved.x, saved.stats, n]


@settings(max_examples=100, deadline=None)  # each runs a training step
@given(config=configs(), batch_size=st.integers(1, 3))
def test_flops_and_memory_are_those_of_a_real_step(config, batch_size):
    engine = CountingEngine()
    w, dw, kept = run_step(engine, config, batch_size)
    tokens = batch_size * config.context
    assert 2 * engine.multiply_adds == tokens * flops_per_token(config, causal=False)
    rows = {row.name: row.flops for row in operations(config, batch_size, 4)}
    counted = {name: n * ELEMENTWISE[name][0] for name, n in engine.elements.items() if n}
    assert counted == {name: flops for name, flops in rows.items() if name in ELEMENTWISE}

    paper = memory(config, batch_size, value_bytes=4, flash=False)
    assert paper["weights"] == w.flat.nbytes
    assert paper["gradients"] == dw.flat.nbytes
    assert paper["moments"] == 2 * w.flat.nbytes
    assert paper["copy of the weights"] == 0
    assert paper["activations"] == sum(x.nbytes for x in kept)
    # The logits and their gradient, float32 each.
    assert paper["logits"] == 2 * 4 * tokens * config.n_predict * config.vocab_size


@given(config=configs(), batch_size=st.integers(1, 8), causal=st.booleans())
def test_the_rows_of_the_products_add_up_to_the_equation(config, batch_size, causal):
    rows = operations(config, batch_size, value_bytes=2, causal=causal)
    products = sum(row.flops for row in rows if row.name not in (*ELEMENTWISE, "adamw"))
    whole = batch_size * config.context * flops_per_token(config, causal)
    assert products == pytest.approx(whole, rel=8 * 2.0**-53)  # pairs of a window over T: rounded


def test_six_flops_a_parameter_but_for_lookups_gains_biases_and_attention():
    for config in PRESETS.values():
        assert config.integrator == "euler" and config.repeat == 1  # or the sum below is too small
        unmultiplied = sum(
            np.prod(shape) for name, shape in parameter_shapes(config).items()
            if len(shape) == 1 or name == "positions" or name == "embedding" and not config.tied
        )  # fmt: skip
        pairs = sum(range(1, config.context + 1))  # a query sees itself and all before it
        attention = 12 * config.n_layers * config.n_heads * config.head_dim * pairs
        predicted = 6 * (count_parameters(config) - unmultiplied) + attention // config.context
        assert flops_per_token(config) == predicted


@given(config=configs())
def test_stages_and_shared_blocks_multiply_what_lies_between_the_embeddings(config):
    stages = {"euler": 1, "heun": 2, "rk4": 4}[config.integrator]
    output = 6 * config.dim * config.n_predict * config.vocab_size
    plain = replace(config, integrator="euler", repeat=1)
    assert flops_per_token(config) - output == stages * (flops_per_token(plain) - output)


def test_the_hand_example_of_a_linear_layer():
    # 2 tokens, I = 3, O = 4: 144 FLOPs a step and 3 * (6 + 12 + 8) values, as in the chapter.
    config = ModelConfig(
        vocab_size=4, dim=4, n_layers=1, n_heads=1, n_kv_heads=1, hidden=3, context=2, n_predict=1
    )
    row = {row.name: row for row in operations(config, 1, value_bytes=4)}["w_down"]
    assert (row.flops, row.bytes) == (144, 4 * 3 * (6 + 12 + 8))


def test_what_is_added_moves_only_its_own_values():
    # Of 4 channels: wqkv 12, wo 4, w_up 3, w_down 4, the norms 4 + 4; and 4 for the last norm.
    config = ModelConfig(
        vocab_size=4, dim=4, n_layers=1, n_heads=1, n_kv_heads=1, hidden=3, context=2, n_predict=1,
        norm="layer", position="learned", mlp="gelu", bias=True,
    )  # fmt: skip
    rows = {row.name: row for row in operations(config, 5, value_bytes=4)}
    assert (rows["bias"].flops, rows["bias"].bytes) == (2 * 10 * 35, 4 * 2 * 35)
    assert (rows["positions"].flops, rows["positions"].bytes) == (2 * 10 * 4, 4 * 2 * 2 * 4)


def test_the_presets():
    assert count_parameters(LARGE) == pytest.approx(116.4e6, rel=1e-3)  # as the preset's name says
    # Radford and others, 2019: 12 layers of 12 C^2 weights, one matrix of V C used twice, T = 1024.
    gpt2 = 6 * (12 * 12 * 768**2 + 50257 * 768) + 6 * 12 * 768 * 1025
    assert flops_per_token(PRESETS["gpt2-124m"]) == gpt2
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
    names = [line.split()[0] for line in text.split("\nestimated")[1].splitlines()[1:]]
    assert names == [*DEVICES, "t4"] and {*names} == {"laptop", *CARDS}
    assert "t4          not supported: 7.5 has no bf16 products" in text
    assert text.endswith("train with --engine cpu")
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
        ({"device": "l4", "tokens": 10**400}, "expected at most 9223372036854775807 sequences"),
        ({"device": "l4", "batch_size": 10**5000}, "and tokens, got more: choose fewer"),
    ],
)
def test_bad_input_is_named(bad, message):
    with pytest.raises(UserError, match=message):
        estimate(SMALL, **bad)


def random_batch(config, batch_size):
    """Tokens, targets and scale."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(config.vocab_size, size=(batch_size, config.context), dtype=np.int32)
    shape = (*tokens.shape, config.n_predict)
    targets = rng.integers(config.vocab_size, size=shape, dtype=np.int32)
    return tokens, targets, np.ones(config.n_predict)


@pytest.mark.parametrize("integrator", CHOICES["integrator"])
def test_the_arena_is_as_large_as_said(integrator):
    sizes = dict(vocab_size=61, dim=48, n_layers=4, hidden=80, context=40, n_predict=1)
    names = ("norm", "position", "mlp", "bias", "tied")
    for *values, repeat in product(*(KNOWN[name] for name in names), (1, 2)):
        switches = dict(zip(names, values, strict=True))
        config = replace(
            SMALL, **sizes, **switches, integrator=integrator, step_size=0.5, repeat=repeat
        )
        w, engine = initialise(config, seed=0), CpuEngine()
        batch = random_batch(config, 2)
        model.loss_and_gradients(engine, config, w, *batch, w.zeros_like())
        ratio = arena_bytes(config, 2) / 4 / engine.arena.needed
        assert 0.99 < ratio <= 1, (switches, repeat, ratio)  # arrays are padded to 64 bytes


def test_the_logits_of_a_large_vocabulary_are_the_peak():
    config = replace(SMALL, vocab_size=5000, dim=32, n_layers=1, hidden=32, context=32)
    w = initialise(config, seed=0)
    for sequences in (2, 16):  # fewer positions than the loss takes at a time, and more
        engine = CpuEngine()
        batch = random_batch(config, sequences)
        model.loss_and_gradients(engine, config, w, *batch, w.zeros_like())
        assert 0.99 < arena_bytes(config, sequences) / 4 / engine.arena.needed <= 1


@pytest.mark.parametrize(
    "batch_size, accumulate, threads", [(8, 1, 2), (8, 2, 2), (12, 3, 1), (4, 1, 8)]
)
def test_training_holds_as_much_as_said(batch_size, accumulate, threads):
    tokens, targets, _ = random_batch(SMALL, batch_size)
    tracemalloc.start()
    w = initialise(SMALL, seed=0)
    stepper = make_stepper("cpu", w, AdamW(w), threads=threads, pieces=accumulate)
    for number in (1, 2):
        stepper.step(tokens, targets, 1e-3, number)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    predicted = sum(cpu_memory(SMALL, batch_size, accumulate, threads).values())
    # The first pass, before there is a slab, keeps a little more: names hold what nobody needs.
    assert 0.9 < predicted / peak < 1.02, predicted / peak


TRAINS = """
import re, sys
import numpy as np
from nanoeuler.engines.registry import make_stepper
from nanoeuler.model.config import PRESETS
from nanoeuler.model.weights import initialise
from nanoeuler.training.optim import AdamW

config = PRESETS["small"]
tokens = np.zeros((16, config.context), np.int32)
targets = np.zeros((*tokens.shape, config.n_predict), np.int32)
weights = initialise(config, seed=0)
stepper = make_stepper("cpu", weights, AdamW(weights), threads=2)
for number in (1, 2):
    stepper.step(tokens, targets, 1e-3, number)
print(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its peak")
def test_a_process_holds_as_much_as_said():
    for _ in range(2):  # the first may compile kernels, and holds the compiler
        done = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    predicted = PROCESS_BYTES + sum(cpu_memory(SMALL, 16, threads=2).values())
    assert 0.85 < predicted / (1024 * int(done.stdout)) < 1.15  # what chapter 13 promises


def test_a_summary_says_what_a_run_takes():
    text = summary(SMALL, 16, 500, threads=2, rate=450e9)
    flops = 500 * 16 * 128 * flops_per_token(SMALL)
    sizes = cpu_memory(SMALL, 16, threads=2)
    gigabytes = (PROCESS_BYTES + sum(sizes.values())) / 1e9
    assert "1,053,824 parameters; 500 steps of 16 x 128 tokens" in text
    assert f"{flops:.2e} FLOPs" in text and f"{gigabytes:.2f} GB" in text
    assert f"about {flops / (CPU_SHARE * 450e9):.1f} seconds" in text
    assert len(text.splitlines()) == 3


def test_steps_that_were_timed_tell_the_time_of_the_others():
    assert time_line(500, 0.36) == (
        "time    about 3.0 minutes for 500 more steps: the first ones took 360 ms each"
    )


def test_a_time_beyond_reckoning_fits_its_line():
    text = f"{size_lines(SMALL, 16, 2**63 - 1, threads=2)}\n{time_line(2**63 - 1, 1e300)}"
    assert "9.22e+18 steps" in text and "about 10,000 years or more for 9.22e+18 more steps" in text
    assert max(map(len, text.splitlines())) < 100
    text = report(LARGE, tokens=2**63 - 1)
    assert "10,000 years or more" in text and max(map(len, text.splitlines())) < 100
    assert "about 2.0 years" in time_line(2, 365.25 * 86400)


def test_the_plan_is_of_a_run_that_says_nothing_else():
    assert BATCH_SIZE == Settings().batch_size


def test_more_pieces_hold_less_and_more_threads_more():
    activations = {
        (pieces, threads): cpu_memory(SMALL, 16, pieces, threads)["activations"]
        for pieces in (1, 2) for threads in (1, 2)
    }  # fmt: skip
    assert activations[1, 2] == 2 * activations[1, 1] == 2 * activations[2, 2]
    assert cpu_memory(SMALL, 1, threads=4)["activations"] < activations[1, 2]  # one shard, no more


def test_the_least_limit_of_memory_counts(monkeypatch, tmp_path):
    (tmp_path / "max").write_text("123456789\n")
    (tmp_path / "none").write_text("max\n")
    limits = (str(tmp_path / "max"), str(tmp_path / "none"), str(tmp_path / "nowhere"))
    monkeypatch.setattr(machine, "LIMITS", limits)
    assert machine.limit() == 123456789
    machine.need(123456789, "it", "take less")
    with pytest.raises(UserError, match="it needs 200.0 MB.* has 123.5 MB: take less"):
        machine.need(2e8, "it", "take less")
    monkeypatch.setattr(machine, "LIMITS", ())
    assert machine.limit() <= machine.built_in()


def test_the_rate_is_that_of_products():
    rate = product_rate(1, seconds=0.02)
    # Between a processor that is shared with many, and 64 FLOPs a cycle at 6 GHz on one core.
    assert 1e8 < rate < 4e11


# ---- The cards that people own


OWNED = ("t4", "rtx-3060", "rtx-3090", "rtx-4060-ti", "rtx-4070", "rtx-4090", "rtx-5090", "a100",
         "l4", "h100", "h200")  # fmt: skip


def test_the_table_has_the_cards_that_people_own_and_says_what_is_known_of_each():
    assert {*CARDS} == {*OWNED} and {*SHARED} >= {card.capability for card in CARDS.values()}
    rows = {line.split()[0]: line for line in table().splitlines()[1:]}
    assert {*rows} == {*CARDS}
    assert {key for key in CARDS if rows[key].endswith("not supported")} == {"t4"}
    assert {key for key in CARDS if rows[key].endswith("  measured")} == MEASURED
    assert all(rows[key].endswith(known(key)) for key in CARDS)


def test_a_card_counts_as_measured_if_steps_were_timed_on_it():
    timed = {row["device"] for row in measurements.load("gpu") if row["what"] == "training step"}
    assert timed == {f"NVIDIA {CARDS[key].name}" for key in MEASURED}


def test_the_rate_of_a_geforce_is_that_of_the_whitepapers():
    """Of 3090, 4090 and 5090 a whitepaper has the peak, the multiprocessors and the clock."""
    for key, hertz in (("rtx-3090", 1.695e9), ("rtx-4090", 2.52e9), ("rtx-5090", 2.407e9)):
        card = CARDS[key]
        worked_out = GEFORCE * card.multiprocessors * hertz
        assert worked_out == pytest.approx(card.flops_per_s, rel=0.005)  # the last digit printed


@pytest.mark.parametrize("key", [key for key, card in CARDS.items() if card.supported])
@pytest.mark.parametrize("engine", ["cuda", "cuda-tf32"])
def test_every_launch_of_a_step_has_the_shared_memory_that_it_asks_for(key, engine):
    card = CARDS[key]
    for config in (SMALL, PRESETS["gpt2-124m"]):
        place = Machine(card.capability, card.multiprocessors)
        made = record_step(config, 4, config.context, place, PRECISIONS[engine], step.RULES)
        launches = [each.launch for each in made.program.steps]
        asked = [each.kernel.shared for each in launches if isinstance(each, Launch)]
        assert 0 < max(asked) <= SHARED[card.capability]


def test_a_card_without_products_of_bf16_can_record_no_step():
    assert [key for key, card in CARDS.items() if card.capability < OLDEST] == ["t4"]
    assert CARDS["t4"].flops_per_s == 0 and "t4" not in DEVICES
    place = Machine(CARDS["t4"].capability, CARDS["t4"].multiprocessors)
    with pytest.raises(UserError, match="8.0 or newer"):
        record_step(SMALL, 2, SMALL.context, place, PRECISIONS["cuda"], step.RULES)


def test_a_step_whose_sizes_no_kernel_can_count_is_refused():
    place = Machine(CARDS["h200"].capability, CARDS["h200"].multiprocessors)
    huge = replace(SMALL, n_predict=2**31 // SMALL.vocab_size + 1)
    for name, said in ("cuda", "31 bits"), ("cuda-tf32", "2.34"):
        with pytest.raises(UserError, match=said):
            record_step(huge, 2, SMALL.context, place, PRECISIONS[name], step.RULES)


def test_a_plan_of_an_engine_has_a_line_for_every_card():
    text = step.on_cards(SMALL, 16, "cuda").splitlines()
    assert [line.split()[0] for line in text] == ["cuda", *CARDS]
    words = {line.split()[0]: line.split()[-1] for line in text[2:]}
    assert {*words.values()} == {"estimated"}  # of this step no time was taken anywhere
    assert max(map(len, text)) < 100
    assert "long: none was written" in step.on_cards(replace(SMALL, n_layers=201), 1, "cuda")
    for batch_size in 1 << 17, 2**63 - 1:  # of 128 tokens: the most, and more
        written = batch_size == 1 << 17
        told = step.too_long(SMALL, batch_size)
        assert told == ("" if written else step.on_cards(SMALL, batch_size, "cuda"))
        assert written or "tokens a step are long: none was written" in told
    large = step.on_cards(LARGE, 16, "cuda").splitlines()
    timed = [line for line in large if line.endswith("  measured")]
    assert [line.split()[0] for line in timed] == ["h200"]
    assert f"{1e3 * step.measured('h200', LARGE, 16, 'cuda'):,.2f}" in timed[0]
    assert step.measured("h200", LARGE, 17, "cuda") is None
    assert step.measured("h100", LARGE, 16, "cuda") is None  # that was timed on an H200 alone


def test_a_measured_step_is_one_of_our_own_products():
    rows = {(row["case"], row["engine"]): row["value"] for row in measurements.load("gpu")
            if row["what"] == "training step"}  # fmt: skip
    for engine, kind in zip(GPU_ENGINES, ("bf16", "TF32", "float32"), strict=True):
        wanted = rows[f"euler-116m 16x512 {kind}", "cuda, own products"] / 1e3
        assert step.measured("h200", LARGE, 16, engine) == wanted


def test_a_plan_does_without_measurements(monkeypatch):
    def none(name):
        raise UserError("not in a checkout")

    monkeypatch.setattr(measurements, "load", none)
    assert step.measured("h200", LARGE, 16, "cuda") is None


def test_the_speeds_of_a_card_are_the_shares_that_an_h200_reaches():
    assert step.speeds_of(CARDS["h200"]) == step.H200
    half = CARDS["h200"]._replace(flops_per_s=CARDS["h200"].flops_per_s / 2)
    slower = step.speeds_of(half)
    assert slower.products["bf16"] == step.H200.products["bf16"] / 2
    assert slower.attention[1] == step.H200.attention[1] / 2 and slower.bytes == step.H200.bytes


def test_a_plan_for_this_machine_says_whose_time_it_is(monkeypatch):
    monkeypatch.setattr(planning, "product_rate", lambda threads: 1e12)
    text = planning.here(SMALL, 16, None, "cpu")
    steps = -(-20 * count_parameters(SMALL) // (16 * SMALL.context))
    assert f"{steps:,} steps of 16 x 128 tokens" in text and len(text.splitlines()) == 3
    slower = planning.here(SMALL, 16, 10**6, "reference")
    assert "489 steps" in slower and slower.splitlines()[-1].strip().startswith("by the engine cpu")
