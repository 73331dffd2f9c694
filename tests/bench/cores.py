"""Time the CPU engine's training step by number of threads, beside PyTorch's with as many.

`python tests/bench/cores.py`, as `cpu.py`, whose contestants these are: each a process of its own,
in turn, the same loss and gradients asserted. Numbers of threads that this machine has no cores for
are left out, and their rows stay what they were; `--threads 8 16` leaves out others, too.

Three rates say what a number of threads can gain: all threads multiply, each for itself; they go
through eight shards, of one token each, which is little more than what Python does between
kernels, or of 256; and processes that share nothing go through a shard each, all at once.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]  # as pytest and `nanoeuler bench` have it

from bench import cpu  # noqa: E402

OURS, EAGER, COMPILED = cpu.TRAINED, *cpu.PEERS[1:]
RACES = [  # preset, batch, threads
    *(("small", 16, threads) for threads in (1, 2, 8, 16)),
    ("small", 32, 2),
    *(("euler-10m", 16, threads) for threads in (8, 16)),
]
SIDE, PRODUCTS, SHARDS = 384, 20, 8  # of a square product; how many a thread makes; of one token


def products(threads):
    """GFLOP/s of so many threads, of which each multiplies matrices of its own."""
    from cpu_rates import best

    from nanoeuler.engines.cpu.gemm import WORK, multiply
    from nanoeuler.engines.cpu.memory import aligned

    def several(a, b, c, work):
        for _ in range(PRODUCTS):
            multiply(a, b, c, False, work)

    sets = [[aligned(*shape) for shape in 3 * [(SIDE, SIDE)] + [(WORK,)]] for _ in range(threads)]
    for a, b, *_ in sets:
        a[...], b[...] = 0.5, 0.25
    with ThreadPoolExecutor(threads) as pool:
        seconds = best(lambda: list(pool.map(lambda each: several(*each), sets)))
    return 2e-9 * SIDE**3 * PRODUCTS * threads / seconds


def pass_of(batch, tokens_each, threads):
    """A pass over that many sequences of the small model, cut to so many tokens."""
    from nanoeuler.engines.registry import make_stepper
    from nanoeuler.training.optim import AdamW

    config, weights, tokens, targets, scale = cpu.problem("small", batch)
    ours = make_stepper("cpu", weights, AdamW(weights), threads=threads)
    cut = slice(0, tokens_each)
    return lambda: ours.shard_gradients(tokens[:, cut], targets[:, cut], scale)


def milliseconds(run, times):
    """The median of so many runs, after one."""
    run()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return 1e3 * median(seconds)


def shared(threads):
    """Milliseconds of eight shards on so many threads: of a token each, and of 256."""
    from nanoeuler.engines.cpu import stepper

    whole, stepper.SHARD_TOKENS = milliseconds(pass_of(16, 128, threads), 20), 1
    return milliseconds(pass_of(SHARDS, 1, threads), 100), whole


def alone():
    """Say when ready, wait for a line, print milliseconds: a shard of one token, one of 256."""
    passes = pass_of(1, 1, 1), pass_of(2, 128, 1)
    for each in passes:
        each()
    print("ready", flush=True)
    sys.stdin.readline()
    times = zip(passes, (300, 40), strict=True)
    print(json.dumps([milliseconds(*each) for each in times]), flush=True)


def apart(count):
    """The slowest of so many processes at once: milliseconds of a token's shard, of a whole one."""
    running = [cpu.process("alone", script=__file__) for _ in range(count)]
    for each in running:
        cpu.said("alone", each)
    for each in running:
        each.stdin.write("go\n")
        each.stdin.flush()
    taken = [json.loads(each.communicate()[0]) for each in running]
    return [max(each) for each in zip(*taken, strict=True)]


def main():
    import torch  # noqa: F401 without it, there is nothing to compare with

    from nanoeuler import measurements

    def row(*arguments):
        measurements.update("cores", [measurements.row(*arguments)])

    parser = argparse.ArgumentParser(description="CPU steps by number of threads, and PyTorch's")
    parser.add_argument("--no-compile", action="store_true", help="where there is no C++ compiler")
    parser.add_argument("--rates", action="store_true", help="the two rates alone")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({n for *_, n in RACES}))
    options = parser.parse_args()
    names = [OURS, EAGER, COMPILED][: 2 if options.no_compile else 3]
    fit = [threads for threads in options.threads if threads <= measurements.cores()]
    for threads in fit:
        case = f"{threads} of {measurements.cores()} cores"
        rates = json.loads(cpu.process(threads, script=__file__).communicate()[0])
        row("products", case, "cpu", round(rates[0]), "GFLOP/s")
        slowest = apart(threads)
        for what, ours, theirs in zip(("one token", "256 tokens"), rates[1:], slowest, strict=True):
            row(f"eight shards of {what}", case, "cpu", round(ours, 2), "ms")
            row(f"a shard of {what}, slowest process", case, "cpu", round(theirs, 2), "ms")
        print(case, rates, slowest, flush=True)
    for preset, batch, threads in RACES:
        if threads in fit and not options.rates:
            taken, _ = cpu.race(preset, batch, names, threads)
            case = f"{preset}, batch {batch}, {threads} thread{'s' * (threads > 1)}"
            ms = {name: round(taken[name], 2) for name in names}
            for peer in names[1:]:
                row("training step", case, "cpu", ms[OURS], "ms", peer, ms[peer])
            print(case, ms, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["alone"]:
        alone()
    elif len(sys.argv) == 2 and sys.argv[1].isdigit():
        threads = int(sys.argv[1])
        print(json.dumps([products(threads), *shared(threads)]))
    else:
        main()
