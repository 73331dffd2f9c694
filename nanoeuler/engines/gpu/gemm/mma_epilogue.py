# Made from book/11c-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-mma-out
"""What becomes of a warp's sums: bias, GELU, residual; out to C in pieces of 16 bytes.

acc are a lane's 128 sums: 4 (8 i + j) to 4 (8 i + j) + 3 are of rows 16 i + g and 16 i + g + 8,
two columns each from 8 j + 2 (lane & 3) on, with g = lane >> 2 (chapter 11c has the table).
"""

from typing import Any

from nanoeuler.engines.gpu.gemm.mma_form import MmaForm
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.ptx import (
    copy_async_part,
    copy_commit,
    copy_wait,
    high_bf16,
    load_float2_if,
    load_if_below,
    load_shared_int,
    load_shared_int4,
    low_bf16,
    pack_bf16,
    store_float2_if,
    store_int4,
    store_shared_int,
    store_short,
    tanh_approx,
)

wait_all = copy_wait(0)  # for all of the thread's copies


def gelu_tangent(x):
    """t of GELU(x) = x/2 (1 + t), tanh form; and x squared."""
    square = x * x
    return tanh_approx(x * (float32(0.7978845608) + float32(0.0356774081) * square)), square


def gelu(x):
    """GELU, tanh form, of a float32: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    t, _ = gelu_tangent(x)
    half = float32(0.5) * x
    return half + half * t


def make_bias(form: MmaForm) -> Any:
    """bias(acc, address, column, n, lane): acc = f(acc + bias), f GELU or nothing."""
    curved = form.epilogue == "bias and gelu"

    def curve(x):
        return gelu(x) if curved else x

    def bias(acc, address, column, n, lane):
        for j in range(8):
            at = int32(column + j * 8 + (lane & 3) * 2)
            pair = load_if_below(address + int64(at) * 2, at, n)
            low, high = low_bf16(pair), high_bf16(pair)
            for i in range(4):
                q = 32 * i + 4 * j
                acc[q] = curve(acc[q] + low)
                acc[q + 1] = curve(acc[q + 1] + high)
                acc[q + 2] = curve(acc[q + 2] + low)
                acc[q + 3] = curve(acc[q + 3] + high)

    return bias


def add_residual(acc, box, address, row, column, m, n, pitch, lane):
    """acc += a tile of a bf16 array, which comes by way of the warp's box."""
    chunk = int32(lane & 7)
    size = int32(min(max((n - column - chunk * 8) * 2, 0), 16))
    for p in range(16):
        r = int32(p * 4 + (lane >> 3))
        at = address + (int64(row + r) * pitch + column + chunk * 8) * 2
        to = int32(box + r * 128 + ((chunk ^ (r & 7)) << 4))
        copy_async_part(to, at, size if row + r < m else int32(0))
    copy_commit()
    wait_all()
    cuda.syncwarp()
    g = int32(lane >> 2)
    own = int32(box + g * 128 + (g << 4) + (lane & 3) * 4)
    for i in range(4):
        for j in range(8):
            q = 32 * i + 4 * j
            above = load_shared_int((own ^ (j << 4)) + i * 2048)
            below = load_shared_int((own ^ (j << 4)) + i * 2048 + 1024)
            acc[q] += low_bf16(above)
            acc[q + 1] += high_bf16(above)
            acc[q + 2] += low_bf16(below)
            acc[q + 3] += high_bf16(below)


def put_box(acc, box, lane):
    """A warp's sums as bf16 into its box: 64 rows of 128 bytes, swizzled."""
    g = int32(lane >> 2)
    own = int32(box + g * 128 + (g << 4) + (lane & 3) * 4)
    for i in range(4):
        for j in range(8):
            q = 32 * i + 4 * j
            to = int32((own ^ (j << 4)) + i * 2048)
            store_shared_int(to, pack_bf16(acc[q], acc[q + 1]))
            store_shared_int(to + 1024, pack_bf16(acc[q + 2], acc[q + 3]))
    cuda.syncwarp()


def put_edge(address, words, count):
    """The first `count` of 8 bf16, one by one."""
    for i in range(4):
        if 2 * i < count:
            store_short(address + 4 * i, words[i])
        if 2 * i + 1 < count:
            store_short(address + 4 * i + 2, words[i] >> 16)


def send_box(box, address, row, column, m, n, pitch, lane):
    """A warp's box to C: 16 bytes a lane, eight lanes a row."""
    chunk = int32(lane & 7)
    count = int32(n - column - chunk * 8)
    for p in range(16):
        r = int32(p * 4 + (lane >> 3))
        words = load_shared_int4(box + r * 128 + ((chunk ^ (r & 7)) << 4))
        at = address + (int64(row + r) * pitch + column + chunk * 8) * 2
        if row + r < m:
            if count >= 8:
                store_int4(at, words[0], words[1], words[2], words[3])
            else:
                put_edge(at, words, count)


def make_wide(add: bool) -> Any:
    """wide(acc, address, row, column, m, n, pitch, lane): the sums to a float32 C, or added."""

    def put(at, x, y, count):
        if add:
            old_x, old_y = load_float2_if(at, count)
            x += old_x
            y += old_y
        store_float2_if(at, x, y, count)

    def wide(acc, address, row, column, m, n, pitch, lane):
        down, across = int32(row + (lane >> 2)), int32(column + (lane & 3) * 2)
        for i in range(4):
            above, below = int32(down + 16 * i), int32(down + 16 * i + 8)
            at = address + (int64(above) * pitch + across) * 4
            lower = at + int64(32) * pitch
            for j in range(8):
                q = 32 * i + 4 * j
                count = int32(n - across - 8 * j)
                put(at + 32 * j, acc[q], acc[q + 1], count if above < m else int32(0))
                put(lower + 32 * j, acc[q + 2], acc[q + 3], count if below < m else int32(0))

    return wide


def make_finish(form: MmaForm) -> Any:
    """finish(acc, box, c, aux, row, column, m, n, pitch, of_aux, lane): a warp's tile to C."""
    bias, wide = make_bias(form), make_wide(form.epilogue == "add")
    biased, residual = "bias" in form.epilogue, form.epilogue == "residual"
    narrow = form.out == "bf16"

    def finish(acc, box, c, aux, row, column, m, n, pitch, of_aux, lane):
        if biased:
            bias(acc, aux, column, n, lane)
        if residual:
            add_residual(acc, box, aux, row, column, m, n, of_aux, lane)
        if narrow:
            put_box(acc, box, lane)
            send_box(box, c, row, column, m, n, pitch, lane)
        else:
            wide(acc, c, row, column, m, n, pitch, lane)

    return finish
