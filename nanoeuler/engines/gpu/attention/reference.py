# Made from book/12-flash-attention.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-forward
"""Causal grouped-query attention as three kernels that never hold the T x T matrix, in float32.

For every GPU from capability 8.0 on, and for the emulator. A block owns 32 positions,
and its threads share only the tiles that they fetch together. tiles.py says the same in NumPy. Left
out: tensor cores, and speed.

B batch, T positions, H query heads, G key/value heads (n_kv), D head width: 32, 64 or 128. All
arrays are float32 in C order:

    heads, dheads (B, T, H+2G, D)    y, dy (B, T, H, D)    lse, delta (B, H, padded(T))
"""

import functools
import math
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.lang.instruction import cuda, float32
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.errors import UserError

ROWS = 32  # positions of a block, one a thread: a warp
FLOATS = 1024  # of a tile that is fetched: FLOATS // D positions, 4 KiB
NEVER = np.float32(-math.inf)  # the score of a key that a query does not see


def padded(T: int) -> int:
    """How many values lse and delta hold for each head: whole blocks."""
    return -(-T // ROWS) * ROWS


def fetch(tile, array, b, first, head, count):
    """tile[j] = array[b, first + j, head] for j < count, neighbours by neighbouring threads.

    Beyond the last position stands that position again.
    """
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    for j in range(count):
        t = min(first + j, array.shape[1] - 1)
        for d in range(0, array.shape[3], threads):
            tile[j, d + thread] = array[b, t, head, d + thread]


def save(tile, array, b, first, head):
    """array[b, first + j, head] = tile[j] for a block's positions, none beyond the last."""
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    for j in range(min(ROWS, array.shape[1] - first)):
        for d in range(0, array.shape[3], threads):
            array[b, first + j, head, d + thread] = tile[j, d + thread]


def dot(a, i, b, j, D):
    """The sum of a[i, d] b[j, d]."""
    total = float32(0)
    for d in range(D):
        total += a[i, d] * b[j, d]
    return total


def clear(sums, width):
    """sums[d] = 0."""
    for d in range(width):
        sums[d] = float32(0)


def add(sums, factor, tile, j, at, width):
    """sums[d] += factor tile[j, at + d]."""
    for d in range(width):
        sums[d] += factor * tile[j, at + d]


def hand_over(tile, row, at, sums, factor, width):
    """tile[row, at + d] = factor sums[d]: a row of what the block is going to save."""
    for d in range(width):
        tile[row, at + d] = factor * sums[d]


@functools.cache
def forward_kernel(D: int) -> Kernel:
    """y and lse, a thread for each query. Equations eq-flash-online, -lse. Grid: tiles, H, B."""
    columns, wide, scale = FLOATS // D, D + 1, np.float32(1 / math.sqrt(D))

    def flash_forward(heads, n_kv, y, lse):
        tile, h, b = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        T, H, thread = heads.shape[1], heads.shape[2] - 2 * n_kv, cuda.threadIdx.x
        g, start = H + h // (H // n_kv), tile * ROWS
        t, end = start + thread, min(start + ROWS, T)
        q_tile = cuda.shared.array((ROWS, wide), float32)
        k_tile = cuda.shared.array((columns, D), float32)
        v_tile = cuda.shared.array((columns, D), float32)
        o = cuda.local.array(D, float32)
        clear(o, D)
        m, total = NEVER, float32(0)
        fetch(q_tile, heads, b, start, h, ROWS)
        for first in range(0, end, columns):
            count = min(columns, end - first)
            fetch(k_tile, heads, b, first, g, count)
            fetch(v_tile, heads, b, first, g + n_kv, count)
            cuda.syncthreads()  # no thread reads a tile before all have filled it
            for j in range(count):
                s = scale * dot(q_tile, thread, k_tile, j, D)
                s = cuda.selp(first + j <= t, s, NEVER)
                larger = cuda.selp(s > m, s, m)
                alpha, p = float32(math.exp(m - larger)), float32(math.exp(s - larger))
                m, total = larger, alpha * total + p
                for d in range(D):
                    o[d] = alpha * o[d] + p * v_tile[j, d]
            cuda.syncthreads()  # no thread fills the next tile while another reads this one
        hand_over(q_tile, thread, 0, o, float32(1) / total, D)
        lse[b, h, t] = m + float32(math.log(total))
        cuda.syncthreads()  # no row is saved before its thread has handed it over
        save(q_tile, y, b, start, h)

    return Kernel(flash_forward, "f[4] r f[4] f[3]", threads=ROWS, target=(8, 0))


def _expect(name: str, array: Any, shape: tuple[int, ...]) -> None:
    dense = tuple(4 * math.prod(shape[i + 1 :]) for i in range(len(shape)))
    came = tuple(array.shape), str(array.dtype), tuple(array.strides)
    if came != (shape, "float32", dense):
        raise UserError(f"attention's {name} is dense float32 {shape}, not {came[1]} {came[0]}")


def _sizes(heads: Any, n_kv: int) -> tuple[int, int, int, int]:
    """B, T, H, D."""
    if len(heads.shape) != 4 or min(heads.shape) < 1:
        raise UserError(f"heads are (batch, T, heads, width), not {tuple(heads.shape)}")
    B, T, N, D = heads.shape
    H = N - 2 * n_kv
    if n_kv < 1 or H < 1 or H % n_kv:
        raise UserError(f"{H} query heads do not share {n_kv} key heads evenly")
    if D not in (32, 64, 128):
        raise UserError(f"attention in float32 has head width 32, 64 or 128, not {D}")
    _expect("heads", heads, (B, T, N, D))
    return B, T, H, D


def forward_launch(heads: Any, n_kv: int, y: Any, lse: Any) -> Launch:
    """y = causal attention of heads; lse = ln of each row's sum of exponentials.

    Every y and lse is written; lse beyond T means nothing.
    """
    B, T, H, D = _sizes(heads, n_kv)
    _expect("y", y, (B, T, H, D))
    _expect("lse", lse, (B, H, padded(T)))
    return Launch(forward_kernel(D), (padded(T) // ROWS, H, B), (heads, n_kv, y, lse))


# %% sec-flash-backward-kernels
@functools.cache
def dq_kernel(D: int) -> Kernel:
    """dheads of queries, and delta; a thread a query. eq-flash-backward. Grid: tiles, H, B."""
    columns, wide, scale = FLOATS // D, D + 1, np.float32(1 / math.sqrt(D))

    def flash_dq(dy, heads, n_kv, y, lse, delta, dheads):
        tile, h, b = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        T, H, thread = heads.shape[1], heads.shape[2] - 2 * n_kv, cuda.threadIdx.x
        g, start = H + h // (H // n_kv), tile * ROWS
        t, end = start + thread, min(start + ROWS, T)
        q_tile = cuda.shared.array((ROWS, wide), float32)
        dy_tile = cuda.shared.array((ROWS, wide), float32)
        k_tile = cuda.shared.array((columns, D), float32)
        v_tile = cuda.shared.array((columns, D), float32)
        dq = cuda.local.array(D, float32)
        clear(dq, D)
        fetch(dy_tile, dy, b, start, h, ROWS)
        fetch(q_tile, y, b, start, h, ROWS)  # in the queries' place, for delta alone
        cuda.syncthreads()  # no thread reads a row before all have filled it
        delta_t, lse_t = dot(dy_tile, thread, q_tile, thread, D), lse[b, h, t]
        delta[b, h, t] = delta_t
        cuda.syncthreads()  # no thread fetches queries while another reads its y
        fetch(q_tile, heads, b, start, h, ROWS)
        for first in range(0, end, columns):
            count = min(columns, end - first)
            fetch(k_tile, heads, b, first, g, count)
            fetch(v_tile, heads, b, first, g + n_kv, count)
            cuda.syncthreads()  # no thread reads a tile before all have filled it
            for j in range(count):
                s = scale * dot(q_tile, thread, k_tile, j, D) - lse_t
                p = float32(math.exp(cuda.selp(first + j <= t, s, NEVER)))
                dp = dot(dy_tile, thread, v_tile, j, D)                     # (2)
                add(dq, p * (dp - delta_t), k_tile, j, 0, D)                # (3), (5)
            cuda.syncthreads()  # no thread fills the next tile while another reads this one
        hand_over(q_tile, thread, 0, dq, scale, D)                          # (4)
        cuda.syncthreads()  # no row is saved before its thread has handed it over
        save(q_tile, dheads, b, start, h)

    return Kernel(flash_dq, "f[4] f[4] r f[4] f[3] f[3] f[4]", threads=ROWS, target=(8, 0))


@functools.cache
def dkv_kernel(D: int) -> Kernel:
    """dheads of keys and values, D // width threads a key; after `dq_kernel`. Grid: tiles, G, B."""
    columns, wide, width, scale = FLOATS // D, D + 1, min(D, 64), np.float32(1 / math.sqrt(D))

    def flash_dkv(dy, heads, n_kv, lse, delta, dheads):
        tile, group, b = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        T, H = heads.shape[1], heads.shape[2] - 2 * n_kv
        sharing, g, start = H // n_kv, H + group, tile * ROWS
        key, at = cuda.threadIdx.x % ROWS, cuda.threadIdx.x // ROWS * width
        k_tile = cuda.shared.array((ROWS, wide), float32)
        v_tile = cuda.shared.array((ROWS, wide), float32)
        q_tile = cuda.shared.array((columns, D), float32)
        dy_tile = cuda.shared.array((columns, D), float32)
        dk, dv = cuda.local.array(width, float32), cuda.local.array(width, float32)
        clear(dk, width)
        clear(dv, width)
        fetch(k_tile, heads, b, start, g, ROWS)
        fetch(v_tile, heads, b, start, g + n_kv, ROWS)
        for h in range(group * sharing, (group + 1) * sharing):
            for first in range(start, T, columns):
                count = min(columns, T - first)
                fetch(q_tile, heads, b, first, h, count)
                fetch(dy_tile, dy, b, first, h, count)
                cuda.syncthreads()  # no thread reads a tile before all have filled it
                for i in range(count):
                    t = first + i
                    s = scale * dot(q_tile, i, k_tile, key, D) - lse[b, h, t]
                    p = float32(math.exp(cuda.selp(start + key <= t, s, NEVER)))
                    dp = dot(dy_tile, i, v_tile, key, D)                    # (2)
                    add(dv, p, dy_tile, i, at, width)                       # (1)
                    add(dk, p * (dp - delta[b, h, t]), q_tile, i, at, width)  # (3), (6)
                cuda.syncthreads()  # no thread fills the next tile while another reads this one
        hand_over(k_tile, key, at, dk, scale, width)                        # (4)
        hand_over(v_tile, key, at, dv, float32(1), width)
        cuda.syncthreads()  # no row is saved before its thread has handed it over
        save(k_tile, dheads, b, start, g)
        save(v_tile, dheads, b, start, g + n_kv)

    return Kernel(flash_dkv, "f[4] f[4] r f[3] f[3] f[4]", ROWS * D // width, target=(8, 0))


def backward_launches(
    dy: Any, heads: Any, n_kv: int, y: Any, lse: Any, delta: Any, dheads: Any
) -> tuple[Launch, Launch]:
    """dheads from dy and what `forward_launch` had and gave; to be run in this order.

    delta is working memory. Every dheads and delta is written.
    """
    B, T, H, D = _sizes(heads, n_kv)
    for name, array in {"dy": dy, "y": y}.items():
        _expect(name, array, (B, T, H, D))
    for name, array in {"lse": lse, "delta": delta}.items():
        _expect(name, array, (B, H, padded(T)))
    _expect("dheads", dheads, tuple(heads.shape))
    tiles = padded(T) // ROWS
    return (
        Launch(dq_kernel(D), (tiles, H, B), (dy, heads, n_kv, y, lse, delta, dheads)),
        Launch(dkv_kernel(D), (tiles, n_kv, B), (dy, heads, n_kv, lse, delta, dheads)),
    )
