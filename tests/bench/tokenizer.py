"""Measure the tokenizer against tiktoken, Hugging Face and rustbpe into tokenizer.json.

nanoeuler bench tokenizer (about six minutes; needs the extras test and bench). The text is the
books under NANOEULER_DATA (default ../shared/data beside the project). One thread each, medians by
the clock of runs in turn: ours, theirs, ours, theirs.
"""

import gzip
import heapq
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: read when they are imported
os.environ["RAYON_NUM_THREADS"] = "1"

import numpy as np
import rustbpe
import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from nanoeuler import measurements
from nanoeuler.files import project_root
from nanoeuler.tokenizer.learn import learn_merges
from nanoeuler.tokenizer.pretokenizer import split
from nanoeuler.tokenizer.tokenizer import Tokenizer

PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
MEGABYTES = (0.1, 0.3, 1, 3, 10)
REPEATS = 5


def books(size):
    """The first `size` bytes of the books, as text."""
    folder = Path(os.environ.get("NANOEULER_DATA", project_root().parent / "shared" / "data"))
    data = b"".join(gzip.decompress(p.read_bytes()) for p in sorted(folder.glob("gutenberg/*.gz")))
    if len(data) < size:
        raise SystemExit(f"expected {size} bytes of books in {folder}/gutenberg (NANOEULER_DATA)")
    return data[:size].decode("utf-8", errors="ignore")


def huggingface_trained(text, vocab_size):
    """Hugging Face's tokenizer, trained with the settings that are ours."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        [text],
        trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, initial_alphabet=alphabet),
    )


def rustbpe_trained(text, vocab_size):
    """rustbpe's, with GPT-2's pattern; it numbers bytes by value and so breaks ties otherwise."""
    rustbpe.Tokenizer().train_from_iterator([text], vocab_size, pattern=PATTERN)


def medians(*functions):
    """The median seconds of each function, run in turn."""
    seconds = [[] for _ in functions]
    for _ in range(REPEATS):
        for function, times in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def ladder():
    """Rows: the versions of chapter 2, taken from its cells, learning 256 merges of 0.1 MB."""
    chapter = (project_root() / "book" / "02-tokens.md").read_text(encoding="utf-8")
    names = {"Counter": Counter, "defaultdict": defaultdict, "heapq": heapq}
    names["pairwise"] = itertools.pairwise
    for start in re.finditer(r"^def (merged|train_\w+)\(.*?(?=^\S)", chapter, re.M | re.S):
        exec(start[0], names)
    data = books(10**5).encode()
    words = Counter(split(data))
    steps = {
        "by the text": lambda: names["train_slow"]([list(data)], 256),
        "by words": lambda: names["train_counted"](words, 256),
        "by places": lambda: names["train_incremental"](words, 256),
        "in numba": lambda: learn_merges([data], 256),
    }
    return [
        measurements.row("ladder", name, "nanoeuler", medians(step)[0], "s")
        for name, step in steps.items()
    ]


FIRST = """
import sys, time
start = time.perf_counter()
from nanoeuler.tokenizer.tokenizer import Tokenizer
imported = time.perf_counter()
Tokenizer.load(sys.argv[1]).encode("The river goes down.")
print(imported - start, time.perf_counter() - imported)
"""


def first_use(saved, cache):
    """Rows: a fresh process imports, loads and encodes, compiling and then compiled before."""
    rows = []
    for state, repeats in (("compiling", 1), ("compiled before", REPEATS)):
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            command = [sys.executable, "-c", FIRST, saved]
            out = subprocess.check_output(command, env={**os.environ, "NUMBA_CACHE_DIR": cache})
            seconds.append((*map(float, out.split()), time.perf_counter() - start))
        middle = np.median(seconds, axis=0).tolist()
        for what, value in zip(("import", "first call", "process"), middle, strict=True):
            rows.append(measurements.row("start", f"{what}, {state}", "nanoeuler", value, "s"))
    return rows


STREAM = """
import sys, time
from nanoeuler.tokenizer.pretokenizer import whole_words
from nanoeuler.tokenizer.tokenizer import Tokenizer
tokenizer, data = Tokenizer.load(sys.argv[1]), sys.stdin.buffer.read()
chunks = lambda: (data[at : at + 2**20] for _ in range(100) for at in range(0, len(data), 2**20))
tokenizer.encode("compiled")
Tokenizer.train(data[:10**5], 300)
for name, work in (
    ("encode", lambda: sum(ids.size for ids in tokenizer.encode_stream(chunks()))),
    ("train", lambda: Tokenizer.train(whole_words(chunks()), 4096)),
):
    start = time.perf_counter()
    work()
    print(name, time.perf_counter() - start)
    # not ru_maxrss, in which a process has the peak of the one that started it
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(name + ", peak memory", int(status["VmHWM"].split()[0]) / 1024)
"""


def stream(saved, data):
    """Rows: the seconds for 1 GB, the books 100 times, and the peak memory of the process."""
    command = [sys.executable, "-c", STREAM, saved]
    out = subprocess.run(command, input=data, capture_output=True, check=True).stdout
    rows = []
    for line, unit in zip(out.decode().splitlines(), ("s", "MiB", "s", "MiB"), strict=True):
        what, value = line.rsplit(" ", 1)
        rows.append(measurements.row(what, "1 GB stream", "nanoeuler", float(value), unit))
    return rows


def main():
    """Measure everything and save the rows."""
    rows = ladder()
    for vocab_size, sizes in ((4096, MEGABYTES), (50257, (10,))):
        ours = Tokenizer.train(books(10**7), vocab_size, ())
        ranks = {token: i for i, token in enumerate(ours.tokens)}
        tik = tiktoken.Encoding("ours", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        hugging = tokenizers.Tokenizer.from_str(ours.json)
        for size in sizes:
            text = books(int(size * 1e6))
            case = f"V={vocab_size}, {size} MB"
            encode = medians(
                lambda text=text, ours=ours: ours.encode(text),
                lambda text=text, tik=tik: tik.encode_ordinary(text),
                lambda text=text, hugging=hugging: hugging.encode(text),
            )
            train = medians(
                lambda text=text, v=vocab_size: Tokenizer.train(text, v, ()),
                lambda text=text, v=vocab_size: rustbpe_trained(text, v),
                lambda text=text, v=vocab_size: huggingface_trained(text, v),
            )
            for what, (mine, *others), peers in (
                ("encode", encode, ("tiktoken", "tokenizers")),
                ("train", train, ("rustbpe", "tokenizers")),
            ):
                for peer, theirs in zip(peers, others, strict=True):
                    row = measurements.row(what, case, "nanoeuler", mine, "s", peer, theirs)
                    rows.append(row)
        case, text = f"V={vocab_size}, 10 MB", books(10**7)
        rate = len(text.encode()) / len(ours.encode(text))
        rows.append(measurements.row("bytes per token", case, "nanoeuler", rate, "bytes"))
        for megabytes in (1, 10):
            seconds = medians(lambda n=megabytes, ours=ours: ours.encode("abcde" * (n * 200_000)))
            case = f"V={vocab_size}, one word of {megabytes} MB"
            rows.append(measurements.row("encode", case, "nanoeuler", seconds[0], "s"))
        texts = [text[at : at + 10**5] for at in range(0, len(text), 10**5)]
        one, two = medians(
            lambda texts=texts, ours=ours: ours.encode_batch(texts, 1),
            lambda texts=texts, ours=ours: ours.encode_batch(texts, 2),
        )
        case = f"V={vocab_size}, 100 texts of 0.1 MB, 2 threads"
        rows.append(measurements.row("encode", case, "nanoeuler", two, "s", "1 thread", one))
    with tempfile.TemporaryDirectory() as folder:
        saved = str(Path(folder) / "tokenizer.json")
        Tokenizer.train(books(10**7), 4096, ()).save(saved)
        rows += first_use(saved, str(Path(folder) / "cache")) + stream(saved, books(10**7).encode())
    measurements.save("tokenizer", rows)
    for row in rows:
        print(*(row[key] for key in ("what", "case", "value", "unit", "peer", "peer_value")))


if __name__ == "__main__":
    main()
