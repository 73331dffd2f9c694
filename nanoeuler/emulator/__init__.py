# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-numbers
"""A GPU emulator: kernels run unmodified, instruction by instruction, and are checked.

dtypes (numbers in registers), machine (threads and their turns), vector_clocks, memory, counters
(traffic), arrays and their shadow, barriers, cuda (the kernel's `cuda` module), masks and lockstep
(threads in teams), runner, device (for the host, with graphs of launches), drawing.
PTX: ptx_parser, fragments, the families of instructions ptx_math, ptx_memory, ptx_sync, ptx_copy,
ptx_mma, and ptx_lockstep (for teams). Whole programs: rehearsal (a step), collectives (ranks).

May import: errors, engines.gpu, engines.ranks.
"""


# %% sec-paper-run
from nanoeuler.emulator.device import Device as Device
from nanoeuler.emulator.machine import Fault as Fault
from nanoeuler.emulator.runner import Report as Report
from nanoeuler.emulator.runner import run as run
