# Made from book/14-many-ranks.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ranks-lead
"""Rank 0 leads and the others follow: it alone runs the program, they take part in its steps.

Leaves out who started them (`launch`).
"""

import copy
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from nanoeuler.engines.cpu.stepper import CpuStepper
from nanoeuler.engines.interface import Optimizer, Stepper, Taken
from nanoeuler.engines.ranks.group import Group
from nanoeuler.engines.ranks.scatter import Dealt
from nanoeuler.engines.ranks.stepper import RankStepper
from nanoeuler.engines.registry import GPU_ENGINES, LEAD, engine_factory
from nanoeuler.errors import UserError
from nanoeuler.measurements import cores
from nanoeuler.model.weights import Weights

ON_GPUS = "nanoeuler.engines.gpu.ranks.stepper"  # named only: a later chapter builds it


def make_rank_stepper(
    group: Group, name: str, weights: Weights, optimizer: Optimizer, threads: int | None,
    pieces: int,
) -> Dealt:  # fmt: skip
    """This rank's stepper for the engine of that name. Every rank calls it, with its own arrays.

    threads: of each rank; None shares out the cores of a machine among its ranks.
    """
    if name in GPU_ENGINES:
        if find_spec(ON_GPUS) is None:
            raise UserError("several ranks train on processors only: choose --engine cpu")
        return import_module(ON_GPUS).ranked_stepper(group, name, weights, optimizer, pieces)
    threads = threads or max(1, cores() // group.local)
    return RankStepper(group, CpuStepper(engine_factory(name), weights, optimizer, threads, pieces))


class Controller(Stepper):
    """Rank 0's stepper: what it is asked to do, the followers do with it."""

    def __init__(
        self, group: Group, name: str, weights: Weights, optimizer: Optimizer,
        threads: int | None, pieces: int,
    ) -> None:  # fmt: skip
        rules = copy.copy(optimizer)  # without the moments: these are scattered
        rules.m = rules.v = None
        self.group = group
        order = "make", name, weights.config, rules, threads, pieces
        with self._all_do([order] * group.size):
            self.stepper = make_rank_stepper(group, name, weights, optimizer, threads, pieces)

    @contextmanager
    def _all_do(self, orders):
        """Give each rank its order of this list, and do the first one inside."""
        self.group.scatter_objects(orders)
        try:
            yield
        except UserError:  # found by every rank alike, before one waits for another
            raise
        except BaseException:
            self.group.doom()
            raise

    def _each(self, name, arguments):
        """Have rank r call its stepper's method with arguments[r]."""
        with self._all_do([(name, *each) for each in arguments]):
            return getattr(self.stepper, name)(*arguments[0])

    def step(
        self, tokens: np.ndarray, targets: np.ndarray, lr: float, number: int,
        first: np.ndarray | None = None,
    ) -> list[Taken]:  # fmt: skip
        """Deal tokens (B, T), targets (B, T, K) to the ranks and take step `number` with them."""
        parts = self.stepper.parts(tokens, targets, first)
        return self._each("step_part", [(part, lr, number) for part in parts])

    def sums(
        self, tokens: np.ndarray, targets: np.ndarray, first: np.ndarray | None = None
    ) -> np.ndarray:
        """Deal a batch to the ranks; the sums (K,) of -log p over all of it."""
        parts = self.stepper.parts_to_judge(tokens, targets, first)
        return self._each("sums_part", [(part,) for part in parts])

    def finish(self) -> list[Taken]:
        """Wait for the steps that were begun, on every rank; return those not returned yet."""
        return self._each("finish", [()] * self.group.size)

    def pull(self) -> None:
        """Bring the run's weights and moments on rank 0 up to date with the ranks' own."""
        self._each("pull", [()] * self.group.size)

    def push(self) -> None:
        """Bring every rank's weights and moments up to date with those of the run."""
        self._each("push", [()] * self.group.size)


# %% sec-ranks-lead
def _made(group: Group, name: str, config: Any, rules: Any, threads: int | None, pieces: int):
    """A follower's stepper, with memory of its own."""
    weights = Weights(config)
    rules.m, rules.v = weights.zeros_like(), weights.zeros_like()
    return make_rank_stepper(group, name, weights, rules, threads, pieces)


def follow(group: Group) -> None:
    """Do as rank 0 does, until it has nothing more to do. What fails here ends all ranks."""
    stepper = None
    while True:
        name, *arguments = group.scatter_objects()
        if name == "end":
            return
        try:
            if name == "make":
                stepper = None  # frees its memory before the new one takes any
                stepper = _made(group, *arguments)
            else:
                getattr(stepper, name)(*arguments)
        except UserError:
            pass  # rank 0 has found the same, and says so
        except MemoryError:
            group.abort("this needs more memory than there is: choose a smaller batch_size, or "
                        "more machines")  # fmt: skip
        except Exception as error:
            group.abort(f"{type(error).__name__}: {error}")


@contextmanager
def leading(group: Group) -> Iterator[None]:
    """Inside it the steppers that are made are those of all ranks: rank 0's part of a run."""
    before = LEAD.set(partial(Controller, group)) if group.size > 1 else None
    try:
        yield
    finally:
        if before:
            LEAD.reset(before)
            if not group.doomed:
                group.broadcast(("end",))


def ignore_signals() -> None:
    """Leave signals to rank 0, which ends the run between two steps and saves it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
