"""Kernels that work on rows: move-and-norm, its backward, columns, gates, RoPE, embedding.

Each piece of work is checked against float64 beside PyTorch's own arithmetic in the same kinds, and
timed against copies of half as many bytes as it moves, so that both move the same (a kernel that
negates, and `copy_`, which in a graph is the driver's), and against PyTorch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

from bench.card import Bench, Contest

from nanoeuler.engines.gpu.lang.card import MULTIPROCESSORS
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.engines.gpu.lang.vectors import piece
from nanoeuler.engines.gpu.rows import (
    activations,
    embedding,
    residual_norm,
    residual_norm_backward,
    soft_cap,
)
from nanoeuler.engines.gpu.rows import (
    column_sums as column_sums_module,
)
from nanoeuler.engines.gpu.rows import (
    rope as rope_module,
)
from nanoeuler.engines.gpu.rows.residual_norm_backward import (
    Form,
    NormBackward,
    norm_backward_blocks,
    norm_backward_launches,
)

SETS = 3  # of operands: together more than the L2 cache
STEP = 16384, 768  # rows and columns of a step of the 124M model: 16 sequences of 1024
WIDE = 16384, 3072  # ... and of its MLP's inside
RAGGED = (1000, 776), (17, 768), (1, 768)
VOCABULARY, DEVICE = 50304, "cuda"
NORMS_OF_A_STEP = 33  # of euler-116m: two a layer, and the last
LEAST = 2e-7  # relative, of float32: three roundings of 2^-24, of a product, a sum and a root


@dataclass
class Work:
    """One set of operands: what is launched, its outputs, and what they should be.

    outputs: name -> tensor that is written; exact() -> name -> float64; torch() -> name -> what
    PyTorch makes of the same operands in the same kinds; more() -> what else is compared, where
    there is some. moved: bytes.
    """

    launches: Any
    outputs: dict[str, Any]
    exact: Callable[[], dict[str, Any]]
    torch: Callable[[], dict[str, Any]]
    moved: int
    more: Callable[[], dict[str, Any]] = dict


def real(bench: Bench, kind: str) -> Any:
    """PyTorch's name of a kind of number."""
    return {"bf16": bench.torch.bfloat16, "float32": bench.torch.float32}[kind]


def size_of(*tensors: Any) -> int:
    """Bytes of these tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def norm_of(bench: Bench, norm: str, x: Any, gain: Any, bias: Any) -> Any:
    """PyTorch's norm of x, in x's kind of number."""
    name, eps = bench.torch.nn.functional, residual_norm.EPS[norm]
    if norm == "rms":
        return name.rms_norm(x, gain.shape, gain.to(x.dtype), eps)
    return name.layer_norm(x, gain.shape, gain.to(x.dtype), bias.to(x.dtype), eps)


def stats_of(bench: Bench, norm: str, x: Any) -> Any:
    """What the forward keeps, of x in float32 or float64."""
    mean = x.mean(1, keepdim=True) * (norm == "layer")
    inverse = ((x - mean).square().mean(1, keepdim=True) + residual_norm.EPS[norm]).rsqrt()
    return inverse if norm == "rms" else bench.torch.cat([mean, inverse], 1)


def move_norm(
    bench: Bench, rows: int, columns: int, norm: str, kind: str, weight: float = 0.5
) -> Work:
    """x' = x + weight t and its norm; the stream of this kind, t and n bf16."""
    torch, view = bench.torch, bench.view
    x, t = bench.random(rows, columns, dtype=real(bench, kind)), bench.random(rows, columns)
    gain, bias = bench.random(2, columns).float()  # numbers that bf16 has, for PyTorch
    moved, n = bench.output(rows, columns, dtype=x.dtype), bench.output(rows, columns)
    stats = bench.output(rows, residual_norm.NORMS[norm], dtype=torch.float32)
    launch = residual_norm.move_norm_launch(
        norm, view(x), view(n), view(gain), view(stats), view(bias) if norm == "layer" else None,
        residual_norm.Add(view(t), weight, view(moved)),
    )  # fmt: skip

    def result(x: Any, t: Any) -> dict[str, Any]:
        m = torch.add(x, t.to(x.dtype), alpha=weight)
        n = norm_of(bench, norm, m, gain, bias)
        return {"moved": m, "n": n if n.dtype == torch.float64 else n.bfloat16()}

    def kept(made: dict[str, Any]) -> dict[str, Any]:
        m = made["moved"]
        return made | {"stats": stats_of(bench, norm, m if m.dtype == torch.float64 else m.float())}

    return Work(
        launch, {"moved": moved, "n": n, "stats": stats},
        lambda: kept(result(x.double(), t.double())), lambda: result(x, t),
        size_of(x, t, moved, n), lambda: kept(result(x, t)),
    )  # fmt: skip


def norm_backward(
    bench: Bench, rows: int, columns: int, norm: str, gradient: str, weight: float = 1.0
) -> Work:
    """dx + the norm's gradient, the sums of dn x^ and, with "layer", of dn and of dx.

    Where the gradient's stream is float32, a bf16 copy as well.
    """
    torch, view, layer = bench.torch, bench.view, norm == "layer"
    dn, x = bench.random(rows, columns), bench.random(rows, columns)
    before = bench.random(rows, columns, dtype=real(bench, gradient))
    gain, bias = bench.random(2, columns).float()
    stats = stats_of(bench, norm, x.float()).contiguous()
    dx = bench.output(rows, columns, dtype=before.dtype)
    copy = bench.output(rows, columns) if gradient == "float32" else None
    names = ["dgain", "dbias", "dmoved"][: 3 if layer else 1]
    sums = {name: bench.random(columns, dtype=torch.float32) for name in names}
    start = {name: tensor.clone() for name, tensor in sums.items()}
    views = [None if s is None else view(s) for s in (copy, *map(sums.get, ("dbias", "dmoved")))]
    this = NormBackward(
        norm, view(dn), view(x), view(stats), view(gain), view(dx), view(sums["dgain"]),
        before=view(before), copy=views[0], dbias=views[1], dmoved=views[2], weight=weight,
    )  # fmt: skip
    partials = bench.output(
        norm_backward_blocks(this.form, rows), this.form.sums * columns, dtype=torch.float32
    )
    launches = norm_backward_launches(this, view(partials))

    def result(kind: Any) -> dict[str, Any]:
        leaves = [tensor.detach().to(kind).requires_grad_() for tensor in (x, gain, bias)]
        norm_of(bench, norm, *leaves).backward(dn.to(kind))
        total = before.to(torch.float64 if kind == torch.float64 else before.dtype)
        total = total + leaves[0].grad
        made = {"dx": total, "dgain": start["dgain"] + leaves[1].grad}
        if copy is not None:
            made["copy"] = weight * total if kind == torch.float64 else (weight * total).bfloat16()
        if layer:
            made["dbias"] = start["dbias"] + leaves[2].grad
            made["dmoved"] = start["dmoved"] + weight * total.to(kind).sum(0)
        return made

    outputs = {"dx": dx} | sums | ({} if copy is None else {"copy": copy})
    return Work(
        launches, outputs, lambda: result(torch.float64), lambda: result(torch.bfloat16),
        size_of(dn, x, before, dx, *([copy] if copy is not None else [])),
    )  # fmt: skip


def column_sums(bench: Bench, rows: int, width: int, kind: str) -> Work:
    """The sums of a matrix's columns."""
    matrix = bench.random(rows, width, dtype=real(bench, kind))
    out = bench.output(width, dtype=bench.torch.float32)
    shape = column_sums_module.partials_shape(rows, width, piece(kind), MULTIPROCESSORS)
    partials = bench.output(*shape, dtype=bench.torch.float32)
    views = [bench.view(tensor) for tensor in (matrix, out, partials)]
    return Work(
        column_sums_module.columns_launches(*views, add=False), {"out": out},
        lambda: {"out": matrix.double().sum(0)},
        lambda: {"out": matrix.sum(0, dtype=bench.torch.float32)}, size_of(matrix),
    )  # fmt: skip


def gate(bench: Bench, rows: int, width: int, what: str, slope: bool) -> Work:
    """An activation, forward, or backward with h again and the sums of du. width: of h."""
    torch, view, wide = bench.torch, bench.view, 2 if what == "swiglu" else 1
    u, dh = bench.random(rows, wide * width), bench.random(rows, width)
    h = bench.output(rows, width)
    curve = torch.nn.functional.gelu

    def forward(u: Any) -> Any:
        if what == "relu2":
            return torch.relu(u).square()
        if wide == 1:
            return curve(u, approximate="none" if "exact" in what else "tanh")
        return torch.nn.functional.silu(u[:, :width]) * u[:, width:]

    if not slope:
        launch = activations.activation_launch(what, view(u), view(h))
        return Work(
            launch, {"h": h}, lambda: {"h": forward(u.double())}, lambda: {"h": forward(u)},
            size_of(u, h),
        )  # fmt: skip
    du, dbias = bench.output(*u.shape), bench.random(wide * width, dtype=torch.float32)
    start = dbias.clone()
    shape = activations.partials_shape(rows, width, "bf16", wide)
    partials = bench.output(*shape, dtype=torch.float32)
    launches = activations.activation_backward_launches(
        what, view(dh), view(u), view(du), h=view(h), sums=(view(dbias), view(partials))
    )

    def result(kind: Any) -> dict[str, Any]:
        leaf = u.detach().to(kind).requires_grad_()
        made = forward(leaf)
        made.backward(dh.to(kind))
        return {"h": made.detach(), "du": leaf.grad, "dbias": start + leaf.grad.sum(0)}

    outputs = {"h": h, "du": du, "dbias": dbias}
    return Work(
        launches, outputs, lambda: result(torch.float64), lambda: result(torch.bfloat16),
        size_of(dh, u, du, h),
    )  # fmt: skip


def rope(bench: Bench, rows: int, width: int, back: bool) -> Work:
    """Queries' and keys' heads of D = 64 turned, width / D of each and as many values."""
    torch, D, T = bench.torch, 64, 1024 if rows % 1024 == 0 else rows
    n, N = 2 * width // D, 3 * width // D
    heads = bench.random(rows, N * D)
    half = torch.arange(D // 2, device=heads.device)
    angle = torch.arange(T, device=heads.device)[:, None] * 10000.0 ** (-2.0 * half / D)
    cos, sin = angle.cos().float(), angle.sin().float()
    views = [bench.view(tensor) for tensor in (heads, cos, sin)]
    launch = rope_module.rope_launch(*views, n, T, back=back)
    first = heads.clone()

    def result(x: Any) -> dict[str, Any]:
        x = x.view(-1, T, N, D)
        a, b = x[:, :, :n, : D // 2], x[:, :, :n, D // 2 :]
        c, s = (table[:, None].to(x.dtype) for table in (cos, -sin if back else sin))
        turned = torch.cat([a * c - b * s, a * s + b * c], -1)
        return {"heads": torch.cat([turned, x[:, :, n:]], 2).view(rows, N * D)}

    return Work(
        launch, {"heads": heads}, lambda: result(first.double()), lambda: result(first),
        2 * rows * n * D * 2,
    )  # fmt: skip


def head_norm(bench: Bench, rows: int, width: int, back: bool) -> Work:
    """QK-norm and RoPE of width // D queries and as many keys, D = 64; and the way back."""
    torch, view, D, eps = bench.torch, bench.view, 64, 1e-5
    width -= width % D  # whole heads
    T, H = 1024 if rows % 1024 == 0 else rows, width // D
    heads, d = bench.random(rows, 3 * width), bench.random(rows, 3 * width)
    gains = [bench.random(D, dtype=torch.float32) for _ in range(2)]
    half = torch.arange(D // 2, device=heads.device)
    angle = torch.arange(T, device=heads.device)[:, None] * 10000.0 ** (-2.0 * half / D)
    cos, sin = angle.cos().float(), angle.sin().float()
    norm = rope_module.HeadNorm(H, *map(view, gains), eps, view(cos), view(sin))
    first, start = heads.clone(), d.clone()

    def result(x: Any, gains: list[Any]) -> Any:
        x = x.view(-1, T, 3 * H, D)
        parts = [x[:, :, :H], x[:, :, H : 2 * H]]
        parts = [y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * gain.to(y.dtype)
                 for y, gain in zip(parts, gains, strict=True)]  # fmt: skip
        a, b = torch.cat(parts, 2).split(D // 2, -1)
        c, s = (table[:, None].to(x.dtype) for table in (cos, sin))
        turned = torch.cat([a * c - b * s, a * s + b * c], -1)
        return torch.cat([turned, x[:, :, 2 * H :]], 2).view(rows, 3 * width)

    if not back:
        raw = bench.output(rows, 2 * width)
        launch = rope_module.head_norm_launch(view(heads), view(raw), norm, T)
        return Work(
            launch, {"heads": heads}, lambda: {"heads": result(first.double(), gains)},
            lambda: {"heads": result(first, gains)}, 3 * rows * 2 * width * 2,
        )  # fmt: skip
    blocks = rope_module.head_norm_blocks(rows)
    partials = bench.output(blocks, 2 * D, dtype=torch.float32)
    sums = [bench.output(D, dtype=torch.float32) for _ in range(2)]
    raw = bench.output(rows, 2 * width)
    raw.copy_(first[:, : 2 * width])  # a copy has its own strides, also where there is one row
    launches = [
        rope_module.head_norm_backward_launch(view(d), view(raw), norm, view(partials), T),
        column_sums_module.sum_launch(view(partials), tuple(map(view, sums)), add=False),
    ]

    def slopes(kind: Any) -> dict[str, Any]:
        leaves = [x.detach().to(kind).requires_grad_() for x in (first, *gains)]
        result(leaves[0], leaves[1:]).backward(start.to(kind))
        return {"d": leaves[0].grad, "q": leaves[1].grad, "k": leaves[2].grad}

    outputs = {"d": d, "q": sums[0], "k": sums[1]}
    return Work(
        launches, outputs, lambda: slopes(torch.float64), lambda: slopes(torch.bfloat16),
        3 * rows * 2 * width * 2,
    )  # fmt: skip


def sums_of_many(bench: Bench, rows: int, width: int) -> Work:
    """What the backwards of a step's norms have left, added to gains in one launch."""
    torch, count = bench.torch, min(rows, MULTIPROCESSORS * 3)
    partials = bench.random(NORMS_OF_A_STEP, count, width, dtype=torch.float32)
    outs = bench.random(NORMS_OF_A_STEP, width, dtype=torch.float32)
    start, size = outs.clone(), count * width
    lines = [
        line for i in range(NORMS_OF_A_STEP)
        for line in column_sums_module.sum_lines(i * size, count, width, i * width, width)
    ]  # fmt: skip
    table = torch.tensor(lines, dtype=torch.int32, device=partials.device)
    launch = column_sums_module.sum_table_launch(
        bench.view(table), bench.view(partials.view(-1)), bench.view(outs.view(-1))
    )
    return Work(
        launch, {"outs": outs}, lambda: {"outs": start.double() + partials.double().sum(1)},
        lambda: {"outs": start + partials.sum(1)}, size_of(partials),
    )  # fmt: skip


def batch(bench: Bench, rows: int) -> Any:
    """Tokens of a batch, as frequent as words: the n-th is drawn n times less than the first."""
    share = 1 / bench.torch.arange(1, VOCABULARY + 1, device=DEVICE, dtype=bench.torch.float32)
    return bench.torch.multinomial(share, rows, replacement=True).int()


def embed(bench: Bench, rows: int, width: int) -> Work:
    """Rows of the embedding and of the positions, bf16."""
    tokens, T = batch(bench, rows), 1024 if rows % 1024 == 0 else rows
    table, positions = bench.random(VOCABULARY, width), bench.random(T, width)
    x = bench.output(rows, width)
    views = [bench.view(tensor) for tensor in (tokens, table, x)]
    launch = embedding.embed_launch(*views, T, positions=bench.view(positions))

    def result(table: Any, positions: Any) -> dict[str, Any]:
        made = bench.torch.nn.functional.embedding(tokens, table).view(-1, T, width) + positions
        return {"x": made.view(rows, width)}

    return Work(
        launch, {"x": x}, lambda: result(table.double(), positions.double()),
        lambda: result(table, positions), 2 * size_of(x),
    )  # fmt: skip


def embed_backward(bench: Bench, rows: int, width: int) -> Work:
    """The gradients of the embedding and of the positions, float32, from a bf16 stream's."""
    torch, view = bench.torch, bench.view
    tokens, T = batch(bench, rows), 1024 if rows % 1024 == 0 else rows
    dx = bench.random(rows, width)
    dtable = torch.zeros(VOCABULARY, width, device=dx.device)
    dpositions = torch.zeros(T, width, device=dx.device)
    plan = embedding.scatter_plan(tokens.cpu().numpy(), VOCABULARY)
    plan = torch.from_numpy(plan).to(dx.device)
    slots = bench.output(*embedding.slots_shape(rows, VOCABULARY, width), dtype=torch.float32)
    launches = embedding.embed_backward_launches(
        view(dx), view(plan), view(dtable), view(slots), T=T, dpositions=view(dpositions)
    )

    def result(kind: Any) -> dict[str, Any]:
        table = torch.zeros(VOCABULARY, width, device=dx.device, dtype=kind)
        table.index_add_(0, tokens, dx.to(kind))
        return {"dtable": table, "dpositions": dx.to(kind).view(-1, T, width).sum(0)}

    def timed() -> dict[str, Any]:  # into a table that is there
        dpositions.add_(dx.view(-1, T, width).sum(0, dtype=torch.float32))
        return {"": dtable.index_add_(0, tokens, dx.float())}

    many = tokens.unique().numel()  # rows of the table that are read and written
    return Work(
        launches, {"dtable": dtable, "dpositions": dpositions}, lambda: result(torch.float64),
        timed, 2 * size_of(dx) + 8 * width * (many + T), lambda: result(torch.float32),
    )  # fmt: skip


def cap(bench: Bench, rows: int, width: int, back: bool) -> Work:
    """Soft-capped logits with their slopes; or gradients times slopes. Both in place."""
    torch, view = bench.torch, bench.view
    z, slopes = bench.random(rows, width), bench.random(rows, width)
    old, CAP = z.clone(), 2.0
    if back:
        launch = soft_cap.slopes_launch(view(z), view(slopes))
        return Work(
            launch, {"z": z}, lambda: {"z": old.double() * slopes.double()},
            lambda: {"z": old * slopes}, size_of(z, slopes, z),
        )  # fmt: skip
    launch = soft_cap.cap_launch(view(z), view(slopes), CAP)

    def result(kind: Any) -> dict[str, Any]:
        share = torch.tanh(old.to(kind) / CAP)
        return {"z": CAP * share, "slopes": 1 - share * share}

    outputs = {"z": z, "slopes": slopes}
    return Work(
        launch, outputs, lambda: result(torch.float64), lambda: result(torch.bfloat16),
        size_of(z, z, slopes),
    )  # fmt: skip


# What is checked and timed: its name in the rows, and how its operands are made for a shape.
WORKS = {
    "move and norm": partial(move_norm, norm="rms", kind="bf16"),
    "move and norm, LayerNorm": partial(move_norm, norm="layer", kind="bf16"),
    "move and norm, float32 stream": partial(move_norm, norm="rms", kind="float32"),
    "move and norm, backward": partial(norm_backward, norm="rms", gradient="bf16"),
    "move and norm, LayerNorm, backward": partial(norm_backward, norm="layer", gradient="bf16"),
    "move and norm, float32 stream, backward": partial(
        norm_backward, norm="rms", gradient="float32"
    ),
    "SwiGLU": partial(gate, what="swiglu", slope=False),
    "SwiGLU, backward": partial(gate, what="swiglu", slope=True),
    "GELU": partial(gate, what="gelu", slope=False),
    "GELU, backward": partial(gate, what="gelu", slope=True),
    "exact GELU": partial(gate, what="gelu_exact", slope=False),
    "exact GELU, backward": partial(gate, what="gelu_exact", slope=True),
    "ReLU squared": partial(gate, what="relu2", slope=False),
    "ReLU squared, backward": partial(gate, what="relu2", slope=True),
    "cap of logits": partial(cap, back=False),
    "cap of logits, slopes": partial(cap, back=True),
    "RoPE": partial(rope, back=False),
    "RoPE, backward": partial(rope, back=True),
    "norm of heads": partial(head_norm, back=False),
    "norm of heads, backward": partial(head_norm, back=True),
    "embedding": partial(embed),
    "embedding, backward": partial(embed_backward),
    "sums of many": partial(sums_of_many),
    "column sums": partial(column_sums, kind="bf16"),
    "column sums, float32": partial(column_sums, kind="float32"),
}


TIMED = [what for what in WORKS if what not in ("RoPE, backward", "column sums, float32")]


def sum_table() -> Kernel:
    """The kernel that adds what many have left."""
    return column_sums_module.SUM_TABLE


def launched(width: int) -> list[Callable[[], Kernel]]:
    """The kernels of all works on rows of this width."""
    forms = [
        Form(width, "rms", "bf16", "bf16", "bf16", True, False, False, False),
        Form(width, "layer", "bf16", "bf16", "bf16", True, False, True, True),
        Form(width, "rms", "bf16", "bf16", "float32", True, True, False, False),
    ]
    makers = [partial(residual_norm_backward.norm_backward_kernel, form) for form in forms]
    for norm, kind in (("rms", "bf16"), ("layer", "bf16"), ("rms", "float32")):
        form = residual_norm.Norm(norm, residual_norm.EPS[norm])
        move, biased = True, norm == "layer"
        makers.append(
            partial(residual_norm.move_norm_kernel, width, form, kind, "bf16", move, biased)
        )
    for kind in ("bf16", "float32"):
        threads = column_sums_module.Walk(1, width, piece(kind), column_sums_module.SUMMING).threads
        makers.append(partial(column_sums_module.columns_kernel, kind, threads))
    makers += [partial(column_sums_module.sum_kernel, add) for add in (True, False)]
    makers.append(partial(sum_table))
    makers += [partial(soft_cap.cap_kernel, kind, True) for kind in ("bf16", "float32")]
    makers += [partial(soft_cap.slopes_kernel, kind) for kind in ("bf16", "float32")]
    return [*makers, *of_gates(width), *of_tokens(width)]


CURVES = "gelu", "gelu_exact", "relu2"  # activations without a gate


def of_gates(width: int) -> list[Callable[[], Kernel]]:
    """Makers of the gates' kernels, for h of this width."""
    threads = column_sums_module.Walk(1, width, piece("bf16"), column_sums_module.FREE).threads
    return [
        partial(activations.swiglu_kernel, "bf16", threads),
        *(partial(activations.curve_kernel, "bf16", name, threads) for name in CURVES),
        partial(activations.swiglu_backward_kernel, "bf16", True, True, threads),
        *(partial(activations.curve_backward_kernel, "bf16", True, True, name, threads)
          for name in CURVES),
    ]


def of_tokens(width: int) -> list[Callable[[], Kernel]]:
    """Makers of the embedding's kernels."""
    return [
        partial(embedding.embed_kernel, width, "bf16", "bf16", True),
        partial(embedding.scatter_kernel, width, "bf16"),
        partial(embedding.several_kernel, width),
        partial(embedding.positions_kernel, width, "bf16"),
    ]


def label(maker: partial) -> str:
    """The name of a maker's kernel: the function's and its options; of true ones, their names."""
    name, options = maker.func.__name__.removesuffix("_kernel").replace("_", " "), []
    names = list(signature(maker.func).parameters)
    for key, value in zip(names, maker.args, strict=True):
        pairs = vars(value).items() if isinstance(value, Form) else [(key, value)]
        if isinstance(value, rope_module.HeadForm):
            pairs = value._asdict().items()
        options += [k if v is True else str(v) for k, v in pairs if v is not False]
    return " ".join([name, *options])


def kernels() -> dict[str, Callable[[], Kernel]]:
    """Name -> maker of each kernel."""
    widths = sorted({width for _, width in (STEP, *RAGGED)})
    makers = [maker for width in widths for maker in launched(width)] + of_gates(WIDE[1])
    makers.append(partial(rope_module.rope_kernel, "bf16", 24, 36, 64))
    for D in 64, 128:
        form = rope_module.HeadForm("bf16", 24, 36, D, 12, 1e-5, True)
        makers.append(partial(rope_module.head_norm_kernel, form))
        makers.append(partial(rope_module.head_norm_backward_kernel, form))
    return {label(maker): maker for maker in makers}


def check(bench: Bench, make: Callable[..., Work]) -> dict[str, Any]:
    """Errors of a work's outputs on each shape, the worst beside PyTorch's; UserError, ValueError
    where it is not right."""
    outcome: dict[str, Any] = {}
    for shape in (STEP, *RAGGED):
        work = make(bench, *shape)
        first = bench.repeat(bench.call(work.launches), work.outputs)
        exact, torch = work.exact(), work.torch() | work.more()
        for name, values in first.items():
            found = {
                "error": bench.error(values, exact[name]),
                "peer": bench.error(torch[name], exact[name]), "least": LEAST,
            }  # fmt: skip
            worst = outcome.setdefault(name, found)
            if found["error"] * worst["peer"] > worst["error"] * found["peer"]:
                outcome[name] = found
    return outcome


def checks(bench: Bench) -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> check."""
    return {f"rows: {what}": partial(check, bench, make) for what, make in WORKS.items()}


PEERS = "copy", "torch copy_", "torch"


def entrants(bench: Bench, make: Callable[[], Work]) -> dict[str, list[Callable[[], Any]]]:
    """Ours, PyTorch's, and a copy of half as many bytes as the work moves."""
    works = [make() for _ in range(SETS)]
    kind, halves = bench.torch.float32, [work.moved // 8 for work in works]
    pairs = [(bench.random(n, dtype=kind), bench.random(n, dtype=kind)) for n in halves]
    return {
        "ours": [bench.call(work.launches) for work in works],
        "copy": [partial(bench.torch.neg, here, out=there) for there, here in pairs],
        "torch copy_": [partial(there.copy_, here) for there, here in pairs],
        "torch": [work.torch for work in works],
    }


def contests(bench: Bench) -> list[Contest]:
    """Works at the size of a step."""
    made = []
    for what in TIMED:
        make = WORKS[what]
        shape = WIDE if make.func is gate else STEP
        field = partial(entrants, bench, partial(make, bench, *shape))
        made.append(Contest(what, f"{shape[0]}x{shape[1]} bf16", field, peer=PEERS))
    return made
