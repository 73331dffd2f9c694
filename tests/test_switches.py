"""No switch of a model is silently wrong: every program refuses a value or computes another model.

The programs: three engines of a CPU, one of a GPU, three readers, the planner. A value that one of
them does not name among its `SUPPORTS` is refused, and so is a switch that it has never heard of.
What it does name changes its numbers, or what is recorded or planned, and the numbers are those of
the reference engine.
"""

import functools
import hashlib
import json
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import recorded
from crossings import KNOWN
from test_cuda_engine import HOPPER, MODELS, WIDE, bound
from tiers import kept

import nanoeuler as ne
from nanoeuler.checks import gradcheck
from nanoeuler.emulator.device import Device
from nanoeuler.engines import reference
from nanoeuler.engines.cpu import decode as cpu_decode
from nanoeuler.engines.cpu import engine as cpu_engine
from nanoeuler.engines.gpu.decode import decoder as gpu_decode
from nanoeuler.engines.gpu.decode.decoder import Decoding, check_model
from nanoeuler.engines.gpu.step import engine as gpu_engine
from nanoeuler.engines.gpu.step.recording import record_step
from nanoeuler.errors import UserError
from nanoeuler.inference.decoder import EngineReader
from nanoeuler.model.config import CHOICES, SCALES, ModelConfig, require
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import Weights
from nanoeuler.planning import counts
from nanoeuler.planning.plan import cpu_memory
from nanoeuler.training.run import FACTS, identity

BASE = ModelConfig(
    vocab_size=64, dim=64, n_layers=2, n_heads=2, n_kv_heads=1, hidden=64, context=16, n_predict=1
)
OTHERS = {  # another value of what is no choice between names
    "vocab_size": 72, "dim": 128, "n_layers": 4, "n_heads": 1, "n_kv_heads": 2, "hidden": 72,
    "context": 24, "n_predict": 2, "step_size": 0.7, "repeat": 2,
}  # fmt: skip
CHANGES = [(name, value) for name, values in CHOICES.items() for value in values[1:]]
CHANGES[CHANGES.index(("head_width", 16))] = "head_width", 64  # which a GPU's attention has, too
CHANGES += OTHERS.items()
REFUSED = {name: () for name in ("reference", "fused", "cpu", "reader", "cpu reader", "planner")}
REFUSED["cuda"] = ()
REFUSED["gpu reader"] = "integrator", "n_predict"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def base_for(name, program=""):
    """The model in which this field is changed: layers can share a block where there are four.

    A GPU on paper takes a second for each, and has one unless the field is about layers, and then
    two.
    """
    if name == "window_pattern":
        return replace(BASE, sliding_window=2)
    if program == "gpu reader":
        return BASE if name in ("repeat", "n_layers") else replace(BASE, n_layers=1)
    return replace(BASE, n_layers=4) if name == "repeat" else BASE


def changed(name, value, base=None):
    """The model with this value of a field, and the numbers that belong to it."""
    beside = gradcheck.ROPE[value] if name == "rope_scaling" else {}
    return replace(base or base_for(name), **{name: value}, **beside)


def weights(config):
    """Random weights, nothing zero: a tensor of the same name and shape has the same numbers."""
    w = Weights(config)
    for name, tensor in w.items():
        seed = sum(name.encode())
        tensor[...] = 0.3 * np.random.default_rng(seed).standard_normal(tensor.shape)
    return w


def logits_of(make):
    def run(config):
        return forward(make(), config, weights(config), np.array([TOKENS]))[0][0]

    return run


def read_by(make):
    def run(config):
        rows = len(TOKENS)
        reader = make(config, weights(config))
        return np.array(reader.read([TOKENS], [0], rows, config.n_predict)[0])

    return run


def decoded(config):
    """The logits of the compiled decoder of a GPU, emulated; its first head alone."""
    device = Device(multiprocessors=2)
    follower = gpu_decode.CudaReader(config, weights(config), device, "bf16", chunk=32, warps=1)
    return follower.read([TOKENS], [0], len(TOKENS))[0]


def planned(config):
    """What the planner says of a training step: FLOPs and bytes."""
    found = [(each.name, each.flops, each.bytes) for each in counts.operations(config, 2, 4)]
    return found, counts.memory(config, 2, 4), cpu_memory(config, 2, threads=1)


def recorded_step(config):
    """The launches of a training step on a GPU, and what they are given."""
    steps = record_step(config, 2, 4, HOPPER, WIDE, recorded.RULES).program.steps
    return [(each.name, each.launch.kernel, each.launch.grid, each.nbytes, each.flops,
             [arg for arg in each.launch.args if isinstance(arg, (int, float))])
            for each in steps]  # fmt: skip


NUMBERS = {
    "reference": (reference, logits_of(reference.ReferenceEngine)),
    "fused": (cpu_engine, logits_of(cpu_engine.FusedEngine)),
    "cpu": (cpu_engine, logits_of(cpu_engine.CpuEngine)),
    "reader": (reference, read_by(EngineReader)),
    "cpu reader": (cpu_decode, read_by(cpu_decode.CpuReader)),
    "gpu reader": (gpu_decode, decoded),
}
PROGRAMS = {**NUMBERS, "cuda": (gpu_engine, recorded_step), "planner": (counts, planned)}


@functools.cache
def numbers(program, config):
    """What a program makes of a model as the package is: tests that change nothing share it."""
    return PROGRAMS[program][1](config)


def test_every_field_is_changed_here():
    found = {field.name for field in fields(ModelConfig)}
    assert {name for name, _ in CHANGES} | SCALES.keys() == found


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", CHOICES)
def test_a_value_without_code_is_refused(program, name, monkeypatch):
    module, run = PROGRAMS[program]
    value = CHOICES[name][1]
    monkeypatch.setitem(module.SUPPORTS, name, (CHOICES[name][0],))
    with pytest.raises(UserError, match=f"expected {name} {CHOICES[name][0]} for .*, got {value}"):
        run(changed(name, value, BASE))


@dataclass(frozen=True)
class NewerConfig(ModelConfig):
    """With a switch that no program has heard of."""

    alibi: bool = False


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_switch_nobody_has_heard_of_is_refused(program, monkeypatch):
    monkeypatch.setitem(CHOICES, "alibi", (False, True))
    config = NewerConfig(**vars(BASE))
    PROGRAMS[program][1](config)
    with pytest.raises(UserError, match="expected alibi False for .*, got True"):
        PROGRAMS[program][1](replace(config, alibi=True))


@pytest.mark.parametrize("name, value", [
    ("norm_eps", 1e-6), ("norm_eps", 0.5), ("rope_base", 5e5), ("rope_base", 10.0),
    ("head_width", 2), ("head_width", 512), ("sliding_window", 7), ("window_pattern", "L"),
    ("window_pattern", "SSSL"),
])  # fmt: skip
def test_a_number_is_refused_whatever_it_is_unless_one_is_known(name, value):
    """Of numbers and patterns, any value but the default is as the one that CHOICES lists."""
    config = replace(BASE, **{name: value})
    with pytest.raises(UserError, match=f"expected {name} {CHOICES[name][0]} for this, got"):
        require(config, {}, "this")
    require(config, {name: CHOICES[name]}, "this")


def test_every_number_is_a_switch_or_belongs_to_one():
    """So that `require` hears of it: the others are sizes, which all programs have."""
    known = {*CHOICES, *OTHERS, *SCALES}
    assert {field.name for field in fields(ModelConfig)} == known
    for name, kinds in SCALES.items():
        least = {"rope_low_freq_factor": 0.5}.get(name, 7)
        for kind in CHOICES["rope_scaling"]:
            if kind in kinds:
                assert getattr(replace(BASE, rope_scaling=kind, **{name: least}), name) == least
            else:
                with pytest.raises(UserError, match=f"{name} is {least}, which rope_scaling"):
                    replace(BASE, rope_scaling=kind, **{name: least})


@pytest.mark.parametrize("name", [name for name in CHOICES if isinstance(CHOICES[name][0], str)])
def test_a_word_without_code_is_refused_by_all(name, monkeypatch):
    """As a new activation in the choices of an MLP, which all would have taken for GELU."""
    if name == "window_pattern":
        return  # the letters of which are checked elsewhere
    monkeypatch.setitem(CHOICES, name, (*CHOICES[name], "new"))
    for module, _ in PROGRAMS.values():
        with pytest.raises(UserError, match=f"expected {name} .*, got new"):
            require(replace(BASE, **{name: "new"}), module.SUPPORTS, "this")


# What a GPU gets as tables that `rope_tables` makes for all programs: llama3's stand for these.
TABLES = ("rope_base", 100.0), ("rope_scaling", "linear")


def asked(programs):
    """Each field with each of the programs. Sizes of a GPU's reader are long: CONFIGS of
    tests/test_gpu_decode.py differ in all of them. So are tables of RoPE but one (TABLES)."""
    left = {*TABLES, *((name, OTHERS[name]) for name in ("vocab_size", "dim", "hidden", "n_heads",
                                                         "n_layers"))}  # fmt: skip
    cases = [(name, value, program) for name, value in CHANGES for program in programs]
    return kept(cases, *(case for case in cases if case[2] != "gpu reader" or case[:2] not in left))


@pytest.mark.parametrize("name, value, program", asked(PROGRAMS))
def test_a_value_is_refused_or_changes_what_is_done(program, name, value):
    base = base_for(name, program)
    try:
        other = numbers(program, changed(name, value, base))
    except UserError as error:
        assert name in REFUSED[program], error
        part = "sliding_window" if name == "window_pattern" else name  # of which it is a pattern
        assert f"expected {name}" in str(error) or f"expected {part}" in str(error), error
        return
    one = numbers(program, base)
    if isinstance(one, np.ndarray) and one.shape == other.shape:
        # A longer context only leaves room for more: the numbers of the same tokens stay. Of given
        # weights nobody asks how they began. All else changes the numbers by more than roundings
        # of bf16 could.
        off = np.linalg.norm(one - other) / np.linalg.norm(one)
        assert off == 0 if name in ("context", "init") else off > bound(base)
    elif isinstance(one, np.ndarray):
        assert name in ("vocab_size", "n_predict")
    else:  # numbers in tables cost the planner nothing
        tables = "rope_base", "rope_scaling"  # which are numbers in memory
        same = {"cuda": ("context", "init"), "planner": ("norm_eps", "init")}[program] + tables
        assert (one == other) == (name in same)


@pytest.mark.parametrize("name, value, program", asked(NUMBERS))
def test_numbers_are_those_of_the_reference(program, name, value):
    config = changed(name, value, base_for(name, program))
    try:
        ours = np.asarray(numbers(program, config), np.float64)
    except UserError:
        return  # which the test above knows
    exact = Weights(config, np.float64)
    exact.flat[:] = weights(config).flat
    theirs = forward(reference.ReferenceEngine(), config, exact, np.array([TOKENS]))[0][0]
    single = numbers("reference", config)
    if program == "gpu reader":
        # `bound` is derived for gradients; a logit goes through fewer roundings to bf16.
        theirs = theirs[:, :1]  # it has the first head alone
        assert np.linalg.norm(ours - theirs) <= bound(config) * np.linalg.norm(theirs)
        return
    # Two orders of float32 sums: see `both` in tests/test_reader.py.
    most = 4 * np.abs(single - theirs).max() + 8 * np.finfo(np.float32).eps * np.abs(theirs).max()
    assert np.abs(ours - theirs).max() <= most


# What no model of tests/test_cuda_engine.py has, where two switches meet in each.
ALONE = [(name, value) for name, value in CHANGES if name in CHOICES
         and not any(getattr(config, name) == value for config, *_ in MODELS.values())]  # fmt: skip
# Tables, and what isn't of a step: how weights began. Stages are recorded one as the other, and
# another model has Heun's; that RK4's coefficients are in a step, `asked` demands of it, too.
APART = {*TABLES, ("init", "zero"), ("integrator", "rk4")}


@pytest.mark.parametrize(
    "name, value", kept([each for each in CHANGES if each[0] in CHOICES],
                        *(each for each in ALONE if each not in APART))
)  # fmt: skip
def test_gradients_of_a_gpu_are_those_of_the_reference(name, value, monkeypatch):
    recorded.by_numpy(monkeypatch, attention=False)
    config = changed(name, value, replace(BASE, n_layers=1))
    outcome = recorded.step_on_paper(config, 2, 4, HOPPER, WIDE)
    wrong = {name: error for name, error in outcome.errors().items() if not error < bound(config)}
    assert not wrong, wrong


LATER = ("norm_eps", "rope_base", "rope_scaling", *SCALES, "head_width", "qkv_bias", "qk_norm",
         "window_pattern", "logit_cap", "init")  # fmt: skip


def older(record):
    """What config.json says, as it was before there were LATER switches, Muon and recompute."""
    model = {name: value for name, value in record["model"].items() if name not in LATER}
    training = {name: value for name, value in record["training"].items()
                if name not in ("optimizer", "momentum", "recompute")}  # fmt: skip
    return {**record, "model": model, "training": training}


def test_a_switch_at_its_default_leaves_no_trace_in_a_run(tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("The river goes down to the sea. " * 60)
    tiny = replace(BASE, vocab_size=260, dim=16)
    ne.train(text, out=out, config=tiny, settings=ne.Settings(steps=2, batch_size=2), engine="cpu")
    path = out / "config.json"
    record = json.loads(path.read_text())
    old = older(record)
    # The digest as it was taken then: of all facts as they stand.
    facts = {name: old[name] for name in FACTS}
    facts["training"] = {n: x for n, x in facts["training"].items() if n != "minutes"}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    assert identity(record) == identity(old) == digest
    for name in LATER:
        other = {**record["model"], name: "another"}
        assert identity({**record, "model": other}) != digest
    path.write_text(json.dumps(old))
    assert ne.load(out).config == tiny
    ne.train(out=out, resume=True, engine="cpu")
    assert ne.load(out).config == tiny


def test_the_gradient_check_has_every_value_of_every_switch():
    found = gradcheck.architectures().values()
    for name, values in KNOWN.items():
        assert {getattr(config, name) for config in found} >= {*values}


def test_a_decoder_of_a_gpu_says_what_it_cannot():
    with pytest.raises(UserError, match="expected integrator euler for decoding on a GPU"):
        check_model(Decoding(replace(BASE, integrator="rk4")))
