# Made from book/11a-a-ladder-on-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-wgmma-tile
"""A ring of stages in shared memory: where it may begin, and which stage and parity come next.

Stages are filled and emptied in turn. Every filling of a stage is a phase of its mbarrier, and who
waits for it says the phase's parity.
"""

from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import int32

ALIGN = 1024  # bytes: the swizzle's period, eight rows of 128


def aligned(address):
    """The next multiple of ALIGN."""
    return int32((address + (ALIGN - 1)) & ~(ALIGN - 1))


# %% sec-wgmma-ring
def advance(stage, phase, stages):
    """The next stage of a ring, and the parity of its phase: it changes with every round."""
    stage = int32(stage + 1)
    if stage == stages:
        return int32(0), int32(phase ^ 1)
    return stage, phase


# %% sec-wgmma-pingpong
def skip(stage, phase, stages, count):
    """Stage and parity after `count` more stages."""
    stage = int32(stage + count)
    rounds = ptx.divide(stage, stages)
    return int32(stage - rounds * stages), int32((phase ^ rounds) & 1)
