# Made from book/11c-loss-and-update.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-update-loss
"""Cross-entropy in place: a row of logits becomes the gradient of its loss.

    logits, dlogits (rows, K * P) bf16 or float32: K heads of V columns, each padded to P
    targets, losses (rows, K)                     scale, sums (K,)

A row, in a kernel, is one head of one position; a block works on it. Numbers are float32 in
registers. If a row counts, a logit that is nan or +infinity, a target that is no token, or nothing
but logits below -1e38 makes the loss a nan or infinite, so no step is taken. Left out: smoothing of
targets, rows that do not begin at a multiple of 16 bytes.
"""

import math
from functools import cache
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.card import SHARED, SYSTEM, THREADS, limit
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int8, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.engines.gpu.lang.vectors import ACCESS, SIZES, expect, kind_of
from nanoeuler.engines.gpu.rows.block_reduce import WARPS, block_max, block_sum
from nanoeuler.errors import UserError


class Row(NamedTuple):
    """A row, and a thread's part of it: vectors of 16 bytes, `threads` apart.

    base: where the row stands in shared memory, -1: it does not. vectors: with the padding.
    lane: columns of a vector. wide: whether they are float32.
    """

    address: int
    base: int
    columns: int
    vectors: int
    t: int
    threads: int
    lane: int
    wide: bool


IGNORE = -1  # a target that is not counted, as in model.backward
NAN = math.nan
NOTHING, NOTHINGS = -0x800000, -0x7F0080  # the bits of -infinity, and of two in bf16, as int32
LOWEST = -1e38  # the largest logit before any is seen; times LOG2E it is still a float32
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
copy_wait_all = ptx.copy_wait(0)  # of the thread's own copies


def vector(row, i):
    """The number of a thread's i-th vector."""
    return int32(i * row.threads + row.t)


def blank(word, left, wide):
    """A word of which only the first `left` columns are there: the others become -infinity."""
    if wide:
        return word if left > 0 else int32(NOTHING)
    if left == 1:
        return int32(word & 0xFFFF | NOTHING)
    return word if left > 1 else int32(NOTHINGS)


def fetch(here, row, first, count):
    """A thread's vectors first, first + 1, ... into registers; -infinity past the last column."""
    for i in range(count):
        n = vector(row, first + i)
        left = int32(row.columns - n * row.lane)
        a, b, c, d = int32(0), int32(0), int32(0), int32(0)
        if left > 0 and row.base >= 0:
            a, b, c, d = ptx.load_shared_int4(int32(row.base + ACCESS * n))
        elif left > 0:
            a, b, c, d = ptx.load_own_int4(row.address + ACCESS * int64(n))
        if left < row.lane:
            each = row.lane >> 2  # columns of a word
            a, b = blank(a, left, row.wide), blank(b, left - each, row.wide)
            c, d = blank(c, left - 2 * each, row.wide), blank(d, left - 3 * each, row.wide)
        here[4 * i], here[4 * i + 1], here[4 * i + 2], here[4 * i + 3] = a, b, c, d


def unpack(x, here, i, wide):
    """Vector i of the registers as numbers x."""
    for j in range(4):
        if wide:
            x[j] = ptx.float_of(here[4 * i + j])
        else:
            x[2 * j] = ptx.low_bf16(here[4 * i + j])
            x[2 * j + 1] = ptx.high_bf16(here[4 * i + j])


def pack(here, i, x, wide):
    """Numbers x into vector i of the registers."""
    for j in range(4):
        if wide:
            here[4 * i + j] = ptx.bits_of(x[j])
        else:
            here[4 * i + j] = ptx.pack_bf16(x[2 * j], x[2 * j + 1])


def highest(here, count, wide, top):
    """The largest of `top` and the logits in registers."""
    if wide:
        for i in range(4 * count):
            top = ptx.larger(top, ptx.float_of(here[i]))
        return top
    both = here[0]
    for i in range(1, 4 * count):
        both = ptx.larger_pair(both, here[i])
    return ptx.larger(top, ptx.larger(ptx.low_bf16(both), ptx.high_bf16(both)))


def power(x, shift):
    """exp(x - top), for shift = top * log2(e); the shift's rounding is one factor for a row."""
    return ptx.exp2(ptx.fma(x, float32(LOG2E), float32(-shift)))


def mass(here, x, row, first, count, shift):
    """The sum of exp(x - top) of a thread's logits in registers."""
    total = float32(0)
    for i in range(count):
        if vector(row, first + i) * row.lane < row.columns:
            unpack(x, here, i, row.wide)
            for j in range(row.lane):
                total = float32(total + power(x[j], shift))
    return total


def gather(here, x, row, end, count, warps):
    """A row's shift and the sum of exp(x - top), on all threads; `count` vectors at a time."""
    top, total = float32(LOWEST), float32(0)
    own = float32(top * float32(LOG2E))
    for first in range(0, end, count):
        fetch(here, row, first, count)
        top, before = highest(here, count, row.wide, top), own
        own = float32(top * float32(LOG2E))
        part = mass(here, x, row, first, count, own)
        total = float32(total * ptx.exp2(float32(before - own)) + part)
    shift = float32(block_max(top, float32(LOWEST), warps) * float32(LOG2E))
    return shift, block_sum(float32(total * ptx.exp2(float32(own - shift))), warps)


def judge(here, x, row, target, shift, total, address):
    """The thread that has the target's column writes the loss: log total - (x - top)."""
    n = ptx.divide(max(target, 0), row.lane)
    # n % threads, in 32 bits
    if n - row.threads * ptx.divide(n, row.threads) == row.t and 0 <= target < row.columns:
        a, b, c, d = ptx.load_own_int4(row.address + ACCESS * int64(n))
        here[0], here[1], here[2], here[3] = a, b, c, d
        unpack(x, here, 0, row.wide)
        for j in range(row.lane):
            if n * row.lane + j == target:
                below = ptx.fma(x[j], float32(LOG2E), float32(-shift))
                ptx.store_float(address, float32(float32(LN2) * float32(ptx.log2(total) - below)))
    if row.t == 0 and (target < 0 or target >= row.columns):
        ptx.store_float(address, float32(NAN))


class Slope(NamedTuple):
    """A row's gradient: exp2(x log2(e) - shift) times weight, minus scale at the target."""

    target: int
    shift: float
    weight: float
    scale: float


def spread(here, x, i, n, row, by):
    """Vector n of the row, the i-th in registers, becomes gradients, in memory."""
    if n < row.vectors:
        unpack(x, here, i, row.wide)
        for j in range(row.lane):
            x[j] = float32(power(x[j], by.shift) * by.weight)                # (1), (3)
        hit = int32(by.target - n * row.lane)
        if 0 <= hit < row.lane:
            for j in range(row.lane):
                if j == hit:
                    x[j] = float32(x[j] - by.scale)                          # (2)
        pack(here, i, x, row.wide)
        a, b, c, d = here[4 * i], here[4 * i + 1], here[4 * i + 2], here[4 * i + 3]
        ptx.store_int4(row.address + ACCESS * int64(n), a, b, c, d)


def erase(row):
    """Zeros, for a row whose target is not counted."""
    for n in range(row.t, row.vectors, row.threads):
        ptx.store_int4(row.address + ACCESS * int64(n), 0, 0, 0, 0)


def bring(row):
    """A thread's part of the row to shared memory; other threads' parts it never reads."""
    for n in range(row.t, row.vectors, row.threads):
        ptx.copy_async(int32(row.base + ACCESS * n), row.address + ACCESS * int64(n))
    ptx.copy_commit()
    copy_wait_all()


class Form(NamedTuple):
    """What is settled when a kernel is compiled.

    place: where a row is held until it is read again: "registers", "shared" memory, or "nowhere":
    then it is read from memory twice. threads: of a block. count: a thread's vectors in
    registers at a time: all, if "registers". vectors: of a row in shared memory, at most.
    wide: float32. gradient: whether it replaces the logits. resident: blocks whose registers
    must fit on a multiprocessor.
    """

    place: str
    threads: int
    count: int
    vectors: int = 0
    wide: bool = False
    gradient: bool = True
    resident: int = 1

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: the row, and a vector more to align it."""
        return ACCESS * (self.vectors + 1) if self.place == "shared" else 0


class Arrays(NamedTuple):
    """Addresses of what a launch reads and writes."""

    logits: int
    targets: int
    scales: int
    losses: int


@cache
def loss_kernel(form: Form) -> Kernel:
    """Index table: block -> row; thread, i -> its i-th vector. Logits are read once, or twice."""
    place, threads, count, _, wide, gradient, resident = form
    words, lane, warps = 4 * count, 4 if wide else 8, threads // 32
    shared, once = place == "shared", place == "registers"

    def loss(arrays: Arrays, start, heads, columns, vectors):
        t, n = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        target = ptx.load_int(arrays.targets + 4 * int64(start + n))
        address = arrays.logits + ACCESS * int64(n) * vectors
        its_loss = arrays.losses + 4 * int64(start + n)
        base = int32(-1)
        if shared:
            base = int32((ptx.shared_address(cuda.shared.array(0, int8)) + ACCESS - 1) & -ACCESS)
        row = Row(address, base, columns, vectors, t, threads, lane, wide)
        if target == IGNORE:
            if gradient:
                erase(row)
            if t == 0:
                ptx.store_float(its_loss, float32(0))
            return
        if shared:
            bring(row)
        here, x = cuda.local.array(words, int32), cuda.local.array(8, float32)
        spare = cuda.local.array(4, int32)
        end = count if once else ptx.divide(vectors + threads - 1, threads)
        shift, total = gather(here, x, row, end, count, warps)
        judge(spare, x, row, target, shift, total, its_loss)
        if gradient:
            head = start + n - heads * ptx.divide(start + n, heads)
            scale = ptx.load_float(arrays.scales + 4 * int64(head))
            by = Slope(target, shift, float32(scale * ptx.reciprocal(total)), scale)
            for first in range(0, end, count):
                if not once:
                    fetch(here, row, first, count)
                for i in range(count):
                    spread(here, x, i, vector(row, first + i), row, by)

    return Kernel(loss, "l l l l r r r r", threads, form.shared, resident=resident, target=(8, 0))


HOLD = 4          # vectors in a thread's registers at most, for a row that is held there
BLOCKS = 128, 256, 512  # threads of its block
# Threads (measured: the log book's table), and vectors that each has in registers at a time, of
# rows in shared memory and of rows that are read twice.
WAITING, AGAIN = (1024, 2), (512, 4)
ROOM = 112 << 10  # bytes of a row in shared memory at most: an H200's multiprocessor has two such
PLACES = 2 * 4 * WARPS  # bytes that block_max and block_sum have beside it


def form_for(
    columns: int, wide: bool, gradient: bool = True, capability: tuple[int, int] = (9, 0)
) -> Form:
    """The form for rows of so many columns, padding included, on a card of this capability."""
    vectors = -(-columns // (4 if wide else 8))
    for threads in BLOCKS:
        if vectors <= threads * HOLD:
            count = -(-vectors // threads)
            return Form("registers", threads, count, wide=wide, gradient=gradient)
    most = limit(SHARED, capability)
    form = Form("shared", *WAITING, vectors, wide, gradient)
    size = form.shared + PLACES
    if vectors * ACCESS > ROOM or size > most:
        return Form("nowhere", *AGAIN, wide=wide, gradient=gradient)
    fit = (most + SYSTEM) // (size + SYSTEM), limit(THREADS, capability) // form.threads
    return form._replace(resident=min(2, *fit))


def loss_launch(
    logits: Any, targets: Any, scale: Any, losses: Any, columns: int, first: int = 0,
    form: Form | None = None,
) -> Launch:  # fmt: skip
    """The losses of rows first, first + 1, ... of a batch, whose logits (n, K * P) these are.

    targets int32 and losses float32 (rows, K) of the whole batch; scale float32 (K,); columns: V of
    the P. Writes the losses, and dlogits over all of logits unless the form says otherwise. form:
    of `form_for`; None is that of a gradient on Hopper.
    """
    (rows, width), (whole, heads) = logits.shape, targets.shape
    kind = kind_of(logits)
    lane = ACCESS // SIZES[kind]
    expect("logits", logits, (rows, width), kind)
    expect("targets", targets, (whole, heads), "int32")
    expect("scale", scale, (heads,), "float32")
    expect("losses", losses, (whole, heads), "float32")
    if width % (heads * lane) or not 1 <= columns <= width // heads:
        raise UserError(
            f"{heads} heads of {columns} columns, each padded to a multiple of {lane}, do not make "
            f"rows of {width}"
        )
    if not 0 <= first <= whole - rows:
        raise UserError(f"targets of {whole} rows have none for {rows} from {first} on")
    vectors = width // heads // lane
    form = form or form_for(width // heads, kind == "float32")
    args = logits, targets, scale, losses, first * heads, heads, columns, vectors
    return Launch(loss_kernel(form), (rows * heads,), args)


ADDERS = 512  # threads of a block that adds losses


def add_losses(losses, sums, rows, heads):
    """sums (heads,) of losses (rows, heads): block k adds column k, a thread every ADDERS-th."""
    t, k, total = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), float32(0)
    for i in range(t, rows, ADDERS):
        total = float32(total + ptx.load_float(losses + 4 * (int64(i) * heads + k)))
    total = block_sum(total, ADDERS // 32)
    if t == 0:
        ptx.store_float(sums + 4 * int64(k), total)


# One block for each head, for any number of losses.
ADD_LOSSES = Kernel(add_losses, "l l r r", ADDERS, target=(8, 0))


def sums_launch(losses: Any, sums: Any) -> Launch:
    """sums (K,) = the sums of losses (rows, K) over the rows, float32, added in a fixed order."""
    rows, heads = losses.shape
    expect("losses", losses, (rows, heads), "float32")
    expect("sums", sums, (heads,), "float32")
    return Launch(ADD_LOSSES, (heads,), (losses, sums, rows, heads))
