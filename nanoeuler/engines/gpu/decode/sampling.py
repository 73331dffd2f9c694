# Made from book/q-token-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gputoken-ends
"""What begins a pass over new tokens, and what ends it on the device: embedding, choice of a token.

lines (R, 4) int32: of each row its token, its position and the text it belongs to, and a word that
is free. A row whose position is negative is not there: nothing of it is kept.
"""

from functools import cache

from nanoeuler.engines.gpu.decode.gemv import LINE, TILE, Shape, starts
from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.engines.gpu.lang.vectors import make_load, make_store
from nanoeuler.engines.gpu.rows.block_reduce import block_max

EMBED_THREADS = 128  # of a row: 768 channels of bf16 are 96 loads of 16 bytes
PICK_THREADS = 1024  # of a row: 50,257 logits in 13 rounds of 16 bytes
AHEAD = 4            # loads of a thread before it compares


@cache
def enter_kernel(shape: Shape, learned: bool, early: bool = False) -> Kernel:
    """enter(table, positions, lines, x): x (R, C) float32 = rows of a packed table.

    The table is packed as the output matrix is, which it may be: a row of it lies in pieces of 64
    bytes, one for each tile. positions (context, C) float32 are added if they are learned.
    """
    width, columns, whole = shape.width, shape.inputs, shape.warps * shape.tiles
    load, store = make_load(shape.kind, width), make_store("float32", 4)
    load_float, deep = make_load("float32", width), 4 * width
    first, ready, target = starts(early)

    def enter(table, positions, lines, x):
        first()
        ready()
        row = int64(cuda.blockIdx.x)
        values, others = cuda.local.array(width, float32), cuda.local.array(width, float32)
        token, position, _, _ = ptx.load_own_int4(lines + row * LINE)
        tile = table + int64(token >> 3) * (whole * TILE) + (token & 7) * 64
        for column in range(int32(cuda.threadIdx.x) * width, columns, EMBED_THREADS * width):
            n, rest = int32(column // deep), int32(column % deep)
            load(values, 0, tile + n * TILE + (rest // width) * 16)
            if learned:
                at = int64(max(position, 0)) * columns + column
                load_float(others, 0, positions + at * 4)
                for k in range(width):
                    values[k] += others[k]
            for k in range(0, width, 4):
                store(values, k, x + (row * columns + column + k) * 4)

    return Kernel(enter, "l l l l", EMBED_THREADS, 0, 1, 1, target, early=early)


@cache
def pick_kernel(vocabulary: int, context: int, threads: int, early: bool = False) -> Kernel:
    """pick(logits, stride, lines, said): the most probable token of each row is its next.

    logits (R, stride) float32; of equal ones the smallest id. A row that is there, and not at the
    end of the context, goes on to its next position, and said (R, context) int32 holds at each
    position what was chosen for it.
    """
    first, ready, target = starts(early)
    last, many = context - 1, 4 * AHEAD

    def pick(logits, stride, lines, said):
        first()
        ready()
        t, row = int32(cuda.threadIdx.x), int64(cuda.blockIdx.x)
        mine, name = float32(LEAST), int32(vocabulary)
        values = cuda.local.array(many, float32)
        for start in range(t * 4, vocabulary, threads * many):
            for i in range(AHEAD):
                k, at = 4 * i, int32(start + i * threads * 4)
                values[k], values[k + 1], values[k + 2], values[k + 3] = ptx.load_float4_if_below(
                    logits + (row * stride + at) * 4, at, vocabulary)
            for k in range(many):
                at = int32(start + (k >> 2) * threads * 4 + (k & 3))
                if at < vocabulary and values[k] > mine:
                    mine, name = values[k], at
        best = block_max(mine, float32(LEAST), threads // 32)
        cuda.syncthreads()  # all have read what the next maximum overwrites
        own = float32(-name) if mine == best else float32(-vocabulary)
        name = min(int32(-block_max(own, float32(-vocabulary), threads // 32)), vocabulary - 1)
        if t == 0:
            _, position, _, _ = ptx.load_own_int4(lines + row * LINE)
            if 0 <= position < last:
                ptx.store_int2(lines + row * LINE, int32(name), int32(position + 1))
                ptx.store_int(said + (row * context + position + 1) * 4, int32(name))

    return Kernel(pick, "l r l l", threads, 0, 1, 1, target, early=early)


LEAST = -3.0e38  # below every logit that is a number
