"""What all tests share: the same examples, an order that keeps workers busy, limits, no GPU."""

import faulthandler
import os
import signal
import time

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

BEGUN = pytest.StashKey[float]()

# "auto" is to mean the same engine in every test and program that tests start, also on a machine
# with a GPU: `make test-gpu` is for that.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Some tests have a compiler that makes up its code, which nobody is to find later.
os.environ["NANOEULER_KERNELS"] = os.devnull

settings.register_profile("nanoeuler", deadline=None, derandomize=True)
settings.load_profile("nanoeuler")

# A shell has what it starts in the background ignore Ctrl-C, and so do children of that, down to
# the programs that tests interrupt. A handler ends that; programs that are started inherit none.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take longer than others of their size: programs, kernels on paper.
SLOW = ("test_switches", "test_cuda_engine", "test_variants", "test_lora_gpu", "test_exercises",
        "test_gpu_decode", "test_backward")  # fmt: skip


def pytest_collection_modifyitems(items):
    """A file in one piece makes its fixtures once. Long ones first, so that no worker ends alone.

    What chapters compile, the others find compiled.
    """
    items.sort(key=lambda item: (item.path.stem != "test_chapters", item.path.stem not in SLOW,
                                 -item.path.stat().st_size))  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A worker takes a file at a time, but of the chapters, which take minutes, one at a time."""
    from xdist.scheduler import LoadFileScheduling

    class OneChapterOrFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return nodeid if file.endswith("test_chapters.py") else file

    return OneChapterOrFile(config, log)


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, help="skip the tests that have not begun by then")
    parser.addoption("--processor-seconds", type=float, default=600, help="what a test may use")


def pytest_configure(config):
    config.stash[BEGUN] = time.monotonic()


def pytest_sessionstart(session):
    if hasattr(signal, "SIGPROF"):  # the timer's: says where all threads are, and ends the process
        where = session.config.stash[fault_handler_stderr_fd_key]
        faulthandler.register(signal.SIGPROF, file=where, all_threads=True, chain=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test that turns in a circle ends its process, also where compiled code holds it.

    Its processor time counts, of all threads: on a busy machine a sound test may wait for minutes.
    """
    if not hasattr(signal, "setitimer"):
        return (yield)
    signal.setitimer(signal.ITIMER_PROF, item.config.getoption("processor_seconds"))
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def pytest_runtest_setup(item):
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - item.config.stash[BEGUN] > 60 * minutes:
        pytest.skip(f"it had not begun after {minutes:g} minutes: make test-all runs it")
