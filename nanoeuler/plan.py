# Made from book/09-training-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% book/09-training-on-a-gpu.md:50
"""Before training: the FLOPs, bytes, memory and hours of a configuration, on paper.

Everything follows from the configuration's shapes and a device's datasheet; nothing is measured
here. Left out: the time to launch kernels, to move data between devices, and to load the text.

B batch, T positions, C channels, H query heads, G key/value heads, D head width, V vocabulary,
K predicted tokens, F MLP width, L layers.
"""

from math import prod
from typing import NamedTuple

from nanoeuler.config import count_parameters, parameter_shapes
from nanoeuler.errors import UserError
from nanoeuler.euler import INTEGRATORS
from nanoeuler.model import PADDING


def stages(config):
    """How often a pass evaluates each layer: the stages s of the integrator."""
    return len(INTEGRATORS[config.integrator].b)


def linear_shapes(config):
    """Yield (name, I, O, n) of each matrix of a linear layer, "wqkv" to "output".

    A forward pass multiplies by it n times.
    """
    for name, shape in parameter_shapes(config).items():
        if name.startswith("block.") and len(shape) == 2:
            yield name.split(".")[-1], *shape, config.repeat * stages(config)
    yield "output", config.dim, config.n_predict * config.vocab_size, 1


def flops_per_token(config, causal=True):
    """FLOPs of the matrix products of one training step, per token. Equation eq-plan-flops.

    With `causal` off, attention counts all T^2 pairs, as an engine does that masks after computing.
    """
    linear = 6 * sum(n * rows * columns for _, rows, columns, n in linear_shapes(config))
    pairs = (config.context + 1) / 2 if causal else config.context
    layers = stages(config) * config.n_layers
    return linear + 12 * layers * config.n_heads * config.head_dim * pairs


# %% book/09-training-on-a-gpu.md:217
# FLOPs and values moved per element, forward and backward together, counting each + - * / exp tanh
# and comparison of the operation's equations as one FLOP, and each array read or written once.
ELEMENTWISE = {
    "embed": (1, 5),           # read, write; backward: read, and read and write the table's row
    "positions": (2, 0),       # a sum each way; nothing moves but their own values, once a step
    "rmsnorm": (13, 5),        # 4 forward, 9 backward; x, y; dy, x, dx
    "layernorm": (18, 5),      # 6 forward, 12 backward; as rmsnorm
    "rope": (6, 4),            # 2 products and a sum, twice; in and out, twice
    "add": (2, 3),             # each use: a product (by one, if h is) and a sum; two in, one out
    "scale": (1, 2),           # each use: a product; in and out
    "swiglu": (19, 8),         # 6 forward, 13 backward; gate, up, h; dh, gate, up, dgate, dup
    "gelu": (27, 5),           # 9 forward, 18 backward; u, h; dh, u, du
    "bias": (2, 0),            # a sum each way, as positions
    "cross_entropy": (6, 2),   # max, -, exp, sum, /, scale; logits in, gradient out
}
# AdamW per parameter: its two moments 7 FLOPs, their corrections 2, the step 6 (chapter 6); it
# reads weight, gradient and moments and writes weight and moments, 7 float32 values.
ADAMW = (15, 7)
# Weights, gradients and moments are float32 even where activations are not: small updates would
# vanish in bfloat16, which keeps 8 significant bits.
MASTER_BYTES = 4


class Operation(NamedTuple):
    """One kind of operation, all its uses in a training step together, forward and backward."""

    name: str
    flops: float
    bytes: float


# %% book/09-training-on-a-gpu.md:252
def _widths(config):
    # How many elements of each ELEMENTWISE operation a token has, in all places of its use.
    C, steps, layers = config.dim, 2 * config.n_layers, stages(config) * config.n_layers
    a, b = INTEGRATORS[config.integrator]
    inner, outer = sum(x != 0 for row in a for x in row), sum(x != 0 for x in b)
    biases = {n: s[0] for n, s in parameter_shapes(config).items() if n.endswith("_bias")}
    last = biases.pop("norm_bias", 0)  # the only one outside the blocks
    turned = config.n_heads + config.n_kv_heads
    return {
        "embed": C,
        "positions": C * (config.position == "learned"),
        "rmsnorm": (2 * layers + 1) * C * (config.norm == "rms"),
        "layernorm": (2 * layers + 1) * C * (config.norm == "layer"),
        "rope": layers * turned * config.head_dim * (config.position == "rope"),
        "add": steps * (2 * inner + outer + len(b)) * C,
        "scale": steps * (len(b) - (config.step_size * b[-1] == 1)) * C,
        "swiglu": layers * config.hidden * (config.mlp == "swiglu"),
        "gelu": layers * config.hidden * (config.mlp == "gelu"),
        "bias": config.repeat * stages(config) * sum(biases.values()) + last,
        "cross_entropy": config.n_predict * config.vocab_size,
    }


# %% book/09-training-on-a-gpu.md:277
def operations(config, batch_size, value_bytes, causal=True):
    """The operations of one training step on `batch_size` sequences: a list of `Operation`.

    `value_bytes` is the size of an activation or of a weight as read by a product: 2 for bfloat16,
    4 for float32.
    """
    H, G, D, T = config.n_heads, config.n_kv_heads, config.head_dim, config.context
    tokens, layers, sums = batch_size * T, stages(config) * config.n_layers, {}
    for name, rows, columns, n in linear_shapes(config):
        flops, values = sums.get(name, (0, 0))
        values += n * 3 * (tokens * (rows + columns) + rows * columns)
        sums[name] = flops + n * 6 * tokens * rows * columns, values
    pairs = T * (T + 1) / 2 if causal else T * T
    moved = 3 * (H + 2 * G) * D + 3 * H * D  # heads read twice, dheads written; y, y again, dy
    sums["attention"] = 12 * layers * batch_size * H * D * pairs, layers * tokens * moved
    once = {"bias": 2, "positions": 2 * T}  # read, and the gradient written, for the whole batch
    for name, width in _widths(config).items():
        if width:
            flops, values = ELEMENTWISE[name]
            sums[name] = flops * tokens * width, (values * tokens + once.get(name, 0)) * width
    rows = [Operation(name, flops, values * value_bytes) for name, (flops, values) in sums.items()]
    n = count_parameters(config)
    copy = value_bytes if value_bytes < MASTER_BYTES else 0  # the products' own copy of the weights
    return [*rows, Operation("adamw", ADAMW[0] * n, (ADAMW[1] * MASTER_BYTES + copy) * n)]


# %% book/09-training-on-a-gpu.md:334
def memory(config, batch_size, value_bytes, flash=True):
    """Bytes that a training step needs at once, by name; `operations` explains `value_bytes`.

    `flash` off keeps all attention probabilities, as the reference engine does. Buffers that live
    inside one operation, or one layer's backward, are not counted.
    """
    C, F, H, G, D = config.dim, config.hidden, config.n_heads, config.n_kv_heads, config.head_dim
    shapes, tokens = parameter_shapes(config).values(), batch_size * config.context
    stored = sum(-(-prod(shape) // PADDING) * PADDING for shape in shapes)
    stats, u = 1 if config.norm == "rms" else 2, 2 * F if config.mlp == "swiglu" else F
    probabilities = H * (1 if flash else config.context)
    kept = 4 * C + 2 * stats + (H + 2 * G) * D + H * D + u + F + probabilities
    kept = stages(config) * config.n_layers * kept + 2 * C + stats
    return {
        "weights": MASTER_BYTES * stored,
        "copy of the weights": value_bytes * stored if value_bytes < MASTER_BYTES else 0,
        "gradients": MASTER_BYTES * stored,
        "moments": 2 * MASTER_BYTES * stored,
        "activations": tokens * kept * value_bytes,
        "logits": tokens * 2 * config.n_predict * config.vocab_size * value_bytes,
    }


# %% book/09-training-on-a-gpu.md:407
class Device(NamedTuple):
    """A processor as its datasheet has it: peaks that a program approaches and never reaches."""

    flops_per_s: float   # dense matrix products in the format of value_bytes, summed in float32
    bytes_per_s: float   # between the processor and its memory
    memory_bytes: float
    value_bytes: int     # 2: bfloat16 on tensor cores, 4: float32


# Sources beside the figures; where a datasheet's footnote says "with sparsity", half of its figure.
DEVICES = {
    # Two cores, 3 GHz, two 8-wide fused multiply-adds a cycle (AVX2); two channels of DDR4-3200.
    "laptop": Device(2 * 3e9 * 2 * 8 * 2, 2 * 8 * 3.2e9, 16e9, 4),
    # NVIDIA L4 Tensor Core GPU datasheet: 242 TFLOPS with sparsity, 300 GB/s, 24 GB.
    "l4": Device(121e12, 300e9, 24e9, 2),
    # NVIDIA Ada GPU Architecture whitepaper, table of the GeForce RTX 4090: 165.2 dense, 1008 GB/s.
    "rtx-4090": Device(165.2e12, 1008e9, 24e9, 2),
    # NVIDIA A100 Tensor Core GPU datasheet, 80GB SXM: 312 TFLOPS dense, 2039 GB/s.
    "a100": Device(312e12, 2039e9, 80e9, 2),
    # NVIDIA H100 Tensor Core GPU datasheet, SXM: 1979 TFLOPS with sparsity, 3.35 TB/s, 80 GB.
    "h100": Device(989.5e12, 3.35e12, 80e9, 2),
    # NVIDIA H200 Tensor Core GPU datasheet, SXM: 1979 TFLOPS with sparsity, 4.8 TB/s, 141 GB.
    "h200": Device(989.5e12, 4.8e12, 141e9, 2),
}


def floor_seconds(operation, device):
    """The least time (s) the datasheet allows for an operation. Equation eq-plan-roofline."""
    return max(operation.flops / device.flops_per_s, operation.bytes / device.bytes_per_s)


# %% book/09-training-on-a-gpu.md:494
# Training tokens per parameter: near the optimum found by Hoffmann and others (2022, table 3).
TOKENS_PER_PARAMETER = 20
# Assumed until an engine is measured: Llama 3 405B reached 38 to 43 % (Llama Team, 2024, table 4).
UTILISATION = 0.4


class Estimate(NamedTuple):
    """What training a configuration on a device takes, by `estimate`."""

    memory_bytes: float
    fits: bool
    floor_s: float        # the least time of a step: every operation at its roofline, none fused
    step_s: float         # predicted, at the given utilisation
    tokens_per_s: float
    hours: float          # for all the tokens


def estimate(config, device, batch_size=16, tokens=None, utilisation=UTILISATION):
    """Predict training on DEVICES[device]: an `Estimate`.

    `tokens` defaults to 20 per parameter. `utilisation` is the share of the peak that the matrix
    products are expected to reach; a step is never predicted to be faster than its floor.
    """
    if device not in DEVICES:
        raise UserError(f"unknown device {device!r}: choose one of {', '.join(DEVICES)}")
    if not 0 < utilisation <= 1:
        raise UserError(f"expected a utilisation above 0 and at most 1, got {utilisation}")
    if batch_size < 1 or (tokens is not None and tokens < 1):
        raise UserError(f"expected at least 1 sequence and 1 token, got {batch_size} and {tokens}")
    tokens = TOKENS_PER_PARAMETER * count_parameters(config) if tokens is None else tokens
    d, step_tokens = DEVICES[device], batch_size * config.context
    needed = sum(memory(config, batch_size, d.value_bytes).values())
    floor_s = sum(floor_seconds(op, d) for op in operations(config, batch_size, d.value_bytes))
    products_s = step_tokens * flops_per_token(config) / d.flops_per_s
    step_s = max(floor_s, products_s / utilisation)
    speed = step_tokens / step_s
    return Estimate(needed, needed <= d.memory_bytes, floor_s, step_s, speed, tokens / speed / 3600)


# %% book/09-training-on-a-gpu.md:537
def report(config, batch_size=16, tokens=None, utilisation=UTILISATION):
    """The plan of a configuration as text: FLOPs, memory, and a line for each device."""
    rows = [(name, estimate(config, name, batch_size, tokens, utilisation)) for name in DEVICES]
    n, step_tokens = count_parameters(config), batch_size * config.context
    tokens = TOKENS_PER_PARAMETER * n if tokens is None else tokens
    per_token = flops_per_token(config)
    lines = [
        f"parameters      {n:,}",
        f"a step          {batch_size} x {config.context} tokens, "
        f"{step_tokens * per_token / 1e12:,.3f} TFLOP ({per_token / 1e6:,.1f} MFLOP a token)",
        f"training        {tokens:,} tokens, {tokens * per_token:.2e} FLOPs",
        "",
        f"{'memory of a step, GB':30} {'bfloat16':>10} {'float32':>10}",
    ]
    sizes = [memory(config, batch_size, value_bytes) for value_bytes in (2, 4)]
    for name in sizes[0]:
        lines.append(f"  {name:24} {sizes[0][name] / 1e9:14.3f} {sizes[1][name] / 1e9:10.3f}")
    title = f"at {utilisation:.0%} ms"
    lines += ["", f"device      fits   floor ms {title:>12}    tokens/s        in all"]
    for name, e in rows:
        fits = "yes" if e.fits else "no"
        lines.append(f"{name:10} {fits:>5} {e.floor_s * 1e3:10,.2f} {e.step_s * 1e3:12,.2f} "
                     f"{e.tokens_per_s:11,.0f} {_duration(3600 * e.hours):>13}")
    return "\n".join(lines)


def _duration(seconds):
    """A time in the largest unit of which there is one: "3.7 hours"."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"


__all__ = [
    "stages",
    "linear_shapes",
    "flops_per_token",
    "ELEMENTWISE",
    "ADAMW",
    "MASTER_BYTES",
    "Operation",
    "operations",
    "memory",
    "Device",
    "DEVICES",
    "floor_seconds",
    "TOKENS_PER_PARAMETER",
    "UTILISATION",
    "Estimate",
    "estimate",
    "report",
]
