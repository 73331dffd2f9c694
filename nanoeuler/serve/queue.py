# Made from book/r-server.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-serve-desk
"""Jobs, which are texts to generate, and the thread that works on them, several at once.

Leaves out requests and the network.
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
    """The server takes no more work now."""


class Job:
    """A text to generate: `put` gets everything that `write(reader)` yields.

    Last, unless the job is cancelled, `put` gets None, or the exception that ended the text.
    """

    def __init__(
        self, write: Callable[[Reader], Iterator[Any]], put: Callable[[Any], object]
    ):
        self.write, self.put, self.cancelled = write, put, False

    def cancel(self) -> None:
        """Say that nobody waits for it any more."""
        self.cancelled = True

    def run(self, reader: Reader) -> None:
        """Generate the whole text, as a writer of a `Scheduler`."""
        last = None
        try:
            for each in self.write(reader):
                self.put(each)
        except Exception as error:
            last = error
        self.put(last)


class Worker:
    """A thread with a `Scheduler` for the reader that `make()` returns, and its jobs.

    Up to `slots` jobs run, and at most `max_waiting` more wait. UserError if no reader can be
    made.
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
        """Queue a job; `Full` if there is no room for it."""
        with self.change:
            there, most = len(self.waiting) + len(self.running), self.slots + self.max_waiting
            if self.closed or there >= most:
                raise Full(
                    f"this server is full: it writes {self.slots} texts at a time, and "
                    f"{self.max_waiting} more may wait: ask again in a moment"
                )
            self.waiting.append(job)
            self.change.notify()

    def close(self) -> None:
        """End all jobs, and the thread."""
        with self.change:
            self.closed = True
            self.change.notify()

    def _admit(self, scheduler):
        """Start jobs in free slots, and wait if there are none; False once the worker is closed."""
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
            job.put(Full("the server is shutting down"))
