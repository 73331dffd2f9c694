# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-card
"""Limits of cards by compute capability: CUDA C++ Programming Guide, technical specifications.

And the card for which launches are chosen, which may be another than the one that is there.
"""

import os
import re
from typing import NamedTuple

from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.errors import UserError

# Of an H100 SXM, for which launches are made if nobody says more; bytes of its L2 cache, of which
# an H200 has 60 << 20.
MULTIPROCESSORS, L2 = 132, 50 << 20
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


def can_run(capability: tuple[int, int], target: tuple) -> bool:
    """Whether a card of this capability runs a kernel for this target: (8, 0), (9, 0, "a").

    A target with a letter is one card's. Any other is that of its card and of all newer ones.
    """
    return tuple(capability) == target[:2] or (len(target) == 2 and tuple(capability) > target)


def require_fit(kernel: Kernel, capability: tuple[int, int]) -> None:
    """UserError for a kernel that a card of this capability doesn't run, or has no room for."""
    name, target, has = kernel.function.__name__, kernel.target, tuple(capability)
    if not can_run(has, target):
        more = "" if len(target) > 2 else " or newer"
        needs = ".".join(map(str, target[:2]))
        raise UserError(f"{name} is for GPUs of capability {needs}{more}, not {has}")
    if kernel.shared > limit(SHARED, has):
        raise UserError(
            f"a block of {name} takes {kernel.shared} bytes of shared memory, and a GPU of "
            f"capability {has} gives it {limit(SHARED, has)} at most: choose another form of it"
        )


class Card(NamedTuple):
    """The limits of a card by which kernels, tiles and grids are chosen. l2: bytes of its cache.
    """

    capability: tuple[int, int]
    multiprocessors: int
    l2: int


# A typical card of each capability: A100, RTX 3060, RTX 4070, H100, RTX 5090. Their numbers,
# with sources, are those of planning/cards.py, which tests/test_pretend.py compares.
TYPICAL = {
    (8, 0): Card((8, 0), 108, 40 << 20), (8, 6): Card((8, 6), 28, 3 << 20),
    (8, 9): Card((8, 9), 46, 36 << 20), (9, 0): Card((9, 0), MULTIPROCESSORS, L2),
    (12, 0): Card((12, 0), 170, 96 << 20),
}  # fmt: skip
PRETENDED = "NANOEULER_CAPABILITY"  # the variable that names another card than the one there is


def pretended() -> Card | None:
    """The card that NANOEULER_CAPABILITY names, as 8.9 or 8.9x132; None where it names none."""
    said = os.environ.get(PRETENDED, "").strip()
    if not said:
        return None
    match = re.fullmatch(r"(\d+)\.(\d)(?:x([1-9]\d*))?", said)
    card = TYPICAL.get((int(match[1]), int(match[2]))) if match else None
    if card is None:
        *most, last = (".".join(map(str, capability)) for capability in TYPICAL)
        raise UserError(
            f"expected the compute capability of a card in {PRETENDED}, {', '.join(most)} or "
            f"{last}, if you like with a number of multiprocessors, as 8.9x132, got {said!r}: "
            f"choose one of them, or unset {PRETENDED}"
        )
    return card._replace(multiprocessors=int(match[3])) if match[3] else card


def in_words(card: Card) -> str:
    """A card in the form of NANOEULER_CAPABILITY, for messages and records of a run."""
    major, minor = card.capability
    return f"capability {major}.{minor} with {card.multiprocessors} multiprocessors"


def stand_in(real: Card) -> Card:
    """The card that launches on `real` are chosen for: `real`, or the one that it pretends to be.

    It gets no more multiprocessors than there are, since some blocks wait for each other. UserError
    where `real` can't run the other card's kernels.
    """
    card = pretended()
    if card is None:
        return real
    needs = (9, 0, "a") if card.capability == (9, 0) else min(card.capability, (9, 0))
    has, wants = (limit(SHARED, each.capability) for each in (real, card))
    if not can_run(real.capability, needs) or has < wants:
        there, other = (".".join(map(str, each.capability)) for each in (real, card))
        raise UserError(
            f"{PRETENDED} is {other}, and this GPU, of capability {there}, can't run the kernels "
            f"of such a card: name another, or unset {PRETENDED}"
        )
    return card._replace(multiprocessors=min(card.multiprocessors, real.multiprocessors))
