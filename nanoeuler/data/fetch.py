# Made from book/c-sources.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-sources-whole
"""Fetching the files of a source: from its server or from a folder, one program at a time.

Leaves out what pooch does, which checks each file and gives it its name, and how a download goes on
(`resuming`).
"""

import gzip
import os
import time
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pooch
from filelock import FileLock, Timeout

from nanoeuler.data.catalogue import Source
from nanoeuler.data.download import CHUNK, Resuming, size_of
from nanoeuler.data.quote import quoted
from nanoeuler.errors import UserError
from nanoeuler.files import confirm


def _copying(file, source, folder):
    """A downloader that copies `file` from `folder`, unpacked if it is compressed there."""
    folders = Path(folder), Path(folder) / source.name
    places = [place / (file.name + end) for place in folders for end in ("", ".gz")]
    origin = next((place for place in places if place.is_file()), None)
    if origin is None:
        raise UserError(
            f"expected {file.name} or {file.name}.gz in {folder}, but neither is there: "
            "copy it there, or fetch it over the network without --from"
        )

    def copy(url, output_file, pooch):
        os.unlink(output_file)  # pooch's is for its owner alone; ours is as files are made here
        with (
            (gzip.open if origin.suffix == ".gz" else open)(origin, "rb") as packed,
            open(output_file, "wb") as out,
        ):
            try:
                while chunk := packed.read(CHUNK):
                    out.write(chunk)
                    if file.bytes and out.tell() > file.bytes:
                        break
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise UserError(f"expected a gzip file, but {origin}: {quoted(error)}") from None
        confirm(output_file)

    return copy


# %% sec-sources-one
@contextmanager
def _alone(file, path, report):
    """Hold the lock of the file `path`; wait for it if another program has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(file.name, 0, file.bytes, "another program is fetching it; waiting for that")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _bring(file, path, downloader):
    """Let pooch bring `file` to `path`; False if its digest is wrong, and then it is not there."""
    try:
        pooch.retrieve(file.url, f"sha256:{file.sha256}", path.name, path.parent.absolute(),
                       downloader=downloader)  # fmt: skip
    except ValueError:  # so pooch says that it is another digest
        return False
    return True


def _one(file, path, source, copy_from, report, pause):
    """Bring one file to `path` unless it is there and right."""
    if path.is_file() and pooch.file_hash(path) == file.sha256:
        return report(file.name, size_of(path), size_of(path), "already there")
    with _alone(file, path, report):
        if path.is_file() and pooch.file_hash(path) != file.sha256:
            report(file.name, 0, file.bytes, "there, but not as it should be; once more")
        if copy_from:
            downloader = _copying(file, source, copy_from)
        else:
            downloader = Resuming(file, path.with_name(f".{path.name}.part"), report, pause)
        whole = _bring(file, path, downloader)
        if not whole and getattr(downloader, "glued", False):
            report(file.name, 0, file.bytes, "the pieces do not fit together; from the beginning")
            whole = _bring(file, path, downloader)
    if not whole:
        raise UserError(
            f"expected a file with sha256 {file.sha256} from {copy_from or file.url}, but "
            f"{file.name} there has another: it is another version or damaged; look at it before "
            "you change the catalogue"
        )
    report(file.name, size_of(path), size_of(path), "whole")


def fetch(source: Source, folder: str | Path, copy_from: str | Path | None = None,
          report: Callable | None = None, *,
          pause: Callable = time.sleep) -> list[Path]:  # fmt: skip
    """Bring all files of `source` into folder/NAME, checked; return their paths.

    copy_from: a folder to take them from, instead of the network. report(name, have, size, note)
    is told of each file's bytes so far (size may be None) and, if note is not empty, of news.
    pause(seconds) waits. UserError: what is in the way; the same call later goes on from there.
    """
    report = report or (lambda name, have, size, note: None)
    pooch.get_logger().setLevel("ERROR")  # `report` tells the reader, once
    paths = [Path(folder) / source.name / file.name for file in source.files]
    for file, path in zip(source.files, paths, strict=True):
        try:
            _one(file, path, source, copy_from, report, pause)
        except OSError as error:
            raise UserError(
                f"expected to write {path}, but: {error.strerror or error}: make room or choose "
                "another folder, and run the same command; it goes on from what has come"
            ) from None
    return paths
