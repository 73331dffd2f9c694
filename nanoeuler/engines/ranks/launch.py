# Made from book/14-many-ranks.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ranks-watch
"""How processes become ranks: a launcher of MPI starts them, and each finds out that it is one."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from nanoeuler.engines.ranks import watchdog
from nanoeuler.engines.ranks.group import Alone, Group, check_size
from nanoeuler.errors import UserError

# What launchers tell a process of its rank: MPICH's and Slurm's, Open MPI's, PMIx (Slurm's other).
RANKS = "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"
SIZES = "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"  # and of the number of ranks; PMIx tells none
LAUNCHERS = "mpiexec", "mpirun"  # the standard's own name (MPI 4.1, section 11.5), and the older
# What brings both: an extra of pyproject.toml.
CURE = "pip install -e '.[distributed]' brings mpi4py and a launcher"
SAID = (0, 1, 2)  # exit statuses of a program that has said itself what was wrong, if anything


def launched(names: Sequence[str] = RANKS) -> int | None:
    """The rank that a launcher has given this process, None if it has none; or what `names` say."""
    told = [os.environ[name] for name in names if os.environ.get(name, "").isdecimal()]
    return int(told[0]) if told else None


def world(ranks: int | None = None) -> Group:
    """The group of this process. UserError if a launcher has started it and MPI cannot be used.

    Or if the user has asked for another number of `ranks`.
    """
    if launched() is None:
        return Alone()
    if find_spec("mpi4py") is None:
        raise UserError(f"a launcher of MPI has started this, but there is no mpi4py: {CURE}")
    from nanoeuler.engines.ranks.mpi import Mpi

    try:
        group = Mpi()
    except (ImportError, RuntimeError) as error:
        raise UserError(f"MPI does not start ({error}): {CURE}") from None
    if (group.rank, group.size) != (launched(), launched(SIZES) or group.size):
        raise UserError("the launcher is of another MPI than the one that mpi4py has found: start "
                        f"the ranks with {launcher() or 'its own launcher'}")  # fmt: skip
    if ranks not in (None, group.size):
        raise UserError(f"expected --ranks {group.size}, as many as the launcher has started, got "
                        f"{ranks}: leave it out")  # fmt: skip
    watchdog.watch()
    return group


def launcher() -> str | None:
    """The path of a program that starts ranks: beside this Python, else where the shell finds it.

    Beside it, where pip puts one, it is of the MPI that mpi4py will find, too.
    """
    places = [str(Path(sys.executable).parent), None]
    found = (shutil.which(name, path=place) for place in places for name in LAUNCHERS)
    return next(filter(None, found), None)


def found() -> str:
    """What this machine has for several ranks, in words; starts nothing."""
    if find_spec("mpi4py") is None or launcher() is None:
        return f"one alone: {CURE}"
    return f"mpi4py {metadata.version('mpi4py')}, started by {launcher()}; --ranks takes several"


def start(ranks: int, arguments: Sequence[str]) -> int:
    """Run `nanoeuler` with these arguments as so many ranks on this machine; the exit status.

    A signal to this process goes to the launcher, which hands it to the ranks.
    """
    check_size(ranks)
    program = launcher()
    if program is None or find_spec("mpi4py") is None:
        raise UserError(f"--ranks needs mpi4py and one of {', '.join(LAUNCHERS)}: {CURE}")
    command = [program, "-n", str(ranks), sys.executable, "-m", "nanoeuler", *arguments]
    sys.stdout.flush()
    how = dict(stdin=subprocess.DEVNULL, start_new_session=True)
    with watchdog.pipe() as (end, env), subprocess.Popen(command, env=env, **how) as process:
        def forward(number, frame):
            process.send_signal(number)

        before = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            status = watchdog.wait(process, end)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if status not in SAID:
        raise UserError(
            f"a rank or its launcher ended before its time (exit status {status}), and all others "
            "with it; if something was saved, it is whole, and --resume goes on from there; if "
            "not, begin again"
        )
    return status
