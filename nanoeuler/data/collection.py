# Made from book/20a-a-corpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-corpus-files
"""Files and folders as documents, in one order: text, .gz, .zip, JSON lines, parquet.

Leaves out what is in a document (`cleaning`). A document that cannot be read has a reason.
"""

import gzip
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nanoeuler.data.documents import row_groups
from nanoeuler.errors import UserError, quoted
from nanoeuler.files import check_regular

MOST = 1 << 26  # bytes of a document, 64 MiB
_LINES = (".jsonl", ".ndjson")
_FAULTS = (OSError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError)


class RefusedError(Exception):
    """A document that cannot be read; the text says why."""


class Document(NamedTuple):
    """A text that has not been read yet: load() gives its bytes and what its row states."""

    name: str
    load: Callable[[], tuple[bytes, dict[str, str]]]


def files_in(paths: Iterable[str | Path]) -> list[tuple[str, Path]]:
    """(name, path) of each file that `paths` name or hold, by name. UserError: there are none."""
    found = []
    for path in map(Path, paths):
        check_regular(path)
        if not path.is_dir():
            found.append((path.name, path))
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            within = Path(path.resolve().name, os.path.relpath(folder, path))
            found += [((within / name).as_posix(), Path(folder, name))
                      for name in names if not name.startswith(".")]  # fmt: skip
    missing = [f"there is no {path}" for _, path in found if not os.path.lexists(path)]
    if missing or not found:
        problem = (missing or ["they hold no files"])[0]
        raise UserError(f"expected files or folders of texts, but {problem}")
    return sorted(found, key=lambda pair: (os.fsencode(pair[0]), os.fsencode(pair[1])))


def _limited(file):
    """The bytes of an open file; RefusedError for too many."""
    data = file.read(MOST + 1)
    if len(data) > MOST:
        raise RefusedError(f"over {MOST >> 20} MiB: cut it into several files")
    return data


def _whole(path, opened):
    """(bytes, nothing stated) of the file `path`, `opened` by a function."""
    try:
        check_regular(path)
        with opened(path, "rb") as file:
            return _limited(file), {}
    except UserError:
        raise RefusedError("a pipe or a device, not a file") from None
    except _FAULTS as error:
        reason = getattr(error, "strerror", None) or error
        raise RefusedError(f"cannot be read: {quoted(reason)}") from None


def _row(line):
    """(text, what is stated with it) of a line of JSON."""
    try:
        row = json.loads(line)
        text = row["text"].encode()
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise RefusedError("no line of JSON with a text") from None
    return text, {key: str(row[key]) for key in ("id", "url", "licence", "license") if key in row}


def _refuse(reason):
    raise RefusedError(reason)


def _lines(name, path, opened):
    """The documents of a file of JSON lines."""
    number = 0
    try:
        check_regular(path)
        with opened(path, "rb") as file:
            while line := file.readline(MOST + 1):
                if len(line) > MOST:
                    raise RefusedError(f"a line over {MOST >> 20} MiB")
                number += 1
                if line.strip():
                    yield Document(f"{name}:{number}", partial(_row, line))
    except (RefusedError, UserError, *_FAULTS) as error:
        reason = f"cannot be read on: {quoted(error)}"
        yield Document(f"{name}:{number + 1}", partial(_refuse, reason))


def _member(path, member):
    """(bytes, nothing stated) of a member of a zip file."""
    with zipfile.ZipFile(path) as archive, archive.open(member) as file:
        return _limited(file), {}


def _zipped(name, path):
    """The documents of a zip file, one for each member that is a file."""
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            members = [member.filename for member in archive.infolist() if not member.is_dir()]
    except (UserError, *_FAULTS) as error:
        yield Document(name, partial(_refuse, f"cannot be read: {quoted(error)}"))
        return
    for member in members:
        yield Document(f"{name}/{member}", partial(_guarded, partial(_member, path, member)))


def _guarded(load):
    """What `load` gives, its faults as a RefusedError."""
    try:
        return load()
    except _FAULTS as error:
        raise RefusedError(f"cannot be read: {quoted(error)}") from None


def _rows(name, path):
    """The documents of a parquet file: its column `text`, a row group in memory at a time."""
    number = 0
    try:
        check_regular(path)
        for group in row_groups(path):
            for text in group:
                number += 1
                yield Document(f"{name}:{number}", partial(_said, text))
    except UserError as error:
        yield Document(f"{name}:{number + 1}", partial(_refuse, quoted(error, 200)))


def _said(text):
    """(bytes, nothing stated) of a row's text; RefusedError for too many."""
    data = text.encode("utf-8", "replace")
    if len(data) > MOST:
        raise RefusedError(f"a row over {MOST >> 20} MiB")
    return data, {}


def documents_in(files: Iterable[tuple[str, Path]]) -> Iterator[Document]:
    """Yield the documents of files, (name, path) each; what cannot be read refuses to load."""
    for name, path in files:
        base, end = os.path.splitext(path.name.lower())
        opened: Any = gzip.open if end == ".gz" else open
        inner = os.path.splitext(base)[1] if end == ".gz" else end
        if inner in _LINES:
            yield from _lines(name, path, opened)
        elif end == ".zip":
            yield from _zipped(name, path)
        elif end == ".parquet":
            yield from _rows(name, path)
        else:
            yield Document(name, partial(_whole, path, opened))
