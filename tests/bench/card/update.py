"""The two ends of a training step: cross-entropy, the gradient's norm, AdamW; and of a scored row.

AdamW and the norm have GPT-2's 124M parameters. AdamW is timed beside a copy of as many bytes,
which reads half of them and writes half, and beside PyTorch's fused one, which has no bf16 copy.
"""

from functools import cache, partial

import numpy as np
from bench.card import Contest, ghost

from nanoeuler.engines.gpu.rows import adamw, cross_entropy, gradient_norm, likeliest
from nanoeuler.model.config import PRESETS
from nanoeuler.model.weights import Weights

V, ROWS = 50304, 16384  # GPT-2's columns with padding, and the positions of a step
CHUNK = 256             # rows whose logits fit in the L2 cache: 25.8 MB
BETAS, EPS, DECAY = (0.9, 0.98), 1e-8, 0.1
BYTES = 30              # of a parameter: 16 read, 14 written
# Forms that are timed: as chosen, read twice, and the forward pass alone.
FORMS = {
    "chosen": cross_entropy.form_for(V, False),
    "twice": cross_entropy.Form("nowhere", 512, 4),
    "forward": cross_entropy.form_for(V, False, False),
}
# Positions, heads, columns, the same padded, whether float32; the card whose form is asked for.
HOPPER, ADA = (9, 0), (8, 9)
CHECKED = {
    "V 50257 bf16": (512, 1, 50257, V, False, HOPPER),
    "V 50257 float32": (256, 1, 50257, V, True, HOPPER),
    "V 4096 bf16, 4 heads": (1000, 4, 4096, 4096, False, HOPPER),
    "V 7 float32": (9, 2, 7, 8, True, HOPPER), "V 1000 bf16": (33, 3, 1000, 1000, False, HOPPER),
    "V 50257 bf16, as on 8.9": (512, 1, 50257, V, False, ADA),
    "V 50688 bf16, as on 8.9": (64, 1, 50688, 50688, False, ADA),
}  # fmt: skip


def squares():
    """The kernel that adds squares."""
    return gradient_norm.ADD_SQUARES


def decide():
    """The kernel that decides."""
    return gradient_norm.DECIDE


def add_losses():
    """The kernel that adds losses."""
    return cross_entropy.ADD_LOSSES


def is_likeliest():
    """The kernel that says whether a target is the likeliest token."""
    return likeliest.LIKELIEST


def kernels():
    """Name -> maker of each kernel."""
    made = {"squares": squares, "decide": decide, "sum of losses": add_losses}
    made["likeliest"] = is_likeliest
    made["AdamW"] = partial(adamw.adamw_kernel, adamw.ROUNDS, False)
    made["AdamW, masters in halves"] = partial(adamw.adamw_kernel, adamw.ROUNDS, True)
    forms = {*FORMS.values()}
    for _, _, _, padded, wide, card in CHECKED.values():
        forms |= {cross_entropy.form_for(padded, wide, capability=card)}
    for form in sorted(forms):
        name = f"loss in {form.place}, {form.threads} x {form.count}"
        name += ", float32" * form.wide + ", forward" * (not form.gradient)
        name += ", one block" * (form.place == "shared" and form.resident == 1)
        made[name] = partial(cross_entropy.loss_kernel, form)
    return made


@cache
def parts():
    """The segments of GPT-2's smallest model, and the number of its parameters with padding."""
    weights = Weights(PRESETS["gpt2-124m"])
    return adamw.segments(weights), weights.flat.size


def plans():
    """Name -> launches, without arrays."""
    _, n = parts()
    table = ghost(adamw.tiles(parts()[0]).shape, np.int32)
    f = partial(ghost, dtype=np.float32)
    buffers = adamw.Buffers(*[f((n,))] * 4, ghost((n,)))
    return {
        "AdamW": [adamw.adamw_launch(table, f((8,)), buffers, *BETAS, EPS)],
        "norm": norm_of(f((n,)), f((gradient_norm.blocks_for(n),)), f((1,)), f((1, 4)), f((8,))),
        "loss": [
            cross_entropy.loss_launch(
                ghost((ROWS, V)), ghost((ROWS, 1), np.int32), f((1,)), f((ROWS, 1)), 50257
            )
        ],
    }


def norm_of(gradients, sums, losses, plan, decision):
    """The launches of a norm, with a ghost of a counter."""
    number = ghost((1,), np.int32)
    return gradient_norm.norm_launches(gradients, sums, losses, plan, number, 1.0, decision)


# ---- AdamW


class State:
    """Buffers of a step, as tensors: weights, gradients, moments, copy, decision, tiles."""

    def __init__(self, bench, go=1.0, number=3):
        torch, (own, n) = bench.torch, parts()
        torch.manual_seed(0)
        self.bench = bench
        make = partial(torch.randn, n, device="cuda")
        self.w, self.g, self.m = 0.02 * make(), 0.01 * make(), 0.01 * make()
        self.v = make().square_() * 1e-4
        self.copy = bench.output(n)
        row = gradient_norm.schedule([3e-4] * number, *BETAS, DECAY)[-1]
        words = np.array([*row, 0.5, 2.0, go, 0.0], np.float32)
        self.decision = torch.from_numpy(words).cuda()
        self.table = torch.from_numpy(adamw.tiles(own)).cuda()
        self.number = number

    def call(self):
        """A function that takes the step."""
        table, decision, *flats = map(self.bench.view, (
            self.table, self.decision, self.w, self.g, self.m, self.v, self.copy))  # fmt: skip
        return self.bench.call(
            adamw.adamw_launch(table, decision, adamw.Buffers(*flats), *BETAS, EPS))

    def exact(self):
        """w, m, v after the step, in float64."""
        w, g, m, v = (x.double() for x in (self.w, self.g, self.m, self.v))
        (b1, b2), n = BETAS, self.number
        g = g * 0.5
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        s = m / (1 - b1**n) / ((v / (1 - b2**n)).sqrt() + EPS)
        decay = self.bench.torch.zeros_like(w)
        for part in parts()[0]:
            decay[part.start : part.start + part.length] = DECAY * part.decay
        return w - 3e-4 * (s + decay * w), m, v


def check_adamw(bench):
    """The change of w, m, v and the copy against float64, and PyTorch's fused step."""
    torch, state = bench.torch, State(bench)
    before, exact = state.w.clone(), state.exact()
    outputs = dict(w=state.w, m=state.m, v=state.v, copy=state.copy)
    theirs = torch_adamw(state)
    seen = bench.repeat(state.call(), outputs | dict(copy=copied(state)))
    theirs()
    torch.cuda.synchronize()
    copies = [p for p in parts()[0] if p.copy >= 0]
    for p in copies:
        part = slice(p.start, p.start + p.length)
        up = (state.w[part].view(torch.int32) + 0x8000) >> 16  # half-way cases round up
        if not torch.equal(state.copy[part].view(torch.int16), up.to(torch.int16)):
            raise ValueError(f"the copy of {p} is not what its masters round to")
    change = exact[0] - before.double()
    peer = torch.cat([p.detach().reshape(-1) for p in theirs.parameters])
    where = torch.cat([torch.arange(p.start, p.start + p.length) for p in parts()[0]]).cuda()
    return {
        "w": {
            "error": ((seen["w"].double() - exact[0]).norm() / change.norm()).item(),
            "peer": ((peer.double() - exact[0][where]).norm() / change.norm()).item(),
        },
        "m": {"error": bench.error(seen["m"], exact[1]), "peer": None, "least": 2.0**-23},
        "v": {"error": bench.error(seen["v"], exact[2]), "peer": None, "least": 2.0**-23},
    }


def copied(state):
    """The copy, with zeros where nothing is copied: what is left poisoned is looked for."""
    for part in parts()[0]:
        if part.copy < 0:
            state.copy[part.start : part.start + part.length] = 0
    return state.copy


def torch_adamw(state):
    """A function that takes PyTorch's fused step on tensors of its own, clipped beforehand."""
    torch = state.bench.torch
    made = [[], []]
    for part in parts()[0]:
        x = torch.nn.Parameter(state.w[part.start : part.start + part.length].clone())
        x.grad = 0.5 * state.g[part.start : part.start + part.length]
        made[not part.decay].append((part, x))
    rules = dict(lr=3e-4, betas=BETAS, eps=EPS, fused=True, capturable=True)
    groups = [
        {"params": [x for _, x in own], "weight_decay": decay}
        for own, decay in zip(made, (DECAY, 0.0), strict=True)
    ]
    step = torch.optim.AdamW(groups, **rules)
    for part, x in made[0] + made[1]:
        here = slice(part.start, part.start + part.length)
        step.state[x] = {
            "step": torch.tensor(float(state.number - 1), device="cuda"),
            "exp_avg": state.m[here].clone(), "exp_avg_sq": state.v[here].clone(),
        }  # fmt: skip

    def call():
        step.step()

    call.parameters = [x for _, x in sorted(made[0] + made[1], key=lambda pair: pair[0].start)]
    return call


def check_skip(bench):
    """A step that is not to be taken: not a bit moves."""
    state = State(bench, go=0.0)
    after = state.w, state.m, state.v
    before = [x.clone() for x in after]
    state.call()()
    same = all(bench.torch.equal(a, b) for a, b in zip(before, after, strict=True))
    if not same or not state.copy.isnan().all():
        raise ValueError("a step that is skipped wrote")
    return {"error": 0.0, "peer": 0.0}


def adamw_entrants(bench):
    """Ours, copies of as many bytes, PyTorch's."""
    torch, made = bench.torch, {}
    half = parts()[1] * BYTES // 2 // 4
    source, target = (torch.randn(half, device="cuda") for _ in range(2))
    state = State(bench)
    made["copy"] = [partial(torch.neg, source, out=target)]  # a kernel: the faster of the two
    made["torch copy_"] = [partial(target.copy_, source)]  # in a graph, a copy by the driver
    made["ours"] = [state.call()]
    made["torch fused"] = [torch_adamw(state)]
    return made


# ---- The norm


def norm_setting(bench, bad=None):
    """Gradients, the other arrays, and a function that takes their norm."""
    torch, n = bench.torch, parts()[1]
    torch.manual_seed(1)
    g = torch.randn(n, device="cuda") * 0.01
    if bad is not None:
        g[n // 3] = bad
    arrays = dict(
        sums=bench.output(gradient_norm.blocks_for(n), dtype=torch.float32),
        losses=torch.ones(2, device="cuda"),
        plan=torch.from_numpy(gradient_norm.schedule([3e-4, 2e-4], *BETAS, DECAY)).cuda(),
        number=torch.zeros(1, device="cuda", dtype=torch.int32),
    )
    decision = bench.output(8, dtype=torch.float32)
    views = [bench.view(x) for x in (g, *arrays.values())]
    launches = gradient_norm.norm_launches(*views, 1.0, bench.view(decision))
    return g, arrays, decision, bench.call(launches)


def check_norm(bench):
    """The norm and the scale against float64; PyTorch's."""
    torch = bench.torch
    g, arrays, decision, call = norm_setting(bench)
    seen = bench.repeat(call, dict(decision=decision, sums=arrays["sums"], **{
        "number": arrays["number"]}))  # fmt: skip
    exact = g.double().norm()
    scale = min(1.0, (1.0 / exact).item())
    if seen["decision"][6] != 1 or abs(seen["decision"][4].item() / scale - 1) > 1e-5:
        raise ValueError(f"decision {seen['decision'].tolist()}, scale {scale}")
    for bad in (float("nan"), float("inf")):
        *_, wrong, again = norm_setting(bench, bad)
        again()
        if wrong[6] != 0:
            raise ValueError(f"a gradient of {bad} is stepped with: {wrong.tolist()}")
    error = (seen["decision"][5].double() / exact - 1).abs().item()
    peer = (torch.nn.utils.get_total_norm([g]).double() / exact - 1).abs().item()
    return {"error": error, "peer": peer, "least": 2.0**-22}


def norm_entrants(bench):
    """Ours, PyTorch's norm, and its clipping, which changes the gradients as well."""
    torch = bench.torch
    g, _, _, call = norm_setting(bench)
    pieces = [torch.nn.Parameter(torch.empty(0, device="cuda")) for _ in parts()[0]]
    for x, part in zip(pieces, parts()[0], strict=True):
        x.data = torch.empty(part.length, device="cuda")
        x.grad = g[part.start : part.start + part.length]
    grads = [x.grad for x in pieces]
    return {
        "torch": [partial(torch.nn.utils.clip_grad_norm_, pieces, 1.0, foreach=True)],
        "torch, norm alone": [partial(torch.nn.utils.get_total_norm, grads, foreach=True)],
        "ours": [call],
    }


# ---- The loss


class Problem:
    """Logits, targets of which some are not counted, and our and PyTorch's losses of them."""

    def __init__(self, bench, rows, heads, columns, padded, wide):
        torch = bench.torch
        torch.manual_seed(rows)
        kind = torch.float32 if wide else torch.bfloat16
        self.bench, self.columns, self.heads = bench, columns, heads
        self.logits = bench.output(rows, heads * padded, dtype=kind)
        self.logits.copy_(3 * torch.randn(rows, heads * padded, device="cuda"))
        targets = torch.randint(0, columns, (rows, heads), device="cuda", dtype=torch.int32)
        targets[torch.rand(rows, heads, device="cuda") < 0.1] = cross_entropy.IGNORE
        self.targets = targets
        self.scale = torch.linspace(0.5, 1.0, heads, device="cuda")
        self.losses = bench.output(rows, heads, dtype=torch.float32)
        self.sums = bench.output(heads, dtype=torch.float32)

    def call(self, form=None, gradient=True):
        """A function of all rows at once."""
        views = map(self.bench.view, (self.logits, self.targets, self.scale, self.losses))
        wide = self.logits.dtype == self.bench.torch.float32
        form = form or cross_entropy.form_for(
            self.logits.shape[1] // self.heads, wide, gradient)
        first = cross_entropy.loss_launch(*views, self.columns, form=form)
        last = cross_entropy.sums_launch(self.bench.view(self.losses), self.bench.view(self.sums))
        return self.bench.call([first, last])

    def chunks(self, rows, again):
        """A function that takes `rows` rows `again` times, as if they were many."""
        views = [self.bench.view(x) for x in (self.logits[:rows], self.targets, self.scale)]
        loss_of = self.bench.view(self.losses)
        launches = [
            cross_entropy.loss_launch(*views, loss_of, self.columns, first=i * rows)
            for i in range(again)
        ]
        return self.bench.call(launches)

    def torch(self, double=False):
        """PyTorch's losses, and the gradient of their weighted sum, in the logits' precision."""
        torch, rows = self.bench.torch, len(self.logits)
        x = self.logits.view(rows, self.heads, -1)[..., : self.columns]
        x = (x.double() if double else x).detach().requires_grad_()
        losses = torch.nn.functional.cross_entropy(
            x.reshape(-1, self.columns), self.targets.reshape(-1).long(),
            ignore_index=cross_entropy.IGNORE,
            reduction="none",
        ).view(rows, self.heads)  # fmt: skip
        (d,) = torch.autograd.grad((losses * self.scale).sum(), x)
        return losses.detach(), d


def check_loss(bench, rows, heads, columns, padded, wide, card):
    """Losses, sums and gradients against float64; padding must be 0."""
    problem = Problem(bench, rows, heads, columns, padded, wide)
    exact, exact_d = problem.torch(double=True)
    peer, peer_d = problem.torch()
    outputs = dict(d=problem.logits, losses=problem.losses, sums=problem.sums)
    form = cross_entropy.form_for(padded, wide, capability=card)
    seen = bench.repeat(problem.call(form), outputs)
    d = seen["d"].view(rows, heads, padded)
    if padded > columns and d[..., columns:].abs().max() != 0:
        raise ValueError("the padding is not 0")
    least = 2.0**-22 if wide else 2.0**-9  # of exp2, of rounding to bf16
    return {
        "gradient": {
            "error": bench.error(d[..., :columns], exact_d), "peer": bench.error(peer_d, exact_d),
            "least": least,
        },
        "losses": {"error": bench.error(seen["losses"], exact), "peer": bench.error(peer, exact),
                   "least": 2.0**-22},
        "sums": {"error": bench.error(seen["sums"], exact.sum(0)), "peer": None,
                 "least": 2.0**-22},
    }  # fmt: skip


def check_likeliest(bench, rows, columns, width):
    """Flags of the likeliest token, of another, and of none, against PyTorch's argmax."""
    torch = bench.torch
    torch.manual_seed(rows)
    logits = bench.output(rows, width, dtype=torch.float32)
    logits.copy_(3 * torch.randn(rows, width, device="cuda"))
    best = logits[:, :columns].argmax(1, keepdim=True)
    other = torch.randint(0, columns, (rows, 1), device="cuda")
    kind = torch.arange(rows, device="cuda")[:, None] % 3
    targets = torch.where(kind == 0, best, torch.where(kind == 1, other, -1)).to(torch.int32)
    flags = bench.output(rows, 1, dtype=torch.float32)
    views = map(bench.view, (logits, targets, flags))
    seen = bench.repeat(bench.call([likeliest.likeliest_launch(*views, columns)]),
                        dict(flags=flags))  # fmt: skip
    wrong = (seen["flags"] != (targets == best).float()).sum().item()
    return {"flags": {"error": float(wrong), "peer": 0.0, "least": 0.5}}


def loss_entrants(bench):
    """One problem of all rows for all of ours, and a chunk of them again and again."""
    problem = Problem(bench, ROWS, 1, V, V, False)
    made = {"torch": [problem.torch]}
    for name, form in FORMS.items():
        made[name] = [problem.call(form, gradient=form.gradient)]
    made[f"chunks of {CHUNK} rows"] = [problem.chunks(CHUNK, ROWS // CHUNK)]
    return made


# ---- What the script asks for


def checks(bench):
    """Name -> check."""
    made = {"AdamW 124M": partial(check_adamw, bench), "skipped step": partial(check_skip, bench)}
    made["gradient norm 124M"] = partial(check_norm, bench)
    for name, shape in CHECKED.items():
        made[f"cross-entropy {name}"] = partial(check_loss, bench, *shape)
    made["likeliest V 50257"] = partial(check_likeliest, bench, 1024, 50257, V)
    return made


def contests(bench):
    """What is timed."""
    return [
        Contest(
            "AdamW", "124M float32 masters", partial(adamw_entrants, bench),
            "ours", ("copy", "torch copy_", "torch fused"),
        ),
        Contest(
            "gradient norm", "124M float32", partial(norm_entrants, bench), "ours",
            ("torch", "torch, norm alone"),
        ),
        Contest(
            "cross-entropy", f"{ROWS}x{V} bf16", partial(loss_entrants, bench), "chosen", "torch"
        ),
    ]  # fmt: skip
