"""Configurations: what fits, what is refused, and the counts the presets promise."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler.config import PRESETS, ModelConfig, count_parameters, parameter_shapes
from nanoeuler.errors import UserError

SMALL = vars(PRESETS["small"])


def test_presets_have_the_parameters_they_promise():
    assert count_parameters(PRESETS["small"]) == 1_053_824
    assert round(count_parameters(PRESETS["euler-116m"]) / 1e6, 1) == 116.4


@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS)
def test_presets_have_the_width_the_rule_gives(config):
    assert config.hidden % 8 == 0 and 0 <= config.hidden - 8 / 3 * config.dim < 8


few = st.integers(1, 4)
over_shapes = settings(max_examples=50, deadline=None, derandomize=True)


@over_shapes
@given(few, few, few, few, st.integers(1, 40))
def test_any_fitting_shape_is_accepted(half, G, R, L, F):
    D, H = 2 * half, G * R
    config = ModelConfig(11, H * D, L, H, G, F, 7, 3)
    shapes = parameter_shapes(config)
    assert config.head_dim == D and len(shapes) == 3 + 6 * L
    assert shapes["block.0.wqkv"] == (H * D, (H + 2 * G) * D)
    assert shapes["output"] == (H * D, 33)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("value", [0, -1, 2.0, "4", None, True])
def test_each_number_must_be_a_positive_whole_one(name, value):
    with pytest.raises(UserError, match=f"{name} must be a whole number"):
        ModelConfig(**{**SMALL, name: value})


@pytest.mark.parametrize(
    "change, words",
    [
        ({"dim": 130}, "multiple of n_heads"),
        ({"n_kv_heads": 3}, "multiple of n_kv_heads"),
        ({"n_kv_heads": 8}, "multiple of n_kv_heads"),
        ({"dim": 12}, "turn pairs"),
    ],
)
def test_numbers_must_fit_together(change, words):
    with pytest.raises(UserError, match=words):
        ModelConfig(**{**SMALL, **change})
