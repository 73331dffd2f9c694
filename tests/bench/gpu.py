"""Check and time the kernels on a GPU: `python tests/bench/gpu.py [check] [time] [--only FAMILY]`.

The kernels come in families, modules of tests/bench/card, whose __init__ says what a family offers.
All are compiled at once, each in a process. Then each check compares a kernel with float64 and with
the library's error (rows of data/measurements/gpu.json), and each contest times one against the
library, alone at full load and in turn (rows of data/measurements/kernels.json). A family with a
check that failed leaves no times. With $OUT set, the new rows are left there as well.

Checks and contests run in a child with a watch-dog: one that breaks the child, or is silent for too
long, is named and left out. --only rows takes one family, --only rows:norm of it what has "norm" in
its name; --dry compiles and plans, without a GPU. The exit status is 1 where anything failed.
"""

import argparse
import datetime
import json
import os
import pickle
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from nanoeuler import measurements
from nanoeuler.engines.gpu.compile import build_all
from nanoeuler.errors import UserError

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]  # as pytest and `nanoeuler bench` have it

import gpu_times  # noqa: E402
from bench.card import NAMES, Bench, families  # noqa: E402
from watched import serve, watch  # noqa: E402

PACKAGES = "numpy", "numba", "numba-cuda", "torch"  # whose versions all rows name
FILES = {"check": "gpu", "time": "kernels"}  # where rows go, in data/measurements


# ---- What is compiled


def capability():
    """The compute capability of the card, as (9, 0); None without one."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    says = subprocess.run(command, capture_output=True, text=True)
    if says.returncode:
        return None
    return tuple(int(part) for part in says.stdout.split()[0].split("."))


def makers_of(chosen):
    """"family: name" -> maker of every kernel of the families."""
    return {
        f"{family}: {name}": make
        for family, module in chosen.items()
        for name, make in module.kernels().items()
    }


def compiled(makers, card, workers):
    """Name -> code for the card of all kernels that compile, and the names of the others."""
    begin, codes, broken = time.perf_counter(), {}, []
    for name, code in build_all(makers, workers, card).items():
        if isinstance(code, Exception):
            print(f"{name}: DOES NOT COMPILE, {code}", flush=True)
            broken.append(name)
            continue
        codes[name] = code
        print(f"{name}: {code.registers} registers, {code.spills} spilled", *code.warnings)
    print(f"{len(codes)} kernels in {time.perf_counter() - begin:.1f} s", flush=True)
    return codes, broken


# ---- The child: a job is "check", "time" or "list", a family and a name, with colons


def errors_of(outcome):
    """Part -> errors of a check's outcome; the part is "" where there is but one."""
    return {"": outcome} if "error" in outcome else outcome


def judge(outcome):
    """ValueError where a check's error is too large for what the library makes of it."""
    for part, seen in errors_of(outcome).items():
        limit = 2 * max(seen.get("peer") or 0.0, seen.get("least", 0.0))
        if not seen["error"] <= limit:
            raise ValueError(f"{part} error {seen['error']:.2e} above {limit:.2e}".strip())
    return outcome


def usable(torch, field):
    """The entrants whose first call does not raise; the others are named."""
    made = {}
    for who, calls in field.items():
        try:
            calls[0]()
            torch.cuda.synchronize()
            made[who] = calls
        except (RuntimeError, TypeError) as error:
            print(f"  no {who}: {str(error).splitlines()[0][:90]}", flush=True)
    return made


def child(path):
    """Do the jobs that the watch-dog hands in; `path` has the families and the compiled kernels."""
    names, codes, rounds = pickle.loads(Path(path).read_bytes())
    chosen = families(names)
    bench = Bench(makers_of(chosen), codes)

    def do(job):
        kind, family, name = job.split(": ", 2)
        if kind == "list":
            checks = chosen[family].checks(bench)
            contests = [f"{c.what}: {c.case}" for c in chosen[family].contests(bench)]
            return {"check": list(checks), "time": contests, "device": bench.device.name}
        if kind == "check":
            return judge(chosen[family].checks(bench)[name]())
        contests = {f"{c.what}: {c.case}": c for c in chosen[family].contests(bench)}
        contest = contests[name]
        field = usable(bench.torch, contest.entrants())
        seen = gpu_times.times(bench.torch, field, rounds=rounds)
        del field
        bench.torch.cuda.empty_cache()
        names = {"what": contest.what, "case": contest.case}
        return names | {"times": seen, "ours": contest.ours, "peers": contest.peers}

    serve(do)


# ---- What it says


def tell(job, outcome):
    """A line or a few about what came of a job."""
    kind, _, name = job.partition(": ")
    if "failed" in outcome:
        print(f"{job}: FAILED, {outcome['failed']}", flush=True)
    elif kind == "check":
        for part, seen in errors_of(outcome).items():
            peer = "" if seen.get("peer") is None else f", library {seen['peer']:.2e}"
            print(f"{job}{part and ', ' + part}: {seen['error']:.2e}{peer}", flush=True)
    elif kind == "time":
        print(name, flush=True)
        times = outcome["times"]
        first = times[next((who for who in times if who in outcome["peers"]), next(iter(times)))]
        for who, seen in times.items():
            print(
                f"  {seen['alone']:.4f} ms alone ({seen['alone'] / first['alone']:.3f}), "
                f"{seen['in turn']:.4f} in turn ({seen['in turn'] / first['in turn']:.3f}), "
                f"{seen['MHz']:.0f} MHz {seen['W']:.0f} W  {who}", flush=True,
            )  # fmt: skip


# ---- Rows


def circumstances(device, commit):
    """What all rows say of where they were measured."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {
        "device": device, "commit": commit, "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()} | versions,
    }  # fmt: skip


def check_rows(job, outcome, where):
    """A row for each part of a check."""
    name = job.split(": ", 1)[1]
    for part, seen in errors_of(outcome).items():
        peer = seen.get("peer")
        yield where | {
            "what": "check", "case": f"{name}{part and ', ' + part}", "engine": "cuda",
            "value": seen["error"], "unit": seen.get("unit", "relative to float64"),
            "peer": None if peer is None else "torch", "peer_value": peer,
        }  # fmt: skip


def time_rows(outcome, where):
    """Rows of one contest: ours under "cuda", each other entrant under its own name."""
    what, case, seen = outcome["what"], outcome["case"], outcome["times"]
    peers = [who for who in outcome["peers"] if who in seen]

    def row(what, engine, unit, value, peer=None, peer_value=None):
        return where | {
            "what": what, "case": case, "engine": engine, "value": round(value, 5),
            "unit": unit, "peer": peer, "peer_value": peer_value and round(peer_value, 5),
        }  # fmt: skip

    names = [(who, who) for who in seen] + [("cuda", outcome["ours"])] * (outcome["ours"] in seen)
    for engine, who in names:
        yield row(f"{what}, clock", engine, "MHz", seen[who]["MHz"])
        yield row(f"{what}, power", engine, "W", seen[who]["W"])
        for way, title in (("alone", what), ("in turn", f"{what}, in turn")):
            for peer in peers if who not in outcome["peers"] else []:
                yield row(title, engine, "ms", seen[who][way], peer, seen[peer][way])
            if not outcome["peers"]:
                yield row(title, engine, "ms", seen[who][way])


def save(rows):
    """Put rows into the files where they belong, and by themselves where $OUT says."""
    for kind, name in FILES.items():
        if rows[kind] and os.environ.get("OUT"):
            path = Path(os.environ["OUT"]) / f"{name}.json"
            before = json.loads(path.read_text()) if path.exists() else []
            path.write_text(json.dumps(before + rows[kind], indent=0))
        try:
            measurements.update(name, rows[kind]) if rows[kind] else None
        except UserError as error:  # a copy without the book has no place for them
            print(error)


def summary(rows, outcomes):
    """The short table: ours against the library; and what failed. Returns whether anything did."""
    for row in rows["time"]:
        if row["engine"] == "cuda" and row["unit"] == "ms" and row["peer"]:
            ratio = row["value"] / row["peer_value"]
            name = f"{row['what']}, {row['case']} ({row['peer']})"
            print(f"{ratio:.3f}  {row['value']:.4f} ms  {name}")
    failures = {job: seen["failed"] for job, seen in outcomes.items() if "failed" in seen}
    for job, why in failures.items():
        print("FAILED", job, why)
    return bool(failures)


# ---- The whole


def run(options, chosen, parts, codes):
    """Do what is asked for, print it, save the rows; returns whether anything failed."""
    commit = options.commit or measurements.commit() if shutil.which("git") else options.commit
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        file.write(pickle.dumps((list(chosen), codes, options.rounds)))
        file.flush()
        command = [sys.executable, __file__, "--child", file.name]
        outcomes = watch(command, [f"list: {family}: " for family in chosen], lambda *_: None)
        rows, device = {"check": [], "time": []}, None
        for kind in options.what:
            jobs = []
            for family in chosen:
                listed = outcomes[f"list: {family}: "]
                device = listed.get("device", device)
                names = [n for n in listed.get(kind, []) if parts[family] in n]
                jobs += [f"{kind}: {family}: {name}" for name in names]
            outcomes |= watch(command, jobs, tell)
    where = circumstances(device, commit)
    bad = {job.split(": ")[1] for job, seen in outcomes.items()
           if "failed" in seen and job.startswith("check")}  # fmt: skip
    for job, outcome in outcomes.items():
        kind, family, _ = job.split(": ", 2)
        if kind == "check" and "failed" not in outcome:
            rows["check"] += check_rows(job, outcome, where)
        if kind == "time" and "failed" not in outcome and family not in bad:
            rows["time"] += time_rows(outcome, where)
    save(rows)
    return summary(rows, outcomes)


def rehearse(chosen):
    """What needs no GPU: the plans of every family that offers them."""
    for family, module in chosen.items():
        for name, launches in getattr(module, "plans", dict)().items():
            grids = ", ".join(f"{x.grid} x {x.kernel.threads}" for x in launches)
            print(f"{family}: {name}: {grids}", flush=True)


def select(only, known):
    """Family -> what its names must contain, of words like "rows" and "rows:norm"."""
    parts = dict(word.partition(":")[::2] for word in only) or dict.fromkeys(known, "")
    if strange := parts.keys() - {*known}:
        sys.exit(f"no family {', '.join(sorted(strange))}: choose of {', '.join(known)}")
    return parts


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help="check, time; both if nothing is said")
    parser.add_argument("--dry", action="store_true", help="compile and plan, without a GPU")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot say it")
    parser.add_argument("--only", nargs="+", default=[], help="families, or family:part of names")
    parser.add_argument("--rounds", type=int, default=gpu_times.ROUNDS, help="of timing, alone")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child)
    if strange := {*options.what} - {*FILES}:
        parser.error(f"what to do is check or time, before --only, not {', '.join(strange)}")
    options.what = options.what or list(FILES)
    begin, card = time.perf_counter(), capability()
    parts = select(options.only, NAMES)
    chosen = families([name for name in NAMES if name in parts])
    if not card and not options.dry:
        print("there is no NVIDIA GPU here: nothing was checked; --dry compiles the kernels")
        return 0
    codes, broken = compiled(makers_of(chosen), card, os.cpu_count())
    if options.dry:
        rehearse(chosen)
        return int(bool(broken))
    bad = run(options, chosen, parts, codes)
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    return int(bad or bool(broken))


if __name__ == "__main__":
    sys.exit(main())
