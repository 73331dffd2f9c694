# Made from book/16b-a-server.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-serve-seats
"""Many texts in one pass: each is written by a loop of its own, on a seat at one table.

A seat is a `Reader` of one text. Where a loop reads, it is put aside until a pass has read for all.
Leaves out threads, and who asks: desk.py.

rows and heads as `Reader.read` has them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from greenlet import getcurrent, greenlet

from nanoeuler.inference.decoder import Reader
from nanoeuler.model.config import ModelConfig

# Tokens of a prompt in a round: four times what the processor's reader takes in one go. The others
# at the table wait for no more.
PIECE = 64


class Ask(NamedTuple):
    """What one text wants read: the arguments of `Reader.read`, for one piece."""

    piece: Sequence[int]
    start: int
    rows: int
    heads: int


class Seat:
    """The `Reader` of one text among several: `read` hands over to the table, and waits."""

    texts = 1

    def __init__(self, config: ModelConfig):
        self.config = config

    def read(
        self, pieces: Sequence[Sequence[int]], starts: Sequence[int], rows: int = 1, heads: int = 1
    ) -> np.ndarray:
        """As `Reader.read`, of one piece."""
        (piece,), (start,) = pieces, starts
        return getcurrent().parent.switch(Ask(piece, start, rows, heads))


def first_part(ask: Ask) -> tuple[Ask, Ask | None]:
    """What of an ask is read in a round, and what is left for later ones, if anything."""
    if len(ask.piece) <= max(PIECE, ask.rows):
        return ask, None
    later = ask._replace(piece=ask.piece[PIECE:], start=ask.start + PIECE)
    return Ask(ask.piece[:PIECE], ask.start, 1, 1), later


class Places:
    """The places of a reader of several texts, and who sits there. `asks` is what each waits for.

    A writer is a function of a `Reader` that raises nothing.
    """

    def __init__(self, reader: Reader):
        self.reader = reader
        self.writers: dict[int, greenlet] = {}
        self.asks: dict[int, Ask] = {}

    @property
    def free(self) -> list[int]:
        """The places where nobody sits."""
        return [place for place in range(self.reader.texts) if place not in self.writers]

    def sit(self, write: Callable[[Reader], object]) -> int:
        """Begin `write(reader)` on a free place, up to its first reading; the place."""
        place = self.free[0]
        self.writers[place] = greenlet(write)
        self._go_on(place, self.writers[place].switch, Seat(self.reader.config))
        return place

    def rise(self, place: int) -> None:
        """End the writing at a place, where it waits."""
        self._go_on(place, self.writers[place].throw)

    def _go_on(self, place, resume, *given):
        """Take a writer up, until it asks for more or has ended."""
        self.asks.pop(place, None)
        ask = resume(*given)
        if self.writers[place].dead:
            del self.writers[place]
        else:
            self.asks[place] = ask


class Table(Places):
    """Who sits is read for, round by round."""

    def round(self) -> None:
        """Read what the writers wait for, at most PIECE tokens of each, and take them up again."""
        parts = {place: first_part(ask) for place, ask in self.asks.items()}
        passes: dict[tuple[int, int], list[int]] = {}
        for place, (now, _) in parts.items():
            passes.setdefault((now.rows, now.heads), []).append(place)
        for places in passes.values():
            try:
                logits, error = self._read({place: parts[place][0] for place in places}), None
            except Exception as problem:  # each of them hears of it, where it waits
                logits, error = np.empty(0), problem
            for place in places:
                writer, later = self.writers[place], parts[place][1]
                if error:
                    self._go_on(place, writer.throw, error)
                elif later:
                    self.asks[place] = later
                else:
                    self._go_on(place, writer.switch, logits[place : place + 1])

    def _read(self, asks):
        """One pass for asks of one shape: logits (texts, rows, heads, V), by place."""
        pieces, starts = [[]] * self.reader.texts, [0] * self.reader.texts
        for place, ask in asks.items():
            pieces[place], starts[place] = ask.piece, ask.start
        return self.reader.read(pieces, starts, ask.rows, ask.heads)
