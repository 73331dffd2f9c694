"""The products by mma.sync, which every card since 8.0 can do, against cuBLAS.

Each form is checked on ragged sizes and on those of a training step, again and again. A kernel that
does nothing but mma.sync, on registers, says what is the most there can be.
"""

from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from bench.card import Contest, Ghost, gemm, ghost, turn
from bench.card.gemm import L2, RAGGED, STEP, case

from nanoeuler.engines.gpu.gemm.column_sums import columns_kernel
from nanoeuler.engines.gpu.gemm.mma_form import FRAGMENTS, SIDE, SUMS, MmaForm
from nanoeuler.engines.gpu.gemm.mma_kernel import mma_kernel, sum_kernel
from nanoeuler.engines.gpu.gemm.mma_launch import choose_mma, mma_product, space_for
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.engines.gpu.lang.ptx import load_int2, mma_tile, store_float, zeros
from nanoeuler.engines.gpu.tile.rope import Turning

HOPPER = 9, 0  # whose cards this measures
ADA = 8, 9  # whose forms, of at most 99 KiB, are timed beside them
BLOCKS = 132  # multiprocessors of an H200


def chosen(form, capability):
    """The form that the package chooses for such a product."""
    return choose_mma(form.layout, form.epilogue, form.out, form.second, form.sums, capability)


@dataclass(frozen=True)
class Product:
    """What is timed: its sizes, forms that are tried beside the chosen one, where C goes."""

    shape: tuple[int, int, int]
    forms: tuple[MmaForm, ...]

    @property
    def choice(self):
        """The form that the package chooses."""
        return chosen(self.forms[0], HOPPER)


STEPS = 16384
SMALL = MmaForm("NT", columns=128, resident=2)  # two blocks on a multiprocessor


def little(form):
    """What cards of 99 KiB get in place of a form, and another way to fill them: as wide, with
    fewer stages."""
    return chosen(form, ADA), replace(form, stages=2)


NT, NN, TN = MmaForm("NT"), MmaForm("NN"), MmaForm("TN", "store", "float32")
CURVES = "gelu", "gelu_exact", "relu2"
TWO = [MmaForm("NN", f"bias and {curve}", second=True) for curve in CURVES]
BACK = [MmaForm("NT", f"{curve} backward", second=True, sums="add") for curve in CURVES]
GATED = MmaForm("NN", "swiglu", second=True)
UNGATED = MmaForm("NT", "swiglu backward", second=True)
PRODUCTS = [
    Product((8192,) * 3, (NT, SMALL, *little(NT))),
    Product((STEPS, 2304, 768), (NT, SMALL, *little(NT))),
    Product((STEPS, 768, 3072), (NT, *little(NT))),
    Product((STEPS, 768, 3072), (NN, *little(NN))),
    Product((768, 768, STEPS), (TN, *little(TN))),
    *(Product((STEPS, 3072, 768), (form, little(form)[0])) for form in (TWO[0], BACK[0])),
    *(Product((8192, 2048, 768), (form, little(form)[0])) for form in (GATED, UNGATED)),
]
ROPE = [MmaForm(layout, "rope 64", columns=n) for layout in ("NN", "NT") for n in (256, 128)]
HEADS = sorted({replace(case, blocks=None) for case in turn.CHECKED if case.D == 64}, key=repr)
OTHERS = [MmaForm("NT", e) for e in ("bias", "bias and gelu", "residual")]
OTHERS += [*TWO, *BACK, GATED, UNGATED, MmaForm("NN", "swiglu"), MmaForm("TN", "add", "float32")]
OTHERS += [each for form in OTHERS for each in little(form)[: 1 if form.second else 2]]


def label(form):
    """A form in a few words."""
    parts = [
        form.layout, form.epilogue if form.epilogue != "store" else "",
        form.out if form.out != "bf16" else "", "two stored" if form.second else "",
        f"sums {form.sums}" if form.sums != "no" else "", f"{form.rows}x{form.columns}",
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
    made = {"limit": limit_kernel}
    for form in FORMS:  # sums of columns are always stored, and added by a kernel of their own
        own = form if form.sums == "no" else replace(form, sums="store")
        made[label(form)] = partial(mma_kernel, own)
    made |= {label(form): partial(mma_kernel, form) for form in ROPE}
    made |= {f"columns, {add=}": partial(columns_kernel, add) for add in (False, True)}
    sums = {"sum, stored": partial(sum_kernel, False), "sum, added": partial(sum_kernel, True)}
    return made | sums


def plans():
    """Name -> launches of every check and contest, without arrays."""
    shapes = {(form, shape) for form in FORMS for shape in (*RAGGED, *STEP)}
    shapes |= {(form, made.shape) for made in PRODUCTS for form in (*made.forms, made.choice)}
    made = {f"{label(form)}, {shape}": plan(form, shape) for form, shape in shapes}
    for form, heads in turns():
        m, n, k = heads.shape
        tables = (ghost((turn.CONTEXT, 32), np.float32) for _ in range(2))
        of = ghost((m, k)), ghost((k, n) if form.layout == "NN" else (n, k)), ghost((m, n)), *tables
        made[f"{label(form)}, {heads}, {heads.T}"] = turned(form, heads, *of)
    return made


def turns():
    """Each form that ends in RoPE, and each case of it."""
    return [(form, heads) for form in ROPE for heads in HEADS if heads.layout == form.layout]


def turned(form, heads, a, b, c, cos, sin, place=None):
    """The launches of a product that turns; place: as of `turn.launches`, there's no list here."""
    return mma_product(form, a, b, c, turn=Turning(cos, sin, heads.T, heads.n * heads.D))


def arrays(of):
    """Name -> what a product by mma.sync takes; nothing of RoPE."""
    return {name: x for name, x in vars(of).items() if name != "turn"}


def stand_in(shape, kind):
    """For an array; of gates and ups (1, 2, m, n) for a view of their rows (m, 2 n)."""
    if len(shape) < 4:
        return ghost(shape, kind)
    _, _, m, n = shape
    return Ghost(shape, np.dtype(kind), (4 * m * n, 2 * n, 4 * n, 2))


def plan(form, shape):
    """The launches of a product on stand-ins."""
    of = arrays(gemm.stored(form, *shape))
    wide = {"sums": np.float32, "c": np.float32 if form.out == "float32" else np.uint16}
    given = {name: x and stand_in(x, wide.get(name, np.uint16)) for name, x in of.items()}
    space = ghost((space_for(form, *shape, BLOCKS * form.resident),), np.uint8)
    return mma_product(form, **given, space=space, blocks=BLOCKS * form.resident)


def ours(bench, form, of):
    """A function that puts one product of tensors on torch's stream."""
    views = {name: x if x is None else bench.view(x) for name, x in arrays(of).items()}
    (m, n), k, blocks = of.c.shape, of.a.numel() // of.c.shape[0], BLOCKS * form.resident
    space = bench.device.empty((space_for(form, m, n, k, blocks),), np.uint8)
    return bench.call(mma_product(form, **views, space=space, blocks=blocks))


def checks(bench):
    """Name -> check of each form on each size."""
    made = {
        f"matmul, mma.sync {label(form)} {'x'.join(map(str, shape))}": partial(
            gemm.check, bench, form, shape, ours
        )
        for form in FORMS
        for shape in RAGGED + STEP
    }
    return made | {
        f"matmul and RoPE, mma.sync {label(form)} {heads}, {heads.T} a sequence, {heads.n} of"
        f" {heads.N} heads": partial(turn.check, bench, heads, partial(turned, form))
        for form, heads in turns()
    }


def entrants(bench, made):
    """Name -> calls, one for each set of operands; as many sets as overflow the L2 cache."""
    m, n, k = made.shape
    count = 1 if 2 * (m * k + n * k + m * n) > L2 else 3
    form = made.forms[0]
    sets = [gemm.operands(bench, form, made.shape) for _ in range(count)]
    field = {"cuBLAS": [gemm.library(bench, "cuBLAS", form, of) for of in sets]}
    for form in dict.fromkeys((*made.forms, made.choice)):
        field[label(form)] = [ours(bench, form, of) for of in sets]
    return field


def contests(bench):
    """What is timed."""
    made = []
    for product in PRODUCTS:
        form = product.choice
        name = case(form.layout, *product.shape, " to float32" if form.out == "float32" else "")
        field, end = partial(entrants, bench, product), form.epilogue
        what = "matmul, mma.sync" + f", {end}" * (end != "store")
        made.append(Contest(what, name, field, label(form), "cuBLAS"))
    case_ = "as many products as NT 8192x8192x8192"
    made.append(Contest("mma.sync, registers alone", case_, partial(limit, bench),
                        "registers alone", ()))
    return made
