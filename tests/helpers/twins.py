"""Every PTX instruction of the package, twice: what a GPU makes of it and what the paper does.

A `Twin` is a small kernel with its arrays. Most instructions stand in TABLE, one line each: Python
of a kernel of one warp, what NumPy says of its results, and how far off the hardware may be, as the
PTX ISA says it. Those that need more, barriers, the copy engine, products of tiles, have a kernel
of their own. tests/test_twins.py holds paper against NumPy, and that no instruction is missing;
tests/bench/card/twins.py holds the GPU against the paper.
"""

import linecache
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.lang import hopper, ptx
from nanoeuler.engines.gpu.lang.hopper import (
    bulk_commit,
    bulk_wait,
    bulk_wait_read,
    bulk_wait_read_all,
    cluster_arrive,
    cluster_wait,
    descriptor,
    load_bytes,
    load_tile,
    map_acquire,
    mbarrier_arrive,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    prefetch_map,
    proxy_fence,
    store_tile,
    tma_add,
    tma_load,
    tma_load_multicast,
    tma_store,
    wgmma_wait_previous,
)
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int8, int32, int64
from nanoeuler.engines.gpu.lang.instruction import ptx as instruction
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, Map
from nanoeuler.engines.gpu.lang.ptx import (
    barrier,
    barrier_arrive,
    grid_barrier,
    pack_bf16,
    shared_address,
    store_shared_int,
)

Arrays = dict[str, Any]
POISON = -77  # what an output holds before


class Bound(NamedTuple):
    """How far two results may be apart: in "bits" not at all, else "relative" or "absolute"."""

    kind: str
    size: float = 0.0

    def distance(self, a: np.ndarray, b: np.ndarray) -> float:
        """Of words of int32: how many differ, or by how much they do as float32 at most."""
        if self.kind == "bits":
            return float((a != b).sum())
        x, y = (np.ascontiguousarray(words).view(np.float32).astype(float) for words in (a, b))
        apart = np.where(a == b, 0.0, np.abs(x - y) / (np.abs(y) if self.kind == "relative" else 1))
        return float(np.where(np.isnan(apart), np.inf, apart).max())


BITS = Bound("bits")


@dataclass(frozen=True)
class Twin:
    """A kernel with arrays. make: of the kernel. inputs: a generator -> name -> array, in the order
    of the arguments, outputs too. boxes: of arrays that are handed over as maps. want: from the
    arrays before the launch, (what, name of an array, part of it, int32 as it should be, Bound).
    """

    make: Callable[[], Kernel]
    inputs: Callable[[np.random.Generator], Arrays]
    want: Callable[[Arrays], Iterable[tuple[str, str, Any, np.ndarray, Bound]]]
    grid: tuple[int, ...] = (1,)
    boxes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def launch(self, arrays: Arrays) -> Launch:
        """The launch on arrays, wherever they are."""
        boxes = dict(self.boxes)
        args = (Map(a, boxes[n]) if n in boxes else a for n, a in arrays.items())
        return Launch(self.make(), self.grid, tuple(args))


# ---- The table: one warp, a line for each instruction


class Row(NamedTuple):
    """lines: statements of the kernel; what follows the last ; is the result, or several, that each
    lane leaves in its own word of `out`; where the lines store there themselves, nothing follows.
    want: from the arrays x, n, b to the words of `out`, results first, as int32 or float32.

    In the lines, x (128 normal deviates), n (128 integers of 1 to 999) and b (512 words, pairs of
    small whole numbers in bf16) are addresses of global memory, s of shared memory that holds x, t
    of 512 bytes for the row; f, g, h are float32 of the lane, h positive, and i, j integers.
    """

    lines: str
    want: Callable[[np.ndarray, np.ndarray, np.ndarray], Any]
    bound: Bound = BITS


LANE = np.arange(32)


def four(x: np.ndarray) -> np.ndarray:
    """Words by lanes of vectors of four: all first words, all second ones..."""
    return x.reshape(32, 4).T


def bf16_pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two float32 rounded to bf16, in one word."""
    return to_bf16(low).astype(np.uint32) | to_bf16(high).astype(np.uint32) << 16


def low(x: np.ndarray) -> np.ndarray:
    """The lower bf16 of words, as float32."""
    return (x.view(np.uint32) << 16).view(np.float32)


def high(x: np.ndarray) -> np.ndarray:
    """The upper bf16 of words, as float32."""
    return (x.view(np.uint32) & 0xFFFF0000).view(np.float32)


def f32(values: Any) -> np.ndarray:
    """The nearest float32."""
    return np.asarray(values).astype(np.float32)


def matrices(x: np.ndarray, count: int, turned: bool) -> np.ndarray:
    """What ldmatrix gives each lane of `count` matrices of 8 x 8 halves."""
    whole = x[: 32 * count].view(np.uint16).reshape(count, 8, 8)
    whole = whole.transpose(0, 2, 1) if turned else whole
    return np.ascontiguousarray(whole).reshape(count, 64).view(np.uint32)


def bits(x: np.ndarray) -> np.ndarray:
    """The bits of float32."""
    return np.ascontiguousarray(x, np.float32).view(np.int32)


def product(b: np.ndarray, c: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """C + A B in fragments, one register of each lane a line, of words of A, then of B.

    PTX ISA, "Matrix Fragments for mma.m16n8k16": lane 4 g + q holds of A rows g and g + 8, columns
    2 q and 2 q + 8 and the next; of B the same rows of k, column g; of C row g and g + 8, column
    2 q and the next. Tiles side by side follow each other.
    """
    halves = from_bf16(b.view(np.uint16)).reshape(-1, 32, 2)
    g, q, pair = LANE[:, None] // 4, LANE[:, None] % 4, np.arange(2)
    A, B, C = np.zeros((rows, 16)), np.zeros((16, columns)), np.zeros((rows, columns))
    parts = [(i, j, r) for i in range(rows // 16) for j in range(columns // 8) for r in range(4)]
    for k in range(rows // 4):
        A[k // 4 * 16 + g + k % 2 * 8, 2 * q + pair + k % 4 // 2 * 8] = halves[k]
    for k in range(columns // 4):
        B[2 * q + pair + k % 2 * 8, k // 2 * 8 + g] = halves[rows // 4 + k]
    places = [(i * 16 + LANE // 4 + r // 2 * 8, j * 8 + LANE % 4 * 2 + r % 2) for i, j, r in parts]
    for (row, column), values in zip(places, c, strict=True):
        C[row, column] = values
    D = C + A @ B
    return f32([D[row, column] for row, column in places])


def clear(x: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Zeros where not inside."""
    return np.where(inside, x, 0)


ULP = Bound("relative", 2.0**-23)  # rcp.approx: 1 ulp, the manual
ROOT = Bound("relative", 2.0**-22)  # rsqrt.approx, sqrt.approx: 2^-22.9 and 2^-23, and a rounding
TABLE = {
    # Values.
    "divide": Row("divide(i * 1000, j)", lambda x, n, b: n[:32] * 1000 // n[32:64]),
    "pack_bf16": Row("pack_bf16(f, g)", lambda x, n, b: bf16_pair(x[:32], x[32:64])),
    "low_bf16": Row("low_bf16(i)", lambda x, n, b: low(n[:32])),
    "high_bf16": Row("high_bf16(load_int(x + 4 * lane))", lambda x, n, b: high(x[:32])),
    "tanh_approx": Row(
        "tanh_approx(f)", lambda x, n, b: f32(np.tanh(x[:32].astype(float))),
        Bound("relative", 2.0**-11)),
    "exp2": Row("exp2(f)", lambda x, n, b: f32(2.0 ** x[:32].astype(float)),
                Bound("relative", 2.0**-22)),
    "log2": Row("log2(h)", lambda x, n, b: f32(np.log2(np.abs(x[64:96]).astype(float))),
                Bound("absolute", 2.0**-20)),  # 2^-22, and a rounding of up to 5
    "reciprocal": Row("reciprocal(h)",
                      lambda x, n, b: f32(1 / np.abs(x[64:96]).astype(float)), ULP),
    "inverse_root": Row(
        "inverse_root(h)", lambda x, n, b: f32(np.abs(x[64:96]).astype(float) ** -0.5), ROOT),
    "square_root": Row(
        "square_root(h)", lambda x, n, b: f32(np.abs(x[64:96]).astype(float) ** 0.5), ROOT),
    "larger": Row("larger(f, g)", lambda x, n, b: np.maximum(x[:32], x[32:64])),
    "larger_pair": Row(
        "larger_pair(load_int(b + 4 * lane), load_int(b + 4 * lane + 128))",
        lambda x, n, b: bf16_pair(*(np.maximum(f(b[:32]), f(b[32:64])) for f in (low, high)))),
    "fma": Row("fma(f, g, h)", lambda x, n, b: f32(
        x[:32].astype(float) * x[32:64] + np.abs(x[64:96]).astype(float))),
    "float_of": Row("float_of(load_int(x + 4 * lane))", lambda x, n, b: x[:32]),
    "bits_of": Row("bits_of(f)", lambda x, n, b: bits(x[:32])),
    "again": Row("again(i)", lambda x, n, b: n[:32]),
    # Global memory.
    "load_if_below": Row("load_if_below(x + 4 * lane, lane, 20)",
                         lambda x, n, b: clear(x[:32].view(np.int32), LANE < 20)),
    "load_float4_if_below": Row("load_float4_if_below(x + 16 * lane, lane, 11)",
                                lambda x, n, b: clear(four(x), LANE < 11)),
    "load_float2_if": Row(
        "load_float2_if(x + 8 * lane, lane % 4 - 1)",
        lambda x, n, b: clear(x[:64].reshape(32, 2), np.arange(2) < LANE[:, None] % 4 - 1).T),
    "store_float2_if": Row(
        "store_float2_if(out + 8 * lane, f, g, lane % 4 - 1);",
        lambda x, n, b: np.where(np.arange(2) < LANE[:, None] % 4 - 1,
                                 bits(x[:64]).reshape(2, 32).T, POISON)),
    "store_short": Row(
        "store_short(out + 4 * lane, i); store_short(out + 4 * lane + 2, j << 16 | i);",
        lambda x, n, b: n[:32] << 16 | n[:32]),
    "load_int": Row("load_int(n + 4 * lane)", lambda x, n, b: n[:32]),
    "load_int2": Row("load_int2(n + 8 * lane)", lambda x, n, b: n[:64].reshape(32, 2).T),
    "load_int4": Row("load_int4(n + 16 * lane)", lambda x, n, b: four(n)),
    "load_float": Row("load_float(x + 4 * lane)", lambda x, n, b: x[:32]),
    "load_float4": Row("load_float4(x + 16 * lane)", lambda x, n, b: four(x)),
    "load_own_int": Row("load_own_int(n + 4 * lane)", lambda x, n, b: n[:32]),
    "load_own_int2": Row("load_own_int2(n + 8 * lane)", lambda x, n, b: n[:64].reshape(32, 2).T),
    "load_own_int4": Row("load_own_int4(n + 16 * lane)", lambda x, n, b: four(n)),
    "load_own_float": Row("load_own_float(x + 4 * lane)", lambda x, n, b: x[:32]),
    "load_own_float4": Row("load_own_float4(x + 16 * lane)", lambda x, n, b: four(x)),
    "store_float": Row("store_float(out + 4 * lane, f);", lambda x, n, b: x[:32]),
    "store_float2": Row("store_float2(out + 8 * lane, f, g);",
                        lambda x, n, b: x[:64].reshape(2, 32).T),
    "store_float4": Row("store_float4(out + 16 * lane, f, g, h, f);", lambda x, n, b: np.stack(
        [x[:32], x[32:64], np.abs(x[64:96]), x[:32]], 1)),
    "store_int": Row("store_int(out + 4 * lane, i);", lambda x, n, b: n[:32]),
    "store_int2": Row("store_int2(out + 8 * lane, i, j);",
                      lambda x, n, b: n[:64].reshape(2, 32).T),
    "store_int4": Row("store_int4(out + 16 * lane, i, j, j, i);",
                      lambda x, n, b: n[:64].reshape(2, 32).T[:, [0, 1, 1, 0]]),
    # Shared memory; each line ends with what its own stores left.
    "store_shared_int": Row("store_shared_int(t + 4 * lane, i); one_word(t, lane)",
                            lambda x, n, b: n[:32]),
    "store_shared_int4": Row(
        "store_shared_int4(t + 16 * lane, i, j, j, i); four_words(t, lane)",
        lambda x, n, b: n[:64].reshape(2, 32).T[:, [0, 1, 1, 0]]),
    "store_shared_float2": Row(
        "store_shared_float2(t + 8 * lane, f, g); two_words(t, lane)",
        lambda x, n, b: bits(x[:64].reshape(2, 32).T)),
    "store_shared_float4": Row(
        "store_shared_float4(t + 16 * lane, f, g, g, f); four_words(t, lane)",
        lambda x, n, b: bits(x[:64].reshape(2, 32).T[:, [0, 1, 1, 0]])),
    "load_shared_int": Row("load_shared_int(s + 4 * (lane ^ 3))",
                           lambda x, n, b: bits(x[LANE ^ 3])),
    "load_shared_float2": Row("load_shared_float2(s + 8 * lane)",
                              lambda x, n, b: x[:64].reshape(32, 2).T),
    "load_shared_float4": Row("load_shared_float4(s + 16 * lane)", lambda x, n, b: four(x)),
    "load_shared_int4": Row("load_shared_int4(s + 16 * lane)",
                            lambda x, n, b: four(x.view(np.int32))),
    "ldmatrix4": Row("ldmatrix4(s + 16 * lane)", lambda x, n, b: matrices(x, 4, False)),
    "ldmatrix4_turned": Row("ldmatrix4_turned(s + 16 * lane)",
                            lambda x, n, b: matrices(x, 4, True)),
    "ldmatrix2": Row("ldmatrix2(s + 16 * lane)", lambda x, n, b: matrices(x, 2, False)),
    "ldmatrix2_turned": Row("ldmatrix2_turned(s + 16 * lane)",
                            lambda x, n, b: matrices(x, 2, True)),
    "ldmatrix_down": Row(  # s holds 512 bytes: 8 rows of 16 bytes, four times, 128 bytes on each
        "pieces = cuda.local.array(8, int32); down(pieces, s + 16 * (lane % 8));"
        + ", ".join(f"pieces[{k}]" for k in range(8)),
        lambda x, n, b: np.repeat([m for m in matrices(x, 2, False)], 4, axis=0)),
    "ldmatrix_across": Row(  # rows of 64 bytes: the second time the other 32 of them
        "parts = cuda.local.array(8, int32); across(parts, s + 64 * (lane % 8));"
        + ", ".join(f"parts[{k}]" for k in range(8)),
        lambda x, n, b: np.repeat([
            matrices(x.reshape(8, 16)[:, 8 * k : 8 * k + 4].copy().ravel(), 1, True)[0]
            for k in range(2)], 4, axis=0)),
    "ticket": Row(
        "zero(t, lane); one = ticket(t, 1); two = ticket(t, 1); one, two, ticket(t, 1)",
        lambda x, n, b: np.where(LANE, -1, np.array([[0], [1], [0]]))),
    # The warp.
    "shuffle_xor": Row("shuffle_xor(f, 5)", lambda x, n, b: x[LANE ^ 5]),
    "uniform": Row("uniform(i)", lambda x, n, b: np.full(32, n[0])),
    # Copies.
    "copy_async, copy_commit, copy_wait": Row(
        "copy_async(t + 16 * lane, x + 16 * lane); copy_commit(); copy_none();"
        " four_words(t, lane)", lambda x, n, b: bits(x)),
    "copy_async_part": Row(
        "copy_async_part(t + 16 * lane, x + 16 * lane, 4 * (lane % 5)); copy_commit();"
        " copy_none(); four_words(t, lane)",
        lambda x, n, b: bits(clear(x.reshape(32, 4), np.arange(4) < LANE[:, None] % 5))),
    # Tensor cores.
    "zeros": Row("sums = cuda.local.array(4, float32); clear_four(sums);"
                 + ", ".join(f"sums[{k}]" for k in range(4)),
                 lambda x, n, b: np.zeros((4, 32), np.float32)),
    "mma": Row(
        "mma(word(b, 0, lane), word(b, 1, lane), word(b, 2, lane), word(b, 3, lane),"
        " word(b, 4, lane), word(b, 5, lane), float32(i), float32(j), float32(j), float32(i))",
        lambda x, n, b: product(b, n[:64].reshape(2, 32)[[0, 1, 1, 0]], 16, 8)),
    "mma_tile": Row(
        "acc = cuda.local.array(16, float32); p = cuda.local.array(8, int32);"
        "q = cuda.local.array(4, int32)\n"
        "for k in range(8): p[k] = word(b, k, lane)\n"
        "for k in range(4): q[k] = word(b, 8 + k, lane)\n"
        "for k in range(16): acc[k] = float32(i * k)\n"
        "mma_32x16(acc, p, q);" + ", ".join(f"acc[{k}]" for k in range(16)),
        lambda x, n, b: product(b, n[:32] * np.arange(16)[:, None], 32, 16)),
}  # fmt: skip
TABLE_9 = {
    "stmatrix4": Row(
        "stmatrix4(t + 16 * lane, i, j, i, j); four_words(t, lane)",
        lambda x, n, b: np.stack([n[:32], n[32:64]] * 2)),
    "stmatrix4_turned": Row(
        "stmatrix4_turned(t + 16 * lane, i, j, i, j); four_words(t, lane)",
        lambda x, n, b: np.concatenate([matrices(n, 2, True)] * 2)),
}  # fmt: skip

peek = instruction("ld.shared.b32 $0, [$1];", "r", "r")
put_int = instruction("st.global.b32 [$0], $1;", "l r")
put_float = instruction("st.global.f32 [$0], $1;", "l f")
take = instruction("ld.global.b32 $0, [$1];", "l", "r")
copy_none = ptx.copy_wait(0)
mma_32x16 = ptx.mma_tile(32, 16)
clear_four = ptx.zeros(4)
down, across = ptx.ldmatrix_down(2, 128), ptx.ldmatrix_across(2)


def one_word(address, lane):
    """A word of shared memory for each lane, once all lanes have written theirs."""
    cuda.syncwarp()
    return peek(address + 4 * lane)


def two_words(address, lane):
    """Two words for each lane, 128 bytes apart."""
    cuda.syncwarp()
    return peek(address + 4 * lane), peek(address + 128 + 4 * lane)


def four_words(address, lane):
    """Four words for each lane."""
    cuda.syncwarp()
    first, second = peek(address + 4 * lane), peek(address + 128 + 4 * lane)
    return first, second, peek(address + 256 + 4 * lane), peek(address + 384 + 4 * lane)


def word(address, number, lane):
    """A word of global memory for each lane, of those that begin 128 bytes * number on."""
    return take(address + 128 * number + 4 * lane)


def zero(address, lane):
    """A zero at this address of shared memory."""
    if lane == 0:
        store_shared_int(address, 0)
    cuda.syncwarp()


HEAD = """
def table(x, n, b, y):
    lane = int32(cuda.threadIdx.x)
    s = shared_address(cuda.shared.array(0, int8))
    for k in range(4):
        store_shared_int(s + 16 * lane + 4 * k, word(x, 0, 4 * lane + k))
    cuda.syncwarp()
    f, g = load_own_float(x + 4 * lane), load_own_float(x + 128 + 4 * lane)
    h, i = abs(load_own_float(x + 256 + 4 * lane)), word(n, 0, lane)
    j = word(n, 1, lane)
"""
SLOT = 512  # words of `out` of a row: sixteen results a lane


def source(rows: dict[str, Row]) -> str:
    """The kernel that does the rows of a table, as Python."""
    ones = np.ones(128, np.float32), np.ones(128, np.int32), np.zeros(512, np.int32)
    lines = []
    for k, row in enumerate(rows.values()):
        *statements, result = (part.strip() for part in row.lines.replace("\n", ";").split(";"))
        lines += [f"out, t = y + {4 * SLOT * k}, int32(s + {512 * (k + 1)})", *statements]
        want = np.asarray(row.want(*ones))
        names = [f"r{q}" for q in range(want.size // 32)] if result else []
        put = "put_float" if want.dtype == np.float32 else "put_int"
        lines += [f"{', '.join(names)} = {result}"] if result else []
        lines += [f"{put}(out + {128 * q} + 4 * lane, {name})" for q, name in enumerate(names)]
    return HEAD + "".join(f"    {line}\n" for line in lines)


@cache
def table_kernel(target: tuple) -> Kernel:
    """The kernel of TABLE, or of TABLE_9 for Hopper."""
    rows = tables()[target]
    place = {**vars(ptx), **vars(hopper), **globals()}
    name, text = f"<the table of twins, {target}>", source(rows)
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name  # for digests
    exec(compile(text, name, "exec"), place)
    return Kernel(place["table"], "l l l l", 32, 512 * (len(rows) + 1), target=target)


def tables() -> dict[tuple, dict[str, Row]]:
    """Target -> table."""
    return {(8, 0): TABLE, (9, 0, "a"): TABLE_9}


def table_inputs(rows: int, rng: np.random.Generator) -> Arrays:
    """The arrays of a table."""
    whole = rng.integers(-8, 9, 1024).astype(np.float32)
    return {
        "x": rng.standard_normal(128).astype(np.float32),
        "n": rng.integers(1, 1000, 128).astype(np.int32), "b": to_bf16(whole).view(np.int32),
        "y": np.full((rows, SLOT), POISON, np.int32),
    }  # fmt: skip


def table_want(rows: dict[str, Row], arrays: Arrays) -> Iterable[tuple]:
    """What NumPy says of each row."""
    for k, (name, row) in enumerate(rows.items()):
        out = np.full(SLOT, POISON, np.int32)
        want = np.ascontiguousarray(row.want(arrays["x"], arrays["n"], arrays["b"])).ravel()
        want = want.view(np.int32) if want.itemsize == 4 else want.astype(np.int32)
        out[: want.size] = want
        yield name, "y", k, out, row.bound


def table_twin(target: tuple) -> Twin:
    """The twin of a table."""
    rows = tables()[target]
    return Twin(
        partial(table_kernel, target), partial(table_inputs, len(rows)), partial(table_want, rows)
    )


# ---- Kernels of their own: barriers


def waits(y):
    """The first warp leaves a word for the second and goes on; the second waits for it."""
    t = int32(cuda.threadIdx.x)
    s = shared_address(cuda.shared.array(0, int8))
    barrier(1, 64)
    if t < 32:
        store_shared_int(s + 4 * t, 3 * t)
        barrier_arrive(2, 64)
    else:
        barrier(2, 64)
        put_int(y + 4 * (t - 32), peek(s + 4 * (63 - t)))


def meet(counter, x, y):
    """Each block leaves a word, and adds up those of all, once all have."""
    rank, count = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
    if cuda.threadIdx.x == 0:
        put_int(x + 4 * rank, rank + 1)
        grid_barrier(counter, int32(0x80000000 - (count - 1)) if rank == 0 else 1)
        total = int32(0)
        for other in range(count):
            total += take(x + 4 * other) << 4 * other
        put_int(y + 4 * rank, total)


@cache
def waits_kernel() -> Kernel:
    """Barriers with a number."""
    return Kernel(waits, "l", 64, 256, target=(8, 0))


@cache
def meet_kernel() -> Kernel:
    """The barrier of the grid."""
    return Kernel(meet, "l l l", 32, target=(8, 0), together=True)


def words(*shape: int) -> np.ndarray:
    """An output of int32."""
    return np.full(shape, POISON, np.int32)


# ---- The copy engine

SOURCE, TARGET = (16, 64), (8, 64)  # of arrays of bf16; boxes are 8 x 64
HEADS = (2, 2, 8, 64)  # batch, heads, rows, columns


def copies(two, to_two, sums, four, to_four, line, y):
    """Boxes in and out through maps of two and of four axes, one that is added, and a line.

    two's second box goes to to_two and, beyond the edge, is cut off; the line's first 128 bytes,
    read as float32, are added to sums twice; four's last head goes to to_four's first.
    """
    t = int32(cuda.threadIdx.x)
    s = shared_address(cuda.shared.array(0, int8))
    bar = int32(s + 4096)
    map_acquire(two), map_acquire(to_two), map_acquire(sums), map_acquire(four)
    map_acquire(to_four)
    if t == 0:
        prefetch_map(two)
        mbarrier_init(bar, 2)
        mbarrier_init_fence()
        mbarrier_expect(bar, 1024 + 1024 + 1024)
        tma_load(s, two, 0, 8, bar)
        load_tile(s + 1024, four, 0, 0, 1, 1, bar)
        load_bytes(s + 2048, line, 1024, bar)
        mbarrier_arrive(bar)
    cuda.syncwarp()
    mbarrier_wait(bar, 0)
    for k in range(24):
        put_int(y + 4 * (32 * k + t), peek(s + 4 * (32 * k + t)))
    for k in range(8):
        store_shared_int(s + 3072 + 4 * (32 * k + t), peek(s + 4 * (32 * k + t)))
    proxy_fence()
    cuda.syncwarp()
    if t == 0:
        tma_store(to_two, 0, 4, s + 3072)
        bulk_commit()
        store_tile(to_four, 0, 0, 0, 0, s + 1024)
        bulk_commit()
        bulk_wait_read()
        tma_add(sums, 0, 0, s + 2048)
        bulk_commit()
        bulk_wait_read_all()
        bulk_wait()
        tma_add(sums, 0, 0, s + 2048)
        bulk_commit()
        bulk_wait()


@cache
def copies_kernel() -> Kernel:
    """The copy engine in one block."""
    return Kernel(copies, "l l l l l l l", 32, 4096 + 16)


def copies_inputs(rng: np.random.Generator) -> Arrays:
    """Random bits, and whole numbers where they are added."""
    made = {name: rng.integers(2**15, size=shape).astype(np.uint16) for name, shape in
            (("two", SOURCE), ("to_two", TARGET), ("four", HEADS), ("to_four", HEADS))}  # fmt: skip
    line, sums = (rng.integers(100, size=(8, 32)).astype(np.float32) for _ in range(2))
    order = "two", "to_two", "sums", "four", "to_four", "line", "y"
    made |= {"line": line, "sums": sums, "y": words(24, 32)}
    return {name: made[name] for name in order}


def swizzled(box: np.ndarray) -> np.ndarray:
    """A box of 8 rows of 128 bytes as it lies in shared memory, in words.

    PTX ISA, "Swizzling modes": in row r, the 16 bytes number c lie at number c ^ r.
    """
    chunks = np.ascontiguousarray(box).view(np.int32).reshape(8, 8, 4)
    row, chunk = np.arange(8)[:, None], np.arange(8)
    return chunks[row, chunk ^ row].reshape(8, 32)


def copies_want(arrays: Arrays) -> Iterable[tuple]:
    """Each array as it should be."""
    two, four, line = (arrays[name] for name in ("two", "four", "line"))
    y = np.concatenate([swizzled(two[8:]), swizzled(four[1, 1]), line.view(np.int32)])
    yield "tma_load", "y", slice(8), y[:8], BITS
    yield "load_tile", "y", slice(8, 16), y[8:16], BITS
    yield "load_bytes", "y", slice(16, 24), y[16:], BITS
    to_two, to_four = arrays["to_two"].copy(), arrays["to_four"].copy()
    to_two[4:], to_four[0, 0] = two[8:12], four[1, 1]
    yield "tma_store", "to_two", ..., to_two.view(np.int32), BITS
    yield "store_tile", "to_four", ..., to_four.view(np.int32), BITS
    sums = arrays["sums"] + 2 * swizzled(line).view(np.float32)  # what is stored is unswizzled
    yield "tma_add", "sums", ..., sums.view(np.int32), BITS


def spread(two, y):
    """Block 0 sends a box to both blocks of the cluster; each tells the other that it has it."""
    t, rank = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
    s = shared_address(cuda.shared.array(0, int8))
    bar, done = int32(s + 1024), int32(s + 1032)
    map_acquire(two)
    if t == 0:
        mbarrier_init(bar, 1)
        mbarrier_init(done, 1)
        mbarrier_init_fence()
        mbarrier_expect(bar, 1024)
    cluster_arrive()
    cluster_wait()
    if rank == 0 and t == 0:
        tma_load_multicast(s, two, 0, 8, bar, 3)
    mbarrier_wait(bar, 0)
    if t == 0:
        mbarrier_arrive_at(done, rank ^ 1)
    mbarrier_wait(done, 0)
    for k in range(8):
        put_int(y + 4 * (256 * rank + 32 * k + t), peek(s + 4 * (32 * k + t)))
    cluster_arrive()
    cluster_wait()


@cache
def spread_kernel() -> Kernel:
    """The copy engine in a cluster of two."""
    return Kernel(spread, "l l", 32, 1024 + 16, cluster=2)


def spread_inputs(rng: np.random.Generator) -> Arrays:
    """Random bits."""
    return {"two": rng.integers(2**15, size=SOURCE).astype(np.uint16), "y": words(2, 8, 32)}


def spread_want(arrays: Arrays) -> Iterable[tuple]:
    """The box, twice."""
    box = swizzled(arrays["two"][8:])
    yield "tma_load_multicast, cluster", "y", ..., np.stack([box, box]), BITS


# ---- Products of a warpgroup

STEPS = 2  # of 16 along k; tiles are 64 x 64, of which a product takes 32 along k
LAYOUTS = "NT", "NN", "TN"
BY_LAYOUT = {
    layout: hopper.wgmma(
        64, STEPS, 128 if layout[0] == "T" else 2, 128 if layout[1] == "N" else 2, layout
    )
    for layout in LAYOUTS
}
by_rows, add, add_and_go_on = (
    hopper.product_of_rows(64, 64), hopper.add_product(64, 64), hopper.add_product(64, 64, False),
)  # fmt: skip
finish, finish_product, finish_previous = (
    hopper.wgmma_wait(32), hopper.product_done(64), hopper.product_done(64, 1),
)  # fmt: skip
shrink, grow = hopper.set_registers(64, False), hopper.set_registers(72, True)


def bring_two(a, b, s, t):
    """Two tiles of 64 x 64 bf16 into shared memory; returns their descriptors."""
    bar = int32(s + 16384)
    map_acquire(a), map_acquire(b)
    if t == 0:
        mbarrier_init(bar, 1)
        mbarrier_init_fence()
        mbarrier_expect(bar, 16384)
        tma_load(s, a, 0, 0, bar)
        tma_load(s + 8192, b, 0, 0, bar)
    cuda.syncthreads()
    mbarrier_wait(bar, 0)
    one = int64(descriptor(16, 1024)) | int64((s & 0x3FFFF) >> 4)
    two = int64(descriptor(16, 1024)) | int64(((s + 8192) & 0x3FFFF) >> 4)
    return one, two


@cache
def layout_kernel(layout: str) -> Kernel:
    """A product that keeps, and one on top of it that begins from zeros."""
    multiply = BY_LAYOUT[layout]

    def one_product(a, b, y):
        t = int32(cuda.threadIdx.x)
        s = shared_address(cuda.shared.array(0, int8))
        one, two = bring_two(a, b, s, t)
        acc, other = cuda.local.array(32, float32), cuda.local.array(32, float32)
        for i in range(32):
            acc[i] = float32(t + i)
            other[i] = float32(0)
        multiply(acc, one, two, 1)
        multiply(other, one, two, 0)
        wgmma_wait_previous()
        finish(acc)
        finish(other)
        for i in range(32):
            put_float(y + 4 * (32 * t + i), acc[i])
            put_float(y + 4 * (4096 + 32 * t + i), other[i])

    return Kernel(one_product, "l l l", 128, 16384 + 16)


@cache
def chain_kernel() -> Kernel:
    """A B^T, then its bf16 times B, as attention does."""

    def chain(a, b, y):
        t = int32(cuda.threadIdx.x)
        s = shared_address(cuda.shared.array(0, int8))
        one, two = bring_two(a, b, s, t)
        acc, more = cuda.local.array(32, float32), cuda.local.array(32, float32)
        pairs = cuda.local.array(16, int32)
        for i in range(32):
            acc[i] = float32(0)
            more[i] = float32(1)
        by_rows(acc, one, two)
        finish_product(acc)
        for i in range(16):
            pairs[i] = pack_bf16(acc[2 * i], acc[2 * i + 1])
        add_and_go_on(more, pairs, two)
        add(more, pairs, two)
        finish_previous(more)
        finish_product(more)
        for i in range(32):
            put_float(y + 4 * (32 * t + i), acc[i])
            put_float(y + 4 * (4096 + 32 * t + i), more[i])

    return Kernel(chain, "l l l", 128, 16384 + 16)


def tiles_inputs(rng: np.random.Generator) -> Arrays:
    """Small whole numbers, so that all sums are exact; of the chain, its first product in bf16."""
    a, b = (to_bf16(rng.integers(-1, 2, (64, 64)).astype(np.float32)) for _ in range(2))
    return {"a": a, "b": b, "y": words(2, 128, 32)}


def fragment(whole: np.ndarray) -> np.ndarray:
    """A matrix of 64 x 64 as a warpgroup's threads hold it: (128, 32).

    PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16", of D.
    """
    t, i = np.arange(128)[:, None], np.arange(32)
    row = t // 32 * 16 + t % 32 // 4 + i % 4 // 2 * 8
    return f32(whole[row, i // 4 * 8 + t % 4 * 2 + i % 2])


def layout_want(layout: str, arrays: Arrays) -> Iterable[tuple]:
    """A B on top of t + i, and A B."""
    a, b = (from_bf16(arrays[name]).astype(float) for name in "ab")
    a = (a.T if layout[0] == "T" else a)[:, : 16 * STEPS]
    b = (b.T if layout[1] == "T" else b)[: 16 * STEPS]
    product = fragment(a @ b)
    on_top = f32(product + np.arange(128)[:, None] + np.arange(32))
    for k, want in enumerate((on_top, product)):
        yield f"wgmma {layout}, {('kept', 'from zeros')[k]}", "y", k, want.view(np.int32), BITS


def chain_want(arrays: Arrays) -> Iterable[tuple]:
    """A B^T, and 1 + 2 (A B^T) B."""
    a, b = (from_bf16(arrays[name]).astype(float) for name in "ab")
    product = a @ b.T
    yield "product_of_rows", "y", 0, fragment(product).view(np.int32), BITS
    yield "add_product", "y", 1, fragment(1 + 2 * product @ b).view(np.int32), BITS


def trade(y):
    """Warpgroups that trade registers, and count on."""
    t = int32(cuda.threadIdx.x)
    if t < 128:
        shrink()
    else:
        grow()
    put_int(y + 4 * t, 5 * t)


@cache
def trade_kernel() -> Kernel:
    """setmaxnreg."""
    return Kernel(trade, "l", 256)


TILE = (64, 64)
TWINS = {
    "instructions": table_twin((8, 0)),
    "Hopper's instructions": table_twin((9, 0, "a")),
    "numbered barriers": Twin(
        waits_kernel, lambda rng: {"y": words(32)},
        lambda arrays: [("barrier, barrier_arrive", "y", ..., 3 * LANE[::-1], BITS)]),
    "the barrier of the grid": Twin(
        meet_kernel, lambda rng: {"counter": np.zeros(1, np.int32), "x": words(3), "y": words(3)},
        lambda arrays: [("grid_barrier", "y", ..., np.full(3, 0x321, np.int32), BITS)], (3,)),
    "the copy engine": Twin(
        copies_kernel, copies_inputs, copies_want,
        boxes=(("two", (8, 64)), ("to_two", (8, 64)), ("sums", (8, 32)),
               ("four", (1, 1, 8, 64)), ("to_four", (1, 1, 8, 64)))),
    "a cluster": Twin(
        spread_kernel, spread_inputs, spread_want, (2,), boxes=(("two", (8, 64)),)),
    "registers": Twin(
        trade_kernel, lambda rng: {"y": words(256)},
        lambda arrays: [("set_registers", "y", ..., 5 * np.arange(256), BITS)]),
    "products in a chain": Twin(
        chain_kernel, tiles_inputs, chain_want, boxes=(("a", TILE), ("b", TILE))),
} | {
    f"products {layout}": Twin(
        partial(layout_kernel, layout), tiles_inputs, partial(layout_want, layout),
        boxes=(("a", TILE), ("b", TILE)))
    for layout in LAYOUTS
}  # fmt: skip


class Seen(NamedTuple):
    """How far a result is from what it should be, and how far it may be."""

    distance: float
    bound: Bound


def compare(twin: Twin, arrays: Arrays, before: Arrays, other: Arrays | None = None) -> dict:
    """What -> Seen, of the arrays after a launch; against NumPy, or against `other` arrays."""
    seen = {}
    for what, name, part, want, bound in twin.want(before):
        if other is not None:
            want = other[name][part].view(np.int32)
        seen[what] = Seen(bound.distance(arrays[name][part].view(np.int32), want), bound)
    return seen
