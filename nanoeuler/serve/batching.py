# Made from book/r-server.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-serve-seats
"""Continuous batching: many texts in one pass, each written by a loop of its own, in a slot.

A slot is a `Reader` of one text. Where a loop reads, it is put aside until a pass has read for all.
Leaves out threads, and the queue of jobs: queue.py.

rows and heads as `Reader.read` has them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from greenlet import getcurrent, greenlet

from nanoeuler.inference.decoder import Reader
from nanoeuler.model.config import ModelConfig

# Tokens of a prompt in a round: four times what the processor's reader takes in one go. The others
# in the batch wait for no more.
PREFILL_CHUNK = 64


class Read(NamedTuple):
    """What one text wants read: the arguments of `Reader.read`, for one piece."""

    piece: Sequence[int]
    start: int
    rows: int
    heads: int


class Slot:
    """The `Reader` of one text among several: `read` hands over to the scheduler, and waits."""

    texts = 1

    def __init__(self, config: ModelConfig):
        self.config = config

    def read(
        self, pieces: Sequence[Sequence[int]], starts: Sequence[int], rows: int = 1, heads: int = 1
    ) -> np.ndarray:
        """Logits (1, rows, heads, V) after the last `rows` tokens of one piece."""
        (piece,), (start,) = pieces, starts
        return getcurrent().parent.switch(Read(piece, start, rows, heads))


def prefill_chunk(wanted: Read) -> tuple[Read, Read | None]:
    """What is read of it in a step, and what is left for later ones, if anything."""
    if len(wanted.piece) <= max(PREFILL_CHUNK, wanted.rows):
        return wanted, None
    later = wanted._replace(piece=wanted.piece[PREFILL_CHUNK:], start=wanted.start + PREFILL_CHUNK)
    return Read(wanted.piece[:PREFILL_CHUNK], wanted.start, 1, 1), later


class Scheduler:
    """The slots of a reader of several texts, and what the text in each waits for: `pending`.

    A writer is a function of a `Reader` that raises nothing.
    """

    def __init__(self, reader: Reader):
        self.reader = reader
        self.running: dict[int, greenlet] = {}
        self.pending: dict[int, Read] = {}

    @property
    def free(self) -> list[int]:
        """The slots without a text."""
        return [slot for slot in range(self.reader.texts) if slot not in self.running]

    def start(self, write: Callable[[Reader], object]) -> int:
        """Begin `write(reader)` in a free slot, up to its first reading; the slot."""
        slot = self.free[0]
        self.running[slot] = greenlet(write)
        self._resume(slot, self.running[slot].switch, Slot(self.reader.config))
        return slot

    def cancel(self, slot: int) -> None:
        """End the writing in a slot, where it waits."""
        self._resume(slot, self.running[slot].throw)

    def _resume(self, slot, resume, *given):
        """Take a writer up, until it reads again or has ended."""
        self.pending.pop(slot, None)
        wanted = resume(*given)
        if self.running[slot].dead:
            del self.running[slot]
        else:
            self.pending[slot] = wanted

    def step(self) -> None:
        """Read what writers wait for, at most PREFILL_CHUNK tokens of each; take them up again."""
        parts = {slot: prefill_chunk(wanted) for slot, wanted in self.pending.items()}
        passes: dict[tuple[int, int], list[int]] = {}
        for slot, (now, _) in parts.items():
            passes.setdefault((now.rows, now.heads), []).append(slot)
        for slots in passes.values():
            try:
                logits, error = self._read({slot: parts[slot][0] for slot in slots}), None
            except Exception as problem:  # each of them hears of it, where it waits
                logits, error = np.empty(0), problem
            for slot in slots:
                writer, later = self.running[slot], parts[slot][1]
                if error:
                    self._resume(slot, writer.throw, error)
                elif later:
                    self.pending[slot] = later
                else:
                    self._resume(slot, writer.switch, logits[slot : slot + 1])

    def _read(self, reads):
        """One pass for reads of one shape: logits (texts, rows, heads, V), by slot."""
        pieces, starts = [[]] * self.reader.texts, [0] * self.reader.texts
        for slot, wanted in reads.items():
            pieces[slot], starts[slot] = wanted.piece, wanted.start
        return self.reader.read(pieces, starts, wanted.rows, wanted.heads)
