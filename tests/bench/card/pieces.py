"""Float32 products in pieces of bf16, against PyTorch's float32 and TF32; and kernels that fill.

What sums round in a tensor core is asked of it: all of them are cut off, or are they?
"""

from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np
from bench.card import Contest, ghost

from nanoeuler.engines.gpu.gemm.choice import HOPPER, product_on
from nanoeuler.engines.gpu.gemm.float32 import (
    AXES,
    PAIRS,
    pieces_product,
    split_kernel,
    split_launch,
    split_shape,
    split_shapes,
    stretch_of,
    stretches_for,
)
from nanoeuler.engines.gpu.gemm.mma_kernel import mma_kernel, sum_kernel
from nanoeuler.engines.gpu.gemm.mma_launch import choose_mma
from nanoeuler.engines.gpu.gemm.wgmma_kernel import gemm_kernel
from nanoeuler.engines.gpu.gemm.wgmma_launch import choose
from nanoeuler.engines.gpu.host.device import DeviceArray
from nanoeuler.engines.gpu.rows import fill

ANY = 8, 0  # a capability for which products go by mma.sync
SETS = 3  # of operands: together more than the L2 cache
TIMED = (8192, 2304, 768), (8192, 4096, 768), (4096, 4096, 4096)  # all NT
RAGGED = ("NT", 136, 264, 72), ("NN", 1000, 200, 520), ("TN", 264, 1032, 1001)
LONG = "TN", 768, 768, 8192  # the gradient of a weight
CHECKED = (*RAGGED, LONG, *(("NT", *shape) for shape in TIMED))
SPLIT = 8192, 768
LEFT = {count: tuple(i for i, _ in PAIRS[count]) for count in (2, 3)}
RIGHT = {count: tuple(j for _, j in PAIRS[count]) for count in (2, 3)}
FLAT = 124_439_808  # parameters of GPT-2's small model
SPANS = [(0, 38_597_376), (40_000_000, 768), (85_000_000, 39_000_000)]


# ---- Kernels


def forms():
    """Label -> maker of all kernels that multiply here."""
    made = {}
    for layout, m, n, k in CHECKED:
        for count, pairs in list(PAIRS.items())[1:]:
            stretches = stretches_for(m, n, k, count)
            deep = stretch_of(k, stretches) * len(pairs)
            for way in ("store", "add")[: 1 if stretches == 1 else 2]:
                form = choose(layout, (m, n, deep), way, "float32")
                parts = "" if form.pieces == "no" else ", pieces"
                name = f"wgmma {layout} {way}, cluster {form.cluster}{parts}"
                made[name] = partial(gemm_kernel, form)
                other = choose_mma(layout, way, "float32", capability=HOPPER)
                made[f"mma.sync {layout} {way}"] = partial(mma_kernel, other)
    made |= {f"mma.sync, sums {add=}": partial(sum_kernel, add) for add in (False, True)}
    return made


def kernels():
    """Name -> maker of each kernel."""
    orders = {*LEFT.values(), *RIGHT.values(), (0,)}
    made = {f"split {''.join(map(str, w))}": partial(split_kernel, w) for w in sorted(orders)}
    made |= {f"add row {kind}": partial(fill.add_row_kernel, kind) for kind in ("bf16", "float32")}
    return made | {"clear": clear_kernel} | forms()


def clear_kernel():
    """The kernel that clears."""
    return fill.CLEAR


# ---- Products


class Parts(DeviceArray):
    """An array of which rows and columns can be taken."""

    def __getitem__(self, key):
        keys = key if isinstance(key, tuple) else (key,)
        spans = [part.indices(extent)[:2] for extent, part in zip(self.shape, keys, strict=False)]
        shape = *(stop - start for start, stop in spans), *self.shape[len(spans) :]
        before = sum(start * step for (start, _), step in zip(spans, self.strides, strict=False))
        return replace(self, address=self.address + before, shape=shape)


@dataclass
class Product:
    """A, B, C of a float32 product as tensors, and the working memory of its pieces."""

    layout: str
    a: object
    b: object
    c: object
    work: tuple
    count: int

    def call(self, bench, capability=HOPPER, **more):
        """A function that puts the product on torch's stream."""
        arrays = [Parts(*vars(bench.view(x)).values())
                  for x in (self.a, self.b, self.c, *self.work)]  # fmt: skip
        launches = pieces_product(
            capability, self.layout, *arrays, pieces=self.count, place=bench.device.array, **more
        )
        return bench.call(launches)

    def torch(self, bench, tf32=False, double=False):
        """The same by PyTorch."""
        bench.torch.backends.cuda.matmul.allow_tf32 = tf32
        a, b = (x.double() if double else x for x in (self.a, self.b))
        of_a, of_b = AXES[self.layout]
        return (a if of_a else a.T) @ (b.T if of_b else b)


def stored(layout, m, n, k):
    """The shapes of A and B."""
    of_a, of_b = AXES[layout]
    return ((m, k) if of_a else (k, m)), ((n, k) if of_b else (k, n))


def operands(bench, count, layout, m, n, k):
    """Random A and B, room for C and for pieces."""
    f32 = bench.torch.float32
    a, b = (bench.random(*shape, dtype=f32) for shape in stored(layout, m, n, k))
    work = tuple(bench.output(*shape) for shape in split_shapes(layout, m, n, k, count))
    return Product(layout, a, b, bench.output(m, n, dtype=f32), work, count)


def least(layout, m, n, k, count):
    """What cut-off sums lose: half a last digit each, of sums that are half the last on average.

    A sum is cut off after every 16 of k, as appendix K finds; counted are those at full size. And
    2^-17, about, where numbers are cut into two pieces.
    """
    sums = k // stretches_for(m, n, k, count) / 16
    return 2.0**-25 * max(2, sums) + (2.0**-17 if count < 3 else 0)


def check_product(bench, count, capability, epilogue, shape):
    """Three pieces beside PyTorch's float32, two beside its TF32."""
    of = operands(bench, count, *shape)
    exact, peer = of.torch(bench, double=True), of.torch(bench, tf32=count < 3)
    error = bench.error(peer, exact)
    if epilogue == "add":
        exact += of.c.normal_()
    outputs = {"C": of.c, "pieces of A": of.work[0], "pieces of B": of.work[1]}
    c = bench.repeat(of.call(bench, capability, epilogue=epilogue), outputs)["C"]
    return {"error": bench.error(c, exact), "peer": error, "least": least(*shape, count)}


def check_sum(bench, capability):
    """1 + 3/4 of a last digit, added after 16 of k: 0 if it is cut off, 1 if rounded to nearest."""
    torch = bench.torch
    a, b = (bench.random(rows, 32).zero_() for rows in (64, 8))
    a[:, 0] = a[:, 16] = b[:, 0] = 1
    b[:, 16] = 0.75 * 2.0**-23
    c = bench.output(64, 8, dtype=torch.float32)
    arrays = (bench.view(x) for x in (a, b, c))
    launches = product_on(capability, "NT", *arrays, place=bench.device.array)
    c = bench.repeat(bench.call(launches), {"C": c})["C"]
    digits = ((c.double() - 1) * 2.0**23).unique().tolist()
    if len(digits) != 1:
        raise ValueError(f"last digits differ: {digits}")
    return {"error": digits[0], "least": 1, "unit": "last digits, 0 where sums are cut off"}


# ---- Splitting and filling


def torch_pieces(bench, x, which, axis):
    """The pieces by PyTorch."""
    made, left = [], x
    for _ in range(max(which) + 1):
        made.append(left.bfloat16())
        left = left - made[-1].float()
    return bench.torch.cat([made[p] for p in which], axis)


def split_call(bench, x, out, which, axis):
    """A function that splits."""
    return bench.call(split_launch(bench.view(x), bench.view(out), which, axis))


def equal(bench, seen, want):
    """How many numbers differ in a bit; ValueError where any does."""
    kind = bench.torch.int16 if seen.element_size() == 2 else bench.torch.int32
    if many := int((seen.contiguous().view(kind) != want.contiguous().view(kind)).sum()):
        raise ValueError(f"{many} of {want.numel()} differ")
    return {"error": 0.0, "unit": "numbers that differ from PyTorch's"}


def check_split(bench, which, axis, rows, columns):
    """Every bit of every piece, of some columns of a wider matrix, tiny and large numbers in it."""
    torch = bench.torch
    x = bench.random(rows, columns + 24, dtype=torch.float32)[:, 16 : 16 + columns]
    x *= 2.0 ** torch.randint(-130, 100, x.shape, device="cuda")
    out = bench.output(*split_shape((rows, columns), len(which), axis))
    seen = bench.repeat(split_call(bench, x, out, which, axis), {"pieces": out})["pieces"]
    return equal(bench, seen, torch_pieces(bench, x, which, axis))


def check_largest(bench):
    """What would round to infinity is cut off, and the sum of pieces is exact."""
    torch = bench.torch
    x = torch.linspace(3.389e38, 3.4028234e38, 4096, device="cuda", dtype=torch.float64).float()
    x = (x.view(64, 64) * torch.tensor([1, -1], device="cuda").repeat(32)).contiguous()
    out = bench.output(64, 192)
    seen = bench.repeat(split_call(bench, x, out, (0, 1, 2), 1), {"pieces": out})["pieces"]
    return equal(bench, seen.double().view(64, 3, 64).sum(1).float(), x)


def check_clear(bench, spans, length):
    """Spans are zero and everything else as it was."""
    flat = bench.random(length, dtype=bench.torch.float32)
    want = flat.clone()
    for start, count in spans:
        want[start : start + count] = 0
    call = clear_call(bench, flat, spans)
    return equal(bench, bench.repeat(call, {"flat": flat})["flat"], want)


def clear_call(bench, flat, spans):
    """A function that clears."""
    table = bench.device.array(fill.clear_table(spans, len(flat)))
    return bench.call(fill.clear_launch(table, bench.view(flat)))


def check_add_row(bench, kind, rows, columns):
    """y + row, rounded once."""
    torch = bench.torch
    y = bench.output(rows, columns, dtype=getattr(torch, kind)).normal_()
    row = bench.random(columns, dtype=torch.float32)
    want = (y.float() + row).to(y.dtype)
    call = bench.call(fill.add_row_launch(bench.view(y), bench.view(row)))
    return equal(bench, bench.repeat(call, {"y": y})["y"], want)


# ---- What the script asks for


def checks(bench):
    """Name -> check."""
    made = {}
    for layout, *size in CHECKED:
        shape = f"{layout} {'x'.join(map(str, size))}"
        ways = [(3, HOPPER, "store", ""), (2, HOPPER, "store", ""), (3, ANY, "store", ", mma.sync")]
        if stretches_for(*size) > 1:
            ways.append((3, HOPPER, "add", ", added"))
        for count, capability, way, how in ways:
            made[f"{count} pieces, {shape}{how}"] = partial(
                check_product, bench, count, capability, way, (layout, *size)
            )
    for name, capability in ("wgmma", HOPPER), ("mma.sync", ANY):
        made[f"sums of {name}"] = partial(check_sum, bench, capability)
    for which in LEFT[2], LEFT[3], RIGHT[3]:
        for axis in 0, 1:
            name = f"split {''.join(map(str, which))} along {axis}"
            made[name] = partial(check_split, bench, which, axis, 1001, 776)
    made["split of the largest"] = partial(check_largest, bench)
    made["clear"] = partial(check_clear, bench, SPANS, FLAT)
    for kind in "bfloat16", "float32":
        made[f"add row {kind}"] = partial(check_add_row, bench, kind, 1001, 776)
    return made


def product_entrants(bench, shape):
    """Ours in three and two pieces, by either instruction, and PyTorch's."""
    sets = {n: [operands(bench, n, "NT", *shape) for _ in range(SETS)] for n in (2, 3)}
    made = {
        "torch float32": [partial(of.torch, bench) for of in sets[3]],
        "torch TF32": [partial(of.torch, bench, tf32=True) for of in sets[3]],
        "3 pieces": [of.call(bench) for of in sets[3]],
        "2 pieces": [of.call(bench) for of in sets[2]],
        "3 pieces, mma.sync": [of.call(bench, ANY) for of in sets[3]],
    }
    if stretches_for(*shape) > 1:
        long = [replaced(bench, of, shape) for of in sets[3]]
        made["3 pieces, one stretch"] = [of.call(bench, stretches=1) for of in long]
    return made


def replaced(bench, of, shape):
    """The same product with room for all of k at once."""
    work = (bench.output(*extents) for extents in split_shapes("NT", *shape, of.count, 1))
    return Product(of.layout, of.a, of.b, of.c, tuple(work), of.count)


def split_entrants(bench, count):
    """Ours, PyTorch's operations, and a copy of half as many bytes as are moved."""
    torch, (rows, columns), which = bench.torch, SPLIT, LEFT[count]
    x = [bench.random(rows, columns, dtype=torch.float32) for _ in range(SETS)]
    out = [bench.output(rows, len(which) * columns) for _ in x]
    half = prod(SPLIT) * (4 + 2 * len(which)) // 2 // 4
    pairs = [bench.random(2, half, dtype=torch.float32) for _ in x]
    return {
        "copy": [partial(torch.neg, here, out=there) for here, there in pairs],
        "torch": [partial(torch_pieces, bench, here, which, 1) for here in x],
        "ours": [split_call(bench, *both, which, 1) for both in zip(x, out, strict=True)],
    }


def fill_entrants(bench, way):
    """A buffer cleared; a row added."""
    torch, f32 = bench.torch, bench.torch.float32
    if way == "clear":
        flat = bench.random(FLAT, dtype=f32)
        return {"torch": [flat.zero_], "ours": [clear_call(bench, flat, [(0, FLAT)])]}
    y, row = bench.random(16384, 3072, dtype=f32), bench.random(3072, dtype=f32)
    launch = fill.add_row_launch(bench.view(y), bench.view(row))
    return {"torch": [partial(torch.add, y, row, out=y)], "ours": [bench.call(launch)]}


def contests(bench):
    """What is timed."""
    peers = "torch float32", "torch TF32"
    made = [
        Contest(
            "float32 matmul", f"NT {'x'.join(map(str, shape))} float32",
            partial(product_entrants, bench, shape), "3 pieces", peers,
        )
        for shape in TIMED
    ]  # fmt: skip
    for count in LEFT:
        case = f"{'x'.join(map(str, SPLIT))} to {len(LEFT[count])}"
        field = partial(split_entrants, bench, count)
        made.append(Contest("split", case, field, "ours", ("copy", "torch")))
    for what, case in ("clear", "124M float32"), ("add row", "16384x3072 float32"):
        made.append(Contest(f"fill, {what}", case, partial(fill_entrants, bench, what)))
    return made


def plans():
    """Name -> launches of every product, without arrays."""
    made = {}
    for layout, *size in CHECKED:
        for count in LEFT:
            for name, capability in ("wgmma", HOPPER), ("mma.sync", ANY):
                label = f"{count} pieces, {layout} {size}, {name}"
                made[label] = planned(capability, count, layout, *size)
    return made


def planned(capability, count, layout, m, n, k):
    """The launches of a product on stand-ins."""
    f32 = np.float32
    arrays = [ghost(shape, f32) for shape in (*stored(layout, m, n, k), (m, n))]
    work = (ghost(shape) for shape in split_shapes(layout, m, n, k, count))
    return pieces_product(capability, layout, *arrays, *work, pieces=count)
