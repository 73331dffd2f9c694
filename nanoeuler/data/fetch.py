# Made from book/c-sources.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-sources-whole
"""Fetches the files of a source from its server or from a folder, one program at a time.

Leaves out how a download resumes where it was cut off (download.py).
"""

import gzip
import os
import time
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nanoeuler.data.catalogue import Source
from nanoeuler.data.download import CHUNK, download, size_of
from nanoeuler.errors import UserError, quoted
from nanoeuler.files import fsync, replacing, sha256_of


def _copy(file, source, folder, target):
    """Copy `file` from `folder` to the path `target`, unpacked if it is compressed there."""
    folders = Path(folder), Path(folder) / source.name
    places = [place / (file.name + end) for place in folders for end in ("", ".gz")]
    origin = next((place for place in places if place.is_file()), None)
    if origin is None:
        raise UserError(
            f"expected {file.name} or {file.name}.gz in {folder}, but neither is there: "
            "copy it there, or fetch it over the network without --from"
        )
    with (
        (gzip.open if origin.suffix == ".gz" else open)(origin, "rb") as packed,
        open(target, "wb") as out,
    ):
        try:
            while chunk := packed.read(CHUNK):
                out.write(chunk)
                if file.bytes and out.tell() > file.bytes:
                    break
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"expected a gzip file, but {origin}: {quoted(error)}") from None


# %% sec-sources-one
@contextmanager
def _locked(file, path, report):
    """Hold the lock of the file `path`; wait for it if another program has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(file.name, 0, file.bytes, "another program is fetching it; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _check(file, path, origin):
    """UserError unless the file at `path` has the right digest."""
    if sha256_of(path) != file.sha256:
        raise UserError(
            f"expected a file with sha256 {file.sha256} from {origin}, but {file.name} there has "
            "another: it is another version or damaged; look at it before you change the catalogue"
        )


def _download(file, path, report, pause):
    """Download `file` to `path`; a file with a wrong digest is removed."""
    part = path.with_name(f".{path.name}.part")
    if download(file, part, report, pause) and sha256_of(part) != file.sha256:
        part.unlink()
        report(file.name, 0, file.bytes, "the pieces don't fit together; starting over")
        download(file, part, report, pause)
    try:
        _check(file, part, file.url)
    except UserError:
        part.unlink()
        raise
    fsync(part)  # a name may reach the disk before the bytes do
    os.replace(part, path)


def _one(file, path, source, copy_from, report, pause):
    """Fetch one file to `path` unless it's there and right."""
    if path.is_file() and sha256_of(path) == file.sha256:
        return report(file.name, size_of(path), size_of(path), "already there")
    with _locked(file, path, report):
        if not (path.is_file() and sha256_of(path) == file.sha256):  # nobody else has fetched it
            if path.is_file():
                report(file.name, 0, file.bytes, "it's there, but damaged; fetching it again")
            if copy_from:
                with replacing(path) as temporary:
                    _copy(file, source, copy_from, temporary)
                    _check(file, temporary, copy_from)
            else:
                _download(file, path, report, pause)
    report(file.name, size_of(path), size_of(path), "whole")


def fetch(source: Source, folder: str | Path, copy_from: str | Path | None = None,
          report: Callable | None = None, *,
          pause: Callable = time.sleep) -> list[Path]:  # fmt: skip
    """Fetch all files of `source` into folder/NAME and verify them; return their paths.

    copy_from: a folder to take them from, instead of the network. Calls report(name, have, size,
    note) with each file's bytes so far (size may be None), and a note if there is news.
    pause(seconds) waits. UserError says what is in the way; the same call later resumes.
    """
    report = report or (lambda name, have, size, note: None)
    paths = [Path(folder) / source.name / file.name for file in source.files]
    for file, path in zip(source.files, paths, strict=True):
        try:
            _one(file, path, source, copy_from, report, pause)
        except OSError as error:
            raise UserError(
                f"expected to write {path}, but: {error.strerror or error}: make room or choose "
                "another folder, and run the same command, which resumes where it stopped"
            ) from None
    return paths
