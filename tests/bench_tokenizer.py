"""Measure the tokenizer against tiktoken and Hugging Face, interleaved, into tokenizer.json.

python tests/bench_tokenizer.py (about three minutes). The text is the books under NANOEULER_DATA
(default ../shared/data beside the project), one thread, medians of the processor's time, which
other programs on the machine disturb less than the clock's. Starting is measured by the clock.
"""

import gzip
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: read when they are imported
os.environ["RAYON_NUM_THREADS"] = "1"

import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from nanoeuler import measurements
from nanoeuler.files import project_root
from nanoeuler.tokenizer import Tokenizer

PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
MEGABYTES = (0.1, 0.3, 1, 3, 10)
REPEATS = 3


def books(size):
    """The first `size` bytes of the books, as text."""
    folder = Path(os.environ.get("NANOEULER_DATA", project_root().parent / "shared" / "data"))
    data = b"".join(gzip.decompress(p.read_bytes()) for p in sorted(folder.glob("gutenberg/*.gz")))
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
    return trained


def medians(*functions):
    """The median processor seconds of each function, run in turn on the same machine."""
    seconds = [[] for _ in functions]
    for _ in range(REPEATS):
        for function, times in zip(functions, seconds, strict=True):
            start = time.process_time()
            function()
            times.append(time.process_time() - start)
    return [statistics.median(times) for times in seconds]


def seconds_to_first_ids(environment):
    """How long a fresh process takes to import, train on a line and encode it."""
    code = "from nanoeuler.tokenizer import Tokenizer; Tokenizer.train('a b', 260).encode('a b')"
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **environment})
    return time.perf_counter() - start


def main():
    """Measure everything and save the rows."""
    rows = []
    with tempfile.TemporaryDirectory() as empty:
        for case in ("first use, compiling", "first use, compiled before"):
            seconds = seconds_to_first_ids({"NUMBA_CACHE_DIR": empty})
            rows.append(measurements.row("start", case, "nanoeuler", seconds, "s"))
    for vocab_size, sizes in ((4096, MEGABYTES), (50257, (10,))):
        ours = Tokenizer.train(books(10**7), vocab_size, ())
        ranks = {token: i for i, token in enumerate(ours.tokens)}
        tik = tiktoken.Encoding("ours", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        hugging = tokenizers.Tokenizer.from_str(ours.json)
        for size in sizes:
            text = books(int(size * 1e6))
            case = f"V={vocab_size}, {size} MB"
            e, t, h = medians(
                lambda text=text, ours=ours: ours.encode(text),
                lambda text=text, tik=tik: tik.encode_ordinary(text),
                lambda text=text, hugging=hugging: hugging.encode(text),
            )
            rows.append(measurements.row("encode", case, "nanoeuler", e, "s", "tiktoken", t))
            rows.append(measurements.row("encode", case, "nanoeuler", e, "s", "tokenizers", h))
            t, h = medians(
                lambda text=text, v=vocab_size: Tokenizer.train(text, v, ()),
                lambda text=text, v=vocab_size: huggingface_trained(text, v),
            )
            rows.append(measurements.row("train", case, "nanoeuler", t, "s", "tokenizers", h))
        case, text = f"V={vocab_size}, 10 MB", books(10**7)
        rate = len(text.encode()) / len(ours.encode(text))
        rows.append(measurements.row("bytes per token", case, "nanoeuler", rate, "bytes"))
        seconds = medians(lambda ours=ours: ours.encode("abcde" * 200_000))[0]
        case = f"one word of 1 MB, V={vocab_size}"
        rows.append(measurements.row("encode", case, "nanoeuler", seconds, "s"))
    measurements.save("tokenizer", rows)
    for row in rows:
        print(*(row[key] for key in ("what", "case", "value", "peer", "peer_value")))


if __name__ == "__main__":
    main()
