# Made from book/20a-a-corpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-corpus-pipeline
"""A collection as clean text: copies and near-copies of held-out text removed, in shards.

Leaves out tokens (`prepare`). A folder of clean text has text-N.txt, manifest-N.jsonl with a line
for each document that was read, and corpus.json, written last.
"""

import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nanoeuler import __version__
from nanoeuler.data.cleaning import (
    COPY,
    HELD_OUT,
    KEPT,
    Cleaned,
    Rules,
    clean,
    fates_of,
    left_of,
    verdict,
)
from nanoeuler.data.collection import Document, RefusedError, documents_in, files_in
from nanoeuler.data.prepare import in_order
from nanoeuler.data.words import FOLD, RUN, add_all, held_out_of, runs_of, words_of
from nanoeuler.errors import UserError, quoted
from nanoeuler.files import replacing, sha256_of
from nanoeuler.measurements import cores

SHARD_TEXT, SHARD_READ = 1 << 26, 1 << 28  # bytes that fill a shard: of text, or read
MOST_SLOTS = 1 << 27  # of the table of known paragraphs: 1 GiB
GUTENBERG = "Project Gutenberg License; public domain in the USA"
FORMAT = 2  # raised when the same files would give other text


class Known:
    """The hashes of paragraphs that have come up."""

    def __init__(self, most: int = MOST_SLOTS) -> None:
        self.table, self.used, self._most = np.zeros(1 << 12, np.int64), 0, most

    def add(self, keys: np.ndarray) -> bool:
        """Learn the hashes `keys`, int64 (n,), if there is room for all; return whether."""
        new = len(np.unique(keys))
        while 2 * (self.used + new) > len(self.table) and len(self.table) < self._most:
            larger = np.zeros(2 * len(self.table), np.int64)
            add_all(larger, self.table[self.table != 0])
            self.table = larger
        if 4 * (self.used + new) > 3 * len(self.table):
            return False
        self.used += add_all(self.table, keys)
        return True


def _paths(out, number):
    """The text, the hashes and the manifest of a shard."""
    return (out / f"text-{number:05}.txt", out / f"hashes-{number:05}.bin",
            out / f"manifest-{number:05}.jsonl")  # fmt: skip


class _Shard:
    """The documents since the last shard was written."""

    def __init__(self, out, number):
        self.out, self.number = out, number
        self.texts, self.lines, self.hashes, self.size, self.read = [], [], [], 0, 0

    def add(self, line: dict[str, Any], text: np.ndarray, hashes: np.ndarray) -> None:
        """A document: its line in the manifest, its text, its new hashes."""
        if len(text):
            line |= {"text": len(text), "at": self.size}
            self.texts.append(text)
            self.hashes.append(hashes)
        self.lines.append(json.dumps(line) + "\n")
        self.size, self.read = self.size + len(text), self.read + line["bytes"]

    def is_full(self) -> bool:
        return self.size >= SHARD_TEXT or self.read >= SHARD_READ

    def write(self) -> None:
        """Write the three files, the manifest last."""
        text, hashes, manifest = _paths(self.out, self.number)
        with replacing(text) as temporary, open(temporary, "wb") as file:
            file.writelines(map(memoryview, self.texts))
        with replacing(hashes) as temporary:
            np.concatenate([np.zeros(0, np.int64), *self.hashes]).astype("<i8").tofile(temporary)
        with replacing(manifest) as temporary:
            temporary.write_text("".join(self.lines), encoding="utf-8")


def _work(document: Document, rules: Rules) -> tuple[dict[str, Any], Cleaned]:
    """A thread's work for a document: (its line in the manifest, the document cleaned)."""
    line: dict[str, Any] = {"name": document.name, "bytes": 0}
    try:
        raw, about = document.load()
    except RefusedError as error:
        return line | {"dropped": str(error)}, clean(b"", rules)
    line |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest(), **about}
    cleaned = clean(raw, rules)
    if cleaned.language:
        line["language"] = cleaned.language
    if cleaned.reason:
        line["dropped"] = cleaned.reason
    return line, cleaned


def _judged(line, cleaned, known, licence):
    """Compare a document with earlier ones: (its text, its new hashes); `line` gets the rest."""
    nothing = np.zeros(0, np.uint8), np.zeros(0, np.int64)
    line.setdefault("licence", line.pop("license", GUTENBERG if cleaned.gutenberg else licence))
    if "dropped" in line:
        return nothing
    fates = fates_of(cleaned.hashes, cleaned.words, cleaned.runs, known.table)
    sizes = np.diff(cleaned.starts)
    for fate, name in ((COPY, "copies"), (HELD_OUT, "held_out")):
        if size := int(sizes[fates == fate].sum()):
            line[name] = size
    if runs := int(cleaned.runs.sum()):
        line["runs"] = runs
    if reason := verdict(sizes, fates):
        line["dropped"] = reason
        return nothing
    hashes = cleaned.hashes[(fates == KEPT) & (cleaned.words >= RUN)]
    if not known.add(hashes):
        line["unlearned"], hashes = len(hashes), hashes[:0]
    return left_of(cleaned.text, cleaned.starts, fates), hashes


# %% sec-corpus-held-out
def _strings(value):
    """All strings in what JSON holds."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | dict):
            waiting += value.values() if isinstance(value, dict) else value


def _items(path):
    """The texts (bytes) of each line of a file of JSON lines; UserError if it isn't one."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            for line in filter(bytes.strip, file):
                yield [text.encode("utf-8", "replace") for text in _strings(json.loads(line))]
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise UserError(f"expected lines of JSON in {path}, but {quoted(error)}: what is held out "
                        "must be readable as a whole") from None  # fmt: skip


def _item_runs(texts):
    """The runs of an item, each of its texts a paragraph."""
    ends = np.cumsum([0, *map(len, texts)])
    return runs_of(*words_of(np.frombuffer(b"".join(texts), np.uint8), ends, FOLD))[0]


def _text_runs(document):
    """The runs of a held-out text, cleaned as all are; UserError if it cannot be read."""
    line, cleaned = _work(document, Rules(None))
    if line.get("dropped") and not len(cleaned.text):
        raise UserError(f"expected a held-out text in {document.name}, but it is refused "
                        f"({line['dropped']}): convert it, or leave it out")  # fmt: skip
    return runs_of(*words_of(cleaned.text, cleaned.starts, FOLD))[0]


def held_out_in(paths: Iterable[str | Path], threads: int = 1) -> tuple[tuple, dict[str, int]]:
    """(for `Rules`, counts) of files and folders of held-out texts and items.

    UserError for one that cannot be read, since nobody would know then what was held out.
    """
    runs, counts, texts = [], Counter(items=0, short_items=0, texts=0), []
    for name, path in files_in(paths):
        if ".jsonl" not in path.suffixes[-2:]:
            texts.append((name, path))
            continue
        found = [_item_runs(texts) for texts in _items(path) if texts]
        counts.update(items=len(found), short_items=sum(not len(keys) for keys in found))
        runs += found
    found = list(in_order(_text_runs, documents_in(texts), threads))
    table = held_out_of(runs + found)
    return table, {**counts, "texts": len(found), "runs": int(np.count_nonzero(table[0]))}


# %% sec-corpus-resume
_BEGUN = "begun.json"


def _key(files, rules, licence):
    """A digest of what the text depends on; a file counts by its name and size."""
    said = [FORMAT, rules.language, licence, [(name, path.stat().st_size if path.is_file() else -1)
                                              for name, path in files]]  # fmt: skip
    digest = hashlib.sha256(json.dumps(said).encode())
    digest.update(rules.held_out[0].data)
    return digest.hexdigest()


def _begin(out, key):
    """The number of shards in `out` that are written; UserError if it holds anything else."""
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    begun = json.loads((out / _BEGUN).read_text()) if _BEGUN in names else None
    for path in out.glob(".*.part") if begun == key else ():  # of a program that was killed
        path.unlink()
    if begun != key and (names or begun):
        raise UserError(f"expected {out} to be empty, or begun with the same files and options, "
                        f"but it holds {names[0]}: choose another folder")  # fmt: skip
    with replacing(out / _BEGUN) as temporary:
        temporary.write_text(json.dumps(key))
    done = 0
    while _paths(out, done)[2].exists():
        done += 1
    return done


def lines_in(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(shard, line) of each document that the manifests of a folder have, in order."""
    for number, path in enumerate(sorted(Path(folder).glob("manifest-*.jsonl"))):
        with open(path, encoding="utf-8") as file:
            for line in file:
                yield number, json.loads(line)


def _summary(out):
    """What corpus.json says of the documents and their bytes, from the manifests."""
    total, dropped, lost, licences = Counter(), Counter(), Counter(), Counter()
    for _, line in lines_in(out):
        kept = line.get("text", 0)
        total.update(documents=1, kept=kept > 0, bytes=line["bytes"], text=kept,
                     copies=line.get("copies", 0) * (kept > 0), runs=line.get("runs", 0),
                     near_copies=line.get("held_out", 0) * (kept > 0),
                     unlearned=line.get("unlearned", 0))  # fmt: skip
        if kept:
            licences[line["licence"]] += kept
        else:
            reason = line["dropped"].split(":")[0].split(" at byte")[0]
            dropped[reason] += 1
            lost[reason] += line["bytes"]
    return {**total, "dropped": dict(dropped), "dropped_bytes": dict(lost),
            "licences": dict(licences)}  # fmt: skip


def _write_all(shard, done, judged, report):
    """Judge what is `done` in order and write shards, one behind; return how many there are."""
    read = 0
    with ThreadPoolExecutor(1) as writer:
        written = None
        for line, cleaned in done:
            shard.add(line, *judged(line, cleaned))
            read += line["bytes"]
            report(line, read)
            if shard.is_full():
                if written:
                    written.result()  # a shard counts only if those before it do
                written = writer.submit(shard.write)
                shard = _Shard(shard.out, shard.number + 1)
        if written:
            written.result()
    if shard.lines:
        shard.write()
    return shard.number + bool(shard.lines)


def write_corpus(paths: Iterable[str | Path], out: str | Path, *,
                 without: Iterable[str | Path] = (), language: str | None = "en",
                 licence: str = "unknown", threads: int | None = None,
                 report: Callable | None = None) -> dict[str, Any]:  # fmt: skip
    """Clean the files and folders `paths` into the folder `out`; return what corpus.json says.

    without: files and folders that are held out. language: None keeps all. licence: of documents
    that state none. report(line, bytes read) is called after each. If `out` has an unfinished
    corpus of the same, it is continued. UserError: nothing to read, or a folder with other things.
    """
    out, files = Path(out), files_in(paths)
    threads, held_out, counts = threads or cores(), Rules().held_out, {}
    if without := list(without):
        held_out, counts = held_out_in(without, threads)
    rules, known = Rules(language, held_out), Known()
    key = _key(files, rules, licence)
    if (out / "corpus.json").exists() and read_corpus(out)["key"] == key:
        return read_corpus(out)
    number, documents = _begin(out, key), documents_in(files)
    for done in range(number):
        known.add(np.fromfile(_paths(out, done)[1], "<i8"))
    documents = islice(documents, sum(1 for _ in lines_in(out)), None)
    shard, report = _Shard(out, number), report or (lambda line, read: None)
    with closing(in_order(lambda document: _work(document, rules), documents, threads)) as done:
        shards = _write_all(shard, done, lambda *found: _judged(*found, known, licence), report)
    texts = [_paths(out, i)[0] for i in range(shards)]
    said = {"nanoeuler": __version__, "key": key, "language": language, "held_out": counts,
            **_summary(out),
            "shards": [[path.stat().st_size, sha256_of(path)] for path in texts]}  # fmt: skip
    with replacing(out / "corpus.json") as temporary:
        temporary.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    for path in (out / _BEGUN, *out.glob("hashes-*.bin")):
        path.unlink()
    return said


def read_corpus(folder: str | Path) -> dict[str, Any]:
    """What corpus.json in `folder` says; UserError if it isn't there or isn't whole."""
    path = Path(folder) / "corpus.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        sizes = [size for size, _ in said["shards"]]
        whole = [os.path.getsize(_paths(Path(folder), i)[0]) for i in range(len(sizes))] == sizes
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"expected a folder of clean text, but {path}: {quoted(error)}: "
                        "run nanoeuler data clean first") from None  # fmt: skip
    if not whole:
        raise UserError(f"expected the texts in {folder} to be as long as corpus.json says: clean "
                        "the collection again, into another folder")  # fmt: skip
    return said


def texts_in(folder: str | Path) -> Iterator[bytes]:
    """Yield the clean documents of a folder, bytes each, in order."""
    read_corpus(folder)
    with ExitStack() as stack:
        last, file = -1, None
        for number, line in lines_in(Path(folder)):
            if number != last:
                text = _paths(Path(folder), number)[0]
                last, file = number, stack.enter_context(open(text, "rb"))
            if size := line.get("text", 0):
                file.seek(line["at"])
                yield file.read(size)
