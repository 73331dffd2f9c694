# Made from book/14a-gradients-between-gpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-exchange-buckets
"""Which rank has what of a model's flat buffers: buckets of them, and each rank's parts of these.

Left out: how anything gets from one rank to another (nccl.py, peer_copies.py, collectives.py).
R ranks, N elements of a flat buffer.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nanoeuler.engines.gpu.rows.adamw import segments
from nanoeuler.engines.gpu.step.program import NOWHERE, Array
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import PADDING, Weights, flat_size

# A bucket's bytes at least, but for the last two: one layer of the large presets. Reducing one of
# euler-116m took 0.12 ms beside attention, whose backward took longer at 64 sequences.
LEAST = 16 << 20


def padded(length: int, size: int) -> int:
    """A flat buffer's length with zeros behind it, so that `size` ranks can share all of it."""
    quantum = PADDING * size
    return -(-length // quantum) * quantum


class Bucket(NamedTuple):
    """The elements from start to stop of a flat buffer, which are exchanged at once.

    block: the lowest in it, whose gradients complete it; n_blocks for what stands behind the blocks
    and -1 for what stands before. held: where a rank's part begins in its shard.
    """

    start: int
    stop: int
    block: int
    held: int


def names_of(config: ModelConfig) -> Weights:
    """Names, shapes and places in a flat buffer, without memory."""
    flat = Array(NOWHERE, 0, (flat_size(config),), np.dtype(np.float32), (4,))
    return Weights(config, np.float32, flat)


def buckets_of(weights: Weights, size: int, least: int = LEAST) -> list[Bucket]:
    """The buckets, in the order in which gradients become complete: from the end."""
    quantum, made, held = PADDING * size, [], 0
    stop = padded(weights.flat.shape[0], size)
    for block in reversed(range(-1, len(weights.block_starts))):
        start = -(-weights.block_starts[block] // quantum) * quantum if block >= 0 else 0
        if start < stop and (4 * (stop - start) >= least or block <= 0):
            made.append(Bucket(start, stop, block, held))
            held += (stop - start) // size
            stop = start
    return made


class Sharing:
    """Who of `size` ranks has what. length: of a flat buffer with its padding.

    read: (start, stop) of what all read in float32 beside copies: tables' bucket, and each norm.
    """

    def __init__(self, weights: Weights, size: int, least: int = LEAST) -> None:
        self.size, self.length = size, padded(weights.flat.shape[0], size)
        self.buckets = buckets_of(weights, size, least)
        norms = (part for part in segments(weights) if part.copy < 0)
        self.read = [(0, self.buckets[-1].stop)]
        self.read += [(norm.start, norm.start + norm.length) for norm in norms]

    def part(self, bucket: Bucket, rank: int) -> slice:
        """A rank's part of a bucket, in the flat buffer."""
        each = (bucket.stop - bucket.start) // self.size
        return slice(bucket.start + rank * each, bucket.start + (rank + 1) * each)

    def held(self, bucket: Bucket) -> slice:
        """A rank's part of a bucket, in its shard."""
        return slice(bucket.held, bucket.held + (bucket.stop - bucket.start) // self.size)

    def shard(self, flat: np.ndarray, rank: int) -> np.ndarray:
        """What of a flat buffer (N,) a rank keeps, (length / R,)."""
        flat = self.pad(flat)
        return np.concatenate([flat[self.part(bucket, rank)] for bucket in self.buckets])

    def pad(self, flat: np.ndarray) -> np.ndarray:
        """A flat buffer (N,) with zeros behind it, (length,)."""
        return np.pad(flat, (0, self.length - len(flat)))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(start, stop, rank, held) of what each rank owns of a span of the flat buffer, and where
        that begins in its shard."""
        for bucket in self.buckets:
            for rank in range(self.size):
                part = self.part(bucket, rank)
                first, last = max(start, part.start), min(stop, part.stop)
                if first < last:
                    yield first, last, rank, bucket.held + first - part.start
