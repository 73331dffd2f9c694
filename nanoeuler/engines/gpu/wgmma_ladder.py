# Made from book/11a-a-ladder-on-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-wgmma-tile
"""A ladder of products on Hopper's tensor cores: C = A B^T, one idea a rung, each a whole kernel.

A (m, k), B (n, k) and C (m, n) are bf16 as uint16, sums are float32. Every rung takes all sizes
whose n and k are multiples of 8; `product` makes its launch. Left out: everything that the room
`gemm` has beside the loop, such as other layouts, other epilogues and tiles cut along k.

    RUNGS   by hand -> TMA -> ring -> producer -> persistent -> multicast -> ping-pong
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from nanoeuler.engines.gpu.lang import hopper, ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int8, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, Map, cover
from nanoeuler.engines.gpu.tile.ring import ALIGN, advance, aligned, skip
from nanoeuler.engines.gpu.tile.store import put_bf16
from nanoeuler.errors import UserError

ROWS, COLUMNS = 64, 256  # of C, which a warpgroup multiplies: PTX ISA, the largest wgmma
DEPTH = 64  # of a k-block: 128 bytes of bf16, the width of a swizzled row
SUMS = ROWS * COLUMNS // 128  # float32 registers of each thread of a warpgroup
A_BYTES, B_BYTES = ROWS * DEPTH * 2, COLUMNS * DEPTH * 2  # of a k-block
# Rows along k, swizzled; groups of eight are 1024 bytes apart. This layout ignores the 16.
OPERAND = hopper.descriptor(16, 1024)

# acc, A, B, keep: acc = A B^T of a k-block if keep is 0, or acc += A B^T; begun as one group, with
# fence and commit. 2, 2: a step of 16 along k is 32 bytes, two units of a descriptor, in both.
# "NT": both are stored along k (see `wgmma` in the appendix).
multiply = hopper.wgmma(COLUMNS, DEPTH // 16, 2, 2, "NT")
# acc: wait until all groups are complete
finish = hopper.wgmma_wait(SUMS)


def operand(address):
    """The descriptor of an operand in shared memory. Of the address it holds the low 18 bits."""
    return int64(OPERAND) | int64((address & 0x3FFFF) >> 4)


def copy_rows(to, source, first, count, k, shape, t):
    """Rows first to first + count - 1 of a matrix (rows, width), columns k to k + 63, swizzled into
    shared memory by 128 threads; zeros outside."""
    rows, width = shape
    x = int32(k + 8 * (t & 7))
    for i in range(count // 16):
        r = int32((t >> 3) + 16 * i)
        place = int32(to + r * 128 + ((t ^ r) & 7) * 16)
        if first + r < rows and x < width:
            chunk = ptx.load_int4(source + (int64(first + r) * width + x) * 2)
            ptx.store_shared_int4(place, chunk[0], chunk[1], chunk[2], chunk[3])
        else:
            ptx.store_shared_int4(place, 0, 0, 0, 0)


def write(acc, c, row, column, shape, t):
    """A warpgroup's sums to C (m, n), whose tile begins at (row, column): two columns at a time."""
    m, n = shape
    r = int32(row + (t >> 5) * 16 + ((t & 31) >> 2))
    for j in range(COLUMNS // 8):
        x = int32(column + 8 * j + 2 * (t & 3))
        at = c + (int64(r) * n + x) * 2
        if x < n and r < m:
            ptx.store_int(at, ptx.pack_bf16(acc[4 * j], acc[4 * j + 1]))
        if x < n and r + 8 < m:
            ptx.store_int(at + int64(n) * 16, ptx.pack_bf16(acc[4 * j + 2], acc[4 * j + 3]))


def by_hand(a, b, c, m, n, k):
    """Threads copy a k-block, the tensor cores multiply it, and so on: nothing overlaps."""
    shared = cuda.shared.array(0, int8)
    base, t = aligned(ptx.shared_address(shared)), int32(cuda.threadIdx.x)
    row, column = int32(cuda.blockIdx.y * ROWS), int32(cuda.blockIdx.x * COLUMNS)
    acc = cuda.local.array(SUMS, float32)
    for at in range(0, k, DEPTH):
        copy_rows(base, b, column, COLUMNS, at, (n, k), t)
        copy_rows(base + B_BYTES, a, row, ROWS, at, (m, k), t)
        hopper.proxy_fence()  # the tensor cores see what this thread stored
        cuda.syncthreads()  # all threads have stored
        multiply(acc, operand(base + B_BYTES), operand(base), at)
        finish(acc)  # it is complete for all four warps at once
    write(acc, c, row, column, (m, n), t)


BOX = 8192  # bytes: 64 rows of 128, a box on its way out; each warpgroup has two


class Rung(NamedTuple):
    """A kernel of the ladder, and its shape.

    function: see `product` for its arguments. maps: whether it gets tensor maps, not addresses.
    threads: of a block. rows: of C in a block's tile. stages: k-blocks that shared memory holds.
    cluster: blocks that share B. persistent: whether a block goes from tile to tile.
    """

    function: Callable[..., None]
    maps: bool = True
    threads: int = 128
    rows: int = ROWS
    stages: int = 1
    cluster: int = 1
    persistent: bool = False

    @property
    def stage(self) -> int:
        """Bytes of a k-block of B and of A, in this order."""
        return B_BYTES + self.rows * DEPTH * 2

    @property
    def shared(self) -> int:
        """Bytes of a block's shared memory: alignment, stages, boxes, 256 for mbarriers."""
        return ALIGN + self.stages * self.stage + self.threads // 128 * 2 * BOX + 256


@cache
def rung_kernel(name: str) -> Kernel:
    """The kernel of a rung."""
    rung = RUNGS[name]
    numbers = "r r r" if rung.persistent or not rung.maps else "r"
    return Kernel(rung.function, f"l l l {numbers}", rung.threads, rung.shared, rung.cluster)


def verify(name: str, a: Any, b: Any, c: Any) -> None:
    """UserError unless C = A B^T is a product that the rung `name` takes."""
    if name not in RUNGS:
        raise UserError(f"rungs are {', '.join(RUNGS)}, not {name!r}")
    if any(len(x.shape) != 2 or str(x.dtype) != "uint16" for x in (a, b, c)):
        raise UserError("A (m, k), B (n, k) and C (m, n) are matrices of uint16 (bf16)")
    (m, k), n = a.shape, b.shape[0]
    if b.shape != (n, k) or c.shape != (m, n):
        raise UserError(f"C is {(m, n)} for A {a.shape} and B (n, {k}), not {c.shape}, {b.shape}")
    if n % 8 or k % 8 or not m * n * k:
        raise UserError(f"n and k are multiples of 8, and nothing is empty: not {m} x {n} x {k}")
    if any(tuple(x.strides) != (2 * x.shape[1], 2) for x in (a, b, c)):
        raise UserError("A, B and C are dense, in C order: copy them first")


def product(name: str, a: Any, b: Any, c: Any, multiprocessors: int = 132) -> Launch:
    """C = A B^T by the rung `name`: a (m, k), b (n, k), c (m, n) bf16 as uint16, dense in C order.

    n and k are multiples of 8. multiprocessors: how many blocks a persistent rung has at most.

    | rung       | arguments of its kernel                                                       |
    |------------|-------------------------------------------------------------------------------|
    | by hand    | addresses of A, B, C; m, n, k                                                 |
    | last 3     | maps of A, B, C; tiles of a cluster down and across C, k-blocks               |
    | others     | maps of A, B, C; k-blocks                                                     |

    Numerics: float32 sums in order of k, 16 at once; rounded once to bf16; the same in every run.
    """
    verify(name, a, b, c)
    rung, kernel, (m, k), n = RUNGS[name], rung_kernel(name), a.shape, b.shape[0]
    down, across, blocks = cover(m, rung.rows * rung.cluster), cover(n, COLUMNS), cover(k, DEPTH)
    if not rung.maps:
        return Launch(kernel, (across, down), (a, b, c, m, n, k))
    b_rows = COLUMNS // rung.cluster  # a block fetches its share
    maps = Map(a, (rung.rows, DEPTH)), Map(b, (b_rows, DEPTH)), Map(c, (ROWS, 64))
    if not rung.persistent:
        return Launch(kernel, (across, down), (*maps, blocks))
    clusters = max(1, min(multiprocessors // rung.cluster, down * across))
    return Launch(kernel, (clusters * rung.cluster,), (*maps, down, across, blocks))


# %% sec-wgmma-tma
def fetch(to, full, map_a, map_b, k, row, column):
    """Ask for a k-block of B and of A, which will be at `to`; their bytes count on `full`."""
    hopper.tma_load(to, map_b, k, column, full)
    hopper.tma_load(to + B_BYTES, map_a, k, row, full)


def store(acc, boxes, map_c, row, column, t):
    """The sums of thread t's warpgroup to C, whose tile begins at (row, column)."""
    group, first = int32(1 + (t >> 7)), int32(boxes + (t >> 7) * (2 * BOX))
    for strip in range(COLUMNS // 64):
        box = int32(first + (strip & 1) * BOX)
        if t & 127 == 0:  # in Python & binds tighter than ==
            hopper.bulk_wait_read()  # the older of the two boxes has left
        ptx.barrier(group, 128)  # and all threads know
        put_bf16(acc, 32 * strip, box, int32(t & 127))
        hopper.proxy_fence()  # the copy engine sees what this thread stored
        ptx.barrier(group, 128)  # all threads have stored
        if t & 127 == 0:
            hopper.tma_store(map_c, column + 64 * strip, row, box)
            hopper.bulk_commit()


STAGE = B_BYTES + A_BYTES  # bytes of a k-block of 256 and of 64 rows


def by_tma(map_a, map_b, map_c, blocks):
    """The copy engine brings a k-block, the tensor cores multiply it, and so on."""
    shared = cuda.shared.array(0, int8)
    base, t = aligned(ptx.shared_address(shared)), int32(cuda.threadIdx.x)
    boxes, full = int32(base + STAGE), int32(base + STAGE + 2 * BOX)
    row, column = int32(cuda.blockIdx.y * ROWS), int32(cuda.blockIdx.x * COLUMNS)
    if t == 0:
        hopper.mbarrier_init(full, 1)
        hopper.mbarrier_init_fence()
        acquire(map_a, map_b, map_c)
    cuda.syncthreads()  # nobody waits at a barrier that isn't there
    acc = cuda.local.array(SUMS, float32)
    for i in range(blocks):
        if t == 0:
            hopper.mbarrier_expect(full, STAGE)
            fetch(base, full, map_a, map_b, int32(i * DEPTH), row, column)
        hopper.mbarrier_wait(full, i & 1)
        multiply(acc, operand(base + B_BYTES), operand(base), i)
        finish(acc)
    store(acc, boxes, map_c, row, column, t)
    if t == 0:
        hopper.bulk_wait()  # shared memory stays until the last box has left


def acquire(map_a, map_b, map_c):
    """The maps are in global memory: acquire what the host wrote there, before their first use."""
    hopper.map_acquire(map_a)
    hopper.map_acquire(map_b)
    hopper.map_acquire(map_c)


# %% sec-wgmma-ring
def make_ring(stages: int) -> Callable[..., None]:
    """A kernel that multiplies a k-block while the next `stages` - 1 are on their way."""

    def ring(map_a, map_b, map_c, blocks):
        shared = cuda.shared.array(0, int8)
        base, t = aligned(ptx.shared_address(shared)), int32(cuda.threadIdx.x)
        boxes, bars = int32(base + stages * STAGE), int32(base + stages * STAGE + 2 * BOX)
        row, column = int32(cuda.blockIdx.y * ROWS), int32(cuda.blockIdx.x * COLUMNS)
        if t == 0:
            for s in range(stages):
                hopper.mbarrier_init(bars + 8 * s, 1)
            hopper.mbarrier_init_fence()
            acquire(map_a, map_b, map_c)
            for s in range(min(stages, blocks)):
                hopper.mbarrier_expect(bars + 8 * s, STAGE)
                fetch(base + s * STAGE, bars + 8 * s, map_a, map_b, int32(s * DEPTH), row, column)
        cuda.syncthreads()
        acc = cuda.local.array(SUMS, float32)
        stage, phase, last = int32(0), int32(0), int32(0)
        for i in range(blocks):
            hopper.mbarrier_wait(bars + 8 * stage, phase)
            place, ahead = int32(base + stage * STAGE), int32(i - 1 + stages)
            multiply(acc, operand(place + B_BYTES), operand(place), i)
            hopper.wgmma_wait_previous()  # k-block i - 1 has been read
            if t == 0 and i > 0 and ahead < blocks:
                full, to = int32(bars + 8 * last), int32(base + last * STAGE)
                hopper.mbarrier_expect(full, STAGE)
                fetch(to, full, map_a, map_b, int32(ahead * DEPTH), row, column)
            last = stage
            stage, phase = advance(stage, phase, stages)
        finish(acc)
        store(acc, boxes, map_c, row, column, t)
        if t == 0:
            hopper.bulk_wait()

    return ring


# %% sec-wgmma-roles
CONSUMERS = 256  # threads of two warpgroups; the producer's warp comes after them
STAGES = 4  # 192 KiB: all there's room for; three products take 3072 ticks, over FETCH
WIDE = B_BYTES + 2 * A_BYTES  # bytes of a k-block of 256 and of 128 rows


def prepare(bars, stages, readers):
    """The mbarriers of a ring, full at 16 s and empty at 16 s + 8, by the first of all threads."""
    if cuda.threadIdx.x == 0:
        for s in range(stages):
            hopper.mbarrier_init(bars + 16 * s, 1)
            hopper.mbarrier_init(bars + 16 * s + 8, readers)
        hopper.mbarrier_init_fence()


def release(empty, t):
    """A warpgroup gives a stage back, by one of its threads."""
    if t & 127 == 0:
        hopper.mbarrier_arrive(empty)


def make_accumulate(stages: int, size: int, release: Callable[..., None]) -> Callable[..., Any]:
    """accumulate(acc, base, bars, stage, phase, blocks, t): a tile's sums from the next k-blocks of
    a ring; returns its next stage and parity. t: 0 to 127 the first, then the second consumer."""

    def accumulate(acc, base, bars, stage, phase, blocks, t):
        last = stage
        for i in range(blocks):
            hopper.mbarrier_wait(bars + 16 * stage, phase)
            place = int32(base + stage * size)
            multiply(acc, operand(place + B_BYTES + (t >> 7) * A_BYTES), operand(place), i)
            hopper.wgmma_wait_previous()
            if i > 0:
                release(bars + 16 * last + 8, t)
            last = stage
            stage, phase = advance(stage, phase, stages)
        finish(acc)
        release(bars + 16 * last + 8, t)
        return stage, phase

    return accumulate


accumulate = make_accumulate(STAGES, WIDE, release)  # of 128 x 256, for a block by itself


def with_producer(map_a, map_b, map_c, blocks):
    """A warp fetches, two warpgroups multiply 64 rows each."""
    shared = cuda.shared.array(0, int8)
    base, t = aligned(ptx.shared_address(shared)), int32(cuda.threadIdx.x)
    boxes, bars = int32(base + STAGES * WIDE), int32(base + STAGES * WIDE + 4 * BOX)
    row, column = int32(cuda.blockIdx.y * (2 * ROWS)), int32(cuda.blockIdx.x * COLUMNS)
    prepare(bars, STAGES, 2)
    cuda.syncthreads()
    if t == CONSUMERS:
        hopper.map_acquire(map_a)
        hopper.map_acquire(map_b)
        stage, phase = int32(0), int32(0)
        for i in range(blocks):
            full = int32(bars + 16 * stage)
            hopper.mbarrier_wait(full + 8, phase ^ 1)  # both consumers have read what was there
            hopper.mbarrier_expect(full, WIDE)
            to = int32(base + stage * WIDE)
            fetch(to, full, map_a, map_b, int32(i * DEPTH), row, column)
            stage, phase = advance(stage, phase, STAGES)
    if t < CONSUMERS:
        if t & 127 == 0:
            hopper.map_acquire(map_c)
        acc = cuda.local.array(SUMS, float32)
        accumulate(acc, base, bars, int32(0), int32(0), blocks, t)
        store(acc, boxes, map_c, int32(row + (t >> 7) * ROWS), column, t)
        if t & 127 == 0:
            hopper.bulk_wait()


# %% sec-wgmma-persistent
GROUP = 2048  # rows of C that go together: 132 tiles of 128 x 256 are about 2048 x 2048


def tile_at(i, down, across, group):
    """Where tile i is, in tiles: `group` rows of them at a time, and down the rows first."""
    first = int32(ptx.divide(i, group * across) * group)
    high = int32(min(group, down - first))  # the last group may have fewer rows
    rest = int32(i - first * across)
    y = ptx.divide(rest, high)
    return int32(first + rest - y * high), y


def make_produce(
    stages: int, rows: int, cluster: int, fetch: Callable[..., None]
) -> Callable[..., None]:
    """produce(base, bars, map_a, map_b, down, across, blocks): one thread fills a ring for all
    tiles of its block, which has `rows` of C and is one of `cluster` along m."""
    size, group = B_BYTES + rows * DEPTH * 2, GROUP // (rows * cluster)

    def produce(base, bars, map_a, map_b, down, across, blocks):
        hopper.map_acquire(map_a)
        hopper.map_acquire(map_b)
        stage, phase = int32(0), int32(0)
        rank, tile = int32(cuda.blockIdx.x % cluster), int32(cuda.blockIdx.x // cluster)
        while tile < down * across:
            x, y = tile_at(tile, down, across, group)
            row, column = int32((x * cluster + rank) * rows), int32(y * COLUMNS)
            for i in range(blocks):
                full, to = int32(bars + 16 * stage), int32(base + stage * size)
                hopper.mbarrier_wait(full + 8, phase ^ 1)
                hopper.mbarrier_expect(full, size)
                fetch(to, full, map_a, map_b, int32(i * DEPTH), row, column)
                stage, phase = advance(stage, phase, stages)
            tile = int32(tile + cuda.gridDim.x // cluster)

    return produce


def make_consume(cluster: int, release: Callable[..., None]) -> Callable[..., None]:
    """consume(base, bars, map_c, down, across, blocks, t): two warpgroups, 64 rows of each tile."""
    accumulate = make_accumulate(STAGES, WIDE, release)
    group = GROUP // (2 * ROWS * cluster)

    def consume(base, bars, map_c, down, across, blocks, t):
        boxes, acc = int32(base + STAGES * WIDE), cuda.local.array(SUMS, float32)
        stage, phase = int32(0), int32(0)
        rank, tile = int32(cuda.blockIdx.x % cluster), int32(cuda.blockIdx.x // cluster)
        while tile < down * across:
            x, y = tile_at(tile, down, across, group)
            row = int32((x * cluster + rank) * (2 * ROWS) + (t >> 7) * ROWS)
            stage, phase = accumulate(acc, base, bars, stage, phase, blocks, t)
            store(acc, boxes, map_c, row, int32(y * COLUMNS), t)
            tile = int32(tile + cuda.gridDim.x // cluster)

    return consume


# For tiles of 128 x 256, by a block that shares nothing.
produce_alone, consume_alone = make_produce(STAGES, 2 * ROWS, 1, fetch), make_consume(1, release)


def persistent(map_a, map_b, map_c, down, across, blocks):
    """As many blocks as multiprocessors, each from tile to tile; fetches go on between tiles."""
    shared = cuda.shared.array(0, int8)
    base, t = aligned(ptx.shared_address(shared)), int32(cuda.threadIdx.x)
    bars = int32(base + STAGES * WIDE + 4 * BOX)
    prepare(bars, STAGES, 2)
    cuda.syncthreads()
    if t == CONSUMERS:
        produce_alone(base, bars, map_a, map_b, down, across, blocks)
    if t < CONSUMERS:
        if t & 127 == 0:
            hopper.map_acquire(map_c)
        consume_alone(base, bars, map_c, down, across, blocks, t)
        if t & 127 == 0:
            hopper.bulk_wait()


# %% sec-wgmma-multicast
def fetch_shared(to, full, map_a, map_b, k, row, column):
    """As `fetch`, but half of B into both blocks of the cluster; the other block sends the rest.
    All of it counts on `full`."""
    rank = int32(cuda.blockIdx.x & 1)
    half, first = int32(to + rank * (B_BYTES // 2)), int32(column + rank * (COLUMNS // 2))
    hopper.tma_load_multicast(half, map_b, k, first, full, 3)
    hopper.tma_load(to + B_BYTES, map_a, k, row, full)


def release_both(empty, t):
    """A warpgroup gives a stage back to both blocks, by one thread for each."""
    if t & 127 < 2:
        hopper.mbarrier_arrive_at(empty, t & 127)


def meet():
    """All threads of the cluster wait for each other."""
    hopper.cluster_arrive()
    hopper.cluster_wait()


# For tiles of 128 x 256, by blocks of a pair.
produce_shared = make_produce(STAGES, 2 * ROWS, 2, fetch_shared)
consume_shared = make_consume(2, release_both)  # of the same


def multicast(map_a, map_b, map_c, down, across, blocks):
    """Two blocks multiply tiles below each other, and each fetches half of B for both."""
    shared = cuda.shared.array(0, int8)
    base, t = aligned(ptx.shared_address(shared)), int32(cuda.threadIdx.x)
    bars = int32(base + STAGES * WIDE + 4 * BOX)
    prepare(bars, STAGES, 4)
    meet()  # the other block's barriers are there
    if t == CONSUMERS:
        produce_shared(base, bars, map_a, map_b, down, across, blocks)
    if t < CONSUMERS:
        if t & 127 == 0:
            hopper.map_acquire(map_c)
        consume_shared(base, bars, map_c, down, across, blocks, t)
        if t & 127 == 0:
            hopper.bulk_wait()
    meet()  # the other block may still write and arrive here


# %% sec-wgmma-pingpong
accumulate_own = make_accumulate(STAGES, STAGE, release_both)  # of 64 x 256, in a pair


def consume_in_turn(base, bars, map_c, down, across, blocks, t):
    """Two warpgroups, every other tile each; while one multiplies the other puts its tile away."""
    boxes, acc = int32(base + STAGES * STAGE), cuda.local.array(SUMS, float32)
    c, turns = int32(t >> 7), int32(bars + 16 * STAGES)
    turn, step = int32(c ^ 1), int32(cuda.gridDim.x >> 1)
    stage, phase = skip(int32(0), int32(0), STAGES, c * blocks)
    tile = int32((cuda.blockIdx.x >> 1) + c * step)
    while tile < down * across:
        x, y = tile_at(tile, down, across, GROUP // (2 * ROWS))
        row = int32((2 * x + (cuda.blockIdx.x & 1)) * ROWS)
        hopper.mbarrier_wait(turns + 8 * c, turn)  # the other has multiplied its tile
        stage, phase = accumulate_own(acc, base, bars, stage, phase, blocks, t & 127)
        if t & 127 == 0:
            hopper.mbarrier_arrive(turns + 8 * (c ^ 1))
        store(acc, boxes, map_c, row, int32(y * COLUMNS), t)
        stage, phase = skip(stage, phase, STAGES, blocks)
        tile, turn = int32(tile + 2 * step), int32(turn ^ 1)


produce_in_turn = make_produce(STAGES, ROWS, 2, fetch_shared)  # for tiles of 64 x 256, in a pair


def ping_pong(map_a, map_b, map_c, down, across, blocks):
    """Of two consumers one multiplies while the other puts its tile away."""
    shared = cuda.shared.array(0, int8)
    base, t = aligned(ptx.shared_address(shared)), int32(cuda.threadIdx.x)
    bars = int32(base + STAGES * STAGE + 4 * BOX)
    if t == 0:
        hopper.mbarrier_init(bars + 16 * STAGES, 1)  # the turn of consumer 0
        hopper.mbarrier_init(bars + 16 * STAGES + 8, 1)
    prepare(bars, STAGES, 2)  # a stage is read by one consumer of each block
    meet()
    if t == CONSUMERS:
        produce_in_turn(base, bars, map_a, map_b, down, across, blocks)
    if t < CONSUMERS:
        if t & 127 == 0:
            hopper.map_acquire(map_c)
        consume_in_turn(base, bars, map_c, down, across, blocks, t)
        if t & 127 == 0:
            hopper.bulk_wait()
    meet()


TALL = Rung(with_producer, threads=CONSUMERS + 32, rows=2 * ROWS, stages=STAGES)  # 128 x 256
# Name -> rung. "TMA, one block" is given so much shared memory that no second block fits.
RUNGS = {
    "by hand": Rung(by_hand, maps=False),
    "TMA, one block": Rung(by_tma, stages=4),
    "TMA": Rung(by_tma),
    "ring of 2": Rung(make_ring(2), stages=2),
    "ring of 4": Rung(make_ring(4), stages=4),
    "producer": TALL,
    "persistent": TALL._replace(function=persistent, persistent=True),
    "multicast": TALL._replace(function=multicast, persistent=True, cluster=2),
    "ping-pong": TALL._replace(function=ping_pong, persistent=True, cluster=2, rows=ROWS),
}
