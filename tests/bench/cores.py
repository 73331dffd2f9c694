"""Time the CPU engine's training step by number of threads, beside PyTorch's with as many.

`python tests/bench/cores.py`, as `cpu.py`, whose contestants these are: each a process of its own,
in turn, the same loss and gradients asserted. Numbers of threads that this machine has no cores for
are left out, and their rows stay what they were; `--threads 8 16` leaves out others, too.

Two more rates say what a number of threads can gain: all threads multiply, each for itself; and a
step of eight shards of one token each, which is hardly more than what Python does between kernels.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cpu

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

    from nanoeuler.engines.cpu.memory import aligned
    from nanoeuler.engines.cpu.products import WORK, multiply

    def several(a, b, c, work):
        for _ in range(PRODUCTS):
            multiply(a, b, c, False, work)

    sets = [[aligned(*shape) for shape in 3 * [(SIDE, SIDE)] + [(WORK,)]] for _ in range(threads)]
    for a, b, *_ in sets:
        a[...], b[...] = 0.5, 0.25
    with ThreadPoolExecutor(threads) as pool:
        seconds = best(lambda: list(pool.map(lambda each: several(*each), sets)))
    return 2e-9 * SIDE**3 * PRODUCTS * threads / seconds


def calls(threads):
    """Milliseconds of loss and gradients of eight sequences of one token, each a shard."""
    from cpu_rates import best

    from nanoeuler.engines.choice import make_stepper
    from nanoeuler.engines.cpu import stepper

    stepper.SHARD_TOKENS = 1
    config, weights, tokens, targets, scale = cpu.problem("small", SHARDS)
    ours = make_stepper("cpu", weights, None, threads=threads)
    batch = tokens[:, :1], targets[:, :1], scale
    return 1e3 * best(lambda: ours.loss_and_gradients(*batch))


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
        rates = json.loads(cpu.process(threads, script=__file__).communicate()[0])
        case = f"{threads} of {measurements.cores()} cores"
        row("products", case, "cpu", round(rates[0]), "GFLOP/s")
        row("loss and gradients", f"small, shards of one token, {case}", "cpu", rates[1], "ms")
        print(case, rates, flush=True)
    for preset, batch, threads in RACES:
        if threads in fit and not options.rates:
            taken, _ = cpu.race(preset, batch, names, threads)
            case = f"{preset}, batch {batch}, {threads} thread{'s' * (threads > 1)}"
            ms = {name: round(taken[name], 2) for name in names}
            for peer in names[1:]:
                row("training step", case, "cpu", ms[OURS], "ms", peer, ms[peer])
            print(case, ms, flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "helpers")]  # children too
    if len(sys.argv) == 2 and sys.argv[1].isdigit():
        threads = int(sys.argv[1])
        print(json.dumps([products(threads), round(calls(threads), 2)]))
    else:
        main()
