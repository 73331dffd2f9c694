# Made from book/08b-flash-on-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-flash-tensor-plan
"""Launches of causal attention on tensor cores: what fits, which kernel, which grid.

All of bf16 (as uint16), of any strides that are multiples of 16 bytes, the last axis dense:

    q, o, do, dq (B, H, T, D)    k, v, dk, dv (B, G, T, D)    D = 64 or 128, H a multiple of G

so that heads (B, T, H+2G, D) as the model keeps them fit too, as transposed views. lse and delta
are float32 (B, H, padded(T)) in C order. Left out: running the launches (device.py, paper).
"""

import math
from typing import Any

from nanoeuler.engines.gpu.flash_backward import dkdv_kernel, dq_kernel, step_queries
from nanoeuler.engines.gpu.flash_forward import KEYS, NARROW, QUERIES, WIDE
from nanoeuler.engines.gpu.flash_parts import PAD
from nanoeuler.engines.gpu.gemm_plan import MULTIPROCESSORS, cover
from nanoeuler.engines.gpu.kernel import Launch, Map
from nanoeuler.errors import UserError

# Bytes of what all heads that are worked on at a time stream: they should stay in the L2 cache,
# which has 50 MiB. Measured: 2 to 6 % at T = 4096 (the table of attempts).
FORWARD_SHARE, BACKWARD_SHARE = 32 << 20, 16 << 20


def padded(T: int) -> int:
    """How many values lse and delta hold for each head."""
    return cover(T, PAD) * PAD


def _expect(name: str, array: Any, shape: tuple[int, ...], dtype: str) -> None:
    if tuple(array.shape) != shape or str(array.dtype) != dtype:
        came = f"{array.dtype} {tuple(array.shape)}"
        raise UserError(f"attention's {name} is {dtype} {shape}, not {came}")
    if getattr(array, "address", 0) % 16:
        raise UserError(f"attention's {name} begins at a multiple of 16 bytes, not {array.address}")


def _heads(queries: dict[str, Any], keys: dict[str, Any]) -> tuple[int, int, int, int, int]:
    """B, H, G, T, D that all arrays agree on."""
    first, other = next(iter(queries.values())), next(iter(keys.values()))
    if len(first.shape) != 4 or len(other.shape) != 4:
        raise UserError(f"attention takes (batch, heads, T, D), not {first.shape}, {other.shape}")
    (B, H, T, D), G = first.shape, other.shape[1]
    if D not in (64, 128):
        raise UserError(f"attention on tensor cores has head width 64 or 128, not {D}")
    if G < 1 or H < 1 or H % G or B < 1 or T < 1:
        raise UserError(f"{H} query heads do not share {G} key heads evenly, {B} times {T} tokens")
    for name, array in queries.items():
        _expect(name, array, (B, H, T, D), "uint16")
    for name, array in keys.items():
        _expect(name, array, (B, G, T, D), "uint16")
    return B, H, G, T, D


def _expect_lines(B: int, H: int, T: int, **lines: Any) -> None:
    for name, array in lines.items():
        _expect(name, array, (B, H, padded(T)), "float32")
        if array.strides != (4 * H * padded(T), 4 * padded(T), 4):
            raise UserError(f"attention's {name} is in C order, not of strides {array.strides}")


def at_a_time(heads: int, size: int, share: int) -> int:
    """How many of `heads` are worked on together, when each streams `size` bytes: a divisor."""
    fit = [n for n in range(1, heads + 1) if heads % n == 0 and n * size <= share]
    return max(fit, default=1)


def _scales(D: int) -> tuple[float, float]:
    """log2(e) / sqrt(D), so that exp2 of scaled scores is exp; 1 / sqrt(D)."""
    return math.log2(math.e) / math.sqrt(D), 1 / math.sqrt(D)


def _box(array: Any, rows: int) -> Map:
    return Map(array, (1, 1, rows, 64))


def forward_launch(q: Any, k: Any, v: Any, o: Any, lse: Any) -> Launch:
    """o = causal attention of q, k, v; lse = log2 of each row's sum of exponentials.

    lse of rows from T on is 1e30. Every o and lse is written.
    """
    B, H, G, T, D = _heads({"q": q, "o": o}, {"k": k, "v": v})
    _expect_lines(B, H, T, lse=lse)
    together = at_a_time(B * H, 4 * T * D, FORWARD_SHARE)
    maps = _box(q, 64), _box(k, KEYS), _box(v, KEYS), _box(o, 64)
    kernel = NARROW if D == 64 else WIDE
    grid = together, cover(T, QUERIES), B * H // together
    return Launch(kernel, grid, (*maps, lse, T, H, H // G, _scales(D)[0]))


def warpgroups(most: int, T: int, heads: int) -> int:
    """How many warpgroups share a block: `most`, or one, when that leaves multiprocessors idle."""
    return most if cover(T, 64 * most) * heads >= MULTIPROCESSORS else 1


def backward_launches(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, delta: Any, dq: Any, dk: Any, dv: Any
) -> tuple[Launch, Launch]:
    """dq, dk, dv from do and what `forward_launch` had and gave; to be run in this order.

    delta is working memory. Every dq, dk, dv and delta is written. do and o are laid out alike.
    """
    B, H, G, T, D = _heads(
        {"q": q, "o": o, "do": do, "dq": dq}, {"k": k, "v": v, "dk": dk, "dv": dv}
    )
    _expect_lines(B, H, T, lse=lse, delta=delta)
    if o.strides != do.strides:
        raise UserError(f"attention's o and do lie alike, not {o.strides} and {do.strides}")
    return (
        _dq_launch((q, k, v, do, dq), o, lse, delta, H // G),
        _dkdv_launch((q, k, v, do, dk, dv), lse, delta, H // G),
    )


def _dq_launch(arrays: tuple, o: Any, lse: Any, delta: Any, sharing: int) -> Launch:
    do = arrays[3]
    B, H, T, D = do.shape
    groups = warpgroups(2 if D == 64 else 3, T, B * H)
    together = at_a_time(B * H, 4 * T * D, BACKWARD_SHARE)
    grid = together, cover(T, 64 * groups), B * H // together
    maps = [_box(array, 64) for array in arrays]
    pointers = o, do, *o.strides[:3], lse, delta
    return Launch(dq_kernel(D, groups), grid, (*maps, *pointers, T, H, sharing, *_scales(D)))


def _dkdv_launch(arrays: tuple, lse: Any, delta: Any, sharing: int) -> Launch:
    B, H, T, D = arrays[0].shape
    heads, groups = B * H // sharing, warpgroups(2, T, B * H // sharing)
    kernel, queries = dkdv_kernel(D, groups), step_queries(D)
    together = at_a_time(heads, 4 * T * D * sharing, BACKWARD_SHARE)
    grid = together, cover(T, 64 * groups), heads // together
    rows = queries, 64, 64, queries, 64, 64
    maps = [_box(array, n) for array, n in zip(arrays, rows, strict=True)]
    return Launch(kernel, grid, (*maps, lse, delta, T, H, sharing, *_scales(D)))
