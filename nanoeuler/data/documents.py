# Made from book/c-sources.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-sources-gutenberg
"""From fetched files to documents: books without their wrapping, texts, pages, questions.

Leaves out any judgement of a text's worth: no filter, no language detection.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from nanoeuler.data.catalogue import Source
from nanoeuler.errors import UserError, quoted

# They match all variants in the books of data/sources.toml; each is in tests/test_documents.
_START = re.compile(
    r"^\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG EBOOK\b.{0,300}?\*\*\*[ \t]*$", re.M | re.S
)
_END = re.compile(r"^\*\*\* ?END OF TH(?:E|IS) PROJECT GUTENBERG EBOOK\b", re.M)
_THANKS = re.compile(
    r"\s*(?:Produced by|E-text prepared by|Transcribed from|Special thanks are due"
    r"|An Anonymous Volunteer)\b.*?\n[ \t]*\n",
    re.S,
)
_CLOSING = re.compile(
    r"\n[ \t]*End of (?:the )?Project Gutenberg[^\n]*(?:\n[^\n]+){0,2}\s*\Z", re.I
)


def unwrapped(text: str, where: str | Path = "the text") -> str:
    """The book in a text of Project Gutenberg: everything between its marks, without credits.

    Lines end in a line feed. UserError, in which `where` names the text, if there are no marks.
    """
    start = _START.search(text)
    end = _END.search(text, start.end()) if start else None
    if not end:
        missing = "END" if start else "START"
        raise UserError(
            f"expected a line '*** {missing} OF THE PROJECT GUTENBERG EBOOK' in {where}, but there "
            "is none: prepare it as a plain text, if it is one"
        )
    book = text[start.end() : end.start()]
    if thanks := _THANKS.match(book):
        book = book[thanks.end() :]
    return _CLOSING.sub("", book).strip("\n") + "\n"


_DECLARED = re.compile(
    rb"Character set encoding:[ \t]*((?i:iso-8859-\d+|latin-?1|(?:cp|windows-)125\d))\b"
)


def text_of(data: bytes, where: str | Path = "the text") -> str:
    """The characters of `data`, without a byte order mark, with a line feed at each line's end.

    UserError if it is neither UTF-8 nor in the encoding that Project Gutenberg's header declares.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        declared = _DECLARED.search(data)
        try:
            text = data.decode(declared[1].decode() if declared else "utf-8")
        except (UnicodeDecodeError, LookupError):
            raise UserError(
                f"expected UTF-8, but byte {error.start} of {where} is not: "
                "convert the file, for example with iconv -f latin1 -t utf-8"
            ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _paths(source, folder):
    """The paths of the files of `source` under `folder`, each plain or as NAME.gz."""
    paths = []
    for file in source.files:
        plain = Path(folder) / source.name / file.name
        path = plain if plain.is_file() else plain.with_name(plain.name + ".gz")
        if not path.is_file():
            raise UserError(f"expected {plain}, but there is no such file: "
                            f"run nanoeuler data fetch {source.name}")  # fmt: skip
        paths.append(path)
    return paths


def _read(path):
    """The characters of a text file, plain or compressed."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            return text_of(file.read(), path)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"expected a readable file, but {path}: {quoted(error)}") from None


# %% sec-sources-parquet
_GROUPS = """SELECT any_value(row_group_num_rows) FROM parquet_metadata(?)
             GROUP BY row_group_id ORDER BY row_group_id"""
_ROWS = """SELECT text FROM read_parquet(?, file_row_number = true)
           WHERE file_row_number BETWEEN ? AND ?"""


def row_groups(path: str | Path) -> Iterator[list[str]]:
    """The texts of a parquet file's column `text`, a list for each row group, in order."""
    try:
        import duckdb  # here, because it's only needed for parquet: the extra `data`
    except ModuleNotFoundError:
        raise UserError(
            f"expected DuckDB, to read {path}, but it isn't installed: pip install -e '.[data]'"
        ) from None
    path, first = str(path), 0
    with duckdb.connect(config={"threads": 1}) as database:
        try:
            for (rows,) in database.execute(_GROUPS, [path]).fetchall():
                column = database.execute(_ROWS, [path, first, first + rows - 1]).fetchall()
                texts = [text for (text,) in column if text is not None]
                if not all(isinstance(text, str) for text in texts):
                    raise UserError(f"expected strings in the column text of {path}, but got "
                                    f"{quoted(repr(texts[0]))}: choose another file")  # fmt: skip
                yield texts
                first += rows
        except duckdb.Error as error:
            raise UserError(
                f"expected a parquet file with a column text, but {path}: {quoted(error)}"
            ) from None


def documents(source: Source, folder: str | Path) -> Iterator[str]:
    """Yield the documents of a fetched `Source` as str, one after another; none is empty.

    `folder` is the one given to `fetch`: the files are in folder/NAME. UserError if a file is
    missing or isn't of the source's format.
    """
    if source.format == "pairs":
        raise UserError(
            f"expected a source of documents, but {source.name} holds questions and answers: "
            "fine-tune on it (nanoeuler sft), don't pretrain"
        )
    if source.format == "tasks":
        raise UserError(f"expected a source of documents, but {source.name} holds tasks, which "
                        "evaluate models (nanoeuler eval): train on another")  # fmt: skip
    for path in _paths(source, folder):
        if source.format == "parquet":
            texts = (text for group in row_groups(path) for text in group)
        elif source.format == "gutenberg":
            texts = [unwrapped(_read(path), path)]
        else:
            texts = [_read(path)]
        yield from (text for text in texts if text.strip())


# %% sec-sources-pairs
NO_OUTPUT = "<nooutput>"  # Alpaca's mark for an instruction that its model couldn't follow


def pairs(source: Source, folder: str | Path) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) of a fetched `Source` of format pairs: Alpaca's list in JSON.

    `folder` is the one given to `fetch`. UserError if a file is missing or isn't JSON, or if an
    entry lacks instruction, input or output.
    """
    if source.format != "pairs":
        raise UserError(f"expected a source of questions and answers, but {source.name} is "
                        f"{source.format}: its documents are for pretraining")  # fmt: skip
    for path in _paths(source, folder):
        try:
            entries = json.loads(_read(path))
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"expected JSON in {path}, but {quoted(error)}: fetch it again"
            ) from None
        if not isinstance(entries, list):
            raise UserError(f"expected a list in {path}, but it is a {type(entries).__name__}")
        for number, entry in enumerate(entries, start=1):
            try:
                task, detail, answer = (
                    entry[name].strip() for name in ("instruction", "input", "output")
                )
                (task + detail + answer).encode()  # JSON can spell half a character: "\ud800"
            except (TypeError, KeyError, AttributeError, UnicodeEncodeError):
                raise UserError(
                    f"entry {number} of {path}: expected texts as instruction, input and output"
                ) from None
            if task and answer and not answer.startswith(NO_OUTPUT):
                yield (f"{task}\n{detail}" if detail else task), answer
