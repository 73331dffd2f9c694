"""What LoRA adds to a training step: the merge of weights, and narrow products with A and B.

All of a layer's w_up of llama-1b, with adapters of rank 16 of its gates and its ups. The merge is
timed beside a copy of as many bytes; the narrow products of one launch beside PyTorch's.
"""

from functools import partial

import numpy as np
from bench.card import Contest, ghost

from nanoeuler.engines.gpu.gemm import low_rank
from nanoeuler.engines.gpu.rows import lora_merge

INPUTS, F, P, N = 2048, 8192, 16, 8192  # inputs, columns of an adapter, its rank, rows of a batch
SCALE = 2.0
PRODUCTS = ("x A and dy B", "dA and dB")  # across and down
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


class Narrow:
    """Buffers of the products of w_up's adapters as tensors: two A below each other, two B."""

    def __init__(self, bench, down):
        self.bench, self.down, torch = bench, down, bench.torch
        starts = 2 * P * INPUTS + P * F * np.arange(2)
        parts = [low_rank.Part(0, 0, INPUTS, 0, INPUTS, 2 * P, 0, 2 * P)]
        parts += [low_rank.Part(1, i * F, F, int(starts[i]), F, P, (2 + i) * P, i * P)
                  for i in range(2)]  # fmt: skip
        size = 2 * P * (INPUTS + F)
        how = low_rank.plan_narrow(parts, size, (INPUTS, 2 * F))
        self.tables = [torch.from_numpy(table).cuda() for table in how[:2]]
        self.how, self.parts = how, parts
        self.wide = bench.random(N, INPUTS), bench.random(N, 2 * F)
        self.h = bench.random(how.rows, N) if down else bench.output(how.rows, N)
        kind = torch.float32 if down else torch.bfloat16
        self.flat = bench.output(size, dtype=kind) if down else bench.random(size)

    def call(self):
        """A function that makes the products."""
        view, multiprocessors = self.bench.view, self.bench.device.multiprocessors
        how = low_rank.Narrow(*map(view, self.tables), *self.how[2:])
        h, flat, wide = view(self.h), view(self.flat), tuple(map(view, self.wide))
        if not self.down:
            return self.bench.call([low_rank.across_launch(how, flat, wide, h)])
        shape, space = low_rank.space_of(how, N, multiprocessors), None
        if shape[0]:
            space = view(self.bench.output(*shape, dtype=self.bench.torch.float32))
        return self.bench.call(
            low_rank.down_launches(how, h, wide, flat, space, multiprocessors, False)
        )

    def pairs(self):
        """The narrow and the wide matrix of each product, and where its result lies."""
        for part in self.parts:
            x = self.wide[part.wide][:, part.column : part.column + part.columns]
            flat = self.flat[part.start : part.start + part.rows * part.columns]
            flat = flat.view(part.rows, part.columns)
            own, other = (self.h[row : row + part.rows] for row in (part.own, part.other))
            yield (other, x, flat) if self.down else (flat, x.T, own)


def check_narrow(bench, name):
    """Narrow products against float64, and PyTorch's."""
    state = Narrow(bench, name == PRODUCTS[1])
    made = bench.repeat(state.call(), dict(c=state.flat if state.down else state.h))["c"]
    pairs = [(a, b, c) for a, b, c in state.pairs()]
    exact = [a.double() @ b.double() for a, b, _ in pairs]
    (state.flat if state.down else state.h).copy_(made)
    flat = bench.torch.cat([c.double().flatten() for *_, c in pairs])
    peer = bench.torch.cat([(a @ b).double().flatten() for a, b, _ in pairs])
    exact = bench.torch.cat([each.flatten() for each in exact])
    return {"error": bench.error(flat, exact), "peer": bench.error(peer, exact),
            "least": 2.0**-22 if state.down else 2.0**-9}  # fmt: skip


def narrow_entrants(bench, name):
    """Ours, a copy of half as many bytes both ways, and PyTorch's, whose results are bf16."""
    state, torch = Narrow(bench, name == PRODUCTS[1]), bench.torch
    source = torch.empty(sum(x.numel() for x in state.wide) // 4, device="cuda")
    target = torch.empty_like(source)

    def theirs():
        for a, b, _ in state.pairs():
            a @ b

    return {"ours": [state.call()], "copy": [partial(torch.neg, source, out=target)],
            "torch": [theirs]}  # fmt: skip


def checks(bench):
    """Name -> check."""
    shapes = {"w_up": (INPUTS, F, P), "ragged": (132, 268, 8), "rank 64": (512, 512, 64)}
    made = {f"merge {name}": partial(check_merge, bench, *shape) for name, shape in shapes.items()}
    return made | {f"narrow {name}": partial(check_narrow, bench, name) for name in PRODUCTS}


def contests(bench):
    """What is timed."""
    made = [Contest("merge", f"{INPUTS}x{2 * F} rank {P}", partial(merge_entrants, bench), "ours",
                    ("copy", "torch"))]  # fmt: skip
    for name in PRODUCTS:
        case = f"{name}: w_up of llama-1b, {N} rows, rank {P}, bf16"
        made.append(Contest("narrow products", case, partial(narrow_entrants, bench, name), "ours",
                            ("copy", "torch")))  # fmt: skip
    return made
