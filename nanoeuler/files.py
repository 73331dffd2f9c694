# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-files
"""The project's folder, atomic writes (a whole file or none), digests, and JSON lines.

Leaves out locking: callers must see to it that two programs don't write one file at once.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoeuler.errors import UserError


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` if the block succeeds.

    On any error, Ctrl-C included, the temporary file is removed and `path` is left as it was.
    Missing folders are made. The block must have closed the temporary file when it ends.
    UserError if `path` exists and isn't a file, but a folder, a device or a pipe.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"{path} exists and is not a file: choose a name that is free")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        fsync(temporary)  # a rename may reach the disk before the bytes do
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the rename itself is an entry of the folder; Windows opens no folders
        fsync(path.parent)


def fsync(path: str | Path) -> None:
    """Return when the disk has everything that was written to `path`, a file or a folder."""
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits; files with other bytes have another one."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_regular(path: str | Path) -> None:
    """UserError if `path` is, or links to, a pipe, a device or a socket, which may have no end."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # no such file, or no valid path: the code that opens it says so
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f"expected {path} to be a file, but it is a pipe or a device, which may "
                        "have no end: write it into a file first")  # fmt: skip


def json_lines(text: str) -> Iterator[tuple[int, str, Any]]:
    """Yield (number from 1, text, value) of each line that isn't blank; None: null or not JSON."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, line, json.loads(line)
            except (ValueError, RecursionError):
                yield number, line, None


def project_root(start: str | Path = ".") -> Path:
    """The nearest folder at or above `start` that holds the book's `_toc.yml`."""
    start = Path(start).resolve()
    for folder in (start, *start.parents):
        if (folder / "_toc.yml").exists():
            return folder
    raise UserError(
        f"expected to be inside the project (a folder with _toc.yml), but {start} is not: "
        "change to the folder that holds book/ and data/"
    )
