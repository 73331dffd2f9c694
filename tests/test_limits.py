"""A test may use so much processor time and no more, however long it waits for a processor."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numba
import numpy as np
import pytest

SECONDS = 1.0


@numba.njit(nogil=True)
def turn(counter):
    # Until somebody else counts: as a thread does that waits for another one.
    while counter[0] == 0:
        counter[1] += 1


@pytest.mark.long
def test_turning():
    """In compiled code, where no handler of Python's is called."""
    if "TURN" in os.environ:
        turn(np.zeros(2, np.int64))


@pytest.mark.long
def test_waiting():
    """As a test does that gets no core: time passes, and little of it is its own."""
    time.sleep(3 * SECONDS if "TURN" in os.environ else 0)


def run(name):
    """pytest on one of the two, with that limit."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "", f"{__file__}::{name}", "-p", "no:cacheprovider",
         f"--processor-seconds={SECONDS}"], cwd=Path(__file__).parents[1],
        env={**os.environ, "TURN": "1"}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="processes have no timers here")
def test_a_test_that_turns_in_a_circle_is_ended_and_named():
    done = run("test_turning")
    assert done.returncode == -signal.SIGPROF
    assert "in test_turning" in done.stderr


def test_a_test_that_waits_is_not_ended():
    assert run("test_waiting").returncode == 0
