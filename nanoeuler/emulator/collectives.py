# Made from book/14a-gradients-between-gpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-exchange-paper
"""Exchanges between ranks that are threads of one process, and emulated devices for them.

Left out: time. What is exchanged is exchanged at once, or as late as it may be.
"""

from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

import numpy as np

from nanoeuler.emulator import device
from nanoeuler.engines.gpu.lang.kernel import Launch
from nanoeuler.engines.gpu.ranks.exchange import Exchange
from nanoeuler.engines.ranks.group import Group, added, own

TURN = Lock()  # held by the one rank of this process that runs a launch


class RankDevice(device.Device):
    """An emulated device beside others; a graph of it starts everything one by one."""

    def prepare(self, launch: Launch) -> Callable[..., Any]:
        """A function that plays the launch while other ranks wait."""
        start = super().prepare(launch)

        def alone(stream: Any = 0) -> Any:
            with TURN:
                return start(stream)

        return alone

    def capture(self, starts: Iterable[Callable]) -> Any:
        """What `launch` starts, again and again."""
        return LaunchSequence(list(starts))


class LaunchSequence:
    """In place of a CUDA graph."""

    def __init__(self, starts: list[Callable]) -> None:
        self.starts = starts

    def launch(self) -> None:
        """Start everything in its order."""
        for start in self.starts:
            start(0)


class EmulatedLink:
    """A `Link` of an emulated rank. late: whether exchanges happen when somebody waits for them."""

    def __init__(self, device: Any, group: Group, late: bool = False, copies: bool = False) -> None:
        self.device, self.group, self.late, self.copies = device, group, late, copies
        self.rank, self.size = group.rank, group.size
        self.begun: list[Exchange] = []

    def carry(self, work: Exchange) -> None:
        """Do one exchange, with all others."""
        if work.kind == "broadcast":
            pairs = list(zip(work.pairs(), work.roots, strict=True))
            mine = [self.device.host(given) if r == self.rank else None for (given, _), r in pairs]
            every = self.group.share(mine)
            for i, ((_, to), root) in enumerate(pairs):
                self.device.fill(to, every[root][i])
            return
        for given, to in work.pairs():
            every = self.group.share(self.device.host(given))
            if work.kind == "all-gather":
                self.device.fill(to, np.concatenate(every))
                continue
            part = own(given.shape[0], self.rank, self.size)
            parts = [values[part] for values in every]
            if work.kind == "hand over":
                del parts[self.rank]
                self.device.fill(to, np.concatenate(parts) if parts else 0)
            else:
                self.device.fill(to, added(np.stack(parts)))

    def exchange(self, work: Exchange) -> Callable[..., None]:
        """A function of a stream that begins `work`: each brings its own, and adds for its part."""

        def start(stream: Any = 0) -> None:
            self.begun.append(work)
            if not self.late:
                self.settle()

        return start

    def join(self) -> Callable[..., None]:
        """A function of a stream that waits until every exchange is played."""
        return lambda stream=0: self.settle()

    def settle(self) -> None:
        """Do what was begun."""
        for work in self.begun:
            self.carry(work)
        self.begun = []
