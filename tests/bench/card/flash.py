"""Attention on tensor cores, against PyTorch's FlashAttention-2 and cuDNN; and FlashAttention-3,
where it is installed.

Each shape is checked against float64 on odd lengths and grouped heads, with one warpgroup in a
block and with all, in the model's layout and head by head; the error may be at most twice
FlashAttention-2's. For grouped queries PyTorch gets keys and values that were repeated before the
clock starts. Rows of several texts go to FlashAttention-2 as texts of their own, end to end.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import numpy as np
from bench.card import Contest, ghost

from nanoeuler.engines.gpu.attention import wgmma_launch
from nanoeuler.engines.gpu.attention.documents import Documents, last_of
from nanoeuler.engines.gpu.attention.layout import Backward, padded
from nanoeuler.engines.gpu.attention.wgmma_backward import Form, dkdv_kernel, dq_kernel
from nanoeuler.engines.gpu.attention.wgmma_forward import narrow_kernel, wide_kernel
from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS

SETS = 150 << 20  # bytes of operands that are rotated: three times the L2 cache
LSE = 1e-3  # absolute; scores of some tens in float32, products of bf16 are exact in it
LEAST = 2.0**-9  # what rounding a result to bf16 alone may cost
PEERS = "FlashAttention-2", "cuDNN"
THIRD = "FlashAttention-3"  # of a package of its own, flash_attn_interface, where there is one
# Which warpgroups share a block: as planned, always one, as many as there can be. What the plan is
# told of the card's multiprocessors.
CROWDS = {"planned": MULTIPROCESSORS, "one warpgroup": 1 << 30, "all warpgroups": 0}


@dataclass(frozen=True)
class Case:
    """A shape: B sequences, H query heads, G key heads, T positions, head width D; its dtype; how
    long the texts of a row are on average, 0 if they are not told apart.
    """

    B: int
    H: int
    G: int
    T: int
    D: int
    dtype: str = "bf16"
    length: int = 0

    def __str__(self):
        heads = f"{self.H}/{self.G}" if self.G != self.H else f"{self.H}"
        texts = f", texts of about {self.length}" if self.length else ""
        return f"B{self.B} H{heads} T{self.T} D{self.D} causal {self.dtype}{texts}"

    def first(self):
        """The first key that each query sees: texts of half the length to one and a half of it."""
        rng, first = np.random.default_rng(self.T), np.zeros((self.B, self.T), np.int32)
        for row in first:
            begin = 0
            while self.length and begin < self.T:
                row[begin:] = begin
                begin += rng.integers(self.length // 2, self.length * 3 // 2 + 1)
        return first


def in_texts(case, length=128):
    """The same case with rows of several texts."""
    return replace(case, length=length)


TIMED = [
    Case(16, 12, 12, 1024, 64), Case(16, 12, 4, 1024, 64), Case(4, 16, 16, 4096, 64),
    Case(4, 16, 16, 4096, 128), Case(16, 12, 12, 512, 64), Case(16, 12, 4, 512, 64),
    Case(2, 4, 2, 768, 64),
]  # fmt: skip
# Odd lengths: of one row, of less than a tile, of tiles that end between 64 and 128.
ODD = [
    Case(1, 2, 1, 1, 64), Case(2, 2, 2, 77, 64), Case(2, 4, 2, 333, 128), Case(2, 4, 2, 1000, 64),
    Case(3, 4, 1, 130, 64), Case(2, 6, 3, 193, 128),
]  # fmt: skip
TIMED_TEXTS = [in_texts(TIMED[0]), in_texts(TIMED[1])]
# Texts of about a tile, of a few tiles, and of a few positions.
ODD_TEXTS = [in_texts(ODD[3]), in_texts(ODD[3], 300), in_texts(ODD[2]), in_texts(ODD[1], 9)]


def kernels():
    """Name -> maker of each kernel."""
    made = {}
    for name, limited in ("", False), ("documents: ", True):
        made[f"{name}forward 64"] = partial(narrow_kernel, limited)
        made[f"{name}forward 128"] = partial(wide_kernel, limited)
        for D, most in ((64, 2), (128, 3)):
            for kernel, make, at_most in ("dq", dq_kernel, most), ("dkdv", dkdv_kernel, 2):
                for groups in (1, at_most):
                    form = Form(D, groups, limited=limited)
                    made[f"{name}{kernel} {D}, {groups} warpgroups"] = partial(make, form)
    return made


def documents_of(arrays):
    """What the launches take of rows of several texts, or None."""
    return Documents(arrays["first"], arrays["last"]) if "first" in arrays else None


def launches(arrays, crowd):
    """The three launches: forward, dq, dkdv. arrays: name -> each of `shapes`."""
    names = "do", "q", "k", "v", "o", "lse", "delta", "dq", "dk", "dv"
    texts = {"documents": documents_of(arrays)}
    into = (arrays[n] for n in ("q", "k", "v", "o", "lse"))
    forward = wgmma_launch.forward_launch(*into, **texts)
    backward = wgmma_launch.backward_launches(
        Backward(*(arrays[n] for n in names)), multiprocessors=CROWDS[crowd], **texts
    )
    return forward, *backward


def shapes(case):
    """Shapes of all arrays of a case; `kind` says their dtypes."""
    queries = case.B, case.H, case.T, case.D
    keys = case.B, case.G, case.T, case.D
    lines = case.B, case.H, padded(case.T)
    texts = ("first", "last") if case.length else ()
    return dict.fromkeys(("q", "do", "o", "dq"), queries) | dict.fromkeys(
        ("k", "v", "dk", "dv"), keys
    ) | dict.fromkeys(("lse", "delta"), lines) | dict.fromkeys(texts, (case.B, case.T))  # fmt: skip


def plans():
    """Name -> launches of every check, without arrays."""
    return {
        f"{case}, {crowd}": launches(
            {name: ghost(shape, kind(name)) for name, shape in shapes(case).items()}, crowd
        )
        for case in ODD + TIMED + ODD_TEXTS + TIMED_TEXTS
        for crowd in CROWDS
    }


KINDS = dict.fromkeys(("lse", "delta"), np.float32) | dict.fromkeys(("first", "last"), np.int32)


def kind(name):
    """The dtype of an array of `shapes`."""
    return KINDS.get(name, np.uint16)


def lines(torch, case):
    """first and last of a case's rows, as tensors, by name; none if texts are not told apart."""
    first = case.first()
    made = {"first": first, "last": last_of(first)} if case.length else {}
    return {name: torch.from_numpy(line).cuda() for name, line in made.items()}


def hidden(torch, case):
    """Which keys the queries do not see: bool (B, 1, T, T)."""
    later = torch.ones(case.T, case.T, device="cuda", dtype=torch.bool).triu(1)
    first = torch.from_numpy(case.first()).cuda()
    return (later | (torch.arange(case.T, device="cuda") < first[..., None]))[:, None]


class Problem:
    """A case with its arrays on the GPU; outputs lie between margins, all poisoned with nan."""

    def __init__(self, bench, case, seed=0, packed=False):
        self.bench, self.case, torch = bench, case, bench.torch
        torch.manual_seed(seed + case.T)
        self.tensors = lines(torch, case)
        for name, shape in shapes(case).items():
            if name in self.tensors:
                continue
            if name in ("q", "k", "v", "do"):
                self.tensors[name] = bench.random(*shape)
            else:
                dtype = torch.float32 if kind(name) == np.float32 else torch.bfloat16
                self.tensors[name] = bench.output(*shape, dtype=dtype)
        if packed:
            self.pack()

    def pack(self):
        """The same values in the model's layout: heads of a position side by side."""
        for names in (("q", "k", "v"), ("dq", "dk", "dv"), ("do",), ("o",)):
            parts = [self.tensors[name] for name in names]
            whole = self.bench.torch.cat([part.transpose(1, 2) for part in parts], 2).contiguous()
            at = 0
            for name, part in zip(names, parts, strict=True):
                self.tensors[name] = whole[:, :, at : at + part.shape[1]].transpose(1, 2)
                at += part.shape[1]

    def ours(self, crowd="planned"):
        """Functions that put forward, dq, dkdv on torch's stream."""
        views = {name: self.bench.view(tensor) for name, tensor in self.tensors.items()}
        return [self.bench.call(launch) for launch in launches(views, crowd)]

    def expanded(self):
        """q, k, v, do with a key head for each query head, as PyTorch's operators want them."""
        case, t = self.case, self.tensors
        k, v = (t[name].repeat_interleave(case.H // case.G, 1).contiguous() for name in "kv")
        return t["q"].contiguous(), k, v, t["do"].contiguous()

    def peer(self, name):
        """PyTorch's operators: functions of forward, which returns o first, and of backward."""
        aten = self.bench.torch.ops.aten
        q, k, v, do = self.expanded()
        if self.case.length:
            return self.end_to_end(name, q, k, v, do)
        if name == THIRD:
            return self.third(q, k, v, do)
        if name == "FlashAttention-2":
            forward = partial(aten._scaled_dot_product_flash_attention, q, k, v, 0.0, True)
            f = forward()
            back = aten._scaled_dot_product_flash_attention_backward
            return forward, partial(
                back, do, q, k, v, f[0], f[1], f[2], f[3], f[4], f[5], 0.0, True, f[6], f[7]
            )
        forward = partial(
            aten._scaled_dot_product_cudnn_attention, q, k, v, None, True, 0.0, True
        )
        f = forward()
        back = aten._scaled_dot_product_cudnn_attention_backward
        return forward, partial(
            back, do, q, k, v, f[0], f[1], f[6], f[7], None, f[2], f[3], f[4], f[5], 0.0, True
        )

    def third(self, *operands):
        """FlashAttention-3's forward, which returns o first, and its backward by autograd."""
        try:
            attend = import_module("flash_attn_interface").flash_attn_func
        except (ImportError, AttributeError) as error:
            raise RuntimeError(str(error)) from None
        torch = self.bench.torch
        q, k, v, do = (x.transpose(1, 2).contiguous() for x in operands)  # (B, T, H, D)

        def forward(*heads):
            made = attend(*heads, causal=True)
            return made if isinstance(made, tuple) else (made,)

        kept = [x.requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
        o = forward(*kept)[0]
        back = partial(torch.autograd.grad, o, kept, do, retain_graph=True)
        return partial(forward, q, k, v), back

    def end_to_end(self, name, *operands):
        """FlashAttention-2 of texts one after the other, without rows: (B T, H, D)."""
        if name != PEERS[0]:
            raise RuntimeError("rows of several texts are FlashAttention-2's here")
        torch, case = self.bench.torch, self.case
        aten, starts = torch.ops.aten, case.first() + case.T * np.arange(case.B)[:, None]
        ends = np.append(np.unique(starts), case.B * case.T).astype(np.int32)
        cut = torch.from_numpy(ends).cuda()
        q, k, v, do = (
            x.transpose(1, 2).reshape(case.B * case.T, case.H, case.D).contiguous()
            for x in operands
        )
        of = cut, cut, *[int(np.diff(ends).max())] * 2, 0.0, True
        forward = partial(aten._flash_attention_forward, q, k, v, *of, False)
        f = forward()
        back = aten._flash_attention_backward
        return forward, partial(back, do, q, k, v, f[0], f[1], *of, f[2], f[3])

    def results(self, name):
        """o, dq, dk, dv of PyTorch's operators, head by head, those of shared keys added up."""
        case = self.case
        forward, backward = self.peer(name)
        made = forward()[0], *backward()[:3]
        if case.length:
            made = [x.view(case.B, case.T, case.H, case.D).transpose(1, 2) for x in made]
        o, dq, dk, dv = made
        return o, dq, fold(self, dk), fold(self, dv)


def exact(problem):
    """o, lse (base 2), dq, dk, dv of the last sequence in float64, by the definition."""
    torch, case = problem.bench.torch, problem.case
    q, k, v, do = (x[-1:].double() for x in problem.expanded())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(case.D)
    scores = scores.masked_fill(hidden(torch, case)[-1:], -math.inf)
    lse = torch.logsumexp(scores, -1)
    o = torch.exp(scores - lse[..., None]) @ v
    gradients = torch.autograd.grad(o, (q, k, v), do)
    return o.detach(), lse.detach() / math.log(2), gradients


def fold(problem, x):
    """Gradients of repeated keys, summed over the query heads that share one."""
    case = problem.case
    return x.double().reshape(x.shape[0], case.G, case.H // case.G, case.T, case.D).sum(2)


def errors(problem, want, o, dq, dk, dv):
    """Relative errors of o, dq, dk, dv of the last sequence.

    What is nearly zero throughout, as dq and dk of a single position, is compared with 0.01.
    """
    o_want, _, (dq_want, dk_want, dv_want) = want
    pairs = (o, o_want), (dq, dq_want), (dk, fold(problem, dk_want)), (dv, fold(problem, dv_want))
    return [
        ((x[-1:].double() - y).norm() / max(y.norm(), 0.01 * math.sqrt(y.numel()))).item()
        for x, y in pairs
    ]


def check(bench, case, crowd, packed):
    """Errors by part, ours and FlashAttention-2's."""
    problem = Problem(bench, case, packed=packed)
    calls = problem.ours(crowd)
    names = "o", "lse", "delta", "dq", "dk", "dv"
    outputs = {name: problem.tensors[name] for name in names}
    o, lse, _, dq, dk, dv = bench.repeat(lambda: [call() for call in calls], outputs).values()
    want = exact(problem)
    seen = errors(problem, want, o, dq, dk, dv)
    peers = errors(problem, want, *problem.results(PEERS[0]))
    off = (lse[-1:, :, : case.T].double() - want[1]).abs().max().item()
    if not off < LSE:
        raise ValueError(f"lse is off by {off:.1e}")
    return {
        part: {"error": error, "peer": peer, "least": LEAST}
        for part, error, peer in zip(("o", "dq", "dk", "dv"), seen, peers, strict=True)
    }


def checks(bench):
    """Name -> check of each case with each crowd, some in the model's layout too."""
    made = {
        f"attention {case}, {crowd}": partial(check, bench, case, crowd, False)
        for case in ODD + TIMED + ODD_TEXTS + TIMED_TEXTS
        for crowd in CROWDS
    }
    packed = {
        f"attention {case}, packed": partial(check, bench, case, "planned", True)
        for case in (ODD[2], ODD[3], TIMED[1], TIMED_TEXTS[1])
    }
    return made | packed


def peers(problems, backward):
    """Name -> calls of those of the library's ways that this machine has."""
    made = {}
    for peer in (*PEERS, THIRD):
        try:
            made[peer] = [problem.peer(peer)[backward] for problem in problems]
        except RuntimeError as error:
            print(f"  no {peer}: {str(error).splitlines()[0][:90]}", flush=True)
    return made


def entrants(bench, case, backward):
    """Name -> calls, one for each set of operands: ours, its two halves backward, the peers."""
    size = 2 * 8 * case.B * case.H * case.T * case.D
    problems = [Problem(bench, case, seed) for seed in range(max(1, min(3, SETS // size)))]
    made = {}
    for problem in problems:
        forward, dq, dkdv = problem.ours()
        forward()  # the backward needs its o and lse
        ways = {"ours": forward}
        if backward:
            dq()
            ways = {"ours": lambda dq=dq, dkdv=dkdv: (dq(), dkdv()), "dq": dq, "dk, dv": dkdv}
        for who, call in ways.items():
            made.setdefault(who, []).append(call)
    return made | peers(problems, backward)


def in_rows(case):
    """How a contest of rows with several texts is called, after the others."""
    return " of several texts" if case.length else ""


def contests(bench):
    """What is timed."""
    return [
        Contest(
            f"attention {'backward' if backward else 'forward'}{in_rows(case)}", str(case),
            partial(entrants, bench, case, backward), peer=(*PEERS, THIRD),
        )
        for case in TIMED + TIMED_TEXTS
        for backward in (False, True)
    ]  # fmt: skip
