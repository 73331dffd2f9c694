"""A chapter or a file of tests, run once more in another environment, and what came of it."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from nanoeuler.book import build
from nanoeuler.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
HELPERS = Path(__file__).resolve().parent
INSIDE = HELPERS / "inside"  # what is changed in each Python that is started
# pytest with nbval and no other plugin. First the book's tool, which spares all who read notebooks
# the slow half of jsonschema; ROOT's tool, since `-c` looks there before it looks at a chapter's
# part of the package. To load all this takes a second, so it is done once, and each notebook gets a
# fork of it; so it is with the notebooks' schema. nbval prints each message prettily for a log
# that nobody reads, and what is there before a fork is not looked through for garbage: both are
# spared. If there is a socket, a notebook's kernel is a fork too, of notebook_kernels.py. That of a
# cell is dead after 500 s: before the limit of the test that waits for it (pyproject.toml).
NBVAL = """
import functools
import gc
import json
import os
import sys
import nanoeuler.book.build
import ipykernel.kernelspec, jupyter_client.launcher, jupyter_client.manager, nbval.plugin, pytest
import nbformat, nbval.kernel
sys.path.append(sys.argv[1])
import notebook_kernels
nbformat.validate(nbformat.v4.new_notebook())
nbval.kernel.pformat = lambda message: ""
gc.collect(), gc.freeze()
for line in sys.stdin:
    flags, variables, told, place = json.loads(line)
    child = hasattr(os, "fork") and os.fork()
    if not child:
        code = 1
        try:
            os.environ.clear()
            os.environ.update(variables)
            to = os.open(told, os.O_WRONLY | os.O_CREAT)
            os.dup2(to, 1), os.dup2(to, 2)
            if place:
                jupyter_client.launcher.Popen = functools.partial(notebook_kernels.Kernel, place)
            code = pytest.main(["-p", "nbval.plugin", "--nbval", "--nbval-current-env",
                                "--nbval-cell-timeout=500", *flags])
            sys.stdout.flush(), sys.stderr.flush()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
SHOWN = 3000  # characters of a failure's output: its end


class Outcome(NamedTuple):
    """What came of a run: cells or tests that passed, and the others with what they said."""

    passed: int
    failures: list[str]
    minutes: float


def target_of(name: str) -> Path:
    """The notebook of a chapter ("08", "09a", "e"), or the file of tests of this name."""
    if (path := ROOT / name).suffix == ".py":
        if not path.exists():
            raise UserError(f"expected a file of tests, but there is no {path}: name another")
        return path
    (chapter,) = build.chosen(ROOT, name if "-" in name else f"{name}-")
    return chapter.with_suffix(".ipynb")


def environment(target: Path) -> dict[str, str]:
    """The variables under which `target` runs, as its own test has them, and INSIDE on its path.

    A chapter's part of the package is made anew, so no two may ask for one at the same time.
    """
    found = dict(os.environ)
    if target.suffix == ".ipynb":
        found = build.environment(ROOT, target.with_suffix(".md"))
        found["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    paths = [str(INSIDE), found.get("PYTHONPATH", "")]
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def changed(variables: dict[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """`variables` with `changes`, of which None takes a variable away."""
    return {name: value for name, value in {**variables, **changes}.items() if value is not None}


def by_pytest(flags: list[str], variables: dict[str, str], folder: str) -> tuple[int, str]:
    """Run a file of tests in a Python of its own: its exit code, and the end of what it said."""
    done = subprocess.run([sys.executable, "-m", "pytest", *flags], env=variables, cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    return done.returncode, done.stdout[-SHOWN:] + done.stderr[-SHOWN:]


@functools.cache
def nbval(thread: int) -> subprocess.Popen:
    """The Python that NBVAL runs in for a thread, which ends with this one."""
    started = subprocess.Popen([sys.executable, "-c", NBVAL, str(HELPERS)], cwd=ROOT, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    atexit.register(started.communicate)
    return started


STARTS = threading.Lock()  # held by the thread that starts a notebook's kernels, or looks for them


@functools.cache
def warm() -> tuple[dict[str, str], list[str]]:
    """Holds the environment and the socket of notebook_kernels.py, once it has been started."""
    return {}, []


def kernels(variables: dict[str, str]) -> str:
    """The socket at which kernels for these variables start with their libraries loaded, or "".

    Libraries heed variables as they are loaded. So there are such kernels only for the variables of
    the first notebook, of which just the package's place may differ, and the name of the test.
    """
    mine = {name: value for name, value in variables.items()
            if name not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}  # fmt: skip
    with STARTS:
        found, places = warm()
        if sys.platform == "linux" and not places:
            folder = tempfile.TemporaryDirectory(prefix="nanoeuler-kernels-")
            place = str(Path(folder.name, "socket"))
            command = [sys.executable, str(HELPERS / "notebook_kernels.py"), place]
            server = subprocess.Popen(command, cwd=ROOT, env=mine | {"PYTHONPATH": str(INSIDE)},
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
            places.append(place if server.stdout.readline() else "")  # it says when it is ready
            found.update(mine)
            atexit.register(folder.cleanup)
            atexit.register(server.communicate)
        return places[0] if found == mine else ""


def by_nbval(flags: list[str], variables: dict[str, str], folder: str) -> tuple[int, str]:
    """The same of a notebook, in a fork of NBVAL's Python."""
    told = Path(folder, "said")
    order = json.dumps([flags, variables, str(told), kernels(variables)]) + "\n"
    if hasattr(os, "fork"):
        process = nbval(threading.get_ident())
        process.stdin.write(order)
        process.stdin.flush()
        code = int(process.stdout.readline())
    else:
        code = subprocess.run([sys.executable, "-c", NBVAL, str(HELPERS)], cwd=ROOT, input=order,
                              text=True, check=False).returncode  # fmt: skip
    return code, told.read_text(encoding="utf-8", errors="replace")[-2 * SHOWN :]


def run(target: Path, variables: dict[str, str]) -> Outcome:
    """Run the cells of a notebook, compared with what is stored, or a file of tests."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        flags = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(target)]
        start = by_pytest if target.suffix == ".py" else by_nbval
        code, said = start(flags, variables, folder)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failures = [f"{case.get('name')}\n{(each.text or '')[-SHOWN:]}" for case in cases
                for each in case if each.tag in ("failure", "error")]  # fmt: skip
    if code and not failures:
        failures = [f"pytest ended with {code}\n{said}"]
    passed = sum(not any(each.tag in ("failure", "error", "skipped") for each in case)
                 for case in cases)  # fmt: skip
    return Outcome(passed, failures, (time.monotonic() - began) / 60)
