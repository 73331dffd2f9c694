"""Wrong answers to the exercises of chapter 11: each must be refused by its check."""

import numpy as np

from nanoeuler import emulator
from nanoeuler.book.build import code_cells
from nanoeuler.engines.gpu import ladder
from nanoeuler.engines.gpu.lang.instruction import cuda, float32
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch
from nanoeuler.files import project_root

CHAPTER = "11-a-gpu"
NAMES = dict(np=np, emulator=emulator, ladder=ladder, cuda=cuda, float32=float32, Kernel=Kernel,
             Launch=Launch)  # fmt: skip
# The judge of a launch, as the chapter defines it before its first exercise.
_TEXT = (project_root() / "book" / f"{CHAPTER}.md").read_text(encoding="utf-8")
(_CELL,) = (cell for _, cell in code_cells(_TEXT) if cell[0].startswith("def verdict("))
exec("\n".join(_CELL), NAMES)

PUT = "tile[down + k, along ^ (down + k)] = x[row + down + k, column + along]"
TAKE = "y[column + down + k, row + along] = tile[along, along ^ (down + k)]"
BETWEEN = f"{PUT}\n    cuda.syncthreads()\n    for k in range(0, 32, 8):\n        {TAKE}"
# (exercise, what is wrong, text of the solution, what it becomes)
# fmt: off
ANSWERS = [
    ("swizzled", "a column is in one bank", BETWEEN, BETWEEN.replace(" ^ (down + k)]", "]")
     .replace("tile[along, along]", "tile[along, down + k]")),
    ("swizzled", "padded after all", "shared.array((32, 32)", "shared.array((32, 33)"),
    ("swizzled", "put down as it was", PUT, PUT.replace(" ^ (down + k)]", "]")),
    ("swizzled", "taken as it was", TAKE, TAKE.replace("along ^ (down + k)]", "down + k]")),
    ("swizzled", "no barrier", "cuda.syncthreads()", "pass"),
    ("swizzled", "or for exclusive or", " ^ ", " | "),
    ("swizzled", "and for exclusive or", " ^ ", " & "),
    ("swizzled", "a step of eight rows does not count", "(down + k)", "down"),
    ("swizzled", "only the step counts", "(down + k)", "k"),
    ("swizzled", "turned by two a row: two to a bank", BETWEEN,
     BETWEEN.replace("along ^ (down + k)] =", "(along + 2 * (down + k)) % 32] =")
     .replace("along ^ (down + k)]", "(down + k + 2 * along) % 32]")),
    ("swizzled", "eight banks of the 32", " ^ (down + k)", " ^ (down + k) % 8"),
    ("swizzled", "the last rows are not put down", "range(0, 32, 8)", "range(0, 24, 8)"),
    ("swizzled", "not turned", "y[column + down + k, row + along]",
     "y[row + along, column + down + k]"),
    ("swizzled", "written in columns", BETWEEN,
     BETWEEN.replace(TAKE, "y[column + along, row + down + k] = "
                           "tile[down + k, along ^ (down + k)]")),
    ("swizzled", "blocks of the transpose exchanged", "blockIdx.x * 32, cuda.blockIdx.y",
     "blockIdx.y * 32, cuda.blockIdx.x"),
    ("sums", "no barrier", "cuda.syncthreads()", "pass"),
    ("sums", "every warp adds all rows", "range(warp, x.shape[0], 8)", "range(0, x.shape[0], 1)"),
    ("sums", "the first rows are left out", "range(warp, x.shape[0], 8)",
     "range(8 + warp, x.shape[0], 8)"),
    ("sums", "a warp too few is added", "range(1, 8)", "range(1, 7)"),
    ("sums", "the first warp counts twice", "range(1, 8)", "range(8)"),
    ("sums", "the others overwrite", "value += share", "value = share"),
    ("sums", "every warp adds up and writes", "if warp == 0:", "if warp >= 0:"),
    ("sums", "the last warp adds up its own twice", "if warp == 0:", "if warp == 7:"),
    ("sums", "lanes and warps exchanged", "threadIdx.x // 32, cuda.threadIdx.x % 32",
     "threadIdx.x % 8, cuda.threadIdx.x // 8"),
    ("sums", "a block too few", "x.shape[1] // 32", "x.shape[1] // 32 - 1"),
    ("sums", "a block too many", "x.shape[1] // 32", "x.shape[1] // 32 + 1"),
    ("sums", "blocks overlap", "blockIdx.x * 32", "blockIdx.x * 16"),
    ("sums", "each warp keeps one place", "share[warp, lane] = value", "share[0, lane] = value"),
    ("sums", "by atomic additions", "share[warp, lane] = value",
     "cuda.atomic.add(y, column, value)"),
    ("bytes", "a height for a width", "N // w", "N // h"),
    ("bytes", "a width for a height", "M // h", "M // w"),
    ("bytes", "numbers, not bytes", "4 * ", ""),
    ("bytes", "eight bytes a number", "4 * ", "8 * "),
    ("bytes", "a alone", " + K * N * M // h", ""),
    ("bytes", "b alone", "M * K * N // w + ", ""),
    ("bytes", "each once", "M * K * N // w + K * N * M // h", "M * K + K * N"),
    ("bytes", "square tiles", "4 * (M * K * N // w + K * N * M // h)", "8 * M * N * K // w"),
    ("bytes", "tiles as high as wide", "4 * (M * K * N // w + K * N * M // h)",
     "8 * M * N * K // h"),
    ("bytes", "a tile's area", "4 * (M * K * N // w + K * N * M // h)", "8 * M * N * K // (h * w)"),
    ("bytes", "c is read too", "M // h)", "M // h + M * N)"),
    ("bytes", "the mean of both", "4 * (M * K * N // w + K * N * M // h)",
     "16 * M * N * K // (h + w)"),
]
