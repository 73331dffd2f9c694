# Made from book/16b-a-server.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-serve-desk
"""Where orders for texts are handed in, and the thread that writes them, several at once.

Leaves out what an order says, and the network.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from nanoeuler.errors import UserError
from nanoeuler.inference.decoder import Reader
from nanoeuler.serve.batching import Table


class Full(UserError):
    """There is no room for another order now."""


class Order:
    """A text to be written: each thing that `write(reader)` yields is handed to `put`.

    Last, `put` gets None, or the exception that ended the writing.
    """

    def __init__(
        self, write: Callable[[Reader], Iterator[Any]], put: Callable[[Any], object]
    ):
        self.write, self.put, self.left = write, put, False

    def leave(self) -> None:
        """Say that nobody waits for it any more."""
        self.left = True

    def run(self, reader: Reader) -> None:
        """The whole of it, as a writer at a `Table`."""
        last = None
        try:
            for each in self.write(reader):
                self.put(each)
        except Exception as error:
            last = error
        self.put(last)


class Orders:
    """Orders that are `seated` or wait: at most `waiting` beside those for whom there are seats."""

    seats = 0

    def __init__(self, waiting: int):
        self.waiting, self.orders, self.seated = waiting, deque[Order](), dict[int, Order]()
        self.change, self.closed = threading.Condition(), False

    def hand_in(self, order: Order) -> None:
        """Have an order written; `Full` if there is no room for it."""
        with self.change:
            if self.closed or len(self.orders) + len(self.seated) >= self.seats + self.waiting:
                raise Full(
                    f"{self.seats} texts are being written and {self.waiting} wait, which is as "
                    "many as this server takes: ask again in a moment"
                )
            self.orders.append(order)
            self.change.notify()

    def close(self) -> None:
        """End all writing, and the thread."""
        with self.change:
            self.closed = True
            self.change.notify()

    def _wait(self, table):
        """Seat whom there is room for, and wait if nobody sits; False when the desk is closed."""
        with self.change:
            self.seated = {place: self.seated[place] for place in table.writers}
            while not (self.closed or self.orders or self.seated):
                self.change.wait()
            while self.orders and table.free and not self.closed:
                order = self.orders.popleft()
                if not order.left:
                    self.seated[table.sit(order.run)] = order
            return not self.closed


class Desk(Orders):
    """A thread at a `Table` of the reader that `make` makes, and the orders for it.

    UserError where no reader can be made.
    """

    def __init__(self, make: Callable[[], Reader], waiting: int):
        super().__init__(waiting)
        ready: Future[int] = Future()
        self.thread = threading.Thread(target=self._work, args=(make, ready), daemon=True)
        self.thread.start()
        self.seats = ready.result()

    def _work(self, make, ready):
        """Seat orders and read, until the desk is closed."""
        try:
            table = Table(make())
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(table.reader.texts)
        while self._wait(table):
            for place, order in [*self.seated.items()]:
                if order.left and place in table.writers:
                    table.rise(place)
            table.round()
        for order in (*self.seated.values(), *self.orders):
            order.put(Full("the server is being closed"))
