"""Data files of every kind, for every command that reads one: no bytes may do more than be refused.

A program reads most of them whole. Of files of pairs and of comparisons hundreds of mutations are
given to the reader alone, in a process of its own, since that is where they could do harm.
"""

import json
import os
import random
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import ROOT, Attack

RIVER = (ROOT / "data" / "river.txt").read_bytes()
LINE = 50_000_000  # bytes: more than anybody's line, and less than what memory is refused for
TINY = (
    "--dim 8 --layers 1 --heads 2 --kv-heads 1 --context 64 --vocab-size 264 --batch-size 2 "
    "--steps 1 --threads 1 --engine cpu"
).split()
STEP = "--batch-size 2 --steps 1 --threads 1 --engine cpu".split()


def texts(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Texts that are none, or odd ones: their names and their bytes."""
    words = RIVER[:2000].decode()
    junk = rng.randbytes(3000)
    yield from {
        "empty": b"", "one byte": b"a", "two bytes": b"ab", "eleven": b"hello world",
        "line feeds": b"\n" * 5000, "carriage returns": b"\r" * 5000, "blanks": b" " * 5000,
        "nul": bytes(5000), "a nul in it": b"the river\0 and " * 200, "ff": b"\xff" * 5000,
        "windows": words.replace(" ", "\r\n").encode(),
        "old mac": words.replace(" ", "\r").encode(),
        "mixed ends": words.replace(" ", "\r\n\n\r").encode(),
        "bom": b"\xef\xbb\xbf" + RIVER[:2000], "boms": b"\xef\xbb\xbf" * 1500,
        "half a bom": b"\xef\xbb" + RIVER[:2000], "html": b"<html>" * 900,
        "utf-16": words.encode("utf-16"), "utf-16 le": words.encode("utf-16-le"),
        "utf-16 be": words.encode("utf-16-be"), "utf-32": words.encode("utf-32"),
        "latin-1": "né le même été, où ".encode("latin1") * 200, "utf-7": b"+AOk-t+AOk- " * 200,
        "cut": (RIVER[:2000].decode() + "é").encode()[:-1], "overlong": b"\xc0\xaf" * 2000,
        "surrogates": "\ud800 ".encode("utf-8", "surrogatepass") * 900,
        "beyond unicode": b"\xf4\x90\x80\x80" * 900,
        "the last character": "\U0010ffff".encode() * 900,
        "accents": ("e" + "\u0301" * 3000).encode(),
        "right to left": "\u202eabc \u2066".encode() * 500,
        "escapes": b"\x1b[2J\x1b]0;mine\x07 " * 300, "digits": b"0123456789" * 2000,
        "markup": b"[bold]x[/bold] [link=a]b[/] " * 200, "two words": b"ab " * 60_000,
        "ends": b"<|endoftext|>" * 400, "special": b"<|user|>a<|assistant|>b<|end|>" * 200,
        "one word": b"a" * 200_000, "script": b"#!/bin/sh\ntouch mine\n" * 90,
        "gzip": b"\x1f\x8b\x08" + junk, "zip": b"PK\x03\x04" + junk, "elf": b"\x7fELF" + junk,
        "pickle": b"\x80\x04c__builtin__\nexit\n." + junk, "pdf": b"%PDF-1.7\n" + junk,
        "png": b"\x89PNG\r\n\x1a\n" + junk, "parquet": b"PAR1" + junk + b"PAR1",
        "safetensors": (8).to_bytes(8, "little") + b"{}      " + junk,
    }.items()  # fmt: skip
    for number in range(20):
        yield f"random {number}", rng.randbytes(rng.choice((3, 40, 999, 4096, 20_000)))
    for number in range(20):
        text = bytearray(RIVER[:3000])
        for _ in range(rng.randint(1, 5)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        yield f"flipped {number}", bytes(text)


def at(folder: Path, name: str, data: bytes) -> Path:
    """A file in the folder, of this name and these bytes."""
    path = folder / f"{name.replace(' ', '-')}.txt"
    path.write_bytes(data)
    return path


def places(folder: Path) -> Iterator[tuple[str, object]]:
    """Paths that are no files, or odd ones."""
    good = at(folder, "good", RIVER[:2000])
    (folder / "directory").mkdir()
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(folder / "socket"))
    for name in ("directory", "pipe", "socket", "good.txt", "nothing", "a-loop"):
        (folder / f"link-to-{name}").symlink_to(folder / name)
    (folder / "a-loop").symlink_to(folder / "link-to-a-loop")
    (folder / "itself").symlink_to("itself")
    for device in ("null", "zero", "urandom", "full", "tty", "stdin"):
        (folder / f"dev-{device}").symlink_to(f"/dev/{device}")
    odd = ["line\nbreak", "escape\x1b[2J", "blank ", "-dash", "--out", "é", "\udcff", "x" * 255]
    for name in odd:
        shutil.copy(good, folder / name)
    yield from ((name, folder / name) for name in sorted(os.listdir(folder)))
    yield from ((f"named {name!r:.20}", name) for name in (
        "/dev/null", "/dev/zero", "/dev/urandom", "/dev/stdin", "/dev/fd/0", "/proc/self/mem",
        "/", ".", "..", "~", "x" * 256, "x/" * 3000, "nothing/at/all", "good.txt/x",
        "http://127.0.0.1/a.txt", "file:///etc/passwd", "docs ", "*", "%s%n", "-", "",
    ))  # fmt: skip


GOOD = {"question": "What is a river?", "answer": "It is water."}
BETTER = {"question": "What is a river?", "chosen": "It is water.", "rejected": "A stone."}
TALK = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "So."}]}
TASK = {"instruction": "Say.", "input": "a", "output": "A."}
VALUES = [
    None, True, 0, -1, 1.5, 1e308, 10**400, float("nan"), float("-inf"), "", " ", "\0", "\ud800",
    "\x1b[2J", "<|end|>", "é" * 500, [], {}, [None], [[]], {"a": {}}, ["user"], "a" * 9000,
]  # fmt: skip


def records(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Files of pairs, comparisons and conversations that are not what they should be."""
    kinds = {"pair": GOOD, "better": BETTER, "talk": TALK, "task": TASK}
    for name, good in kinds.items():
        for field in good:
            for number, value in enumerate(VALUES):
                yield f"{name} {field} {number}", json.dumps({**good, field: value}).encode()
            rest = {other: value for other, value in good.items() if other != field}
            yield f"{name} without {field}", json.dumps(rest).encode()
            twice = json.dumps(good)[:-1] + f', "{field}": 1}}'
            yield f"{name} {field} twice", twice.encode()
        line = json.dumps(good)
        for what, text in {
            "one": line, "no end": line[:-1], "list": f"[{line}]", "list open": f"[{line},",
            "two on a line": line + line, "comma": line + ",", "spaces": f"  {line}  ",
            "windows": f"{line}\r\n" * 30, "bom": "\ufeff" + line, "blank lines": f"\n\n{line}\n\n",
            "deep": '{"a":' * 90_000, "deep list": "[" * 90_000, "number": "1" * 5000, "nan": "NaN",
            "thousand": f"{line}\n" * 1000, "single quotes": str(good), "comment": f"// x\n{line}",
        }.items():  # fmt: skip
            yield f"{name} {what}", text.encode()
        for encoding in ("utf-16", "utf-32", "utf-16-le"):
            yield f"{name} {encoding}", (line + "\n").encode(encoding) * 9
    for number, value in enumerate(VALUES):
        for place in ("role", "content"):
            talk = json.loads(json.dumps(TALK))
            talk["messages"][number % 2][place] = value
            yield f"talk {place} {number}", json.dumps(talk).encode()
    good = b"".join(json.dumps(each).encode() + b"\n" for each in (*kinds.values(),) * 2)
    for number in range(200):
        text = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at, size = rng.randrange(len(text)), rng.choice((0, 1, 1, 5))
            text[at : at + size] = rng.randbytes(rng.choice((0, 1, 1, 3)))
        yield f"mutated {number}", bytes(text)


def readers() -> list[tuple[str, Callable[[Path], object]]]:
    """What reads such files, without the work that comes after."""
    from nanoeuler.data.conversations import read_pairs
    from nanoeuler.training.preferences import read_preferences

    return [("pairs", read_pairs), ("comparisons", read_preferences)]


def attack(attack: Attack, seed: int) -> None:
    """Every file for every command that might read it."""
    rng, folder = random.Random(seed), attack.folder
    attack.command("good files", "train", "--data", at(folder, "base", RIVER[:4000]), "--out",
                   "base", *TINY)  # fmt: skip
    pairs, better = folder / "pairs.jsonl", folder / "better.jsonl"
    for path, good in (pairs, GOOD), (better, BETTER):
        path.write_text(f"{json.dumps(good)}\n" * 24)
    attack.command("good files", "sft", "--from", "base", "--data", pairs, "--out", "s", *STEP)
    attack.command("good files", "prefer", "--from", "s", "--data", better, "--out", "p", *STEP)
    tell_texts(attack, rng)
    tell_places(attack)
    for name, data in records(rng):
        path = at(folder, "record", data)
        for who, read in readers():
            attack.act(f"{who} in JSON", name, lambda path=path, read=read: len(read(path)))
    for _, data in list(records(rng))[::90]:
        path = at(folder, "record", data)
        attack.command("sft --data", "sft", "--from", "base", "--data", path, "--out", "x", *STEP)
        attack.command("prefer --data", "prefer", "--from", "base", "--data", path, "--out", "x",
                       *STEP)  # fmt: skip
        shutil.rmtree(folder / "x", ignore_errors=True)
    long_line(attack)
    attack.count("left behind", "mine", (folder / "mine").exists() and "a script was run" or None)


def tell_texts(attack: Attack, rng: random.Random) -> None:
    """Each text to be trained on, judged, prepared, and learned from."""
    for number, (name, data) in enumerate(texts(rng)):
        path = at(attack.folder, name, data)
        attack.command("eval --data", "eval", "base", "--data", path)
        attack.command("tokenizer train", "tokenizer", "train", path, "--vocab-size", 262)
        attack.command("tokenizer encode", "tokenizer", "encode", "--tokenizer", path, "river")
        attack.command("data prepare", "data", "prepare", path, "--out", "x", "--vocab-size", 262)
        shutil.rmtree(attack.folder / "x", ignore_errors=True)
        if number < 20 or number % 4 == 0:
            done = attack.command("train --data", "train", "--data", path, "--out", "x", *TINY)
            left = done.code == 2 and (attack.folder / "x").exists()
            attack.count("left behind", name, "refused, and x is there" if left else None)
        shutil.rmtree(attack.folder / "x", ignore_errors=True)


def tell_places(attack: Attack) -> None:
    """Each odd path to each command; what it leads to stays what it was."""
    (folder := attack.folder / "places").mkdir()
    for name, path in list(places(folder)):
        before = _kind(path)
        for kind, *command in (
            ("train --data", "train", "--out", "x", *TINY, "--data", path),
            ("train --tokenizer", "train", "--data", "base.txt", "--out", "x", *TINY[:-8],
             "--steps", 1, "--tokenizer", path),
            ("sft --data", "sft", "--from", "base", "--out", "x", *STEP, "--data", path),
            ("prefer --data", "prefer", "--from", "base", "--out", "x", *STEP, "--data", path),
            ("eval --data", "eval", "base", "--data", path),
            ("eval of a run", "eval", path),
            ("data prepare", "data", "prepare", "--out", "x", "--vocab-size", 262, "--", path),
            ("tokenizer train", "tokenizer", "train", "--vocab-size", 262, "--", path),
        ):  # fmt: skip
            attack.command(kind, *command)
            shutil.rmtree(attack.folder / "x", ignore_errors=True)
        attack.count("paths", name, None if _kind(path) == before else "it was changed")
    if os.geteuid():
        closed = at(attack.folder, "closed", RIVER)
        closed.chmod(0)
        attack.command("train --data", "train", "--data", closed, "--out", "x", *TINY)
    else:
        print("  left out: files without permission, since root may read them all")


def _kind(path: object) -> object:
    """What is at a path, so that a change would be seen; None if nothing is."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return None
    return found.st_mode, found.st_size if stat.S_ISREG(found.st_mode) else 0


def long_line(attack: Attack) -> None:
    """A line of LINE bytes, for those who read lines."""
    path = attack.folder / "long.txt"
    with open(path, "wb") as file:
        for _ in range(LINE // 1000):
            file.write(b"river of " * 111 + b"x")
    for kind, *command in (
        ("sft --data", "sft", "--from", "base", "--data", path, "--out", "x"),
        ("prefer --data", "prefer", "--from", "base", "--data", path, "--out", "x"),
        ("tokenizer train", "tokenizer", "train", path, "--vocab-size", 262),
    ):
        attack.command(kind, *command)
    path.unlink()
