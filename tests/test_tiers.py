"""What `make test` leaves out is all there for `make test-all`, and is always the same."""

import math
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
import tiers

from nanoeuler.model.config import CHOICES

ODD = {"a": [0, 1, 2, 3, 4], "b": "xy", "c": [None, True, False], "d": [7], "e": "pqrs"}


@pytest.mark.parametrize("choices", [CHOICES, ODD, {"a": [1, 2], "b": [1, 2]}])
def test_every_pair_meets_in_few_settings(choices):
    found = tiers.pairwise(choices)
    for one, other in combinations(choices, 2):
        met = {(setting[one], setting[other]) for setting in found}
        assert met == {*product(choices[one], choices[other])}, (one, other)
    largest, second = sorted(map(len, choices.values()))[: -3 : -1]
    assert largest * second <= len(found) <= 2 * largest * second
    assert len(found) <= math.prod(map(len, choices.values()))
    assert found == tiers.pairwise(choices)


def test_a_setting_that_pairs_do_without_is_long():
    names = {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    everything = [dict(zip(names, values, strict=True)) for values in product(*names.values())]
    made = tiers.paired(everything, names)
    assert [param.values[0] for param in made] == everything
    short = [param.values[0] for param in made if not param.marks]
    assert len(short) == 4 and all(setting in tiers.pairwise(names) for setting in short)
    assert {param.id for param in made} == {" ".join(map(str, s.values())) for s in everything}


def test_one_case_in_three_is_not_long():
    made = tiers.thinned(["a", "b", "c", "d"])
    assert [param.values for param in made] == [("a",), ("b",), ("c",), ("d",)]
    assert [bool(param.marks) for param in made] == [False, True, True, False]
    assert [param.values for param in tiers.thinned([(1, 2)], every=2)] == [(1, 2)]


def pytest_says(*options):
    """The exit code and the output of pytest on this file, without the tests that call it."""
    chosen = [__file__, "-k", "case or setting"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen, *options], cwd=Path(__file__).parents[1],
        capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_what_has_not_begun_in_time_is_skipped_and_counted():
    code, said = pytest_says("--minutes", "0")
    assert code == 0 and "had not begun after 0 minutes: make test-all runs it" in said
    assert "5 skipped" in said and " passed," not in said


@pytest.mark.long
def test_a_setting_that_takes_long():
    """There to be left out."""


def test_what_is_long_is_left_out_unless_asked_for():
    assert "5 passed, 3 deselected" in pytest_says()[1]
    assert "1 passed, 7 deselected" in pytest_says("-m", "long")[1]
    assert "6 passed, 2 deselected" in pytest_says("-m", "")[1]
