# Made from book/13-training-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-plan-flops
"""What a training step of a configuration counts, on paper: FLOPs, bytes moved, and memory.

Everything follows from the configuration's shapes. Left out: whatever a device does besides,
such as launching kernels, or reading a tile twice.

B batch, T positions, C channels, H query heads, G key/value heads, D head width, V vocabulary,
K predicted tokens, F MLP width, L layers.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from nanoeuler.model.config import ModelConfig, count_parameters, parameter_shapes, require
from nanoeuler.model.integrators import INTEGRATORS
from nanoeuler.model.weights import PADDING

# The values of each switch that are counted here. Of a number, a second value means all others.
SUPPORTS = {
    "norm": ("rms", "layer"), "position": ("rope", "learned"), "bias": (False, True),
    "mlp": ("swiglu", "gelu", "gelu_exact", "relu2"), "qk_norm": (False, True),
    "tied": (False, True), "logit_cap": (0.0, 2.0), "init": ("scaled", "zero"),
    "integrator": ("euler", "heun", "rk4"), "window_pattern": ("S", "SL"),
    "sliding_window": (0, 2), "norm_eps": (1e-5, 0.1), "rope_base": (10000.0, 100.0),
    "rope_scaling": ("none", "linear", "llama3"), "head_width": (0, 16), "qkv_bias": (False, True),
}  # fmt: skip


def stages(config: ModelConfig) -> int:
    """How often a pass evaluates each layer: the stages s of the integrator."""
    return len(INTEGRATORS[config.integrator].b)


def linear_shapes(config: ModelConfig) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, I, O, n) of each matrix of a linear layer, "wqkv" to "output".

    A forward pass multiplies by it n times.
    """
    require(config, SUPPORTS, "the planner")
    for name, shape in parameter_shapes(config).items():
        if name.startswith("block.") and len(shape) == 2:
            yield name.split(".")[-1], *shape, config.repeat * stages(config)
    yield "output", config.dim, config.n_predict * config.vocab_size, 1


def pairs(config: ModelConfig, causal: bool = True) -> float:
    """The pairs of a query and a key that it sees, of one head and one sequence.

    Those of its window, if there is one: equation eq-attention-window-pairs. Where the layers have
    other windows, the mean over them. With `causal` off all T^2, as an engine counts that masks
    after computing.
    """
    T, L = config.context, config.n_layers
    windows = [min(config.in_layer(i).sliding_window or T, T) for i in range(L)]
    return sum(W * (2 * T - W + 1) / 2 for W in windows) / L if causal else T * T


def flops_per_token(config: ModelConfig, causal: bool = True) -> float:
    """FLOPs of the matrix products of one training step, per token. Equation eq-plan-flops.

    `causal` as for `pairs`.
    """
    linear = 6 * sum(n * rows * columns for _, rows, columns, n in linear_shapes(config))
    seen, layers = pairs(config, causal) / config.context, stages(config) * config.n_layers
    return linear + 12 * layers * config.n_heads * config.head_dim * seen


# %% sec-plan-bytes
# FLOPs and values moved per element, forward and backward together, counting each + - * / exp tanh
# and comparison of the operation's equations as one FLOP, and each array read or written once.
ELEMENTWISE = {
    "embed": (1, 5),           # read, write; backward: read, and read and write the table's row
    "positions": (2, 0),       # a sum each way; nothing moves but their own values, once a step
    "rmsnorm": (13, 5),        # 4 forward, 9 backward; x, y; dy, x, dx
    "layernorm": (18, 5),      # 6 forward, 12 backward; as rmsnorm
    "rope": (6, 4),            # 2 products and a sum, twice; in and out, twice
    "add": (2, 3),             # each use: a product (even by one) and a sum; two in, one out
    "scale": (1, 2),           # each use: a product; in and out
    "swiglu": (19, 8),         # 6 forward, 13 backward; gate, up, h; dh, gate, up, dgate, dup
    "gelu": (27, 5),           # 9 forward, 18 backward; u, h; dh, u, du
    "gelu_exact": (16, 5),     # 5 forward, 11 backward, with erf as one; as gelu
    "relu2": (5, 5),           # 2 forward (max, square), 3 backward; as gelu
    "qk_norm": (13, 5),        # as rmsnorm
    "bias": (2, 0),            # a sum each way, as positions
    "logit_cap": (6, 0),       # /, tanh, * forward; square, -, * backward; in cross_entropy
    "cross_entropy": (6, 2),   # max, -, exp, sum, /, scale; logits in, gradient out
}
# AdamW per parameter: its two moments 7 FLOPs, their corrections 2, the step 6 (chapter 7); it
# reads weight, gradient and moments and writes weight and moments, 7 float32 values.
ADAMW = (15, 7)
# Weights, gradients and moments are float32 even where activations are not: small updates would
# vanish in bfloat16, which keeps 8 significant bits. (`operations` counts dW, which a product or
# the embedding writes, like activations, so of a step of euler-116m 1 % of the bytes is missing.)
MASTER_BYTES = 4


class Operation(NamedTuple):
    """One kind of operation, all its uses in a training step together, forward and backward."""

    name: str
    flops: float
    bytes: float


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
        "gelu_exact": layers * config.hidden * (config.mlp == "gelu_exact"),
        "relu2": layers * config.hidden * (config.mlp == "relu2"),
        "qk_norm": layers * turned * config.head_dim * config.qk_norm,
        "bias": config.repeat * stages(config) * sum(biases.values()) + last,
        "logit_cap": config.n_predict * config.vocab_size * (config.logit_cap > 0),
        "cross_entropy": config.n_predict * config.vocab_size,
    }


def operations(
    config: ModelConfig, batch_size: int, value_bytes: int, causal: bool = True
) -> list[Operation]:
    """The operations of one training step on `batch_size` sequences.

    `value_bytes` is the size of an activation, of a weight as read by a product, and of its dW: 2
    for bfloat16 (a lower bound, as dW is float32), 4 for float32.
    """
    H, G, D, T = config.n_heads, config.n_kv_heads, config.head_dim, config.context
    tokens, layers, sums = batch_size * T, stages(config) * config.n_layers, {}
    for name, rows, columns, n in linear_shapes(config):
        flops, values = sums.get(name, (0, 0))
        values += n * 3 * (tokens * (rows + columns) + rows * columns)
        sums[name] = flops + n * 6 * tokens * rows * columns, values
    moved = 3 * (H + 2 * G) * D + 3 * H * D  # heads read twice, dheads written; y, y again, dy
    flops = 12 * layers * batch_size * H * D * pairs(config, causal)
    sums["attention"] = flops, layers * tokens * moved
    once = {"bias": 2, "positions": 2 * T}  # read, and the gradient written, for the whole batch
    for name, width in _widths(config).items():
        if width:
            flops, values = ELEMENTWISE[name]
            sums[name] = flops * tokens * width, (values * tokens + once.get(name, 0)) * width
    rows = [Operation(name, flops, values * value_bytes) for name, (flops, values) in sums.items()]
    n = count_parameters(config)
    copy = value_bytes if value_bytes < MASTER_BYTES else 0  # the products' own copy of the weights
    return [*rows, Operation("adamw", ADAMW[0] * n, (ADAMW[1] * MASTER_BYTES + copy) * n)]


# %% sec-plan-memory
def memory(
    config: ModelConfig, batch_size: int, value_bytes: int, flash: bool = True
) -> dict[str, int]:
    """Bytes that a training step needs at once, by name; `operations` explains `value_bytes`.

    `flash` off keeps all attention probabilities, as the reference engine does. Buffers that live
    inside one operation, or one layer's backward, are not counted.
    """
    require(config, SUPPORTS, "the planner")
    C, F, H, G, D = config.dim, config.hidden, config.n_heads, config.n_kv_heads, config.head_dim
    shapes, tokens = parameter_shapes(config).values(), batch_size * config.context
    stored = sum(-(-prod(shape) // PADDING) * PADDING for shape in shapes)
    stats, u = 1 if config.norm == "rms" else 2, 2 * F if config.mlp == "swiglu" else F
    probabilities = H * (1 if flash else config.context)
    normed = (H + 2 * G) * D + H + G if config.qk_norm else 0  # the heads before, and their norms
    kept = 4 * C + 2 * stats + (H + 2 * G) * D + H * D + u + F + probabilities + normed
    kept = stages(config) * config.n_layers * kept + 2 * C + stats
    return {
        "weights": MASTER_BYTES * stored,
        "copy of the weights": value_bytes * stored if value_bytes < MASTER_BYTES else 0,
        "gradients": MASTER_BYTES * stored,
        "moments": 2 * MASTER_BYTES * stored,
        "activations": tokens * kept * value_bytes,
        "logits": tokens * 2 * config.n_predict * config.vocab_size * value_bytes,
    }
