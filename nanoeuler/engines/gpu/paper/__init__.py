"""A GPU on paper: kernels run unmodified, instruction by instruction, and are checked.

May import: errors, engines.gpu.
"""

from nanoeuler.engines.gpu.paper.machine import Fault as Fault
from nanoeuler.engines.gpu.paper.runner import Report as Report
from nanoeuler.engines.gpu.paper.runner import run as run
