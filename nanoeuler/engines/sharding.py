# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-shards
"""Sequences in parts of nearly equal number: shards of a batch, and pieces that fit into memory.

And the order in which what the shards gave is added.
"""

# How often the shards are halved: up to 2**4 processes can hold a part each. More would cost each
# process another gradient's memory, and shards are 64 at most, of which each should have some.
HALVINGS = 4


def cut(rows: range, parts: int) -> list[range]:
    """A range in at most `parts` ranges of nearly equal length, none of them empty."""
    parts = min(parts, len(rows))
    return [rows[len(rows) * i // parts : len(rows) * (i + 1) // parts] for i in range(parts)]


def slices(rows: range, parts: int) -> list[slice]:
    """The same as slices of an array."""
    return [slice(x.start, x.stop) for x in cut(rows, parts)]


def halved(rows: list[range], halvings: int) -> list[list[range]]:
    """Shards halved so often: what each of 2**halvings processes takes."""
    if not halvings:
        return [rows]
    middle = len(rows) // 2
    return halved(rows[:middle], halvings - 1) + halved(rows[middle:], halvings - 1)


def additions(count: int, halvings: int = HALVINGS) -> list[int]:
    """How often, after each of `count` addends, the newest sum is added to the one before it.

    >>> additions(8)
    [0, 1, 0, 2, 0, 1, 0, 3]
    >>> additions(4, halvings=0)
    [0, 1, 1, 1]
    """
    if count == 1 or not halvings:
        return [0] + [1] * (count - 1)
    first = count // 2
    after = additions(first, halvings - 1) + additions(count - first, halvings - 1)
    after[-1] += 1
    return after
