# Made from book/08-flash-attention.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-forward
"""Causal grouped-query attention as three CUDA kernels that never hold the T x T matrix, float32.

`flash_attention` and `flash_attention_backward` launch them; flash_tiles.py says the same in
NumPy. Left out: tensor cores, and more than one thread a row, so none of these is fast.

B batch, T positions, H query heads, G key/value heads, D head width; rows and columns: how many
positions a block owns, one a thread, and how many it fetches at a time.
"""

import functools
import math

import numpy as np

from nanoeuler.engines.gpu.door import Array, Kernel, blocks, cuda


@functools.cache
def forward_kernel(D: int, rows: int, columns: int) -> Kernel:
    """The kernel of y and lse. Equations eq-flash-online and eq-flash-lse; FlashAttention-2.

    Contract: heads (B, T, H+2G, D), y (B, T, H*D), lse (B, H, T) float32, C order, any T; H a
    multiple of n_kv = G. Every y and lse is written.

    | index       | is             | covers                                                   |
    |-------------|----------------|----------------------------------------------------------|
    | blockIdx.x  | query tile     | positions tile * rows .. end                             |
    | blockIdx.y  | query head h   | heads[:, :, h], y[:, :, h*D : (h+1)*D]                   |
    | blockIdx.z  | sequence b     |                                                          |
    | threadIdx.x | query t        | one row; fetching: elements thread, thread + rows, ...   |
    | loop        | first          | keys 0 .. end in steps of columns                        |

    Budget: each query read once, each key and value at t read blocks(T, rows) - t // rows times
    by each head of its group; 8 columns D bytes shared; 2 D registers for q and o, 4 columns
    bytes of local memory for s; 4 D operations and one exp for a pair.
    Numerics: float32; scores and sums in order of keys; the running maximum is subtracted before
    exp; finite from the first tile on, since every query sees key 0; the same in every run.
    Departs from the paper: one thread a row, so that the maximum and the sum need no exchange.
    """
    scale = np.float32(1 / math.sqrt(D))

    @cuda.jit
    def kernel(heads, n_kv, y, lse):
        tile, h, b = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        thread = cuda.threadIdx.x
        T, H = heads.shape[1], heads.shape[2] - 2 * n_kv
        g = H + h // (H // n_kv)
        t, end = tile * rows + thread, min(tile * rows + rows, T)
        k_tile = cuda.shared.array((columns, D), np.float32)
        v_tile = cuda.shared.array((columns, D), np.float32)
        q = cuda.local.array(D, np.float32)
        o = cuda.local.array(D, np.float32)
        s = cuda.local.array(columns, np.float32)
        # 1. Load the query.
        for d in range(D):
            q[d] = heads[b, t, h, d] if t < T else np.float32(0)
            o[d] = np.float32(0)
        m, total = np.float32(-math.inf), np.float32(0)
        for first in range(0, end, columns):
            # 2. Fetch a tile of keys and values, neighbouring threads neighbouring elements.
            for element in range(thread, columns * D, rows):
                j, d = element // D, element % D
                inside = first + j < end
                k_tile[j, d] = heads[b, first + j, g, d] if inside else np.float32(0)
                v_tile[j, d] = heads[b, first + j, g + n_kv, d] if inside else np.float32(0)
            cuda.syncthreads()  # no thread reads the tile before all have filled it
            # 3. Scores, and the running maximum.
            larger = m
            for j in range(columns):
                score = np.float32(0)
                for d in range(D):
                    score += q[d] * k_tile[j, d]
                s[j] = score * scale if first + j <= t else np.float32(-math.inf)
                larger = max(larger, s[j])
            # 4. Rescale what came before.
            alpha = np.float32(math.exp(m - larger))
            total *= alpha
            for d in range(D):
                o[d] *= alpha
            # 5. Accumulate.
            for j in range(columns):
                p = np.float32(math.exp(s[j] - larger))
                total += p
                for d in range(D):
                    o[d] += p * v_tile[j, d]
            m = larger
            cuda.syncthreads()  # no thread fills the next tile while another reads this one
        # 6. Write.
        if t < T:
            for d in range(D):
                y[b, t, h * D + d] = o[d] / total
            lse[b, h, t] = m + np.float32(math.log(total))

    return kernel


def flash_attention(
    heads: Array, n_kv: int, y: Array, lse: Array, rows: int = 64, columns: int = 32
) -> None:
    """y (B, T, H*D), lse (B, H, T) of heads (B, T, H+2G, D), n_kv = G, by `forward_kernel`.

    All float32, on the GPU or NumPy. rows: queries, and threads, of a block; columns: keys a tile.
    """
    B, T, N, D = heads.shape
    H = N - 2 * n_kv
    assert H >= 1 and H % n_kv == 0, f"{H} query heads do not share {n_kv} key heads evenly"
    assert y.shape == (B, T, H * D) and lse.shape == (B, H, T)
    assert heads.dtype == y.dtype == lse.dtype == np.float32
    forward_kernel(D, rows, columns)[(blocks(T, rows), H, B), rows](heads, n_kv, y, lse)


# %% sec-flash-backward-kernels
@functools.cache
def dq_kernel(D: int, rows: int, columns: int) -> Kernel:
    """The kernel of the queries' part of dheads, and of delta. Equations eq-flash-backward, -delta.

    Contract: as `forward_kernel`, with dy, y (B, T, H*D), lse, delta (B, H, T), dheads (B, T, H+2G,
    D) float32; every delta and every dheads[:, :, :H] is written.

    Index map: that of `forward_kernel`.
    Budget: dy, y, lse and each query read once, keys and values as in the forward; 8 columns D
    bytes shared; 3 D registers for q, dy, dq, of which some are spilled at D = 64; 6 D operations
    and one exp for a pair.
    Numerics: float32; exp(s - lse) is at most 1 up to rounding; the same in every run.
    """
    scale = np.float32(1 / math.sqrt(D))

    @cuda.jit
    def kernel(dy, heads, n_kv, y, lse, delta, dheads):
        tile, h, b = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        thread = cuda.threadIdx.x
        T, H = heads.shape[1], heads.shape[2] - 2 * n_kv
        g = H + h // (H // n_kv)
        t, end = tile * rows + thread, min(tile * rows + rows, T)
        k_tile = cuda.shared.array((columns, D), np.float32)
        v_tile = cuda.shared.array((columns, D), np.float32)
        q = cuda.local.array(D, np.float32)
        dy_row = cuda.local.array(D, np.float32)
        dq = cuda.local.array(D, np.float32)
        # 1. Load the query's row and compute its delta = dy . y; zeros beyond the end.
        delta_t, lse_t = np.float32(0), np.float32(0)
        for d in range(D):
            q[d], dy_row[d], dq[d] = np.float32(0), np.float32(0), np.float32(0)
        if t < T:
            for d in range(D):
                q[d], dy_row[d] = heads[b, t, h, d], dy[b, t, h * D + d]
                delta_t += dy_row[d] * y[b, t, h * D + d]
            lse_t = lse[b, h, t]
            delta[b, h, t] = delta_t
        for first in range(0, end, columns):
            # 2. Fetch a tile of keys and values, as in the forward kernel.
            for element in range(thread, columns * D, rows):
                j, d = element // D, element % D
                inside = first + j < end
                k_tile[j, d] = heads[b, first + j, g, d] if inside else np.float32(0)
                v_tile[j, d] = heads[b, first + j, g + n_kv, d] if inside else np.float32(0)
            cuda.syncthreads()  # no thread reads the tile before all have filled it
            # 3. Recompute p, then terms (2) to (5), for the keys that this query sees.
            for j in range(columns):
                if first + j <= t:
                    score, dp = np.float32(0), np.float32(0)
                    for d in range(D):
                        score += q[d] * k_tile[j, d]
                        dp += dy_row[d] * v_tile[j, d]                      # (2)
                    p = np.float32(math.exp(score * scale - lse_t))
                    ds = p * (dp - delta_t) * scale                         # (3), (4)
                    for d in range(D):
                        dq[d] += ds * k_tile[j, d]                          # (5)
            cuda.syncthreads()  # no thread fills the next tile while another reads this one
        # 4. Write.
        if t < T:
            for d in range(D):
                dheads[b, t, h, d] = dq[d]

    return kernel


@functools.cache
def dkv_kernel(D: int, rows: int, columns: int) -> Kernel:
    """The kernel of the keys' and values' part of dheads. Equation eq-flash-backward.

    Contract: as `dq_kernel`, after it (delta is read); every dheads[:, :, H:] is written.

    | index       | is             | covers                                                   |
    |-------------|----------------|----------------------------------------------------------|
    | blockIdx.x  | key tile       | positions tile * rows ..                                 |
    | blockIdx.y  | key/value head | dheads[:, :, H + g] and [:, :, H + G + g]                |
    | blockIdx.z  | sequence b     |                                                          |
    | threadIdx.x | key            | one row; fetching: elements thread, thread + rows, ...   |
    | loops       | h, first       | query heads of the group; queries from the tile's start  |

    Budget: each key and value read once, each query, dy, lse and delta at t read t // rows + 1
    times; 8 columns (D + 1) bytes shared; 4 D registers for k, v, dk, dv, which at D = 64 is more
    than a thread has, so that some are spilled; 8 D operations and one exp for a pair.
    Numerics: as `dq_kernel`; sums over query heads, then queries, in order; no atomics.
    """
    scale = np.float32(1 / math.sqrt(D))

    @cuda.jit
    def kernel(dy, heads, n_kv, lse, delta, dheads):
        tile, group, b = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        thread = cuda.threadIdx.x
        T, H = heads.shape[1], heads.shape[2] - 2 * n_kv
        sharing, g = H // n_kv, H + group
        key = tile * rows + thread
        q_tile = cuda.shared.array((columns, D), np.float32)
        dy_tile = cuda.shared.array((columns, D), np.float32)
        lse_tile = cuda.shared.array(columns, np.float32)
        delta_tile = cuda.shared.array(columns, np.float32)
        k = cuda.local.array(D, np.float32)
        v = cuda.local.array(D, np.float32)
        dk = cuda.local.array(D, np.float32)
        dv = cuda.local.array(D, np.float32)
        # 1. Load the key and the value.
        for d in range(D):
            k[d] = heads[b, key, g, d] if key < T else np.float32(0)
            v[d] = heads[b, key, g + n_kv, d] if key < T else np.float32(0)
            dk[d], dv[d] = np.float32(0), np.float32(0)
        for h in range(group * sharing, (group + 1) * sharing):
            for first in range(tile * rows, T, columns):
                # 2. Fetch a tile of queries, with dy, lse and delta.
                for element in range(thread, columns * D, rows):
                    i, d = element // D, element % D
                    inside = first + i < T
                    q_tile[i, d] = heads[b, first + i, h, d] if inside else np.float32(0)
                    dy_tile[i, d] = dy[b, first + i, h * D + d] if inside else np.float32(0)
                for i in range(thread, columns, rows):
                    inside = first + i < T
                    lse_tile[i] = lse[b, h, first + i] if inside else np.float32(0)
                    delta_tile[i] = delta[b, h, first + i] if inside else np.float32(0)
                cuda.syncthreads()  # no thread reads the tile before all have filled it
                # 3. Recompute p, then terms (1) to (4) and (6), for the queries that see this key.
                for i in range(columns):
                    if key <= first + i < T:
                        score, dp = np.float32(0), np.float32(0)
                        for d in range(D):
                            score += q_tile[i, d] * k[d]
                            dp += dy_tile[i, d] * v[d]                      # (2)
                        p = np.float32(math.exp(score * scale - lse_tile[i]))
                        ds = p * (dp - delta_tile[i]) * scale               # (3), (4)
                        for d in range(D):
                            dv[d] += p * dy_tile[i, d]                      # (1)
                            dk[d] += ds * q_tile[i, d]                      # (6)
                cuda.syncthreads()  # no thread fills the next tile while another reads this one
        # 4. Write.
        if key < T:
            for d in range(D):
                dheads[b, key, g, d] = dk[d]
                dheads[b, key, g + n_kv, d] = dv[d]

    return kernel


def flash_attention_backward(
    dy: Array,
    heads: Array,
    n_kv: int,
    y: Array,
    lse: Array,
    delta: Array,
    dheads: Array,
    rows: int = 64,
    columns: int = 32,
) -> None:
    """dheads (B, T, H+2G, D) by `dq_kernel` and `dkv_kernel`; delta (B, H, T) is working memory.

    dy (B, T, H*D), the rest as `flash_attention` had and gave it; all float32, GPU or NumPy.
    """
    B, T, N, D = heads.shape
    H = N - 2 * n_kv
    assert dheads.shape == heads.shape and dy.shape == y.shape == (B, T, H * D)
    assert lse.shape == delta.shape == (B, H, T)
    assert all(a.dtype == np.float32 for a in (dy, heads, y, lse, delta, dheads))
    over_queries, over_keys = (blocks(T, rows), H, B), (blocks(T, rows), n_kv, B)
    dq_kernel(D, rows, columns)[over_queries, rows](dy, heads, n_kv, y, lse, delta, dheads)
    dkv_kernel(D, rows, columns)[over_keys, rows](dy, heads, n_kv, lse, delta, dheads)
