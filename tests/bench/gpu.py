"""Check and time the kernels on a GPU: `python tests/bench/gpu.py [check] [time] [--only FAMILY]`.

The kernels come in families, modules of tests/bench/card, whose __init__ says what a family offers.
All are compiled at once, each in a process. Then each check compares a kernel with float64 and with
the library's error (rows of data/measurements/gpu.json), and each contest times one against the
library, alone at full load and in turn (rows of data/measurements/kernels.json). A family with a
check that failed leaves no times. With $OUT set, the new rows are left there as well.

Rows are written as soon as a check or contest has ended, so that a run that is cut off keeps them.
Run again, it leaves out what has rows of this commit on this device; --again measures anew.

Checks and contests run in a child with a watch-dog: one that breaks the child, or is silent for too
long, is named and left out. --only rows takes one family, --only "rows:norm|copy" of it what has
"norm" or "copy" in its name; --report FILE also writes all rows and what `nanoeuler doctor` says
into one file, to send to somebody who has not this card; --dry compiles, plans and says how long a
run will take, without a GPU. The exit status is 1 where anything failed.

Where a machine is lent for some minutes at a time, go from what is wanted most to what is left; the
seconds are those that --dry foresees, and the first two fit into a call of 420:

    gpu.py --only flash:T1024 update:AdamW      what is at stake now, in five rounds: 90 s
    gpu.py check                                every check that is left: 140 s
    gpu.py time --rounds 1                      every contest that is left, in one round: 320 s

Each leaves out what the ones before it have done, so that the same lines can be sent again.
"""

import argparse
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nanoeuler import measurements
from nanoeuler.engines.gpu.host.compile import build_all
from nanoeuler.engines.gpu.lang.card import THREADS, limit, pretended, require_fit
from nanoeuler.errors import UserError
from nanoeuler.planning import doctor

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]  # as pytest and `nanoeuler bench` have it

import gpu_times  # noqa: E402
from bench.card import NAMES, Bench, families  # noqa: E402
from gpu_rows import FILES, Record, circumstances, errors_of  # noqa: E402
from watched import alive, serve, watch  # noqa: E402

# Seconds, as seen on a machine with an H200 and 16 cores; they foresee a run within about a third.
KERNEL = 8  # of one core, to compile a kernel
START = 4  # until a child has PyTorch and all kernels; one lists, one checks, one times
CHECK = 0.15
ENTRANT = 0.25  # to be set up and timed in turn
ENTRANTS = 4  # of a contest that was never held


# Of what a card refuses that has no room for a kernel, or not its instructions.
ABSENT = re.compile("is for GPUs of capability|bytes of shared memory, and a GPU")


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


def chosen_for(card):
    """The capability that launches are chosen for: the card's, or that which it pretends to have.
    """
    other = pretended()
    return other.capability if card and other else card


def unfit(kernel, card):
    """Why a card of this capability doesn't run a kernel, in words; "" if it does."""
    try:
        require_fit(kernel, card)
    except UserError as error:
        return str(error)
    threads, most = math.prod(kernel.block) * kernel.resident, limit(THREADS, card)
    return f"{threads} threads of {most}" if threads > most else ""


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
        except (RuntimeError, TypeError, UserError) as error:
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
            try:
                return judge(chosen[family].checks(bench)[name]())
            except UserError as error:
                if not ABSENT.search(str(error)):
                    raise
                return {"absent": str(error)}
        contests = {f"{c.what}: {c.case}": c for c in chosen[family].contests(bench)}
        contest = contests[name]
        field = usable(bench.torch, contest.entrants())
        if contest.ours not in field:
            return {"absent": f"{contest.ours} cannot take part"}
        seen = gpu_times.times(bench.torch, field, rounds=rounds, beat=alive)
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
    elif "absent" in outcome:
        print(f"{job}: not on this card, {outcome['absent']}", flush=True)
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


def jobs_of(kind, chosen, outcomes):
    """All jobs of a kind, as the families list them."""
    return [
        f"{kind}: {family}: {name}"
        for family in chosen
        for name in outcomes[f"list: {family}: "].get(kind, [])
    ]


def wanted(job, parts):
    """Whether the part of its family that was asked for is in a job's name."""
    _, family, name = job.split(": ", 2)
    return matches(parts[family], name)


def matches(part, name):
    """Whether a part, words with | between them, has one that is in a name."""
    return any(word in name for word in part.split("|"))


def run(options, chosen, parts, codes):
    """Do what is asked for, print and write what comes of it; returns whether anything failed."""
    commit = options.commit or measurements.commit() if shutil.which("git") else options.commit
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        file.write(pickle.dumps((list(chosen), codes, options.rounds)))
        file.flush()
        command = [sys.executable, __file__, "--child", file.name]
        outcomes = watch(command, [f"list: {family}: " for family in chosen], lambda *_: None)
        device = next((seen["device"] for seen in outcomes.values() if "device" in seen), None)
        record = Record(circumstances(device, commit), options.again)

        def hear(job, outcome):
            tell(job, outcome)
            if "absent" not in outcome:
                record.take(job, outcome)

        for kind in options.what:
            jobs, begin = jobs_of(kind, chosen, outcomes), time.perf_counter()
            rest = record.rest(kind, [job for job in jobs if wanted(job, parts)], jobs)
            outcomes |= watch(command, rest, hear)
            print(f"{kind}: {len(rest)} in {time.perf_counter() - begin:.0f} s", flush=True)
    if options.report:
        record.report(options.report, doctor.report())
        print(f"all rows, and what the doctor says, are in {options.report}")
    return summary(record.rows, outcomes)


def rehearse(chosen):
    """What needs no GPU: the plans of every family that offers them."""
    for family, module in chosen.items():
        for name, launches in getattr(module, "plans", dict)().items():
            grids = ", ".join(f"{x.grid} x {x.kernel.threads}" for x in launches)
            print(f"{family}: {name}: {grids}", flush=True)


def entrants_of(contest, rows):
    """How many take part in a contest, by the rows of when it was held last."""
    title = f"{contest.what}, clock", contest.case
    engines = {row["engine"] for row in rows if (row["what"], row["case"]) == title}
    return len(engines - {"cuda"}) or ENTRANTS


def foresee(options, chosen, parts):
    """A line for each family: how much there is to do, and how many seconds it should take."""
    rows, whole = measurements.load(FILES["time"]), START * (1 + len(options.what))
    each = options.rounds * gpu_times.SECONDS + ENTRANT
    print(f"{whole:5} s  to start")
    for family, module in chosen.items():
        part, kernels = parts[family], len(module.kernels())
        checks = [name for name in module.checks(None) if matches(part, name)]
        contests = [c for c in module.contests(None) if matches(part, f"{c.what}: {c.case}")]
        entrants = sum(entrants_of(contest, rows) for contest in contests)
        seconds = KERNEL * kernels / options.cores
        seconds += CHECK * len(checks) * ("check" in options.what)
        seconds += each * entrants * ("time" in options.what)
        whole += seconds
        print(
            f"{seconds:5.0f} s  {family}: {kernels} kernels, {len(checks)} checks,"
            f" {len(contests)} contests of {entrants} entrants"
        )
    print(f"{whole:5.0f} s  in all, on {options.cores} cores, if no row is there", flush=True)


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
    parser.add_argument("--again", action="store_true", help="also what this commit has rows of")
    parser.add_argument("--report", type=Path, metavar="FILE", help="all rows in one file")
    parser.add_argument("--cores", type=int, default=16, help="of the machine that --dry foresees")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the child ends too
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
    if options.dry:
        rehearse(chosen)
        foresee(options, chosen, parts)
    makers, target = makers_of(chosen), chosen_for(card)
    if target:
        able = {name: make for name, make in makers.items() if not unfit(make(), target)}
        absent, makers = len(makers) - len(able), able
        print(f"{absent} kernels are for other cards than one of capability {target}", flush=True)
    codes, broken = compiled(makers, card, os.cpu_count())
    if options.dry:
        return int(bool(broken))
    bad = run(options, chosen, parts, codes)
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    return int(bad or bool(broken))


if __name__ == "__main__":
    sys.exit(main())
