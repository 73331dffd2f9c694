"""The book's `exercise` and `check` with odd names and hints, in a copy of the chapters.

Nothing of it may leave the copy, whose exercises/ is the one place where a stub is written.
"""

import shutil
import sys

from flags import NUMBERS, PATHS, TEXTS
from harness import ROOT, SECONDS, Attack, forked

FIRST_LEFT_OUT = "book/05-"  # of the copy's chapters: with all of them an input takes a second
TOLD = 1  # `check` ends with it where something is stale or an answer is wrong
NAMES = ["1.1", "4.2", "01.1", "1.01", "1.0", "1.", ".1", "1.2 ", " 1.2", "1.2\n", "1.999", "999.1",
         "1.1.1", "A.1", "a.1", "F.1", "f.1", "12a.1", "12A.1", "1-1", "1,1", "１.１", "1.1/../2",
         "../1.1", "/1.1", "1.1.py", "exercises/1.1.py", "١.١", "1..1", "-1.1", "1.-1", "1e1.1"]


def book(args: list[str]) -> int:
    """`python -m nanoeuler.book ARGS`, as the module's last lines have it."""
    from nanoeuler.book import build
    from nanoeuler.errors import UserError

    try:
        build.app(args, prog_name="nanoeuler.book")
    except UserError as error:
        print(f"nanoeuler.book: {error}", file=sys.stderr)
        return 2
    return 0


def attack(attack: Attack, seed: int) -> None:
    """Every odd name for both commands; odd hints and seeds for one that there is."""
    import nanoeuler.book.build  # noqa: F401  once, before the first fork

    lines = (ROOT / "_toc.yml").read_text(encoding="utf-8").splitlines()
    end = next(n for n, line in enumerate(lines) if FIRST_LEFT_OUT in line)
    (attack.folder / "_toc.yml").write_text("\n".join(lines[:end]) + "\n", encoding="utf-8")
    shutil.copytree(ROOT / "book", attack.folder / "book")
    shutil.copytree(ROOT / "nanoeuler", attack.folder / "nanoeuler",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    kept = {path.name for path in attack.folder.iterdir()} | {"exercises", "build"}

    def send(kind: str, *words: str) -> None:
        done = forked(lambda: book([*words]), attack.folder, b"", SECONDS)
        fault = None if done.code == TOLD and "Traceback" not in done.err else done.fault
        if more := {path.name for path in attack.folder.iterdir()} - kept:
            fault = f"wrote {sorted(more)}"
        attack.count(kind, repr([word[:60] for word in words]), fault)
        shutil.rmtree(attack.folder / "exercises", ignore_errors=True)

    for name in dict.fromkeys([*NAMES, *TEXTS, *PATHS]):
        send("exercise", "exercise", "--", name)
        if name not in ("", ".") and not name.startswith("1.1"):  # those judge the whole book
            send("check", "check", "--", name)
    for value in NUMBERS:
        send("hints", "exercise", "1.1", "--hint", value)
        send("seeds", "check", "999.1", "--seed", value)
