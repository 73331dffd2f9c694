"""Heads turned in registers, by the product that makes them and in attention's backward, against
the same kernels without that and RoPE's own.

The product is checked against float64 on ragged sizes, with heads of both widths, with sequences
that end within a tile, and with values that are not turned; PyTorch's error is that of a product in
bf16 that is turned in float32. `gpu.py time --only turn:` times it at euler-116m's sizes beside the
product and RoPE's own kernel one after the other ("apart"). So are attention's gradients, turned
back, and checked like attention itself; the peer is PyTorch's attention turned in float32.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from bench.card import Contest, flash, gemm, ghost

from nanoeuler.engines.gpu.attention import wgmma_backward as attention
from nanoeuler.engines.gpu.attention import wgmma_launch
from nanoeuler.engines.gpu.attention.layout import Backward
from nanoeuler.engines.gpu.gemm.wgmma_form import Form
from nanoeuler.engines.gpu.gemm.wgmma_kernel import gemm_kernel
from nanoeuler.engines.gpu.gemm.wgmma_launch import choose, product
from nanoeuler.engines.gpu.rows.rope import rope_kernel, rope_launch
from nanoeuler.engines.gpu.tile.rope import Turning
from nanoeuler.model.layers import rope_tables

CONTEXT = 1024  # positions of the tables


@dataclass(frozen=True)
class Case:
    """B sequences of T rows by C channels, to N heads of width D, of which the first n are turned;
    the product's layout and blocks (cluster, ping-pong), None: as the package chooses."""

    B: int
    T: int
    C: int
    N: int
    n: int
    D: int
    layout: str = "NN"
    blocks: tuple[int, bool] | None = None

    def __str__(self):
        return f"{self.layout} {self.B * self.T}x{self.N * self.D}x{self.C} bf16"

    @property
    def shape(self):
        """Rows, columns, depth."""
        return self.B * self.T, self.N * self.D, self.C

    @property
    def form(self):
        """The form that turns."""
        if self.blocks:
            cluster, pingpong = self.blocks
            return Form(self.layout, pingpong, cluster, f"rope {self.D}")
        return choose(self.layout, self.shape, f"rope {self.D}")


TIMED = [Case(64, 512, 768, 20, 16, 64), Case(16, 512, 768, 20, 16, 64)]  # euler-116m's
WAYS = [(cluster, pingpong) for pingpong in (False, True) for cluster in (1, 2)]
ALL = [replace(case, blocks=way) for case in TIMED for way in WAYS]  # each a contestant
WIDE = Case(16, 512, 768, 10, 8, 128)
ONE, PAIR, TURNS, PAIRED_TURNS = WAYS
CHECKED = [
    *ALL, WIDE, Case(3, 333, 200, 5, 4, 64, "NT", ONE), Case(7, 100, 136, 6, 3, 64, "NN", PAIR),
    Case(9, 77, 72, 3, 2, 128, "NN", ONE), Case(1, 1, 8, 1, 1, 64, "NN", ONE),
    Case(5, 130, 264, 7, 5, 128, "NT", PAIR), Case(4, 64, 64, 3, 0, 64, "NN", ONE),
    Case(3, 333, 200, 5, 4, 64, "NT", TURNS), Case(7, 100, 136, 6, 3, 64, "NN", PAIRED_TURNS),
    Case(9, 77, 72, 3, 2, 128, "NN", TURNS), Case(1, 1, 8, 1, 1, 64, "NN", TURNS),
]  # fmt: skip


def kernels():
    """Name -> maker of each kernel; those of the ways apart too."""
    forms = {case.form for case in CHECKED}
    forms |= {choose(case.layout, case.shape) for case in TIMED}
    made = {gemm.label(form): partial(gemm_kernel, form) for form in sorted(forms, key=gemm.label)}
    for D, most in ((64, 2), (128, 3)):
        for name, make, at_most in (
            ("dq", attention.dq_kernel, most), ("dkdv", attention.dkdv_kernel, 2)
        ):  # fmt: skip
            for groups in (1, at_most):
                form = attention.Form(D, groups, turned=True)
                made[f"{name} {D}, {groups} warpgroups, turned"] = partial(make, form)
    needed = "forward", "dq 64, 2", "dkdv 64, 2"  # of attention's own, for checks and "apart"
    made |= {name: make for name, make in flash.kernels().items() if name.startswith(needed)}
    return made | {f"RoPE {c.n} of {c.N}": partial(rope_kernel, "bf16", c.n, c.N, c.D)
                   for c in TIMED[:1]}  # fmt: skip


def launches(case, a, b, c, cos, sin, place):
    """The product that turns."""
    by = Turning(cos, sin, case.T, case.n * case.D)
    return product(case.form, a, b, c, turn=by, place=place)


def apart(case, a, b, c, cos, sin, place):
    """A product, and RoPE's own kernel."""
    made = product(choose(case.layout, case.shape), a, b, c, place=place)
    return [*made, rope_launch(c, cos, sin, case.n, case.T)]


def plans():
    """Name -> launches of every check and contest, without arrays."""
    made = {}
    for case in CHECKED:
        m, n, k = case.shape
        tables = (ghost((CONTEXT, case.D // 2), np.float32) for _ in range(2))
        b = (k, n) if case.layout[1] == "N" else (n, k)
        of = ghost((m, k)), ghost(b), ghost((m, n)), *tables, lambda array: array
        made[f"{case}, {case.T}, {case.blocks}"] = launches(case, *of)
        if replace(case, blocks=None) in TIMED:
            made[f"{case}, {case.T}, apart"] = apart(case, *of)
    for case in (*ATTENDED, *SAME):
        tables = [ghost((CONTEXT, case.D // 2), np.float32) for _ in range(2)]
        shapes = flash.shapes(case).items()
        arrays = {name: ghost(shape, flash.kind(name)) for name, shape in shapes}
        for crowd in flash.CROWDS:
            made[f"{case}, {crowd}"] = backward(case, arrays, *tables, crowd)
    return made


# Timed as the model has them, one turned, one by RoPE's own kernel; and odd ones.
SAME = [flash.Case(64, 12, 4, 512, 64), flash.Case(16, 12, 4, 512, 64)]
ATTENDED = [
    flash.Case(1, 2, 1, 1, 64), flash.Case(2, 4, 2, 77, 64), flash.Case(2, 4, 2, 333, 128),
    flash.Case(2, 4, 2, 1000, 64), flash.Case(3, 4, 1, 130, 64), flash.Case(2, 6, 3, 193, 128),
]  # fmt: skip


def backward(case, arrays, cos, sin, crowd="planned"):
    """Attention's backward, which turns back. arrays: name -> each of `flash.shapes`."""
    names = "do", "q", "k", "v", "o", "lse", "delta", "dq", "dk", "dv"
    by = Turning(cos, sin, case.T, (case.H + case.G) * case.D)
    of = Backward(*(arrays[name] for name in names))
    return list(wgmma_launch.backward_launches(of, None, by, flash.CROWDS[crowd]))


def tables(bench, D):
    """cos and sin as tensors."""
    return (bench.torch.tensor(x, dtype=bench.torch.float32, device="cuda")
            for x in rope_tables(CONTEXT, D))  # fmt: skip


def operands(bench, case):
    """a, b and the tables as tensors."""
    m, n, k = case.shape
    b = bench.random(*((k, n) if case.layout[1] == "N" else (n, k)))
    return bench.random(m, k), b, *tables(bench, case.D)


def turned(torch, case, a, b, cos, sin):
    """The same by PyTorch, in a's dtype, turned in no less than float32."""
    kind = torch.promote_types(a.dtype, torch.float32)
    s = (a @ (b if case.layout[1] == "N" else b.T)).view(case.B, case.T, case.N, 2, case.D // 2)
    x, y = s[:, :, : case.n].to(kind).unbind(3)
    cos, sin = (table[: case.T, None].to(kind) for table in (cos, sin))
    s[:, :, : case.n] = torch.stack([x * cos - y * sin, x * sin + y * cos], 3).to(s.dtype)
    return s.view(case.B * case.T, case.N * case.D)


def check(bench, case, launches=launches):
    """The relative errors, ours and PyTorch's. launches: of the product that turns."""
    torch, (a, b, cos, sin) = bench.torch, operands(bench, case)
    want = turned(torch, case, a.double(), b.double(), cos.double(), sin.double())
    peer = bench.error(turned(torch, case, a, b, cos, sin), want)
    c = bench.output(*want.shape)
    views = map(bench.view, (a, b, c, cos, sin))
    call = bench.call(launches(case, *views, bench.device.array))
    got = bench.repeat(call, {"c": c}, gemm.REPEATS)["c"]
    error = bench.error(got, want)
    if not error < gemm.WORST["bf16"]:
        raise ValueError(f"{case}: relative error {error:.2e}")
    return {"error": error, "peer": peer, "least": gemm.LEAST["bf16"]}


def turn_back(torch, x, cos, sin):
    """Gradients x (B, heads, T, D) turned back, in no less than float32."""
    kind, half = torch.promote_types(x.dtype, torch.float32), x.shape[-1] // 2
    a, b = x.to(kind).split(half, -1)
    cos, sin = (table[: x.shape[2]].to(kind) for table in (cos, sin))
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)


def check_backward(bench, case, crowd, packed):
    """The relative errors of dq, dk and dv, ours and those of FlashAttention-2, turned back."""
    torch, problem = bench.torch, flash.Problem(bench, case, packed=packed)
    cos, sin = tables(bench, case.D)
    views = {name: bench.view(tensor) for name, tensor in problem.tensors.items()}
    o_and_lse = (views[name] for name in ("q", "k", "v", "o", "lse"))
    bench.call(wgmma_launch.forward_launch(*o_and_lse))()
    calls = bench.call(backward(case, views, bench.view(cos), bench.view(sin), crowd))
    outputs = {name: problem.tensors[name] for name in ("delta", "dq", "dk", "dv")}
    seen, want = bench.repeat(calls, outputs), flash.exact(problem)[2]
    peers, made = problem.peer(flash.PEERS[0])[1]()[:3], {}
    for name, exact, peer in zip(("dq", "dk", "dv"), want, peers, strict=True):
        ours = seen[name][-1:].double()
        if name != "dq":
            exact, peer = flash.fold(problem, exact), flash.fold(problem, peer)
        if name != "dv":
            exact, peer = (turn_back(torch, x, cos, sin) for x in (exact, peer))
        peer = peer.bfloat16()[-1:].double()
        size = max(exact.norm(), 0.01 * exact.numel() ** 0.5)
        error, other = (((x - exact).norm() / size).item() for x in (ours, peer))
        made[name] = {"error": error, "peer": other, "least": flash.LEAST}
    return made


def checks(bench):
    """Name -> check of each case."""
    made = {
        f"matmul and RoPE {gemm.label(case.form)} {case}, {case.T} a sequence, {case.n} of"
        f" {case.N} heads": partial(check, bench, case)
        for case in CHECKED
    }
    return made | {
        f"attention backward and RoPE {case}, {crowd}{', packed' * packed}":
            partial(check_backward, bench, case, crowd, packed)
        for case in (*ATTENDED, *SAME)
        for crowd, packed in [(crowd, False) for crowd in flash.CROWDS] + [("planned", True)]
    }  # fmt: skip


def entrants(bench, case):
    """Name -> calls, for each of three sets of operands: each form, apart, by PyTorch."""
    made = {"apart": [], "torch": []}
    for _ in range(3):
        tensors = operands(bench, case)
        c = bench.output(case.shape[0], case.shape[1])
        a, b, cos, sin = map(bench.view, tensors)
        of = a, b, bench.view(c), cos, sin, bench.device.array
        for way in WAYS:
            this = replace(case, blocks=way)
            calls = made.setdefault(gemm.label(this.form), [])
            calls.append(bench.call(launches(this, *of)))
        made["apart"].append(bench.call(apart(case, *of)))
        made["torch"].append(partial(turned, bench.torch, case, *tensors))
    return made


def backward_entrants(bench, case):
    """Name -> calls, for each of two problems in the model's layout: turned back at once, apart."""
    made = {"ours": [], "apart": []}
    for seed in range(2):
        problem = flash.Problem(bench, case, seed, packed=True)
        cos, sin = map(bench.view, tables(bench, case.D))
        views = {name: bench.view(tensor) for name, tensor in problem.tensors.items()}
        forward, *apart = problem.ours()
        forward()  # the backward needs its o and lse
        made["ours"].append(bench.call(backward(case, views, cos, sin)))
        heads = case.H + 2 * case.G
        whole = bench.view(problem.tensors["dq"].as_strided(
            (case.B * case.T, heads * case.D), (heads * case.D, 1)
        ))  # fmt: skip
        rope = bench.call(
            rope_launch(whole, cos, sin, case.H + case.G, case.T, back=True)
        )
        made["apart"].append(lambda calls=(*apart, rope): [call() for call in calls])
    return made


def contests(bench):
    """What is timed."""
    made = [
        Contest("matmul and RoPE", str(case), partial(entrants, bench, case),
                gemm.label(case.form), ("apart", "torch"))
        for case in TIMED
    ]  # fmt: skip
    return made + [
        Contest("attention backward and RoPE", str(case), partial(backward_entrants, bench, case),
                peer="apart")
        for case in SAME
    ]  # fmt: skip
