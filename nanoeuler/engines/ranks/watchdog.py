# Made from book/14-many-ranks.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ranks-watch
"""Ranks end with those that have started them, and a launcher that has lost its ranks is ended.

Leaves out what ranks tell each other of their own failures (`controller`).
"""

import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "NANOEULER_RANKS"  # of the environment: a pipe, read by the program that starts ranks
LOOK = 0.5  # seconds between two looks for who is still there
GRACE = 15  # seconds that a rank has for its step and a save, when it is left alone
NOTICE = 5.0  # seconds in which a launcher notices that all of its ranks have ended
SHARED = re.compile(r"/dev/shm/mpich_shm_\w+")  # MPICH's memory that ranks share


def shared_memory() -> list[str]:
    """The files of the memory that this rank shares with others, where the system lists them."""
    with suppress(OSError):
        return sorted(set(SHARED.findall(Path("/proc/self/maps").read_text())))
    return []


def watch() -> None:
    """Watch, on a thread, over who has started this rank: it ends when they have died."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent):
    pipe, files, above = os.environ.get(VARIABLE, ""), shared_memory(), select.poll()
    alone = False
    if os.path.exists(pipe):  # this rank is on the program's machine
        try:
            end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(end, "".join(f"{file}\n" for file in files).encode())
            above.register(end, 0)  # for errors alone: its reader has died
        except OSError:  # no reader: the program has died already
            alone = True
    while not alone:
        alone = above.poll(1000 * LOOK) or os.getppid() != parent
    for file in files:  # all ranks have it in memory, and nobody else will remove it
        Path(file).unlink(missing_ok=True)
    if pipe:
        shutil.rmtree(Path(pipe).parent, ignore_errors=True)
    signal.alarm(GRACE)  # which ends it wherever it is then
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def pipe() -> Iterator[tuple[int, dict[str, str]]]:
    """A pipe to read what ranks say, and the environment by which they find it."""
    with tempfile.TemporaryDirectory(prefix="nanoeuler-", ignore_cleanup_errors=True) as folder:
        os.mkfifo(path := Path(folder) / "ranks")
        end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            yield end, {**os.environ, VARIABLE: str(path)}
        finally:
            os.close(end)


def wait(launcher: subprocess.Popen, end: int) -> int:
    """The exit status of a launcher, which is killed if it does not see that its ranks have ended.

    `end` of a `pipe`: what the ranks say there are files to be removed after them.
    """
    said = b""
    while launcher.poll() is None:
        if select.select([end], [], [], LOOK)[0]:
            said += (more := os.read(end, 1 << 16))
            if not more:  # no rank is left
                with suppress(subprocess.TimeoutExpired):
                    launcher.wait(NOTICE)
                launcher.kill()
                launcher.wait()
    for file in SHARED.findall(said.decode()):
        Path(file).unlink(missing_ok=True)
    return launcher.returncode
