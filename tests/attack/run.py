"""Attack the whole program: python tests/attack/run.py [GROUP ...] [--seed N]

Prints each fault as it is found, then a table, and ends with 1 if there was any. A group is a
module of this folder with a function `attack(attack, seed)`; without names, all of them run.
"""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

# No threads before the first fork, and warnings wherever they come from.
os.environ.update(OPENBLAS_NUM_THREADS="1", NUMBA_NUM_THREADS="2", MPLBACKEND="Agg")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

GROUPS = sorted(p.stem for p in HERE.glob("*.py") if p.stem not in ("run", "harness"))


def main() -> int:
    """Run the groups that were asked for; see above."""
    import harness

    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    asked.add_argument("--seed", type=int, default=0, help="draws the inputs that are drawn")
    flags = asked.parse_args()
    if unknown := set(flags.groups) - set(GROUPS):
        asked.error(
            f"no group is called {', '.join(sorted(unknown))}: there are {', '.join(GROUPS)}"
        )
    harness.warm()
    lines, faults = [], 0
    for name in flags.groups or GROUPS:
        print(name, flush=True)
        begun = time.monotonic()
        with harness.scratch(name) as attack:
            importlib.import_module(name).attack(attack, flags.seed)
        faults += len(attack.faults)
        minutes = (time.monotonic() - begun) / 60
        for kind, inputs in attack.inputs.items():
            bad = sum(fault.startswith(f"{kind}: ") for fault in attack.faults)
            lines.append(f"{name:12} {kind:32} {inputs:7,} {bad:7}")
        total = f"{attack.inputs.total():7,} {len(attack.faults):7}"
        lines.append(f"{name:12} {'':32} {total} {minutes:6.1f} min")
    print(f"\n{'group':12} {'kind':32} {'inputs':>7} {'faults':>7}", *lines, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
