"""What all attacks share: a scratch folder, the program run on hostile input, and a tally.

An attack is a function of an `Attack`: it counts every input that it sends, with its fault or None.
What counts as a fault is decided here, so that all attacks mean the same by it. The program runs in
a forked copy of this process, which has imported it once: an input costs milliseconds, not seconds.
"""

import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 20.0  # what one input may take; a command on these small files takes a second or two
MEMORY = 12 << 30  # bytes of address space of a program: half of what the smallest machine has
# What a command may return: done, refused (of typer, too), stopped by Ctrl-C or by a closed pipe.
CODES = {0, 2, 130, 141}


@dataclass(frozen=True)
class Outcome:
    """How a program ended. code: None if it had to be killed; negative: by that signal."""

    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def fault(self) -> str | None:
        """What was wrong with it, whatever the input was; None if nothing was."""
        if self.code is None:
            return f"hang: still running after {self.seconds:.0f} s"
        for word in ("Traceback (most recent call last)", "RuntimeWarning", "Fatal Python error"):
            if word in self.err:
                return f"traceback: {self.err.strip().splitlines()[-1]}"
        if self.code not in CODES:
            return f"exit code {self.code}: {self.err[-200:]}"
        if self.code == 2 and not self.err.strip():
            return "refused without a word"
        return None


@dataclass
class Attack:
    """One group of inputs: where it may write, what was sent, what was found."""

    name: str
    folder: Path
    inputs: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def count(self, kind: str, what: str, fault: str | None) -> None:
        """One input more; `what` names it well enough to be sent again."""
        self.inputs[kind] += 1
        if fault:
            self.faults.append(f"{kind}: {what[:300]}: {fault}")
            print(f"  FAULT {self.faults[-1]}", flush=True)

    def run(self, *args: object, stdin: bytes = b"", seconds: float = SECONDS) -> Outcome:
        """`nanoeuler ARGS` in this attack's folder, in a forked copy of this process."""
        return forked(lambda: program([str(arg) for arg in args]), self.folder, stdin, seconds)

    def begin(self, *args: object) -> "Child":
        """Begin `nanoeuler ARGS`, and do not wait for it."""
        return Child(lambda: program([str(arg) for arg in args]), self.folder)

    def run_act(self, act: Callable[[], object]) -> Outcome:
        """Call a function of the package in a forked copy of this process, as a command would."""
        return forked(lambda: called(act), self.folder, b"", SECONDS)

    def act(self, kind: str, what: str, act: Callable[[], object]) -> Outcome:
        """The same, counted."""
        outcome = self.run_act(act)
        self.count(kind, what, outcome.fault)
        return outcome

    def command(self, kind: str, *args: object, stdin: bytes = b"") -> Outcome:
        """Run a command and count it."""
        outcome = self.run(*args, stdin=stdin)
        self.count(kind, " ".join(str(arg)[:80] for arg in args), outcome.fault)
        return outcome


def warm() -> None:
    """Do once, before the first fork, what every program does slowly: import, load code, draw."""
    import io
    from contextlib import redirect_stderr

    import numpy as np
    from matplotlib.figure import Figure

    import nanoeuler.__main__  # noqa: F401
    import nanoeuler.api  # noqa: F401
    from nanoeuler.engines.cpu.engine import CpuEngine
    from nanoeuler.inference.model import Model
    from nanoeuler.model.config import ModelConfig
    from nanoeuler.model.transformer import head_weights, loss_and_gradients, loss_scale
    from nanoeuler.model.weights import initialise
    from nanoeuler.tokenizer.tokenizer import Tokenizer
    from nanoeuler.training import display, dpo, optim, sft, train  # noqa: F401

    text = b"the river is water, and none of it stays. " * 40
    tokenizer = Tokenizer.train(text, 270)
    config = ModelConfig(270, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, hidden=48, context=32,
                         n_predict=4)  # fmt: skip
    weights = initialise(config, 0)
    tokens = np.resize(tokenizer.encode(text), (2, 36)).astype(np.int32)
    x, y = tokens[:, :32], tokens[:, np.arange(32)[:, None] + 1 + np.arange(4)]
    for first in None, np.zeros_like(x):
        dw = weights.zeros_like()
        scale = loss_scale(y, head_weights(4))
        loss_and_gradients(CpuEngine(), config, weights, x, y, scale, dw, first)
    optimizer = optim.AdamW(weights)
    optimizer.clip(dw)
    optimizer.update(weights, dw, 0.0, 1)
    model = Model(config, tokenizer, weights)
    model.generate("the river", tokens=3), model.evaluate(text)
    figure = Figure()
    display.draw(figure.subplots(), [{"step": 1, "loss": 1.0}], 1.0, {"unigram": 1.0})
    figure.savefig(io.BytesIO(), format="png")
    with redirect_stderr(io.StringIO()):
        program(["train", "--data", "none"])
    assert threading.active_count() == 1, "a fork would copy locks that nobody opens"


def program(args: list[str]) -> int:
    """The command line, imported before the first fork."""
    from nanoeuler.cli.main import main

    return main(args)


def called(act: Callable[[], object]) -> int:
    """Print what `act` returns; 2 for what it refuses in words, as the command line has it."""
    from nanoeuler.errors import UserError

    try:
        print(act())
    except UserError as error:
        if len(str(error).splitlines()) != 1 or not str(error).isprintable():
            raise AssertionError(f"more than a line: {error!r}") from error
        print(error, file=sys.stderr)
        return 2
    return 0


class Child:
    """`act`, being done in a forked copy of this process: a session of its own, with limits."""

    def __init__(self, act: Callable[[], int], folder: Path, stdin: bytes = b"") -> None:
        self.streams = [tempfile.TemporaryFile() for _ in range(3)]
        self.streams[0].write(stdin)
        self.streams[0].seek(0)
        self.begun = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            _become(act, folder, self.streams)

    def wait(self, seconds: float = SECONDS) -> Outcome:
        """How it ended, within so many seconds of its beginning; what it left running is killed."""
        code = _wait(self.pid, self.begun + seconds)
        taken = time.monotonic() - self.begun
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if code is None:
            os.waitpid(self.pid, 0)
        out, err = (_read(stream) for stream in self.streams[1:])
        for stream in self.streams:
            stream.close()
        return Outcome(code, out, err, taken)


def forked(act: Callable[[], int], folder: Path, stdin: bytes, seconds: float) -> Outcome:
    """Do `act` in a `Child`, to its end."""
    return Child(act, folder, stdin).wait(seconds)


def _become(act: Callable[[], int], folder: Path, streams: list) -> None:
    """The child: never returns."""
    code = 70
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream.fileno(), number)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, encoding="utf-8", errors="surrogateescape", closefd=False)
            for number, mode in enumerate("rww")
        )
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("default")
        code = act()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(child: int, until: float) -> int | None:
    """The child's exit code, or minus its signal; None if it is still there at `until`."""
    pause = 0.002
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    return None


def _read(stream) -> str:
    stream.seek(0)
    return stream.read(1 << 20).decode("utf-8", "replace")


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file below `folder`, but for caches and what git keeps."""
    skipped = {
        ".git",
        ".venv",
        "__pycache__",
        ".pytest_cache",
        ".ruff_cache",
        ".mypy_cache",
        "build",
    }
    found = {}
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped]
        for name in files:
            with contextlib.suppress(OSError):
                at = os.lstat(os.path.join(path, name))
                found[os.path.join(path, name)] = at.st_size, at.st_mtime_ns
    return found


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Attack]:
    """An attack in a folder of its own; whatever it changes outside of it is a fault."""
    outer = Path(tempfile.mkdtemp(prefix="attack-"))
    home, folder, beside = outer / "home", outer / "here", outer / "beside"
    for path in (home, folder, beside):
        path.mkdir()
    (beside / "precious.txt").write_text("nobody may touch this\n")
    os.environ.update(HOME=str(home), TMPDIR=str(folder))
    tempfile.tempdir = None
    before = contents(ROOT) | contents(beside)
    attack = Attack(name, folder)
    try:
        yield attack
        after = contents(ROOT) | contents(beside)
        changed = sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p))
        attack.count("outside", "all of the above", changed and f"written outside: {changed[:5]}")
    finally:
        os.environ.pop("TMPDIR")
        tempfile.tempdir = None
        shutil.rmtree(outer, ignore_errors=True)
