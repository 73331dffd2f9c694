"""A cleaned collection in pieces that a call can carry, and from pieces to a prepared folder.

The books with the lowest SHA-256 are held out, as `nanoeuler data prepare` does with the whole
collection, and lie in a block of their own. The others are cut into blocks of some 10 MB of whole
books as the collection has them, and blocks stand in the order of their SHA-256, which is as good
as a draw, so that any number of them from the first on is a fair sample. Each is a file of its own,
so that all cores can unpack at once. bzip2, since it takes 0.9 s for a block of which it leaves
26.2 %, where xz takes 13 s and leaves 26.5 %.

pack writes FOLDER/block-000.bz2 ..., FOLDER/held-out.bz2, FOLDER/tokenizer.json and, last of all,
FOLDER/manifest.json, with the sizes of books and the SHA-256 of each file.
"""

import bz2
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from nanoeuler import __version__
from nanoeuler.data.corpus import texts_in
from nanoeuler.data.prepare import hold_out
from nanoeuler.data.shards import END_OF_TEXT, SIDES, ShardWriter, token_dtype
from nanoeuler.errors import UserError
from nanoeuler.files import replacing, sha256_of
from nanoeuler.measurements import cores
from nanoeuler.tokenizer.tokenizer import Tokenizer

BLOCK = 10_000_000  # bytes of text, at least
MIB = 1 << 20
HELD_OUT = "held-out"


# ---- Here: blocks


def in_blocks(sizes: Iterable[int], least: int) -> list[range]:
    """The numbers of things of these sizes, in ranges of at least so many bytes; the last: any."""
    made, begin, total, end = [], 0, 0, 0
    for end, size in enumerate(sizes, start=1):  # noqa: B007
        total += size
        if total >= least:
            made.append(range(begin, end))
            begin, total = end, 0
    return [*made, range(begin, end)] if begin < end else made


def split(texts: Iterable[bytes], least: int) -> tuple[list[list[bytes]], list[bytes]]:
    """Blocks of books, and the books that are held out; a book that comes twice stands once."""
    books = [text for text in texts if text]
    digests = [sha256(text).digest() for text in books]
    hashes = np.array([int.from_bytes(each[:8], "big") for each in digests], np.uint64)
    keep, held_out = hold_out(hashes, np.array([len(text) for text in books], np.int64))
    train = [text for text, mine in zip(books, keep & ~held_out, strict=True) if mine]
    blocks = [train[i.start : i.stop] for i in in_blocks(map(len, train), least)]
    blocks.sort(key=lambda block: sha256(b"".join(block)).digest())
    return blocks, [text for text, mine in zip(books, held_out, strict=True) if mine]


def packed(folder: Path, name: str, texts: list[bytes]) -> dict:
    """Write a block, unless it is there already; what the manifest says of it."""
    path, whole = folder / f"{name}.bz2", b"".join(texts)
    note = folder / f".{name}.json"  # the digest of the text that the file was made of
    entry = {"name": path.name, "books": [len(text) for text in texts],
             "text": sha256(whole).hexdigest()}  # fmt: skip
    if path.exists() and note.exists() and note.read_text() == entry["text"]:
        return entry | {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    with replacing(path) as temporary:
        temporary.write_bytes(bz2.compress(whole))
    note.write_text(entry["text"])
    return entry | {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def pack(clean: Path, folder: Path, vocab_size: int, least: int = BLOCK,
         report=lambda entry: None, most: int | None = None) -> dict:  # fmt: skip
    """Write the blocks of a cleaned collection, and the tokenizer that all its books teach.

    most: of blocks, the first so many; None: all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    blocks, held_out = split(texts_in(clean), least)
    tokenizer = Tokenizer.train((text for block in blocks for text in block), vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    manifest = {"tokenizer": tokenizer.hash, HELD_OUT: packed(folder, HELD_OUT, held_out),
                "blocks": []}  # fmt: skip
    for i, block in enumerate(blocks[:most]):
        manifest["blocks"].append(packed(folder, f"block-{i:03}", block))
        report(manifest["blocks"][-1])
    with replacing(folder / "manifest.json") as temporary:
        temporary.write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def loads(manifest: dict, limits: list[int]) -> list[list[str]]:
    """The names of blocks, call by call: as many as fit into each limit of bytes; the last's again.

    The first call has the tokenizer, the manifest and what is held out besides, within its limit.
    """
    small = manifest[HELD_OUT]["bytes"] + MIB
    calls, left = [[HELD_OUT + ".bz2", "tokenizer.json", "manifest.json"]], limits[0] - small
    for entry in manifest["blocks"]:
        if entry["bytes"] > left:
            left = limits[min(len(calls), len(limits) - 1)]
            calls.append([])
        if entry["bytes"] > left:
            raise UserError(f"{entry['name']} has {entry['bytes']:,} bytes, and a call carries "
                            f"{left:,}: pack smaller blocks, or give a larger limit")  # fmt: skip
        calls[-1].append(entry["name"])
        left -= entry["bytes"]
    return calls


# ---- There: tokens


def tokens_of(entry: dict, path: Path, store: Path, tokenizer: Tokenizer) -> Path:
    """Unpack a block, and leave the ids of its books, each with its end, in a file of the store."""
    to = store / f"{path.stem}.npz"
    if to.exists():
        return to
    if sha256_of(path) != entry["sha256"]:
        raise UserError(f"{path} is not what the manifest has: carry it again")
    whole, at, books = bz2.decompress(path.read_bytes()), 0, []
    for size in entry["books"]:
        ids = tokenizer.encode(whole[at : at + size])
        books.append(np.append(ids, tokenizer.special[END_OF_TEXT]))
        at += size
    made = np.concatenate(books).astype(token_dtype(tokenizer.vocab_size))
    with replacing(to) as temporary, open(temporary, "wb") as file:
        np.savez(file, ids=made, ends=np.cumsum([len(ids) for ids in books]))
    return to


def unpack(pieces: Path, store: Path, most: int | None = None) -> int:
    """Tokens of all blocks under `pieces` that the store has not; how many bytes of text were new.

    most: of blocks, the first so many; None: all.
    manifest.json and tokenizer.json come with the first pieces, and are kept in the store.
    """
    store.mkdir(parents=True, exist_ok=True)
    for name in "manifest.json", "tokenizer.json":
        for path in sorted(pieces.rglob(name)):
            (store / name).write_bytes(path.read_bytes())
    manifest = json.loads((store / "manifest.json").read_text())
    tokenizer = Tokenizer.load(store / "tokenizer.json")
    if tokenizer.hash != manifest["tokenizer"]:
        raise UserError("the tokenizer is not the manifest's: carry both again")
    entries = {each["name"]: each for each in (manifest[HELD_OUT], *manifest["blocks"][:most])}
    paths = {path.name: path for path in sorted(pieces.rglob("*.bz2")) if path.name in entries}
    new = [path for path in paths.values() if not (store / f"{path.stem}.npz").exists()]
    new.sort(key=lambda path: -path.stat().st_size)  # the longest first
    do = partial(_one, entries, store, tokenizer)
    with ThreadPoolExecutor(min(cores(), len(new) or 1)) as pool:  # bzip2 and numba hold no lock
        list(pool.map(do, new))
    return sum(sum(entries[path.name]["books"]) for path in new)


def _one(entries, store, tokenizer, path):
    return tokens_of(entries[path.name], path, store, tokenizer)


def prepare(store: Path, out: Path, source: str = "pieces of a cleaned collection") -> dict:
    """A prepared folder of all blocks in the store, as `Prepared` opens it; its record."""
    manifest = json.loads((store / "manifest.json").read_text())
    tokenizer = Tokenizer.load(store / "tokenizer.json")
    there = [e for e in manifest["blocks"] if (store / e["name"]).with_suffix(".npz").exists()]
    if not there:
        raise UserError(f"{store} has no blocks to train on: carry pieces, and unpack them")
    out.mkdir(parents=True, exist_ok=True)
    (out / "prepared.json").unlink(missing_ok=True)  # without it nothing opens
    tokenizer.save(out / "tokenizer.json")
    digest, sides = sha256(), {}
    for side, entries in zip(SIDES, (there, [manifest[HELD_OUT]]), strict=True):
        writer = ShardWriter(out, side, tokenizer)
        for entry in entries:
            digest.update(entry["text"].encode())
            _add(writer, entry, store)
        sides[side] = writer.close()
    record = {"nanoeuler": __version__, "source": source, "digest": digest.hexdigest()[:16],
              "repeated": 0, "tokenizer": tokenizer.hash, **sides}  # fmt: skip
    with replacing(out / "prepared.json") as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def _add(writer, entry, store):
    """A block's books into a side."""
    with np.load((store / entry["name"]).with_suffix(".npz")) as file:
        ids, ends = file["ids"], file["ends"]
    for size, part in zip(entry["books"], np.split(ids, ends[:-1]), strict=True):
        writer.document(size, [part])
