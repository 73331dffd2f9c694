"""Muon's kernels: products of batches, Newton-Schulz whole, and what reads and writes the weights.

Sizes are those of GPT-2's 124M parameters. The symmetric product is timed beside the same kernel
that computes every tile, and beside PyTorch's bmm, which is cuBLAS's; momentum and the step of the
matrices beside a copy of as many bytes, which reads half of them and writes half.
"""

from functools import cache, partial

import numpy as np
from bench.card import Contest, ghost

from nanoeuler.engines.gpu.gemm import wgmma_batch
from nanoeuler.engines.gpu.gemm.wgmma_batch import APPLY, GRAM, POLYNOMIAL, Batch, Operands
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS
from nanoeuler.engines.gpu.rows import adamw, muon
from nanoeuler.engines.gpu.step.muon import newton_schulz, rules_of
from nanoeuler.model.config import PRESETS
from nanoeuler.model.weights import Weights
from nanoeuler.training.muon import COEFFICIENTS, Muon

EVERY = Batch("NT")  # the Gram matrix without its symmetry
BATCHES = {"X X^T": GRAM, "polynomial": POLYNOMIAL, "P X": APPLY}
# Of gpt2-124m, of euler-116m, and ragged ones.
SIZES = {"48 of 768x768": (48, 768, 768), "24 of 768x3072": (24, 768, 3072)}
CHECKED = SIZES | {"3 of 136x200": (3, 136, 200), "36 of 768x2048": (36, 768, 2048),
                   "24 of 256x768": (24, 256, 768), "7 of 576x1536": (7, 576, 1536)}  # fmt: skip
BYTES = {"momentum": 14, "step": 10}  # of a parameter, masters in halves


def momentum_kernel():
    """The kernel of momentum."""
    return muon.MOMENTUM


def norms_kernel():
    """The kernel of norms."""
    return muon.NORMS


def normalise_kernel():
    """The kernel that normalises, on other cards."""
    return muon.NORMALISE


def polynomial_kernel():
    """The kernel of the polynomial, on other cards."""
    return muon.POLYNOMIAL


def collect_kernel():
    """The kernel that collects a batch from flat directions."""
    return muon.COLLECT


def deliver_kernel():
    """The kernel that brings a batch back."""
    return muon.DELIVER


def kernels():
    """Name -> maker of each kernel."""
    made = {name: partial(wgmma_batch.batch_kernel, each) for name, each in BATCHES.items()}
    made["X X^T, every tile"] = partial(wgmma_batch.batch_kernel, EVERY)
    made |= {"momentum": momentum_kernel, "norms": norms_kernel}
    made |= {"collect": collect_kernel, "deliver": deliver_kernel}
    made |= {"normalise": normalise_kernel, "polynomial, apart": polynomial_kernel}
    for name, halves, copied in ("halves", True, True), ("copied", False, True), (
            "float32", False, False):  # fmt: skip
        made[f"step, {name}"] = partial(muon.move_kernel, halves, copied)
    return made


@cache
def model():
    """What Muon does with GPT-2's smallest model, its batches by size, and its flat buffer's
    length."""
    weights = Weights(PRESETS["gpt2-124m"])
    rules = rules_of(Muon, weights)
    return rules, muon.shapes(rules.matrices), weights.flat.size


def plans():
    """Name -> launches, without arrays."""
    made = {}
    for name, (count, r, c) in SIZES.items():
        x, a, s = ghost((1, count, r, c)), ghost((1, count, r, r)), ghost((count,), np.float32)
        operands = Operands(x, x, a, s), Operands(a, a, a, a), Operands(a, x, x, s)
        made[name] = [
            wgmma_batch.batch_launch(batch, of, COEFFICIENTS)
            for batch, of in zip(BATCHES.values(), operands, strict=True)
        ]
    return made


# ---- Products


class Setting:
    """X (count, r, c), a symmetric A, scales, and the three products of them, ours and theirs."""

    def __init__(self, bench, count, r, c):
        torch = bench.torch
        torch.manual_seed(r + c)
        self.bench = bench
        self.x = bench.random(1, count, r, c)
        a = bench.random(1, count, r, r).tril()
        self.a = a + a.tril(-1).mT
        self.scales = torch.rand(count, device="cuda") + 0.5
        self.square, self.wide = bench.output(1, count, r, r), bench.output(1, count, r, c)

    def operands(self, batch):
        """As tensors."""
        if batch.polynomial:
            return Operands(self.a, self.a, self.square, self.a)
        if batch is APPLY:
            return Operands(self.a, self.x, self.wide, self.scales)
        return Operands(self.x, self.x, self.square, self.scales)

    def call(self, batch):
        """A function that does one of ours."""
        of = Operands(*map(self.bench.view, self.operands(batch)))
        return self.bench.call(wgmma_batch.batch_launch(
            batch, of, COEFFICIENTS, place=partial(place, self.bench)))  # fmt: skip

    def torch(self, batch, double=False):
        """PyTorch's result, in bf16 as it would be written, or in float64."""
        torch, (a, b, c) = self.bench.torch, COEFFICIENTS
        A, X = (t[0].double() if double else t[0] for t in (self.a, self.x))
        if batch.polynomial:
            made = torch.baddbmm(A, A, A.mT, beta=b, alpha=c)
            made.diagonal(dim1=1, dim2=2).add_(a)
            return made
        made = torch.bmm(A, X) if batch is APPLY else torch.bmm(X, X.mT)
        return made * self.scales[:, None, None].double() if double else made


def place(bench, values):
    """Numbers on the card."""
    return bench.view(bench.torch.from_numpy(np.array(values)).cuda())


def check_product(bench, batch, shape):
    """One against float64, beside PyTorch's error; a symmetric one has to be so to the bit."""
    torch, setting = bench.torch, Setting(bench, *shape)
    (out,) = bench.repeat(setting.call(batch), {"c": setting.operands(batch).c}).values()
    if batch.symmetric and not torch.equal(out, out.mT):
        raise ValueError("a product is not symmetric")
    exact, theirs = setting.torch(batch, True), setting.torch(batch)
    if not batch.polynomial:
        theirs = (theirs.float() * setting.scales[:, None, None]).bfloat16()
    return {"error": bench.error(out[0], exact), "peer": bench.error(theirs, exact),
            "least": 2.0**-9}  # fmt: skip


def product_entrants(bench, batch, shape):
    """Ours, PyTorch's; of the symmetric product also ours with every tile."""
    setting = Setting(bench, *shape)
    made = {"torch": [partial(setting.torch, batch)], "ours": [setting.call(batch)]}
    if batch is GRAM:
        made["every tile"] = [setting.call(EVERY)]
    return made


# ---- Newton-Schulz


class Now:
    """In the place of a recording: memory that is there at once, and a list of launches."""

    def __init__(self, bench):
        self.bench, self.launches, self.constant = bench, [], partial(place, bench)

    def take(self, shape, dtype):
        """Memory that nobody has written."""
        kinds = {kind: of_torch for of_torch, kind in self.bench.kinds.items()}
        return self.bench.view(self.bench.output(*shape, dtype=kinds[np.dtype(dtype)]))

    def add(self, name, launch, flops):
        """Write a launch down."""
        self.launches.append(launch)


def rounds(bench, x):
    """A function that orthogonalizes x (1, count, r, c), and the tensor that holds the result."""
    norms = x[0].double().norm(dim=(1, 2))
    scales = [(1 / norms**power).float() for power in (2, 1)]
    now = Now(bench)
    pair = tuple(map(bench.view, scales))
    out = newton_schulz(now, bench.view(x), pair, model()[0], MULTIPROCESSORS)
    return bench.call(now.launches), out.owner


def torch_rounds(bench, x, double=False):
    """The same by PyTorch, in bf16 or in float64."""
    torch, (a, b, c) = bench.torch, COEFFICIENTS
    x = x[0].double() if double else x[0]
    x = x / x.norm(dim=(1, 2), keepdim=True)
    for _ in range(model()[0].steps):
        A = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(A, A, A, beta=b, alpha=c), x, beta=a)
    return x


def check_rounds(bench, shape):
    """All rounds against float64, beside PyTorch in bf16."""
    bench.torch.manual_seed(2)
    x = bench.random(1, *shape)
    exact, theirs = torch_rounds(bench, x, True), torch_rounds(bench, x)
    call, out = rounds(bench, x)
    call()
    bench.torch.cuda.synchronize()
    return {"error": bench.error(out[0], exact), "peer": bench.error(theirs, exact)}


def rounds_entrants(bench, shape):
    """Ours, PyTorch's. Ours goes round in its buffers and begins with what it left there, of a
    norm of about the root of r, which it had at first, too: it never dwindles to zeros."""
    x = bench.random(1, *shape) / shape[2] ** 0.5
    return {"torch": [partial(torch_rounds, bench, x.clone())], "ours": [rounds(bench, x)[0]]}


# ---- Momentum and the step


class State:
    """Flat buffers of a step with Muon, as tensors; masters in halves."""

    def __init__(self, bench, go=1.0):
        torch, (self.rules, self.batches, n) = bench.torch, model()
        torch.manual_seed(0)
        self.bench, make = bench, partial(torch.randn, n, device="cuda")
        self.w, self.g, self.m = 0.02 * make(), 0.01 * make(), 0.01 * make()
        copy, low = adamw.to_halves(self.w.cpu().numpy())
        self.copy, self.low = (torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
                               for x in (copy, low))  # fmt: skip
        self.decision = torch.tensor([3e-4, 2, 2, 0.1, 0.5, 2, go, 0], device="cuda")
        self.take = muon.Take(partial(place, bench), Now(bench).take)
        self.directions, self.scales = [], []
        for (r, c), these in self.batches.items():
            self.directions.append(bench.output(1, len(these), r, c))
            shape = muon.scales_shape(len(these))
            self.scales.append(torch.zeros(*shape, device="cuda"))

    def launches(self, what):
        """Those of "momentum" or of the "step", of all batches."""
        low, g, m, copy, decision = map(
            self.bench.view, (self.low, self.g, self.m, self.copy, self.decision))
        buffers, made = adamw.Buffers(low, g, m, None, copy), []
        for these, x, scales in zip(
            self.batches.values(), self.directions, self.scales, strict=True
        ):
            given = self.rules, these, buffers, decision, self.bench.view(x)
            if what == "momentum":
                made += muon.momentum_launches(*given, self.bench.view(scales), self.take)
            else:
                made.append(muon.move_launch(*given, self.take))
        return made

    def views(self, flat):
        """(batch, its number there, matrix, the part of a flat tensor that it is), transposed where
        the batch has it so."""
        for x, these in enumerate(self.batches.values()):
            for i, one in enumerate(these):
                part = flat.as_strided((one.rows, one.columns), (one.pitch, 1), one.start)
                yield x, i, one, part.T if one.rows > one.columns else part


def check_momentum(bench):
    """Momentum, directions and scales against float64."""
    state = State(bench)
    before = state.m.double()
    m = 0.95 * before + 0.05 * (0.5 * state.g.double())
    u = 0.95 * m + 0.05 * (0.5 * state.g.double())
    outputs = {"m": state.m} | {f"batch {i}": x for i, x in enumerate(state.directions)}
    seen = bench.repeat(bench.call(state.launches("momentum")), outputs)
    worst = {"m": 0.0, "batch": 0.0, "norm": 0.0}
    for x, i, _, exact in state.views(u):
        ours = seen[f"batch {x}"][0, i]
        worst["batch"] = max(worst["batch"], bench.error(ours, exact))
        norm = state.scales[x][1, i].double() * exact.norm() - 1
        worst["norm"] = max(worst["norm"], abs(norm.item()))
    here = bench.torch.zeros_like(m, dtype=bench.torch.bool)
    for one in state.rules.matrices:
        here.as_strided((one.rows, one.columns), (one.pitch, 1), one.start).fill_(True)
    if not bench.torch.equal(seen["m"][~here].double(), before[~here]):
        raise ValueError("momentum is written beside the matrices")
    worst["m"] = bench.error(seen["m"][here], m[here])
    least = {"m": 2.0**-23, "batch": 2.0**-9, "norm": 2.0**-20}
    return {name: {"error": worst[name], "peer": None, "least": least[name]} for name in worst}


def check_step(bench):
    """Masters in halves against float64; and a step that is not to be taken, to the bit."""
    torch, worst = bench.torch, 0.0
    for go in 0.0, 1.0:
        state = State(bench, go)
        for x in state.directions:
            x.copy_(torch.randn_like(x) / 27)
        before, w = (state.copy.clone(), state.low.clone()), state.w.double()
        for x, i, one, part in state.views(w):
            part -= 3e-4 * state.rules.ratio * (
                one.scale * state.directions[x][0, i].double() + 0.1 * part)
        bench.call(state.launches("step"))()
        torch.cuda.synchronize()
        after = state.copy, state.low
        if go == 0:
            if not all(map(torch.equal, [x.view(torch.int16) for x in before],
                           [x.view(torch.int16) for x in after])):  # fmt: skip
                raise ValueError("a step that is skipped wrote")
            continue
        bits = [x.view(torch.int16).cpu().numpy().view(np.uint16) for x in after]
        made = torch.from_numpy(adamw.from_halves(*bits)).cuda().double()
        worst = ((made - w).norm() / (w - state.w.double()).norm()).item()
    # A master is rounded by 2^-25 of itself in the root of the mean square, and the step is about
    # a hundredth of it.
    return {"error": worst, "peer": None, "least": 2.0**-18}


def check_flat(bench):
    """Matrices from flat directions to batches and back, to the bit, and their norms."""
    torch, state, worst = bench.torch, State(bench), 0.0
    flat = bench.random(len(state.m))
    back = torch.zeros_like(flat)
    view, launches = bench.view, []
    for these, x, scales in zip(
        state.batches.values(), state.directions, state.scales, strict=True
    ):
        given = view(flat), view(x), view(scales), state.take
        launches += muon.collect_launches(these, *given)
        launches.append(muon.deliver_launch(these, view(x), view(back), state.take))
    outputs = {"back": back} | {f"batch {i}": x for i, x in enumerate(state.directions)}
    seen = bench.repeat(bench.call(launches), outputs)
    for x, i, _, exact in state.views(flat):
        if not torch.equal(seen[f"batch {x}"][0, i], exact):
            raise ValueError("a batch is not what was collected")
        norm = state.scales[x][1, i].double() * exact.double().norm() - 1
        worst = max(worst, abs(norm.item()))
    for (*_, part), (*_, exact) in zip(
        state.views(seen["back"]), state.views(flat), strict=True
    ):
        if not torch.equal(part, exact):
            raise ValueError("a matrix has not come back")
    return {"error": worst, "peer": None, "least": 2.0**-20}


def rows_entrants(bench, what):
    """Ours, and copies of as many bytes."""
    torch, state = bench.torch, State(bench)
    size = sum(x.numel() for x in state.directions) * BYTES[what] // 2 // 4
    source, target = (torch.randn(size, device="cuda") for _ in range(2))
    if what == "step":
        for x in state.directions:
            x.copy_(torch.randn_like(x))
    return {"copy": [partial(torch.neg, source, out=target)],
            "torch copy_": [partial(target.copy_, source)],
            "ours": [bench.call(state.launches(what))]}  # fmt: skip


# ---- What the script asks for


def checks(bench):
    """Name -> check."""
    made = {
        f"{name}, {size}": partial(check_product, bench, batch, shape)
        for size, shape in CHECKED.items() for name, batch in BATCHES.items()
    }  # fmt: skip
    made |= {f"Newton-Schulz, {name}": partial(check_rounds, bench, shape)
             for name, shape in CHECKED.items()}  # fmt: skip
    return made | {"momentum": partial(check_momentum, bench), "step": partial(check_step, bench),
                   "flat directions": partial(check_flat, bench)}


def contests(bench):
    """What is timed."""
    made = [
        Contest(f"muon {name}", size, partial(product_entrants, bench, batch, shape))
        for name, batch in BATCHES.items() for size, shape in SIZES.items()
    ]  # fmt: skip
    made += [Contest("Newton-Schulz", size, partial(rounds_entrants, bench, shape))
             for size, shape in SIZES.items()]  # fmt: skip
    return made + [
        Contest(f"muon {what}", "124M, masters in halves", partial(rows_entrants, bench, what),
                "ours", ("copy", "torch copy_"))
        for what in BYTES
    ]  # fmt: skip
