"""Two processes that talk through a pipe: a `Group` of two ranks on one machine, for measuring.

Rank 0 is this process, and starts the other one. That ends when this one does, in whatever way.
"""

import atexit
import multiprocessing
import os
import threading
import time

from nanoeuler.engines.ranks.group import Group


class Piped(Group):
    """One of two ranks."""

    size = local = 2

    def __init__(self, rank, pipe):
        self.rank, self.pipe = rank, pipe

    def share(self, value):
        """As `Group.share`: rank 0 speaks first, since a full pipe waits for who reads it."""
        if self.rank:
            return [self.pipe.recv(), (self.pipe.send(value), value)[1]]
        self.pipe.send(value)
        return [value, self.pipe.recv()]

    def broadcast(self, value=None):
        """As `Group.broadcast`."""
        return self.share(value)[0]

    def abort(self, why):
        """As `Group.abort`."""
        self.pipe.close()
        raise RuntimeError(why)


def _follow(pipe, parent, main, given):
    """In the other process: main(group, *given), and no longer than the first lives."""
    def watch():
        while os.getppid() == parent:
            time.sleep(0.3)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    main(Piped(1, pipe), *given)


def pair(main, *given):
    """The group of rank 0; the other process runs main(group, *given). main must be importable.

    It is no daemon: those may have no processes of their own, in which kernels are compiled. So
    that nobody waits for it when this process ends, the pipe is closed then, which ends it.
    """
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_follow, args=(theirs, os.getpid(), main, given))
    process.start()
    theirs.close()
    atexit.register(mine.close)  # runs before multiprocessing waits for its children
    return Piped(0, mine)
