"""The script for the card, as far as no GPU is needed: its watch-dog, its families, its rows."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gpu_times
import numpy as np
import pytest
from bench.card import NAMES, families, ghost
from bench.gpu import (
    ABSENT,
    ENTRANTS,
    chosen_for,
    entrants_of,
    foresee,
    judge,
    makers_of,
    select,
    unfit,
    wanted,
)
from gpu_rows import Record, check_rows, time_rows
from watched import watch

from nanoeuler.engines.gpu.gemm.mma_form import MmaForm
from nanoeuler.engines.gpu.gemm.mma_kernel import mma_kernel
from nanoeuler.engines.gpu.gemm.wgmma_form import Form
from nanoeuler.engines.gpu.gemm.wgmma_kernel import gemm_kernel
from nanoeuler.engines.gpu.lang.card import PRETENDED
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch

# What the child of a test does; it imports little, so that it begins at once.
CHILD = f"""
import os, sys, time
sys.path.append({str(Path(__file__).parent / "helpers")!r})
from watched import alive, serve

def work(job):
    if job == "hang":
        time.sleep(60)
    if job == "long":
        for _ in range(5):
            time.sleep(1)
            alive()
    if job == "late":
        alive()
    if job in ("die", "late"):
        os._exit(3)
    if job == "wrong":
        raise ValueError("far off")
    if job == "illegal":
        raise RuntimeError("an illegal address")
    print("a line of its own")
    return {{"answer": f"{{job}} in {{os.getpid()}}"}}

serve(work)
"""


def test_what_breaks_the_child_or_hangs_is_named_and_the_rest_goes_on(capsys):
    jobs, heard = ["a", "hang", "b", "die", "wrong", "c", "illegal", "d"], []
    outcomes = watch([sys.executable, "-c", CHILD], jobs, lambda job, _: heard.append(job), 3)
    assert heard == list(outcomes) == jobs
    assert outcomes["hang"]["failed"] == "the process was silent for 3 s, code -9"
    assert outcomes["die"]["failed"] == "the process ended, code 3"
    assert outcomes["wrong"]["failed"] == "ValueError: far off"
    assert outcomes["illegal"]["failed"] == "RuntimeError: an illegal address"
    pids = [outcomes[job]["answer"].split()[-1] for job in "abcd"]
    assert len({*pids}) == 4  # three children were lost on the way
    assert capsys.readouterr().out.count("a line of its own") == 4


def test_what_says_that_it_is_alive_may_take_long():
    outcomes = watch([sys.executable, "-c", CHILD], ["long", "late"], lambda *_: None, 3)
    assert "answer" in outcomes["long"]  # 5 s, of which never 3 in silence
    assert outcomes["late"]["failed"] == "the process ended, code 3"


def test_a_child_that_never_begins_ends_it():
    outcomes = watch([sys.executable, "-c", "import nothing_of_the_kind"], ["a", "b"], print)
    assert all("before it began" in outcomes[job]["failed"] for job in "ab")


@pytest.mark.parametrize("family", families())
def test_every_family_has_kernels_and_plans_of_them(family):
    module = families()[family]
    made = {name: make() for name, make in module.kernels().items()}
    assert made and all(isinstance(kernel, Kernel) for kernel in made.values())
    assert all(make() is made[name] for name, make in module.kernels().items())
    for launches in getattr(module, "plans", dict)().values():
        assert all(isinstance(launch, Launch) for launch in launches)
        assert {launch.kernel for launch in launches} <= {*made.values()}
    assert {f"{family}: {name}" for name in made} == {*makers_of({family: module})}


def test_a_ghost_is_laid_out_like_an_array():
    whole, array = ghost((3, 5, 8)), np.zeros((3, 5, 8), np.uint16)
    assert whole.strides == array.strides == (80, 16, 2)
    for part in np.s_[:2], np.s_[:, :3], np.s_[1:, :, :4]:
        assert (whole[part].shape, whole[part].strides) == (array[part].shape, array[part].strides)


def test_an_error_may_be_twice_the_librarys_or_twice_a_rounding():
    seen = {"error": 2e-3, "peer": 1e-3}
    assert judge(seen) is seen
    with pytest.raises(ValueError, match="error 2.10e-03 above 2.00e-03"):
        judge({"error": 2.1e-3, "peer": 1e-3})
    with pytest.raises(ValueError):
        judge({"error": float("nan"), "peer": 1e-3})
    judge({"error": 2.1e-3, "peer": 0.0, "least": 2**-9})
    judge({"error": 0.0})
    with pytest.raises(ValueError, match="dq error"):
        judge({"o": seen, "dq": {"error": 1e-9}})


def test_rows_are_named_as_the_bars_name_them():
    seen = {"alone": 1.0, "in turn": 2.0, "MHz": 1500, "W": 600}
    outcome = {
        "what": "matmul", "case": "NT", "ours": "a", "peers": ["cuBLAS", "none"],
        "times": {"a": seen, "b": seen, "cuBLAS": seen | {"alone": 4.0}},
    }  # fmt: skip
    rows = [*time_rows(outcome, {})]
    bar = [row for row in rows if row["what"] == "matmul" and row["engine"] == "cuda"]
    assert bar == [{"what": "matmul", "case": "NT", "engine": "cuda", "value": 1.0, "unit": "ms",
                    "peer": "cuBLAS", "peer_value": 4.0}]  # fmt: skip
    assert {row["engine"] for row in rows if row["what"] == "matmul"} == {"cuda", "a", "b"}
    row, part = check_rows("check: flash: x", PARTS, {})
    assert (row["case"], row["peer_value"], part["peer"]) == ("flash: x, o", 2, None)


def test_only_names_families_and_parts():
    assert select(["rows", "gemm:NT"], {"rows": 0, "gemm": 0}) == {"rows": "", "gemm": "NT"}
    with pytest.raises(SystemExit, match="no family raws: choose of gemm, rows"):
        select(["raws"], ["gemm", "rows"])


# ---- Rows are there as soon as there are any

SEEN = {"alone": 1.0, "in turn": 2.0, "MHz": 1500, "W": 600}
WHERE = {"device": "a card", "commit": "abc1234", "date": "2026-11-22", "versions": {}}
PARTS = {"o": {"error": 1.0, "peer": 2.0}, "dq": {"error": 3.0}}


def held(what, case, who=("ours", "torch")):
    """The outcome of a contest."""
    return {"what": what, "case": case, "ours": "ours", "peers": ["torch"],
            "times": dict.fromkeys(who, SEEN)}  # fmt: skip


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty project with a folder for what goes out, where tests stand."""
    (tmp_path / "_toc.yml").write_text("")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path


def stored(project, name):
    """The rows of a kind in both places, which hold the same."""
    places = project / "data" / "measurements", project / "out"
    first, other = (json.loads((place / f"{name}.json").read_text()) for place in places)
    assert first == other
    return first


# The child of a run that is cut off in its second contest, and the run. PATHS: where both look.
PATHS = f"import sys; sys.path[:0] = {[str(Path(__file__).parent / 'helpers'), *sys.path]!r}"
BUSY = f"""{PATHS}
import os, time
from pathlib import Path
from watched import serve

def work(job):
    if job.endswith("second"):
        Path("pid.part").write_text(str(os.getpid()))
        os.rename("pid.part", "pid")
        time.sleep(60)
    return {held("matmul", "first")!r}

serve(work)
"""
RUN = f"""{PATHS}
import signal
from gpu_rows import Record
from watched import watch

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
record = Record({WHERE!r})
jobs = ["time: gemm: matmul: first", "time: gemm: matmul: second"]
watch([sys.executable, "-c", {BUSY!r}], jobs, record.take)
"""


def is_there(pid):
    """Whether there is a process of this number that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_a_run_that_is_cut_off_leaves_the_rows_of_what_it_has_done(project, how):
    run = subprocess.Popen([sys.executable, "-c", RUN])
    begin, there = time.monotonic(), project / "data" / "measurements" / "kernels.json"
    while not (Path("pid").exists() and there.exists()):  # the second has begun, 60 s long
        assert time.monotonic() - begin < 30 and run.poll() is None
        time.sleep(0.05)
    child = int(Path("pid").read_text())
    run.send_signal(how)
    run.wait()
    rows = stored(project, "kernels")
    assert {row["case"] for row in rows} == {"first"}
    assert rows == [*time_rows(held("matmul", "first"), WHERE)]
    if how == signal.SIGTERM:
        assert not is_there(child)  # it would be in the way of whatever runs next
    else:  # it will end when it has something to say; nobody hears it
        os.kill(child, signal.SIGKILL)
    assert not [*project.rglob(".*.part")]


def test_a_report_is_one_file_of_all_that_is_known(project):
    record = Record(WHERE)
    record.take("time: gemm: matmul: a", held("matmul", "a"))
    record.take("check: rows: norm", {"failed": "the process ended, code 3"})
    record.report(project / "card.json", "Linux\ntwo cores")
    said = json.loads((project / "card.json").read_text())
    assert said["failed"] == ["rows"] and said["machine"] == ["Linux", "two cores"]
    assert said["time"] == stored(project, "kernels") and said["check"] == []
    assert {key: said[key] for key in WHERE} == WHERE


def test_a_run_goes_on_where_one_of_the_same_commit_has_ended(project):
    jobs = ["time: gemm: matmul: a", "time: gemm: matmul: b", "time: gemm: matmul, bias: a"]
    record = Record(WHERE)
    assert record.rest("time", jobs, jobs) == jobs
    record.take(jobs[0], held("matmul", "a"))
    record.take(jobs[1], {"failed": "the process ended, code 3"})
    again = Record(WHERE)
    assert again.rest("time", jobs, jobs) == jobs[1:]
    assert again.rows["time"] == record.rows["time"] == stored(project, "kernels")
    for other in (
        Record(WHERE | {"commit": "def5678"}), Record(WHERE | {"device": "another"}),
        Record(WHERE | {"commit": ""}), Record(WHERE, again=True),
    ):  # fmt: skip
        assert other.rest("time", jobs, jobs) == jobs
        assert not other.rows["time"]
    changed = Record(WHERE | {"commit": "abc1234-dirty"})
    changed.take(jobs[0], held("matmul", "a"))  # what these files held is not known afterwards
    assert Record(changed.where).rest("time", jobs, jobs) == jobs


def test_a_check_is_done_if_its_own_parts_are_there(project):
    jobs = ["check: flash: x", "check: flash: x, packed", "check: flash: y"]
    Record(WHERE).take(jobs[1], PARTS)
    assert [row["case"] for row in stored(project, "gpu")] == [
        "flash: x, packed, o", "flash: x, packed, dq",
    ]  # fmt: skip
    assert Record(WHERE).rest("check", jobs, jobs) == [jobs[0], jobs[2]]
    assert Record(WHERE).rest("check", jobs[:1], jobs) == jobs[:1]
    Record(WHERE).take(jobs[0], PARTS)
    assert Record(WHERE).rest("check", jobs, jobs) == jobs[2:]


def test_a_family_with_a_wrong_kernel_leaves_no_times(project):
    record = Record(WHERE)
    record.take("check: gemm: x", {"failed": "ValueError: far off"})
    record.take("time: gemm: matmul: a", held("matmul", "a"))
    assert not record.rows["time"] and not (project / "out" / "kernels.json").exists()
    record.take("time: rows: norm: a", held("norm", "a"))
    assert {row["what"].split(",")[0] for row in stored(project, "kernels")} == {"norm"}


# ---- How long it will take


def test_dry_says_how_long_each_family_will_take(capsys):
    chosen = families(["flash", "rows"])
    parts, words = {"flash": "T1024", "rows": "norm"}, {"what": ["check", "time"], "cores": 16}

    def seconds(**changes):
        foresee(SimpleNamespace(**words | {"rounds": 5} | changes), chosen, parts)
        lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
        return {text.split(":")[0].split()[0]: int(number) for number, _, text in lines}

    all_ = seconds()
    assert [*all_] == ["to", "flash", "rows", "in"]
    assert abs(all_["in"] - all_["to"] - all_["flash"] - all_["rows"]) <= 2  # of rounding
    assert seconds(rounds=1)["flash"] < all_["flash"]
    checks, times = seconds(what=["check"]), seconds(what=["time"])
    assert max(checks["flash"], times["flash"]) < all_["flash"] <= checks["flash"] + times["flash"]
    assert seconds(cores=1)["rows"] > all_["rows"]


@pytest.mark.parametrize("family", NAMES)
def test_families_list_their_jobs_without_a_card(family):
    module = families()[family]
    jobs = [f"check: {family}: {name}" for name in module.checks(None)]
    jobs += [f"time: {family}: {c.what}: {c.case}" for c in module.contests(None)]
    assert len({*jobs}) == len(jobs) and all(wanted(job, {family: ""}) for job in jobs)


def test_a_contest_has_as_many_entrants_as_when_it_was_held():
    rows = [*time_rows(held("matmul", "a", ("ours", "other", "torch")), WHERE)]
    assert entrants_of(SimpleNamespace(what="matmul", case="a"), rows) == 3
    assert entrants_of(SimpleNamespace(what="matmul", case="b"), rows) == ENTRANTS


def test_a_contest_says_before_each_turn_that_it_goes_on(monkeypatch):
    heard = []
    monkeypatch.setattr(gpu_times, "count_of", lambda *_: 1)
    monkeypatch.setattr(gpu_times, "graph", lambda *_: SimpleNamespace(replay=None))
    monkeypatch.setattr(gpu_times, "make_sensor", lambda: None)
    monkeypatch.setattr(gpu_times, "alone", lambda *_: (1.0, [1500, 600]))
    monkeypatch.setattr(gpu_times, "replay", lambda *_: 1.0)
    gpu_times.times(None, {"ours": [], "torch": []}, rounds=3, beat=lambda: heard.append("on"))
    assert len(heard) == 6


def test_of_another_card_only_what_it_runs_is_compiled(monkeypatch):
    monkeypatch.delenv(PRETENDED, raising=False)
    assert (chosen_for((8, 6)), chosen_for(None)) == ((8, 6), None)
    monkeypatch.setenv(PRETENDED, "8.9")
    assert (chosen_for((9, 0)), chosen_for(None)) == ((8, 9), None)
    wide, narrow = (mma_kernel(MmaForm("NT", columns=columns)) for columns in (256, 128))
    assert unfit(narrow, (8, 9)) == unfit(wide, (8, 0)) == ""
    assert ABSENT.search(unfit(wide, (8, 9))) and ABSENT.search(unfit(gemm_kernel(Form()), (8, 0)))
    crowd = Kernel(lambda: None, "", 1024, target=(8, 0), resident=2)
    assert unfit(crowd, (8, 9)) == "2048 threads of 1536" and unfit(crowd, (9, 0)) == ""
