# Made from book/06a-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-shards
"""Sequences in parts of nearly equal number: shards of a batch, and pieces that fit into memory."""


def cut(rows: range, parts: int) -> list[range]:
    """A range in at most `parts` ranges of nearly equal length, none of them empty."""
    parts = min(parts, len(rows))
    return [rows[len(rows) * i // parts : len(rows) * (i + 1) // parts] for i in range(parts)]


def slices(rows: range, parts: int) -> list[slice]:
    """The same as slices of an array."""
    return [slice(x.start, x.stop) for x in cut(rows, parts)]
