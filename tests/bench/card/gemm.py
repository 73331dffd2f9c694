"""The products on tensor cores, against cuBLAS and PyTorch.

Each form is checked on ragged sizes and on those of a training step, again and again. All products
of the presets' training steps are timed by their roles: `gpu.py time --only gemm:step --rounds 1`.
`PYTHONPATH=.:tests python -m bench.card.gemm` then adds up whole steps, and prints the fastest form
of each product as `gemm.MEASURED` has it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from bench.card import Contest, ghost
from published import PUBLISHED

from nanoeuler import measurements
from nanoeuler.engines.gpu.gemm.column_sums import columns_kernel
from nanoeuler.engines.gpu.gemm.cublas import Gemm
from nanoeuler.engines.gpu.gemm.epilogue import EPILOGUES
from nanoeuler.engines.gpu.gemm.wgmma_form import Form
from nanoeuler.engines.gpu.gemm.wgmma_kernel import gemm_kernel, sum_kernel
from nanoeuler.engines.gpu.gemm.wgmma_launch import Operands, choose, product
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS
from nanoeuler.engines.gpu.lang.kernel import cover
from nanoeuler.engines.gpu.lang.vectors import piece
from nanoeuler.engines.gpu.rows.activations import (
    activation_backward_launches,
    swiglu_backward_kernel,
)
from nanoeuler.engines.gpu.rows.column_sums import SUMMING, Walk
from nanoeuler.model.config import PRESETS, parameter_shapes

WORST = {"bf16": 4e-3, "float32": 4e-5}  # relative errors; rounding alone gives less than half
WORST_SQUARE = 6e-3  # of a rounded u's square: twice its rounding and its own, 3 * 2^-9 at most
RAGGED = [(1000, 1000, 200), (136, 264, 72), (520, 1032, 4104), (8, 8, 8)]  # 8: less than any box
LEAST = {"bf16": 2.0**-9, "float32": 2.0**-24}  # what rounding a result alone may cost
REPEATS = 8  # of each product, for equal bits
STEP = [(16384, 768, 768), (2304, 768, 16384)]
APART = "product, then rows"  # two launches of ours, beside one
IN_PLACE = "cuBLAS in place"  # as a step calls the library; PyTorch's addmm copies C first
GATE_THREADS = Walk(1, 2048, piece("bf16"), SUMMING).threads  # of its second, for 2048 columns
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
    step: str = ""  # whose it is
    times: int = 0  # that the step has it

    @property
    def choice(self):
        """The form that the package chooses."""
        form = self.forms[0]
        more = {"second": form.second, "sums": form.sums}
        return choose(form.layout, self.shape, form.epilogue, form.out, **more)


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
BENT = tuple(bf16("NN", p, 2, "gelu backward") for p in (False, True))
BENT_ALL = tuple(
    bf16("NN", p, 2, "gelu backward", second=True, sums="store") for p in (False, True)
)  # fmt: skip
GATED = (bf16("NT", False, 2, "swiglu"),)
GATED_BOTH = (bf16("NT", False, 2, "swiglu", second=True),)
UNGATED = tuple(bf16("NT", True, c, "swiglu backward", second=True) for c in (2, 1))
RESIDUAL = *(bf16("NT", False, c, "residual") for c in (1, 2)), bf16("NT", True, 2, "residual")
OTHERS = (
    bf16("NT", False, 2, "bias"), bf16("TN", False, 2), wide("add", 1, "after"),
    bf16("NN", True, 1, sums="store"), bf16("NN", False, 2, "gelu backward", sums="add"),
    bf16("NT", False, 2, "residual", sums="add"), bf16("NN", True, 1, "residual", sums="add"),
    bf16("NN", True, 2, "swiglu backward", second=True),
    bf16("NN", True, 2, "bias and gelu_exact", second=True),
    bf16("NT", True, 2, "gelu_exact backward", second=True, sums="add"),
    bf16("NN", False, 2, "gelu_exact backward", second=True, sums="add"),
    bf16("NN", True, 2, "bias and relu2", second=True),
    bf16("NT", True, 2, "relu2 backward", second=True, sums="add"),
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
        *fused(
            "matmul, SwiGLU backward", UNGATED, (step // 2, 2048, 768), (2 * step, 2048, 768),
            peers=("torch", APART),
        ),
        *split(CUT, ("best",), (2304, 768, step), (3072, 768, step), (768, 3072, step)),
        *plain("NT", NT, (step, 768, 768), (step, 3072, 768)),
        *plain("NN", NN, (step, 768, 768), (step, 768, 3072), (step, 3072, 768)),
        *plain("NN", NN, (step, 768, 2304)),
        *fused("matmul and residual", RESIDUAL, (step, 768, 3072), (step, 768, 768)),
    ]
    made += [one for step in STEPS for one in products_of(*step)]
    # What the package chooses is always there.
    return [replace(x, forms=tuple(dict.fromkeys((*x.forms, x.choice)))) for x in made]


# ---- The products of a training step

# Preset, sequences and positions of a batch, rows of logits at a time.
STEPS = (
    ("gpt2-124m", 16, 1024, (2048, 4096)), ("euler-116m", 16, 512, (2048, 4096, 8192)),
    ("euler-116m", 64, 512, (4096, 8192)), ("smollm2-135m", 8, 2048, (4096,)),
    ("llama-1b", 4, 2048, (4096,)),
)  # fmt: skip


def roles(config, rows):
    """(role, layout, sizes, epilogue, more of its form) of a layer's products."""
    plain, gated = "bias" if config.bias else "store", config.mlp == "swiglu"
    up = "swiglu" if gated else "bias and gelu"
    back = ("gelu backward", {"second": True, "sums": "store"})
    back = ("swiglu backward", {"second": True}) if gated else back
    weights = parameter_shapes(config)
    for name in ("qkv", "o", "_up", "_down"):
        k, n = weights[f"block.0.w{name}"]
        name = name.strip("_")
        if name == "up":
            yield f"forward {name}", "NN", (rows, config.hidden, k), up, {"second": True}
        else:
            yield f"forward {name}", "NN", (rows, n, k), plain, {}
        yield f"d input of {name}", "NT", (rows, k, n), *(back if name == "down" else ("store", {}))
        yield f"d weights of {name}", "TN", (k, n, rows), "store", {"out": "float32"}


def head(config, rows):
    """The same of the last layer, for so many rows of logits."""
    C, outputs = config.dim, cover(config.vocab_size * config.n_predict, 64) * 64
    there, back = ("NT", "NN") if config.tied else ("NN", "NT")
    turned = (outputs, C, rows) if config.tied else (C, outputs, rows)
    yield "logits", there, (rows, outputs, C), "store", {}
    yield "d input of logits", back, (rows, C, outputs), "store", {}
    yield "d weights of logits", "TN", turned, "store", {"out": "float32"}


def busy(m, n, columns):
    """The share of a card's time that goes into C, if each multiprocessor takes whole tiles."""
    rounds = cover(cover(m, 128) * cover(n, columns), MULTIPROCESSORS)
    return m * n / (rounds * MULTIPROCESSORS * 128 * columns)


def plausible(layout, shape, epilogue, more):
    """The forms of ours that may win."""
    make = partial(Form, layout, epilogue=epilogue, **more)
    few = cover(shape[0], 256) * cover(shape[1], 256) < 132
    gain = EPILOGUES[epilogue].narrow and busy(*shape[:2], 192) > max(0.9, busy(*shape[:2], 256))
    narrow = [make(cluster=c, narrow=True) for c in (2, 1) if gain]
    if "out" in more:
        cut = [make(cluster=c, pieces="together") for c in (2, 1)]
        return (make(cluster=2), *(cut if few else cut[:1]), *narrow)
    turns = make(pingpong=True, cluster=2), make(pingpong=True)
    if epilogue == "swiglu backward":
        return turns
    if epilogue == "swiglu":
        return make(cluster=2), make(), *turns
    if epilogue == "gelu backward":
        return make(cluster=2), turns[0]  # single blocks spill 16 bytes of a thread
    long = few and epilogue == "store" and shape[2] > shape[1]
    more = [make(cluster=2, pieces="together")] if long else []
    return (make(cluster=2), *turns, *more, *narrow)


def products_of(preset, sequences, positions, chunks):
    """The products of a preset's step, each size once for each role; of logits by rows."""
    config, rows = (PRESETS | PUBLISHED)[preset], sequences * positions
    step = f"{preset} {sequences}x{positions}"
    layer = [(step, *role, config.n_layers) for role in roles(config, rows)]
    ends = [(f"{step} by {n}", *role, rows // n) for n in chunks for role in head(config, n)]
    for step, role, layout, shape, epilogue, more, times in layer + ends:
        ways = [(epilogue, "", times)]
        if layout == "TN":  # the first of a step is stored, others are added
            first = 1 if "logits" in role else times
            ways = [("store", ", stored", first), ("add", ", added", times - first)]
        for way, how, count in [way for way in ways if way[2]]:
            other = {"add": ("torch", IN_PLACE), "swiglu backward": (APART,)}.get(way, ())
            peers = "cuBLAS", *other
            yield Product(
                f"step {step}: {role}{how}", case(layout, *shape), shape,
                plausible(layout, shape, way, more), peers, step=step, times=count,
            )  # fmt: skip


def label(form, cut=""):
    """A form in a few words."""
    parts = [
        form.layout,
        "ping-pong" if form.pingpong else "narrow" if form.narrow else "cooperative",
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
    made[APART] = partial(swiglu_backward_kernel, "bf16", True, False, GATE_THREADS)
    return made | {f"columns, {add=}": partial(columns_kernel, add) for add in (False, True)}


def stored(form, m, n, k):
    """The shapes of a product's operands as they are stored; None for those that it has not."""
    wide = 2 * n if form.epilogue == "swiglu" else n
    a = (k, m) if form.layout[0] == "T" else (m, k)
    b = (k, wide) if form.layout[1] == "N" else (wide, k)
    aux = {"": None, "bias": (n,), "tile": (m, n)}.get(form.way.aux, (1, 2, m, n))
    second = (aux if form.way.aux == "tiles" else (m, wide)) if form.second else None
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
    which = "none" if "exact" in form.epilogue else "tanh"
    gelu = partial(torch.nn.functional.gelu, approximate=which)
    made = {"c": s}
    if form.epilogue == "bias and relu2":
        made = {"c": torch.relu(s).square()} | ({"second": s} if form.second else {})
    if form.epilogue == "relu2 backward":
        above = torch.relu(of.aux)
        made = {"c": 2 * above * s} | ({"second": above.square()} if form.second else {})
    if "and gelu" in form.epilogue:
        made = {"c": gelu(s)} | ({"second": s} if form.second else {})
    if form.epilogue in ("gelu backward", "gelu_exact backward"):
        made = {"c": torch.ops.aten.gelu_backward(s, of.aux, approximate=which)}
        made |= {"second": gelu(of.aux)} if form.second else {}
    if form.epilogue == "swiglu":
        gates, ups = s.chunk(2, 1)
        made = {"c": torch.nn.functional.silu(gates) * ups} | ({"second": s} if form.second else {})
    if form.epilogue == "swiglu backward":
        made = gated_back(torch, s, of.aux)
    if form.sums != "no":
        made["sums"] = made["c"].sum(0, dtype=torch.promote_types(s.dtype, torch.float32))
    return made


def gated_back(torch, s, aux):
    """What the backward of SwiGLU gives, of s = dh (m, n) and gates and ups (1, 2, m, n)."""
    gates, ups = aux[0]
    h = torch.nn.functional.silu(gates)
    slopes = torch.stack([torch.ops.aten.silu_backward(s * ups, gates), s * h])
    return {"c": h * ups, "second": slopes[None]}


def rows_of_halves(x):
    """(1, 2, m, n) of a tensor (m, 2 n), as that."""
    return x.transpose(1, 2).reshape(x.shape[2], -1)


def apart(bench, _, of):
    """A function that puts a product, then the kernel of rows, on torch's stream; C is dh too."""
    a, b, dh = (bench.view(x) for x in (of.a, of.b, of.c))
    u, du = (bench.view(rows_of_halves(x)) for x in (of.aux, of.second))
    form = choose("NT", (*of.c.shape, of.a.shape[1]))
    launches = product(form, a, b, dh, place=bench.device.array)
    again = bench.view(of.c.clone())
    return bench.call([*launches, *activation_backward_launches("swiglu", dh, u, du, h=again)])


def in_place(bench, form, of):
    """A function that has the library add a product to C itself."""
    stream = bench.torch.cuda.current_stream
    args = tuple(map(bench.view, (of.a, of.b, of.c)))
    start = Gemm(form.layout, args, "bf16", add=True).prepare(bench.device)
    return lambda: start(stream().cuda_stream)


OTHER = {APART: apart, IN_PLACE: in_place}


def library(bench, peer, form, of):
    """A function that does the same in another way; `peer` says which."""
    torch = bench.torch
    if peer in OTHER:
        return OTHER[peer](bench, form, of)
    if peer == "cuBLASLt":
        return lambda: torch._addmm_activation(of.aux, of.a, of.b.T, use_gelu=True)
    if form.epilogue == "add" and peer == "cuBLAS":
        return lambda: torch.addmm(of.c, of.a.T, of.b, out_dtype=torch.float32)
    if form.epilogue == "add":
        return lambda: of.c.add_(torch.mm(of.a.T, of.b, out_dtype=torch.float32))
    plain = form.epilogue in ("store", "residual") and form.out == "bf16"
    return lambda: results(torch, form, of, of.c if plain else None)


def zeros(torch, kind, *extents):
    return torch.zeros(extents, device="cuda", dtype=kind)


def halved(make, extents):
    """A tensor of these extents; of (1, 2, m, n) as a view of (m, 2 n)."""
    if len(extents) < 4:
        return make(*extents)
    _, two, m, n = extents
    return make(m, two * n).view(1, m, two, n).transpose(1, 2)


def operands(bench, form, shape):
    """Random A, B and aux, and zeros for what is stored."""
    torch, made = bench.torch, {}
    for name, extents in vars(stored(form, *shape)).items():
        wide = name == "sums" or name == "c" and form.out == "float32"
        kind = torch.float32 if wide else torch.bfloat16
        given = name in ("a", "b", "aux")
        make = bench.random if given else partial(zeros, torch, kind)
        made[name] = extents and halved(make, extents)
    if "backward" in form.epilogue or form.epilogue == "swiglu":
        made["b"] *= shape[2] ** -0.5  # gates and gradients of a size where curves are curved
    return Operands(**made)


def check(bench, form, shape, ours=ours):
    """The relative errors of one product, and the library's; ValueError where it is not right.

    ours: a function that puts the product on torch's stream.
    """
    torch, of = bench.torch, operands(bench, form, shape)
    exact = Operands(**{name: x if x is None else x.double() for name, x in vars(of).items()})
    want, peer = results(torch, form, exact), results(torch, form, of)
    peers = {name: bench.error(x, want[name]) for name, x in peer.items()}
    outputs = {
        name: halved(partial(bench.output, dtype=vars(of)[name].dtype), x.shape)
        for name, x in want.items()
    }
    if form.epilogue == "add":
        want["c"] += outputs["c"].normal_()
    if form.sums == "add":
        want["sums"] += outputs["sums"].normal_()
    if "backward" in form.epilogue and form.second:
        outputs["second"].copy_(of.aux)  # GELU(U) over U
        of = replace(of, aux=outputs["second"])
    got = bench.repeat(ours(bench, form, replace(of, **outputs)), outputs, REPEATS)
    seen = {}
    for name, x in got.items():
        kind = "float32" if x.dtype == torch.float32 else "bf16"
        error = bench.error(x, want[name])
        squared = kind == "bf16" and name == "c" and "relu2" in form.epilogue
        if not error < (WORST_SQUARE if squared else WORST[kind]):
            raise ValueError(f"{shape}: relative error of {name} {error:.2e}")
        seen[name] = {"error": error, "peer": peers[name], "least": LEAST[kind]}
    return seen["c"] if len(seen) == 1 else seen


def check_views(bench, form, shape):
    """The errors of one product of views with odd sizes.

    ValueError if it writes beside C, but for the 16 bytes that a row ends in.
    """
    torch, of = bench.torch, {}
    shapes = vars(stored(form, *shape))
    for name in "abc":
        rows, columns = shapes[name]
        whole = bench.random(rows, cover(columns, 8) * 8 + 8)
        if name == "c":
            whole = whole.float() if form.out == "float32" else whole
            whole[:, columns:] = float("nan")
            step = 16 // whole.element_size()
            beside = whole[:, cover(columns, step) * step :]
        of[name] = whole[:, :columns]
    exact = Operands(**{name: x.double() for name, x in of.items()})
    want, peer = (results(torch, form, x)["c"] for x in (exact, Operands(**of)))
    peer_error = bench.error(peer, want)
    want = want + exact.c if form.epilogue == "add" else want
    ours(bench, form, Operands(**of))()
    torch.cuda.synchronize()
    error = bench.error(of["c"], want)
    if not error < WORST[form.out] or not beside.isnan().all():
        raise ValueError(f"{shape}: relative error {error:.2e}, or something beside C was written")
    return {"error": error, "peer": peer_error, "least": LEAST[form.out]}


VIEWS = bf16("NT"), bf16("NN", True, 2), wide("add", 2, "together"), wide("store", 1, "together")
ODD = 1003, 997, 2129  # k is 17 more than a multiple of 64, as a vocabulary of 50257 is


def checks(bench):
    """Name -> check of each form on each size, and of some on views."""
    made = {
        f"matmul {label(form)} {'x'.join(map(str, shape))}": partial(check, bench, form, shape)
        for form in FORMS
        for shape in RAGGED + STEP
        if possible(form, shape)
    }
    return made | {
        f"matmul of views {label(form)}": partial(check_views, bench, form, ODD) for form in VIEWS
    }


def entrants(bench, made):
    """Name -> calls, one for each set of operands; as many sets as overflow the L2 cache."""
    m, n, k = made.shape
    count = 1 if 2 * (m * k + n * k + m * n) > L2 else 3
    form = made.forms[0]
    sets = [operands(bench, form, made.shape) for _ in range(count)]
    field = {peer: [library(bench, peer, form, tensors) for tensors in sets] for peer in made.peers}
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


# ---- What came of it


def steps(rows: list[dict]) -> Iterator[str]:
    """A line for each step, of rows of kernels.json: its products added up, ours and the peer's.

    Where the library has two ways, its faster one.
    """
    mine = [row for row in rows if row["engine"] == "cuda" and row["peer"] in ("cuBLAS", "torch")]
    mine.sort(key=lambda row: -row["peer_value"])
    seen = {(row["what"], row["case"]): row for row in mine}
    by_step: dict[str, list] = {}
    for made in products():
        if made.step:
            by_step.setdefault(made.step, []).append((made, seen.get((made.what, made.case))))
    for step, parts in by_step.items():
        whole = by_step.get(step.partition(" by ")[0], []) if " by " in step else []
        if whole and all(row for made, row in whole + parts if made.times):
            ours, peer = (
                sum(made.times * row[key] for made, row in whole + parts if made.times)
                for key in ("value", "peer_value")
            )
            yield f"step {step} rows: {ours:.3f} ms, library {peer:.3f}: {ours / peer:.3f}"


def fastest(rows: list[dict]) -> Iterator[str]:
    """A line for `gemm.MEASURED` of each product that was timed: the fastest of our forms."""
    forms, best = {label(form): form for form in FORMS}, {}
    shapes = {(made.what, made.case): made.shape for made in products()}
    for row in rows:
        form, shape = forms.get(row["engine"]), shapes.get((row["what"], row["case"]))
        if form and shape and row["unit"] == "ms":
            epilogue = "store" if form.epilogue == "add" else form.epilogue
            key = (form.layout, epilogue, form.out, form.second), shape
            way = form.pingpong, form.cluster, form.pieces, *[True] * form.narrow
            best[key] = min(best.get(key, (row["value"], way)), (row["value"], way))
    for (kind, shape), (ms, way) in sorted(best.items()):
        yield f"{kind}: {way}: {shape},  # {ms:.4f} ms"


if __name__ == "__main__":
    rows = measurements.load("kernels")
    print(*fastest(rows), *steps(rows), sep="\n")
