"""What LoRA adds to a training step: the merge of weights, and narrow products with A and B.

All of a layer's w_up of llama-1b, with adapters of rank 16 of its gates and its ups. The merge is
timed beside a copy of as many bytes; a narrow product beside PyTorch's.
"""

from functools import partial

import numpy as np
from bench.card import Contest, ghost

from nanoeuler.engines.gpu.gemm import low_rank
from nanoeuler.engines.gpu.rows import lora_merge

INPUTS, F, P, N = 2048, 8192, 16, 8192  # inputs, columns of an adapter, its rank, rows of a batch
SCALE = 2.0
NARROW = {  # rows of the narrow matrix, rows and columns of the wide one: of a step
    "x A": (2 * P, N, INPUTS), "dy B": (P, N, F), "dB": (P, N, F), "dA": (2 * P, N, INPUTS),
}  # fmt: skip
TALL = (1, 2, 3)


def merge():
    """The kernel that merges."""
    return lora_merge.MERGE


def kernels():
    """Name -> maker of each kernel."""
    made = {"merge": merge}
    for tall in TALL:
        made[f"across, {16 * tall} rows"] = partial(low_rank.across_kernel, tall)
        for add in (False, True):
            name = f"down, {16 * tall} rows{', added' * add}"
            made[name] = partial(low_rank.down_kernel, tall, add)
    return made


def places(rows=INPUTS, columns=F, rank=P):
    """Two adapters side by side, A before both B."""
    return [
        lora_merge.Place(i * columns, 2 * columns, rows, columns, i * rank * rows, rows,
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
        A = self.adapters[:split].view(2, self.rank, self.rows)
        B = self.adapters[split:].view(2, self.rank, self.columns)
        for i in range(2):
            these = W[:, i], A[i].T, B[i]
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


def operands(bench, name):
    """The narrow matrix, the wide one, the result, all as PyTorch multiplies them; ours."""
    (rows, lines, columns), torch = NARROW[name], bench.torch
    x, down = bench.random(lines, columns), name in ("dA", "dB")
    narrow = bench.random(rows, lines if down else columns)
    if not down:
        y = bench.output(rows, lines)
        launch = low_rank.across_launch(*map(bench.view, (narrow, x, y)))
        return narrow, x.T, y, bench.call([launch])
    multiprocessors = bench.device.multiprocessors
    g = bench.output(rows, columns, dtype=torch.float32)
    shape = low_rank.space_of(rows, lines, columns, multiprocessors)
    space = bench.view(bench.output(*shape, dtype=torch.float32)) if shape[0] else None
    views = map(bench.view, (narrow, x, g))
    launches = low_rank.down_launches(*views, space, multiprocessors, False)
    return narrow, x, g, bench.call(launches)


def check_narrow(bench, name):
    """A narrow product against float64, and PyTorch's."""
    a, b, c, call = operands(bench, name)
    seen, exact = bench.repeat(call, dict(c=c))["c"], a.double() @ b.double()
    wide = c.dtype == bench.torch.float32
    return {"error": bench.error(seen, exact), "peer": bench.error((a @ b), exact),
            "least": 2.0**-22 if wide else 2.0**-9}  # fmt: skip


def narrow_entrants(bench, name):
    """Ours, a copy of half as many bytes both ways, and PyTorch's, whose results are bf16."""
    a, b, _, call = operands(bench, name)
    source = bench.torch.empty(b.numel() // 4, device="cuda")
    target = bench.torch.empty_like(source)
    return {"ours": [call], "copy": [partial(bench.torch.neg, source, out=target)],
            "torch": [partial(bench.torch.matmul, a, b)]}  # fmt: skip


def checks(bench):
    """Name -> check."""
    shapes = {"w_up": (INPUTS, F, P), "ragged": (132, 268, 8), "rank 64": (512, 512, 64)}
    made = {f"merge {name}": partial(check_merge, bench, *shape) for name, shape in shapes.items()}
    return made | {f"narrow {name}": partial(check_narrow, bench, name) for name in NARROW}


def contests(bench):
    """What is timed."""
    made = [Contest("merge", f"{INPUTS}x{2 * F} rank {P}", partial(merge_entrants, bench), "ours",
                    ("copy", "torch"))]  # fmt: skip
    for name, (rows, lines, columns) in NARROW.items():
        case = f"{name}: {rows} rows, {lines}x{columns} bf16"
        made.append(Contest("narrow product", case, partial(narrow_entrants, bench, name), "ours",
                            ("copy", "torch")))  # fmt: skip
    return made
