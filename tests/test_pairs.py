"""Settings in pairs: every two values of two switches meet, in few settings, always the same."""

import math
from itertools import combinations, product

import pairs
import pytest

from nanoeuler.model.config import CHOICES

ODD = {"a": [0, 1, 2, 3, 4], "b": "xy", "c": [None, True, False], "d": [7], "e": "pqrs"}


@pytest.mark.parametrize("choices", [CHOICES, ODD, {"a": [1, 2], "b": [1, 2]}])
def test_every_pair_meets_in_few_settings(choices):
    found = pairs.pairwise(choices)
    for one, other in combinations(choices, 2):
        met = {(setting[one], setting[other]) for setting in found}
        assert met == {*product(choices[one], choices[other])}, (one, other)
    largest, second = sorted(map(len, choices.values()))[: -3 : -1]
    assert largest * second <= len(found) <= 2 * largest * second
    assert len(found) <= math.prod(map(len, choices.values()))
    assert found == pairs.pairwise(choices)


def test_a_setting_that_pairs_do_without_is_long():
    names = {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    everything = [dict(zip(names, values, strict=True)) for values in product(*names.values())]
    made = pairs.sampled(everything, names)
    assert [param.values[0] for param in made] == everything
    short = [param.values[0] for param in made if not param.marks]
    assert len(short) == 4 and all(setting in pairs.pairwise(names) for setting in short)
    assert {param.id for param in made} == {" ".join(map(str, s.values())) for s in everything}
