"""A GPU on paper: kernels run unmodified, instruction by instruction, and are checked.

May import: errors, engines.gpu.
"""

from nanoeuler.engines.gpu.paper.machine import Fault
from nanoeuler.engines.gpu.paper.runner import Report, run
