# Made from book/11a-the-paper.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-numbers
"""A GPU on paper: kernels run unmodified, instruction by instruction, and are checked.

numbers, machine (threads and their turns), clocks, memory, traffic (what is counted), arrays and
their states, barriers, cuda (what a kernel finds under that name), masks and abreast (threads in
teams), runner, device (what the host does, and graphs of launches), picture; and PTX: translate,
layouts, the families of instructions values, plain, waits, copies, tensor, and wide (for teams).

May import: errors, engines.gpu.
"""


# %% sec-paper-run
from nanoeuler.engines.gpu.paper.device import Device as Device
from nanoeuler.engines.gpu.paper.machine import Fault as Fault
from nanoeuler.engines.gpu.paper.runner import Report as Report
from nanoeuler.engines.gpu.paper.runner import run as run
