# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-staging
"""Pinned buffers between the host and a device that is at work: an inbox and an outbox.

On either device, of `host.device` or of `emulator.device`. The host never waits for the step
that runs: it fills the next batch meanwhile, and reads results one step late.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nanoeuler.errors import UserError

Fields = Mapping[str, tuple[tuple[int, ...], Any]]  # name -> shape and dtype
ALIGN = 16  # bytes: the widest load of a thread, and where each field begins
PAGES = 2  # one to be filled or read while the other's copy is under way


def places(fields: Fields) -> tuple[dict[str, tuple[int, int]], int]:
    """Name -> (first byte, end) of each field, one after the other; and the bytes of all."""
    made, end = {}, 0
    for name, (shape, dtype) in fields.items():
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        made[name] = end, end + size
        end = -(-(end + size) // ALIGN) * ALIGN
    return made, end


class Box:
    """An array on the device that has several fields, and pages of the host in the same form.

    parts: name -> the field on the device, for launches to read or write.
    """

    def __init__(self, device: Any, fields: Fields):
        self.device, self.fields = device, fields
        self.places, size = places(fields)
        self.array = device.empty((size,), np.uint8)
        self.parts = {
            name: device.part(self.array, self.places[name][0], shape, dtype)
            for name, (shape, dtype) in fields.items()
        }
        for _, end in self.places.values():  # nobody writes the gaps, and copies take them along
            gap = device.part(self.array, end, (-end % ALIGN,), np.uint8)
            device.fill(gap, 0)
        self.pages = [device.page(size) for _ in range(PAGES)]
        self.turn = 0

    def named(self, page: np.ndarray) -> dict[str, np.ndarray]:
        """Name -> the field on a page."""
        return {
            name: page[slice(*self.places[name])].view(dtype).reshape(shape)
            for name, (shape, dtype) in self.fields.items()
        }


class Inbox(Box):
    """Input of a step, in turn from two pages: `page`, fill it, `send`, start the step."""

    def __init__(self, device: Any, fields: Fields):
        super().__init__(device, fields)
        self.sent: list[Callable[[], None]] = [lambda: None] * PAGES
        self.open = False

    def page(self) -> dict[str, np.ndarray]:
        """Name -> a field to fill in; waits until the last copy of these is on the device."""
        self.sent[self.turn]()
        self.open = True
        return self.named(self.pages[self.turn])

    def send(self) -> None:
        """Have the page copied to `parts`, when all that was started before has run."""
        if not self.open:
            raise UserError("the inbox was sent already: take its next page and fill that")
        self.device.send(self.array, self.pages[self.turn])
        self.sent[self.turn] = self.device.mark()
        self.turn, self.open = (self.turn + 1) % PAGES, False


class Outbox(Box):
    """Results of a step: start it, `fetch`, and `read` when the next is started.

    Its length is the number of results that were fetched and not read.
    """

    def __init__(self, device: Any, fields: Fields):
        super().__init__(device, fields)
        self.waiting: deque[tuple[np.ndarray, Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    def fetch(self) -> None:
        """Have `parts` copied to a page, when all that was started before has run."""
        if len(self) == PAGES:
            raise UserError(f"{PAGES} results wait to be read: read one before the next is fetched")
        page = self.pages[self.turn]
        self.device.fetch(page, self.array)
        self.waiting.append((page, self.device.mark()))
        self.turn = (self.turn + 1) % PAGES

    def read(self) -> dict[str, np.ndarray]:
        """Name -> the oldest result that wasn't read yet. Waits for the step that computes it."""
        if not self.waiting:
            raise UserError("no result is under way: start a step and fetch its result first")
        page, arrived = self.waiting.popleft()
        arrived()
        return {name: field.copy() for name, field in self.named(page).items()}
