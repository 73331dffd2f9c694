"""The products by mma.sync, which every card since 8.0 can do, against cuBLAS.

Each form is checked on ragged sizes and on those of a training step, again and again. A kernel that
does nothing but mma.sync, on registers, says what is the most there can be.
"""

from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from bench.card import Contest, ghost
from bench.card.gemm import L2, LEAST, RAGGED, REPEATS, STEP, WORST, case

from nanoeuler.engines.gpu.gemm.mma_form import FRAGMENTS, SIDE, SUMS, MmaForm
from nanoeuler.engines.gpu.gemm.mma_kernel import mma_kernel, sum_kernel
from nanoeuler.engines.gpu.gemm.mma_launch import choose_mma, mma_product, space_for
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.engines.gpu.lang.ptx import load_int2, mma_tile, store_float, zeros

HOPPER = 9, 0  # whose cards this measures
ADA = 8, 9  # whose forms, of at most 99 KiB, are timed beside them
BLOCKS = 132  # multiprocessors of an H200


@dataclass(frozen=True)
class Product:
    """What is timed: its sizes, forms that are tried beside the chosen one, where C goes."""

    shape: tuple[int, int, int]
    forms: tuple[MmaForm, ...]

    @property
    def choice(self):
        """The form that the package chooses."""
        form = self.forms[0]
        return choose_mma(form.layout, *self.shape, form.epilogue, form.out, HOPPER)


STEPS = 16384
SMALL = MmaForm("NT", columns=128, resident=2)  # two blocks on a multiprocessor


def little(form):
    """What cards of 99 KiB get in place of a form, and another way to fill them: as wide, with
    fewer stages."""
    chosen = choose_mma(form.layout, *[8192] * 3, form.epilogue, form.out, ADA)
    return chosen, replace(form, stages=2)


NT, NN, TN = MmaForm("NT"), MmaForm("NN"), MmaForm("TN", "store", "float32")
PRODUCTS = [
    Product((8192,) * 3, (NT, SMALL, *little(NT))),
    Product((STEPS, 2304, 768), (NT, SMALL, *little(NT))),
    Product((STEPS, 768, 3072), (NT, *little(NT))),
    Product((STEPS, 768, 3072), (NN, *little(NN))),
    Product((768, 768, STEPS), (TN, *little(TN))),
]
OTHERS = [MmaForm("NT", e) for e in ("bias", "bias and gelu", "residual")]
OTHERS.append(MmaForm("TN", "add", "float32"))
OTHERS += [each for form in OTHERS for each in little(form)]


def label(form):
    """A form in a few words."""
    parts = [
        form.layout, form.epilogue if form.epilogue != "store" else "",
        form.out if form.out != "bf16" else "", f"{form.rows}x{form.columns}",
        f"{form.stages} stages", f"{form.resident} blocks" if form.resident > 1 else "",
        f"groups of {form.group}" if form.group != 16 else "",
    ]  # fmt: skip
    return " ".join(part for part in parts if part)


TIMED = [form for made in PRODUCTS for form in (*made.forms, made.choice)]
FORMS = sorted({*OTHERS, *TIMED}, key=label)


@cache
def limit_kernel():
    """8 warps that multiply what is in their registers: what mma.sync can do at most."""
    multiply, clear = mma_tile(SIDE, SIDE), zeros(SUMS)

    def mma_limit(source, target, steps):
        at = source + int64(cuda.threadIdx.x) * (8 * FRAGMENTS)
        acc = cuda.local.array(SUMS, float32)
        a, b = cuda.local.array(FRAGMENTS, int32), cuda.local.array(FRAGMENTS, int32)
        for i in range(FRAGMENTS):
            a[i], b[i] = load_int2(at + 8 * i)
        clear(acc)
        for _ in range(steps):
            multiply(acc, a, b)
        total = float32(0)
        for i in range(SUMS):
            total += acc[i]
        store_float(target + int64(cuda.blockIdx.x * 256 + cuda.threadIdx.x) * 4, total)

    return Kernel(mma_limit, "l l r", 256, target=(8, 0))


def limit(bench):
    """As many products in registers as 8192^3 has."""
    source = bench.random(256 * FRAGMENTS * 4)
    target = bench.output(BLOCKS * 256, dtype=bench.torch.float32)
    steps = round(8192**3 / (BLOCKS * 8 * SIDE * SIDE * 16))
    args = bench.view(source), bench.view(target), steps
    return {"registers alone": [bench.call(Launch(limit_kernel(), (BLOCKS,), args))]}


def kernels():
    """Name -> maker of each kernel."""
    made = {label(form): partial(mma_kernel, form) for form in FORMS} | {"limit": limit_kernel}
    sums = {"sum, stored": partial(sum_kernel, False), "sum, added": partial(sum_kernel, True)}
    return made | sums


def stored(form, m, n, k):
    """The shapes of A, B, C and aux as they are stored; None for no aux."""
    a = (k, m) if form.layout[0] == "T" else (m, k)
    b = (k, n) if form.layout[1] == "N" else (n, k)
    aux = {"residual": (m, n), "bias": (n,), "bias and gelu": (n,)}.get(form.epilogue)
    return a, b, (m, n), aux


def operands(bench, form, shape):
    """Random A, B and aux, and a C of zeros."""
    a, b, c, aux = stored(form, *shape)
    kind = bench.torch.float32 if form.out == "float32" else bench.torch.bfloat16
    zeros = bench.torch.zeros(c, device="cuda", dtype=kind)
    return bench.random(*a), bench.random(*b), zeros, aux and bench.random(*aux)


def library(torch, form, a, b, c):
    """A function that multiplies with cuBLAS, into c unless that is float32."""
    a = a.T if form.layout[0] == "T" else a
    b = b.T if form.layout[1] == "T" else b
    if form.out == "float32":
        return lambda: torch.mm(a, b, out_dtype=torch.float32)
    return lambda: torch.mm(a, b, out=c)


def plans():
    """Name -> launches of every check and contest, without arrays."""
    shapes = {(form, shape) for form in FORMS for shape in (*RAGGED, *STEP)}
    shapes |= {(form, made.shape) for made in PRODUCTS for form in (*made.forms, made.choice)}
    return {f"{label(form)}, {shape}": plan(form, shape) for form, shape in shapes}


def plan(form, shape):
    """The launches of a product on stand-ins."""
    a, b, c, aux = stored(form, *shape)
    out = np.float32 if form.out == "float32" else np.uint16
    space = ghost((space_for(form, *shape, BLOCKS * form.resident),), np.uint8)
    arrays = ghost(a), ghost(b), ghost(c, out), aux and ghost(aux)
    return mma_product(form, *arrays, space=space, blocks=BLOCKS * form.resident)


def ours(bench, form, a, b, c, aux=None):
    """A function that puts one product on torch's stream."""
    views = [tensor if tensor is None else bench.view(tensor) for tensor in (a, b, c, aux)]
    (m, n), k, blocks = c.shape, a.numel() // c.shape[0], BLOCKS * form.resident
    space = bench.device.empty((space_for(form, m, n, k, blocks),), np.uint8)
    return bench.call(mma_product(form, *views, space=space, blocks=blocks))


def check(bench, form, shape):
    """The relative error of one product, and the library's; ValueError where it is not right."""
    torch, (m, n, _) = bench.torch, shape
    a, b, _, aux = operands(bench, form, shape)
    c = bench.output(m, n, dtype=torch.float32 if form.out == "float32" else torch.bfloat16)
    want = (a.T if form.layout[0] == "T" else a).double()
    want = want @ (b.T if form.layout[1] == "T" else b).double()
    peer = bench.error(library(torch, form, a, b, torch.empty_like(c))(), want)
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
        f"matmul, mma.sync {label(form)} {'x'.join(map(str, shape))}": partial(
            check, bench, form, shape
        )
        for form in FORMS
        for shape in RAGGED + STEP
    }


def entrants(bench, made):
    """Name -> calls, one for each set of operands; as many sets as overflow the L2 cache."""
    m, n, k = made.shape
    count = 1 if 2 * (m * k + n * k + m * n) > L2 else 3
    form = made.forms[0]
    sets = [operands(bench, form, made.shape) for _ in range(count)]
    field = {"cuBLAS": [library(bench.torch, form, a, b, c) for a, b, c, _ in sets]}
    for form in dict.fromkeys((*made.forms, made.choice)):
        field[label(form)] = [ours(bench, form, *tensors) for tensors in sets]
    return field


def contests(bench):
    """What is timed."""
    made = []
    for product in PRODUCTS:
        form = product.choice
        name = case(form.layout, *product.shape, " to float32" if form.out == "float32" else "")
        field = partial(entrants, bench, product)
        made.append(Contest("matmul, mma.sync", name, field, label(form), "cuBLAS"))
    case_ = "as many products as NT 8192x8192x8192"
    made.append(Contest("mma.sync, registers alone", case_, partial(limit, bench),
                        "registers alone", ()))
    return made
