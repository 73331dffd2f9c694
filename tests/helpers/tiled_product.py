"""A product with tiles in shared memory, for what tests the paper and what times it."""

from collections.abc import Callable

from nanoeuler.engines.gpu.lang.instruction import cuda, float32


def make_product(tile: int, barriers: str = "both") -> Callable:
    """c = a b, of sizes that are multiples of the tile; of its two barriers "both" or one."""

    def tiles(a, b, c):
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        row, column = cuda.blockIdx.y * tile + y, cuda.blockIdx.x * tile + x
        a_tile = cuda.shared.array((tile, tile), float32)
        b_tile = cuda.shared.array((tile, tile), float32)
        total = float32(0)
        for start in range(0, a.shape[1], tile):
            a_tile[y, x] = a[row, start + x]
            b_tile[y, x] = b[start + y, column]
            if barriers != "second":
                cuda.syncthreads()
            for k in range(tile):
                total += a_tile[y, k] * b_tile[k, x]
            if barriers != "first":
                cuda.syncthreads()
        c[row, column] = total

    return tiles
