"""The script for the card, as far as no GPU is needed: its watch-dog, its families, its rows."""

import sys
from pathlib import Path

import pytest
from bench.card import families, ghost
from bench.gpu import check_rows, judge, makers_of, select, time_rows
from watched import watch

from nanoeuler.engines.gpu.kernel import Kernel, Launch

# What the child of a test does; it imports little, so that it begins at once.
CHILD = f"""
import os, sys, time
sys.path.append({str(Path(__file__).parent / "helpers")!r})
from watched import serve

def work(job):
    if job == "hang":
        time.sleep(60)
    if job == "die":
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
    assert ghost((3, 5, 8)).strides == (80, 16, 2)


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
    parts = {"o": {"error": 1, "peer": 2}, "dq": {"error": 3}}
    row, part = check_rows("check: flash: x", parts, {})
    assert (row["case"], row["peer_value"], part["peer"]) == ("flash: x, o", 2, None)


def test_only_names_families_and_parts():
    assert select(["rows", "gemm:NT"], {"rows": 0, "gemm": 0}) == {"rows": "", "gemm": "NT"}
    with pytest.raises(SystemExit, match="no family raws: choose of gemm, rows"):
        select(["raws"], ["gemm", "rows"])
