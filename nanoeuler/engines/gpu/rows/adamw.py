# Made from book/11c-loss-and-update.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-update-adamw
"""AdamW over flat buffers: float32 masters and moments, and a bf16 copy for the products.

Masters are float32, or in two halves, of which the copy is one: see `to_halves`. The buffers lie in
segments, as `model.weights` lays them; a table of tiles, made on the host, says what to do with
which. All that changes from step to step stands in device memory: see `decide`. Left out:
gradients of other types than float32.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.engines.gpu.lang.vectors import expect, given, kind_of
from nanoeuler.errors import UserError
from nanoeuler.model.weights import Weights

THREADS = 256  # of a block: 128 to 512 are nearly alike (the log book's table)
LANE = 4     # parameters that a thread moves at once: 16 bytes of float32
ROUNDS = 1   # how often: measured, the log book's table
HALF, UPPER, NAN = 0x8000, -0x10000, 0x7FC00000  # half of 2^16; the upper 16 bits; a nan's bits


class Constants(NamedTuple):
    """What is the same in every step: equations eq-train-moments to eq-train-adamw."""

    beta1: float
    rest1: float    # 1 - beta1, rounded once
    beta2: float
    rest2: float
    eps: float


class Rates(NamedTuple):
    """What one step does with every parameter."""

    lr: float
    m_scale: float  # 1 / (1 - beta1^number)
    v_scale: float
    decay: float
    clip: float     # what the gradient is multiplied by
    fixed: Constants


def change(rates, w, g, m, v):
    """One parameter's new w, m, v. About 16 operations and two of the special function unit."""
    g = float32(g * rates.clip)
    m = float32(rates.fixed.beta1 * m + rates.fixed.rest1 * g)               # (1)
    v = float32(rates.fixed.beta2 * v + rates.fixed.rest2 * (g * g))         # (2)
    root = float32(ptx.square_root(float32(v * rates.v_scale)) + rates.fixed.eps)
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
    """LANE parameters to memory as bf16, rounded half up by `pair_copies`, further down."""
    low = pair_copies(bits(here[4 * i]), bits(here[4 * i + 1]))
    high = pair_copies(bits(here[4 * i + 2]), bits(here[4 * i + 3]))
    ptx.store_int2(address + 2 * int64(at), low, high)


# %% sec-update-halves
PART = 1 << 16  # numbers that are split at a time: with their halves 512 KiB, which caches hold


def to_halves(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 -> bf16 copies, rounded half up, and lower halves: uint16. Eq. eq-update-halves."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    copies, lower = (np.empty(words.shape, np.uint16) for _ in range(2))
    flat = words.reshape(-1), copies.reshape(-1), lower.reshape(-1)
    for start in range(0, words.size, PART):
        word, copy, low = (each[start : start + PART] for each in flat)
        word = np.where(np.isnan(word.view(np.float32)), np.uint32(NAN), word)
        low[...] = word.astype(np.uint16)
        word += np.uint32(HALF)
        copy[...] = word >> np.uint32(16)
    return copies, lower


def from_halves(copy: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The float32 that `to_halves` split, bit for bit; any nan becomes NAN."""
    lower = low.view(np.int16).astype(np.int32).view(np.uint32)
    return ((copy.astype(np.uint32) << np.uint32(16)) + lower).view(np.float32)


def fetch_halves(here, copy, low, first, count, t, rounds):
    """As `fetch`, of parameters in two halves."""
    for i in range(rounds):
        at = int32((i * THREADS + t) * LANE)
        if at < count:
            a, b = ptx.load_own_int2(copy + 2 * int64(first + at))
            c, d = ptx.load_own_int2(low + 2 * int64(first + at))
            here[4 * i], here[4 * i + 1] = join_lower(a, c), join_upper(a, c)
            here[4 * i + 2], here[4 * i + 3] = join_lower(b, d), join_upper(b, d)


def join_lower(copies, lows):
    """The parameter whose halves are the lower ones of two words."""
    return ptx.float_of(int32(int32(copies << 16) + (int32(lows << 16) >> 16)))


def join_upper(copies, lows):
    """The same of the upper ones."""
    return ptx.float_of(int32(int32(copies & UPPER) + (lows >> 16)))


def bits(w):
    """The 32 bits of a parameter; of any nan, NAN."""
    return int32(ptx.bits_of(w)) if w == w else int32(NAN)


def pair_copies(a, b):
    """Two words' bf16 copies in one."""
    return int32((int32(a + HALF) >> 16 & 0xFFFF) | (int32(b + HALF) & UPPER))


def pair_lows(a, b):
    """Two words' lower halves in one."""
    return int32((a & 0xFFFF) | int32(b << 16))


def put_halves(here, i, copy, low, at):
    """LANE parameters to memory, in two halves."""
    a, b = bits(here[4 * i]), bits(here[4 * i + 1])
    c, d = bits(here[4 * i + 2]), bits(here[4 * i + 3])
    ptx.store_int2(copy + 2 * int64(at), pair_copies(a, b), pair_copies(c, d))
    ptx.store_int2(low + 2 * int64(at), pair_lows(a, b), pair_lows(c, d))


def make_ends(halves: bool) -> tuple[Callable, Callable]:
    """What fetches a tile's parameters, and what puts LANE of them back to all their places."""

    def bring(here, weights, copy, first, count, t, rounds):
        if halves:  # weights: the lower ones
            fetch_halves(here, copy, weights, first, count, t, rounds)
        else:
            fetch(here, weights, first, count, t, rounds)

    def keep(here, i, buffers, at, to):
        if halves:
            put_halves(here, i, buffers.copy, buffers.weights, at)
        else:
            put(here, i, buffers.weights, at)
        if to >= 0:
            if halves:
                put(here, i, buffers.read, to)
            else:
                put_copy(here, i, buffers.copy, to)

    return bring, keep


@cache
def adamw_kernel(rounds: int = ROUNDS, halves: bool = False) -> Kernel:
    """The kernel whose tiles have up to THREADS * LANE * rounds parameters; a block does one.

    tiles int32 (blocks, 4): first, count, to, decays; decision: see `decide`; others as `Buffers`.
    Index table: block -> tile; round, thread -> LANE neighbours. Where decision says no, nothing is
    written. Bytes of a parameter: 16 read, 12 written, and 2 more where it has a copy. In halves:
    16 read, 12 written, and 4 more where it is written as float32, too.
    """
    held, (bring, keep) = rounds * LANE, make_ends(halves)

    def adamw(tiles, decision, buffers: Buffers, fixed: Constants):
        t = int32(cuda.threadIdx.x)
        lr, m_scale, v_scale, decay = ptx.load_float4(decision)
        clip, norm, go, spare = ptx.load_float4(decision + 16)
        first, count, to, decays = ptx.load_int4(tiles + 16 * int64(cuda.blockIdx.x))
        if go == float32(0):
            return
        if decays == 0:
            decay = float32(0)
        rates = Rates(lr, m_scale, v_scale, decay, clip, fixed)
        w_here, g_here = cuda.local.array(held, float32), cuda.local.array(held, float32)
        m_here, v_here = cuda.local.array(held, float32), cuda.local.array(held, float32)
        bring(w_here, buffers.weights, buffers.copy, first, count, t, rounds)
        fetch(g_here, buffers.gradients, first, count, t, rounds)
        fetch(m_here, buffers.m, first, count, t, rounds)
        fetch(v_here, buffers.v, first, count, t, rounds)
        for i in range(rounds):
            at = int32((i * THREADS + t) * LANE)
            if at < count:
                for j in range(LANE * i, LANE * i + LANE):
                    w_here[j], m_here[j], v_here[j] = change(
                        rates, w_here[j], g_here[j], m_here[j], v_here[j]
                    )
                place = to + at if to >= 0 else to
                keep(w_here, i, buffers, first + at, place)
                put(m_here, i, buffers.m, first + at)
                put(v_here, i, buffers.v, first + at)

    return Kernel(adamw, "l l l l l l l l f f f f f", THREADS, target=(8, 0))


class Segment(NamedTuple):
    """Neighbours in the flat buffers that are treated alike.

    copy: index of the first one's bf16 copy in the buffer of copies, -1 if none. For masters in
    halves: that of its float32 in `read`, -1 if none.
    """

    start: int
    length: int
    decay: bool
    copy: int = -1


def segments(weights: Weights) -> list[Segment]:
    """The segments of a model's weights, each with its padding, in the order of the buffer.

    Matrices decay. Everything except norms has a copy, at the same index.
    """
    made = []
    for name, view in weights.items():
        start, count = weights.starts[name], math.prod(view.shape)
        length = -(-count // LANE) * LANE  # padding stays 0: its gradient is 0
        made.append(Segment(start, length, len(view.shape) > 1, -1 if "norm" in name else start))
    return made


def tiles(parts: Sequence[Segment], rounds: int = ROUNDS) -> np.ndarray:
    """The table of tiles for a kernel of so many rounds, int32 (blocks, 4)."""
    size, made = THREADS * LANE * rounds, [np.empty((0, 4), np.int32)]
    for part in parts:
        if part.start % LANE or part.length % LANE or (part.copy >= 0 and part.copy % LANE):
            raise UserError(f"start, length and copy are multiples of {LANE}: {part}")
        if max(part.start, part.copy) + part.length >= 1 << 31:
            raise UserError(f"a flat buffer has less than 2^31 parameters: {part}")
        at = np.arange(0, part.length, size)
        rows = np.empty((len(at), 4), np.int32)
        rows[:, 0], rows[:, 1] = part.start + at, np.minimum(size, part.length - at)
        rows[:, 2], rows[:, 3] = part.copy + at if part.copy >= 0 else -1, part.decay
        made.append(rows)
    return np.concatenate(made)


class Buffers(NamedTuple):
    """What AdamW works on: flat, float32 (N,), and a bf16 copy that holds the table's places.

    In halves: weights are lower halves, uint16 (N,), copy the upper ones, and read is float32, at
    the table's places: see `Segment`.
    """

    weights: Any
    gradients: Any
    m: Any
    v: Any
    copy: Any
    read: Any = None


def adamw_launch(
    table: Any, decision: Any, buffers: Buffers, beta1: float, beta2: float, eps: float,
    rounds: int = ROUNDS,
) -> Launch:  # fmt: skip
    """Update all buffers but the gradients as a decision (8,) float32 says, or not at all.

    table: of `tiles`, in device memory.
    """
    weights, *floats, copy, read = buffers
    shape, halves = tuple(weights.shape), kind_of(weights) == "bf16"
    expect("weights", weights, shape, "bf16" if halves else "float32")
    for name, array in zip(Buffers._fields[1:], floats, strict=False):
        expect(name, array, shape, "float32")
    expect("copy", copy, shape if halves else tuple(copy.shape), "bf16")
    if read is not None:
        expect("read", read, tuple(read.shape), "float32")
    expect("table", table, (table.shape[0], 4), "int32")
    expect("decision", decision, (8,), "float32")
    constants = beta1, 1 - beta1, beta2, 1 - beta2, eps
    args = table, decision, *buffers[:-1], given(read), *map(float, constants)
    return Launch(adamw_kernel(rounds, halves), (table.shape[0],), args)
