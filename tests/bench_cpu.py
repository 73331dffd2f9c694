"""Time the CPU engine against its rungs and against PyTorch: `python tests/bench_cpu.py`.

Every contestant is a process of its own, because the number of BLAS threads is fixed when NumPy is
loaded; they take turns, a few steps each, and the median counts. OPENBLAS_CORETYPE is removed from
the environment: where it is set, it holds NumPy to another processor's kernels.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

ROUNDS, STEPS = 7, 3  # turns of each contestant; timed steps a turn, after one that warms up
THREADS = 2
CONTESTANTS = {  # name -> BLAS threads
    "reference": THREADS, "fused": THREADS, "fused, shards": 1, "cpu": 1, "cpu, training": 1,
    "torch eager": 1, "torch compile": 1,
}  # fmt: skip
SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 344, 384, 512, 768)  # square products


def problem(batch):
    """Config, weights, gradients, tokens, targets and scale of a batch of the small preset."""
    import numpy as np

    from nanoeuler.config import PRESETS
    from nanoeuler.model import head_weights, initialise, loss_scale

    config, rng = PRESETS["small"], np.random.default_rng(0)
    w = initialise(config, seed=0)
    tokens = rng.integers(config.vocab_size, size=(batch, config.context), dtype=np.int32)
    shape = (*tokens.shape, config.n_predict)
    targets = rng.integers(config.vocab_size, size=shape, dtype=np.int32)
    return config, w, w.zeros_like(), tokens, targets, loss_scale(targets, head_weights(shape[2]))


def nanoeuler_step(name, batch):
    """A function that makes one step of our contestant `name`."""
    from nanoeuler import optim, parallel, reference
    from nanoeuler.cpu import FusedEngine
    from nanoeuler.model import loss_and_gradients

    config, w, dw, tokens, targets, scale = problem(batch)
    if name in ("reference", "fused"):
        engine = reference if name == "reference" else FusedEngine()

        def step():
            dw.flat[...] = 0
            loss_and_gradients(engine, config, w, tokens, targets, scale, dw)

        return step
    make = parallel.engine_factory("fused" if name == "fused, shards" else "cpu")
    sharded = parallel.Sharded(make, config, THREADS)
    optimizer, count = optim.AdamW(w), iter(range(1, 10**9))

    def step():
        sharded.loss_and_gradients(w, tokens, targets, scale, dw)
        if name == "cpu, training":
            optim.clip(dw)
            optimizer.update(w, dw, lr=1e-3, step=next(count))

    return step


def torch_step(name, batch):
    """A function that makes one training step of the same model in PyTorch."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    config, w, _, tokens, targets, scale = problem(batch)
    H, G, D = config.n_heads, config.n_kv_heads, config.head_dim
    parameters = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in w.items()}
    angle = torch.arange(config.context)[:, None] * 1e4 ** (-torch.arange(D // 2) * 2 / D)
    cos, sin = angle.cos(), angle.sin()
    tokens, targets = torch.tensor(tokens).long(), torch.tensor(targets).long()
    weight = torch.tensor(scale, dtype=torch.float32)

    def turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def loss(p):
        x = F.embedding(tokens, p["embedding"])
        for i in range(config.n_layers):
            block = {n.split(".")[2]: t for n, t in p.items() if n.startswith(f"block.{i}.")}
            heads = F.rms_norm(x, x.shape[-1:], block["norm1"], 1e-5) @ block["wqkv"]
            heads = heads.view(batch, -1, H + 2 * G, D).transpose(1, 2)
            q, k, v = heads.split([H, G, G], 1)
            y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
            x = x + y.transpose(1, 2).reshape(batch, -1, H * D) @ block["wo"]
            gate_up = F.rms_norm(x, x.shape[-1:], block["norm2"], 1e-5) @ block["w_up"]
            gate, up = gate_up.chunk(2, -1)
            x = x + (F.silu(gate) * up) @ block["w_down"]
        logits = F.rms_norm(x, x.shape[-1:], p["norm"], 1e-5) @ p["output"]
        logits = logits.view(-1, config.vocab_size)
        each = F.cross_entropy(logits, targets.reshape(-1), reduction="none")
        return (each.view(-1, config.n_predict) * weight).sum()

    run = torch.compile(loss) if name == "torch compile" else loss
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=0.1, fused=True)

    def step():
        run(parameters).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def contestant(name, batch):
    """Serve turns: for each line on stdin, print the seconds of STEPS steps and the peak memory."""
    step = (torch_step if name.startswith("torch") else nanoeuler_step)(name, batch)
    for _ in sys.stdin:
        seconds = []
        for _ in range(1 + STEPS):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps([seconds[1:], peak]), flush=True)


def best(function, repeats=200, budget=0.2):
    """Seconds of the fastest call: what the machine can do when nobody disturbs it."""
    function()
    fastest, end = float("inf"), time.perf_counter() + budget
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        fastest = min(fastest, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return fastest


def machine():
    """Print the machine's rates, as [case, value, unit], on one core but for NumPy's products."""
    import numpy as np
    from numba import njit

    from nanoeuler import fused
    from nanoeuler.cpu import aligned
    from nanoeuler.gemm import WORK, multiply

    @njit
    def exponentials(x, y):
        for i in range(x.size):
            y[i] = fused.exp(x[i])

    out, work = [], aligned(WORK)
    threads = os.environ["OPENBLAS_NUM_THREADS"]
    for n in SIZES if threads == "1" else SIZES[-3:]:
        a, b, c = aligned(n, n), aligned(n, n), aligned(n, n)
        a[...], b[...] = 0.5, 0.25
        flops, case = 2e-9 * n**3, f"{n} x {n} x {n}"
        numpy = flops / best(lambda: np.matmul(a, b, out=c))  # noqa: B023 called before it changes
        out.append([f"numpy, {threads} threads: {case}", numpy, "GFLOP/s"])
        if threads == "1":
            ours = flops / best(lambda: multiply(a, b, c, False, work))  # noqa: B023
            out.append([f"multiply: {case}", ours, "GFLOP/s"])
    if threads == "1":
        x, y = aligned(1 << 24), aligned(1 << 24)
        x[...], y[...] = 0.5, 0
        out.append(["copy", 2e-9 * x.nbytes / best(lambda: np.copyto(y, x)), "GB/s"])
        x, y = x[: 1 << 12], y[: 1 << 12]
        out.append(["np.exp", 1e9 / x.size * best(lambda: np.exp(x, out=y)), "ns"])
        out.append(["fused.exp", 1e9 / x.size * best(lambda: exponentials(x, y)), "ns"])
    print(json.dumps(out))


def operations(batch):
    """Print milliseconds of each operation in one step on one thread, as [engine, name, value]."""
    from nanoeuler import reference
    from nanoeuler.cpu import CpuEngine
    from nanoeuler.model import loss_and_gradients

    class Timed:
        def __init__(self, engine):
            self.engine, self.spent = engine, defaultdict(float)

        def __getattr__(self, name):
            function = getattr(self.engine, name)
            if name in ("begin", "scratch", "rope_tables"):
                return function

            def run(*arguments):
                start = time.perf_counter()
                result = function(*arguments)
                self.spent[name] += time.perf_counter() - start
                return result

            return run

    config, w, dw, tokens, targets, scale = problem(batch)
    out = []
    for name, engine in (("reference", reference), ("cpu", CpuEngine())):
        rounds = []
        for _ in range(8):
            timed = Timed(engine)
            loss_and_gradients(timed, config, w, tokens, targets, scale, dw)
            rounds.append(timed.spent)
        for operation in rounds[0]:
            spent = median(each[operation] for each in rounds[2:])
            out.append([name, operation, 1e3 * spent])
    print(json.dumps(out))


def process(*arguments, blas=1, **options):
    """Start this script as a process of its own with that many BLAS threads."""
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    environment["OPENBLAS_NUM_THREADS"] = str(blas)
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment | options.pop("env", {}), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options,
    )  # fmt: skip


def race(batch, names):
    """Seconds of a step, all steps of all turns, and peak memory in MB, of each contestant."""
    running = {name: process(name, batch, blas=CONTESTANTS[name]) for name in names}
    seconds, peak = defaultdict(list), {}
    for turn in range(1 + ROUNDS):
        for name, each in running.items():
            each.stdin.write("go\n")
            each.stdin.flush()
            taken, peak[name] = json.loads(each.stdout.readline())
            seconds[name] += taken if turn else []  # the first turn compiles
    for each in running.values():
        each.stdin.close()
        each.wait()
    return {name: 1e3 * median(taken) for name, taken in seconds.items()}, peak


def start_up():
    """Seconds from nothing to the end of the first step: with a cold numba cache, then warm."""
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            start = time.perf_counter()
            process("cpu", 4, env={"NUMBA_CACHE_DIR": cache}).communicate("go\n")
            yield time.perf_counter() - start


def main():
    from nanoeuler import measurements

    def row(*arguments):
        rows.append(measurements.row(*arguments))

    try:
        import torch  # noqa: F401

        names = list(CONTESTANTS)
    except ImportError:
        names = [name for name in CONTESTANTS if not name.startswith("torch")]
    rows = []
    for batch in (16, 32):
        milliseconds, peak = race(batch, names)
        case = f"small, batch {batch}"
        for name in names[:4]:
            row("loss and gradients", case, name, round(milliseconds[name], 2), "ms")
        ours = round(milliseconds["cpu, training"], 2)
        for peer in names[5:] or [None]:
            theirs = [round(x[peer], 2) if peer else None for x in (milliseconds, peak)]
            row("training step", case, "cpu", ours, "ms", peer, theirs[0])
            row("peak memory", case, "cpu", round(peak["cpu, training"]), "MB", peer, theirs[1])
    for blas in (1, THREADS):
        for case, value, unit in json.loads(process("machine", 0, blas=blas).communicate()[0]):
            row("machine", case, "cpu", round(value, 3), unit)
    for engine, operation, value in json.loads(process("operations", 16).communicate()[0]):
        row("operation", operation, engine, round(value, 3), "ms")
    for case, seconds in zip(("cold cache", "warm cache"), start_up(), strict=True):
        row("start-up", case, "cpu", round(seconds, 2), "s")
    measurements.save("cpu", rows)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "machine":
        machine()
    elif sys.argv[1] == "operations":
        operations(int(sys.argv[2]))
    else:
        contestant(sys.argv[1], int(sys.argv[2]))
