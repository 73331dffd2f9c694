"""Training runs that begin a little elsewhere: `python tests/helpers/perturb.py 08 17`.

    perturb.py CHAPTER or tests/test_NAME.py ... [--times 10] [--size 1e-7]

Every initial weight is multiplied by 1 + SIZE * noise, with other noise each time. 1e-7 is about
what two processors differ by after one operation in float32; what a chapter prints and asserts has
to survive it. The table has, for each, how many of its runs were whole; below it are the cells or
tests that failed, and then the exit status is 1. inside/sitecustomize.py does it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from rerun import changed, environment, run, target_of

from nanoeuler.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """The tool, given the words of its command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="+", help="chapters (08, 09a), files of tests")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--size", type=float, default=1e-7)
    asked = parser.parse_args(arguments)
    lines, failed = [], []
    for name in asked.targets:
        target, whole, cells = target_of(name), 0, set()
        variables = environment(target)
        for seed in range(asked.times):
            found = run(target, changed(variables, {"PERTURBED": f"{seed}:{asked.size}"}))
            whole += not found.failures
            cells |= {failure.split("\n")[0] for failure in found.failures}
            failed += [f"\n=== {name}, noise {seed}: {failure}" for failure in found.failures]
            print(f"{name}, noise {seed}: {found.passed} passed, {len(found.failures)} failed",
                  file=sys.stderr)  # fmt: skip
        lines.append(f"{target.stem:28} {whole:3} of {asked.times}  {', '.join(sorted(cells))}")
    print("\n".join([f"{'':28} whole runs", *lines, *failed]))
    return int(bool(failed))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"perturb.py: {error}")
