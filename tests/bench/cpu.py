"""Time the CPU engine against its rungs, plain loops and PyTorch: `python tests/bench/cpu.py`.

Every contestant is a process of its own, because the number of BLAS threads is fixed when NumPy is
loaded, and a peak of memory belongs to a process. All compute the same loss and gradients, which
is asserted; then they take turns, a few steps each, and the median counts. OPENBLAS_CORETYPE is
removed from the environment: where it is set, it holds NumPy to another processor's kernels.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

ROUNDS, STEPS = 7, 3  # turns of each contestant; timed steps a turn, after one that warms up
THREADS = 2
RUNGS = {"reference": THREADS, "fused": THREADS, "fused, shards": 1, "cpu": 1}  # -> BLAS threads
TRAINED = "cpu, training"  # the last rung with clipping and AdamW, which the peers have too
PEERS = ("naive loops", "torch eager", "torch compile")
RACES = [  # preset, batch, contestants
    ("small", 16, (*RUNGS, TRAINED, *PEERS)),
    ("small", 32, (*RUNGS, TRAINED, *PEERS)),
    ("euler-10m", 8, (TRAINED, *PEERS[1:])),
]
# The largest relative error between contestants: float32 sums of thousands of terms, some orders
# of magnitude above what is found, and as far below any mistake in a model.
SAME = 1e-4


def problem(preset, batch):
    """Config, weights, tokens, targets and scale of a batch of a preset."""
    import numpy as np

    from nanoeuler.model.config import PRESETS
    from nanoeuler.model.transformer import head_weights, loss_scale
    from nanoeuler.model.weights import initialise

    config, rng = PRESETS[preset], np.random.default_rng(0)
    tokens = rng.integers(config.vocab_size, size=(batch, config.context), dtype=np.int32)
    shape = (*tokens.shape, config.n_predict)
    targets = rng.integers(config.vocab_size, size=shape, dtype=np.int32)
    scale = loss_scale(targets, head_weights(config.n_predict))
    return config, initialise(config, seed=0), tokens, targets, scale


class WholeBatch:
    """What a stepper offers here, over one engine that takes the whole batch at once."""

    def __init__(self, engine, weights, optimizer):
        self.engine, self.weights, self.optimizer = engine, weights, optimizer
        self.gradients = weights.zeros_like()

    def shard_gradients(self, tokens, targets, scale):
        from nanoeuler.model.transformer import loss_and_gradients

        self.gradients.flat[...] = 0
        batch = tokens, targets, scale, self.gradients
        return [loss_and_gradients(self.engine, self.weights.config, self.weights, *batch)]

    def step(self, tokens, targets, lr, number):
        from nanoeuler.model.transformer import head_weights, loss_scale

        scale = loss_scale(targets, head_weights(self.weights.config.n_predict))
        self.shard_gradients(tokens, targets, scale)
        self.optimizer.clip(self.gradients)
        self.optimizer.update(self.weights, self.gradients, lr, number)


def contender(name, w, optimizer, threads):
    """The stepper of a contestant that is not PyTorch's."""
    from nanoeuler.engines.registry import engine_factory, make_stepper

    if name == "naive loops":
        import numba
        from naive_peer import NaiveEngine

        numba.set_num_threads(threads)
        return WholeBatch(NaiveEngine(), w, optimizer)
    if name in ("reference", "fused"):
        return WholeBatch(engine_factory(name)(), w, optimizer)
    return make_stepper(name.split(",")[0], w, optimizer, threads=threads)


def nanoeuler_training(name, threads, config, w, tokens, targets, scale):
    """(evaluate, step): loss and gradients at weights w, and a step of the contestant `name`."""
    from nanoeuler.training.optim import AdamW

    stepper, count = contender(name, w, AdamW(w), threads), iter(range(1, 10**9))

    def evaluate():
        sums = sum(stepper.shard_gradients(tokens, targets, scale))
        return sums @ scale, stepper.gradients

    def step():
        if name in (TRAINED, *PEERS):
            stepper.step(tokens, targets, lr=1e-3, number=next(count))
        else:
            stepper.shard_gradients(tokens, targets, scale)

    return evaluate, step


def peak_memory():
    """The most memory that this process has held, in MiB, without its parent's before exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def contestant(name, preset, batch, threads, folder):
    """Write loss and gradients into the folder, make a step, say so, and serve turns.

    A turn: for a line on stdin, print the seconds of STEPS steps and the peak memory in MiB.
    """
    import numpy as np

    if name.startswith("torch"):
        import torch_peer

        compiled = name == "torch compile"
        evaluate, step = torch_peer.training(compiled, threads, *problem(preset, batch))
    else:
        evaluate, step = nanoeuler_training(name, threads, *problem(preset, batch))
    loss, gradients = evaluate()
    np.savez(Path(folder, name), loss=loss, **gradients)
    step()
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = []
        for _ in range(1 + STEPS):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        print(json.dumps([seconds[1:], peak_memory()]), flush=True)


def operations():
    """Print [engine, name, milliseconds] of each operation of a batch of 16 on one thread."""
    from nanoeuler.engines.cpu.engine import CpuEngine
    from nanoeuler.engines.interface import OPERATIONS
    from nanoeuler.engines.reference import ReferenceEngine
    from nanoeuler.model.transformer import loss_and_gradients

    timed = {*OPERATIONS, "move_norm", "move_norm_backward"} - {"begin", "scratch", "rope_tables"}

    def clocked(engine, name, spent):
        # The engine's own method, timed; what it calls inside is not counted twice.
        function = getattr(engine, name)

        def run(*arguments):
            before, start = sum(spent.values()), time.perf_counter()
            result = function(*arguments)
            inside = sum(spent.values()) - before
            spent[name] += time.perf_counter() - start - inside
            return result

        return run

    config, w, tokens, targets, scale = problem("small", 16)
    dw = w.zeros_like()
    out = []
    for name, make in (("reference", ReferenceEngine), ("cpu", CpuEngine)):
        engine, rounds, spent = make(), [], defaultdict(float)
        for operation in timed:
            setattr(engine, operation, clocked(engine, operation, spent))
        for _ in range(8):
            spent.clear()
            loss_and_gradients(engine, config, w, tokens, targets, scale, dw)
            rounds.append(dict(spent))
        for operation in sorted(rounds[0]):
            seconds = median(each[operation] for each in rounds[2:])
            out.append([name, operation, 1e3 * seconds])
    print(json.dumps(out))


def process(*arguments, blas=1, script=__file__, **environment):
    """Start this script, or another, as a process of its own with that many BLAS threads."""
    inherited = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    environment = inherited | {"OPENBLAS_NUM_THREADS": str(blas)} | environment
    command = [sys.executable, script, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def said(name, running):
    """The next line of a process; if there is none, its error is on the screen."""
    line = running.stdout.readline()
    if not line:
        sys.exit(f"{name} ended: its error is above")
    return line


def assert_same(folder, names):
    """Every contestant's loss and gradients are the first one's."""
    import numpy as np

    first, *others = [np.load(Path(folder, f"{name}.npz")) for name in names]
    for name, other in zip(names[1:], others, strict=True):
        assert first.files == other.files, name
        for key in first.files:
            off = np.linalg.norm(other[key] - first[key]) / np.linalg.norm(first[key])
            assert off < SAME, f"{key} of {name} is off by {off:.1e}"


def race(preset, batch, names, threads=THREADS):
    """Milliseconds of a step, of all steps of all turns, and peak MiB, of each contestant."""
    with tempfile.TemporaryDirectory() as folder:
        running = {
            name: process(name, preset, batch, threads, folder, blas=RUNGS.get(name, 1))
            for name in names
        }
        for name, each in running.items():
            said(name, each)
        assert_same(folder, names)
    seconds, peak = defaultdict(list), {}
    for _ in range(ROUNDS):
        for name, each in running.items():
            each.stdin.write("go\n")
            each.stdin.flush()
            taken, peak[name] = json.loads(said(name, each))
            seconds[name] += taken
    for each in running.values():
        each.communicate()
    return {name: 1e3 * median(taken) for name, taken in seconds.items()}, peak


def start_up():
    """Seconds from nothing to the end of the first step: with a cold numba cache, then warm."""
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            start = time.perf_counter()
            running = process(TRAINED, "small", 16, THREADS, cache, NUMBA_CACHE_DIR=cache)
            said(TRAINED, running)
            yield time.perf_counter() - start
            running.communicate()


def machine_rates():
    """[case, value, unit] of each rate, the last that of the fastest product on THREADS threads."""
    rates = []
    for mode, blas in (("machine", 1), ("machine", THREADS), ("torch products", 1)):
        rates += json.loads(process(mode, blas=blas).communicate()[0])
    ours = (f"multiply, {THREADS} threads", f"numpy, {THREADS} threads")
    return [*rates, ["peak", max(x for case, x, _ in rates if case.startswith(ours)), "GFLOP/s"]]


def race_rows(row, preset, batch, names, peak_gflops):
    """Report a race: times and memory of the rungs, then of the training step beside its peers."""
    from nanoeuler.model.config import PRESETS
    from nanoeuler.planning.plan import flops_per_token

    milliseconds, memory = race(preset, batch, names)
    case, config = f"{preset}, batch {batch}", PRESETS[preset]
    gflop = 1e-9 * batch * config.context * flops_per_token(config)
    share = {name: 1e5 * gflop / ms / peak_gflops for name, ms in milliseconds.items()}
    for name in (x for x in RUNGS if x in names):
        row("loss and gradients", case, name, round(milliseconds[name], 2), "ms")
        if name != "cpu":  # which the rows of the training step, and its peers, are about
            row("peak memory", case, name, round(memory[name]), "MiB")
            row("share of the peak", case, name, round(share[name], 1), "%")
    for peer in (x for x in PEERS if x in names):
        for what, of, digits, unit in (
            ("training step", milliseconds, 2, "ms"), ("peak memory", memory, None, "MiB"),
            ("share of the peak", share, 1, "%"),
        ):  # fmt: skip
            ours, theirs = round(of[TRAINED], digits), round(of[peer], digits)
            row(what, case, "cpu", ours, unit, peer, theirs)


def main():
    import torch  # noqa: F401 without it, there is nothing to compare with

    from nanoeuler import measurements

    def row(*arguments):
        rows.append(measurements.row(*arguments))

    rows, rates = [], machine_rates()
    for race_of in RACES:
        race_rows(row, *race_of, peak_gflops=rates[-1][1])
    for case, value, unit in rates:
        row("machine", case, "cpu", round(value, 3), unit)
    for engine, operation, value in json.loads(process("operations").communicate()[0]):
        row("operation", operation, engine, round(value, 3), "ms")
    for case, seconds in zip(("cold cache", "warm cache"), start_up(), strict=True):
        row("start-up", case, "cpu", round(seconds, 2), "s")
    measurements.save("cpu", rows)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "helpers")]  # children too
    import cpu_rates

    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "machine":
        cpu_rates.machine(THREADS)
    elif sys.argv[1] == "torch products":
        cpu_rates.torch_products(THREADS)
    elif sys.argv[1] == "operations":
        operations()
    else:
        name, preset, batch, threads, folder = sys.argv[1:]
        contestant(name, preset, int(batch), int(threads), folder)
