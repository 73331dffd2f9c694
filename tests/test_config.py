"""Configurations: what fits, what is refused, which tensors a model has, and how many numbers."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler.errors import UserError
from nanoeuler.model.config import (
    CHOICES,
    PRESETS,
    SCALES,
    ModelConfig,
    count_parameters,
    parameter_shapes,
)

SMALL = vars(PRESETS["small"])
SIZES = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "hidden", "context", "n_predict")
SWITCHES = ("norm", "position", "mlp", "bias", "tied")
COMBINATIONS = list(itertools.product(*(CHOICES[name] for name in SWITCHES)))
few = st.integers(1, 4)
over_shapes = settings(max_examples=50, deadline=None, derandomize=True)


def switched(values, **changes):
    """SMALL with the five switches at `values`; K is what tied allows."""
    switches = dict(zip(SWITCHES, values, strict=True))
    K = 1 if switches["tied"] else SMALL["n_predict"]
    return ModelConfig(**{**SMALL, "n_predict": K, **switches, **changes})


@pytest.mark.parametrize(
    "name, count",
    [
        ("small", 1_053_824), ("euler-10m", 9_876_736), ("euler-116m", 116_417_280),
        ("gpt2-124m", 124_439_808), ("small-modern", 1_774_976),
    ],
)  # fmt: skip
def test_presets_have_the_parameters_they_promise(name, count):
    assert count_parameters(PRESETS[name]) == count


def test_gpt2_has_the_tensors_of_gpt2():
    shapes = parameter_shapes(PRESETS["gpt2-124m"])
    # Radford and others, 2019: 148 tensors; four matrices, four biases and two norms in a block.
    assert len(shapes) == 2 + 12 * 12 + 2 == 148
    assert shapes["embedding"] == (50257, 768) and shapes["positions"] == (1024, 768)
    assert shapes["block.11.wqkv"] == (768, 3 * 768) and shapes["block.11.w_up"] == (768, 4 * 768)
    assert "output" not in shapes


@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS)
def test_presets_have_the_width_the_rule_gives(config):
    wanted = (8 / 3 if config.mlp == "swiglu" else 4) * config.dim
    assert config.hidden % 8 == 0 and 0 <= config.hidden - wanted < 8


@over_shapes
@given(few, few, few, few, st.integers(1, 40))
def test_any_fitting_shape_is_accepted(half, G, R, L, F):
    D, H = 2 * half, G * R
    config = ModelConfig(11, H * D, L, H, G, F, 7, 3)
    shapes = parameter_shapes(config)
    assert config.head_dim == D and len(shapes) == 3 + 6 * L
    assert shapes["block.0.wqkv"] == (H * D, (H + 2 * G) * D)
    assert shapes["output"] == (H * D, 33)


@pytest.mark.parametrize("values", COMBINATIONS, ids=str)
def test_each_combination_of_switches_has_exactly_its_tensors(values):
    config = switched(values)
    norm, position, _, bias, tied = values
    biased = {"wqkv", "wo", "w_up", "w_down"} | ({"norm1", "norm2"} if norm == "layer" else set())
    block = {"norm1", "wqkv", "wo", "norm2", "w_up", "w_down"}
    if bias:
        block |= {f"{name}_bias" for name in biased}
    wanted = {f"block.{i}.{name}" for i in range(4) for name in block} | {"embedding", "norm"}
    wanted |= {"positions"} if position == "learned" else set()
    wanted |= {"norm_bias"} if bias and norm == "layer" else set()
    wanted |= set() if tied else {"output"}
    assert set(parameter_shapes(config)) == wanted


@pytest.mark.parametrize("values", COMBINATIONS, ids=str)
@pytest.mark.parametrize("repeat", [1, 2, 4])
def test_the_count_is_the_sum_that_a_hand_makes(values, repeat):
    config = switched(values, repeat=repeat)
    norm, position, mlp, bias, tied = values
    V, C, T, F = (SMALL[name] for name in ("vocab_size", "dim", "context", "hidden"))
    K, HD, heads = config.n_predict, 4 * 32, (4 + 2 * 2) * 32
    up = F * (2 if mlp == "swiglu" else 1)
    gain = C * (2 if bias and norm == "layer" else 1)
    block = 2 * gain + C * heads + HD * C + C * up + F * C
    if bias:
        block += heads + C + up + C
    wanted = V * C + 4 // repeat * block + gain
    wanted += T * C if position == "learned" else 0
    wanted += 0 if tied else K * V * C
    assert count_parameters(config) == wanted


@pytest.mark.parametrize("values", COMBINATIONS, ids=str)
def test_tensors_are_listed_in_the_order_of_their_use(values):
    """A matrix's inputs are what the matrix before it gives; a bias follows what it is added to."""
    shapes = parameter_shapes(switched(values))
    names = list(shapes)
    for i, name in enumerate(names):
        if name.endswith("_bias"):
            assert names[i - 1] == name.removesuffix("_bias")
            assert shapes[name] == shapes[names[i - 1]][-1:]
    order = [name.rpartition(".")[2] for name in names if not name.endswith("_bias")]
    block = ["norm1", "wqkv", "wo", "norm2", "w_up", "w_down"]
    first = ["embedding"] + (["positions"] if "positions" in shapes else [])
    last = ["norm"] + (["output"] if "output" in shapes else [])
    assert order == first + 4 * block + last


@pytest.mark.parametrize("repeat, blocks", [(1, 4), (2, 2), (4, 1)])
def test_repeated_layers_share_a_block(repeat, blocks):
    config = ModelConfig(**{**SMALL, "repeat": repeat})
    owned = {name.split(".")[1] for name in parameter_shapes(config) if name.startswith("block.")}
    assert config.n_blocks == blocks and owned == {str(i) for i in range(blocks)}


@pytest.mark.parametrize("name", [*SIZES, "repeat"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "4", None, True, [4]])
def test_each_size_must_be_a_positive_whole_number(name, value):
    with pytest.raises(UserError, match=f"^{name} must be a whole number of at least 1"):
        ModelConfig(**{**SMALL, name: value})


@pytest.mark.parametrize("name", ["sliding_window", "head_width"])
@pytest.mark.parametrize("value", [-1, 2.0, "4", None, True, [4]])
def test_a_window_and_a_width_must_be_whole_numbers(name, value):
    with pytest.raises(UserError, match=f"^{name} must be a whole number of at least 0"):
        ModelConfig(**{**SMALL, name: value})


@pytest.mark.parametrize("value", ["", "s", "SLX", "S L", 0, None, ["S"], b"S", "S" * 10_001])
def test_a_pattern_of_windows_must_be_letters(value):
    with pytest.raises(UserError, match="^window_pattern must be some letters S and L, got "):
        ModelConfig(**{**SMALL, "window_pattern": value})


WORDS = [name for name in CHOICES
         if name != "window_pattern" and type(CHOICES[name][0]) in (str, bool)]  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("value", ["", "RMS", "other", 0, 1, 1.0, None, ["rms"], b"rms"])
def test_each_switch_must_be_one_of_its_choices(name, value):
    choices = " or ".join(map(str, CHOICES[name]))
    with pytest.raises(UserError, match=f"^{name} must be {choices}, got "):
        ModelConfig(**{**SMALL, name: value})


@pytest.mark.parametrize("name", ["norm", "position", "mlp", "integrator", "rope_scaling"])
@pytest.mark.parametrize("value", [True, False])
def test_a_word_is_not_a_truth_value(name, value):
    with pytest.raises(UserError, match=f"^{name} must be "):
        ModelConfig(**{**SMALL, name: value})


@pytest.mark.parametrize(
    "value", [0, 0.0, -0.5, 10**400, math.inf, -math.inf, math.nan, "1", None, True]
)
@pytest.mark.parametrize("name", ["step_size", "norm_eps", "rope_base", "rope_factor",
                                  "rope_low_freq_factor", "rope_high_freq_factor"])  # fmt: skip
def test_a_step_and_other_numbers_must_be_finite_and_above_zero(name, value):
    with pytest.raises(UserError, match=f"^{name} must be a finite number above 0, got "):
        ModelConfig(**{**SMALL, name: value})


@pytest.mark.parametrize(
    "name, value",
    [*((name, value) for name in CHOICES for value in CHOICES[name] if name != "tied"),
     ("step_size", 0.25), ("step_size", 2), ("repeat", 2), ("repeat", 4),
     ("sliding_window", 1), ("sliding_window", 10**30), ("norm_eps", 1e-12), ("rope_base", 500000),
     ("head_width", 2), ("head_width", 130), ("window_pattern", "LSSSS")],
)  # fmt: skip
def test_what_a_switch_offers_is_accepted(name, value):
    assert getattr(ModelConfig(**{**SMALL, name: value}), name) == value


@pytest.mark.parametrize(
    "change, words",
    [
        ({"dim": 130}, r"^dim \(130\) must be a multiple of n_heads \(4\)"),
        ({"n_kv_heads": 3}, r"^n_heads \(4\) must be a multiple of n_kv_heads \(3\)"),
        ({"n_kv_heads": 8}, r"^n_heads \(4\) must be a multiple of n_kv_heads \(8\)"),
        ({"repeat": 3}, r"^n_layers \(4\) must be a multiple of repeat \(3\)"),
        ({"repeat": 8}, r"^n_layers \(4\) must be a multiple of repeat \(8\)"),
        ({"dim": 12}, "turn pairs: choose dim and n_heads"),
        ({"head_width": 31}, r"^heads are 31 channels wide \(head_width, or dim / n_heads\)"),
        ({"rope_factor": 8.0}, "^rope_factor is 8.0, which rope_scaling none does not use: "
                               "leave it at 1.0, or choose linear or llama3"),
        ({"rope_low_freq_factor": 2.0, "rope_scaling": "linear"}, "^rope_low_freq_factor is 2.0"),
        ({"rope_high_freq_factor": 2.0, "rope_scaling": "linear"}, "^rope_high_freq_factor is 2.0"),
        ({"rope_original_context": 64}, "^rope_original_context is 64"),
        ({"rope_low_freq_factor": 4.0, "rope_scaling": "llama3"},
         r"^rope_low_freq_factor \(4.0\) must be below rope_high_freq_factor \(4.0\)"),
        ({"tied": True}, "^n_predict is 4, .* set n_predict to 1 or tied to False"),
    ],
)
def test_values_must_fit_together(change, words):
    with pytest.raises(UserError, match=words):
        ModelConfig(**{**SMALL, **change})


def test_what_only_one_position_needs_is_asked_only_there():
    assert ModelConfig(**{**SMALL, "dim": 12, "position": "learned"}).head_dim == 3
    assert ModelConfig(**{**SMALL, "dim": 130, "head_width": 6}).head_dim == 6
    assert ModelConfig(**{**SMALL, "tied": True, "n_predict": 1}).tied


def test_a_configuration_from_before_the_switches_means_the_same_model():
    old = {name: SMALL[name] for name in SIZES}
    assert ModelConfig(**old) == PRESETS["small"]
    assert count_parameters(ModelConfig(**old)) == 1_053_824
    new = dataclasses.fields(ModelConfig)[len(SIZES) :]
    assert {field.name for field in new} == {*CHOICES, "step_size", "repeat", *SCALES}
    for field in new:
        assert field.name in SCALES or field.default == CHOICES.get(field.name, (1,))[0]
    assert all(SCALES[name] == CHOICES["rope_scaling"][-len(SCALES[name]):] for name in SCALES)


@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS)
def test_a_configuration_survives_being_written_down(config):
    assert ModelConfig(**dataclasses.asdict(config)) == config


def test_a_configuration_cannot_change_under_its_weights():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["small"].dim = 256


def test_more_layers_than_any_model_has_are_refused_at_once():
    with pytest.raises(UserError, match="n_layers must be at most 10000, got 1000000000000"):
        dataclasses.replace(PRESETS["small"], n_layers=10**12)
