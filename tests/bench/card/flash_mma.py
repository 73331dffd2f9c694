"""Attention by mma.sync, for every card since 8.0, asked for on this one: against FlashAttention-2.

Checked like `flash`: against float64 on odd lengths and grouped heads, twice, into poisoned
outputs, head by head and in the model's layout; errors may be at most twice FlashAttention-2's.
"""

from functools import partial

from bench.card import Contest, ghost
from bench.card.flash import LEAST, LSE, SETS, Case, Problem, exact, kind, shapes

from nanoeuler.engines.gpu import flash_mma_plan as plan
from nanoeuler.engines.gpu.flash_mma import Form, forward_kernel

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


def kernels():
    """Name -> maker of each kernel."""
    return {spell(form): partial(forward_kernel, form) for form in dict.fromkeys(FORMS)}


def spell(form):
    """A form in a few words."""
    held = ", queries held" if form.hold else ""
    return f"mma forward {form.D}, {form.stages} stages, {form.resident} blocks{held}"


def forward(views, form=None):
    """The launch of the forward pass."""
    return plan.forward_launch(*(views[name] for name in ("q", "k", "v", "o", "lse")), form)


def plans():
    """Name -> launches of every check, without arrays."""
    return {
        f"mma {case}": (forward({n: ghost(s, kind(n)) for n, s in shapes(case).items()}),)
        for case in ODD + TIMED + ALSO
    }


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


def checks(bench):
    """Name -> check of each case with each form, some in the model's layout too."""
    made = {}
    for case in ODD + ALSO + TIMED:
        for form in dict.fromkeys(FORMS):
            if form.D == case.D:
                made[f"{spell(form)}, {case}"] = partial(check, bench, case, form, False)
        if case in ODD:
            name = f"mma forward {case}, packed"
            made[name] = partial(check, bench, case, plan.FORMS[case.D], True)
    return made


def entrants(bench, case):
    """Name -> calls, one for each set of operands."""
    size = 2 * 8 * case.B * case.H * case.T * case.D
    problems = [Problem(bench, case, seed) for seed in range(max(1, min(3, SETS // size)))]
    made = {}
    for problem in problems:
        views = {name: bench.view(tensor) for name, tensor in problem.tensors.items()}
        made.setdefault("ours", []).append(bench.call(forward(views)))
        for form in dict.fromkeys(FORMS):
            if form.D == case.D and form != plan.FORMS[case.D]:
                made.setdefault(spell(form), []).append(bench.call(forward(views, form)))
        made.setdefault(PEER, []).append(problem.peer(PEER)[0])
    return made


def contests(bench):
    """What is timed."""
    return [
        Contest("attention forward, mma.sync", str(case), partial(entrants, bench, case), peer=PEER)
        for case in TIMED + ALSO
    ]
