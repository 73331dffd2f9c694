"""The products on tensor cores, against cuBLAS and PyTorch.

Each form is checked on ragged sizes and on those of a training step, again and again.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from bench.card import Contest, ghost

from nanoeuler.engines.gpu.gemm import Operands, choose, product
from nanoeuler.engines.gpu.gemm_columns import columns_kernel
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
        more = {"second": form.second, "sums": form.sums}
        return choose(form.layout, *self.shape, form.epilogue, form.out, **more)


def bf16(layout, pingpong=False, cluster=1, epilogue="store", **more):
    return Form(layout, pingpong, cluster, epilogue, **more)


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
CURVED = bf16("NT", False, 1, "bias and gelu"), bf16("NT", True, 1, "bias and gelu")
CURVED_BOTH = tuple(bf16("NT", p, 2, "bias and gelu", second=True) for p in (False, True))
BENT = (bf16("NN", False, 2, "gelu backward"),)
BENT_ALL = (bf16("NN", False, 2, "gelu backward", second=True, sums="store"),)
GATED = (bf16("NT", False, 2, "swiglu"),)
GATED_BOTH = (bf16("NT", False, 2, "swiglu", second=True),)
RESIDUAL = bf16("NT", False, 1, "residual"), bf16("NT", False, 2, "residual")
OTHERS = (
    bf16("NT", False, 2, "bias"), bf16("TN", False, 2), wide("add", 1, "after"),
    bf16("NN", True, 1, sums="store"), bf16("NN", False, 2, "gelu backward", sums="add"),
    bf16("NT", False, 2, "residual", sums="add"),
)  # fmt: skip


def case(layout, m, n, k, out=""):
    return f"{layout} {m}x{n}x{k} bf16{out}"


def products():
    """All that is timed, those of the bar first."""
    f32 = " to float32"

    def plain(layout, forms, *shapes):
        return [Product("matmul", case(layout, *s), s, forms, ("cuBLAS",)) for s in shapes]

    def split(forms, cuts, *shapes):
        return [Product("matmul", case("TN", *s, f32), s, forms, ("cuBLAS",), cuts) for s in shapes]

    def fused(what, forms, *shapes, peers=("torch",)):
        layout = forms[0].layout
        return [Product(what, case(layout, *s), s, forms, peers) for s in shapes]

    step = 16384
    made = [
        *plain("NT", (*NT, LONG[0]), (8192,) * 3, (step, 768, 3072)),
        *plain("NT", NT, (step, 2304, 768), (step, 50304, 768)),
        *plain("NN", (*NN, LONG[1]), (step, 768, 50304)),
        *split(CUT, ("best", "level"), (768, 768, step)),
        *split(TN, ("best",), (50304, 768, step)),
        *fused("matmul, bias and GELU", CURVED, (step, 3072, 768), peers=("torch", "cuBLASLt")),
        *fused("matmul, bias and GELU, both stored", CURVED_BOTH, (step, 3072, 768)),
        *fused("matmul and GELU backward", BENT, (step, 3072, 768)),
        *fused("matmul, GELU backward, GELU and sums", BENT_ALL, (step, 3072, 768)),
        *fused("matmul and SwiGLU", GATED, (step, 2048, 768)),
        *fused("matmul and SwiGLU, both stored", GATED_BOTH, (step, 2048, 768)),
        *split(CUT, ("best",), (2304, 768, step), (3072, 768, step), (768, 3072, step)),
        *plain("NT", NT, (step, 768, 768), (step, 3072, 768)),
        *plain("NN", NN, (step, 768, 768), (step, 768, 3072), (step, 3072, 768)),
        *plain("NN", NN, (step, 768, 2304)),
        *fused("matmul and residual", RESIDUAL, (step, 768, 3072), (step, 768, 768)),
    ]
    # What the package chooses is always there.
    return [replace(x, forms=tuple(dict.fromkeys((*x.forms, x.choice)))) for x in made]


def label(form, cut=""):
    """A form in a few words."""
    parts = [
        form.layout, "ping-pong" if form.pingpong else "cooperative",
        "cluster 2" if form.cluster == 2 else "", form.epilogue if form.epilogue != "store" else "",
        form.out if form.out != "bf16" else "", form.pieces if form.pieces != "no" else "",
        "two stored" if form.second else "", f"sums {form.sums}" if form.sums != "no" else "", cut,
    ]  # fmt: skip
    return " ".join(part for part in parts if part)


# All forms that are compiled and checked, in the order of their names.
FORMS = sorted({*OTHERS, *(form for made in products() for form in made.forms)}, key=label)


def kernels():
    """Name -> maker of each kernel."""
    made = {label(form): partial(gemm_kernel, form) for form in FORMS}
    after = [form for form in FORMS if form.pieces == "after"]
    made |= {f"{label(form)}, the sum": partial(sum_kernel, form) for form in after}
    return made | {f"columns, {add=}": partial(columns_kernel, add) for add in (False, True)}


def stored(form, m, n, k):
    """The shapes of a product's operands as they are stored; None for those that it has not."""
    wide = 2 * n if form.epilogue == "swiglu" else n
    a = (k, m) if form.layout[0] == "T" else (m, k)
    b = (k, n) if form.layout[1] == "N" else (wide, k)
    aux = {"": None, "bias": (n,), "tile": (m, n)}[form.way.aux]
    second = (m, wide) if form.second else None
    return Operands(a, b, (m, n), aux, second, None if form.sums == "no" else (n,))


def possible(form, shape):
    """Whether a product has a form: gates that are stored come in sixty-fours."""
    return not (form.epilogue == "swiglu" and form.second and shape[1] % 64)


def plans():
    """Name -> launches of every check and contest, without arrays."""
    shapes = {(form, shape, "best") for form in FORMS for shape in (*RAGGED, *STEP)}
    shapes |= {(f, x.shape, cut) for x in products() for f in x.forms for cut in x.cuts}
    made = [(f, shape, cut) for f, shape, cut in shapes if possible(f, shape)]
    return {f"{label(f, cut)}, {shape}": plan(f, shape, cut) for f, shape, cut in made}


def plan(form, shape, cut):
    """The launches of a product on stand-ins."""
    wide = {"sums": np.float32, "c": np.float32 if form.out == "float32" else np.uint16}
    of = {
        name: extents and ghost(extents, wide.get(name, np.uint16))
        for name, extents in vars(stored(form, *shape)).items()
    }
    return product(form, **of, cut=cut)


def ours(bench, form, of, cut="best"):
    """A function that puts one product of tensors on torch's stream."""
    views = {name: x if x is None else bench.view(x) for name, x in vars(of).items()}
    return bench.call(product(form, **views, place=bench.device.array, cut=cut))


def multiplied(torch, form, of, out=None):
    """op(A) op(B) of tensors of any dtype, in float32 where C is."""
    a = of.a.T if form.layout[0] == "T" else of.a
    b = of.b.T if form.layout[1] == "T" else of.b
    if form.way.aux == "bias":
        return torch.addmm(of.aux, a, b)
    if form.epilogue == "residual":
        return torch.addmm(of.aux, a, b, out=out)
    if form.out == "float32" and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b, out=out)


def results(torch, form, of, out=None):
    """What a form stores, by PyTorch, of tensors of any dtype; "c" before anything is added to."""
    s = multiplied(torch, form, of, out)
    gelu = partial(torch.nn.functional.gelu, approximate="tanh")
    made = {"c": s}
    if form.epilogue == "bias and gelu":
        made = {"c": gelu(s)} | ({"second": s} if form.second else {})
    if form.epilogue == "gelu backward":
        made = {"c": torch.ops.aten.gelu_backward(s, of.aux, approximate="tanh")}
        made |= {"second": gelu(of.aux)} if form.second else {}
    if form.epilogue == "swiglu":
        gates, ups = s.chunk(2, 1)
        made = {"c": torch.nn.functional.silu(gates) * ups} | ({"second": s} if form.second else {})
    if form.sums != "no":
        made["sums"] = made["c"].sum(0, dtype=torch.promote_types(s.dtype, torch.float32))
    return made


def library(torch, peer, form, of):
    """A function that does the same with the library; `peer` says how."""
    if peer == "cuBLASLt":
        return lambda: torch._addmm_activation(of.aux, of.a, of.b.T, use_gelu=True)
    plain = form.epilogue in ("store", "residual") and form.out == "bf16"
    return lambda: results(torch, form, of, of.c if plain else None)


def operands(bench, form, shape):
    """Random A, B and aux, and zeros for what is stored."""
    torch, made = bench.torch, {}
    for name, extents in vars(stored(form, *shape)).items():
        wide = name == "sums" or name == "c" and form.out == "float32"
        kind = torch.float32 if wide else torch.bfloat16
        given = name in ("a", "b", "aux")
        make = bench.random if given else partial(torch.zeros, device="cuda", dtype=kind)
        made[name] = extents and make(*extents) if given else extents and make(extents)
    if form.epilogue in ("gelu backward", "swiglu"):
        made["b"] *= shape[2] ** -0.5  # gates and gradients of a size where curves are curved
    return Operands(**made)


def check(bench, form, shape):
    """The relative errors of one product, and the library's; ValueError where it is not right."""
    torch, of = bench.torch, operands(bench, form, shape)
    exact = Operands(**{name: x if x is None else x.double() for name, x in vars(of).items()})
    want, peer = results(torch, form, exact), results(torch, form, of)
    peers = {name: bench.error(x, want[name]) for name, x in peer.items()}
    outputs = {name: bench.output(*x.shape, dtype=vars(of)[name].dtype) for name, x in want.items()}
    if form.epilogue == "add":
        want["c"] += outputs["c"].normal_()
    if form.sums == "add":
        want["sums"] += outputs["sums"].normal_()
    if form.epilogue == "gelu backward" and form.second:
        outputs["second"].copy_(of.aux)  # GELU(U) over U
        of = replace(of, aux=outputs["second"])
    got = bench.repeat(ours(bench, form, replace(of, **outputs)), outputs, REPEATS)
    seen = {}
    for name, x in got.items():
        kind = "float32" if x.dtype == torch.float32 else "bf16"
        error = bench.error(x, want[name])
        if not error < WORST[kind]:
            raise ValueError(f"{shape}: relative error of {name} {error:.2e}")
        seen[name] = {"error": error, "peer": peers[name], "least": LEAST[kind]}
    return seen["c"] if len(seen) == 1 else seen


def checks(bench):
    """Name -> check of each form on each size."""
    return {
        f"matmul {label(form)} {'x'.join(map(str, shape))}": partial(check, bench, form, shape)
        for form in FORMS
        for shape in RAGGED + STEP
        if possible(form, shape)
    }


def entrants(bench, made):
    """Name -> calls, one for each set of operands; as many sets as overflow the L2 cache."""
    m, n, k = made.shape
    count = 1 if 2 * (m * k + n * k + m * n) > L2 else 3
    form = made.forms[0]
    sets = [operands(bench, form, made.shape) for _ in range(count)]
    field = {
        peer: [library(bench.torch, peer, form, tensors) for tensors in sets]
        for peer in made.peers
    }
    for form in made.forms:
        for cut in made.cuts:
            name = label(form, cut if len(made.cuts) > 1 else "")
            field[name] = [ours(bench, form, tensors, cut=cut) for tensors in sets]
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
