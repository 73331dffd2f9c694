"""Check and time the kernels on a GPU: `python tests/bench/gpu.py check products`.

All variants are compiled at once, each in a process. Then `check` compares each with float64 on
ragged sizes and on those of a training step, on poisoned outputs and again and again, for equal
bits; and `products` times each against the library, alone at full load and in turn. Alone, a
contestant runs for some tenths of a second by itself, so that its own use of energy sets the card's
clock; in turn all share one clock, which flatters hungry kernels. Rows go to
data/measurements/kernels.json, and to $OUT where that is set.

The checks and the timings run in a child. One that fails, or is silent for too long, is named and
left out, and another child goes on with the rest. `--dry` compiles and plans, without a GPU.
"""

import argparse
import datetime
import json
import math
import os
import pickle
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median

import numpy as np

from nanoeuler import measurements
from nanoeuler.engines.gpu.compile import build_all
from nanoeuler.engines.gpu.gemm import choose, product, sizes
from nanoeuler.engines.gpu.gemm_form import Form
from nanoeuler.engines.gpu.gemm_wgmma import gemm_kernel, sum_kernel

SILENCE = 60  # seconds without a line after which a child hangs
SECONDS, ROUNDS = 0.5, 5  # of each contestant alone, each time; the first half of it warms up
TURNS, GRAPH_MS = 11, 10  # graphs of each contestant in turn, and what one takes
WORST = {"bf16": 4e-3, "float32": 4e-5}  # relative errors; rounding alone gives less than half
RAGGED = [(1000, 1000, 200), (136, 264, 72), (520, 1032, 4104)]
TINY = 8, 8, 8  # smaller than any box
REPEATS = 8  # of each product, for equal bits
STEP = [(16384, 768, 768), (2304, 768, 16384)]


@dataclass
class Contest:
    """A row: what and case are its names, forms the contestants, peers the library's ways."""

    what: str
    case: str
    shape: tuple[int, int, int]
    forms: tuple[Form, ...]
    peers: tuple[str, ...]
    cuts: tuple[str, ...] = ("best",)


def bf16(layout, pingpong=False, cluster=1, epilogue="store"):
    return Form(layout, pingpong, cluster, epilogue)


def wide(epilogue, cluster, pieces):
    return Form("TN", False, cluster, epilogue, "float32", pieces)


NT = tuple(bf16("NT", p, c) for p in (False, True) for c in (1, 2))
NN = bf16("NN"), bf16("NN", False, 2), bf16("NN", True)
LONG = Form("NT", False, 2, pieces="together"), Form("NN", False, 2, pieces="together")
TN = wide("store", 1, "no"), wide("store", 2, "no"), wide("add", 2, "no")
CUT = (
    *(wide("store", c, "together") for c in (1, 2)), wide("store", 2, "after"),
    wide("add", 2, "together"),
)  # fmt: skip
CURVED = tuple(bf16("NT", p, c, "bias and gelu") for p in (False, True) for c in (1, 2))
RESIDUAL = bf16("NT", False, 1, "residual"), bf16("NT", False, 2, "residual")
OTHERS = bf16("NT", False, 2, "bias"), bf16("TN", False, 2), wide("add", 1, "after")


def case(layout, m, n, k, out=""):
    return f"{layout} {m}x{n}x{k} bf16{out}"


def choice(contest):
    """The form that the package chooses for a contest."""
    form = contest.forms[0]
    return choose(form.layout, *contest.shape, form.epilogue, form.out)


def contests():
    """All contests, those of the bar first."""
    f32 = " to float32"

    def plain(layout, forms, *shapes):
        return [Contest("matmul", case(layout, *s), s, forms, ("cuBLAS",)) for s in shapes]

    def split(forms, cuts, *shapes):
        return [Contest("matmul", case("TN", *s, f32), s, forms, ("cuBLAS",), cuts) for s in shapes]

    def fused(what, forms, peers, *shapes):
        return [Contest(what, case("NT", *s), s, forms, peers) for s in shapes]

    step = 16384
    made = [
        *plain("NT", (*NT, LONG[0]), (8192,) * 3, (step, 768, 3072)),
        *plain("NT", NT, (step, 2304, 768), (step, 50304, 768)),
        *plain("NN", (*NN, LONG[1]), (step, 768, 50304)),
        *split(CUT, ("best", "level"), (768, 768, step)),
        *split(TN, ("best",), (50304, 768, step)),
        *fused("matmul, bias and GELU", CURVED, ("torch", "cuBLASLt"), (step, 3072, 768)),
        *split(CUT, ("best",), (2304, 768, step), (3072, 768, step), (768, 3072, step)),
        *plain("NT", NT, (step, 768, 768), (step, 3072, 768)),
        *plain("NN", NN, (step, 768, 768), (step, 768, 3072), (step, 3072, 768)),
        *plain("NN", NN, (step, 768, 2304)),
        *fused("matmul and residual", RESIDUAL, ("torch",), (step, 768, 3072), (step, 768, 768)),
    ]
    for contest in made:  # what the package chooses is always there
        contest.forms = tuple(dict.fromkeys((*contest.forms, choice(contest))))
    return made


def label(form, cut=""):
    """A form in a few words."""
    parts = [
        form.layout, "ping-pong" if form.pingpong else "cooperative",
        "cluster 2" if form.cluster == 2 else "", form.epilogue if form.epilogue != "store" else "",
        form.out if form.out != "bf16" else "", form.pieces if form.pieces != "no" else "", cut,
    ]  # fmt: skip
    return " ".join(part for part in parts if part)


# All forms that are compiled and checked, in the order of their names.
FORMS = sorted({*OTHERS, *(form for contest in contests() for form in contest.forms)}, key=label)


def kernels(form):
    """Name -> maker of each kernel of a form."""
    makers = {label(form): partial(gemm_kernel, form)}
    if form.pieces == "after":
        makers[label(form) + ": sum"] = partial(sum_kernel, form)
    return makers


# ---- Operands


class Shape:
    """Stands in for an array where there is no GPU."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.strides = tuple(
            math.prod(shape[i + 1 :]) * self.dtype.itemsize for i in range(len(shape))
        )


def stored(form, m, n, k):
    """The shapes of A, B, C and aux as they are stored; None for no aux."""
    a = (k, m) if form.layout[0] == "T" else (m, k)
    b = (k, n) if form.layout[1] == "N" else (n, k)
    aux = {"residual": (m, n), "bias": (n,), "bias and gelu": (n,)}.get(form.epilogue)
    return a, b, (m, n), aux


def dry_plan(form, shape, cut):
    """The launches of a product without arrays; returns how many there are."""
    a, b, c, aux = stored(form, *shape)
    out = np.float32 if form.out == "float32" else np.uint16
    fake = Shape(a, np.uint16), Shape(b, np.uint16), Shape(c, out)
    sizes(form, *fake, aux and Shape(aux, np.uint16))
    return len(product(form, *fake, aux and Shape(aux, np.uint16), cut=cut))


class Bench:
    """What the child has: torch, the device and the compiled kernels."""

    def __init__(self, codes):
        import torch

        from nanoeuler.engines.gpu.device import Device

        self.torch, self.codes = torch, codes
        torch.zeros(1, device="cuda")
        self.device = Device()

    def random(self, *shape):
        return self.torch.randn(*shape, device="cuda", dtype=self.torch.bfloat16)

    def view(self, tensor):
        """A tensor as the kernels take it; bf16 as uint16."""
        from nanoeuler.engines.gpu.device import DeviceArray

        size = tensor.element_size()
        strides = tuple(step * size for step in tensor.stride())
        kind = np.dtype(np.float32 if size == 4 else np.uint16)
        return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), kind, strides, tensor)

    def ours(self, form, a, b, c, aux=None, cut="best"):
        """A function that puts one product on torch's stream."""
        for name, maker in kernels(form).items():
            self.device.load(maker(), self.codes[name])
        views = [tensor if tensor is None else self.view(tensor) for tensor in (a, b, c, aux)]
        launches = product(form, *views, place=self.device.array, cut=cut)
        starts = [self.device.prepare(launch) for launch in launches]

        def call():
            stream = self.torch.cuda.current_stream().cuda_stream
            for start in starts:
                start(stream)

        return call

    def library(self, peer, form, a, b, c, aux):
        """A function that does the same with the library; `peer` says how."""
        torch = self.torch
        a = a.T if form.layout[0] == "T" else a
        b = b.T if form.layout[1] == "T" else b
        if peer == "cuBLAS" and form.out == "float32":
            return lambda: torch.mm(a, b, out_dtype=torch.float32)
        if peer == "cuBLAS":
            return lambda: torch.mm(a, b, out=c)
        if form.epilogue == "residual":
            return lambda: torch.addmm(aux, a, b, out=c)
        if peer == "cuBLASLt":
            return lambda: torch._addmm_activation(aux, a, b, use_gelu=True)
        gelu = torch.nn.functional.gelu
        return lambda: gelu(torch.addmm(aux, a, b), approximate="tanh")

    def operands(self, form, shape):
        """Random A, B and aux, and a C of zeros."""
        a, b, c, aux = stored(form, *shape)
        kind = self.torch.float32 if form.out == "float32" else self.torch.bfloat16
        zeros = self.torch.zeros(c, device="cuda", dtype=kind)
        return self.random(*a), self.random(*b), zeros, aux and self.random(*aux)


# ---- Checks


def check(bench, form, shape):
    """The relative error of one product, and the library's; ValueError where it is not right."""
    torch = bench.torch
    m, n, k = shape
    a, b, _, aux = bench.operands(form, shape)
    kind = torch.float32 if form.out == "float32" else torch.bfloat16
    around = torch.full((m + 2, n), math.nan, device="cuda", dtype=kind)  # rows before and after
    before = torch.randn(m, n, device="cuda") if form.epilogue == "add" else None
    want = (a.T if form.layout[0] == "T" else a).double()
    want = want @ (b.T if form.layout[1] == "T" else b).double()
    exact = want.clone()
    if aux is not None:
        want += aux.double()
    if "gelu" in form.epilogue:
        want = torch.nn.functional.gelu(want, approximate="tanh")
    if before is not None:
        want += before
    c = around[1:-1]
    call = bench.ours(form, a, b, c, aux)
    outcomes = []
    for _ in range(REPEATS):
        c.copy_(before) if before is not None else c.fill_(math.nan)
        call()
        torch.cuda.synchronize()
        outcomes.append(c.clone())
    error = ((c.double() - want).norm() / want.norm()).item()
    library = bench.library("cuBLAS", form, a, b, torch.empty_like(c), None)()
    peer = ((library.double() - exact).norm() / exact.norm()).item()
    if not error < WORST[form.out]:
        raise ValueError(f"{shape}: relative error {error:.2e}")
    moved = max((outcome != outcomes[0]).float().mean().item() for outcome in outcomes)
    if moved:
        raise ValueError(f"{shape}: runs differ in {moved:.1e} of the elements")
    if not (around[0].isnan().all() and around[-1].isnan().all()):
        raise ValueError(f"{shape}: wrote beside C")
    return error, peer


def check_form(bench, name):
    """All checks of one form: the error that is worst beside the library's, and the library's."""
    form = next(form for form in FORMS if label(form) == name)
    errors = [check(bench, form, shape) for shape in RAGGED + STEP]
    worst = max(errors, key=lambda pair: pair[0] / pair[1])
    outcome = {"error": worst[0], "peer": worst[1]}
    try:
        check(bench, form, TINY)
    except (RuntimeError, ValueError) as error:
        outcome["tiny"] = str(error)
    return outcome


# ---- Times


def graph(bench, calls, count):
    """A CUDA graph of `count` products, one after the other over the sets of operands."""
    torch = bench.torch
    for call in calls:
        call()
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made, capture_error_mode="relaxed"):
        for i in range(count):
            calls[i % len(calls)]()
    return made


def replay(bench, made):
    """Milliseconds that a graph takes."""
    start, end = (bench.torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    made.replay()
    end.record()
    bench.torch.cuda.synchronize()
    return start.elapsed_time(end)


def alone(bench, made, sensor):
    """Median milliseconds of a graph by itself at full load; and clock in MHz, power in W."""
    times, state, begin = [], [], time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        times.append(replay(bench, made))
        state.append(sensor())
    half = len(times) // 2
    return median(times[half:]), [median(column) for column in zip(*state[half:], strict=True)]


def make_sensor():
    """A function that returns the card's clock in MHz and its power in W."""
    import pynvml

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    return lambda: (
        pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM),
        pynvml.nvmlDeviceGetPowerUsage(card) / 1000,
    )


def entrants(bench, contest):
    """Name -> calls, one for each set of operands; as many sets as overflow the L2 cache."""
    m, n, k = contest.shape
    count = 1 if 2 * (m * k + n * k + m * n) > 1.2e9 else 3
    form = contest.forms[0]
    sets = [bench.operands(form, contest.shape) for _ in range(count)]
    made = {}
    for peer in contest.peers:
        calls = [bench.library(peer, form, *tensors) for tensors in sets]
        try:
            calls[0]()
            made[peer] = calls
        except (RuntimeError, TypeError) as error:
            print(f"  no {peer}: {str(error).splitlines()[0]}", flush=True)
    for form in contest.forms:
        for cut in contest.cuts:
            name = label(form, cut if len(contest.cuts) > 1 else "")
            if {*kernels(form)} <= {*bench.codes}:
                made[name] = [bench.ours(form, *tensors, cut=cut) for tensors in sets]
    return made


def times(bench, field, count):
    """Milliseconds of a call, alone and in turn, for each name of `field`; clock and power.

    field: name -> calls, one for each set of operands; count: calls in a graph.
    """
    graphs = {who: graph(bench, calls, count) for who, calls in field.items()}
    sensor, by_self, in_turn = make_sensor(), {}, {}
    for _ in range(ROUNDS):
        for who, made in graphs.items():
            by_self.setdefault(who, []).append(alone(bench, made, sensor))
    for _ in range(TURNS):
        for who, made in graphs.items():
            in_turn.setdefault(who, []).append(replay(bench, made))
    return {
        who: {
            "alone": median(ms for ms, _ in by_self[who]) / count,
            "in turn": median(in_turn[who]) / count,
            "MHz": by_self[who][-1][1][0],
            "W": by_self[who][-1][1][1],
        }
        for who in graphs
    }


def time_contest(bench, name):
    """Milliseconds, alone and in turn, of each contestant."""
    contest = next(c for c in contests() if f"{c.what}: {c.case}" == name)
    m, n, k = contest.shape
    count = max(2, min(200, round(GRAPH_MS * 6e11 / (2 * m * n * k))))
    return times(bench, entrants(bench, contest), count)


# ---- The child, and who watches it


def serve(path):
    """The child: do the jobs that stand in `path`, a line of JSON for each beginning and end."""
    jobs, codes = pickle.loads(Path(path).read_bytes())
    bench = Bench(codes)
    print(json.dumps({"device": bench.device.name}), flush=True)
    for kind, name in jobs:
        print(json.dumps({"begin": [kind, name]}), flush=True)
        try:
            outcome = (check_form if kind == "check" else time_contest)(bench, name)
        except ValueError as error:  # wrong, but the GPU lives
            outcome = {"failed": str(error)}
        print(json.dumps({"end": [kind, name], "outcome": outcome}), flush=True)
        bench.torch.cuda.empty_cache()


def lines_of(child):
    """Lines of a child's output, until it ends; TimeoutError where it is silent for too long."""
    lines = queue.Queue()

    def read():
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=SILENCE)
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            return
        yield line


def attempt(jobs, codes, outcomes):
    """Do jobs in one child; returns those that are left, without the one that broke it."""
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        file.write(pickle.dumps((jobs, codes)))
        file.flush()
        child = subprocess.Popen(
            [sys.executable, __file__, "--child", file.name], stdout=subprocess.PIPE, text=True
        )
        current, end = None, "ended"
        try:
            for line in lines_of(child):
                if not line.startswith("{"):
                    print(line, end="", flush=True)
                    continue
                word = json.loads(line)
                outcomes.setdefault("device", word.get("device"))
                current = tuple(word["begin"]) if "begin" in word else None
                if "end" in word:
                    outcomes[tuple(word["end"])] = word["outcome"]
                    tell(word["end"], word["outcome"])
        except TimeoutError:
            end = f"was silent for {SILENCE} s"
            child.kill()
        child.wait()
    if current:
        outcomes[current] = {"failed": f"the process {end}, code {child.returncode}"}
        tell(current, outcomes[current])
    rest = [job for job in jobs if job not in outcomes]
    return rest if current or len(rest) < len(jobs) else []


def tell(job, outcome):
    """A line or a few about what came of a job."""
    kind, name = job
    if "failed" in outcome:
        print(f"{kind} {name}: FAILED, {outcome['failed']}", flush=True)
    elif kind == "check":
        print(f"check {name}: {outcome['error']:.2e}, library {outcome['peer']:.2e}", flush=True)
        if "tiny" in outcome:
            print(f"  but at {TINY}: {outcome['tiny']}", flush=True)
    else:
        print(name, flush=True)
        first = next(iter(outcome.values()))
        for who, seen in outcome.items():
            print(
                f"  {seen['alone']:.4f} ms alone ({seen['alone'] / first['alone']:.3f}), "
                f"{seen['in turn']:.4f} in turn ({seen['in turn'] / first['in turn']:.3f}), "
                f"{seen['MHz']:.0f} MHz {seen['W']:.0f} W  {who}", flush=True,
            )  # fmt: skip


# ---- Rows


def commit_here(said):
    """The commit that is measured: what the command line says, else what git says."""
    return said if said or not shutil.which("git") else measurements.commit()


def circumstances(device, commit):
    """What all rows say of where they were measured."""
    names = "numpy", "numba", "numba-cuda", "torch"
    versions = {name: metadata.version(name) for name in names}
    return {
        "device": device, "commit": commit, "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()} | versions,
    }  # fmt: skip


def rows_of(contest, outcome, where):
    """Rows of one contest: our choice under "cuda", each variant under its own name."""
    own = label(choice(contest), "best" if len(contest.cuts) > 1 else "")
    names = [(who, who) for who in outcome] + [("cuda", own)] * (own in outcome)
    peers = [who for who in outcome if who in contest.peers]

    def row(what, engine, unit, value, peer=None, peer_value=None):
        return where | {
            "what": what, "case": contest.case, "engine": engine, "value": round(value, 5),
            "unit": unit, "peer": peer, "peer_value": peer_value and round(peer_value, 5),
        }  # fmt: skip

    for engine, who in names:
        seen = outcome[who]
        yield row(f"{contest.what}, clock", engine, "MHz", seen["MHz"])
        yield row(f"{contest.what}, power", engine, "W", seen["W"])
        for peer in peers if who not in peers else []:
            for way, what in (("alone", contest.what), ("in turn", f"{contest.what}, in turn")):
                yield row(what, engine, "ms", seen[way], peer, outcome[peer][way])


def save(rows):
    """Put rows into kernels.json, and a copy where $OUT says."""
    measurements.update("kernels", rows)
    if os.environ.get("OUT"):
        shutil.copy(Path("data/measurements/kernels.json"), os.environ["OUT"])


def compiled(workers):
    """All kernels' codes, those that compile; what ptxas says of each is printed."""
    begin, makers = time.perf_counter(), {}
    for form in FORMS:
        makers.update(kernels(form))
    codes = {}
    for name, code in build_all(makers, workers).items():
        if isinstance(code, Exception):
            print(f"{name}: DOES NOT COMPILE, {code}", flush=True)
            continue
        codes[name] = code
        print(f"{name}: {code.registers} registers, {code.spills} spilled", *code.warnings)
    print(f"{len(codes)} kernels in {time.perf_counter() - begin:.1f} s", flush=True)
    return codes


def rehearse():
    """What needs no GPU: plans and launches of every contest and check."""
    for form in FORMS:
        for shape in (*RAGGED, *STEP, TINY):
            dry_plan(form, shape, "best")
    for contest in contests():
        for form in contest.forms:
            for cut in contest.cuts:
                count = dry_plan(form, contest.shape, cut)
                print(f"{contest.case}: {label(form, cut)}, {count} launches", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help="check, products", default=["check", "products"])
    parser.add_argument("--dry", action="store_true", help="compile and plan, without a GPU")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot say it")
    parser.add_argument("--only", default="", help="contests and forms with this in their name")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return serve(options.child)
    codes = compiled(2 if options.dry else os.cpu_count())
    if options.dry:
        return rehearse()
    run(options, codes)


def run(options, codes):
    """Do what is asked for, print it, and save the rows."""
    begin, outcomes = time.perf_counter(), {}

    def do(kind, names):
        jobs = [(kind, name) for name in names if kind in options.what and options.only in name]
        while jobs:
            jobs = attempt(jobs, codes, outcomes)

    do("check", [label(form) for form in FORMS if {*kernels(form)} <= {*codes}])
    for form in FORMS:  # what is wrong, or hangs, is not timed
        if "failed" in outcomes.get(("check", label(form)), ()):
            codes.pop(label(form))
    do("products", [f"{contest.what}: {contest.case}" for contest in contests()])
    where, rows = circumstances(outcomes["device"], commit_here(options.commit)), []
    for contest in contests():
        outcome = outcomes.get(("products", f"{contest.what}: {contest.case}"), {"failed": ""})
        if "failed" not in outcome:
            rows += rows_of(contest, outcome, where)
    if rows:
        save(rows)
    summary(rows, outcomes)
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)


def summary(rows, outcomes):
    """The short table: what the package chooses, against the library; and what failed."""
    for row in rows:
        if row["engine"] == "cuda" and row["unit"] == "ms":
            ratio = row["value"] / row["peer_value"]
            name = f"{row['what']}, {row['case']} ({row['peer']})"
            print(f"{ratio:.3f}  {row['value']:.4f} ms  {name}")
    for job, outcome in outcomes.items():
        if isinstance(outcome, dict) and "failed" in outcome:
            print("FAILED", *job, outcome["failed"])


if __name__ == "__main__":
    sys.exit(main())
