"""The products on tensor cores, against cuBLAS and PyTorch.

Each form is checked on ragged sizes and on those of a training step, again and again.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from bench.card import Contest, ghost

from nanoeuler.engines.gpu.gemm import choose, product, sizes
from nanoeuler.engines.gpu.gemm_form import Form
from nanoeuler.engines.gpu.gemm_wgmma import gemm_kernel, sum_kernel

WORST = {"bf16": 4e-3, "float32": 4e-5}  # relative errors; rounding alone gives less than half
RAGGED = [(1000, 1000, 200), (136, 264, 72), (520, 1032, 4104), (8, 8, 8)]  # 8: less than any box
LEAST = {"bf16": 2.0**-9, "float32": 2.0**-24}  # what rounding a result alone may cost
REPEATS = 8  # of each product, for equal bits
STEP = [(16384, 768, 768), (2304, 768, 16384)]
L2 = 1.2e9  # bytes of operands beyond which one set overflows the cache by itself


@dataclass(frozen=True)
class Product:
    """What is timed: the names of its rows, sizes, forms, and the library's ways."""

    what: str
    case: str
    shape: tuple[int, int, int]
    forms: tuple[Form, ...]
    peers: tuple[str, ...]
    cuts: tuple[str, ...] = ("best",)

    @property
    def choice(self):
        """The form that the package chooses."""
        form = self.forms[0]
        return choose(form.layout, *self.shape, form.epilogue, form.out)


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


def products():
    """All that is timed, those of the bar first."""
    f32 = " to float32"

    def plain(layout, forms, *shapes):
        return [Product("matmul", case(layout, *s), s, forms, ("cuBLAS",)) for s in shapes]

    def split(forms, cuts, *shapes):
        return [Product("matmul", case("TN", *s, f32), s, forms, ("cuBLAS",), cuts) for s in shapes]

    def fused(what, forms, peers, *shapes):
        return [Product(what, case("NT", *s), s, forms, peers) for s in shapes]

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
    # What the package chooses is always there.
    return [replace(x, forms=tuple(dict.fromkeys((*x.forms, x.choice)))) for x in made]


def label(form, cut=""):
    """A form in a few words."""
    parts = [
        form.layout, "ping-pong" if form.pingpong else "cooperative",
        "cluster 2" if form.cluster == 2 else "", form.epilogue if form.epilogue != "store" else "",
        form.out if form.out != "bf16" else "", form.pieces if form.pieces != "no" else "", cut,
    ]  # fmt: skip
    return " ".join(part for part in parts if part)


# All forms that are compiled and checked, in the order of their names.
FORMS = sorted({*OTHERS, *(form for made in products() for form in made.forms)}, key=label)


def kernels():
    """Name -> maker of each kernel."""
    made = {label(form): partial(gemm_kernel, form) for form in FORMS}
    after = [form for form in FORMS if form.pieces == "after"]
    return made | {f"{label(form)}, the sum": partial(sum_kernel, form) for form in after}


def stored(form, m, n, k):
    """The shapes of A, B, C and aux as they are stored; None for no aux."""
    a = (k, m) if form.layout[0] == "T" else (m, k)
    b = (k, n) if form.layout[1] == "N" else (n, k)
    aux = {"residual": (m, n), "bias": (n,), "bias and gelu": (n,)}.get(form.epilogue)
    return a, b, (m, n), aux


def plans():
    """Name -> launches of every check and contest, without arrays."""
    shapes = {(form, shape, "best") for form in FORMS for shape in (*RAGGED, *STEP)}
    shapes |= {(f, x.shape, cut) for x in products() for f in x.forms for cut in x.cuts}
    return {f"{label(f, cut)}, {shape}": plan(f, shape, cut) for f, shape, cut in shapes}


def plan(form, shape, cut):
    """The launches of a product on stand-ins."""
    a, b, c, aux = stored(form, *shape)
    out = np.float32 if form.out == "float32" else np.uint16
    arrays = ghost(a), ghost(b), ghost(c, out), aux and ghost(aux)
    sizes(form, *arrays)
    return product(form, *arrays, cut=cut)


def ours(bench, form, a, b, c, aux=None, cut="best"):
    """A function that puts one product on torch's stream."""
    views = [tensor if tensor is None else bench.view(tensor) for tensor in (a, b, c, aux)]
    return bench.call(product(form, *views, place=bench.device.array, cut=cut))


def library(torch, peer, form, a, b, c, aux):
    """A function that does the same with the library; `peer` says how."""
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


def operands(bench, form, shape):
    """Random A, B and aux, and a C of zeros."""
    a, b, c, aux = stored(form, *shape)
    kind = bench.torch.float32 if form.out == "float32" else bench.torch.bfloat16
    zeros = bench.torch.zeros(c, device="cuda", dtype=kind)
    return bench.random(*a), bench.random(*b), zeros, aux and bench.random(*aux)


def check(bench, form, shape):
    """The relative error of one product, and the library's; ValueError where it is not right."""
    torch = bench.torch
    m, n, k = shape
    a, b, _, aux = operands(bench, form, shape)
    kind = torch.float32 if form.out == "float32" else torch.bfloat16
    c = bench.output(m, n, dtype=kind)
    want = (a.T if form.layout[0] == "T" else a).double()
    want = want @ (b.T if form.layout[1] == "T" else b).double()
    plain = library(torch, "cuBLAS", form, a, b, torch.empty_like(c), None)()
    peer = bench.error(plain, want)
    if aux is not None:
        want += aux.double()
    if "gelu" in form.epilogue:
        want = torch.nn.functional.gelu(want, approximate="tanh")
    if form.epilogue == "add":
        c.normal_()
        want += c
    c = bench.repeat(ours(bench, form, a, b, c, aux), {"C": c}, REPEATS)["C"]
    error = bench.error(c, want)
    if not error < WORST[form.out]:
        raise ValueError(f"{shape}: relative error {error:.2e}")
    return {"error": error, "peer": peer, "least": LEAST[form.out]}


def checks(bench):
    """Name -> check of each form on each size."""
    return {
        f"matmul {label(form)} {'x'.join(map(str, shape))}": partial(check, bench, form, shape)
        for form in FORMS
        for shape in RAGGED + STEP
    }


def entrants(bench, made):
    """Name -> calls, one for each set of operands; as many sets as overflow the L2 cache."""
    m, n, k = made.shape
    count = 1 if 2 * (m * k + n * k + m * n) > L2 else 3
    form = made.forms[0]
    sets = [operands(bench, form, made.shape) for _ in range(count)]
    field = {
        peer: [library(bench.torch, peer, form, *tensors) for tensors in sets]
        for peer in made.peers
    }
    for form in made.forms:
        for cut in made.cuts:
            name = label(form, cut if len(made.cuts) > 1 else "")
            field[name] = [ours(bench, form, *tensors, cut=cut) for tensors in sets]
    return field


def contests(bench):
    """What is timed."""
    return [
        Contest(
            made.what, made.case, partial(entrants, bench, made),
            label(made.choice, "best" if len(made.cuts) > 1 else ""), made.peers,
        )
        for made in products()
    ]  # fmt: skip
