"""The tool that runs chapters and tests on other processors: each takes hold, failures are told."""

import platform
from pathlib import Path

import processors
import pytest
from processors import PROCESSORS, doubts, main
from rerun import Outcome, changed, environment, run, target_of

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
