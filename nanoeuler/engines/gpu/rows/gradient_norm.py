# Made from book/11c-loss-and-update.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-update-norm
"""The norm of all gradients, and what a step decides from it; two launches, in fixed order.

Left out: a norm beyond 1.8e19, whose square is no float32: it counts as not finite.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.engines.gpu.lang.vectors import expect
from nanoeuler.engines.gpu.rows.block_reduce import block_sum
from nanoeuler.errors import UserError

THREADS = 256  # of a block
UNROLL = 4  # loads of 16 bytes that a thread has on the way
HELD = 4 * UNROLL  # float32 that a thread has on the way
BLOCKS = 8 * 132  # at most, whatever the card: the order of a sum is part of its result
LARGEST = 3.4028234663852886e38  # of float32: what is not <= this is not finite


def add_squares(values, sums, vectors):
    """sums (blocks,): each block's sum of the squares of values (4 vectors,), all float32.

    Index table: block b, thread t -> vector b * THREADS + t, and each blocks * THREADS further,
    UNROLL loads at a time. Bytes: 16 a vector read, 4 a block written.
    """
    t, step = int32(cuda.threadIdx.x), int32(cuda.gridDim.x) * THREADS
    sum0, sum1 = float32(0), float32(0)
    sum2, sum3 = float32(0), float32(0)
    for first in range(int32(cuda.blockIdx.x) * THREADS + t, vectors, UNROLL * step):
        x = cuda.local.array(HELD, float32)
        for i in range(UNROLL):
            a, b, c, d = float32(0), float32(0), float32(0), float32(0)
            if first + i * step < vectors:
                a, b, c, d = ptx.load_float4(values + 16 * int64(first + i * step))
            x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3] = a, b, c, d
        for i in range(0, HELD, 4):
            sum0 = float32(sum0 + x[i] * x[i])
            sum1 = float32(sum1 + x[i + 1] * x[i + 1])
            sum2 = float32(sum2 + x[i + 2] * x[i + 2])
            sum3 = float32(sum3 + x[i + 3] * x[i + 3])
    total = block_sum(float32((sum0 + sum1) + (sum2 + sum3)), THREADS // 32)
    if t == 0:
        ptx.store_float(sums + 4 * int64(cuda.blockIdx.x), total)


# Grid: the blocks of `blocks_for`.
ADD_SQUARES = Kernel(add_squares, "l l r", THREADS, target=(8, 0))


def finite(x):
    """Whether x is a number and none of the infinities."""
    return x <= float32(LARGEST) and x >= float32(-LARGEST)


class Rows(NamedTuple):
    """An array of float32: its address, and its rows."""

    address: int
    count: int


def decide(sums: Rows, losses: Rows, plan: Rows, number: int, limit: float, decision: int) -> None:
    """One block: advance the step's number and write what `adamw` does, 8 float32.

    sums (count,) of `add_squares`; losses (heads,); plan (steps, 4) of `schedule`; number (1,)
    int32, of rows of the plan that were used. decision: the next row (the last, if none is left),
    then clip = limit / norm if that is below 1, else 1; the norm; 1 if norm and losses are finite,
    else 0; and a 0.
    """
    t, total = int32(cuda.threadIdx.x), float32(0)
    for i in range(t, sums.count, THREADS):
        total = float32(total + ptx.load_float(sums.address + 4 * int64(i)))
    norm = ptx.square_root(block_sum(total, THREADS // 32))
    if t == 0:
        go, clip = float32(1), float32(1)
        if not finite(norm):
            go = float32(0)
        for k in range(losses.count):
            if not finite(ptx.load_float(losses.address + 4 * int64(k))):
                go = float32(0)
        if norm > limit:
            clip = float32(limit * ptx.reciprocal(norm))
        step = ptx.load_own_int(number)
        ptx.store_int(number, int32(step + 1))
        row = plan.address + 16 * int64(min(step, plan.count - 1))
        lr, m_scale, v_scale, decay = ptx.load_float4(row)
        ptx.store_float4(decision, lr, m_scale, v_scale, decay)
        ptx.store_float4(decision + 16, clip, norm, go, float32(0))


# Grid: one block.
DECIDE = Kernel(decide, "l r l r l r l f l", THREADS, target=(8, 0))


def schedule(
    rates: Sequence[float], beta1: float, beta2: float, decay: float, first: int = 1
) -> np.ndarray:
    """What each step takes, float32 (steps, 4): learning rate, both bias corrections, decay.

    rates: the learning rates of steps `first`, ... Worked out in float64 and rounded once.
    """
    number = np.arange(first, first + len(rates))
    parts = rates, 1 / (1 - beta1**number), 1 / (1 - beta2**number), np.full(len(rates), decay)
    return np.stack(parts, axis=1).astype(np.float32)


def blocks_for(count: int) -> int:
    """How many blocks add the squares of `count` gradients, and how many sums they leave."""
    return min(BLOCKS, -(-count // (4 * THREADS * UNROLL)))


def norm_launches(
    gradients: Any, sums: Any, losses: Any, plan: Any, number: Any, limit: float, decision: Any
) -> tuple[Launch, Launch]:
    """From gradients, float32 (N,), and losses (K,), to a decision (8,); to be run in this order.

    sums (blocks_for(N),) float32: working memory. plan: of `schedule`. number int32 (1,), of
    steps begun.
    """
    count = gradients.shape[0]
    if count % 4:
        raise UserError(f"gradients are a multiple of 4 in a row, padded with zeros, not {count}")
    blocks, heads, steps = blocks_for(count), losses.shape[0], plan.shape[0]
    expect("gradients", gradients, (count,), "float32")
    expect("sums", sums, (blocks,), "float32")
    expect("losses", losses, (heads,), "float32")
    expect("plan", plan, (steps, 4), "float32")
    expect("number", number, (1,), "int32")
    expect("decision", decision, (8,), "float32")
    adding = Launch(ADD_SQUARES, (blocks,), (gradients, sums, count // 4))
    args = sums, blocks, losses, heads, plan, steps, number, float(limit), decision
    return adding, Launch(DECIDE, (1,), args)
