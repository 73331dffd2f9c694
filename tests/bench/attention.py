"""Check and time attention on a GPU: `python tests/bench/attention.py`.

All kernels are compiled at once, each in a process. Then each is checked against float64, on odd
lengths and grouped heads, into poisoned outputs, twice; PyTorch's FlashAttention-2 and cuDNN are
measured against the same float64, and our error may be at most twice FlashAttention-2's. Then
forward and backward are timed against both, in CUDA graphs: each alone for about half a second, so
that its own use of energy sets the card's clock, and all in turn. Rows go to
data/measurements/kernels.json, and to $OUT where that is set.

For grouped queries PyTorch gets keys and values that were repeated before the clock starts. Checks
and timings run in a child; what breaks it is named and left out, and another child goes on.
`--dry` compiles, plans and prints the jobs, without a GPU.
"""

import argparse
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from nanoeuler.engines.gpu import flash_plan
from nanoeuler.engines.gpu.compile import build_all
from nanoeuler.engines.gpu.flash_backward import dkdv_kernel, dq_kernel
from nanoeuler.engines.gpu.flash_forward import NARROW, WIDE

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # gpu.py is there, for `nanoeuler bench` too
from gpu import SILENCE, Bench, circumstances, commit_here, lines_of, save, times  # noqa: E402

GRAPH_MS = 8  # what a graph takes at most
SETS = 150 << 20  # bytes of operands that are rotated: three times the L2 cache
MARGIN = 4096     # poisoned values before and after each output
PEERS = "FlashAttention-2", "cuDNN"
# Which warpgroups share a block: as planned, always one, as many as there can be.
CROWDS = {"planned": None, "one warpgroup": 1 << 30, "all warpgroups": 0}


@dataclass(frozen=True)
class Case:
    """A shape: B sequences, H query heads, G key heads, T positions, head width D."""

    B: int
    H: int
    G: int
    T: int
    D: int

    def __str__(self):
        heads = f"{self.H}/{self.G}" if self.G != self.H else f"{self.H}"
        return f"B{self.B} H{heads} T{self.T} D{self.D} causal bf16"

    def operations(self, backward):
        """Of the products of the pairs that are needed: two forward, five backward."""
        return (5 if backward else 2) * self.B * self.H * self.T**2 * self.D


TIMED = [
    Case(16, 12, 12, 1024, 64), Case(16, 12, 4, 1024, 64), Case(4, 16, 16, 4096, 64),
    Case(4, 16, 16, 4096, 128), Case(16, 12, 12, 512, 64), Case(16, 12, 4, 512, 64),
    Case(2, 4, 2, 768, 64),
]  # fmt: skip
# Odd lengths: of one row, of less than a tile, of tiles that end between 64 and 128.
ODD = [
    Case(1, 2, 1, 1, 64), Case(2, 2, 2, 77, 64), Case(2, 4, 2, 333, 128), Case(2, 4, 2, 1000, 64),
    Case(3, 4, 1, 130, 64), Case(2, 6, 3, 193, 128),
]  # fmt: skip


def kernels():
    """Name -> maker of each kernel."""
    made = {"forward 64": narrow, "forward 128": wide}
    for D, most in ((64, 2), (128, 3)):
        for groups in (1, most):
            made[f"dq {D}, {groups} warpgroups"] = partial(dq_kernel, D, groups)
        for groups in (1, 2):
            made[f"dkdv {D}, {groups} warpgroups"] = partial(dkdv_kernel, D, groups)
    return made


def narrow():
    """The forward kernel of head width 64."""
    return NARROW


def wide():
    """The forward kernel of head width 128."""
    return WIDE


def plans(arrays, crowd):
    """The three launches: forward, dq, dkdv."""
    limit, flash_plan.MULTIPROCESSORS = flash_plan.MULTIPROCESSORS, CROWDS[crowd]
    if CROWDS[crowd] is None:
        flash_plan.MULTIPROCESSORS = limit
    try:
        names = "do", "q", "k", "v", "o", "lse", "delta", "dq", "dk", "dv"
        forward = flash_plan.forward_launch(*(arrays[n] for n in ("q", "k", "v", "o", "lse")))
        return forward, *flash_plan.backward_launches(*(arrays[n] for n in names))
    finally:
        flash_plan.MULTIPROCESSORS = limit


def shapes(case):
    """Shapes of all arrays of a case; the last two are of float32."""
    queries = case.B, case.H, case.T, case.D
    keys = case.B, case.G, case.T, case.D
    lines = case.B, case.H, flash_plan.padded(case.T)
    return dict.fromkeys(("q", "do", "o", "dq"), queries) | dict.fromkeys(
        ("k", "v", "dk", "dv"), keys
    ) | dict.fromkeys(("lse", "delta"), lines)  # fmt: skip


# ---- Operands, ours and PyTorch's


class Problem:
    """A case with its arrays on the GPU; outputs lie between margins, all poisoned with nan."""

    def __init__(self, bench, case, seed=0, packed=False):
        self.bench, self.case, torch = bench, case, bench.torch
        torch.manual_seed(seed + case.T)
        self.around, self.tensors = {}, {}
        for name, shape in shapes(case).items():
            if name in ("q", "k", "v", "do"):
                self.tensors[name] = bench.random(*shape)
                continue
            kind = torch.float32 if name in ("lse", "delta") else torch.bfloat16
            size = math.prod(shape)
            flat = torch.full((size + 2 * MARGIN,), math.nan, device="cuda", dtype=kind)
            self.around[name] = flat
            self.tensors[name] = flat[MARGIN:-MARGIN].view(shape)
        if packed:
            self.pack()

    def pack(self):
        """The same values in the model's layout: heads of a position side by side."""
        for names in (("q", "k", "v"), ("dq", "dk", "dv"), ("do",), ("o",)):
            parts = [self.tensors[name] for name in names]
            whole = self.bench.torch.cat([part.transpose(1, 2) for part in parts], 2).contiguous()
            at = 0
            for name, part in zip(names, parts, strict=True):
                self.tensors[name] = whole[:, :, at : at + part.shape[1]].transpose(1, 2)
                at += part.shape[1]

    def poison(self):
        for name in ("o", "lse", "delta", "dq", "dk", "dv"):
            self.tensors[name].fill_(math.nan)

    def ours(self, crowd="planned"):
        """Functions that put forward, dq, dkdv on torch's stream."""
        bench = self.bench
        views = {name: bench.view(tensor) for name, tensor in self.tensors.items()}
        for name, make in kernels().items():
            if name in bench.codes:
                bench.device.load(make(), bench.codes[name])
        starts = [bench.device.prepare(launch) for launch in plans(views, crowd)]

        def call(start):
            start(bench.torch.cuda.current_stream().cuda_stream)

        return [partial(call, start) for start in starts]

    def expanded(self):
        """q, k, v, do with a key head for each query head, as PyTorch's operators want them."""
        case, t = self.case, self.tensors
        k, v = (t[name].repeat_interleave(case.H // case.G, 1).contiguous() for name in "kv")
        return t["q"].contiguous(), k, v, t["do"].contiguous()

    def peer(self, name):
        """PyTorch's operators: functions of forward, which returns o first, and of backward."""
        aten = self.bench.torch.ops.aten
        q, k, v, do = self.expanded()
        if name == "FlashAttention-2":
            forward = partial(aten._scaled_dot_product_flash_attention, q, k, v, 0.0, True)
            f = forward()
            back = aten._scaled_dot_product_flash_attention_backward
            return forward, partial(
                back, do, q, k, v, f[0], f[1], f[2], f[3], f[4], f[5], 0.0, True, f[6], f[7]
            )
        forward = partial(
            aten._scaled_dot_product_cudnn_attention, q, k, v, None, True, 0.0, True
        )
        f = forward()
        back = aten._scaled_dot_product_cudnn_attention_backward
        return forward, partial(
            back, do, q, k, v, f[0], f[1], f[6], f[7], None, f[2], f[3], f[4], f[5], 0.0, True
        )


# ---- Checks


def exact(problem):
    """o, lse (base 2), dq, dk, dv of the last sequence in float64, by the definition."""
    torch, case = problem.bench.torch, problem.case
    q, k, v, do = (x[-1:].double() for x in problem.expanded())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(case.D)
    later = torch.ones(case.T, case.T, device="cuda", dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -math.inf)
    lse = torch.logsumexp(scores, -1)
    o = torch.exp(scores - lse[..., None]) @ v
    gradients = torch.autograd.grad(o, (q, k, v), do)
    return o.detach(), lse.detach() / math.log(2), gradients


def fold(problem, x):
    """Gradients of repeated keys, summed over the query heads that share one."""
    case = problem.case
    return x.double().view(x.shape[0], case.G, case.H // case.G, case.T, case.D).sum(2)


def errors(problem, want, o, dq, dk, dv):
    """Relative errors of o, dq, dk, dv of the last sequence.

    What is nearly zero throughout, as dq and dk of a single position, is compared with 0.01.
    """
    o_want, _, (dq_want, dk_want, dv_want) = want
    pairs = (o, o_want), (dq, dq_want), (dk, fold(problem, dk_want)), (dv, fold(problem, dv_want))
    return [
        ((x[-1:].double() - y).norm() / max(y.norm(), 0.01 * math.sqrt(y.numel()))).item()
        for x, y in pairs
    ]


def check(bench, case, crowd, packed):
    """Errors, ours and PyTorch's; ValueError where something is not right."""
    torch, problem = bench.torch, Problem(bench, case, packed=packed)
    calls, outcomes = problem.ours(crowd), []
    names = "o", "lse", "delta", "dq", "dk", "dv"
    for _ in range(2):
        problem.poison()
        for call in calls:
            call()
        torch.cuda.synchronize()
        outcomes.append([problem.tensors[name].clone() for name in names])
    for name, first, second in zip(names, *outcomes, strict=True):
        if first.isnan().any():
            raise ValueError(f"{first.isnan().sum().item()} values of {name} are nan")
        if not torch.equal(first, second):
            many = (first != second).sum().item()
            raise ValueError(f"two runs differ in {many} values of {name}")
    for name, flat in problem.around.items() if not packed else ():
        if not (flat[:MARGIN].isnan().all() and flat[-MARGIN:].isnan().all()):
            raise ValueError(f"wrote beside {name}")
    want = exact(problem)
    o, lse, _, dq, dk, dv = outcomes[0]
    seen = {"ours": errors(problem, want, o, dq, dk, dv)}
    seen["lse"] = (lse[-1:, :, : case.T].double() - want[1]).abs().max().item()
    # cuDNN refuses a single position; asked a second time, it takes the process with it.
    for peer in PEERS if case.T > 1 else PEERS[:1]:
        try:
            forward, backward = problem.peer(peer)
            o, (dq, dk, dv) = forward()[0], backward()[:3]
            dk, dv = fold(problem, dk), fold(problem, dv)
            seen[peer] = errors(problem, want, o, dq, dk, dv)
        except RuntimeError as error:
            print(f"  no {peer}: {str(error).splitlines()[0][:90]}", flush=True)
    limits = [2 * max(e, 2.0**-9) for e in seen.get(PEERS[0], [0] * 4)]  # one rounding at least
    if any(not e <= limit for e, limit in zip(seen["ours"], limits, strict=True)):
        raise ValueError(f"errors {seen['ours']} above {limits}")
    return seen


# ---- Times


def entrants(bench, case, backward):
    """Name -> calls, one for each set of operands."""
    size = 2 * 8 * case.B * case.H * case.T * case.D
    problems = [Problem(bench, case, seed) for seed in range(max(1, min(3, SETS // size)))]
    made = {}
    for problem in problems:
        forward, dq, dkdv = problem.ours()
        forward()  # the backward needs its o and lse
        if backward:
            dq()
            made.setdefault("cuda", []).append(lambda dq=dq, dkdv=dkdv: (dq(), dkdv()))
            made.setdefault("dq", []).append(dq)
            made.setdefault("dk, dv", []).append(dkdv)
        else:
            made.setdefault("cuda", []).append(forward)
    for peer in PEERS:
        try:
            made[peer] = [problem.peer(peer)[backward] for problem in problems]
        except RuntimeError as error:
            print(f"  no {peer}: {str(error).splitlines()[0][:90]}", flush=True)
    return made


def measure(bench, case, backward):
    """Milliseconds, alone and in turn, of each contestant."""
    count = max(2, min(200, round(GRAPH_MS * 3e11 / case.operations(backward))))
    return times(bench, entrants(bench, case, backward), count)


# ---- The child, and who watches it


def jobs(only):
    """(kind, case, more) of everything that is done, checks first."""
    made = [("check", case, (crowd, False)) for case in ODD + TIMED for crowd in CROWDS]
    made += [("check", case, ("planned", True)) for case in (ODD[2], ODD[3], TIMED[1])]
    made += [("time", case, backward) for case in TIMED for backward in (False, True)]
    return [job for job in made if only in spell(job)]


def spell(job):
    """A job in words."""
    kind, case, more = job
    if kind == "check":
        return f"check {case}: {more[0]}{', packed' if more[1] else ''}"
    return f"attention {'backward' if more else 'forward'}: {case}"


def serve(path):
    """The child: do the jobs that stand in `path`, a line of JSON for each beginning and end."""
    todo, codes = pickle.loads(Path(path).read_bytes())
    bench = Bench(codes)
    print(json.dumps({"device": bench.device.name}), flush=True)
    for number, (kind, case, more) in enumerate(todo):
        print(json.dumps({"begin": number}), flush=True)
        try:
            if kind == "check":
                outcome = check(bench, case, *more)
            else:
                outcome = measure(bench, case, more)
        except (ValueError, KeyError) as error:  # wrong, but the GPU lives
            outcome = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps({"end": number, "outcome": outcome}), flush=True)
        bench.torch.cuda.empty_cache()


def attempt(todo, codes, outcomes):
    """Do jobs in one child; returns those that are left, without the one that broke it."""
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        file.write(pickle.dumps((todo, codes)))
        file.flush()
        command = [sys.executable, __file__, "--child", file.name]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        current, end = None, "ended"
        try:
            for line in lines_of(child):
                if not line.startswith("{"):
                    print(line, end="", flush=True)
                    continue
                word = json.loads(line)
                outcomes.setdefault("device", word.get("device"))
                current = word.get("begin")
                if "end" in word:
                    outcomes[todo[word["end"]]] = word["outcome"]
                    tell(todo[word["end"]], word["outcome"])
        except TimeoutError:
            end = f"was silent for {SILENCE} s"
            child.kill()
        child.wait()
    if current is not None:
        outcomes[todo[current]] = {"failed": f"the process {end}, code {child.returncode}"}
        tell(todo[current], outcomes[todo[current]])
    rest = [job for job in todo if job not in outcomes]
    return rest if len(rest) < len(todo) else []


def tell(job, outcome):
    """A line or a few about what came of a job."""
    if "failed" in outcome:
        print(f"{spell(job)}: FAILED, {outcome['failed']}", flush=True)
    elif job[0] == "check":
        print(f"{spell(job)}: lse {outcome.pop('lse'):.0e}", end="")
        for who, seen in outcome.items():
            print(f"; {who}", *(f"{error:.2e}" for error in seen), end="")
        print(flush=True)
    else:
        print(spell(job), flush=True)
        for who, seen in outcome.items():
            rate = job[1].operations(job[2]) / seen["alone"] / 1e9
            print(
                f"  {seen['alone']:.4f} ms alone ({rate:.0f} TFLOP/s), {seen['in turn']:.4f} in "
                f"turn, {seen['MHz']:.0f} MHz {seen['W']:.0f} W  {who}", flush=True,
            )  # fmt: skip


# ---- Rows


def rows_of(job, outcome, where):
    """Rows of one timing, by ourselves and in turn, or of one check's errors."""
    kind, case, more = job
    if kind == "check":
        parts = zip(("o", "dq", "dk", "dv"), outcome["ours"], strict=True)
        for i, (part, error) in enumerate(parts):
            for peer in PEERS:
                if peer in outcome:
                    yield where | {
                        "what": f"attention error of {part}", "case": str(case), "engine": "cuda",
                        "value": error, "peer": peer, "peer_value": outcome[peer][i],
                        "unit": "relative to float64",
                    }  # fmt: skip
        return
    what = f"attention {'backward' if more else 'forward'}"
    for way, name in (("alone", what), ("in turn", f"{what}, in turn")):
        row = where | {"what": name, "case": str(case), "engine": "cuda", "unit": "ms"}
        for peer in outcome.keys() & {*PEERS}:
            values = (round(outcome[who][way], 5) for who in ("cuda", peer))
            yield row | dict(zip(("value", "peer_value"), values, strict=True)) | {"peer": peer}
        for part in outcome.keys() - {"cuda", *PEERS}:  # a kernel by itself
            seen = {"what": f"{name}: {part}", "value": round(outcome[part][way], 5)}
            yield row | seen | {"peer": None, "peer_value": None}


def compiled(workers):
    """All kernels' codes, those that compile; what ptxas says of each is printed."""
    begin, codes = time.perf_counter(), {}
    for name, code in build_all(kernels(), workers).items():
        if isinstance(code, Exception):
            print(f"{name}: DOES NOT COMPILE, {code}", flush=True)
            continue
        codes[name] = code
        print(f"{name}: {code.registers} registers, {code.spills} spilled", *code.warnings)
    print(f"{len(codes)} kernels in {time.perf_counter() - begin:.1f} s", flush=True)
    return codes


def rehearse(todo):
    """What needs no GPU: the launches of every job."""
    for job in todo:
        kinds = {name: np.float32 for name in ("lse", "delta")}
        arrays = {
            name: np.empty(shape, kinds.get(name, np.uint16))
            for name, shape in shapes(job[1]).items()
        }
        made = plans(arrays, job[2][0] if job[0] == "check" else "planned")
        print(spell(job), *(f"{plan.kernel.threads} threads x {plan.grid}" for plan in made))


def summary(rows, outcomes):
    """The short table: ours against PyTorch's; and what failed."""
    for row in rows:
        if row["peer"] and row["unit"] == "ms":
            ratio = row["value"] / row["peer_value"]
            name = f"{row['what']}, {row['case']} ({row['peer']})"
            print(f"{ratio:.3f}  {row['value']:.4f} ms  {name}")
    for job, outcome in outcomes.items():
        if job != "device" and "failed" in outcome:
            print("FAILED", spell(job), outcome["failed"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dry", action="store_true", help="compile and plan, without a GPU")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot say it")
    parser.add_argument("--only", default="", help="jobs with this in their name")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return serve(options.child)
    begin = time.perf_counter()
    codes, todo = compiled(2 if options.dry else os.cpu_count()), jobs(options.only)
    if options.dry:
        return rehearse(todo)
    outcomes, rest = {}, todo
    while rest:
        rest = attempt(rest, codes, outcomes)
    where = circumstances(outcomes.get("device"), commit_here(options.commit))
    rows = [
        row
        for job in todo
        if "failed" not in outcomes.get(job, {"failed": ""}) and job[2] != ("planned", True)
        and (job[0] == "time" or job[2][0] == "planned")
        for row in rows_of(job, outcomes[job], where)
    ]  # fmt: skip
    if rows:
        save(rows)
    summary(rows, outcomes)
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
