# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli-data
"""`nanoeuler data`: list texts, fetch one, prepare it as tokens, look at the result.

Leaves out how that is done: see appendices C and D. Imports inside functions, as main.py does.
"""

from pathlib import Path
from typing import Annotated

import typer

from nanoeuler.cli import flags
from nanoeuler.cli.stdio import tell
from nanoeuler.errors import UserError

# The group of commands that main.py adds to the program.
data_app = typer.Typer(help="Texts to train on: list, fetch, clean, prepare, show.")


def _here(path):
    """`path` as you would type it in this folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _state(source):
    """The state of a source on this machine, in words."""
    from nanoeuler.paths import data_folder

    prepared, fetched = (data_folder(kind) / source.name for kind in ("prepared", "fetched"))
    if flags.is_prepared(prepared):
        return "prepared"
    found = [(fetched / file.name, file.bytes) for file in source.files]
    here = sum(path.exists() and size in (None, path.stat().st_size) for path, size in found)
    if here == len(found):
        return "fetched"
    return f"{here} of {len(found)} files" if here else "not here"


@data_app.command("list")
def data_list() -> None:
    """List the texts that can be fetched, and which are here.

    It needs no network.

    Example: nanoeuler data list
    """
    from urllib.parse import urlsplit

    from rich.filesize import decimal

    from nanoeuler.data.catalogue import catalogue

    for source in catalogue().values():
        size = decimal(source.bytes) if source.bytes else "size unknown"
        hosts = sorted({urlsplit(file.url).hostname for file in source.files})
        print(f"{source.name:16} {size:>12}  {source.format:10} {_state(source)}")
        print(f"    {source.title}: {source.about}")
        print(f"    {source.licence}; from {', '.join(hosts)}")


def _bar_of_files(progress):
    """The `report` of `fetch`: a bar for each file that is being fetched, a line for its news."""
    from rich.filesize import decimal

    from nanoeuler.progress import say

    tasks = {}

    def report(name, have, size, note):
        if name not in tasks:
            tasks[name] = progress.add_task("", visible=False)
        text = f"{name}: {decimal(have)}" + (f" of {decimal(size)}" if size else "")
        on_its_way = not note or have != size
        progress.update(tasks[name], completed=have, total=size, description=text,
                        visible=on_its_way)  # fmt: skip
        if note:
            say(progress, f"{name}: {note}")

    return report


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a name from nanoeuler data list")],
    copy_from: flags.FromDir = None,
) -> None:
    """Fetch the files of a text, continuing where it was cut off.

    With --from, it copies them from a folder that has them already.

    Example: nanoeuler data fetch tinyshakespeare
    """
    from nanoeuler.data.catalogue import catalogue
    from nanoeuler.data.fetch import fetch
    from nanoeuler.paths import data_folder
    from nanoeuler.progress import bars

    known, folder = catalogue(), data_folder("fetched")
    if name not in known:
        raise UserError(f"no text is named {name!r}: choose one of {', '.join(known)}")
    try:
        with bars() as progress:
            fetch(known[name], folder, copy_from, _bar_of_files(progress))
    except KeyboardInterrupt:
        raise UserError(
            f"interrupted: what has come is kept in {_here(folder / name)}; run the same command "
            "again to continue"
        ) from None
    judges = known[name].format == "tasks"
    then = f"eval RUN --task {name}" if judges else f"data prepare {name}"
    tell(f"fetched into {_here(folder / name)}; next: nanoeuler {then}")


def _named(what):
    """The `Source` that the words `what` name: files, clean text, or one of the catalogue."""
    from nanoeuler.data.catalogue import File, Source, catalogue

    lacks = [word for word in what if not Path(word).is_file()]
    if len(what) == 1 and Path(what[0], "corpus.json").is_file():
        clean = Path(what[0]).resolve()
        return Source(clean.name, clean.name, "", "", "clean", (File(str(clean), ""),))
    if lacks:
        folder = f"{lacks[0]} is a folder: nanoeuler data clean makes clean text of its files"
        problem = folder if Path(lacks[0]).is_dir() else f"there is no file {lacks[0]}"
        source = catalogue().get(what[0]) if len(what) == 1 else None
        if source is None:
            raise UserError(f"expected a name from nanoeuler data list, or files, but {problem}")
        return source
    files = tuple(File(str(Path(word).resolve()), "") for word in what)
    title = ", ".join(Path(word).name for word in what)
    return Source(Path(what[0]).stem, title, "", "", "text", files)


def _bytes(source):
    """The bytes of a source's files, None if they aren't known."""
    own = [Path(file.name) for file in source.files]
    return sum(path.stat().st_size for path in own) if all(map(Path.is_file, own)) else source.bytes


def _write_pairs(source, fetched, out):
    """Write the question-answer pairs of a source to out/pairs.jsonl; return how many."""
    import json

    from nanoeuler.data.documents import pairs
    from nanoeuler.files import replacing

    found = [{"question": asked, "answer": said} for asked, said in pairs(source, fetched)]
    with replacing(out / "pairs.jsonl") as temporary:
        text = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in found)
        temporary.write_text(text, encoding="utf-8")
    return len(found)


def _count_of_documents(progress, name):
    """The `report` of `prepare`: a running count, and a line for each finished pass."""
    from rich.filesize import decimal

    from nanoeuler.progress import say

    task, stages = progress.add_task(f"preparing {name}", total=None), {}

    def report(stage, documents, size):
        if stage not in stages:
            for text in stages.values():
                say(progress, text)
            stages.clear()
        stages[stage] = f"{stage}: {documents:,} documents, {decimal(size)}"
        progress.update(task, description=stages[stage])

    return report


def _write_tokens(source, fetched, out, vocab_size, tokenizer):
    """Prepare the text of a source in the folder `out`; return the number of tokens."""
    from nanoeuler.api import plain
    from nanoeuler.data.corpus import texts_in
    from nanoeuler.data.dataset import Prepared
    from nanoeuler.data.documents import documents
    from nanoeuler.data.prepare import prepare, prepare_text
    from nanoeuler.progress import bars

    path = fetched / source.name / source.files[0].name  # of your own files: just that file
    with bars() as progress:
        report = _count_of_documents(progress, source.name)
        if source.format == "text" and len(source.files) == 1:
            if not path.is_file():
                known = f"run nanoeuler data fetch {source.name}"
                raise UserError(f"expected {path}, but there is no such file: {known}")
            prepare_text(plain(path), out, vocab_size=vocab_size, tokenizer=tokenizer)
        else:
            clean = source.format == "clean"
            prepare(lambda: texts_in(path) if clean else documents(source, fetched), out,
                    vocab_size=vocab_size, source=source.title, tokenizer=tokenizer,
                    report=report)  # fmt: skip
    prepared = Prepared(out)
    return len(prepared.train) + len(prepared.held_out)


@data_app.command("prepare")
def data_prepare(
    what: Annotated[
        list[str],
        typer.Argument(metavar="NAME|FILE...", help="a name from data list, files, or clean text"),
    ],
    vocab_size: flags.VocabSize = None, tokenizer: flags.Tokenizer = None,
    out: flags.OutDir = None,
) -> None:  # fmt: skip
    """Turn a text into tokens for training, or collect its pairs.

    The vocabulary is learned from the text, with --vocab-size ids (4096 unless you choose, or 512
    for a text under a megabyte), or it is that of --tokenizer. By default, --out is
    data/prepared/NAME of the checkout.

    Example: nanoeuler data prepare tinyshakespeare --vocab-size 1024
    """
    from nanoeuler.paths import data_folder

    source, fetched = _named(what), data_folder("fetched")
    out = flags.folder_out(out or data_folder("prepared") / source.name)
    if source.format == "pairs" and (vocab_size is not None or tokenizer):
        raise UserError("pairs have no vocabulary: leave out --vocab-size and --tokenizer")
    if vocab_size is not None and tokenizer:
        raise UserError("expected --vocab-size or --tokenizer, but both are given: leave out one")
    known = tokenizer and flags.load_tokenizer(tokenizer)
    try:
        if source.format == "pairs":
            count, then = f"{_write_pairs(source, fetched, out):,} pairs", "sft"
        else:
            size = flags.learned_size(vocab_size, _bytes(source))
            count = _write_tokens(source, fetched, out, size, known)
            count, then = f"{count:,} tokens", "train"
    except KeyboardInterrupt:
        raise UserError(
            f"interrupted: nothing is left in {_here(out)}, but fetched files are kept; run the "
            "same command again to start over"
        ) from None
    tell(f"prepared {count} in {_here(out)}; next: nanoeuler {then} --data {_here(out)}")


def _cleaned(what, out, options):
    """Clean the files and folders `what` into `out`, with a running count; return the summary."""
    from rich.filesize import decimal

    from nanoeuler.data.corpus import write_corpus
    from nanoeuler.progress import bars

    with bars() as progress:
        task, documents = progress.add_task(f"cleaning into {_here(out)}", total=None), 0

        def report(line, size):
            nonlocal documents
            documents += 1
            said = f"{documents:,} documents, {decimal(size)}; {line['name'][-40:]}"
            progress.update(task, description=said)

        return write_corpus(what, out, report=report, **options)


def _print_cleaned(said):
    """How much was read, kept and dropped, and why."""
    from rich.filesize import decimal

    print(f"read      {said['documents']:,} documents, {decimal(said['bytes'])}")
    print(f"kept      {said['kept']:,} documents, {decimal(said['text'])}")
    print(f"removed   {decimal(said['copies'])} of copies and {decimal(said['near_copies'])} with "
          f"held-out runs of words from those")  # fmt: skip
    for reason, count in sorted(said["dropped"].items(), key=lambda pair: -pair[1]):
        size = decimal(said["dropped_bytes"][reason])
        print(f"dropped   {count:,} documents, {size}: {reason}")


@data_app.command("clean")
def data_clean(
    what: Annotated[list[str], typer.Argument(metavar="FILE|DIR...", help="texts, .gz, .zip, "
                                              ".jsonl, .parquet, and folders of them")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="where to write")],
    without: Annotated[list[str] | None, typer.Option(metavar="FILE|DIR", help="text to remove: "
                                                      "files, or tasks in .jsonl")] = None,
    language: Annotated[str, typer.Option(metavar="NAME", help="keep only en, de, fr, es, it, nl, "
                                          "pt or la; any: keep all")] = "en",
    licence: Annotated[str, typer.Option(metavar="TEXT", help="license of documents that name "
                                         "none")] = "unknown",
) -> None:  # fmt: skip
    """Clean a collection of texts: join lines, remove copies.

    With --without, it also removes text that must stay held out. If it was interrupted, the same
    command continues. manifest-*.jsonl says what became of each document.

    Example: nanoeuler data clean books --out data/clean/books --without tasks
    """
    from nanoeuler.data.words import LANGUAGES

    if language not in (*LANGUAGES, "any"):
        known = ", ".join(LANGUAGES)
        raise UserError(f"expected --language to be one of {known} or any, but got {language}")
    options = {"without": without or [], "licence": licence,
               "language": None if language == "any" else language}  # fmt: skip
    try:
        said = _cleaned(what, flags.folder_out(out), options)
    except KeyboardInterrupt:
        raise UserError(f"interrupted: the shards in {_here(out)} are kept; run the same command "
                        "again to continue") from None  # fmt: skip
    _print_cleaned(said)
    tell(f"clean text in {_here(out)}; next: nanoeuler data prepare {_here(out)}")


def _document(prepared, number):
    """The text of document `number`, counted from 1: training documents, then held-out ones."""
    train, held_out = prepared.train, prepared.held_out
    total, at = train.n_documents + held_out.n_documents, number - 1
    if at >= total:
        raise UserError(f"expected a document from 1 to {total}, got {number}: choose one of these")
    first = at < train.n_documents
    ids = train.document(at) if first else held_out.document(at - train.n_documents)
    return prepared.tokenizer.decode_text(ids)


@data_app.command("show")
def data_show(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", file_okay=False, help="a folder made by data prepare")
    ],
    number: Annotated[
        int | None,
        typer.Argument(parser=flags.whole_number(1), metavar="N", help="which document or pair"),
    ] = None,
) -> None:
    """Show what is in prepared data: counts, or the text of document N.

    Example: nanoeuler data show data/prepared/tinyshakespeare
    """
    from rich.filesize import decimal

    from nanoeuler.data.conversations import read_pairs
    from nanoeuler.data.dataset import Prepared
    from nanoeuler.data.shards import SIDES

    if (folder / "pairs.jsonl").exists():
        pairs = read_pairs(folder / "pairs.jsonl")
        if number and number > len(pairs):
            raise UserError(f"expected a pair from 1 to {len(pairs)}, got {number}: choose one of "
                            "these")  # fmt: skip
        print("\n\n".join(pairs[number - 1]) if number else f"pairs       {len(pairs):,}")
        return
    prepared = Prepared(folder)
    if number:
        print(_document(prepared, number))
        return
    print(f"source      {prepared.record['source']}")
    print(f"vocabulary  {prepared.vocab_size:,} ids")
    for side in SIDES:
        counts = prepared.record[side]
        documents, size, tokens = counts["documents"], counts["bytes"], counts["tokens"]
        print(f"{side:11} {documents:,} documents, {decimal(size)}, {tokens:,} tokens of "
              f"{size / tokens:.2f} bytes")  # fmt: skip
