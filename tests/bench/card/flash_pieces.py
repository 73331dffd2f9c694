"""Attention of float32 arrays in pieces of bf16, against PyTorch's float32 and TF32.

Checked against float64 on odd lengths, grouped heads and all widths, in the model's layout, twice,
into poisoned outputs, each element within its bound (attention_bounds.py). Three pieces are
compared with PyTorch's float32, two with its TF32.
"""

from functools import partial
from itertools import product

import numpy as np
from attention_bounds import PIECES
from bench.card import Contest, flash_scalar, ghost
from bench.card.flash_scalar import case_of

from nanoeuler.engines.gpu.attention import float32_launch as plan
from nanoeuler.engines.gpu.attention.layout import Backward, padded
from nanoeuler.engines.gpu.attention.mma_backward import dkdv_kernel, dq_kernel
from nanoeuler.engines.gpu.attention.mma_forward import forward_kernel

# What any method rounds, relative: two pieces leave out 2^-16; three make a float32, of which a
# tensor core cuts off what a processor would round, twice as much.
LEAST = {2: 2.0**-16, 3: 2 * flash_scalar.LEAST}
SETS = 3  # sets of operands: those of a timed case are 50 MB and more, as much as the L2 cache
ODD = [
    case_of(1, 1, 1, 1, 32), case_of(2, 4, 2, 33, 32), case_of(2, 6, 3, 257, 64),
    case_of(2, 4, 1, 130, 64), case_of(1, 4, 1, 77, 128), case_of(1, 4, 2, 1000, 128),
    case_of(1, 1, 1, 5, 128),
]  # fmt: skip
TIMED = [case_of(16, 12, 4, 512, 64), case_of(4, 12, 12, 1024, 64)]
PEERS = {2: "torch TF32", 3: "torch float32"}


def kernels():
    """Name -> maker of each kernel."""
    made = {}
    for name, make, forms in (
        ("forward", forward_kernel, plan.FORWARD), ("dq", dq_kernel, plan.DQ),
        ("dkdv", dkdv_kernel, plan.DKDV),
    ):  # fmt: skip
        for pieces, D in product(forms, (32, 64, 128)):
            form = forms[pieces][D]
            made[f"{name} {D}, {pieces} pieces"] = partial(make, form)
            limited = form._replace(limited=True)
            made[f"documents: {name} {D}, {pieces} pieces"] = partial(make, limited)
    return made


def shapes(case):
    """Shapes of all arrays of a case, a head after the other."""
    queries, keys = (case.B, case.H, case.T, case.D), (case.B, case.G, case.T, case.D)
    made = dict.fromkeys(("q", "do", "o", "dq"), queries) | dict.fromkeys(
        ("k", "v", "dk", "dv"), keys
    )
    return made | dict.fromkeys(("lse", "delta"), (case.B, case.H, padded(case.T)))


def launches(a, pieces):
    """The three launches: forward, dq, dkdv. a: name -> each of `shapes`."""
    names = "do", "q", "k", "v", "o", "lse", "delta", "dq", "dk", "dv"
    forward = plan.forward_launch(*(a[name] for name in ("q", "k", "v", "o", "lse")), pieces)
    return forward, *plan.backward_launches(Backward(*(a[name] for name in names)), pieces)


def plans():
    """Name -> launches of every check, without arrays."""
    return {
        f"{pieces} pieces {case}": launches(
            {name: ghost(shape, np.float32) for name, shape in shapes(case).items()}, pieces
        )
        for case in ODD + TIMED
        for pieces in PIECES
    }


class Problem(flash_scalar.Problem):
    """The same arrays, (B, T, H + 2G, D) and so on, with longer lines."""

    def __init__(self, bench, case, pieces, seed=0):
        super().__init__(bench, case, seed)
        self.pieces = pieces
        for name in ("lse", "delta"):
            shape = shapes(case)[name]
            self.tensors[name] = bench.output(*shape, dtype=bench.torch.float32)

    def ours(self):
        """Functions that put forward, dq, dkdv on torch's stream."""
        t, heads = self.tensors, [self.case.H, self.case.G, self.case.G]
        parts = {"do": t["dy"].transpose(1, 2), "o": t["y"].transpose(1, 2)}
        parts |= {"lse": t["lse"], "delta": t["delta"]}
        for names, whole in (("q k v", "heads"), ("dq dk dv", "dheads")):
            split = t[whole].transpose(1, 2).split(heads, 1)
            parts |= dict(zip(names.split(), split, strict=True))
        views = {name: self.bench.view(tensor) for name, tensor in parts.items()}
        return [self.bench.call(launch) for launch in launches(views, self.pieces)]


def check(bench, case, pieces):
    """Errors of y, dq, dk, dv, ours and PyTorch's at the same precision."""
    bench.torch.backends.cuda.matmul.allow_tf32 = pieces == 2
    try:
        problem = Problem(bench, case, pieces)
        return flash_scalar.compare(bench, problem, LEAST[pieces], PIECES[pieces])
    finally:
        bench.torch.backends.cuda.matmul.allow_tf32 = False


def checks(bench):
    """Name -> check of each case."""
    return {
        f"attention {case}, {pieces} pieces": partial(check, bench, case, pieces)
        for case in ODD + TIMED
        for pieces in PIECES
    }


def in_tf32(torch, call):
    """call with TF32 allowed."""

    def allowed():
        torch.backends.cuda.matmul.allow_tf32 = True
        made = call()
        torch.backends.cuda.matmul.allow_tf32 = False
        return made

    return allowed


def entrants(bench, case, backward):
    """Name -> calls, one for each set of operands: both of ours, and PyTorch's two precisions."""
    made = {}
    for seed in range(SETS):
        for pieces in PIECES:
            problem = Problem(bench, case, pieces, seed)
            forward, dq, dkdv = problem.ours()
            forward()  # the backward needs its y and lse
            ways = {f"{pieces} pieces": forward}
            if backward:
                dq()
                ways = {
                    f"{pieces} pieces": lambda dq=dq, dkdv=dkdv: (dq(), dkdv()),
                    f"{pieces} pieces, dq": dq, f"{pieces} pieces, dk, dv": dkdv,
                }  # fmt: skip
            for name, call in ways.items():
                made.setdefault(name, []).append(call)
        attend, back = flash_scalar.library(bench, problem)
        call = back if backward else attend
        made.setdefault(PEERS[3], []).append(call)
        made.setdefault(PEERS[2], []).append(in_tf32(bench.torch, call))
    return made


def contests(bench):
    """What is timed."""
    return [
        Contest(
            f"attention {'backward' if backward else 'forward'}, float32 in pieces", str(case),
            partial(entrants, bench, case, backward), "2 pieces", tuple(PEERS.values()),
        )
        for case in TIMED
        for backward in (False, True)
    ]  # fmt: skip
