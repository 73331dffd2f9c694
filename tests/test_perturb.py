"""The tool that begins training runs a little elsewhere."""

import subprocess
import sys

import perturb
import pytest
from rerun import Outcome, changed, environment, target_of

LOOK = """
import numpy as np
from nanoeuler.checks.gradcheck import TINY
from nanoeuler.model.weights import initialise
one, same, other = (initialise(TINY, seed, np.float64).flat for seed in (0, 0, 1))
print(np.array_equal(one, same), float(np.sum(one**2)), float(np.sum(other**2)))
"""


def sums(noise):
    """Whether equal calls give equal weights, and the sums of squares of two models'."""
    variables = changed(environment(target_of("tests/test_where.py")), {"PERTURBED": noise})
    done = subprocess.run([sys.executable, "-c", LOOK], env=variables, capture_output=True,
                          text=True, check=True)  # fmt: skip
    same, *found = done.stdout.split()
    return same == "True", *map(float, found)


def test_noise_is_small_and_its_seed_decides():
    plain, one, two = sums(None), sums("0:1e-7"), sums("1:1e-7")
    assert plain[0] and one[0] and two[0]
    for at in (1, 2):
        assert len({plain[at], one[at], two[at]}) == 3
        assert one[at] == pytest.approx(plain[at], rel=1e-7)  # many weights, whose noise cancels


def test_a_run_that_differs_is_told(monkeypatch, capsys):
    """Two of three runs are whole; the cell of the third is named."""
    def run(target, variables):
        fails = variables["PERTURBED"].startswith("1:")
        return Outcome(4 - fails, ["Cell 3\nwhy"] * fails, 0.1)

    monkeypatch.setattr(perturb, "run", run)
    monkeypatch.setattr(perturb, "environment", lambda target: {})  # seconds, to find its modules
    assert perturb.main(["09a", "--times", "3"]) == 1
    said = capsys.readouterr().out
    assert "2 of 3  Cell 3" in said and "noise 1: Cell 3\nwhy" in said
    assert perturb.main(["09a", "--times", "1"]) == 0
