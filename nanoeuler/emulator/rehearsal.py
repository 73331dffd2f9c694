# Made from book/13a-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-paper
"""A recorded program in the emulator, where what returns to the arena is overwritten at once.

Left out: the host's part of a step, which stepper.py has.
"""

from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import as_strided

from nanoeuler.emulator import Report, run
from nanoeuler.engines.gpu.step.program import ARENA, CONSTANTS, Program, bind, constants

GONE = 0xFF  # every byte of memory that is nobody's: nan as bf16 and as float32


def ended(loans: dict[str, list], i: int) -> list[tuple[str, int, int]]:
    """(memory, start, bytes) of what came back before launch i."""
    return [(memory, start, size) for memory, each in loans.items()
            for start, size, _, last in each if last == i]  # fmt: skip


def rehearse(program: Program, memories: dict[str, np.ndarray]) -> Iterator[tuple[str, Report]]:
    """Run the list, launch by launch; yield each one's name and report.

    memories: arrays in C order of the sizes that the program names. Those that it names and that
    are missing are put there: the arena as nobody's, others zero.
    """
    for name, size in program.sizes.items():
        fill = GONE if name == ARENA else 0
        memories.setdefault(name, np.full(size, fill, np.uint8))
    memories[CONSTANTS] = constants(program)
    bytes_of = {name: array.reshape(-1).view(np.uint8) for name, array in memories.items()}

    def part(memory, address, shape, dtype, strides):
        rest = bytes_of[memory][address:]
        whole = rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)
        return as_strided(whole, shape, strides)

    loans = {ARENA: program.loans, **program.borrowed}
    for i, launch in enumerate(bind(program, part)):
        for memory, start, size in ended(loans, i):
            bytes_of[memory][start : start + size] = GONE
        yield program.steps[i].name, run(launch)
