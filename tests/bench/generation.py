"""Time decoding on this machine, beside PyTorch and llama2.c: `python tests/bench/generation.py`.

Every contestant of a race is a process of its own; they take turns, a text each, and the median
counts. LLAMA2C in the environment names a checkout of llama2.c, whose run.c is built with the C
compiler of this machine in a folder that is thrown away; without it that peer is left out, as
PyTorch is where it is not installed. RUN names the folder of a run of `small` (runs/base): int8 and
guesses are judged by it on the held-out side of its text, and left out where there is none.
"""

import importlib.util
import json
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from nanoeuler import measurements
from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.inference.decoder import Decoder, generate_together
from nanoeuler.model.config import PRESETS, ModelConfig
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import Weights, initialise

ROUNDS = 7
SHAPES = {
    "small": PRESETS["small"],
    "llama 15M": ModelConfig(  # Karpathy's stories15M.bin: tied, RMSNorm, RoPE, SwiGLU
        vocab_size=32000, dim=288, n_layers=6, n_heads=6, n_kv_heads=6, hidden=768, context=256,
        n_predict=1, tied=True,
    ),
}  # fmt: skip
ALL = f"{measurements.cores()} threads"
CONTESTANTS = ["cpu", f"cpu, {ALL}", "cpu, int8", f"cpu, int8, {ALL}", "torch eager"]


def with_cache(config: ModelConfig, weights: Weights, tokens: np.ndarray) -> float:
    """Seconds to read `tokens` one by one."""
    decoder, start = Decoder(config, weights), time.perf_counter()
    for token in tokens:
        decoder.read([token])
    return time.perf_counter() - start


def reading_again(config: ModelConfig, weights: Weights, tokens: np.ndarray) -> float:
    """Seconds to have the logits after each token by a whole forward pass each time."""
    engine, start = ReferenceEngine(), time.perf_counter()
    for end in range(1, len(tokens) + 1):
        forward(engine, config, weights, tokens[None, :end])
    return time.perf_counter() - start


def prompt_at_once(config: ModelConfig, weights: Weights, tokens: np.ndarray) -> float:
    """Seconds to read `tokens` in one pass of the decoder."""
    decoder, start = Decoder(config, weights), time.perf_counter()
    decoder.read(tokens)
    return time.perf_counter() - start


def plain_rows():
    """How the decoder over the reference engine reads a whole context of `small`."""
    config = PRESETS["small"]
    weights = initialise(config, seed=0)
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=config.context)
    ways = {"one token at a time, with the cache": with_cache,
            "one token at a time, everything again": reading_again,
            "the prompt in one pass": prompt_at_once}  # fmt: skip
    seconds = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            seconds[name].append(way(config, weights, tokens))
    for name, times in seconds.items():
        rate = round(len(tokens) / median(times))
        yield measurements.row("small, 128 tokens", name, "numpy", rate, "tokens/s")


def bandwidth_rows():
    """Bytes a second that one core receives: it adds up numbers."""
    for case, size in (("memory", 256 << 20), ("last-level cache", 4 << 20)):
        x, times = np.ones(size // 4, np.float32), []
        repeats = max(1, (64 << 20) // size)
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(repeats):
                np.dot(x[: x.size // 2], x[x.size // 2 :])
            times.append((time.perf_counter() - start) / repeats)
        rate = round(size / median(times) / 1e9, 1)
        yield measurements.row("bandwidth", f"{case}, 1 thread", "cpu", rate, "GB/s")


def pages_rows():
    """Bytes a second of a core that reads as many as the Llama has, in small and in large pages."""
    kinds, size = {"4 KiB": mmap.MADV_NOHUGEPAGE, "2 MiB": mmap.MADV_HUGEPAGE}, 61 << 20
    arrays, times = {}, {page: [] for page in kinds}
    for page, advice in kinds.items():
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(advice)
        arrays[page] = np.frombuffer(memory, np.float32)
        arrays[page][:] = 1
    for _ in range(5 * ROUNDS):
        for page, x in arrays.items():
            start = time.perf_counter()
            np.dot(x[: x.size // 2], x[x.size // 2 :])
            times[page].append(time.perf_counter() - start)
    for page, each in times.items():
        rate = round(size / min(each) / 1e9, 1)
        yield measurements.row("bandwidth by page", f"pages of {page}", "cpu", rate, "GB/s")


def contestant(name, shape):
    """Generate a whole context greedily from token 1, for each line on stdin; print the seconds."""
    config = SHAPES[shape]
    weights = initialise(config, seed=0)
    if name == "torch eager":
        from torch_decoder import TorchDecoder

        def start():
            reader.tokens = 0
            return lambda token: int(reader.read(token).argmax())

        reader = TorchDecoder(config, weights)
    else:

        def start():
            decoder = Decoder(config, weights, reader)
            return lambda token: int(decoder.read([token]).argmax())

        threads = measurements.cores() if ALL in name else 1
        quantize = "int8" if "int8" in name else "none"
        reader = CpuReader(config, weights, threads=threads, quantize=quantize)

    def text():
        token, step = 1, start()
        for _ in range(config.context):
            token = step(token)

    text()
    print("ready", flush=True)
    for _ in sys.stdin:
        before = time.perf_counter()
        text()
        print(time.perf_counter() - before, flush=True)


def llama2c(folder):
    """A function that runs llama2.c for a context of the Llama's shape: tokens/s; None: cannot."""
    source = os.environ.get("LLAMA2C")
    if not source:
        return None
    compile_it = ["cc", "-Ofast", "-march=native", "-o", "run", Path(source, "run.c"), "-lm"]
    if subprocess.run(compile_it, cwd=folder).returncode:
        return None
    c, rng = SHAPES["llama 15M"], np.random.default_rng(0)
    kinds = c.dim, c.hidden, c.n_layers, c.n_heads, c.n_kv_heads, c.vocab_size, c.context
    block = 2 * c.dim + 4 * c.dim**2 + 3 * c.dim * c.hidden
    size = c.vocab_size * c.dim + c.n_layers * block + c.dim + c.context * c.head_dim
    weights = 0.05 * rng.standard_normal(size, np.float32)
    Path(folder, "model").write_bytes(struct.pack("7i", *kinds) + weights.tobytes())
    words = [f"<0x{i - 3:02X}>" if 3 <= i < 259 else f"w{i} " for i in range(c.vocab_size)]
    records = [struct.pack("fi", -float(i), len(w)) + w.encode() for i, w in enumerate(words)]
    Path(folder, "words").write_bytes(struct.pack("i", 16) + b"".join(records))
    ask = ["./run", "model", "-z", "words", "-t", "0", "-n", str(c.context), "-i", ""]

    def once():
        done = subprocess.run(ask, cwd=folder, capture_output=True)
        return c.context / float(done.stderr.split()[-1])

    return once


def race(shape, folder):
    """The median tokens a second of each contestant, in turns."""
    running, times = {}, {}
    for name in CONTESTANTS:
        if name == "torch eager" and not importlib.util.find_spec("torch"):
            continue
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, __file__, name, shape], **pipes)
        assert process.stdout.readline().strip() == "ready", f"{name} ended: its error is above"
        running[name], times[name] = process, []
    peer = llama2c(folder) if shape == "llama 15M" else None
    for _ in range(ROUNDS):
        for name, process in running.items():
            process.stdin.write("\n")
            process.stdin.flush()
            times[name].append(float(process.stdout.readline()))
        if peer:
            times.setdefault("llama2.c", []).append(peer())
    for process in running.values():
        process.stdin.close()
        process.wait()
    return {name: round(SHAPES[shape].context / median(each), 1) for name, each in times.items()}


def race_rows(shape, rates):
    """Ours beside each peer on one thread; what else we have, beside ours."""
    for peer in ("torch eager", "llama2.c"):
        if peer in rates:
            case = f"{shape}, batch 1, 1 thread"
            numbers = rates["cpu"], "tokens/s", peer, rates[peer]
            yield measurements.row("tokens per second", case, "cpu", *numbers)
    for name in (name for name in CONTESTANTS if name in rates and name.startswith("cpu, ")):
        case = f"{shape}, batch 1, {ALL if ALL in name else '1 thread'}"
        engine = "cpu int8" if "int8" in name else "cpu"
        numbers = rates[name], "tokens/s", "cpu, 1 thread, float32", rates["cpu"]
        yield measurements.row("tokens per second", case, engine, *numbers)


def together_rows():
    """Tokens a second of several texts of unequal prompts at once, `small`, one thread."""
    config = PRESETS["small"]
    weights, rng = initialise(config, seed=0), np.random.default_rng(0)
    for texts in (1, 4, 16):
        reader, times, n = CpuReader(config, weights, texts, threads=1), [], 64
        prompts = [rng.integers(512, size=1 + i).tolist() for i in range(texts)]
        for _ in range(ROUNDS):
            start = time.perf_counter()
            generate_together(reader, prompts, n, temperature=0)
            times.append(time.perf_counter() - start)
        case = f"small, batch {texts}, 1 thread"
        rate = round(texts * n / median(times))
        yield measurements.row("texts together", case, "cpu", rate, "tokens/s")


def held_out(config, tokenizer):
    """Windows (N, context + 1) of the held-out side of the embedded text, and bytes a token."""
    from nanoeuler.data import docstrings
    from nanoeuler.data.text import read_text, split

    text = split(read_text(docstrings.text_path()))[1]
    ids = tokenizer.encode(text)
    T = config.context
    windows = np.array([ids[i : i + T + 1] for i in range(0, len(ids) - T - 1, T)])
    return windows, len(tokenizer.decode(ids)) / len(ids)


def bits(reader, windows, bytes_per_token):
    """Bits per byte of the windows, each token from those before it in its window."""
    nats = 0.0
    for window in windows:
        z = reader.read([window[:-1].tolist()], [0], rows=len(window) - 1)[0, :, 0].astype(float)
        z -= z.max(axis=-1, keepdims=True)
        chosen = z[np.arange(len(z)), window[1:]]
        nats += float(np.sum(np.log(np.exp(z).sum(axis=-1)) - chosen))
    return nats / np.log(2) / bytes_per_token / (len(windows) * (windows.shape[1] - 1))


def trained_rows(run, windows=200, prompts=24, n=96):
    """What int8 costs a trained `small`, how many guesses are kept, and how much faster it is."""
    from nanoeuler.api import load
    from nanoeuler.inference.decoder import generate
    from nanoeuler.inference.speculative import generate_ahead, new_count

    model = load(run)
    config, weights = model.config, model.weights
    found, per_token = held_out(config, model.tokenizer)
    found = found[:: max(1, len(found) // windows)]
    readers = [CpuReader(config, weights, threads=1, quantize=each) for each in ("none", "int8")]
    exact, less = (bits(reader, found, per_token) for reader in readers)
    numbers = round(less, 4), "bits/byte", "float32", round(exact, 4)
    yield measurements.row("bits per byte", "small, trained, held out", "cpu int8", *numbers)
    starts = found[np.linspace(0, len(found) - 1, prompts).astype(int), :32].tolist()
    for temperature in (0.0, 0.8):
        for guesses in range(1, config.n_predict):
            count, seconds = new_count(config.n_predict - 1), {"plain": [], "ahead": []}
            for seed, start in enumerate(starts):
                how = {"temperature": temperature, "seed": seed}
                ways = {"plain": generate(Decoder(config, weights, readers[0]), start, n, **how),
                        "ahead": generate_ahead(Decoder(config, weights, readers[0]), start, n,
                                                count=count, guesses=guesses, **how)}  # fmt: skip
                for name, way in ways.items():
                    before = time.perf_counter()
                    list(way)
                    seconds[name].append(time.perf_counter() - before)
            case = f"small, temperature {temperature:g}, {guesses} guessed"
            plain, ahead = (len(starts) * n / sum(seconds[name]) for name in ("plain", "ahead"))
            numbers = round(ahead), "tokens/s", "plain", round(plain)
            yield measurements.row("guessing ahead", case, "cpu", *numbers)
            rate = round(count.tokens / count.passes, 3)
            yield measurements.row("tokens a pass", case, "cpu", rate, "tokens")
            if guesses == config.n_predict - 1:
                for head, (made, kept) in enumerate(zip(count.made, count.kept, strict=True), 1):
                    case = f"small, temperature {temperature:g}, head {head}"
                    share = round(kept / max(1, made), 3)
                    yield measurements.row("guesses kept", case, "cpu", share, "share")


def main():
    """Measure all of it."""
    measurements.update("generation", [*plain_rows(), *bandwidth_rows()])
    if hasattr(mmap, "MADV_HUGEPAGE"):  # on Linux
        measurements.update("generation", pages_rows())
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            rates = race(shape, folder)
        print(json.dumps({shape: rates}))
        measurements.update("generation", race_rows(shape, rates))
    measurements.update("generation", together_rows())
    run = Path(os.environ.get("RUN", "runs/base"))
    if run.exists():
        measurements.update("generation", trained_rows(run))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
    if len(sys.argv) > 1:
        contestant(*sys.argv[1:])
    else:
        main()
