# Made from book/r-server.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-serve-desk
"""Jobs, which are texts to be written, and the thread that works them off, several at once.

Leaves out what a request says, and the network.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from nanoeuler.errors import UserError
from nanoeuler.inference.decoder import Reader
from nanoeuler.serve.batching import Scheduler


class Full(UserError):
    """There is no room for another job now."""


class Job:
    """A text to be written: each thing that `write(reader)` yields is handed to `put`.

    Last, `put` gets None, or the exception that ended the writing.
    """

    def __init__(
        self, write: Callable[[Reader], Iterator[Any]], put: Callable[[Any], object]
    ):
        self.write, self.put, self.cancelled = write, put, False

    def cancel(self) -> None:
        """Say that nobody waits for it any more."""
        self.cancelled = True

    def run(self, reader: Reader) -> None:
        """The whole of it, as a writer at a `Scheduler`."""
        last = None
        try:
            for each in self.write(reader):
                self.put(each)
        except Exception as error:
            last = error
        self.put(last)


class Worker:
    """A thread with a `Scheduler` of the reader that `make` makes, and jobs that run or wait.

    At most `max_waiting` wait beside those for which there are `slots`. UserError where no reader
    can be made.
    """

    slots = 0

    def __init__(self, make: Callable[[], Reader], max_waiting: int):
        self.max_waiting, self.waiting, self.running = max_waiting, deque[Job](), dict[int, Job]()
        self.change, self.closed = threading.Condition(), False
        ready: Future[int] = Future()
        self.thread = threading.Thread(target=self._work, args=(make, ready), daemon=True)
        self.thread.start()
        self.slots = ready.result()

    def submit(self, job: Job) -> None:
        """Have a text written; `Full` if there is no room for it."""
        with self.change:
            there, most = len(self.waiting) + len(self.running), self.slots + self.max_waiting
            if self.closed or there >= most:
                raise Full(
                    f"{self.slots} texts are being written and {self.max_waiting} wait, which is "
                    "as many as this server takes: ask again in a moment"
                )
            self.waiting.append(job)
            self.change.notify()

    def close(self) -> None:
        """End all writing, and the thread."""
        with self.change:
            self.closed = True
            self.change.notify()

    def _admit(self, scheduler):
        """Start what there is room for, and wait if nothing runs; False when it is closed."""
        with self.change:
            self.running = {slot: self.running[slot] for slot in scheduler.running}
            while not (self.closed or self.waiting or self.running):
                self.change.wait()
            while self.waiting and scheduler.free and not self.closed:
                job = self.waiting.popleft()
                if not job.cancelled:
                    self.running[scheduler.start(job.run)] = job
            return not self.closed

    def _work(self, make, ready):
        """Start jobs and read for them, until the worker is closed."""
        try:
            scheduler = Scheduler(make())
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(scheduler.reader.texts)
        while self._admit(scheduler):
            for slot, job in [*self.running.items()]:
                if job.cancelled and slot in scheduler.running:
                    scheduler.cancel(slot)
            scheduler.step()
        for job in (*self.running.values(), *self.waiting):
            job.put(Full("the server is being closed"))
