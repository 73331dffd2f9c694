"""Time the CPU engine's training step by number of threads, beside PyTorch's with as many.

`python tests/bench/cores.py`, as `cpu.py`, whose contestants these are: each a process of its own,
in turn, the same loss and gradients asserted. Numbers of threads that this machine has no cores for
are left out, and their rows stay what they were; `--threads 8 16` leaves out others, too.
"""

import argparse
import sys
from pathlib import Path

import cpu

OURS, EAGER, COMPILED = cpu.TRAINED, *cpu.PEERS[1:]
RACES = [  # preset, batch, threads
    *(("small", 16, threads) for threads in (1, 2, 4, 8, 16)),
    ("small", 32, 2),
    *(("euler-10m", 16, threads) for threads in (1, 8, 16)),
]


def main():
    import torch  # noqa: F401 without it, there is nothing to compare with

    from nanoeuler import measurements

    parser = argparse.ArgumentParser(description="CPU steps by number of threads, and PyTorch's")
    parser.add_argument("--no-compile", action="store_true", help="where there is no C++ compiler")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({n for *_, n in RACES}))
    options = parser.parse_args()
    names = [OURS, EAGER, COMPILED][: 2 if options.no_compile else 3]
    for preset, batch, threads in RACES:
        if threads > measurements.cores() or threads not in options.threads:
            continue
        taken, _ = cpu.race(preset, batch, names, threads)
        case = f"{preset}, batch {batch}, {threads} thread{'s' * (threads > 1)}"
        ms = {name: round(taken[name], 2) for name in names}
        ours = "training step", case, "cpu", ms[OURS], "ms"
        rows = [measurements.row(*ours, peer, ms[peer]) for peer in names[1:]]
        measurements.update("cores", rows)
        print(case, ms, flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "helpers")]  # children too
    main()
