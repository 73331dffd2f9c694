"""A sliding window: which keys a query sees, alike in every program that computes attention.

`test_switches.py` and the gradient check have a window of 2 among all other switches. Here are
other widths, several texts in a row, texts that grow beyond the context, what the planner counts,
and planted mistakes.
"""

import dataclasses
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import recorded as helpers
from mutants import Mutant, load, source
from slopes import slopes
from test_cuda_engine import AMPERE, HOPPER, TURNED, WIDE, bound
from tiers import kept, thinned

import nanoeuler as ne
from nanoeuler.checks import gradcheck
from nanoeuler.checks.derivatives import relative_error
from nanoeuler.cli import main as cli
from nanoeuler.emulator import Device
from nanoeuler.engines.cpu import decode as cpu_decode
from nanoeuler.engines.cpu import options
from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.engines.cpu.engine import CpuEngine, FusedEngine
from nanoeuler.engines.gpu.decode.decoder import CudaReader
from nanoeuler.engines.gpu.decode.gemv import Heads, part_blocks
from nanoeuler.engines.gpu.step.engine import CudaEngine
from nanoeuler.engines.gpu.step.precision import BF16, PRECISIONS
from nanoeuler.engines.gpu.step.recording import ProgramBuilder, record_step
from nanoeuler.engines.gpu.step.stepper import CudaStepper
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.inference.decoder import Decoder, EngineReader, generate
from nanoeuler.model.attention import attention
from nanoeuler.model.config import ModelConfig, first_keys
from nanoeuler.model.transformer import forward, loss_and_gradients
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.planning import counts
from nanoeuler.training.checkpoint import read_record
from nanoeuler.training.optim import AdamW

SMALL = ModelConfig(
    vocab_size=23, dim=16, n_layers=3, n_heads=4, n_kv_heads=2, hidden=24, context=17, n_predict=1,
    sliding_window=4,
)  # fmt: skip
LEARNED = replace(SMALL, position="learned", norm="layer", mlp="gelu", bias=True, tied=True)
MODELS = {"RoPE": SMALL, "learned": LEARNED}
TEXTS = np.array([[0] * 9 + [9] * 8, [0] + [1] * 6 + [7] * 2 + [9] * 8], np.int32)
# A float32 sum of at most 128 terms rounds by at most 128 u, and a dozen sums follow each other.
FLOAT32 = 12 * 128 * 2.0**-24


def model(config, dtype=np.float32):
    """Weights, none of whose gains is 1 and none of whose biases is 0."""
    w = Weights(config, dtype)
    w.flat[...] = initialise(config, 0).flat
    rng = np.random.default_rng(1)
    for tensor in w.values():
        tensor += 0.3 * rng.standard_normal(tensor.shape)
    return w


def tokens_for(config, B=2, seed=2):
    return np.random.default_rng(seed).integers(config.vocab_size, size=(B, config.context))


def by_hand(heads, G, window, first):
    """Equation eq-attention with the keys of each query written out: no mask."""
    B, T, N, D = heads.shape
    H = N - 2 * G
    y = np.zeros((B, T, H, D))
    for b, t, h in np.ndindex(B, T, H):
        seen = [s for s in range(t + 1) if s > t - window and s >= first[b, t]]
        g = h // (H // G)
        scores = np.array([heads[b, t, h] @ heads[b, s, H + g] for s in seen]) / np.sqrt(D)
        p = np.exp(scores - scores.max())
        y[b, t, h] = p @ heads[b, seen, H + G + g] / p.sum()
    return y.reshape(B, T, H * D)


@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 18, 10**30])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("engine", [ReferenceEngine, FusedEngine, CpuEngine])
def test_attention_sees_its_window_and_its_text(engine, packed, window):
    heads = np.random.default_rng(0).standard_normal((2, 17, 8, 4)).astype(np.float32)
    texts = TEXTS if packed else np.zeros_like(TEXTS)
    first = engine().first_keys(replace(SMALL, sliding_window=window), 2, 17,
                                TEXTS if packed else None)  # fmt: skip
    got = engine().attention(heads.copy(), 2, first)[0]
    exact = by_hand(heads.astype(np.float64), 2, window, texts)
    assert np.abs(got - exact).max() <= FLOAT32 * np.abs(heads).max()


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_window_as_wide_as_the_context_is_none(config):
    w, tokens = model(config), tokens_for(config)
    for engine in ReferenceEngine(), CpuEngine():
        ends = []
        for window in (0, config.context, config.context + 9):
            wide = replace(config, sliding_window=window)
            ends.append(forward(engine, wide, w, tokens)[0].copy())
        assert np.array_equal(ends[0], ends[1]) and np.array_equal(ends[0], ends[2])


def reached(logits, tokens):
    """How many positions, from the first on, notice that the token there is another one."""
    other = tokens.copy()
    other[0] = (other[0] + 1) % SMALL.vocab_size
    changed = np.any(logits(tokens) != logits(other), axis=1)
    assert changed[: changed.sum()].all()
    return changed.sum()


@pytest.mark.parametrize("layers, window", [(1, 1), (1, 4), (2, 3), (3, 4), (3, 1)])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_layers_reach_as_far_as_the_chapter_says(layers, window, position):
    config = replace(SMALL, n_layers=layers, sliding_window=window, position=position)
    w, tokens = model(config), tokens_for(config, B=1)
    whole = [partial(logits_by, engine(), config, w) for engine in (ReferenceEngine, CpuEngine)]
    grown = [partial(one_by_one, reader(config, w)) for reader in (EngineReader, CpuReader)]
    for logits in whole + grown:
        assert reached(logits, tokens[0]) == layers * (window - 1) + 1


def logits_by(engine, config, w, tokens):
    return forward(engine, config, w, tokens[None])[0][0, :, 0].copy()


def one_by_one(reader, tokens, cut=1):
    """The logits (T, V) of a reader that reads `cut` tokens at a time."""
    ends = []
    for start in range(0, len(tokens), cut):
        piece = [int(token) for token in tokens[start : start + cut]]
        ends.append(reader.read([piece], [start], len(piece))[0, :, 0].copy())
    return np.concatenate(ends)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_gradients_are_the_complex_steps(config, packed):
    config = replace(config, context=7, sliding_window=3)
    problem = gradcheck.tiny_problem(config)
    first = np.array([[0, 0, 0, 0, 4, 4, 4]] * 3) if packed else None

    class Packed(ReferenceEngine):  # the problems of the check have one text a row
        def first_keys(self, config, B, T, none=None):
            return super().first_keys(config, B, T, first)

    derived = problem.w.zeros_like()
    loss_and_gradients(Packed(), *problem, derived)
    for slope in slopes(problem, Packed(), 3):
        assert slope.error(derived) < 1e-12


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, 17])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_gradients_of_the_cpu_are_the_references(config, window, packed):
    config = replace(config, sliding_window=window)
    tokens, first = tokens_for(config), TEXTS if packed else None
    targets, scale = np.roll(tokens, -1, axis=1)[..., None], np.full(1, 1 / tokens.size)
    w, exact_w = model(config), model(config, np.float64)
    exact_w.flat[...] = w.flat
    exact = exact_w.zeros_like()
    loss_and_gradients(ReferenceEngine(), config, exact_w, tokens, targets, scale, exact, first)
    for engine in FusedEngine(), CpuEngine():
        dw = w.zeros_like()
        loss_and_gradients(engine, config, w, tokens, targets, scale, dw, first)
        for name in dw:
            assert relative_error(dw[name], exact[name]) <= FLOAT32, name


@pytest.mark.parametrize("reader", [EngineReader, CpuReader])
@pytest.mark.parametrize("window", [1, 3, 8, 16, 17, 40])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_cache_sees_what_the_whole_pass_does(config, window, reader):
    config = replace(config, sliding_window=window, context=40)  # more keys than a panel has
    w, tokens = model(config), tokens_for(config, 1)
    exact = forward(ReferenceEngine(), config, w, tokens)[0][0, :, 0]
    for cut in (1, 3, 17, 40):
        got = one_by_one(reader(config, w), tokens[0], cut)
        assert np.abs(got - exact).max() <= FLOAT32 * np.abs(exact).max()


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_text_goes_on_beyond_the_context(config):
    w, prompt = model(config), tokens_for(config, 1)[0, :9].tolist()
    read = {name: list(generate(Decoder(config, w, reader), prompt, 40, temperature=0.0))
            for name, reader in {"reference": EngineReader(config, w),
                                 "cpu": EngineReader(config, w, CpuEngine()),
                                 "compiled": CpuReader(config, w)}.items()}  # fmt: skip
    assert len(read["cpu"]) == 40 and read["cpu"] == read["compiled"] == read["reference"]
    decoder, text = Decoder(config, w, CpuReader(config, w)), [*prompt]
    for token in read["cpu"]:
        logits = decoder.read(text if len(text) == 9 else text[-1:]).copy()
        held = np.array([decoder.tokens])
        exact = forward(ReferenceEngine(), config, w, held)[0][0, -1, 0]
        assert np.abs(logits - exact).max() <= FLOAT32 * np.abs(exact).max()
        text.append(token)


def test_taking_tokens_back_finds_what_the_window_had_left():
    w, tokens = model(SMALL), tokens_for(SMALL, 1)[0]
    for reader in EngineReader(SMALL, w), CpuReader(SMALL, w):
        decoder = Decoder(SMALL, w, reader)
        decoder.read(tokens[:12])
        decoder.forget(8)
        got = decoder.read(tokens[12:14]).copy()
        text = np.array([[*tokens[:4], *tokens[12:14]]])
        exact = forward(ReferenceEngine(), SMALL, w, text)[0][0, -1, 0]
        assert np.abs(got - exact).max() <= FLOAT32 * np.abs(exact).max()


# A GPU's training step, emulated. The bound is test_cuda_engine.py's.
GPU = replace(TURNED, sliding_window=3)
GPU_LEARNED = replace(
    GPU, position="learned", norm="layer", mlp="gelu", bias=True, tied=True, step_size=0.7
)
PACKED = np.array([[0, 0, 0, 0, 0, 0, 6, 6, 6], [0, 1, 1, 1, 1, 5, 6, 6, 8]], np.int32)


def on_a_gpu(config, machine=HOPPER, precision=WIDE, **how):
    outcome = helpers.step_on_paper(config, 2, 9, machine, precision, **how)
    return max(outcome.errors().values())


@pytest.mark.parametrize("config, packed", kept(
    [(GPU, False), (GPU, True), (GPU_LEARNED, False), (GPU_LEARNED, True)],
    (GPU_LEARNED, False)), ids=["RoPE", "RoPE, packed", "learned", "learned, packed"],
)  # fmt: skip
def test_gradients_of_a_gpu_are_the_references(config, packed, monkeypatch):
    """Those of packed rows are below, where layers have windows of their own."""
    helpers.by_numpy(monkeypatch, attention=False)
    more = {"first": PACKED} if packed else {"pieces": 2}
    assert on_a_gpu(config, **more) < bound(config)


def test_gradients_of_an_older_gpu_and_in_float32(monkeypatch):
    helpers.by_numpy(monkeypatch, attention=False)
    narrow = replace(GPU, n_heads=2, n_kv_heads=1, dim=64)
    assert on_a_gpu(narrow, AMPERE) < bound(narrow)
    assert on_a_gpu(narrow, AMPERE, PRECISIONS["cuda-float32"]) < 1e-5


def test_a_stepper_of_a_gpu_has_the_window_in_steps_and_in_sums(monkeypatch):
    """Both call `fill_batch` for themselves."""
    seen = []
    monkeypatch.setattr(CudaStepper, "program_for", lambda self, *_, **how: Asked(seen))
    monkeypatch.setattr(CudaStepper, "launch", lambda self, this: None)
    monkeypatch.setattr(CudaStepper, "push", lambda self: None)
    w = model(GPU)
    stepper = CudaStepper(w, AdamW(w), None)
    tokens = np.zeros((2, 9), np.int32)
    stepper.step(tokens, tokens[..., None], 1e-3, 1, PACKED)
    stepper.in_flight = None
    stepper.sums(tokens, tokens[..., None], PACKED)
    assert len(seen) == 2
    for page in seen:
        assert np.array_equal(page["first 0"], first_keys(GPU, 9, PACKED))


class Asked:
    """A program whose inbox is remembered."""

    def __init__(self, seen):
        page = {name: np.zeros((2, 9), np.int32) for name in ("tokens 0", "first 0", "last 0")}
        page |= {"targets 0": np.zeros((2, 9, 1), np.int32), "scale": np.zeros(1),
                 "rates": np.zeros((1, 4))}  # fmt: skip
        seen.append(page)
        self.inbox, self.outbox = self, self
        self.page, self.read = lambda: page, lambda: {"sums": np.zeros((1, 4))}


MIXED = replace(GPU, n_layers=3, window_pattern="SSL")
OTHER = replace(GPU_LEARNED, n_layers=2, window_pattern="LS")


@pytest.mark.parametrize("config, packed", kept(
    [(MIXED, False), (MIXED, True), (OTHER, False), (OTHER, True)], (MIXED, True)),
    ids=["RoPE, SSL", "RoPE, SSL, packed", "learned, LS", "learned, LS, packed"],
)  # fmt: skip
def test_windows_of_layers_on_a_gpu(config, packed, monkeypatch):
    helpers.by_numpy(monkeypatch, attention=False)
    assert on_a_gpu(config, **({"first": PACKED} if packed else {})) < bound(config)


def test_a_program_has_lines_for_each_window_that_occurs():
    def lines(config):
        recorded = ProgramBuilder(config, HOPPER, BF16).build_step(
            2, 9, helpers.RULES, packed=True)
        return {name for name in recorded.inputs if name.startswith(("first", "last"))}

    assert lines(GPU) == lines(replace(GPU, window_pattern="L")) == {"first 0", "last 0"}
    assert lines(MIXED) == {"first 0", "last 0", "first 0, window 0", "last 0, window 0"}


# A block of attention has 8 positions.
DECODED = replace(SMALL, n_layers=1, n_heads=2, n_kv_heads=1, hidden=16, head_width=16)
CUTS = 1, 1, 7, 1


def decoded(config):
    """Logits of ten tokens by a GPU's reader, emulated, in CUTS."""
    w, tokens = model(config), tokens_for(config, 1)[0].tolist()
    reader = CudaReader(config, w, Device(multiprocessors=2), "float32", chunk=8, warps=1)
    at, rows = 0, []
    for n in CUTS:
        rows.append(reader.read([tokens[at : at + n]], [at], rows=n)[0, :, 0])
        at += n
    return np.concatenate(rows)


def exactly(config):
    """The same in float64, of the whole text at once."""
    w, tokens = model(config, np.float64), tokens_for(config, 1)[:, : sum(CUTS)]
    w.flat[...] = model(config).flat
    return forward(ReferenceEngine(), config, w, tokens)[0][0, :, 0]


@pytest.mark.parametrize("window", thinned([1, 3, 9], 2))
def test_a_decoder_of_a_gpu_sees_the_window(window):
    config = replace(DECODED, sliding_window=window)
    want = exactly(config)
    assert np.abs(decoded(config) - want).max() <= FLOAT32 * np.abs(want).max()


def test_a_decoder_of_a_gpu_sees_each_layers_window():
    config = replace(DECODED, n_layers=2, sliding_window=3, window_pattern="SL")
    got, want = decoded(config), exactly(config)
    assert np.abs(got - want).max() <= FLOAT32 * np.abs(want).max()
    for pattern in "LS", "S", "L":
        other = exactly(replace(config, window_pattern=pattern))
        assert np.abs(other - want).max() > 2 * FLOAT32 * np.abs(want).max()


def test_attention_over_a_window_has_no_more_blocks_than_it_needs():
    """Every place of a window, counted: chunks that it touches."""
    for window in range(1, 40):
        touched = [(p >> 3) - (max(p + 1 - window, 0) >> 3) + 1 for p in range(64)]
        assert max(touched) == part_blocks(Heads(2, 1, 32, 64, True, 8, window))
    assert part_blocks(Heads(2, 1, 32, 64, True, 8)) == 8


# What is counted.
@pytest.mark.parametrize("window", [0, 1, 2, 5, 17, 99])
def test_the_planner_counts_the_pairs_that_are_seen(window):
    config = replace(SMALL, sliding_window=window)
    none = np.zeros((1, 17), np.int32)
    p = attention(np.zeros((1, 17, 3, 2)), 1, first_keys(config, 17, none))[1]
    assert counts.pairs(config) == np.count_nonzero(p)
    assert counts.pairs(config, causal=False) == 17 * 17
    flops = {each.name: each.flops for each in counts.operations(config, 2, 4)}["attention"]
    assert flops == 12 * 3 * 2 * 16 * np.count_nonzero(p)
    without = replace(config, sliding_window=0)
    fewer = 12 * 3 * 16 * (counts.pairs(without) - counts.pairs(config)) / 17
    less = counts.flops_per_token(without) - counts.flops_per_token(config)
    assert less == pytest.approx(fewer, rel=1e-12)


@pytest.mark.parametrize("window", [0, 1, 5, 99])
def test_the_program_of_a_step_counts_as_the_planner(window):
    """One product more than the planner's six: the backward makes the scores again."""
    config = replace(GPU, context=16, sliding_window=window)
    steps = record_step(config, 2, 16, HOPPER, BF16, helpers.RULES).program.steps
    found = {name: sum(each.flops for each in steps if each.name == name)
             for name in ("attention", "attention backward")}  # fmt: skip
    pairs = 2 * config.n_layers * config.dim * counts.pairs(config)
    assert found == {"attention": 4 * pairs, "attention backward": 10 * pairs}


# Runs and the command line.
def test_a_run_keeps_its_window(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The river goes down to the sea. " * 60)
    out = tmp_path / "run"
    sizes = "--dim 16 --layers 1 --heads 2 --kv-heads 1 --context 16 --vocab-size 260"
    line = f"train --data {text} --out {out} {sizes} --sliding-window 5 --steps 2 --batch-size 2"
    assert cli.main([*line.split(), "--engine", "cpu"]) == 0
    assert read_record(out).config.sliding_window == 5
    loaded = ne.load(out)
    assert loaded.config.sliding_window == 5
    written = loaded.generate("The river", tokens=30, seed=3, engine="cpu")
    assert written == loaded.generate("The river", tokens=30, seed=3, engine="reference")


def test_a_configuration_from_before_there_were_windows_has_none(tmp_path):
    values = dataclasses.asdict(SMALL)
    del values["sliding_window"]
    assert ModelConfig(**json.loads(json.dumps(values))) == replace(SMALL, sliding_window=0)


def test_a_wrong_window_is_one_sentence(capfd):
    assert cli.main("plan --sliding-window -1".split()) != 0
    assert "whole number of at least 0" in capfd.readouterr().err
    assert cli.main("plan --sliding-window 8".split()) == 0


# Planted mistakes. Each must be seen by one of the claims above.
def whole_pass_is_by_hand(wrong, monkeypatch):
    monkeypatch.setattr("nanoeuler.engines.interface.first_keys", wrong.first_keys)
    for packed in (False, True):
        test_attention_sees_its_window_and_its_text(ReferenceEngine, packed, 5)


def engine_is_by_hand(wrong, monkeypatch):
    monkeypatch.setattr(ReferenceEngine, "first_keys", wrong.Engine.first_keys)
    for packed in (False, True):
        test_attention_sees_its_window_and_its_text(ReferenceEngine, packed, 5)


def half_is_by_hand(wrong, monkeypatch):
    monkeypatch.setattr(ReferenceEngine, "attend", wrong.Engine.attend)
    test_layers_reach_as_far_as_the_chapter_says(2, 3, "rope")


def cache_is_the_pass(wrong, monkeypatch):
    for window in (3, 8):
        test_a_cache_sees_what_the_whole_pass_does(SMALL, window, wrong.EngineReader)


def compiled_is_the_pass(wrong, monkeypatch):
    for window in (3, 16):
        test_a_cache_sees_what_the_whole_pass_does(SMALL, window, wrong.CpuReader)


def gpu_is_the_reference(wrong, monkeypatch):
    helpers.by_numpy(monkeypatch)
    for name in ("first_keys", "attention", "attention_backward", "attend"):
        monkeypatch.setattr(CudaEngine, name, getattr(wrong.CudaEngine, name))
    assert on_a_gpu(GPU) < bound(GPU)


def packed_is_the_reference(wrong, monkeypatch):
    helpers.by_numpy(monkeypatch)
    monkeypatch.setattr(helpers, "fill_batch", wrong.fill_batch)
    assert on_a_gpu(GPU_LEARNED, first=PACKED) < bound(GPU_LEARNED)
    assert on_a_gpu(GPU, first=PACKED) < bound(GPU)


def mixed_is_the_reference(wrong, monkeypatch):
    helpers.by_numpy(monkeypatch)
    monkeypatch.setattr(CudaEngine, "first_keys", wrong.CudaEngine.first_keys)
    assert on_a_gpu(OTHER, first=PACKED) < bound(OTHER)


ON_PAPER = gpu_is_the_reference, packed_is_the_reference, mixed_is_the_reference
FIRST = "model.config", "first_keys"
GPU_ENGINE = "engines.gpu.step.engine"
MISTAKES = {
    "one key more": (*FIRST, "(window - 1)", "window", whole_pass_is_by_hand),
    "one key less": (*FIRST, "(window - 1)", "(window - 2)", whole_pass_is_by_hand),
    "texts forgotten": (*FIRST, "np.maximum(begins, first,", "np.maximum(begins, begins,",
                        whole_pass_is_by_hand),
    "window forgotten in texts": (*FIRST, "np.maximum(begins, first,", "np.maximum(first, first,",
                                  whole_pass_is_by_hand),
    "the smaller": (*FIRST, "np.maximum(begins, first,", "np.minimum(begins, first,",
                    whole_pass_is_by_hand),
    "engine forgets texts": ("engines.interface", "first_keys", "first_keys(config, T, first)",
                             "first_keys(config, T)", engine_is_by_hand),
    "half forgets": ("engines.interface", "attend", "self.first_keys(config, B, T, first)",
                     "first", half_is_by_hand),
    "cache sees all": ("inference.decoder", "attention", "first = self.first[new]",
                       "first = 0 * self.first[new]", cache_is_the_pass),
    "cache counts from 0": ("inference.decoder", "attention", "first - first[0]", "first",
                            cache_is_the_pass),
    "cache: all as the oldest": ("inference.decoder", "hidden_keys", "first[:, None]", "first[0]",
                                 cache_is_the_pass),
    "GPU sees all": (GPU_ENGINE, "first_keys", "if seen is None", "if first is None",
                     gpu_is_the_reference),
    "GPU: one key more": (GPU_ENGINE, "first_keys", "config.sliding_window, B",
                          "config.sliding_window + 1, B", gpu_is_the_reference),
    "GPU: keys of all queries": (GPU_ENGINE, "first_keys", "self.recording.constant, lines",
                                 "self.recording.constant, (lines[0], 0 * lines[0] + T - 1)",
                                 gpu_is_the_reference),
    "GPU: backward sees all": (GPU_ENGINE, "attention_backward",
                               "documents = first and first.documents", "documents = None",
                               gpu_is_the_reference),
    "GPU: half forgets": (GPU_ENGINE, "attend", "first = self.first_keys(config, B, T, first)",
                          "pass", gpu_is_the_reference),
    "packed rows without": ("engines.gpu.step.recording", "fill_batch",
                            "seen = first_keys(own, tokens.shape[1], first[x])",
                            "seen = first[x]", packed_is_the_reference),
    "places in the window": ("engines.gpu.step.recording", "fill_batch",
                             "np.arange(first.shape[1]) - first[x]",
                             "np.arange(first.shape[1]) - seen", packed_is_the_reference),
    "packed rows of one window": (GPU_ENGINE, "first_keys",
                                  "first.windows[config.sliding_window]", "first.documents",
                                  mixed_is_the_reference),
}  # fmt: skip


def planted(name):
    module, function, old, new, _ = MISTAKES[name]
    return Mutant(module, function, name, old, new)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_have_their_place(name):
    source(planted(name))


# Those of a GPU take seconds, and one of each claim is enough to test the claim.
@pytest.mark.parametrize("name", kept(
    MISTAKES, *(name for name, (*_, claim) in MISTAKES.items() if claim not in ON_PAPER),
    *{claim: name for name, (*_, claim) in MISTAKES.items() if claim in ON_PAPER}.values(),
))  # fmt: skip
def test_mistakes_are_seen(name, monkeypatch):
    claim = MISTAKES[name][-1]
    wrong = load(planted(name))
    with pytest.raises(AssertionError):
        claim(wrong, monkeypatch)


@pytest.mark.parametrize("wrong", [lambda window: window + 1, lambda window: 0],
                         ids=["one key more", "sees all"])  # fmt: skip
def test_mistakes_that_the_compiled_reader_is_given_are_seen(wrong, monkeypatch):
    def mistaken(config, *rest):
        return first_keys(replace(config, sliding_window=wrong(config.sliding_window)), *rest)

    monkeypatch.setattr(cpu_decode, "first_keys", mistaken)
    with pytest.raises(AssertionError):
        compiled_is_the_pass(cpu_decode, monkeypatch)


@pytest.mark.long  # each compiles the pass
@pytest.mark.parametrize("old, new", [("low : t + 1", "0 : t + 1"), ("values[low:]", "values"),
                                      ("begins[t]", "min(t, begins[t] + 1)")])  # fmt: skip
def test_mistakes_of_the_compiled_reader_are_seen(old, new, monkeypatch):
    monkeypatch.setitem(options.KERNEL, "cache", False)  # there is no file to keep it beside
    wrong = load(Mutant("engines.cpu.decode", "_group", "window", old, new))
    with pytest.raises(AssertionError):
        compiled_is_the_pass(wrong, monkeypatch)
