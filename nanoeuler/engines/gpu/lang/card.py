# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-mma-host
"""Limits of cards by compute capability: CUDA C++ Programming Guide, technical specifications."""

MULTIPROCESSORS = 132  # of an H100 or H200 SXM, for which launches are made if nobody says more
# Bytes of shared memory that a block may have.
SHARED = {
    (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10,
    (10, 0): 227 << 10, (12, 0): 99 << 10,
}  # fmt: skip
SYSTEM = 1024  # bytes of each block's shared memory that are the system's
# Threads that a multiprocessor runs at once.
THREADS = {
    (8, 0): 2048, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048,
    (12, 0): 1536,
}  # fmt: skip


def limit(table: dict[tuple[int, int], int], capability: tuple[int, int]) -> int:
    """A card's limit; a card newer than `table` has at least the least of it."""
    return table.get(tuple(capability), min(table.values()))
