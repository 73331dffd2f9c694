"""The products of a compiled reader's matrices, one by one, where and with what its pass has them.

The pass is compiled for each form of matrices, which takes half a minute; a product alone takes a
second. What is wrong with a form shows itself here, or where the reader makes its room.
"""

from collections.abc import Iterator

import numpy as np

from nanoeuler.engines.cpu import decode
from nanoeuler.engines.cpu.decode import CpuReader

ROWS = 5


def products(reader: CpuReader) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(x (ROWS, depth), x as it was rounded, x times the matrix (ROWS, columns)) of each matrix.

    First those of the blocks, then the output matrices. x is rounded only for matrices in four
    bits; `rounded` is float64, and says nothing in other forms.
    """
    rng, room = np.random.default_rng(0), reader._room
    whole, none = (room.whole[0], room.scales[0], room.wide[0]), np.zeros(0, np.float32)
    for panels in reader._panels:
        for i, (_, count, depth, _) in enumerate(panels.matrices.places):
            x = rng.standard_normal((ROWS, depth)).astype(np.float32)
            out = np.zeros((ROWS, count * decode.PANEL), np.float32)
            decode._product(panels.matrices, i, decode.Worker(ROWS, 0, 1), x, none, out, whole)
            rounded = (whole[0][:ROWS] * whole[1][:ROWS, :, :1].astype(float)).reshape(ROWS, -1)
            yield x, rounded[:, :depth], out
