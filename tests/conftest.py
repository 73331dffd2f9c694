"""What all tests share: the same examples, an order that keeps workers busy, a limit, no GPU."""

import os
import signal
import time

import pytest
from hypothesis import settings

BEGUN = pytest.StashKey[float]()

# "auto" is to mean the same engine in every test and program that tests start, also on a machine
# with a GPU: `make test-gpu` is for that.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

settings.register_profile("nanoeuler", deadline=None, derandomize=True)
settings.load_profile("nanoeuler")

# A shell has what it starts in the background ignore Ctrl-C, and so do children of that, down to
# the programs that tests interrupt. A handler ends that; programs that are started inherit none.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """For --dist loadfile: a file in one piece makes its fixtures once. Long ones first.

    What chapters compile, the others find compiled.
    """
    items.sort(key=lambda item: (item.path.stem != "test_chapters", -item.path.stat().st_size))


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, help="skip the tests that have not begun by then")


def pytest_configure(config):
    config.stash[BEGUN] = time.monotonic()


def pytest_runtest_setup(item):
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - item.config.stash[BEGUN] > 60 * minutes:
        pytest.skip(f"it had not begun after {minutes:g} minutes: make test-all runs it")
