# Made from book/11c-loss-and-update.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-update-cap
"""Soft-capped logits on a GPU: y = c tanh(z / c) in place before the loss, the slopes after it.

    logits, slopes (rows, columns) bf16 or float32, columns in eights

A thread has a piece of 16 bytes. Left out: doing it where the logits are made, or inside the kernel
of cross-entropy, which would spare six passes over memory.
"""

import functools
from typing import Any

from nanoeuler.engines.gpu.lang import vectors
from nanoeuler.engines.gpu.lang.instruction import cuda, float32, int32, int64
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, cover
from nanoeuler.engines.gpu.tile.curves import sigmoid
from nanoeuler.errors import UserError

THREADS = 256  # of a block


@functools.cache
def cap_kernel(kind: str, sloped: bool) -> Kernel:
    """Thread i caps piece i; slopes, if sloped, are 1 - (y / c)^2. tanh x = 2 sigmoid(2x) - 1."""
    width = vectors.piece(kind)
    load, store = vectors.make_load(kind, width, own=True), vectors.make_store(kind, width)

    def cap_logits(logits, slopes, pieces, cap, inverse):
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        values, slope = cuda.local.array(width, float32), cuda.local.array(width, float32)
        if i < pieces:
            at = int64(i) * 16
            load(values, 0, logits + at)
            for k in range(width):
                share = float32(2) * sigmoid(values[k] * inverse) - float32(1)
                values[k], slope[k] = cap * share, float32(1) - share * share
            store(values, 0, logits + at)
            if sloped:
                store(slope, 0, slopes + at)

    return Kernel(cap_logits, "l l r f f", THREADS, target=(8, 0))


@functools.cache
def slopes_kernel(kind: str) -> Kernel:
    """Thread i multiplies piece i of the gradients by its slopes."""
    width = vectors.piece(kind)
    load, store = vectors.make_load(kind, width, own=True), vectors.make_store(kind, width)

    def by_slopes(gradients, slopes, pieces):
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        values, slope = cuda.local.array(width, float32), cuda.local.array(width, float32)
        if i < pieces:
            at = int64(i) * 16
            load(values, 0, gradients + at)
            load(slope, 0, slopes + at)
            for k in range(width):
                values[k] *= slope[k]
            store(values, 0, gradients + at)

    return Kernel(by_slopes, "l l r", THREADS, target=(8, 0))


def _pieces(logits, slopes):
    """The kind of logits, and their pieces of 16 bytes. UserError for what does not fit."""
    (rows, columns), kind = logits.shape, vectors.kind_of(logits)
    if columns % vectors.STEP:
        raise UserError(f"columns of logits that are capped come in eights, not {columns}")
    for name, array in {"logits": logits, "slopes": slopes}.items():
        if array is not None:
            vectors.expect(name, array, (rows, columns), kind)
    pieces = rows * columns // vectors.piece(kind)
    if not 0 < pieces < 1 << 31:
        raise UserError(f"{rows} x {columns} logits are none, or more than one launch caps")
    return kind, pieces


def cap_launch(logits: Any, slopes: Any, cap: float) -> Launch:
    """Cap logits (rows, columns) in place at cap > 0; slopes: an array like them, or None.

    Bytes of a logit: read once, written once, and its slope written. Equation eq-modern-cap.
    """
    kind, pieces = _pieces(logits, slopes)
    kernel = cap_kernel(kind, slopes is not None)
    args = logits, vectors.given(slopes), pieces, float(cap), 2 / cap
    return Launch(kernel, (cover(pieces, THREADS),), args)


def slopes_launch(gradients: Any, slopes: Any) -> Launch:
    """gradients (rows, columns) times slopes, in place: from dy to dz. Equation eq-modern-cap."""
    kind, pieces = _pieces(gradients, slopes)
    return Launch(slopes_kernel(kind), (cover(pieces, THREADS),), (gradients, slopes, pieces))
