# Made from book/l-attention-on-every-card.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-layout
"""The layout that all attention kernels on tensor cores share: arrays, saved rows, masked scores.

All bf16 (as uint16) or all float32, of any strides that are multiples of 16 bytes, the last axis
dense:

    q, o, do, dq (B, H, T, D)    k, v, dk, dv (B, G, T, D)    H a multiple of G

so that heads (B, T, H+2G, D) as the model keeps them fit too, as transposed views. lse and delta
are float32 (B, H, padded(T)) in C order. Left out: kernels, and which widths D they have.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.card import L2
from nanoeuler.engines.gpu.lang.instruction import float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Launch, cover
from nanoeuler.errors import UserError

PAD = 128          # rows of lse and delta come in multiples of this, the most that a block fetches
FORBIDDEN = -1e30  # the score of a key that its query may not see
LOWEST = -1e20     # the running maximum before any score
PAST_END = 1e30    # lse of rows past T: makes their probabilities 0 in the backward
# What all heads that are worked on at a time stream should stay in the L2 cache: the part of it
# that they may take. An early forward kernel took 2 to 6 % less at T = 4096 (the log book).
FORWARD_PART, BACKWARD_PART = 0.64, 0.32
FORWARD_SHARE, BACKWARD_SHARE = int(FORWARD_PART * L2), int(BACKWARD_PART * L2)  # bytes


def round_up(n: int, size: int) -> int:
    """n rounded up to a multiple of `size`, a power of two."""
    return int32((n + size - 1) & -size)


def clear(values: Any, n: int) -> None:
    """Zero the first n of some float registers."""
    for i in range(n):
        values[i] = float32(0)


def quad_sum(x: float) -> float:
    """The sum of x over the four lanes that share a row of an accumulator."""
    x += ptx.shuffle_xor(x, int32(1))
    return x + ptx.shuffle_xor(x, int32(2))


def quad_maxima(x: float, y: float) -> tuple[float, float]:
    """The largest x, and the largest y, of the four lanes that share a row of an accumulator."""
    x, y = ptx.larger(x, ptx.shuffle_xor(x, int32(1))), ptx.larger(y, ptx.shuffle_xor(y, int32(1)))
    return ptx.larger(x, ptx.shuffle_xor(x, int32(2))), ptx.larger(y, ptx.shuffle_xor(y, int32(2)))


def pair_dot(x: int, y: int, total: float) -> float:
    """total + the products of two pairs of bf16."""
    return total + ptx.low_bf16(x) * ptx.low_bf16(y) + ptx.high_bf16(x) * ptx.high_bf16(y)


def quarter_dot(x: int, y: int, D: int) -> float:
    """The dot product of D / 4 bf16 at each of two addresses: what a lane has of a row."""
    total = float32(0)
    for i in range(D // 32):
        x0, x1, x2, x3 = ptx.load_int4(x + 16 * i)
        y0, y1, y2, y3 = ptx.load_int4(y + 16 * i)
        total = pair_dot(x1, y1, pair_dot(x0, y0, total))
        total = pair_dot(x3, y3, pair_dot(x2, y2, total))
    return total


def padded(T: int) -> int:
    """How many values lse and delta hold for each head."""
    return cover(T, PAD) * PAD


def scales(D: int) -> tuple[float, float]:
    """log2(e) / sqrt(D), so that exp2 of scaled scores is exp; 1 / sqrt(D)."""
    return math.log2(math.e) / math.sqrt(D), 1 / math.sqrt(D)


def grid_of(heads: int, tiles: int, size: int, share: int) -> tuple[int, int, int]:
    """The grid: heads at a time, tiles of each, rounds; a head streams `size` bytes of `share`."""
    fit = [n for n in range(1, heads + 1) if heads % n == 0 and n * size <= share]
    together = max(fit, default=1)
    return together, tiles, heads // together


def in_cache(q: Any, k: Any, launches: Iterable[Launch], share: float) -> list[Launch]:
    """Launches of `mma_launch` as they are on a card where heads may stream `share` bytes at a time
    (`grid_of`), of q (B, H, T, D) and k (B, G, T, D). No bit of a result is another."""
    (B, H, T, D), size, made = q.shape, q.dtype.itemsize, []
    for launch in launches:
        together, tiles, rounds = launch.grid
        heads = together * rounds  # B H or, where keys are a block's own, B G
        streamed = 2 * size * T * D * (B * H // heads)
        made.append(replace(launch, grid=grid_of(heads, tiles, streamed, int(share))))
    return made


class Head(NamedTuple):
    """One head of an array in memory: the address of its row 0, and bytes from row to row."""

    start: int
    step: int


class Limit(NamedTuple):
    """The limits of rows besides the diagonal. on: whether there are any, a constant of the
    kernel's form; if there are none, nobody reads the other two.

    line: the address of an int32 for each of T rows of each sequence, in ascending order: for
    queries the first key that each sees, for keys the last query that sees each.
    """

    on: bool
    line: int
    T: int


class Sizes(NamedTuple):
    """Numbers of a launch: positions, query heads, how many share a key head; log2(e) / sqrt(D) and
    1 / sqrt(D); what limits rows besides the diagonal.
    """

    T: int
    heads: int
    sharing: int
    scale: float
    root: float
    limit: Limit


def limit_of(limit: Limit, batch: int, row: int) -> int:
    """The limit of a row; rows past the end have the last one's."""
    return ptx.load_int(limit.line + 4 * (int64(batch) * limit.T + min(row, int32(limit.T - 1))))


def forbid_right(s: Any, columns: int, above: int, below: int) -> None:
    """Forbid a thread's columns beyond `above` in its upper row, beyond `below` in its lower one,
    both counted from its own first column of an accumulator.
    """
    for n in range(columns // 8):
        if 8 * n > above:
            s[4 * n] = float32(FORBIDDEN)
        if 8 * n + 1 > above:
            s[4 * n + 1] = float32(FORBIDDEN)
        if 8 * n > below:
            s[4 * n + 2] = float32(FORBIDDEN)
        if 8 * n + 1 > below:
            s[4 * n + 3] = float32(FORBIDDEN)


def forbid_left(s: Any, columns: int, above: int, below: int) -> None:
    """The same for columns before `above`, and before `below`."""
    for n in range(columns // 8):
        if 8 * n < above:
            s[4 * n] = float32(FORBIDDEN)
        if 8 * n + 1 < above:
            s[4 * n + 1] = float32(FORBIDDEN)
        if 8 * n < below:
            s[4 * n + 2] = float32(FORBIDDEN)
        if 8 * n + 1 < below:
            s[4 * n + 3] = float32(FORBIDDEN)


# %% sec-flash-mma-plan
def expect(name: str, array: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Refuse an array of another shape or dtype, or that begins where 16 bytes do not fit."""
    if tuple(array.shape) != shape or str(array.dtype) != dtype:
        came = f"{array.dtype} {tuple(array.shape)}"
        raise UserError(f"attention's {name} is {dtype} {shape}, not {came}")
    if getattr(array, "address", 0) % 16:
        raise UserError(f"attention's {name} begins at a multiple of 16 bytes, not {array.address}")


def shared_shape(
    queries: dict[str, Any], keys: dict[str, Any], widths: tuple[int, ...], dtype: str = "uint16"
) -> tuple[int, int, int, int, int]:
    """B, H, G, T, D that all arrays, of this dtype, agree on; D is one of `widths`."""
    first, other = next(iter(queries.values())), next(iter(keys.values()))
    if len(first.shape) != 4 or len(other.shape) != 4:
        raise UserError(f"attention takes (batch, heads, T, D), not {first.shape}, {other.shape}")
    (B, H, T, D), G = first.shape, other.shape[1]
    if D not in widths:
        *rest, last = map(str, widths)
        allowed = f"{', '.join(rest)} or {last}"
        raise UserError(f"attention on tensor cores has head width {allowed}, not {D}")
    if B < 1 or T < 1:
        raise UserError(f"attention takes one token at least, not {B} times {T}")
    if G < 1 or H < 1 or H % G:
        raise UserError(f"{H} query heads do not share {G} key heads evenly")
    for name, array in queries.items():
        expect(name, array, (B, H, T, D), dtype)
    for name, array in keys.items():
        expect(name, array, (B, G, T, D), dtype)
    return B, H, G, T, D


def expect_lines(B: int, H: int, T: int, **lines: Any) -> None:
    """Refuse lse and delta that are not float32 (B, H, padded(T)) in C order."""
    for name, array in lines.items():
        expect(name, array, (B, H, padded(T)), "float32")
        if tuple(array.strides) != (4 * H * padded(T), 4 * padded(T), 4):
            raise UserError(f"attention's {name} is in C order, not of strides {array.strides}")


class Backward(NamedTuple):
    """Arrays of the backward pass: inputs (do, q, k, v, o, lse), scratch (delta), then outputs."""

    do: Any
    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    delta: Any
    dq: Any
    dk: Any
    dv: Any


def backward_shape(
    a: Backward, widths: tuple[int, ...], dtype: str = "uint16"
) -> tuple[int, int, int, int, int]:
    """B, H, G, T, D that all arrays agree on; UserError where they don't."""
    queries = {"q": a.q, "o": a.o, "do": a.do, "dq": a.dq}
    B, H, G, T, D = shared_shape(
        queries, {"k": a.k, "v": a.v, "dk": a.dk, "dv": a.dv}, widths, dtype
    )
    expect_lines(B, H, T, lse=a.lse, delta=a.delta)
    return B, H, G, T, D
