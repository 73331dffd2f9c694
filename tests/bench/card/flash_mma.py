"""Attention by mma.sync, for every card since 8.0, asked for on this one: against FlashAttention-2.

Checked like `flash`: against float64 on odd lengths and grouped heads, twice, into poisoned
outputs, head by head and in the model's layout; errors may be at most twice FlashAttention-2's.
"""

from functools import partial

from bench.card import Contest, ghost
from bench.card.flash import (
    LEAST,
    LSE,
    SETS,
    Case,
    Problem,
    documents_of,
    errors,
    exact,
    in_rows,
    in_texts,
    kind,
    shapes,
)

from nanoeuler.engines.gpu.attention import mma_launch as plan
from nanoeuler.engines.gpu.attention.layout import Backward
from nanoeuler.engines.gpu.attention.mma_backward import dkdv_kernel, dq_kernel
from nanoeuler.engines.gpu.attention.mma_forward import forward_kernel

PEER = "FlashAttention-2"
TIMED = [Case(16, 12, 12, 1024, 64), Case(4, 16, 16, 4096, 64), Case(4, 16, 16, 4096, 128)]
ALSO = [Case(16, 12, 12, 1024, 32), Case(16, 12, 4, 1024, 64)]
ODD = [
    Case(1, 2, 1, 1, 64), Case(2, 2, 2, 5, 32), Case(2, 4, 2, 77, 128), Case(2, 4, 1, 64, 64),
    Case(2, 4, 2, 130, 32), Case(2, 6, 3, 257, 64), Case(1, 4, 2, 333, 128),
    Case(2, 4, 1, 1000, 64),
]  # fmt: skip
TIMED_TEXTS = [in_texts(TIMED[0])]
ODD_TEXTS = [in_texts(ODD[6]), in_texts(ODD[7]), in_texts(ODD[7], 300), in_texts(ODD[4], 9)]


def kernels():
    """Name -> maker of each kernel."""
    made = {}
    for name, make, forms in (
        ("forward", forward_kernel, plan.FORMS), ("dq", dq_kernel, plan.DQ),
        ("dkdv", dkdv_kernel, plan.DKDV),
    ):  # fmt: skip
        for D, form in forms.items():
            made[f"{name} {D}"] = partial(make, form)
            limited = form._replace(limited=True)
            made[f"documents: {name} {D}"] = partial(make, limited)
    return made


def launches(views):
    """The three launches: forward, dq, dkdv. views: name -> each of `shapes`."""
    names = "do", "q", "k", "v", "o", "lse", "delta", "dq", "dk", "dv"
    of, texts = ("q", "k", "v", "o", "lse"), {"documents": documents_of(views)}
    forward = plan.forward_launch(*(views[name] for name in of), **texts)
    return forward, *plan.backward_launches(Backward(*(views[name] for name in names)), **texts)


def plans():
    """Name -> launches of every check, without arrays."""
    return {
        f"mma {case}": launches({n: ghost(s, kind(n)) for n, s in shapes(case).items()})
        for case in ODD + TIMED + ALSO + ODD_TEXTS + TIMED_TEXTS
    }


def calls(bench, problem):
    """Functions that put forward, dq, dkdv on torch's stream."""
    views = {name: bench.view(tensor) for name, tensor in problem.tensors.items()}
    return [bench.call(launch) for launch in launches(views)]


def check(bench, case, packed):
    """Errors by part, ours and FlashAttention-2's."""
    problem = Problem(bench, case, packed=packed)
    steps = calls(bench, problem)
    names = "o", "lse", "delta", "dq", "dk", "dv"
    outputs = {name: problem.tensors[name] for name in names}
    o, lse, _, dq, dk, dv = bench.repeat(lambda: [step() for step in steps], outputs).values()
    want = exact(problem)
    off = (lse[-1:, :, : case.T].double() - want[1]).abs().max().item()
    if not off < LSE or not (lse[..., case.T :] == 1e30).all():
        raise ValueError(f"lse is off by {off:.1e}")
    seen = errors(problem, want, o, dq, dk, dv)
    peers = errors(problem, want, *problem.results(PEER))
    return {
        part: {"error": error, "peer": peer, "least": LEAST}
        for part, error, peer in zip(("o", "dq", "dk", "dv"), seen, peers, strict=True)
    }


def checks(bench):
    """Name -> check of each case, the odd ones in the model's layout too."""
    plain, odd = ODD + ALSO + TIMED + ODD_TEXTS + TIMED_TEXTS, ODD + ODD_TEXTS
    made = {f"mma {case}": partial(check, bench, case, False) for case in plain}
    return made | {f"mma {case}, packed": partial(check, bench, case, True) for case in odd}


def entrants(bench, case, backward):
    """Name -> calls, one for each set of operands: ours, its two halves backward, the peer."""
    size, made = 2 * 8 * case.B * case.H * case.T * case.D, {}
    for seed in range(max(1, min(3, SETS // size))):
        problem = Problem(bench, case, seed)
        forward, dq, dkdv = calls(bench, problem)
        forward()  # the backward needs its o and lse
        ways = {"ours": forward}
        if backward:
            dq()
            ways = {"ours": lambda dq=dq, dkdv=dkdv: (dq(), dkdv()), "dq": dq, "dk, dv": dkdv}
        for who, call in {**ways, PEER: problem.peer(PEER)[backward]}.items():
            made.setdefault(who, []).append(call)
    return made


def contests(bench):
    """What is timed."""
    return [
        Contest(
            f"attention {'backward' if backward else 'forward'}{in_rows(case)}, mma.sync",
            str(case), partial(entrants, bench, case, backward), peer=PEER,
        )
        for case in TIMED + ALSO + TIMED_TEXTS
        for backward in (False, True)
    ]  # fmt: skip
