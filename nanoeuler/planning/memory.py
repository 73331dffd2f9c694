# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-face
"""How much memory this process may use, and an error for what would not fit into it.

Leaves out how much of it is in use at the moment, since that changes.
"""

import math
import os
import sys
from pathlib import Path

from rich.filesize import decimal

from nanoeuler.errors import UserError

if sys.platform != "win32":
    import resource

# Where Linux says how much memory a container may have: by control groups of version 2, and of 1.
LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def built_in() -> float:
    """The bytes of memory of this machine; infinity if it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return math.inf


def limit() -> float:
    """The most bytes that this process may use; infinity if that is not known."""
    sizes = [built_in()]
    if sys.platform != "win32":
        soft = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
        sizes += [size for size in soft if size != resource.RLIM_INFINITY]
    for path in map(Path, LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        sizes += [int(text)] if text.isdecimal() else []
    return min(sizes)


def need(size: float, what: str, cure: str) -> None:
    """UserError if `what` needs more than `limit`: `size` bytes. `cure` says what to do."""
    if size > limit():
        raise UserError(
            f"{what} needs {decimal(int(size))} of memory, and this machine has "
            f"{decimal(int(limit()))}: {cure}"
        )
