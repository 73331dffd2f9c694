# Made from book/07f-loss-and-update.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-update-loss
"""Cross-entropy in place: a row of logits becomes the gradient of its loss.

    logits, dlogits (rows, K * P) bf16 or float32: K heads of V columns, each padded to P
    targets, losses (rows, K)                     scale, sums (K,)

A row, in a kernel, is one head of one position; a block works on it. Numbers are float32 in
registers. A logit that is nan or +infinity makes the loss a nan, and so do a target that is no
token and a row of nothing but logits below -1e38. Left out: smoothing of targets, rows that do not
begin at a multiple of 16 bytes.
"""

import math
from functools import cache
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.block import block_max, block_sum
from nanoeuler.engines.gpu.gemm_plan import MULTIPROCESSORS
from nanoeuler.engines.gpu.instruction import cuda, float32, int32, int64, ptx
from nanoeuler.engines.gpu.kernel import Kernel, Launch
from nanoeuler.engines.gpu.ptx import (
    divide,
    exp2,
    high_bf16,
    larger,
    load_float,
    load_int,
    load_own_int4,
    log2,
    low_bf16,
    pack_bf16,
    reciprocal,
    store_float,
    store_int4,
)
from nanoeuler.errors import UserError

IGNORE = -1  # a target that is not counted, as in model.backward
NAN, NOTHING = math.nan, -math.inf
LOWEST = -1e38  # the largest logit before any is seen; times LOG2E it is still a float32
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
VECTOR = 16  # bytes that a thread moves at once

# int32 -> the float32 with these bits, and back
float_of = ptx("mov.b32 $0, $1;", "r", "f", True)
bits_of = ptx("mov.b32 $0, $1;", "f", "r", True)


class Row(NamedTuple):
    """A row, and a thread's part of it: vectors of 16 bytes, `threads` apart.

    vectors: of the row with its padding. lane: columns of a vector. wide: of float32.
    """

    address: int
    columns: int
    vectors: int
    target: int
    t: int
    threads: int
    lane: int
    wide: bool


def fetch(here, row, first, count):
    """A thread's vectors first, first + 1, ... into registers."""
    for i in range(count):
        n = int32((first + i) * row.threads + row.t)
        if n * row.lane < row.columns:
            a, b, c, d = load_own_int4(row.address + VECTOR * int64(n))
            here[4 * i], here[4 * i + 1], here[4 * i + 2], here[4 * i + 3] = a, b, c, d


def unpack(x, here, i, at, row):
    """Vector i of the registers, from column `at` on, as x; past the last one -infinity."""
    for j in range(4):
        if row.wide:
            x[j] = float_of(here[4 * i + j])
        else:
            x[2 * j] = low_bf16(here[4 * i + j])
            x[2 * j + 1] = high_bf16(here[4 * i + j])
    if at + row.lane > row.columns:
        for j in range(row.lane):
            if at + j >= row.columns:
                x[j] = float32(NOTHING)


def pack(here, i, x, row):
    """x into vector i of the registers."""
    for j in range(4):
        if row.wide:
            here[4 * i + j] = bits_of(x[j])
        else:
            here[4 * i + j] = pack_bf16(x[2 * j], x[2 * j + 1])


def part(x, top):
    """exp(x - top)."""
    return exp2(float32(float32(x - top) * float32(LOG2E)))


def highest(here, x, row, first, count, top):
    """The largest of `top` and a thread's logits in registers."""
    for i in range(count):
        at = int32(((first + i) * row.threads + row.t) * row.lane)
        if at < row.columns:
            unpack(x, here, i, at, row)
            for j in range(row.lane):
                top = larger(top, x[j])
    return top


def mass(here, x, row, first, count, top):
    """The sum of exp(x - top) of a thread's logits in registers."""
    total = float32(0)
    for i in range(count):
        at = int32(((first + i) * row.threads + row.t) * row.lane)
        if at < row.columns:
            unpack(x, here, i, at, row)
            for j in range(row.lane):
                total = float32(total + part(x[j], top))
    return total


def judge(here, x, row, top, total, address):
    """The thread that has the target's column writes the loss: log total - (x - top)."""
    n = divide(max(row.target, 0), row.lane)
    if n - row.threads * divide(n, row.threads) == row.t and 0 <= row.target < row.columns:
        a, b, c, d = load_own_int4(row.address + VECTOR * int64(n))
        here[0], here[1], here[2], here[3] = a, b, c, d
        unpack(x, here, 0, n * row.lane, row)
        for j in range(row.lane):
            if n * row.lane + j == row.target:
                store_float(address, float32(float32(LN2) * log2(total) + (top - x[j])))


def spread(here, x, i, n, row, top, weight, scale):
    """Vector n of the row, the i-th in registers, becomes gradients, in memory."""
    if n < row.vectors:
        at = int32(n * row.lane)
        unpack(x, here, i, at, row)
        for j in range(row.lane):
            x[j] = float32(part(x[j], top) * weight)                         # (1), (3)
        if at <= row.target < at + row.lane:
            for j in range(row.lane):
                if at + j == row.target:
                    x[j] = float32(x[j] - scale)                             # (2)
        pack(here, i, x, row)
        a, b, c, d = here[4 * i], here[4 * i + 1], here[4 * i + 2], here[4 * i + 3]
        store_int4(row.address + VECTOR * int64(n), a, b, c, d)


def erase(row):
    """Zeros, for a row whose target is not counted."""
    for n in range(row.t, row.vectors, row.threads):
        store_int4(row.address + VECTOR * int64(n), 0, 0, 0, 0)


class Form(NamedTuple):
    """What is settled when a kernel is compiled.

    threads: of a block. count: vectors that a thread has in registers. held: whether these are all
    of a row, which then is read once. wide: float32. gradient: whether it replaces the logits.
    ahead: whether a block does row after row and fetches the next one while it writes.
    """

    threads: int
    count: int
    held: bool
    wide: bool = False
    gradient: bool = True
    ahead: bool = False


@cache
def loss_kernel(form: Form) -> Kernel:
    """Index table: block -> row; thread, i -> its i-th vector. Bytes of a logit: read once (held)
    or twice, written once."""
    threads, count, held, wide, gradient, _ = form
    words, lane, warps = 4 * count, 4 if wide else 8, threads // 32

    def loss(logits, targets, scales, losses, start, heads, columns, vectors):
        t, n = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        target = load_int(targets + 4 * int64(start + n))
        address = logits + VECTOR * int64(n) * vectors
        row = Row(address, columns, vectors, target, t, threads, lane, wide)
        its_loss = losses + 4 * int64(start + n)
        if target == IGNORE:
            if gradient:
                erase(row)
            if t == 0:
                store_float(its_loss, float32(0))
            return
        here, x = cuda.local.array(words, int32), cuda.local.array(8, float32)
        end = count if held else divide(vectors + threads - 1, threads)
        top, total = float32(LOWEST), float32(0)
        for first in range(0, end, count):
            fetch(here, row, first, count)
            new = highest(here, x, row, first, count, top)
            total = float32(total * part(top, new) + mass(here, x, row, first, count, new))
            top = new
        all_top = block_max(top, float32(LOWEST), warps)
        total = block_sum(float32(total * part(top, all_top)), warps)
        if t == 0 and (target < 0 or target >= columns):
            store_float(its_loss, float32(NAN))
        spare = cuda.local.array(4, int32)
        judge(spare, x, row, all_top, total, its_loss)
        if gradient:
            scale = load_float(scales + 4 * int64(start + n - heads * divide(start + n, heads)))
            weight = float32(scale * reciprocal(total))
            for first in range(0, end, count):
                if not held:
                    fetch(here, row, first, count)
                for i in range(count):
                    vector = int32((first + i) * threads + t)
                    spread(here, x, i, vector, row, all_top, weight, scale)

    return Kernel(loss, "l l l l r r r r", threads, target=(8, 0))


@cache
def ahead_kernel(form: Form) -> Kernel:
    """As `loss_kernel`, of a form that holds rows: block b does rows b, b + blocks, ..."""
    threads, count, held, wide, gradient, _ = form
    words, lane, warps = 4 * count, 4 if wide else 8, threads // 32

    def loss_ahead(logits, targets, scales, losses, start, heads, columns, vectors, rows):
        t, n, step = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        here, x = cuda.local.array(words, int32), cuda.local.array(8, float32)
        spare = cuda.local.array(4, int32)
        target = load_int(targets + 4 * int64(start + n))
        address = logits + VECTOR * int64(n) * vectors
        fetch(here, Row(address, columns, vectors, target, t, threads, lane, wide), 0, count)
        while n < rows:
            row = Row(address, columns, vectors, target, t, threads, lane, wide)
            its_loss = losses + 4 * int64(start + n)
            k = int32(start + n - heads * divide(start + n, heads))
            n = int32(n + step)
            address = logits + VECTOR * int64(n) * vectors
            limit = columns if n < rows else int32(0)  # of what is fetched
            if n < rows:
                target = load_int(targets + 4 * int64(start + n))
            if row.target == IGNORE:
                erase(row)
                if t == 0:
                    store_float(its_loss, float32(0))
                fetch(here, Row(address, limit, vectors, target, t, threads, lane, wide), 0, count)
            else:
                top = highest(here, x, row, 0, count, float32(LOWEST))
                total = mass(here, x, row, 0, count, top)
                all_top = block_max(top, float32(LOWEST), warps)
                total = block_sum(float32(total * part(top, all_top)), warps)
                if t == 0 and (row.target < 0 or row.target >= columns):
                    store_float(its_loss, float32(NAN))
                judge(spare, x, row, all_top, total, its_loss)
                scale = load_float(scales + 4 * int64(k))
                weight = float32(scale * reciprocal(total))
                for i in range(count):
                    vector = int32(i * threads + t)
                    spread(here, x, i, vector, row, all_top, weight, scale)
                    if vector * lane < limit:
                        a, b, c, d = load_own_int4(address + VECTOR * int64(vector))
                        here[4 * i], here[4 * i + 1], here[4 * i + 2], here[4 * i + 3] = a, b, c, d

    return Kernel(loss_ahead, "l l l l r r r r r", threads, target=(8, 0))


HOLD = 8          # vectors in a thread's registers at most, for a row that is read once
SIZES = 128, 256, 512, 1024  # threads of a block
LONG = 512, 4     # threads and vectors of a row that is read twice


def form_for(columns: int, wide: bool, gradient: bool = True) -> Form:
    """The form for rows of so many columns, padding included."""
    vectors = -(-columns // (4 if wide else 8))
    for threads in SIZES:
        if vectors <= threads * HOLD:
            return Form(threads, -(-vectors // threads), True, wide, gradient)
    return Form(*LONG, False, wide, gradient)


def loss_launch(
    logits: Any, targets: Any, scale: Any, losses: Any, columns: int, first: int = 0,
    gradient: bool = True, form: Form | None = None,
) -> Launch:  # fmt: skip
    """The losses of rows first, first + 1, ... of a batch, whose logits (n, K * P) these are.

    targets int32 and losses float32 (rows, K) of the whole batch; scale float32 (K,); columns: V of
    the P. Writes the losses, and with `gradient` dlogits over all of logits.
    """
    (rows, width), (whole, heads) = logits.shape, targets.shape
    wide = str(logits.dtype) == "float32"
    lane = VECTOR // logits.dtype.itemsize
    if not wide and str(logits.dtype) != "uint16" or logits.strides[0] != width * VECTOR // lane:
        raise UserError(f"logits are dense rows of bf16 (uint16) or float32, not {logits.dtype}")
    if width % (heads * lane) or not 1 <= columns <= width // heads:
        raise UserError(
            f"{heads} heads of {columns} columns, each padded to a multiple of {lane}, do not make "
            f"rows of {width}"
        )
    if losses.shape != targets.shape or scale.shape != (heads,) or not 0 <= first <= whole - rows:
        raise UserError(
            f"targets {targets.shape}, losses {losses.shape}, scale {scale.shape} do not fit "
            f"{rows} rows from {first} on"
        )
    form = form or form_for(width // heads, wide, gradient)
    vectors = width // heads // lane
    args = logits, targets, scale, losses, first * heads, heads, columns, vectors
    if form.ahead:
        blocks = min(rows * heads, MULTIPROCESSORS * (1024 // form.threads))
        return Launch(ahead_kernel(form), (blocks,), (*args, rows * heads))
    return Launch(loss_kernel(form), (rows * heads,), args)


ADDERS = 512  # threads of a block that adds losses


def add_losses(losses, sums, rows, heads):
    """sums (heads,) of losses (rows, heads): block k adds column k, a thread every ADDERS-th."""
    t, k, total = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), float32(0)
    for i in range(t, rows, ADDERS):
        total = float32(total + load_float(losses + 4 * (int64(i) * heads + k)))
    total = block_sum(total, ADDERS // 32)
    if t == 0:
        store_float(sums + 4 * int64(k), total)


ADD_LOSSES = Kernel(add_losses, "l l r r", ADDERS, target=(8, 0))


def sums_launch(losses: Any, sums: Any) -> Launch:
    """sums (K,) = the sums of losses (rows, K) over the rows, float32, added in a fixed order."""
    rows, heads = losses.shape
    if sums.shape != (heads,) or str(sums.dtype) != "float32":
        raise UserError(f"sums are float32 ({heads},), not {sums.dtype} {sums.shape}")
    return Launch(ADD_LOSSES, (heads,), (losses, sums, rows, heads))
