"""The tool that runs chapters and tests on other processors: each takes hold, failures are told."""

import os
import platform
import signal
import sys
import time
from pathlib import Path

import nbformat
import processors
import pytest
import rerun
from nbformat.v4 import new_code_cell, new_notebook, new_output
from notebook_kernels import Kernel
from processors import PROCESSORS, doubts, main
from rerun import ROOT, Outcome, changed, environment, run, target_of

from nanoeuler.errors import UserError

x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the processors are x86-64's"
)


def test_six_processors_and_this_one():
    named = [each.llvm for each in PROCESSORS.values() if each.llvm]
    assert len(set(named)) == len(named) >= 6 and PROCESSORS["this machine"].llvm is None


@x86
def test_a_processor_takes_hold(tmp_path, monkeypatch):
    """An old one, whatever the variables say already; what did not take hold is named."""
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    assert doubts(PROCESSORS["x86-64"], 1, tmp_path) == []
    other = PROCESSORS["x86-64"]._replace(blas="Nehalem", features="avx9")
    those = PROCESSORS["x86-64"].variables(3, tmp_path)
    monkeypatch.setattr(processors.Processor, "variables", lambda *_: those)
    said = doubts(other, 4, tmp_path)
    assert [each.split()[:2] for each in said[-2:]] == [["numba", "does"], ["OpenBLAS", "has"]]
    assert said[0] == "3 cores, numba on 3 threads, and not on 4"


def test_a_machine_that_cannot_run_a_processor_says_so(monkeypatch, capsys):
    monkeypatch.setitem(PROCESSORS, "haswell", PROCESSORS["haswell"]._replace(features="avx9"))
    assert main(["tests/test_where.py", "--processors", "haswell"]) == 0
    assert "this machine can't run it: it has no avx9" in capsys.readouterr().out


def test_a_run_counts_and_quotes(tmp_path):
    """Two tests in a program with three cores: one holds, one does not."""
    path = tmp_path / "test_made.py"
    path.write_text("import os\ndef test_a(): assert os.cpu_count() == 3\n"
                    "def test_b(): assert 'why' == ''\n")  # fmt: skip
    found = run(path, changed(environment(path), {"EMULATED_CORES": "3"}))
    assert found.passed == 1 and found.minutes > 0
    (failure,) = found.failures
    assert failure.startswith("test_b\n") and "assert 'why' == ''" in failure


def test_what_fails_is_shown(capsys, monkeypatch):
    asked = ["tests/test_where.py", "--processors", "this machine", "--threads", "1", "2"]
    monkeypatch.setattr(processors, "doubts", lambda *_: [])
    monkeypatch.setattr(processors, "run", lambda *_: Outcome(3, [], 1.0))
    assert main(asked) == 0 and capsys.readouterr().out.count("3/0    1.0") == 2
    monkeypatch.setattr(processors, "run", lambda *_: Outcome(2, ["test_b\nwhy"], 1.0))
    assert main(asked) == 1
    assert "2 threads, test_where.py: test_b\nwhy" in capsys.readouterr().out
    monkeypatch.setattr(processors, "doubts", lambda *_: ["numba compiles for another"])
    assert main(asked) == 1
    assert "did not take hold: numba compiles for another" in capsys.readouterr().out


def test_the_table_adds_what_belongs_together():
    found = {
        ("a", 1, Path("x.ipynb")): Outcome(5, [], 1.0),
        ("a", 1, Path("y.ipynb")): Outcome(2, ["no"], 0.5),
        ("a", 2, Path("z.py")): Outcome(7, [], 0.25),
    }
    head, row, other = processors.table(found, {"b": "cannot"}, [1, 2]).splitlines()
    assert head.split() == ["chapters", "x", "1", "tests", "x", "2"]
    assert row.split() == ["a", "7/1", "1.5", "7/0", "0.2"]
    assert other.split() == ["b", "-", "-", "cannot"]


def test_targets_and_their_environment(monkeypatch):
    assert target_of("08").name == "08-when-training-fails.ipynb"
    assert target_of("09a").stem == "09a-twelve-minutes"
    with pytest.raises(UserError, match="name another"):
        target_of("tests/test_nothing.py")
    monkeypatch.setenv("GONE", "1")
    found = changed(environment(target_of("tests/test_where.py")), {"GONE": None, "NEW": "2"})
    assert "GONE" not in found and found["NEW"] == "2"
    assert found["PYTHONPATH"].split(":")[0].endswith("inside")


def notebook(path, *cells):
    """Write a notebook at `path` of pairs (source, what it is said to print); return `path`."""
    made = new_notebook(cells=[
        new_code_cell(source, outputs=[new_output("stream", text=f"{said}\n")] if said else [],
                      execution_count=1) for source, said in cells])  # fmt: skip
    nbformat.write(made, path)
    return path


ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # as the environment of a chapter has it
linux = pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux alone")


@linux
def test_a_warm_kernel_is_as_new(tmp_path):
    """Libraries are loaded, but nothing of a notebook before, nor of nanoeuler; its path is its."""
    rerun.warm.cache_clear()
    for name in ("one", "two"):
        (tmp_path / name / "nanoeuler").mkdir(parents=True)
        (tmp_path / name / "nanoeuler" / "__init__.py").write_text(f"HERE = {name!r}\n")
        variables = environment(ROOT / "tests") | ALONE | {"PYTHONPATH": str(tmp_path / name)}
        path = notebook(
            tmp_path / f"{name}.ipynb",
            ("import sys\nprint('numba' in sys.modules, 'nanoeuler' in sys.modules)", "True False"),
            ("import nanoeuler\nprint(nanoeuler.HERE, 'once' in globals())", f"{name} False"),
            ("import os\nonce = os.environ['LEFT'] = 'x'\nprint(os.getcwd())", str(tmp_path)),
        )
        found = run(path, variables)
        assert (found.passed, found.failures) == (3, [])
    assert rerun.kernels(variables) and not rerun.kernels(variables | {"OMP_NUM_THREADS": "1"})


@linux
def test_a_warm_kernel_ends_with_who_asked_for_it(tmp_path):
    """When it is killed it says so; one whose asker has gone is no more."""
    rerun.warm.cache_clear()
    variables = environment(ROOT / "tests") | ALONE
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", str(tmp_path / "connection.json")]
    killed, left = (Kernel(rerun.kernels(variables), command, env=variables) for _ in "ab")
    assert killed.poll() is None
    killed.kill()
    assert killed.wait() == killed.poll() == -signal.SIGKILL
    left.answers.close()
    left.line.close()
    with pytest.raises(ProcessLookupError):
        for _ in range(3000):  # of 10 ms, for a busy machine; it takes 50 ms
            os.kill(left.pid, 0)
            time.sleep(0.01)
