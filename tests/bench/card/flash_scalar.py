"""Attention's float32 kernels, the oracle of those on tensor cores, against PyTorch's float32.

Checked against float64 on odd lengths, grouped heads and all head widths: each element within what
may be rounded on its way, as in the emulator, and all of them beside PyTorch's. Each is timed once,
to say what an oracle costs, against PyTorch's kernels for float32.
"""

import math
from functools import partial

import numpy as np
from attention_bounds import exact_and_bounds, outcomes
from bench.card import Contest, ghost
from bench.card.flash import Case, hidden

from nanoeuler.engines.gpu.attention import reference

LEAST = 4 * 2.0**-24  # a product, a sum, an exponential and a quotient round at least once each
ORACLE = "oracle of attention,"  # of rows that chapter 12 shows
SETS = 3  # sets of operands: the timed case has 50 MB of them, as much as the L2 cache
case_of = partial(Case, dtype="float32")
ODD = [
    case_of(1, 1, 1, 1, 32), case_of(2, 4, 4, 33, 32), case_of(2, 4, 2, 130, 64),
    case_of(1, 4, 1, 77, 128), case_of(2, 6, 3, 513, 64), case_of(1, 4, 2, 1000, 128),
]  # fmt: skip
TIMED = case_of(4, 12, 12, 1024, 64)


def kernels():
    """Name -> maker of each kernel."""
    makers = {name: getattr(reference, f"{name}_kernel") for name in ("forward", "dq", "dkv")}
    return {
        f"{name} {D}": partial(make, D) for D in (32, 64, 128) for name, make in makers.items()
    }


def shapes(case):
    """Shapes of all arrays of a case."""
    heads = case.B, case.T, case.H + 2 * case.G, case.D
    queries = case.B, case.T, case.H, case.D
    lines = case.B, case.H, reference.padded(case.T)
    return {"dy": queries, "heads": heads, "y": queries, "lse": lines, "delta": lines,
            "dheads": heads}  # fmt: skip


def launches(case, a):
    """The three launches: forward, dq, dkv. a: name -> each of `shapes`."""
    forward = reference.forward_launch(a["heads"], case.G, a["y"], a["lse"])
    names = "y", "lse", "delta", "dheads"
    arrays = (a[name] for name in names)
    return forward, *reference.backward_launches(a["dy"], a["heads"], case.G, *arrays)


def plans():
    """Name -> launches of every check, without arrays."""
    return {
        str(case): launches(
            case, {name: ghost(shape, np.float32) for name, shape in shapes(case).items()}
        )
        for case in [*ODD, TIMED]
    }


class Problem:
    """A case with its arrays on the GPU; outputs lie between margins, all poisoned with nan."""

    def __init__(self, bench, case, seed=0):
        self.bench, self.case, torch = bench, case, bench.torch
        torch.manual_seed(seed + case.T)
        make = {"dy": bench.random, "heads": bench.random}
        self.tensors = {
            name: make.get(name, bench.output)(*shape, dtype=torch.float32)
            for name, shape in shapes(case).items()
        }

    def ours(self):
        """Functions that put forward, dq, dkv on torch's stream."""
        views = {name: self.bench.view(tensor) for name, tensor in self.tensors.items()}
        return [self.bench.call(launch) for launch in launches(self.case, views)]

    def split(self, kind):
        """q, k, v, dy (B, heads, T, D) of a dtype, keys and values once for each query head."""
        case, sharing = self.case, self.case.H // self.case.G
        heads, dy = (self.tensors[name].to(kind).transpose(1, 2) for name in ("heads", "dy"))
        q, k, v = heads.split([case.H, case.G, case.G], 1)
        k, v = (x.repeat_interleave(sharing, 1) for x in (k, v))
        return [x.contiguous() for x in (q, k, v, dy)]

    def plain(self, kind):
        """y (B, T, H, D) and dheads by the definition, in a dtype of PyTorch's."""
        torch, case = self.bench.torch, self.case
        q, k, v, dy = self.split(kind)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(case.D)
        y = torch.softmax(scores.masked_fill(hidden(torch, case), -math.inf), -1) @ v
        dq, dk, dv = torch.autograd.grad(y, (q, k, v), dy)
        group = case.B, case.G, case.H // case.G, case.T, case.D
        dk, dv = (x.view(group).sum(2) for x in (dk, dv))
        return y.detach().transpose(1, 2), torch.cat([dq, dk, dv], 1).transpose(1, 2)


def check(bench, case):
    """Errors of y, dq, dk, dv, ours and PyTorch's."""
    return compare(bench, Problem(bench, case), LEAST)


def compare(bench, problem, least, off=0.0):
    """The same of a problem whose arrays are there; least: what is granted in any case; off: how
    far a product of two numbers may be off, beside what float32 rounds.
    """
    torch, case, calls = bench.torch, problem.case, problem.ours()
    outputs = {name: problem.tensors[name] for name in ("y", "lse", "delta", "dheads")}
    seen = bench.repeat(lambda: [call() for call in calls], outputs)

    def parts(y, dheads):
        heads = y, *dheads.split([case.H, case.G, case.G], 2)
        names = "y", "dq", "dk", "dv"
        return {name: x.double().transpose(1, 2) for name, x in zip(names, heads, strict=True)}

    q, k, v = problem.tensors["heads"].double().transpose(1, 2).split([case.H, case.G, case.G], 1)
    do = problem.tensors["dy"].double().transpose(1, 2)
    wanted = exact_and_bounds(torch, q, k, v, do, hidden(torch, case), off)
    ours, peer = parts(seen["y"], seen["dheads"]), parts(*problem.plain(torch.float32))
    return outcomes(ours, peer, {"y": wanted["o"], **wanted}, least)


def checks(bench):
    """Name -> check of each case."""
    return {f"attention {case}": partial(check, bench, case) for case in [*ODD, TIMED]}


def library(bench, problem):
    """PyTorch's own kernels for float32: forward and backward. Of texts they get a mask."""
    torch, case = bench.torch, problem.case
    aten, (q, k, v, dy) = torch.ops.aten, problem.split(torch.float32)
    bias = None
    if case.length:
        bias = torch.zeros(case.B, 1, case.T, case.T, device="cuda")
        bias = bias.masked_fill(hidden(torch, case), -math.inf).expand(-1, case.H, -1, -1)
    causal = bias is None
    attend = partial(
        aten._scaled_dot_product_efficient_attention, q, k, v, bias, True, 0.0, causal
    )
    needs = [True, True, True, False]
    back = aten._scaled_dot_product_efficient_attention_backward
    return attend, partial(back, dy, q, k, v, bias, *attend(), 0.0, needs, causal)


def entrants(bench, backward):
    """Name -> calls, one for each set of operands: ours, and PyTorch's own kernels for float32."""
    made = {"ours": [], "torch": []}
    for seed in range(SETS):
        problem = Problem(bench, TIMED, seed)
        forward, dq, dkv = problem.ours()
        forward()  # the backward needs its y and lse
        attend, back = library(bench, problem)
        made["ours"].append((lambda dq=dq, dkv=dkv: (dq(), dkv())) if backward else forward)
        made["torch"].append(back if backward else attend)
    return made


def contests(bench):
    """What is timed."""
    return [
        Contest(f"{ORACLE} {way}", str(TIMED), partial(entrants, bench, way == "backward"))
        for way in ("forward", "backward")
    ]
