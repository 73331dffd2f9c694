# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli-tokenizer
"""`nanoeuler tokenizer`: learn a vocabulary, and turn text into ids and back, a chunk at a time.

Leaves out how text is split and merged: see appendix B. Imports inside functions, as main.py does.
"""

import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanoeuler.cli import flags
from nanoeuler.cli.stdio import tell
from nanoeuler.errors import UserError
from nanoeuler.files import check_regular

if TYPE_CHECKING:
    from rich.progress import Progress

CHUNK = 1 << 20  # bytes read at a time: little memory, and few calls

# The group of commands that main.py adds to the program.
tokenizer_app = typer.Typer(help="Learn a vocabulary; turn text into ids and back.")
_Text = Annotated[str | None, typer.Argument(metavar="TEXT", help="a text")]


def _chunks(read, see):
    """Yield the chunks of bytes that `read(CHUNK)` returns, after `see(chunk)` for each."""
    while chunk := read(CHUNK):
        see(chunk)
        yield chunk


def bar_of_bytes(progress: "Progress", total: int) -> Callable[[bytes], None]:
    """Add a bar to `progress`; return a function that moves it by a chunk that has been read.

    total: the number of bytes to read, or 0 if that is not known.
    """
    from rich.filesize import decimal

    task, done = progress.add_task("", total=total or None), 0
    of = f" of {decimal(total)}" if total else ""

    def read(chunk):
        nonlocal done
        done += len(chunk)
        progress.update(task, completed=done, description=f"read {decimal(done)}{of}")

    return read


def _size(path):
    """The bytes in the file `path`; UserError if it cannot be read to an end."""
    try:
        check_regular(path)
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"expected a readable file, but {path}: {error.strerror}") from None


def _check_files(files, out):
    """The bytes in the files; UserError if one cannot be read, or `out` cannot be written."""
    total = sum(map(_size, files))
    if os.path.realpath(flags.file_out(out)) in map(os.path.realpath, files):
        raise UserError(f"--out {out} is a text to learn from: name another file")
    return total


def _learned(files, total, vocab_size):
    """(tokenizer, first): learned from the files of `total` bytes, and their first CHUNK bytes."""
    from nanoeuler.progress import bars
    from nanoeuler.tokenizer.pretokenizer import whole_words
    from nanoeuler.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer

    first = bytearray()
    with bars() as progress:
        move, merges = bar_of_bytes(progress, total), vocab_size - 256 - len(SPECIAL_TOKENS)
        task = progress.add_task("", total=merges, visible=False)

        def see(chunk):
            first.extend(chunk[: CHUNK - len(first)])
            move(chunk)

        def pieces():
            for path in files:
                with open(path, "rb") as file:
                    yield from whole_words(_chunks(file.read, see))
            if not first:
                raise UserError(f"expected text to learn from, but {files[0]} is empty")
            learned(0)

        def learned(made):
            said = f"{made} of {merges} merges"
            progress.update(task, completed=made, description=said, visible=True)

        return Tokenizer.train(pieces(), vocab_size, progress=learned), bytes(first)


@tokenizer_app.command("train")
def tokenizer_train(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="texts; without any: the embedded corpus"),
    ] = None,
    vocab_size: flags.VocabSize = None, out: flags.OutFile = Path("tokenizer.json"),
) -> None:  # fmt: skip
    """Learn a vocabulary from files.

    The files may be larger than memory, and need not be UTF-8.

    Example: nanoeuler tokenizer train story.txt --vocab-size 1024
    """
    from rich.filesize import decimal

    from nanoeuler.data import docstrings

    total = _check_files(files or [], out)
    if not files:
        files = [docstrings.text_path()]
        total = _size(files[0])
    vocab_size = flags.learned_size(vocab_size, total)
    began = time.perf_counter()
    tokenizer, first = _learned(files, total, vocab_size)
    tokenizer.save(out)
    ratio, seconds = len(first) / len(tokenizer.encode(first)), time.perf_counter() - began
    tell(f"saved {out}: {vocab_size} ids, {ratio:.2f} bytes per token in the first "
         f"{decimal(len(first))} of the text, {seconds:.1f} s")  # fmt: skip


@tokenizer_app.command("encode")
def tokenizer_encode(
    text: _Text = None, path: flags.Tokenizer = Path("tokenizer.json")
) -> None:
    """Print the ids of a text.

    Without TEXT, it reads bytes from stdin.

    Example: nanoeuler tokenizer encode "The river" --tokenizer runs/base
    """
    from nanoeuler.progress import bars

    tokenizer = flags.load_tokenizer(path)
    if text is not None:
        print(*tokenizer.encode(os.fsencode(text)).tolist())
        return
    shown, total, between = sys.stderr.isatty() and not sys.stdout.isatty(), 0, ""
    if shown:  # and the end of stdin is known
        status = os.fstat(sys.stdin.fileno())
        shown, total = stat.S_ISREG(status.st_mode), status.st_size
    with bars(shown) as progress:
        chunks = _chunks(sys.stdin.buffer.read1, bar_of_bytes(progress, total))
        for ids in tokenizer.encode_stream(chunks):
            if len(ids):
                sys.stdout.write(between + " ".join(map(str, ids.tolist())))
                between = " "
    print()


def _ids(chunks):
    """Yield lists of ids from `chunks` of bytes, which hold numbers separated by spaces."""
    rest = b""
    for chunk in chunks:
        words = (rest + chunk).split()
        rest = b"" if chunk[-1:].isspace() else words.pop()
        yield [_id(word) for word in words]
        _id(rest or b"0")  # refuse a number that is too long before it fills the memory
    yield [_id(rest)] if rest else []


def _id(word):
    """The number that the bytes `word` spell."""
    if not (word.isdigit() and len(word) <= flags.LONGEST_ID):
        raise UserError(
            f"expected ids, numbers of at most {flags.LONGEST_ID} digits separated by spaces, "
            f"but one begins with {repr(word[: flags.LONGEST_ID])[1:]}"
        )
    return int(word)


@tokenizer_app.command("decode")
def tokenizer_decode(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="ids")] = None,
    path: flags.Tokenizer = Path("tokenizer.json"),
) -> None:
    """Print the text of ids.

    Without ID, it reads ids from stdin and writes their exact bytes, without a line end.

    Example: nanoeuler tokenizer decode 51 71 68 --tokenizer runs/base
    """
    tokenizer = flags.load_tokenizer(path)
    if ids:
        print(tokenizer.decode_text([_id(os.fsencode(word)) for word in ids]))
        return
    for part in _ids(_chunks(sys.stdin.buffer.read1, lambda chunk: None)):
        sys.stdout.buffer.write(tokenizer.decode(part))


@tokenizer_app.command("show")
def tokenizer_show(
    text: _Text = None, path: flags.Tokenizer = Path("tokenizer.json")
) -> None:
    """Print the tokens of a text, each with its id on a line.

    Without TEXT, it prints the whole vocabulary.

    Example: nanoeuler tokenizer show "The river" --tokenizer runs/base
    """
    tokenizer = flags.load_tokenizer(path)
    every = range(tokenizer.vocab_size)
    for token in every if text is None else tokenizer.encode(os.fsencode(text)).tolist():
        print(token, repr(tokenizer.decode([token]))[1:])
