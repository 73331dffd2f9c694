# Made from book/11c-loss-and-update.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-update-adamw
"""AdamW over flat buffers: float32 masters and moments, and a bf16 copy for the products.

The buffers lie in segments, as `model.weights` lays them; a table of tiles, made on the host, says
what to do with which. All that changes from step to step stands in device memory: see `decide`.
Left out: gradients of other types than float32, and masters in bf16.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.engines.gpu.lang.vectors import expect
from nanoeuler.errors import UserError
from nanoeuler.model.weights import Weights

THREADS = 256  # of a block: 128 to 1024 are alike (the table of attempts)
LANE = 4     # parameters that a thread moves at once: 16 bytes of float32
ROUNDS = 1   # how often: measured, the table of attempts


class Rates(NamedTuple):
    """What one step does with every parameter: equations eq-train-moments to eq-train-adamw."""

    lr: float
    m_scale: float  # 1 / (1 - beta1^number)
    v_scale: float
    decay: float
    clip: float     # what the gradient is multiplied by
    beta1: float
    rest1: float    # 1 - beta1, rounded once
    beta2: float
    rest2: float
    eps: float


def change(rates, w, g, m, v):
    """One parameter's new w, m, v. About 16 operations and two of the special function unit."""
    g = float32(g * rates.clip)
    m = float32(rates.beta1 * m + rates.rest1 * g)                           # (1)
    v = float32(rates.beta2 * v + rates.rest2 * (g * g))                     # (2)
    root = float32(ptx.square_root(float32(v * rates.v_scale)) + rates.eps)
    s = float32(float32(m * rates.m_scale) * ptx.reciprocal(root))               # (3)
    return float32(w - rates.lr * (s + rates.decay * w)), m, v               # (4)


def fetch(here, address, first, count, t, rounds):
    """A thread's parameters of a tile into registers, LANE at a time, THREADS threads apart."""
    for i in range(rounds):
        at = int32((i * THREADS + t) * LANE)
        if at < count:
            a, b, c, d = ptx.load_own_float4(address + 4 * int64(first + at))
            here[4 * i], here[4 * i + 1], here[4 * i + 2], here[4 * i + 3] = a, b, c, d


def put(here, i, address, at):
    """LANE parameters back to memory."""
    a, b, c, d = here[4 * i], here[4 * i + 1], here[4 * i + 2], here[4 * i + 3]
    ptx.store_float4(address + 4 * int64(at), a, b, c, d)


def put_copy(here, i, address, at):
    """LANE parameters to memory as bf16."""
    low = ptx.pack_bf16(here[4 * i], here[4 * i + 1])
    high = ptx.pack_bf16(here[4 * i + 2], here[4 * i + 3])
    ptx.store_int2(address + 2 * int64(at), low, high)


@cache
def adamw_kernel(rounds: int = ROUNDS) -> Kernel:
    """The kernel whose tiles have up to THREADS * LANE * rounds parameters; a block does one.

    tiles int32 (blocks, 4): first, count, to, decays; decision: see `decide`; buffers float32,
    copy bf16. Index table: block -> tile; round, thread -> LANE neighbours. Where decision says
    no, nothing is written. Bytes of a parameter: 16 read, 12 written, 2 more where it has a copy.
    """
    held = rounds * LANE

    def adamw(tiles, decision, weights, gradients, m, v, copy, beta1, rest1, beta2, rest2, eps):
        t = int32(cuda.threadIdx.x)
        lr, m_scale, v_scale, decay = ptx.load_float4(decision)
        clip, norm, go, spare = ptx.load_float4(decision + 16)
        first, count, to, decays = ptx.load_int4(tiles + 16 * int64(cuda.blockIdx.x))
        if go == float32(0):
            return
        if decays == 0:
            decay = float32(0)
        rates = Rates(lr, m_scale, v_scale, decay, clip, beta1, rest1, beta2, rest2, eps)
        w_here, g_here = cuda.local.array(held, float32), cuda.local.array(held, float32)
        m_here, v_here = cuda.local.array(held, float32), cuda.local.array(held, float32)
        fetch(w_here, weights, first, count, t, rounds)
        fetch(g_here, gradients, first, count, t, rounds)
        fetch(m_here, m, first, count, t, rounds)
        fetch(v_here, v, first, count, t, rounds)
        for i in range(rounds):
            at = int32((i * THREADS + t) * LANE)
            if at < count:
                for j in range(LANE * i, LANE * i + LANE):
                    w_here[j], m_here[j], v_here[j] = change(
                        rates, w_here[j], g_here[j], m_here[j], v_here[j]
                    )
                put(w_here, i, weights, first + at)
                put(m_here, i, m, first + at)
                put(v_here, i, v, first + at)
                if to >= 0:
                    put_copy(w_here, i, copy, to + at)

    return Kernel(adamw, "l l l l l l l f f f f f", THREADS, target=(8, 0))


class Segment(NamedTuple):
    """Neighbours in the flat buffers that are treated alike.

    copy: where the first one's bf16 copy stands in the buffer of copies, -1: they have none.
    """

    start: int
    length: int
    decay: bool
    copy: int = -1


def segments(weights: Weights) -> list[Segment]:
    """The segments of a model's weights, each with its padding, in the order of their names.

    Matrices decay. All but what belongs to a norm has a copy, at the place that it has itself.
    """
    made = []
    for name, view in weights.items():
        start, count = weights.starts[name], math.prod(view.shape)
        length = -(-count // LANE) * LANE  # what is padding stays 0: its gradient is
        made.append(Segment(start, length, len(view.shape) > 1, -1 if "norm" in name else start))
    return made


def tiles(parts: Sequence[Segment], rounds: int = ROUNDS) -> np.ndarray:
    """The table of tiles for a kernel of so many rounds, int32 (blocks, 4)."""
    size, made = THREADS * LANE * rounds, []
    for part in parts:
        if part.start % LANE or part.length % LANE or (part.copy >= 0 and part.copy % LANE):
            raise UserError(f"a segment begins at a multiple of {LANE} and is one long: {part}")
        if max(part.start, part.copy) + part.length >= 1 << 31:
            raise UserError(f"a flat buffer has less than 2^31 parameters: {part}")
        for at in range(0, part.length, size):
            to = part.copy + at if part.copy >= 0 else -1
            made.append((part.start + at, min(size, part.length - at), to, int(part.decay)))
    return np.array(made, np.int32).reshape(-1, 4)


class Buffers(NamedTuple):
    """What AdamW works on: flat, float32 (N,), and a bf16 copy as long as the table's places."""

    weights: Any
    gradients: Any
    m: Any
    v: Any
    copy: Any


def adamw_launch(
    table: Any, decision: Any, buffers: Buffers, beta1: float, beta2: float, eps: float,
    rounds: int = ROUNDS,
) -> Launch:  # fmt: skip
    """One step of the buffers but the gradients; a decision (8,) float32 says how, or not.

    table: of `tiles`, in device memory.
    """
    *floats, copy = buffers
    for name, array in zip(Buffers._fields, floats, strict=False):
        expect(name, array, tuple(buffers.weights.shape), "float32")
    expect("copy", copy, tuple(copy.shape), "bf16")
    expect("table", table, (table.shape[0], 4), "int32")
    expect("decision", decision, (8,), "float32")
    constants = beta1, 1 - beta1, beta2, 1 - beta2, eps
    args = table, decision, *buffers, *map(float, constants)
    return Launch(adamw_kernel(rounds), (table.shape[0],), args)
