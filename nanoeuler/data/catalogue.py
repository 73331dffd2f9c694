# Made from book/c-sources.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-sources-paths
"""The catalogue of texts: title, licence, address, and the digest of the bytes.

Leaves out your own texts, which need no address and no catalogue.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from nanoeuler import paths
from nanoeuler.errors import UserError, quoted

FORMATS = ("gutenberg", "text", "parquet", "pairs", "tasks")  # tasks are only for evaluation


@dataclass(frozen=True)
class File:
    """One file of a source; `bytes` (its size) is None if it is unknown.

    A user's own file, which is never fetched, has no address and no sha256.
    """

    name: str
    url: str
    bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Source:
    """A text, or several that belong together; `files` is a tuple of `File`."""

    name: str
    title: str
    licence: str
    about: str
    format: str
    files: tuple[File, ...]

    @property
    def bytes(self) -> int | None:
        """The size of all files in bytes, None if one of them is unknown."""
        sizes = [file.bytes for file in self.files]
        return None if None in sizes else sum(sizes)


_TEXT = (str, r".*\S.*", "a line of printable text")
_PLAIN = r"[A-Za-z0-9_][A-Za-z0-9._-]*"  # no separators, no leading dot: it stays in its folder
_SOURCE_FIELDS = {
    "title": _TEXT,
    "licence": _TEXT,
    "about": _TEXT,
    "format": (str, "|".join(FORMATS), "one of " + ", ".join(FORMATS)),
    "files": (list, r"\[.+\]", "a list of tables"),
}
_FILE_FIELDS = {
    "name": (str, _PLAIN, "a plain file name"),
    "url": (str, r"https://[!-~]+", "an address in ASCII that begins with https://"),
    "bytes": (int, r"[1-9]\d*", "a size above 0"),
    "sha256": (str, r"[0-9a-f]{64}", "64 hexadecimal digits in lower case"),
}
_MAY_LACK = {"bytes"}


def _check(entry, fields, where):
    """Raise UserError unless `entry` is a table of the given fields with valid values."""
    if not isinstance(entry, dict):
        raise UserError(f"{where}: expected a table, but it is {quoted(repr(entry))}")
    for key in entry.keys() - fields.keys():
        raise UserError(
            f"{where}: expected {', '.join(fields)}, but there is {quoted(repr(key))}: remove it"
        )
    for key, (kind, pattern, wanted) in fields.items():
        if key not in entry and key not in _MAY_LACK:
            raise UserError(f"{where}: expected a field {key!r}, but there is none: add it")
        value = entry.get(key)
        fits = isinstance(value, kind) and re.fullmatch(pattern, str(value), re.S)
        if key in entry and not (fits and str(value).isprintable()):
            raise UserError(
                f"{where}: expected {wanted} as {key}, but it is {quoted(repr(value))}"
            )


def catalogue(path: str | Path | None = None) -> dict[str, Source]:
    """{name: Source} from the TOML file `path`, by default the shipped one.

    UserError says what is wrong with the file, and where.
    """
    path = Path(path or paths.shipped("sources.toml"))
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"expected a catalogue, but {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or lists in lists in lists
        raise UserError(f"expected TOML in {path}, but {quoted(error)}: correct the file") from None
    return {
        name: _source(name, table, f"{path.name}, {quoted(name)}") for name, table in tables.items()
    }


def _source(name, table, where):
    """The `Source` of one table, checked."""
    if not re.fullmatch(_PLAIN, name):
        raise UserError(f"{where}: expected a plain name for a source: rename it")
    _check(table, _SOURCE_FIELDS, where)
    for number, entry in enumerate(table["files"], start=1):
        _check(entry, _FILE_FIELDS, f"{where}, file {number}")
    files = tuple(File(**entry) for entry in table["files"])
    if len({file.name.lower() for file in files}) < len(files):
        raise UserError(f"{where}: expected each file's name once: rename one of them")
    return Source(name=name, **{**table, "files": files})
