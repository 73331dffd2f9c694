# Made from book/20-is-it-any-good.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-eval-gpu
"""Whether the target is the likeliest token: a question about each row of logits.

Leaves out how likely it is: that is cross_entropy.py.
"""

from typing import Any

from nanoeuler.engines.gpu.lang import ptx
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.engines.gpu.lang.vectors import expect
from nanoeuler.engines.gpu.rows.block_reduce import block_max
from nanoeuler.errors import UserError

THREADS = 512  # of a row: 50,257 logits in 25 rounds of 16 bytes


def likeliest(logits, targets, flags, start, columns, width):
    """Index table: block -> row; thread t -> columns 4t .. 4t + 3, and so on 4 THREADS further."""
    t, n = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
    target = ptx.load_int(targets + 4 * int64(start + n))
    if target < 0 or target >= columns:
        if t == 0:
            ptx.store_float(flags + 4 * int64(start + n), float32(0))
        return
    row, beaten = logits + 4 * int64(n) * width, float32(0)
    own = ptx.load_float(row + 4 * int64(target))
    x = cuda.local.array(4, float32)
    for at in range(4 * t, columns, 4 * THREADS):
        x[0], x[1], x[2], x[3] = ptx.load_float4_if_below(row + 4 * int64(at), at, columns)
        for k in range(4):
            below = x[k] < own or (x[k] == own and at + k >= target)  # a nan is neither
            if at + k < columns and not below:
                beaten = float32(1)
    beaten = block_max(beaten, float32(0), THREADS // 32)
    if t == 0:
        ptx.store_float(flags + 4 * int64(start + n), float32(float32(1) - beaten))


# Of any number of columns.
LIKELIEST = Kernel(likeliest, "l l l r r r", THREADS, target=(8, 0))


def likeliest_launch(logits: Any, targets: Any, flags: Any, columns: int, first: int = 0) -> Launch:
    """Whether the targets of rows first, first + 1, ... of a batch have the largest logits.

    logits float32 (n, width), of which `columns` count; targets int32 and flags float32 (rows, 1)
    of the whole batch. A flag is 1 or 0; of equal logits the first is the largest, as argmax has
    it, and a target that is no token has none. Bytes: each counted logit is read once.
    """
    (rows, width), (whole, _) = logits.shape, targets.shape
    expect("logits", logits, (rows, width), "float32")
    expect("targets", targets, (whole, 1), "int32")
    expect("flags", flags, (whole, 1), "float32")
    if width % 4 or not 1 <= columns <= width or not 0 <= first <= whole - rows:
        raise UserError(f"expected {rows} rows from {first} on of {whole}, and {columns} columns "
                        f"in rows of {width}, a multiple of 4: they do not fit")  # fmt: skip
    return Launch(LIKELIEST, (rows,), (logits, targets, flags, first, columns, width))
