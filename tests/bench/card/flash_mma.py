"""Attention by mma.sync, for every card since 8.0, asked for on this one: against FlashAttention-2.

Checked like `flash`: against float64 on odd lengths and grouped heads, twice, into poisoned
outputs, head by head and in the model's layout; errors may be at most twice FlashAttention-2's.
"""

from functools import partial

from bench.card import Contest, ghost
from bench.card.flash import LEAST, LSE, SETS, Case, Problem, errors, exact, fold, kind, shapes

from nanoeuler.engines.gpu import flash_mma_plan as plan
from nanoeuler.engines.gpu.flash_mma import Form, forward_kernel
from nanoeuler.engines.gpu.flash_mma_backward import BackForm, dkdv_kernel, dq_kernel

PEER = "FlashAttention-2"
TIMED = [Case(16, 12, 12, 1024, 64), Case(4, 16, 16, 4096, 64), Case(4, 16, 16, 4096, 128)]
ALSO = [Case(16, 12, 12, 1024, 32), Case(16, 12, 4, 1024, 64)]
ODD = [
    Case(1, 2, 1, 1, 64), Case(2, 2, 2, 5, 32), Case(2, 4, 2, 77, 128), Case(2, 4, 1, 64, 64),
    Case(2, 4, 2, 130, 32), Case(2, 6, 3, 257, 64), Case(1, 4, 2, 333, 128),
    Case(2, 4, 1, 1000, 64),
]  # fmt: skip
FORMS = [
    *plan.FORMS.values(), Form(64, 2, 2, False), Form(64, 3, 2, True), Form(64, 2, 3, False),
    Form(32, 3, 3, True),
]  # fmt: skip


DQ = [
    *plan.DQ.values(), BackForm(64, 8, 64, 2, 1), BackForm(64, 8, 64, 2, 2),
    BackForm(128, 4, 32, 2, 3), BackForm(128, 8, 32, 2, 1),
]  # fmt: skip
DKDV = [
    *plan.DKDV.values(), BackForm(64, 4, 64, 2, 2), BackForm(64, 8, 64, 2, 1),
    BackForm(64, 4, 32, 2, 3), BackForm(128, 4, 32, 2, 2), BackForm(128, 8, 32, 2, 1),
]  # fmt: skip


def kernels():
    """Name -> maker of each kernel."""
    made = {spell(form): partial(forward_kernel, form) for form in dict.fromkeys(FORMS)}
    made |= {back("dq", form): partial(dq_kernel, form) for form in dict.fromkeys(DQ)}
    return made | {back("dkdv", form): partial(dkdv_kernel, form) for form in dict.fromkeys(DKDV)}


def back(what, form):
    """A form of a backward kernel in a few words."""
    D, warps, step, stages, resident = form
    return f"mma {what} {D}, {warps} warps, {step} a step, {stages} stages, {resident} blocks"


def spell(form):
    """A form in a few words."""
    held = ", queries held" if form.hold else ""
    return f"mma forward {form.D}, {form.stages} stages, {form.resident} blocks{held}"


def forward(views, form=None):
    """The launch of the forward pass."""
    return plan.forward_launch(*(views[name] for name in ("q", "k", "v", "o", "lse")), form)


def backward(views, forms=None):
    """The launches of the backward pass."""
    names = "do", "q", "k", "v", "o", "lse", "delta", "dq", "dk", "dv"
    return plan.backward_launches(*(views[name] for name in names), forms)


def pairs_of(D):
    """Forms of dq and of dkdv to check and time together: each kernel's forms occur."""
    dq, dkdv = ([f for f in dict.fromkeys(forms) if f.D == D] for forms in (DQ, DKDV))
    n = max(len(dq), len(dkdv))
    return [(dq[i % len(dq)], dkdv[i % len(dkdv)]) for i in range(n)]


def plans():
    """Name -> launches of every check, without arrays."""
    made = {}
    for case in ODD + TIMED + ALSO:
        views = {n: ghost(s, kind(n)) for n, s in shapes(case).items()}
        made[f"mma {case}"] = (forward(views), *backward(views))
    return made


def check(bench, case, form, packed):
    """Errors by part, ours and FlashAttention-2's."""
    problem = Problem(bench, case, packed=packed)
    views = {name: bench.view(tensor) for name, tensor in problem.tensors.items()}
    call = bench.call(forward(views, form))
    outputs = {name: problem.tensors[name] for name in ("o", "lse")}
    o, lse = bench.repeat(call, outputs).values()
    want = exact(problem)
    off = (lse[-1:, :, : case.T].double() - want[1]).abs().max().item()
    if not off < LSE or not (lse[..., case.T :] == 1e30).all():
        raise ValueError(f"lse is off by {off:.1e}")
    there = problem.peer(PEER)[0]()[0]
    pairs = [(x[-1:].double() - want[0]).norm() / want[0].norm() for x in (o, there)]
    return {"o": {"error": pairs[0].item(), "peer": pairs[1].item(), "least": LEAST}}


def check_backward(bench, case, forms, packed):
    """Errors by part, ours and FlashAttention-2's, of the gradients."""
    problem = Problem(bench, case, packed=packed)
    views = {name: bench.view(tensor) for name, tensor in problem.tensors.items()}
    bench.call(forward(views))()
    call = bench.call(backward(views, forms))
    outputs = {name: problem.tensors[name] for name in ("delta", "dq", "dk", "dv")}
    _, dq, dk, dv = bench.repeat(call, outputs).values()
    want = exact(problem)
    seen = errors(problem, want, problem.tensors["o"], dq, dk, dv)
    there, back = problem.peer(PEER)
    o, (q, k, v) = there()[0], back()[:3]
    peers = errors(problem, want, o, q, fold(problem, k), fold(problem, v))
    return {
        part: {"error": error, "peer": peer, "least": LEAST}
        for part, error, peer in zip(("o", "dq", "dk", "dv"), seen, peers, strict=True)
    }


def checks(bench):
    """Name -> check of each case with each form, some in the model's layout too."""
    made = {}
    for case in ODD + ALSO + TIMED:
        for form in dict.fromkeys(FORMS):
            if form.D == case.D and (case in ODD or form == plan.FORMS[case.D]):
                made[f"{spell(form)}, {case}"] = partial(check, bench, case, form, False)
        if case in ODD:
            name = f"mma forward {case}, packed"
            made[name] = partial(check, bench, case, plan.FORMS[case.D], True)
        for dq, dkdv in pairs_of(case.D)[: None if case in ODD else 1]:
            name = f"{case}, {back('dq', dq)}, {back('dkdv', dkdv)}"
            made[name] = partial(check_backward, bench, case, (dq, dkdv), False)
        if case in ODD:
            made[f"mma backward {case}, packed"] = partial(check_backward, bench, case, None, True)
    return made


def problems_of(bench, case):
    """As many sets of operands as overflow the L2 cache."""
    size = 2 * 8 * case.B * case.H * case.T * case.D
    return [Problem(bench, case, seed) for seed in range(max(1, min(3, SETS // size)))]


def entrants(bench, case):
    """Name -> calls of the forward, one for each set of operands."""
    made = {}
    for problem in problems_of(bench, case):
        views = {name: bench.view(tensor) for name, tensor in problem.tensors.items()}
        made.setdefault("ours", []).append(bench.call(forward(views)))
        for form in dict.fromkeys(FORMS):
            if form.D == case.D and form != plan.FORMS[case.D]:
                made.setdefault(spell(form), []).append(bench.call(forward(views, form)))
        made.setdefault(PEER, []).append(problem.peer(PEER)[0])
    return made


def back_entrants(bench, case):
    """Name -> calls of the backward, one for each set of operands; its kernels by themselves."""
    made = {}
    for problem in problems_of(bench, case):
        views = {name: bench.view(tensor) for name, tensor in problem.tensors.items()}
        bench.call(forward(views))()
        for n, forms in enumerate(pairs_of(case.D)):
            launches = backward(views, forms)
            if not n:
                bench.call(launches)()
                made.setdefault("ours", []).append(bench.call(launches))
            made.setdefault(back("dq", forms[0]), []).append(bench.call(launches[0]))
            made.setdefault(back("dkdv", forms[1]), []).append(bench.call(launches[1]))
        made.setdefault(PEER, []).append(problem.peer(PEER)[1])
    return made


def contests(bench):
    """What is timed."""
    made = {"forward": entrants, "backward": back_entrants}
    return [
        Contest(f"attention {way}, mma.sync", str(case), partial(make, bench, case), peer=PEER)
        for case in TIMED
        for way, make in made.items()
    ]
