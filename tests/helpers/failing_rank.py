"""failing_rank.py HOW STEP ARGUMENTS: nanoeuler ARGUMENTS, a rank of which fails in that step.

HOW: kill, memory or error, and the number of the rank, if that is not 1.
"""

import os
import signal
import sys
from unittest import mock

from nanoeuler.cli.main import main
from nanoeuler.engines.cpu.stepper import CpuStepper
from nanoeuler.engines.ranks.launch import launched
from nanoeuler.engines.ranks.stepper import RankStepper


def fail(how):
    """Fail as `how` says: by a signal, for want of memory, or by an error."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise MemoryError if how == "memory" else RuntimeError("a bug")


if __name__ == "__main__":
    how, at, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    step, gradients, numbers = RankStepper.step_part, CpuStepper.shard_gradients, []

    def numbered(self, part, lr, number):
        numbers.append(number)
        return step(self, part, lr, number)

    def failing(self, *arguments):
        if numbers[-1] == at:
            fail(how)
        return gradients(self, *arguments)

    rank = int(how[-1]) if how[-1].isdigit() else 1
    how = how.rstrip("0123456789")
    if launched() == rank:
        with (
            mock.patch.object(RankStepper, "step_part", numbered),
            mock.patch.object(CpuStepper, "shard_gradients", failing),
        ):
            sys.exit(main(arguments))
    sys.exit(main(arguments))
