# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli-main
"""What to do if nobody reads the output: drop messages, and go on with the work."""

import os
import sys
from typing import Any, TextIO


def drop(stream: TextIO) -> None:
    """Let `stream`, whose reader has gone, write to nowhere from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class Messages:
    """A stream for messages: like `stream`, but it raises nothing if nobody reads it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, or drop it."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            drop(self._stream)
            return len(text)

    def flush(self) -> None:
        """Flush, or drop what is left."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            drop(self._stream)


def tell(text: str) -> None:
    """Print the last line of a command on stdout; the result is safe even if nobody reads it."""
    print(text, file=Messages(sys.stdout), flush=True)
