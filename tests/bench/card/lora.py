"""What LoRA adds to a training step: the merge of weights, and narrow products with A and B.

All of a layer's w_up of llama-1b, with adapters of rank 16 of its gates and its ups. The merge is
timed beside a copy of as many bytes; a narrow product beside PyTorch's.
"""

from functools import partial

import numpy as np
from bench.card import Contest, ghost

from nanoeuler.engines.gpu.gemm.wgmma_kernel import gemm_kernel, sum_kernel
from nanoeuler.engines.gpu.gemm.wgmma_launch import choose, product
from nanoeuler.engines.gpu.rows import lora_merge

INPUTS, F, P, N = 2048, 8192, 16, 8192  # inputs, columns of an adapter, its rank, rows of a batch
SCALE = 2.0
NARROW = {  # layout, m, n, k of the products of a step
    "x A": ("NN", N, 2 * P, INPUTS), "dy B": ("NT", N, P, F), "dB": ("TN", P, F, N),
    "dA": ("TN", INPUTS, 2 * P, N),
}  # fmt: skip


def merge():
    """The kernel that merges."""
    return lora_merge.MERGE


def form_of(layout, m, n, k):
    """The form that a step has for one of NARROW."""
    return choose(layout, (m, n, k), "store", "float32" if layout == "TN" else "bf16")


def kernels():
    """Name -> maker of each kernel."""
    made = {"merge": merge}
    for name, sizes in NARROW.items():
        form = form_of(*sizes)
        made[f"narrow {name}"] = partial(gemm_kernel, form)
        if form.pieces == "after":
            made[f"narrow {name}, sums"] = partial(sum_kernel, form)
    return made


def places(rows=INPUTS, columns=F, rank=P):
    """Two adapters side by side, A before both B."""
    return [
        lora_merge.Place(i * columns, 2 * columns, rows, columns, i * rank, 2 * rank,
                         2 * rank * rows + i * rank * columns, columns)
        for i in range(2)
    ]  # fmt: skip


def sizes(rows=INPUTS, columns=F, rank=P):
    """Elements of the weights, and of the adapters."""
    return 2 * rows * columns, 2 * rank * (rows + columns)


def plans():
    """Name -> launches, without arrays."""
    n, of_adapters = sizes()
    table = ghost(lora_merge.merge_tiles(places(), P, n, of_adapters).shape, np.int32)
    flat, adapters = ghost((n,), np.float32), ghost((of_adapters,), np.float32)
    return {"merge": [lora_merge.merge_launch(table, flat, adapters, ghost((n,)), SCALE, P)]}


class Merging:
    """Buffers as tensors, of so many rows and columns, and a rank."""

    def __init__(self, bench, *shape):
        torch, (n, of_adapters) = bench.torch, sizes(*shape)
        torch.manual_seed(0)
        self.bench, (self.rows, self.columns, self.rank) = bench, shape
        self.weights = 0.02 * torch.randn(n, device="cuda")
        self.adapters = 0.1 * torch.randn(of_adapters, device="cuda")
        self.copy = bench.output(n)
        tiles = lora_merge.merge_tiles(places(*shape), self.rank, n, of_adapters)
        self.table = torch.from_numpy(tiles).cuda()

    def call(self):
        """A function that merges."""
        views = map(self.bench.view, (self.table, self.weights, self.adapters, self.copy))
        return self.bench.call([lora_merge.merge_launch(*views, SCALE, self.rank)])

    def parts(self, double=False):
        """W, A and B of both adapters, as matrices."""
        W = self.weights.view(self.rows, 2, self.columns)
        split = 2 * self.rank * self.rows
        A = self.adapters[:split].view(self.rows, 2, self.rank)
        B = self.adapters[split:].view(2, self.rank, self.columns)
        for i in range(2):
            these = W[:, i], A[:, i], B[i]
            yield tuple(x.double() for x in these) if double else these


def check_merge(bench, *shape):
    """The merged copy against float64, and PyTorch's, which is rounded once as well."""
    torch, state = bench.torch, Merging(bench, *shape)
    seen = bench.repeat(state.call(), dict(copy=state.copy))["copy"]
    exact = torch.stack([W + SCALE * A @ B for W, A, B in state.parts(double=True)], 1)
    peer = torch.stack([(W + SCALE * A @ B).bfloat16() for W, A, B in state.parts()], 1)
    return {"error": bench.error(seen.view_as(exact), exact), "peer": bench.error(peer, exact),
            "least": 2.0**-9}  # fmt: skip


def merge_entrants(bench):
    """Ours, a copy of as many bytes, PyTorch's two products and sums."""
    torch, state = bench.torch, Merging(bench, INPUTS, F, P)
    half = sizes()[0] * 6 // 2 // 4
    source, target = (torch.randn(half, device="cuda") for _ in range(2))
    out = torch.empty(INPUTS, 2, F, device="cuda", dtype=torch.bfloat16)

    def theirs():
        for i, (W, A, B) in enumerate(state.parts()):
            out[:, i] = torch.addmm(W, A, B, alpha=SCALE)

    return {"ours": [state.call()], "copy": [partial(torch.neg, source, out=target)],
            "torch": [theirs]}  # fmt: skip


def operands(bench, layout, m, n, k):
    """A, B as they lie, C, and a function of ours."""
    torch = bench.torch
    a = bench.random(*((k, m) if layout[0] == "T" else (m, k)))
    b = bench.random(*((n, k) if layout[1] == "T" else (k, n)))
    form = form_of(layout, m, n, k)
    c = bench.output(m, n, dtype=torch.float32 if form.out == "float32" else torch.bfloat16)
    launches = product(form, *map(bench.view, (a, b, c)), place=bench.device.array)
    return a.T if layout[0] == "T" else a, b.T if layout[1] == "T" else b, c, bench.call(launches)


def check_narrow(bench, name):
    """A narrow product against float64, and PyTorch's."""
    a, b, c, call = operands(bench, *NARROW[name])
    seen, exact = bench.repeat(call, dict(c=c))["c"], a.double() @ b.double()
    wide = c.dtype == bench.torch.float32
    return {"error": bench.error(seen, exact), "peer": bench.error((a @ b), exact),
            "least": 2.0**-22 if wide else 2.0**-9}  # fmt: skip


def narrow_entrants(bench, name):
    """Ours, and PyTorch's, whose results are bf16."""
    a, b, _, call = operands(bench, *NARROW[name])
    return {"ours": [call], "torch": [partial(bench.torch.matmul, a, b)]}


def checks(bench):
    """Name -> check."""
    shapes = {"w_up": (INPUTS, F, P), "ragged": (133, 268, 8), "rank 64": (512, 512, 64)}
    made = {f"merge {name}": partial(check_merge, bench, *shape) for name, shape in shapes.items()}
    return made | {f"narrow {name}": partial(check_narrow, bench, name) for name in NARROW}


def contests(bench):
    """What is timed."""
    made = [Contest("merge", f"{INPUTS}x{2 * F} rank {P}", partial(merge_entrants, bench), "ours",
                    ("copy", "torch"))]  # fmt: skip
    for name, (layout, m, n, k) in NARROW.items():
        case = f"{name}: {layout} {m}x{n}x{k} bf16"
        made.append(Contest("narrow product", case, partial(narrow_entrants, bench, name)))
    return made
